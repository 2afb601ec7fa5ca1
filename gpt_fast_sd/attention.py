"""How a layer of the cache is read: densely, or at listed entries and a window. All attention of the engine is here.

The operators in fast/ choose the body that attends: C++, Triton or PyTorch.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim, C listed entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpt_fast_sd.model import SPLIT, CacheLayer

from .fast import (
    decode_attention,
    decode_attention_with_mass,
    prefill_attention,
    prefill_attention_of_slots,
    sparse_attention,
    split_for,
)

MOST_DECODED = 32  # query tokens that flash-decoding serves; more of them keep a device busy without splitting keys


def asked_of(layer: CacheLayer, q: Tensor) -> Tensor:
    """Queries [B, N, T, H] in the dtype that a layer is asked in: its own, or their own where it is quantized."""
    return q if layer.quantized else q.to(layer.k.dtype)


def beside_of(layer: CacheLayer) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int]:
    """What operators take of a layer besides k and v: scales, lower planes, and how much a draft reads whole."""
    return layer.k_scale, layer.v_scale, layer.k_low, layer.v_low, layer.tail


def dense(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, page: int = 0) -> tuple[Tensor, Tensor | None]:
    """Attend to those of a layer's first n_keys entries at or before each query; a query past them all gives 0.

    q [B, N, T, H]; pos [B, T] -> [B, N, T, H], and with a page the attention mass that each block of page keys
    received: fp32 [B, K, n_keys // page]
    """
    asked = asked_of(layer, q), layer.k, layer.v, pos, n_keys
    beside = beside_of(layer)
    if page:
        out, mass = decode_attention_with_mass(*asked, split_for(layer.capacity), page, *beside, fine=layer.fine)
        return out.to(q.dtype), mass
    if q.shape[2] > MOST_DECODED:
        return prefill_attention(*asked, *beside, fine=layer.fine).to(q.dtype), None
    # splits depend on the cache alone: no sum depends on the batch, nor, within tiles of one size, on the tokens fed
    return decode_attention(*asked, split_for(layer.capacity), *beside, fine=layer.fine).to(q.dtype), None


def dense_of_slots(q: Tensor, layer: CacheLayer, slots: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """dense for some of the slots, and the attention mass of every key.

    q [W, N, T, H]; slots int64 [W], all different; pos [W, T] -> [W, N, T, H], fp32 [W, K, n_keys]
    """
    asked = asked_of(layer, q), layer.k, layer.v, slots, pos, n_keys
    out, mass = prefill_attention_of_slots(*asked, *beside_of(layer))
    return out.to(q.dtype), mass


def listed(
    q: Tensor,
    layer: CacheLayer,
    kv_indices: Tensor,
    window_start: Tensor,
    window_width: int,
    pos: Tensor,
    page: int = 1,
) -> Tensor:
    """Attend to listed entries of a layer and to window_width from window_start on, those at or before each query.

    q [B, N, T, H]; kv_indices int64 [B, K, C] below window_start, -1 is empty, in runs of whole pages;
    window_start int64 [B]; pos [B, T] -> [B, N, T, H]
    """
    asked = asked_of(layer, q), layer.k, layer.v, kv_indices, window_start, window_width, pos, layer.capacity, page
    return sparse_attention(*asked, *beside_of(layer), fine=layer.fine).to(q.dtype)


@dataclass(frozen=True)
class DenseKV:
    """Store, then attend to all entries at or before each query, in the splits that are in view."""

    layers: Sequence[CacheLayer]
    n_splits_carrier: Tensor  # [n_splits, 0]
    page: int = 0  # number of keys whose attention mass is summed, 0: none is
    mass: list[Tensor] = field(default_factory=list)  # with a page layer by layer, fp32 [B, K, n_keys // page]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        self.layers[layer].store(pos, k, v)
        out, mass = dense(q, self.layers[layer], pos, self.n_splits_carrier.shape[0] * SPLIT, self.page)
        if mass is not None:
            self.mass.append(mass)
        return out


@dataclass(frozen=True)
class ListedKV:
    """Store, then attend to listed entries and to [window_start, pos]; how much is in view does not matter."""

    layers: Sequence[CacheLayer]
    n_splits_carrier: Tensor  # [n_splits, 0]
    kv_indices: Sequence[Tensor]  # L of int64 [B, K, C], each below window_start; -1 is empty
    window_start: Tensor  # int64 [B]
    window_width: int  # positions from window_start that may be read
    page: int = 1  # listed entries come in runs of this many, each a page of the cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        self.layers[layer].store(pos, k, v)
        window = self.window_start, self.window_width
        return listed(q, self.layers[layer], self.kv_indices[layer], *window, pos, self.page)
