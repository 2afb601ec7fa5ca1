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

from .build import builds, constant_where_traced, is_built, library
from .instruction_sets import chosen, widens

PAGE = 16  # keys whose attention mass is summed
HEAD_DIMS = 64, 128  # of the kernel for AVX-512; that for any CPU: multiples of 16
MOST_DIMS = 256
SOURCE, ANY = (Path(__file__).with_name(name) for name in ("attention_avx512.cpp", "attention.cpp"))
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 3}  # as C++ numbers them


class _Call(ctypes.Structure):
    """AttentionCall in C++."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_scale", "v_scale", "k_low", "v_low")),
        *((name, ctypes.c_void_p) for name in ("pos", "index", "out", "mass")),
        *((name, ctypes.c_int64) for name in ("B", "K", "G", "T", "M", "S", "q_b", "q_n", "q_t", "kv_b", "kv_k")),
        *((name, ctypes.c_int64) for name in ("scale_b", "scale_k", "tail", "q_dtype", "k_dtype", "fine")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


_library = torch.library.Library("gpt_fast_sd", "DEF")
_library.define(
    "cpu_attention(Tensor q, Tensor k, Tensor v, Tensor pos, Tensor? index, SymInt n_keys, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? k_low=None, Tensor? v_low=None, int tail=0, bool fine=False) -> Tensor"
)
_library.define(
    "cpu_attention_with_mass(Tensor q, Tensor k, Tensor v, Tensor pos, SymInt n_keys, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? k_low=None, Tensor? v_low=None, int tail=0, bool fine=False) -> (Tensor, Tensor)"
)


def cpu_attention_fits(q: Tensor, k: Tensor) -> bool:
    """Whether a kernel serves such queries [B, N, T, H] and keys [B, K, S, H] on this machine.

    Keys have the dtype of the queries, fp32, fp16 or bf16, or are int8; those of uint8 are the upper plane of int8
    ones, [B, K, S, H // 2].
    """
    head_dim, planes = q.shape[-1], k.dtype == torch.uint8
    held = k.dtype in (q.dtype, torch.int8) or (planes and 2 * k.shape[-1] == head_dim)
    served = q.dtype.is_floating_point and q.dtype in DTYPES and held and q.device.type == "cpu"
    return served and not head_dim % PAGE and head_dim <= MOST_DIMS and available(head_dim, q.dtype, k.dtype)


@constant_where_traced
def available(head_dim: int, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> bool:
    """Whether this CPU and its compiler support the instructions of the kernel for a head dim and these dtypes.

    kv_dtype: of the cache, if it is another.
    """
    return builds(source_for(head_dim, dtype, kv_dtype or dtype), head_dim)


@constant_where_traced
def is_here(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether the kernel need not be built."""
    return is_built(source_for(head_dim, dtype, kv_dtype), head_dim)


def source_for(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Path:
    """The kernel on this machine for queries of such a head dim and dtype, and for a cache of kv_dtype."""
    own = chosen().own and head_dim in HEAD_DIMS and dtype == torch.bfloat16
    return SOURCE if own and not (kv_dtype == dtype and widens()) and builds(SOURCE, head_dim) else ANY


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to those of the first n_keys entries that are at or before each query; a query at or past n_keys gives 0.

    q [B, N, T, H]; k, v [B, K, S, H], dense except the first two strides, of q's dtype or with fp16 scales [B, K, S]
    int8; k_low, v_low, tail: of planes, see decode.py; fine: queries over int8 have 16 bits a number at least, not 8;
    pos int64 [B, T] -> [B, N, T, H] of q's dtype
    """
    beside = k_scale, v_scale, k_low, v_low, tail, fine
    out: Tensor = torch.ops.gpt_fast_sd.cpu_attention(q, k, v, pos, None, n_keys, *beside)
    return out


def cpu_attention_at(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, pos: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to the entries in index [B, K, M] that are at or before each query; -1 is empty. Otherwise as above."""
    beside = k_scale, v_scale, k_low, v_low, tail, fine
    out: Tensor = torch.ops.gpt_fast_sd.cpu_attention(q, k, v, pos, index, 0, *beside)
    return out


def cpu_attention_with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cpu_attention, and the mass that each PAGE keys received from all rows of a kv head: [B, K, n_keys // PAGE]."""
    beside = k_scale, v_scale, k_low, v_low, tail, fine
    out, mass = torch.ops.gpt_fast_sd.cpu_attention_with_mass(q, k, v, pos, n_keys, *beside)
    return out, mass


@functools.cache
def kernel_for(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
    """The kernel for queries and a cache of these dtypes."""
    kernel = library(source_for(head_dim, dtype, kv_dtype), head_dim)().attention
    kernel.argtypes, kernel.restype = [ctypes.c_void_p], None
    return kernel


def _attend(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, index: Tensor | None, n_keys: int, mass: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, k_low: Tensor | None, v_low: Tensor | None, tail: int, fine: bool,
) -> Tensor:  # fmt: skip
    n_rows, n_heads, n_tokens, head_dim = q.shape
    n_kv, capacity = k.shape[1:3]
    planes = [x for x in (k_low, v_low) if x is not None]
    assert len(planes) == 2 * (k.dtype == torch.uint8) and (not tail or planes)
    assert all(x.stride() == k.stride() for x in (v, *planes)) and q.stride(3) == 1
    assert k.stride()[2:] == (head_dim // 2 if planes else head_dim, 1)
    scales = [x for x in (k_scale, v_scale) if x is not None]
    apart = scales[0].stride()[:2] if scales else (0, 0)
    assert len(scales) == 2 * (k.dtype in (torch.int8, torch.uint8)) and (scales or k.dtype == q.dtype)
    assert all(x.dtype == torch.float16 and x.stride() == (*apart, 1) for x in scales)
    pos = pos.contiguous()
    index = None if index is None else index.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    tensors = q, k, v, k_scale, v_scale, k_low, v_low, pos, index, out, mass
    call = _Call(
        *(None if x is None else x.data_ptr() for x in tensors), n_rows, n_kv, n_heads // n_kv, n_tokens,
        n_keys if index is None else index.shape[-1], capacity, *q.stride()[:3], *k.stride()[:2], *apart, tail,
        DTYPES[q.dtype], DTYPES[k.dtype], fine, head_dim**-0.5, torch.get_num_threads(),
    )  # fmt: skip
    kernel_for(head_dim, q.dtype, k.dtype)(ctypes.byref(call))
    return out


@torch.library.impl(_library, "cpu_attention", "CPU")
def _dense(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, index: Tensor | None, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> Tensor:  # fmt: skip
    return _attend(q, k, v, pos, index, n_keys, None, k_scale, v_scale, k_low, v_low, tail, fine)


@torch.library.impl(_library, "cpu_attention_with_mass", "CPU")
def _with_mass(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_low: Tensor | None = None, v_low: Tensor | None = None, tail: int = 0,
    fine: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mass = torch.empty(*k.shape[:2], n_keys // PAGE)
    return _attend(q, k, v, pos, None, n_keys, mass, k_scale, v_scale, k_low, v_low, tail, fine), mass


@torch.library.register_fake("gpt_fast_sd::cpu_attention", lib=_library)  # type: ignore[untyped-decorator]
def _dense_fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("gpt_fast_sd::cpu_attention_with_mass", lib=_library)  # type: ignore[untyped-decorator]
def _with_mass_fake(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(*k.shape[:2], n_keys // PAGE, dtype=torch.float32)
