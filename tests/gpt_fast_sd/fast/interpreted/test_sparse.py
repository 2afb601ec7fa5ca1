"""Interpreted sparse attention: bit-identical in any company and whatever a page is; test_fuzz has the rest.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        C listed entries, W entries of the window.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.triton import sparse as sparse_triton
from tests.gpt_fast_sd.fast.dense import BF16, FP32, INT8, PLANES, TAIL, Listed, assert_close


class Case(Listed):
    """Attended by the kernel."""

    def attend(self, rows: slice = slice(None), *, page: int | None = None) -> Tensor:
        out: Tensor = sparse_triton.attend(
            self.q[rows], self.layer(rows), self.kv_indices[rows], self.window_start[rows], self.width, self.pos[rows],
            self.n_keys, page or self.page, arch=90,
        )  # fmt: skip
        return out


def test_a_long_list_has_no_more_chunks_than_the_merge_reads() -> None:
    for n_entries, n_pairs in itertools.product((1, 192, 193, 1024, 1025, 4138, 8193, 100_000), (1, 8, 128, 199, 500)):
        chunk = sparse_triton.chunk_for(n_entries, n_pairs)
        assert chunk % 64 == 0 and -(-n_entries // chunk) <= sparse_triton.MOST_CHUNKS
    several = [sparse_triton.chunk_for(1032, n_pairs) for n_pairs in (8, 128, 198, 199, 500)]
    assert (
        several == [128, 384, 640, 1152, 256]
        and sparse_triton.chunk_for(2056, 256) == 256
        and 2 * sparse_triton.chunk_for(224 + 70, 1) < 224 + 70
    )


TAILED = {"dtype": BF16, "held": PLANES, "tail": TAIL}


@pytest.mark.parametrize(
    "shape",
    [
        {"n_listed": 48, "width": 16, **TAILED}, {"n_listed": 160, "width": 40, **TAILED},  # one chunk, and several
        {"group": 8, "n_tokens": 17},  # more rows than a tile has
    ],
)  # fmt: skip
def test_what_random_cases_seldom_have_is_that_of_fp64(shape: dict[str, Any]) -> None:
    case = Case([192, 40], [220, 52], **{"n_tokens": 2} | shape)
    assert_close(case.attend(), case.expected())


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
