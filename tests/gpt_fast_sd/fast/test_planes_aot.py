"""Attention over planes of nibbles compiled for GPUs that are not there: no spills, tensor cores, few conversions.

Shapes: B batch, T tokens in this call, S cache capacity, G query heads per kv head, H head dim.
"""

from __future__ import annotations

import pytest
import torch

from gpt_fast_sd.fast.triton import common as triton_common
from gpt_fast_sd.fast.triton import decode as decode_triton
from gpt_fast_sd.fast.triton import prefill as prefill_triton
from gpt_fast_sd.fast.triton import select as select_triton
from gpt_fast_sd.fast.triton import sparse as sparse_triton

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.aot import assert_lean, assert_occupancy
from tests.gpuless.driver import Launch, stand_in
from tests.helpers import thinned

TAIL = 64
FP16, BF16 = torch.float16, torch.bfloat16
TAILS = [0, TAIL]


def launched(cap: int, op: str, *, n_rows: int, head_dim: int = 128, tail: int = 0, n_keys: int = 4096) -> list[Launch]:
    """The kernels that one call of a launcher builds and would launch, for 8 kv heads and a cache of 8192."""
    with stand_in(cap) as launches, FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        q = tensor(2, n_rows, 8, head_dim, dtype=BF16).transpose(1, 2)
        k, v, k_low, v_low = (tensor(2, 8, 8192, head_dim // 2, dtype=torch.uint8) for _ in range(4))
        k_scale, v_scale = (tensor(2, 8, 8192, dtype=FP16) for _ in range(2))
        layer = layer_of(k, v, k_scale, v_scale, k_low, v_low, tail)
        pos = tensor(2, n_rows)
        if op == "decode":
            decode_triton.attend(q, layer, pos, n_keys, 512, arch=cap)
        elif op == "mass":
            decode_triton.attend_with_mass(q, layer, pos, n_keys, 512, 16, arch=cap)
        elif op == "prefill":
            prefill_triton._attend(q, layer, pos, n_keys, None, cap)
        elif op == "key_mass":
            lse = tensor(*q.shape[:3], dtype=torch.float32)
            prefill_triton.key_mass(q, layer, lse, pos, n_keys, 1, arch=cap)
        elif op == "sparse":
            kv_indices, start = tensor(2, 8, 448), tensor(2)
            sparse_triton.attend(q, layer, kv_indices, start, 74, pos, n_keys, 16, arch=cap)
        else:
            bounds = tensor(2, 8, 512, 2 * head_dim, dtype=BF16)
            select_triton.page_bounds(layer, bounds, tensor(2), 4, 16)
    return launches


def per_sm(cap: int, launch: Launch, head_dim: int, n_rows: int) -> int:
    """Thread blocks that the table of a kernel says an SM should hold."""
    family, block_h = triton_common.family(cap), max(head_dim, 64)
    if launch.name == "split_kernel":
        return int(decode_triton.config(cap, 1, block_h, n_rows).per_sm)
    if launch.name == "chunk_kernel":
        return int(sparse_triton.config(cap, 1, block_h, n_rows).per_sm)
    table = prefill_triton.PREFILL if launch.name == "prefill_kernel" else prefill_triton.KEY_MASS
    return int(table[family, 1, block_h][-1])


def assert_built_well(cap: int, op: str, n_rows: int, tail: int, head_dim: int = 128) -> None:
    """All kernels are lean; the one that reads keys takes tensor cores, and copies to shared memory ahead."""
    launches = launched(cap, op, n_rows=n_rows, tail=tail, head_dim=head_dim)
    for launch in launches:
        assert_lean(launch.compiled, cap)
    first = launches[0]
    assert_occupancy(first.compiled, cap, per_sm(cap, first, head_dim, n_rows))
    assert first.compiled.hmma + first.compiled.hgmma > 0 and first.compiled.ldgsts > 0


FEW = [
    (80, "decode", 4), (80, "sparse", 4), (90, "decode", 4), (90, "mass", 20), (90, "sparse", 4), (90, "prefill", 256),
    (90, "key_mass", 128),
]  # fmt: skip


@thinned("asked,tail", FEW, TAILS)
def test_the_kernels_of_an_8b_model_are_built_well(asked: tuple[int, str, int], tail: int) -> None:
    cap, op, n_rows = asked
    assert_built_well(cap, op, n_rows, tail)


@pytest.mark.parametrize("cap", [80, 90])
def test_bounds_of_pages_are_built_well(cap: int) -> None:
    [launch] = launched(cap, "bounds", n_rows=1)
    assert_lean(launch.compiled, cap)


@pytest.mark.slow
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [80, 89, 90])
def test_every_entry_of_the_tables_is_built_well(cap: int, head_dim: int, tail: int) -> None:
    for n_rows in decode_triton.CONFIGS[triton_common.family(cap), 1, head_dim][1]:
        for op in ("decode", "mass"):
            assert_built_well(cap, op, n_rows, tail, head_dim)
    for n_rows in (4, 32, 136):
        assert_built_well(cap, "sparse", n_rows, tail, head_dim)
    for op in ("prefill", "key_mass"):
        assert_built_well(cap, op, 256, tail, head_dim)


@pytest.mark.parametrize("cap", [80, 90])
def test_a_draft_is_given_half_of_a_cache_and_the_rest_by_mask(cap: int) -> None:
    """One kernel for every length; the number of tokens that a draft reads whole is built in."""
    kernels = [launch.kernel for launch in launched(cap, "decode", n_rows=4, tail=TAIL)]
    for n_keys in (1, 17, 8191):
        again = [launch.kernel for launch in launched(cap, "decode", n_rows=4, tail=TAIL, n_keys=n_keys)]
        assert all(one is other for one, other in zip(again, kernels, strict=True))


@pytest.mark.parametrize("cap", [80, 90])
def test_nibbles_are_put_together_four_at_once(cap: int) -> None:
    """As bytes of a register; then they are widened as those of an int8 cache."""
    split = launched(cap, "decode", n_rows=4, tail=TAIL)[0]
    block = max(split.compiled.loops, key=len)
    assert sum("I2F" in instruction for instruction in block) <= 4  # of positions and masks
