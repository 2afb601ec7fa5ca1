"""Shared by the tests of draft policies: engines that draft, plain text to compare with, and tests of losslessness.

Shapes: B slots, T tokens, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.compile import can_compile
from gpt_fast_sd.model import FORMATS, KVCache, Transformer
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.prefill import Prefill
from gpt_fast_sd.sampling import probabilities
from gpt_fast_sd.serving.requests import Completion
from gpt_fast_sd.state import RoundPlan
from gpt_fast_sd.steps import Runner
from tests.helpers import chi_square, random_ids, table_of, tiny_config, tiny_model, whole_text_logits

LENGTHS = [1, 2, 300, 3, 256, 257, 24, 5]  # more prompts than slots; around the edges of chunks
PROMPTS = [random_ids(n, seed=n) for n in LENGTHS]

TOY = tiny_config(vocab_size=5, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=24)
TOY_PROMPT = random_ids(40, vocab_size=5)
N_JOINT = 3  # tokens whose joint distribution is tested

Plant = Callable[[Engine, RoundPlan, Draft], Draft]


def drafting(
    policy: str, *, model: Transformer | None = None, draft_model: Transformer | None = None,
    engine: dict[str, Any] | None = None, **draft: Any,
) -> Engine:  # fmt: skip
    """An eager engine of 4 slots around the tiny model, with that policy."""
    if draft_model is not None:
        draft["draft_model"] = "given"
    wanted: dict[str, Any] = {"batch_size": 4, "max_seq_len": 640, "device": "cpu", "compile": False} | (engine or {})
    config = DraftConfig(policy=policy, **draft)
    return Engine(model or tiny_model(), None, EngineConfig(**wanted), config, draft_model)


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def drafting_now_and_then(one: Engine, gammas: Sequence[int]) -> None:
    """Let rounds take these gammas in turn; 0 is a round without a draft."""
    turns = itertools.cycle(gammas)
    one.schedule.planner.choose = lambda n_keys: next(turns)  # type: ignore[method-assign]


def compiles_once(policy: str, *, n_graphs: int, **draft: Any) -> None:
    """Check that the policy's steps are compiled when the engine warms up, never again, and draft as the eager ones."""
    with warnings.catch_warnings(record=True):
        if not can_compile(torch.device("cpu")):
            pytest.skip("there is no C++ compiler")
    wanted = {"batch_size": 2, "max_seq_len": 1300}
    compiled, eager = (
        drafting(policy, engine=wanted | {"compile": compile}, gamma=4, **draft) for compile in (True, False)
    )
    prompts = [random_ids(n, seed=n) for n in (1, 3, 255, 258, 600, 1240)]
    params = [SamplingParams(max_tokens=n) for n in (30, 2, 12, 5, 7, 60)]
    for one in (compiled, eager):
        drafting_now_and_then(one, [4, 3, 0, 4, 1, 2])
    compiled.warm_up()
    assert compiled.policy is not None and compiled.policy.graphs == n_graphs
    graphs = compiled.schedule.graphs
    got = tokens_of(compiled.generate(prompts, params))
    assert compiled.stats.recompiles == 0
    assert sorted(compiled.stats.rounds_by_gamma) == [0, 1, 2, 3, 4]
    assert got == tokens_of(eager.generate(prompts, params))
    if policy in ("snapkv", "quest", "guided"):  # fp32 sums in another order: a draft may flip where logits nearly tie
        assert abs(compiled.stats.accepted - eager.stats.accepted) <= 0.02 * eager.stats.drafted
    else:
        assert compiled.stats.drafted_by_position == eager.stats.drafted_by_position
        assert compiled.stats.accepted_by_position == eager.stats.accepted_by_position
    compiled.generate(prompts, [SamplingParams(max_tokens=5, temperature=0.5 * i, seed=i) for i in range(len(prompts))])
    assert compiled.stats.recompiles == 0
    assert tokens_of(compiled.generate(prompts, params, speculate=False)) == got
    compiled.generate(prompts, params)
    assert compiled.stats.recompiles == 0
    assert compiled.policy.graphs == n_graphs and compiled.schedule.graphs == graphs


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


def holds_what_a_prefill_gives(one: Engine, runner: Runner, prompts: Sequence[Sequence[int]], unfed: int) -> list[int]:
    """Decode prompts; after every round the draft cache of each live row must hold what a prefill of its text would.

    unfed: tokens at the end of the text that need not be there. Returns how many drafts the rounds accepted.
    """
    accepted = []
    for event in one.stream(prompts, SamplingParams(max_tokens=40)):
        accepted.append(event.accepted)
        placed = ((s, r) for s, r in enumerate(one.schedule.slots) if r and r.index == event.index)
        slot, request = next(placed, (0, None))
        if request is None:
            continue
        text = [*request.prompt, *request.tokens]
        n = len(text) - unfed
        for got, expected in zip(entries(runner.cache, slot, n), prefilled(runner, text[:n]), strict=True):
            # fp32, the same sums in another order
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return accepted


def entries(cache: KVCache, slot: int, n: int) -> list[Tensor]:
    """The first n keys and values of a slot: 2 * L of [K, n, H]."""
    return [x[slot, :, :n] for x in cache.buffers]


# ---- losslessness --------------------------------------------------------------------------------------------------


def exact_joint(model: Transformer, prompt: Sequence[int], params: SamplingParams) -> Tensor:
    """The exact distribution of the N_JOINT tokens that follow prompt: fp64 [V] * N_JOINT, flat."""
    vocab = model.config.vocab_size
    joint = torch.ones(1, dtype=torch.float64)
    for n in range(N_JOINT):
        texts = torch.cartesian_prod(*[torch.arange(vocab)] * n).view(-1, n).tolist() if n else [[]]
        logits = torch.stack([whole_text_logits(model, [*prompt, *text])[-1] for text in texts])  # [V ** n, V]
        p = probabilities(logits, table_of([params] * len(texts), vocab))
        joint = (joint[:, None] * p.double()).flatten()
    return joint


@torch.inference_mode()
def first_tokens(one: Engine, gamma: int, params: SamplingParams, repeats: int, plant: Plant | None = None) -> Tensor:
    """The first N_JOINT tokens that rounds of gamma emit after TOY_PROMPT, of B * repeats seeds: int64 [_, N_JOINT].

    The rounds are the engine's own steps; only that all slots begin again, with new seeds, is done here.
    plant: what to do to each draft before it is judged.
    """
    state, policy, n_slots, start = one.state, one.policy, one.config.batch_size, len(TOY_PROMPT) - 1
    assert policy is not None
    one.warm_up()
    one._prefill.fill(0, TOY_PROMPT[:-1])
    for slot in range(n_slots):
        state.assign(slot, TOY_PROMPT, params, slot)
    policy.host_admit(0, TOY_PROMPT)
    levels: list[Any] = [policy, getattr(policy, "cheap", None)]
    caches = [one.cache, *[level.runner.cache for level in levels if hasattr(level, "runner")]]
    for buffer in (buffer for cache in caches for buffer in cache.buffers):
        buffer[1:] = buffer[:1]  # all slots hold the prompt
    views = [level.view for level in levels if hasattr(level, "view")]
    windows = [view.window_start.clone() for view in views]
    emitted = []
    for repeat in range(repeats):
        state.table.seed.copy_(torch.arange(n_slots) + repeat * n_slots)
        for tensor, value in ((state.seq_len, start), (state.pending, TOY_PROMPT[-1]), (state.remaining, 100)):
            tensor.fill_(value)
        for view, window in zip(views, windows, strict=True):
            view.window_start.copy_(window)
        while int(state.seq_len.min()) < start + N_JOINT:
            plan = RoundPlan.of(dict(enumerate(state.seq_len.tolist())), [params], gamma=gamma)
            draft = policy.propose(state, plan)
            draft = plant(one, plan, draft) if plant else draft
            logits, mass = one.schedule.rounds.feed(
                torch.cat([state.pending[:, None], draft.tokens], 1), plan.n_keys + gamma
            )
            one.schedule.rounds.accept_compiled(state, plan.kind, logits, draft, None)
            policy.device_after_verify(state, mass)
        emitted.append(state.history[:, start + 1 : start + 1 + N_JOINT].clone())
    return torch.cat(emitted)


def plans_of(one: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RoundPlan]:
    """The plan of each round that is launched from now on."""
    plans, launch = list[RoundPlan](), one.schedule.rounds.launch

    def noted(plan: RoundPlan, *args: Any, **kwargs: Any) -> Any:
        plans.append(plan)
        return launch(plan, *args, **kwargs)

    monkeypatch.setattr(one.schedule.rounds, "launch", noted)
    return plans


def misfit(one: Engine, gamma: int, params: SamplingParams, plant: Plant | None = None) -> float:
    """How far the emitted tokens are from the target's exact distribution: above 1 cannot be chance, see chi_square."""
    vocab = one.model.config.vocab_size
    tokens = first_tokens(one, gamma, params, 4096 // one.config.batch_size, plant)
    cell = (tokens * vocab ** torch.arange(N_JOINT - 1, -1, -1)).sum(1)
    counts = torch.bincount(cell, minlength=vocab**N_JOINT)
    return chi_square(counts, exact_joint(one.model, TOY_PROMPT, params) * len(tokens))


def toy_engine(policy: str, *, n_layers: int = 1, **draft: Any) -> Engine:
    """512 slots of a toy target over 5 tokens; where a view of it drafts, it sees 9 entries of the prompt's 40."""
    model, wanted = tiny_model(replace(TOY, n_layers=n_layers)), {"batch_size": 512, "max_seq_len": 64}
    return drafting(policy, model=model, engine=wanted, budget=9, n_sink=1, gamma=4, **draft)


# Bugs that a test of losslessness must find.


def told_the_targets_own(one: Engine, plan: RoundPlan, draft: Draft) -> Draft:
    """q is what the target thinks, not what the tokens were drawn from: nothing is ever rejected."""
    fed = torch.cat([one.state.pending[:, None], draft.tokens], 1)
    logits, _ = one.schedule.rounds.feed(fed, plan.n_keys + plan.gamma)
    return Draft(draft.tokens, one.state.probabilities(logits, plan.kind)[:, : plan.gamma], draft.count, draft.proposer)


def choosing_what_to_show(one: Engine, plan: RoundPlan, draft: Draft) -> Draft:
    """A draft is withheld because of what it is."""
    return Draft(draft.tokens, draft.q, draft.count * (draft.tokens[:, 0] % 2), draft.proposer)
