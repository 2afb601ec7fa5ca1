"""Attention of a few query tokens per row over a long cache: one pass over the keys, split at absolute positions.

On CUDA each is an operator whose body is Triton (decode_triton.py); elsewhere on_cpu.py attends.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import on_cpu
from .choice import triton_serves

SMALLEST_SPLIT, LARGEST_SPLIT = 256, 2048


def split_for(capacity: int) -> int:
    """Keys that one program reads, for a cache of `capacity` positions: a function of nothing else, so sums are fixed.

    Every split writes one fp32 row per query and reads it again, 2 * R / split of the traffic of a bf16 cache if R
    queries share a kv head (R = 24 and 2048 keys: 2.3 %), so splits are long; a small cache needs many of them to keep
    a whole GPU busy when it serves one row.
    """
    return min(max((1 << (capacity - 1).bit_length()) // 16, SMALLEST_SPLIT), LARGEST_SPLIT)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; pos int64 [B, T]; split from `split_for`
    -> [B, N, T, H]
    """
    if triton_serves(q.device):
        out: Tensor = _decode(q, k, v, pos, n_keys, split)
        return out
    return on_cpu.attend(q, k, v, pos, n_keys)


def decode_attention_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    """decode_attention, and the attention that each `page` keys received from the G * T queries of a kv head.

    The weights of a query sum to 1, so the blocks of a row and kv head sum to G * T if n_keys is whole pages.
    page: one of PAGES -> [B, N, T, H], fp32 [B, K, n_keys // page]
    """
    if triton_serves(q.device):
        out, mass = _decode_with_mass(q, k, v, pos, n_keys, split, page)
        return out, mass
    return on_cpu.attend_with_mass(q, k, v, pos, n_keys, page)


@torch.library.custom_op("gpt_fast_sd::decode_attention", mutates_args=(), device_types="cuda")
def _decode(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
    from . import decode_triton, triton_common

    return decode_triton.attend(q, k, v, pos, n_keys, split, arch=triton_common.architecture())


@torch.library.custom_op("gpt_fast_sd::decode_attention_with_mass", mutates_args=(), device_types="cuda")
def _decode_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    from . import decode_triton, triton_common

    return decode_triton.attend_with_mass(q, k, v, pos, n_keys, split, page, arch=triton_common.architecture())


@_decode.register_fake
def _decode_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)


@_decode_with_mass.register_fake
def _decode_with_mass_fake(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    return by_token(q), q.new_empty(*k.shape[:2], n_keys // page, dtype=torch.float32)


def by_token(q: Tensor) -> Tensor:
    """An output in the layout of the Triton bodies: like q [B, N, T, H], a transposed view of [B, T, N, H]."""
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
