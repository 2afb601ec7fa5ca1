"""The slow, obvious reference of every operator that attends, selects or multiplies on CUDA: in tests its CPU body.

On a CPU the package never calls the operators themselves. Here each gets its reference as a body, two of selection what
the core has, so that torch can check them, and so that a CPU can work as CUDA does, see `as_on_cuda`.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K,
        H head dim, R = G * T, P pages, n pages chosen, C listed entries, W entries of the window, M = C + W.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.fast.ops import choice, decode, int4_tiles, int8, prefill, select, sparse
from gpt_fast_sd.fast.ops.layer import layer_of as unflat
from gpt_fast_sd.model import FORMATS, CacheLayer
from gpt_fast_sd.policies import selection


def as_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU attend, select and multiply with CUDA's operators, whose bodies are the references."""
    patch.setattr(choice, "TRITON", choice.TRITON | {"cpu"})


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output [B, N, T, H], weights [B, K, G, T, M] and lse [B, N, T] over entries k, v [B, K, M, H], in q's dtype.

    seen: which entries a query reads, bool [B, K or 1, T, M]; of one that reads none all is 0, and its lse is -inf.
    """
    scores = torch.einsum("bkgth,bkmh->bkgtm", q.unflatten(1, (k.shape[1], -1)), k.to(q.dtype)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    lse = scores.logsumexp(-1)  # [B, K, G, T]
    weights = torch.where(seen[:, :, None], (scores - lse[..., None]).exp(), 0.0)  # [B, K, G, T, M]
    values = torch.where(seen.any(2)[..., None], v.to(q.dtype), 0.0)  # unread entries may be NaN
    out = torch.einsum("bkgtm,bkmh->btkgh", weights, values).flatten(2, 3)  # [B, T, N, H]
    return out.transpose(1, 2), weights, lse.flatten(1, 2)


def seen_by(pos: Tensor, n_keys: int, window: int = 0) -> Tensor:
    """Which of n_keys entries queries at pos [B, T] read; those past all of them none: bool [B, 1, T, n_keys]."""
    behind = pos[..., None] - torch.arange(n_keys)
    return ((behind >= 0) & (behind < (window or n_keys)) & (pos < n_keys)[..., None])[:, None]


# ---- attention ------------------------------------------------------------------------------------------------------


def layer_of(
    k: Tensor, v: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None, k_low: Tensor | None = None,
    v_low: Tensor | None = None, tail: int = 0, fine: bool = False, window: int = 0,
) -> CacheLayer:  # fmt: skip
    """A layer of these buffers, in the format that they show."""
    bare = {form.dtype: form for form in FORMATS.values() if not form.scaled}
    form = bare[k.dtype] if k_scale is None else FORMATS["int8" if k_low is None else "planes"]
    return CacheLayer(form, k, v, k_scale, v_scale, k_low, v_low, tail=tail, fine=fine, window=window)


def decode_attention(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int) -> Tensor:
    return dense(q, layer, pos, n_keys)[0]


def decode_attention_with_mass(
    q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, split: int, page: int
) -> tuple[Tensor, Tensor]:
    out, weights, _ = dense(q, layer, pos, n_keys)
    return out, page_sums(weights, page)


def prefill_attention(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> Tensor:
    return dense(q, layer, pos, n_keys)[0]


def prefill_attention_with_lse(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    out, _, lse = dense(q, layer, pos, n_keys)
    return out, lse


def dense(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The output in q's dtype, fp32 weights [B, K, G, T, n_keys], fp32 lse [B, N, T]."""
    k, v = (x[:, :, :n_keys] for x in meant_by(layer, pos))
    out, weights, lse = attention(q.float(), k, v, seen_by(pos, n_keys, layer.window))
    return out.to(q.dtype), weights, lse


def meant_by(layer: CacheLayer, pos: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What its keys and values stand for, as queries at pos read them; see `meant`."""
    read = pos, layer.tail
    return meant(layer.k, layer.k_scale, layer.k_low, *read), meant(layer.v, layer.v_scale, layer.v_low, *read)


def meant(
    x: Tensor, scale: Tensor | None, low: Tensor | None = None, pos: Tensor | None = None, tail: int = 0
) -> Tensor:
    """What keys or values [B, K, S, H] stand for; of int8 ones fp32, which is exact.

    low: the other plane, where x is one; with a tail as drafts with queries at pos [B, T] read them.
    """
    if low is not None:
        first, last = 16 * (x % 16).float(), 16 * (x // 16).float()  # [B, K, S, H // 2], what upper nibbles stand for
        rest, rests = (low % 16).float(), (low // 16).float()
        if tail:
            assert pos is not None
            whole = (torch.arange(x.shape[2]) > pos[:, :1] - tail)[:, None, :, None]  # [B, 1, S, 1]
            rest, rests = torch.where(whole, rest, 7.5), torch.where(whole, rests, 7.5)
        x = torch.cat([first + rest - 128, last + rests - 128], -1)  # [B, K, S, H]
    return x if scale is None else x.float() * scale.float()[..., None]


def key_mass(q: Tensor, layer: CacheLayer, lse: Tensor, pos: Tensor, n_keys: int, page: int) -> Tensor:
    _, weights, own = dense(q, layer, pos, n_keys)
    scaled = (own - lse).nan_to_num(0.0).exp().unflatten(1, (layer.k.shape[1], -1))  # [B, K, G, T]
    return page_sums(weights * scaled[..., None], page)


def page_sums(weights: Tensor, page: int) -> Tensor:
    """Sums of the weights of all queries over whole pages: [B, K, G, T, n_keys] -> [B, K, n_keys // page]."""
    n_pages = weights.shape[-1] // page
    return weights.sum((2, 3))[..., : n_pages * page].unflatten(-1, (n_pages, page)).sum(-1)


def sparse_attention(
    q: Tensor, layer: CacheLayer, kv_indices: Tensor, window_start: Tensor, window_width: int, pos: Tensor, n_keys: int,
    page: int,
) -> Tensor:  # fmt: skip
    """The first entry of a run of `page` decides."""
    k, v = meant_by(layer, pos)
    window = window_start[:, None] + torch.arange(window_width)  # [B, W]
    first = kv_indices[..., ::page, None].long()  # [B, K, C // page, 1]
    listed = torch.where(first >= 0, first + torch.arange(page), -1).flatten(2)  # [B, K, C]
    listed = torch.where(listed < window_start[:, None, None], listed, -1)
    index = torch.cat([listed, window[:, None].expand(-1, k.shape[1], -1)], -1)  # [B, K, M]
    limit = torch.where(pos < n_keys, pos, -1)  # [B, T]
    behind = limit[:, None, :, None] - index[:, :, None]
    seen = (index[:, :, None] >= 0) & (behind >= 0) & (behind < (layer.window or n_keys))  # [B, K, T, M]
    where = index.clamp(0, k.shape[2] - 1)[..., None].expand(-1, -1, -1, k.shape[3])  # [B, K, M, H]
    out, _, _ = attention(q.float(), *(x.gather(2, where) for x in (k, v)), seen)
    return out.to(q.dtype)


# ---- selection, and products ----------------------------------------------------------------------------------------


def top_pages(scores: Tensor, n_valid: Tensor, n: int) -> Tensor:
    """By stable sorts."""
    n_scores = scores.shape[-1]
    valid = torch.arange(n_scores) < n_valid[..., None]  # [..., P]
    kind = torch.where(valid, scores.isnan().long(), 2).expand_as(scores)  # a number, a NaN, nothing
    place = torch.where(kind == 0, scores, float("-inf")).argsort(stable=True, dim=-1, descending=True)
    place = place.gather(-1, kind.gather(-1, place).argsort(stable=True, dim=-1))[..., :n]  # the best, then the lower
    place = torch.where(kind.gather(-1, place) < 2, place, n_scores).sort(-1).values
    return F.pad(torch.where(place < n_scores, place, -1), (0, n - place.shape[-1]), value=-1)


def quest_pages(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> Tensor:
    rows = q.unflatten(1, (bounds.shape[1], -1)).flatten(2, 3).float()  # [B, K, R, H]
    signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], -1)  # [B, K, R, 2H]
    closed = (torch.arange(bounds.shape[2]) < n_closed[:, None])[:, None]  # [B, 1, P]
    read = torch.where(closed[..., None], bounds.float(), 0.0)  # the rest may be NaN
    scores = torch.where(closed[:, :, None], signed @ read.transpose(-1, -2), float("-inf"))  # [B, K, R, P]
    short = (scores - scores.amax(-1, keepdim=True)).amax(2)  # [B, K, P], 0 is best
    return top_pages(short, n_closed[:, None], n)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight * scale[:, None], None if bias is None else bias.float()).to(x.dtype)


def int4_tiles_linear(x: Tensor, numbers: Tensor, scale_and_zero: Tensor, _: Tensor) -> Tensor:
    weight, (n_groups, n_out, _) = int4_tiles.written_out(numbers, scale_and_zero).float(), scale_and_zero.shape
    parts = int4_tiles.parts_of(n_out, x.shape[1])
    ends = [i * n_groups // parts * int4_tiles.GROUP for i in range(parts + 1)]
    return torch.stack([x[:, a:b].float() @ weight[:, a:b].t() for a, b in itertools.pairwise(ends)])


OPERATORS: dict[Callable[..., Any], Any] = {
    decode_attention: decode._decode,
    decode_attention_with_mass: decode._decode_with_mass,
    prefill_attention: prefill._prefill,
    prefill_attention_with_lse: prefill._prefill_with_lse,
    key_mass: prefill._key_mass,
    sparse_attention: sparse._sparse,
}


def of_flat(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The body of an operator, which is given queries and a flat layer."""
    return lambda q, buffers, *others: reference(q, unflat(buffers, *others[:4]), *others[4:])


for reference, operator in OPERATORS.items():
    operator.register_kernel("cpu")(of_flat(reference))
select._page_bounds.register_kernel("cpu")(
    lambda buffers, *others: selection.page_bounds(unflat(buffers, *others[:4]), *others[4:])
)
select.top_pages.register_kernel("cpu")(top_pages)
select.guided_select.register_kernel("cpu")(selection.guided_select)
select.quest_pages.register_kernel("cpu")(quest_pages)
int8._int8_linear.register_kernel("cpu")(int8_linear)
int8._float8_rows.register_kernel("cpu")(lambda rows: int8.scaled(rows, int8.FLOAT8))
int4_tiles._int4_tiles_linear.register_kernel("cpu")(int4_tiles_linear)
int4_tiles._int4_untile.register_kernel("cpu")(int4_tiles.written_out)
