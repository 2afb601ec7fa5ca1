"""Attention of long chunks of queries over a cache that already holds their keys, and the mass they attend with.

Operators of CUDA, whose bodies are Triton (triton/prefill.py).

Shapes: B batch rows, W of them, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K,
        H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from .decode import by_token
from .layer import flat, layer_of
from .sizes import FEW_ROWS, PREFILL_SPLIT


def prefill_splits(n_rows: int, n_keys: int) -> int:
    """Parts in which n_rows queries that share a kv head read n_keys keys: 0 if these are not split.

    Each part passes an fp32 row [H] and its sum per query on to the merge.
    """
    return -(-n_keys // PREFILL_SPLIT) if n_rows <= FEW_ROWS else 0


def prefill_attention(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> Tensor:
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; layer [B, K, S, ...], last two dims dense; pos int64 [B, T], where consecutive
    queries should have nearby positions -> [B, N, T, H]
    """
    out: Tensor = _prefill(q, *flat(layer), pos, n_keys)
    return out


def prefill_attention_with_lse(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """prefill_attention, and the natural log of each softmax's sum, fp32 [B, N, T]: -inf if nothing is read."""
    out, lse = _prefill_with_lse(q, *flat(layer), pos, n_keys)
    return out, lse


def key_mass(q: Tensor, layer: CacheLayer, lse: Tensor, pos: Tensor, n_keys: int, page: int) -> Tensor:
    """The attention that each `page` keys received from the G * T queries of a kv head, given the lse.

    Reads only keys, once. q, layer, pos, n_keys as in prefill_attention, lse as it returns it; page: a power of 2
    -> fp32 [B, K, n_keys // page]
    """
    mass: Tensor = _key_mass(q, *flat(layer), lse, pos, n_keys, page)
    return mass


def prefill_attention_of_slots(
    q: Tensor, layer: CacheLayer, slots: Tensor, pos: Tensor, n_keys: int
) -> tuple[Tensor, Tensor]:
    """prefill_attention of the queries of some slots, and the mass of every key: fp32 [W, K, n_keys].

    q [W, N, T, H]; layer [B, K, S, ...]; slots int64 [W], all different; pos int64 [W, T] -> [W, N, T, H], the mass
    """
    # all slots take part: copying the keys of some slots would cost more than queries that read nothing
    n_slots, _, capacity = layer.k.shape[:3]
    all_q = q.new_zeros(n_slots, *q.shape[1:]).index_copy(0, slots, q)  # [B, N, T, H]
    all_pos = pos.new_full((n_slots, pos.shape[1]), capacity).index_copy(0, slots, pos)  # [B, T]
    out, lse = prefill_attention_with_lse(all_q, layer, all_pos, n_keys)
    return out[slots], key_mass(all_q, layer, lse, all_pos, n_keys, 1)[slots]


@torch.library.custom_op("gpt_fast_sd::prefill_attention", mutates_args=(), device_types="cuda")
def _prefill(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int
) -> Tensor:
    from ..triton import common as triton_common
    from ..triton import prefill as prefill_triton

    layer, arch = layer_of(buffers, form, tail, fine, window), triton_common.architecture()
    return prefill_triton.attend(q, layer, pos, n_keys, arch=arch)


@torch.library.custom_op("gpt_fast_sd::prefill_attention_with_lse", mutates_args=(), device_types="cuda")
def _prefill_with_lse(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int
) -> tuple[Tensor, Tensor]:
    from ..triton import common as triton_common
    from ..triton import prefill as prefill_triton

    layer, arch = layer_of(buffers, form, tail, fine, window), triton_common.architecture()
    return prefill_triton.attend_with_lse(q, layer, pos, n_keys, arch=arch)


@torch.library.custom_op("gpt_fast_sd::key_mass", mutates_args=(), device_types="cuda")
def _key_mass(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, lse: Tensor, pos: Tensor,
    n_keys: int, page: int,
) -> Tensor:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import prefill as prefill_triton

    layer, arch = layer_of(buffers, form, tail, fine, window), triton_common.architecture()
    return prefill_triton.key_mass(q, layer, lse, pos, n_keys, page, arch=arch)


@_prefill.register_fake
def _prefill_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)


@_prefill_with_lse.register_fake
def _prefill_with_lse_fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_key_mass.register_fake
def _key_mass_fake(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, lse: Tensor, pos: Tensor,
    n_keys: int, page: int,
) -> Tensor:  # fmt: skip
    return q.new_empty(*buffers[0].shape[:2], n_keys // page, dtype=torch.float32)
