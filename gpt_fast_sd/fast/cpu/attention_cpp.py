"""attention_avx512.cpp and attention.cpp as torch operators.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim, M entries listed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheFormat, CacheLayer

from ..ops.layer import flat, layer_of
from .build import builds, constant_where_traced, library
from .instruction_sets import chosen, widens

PAGE = 16  # keys whose attention mass is summed
HEAD_DIMS = 64, 128  # of the kernel for AVX-512; that for any CPU: multiples of 16
MOST_DIMS = 256
SOURCE, ANY = (Path(__file__).with_name(name) for name in ("attention_avx512.cpp", "attention.cpp"))
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # as C++ numbers them


class _Call(ctypes.Structure):
    """AttentionCall in C++."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_scale", "v_scale", "k_low", "v_low")),
        *((name, ctypes.c_void_p) for name in ("pos", "index", "out", "mass")),
        *((name, ctypes.c_int64) for name in ("B", "K", "G", "T", "M", "S", "q_b", "q_n", "q_t", "kv_b", "kv_k")),
        *((name, ctypes.c_int64) for name in ("scale_b", "scale_k", "tail", "window", "q_dtype", "k_dtype", "fine")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


_library = torch.library.Library("gpt_fast_sd", "DEF")
_LAYER = "Tensor[] buffers, str form, int tail, bool fine, int window"  # see ops/layer.py
_library.define(f"cpu_attention(Tensor q, {_LAYER}, Tensor pos, Tensor? index, SymInt n_keys) -> Tensor")
_library.define(f"cpu_attention_with_mass(Tensor q, {_LAYER}, Tensor pos, SymInt n_keys) -> (Tensor, Tensor)")


def cpu_attention_fits(head_dim: int, dtype: torch.dtype, form: CacheFormat) -> bool:
    """Whether a kernel serves queries of this head dim and dtype over a cache of this format on this machine.

    Queries are fp32, fp16 or bf16; the cache holds numbers in their dtype, or int8. A format derived from CacheFormat
    reads its numbers in its own way, which no kernel knows.
    """
    known = (
        type(form) is CacheFormat and dtype.is_floating_point and dtype in DTYPES and form.dtype in (dtype, torch.int8)
    )
    return known and not head_dim % PAGE and head_dim <= MOST_DIMS and available(head_dim, dtype, form)


@constant_where_traced
def available(head_dim: int, dtype: torch.dtype = torch.bfloat16, form: CacheFormat | None = None) -> bool:
    """Whether this CPU and its compiler support the instructions of the kernel for a head dim and dtype.

    form: of the cache, if it holds another dtype.
    """
    return builds(source_for(head_dim, dtype, form), head_dim)


def source_for(head_dim: int, dtype: torch.dtype, form: CacheFormat | None = None) -> Path:
    """The kernel on this machine for queries of such a head dim and dtype, and for a cache of that format, or dtype."""
    own, scaled = chosen().own and head_dim in HEAD_DIMS and dtype == torch.bfloat16, form is not None and form.scaled
    return SOURCE if own and (scaled or not widens()) and builds(SOURCE, head_dim) else ANY


def cpu_attention(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> Tensor:
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    Queries over int8 are rounded to 8 bits a number, of a layer that is fine to 16.
    q [B, N, T, H]; layer [B, K, S, ...], dense except the first two strides; pos int64 [B, T] -> [B, N, T, H] of q's
    dtype
    """
    out: Tensor = torch.ops.gpt_fast_sd.cpu_attention(q, *flat(layer), pos, None, n_keys)
    return out


def cpu_attention_at(q: Tensor, layer: CacheLayer, index: Tensor, pos: Tensor) -> Tensor:
    """Attend to the entries in index [B, K, M] that are at or before each query; -1 is empty. Otherwise as above."""
    out: Tensor = torch.ops.gpt_fast_sd.cpu_attention(q, *flat(layer), pos, index, 0)
    return out


def cpu_attention_with_mass(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """cpu_attention, and the mass that each PAGE keys received from all rows of a kv head: [B, K, n_keys // PAGE]."""
    out, mass = torch.ops.gpt_fast_sd.cpu_attention_with_mass(q, *flat(layer), pos, n_keys)
    return out, mass


@functools.cache
def kernel_for(head_dim: int, dtype: torch.dtype, form: CacheFormat) -> Any:
    """The kernel for queries of this dtype over a cache of that format."""
    kernel = library(source_for(head_dim, dtype, form), head_dim)().attention
    kernel.argtypes, kernel.restype = [ctypes.c_void_p], None
    return kernel


def _attend(
    q: Tensor, layer: CacheLayer, pos: Tensor, index: Tensor | None, n_keys: int, mass: Tensor | None = None
) -> Tensor:
    n_rows, n_heads, n_tokens, head_dim = q.shape
    n_kv, capacity = layer.k.shape[1:3]
    form, of_scales = layer.format, (0, 0) if layer.k_scale is None else layer.k_scale.stride()[:2]
    assert q.stride(3) == 1 and (form.scaled or form.dtype == q.dtype) and (form.planes or not layer.tail)
    for (shape, dtype), *both in zip(form.parts(head_dim), layer.buffers[::2], layer.buffers[1::2], strict=True):
        expected = (*layer.k.stride()[:2], *shape, 1) if shape else (*of_scales, 1)
        assert all(x.dtype == dtype and x.stride() == expected for x in both)
    pos = pos.contiguous()
    index = None if index is None else index.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _Call(
        *(None if x is None else x.data_ptr() for x in (q, *layer.operands, pos, index, out, mass)), n_rows, n_kv,
        n_heads // n_kv, n_tokens, n_keys if index is None else index.shape[-1], capacity, *q.stride()[:3],
        *layer.k.stride()[:2], *of_scales, layer.tail, layer.window, DTYPES[q.dtype], DTYPES[form.dtype], layer.fine,
        head_dim**-0.5, torch.get_num_threads(),
    )  # fmt: skip
    kernel_for(head_dim, q.dtype, form)(ctypes.byref(call))
    return out


@torch.library.impl(_library, "cpu_attention", "CPU")
def _dense(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor,
    index: Tensor | None, n_keys: int,
) -> Tensor:  # fmt: skip
    return _attend(q, layer_of(buffers, form, tail, fine, window), pos, index, n_keys)


@torch.library.impl(_library, "cpu_attention_with_mass", "CPU")
def _with_mass(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int
) -> tuple[Tensor, Tensor]:
    mass = torch.empty(*buffers[0].shape[:2], n_keys // PAGE)
    return _attend(q, layer_of(buffers, form, tail, fine, window), pos, None, n_keys, mass), mass


@torch.library.register_fake("gpt_fast_sd::cpu_attention", lib=_library)  # type: ignore[untyped-decorator]
def _dense_fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("gpt_fast_sd::cpu_attention_with_mass", lib=_library)  # type: ignore[untyped-decorator]
def _with_mass_fake(
    q: Tensor, buffers: list[Tensor], form: str, tail: int, fine: bool, window: int, pos: Tensor, n_keys: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(*buffers[0].shape[:2], n_keys // PAGE, dtype=torch.float32)
