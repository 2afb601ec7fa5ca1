"""Which device a process works on. A GPU that torch cannot use gets a warning, it is not silently ignored."""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

DEVICES = ("auto", "cpu", "cuda")
DRIVER = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia"))  # one of them exists if Linux drives an NVIDIA GPU


def take_device(name: str, driver: Sequence[Path] = DRIVER) -> torch.device:
    """The device of this process, made the current one if torchrun numbers it; ValueError if there is none.

    "cuda" is the device of LOCAL_RANK if that is set, else the current one. "auto" is "cuda" if torch sees a device; if
    it sees none although one of the paths `driver` exists, a warning says why the CPU is used.
    """
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        # torch warns once per process about a driver that is too old; below we say it, with the consequence
        warnings.simplefilter("ignore")
        # in this order: before CUDA is initialized the count may be the driver's, with devices that torch cannot use
        n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not n_devices:
        return _without_cuda(name, driver)
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda")
    local = int(os.environ["LOCAL_RANK"])
    if local >= n_devices:
        raise ValueError(f"process {local} of this machine needs a CUDA device of its own, and there are {n_devices}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _without_cuda(name: str, driver: Sequence[Path]) -> torch.device:
    """The CPU for "auto", with a warning if there seems to be a GPU; ValueError for "cuda"."""
    why = why_no_cuda()
    if name == "cuda":
        raise ValueError(f"device 'cuda' was requested, but torch sees no CUDA device: {why}; use 'cpu' or 'auto'")
    if not _hidden() and any(path.exists() for path in driver):
        warnings.warn(
            f"this machine has an NVIDIA driver, but torch sees no CUDA device: {why}; so the CPU is used, far slower",
            stacklevel=3,
        )
    return torch.device("cpu")


def _hidden() -> bool:
    """Whether the user has hidden all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def why_no_cuda() -> str:
    """Why torch sees no CUDA device: all are hidden, or what it was built for and what it says when it initializes."""
    if _hidden():
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for AMD's GPUs (ROCm {torch.version.hip})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (pytorch.org has builds with it)"
    try:
        torch.cuda.init()
        says = "no device is there"
    except Exception as error:  # RuntimeError, AssertionError, and errors that torch defers until it initializes
        says = in_short(error)
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and says: {says}"


def in_short(error: Exception) -> str:
    """The first line of a message of torch, which may go on for pages."""
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return textwrap.shorten(first, 200, placeholder=" ...").rstrip(". ")
