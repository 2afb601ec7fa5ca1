"""Products of integers: packed they have the bits of PyTorch's, for any number of rows, in any company.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd.fast import int8_linear, pack, quantize_rows, unpack
from gpt_fast_sd.fast.cpu import build
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.cpu.packing import PackedInt8Linear, pack_linears
from gpt_fast_sd.fast.linear_int8 import Int8Linear
from gpt_fast_sd.fast.ops import int8

BF16 = torch.bfloat16
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 130]
SIZES = [(32, 64), (96, 64), (64, 576), (1056, 192)]


def linear_of(n_out: int, n_in: int, *, bias: bool = False, dtype: torch.dtype = BF16) -> tuple[Int8Linear, Tensor]:
    """An int8 product, and the weight that it was made from."""
    plain = Linear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)
    return Int8Linear(plain.weight, plain.bias), plain.weight


def packed(linear: Int8Linear) -> PackedInt8Linear:
    if not pack_linears(linear):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    assert isinstance(linear, PackedInt8Linear)
    return linear


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


@pytest.mark.parametrize("n_in", [64, 1024, 1536])
def test_a_cpu_that_saturates_products_of_bytes_gives_the_same_bits(n_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, _ = linear_of(48, n_in)
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
    linear, weight = linear_of(96, 200, bias=bias, dtype=torch.float32)
    x = torch.randn(3, 7, 200)
    expected = nn.functional.linear(x.double(), weight.double(), None if linear.bias is None else linear.bias.double())
    got = linear(x)
    assert got.dtype == torch.float32 and got.shape == (3, 7, 96)
    # weights are off by up to 1/254 of their row's largest, which is nearly twice what is typical of uniform ones
    assert 0 < (got - expected).norm() <= 0.006 * expected.norm()
    weight = linear.weight * linear.scale.double()[:, None]
    exact = nn.functional.linear(x.double(), weight, None if linear.bias is None else linear.bias.double())
    # x is off by up to 2^-15 of its row's largest, which is three times what is typical
    assert (got - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_out", "n_in"), SIZES)
def test_the_kernel_has_the_bits_of_pytorch_for_any_number_of_rows(n_out: int, n_in: int, bias: bool) -> None:
    linear, _ = linear_of(n_out, n_in, bias=bias)
    weight, scale = linear.weight.clone(), linear.scale
    kernel = packed(linear)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * torch.logspace(-6, 6, n_rows)[:, None].to(BF16)
        got = kernel(x)
        assert got.dtype == BF16 and got.is_contiguous()
        assert got.equal(int8_linear(x, weight, scale, linear.bias))


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("n_out", "n_in"), SIZES[:3])
def test_so_it_has_on_a_cpu_without_tiles(n_out: int, n_in: int) -> None:
    test_the_kernel_has_the_bits_of_pytorch_for_any_number_of_rows(n_out, n_in, False)


@pytest.mark.parametrize(("n_out", "n_in"), [(32, 64), (96, 64), (192, 576)])
def test_swiglu_is_that_of_its_fp32_values(n_out: int, n_in: int) -> None:
    linear, _ = linear_of(n_out, n_in)
    weight = linear.weight.clone()
    kernel = packed(linear)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * 3
        gate, up = int8_linear(x.float(), weight, linear.scale, None).unflatten(-1, (-1, 2)).unbind(-1)
        expected = nn.functional.silu(gate.double()) * up.double()
        # one rounding to bf16; the exponential is off by 3e-6
        torch.testing.assert_close(kernel.swiglu(x).double(), expected, rtol=2**-8 + 1e-5, atol=1e-30)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n_threads", [2, 3])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(n_threads: int) -> None:
    kernel = packed(linear_of(160, 128)[0])
    x = torch.randn(130, 128).to(BF16)
    torch.set_num_threads(1)
    alone = torch.cat([kernel(x[i : i + 1]) for i in range(len(x))])
    gated = torch.cat([kernel.swiglu(x[i : i + 1]) for i in range(len(x))])
    torch.set_num_threads(n_threads)
    for n_rows in ROWS:
        assert kernel(x[:n_rows]).equal(alone[:n_rows])
        assert kernel.swiglu(x[-n_rows:]).equal(gated[-n_rows:])


@pytest.mark.parametrize("apart", [128, 136, 1024])
def test_where_rows_lie_changes_no_bit(apart: int) -> None:
    kernel = packed(linear_of(64, 128)[0])
    wide = torch.randn(70, apart).to(BF16)
    for begin in (0, 7) if apart > 135 else (0,):
        x = wide[:, begin : begin + 128]
        assert kernel(x).equal(torch.cat([kernel(row.clone()[None]) for row in x]))


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_in_a_row_reaches_no_other(bad: float, by_kernel: bool) -> None:
    linear, _ = linear_of(64, 64)
    linear = packed(linear) if by_kernel else linear
    x = torch.randn(37, 64).to(BF16)
    clean = linear(x)
    x[[0, 16, 36], 5] = bad
    got = linear(x)
    others = [i for i in range(37) if i not in (0, 16, 36)]
    assert got[others].equal(clean[others])
    assert not got[[0, 16, 36]].isfinite().any()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_row_of_zeros_gives_zeros_and_no_row_at_all_gives_none(by_kernel: bool) -> None:
    linear, _ = linear_of(64, 64)
    linear = packed(linear) if by_kernel else linear
    assert not linear(torch.zeros(3, 64).to(BF16)).any()
    assert linear(torch.zeros(0, 64).to(BF16)).shape == (0, 64)


def test_the_operators_are_what_they_say_for_int8_weights() -> None:
    kernel, x = packed(linear_of(96, 64)[0]), torch.randn(5, 64).to(BF16)
    for operator, bias in (
        (torch.ops.gpt_fast_sd.cpu_linear, (torch.randn(96).to(BF16),)),
        (torch.ops.gpt_fast_sd.cpu_swiglu, ()),
    ):
        torch.library.opcheck(operator.default, (x, kernel.weight, *bias, kernel.scale))


def test_packing_int8_weights_is_undone_by_unpacking() -> None:
    weight = torch.randint(-127, 128, (96, 192), dtype=torch.int8)
    assert not pack(weight).equal(weight) and unpack(pack(weight)).equal(weight)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_what_is_saved_of_it_is_a_weight_in_the_dtype_it_was_made_from(by_kernel: bool) -> None:
    linear, weight = linear_of(64, 128, bias=True)
    x = torch.randn(3, 128).to(BF16)
    linear = packed(linear) if by_kernel else linear
    before, saved = linear(x), linear.state_dict()
    assert saved.keys() == {"weight", "bias"} and saved["weight"].dtype == BF16
    # as near as int8 is, and a rounding to bf16
    assert (saved["weight"] - weight).abs().max() <= 0.006 * weight.abs().max()
    linear.load_state_dict({"weight": torch.zeros(64, 128), "bias": saved["bias"]})
    assert linear(x).equal(linear.bias.expand(3, -1))
    linear.load_state_dict({"weight": weight, "bias": saved["bias"]})
    assert linear(x).equal(before)


def test_what_the_kernel_does_not_serve_is_multiplied_by_pytorch() -> None:
    for n_out, n_in, dtype in ((64, 96, BF16), (48, 64, BF16), (64, 64, torch.float32)):
        linear, _ = linear_of(n_out, n_in, dtype=dtype)
        assert not pack_linears(linear) and type(linear) is Int8Linear
        assert linear(torch.randn(2, n_in).to(dtype)).dtype == dtype


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"packed weights multiply bf16, got torch\.float32"):
        packed(linear_of(64, 64)[0])(torch.randn(2, 64))
