"""The access form that sparse views share: a list of slots a kv head, and a tail of recent positions.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the tail, M = C + W + room for the tokens of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, SPLIT

from ..attending import ListedKV
from ..config import DraftConfig
from ..reader import Reader
from ..rows import RoundPlan, Rows
from .base import View


def positions_of(slots: Tensor, tail_start: Tensor, tail_width: int, pos: Tensor, n_positions: int) -> Tensor:
    """What ListedKV reads for queries at pos [B]: slots [L, B, K, C], tail_start [B] -> bool [L, B, K, S]."""
    place = torch.arange(n_positions, device=pos.device)  # [S]
    spare = torch.where(slots >= 0, slots, n_positions)  # an empty entry sets a place of its own
    listed = torch.zeros(*slots.shape[:3], n_positions + 1, dtype=torch.bool, device=pos.device)
    listed = listed.scatter(3, spare, True)[..., :-1]  # [L, B, K, S]
    start = tail_start[:, None]  # [B, 1]
    in_tail = (place >= start) & (place < start + tail_width)  # [B, S]
    return (listed | in_tail[:, None]) & (place <= pos[:, None])[:, None]


class SlotView(View):
    """C listed entries and a tail of at most W; selecting anew fills the list and shortens the tail.

    Between two selections the tail begins where the last one left off, so nothing falls between list and tail, until it
    is W long; from then on it slides. What it leaves behind then is listed while the list has room, so that a row of no
    more than C + W entries is read whole, selected or not. A list holds min(C, tail_start) entries, then empty ones.
    """

    @classmethod
    def bytes_held(cls, config: DraftConfig, n_lists: int, kv_bytes: int) -> int:
        """An int64 for each entry of the budget."""
        return n_lists * config.budget * 8

    run = 1  # listed entries come in runs of so many, each a page of the cache

    def __init__(self, reader: Reader, *, n_listed: int, tail: int, room: int, first_tail: int = 0) -> None:
        """room: the most tokens a round feeds beyond the committed ones. first_tail: no tail begins before it."""
        n_layers, n_slots, n_kv = reader.shape
        self.reader, self.tail, self.tail_width, self.first_tail = reader, tail, tail + room, first_tail
        self.budget = n_listed + tail
        self.slots = torch.full((n_layers, n_slots, n_kv, n_listed), -1, dtype=torch.int64, device=reader.device)
        self._slots = list(self.slots.unbind())  # the same, layer by layer
        self.tail_start = torch.full((n_slots,), first_tail, dtype=torch.int64, device=reader.device)

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """ListedKV over the tensors that selections are written into."""
        return ListedKV, (self._slots, self.tail_start, self.tail_width, self.run)

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Begin with a tail from the first entries on: the tails of idle slots slide too."""
        self.host_free(slot)

    def device_before_draft(self, rows: Rows, plan: RoundPlan) -> None:
        """Slide the tail where it would be longer than W; what it leaves behind is listed while the list has room."""
        start = torch.maximum(self.tail_start, rows.seq_len - self.tail)  # [B]
        if plan.any_within(self.budget):
            entry = torch.arange(self.slots.shape[-1], device=start.device)  # [C]
            left = (entry >= self.tail_start[:, None]) & (entry < start[:, None])  # [B, C]
            self.slots.copy_(torch.where(left[:, None], entry, self.slots))
        self.tail_start.copy_(start)

    def host_free(self, slot: int) -> None:
        """Forget the slot's selection."""
        self.slots[:, slot] = -1
        self.tail_start[slot] = self.first_tail

    def entries_read(self, n_keys: int) -> int:
        """The list and the tail."""
        return self.slots.shape[-1] + self.tail_width

    def positions_read(self, pos: Tensor) -> Tensor:
        """Listed entries and the tail, as far as they are at or before pos [B] -> bool [L, B, K, S]."""
        n_positions = self.reader.cache.capacity + SPLIT
        return positions_of(self.slots, self.tail_start, self.tail_width, pos, n_positions)
