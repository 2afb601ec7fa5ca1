"""Logits whose vocabulary is split among ranks: the best token by one word per rank, or all of them for sampling.

Shapes: V vocabulary, R = rows_held(V, ranks) rows of it on each rank, in the order of the ranks; those past V are
padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import all_gather, broadcast


def rows_held(vocab_size: int, n_ranks: int) -> int:
    """Rows of the vocabulary on each of so many ranks: equal on all, so the last may hold rows of padding."""
    return -(-vocab_size // n_ranks)


class Vocabulary:
    """Logits that the ranks of a mesh hold together; results are bit-identical on every rank."""

    def __init__(self, mesh: DeviceMesh | None = None, size: int | None = None) -> None:
        """mesh None: this process has the whole vocabulary. size: V, where some ranks' rows may be padding."""
        self.mesh, self.size = mesh, size

    def argmax(self, logits: Tensor) -> Tensor:
        """The best token, ties go to the lowest id: fp32 [..., R] -> int64 [...]."""
        if self.mesh is None:
            return logits.argmax(-1)
        n_rows = logits.shape[-1]
        first = self.mesh.get_local_rank() * n_rows
        if self.size is not None and first + n_rows > self.size:  # rows of padding are never the best
            padding = torch.arange(first, first + n_rows, device=logits.device) >= self.size  # [R]
            logits = logits.masked_fill(padding, float("-inf"))
        token = logits.argmax(-1)
        best = logits.gather(-1, token[..., None])[..., 0]
        # an id below 2**24 is exact in fp32; on a tie the first rank has the lowest ids
        pairs = torch.stack([best, (token + first).float()])  # [2, ...]
        values, ids = all_gather(pairs, self.mesh).unbind(1)  # [ranks, ...] each
        return ids.gather(0, values.argmax(0, keepdim=True))[0].long()

    def whole(self, logits: Tensor) -> Tensor:
        """All logits: [..., R] -> [..., V]."""
        if self.mesh is None:
            return logits
        together = all_gather(logits, self.mesh).movedim(0, -2).flatten(-2)  # [..., ranks * R]
        return together if self.size is None else together[..., : self.size]

    def decided(self, *drawn: Tensor) -> tuple[Tensor, ...]:
        """The first rank's draws, for all of them: tensors of one shape and dtype -> as many of that shape.

        The logits are bit-identical on every rank, but softmax and its running sum are each rank's own kernels, tuned
        on its own clock: if a number falls between two sums that differ in their last bits, ranks would part.
        """
        return drawn if self.mesh is None else broadcast(torch.stack(drawn), self.mesh).unbind(0)
