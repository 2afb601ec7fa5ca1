"""Quest: each draft step reads the pages that may matter most to its query (Tang et al. 2024, arXiv 2406.10774).

The keys of a page lie in a box, and no key in a box has a larger product with a query than the box's best corner. The
corners of all pages are 1 / page of the cache, so looking at all of them is cheap.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K, H head dim,
        R = G * T query rows that share one kv head, P pages in view, n pages read, M = n * page + the tail's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.kernels import page_bounds, quest_pages, sparse_attention
from gpt_fast_sd.model import KV, SPLIT, store

from ..attending import on_cuda
from ..compiling import CompiledStep
from ..config import DraftConfig
from ..reader import Reader
from ..rows import RoundPlan, Rows
from .base import View
from .sparse import attend_at, entries_of, positions_of

LEAST = torch.finfo(torch.float32).min


def page_scores(q: Tensor, bounds: Tensor) -> Tensor:
    """No key of a page has a larger product with a query: q [B, N, T, H]; bounds [B, K, P, 2H] -> fp32 [B, K, R, P].

    Of each dimension the product with the largest or the smallest key counts, by the query's sign.
    """
    rows = q.unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)  # [B, K, R, H]
    signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], -1)  # [B, K, R, 2H]
    return (signed @ bounds.transpose(-1, -2)).float()


def best_pages(scores: Tensor, n_closed: Tensor, n: int) -> Tensor:
    """The n best of the first n_closed [B] pages: scores [B, K, R, P] -> int64 [B, K, n], -1 where there are fewer.

    A page is as good as it is to the query row that it is best for, and a row's scores count by how far they fall short
    of its own best: softmax knows no more of them, while plain sums or maxima would let the largest query rule.
    """
    closed = (torch.arange(scores.shape[-1], device=scores.device) < n_closed[:, None])[:, None]  # [B, 1, P]
    scores = torch.where(closed[:, :, None], scores, LEAST)
    short = (scores - scores.amax(-1, keepdim=True)).amax(2)  # [B, K, P], 0 is best
    short = F.pad(torch.where(closed, short, float("-inf")), (0, n), value=float("-inf"))  # never fewer than n
    best, page = short.topk(n, -1)
    return torch.where(best > float("-inf"), page, -1)


@dataclass(frozen=True)
class QuestKV:
    """Store, choose pages that are closed (all below tail_start), attend to them and to [tail_start, pos]."""

    k: Sequence[Tensor]  # L of [B, K, S, H]
    v: Sequence[Tensor]
    n_splits: int
    bounds: Sequence[Tensor]  # L of [B, K, S // page, 2H], the largest and the smallest key of each dimension
    chosen: Sequence[Tensor]  # L of int64 [B, K, n], the pages read last
    tail_start: Tensor  # int64 [B], a multiple of page
    tail_width: int  # positions from tail_start that may be read
    page: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        keys, values, chosen = self.k[layer], self.v[layer], self.chosen[layer]
        store(keys, pos, k)
        store(values, pos, v)
        in_view = self.bounds[layer].narrow(2, 0, self.n_splits * (SPLIT // self.page))  # [B, K, P, 2H]
        q, out_dtype, n_closed = q.to(keys.dtype), q.dtype, self.tail_start // self.page
        if on_cuda(keys):
            chosen.copy_(quest_pages(q, in_view, n_closed, chosen.shape[-1]))
            listed, n_keys = entries_of(chosen, self.page), keys.shape[2] - SPLIT
            out: Tensor = sparse_attention(
                q, keys, values, listed, self.tail_start, self.tail_width, pos, n_keys, self.page
            )
            return out.to(out_dtype)
        pages = best_pages(page_scores(q, in_view), n_closed, chosen.shape[-1])  # [B, K, n]
        chosen.copy_(pages)
        tail = self.tail_start[:, None] + torch.arange(self.tail_width, device=pos.device)  # [B, W]
        index = torch.cat([entries_of(pages, self.page), tail[:, None].expand(-1, keys.shape[1], -1)], -1)  # [B, K, M]
        return attend_at(q, keys, values, index, pos).to(out_dtype)


def quest_kv(k: Sequence[Tensor], v: Sequence[Tensor], in_view: Tensor, *rest: Any) -> KV:
    """QuestKV for a compiled step."""
    return QuestKV(k, v, in_view.shape[0], *rest)


def bound_step(keys: Tensor, bounds: Tensor, first: Tensor, n: int, page: int) -> None:
    """Write a layer's bounds of n pages from page first [B] on: keys [B, K, S, H]; bounds [B, K, S // page, 2H]."""
    if on_cuda(first):
        page_bounds(keys, bounds, first, n, page)
        return
    row = torch.arange(first.shape[0], device=first.device)[:, None]  # [B, 1]
    pages = (first[:, None] + torch.arange(n, device=first.device)).clamp(max=bounds.shape[2] - 1)  # [B, n]
    in_pages = keys[row, :, entries_of(pages, page)].unflatten(1, (n, page))  # [B, n, page, K, H]
    bounds[row, :, pages] = torch.cat([in_pages.amax(2), in_pages.amin(2)], -1)  # [B, n, K, 2H]


class QuestView(View):
    """The pages whose bounds promise a query most, chosen anew at each step and layer, and a tail of recent entries.

    The tail begins at the edge of a page, so that all pages before it are full and their keys final.
    """

    about = "for each token the pages of its cache that may matter most to it, and a window"
    flags = ("budget", "page")

    @classmethod
    def build(cls, config: DraftConfig, reader: Reader, room: int) -> QuestView:
        """Pages and tail of a budget."""
        return cls(reader, budget=config.budget, page=config.page, room=room)

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """A page, and two of the tail."""
        return 3 * config.page

    @classmethod
    def bytes_held(cls, config: DraftConfig, n_lists: int, kv_bytes: int) -> int:
        """Two bounds a page, as large as one of its entries; and the pages that were chosen."""
        return kv_bytes // config.page + n_lists * config.budget // config.page * 8

    def __init__(self, reader: Reader, *, budget: int, page: int, room: int) -> None:
        """room: the most tokens a round feeds beyond the committed ones."""
        n_pages = max(1, (budget - 2 * page) // page)
        self.reader, self.page, self.tail = reader, page, budget - n_pages * page
        self.tail_width = self.tail + room
        _, n_slots, n_kv = reader.shape
        self.bounds = [k.new_zeros(n_slots, n_kv, k.shape[2] // page, 2 * k.shape[3]) for k in reader.cache.k]
        self.chosen = [k.new_full((n_slots, n_kv, n_pages), -1, dtype=torch.int64) for k in reader.cache.k]
        self.tail_start = torch.zeros(n_slots, dtype=torch.int64, device=reader.device)
        self._stride = -(-room // page)  # pages that a round may close
        self._step = CompiledStep(bound_step, compiled=None if on_cuda(self.tail_start) else reader.compiled)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._step.graphs

    def kv(self) -> tuple[Callable[..., KV], tuple[Any, ...]]:
        """QuestKV over bounds and tail; it notes which pages it chose."""
        return quest_kv, (self.bounds, self.chosen, self.tail_start, self.tail_width, self.page)

    def warm_up(self) -> None:
        """Compile the step that keeps up bounds."""
        self._bound(torch.zeros_like(self.tail_start))

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Take the bounds of all pages of the slot."""
        for keys, bound in zip(self.reader.cache.k, self.bounds, strict=True):
            pages = keys[slot].unflatten(1, (-1, self.page))  # [K, S // page, page, H]
            bound[slot] = torch.cat([pages.amax(2), pages.amin(2)], -1)
        self.tail_start[slot] = self._closed(len(prompt) - 1) * self.page

    def host_must_wait(self, plan: RoundPlan) -> bool:
        """Whether rounds passed that drafted nothing: more pages may be closed than device_before_draft looks at."""
        return not plan.follows_a_draft

    def host_before_round(self, rows: Rows, plan: RoundPlan) -> None:
        """Take the bounds of all pages that rows have closed, but for those that device_before_draft looks at."""
        closed = (self._closed(n) - self._closed(plan.drafted_at[slot]) for slot, n in plan.lengths.items())
        for done in range(self._stride, max(closed, default=0), self._stride):
            self._bound(self.tail_start // self.page + done)

    def device_before_draft(self, rows: Rows, plan: RoundPlan) -> None:
        """Take the bounds of the pages that the last round may have closed, and let the tail slide by whole pages.

        Bounds of a page that is not full yet are taken again before any query reads them.
        """
        self._bound(self.tail_start // self.page)
        over = (rows.seq_len - self.tail).clamp(min=0)  # [B]
        self.tail_start.copy_((over + self.page - 1) // self.page * self.page)

    def host_free(self, slot: int) -> None:
        """Forget the slot's pages."""
        self.tail_start[slot] = 0
        for chosen in self.chosen:
            chosen[slot] = -1

    def entries_read(self, n_keys: int) -> int:
        """Chosen pages, the tail, and the bounds of all pages in view: one page's are as large as one entry."""
        in_view = self.reader.cache.splits(n_keys) * SPLIT // self.page
        return self.chosen[0].shape[-1] * self.page + self.tail_width + in_view

    def positions_read(self, pos: Tensor) -> Tensor:
        """The pages chosen last, and the tail, as far as they are at or before pos [B] -> bool [L, B, K, S]."""
        slots = entries_of(torch.stack(self.chosen), self.page)  # [L, B, K, n * page]
        return positions_of(slots, self.tail_start, self.tail_width, pos, self.reader.cache.k[0].shape[2])

    def _closed(self, length: int) -> int:
        """Pages of a row of that length before its tail."""
        return -(-max(0, length - self.tail) // self.page)

    def _bound(self, first: Tensor) -> None:
        for keys, bounds in zip(self.reader.cache.k, self.bounds, strict=True):
            self._step(keys, bounds, first, self._stride, self.page)
