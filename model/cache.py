"""The one seam: what attends is an argument. `KV` is the protocol, `KVCache` hands out the layers that it reads.

Shapes: B batch rows ("slots"), T tokens in this call, S cache capacity, L layers, N query heads, K kv heads,
        H head dim. S is the capacity and a spare split.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig

SPLIT = 256  # positions; the capacity, and the part of it that is in view, are whole splits


class KV(Protocol):
    """Whatever can store new keys and values and attend for the queries that come with them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        ...


class CausalSelf:
    """Attend causally within this call and remember nothing: the logits of a whole text at once."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] (unused: the call's order is causal) -> [B, N, T, H]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [B, N, T, H]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclass(frozen=True)
class CacheLayer:
    """The keys and values of one layer, B slots: how they are stored, and how many bytes they take."""

    k: Tensor  # [B, K, S, H]
    v: Tensor

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every buffer of the layer, each [B, K, S, ...]."""
        return self.k, self.v

    @property
    def capacity(self) -> int:
        """Positions that can ever be in view."""
        return self.k.shape[2] - SPLIT

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one slot."""
        return sum(x.shape[1] * math.prod(x.shape[3:]) * x.element_size() for x in self.buffers)

    def slot(self, slot: int) -> CacheLayer:
        """One slot as a batch of one, sharing memory."""
        return CacheLayer(*(x[slot : slot + 1] for x in self.buffers))

    def store(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [B, K, T, H] at each row's positions pos [B, T]."""
        row = torch.arange(pos.shape[0], device=pos.device)[:, None]  # [B, 1]
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[row, :, pos] = new.transpose(1, 2).to(buffer.dtype)  # [B, T, K, H]


class KVCache:
    """Static keys and values of B slots; seq_len [B] is the only record of what is committed, the rest is scratch.

    One [B, K, S, H] buffer per layer, not one [L, B, K, S, H]: a compiled step that writes into slices of a single
    buffer makes Inductor copy all of it (measured on CPU: 288 ms per step against 13 ms).
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_seq_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.max_seq_len, self.capacity = dtype, max_seq_len, self.splits(max_seq_len) * SPLIT
        # one spare split that is never in view: a view of the whole buffer is contiguous, which would be another graph
        shape = (batch_size, config.n_kv_heads, self.capacity + SPLIT, config.head_dim)

        def buffer() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.layers = [CacheLayer(buffer(), buffer()) for _ in range(config.n_layers)]
        self.seq_len = torch.zeros(batch_size, dtype=torch.int64, device=device)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, B, K)"""
        return len(self.layers), *self.layers[0].k.shape[:2]

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer, layer by layer, each [B, K, S, ...]."""
        return [buffer for layer in self.layers for buffer in layer.buffers]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one slot over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def slot(self, slot: int) -> list[CacheLayer]:
        """The layers of one slot as a batch of one, sharing memory."""
        return [layer.slot(slot) for layer in self.layers]

    def first_layers(self, n: int) -> KVCache:
        """The first n layers alone, sharing their buffers and seq_len."""
        first = copy.copy(self)
        first.layers = self.layers[:n]
        return first

    def vacate(self, slot: int, keep: int = 0) -> None:
        """Forget a slot except its first `keep` entries: no value after them, not even a NaN, reaches the next user."""
        self.seq_len[slot] = 0
        for buffer in self.buffers:
            buffer[slot, :, keep:].zero_()

    def copy(self, source: int, slot: int, n: int) -> None:
        """Copy the first n entries of one slot to another."""
        for buffer in self.buffers:
            buffer[slot, :, :n] = buffer[source, :, :n]

    @staticmethod
    def splits(n_keys: int) -> int:
        """Splits to have in view for the first n_keys positions: at least two, as a size of 1 would compile apart."""
        return max(2, -(-n_keys // SPLIT))
