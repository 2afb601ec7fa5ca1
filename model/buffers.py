"""Memory for a cache: zeros, which lie in huge pages where that pays."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE = 2**21  # bytes


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; large ones on a CPU in huge pages, where Linux has some.

    A step reads all keys and values once, and looks an address up for every page: with pages of 4 KiB, every 32 entries
    (attention of one token over 8 x 16,000 entries takes 0.9 times as long in huge ones).
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or n_bytes < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        held = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, of which PyTorch says more
        return torch.zeros(shape, dtype=dtype, device=device)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(held, dtype=dtype).view(shape).zero_()  # written, so that the memory is had now
