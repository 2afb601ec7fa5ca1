"""A round of speculative decoding: draft, verify, accept, commit. The host reads nothing inside it.

    draft    a policy proposes gamma tokens x per row, each drawn from its own q
    verify   one step of the target, over the pending token and the drafts, gives p at all gamma + 1 places
    accept   drafts stay as long as u < p(x) / q(x); the target's own token follows them, drawn from (p - q)+ if a
             draft was refused, from p if none was: so what is emitted follows p exactly, whatever was drafted
             (Leviathan et al. 2023, arXiv 2211.17192; verify_sampled in acceptance.py)
    commit   text and seq_len grow by what was accepted and by that token; the keys of refused drafts are past
             seq_len, where the next round writes (BatchState.commit)

Shapes: B slots, V vocabulary, gamma tokens drafted per round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .acceptance import Override
from .config import MAX_GAMMA, DraftConfig
from .devices import traits_of
from .fast.compile import CompiledStep, varying
from .policies import Draft, DraftPolicy
from .runner import Runner
from .sampling import ACCEPT_STREAM, TARGET_STREAM, Kind
from .state import BatchState, RoundPlan
from .target import TargetSteps


class Round(TargetSteps):
    """A round, made of the target's steps and of a policy's drafts."""

    def __init__(
        self, target: Runner, state: BatchState, policy: DraftPolicy | None, draft: DraftConfig, *, width: int = 0
    ) -> None:
        """width: see TargetSteps."""
        super().__init__(target, state, width=width)
        self.policy, self.draft = policy, draft
        self.replay: Override | None = None
        compiles_sampling = traits_of(target.device).compiles_sampling
        self.accept_compiled = CompiledStep(accept_step, compiled=target.compiled if compiles_sampling else None)

    def device_round(self, plan: RoundPlan, timestamp: Callable[[], None] = lambda: None) -> Tensor:
        """One round of all rows -> int64 [B, 2 * gamma + 5], see accept_step; timestamp is called between its parts."""
        state, gamma, policy = self.state, plan.gamma, self.policy if plan.gamma else None
        # draft
        draft = policy.propose(state, plan) if policy else Draft.none(state)
        timestamp()
        # verify
        tokens = torch.cat([state.pending[:, None], draft.tokens], 1)  # [B, gamma + 1]
        logits, mass = self.feed(tokens, plan.n_keys + gamma)
        timestamp()
        # accept and commit
        result = self.accept(logits[:, : gamma + 1], draft, plan.kind)
        if policy:
            policy.device_after_verify(state, mass)
        return result

    def accept(self, logits: Tensor, draft: Draft, kind: Kind) -> Tensor:
        """Accept and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], see accept_step.

        Compiled, it is one graph for each kind of sampling and each of three lengths: no draft, one, and more.
        """
        width, beside = logits.shape[1], (draft.q, draft.proposer, self.replay)
        if width > 2:
            varying(logits, min=3)
            varying(*(x for x in (draft.tokens, draft.q, draft.proposer) if x is not None), max=MAX_GAMMA)
        variant = (min(width, 3), kind, *(x is not None for x in beside))
        result: Tensor = self.accept_compiled(self.state, kind, logits, draft, self.replay, variant=variant)
        return result

    @property
    def page(self) -> int:
        """Keys whose attention mass the verification sums for the policy, 0 if it wants none."""
        own = getattr(self.policy, "page", None)  # of a policy that was set by hand and has its own page
        return (own or self.draft.page) if self.policy and self.policy.wants_mass else 0

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self.decode.graphs + self.verify.graphs + self.accept_compiled.graphs

    def keep_steps(self, before: Round) -> None:
        """Reuse what earlier rounds of the same target have compiled."""
        self.decode, self.verify, self.accept_compiled = before.decode, before.verify, before.accept_compiled
        self.replay = before.replay


def accept_step(state: BatchState, kind: Kind, logits: Tensor, draft: Draft, replay: Override | None) -> Tensor:
    """Accept and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], all that the host reads of a round.

    Its rows are those of BatchState.commit.
    """
    max_accept = draft.count  # [B]
    if draft.tokens.shape[1]:
        max_accept = torch.minimum(max_accept, state.remaining - 1).clamp(min=0)  # room for the target's own token
    result, _ = state.accept(logits, kind, draft.tokens, draft.q, max_accept, accept=ACCEPT_STREAM, own=TARGET_STREAM)
    if replay is not None:
        result = replay.apply(result, draft.tokens, max_accept)
    return state.commit(draft.tokens, max_accept, result, draft.proposer)
