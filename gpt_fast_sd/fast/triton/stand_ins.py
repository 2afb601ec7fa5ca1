"""Operators whose bodies are Triton, in the places of the core's functions: on CUDA, and of cuts on a CPU, too.

Shapes: B batch rows, W of them, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim,
        V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from ... import sampling
from ...attention import asked_of
from ...sampling import SamplingTable
from ..cpu.stand_ins import DENSE, LAYER, LISTED, READ
from ..marks import stands_for
from ..ops import select
from ..ops.decode import decode_attention, decode_attention_with_mass, split_for
from ..ops.filters import likeliest
from ..ops.prefill import prefill_attention, prefill_attention_of_slots
from ..ops.sparse import sparse_attention

MOST_DECODED = 32  # query tokens that flash-decoding serves; more of them keep a device busy without splitting keys


@stands_for(*DENSE)
def dense(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, page: int = 0) -> tuple[Tensor, Tensor | None]:
    """attention.dense: q [B, N, T, H]; pos [B, T] -> [B, N, T, H], and with a page fp32 [B, K, n_keys // page]."""
    asked, split = (asked_of(layer, q), layer, pos, n_keys), split_for(layer.capacity, len(layer.k) * layer.k.shape[1])
    if page:
        out, mass = decode_attention_with_mass(*asked, split, page)
        return out.to(q.dtype), mass
    if q.shape[2] > MOST_DECODED:
        return prefill_attention(*asked).to(q.dtype), None
    # of the shape of the cache: no sum depends on other rows, nor, within tiles of one size, on the tokens fed
    return decode_attention(*asked, split).to(q.dtype), None


@stands_for("gpt_fast_sd.attention:dense_of_slots", f"{LAYER}.of_slots", f"{LAYER}._of", *DENSE[1:])
def dense_of_slots(q: Tensor, layer: CacheLayer, slots: Tensor, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """attention.dense_of_slots: q [W, N, T, H]; slots [W]; pos [W, T] -> [W, N, T, H], fp32 [W, K, n_keys]."""
    out, mass = prefill_attention_of_slots(asked_of(layer, q), layer, slots, pos, n_keys)
    return out.to(q.dtype), mass


@stands_for(*LISTED)
def listed(
    q: Tensor,
    layer: CacheLayer,
    kv_indices: Tensor,
    window_start: Tensor,
    window_width: int,
    pos: Tensor,
    page: int = 1,
) -> Tensor:
    """attention.listed: q [B, N, T, H]; kv_indices [B, K, C]; window_start [B]; pos [B, T] -> [B, N, T, H]."""
    where = kv_indices, window_start, window_width, pos, layer.capacity, page
    out: Tensor = sparse_attention(asked_of(layer, q), layer, *where)
    return out.to(q.dtype)


@stands_for("gpt_fast_sd.policies.selection:top_pages")
def top_pages(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    """selection.top_pages: fp32 scores [..., P], n_valid -> int64 [..., n]."""
    out: Tensor = select.top_pages(scores, n_valid, n)
    return out


@stands_for("gpt_fast_sd.policies.selection:guided_select")
def guided_select(mass: Tensor, kv_indices: Tensor, due: Tensor, first_window_page: Tensor, page: int) -> None:
    """selection.guided_select: mass [L, B, K, P], kv_indices [L, B, K, C], due, first_window_page [B]."""
    select.guided_select(mass, kv_indices, due, first_window_page, page)


@stands_for("gpt_fast_sd.policies.selection:page_bounds", f"{LAYER}.buffers", READ)
def page_bounds(layer: CacheLayer, bounds: Tensor, first: Tensor, n_pages: int, page: int) -> None:
    """selection.page_bounds: bounds [B, K, S // page, 2H], first [B]."""
    select.page_bounds(layer, bounds, first, n_pages, page)


@stands_for("gpt_fast_sd.policies.selection:quest_pages")
def quest_pages(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    """selection.quest_pages: q [B, N, T, H], bounds [B, K, P, 2H], n_closed [B] -> int64 [B, K, n]."""
    out: Tensor = select.quest_pages(q, bounds, n_closed, n)
    return out


@stands_for("gpt_fast_sd.sampling:likeliest")
def probabilities(logits: Tensor, table: SamplingTable, *, filtered: bool = True) -> Tensor:
    """sampling.probabilities as it is written, with cuts found by the operator `likeliest`."""
    return sampling.probabilities(logits, table, filtered=filtered, cuts=likeliest)
