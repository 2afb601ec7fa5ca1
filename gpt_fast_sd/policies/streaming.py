"""Sink tokens and a sliding window, at their true positions (after StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

import torch

from ..state import BatchState, RoundPlan
from ..steps import Runner
from .config import DraftConfig
from .list_and_window import ListAndWindowView


class StreamingView(ListAndWindowView):
    """The first n_sink entries and the last budget - n_sink; the window slides with every committed token."""

    about = "its first tokens and a sliding window"
    flags = ("budget", "n_sink")

    @classmethod
    def build(cls, config: DraftConfig, runner: Runner, max_new: int) -> StreamingView:
        """Sinks and window of a budget."""
        return cls(runner, budget=config.budget, n_sink=config.n_sink, max_new=max_new)

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """The sinks and a few tokens."""
        return config.n_sink + 8

    def __init__(self, runner: Runner, *, budget: int, n_sink: int, max_new: int) -> None:
        super().__init__(runner, n_listed=n_sink, window=budget - n_sink, max_new=max_new, first_window=n_sink)
        self.kv_indices.copy_(torch.arange(n_sink, device=runner.device).expand_as(self.kv_indices))

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Move the window to end with the committed tokens: forwards or, after rejected drafts, backwards."""
        self.window_start.copy_((state.seq_len - self.window).clamp(min=self.first_window))

    def host_free(self, slot: int) -> None:
        """The sinks are the same for every row."""
        self.window_start[slot] = self.first_window
