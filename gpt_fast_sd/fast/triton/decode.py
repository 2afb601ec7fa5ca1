# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Flash-decoding in Triton (Dao et al. 2023): splits of the keys, each read once with a running softmax, then merged.

The R = G * T queries of a kv head are the rows of a tile, so the keys are read once for all of them. A split is a fixed
range of positions and is read in blocks of fixed size: a row's result depends neither on the other rows, nor on how
much of the cache is in view, nor on T while the R rows fit one tile of 16 or 32, which the compiler lays out alike. A
larger tile is laid out differently, sums in another order and may differ in the last bits.

Attention mass is a by-product: the exps that each block of keys got from each row, relative to the maximum at that
moment, are stored and become weights when the row's log-sum-exp is known. That is R sums per page, which fp16 holds
where queries have 16 bits, and R * page / BLOCK_N maxima in fp32, written and read, besides 2 * page * H entries of
keys and values: for R = 24, H = 128, bf16 and pages of 16 keys, 72 bytes besides 8192, 0.9 % each way.

A cache may hold entries of a byte (FORMAT, see triton_common): they are widened in registers to the dtype of the
queries, which is exact, and what an int8 stands for stays outside the products: the scale of a key belongs to its
scores, that of a value to its weights, once these are summed. Where numbers lie in planes of nibbles, each byte holds
one of the first half of a head and one of the second: there are two products of half as many dims, and two sums. What
is missing where a draft does not read the lower plane, the same of each number, is added to scores and sums at once.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        R = G * T rows of a kv head (row r is token r // G, head r % G).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from gpt_fast_sd.model import CacheLayer

from .common import (
    LOG2_E,
    MISSING,
    block_of,
    entry_size,
    family,
    first_seen,
    format_of,
    load_planes,
    load_scales,
    load_upper,
    row_limits,
    strides,
    widen,
)
from ...config import PAGES
from ..ops.sizes import BUSY, LARGEST_SPLIT

# Timed on an H200, 16 rows of 57,856 bf16 entries: eight splits at once by four warps took three times as long.
MERGED, MERGE_WARPS = 16, 2  # splits that the merge reads at once
MASS_UNITS, MASS_ROWS = 64, 16  # sums, and rows of them, that a program adds up at once


class Config(NamedTuple):
    """How the split kernel is built."""

    block_r: int  # rows of a tile
    block_n: int  # keys of a block
    num_warps: int
    num_stages: int
    per_sm: int  # thread blocks that an SM should hold at a time; only tests need it


# (family, bytes of an entry, padded head dim) -> keys of a block, {rows of a tile: (warps, stages, blocks per SM)}. The
# keys of a block must not depend on the rows of a tile: the order of sums follows from them.
#
# Estimated; for bf16 heads of 128 timed as well (an H200, 16 rows of 57,856 entries, 1, 6 and 9 queries), beside 15
# others (32, 64 and 128 keys, 4 and 8 warps, 2 to 4 stages), in splits of 2,048: none is faster by more than 1 %. A
# thread block has stages - 1 blocks of keys and of values in flight from memory while it computes: 64 keys of 128 bf16
# are 16 KiB, keys and values 32 KiB. By Little's law an SM needs 36 KB in flight for
# 4.8 TB/s (H200: 132 SMs, 1 us), 19 KB for 2 TB/s (A100: 108 SMs). The aim is two thread blocks per SM, one to compute
# while the other waits at a barrier; shared memory then allows 113 KiB each on Hopper, 81 on Ampere. 64 rows of 128
# dims take 112, with mass a quarter KiB more, through which the sums of pages are stored: a whole KiB would be exactly
# the limit, and on sm_100 past it. If eight warps take a tile, two groups of four wait for each other's products, and
# the registers of an SM hold only one such block. On SMs of 100 KiB (sm_86, 89, 120) one block is enough: it has 32 KiB
# and more in flight, and 1 TB/s over 128 SMs needs 8.
#
# The cost of 65 to 128 rows: one block of eight warps per SM, so that products and exps of all 128 rows wait for bytes,
# and the bytes for them, however much of the tile is empty. A tile of 64 + 16 rows, two products on the same keys,
# would serve 72 rows: compiled for sm_90 it takes 255 registers (205 without the 16), with mass it spills, on sm_80 it
# spills with four warps. So gamma "auto" prefers draft lengths that fill a tile (config.gamma_tiers).
#
# fp32 products use no tensor cores, and larger tiles do not fit the registers; with one tile, results depend on no T.
#
# Entries of one byte: half the bytes are in flight, 32 KiB per thread block, and the block in use lies in shared memory
# once more, widened to 16 bits. 16 rows of 128 dims compiled for sm_90: 134 registers, 54 KiB, three thread blocks per
# SM and 673 instructions per block of int8 keys (bf16: 321), where its 16 KiB take 790 clocks of an SM's share of 4.8
# TB/s: 84 % of its issue slots (tests/gpt_fast_sd/fast/test_slots_aot.py). A tile of 128 rows would spill on Ampere, 64
# rows with four warps, too.
CONFIGS = {
    (90, 2, 64): (64, {16: (4, 4, 2), 32: (4, 4, 2), 64: (4, 4, 2), 128: (8, 3, 1)}),
    (90, 2, 128): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (4, 3, 2), 128: (8, 3, 1)}),
    (90, 2, 256): (32, {16: (4, 2, 2), 32: (4, 3, 2), 64: (8, 3, 1)}),
    (90, 4, 64): (32, {16: (8, 3, 2)}),
    (90, 4, 128): (32, {16: (8, 3, 2)}),
    (90, 4, 256): (16, {16: (8, 3, 2)}),
    (90, 1, 64): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (4, 3, 2), 128: (8, 3, 1)}),
    (90, 1, 128): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (4, 3, 2), 128: (8, 3, 1)}),
    (90, 1, 256): (32, {16: (4, 3, 1), 32: (8, 3, 1), 64: (8, 3, 1)}),
    (80, 2, 64): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (4, 3, 2), 128: (8, 3, 1)}),
    (80, 2, 128): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (4, 2, 2), 128: (8, 2, 1)}),
    (80, 2, 256): (32, {16: (4, 3, 2), 32: (4, 2, 2), 64: (8, 2, 1)}),
    (80, 1, 64): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (4, 3, 2), 128: (8, 3, 1)}),
    (80, 1, 128): (64, {16: (4, 3, 2), 32: (4, 3, 2), 64: (8, 3, 1)}),
    (80, 1, 256): (32, {16: (8, 3, 1), 32: (8, 2, 1)}),
    (80, 4, 64): (32, {16: (4, 3, 2)}),
    (80, 4, 128): (32, {16: (8, 3, 2)}),
    (80, 4, 256): (16, {16: (4, 3, 1)}),
}


def config(arch: int | str, itemsize: int, block_h: int, n_rows: int) -> Config:
    """How to read for n_rows rows of block_h dims of itemsize bytes: in one tile if one is large enough."""
    block_n, tiles = CONFIGS[family(arch), itemsize, max(block_h, 64)]
    block_r = next((block_r for block_r in tiles if block_r >= n_rows), max(tiles))
    return Config(block_r, block_n, *tiles[block_r])


@triton.jit(
    do_not_specialize=["n_tokens", "n_keys", "split", "pos_b", "pos_t"], do_not_specialize_on_alignment=["p_pos"]
)
def split_kernel(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_k_low, p_v_low, p_pos, p_part, p_lse, p_sum, p_max, n_tokens, n_keys, split,
    q_b, q_n, q_t, k_b, k_k, v_b, v_k, scale_b, scale_k, pos_b, pos_t,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, FORMAT: tl.constexpr, TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile of rows over one split: fp32 part [splits, B * K, R, H], normalised, and its base-2 lse.

    BLOCK_H: H, of planes H // 2, as a power of 2. TAIL, WINDOW: see CacheLayer.

    p_sum [B * K, S // UNIT, R], p_max [B * K, S // BLOCK_N, R]: the exps of each UNIT keys, and the maxima they are
    relative to; None if they are not needed.
    """
    HELD: tl.constexpr = H // 2 if FORMAT == 3 else H
    i_tile, i_bk, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    n_rows = G * n_tokens
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    # [BLOCK_R]
    b_limit = row_limits(p_pos + i_b * pos_b, o_r // G, m_r, n_keys, pos_t)
    start = i_split * split
    last = tl.max(b_limit, 0)
    if start > last:
        return
    first = 0
    if WINDOW:  # rows that read nothing do not keep the others from beginning where they do
        first = tl.min(first_seen(tl.where(b_limit >= 0, b_limit, last), WINDOW), 0) - start
        if first >= split:
            return
        first = tl.maximum(first, 0) // BLOCK_N * BLOCK_N

    o_h = tl.arange(0, BLOCK_H)
    o_n = tl.arange(0, BLOCK_N)
    p_q += i_b * q_b + i_k * G * q_n
    o_q = (o_r % G).to(tl.int64) * q_n + (o_r // G).to(tl.int64) * q_t
    # [BLOCK_R, BLOCK_H]
    m_q = m_r[:, None] & (o_h < HELD)[None, :]
    b_q = tl.load(p_q + o_q[:, None] + o_h[None, :], mask=m_q, other=0.0)
    p_k += i_b * k_b + i_k * k_k + start.to(tl.int64) * HELD
    p_v += i_b * v_b + i_k * v_k + start.to(tl.int64) * HELD
    if FORMAT % 2 == 1:
        p_k_scale += i_b * scale_b + i_k * scale_k + start
        p_v_scale += i_b * scale_b + i_k * scale_k + start
    if FORMAT == 3:
        b_q2 = tl.load(p_q + o_q[:, None] + (HELD + o_h)[None, :], mask=m_q, other=0.0)
        b_out2 = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
        p_k_low += i_b * k_b + i_k * k_k + start.to(tl.int64) * HELD
        p_v_low += i_b * v_b + i_k * v_k + start.to(tl.int64) * HELD
    if TAIL:
        whole_from = (tl.load(p_pos + i_b * pos_b) - (TAIL - 1)).to(tl.int32)
        # [BLOCK_R]
        b_q_missing = MISSING * (tl.sum(b_q.to(tl.float32), 1) + tl.sum(b_q2.to(tl.float32), 1))
        b_unread = tl.zeros([BLOCK_R], tl.float32)
    # [BLOCK_N, BLOCK_H]
    o_block = o_n[:, None] * HELD + o_h[None, :]

    # Finite, so that a row that has seen no key yet does not subtract infinities.
    b_max = tl.full([BLOCK_R], -1e30, tl.float32)
    b_total = tl.zeros([BLOCK_R], tl.float32)
    b_out = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    # Of keys up to the block in which those begin that a draft reads whole, it reads the upper plane alone: PART 0.
    n_upper, n_all = first, tl.minimum(split, last + 1 - start)
    if TAIL:
        n_upper = tl.minimum(tl.maximum((whole_from - start) // BLOCK_N * BLOCK_N, first), n_all)
    if p_sum is not None and not TAIL and BLOCK_R >= 64 and cuda_capability_geq(9) and not cuda_capability_geq(10):
        # Some row reads a key. After a loop that might not run ptxas makes each product wait for the one before.
        tl.assume(n_upper < n_all)
    for PART in tl.static_range(0 if TAIL else 1, 2):
        for j in range(first if PART == 0 else n_upper, n_upper if PART == 0 else n_all, BLOCK_N):
            # [BLOCK_N]
            o_j = start + j + o_n
            # Memory past the last key may hold NaN, and 0 * NaN is not 0.
            m_block = (o_j <= last)[:, None]
            if HELD != BLOCK_H:
                m_block = m_block & (o_h < HELD)[None, :]
            if FORMAT % 2 == 1:  # asked for ahead of products that need not wait for them
                b_k_scale = load_scales(p_k_scale + j + o_n, o_j <= last)
                b_v_scale = load_scales(p_v_scale + j + o_n, o_j <= last)
            if FORMAT == 3:
                # [BLOCK_N, BLOCK_H]
                o_plane = j * HELD + o_block
                m_whole = o_j >= (whole_from if TAIL else 0)
                if PART == 0:
                    b_k, b_k2 = load_upper(p_k + o_plane, m_block, b_q.dtype, BLOCK_R)
                else:
                    b_k, b_k2 = load_planes(
                        p_k + o_plane, p_k_low + o_plane, m_block, m_whole, b_q.dtype, TAIL, BLOCK_R
                    )
                # [BLOCK_R, BLOCK_N]
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
                b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
                if PART == 0:
                    b_s += b_q_missing[:, None]
                elif TAIL:
                    b_s += tl.where(m_whole, 0.0, 1.0)[None, :] * b_q_missing[:, None]
            else:
                # [BLOCK_N, BLOCK_H]
                b_k = widen(tl.load(p_k + j * H + o_block, mask=m_block, other=0.0), b_q.dtype, BLOCK_R)
                # [BLOCK_R, BLOCK_N]
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            if FORMAT % 2 == 1:
                b_s *= b_k_scale[None, :]
            m_s = o_j[None, :] <= b_limit[:, None]
            if WINDOW:
                m_s = m_s & (o_j[None, :] >= first_seen(b_limit, WINDOW)[:, None])
            b_s = tl.where(m_s, b_s * SCALE, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_w = tl.exp2(b_s - b_new[:, None])
            # [BLOCK_R]
            b_shrink = tl.exp2(b_max - b_new)
            b_max = b_new
            b_total = b_total * b_shrink + tl.sum(b_w, 1)
            if p_sum is not None:
                n_units = (tl.num_programs(2) * (split // UNIT)).to(tl.int64)
                o_unit = i_bk * n_units + (start + j) // UNIT + tl.arange(0, BLOCK_N // UNIT)
                # [BLOCK_R, BLOCK_N // UNIT]
                b_sum = tl.sum(tl.reshape(b_w, [BLOCK_R, BLOCK_N // UNIT, UNIT]), 2)
                if BLOCK_R == 64 and BLOCK_N // UNIT == 4:  # in halves, which need half as much shared memory
                    b_even, b_odd = tl.split(tl.reshape(b_sum, [BLOCK_R, 2, 2]))
                    o_even = i_bk * n_units + (start + j) // UNIT + 2 * tl.arange(0, 2)
                    p_even = p_sum + o_even[None, :] * n_rows + o_r[:, None]
                    tl.store(p_even, b_even, mask=m_r[:, None])
                    tl.store(p_even + n_rows, b_odd, mask=m_r[:, None])
                else:
                    tl.store(p_sum + o_unit[None, :] * n_rows + o_r[:, None], b_sum, mask=m_r[:, None])
                i_block = i_bk * (n_units // (BLOCK_N // UNIT)) + (start + j) // BLOCK_N
                tl.store(p_max + i_block * n_rows + o_r, b_max, mask=m_r)
            if FORMAT % 2 == 1:
                b_w *= b_v_scale[None, :]
            if PART == 0:
                b_unread = b_unread * b_shrink + tl.sum(b_w, 1)
            elif TAIL:
                b_unread = b_unread * b_shrink + tl.sum(tl.where(m_whole[None, :], 0.0, b_w), 1)
            if FORMAT == 3:
                # [BLOCK_N, BLOCK_H]
                if PART == 0:
                    b_v, b_v2 = load_upper(p_v + o_plane, m_block, b_q.dtype, BLOCK_R)
                else:
                    b_v, b_v2 = load_planes(
                        p_v + o_plane, p_v_low + o_plane, m_block, m_whole, b_q.dtype, TAIL, BLOCK_R
                    )
                # [BLOCK_R, BLOCK_H]
                b_out2 = tl.dot(b_w.to(b_v.dtype), b_v2, b_out2 * b_shrink[:, None], input_precision="ieee")
            else:
                # [BLOCK_N, BLOCK_H]
                b_v = widen(tl.load(p_v + j * H + o_block, mask=m_block, other=0.0), b_q.dtype, BLOCK_R)
            # [BLOCK_R, BLOCK_H]
            b_out = tl.dot(b_w.to(b_v.dtype), b_v, b_out * b_shrink[:, None], input_precision="ieee")

    # A row may end before this split of its tile does: it reads nothing here, and the merge ignores its result.
    b_total = tl.where(b_total > 0, b_total, 1.0)
    if TAIL:
        b_out += MISSING * b_unread[:, None]
    b_out = b_out / b_total[:, None]
    o_part = (i_split * tl.num_programs(1) + i_bk).to(tl.int64) * n_rows + o_r
    p_part += o_part[:, None] * H + o_h[None, :]
    tl.store(p_part, b_out, mask=m_q)
    if FORMAT == 3:
        if TAIL:
            b_out2 += MISSING * b_unread[:, None]
        tl.store(p_part + HELD, b_out2 / b_total[:, None], mask=m_q)
    tl.store(p_lse + o_part, b_max + tl.log2(b_total), mask=m_r)


@triton.jit(
    do_not_specialize=["n_tokens", "n_keys", "split", "pos_b", "pos_t"], do_not_specialize_on_alignment=["p_pos"]
)
def merge_kernel(
    p_part, p_lse, p_pos, p_out, p_row_lse, n_tokens, n_keys, split, pos_b, pos_t,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row, in their order: out [B, T, N, H], row_lse [B * K, R] or None."""
    i_r, i_bk = tl.program_id(0), tl.program_id(1)
    i_b, i_k = (i_bk // K).to(tl.int64), i_bk % K
    n_rows = G * n_tokens
    limit = row_limits(p_pos + i_b * pos_b, i_r // G, True, n_keys, pos_t)
    n_splits = (limit + split) // split  # none for a row that reads no key
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < H
    best = -1e30
    total = 0.0
    # [BLOCK_H]
    b_out = tl.zeros([BLOCK_H], tl.float32)
    first_split = 0
    if WINDOW:
        first_split = first_seen(limit, WINDOW) // split
    for first in range(first_split, n_splits, BLOCK_S):
        # [BLOCK_S]
        o_s = first + tl.arange(0, BLOCK_S)
        m_s = o_s < n_splits
        o_part = (o_s.to(tl.int64) * tl.num_programs(1) + i_bk) * n_rows + i_r
        b_lse = tl.load(p_lse + o_part, mask=m_s, other=float("-inf"))
        # [BLOCK_S, BLOCK_H]
        b_part = tl.load(p_part + o_part[:, None] * H + o_h[None, :], mask=m_s[:, None] & m_h[None, :], other=0.0)
        new = tl.maximum(best, tl.max(b_lse, 0))
        shrink = tl.exp2(best - new)
        b_w = tl.exp2(b_lse - new)
        total = total * shrink + tl.sum(b_w, 0)
        b_out = b_out * shrink + tl.sum(b_part * b_w[:, None], 0)
        best = new
    total = tl.where(limit >= 0, total, 1.0)
    b_out = b_out / total
    o_out = ((i_b * n_tokens + i_r // G) * K + i_k) * G + i_r % G
    tl.store(p_out + o_out * H + o_h, b_out, mask=m_h)
    if p_row_lse is not None:
        lse = tl.where(limit >= 0, best + tl.log2(total), float("-inf"))
        tl.store(p_row_lse + i_bk.to(tl.int64) * n_rows + i_r, lse)


@triton.jit(
    do_not_specialize=["n_tokens", "n_keys", "n_units", "pos_b", "pos_t"], do_not_specialize_on_alignment=["p_pos"]
)
def mass_kernel(
    p_sum, p_max, p_row_lse, p_pos, p_mass, n_tokens, n_keys, n_units, pos_b, pos_t,
    K: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Sum the mass of each page over all rows: mass fp32 [B, K, n_keys // PAGE], 0 past the last key."""
    i_block, i_bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n_rows = G * n_tokens
    n_blocks = n_units // (BLOCK_N // UNIT)
    UNITS: tl.constexpr = BLOCK_P * (PAGE // UNIT)
    # [UNITS]
    o_u = i_block * UNITS + tl.arange(0, UNITS)
    b_mass = tl.zeros([UNITS], tl.float32)
    for first in range(0, n_rows, BLOCK_R):
        # [BLOCK_R]
        o_r = first + tl.arange(0, BLOCK_R)
        m_r = o_r < n_rows
        b_limit = row_limits(p_pos + i_bk // K * pos_b, o_r // G, m_r, n_keys, pos_t)
        b_lse = tl.load(p_row_lse + i_bk * n_rows + o_r, mask=b_limit >= 0, other=0.0)
        # [UNITS, BLOCK_R]
        m_read = (o_u * UNIT)[:, None] <= b_limit[None, :]
        if WINDOW:
            m_read = m_read & ((o_u * UNIT + UNIT)[:, None] > first_seen(b_limit, WINDOW)[None, :])
        o_sum = (i_bk * n_units + o_u)[:, None] * n_rows + o_r[None, :]
        o_max = (i_bk * n_blocks + o_u * UNIT // BLOCK_N)[:, None] * n_rows + o_r[None, :]
        b_sum = tl.load(p_sum + o_sum, mask=m_read, other=0.0)
        b_max = tl.load(p_max + o_max, mask=m_read, other=float("-inf"))
        b_mass += tl.sum(b_sum * tl.exp2(b_max - b_lse[None, :]), 1)
    # [BLOCK_P]
    b_page = tl.sum(tl.reshape(b_mass, [BLOCK_P, PAGE // UNIT]), 1)
    o_p = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    n_pages = n_keys // PAGE
    tl.store(p_mass + i_bk * n_pages + o_p, b_page, mask=o_p < n_pages)


def attend(
    q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int, row_lse: Tensor | None = None, *,
    arch: int | str,
) -> Tensor:  # fmt: skip
    """See decode.decode_attention. row_lse: where to put the base-2 lse, fp32 [B, K, T, G]."""
    return _attend(q, layer, pos, n_keys, split, None, row_lse, arch)[0]


def attend_with_mass(
    q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int, page: int, *, arch: int | str
) -> tuple[Tensor, Tensor]:
    """See decode.decode_attention_with_mass."""
    assert page in PAGES
    out, mass = _attend(q, layer, pos, n_keys, split, page, None, arch)
    assert mass is not None
    return out, mass


def _attend(
    q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int, page: int | None, row_lse: Tensor | None,
    arch: int | str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    n_batch, n_heads, n_tokens, head_dim = q.shape
    n_kv = layer.k.shape[1]
    group, n_bk = n_heads // n_kv, n_batch * n_kv
    n_rows = group * n_tokens
    assert 0 < n_keys <= layer.k.shape[2]
    form = format_of(q, layer)
    block_h = max(16, triton.next_power_of_2(head_dim))
    block_r, block_n, num_warps, num_stages, _ = config(arch, entry_size(q, layer.k), block_h, n_rows)
    assert split % block_n == 0
    busy = n_bk * layer.k.shape[2] >= 2 * split * BUSY
    if block_r >= 64 and split == LARGEST_SPLIT and busy:  # what so many rows write for a split slows down reading
        split *= 2
    n_splits = triton.cdiv(n_keys, split)
    unit = 0 if page is None else min(page, block_n)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    part, lse = empty(n_splits, n_bk, n_rows, head_dim), empty(n_splits, n_bk, n_rows)
    sums = maxima = mass = None
    if page is not None:
        narrow = torch.float32 if q.dtype == torch.float32 else torch.float16
        sums = empty(n_bk, n_splits * split // unit, n_rows, dtype=narrow)
        maxima = empty(n_bk, n_splits * split // block_n, n_rows)
        row_lse, mass = empty(n_bk, n_rows), empty(n_batch, n_kv, n_keys // page)
    split_kernel[triton.cdiv(n_rows, block_r), n_bk, n_splits](
        q, *layer.operands, pos, part, lse, sums, maxima, n_tokens, n_keys, split,
        *strides(q, 3), *strides(layer.k, 2), *strides(layer.v, 2), *strides(layer.k_scale, 2), *pos.stride(),
        SCALE=head_dim**-0.5 * LOG2_E, K=n_kv, G=group, H=head_dim, BLOCK_R=block_r, BLOCK_H=block_of(head_dim, form),
        BLOCK_N=block_n, UNIT=unit, FORMAT=form, TAIL=layer.tail, WINDOW=layer.window,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    out = torch.empty((n_batch, n_tokens, n_heads, head_dim), dtype=q.dtype, device=q.device)
    merge_kernel[n_rows, n_bk](
        part, lse, pos, out, row_lse, n_tokens, n_keys, split, *pos.stride(),
        K=n_kv, G=group, H=head_dim, BLOCK_H=block_h, BLOCK_S=MERGED, WINDOW=layer.window, num_warps=MERGE_WARPS,
    )  # fmt: skip
    if page is not None:
        block_p = max(1, MASS_UNITS * unit // page)
        mass_kernel[triton.cdiv(n_keys // page, block_p), n_bk](
            sums, maxima, row_lse, pos, mass, n_tokens, n_keys, n_splits * split // unit, *pos.stride(),
            K=n_kv, G=group, PAGE=page, UNIT=unit, BLOCK_N=block_n, BLOCK_P=block_p, BLOCK_R=MASS_ROWS,
            WINDOW=layer.window, num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2), mass
