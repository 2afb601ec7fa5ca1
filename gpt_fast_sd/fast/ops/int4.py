"""int4 weights in PyTorch: blocks of 32 inputs of an output, each with a scale and a minimum; products as if unpacked.

These are the blocks of GGUF's Q4_1, and hold those of Q4_0, too. Also what is nearest to a weight in such blocks.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .int8 import as_integers

BLOCK = 32  # inputs that share a scale and a minimum
MOST = 15
AT_ONCE = 1 << 16  # numbers that are quantized or compared at once, in fp32: they stay in a cache
STEPS = (
    13,
    14,
    15,
    16,
    17,
    18,
)  # into how many a block's range is cut, of which 15 are there, before the least squares
LEAST = 1e-30  # the smallest "largest number" of a row, below which all of it is 0
LARGEST = 2.0**14  # to which a row's largest number is brought, or to less than twice that: fp16 ends at 65504


class Int4(NamedTuple):
    """A weight [O, I]: number i of a block is minimum + scale * (0 to 15), and `power` times that.

    numbers: two of 4 bits in a byte, numbers i and i + 16 of a block. blocks: its scale, and its minimum. power: of
    two, for each output, so that it changes no digit.
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
    wide = (whole.float() * scale + least) * held.power[:, None, None]  # products of 15 bits, and by powers, are exact
    out: Tensor = wide.to(dtype).flatten(-2)
    return out


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


def int4_by_sums(x: Tensor, held: Int4, bias: Tensor | None) -> Tensor:
    """x W' + bias of rows of x made integers of 15 bits with a scale for each: sums of a block, then its scale.

    What is kept of `x` is what `int8_linear` keeps. Blocks are added one by one, each first its numbers, then its
    minimum times the sum of x in it, in fp32, rounded once each (by plain C++, which fuses nothing, twice). This body
    is for comparison: it is slow.
    """
    whole, own = as_integers(x.reshape(-1, x.shape[-1]))  # [M, I], [M]
    parts = whole.double().unflatten(-1, (-1, BLOCK)).unbind(1)  # [M, 32] each
    numbers = torch.stack([held.numbers & 15, held.numbers >> 4], -1)  # [O, I / 2, 2]
    levels = numbers.unflatten(1, (-1, BLOCK // 2)).transpose(2, 3).flatten(2).double()  # [O, I / 32, 32]
    out = torch.zeros(len(whole), len(levels))
    for part, level, block in zip(parts, levels.unbind(1), held.blocks.double().unbind(1), strict=True):
        scale, least = block.unbind(-1)  # [O] each
        out = ((part @ level.t()) * scale + out.double()).float()
        out = (part.sum(-1)[:, None] * least + out.double()).float()
    out = out * (own[:, None] * held.power)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], len(levels))


def _slices(n_rows: int, n_columns: int) -> list[slice]:
    step = max(1, AT_ONCE // n_columns)
    return [slice(begin, begin + step) for begin in range(0, n_rows, step)]


def _quantized(rows: Tensor) -> Int4:
    """fp32 [R, I] -> blocks."""
    # a power of two for each row, so that fp16 scales have all their digits, those of blocks that lie beside far larger
    # ones, too
    power = rows.abs().amax(-1).clamp(min=LEAST).log2().floor().exp2() / LARGEST  # [R]
    w = (rows / power[:, None]).unflatten(-1, (-1, BLOCK))  # [R, I / 32, 32]
    least, largest = w.aminmax(dim=-1, keepdim=True)
    span, mean = (largest - least).clamp(min=LEAST), w.mean(-1, keepdim=True)
    best = scale = torch.zeros_like(least)
    minimum = least
    for steps in STEPS:
        slope, at_0, explained = _line(w, mean, least, span / steps)
        better = explained > best * (1 + 1e-6)
        best, scale = torch.where(better, explained, best), torch.where(better, slope, scale)
        minimum = torch.where(better, at_0, minimum)
    scale, minimum, _ = _line(w, mean, minimum, scale)
    blocks = torch.cat([scale, minimum], -1).half()  # [R, I / 32, 2]
    scale, minimum = blocks.float().split(1, -1)
    low, high = _nearest(w, minimum, scale).to(torch.uint8).unflatten(-1, (2, -1)).unbind(-2)  # [R, I / 32, 16] each
    return Int4((low | high << 4).flatten(-2), blocks, power)


def _nearest(w: Tensor, minimum: Tensor, scale: Tensor) -> Tensor:
    """The whole numbers that stand for w [..., 32], fp32; minimum and scale [..., 1]."""
    return ((w - minimum) / scale.clamp(min=LEAST)).round_().clamp_(0, MOST)


def _line(w: Tensor, mean: Tensor, minimum: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The line of least squares through (numbers that stand for w, w): slope, its value at 0, and what it explains.

    mean: of w. The more it explains, the smaller what is left.
    """
    q = _nearest(w, minimum, scale)
    mean_q = q.mean(-1, keepdim=True)
    variance = (q * q).mean(-1, keepdim=True) - mean_q * mean_q
    slope = ((q * w).mean(-1, keepdim=True) - mean_q * mean) / variance.clamp(min=1e-6)
    return slope, mean - slope * mean_q, slope * slope * variance
