"""The one seam: what attends is an argument. `KV` is the protocol, `KVCache` the buffers, `FullKV` the plainest reader.

Shapes: B batch rows ("slots"), T tokens in this call, S cache capacity, L layers, N query heads, K kv heads,
        H head dim. S is the capacity and a spare split.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import SPLIT, attend
from .config import ModelConfig


class KV(Protocol):
    """Whatever can store new keys and values and attend for the queries beside them."""

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


def store(buffer: Tensor, pos: Tensor, new: Tensor) -> None:
    """Write new [B, K, T, H] into buffer [B, K, S, H] at each row's positions pos [B, T]."""
    row = torch.arange(pos.shape[0], device=pos.device)[:, None]  # [B, 1]
    buffer[row, :, pos] = new.transpose(1, 2).to(buffer.dtype)  # [B, T, K, H]


@dataclass(frozen=True)
class FullKV:
    """Store, then attend to all at or before each query; only the first n_splits * SPLIT positions are in view."""

    k: Sequence[Tensor]  # L of [B, K, S, H]
    v: Sequence[Tensor]
    n_splits: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        keys, values = self.k[layer], self.v[layer]
        store(keys, pos, k)
        store(values, pos, v)
        in_view = self.n_splits * SPLIT
        out = attend(q.to(keys.dtype), keys.narrow(2, 0, in_view), values.narrow(2, 0, in_view), pos)
        return out.to(q.dtype)


class KVCache:
    """Static keys and values of B slots; seq_len [B] is the only record of what is committed, the rest is scratch.

    One [B, K, S, H] buffer a layer, not one [L, B, K, S, H]: a compiled step that writes into slices of a single buffer
    makes Inductor copy all of it (measured on CPU: 288 ms a step against 13 ms).
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_seq_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_seq_len, self.capacity = max_seq_len, self.splits(max_seq_len) * SPLIT
        # one spare split that is never in view: a view of the whole buffer would be another graph (it is contiguous)
        shape = (batch_size, config.n_kv_heads, self.capacity + SPLIT, config.head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.seq_len = torch.zeros(batch_size, dtype=torch.int64, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one slot over all layers."""
        return sum(2 * k.shape[1] * k.shape[3] * k.element_size() for k in self.k)

    def row(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and values of one slot as a batch of one, sharing memory: two lists of L [1, K, S, H]."""
        return [k[slot : slot + 1] for k in self.k], [v[slot : slot + 1] for v in self.v]

    def first_layers(self, n: int) -> KVCache:
        """The first n layers alone, sharing their buffers and seq_len."""
        first = copy.copy(self)
        first.k, first.v = self.k[:n], self.v[:n]
        return first

    def vacate(self, slot: int, keep: int = 0) -> None:
        """Forget a slot but for its first `keep` entries: no value behind them (not even a NaN) can reach the next."""
        self.seq_len[slot] = 0
        for buffer in (*self.k, *self.v):
            buffer[slot, :, keep:].zero_()

    def copy(self, source: int, slot: int, n: int) -> None:
        """Give a slot the first n entries of another one."""
        for buffer in (*self.k, *self.v):
            buffer[slot, :, :n] = buffer[source, :, :n]

    @staticmethod
    def splits(n_keys: int) -> int:
        """Splits to have in view for the first n_keys positions: two at least, as a size of 1 compiles apart."""
        return max(2, -(-n_keys // SPLIT))
