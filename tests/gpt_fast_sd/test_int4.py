"""int4 weights: near what they were made from, and their products those of the bf16 weights that they stand for.

Or, for few rows, whole sums of each block, whose bits are those of PyTorch's.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd.fast import (
    BLOCK,
    Int4,
    dequantize_blocks,
    int4_by_sums,
    int4_linear,
    pack,
    pack_int4,
    packed_linear,
    packed_swiglu,
    power_between,
    quantize_blocks,
    unpack_int4,
)
from gpt_fast_sd.fast.cpu import build
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.cpu.packing import PackedInt4Linear, SummedInt4Linear, pack_linears
from gpt_fast_sd.fast.linear_int4 import Int4Linear

BF16 = torch.bfloat16
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 130]
SIZES = [(32, 32), (96, 64), (64, 576), (1056, 96)]
OF_64 = [(32, 64), (96, 64), (64, 576), (1056, 192)]
KINDS = {False: PackedInt4Linear, True: SummedInt4Linear}  # few rows or not


def weight_of(n_out: int, n_in: int, *, seed: int = 0) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed))


def linear_of(n_out: int, n_in: int, *, bias: bool = False, dtype: torch.dtype = BF16) -> tuple[Int4Linear, Tensor]:
    """An int4 product, and the weight that it was made from."""
    plain = Linear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)
    return Int4Linear(quantize_blocks(plain.weight), plain.bias, dtype), plain.weight


def packed(linear: Int4Linear, few_rows: bool = False) -> PackedInt4Linear:
    if not pack_linears(linear, few_rows=few_rows):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    assert isinstance(linear, PackedInt4Linear) and type(linear) is KINDS[few_rows]
    return linear


def rounded(block: list[float]) -> tuple[float, float]:
    """The root mean square error of a block's nearest numbers between its ends, as an obvious loop, and its scale."""
    least, scale = min(block), (max(block) - min(block)) / 15
    errors = [(least + scale * round((x - least) / scale) - x) ** 2 for x in block]
    return (sum(errors) / len(block)) ** 0.5, scale


@pytest.fixture
def threads() -> Iterator[None]:
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that may not use tiles, and so multiplies by vectors."""
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    build.library.cache_clear()
    cpu_linear.kernel_for.cache_clear()
    yield
    build.library.cache_clear()
    cpu_linear.kernel_for.cache_clear()


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_out", "n_in"), SIZES)
def test_the_kernel_has_the_bits_of_the_bf16_weight_for_any_number_of_rows(n_out: int, n_in: int, bias: bool) -> None:
    linear, _ = linear_of(n_out, n_in, bias=bias)
    weight = dequantize_blocks(linear.held, BF16)
    kernel, bf16 = packed(linear), pack(weight)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * torch.logspace(-6, 6, n_rows)[:, None].to(BF16)
        got = kernel(x)
        assert got.dtype == BF16 and got.is_contiguous()
        assert got.equal(packed_linear(x, bf16, linear.bias))
        plus = None if linear.bias is None else linear.bias.double()
        exact = nn.functional.linear(x.double(), weight.double(), plus)
        # one rounding to bf16, and fp32 sums of n_in products that may cancel
        size = x.double().norm(dim=1, keepdim=True)
        assert (got - exact).abs().le(2**-8 * exact.abs() + 1e-5 * size).all()


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("n_out", "n_in"), SIZES[:3])
def test_so_it_has_on_a_cpu_without_tiles(n_out: int, n_in: int) -> None:
    test_the_kernel_has_the_bits_of_the_bf16_weight_for_any_number_of_rows(n_out, n_in, False)


@pytest.mark.parametrize(("n_out", "n_in"), SIZES[:3])
def test_swiglu_has_the_bits_of_the_bf16_weight(n_out: int, n_in: int) -> None:
    linear, _ = linear_of(n_out, n_in)
    bf16 = pack(dequantize_blocks(linear.held, BF16))
    kernel = packed(linear)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * 3
        assert kernel.swiglu(x).equal(packed_swiglu(x, bf16))


def test_powers_of_outputs_multiply_their_sums() -> None:
    linear, _ = linear_of(64, 64, bias=True)
    linear.scale.data = torch.exp2(torch.arange(64) % 9 - 4.0)
    weight = dequantize_blocks(linear.held, BF16)
    x = torch.randn(5, 64).to(BF16)
    assert packed(linear)(x).equal(packed_linear(x, pack(weight), linear.bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_out", "n_in"), OF_64)
def test_by_sums_it_has_the_bits_of_pytorch_for_any_number_of_rows(n_out: int, n_in: int, bias: bool) -> None:
    linear, _ = linear_of(n_out, n_in, bias=bias)
    held, weight = linear.in_order(), dequantize_blocks(linear.held, torch.float64)
    held = Int4(*(part.clone() for part in held))
    kernel = packed(linear, few_rows=True)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * torch.logspace(-6, 6, n_rows)[:, None].to(BF16)
        got = kernel(x)
        assert got.dtype == BF16 and got.is_contiguous()
        assert got.equal(int4_by_sums(x, held, linear.bias))
        plus = None if linear.bias is None else linear.bias.double()
        exact = nn.functional.linear(x.double(), weight, plus)
        # one rounding to bf16, and x off by up to 2^-15 of its row's largest, which is three times what is typical
        size = x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)
        assert (got - exact).abs().le(2**-8 * exact.abs() + 2e-4 * size).all()


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("n_out", "n_in"), OF_64[:3])
def test_so_it_has_by_sums_on_a_cpu_without_tiles(n_out: int, n_in: int) -> None:
    test_by_sums_it_has_the_bits_of_pytorch_for_any_number_of_rows(n_out, n_in, False)


@pytest.mark.parametrize(("n_out", "n_in"), OF_64[:3])
def test_swiglu_by_sums_is_that_of_its_fp32_values(n_out: int, n_in: int) -> None:
    linear, _ = linear_of(n_out, n_in)
    held = Int4(*(part.clone() for part in linear.in_order()))
    kernel = packed(linear, few_rows=True)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * 3
        gate, up = int4_by_sums(x.float(), held, None).unflatten(-1, (-1, 2)).unbind(-1)
        expected = nn.functional.silu(gate.double()) * up.double()
        # one rounding to bf16; the exponential is off by 3e-6
        torch.testing.assert_close(kernel.swiglu(x).double(), expected, rtol=2**-8 + 1e-5, atol=1e-30)


def test_inputs_that_64_does_not_divide_are_not_summed() -> None:
    linear, _ = linear_of(64, 96)
    if not pack_linears(linear, few_rows=True):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    assert type(linear) is PackedInt4Linear


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("n_threads", [2, 3])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(n_threads: int, few_rows: bool) -> None:
    kernel = packed(linear_of(160, 128)[0], few_rows)
    x = torch.randn(130, 128).to(BF16)
    torch.set_num_threads(1)
    alone = torch.cat([kernel(x[i : i + 1]) for i in range(len(x))])
    gated = torch.cat([kernel.swiglu(x[i : i + 1]) for i in range(len(x))])
    torch.set_num_threads(n_threads)
    for n_rows in ROWS:
        assert kernel(x[:n_rows]).equal(alone[:n_rows])
        assert kernel.swiglu(x[-n_rows:]).equal(gated[-n_rows:])


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("apart", [128, 136, 1024])
def test_where_rows_lie_changes_no_bit(apart: int, few_rows: bool) -> None:
    kernel = packed(linear_of(64, 128)[0], few_rows)
    wide = torch.randn(70, apart).to(BF16)
    for begin in (0, 7) if apart > 135 else (0,):
        x = wide[:, begin : begin + 128]
        assert kernel(x).equal(torch.cat([kernel(row.clone()[None]) for row in x]))


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_in_a_row_reaches_no_other(bad: float, few_rows: bool) -> None:
    kernel = packed(linear_of(64, 64)[0], few_rows)
    x = torch.randn(37, 64).to(BF16)
    clean = kernel(x)
    x[[0, 16, 36], 5] = bad
    got = kernel(x)
    others = [i for i in range(37) if i not in (0, 16, 36)]
    assert got[others].equal(clean[others])
    assert not got[[0, 16, 36]].isfinite().any()


@pytest.mark.parametrize("few_rows", [None, False, True])
def test_a_row_of_zeros_gives_zeros_and_no_row_at_all_gives_none(few_rows: bool | None) -> None:
    linear, _ = linear_of(64, 64)
    linear = linear if few_rows is None else packed(linear, few_rows)
    assert not linear(torch.zeros(3, 64).to(BF16)).any()
    assert linear(torch.zeros(0, 64).to(BF16)).shape == (0, 64)


@pytest.mark.parametrize("few_rows", [False, True])
def test_the_operators_are_what_they_say_for_int4_weights(few_rows: bool) -> None:
    kernel, x = packed(linear_of(96, 64)[0], few_rows), torch.randn(5, 64).to(BF16)
    for operator, bias in (
        (torch.ops.gpt_fast_sd.cpu_linear, (torch.randn(96).to(BF16),)),
        (torch.ops.gpt_fast_sd.cpu_swiglu, ()),
    ):
        torch.library.opcheck(operator.default, (x, kernel.weight, *bias, kernel.scale, kernel.blocks, few_rows))


@pytest.mark.parametrize("few_rows", [None, False, True])
def test_what_is_saved_of_it_is_a_weight_in_the_dtype_it_was_made_from(few_rows: bool | None) -> None:
    linear, weight = linear_of(64, 128, bias=True)
    stands_for = dequantize_blocks(linear.held, BF16)
    x = torch.randn(3, 128).to(BF16)
    linear = linear if few_rows is None else packed(linear, few_rows)
    before, saved = linear(x), linear.state_dict()
    assert saved.keys() == {"weight", "bias"} and saved["weight"].equal(stands_for)
    linear.load_state_dict({"weight": torch.zeros(64, 128), "bias": saved["bias"]})
    assert linear(x).equal(linear.bias.expand(3, -1))
    linear.load_state_dict({"weight": weight, "bias": saved["bias"]})
    assert linear(x).equal(before)


def test_what_the_kernel_does_not_serve_is_multiplied_by_pytorch() -> None:
    for n_out, dtype in ((48, BF16), (64, torch.float32), (64, torch.float16)):
        linear, _ = linear_of(n_out, 64, dtype=dtype)
        assert not pack_linears(linear) and type(linear) is Int4Linear
        x = torch.randn(2, 64).to(dtype)
        assert linear(x).equal(int4_linear(x, linear.held, None)) and linear(x).dtype == dtype


def test_other_tensors_are_refused() -> None:
    kernel = packed(linear_of(64, 64)[0])
    with pytest.raises(TypeError, match=r"packed weights multiply bf16, got torch\.float32"):
        kernel(torch.randn(2, 64))
    with pytest.raises(TypeError, match=r"packed int4 weights have fp16 blocks, got torch\.float32 \(64, 2, 2\)"):
        packed_linear(torch.randn(2, 64).to(BF16), kernel.weight, None, kernel.scale, kernel.blocks.float())
    with pytest.raises(ValueError, match=r"packed weights of 64 inputs need rows of 64 numbers, got \(2, 32\)"):
        kernel(torch.randn(2, 32).to(BF16))


def test_a_held_weight_is_a_third_of_bf16() -> None:
    held: Int4 = quantize_blocks(weight_of(64, 4096))
    assert sum(part.nbytes for part in held) == 64 * (4096 * 5 // 8 + 4)
