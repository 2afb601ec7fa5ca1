"""Prompts into the cache, chunk by chunk; the part of a prompt that a slot already holds is not computed again.

Shapes: T tokens of a chunk, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt_fast_sd.model import SPLIT, CacheLayer, Transformer

from .bodies import CORE, Bodies
from .kv import DenseKV
from .steps import Runner, size_carrier

CHUNK = SPLIT  # prompt tokens of the last call; a divisor of the capacity, so that padding stays below it


def prefill_step(
    model: Transformer,
    tokens: Tensor,
    pos: Tensor,
    layers: list[CacheLayer],
    n_splits_carrier: Tensor,
    bodies: Bodies = CORE,
) -> None:
    """Store the keys and values of one chunk of one slot: tokens, pos [1, T]; L layers of one slot. No logits."""
    bodies.hidden(model, tokens, pos, DenseKV(layers, n_splits_carrier, bodies=bodies))


class Filling:
    """A slot that is being filled with a prompt, one chunk per step: rounds of other slots may run between two steps.

    Until it is finished nothing relies on the slot, so it can be abandoned without clean-up.
    """

    def __init__(self, prefill: Prefill, slot: int, body: Sequence[int], start: int) -> None:
        """start: how many tokens of body the slot holds already."""
        self.prefill, self.slot, self.body = prefill, slot, body
        self._done = start

    @property
    def left(self) -> int:
        """Tokens that are still to be computed."""
        return len(self.body) - self._done

    def step(self) -> int:
        """Compute the next chunk -> how many tokens it holds."""
        size = next((size for size in self.prefill.sizes if size <= self.left), min(CHUNK, self.left))
        self.prefill.chunk(self.slot, self.body[self._done : self._done + size], self._done)
        self._done += size
        return size

    def finish(self) -> None:
        """Everything is computed: the slot holds body from now on, and idles after it."""
        assert not self.left
        self.prefill.hold(self.slot, self.body)


class Prefill:
    """Fills slots of one cache with one model, and remembers which prompt each slot was filled with.

    A prompt that begins like one that any slot holds is computed from the first chunk that differs: equal chunks give
    bit-identical results, so reuse changes nothing but the time.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        # the largest size that the rest of a prompt fills is used first; one that no prompt can fill would be built for
        # nothing, and tried past the end of the cache
        longest = runner.cache.max_seq_len - 1  # the last token of a prompt is decoded
        self.sizes = [size for size in runner.backend.chunks if size <= max(longest, CHUNK)]
        self._step = runner.step(prefill_step)
        self._warm = False
        self._held: list[list[int]] = [[] for _ in range(runner.shape[1])]

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._step.graphs

    def warm_up(self) -> None:
        """Compile the steps, once; slots lose their prompts."""
        if not self._warm:
            for size in self.sizes:
                self.chunk(0, [0] * size, 0)
            for slot in range(len(self._held)):
                self.fill(slot, [])
            self._warm = True

    def reusable(self, slot: int, body: Sequence[int]) -> int:
        """Tokens at the beginning of body whose keys the slot still holds: whole large chunks, or all of body."""
        held = self._held[slot]
        shared = next(
            (i for i, (a, b) in enumerate(zip(held, body, strict=False)) if a != b), min(len(held), len(body))
        )
        return shared if shared == len(body) == len(held) else shared // self.sizes[0] * self.sizes[0]

    def held(self, slot: int) -> int:
        """Tokens whose keys the slot holds."""
        return len(self._held[slot])

    def fill(self, slot: int, body: Sequence[int]) -> int:
        """Make the slot hold the keys of body from position 0; return how many tokens had to be computed."""
        filling, computed = self.begin(slot, body), 0
        while filling.left:
            computed += filling.step()
        filling.finish()
        return computed

    def begin(self, slot: int, body: Sequence[int]) -> Filling:
        """Copy the part of body that any slot holds -> an object whose steps compute the rest.

        Rounds also write for idle slots, from seq_len on, and some drafts slightly before it. So until it is finished
        the slot's seq_len is in the middle of the spare split past the capacity, which is never read.
        """
        others = sorted(range(len(self._held)), key=lambda other: other != slot)  # ties go to the slot itself
        source = max(others, key=lambda other: self.reusable(other, body))
        kept = self.reusable(source, body)
        self._held[slot] = []  # so that nothing relies on it if a step fails half-way
        cache = self.runner.cache
        if source != slot:
            cache.copy(source, slot, kept)
        cache.vacate(slot, keep=kept)
        cache.seq_len[slot] = cache.capacity + SPLIT // 2
        return Filling(self, slot, body, kept)

    def hold(self, slot: int, body: Sequence[int]) -> None:
        """Record that the slot holds the keys of body, for reuse."""
        self._held[slot] = list(body)
        self.runner.cache.seq_len[slot] = len(body)

    def keep(self, slot: int, n: int) -> None:
        """Record that only the first n tokens of a slot can be reused: the rest will be overwritten."""
        del self._held[slot][max(0, n) :]

    def chunk(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Write the keys and values of up to CHUNK tokens, or of a larger size, from position start on.

        Padding is written after them.
        """
        padded = torch.zeros(max(CHUNK, len(tokens)), dtype=torch.int64)
        padded[: len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64)
        self.feed(slot, padded.to(self.runner.device), start)

    def feed(self, slot: int, tokens: Tensor, start: int) -> None:
        """Write the keys and values of tokens int64 [T], on the device, from position start on; T is one of sizes."""
        runner, cache = self.runner, self.runner.cache
        pos = torch.arange(start, start + len(tokens), device=runner.device)[None]  # [1, T]
        n_splits_carrier = size_carrier(cache, start + len(tokens), compiled=self._step.compiles)
        self._step(runner.model, tokens[None], pos, cache.slot(slot), n_splits_carrier, runner.bodies)
