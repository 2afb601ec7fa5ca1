"""One stage after the other: what is run and left, what it says, and processes that are stopped in time."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from measuring.gpu import conducting
from measuring.gpu.conducting import conduct, run_process
from measuring.gpu.stages import FAILED, LEFT, Stage, results_of
from measuring.gpu.summary import summary
from tests.scripts.measuring.gpu.rig import FakeProcesses, a_ledger, dry_setup

BROKEN = {"status": FAILED, "error": "exit code 1", "output": "first\nRuntimeError: CUDA error\n"}


def some_stages(*names: str, seconds: int = 10) -> list[Stage]:
    return [Stage(name=name, run=lambda setup: {}, seconds=seconds, about="a test") for name in names]


def test_a_failed_stage_costs_no_other_and_is_tried_again_after_those_not_run_yet(tmp_path: Path) -> None:
    stages = some_stages("a", "b", "c")
    first = FakeProcesses(a=BROKEN)
    assert conduct(stages[:2], a_ledger(tmp_path), 500, first) == []
    assert first.launched == ["a", "b"]
    again, ledger = FakeProcesses(), a_ledger(tmp_path)
    assert (ledger.find({"stage": "a"}) or {})["error"] == "exit code 1" and not stages[0].is_done(ledger)
    assert conduct(stages, ledger, 500, again) == []
    assert again.launched == ["c", "a"]
    assert set(results_of(ledger)) == {"a", "b", "c"}


def test_what_does_not_fit_the_budget_is_left_but_the_first_stage_of_a_call_never_is(tmp_path: Path) -> None:
    stages = [*some_stages("slow", seconds=900), *some_stages("quick"), *some_stages("long", seconds=600)]
    processes, ledger = FakeProcesses(), a_ledger(tmp_path)
    assert conduct(stages, ledger, 500, processes) == ["long"]
    assert processes.launched == ["slow", "quick"]
    assert conduct(stages, ledger, 500, processes) == []


def test_a_stage_that_takes_longer_than_estimated_says_so_in_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(float(100 * i) for i in range(99))
    monkeypatch.setattr(conducting.time, "perf_counter", lambda: next(clock))
    ledger = a_ledger(tmp_path)
    conduct([*some_stages("one", seconds=90), *some_stages("two", seconds=240)], ledger, 5000, FakeProcesses())
    written = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert [(one["stage"], one["seconds_over"]) for one in written] == [("one", 10.0), ("two", 0.0)]
    assert "--- one done in 100.0 s, 10.0 s more than estimated\n" in capsys.readouterr().out
    page = summary(ledger, dry_setup(), [], [])
    assert "## Longer than estimated\n\n- one: 100 s, estimated 90 s\n\n" in page and "- two" not in page


def test_a_stage_that_was_stopped_early_is_left_and_nothing_is_written_of_it(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path)
    assert conduct(some_stages("a", "b"), ledger, 500, FakeProcesses(a={"status": LEFT})) == ["a"]
    assert [record["stage"] for record in ledger.records] == ["b"]


def test_a_process_is_stopped_in_time_and_what_it_said_is_kept() -> None:
    code, output = run_process([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2.0)
    assert (code, output) == (None, "begun\n")
    code, output = run_process([sys.executable, "-c", "print('so far'); raise ValueError('no chip')"], 60.0)
    assert code == 1
    assert output.startswith("so far\n") and output.endswith("ValueError: no chip\n")


def test_a_stopped_process_takes_its_children_with_it() -> None:
    child = "import time; time.sleep(60)"  # it holds the pipe that is read to its end
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    readers = threading.active_count()
    assert run_process([sys.executable, "-c", program], 2.0) == (None, "begun\n")
    assert threading.active_count() == readers
