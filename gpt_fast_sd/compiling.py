"""Compiled steps that count their graphs, and the fall-back where nothing can compile."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import SPLIT, KVCache

from .config import EngineConfig

Options = dict[str, Any]  # Inductor's, by their names in torch._inductor.config


class CompiledStep:
    """A function compiled fullgraph by Inductor, or called as it is; `graphs` counts how often it was compiled."""

    def __init__(self, fn: Callable[..., Any], *, compiled: bool | Options | None) -> None:
        """compiled: Inductor's options, True for its own defaults; False and None: not compiled."""
        self.graphs = 0
        self._options: Options = compiled if isinstance(compiled, dict) else {}
        self._own_graphs = bool(self._options.get("triton.cudagraphs"))
        as_it_is = compiled is None or compiled is False
        self._call = (
            fn if as_it_is else torch.compile(own_code(fn), fullgraph=True, dynamic=False, backend=self._backend)
        )

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        step: Callable[..., Any] = compile_fx(graph, inputs, config_patches=self._options)  # type: ignore[assignment]
        return step

    def __call__(self, *args: Any) -> Any:
        """Call the step; where it is a CUDA graph of Inductor's, its results hold until the next step is called."""
        if self._own_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self._call(*args)


def inductor_options(config: EngineConfig, device: torch.device) -> Options:
    """Inductor's options for an engine's steps on a device."""
    if device.type != "cuda":
        return {}
    # torch.compile's mode "max-autotune-no-cudagraphs", as rounds are captured whole; "reduce-overhead" captures steps
    return {"max_autotune": config.max_autotune, "triton.cudagraphs": config.cuda_graphs == "step"}


def without_graphs(compiled: bool | Options | None) -> bool | Options | None:
    """The same options for a step that Inductor must not capture: its inputs lie elsewhere from call to call."""
    return {**compiled, "triton.cudagraphs": False} if isinstance(compiled, dict) else compiled


def hold_still(*tensors: Tensor) -> None:
    """Promise that these tensors, inputs of steps, never move: else Inductor captures no step that writes to them."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def span(cache: KVCache, n_keys: int) -> Tensor:
    """[n_splits, 0]: how many key splits are in view for the first n_keys positions, as a size.

    A size may vary without a recompile where a number would be baked in.
    """
    most = cache.capacity // SPLIT
    size = torch.empty(min(cache.splits(n_keys), most), 0, device=cache.seq_len.device)
    if most > 2:  # a range of one size is no range
        torch._dynamo.mark_dynamic(size, 0, min=2, max=most)
    return size


def own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    Dynamo keeps compiled graphs, and their limit, per code object: so engines and steps of different shapes do not meet
    each other's guards.
    """
    assert isinstance(fn, types.FunctionType)
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def can_compile(device: torch.device) -> bool:
    """Whether Inductor can build code here; warns once with the reason where it cannot."""
    if device.type == "cuda":
        return True  # see devices.require_kernels
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        warnings.warn("compile=True needs a C++ compiler, and none was found: running eagerly, slower", stacklevel=3)
        return False
    return True
