"""bf16 weights in two planes: every bit comes back, and the upper plane is e4m3; what they do not hold stays whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.fast.linear_planes import lay_in_planes, upper_of
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
    is_whole = torch.zeros(len(size), dtype=torch.bool).index_fill(0, held.rows, True)
    fits = (size == 0) | ((size >= 128) & (size >> 7 >= largest - 28)) if 0 < largest < 254 else torch.tensor(False)
    assert is_whole.equal(~fits.expand(len(size)))
    read = planes.reading(held)
    if largest >= 254:  # what a draft would read of such rows might be infinite
        assert (read == 0).all()
        return
    # ties aside, as torch rounds numbers to e4m3; smaller ones than these are read as no more than that
    over, got = (x.double() / held.scale.double()[:, None] for x in (weight, read))
    normal = over.abs() >= 2.0**-6
    nearest = over.float().to(torch.float8_e4m3fn).double()
    assert ((got - over).abs() == (nearest - over).abs())[normal].all()
    assert (got.abs() <= 2.0**-6)[~normal].all()


def test_a_product_is_that_of_the_weight_and_a_drafts_that_of_its_upper_plane() -> None:
    weight, bias, x = (torch.randn(size).bfloat16() for size in ((40, 96), (40,), (5, 96)))
    weight[:3, 0] = torch.tensor([2.0**-40, 2.0**-130, torch.inf])
    held = planes.split(weight)
    expected, drafted = F.linear(x, weight, bias), planes.planes_linear(x, held, bias, of_draft=True)
    assert planes.planes_linear(x, held, bias).equal(expected) and held.rows.tolist() == [0, 1, 2]
    assert drafted.equal(F.linear(x, planes.reading(held), bias)) and not drafted.equal(expected)


def test_where_rows_become_float8_a_draft_multiplies_with_the_plane_as_it_lies_there() -> None:
    weight, x = torch.randn(48, 96).bfloat16(), torch.randn(5, 96).bfloat16()
    weight[:2, 0] = torch.tensor([2.0**-40, torch.nan])
    linear = torch.nn.Linear(96, 48).bfloat16().requires_grad_(False)
    lay_in_planes(linear, weight)
    upper = upper_of(linear, multiplies_float8=True)
    expected = F.linear(x.double(), planes.reading(linear.held).double(), linear.bias.double())
    assert (upper(x) - expected).norm() <= 0.05 * expected.norm() and upper.weight.dtype == torch.float8_e4m3fn
    assert upper.weight.data_ptr() == linear.weight.data_ptr() and upper.bias is linear.bias
