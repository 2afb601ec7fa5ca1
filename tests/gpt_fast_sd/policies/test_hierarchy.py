"""Three levels: what the middle one emits follows its own distribution, so what the target emits follows the target's.

Shapes: B slots, V vocabulary, gamma tokens drafted.
"""

import itertools
from typing import Any

import pytest
import torch

from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.bodies import Bodies
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.policies.hierarchy import CHEAP_GAMMA, HierarchyDraft
from gpt_fast_sd.sampling import ACCEPT_STREAM, CHEAP_ACCEPT_STREAM, CHEAP_STREAM, DRAFT_STREAM, TARGET_STREAM, uniform
from gpt_fast_sd.serving.gamma_planner import StepTimes
from gpt_fast_sd.state import BatchState, RoundPlan
from tests.gpt_fast_sd.policies.drafting import PROMPTS, drafting, holds_a_prefill, nearly, plans_of, tokens_of
from tests.helpers import ahead, few, random_ids, thinned, tiny_config, tiny_model

ALIKE: dict[str, Any] = {"cheap": "standalone", "draft_model": nearly(tiny_model(), by=0.05)}
CHEAPS: dict[str, dict[str, Any]] = {"lookup": {}, "standalone": ALIKE}


def middle(one: Engine) -> HierarchyDraft:
    assert isinstance(one.policy, HierarchyDraft)
    return one.policy


@thinned("cheap,temperature", list(CHEAPS), [0.0, 0.8])
def test_all_drafts_of_a_middle_level_that_sees_everything_are_accepted(cheap: str, temperature: float) -> None:
    one = drafting("hierarchy", view="full", gamma=6, **CHEAPS[cheap])
    one.generate(PROMPTS, SamplingParams(max_tokens=30, temperature=temperature, seed=1))
    accepted = one.stats.acceptance_rate
    # p and q come from steps of different width: where they differ by a rounding, one draft of many may fail
    assert accepted == 1.0 if temperature == 0 else accepted > 0.99
    assert one.stats.drafted > 100


def test_gamma_auto_counts_what_drafting_costs_by_middle_steps() -> None:
    """One draft takes a whole middle step: once it was planned as half of one, and rows were slower than plain ones."""
    one = drafting("hierarchy", gamma="auto", **ALIKE)
    one.warm_up()
    # times of a made-up machine: what warming up measured has a start, and noise, in it
    planner = one.schedule.planner
    planner.start, planner.draft = StepTimes((1, 0.0), (100, 0.0)), StepTimes((1, 2.0), (100, 2.0))
    assert [round(planner.drafting(gamma, 100), 3) for gamma in (1, 2, 3, 4)] == [2.0, 2.0, 4.0, 4.0]


def test_a_middle_step_has_all_that_it_feeds_in_view_and_hardly_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one = drafting("hierarchy", view="full", gamma=8, **ALIKE)
    one.warm_up()
    plans = plans_of(one, monkeypatch)
    spare = list[int]()

    def note(tokens: torch.Tensor, pos: torch.Tensor, n_keys: int) -> None:
        spare.append(n_keys - 1 - int(pos[list(plans[-1].lengths)].max()))

    ahead(monkeypatch, middle(one), "_feed", note)
    one.generate(PROMPTS, SamplingParams(max_tokens=30))
    assert min(spare) == 0 and max(spare) <= 8


@pytest.mark.parametrize("view", few(["full", "streaming", "snapkv", "quest", "guided"], ["full", "snapkv"]))
def test_a_view_has_room_for_the_last_token_that_a_middle_step_feeds(view: str) -> None:
    gamma = 5
    one = drafting("hierarchy", view=view, budget=64, gamma=gamma)
    for event in one.stream([random_ids(300)], SamplingParams(max_tokens=40)):
        committed = int(one.cache.seq_len[0])
        with torch.inference_mode():
            middle(one).view.device_before_draft(one.state, RoundPlan.of({0: committed}))
        for pos in range(committed, committed + gamma + CHEAP_GAMMA + 1):
            assert event.completion or middle(one).positions_read(torch.full((4,), pos))[:, 0, :, pos].all()


# ---- the draft -----------------------------------------------------------------------------------------------------


def scripted(one: Engine, n_right: list[list[int]], text: list[list[int]]) -> None:
    """Let the cheap level propose, step by step and for each row, n_right tokens that the middle level will keep."""
    calls = iter(n_right)
    start = one.cache.seq_len.clone()

    def propose(state: BatchState, plan: RoundPlan) -> Draft:
        gamma = plan.gamma
        tokens = torch.zeros(len(text), gamma, dtype=torch.int64)
        for row, n in enumerate(next(calls)):
            place = int(state.seq_len[row] - start[row])  # tokens drafted so far
            assert state.history[row, : int(state.seq_len[row]) + 1].tolist()[-1 - place :] == text[row][: place + 1]
            assert int(state.pending[row]) == text[row][place]
            right = text[row][place + 1 : place + 1 + gamma]
            tokens[row] = torch.tensor([t if i < n else (t + 1) % 258 for i, t in enumerate(right)])
        return Draft(tokens, None, torch.full((len(text),), gamma))

    middle(one).cheap.propose = propose  # type: ignore[method-assign]


@torch.inference_mode()
def test_each_row_advances_by_what_the_middle_level_kept() -> None:
    """Draft, count and proposer, where rows keep 0 to CHEAP_GAMMA cheap drafts per step and some are full early."""
    plain = drafting("off").generate(PROMPTS[:4], SamplingParams(max_tokens=20))
    text = [[prompt[-1], *completion.tokens] for prompt, completion in zip(PROMPTS, plain, strict=False)]
    one = drafting("hierarchy", view="full", gamma=6)
    rounds = one.stream(PROMPTS[:4], SamplingParams(max_tokens=20))
    next(rounds)  # all slots are live, a round was committed
    for slot, prompt in enumerate(PROMPTS[:4]):
        n = int(one.cache.seq_len[slot]) - len(prompt) + 1
        text[slot] = text[slot][n:]
    plan = RoundPlan.of(dict(enumerate(one.cache.seq_len.tolist())), gamma=6)
    scripted(one, [[0, 1, 3, 2], [0, 1, 3, 3], [0, 1, 0, 0]], text)
    draft = middle(one).propose(one.state, plan)
    assert draft.q is None and draft.proposer is not None
    assert draft.count.tolist() == [3, 6, 6, 6]
    for row, by in enumerate(([1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0])):
        assert draft.proposer[row, : len(by)].tolist() == by
        assert draft.tokens[row, : len(by)].tolist() == text[row][1 : len(by) + 1]


@pytest.mark.parametrize("scripted", [False, True])
def test_a_standalone_cheap_level_keeps_its_cache_whatever_both_judges_keep(scripted: bool) -> None:
    """Its model has one layer, whose keys depend on the tokens alone, so that its sparse view changes none of them.

    It feeds neither the last of its drafts nor the middle level's own token, and both judges may keep both.
    """
    target = tiny_model(tiny_config(n_layers=1))
    theirs, budget = (target, 512) if scripted else (nearly(target, by=0.02), 24)
    one = drafting("hierarchy", model=target, budget=budget, gamma=8, cheap="standalone", draft_model=theirs)
    cheap: Any = middle(one).cheap
    propose, calls = cheap.propose, itertools.count(1)

    def right_in_every_fourth_step(state: BatchState, plan: RoundPlan) -> Draft:
        draft: Draft = propose(state, plan)
        return draft if next(calls) % 4 == 0 else Draft((draft.tokens + 1) % 258, draft.q, draft.count)

    if scripted:
        cheap.propose = right_in_every_fourth_step
    accepted = holds_a_prefill(one, cheap.runner, PROMPTS[:4], lag=3)
    assert accepted.count(7) >= 12 if scripted else len(set(accepted)) > 4


def test_no_two_decisions_share_a_stream_of_random_numbers() -> None:
    """Of a round with two middle steps: three cheap drafts, whether they are kept, the middle level's own token."""
    one = drafting("hierarchy", view="streaming", budget=32, gamma=3, **ALIKE)
    streams: list[int] = []

    def recorded(seed: torch.Tensor, position: torch.Tensor, stream: int) -> torch.Tensor:
        streams.append(stream)
        return uniform(seed, position, stream)

    object.__setattr__(one.state, "bodies", Bodies(uniform=recorded))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt_fast_sd.acceptance.uniform", recorded)
        next(one.stream(PROMPTS[:4], SamplingParams(max_tokens=20, temperature=1.0)))
    step = [CHEAP_STREAM] * CHEAP_GAMMA + [CHEAP_ACCEPT_STREAM, DRAFT_STREAM]
    assert streams == [*step, *step, ACCEPT_STREAM, TARGET_STREAM]
    assert len(set(streams)) == 5


def test_a_guided_middle_level_selects_by_no_token_of_a_slots_former_occupant() -> None:
    """Drafts past those that a round filled were what the slot had held before: verified, they counted in the mass."""
    one = drafting("hierarchy", view="guided", budget=64, gamma=7, engine={"batch_size": 3})
    texts = [random_ids(n, seed=n) for n in (300, 180, 410, 250, 330, 220)]
    params = [SamplingParams(max_tokens=40, temperature=1.2, seed=i, ignore_eos=True) for i in range(len(texts))]
    first = tokens_of(one.generate(texts, params))
    assert one.stats.drafted < 7 * one.stats.row_rounds  # rounds filled less than 7
    for _ in range(2):
        assert tokens_of(one.generate(texts, params)) == first
    assert tokens_of(one.generate(texts[::-1], params[::-1])) == first[::-1]


def test_a_guided_middle_level_is_shown_the_mass_of_the_verification() -> None:
    one = drafting("hierarchy", view="guided", budget=64, gamma=4)
    policy: Any = middle(one)
    assert policy.wants_mass
    rounds = one.stream([random_ids(400)], SamplingParams(max_tokens=30))
    next(rounds)
    chosen = policy.view.kv_indices[:, 0].clone()
    assert (chosen >= 64).any()  # before the first verification it lists the first entries only
    pos = torch.tensor([400, 0, 0, 0])
    assert torch.equal(policy.positions_read(pos), policy.view.positions_read(pos))
    list(rounds)
    assert not drafting("hierarchy", view="streaming", gamma=4).policy.wants_mass  # type: ignore[union-attr]
