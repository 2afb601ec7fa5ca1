"""C++ kernels built for other CPUs than this one, for a wheel to carry: build.is_built finds them there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .build import BUILT, built_file, for_any, text
from .instruction_sets import IS_X86, SETS, InstructionSet, without_own
from .linear import cpu_sources

# what decides about bits is as torch has it: products and sums that are written apart are not fused
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-finite-math-only", "-ffp-contract=off")


class ToBuild(NamedTuple):
    """A source, its head dim or 0, and the instruction set to build it for."""

    source: Path
    head_dim: int
    instructions: InstructionSet

    @property
    def march(self) -> str:
        """The least CPU that has what it uses; kernels for any CPU need no more of AVX-512 than the first had."""
        return (without_own(self.instructions) if for_any(self.source) else self.instructions).march


def sets_of_this_kind() -> dict[str, InstructionSet]:
    """The instruction sets that CPUs of this kind may have, this one or not, by name."""
    return {one.name: one for one in SETS if one.march and (one.march == "armv8-a") != IS_X86}


def kernels_to_build(sets: Sequence[InstructionSet], head_dims: Sequence[int]) -> Iterator[ToBuild]:
    """All kernels for them, each once."""
    seen = set[Path]()
    for instructions in sets:
        for head_dim in head_dims:
            for source, own in cpu_sources(head_dim):
                file = built_file(source, own, instructions)
                if file not in seen and (for_any(source) or instructions.own):
                    seen.add(file)
                    yield ToBuild(source, own, instructions)


def build_kernel(job: ToBuild, package: Path) -> Path:
    """One library, for the copy of this package in a folder; ValueError with what the compiler says.

    It is linked to no OpenMP: torch brings one, the one that runs its own loops, to machines that have none, too.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    file = package / BUILT.name / built_file(*job).name
    file.parent.mkdir(exist_ok=True)
    compiler, unit = get_cpp_compiler(), file.with_suffix(".o")
    compiled = [compiler, *FLAGS, "-fopenmp", f"-march={job.march}", "-c", "-x", "c++", "-", "-o", str(unit)]
    for command, given in ((compiled, text(*job)), ([compiler, "-shared", str(unit), "-o", str(file)], "")):
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip()
            raise ValueError(f"{compiler} cannot build {job.source.name} for {job.instructions.name}: {said:.300}")
    unit.unlink()
    return file
