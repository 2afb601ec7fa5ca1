"""Sizes that operators and their bodies agree on, and sums by page."""

from __future__ import annotations

from torch import Tensor

PAGES = (16, 32, 64, 128)  # block sizes whose attention mass can be summed
FEW_ROWS = 256  # up to so many rows per kv head are too few tiles for a GPU: even in a long chunk, keys are split
PREFILL_SPLIT = 1024  # keys that one program then reads for few rows
ONE_CHUNK = 192  # listed entries that one program reads, so that nothing is merged


def is_float8(x: Tensor) -> bool:
    """Whether entries are float8, which has no scale and which torch does little with."""
    return x.dtype.is_floating_point and x.dtype.itemsize == 1


def page_sums(mass: Tensor, page: int) -> Tensor:
    """Sums over whole pages: [B, K, n_keys] -> [B, K, n_keys // page]."""
    n_pages = mass.shape[-1] // page
    sums: Tensor = mass.narrow(-1, 0, n_pages * page).unflatten(-1, (n_pages, page)).sum(-1)
    return sums
