"""Logits to tokens without a host sync: one pipeline makes every distribution, randomness is an argument.

Shapes: B batch rows, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .config import SamplingParams

# What a random number decides; each (seed, position, stream) has its own.
TARGET_STREAM = 0  # the target's own token: plain decoding, and the one after the accepted drafts
DRAFT_STREAM = 1  # a draft; in a hierarchy the middle level's own token after the cheap drafts it accepted
ACCEPT_STREAM = 2  # whether the target accepts a draft
CHEAP_STREAM = 3  # a draft of a hierarchy's lower level
CHEAP_ACCEPT_STREAM = 4  # whether the middle level accepts that one

_MASK32 = 0xFFFFFFFF

Cuts = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # see likeliest


class Vocabulary(Protocol):
    """Which of the logits this process holds: here all of them; tp has the one for ranks that share them."""

    def argmax(self, logits: Tensor) -> Tensor:
        """The best token, ties go to the lowest id: fp32 [..., V] -> int64 [...]."""
        return logits.argmax(-1)

    def whole(self, logits: Tensor) -> Tensor:
        """All logits: those of this rank -> [..., V]."""
        return logits

    def decided(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        """The first rank's draws, for all of them."""
        return drawn


class WholeVocabulary(Vocabulary):
    """All logits are here."""


WHOLE = WholeVocabulary()


class Kind(NamedTuple):
    """How the rows of a round choose their tokens; known on the host, so that a round skips what no row needs."""

    sampled: bool = False  # whether any of them samples
    filtered: bool = False  # whether any of those filters

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> Kind:
        """The kind of requests with these parameters."""
        sampling = [p for p in params if p.temperature > 0]
        return Kind(bool(sampling), any(p.top_k or p.top_p not in (None, 1.0) or p.min_p for p in sampling))


GREEDY = Kind()


@dataclass
class SamplingTable:
    """The sampling parameters of B slots as tensors; a slot's row is overwritten when a request takes it.

    A filter that is off holds a value that keeps everything: top_k = V, top_p = 1, min_p = 0.
    """

    temperature: Tensor  # fp32 [B], 0 is greedy
    top_k: Tensor  # int64 [B]
    top_p: Tensor  # fp64 [B], as given: 0.3 of ten equal tokens is three, but an fp32 0.3 is slightly more
    min_p: Tensor  # fp64 [B]
    seed: Tensor  # int64 [B]

    @staticmethod
    def empty(batch_size: int, vocab_size: int, device: torch.device) -> SamplingTable:
        """All slots greedy."""
        return SamplingTable(
            temperature=torch.zeros(batch_size, device=device),
            top_k=torch.full((batch_size,), vocab_size, dtype=torch.int64, device=device),
            top_p=torch.ones(batch_size, dtype=torch.float64, device=device),
            min_p=torch.zeros(batch_size, dtype=torch.float64, device=device),
            seed=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    def assign(self, slot: int, params: SamplingParams, seed: int, vocab_size: int) -> None:
        """Give one slot the parameters of a request."""
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(params.top_k or vocab_size, vocab_size)
        self.top_p[slot] = 1.0 if params.top_p is None else params.top_p
        self.min_p[slot] = 0.0 if params.min_p is None else params.min_p
        self.seed[slot] = seed

    def repeated(self, n: int) -> SamplingTable:
        """Every row n times, copies side by side: B slots -> B * n."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        return SamplingTable(*(column.repeat_interleave(n) for column in columns))


def probabilities(logits: Tensor, table: SamplingTable, *, filtered: bool = True, cuts: Cuts | None = None) -> Tensor:
    """The distribution that each row samples from: logits [B, V] or [B, T, V] -> fp32 of that shape, sums over V are 1.

    Temperature, then top-k (ties with the k-th stay), then top-p (the smallest set of most likely tokens whose mass
    reaches p; ties go to the lowest ids), then min-p (tokens at least min_p times as likely as the best): the order of
    Hugging Face generate. Filters decide by exp in fp64, in units of 2**-44 of the best token's, so by exact sums: the
    result depends neither on the batch nor, except for the last bit of an exp, on the device. A greedy row is one-hot
    at its argmax (ties go to the lowest id). filtered=False skips the filters; allowed only if all of them are off.
    cuts: what finds where to cut, as `likeliest` does; None: that.
    """
    if logits.dim() == 3:
        rows = table if logits.shape[1] == 1 else table.repeated(logits.shape[1])
        return probabilities(logits.flatten(0, 1), rows, filtered=filtered, cuts=cuts).view(logits.shape)
    logits = logits.float()
    greedy = table.temperature == 0
    # the best logit is 0 before the division, so that no temperature, however small, overflows
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, table.temperature)[:, None]
    if filtered:
        # a greedy row, or a free slot, is not worth a search
        top_k = torch.where(greedy, logits.shape[-1], table.top_k)
        cut, last = (
            x[:, None] for x in (cuts or likeliest)(scaled, top_k, torch.where(greedy, 1.0, table.top_p))
        )  # [B, 1]
        place = torch.arange(logits.shape[-1], device=logits.device)
        kept = (scaled > cut) | ((scaled == cut) & (place <= last))
        kept &= scaled >= table.min_p.log()[:, None]  # in fp64
        scaled = scaled.masked_fill(~kept, float("-inf"))
    p = scaled.softmax(-1)
    best = torch.zeros_like(p).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], best, p)


UNIT = 2.0**44  # weight of the best token; sums of 2**18 tokens stay below 2**62


def likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Where to cut each row: the lowest score that is kept, and the last place at which that score is kept.

    Top-k first: the top_k best and all that tie with the last of them. Then top-p of these: the smallest set whose
    weight is top_p of their sum, where ties go to the first. A weight is exp(score) in units of 2**-44, rounded, and
    top_p of a sum whole units; the best token stays. top_p at or above 1 cuts nothing. The result is unspecified for a
    row with a NaN, and for one whose best score is not 0.
    fp32 scores [B, V] of at most 0; int64 top_k [B], 1..V; fp64 top_p [B] -> cut fp32 [B], last int64 [B]
    """
    ordered = scores.sort(-1, descending=True).values  # [B, V]
    cut = ordered.gather(-1, top_k[:, None] - 1)  # [B, 1]
    weight = (ordered.double().exp() * UNIT + 0.5).nan_to_num(0.0).long()  # whole: sums are exact in any order
    mass = torch.where(ordered >= cut, weight, 0).cumsum(-1)  # [B, V]
    taken = (mass[:, -1:] * top_p[:, None]).long().clamp(min=1)
    at = torch.searchsorted(mass, taken).clamp(max=scores.shape[1] - 1)  # [B, 1] the last one kept
    score = ordered.gather(-1, at)
    nth = at - (ordered > score).sum(-1, keepdim=True)  # how many equal ones are kept before it
    place = ((scores == score).cumsum(-1) <= nth).sum(-1, keepdim=True)
    by_p = (top_p[:, None] < 1) & (mass[:, -1:] > 0)
    last = torch.where(by_p, place, scores.shape[1] - 1)
    return torch.where(by_p, score, cut)[:, 0], last[:, 0]


def draw(p: Tensor, u: Tensor) -> Tensor:
    """The token where the cumulative distribution first exceeds u: p [B, V], u fp32 [B] in [0, 1) -> int64 [B].

    p need not sum to 1. A token of probability 0 is never drawn, whatever the rounding of the sum.
    """
    cumulative = p.double().cumsum(-1)  # fp64: an fp32 sum over 128K tokens loses the tail
    target = u.double()[:, None] * cumulative[:, -1:]
    token = (cumulative <= target).sum(-1)  # the first index with cumulative > target
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)  # the last possible token
    return torch.minimum(token, last)


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """A number in [0, 1) for each (seed, position, stream), the same on every device: int64 [B], int64 [B] -> fp32 [B].

    seed and position broadcast: [B, 1] and [B, T] -> [B, T].
    Counter-based, so a row's randomness depends on nothing but its own seed and place in the text. Four rounds of a
    32-bit finalizer (Ellis's lowbias32 constants) over the words of the key, two of them after the last; 24 bits of it
    become the number. Two seeds share all their numbers with probability 2**-32.
    """
    words = (seed & _MASK32, (seed >> 32 ^ stream * 0x9E3779B9) & _MASK32, position & _MASK32, 0)
    h = torch.full_like(seed, 0x9E3779B9)
    for word in words:
        h = _mix32(h ^ word)
    return (h >> 8).float() * 2.0**-24


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64: every bit of x reaches every bit of the result."""
    x = x ^ (x >> 16)
    x = _multiply32(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _multiply32(x, 0x846CA68B)
    return x ^ (x >> 16)


def _multiply32(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2**32 without ever leaving 63 bits: signed overflow is undefined in compiled C++."""
    high = (x * (factor >> 16)) & 0xFFFF
    return ((high << 16) + x * (factor & 0xFFFF)) & _MASK32
