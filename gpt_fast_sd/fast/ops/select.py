"""Which pages of the cache a draft reads: selection.py as operators of CUDA, with bodies in Triton (triton/select.py).

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, H head dim,
        P pages in view, n pages chosen, C listed entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from .layer import flat, layer_of


@torch.library.custom_op("gpt_fast_sd::top_pages", mutates_args=(), device_types="cuda")
def top_pages(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    """selection.top_pages: fp32 scores [..., P], contiguous, at most four dims; n_valid [...] -> int64 [..., n]."""
    from ..triton import select as select_triton

    return select_triton.top_pages(scores, n_valid, n)


@torch.library.custom_op("gpt_fast_sd::guided_select", mutates_args=("kv_indices",), device_types="cuda")
def guided_select(mass: Tensor, kv_indices: Tensor, due: Tensor, first_window_page: Tensor, page: int) -> None:
    """selection.guided_select: mass [L, B, K, P], kv_indices [L, B, K, C], contiguous; due, first_window_page [B]."""
    from ..triton import select as select_triton

    select_triton.guided_select(mass, kv_indices, due, first_window_page, page)


def page_bounds(layer: CacheLayer, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    """selection.page_bounds: bounds [B, K, S // page, 2H], the last two dims dense; first [B]."""
    _page_bounds(*flat(layer), bounds, first, n_pages, page)


@torch.library.custom_op("gpt_fast_sd::page_bounds", mutates_args=("bounds",), device_types="cuda")
def _page_bounds(
    buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, bounds: Tensor, first: Tensor, n_pages: int,
    page: int,
) -> None:  # fmt: skip
    from ..triton import select as select_triton

    select_triton.page_bounds(layer_of(buffers, form, tail, fine, window), bounds, first, n_pages, page)


@torch.library.custom_op("gpt_fast_sd::quest_pages", mutates_args=(), device_types="cuda")
def quest_pages(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    """selection.quest_pages: q [B, N, T, H], last stride 1; bounds [B, K, P, 2H]; n_closed [B] -> int64 [B, K, n]."""
    from ..triton import select as select_triton

    return select_triton.quest_pages(q, bounds, n_closed, n)


@top_pages.register_fake
def _top_pages_fake(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], n), dtype=torch.int64)


@guided_select.register_fake
@_page_bounds.register_fake
def _gives_nothing(*_: object) -> None:
    return None


@quest_pages.register_fake
def _quest_pages_fake(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    return n_closed.new_empty(*bounds.shape[:2], n)
