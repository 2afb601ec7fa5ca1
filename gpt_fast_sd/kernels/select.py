"""Which pages of the cache a draft reads: bounds of keys, scores of pages, and the best of them.

Each op has three bodies: the PyTorch reference below, which a CPU runs; on CUDA Triton (select_triton.py); a fake.
torch.topk on CUDA breaks ties as it likes, these ops do not: the same scores give the same draft.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, H head dim,
        R = G * T query rows that share one kv head, P pages in view, n pages chosen, C listed entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("gpt_fast_sd::top_pages", mutates_args=())
def top_pages(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    """The n best of the first n_valid scores of each row, ascending by place, then -1 where there are fewer.

    Of equal scores the first wins; a NaN is worse than any number. Any P will do, single entries as well as pages.
    fp32 scores [..., P], contiguous, at most four dims; n_valid int64, broadcast to [...] -> int64 [..., n]
    """
    n_scores = scores.shape[-1]
    valid = torch.arange(n_scores, device=scores.device) < n_valid[..., None]  # [..., P]
    kind = torch.where(valid, scores.isnan().long(), 2).expand_as(scores)  # a number, a NaN, nothing
    place = torch.where(kind == 0, scores, float("-inf")).argsort(stable=True, dim=-1, descending=True)
    place = place.gather(-1, kind.gather(-1, place).argsort(stable=True, dim=-1))[..., :n]  # the best, then the lower
    place = torch.where(kind.gather(-1, place) < 2, place, n_scores).sort(-1).values
    return F.pad(torch.where(place < n_scores, place, -1), (0, n - place.shape[-1]), value=-1)


@torch.library.custom_op("gpt_fast_sd::guided_select", mutates_args=("slots",))
def guided_select(mass: Tensor, slots: Tensor, due: Tensor, first_tail_page: Tensor, page: int) -> None:
    """For rows that are due list the C // page pages of most mass before first_tail_page, entry by entry.

    fp32 mass [L, B, K, P], contiguous; slots int64 [L, B, K, C], contiguous; due bool [B]; first_tail_page int64 [B]
    """
    pages = top_pages(mass, first_tail_page[:, None], slots.shape[-1] // page)  # [L, B, K, n]
    entries = pages[..., None] * page + torch.arange(page, device=pages.device)  # [L, B, K, n, page]
    listed = torch.where(pages[..., None] >= 0, entries, -1).flatten(-2)
    listed = F.pad(listed, (0, slots.shape[-1] - listed.shape[-1]), value=-1)  # [L, B, K, C]
    slots.copy_(torch.where(due[:, None, None], listed, slots))


@torch.library.custom_op("gpt_fast_sd::page_bounds", mutates_args=("bounds",))
def page_bounds(k: Tensor, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    """Write the largest and the smallest key of each dimension for n_pages pages from page first on.

    Pages past the last one are the last one. What the bounds of a page mean that holds a NaN is not said.
    k [B, K, S, H], bounds [B, K, S // page, 2H], of both the last two dims dense; first int64 [B]
    """
    row = torch.arange(first.shape[0], device=first.device)[:, None]  # [B, 1]
    pages = (first[:, None] + torch.arange(n_pages, device=first.device)).clamp(max=bounds.shape[2] - 1)  # [B, n]
    entries = pages[..., None] * page + torch.arange(page, device=first.device)  # [B, n, page]
    in_pages = k[row[..., None], :, entries]  # [B, n, page, K, H]
    bounds[row, :, pages] = torch.cat([in_pages.amax(2), in_pages.amin(2)], -1)  # [B, n, K, 2H]


@torch.library.custom_op("gpt_fast_sd::quest_pages", mutates_args=())
def quest_pages(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    """The n pages, of the first n_closed, that may matter most to the queries, ascending, then -1.

    No key of a page has a larger product with a query than the corner of the page's box on the query's side. A page is
    as good as it is to the query row that it is best for, and a row's scores count by how far they fall short of its
    own best. Of equal pages the lower wins.
    q [B, N, T, H], last stride 1; bounds [B, K, P, 2H], last two dims dense; n_closed int64 [B] -> int64 [B, K, n]
    """
    rows = q.unflatten(1, (bounds.shape[1], -1)).flatten(2, 3).float()  # [B, K, R, H]
    signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], -1)  # [B, K, R, 2H]
    closed = (torch.arange(bounds.shape[2], device=q.device) < n_closed[:, None])[:, None]  # [B, 1, P]
    read = torch.where(closed[..., None], bounds.float(), 0.0)  # the rest may be a NaN
    scores = torch.where(closed[:, :, None], signed @ read.transpose(-1, -2), float("-inf"))  # [B, K, R, P]
    short = (scores - scores.amax(-1, keepdim=True)).amax(2)  # [B, K, P], 0 is best
    pages: Tensor = top_pages(short, n_closed[:, None], n)
    return pages


@top_pages.register_kernel("cuda")
def _top_pages_cuda(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    from . import select_triton

    return select_triton.top_pages(scores, n_valid, n)


@guided_select.register_kernel("cuda")
def _guided_select_cuda(mass: Tensor, slots: Tensor, due: Tensor, first_tail_page: Tensor, page: int) -> None:
    from . import select_triton

    select_triton.guided_select(mass, slots, due, first_tail_page, page)


@page_bounds.register_kernel("cuda")
def _page_bounds_cuda(k: Tensor, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    from . import select_triton

    select_triton.page_bounds(k, bounds, first, n_pages, page)


@quest_pages.register_kernel("cuda")
def _quest_pages_cuda(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    from . import select_triton

    return select_triton.quest_pages(q, bounds, n_closed, n)


@top_pages.register_fake
def _top_pages_fake(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], n), dtype=torch.int64)


@guided_select.register_fake
def _guided_select_fake(mass: Tensor, slots: Tensor, due: Tensor, first_tail_page: Tensor, page: int) -> None:
    return None


@page_bounds.register_fake
def _page_bounds_fake(k: Tensor, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    return None


@quest_pages.register_fake
def _quest_pages_fake(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    return n_closed.new_empty(*bounds.shape[:2], n)
