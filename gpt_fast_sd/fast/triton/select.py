# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Selection in Triton: the n best of a row of scores, in ascending order of place, deterministic.

One program per row. The n-th best score is found by bisection over the ordered bits of a float: each step counts the
scores at or above the middle, and it ends as soon as they are n, after some 15 steps for scores without ties. Then one
prefix sum gives each selected one its place in the list. A row is read again at every step, from L1 if it fits (64K
scores on Hopper), so no kernel is specialized for a length: P may grow during a run.

Shapes: B slots, L layers, N query heads, K kv heads, G = N // K, H head dim, R = G * T query rows of a kv head,
        P scores of a row, S cache capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from .common import strides

BLOCK = 2048  # scores looked at together
WARPS = 8
PAGES_WEIGHED = 128  # pages of a program that compares scores


@triton.jit
def ordered(score):
    """An integer that is ordered like the scores (not NaN); -0.0 comes just before 0.0."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def score_of(order):
    """The score with that integer."""
    bits = order.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def cut(p_scores, n_valid, wanted, BLOCK: tl.constexpr):
    """Where to cut a row of n_valid scores to get the best: (t, n_above, n_numbers).

    Selected are the n_above scores of order t + 1 and more, and the first ones of order t. If there are fewer numbers
    than wanted, all n_numbers of them and the first NaN are selected.
    """
    o_p = tl.arange(0, BLOCK)
    # [BLOCK]
    b_least = tl.full([BLOCK], float("inf"), tl.float32)
    b_most = tl.full([BLOCK], float("-inf"), tl.float32)
    b_count = tl.zeros([BLOCK], tl.int32)
    for j in range(0, n_valid, BLOCK):
        b_score = tl.load(p_scores + j + o_p, mask=j + o_p < n_valid, other=float("nan"))
        m_number = b_score == b_score
        b_least = tl.minimum(b_least, tl.where(m_number, b_score, float("inf")))
        b_most = tl.maximum(b_most, tl.where(m_number, b_score, float("-inf")))
        b_count += m_number.to(tl.int32)
    n_numbers = tl.sum(b_count, 0)
    low, high = ordered(tl.min(b_least, 0)), ordered(tl.max(b_most, 0))
    high = tl.where(high == -1, 0, high)  # a best of -0.0 is as good as 0.0: nothing may be above a cut at zeros
    n_above = tl.zeros([], tl.int32)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        bound = score_of(middle)
        b_count = tl.zeros([BLOCK], tl.int32)
        for j in range(0, n_valid, BLOCK):
            b_score = tl.load(p_scores + j + o_p, mask=j + o_p < n_valid, other=float("nan"))
            b_count += (b_score >= bound).to(tl.int32)
        count = tl.sum(b_count, 0)
        # Exactly enough, so the bisection ends one below the middle.
        low = tl.where(count > wanted, middle, tl.where(count == wanted, middle - 1, low))
        n_above = tl.where(count > wanted, n_above, count)
        high = tl.where(count > wanted, high, middle - 1)
    return low, n_above, n_numbers


@triton.jit(
    do_not_specialize=["n_scores", "n_wanted", "width", "valid_a", "valid_b", "valid_c"],
    do_not_specialize_on_alignment=["p_scores", "p_n_valid", "p_due", "p_out"],
)
def select_kernel(
    p_scores, p_n_valid, p_due, p_out, n_scores, n_wanted, width, valid_a, valid_b, valid_c,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The n_wanted best of the first n_valid scores of row (a, b, c) of [A, B, C, n_scores] -> out [A, B, C, width].

    A page is written as its PAGE entries; -1 if there are fewer. Rows b that are not due stay unchanged.
    """
    i_c, i_b, i_a = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if p_due is not None:  # noqa: SIM102  decided when the kernel is built
        if tl.load(p_due + i_b) == 0:
            return
    i_row = ((i_a * tl.num_programs(1) + i_b) * tl.num_programs(0) + i_c).to(tl.int64)
    n_valid = tl.load(p_n_valid + i_a * valid_a + i_b * valid_b + i_c * valid_c)
    n_valid = tl.maximum(tl.minimum(n_valid, n_scores), 0).to(tl.int32)
    wanted = tl.minimum(n_valid, n_wanted)
    p_scores += i_row * n_scores
    p_out += i_row * width
    order, n_above, n_numbers = cut(p_scores, n_valid, wanted, BLOCK)
    few = n_numbers < wanted  # numbers: then NaN are selected, too
    need = wanted - tl.where(few, n_numbers, n_above)
    bound, above = score_of(order), score_of(order + 1)

    o_p = tl.arange(0, BLOCK)
    n_better = tl.zeros([], tl.int32)
    n_equal = tl.zeros([], tl.int32)
    for j in range(0, n_valid, BLOCK):
        m_p = j + o_p < n_valid
        b_score = tl.load(p_scores + j + o_p, mask=m_p, other=float("nan"))
        # [BLOCK]
        m_number = b_score == b_score
        m_better = tl.where(few, m_number, b_score >= above)
        m_equal = m_p & (m_better == 0) & tl.where(few, m_number == 0, b_score == bound)
        b_pair = m_better.to(tl.int32) + (m_equal.to(tl.int32) << 16)  # two counts in one prefix sum
        b_before = tl.cumsum(b_pair, 0) - b_pair
        b_better = n_better + (b_before & 0xFFFF)
        b_equal = n_equal + (b_before >> 16)
        o_out = (b_better + tl.minimum(b_equal, need)) * PAGE
        m_taken = m_better | (m_equal & (b_equal < need))
        for i in range(PAGE):
            tl.store(p_out + o_out + i, ((j + o_p) * PAGE + i).to(tl.int64), mask=m_taken)
        pair = tl.sum(b_pair, 0)
        n_better += pair & 0xFFFF
        n_equal += pair >> 16
    for j in range(wanted * PAGE, width, BLOCK):
        tl.store(p_out + j + o_p, tl.full([BLOCK], -1, tl.int64), mask=j + o_p < width)


@triton.jit
def next_bf16(b_x, UP: tl.constexpr):
    """Rounded to bf16, and the number of that dtype that comes next: above if UP, else below."""
    bits = b_x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    order = tl.where(bits >= 0, bits, -(bits & 0x7FFF))  # zeros of both signs are 0
    order = tl.minimum(order + 1, 0x7F80) if UP else tl.maximum(order - 1, -0x7F80)
    return tl.where(order >= 0, order, -order - 0x8000).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(
    do_not_specialize=["n_bounds", "k_b", "k_k", "scale_b", "scale_k"],
    do_not_specialize_on_alignment=["p_first", "p_k_scale"],
)
def bounds_kernel(
    p_k, p_k_scale, p_k_low, p_bounds, p_first, n_bounds, k_b, k_k, scale_b, scale_k, bounds_b, bounds_k,
    K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The largest and the smallest key of each dimension of one page -> bounds [B, K, n_bounds, 2H].

    Of planes byte h of both is dimension h and, in the upper halves, h + H // 2.
    """
    i_page, i_bk = tl.program_id(0), tl.program_id(1)
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    page = tl.minimum(tl.load(p_first + i_b) + i_page, n_bounds - 1).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < H
    o_n = page * PAGE + tl.arange(0, PAGE)
    p_k += i_b * k_b + i_k * k_k
    # [PAGE, BLOCK_H]
    if p_k_low is None:
        b_k = tl.load(p_k + o_n[:, None] * H + o_h[None, :], mask=m_h[None, :], other=0.0).to(tl.float32)
    else:
        o_plane = o_n[:, None] * (H // 2) + (o_h % (H // 2))[None, :]
        b_up = tl.load(p_k + o_plane, mask=m_h[None, :], other=0).to(tl.int32)
        b_low = tl.load(p_k_low + i_b * k_b + i_k * k_k + o_plane, mask=m_h[None, :], other=0).to(tl.int32)
        b_shift = tl.where(o_h < H // 2, 0, 4)[None, :]
        b_k = (16 * ((b_up >> b_shift) & 15) + ((b_low >> b_shift) & 15) - 128).to(tl.float32)
    if p_k_scale is not None:
        b_k *= tl.load(p_k_scale + i_b * scale_b + i_k * scale_k + o_n).to(tl.float32)[:, None]
    # [BLOCK_H]
    b_high, b_low = tl.max(b_k, 0), tl.min(b_k, 0)
    if p_k_scale is not None:
        b_high, b_low = next_bf16(b_high, True), next_bf16(b_low, False)
    p_bounds += i_b * bounds_b + i_k * bounds_k + page * (2 * H)
    tl.store(p_bounds + o_h, b_high.to(p_bounds.dtype.element_ty), mask=m_h)
    tl.store(p_bounds + H + o_h, b_low.to(p_bounds.dtype.element_ty), mask=m_h)


@triton.jit(
    do_not_specialize=["n_tokens", "n_pages"], do_not_specialize_on_alignment=["p_n_closed", "p_scores", "p_best"]
)
def score_kernel(
    p_q, p_bounds, p_n_closed, p_scores, p_best, n_tokens, n_pages, q_b, q_n, q_t, bounds_b, bounds_k,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Upper bounds of rows' products with any key of closed pages: scores [B * K, R, P]; best [B * K, R, P / BLOCK_P].

    Row r is token r // G, head r % G. Pages that are not closed are neither read nor written.
    """
    i_block, i_bk, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    n_closed = tl.minimum(tl.load(p_n_closed + i_b), n_pages).to(tl.int32)
    if i_block * BLOCK_P >= n_closed:
        return
    n_rows = G * n_tokens
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    o_h = tl.arange(0, BLOCK_H)
    o_p = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    m_r, m_h, m_p = o_r < n_rows, o_h < H, o_p < n_closed
    p_q += i_b * q_b + i_k * G * q_n
    o_q = (o_r % G).to(tl.int64) * q_n + (o_r // G).to(tl.int64) * q_t
    # [BLOCK_R, BLOCK_H]
    b_q = tl.load(p_q + o_q[:, None] + o_h[None, :], mask=m_r[:, None] & m_h[None, :], other=0.0)
    b_up = tl.maximum(b_q.to(tl.float32), 0.0).to(b_q.dtype)
    b_down = tl.minimum(b_q.to(tl.float32), 0.0).to(b_q.dtype)
    # [BLOCK_P, BLOCK_H]
    p_bound = p_bounds + i_b * bounds_b + i_k * bounds_k + o_p.to(tl.int64)[:, None] * (2 * H) + o_h[None, :]
    m_bound = m_p[:, None] & m_h[None, :]
    b_largest = tl.load(p_bound, mask=m_bound, other=0.0)
    b_smallest = tl.load(p_bound + H, mask=m_bound, other=0.0)
    # [BLOCK_R, BLOCK_P]
    b_s = tl.dot(b_up, tl.trans(b_largest), input_precision="ieee")
    b_s = tl.dot(b_down, tl.trans(b_smallest), b_s, input_precision="ieee")
    o_row = i_bk.to(tl.int64) * n_rows + o_r
    tl.store(p_scores + o_row[:, None] * n_pages + o_p[None, :], b_s, mask=m_r[:, None] & m_p[None, :])
    b_best = tl.max(tl.where(m_p[None, :], b_s, float("-inf")), 1)
    tl.store(p_best + o_row * tl.num_programs(0) + i_block, b_best, mask=m_r)


@triton.jit(
    do_not_specialize=["n_rows", "n_pages", "n_blocks"],
    do_not_specialize_on_alignment=["p_scores", "p_best", "p_n_closed", "p_short"],
)
def weigh_kernel(
    p_scores, p_best, p_n_closed, p_short, n_rows, n_pages, n_blocks,
    K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The smallest gap of each closed page to a row's best page, over the rows: short [B * K, P]."""
    i_block, i_bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n_closed = tl.minimum(tl.load(p_n_closed + i_bk // K), n_pages).to(tl.int32)
    if i_block * BLOCK_W >= n_closed:
        return
    o_p = i_block * BLOCK_W + tl.arange(0, BLOCK_W)
    m_p = o_p < n_closed
    # [BLOCK_W]
    b_short = tl.full([BLOCK_W], float("-inf"), tl.float32)
    for i_r in range(0, n_rows, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        m_r = o_r < n_rows
        o_row = i_bk * n_rows + o_r
        # [BLOCK_R]
        b_best = tl.full([BLOCK_R], float("-inf"), tl.float32)
        for i_s in range(0, tl.cdiv(n_closed, BLOCK_P), BLOCK_S):
            o_s = i_s + tl.arange(0, BLOCK_S)
            m_s = m_r[:, None] & (o_s * BLOCK_P < n_closed)[None, :]
            # [BLOCK_R, BLOCK_S]
            b_s = tl.load(p_best + o_row[:, None] * n_blocks + o_s[None, :], mask=m_s, other=float("-inf"))
            b_best = tl.maximum(b_best, tl.max(b_s, 1))
        # [BLOCK_R, BLOCK_W]
        m_score = m_r[:, None] & m_p[None, :]
        b_score = tl.load(p_scores + o_row[:, None] * n_pages + o_p[None, :], mask=m_score, other=0.0)
        b_score = tl.where(m_score, b_score - b_best[:, None], float("-inf"))
        b_short = tl.maximum(b_short, tl.max(b_score, 0))
    tl.store(p_short + i_bk * n_pages + o_p, b_short, mask=m_p)


def top_pages(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    """See selection.top_pages."""
    out = torch.empty((*scores.shape[:-1], n), dtype=torch.int64, device=scores.device)
    missing = [0] * (3 - n_valid.dim())
    _select(scores, n_valid, [*missing, *strides(n_valid, n_valid.dim())], None, out, n, 1)
    return out


def guided_select(mass: Tensor, kv_indices: Tensor, due: Tensor, first_window_page: Tensor, page: int) -> None:
    """See selection.guided_select."""
    assert first_window_page.is_contiguous() and due.is_contiguous()
    _select(mass, first_window_page, [0, 1, 0], due, kv_indices, kv_indices.shape[-1] // page, page)


def _select(
    scores: Tensor, n_valid: Tensor, valid_strides: list[int], due: Tensor | None, out: Tensor, n: int, page: int
) -> None:
    assert scores.dtype == torch.float32 and n_valid.dtype == out.dtype == torch.int64
    assert scores.is_contiguous() and out.is_contiguous() and scores.dim() <= 4
    a, b, c = [1] * (4 - scores.dim()) + list(scores.shape[:-1])
    select_kernel[c, b, a](
        scores, n_valid, due, out, scores.shape[-1], n, out.shape[-1], *valid_strides,
        PAGE=page, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def page_bounds(layer: CacheLayer, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    """See selection.page_bounds."""
    (n_batch, n_kv), head_dim, k_scale, k_low = layer.k.shape[:2], bounds.shape[3] // 2, layer.k_scale, layer.k_low
    ((width,), dtype), *_ = layer.format.parts(head_dim)
    assert layer.k.dtype == dtype and layer.k.stride()[2:] == (width, 1) and bounds.stride()[2:] == (2 * head_dim, 1)
    assert bounds.dtype == (torch.bfloat16 if layer.format.scaled else dtype)
    assert k_scale is None or k_scale.stride(2) == 1
    assert k_low is None or (k_low.dtype == dtype and k_low.stride() == layer.k.stride())
    assert first.dtype == torch.int64 and first.is_contiguous()
    bounds_kernel[n_pages, n_batch * n_kv](
        layer.k, k_scale, k_low, bounds, first, bounds.shape[2], *strides(layer.k, 2), *strides(k_scale, 2),
        *strides(bounds, 2),
        K=n_kv, H=head_dim, BLOCK_H=triton.next_power_of_2(head_dim), PAGE=page, num_warps=4,
    )  # fmt: skip


def quest_pages(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    """See selection.quest_pages."""
    n_batch, n_heads, n_tokens, head_dim = q.shape
    n_kv, n_pages = bounds.shape[1:3]
    group, n_bk = n_heads // n_kv, n_batch * n_kv
    n_rows, block_h = group * n_tokens, max(16, triton.next_power_of_2(head_dim))
    if q.element_size() == 4:  # without tensor cores larger tiles would spill
        block_r, block_p = 16, 16
    else:  # a program holds the bounds of its pages in registers, 32 KiB
        block_r = min(max(16, triton.next_power_of_2(n_rows)), 64, 8192 // block_h)
        block_p = min(64, 8192 // block_h)
    n_blocks = triton.cdiv(n_pages, block_p)
    assert q.dtype == bounds.dtype and q.stride(3) == 1 and bounds.stride()[2:] == (2 * head_dim, 1)
    assert n_closed.dtype == torch.int64 and n_closed.is_contiguous()

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    scores, best, short = fp32(n_bk, n_rows, n_pages), fp32(n_bk, n_rows, n_blocks), fp32(n_batch, n_kv, n_pages)
    score_kernel[n_blocks, n_bk, triton.cdiv(n_rows, block_r)](
        q, bounds, n_closed, scores, best, n_tokens, n_pages, *strides(q, 3), *strides(bounds, 2),
        K=n_kv, G=group, H=head_dim, BLOCK_R=block_r, BLOCK_H=block_h, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    weigh_kernel[triton.cdiv(n_pages, PAGES_WEIGHED), n_bk](
        scores, best, n_closed, short, n_rows, n_pages, n_blocks,
        K=n_kv, BLOCK_P=block_p, BLOCK_R=16, BLOCK_S=64, BLOCK_W=PAGES_WEIGHED, num_warps=4,
    )  # fmt: skip
    out = torch.empty((n_batch, n_kv, n), dtype=torch.int64, device=q.device)
    _select(short, n_closed, [0, 1, 0], None, out, n, 1)
    return out
