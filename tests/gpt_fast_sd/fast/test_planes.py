"""bf16 weights in two planes: every bit comes back, and the upper plane is e4m3; what they cannot hold stays whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.ops import planes
from tests.helpers import few

EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


@pytest.mark.parametrize("largest", few(range(256), [0, 1, 14, 30, 126, 254, 255]))
def test_every_number_beside_a_larger_one_of_any_exponent_comes_back_and_is_read_as_the_nearest(largest: int) -> None:
    """What is no more than 28 binades below is in the planes, and zero; else the row is whole."""
    size = bits(EVERY).int() & 0x7FFF
    beside = size >> 7 <= largest
    size, lead = size[beside], torch.tensor([largest << 7 | 0x7F], dtype=torch.int16).view(torch.bfloat16)
    weight = torch.stack([lead.expand(len(size)), EVERY[beside]], 1)  # [O, 2]
    held = planes.split(weight)
    assert bits(planes.join(held)).equal(bits(weight))
    is_whole = torch.zeros(len(size), dtype=torch.bool)
    is_whole[held.rows] = True
    fits = (size == 0) | ((size >= 128) & (size >> 7 >= largest - 28)) if 0 < largest < 254 else torch.tensor(False)
    assert is_whole.equal(~fits.expand(len(size)))
    read, exact = planes.reading(held).double(), weight.double()
    assert bits(planes.reading(held)[is_whole]).equal(bits(weight[is_whole]))
    # ties aside, as torch rounds numbers to e4m3; smaller ones than these are read as no more than that
    over = exact / held.scale.double()[:, None]
    normal = ~is_whole[:, None] & (over.abs() >= 2.0**-6)
    nearest = over.float().to(torch.float8_e4m3fn).double()
    assert ((read / held.scale.double()[:, None] - over).abs() == (nearest - over).abs())[normal].all()
    assert (read.abs() <= 2.0**-6 * held.scale.double()[:, None])[~is_whole[:, None] & ~normal].all()


def weight_of(n_out: int, n_in: int, *, whole: int = 0) -> Tensor:
    """Numbers of 24 binades and zeros, in a row some of the smallest; in some rows one that planes do not hold."""
    generator = torch.Generator().manual_seed(n_in)
    sign, size, power = torch.rand(3, n_out, n_in, generator=generator)
    weight = (sign - 0.5).sign() * (1 + size) * torch.exp2(-(24 * power).floor())
    weight[6] *= torch.exp2(-100 + (14 * power[6]).floor())
    weight[:, ::7] = 0
    weight[:whole, 0] = torch.tensor([2.0**-40, 2.0**-130, torch.inf])[:whole]
    return weight.bfloat16()


def test_a_product_is_that_of_the_weight_and_a_drafts_that_of_its_upper_plane() -> None:
    weight, bias = weight_of(40, 96, whole=2), torch.randn(40).bfloat16()
    held, x = planes.split(weight), torch.randn(5, 96).bfloat16()
    assert held.rows.tolist() == [0, 1]
    assert planes.planes_linear(x, held, bias).equal(F.linear(x, weight, bias))
    drafted = planes.planes_linear(x, held, bias, of_draft=True)
    assert drafted.equal(F.linear(x, planes.reading(held), bias))
    assert drafted[:, :2].equal(F.linear(x, weight, bias)[:, :2]) and not drafted.equal(F.linear(x, weight, bias))


@pytest.mark.parametrize("n_in", [32, 576])
def test_the_kernel_of_a_cpu_multiplies_as_the_packed_weight_does_bit_for_bit(n_in: int) -> None:
    if not cpu_linear.packing_builds():
        pytest.skip("no kernel can be built here")
    weight, bias = weight_of(96, n_in), torch.randn(96).bfloat16()
    weight[5] = 0
    held = planes.split(weight)
    assert not len(held.rows)
    upper, lower = cpu_linear.pack_planes(held.upper, held.lower)
    assert all(map(torch.equal, cpu_linear.unpack_planes(upper, lower), held[:2]))
    for n_rows in (1, 3, 8, 31, 130):
        x: Any = torch.randn(n_rows, n_in).bfloat16()
        for plane, exact in ((lower, weight), (None, planes.reading(held))):
            packed = cpu_linear.pack(exact)
            got = cpu_linear.packed_linear(x, upper, bias, held.scale, plane)
            assert got.equal(cpu_linear.packed_linear(x, packed, bias))
            got = cpu_linear.packed_swiglu(x, upper, held.scale, plane)
            assert got.equal(cpu_linear.packed_swiglu(x, packed))
