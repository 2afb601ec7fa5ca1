"""A CPU goes the ways of CUDA: its chunks and operators, judging and choosing compiled, rounds by graphs of one gamma.

What Dynamo traces is run as it was traced, without Inductor: so every graph that a GPU would compile is made here, with
real values, in seconds, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, engine as engine_module
from gpt_fast_sd.compiling import CompiledStep
from gpt_fast_sd.devices import WAYS
from tests.helpers import random_ids, tiny_config, tiny_model

POLICIES: dict[str, dict[str, Any]] = {
    "off": {},
    "full": {},
    "streaming": {"budget": 24},
    "snapkv": {"budget": 64, "refresh": 8},
    "quest": {"budget": 48},
    "guided": {"budget": 48},
    "standalone": {"budget": 24},
    "early_exit": {"budget": 24},
    "lookup": {"ngram": 2},
    "hierarchy": {"budget": 24},
    "hierarchy over standalone": {"policy": "hierarchy", "budget": 24, "cheap": "standalone"},
}
PROMPTS = [random_ids(n, seed=n) for n in (150, 1, 300, 40)]
KINDS = {
    "greedy": SamplingParams(max_tokens=9, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=11, ignore_eos=True, temperature=0.9, seed=3),
    "filtered": SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4),
}


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(WAYS, "cpu", replace(WAYS["cuda"], captures=False))
    monkeypatch.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: graph.forward)
    monkeypatch.setattr(engine_module, "can_compile", lambda device: True)
    yield
    torch._dynamo.reset()


def an_engine(name: str, gamma: int | str = "auto", *, max_seq_len: int = 400, **settings: Any) -> Engine:
    draft = {"policy": name, "gamma": gamma} | POLICIES[name]
    needs_model = draft["policy"] == "standalone" or draft.get("cheap") == "standalone"
    config = EngineConfig(**{"batch_size": 3, "max_seq_len": max_seq_len, "device": "cpu", "dtype": "fp32"} | settings)
    one = Engine(
        tiny_model(), None, config, DraftConfig(**draft, draft_model="given" if needs_model else None),
        tiny_model(tiny_config(n_layers=1), seed=1) if needs_model else None,
    )  # fmt: skip
    one.rounds.capture = lambda part: part  # as on CUDA, but what would be replayed is run again
    return one


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def plain(params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return tokens(an_engine("off", compile=False).generate(PROMPTS, params))


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_sampling_runs_with_gamma_auto_in_a_bounded_number_of_graphs(name: str) -> None:
    one = an_engine(name)
    assert tokens(one.generate(PROMPTS, KINDS["greedy"])) == plain(KINDS["greedy"])
    mixed = [list(KINDS.values())[i % 3] for i in range(len(PROMPTS))]
    for params in (KINDS["sampled"], KINDS["filtered"], mixed):
        one.generate(PROMPTS, params)
    assert one.rounds.judge.graphs <= 9  # three kinds of sampling; no draft, one draft, several
    assert one.rounds.decode.graphs == 1 and one.rounds.verify.graphs <= 1
    before = one._graphs
    for params in (*KINDS.values(), mixed):
        one.generate(PROMPTS, params)
        assert one.stats.recompiles == 0
    assert one._graphs == before


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 6, 8, 16])
def test_each_gamma_runs_alone(gamma: int) -> None:
    one = an_engine("guided", gamma)
    assert tokens(one.generate(PROMPTS, KINDS["greedy"])) == plain(KINDS["greedy"])
    one.generate(PROMPTS, KINDS["filtered"])
    assert one.rounds.verify.graphs == 1 and one.rounds.judge.graphs <= 4


def test_a_sweep_over_gammas_policies_and_pages_adds_no_graph_of_the_target_but_one_a_page() -> None:
    one = an_engine("streaming", 1)
    for policy, budget, pages in (("streaming", 24, (16,)), ("guided", 100, (16, 32)), ("snapkv", 64, (16,))):
        for page in pages:
            for gamma in (1, 2, 3, 4, 6, 8):
                one.redraft(DraftConfig(policy=policy, budget=budget, gamma=gamma, page=page))
                one.rounds.capture = lambda part: part
                assert tokens(one.generate(PROMPTS[:2], KINDS["greedy"])) == plain(KINDS["greedy"])[:2], (policy, gamma)
    assert one.rounds.decode.graphs == 1
    assert one.rounds.verify.graphs == 3  # without mass, and with it by pages of 16 and of 32 keys


@pytest.mark.parametrize("name", ["streaming", "guided", "lookup"])
def test_rounds_that_are_not_captured_shorten_their_drafts_at_a_text_s_end(name: str) -> None:
    one = an_engine(name, 5)
    one.rounds.capture = None
    for params in (KINDS["greedy"], KINDS["sampled"], KINDS["filtered"]):
        one.generate(PROMPTS, params)
    assert set(one.stats.rounds_by_gamma) >= {0, 5}
    assert one.rounds.judge.graphs <= 9
