"""Which drafts are kept, and the token that follows them: the output is the target's own, whatever was drafted.

Shapes: B batch rows, gamma drafts per row, V vocabulary. Index i of the target is its distribution after i drafts:
index 0 judges draft 0, index gamma has nothing to judge and gives the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .sampling import WHOLE, Vocabulary, draw, uniform


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
    p: Tensor, q: Tensor, drafted: Tensor, max_accept: Tensor, accept_u: Tensor, next_u: Tensor
) -> AcceptResult:
    """Keep drafts so that what is emitted follows p exactly, however far q is from it.

    p [B, gamma + 1, V] target, q [B, gamma, V] draft probabilities, drafted int64 [B, gamma] ~ q, max_accept int64 [B],
    accept_u fp32 [B, gamma] and next_u fp32 [B, gamma + 1], one number in [0, 1) for each index.

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
    return AcceptResult(n_accepted, draw(weight, _each_row_at(next_u, n_accepted)))


def judge_sampled(
    p: Tensor, q: Tensor | None, drafted: Tensor, max_accept: Tensor, seed: Tensor, seq_len: Tensor, *, accept: int,
    own: int,
) -> AcceptResult:  # fmt: skip
    """verify_sampled by each row's own random numbers: of its seed [B], and of its places from seq_len [B] on.

    q None: each draft was certain. accept and own are the streams that decide on drafts and draw the next token.
    """
    if q is None:
        # not F.one_hot, which in torch 2.11 on a CPU reads the tokens on the host to check them
        q = (drafted[..., None] == torch.arange(p.shape[-1], device=p.device)).to(p.dtype)
    pos = seq_len[:, None] + torch.arange(p.shape[1], device=p.device)  # [B, gamma + 1]
    accept_u, next_u = uniform(seed[:, None], pos[:, :-1], accept), uniform(seed[:, None], pos, own)
    return verify_sampled(p, q, drafted, max_accept, accept_u, next_u)


def commit(
    drafted: Tensor, max_accept: Tensor, result: AcceptResult, proposer: Tensor | None, eos_ids: Tensor,
    stop_on_eos: Tensor, *, seq_len: Tensor, pending: Tensor, history: Tensor, remaining: Tensor, active: Tensor,
) -> Tensor:  # fmt: skip
    """Keep the accepted prefix and the next token: seq_len grows by n_accepted + 1, less what EOS or the end cuts.

    See BatchState, whose tensors those behind the star are: they are written in place. drafted [B, gamma]; max_accept
    [B] drafts that counted; proposer [B, gamma], None: all the first -> int64 [B, 2 * gamma + 5], all that the host has
    to read: tokens emitted, drafts judged, drafts accepted, then the tokens (past the emitted ones drafts that go
    unused), who proposed each draft, and the first refused draft.
    """
    gamma = drafted.shape[1]
    step = torch.arange(gamma + 1, device=drafted.device)  # [gamma + 1]
    at = result.n_accepted[:, None]  # [B, 1]
    padded = F.pad(drafted, (0, 1))  # [B, gamma + 1], a copy: drafts may be a view of what is written below
    tokens = torch.where(step == at, result.next_token[:, None], padded)
    emitted = torch.minimum(result.n_accepted + 1, remaining)  # [B]
    # not torch.isin, which compiles for each gamma: how it searches depends on the number of tokens
    is_eos = (tokens[..., None] == eos_ids).any(-1)  # [B, gamma + 1]
    ends = is_eos & stop_on_eos[:, None] & (step < emitted[:, None])
    first = torch.where(ends, step, gamma + 1).amin(1)  # [B] index of the first EOS
    emitted = torch.minimum(emitted, first + 1) * active
    accepted = torch.minimum(result.n_accepted, emitted)
    judged = torch.where(emitted <= result.n_accepted, emitted, max_accept) * active
    place = seq_len[:, None] + 1 + step  # [B, gamma + 1]
    kept = torch.where(step < emitted[:, None], tokens, history.gather(1, place))
    history.scatter_(1, place, kept)
    seq_len.add_(emitted)
    remaining.sub_(emitted)
    last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
    pending.copy_(torch.where(emitted > 0, last, pending))
    active.bitwise_and_((first > gamma) & (remaining > 0))
    by_whom = torch.zeros_like(drafted) if proposer is None else proposer  # [B, gamma]
    return torch.cat([torch.stack([emitted, judged, accepted], 1), tokens, by_whom, padded.gather(1, at)], 1)


def _n_leading(good: Tensor, max_accept: Tensor) -> Tensor:
    """How many of each row's first max_accept entries are true before a false one: [B, gamma], [B] -> int64 [B]."""
    if not good.shape[1]:
        return torch.zeros_like(max_accept)
    counted = torch.arange(good.shape[1], device=good.device) < max_accept[:, None]
    return (good & counted).cumprod(-1, dtype=torch.int64).sum(-1)


def _each_row_at(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b]] for every row b: [B, T, ...], int64 [B] -> [B, ...]."""
    return x[torch.arange(x.shape[0], device=x.device), index] if x.shape[1] > 1 else x[:, 0]
