"""Sink tokens and a sliding window, at their true positions (after StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

import torch

from ..config import DraftConfig
from ..reader import Reader
from ..rows import RoundPlan, Rows
from .sparse import SlotView


class StreamingView(SlotView):
    """The first n_sink entries and the last budget - n_sink; the window slides with every committed token."""

    about = "its first tokens and a sliding window"
    flags = ("budget", "n_sink")

    @classmethod
    def build(cls, config: DraftConfig, reader: Reader, room: int) -> StreamingView:
        """Sinks and window of a budget."""
        return cls(reader, budget=config.budget, n_sink=config.n_sink, room=room)

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """The sinks and a few tokens."""
        return config.n_sink + 8

    def __init__(self, reader: Reader, *, budget: int, n_sink: int, room: int) -> None:
        super().__init__(reader, n_listed=n_sink, tail=budget - n_sink, room=room, first_tail=n_sink)
        self.slots.copy_(torch.arange(n_sink, device=reader.device).expand_as(self.slots))

    def device_before_draft(self, rows: Rows, plan: RoundPlan) -> None:
        """Let the window end with the committed tokens, forwards or, after tokens that were only drafted, backwards."""
        self.tail_start.copy_((rows.seq_len - self.tail).clamp(min=self.first_tail))

    def host_free(self, slot: int) -> None:
        """The sinks are the same for every row."""
        self.tail_start[slot] = self.first_tail
