"""Interpreted attention over a cache: bit-identical in any company, however far apart rows lie; test_fuzz has the rest.

Of few queries, whose keys are split; and of chunks, which read them whole or are split in the same way.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import decode
from gpt_fast_sd.fast.triton import decode as decode_triton
from gpt_fast_sd.fast.triton import prefill as prefill_triton
from tests.gpt_fast_sd.fast import dense
from tests.gpt_fast_sd.fast.dense import BF16, FP32, INT8, PLANES, assert_close

SPLIT = 64


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

    def mass(self, page: int) -> Tensor:
        if self.way == "decode":
            return decode_triton.attend_with_mass(*self.given(), SPLIT, page, arch=89)[1]  # type: ignore[no-any-return]
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


def test_tiles_of_64_rows_take_two_of_the_longest_splits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([300, 0, 190], n_tokens=22, dtype=BF16)
    sums = [case.attend(), case.mass(16)]
    monkeypatch.setattr(decode_triton, "LARGEST_SPLIT", SPLIT)
    monkeypatch.setattr(decode_triton, "BUSY", 0)
    monkeypatch.setattr(decode_triton.triton, "cdiv", lambda a, b: sums.append(b) or -(-a // b))  # type: ignore
    assert_close(case.attend(), case.expected())
    torch.testing.assert_close(case.mass(16), sums[1], rtol=1e-3, atol=1e-3)
    assert 2 * SPLIT in sums[2:]


# a number of tokens whose rows, three a token, need several tiles
TOKENS = {"decode": 3, "whole": 33, "split": 11}


@pytest.mark.parametrize("way", ["decode", "whole", "split"], indirect=True)
def test_rows_may_lie_further_apart_than_32_bits_say(way: str) -> None:
    """The last begins 2**31 numbers behind the first, and what lies as many before that is 0."""
    case = Case([60, 99, 130], n_tokens=5, dtype=BF16, held=INT8)
    memory = torch.from_numpy(np.zeros(2**32 + 2**20, np.int8))  # what is not touched takes no memory
    for name, begin in (("k", 0), ("v", 2**19)):
        near = getattr(case, name)
        far = memory[begin + 2**31 :].as_strided(near.shape, (2**30, *near.stride()[1:]))
        setattr(case, name, far.copy_(near))
    assert_close(case.attend(), case.expected())
    # sums of a few weights are rounded to fp16 where queries have 16 bits
    torch.testing.assert_close(case.mass(16), case.expected_mass(16), rtol=6e-4, atol=1e-5)


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


@pytest.mark.parametrize("way", ["decode", "whole", "split"], indirect=True)
@pytest.mark.parametrize(("tail", "window"), [(20, 50), (60, 33)])
def test_a_draft_reads_planes_from_where_a_window_begins(way: str, tail: int, window: int) -> None:
    case = Case([60, 150], n_tokens=TOKENS[way], dtype=BF16, held=PLANES, tail=tail, window=window)
    assert_close(case.attend(), case.expected())


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


def test_an_int8_entry_may_be_nothing_or_as_small_or_large_as_a_scale_can_say() -> None:
    case = Case([63, 100], group=3, n_keys=128, dtype=BF16, held=INT8)
    assert case.k_scale is not None and case.v_scale is not None
    case.k[:, :, 5], case.v[:, :, 7] = 0, 0
    case.k_scale[0, :, :64], case.v_scale[0, :, :64] = 1e-7, 1e-7
    case.v_scale[1, :, :101] = 6e4
    assert_close(case.attend(), case.expected())
