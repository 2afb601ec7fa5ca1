"""The core attends and selects as the references do: ragged rows, poisoned scratch, every format of a cache.

Both planes are the bytes, to the last bit; what drafts read of one is as near as 4 bits can be. What nobody reads of a
row are NaNs, of bytes their scales: empty slots, drafts that were rejected, and neighbours' longer texts.

Shapes: B batch rows, T query tokens, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import attention
from gpt_fast_sd.fast.ops import prefill
from gpt_fast_sd.model import SPLIT, as_planes
from gpt_fast_sd.model.cache import drafted, joined
from gpt_fast_sd.policies import selection
from tests.gpt_fast_sd.fast import dense, references
from tests.gpt_fast_sd.fast.dense import BF16, FP32, INT8, PLANES
from tests.helpers import few, thinned

B, K, N_KEYS, CAPACITY = 3, 2, 3 * SPLIT, 4 * SPLIT
HELD = {"int8": INT8, "planes": PLANES, "draft": PLANES}  # planes read whole, and as drafts do; "own" is the queries'
KINDS = [(form, dtype) for dtype in (FP32, BF16) for form in ("own", *HELD)]
SHAPES = [(g, n, 16) for g in (1, 2, 3, 4, 8) for n in (1, 2, 5, 9, 63, 300)]  # G, T, H
SHAPES += [(3, n, 16) for n in (127, 128, 129, 256, 257)]  # long calls go by blocks of 128 queries
SHAPES += [(1, 1, 64), (3, 1, 128), (4, 1, 80), (1, 5, 128), (2, 33, 64), (4, 63, 64), (3, 63, 80), (1, 200, 64)]
# of what the weights make of |values|: sums in another order than fp64's, measured at most 6e-7; in bf16 queries,
# scores, weights and the result are rounded: at most .028, by products of a CPU with bf16 instructions
TOLERANCE = {FP32: 2e-6, BF16: 0.03}
NEAR = {"rtol": 1e-4, "atol": 1e-5}

over_kinds = pytest.mark.parametrize(("form", "dtype"), KINDS)


class Case(dense.Case):
    """Queries at a row's beginning, between, at the end and of a row that idles, and a cache that has room behind."""

    def __init__(
        self, form: str = "own", dtype: torch.dtype = FP32, *, n_tokens: int = 5, group: int = 3, head_dim: int = 64,
        n_keys: int = N_KEYS, tail: int = 64, window: int = 0,
    ) -> None:  # fmt: skip
        ends = [n_tokens - 1, (n_keys + n_tokens) * 2 // 3 - 1, n_keys - 1, n_keys + n_tokens + 3]
        super().__init__(
            ends, n_tokens=n_tokens, group=group, n_kv=K, head_dim=head_dim, n_keys=n_keys,
            spare=CAPACITY - n_keys, dtype=dtype, held=HELD.get(form), tail=tail if form == "draft" else 0,
            window=window, seed=n_tokens + group + head_dim,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        if self.k_scale is None:  # values in view must be finite
            self.v.nan_to_num_(torch.finfo(dtype).max)
        for scale in self.spoilt if self.k_scale is not None else ():
            scale.mul_((torch.randn(scale.shape, generator=generator) * 0.5).exp())

    def attend(self, page: int = 0) -> tuple[Tensor, Tensor | None]:
        return attention.dense(self.q, self.layer(), self.pos, self.n_keys, page)


def is_close(got: Tensor, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether each query's output is near."""
    exact, size = expected
    assert got.shape == exact.shape
    return bool(((got.double() - exact).norm(dim=-1) <= TOLERANCE[got.dtype] * size.norm(dim=-1)).all())


@thinned("shape,kind", SHAPES, KINDS)
def test_attention_is_that_of_fp64_and_both_planes_are_the_bytes_to_the_last_bit(
    shape: tuple[int, int, int], kind: tuple[str, torch.dtype]
) -> None:
    (group, n_tokens, head_dim), (form, dtype) = shape, kind
    for n_keys in (n for n in (SPLIT, 300, N_KEYS) if n >= n_tokens):
        case = Case(form, dtype, n_tokens=n_tokens, group=group, head_dim=head_dim, n_keys=n_keys)
        out, _ = case.attend()
        assert out.dtype == dtype and is_close(out, case.expected())
        if form == "planes":
            byte = Case("int8", dtype, n_tokens=n_tokens, group=group, head_dim=head_dim, n_keys=n_keys)
            assert torch.equal(out, byte.attend()[0])


@over_kinds
@pytest.mark.parametrize(("n_tokens", "window"), few([(1, 0), (5, 0), (1, 1), (5, 20), (150, 20)], [(1, 0), (5, 20)]))
def test_masses_and_some_slots_are_of_what_is_read(n_tokens: int, window: int, form: str, dtype: torch.dtype) -> None:
    case, slots = Case(form, dtype, n_tokens=n_tokens, window=window), torch.tensor([2, 1])
    assert is_close(case.attend()[0], case.expected())
    out, mass = case.attend(32)
    assert mass is not None and is_close(out, case.expected())
    near = NEAR if dtype == FP32 else {"rtol": 0.05, "atol": 0.01}
    torch.testing.assert_close(mass, case.expected_mass(32), **near)
    torch.testing.assert_close(mass.sum(-1)[:3], torch.full((3, K), 3.0 * n_tokens))
    if form == "planes":
        byte = Case("int8", dtype, n_tokens=n_tokens, window=window)
        assert all(map(torch.equal, (out, mass), byte.attend(32)))  # type: ignore[arg-type]
    given = case.q[slots], case.layer(), slots, case.pos[slots], N_KEYS
    for body in (attention.dense_of_slots, prefill.prefill_attention_of_slots):  # the latter by operators of CUDA
        out, mass = body(*given)
        assert is_close(out, tuple(x[slots] for x in case.expected()))  # type: ignore[arg-type]
        torch.testing.assert_close(mass, case.expected_mass(1)[slots], **near)


@over_kinds
@pytest.mark.parametrize("page", [0, 16])
def test_nothing_past_a_rows_position_is_seen_whatever_it_is(page: int, form: str, dtype: torch.dtype) -> None:
    case = Case(form, dtype)
    poisoned = [x for x in case.attend(page) if x is not None]
    assert all(x.isfinite().all() for x in poisoned)
    case.forget(1e4)
    assert all(map(torch.equal, poisoned, [x for x in case.attend(page) if x is not None]))


@over_kinds
@pytest.mark.parametrize(("n_tokens", "window"), [(1, 0), (4, 0), (4, 450)])
def test_what_is_listed_and_a_window_are_read(n_tokens: int, window: int, form: str, dtype: torch.dtype) -> None:
    def attended(form: str) -> tuple[Tensor, Tensor]:
        case = Case(form, dtype, n_tokens=n_tokens, window=window)
        case.pos[3] += N_KEYS - case.pos[3, 0]  # an idle slot's, which reads nothing
        kv_indices = selection.entries_of(torch.tensor([[3, 0, -1], [7, 1, 2]]).repeat(4, 1, 1), 16)  # [B, K, 48]
        # of the last rows some of the list stands in the window
        where = kv_indices, torch.tensor([0, 400, 100, 80]), 100, case.pos
        expected = references.sparse_attention(case.q, case.layer(), *where, N_KEYS, 16)
        return attention.listed(case.q, case.layer(), *where), expected

    got, expected = attended(form)
    assert got.isfinite().all() and is_close(got, (expected.double(), expected.double()))
    assert form != "planes" or torch.equal(got, attended("int8")[0])


def test_what_a_draft_reads_is_the_middle_of_what_a_nibble_leaves_open_and_its_tail_is_whole() -> None:
    x = torch.arange(-127, 128, dtype=torch.int8)[:254].view(1, 254)
    upper, lower = as_planes(x)
    for dtype in (torch.float32, torch.bfloat16):
        whole, part = (drafted(upper, lower, torch.full((1,), b), dtype) for b in (True, False))
        assert torch.equal(whole, x.to(dtype)) and torch.equal(joined(upper, lower), x)
        off = part.float() - x.float()
        assert off.abs().max() == 7.5 and torch.equal((part.float() + 120.5) % 16, torch.zeros(1, 254))
    exact, *drafts = (Case(*how).expected()[0][:3] for how in (("int8",), ("draft",)))
    short = Case("draft", tail=1).expected()[0][:3]
    off_by, shorter = (float((x - exact).norm() / exact.norm()) for x in (drafts[0], short))
    assert 0.005 < off_by < 1.02 * shorter < 0.5
