"""The instruction sets that the kernels of a CPU are written or compiled for, and which of them this process uses."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
VARIABLE = "GPT_FAST_SD_CPU"  # names the set to use, in place of the best one


@dataclass(frozen=True)
class InstructionSet:
    """What a CPU has beyond the least of its kind.

    has: whether this CPU, and its system, have it. own: whether kernels are written for it; others get those for any
    CPU. A compiler is told to use all that this CPU has, but for what the flags take back. bits: of the vectors for
    which Inductor generates code, 1: none; None: as it finds. march: the least CPU that has it, for compilers that
    build for others than the one they run on.
    """

    name: str
    march: str
    has: Callable[[], bool]
    flags: tuple[str, ...] = ()
    bits: int | None = None
    own: bool = False


def _has_avx512_bf16() -> bool:
    # no CPU has the former alone
    return torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()


def _has_amx() -> bool:
    # a CPU may have tiles, and the system not grant them to this process, which has to ask
    return _has_avx512_bf16() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


@functools.cache
def is_intel() -> bool:
    """Whether this is an Intel CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text(errors="replace")


SETS = (  # the best first
    InstructionSet("amx", "sapphirerapids", _has_amx, own=True, bits=512),
    InstructionSet("avx512_bf16", "cooperlake", _has_avx512_bf16, own=True, bits=512),
    InstructionSet("avx512", "skylake-avx512", lambda: torch.cpu._is_avx512_supported(), bits=512),
    InstructionSet("avx2", "haswell", lambda: torch.cpu._is_avx2_supported(), ("-mno-avx512f",), 256),
    InstructionSet("neon", "armv8-a", lambda: platform.machine().lower() in ("aarch64", "arm64")),
    InstructionSet("plain", "x86-64" if IS_X86 else "", lambda: True, ("-mno-avx",) if IS_X86 else (), 1),
)


def without_own(instructions: InstructionSet) -> InstructionSet:
    """The set for which kernels for any CPU are compiled where these instructions are: all of AVX-512 shares one."""
    return next(one for one in SETS if not one.own) if instructions.own else instructions


def sets_here() -> tuple[InstructionSet, ...]:
    """Those that this CPU and its system have, the best first."""
    return tuple(one for one in SETS if one.has())


def widens() -> bool:
    """Whether kernels had better widen bf16 and multiply fp32 than use this CPU's dot products of bf16.

    So on Intel's without tiles, measured with one thread: products of 12 layers of SmolLM2 take 1.1x less with one row
    and 1.3x with 40, attention to 7,500 keys of 5 tokens of a model with 3 query heads a kv head 1.6x.
    """
    return chosen().name == "avx512_bf16" and is_intel()


def chosen() -> InstructionSet:
    """The set that kernels are built for: the one that the environment names, else the best.

    ValueError if it names none that is here.
    """
    return _best_or(os.environ.get(VARIABLE))


@functools.cache
def _best_or(asked: str | None) -> InstructionSet:
    here = sets_here()
    if not asked:
        return here[0]
    for one in here:
        if one.name == asked:
            return one
    raise ValueError(f"{VARIABLE} is {asked!r}: this CPU has {', '.join(one.name for one in here)}")
