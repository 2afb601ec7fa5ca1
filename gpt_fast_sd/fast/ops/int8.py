"""Products with int8 weights: on a CPU rows are made integers, too, whose sums are the same in any order.

On CUDA it is an operator whose body is Triton (triton/int8.py), and rows stay as they are.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.build import constant_where_traced
from .choice import triton_serves

FLOAT8 = torch.float8_e4m3fn
MOST = 127  # the largest magnitude: -128 is not used, so that what is quantized is symmetric
LARGEST = {torch.int8: MOST, FLOAT8: 448.0}
LEAST = 1e-30  # the smallest "largest value" of a row, below which all of it is 0
EXACT = 1024  # products of two int8 whose sum fp32 holds exactly
# Numbers of a row beyond which Inductor makes three kernels, of 16 rows of 14,336 in 8 us on an H200; and those up to
# which one has the registers.
LONG, LONGEST = 8192, 2**15
ROWS_AT_ONCE = 1024  # of a weight, which are quantized in fp32
# More rows than these, a prompt's, are multiplied with a copy of the weight that a library takes. By what bounds both,
# not timed: tiles of 64 rows issue at most some 390 TFLOP/s on Hopper, so M rows take 2 M / 390e12 s for each weight; a
# copy is 3 bytes read and written, and a library's product 2 M / 600e12 s. At 85 % of the bandwidth both are equal at
# some 400 rows on an H200, 580 on an H100; half of that, as a library may be faster and a prompt's chunk has 2,048.
MOST_TILED = 256


def quantize_rows(weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """[O, I] -> int8 [O, I] and fp32 [O]: their product is as near as one scale for each row comes, ties to even.

    dtype: e4m3 in place of int8.
    """
    rows, scale = torch.empty_like(weight, dtype=dtype), weight.new_empty(len(weight), dtype=torch.float32)
    for begin in range(0, len(weight), ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        rows[some], scale[some] = scaled(weight[some], dtype)
    return rows, scale


def scaled(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., I] all at once, see quantize_rows: [..., I] and fp32 [...]."""
    wide = rows.float()
    scale = wide.abs().amax(-1).clamp(min=LEAST) / LARGEST[dtype]
    numbers = wide * scale.reciprocal()[..., None]
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scale


def float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, I] in e4m3 [M, I] and a scale for each, fp32 [M]; long ones on CUDA in one kernel."""
    if LONG < rows.shape[1] <= LONGEST and triton_serves(rows.device):
        numbers, scale = _float8_rows(rows.contiguous())
        return numbers, scale
    return scaled(rows, FLOAT8)


@torch.library.custom_op("gpt_fast_sd::float8_rows", mutates_args=(), device_types="cuda")
def _float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    from ..triton import int8 as int8_triton

    return int8_triton.float8_rows(rows, LEAST)


@_float8_rows.register_fake
def _float8_rows_fake(rows: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows, dtype=FLOAT8), rows.new_empty(rows.shape[0], dtype=torch.float32)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + bias: x [..., I], int8 weight [O, I], fp32 scale [O] -> [..., O] in the dtype of x.

    On a CPU each row of x becomes integers of 15 bits with a scale of its own, in two planes of int8. A row that is not
    finite gives nothing that is.
    """
    if triton_serves(x.device):
        multiplied: Tensor = _int8_linear(x, weight, scale, bias)
        return multiplied
    integers, own = as_integers(x.reshape(-1, x.shape[-1]))  # [M, I], [M]
    upper = (integers + 64) >> 7  # -127 .. 127, and what is left is -64 .. 63
    planes = [plane.clamp(-MOST - 1, MOST).to(torch.int8) for plane in (upper, integers - (upper << 7))]
    sums = [_sums(plane, weight) for plane in planes]  # [M, O], exact before they are rounded
    out = (sums[0] * 128 + sums[1]) * (own[:, None] * scale)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


def as_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, I] as whole numbers of 15 bits, int32 [M, I], ties to even, times a scale for each, fp32 [M]."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=LEAST) / (MOST * 128)  # [M]
    return (wide * scale.reciprocal()[:, None]).round().to(torch.int32), scale


@torch.library.custom_op("gpt_fast_sd::int8_linear", mutates_args=(), device_types="cuda")
def _int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from ..triton import common as triton_common
    from ..triton import int8 as int8_triton

    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MOST_TILED:
        copy = torch.mul(weight, scale[:, None], out=torch.empty_like(weight, dtype=x.dtype))  # in one pass
        out = torch.nn.functional.linear(rows, copy, bias)
    else:
        out = int8_triton.linear(rows, weight, scale, bias, arch=triton_common.architecture())
    return out.view(*x.shape[:-1], len(weight))


@_int8_linear.register_fake
def _int8_linear_fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _sums(plane: Tensor, weight: Tensor) -> Tensor:
    """The products of integers: int8 [M, I], int8 [O, I] -> fp32 [M, O], rounded once."""
    if plane.device.type == "cpu" and not has_vnni():
        # there the library's products saturate at 16 bits; 1,024 products in fp32 are exact
        parts = zip(plane.split(EXACT, 1), weight.split(EXACT, 1), strict=True)
        return torch.stack([(a.float() @ b.float().t()).to(torch.int32) for a, b in parts]).sum(0).float()
    return torch._int_mm(plane, weight.t()).float()


@constant_where_traced
def has_vnni() -> bool:
    """Whether this CPU multiplies bytes exactly."""
    return bool(torch.cpu._is_vnni_supported())
