"""int4 weights: near what they were made from, and their products in PyTorch. Packed they are in test_packing.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd.fast import (
    BLOCK,
    Int4,
    dequantize_blocks,
    pack,
    pack_int4,
    packed_linear,
    power_between,
    quantize_blocks,
    unpack_int4,
)
from gpt_fast_sd.fast.cpu.packing import pack_linears
from gpt_fast_sd.fast.linear_int4 import Int4Linear

BF16 = torch.bfloat16


def weight_of(n_out: int, n_in: int, *, seed: int = 0) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed))


def linear_of(n_out: int, n_in: int, *, bias: bool = False, dtype: torch.dtype = BF16) -> tuple[Int4Linear, Tensor]:
    """An int4 product, and the weight that it was made from."""
    plain = Linear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)
    return Int4Linear(quantize_blocks(plain.weight), plain.bias, dtype), plain.weight


def rounded(block: list[float]) -> tuple[float, float]:
    """The root mean square error of a block's nearest numbers between its ends, as an obvious loop, and its scale."""
    least, scale = min(block), (max(block) - min(block)) / 15
    errors = [(least + scale * round((x - least) / scale) - x) ** 2 for x in block]
    return (sum(errors) / len(block)) ** 0.5, scale


# ---- what is kept of a weight --------------------------------------------------------------------------------------


def test_a_block_is_nearer_than_its_ends_cut_into_fifteen_steps() -> None:
    weight = weight_of(40, 4 * BLOCK)
    error = (dequantize_blocks(quantize_blocks(weight), torch.float32) - weight).unflatten(1, (-1, BLOCK))
    own = error.square().mean(-1).sqrt().flatten()
    plain = torch.tensor([rounded(block)[0] for block in weight.view(-1, BLOCK).tolist()])
    # scales and minima in fp16 are off by 2^-12 of a number at most 4 times a block's deviation
    assert own.le(plain * 1.02).all() and own.mean() < 0.93 * plain.mean()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_row_is_quantized_alone_whatever_its_size(dtype: torch.dtype) -> None:
    sizes = torch.tensor([1.0, 1e-4, 3e-5, 7.0, 1e3])
    weight = (weight_of(5, 96) * sizes[:, None]).to(dtype)
    whole = quantize_blocks(weight)
    error = (dequantize_blocks(whole, torch.float32) - weight.float()).norm(dim=1) / weight.float().norm(dim=1)
    # steps of a fifteenth of a block's range, four deviations; in fp16 3e-5 has few digits itself
    assert error.max() < 0.09
    assert dequantize_blocks(whole, dtype).equal(dequantize_blocks(whole, torch.float32).to(dtype))
    for row in range(5):
        alone = quantize_blocks(weight[row : row + 1])
        assert all(a.equal(b[row : row + 1]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("larger", [1e4, 1e7])
def test_a_block_far_smaller_than_another_of_its_row_keeps_its_digits(larger: float) -> None:
    weight = weight_of(8, 2 * BLOCK)
    weight[:, 0] = larger
    error = (dequantize_blocks(quantize_blocks(weight), torch.float32) - weight)[:, BLOCK:].square().mean(-1).sqrt()
    plain = torch.tensor([rounded(block)[0] for block in weight[:, BLOCK:].tolist()])
    assert error.le(plain * 1.02).all()


def test_numbers_on_such_steps_and_constants_and_zeros_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(16, (8, 3, BLOCK), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, 15
    scale = torch.rand(8, 3, 1, generator=generator).mul(0.1).half().float()
    weight = (levels * scale - (7.5 * scale).half().float()).flatten(1)
    weight[5, :32], weight[6], weight[7, 64:] = 0.25, 0, 0
    # the line through them is found to the digits of fp16
    torch.testing.assert_close(dequantize_blocks(quantize_blocks(weight), torch.float32), weight, rtol=1e-3, atol=1e-4)
    assert not dequantize_blocks(quantize_blocks(weight), torch.float32)[6].any()


def test_many_numbers_are_quantized_as_few_at_a_time() -> None:
    weight = weight_of(2000, 96)
    whole, half = quantize_blocks(weight), quantize_blocks(weight[1000:])
    assert all(a[1000:].equal(b) for a, b in zip(whole, half, strict=True))


def test_blocks_that_are_a_weight_but_for_powers_of_two_are_known() -> None:
    held = quantize_blocks(weight_of(6, 64).to(BF16))
    held = held._replace(power=torch.ones(6))
    weight = dequantize_blocks(held, BF16)
    powers = torch.tensor([1.0, 4.0, 2.0**-9, 1.0, 2.0**13, 0.5])
    found = power_between(held, weight * powers.to(BF16)[:, None])
    assert found is not None and found.equal(powers)
    assert power_between(held, weight * torch.tensor(3.0).to(BF16)) is None
    other = weight.clone()
    other[3, 5] += other[3].abs().amax() / 100
    assert power_between(held, other) is None
    weight[2] = 0
    assert power_between(held, weight) is None


@pytest.mark.parametrize("by_sums", [False, True])
def test_packing_is_undone_by_unpacking(by_sums: bool) -> None:
    held = quantize_blocks(weight_of(96, 160))
    for got, expected in zip(unpack_int4(pack_int4(held, by_sums), by_sums), held, strict=True):
        assert got.equal(expected)


# ---- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_in_pytorch_is_that_of_fp64(bias: bool) -> None:
    linear, weight = linear_of(96, 192, bias=bias, dtype=torch.float32)
    x = torch.randn(3, 7, 192)
    plus = None if linear.bias is None else linear.bias.double()
    got = linear(x)
    assert got.dtype == torch.float32 and got.shape == (3, 7, 96)
    exact = nn.functional.linear(x.double(), dequantize_blocks(linear.held, torch.float64), plus)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)  # fp32 sums
    expected = nn.functional.linear(x.double(), weight.double(), plus)
    assert 0 < (got - expected).norm() <= 0.09 * expected.norm()


def test_powers_of_outputs_multiply_their_sums() -> None:
    linear, _ = linear_of(64, 64, bias=True)
    linear.scale.data = torch.exp2(torch.arange(64) % 9 - 4.0)
    weight = dequantize_blocks(linear.held, BF16)
    x = torch.randn(5, 64).to(BF16)
    if not pack_linears(linear):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    assert linear(x).equal(packed_linear(x, pack(weight), linear.bias))


def test_a_held_weight_is_a_third_of_bf16() -> None:
    held: Int4 = quantize_blocks(weight_of(64, 4096))
    assert sum(part.nbytes for part in held) == 64 * (4096 * 5 // 8 + 4)
