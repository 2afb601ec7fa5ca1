"""The whole cache: the self-check, whose drafts the target must accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, SPLIT

from ..kv import DenseKV
from ..steps import Runner
from .config import DraftConfig
from .policy import View


class FullView(View):
    """Everything at or before the query."""

    about = "its whole cache: a check of the engine"
    flags = ()

    @classmethod
    def build(cls, config: DraftConfig, runner: Runner, max_new: int) -> View:
        """No budget."""
        return cls(runner)

    @classmethod
    def reads(cls, config: DraftConfig, n_keys: int) -> int:
        """Everything."""
        return n_keys

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """DenseKV, without further arguments."""
        return DenseKV, ()

    def entries_read(self, n_keys: int) -> int:
        """All splits in view."""
        return self.runner.cache.splits(n_keys) * SPLIT

    def positions_read(self, pos: Tensor) -> Tensor:
        """All positions at or before pos [B] -> bool [L, B, K, S]."""
        n_layers, _, n_kv = self.runner.shape
        place = torch.arange(self.runner.cache.capacity + SPLIT, device=pos.device)  # [S]
        return (place <= pos[:, None])[None, :, None].expand(n_layers, -1, n_kv, -1)
