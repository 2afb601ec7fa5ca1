"""Which drafts are kept, and the token that follows them: the output is the target's own, whatever was drafted.

Shapes: B batch rows, gamma drafts per row, V vocabulary. Index i of the target is its distribution after i drafts:
index 0 judges draft 0, index gamma has nothing to judge and gives the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpt_fast_sd.tp import Vocabulary

from .sampling import draw

WHOLE = Vocabulary()


@dataclass(frozen=True)
class AcceptResult:
    """The outcome of a round: the first n_accepted of each row's drafts stay, next_token follows them."""

    n_accepted: Tensor  # int64 [B], 0..max_accept
    next_token: Tensor  # int64 [B]


class Override(Protocol):
    """Changes every result before it is committed, for timing only; it may be part of a captured graph."""

    place: Tensor  # its progress, on the device: trial rounds restore it

    def apply(self, result: AcceptResult, drafted: Tensor, max_accept: Tensor) -> AcceptResult:
        """The result to commit: drafted int64 [B, gamma], max_accept int64 [B]. Nothing here is read by the host."""
        ...


def verify_greedy(logits: Tensor, drafted: Tensor, max_accept: Tensor, vocabulary: Vocabulary = WHOLE) -> AcceptResult:
    """Keep the drafts that the target would have chosen itself, up to the first that it would not.

    logits [B, gamma + 1, V], drafted int64 [B, gamma], max_accept int64 [B]: how many of a row's first drafts count.
    vocabulary: which rank has which tokens' logits.
    """
    best = vocabulary.argmax(logits)  # [B, gamma + 1], ties go to the lowest id, as in plain decoding
    n_accepted = _n_leading(best[:, :-1] == drafted, max_accept)
    return AcceptResult(n_accepted, _each_row_at(best, n_accepted))


def verify_sampled(
    p: Tensor, q: Tensor, drafted: Tensor, max_accept: Tensor, accept_u: Tensor, next_u: Tensor, *, kernel: bool = True
) -> AcceptResult:
    """Keep drafts so that what is emitted follows p exactly, however far q is from it.

    p [B, gamma + 1, V] target, q [B, gamma, V] draft probabilities, drafted int64 [B, gamma] ~ q, max_accept int64 [B],
    accept_u fp32 [B, gamma] and next_u fp32 [B, gamma + 1], one number in [0, 1) for each index; kernel: see draw.

    Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): draft x is kept
    with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from (p - q)+. Exact as long as
    max_accept does not depend on the drafts that it cuts off: it may be chosen only from the drafts before it.
    """
    gamma, chosen = drafted.shape[1], drafted[..., None]  # [B, gamma, 1]
    p_chosen, q_chosen = (x.gather(-1, chosen).squeeze(-1) for x in (p[:, :gamma], q))  # [B, gamma]
    # strictly below: p(x) = 0 fails even where u or q(x) is 0
    n_accepted = _n_leading(accept_u * q_chosen < p_chosen, max_accept)
    weight = p_next = _each_row_at(p, n_accepted)  # [B, V]
    if gamma:
        q_next = _each_row_at(q, n_accepted.clamp(max=gamma - 1))  # [B, V]; at gamma nothing was rejected
        rejected = (n_accepted < max_accept)[:, None]
        residual = (p_next - q_next).clamp(min=0)
        # a residual of zeros after a rejection: p and q differ only by rounding
        weight = torch.where(rejected & (residual > 0).any(-1, keepdim=True), residual, p_next)
    return AcceptResult(n_accepted, draw(weight, _each_row_at(next_u, n_accepted), kernel=kernel))


def _n_leading(good: Tensor, max_accept: Tensor) -> Tensor:
    """How many of each row's first max_accept entries are true before a false one: [B, gamma], [B] -> int64 [B]."""
    if not good.shape[1]:
        return torch.zeros_like(max_accept)
    counted = torch.arange(good.shape[1], device=good.device) < max_accept[:, None]
    return (good & counted).cumprod(-1, dtype=torch.int64).sum(-1)


def _each_row_at(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b]] for every row b: [B, T, ...], int64 [B] -> [B, ...]."""
    return x[torch.arange(x.shape[0], device=x.device), index] if x.shape[1] > 1 else x[:, 0]
