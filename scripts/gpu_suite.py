"""Check and measure everything that needs a GPU, by one command that can be called again until all is done.

    python scripts/gpu_suite.py OUT                                every stage not done yet, as far as the time goes
    python scripts/gpu_suite.py OUT --stages machine,test-rounds   these alone
    python scripts/gpu_suite.py OUT --device cpu --tiny            a dry run anywhere: tiny shapes, figures mean nothing

Each stage is a process of its own, so one that fails loses no other. Its result stands in OUT/results.json as soon as
it is there and is not measured again, nor is a test that has passed on these sources run again (OUT/tests.json); a
stage for which the time left is too short waits for the next call. In the end, and after every call, OUT/summary.md is
a page of targets beside what was measured and what the cost model says, and the plots show it. Exit code 0: all stages
asked for are done and right; 3: some are left; 1: one failed or found an error; 2: what was asked for makes no sense.

Speed at 8 B parameters is measured with random weights. How many drafts are kept is then replayed from published
acceptance (gpt_fast_sd/measuring/replay.py), everything else of a round runs as it is: such figures are called replays.

The stages:
STAGES
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from common import parser_of, refuse, started
from gpt_fast_sd.measuring.ledger import Ledger, write_whole
from gpt_fast_sd.measuring.machine import environment
from gpt_fast_sd.tp import why_no_cuda
from gpu.setup import Record, Setup
from gpu.stages import DONE, FAILED, LEFT, STAGES, Stage, results_of
from gpu.summary import draw, summary

PROGRAM = "gpu_suite.py"
ALL_FINE, SOMETHING_WRONG, STAGES_LEFT = 0, 1, 3
TAIL = 4000  # characters of a failed stage's output that are kept
SPARE = 5.0  # seconds of the budget kept for the summary


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exit code 2 with one sentence where it makes no sense."""
    listing = "\n".join(f"  {stage.name:<26} {stage.about}" for stage in STAGES.values())
    parser = parser_of(PROGRAM, (__doc__ or "").replace("STAGES\n", f"{listing}\n"))
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder of results; it may hold those of earlier calls")
    add("--stages", metavar="A,B", help="only these (default: all)")
    add("--budget-seconds", type=float, default=520.0, metavar="S",
        help="begin nothing that ends later; no less than the longest stage takes (default: 520)")  # fmt: skip
    add("--fresh", action="store_true", help="forget the results that OUT holds")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --tiny (default: cuda)")
    add("--tiny", action="store_true", help="tiny shapes: a dry run of the whole suite")
    add("--pairs", type=int, default=6, metavar="N", help="pairs of runs for a ratio (default: 6)")
    add("--max-autotune", action="store_true", help="let Inductor time its matrix products: minutes more")
    add("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="what the bundled model continues")
    add("--only", metavar="STAGE", help=argparse.SUPPRESS)  # this process is a stage
    add("--into", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> list[Stage]:
    """The stages asked for; ValueError in one sentence."""
    names = [name.strip() for name in args.stages.split(",")] if args.stages is not None else list(STAGES)
    for name in names:
        if name not in STAGES:
            raise ValueError(f"--stages names {name!r}; there are {', '.join(STAGES)}")
    longest = max((STAGES[name] for name in names), key=lambda stage: stage.seconds)
    if not args.budget_seconds >= longest.seconds + SPARE:  # it would be left by every call
        least = f"{longest.seconds + SPARE:g} for {longest.name}"
        raise ValueError(f"--budget-seconds must be at least {least}, got {args.budget_seconds:g}")
    if args.pairs < 1:
        raise ValueError(f"--pairs must be at least 1, got {args.pairs}")
    if args.device == "cpu" and not args.tiny:
        raise ValueError("--device cpu is for a dry run: give --tiny too")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"torch sees no CUDA device here: {why_no_cuda()}; run this on a GPU, or dry with --device cpu --tiny"
        )
    if importlib.util.find_spec("pytest") is None and any(name.startswith("test-") for name in names):
        raise ValueError('tests need pytest: pip install -e ".[test]", or name --stages without test-')
    for path in args.texts:
        if not path.is_file():
            raise ValueError(f"there is no text file {path}")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"{args.out} is a file: OUT must be a folder")
    return [STAGES[name] for name in dict.fromkeys(names)]


def settings_of(args: argparse.Namespace) -> Record:
    """What results that may stand in one file have in common."""
    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "tiny": args.tiny, "pairs": args.pairs, "max_autotune": args.max_autotune,
        "texts": [path.name for path in args.texts],
    }  # fmt: skip


def setup_of(args: argparse.Namespace, known: Mapping[str, Record]) -> Setup:
    """What a stage gets to know.

    Only the process of a stage asks for free memory: that opens the device, which takes some of it for as long as the
    process lives.
    """
    return Setup(
        device=torch.device(args.device), tiny=args.tiny, pairs=args.pairs, max_autotune=args.max_autotune,
        texts=tuple(args.texts), out=args.out, known=known,
        free=torch.cuda.mem_get_info()[0] if args.device == "cuda" and args.only else None,
    )  # fmt: skip


# ---- one stage after the other ---------------------------------------------------------------------------------------

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


def ledger_of(args: argparse.Namespace, *, fresh: bool = False) -> Ledger:
    """OUT/results.json, whole after each stage; ValueError where it holds results of other settings, or none."""
    machine = environment(torch.device(args.device))
    return Ledger(args.out / "results.json", "gpu_suite", settings_of(args), machine, fresh=fresh, results="stages")


def launcher(argv: Sequence[str]) -> Launch:
    """Runs a stage of this command line in a process of its own, whose output is passed on as it comes."""

    def launch(stage: Stage, timeout: float) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "result.json"
            program = [sys.executable, str(Path(__file__).resolve()), *argv]
            code, output = run_process([*program, "--only", stage.name, "--into", str(into)], timeout)
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


# ---- all together ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done, write the summary -> the exit code."""
    args = parse(argv)
    try:
        stages = check(args)
        if args.only:
            result = STAGES[args.only].run(setup_of(args, results_of(ledger_of(args))))
            write_whole(args.into, json.dumps(result))
            return ALL_FINE
        args.out.mkdir(parents=True, exist_ok=True)
        ledger = ledger_of(args, fresh=args.fresh)
        if args.fresh:
            for name in ("results.json", "tests.json", "bundled.json"):
                (args.out / name).unlink(missing_ok=True)
    except (ValueError, OSError) as error:
        if args.only:
            raise
        refuse(error, PROGRAM)
    left = conduct(stages, ledger, args.budget_seconds, launcher(sys.argv[1:] if argv is None else argv))
    results = results_of(ledger)
    plots = draw(results, args.out, dry=args.tiny)
    page = summary(ledger, setup_of(args, results), list(STAGES.values()), plots)
    write_whole(args.out / "summary.md", page)
    failed = [stage.name for stage in stages if (ledger.find({"stage": stage.name}) or {}).get("status") == FAILED]
    wrong = [stage.name for stage in stages if results.get(stage.name, {}).get("ok") is False]
    print(f"\n{args.out / 'summary.md'} is written")
    for what, names in (("failed", failed), ("found errors", wrong), ("left for the next call", left)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return SOMETHING_WRONG if failed or wrong else STAGES_LEFT if left else ALL_FINE


if __name__ == "__main__":
    started(main)
