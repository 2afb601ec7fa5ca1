"""Rows of scores of every kind, and the ones that Python's stable sort selects."""

import math

import torch
from torch import Tensor

from tests.gpt_fast_sd.fast.dense import NAN

INF = math.inf


def best(scores: list[float], n_valid: int, n: int) -> list[int]:
    """By Python's stable sort: the n best of the first n_valid, numbers first, in ascending order, then -1."""
    places = range(min(n_valid, len(scores)))
    ranked = sorted(places, key=lambda i: (math.isnan(scores[i]), 0.0 if math.isnan(scores[i]) else -scores[i]))
    chosen = sorted(ranked[:n])
    return chosen + [-1] * (n - len(chosen))


def rows_of_every_kind(n: int) -> Tensor:
    """Scores [9, n]."""
    normal, pick = torch.randn(n), torch.rand(n)
    return torch.stack([
        normal,
        torch.full((n,), 0.25),
        torch.randint(-1, 3, (n,)) * torch.where(pick < 0.5, 1.0, -1.0),  # few values, zeros of both signs
        torch.where(pick < 0.05, normal, -INF),
        torch.full((n,), -INF),
        torch.where(pick < 0.3, NAN, torch.where(pick < 0.6, INF, normal)),
        torch.where(pick < 0.95, NAN, -INF),
        torch.where(pick < 0.5, 3.4e38, torch.where(pick < 0.8, 1e-45, -3e38)),  # the largest and the smallest
        1.0 + torch.randint(0, 5, (n,)) * 2.0**-23,  # close together
    ])  # fmt: skip
