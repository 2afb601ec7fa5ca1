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
acceptance (scripts/measuring/replay.py), everything else of a round runs as it is: such figures are called replays.

The stages:
STAGES
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from common import parser_of, refuse, started
from gpt_fast_sd.tp import why_no_cuda
from measuring.gpu.conducting import SPARE, conduct, launcher
from measuring.gpu.setup import Record, Setup
from measuring.gpu.stages import FAILED, STAGES, Stage, results_of
from measuring.gpu.summary import draw, summary
from measuring.ledger import Ledger, write_whole
from measuring.machine import environment

PROGRAM = "gpu_suite.py"
ALL_FINE, SOMETHING_WRONG, STAGES_LEFT = 0, 1, 3


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


def ledger_of(args: argparse.Namespace, *, fresh: bool = False) -> Ledger:
    """OUT/results.json, whole after each stage; ValueError where it holds results of other settings, or none."""
    machine = environment(torch.device(args.device))
    return Ledger(args.out / "results.json", "gpu_suite", settings_of(args), machine, fresh=fresh, results="stages")


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
    program = [str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
    left = conduct(stages, ledger, args.budget_seconds, launcher(program))
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
