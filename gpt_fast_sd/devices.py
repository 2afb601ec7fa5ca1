"""What the engine does otherwise on one kind of device than on another, in one table.

Whatever is asked here can be answered otherwise by a test: `WAYS["cpu"] = WAYS["cuda"]` lets a CPU go the ways of CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt_fast_sd.model import SPLIT


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How an engine works on one kind of device.

    chunks: prompt tokens of a prefill step, the largest first; each divides the ones before it, and SPLIT is the last.
    operators: whether attention and selection go by the operators that have a Triton body, compiled or not.
    compiles_sampling: whether judging and choosing, many small operators, are compiled: each is a launch on CUDA, while
    on a CPU compiling them takes longer than it saves.
    captures: whether rounds are captured, and their results read one round late.
    windows: rows whose observation windows SnapKV feeds together.
    """

    chunks: tuple[int, ...]
    operators: bool
    compiles_sampling: bool
    captures: bool
    windows: int


WAYS = {
    "cpu": Ways(chunks=(SPLIT,), operators=False, compiles_sampling=False, captures=False, windows=1),
    # a GPU needs many tokens to be busy: about as many as four windows have are multiplied while the weights are read
    "cuda": Ways(chunks=(8 * SPLIT, SPLIT), operators=True, compiles_sampling=True, captures=True, windows=4),
}


def ways_of(device: torch.device) -> Ways:
    """The ways of a device's kind; those of a CPU for a kind that has none of its own."""
    return WAYS.get(device.type, WAYS["cpu"])
