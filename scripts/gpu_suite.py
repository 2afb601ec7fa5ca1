"""Check and measure everything that needs a GPU, by one command that can be called again until all is done.

    python scripts/gpu_suite.py OUT                           every stage that is not done yet, as far as the time goes
    python scripts/gpu_suite.py OUT --stages machine,graphs   these alone
    python scripts/gpu_suite.py OUT --device cpu --tiny       a dry run anywhere: tiny shapes, figures mean nothing

Each stage is a process of its own, so one that fails loses no other. Its result stands in OUT/results.json as soon as
it is there and is not measured again; a stage for which the time left is too short waits for the next call. In the end,
and after every call, OUT/summary.md is a page of targets beside what was measured and what the cost model says, and the
plots show it. Exit code 0: all stages asked for are done and right; 3: some are left; 1: one failed or found an error.

Speed at 8 B parameters is measured with random weights. How many drafts are kept is then replayed from published
acceptance (gpt_fast_sd/replay.py), everything else of a round runs as it is: such figures are called replays.

The stages:
STAGES
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

from gpt_fast_sd.roofline import IDEAL, PRACTICAL
from gpu_stages import ARMS, CELLS, STAGES, Setup, Stage, planned, predict

PROGRAM = "gpu_suite.py"
DONE, FAILED, LEFT = "done", "failed", "left"
ALL_FINE, SOMETHING_WRONG, REFUSED, STAGES_LEFT = 0, 1, 2, 3
TAIL = 4000  # characters of a failed stage's output that are kept
SPARE = 5.0  # seconds of the budget kept for the summary
Record = dict[str, Any]


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
        raise ValueError("torch sees no CUDA device here: run this on a GPU, or dry with --device cpu --tiny")
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
    """What a stage gets to know."""
    return Setup(
        device=torch.device(args.device), tiny=args.tiny, pairs=args.pairs, max_autotune=args.max_autotune,
        texts=tuple(args.texts), known=known,
    )  # fmt: skip


# ---- results that outlast a call -------------------------------------------------------------------------------------


class Ledger:
    """OUT/results.json, whole after each stage."""

    def __init__(self, out: Path, settings: Record, *, fresh: bool) -> None:
        """ValueError where OUT holds results of other settings, or a results.json that is none of ours."""
        self.path = out / "results.json"
        self.document: Record = {"suite": "gpt_fast_sd gpu_suite", "settings": settings, "stages": {}}
        if fresh:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            advice = "name another folder, or forget them with --fresh"
            try:
                old = json.loads(self.path.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise ValueError(f"{self.path} is not JSON: {advice}") from None
            if not isinstance(old, dict) or old.get("suite") != self.document["suite"]:
                raise ValueError(f"{self.path} holds no results of this suite: {advice}")
            for name, value in settings.items():
                before = old["settings"].get(name)
                if before != value:
                    raise ValueError(f"{self.path} was measured with {name} {before}, not {value}: {advice}")
            self.document = old
        self.stages: dict[str, Record] = self.document["stages"]

    @property
    def results(self) -> dict[str, Record]:
        """What the stages that are done have found, by stage."""
        return {name: entry["result"] for name, entry in self.stages.items() if entry["status"] == DONE}

    def put(self, name: str, entry: Record) -> None:
        """One more stage, on the disk when this returns."""
        self.stages[name] = entry
        write_whole(self.path, json.dumps(self.document, indent=1) + "\n")

    def is_done(self, name: str) -> bool:
        """Whether there is a result: a stage that failed is tried again."""
        return name in self.results


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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
        entry["seconds"] = time.perf_counter() - before
        print(f"--- {stage.name} {entry['status']} in {entry['seconds']:.1f} s", flush=True)
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


# ---- the summary -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure that was aimed at: what it is, the bound, and what was measured and is predicted, None if unknown."""

    name: str
    aim: str
    measured: float | None
    predicted: float | None
    met: bool | None
    unit: str = ""
    where: str = ""

    def cell(self, value: float | None, missing: str) -> str:
        """A figure in words."""
        if value is None:
            return missing
        return f"{value:.1%}" if self.unit == "%" else f"{value:.3g}{self.unit}"


def worst(values: Sequence[tuple[float, str]], *, least: bool) -> tuple[float | None, str]:
    """The least or the greatest, and where it was found."""
    if not values:
        return None, ""
    value, where = min(values) if least else max(values)
    return value, where


def targets(results: Mapping[str, Record], setup: Setup) -> list[Target]:
    """Every target beside what the stages found."""
    cells = [result for name, result in results.items() if name.startswith("cell-")]
    plain, draft, verify, judge = [], [], [], []
    for result in cells:
        where, steps, floor = f"{result['cell']} {result['arm']}", result["steps"], result["roofline"]
        plain.append((floor["target"] / steps["target"], where))
        draft += [(floor["draft"][g] / seconds, where) for g, seconds in steps["draft"].items()]
        verify += [(seconds / steps["target"], where) for g, seconds in steps["verify"].items() if g == "5"]
        judge += [(seconds * 1e3, where) for seconds in steps["judge"].values()]
    found = []
    cell, arm = next(iter(CELLS)), ARMS["streaming"]
    ideal, practical = (predict(setup, cell, arm, arm.profiles[0], 5, efficiency) for efficiency in (IDEAL, PRACTICAL))
    shares = (
        ("plain step, share of the roofline", 0.80, plain, ideal.target_seconds / practical.target_seconds),
        ("draft step, share of the roofline", 0.70, draft, ideal.draft_seconds / practical.draft_seconds),
    )
    for name, bound, values, predicted in shares:
        value, where = worst(values, least=True)
        found.append(
            Target(
                name=name, aim=f"at least {bound:.0%}", measured=value, predicted=predicted, where=where, unit="%",
                met=None if value is None else value >= bound,
            )
        )  # fmt: skip
    value, where = worst(verify, least=False)
    found.append(
        Target(
            name="T_V / T_T at gamma 5", aim="at most 1.10", measured=value, where=where,
            predicted=practical.verify_seconds / practical.target_seconds, met=None if value is None else value <= 1.10,
        )
    )  # fmt: skip
    value, where = worst(judge, least=False)
    found.append(
        Target(
            name="judging, commit and sampling", aim="at most 0.1 ms", measured=value, predicted=None, where=where,
            unit=" ms", met=None if value is None else value <= 0.1,
        )
    )  # fmt: skip
    aims = (
        ("32x28672", "streaming", "streaming", 1.9),
        ("16x57344", "snapkv", "snapkv", 2.4),
        ("16x57344", "guided", "guided", 3.0),
    )
    for cell, policy, profile, bound in aims:
        row = next(
            (r for r in results.get(f"cell-{cell}-{policy}", {}).get("replay", []) if r["profile"] == profile), None
        )
        value = row["ratio"]["median"] if row else None
        found.append(
            Target(
                name=f"replay: speed over plain decoding, {cell}, {policy}",
                aim=f"at least {bound:g}x" + (", the moonshot" if bound == 3.0 else ""), measured=value, unit="x",
                predicted=planned(setup, cell, ARMS[policy], profile).ratio,
                met=None if value is None else value >= bound,
            )
        )  # fmt: skip
    return found


def summary(ledger: Ledger, setup: Setup, stages: Sequence[Stage], plots: Sequence[Path]) -> str:
    """One page: targets, what is right and what is not, speeds, what is missing."""
    results, settings = ledger.results, ledger.document["settings"]
    dry = setup.tiny
    lines = ["# GPU suite", ""]
    if dry:
        what = "cpu dry run" if setup.device.type == "cpu" else "dry run"
        lines += [f"**This is a {what}: tiny shapes, which say that the suite works and nothing about speed.**", ""]
    where = results.get("machine", {}).get("environment", {})
    rates = results.get("machine", {}).get("rates")
    lines.append(f"Device: {settings['device']}; torch {where.get('torch', '-')}, triton {where.get('triton', '-')}.")
    if rates:
        lines.append(
            f"Measured ceilings: copy {rates['copy'] / 1e9:,.0f} GB/s, read {rates['read'] / 1e9:,.0f} GB/s, "
            f"matrix products {rates['matmul'] / 1e12:,.1f} TFLOP/s."
        )
    lines += [
        f"The roofline and the predictions are those of {setup.chip.name}: {setup.chip.bandwidth / 1e12:.3g} TB/s, "
        f"{setup.chip.peak / 1e12:.3g} TFLOP/s. Weights of the 8 B model are random, and how many drafts a row keeps "
        "is replayed from published acceptance: a replay says how fast rounds are, not how good drafts are.",
        "", "## Targets", "", "| target | aim | measured | cost model | met |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for one in targets(results, setup):
        measured = "not measured" if dry else one.cell(one.measured, "not measured")
        met = "-" if dry or one.met is None else "yes" if one.met else "no"
        at = f" ({one.where})" if one.where and not dry else ""
        lines.append(f"| {one.name} | {one.aim} | {measured}{at} | {one.cell(one.predicted, '-')} | {met} |")
    lines += ["", *correctness_lines(results), *replay_lines(results), *bundled_lines(results)]
    lines += kernel_lines(results)
    missing = [stage.name for stage in stages if not ledger.is_done(stage.name)]
    if missing:
        lines += ["## Missing", ""]
        for name in missing:
            entry = ledger.stages.get(name)
            lines.append(f"- {name}: " + (f"failed, {why(entry)}" if entry else "not run yet"))
        lines.append("")
    lines += [f"![{path.stem}]({path.name})" for path in plots]
    if not plots:
        lines.append("No plots: " + ("nothing to draw yet." if importlib.util.find_spec("matplotlib") else NO_PLOTS))
    return "\n".join(lines) + "\n"


def why(entry: Record) -> str:
    """Why a stage failed: how it ended, and the last thing it said."""
    said = [line.strip() for line in entry["output"].splitlines() if line.strip()]
    return f"{entry['error']}: `{said[-1][:200]}`" if said else str(entry["error"])


NO_PLOTS = 'matplotlib is not installed (pip install "gpt_fast_sd[plot]").'


def correctness_lines(results: Mapping[str, Record]) -> list[str]:
    """What was compared, and the worst of each."""
    rows = [(name, worst) for name, result in results.items() for worst in result.get("worst", [])]
    if not rows:
        return []
    lines = ["## Is it right?", "", "| stage | what | worst | allowed | right |", "|---|---|---|---|---|"]
    for name, row in rows:
        right = "yes" if row["ok"] else "**no**"
        lines.append(f"| {name} | {row['op']}: {row['what']} | {row['error']:.2g} | {row['tolerance']:.2g} | {right} |")
    return [*lines, ""]


def replay_lines(results: Mapping[str, Record]) -> list[str]:
    """Rounds with replayed acceptance, all profiles."""
    rows = [(result, row) for result in results.values() for row in result.get("replay", [])]
    if not rows:
        return []
    lines = [
        "## Rounds of the 8 B shape, acceptance replayed", "",
        "Median of the ratios of pairs run in turns, with least and greatest; tokens/s of all rows, host included.", "",
        "| cell | draft | profile | gamma | tokens/round | plain tok/s | replay tok/s | replay speed | cost model "
        "ideal / practical | to the end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result, row in rows:
        ratio = row["ratio"]
        lines.append(
            f"| {result['cell']} | {result['policy']} {result['budget']:,} | replay of {row['profile']} "
            f"| {row['gamma']} | {row['tokens_per_round']:.2f} | {row['plain_tokens_per_second']:,.0f} "
            f"| {row['replayed_tokens_per_second']:,.0f} | {ratio['median']:.2f}x ({ratio['min']:.2f} to "
            f"{ratio['max']:.2f}) | {row['predicted_ideal']:.2f}x / {row['predicted_practical']:.2f}x "
            f"| {row['to_the_end_ratio']:.2f}x |"
        )
    steps = [
        "",
        "| cell | draft | T_T ms (roofline) | T_D ms (roofline) | T_V ms (roofline) | judge ms |",
        "|---|---|---|---|---|---|",
    ]
    for result in results.values():
        if "replay" not in result:
            continue
        s, floor = result["steps"], result["roofline"]
        drafts = ", ".join(f"{t * 1e3:.2f} ({floor['draft'][g] * 1e3:.2f})" for g, t in s["draft"].items())
        verify = ", ".join(f"gamma {g}: {t * 1e3:.2f} ({floor['verify'][g] * 1e3:.2f})" for g, t in s["verify"].items())
        judge = ", ".join(f"{t * 1e3:.3f}" for t in s["judge"].values())
        target = f"{s['target'] * 1e3:.2f} ({floor['target'] * 1e3:.2f})"
        draft = f"{result['policy']} {result['budget']:,}"
        steps.append(f"| {result['cell']} | {draft} | {target} | {drafts} | {verify} | {judge} |")
    return [*lines, *steps, ""]


def bundled_lines(results: Mapping[str, Record]) -> list[str]:
    """The bundled model, with acceptance of its own."""
    found = {name: result for name, result in results.items() if name.startswith("bundled-")}
    if not found:
        return []
    lines = [
        "## The bundled model, its own acceptance (no replay)", "",
        "| rows x context | draft | acceptance | tokens/round | plain tok/s | speculative tok/s | speed |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result in found.values():
        for row in result["results"]:
            ratio = row["ratio"]
            lines.append(
                f"| {result['batch']} x {result['context']:,} | {row['policy']} {row['budget']} "
                f"| {row['acceptance_rate']:.1%} | {row['tokens_per_round']:.2f} "
                f"| {row['plain_tokens_per_second']:,.0f} | {row['speculative_tokens_per_second']:,.0f} "
                f"| {ratio['median']:.2f}x ({ratio['min']:.2f} to "
                f"{ratio['max']:.2f}) |"
            )
    return [*lines, ""]


def kernel_lines(results: Mapping[str, Record]) -> list[str]:
    """Kernels by time, with their share of the roofline and of what was measured of the chip."""
    rows = [row for name, result in results.items() if name.startswith("time-") for row in result["rows"]]
    if not rows:
        return []
    lines = [
        "## Kernels", "",
        "| kernel | shape | us | GB/s | TFLOP/s | of the roofline | of the measured ceilings |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['op']} | {row['what']} | not run: {row['failed']} | | | | |")
            continue
        measured = "-" if row["share_of_measured"] is None else f"{row['share_of_measured']:.0%}"
        lines.append(
            f"| {row['op']} | {row['what']} | {row['seconds'] * 1e6:,.1f} | {row['gb_per_second']:,.0f} "
            f"| {row['tflops']:.1f} | {row['share']:.0%} | {measured} |"
        )
    return [*lines, ""]


def draw(results: Mapping[str, Record], out: Path, *, dry: bool) -> list[Path]:
    """The plots that the results allow; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mark = "dry run, no measurement: " if dry else ""
    drawn = []
    timed = [
        row for name, result in results.items() if name.startswith("time-") for row in result["rows"] if "share" in row
    ]
    if timed:
        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.24 * len(timed)), layout="constrained")
        names = [f"{row['op']}, {row['what']}" for row in timed]
        colors = ["tab:gray" if row["peer"] else "tab:blue" for row in timed]
        axes.barh(names, [row["share"] for row in timed], color=colors)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        axes.set_xlabel("share of the roofline (bytes that must move, or operations)")
        figure.suptitle(f"{mark}kernels (blue) and others' (gray)")
        drawn.append(out / "kernels.png")
        figure.savefig(drawn[-1], dpi=120)
        pyplot.close(figure)
    rows = [(result, row) for result in results.values() for row in result.get("replay", [])]
    if rows:
        figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
        names = [f"{result['cell']}, {result['policy']}, replay of {row['profile']}" for result, row in rows]
        ratios = [row["ratio"] for _, row in rows]
        low = [ratio["median"] - ratio["min"] for ratio in ratios]
        high = [ratio["max"] - ratio["median"] for ratio in ratios]
        axes.barh(names, [ratio["median"] for ratio in ratios], xerr=[low, high], color="tab:blue", label="replay")
        for key, marker, label in (("predicted_practical", "D", "cost model"), ("predicted_ideal", "x", "its ideal")):
            axes.plot(
                [row[key] for _, row in rows],
                names,
                marker,
                color="tab:orange" if marker == "D" else "black",
                label=label,
            )
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.legend()
        axes.set_xlabel("speed over plain decoding")
        figure.suptitle(f"{mark}rounds of the 8 B shape, acceptance replayed")
        drawn.append(out / "replay.png")
        figure.savefig(drawn[-1], dpi=120)
        pyplot.close(figure)
    return drawn


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
