"""int4 weights for CUDA: a scale and a zero for 128 inputs of an output, and tiles that warps multiply as they lie.

A product of few rows is an operator whose body is Triton (triton/int4.py). Many rows take a bf16 copy and a library.

Shapes: M rows, I inputs, O outputs, G = I / 128 groups, S parts of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .choice import triton_serves
from .int8 import MOST_TILED

GROUP = 128  # inputs that share a scale and a zero
TILE = 64  # outputs of a tile
BYTES = TILE * GROUP // 2
MIDDLE = 8  # the number that stands for a group's zero
# Whose digits the numbers of an output and of an input are, the highest first: warp, upper or lower rows of a fragment,
# lane; half of the group (which nibble), then pairs of 16 inputs, lane, pair
OUTPUT, INPUT = (4, 2, 8), (2, 2, 2, 2, 4, 2)
# Of (tile, output, group, input) the digits that come first in memory: a lane's 16 bytes are those it multiplies
ORDER = (5, 0, 4, 6, 1, 3, 9, 7, 2, 8, 10)
# Inputs are split so that an SM of an H100 has more than one program of few outputs. Of w_in of an 8B model, where it
# has three, int8's kernel reads 2.5 TB/s on an H200, of fewer outputs 1.2. Inductor adds up to three parts where they
# are read, and more of them beforehand.
MANY_OUTPUTS, MOST_PARTS = 28672, 3


class Int4Tiles(NamedTuple):
    """A weight [O, I]: an input's number is zero + scale * (-8 to 7)."""

    numbers: Tensor  # uint8 [O / 64, G, 4096], those of a group's first half in the lower nibbles
    scale_and_zero: Tensor  # bf16 [G, O, 2]


def tiled(numbers: Tensor) -> Tensor:
    """0 to 15, uint8 [O, I] -> [O / 64, G, 4096]"""
    low, high = numbers.view(-1, *OUTPUT, numbers.shape[1] // GROUP, *INPUT).permute(ORDER).unbind(0)
    return (low | high << 4).reshape(len(numbers) // TILE, -1, BYTES)


def untiled(tiles: Tensor) -> Tensor:
    """What `tiled` has laid out so: uint8 [O, I]"""
    n_tiles, n_groups = tiles.shape[:2]
    digits = (1, *OUTPUT, 1, *INPUT)
    sizes = [digits[axis] for axis in ORDER]
    sizes[1:3] = n_tiles, n_groups
    parts = torch.stack([tiles & 15, tiles >> 4]).view(sizes)
    return parts.permute([ORDER.index(axis) for axis in range(len(ORDER))]).reshape(n_tiles * TILE, n_groups * GROUP)


def dequantize_tiles(held: Int4Tiles) -> Tensor:
    """The weight that they stand for, each number rounded once: bf16 [O, I]"""
    if triton_serves(held.numbers.device):
        out: Tensor = torch.ops.gpt_fast_sd.int4_untile(*held)
        return out
    return written_out(*held)


def written_out(numbers: Tensor, scale_and_zero: Tensor) -> Tensor:
    """The same in PyTorch."""
    scale, zero = scale_and_zero.float().transpose(0, 1)[..., None].unbind(2)  # [O, G, 1] each
    wide: Tensor = untiled(numbers).float().unflatten(1, (-1, GROUP)) - MIDDLE  # [O, G, 128]
    return (wide * scale + zero).flatten(1).bfloat16()


def int4_tiles_linear(x: Tensor, held: Int4Tiles, ones: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + bias: bf16 x [..., I] -> bf16 [..., O]; of few rows W is not rounded, on CUDA. ones: bf16 [64, 128]."""
    rows, n_out = x.reshape(-1, x.shape[-1]), held.scale_and_zero.shape[1]
    if not triton_serves(x.device) or _is_many(rows.shape[0]):
        return F.linear(x, dequantize_tiles(held), bias)
    parts: Tensor = torch.ops.gpt_fast_sd.int4_tiles_linear(rows, *held, ones)
    # they are added here, so that Inductor does it in the kernel that reads the result
    out = parts.sum(0) if parts.shape[0] > 1 else parts[0]
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], n_out)


def _is_many(n_rows: int) -> bool:
    """Whether it is more than MOST_TILED whatever it is: a verification's is a symbol where that is compiled."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(n_rows > MOST_TILED)


def parts_of(n_out: int, n_in: int) -> int:
    """Into how many parts inputs are split: by the weight's sizes alone, as a row's sums depend on it."""
    return max(1, min(MANY_OUTPUTS // n_out, MOST_PARTS, n_in // GROUP))


@torch.library.custom_op("gpt_fast_sd::int4_tiles_linear", mutates_args=(), device_types="cuda")
def _int4_tiles_linear(x: Tensor, numbers: Tensor, scale_and_zero: Tensor, ones: Tensor) -> Tensor:
    from ..triton import common as triton_common
    from ..triton import int4 as int4_triton

    out: Tensor = int4_triton.linear(
        x, numbers, scale_and_zero, ones, parts_of(TILE * len(numbers), x.shape[1]), arch=triton_common.architecture()
    )
    return out


@_int4_tiles_linear.register_fake
def _int4_tiles_linear_fake(x: Tensor, numbers: Tensor, scale_and_zero: Tensor, ones: Tensor) -> Tensor:
    n_out = scale_and_zero.shape[1]
    return x.new_empty(parts_of(n_out, x.shape[1]), x.shape[0], n_out, dtype=torch.float32)


@torch.library.custom_op("gpt_fast_sd::int4_untile", mutates_args=(), device_types="cuda")
def _int4_untile(numbers: Tensor, scale_and_zero: Tensor) -> Tensor:
    from ..triton import int4 as int4_triton

    out: Tensor = int4_triton.untile(numbers, scale_and_zero)
    return out


@_int4_untile.register_fake
def _int4_untile_fake(numbers: Tensor, scale_and_zero: Tensor) -> Tensor:
    n_groups, n_out, _ = scale_and_zero.shape
    return scale_and_zero.new_empty(n_out, n_groups * GROUP)
