"""Attention on a CPU: the C++ kernel in compiled steps that it serves, else PyTorch.

Eager steps call the C++ kernel only if it was built beforehand: eager code starts at once. All bodies keep the promises
of decode.py, prefill.py and sparse.py, on one more condition: values must be finite, in PyTorch all that are in view,
in C++ those that any query of the row sees, as they have a weight that is an exact zero for other queries (keys and
scales may be anything). Empty keys past a row's own, in view because a neighbour is longer, change no bit of
`attend_rows`; a matrix product over more keys may round differently.

Shapes: B batch rows, T tokens in this call, S cache capacity, n_keys in view, N query heads, K kv heads, G = N // K,
        H head dim, R = G * T query rows that share one kv head, M entries named.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.planes import drafted, first_whole, joined
from ..ops.sizes import is_float8, page_sums
from .attention_cpp import PAGE, cpu_attention, cpu_attention_at, cpu_attention_fits, cpu_attention_with_mass, is_here

QUERY_BLOCK = 128  # query tokens scored at once in prefill: bounds the scores to G * 128 * n_keys per kv head
SUMMED = 256  # weights that are summed first: one sum over all keys compiles to slow code past 4096
LEAST = -1e30  # a finite maximum for a query that sees nothing: its weights are zeros, not NaN


def cpp_serves(q: Tensor, k: Tensor) -> bool:
    """Whether this code attends with the C++ kernel: if it is being traced, or the kernel is there already."""
    return (torch.compiler.is_compiling() or is_here(q.shape[-1], q.dtype, k.dtype)) and cpu_attention_fits(q, k)


def attend(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    """See decode.decode_attention: the fastest body for this shape."""
    if cpp_serves(q, k):
        return cpu_attention(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail, fine)
    k, k_scale = in_view(q, pos, n_keys, k, k_scale, k_low, tail)
    v, v_scale = in_view(q, pos, n_keys, v, v_scale, v_low, tail)
    few = q.shape[1] // k.shape[1] * q.shape[2] <= 3
    if torch.compiler.is_compiling() and few and n_keys % SUMMED == 0:
        return attend_rows(q, k, v, pos, k_scale, v_scale)
    return attend_matmul(q, k, v, pos, k_scale, v_scale)


def attend_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, page: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See decode.decode_attention_with_mass."""
    if page % PAGE == 0 and cpp_serves(q, k):
        out, mass = cpu_attention_with_mass(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail, fine)
        return out, page_sums(mass, page // PAGE)
    keys = in_view(q, pos, n_keys, k, k_scale, k_low, tail)
    out, weights, total, _ = _attend_block(q, *keys, *in_view(q, pos, n_keys, v, v_scale, v_low, tail), pos)
    return out, page_sums((weights / total[..., None]).sum((2, 3)), page)


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See prefill.prefill_attention_with_lse; all queries are scored at once."""
    keys = in_view(q, pos, n_keys, k, k_scale, k_low, tail)
    out, _, total, best = _attend_block(q, *keys, *in_view(q, pos, n_keys, v, v_scale, v_low, tail), pos)
    lse = (best + total.log()).flatten(1, 2)  # [B, N, T]
    return out, torch.where((pos < n_keys)[:, None], lse, float("-inf"))


def attend_at(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, pos: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to the entries in index that are at or before each query; -1 is empty.

    q [B, N, T, H]; k, v [B, K, S, H]; index int64 [B, K, M] without repeats; pos [B, T]; k_scale, v_scale fp16
    [B, K, S]; k_low, v_low like k, v, which are planes then -> [B, N, T, H]
    """
    if cpp_serves(q, k):
        return cpu_attention_at(q, k, v, index, pos, k_scale, v_scale, k_low, v_low, tail, fine)
    n_kv, n_tokens = k.shape[1], q.shape[2]
    seen = (index[:, :, None] >= 0) & (index[:, :, None] <= pos[:, None, :, None])  # [B, K, T, M]
    place = index.clamp(0, k.shape[2] - 1)  # [B, K, M]
    where = place[..., None].expand(-1, -1, -1, k.shape[3])  # [B, K, M, H]
    whole = place >= first_whole(pos, tail)[:, None, None] if tail else None  # [B, K, M]
    picked_k, picked_v = (
        numbers(picked(x, where), None if low is None else picked(low, where), whole, q.dtype).to(q.dtype)
        for x, low in ((k, k_low), (v, v_low))
    )  # [B, K, M, H]
    k_scale, v_scale = (None if x is None else x.gather(2, place) for x in (k_scale, v_scale))  # [B, K, M]
    rows = q.unflatten(1, (n_kv, -1)).flatten(2, 3)  # [B, K, R, H]
    scores = (rows @ picked_k.transpose(-1, -2)).float() * score_scale(q, k_scale)  # [B, K, R, M]
    scores = torch.where(seen[:, :, None], scores.unflatten(2, (-1, n_tokens)), float("-inf"))  # [B, K, G, T, M]
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=LEAST)).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=1.0)  # [B, K, G, T, 1]; the best one's weight is 1
    shares = with_scale(weights.flatten(2, 3), v_scale)  # [B, K, R, M]
    out = (shares.to(q.dtype) @ picked_v).unflatten(2, (-1, n_tokens))  # [B, K, G, T, H]
    mixed: Tensor = (out / total.to(out.dtype)).flatten(1, 2)
    return mixed


def picked(x: Tensor, where: Tensor) -> Tensor:
    """x.gather(2, where), of float8 by its bytes, since no CPU gathers that."""
    return x.view(torch.int8).gather(2, where).view(x.dtype) if is_float8(x) else x.gather(2, where)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> Tensor:
    """Few query rows per kv head, compiled: each row is its own pair of reductions over k and v.

    Inductor fuses the reductions of all R rows into one loop, so keys and values are read and widened once, with no
    matrix product and no bf16 score in between. Measured on 2 AVX-512 cores it reads the cache about 1.5x faster than
    batched matrix products for R = 2, is level at R = 4 and slower beyond. Uncompiled it would write fp32 copies.

    q [B, N, T, H]; k, v [B, K, n_keys, H], whole blocks of SUMMED; pos [B, T]; scales [B, K, n_keys] -> [B, N, T, H]
    """
    n_kv, n_tokens, head_dim = k.shape[1], q.shape[2], q.shape[3]
    wide_k: Tensor = k.unflatten(2, (-1, SUMMED)).float()  # [B, K, n, SUMMED, H]
    wide_v: Tensor = v.unflatten(2, (-1, SUMMED)).float()  # [B, K, n, SUMMED, H]
    rows: Tensor = q.unflatten(1, (n_kv, -1)).flatten(2, 3).float()  # [B, K, R, H]
    seen = visible(pos, k.shape[2]).unflatten(-1, (-1, SUMMED))  # [B, T, n, SUMMED]
    scale: Tensor | float = head_dim**-0.5
    if k_scale is not None:
        scale = k_scale.unflatten(2, (-1, SUMMED)).float() * scale  # [B, K, n, SUMMED]
    weights = []
    for r in range(rows.shape[2]):
        score = (rows[:, :, r, None, None] * wide_k).sum(-1) * scale  # [B, K, n, SUMMED]
        score = torch.where(seen[:, r % n_tokens, None], score, float("-inf"))
        weights.append((score - score.amax((-1, -2), keepdim=True).clamp(min=LEAST)).exp())
    outs = []
    for weight in weights:
        total = weight.sum(-1).sum(-1).clamp(min=1.0)[..., None]  # [B, K, 1]; the best one's weight is 1
        if v_scale is not None:
            weight = torch.where(weight > 0, weight * v_scale.unflatten(2, (-1, SUMMED)).float(), 0.0)
        outs.append((weight[..., None] * wide_v).sum(3).sum(2) / total)  # [B, K, H]
    out: Tensor = torch.stack(outs, 2).unflatten(2, (-1, n_tokens)).flatten(1, 2).to(q.dtype)  # [B, N, T, H]
    return out


def attend_matmul(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> Tensor:
    """Two matrix products per kv head, its G * T query rows folded together; long calls run in blocks of queries.

    q [B, N, T, H]; k, v [B, K, n_keys, H]; pos [B, T]; k_scale, v_scale [B, K, n_keys] -> [B, N, T, H]
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # once for all blocks
    if q.shape[2] <= QUERY_BLOCK:  # no loop, so that T may be a size that varies
        return _attend_block(q, k, k_scale, v, v_scale, pos)[0]
    blocks = ((q[:, :, t : t + QUERY_BLOCK], pos[:, t : t + QUERY_BLOCK]) for t in range(0, q.shape[2], QUERY_BLOCK))
    return torch.cat([_attend_block(some, k, k_scale, v, v_scale, at)[0] for some, at in blocks], 2)


def in_view(
    q: Tensor, pos: Tensor, n_keys: int, x: Tensor, scale: Tensor | None, low: Tensor | None, tail: int
) -> tuple[Tensor, Tensor | None]:
    """The first n_keys entries of keys or values [B, K, S, H] as queries [B, N, T, H] at pos [B, T] read them.

    And those of their scales [B, K, S] where they have any.
    """
    scale, low = (None if part is None else part.narrow(2, 0, n_keys) for part in (scale, low))
    whole = torch.arange(n_keys, device=pos.device) >= first_whole(pos, tail)[:, None] if tail else None  # [B, n_keys]
    return numbers(x.narrow(2, 0, n_keys), low, None if whole is None else whole[:, None], q.dtype), scale


def numbers(x: Tensor, low: Tensor | None, whole: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values [B, K, M, ...] as they are, or of planes what is read: [B, K, M, H].

    whole: bool [B, 1 or K, M], the entries that a draft reads whole; None: all.
    """
    if low is None:
        return x
    return joined(x, low) if whole is None else drafted(x, low, whole, dtype)


def score_scale(q: Tensor, k_scale: Tensor | None) -> Tensor | float:
    """What products of q [..., H] with keys are multiplied by: H^-0.5, and of int8 keys their scales, [B, K, 1, S]."""
    scale: float = q.shape[-1] ** -0.5
    return scale if k_scale is None else k_scale[:, :, None].float() * scale


def with_scale(weights: Tensor, v_scale: Tensor | None) -> Tensor:
    """Weights [B, K, R, S] take the scales [B, K, S] of int8 values along; what nobody reads weighs nothing."""
    return weights if v_scale is None else torch.where(weights > 0, weights * v_scale[:, :, None].float(), 0.0)


def scores_of(q: Tensor, k: Tensor, k_scale: Tensor | None, pos: Tensor) -> Tensor:
    """fp32 [B, K, G, T, n_keys], -inf for keys a query may not see.

    q [B, N, T, H]; k [B, K, n_keys, H]; k_scale [B, K, n_keys] or None; pos [B, T]
    """
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, K, G * T, H]
    scores = (grouped @ k.to(q.dtype).transpose(-1, -2)).float() * score_scale(q, k_scale)  # [B, K, G * T, n_keys]
    seen = visible(pos, k.shape[2])[:, None, None]  # [B, 1, 1, T, n_keys]
    return torch.where(seen, scores.unflatten(2, (-1, q.shape[2])), float("-inf"))


def visible(pos: Tensor, n_keys: int) -> Tensor:
    """Which keys each query may see, those at or before its own position, none at or past n_keys: [B, T] -> bool."""
    seen: Tensor = torch.arange(n_keys, device=pos.device) <= torch.where(pos < n_keys, pos, -1)[..., None]
    return seen  # [B, T, n_keys]


def _attend_block(
    q: Tensor, k: Tensor, k_scale: Tensor | None, v: Tensor, v_scale: Tensor | None, pos: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the output [B, N, T, H], fp32 weights [B, K, G, T, n_keys] before normalisation, sums and best scores."""
    scores = scores_of(q, k, k_scale, pos)
    best = scores.amax(-1).clamp(min=LEAST)
    weights = (scores - best[..., None]).exp()
    blocks = weights.unflatten(-1, (-1, SUMMED)) if k.shape[2] % SUMMED == 0 else weights[..., None]
    total = blocks.sum(-1).sum(-1).clamp(min=1.0)  # [B, K, G, T]; the best one's weight is 1
    shares = with_scale(weights.flatten(2, 3), v_scale).to(q.dtype)  # [B, K, R, n_keys]
    out = (shares @ v.to(q.dtype)).unflatten(2, (-1, q.shape[2]))  # [B, K, G, T, H]
    return (out / total[..., None].to(out.dtype)).flatten(1, 2), weights, total, best
