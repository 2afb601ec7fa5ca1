"""The promises of every view of a cache: it reads what it reports, within its budget, and loses nothing that fits.

And of views that list pages: whose pages a step of Quest reads, and which ones guided lists, and when.

Shapes: B slots, T tokens, S cache capacity, L layers, K kv heads, G query heads per kv head, P pages in view.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies import quest
from gpt_fast_sd.policies.quest import QuestKV
from gpt_fast_sd.policies.selection import page_bounds
from gpt_fast_sd.round import decode_step
from tests.drafts import VIEWS
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.policies.drafting import drafting_now_and_then
from tests.gpt_fast_sd.policies.views_rig import MAX_LEN, N_ROWS, SPARSE, Rig
from tests.helpers import ahead, few, random_ids, thinned, tiny_config, tiny_engine

BUDGET, PAGE, N_SINK = 100, 16, 4
EDGES = [
    0, 1, 2, N_SINK, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 5,
    SPLIT - 1, SPLIT, SPLIT + 1, 3 * BUDGET, 2 * SPLIT - 1, 2 * SPLIT, 7 * BUDGET, MAX_LEN - 30,
]  # fmt: skip
LENGTHS = [EDGES[i::5] for i in range(5)]  # rows of one batch differ much


def clean_reads(rig: Rig) -> Tensor:
    """What one step reads of the committed entries, as the view says it: bool [L, B, K, S]."""
    return rig.reads() & rig.committed


def check_reads(rig: Rig, *, budget: int) -> None:
    """The step reads no other committed entries than it says, no more than the budget, and its own position."""
    logits = rig.step()
    assert logits.isfinite().all()
    reads = clean_reads(rig)
    if rig.draft.policy != "full":
        assert int(reads.sum(-1).max()) <= budget
    own = rig.cache.seq_len[None, :, None, None].expand(*reads.shape[:3], 1)
    assert rig.reads().gather(3, own).all()
    assert not (rig.reads() & (torch.arange(reads.shape[-1]) > rig.cache.seq_len[:, None])[:, None]).any()
    for row, length in enumerate(rig.cache.seq_len.tolist()):
        if length <= budget or rig.draft.policy == "full":
            assert reads[:, row, :, :length].all(), f"row of {length} tokens is not read whole"
    if hasattr(rig.view, "kv_indices"):
        kv_indices = rig.view.kv_indices
        assert (kv_indices < rig.view.window_start[:, None, None]).all()
        assert (kv_indices < torch.maximum(rig.cache.seq_len, torch.tensor(rig.view.first_window))[:, None, None]).all()
        runs = kv_indices.unflatten(-1, (-1, rig.view.page))  # [L, B, K, C / page, page]
        whole = runs[..., :1] + torch.arange(rig.view.page)
        whole = whole.where((runs[..., :1] >= 0) & (whole < rig.view.window_start[:, None, None, None]), -1)
        assert torch.equal(runs, whole), "a page is listed in part, and kernels that read pages read all of it"
        named = torch.where(kv_indices >= 0, kv_indices, -1 - torch.arange(kv_indices.shape[-1]))
        assert (named.sort(-1).values.diff(dim=-1) > 0).all(), "an entry is listed twice"
    kept = [x.clone() for x in rig.cache.buffers]
    for layer, spared in zip(rig.cache.layers, reads, strict=True):
        for buffer in layer.buffers:
            buffer[rig.committed & ~spared] = 1e30
    assert torch.equal(rig.step(), logits)
    for buffer, before in zip(rig.cache.buffers, kept, strict=True):
        buffer.copy_(before)


@thinned("name,lengths", VIEWS, LENGTHS)
def test_a_step_reads_the_entries_that_positions_read_names_and_no_other(name: str, lengths: list[int]) -> None:
    rig = Rig(name, lengths, budget=BUDGET)
    for by in ([0] * 4, [1, 2, 3, 5], [4, 1, 5, 2], [5, 5, 5, 5], [2, 1, 1, 3]):
        rig.grow(by, observed=by != [0] * 4)
        rig.begin()
        check_reads(rig, budget=BUDGET)


def test_a_page_that_is_listed_in_part_is_completed_when_its_row_outgrows_the_budget() -> None:
    """Once the rest of it was left out, by rounds without drafts: kernels that read pages still read that rest."""
    rig = Rig("guided", [50] * 4, budget=BUDGET, page=PAGE, refresh=50)
    for by in (0, 36, 18):  # one page is listed; two entries of the next one; then the row is longer than the budget
        rig.grow([by] * 4, observed=False)
        rig.begin()
        check_reads(rig, budget=BUDGET)
    assert int(rig.cache.seq_len[0]) > BUDGET and int((rig.view.kv_indices[0, 0, 0] >= 0).sum()) == 2 * PAGE


@pytest.mark.parametrize("name", VIEWS)
def test_each_entry_that_positions_read_names_is_read(name: str) -> None:
    rig = Rig(name, [3, 90, 300, 700], budget=BUDGET)
    rig.begin()
    rig.rounds([1, 2, 3, 4])
    logits, reads = rig.step(), clean_reads(rig)
    named = reads[0].nonzero().tolist()  # of layer 0, whose queries nothing else changes
    assert {row for row, _, _ in named} == {0, 1, 2, 3}
    for i in torch.randperm(len(named), generator=torch.Generator().manual_seed(5))[:60].tolist():
        row, head, place = named[i]
        before = rig.cache.layers[0].v[row, head, place].clone()
        rig.cache.layers[0].v[row, head, place] = 1e15  # so that no weight is too small to show
        assert (rig.step() != logits).any(-1).tolist() == [other == row for other in range(N_ROWS)]
        rig.cache.layers[0].v[row, head, place] = before
    assert torch.equal(rig.step(), logits)


def check_bounds(rig: Rig) -> None:
    """The window begins at the edge of a page, and all pages before it have the bounds of their keys."""
    page, view = rig.draft.page, rig.view
    for layer, bound in zip(rig.cache.layers, view.bounds, strict=True):
        truth = torch.stack([torch.cat([p.amax(2), p.amin(2)], -1) for p in layer.k.split(page, 2)], 2)
        for row, length in rig.lengths.items():
            start = int(view.window_start[row])
            assert start == math.ceil(max(0, length - view.window) / page) * page
            assert torch.equal(bound[row, :, : start // page], truth[row, :, : start // page])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", SPARSE)
def test_however_rows_grow_the_view_keeps_its_promises(name: str, data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([16, 32, 64, 128]), "page")
    budget = data.draw(st.integers(max(64, 3 * page), 400), "budget")
    refresh = data.draw(st.none() | st.just("off") | st.integers(1, 100), "refresh")
    sink = data.draw(st.integers(1, 40), "sink")
    gamma = data.draw(st.integers(1, 16), "gamma")
    lengths = data.draw(st.lists(st.integers(0, 700), min_size=N_ROWS, max_size=N_ROWS), "lengths")
    rig = Rig(name, lengths, budget=budget, page=page, refresh=refresh, n_sink=sink, gamma=gamma)
    if data.draw(st.booleans(), "drafted at once"):
        rig.begin()
    for _ in range(data.draw(st.integers(1, 4), "rounds")):
        drafted = data.draw(st.booleans(), "drafted")
        grown = st.integers(1, gamma + 1 if drafted else 90)  # rounds without drafts, any number of them
        rig.grow(data.draw(st.lists(grown, min_size=N_ROWS, max_size=N_ROWS), "by"), observed=drafted)
        rig.begin()
        if name == "quest":
            check_bounds(rig)
    check_reads(rig, budget=budget)
    if name == "quest":
        check_bounds(rig)


@pytest.mark.parametrize("name", VIEWS)
def test_a_slot_that_is_vacated_and_filled_again_reads_what_a_new_one_reads(name: str) -> None:
    used = Rig(name, [700, 40, 300, 800], budget=BUDGET)
    used.rounds([1, 2, 3, 4], [30, 70, 2, 3])
    for slot in (0, 2):
        used.policy.host_free(slot)
        del used.lengths[slot]
    used.cache.seq_len[2] = 3
    used.rounds([2, 1], [1, 3])  # they idle for some rounds
    fresh = Rig(name, [10, used.lengths[1], 500, used.lengths[3]], budget=BUDGET)
    for slot in (0, 2):
        used.admit(slot, fresh.lengths[slot])
    used.begin()
    fresh.begin()
    for grown in ((), [[2, 2, 3, 2]] * 3):  # and selections that come later
        for rig in (used, fresh):
            rig.lengths = {slot: rig.lengths[slot] for slot in range(4)}
            rig.rounds(*grown)
        assert torch.equal(used.step()[[0, 2]], fresh.step()[[0, 2]])
        assert torch.equal(used.reads()[:, [0, 2]], fresh.reads()[:, [0, 2]])


# ---- quest, and guided -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_every_layer_chooses_for_its_own_queries(group: int, n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = tiny_config(n_heads=2 * group, n_kv_heads=2), list[Tensor]()
    ahead(monkeypatch, QuestKV, "attend", lambda self, layer, q, *_: seen.append(q))
    rig = Rig("quest", [30, 200, 450, 900], config, budget=100)
    rig.begin()
    rig.grow([2, 3, 4, 5])
    rig.begin()
    seen.clear()
    make, args = rig.view.kv()
    tokens: Any = torch.randint(256, (4, n_tokens))
    pos = rig.cache.seq_len[:, None] + torch.arange(n_tokens)
    rig.model.hidden(tokens, pos, make(rig.cache.layers, torch.empty(rig.cache.splits(905), 0), *args))
    for q, bounds, chosen in zip(seen, rig.view.bounds, rig.view.chosen, strict=True):
        assert chosen.equal(references.quest_pages(q, bounds, rig.view.window_start // 16, chosen.shape[-1]))
    assert any(not torch.equal(rig.view.chosen[0], other) for other in rig.view.chosen[1:])


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


@pytest.mark.parametrize(("budget", "page"), [(100, 16), (48, 16), (250, 16), (192, 64), (400, 32)])
def test_the_blocks_of_most_mass_are_listed_whole(budget: int, page: int) -> None:
    lengths = [30, budget + 1, 300, 700]
    rig = Rig("guided", lengths, budget=budget, page=page)
    mass = torch.rand(2, 4, 2, 3 * SPLIT // page)
    view = rig.view
    view.device_after_verify(rig.state, mass)
    n_blocks = view.kv_indices.shape[-1] // page
    assert view.kv_indices.shape[-1] + view.window == budget
    for row, length in enumerate(lengths):
        start = int(view.window_start[row])
        assert start % page == 0 and start <= length and length - start <= view.window
        assert length <= budget or length - start > page  # a block and more of what is most recent
        for layer, head in itertools.product(range(2), range(2)):
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
        before, starts = view.selected_at.tolist(), view.window_start.tolist()
        for length, start in zip(rig.lengths.values(), starts, strict=True):  # nothing was lost between list and window
            assert length - start <= view.window and start % 16 == 0
        rig.grow([1, 2, 3, 5])
        for row, length in rig.lengths.items():
            due = length - before[row] >= refresh or length - starts[row] > view.window
            assert int(view.selected_at[row]) == (length if due else before[row])
            selections[row] += due
    for n, by in zip(selections, [1, 2, 3, 5], strict=True):
        apart = min(refresh, 160 // 4)  # the window has room for no more
        assert 30 * by // (apart + 16 + by) <= n <= 1 + 30 * by / min(refresh, 160 // 4 - 16)


@pytest.mark.parametrize("name", ["snapkv", "guided"])
def test_a_selection_that_is_kept_is_made_where_a_row_outgrows_the_budget_and_its_window_slides(name: str) -> None:
    rig, kept = Rig(name, [60, 98, 300, 400], budget=BUDGET, refresh="off"), dict[int, Tensor]()
    room = getattr(rig.view, "room", 0)  # entries of the list that new tokens take
    for n in range(40):
        rig.begin()
        for row, length in rig.lengths.items():
            if n and length > BUDGET + 6:
                listed = rig.view.kv_indices[:, row, :, : rig.view.kv_indices.shape[-1] - room]
                assert torch.equal(kept.setdefault(row, listed.clone()), listed)
        rig.grow([1, 2, 3, 5])
    rig.begin()
    assert rig.view.window_start.tolist() == [length - rig.view.window for length in rig.lengths.values()]
    assert kept.keys() == {1, 2, 3} and rig.view.refresh_every == 0
    for row, length in rig.lengths.items():
        assert clean_reads(rig)[:, row, :, length - rig.view.window - room : length].all()
    first = torch.arange(rig.view.kv_indices.shape[-1] - room)
    assert not any(torch.equal(listed, first.expand_as(listed)) for listed in kept.values())  # the first are no choice
    check_reads(rig, budget=BUDGET)


# ---- in the engine -------------------------------------------------------------------------------------------------


def engine(name: str, **draft: Any) -> Engine:
    return tiny_engine(DraftConfig(policy=name, **draft), batch_size=4, max_seq_len=900)


SWEEP = [random_ids(n, seed=n) for n in (1, 2, 31, 33, SPLIT - 1, SPLIT + 2, 400, 2 * SPLIT, 2 * SPLIT + 1, 3 * SPLIT)]


@thinned("name,gamma", VIEWS, [1, 2, 5])
def test_every_draft_is_accepted_where_the_budget_holds_the_context(name: str, gamma: int) -> None:
    beyond = {"budget": 10**6 + 8, "n_sink": 10**6}  # what any row can hold
    one = engine(name, gamma=gamma, **beyond if gamma == 2 else {"budget": 3 * SPLIT + 24})
    assert one._plan.policy <= 2 * engine(name, gamma=gamma, budget=one.cache.capacity)._plan.policy
    completions = one.generate(SWEEP, SamplingParams(max_tokens=24))
    assert one.stats.acceptance_rate == 1.0
    assert [c.stats.emitted for c in completions] == [24] * len(SWEEP)
    assert len({token for c in completions for token in c.tokens}) > 40  # the model is not stuck on a token


@pytest.mark.parametrize("name", few(VIEWS, ["snapkv", "guided"]))
def test_rounds_without_drafts_in_between_lose_nothing_that_fits(name: str) -> None:
    one = engine(name, gamma=3, budget=500)
    drafting_now_and_then(one, [*[0] * 70, 3, 3, *[0] * 5, 3, 0, 3, *[0] * 17])
    one.generate([random_ids(n, seed=n) for n in (1, 20, 120, 300)], SamplingParams(max_tokens=200))
    assert one.stats.drafted > 60 and one.stats.acceptance_rate == 1.0
