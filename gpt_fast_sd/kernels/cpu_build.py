"""C++ kernels for a CPU: built once by the compiler that torch.compile uses, kept in its cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

COMMON = Path(__file__).with_name("cpu_common.cpp")
Asked = TypeVar("Asked", bound=Callable[..., bool])
Built = TypeVar("Built")


@functools.cache  # in torch 2.11 threads share Inductor's settings, including this one
def known_isa() -> dict[str, bool]:
    """Inductor's option not to build and load a program for each vector instruction set, 15 s on a CPU with AVX-512.

    Those programs test whether libtorch and the compiler support the sets. libtorch does if its own kernels use them,
    and any compiler that builds its headers does. (Sets later than AVX-512 are still tested by Inductor.)
    """
    from torch._inductor import config

    knows = torch.backends.cpu.get_cpu_capability() == "AVX512" and config.cpp.vec_isa_ok is None
    return {"cpp.vec_isa_ok": True} if knows else {}


def constant_where_traced(function: Asked) -> Asked:
    """The function, whose result is a constant of any graph that is traced through it.

    torch.compiler.assume_constant_result does no more, but imports Dynamo, which takes longer than all that is ours
    together and which an engine that compiles nothing does not need.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def builds(source: Path, head_dim: int = 0) -> bool:
    """Whether this CPU and its compiler know the instructions; no more than read, as to build takes seconds."""
    if not (torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()):  # none lacks but the latter
        return False
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    flags = "-std=c++20", "-fsyntax-only", *(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl", "bf16", "vnni"))
    try:
        command = (get_cpp_compiler(), *flags, "-x", "c++", "-")
        return not subprocess.run(command, input=text(source, head_dim), capture_output=True, text=True).returncode
    except (InvalidCxxCompiler, OSError):
        return False


def rebuilding(build: Callable[[], Built]) -> Built:
    """build(), and again without a library that cannot be loaded: what a process leaves that is killed while linking.

    Inductor takes whatever lies in its cache under the right name, so every later process would fail on that file.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    removed = set[Path]()
    while True:
        try:
            return build()
        except (ImportError, OSError) as error:
            said = re.match(r"(.+\.so): (?=file too short|invalid ELF header|cannot read|cannot map)", str(error))
            torn = Path(said[1]) if said else None
            if torn is None or torn in removed or not torn.is_relative_to(cache_dir()):
                raise
            torn.unlink(missing_ok=True)
            removed.add(torn)


@functools.cache
def library(source: Path, head_dim: int = 0) -> Callable[[], ctypes.CDLL]:
    """Begin to build a source -> a function that waits for it.

    In a thread of its own: with one thread, torch's AsyncCompile.submit builds at once, under a lock that the build
    itself waits for.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with config.patch(known_isa()):
        beside = ThreadPoolExecutor(1).submit
        loader: Callable[[], ctypes.CDLL] = CppCodeCache.load_async(text(source, head_dim), submit_fn=beside)
    return functools.partial(rebuilding, loader)


def text(source: Path, head_dim: int = 0) -> str:
    """A source behind what all begin with, for one head dim if it is for any, without tiles if they are not granted.

    A compiler knows what a CPU has, but not whether the system grants it to this process, which has to ask.
    """
    named = [f"#define HEAD_DIM {head_dim}\n"] if head_dim else []
    if not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        named.append("#undef __AMX_BF16__\n#undef __AMX_INT8__\n")
    return "".join([*named, *(path.read_text(encoding="utf-8") for path in (COMMON, source))])


@functools.cache
def begin_building(*sources: tuple[Path, int]) -> None:
    """Start a thread that builds what the first compiled step waits for, while Python traces that step.

    That is Inductor's precompiled header, which takes 8 s at the first use of an Inductor on a machine, whatever is
    compiled first, and the sources, each for a head dim. If a build fails here, it fails again when it is needed, and
    the error is raised there.
    """
    known_isa()  # here, before any thread changes the settings that it reads

    def build() -> None:
        from torch._inductor import config
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        with contextlib.suppress(Exception), config.patch(known_isa()):
            nothing = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(const float* of) {}\n'
            CppPythonBindingsCodeCache.load_pybinding(["const float*"], nothing)  # waited for first
            for source, head_dim in sources:
                if builds(source, head_dim):
                    library(source, head_dim)

    threading.Thread(target=build, daemon=True).start()
