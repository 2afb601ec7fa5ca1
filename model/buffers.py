"""Memory for a cache and for weights, which lie in huge pages where that pays."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE, ARENA, ALIGNED = 2**21, 2**26, 64  # bytes


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; large ones on a CPU in huge pages, where Linux has some.

    A step reads all keys and values once, and looks an address up for every page: with pages of 4 KiB, every 32 entries
    (attention of one token over 8 x 16,000 entries takes 0.9 times as long in huge ones).
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    held = _mapped(n_bytes) if device.type == "cpu" and n_bytes >= HUGE_PAGE else None
    if held is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(held, dtype=dtype).view(shape).zero_()  # written, so that the memory is had now


class HugePageArena:
    """Tensors that stay, side by side in huge pages where Linux has some: weights are often smaller than a page.

    Memory is taken ARENA bytes at a time, and had when it is written.
    """

    def __init__(self) -> None:
        self.left = torch.empty(0, dtype=torch.uint8)

    def keep(self, x: Tensor) -> Tensor:
        """A copy of x in this arena; x itself where there are no huge pages."""
        n_bytes = -(-x.nbytes // ALIGNED) * ALIGNED
        if n_bytes > len(self.left):
            if x.device.type != "cpu" or (held := _mapped(-(-n_bytes // ARENA) * ARENA)) is None:
                return x
            self.left = torch.frombuffer(held, dtype=torch.uint8)
        place, self.left = self.left[: x.nbytes], self.left[n_bytes:]
        return place.view(x.dtype).view(x.shape).copy_(x)


def _mapped(n_bytes: int) -> mmap.mmap | None:
    """Memory that asks Linux for huge pages; None elsewhere, and where there is none, of which PyTorch says more."""
    if sys.platform != "linux":
        return None
    try:
        held = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        held.madvise(mmap.MADV_HUGEPAGE)
    return held
