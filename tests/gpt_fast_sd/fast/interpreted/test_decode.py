"""Interpreted flash-decoding against fp64: right at every edge, blind to what it may not see, bit-identical always.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import decode
from gpt_fast_sd.fast.triton import decode as decode_triton
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES, FP16, FP32, INT8, NAN, TOLERANCE, Case, assert_close
from tests.helpers import thinned

SPLIT = 64
ENDS = (37, 0, 191)


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces are full of NaN before a kernel writes them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))


def attend(case: Case, rows: slice = slice(None), n_tokens: int | None = None, n_keys: int | None = None) -> Tensor:
    """The first n_tokens tokens of these rows, with n_keys keys in view; all, if None."""
    out: Tensor = decode_triton.attend(
        case.q[rows, :, :n_tokens], case.layer(rows), case.pos[rows, :n_tokens], n_keys or case.n_keys, SPLIT, arch=89
    )
    return out


def attend_with_mass(case: Case, page: int) -> tuple[Tensor, Tensor]:
    out, mass = decode_triton.attend_with_mass(case.q, case.layer(), case.pos, case.n_keys, SPLIT, page, arch=89)
    return out, mass


@thinned("asked,dtype", [(1, 1), (3, 1), (4, 3), (1, 9), (8, 5)], DTYPES)
def test_attention_is_that_of_fp64_for_any_number_of_queries(asked: tuple[int, int], dtype: torch.dtype) -> None:
    group, n_tokens = asked
    case = Case([max(end, n_tokens - 1) for end in ENDS], n_tokens=n_tokens, group=group, dtype=dtype)
    assert_close(attend(case), case.expected())


def test_queries_may_be_more_than_a_tile_has_rows() -> None:
    case = Case([191], n_tokens=17, group=8, dtype=BF16)
    assert_close(attend(case), case.expected())


@thinned("head_dim,dtype", [8, 96, 128, 256], DTYPES)
def test_heads_may_have_any_dim(head_dim: int, dtype: torch.dtype) -> None:
    case = Case(ENDS[1:], head_dim=head_dim, n_kv=2, dtype=dtype)
    assert_close(attend(case), case.expected())


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_rows_may_end_anywhere_around_the_edges_of_blocks_and_splits(n_tokens: int) -> None:
    ends = [edge + by for edge in (32, SPLIT, 2 * SPLIT, 3 * SPLIT) for by in (-2, -1, 0, 1) if edge + by < 192]
    case = Case(ends, n_tokens=n_tokens)
    assert_close(attend(case), case.expected())


def test_a_query_past_the_keys_in_view_reads_nothing_and_gives_0() -> None:
    case = Case([500, 70, 193], n_tokens=3)  # row 0 is idle, row 2 has one query in view
    got = attend(case)
    assert_close(got, case.expected())
    assert not got[0].any() and not got[2, :, 1:].any() and got[2, :, 0].all()
    case.pos[0] = 10**12
    assert attend(case).equal(got)


def test_queries_may_stand_in_any_order() -> None:
    case = Case([150, 20], n_tokens=5)
    case.pos = torch.tensor([[150, 0, 64, 63, 128], [20, 20, 0, 3, 5]])
    assert_close(attend(case), case.expected())


def test_positions_and_queries_may_have_any_strides() -> None:
    case = Case([150, 20], n_tokens=3, group=3)
    got = attend(case)
    case.pos = torch.stack([case.pos, case.pos * 0], -1)[..., 0]
    case.q = case.q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    assert not case.pos.is_contiguous() and attend(case).equal(got)


def test_nothing_past_a_row_reaches_it_whatever_it_is() -> None:
    case = Case([31, 63, 64], n_tokens=2)
    expected, got = case.expected(), attend(case)
    assert_close(got, expected)
    for bad in (0.0, float("inf"), float("-inf"), 3e38):
        case.forget(bad)
        assert attend(case).equal(got)


@pytest.mark.parametrize("sharp", [0.0, 8.0, 100.0])
def test_attention_may_be_flat_or_sharp(sharp: float) -> None:
    case = Case(ENDS, group=3)
    case.q = case.q * sharp
    exact, size = case.expected()
    # a score is an fp32 sum of 64 products of some 100 / 8: off by some 2^-24 of 64 * 100 / 8
    assert ((attend(case) - exact).abs() <= (TOLERANCE[FP32] + sharp * 2.0**-20) * size).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_is_bit_identical_alone_or_in_a_batch_and_however_much_is_in_view(dtype: torch.dtype) -> None:
    case = Case([37, 150], n_tokens=3, group=4, dtype=dtype)
    together = attend(case)
    for row, end in enumerate((37, 150)):
        alone = slice(row, row + 1)
        assert attend(case, alone).equal(together[alone])
        assert attend(case, alone, n_keys=end + 1).equal(together[alone])
        assert attend(case, alone, n_keys=256).equal(together[alone])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_token_is_bit_identical_whichever_follow_it_in_its_tile(dtype: torch.dtype) -> None:
    case = Case([64, 150], n_tokens=5, group=3, dtype=dtype)
    together = attend(case)
    for n in (1, 3, 4):
        assert attend(case, n_tokens=n).equal(together[:, :, :n])


@pytest.mark.parametrize("n_rows", [1, 5, 24, 40, 136])
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_the_keys_of_a_block_follow_from_no_number_of_rows_and_divide_a_split(arch: int, n_rows: int) -> None:
    for itemsize in (1, 2, 4):
        for block_h in (16, 32, 64, 128, 256):
            config = decode_triton.config(arch, itemsize, block_h, n_rows)
            assert config.block_n == decode_triton.config(arch, itemsize, block_h, 1).block_n
            assert decode.SMALLEST_SPLIT % config.block_n == 0


MASS = [
    (1, 1, 16, FP32), (4, 3, 16, FP16), (4, 3, 32, BF16), (3, 5, 64, BF16), (3, 5, 64, FP32), (2, 1, 128, BF16),
    (8, 5, 16, BF16),  # tiles of 64, full and not, and of 128
    *(pytest.param(8, n, 16, dtype, marks=pytest.mark.slow) for n, dtype in ((8, FP16), (9, BF16))),
]  # fmt: skip


@pytest.mark.parametrize(("group", "n_tokens", "page", "dtype"), MASS)
def test_each_page_gets_the_attention_that_all_queries_of_its_head_paid_it(
    group: int, n_tokens: int, page: int, dtype: torch.dtype
) -> None:
    n_kv = 2 if group * n_tokens <= 12 else 1  # time: a program merges each row of each kv head
    case = Case([37, 128, 500], n_tokens=n_tokens, group=group, n_kv=n_kv, dtype=dtype)
    out, mass = attend_with_mass(case, page)
    assert out.equal(attend(case))
    assert mass.dtype == FP32 and mass.shape == (3, n_kv, 192 // page)
    # weights are summed before they are rounded to the dtype
    torch.testing.assert_close(mass, case.expected_mass(page), rtol=1e-5, atol=1e-6 * group * n_tokens)
    assert not mass[2].any() and not mass[0, :, 37 // page + 1 :].any()


def test_mass_may_come_from_more_queries_than_a_tile_has_rows() -> None:
    case = Case([150], n_tokens=17, group=8, dtype=BF16)
    torch.testing.assert_close(attend_with_mass(case, 32)[1], case.expected_mass(32), rtol=1e-5, atol=1e-4)


def test_the_mass_of_a_row_sums_to_its_queries() -> None:
    case = Case([63, 64, 191], n_tokens=3, group=4)
    torch.testing.assert_close(attend_with_mass(case, 16)[1].sum(-1), torch.full((3, 1), 12.0))


@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (FP16, 64), (FP32, 96)])
def test_entries_may_be_int8_with_scales(dtype: torch.dtype, head_dim: int) -> None:
    """What they stand for is attended to as in fp64; what is behind a row, its scales too, is a NaN, and never read."""
    case = Case([37, 100], n_tokens=3, group=4, head_dim=head_dim, n_keys=112, dtype=dtype, held=INT8)
    out, mass = attend_with_mass(case, 16)
    assert_close(out, case.expected())
    torch.testing.assert_close(mass, case.expected_mass(16), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 1), 12.0))


def test_a_row_of_int8_gets_the_same_bits_alone_or_in_a_batch_and_at_any_number_of_tokens() -> None:
    case = Case([37, 70], n_tokens=3, group=4, n_keys=72, dtype=BF16, held=INT8)
    together = attend(case)
    assert attend(case, slice(1), n_keys=38).equal(together[:1])
    case.forget(float("inf"))
    assert attend(case, n_tokens=1).equal(together[:, :, :1])


def test_an_int8_entry_may_be_nothing_or_as_small_or_large_as_a_scale_can_say() -> None:
    case = Case([63, 100], group=3, n_keys=128, dtype=BF16, held=INT8)
    assert case.k_scale is not None and case.v_scale is not None
    case.k[:, :, 5], case.v[:, :, 7] = 0, 0
    case.k_scale[0, :, :64], case.v_scale[0, :, :64] = 1e-7, 1e-7
    case.v_scale[1, :, :101] = 6e4
    exact, size = case.expected()
    assert ((attend(case) - exact).abs() <= TOLERANCE[BF16] * size).all()


def test_a_page_that_is_not_whole_has_no_entry() -> None:
    case = Case([99, 5], n_keys=100)
    _, mass = attend_with_mass(case, 32)
    assert mass.shape == (2, 1, 3)
    torch.testing.assert_close(mass, case.expected_mass(32))


def test_the_references_equal_the_kernels() -> None:
    case = Case([37, 500, 130], n_tokens=3, group=3, n_kv=2)
    arguments = case.q, case.layer(), case.pos, case.n_keys, SPLIT
    near = {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(references.decode_attention(*arguments), attend(case), **near)
    for got, expected in zip(
        references.decode_attention_with_mass(*arguments, 16), attend_with_mass(case, 16), strict=True
    ):
        torch.testing.assert_close(got, expected, **near)
        assert got.stride() == expected.stride()
