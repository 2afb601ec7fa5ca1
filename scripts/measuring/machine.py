"""The machine that numbers belong to: its name and versions, the memory in use, the clocks of its GPU."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gpt_fast_sd import __version__
from gpt_fast_sd.fast import chosen

Record = dict[str, Any]


def environment(device: torch.device, *packages: str) -> Record:
    """Machine and versions that numbers belong to, also of these distributions; None if one is not installed."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    found: Record = {
        "gpt_fast_sd": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "instructions": chosen().name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    return found | ({"versions": {package: version(package) for package in packages}} if packages else {})


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def clocks() -> Record:
    """Power limit, clocks and temperature of torch's first GPU as they are now; empty without nvidia-smi or a GPU."""
    if shutil.which("nvidia-smi") is None or not torch.cuda.is_available():
        return {}
    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # nvidia-smi counts also those that are not visible
    fields = "driver_version,power.limit,power.draw,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={gpu}"]
    output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return dict(zip(fields.split(","), output.split(", "), strict=False))


def load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def restart_peak(device: torch.device) -> None:
    """Let peak_bytes count from here on, if the system supports it: otherwise it counts from the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # on Linux: reset the greatest resident size


def allocated_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def process_bytes(name: str) -> int | None:
    """A size in bytes that Linux tells of this process, "VmRSS" what is resident now; None if it does not."""
    status = Path("/proc/self/status")
    line = re.search(rf"{name}:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(line[1]) * 1024 if line else None


def peak_bytes(device: torch.device) -> int:
    """The most memory in use at once: allocated on a CUDA device, else resident in this process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (peak := process_bytes("VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
