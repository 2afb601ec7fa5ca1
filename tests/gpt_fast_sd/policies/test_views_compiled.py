"""Compiled draft steps and selections: one graph each, whatever the lengths, and the tokens of plain decoding."""

from __future__ import annotations

import warnings

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.compile import can_compile
from gpt_fast_sd.prefill import prefill_step
from gpt_fast_sd.round import decode_step
from gpt_fast_sd.steps import Step
from tests.helpers import random_ids, tiny_config, tiny_model

PROMPTS = [random_ids(n, seed=n) for n in (1, 40, 200, 290, 600, 1100)]
PARAMS = [SamplingParams(max_tokens=n) for n in (60, 10, 150, 30, 40, 25)]
GRAPHS = {"snapkv": 2, "quest": 1, "guided": 1}  # the draft step, and what selecting needs


@pytest.fixture(scope="module", autouse=True)
def a_compiler() -> None:
    with warnings.catch_warnings(record=True):
        if not can_compile(torch.device("cpu")):
            pytest.skip("there is no C++ compiler")


def engine(name: str, budget: int, *, compile: bool) -> Engine:
    """Only what drafts is compiled, to save time; guided's verification is, as it sums the mass."""
    config = EngineConfig(batch_size=3, max_seq_len=1200, device="cpu", dtype="fp32", compile=compile)
    draft = DraftConfig(policy=name, budget=budget, gamma=3)
    one = Engine(tiny_model(tiny_config(n_layers=1)), None, config, draft)
    one.schedule.rounds.decode = Step(decode_step)
    one._prefill._step = Step(prefill_step)
    if name != "guided":
        one.schedule.rounds.verify = one.schedule.rounds.decode
    return one


@pytest.mark.slow  # test_ways, test_int8_cache and test_planes trace such steps, and count graphs, without Inductor
@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_drafts_are_as_good_as_eager_ones_and_change_no_token(name: str) -> None:
    one, eager = engine(name, 80, compile=True), engine(name, 80, compile=False)
    got, stats = one.generate(PROMPTS, PARAMS), one.stats
    assert stats.recompiles == 0
    assert one.policy is not None and one.policy.graphs == GRAPHS[name]
    assert [c.tokens for c in got] == [c.tokens for c in one.generate(PROMPTS, PARAMS, speculate=False)]
    eager.generate(PROMPTS, PARAMS)
    # fp32 sums in another order: a draft may flip where logits nearly tie
    assert abs(stats.accepted - eager.stats.accepted) <= 0.02 * eager.stats.drafted
    whole = [i for i, prompt in enumerate(PROMPTS) if len(prompt) + PARAMS[i].max_tokens <= 80]
    assert [got[i].stats.acceptance_rate for i in whole] == [1.0] * len(whole) and len(whole) == 2
