"""CUDA graphs of whole rounds: in which memory and on which stream they are captured, and when they may be freed.

A captured matrix product contains the address of a cuBLAS workspace. torch keeps one workspace per stream, and takes
it from the graphs' pool if the first product on that stream is a captured one. Three rules follow:

- A pool whose graphs are all freed must not be used again: where the workspace outlives them (torch 2.11) the allocator
  refuses. So every pool has one graph that stays.
- Where freeing a graph frees its stream's workspace (torch 2.12, 2.13), all others captured on that stream are invalid.
  So every pool has its own streams, and its graphs are freed together or not at all.
- An NCCL process group does not end while a graph exists in which its collectives were captured: see Engine.close.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from gpt_fast_sd.model import SPLIT, KVCache

from .. import registry
from ..config import MAX_GAMMA, DraftConfig, gamma_tiers

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Result = TypeVar("Result")
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]

# Steps, of target and draft, in all the rounds held at a time: each is some hundred launches, and a graph's share of
# the driver's memory grows with its launches, so steps are what a plan can budget for (see MemoryPlan). Enough for the
# longest rounds in all three kinds of sampling, or for three tiers of gamma "auto", over one view: when a batch grows
# into the next doubling of the view, graphs of the one before are useless. Every tier, kind and view of 128K tokens
# would be sixteen times as many. A hierarchy has up to 33 steps per round, and "auto" in several kinds also needs more
# than these: if a batch then alternates between kinds, rounds are captured again, which costs only time.
KINDS = 3
MOST_STEPS = KINDS * (1 + MAX_GAMMA)
REFRESH_STEPS = 2  # what a refreshing pass counts for: it launches more than a step does
N_STREAMS = 32  # torch has this many streams per device, and hands them out cyclically


def steps_of(draft: DraftConfig, gamma: int) -> int:
    """The most steps of a round that drafts gamma tokens, the target's own included."""
    drafting: int = registry.policy_class(draft.policy).steps(gamma)
    return drafting + 1


def steps_held(max_seq_len: int, draft: DraftConfig, group: int) -> int:
    """The most steps of captured rounds that are held: MOST_STEPS, or all that exist.

    group: query heads per kv head of the target.
    """
    gammas = [0] if draft.policy == "off" else gamma_tiers(group) if isinstance(draft.gamma, str) else [0, draft.gamma]
    views = max(1, (KVCache.splits(max_seq_len) - 1).bit_length())  # doublings of two splits, see doubling
    there_are = KINDS * sum(steps_of(draft, gamma) for gamma in gammas)
    there_are += REFRESH_STEPS if draft.view_name and registry.view_class(draft.view_name).n_observed else 0
    return min(MOST_STEPS, views * there_are)


def doubling(n_keys: int, capacity: int) -> int:
    """Keys in view of the smallest captured round that covers n_keys."""
    in_view = 2 * SPLIT
    while in_view < n_keys:
        in_view *= 2
    return min(in_view, capacity)


class GraphPool:
    """Captures on CUDA; the graphs share one memory pool, as they never run at the same time.

    Memory that a part frees while it is captured returns to the pool, for the next capture; so the pool is as large as
    the largest part, plus the results of each graph. While a graph exists the pool returns no memory: uncaptured work
    needs memory besides.
    """

    _alive: ClassVar[weakref.WeakSet[GraphPool]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        """A pool and its two streams on a device; RuntimeError if other pools have all the streams."""
        taken = {stream.cuda_stream for pool in self._alive for stream in (pool._stream, pool._passing_stream)}
        self._stream: torch.cuda.Stream = _stream_of_its_own(device, taken)
        self._passing_stream: torch.cuda.Stream = _stream_of_its_own(device, taken)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._alive.add(self)
        torch.zeros(1, device=device)  # loads its kernel, which a capture must not do
        self._anchor, _ = _captured(lambda: torch.zeros(1, device=device), self._stream, self._pool)

    def __call__(self, part: Callable[[], Result]) -> Callable[[], Result]:
        """Capture part as one CUDA graph -> a function that replays it and returns the tensors of its results.

        If part cannot be captured, all graphs of this pool are freed.
        """
        assert self in self._alive, "the pool is closed"
        try:
            graph, result = _captured(part, self._stream, self._pool)
        except BaseException:
            self.clear()
            raise
        self._graphs.append(graph)
        return _replaying(graph, result)

    def passing(self, part: Callable[[], Result]) -> Callable[[], Result]:
        """The same for a graph that is freed while others stay, in its own memory. Two of them are freed together."""
        return _replaying(*_captured(part, self._passing_stream, None))

    def clear(self) -> None:
        """Free all graphs, none of which may be running; the pool can be captured into again."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def close(self) -> None:
        """Free all graphs for good."""
        try:
            self.clear()
        finally:
            self._alive.discard(self)
            self._anchor.reset()


def _captured(
    part: Callable[[], Result], stream: torch.cuda.Stream, pool: _POOL_HANDLE | None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture part on a stream, into a pool or (None) into one of its own."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.stream(torch.cuda.current_stream(stream.device))
    # other threads, such as NCCL's watchdog, may continue to call CUDA
    capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    try:
        with before, capturing:  # a capture that cannot be ended would leave its stream as the current one
            result = part()
    except BaseException:
        graph.reset()  # now, and not when the traceback is freed
        raise
    return graph, result


def _replaying(graph: torch.cuda.CUDAGraph, result: Result) -> Callable[[], Result]:
    def replay() -> Result:
        graph.replay()
        return result

    return replay


def _stream_of_its_own(device: torch.device, taken: set[int]) -> torch.cuda.Stream:
    """A stream that is not in use; it is added to those in use."""
    for _ in range(N_STREAMS):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken:
            taken.add(stream.cuda_stream)
            return stream
    raise RuntimeError(f"all {N_STREAMS} CUDA streams of {device} belong to other engines: close one of them")
