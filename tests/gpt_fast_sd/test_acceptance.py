"""What a round does to its rows, against slow loops: which drafts stay, what is committed; and what the host plans.

That text follows the target's law is tested with policies.

Shapes: B batch rows, gamma drafts per row, V vocabulary, S places of history per slot.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.acceptance import AcceptResult, verify_greedy, verify_sampled
from gpt_fast_sd.bodies import Bodies
from gpt_fast_sd.sampling import Kind
from gpt_fast_sd.state import BatchState, RoundPlan
from tests.gpt_fast_sd.policies.drafting import drafting_now_and_then, plans_of
from tests.helpers import ahead, random_ids, tiny_engine

# ---- one result ----------------------------------------------------------------------------------------------------


def best_of(logits: Sequence[float]) -> int:
    """The lowest id of the likeliest."""
    return min(range(len(logits)), key=lambda x: (-logits[x], x))


def slow_greedy(logits: Sequence[Sequence[float]], drafted: Sequence[int], max_accept: int) -> tuple[int, int]:
    """One row: the number of accepted drafts, and the token after them."""
    n = 0
    while n < max_accept and drafted[n] == best_of(logits[n]):
        n += 1
    return n, best_of(logits[n])


def slow_draw(weights: Sequence[Fraction], u: Fraction) -> int:
    """Walk along a line of length sum(weights) until the share u of it lies behind."""
    walked, target = Fraction(0), u * sum(weights)
    for token, weight in enumerate(weights):
        walked += weight
        if walked > target:
            return token
    raise AssertionError("u is 1 or more, or all weights are 0")


def slow_sampled(
    p: Sequence[Sequence[float]], q: Sequence[Sequence[float]], drafted: Sequence[int], max_accept: int,
    accept_u: Sequence[float], next_u: Sequence[float],
) -> tuple[int, int]:  # fmt: skip
    """One row, as Leviathan et al. write it (their algorithm 1), in fractions."""
    target, draft = ([[Fraction(x) for x in row] for row in rows] for rows in (p, q))
    for i, x in enumerate(drafted[:max_accept]):
        ratio = target[i][x] / draft[i][x] if draft[i][x] else Fraction(target[i][x] > 0)
        if Fraction(accept_u[i]) >= min(ratio, Fraction(1)):
            residual = [max(a - b, Fraction(0)) for a, b in zip(target[i], draft[i], strict=True)]
            return i, slow_draw(residual if any(residual) else target[i], Fraction(next_u[i]))
    return max_accept, slow_draw(target[max_accept], Fraction(next_u[max_accept]))


def sixteenths(rng: np.random.Generator, *shape: int) -> Tensor:
    """Distributions in sixteenths, many of them 0: fp32 computes with them exactly, and p(x) = u q(x) does happen."""
    weights = rng.dirichlet([0.5] * shape[-1], size=shape[:-1])
    return torch.from_numpy(rng.multinomial(16, weights)).float() / 16


def outcome(result: AcceptResult) -> list[tuple[int, int]]:
    assert result.n_accepted.dtype == result.next_token.dtype == torch.int64
    return list(zip(result.n_accepted.tolist(), result.next_token.tolist(), strict=True))


def unread(x: Tensor, last: Tensor) -> Tensor:
    """NaN past the last index that counts: [B, T, V], [B]."""
    return x.masked_fill((torch.arange(x.shape[1]) > last[:, None])[..., None], float("nan"))


MOST = {"n_rows": (1, 6), "gamma": (0, 5), "vocab_size": (1, 7), "seed": (0, 2**32 - 1)}
SIZES = {name: st.integers(*ends) for name, ends in MOST.items()}


@settings(deadline=None, max_examples=80)
@given(**SIZES)
def test_greedy_verdicts_are_those_of_the_slow_reference(n_rows: int, gamma: int, vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(0, 4, (n_rows, gamma + 1, vocab_size))).float()  # many are equal
    guesses = rng.integers(0, vocab_size, (n_rows, gamma))
    right = logits[:, :gamma].argmax(-1).numpy()
    drafted = torch.from_numpy(np.where(rng.random((n_rows, gamma)) < 0.7, right, guesses))
    max_accept = torch.from_numpy(rng.integers(0, gamma + 1, n_rows))
    expected = [slow_greedy(*row) for row in zip(logits.tolist(), drafted.tolist(), max_accept.tolist(), strict=True)]
    assert outcome(verify_greedy(unread(logits, max_accept), drafted, max_accept)) == expected


@settings(deadline=None, max_examples=80)
@given(**SIZES)
def test_sampled_verdicts_are_those_of_the_slow_reference(n_rows: int, gamma: int, vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = sixteenths(rng, n_rows, gamma + 1, vocab_size), sixteenths(rng, n_rows, gamma, vocab_size)
    q = torch.where(torch.from_numpy(rng.random((n_rows, gamma, 1)) < 0.3), p[:, :gamma], q)
    drafted = torch.from_numpy(rng.integers(0, vocab_size, (n_rows, gamma)))  # q(x) = 0 as well
    max_accept = torch.from_numpy(rng.integers(0, gamma + 1, n_rows))
    accept_u = torch.from_numpy(rng.integers(0, 16, (n_rows, gamma))).float() / 16
    next_u = torch.from_numpy(rng.integers(0, 16, (n_rows, gamma + 1))).float() / 16
    arguments = (p, q, drafted, max_accept, accept_u, next_u)
    expected = [slow_sampled(*row) for row in zip(*(x.tolist() for x in arguments), strict=True)]
    assert outcome(verify_sampled(unread(p, max_accept), unread(q, max_accept - 1), *arguments[2:])) == expected


# ---- what is committed, and planned ----------------------------------------------------------------------------------

VOCAB, HISTORY = 7, 24
Case = tuple[BatchState, Tensor, Tensor, AcceptResult]


@st.composite
def cases(draw: st.DrawFn) -> Case:
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
        state.remaining[slot] = whole(int(alive), gamma + 3)
        state.stop_on_eos[slot] = draw(st.booleans())
        caps.append(whole(0, gamma))  # the engine leaves room for the target's own token; a commit does not rely on it
        accepted.append(whole(0, caps[-1]))
    drafted = torch.tensor([tokens(gamma) for _ in range(n_rows)], dtype=torch.int64).view(n_rows, gamma)
    return state, drafted, torch.tensor(caps), AcceptResult(torch.tensor(accepted), torch.tensor(tokens(n_rows)))


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


def ending() -> Case:
    """Rows that end, by EOS or by what is left, at the last draft that stays or at the token after all; a free slot."""
    state = BatchState.idle(torch.zeros(5, dtype=torch.int64), HISTORY, VOCAB, [6])
    state.active[:4] = state.stop_on_eos[:4] = True
    state.remaining[:4] = torch.tensor([9, 9, 2, 4])
    drafted = torch.tensor([[1, 6, 2], *[[1, 2, 3]] * 3, [6] * 3])
    accepted = AcceptResult(torch.tensor([2, 3, 2, 3, 1]), torch.tensor([5, 6, 5, 5, 5]))
    return state, drafted, torch.tensor([3] * 5), accepted


@settings(max_examples=100, deadline=None)
@example(case=ending())
@given(case=cases())
def test_a_commit_is_that_of_a_loop_over_rows_and_tokens(case: Case) -> None:
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
    state = state_of(2, max_tokens=2)
    state.table.temperature[0] = 1.0
    state.free(0)
    assert state.pending.tolist() == [0, 3] and state.remaining.tolist() == [0, 2]
    assert float(state.table.temperature[0]) == 0.0 and state.active.tolist() == [False, True]
    state.assign(0, [6], SamplingParams(max_tokens=4, ignore_eos=True), seed=9)
    assert state.seq_len.tolist() == [0, 2] and state.pending.tolist() == [6, 3]
    assert state.remaining.tolist() == [4, 2] and state.active.all() and state.stop_on_eos.tolist() == [False, True]


def test_what_a_round_needs_from_the_host_is_taken_from_the_live_requests_alone_but_for_what_is_captured() -> None:
    """Keys in use are averaged over all slots: times are planned by what is read, which falls as rows end."""
    plan = RoundPlan.of({0: 19, 2: 9}, [SamplingParams(temperature=0.5)])
    assert plan.kind == (True, False) and plan.lengths == {0: 19, 2: 9} and (plan.n_keys, plan.mean_keys(4)) == (20, 7)
    plan = RoundPlan.of({2: 9}, ahead=2)
    assert plan.kind == (False, False) and (plan.n_keys, plan.mean_keys(4)) == (12, 3)
    # and one to capture knows nothing of them
    params = [SamplingParams(temperature=0.5, top_k=3)]
    more = {"gamma": 3, "ahead": 2, "number": 7, "follows_a_draft": False, "drafted_at": {0: 5, 2: 9}}
    plan = RoundPlan.of({0: 19, 2: 9}, params, **more)
    assert plan.to_capture(509) == RoundPlan(gamma=3, n_keys=509, kind=Kind(True, True), captured=True)
    assert plan.any_drafted_within(5) and not plan.any_drafted_within(4) and plan.to_capture(509).any_drafted_within(0)


def test_no_tensor_of_rows_takes_the_place_of_another() -> None:
    """Captured rounds know where they are."""
    state = state_of(2)
    for field in ("seq_len", "pending", "active"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, field, torch.zeros(2))
    other = state.ending_at(state.seq_len + 1, state.pending + 1)
    assert state.seq_len.tolist() == [2, 2] and other.seq_len.tolist() == [3, 3] and other.pending.tolist() == [4, 4]
    assert other.history is state.history and other.table is state.table


@pytest.mark.parametrize("ours", [False, True])
def test_the_planner_chooses_by_what_it_is_taught_by(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny_engine(DraftConfig(policy="streaming", gamma="auto"), batch_size=3)
    assert not one.target.bodies.reads_own_keys  # kernels of ours do, see test_cpu_any
    monkeypatch.setattr(Bodies, "reads_own_keys", ours)
    asked, taught, plans = list[int](), list[int](), plans_of(one, monkeypatch)
    drafting_now_and_then(one, [1], timed=False)
    ahead(monkeypatch, one.schedule.planner, "choose", asked.append)
    monkeypatch.setattr(one.schedule.planner, "record", lambda gamma, n_keys, *args, **arm: taught.append(n_keys))
    one.generate([random_ids(200, seed=0), random_ids(7, seed=1)], SamplingParams(max_tokens=9))
    most = [(plan.n_keys, plan.mean_keys(3)) for plan in plans]
    assert asked == taught == [keys[ours] for keys in most] and len(asked) > 3
