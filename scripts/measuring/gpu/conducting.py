"""One stage after the other, each in a process of its own: what is left for the next call, what is stopped in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from measuring.gpu.setup import Record
from measuring.gpu.stages import DONE, FAILED, LEFT, Stage
from measuring.ledger import Ledger

TAIL = 4000  # characters of a failed stage's output that are kept
SPARE = 5.0  # seconds of the budget kept for the summary
Launch = Callable[[Stage, float], Record]


def conduct(stages: Sequence[Stage], ledger: Ledger, budget: float, launch: Launch) -> list[str]:
    """Run what is not done, as far as the budget goes, what has failed before last; -> the names of those left.

    A stage is begun if its estimated time is left of the budget, the first of a call in any case, and has all
    that is left. One that is stopped then has failed only if it had its estimated time.
    """
    began, left, ran = time.perf_counter(), [], 0
    done = [stage for stage in stages if stage.is_done(ledger)]
    for stage in done:
        print(f"{stage.name}: there already")
    todo = [stage for stage in stages if stage not in done]
    for stage in sorted(todo, key=lambda one: ledger.find({"stage": one.name}) is not None):
        remaining = budget - SPARE - (time.perf_counter() - began)
        if ran and remaining < stage.seconds:
            left.append(stage.name)
            why = f"it takes about {stage.seconds} s and {remaining:.0f} s are left"
            print(f"{stage.name}: left for the next call, {why}")
            continue
        print(f"--- {stage.name}: {stage.about}", flush=True)
        ran, before = ran + 1, time.perf_counter()
        entry = launch(stage, max(1.0, remaining))
        seconds = time.perf_counter() - before
        over = max(0.0, seconds - stage.seconds)
        entry |= {
            "stage": stage.name, "seconds": seconds, "reckoned_seconds": stage.seconds, "seconds_over": over,
            "date": time.strftime("%Y-%m-%d %H:%M"),
        }  # fmt: skip
        longer = f", {over:.1f} s more than estimated" if over else ""
        print(f"--- {stage.name} {entry['status']} in {seconds:.1f} s{longer}", flush=True)
        if entry["status"] == LEFT:
            left.append(stage.name)
        else:
            ledger.put({"stage": stage.name}, entry)
            ledger.write()
    return left


def launcher(program: Sequence[str]) -> Launch:
    """Runs a stage of a program, with its arguments, in a process of its own, whose output is passed on as it comes."""

    def launch(stage: Stage, timeout: float) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "result.json"
            command = [sys.executable, *program, "--only", stage.name, "--into", str(into)]
            code, output = run_process(command, timeout)
            if into.exists():
                return {"status": DONE, "result": json.loads(into.read_text(encoding="utf-8"))}
        if code is not None:
            return {"status": FAILED, "error": f"exit code {code}", "output": output[-TAIL:]}
        if timeout < stage.seconds:
            return {"status": LEFT}
        return {"status": FAILED, "error": f"stopped after {timeout:.0f} s", "output": output[-TAIL:]}

    return launch


def run_process(command: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Run a process, its output printed line by line -> its exit code, None if it was stopped, and the output."""
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=variables,
        start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []

    def pass_on() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            print(f"    {line}", end="", flush=True)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it may have started others
        process.wait()
    reader.join(5.0)
    return code, "".join(lines)
