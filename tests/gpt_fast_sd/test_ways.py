"""A CPU works as CUDA does: its chunks and operators, judging and choosing compiled, rounds by graphs of one gamma.

What Dynamo traces is run as it was traced, without Inductor: so every graph that a GPU would compile is made here, with
real values, in seconds, and is counted.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import gpt_fast_sd.loading.prepare
from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.fast.compile import CompiledStep
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.model import Transformer
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.sampling import Kind
from tests.drafts import POLICIES, draft_of
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.helpers import Patch, few, random_ids, tiny_config, tiny_engine, tiny_model

NAMES = ["off", *POLICIES]
FEW = ("lookup",)  # drafts by no step; the slow run has those of one, and of two models
PROMPTS = [random_ids(n, seed=n) for n in (150, 1, 300, 40)]
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=11, ignore_eos=True, temperature=0.9, seed=3)
FILTERED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4)
MIXED = [GREEDY, SAMPLED, FILTERED, GREEDY]


@pytest.fixture(autouse=True)
def as_on_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(TRAITS, "cpu", replace(TRAITS["cuda"], captures=False))
        references.as_on_cuda(patched)
        patched.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: graph.forward)
        patched.setattr(gpt_fast_sd.loading.prepare, "can_compile", lambda device: True)
        yield


def config_of(name: str, gamma: int | str) -> tuple[DraftConfig, Transformer | None]:
    draft = draft_of(name, gamma)
    return draft, tiny_model(tiny_config(n_layers=1), seed=1) if draft.draft_model else None


def an_engine(name: str, gamma: int | str = "auto", **settings: Any) -> Engine:
    wanted = {"batch_size": 3, "max_seq_len": 400, "compile": True} | settings
    return as_captured(tiny_engine(*config_of(name, gamma), **wanted))


def as_captured(one: Engine) -> Engine:
    one.schedule.rounds.capture = lambda part: part  # as on CUDA, but what would be replayed is run again
    return one


@functools.cache
def plain() -> list[list[int]]:
    return tokens_of(an_engine("off", compile=False).generate(PROMPTS, GREEDY))


@functools.cache
def shared_engine() -> Engine:
    return an_engine("streaming")


@pytest.mark.parametrize("name", few(NAMES, FEW))
def test_every_kind_of_sampling_runs_with_gamma_auto_in_a_bounded_number_of_graphs(name: str) -> None:
    one = shared_engine()
    one.redraft(*config_of(name, "auto"))
    as_captured(one)
    assert tokens_of(one.generate(PROMPTS, GREEDY)) == plain()
    for params in (MIXED, SAMPLED, FILTERED):
        one.generate(PROMPTS, params)
    # three kinds of sampling, none, one or several drafts; drawn by chance or not, by one proposer or two
    assert one.schedule.rounds.accept_compiled.graphs <= 3 * 3 * 3
    assert one.schedule.rounds.decode.graphs == 1 and one.schedule.rounds.verify.graphs <= 2  # with and without mass
    before = one.schedule.graphs
    for params in (GREEDY, SAMPLED, FILTERED, MIXED[::-1]):
        one.generate(PROMPTS, params)
        assert one.stats.recompiles == 0
    assert one.schedule.graphs == before and getattr(one.policy, "_judge", one.schedule.rounds.decode).graphs > 0


AOT = "aot_eager_decomp_partition"  # operators are taken apart as Inductor takes them apart, and then run


def a_draft(gamma: int, *, drawn: bool, by_two: bool) -> Draft:
    """As a hierarchy gives it: what it was drawn from, and by whom, are cut from wider tensors, so strides vary too."""
    tokens = torch.randint(258, (3, gamma))
    q = torch.rand(3, gamma + 4, 258).softmax(-1)[:, :gamma] if drawn else None
    who = torch.ones(3, gamma + 4, dtype=torch.int64)[:, :gamma] if by_two else None
    return Draft(tokens, q, torch.full((3,), gamma), who)


@pytest.mark.parametrize(("sampled", "filtered"), few([(False, False), (True, False), (True, True)], [(True, True)]))
def test_judging_is_one_graph_whatever_is_drafted(sampled: bool, filtered: bool, monkeypatch: Patch) -> None:
    """Reading the value of a size specializes it, and torch then refuses to compile: torch.isin did that."""
    monkeypatch.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: lookup_backend(AOT)(graph, inputs))
    model, draft = tiny_model(tiny_config(n_layers=1, eos_ids=(3, 5, 7))), DraftConfig(policy="streaming", budget=24)
    one = tiny_engine(draft, model=model, batch_size=3, max_seq_len=400, compile=True)
    state, rounds = one.state, one.schedule.rounds
    kind = Kind(sampled, filtered)
    with torch.inference_mode():
        for gamma in (8, 3, 2, 16):
            for slot, params in enumerate((GREEDY, SAMPLED if sampled else GREEDY, FILTERED if filtered else GREEDY)):
                state.assign(slot, [1, 2, 3], params, slot)
            for drawn, by_two in ((False, False), (sampled, True)):
                rounds.accept(torch.randn(3, gamma + 1, 258), a_draft(gamma, drawn=drawn, by_two=by_two), kind)
    assert rounds.accept_compiled.graphs == 2


@pytest.mark.parametrize("kinds", few([[FILTERED], [GREEDY, SAMPLED, FILTERED]], [[FILTERED]]), ids=len)
def test_drafting_less_at_a_text_s_end_is_no_other_graph(kinds: list[SamplingParams]) -> None:
    one = an_engine("streaming", 5)
    one.schedule.rounds.capture = None
    for params in kinds:
        one.generate(PROMPTS, params)
        assert len(one.stats.rounds_by_gamma) > 1
    assert one.schedule.rounds.accept_compiled.graphs <= 9 and one.schedule.rounds.verify.graphs == 1
