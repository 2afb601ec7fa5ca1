"""Check and measure everything that needs a GPU, by one command that can be called again until all is done.

    python scripts/gpu_suite.py OUT                           every stage that is not done yet, as far as the time goes
    python scripts/gpu_suite.py OUT --stages machine,graphs   these alone
    python scripts/gpu_suite.py OUT --device cpu --tiny       a dry run anywhere: tiny shapes, figures mean nothing

Each stage is a process of its own, so one that fails loses no other. Its result stands in OUT/results.json as soon as
it is there and is not measured again; a stage for which the time left is too short waits for the next call. In the end,
and after every call, OUT/summary.md is a page of targets beside what was measured and what the cost model says, and the
plots show it. Exit code 0: all stages asked for are done and right; 3: some are left; 1: one failed or found an error.

Speed at 8 B parameters is measured with random weights. How many drafts are kept is then replayed from published
acceptance (gpt_fast_sd/measuring/replay.py), everything else of a round runs as it is: such figures are called replays.

The stages:
STAGES
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

from gpt_fast_sd.tp import why_no_cuda
from gpu_setup import Record, Setup
from gpu_stages import STAGES, Stage
from gpu_summary import DONE, FAILED, LEFT, Ledger, draw, summary, write_whole

PROGRAM = "gpu_suite.py"
ALL_FINE, SOMETHING_WRONG, REFUSED, STAGES_LEFT = 0, 1, 2, 3
TAIL = 4000  # characters of a failed stage's output that are kept
SPARE = 5.0  # seconds of the budget kept for the summary


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exit code 2 with one sentence where it makes no sense."""
    listing = "\n".join(f"  {stage.name:<26} {stage.about}" for stage in STAGES.values())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=(__doc__ or "").replace("STAGES\n", f"{listing}\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of results; it may hold those of earlier calls")
    parser.add_argument("--stages", metavar="A,B", help="only these (default: all)")
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=520.0,
        metavar="S",
        help="begin nothing that would end later (%(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results that OUT holds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --tiny (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a dry run of the whole suite")
    parser.add_argument("--pairs", type=int, default=6, metavar="N", help="pairs of runs for a ratio (%(default)s)")
    parser.add_argument(
        "--max-autotune", action="store_true", help="let Inductor time its matrix products: minutes more"
    )
    parser.add_argument(
        "--texts", type=Path, nargs="+", default=[], metavar="FILE", help="what the bundled model continues"
    )
    parser.add_argument("--only", metavar="STAGE", help=argparse.SUPPRESS)  # this process is a stage
    parser.add_argument("--into", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> list[Stage]:
    """The stages asked for; ValueError in one sentence."""
    names = [name.strip() for name in args.stages.split(",")] if args.stages else list(STAGES)
    for name in names:
        if name not in STAGES:
            raise ValueError(f"--stages names {name!r}; there are {', '.join(STAGES)}")
    if not args.budget_seconds > 0:
        raise ValueError(f"--budget-seconds must be positive, got {args.budget_seconds:g}")
    if args.pairs < 1:
        raise ValueError(f"--pairs must be at least 1, got {args.pairs}")
    if args.device == "cpu" and not args.tiny:
        raise ValueError("--device cpu is for a dry run: give --tiny too")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"torch sees no CUDA device here: {why_no_cuda()}; run this on a GPU, or dry with --device cpu --tiny"
        )
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
        "tiny": args.tiny,
        "pairs": args.pairs,
        "max_autotune": args.max_autotune,
        "texts": [path.name for path in args.texts],
    }


def setup_of(args: argparse.Namespace, known: Mapping[str, Record]) -> Setup:
    """What a stage gets to know.

    Only the process of a stage asks for free memory: that opens the device, which takes some of it for as long as the
    process lives.
    """
    return Setup(
        device=torch.device(args.device), tiny=args.tiny, pairs=args.pairs, max_autotune=args.max_autotune,
        texts=tuple(args.texts), known=known,
        free=torch.cuda.mem_get_info()[0] if args.device == "cuda" and args.only else None,
    )  # fmt: skip


# ---- one stage after the other ---------------------------------------------------------------------------------------

Launch = Callable[[Stage, float], Record]


def conduct(stages: Sequence[Stage], ledger: Ledger, budget: float, launch: Launch) -> list[str]:
    """Run what is not done, as far as the budget goes, what has failed before last; -> the names of those left.

    A stage is begun if what it is reckoned to take is left of the budget, the first of a call in any case, and has all
    that is left. One that is stopped then has failed only if it had the time it was reckoned to take.
    """
    began, left, ran = time.perf_counter(), [], 0
    waiting = [stage for stage in stages if not ledger.is_done(stage.name)]
    waiting.sort(key=lambda stage: stage.name in ledger.stages)  # stable: those that have failed come last
    for stage in stages:
        if ledger.is_done(stage.name):
            print(f"{stage.name}: there already")
    for stage in waiting:
        remaining = budget - SPARE - (time.perf_counter() - began)
        if ran and remaining < stage.seconds:
            left.append(stage.name)
            print(
                f"{stage.name}: left for the next call, it takes about {stage.seconds} s and {remaining:.0f} s are left"
            )
            continue
        print(f"--- {stage.name}: {stage.about}", flush=True)
        ran, before = ran + 1, time.perf_counter()
        entry = launch(stage, max(1.0, remaining))
        seconds = time.perf_counter() - before
        over = max(0.0, seconds - stage.seconds)
        entry |= {"seconds": seconds, "reckoned_seconds": stage.seconds, "seconds_over": over}
        longer = f", {over:.1f} s more than it is reckoned to take" if over else ""
        print(f"--- {stage.name} {entry['status']} in {seconds:.1f} s{longer}", flush=True)
        if entry["status"] == LEFT:
            left.append(stage.name)
        else:
            ledger.put(stage.name, entry)
    return left


def launcher(args: argparse.Namespace, ledger: Ledger) -> Launch:
    """Runs a stage in a process of its own, whose output is passed on as it comes."""

    def launch(stage: Stage, timeout: float) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "result.json"
            texts = ["--texts", *map(str, args.texts)] if args.texts else []
            command = [
                sys.executable, str(Path(__file__).resolve()), str(args.out), "--only", stage.name, "--into", str(into),
                "--device", args.device, "--pairs", str(args.pairs), *texts,
                *(["--tiny"] if args.tiny else []), *(["--max-autotune"] if args.max_autotune else []),
            ]  # fmt: skip
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
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
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
        process.kill()
        process.wait()
    reader.join(5.0)  # a child of the process may hold the pipe
    return code, "".join(lines)


def run_stage(args: argparse.Namespace) -> None:
    """What the process of a stage does: run it and write what it finds."""
    known = Ledger(args.out, settings_of(args), fresh=False).results
    result = STAGES[args.only].run(setup_of(args, known))
    write_whole(args.into, json.dumps(result))


# ---- all together ----------------------------------------------------------------------------------------------------


def refuse(error: Exception) -> NoReturn:
    """One sentence on stderr and exit code 2."""
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    raise SystemExit(REFUSED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done, write the summary -> the exit code."""
    args = parse(argv)
    try:
        stages = check(args)
        if args.only:
            run_stage(args)
            return ALL_FINE
        args.out.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(args.out, settings_of(args), fresh=args.fresh)
    except (ValueError, OSError) as error:
        if args.only:
            raise
        refuse(error)
    left = conduct(stages, ledger, args.budget_seconds, launcher(args, ledger))
    setup = setup_of(args, ledger.results)
    plots = draw(ledger.results, args.out, dry=args.tiny)
    (args.out / "summary.md").write_text(summary(ledger, setup, list(STAGES.values()), plots), encoding="utf-8")
    failed = [stage.name for stage in stages if ledger.stages.get(stage.name, {}).get("status") == FAILED]
    wrong = [stage.name for stage in stages if ledger.results.get(stage.name, {}).get("ok") is False]
    print(f"\n{args.out / 'summary.md'} is written")
    for what, names in (("failed", failed), ("found errors", wrong), ("left for the next call", left)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return SOMETHING_WRONG if failed or wrong else STAGES_LEFT if left else ALL_FINE


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
