"""Products with int8 weights compiled for GPUs that are not there: no spills, tensor cores, wide copies that run ahead.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from gpt_fast_sd.fast.triton import int8 as int8_triton
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32
from tests.gpt_fast_sd.fast.launching import launched as launched_by
from tests.gpt_fast_sd.fast.launching import new
from tests.gpuless.aot import assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch
from tests.helpers import few

WEIGHTS = [(4096, 4096), (14336, 4096), (4096, 28672)]  # (I, O): wo, w_out and w_in of an 8B model
MOST_INSTRUCTIONS = 400  # of a warp, for 64 outputs x 128 inputs x 64 rows; 4 warps


def launched(
    cap: int, n_rows: int, n_in: int = 4096, n_out: int = 4096, dtype: torch.dtype = BF16, biased: bool = False
) -> Launch:
    """The kernel that one call of the launcher builds and would launch."""

    def call() -> None:
        x, weight, scale = new(n_rows, n_in, dtype=dtype), new(n_out, n_in, dtype=torch.int8), new(n_out, dtype=FP32)
        int8_triton.linear(x, weight, scale, new(n_out, dtype=dtype) if biased else None, arch=cap)

    (launch,) = launched_by(cap, call)
    return launch


@pytest.mark.parametrize(
    ("n_rows", "cap"), few(itertools.product([1, 24, 64], [80, 90, 89, 100, 120]), [(1, 90), (24, 80), (64, 90)])
)
def test_the_kernel_is_built_well(n_rows: int, cap: int) -> None:
    for n_in, n_out in WEIGHTS:
        launch = launched(cap, n_rows, n_in, n_out)
        kernel, kwargs = launch.compiled, launch.kwargs
        assert_lean(kernel, cap)
        assert kernel.hmma + kernel.hgmma + kernel.utcmma > 0
        assert kernel.count("I2F") == 0  # a conversion for each weight takes longer than reading it
        # weights and rows of the steps that are fetched ahead, 16 bytes at once
        block_n, block_k = kwargs["BLOCK_N"], kwargs["BLOCK_K"]
        ahead = block_k * (block_n + 2 * kwargs["BLOCK_M"]) * (kwargs["STAGES"] - 1)
        assert kernel.shared >= ahead
        assert kernel.sass.count("LDGSTS.E.BYPASS.128") == kernel.ldgsts > 0
        per_block = max(len(loop) for loop in kernel.loops) * 64 * 128 / (block_n * block_k)
        assert cap == 100 or per_block <= MOST_INSTRUCTIONS * (1 if block_n == 64 else 1.25)


@pytest.mark.parametrize("n_rows", [1, 24])
def test_blocks_of_few_outputs_have_as_many_bytes_in_flight_as_the_others(n_rows: int) -> None:
    """They are about one to an SM, which with 16 KiB would wait for memory longer than it reads; two fit."""
    for n_out in (4096, 28672):
        launch = launched(90, n_rows, n_out=n_out)
        block_n, block_k, stages = (launch.kwargs[name] for name in ("BLOCK_N", "BLOCK_K", "STAGES"))
        assert block_n * block_k * (stages - 1) >= 32 << 10
        assert_occupancy(launch.compiled, 90, 2)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_other_dtypes_and_biases_are_built_without_spills(dtype: torch.dtype) -> None:
    kernel = launched(80, 64, dtype=dtype, biased=True).compiled
    assert kernel.stack == kernel.spills == 0
    assert_fits(kernel, 80)


@pytest.mark.parametrize("cap", [80, 90])
def test_a_kernel_serves_every_number_of_rows_of_its_tile(cap: int) -> None:
    for first, *others in ([16, 1, 5], [32, 17], [64, 33, 100, 256]):
        kernel = launched(cap, first).kernel
        assert all(launched(cap, n).kernel is kernel for n in others)


def test_tiles_of_rows_are_neighbours_and_few_outputs_make_smaller_blocks() -> None:
    assert launched(90, 16).grid == (1, 128) and launched(90, 100).grid == (2, 128)
    assert launched(90, 64, 4096, 28672).grid == (1, 448)
