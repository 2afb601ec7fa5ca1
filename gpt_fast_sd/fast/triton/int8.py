# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with weights of a byte or in two planes: each is read once for all rows of a tile, and widened in registers.

A program has some outputs, a tile of rows and all inputs: sums are not split. How the tile is built follows from the
number of rows, so a row's result depends on no other row, and for the same kind of tile not on their number.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from .common import family, join_weights, widen, widen_upper

LARGEST_TILE = 64  # rows of a program
JOINED = 1024  # weights that a program joins
MANY_OUTPUTS = 8192  # with fewer, blocks of 64 outputs are fewer than an H100 has SMs


class Config(NamedTuple):
    """How the kernel is built."""

    block_m: int  # rows of a tile
    block_n: int  # outputs of a block
    block_k: int  # inputs of a step
    num_warps: int
    num_stages: int


# (family, rows of a tile) -> inputs of a step, stages. Estimated but for 16 rows on an H200, where 28,672 outputs take
# 47 us (2.5 TB/s) with three stages and 56 with five. By Little's law 36 KB in flight per SM are enough for 4.8 TB/s; a
# step of 64 outputs x 128 inputs is 8 KiB of weights. Ampere's smaller members have 99 KiB for weights and rows
# together.
STEPS = {
    (90, 16): (128, 3),
    (90, 32): (128, 5),
    (90, 64): (128, 4),
    (80, 16): (128, 5),
    (80, 32): (128, 4),
    (80, 64): (128, 3),
}
# Blocks of half the outputs have half of that in flight, and with 4,096 outputs there is one to an SM: where two still
# fit, and only Hopper's memory needs so much, their steps take twice the inputs.
FEW_OUTPUTS = {(90, 16): (256, 6), (90, 32): (256, 5)}


def config(arch: int | str, itemsize: int, n_rows: int, n_out: int, *, n_planes: int = 1) -> Config:
    """How the kernel is built for so many rows, of numbers of itemsize bytes, and outputs; both planes: half a step."""
    block_m = min(max(16, triton.next_power_of_2(n_rows)), LARGEST_TILE)
    block_n = 64 if n_out >= MANY_OUTPUTS else 32
    tile = family(arch), block_m
    block_k, num_stages = (block_n == 32 and FEW_OUTPUTS.get(tile)) or STEPS[tile]
    if itemsize == 4:  # no tensor core serves: more of it would spill
        block_m, block_k, num_stages = 16, 32, 3
    return Config(block_m, block_n, block_k // n_planes, 4, num_stages)


@triton.jit(do_not_specialize=["n_rows"])
def linear_kernel(
    p_x, p_w, p_low, p_scale, p_bias, p_out, n_rows, n_in, n_out, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, O] = x [M, I] times w [O, I], each output times its scale, and the bias.

    w: int8; else bytes of an upper plane, and with p_low those of the lower one are beside.
    """
    # tiles of rows come first: they run side by side, and all but one find the weights in the cache
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    o_m, o_n, o_k = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    m_m, m_n = o_m < n_rows, o_n < n_out
    # [BLOCK_N, BLOCK_K]; past the last output its weights are read again
    o_w = tl.minimum(o_n, n_out - 1).to(tl.int64)[:, None] * n_in + o_k[None, :]
    p_w += o_w
    if p_low is not None:
        p_low += o_w
    # [BLOCK_K, BLOCK_M]
    p_x += o_m.to(tl.int64)[None, :] * stride_x + o_k[:, None]
    # [BLOCK_N, BLOCK_M]
    b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if cuda_capability_geq(9) and not cuda_capability_geq(10):  # see decode.split_kernel
        tl.assume(n_in > 0)
    for i_k in tl.range(0, n_in, BLOCK_K, num_stages=STAGES):
        m_k = o_k < n_in - i_k
        b_w = tl.load(p_w + i_k, mask=m_k[None, :], other=0)
        b_x = tl.load(p_x + i_k, mask=m_k[:, None] & m_m[None, :], other=0.0)
        if p_low is not None:
            b_wide = join_weights(b_w, tl.load(p_low + i_k, mask=m_k[None, :], other=0), BLOCK_N)
        elif b_w.dtype == tl.uint8:
            b_wide = widen_upper(b_w, BLOCK_N)
        else:
            b_wide = widen(b_w, b_x.dtype, BLOCK_N)
        b_sum = tl.dot(b_wide, b_x, b_sum, input_precision="ieee")
    b_out = b_sum * tl.load(p_scale + o_n, mask=m_n, other=0.0)[:, None]
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_out += o_m.to(tl.int64)[None, :] * n_out + o_n[:, None]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, lower: Tensor | None = None, *, arch: int | str
) -> Tensor:
    """x W' + bias: x [M, I], last stride 1, weight [O, I], fp32 scale [O] -> [M, O] in the dtype of x.

    weight: int8; or, of bf16 x, the upper plane of bf16 weights as uint8, whose other one is lower.
    """
    (n_rows, n_in), n_out = x.shape, len(weight)
    planes = [weight] if lower is None else [weight, lower]
    assert all(w.shape == (n_out, n_in) and w.is_contiguous() and w.dtype == weight.dtype for w in planes)
    assert (weight.dtype, x.dtype) == (torch.uint8, torch.bfloat16) or (weight.dtype == torch.int8 and lower is None)
    assert scale.dtype == torch.float32 and scale.shape == (n_out,) and (x.stride(1) == 1 or n_in == 1)
    out = torch.empty((n_rows, n_out), dtype=x.dtype, device=x.device)
    block_m, block_n, block_k, num_warps, num_stages = config(
        arch, x.element_size(), n_rows, n_out, n_planes=len(planes)
    )
    linear_kernel[triton.cdiv(n_rows, block_m), triton.cdiv(n_out, block_n)](
        x, weight, lower, scale, bias, out, n_rows, n_in, n_out, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
    return out


@triton.jit
def float8_kernel(p_x, p_out, p_scale, n_in, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, I], e4m3, and scale [M]: a row whose largest number becomes the largest of e4m3."""
    i_m, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m_k = o_k < n_in
    b_x = tl.load(p_x + i_m * n_in + o_k, mask=m_k, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(b_x), 0), LEAST) / 448.0
    tl.store(p_out + i_m * n_in + o_k, (b_x * (1.0 / scale)).to(tl.float8e4nv), mask=m_k)
    tl.store(p_scale + i_m, scale)


def float8_rows(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """See int8.scaled: x [M, I] -> e4m3 [M, I], fp32 [M]; least: of what is taken for a row's largest number."""
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)
    assert x.is_contiguous()
    block = triton.next_power_of_2(x.shape[1])
    float8_kernel[(len(x),)](x, out, scale, x.shape[1], LEAST=least, BLOCK=block, num_warps=8)
    return out, scale


@triton.jit
def join_kernel(p_w, p_low, p_scale, p_out, n_in, BLOCK: tl.constexpr):
    """out [O, I], the bf16 weight in two planes, or without p_low what a draft reads of it."""
    i_n, o_k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_k, b_scale = o_k < n_in, tl.load(p_scale + i_n)
    b_w = tl.load(p_w + i_n * n_in + o_k, mask=m_k, other=0)
    if p_low is not None:
        b_wide = join_weights(b_w, tl.load(p_low + i_n * n_in + o_k, mask=m_k, other=0), 0)
    else:
        b_wide = widen_upper(b_w, 0)
    tl.store(p_out + i_n * n_in + o_k, (b_wide.to(tl.float32) * b_scale).to(tl.bfloat16), mask=m_k)


def joined(upper: Tensor, lower: Tensor | None, scale: Tensor) -> Tensor:
    """The bf16 weight in two planes uint8 [O, I], or what a draft reads of the upper one, in one pass: [O, I]."""
    (n_out, n_in), out = upper.shape, torch.empty(upper.shape, dtype=torch.bfloat16, device=upper.device)
    join_kernel[n_out, triton.cdiv(n_in, JOINED)](upper, lower, scale, out, n_in, BLOCK=JOINED, num_warps=4)
    return out
