"""What gpu_suite.py keeps of its stages, and the page that it makes of it: targets beside what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt_fast_sd.measuring.roofline import EXPECTED, PRACTICAL
from gpu_forecast import AIMS, Aim, Cell, show
from gpu_setup import Record, Setup
from gpu_stages import Stage

DONE, FAILED, LEFT = "done", "failed", "left"

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


# ---- the summary -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """An aim, where the figure was or would be measured, what was, and what the cost model says; None if unknown."""

    aim: Aim
    where: str
    measured: float | None
    good: float | None  # with what good public kernels reach
    expected: float

    @property
    def name(self) -> str:
        """What it is, of a replay with its cell."""
        return f"{self.aim.name}, {self.where}" if self.aim.unit == "x" else self.aim.name

    @property
    def met(self) -> bool | None:
        """Whether what was measured reaches the bound; None where nothing was."""
        return None if self.measured is None else self.aim.met(self.measured)

    def cells(self, dry: bool) -> list[str]:
        """Its row of the table; of a dry run without what was measured."""
        measured = "not measured"
        if self.measured is not None and not dry:
            measured = show(self.measured, self.aim.unit) + ("" if self.aim.unit == "x" else f" ({self.where})")
        good = "-" if self.good is None else show(self.good, self.aim.unit)
        met = "-" if dry or self.met is None else "yes" if self.met else "no"
        return [self.name, self.aim.aim, measured, good, show(self.expected, self.aim.unit), met]


def worst(values: Sequence[tuple[float, str]], *, least: bool) -> tuple[float | None, str]:
    """The least or the greatest of them and where it was, None where there are none."""
    if not values:
        return None, ""
    return min(values) if least else max(values)


def targets(results: Mapping[str, Record], setup: Setup) -> list[Target]:
    """Every target beside what the stages found: a replay in the cell that was run, steps where they were worst."""
    steps: dict[str, list[tuple[float, str]]] = {"plain": [], "draft": [], "verify": [], "judge": []}
    for name, result in results.items():
        if not name.startswith("cell-"):
            continue
        where, found, floor = f"{result['cell']} {result['arm']}", result["steps"], result["roofline"]
        plain = found["target"]["seconds"]
        steps["plain"].append((floor["target"] / plain, where))
        steps["draft"] += [(floor["draft"][g] / one["seconds"], where) for g, one in found["draft"].items()]
        steps["verify"] += [(one["seconds"] / plain, where) for g, one in found["verify"].items() if g == "5"]
        steps["judge"] += [(one["seconds"] * 1e3, where) for one in found["judge"].values()]
    listed = []
    for aim in AIMS:
        measured, ran = None, results.get(f"cell-{aim.context}-{aim.arm}")
        cell = Cell(batch=ran["planned_batch"], context=aim.context) if ran else likely_cell(setup, aim.context)
        where = cell.name
        if aim.key in steps:
            measured, where = worst(steps[aim.key], least=aim.least)
        elif ran:
            measured = next(row["ratio"]["median"] for row in ran["replay"] if row["profile"] == aim.arm)
        good = None if aim.key == "judge" else aim.forecast(setup.chip, cell, PRACTICAL)
        expected = aim.forecast(setup.chip, cell, EXPECTED)
        listed.append(Target(aim=aim, where=where, measured=measured, good=good, expected=expected))
    return listed


def likely_cell(setup: Setup, context: int) -> Cell:
    """The cell that would be run; where the device has no memory for any, one row, as a forecast needs no memory."""
    try:
        return setup.cell(context)
    except ValueError:
        return Cell(batch=1, context=context)


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
        "Both columns of the cost model are estimates: with what good public kernels reach, and what is expected of "
        "ours; benchmarks/h200/README.md gives the reasons.",
        "", "## Targets", "", "| target | aim | measured | good public kernels | expected | met |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {' | '.join(one.cells(dry))} |" for one in targets(results, setup)]
    lines += ["", *smoke_lines(results)]
    lines += [*correctness_lines(results), *replay_lines(results), *bundled_lines(results)]
    lines += kernel_lines(results)
    lines += overrun_lines(ledger.stages)
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


def smoke_lines(results: Mapping[str, Record]) -> list[str]:
    """What the first stage tried, step by step."""
    if "smoke" not in results:
        return []
    found = results["smoke"]
    lines = [
        "## Does it run?", "",
        f"The bundled model as generate.py runs it: {found['seconds']:.0f} s, {found['seconds_meant']} were meant.", "",
        "| step | s | ok | seen |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in found["steps"]:
        said = row["said"].replace("|", "/")
        lines.append(f"| {row['step']} | {row['seconds']:.1f} | {'yes' if row['ok'] else '**no**'} | {said} |")
    return [*lines, ""]


def overrun_lines(stages: Mapping[str, Record]) -> list[str]:
    """The stages that took longer than they were reckoned to take."""
    found = [(name, entry) for name, entry in stages.items() if entry.get("seconds_over")]
    if not found:
        return []
    said = [f"- {name}: {entry['seconds']:.0f} s, reckoned {entry['reckoned_seconds']} s" for name, entry in found]
    return ["## Longer than reckoned", "", *said, ""]


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
        "ideal / good kernels / expected | to the end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result, row in rows:
        ratio = row["ratio"]
        lines.append(
            f"| {result['cell']} | {result['policy']} {result['budget']:,} | replay of {row['profile']} "
            f"| {row['gamma']} | {row['tokens_per_round']:.2f} | {row['plain_tokens_per_second']:,.0f} "
            f"| {row['replayed_tokens_per_second']:,.0f} | {ratio['median']:.2f}x ({ratio['min']:.2f} to "
            f"{ratio['max']:.2f}) | {row['predicted_ideal']:.2f}x / {row['predicted_practical']:.2f}x / "
            f"{row['predicted_expected']:.2f}x | {row['to_the_end_ratio']:.2f}x |"
        )
    steps = [
        "", "Beside each step what the roofline allows; rows and keys are those of the calls that were timed.", "",
        "| cell | draft | step | gamma | ms | roofline ms | rows | keys read a row |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result in results.values():
        for name, found in result["steps"].items() if "replay" in result else ():
            for gamma, one in {"-": found}.items() if "seconds" in found else found.items():
                floor = result["roofline"].get(name)
                allowed = floor[gamma] if isinstance(floor, dict) else floor
                read = one.get("keys_in_view")
                steps.append(
                    f"| {result['cell']} | {result['policy']} {result['budget']:,} | {name} | {gamma} "
                    f"| {one['seconds'] * 1e3:.3f} | {'-' if allowed is None else format(allowed * 1e3, '.3f')} "
                    f"| {one['rows_active']} | {'-' if read is None else ' to '.join(f'{n:,}' for n in read)} |"
                )
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
        "| kernel | shape | us | GB/s | TFLOP/s | of the roofline | of the measured ceilings | rows x keys |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    rates = results.get("machine", {}).get("rates")
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['op']} | {row['what']} | not run: {row['failed']} | | | | | |")
            continue
        measured = "-"
        if rates:  # a kernel may have been timed before the chip was
            bandwidth = max(rates["copy"], rates["read"])
            floor = max(row["bytes"] / bandwidth, row["flops"] / rates["matmul"])
            measured = f"{floor / row['seconds']:.0%}"
        read = row.get("keys_in_view")
        lines.append(
            f"| {row['op']} | {row['what']} | {row['seconds'] * 1e6:,.1f} | {row['gb_per_second']:,.0f} "
            f"| {row['tflops']:.1f} | {row['share']:.0%} | {measured} "
            f"| {row['rows_active']}{'' if read is None else f' x {read[0]:,}'} |"
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
        marks = {"expected": ("D", "tab:orange"), "practical": ("d", "tab:gray"), "ideal": ("x", "black")}
        for key, (marker, color) in marks.items():
            predicted = [row[f"predicted_{key}"] for _, row in rows]
            axes.plot(predicted, names, marker, color=color, label=f"cost model: {key}")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.legend()
        axes.set_xlabel("speed over plain decoding")
        figure.suptitle(f"{mark}rounds of the 8 B shape, acceptance replayed")
        drawn.append(out / "replay.png")
        figure.savefig(drawn[-1], dpi=120)
        pyplot.close(figure)
    return drawn
