"""Attention over a static cache in plain PyTorch: which body is fastest hangs on the device and the rows that ask.

Keys are seen as fixed splits of SPLIT positions, counted from position 0. Empty splits behind a row's own, in view
because a neighbour is longer, do not change a bit of `attend_rows`; a matrix product over more keys may round
differently.

Shapes: B batch rows, T tokens in this call, S keys in view (n_splits * SPLIT), N query heads, K kv heads, G = N // K,
        H head dim, R = G * T query rows that share one kv head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SPLIT = 256
QUERY_BLOCK = 128  # query tokens scored at once in prefill: bounds the scores to G * 128 * S per kv head


def visible(pos: Tensor, n_keys: int) -> Tensor:
    """Which keys each query may see, those at or before its own position: pos [B, T] -> bool [B, T, n_keys]."""
    seen: Tensor = torch.arange(n_keys, device=pos.device) <= pos[..., None]
    return seen


def attend_reference(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """The slow obvious truth, in fp64: q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T] -> fp64 [B, N, T, H]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))  # [B, N, S, H]
    scores = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [B, N, T, S]
    seen = visible(pos, k.shape[2])[:, None]  # [B, 1, T, S]
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out: Tensor = p @ v.masked_fill(~seen.any(2).unsqueeze(-1), 0.0)
    return out


def attend_rows(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """Few query rows a kv head, compiled: each row is its own pair of reductions over k and v.

    Inductor fuses the reductions of all R rows into one loop, so keys and values are read and widened once, with no
    matrix product and no bf16 score in between. Measured on 2 AVX-512 cores it reads the cache about 1.5x faster than
    batched matrix products for R = 2, is level at R = 4 and loses beyond. Uncompiled it would write fp32 copies.

    q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T] -> [B, N, T, H]
    """
    n_kv, n_tokens, head_dim = k.shape[1], q.shape[2], q.shape[3]
    wide_k: Tensor = k.unflatten(2, (-1, SPLIT)).float()  # [B, K, n, SPLIT, H]
    wide_v: Tensor = v.unflatten(2, (-1, SPLIT)).float()  # [B, K, n, SPLIT, H]
    rows: Tensor = q.unflatten(1, (n_kv, -1)).flatten(2, 3).float()  # [B, K, R, H]
    seen = visible(pos, k.shape[2]).unflatten(-1, (-1, SPLIT))  # [B, T, n, SPLIT]
    weights = []
    for r in range(rows.shape[2]):
        score = (rows[:, :, r, None, None] * wide_k).sum(-1) * head_dim**-0.5  # [B, K, n, SPLIT]
        score = torch.where(seen[:, r % n_tokens, None], score, float("-inf"))
        weights.append((score - score.amax((-1, -2), keepdim=True)).exp())
    outs = []
    for weight in weights:
        total = weight.sum(-1).sum(-1)[..., None]  # [B, K, 1], by splits: one long sum compiles apart past 4096 keys
        outs.append((weight[..., None] * wide_v).sum(3).sum(2) / total)  # [B, K, H]
    out: Tensor = torch.stack(outs, 2).unflatten(2, (-1, n_tokens)).flatten(1, 2).to(q.dtype)  # [B, N, T, H]
    return out


def attend_matmul(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """Two matrix products a kv head, its G * T query rows folded together; long calls go by blocks of queries.

    q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T] -> [B, N, T, H]
    """
    if q.shape[2] <= QUERY_BLOCK:  # no loop, so that T may be a size that varies
        return _attend_block(q, k, v, pos)[0]
    starts = range(0, q.shape[2], QUERY_BLOCK)
    return torch.cat(
        [_attend_block(q[:, :, t : t + QUERY_BLOCK], k, v, pos[:, t : t + QUERY_BLOCK])[0] for t in starts], 2
    )


def attend_with_mass(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """attend_matmul, and how much attention the queries of a kv head paid to each block of `page` keys, G * T in all.

    q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T] -> [B, N, T, H], fp32 [B, K, S // page]
    """
    out, weights, total = _attend_block(q, k, v, pos)
    share = (weights / total[..., None]).sum((2, 3))  # [B, K, S]
    return out, share.unflatten(-1, (-1, page)).sum(-1)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> the output [B, N, T, H], unnormalised fp32 weights [B, K, G, T, S] and their sums [B, K, G, T]."""
    n_tokens = q.shape[2]
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, K, G * T, H]
    scores = (grouped @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5  # [B, K, G * T, S]
    seen = visible(pos, k.shape[2])[:, None, None]  # [B, 1, 1, T, S]
    scores = torch.where(seen, scores.unflatten(2, (-1, n_tokens)), float("-inf"))  # [B, K, G, T, S]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.unflatten(-1, (-1, SPLIT)).sum(-1).sum(-1)  # [B, K, G, T], by splits as above
    out = (weights.to(v.dtype).flatten(2, 3) @ v).unflatten(2, (-1, n_tokens))  # [B, K, G, T, H]
    return (out / total[..., None].to(out.dtype)).flatten(1, 2), weights, total


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """torch's own attention with a position mask: q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T] -> [B, N, T, H]."""
    seen = visible(pos, k.shape[2])[:, None]  # [B, 1, T, S]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def attend(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """The fastest body for this device and shape: q [B, N, T, H]; k, v [B, K, S, H]; pos [B, T] -> [B, N, T, H].

    Every query must see at least one key (its own, which the cache has just stored). Entries in view that no query sees
    must be finite: their weight is an exact zero.
    """
    if q.device.type == "cuda":
        return attend_sdpa(q, k, v, pos)
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if torch.compiler.is_compiling() and rows <= 3:
        return attend_rows(q, k, v, pos)
    return attend_matmul(q, k, v, pos)
