"""Which entries of the cache a draft reads: bounds of keys, scores of pages, and the best of them. The truth.

torch.topk breaks ties arbitrarily, these do not: equal scores give equal drafts.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, H head dim,
        R = G * T query rows that share one kv head, P pages in view, n pages chosen, C listed entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

NAN_RANK, NO_RANK = -(1 << 62), -(1 << 63)  # below all numbers; below these
SIGN = 0x7FFFFFFF


def entries_of(pages: Tensor, page: int) -> Tensor:
    """The entries of pages [..., n], -1 for those of page -1 -> int64 [..., n * page]."""
    entries = pages[..., None] * page + torch.arange(page, device=pages.device)  # [..., n, page]
    return torch.where(pages[..., None] >= 0, entries, -1).flatten(-2)


def top_pages(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    """The n best of the first n_valid scores of each row, ascending by place, then -1 if there are fewer.

    Ties go to the first; a NaN is worse than any number. Any P will do, single entries as well as pages.
    fp32 scores [..., P], contiguous, at most four dims; n_valid int64, broadcast to [...] -> int64 [..., n]
    """
    n_scores = scores.shape[-1]
    place = torch.arange(n_scores, device=scores.device)  # [P]
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)  # zeros of both signs are equal
    # bits of non-negative numbers are ordered like the numbers, those of negative ones in reverse; place comes second
    rank = (torch.where(bits < 0, bits ^ SIGN, bits).long() << 30) - place  # [..., P]
    rank = torch.where(scores.isnan(), NAN_RANK - place, rank)
    rank = torch.where(place < n_valid[..., None], rank, NO_RANK)
    best, chosen = F.pad(rank, (0, n), value=NO_RANK).topk(n, -1)  # never fewer than n
    chosen = torch.where(best > NO_RANK, chosen, n_scores).sort(-1).values
    return torch.where(chosen < n_scores, chosen, -1)


def guided_select(mass: Tensor, kv_indices: Tensor, due: Tensor, first_window_page: Tensor, page: int) -> None:
    """For rows that are due, list the C // page pages of most mass before first_window_page, entry by entry.

    fp32 mass [L, B, K, P], contiguous; kv_indices int64 [L, B, K, C], contiguous; due bool [B]; first_window_page
    int64 [B]
    """
    listed = entries_of(top_pages(mass, first_window_page[:, None], kv_indices.shape[-1] // page), page)
    listed = F.pad(listed, (0, kv_indices.shape[-1] - listed.shape[-1]), value=-1)  # [L, B, K, C]
    kv_indices.copy_(torch.where(due[:, None, None], listed, kv_indices))


def page_bounds(layer: CacheLayer, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    """Write the largest and the smallest key of each dimension for n_pages pages from page first on.

    Pages past the last one are the last one. The bounds of a page with a NaN are unspecified. Those of quantized keys
    are bf16, see `bounds_of`; where they lie in planes, they are those of the whole keys.
    bounds [B, K, S // page, 2H], the last two dims dense; first int64 [B]
    """
    row = torch.arange(first.shape[0], device=first.device)[:, None]  # [B, 1]
    pages = (first[:, None] + torch.arange(n_pages, device=first.device)).clamp(max=bounds.shape[2] - 1)  # [B, n]
    parts = [x.unflatten(2, (-1, page))[row, :, pages] for x in layer.buffers[::2]]  # [B, n, K, page, ...] each
    bounds[row, :, pages] = bounds_of(*layer.format.read(parts))  # [B, n, K, 2H]


def bounds_of(keys: Tensor, scales: Tensor | None = None) -> Tensor:
    """The largest and the smallest of each dimension: keys [..., page, H], scales [..., page] -> [..., 2H].

    Of int8 keys with their scales as bf16, each rounded and then moved outward by one step, so that it is a bound.
    """
    if scales is None:
        return torch.cat([keys.amax(-2), keys.amin(-2)], -1)
    meant = keys.float() * scales.float()[..., None]  # [..., page, H], exact
    high, low = meant.amax(-2).bfloat16(), meant.amin(-2).bfloat16()
    infinity = torch.full_like(high, float("inf"))
    return torch.cat([high.nextafter(infinity), low.nextafter(-infinity)], -1)


def page_scores(q: Tensor, bounds: Tensor) -> Tensor:
    """Upper bound of a query's product with any key of a page: q [B, N, T, H]; bounds [B, K, P, 2H] -> [B, K, R, P].

    fp32. In each dimension the product with the largest or the smallest key counts, by the query's sign.
    """
    rows = q.unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)  # [B, K, R, H]
    signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], -1)  # [B, K, R, 2H]
    return (signed @ bounds.transpose(-1, -2)).float()


def quest_pages(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    """The n pages, of the first n_closed, that may matter most to the queries, ascending, then -1.

    No key of a page has a larger product with a query than the corner of the page's box on the query's side. A page
    counts as its best query row sees it, and a row's scores count by how far they are below its own best: softmax
    depends on nothing else, while plain sums or maxima would let the largest query dominate. Ties go to the lower page.
    q [B, N, T, H], last stride 1; bounds [B, K, P, 2H], last two dims dense; n_closed int64 [B] -> int64 [B, K, n]
    """
    scores = page_scores(q, bounds)
    closed = (torch.arange(scores.shape[-1], device=q.device) < n_closed[:, None])[:, None, None]  # [B, 1, 1, P]
    scores = torch.where(closed, scores, float("-inf"))  # the rest may be NaN
    short = (scores - scores.amax(-1, keepdim=True)).amax(2)  # [B, K, P], 0 is best
    return top_pages(short, n_closed[:, None], n)
