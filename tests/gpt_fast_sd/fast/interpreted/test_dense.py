"""Interpreted attention over a cache against fp64: right at every edge, blind to what it may not see, bit-identical.

Of few queries, whose keys are split; and of chunks, which read them whole or are split in the same way. Over keys and
values as they come, in int8, and in planes of nibbles.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import decode
from gpt_fast_sd.fast.triton import decode as decode_triton
from gpt_fast_sd.fast.triton import prefill as prefill_triton
from tests.gpt_fast_sd.fast import dense
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES, FP16, FP32, INT8, PLANES, TAIL, TOLERANCE, assert_close, each

SPLIT = 64
ENDS = (37, 0, 191)
# of mass: where queries have 16 bits, sums of a few weights are rounded to fp16
MASS_NEAR = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 6e-4}
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # of fp32 sums; an exponent is the difference of a score and an lse of some 4


class Case(dense.Case):
    """Attended to in the way that the test's fixture sets."""

    way = "decode"

    def given(self, rows: slice = slice(None), n_tokens: int | None = None, n_keys: int | None = None) -> Any:
        """The first n_tokens tokens of these rows, with n_keys keys in view; all, if None."""
        return self.q[rows, :, :n_tokens], self.layer(rows), self.pos[rows, :n_tokens], n_keys or self.n_keys

    def attend(self, *given: Any, **more: Any) -> Tensor:
        arguments = self.given(*given, **more)
        if self.way == "decode":
            return decode_triton.attend(*arguments, SPLIT, arch=89)  # type: ignore[no-any-return]
        return prefill_triton.attend_with_lse(*arguments, arch=89)[0]  # type: ignore[no-any-return]

    def attend_with_mass(self, page: int) -> tuple[Tensor, Tensor]:
        out, mass = decode_triton.attend_with_mass(*self.given(), SPLIT, page, arch=89)
        return out, mass

    def mass(self, page: int) -> Tensor:
        if self.way == "decode":
            return self.attend_with_mass(page)[1]
        q, layer, pos, n_keys = self.given()
        mass: Tensor = prefill_triton.key_mass(q, layer, self.lse(), pos, n_keys, page, arch=89)
        return mass


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few queries' kernels, or both ways that a chunk may take, whatever its number of rows."""
    name: str = getattr(request, "param", "decode")
    monkeypatch.setattr(Case, "way", name)
    if name != "decode":
        monkeypatch.setattr(prefill_triton, "FEW_ROWS", 0 if name == "whole" else 10**9)
        monkeypatch.setattr(prefill_triton, "PREFILL_SPLIT", SPLIT)
    return name


in_every_way = pytest.mark.parametrize("way", ["decode", "whole", "split"], indirect=True)
# a number of tokens whose rows, three a token, need several tiles
TOKENS = {"decode": 3, "whole": 33, "split": 11}


def check(case: Case) -> None:
    """Outputs, and of chunks lse, are those of fp64."""
    got = case.attend()
    assert_close(got, case.expected())
    if case.way != "decode":
        _, lse = prefill_triton.attend_with_lse(*case.given(), arch=89)
        assert lse.is_contiguous() and lse.dtype == FP32
        torch.testing.assert_close(lse, case.lse(), **NEAR)
        assert got.equal(prefill_triton.attend(*case.given(), arch=89))


EDGES = [edge + by for edge in (32, SPLIT, 2 * SPLIT, 3 * SPLIT) for by in (-2, -1, 0, 1) if edge + by < 192]
CASES = [
    *each("decode", ENDS, dtype=DTYPES, **{"group n_tokens": [(1, 1), (3, 1), (4, 3), (8, 5)]}),
    *each("decode", (37, 8, 191), dtype=DTYPES, n_tokens=9, group=1),
    *each("decode", ENDS[1:], head_dim=[8, 96, 128, 256], dtype=DTYPES, n_kv=2),
    *each("whole", [80], head_dim=[8, 96, 128, 256], dtype=DTYPES, n_tokens=9, n_keys=100),
    # chunks attend from where each row stands
    *each("whole", [32, 161], dtype=DTYPES, n_tokens=33, group=3),
    *each("split", [32, 161], dtype=DTYPES, n_tokens=11, group=3),
    # more than a tile has rows, of any number of heads and tokens
    *each("decode", [191], n_tokens=17, group=8, dtype=BF16),
    *(case for group, n in ((1, 70), (4, 48), (8, 32))
      for case in each("whole", [n - 1, 191], n_tokens=n, group=group, dtype=FP16)),
    # rows begin and end around the edges of blocks and splits
    *each("decode", EDGES, n_tokens=[1, 3]),
    *(case for edge in (32, 64, 128) for by, dtype in ((-2, FP16), (3, FP32))
      for case in each("whole", [edge + by + i for i in range(3)], n_tokens=5, n_keys=136, dtype=dtype)),
    # bytes with scales, and planes of them
    *each("whole", [50, 99], dtype=[BF16, FP32], n_tokens=9, n_keys=100, held=INT8),
    *each("split", [40], n_tokens=2, n_keys=41, dtype=BF16, held=INT8),
    *each("whole", [50, 99], tail=[TAIL, 0], n_tokens=9, n_keys=100, held=PLANES,
          **{"dtype head_dim": [(BF16, 64), (FP32, 96)]}),
    # layers of a window, shorter and longer than blocks and splits
    *each("decode", ENDS, window=[1, 33, 100, 190], n_tokens=[1, 5], dtype=BF16),
    *each("whole", [63, 191], window=[1, 20, 100], n_tokens=[33, 64]),
    *each("split", [40, 161], window=[20, 70], n_tokens=11, held=[None, PLANES], dtype=BF16),
]  # fmt: skip


@pytest.mark.parametrize(("way", "ends", "shape"), CASES, indirect=["way"])
def test_attention_is_that_of_fp64(way: str, ends: Sequence[int], shape: dict[str, Any]) -> None:
    case = Case([max(end, shape.get("n_tokens", 1) - 1) for end in ends], **shape)
    check(case)
    if case.k_scale is not None and way == "whole":
        assert case.attend(slice(1)).equal(case.attend()[:1])
        torch.testing.assert_close(case.mass(16), case.expected_mass(16), rtol=MASS_NEAR[case.q.dtype], atol=1e-5)


@in_every_way
def test_a_query_past_the_keys_in_view_reads_nothing_and_gives_0(way: str) -> None:
    n_tokens = TOKENS[way]
    n_real = max(1, n_tokens * 4 // 7)
    ends = [500, 191 + n_tokens - n_real, 129]  # idle, some tokens of padding, none
    case = Case(ends, n_tokens=n_tokens, group=3, dtype=FP32 if way == "decode" else FP16)
    check(case)
    got = case.attend()
    assert not got[0].any() and not got[1, :, n_real:].any() and got[1, :, :n_real].any(-1).all()
    if way != "decode":
        _, lse = prefill_triton.attend_with_lse(*case.given(), arch=89)
        assert lse[0].isneginf().all() and lse[1, :, n_real:].isneginf().all() and lse[1, :, :n_real].isfinite().all()
    case.pos[0] = 10**12
    assert case.attend().equal(got)


def test_queries_may_stand_in_any_order_and_they_and_positions_have_any_strides() -> None:
    case = Case([150, 20], n_tokens=5, group=3)
    case.pos = torch.tensor([[150, 0, 64, 63, 128], [20, 20, 0, 3, 5]])
    check(case)
    got = case.attend()
    case.pos = torch.stack([case.pos, case.pos * 0], -1)[..., 0]
    case.q = case.q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    assert not case.pos.is_contiguous() and case.attend().equal(got)


@in_every_way
def test_rows_may_lie_further_apart_than_32_bits_say(way: str) -> None:
    """The last begins 2**31 numbers behind the first, and what lies as many before that is 0."""
    case = Case([60, 99, 130], n_tokens=5, dtype=BF16, held=INT8)
    memory = torch.from_numpy(np.zeros(2**32 + 2**20, np.int8))  # what is not touched takes no memory
    for name, begin in (("k", 0), ("v", 2**19)):
        near = getattr(case, name)
        far = memory[begin + 2**31 :].as_strided(near.shape, (2**30, *near.stride()[1:]))
        setattr(case, name, far.copy_(near))
    check(case)
    torch.testing.assert_close(case.mass(16), case.expected_mass(16), rtol=MASS_NEAR[BF16], atol=1e-5)


@in_every_way
def test_nothing_past_a_row_reaches_it_whatever_it_is(way: str) -> None:
    case = Case([31, 63, 64], n_tokens=2) if way == "decode" else Case([32, 95, 96], n_tokens=5, dtype=BF16)
    check(case)
    got, mass = case.attend(), case.mass(1) if way != "decode" else None
    for bad in (0.0, float("inf"), float("-inf"), 3e38):
        case.forget(bad)
        assert case.attend().equal(got)
        assert mass is None or bad or case.mass(1).equal(mass)


@pytest.mark.parametrize(
    ("way", "sharp"), [("decode", 0.0), ("decode", 8.0), ("decode", 100.0), ("split", 30.0)], indirect=["way"]
)
def test_attention_may_be_flat_or_sharp(way: str, sharp: float) -> None:
    case = Case(ENDS, group=3) if way == "decode" else Case([150], n_tokens=11, group=3)
    case.q = case.q * sharp
    exact, size = case.expected()
    # a score is an fp32 sum of 64 products of some 100 / 8: off by some 2^-24 of 64 * 100 / 8
    assert ((case.attend() - exact).abs() <= (TOLERANCE[FP32] + sharp * 2.0**-20) * size).all()


@pytest.mark.parametrize(
    ("way", "dtype"), [("decode", FP32), ("decode", BF16), ("whole", BF16), ("split", BF16)], indirect=["way"]
)
def test_a_row_is_bit_identical_alone_or_in_a_batch_and_however_much_is_in_view(way: str, dtype: torch.dtype) -> None:
    case = Case([40, 150], n_tokens=TOKENS[way], group=4 if way == "decode" else 3, dtype=dtype)
    together = case.attend()
    for row, end in enumerate((40, 150)):
        alone = slice(row, row + 1)
        for n_keys in (None, end + 1, *([256] if way == "decode" else [])):
            assert case.attend(alone, n_keys=n_keys).equal(together[alone])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_token_is_bit_identical_whichever_follow_it_in_its_tile(dtype: torch.dtype) -> None:
    case = Case([64, 150], n_tokens=5, group=3, dtype=dtype)
    together = case.attend()
    for n in (1, 3, 4):
        assert case.attend(n_tokens=n).equal(together[:, :, :n])


@pytest.mark.parametrize("n_rows", [1, 5, 24, 40, 136])
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_the_keys_of_a_block_follow_from_no_number_of_rows_and_divide_a_split(arch: int, n_rows: int) -> None:
    for itemsize in (1, 2, 4):
        for block_h in (16, 32, 64, 128, 256):
            config = decode_triton.config(arch, itemsize, block_h, n_rows)
            assert config.block_n == decode_triton.config(arch, itemsize, block_h, 1).block_n
            assert decode.SMALLEST_SPLIT % config.block_n == 0


# ---- the mass of pages -----------------------------------------------------------------------------------------------

MASS = [
    *each("decode", (37, 128, 500), **{"group n_tokens n_kv page dtype": [
        (1, 1, 2, 16, FP32), (4, 3, 2, 16, FP16), (4, 3, 2, 32, BF16), (3, 5, 1, 64, BF16), (3, 5, 1, 64, FP32),
        (2, 1, 2, 128, BF16), (8, 5, 1, 16, BF16)]}),  # a tile of 64, not full
    *(pytest.param("decode", (37, 128, 500), {"group": 8, "n_tokens": n, "page": page, "dtype": dtype},
                   marks=pytest.mark.slow) for n, page, dtype in ((8, 16, FP16), (9, 16, BF16), (17, 32, BF16))),
    *each("whole", (32, 150, 500), page=[1, 16, 128], dtype=DTYPES, n_tokens=32, group=3),
    *each("decode", (37, 128, 500), n_tokens=3, dtype=BF16, **{"window page": [(20, 16), (100, 32)]}),
    *each("whole", (32, 150, 500), n_tokens=32, **{"window page": [(20, 1), (100, 16)]}),
    # any head dim, and half a page, which has no entry
    *each("decode", (99, 60), n_keys=100, page=[32], dtype=[FP16]),
    *each("whole", (99, 60), n_keys=100, page=[1, 32], head_dim=[8, 96, 256, 64], n_tokens=9, dtype=FP16),
]  # fmt: skip


@pytest.mark.parametrize(("way", "ends", "shape"), MASS, indirect=["way"])
def test_each_page_gets_the_attention_that_all_queries_of_its_head_paid_it(
    way: str, ends: Sequence[int], shape: dict[str, Any]
) -> None:
    """Weights are summed before they are rounded to the dtype."""
    page = shape["page"]
    case = Case(ends, **{name: value for name, value in shape.items() if name != "page"})
    if way == "decode":
        assert case.attend_with_mass(page)[0].equal(case.attend())
    mass, n_pages, n_queries = case.mass(page), case.n_keys // page, case.q[0, :, :, 0].numel() / case.k.shape[1]
    assert mass.dtype == FP32 and mass.is_contiguous() and mass.shape == (len(ends), case.k.shape[1], n_pages)
    near = {"rtol": MASS_NEAR[case.q.dtype if way == "decode" else FP32], "atol": 1e-5 + 1e-6 * n_queries}
    torch.testing.assert_close(mass, case.expected_mass(page), **near)
    for row, end in enumerate(ends):
        assert not mass[row, :, 0 if end >= case.n_keys else end // page + 1 :].any()
        if not case.n_keys % page:
            read = float(n_queries) if end < case.n_keys else 0.0
            torch.testing.assert_close(mass[row].sum(-1), torch.full((case.k.shape[1],), read), rtol=2e-4, atol=1e-4)


# ---- keys and values in bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        *each(n_tokens=3, group=4, held=INT8, **{"dtype head_dim": [(BF16, 64), (FP16, 64), (FP32, 96)]}),
        *each(tail=[TAIL, 0], held=PLANES, **{"dtype head_dim n_tokens group": [
            (BF16, 64, 1, 3), (BF16, 128, 3, 4), (FP16, 96, 3, 2), (FP32, 64, 5, 1), (BF16, 32, 9, 2)]}),
    ],
)  # fmt: skip
def test_few_queries_read_int8_with_scales_or_planes_of_them(shape: dict[str, Any]) -> None:
    """What they stand for is attended to as in fp64; what is behind a row, its scales too, is a NaN, and never read."""
    case = Case([37, 100], n_keys=112, **shape)
    out, mass = case.attend_with_mass(16)
    assert_close(out, case.expected())
    near = {"rtol": MASS_NEAR[case.q.dtype], "atol": 1e-5}
    torch.testing.assert_close(mass, case.expected_mass(16), **near)
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 1), float(shape["group"] * shape["n_tokens"])), **near)
    assert case.attend().equal(out)
    # alone, with fewer keys in view, whatever is behind, and, where no tail is counted from it, the first token alone
    case.forget(float("inf"))
    assert case.attend(slice(1), n_keys=38).equal(out[:1])
    assert case.tail or case.attend(n_tokens=1).equal(out[:, :, :1])


def test_an_int8_entry_may_be_nothing_or_as_small_or_large_as_a_scale_can_say() -> None:
    case = Case([63, 100], group=3, n_keys=128, dtype=BF16, held=INT8)
    assert case.k_scale is not None and case.v_scale is not None
    case.k[:, :, 5], case.v[:, :, 7] = 0, 0
    case.k_scale[0, :, :64], case.v_scale[0, :, :64] = 1e-7, 1e-7
    case.v_scale[1, :, :101] = 6e4
    exact, size = case.expected()
    assert ((case.attend() - exact).abs() <= TOLERANCE[BF16] * size).all()
