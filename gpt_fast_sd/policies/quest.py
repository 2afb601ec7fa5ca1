"""Quest: each draft step reads the pages that may matter most to its query (Tang et al. 2024, arXiv 2406.10774).

The keys of a page lie in a box, and no key in a box has a larger product with a query than the box's best corner. The
corners of all pages are 1 / page of the cache, so looking at all of them is cheap.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K, H head dim,
        R = G * T query rows that share one kv head, P pages in view, n pages read, M = n * page + the window's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, SPLIT, CacheLayer

from ..bodies import CORE, Bodies, Body
from ..state import BatchState, RoundPlan
from ..steps import Runner
from . import selection
from .config import DraftConfig
from .list_and_window import positions_of
from .policy import View
from .selection import entries_of, quest_pages


@dataclass(frozen=True)
class QuestKV:
    """Store, choose pages that are closed (all below window_start), attend to them and to [window_start, pos]."""

    layers: Sequence[CacheLayer]
    n_splits_carrier: Tensor  # [n_splits, 0]
    bounds: Sequence[Tensor]  # L of [B, K, S // page, 2H], the largest and the smallest key of each dimension
    chosen: Sequence[Tensor]  # L of int64 [B, K, n], the pages read last
    window_start: Tensor  # int64 [B], a multiple of page
    window_width: int  # positions from window_start that may be read
    page: int
    choose: Body = quest_pages
    bodies: Bodies = field(default=CORE, kw_only=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        self.layers[layer].store(pos, k, v)
        n_pages, chosen = self.n_splits_carrier.shape[0] * (SPLIT // self.page), self.chosen[layer]
        bounds = self.bounds[layer].narrow(2, 0, n_pages)  # [B, K, P, 2H]
        chosen.copy_(self.choose(q.to(bounds.dtype), bounds, self.window_start // self.page, chosen.shape[-1]))
        window = self.window_start, self.window_width
        which = entries_of(chosen, self.page)
        out: Tensor = self.bodies.listed(q, self.layers[layer], which, *window, pos, self.page)
        return out


class QuestView(View):
    """The pages with the best bounds for a query, chosen again at each step and layer, and a window of recent entries.

    The window begins at the edge of a page, so that all pages before it are full and their keys final.
    """

    about = "for each token the pages of its cache that may matter most to it, and a window"
    flags = ("budget", "page")
    compiles = True

    @classmethod
    def build(cls, config: DraftConfig, runner: Runner, max_new: int) -> QuestView:
        """Pages and window of a budget."""
        return cls(runner, budget=config.budget, page=config.page, max_new=max_new)

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """A page, and two of the window."""
        return 3 * config.page

    @classmethod
    def bytes_held(cls, config: DraftConfig, n_lists: int, kv_bytes: int) -> int:
        """Two bounds per page, together as large as one unquantized entry; and the pages that were chosen."""
        return kv_bytes // config.page + n_lists * config.budget // config.page * 8

    @classmethod
    def bounds_read(cls, config: DraftConfig, n_keys: int) -> int:
        """Those of all pages."""
        return n_keys // config.page

    def __init__(self, runner: Runner, *, budget: int, page: int, max_new: int) -> None:
        """max_new: the most tokens that a round feeds beyond the committed ones."""
        n_pages = max(1, (budget - 2 * page) // page)
        self.runner, self.page, self.window = runner, page, budget - n_pages * page
        self.window_width = self.window + max_new
        _, n_slots, n_kv = runner.shape
        keys, head_dim = [layer.k for layer in runner.cache.layers], runner.cache.layers[0].head_dim
        dtype = torch.bfloat16 if runner.cache.format.scaled else runner.cache.format.dtype
        self.bounds = [k.new_zeros(n_slots, n_kv, k.shape[2] // page, 2 * head_dim, dtype=dtype) for k in keys]
        self.chosen = [k.new_full((n_slots, n_kv, n_pages), -1, dtype=torch.int64) for k in keys]
        self.window_start = torch.zeros(n_slots, dtype=torch.int64, device=runner.device)
        self._stride = -(-max_new // page)  # pages that a round may close

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """QuestKV over bounds and window; it records the pages that it chose."""
        choose = self.runner.bodies.of(selection.quest_pages)
        return QuestKV, (self.bounds, self.chosen, self.window_start, self.window_width, self.page, choose)

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Compute the bounds of all pages of the slot."""
        for layer, bounds in zip(self.runner.cache.slot(slot), self.bounds, strict=True):
            own, first = bounds[slot : slot + 1], self.window_start.new_zeros(1)  # [1, K, S // page, 2H], [1]
            self.runner.bodies.of(selection.page_bounds)(layer, own, first, own.shape[2], self.page)
        self.window_start[slot] = self._closed(len(prompt) - 1) * self.page

    def host_must_wait(self, plan: RoundPlan) -> bool:
        """Whether rounds passed that drafted nothing: more pages may be closed than device_before_draft covers."""
        return not plan.follows_a_draft

    def host_before_round(self, state: BatchState, plan: RoundPlan) -> None:
        """Compute the bounds of all pages that rows have closed, except those that device_before_draft covers."""
        closed = (self._closed(n) - self._closed(plan.drafted_at[slot]) for slot, n in plan.lengths.items())
        for done in range(self._stride, max(closed, default=0), self._stride):
            self._bound(self.window_start // self.page + done)

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Compute the bounds of the pages that the last round may have closed, and slide the window by whole pages.

        Bounds of a page that is not full yet are computed again before any query reads them.
        """
        self._bound(self.window_start // self.page)
        over = (state.seq_len - self.window).clamp(min=0)  # [B]
        self.window_start.copy_((over + self.page - 1) // self.page * self.page)

    def host_free(self, slot: int) -> None:
        """Forget the slot's pages."""
        self.window_start[slot] = 0
        for chosen in self.chosen:
            chosen[slot] = -1

    def entries_read(self, n_keys: int) -> int:
        """Chosen pages, and the window."""
        return self.chosen[0].shape[-1] * self.page + self.window_width

    def bytes_read(self, n_keys: int) -> int:
        """And the bounds of all pages in view."""
        in_view = self.runner.cache.splits(n_keys) * SPLIT // self.page
        return super().bytes_read(n_keys) + sum(each[0, :, :in_view].nbytes for each in self.bounds)

    def positions_read(self, pos: Tensor) -> Tensor:
        """The pages chosen last, and the window, up to pos [B] -> bool [L, B, K, S]."""
        kv_indices = entries_of(torch.stack(self.chosen), self.page)  # [L, B, K, n * page]
        return positions_of(kv_indices, self.window_start, self.window_width, pos, self.runner.cache.capacity + SPLIT)

    def _closed(self, length: int) -> int:
        """Pages of a row of that length before its window."""
        return -(-max(0, length - self.window) // self.page)

    def _bound(self, first: Tensor) -> None:
        for layer, bounds in zip(self.runner.cache.layers, self.bounds, strict=True):
            self.runner.bodies.of(selection.page_bounds)(layer, bounds, first, self._stride, self.page)
