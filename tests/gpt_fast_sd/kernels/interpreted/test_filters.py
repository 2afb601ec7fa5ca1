"""Interpreted, the search for the cut finds the very token that a sort finds, and that plain Python finds in fractions.

Shapes: B rows of scores, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

reference = importlib.import_module("gpt_fast_sd.kernels.filters")  # what is tested lies behind the door
filters_triton = importlib.import_module("gpt_fast_sd.kernels.filters_triton")

BODIES = [filters_triton.likeliest, reference.likeliest]


@pytest.fixture(autouse=True)
def nothing_is_right_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces hold what no search has found before a kernel writes them."""
    empty = torch.empty

    def full(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = empty(*args, **kwargs)
        return made.fill_(math.nan if made.is_floating_point() else 0x5EED_BAD0_5EED_BAD0)

    monkeypatch.setattr(torch, "empty", full)


def kept(scores: Sequence[float], top_k: int, top_p: str) -> list[int]:
    """The places that stay, ascending; exp in fp64, all else in fractions, top_p as it is written."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = [i for i in order if scores[i] >= scores[order[top_k - 1]]]
    weight = {i: Fraction(math.exp(scores[i])) for i in order}
    taken, mass, nucleus = Fraction(top_p) * sum(weight.values()), Fraction(0), []
    for i in order:
        if mass >= taken and nucleus and Fraction(top_p) < 1:
            break
        nucleus.append(i)
        mass += weight[i]
    return sorted(nucleus)


def found(scores: Tensor, top_k: Sequence[int], top_p: Sequence[str], body: int) -> list[list[int]]:
    """The places that one of the bodies keeps of each row [B, V]."""
    p = torch.tensor([float(x) for x in top_p], dtype=torch.float64)
    cut, last = BODIES[body](scores, torch.tensor(top_k), p)
    place = torch.arange(scores.shape[1])
    stays = (scores > cut[:, None]) | ((scores == cut[:, None]) & (place <= last[:, None]))
    return [row.nonzero()[:, 0].tolist() for row in stays]


def check(scores: Tensor, top_k: Sequence[int], top_p: Sequence[str]) -> None:
    expected = [kept(*row) for row in zip(scores.tolist(), top_k, top_p, strict=True)]
    for body in range(len(BODIES)):
        assert found(scores, top_k, top_p, body) == expected, BODIES[body].__module__


def rows_of_every_kind(n: int) -> Tensor:
    """Scores [12, n], the best of each 0."""
    normal, pick = torch.randn(n), torch.rand(n)
    rows = torch.stack([
        normal,
        normal * 4,
        normal * 1e-3,  # a large temperature
        normal * 1e4,  # a small one
        torch.zeros(n),
        torch.randint(-3, 1, (n,)).float(),
        torch.where(pick < 0.3, normal.round(), -math.inf),
        torch.full((n,), -math.inf).index_fill(0, torch.tensor([n // 2]), 1.0),  # one possible token
        torch.where(pick < 0.5, -1e-45, torch.where(pick < 0.8, -3e38, -0.0)),  # the smallest, the largest, both zeros
        torch.randint(0, 5, (n,)) * -(2.0**-23),  # close together
        (normal * 3).bfloat16().float(),
        torch.where(pick < 0.5, -31.0, -31.3),  # about half a unit of weight
    ])  # fmt: skip
    return rows - rows.amax(-1, keepdim=True)


@pytest.mark.parametrize("n_vocab", [1, 2, 17, 100])
def test_kept_is_what_plain_python_keeps(n_vocab: int) -> None:
    scores = rows_of_every_kind(n_vocab)
    ks = sorted({1, 2, n_vocab // 3, n_vocab - 1, n_vocab} & set(range(1, n_vocab + 1)))
    ps = ["1e-12", "0.1", "0.5", "0.73", "0.9", "0.999", "1"]
    pairs = [(k, p) for k in ks for p in ps]
    each = scores.repeat_interleave(len(pairs), 0)
    check(each, [k for k, _ in pairs] * len(scores), [p for _, p in pairs] * len(scores))


@st.composite
def tied(draw: st.DrawFn) -> tuple[list[float], int, str]:
    """A row of few values, and two filters."""
    levels = draw(st.lists(st.floats(-40, 0, width=32), min_size=1, max_size=4))
    row = [0.0, *draw(st.lists(st.sampled_from([0.0, -0.0, -math.inf, *levels]), max_size=30))]
    row = draw(st.permutations(row))
    return row, draw(st.integers(1, len(row))), draw(st.sampled_from([f"0.{i:02}" for i in range(1, 100)] + ["1"]))


@settings(max_examples=30, deadline=None)
@given(st.lists(tied(), min_size=20, max_size=40))
def test_ties_are_cut_as_plain_python_cuts_them(rows: list[tuple[list[float], int, str]]) -> None:
    width = max(len(row) for row, _, _ in rows)
    scores = torch.full((len(rows), width), -math.inf)
    for i, (row, _, _) in enumerate(rows):
        scores[i, : len(row)] = torch.tensor(row)
    check(scores, [k for _, k, _ in rows], [p for _, _, p in rows])


def test_a_row_may_be_longer_than_a_tile() -> None:
    scores = rows_of_every_kind(2 * filters_triton.BLOCK + 101)
    n = scores.shape[1]
    for k, p in [(n, "0.9"), (40, "0.95"), (n, "1"), (filters_triton.BLOCK, "0.6"), (1, "1")]:
        ks, ps = [k] * len(scores), [p] * len(scores)
        assert found(scores, ks, ps, 0) == found(scores, ks, ps, 1)


def test_both_bodies_give_the_same_cut_and_place() -> None:
    scores = rows_of_every_kind(5000)
    top_k = torch.tensor([5000, 7, 5000, 100, 4999, 5000, 300, 5000, 2000, 5000, 1, 5000])
    top_p = torch.tensor([0.9, 0.3, 1.0, 1.0, 0.5, 0.99, 0.7, 0.8, 0.9, 0.2, 0.4, 1.0 - 2.0**-53], dtype=torch.float64)
    (cut, last), (cut_too, last_too) = (body(scores, top_k, top_p) for body in BODIES)
    assert cut.equal(cut_too) and last.equal(last_too)


def test_a_row_that_holds_nan_neither_hangs_nor_troubles_the_others() -> None:
    scores = rows_of_every_kind(100)
    bad = scores.clone()
    bad[1], bad[3, ::2], bad[5, 7] = math.nan, math.nan, math.nan
    top_k, top_p = [30] * 12, ["0.9"] * 12
    for body in range(len(BODIES)):
        good, got = found(scores, top_k, top_p, body), found(bad, top_k, top_p, body)
        assert [row for i, row in enumerate(got) if i not in (1, 3, 5)] == [
            row for i, row in enumerate(good) if i not in (1, 3, 5)
        ]


def test_no_rows_are_no_trouble() -> None:
    for body in BODIES:
        cut, last = body(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))
        assert cut.shape == last.shape == (0,)
