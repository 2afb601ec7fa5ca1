"""How likely the target finds given texts: logits of given tokens, and log-probabilities, a chunk of a text at a time.

Shapes: T tokens of a chunk, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer, Transformer

from ..bodies import CORE, Bodies
from ..kv import DenseKV
from ..loading.workspace import WIDENED
from ..prefill import CHUNK, Filling
from ..steps import size_carrier
from .scheduling import Schedule

SIZES = CHUNK, CHUNK // 4, CHUNK // 16  # tokens that a step scores: a text's end is padded to one of them


@dataclass(frozen=True)
class Scores:
    """What the target finds of the last n tokens of a text, each after all that precede it."""

    logprobs: Tensor  # fp32 [n], natural logarithms of probabilities at temperature 1
    greedy: Tensor  # bool [n], whether no other token was likelier
    best: Tensor  # fp32 [n, top], logarithms of the likeliest in the place of each, and their ids: int64 [n, top]
    best_ids: Tensor

    @property
    def total(self) -> float:
        """The logarithm of the probability of all of them together."""
        return self.logprobs.double().sum().item()


@dataclass
class Left:
    """What one text leaves to the next: slot 0 holds keys of ids, and logits [T, V] are those from start on."""

    ids: Sequence[int] = ()
    start: int = 0
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    written: int = 0  # positions up to here may hold something
    top: int = 0  # likeliest that are named


def score_step(
    model: Transformer,
    tokens: Tensor,
    pos: Tensor,
    layers: list[CacheLayer],
    n_splits_carrier: Tensor,
    bodies: Bodies = CORE,
) -> Tensor:
    """Store the keys and values of one chunk of one slot; its logits: tokens, pos [1, T] -> [T, V]."""
    out: Tensor = model.output(bodies.hidden(model, tokens, pos, DenseKV(layers, n_splits_carrier, bodies=bodies)))
    return out[0]


class Scorer:
    """Feeds given tokens to the target, in slot 0 of an engine that is idle."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.runner = schedule, schedule.prefill.runner
        self._step = self.runner.step(score_step)

    def logits(self, ids: Sequence[int], start: int) -> Tensor:
        """Logits after each of ids [start:], from the step that decodes, one token a time: fp32 [n, V] on the CPU."""
        schedule, state, rows = self.schedule, self.schedule.state, []
        schedule.prefill.fill(0, ids[:start])
        for position, token in enumerate(ids[start:], start):
            state.pending[0], state.active[0] = token, True
            schedule.cache.seq_len[0] = position
            # cloned, as rounds feed tensors of inference mode: otherwise Dynamo compiles a second graph
            logits = schedule.rounds.feed(state.pending.clone()[:, None], position + 1)[0][0, 0]
            rows.append(state.vocabulary.whole(logits).cpu())
        schedule.release(0)
        return torch.stack(rows)

    def scores(self, texts: Sequence[tuple[Sequence[int], int]], top: int = 0) -> Iterator[Scores]:
        """Of the last n ids of each text, and the top likeliest. What it begins with like the one before is kept.

        Whole chunks before the last n are prefilled, and kept as those of any prompt.
        """
        schedule, left = self.schedule, Left(top=top)
        for i, (ids, n) in enumerate(texts):
            schedule.tell("score", i, len(texts))
            yield self._scores(ids, len(ids) - 1 - n, left)
        schedule.tell("score", len(texts), len(texts))
        schedule.release(0)

    def _scores(self, ids: Sequence[int], first: int, left: Left) -> Scores:
        """Of the tokens after positions first and on, of which the last one feeds nothing."""
        end, found = len(ids) - 1, []
        shared = next((i for i, (a, b) in enumerate(zip(left.ids, ids[:end], strict=False)) if a != b), end)
        shared = min(shared, len(left.ids))
        if left.start <= first < shared:  # one context, and continuations of a token each
            found += self._of(
                left.logits[first - left.start : shared - left.start], ids[first + 1 : shared + 1], left.top
            )
            first = shared
        if first < end:
            found += self._fed(ids, first, shared, left)
        left.ids = ids[:end]
        return Scores(*(torch.cat(parts).cpu() for parts in zip(*found, strict=True)))

    def _fed(self, ids: Sequence[int], first: int, shared: int, left: Left) -> list[tuple[Tensor, ...]]:
        """See _of, for the tokens after positions first and on, fed chunk by chunk."""
        end, found = len(ids) - 1, []
        left.logits, left.start = torch.empty(0), end  # not kept beside the next ones
        for start, size in _chunks(self._prefilled(ids, first, shared, left), end):
            left.logits, left.start = torch.empty(0), start
            left.logits = self._logits(ids[start : min(start + size, end)], start, size)
            left.written = max(left.written, start + size)
            at = max(first, start)
            found += self._of(left.logits[at - start : end - start], ids[at + 1 : start + size + 1], left.top)
        return found

    def _prefilled(self, ids: Sequence[int], first: int, shared: int, left: Left) -> int:
        """Let slot 0 hold the keys of whole chunks before position first -> how many positions it holds them of."""
        prefill, cache, whole = self.schedule.prefill, self.schedule.cache, first // CHUNK * CHUNK
        start = min(shared, first)
        if not left.ids:
            prefill.fill(0, ids[:whole])
            return whole
        kept = min(start, prefill.held(0)) // prefill.sizes[0] * prefill.sizes[0]  # others came by smaller steps
        prefill.keep(0, kept)
        if start >= whole:
            cache.vacate(0, start, left.written)
            return start
        cache.vacate(0, kept, left.written)
        filling = Filling(prefill, 0, ids[:whole], kept)
        while filling.left:
            filling.step()
        filling.finish()
        left.written = max(left.written, whole)
        return whole

    def _of(self, logits: Tensor, after: Sequence[int], top: int) -> list[tuple[Tensor, ...]]:
        """Of the tokens after these logits [T, V] what Scores has: [T], [T], [T, top], [T, top]."""
        found = list[tuple[Tensor, ...]]()
        for some, those in zip(
            logits.split(WIDENED), torch.tensor(after, device=logits.device).split(WIDENED), strict=True
        ):  # as the plan says
            each = self.schedule.state.vocabulary.whole(some).float()  # [T, V]
            chosen = each.gather(-1, those[:, None])[:, 0]  # [T]
            whole, best = each.logsumexp(-1), each.topk(min(top, each.shape[1]))
            found.append((chosen - whole, chosen >= each.amax(-1), best.values - whole[:, None], best.indices))
            del each
        return found

    def _logits(self, tokens: Sequence[int], start: int, size: int) -> Tensor:
        """See score_step, for tokens from position start on, padded to size."""
        runner = self.runner
        padded = torch.tensor([[*tokens, *[0] * (size - len(tokens))]], device=runner.device)
        pos = torch.arange(start, start + size, device=runner.device)[None]
        n_splits_carrier = size_carrier(runner.cache, start + size, compiled=self._step.compiles)
        out: Tensor = self._step(runner.model, padded, pos, runner.cache.slot(0), n_splits_carrier, runner.bodies)
        return out


def _chunks(at: int, end: int) -> Iterator[tuple[int, int]]:
    """Where chunks begin that cover positions from at to end, and how many tokens each has."""
    while at < end:
        left = end - at
        size = next((size for size in SIZES if size * 3 <= left * 4), SIZES[-1])  # a quarter may be padding
        yield at, size
        at += size
