"""Planes of nibbles: both are the bytes, to the last bit; what drafts read of one is as near as 4 bits can be.

What nobody reads of a row has NaNs for scales: empty slots, drafts that were rejected, and neighbours' longer texts.

Shapes: B rows, T tokens in this call, S entries, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import attention
from gpt_fast_sd.model import CacheLayer, as_planes
from gpt_fast_sd.model.cache import drafted, joined
from gpt_fast_sd.policies import selection
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.fast.test_int8_keys import N_KEYS, TOLERANCE, B, K, S, is_close
from tests.gpt_fast_sd.fast.test_int8_keys import Case as Int8Case

TAIL = 64


class Case(Int8Case):
    """The same keys and values in planes."""

    def __init__(self, *shape: Any, **more: Any) -> None:
        super().__init__(*shape, **more)
        (upper_k, low_k), (upper_v, low_v) = as_planes(self.k), as_planes(self.v)
        self.planes = layer_of(upper_k, upper_v, *self.scales, low_k, low_v)

    def read(self, tail: int = TAIL) -> tuple[Tensor, CacheLayer, Tensor, int]:
        """As drafts read them; 0: whole."""
        return self.q, replace(self.planes, tail=tail), self.pos, N_KEYS

    def expected_of_drafts(self, tail: int = TAIL) -> Tensor:
        """fp64 [B, N, T, H]"""
        k, v = references.meant_by(self.read(tail)[1], self.pos)
        return references.attend_reference(self.q, k.nan_to_num(0.0), v.nan_to_num(0.0), self.pos)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(("n_tokens", "group", "head_dim"), [(1, 3, 80), (5, 1, 128), (63, 4, 64)])
def test_both_planes_are_read_as_the_bytes_to_the_last_bit(
    page: int, n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(n_tokens, group, head_dim, dtype)
    (out, mass), (expected, of_bytes) = attention.dense(*case.read(0), page), attention.dense(*case.dense, page)
    assert torch.equal(out, expected) and (mass is None or torch.equal(mass, of_bytes))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("n_tokens", "group", "head_dim"), [(1, 1, 64), (1, 3, 128), (1, 4, 80), (5, 3, 64), (33, 2, 64), (63, 3, 80)]
)
def test_drafts_read_the_upper_plane_and_the_tail_whole(
    n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(n_tokens, group, head_dim, dtype)
    expected = case.expected_of_drafts()
    for page in (0, 16):
        got, _ = attention.dense(*case.read(), page)
        assert got.dtype == dtype and is_close(got, expected, TOLERANCE[dtype])
    whole, short = case.expected(), case.expected_of_drafts(1)
    off = [float((x - whole).norm() / whole.norm()) for x in (short, expected)]
    assert 0.005 < off[1] < off[0] < 0.5  # keys a tenth off move sharp scores by more


def test_what_a_draft_reads_is_the_middle_of_what_a_nibble_leaves_open() -> None:
    x = torch.arange(-127, 128, dtype=torch.int8)[:254].view(1, 254)
    upper, lower = as_planes(x)
    for dtype in (torch.float32, torch.bfloat16):
        whole, part = (drafted(upper, lower, torch.full((1,), b), dtype) for b in (True, False))
        assert torch.equal(whole, x.to(dtype)) and torch.equal(joined(upper, lower), x)
        off = part.float() - x.float()
        assert off.abs().max() == 7.5 and torch.equal((part.float() + 120.5) % 16, torch.zeros(1, 254))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tail", [0, TAIL])
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_listed_entries_are_read_alike(n_tokens: int, tail: int, dtype: torch.dtype) -> None:
    case = Case(n_tokens, group=3, dtype=dtype)
    pages = torch.tensor([[3, 0, -1], [7, 1, 2]]).repeat(B, 1, 1)  # [B, K, 3]
    where = selection.entries_of(pages, 16), case.pos[:, 0] - 90, 100, case.pos  # of [B, K, 48]
    q, layer, _, n_keys = case.read(tail)
    got = attention.listed(q, layer, *where)
    assert is_close(got, references.sparse_attention(q, layer, *where, n_keys, 16), TOLERANCE[dtype])
    if not tail:
        assert torch.equal(got, attention.listed(q, case.layer, *where))


def test_masses_and_slots_are_those_of_what_is_read() -> None:
    case = Case(5, group=3)
    _, mass = attention.dense(*case.read(), 32)
    expected = references.decode_attention_with_mass(*case.read(), 256, 32)[1]
    torch.testing.assert_close(mass, expected, atol=1e-5, rtol=1e-4)
    slots, (q, layer, pos, n_keys) = torch.tensor([2, 0]), case.read()
    out, _ = attention.dense_of_slots(q[slots], layer, slots, pos[slots], n_keys)
    assert is_close(out, case.expected_of_drafts()[slots], 1e-5)


def test_bounds_of_pages_are_those_of_the_whole_keys() -> None:
    case, page = Case(1, head_dim=8), 16
    scale = case.k_scale.nan_to_num(0.5)
    made = [torch.full((B, K, S // page, 16), 7.0).bfloat16() for _ in range(3)]
    first, byte = torch.tensor([0, 5, 60]), replace(case.layer, k_scale=scale)
    plane = replace(case.planes, k_scale=scale, tail=TAIL)
    selection.page_bounds(byte, made[0], first, 4, page)
    selection.page_bounds(plane, made[1], first, 4, page)
    references.page_bounds(plane, made[2], first, 4, page)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.parametrize("page", [0, 16])
def test_a_scale_that_nobody_reads_may_be_anything(page: int) -> None:
    case = Case(5)
    poisoned = [x for x in attention.dense(*case.read(), page) if x is not None]
    for scale in case.scales:
        scale.nan_to_num_(3.0)
    again = [x for x in attention.dense(*case.read(), page) if x is not None]
    assert all(map(torch.equal, poisoned, again)) and all(x.isfinite().all() for x in poisoned)
