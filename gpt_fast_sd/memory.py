"""What an engine will allocate, told before it does: a batch and context that cannot fit are refused in one sentence.

Shapes: B slots, T tokens in a call, S cache capacity, L layers, N query heads, K kv heads, H head dim, D model width,
        F feed-forward width, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt_fast_sd.model import SPLIT, KVCache, ModelConfig

from .config import DraftConfig, EngineConfig
from .devices import ways_of
from .kernels import split_for

GIB = 2**30
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device. weights: those that are still to be loaded."""

    weights: int
    kv: int  # the target's cache
    draft_kv: int  # a standalone draft's
    policy: int  # selections and bounds
    workspace: int  # the largest that a step needs meanwhile

    @staticmethod
    def of(
        config: EngineConfig,
        draft: DraftConfig,
        model: ModelConfig,
        draft_model: ModelConfig | None,
        kv_dtype: torch.dtype,
        *,
        device: torch.device = CPU,
        weights: int = 0,
    ) -> MemoryPlan:
        """The plan for a model of these sizes (under tensor parallelism, those of one rank)."""
        b, capacity = config.batch_size, KVCache.splits(config.max_seq_len) * SPLIT
        entries = b * (capacity + SPLIT)
        kv = entries * model.kv_bytes_per_token(kv_dtype.itemsize)
        view, n_lists = draft.view_name, model.n_layers * b * model.n_kv_heads
        policy = n_lists * draft.budget * 8 if view in ("streaming", "snapkv", "guided") else 0
        if view == "quest":
            policy = kv // draft.page + n_lists * draft.budget // draft.page * 8
        return MemoryPlan(
            weights=weights,
            kv=kv,
            draft_kv=entries * draft_model.kv_bytes_per_token(kv_dtype.itemsize) if draft_model else 0,
            policy=policy + 8 * entries,  # the text of every slot
            workspace=_workspace(config, draft, model, capacity, device),
        )

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.draft_kv + self.policy + self.workspace

    def check(self, have: int | None, device: torch.device, config: EngineConfig) -> None:
        """ValueError unless it fits into `have` bytes (None: it cannot be told)."""
        if have is None or self.total <= have:
            return
        parts = {
            "weights": self.weights,
            "KV cache": self.kv,
            "the draft model's KV cache": self.draft_kv,
            "selections and text": self.policy,
            "workspace": self.workspace,
        }
        sizes = " + ".join(f"{name} {_size(n)}" for name, n in parts.items() if n)
        slots = int((have - self.weights) // max(1, (self.total - self.weights) / config.batch_size))
        advice = f"batch_size {slots} would fit" if slots >= 1 else "not even one slot fits: lower max_seq_len"
        raise ValueError(
            f"batch_size {config.batch_size} x max_seq_len {config.max_seq_len:,} takes {sizes} = {_size(self.total)}, "
            f"over the {_size(have)} of memory of {device}; {advice}"
        )


def _workspace(
    config: EngineConfig, draft: DraftConfig, model: ModelConfig, capacity: int, device: torch.device
) -> int:
    """The larger of what a prefill chunk and the target's widest step hold at a time, roughly."""
    b, width = config.batch_size, draft.max_gamma + 1
    row = model.dim * 4 + (model.n_heads + 2 * model.n_kv_heads) * model.head_dim * 2 + model.ffn_dim * 3  # elements
    prefill = max(ways_of(device).chunks) * row * 4
    logits = 4 * b * width * model.vocab_size * 4  # fp32: logits, probabilities of both sides, one more
    partials = 0
    if ways_of(device).operators:  # of the attention of one layer, fp32
        partials = b * model.n_heads * width * (model.head_dim + 2) * 4 * -(-capacity // split_for(capacity))
    mass = model.n_layers * b * model.n_kv_heads * capacity // draft.page * 4 if draft.view_name == "guided" else 0
    return max(prefill, b * width * row * 4 + logits + partials + mass)


def _size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB"
