"""Attention to listed entries of a static cache and to a window of recent ones, as used by sparse draft steps.

An operator of CUDA, whose body is Triton (triton/sparse.py).

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from .decode import by_token
from .layer import flat, layer_of


def sparse_attention(
    q: Tensor, layer: CacheLayer, kv_indices: Tensor, window_start: Tensor, window_width: int, pos: Tensor, n_keys: int,
    page: int,
) -> Tensor:  # fmt: skip
    """Attend to the entries listed and to window_width from window_start on, those at or before each query.

    A query that sees none of them, or that is at or past n_keys, gives 0. Nothing else of the cache is read.
    kv_indices: integers [B, K, C] without repeats; -1 is empty, and so is anything not below window_start. They come
    in runs of `page` consecutive entries (or of as many -1), each beginning at a multiple of page and complete except
    for what is in the window: only the first entry is looked at. A page of 1 is a list in any order.

    q [B, N, T, H], last stride 1; layer [B, K, S, ...], last two dims dense; window_start int64 [B]; pos int64 [B, T]
    -> [B, N, T, H]
    """
    out: Tensor = _sparse(q, *flat(layer), kv_indices, window_start, window_width, pos, n_keys, page)
    return out


@torch.library.custom_op("gpt_fast_sd::sparse_attention", mutates_args=(), device_types="cuda")
def _sparse(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, kv_indices: Tensor,
    window_start: Tensor, window_width: int, pos: Tensor, n_keys: int, page: int,
) -> Tensor:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import sparse as sparse_triton

    layer, arch = layer_of(buffers, form, tail, fine, window), triton_common.architecture()
    return sparse_triton.attend(q, layer, kv_indices, window_start, window_width, pos, n_keys, page, arch=arch)


@_sparse.register_fake
def _sparse_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)
