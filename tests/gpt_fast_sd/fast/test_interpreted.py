"""All interpreted kernel tests pass, in a process apart from this one (see interpreted/conftest.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
ON_A_CHIP = ROOT / "tests/gpu/test_kernels.py"  # whose kernels run their own bodies here


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


def run_interpreted(files: Sequence[Path], markers: str) -> None:
    """pytest with TRITON_INTERPRET=1 on the tests of these files that have these markers: some of each file pass.

    None fails or is skipped. One process runs all files: to start it takes seconds.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", markers]
    run = subprocess.run(
        [*command, *map(str, files)], env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    passed = {*re.findall(r"(\w+\.py)::\S.* PASSED", run.stdout)}
    assert run.returncode == 0 and " SKIPPED" not in run.stdout, run.stdout + run.stderr
    assert passed == {file.name for file in files}, run.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [("assert False", "assert False"), ("import pytest; pytest.skip('no kernel')", "no kernel"), ("", "1 passed")],
)
def test_a_file_whose_tests_do_not_pass_is_not_a_success(body: str, said: str, tmp_path: Path) -> None:
    files = [tmp_path / "test_passes.py", tmp_path / "test_does_not.py"]
    for file, what in zip(files, ("pass", body), strict=True):
        file.write_text(f"def test_body():\n    {what}\n" if what else "", encoding="utf-8")
    run_interpreted(files[:1], "not slow")
    with pytest.raises(AssertionError, match=said):
        run_interpreted(files, "not slow")


@needs_interpreter
def test_kernels_pass_in_the_interpreter() -> None:
    assert FILES
    run_interpreted(FILES, "not slow")


@needs_interpreter
@pytest.mark.slow
def test_kernels_pass_their_slow_cases_in_the_interpreter() -> None:
    run_interpreted([file for file in FILES if re.search(r"\bslow\b|few\(|thinned\(", file.read_text("utf-8"))], "slow")


@needs_interpreter
@pytest.mark.slow
def test_kernels_pass_in_the_interpreter_as_they_do_on_a_chip() -> None:
    run_interpreted([ON_A_CHIP], "not gpu")
