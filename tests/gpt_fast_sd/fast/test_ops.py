"""Each of our operators meets torch.library's requirements: schema, fake, and use inside a compiled graph.

Shapes: B = 2 rows, T = 3 tokens in this call, S = 320 entries, N = 4 query heads, K = 2 kv heads, H = 64 head dim.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast import cpu, ops
from gpt_fast_sd.fast.ops.layer import flat
from gpt_fast_sd.model import FORMATS
from tests.gpt_fast_sd.fast.references import layer_of  # and with it what operators run on a CPU

B, T, S, N, K, H = 2, 3, 320, 4, 2, 64

for package in (ops, cpu):  # not of triton/, whose bodies need Triton
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def queries() -> Tensor:
    """bf16 [B, N, T, H], a transposed view as the model gives it."""
    return torch.randn(B, T, N, H).bfloat16().transpose(1, 2)


def entries() -> Tensor:
    """bf16 [B, K, S, H]"""
    return torch.randn(B, K, S, H).bfloat16()


def layer() -> tuple[Any, ...]:
    """A layer of bf16 as operators take it."""
    return flat(layer_of(entries(), entries()))


def places() -> Tensor:
    """Where the queries stand, int64 [B, T]; the second row idles past all keys in view."""
    return torch.tensor([[100], [S]]) + torch.arange(T)


def kv_indices() -> Tensor:
    """Whole pages of 16, and an empty one: int64 [B, K, 48]."""
    pages = torch.tensor([[[0, 3, -1], [2, 1, 4]], [[5, 0, 1], [1, -1, -1]]])  # [B, K, 3]
    listed = pages[..., None] * 16 + torch.arange(16)
    return torch.where(pages[..., None] >= 0, listed, -1).flatten(-2)


def window_start() -> Tensor:
    return torch.tensor([96, 96])


def bounds() -> Tensor:
    """Of pages of 16: bf16 [B, K, S // 16, 2H]"""
    return torch.randn(B, K, S // 16, 2 * H).bfloat16()


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "cpu_attention": lambda: (queries(), *layer(), places(), None, 256),
    "cpu_attention_with_mass": lambda: (queries(), *layer(), places(), 256),
    "cpu_linear": lambda: (queries(), kernels.pack(torch.randn(96, H).bfloat16()), torch.randn(96).bfloat16()),
    "cpu_swiglu": lambda: (queries(), kernels.pack(torch.randn(96, H).bfloat16())),
    "cpu_distributions": lambda: (
        torch.randn(B, 50), torch.tensor([0.0, 0.8]), torch.tensor([50, 5]), torch.ones(B, dtype=torch.float64),
        torch.full((B,), -1.0, dtype=torch.float64),
    ),
    "cpu_draw": lambda: (torch.rand(B, 50).softmax(-1), torch.rand(B)),
    "cpu_uniform": lambda: (torch.randint(99, (B,)), torch.randint(99, (B, 3)), 1),
    "int8_linear": lambda: (queries(), *kernels.quantize_rows(torch.randn(96, H)), torch.randn(96).bfloat16()),
    "decode_attention": lambda: (queries(), *layer(), places(), 256, 256),
    "decode_attention_with_mass": lambda: (queries(), *layer(), places(), 256, 256, 64),
    "sparse_attention": lambda: (
        queries(), *layer(), kv_indices(), window_start(), 16, places(), 256, 16,
    ),
    "prefill_attention": lambda: (queries(), *layer(), places(), 256),
    "prefill_attention_with_lse": lambda: (queries(), *layer(), places(), 256),
    "key_mass": lambda: (queries(), *layer(), torch.zeros(B, N, T), places(), 256, 64),
    "top_pages": lambda: (torch.randn(B, K, 20), torch.tensor([[20], [3]]), 5),
    "guided_select": lambda: (
        torch.rand(2, B, K, 20), kv_indices().repeat(2, 1, 1, 1), torch.tensor([True, False]), torch.tensor([6, 6]), 16,
    ),
    "page_bounds": lambda: (*layer(), bounds(), torch.tensor([4, 19]), 3, 16),
    "quest_pages": lambda: (queries(), bounds(), torch.tensor([6, 2]), 3),
    "likeliest": lambda: (-torch.rand(B, 50), torch.tensor([5, 50]), torch.tensor([0.9, 0.5], dtype=torch.float64)),
}  # fmt: skip


def test_every_operator_has_a_case() -> None:
    operators = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "gpt_fast_sd::" in name}
    assert operators == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_what_it_says(name: str) -> None:
    args = CASES[name]()
    if name.startswith("cpu_") and not kernels.cpu_attention_fits(H, torch.bfloat16, FORMATS["bf16"]):
        pytest.skip("this CPU has no bf16 dot products, or there is no compiler")
    torch.library.opcheck(getattr(torch.ops.gpt_fast_sd, name).default, args)
