# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with int4 weights in tiles: numbers arrive where the tensor cores' operands lie, and only become bf16.

A program has a tile's outputs, a tile of rows and a part of the inputs. A group's numbers are multiplied as 128 to 143,
what bf16 is made of without arithmetic; its sum is then scaled, and what is too much taken from it by the sum of x.

Shapes: M rows, I inputs, O outputs, G = I / 128 groups, S parts of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from .common import RAISED, family, raised_nibbles

# Rows of a tile -> stages. Not timed: each of two groups is 4 KiB of weights and 256 bytes of each row.
STAGES = {16: 3, 32: 3, 64: 2}


@triton.jit
def in_order(b_x, WHOLE: tl.constexpr = False):
    """Of a tile's bytes [4096] -> [64, 64], outputs x inputs of half a group, without a move between lanes.

    WHOLE: of both their nibbles [4096, 2] -> [64, 128].
    """
    # the digits of a byte's place: input 32, warp, lane, lane, input 16, output 8, input 8, input 1
    if WHOLE:
        b_out = tl.permute(tl.reshape(b_x, (2, 4, 8, 4, 2, 2, 2, 2, 2)), (1, 5, 2, 8, 0, 4, 6, 3, 7))
    else:
        b_out = tl.permute(tl.reshape(b_x, (2, 4, 8, 4, 2, 2, 2, 2)), (1, 5, 2, 0, 4, 6, 3, 7))
    return tl.reshape(b_out, (64, 128 if WHOLE else 64))


@triton.jit
def scales(b_pair):
    """Scales and zeros, fp32, of pairs of bf16 that were read as integers."""
    return (b_pair << 16).to(tl.float32, bitcast=True), ((b_pair >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n_rows"])
def tiles_kernel(
    p_x, p_w, p_scale, p_ones, p_out, n_rows, n_in, n_out, stride_x,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [S, M, O], fp32: x [M, I] times w [O, I] over each part of the inputs. scale: [G, O, 2], read by pairs."""
    i_m, i_n, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_groups = n_in // 128
    begin, end = i_s * n_groups // PARTS, (i_s + 1) * n_groups // PARTS
    # Where operands come from registers to wgmma both halves of a group are one product; elsewhere Triton would lay out
    # joined ones anew.
    WIDTH: tl.constexpr = 128 if cuda_capability_geq(9) and not cuda_capability_geq(10) else 64
    o_m, o_n, o_k = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * 64 + tl.arange(0, 64), tl.arange(0, WIDTH)
    m_m = o_m < n_rows
    p_w += i_n.to(tl.int64) * n_groups * 4096 + tl.arange(0, 4096)
    p_scale = p_scale.to(tl.pointer_type(tl.int32)) + o_n
    # [WIDTH, BLOCK_M]
    p_x += o_m.to(tl.int64)[None, :] * stride_x + o_k[:, None]
    # a constant would be moved to registers in each step
    ones = tl.load(p_ones + tl.arange(0, 64)[:, None] * 128 + o_k[None, :])
    b_sum = tl.zeros((64, BLOCK_M), tl.float32)
    if cuda_capability_geq(9) and not cuda_capability_geq(10):  # see decode.split_kernel
        tl.assume(end > begin)
    b_next = tl.load(p_scale + begin * n_out)
    for i_g in tl.range(begin, end, num_stages=STAGES, loop_unroll_factor=2):
        b_scale, b_zero = scales(b_next)
        b_next = tl.load(p_scale + tl.minimum(i_g + 1, end - 1) * n_out)
        b_low = tl.load(p_x + i_g * 128, mask=m_m[None, :], other=0.0)
        w_low, w_high = raised_nibbles(tl.load(p_w + i_g * 4096), 64)
        if WIDTH == 128:
            b_part, b_all = tl.dot(in_order(tl.join(w_low, w_high), True), b_low), tl.dot(ones, b_low)
        else:
            b_high = tl.load(p_x + i_g * 128 + 64, mask=m_m[None, :], other=0.0)
            b_part = tl.dot(in_order(w_high), b_high, tl.dot(in_order(w_low), b_low))
            b_all = tl.dot(ones, b_high, tl.dot(ones, b_low))
        b_sum = b_part * b_scale[:, None] + b_sum
        b_sum = b_all * (b_zero - RAISED * b_scale)[:, None] + b_sum
    p_out += (i_s.to(tl.int64) * n_rows + o_m)[None, :] * n_out + o_n[:, None]
    tl.store(p_out, b_sum, mask=m_m[None, :])


def linear(x: Tensor, numbers: Tensor, scale_and_zero: Tensor, ones: Tensor, parts: int, *, arch: int | str) -> Tensor:
    """x W' by parts of the inputs: bf16 x [M, I], last stride 1, and a weight as Int4Tiles -> fp32 [S, M, O]."""
    (n_rows, n_in), (n_groups, n_out, _) = x.shape, scale_and_zero.shape
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and n_in == 128 * n_groups
    _check(numbers, scale_and_zero)
    out = torch.empty((parts, n_rows, n_out), dtype=torch.float32, device=x.device)
    # three sums of 64 rows would be more than the registers where they are not wgmma's
    block_m = min(max(16, triton.next_power_of_2(n_rows)), 64 if family(arch) == 90 else 32)
    tiles_kernel[triton.cdiv(n_rows, block_m), len(numbers), parts](
        x, numbers, scale_and_zero, ones, out, n_rows, n_in, n_out, x.stride(0),
        PARTS=parts, BLOCK_M=block_m, STAGES=STAGES[block_m], num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def untile_kernel(p_w, p_scale, p_out, n_in, n_out):
    """out [O, I], the weight in bf16."""
    i_n, i_g = tl.program_id(0), tl.program_id(1)
    o_n, o_k = i_n.to(tl.int64) * 64 + tl.arange(0, 64), i_g * 128 + tl.arange(0, 128)
    p_w += (i_n.to(tl.int64) * (n_in // 128) + i_g) * 4096 + tl.arange(0, 4096)
    w_low, w_high = raised_nibbles(tl.load(p_w), 0)
    b_scale, b_zero = scales(tl.load(p_scale.to(tl.pointer_type(tl.int32)) + i_g * n_out + o_n))
    b_w = in_order(tl.join(w_low, w_high), True).to(tl.float32) - RAISED
    b_w = b_w * b_scale[:, None] + b_zero[:, None]
    tl.store(p_out + o_n[:, None] * n_in + o_k[None, :], b_w.to(tl.bfloat16))


def untile(numbers: Tensor, scale_and_zero: Tensor) -> Tensor:
    """A weight as Int4Tiles -> bf16 [O, I], in one pass."""
    n_groups, n_out, _ = scale_and_zero.shape
    out = torch.empty((n_out, 128 * n_groups), dtype=torch.bfloat16, device=numbers.device)
    _check(numbers, scale_and_zero)
    untile_kernel[len(numbers), n_groups](numbers, scale_and_zero, out, out.shape[1], n_out, num_warps=4)
    return out


def _check(numbers: Tensor, scale_and_zero: Tensor) -> None:
    n_groups, n_out, _ = scale_and_zero.shape
    assert numbers.shape == (n_out // 64, n_groups, 4096) and numbers.dtype == torch.uint8
    assert scale_and_zero.dtype == torch.bfloat16 and numbers.is_contiguous() and scale_and_zero.is_contiguous()
