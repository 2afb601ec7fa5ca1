"""A round of speculative decoding: draft, verify, accept, commit. The host reads nothing inside it.

    draft    a policy proposes gamma tokens x a row, each drawn from its own q
    verify   one step of the target, over the pending token and the drafts, says p at all gamma + 1 places
    accept   drafts stay as long as u < p(x) / q(x); the target's own token follows them, drawn from (p - q)+ where a
             draft was refused, from p where none was: so what is emitted follows p exactly, whatever was drafted
             (Leviathan et al. 2023, arXiv 2211.17192; verify_sampled in judging.py)
    commit   text and seq_len grow by what was accepted and by that token; the keys of refused drafts lie behind
             seq_len, where the next round writes (Rows.commit)

Shapes: B slots, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import CompiledStep, varying
from .config import MAX_GAMMA, DraftConfig
from .devices import ways_of
from .judging import Override
from .policies import Draft, DraftPolicy
from .reader import Reader
from .rows import RoundPlan, Rows
from .sampling import ACCEPT_STREAM, TARGET_STREAM, Kind
from .target import TargetSteps


class Round(TargetSteps):
    """The round that is made of the target's steps and of a policy's drafts."""

    def __init__(
        self, target: Reader, rows: Rows, policy: DraftPolicy | None, draft: DraftConfig, *, width: int = 0
    ) -> None:
        """width: see TargetSteps."""
        super().__init__(target, rows, width=width)
        self.policy, self.draft = policy, draft
        self.replay: Override | None = None
        compiles_sampling = ways_of(target.device).compiles_sampling
        self.judge = CompiledStep(judge_step, compiled=target.compiled if compiles_sampling else None)

    def device_round(self, plan: RoundPlan, lap: Callable[[], None] = lambda: None) -> Tensor:
        """One round of all rows -> int64 [B, 2 * gamma + 5], see judge_step; lap is called between its parts."""
        rows, gamma, policy = self.rows, plan.gamma, self.policy if plan.gamma else None
        # draft
        draft = policy.propose(rows, plan) if policy else Draft.none(rows)
        lap()
        # verify
        tokens = torch.cat([rows.pending[:, None], draft.tokens], 1)  # [B, gamma + 1]
        logits, mass = self.feed(tokens, plan.n_keys + gamma)
        lap()
        # accept and commit
        result = self.judged(logits[:, : gamma + 1], draft, plan.kind)
        if policy:
            policy.device_after_verify(rows, mass)
        return result

    def judged(self, logits: Tensor, draft: Draft, kind: Kind) -> Tensor:
        """Accept and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], see judge_step.

        Compiled it is one graph for each kind of sampling and each of three lengths: no draft, one, and more.
        """
        width, beside = logits.shape[1], (draft.q, draft.proposer, self.replay)
        if width > 2:
            varying(logits, min=3)
            varying(*(x for x in (draft.tokens, draft.q, draft.proposer) if x is not None), max=MAX_GAMMA)
        variant = (min(width, 3), kind, *(x is not None for x in beside))
        result: Tensor = self.judge(self.rows, kind, logits, draft, self.replay, variant=variant)
        return result

    @property
    def page(self) -> int:
        """Keys whose attention mass the verification sums for the policy, 0 where it wants none."""
        own = getattr(self.policy, "page", None)  # of one that was set, and that selects by its own
        return (own or self.draft.page) if self.policy and self.policy.wants_mass else 0

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self.decode.graphs + self.verify.graphs + self.judge.graphs

    def keep_steps(self, before: Round) -> None:
        """Go on with what earlier rounds of the same target have compiled."""
        self.decode, self.verify, self.judge = before.decode, before.verify, before.judge
        self.replay = before.replay


def judge_step(rows: Rows, kind: Kind, logits: Tensor, draft: Draft, replay: Override | None) -> Tensor:
    """Accept and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], all that the host reads of a round.

    A row holds what Rows.commit gives, then who proposed each draft, then the first draft that was refused, if one was.
    """
    cap = torch.minimum(draft.count, rows.remaining - 1).clamp(min=0)  # [B], so that the target's own token has room
    # a token's randomness hangs on its row's seed and its position alone
    pos = rows.seq_len[:, None] + torch.arange(logits.shape[1], device=logits.device)  # [B, gamma + 1]
    verdict, _ = rows.judge(logits, pos, kind, draft.tokens, draft.q, cap, accept=ACCEPT_STREAM, own=TARGET_STREAM)
    if replay is not None:
        verdict = replay.apply(verdict, draft.tokens, cap)
    by_whom = draft.proposer if draft.proposer is not None else torch.zeros_like(draft.tokens)  # [B, gamma]
    # commit puts the next token in its place; and it writes the rows, of which the drafts may be a view
    refused = F.pad(draft.tokens, (0, 1)).gather(1, verdict.n_accepted[:, None])  # [B, 1]
    committed = rows.commit(draft.tokens, cap, verdict)  # [B, gamma + 4]
    return torch.cat([committed, by_whom, refused], 1)
