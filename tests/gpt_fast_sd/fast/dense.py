"""Inputs for tests of attention kernels, dense and of listed entries: queries at the end of ragged rows, fp64 truth.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer, as_planes
from tests.gpt_fast_sd.fast.references import attention, layer_of, meant_by, page_sums, seen_by

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8 = torch.int8
PLANES = torch.uint8  # int8 in two planes of nibbles
TAIL = 20  # entries that a draft reads whole
DTYPES = [FP32, FP16, BF16]

SPARE = 64  # entries of the cache that are never in view, if nothing else is said
NAN = float("nan")

# A weight is rounded to the dtype, and so is the output: two halves of an eps of the sum of |weight * value|, which no
# output exceeds; a tenth more for the sums. In fp32 it is sums that count: scores of some 64 terms, outputs of 192.
TOLERANCE = {FP32: 2e-6, FP16: 1.1 * 2.0**-10, BF16: 1.1 * 2.0**-7}


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [..., H] in int8, and the fp16 scale of each [...]."""
    scale = (x.float().abs().amax(-1).clamp(min=1e-5) / 127).half()
    return (x.float() / scale.float()[..., None]).round().clamp(-127, 127).to(INT8), scale


class Case:
    """Queries, keys and values of a batch whose rows end at `ends`; the T queries of a row are its last ones.

    Queries may stand past the n_keys in view. What is past the last query that does not is NaN. A cache holds keys and
    values as they come, in int8 with scales, or in planes; with a tail these are read as by a draft.
    """

    def __init__(
        self, ends: Sequence[int], *, n_tokens: int = 1, group: int = 2, n_kv: int = 1, head_dim: int = 64,
        n_keys: int = 192, spare: int = SPARE, dtype: torch.dtype = FP32, held: torch.dtype | None = None,
        tail: int = 0, window: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator, n_rows = torch.Generator().manual_seed(seed), len(ends)
        self.n_keys, self.tail, self.window = n_keys, tail, window

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        # as a model gives them: [B, T, N, H] transposed, one of several tensors in a row
        self.q = normal(n_rows, n_tokens, n_kv * group + 3, head_dim)[:, :, 1:-2].transpose(1, 2)
        # as a cache holds them: some slots of a larger buffer
        self.k, self.v = (normal(n_rows + 2, n_kv, n_keys + spare, head_dim)[1:-1] for _ in range(2))
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        self.low: tuple[Tensor | None, Tensor | None] = None, None
        if held in (INT8, PLANES):
            (self.k, self.k_scale), (self.v, self.v_scale) = quantized(self.k), quantized(self.v)
            if held is PLANES:
                (self.k, k_low), (self.v, v_low) = as_planes(self.k), as_planes(self.v)
                self.low = k_low, v_low
        self.pos = (torch.tensor(ends)[:, None] + torch.arange(1 - n_tokens, 1)).clamp(min=0)  # [B, T]
        self.forget(NAN)

    def layer(self, rows: slice = slice(None)) -> CacheLayer:
        """That of some rows."""
        buffers = self.k, self.v, self.k_scale, self.v_scale, *self.low
        how = {"tail": self.tail, "window": self.window}
        return layer_of(*(None if x is None else x[rows] for x in buffers), **how)  # type: ignore[arg-type]

    @property
    def spoilt(self) -> tuple[Tensor, ...]:
        """What may be made a NaN: of int8 the scales."""
        return (self.k, self.v) if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

    @property
    def meant(self) -> tuple[Tensor, Tensor]:
        """What keys and values stand for, fp32."""
        k, v = meant_by(self.layer(), self.pos)
        return k.float(), v.float()

    def forget(self, what: float) -> None:
        """Overwrite all that lies past the last key that a query of its row reads."""
        last = torch.where(self.pos < self.n_keys, self.pos, -1).amax(1)
        for row, n in enumerate((last + 1).tolist()):
            for entries in self.spoilt:
                entries[row, :, n:] = what

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp64 attention to values and to |values| [B, N, T, 2H], weights [B, K, G, T, S] and lse [B, N, T]."""
        k, v = (x[:, :, : self.n_keys] for x in self.meant)
        return attention(self.q.double(), k, torch.cat([v, v.abs()], -1), seen_by(self.pos, self.n_keys, self.window))

    def expected(self) -> tuple[Tensor, Tensor]:
        """fp64 attention [B, N, T, H], and what the same weights make of |v|."""
        exact, size = self.truth()[0].chunk(2, -1)
        return exact, size

    def lse(self) -> Tensor:
        """fp32 [B, N, T], -inf where a query does not read."""
        return self.truth()[2].float()

    def expected_mass(self, page: int) -> Tensor:
        """fp32 [B, K, S // page]: the softmax weights of all queries of a kv head, summed."""
        return page_sums(self.truth()[1], page).float()


class Listed(Case):
    """Rows whose windows begin at `windows` and whose last query stands at `ends`; each kv head has a list of its own.

    The list takes about half of the pages that begin before the window, if it has room, in any order and with gaps
    of -1. Entries that no query of their row and head reads are NaN.
    """

    def __init__(
        self, windows: Sequence[int], ends: Sequence[int], *, page: int = 16, n_listed: int = 128, width: int = 40,
        n_kv: int = 2, n_keys: int = 320, list_dtype: torch.dtype = torch.int64, **shape: Any,
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
        super().__init__(ends, n_kv=n_kv, n_keys=n_keys, **shape)

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
        pos = torch.where(self.pos < self.n_keys, self.pos, n_positions)
        return may[:, :, None] & seen_by(pos, n_positions, self.window)

    def expected(self) -> tuple[Tensor, Tensor]:
        """fp64 attention [B, N, T, H], and what the same weights make of |v|."""
        k, v = self.meant
        exact, size = attention(self.q.double(), k, torch.cat([v, v.abs()], -1), self.seen())[0].chunk(2, -1)
        return exact, size


def assert_close(got: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """The output is as close as its roundings allow, and the heads of a token are adjacent in memory."""
    exact, size = expected
    assert got.shape == exact.shape and got.transpose(1, 2).is_contiguous()
    off = (got.double() - exact).abs() - TOLERANCE[got.dtype] * size
    assert (off <= 1e-7).all(), off.max()
