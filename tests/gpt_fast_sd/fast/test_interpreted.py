"""Every file of interpreted kernel tests passes, in a process apart from this one (see interpreted/conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


def why_not() -> str | None:
    """Why kernels cannot be interpreted here, None if they can."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return "triton is not installed"
    # a loop over range(lo, hi, step) with computed bounds: arrays of one element no longer pass as numbers
    if triton.startswith("3.6.") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return "the interpreter of triton 3.6 needs numpy before 2.4"
    return None


needs_interpreter = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def name(file: Path) -> str:
    return file.stem.removeprefix("test_")


def run_interpreted(files: Sequence[Path], markers: str, folder: Path) -> dict[str, list[str]]:
    """pytest with TRITON_INTERPRET=1 on the tests of these files that have these markers -> complaints, by file.

    None of a file: its tests passed, and there were some. One process runs all files: to start it takes seconds.
    """
    report = folder / "report.xml"
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers, f"--junitxml={report}",
            *map(str, files),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stdout + run.stderr  # 1: some tests failed
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = {}
    for file in files:
        own = [case for case in cases if case.attrib["classname"].split(".")[-1] == file.stem]
        said = {case.attrib["name"]: [x for x in case if x.tag in ("failure", "error", "skipped")] for case in own}
        passed = any(not marks for marks in said.values())
        found[file.stem] = [
            f"{test}: {mark.attrib['message']}\n{mark.text}"
            for test, marks in said.items()
            for mark in marks
            if mark.tag != "skipped" or not passed
        ]
        if not own:
            found[file.stem] = [f"there is no such test:\n{run.stdout}{run.stderr}"]
    return found


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_interpreted(FILES, "not slow", tmp_path_factory.mktemp("interpreted"))


def test_there_are_interpreted_tests() -> None:
    assert FILES


def test_a_file_whose_tests_do_not_pass_is_not_a_success(tmp_path: Path) -> None:
    bodies = {"failed": "assert False", "skipped": "import pytest; pytest.skip('no kernel')", "passed": "pass"}
    files = [tmp_path / f"test_{name}.py" for name in [*bodies, "nothing"]]
    for file, body in zip(files, bodies.values(), strict=False):
        file.write_text(f"def test_body():\n    {body}\n", encoding="utf-8")
    files[-1].touch()
    found = run_interpreted(files, "not slow", tmp_path)
    assert {file: bool(wrong) for file, wrong in found.items()} == {
        "test_failed": True, "test_skipped": True, "test_passed": False, "test_nothing": True,
    }  # fmt: skip
    assert "assert False" in found["test_failed"][0] and "no kernel" in found["test_skipped"][0]


@needs_interpreter
@pytest.mark.parametrize("file", FILES, ids=name)
def test_kernels_pass_in_the_interpreter(file: Path, complaints: dict[str, list[str]]) -> None:
    assert not complaints[file.stem], "\n".join(complaints[file.stem])


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in FILES if "mark.slow" in file.read_text("utf-8")], ids=name)
def test_kernels_pass_their_slow_cases_in_the_interpreter(file: Path, tmp_path: Path) -> None:
    found = run_interpreted([file], "slow", tmp_path)[file.stem]
    assert not found, "\n".join(found)
