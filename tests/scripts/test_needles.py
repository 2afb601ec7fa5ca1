"""scripts/needles.py on a small scale: what it writes, that it goes on, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import needles
from gpt_fast_sd import Engine
from gpt_fast_sd.loading import BUNDLED
from tests.helpers import Refuses

NEEDLES = f"--text {BUNDLED / 'document.txt'} --lengths 192 --n 3 --budget 64 --batch-size 2".split()
NEEDLES += ["--draft", "streaming,guided", "--kinds", "needle,prose"]


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_needles_writes_counts_and_spread_of_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refuses: Refuses
) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "needles.json", tmp_path / "needles.png"
    needles.main([*NEEDLES, "--json", str(file), "--plot", str(picture)])
    document = read(file)
    assert [(r["kind"], r["length"], len(r["right"])) for r in document["results"]] == [
        ("needle", 192, 3), ("prose", 192, 3),
    ]  # fmt: skip
    assert [len(s["prompts"]) for r in document["results"] for s in r["settings"]] == [3, 3, 3, 3]
    overall = [r for r in document["summary"] if r["prompts"] == "all"]
    assert [(r["kind"], r["policy"]) for r in overall] == [
        ("needle", "streaming"), ("needle", "guided"), ("prose", "streaming"), ("prose", "guided"),
    ]  # fmt: skip
    for r in overall:
        low, high = r["acceptance_interval"]
        assert r["n"] == 3 and low <= r["acceptance_rate"] <= high
        assert ("over_streaming" in r) == (r["policy"] == "guided")
    assert picture.read_bytes().startswith(b"\x89PNG")
    first = capsys.readouterr().out
    assert "of 3 answered right" in first
    needles.main([*NEEDLES, "--json", str(file)])  # nothing is left to measure, the sums are the same
    assert capsys.readouterr().out.split("\n\n")[1:] == first.split("\n\n")[1:]
    document["results"].pop()
    file.write_text(json.dumps(document))
    needles.main([*NEEDLES, "--json", str(file)])  # what is not there is measured again
    assert len(read(file)["results"]) == 2 and "prose" in capsys.readouterr().out
    assert "was measured with gamma 4, not 2" in refuses(needles.main, *NEEDLES, "--json", file, "--gamma", 2)


def test_the_slots_keep_their_keys_from_policy_to_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled: list[tuple[str, int]] = []
    generate = Engine.generate

    def noting(engine: Engine, *args: Any, speculate: bool = True, **others: Any) -> Any:
        found = generate(engine, *args, speculate=speculate, **others)
        prefilled.append((engine.draft.policy if speculate else "off", engine.stats.prefill_tokens))
        return found

    monkeypatch.setattr(Engine, "generate", noting)
    needles.main([*NEEDLES, "--kinds", "needle"])
    assert [policy for policy, _ in prefilled] == ["off", "streaming", "guided"] * 2
    assert all(n == 0 for policy, n in prefilled if policy != "off")
