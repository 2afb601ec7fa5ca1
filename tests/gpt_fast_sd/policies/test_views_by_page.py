"""Views that list pages: Quest's bounds against plain loops and whose pages a step reads, and guided's by their mass.

Shapes: B rows, T tokens, L layers, N query heads, K kv heads, G = N // K, H head dim, P pages or blocks in view.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies import quest
from gpt_fast_sd.policies.quest import QuestKV
from gpt_fast_sd.policies.selection import page_bounds, quest_pages
from gpt_fast_sd.round import decode_step
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.policies.views_rig import N_ROWS, Rig
from tests.helpers import tiny_config

# ---- quest -----------------------------------------------------------------------------------------------------------


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
        assert chosen.equal(references.quest_pages(q, bounds, rig.view.window_start // 16, chosen.shape[-1]))
    assert any(not torch.equal(rig.view.chosen[0], other) for other in rig.view.chosen[1:])


# ---- guided ----------------------------------------------------------------------------------------------------------


def test_verification_notes_the_mass_of_every_layer_and_gives_the_same_logits() -> None:
    rig = Rig("guided", [3, 90, 300, 700], budget=100)
    rig.begin()
    logits, mass = rig.verify()
    assert mass is not None and mass.shape == (2, 4, 2, 3 * SPLIT // 16)
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 4, 2), 2.0 * 5), atol=1e-4, rtol=0)  # G * T
    tokens = torch.tensor([p[n : n + 5] for p, n in zip(rig.prompts, rig.lengths.values(), strict=True)])
    pos = rig.cache.seq_len[:, None] + torch.arange(5)
    without, none = decode_step(rig.model, tokens, pos, rig.cache.layers, torch.empty(3, 0), 0)
    assert none is None and torch.equal(logits, without)


def select(rig: Rig, mass: Tensor) -> None:
    """Let the view select from this mass, in the lengths as they are."""
    rig.view.device_after_verify(rig.state, mass)


@pytest.mark.parametrize(("budget", "page"), [(100, 16), (48, 16), (250, 16), (192, 64), (400, 32)])
def test_the_blocks_of_most_mass_are_listed_whole(budget: int, page: int) -> None:
    lengths = [30, budget + 1, 300, 700]
    rig = Rig("guided", lengths, budget=budget, page=page)
    mass = torch.rand(2, 4, 2, 3 * SPLIT // page)
    select(rig, mass)
    view = rig.view
    n_blocks = view.kv_indices.shape[-1] // page
    assert view.kv_indices.shape[-1] + view.window == budget
    for row, length in enumerate(lengths):
        start = int(view.window_start[row])
        assert start % page == 0 and start <= length and length - start <= view.window
        assert length <= budget or length - start > page  # a block and more of what is most recent
        for layer in range(2):
            for head in range(2):
                listed = view.kv_indices[layer, row, head]
                worth = mass[layer, row, head, : start // page].tolist()
                best = sorted(range(len(worth)), key=lambda block: -worth[block])[:n_blocks]
                expected = sorted(block * page + i for block in best for i in range(page))
                assert listed[listed >= 0].sort().values.tolist() == expected
                assert (listed[len(expected) :] == -1).all()


@pytest.mark.parametrize("refresh", [1, 7, 20, 500])
def test_a_selection_is_refreshed_after_refresh_tokens_or_when_its_window_is_full(refresh: int) -> None:
    rig = Rig("guided", [300, 400, 500, 600], budget=160, refresh=refresh)
    view, selections = rig.view, [0] * 4
    for _ in range(30):
        rig.begin()
        for row in range(4):  # nothing was lost between list and window
            assert rig.lengths[row] - int(view.window_start[row]) <= view.window
            assert int(view.window_start[row]) % 16 == 0
        before = view.selected_at.tolist()
        start = view.window_start.tolist()
        rig.grow([1, 2, 3, 5])
        for row in range(4):
            length = rig.lengths[row]
            due = length - before[row] >= refresh or length - start[row] > view.window
            assert int(view.selected_at[row]) == (length if due else before[row])
            selections[row] += due
    for n, by in zip(selections, [1, 2, 3, 5], strict=True):
        apart = min(refresh, 160 // 4)  # the window has room for no more
        assert 30 * by // (apart + 16 + by) <= n <= 1 + 30 * by / min(refresh, 160 // 4 - 16)
