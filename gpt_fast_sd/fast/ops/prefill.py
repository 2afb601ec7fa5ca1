"""Attention of long chunks of queries over a cache that already holds their keys, and the mass they attend with.

On CUDA each is an operator whose body is Triton (triton/prefill.py); elsewhere attention_torch.py attends.

Shapes: B batch rows, W of them, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K,
        H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cpu import attention_torch as on_cpu
from .choice import triton_serves
from .decode import by_token
from .sizes import FEW_ROWS, PREFILL_SPLIT, page_sums


def prefill_splits(n_rows: int, n_keys: int) -> int:
    """Parts in which n_rows queries that share a kv head read n_keys keys: 0 if these are not split.

    Each part passes an fp32 row [H] and its sum per query on to the merge.
    """
    return -(-n_keys // PREFILL_SPLIT) if n_rows <= FEW_ROWS else 0


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H], last stride 1; k, v [B, K, S, H], last two dims dense; pos int64 [B, T], where consecutive queries
    should have nearby positions; k_scale, v_scale fp16 [B, K, S], last stride 1, of int8 alone; k_low, v_low, tail: of
    planes; fine: see decode.py -> [B, N, T, H]
    """
    if triton_serves(q.device):
        out: Tensor = _prefill(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail)
        return out
    return on_cpu.attend(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail, fine)


def prefill_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """prefill_attention, and the natural log of each softmax's sum, fp32 [B, N, T]: -inf if nothing is read."""
    if triton_serves(q.device):
        out, lse = _prefill_with_lse(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail)
        return out, lse
    return on_cpu.attend_with_lse(q, k, v, pos, n_keys, k_scale, v_scale, k_low, v_low, tail)


def key_mass(
    q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int, k_scale: Tensor | None = None,
    k_low: Tensor | None = None, tail: int = 0,
) -> Tensor:  # fmt: skip
    """The attention that each `page` keys received from the G * T queries of a kv head, given the lse.

    Reads only keys, once. q, k, pos, n_keys, k_scale, k_low, tail as in prefill_attention, lse as it returns it; page:
    a power of 2 -> fp32 [B, K, n_keys // page]
    """
    if triton_serves(q.device):
        mass: Tensor = _key_mass(q, k, lse, pos, n_keys, page, k_scale, k_low, tail)
        return mass
    keys = on_cpu.in_view(q, pos, n_keys, k, k_scale, k_low, tail)
    scores = on_cpu.scores_of(q, *keys, pos)  # [B, K, G, T, n_keys]
    finite = lse.clamp(min=on_cpu.LEAST).unflatten(1, (k.shape[1], -1))  # [B, K, G, T]
    return page_sums((scores - finite[..., None]).exp().sum((2, 3)), page)


def prefill_attention_of_slots(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """prefill_attention of the queries of some slots, and the mass of every key: fp32 [W, K, n_keys].

    q [W, N, T, H]; k, v [B, K, S, H]; slots int64 [W], all different; pos int64 [W, T]; k_scale, v_scale fp16
    [B, K, S]; k_low, v_low, tail: of planes -> [W, N, T, H], the mass
    """
    if triton_serves(q.device):
        # all slots take part: copying the keys of some slots would cost more than queries that read nothing
        all_q = q.new_zeros(k.shape[0], *q.shape[1:]).index_copy(0, slots, q)  # [B, N, T, H]
        all_pos = pos.new_full((k.shape[0], pos.shape[1]), k.shape[2]).index_copy(0, slots, pos)  # [B, T]
        out, lse = _prefill_with_lse(all_q, k, v, all_pos, n_keys, k_scale, v_scale, k_low, v_low, tail)
        return out[slots], _key_mass(all_q, k, lse, all_pos, n_keys, 1, k_scale, k_low, tail)[slots]
    k, v = (x.narrow(2, 0, n_keys)[slots] for x in (k, v))  # [W, K, n_keys, H] each
    k_scale, v_scale, k_low, v_low = (
        None if x is None else x.narrow(2, 0, n_keys)[slots] for x in (k_scale, v_scale, k_low, v_low)
    )
    return on_cpu.attend_with_mass(q, k, v, pos, n_keys, 1, k_scale, v_scale, k_low, v_low, tail)


@torch.library.custom_op("gpt_fast_sd::prefill_attention", mutates_args=(), device_types="cuda")
def _prefill(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> Tensor:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import prefill as prefill_triton

    arch = triton_common.architecture()
    beside: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "k_low": k_low, "v_low": v_low, "tail": tail}
    return prefill_triton.attend(q, k, v, pos, n_keys, arch=arch, **beside)


@torch.library.custom_op("gpt_fast_sd::prefill_attention_with_lse", mutates_args=(), device_types="cuda")
def _prefill_with_lse(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import prefill as prefill_triton

    arch = triton_common.architecture()
    beside: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "k_low": k_low, "v_low": v_low, "tail": tail}
    return prefill_triton.attend_with_lse(q, k, v, pos, n_keys, arch=arch, **beside)


@torch.library.custom_op("gpt_fast_sd::key_mass", mutates_args=(), device_types="cuda")
def _key_mass(
    q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int, k_scale: Tensor | None = None,
    k_low: Tensor | None = None, tail: int = 0,
) -> Tensor:  # fmt: skip
    from ..triton import common as triton_common
    from ..triton import prefill as prefill_triton

    arch = triton_common.architecture()
    return prefill_triton.key_mass(q, k, lse, pos, n_keys, page, arch=arch, k_scale=k_scale, k_low=k_low, tail=tail)


@_prefill.register_fake
def _prefill_fake(q: Tensor, *_: object) -> Tensor:
    return by_token(q)


@_prefill_with_lse.register_fake
def _prefill_with_lse_fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_key_mass.register_fake
def _key_mass_fake(q: Tensor, k: Tensor, lse: Tensor, pos: Tensor, n_keys: int, page: int, *_: object) -> Tensor:
    return q.new_empty(*k.shape[:2], n_keys // page, dtype=torch.float32)
