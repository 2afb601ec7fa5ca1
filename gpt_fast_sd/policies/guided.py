"""Verification-guided: the draft reads the blocks of keys that the last verification attended to most.

After PillarAttn (SparseSpec, arXiv 2512.01278) and Vegas (arXiv 2602.07223): verification computes these weights, so
selecting costs no pass over the cache. Here the mass of all queries of a kv head is summed by blocks.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, H head dim, P blocks of
        `page` keys in view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import MOST
from ..state import BatchState
from ..steps import Runner
from . import selection
from .config import DraftConfig
from .list_and_window import ListAndWindowView

ROOM = 64  # tokens for which a window has room where a selection stays


class GuidedView(ListAndWindowView):
    """The blocks with the most mass, and a window that begins at a block's edge; each verification selects again.

    If a row is selected for only once, that is when it is first longer than the budget: its full window slides.

    Before a slot's first verification it reads the first entries and the window. All queries of a verification count,
    also those of rejected drafts: which these are is known only after the mass has been summed.
    """

    about = "the pages that the last verification attended to most, and a window"
    flags = ("budget", "page", "refresh")
    of_target = wants_mass = True

    @classmethod
    def build(cls, config: DraftConfig, runner: Runner, max_new: int) -> GuidedView:
        """1, a new selection by every verification, or what the configuration says."""
        once, refresh = config.selects_once, config.refresh_or(ROOM if config.selects_once else 1)
        return cls(runner, budget=config.budget, page=config.page, refresh=refresh, max_new=max_new, once=once)

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """A page, and two of the window."""
        return 3 * config.page

    def __init__(
        self, runner: Runner, *, budget: int, page: int, refresh: int, max_new: int, once: bool = False
    ) -> None:
        """refresh: committed tokens after which a row's selection is refreshed; sooner if its window is full.

        once: the window has room for these tokens, and the first selection is never refreshed.
        """
        growth = min(refresh, budget // 4)  # tokens for which the window has room until the next selection
        n_blocks = max(1, (budget - 2 * page - growth) // page)
        super().__init__(runner, n_listed=n_blocks * page, window=budget - n_blocks * page, max_new=max_new)
        self.page = page
        self.apart, self.once = MOST if once else refresh, once
        self.growth = min(growth, self.window - 2 * page)  # so that more than a block is left of the window
        self.selected_at = torch.full_like(self.window_start, -self.apart)  # [B] seq_len at the last selection

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """List what precedes the window while it fits: all of a short prompt, the beginning of a long one."""
        super().host_admit(slot, prompt)
        start = self._start(torch.tensor(len(prompt) - 1, device=self.kv_indices.device))
        entry = torch.arange(self.kv_indices.shape[-1], device=self.kv_indices.device)
        self.kv_indices[:, slot] = torch.where(entry < start, entry, -1)
        self.window_start[slot] = start

    def host_free(self, slot: int) -> None:
        """Forget the slot's selection."""
        super().host_free(slot)
        self.selected_at[slot] = -self.apart

    def device_after_verify(self, state: BatchState, mass: Tensor | None) -> None:
        """Select by mass [L, B, K, P] for each row that has grown by `refresh` tokens since, or has a full window.

        Selected once, for each that outgrew the budget and never was: before, it is read whole.
        """
        if mass is None:
            return
        grown, full = state.seq_len - self.selected_at, state.seq_len - self.window_start  # [B]
        due = grown >= self.apart  # [B]
        due = due & (state.seq_len > self.budget) if self.once else due | (full > self.window)
        start = self._start(state.seq_len)  # [B]
        self.runner.bodies.of(selection.guided_select)(mass, self.kv_indices, due, start // self.page, self.page)
        self.window_start.copy_(torch.where(due, start, self.window_start))
        self.selected_at.copy_(torch.where(due, state.seq_len, self.selected_at))

    def _start(self, length: Tensor) -> Tensor:
        """Where the window of a row of that length begins at a selection: at a block's edge, with room to grow.

        A row that fits the budget needs no room: list and window must be adjacent.
        """
        aligned = (length + self.growth - self.window + self.page - 1).clamp(min=0) // self.page * self.page
        return torch.where(length <= self.budget, aligned.clamp(max=self.kv_indices.shape[-1]), aligned)
