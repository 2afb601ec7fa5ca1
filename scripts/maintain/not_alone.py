"""Time plain decoding alone, beside a busy thread on every core, and beside a second engine, in turns.

    python scripts/maintain/not_alone.py --model smollm2 --json beside.json

Who waits for other threads by spinning loses most where it is not alone (docs/cpu.md). An engine has a process of its
own and a thread on every core; a competitor is a process that does nothing but take a core. In each turn every company
has a block of steps; speeds are medians over the turns.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the other programs and their helpers lie

import torch

from common import parser_of, refusing, started
from files import check_files
from flags import MODELS
from gpt_fast_sd.loading import BUNDLED, locate, sensible_threads
from gpt_fast_sd.model import read_config
from measuring.ledger import write_whole
from measuring.machine import environment
from measuring.peer_turns import prompt_tokens
from measuring.peers import Entry, Setup, Worker

PROGRAM, ALONE = "not_alone.py", "alone"
ROWS, CONTEXT, TURNS, STEPS = 4, 400, 7, 50  # STEPS: of a block


@contextlib.contextmanager
def competitors(n: int) -> Iterator[None]:
    """While the block runs n processes take a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        time.sleep(0.3 * bool(n))  # until Python has started
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def speed(engines: Sequence[Worker]) -> float:
    """Tokens per second of these engines, which take a block of steps at the same time, together."""

    def of_one(engine: Worker) -> float:
        began = time.perf_counter()
        tokens, _ = engine.call("steps", 0, STEPS)
        return sum(map(len, tokens)) / (time.perf_counter() - began)

    with ThreadPoolExecutor(len(engines)) as pool:
        return sum(pool.map(of_one, engines))


def measure(model: str) -> dict[str, Any]:
    """What each company leaves of the speed."""
    source, n_threads = locate(model), sensible_threads()
    config = read_config(source)
    setup = Setup(folder=source, config=config, ggufs=source, threads=n_threads)
    prompt = prompt_tokens(source, config, BUNDLED / "document.txt", CONTEXT)
    with contextlib.ExitStack() as stack:
        entry = Entry(peer="ours", mode="", dtype="bf16")
        engines = [stack.enter_context(contextlib.closing(Worker(entry, setup))) for _ in range(2)]
        for engine in engines:
            engine.call("reserve", ROWS, CONTEXT + 3 * (TURNS + 1) * STEPS + 2)
            engine.call("prefill", prompt)
        companies = {
            ALONE: (engines[:1], 0), f"{n_threads} busy threads": (engines[:1], n_threads),
            "another engine, both together": (engines, 0),
        }  # fmt: skip
        found: dict[str, list[float]] = {name: [] for name in companies}
        for _ in range(TURNS + 1):
            for name, (some, n) in companies.items():
                with competitors(n):
                    found[name].append(speed(some))
    rows = []
    for name, (_, *speeds) in found.items():  # of the first turn threads and caches are cold
        over = [one / alone for one, alone in zip(speeds, found[ALONE][1:], strict=True)]
        speed_here, share = statistics.median(speeds), statistics.median(over)
        ends = {"least": min(over), "most": max(over)}
        rows.append({"beside": name, "tokens_per_second": speed_here, "over_alone": share, **ends})
        print(f"{name:<32} {speed_here:7.1f} tokens/s, {share:.2f} of alone", flush=True)
    return {
        "benchmark": "not_alone", "model": model, "rows": ROWS, "context": CONTEXT, "threads": n_threads,
        "environment": environment(torch.device("cpu")), "results": rows,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", default="bundled", help=f"{MODELS} (default: bundled)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as one JSON document")
    args = parser.parse_args(argv)
    with refusing(PROGRAM):
        check_files({"--json": args.json}, {"--model": args.model})
        found = measure(args.model)
        if args.json:
            write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    started(main)
