"""The promises of every view of a cache: it reads what it reports, within its budget, and loses nothing that fits.

Shapes: B slots, S cache capacity, L layers, K kv heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies.picture import SHADES, picture
from tests.drafts import VIEWS
from tests.gpt_fast_sd.policies.drafting import drafting_now_and_then, tokens_of
from tests.gpt_fast_sd.policies.views_rig import MAX_LEN, N_ROWS, SPARSE, Rig
from tests.helpers import few, random_ids, thinned, tiny_engine

BUDGET, PAGE, N_SINK = 100, 16, 4
EDGES = [
    0, 1, 2, N_SINK, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 5,
    SPLIT - 1, SPLIT, SPLIT + 1, 3 * BUDGET, 2 * SPLIT - 1, 2 * SPLIT, 7 * BUDGET, MAX_LEN - 30,
]  # fmt: skip
LENGTHS = [EDGES[i::5] for i in range(5)]  # rows of one batch differ much


def clean_reads(rig: Rig) -> Tensor:
    """What one step reads of the committed entries, as the view says it: bool [L, B, K, S]."""
    return rig.reads() & rig.committed


def poison(rig: Rig, spare: Tensor) -> None:
    """Fill every committed entry but those of spare [L, B, K, S] with huge numbers."""
    for layer, keep in zip(rig.cache.layers, spare, strict=True):
        for buffer in layer.buffers:
            buffer[rig.committed & ~keep] = 1e30


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
    poison(rig, reads)
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
    generator = torch.Generator().manual_seed(5)
    for i in torch.randperm(len(named), generator=generator)[:60].tolist():
        row, head, place = named[i]
        before = rig.cache.layers[0].v[row, head, place].clone()
        rig.cache.layers[0].v[row, head, place] = 1e15  # so that no weight is too small to show
        changed = (rig.step() != logits).any(-1)
        assert changed.tolist() == [other == row for other in range(N_ROWS)]
        rig.cache.layers[0].v[row, head, place] = before
    assert torch.equal(rig.step(), logits)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", SPARSE)
def test_however_rows_grow_the_view_keeps_its_promises(name: str, data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([16, 32, 64, 128]), "page")
    budget = data.draw(st.integers(max(64, 3 * page), 400), "budget")
    refresh = data.draw(st.none() | st.integers(1, 100), "refresh")
    sink = data.draw(st.integers(1, 40), "sink")
    gamma = data.draw(st.integers(1, 16), "gamma")
    lengths = data.draw(st.lists(st.integers(0, 700), min_size=N_ROWS, max_size=N_ROWS), "lengths")
    rig = Rig(name, lengths, budget=budget, page=page, refresh=refresh, n_sink=sink, gamma=gamma)
    if data.draw(st.booleans(), "drafted at once"):
        rig.begin()
    for _ in range(data.draw(st.integers(1, 4), "rounds")):
        drafted = data.draw(st.booleans(), "drafted")
        grown = (
            st.integers(1, gamma + 1) if drafted else st.integers(1, 90)
        )  # rounds without drafts, any number of them
        rig.grow(data.draw(st.lists(grown, min_size=N_ROWS, max_size=N_ROWS), "by"), observed=drafted)
        rig.begin()
    check_reads(rig, budget=budget)


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


@pytest.mark.parametrize("name", SPARSE)
def test_entries_read_counts_what_a_step_may_read_at_most(name: str) -> None:
    rig = Rig(name, [900] * 4, budget=BUDGET)
    rig.begin()
    rig.step()
    max_new = rig.draft.max_gamma + 2
    also = {
        "quest": 1024 // PAGE,  # a page's largest and smallest keys are as large as one entry
        "snapkv": 901 // 18,  # each 18 tokens (half of the budget less what is observed) take a pass over all
    }
    assert rig.view.entries_read(901) == BUDGET + max_new + also.get(name, 0)
    assert rig.view.entries_read(90) <= BUDGET + max_new + 512 // PAGE  # two splits are in view at least
    assert int(clean_reads(rig).sum(-1).max()) <= BUDGET


# ---- in the engine -------------------------------------------------------------------------------------------------


def engine(name: str, **draft: Any) -> Engine:
    return tiny_engine(DraftConfig(policy=name, **draft), batch_size=4, max_seq_len=900)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [random_ids(n, seed=n) for n in lengths]


SWEEP = prompts([1, 2, 31, 33, SPLIT - 1, SPLIT + 2, 400, 2 * SPLIT, 2 * SPLIT + 1, 3 * SPLIT])


@thinned("name,gamma", VIEWS, [1, 2, 5])
def test_every_draft_is_accepted_where_the_budget_holds_the_context(name: str, gamma: int) -> None:
    one = engine(name, gamma=gamma, budget=3 * SPLIT + 24)
    completions = one.generate(SWEEP, SamplingParams(max_tokens=24))
    assert one.stats.acceptance_rate == 1.0
    assert [c.stats.emitted for c in completions] == [24] * len(SWEEP)
    assert len({token for c in completions for token in c.tokens}) > 40  # the model is not stuck on a token


@pytest.mark.parametrize("name", few(VIEWS, ["snapkv", "guided"]))
def test_rounds_without_drafts_in_between_lose_nothing_that_fits(name: str) -> None:
    one = engine(name, gamma=3, budget=500)
    drafting_now_and_then(one, [*[0] * 70, 3, 3, *[0] * 5, 3, 0, 3, *[0] * 17])
    one.generate(prompts([1, 20, 120, 300]), SamplingParams(max_tokens=200))
    assert one.stats.drafted > 60 and one.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("asked", [{"budget": 10**6}, {"budget": 10**6 + 8, "n_sink": 10**6}], ids=str)
def test_a_budget_beyond_the_cache_costs_what_all_of_it_does(name: str, asked: dict[str, int]) -> None:
    """Once a selection had room for what no row can hold: 10^9 asked for more memory than there was, or for 80 GB."""
    params, fields = SamplingParams(max_tokens=20), (asked, {"budget": 2 * SPLIT})
    one, whole = (tiny_engine(DraftConfig(policy=name, gamma=3, **each), max_seq_len=2 * SPLIT) for each in fields)
    got, expected = (tokens_of(each.generate(prompts([300, 9]), params)) for each in (one, whole))
    assert got == expected == tokens_of(whole.generate(prompts([300, 9]), params, speculate=False))
    assert one._plan.policy <= 2 * whole._plan.policy and one.draft.budget == asked["budget"]


# ---- the picture of what is read: blank means nothing, solid means all ---------------------------------------------


def test_a_stretch_is_shaded_by_the_share_of_it_that_is_read() -> None:
    mask = torch.zeros(1, 2, 60, dtype=torch.bool)
    mask[0, 0, :10] = mask[0, 0, 10] = mask[0, 0, 20:25] = mask[0, 0, 30:39] = True
    assert picture(mask, width=6).splitlines() == [
        "               0     59",
        "layer 0  head 0 |█░▒▓  | 25",
        "layer 0  head 1 |      | 0",
    ]


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 5001])
def test_one_entry_of_many_is_never_blank_and_one_missing_is_never_solid(n: int) -> None:
    lone = torch.eye(n, dtype=torch.bool)[:: max(1, n // 50)][None]  # a line for each of some positions
    for line in picture(lone).splitlines()[1:]:
        bar = line[line.index("|") + 1 : line.rindex("|")]
        assert len(bar) == min(n, 64) and sum(shade != " " for shade in bar) == 1
    for line in picture(~lone).splitlines()[1:]:
        bar = line[line.index("|") + 1 : line.rindex("|")]
        assert sum(shade != "█" for shade in bar) == 1 and set(bar) <= set(SHADES)


@pytest.mark.parametrize("name", VIEWS)
def test_every_policy_draws_itself(name: str) -> None:
    rig = Rig(name, [100, 300, 500, 700], budget=128)
    rig.begin()
    rig.rounds([1, 2, 3, 4])
    drawn = picture(rig.reads()[:, 3, :, :705])
    print(f"\n{name}, 128 of 704 entries and the pending one\n{drawn}")
    bars = [line[line.index("|") + 1 : line.rindex("|")] for line in drawn.splitlines()[1:]]
    assert len(bars) == 4 and all(len(bar) == 64 and bar[-1] == "█" for bar in bars)
    blank = sum(bar.count(" ") for bar in bars) / 256
    assert blank == 0 if name == "full" else 0.2 < blank < 0.9
    assert (len(set(bars)) == 1) == (name in ("full", "streaming"))  # the others select by kv head and layer
