"""sampling.cpp as a torch operator: logits to distributions, filters and all.

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

from .build import builds, constant_where_traced, library

SOURCE = Path(__file__).with_name("sampling.cpp")
LEAST_VOCABULARY = 8192  # below it a model's own steps are small, too, and eager operations need no build

_library = torch.library.Library("gpt_fast_sd", "FRAGMENT")
_library.define(
    "cpu_distributions(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor log_min_p) -> Tensor"
)


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


@functools.cache
def kernel() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The kernel in C++."""
    built = library(SOURCE)().distributions_any
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    built.argtypes, built.restype = [pointer] * 6 + [size] * 2 + [ctypes.c_int], None
    return built


@torch.library.impl(_library, "cpu_distributions", "CPU")
def _distributions(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    filters = temperature, top_k, top_p, log_min_p
    dtypes = torch.float32, torch.float32, torch.int64, torch.float64, torch.float64
    assert tuple(x.dtype for x in (logits, *filters)) == dtypes and all(len(x) == len(logits) for x in filters)
    logits, *held = (x.contiguous() for x in (logits, *filters))
    p = torch.empty_like(logits)
    pointers = [x.data_ptr() for x in (logits, *held, p)]
    kernel()(*pointers, *logits.shape, torch.get_num_threads())
    return p


@torch.library.register_fake("gpt_fast_sd::cpu_distributions", lib=_library)  # type: ignore[untyped-decorator]
def _distributions_fake(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
