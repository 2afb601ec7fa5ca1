"""C++ kernels for a CPU: built once by the compiler that torch.compile uses, kept in its cache, or built beforehand.

A wheel for a platform carries them built, for machines without a compiler, too: see scripts/maintain/build_wheel.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import re
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from .instruction_sets import InstructionSet, chosen, sets_here, without_own

BUILT = Path(__file__).with_name("built")  # in wheels for one platform
INCLUDED = re.compile(r'^#include "(\w+\.hpp)"\n', re.MULTILINE)  # a header beside this file
Asked = TypeVar("Asked", bound=Callable[..., bool])
Built = TypeVar("Built")


@functools.cache  # in torch 2.11 threads share Inductor's settings, including this one
def known_isa() -> dict[str, bool]:
    """Inductor's option not to build and load a program for each vector instruction set, 15 s on a CPU with AVX-512.

    Those programs test whether libtorch and the compiler support the sets. libtorch does if its own kernels use them,
    and any compiler that builds its headers does. (Sets later than AVX-512 are still tested by Inductor.)
    """
    from torch._inductor import config

    knows = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and config.cpp.vec_isa_ok is None
    return {"cpp.vec_isa_ok": True} if knows else {}


def vector_options() -> dict[str, bool | int]:
    """Inductor's options for the instruction set that is chosen.

    Named, the width of vectors is a part of what its cache of graphs is looked up by. Otherwise a process takes loops
    that were generated for vectors of another width, by another machine that shares the cache or under another
    ATEN_CPU_CAPABILITY, and writes past the end of its tensors.
    """
    bits = chosen().bits
    return {**known_isa(), **({"cpp.simdlen": bits} if bits else {})}


def constant_where_traced(function: Asked) -> Asked:
    """The function, whose result is a constant of any graph that is traced through it.

    torch.compiler.assume_constant_result does no more, but imports Dynamo, which takes longer than all that is ours
    together and which an engine that compiles nothing does not need.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def builds(source: Path, head_dim: int = 0) -> bool:
    """Whether this CPU and its compiler know the instructions; no more than read, as to build takes seconds.

    A compiler that is there and refuses a source is a warning. One that has read it is not asked again, by any process:
    that takes a second for each source.
    """
    if not for_any(source) and not chosen().own:
        return False
    if is_built(source, head_dim):
        return True
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    native = ("-march=native",) * (platform.system() != "Darwin")  # as torch does
    try:
        command = (get_cpp_compiler(), "-std=c++20", "-fsyntax-only", *native, *flags(source), "-x", "c++", "-")
        unit = text(source, head_dim)
        with contextlib.suppress(OSError):  # of a cache that cannot be, or be read
            if _noted(command, unit).exists():
                return True
        done = subprocess.run(command, input=unit, capture_output=True, text=True)
    except (InvalidCxxCompiler, OSError):
        return False
    if done.returncode:
        why = next(
            (line.strip() for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}"
        )
        warnings.warn(f"{command[0]} cannot build {source.name}, which is slower without: {why:.200}", stacklevel=2)
        return False
    with contextlib.suppress(OSError):
        (noted := _noted(command, unit)).parent.mkdir(parents=True, exist_ok=True)
        noted.touch()
    return True


def _noted(command: tuple[str, ...], unit: str) -> Path:
    """The file, beside what Inductor keeps, that says that this compiler knows this text on such a CPU."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compiler = Path(shutil.which(command[0]) or command[0]).stat()
    known = command, compiler.st_size, compiler.st_mtime_ns, [one.name for one in sets_here()], unit
    return Path(cache_dir()) / "gpt_fast_sd" / hashlib.sha256(repr(known).encode()).hexdigest()


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
    """Begin to build a source, if that was not done beforehand -> a function that waits for it.

    In a thread of its own: with one thread, torch's AsyncCompile.submit builds at once, under a lock that the build
    itself waits for.
    """
    if is_built(source, head_dim):
        return functools.partial(ctypes.CDLL, str(built_file(source, head_dim, chosen())))
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with config.patch(vector_options()):
        beside = ThreadPoolExecutor(1).submit
        loader: Callable[[], ctypes.CDLL] = CppCodeCache.load_async(
            text(source, head_dim), submit_fn=beside, extra_flags=flags(source)
        )
    return functools.partial(_built, source, loader)


def _built(source: Path, loader: Callable[[], ctypes.CDLL]) -> ctypes.CDLL:
    """The library. OSError with what the compiler says if it knows the source's syntax and fails all the same."""
    from torch._inductor.exc import CppCompileError

    try:
        return rebuilding(loader)
    except CppCompileError as error:
        output = str(error).partition("Output:")[2]
        said = [line.strip() for line in output.splitlines() if re.search("error|fatal|cannot", line, re.IGNORECASE)]
        why = said[0] if said else "it says nothing"
        doing = f"the compiler fails to build {source.name}, without which compile=False (--no-compile) runs"
        raise OSError(f"{doing}: {why:.200}") from None


def text(source: Path, head_dim: int = 0, instructions: InstructionSet | None = None) -> str:
    """The translation unit: defines, then a source with its headers in place of their #include lines.

    Without AMX tiles unless they are chosen. instructions: the chosen ones, if it is not for this process.
    """
    named = [f"#define HEAD_DIM {head_dim}\n"] if head_dim else []
    if not for_any(source) and (instructions or chosen()).name != "amx":
        named.append("#undef __AMX_BF16__\n#undef __AMX_INT8__\n")
    here = Path(__file__)
    unit = INCLUDED.sub(lambda line: here.with_name(line[1]).read_text("utf-8"), source.read_text("utf-8"))
    return "".join([*named, unit])


@functools.cache
def is_built(source: Path, head_dim: int = 0) -> bool:
    """Whether a wheel brought this source built for the chosen instruction set, and it can be loaded here."""
    file = built_file(source, head_dim, chosen())
    if not file.is_file():
        return False
    try:
        ctypes.CDLL(str(file))
    except OSError as error:  # of a system that is older than the one that built it, or torn
        warnings.warn(f"{file.name} cannot be loaded and is not used: {error}", stacklevel=2)
        return False
    return True


def built_file(source: Path, head_dim: int, instructions: InstructionSet) -> Path:
    """Where a wheel has what was built of this very text."""
    if for_any(source):
        instructions = without_own(instructions)
    mark = hashlib.sha256(text(source, head_dim, instructions).encode()).hexdigest()[:16]
    return BUILT / f"{source.stem}-{head_dim}-{instructions.name}-{mark}.so"


def for_any(source: Path) -> bool:
    """Whether a source is for any CPU, and compiled for the instruction set that is chosen."""
    return not source.stem.endswith("_avx512")


def flags(source: Path) -> tuple[str, ...]:
    """What the compiler is told beside torch's own flags, which are for this CPU."""
    return chosen().flags if for_any(source) else ()


@functools.cache
def begin_building(*sources: tuple[Path, int], header: bool) -> None:
    """Start a thread that builds what the first step waits for: the sources, each for a head dim.

    header: before them Inductor's precompiled header, for steps that it compiles: that takes 8 s at the first use of an
    Inductor on a machine, whatever is compiled first. If a build fails here, it fails again when it is needed, and the
    error is raised there.
    """
    known_isa()  # here, before any thread changes the settings that it reads

    def build() -> None:
        from torch._inductor import config
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        with contextlib.suppress(Exception), config.patch(vector_options()):
            nothing = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(const float* of) {}\n'
            if header:
                CppPythonBindingsCodeCache.load_pybinding(["const float*"], nothing)  # waited for first
            for source, head_dim in sources:
                if builds(source, head_dim):
                    library(source, head_dim)

    threading.Thread(target=build, daemon=True).start()
