"""Triton kernels compiled for a GPU that is not there, and what the compiler made of them.

Figures differ from one Triton version to the next: assert bounds (`assert_lean`), not equality.
"""

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import triton.backends.nvidia
from triton.compiler import CompiledKernel

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
# bytes of shared memory that one SM has (vendor's figures); each block on it takes a KiB more than it requests
SM_SHARED = {cap: kib << 10 for cap, kib in
             {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}.items()}  # fmt: skip
RESERVE = 1 << 10
SHARED_LIMIT = {cap: shared - RESERVE for cap, shared in SM_SHARED.items()}  # bytes that one block may have
OPCODES = {"hmma": "HMMA", "hgmma": "HGMMA", "utcmma": r"UTC\w*MMA", "ldgsts": "LDGSTS", "spills": "LDL|STL"}
SM_REGISTERS, SM_WARPS, SM_TENSOR_COLUMNS = 65_536, 48, 512  # warps: the fewest that any of them holds


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs, and which instructions it has; ptx and sass are its text in full."""

    warps: int  # per block
    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes of dynamic shared memory per block
    hmma: int  # tensor core products of a warp
    hgmma: int  # of four warps together (sm_90)
    utcmma: int  # of a whole block, in tensor memory (sm_100)
    tensor_columns: int  # of tensor memory per block (sm_100)
    ldgsts: int  # asynchronous copies from global to shared memory
    spills: int  # loads and stores of registers that did not fit
    ptx: str = field(repr=False)
    sass: str = field(repr=False)

    def count(self, opcodes: str) -> int:
        """Instructions whose first word is one of these, told as a regular expression."""
        return len(re.findall(rf"\b(?:{opcodes})\b", self.sass))

    @property
    def loops(self) -> list[list[str]]:
        """The instructions of each loop without a loop inside, in their order in the binary."""
        code: list[str] = []
        labels: dict[str, int] = {}
        spans: list[tuple[int, int]] = []
        for line in self.sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                code.append(instruction[1])
                jump = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", instruction[1])
                if jump and labels.get(jump[1], len(code)) < len(code) - 1:  # backwards; to itself: the end's trap
                    spans.append((labels[jump[1]], len(code)))
        # a jump into a loop from behind it is no loop's: it returns from code that is set apart since it seldom runs
        spans = [a for a in spans if not any(b[0] < a[0] < b[1] < a[1] for b in spans)]
        inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
        return [code[first:end] for first, end in inner]

    def blocks(self, cap: int) -> int:
        """How many blocks an SM of sm_<cap> holds at a time."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        most = [SM_SHARED[cap] // (self.shared + RESERVE), SM_REGISTERS // registers, SM_WARPS // self.warps]
        if self.tensor_columns:
            most.append(SM_TENSOR_COLUMNS // self.tensor_columns)
        return min(most)


@functools.cache  # shapes share kernels
def inspect_kernel(kernel: CompiledKernel) -> Compiled:
    """Read the binary of a compiled kernel with the tools that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "-res-usage", cubin.name)
        sass = _run("nvdisasm", "-c", "-ndf", cubin.name)  # the code alone, without looking into what flows where
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used, usage
    meta, counted = kernel.metadata, {name: len(re.findall(rf"\b(?:{one})\b", sass)) for name, one in OPCODES.items()}
    memory = {"shared": meta.shared, "tensor_columns": getattr(meta, "tmem_size", 0) or 0, "stack": int(used[2])}
    text = {"ptx": kernel.asm["ptx"], "sass": sass}
    return Compiled(warps=meta.num_warps, registers=int(used[1]), **memory, **counted, **text)


def assert_lean(compiled: Compiled, cap: int, *, overlaps: bool = True) -> None:
    """No register is spilled, products overlap, unless each is read at once, and a block's memory suffices."""
    assert compiled.stack == compiled.spills == 0, compiled
    if overlaps:
        assert_overlapping(compiled)
    assert_fits(compiled, cap)


def assert_overlapping(compiled: Compiled) -> None:
    """Products of Hopper do not wait each for the one before, of which ptxas would warn (C7515)."""
    assert 2 * len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", compiled.sass)) <= compiled.hgmma


def assert_fits(compiled: Compiled, cap: int) -> None:
    """A block gets the shared memory that it requests, and the columns of tensor memory."""
    assert compiled.shared <= SHARED_LIMIT[cap], compiled
    assert compiled.tensor_columns <= SM_TENSOR_COLUMNS, compiled


def assert_occupancy(compiled: Compiled, cap: int, wanted: int) -> None:
    """An SM holds as many blocks as the table says, of SMs with 100 KiB of shared memory one."""
    wanted = min(wanted, 1) if SM_SHARED[cap] <= 100 << 10 else wanted
    assert compiled.blocks(cap) >= wanted, f"{compiled.blocks(cap)} of {wanted} blocks an SM of sm_{cap}: {compiled}"


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
