"""What a policy proposes for a round, and the step by which a model drafts through a view of its cache.

The target judges every draft: none changes what is emitted, if its tokens follow its q. Policies are in policies/.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, K kv heads, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, CacheLayer, Transformer

from .bodies import CORE, Bodies
from .state import BatchState, RoundPlan


@dataclass(frozen=True)
class Draft:
    """The drafts of a policy for one round."""

    tokens: Tensor  # int64 [B, gamma]
    q: Tensor | None  # fp32 [B, gamma, V], the distribution of each token; None: the drafts are deterministic
    count: Tensor  # int64 [B], how many of a row's tokens count, 0..gamma
    proposer: Tensor | None = None  # int64 [B, gamma], index into the policy's proposers; None: the first of them

    @staticmethod
    def none(state: BatchState) -> Draft:
        """No token for any row."""
        return Draft(state.pending.new_empty(len(state.pending), 0), None, torch.zeros_like(state.pending))


class Drafter(Protocol):
    """What a round asks of a policy; see DraftPolicy in policies/policy.py, the base class of all of them."""

    wants_mass: bool  # whether device_after_verify receives attention mass, summed over its `page` if it has one

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """On the device: draft up to plan.gamma tokens for all rows; nothing committed is changed."""
        ...

    def device_after_verify(self, state: BatchState, mass: Tensor | None) -> None:
        """On the device, once the round is committed. mass fp32 [L, B, K, S // page]: attention to blocks of keys."""
        ...


def draft_step(
    model: Transformer, tokens: Tensor, pos: Tensor, layers: list[CacheLayer], n_splits_carrier: Tensor,
    make: Callable[..., KV], args: tuple[Any, ...], bodies: Bodies = CORE,
) -> Tensor:  # fmt: skip
    """Feed tokens [B, T] at pos [B, T] through a view -> fp32 logits [B, V] after the last of them."""
    kv = make(layers, n_splits_carrier, *args, bodies=bodies)
    last = bodies.hidden(model, tokens, pos, kv)[:, -1]  # [B, D]
    logits: Tensor = model.output(last).float()
    return logits
