"""Fixtures of the tests of the engine: what compiles, or stands in for it, and how many threads there are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from gpt_fast_sd.fast.compile import CompiledStep, can_compile


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


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """Tests that vary the number of threads leave it as it was."""
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)
