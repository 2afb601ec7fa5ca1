"""Logits whose vocabulary is split among ranks: the best token by a word a rank, or all of them where a step samples.

Shapes: V vocabulary, V / tp of it on each rank, in the order of the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import all_gather


class Vocabulary:
    """What the ranks of a mesh know of the logits together; every rank gets the same bits."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """mesh None: this process has the whole vocabulary."""
        self.mesh = mesh

    def argmax(self, logits: Tensor) -> Tensor:
        """The best token, of equals the lowest id: fp32 [..., V / tp] -> int64 [...]."""
        token = logits.argmax(-1)
        if self.mesh is None:
            return token
        best = logits.gather(-1, token[..., None])[..., 0]
        # an id below 2**24 is exact in fp32; the first rank of equals has the lowest ids
        pairs = torch.stack([best, (token + self.mesh.get_local_rank() * logits.shape[-1]).float()])  # [2, ...]
        values, ids = all_gather(pairs, self.mesh).unbind(1)  # [tp, ...] each
        return ids.gather(0, values.argmax(0, keepdim=True))[0].long()

    def whole(self, logits: Tensor) -> Tensor:
        """All logits: [..., V / tp] -> [..., V]."""
        if self.mesh is None:
            return logits
        return all_gather(logits, self.mesh).movedim(0, -2).flatten(-2)
