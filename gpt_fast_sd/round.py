"""A round of speculative decoding: draft, verify, accept, commit. The host reads nothing inside it.

    draft    a policy proposes gamma tokens x per row, each drawn from its own q
    verify   one step of the target, over the pending token and the drafts, gives p at all gamma + 1 places
    accept   drafts stay as long as u < p(x) / q(x); the target's own token follows them, drawn from (p - q)+ if a
             draft was refused, from p if none was: so what is emitted follows p exactly, whatever was drafted
             (Leviathan et al. 2023, arXiv 2211.17192; verify_sampled in acceptance.py)
    commit   text and seq_len grow by what was accepted and by that token; the keys of refused drafts are past
             seq_len, where the next round writes (acceptance.commit)

Shapes: B slots, V vocabulary, gamma tokens drafted per round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import CacheLayer, Transformer

from .acceptance import Override
from .bodies import CORE, Bodies
from .config import MAX_GAMMA
from .draft import Draft, Drafter
from .kv import DenseKV
from .sampling import ACCEPT_STREAM, TARGET_STREAM, Kind
from .state import BatchState, RoundPlan
from .steps import Runner, size_carrier, varying


class Round:
    """A round, made of the target's steps, which feed each slot from its seq_len on, and of a policy's drafts."""

    def __init__(
        self, target: Runner, state: BatchState, policy: Drafter | None, *, page: int = 16, width: int = 0
    ) -> None:
        """width: tokens that every step feeds (0: as many as needed).

        A width also fixes the view to all of the cache: then no sum depends on what else is in the batch.
        """
        self.target, self.state, self.width = target, state, width
        self.policy, self._page = policy, page
        self.replay: Override | None = None
        self.decode, self.verify = target.step(decode_step), target.step(decode_step)  # one token per slot, or several
        self.accept_compiled = target.backend.sampling_step(accept_step)

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

    def feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        """Feed tokens [B, T] from each slot's seq_len on, at least n_keys keys in view -> logits [B, T, V], mass."""
        cache, wanted = self.target.cache, self.width or tokens.shape[1]
        if wanted > tokens.shape[1]:
            tokens = F.pad(tokens, (0, wanted - tokens.shape[1]))
        # a slot without a request writes past everything that can be in view, so it costs no reading of keys
        pos = torch.where(self.state.active, cache.seq_len, cache.capacity)[:, None]  # [B, 1]
        if wanted > 1:
            pos = pos + torch.arange(wanted, device=tokens.device)  # [B, T]
        step, page = (self.decode, 0) if wanted == 1 else (self.verify, self.page)
        if step.compiles and step is self.verify and not self.width:
            varying(tokens, pos)
        n_splits_carrier = size_carrier(cache, self.in_view(n_keys), compiled=step.compiles)
        # with several threads a library may sum one row of a product in a different order than the next
        with one_thread() if self.width else contextlib.nullcontext():
            out: tuple[Tensor, Tensor | None] = step(
                self.target.model, tokens, pos, cache.layers, n_splits_carrier, page, self.target.bodies, variant=page
            )
        return out

    def in_view(self, n_keys: int) -> int:
        """Keys to have in view: with a fixed width the whole cache, so that sums never change their order."""
        return self.target.cache.capacity if self.width else n_keys

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
        return (own or self._page) if self.policy and self.policy.wants_mass else 0

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

    Its rows are those of acceptance.commit.
    """
    max_accept = torch.minimum(draft.count, state.most_drafts)  # [B]
    if draft.tokens.shape[1]:
        max_accept = torch.minimum(max_accept, state.remaining - 1).clamp(min=0)  # room for the target's own token
    result, _ = state.accept(logits, kind, draft.tokens, draft.q, max_accept, accept=ACCEPT_STREAM, own=TARGET_STREAM)
    if replay is not None:
        result = replay.apply(result, draft.tokens, max_accept)
    return state.commit(draft.tokens, max_accept, result, draft.proposer)


def decode_step(
    model: Transformer, tokens: Tensor, pos: Tensor, layers: list[CacheLayer], n_splits_carrier: Tensor, page: int,
    bodies: Bodies = CORE,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Store, attend to everything and judge: tokens, pos [B, T] -> fp32 logits [B, T, V] after each of them.

    n_splits_carrier [n_splits, 0] carries, as a size that may vary without a recompile, how many key splits are in
    view. With a page, also the attention mass that each block of page keys received: fp32 [L, B, K, n_keys // page].
    """
    kv = DenseKV(layers, n_splits_carrier, page, bodies=bodies)
    logits = bodies.logits(model, tokens, pos, kv).float()  # [B, T, V]
    return logits, torch.stack(kv.mass) if page else None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Meanwhile torch's CPU operators run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
