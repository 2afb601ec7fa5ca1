"""scripts/gpu_suite.py without a GPU: how it goes on, what it survives, what it refuses, what it does not run again."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_suite
from flags import sizes
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.measuring.prompts import tokens_of
from gpt_fast_sd.model import load_tokenizer, read_config
from gpu import correct
from gpu import setup as shared
from gpu import stages as all_stages
from gpu.aims import ARMS, FULL
from gpu.stages import DONE, FAILED, LEFT, STAGES, Stage, results_of
from gpu.summary import summary
from gpu_suite import conduct, run_process
from tests.scripts.gpu_rig import Record, a_ledger, dry_setup

DRY = ["--device", "cpu", "--tiny", "--pairs", "1"]


def some_stages(*names: str, seconds: int = 10) -> list[Stage]:
    return [Stage(name=name, run=lambda setup: {}, seconds=seconds, about="a test") for name in names]


class FakeProcesses:
    """Launches nothing; every stage comes to the end it was given, done if none."""

    def __init__(self, **ends: Record) -> None:
        self.ends, self.launched = ends, list[str]()

    def __call__(self, stage: Stage, timeout: float) -> Record:
        assert timeout > 0
        self.launched.append(stage.name)
        return dict(self.ends.get(stage.name, {"status": DONE, "result": {"ok": True}}))


WRONG = {"ok": False, "tree": "of another day", "tests": {"test_a": {"outcome": "failed", "said": "E  assert 1 == 2"}}}
BROKEN = {"status": FAILED, "error": "exit code 1", "output": "first\nRuntimeError: CUDA error\n"}


# ---- one stage after the other ---------------------------------------------------------------------------------------


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
    monkeypatch.setattr(gpu_suite.time, "perf_counter", lambda: next(clock))
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


def test_fresh_forgets_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "launcher", lambda argv: FakeProcesses())
    argv = [str(tmp_path), *DRY, "--stages", "bundled"]
    (tmp_path / "tests.json").write_text("{}")
    assert gpu_suite.main(argv) == 0 and (tmp_path / "tests.json").exists()
    assert gpu_suite.main([*argv[:-1], "test-rounds", "--fresh"]) == 0
    assert [one["stage"] for one in json.loads((tmp_path / "results.json").read_text())["stages"]] == ["test-rounds"]
    assert not (tmp_path / "tests.json").exists()


def test_a_process_is_stopped_in_time_and_what_it_said_is_kept() -> None:
    code, output = run_process([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2.0)
    assert (code, output) == (None, "begun\n")
    code, output = run_process([sys.executable, "-c", "print('so far'); raise ValueError('no chip')"], 60.0)
    assert code == 1
    assert output.startswith("so far\n") and output.endswith("ValueError: no chip\n")


# ---- the command -----------------------------------------------------------------------------------------------------


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


def test_the_smoke_test_comes_first_then_the_headline_kernel_and_guided_before_snapkv() -> None:
    order = list(STAGES)
    assert order[:2] == ["test-smoke", "time-decode-57344"]
    cells = [name for name in order if name.startswith("cell-")]
    assert cells[:3] == ["cell-57344-guided", "cell-57344-snapkv", "cell-28672-streaming"]
    assert len(cells) == len(FULL) * len(ARMS)
    assert order.index("test-kernels") < order.index(cells[0])
    assert STAGES["test-smoke"].seconds <= 90


@pytest.mark.slow
def test_a_dry_run_of_the_whole_suite_succeeds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gpu_suite.main([str(out), *DRY, "--budget-seconds", "3000"]) == 0
    assert {one["stage"] for one in json.loads((out / "results.json").read_text())["stages"]} == set(STAGES)
    assert len(list(out.iterdir())) <= 8


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


def test_a_stopped_process_takes_its_children_with_it() -> None:
    child = "import time; time.sleep(60)"  # it holds the pipe that is read to its end
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    readers = threading.active_count()
    assert run_process([sys.executable, "-c", program], 2.0) == (None, "begun\n")
    assert threading.active_count() == readers


# ---- the tests as stages ---------------------------------------------------------------------------------------------

TRIED = """
import os
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    (HERE / "ran").open("a").write(f"{request.node.name} ")
    return request.param

def test_right(place, record_property):
    record_property("seen", "3 rounds")

def test_mended_later(place):
    assert (HERE / "mended").exists(), "not yet"

def test_ends_the_process(place):
    if not (HERE / "mended").exists():
        os._exit(1)
"""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own, of three tests; the folder that they are in."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu', 'slow']\n")
    (folder / "test_tried.py").write_text(TRIED)
    monkeypatch.setattr(correct, "ROOT", tmp_path)
    monkeypatch.setattr(correct, "tree_of", lambda: "today")
    monkeypatch.delitem(sys.modules, "test_tried", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def ran(folder: Path) -> str:
    """The tests that have run since somebody asked."""
    said = (folder / "ran").read_text() if (folder / "ran").exists() else ""
    (folder / "ran").unlink(missing_ok=True)
    return said.replace("[cpu]", "").strip()


def test_what_passed_is_not_run_again_until_a_source_changes(
    tried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tried / "test_tried.py").write_text(TRIED.replace("os._exit(1)", "raise RuntimeError('gone')"))
    first = correct.run_tests(dry_setup(tmp_path), "test_tried.py")
    assert not first["ok"] and ran(tried) == "test_right test_mended_later test_ends_the_process"
    right, mended, ends = (first["tests"][f"test_tried.py::{name}[cpu]"] for name in TESTS)
    assert (right["outcome"], right["seen"]) == ("passed", {"seen": "3 rounds"}) and right["seconds"] >= 0
    assert mended["outcome"] == ends["outcome"] == "failed" and "not yet" in mended["said"]
    (tried / "mended").touch()
    assert correct.run_tests(dry_setup(tmp_path), "test_tried.py")["ok"]
    assert ran(tried) == "test_mended_later test_ends_the_process"
    assert correct.run_tests(dry_setup(tmp_path), "test_tried.py")["ok"] and ran(tried) == ""
    monkeypatch.setattr(correct, "tree_of", lambda: "tomorrow")
    assert correct.run_tests(dry_setup(tmp_path), "test_tried.py")["ok"] and len(ran(tried).split()) == 3


TESTS = ("test_right", "test_mended_later", "test_ends_the_process")


def test_a_test_that_ends_its_process_is_known_and_comes_last_the_next_time(tried: Path, tmp_path: Path) -> None:
    program = "import sys; sys.path[:0] = {0!r}; from tests.scripts import test_gpu_suite as t; t.in_a_process({1!r})"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program.format([str(root), str(root / "scripts")], str(tmp_path))]
    code, _ = run_process(command, 60.0)
    assert code == 1 and ran(tried).split() == list(TESTS)
    known = json.loads((tmp_path / "tests.json").read_text())["tests"]
    assert [one["outcome"] for one in known.values()] == ["passed", "failed", "did not end"]
    (tried / "mended").touch()
    assert correct.run_tests(dry_setup(tmp_path), "test_tried.py")["ok"]
    assert ran(tried) == "test_mended_later test_ends_the_process"


def in_a_process(folder: str) -> None:
    """What the process of the test above does."""
    correct.ROOT, correct.tree_of = Path(folder), lambda: "today"  # type: ignore[assignment]
    correct.run_tests(dry_setup(Path(folder)), "test_tried.py")


def test_a_file_that_cannot_be_collected_is_no_success(tried: Path, tmp_path: Path) -> None:
    (tried / "test_tried.py").write_text("import nothing_of_that_name")
    with pytest.raises(RuntimeError, match="pytest ended with"):
        correct.run_tests(dry_setup(tmp_path), "test_tried.py")
    (tried / "test_tried.py").write_text("")
    with pytest.raises(RuntimeError, match=r"test_tried.py holds no tests for cpu"):
        correct.run_tests(dry_setup(tmp_path), "test_tried.py")


@pytest.mark.parametrize("folder", ["gpt_fast_sd", "model", "tp", "scripts", "scripts/gpu", "tests"])
def test_a_change_of_anything_that_tests_are_made_of_makes_them_run_again(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    trees = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / folder / "flags.py").write_text(text)
        trees.add(shared.tree_of.__wrapped__())
    assert len(trees) == 2


def test_tests_are_done_when_all_have_passed_on_the_sources_as_they_are(tmp_path: Path) -> None:
    stage, ledger = STAGES["test-kernels"], a_ledger(tmp_path)

    def done(ok: bool, tree: str) -> bool:
        result = {"ok": ok, "tree": tree, "tests": {}}
        ledger.put({"stage": stage.name}, {"stage": stage.name, "status": DONE, "result": result})
        return stage.is_done(ledger)

    assert not stage.is_done(ledger)
    assert done(True, correct.tree_of()) and not done(False, correct.tree_of()) and not done(True, "another")


def test_stages_that_are_tests_need_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        gpu_suite.main([str(tmp_path / "out"), *DRY])
    assert stopped.value.code == 2
    assert 'tests need pytest: pip install -e ".[test]", or name --stages without test-' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smoke", "kernels", "rounds"])
def test_every_file_of_tests_for_the_chip_is_a_stage(name: str) -> None:
    files = {path.stem for path in (Path(__file__).resolve().parents[1] / "gpu").glob("test_*.py")}
    assert files - {"test_interpreted", "test_here"} == {
        f"test_{stage[5:]}" for stage in STAGES if stage[:5] == "test-"
    }
    assert f"test-{name}" in STAGES
