"""torch.cuda's graphs, streams and events over CPU tensors, with CUDA's rules on how long memory lives.

`with stand_in("2.13") as cuda:` an engine on the CPU captures and replays as on CUDA: torch's own `torch.cuda.graph` is
entered, what it calls is here, and operators are recorded and run again with real values (tests.gpuless.recorder).

The rules, as read in torch's sources and, for reset, in the binaries of 2.11 and 2.12:

- The first matrix product that is captured on a stream takes the stream's cuBLAS workspace from the graph's pool.
- "2.11": the workspace stays when graphs are freed. "2.13" (and 2.12): freeing a graph frees its stream's workspace,
  whatever else captured it.
- A pool that no graph uses any more, while something in it lives, can never be captured into again.
- 32 streams are handed out cyclically.
- Copies into pinned memory arrive when something waits for an event after them, or for the device.
- NCCL's process group does not end while a graph lives that was captured since it began.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils._device
from torch import Tensor

from tests.gpuless.recorder import Recording

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot}
RULES = ("2.11", "2.13")


class Corrupted(AssertionError):
    """A graph was replayed whose memory is no longer its own."""


class Hang(AssertionError):
    """The process would wait forever."""


class Workspace:
    """What a stream's products work in, from the pool of the graph that took it first."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self.pool, self.freed = pool, False


class Pool:
    """Memory of graphs: how many use it, or use it as they could not be ended, and what was made in those that went."""

    def __init__(self) -> None:
        self.users = 0
        self.made: list[weakref.ref[Tensor]] = []


class Cuda:
    """What there is of CUDA."""

    def __init__(self, rule: str) -> None:
        assert rule in RULES
        self.takes_workspace_along = rule != "2.11"
        self._numbers, self._streams = itertools.count(1), itertools.cycle(range(1, 33))
        self.current = Stream(self, 0)
        self.pools: dict[tuple[int, int], Pool] = {}
        self.workspaces: dict[int, Workspace] = {}
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()  # those that were captured, and not reset
        self.captures: list[dict[str, Any]] = []  # stream, pool and mode of each, and what a capture should not meet
        self.landing: list[tuple[Tensor, Tensor]] = []  # copies on their way to the host
        self.events: list[str] = []
        self.waits: list[tuple[int, int]] = []  # a stream for another
        self.slow = 0.0  # seconds that a capture takes, by the clock
        self.work = 0.0  # seconds that the device takes for each replay, while the host goes on
        self.free_at = 0.0  # when the device will have finished what it was given
        self.handles = 0  # times that a cuBLAS handle was asked for, outside of any capture
        self.capturing = False
        self.clock = 0.0  # seconds that the clock is ahead, so that no test has to wait
        self.dead: Exception | None = None  # what every call raises from now on
        self._faults: dict[str, Exception] = {}

    # ---------------------------------------------------------------- for tests

    def fail(self, at: str, error: Exception, *, dead: bool = False) -> None:
        """Raise the error at the next "capture", "end", "replay", "wait" or "synchronize"; dead: and ever after."""
        self._faults[at] = error
        self._kills = dead

    def reach(self, at: str) -> None:
        """Raise the error that was planned for this place."""
        if at in self._faults:
            error = self._faults.pop(at)
            self.dead = error if self._kills else None
            raise error
        if self.dead and at in ("capture", "replay", "wait", "synchronize"):
            raise self.dead

    # ---------------------------------------------------------------- torch.cuda

    def stream_of_pool(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, next(self._streams))

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """torch.cuda.stream: a stream is the current one meanwhile."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, next(self._numbers))

    def synchronize(self, device: Any = None) -> None:
        self.reach("synchronize")
        self.arrive(self.landing)

    def arrive(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        with torch.inference_mode():
            for place, values in copies:
                place.as_subclass(Tensor).copy_(values)
        self.landing = [copy for copy in self.landing if not any(copy is other for other in copies)]

    def current_blas_handle(self) -> int:
        assert not self.capturing, "cuBLAS makes no handle while a stream is captured"
        self.handles += 1
        return 1

    def empty_cache(self) -> None:
        for handle in [handle for handle, pool in self.pools.items() if not pool.users]:
            in_use = any(w.pool == handle and not w.freed for w in self.workspaces.values())
            if not in_use and all(ref() is None for ref in self.pools[handle].made):
                del self.pools[handle]

    def empty(self, *size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = _empty(*size, **kwargs)
        if not pin_memory:
            return made
        pinned = made.fill_(-1).as_subclass(Pinned)
        pinned.cuda = self
        return pinned

    def destroy_process_group(self, group: Any = None) -> None:
        if self.graphs:
            raise Hang(f"destroy_process_group waits for {len(self.graphs)} graphs for ever")
        self.events.append("process group destroyed")


_empty = torch.empty


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.cuda_stream, self.device = cuda, number, torch.device("cpu")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other: Stream) -> None:
        self.cuda.waits.append((self.cuda_stream, other.cuda_stream))

    def record_event(self) -> Event:
        event = Event(self.cuda)
        event.record()
        return event


class Pinned(Tensor):
    """Memory of the host into which copies arrive later."""

    cuda: Cuda

    def __getitem__(self, index: Any) -> Any:
        return self._like(super().__getitem__(index))

    def view(self, *shape: Any) -> Any:
        return self._like(super().view(*shape))

    def _like(self, other: Any) -> Any:
        other.cuda = self.cuda
        return other

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Any:
        assert non_blocking, "the host would wait"
        self.as_subclass(Tensor).fill_(-1)  # what was there is gone, what comes is not there yet
        self.cuda.landing.append((self, src.clone()))
        return self


class Event:
    """torch.cuda.Event."""

    def __init__(self, cuda: Cuda, **options: Any) -> None:
        self.cuda, self.behind = cuda, list[tuple[Tensor, Tensor]]()
        self.timing = options.get("enable_timing", False)

    def record(self, stream: Any = None) -> None:
        self.behind = list(self.cuda.landing)
        self.at = max(time.perf_counter(), self.cuda.free_at)

    def elapsed_time(self, end: Event) -> float:
        assert self.timing and end.timing
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.reach("wait")
        self.cuda.clock += max(0.0, self.at - time.perf_counter())
        self.cuda.arrive(self.behind)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, cuda: Cuda, keep_graph: bool = False) -> None:
        self.cuda, self.ended, self.workspace = cuda, False, None
        self.recording: Recording | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        cuda = self.cuda
        cuda.reach("capture")
        assert cuda.current.cuda_stream, "graphs are captured on a stream that is not the default one"
        self.handle = (next(cuda._numbers), 0) if pool is None else pool
        self.stream = cuda.current.cuda_stream
        if self.handle in cuda.pools and not cuda.pools[self.handle].users:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool are gone")
        cuda.pools.setdefault(self.handle, Pool()).users += 1
        at_all = {"handle": bool(cuda.handles), "collects": gc.isenabled()}
        cuda.captures.append({"stream": self.stream, "pool": pool, "mode": capture_error_mode} | at_all)
        cuda.clock += cuda.slow
        cuda.capturing = True
        self.recording = Recording()
        self.recording.__enter__()

    def capture_end(self) -> None:
        assert self.recording and self.cuda.current.cuda_stream == self.stream
        self.recording.__exit__()
        self.cuda.capturing = False
        self.cuda.reach("end")
        calls = self.recording.calls
        if any(op.overloadpacket in PRODUCTS for op, *_ in calls):
            self.workspace = self.cuda.workspaces.setdefault(self.stream, Workspace(self.handle))
        self.ended = True
        self.cuda.graphs.add(self)

    def replay(self) -> None:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.cuda.reach("replay")
        if self.workspace and self.workspace.freed:
            raise Corrupted("a graph is replayed whose workspace another graph took along")
        assert self.recording
        self.cuda.free_at = max(time.perf_counter(), self.cuda.free_at) + self.cuda.work
        self.recording.replay()

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.handle

    def reset(self) -> None:
        if not self.ended:
            return
        self.ended, cuda, recording = False, self.cuda, self.recording
        if cuda.takes_workspace_along and self.stream in cuda.workspaces:
            cuda.workspaces.pop(self.stream).freed = True
        pool = cuda.pools[self.handle]
        pool.users -= 1
        assert recording
        pool.made += [
            weakref.ref(tensor) for *_, made in recording.calls for tensor in made
            if tensor.untyped_storage()._cdata in recording._own
        ]  # fmt: skip
        self.recording, recording = None, None
        cuda.graphs.discard(self)

    def __del__(self) -> None:
        self.reset()


@contextlib.contextmanager
def stand_in(rule: str) -> Iterator[Cuda]:
    """The parts of torch.cuda that captured rounds call, by the rules of a version of torch."""
    cuda, perf_counter = Cuda(rule), time.perf_counter
    replaced: dict[str, Callable[..., Any]] = {
        "CUDAGraph": lambda *args, **kwargs: Graph(cuda, *args, **kwargs),
        "Event": lambda **options: Event(cuda, **options), "Stream": cuda.stream_of_pool, "stream": cuda.on,
        "current_stream": lambda device=None: cuda.current, "graph_pool_handle": cuda.graph_pool_handle,
        "synchronize": cuda.synchronize, "empty_cache": cuda.empty_cache,
        "current_blas_handle": cuda.current_blas_handle,
    }  # fmt: skip
    torch.utils._device._device_constructors()  # keeps for good what torch.empty is at the first call
    with contextlib.ExitStack() as patches:
        for name, what in replaced.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, what))
        patches.enter_context(mock.patch.object(torch.cuda.graph, "default_capture_stream", None))
        patches.enter_context(mock.patch.object(torch._C, "_host_emptyCache", lambda: None, create=True))
        release: Any = lambda _, pool: vars(cuda.pools[pool]).update(users=cuda.pools[pool].users - 1)  # noqa: E731
        patches.enter_context(mock.patch.object(torch._C, "_cuda_releasePool", release, create=True))
        patches.enter_context(mock.patch.object(torch, "empty", cuda.empty))
        patches.enter_context(mock.patch.object(time, "perf_counter", lambda: perf_counter() + cuda.clock))
        patches.enter_context(mock.patch.object(torch.distributed, "destroy_process_group", cuda.destroy_process_group))
        yield cuda
