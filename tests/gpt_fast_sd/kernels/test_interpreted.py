"""Every file of interpreted kernel tests passes, in a process of its own (see interpreted/conftest.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def run_interpreted(file: Path, markers: str) -> None:
    """pytest on this file with TRITON_INTERPRET=1; it must find tests with these markers, and all must pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", markers, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"^(\d+) passed", run.stdout, re.MULTILINE)
    assert passed and int(passed[1]) > 0, run.stdout + run.stderr


def name(file: Path) -> str:
    return file.stem.removeprefix("test_")


def test_there_are_interpreted_tests() -> None:
    assert FILES


@pytest.mark.parametrize("body", ["assert False", "import pytest; pytest.skip('no kernel')"], ids=["failed", "skipped"])
def test_a_file_whose_tests_do_not_pass_is_not_a_success(tmp_path: Path, body: str) -> None:
    (file := tmp_path / "test_body.py").write_text(f"def test_body():\n    {body}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="body"):
        run_interpreted(file, "not slow")


@needs_interpreter
@pytest.mark.parametrize("file", FILES, ids=name)
def test_kernels_pass_in_the_interpreter(file: Path) -> None:
    run_interpreted(file, "not slow")


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in FILES if "mark.slow" in file.read_text("utf-8")], ids=name)
def test_kernels_pass_their_slow_cases_in_the_interpreter(file: Path) -> None:
    run_interpreted(file, "slow")
