"""Products of integers in PyTorch: near the weight that they were made from, with the same bits on every CPU.

Packed they are in test_packing.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Linear

from gpt_fast_sd.fast import pack, quantize_rows, unpack
from gpt_fast_sd.fast.linear_int8 import Int8Linear
from gpt_fast_sd.fast.ops import int8

BF16 = torch.bfloat16


@pytest.mark.parametrize("n_in", [64, 1024, 1536])
def test_a_cpu_that_saturates_products_of_bytes_gives_the_same_bits(n_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Int8Linear(Linear(n_in, 48, bias=False).to(BF16).requires_grad_(False).weight, None)
    x = torch.randn(9, n_in, generator=torch.Generator().manual_seed(2)).to(BF16)
    expected = linear(x)
    monkeypatch.setattr(int8, "has_vnni", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    assert linear(x).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_weight_is_kept_to_half_a_step_of_its_rows_scale(dtype: torch.dtype) -> None:
    weight = torch.randn(2 * int8.ROWS_AT_ONCE + 3, 40).to(dtype)
    weight[7] = 0
    integers, scale = quantize_rows(weight)
    assert integers.dtype == torch.int8 and scale.dtype == torch.float32 and integers.abs().max() == 127
    assert (integers.float() * scale[:, None] - weight.float()).abs().max(1).values.le(scale * 0.5001).all()
    assert not integers[7].any()
    alone = quantize_rows(weight[5:6])
    assert alone[0].equal(integers[5:6]) and alone[1].equal(scale[5:6])


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_in_pytorch_is_near_that_of_fp64(bias: bool) -> None:
    plain = Linear(200, 96, bias=bias).requires_grad_(False)
    linear, plus = Int8Linear(plain.weight, plain.bias), plain.bias.double() if bias else None
    x = torch.randn(3, 7, 200)
    expected = nn.functional.linear(x.double(), plain.weight.double(), plus)
    got = linear(x)
    assert got.dtype == torch.float32 and got.shape == (3, 7, 96)
    # weights are off by up to 1/254 of their row's largest, which is nearly twice what is typical of uniform ones
    assert 0 < (got - expected).norm() <= 0.006 * expected.norm()
    exact = nn.functional.linear(x.double(), linear.weight * linear.scale.double()[:, None], plus)
    # x is off by up to 2^-15 of its row's largest, which is three times what is typical
    assert (got - exact).norm() <= 1e-4 * exact.norm()


def test_packing_int8_weights_is_undone_by_unpacking() -> None:
    weight = torch.randint(-127, 128, (96, 192), dtype=torch.int8)
    assert not pack(weight).equal(weight) and unpack(pack(weight)).equal(weight)
