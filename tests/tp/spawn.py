"""Ranks for tests: torchrun starts them on a worker script, and what each check of theirs came to is read back."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS = Path(__file__).resolve().parent / "workers"


def torchrun(n: int, script: Path, *args: object, options: Sequence[str] = ("--standalone",)) -> list[str]:
    """The command line that starts n ranks of a script on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", *options]
    return [*command, str(script), *map(str, args)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start_without_agent(n: int, script: Path, *args: object) -> list[subprocess.Popen[str]]:
    """Ranks of a script by the environment that torchrun would give them: no agent ends one when another dies."""
    ours = {"WORLD_SIZE": str(n), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, args)],
            env={**environment(), **ours, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(n)
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """One thread per rank, and the checkout first on the path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run(command: Sequence[str], *, timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def run_checks(n: int, tp: int, names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Run the named checks of workers/checks.py on n ranks -> what each rank has to complain of, by check."""
    done = run(torchrun(n, WORKERS / "checks.py", tp, folder, *names))
    found = {}
    for name in names:
        files = [folder / f"{name}.{rank}.json" for rank in range(n)]
        missing = [f"rank {i} did not get here: {done.stderr[-3000:]}" for i, f in enumerate(files) if not f.exists()]
        found[name] = missing or [text for file in files for text in json.loads(file.read_text())]
    return found
