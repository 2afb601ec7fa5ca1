"""scripts/gpu_suite.py without a GPU: how it goes on, how it exits, what it refuses, what it does not run again."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_suite
from flags import sizes
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import load_tokenizer, read_config
from gpu_suite import DONE, FAILED, LEFT, STAGES, Stage, conduct, launcher, results_of
from inputs.prompts import tokens_of
from measuring.gpu import setup as shared
from measuring.gpu.page import page
from measuring.ledger import Ledger
from tests.helpers import DATA, Patch, Printed, Refuses
from tests.scripts.measuring.test_gpu import dry_setup

ROOT = Path(__file__).resolve().parents[2]
DRY = "--device cpu --tiny --pairs 1"
Record = dict[str, Any]
WRONG = {"ok": False, "tree": "another", "tests": {"test_a": {"outcome": "failed", "said": "E  assert 1 == 2\n"}}}
BROKEN = {"status": FAILED, "error": "RuntimeError: CUDA error"}


def a_ledger(out: Path, **changes: Any) -> Ledger:
    """OUT/results.json."""
    settings = {"device": "cpu", "tiny": True, "pairs": 1, "max_autotune": False, "texts": []} | changes
    return Ledger(out / "results.json", "gpu_suite", settings, {}, results="stages")


class FakeProcesses:
    """Launches nothing; every stage comes to the end it was given, done if none."""

    def __init__(self, **ends: Record) -> None:
        self.ends, self.launched = ends, list[str]()

    def __call__(self, stage: Stage, timeout: float) -> Record:
        assert timeout > 0
        self.launched.append(stage.name)
        return dict(self.ends.get(stage.name, {"status": DONE, "result": {"ok": True}}))


# ---- one stage after the other ---------------------------------------------------------------------------------------


def some_stages(*names: str, seconds: int = 10) -> list[Stage]:
    return [Stage(name, seconds, "a test", lambda setup: {}) for name in names]


def test_a_failed_stage_costs_no_other_and_is_tried_again_after_those_not_run_yet(tmp_path: Path) -> None:
    stages, first, again = some_stages("a", "b", "c"), FakeProcesses(a=BROKEN), FakeProcesses()
    assert conduct(stages[:2], a_ledger(tmp_path), 500, first) == []
    assert first.launched == ["a", "b"]
    ledger = a_ledger(tmp_path)
    assert (ledger.find({"stage": "a"}) or {})["error"] == BROKEN["error"] and not stages[0].is_done(ledger)
    assert conduct(stages, ledger, 500, again) == []
    assert again.launched == ["c", "a"]
    assert set(results_of(ledger)) == {"a", "b", "c"}


def test_what_does_not_fit_the_budget_is_left_but_the_first_stage_of_a_call_never_is(tmp_path: Path) -> None:
    stages = [*some_stages("slow", seconds=900), *some_stages("quick"), *some_stages("long", seconds=600)]
    processes, ledger = FakeProcesses(quick={"status": LEFT}), a_ledger(tmp_path)
    assert conduct(stages, ledger, 500, processes) == ["quick", "long"]
    assert processes.launched == ["slow", "quick"] and [one["stage"] for one in ledger.records] == ["slow"]
    assert conduct(stages[2:], ledger, 500, processes) == []


PROGRAM = """
import json, subprocess, sys, time
stage, into = sys.argv[-3], sys.argv[-1]
if stage == "right":
    open(into, "w").write('{"rows": []}')
elif stage == "wrong":
    open(into, "w").write('{"error": "ValueError: no chip"}')
    sys.exit(1)
elif stage == "dies":
    sys.exit(9)
else:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(5); open(" + repr(into + "/../../child") + ", 'w')"])
"""


def test_a_stage_that_takes_too_long_is_ended_with_what_it_began_and_every_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = launcher([str(tmp_path / "program.py")])
    right, wrong, dies, hangs = some_stages("right", "wrong", "dies", "hangs", seconds=2)
    assert launch(right, 60) == {"status": DONE, "result": {"rows": []}}
    assert launch(wrong, 60) == {"status": FAILED, "error": "ValueError: no chip"}
    assert launch(dies, 60) == {"status": FAILED, "error": "exit code 9"}
    began = time.perf_counter()
    assert launch(hangs, 1.0) == {"status": LEFT}  # it did not have its time
    assert launch(hangs, 2.0) == {"status": FAILED, "error": "stopped after 2 s"}
    assert time.perf_counter() - began < 30
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "time.sleep(5)" not in running


# ---- the command -----------------------------------------------------------------------------------------------------


def test_fresh_forgets_earlier_results(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu_suite, "launcher", lambda argv: FakeProcesses())
    argv = [str(tmp_path), *DRY.split(), "--stages", "bundled"]
    (tmp_path / "tests.json").write_text("{}")
    assert gpu_suite.main(argv) == 0 and (tmp_path / "tests.json").exists()
    assert gpu_suite.main([*argv[:-1], "test-rounds", "--fresh"]) == 0
    assert [one["stage"] for one in json.loads((tmp_path / "results.json").read_text())["stages"]] == ["test-rounds"]
    assert not (tmp_path / "tests.json").exists()


def test_a_stage_runs_in_a_process_of_its_own_and_is_not_run_again(tmp_path: Path, capsys: Printed) -> None:
    written = []
    for said in ("--- time-select done", "time-select: there already"):
        assert gpu_suite.main([str(tmp_path / "out"), *DRY.split(), "--stages", "time-select"]) == 0
        assert said in capsys.readouterr().out
        written.append((tmp_path / "out" / "results.json").read_text())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ({}, 0, ""),
        ({"status": LEFT}, 3, "left for the next call: test-rounds"),
        (BROKEN, 1, "failed: test-rounds"),
        ({"status": DONE, "result": WRONG}, 1, "found errors: test-rounds"),
    ],
)
def test_the_exit_code_distinguishes_done_left_and_failed(
    end: Record, code: int, said: str, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    ends = {"test-rounds": end} if end else {}
    monkeypatch.setattr(gpu_suite, "launcher", lambda argv: FakeProcesses(**ends))
    assert gpu_suite.main([str(tmp_path), *DRY.split(), "--stages", "bundled,test-rounds"]) == code
    assert said in capsys.readouterr().out
    page = (tmp_path / "summary.md").read_text()
    assert "This is a dry run" in page
    assert ("failed, RuntimeError: CUDA error" in page) == (end is BROKEN)
    assert len(list(tmp_path.iterdir())) <= 8


def test_results_name_a_device_and_only_a_stage_asks_for_its_memory(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 2**30, 140 * 2**30))
    for only, free in ([], None), (["--only", "machine"], 139 * 2**30):
        args = gpu_suite.parse([str(tmp_path), *only])
        assert gpu_suite.setup_of(args, {}).device_name == "NVIDIA H200"
        assert gpu_suite.setup_of(args, {}).free == free


def test_results_of_other_settings_are_not_overwritten(tmp_path: Path, refuses: Refuses) -> None:
    a_ledger(tmp_path, device="NVIDIA H200").write()
    said = "was measured with device NVIDIA H200, not cpu: name another file, or start over with --fresh"
    assert said in refuses(gpu_suite.main, tmp_path, *DRY.split())


@pytest.mark.slow
def test_a_dry_run_of_the_whole_suite_succeeds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gpu_suite.main([str(out), *DRY.split(), "--budget-seconds", "3000"]) == 0
    assert {one["stage"] for one in json.loads((out / "results.json").read_text())["stages"]} == set(STAGES)
    assert len(list(out.iterdir())) <= 8


def test_a_suite_needs_a_gpu_and_its_tests_need_pytest(tmp_path: Path, monkeypatch: Patch, refuses: Refuses) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "; run this on a GPU, or dry with --device cpu --tiny" in refuses(gpu_suite.main, tmp_path / "out", "--tiny")
    monkeypatch.setattr(gpu_suite.importlib.util, "find_spec", lambda name: None)
    said = 'tests need pytest: pip install -e ".[test]", or name --stages without test-'
    assert said in refuses(gpu_suite.main, tmp_path / "out", *DRY.split())
    assert not (tmp_path / "out").exists()


# ---- the stages, and the page ----------------------------------------------------------------------------------------


def test_the_smoke_test_comes_first_then_the_headline_kernel_and_every_file_of_tests_is_a_stage() -> None:
    order = list(STAGES)
    assert order[:2] == ["test-smoke", "time-decode-57344"] and STAGES["test-smoke"].seconds <= 180
    assert [name for name in order if name.startswith("cell-")][:2] == ["cell-57344-guided", "cell-57344-snapkv"]
    assert order.index("test-kernels") < order.index("cell-57344-guided")
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")} - {"test_interpreted"}
    assert files == {f"test_{name[5:]}" for name in order if name.startswith("test-")}


POINT = {"batch": 8, "context": 4000, "policy": "guided", "budget": 512, "gamma": 4, "temperature": 0.8}


def test_a_failing_policy_fails_the_sweep_and_no_bundled_text_is_repeated(tmp_path: Path, monkeypatch: Patch) -> None:
    points, asked = [POINT | {"policy": "streaming", "status": "measured"}], list[list[str]]()

    def run(command: list[str], *, check: bool) -> None:
        asked.append(command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"points": points}))

    monkeypatch.setattr(gpu_suite.subprocess, "run", run)
    tokenizer = load_tokenizer(BUNDLED, read_config(BUNDLED))
    assert tokenizer
    for texts in (), (Path("book.txt"),):
        setup = shared.replace(dry_setup(), out=tmp_path, tiny=False, texts=texts)
        assert STAGES["bundled"].run(setup) == {"points": points}
        longest = max(sizes(asked[-1][asked[-1].index("--context") + 1]))
        assert (longest <= len(tokens_of(BUNDLED / "document.txt", tokenizer))) == (not texts)
    points.append(POINT | {"status": "failed", "reason": "RuntimeError: no kernel"})
    with pytest.raises(RuntimeError, match=r"^8 x 4,000, guided 512, gamma 4, T 0.8: RuntimeError: no kernel$"):
        STAGES["bundled"].run(setup)


TRIED = """
import os
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.fixture(autouse=True)
def ran(request):
    (HERE / "ran").open("a").write(f"{request.node.name} ")

def test_right(record_property):
    record_property("seen", "3 rounds")

def test_mended_later():
    assert (HERE / "mended").exists(), "not yet"

def test_ends_the_process():
    if not (HERE / "mended").exists():
        os._exit(1)
"""


@pytest.mark.slow
def test_what_passed_waits_for_changes_of_source_and_what_failed_comes_last(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    plugin = "from tests.gpu.conftest import pytest_addoption, pytest_configure\n"
    (folder / "conftest.py").write_text(f"import sys\nsys.path[:0] = {[str(ROOT), str(ROOT / 'scripts')]!r}\n{plugin}")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu']\n")
    (folder / "test_kernels.py").write_text(TRIED)
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    tree = "today"
    monkeypatch.setattr(gpu_suite, "tree_of", lambda: tree)
    setup, stage = shared.replace(dry_setup(), out=tmp_path), STAGES["test-kernels"]

    def ran() -> str:
        result = stage.run(setup)
        found = (folder / "ran").read_text().strip() if (folder / "ran").exists() else ""
        (folder / "ran").unlink(missing_ok=True)
        outcomes = " ".join(f"{name.partition('::')[2]}={one['outcome']}" for name, one in result["tests"].items())
        assert result["ok"] == (outcomes.count("=passed") == 3)
        ledger = a_ledger(tmp_path / tree)
        ledger.put({"stage": stage.name}, {"stage": stage.name, "status": DONE, "result": result})
        assert stage.is_done(ledger) == result["ok"]
        lines = page(results_of(ledger), setup, "cpu", []).splitlines()
        assert f"- test-kernels: {outcomes.count('=passed')} of 3 passed" in lines
        assert "- test_kernels.py::test_right: 3 rounds" in lines
        assert ("- **test_kernels.py::test_ends_the_process**: did not end; it said nothing" in lines) != result["ok"]
        return f"{found}: {outcomes}"

    names = "test_right test_mended_later test_ends_the_process"
    assert ran() == f"{names}: test_right=passed test_mended_later=failed test_ends_the_process=did not end"
    (folder / "mended").touch()
    passed = "test_right=passed test_mended_later=passed test_ends_the_process=passed"
    assert ran() == f"test_mended_later test_ends_the_process: {passed}"
    tree = "tomorrow"
    assert ran() == f"{names}: {passed}"
    (folder / "test_kernels.py").write_text("import nothing_of_that_name")
    with pytest.raises(RuntimeError, match="pytest ended with 2"):
        stage.run(setup)


@pytest.mark.parametrize("folder", ["gpt_fast_sd", "model", "tp", "scripts", "scripts/measuring/gpu", "tests"])
def test_a_change_of_what_tests_are_made_of_runs_them_again(folder: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    trees = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / folder / "flags.py").write_text(text)
        trees.add(shared.tree_of.__wrapped__())
    assert len(trees) == 2


def test_the_page_says_what_is_replayed_what_was_read_and_what_its_prompts_repeat() -> None:
    step = {"seconds": 0.03, "gamma": 5, "rows_active": 16, "keys_in_view": [57345, 57345]}
    cell = {
        "cell": "16x57344", "arm": "guided", "budget": 1024, "quantize": None, "gamma": 5, "context": 57344,
        "tokens_per_round": 4.0, "plain_tokens_per_second": 900.0, "replayed_tokens_per_second": 1800.0,
        "ratio": {"median": 2.0, "min": 1.9, "max": 2.1}, "steps": {"target": step}, "roofline": {"target": 0.027},
        "predicted": {"ideal": 3.0, "practical": 2.9, "expected": 2.8},
    }  # fmt: skip
    sweep = json.loads((DATA / "sweep.json").read_text())["points"][0]
    note = "the text has 6,001 tokens: rows of 16,000 repeat it, which makes drafting easier"
    skipped = {"arm": "guided", "quantize": "float8", "skipped": "it does not run here"}
    results = {"cell-57344-guided": cell, "precision-57344-float8": skipped}
    results["bundled"] = {"points": [sweep | {"note": note}] * 2}
    lines = page(results, shared.replace(dry_setup(), tiny=False), "H", ["- machine: not run yet"]).splitlines()
    who = "| 16x57344 | guided 1,024 | the target's | 5 |"
    row = f"{who} 4.00 | 900 | 1,800 | 2.00x (1.90 to 2.10) | 3.0 | 3.00x, 2.90x, 2.80x |"
    assert row in lines and "replay speed" in lines[lines.index(row) - 2]
    assert f"{who} target | 30.000 | 90% | 1.000 | 16 | 57,345 to 57,345 |" in lines
    assert lines.count(f"- {note}") == 1 and "- precision-57344-float8: it does not run here" in lines
    assert "- machine: not run yet" in lines and "dry run" not in lines[2]
