"""Attention of a few query tokens per row over a long cache: one pass over the keys, split at absolute positions.

Operators of CUDA, whose bodies are Triton (triton/decode.py).

Of a format with scales no entry is ever widened to what it stands for: scores are products with the numbers times the
scale of the key, and each weight takes the scale of its value along. q has a dtype of its own then, which is the
output's; else it is that of keys and values.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from .layer import flat, layer_of
from .sizes import BUSY, LARGEST_SPLIT

SMALLEST_SPLIT, MOST_SPLITS = 256, 64


def split_for(capacity: int, n_pairs: int) -> int:
    """Keys that one program reads, for a cache of `capacity` positions and n_pairs = B * K pairs of row and kv head.

    A function of nothing else, so sums are fixed within an engine. Every split writes one fp32 row per query and reads
    it again, 2 * R / split of the traffic of a bf16 cache if R queries share a kv head (R = 24 and 2048 keys: 2.3 %),
    so splits are long; a small cache, and one of few rows and kv heads, needs many of them to keep a GPU busy. Tiles of
    64 rows take two of the longest together where as many programs are left: on an H200, 16 rows of 57,344 entries, 36
    queries take 858 us and not 887, with mass 942 and not 961, but four 851 and not 828.
    """
    whole = 1 << (capacity - 1).bit_length()
    of_few = max(whole * n_pairs // BUSY, whole // MOST_SPLITS)  # a row's merge reads all of its splits
    split = min(whole // 16, 1 << max(of_few - 1, 0).bit_length())
    return min(max(split, SMALLEST_SPLIT), LARGEST_SPLIT)


def decode_attention(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int) -> Tensor:
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; layer [B, K, S, ...], last two dims dense; pos int64 [B, T]; split from `split_for`
    -> [B, N, T, H]
    """
    out: Tensor = _decode(q, *flat(layer), pos, n_keys, split)
    return out


def decode_attention_with_mass(
    q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    """decode_attention, and the attention that each `page` keys received from the G * T queries of a kv head.

    The weights of a query sum to 1, so the blocks of a row and kv head sum to G * T if n_keys is whole pages.
    page: one of config.PAGES -> [B, N, T, H], fp32 [B, K, n_keys // page]
    """
    out, mass = _decode_with_mass(q, *flat(layer), pos, n_keys, split, page)
    return out, mass


@torch.library.custom_op("gpt_fast_sd::decode_attention", mutates_args=(), device_types="cuda")
def _decode(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int,
    split: int,
) -> Tensor:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import decode as decode_triton

    layer, arch = layer_of(buffers, form, tail, fine, window), triton_common.architecture()
    return decode_triton.attend(q, layer, pos, n_keys, split, arch=arch)


@torch.library.custom_op("gpt_fast_sd::decode_attention_with_mass", mutates_args=(), device_types="cuda")
def _decode_with_mass(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int,
    split: int, page: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import decode as decode_triton

    layer, arch = layer_of(buffers, form, tail, fine, window), triton_common.architecture()
    return decode_triton.attend_with_mass(q, layer, pos, n_keys, split, page, arch=arch)


@_decode.register_fake
def _decode_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)


@_decode_with_mass.register_fake
def _decode_with_mass_fake(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int,
    split: int, page: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return by_token(q), q.new_empty(*buffers[0].shape[:2], n_keys // page, dtype=torch.float32)


def by_token(q: Tensor) -> Tensor:
    """An output in the layout of the Triton bodies: like q [B, N, T, H], a transposed view of [B, T, N, H]."""
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
