"""Products with quantized weights on the device, of every precision that it runs, against fp64.

Shapes: M rows, I inputs, O outputs.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast.linear_planes import lay_in_planes
from gpt_fast_sd.quantization.table import TABLE, precision, precision_of, require_precision
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES
from tests.gpu.place import HAS_CUDA, Place, difference
from tests.gpu.truths import TOLERANCE

pytestmark = pytest.mark.usefixtures("bodies")

SIZES = ((4096, 4096), (1024, 14336), (2048, 1024)) if HAS_CUDA else ((64, 128),)  # [O, I]
ROWS = (1, 5, 16, 17, 64, 100, 256, 300) if HAS_CUDA else (1, 5, 40)
# of the weights that a precision stands for; of float8, and planes of drafts, the rows are rounded to it, too
ROUNDED = {
    "int8": TOLERANCE[BF16],
    "int4": TOLERANCE[BF16],
    "planes": 0.05 if HAS_CUDA else TOLERANCE[BF16],
    "float8": 0.05,
}
# how far weights are from those that they were made from
WEIGHTS = {"int8": 0.012, "int4": 0.15, "planes": 0.035, "float8": 0.035}


def case(place: Place, n_rows: int, n_in: int, n_out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [M, I], a weight [O, I] and a bias [O], on the device."""
    torch.manual_seed(n_rows)
    x, weight, bias = torch.randn(n_rows, n_in), torch.randn(n_out, n_in) * n_in**-0.5, torch.randn(n_out)
    there = place.put(x.to(dtype), weight.to(dtype), bias.to(dtype))
    return there[0], there[1], there[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_int8_weights_multiply_as_in_fp64(place: Place, size: tuple[int, int], n_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = case(place, n_rows, size[1], size[0], dtype)
    integers, scale = kernels.quantize_rows(weight)
    expected = F.linear(x.double(), integers.double() * scale.double()[:, None], bias.double())
    assert difference(kernels.int8_linear(x, integers, scale, bias), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("n_rows", (16, 32, 64, 200) if HAS_CUDA else (16,))
def test_a_rows_bits_are_its_own(place: Place, n_rows: int) -> None:
    x, weight, _ = case(place, n_rows, 4096, 4096, BF16)
    integers, scale = kernels.quantize_rows(weight)
    expected = kernels.int8_linear(x, integers, scale, None)
    for n in (n_rows, n_rows // 2 + 1):
        others = torch.randn_like(x[:n])
        others[n // 2] = x[3]
        got = kernels.int8_linear(others, integers, scale, None)[n // 2]
        # a library may sum rows of a CPU's product in several ways
        assert got.equal(expected[3]) if place.on_cuda else difference(got, expected[3]) <= TOLERANCE[BF16]


def runs(name: str) -> bool:
    """Whether this machine runs weights of that precision."""
    with contextlib.suppress(ValueError):
        require_precision(name, torch.device("cuda" if HAS_CUDA else "cpu"), BF16)
        return True
    return False


@pytest.mark.parametrize("name", [name for name in TABLE if runs(name)])
def test_what_the_device_runs_multiplies_as_its_weights_do_in_fp64(place: Place, name: str) -> None:
    for n_out, n_in in SIZES:
        x, weight, _ = case(place, 5, n_in, n_out, BF16)
        plain = Linear(n_in, n_out, bias=False, device="meta")
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        if name == "planes":  # of which both are the weight
            lay_in_planes(plain, weight)
            for rows in (x, x.repeat(60, 1)):
                assert difference(plain(rows), rows.double() @ weight.double().t()) <= TOLERANCE[BF16]
        linear = precision(name, place.device).of(plain)
        assert precision_of(linear) == name
        with torch.inference_mode():
            # what the weights stand for: products with one input at a time
            seen = torch.cat([linear(row) for row in torch.eye(n_in, dtype=BF16, device=place.device).split(256)]).t()
            got = linear(x)
        assert difference(seen, weight) <= WEIGHTS[name]
        assert difference(got, x.double() @ seen.double().t()) <= ROUNDED[name]
