"""Interpreted, the search for the cut finds the token that a sort finds, and that plain Python finds in fractions.

Shapes: B rows of scores, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import filters as reference
from gpt_fast_sd.fast.triton import filters as filters_triton
from tests.gpt_fast_sd.fast.rows import expected, found, full_of_ties, places, rows_of_every_kind
from tests.helpers import few


def check(scores: Tensor, top_k: list[int], top_p: list[str]) -> None:
    """The kernels keep what plain Python keeps, and cut at the very score and place of the reference."""
    args = scores, torch.tensor(top_k), torch.tensor([float(x) for x in top_p], dtype=torch.float64)
    (cut, last), theirs = filters_triton.likeliest(*args), reference.likeliest(*args)
    filtered = (args[1] < scores.shape[1]) | (args[2] < 1)  # of other rows the cut is any that keeps all
    assert cut[filtered].equal(theirs[0][filtered]) and last.equal(theirs[1])
    assert places(scores, cut, last) == expected(scores, top_k, top_p)


@pytest.mark.parametrize("n_vocab", few([17, 1, 300], [17]))
def test_kept_is_what_plain_python_keeps(n_vocab: int) -> None:
    scores = rows_of_every_kind(n_vocab)
    ks = [min(k, n_vocab) for k in (n_vocab, 5, n_vocab, 1, 40, n_vocab - 1 or 1)]
    check(scores, ks * 2, ["0.9", "1", "0.5", "1", "0.999", "1e-12"] * 2)


@pytest.mark.parametrize("n_rows", few([8, 100], [8]))
def test_ties_are_cut_as_plain_python_cuts_them(n_rows: int) -> None:
    check(*full_of_ties(n_rows, 12))


def test_a_row_may_be_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_triton, "BLOCK", 128)
    n_vocab = 2 * 128 + 27
    scores = rows_of_every_kind(n_vocab)[[0, 4, 5, 10]]  # no ties, nothing but ties, many, some
    check(scores, [n_vocab, n_vocab, 200, 40], ["0.9", "0.7", "0.6", "1"])


def test_a_row_that_holds_nan_neither_hangs_nor_troubles_the_others() -> None:
    scores = rows_of_every_kind(100)[:3]
    bad = scores.clone()
    bad[0], bad[2, 1::2] = math.nan, math.nan
    for body in (filters_triton.likeliest, reference.likeliest):
        assert found(body, bad, [30] * 3, ["0.9"] * 3)[1] == expected(scores[1:2], [30], ["0.9"])[0]


def test_no_rows_are_fine() -> None:
    for body in (filters_triton.likeliest, reference.likeliest):
        cut, last = body(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
        assert cut.shape == last.shape == (0,)
