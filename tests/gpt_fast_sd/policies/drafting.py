"""Shared by the tests of draft policies: engines that draft, and plain text to compare with.

Shapes: B slots, L layers, K kv heads, T tokens, H head dim.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.model import FORMATS, KVCache, Transformer
from gpt_fast_sd.prefill import Prefill
from gpt_fast_sd.serving.requests import Completion
from gpt_fast_sd.state import RoundPlan
from gpt_fast_sd.steps import Runner
from tests.helpers import ahead, random_ids, tiny_engine, tiny_model

LENGTHS = [1, 2, 300, 3, 256, 257, 24, 5]  # more prompts than slots; around the edges of chunks
PROMPTS = [random_ids(n, seed=n) for n in LENGTHS]


def drafting(
    policy: str, *, model: Transformer | None = None, draft_model: Transformer | None = None,
    engine: dict[str, Any] | None = None, **draft: Any,
) -> Engine:  # fmt: skip
    """An eager engine of 4 slots around the tiny model, with that policy."""
    config = DraftConfig(policy=policy, **({"draft_model": "given"} if draft_model else {}) | draft)
    return tiny_engine(config, draft_model, model=model, **{"batch_size": 4, "max_seq_len": 640} | (engine or {}))


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def drafting_now_and_then(one: Engine, gammas: Sequence[int], *, timed: bool = True) -> None:
    """Let rounds take these gammas in turn; 0 is a round without a draft. timed: whether a warm-up times steps."""
    turns, planner = itertools.cycle(gammas), one.schedule.planner
    planner.choose = lambda n_keys: next(turns)  # type: ignore[method-assign]
    if not timed:
        planner.calibrate = lambda *args, **kwargs: None  # type: ignore[method-assign]


def nearly(model: Transformer, *, by: float, seed: int = 1) -> Transformer:
    """A tiny model of the same shape with each weight moved by about `by` of its size: it drafts well."""
    other = tiny_model(model.config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            noise = torch.randn(theirs.shape, generator=generator)
            mine.copy_(theirs + by * theirs.std() * noise if theirs.dim() > 1 else theirs)
    return other


def prefilled(runner: Runner, text: Sequence[int]) -> list[Tensor]:
    """Keys and values of a text, prefilled into a cache of its own: 2 * L of [K, T, H]."""
    cache = KVCache(runner.model.config, 1, runner.cache.max_seq_len, format=FORMATS["fp32"], device=runner.device)
    Prefill(Runner(runner.model, cache)).fill(0, text)
    return [x[0, :, : len(text)] for x in cache.buffers]


def holds_a_prefill(one: Engine, runner: Runner, prompts: Sequence[Sequence[int]], lag: int) -> list[int]:
    """Decode prompts; after every round the draft cache of each live row must hold what a prefill of its text would.

    lag: tokens at the end of the text that need not be there. Returns how many drafts the rounds accepted.
    """
    accepted = []
    for event in one.stream(prompts, SamplingParams(max_tokens=40)):
        accepted.append(event.accepted)
        placed = ((s, r) for s, r in enumerate(one.schedule.slots) if r and r.index == event.index)
        slot, request = next(placed, (0, None))
        if request is None:
            continue
        text = [*request.prompt, *request.tokens]
        n = len(text) - lag
        for got, expected in zip(entries(runner.cache, slot, n), prefilled(runner, text[:n]), strict=True):
            # fp32, the same sums in another order
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return accepted


def entries(cache: KVCache, slot: int, n: int) -> list[Tensor]:
    """The first n keys and values of a slot: 2 * L of [K, n, H]."""
    return [x[slot, :, :n] for x in cache.buffers]


def plans_of(one: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RoundPlan]:
    """The plan of each round that is launched from now on."""
    plans = list[RoundPlan]()
    ahead(monkeypatch, one.schedule.rounds, "launch", lambda plan, *_, **how: plans.append(plan))
    return plans
