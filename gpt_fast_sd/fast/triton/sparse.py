# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Sparse attention in Triton: the listed entries and the window are one list, read in chunks, merged in their order.

A draft step reads so little that latency counts as much as bandwidth: a program knows all that it will read after one
look at its list, no loaded value decides how much it does, and the list of a chunk is fetched ahead of the keys. The
R = G * T queries of a kv head are the rows of a tile. A chunk is a fixed range of the list, so a row's result depends
on no other row.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        R = G * T rows of a kv head (row r is token r // G, head r % G), C listed entries, M = C + the window's width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    strides,
    widen,
)
from ..ops.sizes import ONE_CHUNK, PROGRAMS

MOST_CHUNKS = 32  # that the merge reads at once
LEAST_CHUNK, MOST_OF_ONE = 128, 1152  # entries of a chunk, and of one that is the whole list
LARGEST_TILE = 64  # rows of a program


class Config(NamedTuple):
    """How the kernel that attends is built."""

    block_r: int  # rows of a tile
    block_n: int  # entries of a block
    num_warps: int
    num_stages: int
    per_sm: int  # thread blocks that an SM should hold at a time; only tests need it


# (family, bytes of a number, padded head dim) -> entries of a block, stages, blocks per SM with 16, 32 and 64 rows. The
# entries of a block must not depend on the rows of a tile: the order of sums follows from them.
#
# Of bf16 heads of 128 on Hopper the fastest of five ways on an H200, for 16 rows and for one, lists of 256 to 2,048
# entries: 1,032 of 16 rows take 26 us with their merge (2.6 TB/s), by blocks of 64 in five stages 32. The others are
# estimated: entries wait for their list, so with s stages s // 2 blocks of keys and values are in flight while a
# program computes, 64 entries of 128 bf16 are 32 KiB, and by Little's law 36 KB are enough for 4.8 TB/s (132 SMs, 1
# us). Tiles of 64 rows are for many tokens per row, which no draft step has: eight warps, and an SM has registers for
# one of them; blocks of 128 entries leave it none, and tiles end at 32.
LOADS = {
    (90, 2, 64): (64, 3, (3, 3, 1)), (90, 2, 128): (128, 2, (2, 1)), (90, 2, 256): (32, 3, (2, 2, 1)),
    (90, 1, 64): (64, 3, (3, 3, 1)), (90, 1, 128): (64, 5, (3, 2, 1)), (90, 1, 256): (32, 3, (2, 2, 1)),
    (90, 4, 64): (32, 3, (3,)), (90, 4, 128): (16, 3, (3,)), (90, 4, 256): (16, 3, (3,)),
    (80, 2, 64): (64, 3, (4, 4, 1)), (80, 2, 128): (64, 3, (3, 2, 1)), (80, 2, 256): (32, 3, (2, 2, 1)),
    (80, 1, 64): (64, 3, (4, 4, 1)), (80, 1, 128): (64, 3, (3, 2, 1)), (80, 1, 256): (32, 3, (2, 2)),
    (80, 4, 64): (32, 3, (3,)), (80, 4, 128): (16, 3, (3,)), (80, 4, 256): (16, 3, (3,)),
}  # fmt: skip


def config(arch: int | str, itemsize: int, block_h: int, n_rows: int) -> Config:
    """How the kernel is built for n_rows queries of block_h dims of itemsize bytes."""
    block_n, num_stages, per_sm = LOADS[family(arch), itemsize, max(block_h, 64)]
    if itemsize == 4:  # without tensor cores a tile of more rows would spill
        return Config(16, block_n, 4, num_stages, *per_sm)
    block_r = min(max(16, triton.next_power_of_2(n_rows)), LARGEST_TILE if len(per_sm) > 2 else 32)  # 64 would spill
    return Config(block_r, block_n, 8 if block_r == LARGEST_TILE else 4, num_stages, per_sm[block_r // 32])


def chunk_for(n_entries: int, n_pairs: int) -> int:
    """Entries that one program reads, for n_pairs = B * K pairs of row and kv head.

    A function of nothing else, so sums are fixed within an engine. Few entries are one chunk, which needs no merge: a
    second launch costs more than leaving half of a GPU's bandwidth unused for so little. Of more entries there are as
    many chunks as an H200 reads at the same time: a few programs that begin after others have ended take as long again.
    Long lists of so many pairs that each would be one chunk, or less, are cut as was timed.
    """
    if n_entries <= ONE_CHUNK:
        return ONE_CHUNK
    n_chunks = PROGRAMS // n_pairs
    if n_chunks == 0 or (n_chunks == 1 and n_entries > MOST_OF_ONE):
        n_chunks = -(-n_entries // (2 * LEAST_CHUNK))
    n_chunks = min(n_chunks, MOST_CHUNKS)
    return -(-n_entries // (n_chunks * LEAST_CHUNK)) * LEAST_CHUNK


@triton.jit(
    do_not_specialize=["n_tokens", "n_listed", "n_entries", "chunk", "n_keys", "list_b", "list_k", "pos_b", "pos_t"],
    do_not_specialize_on_alignment=["p_kv_indices", "p_window_start", "p_pos"],
)
def chunk_kernel(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_k_low, p_v_low, p_kv_indices, p_window_start, p_pos, p_out, p_max, p_total,
    n_tokens, n_listed, n_entries, chunk, n_keys,
    q_b, q_n, q_t, k_b, k_k, v_b, v_k, scale_b, scale_k, list_b, list_k, pos_b, pos_t,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    FORMAT: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile of rows over one chunk: fp32 out [chunks, B * K, R, H], with its base-2 maxima and totals.

    BLOCK_H: H, of planes H // 2, as a power of 2. TAIL, WINDOW: see CacheLayer.

    WHOLE: there is only one chunk, and out is the result [B, T, N, H].
    """
    HELD: tl.constexpr = H // 2 if FORMAT == 3 else H
    i_chunk, i_bk, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    n_rows = G * n_tokens
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    o_h = tl.arange(0, BLOCK_H)
    m_r, m_h = o_r < n_rows, o_h < HELD
    # [BLOCK_R]
    b_limit = tl.load(p_pos + i_b * pos_b + (o_r // G).to(tl.int64) * pos_t, mask=m_r, other=-1)
    b_limit = tl.where(b_limit < n_keys, b_limit, -1).to(tl.int32)
    last = tl.max(b_limit, 0)
    if WINDOW:
        first = tl.min(first_seen(tl.where(b_limit >= 0, b_limit, last), WINDOW), 0)
    window_start = tl.load(p_window_start + i_b).to(tl.int32)
    p_q += i_b * q_b + i_k * G * q_n
    o_q = (o_r % G).to(tl.int64) * q_n + (o_r // G).to(tl.int64) * q_t
    # [BLOCK_R, BLOCK_H]
    b_q = tl.load(p_q + o_q[:, None] + o_h[None, :], mask=m_r[:, None] & m_h[None, :], other=0.0)
    p_k += i_b * k_b + i_k * k_k
    p_v += i_b * v_b + i_k * v_k
    if FORMAT % 2 == 1:
        p_k_scale += i_b * scale_b + i_k * scale_k
        p_v_scale += i_b * scale_b + i_k * scale_k
    if FORMAT == 3:
        b_q2 = tl.load(p_q + o_q[:, None] + (HELD + o_h)[None, :], mask=m_r[:, None] & m_h[None, :], other=0.0)
        b_out2 = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
        p_k_low += i_b * k_b + i_k * k_k
        p_v_low += i_b * v_b + i_k * v_k
    if TAIL:
        whole_from = (tl.load(p_pos + i_b * pos_b) - (TAIL - 1)).to(tl.int32)
        # [BLOCK_R]
        b_q_missing = MISSING * (tl.sum(b_q.to(tl.float32), 1) + tl.sum(b_q2.to(tl.float32), 1))
        b_unread = tl.zeros([BLOCK_R], tl.float32)
    p_kv_indices += i_b * list_b + i_k * list_k

    # Finite, so that a row that has seen no key yet does not subtract infinities.
    b_max = tl.full([BLOCK_R], -1e30, tl.float32)
    b_total = tl.zeros([BLOCK_R], tl.float32)
    b_out = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    start = i_chunk * chunk
    for j in tl.range(start, tl.minimum(start + chunk, n_entries), BLOCK_N, num_stages=STAGES):
        # [BLOCK_N]
        o_n = j + tl.arange(0, BLOCK_N)
        m_listed = o_n < n_listed
        # One number per page is read; the window has none.
        b_first = tl.load(p_kv_indices + o_n // PAGE * PAGE, mask=m_listed, other=-1).to(tl.int32)
        b_entry = tl.where(m_listed, b_first + o_n % PAGE, window_start + (o_n - n_listed))
        # A page that reaches into the window is read up to the beginning of the window.
        m_n = tl.where(m_listed, (b_first >= 0) & (b_entry < window_start), o_n < n_entries) & (b_entry <= last)
        if WINDOW:
            m_n = m_n & (b_entry >= first)
        # [BLOCK_N, BLOCK_H]
        o_kv = b_entry.to(tl.int64)[:, None] * HELD + o_h[None, :]
        m_kv = m_n[:, None]
        if HELD != BLOCK_H:
            m_kv = m_kv & m_h[None, :]
        if FORMAT % 2 == 1:  # asked for ahead of products that need not wait for them
            b_k_scale = load_scales(p_k_scale + b_entry, m_n)
            b_v_scale = load_scales(p_v_scale + b_entry, m_n)
        # Unseen entries may be NaN, and 0 * NaN is not 0.
        if FORMAT == 3:
            m_whole = b_entry >= whole_from if TAIL else m_n
            b_k, b_k2 = load_planes(p_k + o_kv, p_k_low + o_kv, m_kv, m_whole, b_q.dtype, TAIL, BLOCK_R)
            # [BLOCK_R, BLOCK_N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
            if TAIL:
                b_s += tl.where(m_whole, 0.0, 1.0)[None, :] * b_q_missing[:, None]
        else:
            b_k = widen(tl.load(p_k + o_kv, mask=m_kv, other=0.0), b_q.dtype, BLOCK_R)
            # [BLOCK_R, BLOCK_N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if FORMAT % 2 == 1:
            b_s *= b_k_scale[None, :]
        m_s = m_n[None, :] & (b_entry[None, :] <= b_limit[:, None])
        if WINDOW:
            m_s = m_s & (b_entry[None, :] >= first_seen(b_limit, WINDOW)[:, None])
        b_s = tl.where(m_s, b_s * SCALE, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_w = tl.exp2(b_s - b_new[:, None])
        # [BLOCK_R]
        b_shrink = tl.exp2(b_max - b_new)
        b_max = b_new
        b_total = b_total * b_shrink + tl.sum(b_w, 1)
        if FORMAT % 2 == 1:
            b_w *= b_v_scale[None, :]
        if TAIL:
            b_unread = b_unread * b_shrink + tl.sum(tl.where(m_whole[None, :], 0.0, b_w), 1)
        if FORMAT == 3:
            # [BLOCK_N, BLOCK_H]
            b_v, b_v2 = load_planes(p_v + o_kv, p_v_low + o_kv, m_kv, m_whole, b_q.dtype, TAIL, BLOCK_R)
            # [BLOCK_R, BLOCK_H]
            b_out2 = tl.dot(b_w.to(b_v.dtype), b_v2, b_out2 * b_shrink[:, None], input_precision="ieee")
        else:
            # [BLOCK_N, BLOCK_H]
            b_v = widen(tl.load(p_v + o_kv, mask=m_kv, other=0.0), b_q.dtype, BLOCK_R)
        # [BLOCK_R, BLOCK_H]
        b_out = tl.dot(b_w.to(b_v.dtype), b_v, b_out * b_shrink[:, None], input_precision="ieee")

    m_out = m_r[:, None] & m_h[None, :]
    if TAIL:
        b_out += MISSING * b_unread[:, None]
        b_out2 += MISSING * b_unread[:, None]
    if WHOLE:
        b_by = tl.where(b_total > 0, b_total, 1.0)[:, None]
        o_out = ((i_b * n_tokens + o_r // G) * K + i_k) * G + o_r % G
        p_out += o_out[:, None] * H + o_h[None, :]
        tl.store(p_out, (b_out / b_by).to(p_out.dtype.element_ty), mask=m_out)
        if FORMAT == 3:
            tl.store(p_out + HELD, (b_out2 / b_by).to(p_out.dtype.element_ty), mask=m_out)
    else:
        o_part = (i_chunk * tl.num_programs(1) + i_bk).to(tl.int64) * n_rows + o_r
        p_out += o_part[:, None] * H + o_h[None, :]
        tl.store(p_out, b_out, mask=m_out)
        if FORMAT == 3:
            tl.store(p_out + HELD, b_out2, mask=m_out)
        tl.store(p_max + o_part, b_max, mask=m_r)
        tl.store(p_total + o_part, b_total, mask=m_r)


@triton.jit(do_not_specialize=["n_tokens", "n_chunks"])
def merge_kernel(
    p_part, p_max, p_total, p_out, n_tokens, n_chunks,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one row: out [B, T, N, H]."""
    i_r, i_bk = tl.program_id(0), tl.program_id(1)
    n_rows = G * n_tokens
    o_h = tl.arange(0, BLOCK_H)
    # [CHUNKS]
    o_c = tl.arange(0, CHUNKS)
    m_c = o_c < n_chunks
    o_part = (o_c.to(tl.int64) * tl.num_programs(1) + i_bk) * n_rows + i_r
    b_max = tl.load(p_max + o_part, mask=m_c, other=-1e30)
    b_total = tl.load(p_total + o_part, mask=m_c, other=0.0)
    # [CHUNKS, BLOCK_H]
    m_part = m_c[:, None] & (o_h < H)[None, :]
    b_part = tl.load(p_part + o_part[:, None] * H + o_h[None, :], mask=m_part, other=0.0)
    b_w = tl.exp2(b_max - tl.max(b_max, 0))
    total = tl.sum(b_total * b_w, 0)
    # [BLOCK_H]
    b_out = tl.sum(b_part * b_w[:, None], 0) / tl.where(total > 0, total, 1.0)
    o_out = (((i_bk // K).to(tl.int64) * n_tokens + i_r // G) * K + i_bk % K) * G + i_r % G
    tl.store(p_out + o_out * H + o_h, b_out.to(p_out.dtype.element_ty), mask=o_h < H)


def attend(
    q: Tensor, layer: CacheLayer, kv_indices: Tensor, window_start: Tensor, window_width: int, pos: Tensor, n_keys: int,
    page: int, *, arch: int | str,
) -> Tensor:  # fmt: skip
    """See sparse.sparse_attention."""
    n_batch, n_heads, n_tokens, head_dim = q.shape
    n_kv, n_listed = layer.k.shape[1], kv_indices.shape[2]
    group, n_bk = n_heads // n_kv, n_batch * n_kv
    n_rows, n_entries = group * n_tokens, n_listed + window_width
    assert 0 < n_keys <= layer.k.shape[2]
    form = format_of(q, layer)
    assert kv_indices.stride(2) == 1 and n_listed % page == 0 and window_start.is_contiguous() and n_entries > 0
    block_h = max(16, triton.next_power_of_2(head_dim))
    block_r, block_n, num_warps, num_stages, _ = config(arch, entry_size(q, layer.k), block_h, n_rows)
    chunk = chunk_for(n_entries, n_bk)
    n_chunks = triton.cdiv(n_entries, chunk)
    assert n_chunks == 1 or chunk % block_n == 0

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    out = torch.empty((n_batch, n_tokens, n_heads, head_dim), dtype=q.dtype, device=q.device)
    whole = n_chunks == 1
    part = out if whole else fp32(n_chunks, n_bk, n_rows, head_dim)
    maxima, totals = (None, None) if whole else (fp32(n_chunks, n_bk, n_rows), fp32(n_chunks, n_bk, n_rows))
    chunk_kernel[n_chunks, n_bk, triton.cdiv(n_rows, block_r)](
        q, *layer.operands, kv_indices, window_start, pos, part, maxima, totals,
        n_tokens, n_listed, n_entries, chunk, n_keys,
        *strides(q, 3), *strides(layer.k, 2), *strides(layer.v, 2), *strides(layer.k_scale, 2),
        *kv_indices.stride()[:2], *pos.stride(),
        SCALE=head_dim**-0.5 * LOG2_E, K=n_kv, G=group, H=head_dim, PAGE=page, BLOCK_R=block_r,
        BLOCK_H=block_of(head_dim, form), BLOCK_N=block_n, WHOLE=whole, STAGES=num_stages, FORMAT=form, TAIL=layer.tail,
        WINDOW=layer.window, num_warps=num_warps,
    )  # fmt: skip
    if not whole:
        merge_kernel[n_rows, n_bk](
            part, maxima, totals, out, n_tokens, n_chunks, K=n_kv, G=group, H=head_dim, BLOCK_H=block_h,
            CHUNKS=max(2, triton.next_power_of_2(n_chunks)), num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2)
