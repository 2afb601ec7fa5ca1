"""Attention to a layer of the cache: to all of it, or to listed entries and a window. These functions are the truth.

Keys and values of int8 stay the numbers that are stored: scores take the scales of keys along, weights those of values.
Values in view must be finite, as they have a weight that is an exact zero for queries that do not see them.

Shapes: B batch rows, W of them, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head
        dim, R = G * T query rows that share one kv head, C listed entries, M entries that are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast_sd.model import SPLIT, CacheLayer, Entries

QUERY_BLOCK = 128  # query tokens scored at once: bounds the scores of a long chunk to G * 128 * M per kv head
LEAST = -1e30  # a finite maximum for a query that sees nothing: its weights are zeros, not NaN


def dense(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, page: int = 0) -> tuple[Tensor, Tensor | None]:
    """Attend to those of a layer's first n_keys entries that each query sees; a query past them all gives 0.

    q [B, N, T, H]; pos [B, T] -> [B, N, T, H], and with a page the attention mass that each block of page keys
    received: fp32 [B, K, n_keys // page]
    """
    asked = asked_of(layer, q)
    entries = layer.first(n_keys, pos, asked.dtype)
    if page:
        out, mass = attend_with_mass(asked, entries, visible(pos, n_keys, layer.window))
        return out.to(q.dtype), page_sums(mass, page)
    if q.shape[2] <= QUERY_BLOCK:  # no loop, so that T may be a size that varies
        return attend(asked, entries, visible(pos, n_keys, layer.window)).to(q.dtype), None
    wide = entries._replace(k=entries.k.to(asked.dtype), v=entries.v.to(asked.dtype))  # once for all blocks
    blocks = zip(asked.split(QUERY_BLOCK, 2), pos.split(QUERY_BLOCK, 1), strict=True)
    parts = [attend(some, wide, visible(at, n_keys, layer.window)) for some, at in blocks]
    return torch.cat(parts, 2).to(q.dtype), None


def dense_of_slots(q: Tensor, layer: CacheLayer, slots: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """dense for some of the slots, and the attention mass of every key.

    q [W, N, T, H]; slots int64 [W], all different; pos [W, T] -> [W, N, T, H], fp32 [W, K, n_keys]
    """
    asked = asked_of(layer, q)
    entries = layer.of_slots(slots, n_keys).first(n_keys, pos, asked.dtype)
    out, mass = attend_with_mass(asked, entries, visible(pos, n_keys, layer.window))
    return out.to(q.dtype), mass


def listed(
    q: Tensor, layer: CacheLayer, kv_indices: Tensor, window_start: Tensor, window_width: int, pos: Tensor,
    page: int = 1,
) -> Tensor:  # fmt: skip
    """Attend to listed entries of a layer and to window_width from window_start on, those that each query sees.

    q [B, N, T, H]; kv_indices int64 [B, K, C] below window_start, -1 is empty, in runs of whole pages;
    window_start int64 [B]; pos [B, T] -> [B, N, T, H]
    """
    asked, (index, limit) = asked_of(layer, q), entries_listed(layer, kv_indices, window_start, window_width, pos)
    seen = (index[:, :, None] >= 0) & within(index[:, :, None], limit[:, None, :, None], layer.window)  # [B, K, T, M]
    place = index.clamp(0, layer.k.shape[2] - 1)  # [B, K, M]
    return attend(asked, layer.at(place, limit, asked.dtype), seen).to(q.dtype)


def entries_listed(
    layer: CacheLayer, kv_indices: Tensor, window_start: Tensor, window_width: int, pos: Tensor
) -> tuple[Tensor, Tensor]:
    """What listed reads, and how far each query sees: int64 [B, K, M], -1 is empty, and int64 [B, T]."""
    below = torch.where(kv_indices < window_start[:, None, None], kv_indices, -1)  # [B, K, C]
    window = window_start[:, None] + torch.arange(window_width, device=pos.device)  # [B, W]
    index = torch.cat([below, window[:, None].expand(-1, kv_indices.shape[1], -1)], -1)  # [B, K, M]
    return index, torch.where(pos < layer.capacity, pos, -1)


def asked_of(layer: CacheLayer, q: Tensor) -> Tensor:
    """Queries [B, N, T, H] in the dtype that a layer is asked in: its own, or their own where it has scales."""
    return q if layer.format.scaled else q.to(layer.k.dtype)


def attend(q: Tensor, entries: Entries, seen: Tensor) -> Tensor:
    """Softmax attention: q [B, N, T, H]; M entries; seen bool [B, 1 or K, T, M] -> [B, N, T, H]"""
    weights, total = softmax_weights(q, entries, seen)
    return mixed(weights, total, entries, q.dtype)


def attend_with_mass(q: Tensor, entries: Entries, seen: Tensor) -> tuple[Tensor, Tensor]:
    """attend, and the attention that each entry received from all R queries of a kv head: fp32 [B, K, M]."""
    weights, total = softmax_weights(q, entries, seen)
    return mixed(weights, total, entries, q.dtype), (weights / total[..., None]).sum((2, 3))


def softmax_weights(q: Tensor, entries: Entries, seen: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - best) of each query, and their sum: fp32 [B, K, G, T, M], [B, K, G, T]; zeros where none is seen."""
    rows = q.unflatten(1, (entries.k.shape[1], -1)).flatten(2, 3)  # [B, K, R, H]
    scale: Tensor | float = q.shape[-1] ** -0.5
    if entries.k_scale is not None:
        scale = entries.k_scale[:, :, None].float() * scale  # [B, K, 1, M]
    scores = (rows @ entries.k.to(q.dtype).transpose(-1, -2)).float() * scale  # [B, K, R, M]
    scores = torch.where(seen[:, :, None], scores.unflatten(2, (-1, q.shape[2])), float("-inf"))  # [B, K, G, T, M]
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=LEAST)).exp()
    # whole splits are summed first: one sum over all keys compiles to slow code
    parts = weights.unflatten(-1, (-1, SPLIT)).sum(-1) if weights.shape[-1] % SPLIT == 0 else weights
    return weights, parts.sum(-1).clamp(min=1.0)  # the best one's weight is 1


def mixed(weights: Tensor, total: Tensor, entries: Entries, dtype: torch.dtype) -> Tensor:
    """The mean of values by weight: [B, K, G, T, M], [B, K, G, T] -> [B, N, T, H] of that dtype."""
    shares = weights.flatten(2, 3)  # [B, K, R, M]
    if entries.v_scale is not None:  # what nobody reads weighs nothing, whatever its scale
        shares = torch.where(shares > 0, shares * entries.v_scale[:, :, None].float(), 0.0)
    out = (shares.to(dtype) @ entries.v.to(dtype)).unflatten(2, (-1, weights.shape[3]))  # [B, K, G, T, H]
    mean: Tensor = (out / total[..., None].to(out.dtype)).flatten(1, 2)
    return mean


def visible(pos: Tensor, n_keys: int, window: int = 0) -> Tensor:
    """Which of n_keys keys each query sees, none if it is at or past n_keys: [B, T] -> [B, 1, T, n_keys]."""
    limit = torch.where(pos < n_keys, pos, -1)[:, None, :, None]  # [B, 1, T, 1]
    return within(torch.arange(n_keys, device=pos.device), limit, window)


def within(place: Tensor, limit: Tensor, window: int) -> Tensor:
    """Which places a query at limit sees: those at or before it, with a window the last so many of these."""
    return (place <= limit) & (place > limit - window) if window else place <= limit


def page_sums(mass: Tensor, page: int) -> Tensor:
    """Sums over whole pages: [B, K, n_keys] -> [B, K, n_keys // page]."""
    n_pages = mass.shape[-1] // page
    sums: Tensor = mass.narrow(-1, 0, n_pages * page).unflatten(-1, (n_pages, page)).sum(-1)
    return sums
