"""What the target finds of the tokens of a round, beside the result that the host reads of it.

Shapes: B slots, T places of a round, V vocabulary, n likeliest tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural logarithm of a token's probability, before temperature and filters, and those of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token ids with theirs, the likeliest first


def beside(logits: Tensor, tokens: Tensor, n: int) -> Tensor:
    """What the host reads of tokens [B, T] and of the n likeliest, after logits [B, T, V]: int64 [B, T * (1 + 2 * n)].

    Of each token first the bits of 1 + n fp64 numbers, its own and the likeliest ones', then these ones' ids.
    """
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(n, logprobs.shape[-1]))
    numbers = torch.cat([logprobs.gather(-1, tokens[..., None]), best.values], -1).double()
    return torch.cat([numbers.view(torch.int64), best.indices], -1).flatten(1)


def found_of(row: Sequence[int], n_tokens: int, wanted: int | None) -> list[TokenLogprobs]:
    """Of n_tokens tokens and the wanted likeliest in the place of each, from a row of what `beside` gives; None: []."""
    size, found = len(row) // n_tokens, list[TokenLogprobs]()
    if wanted is None:
        return found
    n = 1 + size // 2
    for at in range(0, len(row), size):
        numbers = struct.unpack(f"{n}d", struct.pack(f"{n}q", *row[at : at + n]))
        found.append(TokenLogprobs(numbers[0], tuple(zip(row[at + n : at + size], numbers[1:], strict=True))[:wanted]))
    return found
