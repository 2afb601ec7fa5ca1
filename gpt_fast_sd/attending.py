"""What the engine's caches attend with: the kernel that fits the device and dtype, or the model's plain bodies.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt_fast_sd.kernels import (
    PAGE,
    cpu_attention,
    cpu_attention_fits,
    cpu_attention_with_mass,
    decode_attention,
    decode_attention_with_mass,
    prefill_attention,
    split_for,
)
from gpt_fast_sd.model import SPLIT, FullKV, attend, attend_with_mass, store

from .devices import ways_of

MOST_DECODED = 32  # query tokens that flash-decoding serves; with more there are enough queries without splitting keys


def kernel_serves(q: Tensor, k: Tensor) -> bool:
    """Whether a compiled step attends by a kernel of ours; eager steps do not: what runs eagerly starts at once."""
    return torch.compiler.is_compiling() and cpu_attention_fits(q, k)


def on_cuda(keys: Tensor) -> bool:
    """Whether a cache is where our Triton kernels attend and select."""
    return ways_of(keys.device).operators


def attend_cuda(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor, n_keys: int) -> Tensor:
    """Attend by our kernels to those of the first n_keys entries that are at or before each query.

    q [B, N, T, H]; keys, values [B, K, S, H]; pos [B, T] -> [B, N, T, H], 0 for a query at or past n_keys
    """
    if q.shape[2] <= MOST_DECODED:
        # splits hang on the cache alone: no sum depends on the batch, nor, within tiles of one size, on the tokens fed
        return decode_attention(q, keys, values, pos, n_keys, split_for(keys.shape[2] - SPLIT))
    return prefill_attention(q, keys, values, pos, n_keys)


@dataclass(frozen=True)
class DenseKV(FullKV):
    """FullKV by the best kernel: store, then attend to all at or before each query."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        keys, values = self.k[layer], self.v[layer]
        store(keys, pos, k)
        store(values, pos, v)
        in_view = self.n_splits * SPLIT
        if on_cuda(keys):
            return attend_cuda(q.to(keys.dtype), keys, values, pos, in_view).to(q.dtype)
        if kernel_serves(q.to(keys.dtype), keys):
            return cpu_attention(q.to(keys.dtype), keys, values, pos, in_view).to(q.dtype)
        return attend(q.to(keys.dtype), keys.narrow(2, 0, in_view), values.narrow(2, 0, in_view), pos).to(q.dtype)


@dataclass(frozen=True)
class MassKV(FullKV):
    """DenseKV that also notes, layer by layer, the attention mass of each `page` keys: fp32 [B, K, S // page]."""

    page: int
    mass: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        keys, values = self.k[layer], self.v[layer]
        store(keys, pos, k)
        store(values, pos, v)
        in_view = self.n_splits * SPLIT
        if on_cuda(keys):
            split = split_for(keys.shape[2] - SPLIT)
            out, mass = decode_attention_with_mass(q.to(keys.dtype), keys, values, pos, in_view, split, self.page)
        elif kernel_serves(q.to(keys.dtype), keys):
            out, mass = cpu_attention_with_mass(q.to(keys.dtype), keys, values, pos, in_view)
            mass = mass.unflatten(-1, (-1, self.page // PAGE)).sum(-1)
        else:
            seen = keys.narrow(2, 0, in_view), values.narrow(2, 0, in_view)
            out, mass = attend_with_mass(q.to(keys.dtype), *seen, pos, self.page)
        self.mass.append(mass)
        return out.to(q.dtype)
