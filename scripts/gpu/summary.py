"""The page that gpu_suite.py makes of its results: targets beside what was measured, what is right, speeds, plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt_fast_sd.measuring.ledger import Ledger
from gpt_fast_sd.measuring.plots import draw_panels, whiskers
from gpt_fast_sd.measuring.roofline import EXPECTED, PRACTICAL
from gpt_fast_sd.measuring.tables import Column, Table

from .aims import AIMS, Aim, Cell, show
from .setup import Record, Setup
from .stages import Stage, results_of

NO_PLOTS = 'matplotlib is not installed (pip install "gpt_fast_sd[plot]").'


# ---- targets ---------------------------------------------------------------------------------------------------------


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

    def shown(self, dry: bool) -> str:
        """What was measured, and where; of a dry run nothing."""
        if self.measured is None or dry:
            return "not measured"
        return show(self.measured, self.aim.unit) + ("" if self.aim.unit == "x" else f" ({self.where})")


def targets(results: Mapping[str, Record], setup: Setup) -> list[Target]:
    """Every target beside what the stages found: a replay in the cell that was run, steps where they were worst."""
    steps: dict[str, list[tuple[float, str]]] = {"plain": [], "draft": [], "verify": [], "judge": []}
    for result in (result for name, result in results.items() if name.startswith("cell-")):
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
            worst = (min if aim.least else max)(steps[aim.key], default=None)
            measured, where = worst or (None, "")
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


def target_table(listed: Sequence[Target], dry: bool = False) -> list[str]:
    """Targets in Markdown."""
    return Table(
        Column("target", lambda one: one.name),
        Column("aim", lambda one: one.aim.aim),
        Column("measured", lambda one: one.shown(dry)),
        Column("good public kernels", lambda one: "-" if one.good is None else show(one.good, one.aim.unit)),
        Column("expected", lambda one: show(one.expected, one.aim.unit)),
        Column("met", lambda one: "-" if dry or one.met is None else "yes" if one.met else "no"),
    ).markdown(listed)


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
        "Targets": target_table(targets(results, setup), setup.tiny),
        "Is it right?": test_lines(results),
        "Rounds of the 8 B shape, acceptance replayed": replay_lines(results),
        "The bundled model, its own acceptance (no replay)": bundled_lines(results),
        "Kernels": kernel_lines(results, rates),
        "Longer than reckoned": [
            f"- {r['stage']}: {r['seconds']:.0f} s, reckoned {r['reckoned_seconds']} s" for r in over
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
    said = [line.strip() for line in record["output"].splitlines() if line.strip()]
    return f"failed, {record['error']}" + (f": `{said[-1][:200]}`" if said else "")


def test_lines(results: Mapping[str, Record]) -> list[str]:
    """How many tests have passed, those that have not, and what some of them saw."""
    found = {name: result["tests"] for name, result in results.items() if "tests" in result}
    if not found:
        return []
    table = Table(
        Column("stage", lambda name: name),
        Column("tests", lambda name: str(len(found[name]))),
        Column("passed", lambda name: str(sum(one["outcome"] == "passed" for one in found[name].values()))),
        Column("s", lambda name: f"{sum(one.get('seconds', 0.0) for one in found[name].values()):.0f}"),
    )
    every = [(test, one) for tests in found.values() for test, one in tests.items()]
    wrong = [
        f"- **{test}**: {one['outcome']}; {last(one.get('said', ''))}"
        for test, one in every
        if one["outcome"] != "passed"
    ]
    seen = [f"- {test}: {text}" for test, one in every for text in one.get("seen", {}).values()]
    return [*table.markdown(found), *[""] * bool(wrong), *wrong, *[""] * bool(seen), *seen]


def last(said: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in said.splitlines() if line.strip()]
    return f"`{lines[-1].strip()[:200]}`" if lines else "it said nothing"


def spread_of(ratio: Record) -> str:
    """The median of ratios, with the least and the greatest."""
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


def keys_of(one: Record) -> str:
    """The least and the most keys that a row reads."""
    return " to ".join(f"{n:,}" for n in one["keys_in_view"]) if "keys_in_view" in one else "-"


Row = tuple[Record, Record]  # a result, and one of its rows


def replays(results: Mapping[str, Record]) -> list[Row]:
    """All replays with the results of their cells."""
    return [(result, row) for result in results.values() for row in result.get("replay", [])]


def replay_lines(results: Mapping[str, Record]) -> list[str]:
    """Rounds with replayed acceptance, all profiles; then the steps that they are made of."""
    if not replays(results):
        return []
    cell = Column("cell", lambda r: r[0]["cell"])
    draft = Column("draft", lambda r: f"{r[0]['policy']} {r[0]['budget']:,}")
    rounds = Table(
        cell, draft,
        Column("profile", lambda r: f"replay of {r[1]['profile']}"),
        Column("gamma", lambda r: str(r[1]["gamma"])),
        Column("tokens/round", lambda r: f"{r[1]['tokens_per_round']:.2f}"),
        Column("plain tok/s", lambda r: f"{r[1]['plain_tokens_per_second']:,.0f}"),
        Column("replay tok/s", lambda r: f"{r[1]['replayed_tokens_per_second']:,.0f}"),
        Column("replay speed", lambda r: spread_of(r[1]["ratio"])),
        Column("cost model ideal, good kernels, expected", lambda r: ", ".join(
            f"{r[1][f'predicted_{name}']:.2f}x" for name in ("ideal", "practical", "expected"))),
        Column("to the end", lambda r: f"{r[1]['to_the_end_ratio']:.2f}x"),
    )  # fmt: skip
    steps = Table(
        cell, draft,
        Column("step", lambda r: r[1]["step"]),
        Column("gamma", lambda r: str(r[1]["gamma"] or "-")),
        Column("ms", lambda r: f"{r[1]['seconds'] * 1e3:.3f}"),
        Column("roofline ms", lambda r: "-" if r[1]["allowed"] is None else f"{r[1]['allowed'] * 1e3:.3f}"),
        Column("rows", lambda r: str(r[1]["rows_active"])),
        Column("keys read a row", lambda r: keys_of(r[1])),
    )  # fmt: skip
    return [
        "Median of the ratios of pairs run in turns, with least and greatest; tokens/s of all rows, host included.", "",
        *rounds.markdown(replays(results)), "",
        "Beside each step what the roofline allows; rows and keys are those of the calls that were timed.", "",
        *steps.markdown((r, s) for r in results.values() if "replay" in r for s in steps_of(r)),
    ]  # fmt: skip


def steps_of(result: Record) -> Iterator[Record]:
    """The steps of a cell one by one, each with its name and the seconds that the roofline allows."""
    for name, found in result["steps"].items():
        floor = result["roofline"].get(name)
        for gamma, one in {"": found}.items() if "seconds" in found else found.items():
            yield {**one, "step": name, "allowed": floor[gamma] if isinstance(floor, dict) else floor}


def bundled_lines(results: Mapping[str, Record]) -> list[str]:
    """The bundled model, with acceptance of its own."""
    points = [one for one in results.get("bundled", {}).get("points", []) if one["status"] == "measured"]
    table = Table(
        Column("rows x context", lambda one: f"{one['batch']} x {one['context']:,}"),
        Column("draft", lambda one: f"{one['policy']} {one['budget']}"),
        Column("acceptance", lambda one: f"{one['acceptance_rate']:.1%}"),
        Column("tokens/round", lambda one: f"{one['speculative']['tokens_per_round']:.2f}"),
        *(Column(f"{how} tok/s", partial(_to_the_end, how=how)) for how in ("plain", "speculative")),
        Column("speed", lambda one: spread_of(one["speedup"]["completion"])),
    )
    return table.markdown(points) if points else []


def _to_the_end(one: Record, how: str) -> str:
    return f"{one[how]['tokens_per_second']['completion']:,.0f}"


def timed(results: Mapping[str, Record]) -> list[Record]:
    """Every kernel that was timed, or was to be."""
    return [row for name, result in results.items() if name.startswith("time-") for row in result["rows"]]


def kernel_lines(results: Mapping[str, Record], rates: Mapping[str, float]) -> list[str]:
    """Kernels by time, with their share of the roofline and of what was measured of the chip."""

    def figure(show: Callable[[Record], str]) -> Callable[[Record], str]:
        return lambda row: "" if "failed" in row else show(row)

    def of_measured(row: Record) -> str:
        if not rates:  # a kernel may have been timed before the chip was
            return "-"
        floor = max(row["bytes"] / max(rates["copy"], rates["read"]), row["flops"] / rates["matmul"])
        return f"{floor / row['seconds']:.0%}"

    table = Table(
        Column("kernel", lambda row: row["op"]),
        Column("shape", lambda row: row["what"]),
        Column("us", lambda r: f"not run: {r['failed']}" if "failed" in r else f"{r['seconds'] * 1e6:,.1f}"),
        Column("GB/s", figure(lambda row: f"{row['gb_per_second']:,.0f}")),
        Column("TFLOP/s", figure(lambda row: f"{row['tflops']:.1f}")),
        Column("of the roofline", figure(lambda row: f"{row['share']:.0%}")),
        Column("of the measured ceilings", figure(of_measured)),
        Column("rows x keys", figure(lambda row: f"{row['rows_active']} x {keys_of(row).split()[0]}")),
    )
    return table.markdown(timed(results)) if timed(results) else []


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

    kernels = [row for row in timed(results) if "share" in row]
    if kernels:
        picture(
            "kernels.png", "kernels (blue) and others' (gray)",
            "share of the roofline (bytes that must move, or operations)", len(kernels),
            lambda panel: panel.barh(
                [f"{row['op']}, {row['what']}" for row in kernels], [row["share"] for row in kernels],
                color=["tab:gray" if row["peer"] else "tab:blue" for row in kernels],
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
