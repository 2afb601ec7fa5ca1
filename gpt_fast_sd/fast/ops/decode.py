"""Attention of a few query tokens per row over a long cache: one pass over the keys, split at absolute positions.

On CUDA each is an operator whose body is Triton (triton/decode.py); elsewhere attention_torch.py attends.

Keys and values of int8 come with their scales, fp16 [B, K, S]: what an entry holds is its numbers times its scale.
Scores are products with the numbers times the scale, and each weight takes the scale of its value along, so that no
entry is ever widened to what it stands for. q has a dtype of its own then, which is the output's; else it is that of
keys and values.

Where the numbers lie in planes of nibbles (planes.py), k and v are the upper ones, k_low and v_low the lower ones,
uint8 [B, K, S, H // 2] with the same strides. With a tail a draft reads them: whole are the entries from
pos[:, 0] - tail + 1 on, of all others the upper plane alone. With 0 all are whole, and nothing differs from int8.

The C++ body rounds queries over int8 to 8 bits a number, with fine to 16; the others keep them as they are.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cpu import attention_torch as on_cpu
from .choice import triton_serves

SMALLEST_SPLIT, LARGEST_SPLIT = 256, 2048


def split_for(capacity: int) -> int:
    """Keys that one program reads, for a cache of `capacity` positions: a function of nothing else, so sums are fixed.

    Every split writes one fp32 row per query and reads it again, 2 * R / split of the traffic of a bf16 cache if R
    queries share a kv head (R = 24 and 2048 keys: 2.3 %), so splits are long; a small cache needs many of them to keep
    a whole GPU busy when it serves one row.
    """
    return min(max((1 << (capacity - 1).bit_length()) // 16, SMALLEST_SPLIT), LARGEST_SPLIT)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; pos int64 [B, T]; split from `split_for`;
    k_scale, v_scale fp16 [B, K, S], last stride 1, of int8 alone; k_low, v_low, tail: of planes; fine: as above
    -> [B, N, T, H]
    """
    if triton_serves(q.device):
        out: Tensor = _decode(q, k, v, pos, n_keys, split, k_scale, v_scale, k_low, v_low, tail)
        return out
    return on_cpu.attend(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail, fine)


def decode_attention_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """decode_attention, and the attention that each `page` keys received from the G * T queries of a kv head.

    The weights of a query sum to 1, so the blocks of a row and kv head sum to G * T if n_keys is whole pages.
    page: one of PAGES -> [B, N, T, H], fp32 [B, K, n_keys // page]
    """
    if triton_serves(q.device):
        out, mass = _decode_with_mass(q, k, v, pos, n_keys, split, page, k_scale, v_scale, k_low, v_low, tail)
        return out, mass
    return on_cpu.attend_with_mass(q, k, v, pos, n_keys, page, k_scale, v_scale, k_low, v_low, tail, fine)


@torch.library.custom_op("gpt_fast_sd::decode_attention", mutates_args=(), device_types="cuda")
def _decode(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> Tensor:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import decode as decode_triton

    arch = triton_common.architecture()
    beside: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "k_low": k_low, "v_low": v_low, "tail": tail}
    return decode_triton.attend(q, k, v, pos, n_keys, split, arch=arch, **beside)


@torch.library.custom_op("gpt_fast_sd::decode_attention_with_mass", mutates_args=(), device_types="cuda")
def _decode_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import decode as decode_triton

    arch = triton_common.architecture()
    beside: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "k_low": k_low, "v_low": v_low, "tail": tail}
    return decode_triton.attend_with_mass(q, k, v, pos, n_keys, split, page, arch=arch, **beside)


@_decode.register_fake
def _decode_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)


@_decode_with_mass.register_fake
def _decode_with_mass_fake(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int, page: int, *_: object
) -> tuple[Tensor, Tensor]:
    return by_token(q), q.new_empty(*k.shape[:2], n_keys // page, dtype=torch.float32)


def by_token(q: Tensor) -> Tensor:
    """An output in the layout of the Triton bodies: like q [B, N, T, H], a transposed view of [B, T, N, H]."""
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
