"""Attention to listed entries of a static cache and to a tail of recent ones: what sparse draft steps attend with.

Three bodies: the PyTorch reference below, which a CPU runs; on CUDA Triton (sparse_triton.py); a fake.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the tail, M = C + W.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("gpt_fast_sd::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    tail_start: Tensor,
    tail_width: int,
    pos: Tensor,
    n_keys: int,
    page: int,
) -> Tensor:
    """Attend to the entries in slots and to tail_width from tail_start on; of both, to those at or before each query.

    A query that sees none of them, or that is at or past n_keys, gives 0. Of the cache nothing else is read.
    slots: integers [B, K, C] without repeats, -1 is nothing, and so is what is not below tail_start; they come in runs
    of `page` consecutive entries (or of as many -1), each run beginning at a multiple of page: of a run, the first
    decides. A page of 1 is a list in any order.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; tail_start int64 [B]; pos int64 [B, T]
    -> [B, N, T, H], a transposed view of [B, T, N, H]
    """
    tail = tail_start[:, None] + torch.arange(tail_width, device=pos.device)  # [B, W]
    first = slots[..., ::page, None].long()  # [B, K, C // page, 1]
    listed = torch.where(first >= 0, first + torch.arange(page, device=pos.device), -1).flatten(2)  # [B, K, C]
    listed = torch.where(listed < tail_start[:, None, None], listed, -1)
    index = torch.cat([listed, tail[:, None].expand(-1, k.shape[1], -1)], -1)  # [B, K, M]
    limit = torch.where(pos < n_keys, pos, -1)  # [B, T]
    seen = (index[:, :, None] >= 0) & (index[:, :, None] <= limit[:, None, :, None])  # [B, K, T, M]
    read = seen.any(2)  # [B, K, M], what nobody reads may be a NaN
    where = index.clamp(0, k.shape[2] - 1)[..., None].expand(-1, -1, -1, k.shape[3])  # [B, K, M, H]
    keys, values = (torch.where(read[..., None], x.gather(2, where).float(), 0.0) for x in (k, v))
    grouped = q.unflatten(1, (k.shape[1], -1)).float()  # [B, K, G, T, H]
    scores = torch.einsum("bkgth,bkmh->bkgtm", grouped, keys) * q.shape[-1] ** -0.5
    seen = seen[:, :, None]  # [B, K, 1, T, M]
    lse = torch.where(seen, scores, float("-inf")).logsumexp(-1, keepdim=True)  # [B, K, G, T, 1]
    weights = torch.where(seen, (scores - lse).exp(), 0.0)
    out = torch.einsum("bkgtm,bkmh->btkgh", weights, values).flatten(2, 3)  # [B, T, N, H]
    return out.to(q.dtype).transpose(1, 2)


@sparse_attention.register_kernel("cuda")
def _sparse_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    tail_start: Tensor,
    tail_width: int,
    pos: Tensor,
    n_keys: int,
    page: int,
) -> Tensor:
    from . import sparse_triton, triton_common

    arch = triton_common.architecture()
    return sparse_triton.attend(q, k, v, slots, tail_start, tail_width, pos, n_keys, page, arch=arch)


@sparse_attention.register_fake
def _sparse_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    tail_start: Tensor,
    tail_width: int,
    pos: Tensor,
    n_keys: int,
    page: int,
) -> Tensor:
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
