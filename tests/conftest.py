"""Shared by all tests: a fixed seed, few threads, one compile cache for the whole run, short garbage collections."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

# What takes longest is begun first: a worker that came to it last would leave the others idle.
DEAR = """
    tp/test_ranks fast/test_interpreted tp/test_processes fast/test_attention_aot tp/test_codegen fast/test_cpu
    gpt_fast_sd/test_ways gpt_fast_sd/test_compile gpt_fast_sd/test_packing
""".split()

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # workers and subprocesses inherit it, so kernels compile once
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="gpt_fast_sd_inductor_")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores
    os.environ["OMP_NUM_THREADS"] = "1"  # also for processes that they start
    torch.set_num_threads(1)
elif "OMP_NUM_THREADS" not in os.environ:  # tiny tensors: more threads only wait for each other
    torch.set_num_threads(min(2, os.cpu_count() or 1))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # of xdist, which would begin with the files of most tests
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.with_suffix("").as_posix()
        return next((i for i, name in enumerate(DEAR) if path.endswith(name)), len(DEAR))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # torch, its compiler and all tests: a collection that walks through them takes seconds


@pytest.fixture(scope="module", autouse=True)
def what_a_file_left_is_not_looked_at_again() -> Iterator[None]:
    """What compilers keep, for the most part; what was garbage is gone."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """Every test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)
