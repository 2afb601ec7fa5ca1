"""Selection, filters and products compiled for GPUs that are not there: no spills, tensor cores, nothing built twice.

Shapes: B slots or rows of scores, T tokens in this call, G query heads per kv head, H head dim, P pages, V vocabulary;
        8 kv heads everywhere. Of a product M rows, I inputs, O outputs.
"""

import itertools
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpt_fast_sd.fast.triton import filters as filters_triton
from gpt_fast_sd.fast.triton import select as select_triton
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32, PLANES
from tests.gpt_fast_sd.fast.launching import bound, int4_product, launched, new, product
from tests.gpuless.aot import assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch
from tests.helpers import few

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


def assert_all_lean(launches: list[Launch], cap: int, stack: int = 0, *, overlaps: bool = True) -> None:
    """At most `stack` bytes per thread are spilled, and an SM holds at least two programs."""
    for launch in launches:
        if launch.compiled.stack > stack or not stack:
            assert_lean(launch.compiled, cap, overlaps=overlaps)
        assert_fits(launch.compiled, cap)
        assert_occupancy(launch.compiled, cap, 2)


def assert_quest_is_built_well(cap: int, **shape: Any) -> None:
    launches = quest(cap, 512, 24, **shape)
    assert [launch.name for launch in launches] == ["score_kernel", "weigh_kernel", "select_kernel"]
    head_dim = shape.get("head_dim")
    # Blackwell's assembler spills some of the bounds if a program holds 32 pages of 256 dims.
    stack = 96 if cap in (100, 120) and head_dim == 256 else 0
    assert_all_lean(launches, cap, stack, overlaps=head_dim != 8)  # of 8, padded to 16, one product gives all scores
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


@pytest.mark.parametrize("cap", few([100, 89, 120], [100]))
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
            assert launch.compiled.stack <= (56 if head_dim == 96 else 0) and launch.compiled.shared <= 48 << 10
    for n_tokens in (1, 5, 17):
        assert_quest_is_built_well(cap, n_tokens=n_tokens, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("cap", [80, 90])
@pytest.mark.parametrize("n_vocab", few([LLAMA_3, 151_936], [LLAMA_3]))
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


# ---- products with int8 weights --------------------------------------------------------------------------------------

WEIGHTS = [(4096, 4096), (14336, 4096), (4096, 28672)]  # (I, O): wo, w_out and w_in of an 8B model
MOST_INSTRUCTIONS = 400  # of a warp, for 64 outputs x 128 inputs x 64 rows; 4 warps


@pytest.mark.parametrize(
    ("n_rows", "cap"),
    few(itertools.product([1, 24, 64], [80, 90, 89, 100, 120]), [(1, 90), (24, 80), (24, 100), (64, 90)]),
)
def test_the_kernel_is_built_well(n_rows: int, cap: int) -> None:
    for (n_in, n_out), n_planes in itertools.product(WEIGHTS, range(3)):
        launch = product(cap, n_rows, n_in, n_out, n_planes=n_planes)
        kernel, kwargs = launch.compiled, launch.kwargs
        assert_lean(kernel, cap)
        assert kernel.hmma + kernel.hgmma + kernel.utcmma > 0
        assert kernel.count("I2F") == 0  # a conversion for each weight takes longer than reading it
        # weights and rows of the steps that are fetched ahead, 16 bytes at once
        block_n, block_k = kwargs["BLOCK_N"], kwargs["BLOCK_K"]
        ahead = block_k * (block_n * max(1, n_planes) + 2 * kwargs["BLOCK_M"]) * (kwargs["STAGES"] - 1)
        assert kernel.shared >= ahead
        assert kernel.sass.count("LDGSTS.E.BYPASS.128") == kernel.ldgsts > 0
        per_block = max(len(loop) for loop in kernel.loops) * 64 * 128 / (block_n * block_k * max(1, n_planes))
        assert cap == 100 or per_block <= MOST_INSTRUCTIONS * (1 if block_n == 64 else 1.25)


@pytest.mark.parametrize("n_rows", [1, 24])
def test_an_sm_has_enough_bytes_in_flight(n_rows: int) -> None:
    """Blocks of few outputs are about one to an SM, which with 16 KiB would wait for memory longer than it reads."""
    for n_out in (4096, 28672):
        launch = product(90, n_rows, n_out=n_out)
        block_n, block_k, stages = (launch.kwargs[name] for name in ("BLOCK_N", "BLOCK_K", "STAGES"))
        at_once = min(2, -(-n_out // block_n // 132))  # blocks of an SM
        assert block_n * block_k * (stages - 1) * at_once >= 32 << 10
        assert_occupancy(launch.compiled, 90, 2)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_other_dtypes_and_biases_are_built_without_spills(dtype: torch.dtype) -> None:
    kernel = product(80, 64, dtype=dtype, biased=True).compiled
    assert kernel.stack == kernel.spills == 0
    assert_fits(kernel, 80)


@pytest.mark.parametrize("cap", [80, 90])
def test_a_kernel_serves_every_number_of_rows_of_its_tile(cap: int) -> None:
    for first, *others in ([16, 1, 5], [32, 17], [64, 33, 100, 256]):
        kernel = product(cap, first).kernel
        assert all(product(cap, n).kernel is kernel for n in others)


def test_tiles_of_rows_are_neighbours_and_few_outputs_make_smaller_blocks() -> None:
    assert product(90, 16).grid == (1, 128) and product(90, 100).grid == (2, 128)
    assert product(90, 64, 4096, 28672).grid == (1, 448)


@pytest.mark.parametrize(
    ("n_rows", "cap"), few(itertools.product([1, 24, 64], [80, 90, 89, 100, 120]), [(1, 90), (24, 80), (64, 100)])
)
def test_int4_numbers_go_from_memory_to_the_tensor_cores_without_another_layout(n_rows: int, cap: int) -> None:
    for n_in, n_out in WEIGHTS:
        kernel = int4_product(cap, n_rows, n_in, n_out).compiled
        assert_lean(kernel, cap)
        loop = " ".join(max(kernel.loops, key=len))
        assert not re.search(r"\b(I2F|STSM?|SHFL)\b", loop) and kernel.hmma + kernel.hgmma + kernel.utcmma > 0
