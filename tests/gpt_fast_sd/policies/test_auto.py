"""Several policies take turns over one target: each drafts as if it were alone, and none changes what is emitted."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams
from gpt_fast_sd.loading import MemoryPlan, System, fit
from gpt_fast_sd.policies.auto import AutoConfig
from gpt_fast_sd.serving.lookup_trials import Trial
from tests.gpt_fast_sd.policies.test_drafts_without_a_model import trials_of
from tests.helpers import Patch, random_ids, thinned, tiny_config, tiny_engine, tiny_model

PROMPTS = [random_ids(n, seed=n) for n in (70, 1, 30, 9)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@thinned(
    "turns,captured",
    ["standalone", "standalone - standalone lookup guided streaming", "guided - - standalone lookup", "- guided"],
    [False, True],
)
def test_arms_in_turns_emit_the_plain_tokens_and_a_draft_model_that_is_the_target_keeps_all(
    turns: str, captured: bool, monkeypatch: Patch, request: pytest.FixtureRequest
) -> None:
    if captured:
        request.getfixturevalue("cuda")
    draft = DraftConfig(policy="auto", gamma=2, budget=128, draft_model="given")
    one = tiny_engine(draft, tiny_model(), batch_size=3, max_seq_len=128)
    planner, arms = one.schedule.planner, one.policy.arms  # type: ignore[union-attr]
    monkeypatch.setattr(planner, "promising", lambda few, many: range(len(arms)))
    one.warm_up()
    order, chosen = itertools.cycle(turns.split()), []

    def choose(n_keys: int) -> int:
        chosen.append(next(order))
        planner.arm = 0 if chosen[-1] == "-" else [arm.policy for arm in arms].index(chosen[-1])
        return 0 if chosen[-1] == "-" else 2

    monkeypatch.setattr(planner, "choose", choose)
    trials, rounds = Counter[Trial](), []
    counted = planner.of_view["lookup"]  # type: ignore[union-attr]
    monkeypatch.setattr(counted, "count_trials", lambda found, rounds: trials.update(found))
    one.on_round = rounds.append
    got = one.generate(PROMPTS, PARAMS)
    one.on_round = None
    planner.found()  # counts what waits to be counted
    assert [c.tokens for c in got] == [c.tokens for c in one.generate(PROMPTS, PARAMS, speculate=False)]
    assert len(chosen) - len(rounds) == captured and set(chosen) == set(turns.split())  # one was launched ahead
    if turns == "- guided":  # what lookup would have drafted was counted: in both kinds of rounds, of all texts
        texts = [(prompt, [*prompt, *one.tokens]) for prompt, one in zip(PROMPTS, got, strict=True)]
        assert trials == sum((Counter(trials_of(text, len(prompt), 3, 2)) for prompt, text in texts), Counter())
    for turn, event in zip(chosen, rounds, strict=False):
        assert {source for row in event.events for source in row.sources} <= {"target", turn}
        if turn == "standalone":
            assert all(row.accepted == row.drafted for row in event.events)


def test_one_copy_of_each_precision_is_planned_for_and_left_out_where_it_does_not_fit(monkeypatch: Patch) -> None:
    config = EngineConfig(batch_size=2, max_seq_len=512)
    draft, shape = DraftConfig(policy="auto"), tiny_config(dim=256, ffn_dim=512)
    system = System(config=config, draft=draft, model=shape, dtype=torch.bfloat16)
    monkeypatch.setattr(fit, "free_memory", lambda device: None)
    whole = fit.plan_for(system)
    assert [(arm.policy, arm.quantize) for arm in whole.system.draft.arms] == [
        ("lookup", None), *((view, bits) for bits in (None, "int4", "int8") for view in ("streaming", "guided"))
    ]  # fmt: skip
    alone = {bits: MemoryPlan.of(replace(system, draft=DraftConfig(policy="streaming", quantize=bits)))
             for bits in (None, "int4", "int8")}  # fmt: skip
    arms = [MemoryPlan.of(replace(system, draft=arm)) for arm in whole.system.draft.arms]
    assert whole.policy == sum(plan.policy for plan in arms)  # each keeps its own selection
    assert whole.draft_weights == alone["int4"].draft_weights + alone["int8"].draft_weights > 0
    for kept in ((None, "int4", "int8"), (None, "int4"), (None,)):
        room = whole.total - sum(alone[b].draft_weights for b in ("int8", "int4") if b not in kept)
        monkeypatch.setattr(fit, "free_memory", lambda device, room=room: room)
        assert fit.plan_for(system).system.draft.arms == AutoConfig.of(draft, kept).arms
    given = fit.plan_for(replace(system, draft=replace(draft, draft_model="given"), draft_model=shape))
    with pytest.raises(ValueError, match="short of that"):  # a draft model that is asked for is not left out
        given.check(fit.plan_for(system).total)
    monkeypatch.setattr(fit, "free_memory", lambda device: None)
    assert all(arm.quantize != "int8" for arm in fit.plan_for(
        replace(system, config=replace(config, quantize="int8"))).system.draft.arms)  # fmt: skip


@pytest.mark.parametrize("gamma", [3, 8])
def test_a_gamma_that_is_given_is_that_of_all_arms_or_nothing_is_drafted(gamma: int) -> None:
    one = tiny_engine(DraftConfig(policy="auto", gamma=gamma), batch_size=2)
    one.generate(PROMPTS, PARAMS)
    assert set(one.stats.rounds_by_gamma) <= {*range(gamma + 1)} and one.schedule.planner.tiers == (0, gamma)
    one.redraft(DraftConfig(policy="streaming", gamma=1))
    plain = one.generate(PROMPTS, PARAMS)
    one.redraft(DraftConfig(policy="auto"))
    assert [c.tokens for c in one.generate([*PROMPTS, [1, 2]], PARAMS)][:4] == [c.tokens for c in plain]
    ends = one.generate(PROMPTS, [replace(PARAMS, max_tokens=n) for n in (1, 40, 1, 2)])  # some at once
    assert [c.tokens for c in ends] == [c.tokens[:n] for c, n in zip(plain, (1, 40, 1, 2), strict=True)]


def test_where_nothing_can_pay_no_arm_is_made_and_what_does_not_fit_is_refused_before(monkeypatch: Patch) -> None:
    one = tiny_engine(DraftConfig(policy="auto", n_sink=64, budget=64), batch_size=2)
    monkeypatch.setattr(one.schedule.planner, "promising", lambda few, many: [])
    one.generate(PROMPTS, PARAMS)
    assert not one.policy.made and set(one.stats.rounds_by_gamma) == {0}  # type: ignore[union-attr]
    for draft, said in (({"draft_model": "given"}, "none was given"), ({"kv_bits": 4}, "planes|int8")):
        with pytest.raises(ValueError, match=said):
            one.redraft(DraftConfig(policy="auto", **draft))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="vocabulary of 1,300"):
            one.redraft(DraftConfig(policy="auto", draft_model="given"), tiny_model(tiny_config(vocab_size=1300)))
    assert one.draft.n_sink == 64
    monkeypatch.undo()
    one.redraft(DraftConfig(policy="auto", n_sink=64, budget=64))
    assert one.generate(PROMPTS, PARAMS)
