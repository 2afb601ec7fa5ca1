"""What is typed on a machine with a GPU, typed on one without; and what docs/gpu.md says of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt_fast_sd.tp import why_no_cuda

ROOT = Path(__file__).resolve().parents[2]

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


@without_cuda
def test_tests_for_a_chip_are_skipped_with_one_reason_where_there_is_none() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"})
    reasons = {line.partition(": ")[2] for line in run.stdout.splitlines() if line.startswith("SKIPPED")}
    assert reasons == {f"torch sees no CUDA device here: {why_no_cuda()}"}
    counted = re.search(r"^(\d+) skipped, (\d+) deselected", run.stdout, re.M)
    assert counted and int(counted[1]) > 50 and run.returncode == 0


@pytest.mark.slow
def test_a_test_that_takes_too_long_on_a_chip_ends_its_process_and_shows_where(tmp_path: Path) -> None:
    marks = "@pytest.mark.gpu\n@pytest.mark.seconds(1)\n"
    (tmp_path / "test_hangs.py").write_text(f"import time, pytest\n{marks}def test_hangs():\n    time.sleep(60)\n")
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "tests.gpu.conftest", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, "-m", "gpu", str(tmp_path / "test_hangs.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "passed" not in run.stdout
    assert "Timeout (0:00:01)!" in run.stderr and "test_hangs.py" in run.stderr


def test_every_test_that_the_page_of_first_commands_names_is_there() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 15
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), f"{path}::{name}"
