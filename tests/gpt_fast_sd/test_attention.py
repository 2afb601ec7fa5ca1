"""The core attends and selects as the references do: ragged rows, poisoned scratch, any number of splits in view.

Shapes: B batch rows, T query tokens, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.attention import dense, dense_of_slots, listed
from gpt_fast_sd.fast.ops import prefill
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies import selection
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.references import attend_reference, layer_of
from tests.helpers import thinned

B, K, H = 3, 2, 16
GROUPS = (1, 2, 3, 4, 8)
SHAPES = [(g, n) for g in GROUPS for n in (1, 2, 5, 9, 63, 300)]
SHAPES += [(3, n) for n in (127, 128, 129, 256, 257)]  # long calls go by blocks of 128 queries
TOLERANCE = {
    # sums over at most 768 keys of weights that add to 1, in another order than fp64's: measured at most 1.3e-6
    torch.float32: 4e-6,
    # weights, their sum and the result are rounded to 8 bits (2^-9 relative each), |v| goes up to 4: measured 0.023
    torch.bfloat16: 0.04,
}


def case(group: int, n_tokens: int, n_splits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T]: a row at the beginning, one at the end, one between."""
    n_keys = n_splits * SPLIT
    q = torch.randn(B, K * group, n_tokens, H).to(dtype)
    k, v = (torch.randn(B, K, n_keys, H).to(dtype) for _ in range(2))
    start = torch.tensor([0, n_keys - n_tokens, (n_keys - n_tokens) * 2 // 3])
    return q, k, v, start[:, None] + torch.arange(n_tokens)


def attend(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """dense with all keys in view."""
    return dense(q, layer_of(k, v), pos, k.shape[2])[0]


@thinned("shape,dtype", SHAPES, list(TOLERANCE))
def test_attention_is_that_of_fp64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    group, n_tokens = shape
    for n_splits in (1, 2, 3):
        if n_tokens > n_splits * SPLIT:
            continue
        q, k, v, pos = case(group, n_tokens, n_splits, dtype)
        out = attend(q, k, v, pos)
        assert out.shape == q.shape and out.dtype == dtype
        assert (out.double() - attend_reference(q, k, v, pos)).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 63])
def test_nothing_past_a_rows_position_is_seen_not_even_nan_keys(n_tokens: int, dtype: torch.dtype) -> None:
    q, k, v, pos = case(2, n_tokens, 3, dtype)
    past = (torch.arange(k.shape[2]) > pos[:, -1:])[:, None, :, None]  # [B, 1, S, 1]
    for key in (float("nan"), 1e4):
        poisoned = k.masked_fill(past, key), v.masked_fill(past, torch.finfo(dtype).max)
        assert torch.equal(attend(q, *poisoned, pos), attend(q, k, v, pos))


# ---- what stands for each operator, against its reference -----------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "n_tokens", "n_keys"), [(1, 1, 512), (3, 5, 512), (2, 33, 512), (3, 2, 300), (5, 9, 512), (8, 3, 700)]
)
def test_each_gives_what_its_operator_promises_to_rows_that_idle_as_well(
    group: int, n_tokens: int, n_keys: int
) -> None:
    q, k, v, _ = case(group, n_tokens, 3, torch.float32)
    # the last runs out of view
    pos = torch.tensor([0, n_keys - n_tokens, n_keys - 1])[:, None] + torch.arange(n_tokens)
    given, near = (q, layer_of(k, v), pos, n_keys), {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(dense(*given)[0], references.prefill_attention(*given), **near)
    torch.testing.assert_close(dense(*given, 16), references.decode_attention_with_mass(*given, 256, 16), **near)
    kv_indices = torch.tensor([0, 3, 64, -1, 200, 90, 250]).expand(B, K, -1)
    window = kv_indices, torch.tensor([0, 210, 80]), 40, pos  # of the last row's list some stands in the window
    capacity = given[1].capacity
    got, expected = listed(*given[:2], *window), references.sparse_attention(*given[:2], *window, capacity, 1)
    torch.testing.assert_close(got, expected, **near)


def test_some_slots_attend_as_all_do_and_every_key_has_its_mass() -> None:
    q, k, v, _ = case(2, 32, 3, torch.float32)
    slots, pos = torch.tensor([2, 0]), torch.tensor([[300], [600]]) + torch.arange(32)
    got = dense_of_slots(q[slots], layer_of(k, v), slots, pos, 512)
    near = {"rtol": 2e-5, "atol": 1e-5}
    expected = references.decode_attention_with_mass(q[slots], layer_of(k[slots], v[slots]), pos, 512, 256, 1)
    torch.testing.assert_close(got, expected, **near)
    again = prefill.prefill_attention_of_slots(q[slots], layer_of(k, v), slots, pos, 512)  # with operators of CUDA
    torch.testing.assert_close(again, expected, **near)


@pytest.mark.parametrize("n_pages", [1, 7, 40, 700])
def test_of_equal_scores_the_first_wins_and_a_nan_is_worse_than_any_number(n_pages: int) -> None:
    scores = torch.randn(2, 3, 2, n_pages)
    scores[0] = (scores[0] * 2).round() * torch.where(torch.rand(n_pages) < 0.5, 1.0, -1.0)  # ties, zeros of both signs
    scores[1, :, 0, ::3], scores[1, :, 1, 1::3] = float("nan"), float("-inf")
    n_valid = torch.tensor([[n_pages], [n_pages // 2], [0]])
    for n in (1, n_pages, n_pages + 3):
        assert selection.top_pages(scores, n_valid, n).equal(references.top_pages(scores, n_valid, n))
    mass, due = scores.abs().nan_to_num(), torch.tensor([True, False, True])
    lists = [torch.full((2, 3, 2, 50), 7) for _ in range(2)]
    for room, kv_indices in zip((selection, references), lists, strict=True):
        room.guided_select(mass, kv_indices, due, n_valid[:, 0], 16)
    assert lists[0].equal(lists[1])


@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_bounds_and_pages_are_those_of_the_references(group: int, n_tokens: int) -> None:
    k, before = torch.randn(3, 2, 40 * 16, 8), torch.full((3, 2, 40, 16), float("nan"))
    all_bounds = [before.clone() for _ in range(2)]
    for room, bounds in zip((selection, references), all_bounds, strict=True):
        for first in (torch.tensor([0, 7, 38]), torch.tensor([3, 9, 0])):
            room.page_bounds(layer_of(k, k), bounds, first, 3, 16)
    assert all_bounds[0].nan_to_num().equal(all_bounds[1].nan_to_num())
    # whole numbers: ties are ties; heads of large queries do not take all pages for themselves
    size = torch.randint(1, 50, (2 * group, 1, 1))
    q, n_closed = (torch.randint(-3, 4, (3, 2 * group, n_tokens, 8)) * size).float(), torch.tensor([6, 3, 0])
    bounds = torch.randint(-3, 4, (3, 2, 40, 16)).float().sort(-1).values.roll(8, -1)  # the largest, then the smallest
    for n in (1, 4, 9):
        assert selection.quest_pages(q, bounds, n_closed, n).equal(references.quest_pages(q, bounds, n_closed, n))
