"""A round's commit is what a slow loop over rows and tokens does, whatever the drafts, the ends and the rows.

Shapes: B slots, gamma drafts per row, S places of history per slot.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.bodies import Bodies
from gpt_fast_sd.fast import cpu_attention_fits
from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.fast.compile import Options
from gpt_fast_sd.model import KVCache
from gpt_fast_sd.sampling import Kind
from gpt_fast_sd.serving.launch import Rounds
from gpt_fast_sd.state import BatchState, RoundPlan
from gpt_fast_sd.steps import Runner
from tests.gpt_fast_sd.policies.drafting import plans_of
from tests.helpers import form_of, random_ids, tiny_config, tiny_model

VOCAB = 7
HISTORY = 24


@st.composite
def cases(draw: st.DrawFn) -> tuple[BatchState, torch.Tensor, torch.Tensor, AcceptResult]:
    """Rows in the middle of their texts, drafts and any result of them."""
    n_rows, gamma = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    eos_ids = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True))
    state = BatchState.idle(torch.zeros(n_rows, dtype=torch.int64), HISTORY, VOCAB, eos_ids)

    def whole(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    def tokens(n: int) -> list[int]:
        return draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n))

    caps, accepted = [], []
    for slot in range(n_rows):
        length = whole(0, HISTORY - gamma - 2)
        state.history[slot] = torch.tensor(tokens(HISTORY))
        state.seq_len[slot] = length
        state.pending[slot] = state.history[slot, length]
        state.active[slot] = alive = draw(st.booleans())
        state.remaining[slot] = whole(1, gamma + 3) if alive else 0
        state.stop_on_eos[slot] = draw(st.booleans())
        caps.append(whole(0, gamma))  # the engine leaves room for the target's own token; a commit does not rely on it
        accepted.append(whole(0, caps[-1]))
    drafted = torch.tensor([tokens(gamma) for _ in range(n_rows)], dtype=torch.int64).view(n_rows, gamma)
    result = AcceptResult(torch.tensor(accepted), torch.tensor(tokens(n_rows)))
    return state, drafted, torch.tensor(caps), result


def slow_commit(
    state: BatchState, slot: int, drafted: list[int], max_accept: int, n_accepted: int, next_token: int
) -> dict[str, object]:
    """What a round does to one slot, token by token."""
    length, history = int(state.seq_len[slot]), state.history[slot].tolist()
    remaining, active = int(state.remaining[slot]), bool(state.active[slot])
    pending, emitted, judged = int(state.pending[slot]), [], 0
    for i, token in enumerate([*drafted[:n_accepted], next_token]):
        if not active:
            break
        emitted.append(token)
        remaining -= 1
        judged = i + 1 if i < n_accepted else max_accept  # the target's own token: all drafts have been looked at
        if (token in state.eos_ids.tolist() and bool(state.stop_on_eos[slot])) or remaining == 0:
            active = False
    for token in emitted:
        length, pending = length + 1, token
        history[length] = token
    return {
        "emitted": emitted, "judged": judged, "accepted": min(n_accepted, len(emitted)), "seq_len": length,
        "pending": pending, "history": history, "remaining": remaining, "active": active,
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_a_commit_is_that_of_a_loop_over_rows_and_tokens(
    case: tuple[BatchState, torch.Tensor, torch.Tensor, AcceptResult],
) -> None:
    state, drafted, max_accept, result = case
    expected = [
        slow_commit(state, slot, drafted[slot].tolist(), int(max_accept[slot]), int(result.n_accepted[slot]),
                    int(result.next_token[slot]))
        for slot in range(len(max_accept))
    ]  # fmt: skip
    seq_len = state.seq_len
    chosen = state.commit(drafted, max_accept, result)
    assert chosen.shape == (len(max_accept), 2 * drafted.shape[1] + 5) and chosen.dtype == torch.int64
    for slot, (emitted, judged, accepted, *tokens) in enumerate(chosen.tolist()):
        got = {
            "emitted": tokens[:emitted], "judged": judged, "accepted": accepted, "seq_len": int(state.seq_len[slot]),
            "pending": int(state.pending[slot]), "history": state.history[slot].tolist(),
            "remaining": int(state.remaining[slot]), "active": bool(state.active[slot]),
        }  # fmt: skip
        assert got == expected[slot]
    assert state.seq_len is seq_len  # the cache's own tensor, written in place


def state_of(n: int, *, max_tokens: int = 10) -> BatchState:
    """n slots with the prompt 1, 2, 3, the last of which is pending."""
    state = BatchState.idle(torch.zeros(n, dtype=torch.int64), HISTORY, VOCAB, ())
    for slot in range(n):
        state.assign(slot, [1, 2, 3], SamplingParams(max_tokens=max_tokens), seed=slot)
    return state


def test_a_vacant_slot_is_put_to_use_again_with_nothing_left_of_its_last_text() -> None:
    def commit(draft: int, own: int) -> list[list[int]]:
        """A round in which each slot drafted one token, and keeps it: the tokens that it emits."""
        result = AcceptResult((state.remaining > 1).long(), torch.full((2,), own))
        out = state.commit(torch.full((2, 1), draft), torch.ones(2, dtype=torch.int64), result)
        return [tokens[:n] for n, _, _, *tokens in out.tolist()]

    state = state_of(2, max_tokens=2)
    state.table.temperature[0] = 1.0
    assert commit(4, 5) == [[4, 5]] * 2
    state.free(0)
    assert state.pending.tolist()[0] == 0 and float(state.table.temperature[0]) == 0.0
    state.assign(0, [6], SamplingParams(max_tokens=4, ignore_eos=True), seed=9)
    assert state.seq_len.tolist() == [0, 4] and state.pending.tolist() == [6, 5]
    assert commit(1, 2) == [[1, 2], []]
    assert state.history[0, :3].tolist() == [6, 1, 2]


def test_what_a_round_needs_from_the_host_is_taken_from_the_live_requests_alone() -> None:
    plain, sampled = SamplingParams(), SamplingParams(temperature=0.5)
    for params, wanted in [
        ([plain], (False, False)),
        ([plain, sampled], (True, False)),
        ([plain, SamplingParams(temperature=0.5, top_k=3)], (True, True)),
        ([SamplingParams(top_k=3)], (False, False)),  # a greedy row needs no filter
    ]:
        plan = RoundPlan.of({0: 4, 2: 9}, params)
        assert plan.kind == wanted and plan.n_keys == 10 and plan.lengths == {0: 4, 2: 9}


def test_idle_slots_have_no_keys_in_use() -> None:
    """Two of four slots are live: times are planned by what is read, which falls as rows end."""
    plan = RoundPlan.of({0: 19, 2: 9})
    assert (plan.n_keys, plan.mean_keys(4)) == (20, 7)
    plan = RoundPlan.of({2: 9}, ahead=2)
    assert (plan.n_keys, plan.mean_keys(4)) == (12, 3)


def test_a_plan_to_capture_knows_nothing_of_the_rows_that_are_live() -> None:
    params = [SamplingParams(temperature=0.5, top_k=3)]
    plan = RoundPlan.of(
        {0: 19, 2: 9}, params, gamma=3, ahead=2, number=7, follows_a_draft=False, drafted_at={0: 5, 2: 9}
    )
    assert plan.to_capture(509) == RoundPlan(gamma=3, n_keys=509, kind=Kind(True, True), captured=True)
    assert plan.any_drafted_within(5) and not plan.any_drafted_within(4) and plan.to_capture(509).any_drafted_within(0)


@pytest.mark.parametrize("field", ["seq_len", "pending", "active"])
def test_no_tensor_of_rows_takes_the_place_of_another(field: str) -> None:
    """Captured rounds know where they are."""
    state = state_of(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(state, field, torch.zeros(2))
    other = state.ending_at(state.seq_len + 1, state.pending + 1)
    assert state.seq_len.tolist() == [2, 2] and other.seq_len.tolist() == [3, 3] and other.pending.tolist() == [4, 4]
    assert other.history is state.history and other.table is state.table


@pytest.mark.parametrize("compiled", [None, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rounds_are_planned_by_the_mean_for_our_kernels(
    head_dim: int, dtype: torch.dtype, compiled: Options | None
) -> None:
    """Else a step reads the view of the longest row for every row, however few keys the others have."""
    model = tiny_model(tiny_config(n_layers=1, head_dim=head_dim))
    cache = KVCache(model.config, 4, 128, format=form_of(dtype), device=torch.device("cpu"))
    state = BatchState.idle(cache.seq_len, HISTORY, VOCAB, [])
    rounds = Rounds(
        Runner(model, cache, backend=FastBackend(torch.device("cpu"), compiled)), state, None, DraftConfig()
    )
    ours = compiled is not None and cpu_attention_fits(head_dim, dtype, cache.format)
    assert rounds.keys_read(RoundPlan.of({0: 19, 2: 9})) == (7 if ours else 20)
    assert not ours or head_dim == 64


@pytest.mark.parametrize("ours", [False, True])
def test_the_planner_chooses_by_what_it_is_taught_by(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(batch_size=3, max_seq_len=300, device="cpu", dtype="fp32", compile=False)
    one = Engine(tiny_model(), None, config, DraftConfig(policy="streaming", gamma="auto"))
    monkeypatch.setattr(Bodies, "reads_own_keys", ours)
    asked, taught, plans = list[int](), list[int](), plans_of(one, monkeypatch)

    def choose(n_keys: int) -> int:
        asked.append(n_keys)
        return 1

    monkeypatch.setattr(one.schedule.planner, "calibrate", lambda *args: None)
    monkeypatch.setattr(one.schedule.planner, "choose", choose)
    monkeypatch.setattr(one.schedule.planner, "record", lambda gamma, n_keys, *args: taught.append(n_keys))
    one.generate([random_ids(200, seed=0), random_ids(7, seed=1)], SamplingParams(max_tokens=9))
    most = [(plan.n_keys, plan.mean_keys(3)) for plan in plans]
    assert asked == taught == [keys[ours] for keys in most] and len(asked) > 3
