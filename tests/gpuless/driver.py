"""A CUDA driver that is not there: calls of Triton kernels compile what they would launch, and launch nothing.

Tests go through the real call path so: under `stand_in(90) as launches` and FakeTensorMode, call the wrapper with
tensors on "cuda", then look at `launches[0].grid`, `.kwargs` and `.compiled`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tests.gpuless.aot import SHARED_LIMIT, Compiled, inspect_kernel


@dataclass(frozen=True)
class Launch:
    """One launch that did not happen: its kernel, its grid, and all arguments and options by name."""

    name: str
    grid: tuple[int, ...]
    kwargs: dict[str, Any]
    kernel: CompiledKernel

    @functools.cached_property
    def compiled(self) -> Compiled:
        return inspect_kernel(self.kernel)


class StandIn(DriverBase):
    """Answers as the driver of one GPU with sm_<cap> would; its launcher does nothing."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.utils = self
        self.get_current_stream: Callable[..., int] = lambda device=None: 0
        # A kernel keeps what it compiled by the number of the device: each target has a number, so none gets another's.
        self.get_current_device: Callable[[], int] = lambda: cap
        self.set_current_device: Callable[[int], None] = lambda device: None
        self.get_device_capability: Callable[..., tuple[int, int]] = lambda device=None: divmod(cap, 10)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cap, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda fn, quantiles=(0.5,), **options: [1.0 for _ in quantiles]

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self.cap], "multiprocessor_count": 132, "warpSize": 32,
                "max_num_regs": 65536, "max_threads_per_sm": 2048, "mem_clock_rate": 0, "mem_bus_width": 0,
                "sm_clock_rate": 0}  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024  # module, function, registers, spills, threads a block may have


@contextlib.contextmanager
def stand_in(cap: int) -> Iterator[list[Launch]]:
    """Give the list of all launches that happen inside, in order; every one is compiled for sm_<cap>."""
    launches: list[Launch] = []
    run = JITFunction.run

    def recorded(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel:
        kernel = run(self, *args, grid=grid, warmup=warmup, **kwargs)
        named = self.signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k in self.arg_names})
        named.apply_defaults()
        every = named.arguments | kwargs
        launches.append(Launch(self.__name__, tuple(grid(every) if callable(grid) else grid), every, kernel))
        return kernel

    before = driver._active
    driver.set_active(StandIn(cap))
    try:
        with mock.patch.object(JITFunction, "run", recorded), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # to see what it divides by
            yield launches
    finally:
        driver._active = before
