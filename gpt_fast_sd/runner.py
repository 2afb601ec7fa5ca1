"""A model with the cache that it reads and writes, as used by prefill, decoding and self-drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt_fast_sd.model import KVCache, Transformer
from gpt_fast_sd.tp import ALONE, Group

from .compiling import Options


@dataclass(frozen=True)
class Runner:
    """A model and the cache that it reads and writes. A self-draft uses the target's own."""

    model: Transformer
    cache: KVCache
    compiled: bool | Options | None  # see CompiledStep
    group: Group = ALONE  # the ranks that hold the model together

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, B, K) of the cache."""
        return self.cache.shape

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.cache.seq_len.device
