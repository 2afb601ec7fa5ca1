# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Shared by the Triton kernels: which GPU they are built for, how strides are passed, limits of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def architecture() -> int | str:
    """The compute capability that kernels are built for, 90 for Hopper; a text if it is not an NVIDIA GPU."""
    arch: int | str = triton.runtime.driver.active.get_current_target().arch
    return arch


def family(arch: int | str) -> int:
    """Whose row of the tables applies: 90 if a thread block may use 227 KiB of shared memory, else 80.

    ValueError if no row applies: a capability below 8.0, and GPUs of other makers ("gfx942").
    """
    if not isinstance(arch, int) or arch < 80:
        raise ValueError(f"the kernels are for NVIDIA GPUs of compute capability 8.0 and later, not for {arch!r}")
    return 90 if arch in (90, 100, 103) else 80


def strides(x: Tensor, n: int) -> list[int]:
    """Strides of the first n dims; 0 for a dim of one entry, whose arbitrary stride would build another kernel."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:n], x.stride(), strict=False)]


@triton.jit
def row_limits(p_pos, o_t, m_r, n_keys, stride_t):
    """The last key that each row reads, -1 if it reads none."""
    b_pos = tl.load(p_pos + o_t.to(tl.int64) * stride_t, mask=m_r, other=-1)
    return tl.where(b_pos < n_keys, b_pos, -1).to(tl.int32)
