"""What a step needs from its device: whether the host waits for it, and whether it may be replayed.

`mixed_devices` watches a step over fake CUDA tensors, `Recording` stands in for a CUDA graph over plain CPU tensors.
Neither sees into a custom operator: what waits inside one, or inside an operator of a real GPU, shows only there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")

aten = torch.ops.aten
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
UNSET = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


class HostRead(RuntimeError):
    """Values of a tensor are needed on the host."""


def tensors_in(*trees: Any) -> list[Tensor]:
    if len(trees) == 1 and isinstance(trees[0], Tensor):  # as most are
        return [trees[0]]
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def reads_host(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the host needs values to run op, or to know the shape of what it gives."""
    if op.overloadpacket in INDEXED:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    return torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags


class _Watch(TorchDispatchMode):
    """Shows every operator to `seen_by`, one made of others as those that it is made of."""

    def __init__(self, seen_by: Callable[..., Any]) -> None:
        super().__init__()
        self.seen_by = seen_by

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "prim":  # what a fake tensor is asked about itself
            return op(*args, **kwargs)
        with self:
            out = op.decompose(*args, **kwargs)
        return self.seen_by(op, args, kwargs) if out is NotImplemented else out


@contextlib.contextmanager
def mixed_devices() -> Iterator[list[str]]:
    """The list of operators inside that meet tensors of two devices or read values on the host.

    With fake tensors, which have no values, what reads them raises too: see `waits`.
    """
    seen: list[str] = []

    def look(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reads_host(op, args):
            seen.append(f"{op} reads values")
        out = op(*args, **kwargs)
        devices = {tensor.device.type for tensor in tensors_in(args, kwargs, out)}
        if len(devices) > 1 and op != aten.fill_.Tensor:  # x[:, :2] = 0: the number goes with the launch
            seen.append(f"{op} over {' and '.join(sorted(devices))}")
        return out

    with _Watch(look):
        yield seen


def waits(step: Callable[[], Any]) -> list[str]:
    """What the host would wait for in a step over fake CUDA tensors, up to the first value that it needs."""
    with mixed_devices() as seen:
        try:
            step()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            seen.append(f"{error.func} reads values")
        except RuntimeError as error:
            if "on the same device" not in str(error) and "two different devices" not in str(error):  # until torch 2.12
                raise
            seen.append(str(error))
    return seen


class _NoNumpy(TorchFunctionMode):
    """Refuses the ways out of a tensor that no operator leads through."""

    def __torch_function__(
        self, fn: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if fn in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise HostRead(f"Tensor.{fn.__name__} in a recording")
        return fn(*args, **kwargs or {})


class Recording:
    """A stand-in for torch.cuda.CUDAGraph on the CPU.

    `with Recording() as recorded: out = fn()` records every operator with its arguments, `recorded.replay()` runs them
    again over the same tensors and writes the results to the same places, including `out`. Numbers and shapes stay as
    recorded. As with a capture, nothing has happened when the recording ends: earlier tensors are unchanged. Raises
    HostRead if fn needs a value on the host.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._inference = False
        self._own: set[int] = set()  # storages that were made while recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # written to, as it was
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> Recording:
        self._inference = torch.is_inference_mode_enabled()
        self._modes.enter_context(_NoNumpy())
        self._modes.enter_context(_Watch(self._record))
        return self

    def __exit__(self, *exc: object) -> None:
        self._modes.close()
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Run what was recorded once more, on the tensors as they are now."""
        with torch.inference_mode() if self._inference else torch.no_grad():
            for op, args, kwargs, places in self.calls:
                if op.overloadpacket in UNSET:
                    continue  # memory is taken, and stays as it is
                for place, new in zip(places, tensors_in(op(*args, **kwargs)), strict=True):
                    if new.untyped_storage()._cdata != place.untyped_storage()._cdata:  # else in place, or a view
                        place.copy_(new)

    def _record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reads_host(op, args):
            raise HostRead(f"{op} in a recording")
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
        for tensor in self._written(op, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()
        with torch._C.DisableTorchFunction():  # what an operator does inside is its own affair
            out = op(*args, **kwargs)
        places = tensors_in(out)
        self._own |= {tensor.untyped_storage()._cdata for tensor in places} - given
        self.calls.append((op, args, kwargs, places))
        return out

    @staticmethod
    def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The arguments that op writes to."""
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(op._schema.arguments)
            if argument.is_write
        ]
        return tensors_in(written)


def capture(part: Callable[[], Result]) -> Callable[[], Result]:
    """Record part as a CUDA graph would be captured: what is returned replays it and gives its result."""
    with Recording() as recorded:
        result = part()

    def replay() -> Result:
        recorded.replay()
        return result

    return replay
