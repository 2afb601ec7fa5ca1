"""scripts/verify.py on a small scale: what it prints and writes, its exit codes, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import verify
from measuring import lossless, soak
from measuring.lossless import Finding


@pytest.fixture
def small(tiny_folder: Path) -> list[str]:
    sizes = ["--batch-size", "2", "--context", "40", "--max-new-tokens", "6"]
    return ["--model", str(tiny_folder), "--no-compile", "--dtype", "fp32", *sizes]


def test_it_prints_a_line_for_each_check_and_writes_what_it_found(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "proof.json"
    assert verify.main([*small, "--budget", "32", "--samples", "40", "--json", str(file)]) == 0
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{small[1]}, fp32, cache fp32, 5 prompts of up to 40 tokens"
    assert second == "drafts: streaming, gamma 4; 2 slots, cpu"
    checks = ["greedy", "samples", "seeds", "refill", "exact"]
    assert [line.split()[:2] for line in lines[:-1]] == [["passed", check] for check in checks]
    assert lines[-1].startswith("all passed, ")
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["passed"] and [one["check"] for one in document["findings"]] == checks


def test_one_failed_check_is_named_and_is_exit_code_1(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("greedy", True, "fine"), Finding("seeds", False, "1 of 4 outputs are others")]
    monkeypatch.setattr(lossless, "prove", lambda *_: iter(findings))
    assert verify.main(small) == 1
    out = capsys.readouterr().out
    assert "FAILED  seeds    1 of 4" in out and "FAILED: seeds, " in out


def test_a_soak_goes_through_all_policies(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, drafts = soak.soak, list[str]()

    def short(engine: Any, every: Any, texts: Any, seconds: float, **how: Any) -> soak.Soaked:
        assert seconds == 60
        drafts.extend(draft.policy for draft in every)
        return real(engine, every[1:3], texts, 0, calls=1, **how)

    monkeypatch.setattr(soak, "soak", short)
    assert verify.main([*small, "--soak", "1", "--kv-dtype", "int8"]) == 0
    assert "quantized" not in drafts  # whose cache lies otherwise
    drafts.clear()
    assert verify.main([*small, "--soak", "1", "--kv-dtype", "int8", "--draft", "quantized"]) == 0
    assert "quantized" in drafts
    drafts.clear()
    assert verify.main([*small, "--soak", "1"]) == 0
    assert "passed  soak" in capsys.readouterr().out
    assert [*dict.fromkeys(drafts)] == [
        "off", "full", "streaming", "snapkv", "quest", "guided", "lookup", "early_exit", "hierarchy",
    ]  # fmt: skip
