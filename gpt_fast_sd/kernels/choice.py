"""Where operators run their Triton bodies: the one question about a device that attention and selection ask."""

from __future__ import annotations

import torch

TRITON = frozenset({"cuda"})  # kinds of devices


def triton_serves(device: torch.device) -> bool:
    """Whether operators run in Triton on a device; elsewhere by what attends and selects on a CPU."""
    return device.type in TRITON
