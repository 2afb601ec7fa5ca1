"""The stages: their order, that each file of tests is one, and the sweep of the bundled model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flags import sizes
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import load_tokenizer, read_config
from measuring.gpu import stages as all_stages
from measuring.gpu.aims import ARMS, FULL
from measuring.gpu.stages import DONE, STAGES
from measuring.gpu.summary import summary
from measuring.prompts import tokens_of
from tests.scripts.measuring.gpu.rig import Record, a_ledger, dry_setup


def test_the_smoke_test_comes_first_then_the_headline_kernel_and_guided_before_snapkv() -> None:
    order = list(STAGES)
    assert order[:2] == ["test-smoke", "time-decode-57344"]
    cells = [name for name in order if name.startswith("cell-")]
    assert cells[:3] == ["cell-57344-guided", "cell-57344-snapkv", "cell-28672-streaming"]
    assert len(cells) == len(FULL) * len(ARMS)
    assert order.index("test-kernels") < order.index(cells[0])
    assert STAGES["test-smoke"].seconds <= 90


def swept(monkeypatch: pytest.MonkeyPatch, points: list[Record]) -> list[list[str]]:
    """A sweep that comes to these points; the commands that asked for it."""
    asked: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        asked.append(command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"points": points}))

    monkeypatch.setattr(all_stages.subprocess, "run", run)
    return asked


POINT = {"batch": 8, "context": 4000, "policy": "guided", "budget": 512, "gamma": 4, "temperature": 0.8}


def test_a_policy_that_fails_on_a_chip_fails_the_sweep_of_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = POINT | {"policy": "streaming", "status": "measured"}
    swept(monkeypatch, [fine, POINT | {"status": "failed", "reason": "RuntimeError: no kernel"}])
    failure = "8 x 4,000, guided 512, gamma 4, T 0.8: RuntimeError: no kernel"
    with pytest.raises(RuntimeError, match=f"^{failure}$"):
        STAGES["bundled"].run(dry_setup(tmp_path))
    swept(monkeypatch, [fine])
    assert STAGES["bundled"].run(dry_setup(tmp_path)) == {"points": [fine]}


def test_the_bundled_document_is_not_repeated_for_longer_rows_than_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = swept(monkeypatch, [])
    tokenizer = load_tokenizer(BUNDLED, read_config(BUNDLED))
    assert tokenizer
    document = len(tokens_of(BUNDLED / "document.txt", tokenizer))
    for texts in (), (Path("book.txt"),):
        STAGES["bundled"].run(replace(dry_setup(tmp_path), tiny=False, texts=texts))
        longest = max(sizes(asked[-1][asked[-1].index("--context") + 1]))
        assert (longest <= document) == (not texts)


@pytest.mark.slow
def test_the_bundled_model_is_measured_by_the_sweep_and_shown(tmp_path: Path) -> None:
    found = json.loads(json.dumps(STAGES["bundled"].run(dry_setup(tmp_path))))
    assert [one["policy"] for one in found["points"]] == ["streaming", "snapkv", "guided"]
    ledger = a_ledger(tmp_path)
    ledger.put({"stage": "bundled"}, {"stage": "bundled", "status": DONE, "result": found})
    lines = summary(ledger, dry_setup(), [], []).splitlines()
    assert len([line for line in lines if line.startswith("| 160 | 2 | ")]) == 3


@pytest.mark.parametrize("name", ["smoke", "kernels", "rounds"])
def test_every_file_of_tests_for_the_chip_is_a_stage(name: str) -> None:
    files = {path.stem for path in (Path(__file__).resolve().parents[4] / "tests" / "gpu").glob("test_*.py")}
    assert files - {"test_interpreted", "test_here"} == {
        f"test_{stage[5:]}" for stage in STAGES if stage[:5] == "test-"
    }
    assert f"test-{name}" in STAGES
