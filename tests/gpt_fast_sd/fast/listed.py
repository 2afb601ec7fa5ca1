"""Inputs for tests of sparse attention kernels: a list of entries and a window per row; and the fp64 truth.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.gpt_fast_sd.fast import dense
from tests.gpt_fast_sd.fast.dense import FP32
from tests.gpt_fast_sd.fast.references import attention


class Case(dense.Case):
    """Rows whose windows begin at `windows` and whose last query stands at `ends`; each kv head has a list of its own.

    The list takes about half of the pages that begin before the window, if it has room, in any order and with gaps
    of -1. Entries that no query of their row and head reads are NaN.
    """

    def __init__(
        self, windows: Sequence[int], ends: Sequence[int], *, page: int = 16, n_listed: int = 128, width: int = 40,
        n_tokens: int = 1, group: int = 2, n_kv: int = 2, head_dim: int = 64, n_keys: int = 320,
        dtype: torch.dtype = FP32, held: torch.dtype | None = None, tail: int = 0,
        list_dtype: torch.dtype = torch.int64,
    ) -> None:  # fmt: skip
        self.window_start, self.page, self.width = torch.tensor(windows), page, width
        generator, n_rows = torch.Generator().manual_seed(0), len(windows)
        runs = torch.full((n_rows, n_kv, n_listed // page), -1)
        for row, window in enumerate(windows):
            for head in range(n_kv):
                n_pages = -(-window // page)
                pages = torch.randperm(n_pages, generator=generator)[: min(runs.shape[-1], n_pages // 2 + 1)]
                runs[row, head, torch.randperm(runs.shape[-1], generator=generator)[: len(pages)]] = pages
        entries = runs[..., None] * page + torch.arange(page)
        self.kv_indices = torch.where(runs[..., None] >= 0, entries, -1).flatten(-2).to(list_dtype)  # [B, K, C]
        super().__init__(
            ends, n_tokens=n_tokens, group=group, n_kv=n_kv, head_dim=head_dim, n_keys=n_keys, dtype=dtype, held=held,
            tail=tail,
        )  # fmt: skip

    def forget(self, what: float) -> None:
        """Overwrite what nobody reads."""
        unread = ~self.seen().any(2)  # [B, K, S]
        for entries in self.spoilt:
            lost = unread.view(unread.shape + (1,) * (entries.dim() - 3))
            entries.masked_fill_(lost, what)

    def seen(self) -> Tensor:
        """What each query reads: bool [B, K, T, S]."""
        n_positions = self.k.shape[2]
        place = torch.arange(n_positions)
        listed = torch.zeros(*self.kv_indices.shape[:2], n_positions + 1, dtype=torch.bool)
        listed.scatter_(2, torch.where(self.kv_indices >= 0, self.kv_indices, n_positions).long(), True)
        start = self.window_start[:, None]  # [B, 1]
        in_window = (place >= start) & (place < start + self.width)  # [B, S]
        may = (listed[..., :-1] & (place < start)[:, None]) | in_window[:, None]  # [B, K, S]
        return may[:, :, None] & ((place <= self.pos[..., None]) & (self.pos < self.n_keys)[..., None])[:, None]

    def expected(self) -> tuple[Tensor, Tensor]:
        """fp64 attention [B, N, T, H], and what the same weights make of |v|."""
        k, v = self.meant
        exact, size = attention(self.q.double(), k, torch.cat([v, v.abs()], -1), self.seen())[0].chunk(2, -1)
        return exact, size
