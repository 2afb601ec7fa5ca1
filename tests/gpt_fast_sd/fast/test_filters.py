"""The reference search keeps the tokens that plain Python keeps in fractions, ties included.

Shapes: B rows of scores, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast_sd.fast import likeliest
from tests.gpt_fast_sd.fast.rows import expected, found, full_of_ties, paired, rows_of_every_kind

PS = ["1e-12", "0.1", "0.5", "0.73", "0.9", "0.999", "1"]


@pytest.mark.parametrize("n_vocab", [1, 2, 17, 100, 300])
def test_kept_is_what_plain_python_keeps(n_vocab: int) -> None:
    rows = paired(rows_of_every_kind(n_vocab), PS)
    assert found(likeliest, *rows) == expected(*rows)


@st.composite
def tied(draw: st.DrawFn) -> tuple[list[float], int, str]:
    """A row of few values, and two filters. Weights, and what lies between them, are far above the unit of sums."""
    levels = draw(st.lists(st.integers(-80_000, 0).map(lambda n: n / 2**12), min_size=1, max_size=4))
    row = [0.0, *draw(st.lists(st.sampled_from([0.0, -0.0, -math.inf, *levels]), max_size=30))]
    row = draw(st.permutations(row))
    return row, draw(st.integers(1, len(row))), draw(st.sampled_from([f"0.{i:02}" for i in range(1, 100)] + ["1"]))


@settings(max_examples=50, deadline=None)
@given(st.lists(tied(), min_size=1, max_size=20))
def test_ties_are_cut_as_plain_python_cuts_them(rows: list[tuple[list[float], int, str]]) -> None:
    scores = torch.full((len(rows), max(len(row) for row, _, _ in rows)), -math.inf)
    for i, (row, _, _) in enumerate(rows):
        scores[i, : len(row)] = torch.tensor(row)
    top_k, top_p = [k for _, k, _ in rows], [p for _, _, p in rows]
    assert found(likeliest, scores, top_k, top_p) == expected(scores, top_k, top_p)


def test_what_weighs_less_than_the_unit_of_the_sums_moves_no_cut() -> None:
    """Half of six tokens and of a seventh that weighs 2**-45 of one: three, where fractions would ask for a fourth."""
    scores = torch.tensor([[0.0] * 6 + [-31.0]])
    assert found(likeliest, scores, [7], ["0.5"]) == [[0, 1, 2]]


def test_thousands_of_short_rows_full_of_ties_are_cut_as_plain_python_cuts_them() -> None:
    rows = full_of_ties(1500, 12)
    assert found(likeliest, *rows) == expected(*rows)


def test_a_row_is_cut_alike_whatever_its_batch() -> None:
    scores = rows_of_every_kind(3000)
    top_k, top_p = [3000, 50, 3000] * 4, ["0.9", "1", "0.5"] * 4
    together = found(likeliest, scores, top_k, top_p)
    rows = zip(scores, top_k, top_p, strict=True)
    assert together == [found(likeliest, row[None], [k], [p])[0] for row, k, p in rows]
