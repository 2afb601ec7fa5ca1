"""Compiled steps that count their graphs, and the fallback if nothing can compile."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import Transformer
from gpt_fast_sd.tp import in_short

from ..config import EngineConfig
from ..steps import Step
from . import rebuilding, vector_options
from .compile_one_layer import ByLayer, Layer, LayeredModel

Options = dict[str, Any]  # Inductor's, by their names in torch._inductor.config
_FORGOTTEN: list[types.CodeType] = []  # what no step calls any more


class CompiledStep(Step):
    """A function compiled with fullgraph by Inductor; `graphs` counts its compilations.

    A step over the layers of a model is compiled for one of them, see by_layer.
    """

    compiles = True

    def __init__(self, fn: Callable[..., Any], options: Options | None = None) -> None:
        """options: Inductor's; None: its own defaults."""
        super().__init__(fn)
        self.graphs = 0
        self._options: Options = options or {}
        self._variants: dict[Hashable, Callable[..., Any]] = {}
        self._layered: LayeredModel | None = None
        self._layers: list[Layer] = []  # of the current call
        # torch keeps every backend for good, and compiled results with the code: neither may keep weights alive
        self._backend = functools.partial(_backend, weakref.ref(self))
        self._codes: list[types.CodeType] = []  # of the variants
        weakref.finalize(self, _forget, self._codes)
        importlib.import_module("torch._dynamo")  # before sizes are marked, see steps.size_carrier
        _forget([])

    def __call__(self, *args: Any, variant: Hashable = None) -> Any:
        """Call the step. variant: a key for differences in the arguments that need a graph of their own.

        Each variant has its own code object for Dynamo, which keeps few graphs per object and searches them linearly.
        """
        if variant not in self._variants:
            own = own_code(self.fn)
            self._codes.append(own.__code__)
            step = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)
            self._variants[variant] = step
        model = next((arg for arg in args if isinstance(arg, Transformer)), None)
        if model is None:
            return self._variants[variant](*args)
        if self._layered is None or not self._layered.is_of(model):
            self._layered = LayeredModel(model)
        first, self._layers = self._layered.split(args)
        try:
            return self._variants[variant](*first)
        finally:
            self._layers = []

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        built: Any = rebuilding(lambda: compile_fx(graph, inputs, config_patches=self._options))
        step: Callable[..., Any] = built
        return step


def _backend(this: weakref.ref[CompiledStep], graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile the graph that Dynamo traced of a step."""
    step = this()
    assert step is not None, "its caller holds it"
    step.graphs += 1
    if not step._layers:
        return step._inductor(graph, inputs)
    by_layer = ByLayer(graph, inputs, step._layers, step._inductor)

    def run(*inputs: Any) -> Any:
        step = this()
        assert step is not None
        return by_layer(step._layers, inputs)

    return run


def _forget(codes: list[types.CodeType]) -> None:
    """Drop what Dynamo compiled of these: its results refer to the code that they were made of, and that to them.

    Neither would ever go, nor the traced graph, a few MiB per step, to which the module's globals hold a name. While
    Dynamo is at work, be it that a reset of its own let the step go, nothing may be dropped: the next call does.
    """
    _FORGOTTEN.extend(codes)
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.convert_frame import compile_lock

        while _FORGOTTEN and not compile_lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            torch._C._dynamo.eval_frame.reset_code(_FORGOTTEN.pop())


def inductor_options(config: EngineConfig, device: torch.device) -> Options:
    """Inductor's options for an engine's steps on a device: its own CUDA graphs stay off, as rounds are captured."""
    if config.kv_dtype == "int8":  # scales in fp16 are stored beside keys in bf16, of which Inductor tells users
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed in the scheduler node")
    if device.type != "cuda":
        return dict(vector_options())
    # Inductor would time the kernel that stores keys by copying the cache through pinned memory for each trial. Kernels
    # that need nothing of each other are one launch: queries are turned in the one that stores keys. Not reductions:
    # untimed, each would be one block that holds all rows
    untimed = {"triton.autotune_pointwise": False, "combo_kernels_autotune": 0}
    combined = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
    return {"max_autotune_gemm": config.max_autotune, **combined, **untimed}


def own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function, with a code object of its own.

    Dynamo keeps compiled graphs, and their limit, per code object: so engines and steps of different shapes never check
    each other's guards.
    """
    assert isinstance(fn, types.FunctionType)
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def can_compile(device: torch.device) -> bool:
    """Whether Inductor can build code here; warns once with the reason if it cannot."""
    if device.type == "cuda":
        return True  # see machine.require_kernels
    if why := no_compiler():
        said = f"compile=True needs a C++ compiler, and {why}: running eagerly, slower"
        warnings.warn(said, stacklevel=5)  # the line that builds the engine, past the engine's own two and target_of
    return not why


def no_compiler() -> str | None:
    """Why Inductor cannot build code for this CPU; None if it can."""
    if why := _cannot_write():  # first: Inductor is not even imported where it cannot
        return why
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return _fails(get_cpp_compiler())
    except (InvalidCxxCompiler, OSError):  # the latter: of what CXX names
        return "none was found"


def _cannot_write() -> str | None:
    """Why Inductor, and our kernels with it, cannot keep what they build. ValueError where torch itself would fail."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder = None if named is None else os.path.abspath(named)  # as torch reads it
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)  # as torch does when a model is made
    except OSError as error:
        why = f"is no folder, and none can be made there: {error.strerror}"
        raise ValueError(f"TORCHINDUCTOR_CACHE_DIR is {named!r}, which {why}") from None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # Inductor's own folder lies where temporary files do
            file.write(bytes(2**20))  # more than a kernel and its source
    except OSError as error:
        place = folder or "the folder for temporary files"
        return f"{place} cannot hold what it builds: {error.strerror} (TORCHINDUCTOR_CACHE_DIR names another folder)"
    return None


@functools.cache
def _fails(compiler: str) -> str | None:
    """What is wrong with a compiler that tells its version: it must build what Inductor builds, a module for Python.

    Half a second, once in a process. Only Linux's compilers are known to take the same flags everywhere.
    """
    if sys.platform != "linux":
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = Path(folder) / "module.cpp"
        source.write_text('#include <Python.h>\n#include <cmath>\nextern "C" int one() { return 1; }\n')
        flags = ["-O0", "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
        command = [compiler, *flags, str(source), "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} cannot be run ({in_short(error)})"
        if not done.returncode:
            return None
        said = [line.strip() for line in done.stderr.splitlines() if re.search("error|cannot|not found", line)]
        why = said[0] if said else f"exit code {done.returncode}"
    return f"{compiler} cannot build a module for Python ({why:.200})"
