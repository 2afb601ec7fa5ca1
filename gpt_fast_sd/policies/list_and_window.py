"""The form of access that sparse views share: a list of entries per kv head, and a window of recent positions.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window, M = C + W + max_new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, SPLIT

from ..kv import ListedKV
from ..state import BatchState, RoundPlan
from ..steps import Runner
from .config import DraftConfig
from .policy import View


def positions_of(kv_indices: Tensor, window_start: Tensor, window_width: int, pos: Tensor, n_positions: int) -> Tensor:
    """The positions that ListedKV reads at pos [B]: kv_indices [L, B, K, C], window_start [B] -> bool [L, B, K, S]."""
    place = torch.arange(n_positions, device=pos.device)  # [S]
    spare = torch.where(kv_indices >= 0, kv_indices, n_positions)  # an empty entry sets a spare place
    listed = torch.zeros(*kv_indices.shape[:3], n_positions + 1, dtype=torch.bool, device=pos.device)
    listed = listed.scatter(3, spare, True)[..., :-1]  # [L, B, K, S]
    start = window_start[:, None]  # [B, 1]
    in_window = (place >= start) & (place < start + window_width)  # [B, S]
    return (listed | in_window[:, None]) & (place <= pos[:, None])[:, None]


class ListAndWindowView(View):
    """C listed entries and a window of at most W: a refresh fills the list and shortens the window.

    ..xx..x...xx....[======>        x listed, = window

    After a selection the window begins where the list's range ends, and grows until it is W long; then it slides. What
    it leaves behind is listed while the list has room, so a row of at most C + W entries is read completely, selected
    or not. A list holds min(C, window_start) entries, then empty ones.
    """

    @classmethod
    def bytes_held(cls, config: DraftConfig, n_lists: int, kv_bytes: int) -> int:
        """One int64 per entry of the budget."""
        return n_lists * config.budget * 8

    page = 1  # listed entries come in runs of this many, each a page of the cache

    def __init__(self, runner: Runner, *, n_listed: int, window: int, max_new: int, first_window: int = 0) -> None:
        """max_new: the most tokens that a round feeds past the committed ones. first_window: where the first begins."""
        n_layers, n_slots, n_kv = runner.shape
        self.runner, self.window, self.window_width, self.first_window = runner, window, window + max_new, first_window
        self.budget = n_listed + window
        self.kv_indices = torch.full((n_layers, n_slots, n_kv, n_listed), -1, dtype=torch.int64, device=runner.device)
        self._by_layer = list(self.kv_indices.unbind())  # the same, layer by layer
        self.window_start = torch.full((n_slots,), first_window, dtype=torch.int64, device=runner.device)

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """ListedKV over the tensors that selections are written into."""
        return ListedKV, (self._by_layer, self.window_start, self.window_width, self.page)

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Reset the window to the first entries: the windows of idle slots slide too."""
        self.host_free(slot)

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Slide windows that would exceed W; the entries that they leave are listed while the list has room."""
        start = torch.maximum(self.window_start, state.seq_len - self.window)  # [B]
        if plan.any_drafted_within(self.budget):  # by then no list is left half full
            entry = torch.arange(self.kv_indices.shape[-1], device=start.device)  # [C]
            left = (entry >= self.window_start[:, None]) & (entry < start[:, None])  # [B, C]
            self.kv_indices.copy_(torch.where(left[:, None], entry, self.kv_indices))
        self.window_start.copy_(start)

    def host_free(self, slot: int) -> None:
        """Forget the slot's selection."""
        self.kv_indices[:, slot] = -1
        self.window_start[slot] = self.first_window

    def entries_read(self, n_keys: int) -> int:
        """The list and the window."""
        return self.kv_indices.shape[-1] + self.window_width

    def positions_read(self, pos: Tensor) -> Tensor:
        """Listed entries and the window, up to pos [B] -> bool [L, B, K, S]."""
        n_positions = self.runner.cache.capacity + SPLIT
        return positions_of(self.kv_indices, self.window_start, self.window_width, pos, n_positions)
