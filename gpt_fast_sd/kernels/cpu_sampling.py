"""cpu_sampling_any.cpp as torch operators: logits to distributions, filters and all, and distributions to tokens.

Plain tensor operations read and write the vocabulary some twenty times, and sort it for top-p; the kernel keeps what
`likeliest` keeps (except for the last bit of an exp), by the same exact sums, while a row stays in a core's cache.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from .cpu_build import builds, constant_where_traced, library

SOURCE = Path(__file__).with_name("cpu_sampling_any.cpp")
LEAST_VOCABULARY = 8192  # below it a model's own steps are small, too, and eager operations need no build

_library = torch.library.Library("gpt_fast_sd", "FRAGMENT")
_library.define(
    "cpu_distributions(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor log_min_p) -> Tensor"
)
_library.define("cpu_draw(Tensor p, Tensor u) -> Tensor")
_library.define("cpu_uniform(Tensor seed, Tensor position, int stream) -> Tensor")


def cpu_sampling_fits(rows: Tensor) -> bool:
    """Whether the kernel serves such rows [B, V] on this machine. It depends neither on B nor on values."""
    return cpu_sampling_serves(rows.device, rows.shape[-1])


def cpu_sampling_serves(device: torch.device, n_vocab: int) -> bool:
    """The same of rows on a device, of so many tokens."""
    return device.type == "cpu" and n_vocab >= LEAST_VOCABULARY and available()


@constant_where_traced
def available() -> bool:
    """Whether the kernel can be built here, or is."""
    return builds(SOURCE)


def cpu_distributions(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """The distribution of each row, see sampling.probabilities; a filter that is off holds V, 1 or -inf.

    fp32 logits [B, V], fp32 temperature [B], int64 top_k [B], fp64 top_p and log of min_p [B] -> fp32 [B, V]
    """
    p: Tensor = torch.ops.gpt_fast_sd.cpu_distributions(logits, temperature, top_k, top_p, log_min_p)
    return p


def cpu_draw(p: Tensor, u: Tensor) -> Tensor:
    """The token where the running sum first exceeds u: fp32 p [B, V], fp32 u [B] in [0, 1) -> int64 [B]."""
    tokens: Tensor = torch.ops.gpt_fast_sd.cpu_draw(p, u)
    return tokens


def cpu_uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """A number for each place of each row's text, see sampling.uniform: int64 [B], int64 [B] or [B, T] -> fp32."""
    numbers: Tensor = torch.ops.gpt_fast_sd.cpu_uniform(seed, position, stream)
    return numbers


@functools.cache
def kernels() -> tuple[ctypes._CFuncPtr, ctypes._CFuncPtr, ctypes._CFuncPtr]:  # type: ignore[name-defined]
    """Distributions, draws and random numbers in C++."""
    built = library(SOURCE)()
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    built.distributions_any.argtypes = [pointer] * 6 + [size] * 2 + [ctypes.c_int]
    built.draw_any.argtypes = [pointer] * 3 + [size] * 2 + [ctypes.c_int]
    built.uniform_any.argtypes = [pointer] * 3 + [size] * 3
    built.distributions_any.restype = built.draw_any.restype = built.uniform_any.restype = None
    return built.distributions_any, built.draw_any, built.uniform_any


@torch.library.impl(_library, "cpu_distributions", "CPU")
def _distributions(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    filters = temperature, top_k, top_p, log_min_p
    dtypes = torch.float32, torch.float32, torch.int64, torch.float64, torch.float64
    assert tuple(x.dtype for x in (logits, *filters)) == dtypes and all(len(x) == len(logits) for x in filters)
    logits, *held = (x.contiguous() for x in (logits, *filters))
    p = torch.empty_like(logits)
    pointers = [x.data_ptr() for x in (logits, *held, p)]
    kernels()[0](*pointers, *logits.shape, torch.get_num_threads())
    return p


@torch.library.impl(_library, "cpu_draw", "CPU")
def _draw(p: Tensor, u: Tensor) -> Tensor:
    assert p.dtype == u.dtype == torch.float32 and len(p) == len(u)
    p, u = p.contiguous(), u.contiguous()
    tokens = p.new_empty(len(p), dtype=torch.int64)
    kernels()[1](p.data_ptr(), u.data_ptr(), tokens.data_ptr(), *p.shape, torch.get_num_threads())
    return tokens


@torch.library.impl(_library, "cpu_uniform", "CPU")
def _uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    assert seed.dtype == position.dtype == torch.int64 and seed.shape == position.shape[:1]
    seed, position = seed.contiguous(), position.contiguous()
    numbers = position.new_empty(position.shape, dtype=torch.float32)
    n_rows = len(seed)
    each = position.numel() // n_rows if n_rows else 0
    kernels()[2](seed.data_ptr(), position.data_ptr(), numbers.data_ptr(), n_rows, each, stream)
    return numbers


@torch.library.register_fake("gpt_fast_sd::cpu_distributions", lib=_library)  # type: ignore[untyped-decorator]
def _distributions_fake(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("gpt_fast_sd::cpu_draw", lib=_library)  # type: ignore[untyped-decorator]
def _draw_fake(p: Tensor, u: Tensor) -> Tensor:
    return u.new_empty(u.shape, dtype=torch.int64)


@torch.library.register_fake("gpt_fast_sd::cpu_uniform", lib=_library)  # type: ignore[untyped-decorator]
def _uniform_fake(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    return position.new_empty(position.shape, dtype=torch.float32)
