# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Top-k and top-p in Triton: a search for the cut, digit by digit of the bits of a score, instead of a sort.

A key is the bits of -score, 31 of them: the better a token, the smaller. Each step reads all rows once, many programs
per row, and for each of the 16 values of a digit sums the weights of the keys that begin with the digits found so far;
the next step adds up the sums of its row's programs, and so knows one more digit. Eight steps count tokens (top-k),
eight add weights (top-p); a row without such a filter returns at once. The host reads nothing, and since whole numbers
are added the order of sums does not matter.

Shapes: B rows of scores, V vocabulary, N tiles of a row, 16 values of a digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # scores of a program
WARPS = 8
STEPS = 8  # of a search: 31 bits, 4 per step

_LAST_KEY = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_UNIT = tl.constexpr(2.0**44)
_STEPS = tl.constexpr(STEPS)


@triton.jit
def shift_of(i_step):
    """Bits below the digit that a step looks at."""
    return 28 - 4 * (i_step % _STEPS)


@triton.jit
def weight_of(key):
    """exp(score) in whole units; 0 for NaN."""
    score = -key.to(tl.float32, bitcast=True).to(tl.float64)
    return tl.where(key <= _INFINITE, (tl.exp(score) * _UNIT + 0.5).to(tl.int64), 0)


@triton.jit
def after(p_state, p_sums, i_row, i_step, n_rows, n_tiles, p, TILES: tl.constexpr):
    """The state of a row's search after this step: (limit, prefix, want).

    Its keys up to limit that begin with prefix count, and want is the weight they must supply. p_state
    [2 * STEPS, B, 3] holds the same before each step, p_sums [2 * STEPS, B, N, 16] the sums of the step's programs.
    """
    row = i_step.to(tl.int64) * n_rows + i_row
    limit, prefix, want = tl.load(p_state + row * 3), tl.load(p_state + row * 3 + 1), tl.load(p_state + row * 3 + 2)
    o_d, o_tile = tl.arange(0, 16), tl.arange(0, TILES)
    o_sums = (row * n_tiles + o_tile[:, None]) * 16 + o_d[None, :]
    # [16]
    b_sum = tl.sum(tl.load(p_sums + o_sums, mask=o_tile[:, None] < n_tiles, other=0), 0)
    if i_step == _STEPS:  # the first step that adds weights saw all tokens that top-k keeps
        want = tl.maximum((p * tl.sum(b_sum, 0).to(tl.float64)).to(tl.int64), 1)
    digit = tl.minimum(tl.sum((tl.cumsum(b_sum, 0) < want).to(tl.int64), 0), 15)
    want -= tl.sum(tl.where(o_d < digit, b_sum, 0), 0)
    return limit, prefix | (digit << shift_of(i_step)), want


@triton.jit(do_not_specialize=["i_step", "n_rows"])
def step_kernel(
    p_scores, p_top_k, p_top_p, p_state, p_sums, i_step, n_rows, n_tiles, n_vocab,
    WEIGHS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One more digit: for each of its values, the weight of the keys that begin with the digits found before it."""
    i_row, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row)
    if WEIGHS:
        if p >= 1.0:
            return
    else:
        if k >= n_vocab:
            return
    limit, prefix, want = tl.full([], _LAST_KEY, tl.int64), tl.full([], 0, tl.int64), k
    if i_step % _STEPS != 0:
        limit, prefix, want = after(p_state, p_sums, i_row, i_step - 1, n_rows, n_tiles, p, TILES)
    elif WEIGHS:  # noqa: SIM102  decided when the kernel is built
        if k < n_vocab:  # top-p begins where top-k ended
            _, limit, _ = after(p_state, p_sums, i_row, i_step - 1, n_rows, n_tiles, p, TILES)
    row = i_step.to(tl.int64) * n_rows + i_row
    if i_tile == 0:
        tl.store(p_state + row * 3, limit)
        tl.store(p_state + row * 3 + 1, prefix)
        tl.store(p_state + row * 3 + 2, want)
    o_v = i_tile * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < n_vocab
    # [BLOCK]
    b_key = tl.load(p_scores + i_row * n_vocab + o_v, mask=m_v, other=0.0).to(tl.int32, bitcast=True) & _LAST_KEY
    shift = shift_of(i_step)
    m_here = m_v & (b_key <= limit.to(tl.int32)) & ((((b_key ^ prefix.to(tl.int32)) >> shift) >> 4) == 0)
    p_sums += (row * n_tiles + i_tile) * 16
    if tl.max(m_here.to(tl.int32), 0) == 0:  # soon usual: few tokens share many digits with the cut
        tl.store(p_sums + tl.arange(0, 16), tl.zeros([16], tl.int64))
    else:
        b_digit = tl.where(m_here, (b_key >> shift) & 15, 16)
        b_weight = weight_of(b_key) if WEIGHS else tl.full([BLOCK], 1, tl.int32)
        for i in tl.static_range(16):
            tl.store(p_sums + i, tl.sum(tl.where(b_digit == i, b_weight, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize=["n_rows"])
def cut_kernel(
    p_scores, p_top_k, p_top_p, p_state, p_sums, p_cut, p_last, n_rows, n_tiles, n_vocab,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key that all steps found as a score, and the last place at which it is kept: cut [B], last [B]."""
    i_row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row)
    key, last = tl.full([], _INFINITE, tl.int64), tl.full([], 0, tl.int64) + n_vocab - 1
    if p < 1.0:
        step = tl.full([], 2 * _STEPS - 1, tl.int32)
        _, key, want = after(p_state, p_sums, i_row, step, n_rows, n_tiles, p, TILES)
        weight = tl.maximum(weight_of(key.to(tl.int32)), 1)
        nth = (want - 1) // weight  # equal ones that are kept before the last one
        o_tile = tl.arange(0, TILES)
        o_sums = ((step.to(tl.int64) * n_rows + i_row) * n_tiles + o_tile) * 16 + (key & 15)
        # [TILES] how many equal ones a tile has
        b_equal = tl.load(p_sums + o_sums, mask=o_tile < n_tiles, other=0) // weight
        i_tile = tl.sum((tl.cumsum(b_equal, 0) <= nth).to(tl.int64), 0)
        nth -= tl.sum(tl.where(o_tile < i_tile, b_equal, 0), 0)
        o_v = i_tile * BLOCK + tl.arange(0, BLOCK)
        # [BLOCK]
        b_score = tl.load(p_scores + i_row * n_vocab + o_v, mask=o_v < n_vocab, other=float("nan"))
        m_equal = (b_score.to(tl.int32, bitcast=True) & _LAST_KEY) == key
        last = i_tile * BLOCK + tl.sum((tl.cumsum(m_equal.to(tl.int32), 0) <= nth).to(tl.int64), 0)
    elif k < n_vocab:
        _, key, _ = after(p_state, p_sums, i_row, tl.full([], _STEPS - 1, tl.int32), n_rows, n_tiles, p, TILES)
    tl.store(p_cut + i_row, -key.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(p_last + i_row, last)


def likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """See filters.likeliest."""
    n_rows, n_vocab = scores.shape
    assert scores.dtype == torch.float32 and top_k.dtype == torch.int64 and top_p.dtype == torch.float64
    assert scores.is_contiguous() and top_k.is_contiguous() and top_p.is_contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=scores.device)

    n_tiles = triton.cdiv(n_vocab, BLOCK)
    tiles = triton.next_power_of_2(n_tiles)
    state, sums = new(2 * STEPS, n_rows, 3), new(2 * STEPS, n_rows, n_tiles, 16)
    cut, last = new(n_rows, dtype=torch.float32), new(n_rows)
    if n_rows == 0:
        return cut, last
    for i in range(2 * STEPS):
        step_kernel[n_rows, n_tiles](
            scores, top_k, top_p, state, sums, i, n_rows, n_tiles, n_vocab,
            WEIGHS=i >= STEPS, TILES=tiles, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    cut_kernel[n_rows,](
        scores, top_k, top_p, state, sums, cut, last, n_rows, n_tiles, n_vocab,
        TILES=tiles, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return cut, last
