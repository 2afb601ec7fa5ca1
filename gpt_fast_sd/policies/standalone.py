"""Another model drafts, smaller and with the same tokenizer, from its own cache, whose slots are the target's.

It shares the target's seq_len: what is committed is committed in both, and rejecting a draft costs nothing here either.

Shapes: B slots, T tokens in this call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import KVCache, ModelConfig, Transformer
from gpt_fast_sd.tp import Group, broadcast, local_config

from ..draft import Draft, draft_step
from ..prefill import CHUNK, Filling, Prefill
from ..quantization.quantize import drafter
from ..state import BatchState, RoundPlan
from ..steps import Runner
from .config import DraftConfig
from .costs import ModelSteps
from .model_draft import ModelDraft, build_view
from .policy import View
from .turned_sinks import ChunkedPrefill, TurnedSinksView

PADDING = 1024  # rows of two vocabularies of one tokenizer may differ by so many: Qwen2.5's do by 128


def view_of_model(draft: DraftConfig) -> str:
    """The view that a draft model has of its cache."""
    return (draft.view if draft.policy == "standalone" else None) or "streaming"


def view_of_its_own(draft: DraftConfig, runner: Runner) -> View:
    """That view; where rows may have more tokens than the model has positions, one whose sinks are turned."""
    is_short = runner.cache.max_seq_len > runner.model.config.max_seq_len
    return build_view(draft, view_of_model(draft), runner, TurnedSinksView if is_short else None)


def beside(target: Runner, model: Transformer | None, group: Group, draft: DraftConfig) -> Runner:
    """A draft model and a cache for it with the target's slots and seq_len; ValueError if none fits.

    group: the ranks that hold the draft model together.
    """
    if model is None:
        raise ValueError("a standalone draft needs a draft model: give one to Engine, or use Engine.from_pretrained")
    config, max_seq_len = model.config, target.cache.max_seq_len
    check_draft_model(config, target.model.config, max_seq_len, draft)
    own, form = local_config(config, group.size), target.cache.format.in_bytes
    cache = KVCache(own, target.shape[1], max_seq_len, format=form, device=target.device)
    cache.seq_len = target.cache.seq_len
    return replace(target, model=model, cache=cache, group=group)


def check_draft_model(config: ModelConfig, target: ModelConfig, max_seq_len: int, draft: DraftConfig) -> None:
    """ValueError unless a model of this shape can draft for the target over rows of up to max_seq_len."""
    if abs(config.vocab_size - target.vocab_size) > PADDING:
        raise ValueError(
            f"the draft model has a vocabulary of {config.vocab_size:,}, the target of {target.vocab_size:,}: "
            "they must share one, but for rows of padding"
        )
    most = config.max_seq_len
    if max_seq_len <= most:
        return
    if (view := view_of_model(draft)) != "streaming":
        raise ValueError(
            f"max_seq_len {max_seq_len:,} is over the draft model's {most:,} positions, and view {view!r} reads from "
            "all of a text: use view 'streaming', whose window may slide past them"
        )
    if draft.budget + CHUNK > most:
        raise ValueError(
            f"budget {draft.budget:,} and a chunk of {CHUNK} prompt tokens are over the draft model's {most:,} "
            f"positions: {f'the budget may be at most {most - CHUNK:,}' if most > CHUNK else 'they are too few'}"
        )


class CommonVocabulary:
    """A draft model's logits where it has more or fewer rows of padding than the target.

    Tokens that it does not have it never drafts: their q is 0.
    """

    def __init__(self, group: Group, own: int, size: int) -> None:
        """own: rows of the draft model, which a group holds. size: the target's."""
        self.common, self.size = min(own, size), size
        self.theirs = group.vocabulary(self.common)
        self.is_cut = group.mesh is None and own > size  # ranks cut together

    def argmax(self, logits: Tensor) -> Tensor:
        """The best token that both have, ties go to the lowest id: fp32 [..., R] -> int64 [...]."""
        best: Tensor = self.theirs.argmax(logits[..., : self.common] if self.is_cut else logits)
        return best

    def whole(self, logits: Tensor) -> Tensor:
        """All of the target's: [..., R] -> [..., V]."""
        return F.pad(self.theirs.whole(logits)[..., : self.common], (0, self.size - self.common), value=float("-inf"))

    def decided(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        """The first rank's draws, for all of them."""
        return self.theirs.decided(*drawn)


class StandaloneDraft(ModelDraft):
    """Feeds its own model and cache, which are always a few tokens behind: a round's last draft is not fed.

    If the target accepted all drafts, the last of them and the target's own token are new to the draft model. So its
    first step feeds two tokens in every round, whatever was accepted: shapes stay static, and if the first of them was
    fed before, the same values overwrite it. Tokens of rounds without a draft are prefilled first.
    """

    about = "`--draft-model`, with the same tokenizer"
    reads = "its own cache, as `--view` says"
    flags = ("draft_model", "draft_tp", "view", "budget", "quantize")
    own_cache = True

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> StandaloneDraft:
        """Build a draft from the draft model, through a view of its own cache."""
        runner = drafter(beside(target, draft_model, draft_group, config), config.quantize, tokens=None)
        return cls(runner, view_of_its_own(config, runner), target)

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """The view named by the configuration's `view`."""
        return (view_of_model(config),)

    @classmethod
    def needs_model(cls, config: DraftConfig) -> bool:
        """True."""
        return True

    @classmethod
    def model_steps(
        cls, config: DraftConfig, target: ModelConfig, draft_model: ModelConfig | None, gamma: int
    ) -> list[ModelSteps]:
        """One step of the draft model per token."""
        return [ModelSteps(draft_model, gamma, cls.views(config)[0])] if draft_model else []

    def __init__(self, runner: Runner, view: View, target: Runner, *, lag: int = 2) -> None:
        """target: what verifies; all its ranks need the same draft.

        lag: tokens at the end of the text, including the pending one, that a round may leave out of the cache.
        """
        super().__init__(runner, view, "standalone")
        self.listeners, self.lag = target.group, lag
        self._prefill = ChunkedPrefill(runner, view) if isinstance(view, TurnedSinksView) else Prefill(runner)
        own, size = runner.model.config.vocab_size, target.model.config.vocab_size
        self._last = own - 1 if own < size else None  # what it reads in place of a token that it does not have
        if own != size:
            self.vocabulary = CommonVocabulary(runner.group, own, size)
        self._start = runner.step(draft_step, view.kv()[0])
        self._prepared: dict[int, Filling] = {}  # by slot, since it was last free

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return super().graphs + self._prefill.graphs + self._start.graphs

    def warm_up(self) -> None:
        """Compile the prefill and the view's steps; slots of the draft model's cache lose their prompts."""
        seq_len = self.runner.cache.seq_len
        before = seq_len.clone()
        self._prefill.warm_up()
        seq_len.copy_(before)  # it is also the target's, whose slots keep their prompts
        for slot in range(self.runner.shape[1]):
            self._prefill.keep(slot, 0)  # steps are timed there
        super().warm_up()

    def prepare(self, slot: int, prompt: Sequence[int]) -> list[Filling]:
        """Begin to prefill the slot of the draft model's cache."""
        self._prepared[slot] = self._prefill.begin(slot, self._body(prompt))
        return [self._prepared[slot]]

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Prefill the rest of the slot, and select for it."""
        body, filling = self._body(prompt), self._prepared.pop(slot, None)
        if filling and not filling.left and list(filling.body) == body:
            filling.finish()
        else:
            self._prefill.fill(slot, body)
        self._prefill.keep(slot, len(prompt) - self.lag)
        super().host_admit(slot, prompt)

    def host_must_wait(self, plan: RoundPlan) -> bool:
        """Whether rounds passed that drafted nothing, or the view is due."""
        return super().host_must_wait(self._planned(plan)) or not plan.follows_a_draft

    def host_before_round(self, state: BatchState, plan: RoundPlan) -> None:
        """Catch up, and call the view's hook with the plan of the tokens that are in the cache."""
        if not plan.follows_a_draft:
            for slot, length in plan.lengths.items():
                for start in range(plan.drafted_at[slot], length + 1 - self.lag, CHUNK):
                    self._prefill.feed(slot, self._known(state.history[slot, start : start + CHUNK].clone()), start)
        super().host_before_round(self._fed(state), self._planned(plan))

    def host_refreshes(self, plan: RoundPlan) -> list[int]:
        """The refreshes of the view, for the tokens that are in the cache."""
        return super().host_refreshes(self._planned(plan))

    def device_refresh(self, state: BatchState, n_keys: int) -> None:
        """Refresh the view's selection from the tokens that are in the cache."""
        super().device_refresh(self._fed(state), n_keys)

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """gamma steps; if several groups of ranks draft with a copy each, the drafts of the first group count.

        As in the target's steps, a slot without a request writes past everything that can be in view, so that its
        prompt stays.
        """
        behind_all = self.runner.cache.capacity + self.lag - 1
        placed = state.ending_at(torch.where(state.active, state.seq_len, behind_all))
        draft, mesh = super().propose(placed, plan), self.listeners.mesh
        if mesh is None or self.runner.group.size == self.listeners.size:
            return draft
        return replace(draft, tokens=broadcast(draft.tokens, mesh))  # judged by the first one's q, see BatchState

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Slide the view's window to the end of the tokens in the cache."""
        super().device_before_draft(self._fed(state), self._planned(plan))

    def _fed(self, state: BatchState) -> BatchState:
        """The rows cut to the tokens that are certainly in the cache."""
        return state.ending_at((state.seq_len - (self.lag - 1)).clamp(min=0))

    def _planned(self, plan: RoundPlan) -> RoundPlan:
        """The plan for these rows."""
        lengths, drafted_at = (
            {slot: max(0, length - (self.lag - 1)) for slot, length in of.items()}
            for of in (plan.lengths, plan.drafted_at)
        )
        return replace(plan, lengths=lengths, drafted_at=drafted_at)

    def first(self, state: BatchState, plan: RoundPlan) -> Tensor:
        """Feed the last tokens of the text, the pending one at the end -> logits [B, V] after it.

        If a text is shorter, its first token is fed several times, to the same place.
        """
        behind = torch.arange(1 - self.lag, 1, device=state.seq_len.device)  # [T]
        pos = (state.seq_len[:, None] + behind).clamp(min=0)  # [B, T]
        return self.feed(self._known(state.history.gather(1, pos)), pos, plan.n_keys, self._start)

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens of the target as the draft model has them."""
        return tokens if self._last is None else tokens.clamp(max=self._last)

    def _body(self, prompt: Sequence[int]) -> list[int]:
        """What is prefilled of a prompt."""
        body = list(prompt[:-1])
        return body if self._last is None else [min(token, self._last) for token in body]

    def host_free(self, slot: int) -> None:
        """Forget the slot; of its prompt, all but the tokens that the first round fed can still be reused."""
        super().host_free(slot)
        self._prepared.pop(slot, None)
