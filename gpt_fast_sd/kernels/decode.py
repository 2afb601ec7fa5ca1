"""Attention of a few query tokens a row over a long cache: one pass over the keys, split at absolute positions.

Three bodies an op: the PyTorch reference below, which a CPU runs; on CUDA Triton (decode_triton.py); a fake.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SPLIT, LARGEST_SPLIT = 256, 2048


def split_for(capacity: int) -> int:
    """Keys that one program reads, for a cache of `capacity` positions: a function of nothing else, so sums are fixed.

    Every split writes and reads again one fp32 row per query, 2 * R / split of the traffic of a bf16 cache where R
    queries share a kv head (R = 24 and 2048 keys: 2.3 %), so splits are long; a small cache needs many of them to keep
    all of a GPU busy when it serves one row.
    """
    return min(max((1 << (capacity - 1).bit_length()) // 16, SMALLEST_SPLIT), LARGEST_SPLIT)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; pos int64 [B, T]; split from `split_for`
    -> [B, N, T, H], a transposed view of [B, T, N, H]
    """
    out: Tensor = _decode(q, k, v, pos, n_keys, split)
    return out


def decode_attention_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    """decode_attention, and the attention that each `page` keys received from the G * T queries of a kv head.

    The weights of a query sum to 1, so the blocks of a row and kv head sum to G * T where n_keys is whole pages.
    page: one of PAGES -> [B, N, T, H], fp32 [B, K, n_keys // page]
    """
    out, mass = _decode_with_mass(q, k, v, pos, n_keys, split, page)
    return out, mass


@torch.library.custom_op("gpt_fast_sd::decode_attention", mutates_args=())
def _decode(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
    return attention_reference(q, k, v, pos, n_keys)[0]


@torch.library.custom_op("gpt_fast_sd::decode_attention_with_mass", mutates_args=())
def _decode_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    out, weights, _ = attention_reference(q, k, v, pos, n_keys)
    return out, page_sums(weights.sum((2, 3)), page)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The slow obvious truth: the output [B, N, T, H], fp32 weights [B, K, G, T, n_keys], fp32 lse [B, N, T]."""
    scores, seen = scores_reference(q, k, pos, n_keys)
    lse = torch.where(seen, scores, float("-inf")).logsumexp(-1)  # [B, K, G, T]
    weights = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)  # [B, K, G, T, n_keys]
    read = seen.any(3).squeeze(2)[..., None]  # [B, 1, n_keys, 1]
    values = torch.where(read, v[:, :, :n_keys].float(), 0.0)  # what nobody reads may be a NaN
    out = torch.einsum("bkgts,bksh->btkgh", weights, values).flatten(2, 3)  # [B, T, N, H]
    return out.to(q.dtype).contiguous().transpose(1, 2), weights, lse.flatten(1, 2)


def scores_reference(q: Tensor, k: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """Scores fp32 [B, K, G, T, n_keys], and which of them count: bool [B, 1, 1, T, n_keys]."""
    grouped = q.unflatten(1, (k.shape[1], -1)).float()  # [B, K, G, T, H]
    scores = torch.einsum("bkgth,bksh->bkgts", grouped, k[:, :, :n_keys].float()) * q.shape[-1] ** -0.5
    seen = (torch.arange(n_keys, device=pos.device) <= pos[..., None]) & (pos < n_keys)[..., None]  # [B, T, n_keys]
    return scores, seen[:, None, None]


def page_sums(mass: Tensor, page: int) -> Tensor:
    """Sums over whole pages: [B, K, n_keys] -> [B, K, n_keys // page]."""
    n_pages = mass.shape[-1] // page
    sums: Tensor = mass.narrow(-1, 0, n_pages * page).unflatten(-1, (n_pages, page)).sum(-1)
    return sums


@_decode.register_kernel("cuda")
def _decode_cuda(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
    from . import decode_triton, triton_common

    return decode_triton.attend(q, k, v, pos, n_keys, split, arch=triton_common.architecture())


@_decode_with_mass.register_kernel("cuda")
def _decode_with_mass_cuda(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    from . import decode_triton, triton_common

    return decode_triton.attend_with_mass(q, k, v, pos, n_keys, split, page, arch=triton_common.architecture())


@_decode.register_fake
def _decode_fake(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)


@_decode_with_mass.register_fake
def _decode_with_mass_fake(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    return out, q.new_empty(*k.shape[:2], n_keys // page, dtype=torch.float32)
