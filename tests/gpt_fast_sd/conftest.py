"""Fixtures of the tests of the engine: what compiles and captures, or stands in for it, and how many threads are."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gpt_fast_sd.fast.compile import CompiledStep, can_compile
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.serving.cuda_graphs import GraphPool
from tests.gpuless.pools import RULES, Cuda, stand_in


@pytest.fixture(scope="session")
def a_compiler() -> None:
    """Skips the test where Inductor finds no C++ compiler."""
    with warnings.catch_warnings(record=True):
        if not can_compile(torch.device("cpu")):
            pytest.skip("there is no C++ compiler")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Compiled steps run what Inductor would be given, as it was traced; these graphs."""
    graphs = list[torch.fx.GraphModule]()
    monkeypatch.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: graphs.append(graph) or graph)
    return graphs


@pytest.fixture
def rule() -> str:
    """The version of torch by whose rules memory of captures lives."""
    return RULES[-1]


@pytest.fixture
def cuda(rule: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Engines on the CPU capture."""
    gc.collect()
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], captures=True))
    monkeypatch.setattr(GraphPool, "_alive", weakref.WeakSet())  # no other test's engine holds streams here
    with stand_in(rule) as cuda:
        yield cuda


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """Tests that vary the number of threads leave it as it was."""
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)
