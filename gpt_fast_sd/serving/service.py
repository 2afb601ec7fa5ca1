"""Requests of any thread, decoded together: one thread streams them through the engine while there are some.

submit (any thread) -> inbox -> Engine.stream (the service's thread) -> Submission (any thread, or an event loop)
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from gpt_fast_sd.tp import Parallel

from ..config import SamplingParams
from .lifecycle import BUSY
from .requests import Completion, Intake, Prompt, TokenEvent
from .scheduling import Schedule
from .stats import CompletionStats

LINGER = 5.0  # seconds that a thread with nothing to do waits for more
RETRY = 0.01  # seconds until a thread asks again whether another call has ended


class Streams(Protocol):
    """An engine, as far as requests are handed to it."""

    device: torch.device
    parallel: Parallel
    schedule: Schedule

    def check(self, prompts: list[Prompt], params: SamplingParams | None = None) -> None:
        """ValueError or RuntimeError for what cannot run."""

    def stream(self, prompts: Iterator[tuple[Prompt, SamplingParams] | None]) -> Iterator[TokenEvent]:
        """See Engine.stream."""
        ...


class Submission:
    """A request that was submitted: an iterator over its events, once, in any thread or as `async for`.

    An error that ends the engine's work is raised there. Leaving the iterator half-way cancels the request.
    """

    def __init__(
        self, service: Service, engine: Streams, index: int, prompt: list[int], params: SamplingParams
    ) -> None:
        self.index = index  # of the engine's submissions, also of its events
        self.prompt, self.params = prompt, params
        self._service, self._engine = service, engine  # which lives as long as someone waits for it
        self._completion: Completion | None = None  # once it was iterated over
        self._events = queue.SimpleQueue[TokenEvent | BaseException]()
        self._wake: Callable[[], object] | None = None  # of an event loop that waits for an event

    def __iter__(self) -> Iterator[TokenEvent]:
        """Wait for each event."""
        try:
            while self._completion is None:
                yield self._told(self._events.get())
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Wait for each event, while other tasks of the loop run."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while self._completion is None:
                arrived.clear()  # before looking: what comes later sets it
                try:
                    event = self._told(self._events.get_nowait())
                except queue.Empty:
                    await arrived.wait()
                    continue
                yield event
        finally:
            self._wake = None
            self.cancel()

    def result(self) -> Completion:
        """Wait until it has ended; what was iterated over has."""
        for _ in self:
            pass
        assert self._completion
        return self._completion

    def cancel(self) -> None:
        """End it before the next round with finish_reason "cancelled", if it has not ended; it frees its slot."""
        self._service.cancel(self)

    def _told(self, event: TokenEvent | BaseException) -> TokenEvent:
        """An event, the last of which is kept; an error is raised, each time it is asked."""
        if isinstance(event, BaseException):
            self._events.put(event)
            raise event
        self._completion = event.completion
        return event

    def put(self, event: TokenEvent | BaseException) -> None:
        """Hand over an event, or what ended the work."""
        self._events.put(event)
        if wake := self._wake:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                wake()


class Service:
    """Hands submissions to an engine's stream, in a thread that is there while it has work."""

    def __init__(self, engine: Streams, intake: Intake) -> None:
        self._engine, self._intake = weakref.ref(engine), intake
        self._changed = threading.Condition()  # its lock is that of all below
        self._inbox = deque[Submission]()  # what the stream has not taken yet
        self._at_work = dict[int, Submission]()  # by index in the stream that runs
        self._n_taken = 0  # by that stream
        self._n = 0  # submissions so far
        self._thread: threading.Thread | None = None
        self._ending = False  # the program or the engine ends
        self._turns = deque[int]()  # threads that want the engine as they came, of which the first has it
        self._last: tuple[Submission, TokenEvent | BaseException] | None = None  # held back until the stream has ended

    def submit(self, prompt: Prompt, params: SamplingParams | None) -> Submission:
        """See Engine.submit."""
        engine = self._engine()
        assert engine
        if engine.parallel.tp > 1:
            raise ValueError("requests are submitted to an engine of one process: ranks must make the same calls")
        given = params or SamplingParams()
        ids = self._intake.one(0, prompt, given).prompt  # once: what is a generator, or is changed later, is read now
        engine.check([ids], given)
        with self._changed:
            one = Submission(self, engine, self._n, ids, given)
            self._n += 1
            self._inbox.append(one)
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():  # it is not in a forked process
                name, device = "Engine.submit", engine.device
                self._thread = threading.Thread(target=self._work, args=(device,), daemon=True, name=name)
                self._thread.start()
                atexit.unregister(self.end)
                atexit.register(self.end)
        return one

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Have the engine once what was submitted and has begun has ended; what comes meanwhile waits."""
        if engine := self._engine():
            engine.check([])
        with self._turn():
            yield

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the engine once all who came before had it; RuntimeError for a thread that has it, or waits already."""
        me = threading.get_ident()
        with self._changed:
            if me in self._turns:
                raise RuntimeError(BUSY)
            self._turns.append(me)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turns[0] == me)
            yield
        finally:
            with self._changed:
                self._turns.remove(me)
                self._changed.notify_all()

    def cancel(self, one: Submission) -> None:
        """See Submission.cancel."""
        with self._changed:
            if one in self._inbox:
                self._inbox.remove(one)
                one.put(never_begun(one.index, "cancelled"))
            for index, other in self._at_work.items():
                if other is one and (engine := self._engine()):
                    engine.schedule.cancel(index)

    def end(self) -> None:
        """Cancel all and wait for the thread: at the program's end, or the engine's, it must not be in a kernel."""
        with self._changed:
            self._ending, thread = True, self._thread
            all_of_them = [*self._inbox, *self._at_work.values()]
        for one in all_of_them:
            self.cancel(one)
        with self._changed:
            self._changed.notify_all()
        if thread and thread is not threading.current_thread():
            thread.join(timeout=60)

    def _work(self, device: torch.device) -> None:
        """Stream while there are requests; end after a while without any."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._inbox or self._ending, LINGER) or not self._inbox:
                    self._thread = None
                    return
                self._n_taken = 0
            if (engine := self._engine()) is None:
                return
            try:
                with self._turn():
                    for event in engine.stream(self._prompts(engine.schedule)):
                        self._hand_over(event.index, event)
            except BaseException as error:  # each of them waits for an answer
                if str(error) == BUSY and not self._n_taken:
                    time.sleep(RETRY)
                else:
                    self._fail(error)
            self._tell_last()
            del engine

    def _prompts(self, schedule: Schedule) -> Iterator[tuple[Prompt, SamplingParams] | None]:
        """What the stream takes: the oldest request; None while others are at work; it ends when all have ended."""
        schedule.on_failed = self._hand_over  # of this stream alone, which has begun
        waiting = len(self._inbox)  # which have their turn, whoever else waits for one
        while True:
            with self._changed:
                takes = self._inbox and (len(self._turns) == 1 or self._n_taken < waiting)
                if not (takes or self._at_work):
                    return
                one = self._inbox.popleft() if takes else None
                if one:
                    self._tell_last()
                    self._at_work[self._n_taken] = one
                    self._n_taken += 1
            yield (one.prompt, one.params) if one else None

    def _hand_over(self, index: int, told: TokenEvent | BaseException) -> None:
        """Give an event of the stream, or what ended a request alone, to whoever submitted it."""
        with self._changed:
            one = self._at_work[index]
            if isinstance(told, BaseException) or told.completion:
                del self._at_work[index]
            is_last = not (self._at_work or self._inbox)
        if isinstance(told, TokenEvent):
            completion = replace(told.completion, index=one.index) if told.completion else None
            told = replace(told, index=one.index, completion=completion)
        if is_last:  # whoever has it may call the engine: its stream has ended by then
            self._last = one, told
        else:
            one.put(told)

    def _tell_last(self) -> None:
        """Hand over what was held back."""
        if self._last:
            one, event = self._last
            self._last = None
            one.put(event)

    def _fail(self, error: BaseException) -> None:
        """Tell everyone who waits what ended the work."""
        with self._changed:
            failed = [*self._at_work.values(), *self._inbox]
            self._at_work.clear()
            self._inbox.clear()
        for one in failed:
            one.put(error)


def never_begun(index: int, finish_reason: str) -> TokenEvent:
    """The only event of a request that ended before it began."""
    stats = CompletionStats(rounds=0, emitted=0, drafted_by_position=(), accepted_by_position=())
    completion = Completion(index=index, tokens=[], text="", finish_reason=finish_reason, stats=stats)
    return TokenEvent(
        index=index, tokens=[], text="", pieces=[], sources=[], drafted=0, accepted=0, completion=completion
    )
