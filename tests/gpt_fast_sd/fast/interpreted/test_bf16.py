"""The interpreter computes bf16 as torch does: bit for bit, but for the order of sums."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

N = 256


@triton.jit
def arithmetic(p_x, p_y, p_out, OP: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_y = tl.load(p_x + o), tl.load(p_y + o)  # [N] each
    if OP == "add":
        b_out = b_x + b_y
    elif OP == "sub":
        b_out = b_x - b_y
    elif OP == "mul":
        b_out = b_x * b_y
    elif OP == "div":
        b_out = b_x / b_y
    elif OP == "neg":
        b_out = -b_x
    elif OP == "abs":
        b_out = tl.abs(b_x)
    elif OP == "maximum":
        b_out = tl.maximum(b_x, b_y)
    elif OP == "where":
        b_out = tl.where(b_x < b_y, b_x, b_y)
    elif OP == "scaled":
        b_out = b_x * 0.3
    elif OP == "clamp":
        b_out = tl.clamp(b_x, -0.5, 0.5)
    elif OP == "fma":
        b_out = tl.fma(b_x, b_y, b_x)
    elif OP == "filled":
        b_out = b_x + tl.full([N], 0.3, tl.bfloat16)
    elif OP == "masked":
        b_out = tl.load(p_x + o, mask=o < N // 2, other=0.3)
    elif OP == "exp":
        b_out = tl.exp(b_x.to(tl.float32))
    tl.store(p_out + o, b_out)


def masked(x: Tensor) -> Tensor:
    return torch.where(torch.arange(N) < N // 2, x, torch.tensor(0.3, dtype=x.dtype))


EXPECTED = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "where": lambda x, y: torch.where(x < y, x, y),
    "scaled": lambda x, y: x * torch.tensor(0.3, dtype=torch.bfloat16),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "fma": lambda x, y: (x.double() * y.double() + x.double()).to(torch.bfloat16),
    "filled": lambda x, y: x + torch.tensor(0.3, dtype=torch.bfloat16),
    "masked": lambda x, y: masked(x),
    "exp": lambda x, y: x.float().exp().to(torch.bfloat16),
}


@pytest.mark.parametrize("op", EXPECTED)
def test_arithmetic_is_torchs_bit_for_bit(op: str) -> None:
    x, y = torch.randn(2, N).to(torch.bfloat16)
    out = torch.full((N,), torch.nan, dtype=torch.bfloat16)
    arithmetic[(1,)](x, y, out, OP=op, N=N)
    assert torch.equal(out, EXPECTED[op](x, y))


@triton.jit
def copy(p_x, p_out, N: tl.constexpr, CAST: tl.constexpr):
    o = tl.arange(0, N)
    b_x = tl.load(p_x + o)  # [N]
    tl.store(p_out + o, b_x.to(p_out.dtype.element_ty) if CAST else b_x)


@pytest.mark.parametrize("cast", [True, False], ids=["cast", "store"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int8])
def test_casts_to_and_from_bf16_are_torchs(dtype: torch.dtype, cast: bool) -> None:
    values = (torch.randn(4096) * 100).to(dtype)
    if dtype == torch.float32:  # ties, the largest that rounds to a finite one, infinities and NaN, subnormal numbers
        ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x00018000], dtype=torch.int32)
        values[:8] = torch.cat((ties.view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan])))
    narrow = torch.zeros(4096, dtype=torch.bfloat16)
    copy[(1,)](values, narrow, N=4096, CAST=cast)
    assert torch.equal(narrow.nan_to_num(7.0), values.to(torch.bfloat16).nan_to_num(7.0))
    wide = torch.zeros(4096, dtype=dtype)
    copy[(1,)](narrow[8:].clone(), wide, N=2048, CAST=cast)
    assert torch.equal(wide[:2048], narrow[8:2056].to(dtype))


@triton.jit
def product(p_x, p_y, p_out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_x = tl.load(p_x + o_m[:, None] * K + o_k)  # [M, K]
    b_y = tl.load(p_y + o_k[:, None] * N + o_n)  # [K, N]
    tl.store(p_out + o_m[:, None] * N + o_n, tl.dot(b_x, b_y))


def test_a_product_is_torchs_in_fp32() -> None:
    x, y = torch.randn(16, 64).to(torch.bfloat16), torch.randn(64, 32).to(torch.bfloat16)
    out = torch.full((16, 32), torch.nan)
    product[(1,)](x, y, out, M=16, N=32, K=64)
    # products of bf16 are exact in fp32, so only the order of 64 sums of about 1 differs
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=0, atol=64 * 8 * 2**-24)


@triton.jit
def reduce(p_x, p_out, WIDEN: tl.constexpr, N: tl.constexpr):
    b_x = tl.load(p_x + tl.arange(0, N))  # [N]
    tl.store(p_out, tl.sum(b_x.to(tl.float32) if WIDEN else b_x, 0))


def test_a_sum_of_bf16_is_refused_and_one_of_widened_values_right() -> None:
    x, out = torch.randn(N).to(torch.bfloat16), torch.full((1,), torch.nan)
    with pytest.raises(Exception, match="widen the block to fp32"):
        reduce[(1,)](x, out, WIDEN=False, N=N)
    reduce[(1,)](x, out, WIDEN=True, N=N)
    torch.testing.assert_close(out[0], x.float().sum(), rtol=0, atol=1e-4)  # order of 256 sums
