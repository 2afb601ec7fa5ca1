"""SnapKV: the draft reads the entries that the last tokens attended to most (Li et al. 2024, arXiv 2404.14469).

Selecting costs one pass of the model over the observation window, which is fed again: its keys are in the cache, only
its queries are not. Where a text goes on, the selection grows old, so it is renewed as the text grows.

Shapes: B slots, T tokens of the observation window, S positions in view, L layers, N query heads, K kv heads,
        G = N // K, H head dim, C listed entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.kernels import key_mass, prefill_attention_with_lse
from gpt_fast_sd.model import SPLIT, Transformer, attend_with_mass

from ..attending import on_cuda
from ..compiling import CompiledStep, span
from ..rows import Rows
from .base import Reader
from .sparse import SlotView

WINDOW = 32  # observation window, as in the paper
KERNEL = 5  # neighbours that a score is averaged over: a selection of stretches, not of lone tokens


@dataclass(frozen=True)
class ObservingKV:
    """Attend to all at or before each query, store nothing, and note what the queries of a kv head attend to.

    The tokens fed must be committed: their keys are in the cache, and not a bit of it changes.
    """

    k: Sequence[Tensor]  # L of [B, K, capacity, H]
    v: Sequence[Tensor]
    n_splits: int
    mass: list[Tensor] = field(default_factory=list)  # fp32 [B, K, S] a layer: attention, summed over G * T queries

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Attend: q [B, N, T, H]; k, v [B, K, T, H] (unused: the cache holds them); pos [B, T] -> [B, N, T, H]."""
        n_keys = self.n_splits * SPLIT
        if on_cuda(self.k[layer]):
            q, keys, out_dtype = q.to(self.k[layer].dtype), self.k[layer], q.dtype
            out, lse = prefill_attention_with_lse(q, keys, self.v[layer], pos, n_keys)
            self.mass.append(key_mass(q, keys, lse, pos, n_keys, page=1))
            return out.to(out_dtype)
        keys, values = (x[layer].narrow(2, 0, n_keys) for x in (self.k, self.v))
        out, mass = attend_with_mass(q.to(keys.dtype), keys, values, pos, page=1)
        self.mass.append(mass)
        return out.to(q.dtype)


def observe_step(
    model: Transformer, tokens: Tensor, pos: Tensor, k: list[Tensor], v: list[Tensor], in_view: Tensor
) -> Tensor:
    """What committed tokens [1, T] at pos [1, T] attend to, summed over the queries of each kv head: fp32 [L, K, S]."""
    kv = ObservingKV(k, v, in_view.shape[0])
    model.hidden(tokens, pos, kv)
    return torch.cat(kv.mass)


def best_entries(mass: Tensor, start: int, n: int) -> Tensor:
    """The n entries before start of most mass, averaged over their neighbours before start: [L, K, S] -> [L, K, n]."""
    pooled = F.avg_pool1d(mass[..., :start], KERNEL, stride=1, padding=KERNEL // 2)  # [L, K, start]
    return pooled.topk(n, -1).indices


class SnapKVView(SlotView):
    """The entries that the observation window attended to most, and all from the window on, until the tail is full.

    A row that fits into the budget is read whole and needs no selection; so every window is full of committed tokens.
    """

    def __init__(self, reader: Reader, *, budget: int, refresh: int, room: int, window: int = WINDOW) -> None:
        """refresh: committed tokens after which a row is selected anew; sooner where half of the budget is full."""
        tail = min(window + refresh, max(budget // 2, window + window // 4))
        assert window < tail < budget, "the budget has no room for the window"
        super().__init__(reader, n_listed=budget - tail, tail=tail, room=room)
        self.window = window
        self.start = [0] * reader.shape[1]  # tail_start at the last selection, on the host
        self._step = CompiledStep(observe_step, compiled=reader.compiled)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._step.graphs

    def warm_up(self) -> None:
        """Compile the pass over the window."""
        self.scores(0, torch.zeros(self.window, dtype=torch.int64, device=self.slots.device), self.window)

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Select for a prompt that does not fit into the budget."""
        super().admit(slot, prompt)
        committed = prompt[:-1]
        if len(committed) > self.budget:
            window = torch.tensor(list(committed[-self.window :]), device=self.slots.device)
            self.select(slot, window, len(committed))

    def due(self, rows: Rows) -> bool:
        """Whether some row's tail may be full."""
        return any(self._full(slot, length + rows.ahead) for slot, length in rows.lengths.items())

    def renew(self, rows: Rows) -> None:
        """Select anew for each row whose tail is full."""
        for slot, length in rows.lengths.items():
            if self._full(slot, length):
                self.select(slot, rows.history[slot, length - self.window : length], length)

    def _full(self, slot: int, length: int) -> bool:
        return length > self.budget and length - self.start[slot] > self.tail

    def vacate(self, slot: int) -> None:
        """Forget the slot's selection."""
        super().vacate(slot)
        self.start[slot] = 0

    def entries_read(self, n_keys: int) -> int:
        """The list and the tail, and a step's share of a selection, which reads all entries once."""
        selecting = n_keys // (self.tail - self.window) if n_keys > self.budget else 0
        return super().entries_read(n_keys) + selecting

    def select(self, slot: int, window: Tensor, length: int) -> None:
        """List what the window, the last T of `length` committed tokens, attends to most; the tail is the window."""
        start = length - self.window
        self.slots[:, slot] = best_entries(self.scores(slot, window, length), start, self.slots.shape[-1])
        self.tail_start[slot] = self.start[slot] = start

    def scores(self, slot: int, window: Tensor, length: int) -> Tensor:
        """Feed the last T of `length` committed tokens of a slot again -> fp32 [L, K, S], see observe_step."""
        cache = self.reader.cache
        pos = torch.arange(length - self.window, length, device=window.device)  # [T]
        out: Tensor = self._step(
            self.reader.model, window.clone()[None], pos[None], *cache.row(slot), span(cache, length)
        )
        return out
