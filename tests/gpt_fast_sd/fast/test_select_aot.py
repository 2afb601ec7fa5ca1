"""Selection and the search for the cut compiled for GPUs that are not there: no spills, tensor cores, nothing twice.

Shapes: B slots or rows of scores, T tokens in this call, G query heads per kv head, H head dim, P pages, V vocabulary;
        8 kv heads everywhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpt_fast_sd.fast.triton import filters as filters_triton
from gpt_fast_sd.fast.triton import select as select_triton
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32, PLANES
from tests.gpt_fast_sd.fast.launching import bound, launched, new
from tests.gpuless.aot import assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch

LLAMA_3 = 128_256


def top(cap: int, n_pages: int, n: int, *rows: int) -> list[Launch]:
    return launched(cap, lambda: select_triton.top_pages(new(*rows, n_pages, dtype=FP32), new(rows[0], 1), n))


def guided(cap: int, n_pages: int, n: int, page: int, n_batch: int = 4) -> list[Launch]:
    def call() -> None:
        mass, kv_indices = new(32, n_batch, 8, n_pages, dtype=FP32), new(32, n_batch, 8, n * page)
        select_triton.guided_select(mass, kv_indices, new(n_batch, dtype=torch.bool), new(n_batch), page)

    return launched(cap, call)


def bounds(cap: int, *shape: Any, **more: Any) -> list[Launch]:
    return launched(cap, lambda: bound(*shape, **more))


def quest(
    cap: int, n_pages: int, n: int, *, n_tokens: int = 1, group: int = 4, head_dim: int = 128,
    dtype: torch.dtype = BF16, n_batch: int = 4,
) -> list[Launch]:  # fmt: skip
    def call() -> None:
        q = new(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        in_view = new(n_batch, 8, 8192, 2 * head_dim, dtype=dtype).narrow(2, 0, n_pages)
        select_triton.quest_pages(q, in_view, new(n_batch), n)

    return launched(cap, call)


def likeliest(cap: int, n_rows: int, n_vocab: int) -> list[Launch]:
    def call() -> None:
        scores, top_p = new(n_rows, n_vocab, dtype=FP32), new(n_rows, dtype=torch.float64)
        filters_triton.likeliest(scores, new(n_rows), top_p)

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
    assert_all_lean([*top(cap, 1000, 24, 4, 8), *guided(cap, 1000, 24, 16), *bounds(cap)], cap)
    assert_quest_is_built_well(cap)
    for launch in bounds(cap, held=PLANES):
        assert_lean(launch.compiled, cap)


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
        for launch in bounds(cap, 4, head_dim, dtype, page=page):  # once per round, a few pages: 96 fp16 cost registers
            assert launch.compiled.stack <= (32 if head_dim == 96 else 0) and launch.compiled.shared <= 48 << 10
    for n_tokens in (1, 5, 17):
        assert_quest_is_built_well(cap, n_tokens=n_tokens, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("cap", [80, 90])
@pytest.mark.parametrize("n_vocab", [LLAMA_3, pytest.param(151_936, marks=pytest.mark.slow)])
def test_the_search_for_the_cut_is_built_well(n_vocab: int, cap: int) -> None:
    launches = likeliest(cap, 16, n_vocab)
    for launch in {launch.kernel.name + str(launch.kwargs.get("WEIGHS")): launch for launch in launches}.values():
        assert_lean(launch.compiled, cap)
        assert launch.compiled.registers <= 128  # two programs and more an SM: 64K registers
        assert "LDG.E.128" in launch.compiled.sass or launch.name != "step_kernel"  # scores come 16 bytes at once


def kernels(launches: list[Launch]) -> list[Any]:
    return [launch.kernel for launch in launches]


def test_sizes_that_vary_between_calls_rebuild_nothing() -> None:
    """Pages in view, rows, tokens, pages chosen: of 1, of 16, one more than before; steps of a search."""
    assert kernels(top(90, 1, 24, 4, 8)) == kernels(top(90, 4096, 1, 1, 8)) == kernels(top(90, 100_001, 25, 16, 1, 3))
    assert kernels(guided(90, 16, 24, 16)) == kernels(guided(90, 20_000, 1, 16, n_batch=1))
    assert kernels(bounds(90)) == kernels(bounds(90, 1, n_pages=1))
    first = kernels(quest(90, 512, 24))
    assert first == kernels(quest(90, 4097, 1, n_batch=1)) == kernels(quest(90, 1, 16, n_tokens=2))
    searches = [{*kernels(likeliest(90, n_rows, LLAMA_3))} for n_rows in (1, 16, 17, 144)]
    assert all(each == searches[0] and len(each) == 3 for each in searches)


def test_one_program_serves_a_row_and_pages_are_scored_side_by_side() -> None:
    assert [launch.grid for launch in top(90, 1000, 24, 4, 8)] == [(8, 4, 1)]
    assert [launch.grid for launch in guided(90, 1000, 24, 16)] == [(8, 4, 32)]
    assert [launch.grid for launch in quest(90, 1000, 24, n_tokens=17)] == [(16, 32, 2), (8, 32), (8, 4, 1)]


def test_a_step_of_the_search_is_one_launch_of_many_programs_per_row() -> None:
    launches = likeliest(90, 144, LLAMA_3)
    assert [launch.name for launch in launches] == ["step_kernel"] * 16 + ["cut_kernel"]
    assert {launch.grid for launch in launches[:-1]} == {(144, 32)} and launches[-1].grid == (144,)
    assert [launch.kwargs["i_step"] for launch in launches[:-1]] == list(range(16))
    assert [launch.kwargs["WEIGHS"] for launch in launches[:-1]] == [False] * 8 + [True] * 8
