"""Ranks that hold one model must do the same; a cheap check on the host raises as soon as they do not."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class Disagreement(RuntimeError):
    """Ranks that must do the same did not; one sentence says what differed."""


class Agreement:
    """Compares checksums among the ranks of a host group: each is sent when noted and checked when the next one is.

    So no rank waits for the answer: it has arrived by then.
    """

    def __init__(self, host: dist.ProcessGroup | None) -> None:
        """host None: there is no other rank to differ from."""
        self.host = host
        self._sent: tuple[str, torch.Tensor, dist.Work] | None = None

    def note(self, what: str, values: object, texts: Iterable[Sequence[int]] = ()) -> None:
        """Send a checksum of `repr(values)` and of texts of token ids, which may be long.

        Disagreement if the previous checksum differed.
        """
        if self.host is None:
            return
        self.settle()
        checksum = zlib.crc32(repr(values).encode())
        for ids in texts:  # as raw memory: printing them takes many times longer
            checksum = zlib.crc32(array("q", [len(ids), *ids]), checksum)
        ends = torch.tensor([checksum, -checksum])
        work = dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.host, async_op=True)
        assert work is not None
        self._sent = what, ends, work

    def settle(self) -> None:
        """Check the last checksum now."""
        if self._sent is None:
            return
        (what, ends, work), self._sent = self._sent, None
        work.wait()
        if int(ends[0]) != -int(ends[1]):
            raise Disagreement(
                f"{what} differ between ranks that hold one model: all of them must make the same calls, with the same "
                "prompts, parameters and weights"
            )
