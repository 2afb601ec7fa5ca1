"""Logits to tokens without a host sync: one pipeline makes every distribution, randomness is an argument.

Shapes: B batch rows, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import SamplingParams
from .fast import cpu_distributions, cpu_draw, cpu_draw_serves, cpu_sampling_fits, likeliest

# What a random number decides; each (seed, position, stream) has its own.
TARGET_STREAM = 0  # the target's own token: plain decoding, and the one after the accepted drafts
DRAFT_STREAM = 1  # a draft; in a hierarchy the middle level's own token after the cheap drafts it accepted
ACCEPT_STREAM = 2  # whether the target accepts a draft
CHEAP_STREAM = 3  # a draft of a hierarchy's lower level
CHEAP_ACCEPT_STREAM = 4  # whether the middle level accepts that one

_MASK32 = 0xFFFFFFFF


class Kind(NamedTuple):
    """How the rows of a round choose their tokens; known on the host, so that a round skips what no row needs."""

    sampled: bool = False  # whether any of them samples
    filtered: bool = False  # whether any of those filters

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> Kind:
        """The kind of requests with these parameters."""
        sampling = [p for p in params if p.temperature > 0]
        return Kind(bool(sampling), any(p.top_k or p.top_p not in (None, 1.0) or p.min_p for p in sampling))

    def to_come(self) -> list[Kind]:
        """The kinds of rounds that a batch of such requests may have: some end before others."""
        return [GREEDY, *([Kind(True, False)] if self.sampled else []), *([self] if self.filtered else [])]


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


def probabilities(logits: Tensor, table: SamplingTable, *, filtered: bool = True, kernel: bool = True) -> Tensor:
    """The distribution that each row samples from: logits [B, V] or [B, T, V] -> fp32 of that shape, sums over V are 1.

    Temperature, then top-k (ties with the k-th stay), then top-p (the smallest set of most likely tokens whose mass
    reaches p; ties go to the lowest ids), then min-p (tokens at least min_p times as likely as the best): the order of
    Hugging Face generate. Filters decide by exp in fp64, in units of 2**-44 of the best token's, so by exact sums: the
    result depends neither on the batch nor, except for the last bit of an exp, on the device. A greedy row is one-hot
    at its argmax (ties go to the lowest id). filtered=False skips the filters; allowed only if all of them are off.
    kernel=False: not by a kernel of ours that may have to be built first.
    """
    if logits.dim() == 3:
        rows = table if logits.shape[1] == 1 else table.repeated(logits.shape[1])
        return probabilities(logits.flatten(0, 1), rows, filtered=filtered, kernel=kernel).view(logits.shape)
    logits = logits.float()
    if kernel and cpu_sampling_fits(logits):
        return cpu_distributions(logits, table.temperature, table.top_k, table.top_p, table.min_p.log())
    greedy = table.temperature == 0
    # the best logit is 0 before the division, so that no temperature, however small, overflows
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, table.temperature)[:, None]
    if filtered:
        # a greedy row, or a free slot, is not worth a search
        top_k = torch.where(greedy, logits.shape[-1], table.top_k)
        cut, last = (x[:, None] for x in likeliest(scaled, top_k, torch.where(greedy, 1.0, table.top_p)))  # [B, 1]
        place = torch.arange(logits.shape[-1], device=logits.device)
        kept = (scaled > cut) | ((scaled == cut) & (place <= last))
        kept &= scaled >= table.min_p.log()[:, None]  # in fp64
        scaled = scaled.masked_fill(~kept, float("-inf"))
    p = scaled.softmax(-1)
    best = torch.zeros_like(p).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], best, p)


def draw(p: Tensor, u: Tensor, *, kernel: bool = True) -> Tensor:
    """The token where the cumulative distribution first exceeds u: p [B, V], u fp32 [B] in [0, 1) -> int64 [B].

    p need not sum to 1. A token of probability 0 is never drawn, whatever the rounding of the sum.
    """
    if kernel and cpu_draw_serves(p.device):
        return cpu_draw(p, u)
    cumulative = p.double().cumsum(-1)  # fp64: an fp32 sum over 128K tokens loses the tail
    target = u.double()[:, None] * cumulative[:, -1:]
    token = (cumulative <= target).sum(-1)  # the first index with cumulative > target
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)  # the last possible token
    return torch.minimum(token, last)


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """A number in [0, 1) for each (seed, position, stream), the same on every device: int64 [B], int64 [B] -> fp32 [B].

    seed and position broadcast: [B, 1] and [B, T] -> [B, T].
    Counter-based, so a row's randomness depends on nothing but its own seed and place in the text. Four rounds of a
    32-bit finalizer (Ellis's lowbias32 constants) over the words of the key; 24 bits of it become the number. Two seeds
    share all their numbers with probability 2**-32.
    """
    words = (seed & _MASK32, (seed >> 32) & _MASK32, position & _MASK32, stream)
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
