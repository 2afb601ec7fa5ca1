"""Inputs for tests of dense attention kernels: queries at the end of ragged rows, and their fp64 truth.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
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
        tail: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator, n_rows = torch.Generator().manual_seed(seed), len(ends)
        self.n_keys, self.tail = n_keys, tail

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
        return layer_of(*(None if x is None else x[rows] for x in buffers), tail=self.tail)  # type: ignore[arg-type]

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
        return attention(self.q.double(), k, torch.cat([v, v.abs()], -1), seen_by(self.pos, self.n_keys))

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


def each(*what: object, **shape: Any) -> Iterator[Any]:
    """Parameters `what`, and a shape for each pair of values of those that are lists, at most two.

    The ordinary run has each value of both, the slow one all pairs. "group n_tokens" has tuples for values.
    """
    varied = {names: values for names, values in shape.items() if isinstance(values, list)}
    first, second = [*varied.values(), [None], [None]][:2]
    same = {name: value for name, value in shape.items() if name not in varied}
    for (i, a), (j, b) in itertools.product(enumerate(first), enumerate(second)):
        own = dict(same)
        for names, value in zip(varied, (a, b), strict=False):
            own.update(zip(names.split(), value if " " in names else (value,), strict=True))
        marks = () if i % len(second) == j % len(first) else pytest.mark.slow
        yield pytest.param(*what, own, marks=marks)


def assert_close(got: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """The output is as close as its roundings allow, and the heads of a token are adjacent in memory."""
    exact, size = expected
    assert got.shape == exact.shape and got.transpose(1, 2).is_contiguous()
    off = (got.double() - exact).abs() - TOLERANCE[got.dtype] * size
    assert (off <= 1e-7).all(), off.max()
