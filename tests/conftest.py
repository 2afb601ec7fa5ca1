"""Shared by all tests: a fixed seed, few threads, one compile cache for the whole run."""

import atexit
import os
import shutil
import tempfile

import pytest
import torch

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers and subprocesses inherit it, so kernels compile once
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="gpt_fast_sd_inductor_")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores
    os.environ["OMP_NUM_THREADS"] = "1"  # also for processes that they start
    torch.set_num_threads(1)
elif "OMP_NUM_THREADS" not in os.environ:  # tiny tensors: more threads only wait for each other
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """Every test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)
