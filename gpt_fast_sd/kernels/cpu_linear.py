"""Products of few rows on a CPU: weights held once, packed for cpu_linear.cpp, behind a torch operator.

A library packs the weights again in every call, or reads them with a horizontal sum per row; packed once, a product
reads each weight from memory a single time, and a row's last bits depend neither on other rows nor on threads.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from . import cpu as attention
from . import cpu_sampling as sampling
from .cpu_build import builds, library

SOURCE = Path(__file__).with_name("cpu_linear.cpp")
BF16 = torch.bfloat16
LANES, DEPTH = 32, 32  # outputs and inputs of a block; both sizes of a packed weight are multiples of them

_library = torch.library.Library("gpt_fast_sd", "FRAGMENT")
_library.define("cpu_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.define("cpu_swiglu(Tensor x, Tensor packed) -> Tensor")


def cpu_kernels(head_dim: int, vocab_size: int = 0) -> tuple[tuple[Path, int], ...]:
    """The sources that `begin_building` builds for a model, each with its head dim."""
    own = [(attention.SOURCE, head_dim)] if head_dim in attention.HEAD_DIMS else []
    drawn = [(sampling.SOURCE, 0)] if vocab_size >= sampling.LEAST_VOCABULARY else []
    return (*own, (SOURCE, 0), *drawn)


def packable(weight: Tensor) -> bool:
    """Whether the kernel serves a weight [O, I] of this dtype, device and shape, and can be built here."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    return not weight.shape[0] % LANES and not weight.shape[1] % DEPTH and builds(SOURCE)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + bias: bf16 x [..., I], packed [O, I], bias [O] -> bf16 [..., O]; TypeError for other dtypes."""
    out: Tensor = torch.ops.gpt_fast_sd.cpu_linear(x, packed, bias)
    return out


def packed_swiglu(x: Tensor, packed: Tensor) -> Tensor:
    """silu(gate) * up, whose rows alternate in packed [2 * F, I]: bf16 x [..., I] -> bf16 [..., F].

    Computed from fp32 sums; TypeError for other dtypes.
    """
    out: Tensor = torch.ops.gpt_fast_sd.cpu_swiglu(x, packed)
    return out


def packed_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows of a packed weight by their numbers: packed [O, I], int64 rows [...] -> [..., I]"""
    inside = rows % LANES
    found: Tensor = _blocks(packed)[rows // LANES, :, inside // 16, :, inside % 16]  # [..., I / 32, 16, 2]
    return found.flatten(-3)


def pack(weight: Tensor) -> Tensor:
    """[O, I] -> the same shape, as [O / 32, I / 32, 2, 16, 16, 2]: blocks of 32 outputs and inputs, inputs by pairs."""
    n_out, n_in = weight.shape
    pairs = weight.contiguous().view(torch.int32).view(n_out // LANES, 2, 16, n_in // DEPTH, 16)
    return pairs.permute(0, 3, 1, 4, 2).contiguous().view(weight.dtype).view(n_out, n_in)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return _blocks(packed).permute(0, 2, 4, 1, 3, 5).reshape(packed.shape)


def _blocks(packed: Tensor) -> Tensor:
    n_out, n_in = packed.shape
    return packed.view(n_out // LANES, n_in // DEPTH, 2, 16, 16, 2)


@functools.cache
def _kernel() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    kernel = library(SOURCE)().linear_cpu
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes, kernel.restype = [pointer] * 4 + [size] * 4 + [ctypes.c_int] * 2, None
    return kernel


def _product(x: Tensor, packed: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    # in a step with a single row, this Python code takes longer than the product of a small weight
    if x.dtype is not BF16 or packed.dtype is not BF16 or not packed.is_contiguous():
        raise TypeError(f"packed weights are contiguous bf16 and multiply bf16, got {packed.dtype} and {x.dtype}")
    if bias is not None and bias.dtype is not BF16:
        raise TypeError(f"the bias of packed weights is bf16, got {bias.dtype}")
    n_out, n_in = packed.shape
    if x.shape[-1] != n_in:
        raise ValueError(f"packed weights of {n_in} inputs need rows of {n_in} numbers, got {tuple(x.shape)}")
    rows, apart = x, n_in  # [M, I], from one row to the next
    if not x.is_contiguous():
        rows = x.reshape(-1, n_in)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        apart = rows.stride(0)
    out = torch.empty((*x.shape[:-1], n_out // 2 if gated else n_out), dtype=BF16)
    _kernel()(
        rows.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        rows.numel() // n_in, n_in, n_out, apart, gated, torch.get_num_threads(),
    )  # fmt: skip
    return out


@torch.library.impl(_library, "cpu_linear", "CPU")
def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, packed, bias, False)


@torch.library.impl(_library, "cpu_swiglu", "CPU")
def _swiglu(x: Tensor, packed: Tensor) -> Tensor:
    return _product(x, packed, None, True)


@torch.library.register_fake("gpt_fast_sd::cpu_linear", lib=_library)  # type: ignore[untyped-decorator]
def _linear_fake(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@torch.library.register_fake("gpt_fast_sd::cpu_swiglu", lib=_library)  # type: ignore[untyped-decorator]
def _swiglu_fake(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0] // 2)
