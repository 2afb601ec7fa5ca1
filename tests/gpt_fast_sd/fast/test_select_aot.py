"""Selection compiled for GPUs that are not there: no spills, tensor cores for products, nothing built twice.

Shapes: B slots, T tokens in this call, G query heads per kv head, H head dim, P pages; 8 kv heads everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt_fast_sd.fast.triton import select as select_triton

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.aot import assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch, stand_in

FP32, FP16, BF16, INT = torch.float32, torch.float16, torch.bfloat16, torch.int64


def launched(cap: int, call: Callable[..., Any]) -> list[Launch]:
    """The kernels that call builds and would launch; it is given a maker of tensors (*shape, dtype)."""
    with stand_in(cap) as launches, FakeTensorMode():
        call(lambda *shape, dtype=INT: torch.empty(shape, device="cuda", dtype=dtype))
    return launches


def top(cap: int, n_pages: int, n: int, *rows: int) -> list[Launch]:
    return launched(cap, lambda new: select_triton.top_pages(new(*rows, n_pages, dtype=FP32), new(rows[0], 1), n))


def guided(cap: int, n_pages: int, n: int, page: int, n_batch: int = 4) -> list[Launch]:
    def call(new: Callable[..., torch.Tensor]) -> None:
        mass, kv_indices = new(32, n_batch, 8, n_pages, dtype=FP32), new(32, n_batch, 8, n * page)
        select_triton.guided_select(mass, kv_indices, new(n_batch, dtype=torch.bool), new(n_batch), page)

    return launched(cap, call)


def bounds(cap: int, page: int, head_dim: int, dtype: torch.dtype, n_pages: int = 2, n_batch: int = 4) -> list[Launch]:
    def call(new: Callable[..., torch.Tensor]) -> None:
        k = new(n_batch, 8, 4096, head_dim, dtype=dtype)
        made = new(n_batch, 8, 4096 // page, 2 * head_dim, dtype=dtype)
        select_triton.page_bounds(layer_of(k, k), made, new(n_batch), n_pages, page)

    return launched(cap, call)


def quest(
    cap: int, n_pages: int, n: int, *, n_tokens: int = 1, group: int = 4, head_dim: int = 128,
    dtype: torch.dtype = BF16, n_batch: int = 4,
) -> list[Launch]:  # fmt: skip
    def call(new: Callable[..., torch.Tensor]) -> None:
        q = new(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        in_view = new(n_batch, 8, 8192, 2 * head_dim, dtype=dtype).narrow(2, 0, n_pages)
        select_triton.quest_pages(q, in_view, new(n_batch), n)

    return launched(cap, call)


def assert_all_lean(launches: list[Launch], cap: int, stack: int = 0) -> None:
    """At most `stack` bytes per thread are spilled, and an SM holds at least two programs."""
    for launch in launches:
        if launch.compiled.stack > stack or not stack:
            assert_lean(launch.compiled, cap)
        assert_fits(launch.compiled, cap)
        assert_occupancy(launch.compiled, cap, 2)


def assert_quest_is_built_well(cap: int, **shape: Any) -> None:
    launches = quest(cap, 512, 24, **shape)
    assert [launch.name for launch in launches] == ["score_kernel", "weigh_kernel", "select_kernel"]
    # Blackwell's assembler spills some of the bounds if a program holds 32 pages of 256 dims.
    assert_all_lean(launches, cap, stack=96 if cap in (100, 120) and shape.get("head_dim") == 256 else 0)
    score = launches[0]
    if shape.get("dtype") != FP32:
        wide = {90: score.compiled.hgmma, 100: score.compiled.utcmma} if score.kwargs["BLOCK_R"] >= 64 else {}
        assert wide.get(cap, score.compiled.hmma) > 0
    if score.kwargs["BLOCK_H"] < 64:
        return  # a key is shorter than what a few threads load at once
    per_thread = 2 * score.kwargs["BLOCK_P"] * score.kwargs["BLOCK_H"] * score.kwargs["p_q"].element_size() // 128
    assert score.compiled.sass.count("LDG.E.128") >= per_thread // 16  # bounds come 16 bytes at once


@pytest.mark.parametrize("cap", [80, 90])
def test_the_kernels_of_an_8b_model_are_built_well(cap: int) -> None:
    assert_all_lean([*top(cap, 1000, 24, 4, 8), *guided(cap, 1000, 24, 16), *bounds(cap, 16, 128, BF16)], cap)
    assert_quest_is_built_well(cap)


@pytest.mark.parametrize("cap", [100, *(pytest.param(cap, marks=pytest.mark.slow) for cap in (89, 120))])
def test_they_are_built_well_for_devices_that_no_table_is_named_after(cap: int) -> None:
    assert_quest_is_built_well(cap)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
def test_every_kernel_is_built_well(head_dim: int, dtype: torch.dtype, cap: int) -> None:
    for page in (16, 32, 64, 128):
        assert_all_lean(guided(cap, 100, 4, page), cap)
        for launch in bounds(cap, page, head_dim, dtype):  # once per round, a few pages: 96 fp16 cost some registers
            assert launch.compiled.stack <= (32 if head_dim == 96 else 0) and launch.compiled.shared <= 48 << 10
    for n_tokens in (1, 5, 17):
        assert_quest_is_built_well(cap, n_tokens=n_tokens, head_dim=head_dim, dtype=dtype)


def kernels(launches: list[Launch]) -> list[Any]:
    return [launch.kernel for launch in launches]


def test_sizes_that_vary_between_calls_rebuild_nothing() -> None:
    """Pages in view, rows, tokens, pages chosen: of 1, of 16, one more than before."""
    assert kernels(top(90, 1, 24, 4, 8)) == kernels(top(90, 4096, 1, 1, 8)) == kernels(top(90, 100_001, 25, 16, 1, 3))
    assert kernels(guided(90, 16, 24, 16)) == kernels(guided(90, 20_000, 1, 16, n_batch=1))
    assert kernels(bounds(90, 16, 128, BF16)) == kernels(bounds(90, 16, 128, BF16, n_pages=1, n_batch=1))
    first = kernels(quest(90, 512, 24))
    assert first == kernels(quest(90, 4097, 1, n_batch=1)) == kernels(quest(90, 1, 16, n_tokens=2))


def test_one_program_serves_a_row_and_pages_are_scored_side_by_side() -> None:
    assert [launch.grid for launch in top(90, 1000, 24, 4, 8)] == [(8, 4, 1)]
    assert [launch.grid for launch in guided(90, 1000, 24, 16)] == [(8, 4, 32)]
    assert [launch.grid for launch in quest(90, 1000, 24, n_tokens=17)] == [(16, 32, 2), (8, 32), (8, 4, 1)]
