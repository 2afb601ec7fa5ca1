"""The events of a run's rounds, if somebody listens: who proposed what, what was refused and read, and when.

Shapes: B slots, S positions, L layers, K kv heads, gamma tokens drafted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.serving.requests import RoundEvent
from gpt_fast_sd.state import BatchState, RoundPlan
from tests.gpuless.recorder import capture
from tests.helpers import few, random_ids, tiny_config, tiny_model

BUDGET, GAMMA = 96, 3
PROMPTS = [random_ids(n, seed=n) for n in (400, 20, 300)]
PARAMS = SamplingParams(max_tokens=25, temperature=0.7, seed=5)
SELF_DRAFTS = ["full", "streaming", "snapkv", "quest", "guided"]


def engine(policy: str, **draft: Any) -> Engine:
    """Two slots for three prompts, eager; a policy's drafts are refused about as often as not."""
    config = EngineConfig(batch_size=2, max_seq_len=512, device="cpu", compile=False)
    wanted = {"policy": policy, "gamma": GAMMA} | ({} if policy in ("off", "lookup") else {"budget": BUDGET}) | draft
    theirs = tiny_model(seed=1) if "standalone" in (policy, wanted.get("cheap")) else None
    if theirs and policy == "standalone":
        wanted["draft_model"] = "a model of its own"
    return Engine(tiny_model(), None, config, DraftConfig(**wanted), theirs)


def listen(one: Engine, **call: Any) -> list[RoundEvent]:
    """All rounds of a run over the prompts."""
    told: list[RoundEvent] = []
    one.on_round = told.append
    one.generate(PROMPTS, PARAMS, **call)
    return told


@pytest.mark.parametrize("policy", few(["streaming", "snapkv", "lookup"], ["snapkv"]))
def test_captured_rounds_tell_the_same_refusals_and_neither_views_nor_parts(policy: str) -> None:
    config = EngineConfig(batch_size=2, max_seq_len=512, device="cpu", compile=False)
    draft, told = DraftConfig(policy=policy, gamma=GAMMA, **({} if policy == "lookup" else {"budget": BUDGET})), []
    for captured in (False, True):
        one = Engine(tiny_model(), None, config, draft)
        if captured:
            one.schedule.rounds.capture = capture
        by_prompt: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for each in listen(one):
            assert not captured or not (each.read or each.draft_seconds or each.verify_seconds)
            for event in each.events:
                assert len(event.refused) == event.drafted - event.accepted
                by_prompt[event.index].append((event.tokens, event.refused))
        told.append(by_prompt)
    for index in range(3):  # near a row's end captured rounds draft on, and no more of it counts
        eager, ahead = told[0][index], told[1][index]
        assert ahead[:-2] == eager[:-2]
        assert [t for tokens, _ in ahead for t in tokens] == [t for tokens, _ in eager for t in tokens]


@pytest.mark.parametrize("policy", ["streaming", "guided", "hierarchy"])
def test_the_refused_drafts_are_those_that_the_policy_proposed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(policy)
    one.warm_up()
    assert one.policy
    propose, proposed = one.policy.propose, []

    def note(state: BatchState, plan: RoundPlan) -> Draft:
        draft = propose(state, plan)
        proposed.append(draft.tokens.tolist())
        return draft

    monkeypatch.setattr(one.policy, "propose", note)
    slots: list[dict[int, int]] = []
    launch = one.schedule.rounds.launch

    def place(plan: RoundPlan, live: Any, **how: Any) -> Any:
        if plan.gamma:
            slots.append({request.index: slot for slot, request in live})
        return launch(plan, live, **how)

    monkeypatch.setattr(one.schedule.rounds, "launch", place)
    told = [each for each in listen(one) if each.gamma]
    assert len(told) == len(proposed)
    for each, drafts, at in zip(told, proposed, slots, strict=True):
        for event in each.events:
            draft = drafts[at[event.index]]
            assert event.tokens[: event.accepted] == draft[: event.accepted]
            assert event.refused == draft[event.accepted : event.drafted]


@pytest.mark.parametrize("policy", few(SELF_DRAFTS, ["streaming", "quest"]))
def test_what_is_told_to_be_read_is_the_view_and_within_the_bytes_that_are_counted(policy: str) -> None:
    config = tiny_config()
    one = engine(policy, **({"page": 16} if policy in ("quest", "guided") else {}))
    told = listen(one)
    assert one.policy
    lengths = dict.fromkeys(range(3), 0)
    for each in told:
        for event in each.events:
            length = len(PROMPTS[event.index]) - 1 + lengths[event.index]  # committed when the round began
            lengths[event.index] += len(event.tokens)
            if not each.gamma:
                assert not each.read
                continue
            read = each.read[event.index]  # [S]
            last = length + each.gamma - 1
            assert read[last] == 1 and not read[last + 1 :].any()  # its own position, and none that is still to come
            entries = float(read.sum()) * config.n_layers * config.n_kv_heads
            counted = one.policy.view.entries_read(last + 1) * config.n_layers * config.n_kv_heads  # type: ignore
            assert entries <= counted + 1e-2
            if policy == "streaming" and length > BUDGET:
                in_view = [*range(one.draft.n_sink), *range(length - BUDGET + one.draft.n_sink, last + 1)]
                assert read.nonzero().flatten().tolist() == in_view
            if policy == "full":
                assert entries == (last + 1) * config.n_layers * config.n_kv_heads
    assert any(each.gamma for each in told)


def test_guided_pages_are_told_as_the_draft_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("guided", page=16)
    one.warm_up()
    assert one.policy
    propose, before = one.policy.propose, []

    def note(state: BatchState, plan: RoundPlan) -> Draft:
        draft = propose(state, plan)
        before.append(one.policy.positions_read(state.seq_len + plan.gamma - 1).float().mean((0, 2)))  # type: ignore
        return draft

    monkeypatch.setattr(one.policy, "propose", note)
    told = [each for each in listen(one) if each.gamma]
    assert len(told) == len(before)
    for each, view in zip(told, before, strict=True):
        for read in each.read.values():
            assert any(torch.equal(read, row[: len(read)]) for row in view)


def test_looking_is_no_part_of_the_time_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("streaming")
    one.warm_up()
    clock = [0.0]
    monkeypatch.setattr("gpt_fast_sd.serving.launch.time.perf_counter", lambda: clock[0])
    assert one.policy
    positions_read = one.policy.positions_read

    def slow(pos: torch.Tensor) -> torch.Tensor:
        clock[0] += 100.0
        return positions_read(pos)

    monkeypatch.setattr(one.policy, "positions_read", slow)
    listen(one)
    assert clock[0] >= 100.0 and one.stats.decode_seconds == 0.0


def test_what_drafts_read_is_not_recorded_unless_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("streaming")
    one.warm_up()

    def refuse(pos: torch.Tensor) -> torch.Tensor:
        raise AssertionError("looked at for nobody")

    monkeypatch.setattr(one.policy, "positions_read", refuse)
    quiet = one.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    told: list[RoundEvent] = []
    one.on_round = told.append
    assert [c.tokens for c in one.generate(PROMPTS, PARAMS)] == [c.tokens for c in quiet]
    assert told
