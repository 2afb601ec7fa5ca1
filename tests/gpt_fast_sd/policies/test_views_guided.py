"""Attention mass against loops in fp64, and the blocks that the guided view selects by it.

Shapes: B rows, T tokens, S keys in view, L layers, N query heads, K kv heads, G = N // K, H head dim, P blocks in view.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.attention import dense
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.round import decode_step
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.policies.views_rig import Rig

GROUPS = [1, 2, 4, 5, 7, 8]
RAGGED = [0, 1, 15, 16, 200, SPLIT - 5, SPLIT, 2 * SPLIT - 12]  # the first query's position


def slow_mass(q: Tensor, k: Tensor, pos: Tensor, page: int) -> Tensor:
    """fp64 [B, K, P], query by query: q [B, N, T, H]; k [B, K, S, H]; pos [B, T]."""
    n_rows, n_heads, n_tokens, head_dim = q.shape
    n_kv, n_keys = k.shape[1:3]
    mass = torch.zeros(n_rows, n_kv, n_keys // page, dtype=torch.float64)
    for row in range(n_rows):
        for head in range(n_heads):
            kv_head = head // (n_heads // n_kv)
            for t in range(n_tokens):
                seen = k[row, kv_head, : int(pos[row, t]) + 1].double()
                p = (seen @ q[row, head, t].double() / head_dim**0.5).softmax(0)
                for block, share in enumerate(p.split(page)):
                    mass[row, kv_head, block] += share.sum()
    return mass


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("n_tokens", [2, 3, 5, 9])
def test_mass_is_the_attention_that_loops_add_up(group: int, n_tokens: int) -> None:
    q, k, v = torch.randn(8, 2 * group, n_tokens, 8), torch.randn(8, 2, 2 * SPLIT, 8), torch.randn(8, 2, 2 * SPLIT, 8)
    pos = torch.tensor(RAGGED)[:, None] + torch.arange(n_tokens)  # [B, T]
    out, mass = dense(2 * q, layer_of(k, v), pos, 2 * SPLIT, 16)
    assert out.shape == q.shape and mass is not None and mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), slow_mass(2 * q, k, pos, 16), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass.sum(-1), torch.full((8, 2), float(group * n_tokens)), atol=1e-4, rtol=0)


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


def test_blocks_without_any_mass_are_listed_where_there_is_room() -> None:
    """Sharp attention underflows to many exact zeros; of such equals any will do, but an empty entry is a waste."""
    rig = Rig("guided", [700, 700, 30, 90], budget=200)
    mass = torch.zeros(2, 4, 2, 48)
    mass[..., 7] = 1.0
    select(rig, mass)
    assert (rig.view.kv_indices[:, :2] >= 0).all()
    assert (rig.view.kv_indices[:, :2] == 7 * 16).any(-1).all()
    listed = rig.view.kv_indices[:, :2].sort(-1).values
    assert (listed.diff(dim=-1) > 0).all()


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


def test_a_row_admitted_after_a_longer_one_is_selected_for_at_its_first_verification() -> None:
    rig = Rig("guided", [900, 900, 900, 900], budget=100)
    rig.begin()
    rig.grow([1] * 4)
    rig.policy.host_free(0)
    rig.begin()
    rig.grow([1] * 4)  # the slot idles, and is observed
    rig.admit(0, 400)
    rig.begin()
    assert rig.view.kv_indices[:, 0].flatten().unique().tolist() == list(
        range(rig.view.kv_indices.shape[-1])
    )  # the first ones
    rig.grow([1] * 4)
    assert int(rig.view.selected_at[0]) == 401
    assert int(rig.view.kv_indices[:, 0].max()) > rig.view.kv_indices.shape[-1]
