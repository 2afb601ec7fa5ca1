"""Every body of attention against the fp64 reference: ragged rows, poisoned scratch, any number of splits in view.

Shapes: B batch rows, T query tokens, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gpt_fast_sd.model as room
from gpt_fast_sd.model import SPLIT, attend_reference

B, K, H = 3, 2, 16
BODIES = {
    "rows": room.attention.attend_rows,
    "matmul": room.attention.attend_matmul,
    "sdpa": room.attention.attend_sdpa,
}
FEW, MANY = (1, 2, 5, 9), (63, 300)  # rows is for few queries: it unrolls them
GROUPS = (1, 2, 3, 4, 8)
SHAPES = [(name, g, n) for name in BODIES for g in GROUPS for n in FEW + (() if name == "rows" else MANY)]
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


def poisoned(k: Tensor, v: Tensor, pos: Tensor, *, key: float = float("nan")) -> tuple[Tensor, Tensor]:
    """Copies whose entries past each row's last query hold `key` in k and the largest finite number in v."""
    past = (torch.arange(k.shape[2]) > pos[:, -1:])[:, None, :, None]  # [B, 1, S, 1]
    return k.masked_fill(past, key), v.masked_fill(past, torch.finfo(v.dtype).max)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("body", "group", "n_tokens"), SHAPES)
def test_every_body_gives_what_the_reference_gives(body: str, group: int, n_tokens: int, dtype: torch.dtype) -> None:
    for n_splits in (1, 2, 3):
        if n_tokens > n_splits * SPLIT:
            continue
        q, k, v, pos = case(group, n_tokens, n_splits, dtype)
        out = BODIES[body](q, k, v, pos)
        assert out.shape == q.shape and out.dtype == dtype
        assert (out.double() - attend_reference(q, k, v, pos)).abs().max() <= TOLERANCE[dtype]


def test_the_reference_is_softmax_over_the_keys_a_query_may_see() -> None:
    q, k, v, pos = case(3, 2, 1, torch.float32)
    out = attend_reference(q, k, v, pos)
    for b, n, t in [(0, 0, 0), (0, 5, 1), (1, 2, 1), (2, 3, 0)]:
        seen = int(pos[b, t]) + 1
        scores = [float(q[b, n, t].double() @ k[b, n // 3, s].double()) / H**0.5 for s in range(seen)]
        weights = torch.tensor(scores, dtype=torch.float64).exp()
        assert torch.allclose(out[b, n, t], weights / weights.sum() @ v[b, n // 3, :seen].double(), rtol=0, atol=1e-14)


# A body that adds its mask to the scores turns NaN + -inf into NaN: the keys of vacated slots must then be finite too.
PAST = [(name, n) for name in BODIES for n in (1, 2, 5, 63) if name != "rows" or n in FEW]
PAST_NAN = [body for body in PAST if body[0] != "sdpa"]  # torch adds its mask, and NaN + -inf is NaN


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("body", "n_tokens"), PAST_NAN)
def test_nothing_past_a_rows_position_is_seen_not_even_nan_keys(body: str, n_tokens: int, dtype: torch.dtype) -> None:
    q, k, v, pos = case(2, n_tokens, 3, dtype)
    assert torch.equal(BODIES[body](q, *poisoned(k, v, pos), pos), BODIES[body](q, k, v, pos))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("body", "n_tokens"), PAST)
def test_nothing_past_a_rows_position_is_seen_however_large(body: str, n_tokens: int, dtype: torch.dtype) -> None:
    q, k, v, pos = case(2, n_tokens, 3, dtype)
    assert torch.equal(BODIES[body](q, *poisoned(k, v, pos, key=1e4), pos), BODIES[body](q, k, v, pos))


@pytest.mark.parametrize("body", BODIES)
def test_a_query_does_not_see_the_queries_after_it_in_the_call(body: str) -> None:
    q, k, v, pos = case(2, 5, 2, torch.float32)
    whole = BODIES[body](q, k, v, pos)
    later = k.clone()
    for b in range(B):
        later[b, :, pos[b, 3] :] = 50.0  # where the last two queries are
    assert torch.equal(BODIES[body](q, later, v, pos)[:, :, :3], whole[:, :, :3])


def results_by_view(body: Callable[..., Tensor], group: int, n_tokens: int) -> list[Tensor]:
    """The same rows, all within the first split, with one, two and three splits in view."""
    q, k, v, _ = case(group, n_tokens, 3, torch.float32)
    pos = torch.tensor([0, 100, SPLIT - n_tokens])[:, None] + torch.arange(n_tokens)
    return [body(q, k[:, :, : n * SPLIT], v[:, :, : n * SPLIT], pos) for n in (1, 2, 3)]


@pytest.mark.parametrize(("group", "n_tokens"), [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (4, 2), (8, 1), (1, 9)])
def test_rows_are_the_same_to_the_bit_when_empty_splits_come_into_view(group: int, n_tokens: int) -> None:
    one, two, three = results_by_view(BODIES["rows"], group, n_tokens)
    assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize(("group", "n_tokens"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 5), (2, 63)])
@pytest.mark.parametrize("body", ["matmul", "sdpa"])
def test_empty_splits_in_view_change_no_more_than_the_order_of_a_sum(body: str, group: int, n_tokens: int) -> None:
    one, two, three = results_by_view(BODIES[body], group, n_tokens)
    # a library's matrix product may block its sum by its length: not the same to the bit, measured at most 3e-7
    assert max(float((one - two).abs().max()), float((one - three).abs().max())) <= 2e-6


def test_long_calls_go_by_blocks_of_queries_without_a_seam() -> None:
    for n_tokens in (127, 128, 129, 256, 257):
        q, k, v, pos = case(3, n_tokens, 2, torch.float32)
        out = BODIES["matmul"](q, k, v, pos)
        assert (out.double() - attend_reference(q, k, v, pos)).abs().max() <= TOLERANCE[torch.float32]
