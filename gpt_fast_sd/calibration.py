"""What steps cost on this machine, on the cache as it is: measured once, before the first request.

Shapes: B slots.
"""

from __future__ import annotations

import time

import torch

from .config import MAX_GAMMA
from .scheduling import Schedule


def time_steps(at: Schedule, gamma: int, n_keys: int) -> tuple[float, float]:
    """Seconds of one draft step and of the target's step over gamma drafts, n_keys in view: the best of three.

    Drafting is timed for the highest tier alone.
    """
    rows, rounds, policy, seconds = at.rows, at.rounds, at.policy, []
    assert policy
    fed = slice(n_keys - gamma - 1, n_keys + MAX_GAMMA)
    held = [(buffer, buffer[:, :, fed].clone()) for buffer in at.cache.buffers]
    try:
        rows.seq_len.fill_(fed.start)
        rows.active.fill_(True)
        rows.n_keys = n_keys - gamma
        tokens = torch.zeros(len(at.slots), gamma + 1, dtype=torch.int64, device=rows.seq_len.device)
        # once each before they are timed, since a first call may compile
        highest = gamma == at.planner.tiers[-1]
        propose = rounds.runner(lambda: policy.propose(rows, gamma)) if highest else lambda: None
        verify = rounds.runner(lambda: rounds.feed(tokens, n_keys))
        for _ in range(3):
            started = time.perf_counter()
            propose()
            rounds.synchronize()
            drafted = time.perf_counter()
            verify()
            rounds.synchronize()
            seconds.append(((drafted - started) / max(1, gamma), time.perf_counter() - drafted))
    finally:
        for buffer, before in held:  # slots keep the prompts that they hold
            buffer[:, :, fed] = before
        for slot in range(len(at.slots)):
            at.release(slot)
    return min(s for s, _ in seconds), min(s for _, s in seconds)


def time_selecting(at: Schedule, n_keys: int) -> float:
    """Seconds of selecting anew for a token that every row emits, rows of n_keys: the best of three."""
    rows, rounds, policy, seconds = at.rows, at.rounds, at.policy, []
    assert policy
    slots = range(len(at.slots))
    try:
        rows.seq_len.fill_(n_keys - 1)
        rows.active.fill_(True)
        for _ in range(4):  # the first one may compile
            for slot in slots:
                policy.host_free(slot)
            rows.look(dict.fromkeys(slots, n_keys - 1), [])
            rounds.synchronize()
            started = time.perf_counter()
            rounds.refresh()
            rounds.synchronize()
            seconds.append(time.perf_counter() - started)
    finally:
        for slot in slots:
            at.release(slot)
    return min(seconds) / policy.refresh_every
