"""A model with the cache that it reads and writes, as used by prefill, decoding and self-drafts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from gpt_fast_sd.model import KVCache, Transformer
from gpt_fast_sd.tp import ALONE, Group

from .fast import kernels_are_built
from .fast.compile import Options
from .fast.cpu.fused_model import WholeModel, runs_whole


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
    def compiles(self) -> bool:
        """Whether its steps are compiled."""
        return self.compiled is not None and self.compiled is not False

    @property
    def uses_kernels(self) -> bool:
        """Whether its steps use our kernels for a CPU: those that run eagerly only if these are built already."""
        if self.compiles or self.device.type != "cpu":
            return self.compiles
        config, dtype = self.model.config, self.model.embedding.weight.dtype
        return kernels_are_built(config.head_dim, dtype, config.vocab_size, self.cache.dtype)

    @cached_property
    def whole(self) -> WholeModel | None:
        """On a CPU what runs all layers at once in its steps, asked for when its weights are packed; None: nothing."""
        alone = self.device.type == "cpu" and self.group.size == 1
        return WholeModel(self.model) if alone and self.uses_kernels and runs_whole(self.model, self.cache) else None

    @property
    def bits_by_row(self) -> bool:
        """Whether the bits of a step's results for a token depend on its row alone, whatever else the step is fed."""
        return self.whole is not None

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.cache.seq_len.device
