"""Where a test of this folder runs, and how large it is there: real shapes on a CUDA device, small ones elsewhere."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import EngineConfig
from gpt_fast_sd.model import SPLIT, CacheLayer
from measuring.gpu.setup import SMALL, difference, random_model
from tests.gpt_fast_sd.fast import dense

__all__ = ["SMALL", "difference", "random_model"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the CPU runs the bodies for CUDA, see conftest.py
HAS_CUDA = torch.cuda.is_available()
Shape = tuple[int, int, int]  # G, H, T
Held = tuple[torch.dtype | None, int]  # what the cache has instead of the queries' dtype, and the tail of planes


def of_dtypes(shapes: tuple[Shape, ...]) -> list[Any]:
    """Parameters (G, H, T, dtype, held).

    bf16 over caches of bf16, of int8 and of its planes, whole and as drafts read them, for every shape, other dtypes
    for every third; without a chip two shapes.
    """
    planes: list[Held] = [(dense.PLANES, 0), (dense.PLANES, dense.TAIL)]
    often = [(dense.BF16, held) for held in ((None, 0), (dense.INT8, 0), *planes)]
    seldom = [(dense.FP32, (None, 0)), (dense.FP16, (None, 0)), (dense.FP32, (dense.INT8, 0))]
    return [
        pytest.param(*shape, dtype, held, id=f"G{shape[0]}-H{shape[1]}-T{shape[2]}-{named(dtype, held)}")
        for i, shape in enumerate(shapes if HAS_CUDA else shapes[1:5:3])
        for dtype, held in (often + seldom if i % 3 == 0 else often)
    ]


def named(dtype: torch.dtype, held: Held) -> str:
    """As in "bfloat16", "bfloat16-int8" or "bfloat16-planes-drafts"."""
    kept, tail = held
    names = [str(x).removeprefix("torch.") for x in (dtype, kept) if x and x is not dense.PLANES]
    return "-".join([*names, *["planes"] * (kept is dense.PLANES), *["drafts"] * (tail > 0)])


@dataclass(frozen=True)
class Place:
    """A device, and what is tried on it."""

    device: torch.device

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def put(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors on the device."""
        return tuple(tensor.to(self.device) for tensor in tensors)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Entries that are committed in rows before their queries."""
        return (0, 37, 255, 1023, 2600) if self.on_cuda else (0, 37, 200) if INTERPRETED else (0, 37, 300)

    def ends(self, n_tokens: int) -> tuple[list[int], int]:
        """Where the last query of each row stands, that of an idle one at the end, and how many keys are in view."""
        n_keys = -(-(max(self.lengths) + n_tokens) // SPLIT) * SPLIT
        return [length + n_tokens - 1 for length in (*self.lengths, n_keys)], n_keys

    def layer_of(self, case: dense.Case) -> CacheLayer:
        """Its keys and values on the device."""
        return case.layer()._of(self.put(*case.layer().buffers))

    def dense_case(
        self, group: int, head_dim: int, n_tokens: int, dtype: torch.dtype, held: Held = (None, 0)
    ) -> dense.Case:
        """Ragged rows and an idle one; scores of about 2, so that attention is neither flat nor on one key."""
        ends, n_keys = self.ends(n_tokens)
        case = dense.Case(
            ends, n_tokens=n_tokens, group=group, n_kv=2, head_dim=head_dim, n_keys=n_keys, dtype=dtype, held=held[0],
            seed=n_tokens,
        )  # fmt: skip
        case.q, case.tail = case.q * 2, held[1]
        return case

    def listed_case(
        self, group: int, head_dim: int, n_tokens: int, dtype: torch.dtype, held: Held, page: int
    ) -> dense.Listed:
        """The same rows, their windows begun some entries before the first query."""
        ends, n_keys = self.ends(n_tokens)
        windows = [max(0, min(end - n_tokens - 19, n_keys)) // page * page for end in ends]
        case = dense.Listed(
            windows, ends, page=page, n_listed=96, width=40, n_tokens=n_tokens, group=group, head_dim=head_dim,
            n_keys=n_keys, dtype=dtype, held=held[0],
        )  # fmt: skip
        case.q, case.tail = case.q * 2, held[1]
        return case

    def settings(self, **changes: Any) -> EngineConfig:
        """Four slots of 2,048 tokens; off the chip two of 512, and nothing is compiled."""
        small = {} if self.on_cuda else {"batch_size": 2, "max_seq_len": 512, "compile": False}
        return EngineConfig(**{"batch_size": 4, "max_seq_len": 2048, "device": self.device.type, **small, **changes})

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts of ragged length, more than there are slots."""
        generator = torch.Generator().manual_seed(0)
        lengths = (40, 700, 300, 1500, 90) if self.on_cuda else (5, 200, 40)
        return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
