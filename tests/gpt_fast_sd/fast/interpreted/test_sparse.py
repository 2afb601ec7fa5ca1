"""Interpreted sparse attention against fp64: right for any list and window, blind to all else, bit-identical always.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.triton import sparse as sparse_triton
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES, FP16, FP32, INT8, PLANES, TAIL, Listed, assert_close, each
from tests.helpers import thinned

ARCH = 90


class Case(Listed):
    """Attended by a body."""

    def attend(
        self, rows: slice = slice(None), *, page: int | None = None, body: Callable[..., Tensor] | None = None
    ) -> Tensor:
        return (body or interpreted)(
            self.q[rows], self.layer(rows), self.kv_indices[rows], self.window_start[rows], self.width, self.pos[rows],
            self.n_keys, page or self.page,
        )  # fmt: skip


def interpreted(*args: object) -> Tensor:
    out: Tensor = sparse_triton.attend(*args, arch=ARCH)
    return out


def check(case: Case) -> None:
    """The kernel and the reference give what fp64 gives."""
    for body in (interpreted, references.sparse_attention):
        assert_close(case.attend(body=body), case.expected())


SEVERAL = {"n_listed": 224, "width": 70}  # chunks, which are merged
CASES = [
    *each([192, 96], [215, 127], page=[1, 16, 32], dtype=DTYPES, n_tokens=3),
    *each([192, 64], [220, 90], dtype=[FP32, FP16], n_kv=1,
          **{"group n_tokens": [(1, 1), (3, 2), (4, 3), (8, 5), (8, 17)]}),
    *each([192], [215], head_dim=[8, 96, 128, 256], dtype=DTYPES),
    *each([256, 128, 16], [300, 150, 20], page=[1, 16], dtype=DTYPES, n_tokens=2, **SEVERAL),
    # a list has no more chunks than the merge reads, however long it is
    *each([1216], [1259], n_listed=1024, width=64, n_kv=1, n_keys=1280, page=32),
    *each([192, 64], [220, 90], window=[1, 20, 120], page=[1, 16], n_tokens=3, **SEVERAL),
    # either may stand alone, and a list may be of int32
    *each([192, 96], [191, 95], width=0),
    *each([192, 96], [215, 127], n_listed=[128, 0], list_dtype=torch.int32),
    # bytes, of which a scale is a NaN, too, and planes of them, in one chunk and in several
    *(case for dtype, page in ((BF16, 16), (FP16, 1), (FP32, 16))
      for case in each([192], [220], page=page, n_listed=160, width=40, dtype=dtype, held=INT8)),
    *(case for width, n_listed in ((16, 48), (40, 160)) for case in each(
        [192, 40], [220, 52], tail=[TAIL, 0], held=PLANES, n_listed=n_listed, width=width, n_tokens=2,
        **{"dtype head_dim page": [(BF16, 64, 16), (FP16, 128, 1), (FP32, 96, 16)]})),
]  # fmt: skip


@pytest.mark.parametrize(("windows", "ends", "shape"), CASES)
def test_attention_is_that_of_fp64(windows: list[int], ends: list[int], shape: dict[str, Any]) -> None:
    check(Case(windows, ends, **shape))


def test_a_long_list_has_no_more_chunks_than_the_merge_reads() -> None:
    for n_entries in (1, 192, 193, 1024, 1025, 2560, 2561, 4138, 8192, 8193, 100_000):
        chunk = sparse_triton.chunk_for(n_entries)
        assert chunk % 64 == 0 and -(-n_entries // chunk) <= sparse_triton.MOST_CHUNKS
    assert 2 * sparse_triton.chunk_for(224 + 70) < 224 + 70


@thinned("sizes,page", [(128, 40), (224, 70)], [1, 16])
def test_lists_may_be_empty_and_windows_begin_at_0_or_reach_past_the_queries(sizes: tuple[int, int], page: int) -> None:
    n_listed, width = sizes
    case = Case([0, 0, 192, 192], [0, 37, 192, 200], page=page, n_listed=n_listed, width=width, n_tokens=2)
    assert (case.kv_indices[:2] == -1).all() and (case.kv_indices[2:] >= 0).any()
    check(case)


@pytest.mark.parametrize(("n_listed", "width"), [(128, 40), (224, 70)])
def test_a_query_that_reads_nothing_gives_0(n_listed: int, width: int) -> None:
    case = Case([192, 320, 0], [215, 321, 9], n_listed=n_listed, width=width, n_tokens=2, n_kv=1)
    case.pos[0, 1] = case.n_keys  # its neighbour still reads
    case.window_start[2] = 12
    check(case)
    for body in (interpreted, references.sparse_attention):
        out = case.attend(body=body)
        assert out[0, :, 0].ne(0).all() and out[0, :, 1].eq(0).all() and out[1:].eq(0).all()


@pytest.mark.parametrize("page", [16, 32])
def test_a_page_that_reaches_into_the_window_is_read_as_far_as_the_window_begins(page: int) -> None:
    case = Case([187, 20], [215, 40], page=page, n_listed=256, n_tokens=2)  # room for all pages
    begins = case.kv_indices[:, :, ::page] < case.window_start[:, None, None]
    reaches = case.kv_indices[:, :, page - 1 :: page] >= case.window_start[:, None, None]
    assert (begins & reaches).any()
    check(case)


def test_the_first_entry_of_a_page_stands_for_all_of_it() -> None:
    case = Case([192, 96], [215, 127])
    whole = [case.attend(body=body) for body in (interpreted, references.sparse_attention)]
    case.kv_indices[..., torch.arange(case.kv_indices.shape[-1]) % case.page > 0] = -1
    assert case.attend(body=interpreted).equal(whole[0])
    assert case.attend(body=references.sparse_attention).equal(whole[1])


@pytest.mark.parametrize(("n_listed", "width", "dtype", "held"), [(128, 40, FP32, None), (224, 70, BF16, None),
                                                                   (48, 16, BF16, INT8)])  # fmt: skip
def test_a_row_is_bit_identical_alone_and_in_a_batch(
    n_listed: int, width: int, dtype: torch.dtype, held: torch.dtype | None
) -> None:
    case = Case([192, 0, 256], [215, 30, 299], n_listed=n_listed, width=width, n_tokens=2, n_kv=1, dtype=dtype,
                held=held)  # fmt: skip
    together = case.attend()
    for row in range(3):
        assert case.attend(slice(row, row + 1)).equal(together[row : row + 1])


def test_a_list_of_pages_is_bit_identical_to_its_entries_one_by_one() -> None:
    case = Case([192, 96], [215, 127], n_listed=224, width=70, n_kv=1, dtype=BF16)
    assert case.attend(page=1).equal(case.attend())
    assert case.attend(page=8).equal(case.attend())
