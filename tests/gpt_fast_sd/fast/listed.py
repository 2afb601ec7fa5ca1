"""Inputs for tests of sparse attention kernels: a list of entries and a window per row; and the fp64 truth.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.gpt_fast_sd.fast.dense import FP32, NAN, SPARE, Entries


class Case(Entries):
    """Rows whose windows begin at `windows` and whose last query stands at `ends`; each kv head has a list of its own.

    The list takes about half of the pages that begin before the window, if it has room, in any order and with gaps
    of -1. Entries that no query of their row and head reads are NaN.
    """

    def __init__(
        self, windows: Sequence[int], ends: Sequence[int], *, page: int = 16, n_listed: int = 128, width: int = 40,
        n_tokens: int = 1, group: int = 2, n_kv: int = 2, head_dim: int = 64, n_keys: int = 320,
        dtype: torch.dtype = FP32, held: torch.dtype | None = None, list_dtype: torch.dtype = torch.int64,
    ) -> None:  # fmt: skip
        generator, n_rows = torch.Generator().manual_seed(0), len(windows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        # as a model gives them: [B, T, N, H] transposed, one of several tensors in a row
        self.q = normal(n_rows, n_tokens, n_kv * group + 3, head_dim)[:, :, 1:-2].transpose(1, 2)
        # as a cache holds them: some slots of a larger buffer
        k, v = (normal(n_rows + 2, n_kv, n_keys + SPARE, head_dim)[1:-1] for _ in range(2))
        self.hold(k, v, held)
        self.window_start = torch.tensor(windows)
        self.pos = (torch.tensor(ends)[:, None] + torch.arange(1 - n_tokens, 1)).clamp(min=0)  # [B, T]
        self.n_keys, self.page, self.width = n_keys, page, width
        runs = torch.full((n_rows, n_kv, n_listed // page), -1)
        for row, window in enumerate(windows):
            for head in range(n_kv):
                n_pages = -(-window // page)
                pages = torch.randperm(n_pages, generator=generator)[: min(runs.shape[-1], n_pages // 2 + 1)]
                runs[row, head, torch.randperm(runs.shape[-1], generator=generator)[: len(pages)]] = pages
        entries = runs[..., None] * page + torch.arange(page)
        self.kv_indices = torch.where(runs[..., None] >= 0, entries, -1).flatten(-2).to(list_dtype)  # [B, K, C]
        self.forget()

    def forget(self) -> None:
        """Overwrite what nobody reads."""
        unread = ~self.seen().any(2)  # [B, K, S]
        for entries in self.spoilt:
            lost = unread.view(unread.shape + (1,) * (entries.dim() - 3))
            entries.masked_fill_(lost, NAN)

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
        group = self.q.shape[1] // self.k.shape[1]
        k, v, seen = (x.repeat_interleave(group, 1) for x in (*self.meant, self.seen()))
        scores = self.q.double() @ k.double().nan_to_num(0.0).mT * self.q.shape[-1] ** -0.5  # [B, N, T, S]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        v = v.double().nan_to_num(0.0)
        return weights @ v, weights @ v.abs()
