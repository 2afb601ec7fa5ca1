"""SnapKV: the draft reads the entries that the last tokens attended to most (Li et al. 2024, arXiv 2404.14469).

Selecting costs one pass of the model over the observation window, which is fed again: its keys are in the cache, only
its queries are not. As a text grows its selection becomes stale, so it is refreshed. In between no place of the budget
is idle: a token that leaves the window takes that of the selected entry that mattered least.

The device decides which rows are due, by their own lengths alone, and the observation windows of several are fed as
one batch, so that the weights are read once for them. The host only has to know when some row may be due.

Shapes: B slots, W of them that are observed together, T tokens of the observation window, S positions in view,
        L layers, N query heads, K kv heads, G = N // K, H head dim, C listed entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import SPLIT, CacheLayer, Transformer

from ..bodies import CORE, Bodies, Body
from ..fast.devices import traits_of
from ..state import BatchState, RoundPlan
from ..steps import Runner, size_carrier
from . import selection
from .config import DraftConfig
from .list_and_window import ListAndWindowView
from .selection import top_pages

OBSERVED = 32  # observation window, as in the paper
REFRESH = 64  # tokens from one selection to the next
KERNEL = 5  # neighbours that a score is averaged over, to select stretches rather than single tokens: answers whole


@dataclass(frozen=True)
class ObservingKV:
    """Attend to all at or before each query, store nothing, and list what the queries of a kv head attend to most.

    The tokens fed must be committed: their keys are in the cache, which does not change.
    """

    layers: Sequence[CacheLayer]
    n_splits_carrier: Tensor  # [n_splits, 0]; queries at or past the view belong to no row
    slots: Tensor  # int64 [W], whose observation windows are fed: all different
    n_listed: int
    listed: list[Tensor] = field(default_factory=list)  # int64 [W, K, C] per layer; no layer's mass is kept
    bodies: Bodies = field(default=CORE, kw_only=True)
    select: Body = field(default=top_pages, kw_only=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Attend: q [W, N, T, H]; k, v [W, K, T, H] (unused: the cache holds them); pos [W, T] -> [W, N, T, H]."""
        n_keys = self.n_splits_carrier.shape[0] * SPLIT
        out: Tensor
        out, mass = self.bodies.dense_of_slots(q, self.layers[layer], self.slots, pos, n_keys)
        first = torch.where(pos[:, 0] < n_keys, pos[:, 0], 0)  # [W]
        self.listed.append(best_entries(mass, first, self.n_listed, self.select))
        return out


def observe_step(
    model: Transformer,
    tokens: Tensor,
    pos: Tensor,
    slots: Tensor,
    layers: list[CacheLayer],
    n_splits_carrier: Tensor,
    n_listed: int,
    bodies: Bodies = CORE,
    select: Body = top_pages,
) -> Tensor:
    """The entries that committed tokens [W, T] at pos [W, T] of slots [W] attend to most before them: [L, W, K, C].

    int64, the best first. The list of an observation window at or past all keys in view is meaningless.
    """
    kv = ObservingKV(layers, n_splits_carrier, slots, n_listed, bodies=bodies, select=select)
    bodies.hidden(model, tokens, pos, kv)
    return torch.stack(kv.listed)


def best_entries(mass: Tensor, end: Tensor, n: int, select: Body = top_pages) -> Tensor:
    """The n entries before end [W] with the most mass, averaged over neighbours before end: [W, K, S] -> [W, K, n].

    The best first; in no order if there are fewer, then with -1. Ties go to the first: the size of
    the view, which depends on other rows, has no influence.
    """
    place = torch.arange(mass.shape[-1], device=mass.device)  # [S]
    valid = (place < end[:, None])[:, None]  # [W, 1, S]
    # zeros, as beyond the first entry: they count in the averages at both ends
    pooled = F.avg_pool1d(torch.where(valid, mass, 0.0), KERNEL, stride=1, padding=KERNEL // 2)  # [W, K, S]
    best: Tensor = select(pooled, end[:, None], n)  # by place
    order = pooled.gather(-1, best.clamp(min=0)).sort(dim=-1, descending=True, stable=True).indices
    return best.gather(-1, order)


def end_with(kv_indices: Tensor, since: Tensor, until: Tensor, room: Tensor) -> Tensor:
    """Lists [L, B, K, C] that end with the latest positions from since [B] to until [B], at most room [B] of them."""
    behind = torch.arange(kv_indices.shape[-1] - 1, -1, -1, device=since.device)  # [C], places from the end
    last = (until - since - 1)[:, None]  # [B, 1]
    age = last - (last - behind) % room[:, None]  # [B, C], each place is taken again after as many as there is room for
    taken = (age >= 0) & (behind < room[:, None])
    return torch.where(taken[:, None], (since[:, None] + age)[:, None], kv_indices)


def _until_next(budget: int, refresh: int, n_observed: int) -> int:
    """Tokens until the next selection: with those observed they are about half of the budget at most."""
    return min(refresh, max(budget // 2 - n_observed, n_observed // 4))


class SnapKVView(ListAndWindowView):
    """The entries that the observation window attended to most, and all from it on.

    A window as long as that slides; what it leaves is listed in place of what had the least mass, so that all of the
    budget is always read. A row that fits into it is read whole and needs no selection; so all observed tokens are
    committed ones. If a row is selected for only once, later tokens take places of earlier ones of these.
    """

    about = "what the latest tokens attended to most when it last looked, and a window"
    flags = ("budget", "refresh")
    n_observed, compiles = OBSERVED, True

    @classmethod
    def build(cls, config: DraftConfig, runner: Runner, max_new: int) -> SnapKVView:
        """64 tokens, or what the configuration says."""
        once, refresh = config.selects_once, config.refresh_or(REFRESH)
        return cls(runner, budget=config.budget, refresh=refresh, max_new=max_new, once=once)

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """Twice the observation window."""
        return 2 * OBSERVED

    @classmethod
    def refresh_period(cls, config: DraftConfig) -> int:
        """What the configuration says, within what the budget allows."""
        return 0 if config.selects_once else _until_next(config.budget, config.refresh_or(REFRESH), OBSERVED)

    def __init__(
        self, runner: Runner, *, budget: int, refresh: int, max_new: int, n_observed: int = OBSERVED, once: bool = False
    ) -> None:
        """refresh: committed tokens after which a selection is refreshed; sooner if half of the budget is new ones.

        once: at most these tokens take places in the list, and the first selection is never refreshed.
        """
        self.room = _until_next(budget, refresh, n_observed)
        assert 0 < self.room < budget - n_observed, "the budget has no room for what is observed"
        super().__init__(runner, n_listed=budget - n_observed, window=n_observed, max_new=max_new)
        n_slots = runner.shape[1]
        self.n_observed, self.refresh_every, self.once = n_observed, 0 if once else self.room, once
        self.observed_at = torch.zeros_like(self.window_start)  # [B] where the last observation began; 0: no selection
        self.together = min(n_slots, traits_of(runner.device).windows)  # W
        # where each slot's last observation began, as far as the host knows: at least, and at most
        self._bounds = [(0, 0)] * n_slots
        self._asked: dict[int, tuple[int, int]] = {}  # slots of the last request to the device, and bounds of lengths
        self._asked_in = 0  # the round of that request
        self._step = runner.step(observe_step, ObservingKV)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._step.graphs

    def host_must_wait(self, plan: RoundPlan) -> bool:
        """Never: the device decides which rows are due. The host learns here what it decided in the round before."""
        self._learn(plan)
        return False

    def host_free(self, slot: int) -> None:
        """Forget the slot's selection."""
        super().host_free(slot)
        self.observed_at[slot] = 0
        self._bounds[slot] = 0, 0
        self._asked.pop(slot, None)

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Slide all windows; what they left since the last selection is listed in place of the worst, or of nothing."""
        self.window_start.copy_((state.seq_len - self.window).clamp(min=0))
        room = torch.where(self.observed_at > 0, self.room, self.kv_indices.shape[-1])  # [B]
        self.kv_indices.copy_(end_with(self.kv_indices, self.observed_at, self.window_start, room))

    def bytes_read(self, n_keys: int) -> int:
        """And a step's share of a selection, which reads all entries that a layer sees."""
        selects, reads = n_keys > self.budget and not self.once, traits_of(self.runner.device).window_reads
        found = super().bytes_read(n_keys)
        for layer in self.runner.cache.layers if selects else ():
            shared = min(n_keys, layer.window or n_keys) // self.refresh_every
            found += int(shared * reads) * layer.bytes_per_entry
        return found

    def host_refreshes(self, plan: RoundPlan) -> list[int]:
        """One pass per W rows that may be due; while a round is in flight some passes may find fewer, or none."""
        self._learn(plan)
        spans = {slot: (length, length + plan.ahead) for slot, length in sorted(plan.lengths.items())}
        self._asked = {slot: span for slot, span in spans.items() if self._full(span[1], self._bounds[slot][0])}
        self._asked_in = plan.number
        longest = [high for _, high in self._asked.values()]
        passes = [longest[i : i + self.together] for i in range(0, len(longest), self.together)]
        # which rows a pass finds is certain if all that were requested are due
        certain = plan.ahead == 0 and all(low == high for low, high in map(self._bounds.__getitem__, self._asked))
        return [max(some if certain else longest) for some in passes]

    def device_refresh(self, state: BatchState, n_keys: int) -> None:
        """Select for the first W of the rows that are due, by the observation windows at their ends.

        The list holds what an observation window attends to most before it.
        """
        capacity = self.runner.cache.capacity
        grown = state.seq_len - self.window - self.observed_at > self.room  # [B]
        due = state.active & (state.seq_len > self.budget) & ((self.observed_at == 0) if self.once else grown)  # [B]
        slots = due.logical_not().long().argsort(stable=True)[: self.together]  # [W]
        chosen = due[slots]  # [W]
        # the others query from past everything that can be in view, so no keys are read for them
        start = torch.where(chosen, state.seq_len[slots] - self.n_observed, capacity)  # [W]
        pos = start[:, None] + torch.arange(self.n_observed, device=start.device)  # [W, T]
        listed = self._observe(state.history[slots[:, None], pos], pos, slots, n_keys)  # [L, W, K, C]
        self.kv_indices.index_copy_(1, slots, torch.where(chosen[:, None, None], listed, self.kv_indices[:, slots]))
        self.observed_at.index_copy_(0, slots, torch.where(chosen, start, self.observed_at[slots]))

    def _observe(self, tokens: Tensor, pos: Tensor, slots: Tensor, n_keys: int) -> Tensor:
        """See observe_step: tokens, pos [W, T], slots [W] -> int64 [L, W, K, C]."""
        cache = self.runner.cache
        n_splits_carrier = size_carrier(cache, n_keys, compiled=self._step.compiles)
        bodies = self.runner.bodies_of(ObservingKV)
        how = self.kv_indices.shape[-1], bodies, bodies.of(selection.top_pages)
        out: Tensor = self._step(self.runner.model, tokens, pos, slots, cache.layers, n_splits_carrier, *how)
        return out

    def _full(self, length: int, start: int) -> bool:
        """Whether the device finds a row due that was observed from start on; 0: it may not have been selected for."""
        return length > self.budget and (not start if self.once else length - self.window - start > self.room)

    def _learn(self, plan: RoundPlan) -> None:
        """Work out what the device decided for the requested slots.

        If the round of the request is still in flight, the device used lengths that the host knows by now. Otherwise it
        used lengths within the bounds known at the time, which are equal if no round was in flight.
        """
        known = plan.ahead > 0 and plan.number == self._asked_in + 1
        for slot, (shortest, longest) in self._asked.items():
            if known and slot in plan.lengths:
                shortest = longest = plan.lengths[slot]
            low, high = self._bounds[slot]
            if self._full(shortest, low if self.once else high):
                self._bounds[slot] = shortest - self.n_observed, longest - self.n_observed
            elif self._full(longest, low):
                self._bounds[slot] = low, longest - self.n_observed
        self._asked = {}
