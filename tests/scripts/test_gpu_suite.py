"""scripts/gpu_suite.py without a GPU: how it goes on, how it exits, what it refuses, what it does not run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_suite
from measuring.gpu.stages import DONE, FAILED, LEFT, STAGES
from tests.scripts.measuring.gpu.rig import FakeProcesses, Record, a_ledger

DRY = ["--device", "cpu", "--tiny", "--pairs", "1"]


WRONG = {"ok": False, "tree": "of another day", "tests": {"test_a": {"outcome": "failed", "said": "E  assert 1 == 2"}}}
BROKEN = {"status": FAILED, "error": "exit code 1", "output": "first\nRuntimeError: CUDA error\n"}


# ---- the command -----------------------------------------------------------------------------------------------------


def test_fresh_forgets_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "launcher", lambda argv: FakeProcesses())
    argv = [str(tmp_path), *DRY, "--stages", "bundled"]
    (tmp_path / "tests.json").write_text("{}")
    assert gpu_suite.main(argv) == 0 and (tmp_path / "tests.json").exists()
    assert gpu_suite.main([*argv[:-1], "test-rounds", "--fresh"]) == 0
    assert [one["stage"] for one in json.loads((tmp_path / "results.json").read_text())["stages"]] == ["test-rounds"]
    assert not (tmp_path / "tests.json").exists()


def test_a_stage_runs_in_a_process_of_its_own_and_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "out"), *DRY, "--stages", "time-select"]
    assert gpu_suite.main(argv) == 0
    assert "--- time-select done" in capsys.readouterr().out
    before = (tmp_path / "out" / "results.json").read_text()
    assert gpu_suite.main(argv) == 0
    assert "time-select: there already" in capsys.readouterr().out
    assert (tmp_path / "out" / "results.json").read_text() == before


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ({}, 0, None),
        ({"test-rounds": {"status": LEFT}}, 3, "left for the next call: test-rounds"),
        ({"test-rounds": BROKEN}, 1, "failed: test-rounds"),
        ({"test-rounds": {"status": DONE, "result": WRONG}}, 1, "found errors: test-rounds"),
    ],
)
def test_the_exit_code_distinguishes_done_left_and_failed(
    ends: dict[str, Record], code: int, said: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_suite, "launcher", lambda argv: FakeProcesses(**ends))
    argv = [str(tmp_path), *DRY, "--stages", "bundled,test-rounds"]
    assert gpu_suite.main(argv) == code
    out = capsys.readouterr().out
    assert said is None or said in out
    page = (tmp_path / "summary.md").read_text()
    assert "cpu dry run" in page
    assert ("failed, exit code 1: `RuntimeError: CUDA error`" in page) == (ends.get("test-rounds") is BROKEN)
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tiny"], "; run this on a GPU, or dry with --device cpu --tiny"),
        (["--device", "cpu"], "--device cpu is for a dry run: give --tiny too"),
        ([*DRY, "--stages", "machine,lunch"], "--stages names 'lunch'; there are test-smoke,"),
        ([*DRY, "--stages", ""], "--stages names ''; there are test-smoke,"),
        ([*DRY, "--budget-seconds", "0"], "--budget-seconds must be at least 405 for test-rounds, got 0"),
        ([*DRY, "--budget-seconds", "nan"], "--budget-seconds must be at least 405 for test-rounds, got nan"),
        (
            [*DRY, "--stages", "machine,test-kernels", "--budget-seconds", "100"],
            "at least 245 for test-kernels, got 100",
        ),
        (["--device", "cpu", "--tiny", "--pairs", "0"], "--pairs must be at least 1, got 0"),
        ([*DRY, "--texts", "nowhere.txt"], "there is no text file nowhere.txt"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu_suite.main([str(tmp_path / "out"), *argv])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("hidden", "cuda", "why"),
    [
        (None, None, "is built without CUDA (pytorch.org has builds with it)"),
        ("", "13.0", "CUDA_VISIBLE_DEVICES is ''"),
        (None, "13.0", "is built for CUDA 13.0 and says: the driver is too old"),
    ],
)
def test_a_suite_that_finds_no_device_says_why(
    hidden: str | None, cuda: str | None, why: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def init() -> None:
        raise RuntimeError("the driver is too old\nand more of the kind")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(SystemExit):
        gpu_suite.main([str(tmp_path / "out"), "--tiny"])
    said = capsys.readouterr().err
    assert "torch sees no CUDA device here: " in said and f"{why}; run this on a GPU" in said and said.count("\n") == 1


def test_results_are_of_a_device_and_only_a_stages_own_process_asks_for_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 2**30, 140 * 2**30))
    for only, free in ([], None), (["--only", "machine"], 139 * 2**30):
        args = gpu_suite.parse([str(tmp_path), *only])
        assert gpu_suite.settings_of(args)["device"] == "NVIDIA H200"
        assert gpu_suite.setup_of(args, {}).free == free


def test_results_of_other_settings_and_foreign_files_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "results.json"

    def refusal() -> str:
        with pytest.raises(SystemExit) as stopped:
            gpu_suite.main([str(tmp_path), *DRY])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    a_ledger(tmp_path, device="NVIDIA H200").write()
    assert "was measured with device NVIDIA H200, not cpu: name another file, or start over with --fresh" in refusal()
    found.write_text("{}")
    assert "holds no results of this benchmark" in refusal()
    found.write_text("half a docu")
    assert "is not JSON" in refusal()
    assert found.read_text() == "half a docu"


@pytest.mark.slow
def test_a_dry_run_of_the_whole_suite_succeeds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gpu_suite.main([str(out), *DRY, "--budget-seconds", "3000"]) == 0
    assert {one["stage"] for one in json.loads((out / "results.json").read_text())["stages"]} == set(STAGES)
    assert len(list(out.iterdir())) <= 8


def test_stages_that_are_tests_need_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        gpu_suite.main([str(tmp_path / "out"), *DRY])
    assert stopped.value.code == 2
    assert 'tests need pytest: pip install -e ".[test]", or name --stages without test-' in capsys.readouterr().err
