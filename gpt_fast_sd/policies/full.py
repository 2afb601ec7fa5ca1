"""The whole cache: the self-check, whose drafts the target must accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, SPLIT

from ..attending import DenseKV
from ..reader import Reader
from ..rows import Rows


def full_kv(k: Sequence[Tensor], v: Sequence[Tensor], in_view: Tensor) -> KV:
    """DenseKV for a compiled step."""
    return DenseKV(k, v, in_view.shape[0])


class FullView:
    """Everything at or before the query."""

    wants_mass = False
    refresh_every = 0

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return 0

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """DenseKV, which takes nothing more."""
        return full_kv, ()

    def warm_up(self) -> None:
        """Nothing to compile."""

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Nothing to select."""

    def due(self, rows: Rows) -> bool:
        """Never."""
        return False

    def renew(self, rows: Rows) -> None:
        """Nothing to renew."""

    def refreshes(self, rows: Rows) -> list[int]:
        """None."""
        return []

    def refresh(self, rows: Rows, n_keys: int) -> None:
        """Nothing to refresh."""

    def begin(self, rows: Rows) -> None:
        """Nothing to slide."""

    def observe(self, rows: Rows, mass: Tensor | None) -> None:
        """Nothing to learn."""

    def vacate(self, slot: int) -> None:
        """Nothing to forget."""

    def entries_read(self, n_keys: int) -> int:
        """All splits in view."""
        return self.reader.cache.splits(n_keys) * SPLIT

    def positions_read(self, pos: Tensor) -> Tensor:
        """All at or before pos [B] -> bool [L, B, K, S]."""
        n_layers, _, n_kv = self.reader.shape
        place = torch.arange(self.reader.cache.k[0].shape[2], device=pos.device)  # [S]
        return (place <= pos[:, None])[None, :, None].expand(n_layers, -1, n_kv, -1)
