"""Planes of nibbles: both are the bytes, to the last bit; what drafts read of one is as near as 4 bits can be.

What nobody reads of a row has NaNs for scales: empty slots, drafts that were rejected, and neighbours' longer texts.

Shapes: B rows, T tokens in this call, S entries, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast.ops import planes
from gpt_fast_sd.model import as_planes
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.test_int8_keys import TOLERANCE, B, K, S, is_close
from tests.gpt_fast_sd.fast.test_int8_keys import Case as Int8Case

TAIL = 64


class Case(Int8Case):
    """The same keys and values in planes."""

    def __init__(self, *shape: Any, **more: Any) -> None:
        super().__init__(*shape, **more)
        self.upper = self.q, *(as_planes(x)[0] for x in (self.k, self.v)), *self.dense[3:]
        self.lower = as_planes(self.k)[1], as_planes(self.v)[1]

    def expected_of_drafts(self, tail: int = TAIL) -> Tensor:
        """fp64 [B, N, T, H]"""
        (_, k, v, pos, _), (k_low, v_low) = self.upper, self.lower
        k, v = (
            references.meant(x, scale.nan_to_num(0.0), low, pos, tail)
            for x, scale, low in ((k, self.k_scale, k_low), (v, self.v_scale, v_low))
        )
        return references.attend_reference(self.q, k, v, pos)


BODIES: dict[str, Callable[[tuple[Any, ...], tuple[Any, ...]], Any]] = {
    "decode": lambda given, beside: kernels.decode_attention(*given, 256, *beside),
    "with mass": lambda given, beside: kernels.decode_attention_with_mass(*given, 256, 16, *beside)[0],
    "mass": lambda given, beside: kernels.decode_attention_with_mass(*given, 256, 16, *beside)[1],
    "prefill": lambda given, beside: kernels.prefill_attention(*given, *beside),
    "with lse": lambda given, beside: kernels.prefill_attention_with_lse(*given, *beside)[0],
    "lse": lambda given, beside: kernels.prefill_attention_with_lse(*given, *beside)[1],
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("n_tokens", "group", "head_dim"), [(1, 3, 80), (5, 1, 128), (63, 4, 64)])
def test_both_planes_are_read_as_the_bytes_to_the_last_bit(
    body: str, n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(n_tokens, group, head_dim, dtype)
    attend = BODIES[body]
    assert torch.equal(attend(case.upper, (*case.scales, *case.lower, 0)), attend(case.dense, case.scales))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("n_tokens", "group", "head_dim"), [(1, 1, 64), (1, 3, 128), (1, 4, 80), (5, 3, 64), (33, 2, 64), (63, 3, 80)]
)
def test_drafts_read_the_upper_plane_and_the_tail_whole(
    n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(n_tokens, group, head_dim, dtype)
    expected = case.expected_of_drafts()
    for name in ("decode", "with mass", "prefill", "with lse"):
        got = BODIES[name](case.upper, (*case.scales, *case.lower, TAIL))
        assert got.dtype == dtype and is_close(got, expected, TOLERANCE[dtype])
    whole, short = case.expected(), case.expected_of_drafts(1)
    off = [float((x - whole).norm() / whole.norm()) for x in (short, expected)]
    assert 0.005 < off[1] < off[0] < 0.5  # keys a tenth off move sharp scores by more


def test_what_a_draft_reads_is_the_middle_of_what_a_nibble_leaves_open() -> None:
    x = torch.arange(-127, 128, dtype=torch.int8)[:254].view(1, 254)
    upper, lower = as_planes(x)
    for dtype in (torch.float32, torch.bfloat16):
        whole, part = (planes.drafted(upper, lower, torch.full((1,), b), dtype) for b in (True, False))
        assert torch.equal(whole, x.to(dtype)) and torch.equal(planes.joined(upper, lower), x)
        off = part.float() - x.float()
        assert off.abs().max() == 7.5 and torch.equal((part.float() + 120.5) % 16, torch.zeros(1, 254))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tail", [0, TAIL])
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_listed_entries_are_read_alike(n_tokens: int, tail: int, dtype: torch.dtype) -> None:
    case = Case(n_tokens, group=3, dtype=dtype)
    pages = torch.tensor([[3, 0, -1], [7, 1, 2]]).repeat(B, 1, 1)  # [B, K, 3]
    listed = kernels.entries_of(pages, 16)  # [B, K, 48]
    q, k, v, pos, n_keys = case.upper
    where = listed, pos[:, 0] - 90, 100, pos, n_keys, 16
    got = kernels.sparse_attention(q, k, v, *where, *case.scales, *case.lower, tail)
    expected = references.sparse_attention(q, k, v, *where, *case.scales, *case.lower, tail)
    assert is_close(got, expected, TOLERANCE[dtype])
    if not tail:
        assert torch.equal(got, kernels.sparse_attention(q, case.k, case.v, *where, *case.scales))


def test_masses_and_slots_are_those_of_what_is_read() -> None:
    case = Case(5, group=3)
    beside = *case.scales, *case.lower, TAIL
    _, mass = kernels.decode_attention_with_mass(*case.upper, 256, 32, *beside)
    expected = references.decode_attention_with_mass(*case.upper, 256, 32, *beside)[1]
    torch.testing.assert_close(mass, expected, atol=1e-5, rtol=1e-4)
    q, k, v, pos, n_keys = case.upper
    _, lse = kernels.prefill_attention_with_lse(*case.upper, *beside)
    again = kernels.key_mass(q, k, lse, pos, n_keys, 32, case.k_scale, case.lower[0], TAIL)
    torch.testing.assert_close(again, mass, atol=1e-5, rtol=1e-4)
    slots = torch.tensor([2, 0])
    out, _ = kernels.prefill_attention_of_slots(q[slots], k, v, slots, pos[slots], n_keys, *beside)
    assert is_close(out, case.expected_of_drafts()[slots], 1e-5)


def test_bounds_of_pages_are_those_of_the_whole_keys() -> None:
    case, page = Case(1, head_dim=8), 16
    scale = case.k_scale.nan_to_num(0.5)
    made = [torch.full((B, K, S // page, 16), 7.0).bfloat16() for _ in range(3)]
    first, (upper, lower) = torch.tensor([0, 5, 60]), as_planes(case.k)
    kernels.page_bounds(case.k, made[0], first, 4, page, scale)
    kernels.page_bounds(upper, made[1], first, 4, page, scale, lower)
    references.page_bounds(upper, made[2], first, 4, page, scale, lower)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.parametrize("body", BODIES)
def test_a_scale_that_nobody_reads_may_be_anything(body: str) -> None:
    case = Case(5)
    given = case.upper, (*case.scales, *case.lower, TAIL)
    poisoned = BODIES[body](*given)
    for scale in case.scales:
        scale.nan_to_num_(3.0)
    assert torch.equal(poisoned, BODIES[body](*given)) and poisoned.isfinite().all()
