# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Flash attention in Triton (Dao 2023) for many queries over a static cache, and the attention that each key received.

The R = G * T queries of a kv head are rows, so that neighbours share keys without a copy of them; a tile of rows stops
at its largest position, and only blocks past its smallest are masked: no [T, S] mask is ever in memory.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        R = G * T rows of a kv head (row r is token r // G, head r % G).
"""

from __future__ import annotations

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
    row_limits,
    strides,
    widen,
)
from ...attention import page_sums
from ..ops.sizes import FEW_ROWS, PREFILL_SPLIT
from . import decode as decode_triton

# (family, bytes of an entry, padded head dim) -> rows of a tile, keys of a block, warps, stages, blocks per SM (see
# decode_triton.CONFIGS). Estimated, not timed on a chip: the largest tiles that fit the registers, as such tiles reuse
# keys most; with 16-bit entries an SM holds one. On Hopper the wide products (HGMMA) take 64 rows for four warps, and
# they need 128 keys so as not to wait for shared memory.
#
# Keys and values could come through tensor descriptors (TMA). Compiled for sm_90 by Triton 3.6.0 and 3.7.1 that changes
# neither registers nor blocks per SM, and little in the loop over unmasked blocks (128 rows, 128 keys of 128):
#
#                             instructions   registers   shared      blocks per SM
#   pointers                       510          255      160 KiB          1
#   descriptors                    488          254      161 KiB          1
#   64 rows, 64 keys, pointers     373          236       80 KiB          2   (before scale and subtraction were one)
#   the same, descriptors          366          216       81 KiB          2   (likewise)
#
# warp_specialize=True builds the same binary with eight warps and does not build with four. Descriptors save a
# twentieth of the instructions; they cost a second body (blocks at a row's end still need masks: memory past it may
# be NaN) and two descriptors made on the host for every call.
#
# Entries of one byte pass through registers as they are widened: 128 keys would spill on Hopper, 128 rows on Ampere.
PREFILL = {
    (90, 2, 64): (128, 128, 8, 3, 1), (90, 2, 128): (128, 128, 8, 2, 1), (90, 2, 256): (64, 32, 8, 3, 1),
    (90, 1, 64): (128, 64, 8, 3, 1), (90, 1, 128): (128, 64, 8, 3, 1), (90, 1, 256): (64, 32, 8, 3, 1),
    (90, 4, 64): (16, 32, 8, 3, 2), (90, 4, 128): (16, 32, 8, 2, 2), (90, 4, 256): (16, 16, 4, 3, 2),
    (80, 2, 64): (128, 64, 8, 3, 1), (80, 2, 128): (128, 32, 8, 4, 1), (80, 2, 256): (64, 32, 8, 2, 1),
    (80, 1, 64): (128, 64, 8, 3, 1), (80, 1, 128): (64, 64, 8, 3, 1), (80, 1, 256): (32, 32, 8, 2, 1),
    (80, 4, 64): (16, 32, 4, 3, 2), (80, 4, 128): (16, 32, 8, 3, 2), (80, 4, 256): (16, 16, 4, 3, 1),
}  # fmt: skip
# likewise -> keys of a program, rows of a tile, warps, stages, blocks per SM
KEY_MASS = {
    (90, 2, 64): (128, 64, 8, 3, 2), (90, 2, 128): (128, 64, 8, 3, 2), (90, 2, 256): (128, 32, 8, 2, 2),
    (90, 1, 64): (128, 64, 8, 3, 2), (90, 1, 128): (128, 64, 8, 3, 2), (90, 1, 256): (128, 32, 8, 2, 2),
    (90, 4, 64): (32, 16, 8, 2, 2), (90, 4, 128): (32, 16, 8, 2, 2), (90, 4, 256): (32, 16, 8, 2, 2),
    (80, 2, 64): (128, 64, 8, 3, 2), (80, 2, 128): (128, 64, 8, 2, 2), (80, 2, 256): (128, 32, 8, 2, 2),
    (80, 1, 64): (128, 64, 8, 3, 2), (80, 1, 128): (128, 64, 8, 2, 2), (80, 1, 256): (128, 32, 8, 2, 2),
    (80, 4, 64): (32, 16, 8, 2, 2), (80, 4, 128): (32, 16, 8, 2, 2), (80, 4, 256): (32, 16, 8, 2, 2),
}  # fmt: skip


@triton.jit
def read_block(
    b_q, b_q2, b_q_missing, b_out, b_out2, b_unread, b_max, b_total, p_k, p_v, p_k_scale, p_v_scale, p_k_low, p_v_low,
    b_limit, j, last, whole_from,
    SCALE: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    TAIL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax: BLOCK_N keys from j on; unless MASKED all of them are before all rows.

    H: numbers of an entry that lie together. b_q2 and b_out2: of planes, the second half of heads; b_q_missing and
    b_unread: with a TAIL; else they are anything.
    """
    o_h = tl.arange(0, BLOCK_H)
    # [BLOCK_N]
    o_j = j + tl.arange(0, BLOCK_N)
    if FORMAT % 2 == 1:  # asked for ahead of products that need not wait for them
        b_k_scale = load_scales(p_k_scale + o_j, o_j <= last)
        b_v_scale = load_scales(p_v_scale + o_j, o_j <= last)
    # [BLOCK_N, BLOCK_H]
    o_block = o_j[:, None] * H + o_h[None, :]
    if FORMAT == 3:
        m_block = (o_j <= last)[:, None] & (o_h < H)[None, :]
        m_whole = o_j >= whole_from
        b_k, b_k2 = load_planes(p_k + o_block, p_k_low + o_block, m_block, m_whole, b_q.dtype, TAIL, b_q.shape[0])
    elif MASKED:  # memory past the last key may hold NaN, and 0 * NaN is not 0
        m_block = (o_j <= last)[:, None] & (o_h < H)[None, :]
        b_k = tl.load(p_k + o_block, mask=m_block, other=0.0)
    elif H == BLOCK_H:
        b_k = tl.load(p_k + o_block)
    else:
        b_k = tl.load(p_k + o_block, mask=(o_h < H)[None, :], other=0.0)
    # [BLOCK_R, BLOCK_N]
    b_s = tl.dot(b_q, tl.trans(widen(b_k, b_q.dtype, b_q.shape[0])), input_precision="ieee")
    if FORMAT == 3:
        b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
    if TAIL:
        b_s += tl.where(m_whole, 0.0, 1.0)[None, :] * b_q_missing[:, None]
    if FORMAT % 2 == 1:
        b_s *= b_k_scale[None, :]
    if MASKED:
        m_s = o_j[None, :] <= b_limit[:, None]
        if WINDOW:
            m_s = m_s & (o_j[None, :] >= first_seen(b_limit, WINDOW)[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
    # The scale is positive: only a row's largest score needs it separately, the others get it with the subtraction.
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * SCALE)
    b_w = tl.exp2(b_s * SCALE - b_new[:, None])
    # [BLOCK_R]
    b_shrink = tl.exp2(b_max - b_new)
    b_total = b_total * b_shrink + tl.sum(b_w, 1)
    if FORMAT % 2 == 1:
        b_w *= b_v_scale[None, :]
    if TAIL:
        b_unread = b_unread * b_shrink + tl.sum(tl.where(m_whole[None, :], 0.0, b_w), 1)
    if FORMAT == 3:
        b_v, b_v2 = load_planes(p_v + o_block, p_v_low + o_block, m_block, m_whole, b_q.dtype, TAIL, b_q.shape[0])
        # [BLOCK_R, BLOCK_H]
        b_out2 = tl.dot(b_w.to(b_q.dtype), b_v2, b_out2 * b_shrink[:, None], input_precision="ieee")
    elif MASKED:
        b_v = tl.load(p_v + o_block, mask=m_block, other=0.0)
    elif H == BLOCK_H:
        b_v = tl.load(p_v + o_block)
    else:
        b_v = tl.load(p_v + o_block, mask=(o_h < H)[None, :], other=0.0)
    # [BLOCK_R, BLOCK_H]
    b_out = tl.dot(
        b_w.to(b_q.dtype), widen(b_v, b_q.dtype, b_q.shape[0]), b_out * b_shrink[:, None], input_precision="ieee"
    )
    return b_out, b_out2, b_unread, b_new, b_total


@triton.jit(do_not_specialize=["n_tokens", "n_keys", "pos_b", "pos_t"], do_not_specialize_on_alignment=["p_pos"])
def prefill_kernel(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_k_low, p_v_low, p_pos, p_out, p_lse, n_tokens, n_keys,
    q_b, q_n, q_t, k_b, k_k, v_b, v_k, scale_b, scale_k, pos_b, pos_t,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows to all they may see: out [B, T, N, H]; lse fp32 [B, N, T], natural, or None.

    BLOCK_H: H, of planes H // 2, as a power of 2. TAIL, WINDOW: see CacheLayer.
    """
    HELD: tl.constexpr = H // 2 if FORMAT == 3 else H
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first, so that short ones fill the end
    i_bk = tl.program_id(1)
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    o_h = tl.arange(0, BLOCK_H)
    m_r = o_r < G * n_tokens
    m_tile = m_r[:, None] & (o_h < HELD)[None, :]
    # [BLOCK_R]
    o_t, o_head = (o_r // G).to(tl.int64), i_k * G + o_r % G
    b_limit = row_limits(p_pos + i_b * pos_b, o_t, m_r, n_keys, pos_t)
    # [BLOCK_R, BLOCK_H]
    p_q += i_b * q_b + (o_head * q_n + o_t * q_t)[:, None] + o_h[None, :]
    b_q = tl.load(p_q, mask=m_tile, other=0.0)
    p_k += i_b * k_b + i_k * k_k
    p_v += i_b * v_b + i_k * v_k
    if FORMAT % 2 == 1:
        p_k_scale += i_b * scale_b + i_k * scale_k
        p_v_scale += i_b * scale_b + i_k * scale_k
    if FORMAT == 3:
        p_k_low += i_b * k_b + i_k * k_k
        p_v_low += i_b * v_b + i_k * v_k

    last = tl.max(b_limit, 0)
    # Rows that read nothing do not prevent the others from reading blocks unmasked.
    n_all = tl.min(tl.where(b_limit >= 0, b_limit, last), 0) + 1
    n_all = n_all // BLOCK_N * BLOCK_N
    first = 0
    if WINDOW:  # a tile begins where its first row does, and all of it is masked
        first = tl.min(first_seen(tl.where(b_limit >= 0, b_limit, last), WINDOW), 0) // BLOCK_N * BLOCK_N
        n_all = first
    # Finite, so that a row that has seen no key yet does not subtract infinities.
    b_max = tl.full([BLOCK_R], -1e30, tl.float32)
    b_total = tl.zeros([BLOCK_R], tl.float32)
    b_out = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    # What only planes, and only drafts, have; else anything.
    b_q2, b_out2 = b_q, b_out
    b_q_missing, b_unread, whole_from = b_total, b_total, last
    if FORMAT == 3:
        b_q2 = tl.load(p_q + HELD, mask=m_tile, other=0.0)
        b_out2 = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    if TAIL:
        whole_from = (tl.load(p_pos + i_b * pos_b) - (TAIL - 1)).to(tl.int32)
        # [BLOCK_R]
        b_q_missing = MISSING * (tl.sum(b_q.to(tl.float32), 1) + tl.sum(b_q2.to(tl.float32), 1))
        b_unread = tl.zeros([BLOCK_R], tl.float32)
    for j in range(first, n_all, BLOCK_N):
        b_out, b_out2, b_unread, b_max, b_total = read_block(
            b_q, b_q2, b_q_missing, b_out, b_out2, b_unread, b_max, b_total, p_k, p_v, p_k_scale, p_v_scale, p_k_low,
            p_v_low, b_limit, j, last, whole_from, SCALE, HELD, BLOCK_H, BLOCK_N, FORMAT, TAIL, WINDOW, False,
        )  # fmt: skip
    for j in range(n_all, last + 1, BLOCK_N):
        b_out, b_out2, b_unread, b_max, b_total = read_block(
            b_q, b_q2, b_q_missing, b_out, b_out2, b_unread, b_max, b_total, p_k, p_v, p_k_scale, p_v_scale, p_k_low,
            p_v_low, b_limit, j, last, whole_from, SCALE, HELD, BLOCK_H, BLOCK_N, FORMAT, TAIL, WINDOW, True,
        )  # fmt: skip

    b_total = tl.where(b_limit >= 0, b_total, 1.0)
    o_out = (i_b * n_tokens + o_t) * (K * G) + o_head
    p_out += o_out[:, None] * H + o_h[None, :]
    if TAIL:
        b_out += MISSING * b_unread[:, None]
        b_out2 += MISSING * b_unread[:, None]
    tl.store(p_out, tl.where((b_limit >= 0)[:, None], b_out / b_total[:, None], 0.0), mask=m_tile)
    if FORMAT == 3:
        tl.store(p_out + HELD, tl.where((b_limit >= 0)[:, None], b_out2 / b_total[:, None], 0.0), mask=m_tile)
    if p_lse is not None:
        b_lse = tl.where(b_limit >= 0, (b_max + tl.log2(b_total)) * 0.6931471805599453, float("-inf"))
        tl.store(p_lse + (i_b * (K * G) + o_head) * n_tokens + o_t, b_lse, mask=m_r)


@triton.jit(do_not_specialize=["n_tokens", "n_keys", "pos_b", "pos_t"], do_not_specialize_on_alignment=["p_pos"])
def mass_kernel(
    p_q, p_k, p_k_scale, p_k_low, p_lse, p_pos, p_mass, n_tokens, n_keys,
    q_b, q_n, q_t, k_b, k_k, scale_b, scale_k, pos_b, pos_t,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, TAIL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The mass of BLOCK_N keys from all rows: mass fp32 [B, K, n_keys // UNIT], 0 past the last key."""
    HELD: tl.constexpr = H // 2 if FORMAT == 3 else H
    i_block, i_bk = tl.program_id(0), tl.program_id(1)
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    n_rows = G * n_tokens
    p_q += i_b * q_b + i_k * G * q_n
    p_lse += (i_b * K + i_k) * n_rows
    p_pos += i_b * pos_b
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < HELD
    # [BLOCK_N]
    o_j = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    last, first = -1, n_keys
    for i_t in range(0, n_tokens, BLOCK_N):
        o_t = i_t + tl.arange(0, BLOCK_N)
        b_limit = row_limits(p_pos, o_t, o_t < n_tokens, n_keys, pos_t)
        last = tl.maximum(last, tl.max(b_limit, 0))
        if WINDOW:
            first = tl.minimum(first, tl.min(tl.where(b_limit >= 0, first_seen(b_limit, WINDOW), n_keys), 0))
    m_j = o_j <= last
    any_seen = i_block * BLOCK_N <= last
    if WINDOW:
        m_j = m_j & (o_j >= first)
        any_seen = any_seen & ((i_block + 1) * BLOCK_N > first)
    # [BLOCK_N, BLOCK_H]
    m_block = m_j[:, None] & m_h[None, :]
    o_block = i_b * k_b + i_k * k_k + o_j.to(tl.int64)[:, None] * HELD + o_h[None, :]
    if FORMAT == 3:
        m_whole = o_j >= 0
        if TAIL:
            m_whole = o_j >= (tl.load(p_pos) - (TAIL - 1)).to(tl.int32)
        b_k, b_k2 = load_planes(p_k + o_block, p_k_low + o_block, m_block, m_whole, p_q.dtype.element_ty, TAIL)
    else:
        b_k = widen(tl.load(p_k + o_block, mask=m_block, other=0.0), p_q.dtype.element_ty)
    # [BLOCK_N]
    b_scale = tl.full([BLOCK_N], SCALE, tl.float32)
    if FORMAT % 2 == 1:
        b_scale *= load_scales(p_k_scale + i_b * scale_b + i_k * scale_k + o_j, m_j)
    b_mass = tl.zeros([BLOCK_N], tl.float32)
    if any_seen:
        for i_r in range(0, n_rows, BLOCK_R):
            # [BLOCK_R]
            o_r = i_r + tl.arange(0, BLOCK_R)
            m_r = o_r < n_rows
            o_t, o_g = (o_r // G).to(tl.int64), (o_r % G).to(tl.int64)
            b_limit = row_limits(p_pos, o_t, m_r, n_keys, pos_t)
            b_lse = tl.load(p_lse + o_g * n_tokens + o_t, mask=b_limit >= 0, other=0.0) * 1.4426950408889634
            # [BLOCK_R, BLOCK_H]
            o_q = (o_g * q_n + o_t * q_t)[:, None] + o_h[None, :]
            b_q = tl.load(p_q + o_q, mask=m_r[:, None] & m_h[None, :], other=0.0)
            # [BLOCK_N, BLOCK_R]
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
            if FORMAT == 3:
                b_q2 = tl.load(p_q + HELD + o_q, mask=m_r[:, None] & m_h[None, :], other=0.0)
                b_s = tl.dot(b_k2, tl.trans(b_q2), b_s, input_precision="ieee")
                if TAIL:
                    b_q_missing = MISSING * (tl.sum(b_q.to(tl.float32), 1) + tl.sum(b_q2.to(tl.float32), 1))
                    b_s += tl.where(m_whole, 0.0, 1.0)[:, None] * b_q_missing[None, :]
            b_s *= b_scale[:, None]
            m_s = o_j[:, None] <= b_limit[None, :]
            if WINDOW:
                m_s = m_s & (o_j[:, None] >= first_seen(b_limit, WINDOW)[None, :])
            b_w = tl.where(m_s, tl.exp2(b_s - b_lse[None, :]), 0.0)
            b_mass += tl.sum(b_w, 1)
    # [BLOCK_N // UNIT]
    b_unit = tl.sum(tl.reshape(b_mass, [BLOCK_N // UNIT, UNIT]), 1)
    o_u = i_block * (BLOCK_N // UNIT) + tl.arange(0, BLOCK_N // UNIT)
    n_units = n_keys // UNIT
    tl.store(p_mass + i_bk.to(tl.int64) * n_units + o_u, b_unit, mask=o_u < n_units)


def attend(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, *, arch: int | str) -> Tensor:
    """See prefill.prefill_attention."""
    if q.shape[1] // layer.k.shape[1] * q.shape[2] <= FEW_ROWS:
        return decode_triton.attend(q, layer, pos, n_keys, PREFILL_SPLIT, arch=arch)
    return _attend(q, layer, pos, n_keys, None, arch)


def attend_with_lse(
    q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, *, arch: int | str
) -> tuple[Tensor, Tensor]:
    """See prefill.prefill_attention_with_lse."""
    n_batch, n_heads, n_tokens, _ = q.shape
    n_kv = layer.k.shape[1]
    lse = torch.empty((n_batch, n_heads, n_tokens), dtype=torch.float32, device=q.device)
    if n_heads // n_kv * n_tokens > FEW_ROWS:
        return _attend(q, layer, pos, n_keys, lse, arch), lse
    rows = torch.empty((n_batch, n_kv, n_tokens, n_heads // n_kv), dtype=torch.float32, device=q.device)
    out = decode_triton.attend(q, layer, pos, n_keys, PREFILL_SPLIT, rows, arch=arch)
    torch.div(rows.transpose(2, 3), LOG2_E, out=lse.unflatten(1, (n_kv, -1)))
    return out, lse


def _attend(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, lse: Tensor | None, arch: int | str) -> Tensor:
    n_batch, n_heads, n_tokens, head_dim = q.shape
    n_kv = layer.k.shape[1]
    group = n_heads // n_kv
    assert 0 < n_keys <= layer.k.shape[2] and n_keys * head_dim < 2**31
    form = format_of(q, layer)
    block_h = max(16, triton.next_power_of_2(head_dim))
    block_r, block_n, num_warps, num_stages, _ = PREFILL[family(arch), entry_size(q, layer.k), max(block_h, 64)]
    out = torch.empty((n_batch, n_tokens, n_heads, head_dim), dtype=q.dtype, device=q.device)
    prefill_kernel[triton.cdiv(group * n_tokens, block_r), n_batch * n_kv](
        q, *layer.operands, pos, out, lse, n_tokens, n_keys,
        *strides(q, 3), *strides(layer.k, 2), *strides(layer.v, 2), *strides(layer.k_scale, 2), *pos.stride(),
        SCALE=head_dim**-0.5 * LOG2_E, K=n_kv, G=group, H=head_dim, BLOCK_R=block_r,
        BLOCK_H=block_of(head_dim, form), BLOCK_N=block_n, FORMAT=form, TAIL=layer.tail, WINDOW=layer.window,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out.transpose(1, 2)


def key_mass(
    q: Tensor, layer: CacheLayer, lse: Tensor, pos: Tensor, n_keys: int, page: int, *, arch: int | str
) -> Tensor:
    """See prefill.key_mass."""
    n_batch, n_heads, n_tokens, head_dim = q.shape
    n_kv = layer.k.shape[1]
    assert 0 < n_keys <= layer.k.shape[2]
    form = format_of(q, layer)
    block_h = max(16, triton.next_power_of_2(head_dim))
    block_n, block_r, num_warps, num_stages, _ = KEY_MASS[family(arch), entry_size(q, layer.k), max(block_h, 64)]
    unit = min(page, block_n)
    assert block_n % unit == page % unit == 0 and lse.is_contiguous()
    mass = torch.empty((n_batch, n_kv, n_keys // unit), dtype=torch.float32, device=q.device)
    mass_kernel[triton.cdiv(n_keys, block_n), n_batch * n_kv](
        q, layer.k, layer.k_scale, layer.k_low, lse, pos, mass, n_tokens, n_keys,
        *strides(q, 3), *strides(layer.k, 2), *strides(layer.k_scale, 2), *pos.stride(),
        SCALE=head_dim**-0.5 * LOG2_E, K=n_kv, G=n_heads // n_kv, H=head_dim, UNIT=unit, BLOCK_R=block_r,
        BLOCK_H=block_of(head_dim, form), BLOCK_N=block_n, FORMAT=form, TAIL=layer.tail, WINDOW=layer.window,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return mass if unit == page else page_sums(mass, page // unit)
