"""Done once, before the first request: steps are compiled, and timed on this machine, on the cache as it is.

Shapes: B slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from gpt_fast_sd.model import SPLIT

from ..config import MAX_GAMMA
from ..sampling import GREEDY
from ..state import RoundPlan
from .draft_planner import DraftPlanner
from .scheduling import Schedule

LONG = 0.1  # seconds of a step that noise changes little
SHORT = 0.01  # seconds of a step that is timed more often


def warm_up(at: Schedule) -> float:
    """Compile all steps, and time them for the planner; every slot is free afterwards -> seconds taken."""
    started, policy, rounds = time.perf_counter(), at.policy, at.rounds
    parts: list[Callable[[], object]] = [at.prefill.warm_up]
    if policy:
        parts.append(policy.warm_up)
    few, many = 2 * SPLIT, at.cache.capacity
    if isinstance(at.planner, DraftPlanner):
        parts += [partial(rounds.warm_up, [0], [GREEDY]), partial(find_arms, at, few, many)]
    else:
        parts += [partial(rounds.warm_up, [gamma], [GREEDY]) for gamma in at.gammas]
        if policy:
            selecting = partial(time_selecting, at) if policy.refresh_every else None
            timed = partial(at.planner.calibrate, partial(time_steps, at), few, many)
            parts.append(partial(timed, selecting, getattr(policy, "n_steps", None)))
    what = "warm up" if not rounds.target.backend.compiles else "compile"
    for done, part in enumerate(parts):
        at.tell(what, done, len(parts))
        part()
    at.tell(what, len(parts), len(parts))
    for slot in range(len(at.slots)):
        at.release(slot)
    return time.perf_counter() - started


def find_arms(at: Schedule, few: int, many: int) -> None:
    """Time the target's steps, then make and time the arms that may pay beside them."""
    planner, policy = at.planner, at.policy
    assert isinstance(planner, DraftPlanner) and policy

    def verifying(gamma: int, n_keys: int) -> float:
        return time_steps(at, gamma, n_keys, drafts=False)[1]

    planner.time_target(verifying, few, many)
    summing: list[int] = []
    wanted = at.parallel.same(sum(1 << arm for arm in planner.promising(few, many)))  # each process has its own clock
    for arm in (i for i in range(len(planner.arms)) if wanted >> i & 1):
        drafter = policy.use(arm)
        drafter.warm_up()
        at.rounds.warm_up(at.gammas, [GREEDY])
        summing += [arm] if drafter.wants_mass else []
        if summing == [arm]:  # the first of them: the target's steps are the same for all
            like = [i for i, one in enumerate(planner.arms) if one.view == planner.arms[arm].view]
            planner.time_target(verifying, few, many, like)
        planner.time_arm(
            arm, lambda gamma: time_steps(at, gamma, many, verifies=False)[0], lambda: verifying(0, many), many,
            steps=drafter.n_steps,
        )  # fmt: skip


def time_steps(
    at: Schedule, gamma: int, n_keys: int, *, drafts: bool = True, verifies: bool = True
) -> tuple[float, float]:
    """Seconds of one draft step and of the target's step over gamma drafts, n_keys in view: the best of a few.

    Of three, but in one process one where it takes LONG and twelve where it is SHORT. drafts, verifies: what is timed.

    Drafting is timed for one token and for the highest tier.
    """
    state, rounds, policy, seconds = at.state, at.rounds, at.policy, list[tuple[float, float]]()
    assert policy
    plan = RoundPlan(gamma=gamma, n_keys=n_keys - gamma, captured=rounds.capture is not None)
    fed = slice(n_keys - gamma - 1, n_keys + MAX_GAMMA)
    held = [(buffer, buffer[:, :, fed].clone()) for buffer in at.cache.buffers]
    try:
        state.seq_len.fill_(fed.start)
        state.active.fill_(True)
        tokens = torch.zeros(len(at.slots), gamma + 1, dtype=torch.int64, device=state.seq_len.device)
        # once each before they are timed, since a first call may compile
        timed = drafts and gamma in (at.planner.tiers[1], at.planner.tiers[-1])
        propose = rounds.prepared(lambda: policy.propose(state, plan)) if timed else lambda: None
        verify = rounds.prepared(lambda: rounds.feed(tokens, n_keys)) if verifies else lambda: None
        # ranks do the same, each by its clock
        most, least = 3, math.inf
        while len(seconds) < most:
            started = time.perf_counter()
            propose()
            rounds.synchronize()
            drafted = time.perf_counter()
            verify()
            rounds.synchronize()
            seconds.append(((drafted - started) / max(1, gamma), time.perf_counter() - drafted))
            least = min(least, time.perf_counter() - started)
            if at.parallel.tp == 1:
                most = 12 if least < SHORT else 3 if least < LONG else 1
    finally:
        for buffer, before in held:  # slots keep their prompts
            buffer[:, :, fed] = before
        for slot in range(len(at.slots)):
            at.release(slot)
    return min(s for s, _ in seconds), min(s for _, s in seconds)


def time_selecting(at: Schedule, n_keys: int) -> float:
    """Seconds of refreshing selections per token that every row emits, rows of n_keys: the best of three."""
    state, rounds, policy, seconds = at.state, at.rounds, at.policy, []
    assert policy
    slots = range(len(at.slots))
    plan = RoundPlan.of(dict.fromkeys(slots, n_keys - 1))
    try:
        state.seq_len.fill_(n_keys - 1)
        state.active.fill_(True)
        for _ in range(4):  # the first one may compile
            for slot in slots:
                policy.host_free(slot)
            rounds.synchronize()
            started = time.perf_counter()
            rounds.refresh(plan)
            rounds.synchronize()
            seconds.append(time.perf_counter() - started)
    finally:
        for slot in slots:
            at.release(slot)
    return min(seconds) / policy.refresh_every
