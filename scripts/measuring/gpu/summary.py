"""The page that gpu_suite.py makes of its results: targets beside what was measured, what is right, speeds, plots."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from measuring.gpu.aims import AIMS, ALONE, BY_PRECISION, FULL, PRECISIONS, Cell, planned, predict, show
from measuring.gpu.setup import Record, Setup
from measuring.gpu.stages import Stage, results_of
from measuring.ledger import Ledger
from measuring.plots import draw_panels, whiskers
from measuring.points import SIZES, ratio_text
from measuring.roofline import EXPECTED, PRACTICAL
from measuring.tables import Column, Table

NO_PLOTS = 'matplotlib is not installed (pip install "gpt_fast_sd[plot]").'
KERNEL_COLUMNS = (
    "kernel", "shape", "us", "GB/s", "TFLOP/s", "of the roofline", "of the measured ceilings", "rows x keys",
)  # fmt: skip
Row = dict[str, str]  # a column's heading and what it shows


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of the same columns in Markdown; nothing where there is none."""
    return Table(*(Column(heading, itemgetter(heading)) for heading in rows[0])).markdown(rows) if rows else []


# ---- targets ---------------------------------------------------------------------------------------------------------


def targets(results: Mapping[str, Record], setup: Setup) -> list[Row]:
    """Every target beside what the stages found: a replay in the cell that was run, steps where they were worst.

    Of a dry run nothing counts as measured.
    """
    steps: dict[str, list[tuple[float, str]]] = {"plain": [], "draft": [], "verify": [], "judge": []}
    for result in (result for name, result in results.items() if name.startswith("cell-")):
        where, found, floor = f"{result['cell']} {result['arm']}", result["steps"], result["roofline"]
        plain = found["target"]["seconds"]
        steps["plain"].append((floor["target"] / plain, where))
        steps["draft"] += [(floor["draft"][g] / one["seconds"], where) for g, one in found["draft"].items()]
        steps["verify"] += [(one["seconds"] / plain, where) for g, one in found["verify"].items() if g == "5"]
        steps["judge"] += [(one["seconds"] * 1e3, where) for one in found["judge"].values()]
    rows = []
    for aim in AIMS:
        measured, ran = None, results.get(f"cell-{aim.context}-{aim.arm}")
        cell = Cell(batch=ran["planned_batch"], context=aim.context) if ran else likely_cell(setup, aim.context)
        name, where = aim.name, ""
        if aim.key in steps:
            measured, where = (min if aim.least else max)(steps[aim.key], default=(None, ""))
        else:
            name = f"{aim.name}, {cell.name}"
            replayed = ran["replay"] if ran else []
            measured = next((one["ratio"]["median"] for one in replayed if one["profile"] == aim.arm), None)
        shown, met = "not measured", "-"
        if measured is not None and not setup.tiny:
            shown = show(measured, aim.unit) + (f" ({where})" if where else "")
            met = "yes" if aim.met(measured) else "no"
        good, expected = (aim.forecast(setup.chip, cell, efficiency) for efficiency in (PRACTICAL, EXPECTED))
        rows.append({
            "target": name, "aim": aim.aim, "measured": shown,
            "good public kernels": "-" if aim.key == "judge" else show(good, aim.unit),
            "expected": show(expected, aim.unit), "met": met,
        })  # fmt: skip
    return rows


def likely_cell(setup: Setup, context: int) -> Cell:
    """The cell that would be run; where the device has no memory for any, one row, as a forecast needs no memory."""
    try:
        return setup.cell(context)
    except ValueError:
        return Cell(batch=1, context=context)


def by_precision(results: Mapping[str, Record], setup: Setup) -> list[Row]:
    """Drafts by the precision of their weights: the cost model's rounds beside what was measured of them.

    Of a dry run nothing counts as measured.
    """
    rows = []
    contexts = dict.fromkeys(context for context, _ in BY_PRECISION)
    for context, (name, arm) in itertools.product(contexts, PRECISIONS.items()):
        stage = f"precision-{context}-{name}" if (context, name) in BY_PRECISION else f"cell-{context}-guided"
        ran = results.get(stage, {})
        cell = Cell(batch=(FULL | ALONE)[context], context=context)
        if "planned_batch" in ran:
            cell = Cell(batch=ran["planned_batch"], context=context)
        chosen = planned(setup.chip, cell, arm, "guided")
        ratios = [predict(setup.chip, cell, arm, "guided", chosen.gamma, e).ratio for e in (PRACTICAL, EXPECTED)]
        measured = next((row["ratio"]["median"] for row in ran.get("replay", []) if row["profile"] == "guided"), None)
        shown = "not measured" if setup.tiny or measured is None else f"{measured:.2f}x"
        rows.append({
            "cell": cell.name, "draft's weights": arm.quantize or "bf16, the target's own",
            "gamma": str(chosen.gamma),
            "T_D / T_T, good public kernels": f"{chosen.draft_seconds / chosen.target_seconds:.3f}",
            "forecast: good public kernels": f"{ratios[0]:.2f}x", "forecast: expected": f"{ratios[1]:.2f}x",
            "measured, replay": f"not run: {ran['skipped']}" if "skipped" in ran else shown,
        })  # fmt: skip
    return rows


# ---- the page --------------------------------------------------------------------------------------------------------


def summary(ledger: Ledger, setup: Setup, stages: Sequence[Stage], plots: Sequence[Path]) -> str:
    """One page: targets, what is right and what is not, speeds, what is missing."""
    results, records = results_of(ledger), ledger.records
    where, rates = (results.get("machine", {}).get(key, {}) for key in ("environment", "rates"))
    dates = [record["date"] for record in records if "date" in record]
    lines = ["# GPU suite", ""]
    if setup.tiny:
        what = "cpu dry run" if setup.device.type == "cpu" else "dry run"
        lines += [f"**This is a {what}: tiny shapes, which say that the suite works and nothing about speed.**", ""]
    versions = where.get("versions", {})
    lines.append(
        f"Device: {ledger.document['settings']['device']}; torch {where.get('torch', '-')}, triton "
        f"{versions.get('triton') or '-'}; measured {f'{min(dates)} to {max(dates)}' if dates else 'nothing yet'}."
    )
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
        "",
    ]
    over = [record for record in records if record.get("seconds_over")]
    missing = [stage for stage in stages if not stage.is_done(ledger)]
    page = {
        "Targets": table(targets(results, setup)),
        "Is it right?": test_lines(results),
        "Rounds of the 8 B shape, acceptance replayed": replay_lines(results),
        "Drafts by the precision of their weights, acceptance replayed": table(by_precision(results, setup)),
        "The bundled model, its own acceptance (no replay)": bundled_lines(results),
        "Kernels": table(kernels(results, rates)),
        "Longer than estimated": [
            f"- {r['stage']}: {r['seconds']:.0f} s, estimated {r['reckoned_seconds']} s" for r in over
        ],
        "Missing": [f"- {stage.name}: {why(ledger, stage)}" for stage in missing],
    }
    for heading, section in page.items():
        lines += [f"## {heading}", "", *section, ""] if section else []
    lines += [f"![{path.stem}]({path.name})" for path in plots]
    if not plots:
        lines.append("No plots: " + ("nothing to draw yet." if importlib.util.find_spec("matplotlib") else NO_PLOTS))
    return "\n".join(lines) + "\n"


def why(ledger: Ledger, stage: Stage) -> str:
    """Why a stage is not done: that it was not run, or how it ended, and the last thing it said."""
    record = ledger.find({"stage": stage.name})
    if record is None:
        return "not run yet"
    if "result" in record:
        return "a test has not passed" if not record["result"]["ok"] else "its tests or what they test has changed"
    return f"failed, {record['error']}: {last(record['output'])}"


def test_lines(results: Mapping[str, Record]) -> list[str]:
    """How many tests have passed, those that have not, and what some of them saw."""
    found = {name: result["tests"] for name, result in results.items() if "tests" in result}
    every = [(test, one) for tests in found.values() for test, one in tests.items()]
    failed = [(test, one) for test, one in every if one["outcome"] != "passed"]
    counts = [
        {
            "stage": name, "tests": str(len(tests)),
            "passed": str(sum(one["outcome"] == "passed" for one in tests.values())),
            "s": f"{sum(one.get('seconds', 0.0) for one in tests.values()):.0f}",
        }
        for name, tests in found.items()
    ]  # fmt: skip
    wrong = [f"- **{test}**: {one['outcome']}; {last(one.get('said', ''))}" for test, one in failed]
    seen = [f"- {test}: {text}" for test, one in every for text in one.get("seen", {}).values()]
    return [*table(counts), *([""] if wrong or seen else []), *wrong, *seen]


def last(said: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in said.splitlines() if line.strip()]
    return f"`{lines[-1].strip()[:200]}`" if lines else "it said nothing"


def keys_of(one: Record) -> str:
    """The least and the most keys that a row reads."""
    return " to ".join(f"{n:,}" for n in one["keys_in_view"]) if "keys_in_view" in one else "-"


def replays(results: Mapping[str, Record]) -> list[tuple[Record, Record]]:
    """All replays, each behind the result of its cell."""
    return [(result, row) for result in results.values() for row in result.get("replay", [])]


def replay_lines(results: Mapping[str, Record]) -> list[str]:
    """Rounds with replayed acceptance, all profiles; then the steps that they are made of."""
    rounds = [
        {
            "cell": result["cell"], "draft": drafted_by(result),
            "profile": f"replay of {row['profile']}", "gamma": str(row["gamma"]),
            "tokens/round": f"{row['tokens_per_round']:.2f}", "plain tok/s": f"{row['plain_tokens_per_second']:,.0f}",
            "replay tok/s": f"{row['replayed_tokens_per_second']:,.0f}", "replay speed": ratio_text(row["ratio"]),
            "cost model ideal, good kernels, expected": ", ".join(
                f"{row[f'predicted_{name}']:.2f}x" for name in ("ideal", "practical", "expected")
            ),
            "to the end": f"{row['to_the_end_ratio']:.2f}x",
        }
        for result, row in replays(results)
    ]  # fmt: skip
    steps = [row for result in results.values() if "replay" in result for row in steps_of(result)]
    if not rounds:
        return []
    return [
        "Median of the ratios of pairs run in turns, with least and greatest; tokens/s of all rows, host included.", "",
        *table(rounds), "",
        "Beside each step what the roofline allows; rows and keys are those of the calls that were timed.", "",
        *table(steps),
    ]  # fmt: skip


def drafted_by(result: Record) -> str:
    """Who drafted in a cell, as "guided 1,024, int8 weights"."""
    weights = f", {result['quantize']} weights" if result.get("quantize") else ""
    return f"{result['policy']} {result['budget']:,}{weights}"


def steps_of(result: Record) -> list[Row]:
    """The steps of a cell, each beside the seconds that the roofline allows."""
    rows = []
    for name, found in result["steps"].items():
        floor = result["roofline"].get(name)
        for gamma, one in {"-": found}.items() if "seconds" in found else found.items():
            allowed = floor[gamma] if isinstance(floor, dict) else floor
            rows.append({
                "cell": result["cell"], "draft": drafted_by(result), "step": name,
                "gamma": gamma, "ms": f"{one['seconds'] * 1e3:.3f}",
                "roofline ms": "-" if allowed is None else f"{allowed * 1e3:.3f}",
                "rows": str(one["rows_active"]), "keys read per row": keys_of(one),
            })  # fmt: skip
    return rows


def bundled_lines(results: Mapping[str, Record]) -> list[str]:
    """The bundled model, with acceptance of its own, as benchmark.py shows it, and notes about the prompts."""
    points = results.get("bundled", {}).get("points", [])
    notes = [f"- {note}" for note in dict.fromkeys(one["note"] for one in points) if note]
    return [*(SIZES.markdown(points) if points else []), *([""] if notes else []), *notes]


def timed(results: Mapping[str, Record]) -> list[Record]:
    """Every kernel that was timed, or was to be."""
    return [row for name, result in results.items() if name.startswith("time-") for row in result["rows"]]


def kernels(results: Mapping[str, Record], rates: Mapping[str, float]) -> list[Row]:
    """Kernels by time, with their share of the roofline and of what was measured of the chip."""
    rows = []
    for one in timed(results):
        row = dict.fromkeys(KERNEL_COLUMNS, "")
        row |= {"kernel": one["op"], "shape": one["what"], "us": f"not run: {one.get('failed')}"}
        if "failed" not in one:
            row |= {
                "us": f"{one['seconds'] * 1e6:,.1f}", "GB/s": f"{one['gb_per_second']:,.0f}",
                "TFLOP/s": f"{one['tflops']:.1f}", "of the roofline": f"{one['share']:.0%}",
                "of the measured ceilings": "-", "rows x keys": f"{one['rows_active']} x {keys_of(one).split()[0]}",
            }  # fmt: skip
            if rates:  # a kernel may have been timed before the chip was
                floor = max(one["bytes"] / max(rates["copy"], rates["read"]), one["flops"] / rates["matmul"])
                row["of the measured ceilings"] = f"{floor / one['seconds']:.0%}"
        rows.append(row)
    return rows


# ---- plots -----------------------------------------------------------------------------------------------------------


def draw(results: Mapping[str, Record], out: Path, *, dry: bool) -> list[Path]:
    """The plots that the results allow; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    mark, drawn = "dry run, no measurement: " if dry else "", []

    def picture(name: str, title: str, xlabel: str, n_bars: int, bars: Callable[[Any], None]) -> None:
        def panel_of(panel: Any) -> None:
            bars(panel)
            panel.axvline(1.0, color="black", linewidth=0.8)
            panel.invert_yaxis()
            panel.tick_params(axis="y", labelsize=7)

        drawn.append(out / name)
        draw_panels([[panel_of]], drawn[-1], title=mark + title, xlabel=xlabel, size=(9, 0.6 + 0.3 * n_bars))

    rated = [row for row in timed(results) if "share" in row]
    if rated:
        picture(
            "kernels.png", "kernels (blue) and others' (gray)",
            "share of the roofline (bytes that must move, or operations)", len(rated),
            lambda panel: panel.barh(
                [f"{row['op']}, {row['what']}" for row in rated], [row["share"] for row in rated],
                color=["tab:gray" if row["peer"] else "tab:blue" for row in rated],
            ),
        )  # fmt: skip
    rows = replays(results)

    def rounds(panel: Any) -> None:
        names = [f"{result['cell']}, {result['policy']}, replay of {row['profile']}" for result, row in rows]
        ratios = [row["ratio"] for _, row in rows]
        panel.barh(names, [one["median"] for one in ratios], xerr=whiskers(ratios), color="tab:blue", label="replay")
        for name, marker, color in ("expected", "D", "tab:orange"), ("practical", "d", "tab:gray"), ("ideal", "x", "k"):
            predicted = [row[f"predicted_{name}"] for _, row in rows]
            panel.plot(predicted, names, marker, color=color, label=f"cost model: {name}")
        panel.legend()

    if rows:
        title = "rounds of the 8 B shape, acceptance replayed"
        picture("replay.png", title, "speed over plain decoding", len(rows), rounds)
    return drawn
