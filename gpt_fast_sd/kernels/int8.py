"""Products with int8 weights in PyTorch: rows are quantized as they come, and sums of integers have no order.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 127  # the largest magnitude: -128 is not used, so that what is quantized is symmetric
LEAST = 1e-30  # the smallest "largest value" of a row, below which all of it is 0
ROWS_AT_ONCE = 1024  # of a weight, which are quantized in fp32


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O, I] -> int8 [O, I] and fp32 [O]: their product is as near as one scale for each row comes, ties to even."""
    rows, scale = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), dtype=torch.float32)
    for begin in range(0, len(weight), ROWS_AT_ONCE):
        rows[begin : begin + ROWS_AT_ONCE], scale[begin : begin + ROWS_AT_ONCE] = _quantized(
            weight[begin : begin + ROWS_AT_ONCE]
        )
    return rows, scale


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + bias, each row of x quantized like one of W: x [..., I], int8 weight [O, I], fp32 scale [O] -> [..., O].

    A row that is not finite gives nothing that is.
    """
    rows, own = _quantized(x.reshape(-1, x.shape[-1]))  # [M, I], [M]
    sums = torch._int_mm(rows, weight.t())  # int32 [M, O]
    out = sums.float() * (own[:, None] * scale)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    scale = wide.abs().amax(-1).clamp(min=LEAST) / MOST
    return (wide * scale.reciprocal()[:, None]).round().clamp(-MOST - 1, MOST).to(torch.int8), scale
