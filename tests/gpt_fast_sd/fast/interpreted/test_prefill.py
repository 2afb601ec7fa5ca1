"""Interpreted flash attention over a cache, and the attention that keys received, against fp64.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.triton import prefill as prefill_triton
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES, FP16, FP32, INT8, NAN, TOLERANCE, Case, assert_close
from tests.helpers import thinned


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces are full of NaN before a kernel writes them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))


@pytest.fixture(params=["whole", "split"])
def n_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both ways that a number of rows may take, each with tokens whose rows, three a token, need several tiles."""
    monkeypatch.setattr(prefill_triton, "FEW_ROWS", 0 if request.param == "whole" else 10**9)
    monkeypatch.setattr(prefill_triton, "PREFILL_SPLIT", 64)
    return 33 if request.param == "whole" else 11


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of many rows, for few."""
    monkeypatch.setattr(prefill_triton, "FEW_ROWS", 0)


def attend(case: Case, rows: slice = slice(None), n_keys: int | None = None) -> tuple[Tensor, Tensor]:
    out, lse = prefill_triton.attend_with_lse(
        case.q[rows], case.layer(rows), case.pos[rows], n_keys or case.n_keys, arch=89
    )
    return out, lse


def key_mass(case: Case, page: int) -> Tensor:
    lse = case.scores().logsumexp(-1).float()
    mass: Tensor = prefill_triton.key_mass(case.q, case.layer(), lse, case.pos, case.n_keys, page, arch=89)
    return mass


def assert_right(case: Case) -> None:
    out, lse = attend(case)
    assert_close(out, case.expected())
    assert lse.is_contiguous() and lse.dtype == FP32
    torch.testing.assert_close(lse, case.scores().logsumexp(-1).float(), rtol=1e-5, atol=1e-5)
    again = prefill_triton.attend(case.q, case.layer(), case.pos, case.n_keys, arch=89)
    assert out.equal(again)


@pytest.mark.parametrize("dtype", [BF16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (FP32, FP16))])
def test_chunks_attend_from_where_each_row_stands(n_tokens: int, dtype: torch.dtype) -> None:
    assert_right(Case([32, 161], n_tokens=n_tokens, group=3, dtype=dtype))


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(("group", "n_tokens"), [(1, 70), (4, 48), (8, 32)])
def test_tiles_may_hold_any_number_of_heads_and_tokens(group: int, n_tokens: int) -> None:
    assert_right(Case([n_tokens - 1, 191], n_tokens=n_tokens, group=group, dtype=FP16))


def test_many_rows_are_read_whole_and_few_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_triton, "FEW_ROWS", 32)
    split: list[int] = []
    attend_split = prefill_triton.decode_triton.attend
    monkeypatch.setattr(
        prefill_triton.decode_triton, "attend",
        lambda q, *args, **kwargs: (split.append(q.shape[2]), attend_split(q, *args, **kwargs))[1],
    )  # fmt: skip
    for n_tokens in (8, 9):
        assert_right(Case([127], n_tokens=n_tokens, group=4, n_keys=128, dtype=FP16))
    assert split == [8, 8]


@pytest.mark.usefixtures("whole")
@thinned("head_dim,dtype", [8, 96, 128, 256], DTYPES)
def test_heads_may_have_any_dim(head_dim: int, dtype: torch.dtype) -> None:
    assert_right(Case([80], n_tokens=9, head_dim=head_dim, n_keys=100, dtype=dtype))


def test_padding_past_the_keys_in_view_reads_nothing_and_gives_0(n_tokens: int) -> None:
    n_real = n_tokens * 4 // 7
    # idle, some tokens of padding, none
    case = Case([500, 191 + n_tokens - n_real, 129], n_tokens=n_tokens, group=3, dtype=FP16)
    assert_right(case)
    out, lse = attend(case)
    assert not out[0].any() and not out[1, :, n_real:].any() and out[1, :, :n_real].any(-1).all()
    assert lse[0].isneginf().all() and lse[1, :, n_real:].isneginf().all() and lse[1, :, :n_real].isfinite().all()


@pytest.mark.usefixtures("whole")
def test_rows_may_begin_and_end_anywhere_around_the_edges_of_blocks() -> None:
    for edge in (32, 64, 128):
        assert_right(Case([edge - 2, edge - 1, edge], n_tokens=5, n_keys=136, dtype=FP16))
        assert_right(Case([edge + 3, edge + 4, edge + 5], n_tokens=5, n_keys=136))


@pytest.mark.usefixtures("n_tokens")
def test_nothing_past_a_row_reaches_it_whatever_it_is() -> None:
    case = Case([32, 95, 96], n_tokens=5, dtype=BF16)
    assert_right(case)
    (got, _), mass = attend(case), key_mass(case, 1)
    for bad in (0.0, float("inf"), float("-inf"), 3e38):
        case.forget(bad)
        assert attend(case)[0].equal(got)
        if bad == 0.0:
            assert key_mass(case, 1).equal(mass)


def test_a_row_is_bit_identical_alone_or_in_a_batch_and_however_much_is_in_view(n_tokens: int) -> None:
    case = Case([40, 150], n_tokens=n_tokens, group=3, dtype=BF16)
    together = attend(case)[0]
    for row, end in enumerate((40, 150)):
        alone = slice(row, row + 1)
        assert attend(case, alone)[0].equal(together[alone])
        assert attend(case, alone, n_keys=end + 1)[0].equal(together[alone])


@thinned("page,dtype", [1, 16, 128], DTYPES)
def test_each_page_gets_the_attention_that_all_queries_of_its_head_paid_it(page: int, dtype: torch.dtype) -> None:
    case = Case([32, 150, 500], n_tokens=32, group=3, n_kv=1, dtype=dtype)
    mass = key_mass(case, page)
    assert mass.dtype == FP32 and not mass[2].any() and not mass[0, :, 32 // page + 1 :].any()
    # an exponent is the difference of a score and an lse, each off by an eps of some 4
    torch.testing.assert_close(mass, case.expected_mass(page), rtol=1e-5, atol=1e-5)
    if page < 128:
        torch.testing.assert_close(mass.sum(-1), torch.tensor([[96.0], [96.0], [0.0]]))


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_entries_may_be_int8_with_scales(dtype: torch.dtype) -> None:
    case = Case([50, 99], n_tokens=9, n_keys=100, dtype=dtype, held=INT8)
    assert_right(case)
    assert attend(case, slice(1))[0].equal(attend(case)[0][:1])
    torch.testing.assert_close(key_mass(case, 16), case.expected_mass(16), rtol=1e-5, atol=1e-5)


def test_few_rows_of_int8_are_split_with_their_scales() -> None:
    assert_right(Case([40], n_tokens=2, n_keys=41, dtype=BF16, held=INT8))


@pytest.mark.parametrize("head_dim", [8, 96, 256])
def test_mass_is_right_for_any_head_dim_and_half_a_page_has_no_entry(head_dim: int) -> None:
    case = Case([99, 60], n_tokens=9, head_dim=head_dim, n_keys=100, dtype=FP16)
    for page in (1, 32):
        torch.testing.assert_close(key_mass(case, page), case.expected_mass(page), rtol=1e-5, atol=1e-5)


def test_the_references_equal_the_kernels() -> None:
    case = Case([37, 500, 196], n_tokens=9, group=3)
    arguments = case.q, case.layer(), case.pos, case.n_keys
    near = {"rtol": 2e-5, "atol": 1e-5}
    out, lse = attend(case)
    torch.testing.assert_close(references.prefill_attention(*arguments), out, **near)
    for got, expected in zip(references.prefill_attention_with_lse(*arguments), (out, lse), strict=True):
        torch.testing.assert_close(got, expected, **near)
        assert got.stride() == expected.stride()
    mass = references.key_mass(case.q, case.layer(), lse, case.pos, case.n_keys, 16)
    torch.testing.assert_close(mass, key_mass(case, 16), **near)


def test_a_sharp_softmax_is_not_worse() -> None:
    case = Case([150], n_tokens=11, group=3)
    case.q = case.q * 30
    exact, size = case.expected()
    # a score is an fp32 sum of 64 products of some 30 / 8: off by some 2^-24 of 64 * 30 / 8
    assert ((attend(case)[0] - exact).abs() <= (TOLERANCE[FP32] + 30 * 2.0**-20) * size).all()
