"""Quest's bounds, scores and pages against plain loops.

Shapes: B rows, T tokens, N query heads, K kv heads, G = N // K, R = G * T, H head dim, P pages, n pages chosen.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd.policies import quest
from gpt_fast_sd.policies.quest import QuestKV
from gpt_fast_sd.policies.selection import page_bounds, page_scores, quest_pages
from tests.gpt_fast_sd.policies.views_rig import N_ROWS, Rig
from tests.helpers import tiny_config

GROUPS = [1, 2, 4, 5, 7, 8]


def corners(keys: Tensor, page: int) -> Tensor:
    """[B, K, S, H] -> the largest and the smallest key of every page and dimension, [B, K, S // page, 2H]."""
    pages = keys.split(page, 2)
    return torch.stack([torch.cat([p.max(2).values, p.min(2).values], -1) for p in pages], 2)


def check_bounds(rig: Rig) -> None:
    """The window begins at the edge of a page, and all pages before it have the bounds of their keys."""
    page, view = rig.draft.page, rig.view
    for layer, bound in zip(rig.cache.layers, view.bounds, strict=True):
        truth = corners(layer.k, page)
        for row, length in rig.lengths.items():
            start = int(view.window_start[row])
            assert start == math.ceil(max(0, length - view.window) / page) * page
            assert torch.equal(bound[row, :, : start // page], truth[row, :, : start // page])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bounds_are_the_smallest_and_largest_keys_however_rows_grow(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([16, 32, 64]), "page")
    lengths = data.draw(st.lists(st.integers(0, 800), min_size=N_ROWS, max_size=N_ROWS), "lengths")
    rig = Rig("quest", lengths, page=page, budget=data.draw(st.integers(3 * page, 300), "budget"), gamma=16)
    if data.draw(st.booleans(), "drafted at once"):
        rig.begin()
        check_bounds(rig)
    for _ in range(data.draw(st.integers(1, 5), "rounds")):
        drafted = data.draw(st.booleans(), "drafted")
        grown = st.integers(1, 17) if drafted else st.integers(1, 90)
        rig.grow(data.draw(st.lists(grown, min_size=N_ROWS, max_size=N_ROWS), "by"), observed=drafted)
        rig.begin()
        check_bounds(rig)
        rig.step()
        check_bounds(rig)


@pytest.mark.parametrize("gamma", [1, 4, 16])
def test_a_round_that_drafted_is_caught_up_with_in_one_step(gamma: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("quest", [40, 90, 300, 700], budget=100, gamma=gamma)
    calls: list[int] = []
    monkeypatch.setattr(quest.selection, "page_bounds", lambda *args: calls.append(1) or page_bounds(*args))
    for _ in range(20):
        rig.begin()
        assert len(calls) <= len(rig.view.bounds)  # one per layer
        calls.clear()
        rig.grow([gamma + 1, gamma, 1, gamma + 1])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("n_tokens", [1, 2, 4])
def test_a_page_score_is_at_least_the_product_with_every_key_of_the_page(group: int, n_tokens: int) -> None:
    q, keys = torch.randn(3, 2 * group, n_tokens, 8), torch.randn(3, 2, 64, 8)
    scores = page_scores(q, corners(keys, 16))  # [B, K, R, P]
    assert scores.shape == (3, 2, group * n_tokens, 4)
    products = q.unflatten(1, (2, group)).flatten(2, 3) @ keys.transpose(-1, -2)  # [B, K, R, S]
    best = products.unflatten(-1, (4, 16)).amax(-1)  # [B, K, R, P]
    assert (scores >= best - 1e-5).all()  # fp32
    assert (scores < best + 40).all()  # a bound that says something: infinity would be one, too


def test_the_score_of_a_page_of_one_key_is_its_product() -> None:
    q, keys = torch.randn(2, 6, 1, 8), torch.randn(2, 2, 10, 8)
    products = q.unflatten(1, (2, 3)).flatten(2, 3) @ keys.transpose(-1, -2)
    assert torch.allclose(page_scores(q, corners(keys, 1)), products, atol=1e-5)


def slow_score(q: Tensor, bound: Tensor) -> float:
    """The formula of the paper: q [H], bound [2H]."""
    high, low = bound.double().split(len(q))
    return sum(max(float(x) * float(a), float(x) * float(b)) for x, a, b in zip(q.double(), high, low, strict=True))


def slow_pages(q: Tensor, bounds: Tensor, n_closed: int) -> list[float]:
    """What each closed page is worth to the kv head whose query rows are q [R, H]; bounds [P, 2H]."""
    worth = [-math.inf] * n_closed
    for row in q:
        scores = [slow_score(row, bounds[p]) for p in range(n_closed)]
        worth = [max(w, score - max(scores)) for w, score in zip(worth, scores, strict=True)]
    return worth


def check_pages(chosen: Tensor, worth: list[float]) -> None:
    """chosen [n] are the best, each once; -1 where there are no more."""
    pages = chosen[chosen >= 0].tolist()
    assert len(set(pages)) == len(pages) == min(len(chosen), len(worth))
    left = [w for page, w in enumerate(worth) if page not in pages]
    assert not left or min(worth[page] for page in pages) >= max(left) - 1e-4  # fp32, near ties


@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize("group", GROUPS)
def test_pages_are_those_that_loops_find(group: int, n_tokens: int) -> None:
    q = torch.randn(4, 2 * group, n_tokens, 8) * (1 + 5 * torch.rand(2 * group, 1, 1))  # heads differ in size
    bounds = corners(torch.randn(4, 2, 20 * 16, 8), 16)
    closed = torch.tensor([0, 3, 7, 20])
    chosen = quest_pages(q, bounds, closed, 6)  # [B, K, n]
    assert chosen.shape == (4, 2, 6)
    for row in range(4):
        for head in range(2):
            worth = slow_pages(q[row].unflatten(0, (2, group))[head].flatten(0, 1), bounds[row, head], int(closed[row]))
            check_pages(chosen[row, head], worth)


def test_a_head_with_large_queries_does_not_take_all_pages_for_itself() -> None:
    """Page scores 0, 1, .. for one head and 100 times as much, the other way round, for another."""
    keys = torch.stack([torch.arange(10.0), torch.arange(9.0, -1, -1)], -1)[None, None]  # [1, 1, P, H], one per page
    q = torch.tensor([[1.0, 0.0], [0.0, 100.0]])[None, :, None]  # [1, N, 1, H]
    assert quest_pages(q, corners(keys, 1), torch.tensor([10]), 4).flatten().tolist() == [0, 7, 8, 9]


def test_what_bounds_of_unfinished_pages_hold_does_not_matter() -> None:
    keys = torch.tensor([1.0, 2.0, float("nan"), float("inf")])[None, None, :, None]
    assert quest_pages(torch.ones(1, 1, 1, 1), corners(keys, 1), torch.tensor([2]), 3).flatten().tolist() == [0, 1, -1]


class Recording(QuestKV):
    """Keeps the queries of every layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        seen.append(q)
        return super().attend(layer, q, k, v, pos)


seen: list[Tensor] = []


@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_every_layer_of_a_draft_step_chooses_for_its_own_queries(group: int, n_tokens: int) -> None:
    config = tiny_config(n_heads=2 * group, n_kv_heads=2)
    rig = Rig("quest", [30, 200, 450, 900], config, budget=100)
    rig.begin()
    rig.grow([2, 3, 4, 5])
    rig.begin()
    seen.clear()
    _, args = rig.view.kv()
    tokens: Any = torch.randint(256, (4, n_tokens))
    pos = rig.cache.seq_len[:, None] + torch.arange(n_tokens)
    rig.model.hidden(tokens, pos, Recording(rig.cache.layers, torch.empty(rig.cache.splits(905), 0), *args))
    for q, bounds, chosen in zip(seen, rig.view.bounds, rig.view.chosen, strict=True):
        for row in range(4):
            for head in range(2):
                rows = q[row].unflatten(0, (2, group))[head].flatten(0, 1)  # [R, H]
                n = int(rig.view.window_start[row]) // 16
                check_pages(chosen[row, head], slow_pages(rows, bounds[row, head], n))
    assert any(not torch.equal(rig.view.chosen[0], other) for other in rig.view.chosen[1:])
