"""All interpreted kernel tests pass, in a process apart from this one (see interpreted/conftest.py)."""

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
WITH_SLOW_CASES = [file for file in FILES if re.search(r"\bslow\b|(few|thinned|each)\(", file.read_text("utf-8"))]
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


def run_interpreted(files: Sequence[Path], markers: str) -> tuple[list[str], str]:
    """pytest with TRITON_INTERPRET=1 on the tests of these files that have these markers -> what failed, what was said.

    A file is right if some of its tests pass, and none fails or is skipped. One process runs all files: to start it
    takes seconds.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "-p", "no:cacheprovider", "-m", markers]
    run = subprocess.run(
        [*command, *map(str, files)], env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    outcomes = re.findall(r"(\w+)\.py(?:::.*)? (PASSED|FAILED|ERROR|SKIPPED)", run.stdout)
    passed, others = ({file for file, what in outcomes if (what == "PASSED") == wanted} for wanted in (True, False))
    return [file.stem for file in files if file.stem not in passed - others], run.stdout + run.stderr


def test_a_file_whose_tests_do_not_pass_is_not_a_success(tmp_path: Path) -> None:
    bodies = {"passed": "pass", "failed": "assert False", "skipped": "import pytest; pytest.skip('no kernel')"}
    files = [tmp_path / f"test_{name}.py" for name in [*bodies, "nothing"]]
    for file, body in zip(files, bodies.values(), strict=False):
        file.write_text(f"def test_body():\n    {body}\n", encoding="utf-8")
    files[-1].touch()
    found, said = run_interpreted(files, "not slow")
    assert found == ["test_failed", "test_skipped", "test_nothing"]
    assert "assert False" in said and "no kernel" in said


@needs_interpreter
@pytest.mark.parametrize(
    ("files", "markers"),
    [
        pytest.param(FILES, "not slow", id="all"),
        pytest.param(WITH_SLOW_CASES, "slow", marks=pytest.mark.slow, id="slow"),
        pytest.param([ON_A_CHIP], "not gpu", marks=pytest.mark.slow, id="as on a chip"),
    ],
)
def test_kernels_pass_in_the_interpreter(files: list[Path], markers: str) -> None:
    found, said = run_interpreted(files, markers)
    assert files and not found, said
