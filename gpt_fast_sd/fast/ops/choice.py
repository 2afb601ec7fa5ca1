"""Which devices run the operators' Triton bodies: the only thing attention and selection ask about a device."""

from __future__ import annotations

import torch

TRITON = frozenset({"cuda"})  # kinds of devices


def triton_serves(device: torch.device) -> bool:
    """Whether operators run in Triton on a device; otherwise they run their CPU bodies."""
    return device.type in TRITON
