"""A model drafts token by token through a view of a cache.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, K kv heads, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import MAX_GAMMA
from ..draft import Draft, draft_step
from ..sampling import DRAFT_STREAM
from ..state import BatchState, RoundPlan
from ..steps import Runner, Step, size_carrier
from . import registry
from .config import DraftConfig
from .policy import DraftPolicy, RoundHooks, View


def build_view(config: DraftConfig, name: str, runner: Runner, kind: type[View] | None = None) -> View:
    """The view of that name, or of a kind of it, over a runner's cache, for the policy of a configuration."""
    most = MAX_GAMMA if isinstance(config.gamma, str) else config.max_gamma
    max_new = most + 2 + registry.policy_class(config.policy).extra_tokens
    view: View = (kind or registry.view_class(name)).build(config, runner, max_new)
    return view


class ModelDraft(DraftPolicy):
    """A model drafts token by token through a view of a cache; with the target's own model and cache, a self-draft."""

    def __init__(self, runner: Runner, view: View, name: str) -> None:
        self.runner, self.view = runner, view
        self.proposers: tuple[str, ...] = (name,)
        self.wants_mass, self.refresh_every = view.wants_mass, view.refresh_every
        self.page: int | None = getattr(view, "page", None)
        self.stream = DRAFT_STREAM  # the random stream of its tokens
        self.vocabulary = runner.group.vocabulary(runner.model.config.vocab_size)
        self.bodies = runner.bodies_of(view.kv()[0])
        self._choose = runner.backend.sampling_step(BatchState.choose)
        self._step = runner.step(draft_step, view.kv()[0])

    @property
    def parts(self) -> tuple[RoundHooks, ...]:
        """The view."""
        return (self.view,)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return super().graphs + self._step.graphs + self._choose.graphs

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """gamma steps, each fed the token of the one before."""
        self.device_before_draft(state, plan)
        token, tokens, qs = state.pending, [], []
        for i in range(plan.gamma):
            pos = state.seq_len + i  # [B]
            logits = self.first(state, plan) if i == 0 else self.feed(token[:, None], pos[:, None], plan.n_keys + i)
            token, q = self._choose(state, logits, pos, plan.kind, self.stream, self.vocabulary, variant=plan.kind)
            tokens.append(token)
            qs.append(q)
        drawn = None if qs[0] is None else torch.stack([q for q in qs if q is not None], 1)  # [B, gamma, V]
        return Draft(torch.stack(tokens, 1), drawn, torch.full_like(state.pending, plan.gamma))

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Slide the view's window; all committed tokens are in the cache."""
        self.view.device_before_draft(state, plan)

    def first(self, state: BatchState, plan: RoundPlan) -> Tensor:
        """Feed the tokens that the drafting model has not seen yet -> logits [B, V] after the pending token."""
        # cloned, to be inference tensors like those of later steps: otherwise Dynamo compiles a second graph
        return self.feed(state.pending.clone()[:, None], state.seq_len.clone()[:, None], plan.n_keys)

    def feed(self, tokens: Tensor, pos: Tensor, n_keys: int, step: Step | None = None) -> Tensor:
        """tokens, pos [B, T] -> fp32 logits [B, V] after the last of them; a T other than 1 passes its own step."""
        cache, (make, args) = self.runner.cache, self.view.kv()
        step = step or self._step
        n_splits_carrier = size_carrier(cache, n_keys, compiled=step.compiles)
        view = make, args, self.bodies
        out: Tensor = step(self.runner.model, tokens, pos, cache.layers, n_splits_carrier, *view)
        return out

    def kv_bytes(self, plan: RoundPlan) -> int:
        """Bytes of keys and values that drafting reads, all slots."""
        each = self.view.bytes_read(plan.n_keys)
        return plan.gamma * self.runner.shape[1] * each

    def positions_read(self, pos: Tensor) -> Tensor:
        """The positions that a draft step with queries at pos [B] reads: bool [L, B, K, S]."""
        return self.view.positions_seen(pos)
