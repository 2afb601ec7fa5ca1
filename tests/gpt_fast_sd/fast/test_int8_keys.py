"""Keys and values of int8 with their scales: the core attends and selects as references in fp64 and fp32 do.

What nobody reads of a row has NaNs for scales: empty slots, drafts that were rejected, and neighbours' longer texts.

Shapes: B rows, T tokens in this call, S entries, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import attention
from gpt_fast_sd.model import CacheLayer, as_int8
from gpt_fast_sd.policies import selection
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.references import layer_of

B, K, S, N_KEYS = 3, 2, 1024, 768
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of the norm; bf16 rounds queries, scores and weights


class Case:
    """Queries at the ends of texts of several lengths, and an int8 cache of which the first N_KEYS are in view."""

    def __init__(self, n_tokens: int, group: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(n_tokens + group + head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = normal(B, n_tokens, group * K, head_dim).transpose(1, 2).to(dtype)  # [B, N, T, H]
        self.k, self.k_scale = as_int8(normal(B, K, S, head_dim) * normal(B, K, S, 1).exp())
        self.v, self.v_scale = as_int8(normal(B, K, S, head_dim) * normal(B, K, S, 1).exp())
        ends = torch.tensor([300, 511, 700])
        self.pos = ends[:, None] + torch.arange(n_tokens) - n_tokens + 1  # [B, T]
        for row, end in enumerate(ends.tolist()):
            for scale in (self.k_scale, self.v_scale):
                scale[row, :, end + 1 :] = float("nan")

    @property
    def layer(self) -> CacheLayer:
        return layer_of(self.k, self.v, *self.scales)

    @property
    def dense(self) -> tuple[Tensor, CacheLayer, Tensor, int]:
        return self.q, self.layer, self.pos, N_KEYS

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return self.k_scale, self.v_scale

    def expected(self) -> Tensor:
        """fp64 [B, N, T, H]"""
        k, v = (references.meant(*x) for x in ((self.k, self.k_scale), (self.v, self.v_scale)))
        return references.attend_reference(self.q, k, v, self.pos)


def is_close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected.double()).norm() <= tolerance * expected.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("n_tokens", "group", "head_dim"),
    [(1, 1, 64), (1, 3, 128), (1, 4, 80), (5, 1, 128), (5, 3, 64), (63, 4, 64), (63, 3, 80), (200, 1, 64)],
)
def test_attention_is_that_of_what_the_numbers_stand_for(
    n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(n_tokens, group, head_dim, dtype)
    expected = case.expected()
    for page in (0, 16):
        got, _ = attention.dense(*case.dense, page)
        assert got.dtype == dtype and is_close(got, expected, TOLERANCE[dtype])


def test_masses_are_those_of_the_reference_and_sum_to_the_queries() -> None:
    case = Case(5, group=3)
    _, mass = attention.dense(*case.dense, 32)
    assert mass is not None
    expected = references.decode_attention_with_mass(*case.dense, 256, 32)[1]
    torch.testing.assert_close(mass, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mass.sum(-1), torch.full((B, K), 15.0))


def test_queries_of_some_slots_read_those_with_their_scales() -> None:
    case, slots = Case(32), torch.tensor([2, 0])
    q, layer, pos, n_keys = case.dense
    out, mass = attention.dense_of_slots(q[slots], layer, slots, pos[slots], n_keys)
    assert is_close(out, case.expected()[slots], 1e-5)
    torch.testing.assert_close(mass, references.decode_attention_with_mass(*case.dense, 256, 1)[1][slots])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_listed_entries_come_with_their_scales(n_tokens: int, dtype: torch.dtype) -> None:
    case = Case(n_tokens, group=3, dtype=dtype)
    pages = torch.tensor([[3, 0, -1], [7, 1, 2]]).repeat(B, 1, 1)  # [B, K, 3]
    where = selection.entries_of(pages, 16), case.pos[:, 0] - 40, 60, case.pos  # of [B, K, 48]
    expected = references.sparse_attention(case.q, case.layer, *where, N_KEYS, 16)
    assert is_close(attention.listed(case.q, case.layer, *where), expected, TOLERANCE[dtype])


def test_bounds_of_pages_hold_every_key_and_are_those_of_the_reference() -> None:
    case, page = Case(1, head_dim=8), 16
    scale = torch.where(case.k_scale.isnan(), 0.5, case.k_scale)
    scale[0, 0, :page] = 0.0  # a page of zeros
    made = [torch.full((B, K, S // page, 16), 7.0).bfloat16() for _ in range(2)]
    first = torch.tensor([0, 5, 60])
    for room, bounds in zip((selection, references), made, strict=True):
        room.page_bounds(layer_of(case.k, case.v, scale, case.v_scale), bounds, first, 4, page)  # type: ignore[attr-defined]
    assert torch.equal(*made)
    keys = references.meant(case.k, scale).unflatten(2, (-1, page))  # [B, K, P, page, H]
    for row, start in enumerate(first.tolist()):
        for at in range(start, start + 4):
            high, low = made[0][row, :, min(at, S // page - 1)].float().chunk(2, -1)  # [K, H] each
            of_page = keys[row, :, min(at, S // page - 1)]  # [K, page, H]
            assert (of_page <= high[:, None]).all() and (of_page >= low[:, None]).all()
            assert (high - of_page.amax(1) <= of_page.amax(1).abs() / 64 + 1e-38).all()


@pytest.mark.parametrize("page", [0, 16])
def test_a_scale_that_nobody_reads_may_be_anything(page: int) -> None:
    case = Case(5)
    poisoned = [x for x in attention.dense(*case.dense, page) if x is not None]
    for scale in case.scales:
        scale.nan_to_num_(3.0)
    again = [x for x in attention.dense(*case.dense, page) if x is not None]
    assert all(map(torch.equal, poisoned, again)) and all(x.isfinite().all() for x in poisoned)
