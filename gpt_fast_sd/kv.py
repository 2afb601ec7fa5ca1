"""What attends, as an argument of the model's forward: it stores new keys and values, then reads the cache.

Shapes: B batch rows, T tokens in this call, N query heads, K kv heads, H head dim, C listed entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpt_fast_sd.model import SPLIT, CacheLayer

from .bodies import CORE, Bodies


@dataclass(frozen=True)
class DenseKV:
    """Store, then attend to all entries that each query sees, in the splits that are in view."""

    layers: Sequence[CacheLayer]
    n_splits_carrier: Tensor  # [n_splits, 0]
    page: int = 0  # number of keys whose attention mass is summed, 0: none is
    mass: list[Tensor] = field(default_factory=list)  # with a page layer by layer, fp32 [B, K, n_keys // page]
    bodies: Bodies = field(default=CORE, kw_only=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        self.layers[layer].store(pos, k, v)
        n_keys = self.n_splits_carrier.shape[0] * SPLIT
        out: Tensor
        out, mass = self.bodies.dense(q, self.layers[layer], pos, n_keys, self.page)
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
    bodies: Bodies = field(default=CORE, kw_only=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        self.layers[layer].store(pos, k, v)
        window = self.window_start, self.window_width
        out: Tensor = self.bodies.listed(q, self.layers[layer], self.kv_indices[layer], *window, pos, self.page)
        return out
