"""Sinks turned to stand just before the window: a draft model may read a text of any length (arXiv 2309.17453).

Rotary attention sees distances alone, so a window at its true positions is as a model with fewer positions knows it;
only the sinks move away. StreamingLLM counts positions in the cache. Here everything stays where it is, and the keys of
the sinks, as they were at positions 0, 1, ..., are turned on by as many positions as the window has moved: the same
distances. A prompt is prefilled the same way, chunk by chunk, so in O(S w) for a window of w, not in O(S^2).

Shapes: B slots, T tokens of a chunk, S tokens of a prompt, L layers, K kv heads, n sinks, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import KV, CacheLayer, Transformer, apply_rope, rope_cos_sin

from ..bodies import CORE, Bodies
from ..kv import ListedKV
from ..prefill import CHUNK, Filling, Prefill
from ..state import BatchState, RoundPlan
from ..steps import Runner, size_carrier
from .streaming import StreamingView


def chunk_step(
    model: Transformer,
    tokens: Tensor,
    pos: Tensor,
    layers: list[CacheLayer],
    n_splits_carrier: Tensor,
    make: Callable[..., KV],
    args: tuple[Any, ...],
    bodies: Bodies = CORE,
) -> None:
    """Store the keys and values of one chunk of one slot, read through a view: tokens, pos [1, T]. No logits."""
    bodies.hidden(model, tokens, pos, make(layers, n_splits_carrier, *args, bodies=bodies))


class TurnedSinksView(StreamingView):
    """Sinks and a sliding window of a cache that nobody else reads: before a draft its sinks' keys are written anew."""

    def __init__(self, runner: Runner, *, budget: int, n_sink: int, max_new: int) -> None:
        super().__init__(runner, budget=budget, n_sink=n_sink, max_new=max_new)
        n_layers, n_slots, n_kv = runner.shape
        shape = n_layers, n_slots, n_kv, n_sink, runner.model.config.head_dim
        self._keys = torch.zeros(shape, device=runner.device)  # of the sinks, as they were at positions 0, 1, ...
        self.turned = torch.zeros(n_slots, dtype=torch.int64, device=runner.device)  # positions, of those in the cache

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        """Move the window to end with the committed tokens, and the sinks to stand before it."""
        super().device_before_draft(state, plan)
        self.turn(self.window_start - self.first_window)

    def turn(self, by: Tensor) -> None:
        """Let the sinks of each slot stand so many positions, int64 [B], after where they were."""
        layers, n_sink = self.runner.cache.layers, self.first_window
        form, sinks = self.runner.cache.format, [[x[:, :, :n_sink] for x in layer.buffers[::2]] for layer in layers]
        numbers, scale = form.read([torch.stack(part) for part in zip(*sinks, strict=True)])  # [L, B, K, n, H]
        held = numbers.float() if scale is None else numbers.float() * scale.float()[..., None]
        as_they_were = (self.turned == 0)[:, None, None, None]  # [B, 1, 1, 1]
        self._keys.copy_(torch.where(as_they_were, held, self._keys))
        cos, sin = rope_cos_sin(by[:, None], self.runner.model.rope_freqs)  # [B, 1, 1, H // 2] each
        parts = form.write(apply_rope(self._keys, cos, sin))
        for buffers, new in zip(zip(*sinks, strict=True), parts, strict=True):
            torch._foreach_copy_(list(buffers), list(new.unbind()))
        self.turned.copy_(by)


class ChunkedPrefill(Prefill):
    """Fills slots as such a view reads them: a chunk sees itself, the window before it, and the sinks."""

    def __init__(self, runner: Runner, view: TurnedSinksView) -> None:
        super().__init__(runner)
        self.sizes, self.view = [CHUNK], view
        self._step = runner.step(chunk_step, ListedKV)
        self._bodies = runner.bodies_of(ListedKV)

    def begin(self, slot: int, body: Sequence[int]) -> Filling:
        """Begin the prefill, with the sinks turned back: they are copied where they stood."""
        self.view.turn(torch.zeros_like(self.view.turned))
        return super().begin(slot, body)

    def feed(self, slot: int, tokens: Tensor, start: int) -> None:
        """Write the keys and values of tokens int64 [T], on the device, from position start on."""
        view, runner = self.view, self.runner
        window_start = max(view.first_window, start - view.window)
        by = view.turned.clone()  # int64 [B]
        by[slot] = window_start - view.first_window
        view.turn(by)
        pos = torch.arange(start, start + len(tokens), device=runner.device)[None]  # [1, T]
        listed = [indices[slot : slot + 1] for indices in view.kv()[1][0]]
        begins = torch.full((1,), window_start, device=runner.device)
        args = listed, begins, view.window + len(tokens), view.page
        n_splits_carrier = size_carrier(runner.cache, start + len(tokens), compiled=self._step.compiles)
        layers = runner.cache.slot(slot)
        self._step(runner.model, tokens[None], pos, layers, n_splits_carrier, ListedKV, args, self._bodies)
