"""The tests as stages: what passed is not run again until a source changes, and what ends its process is known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from measuring.gpu import correct
from measuring.gpu import setup as shared
from measuring.gpu.conducting import run_process
from measuring.gpu.stages import DONE, STAGES
from tests.scripts.measuring.gpu.rig import a_ledger, dry_setup

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
    root, module = Path(__file__).resolve().parents[4], "tests.gpt_fast_sd.measuring.gpu.test_correct"
    program = f"import sys; sys.path[:0] = [{str(root)!r}]; import {module} as t; t.in_a_process({str(tmp_path)!r})"
    command = [sys.executable, "-c", program]
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


@pytest.mark.parametrize("folder", ["gpt_fast_sd", "model", "tp", "scripts", "scripts/measuring/gpu", "tests"])
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
