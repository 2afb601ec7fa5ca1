"""The base classes of draft policies and of views of a cache.

A policy proposes tokens; a view says which committed entries of a cache the drafting model reads, at their true
positions.

Shapes: B slots, S cache capacity, L layers, K kv heads, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, Transformer

from ..attention import within
from ..draft import Draft
from ..prefill import Filling
from ..state import BatchState, RoundPlan
from ..steps import Runner
from .config import DraftConfig
from .costs import PolicyCosts, ViewCosts


class RoundHooks:
    """Shared by policies and views: each hook calls the same hook of the parts, and does nothing if there are none.

    The methods run in the order of their definition here, round after round: on the host between rounds, given the plan
    of the next one, or on the device inside them, where no decision may depend on values that the host would have to
    read.
    """

    wants_mass = False  # whether device_after_verify receives attention mass, summed over its `page` if it has one
    refresh_every = 0  # tokens that a row commits from one refresh to the next; 0: no refresh is needed

    @property
    def parts(self) -> tuple[RoundHooks, ...]:
        """The policies and views that it is made of."""
        return ()

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return sum(part.graphs for part in self.parts)

    def warm_up(self) -> None:
        """Compile the steps that run between rounds. A round over idle slots follows, which compiles the others.

        The contents of slots must not change.
        """
        for part in self.parts:
            part.warm_up()

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """On the host: a slot was prefilled with all of its prompt except the last token, which is pending."""
        for part in self.parts:
            part.host_admit(slot, prompt)

    def host_must_wait(self, plan: RoundPlan) -> bool:
        """On the host: True if host_before_round needs exact lengths, i.e. no round may be in flight (plan.ahead 0).

        It decides from plan.lengths, each of which may have grown by up to plan.ahead. It is called before every round;
        one that drafts then waits for the one in flight.
        """
        return any([part.host_must_wait(plan) for part in self.parts])  # call all: each may have to follow every round

    def host_before_round(self, state: BatchState, plan: RoundPlan) -> None:
        """On the host, before a round that drafts: decisions, and steps of its own that are not captured."""
        for part in self.parts:
            part.host_before_round(state, plan)

    def host_refreshes(self, plan: RoundPlan) -> list[int]:
        """On the host, after host_before_round: keys to have in view for each device_refresh that is needed now.

        From plan.lengths, each of which may have grown by up to plan.ahead: enough for all rows that may be due.
        """
        passes = itertools.zip_longest(*(part.host_refreshes(plan) for part in self.parts), fillvalue=0)
        return [max(n_keys) for n_keys in passes]  # one serves all parts

    def device_refresh(self, state: BatchState, n_keys: int) -> None:
        """On the device: refresh the selection of rows that are due; only the device knows which.

        n_keys: no row that may be due has more. A row's selection, and its time, must depend on that row alone.
        """
        for part in self.parts:
            part.device_refresh(state, n_keys)

    def device_after_verify(self, state: BatchState, mass: Tensor | None) -> None:
        """On the device, once the round is committed. mass fp32 [L, B, K, S // page]: attention to blocks of keys."""
        for part in self.parts:
            part.device_after_verify(state, mass)

    def host_free(self, slot: int) -> None:
        """On the host: the slot is free again."""
        for part in self.parts:
            part.host_free(slot)


class DraftPolicy(RoundHooks, PolicyCosts):
    """Proposes up to plan.gamma tokens per row; what it takes, as far as it is not the least, PolicyCosts says."""

    about = "nobody: plain decoding"  # who proposes, in a phrase
    reads = ""  # what that reads, in a phrase; of a view's name the view says it
    flags: tuple[str, ...] = ()  # the fields of DraftConfig that it uses besides gamma
    proposers: tuple[str, ...] = ()  # who may have proposed a token, see Draft.proposer
    arm = 0  # which of several policies drafts, see auto.py

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Any
    ) -> DraftPolicy:
        """The policy that a configuration describes; ValueError if it does not fit the models.

        draft_group: the ranks that hold the draft model together.
        """
        raise NotImplementedError

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """The views through which its models read caches, the target's or its own first."""
        return ()

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """On the device, before device_after_verify: draft for all rows; nothing committed is changed."""
        raise NotImplementedError

    def use(self, arm: int) -> DraftPolicy:
        """Let one of its arms draft from now on; returns it."""
        return self

    @property
    def now(self) -> DraftPolicy | None:
        """Which of its arms drafts now."""
        return self

    def n_steps(self, gamma: int) -> float:
        """The cost of drafting gamma tokens, counted in steps that take the same time; see GammaPlanner."""
        return gamma

    def kv_bytes(self, plan: RoundPlan) -> int:
        """Bytes of keys and values (or bounds of them) that drafting for all slots reads."""
        return 0

    def positions_read(self, pos: Tensor) -> Tensor:
        """The positions that a draft step with queries at pos [B] reads: bool [L, B, K, S]."""
        raise NotImplementedError


def wrong_with(draft: Draft, gamma: int, vocabulary: int, active: Tensor) -> str:
    """What no policy may propose, in a phrase; "" for a draft that may be judged. The host reads its values.

    active: bool [B], the rows that have a request. The ids of its tokens are in the vocabulary; a NaN in q is the
    model's. That each token was drawn from its q cannot be seen in one draft: scripts/verify.py tests it.
    """
    tokens, q, count = draft.tokens, draft.q, draft.count
    n_rows, width = tokens.shape
    if width > gamma or tokens.dtype != torch.int64:
        return f"tokens of shape {[*tokens.shape]} and {tokens.dtype}, not int64 [{n_rows}, at most {gamma}]"
    if count.shape != (n_rows,) or count.dtype != torch.int64 or (active & ((count < 0) | (count > width))).any():
        return f"counts {count.tolist()}, not int64 from 0 to {width} for each of {n_rows} rows"
    counted = active[:, None] & (torch.arange(width, device=tokens.device) < count[:, None])  # [B, width]
    if q is None:
        return ""
    if q.shape != (n_rows, width, vocabulary) or q.dtype != torch.float32:
        return f"q of shape {[*q.shape]} and {q.dtype}, not fp32 {[n_rows, width, vocabulary]}"
    sums, own = q.sum(-1)[counted], q.gather(-1, tokens[..., None])[..., 0][counted]
    if (far := sums[(sums - 1).abs() > 1e-3]).numel():
        return f"a q that sums to {float(far[0]):g}, not to 1"
    return "a token whose own q is 0, from which it cannot have been drawn" if (own <= 0).any() else ""


@runtime_checkable
class OwnPrefill(Protocol):
    """A policy that has to prefill prompts itself, in addition to the target."""

    def prepare(self, slot: int, prompt: Sequence[int]) -> list[Filling]:
        """Begin the prefill that host_admit needs: rounds may run between its chunks; host_admit is called last."""
        ...


class View(RoundHooks, ViewCosts):
    """Which committed entries of a runner's cache a query reads: at most `budget` in each layer and kv head."""

    about = ""  # what it reads, in a phrase
    flags: tuple[str, ...] = ("budget",)  # the fields of DraftConfig that it uses
    of_target = False  # whether it needs the target's verification to select
    compiles = False  # whether some of its steps on a CPU are compiled where all layers of others run in one call

    runner: Runner

    @classmethod
    def build(cls, config: DraftConfig, runner: Runner, max_new: int) -> View:
        """The view of a runner's cache. max_new: the most tokens that a round feeds beyond the committed ones."""
        raise NotImplementedError

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """(make, args): a step calls make(layers, span, *args, bodies=...); the tensors of args never move."""
        raise NotImplementedError

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """On the device, before a round's drafts: let the window slide to the committed end."""

    def entries_read(self, n_keys: int) -> int:
        """Cache entries per slot that a step attends to in one layer and kv head that has no window."""
        raise NotImplementedError

    def bytes_read(self, n_keys: int) -> int:
        """Bytes per slot that a step reads over all layers: what it attends to, and what it selects this by."""
        return self.runner.cache.bytes_read(self.entries_read(n_keys))

    def positions_read(self, pos: Tensor) -> Tensor:
        """The positions that queries at pos [B] read where layers have no windows: bool [L, B, K, S]."""
        raise NotImplementedError

    def positions_seen(self, pos: Tensor) -> Tensor:
        """Those of positions_read that the window of a layer, where it has one, lets its queries see."""
        read, layers = self.positions_read(pos), self.runner.cache.layers
        place = torch.arange(read.shape[3], device=pos.device)  # [S]
        return read & torch.stack([within(place, pos[:, None], layer.window) for layer in layers])[:, :, None]
