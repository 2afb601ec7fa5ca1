"""Check and measure everything that needs a GPU, by one command that can be called again until all is done.

    python scripts/gpu_suite.py OUT                                every stage not done yet, as far as the time goes
    python scripts/gpu_suite.py OUT --stages machine,test-rounds   these alone
    python scripts/gpu_suite.py OUT --device cpu --tiny            a dry run anywhere: tiny shapes, figures mean nothing

Each stage is a process of its own, so one that fails loses no other. Its result stands in OUT/results.json as soon as
it is there and is not measured again, nor is a test that has passed on these sources run again (OUT/tests.json); a
stage for which the time left is too short waits for the next call. After every call OUT/summary.md is a page of
targets beside what was measured and what the cost model says. Exit code 0: all stages asked for are done and right;
3: some are left; 1: one failed or found an error; 2: what was asked for makes no sense.

Speed at 8 B parameters is measured with random weights. How many drafts are kept is then replayed from published
acceptance (scripts/measuring/replay.py), everything else of a round runs as it is: such figures are called replays.

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common import parser_of, refuse, started
from gpt_fast_sd.tp import why_no_cuda
from measuring.gpu.cells import ALONE, ARMS, FULL, PRECISIONS, Arm, timed_cell
from measuring.gpu.kernels import CONTEXT, timed_attention, timed_linears, timed_select
from measuring.gpu.page import page
from measuring.gpu.setup import ROOT, Record, Setup, machine, tree_of
from measuring.grid import draft_label
from measuring.ledger import Ledger, write_whole
from measuring.machine import environment

PROGRAM = "gpu_suite.py"
ALL_FINE, SOMETHING_WRONG, STAGES_LEFT = 0, 1, 3
DONE, FAILED, LEFT = "done", "failed", "left"
MEMORY_OF_TESTS = 4e9  # bytes of the device that a process of tests may take
SPARE = 5.0  # seconds of the budget kept for the page


@dataclass(frozen=True)
class Stage:
    """One process of the suite. seconds: estimated, on a GPU of 2024 beside 16 cores, compiling included."""

    name: str
    seconds: int
    about: str
    run: Callable[[Setup], Record] = field(repr=False)

    def is_done(self, ledger: Ledger) -> bool:
        """Whether there is a result; tests are done when all of them have passed on the sources as they are now."""
        result = results_of(ledger).get(self.name)
        return result is not None and ("tests" not in result or (result["ok"] and result["tree"] == tree_of()))


def results_of(ledger: Ledger) -> dict[str, Record]:
    """What the stages that are done have found, by stage."""
    return {record["stage"]: record["result"] for record in ledger.records if record["status"] == DONE}


def tests(name: str, seconds: int, about: str, processes: int = 1) -> Stage:
    """The tests of tests/gpu/test_NAME.py: on CUDA those marked so, in a dry run the same ones, small.

    processes: that share them, since most of their time is one core's, which compiles.
    """

    def run(setup: Setup) -> Record:
        file, found = f"tests/gpu/test_{name}.py", setup.out.resolve() / "tests.json"
        tree = {"tree": tree_of(), "device": setup.device_name}
        options = ["-s", "-q", "-p", "no:cacheprovider", "-m", "gpu" if setup.on_cuda else "not gpu"]
        at_once = min(processes, (os.cpu_count() or 1) // 2, int(setup.memory // MEMORY_OF_TESTS))
        options += ["-n", str(at_once)] if at_once > 1 and importlib.util.find_spec("xdist") else []
        how = ["--outcomes", str(found), "--outcomes-on", json.dumps(tree)]
        code = subprocess.run([sys.executable, "-m", "pytest", *options, *how, file], cwd=ROOT, check=False).returncode
        every = json.loads(found.read_text(encoding="utf-8"))["tests"] if found.exists() else {}
        ours = {test.rpartition("/")[2]: one for test, one in every.items() if test.startswith(file)}
        if code not in (0, 1, 5) or not ours:  # 5: none is left to run
            raise RuntimeError(f"pytest ended with {code}, and {len(ours)} tests of {file} are known")
        return {"ok": all(one["outcome"] == "passed" for one in ours.values()), "tree": tree["tree"], "tests": ours}

    return Stage(f"test-{name}", seconds, about, run)


def timings(name: str, seconds: int, about: str, run: Callable[..., Any] = timed_attention, **how: Any) -> Stage:
    return Stage(f"time-{name}", seconds, about, lambda setup: {"rows": run(setup, **how)})


def cell(name: str, context: int, arm: Arm) -> Stage:
    rows = f"{(FULL | ALONE)[context]} rows of {context:,} at most"
    about = f"{arm.policy}, {arm.quantize or 'the target as its'} weights, {rows}: steps, and replay of {arm.name}"
    return Stage(f"{name}-{context}-{arm.quantize if name == 'precision' else arm.name}", 90, about,
                 lambda setup: timed_cell(setup, context, arm))  # fmt: skip


def bundled(setup: Setup) -> Record:
    """The points of a sweep by benchmark.py, which goes on where it was stopped; RuntimeError if one is missing."""
    file, contexts = setup.out / "bundled.json", "8k,16k" if setup.texts else "4k,7k"  # all that the document holds
    size = {"--batch": "8,32", "--context": contexts, "--max-new-tokens": "128", "--budget": "512"}
    if setup.tiny:
        size = {"--batch": "2", "--context": "160", "--max-new-tokens": "8", "--budget": "96"}
    how = {"--draft": "streaming,snapkv,guided", "--gamma": "4", "--temperature": "0.8", "--pairs": str(setup.pairs)}
    where = {"--model": "bundled", "--device": setup.device.type, "--json": str(file)}
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py")]
    command += [word for pair in (size | how | where).items() for word in pair]
    command += ["--text", *map(str, setup.texts)] if setup.texts else []
    command += ["--no-compile"] if setup.tiny else ["--max-autotune"] if setup.max_autotune else []
    subprocess.run(command, check=True)
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    if failed := [one for one in points if one["status"] != "measured"]:
        labels = (f"{one['batch']} x {one['context']:,}, {draft_label(one)}: {one['reason']}" for one in failed)
        raise RuntimeError("; ".join(labels))
    return {"points": points}


HEADLINES = ((57344, "guided"), (57344, "snapkv"), (57344, "streaming"), (28672, "streaming"))  # of targets
STAGES = {
    stage.name: stage
    for stage in (  # in the order in which they are worth having: the time on a chip may end after any
        # does it run at all, by the default configuration; then the one number that all predictions depend on
        tests("smoke", 180, "the bundled model as generate.py runs it"),
        timings("decode-57344", 30, "dense attention of the headline cell", contexts=(57344,), widths=(1, 6, 9)),
        Stage("machine", 15, "what runs, and measured bandwidth and matrix rate", machine),
        # a kernel that is wrong has no speed
        tests("kernels", 120, "attention against fp64, selection against plain Python, filters against a sort", 8),
        *(cell("cell", context, ARMS[arm]) for context, arm in HEADLINES),
        tests("rounds", 180, "captured rounds beside others, each token; no host wait in a round, no idle row", 8),
        timings("decode", 120, "dense attention beside torch's", contexts=(4096, CONTEXT, 100_000), widths=(1, 6)),
        timings("formats", 90, "attention by what the cache holds", contexts=(CONTEXT,), widths=(1, 5), budgets=(1024,),
                chunk=2048, by_format=True),
        tests("weights", 60, "products with quantized weights against fp64", 8),
        timings("linears", 90, "products by the precision of their weights", timed_linears),
        timings("sparse", 45, "sparse attention by budget", contexts=(CONTEXT,),
                budgets=(128, 256, 512, 1024, 2048, 4096)),
        timings("select", 30, "what selecting costs per round", timed_select),
        timings("prefill", 45, "attention of chunks beside torch's", contexts=(8192, CONTEXT, 57344), chunk=2048),
        Stage("bundled", 360, "the bundled model end to end, acceptance of its own", bundled),
        *(cell("precision", context, arm) for context in ALONE for arm in PRECISIONS.values()),
        *(cell("precision", c, arm) for c in (57344, CONTEXT) for arm in PRECISIONS.values() if arm.quantize),
        *(cell("cell", context, ARMS[arm]) for context in FULL for arm in ARMS if (context, arm) not in HEADLINES),
    )
}  # fmt: skip
Launch = Callable[[Stage, float], Record]


def conduct(stages: Sequence[Stage], ledger: Ledger, budget: float, launch: Launch) -> list[str]:
    """Run what is not done, as far as the budget goes, what has failed before last -> the names of those left.

    A stage is begun if its estimated time is left of the budget, the first of a call in any case, and has all
    that is left. One that is stopped then has failed only if it had its estimated time.
    """
    began, left, ran = time.perf_counter(), [], 0
    todo = [stage for stage in stages if not stage.is_done(ledger)]
    for name in (stage.name for stage in stages if stage not in todo):
        print(f"{name}: there already")
    for stage in sorted(todo, key=lambda one: ledger.find({"stage": one.name}) is not None):
        remaining = budget - SPARE - (time.perf_counter() - began)
        if ran and remaining < stage.seconds:
            left.append(stage.name)
            print(f"{stage.name}: left for the next call: about {stage.seconds} s, and {remaining:.0f} s are left")
            continue
        print(f"--- {stage.name}: {stage.about}", flush=True)
        ran, before = ran + 1, time.perf_counter()
        entry = launch(stage, max(1.0, remaining))
        seconds = time.perf_counter() - before
        print(f"--- {stage.name} {entry['status']} in {seconds:.1f} s of about {stage.seconds}", flush=True)
        if entry["status"] == LEFT:
            left.append(stage.name)
            continue
        about = {"seconds": seconds, "reckoned_seconds": stage.seconds, "date": time.strftime("%Y-%m-%d %H:%M")}
        ledger.put({"stage": stage.name}, {"stage": stage.name, **about, **entry})
        ledger.write()
    return left


def launcher(program: Sequence[str]) -> Launch:
    """Runs a stage of a program in a process of its own, which is ended in time with all that it began."""

    def launch(stage: Stage, timeout: float) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "result.json"
            command = [sys.executable, *program, "--only", stage.name, "--into", str(into)]
            process = subprocess.Popen(command, start_new_session=True)
            try:
                end = f"exit code {process.wait(timeout)}"
            except subprocess.TimeoutExpired:
                end = f"stopped after {timeout:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # it may have started others
                process.wait()
            found: Record = json.loads(into.read_text(encoding="utf-8")) if into.exists() else {"error": end}
        if "error" in found and end.startswith("stopped") and timeout < stage.seconds:
            return {"status": LEFT}
        return {"status": FAILED, **found} if "error" in found else {"status": DONE, "result": found}

    return launch


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
    if unknown := [name for name in names if name not in STAGES]:
        raise ValueError(f"--stages names {unknown[0]!r}; there are {', '.join(STAGES)}")
    longest = max((STAGES[name] for name in names), key=lambda stage: stage.seconds)
    least = f"{longest.seconds + SPARE:g} for {longest.name}"
    nowhere = [path for path in args.texts if not path.is_file()]
    no_pytest = importlib.util.find_spec("pytest") is None and any(name.startswith("test-") for name in names)
    no_cuda = args.device == "cuda" and not torch.cuda.is_available()
    refusals = {  # of a budget that is too short every call would leave the longest stage
        f"--budget-seconds must be at least {least}, got {args.budget_seconds:g}":
            not args.budget_seconds >= longest.seconds + SPARE,
        f"--pairs must be at least 1, got {args.pairs}": args.pairs < 1,
        "--device cpu is for a dry run: give --tiny too": args.device == "cpu" and not args.tiny,
        f"torch sees no CUDA device here: {why_no_cuda() if no_cuda else ''}; run this on a GPU, or dry with "
        "--device cpu --tiny": no_cuda,
        'tests need pytest: pip install -e ".[test]", or name --stages without test-': no_pytest,
        f"there is no text file {nowhere[0] if nowhere else ''}": bool(nowhere),
        f"{args.out} is a file: OUT must be a folder": args.out.exists() and not args.out.is_dir(),
    }  # fmt: skip
    for said, is_so in refusals.items():
        if is_so:
            raise ValueError(said)
    return [STAGES[name] for name in dict.fromkeys(names)]


def setup_of(args: argparse.Namespace, known: Mapping[str, Record]) -> Setup:
    """What a stage gets to know. Only its own process asks for free memory: that opens the device, which takes some."""
    free = torch.cuda.mem_get_info()[0] if args.device == "cuda" and args.only else None
    return Setup(
        device=torch.device(args.device), tiny=args.tiny, pairs=args.pairs, max_autotune=args.max_autotune,
        texts=tuple(args.texts), out=args.out, known=known, free=free,
    )  # fmt: skip


def ledger_of(args: argparse.Namespace, *, fresh: bool = False) -> Ledger:
    """OUT/results.json, whole after each stage; ValueError where it holds results of other settings, or none."""
    settings = {
        "device": setup_of(args, {}).device_name, "tiny": args.tiny, "pairs": args.pairs,
        "max_autotune": args.max_autotune, "texts": [path.name for path in args.texts],
    }  # fmt: skip
    here, file = environment(torch.device(args.device)), args.out / "results.json"
    return Ledger(file, "gpu_suite", settings, here, fresh=fresh, results="stages")


def run_stage(args: argparse.Namespace) -> int:
    """Run the stage that this process is: its result, or why there is none, goes into --into."""
    try:
        found = STAGES[args.only].run(setup_of(args, results_of(ledger_of(args))))
    except Exception as error:
        write_whole(args.into, json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}))
        raise
    write_whole(args.into, json.dumps(found))
    return ALL_FINE


def missing(stages: Mapping[str, Stage], ledger: Ledger) -> list[str]:
    """A line for each stage that is not done, and why, or that took longer than estimated."""
    lines = []
    for stage in stages.values():
        record = ledger.find({"stage": stage.name})
        if record is None:
            lines.append(f"- {stage.name}: not run yet")
        elif record["status"] == FAILED:
            lines.append(f"- {stage.name}: failed, {record['error']}")
        elif not stage.is_done(ledger):
            why = "its tests or what they test has changed" if record["result"]["ok"] else "a test has not passed"
            lines.append(f"- {stage.name}: {why}")
        elif record["seconds"] > record["reckoned_seconds"]:
            lines.append(f"- {stage.name}: {record['seconds']:.0f} s, estimated {record['reckoned_seconds']} s")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done, write the page -> the exit code."""
    args = parse(argv)
    if args.only:
        return run_stage(args)
    try:
        stages = check(args)
        args.out.mkdir(parents=True, exist_ok=True)
        ledger = ledger_of(args, fresh=args.fresh)
        for name in ("results.json", "tests.json", "bundled.json") if args.fresh else ():
            (args.out / name).unlink(missing_ok=True)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    program = [str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
    left = conduct(stages, ledger, args.budget_seconds, launcher(program))
    results, device = results_of(ledger), ledger.document["settings"]["device"]
    write_whole(args.out / "summary.md", page(results, setup_of(args, results), device, missing(STAGES, ledger)))
    failed = [stage.name for stage in stages if (ledger.find({"stage": stage.name}) or {}).get("status") == FAILED]
    wrong = [stage.name for stage in stages if results.get(stage.name, {}).get("ok") is False]
    print(f"\n{args.out / 'summary.md'} is written")
    for what, names in (("failed", failed), ("found errors", wrong), ("left for the next call", left)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return SOMETHING_WRONG if failed or wrong else STAGES_LEFT if left else ALL_FINE


if __name__ == "__main__":
    started(main)
