"""Flash attention of long chunks compiled for GPUs that are not there: no spills, tensor cores, copies that run ahead.

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

prefill_triton = importlib.import_module("gpt_fast_sd.kernels.prefill_triton")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMIT = SHARED_LIMIT | {80: 99 << 10}  # bytes a block: what sm_80 takes serves sm_86, 89 and 120 too
SELDOM = [(96, BF16), (128, FP16), (256, BF16), (64, FP32), (128, FP32), (256, FP32)]
SHAPES = [(64, BF16), (128, BF16), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SELDOM)]
OPS = ("prefill_attention", "prefill_attention_with_lse", "key_mass")


def launched(
    cap: int, op: str, *, n_batch: int = 1, n_tokens: int = 256, group: int = 4, head_dim: int = 128,
    dtype: torch.dtype = BF16, n_keys: int = 4096, page: int = 1,
) -> list[Launch]:  # fmt: skip
    """The kernels that one call of the launcher builds and would launch, for 8 kv heads and a cache of 8192."""
    with stand_in(cap) as launches, FakeTensorMode():

        def tensor(*shape: int, **kwargs: Any) -> torch.Tensor:
            return torch.empty(shape, device="cuda", **kwargs)

        q = tensor(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        k, v = (tensor(n_batch, 8, 8192, head_dim, dtype=dtype) for _ in range(2))
        pos = tensor(n_batch, n_tokens, dtype=torch.int64)
        if op == "prefill_attention":
            prefill_triton.attend(q, k, v, pos, n_keys, arch=cap)
        elif op == "prefill_attention_with_lse":
            prefill_triton.attend_with_lse(q, k, v, pos, n_keys, arch=cap)
        else:
            prefill_triton.key_mass(q, k, tensor(*q.shape[:3]), pos, n_keys, page, arch=cap)
    return launches


def assert_built_well(cap: int, op: str, **shape: Any) -> None:
    """The kernel is lean, copies 16 bytes at once, ahead, and takes the widest products there are."""
    [launch] = launched(cap, op, **shape)
    built = launch.compiled
    if shape.get("dtype") == FP32:  # proof, not speed: ptxas gives up a few registers for one more block an SM
        assert built.stack <= 32, built
    else:
        assert_lean(built, cap)
        assert (built.hgmma > 0) is (cap == 90) and (built.hmma > 0) is (cap == 80)
    assert built.shared <= LIMIT[cap], built
    assert built.ldgsts > 0 and built.ldgsts == built.sass.count("LDGSTS.E.BYPASS") == built.sass.count(".BYPASS.128")


@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("cap", [80, 90])
def test_the_kernels_of_an_8b_model_are_built_well(cap: int, op: str) -> None:
    assert_built_well(cap, op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("cap", [80, 90])
def test_every_entry_of_the_tables_is_built_well(cap: int, head_dim: int, dtype: torch.dtype, op: str) -> None:
    for page in (1, 16) if op == "key_mass" else (1,):
        assert_built_well(cap, op, head_dim=head_dim, dtype=dtype, page=page)


@pytest.mark.parametrize("op", OPS)
def test_no_length_and_no_number_of_rows_or_tokens_builds_another_kernel(op: str) -> None:
    [kernel] = [launch.kernel for launch in launched(90, op)]
    for change in ({"n_keys": 1}, {"n_keys": 17}, {"n_keys": 8191}, {"n_batch": 3}, {"n_tokens": 301}):
        [again] = [launch.kernel for launch in launched(90, op, **change)]
        assert again is kernel, change


def test_a_program_is_launched_for_each_tile_and_head() -> None:
    assert launched(90, "prefill_attention", n_batch=3, n_tokens=290)[0].grid == (10, 24)
    assert launched(90, "key_mass", n_batch=3, n_keys=1025)[0].grid == (9, 24)


def test_a_short_chunk_is_decoded_in_splits() -> None:
    launches = launched(90, "prefill_attention", n_tokens=32, n_keys=4096)
    assert [launch.name for launch in launches] == ["split_kernel", "merge_kernel"]
    assert launches[0].grid == (1, 8, 4096 // prefill_triton.SPLIT)
