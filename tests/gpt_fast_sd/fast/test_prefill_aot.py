"""Flash attention of long chunks compiled for GPUs that are not there: no spills, tensor cores, copies that run ahead.

Shapes: B batch, T tokens in this call, S keys in view, G query heads per kv head, H head dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_fast_sd.fast.triton import common as triton_common
from gpt_fast_sd.fast.triton import prefill as prefill_triton

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.aot import assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch, stand_in

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8 = torch.int8
SELDOM = [(96, BF16), (128, FP16), (256, BF16), (64, FP32), (128, FP32), (256, FP32)]
SHAPES = [(64, BF16), (128, BF16), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SELDOM)]
OTHERS = [89, 100, 120]  # devices that a family serves besides the one it is named after
OPS = ("prefill_attention", "prefill_attention_with_lse", "key_mass")


def slow(*values: object) -> Any:
    """Parameters that take too long for every run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def launched(
    cap: int, op: str, *, n_batch: int = 1, n_tokens: int = 256, group: int = 4, head_dim: int = 128,
    dtype: torch.dtype = BF16, held: torch.dtype | None = None, n_keys: int = 4096, page: int = 1,
) -> list[Launch]:  # fmt: skip
    """The kernels that one call of the launcher builds and would launch, for 8 kv heads and a cache of 8192."""
    with stand_in(cap) as launches, FakeTensorMode():

        def tensor(*shape: int, **kwargs: Any) -> torch.Tensor:
            return torch.empty(shape, device="cuda", **kwargs)

        q = tensor(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        buffers = [tensor(n_batch, 8, 8192, head_dim, dtype=held or dtype) for _ in range(2)]
        buffers += [tensor(n_batch, 8, 8192, dtype=FP16) for _ in range(2)] if held == INT8 else []
        layer = layer_of(*buffers)
        pos = tensor(n_batch, n_tokens, dtype=torch.int64)
        if op == "prefill_attention":
            prefill_triton.attend(q, layer, pos, n_keys, arch=cap)
        elif op == "prefill_attention_with_lse":
            prefill_triton.attend_with_lse(q, layer, pos, n_keys, arch=cap)
        else:
            prefill_triton.key_mass(q, layer, tensor(*q.shape[:3]), pos, n_keys, page, arch=cap)
    return launches


def assert_built_well(cap: int, op: str, **shape: Any) -> None:
    """The kernel is lean, copies 16 bytes at once, ahead, and takes the widest products there are.

    As many of its blocks as the table says are on an SM together.
    """
    [launch] = launched(cap, op, **shape)
    built, itemsize = launch.compiled, triton_common.entry_size(launch.kwargs["p_q"], launch.kwargs["p_k"])
    if shape.get("dtype") == FP32:  # proof, not speed: ptxas gives up a few registers for one more block an SM
        assert built.stack <= 32, built
        assert_fits(built, cap)
    else:
        assert_lean(built, cap)
        products = {"hmma": built.hmma, "hgmma": built.hgmma, "utcmma": built.utcmma}
        assert [kind for kind, n in products.items() if n > 0] == [{90: "hgmma", 100: "utcmma"}.get(cap, "hmma")]
    table = prefill_triton.KEY_MASS if op == "key_mass" else prefill_triton.PREFILL
    assert_occupancy(built, cap, table[triton_common.family(cap), itemsize, max(launch.kwargs["BLOCK_H"], 64)][-1])
    assert built.ldgsts > 0 and built.ldgsts == built.sass.count("LDGSTS.E.BYPASS") == built.sass.count(".BYPASS.128")


@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("cap", [80, 90])
def test_the_kernels_of_an_8b_model_are_built_well(cap: int, op: str) -> None:
    assert_built_well(cap, op)


@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("cap", [80, 90])
def test_they_are_built_well_over_int8_caches(cap: int, op: str) -> None:
    assert_built_well(cap, op, held=INT8)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [80, 90])
def test_every_entry_of_the_tables_is_built_well_over_a_cache_of_bytes(cap: int, head_dim: int, op: str) -> None:
    assert_built_well(cap, op, held=INT8, head_dim=head_dim)


@pytest.mark.parametrize(
    ("op", "cap"),
    [("key_mass", 120), *(pytest.param("prefill_attention", cap, marks=pytest.mark.slow) for cap in (89, 100))],
)
def test_they_are_built_well_for_devices_that_no_table_is_named_after(op: str, cap: int) -> None:
    assert_built_well(cap, op)


@pytest.mark.parametrize(("cap", "most"), [(80, 320), (90, 540)])
def test_blocks_without_a_mask_take_few_instructions_and_scale_no_score_by_itself(cap: int, most: int) -> None:
    """A score is scaled and made an exponent in one instruction: a multiplication each would be a ninth more."""
    [launch] = launched(cap, "prefill_attention")
    tile = launch.kwargs["BLOCK_R"] * launch.kwargs["BLOCK_N"] // (32 * launch.compiled.warps)
    out = launch.kwargs["BLOCK_R"] * launch.kwargs["BLOCK_H"] // (32 * launch.compiled.warps)
    plain = min(launch.compiled.loops, key=len)
    assert len(plain) <= most
    assert sum("FMUL" in code for code in plain) < tile // 4 + out  # what was summed shrinks, rows' maxima are scaled


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("cap", [80, 90, *(pytest.param(cap, marks=pytest.mark.slow) for cap in OTHERS)])
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
    assert launches[0].grid == (1, 8, 4096 // prefill_triton.PREFILL_SPLIT)
