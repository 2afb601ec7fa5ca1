"""When an engine may be called: one call at a time, and none once it is closed or its device has failed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.utils import _device
from torch.utils._device import DeviceContext

from ..fast.devices import require_current
from .cuda_graphs import OUT_OF_MEMORY, GraphPool, is_of_capturing
from .requests import TokenEvent, Waiting
from .scheduling import Schedule

Event = TypeVar("Event")
PATIENCE = 60.0  # seconds that closing waits for another thread, which may be compiling
BUSY = "the engine is still streaming, or at work in another thread: exhaust or close that stream first"


class Access:
    """Whether an engine on a device is idle, at work, closed or broken; RuntimeError if a call must not be made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._process = device, os.getpid()
        self._worker = self._process  # which process works, if one does
        self._working = threading.Lock()  # held by a call that decodes; threads may begin at once
        self._inside = threading.RLock()  # held by that call, except while its consumer or its prompts' source runs
        self.closed = self._freed = False
        self.failure: str | None = None  # the error of the device

    @property
    def running(self) -> bool:
        """Whether a call is at work."""
        return self._working.locked()

    def require_open(self) -> None:
        """RuntimeError for an engine that is closed or broken, or another process's threads would be waited for."""
        here, on_threads = os.getpid(), self.device.type != "cpu" or torch.get_num_threads() > 1
        if here != self._process and (on_threads or (self.running and self._worker != here)):  # what works is not there
            raise RuntimeError("this process was forked from the one that built the engine: build one in each process")
        if self.failure:
            raise RuntimeError(self._broken)
        if self.closed:
            raise RuntimeError("the engine is closed: build a new one")

    def require_idle(self) -> None:
        """Raise unless the engine is open and idle; ValueError if another device is the current one."""
        self.require_open()
        if self.running:
            raise RuntimeError(BUSY)
        require_current(self.device)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other call may be made meanwhile, see require_idle."""
        self.require_idle()
        if not self._working.acquire(blocking=False):
            raise RuntimeError(BUSY)
        self._worker = os.getpid()
        try:
            with self._inside:
                self.require_open()  # another thread may have closed it meanwhile
                yield
        finally:
            self._working.release()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The call at work lets others' code run, in which it is not waited for."""
        self._inside.release()
        try:
            yield
        finally:
            try:
                self._inside.acquire()
            except BaseException:  # Ctrl-C while another thread closes
                self._inside.acquire()
                raise

    def events(self, schedule: Schedule, waiting: Waiting, speculate: bool) -> Iterator[TokenEvent]:
        """Run the schedule within a call at work."""
        waiting.around = self.outside
        with contextlib.closing(schedule.run(waiting, speculate, self.require_open)) as events:
            for event in events:
                with self.outside():
                    yield event

    @contextlib.contextmanager
    def at_work(self, schedule: Schedule) -> Iterator[None]:
        """Work on prompts, alone; afterwards every slot is free, whatever happened.

        If the device itself failed, the engine is unusable from then on and says so.
        """
        with self.alone():
            ended_well = False
            try:
                yield
                ended_well = True
            except GeneratorExit:
                ended_well = True
                raise
            except torch.AcceleratorError as error:
                if not is_of_capturing(error) and getattr(error, "error_code", None) != OUT_OF_MEMORY:
                    self.failure = _first_line(error)
                raise
            finally:
                try:
                    schedule.clear(everything=not ended_well)  # it may have failed while a slot was being taken
                except Exception as error:
                    self.failure = self.failure or _first_line(error)
                    if ended_well:  # else the first error says more
                        raise RuntimeError(self._broken) from error

    def close(self, schedule: Schedule, end_others: Callable[[], None]) -> None:
        """End work in progress and free captured rounds, once. end_others: what other threads have at work.

        A thread that decodes ends before its next round; one that waits for prompts is not waited for.
        """
        if self._freed:
            return
        end_others()
        self.closed = True
        elsewhere = self.running and self._worker != os.getpid()  # in the process that this one was forked from
        waited = not elsewhere and self._inside.acquire(timeout=PATIENCE)
        try:
            if not self._freed:
                self._free(schedule)
        finally:
            if waited:
                self._inside.release()

    def _free(self, schedule: Schedule) -> None:
        self._freed = True
        try:
            if not self.failure:
                schedule.rounds.synchronize()
        finally:
            schedule.in_flight.clear()
            try:
                schedule.rounds.forget()
            finally:
                if isinstance(schedule.rounds.capture, GraphPool):
                    schedule.rounds.capture.close()

    @property
    def _broken(self) -> str:
        return f"the device failed ({self.failure}): build a new engine"


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """What the caller has set for its own work, autocast, default dtype and default device, does not reach inside."""
    casts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    modes = overrides._get_current_function_mode_stack()
    devices = any(isinstance(mode, DeviceContext) for mode in modes)
    if not casts and not devices and torch.get_default_dtype() == torch.float32:
        yield  # as nearly always: a round of a small model takes half a millisecond
        return
    with contextlib.ExitStack() as stack:
        for kind in casts:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if devices:
            stack.enter_context(_on_no_device(modes))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


@contextlib.contextmanager
def _on_no_device(modes: list[Any]) -> Iterator[None]:
    """Meanwhile no default device is set. Another one on top would not do: Dynamo cannot trace below such a mode."""
    device, _device.CURRENT_DEVICE = _device.CURRENT_DEVICE, None  # Dynamo's guards ask for it, too
    _replace_modes([mode for mode in modes if not isinstance(mode, DeviceContext)])
    try:
        yield
    finally:
        _device.CURRENT_DEVICE = device
        _replace_modes(modes)


def _replace_modes(modes: list[Any]) -> None:
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


def sheltered(events: Generator[Event, None, None]) -> Iterator[Event]:
    """Run a generator under own settings; the caller's are restored whenever it has an event."""
    try:
        while True:
            with own_settings():
                event = next(events, None)
            if event is None:
                return
            yield event
    finally:
        events.close()


def kept_by(part: str, name: str) -> Any:
    """An attribute that one of the engine's parts keeps, read and set there."""
    return property(
        lambda engine: getattr(getattr(engine, part), name),
        lambda engine, value: setattr(getattr(engine, part), name, value),
    )


def _first_line(error: BaseException) -> str:
    """An error's message, without the advice that follows."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
