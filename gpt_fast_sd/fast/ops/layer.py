"""A layer of the cache at the edge of a torch operator, which takes tensors, texts and numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gpt_fast_sd.model import FORMATS, CacheLayer

Flat = tuple[list[Tensor], str, int, bool, int]


def flat(layer: CacheLayer) -> Flat:
    """A layer as operators take it: its buffers, the name of its format, tail, fine and window."""
    return list(layer.buffers), layer.format.name, layer.tail, layer.fine, layer.window


def layer_of(buffers: Sequence[Tensor], form: str, tail: int, fine: bool, window: int) -> CacheLayer:
    """The layer that was flattened to these."""
    return CacheLayer(FORMATS[form], *buffers, tail=tail, fine=fine, window=window)
