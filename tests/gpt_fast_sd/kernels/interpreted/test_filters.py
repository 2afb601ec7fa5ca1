"""Interpreted, the search for the cut finds the very token that a sort finds, and that plain Python finds in fractions.

Shapes: B rows of scores, V vocabulary.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from tests.gpt_fast_sd.kernels.rows import expected, found, rows_of_every_kind

reference = importlib.import_module("gpt_fast_sd.kernels.filters")  # what is tested lies behind the door
filters_triton = importlib.import_module("gpt_fast_sd.kernels.filters_triton")

KS = {1: [1], 17: [17, 5, 17, 1, 16, 9], 300: [300, 40, 7, 1, 300, 299]}
PS = ["0.9", "0.5", "1", "0.999", "1e-12"]


@pytest.fixture(autouse=True)
def nothing_is_right_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces hold what no search has found before a kernel writes them."""
    empty = torch.empty

    def full(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = empty(*args, **kwargs)
        return made.fill_(math.nan if made.is_floating_point() else 0x5EED_BAD0_5EED_BAD0)

    monkeypatch.setattr(torch, "empty", full)


def same(scores: Tensor, top_k: list[int], top_p: list[str]) -> None:
    """Both bodies cut at the same score, and at the same place."""
    p = torch.tensor([float(x) for x in top_p], dtype=torch.float64)
    pairs = [body.likeliest(scores, torch.tensor(top_k), p) for body in (filters_triton, reference)]
    assert all(mine.equal(theirs) for mine, theirs in zip(*pairs, strict=True))


@pytest.mark.parametrize("n_vocab", KS)
def test_kept_is_what_plain_python_keeps(n_vocab: int) -> None:
    scores = rows_of_every_kind(n_vocab)
    for turn in range(1 if n_vocab == 1 else 2):
        top_k = [KS[n_vocab][(i + turn) % len(KS[n_vocab])] for i in range(len(scores))]
        top_p = [PS[(i + 2 * turn) % len(PS)] for i in range(len(scores))]
        assert found(filters_triton.likeliest, scores, top_k, top_p) == expected(scores, top_k, top_p)
        same(scores, top_k, top_p)


def test_ties_are_cut_as_plain_python_cuts_them() -> None:
    scores = torch.randint(0, 4, (30, 12)) * -0.7
    scores -= scores.amax(-1, keepdim=True)
    top_k = torch.randint(1, 13, (30,)).tolist()
    top_p = [f"0.{i:02}" for i in torch.randint(1, 100, (30,)).tolist()]
    assert found(filters_triton.likeliest, scores, top_k, top_p) == expected(scores, top_k, top_p)
    same(scores, top_k, top_p)


def test_a_row_may_be_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_triton, "BLOCK", 128)
    scores = rows_of_every_kind(3 * 128 - 27)
    same(scores, [357, 40, 357, 1, 200, 357] * 2, ["0.9", "0.95", "1", "1", "0.6", "0.3"] * 2)


def test_a_row_that_holds_nan_neither_hangs_nor_troubles_the_others() -> None:
    scores = rows_of_every_kind(100)[:4]
    bad = scores.clone()
    bad[1], bad[3, ::2] = math.nan, math.nan
    for body in (filters_triton.likeliest, reference.likeliest):
        good, got = (found(body, each, [30] * 4, ["0.9"] * 4) for each in (scores, bad))
        assert got[::2] == good[::2]


def test_no_rows_are_no_trouble() -> None:
    for body in (filters_triton.likeliest, reference.likeliest):
        cut, last = body(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
        assert cut.shape == last.shape == (0,)
