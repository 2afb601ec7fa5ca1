"""The page that gpu_suite.py makes of its results: tests, rounds and their steps, kernels, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from measuring.gpu.setup import Record, Setup
from measuring.points import SIZES, ratio_text
from measuring.tables import Column, Table, number, shown

AIMS = {  # speed over plain decoding; shares of the roofline and times of steps stand in benchmarks/h200/README.md
    ("guided", 57344): 3.0, ("snapkv", 57344): 2.4, ("streaming", 28672): 1.9,
}  # fmt: skip
WHERE = (
    Column("cell", lambda r: r["cell"]), Column("draft", lambda r: f"{r['arm']} {r['budget']:,}"),
    Column("its weights", lambda r: r["quantize"] or "the target's"), number("gamma", "gamma"),
)  # fmt: skip
ROUNDS = Table(
    *WHERE, number("tokens/round", "tokens_per_round", ".2f"), number("plain tok/s", "plain_tokens_per_second", ",.0f"),
    number("replay tok/s", "replayed_tokens_per_second", ",.0f"),
    Column("replay speed", lambda r: ratio_text(r["ratio"])),
    Column("aim", lambda r: shown(None if r["quantize"] else AIMS.get((r["arm"], r["context"])), ".1f")),
    Column("cost model: ideal, good public kernels, expected",
           lambda r: ", ".join(f"{r['predicted'][name]:.2f}x" for name in ("ideal", "practical", "expected"))),
)  # fmt: skip
STEPS = Table(
    *WHERE, Column("step", lambda r: r["step"]), Column("ms", lambda r: f"{r['seconds'] * 1e3:.3f}"),
    Column("of the roofline", lambda r: shown(r["floor"] and r["floor"] / r["seconds"], ".0%")),
    Column("over a plain step", lambda r: f"{r['seconds'] / r['plain']:.3f}"),
    Column("rows", lambda r: str(r["rows_active"])),
    Column("keys read per row", lambda r: " to ".join(f"{n:,}" for n in r.get("keys_in_view", ())) or "-"),
)  # fmt: skip
KERNELS = Table(
    Column("kernel", lambda r: r["op"]), Column("shape", lambda r: r["what"]),
    Column("us", lambda r: f"{r['seconds'] * 1e6:,.1f}" if "seconds" in r else f"not run: {r['failed']}"),
    Column("GB/s", lambda r: shown(r.get("gb_per_second"), ",.0f")),
    Column("TFLOP/s", lambda r: shown(r.get("tflops"), ".1f")),
    Column("of the roofline", lambda r: shown(r.get("share"), ".0%")),
    Column("of the measured ceilings", lambda r: shown(r.get("share_of_measured"), ".0%")),
)  # fmt: skip


def tests(results: Mapping[str, Record]) -> list[str]:
    """How many tests have passed; those that have not, and what the others saw, each on a line."""
    lines = []
    for stage, found in ((stage, result["tests"]) for stage, result in results.items() if "tests" in result):
        passed = sum(one["outcome"] == "passed" for one in found.values())
        lines.append(f"- {stage}: {passed} of {len(found)} passed")
        for name, one in found.items():
            if one["outcome"] != "passed":
                said = [line.strip() for line in one.get("said", "").splitlines() if line.strip()]
                lines.append(f"- **{name}**: {one['outcome']}; {f'`{said[-1][:200]}`' if said else 'it said nothing'}")
            lines += [f"- {name}: {text}" for text in one.get("seen", ())]
    return lines


def page(results: Mapping[str, Record], setup: Setup, device: str, missing: Sequence[str]) -> str:
    """All of it in Markdown; missing: a line for each stage that is not done, or took longer than estimated."""
    cells = [result for result in results.values() if "steps" in result]
    steps = [
        cell | step | {"step": name, "floor": cell["roofline"].get(name), "plain": cell["steps"]["target"]["seconds"]}
        for cell in cells for name, step in cell["steps"].items()
    ]  # fmt: skip
    timed = [row for result in results.values() for row in result.get("rows", ())]
    points = results.get("bundled", {}).get("points", [])
    notes = [f"- {note}" for note in dict.fromkeys(one["note"] for one in points) if note]
    dry = "**This is a dry run: tiny shapes, which say that the suite works and nothing about speed.** "
    said = (
        f"{dry if setup.tiny else ''}Device: {device}. The roofline and the cost model are those of {setup.chip.name}: "
        f"{setup.chip.bandwidth / 1e12:.3g} TB/s, {setup.chip.peak / 1e12:.3g} TFLOP/s. Weights of the 8 B model are "
        "random, and how many drafts a row keeps is replayed from published acceptance: a replay says how fast rounds "
        "are, not how good drafts are. Ratios are medians of pairs run in turns, with least and greatest."
    )
    skipped = [f"- {name}: {result['skipped']}" for name, result in results.items() if "skipped" in result]
    sections = {
        "Is it right?": tests(results),
        "Rounds of the 8 B shape, acceptance replayed": ROUNDS.markdown(cells) if cells else [],
        "Their steps": STEPS.markdown(steps) if steps else [],
        "The bundled model, its own acceptance (no replay)": [*SIZES.markdown(points), "", *notes] if points else [],
        "Kernels": KERNELS.markdown(timed) if timed else [],
        "Missing, or longer than estimated": [*missing, *skipped],
    }
    found = [["", f"## {heading}", "", *section] for heading, section in sections.items() if section]
    return "\n".join(["# GPU suite", "", said, *(line for section in found for line in section)]) + "\n"
