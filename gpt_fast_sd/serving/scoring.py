"""How likely the target finds given texts: logits of given tokens, and log-probabilities, a chunk of a text at a time.

Shapes: T tokens of a chunk, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer, Transformer

from ..bodies import CORE, Bodies
from ..kv import DenseKV
from ..loading.workspace import LEAST_SCORED
from ..prefill import CHUNK
from ..steps import size_carrier
from .scheduling import Schedule

SIZES = CHUNK, LEAST_SCORED  # tokens that a step scores: the largest first; a text's end is padded to the least


@dataclass(frozen=True)
class Scores:
    """What the target finds of the last n tokens of a text, each after all that precede it."""

    logprobs: Tensor  # fp32 [n], natural logarithms of probabilities at temperature 1
    greedy: Tensor  # bool [n], whether no other token was likelier

    @property
    def total(self) -> float:
        """The logarithm of the probability of all of them together."""
        return self.logprobs.double().sum().item()


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

    def scores(self, ids: Sequence[int], n: int) -> Scores:
        """Of the last n of ids. Whole chunks before them are prefilled, and kept as those of any prompt."""
        prefill, at = self.schedule.prefill, (len(ids) - 1 - n) // CHUNK * CHUNK
        prefill.fill(0, ids[:at])
        found = []
        for start, size in _chunks(at, len(ids) - 1):
            logits = self._logits(ids[start : start + size], start, size)
            after = torch.tensor(ids[start + 1 : start + 1 + size], device=logits.device)
            logits, after = (x[max(0, len(ids) - 1 - n - start) :] for x in (logits[: len(after)], after))
            for some, those in zip(logits.split(SIZES[-1]), after.split(SIZES[-1]), strict=True):  # as the plan says
                each = self.schedule.state.vocabulary.whole(some).float()  # [T, V]
                chosen = each.gather(-1, those[:, None])[:, 0]  # [T]
                found.append((chosen - each.logsumexp(-1), chosen >= each.amax(-1)))
                del each
        self.schedule.release(0)
        return Scores(*(torch.cat(parts).cpu() for parts in zip(*found, strict=True)))

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
        size = next((size for size in SIZES if size <= end - at), SIZES[-1])
        yield at, size
        at += size
