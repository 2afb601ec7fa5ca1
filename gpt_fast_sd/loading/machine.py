"""What this machine is asked before anything is built: whether its device works, its memory, threads and dtype."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gpt_fast_sd.tp import in_short

from ..fast import packing_builds, prepare_launches
from ..fast.devices import require_current

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where Linux says what memory there is
CAPABILITY = (8, 0)  # the least that the kernels' tables support: tiles of 163 KiB, products of bf16


# ---------------------------------------------------------------- whether it can work there


def require_kernels(device: torch.device) -> None:
    """ValueError, in one sentence, if our kernels cannot run on a CUDA device; a CPU is not checked.

    It takes a second or two if Triton has not yet built its launcher here; later calls return at once.
    """
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ValueError(
            f"device 'cuda' is an AMD GPU to torch {torch.__version__} (ROCm {torch.version.hip}), and our kernels are "
            "made for NVIDIA's: use device 'cpu'"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError("device 'cuda' needs triton, which is not installed: install it, or use device 'cpu'")
    try:
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    except Exception as error:  # torch initializes CUDA here, which raises errors of several kinds
        raise ValueError(f"device {str(device)!r} cannot be used: {in_short(error)}") from error
    if capability < CAPABILITY:
        raise ValueError(
            f"{name} has compute capability {'.'.join(map(str, capability))}, and our kernels need "
            f"{'.'.join(map(str, CAPABILITY))} or more (A100, RTX 30, or later): use another GPU, or device 'cpu'"
        )
    require_current(device)
    _require_launches()


def _require_launches() -> None:
    """ValueError unless Triton has, or can build, the C module that it launches kernels with."""
    with _stderr_of_children() as said:
        try:
            prepare_launches()
            return
        except Exception as error:  # no compiler, what a compiler refuses, no libcuda, no place to write, ...
            failed, why = error, in_short(error)
    builds = isinstance(failed, (subprocess.CalledProcessError, FileNotFoundError)) and "ldconfig" not in why
    # a compiler's own message says more than the command line
    why = next((line.strip() for line in said if re.search("error|cannot find", line)), why)
    advice = ""
    if builds or "compiler" in why:
        advice = "install a C compiler and Python's headers (Ubuntu: gcc python3-dev), or "
    elif "libcuda" in why or "ldconfig" in why:
        advice = "let `/sbin/ldconfig -p` list the driver's libcuda.so.1, or "
    raise ValueError(
        f"device 'cuda' cannot be used: Triton cannot build the module that launches its kernels ({why}); "
        f"{advice}use device 'cpu'"
    ) from failed


@contextlib.contextmanager
def _stderr_of_children() -> Iterator[list[str]]:
    """Collect the lines that processes started meanwhile write to stderr, instead of printing them."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        own = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(own, 2)
            os.close(own)
            kept.seek(0)
            lines.extend(kept.read().decode(errors="replace").splitlines())


# ---------------------------------------------------------------- memory and dtype


def free_memory(device: torch.device, held: int = 0) -> int | None:
    """Bytes that may still be allocated, None if unknown; held: of a CPU, bytes allocated and perhaps not yet touched.

    On a CPU, what is available of the machine's memory and left of the limits of this process's control groups.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch kept from freed tensors is free, too
        return int(torch.cuda.mem_get_info(device)[0])
    if not hasattr(os, "sysconf"):
        return None
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [(whole, _numbers(PROC / "meminfo").get("MemAvailable:", whole >> 10) << 10), *_control_groups()]
    # Touched memory is missing from what is left already. What of held is not can be no less than what is held beyond
    # all that the process has touched; Python's own memory hides a little of it.
    untouched = max(0, held - (_numbers(PROC / "self" / "status").get("RssAnon:", 0) << 10))
    return min(min(limit - held, left - untouched) for limit, left in bounds)


def _control_groups() -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of each control group with a limit of memory that this process belongs to.

    Caches of files are left: the kernel drops them first.
    """
    for folder, version in _group_folders("memory"):
        files = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = ("".join(_lines(folder / file)) for file in files)
        if limit.isdecimal() and used.isdecimal():  # "max" is no limit
            stat, prefix = _numbers(folder / "memory.stat"), "" if version == 2 else "total_"
            caches = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield int(limit), int(limit) - max(0, int(used) - caches)


def sensible_threads() -> int:
    """Threads for a CPU's operators: what torch takes, the physical cores, or fewer where this process has fewer.

    That is by its affinity, or by the time that control groups leave it; torch asks neither, and threads that wait for
    each other on one core take many times as long. OMP_NUM_THREADS or MKL_NUM_THREADS, where set, are obeyed.
    """
    most: int = torch.get_num_threads()
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return most
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else most
    shares = [most, own]
    for folder, version in _group_folders("cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        said = " ".join("".join(_lines(folder / file)) for file in files).split()
        if len(said) == 2 and all(one.isdecimal() and int(one) for one in said):  # "max" and -1 are no limit
            shares.append(-(-int(said[0]) // int(said[1])))
    return max(1, min(shares))


def _group_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """The folder of each control group that this process belongs to, and the version, 1 or 2: see cgroups(7)."""
    for line in _lines(PROC / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        root = CGROUPS if number == "0" else CGROUPS / controller
        group = root / name.strip("/")  # in a container its name may be the host's: then the root alone is there
        for folder in [group, *group.parents][: len(group.parts) - len(root.parts) + 1]:
            yield folder, 2 if number == "0" else 1


def _numbers(path: Path) -> dict[str, int]:
    """The lines of a file of the kernel that begin with a name and a number; none if there is no such file."""
    pairs = [line.split()[:2] for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def whole_memory(device: torch.device) -> int:
    """Bytes of a CUDA device, in use or not; 0 for others."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def natural_dtype(stored: str | None, device: torch.device, compiled: bool) -> torch.dtype:
    """The checkpoint's own dtype; on a CPU bf16 in place of any 16-bit one if our kernels or its instructions serve it.

    Otherwise fp32, as PyTorch's products in bf16 are slow there. compiled: whether steps are, which use our kernels.
    """
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(stored or "", torch.float32)
    if device.type == "cpu" and dtype != torch.float32:
        known = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if known or packing_builds(at_once=not compiled) else torch.float32
    return dtype
