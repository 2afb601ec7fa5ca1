"""Logits whose vocabulary is split among ranks: the best token by one word per rank, or all of them for sampling.

Shapes: V vocabulary, R = rows_held(V, ranks) rows of it on each rank, in the order of the ranks; those past V are
padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import all_gather, broadcast

BLOCK = 256  # logits of which a CPU finds the largest value before it asks where that stands
FEW = 2**14  # logits in all that it looks through one by one


def rows_held(vocab_size: int, n_ranks: int) -> int:
    """Rows of the vocabulary on each of so many ranks: equal on all, so the last may hold rows of padding."""
    return -(-vocab_size // n_ranks)


def first_best(x: Tensor) -> Tensor:
    """x.argmax(-1), where ties go to the first and a NaN is the largest of all: [..., R] -> int64 [...].

    On a CPU torch finds a largest value by vectors but its place one entry at a time, some 15 times as slowly: for 40
    rows of 49,152 logits, 3 ms. So the place is sought among the largest of each block, and then inside one block.
    """
    n = x.shape[-1]
    # where a step is traced, sizes vary of which nothing may be asked
    if x.device.type != "cpu" or torch.compiler.is_compiling() or n < 2 * BLOCK or x.numel() < FEW:
        return x.argmax(-1)
    n_whole = n // BLOCK * BLOCK
    largest = x[..., :n_whole].unflatten(-1, (-1, BLOCK)).amax(-1)  # [..., n // BLOCK]
    if n_whole < n:
        largest = torch.cat([largest, x[..., n_whole:].amax(-1, keepdim=True)], -1)
    start = largest.argmax(-1, keepdim=True) * BLOCK
    place = start + torch.arange(BLOCK, device=x.device)  # [..., BLOCK]
    place = place.clamp(max=n - 1)  # past the end the last one again and again
    first: Tensor = start + x.gather(-1, place).argmax(-1, keepdim=True)  # [..., 1]
    return first[..., 0]


class Vocabulary:
    """Logits that the ranks of a mesh hold together; results are bit-identical on every rank."""

    def __init__(self, mesh: DeviceMesh | None = None, size: int | None = None) -> None:
        """mesh None: this process has the whole vocabulary. size: V, where some ranks' rows may be padding."""
        self.mesh, self.size = mesh, size

    def argmax(self, logits: Tensor) -> Tensor:
        """The best token, ties go to the lowest id: fp32 [..., R] -> int64 [...]."""
        if self.mesh is None:
            return first_best(logits)
        n_rows = logits.shape[-1]
        first = self.mesh.get_local_rank() * n_rows
        if self.size is not None and first + n_rows > self.size:  # rows of padding are never the best
            padding = torch.arange(first, first + n_rows, device=logits.device) >= self.size  # [R]
            logits = logits.masked_fill(padding, float("-inf"))
        token = first_best(logits)
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
