"""CUDA without CUDA: fake tensors on a device that is not there, and the code Inductor would generate for it.

The generated code is read, never run. What is patched here are private names of torch 2.13, all of them in this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gpt_fast_sd.config import EngineConfig
from gpt_fast_sd.fast.compile import CompiledStep, inductor_options

GUARD = """
// CUDA tensors of a torch that was built without CUDA: entering and leaving their device does nothing
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10 { namespace impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}}
"""


def why_not_fake() -> str | None:
    """Why fake CUDA tensors cannot be had here, None if they can."""
    if not torch.backends.cuda.is_built() and shutil.which("g++") is None:
        return "fake CUDA tensors need a compiler for the device guard that this torch lacks"
    return None


def why_no_code() -> str | None:
    """Why Inductor's CUDA code cannot be generated here, None if it can."""
    if not torch.__version__.startswith("2.13."):
        return f"Inductor's private names are those of torch 2.13, this is {torch.__version__}"
    if torch.backends.cuda.is_built():
        return "this torch has CUDA of its own"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return why_not_fake()


needs_fake_cuda = pytest.mark.skipif(why_not_fake() is not None, reason=str(why_not_fake()))
needs_cuda_code = pytest.mark.skipif(why_no_code() is not None, reason=str(why_no_code()))


@functools.cache
def load_guard() -> None:
    """Build and load, once per process, the device guard that operators on CUDA tensors enter."""
    if torch.backends.cuda.is_built():
        return
    built = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "no_op_cuda_guard.so")  # tests/conftest.py names the folder
    if not built.exists():
        home = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(GUARD, encoding="utf-8")
            paths = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
            subprocess.run(
                ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", str(source), *paths, "-o", str(library)], check=True
            )
            library.rename(built)  # at once: another process may look for it
    ctypes.CDLL(str(built))


@contextlib.contextmanager
def fake_cuda_tensors() -> Iterator[FakeTensorMode]:
    """Tensors made inside are fake, and may be on "cuda"."""
    load_guard()
    with FakeTensorMode() as mode:
        yield mode


@dataclass(eq=False)
class Generated:
    """What Inductor made of a step: its launches by kind, each in order of the code; of all layers, see parts."""

    code: str = field(repr=False)
    kernels: list[str] = field(default_factory=list)  # Triton kernels that Inductor wrote
    products: list[str] = field(default_factory=list)  # calls of a library's matrix products: "mm", "bmm", "addmm"
    ours: list[str] = field(default_factory=list)  # torch.ops.gpt_fast_sd
    others: list[str] = field(default_factory=list)  # torch.ops of anybody else, which Inductor had no kernel for
    allocated: list[tuple[str, ...]] = field(default_factory=list)  # shapes of the buffers, sizes as the code has them
    graphs: int = 0
    no_cudagraph: str | None = None  # why Inductor would not have put it into a CUDA graph
    mutated: list[int] = field(default_factory=list)  # inputs that are written to and are not buffers of a module
    parts: list[Generated] = field(default_factory=list, repr=False)  # those that ran, in their order

    def read(self) -> None:
        """Find the launches in the code of one part."""
        body = self.code[self.code.index("def call(") :].split("\ndef ")[0]
        self.kernels = re.findall(r"(triton_\w+)\.run\(", body)
        self.products = re.findall(r"extern_kernels\.(\w+)\(", body)
        ops = re.findall(r"torch\.ops\.(\w+\.\w+)\.\w+\(", body)
        self.ours = [op.split(".")[1] for op in ops if op.startswith("gpt_fast_sd.")]
        self.others = [op for op in ops if not op.startswith("gpt_fast_sd.")]
        sizes = re.findall(r"empty_strided_cuda\(\(([^()]*)\),", body)
        self.allocated = [tuple(size for size in each.split(", ") if size) for each in sizes]

    @property
    def launches(self) -> int:
        return len(self.kernels) + len(self.products) + len(self.ours) + len(self.others)


class _Generated(BaseException):  # not an Exception: nothing on the way may catch it
    pass


class _ReadStep(CompiledStep):
    """The engine's compiled step; what Inductor generates for each of its parts is read, and counted when it is run."""

    def __init__(self, fn: Callable[..., Any], cap: int) -> None:
        super().__init__(fn, inductor_options(EngineConfig(), torch.device("cuda")))
        self.cap, self.ran = cap, list[Generated]()

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        part = Generated("")
        with _inductor_sees_cuda(self.cap, part), contextlib.suppress(_Generated):
            super()._inductor(graph, inputs)
        assert part.code, "Inductor generated nothing"
        part.read()

        def run(*inputs: Any) -> Any:
            self.ran.append(part)
            return graph.forward(*inputs)

        return run


def cuda_code(fn: Callable[..., Any], *args: Any, cap: int = 90) -> Generated:
    """What the step fn launches for these fake tensors on "cuda", a GPU with sm_<cap>: as the engine compiles it."""
    step = _ReadStep(fn, cap)
    with contextlib.suppress(DataDependentOutputException):  # what is called at the end has no values
        step(*args)
    out = Generated("\n".join(part.code for part in dict.fromkeys(step.ran)), parts=step.ran, graphs=step.graphs)
    for part in step.ran:
        for kind in ("kernels", "products", "ours", "others", "allocated", "mutated"):
            getattr(out, kind).extend(getattr(part, kind))
        out.no_cudagraph = out.no_cudagraph or part.no_cudagraph
    return out


@contextlib.contextmanager
def _inductor_sees_cuda(cap: int, out: Generated) -> Iterator[None]:
    """torch.cuda, Triton's driver and Inductor's end of the line are replaced; `out` is filled when it is reached."""
    import torch._inductor.config as inductor
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime import triton_helpers

    from tests.gpuless.driver import stand_in

    def load(cls: type, key: str, path: str, *args: Any, **kwargs: Any) -> types.ModuleType:
        out.code = Path(path).read_text(encoding="utf-8")
        module = types.ModuleType(key)
        module.__file__, module.key, module.call = path, key, lambda args: None  # type: ignore[attr-defined]
        return module

    def compiled(self: CompiledFxGraph, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        out.no_cudagraph = self.disabled_cudagraphs_reason
        out.mutated = sorted({*self.mutated_input_idxs} - {*(self.fx_kwargs.get("static_input_idxs") or ())})
        raise _Generated

    init = CompiledFxGraph.__init__
    properties = types.SimpleNamespace(
        name="a GPU that is not there", major=cap // 10, minor=cap % 10, multi_processor_count=132, warp_size=32,
        total_memory=140 << 30, L2_cache_size=50 << 20, regs_per_multiprocessor=65536, gcnArchName="",
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, is_integrated=False,
        clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144,
    )  # fmt: skip
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    zero: Callable[..., int] = lambda *args, **kwargs: 0  # noqa: E731
    torch._C._ensureCUDADeviceGuardSet()
    with contextlib.ExitStack() as stack, stand_in(cap), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")

        def patch(target: object, **attributes: Any) -> None:
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(target, name, value, create=True))

        patch(FakeTensorMode, avoid_device_init=True)
        patch(
            torch.cuda,
            is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=zero,
            get_device_properties=lambda device=None: properties, _get_device_properties=lambda device=0: properties,
            get_device_capability=lambda device=None: divmod(cap, 10), get_device_name=lambda device=None: "none",
            get_rng_state=lambda device=None: torch.empty(16, dtype=torch.uint8), set_rng_state=nothing,
            synchronize=nothing, set_device=nothing, _lazy_init=nothing, _exchange_device=zero,
            _maybe_exchange_device=zero,
        )  # fmt: skip
        patch(
            torch._C,
            _cuda_cudaCachingAllocator_is_enabled=lambda: True, _cuda_getCurrentRawStream=zero, _cuda_getDevice=zero,
            _cuda_setDevice=nothing, _cuda_exchangeDevice=zero, _cuda_maybeExchangeDevice=zero,
        )  # fmt: skip
        patch(torch.version, cuda="13.0")
        patch(triton_helpers, set_driver_to_gpu=nothing)
        patch(PyCodeCache, load_by_key_path=classmethod(load))
        patch(CompiledFxGraph, __init__=compiled)
        # constants folded or paddings timed would be computed on the device; with a partition a reason is never given
        settings = {"joint_graph_constant_folding": False, "shape_padding": False, "graph_partition": False}
        stack.enter_context(
            inductor.patch({**settings, "triton.cudagraphs": True, "force_disable_caches": True, "compile_threads": 1})
        )
        _forget_triton()
        stack.callback(_forget_triton)
        yield


def _forget_triton() -> None:
    """What torch has cached of whether Triton and a GPU for it are there."""
    import torch.utils._triton

    for name, function in vars(torch.utils._triton).items():
        if name.startswith("has_triton") and hasattr(function, "cache_clear"):
            function.cache_clear()
