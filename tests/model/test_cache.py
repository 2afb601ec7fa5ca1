"""The static cache: how much it holds, and in which memory; what is written to it, tests of prefill and rounds read.

Shapes: B batch rows ("slots").
"""

import errno
import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.model import FORMATS, KVCache, buffers
from tests.helpers import form_of, tiny_config

B = 4


def test_capacity_and_views_are_of_whole_splits_and_of_two_at_least() -> None:
    for asked, capacity in ((1, 512), (257, 512), (512, 512), (513, 768), (768, 768)):
        cache = KVCache(tiny_config(), B, asked, format=FORMATS["fp32"], device=torch.device("cpu"))
        assert cache.capacity == capacity
        assert all(buffer.shape[2] >= capacity for buffer in cache.buffers)
    for n_keys, n_splits in ((1, 2), (256, 2), (512, 2), (513, 3), (768, 3), (769, 4)):
        assert KVCache.splits(n_keys) == n_splits


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_large_buffers_ask_for_huge_pages_and_small_ones_do_not(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    large = KVCache(tiny_config(n_layers=1), B, 2**21 // (B * 2), format=form_of(dtype), device=cpu)
    small = KVCache(tiny_config(n_layers=1), B, 300, format=form_of(dtype), device=cpu)
    halves = [large.layers[0].k, large.layers[0].v]
    assert all(x.nbytes >= buffers.HUGE_PAGE and not x.any() for x in halves)
    if asks_for_huge_pages(torch.zeros(1)) or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("no huge pages here, or all memory asks for them")
    assert all(asks_for_huge_pages(x) for x in halves)
    assert not any(asks_for_huge_pages(x) for x in small.buffers)
    for x in halves:  # a tensor like any other
        x[1, :, 7] = 3
        assert x.sum() == 3 * x.shape[1] * x.shape[3] and x.clone().equal(x) and x.data_ptr() % 64 == 0


def asks_for_huge_pages(x: Tensor) -> bool:
    """Whether the mapping that holds a tensor is marked so, as /proc/PID/smaps says."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= x.data_ptr() < end
        elif first == "VmFlags:" and inside:
            return "hg" in rest
    raise AssertionError("no mapping holds it")


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize("name", ["mmap", "madvise"])  # what the system refuses
def test_without_huge_pages_or_a_mapping_the_cache_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    stand_in = refused if name == "mmap" else type("Refusing", (mmap.mmap,), {"madvise": refused})
    monkeypatch.setattr(buffers.mmap, "mmap", stand_in)
    cache = KVCache(tiny_config(n_layers=1), B, 2**21 // B, format=FORMATS["bf16"], device=torch.device("cpu"))
    assert cache.layers[0].k.nbytes >= buffers.HUGE_PAGE and not any(x.any() for x in cache.buffers)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_a_room_holds_small_tensors_side_by_side_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    room = buffers.HugePageArena()
    weights = [torch.randn(33, 7), torch.randn(5, 2, 3).bfloat16(), torch.arange(9, dtype=torch.uint8)]
    kept = [room.keep(x) for x in weights]
    assert all(x.equal(own) and x.dtype == own.dtype for x, own in zip(kept, weights, strict=True))
    assert [x.data_ptr() - kept[0].data_ptr() for x in kept] == [0, 15 * 64, 16 * 64]
    assert not kept[0].data_ptr() % 64
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert asks_for_huge_pages(kept[2])
    large = room.keep(torch.zeros(buffers.ARENA + 1, dtype=torch.uint8))  # more than is taken at a time
    assert len(large) == buffers.ARENA + 1 and kept[0].equal(weights[0])
    monkeypatch.setattr(buffers.sys, "platform", "darwin")
    assert buffers.HugePageArena().keep(weights[0]) is weights[0]
