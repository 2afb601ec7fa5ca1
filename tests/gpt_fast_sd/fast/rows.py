"""Rows of scores of every kind, and the tokens that plain Python keeps, for comparison with every search for the cut.

Shapes: B rows of scores, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

Body = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


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


def places(scores: Tensor, cut: Tensor, last: Tensor) -> list[list[int]]:
    """The places that a cut keeps of each row [B, V]."""
    place = torch.arange(scores.shape[1])
    stays = (scores > cut[:, None]) | ((scores == cut[:, None]) & (place <= last[:, None]))
    return [row.nonzero()[:, 0].tolist() for row in stays]


def found(body: Body, scores: Tensor, top_k: Sequence[int], top_p: Sequence[str]) -> list[list[int]]:
    """The places that a search keeps of each row [B, V]."""
    p = torch.tensor([float(x) for x in top_p], dtype=torch.float64)
    return places(scores, *body(scores, torch.tensor(top_k), p))


def expected(scores: Tensor, top_k: Sequence[int], top_p: Sequence[str]) -> list[list[int]]:
    return [kept(*row) for row in zip(scores.tolist(), top_k, top_p, strict=True)]


def paired(scores: Tensor, top_p: Sequence[str]) -> tuple[Tensor, list[int], list[str]]:
    """Each row [V] with each of several top_k and of these top_p."""
    n = scores.shape[1]
    ks = {1, 2, n // 3, n - 1, n} & set(range(1, n + 1))
    pairs = [(k, p) for k in sorted(ks) for p in top_p]
    each = scores.repeat_interleave(len(pairs), 0)
    return each, [k for k, _ in pairs] * len(scores), [p for _, p in pairs] * len(scores)


def full_of_ties(n_rows: int, n_vocab: int) -> tuple[Tensor, list[int], list[str]]:
    """Rows of few values, and a top_k and a top_p for each."""
    scores = torch.randint(0, 4, (n_rows, n_vocab)) * -0.7
    top_k = torch.randint(1, n_vocab + 1, (n_rows,)).tolist()
    top_p = [f"0.{i:02}" for i in torch.randint(1, 100, (n_rows,)).tolist()]
    return scores - scores.amax(-1, keepdim=True), top_k, top_p


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
    rows[6, -1] = 0.0  # something is possible
    return rows - rows.amax(-1, keepdim=True)
