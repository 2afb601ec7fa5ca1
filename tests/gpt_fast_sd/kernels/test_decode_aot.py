"""Flash-decoding compiled for GPUs that are not there: no spills, tensor cores, and copies that run ahead.

Shapes: B batch, T tokens in this call, S keys in view, G query heads a kv head, H head dim.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpuless.aot import SHARED_LIMIT, assert_lean
from tests.gpuless.driver import Launch, stand_in

decode_triton = importlib.import_module("gpt_fast_sd.kernels.decode_triton")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMIT = SHARED_LIMIT | {80: 99 << 10}  # bytes a block: what sm_80 takes serves sm_86, 89 and 120 too
SELDOM = [(96, BF16), (128, FP16), (256, BF16), (64, FP32), (128, FP32), (256, FP32)]
SHAPES = [(64, BF16), (128, BF16), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SELDOM)]


def launched(
    cap: int, *, n_batch: int = 2, n_tokens: int = 1, group: int = 4, head_dim: int = 128, dtype: torch.dtype = BF16,
    n_keys: int = 4096, page: int | None = None,
) -> list[Launch]:  # fmt: skip
    """The kernels that one call of the launcher builds and would launch, for 8 kv heads and a cache of 8192."""
    with stand_in(cap) as launches, FakeTensorMode():

        def tensor(*shape: int, **kwargs: Any) -> torch.Tensor:
            return torch.empty(shape, device="cuda", **kwargs)

        q = tensor(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        k, v = (tensor(n_batch, 8, 8192, head_dim, dtype=dtype) for _ in range(2))
        pos = tensor(n_batch, n_tokens, dtype=torch.int64)
        if page is None:
            decode_triton.attend(q, k, v, pos, n_keys, 512, arch=cap)
        else:
            decode_triton.attend_with_mass(q, k, v, pos, n_keys, 512, page, arch=cap)
    return launches


def assert_built_well(cap: int, n_rows: int, **shape: Any) -> None:
    """All kernels are lean; the one that reads keys copies 16 bytes at once, ahead, and takes the widest products."""
    launches = launched(cap, n_tokens=n_rows, group=1, **shape)
    split = launches[0].compiled
    for built in (launch.compiled for launch in launches):
        if shape.get("dtype") == FP32:  # proof, not speed: ptxas gives up a few registers for one more block an SM
            assert built.stack <= 32, built
        else:
            assert_lean(built, cap)
        assert built.shared <= LIMIT[cap], built
    assert split.ldgsts > 0 and split.ldgsts == split.sass.count("LDGSTS.E.BYPASS") == split.sass.count(".BYPASS.128")
    if shape.get("dtype") != FP32:
        wide = cap == 90 and launches[0].kwargs["BLOCK_R"] >= 64
        assert (split.hgmma > 0) is wide and (split.hmma > 0) is not wide


@pytest.mark.parametrize("cap", [80, 90])
@pytest.mark.parametrize(("n_rows", "page"), [(16, None), (32, 16), (64, None)])
def test_the_kernels_of_an_8b_model_are_built_well(n_rows: int, page: int | None, cap: int) -> None:
    assert_built_well(cap, n_rows, page=page)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("cap", [80, 90])
def test_every_entry_of_the_table_is_built_well(cap: int, head_dim: int, dtype: torch.dtype, page: int | None) -> None:
    block_h = {96: 128}.get(head_dim, head_dim)
    for n_rows in decode_triton.CONFIGS[cap, dtype.itemsize, block_h][1]:
        assert_built_well(cap, n_rows, head_dim=head_dim, dtype=dtype, page=page)


def test_no_length_and_no_number_of_rows_or_tokens_of_one_tile_builds_another_kernel() -> None:
    kernels = [launch.kernel for launch in launched(90, page=16)]
    assert [kernel.metadata.name for kernel in kernels] == ["split_kernel", "merge_kernel", "mass_kernel"]
    for change in ({"n_keys": 1}, {"n_keys": 17}, {"n_keys": 8191}, {"n_batch": 1}, {"n_batch": 3}, {"n_tokens": 3}):
        again = [launch.kernel for launch in launched(90, page=16, **change)]
        assert all(one is other for one, other in zip(again, kernels, strict=True)), change


@pytest.mark.parametrize("cap", [80, 90])
def test_tiles_of_16_and_of_32_rows_sum_over_keys_in_the_same_order(cap: int) -> None:
    layouts = []
    for n_tokens in (1, 5):
        kernel = launched(cap, n_tokens=n_tokens)[0].kernel
        layouts.append([line for line in kernel.asm["ttgir"].splitlines() if line.startswith("#mma")])
    assert len(layouts[0]) == 1 and layouts[0] == layouts[1]


def test_a_program_is_launched_for_each_tile_and_head_and_split() -> None:
    split, merge, mass = launched(90, n_tokens=50, n_batch=3, n_keys=1025, page=32)  # 200 rows of a kv head
    assert split.grid == (2, 24, 3) and merge.grid == (200, 24) and mass.grid == (1, 24)
