"""When an engine may be called: one call at a time, and none once it is closed or its device has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gpt_fast_sd.model import Transformer

from .devices import require_current
from .scheduling import Schedule


class Access:
    """Whether an engine on a device is idle, at work, closed or broken; RuntimeError if a call must not be made."""

    def __init__(self, device: torch.device, model: Transformer) -> None:
        self.device = device
        self._layer = model.layers[0]
        self._linear = self._layer.get_submodule("attention.wqkv")
        self.running = self.closed = False
        self.failure: str | None = None  # the error of the device

    def require_open(self) -> None:
        """RuntimeError for an engine that is closed or broken, or whose weights another one has quantized."""
        if self.failure:
            raise RuntimeError(self._broken)
        if self.closed:
            raise RuntimeError("the engine is closed: build a new one")
        if self._layer.get_submodule("attention.wqkv") is not self._linear:  # quantized in place, it is another module
            raise RuntimeError(
                "the weights of this engine's model were quantized in place after it was built: load the model again "
                "for each precision"
            )

    def require_idle(self) -> None:
        """The same, and for one that is at work; ValueError if another device is the current one."""
        self.require_open()
        if self.running:
            raise RuntimeError("the engine is still streaming: exhaust or close that stream first")
        require_current(self.device)

    @contextlib.contextmanager
    def at_work(self, schedule: Schedule) -> Iterator[None]:
        """No other call may be made meanwhile; afterwards every slot is free, whatever happened.

        If the device itself failed, the engine is unusable from then on and says so.
        """
        self.require_idle()
        self.running, ended_well = True, False
        try:
            yield
            ended_well = True
        except GeneratorExit:
            ended_well = True
            raise
        except torch.AcceleratorError as error:
            self.failure = _first_line(error)
            raise
        finally:
            self.running = False
            try:
                schedule.clear(everything=not ended_well)  # it may have failed while a slot was being taken
            except Exception as error:
                self.failure = self.failure or _first_line(error)
                if ended_well:  # else the first error says more
                    raise RuntimeError(self._broken) from error

    @property
    def _broken(self) -> str:
        return f"the device failed ({self.failure}): build a new engine"


def _first_line(error: BaseException) -> str:
    """An error's message, without the advice that follows."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
