"""Whatever is drafted, text follows the target's law: rounds of every policy against the exact distribution.

Shapes: B slots, V vocabulary, gamma tokens drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.model import Transformer
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.sampling import probabilities
from gpt_fast_sd.state import RoundPlan
from tests.gpt_fast_sd.policies.drafting import drafting, nearly
from tests.helpers import chi_square, few, random_ids, table_of, tiny_config, tiny_model, whole_text_logits

TOY = tiny_config(vocab_size=5, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=24)
TOY_PROMPT = random_ids(40, vocab_size=5)
N_JOINT = 3  # tokens whose joint distribution is tested

Plant = Callable[[Engine, RoundPlan, Draft], Draft]


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
            judged = torch.cat([state.pending[:, None], draft.tokens], 1)
            logits, mass = one.schedule.rounds.feed(judged, plan.n_keys + gamma)
            one.schedule.rounds.accept_compiled(state, plan.kind, logits, draft, None)
            policy.device_after_verify(state, mass)
        emitted.append(state.history[:, start + 1 : start + 1 + N_JOINT].clone())
    return torch.cat(emitted)


# Bugs that must be found.


def told_the_targets_own(one: Engine, plan: RoundPlan, draft: Draft) -> Draft:
    """q is what the target thinks, not what the tokens were drawn from: nothing is ever rejected."""
    fed = torch.cat([one.state.pending[:, None], draft.tokens], 1)
    logits, _ = one.schedule.rounds.feed(fed, plan.n_keys + plan.gamma)
    return Draft(draft.tokens, one.state.probabilities(logits, plan.kind)[:, : plan.gamma], draft.count, draft.proposer)


def choosing_what_to_show(one: Engine, plan: RoundPlan, draft: Draft) -> Draft:
    """A draft is withheld because of what it is."""
    return Draft(draft.tokens, draft.q, draft.count * (draft.tokens[:, 0] % 2), draft.proposer)


SAMPLED, NARROW = SamplingParams(temperature=1.0), SamplingParams(temperature=1.3, top_p=0.8)
NEAR: dict[str, Any] = {"draft_model": nearly(tiny_model(TOY), by=0.3)}
OVER = {"cheap": "standalone"} | NEAR
CASES: list[tuple[str, int, dict[str, Any], int, SamplingParams, Plant | None]] = [
    ("lookup", 1, {}, 4, SAMPLED, None), ("lookup", 1, {}, 4, SAMPLED, told_the_targets_own),
    ("standalone", 1, NEAR, 4, SAMPLED, None), ("hierarchy", 1, OVER, 4, SAMPLED, None),
    # the slow ones
    ("hierarchy", 1, {}, 4, SAMPLED, choosing_what_to_show), ("early_exit", 2, {}, 4, SAMPLED, None),
    ("standalone", 1, NEAR, 4, SAMPLED, told_the_targets_own), ("hierarchy", 1, {}, 4, SAMPLED, None),
    ("hierarchy", 1, {}, 5, NARROW, None), ("hierarchy", 1, {}, 4, SAMPLED, told_the_targets_own),
    ("hierarchy", 1, OVER, 4, SAMPLED, told_the_targets_own),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "n_layers", "draft", "gamma", "params", "plant"), few(CASES, CASES[:4]))
def test_sampled_tokens_follow_the_target_exactly_and_a_bug_would_be_found(
    policy: str, n_layers: int, draft: dict[str, Any], gamma: int, params: SamplingParams, plant: Plant | None
) -> None:
    """Above 1 it cannot be chance, see chi_square. Where a view drafts, it sees 9 entries of the prompt's 40.

    Where there are two layers these have a window of 5 tokens: a draft, too, sees no more.
    """
    config = replace(TOY, n_layers=n_layers, sliding_window=5 if n_layers == 2 else None)
    model, wanted = tiny_model(config), {"batch_size": 512, "max_seq_len": 64}
    one = drafting(policy, model=model, engine=wanted, budget=9, n_sink=1, gamma=4, **draft)
    tokens = first_tokens(one, gamma, params, 4096 // 512, plant)
    cell = (tokens * 5 ** torch.arange(N_JOINT - 1, -1, -1)).sum(1)
    expected = exact_joint(model, TOY_PROMPT, params) * len(tokens)
    assert (chi_square(cell.bincount(minlength=5**N_JOINT), expected) > 1) == (plant is not None)
