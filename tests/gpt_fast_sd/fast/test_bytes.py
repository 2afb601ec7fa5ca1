"""Keys and values of int8 with their scales, and in planes of nibbles: the core attends and selects as references do.

Both planes are the bytes, to the last bit; what drafts read of one is as near as 4 bits can be. What nobody reads of a
row has NaNs for scales: empty slots, drafts that were rejected, and neighbours' longer texts.

Shapes: B rows, T tokens in this call, S entries, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import attention
from gpt_fast_sd.model import CacheLayer, as_planes
from gpt_fast_sd.model.cache import drafted, joined
from gpt_fast_sd.policies import selection
from tests.gpt_fast_sd.fast import dense, references
from tests.gpt_fast_sd.fast.dense import BF16, FP32, INT8, PLANES

B, K, S, N_KEYS = 3, 2, 1024, 768
TAIL = 64
TOLERANCE = {FP32: 1e-5, BF16: 0.02}  # of the norm; bf16 rounds queries, scores and weights

each_form = pytest.mark.parametrize("form", ["int8", "planes", "draft"])  # planes read whole, and as drafts do


class Case(dense.Case):
    """Queries at the ends of texts of several lengths, and a cache of which the first N_KEYS are in view."""

    def __init__(
        self, n_tokens: int, group: int = 2, head_dim: int = 64, dtype: torch.dtype = FP32, form: str = "int8",
        tail: int = TAIL,
    ) -> None:  # fmt: skip
        super().__init__(
            [300, 511, 700], n_tokens=n_tokens, group=group, n_kv=K, head_dim=head_dim, n_keys=N_KEYS,
            spare=S - N_KEYS, dtype=dtype, held=INT8 if form == "int8" else PLANES,
            tail=tail if form == "draft" else 0, seed=n_tokens + group + head_dim,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        for scale in self.scales:
            scale.mul_((torch.randn(scale.shape, generator=generator) * 0.5).exp())

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        assert self.k_scale is not None and self.v_scale is not None
        return self.k_scale, self.v_scale

    @property
    def given(self) -> tuple[Tensor, CacheLayer, Tensor, int]:
        return self.q, self.layer(), self.pos, N_KEYS


def is_close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected.double()).norm() <= tolerance * expected.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("n_tokens", "group", "head_dim"),
    [(1, 1, 64), (1, 3, 128), (1, 3, 80), (1, 4, 80), (5, 1, 128), (5, 3, 64), (33, 2, 64), (63, 4, 64), (63, 3, 80),
     (200, 1, 64)],
)  # fmt: skip
def test_attention_is_that_of_what_the_numbers_stand_for_and_both_planes_are_the_bytes_to_the_last_bit(
    n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    byte, plane, draft = (Case(n_tokens, group, head_dim, dtype, form) for form in ("int8", "planes", "draft"))
    (whole, _), (read, _) = byte.expected(), draft.expected()
    for page in (0, 16):
        (out, mass), (same, same_mass) = attention.dense(*byte.given, page), attention.dense(*plane.given, page)
        assert out.dtype == dtype and is_close(out, whole, TOLERANCE[dtype])
        assert torch.equal(same, out) and (mass is None or torch.equal(same_mass, mass))
        got, _ = attention.dense(*draft.given, page)
        assert got.dtype == dtype and is_close(got, read, TOLERANCE[dtype])
    short, _ = Case(n_tokens, group, head_dim, dtype, "draft", tail=1).expected()
    off = [float((x - whole).norm() / whole.norm()) for x in (short, read)]
    # keys a tenth off move sharp scores by more; of one query a tail of 64 of 300 entries may matter little
    assert 0.005 < off[1] < 1.02 * off[0] < 0.5 and not torch.equal(short, read)


def test_what_a_draft_reads_is_the_middle_of_what_a_nibble_leaves_open() -> None:
    x = torch.arange(-127, 128, dtype=torch.int8)[:254].view(1, 254)
    upper, lower = as_planes(x)
    for dtype in (torch.float32, torch.bfloat16):
        whole, part = (drafted(upper, lower, torch.full((1,), b), dtype) for b in (True, False))
        assert torch.equal(whole, x.to(dtype)) and torch.equal(joined(upper, lower), x)
        off = part.float() - x.float()
        assert off.abs().max() == 7.5 and torch.equal((part.float() + 120.5) % 16, torch.zeros(1, 254))


@each_form
def test_masses_and_queries_of_some_slots_are_those_of_what_is_read(form: str) -> None:
    case, slots = Case(5, group=3, form=form), torch.tensor([2, 0])
    _, mass = attention.dense(*case.given, 32)
    assert mass is not None
    torch.testing.assert_close(mass, case.expected_mass(32), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mass.sum(-1), torch.full((B, K), 15.0))
    q, layer, pos, n_keys = case.given
    out, mass = attention.dense_of_slots(q[slots], layer, slots, pos[slots], n_keys)
    assert is_close(out, case.expected()[0][slots], 1e-5)
    torch.testing.assert_close(mass, case.expected_mass(1)[slots], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@each_form
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_listed_entries_come_with_their_scales(n_tokens: int, form: str, dtype: torch.dtype) -> None:
    case = Case(n_tokens, group=3, dtype=dtype, form=form)
    pages = torch.tensor([[3, 0, -1], [7, 1, 2]]).repeat(B, 1, 1)  # [B, K, 3]
    where = selection.entries_of(pages, 16), case.pos[:, 0] - 90, 100, case.pos  # of [B, K, 48]
    got = attention.listed(case.q, case.layer(), *where)
    assert is_close(got, references.sparse_attention(case.q, case.layer(), *where, N_KEYS, 16), TOLERANCE[dtype])
    if form == "planes":
        byte = Case(n_tokens, group=3, dtype=dtype)
        assert torch.equal(got, attention.listed(byte.q, byte.layer(), *where))


def test_bounds_of_pages_hold_every_key_and_are_those_of_the_reference() -> None:
    page, first, every = 16, torch.tensor([0, 5, 60]), []
    for form, room in itertools.product(("int8", "draft"), (selection, references)):
        case = Case(1, head_dim=8, form=form)
        scale = case.scales[0].nan_to_num_(0.5)
        scale[0, 0, :page] = 0.0  # a page of zeros
        every.append(torch.full((B, K, S // page, 16), 7.0).bfloat16())
        room.page_bounds(case.layer(), every[-1], first, 4, page)  # type: ignore[attr-defined]
    assert all(one.equal(every[0]) for one in every)
    case.tail = 0
    keys = case.meant[0].unflatten(2, (-1, page))  # [B, K, P, page, H]
    for row, start in enumerate(first.tolist()):
        for at in range(start, start + 4):
            high, low = every[0][row, :, min(at, S // page - 1)].float().chunk(2, -1)  # [K, H] each
            of_page = keys[row, :, min(at, S // page - 1)]  # [K, page, H]
            assert (of_page <= high[:, None]).all() and (of_page >= low[:, None]).all()
            assert (high - of_page.amax(1) <= of_page.amax(1).abs() / 64 + 1e-38).all()


@each_form
@pytest.mark.parametrize("page", [0, 16])
def test_a_scale_that_nobody_reads_may_be_anything(page: int, form: str) -> None:
    case = Case(5, form=form)
    poisoned = [x for x in attention.dense(*case.given, page) if x is not None]
    case.forget(3.0)
    again = [x for x in attention.dense(*case.given, page) if x is not None]
    assert all(map(torch.equal, poisoned, again)) and all(x.isfinite().all() for x in poisoned)
