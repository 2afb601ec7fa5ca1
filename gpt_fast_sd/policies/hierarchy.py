"""A hierarchy: a cheap draft, judged by the target with a sparse view of its cache, judged by the target.

After TriForce (Sun et al. 2024, arXiv 2404.11912), here for batches: rows advance by different amounts, so each has its
own place in the draft, and all take the same number of steps.

Shapes: B slots, T = CHEAP_GAMMA + 1 tokens of a middle step, L layers, K kv heads, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import KV, CacheLayer, ModelConfig, Transformer
from gpt_fast_sd.tp import Group

from ..acceptance import AcceptResult
from ..bodies import CORE, Bodies
from ..draft import Draft
from ..prefill import Filling
from ..quantization.quantize import drafter
from ..sampling import CHEAP_ACCEPT_STREAM, CHEAP_STREAM, DRAFT_STREAM, Kind
from ..state import BatchState, RoundPlan
from ..steps import Runner, size_carrier
from .config import DraftConfig
from .costs import ModelSteps
from .lookup import LookupDraft
from .model_draft import build_view
from .policy import DraftPolicy, OwnPrefill, RoundHooks, View
from .standalone import StandaloneDraft, beside, view_of_its_own

Count = TypeVar("Count", int, Tensor)

CHEAP_GAMMA = 3  # tokens that the cheap policy drafts for a middle step


def n_middle_steps(gamma: Count) -> Count:
    """Middle steps for a draft of gamma tokens: half as many.

    A step yields 1 to CHEAP_GAMMA + 1 tokens, so a row that keeps one cheap draft per step fills up, and one that keeps
    none still drafts half. More steps would serve only rows whose cheap drafts fail, at the expense of all rows.
    """
    return -(-gamma // 2)


def middle_step(
    model: Transformer,
    tokens: Tensor,
    pos: Tensor,
    layers: list[CacheLayer],
    n_splits_carrier: Tensor,
    make: Callable[..., KV],
    args: tuple[Any, ...],
    bodies: Bodies = CORE,
) -> Tensor:
    """Feed tokens [B, T] at pos [B, T] through a view -> fp32 logits [B, T, V] after each of them."""
    kv = make(layers, n_splits_carrier, *args, bodies=bodies)
    logits: Tensor = bodies.logits(model, tokens, pos, kv).float()
    return logits


def judge_step(state: BatchState, logits: Tensor, kind: Kind, cheap: Draft) -> tuple[AcceptResult, Tensor | None]:
    """Which cheap drafts the middle level keeps: its logits [B, T, V] -> the result, p [B, T, V] if any row samples."""
    streams = {"accept": CHEAP_ACCEPT_STREAM, "own": DRAFT_STREAM}
    return state.accept(logits, kind, cheap.tokens, cheap.q, cheap.count, **streams)


def ahead(state: BatchState, n: Tensor) -> BatchState:
    """The rows as if the next n [B] tokens, which are already in their history, were committed.

    As in the cache, entries of history past the pending token are scratch: a commit overwrites them.
    """
    seq_len = state.seq_len + n
    return state.ending_at(seq_len, state.history.gather(1, seq_len[:, None])[:, 0])


def cheap_plan(plan: RoundPlan, n_ahead: int) -> RoundPlan:
    """The plan of the cheap draft for a middle step, with up to this many tokens drafted before it."""
    return replace(plan, gamma=CHEAP_GAMMA, n_keys=plan.n_keys + n_ahead)


class HierarchyDraft(DraftPolicy):
    """Speculative decoding of the middle level by the cheap one; what it emits is the draft for the target.

    The target needs the distribution of each of its drafts. Speculative sampling draws from the distribution of its own
    target, whatever is drafted for it: given the text before, and which cheap drafts were kept so far, a token is drawn
    from the middle level's q at its place. Whether a row drafts an i-th token at all depends on how many middle steps
    ended before it, so on what was kept among the tokens before it, not on the token. So q is exact, count may serve as
    a cap, and the target's judgement is lossless.

    No random number decides twice. A middle step draws at most one token itself, after the last cheap draft that it
    kept, and the next step begins after that token. Random numbers spent on rejected cheap drafts are reused at the
    same positions; no accepted token depends on them.
    """

    about = "`--cheap` for the target, and the target for itself"
    reads = "a `--view` of its cache, before it verifies with all of it"
    flags = ("cheap", "ngram", "draft_model", "draft_tp", "view", "budget", "quantize", "kv_bits")
    extra_tokens = CHEAP_GAMMA

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> HierarchyDraft:
        """Build the target through a view, over lookup or a draft model with a sliding window."""
        name, *cheap_view = cls.views(config)
        middle = drafter(target, config.quantize, tokens=1 + CHEAP_GAMMA, on_planes=config.needs_planes)
        view = build_view(config, name, middle)
        cheap: LookupDraft | StandaloneDraft = LookupDraft(target, config.ngram)
        if cheap_view:
            runner = drafter(beside(target, draft_model, draft_group, config), config.quantize, tokens=None)
            # the middle level's own token comes between the cheap drafts and the target's: one more may lag
            cheap = StandaloneDraft(runner, view_of_its_own(config, runner), target, lag=3)
            cheap.stream = CHEAP_STREAM
        return cls(middle, view, name, cheap)

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """The middle level's, and the draft model's if one drafts for it."""
        own = config.view or "streaming"
        return (own, "streaming") if cls.needs_model(config) else (own,)

    @classmethod
    def needs_model(cls, config: DraftConfig) -> bool:
        """True if one drafts for the middle level."""
        return config.cheap == "standalone"

    @classmethod
    def searches(cls, config: DraftConfig) -> bool:
        """True if lookup drafts for the middle level."""
        return config.cheap == "lookup"

    @classmethod
    def steps(cls, gamma: int) -> int:
        """Middle steps, and the drafts for each of them."""
        return n_middle_steps(gamma) * (1 + CHEAP_GAMMA)

    @classmethod
    def model_steps(
        cls, config: DraftConfig, target: ModelConfig, draft_model: ModelConfig | None, gamma: int
    ) -> list[ModelSteps]:
        """Middle steps, and those of the draft model if one drafts for them."""
        n, (own, *cheap) = n_middle_steps(gamma), cls.views(config)
        theirs = [ModelSteps(draft_model, n * CHEAP_GAMMA, name) for name in cheap if draft_model]
        return [ModelSteps(target, n, own, CHEAP_GAMMA + 1), *theirs]

    def __init__(self, target: Runner, view: View, view_name: str, cheap: DraftPolicy) -> None:
        self.target, self.view, self.cheap = target, view, cheap
        self.proposers: tuple[str, ...] = (cheap.proposers[0], view_name)
        self.wants_mass = view.wants_mass
        self.page: int | None = getattr(view, "page", None)
        self.refresh_every = max(view.refresh_every, cheap.refresh_every)
        self._step = target.step(middle_step, view.kv()[0])
        self._judge = target.backend.sampling_step(judge_step)

    @property
    def parts(self) -> tuple[RoundHooks, ...]:
        """Both levels."""
        return self.view, self.cheap

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return super().graphs + self._step.graphs + self._judge.graphs

    def prepare(self, slot: int, prompt: Sequence[int]) -> list[Filling]:
        """Let the cheap level begin to prefill the slot, if its model has a cache of its own."""
        return self.cheap.prepare(slot, prompt) if isinstance(self.cheap, OwnPrefill) else []

    def n_steps(self, gamma: int) -> float:
        """Middle steps."""
        return n_middle_steps(gamma)

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """Middle steps, each judging cheap drafts; a row that is full takes part without effect."""
        self.view.device_before_draft(state, plan)
        gamma = plan.gamma
        n_slots, device, width = len(state.pending), state.pending.device, CHEAP_GAMMA + 1
        row, step = torch.arange(n_slots, device=device)[:, None], torch.arange(width, device=device)  # [B, 1], [T]
        filled = torch.zeros_like(state.seq_len)  # [B]
        # a row near its end, or that keeps few drafts, takes as many steps as alone: neighbours change no draft of it
        most = torch.minimum(state.remaining - 1, state.most_drafts)
        n_steps = n_middle_steps(most.clamp(0, gamma))  # [B]
        who = torch.zeros(n_slots, gamma + width, dtype=torch.int64, device=device)
        q = torch.zeros(n_slots, gamma + width, state.vocab_size, device=device) if plan.kind.sampled else None
        for i in range(n_middle_steps(gamma)):
            virtual, step_plan = ahead(state, filled), cheap_plan(plan, min(gamma, i * width))
            cheap = self.cheap.propose(virtual, step_plan)
            pos = virtual.seq_len[:, None] + step  # [B, T]
            fed = torch.cat([virtual.pending[:, None], cheap.tokens], 1)  # [B, T]
            logits = self._feed(fed, pos, step_plan.n_keys + CHEAP_GAMMA)  # [B, T, V]
            result, p = self._judge(virtual, logits, plan.kind, cheap, variant=(plan.kind, cheap.q is None))
            # the first n_accepted + 1 of the T tokens and their q count, the next step overwrites the others
            own = step == result.n_accepted[:, None]  # [B, T]
            tokens = torch.where(own, result.next_token[:, None], F.pad(cheap.tokens, (0, 1)))
            state.history.scatter_(1, pos + 1, tokens)
            place = filled[:, None] + step  # [B, T]
            who[row, place] = own.long()
            if q is not None and p is not None:
                q[row, place] = p
            filled = torch.where(i < n_steps, (filled + result.n_accepted + 1).clamp(max=gamma), filled)
        place = torch.arange(gamma, device=device)
        drafted = state.history.gather(1, state.seq_len[:, None] + 1 + place)
        # what follows is of an earlier round, or of another row: nothing that is selected may depend on it
        drafted = torch.where(place < filled[:, None], drafted, 0)
        return Draft(drafted, None if q is None else q[:, :gamma], filled, who[:, :gamma])

    def device_after_verify(self, state: BatchState, mass: Tensor | None) -> None:
        """Let the view select by the verification's mass."""
        self.view.device_after_verify(state, mass)
        self.cheap.device_after_verify(state, None)

    def kv_bytes(self, plan: RoundPlan) -> int:
        """Bytes that the middle steps read, and that drafting for them reads."""
        each = self.view.bytes_read(plan.n_keys)
        step = self.target.shape[1] * each + self.cheap.kv_bytes(cheap_plan(plan, 0))
        return n_middle_steps(plan.gamma) * step

    def positions_read(self, pos: Tensor) -> Tensor:
        """The positions of the target's cache that a middle step with queries at pos [B] reads: bool [L, B, K, S]."""
        return self.view.positions_seen(pos)

    def _feed(self, tokens: Tensor, pos: Tensor, n_keys: int) -> Tensor:
        """tokens, pos [B, T] -> fp32 logits [B, T, V] of the middle level after each of them."""
        cache, (make, args) = self.target.cache, self.view.kv()
        n_splits_carrier = size_carrier(cache, n_keys, compiled=self._step.compiles)
        view = make, args, self.target.bodies_of(make)
        logits: Tensor = self._step(self.target.model, tokens, pos, cache.layers, n_splits_carrier, *view)
        return logits
