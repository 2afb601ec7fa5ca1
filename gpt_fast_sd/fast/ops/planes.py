"""bf16 weights in two planes of a byte: the upper one by itself is the same weights in e4m3, both are each bit of them.

A number's 15 bits below the sign are an integer b, exponent << 7 | fraction. Of a row, the weights of one output, E is
the largest exponent, base = (E - 14) << 7, and each number is held as

    b - base = (u << 4) + n - 8 - (k << 7),    upper = sign << 7 | u,    lower = k << 4 | n,

k 0 for all within 14 binades of E, and of the others how many binades below that; 15 is zero. So u is the magnitude of
the e4m3 that is nearest to the number over the row's scale, 2 ** (E - 134): what is rounded up to the next binade
carries into the exponent by itself, and u is at most 15 << 3, which is no NaN. Numbers below 2 ** -13 of the largest
are read from the upper plane as some number that is not above that.

A row that holds a number more than 28 binades below its largest, a denormal, an infinity, a NaN or nearly infinity
is kept whole beside the planes. A draft reads it from the upper one nevertheless, with zeros for what is too small, or
as zeros alone where it is not finite or nearly so.

Shapes: M rows, I inputs, O outputs, W outputs that are kept whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .choice import triton_serves
from .int8 import MOST_TILED

AT_ONCE = 2**18  # numbers, which are split or joined in integers of 32 bits
LEAST_EXPONENT = 17  # E of a row of smaller numbers, so that all that is read of it is normal or zero
LARGEST_EXPONENT = 254  # of such a number a draft might read infinity, as what is rounded up is
ZERO = 15  # k of zero
BIAS = 134  # a row's scale is 2 ** (E - 134): bf16's bias of exponents, and e4m3's


class Planes(NamedTuple):
    """A bf16 weight [O, I] in planes."""

    upper: Tensor  # uint8 [O, I]
    lower: Tensor  # uint8 [O, I]
    scale: Tensor  # fp32 [O], powers of two
    rows: Tensor  # int64 [W]: the outputs that are kept whole
    whole: Tensor  # bf16 [W, I]


def split(weight: Tensor) -> Planes:
    """Planes of a bf16 weight [O, I]."""
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    scale = weight.new_empty(len(weight), dtype=torch.float32)
    is_held = weight.new_empty(len(weight), dtype=torch.bool)
    for some in _parts(weight):
        upper[some], lower[some], scale[some], is_held[some] = _split(weight[some])
    rows = (~is_held).nonzero()[:, 0]
    return Planes(upper, lower, scale, rows, weight[rows])


def fits_planes(weight: Tensor) -> bool:
    """Whether no row of a bf16 weight [O, I] would be kept whole."""
    return all(bool(_split(weight[some])[3].all()) for some in _parts(weight))


def _split(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some rows of split, and whether the planes hold each."""
    bits = weight.contiguous().view(torch.int16).int()
    b = bits & 0x7FFF
    largest = b.amax(1, keepdim=True) >> 7
    e = largest.clamp(min=LEAST_EXPONENT)  # [O, 1]
    v = b - (e - 14 << 7)
    k = (-(v >> 7)).clamp(min=0)
    is_small = largest < LARGEST_EXPONENT  # [O, 1]
    is_held = (((k < ZERO) & (b >= 128)) | (b == 0)).all(1) & is_small[:, 0]
    is_zero = (b == 0) | (k >= ZERO) | ~is_small
    k = k.masked_fill(is_zero, ZERO)
    t = (v + (k << 7)).masked_fill_(is_zero, 0) + 8
    upper, lower = (bits >> 8 & 0x80) | t >> 4, k << 4 | t & 15
    return upper.to(torch.uint8), lower.to(torch.uint8), torch.exp2((e[:, 0] - BIAS).float()), is_held


def join(held: Planes) -> Tensor:
    """The weight that planes hold, bit for bit: bf16 [O, I]."""
    out = torch.empty_like(held.upper, dtype=torch.bfloat16)
    for some in _parts(out):
        upper, lower = held.upper[some].int(), held.lower[some].int()
        e = (held.scale[some].view(torch.int32) >> 23) - 127 + BIAS
        k = lower >> 4
        b = (e - 14 << 7)[:, None] + ((upper & 0x7F) << 4) + (lower & 15) - 8 - (k << 7)
        bits = b.masked_fill_(k == ZERO, 0) | (upper & 0x80) << 8
        out[some] = bits.to(torch.int16).view(torch.bfloat16)
    return out.index_copy_(0, held.rows, held.whole) if len(held.rows) else out


def reading(held: Planes) -> Tensor:
    """The weight as a draft reads it, e4m3 numbers times the scale of their row: bf16 [O, I]."""
    return held.upper.view(torch.float8_e4m3fn).to(torch.bfloat16).mul_(held.scale.bfloat16()[:, None])


def _parts(weight: Tensor) -> list[slice]:
    """Rows of a weight, some at a time."""
    n_rows = max(1, AT_ONCE // weight.shape[1])
    return [slice(begin, begin + n_rows) for begin in range(0, len(weight), n_rows)]


def planes_linear(x: Tensor, held: Planes, bias: Tensor | None, *, of_draft: bool = False) -> Tensor:
    """x W' + bias: bf16 x [..., I] -> bf16 [..., O]. of_draft: by the upper plane alone.

    On a CPU the bf16 weight is written in each call, and the product is that of F.linear, bit for bit.
    """
    lower = None if of_draft else held.lower
    out: Tensor = torch.ops.gpt_fast_sd.planes_linear(x, held.upper, lower, held.scale, held.rows, held.whole, bias)
    return out


@torch.library.custom_op("gpt_fast_sd::planes_linear", mutates_args=(), device_types="cuda")
def _planes_linear(
    x: Tensor, upper: Tensor, lower: Tensor | None, scale: Tensor, rows: Tensor, whole: Tensor, bias: Tensor | None
) -> Tensor:
    from ..triton import common as triton_common
    from ..triton import int8 as int8_triton

    if not triton_serves(x.device):
        return _by_joining(x, upper, lower, scale, rows, whole, bias)
    tokens = x.reshape(-1, x.shape[-1])
    if len(tokens) > MOST_TILED:
        weight: Tensor = int8_triton.joined(upper, lower, scale)
        return F.linear(x, weight.index_copy_(0, rows, whole) if lower is not None and len(rows) else weight, bias)
    out: Tensor = int8_triton.linear(tokens, upper, scale, bias, lower, arch=triton_common.architecture())
    if lower is not None and len(rows):
        out.index_copy_(1, rows, F.linear(tokens, whole, None if bias is None else bias[rows]))
    return out.view(*x.shape[:-1], len(upper))


def _by_joining(
    x: Tensor, upper: Tensor, lower: Tensor | None, scale: Tensor, rows: Tensor, whole: Tensor, bias: Tensor | None
) -> Tensor:
    """By a bf16 copy of the weight."""
    held = Planes(upper, upper if lower is None else lower, scale, rows, whole)
    return F.linear(x, reading(held) if lower is None else join(held), bias)


_planes_linear.register_kernel("cpu")(_by_joining)


@_planes_linear.register_fake
def _planes_linear_fake(x: Tensor, upper: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(upper))
