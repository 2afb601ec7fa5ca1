"""Sparse attention compiled for GPUs that are not there: no spills, tensor cores, wide copies that run ahead.

Shapes: B batch, T tokens in this call, S cache capacity, G query heads per kv head, H head dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_fast_sd.fast.triton import common as triton_common
from gpt_fast_sd.fast.triton import sparse as sparse_triton

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.aot import Compiled, assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch, stand_in
from tests.helpers import few, thinned

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8 = torch.int8


def slow(value: object) -> object:
    """A parameter that models seldom have."""
    return pytest.param(value, marks=pytest.mark.slow)


OTHERS = [89, 100, 120]  # devices that a family serves besides the one it is named after
ONE_CHUNK, SEVERAL = (112, 42), (448, 74)  # listed entries, width of the window


def launched(
    cap: int, entries: tuple[int, int], *, n_batch: int = 2, n_tokens: int = 1, group: int = 4, head_dim: int = 128,
    dtype: torch.dtype = BF16, held: torch.dtype | None = None, page: int = 16, n_keys: int = 4096,
    list_dtype: torch.dtype = torch.int64,
) -> list[Launch]:  # fmt: skip
    """The kernels that one call of the launcher builds and would launch, for 8 kv heads and a cache of 8192."""
    n_listed, width = entries
    with stand_in(cap) as launches, FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        q = tensor(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        buffers = [tensor(n_batch, 8, 8192, head_dim, dtype=held or dtype) for _ in range(2)]
        buffers += [tensor(n_batch, 8, 8192, dtype=FP16) for _ in range(2)] if held == INT8 else []
        kv_indices = tensor(n_batch, 8, n_listed, dtype=list_dtype)
        start, pos = tensor(n_batch), tensor(n_batch, n_tokens)
        sparse_triton.attend(q, layer_of(*buffers), kv_indices, start, width, pos, n_keys, page, arch=cap)
    return launches


def wide_copies(kernel: Compiled) -> int:
    return kernel.sass.count("LDGSTS.E.BYPASS.128")


def assert_built_well(cap: int, entries: tuple[int, int], n_rows: int, **shape: Any) -> None:
    """All kernels are lean; the one that reads keys copies 16 bytes at once, ahead, and takes the widest products."""
    launches = launched(cap, entries, n_tokens=n_rows, group=1, **shape)
    assert [launch.name for launch in launches] == ["chunk_kernel", "merge_kernel"][: 1 + (entries is SEVERAL)]
    for launch in launches:
        if shape.get("dtype") == FP32:
            # for one more thread block per SM, the assembler may put two registers aside
            assert launch.compiled.stack <= 16
            assert_fits(launch.compiled, cap)
        else:
            assert_lean(launch.compiled, cap)
    chunk, kwargs = launches[0].compiled, launches[0].kwargs
    # all numbers of a block of keys and values, once in the loop and once for each block that is fetched ahead of it
    block = 2 * kwargs["BLOCK_N"] * kwargs["BLOCK_H"] * launches[0].kwargs["p_k"].element_size()
    ahead = (kwargs["STAGES"] - 1) // 2
    copies = block * (1 + ahead) // (16 * 32 * kwargs["num_warps"])
    # products in tensor memory (sm_100) have a prologue of their own, which copies again
    assert wide_copies(chunk) == copies or (cap == 100 and chunk.utcmma > 0 and wide_copies(chunk) > copies)
    assert chunk.shared >= block * ahead
    rows = kwargs["BLOCK_R"]
    size = triton_common.entry_size(kwargs["p_q"], kwargs["p_k"])
    config = sparse_triton.config(cap, size, kwargs["BLOCK_H"], rows)
    assert_occupancy(chunk, cap, config.per_sm)
    if shape.get("dtype") != FP32:
        products = {90: chunk.hgmma, 100: chunk.utcmma}.get(cap, chunk.hmma) if rows == 64 else chunk.hmma
        assert products > 0


@thinned("asked,cap", [(SEVERAL, 4, 16), (SEVERAL, 4, 1), (ONE_CHUNK, 20, 16)], [80, 90])
def test_the_kernels_of_an_8b_model_are_built_well(asked: tuple[tuple[int, int], int, int], cap: int) -> None:
    entries, n_rows, page = asked
    assert_built_well(cap, entries, n_rows, page=page)


@pytest.mark.parametrize("cap", [80, 90])
def test_they_are_built_well_over_int8_caches(cap: int) -> None:
    assert_built_well(cap, SEVERAL, 4, page=16, held=INT8)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("n_rows", [4, 32, 136])
def test_every_entry_of_the_table_is_built_well_over_a_cache_of_bytes(n_rows: int, head_dim: int, cap: int) -> None:
    assert_built_well(cap, ONE_CHUNK, n_rows, page=16, head_dim=head_dim, held=INT8)


@pytest.mark.parametrize("cap", few(OTHERS, [100]))
def test_they_are_built_well_for_devices_that_no_table_is_named_after(cap: int) -> None:
    assert_built_well(cap, ONE_CHUNK, 4, page=16)


@pytest.mark.parametrize("cap", [90, *map(slow, (80, *OTHERS))])
@pytest.mark.parametrize("dtype", [slow(FP32), slow(FP16), BF16])
@pytest.mark.parametrize("head_dim", [64, slow(96), 128, slow(256)])
@pytest.mark.parametrize("n_rows", [slow(4), 32, slow(136)])
def test_every_kernel_is_built_well(n_rows: int, head_dim: int, dtype: torch.dtype, cap: int) -> None:
    for entries in (ONE_CHUNK, SEVERAL):
        for page in (1, 16):
            assert_built_well(cap, entries, n_rows, page=page, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("cap", [80, 90])
def test_sizes_that_vary_between_calls_rebuild_nothing(cap: int) -> None:
    first = launched(cap, SEVERAL)
    # rows, tokens, lists, windows and keys in view: of 1, not of 16, one more than before
    for varied in (
        launched(cap, SEVERAL, n_batch=1),
        launched(cap, SEVERAL, n_batch=3, n_tokens=2),
        launched(cap, SEVERAL, n_tokens=3, n_keys=4097),
        launched(cap, (400, 121)),
        launched(cap, (368, 160)),
    ):
        assert [launch.kernel for launch in varied] == [launch.kernel for launch in first]


def test_the_grid_depends_on_the_list_alone_and_one_chunk_needs_no_merge() -> None:
    assert [launch.grid for launch in launched(90, SEVERAL)] == [(5, 16, 1), (4, 16)]
    assert [launch.grid for launch in launched(90, SEVERAL, n_batch=32, n_tokens=4)] == [(5, 256, 1), (16, 256)]
    assert [launch.grid for launch in launched(90, (4000, 138))] == [(9, 16, 1), (4, 16)]
    assert [launch.grid for launch in launched(90, ONE_CHUNK)] == [(1, 16, 1)]
