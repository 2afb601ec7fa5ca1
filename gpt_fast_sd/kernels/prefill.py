"""Attention of long chunks of queries over a cache that holds their keys already, and what such queries attend to.

Three bodies an op: PyTorch, which a CPU runs; on CUDA Triton (prefill_triton.py); a fake.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode import attention_reference, page_sums, scores_reference
from .sizes import FEW_ROWS, PREFILL_SPLIT


def prefill_splits(n_rows: int, n_keys: int) -> int:
    """Parts in which n_rows queries that share a kv head read n_keys keys: 0 where these are not split.

    Each part hands on an fp32 row [H] and its sum for every query, until they are merged.
    """
    return -(-n_keys // PREFILL_SPLIT) if n_rows <= FEW_ROWS else 0


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> Tensor:
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; pos int64 [B, T], where queries that follow
    each other stand near each other -> [B, N, T, H], a transposed view of [B, T, N, H]
    """
    out: Tensor = _prefill(q, k, v, pos, n_keys)
    return out


def prefill_attention_with_lse(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """prefill_attention, and the natural log of each softmax's sum, fp32 [B, N, T]: -inf where nothing is read."""
    out, lse = _prefill_with_lse(q, k, v, pos, n_keys)
    return out, lse


def key_mass(q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int) -> Tensor:
    """The attention that each `page` keys received from the G * T queries of a kv head, once the lse is known.

    Reads keys alone, once. q, k, pos, n_keys as in prefill_attention, lse as it gives it; page: a power of two
    -> fp32 [B, K, n_keys // page]
    """
    mass: Tensor = _key_mass(q, k, lse, pos, n_keys, page)
    return mass


@torch.library.custom_op("gpt_fast_sd::prefill_attention", mutates_args=())
def _prefill(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> Tensor:
    return attention_reference(q, k, v, pos, n_keys)[0]


@torch.library.custom_op("gpt_fast_sd::prefill_attention_with_lse", mutates_args=())
def _prefill_with_lse(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    out, _, lse = attention_reference(q, k, v, pos, n_keys)
    return out, lse


@torch.library.custom_op("gpt_fast_sd::key_mass", mutates_args=())
def _key_mass(q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int) -> Tensor:
    scores, seen = scores_reference(q, k, pos, n_keys)
    weights = (scores - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()  # [B, K, G, T, n_keys]
    return page_sums(torch.where(seen, weights, 0.0).sum((2, 3)), page)


@_prefill.register_kernel("cuda")
def _prefill_cuda(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> Tensor:
    from . import prefill_triton, triton_common

    return prefill_triton.attend(q, k, v, pos, n_keys, arch=triton_common.architecture())


@_prefill_with_lse.register_kernel("cuda")
def _prefill_with_lse_cuda(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    from . import prefill_triton, triton_common

    return prefill_triton.attend_with_lse(q, k, v, pos, n_keys, arch=triton_common.architecture())


@_key_mass.register_kernel("cuda")
def _key_mass_cuda(q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int) -> Tensor:
    from . import prefill_triton, triton_common

    return prefill_triton.key_mass(q, k, lse, pos, n_keys, page, arch=triton_common.architecture())


@_prefill.register_fake
def _prefill_fake(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> Tensor:
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)


@_prefill_with_lse.register_fake
def _prefill_with_lse_fake(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@_key_mass.register_fake
def _key_mass_fake(q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int) -> Tensor:
    return q.new_empty(*k.shape[:2], n_keys // page, dtype=torch.float32)
