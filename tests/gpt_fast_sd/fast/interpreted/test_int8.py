"""Interpreted products with narrow weights: a row's bits are its own, and many rows take one copy; see test_fuzz, too.

Shapes: M rows, I inputs, O outputs.
"""

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import int4_tiles, int8, planes
from gpt_fast_sd.fast.triton import common as triton_common
from gpt_fast_sd.fast.triton import int4 as int4_triton
from gpt_fast_sd.fast.triton import int8 as int8_triton
from tests.gpt_fast_sd.fast.dense import BF16, NAN
from tests.helpers import Noting, few


def case(n_rows: int, n_in: int, n_out: int, *, biased: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x [M, I], rows of a wider tensor; an int8 weight [O, I] with its scales [O]; and a bias [O]."""
    generator = torch.Generator().manual_seed(n_rows)
    x = torch.randn(n_rows, n_in + 24, generator=generator).to(BF16)[:, :n_in]
    weight = torch.randn(n_out, n_in, generator=generator)
    weight[0, 0], weight[-1] = -3 * weight[0].abs().max(), 0
    integers, scale = torch.zeros(n_out, n_in, dtype=torch.int8), torch.zeros(n_out)
    for i, row in enumerate(weight):  # torch.empty is patched
        spread = row.abs().max().clamp(min=1e-30) / 127
        integers[i], scale[i] = (row / spread).round().to(torch.int8), spread
    return x, integers, scale, torch.randn(n_out, generator=generator).to(BF16) if biased else None


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = int8_triton.linear(x, weight, scale, bias, arch=90)
    return out


@pytest.mark.parametrize("n_rows", few([16, 32, 64, 130], [16, 64]))
def test_a_rows_bits_depend_on_no_other_row_and_for_a_kind_of_tile_not_on_their_number(n_rows: int) -> None:
    x, *weight = case(n_rows, 200, 40)
    expected = linear(x, *weight)
    fewest = {16: 1, 32: 17, 64: 33, 130: 33}[n_rows]
    for begin in (0, n_rows - fewest):
        assert linear(x[begin : begin + fewest], *weight).equal(expected[begin : begin + fewest])
    spoilt = x.clone()
    spoilt[1:] = NAN
    assert linear(spoilt, *weight)[0].equal(expected[0])


def test_many_rows_are_multiplied_with_a_copy_that_is_made_in_one_pass() -> None:
    x, weight, scale, bias = case(int8.MOST_TILED + 1, 64, 40, biased=True)
    with Noting(lambda op, _: None if op.is_view else op.__name__) as passes:
        got = int8._int8_linear._init_fn(x, weight, scale, bias)
    assert [name for name in passes.seen if name] == ["empty_like.default", "mul.out", "addmm.default"]
    assert got.equal(torch.nn.functional.linear(x, (weight * scale[:, None]).to(BF16), bias))


def test_rows_become_float8_in_one_kernel_as_by_torch() -> None:
    rows = torch.randn(3, 9000, generator=torch.Generator().manual_seed(0)).to(BF16)
    rows[1], rows[2, :5] = 0, torch.tensor([300.0, -500, 2.0**-20, 0, 1])
    (numbers, scale), (expected, own) = int8_triton.float8_rows(rows, int8.LEAST), int8.scaled(rows, int8.FLOAT8)
    # the interpreter rounds up within a binade, but not to the next one
    assert scale.equal(own) and (numbers.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.03


@pytest.mark.parametrize("n_rows", few([1, 17, 63, planes.MOST_TILED + 1], [17, planes.MOST_TILED + 1]))
def test_weights_in_planes_or_kept_whole_multiply_as_in_fp64(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "triton_serves", lambda device: True)
    monkeypatch.setattr(triton_common, "architecture", lambda: 90)
    x, integers, scale, bias = case(n_rows, 200, 40, biased=True)
    assert bias is not None
    weight = (integers * scale[:, None]).to(BF16)
    weight[3, 5], weight[:, 9] = 2.0**-40, 0
    held = planes.split(weight)
    for lower, exact in ((held.lower, weight), (None, planes.reading(held))):
        got = planes._planes_linear._init_fn(x, held.upper, lower, *held[2:], bias)
        expected, most = x.double() @ exact.double().t() + bias.double(), x.double().abs() @ exact.double().abs().t()
        assert ((got.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-20 * most).all()
        is_held = torch.ones(40, dtype=torch.bool).index_fill(0, held.rows, lower is None)
        assert int8_triton.joined(held.upper, lower, held.scale)[is_held].equal(exact[is_held])


@pytest.mark.parametrize("n_rows", few([1, 17, 64, 70], [17]))
def test_int4_weights_in_tiles_multiply_as_in_fp64(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_common, "architecture", lambda: 90)
    generator = torch.Generator().manual_seed(n_rows)
    numbers = torch.randint(16, (128, 1280), generator=generator).to(torch.uint8)  # 10 groups in 3 parts
    scale, zero = (torch.randn(10, 128, generator=generator).to(BF16) for _ in range(2))
    held = int4_tiles.Int4Tiles(int4_tiles.tiled(numbers), torch.stack([scale, zero], -1))
    assert int4_tiles.untiled(held.numbers).equal(numbers)
    whole = numbers.double().unflatten(1, (10, 128)) - 8
    exact = (whole * scale.double().t()[..., None] + zero.double().t()[..., None]).flatten(1)
    x = torch.randn(n_rows, 1300, generator=generator).to(BF16)[:, :1280]
    ones = torch.ones(64, 128, dtype=BF16)
    got = int4_tiles._int4_tiles_linear._init_fn(x, *held, ones)
    most = x.double().abs() @ (exact.abs() + 136 * scale.double().abs().t().repeat_interleave(128, 1)).t()
    assert len(got) == 3 and ((got.double().sum(0) - x.double() @ exact.t()).abs() <= 2.0**-21 * most).all()
    spoilt = x.clone()
    spoilt[:-1] = NAN
    assert int4_tiles._int4_tiles_linear._init_fn(spoilt, *held, ones)[:, -1].equal(got[:, -1])
    for copied in (int4_triton.untile(*held), int4_tiles.dequantize_tiles(held)):
        assert copied.dtype == BF16 and ((copied.double() - exact).abs() <= 2.0**-8 * exact.abs()).all()
