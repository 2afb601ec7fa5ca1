"""What the scripts that run for long share: atomic files, the machine's description, refusals."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

import torch

from gpt_fast_sd import Engine, __version__

Record = dict[str, Any]
PATIENCE = 10.0  # seconds in which torchrun has ended the others after a process that refuses; each waits one longer


# ---- files -----------------------------------------------------------------------------------------------------------


def write_whole(path: Path, text: str) -> None:
    """Put the text where the file was: a kill leaves the old file or the new one, and no other file is touched.

    OSError where that fails, and for what is no file, such as a device: it would be gone.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file that can be replaced", str(path))
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.partial")
    file = partial.open("x", encoding="utf-8")  # which is nobody's: what is there is not opened
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def as_json(value: object) -> Any:
    """The value as it comes back from a JSON file: tuples are lists, keys are texts."""
    return json.loads(json.dumps(value))


class Ledger:
    """A JSON document of results, on the disk after every one; those of an earlier run with the same settings stay."""

    def __init__(
        self, path: Path | None, benchmark: str, settings: Record, machine: Record, *, fresh: bool, results: str
    ) -> None:
        """results: what the document calls its list of them.

        ValueError where the file holds something else, or was measured with other settings.
        """
        self.path, self._results = path, results
        self.document: Record = {
            "benchmark": benchmark, "settings": as_json(settings), "environment": machine, results: [],
        }  # fmt: skip
        if path is None or fresh or not path.exists():
            return
        advice = "name another file, or begin anew with --fresh"
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} exists and is not JSON: {advice}") from None
        if not isinstance(old, dict) or old.get("benchmark") != benchmark:
            raise ValueError(f"{path} exists and holds no results of this benchmark: {advice}")
        for name, value in self.document["settings"].items():
            before = old.get("settings", {}).get(name)
            if before != value:
                raise ValueError(f"{path} was measured with {name} {before}, not {value}: {advice}")
        self.document = old

    @property
    def records(self) -> list[Record]:
        """All results so far."""
        found: list[Record] = self.document[self._results]
        return found

    def find(self, key: Record) -> Record | None:
        """The result with these values, if it is there."""
        return next((r for r in self.records if all(r[name] == value for name, value in key.items())), None)

    def put(self, key: Record, record: Record) -> None:
        """The result with these values is this one; nothing is written yet."""
        older = self.find(key)
        self.document[self._results] = [*(r for r in self.records if r is not older), as_json(record)]

    def write(self, **more: Any) -> None:
        """The file as it should be now, with what else belongs in it."""
        self.document |= more
        if self.path:
            write_whole(self.path, json.dumps(self.document, indent=1) + "\n")


# ---- what was said ---------------------------------------------------------------------------------------------------


def distinct_4grams(outputs: Sequence[Sequence[int]]) -> float | None:
    """The share of distinct ones among each row's runs of four tokens, its mean over the rows; 1: nothing comes twice.

    Text that repeats itself is easy to draft. Rows of less than four tokens do not count; None where there is no other.
    """
    rows = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in outputs]
    shares = [len(set(runs)) / len(runs) for runs in rows if runs]
    return statistics.fmean(shares) if shares else None


def digest(ids: Sequence[Any]) -> str:
    """A short name that changes with the tokens."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


# ---- the machine -----------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> Record:
    """Machine and versions that numbers belong to."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return {
        "gpt_fast_sd": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def kv_bytes(engine: Engine) -> int:
    """Bytes that the engine's cache takes on this device."""
    return sum(buffer.numel() * buffer.element_size() for buffer in (*engine.cache.k, *engine.cache.v))


def restart_peak(device: torch.device) -> None:
    """Let peak_bytes count from here on, where the system can do so: elsewhere it counts from the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # of Linux: forget the greatest resident size


def peak_bytes(device: torch.device) -> int:
    """The most memory in use at once: allocated on a CUDA device, else resident in this process; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file() and (line := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(line[1]) * 1024
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- refusals --------------------------------------------------------------------------------------------------------


def sentence(error: Exception) -> str:
    """What was wrong, in one line."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text[:300]}"


def refuse(error: Exception, program: str, *, code: int = 2) -> NoReturn:
    """One sentence on stderr and the exit code; of several processes the first one speaks at once.

    The others wait and name their rank: where the first of them refuses too, torchrun ends them before they repeat it,
    and where it does not, one of them is heard.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(PATIENCE + int(os.environ.get("LOCAL_RANK", "0")))
    who = f"{program}, rank {rank}" if rank else program
    print(f"{who}: {sentence(error)}", file=sys.stderr, flush=True)
    raise SystemExit(code)
