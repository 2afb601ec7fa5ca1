"""How many kernels an operator launches on CUDA: forecasts of a step count them, and tests check the numbers."""

from __future__ import annotations

from .int8 import MOST_TILED
from .sizes import FEW_ROWS, ONE_CHUNK

# Attention is split and merged, and mass summed; pages of quest are scored, compared and selected.
FIXED = {
    "decode_attention": 2,
    "decode_attention_with_mass": 3,
    "top_pages": 1,
    "guided_select": 1,
    "page_bounds": 1,
    "quest_pages": 3,
}
SUMMED_PAGE = {1: 128, 2: 128, 4: 32}  # bytes of a number of the cache -> the longest page that one program sums


def launches(op: str, *, n_rows: int = 1, n_entries: int = 1, page: int = 1, itemsize: int = 2) -> int:
    """How many kernels one call of the operator `op` launches on CUDA, torch's own included.

    n_rows: queries that share a kv head, G * T (prefill), or rows (products); n_entries: listed ones and those of the
    window (sparse_attention); page, itemsize: keys of a page, bytes of a number (key_mass). ValueError for others.
    """
    if op in FIXED:
        return FIXED[op]
    if op in ("int8_linear", "planes_linear"):
        return 1 if n_rows <= MOST_TILED else 2  # a copy of the weight, and a product
    if op == "sparse_attention":
        return 1 if n_entries <= ONE_CHUNK else 2  # chunks, and their merge, which lists of many rows may lack
    if op == "prefill_attention":
        return 1 if n_rows > FEW_ROWS else 2
    if op == "prefill_attention_with_lse":
        return 1 if n_rows > FEW_ROWS else 3  # few rows: split, merge, and another base and order of the lse
    if op == "key_mass":
        return 1 if page <= SUMMED_PAGE[itemsize] else 2
    raise ValueError(f"no operator {op!r} launches kernels of ours on CUDA")
