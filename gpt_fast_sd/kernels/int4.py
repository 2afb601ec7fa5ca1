"""int4 weights in PyTorch: blocks of 32 inputs of an output, each with a scale and a minimum; products as if unpacked.

These are the blocks of GGUF's Q4_1, and hold those of Q4_0, too. Also what is nearest to a weight in such blocks.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # inputs that share a scale and a minimum
MOST = 15
AT_ONCE = 1 << 16  # numbers that are quantized or compared at once, in fp32: they stay in a cache
# into how many steps a block's range is cut before the least squares: with fewer or more its largest numbers, or small
# ones, are farther off
STEPS = (15.0, 14.0, 14.5, 15.5, 16.0, 16.5, 17.0)
LEAST = 1e-30  # the smallest "largest number" of a row, below which all of it is 0


class Int4(NamedTuple):
    """A weight [O, I]: number i of a block is minimum + scale * (0 to 15), and `power` times that.

    numbers: two of 4 bits in a byte, numbers i and i + 16 of a block. blocks: its scale, and its minimum. power: of two,
    for each output, so that it changes no digit.
    """

    numbers: Tensor  # uint8 [O, I / 2]
    blocks: Tensor  # fp16 [O, I / 32, 2]
    power: Tensor  # fp32 [O]


def quantize_blocks(weight: Tensor) -> Int4:
    """[O, I] -> blocks of the least squared error among those tried; 32 must divide I."""
    n_out, n_in = weight.shape
    found = Int4(
        weight.new_empty(n_out, n_in // 2, dtype=torch.uint8),
        weight.new_empty(n_out, n_in // BLOCK, 2, dtype=torch.float16),
        weight.new_empty(n_out, dtype=torch.float32),
    )
    for rows in _slices(n_out, n_in):
        for whole, part in zip(found, _quantized(weight[rows].float()), strict=True):
            whole[rows] = part
    return found


def dequantize_blocks(held: Int4, dtype: torch.dtype) -> Tensor:
    """The weight that they stand for, each number rounded once: [O, I]"""
    low, high = held.numbers & 15, held.numbers >> 4  # [O, I / 2]
    whole = torch.stack([x.unflatten(-1, (-1, BLOCK // 2)) for x in (low, high)], -2).flatten(-2)  # [O, I / 32, 32]
    scale, least = held.blocks.float().split(1, -1)  # [O, I / 32, 1] each
    out = (whole.float() * scale + least).to(dtype).flatten(-2)  # a product of 15 bits is exact
    return out * held.power.to(dtype)[:, None]


def power_between(held: Int4, weight: Tensor) -> Tensor | None:
    """The power of two for each output by which the blocks are the weight [O, I], number by number: fp32 [O].

    None if they are not.
    """
    found = torch.ones_like(held.power)
    for rows in _slices(*weight.shape):
        own, theirs = dequantize_blocks(Int4(*(part[rows] for part in held)), weight.dtype), weight[rows]
        largest = own.abs().argmax(-1, keepdim=True)
        over, under = (x.gather(-1, largest).float() for x in (theirs, own))
        ratio = torch.where(under == 0, 1.0, over / under)  # [R, 1]
        if not ratio.isfinite().all() or not (ratio.frexp().mantissa == 0.5).all():
            return None
        if not (own * ratio.to(own.dtype)).equal(theirs):
            return None
        found[rows] = ratio[:, 0]
    return found


def int4_linear(x: Tensor, held: Int4, bias: Tensor | None) -> Tensor:
    """x W' + bias: x [..., I], W unpacked to the dtype of x -> [..., O] in that dtype."""
    return F.linear(x, dequantize_blocks(held, x.dtype), bias)


def _slices(n_rows: int, n_columns: int) -> list[slice]:
    step = max(1, AT_ONCE // n_columns)
    return [slice(begin, begin + step) for begin in range(0, n_rows, step)]


def _quantized(rows: Tensor) -> Int4:
    """fp32 [R, I] -> blocks."""
    # a power of two for each row, so that scales in fp16 have all their digits
    power = rows.abs().amax(-1).clamp(min=LEAST).log2().floor().exp2()  # [R]
    w = (rows / power[:, None]).unflatten(-1, (-1, BLOCK))  # [R, I / 32, 32], at most 2
    least, largest = w.aminmax(dim=-1, keepdim=True)
    span, mean = (largest - least).clamp(min=LEAST), w.mean(-1, keepdim=True)
    best = scale = torch.zeros_like(least)
    minimum = least
    for steps in STEPS:
        q = ((w - least) * (steps / span)).round_().clamp_(max=MOST)
        # the line of least squares through (q, w): the larger `explained`, the smaller what is left
        mean_q = q.mean(-1, keepdim=True)
        variance = (q * q).mean(-1, keepdim=True) - mean_q * mean_q
        slope = ((q * w).mean(-1, keepdim=True) - mean_q * mean) / variance.clamp(min=1e-6)
        explained = slope * slope * variance
        better = explained > best * (1 + 1e-6)
        best, scale = torch.where(better, explained, best), torch.where(better, slope, scale)
        minimum = torch.where(better, mean - slope * mean_q, minimum)
    blocks = torch.cat([scale, minimum], -1).half()  # [R, I / 32, 2]
    scale, minimum = blocks.float().split(1, -1)
    q = ((w - minimum) / scale.clamp(min=LEAST)).round_().clamp_(0, MOST).to(torch.uint8)
    low, high = q.unflatten(-1, (2, -1)).unbind(-2)  # [R, I / 32, 16] each
    return Int4((low | high << 4).flatten(-2), blocks, power)
