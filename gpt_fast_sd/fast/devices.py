"""How the engine works on a kind of device, in one table.

A test can change every answer: `TRAITS["cpu"] = TRAITS["cuda"]` makes the engine on a CPU work as on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt_fast_sd.model import SPLIT


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """How an engine works on one kind of device.

    chunks: prompt tokens of a prefill step, the largest first; each divides the ones before it, and SPLIT is the last.
    compiles_sampling: whether judging and choosing, many small operators, are compiled: each is a launch on CUDA, while
    on a CPU compiling them takes longer than it saves.
    captures: whether rounds are captured, and their results read one round late.
    windows: rows whose observation windows SnapKV feeds together.
    window_reads: how often such a pass reads each entry of a row; a key alone counts as half.
    """

    chunks: tuple[int, ...]
    compiles_sampling: bool
    captures: bool
    windows: int
    window_reads: float


TRAITS = {
    "cpu": DeviceTraits(chunks=(SPLIT,), compiles_sampling=False, captures=False, windows=1, window_reads=1.0),
    # a GPU needs many tokens to be busy: it multiplies about four windows of tokens while the weights are read
    "cuda": DeviceTraits(chunks=(8 * SPLIT, SPLIT), compiles_sampling=True, captures=True, windows=4, window_reads=1.5),
}


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a device's kind; those of a CPU for a kind without its own."""
    return TRAITS.get(device.type, TRAITS["cpu"])


def require_current(device: torch.device) -> None:
    """ValueError unless this CUDA device is the current one: Triton launches, and rounds are captured, on that one."""
    if device.type == "cuda" and device.index not in (None, current := torch.cuda.current_device()):
        raise ValueError(
            f"the model is on {device}, but the current device is cuda:{current}, where kernels would be launched: "
            f"call torch.cuda.set_device({device.index}) first"
        )
