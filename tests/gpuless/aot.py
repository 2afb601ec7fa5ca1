"""Triton kernels compiled for a GPU that is not there, and what the compiler made of them.

Figures differ from one Triton version to the next: assert bounds (`assert_lean`), not equality.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that one block may have (vendor's figures)


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs, and which instructions it has; ptx and sass are its text in full."""

    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes of dynamic shared memory per block
    hmma: int  # tensor core products of a warp
    hgmma: int  # of four warps together (sm_90)
    ldgsts: int  # copies from global to shared memory that nobody waits for
    spills: int  # loads and stores of registers that did not fit
    ptx: str = field(repr=False)
    sass: str = field(repr=False)


def compile_kernel(
    fn: triton.JITFunction,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    cap: int,
    num_warps: int,
    num_stages: int,
    aligned: Collection[str] = (),
) -> Compiled:
    """Compile fn for sm_<cap>.

    signature: type of each argument that is passed ("*bf16", "i32", "fp32"); constants: value of each constexpr, and
    of an argument that a launch would specialise on (None, 1). aligned: arguments that 16 divides, pointers above all.
    """
    names = fn.arg_names
    assert set(names) == {*signature, *constants} and not {*signature} & {*constants}
    source = ASTSource(
        fn=fn,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return inspect_kernel(triton.compile(source, target=GPUTarget("cuda", cap, 32), options=options))


def inspect_kernel(kernel: CompiledKernel) -> Compiled:
    """Read the binary of a compiled kernel with the tools that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "-res-usage", cubin.name)
        sass = _run("nvdisasm", cubin.name)
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used, usage

    def count(opcodes: str) -> int:
        return len(re.findall(rf"\b(?:{opcodes})\b", sass))

    return Compiled(
        registers=int(used[1]),
        stack=int(used[2]),
        shared=kernel.metadata.shared,
        hmma=count("HMMA"),
        hgmma=count("HGMMA"),
        ldgsts=count("LDGSTS"),
        spills=count("LDL|STL"),
        ptx=kernel.asm["ptx"],
        sass=sass,
    )


def assert_lean(compiled: Compiled, cap: int) -> None:
    """No register is spilled, and the shared memory of a block suffices."""
    assert compiled.stack == compiled.spills == 0, compiled
    assert compiled.shared <= SHARED_LIMIT[cap], compiled


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
