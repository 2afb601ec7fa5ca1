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

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from gpt_fast_sd.model import SPLIT

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Result = TypeVar("Result")
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]

# Before torch 2.13 a capture that fails leaves the allocator in the middle of it: nothing else can be captured then.
FAILED_CAPTURES_END = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
# In that version one that cannot be ended counts as a user of its pool for good, so that what it took is never free
# again: https://github.com/pytorch/pytorch/pull/190348
KEEPS_POOLS = torch.__version__.partition("+")[0] == "2.13.0"
# cudaErrorStreamCaptureUnsupported and those after it: the device goes on, the capture alone does not
CAPTURE_ERRORS = range(900, 909)
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: the device goes on

N_STREAMS = 32  # torch has this many streams per device, and hands them out cyclically


def is_of_capturing(error: BaseException) -> bool:
    """Whether an error is of a capture, or of the part that was captured, and not of the device or its memory."""
    if isinstance(error, torch.AcceleratorError):
        code = getattr(error, "error_code", None)
        return "captur" in str(error) if code is None else code in CAPTURE_ERRORS
    return isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError)


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
        """Capture a graph that is freed while others stay, in its own memory. Two of them are freed together."""
        return _replaying(*_captured(part, self._passing_stream, torch.cuda.graph_pool_handle()))

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
    part: Callable[[], Result], stream: torch.cuda.Stream, pool: _POOL_HANDLE
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture part on a stream, into a pool."""
    torch.cuda.current_blas_handle()  # made for each thread at its first product, which must not be a captured one
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.stream(torch.cuda.current_stream(stream.device))
    # other threads, such as NCCL's watchdog, may continue to call CUDA
    capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    is_user = False
    try:
        # a capture that cannot be ended would leave its stream as the current one
        with before, no_garbage_collection(), capturing:
            is_user = KEEPS_POOLS
            result = part()
    except BaseException:
        if is_user and not _has_ended(graph):
            torch._C._cuda_releasePool(stream.device.index, pool)
        graph.reset()  # now, and not when the traceback is freed
        raise
    return graph, result


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether the capture was ended: torch has no other word for it."""
    with contextlib.suppress(RuntimeError):
        graph.pool()
        return True
    return False


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Meanwhile Python frees nothing in circles: what a compiler's kernel does as it goes is forbidden in a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
