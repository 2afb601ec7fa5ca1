"""Attention to listed entries of a static cache and to a window of recent ones, as used by sparse draft steps.

On CUDA it is an operator whose body is Triton (triton/sparse.py); elsewhere attention_torch.py attends.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window, M = C + W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cpu import attention_torch as on_cpu
from .choice import triton_serves
from .decode import by_token


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    window_start: Tensor,
    window_width: int,
    pos: Tensor,
    n_keys: int,
    page: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_low: Tensor | None = None,
    v_low: Tensor | None = None,
    tail: int = 0,
    fine: bool = False,
) -> Tensor:
    """Attend to the entries listed and to window_width from window_start on, those at or before each query.

    A query that sees none of them, or that is at or past n_keys, gives 0. Nothing else of the cache is read.
    kv_indices: integers [B, K, C] without repeats; -1 is empty, and so is anything not below window_start. They come
    in runs of `page` consecutive entries (or of as many -1), each beginning at a multiple of page and complete except
    for what is in the window: Triton looks only at the first entry. A page of 1 is a list in any order.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; window_start int64 [B]; pos int64 [B, T];
    k_scale, v_scale fp16 [B, K, S], last stride 1, of int8 alone; k_low, v_low, tail: of planes; fine: see
    decode.py -> [B, N, T, H]
    """
    if triton_serves(q.device):
        out: Tensor = _sparse(
            q, k, v, kv_indices, window_start, window_width, pos, n_keys, page, k_scale, v_scale, k_low, v_low, tail
        )  # fmt: skip
        return out
    listed = torch.where(kv_indices < window_start[:, None, None], kv_indices, -1)  # [B, K, C]
    window = window_start[:, None] + torch.arange(window_width, device=pos.device)  # [B, W]
    index = torch.cat([listed, window[:, None].expand(-1, k.shape[1], -1)], -1)  # [B, K, M]
    limit = torch.where(pos < n_keys, pos, -1)  # [B, T]
    return on_cpu.attend_at(q, k, v, index, limit, k_scale, v_scale, k_low, v_low, tail, fine)


@torch.library.custom_op("gpt_fast_sd::sparse_attention", mutates_args=(), device_types="cuda")
def _sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    window_start: Tensor,
    window_width: int,
    pos: Tensor,
    n_keys: int,
    page: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_low: Tensor | None = None,
    v_low: Tensor | None = None,
    tail: int = 0,
) -> Tensor:
    from ..triton import common as triton_common
    from ..triton import sparse as sparse_triton

    arch = triton_common.architecture()
    beside: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "k_low": k_low, "v_low": v_low, "tail": tail}
    where = kv_indices, window_start, window_width, pos, n_keys, page
    return sparse_triton.attend(q, k, v, *where, arch=arch, **beside)


@_sparse.register_fake
def _sparse_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)
