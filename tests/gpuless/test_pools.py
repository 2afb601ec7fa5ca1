"""The stand-in for torch.cuda's graphs keeps the rules that it is there for: each is broken here once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpuless.pools import RULES, Corrupted, Graph, Hang, stand_in


def captured(part: Callable[[], Any], pool: Any = None, stream: Any = None) -> Graph:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        part()
    return graph  # type: ignore[no-any-return]


def product() -> Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_pool_is_not_captured_into_again_while_a_result_or_workspace_lives(rule: str) -> None:
    kept = []
    with stand_in(rule):
        for part in (product, lambda: kept.append(torch.zeros(2) + 1)):
            pool = torch.cuda.graph_pool_handle()
            graph = captured(part, pool)
            del graph
            if kept or rule == "2.11":
                with pytest.raises(RuntimeError, match="use_count > 0 INTERNAL ASSERT"):
                    captured(product, pool)
            kept.clear()
            if part is not product or rule != "2.11":  # whose workspaces outlive their graphs
                captured(product, pool)


def test_a_graph_that_goes_takes_the_workspace_of_its_stream_along() -> None:
    with stand_in("2.13"):
        own = torch.cuda.Stream()
        one, other, apart = captured(product), captured(product), captured(product, stream=own)
        idle = captured(lambda: torch.zeros(2))
        one.reset()
        with pytest.raises(Corrupted):
            other.replay()
        apart.replay()
        idle.replay()  # no product, no workspace
    with stand_in("2.11"):
        one, other = captured(product), captured(product)
        one.reset()
        other.replay()


@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_processes_hangs_while_a_graph_lives(rule: str) -> None:
    with stand_in(rule):
        graph = captured(product)
        with pytest.raises(Hang):
            torch.distributed.destroy_process_group()
        graph.reset()
        torch.distributed.destroy_process_group()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()


def test_what_is_copied_to_the_host_is_there_when_its_event_has_come() -> None:
    with stand_in("2.13"):
        x, place = torch.arange(4), torch.empty(6, dtype=torch.int64, pin_memory=True)
        part, event = place[:4], torch.cuda.Event()
        part.copy_(x, non_blocking=True)
        event.record()
        x.zero_()
        assert part.tolist() == [-1] * 4
        event.synchronize()
        assert part.tolist() == [0, 1, 2, 3]
