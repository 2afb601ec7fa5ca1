"""Pictures in one style: panels over batch, context or budget, ratios with the spread of their pairs, bars."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measuring.grid import Record, draft_label
from measuring.points import steady_of

Draw = Callable[[Any], None]
SPEED = "speed, times plain decoding"
SUFFIXES = (".png", ".pdf", ".svg")
COLORS = ("#9277dd", "#3d8fd6", "#22a385", "#d18a16", "#e0574f", "#a87850", "#cf62a8", "#7f9a2c")


def check_drawable(flag: str, file: Path | None = None) -> None:
    """ValueError, before any work is done, if matplotlib is missing or does not know the format of the file."""
    if file and file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"cannot draw {file}: its name must end in .png, .pdf or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f'{flag} needs matplotlib: pip install -e ".[plot]"')


def color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def draw_panels(
    rows: Sequence[Sequence[Draw]], path: Path, *, title: str = "", xlabel: str = "", ylabel: str = "",
    size: tuple[float, float] = (4.2, 3.7), share: str = "", legend: bool = False,
) -> None:  # fmt: skip
    """Draw a grid of panels, size inches each. share: axes that all have in common, "x", "y" or "xy"."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    n_columns = max(map(len, rows))
    figure, axes = pyplot.subplots(
        len(rows), n_columns, figsize=(0.8 + size[0] * n_columns, 0.8 + size[1] * len(rows)), squeeze=False,
        sharex="x" in share, sharey="y" in share, layout="constrained",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for row, panels in zip(rows, axes, strict=True):
        for panel in panels[len(row) :]:
            panel.set_visible(False)
        for draw, panel in zip(row, panels, strict=False):
            draw(panel)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    if legend and handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(8, len(handles)), frameon=False)
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def over_log2(panel: Any, xs: Sequence[int], xlabel: str = "") -> None:
    """A horizontal log2 axis, with ticks at the measured values."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, [f"{x:,}" for x in xs])
    panel.set_xlim(min(xs) / 1.2, max(xs) * 1.2)
    panel.minorticks_off()
    panel.set_xlabel(xlabel)


def line(panel: Any, xs: Sequence[float], values: Sequence[Any], i: int, label: str) -> None:
    ys, reach = values, None
    if isinstance(values[0], dict):
        ys = [one["median"] for one in values]
        reach = [[abs(one[end] - one["median"]) for one in values] for end in ("min", "max")]
    panel.errorbar(xs, ys, yerr=reach, fmt="o-", color=color(i), label=label, capsize=2, markersize=4)


def draw_sweep(points: Sequence[Record], lengths: Sequence[Record], title: str, folder: Path) -> list[Path]:
    """Pictures with one panel per draft: speed-up over batch, over context, throughput over latency."""
    folder.mkdir(parents=True, exist_ok=True)
    drafts = [*dict.fromkeys(map(draft_label, points))]
    steady = "steady, whiskers: least and greatest pair; dotted: to completion"
    critical = (
        f"{steady}\ncritical length (red): beyond it the speed-up grows with the batch, "
        "its least-squares slope over log2 of the batch is above 0"
    )

    def picture(name: str, show: Callable[[Any, str, list[Record]], None], xlabel: str, ylabel: str, how: str) -> Path:
        def draw(panel: Any, draft: str) -> None:
            panel.set_title(draft, fontsize=10)
            show(panel, draft, [r for r in points if draft_label(r) == draft])
            panel.legend(fontsize=7, frameon=False)

        panels = [partial(draw, draft=draft) for draft in drafts]
        rows = [panels[i : i + 2] for i in range(0, len(panels), 2)]
        said = f"{title}\n{how}"
        draw_panels(rows, folder / name, title=said, xlabel=xlabel, ylabel=ylabel, size=(5, 3.8), share="xy")
        return folder / name

    return [
        picture("speedup_by_batch.png", lambda panel, _, ours: draw_speedup(panel, ours, "batch", "context"),
                "batch", SPEED, steady),
        picture("speedup_by_context.png", lambda panel, draft, ours: draw_contexts(panel, draft, ours, lengths),
                "context, tokens", SPEED, critical),
        picture("throughput_latency.png", lambda panel, _, ours: draw_latency(panel, ours),
                "milliseconds per token of one row", "tokens per second of all rows",
                "each point a batch; dashed: plain"),
    ]  # fmt: skip


def draw_speedup(panel: Any, ours: Sequence[Record], over: str, by: str) -> None:
    """Speed-up over batch or context, one line per value of the other; thin: to completion."""
    for i, value in enumerate(sorted({r[by] for r in ours})):
        row = sorted((r for r in ours if r[by] == value), key=lambda r: r[over])
        xs = [r[over] for r in row]
        line(panel, xs, [steady_of(r) for r in row], i, f"{by} {value:,}")
        panel.plot(xs, [r["speedup"]["completion"]["median"] for r in row], ":", color=color(i), linewidth=0.9)
    panel.axhline(1.0, color="black", linewidth=0.8)
    over_log2(panel, sorted({r[over] for r in ours}))


def draw_contexts(panel: Any, draft: str, ours: Sequence[Record], lengths: Sequence[Record]) -> None:
    draw_speedup(panel, ours, "context", "batch")
    found = next((r for r in lengths if r["draft"] == draft and r["kind"] == "critical length"), None)
    text = f"critical length: {found['phrase']} tokens" if found else "critical length: needs two batches"
    if found and found["context"] is not None:
        panel.axvline(found["context"], color="tab:red", linestyle="--", linewidth=1)
    panel.set_title(f"{draft}\n{text}", fontsize=10)


def draw_latency(panel: Any, ours: Sequence[Record]) -> None:
    for i, context in enumerate(sorted({r["context"] for r in ours})):
        row = sorted((r for r in ours if r["context"] == context), key=lambda r: r["batch"])
        for name, style in (("plain", "s--"), ("speculative", "o-")):
            kind = "steady" if all(r[name]["tokens_per_second"]["steady"] for r in row) else "completion"
            xs, ys = [r[name]["ms_per_token"][kind] for r in row], [r[name]["tokens_per_second"][kind] for r in row]
            label = f"context {context:,}" if name == "speculative" else None
            panel.plot(xs, ys, style, color=color(i), label=label, markersize=4)
            for r, x, y in zip(row, xs, ys, strict=True):
                panel.annotate(f"{r['batch']}", (x, y), fontsize=6, xytext=(2, 2), textcoords="offset points")
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_formatter(NullFormatter())


def over_budget(
    title: str, results: Sequence[Record], value: Callable[[Record], Any], policies: Sequence[str], *,
    level: float | None = None, percent: bool = False,
) -> Draw:  # fmt: skip
    """A panel over the budget, a colour a policy, of numbers or spreads; those without a budget are horizontal."""

    def draw(panel: Any) -> None:
        budgets = sorted({r["budget"] for r in results if r["budget"]}) or [1]
        for i, policy in enumerate(policies):
            ours = sorted((r for r in results if r["policy"] == policy), key=lambda r: r["budget"] or 0)
            values = [value(r) for r in ours]
            if ours and ours[0]["budget"] is None:
                level_of = values[0]["median"] if isinstance(values[0], dict) else values[0]
                panel.axhline(level_of, color=color(i), linestyle="--", label=policy)
            elif ours:
                aside = 1 + 0.02 * (i - len(policies) / 2) if isinstance(values[0], dict) else 1.0  # whiskers
                line(panel, [r["budget"] * aside for r in ours], values, i, policy)
        if level is not None:
            panel.axhline(level, color="black", linewidth=0.8)
        if percent:
            from matplotlib.ticker import PercentFormatter

            panel.set_ylim(0, 1.03)
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        over_log2(panel, budgets, "draft budget, cache entries")
        panel.set_title(title, fontsize=10)

    return draw


def draw_budgets(results: Sequence[Record], title: str, path: Path) -> list[Path]:
    """Panels over the budget: acceptance, tokens per round and, if it was timed, speed with its spread."""
    timed, policies = [r for r in results if r["ratio"]], [*dict.fromkeys(r["policy"] for r in results)]
    panels = [
        over_budget("acceptance", results, lambda r: r["acceptance_rate"], policies, percent=True),
        over_budget("tokens per round", results, lambda r: r["tokens_per_round"], policies),
    ]
    if timed:
        panels.append(over_budget(SPEED, timed, lambda r: r["ratio"], policies, level=1.0))
    draw_panels([panels], path, title=title, legend=True)
    return [path]


def draw_acceptance(documents: Sequence[Record], title: str, path: Path) -> None:
    """Acceptance over the budget, one panel per document: one row per temperature, contexts side by side."""
    rows: dict[float, list[Draw]] = {}
    policies = [*dict.fromkeys(r["policy"] for document in documents for r in document["results"])]
    for document in sorted(documents, key=lambda d: (d["settings"]["temperature"], d["settings"]["context"])):
        settings, results = document["settings"], document["results"]
        how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
        name = f"{settings['context']:,} tokens, {how}"
        panel = over_budget(name, results, lambda r: r["acceptance_rate"], policies, percent=True)
        rows.setdefault(settings["temperature"], []).append(panel)
    draw_panels([*rows.values()], path, title=title, legend=True)


def draw_precisions(points: Sequence[Record], title: str, path: Path) -> list[Path]:
    """Speeds at each precision, plain and with drafts, over plain decoding with nothing quantized; a panel a point."""

    def draw(panel: Any, point: Record) -> None:
        speeds: dict[str, float] = {}
        for one in point["precisions"]:
            speeds[f"{one['target']}, plain"] = one["plain_over_unquantized"]["median"]
            speeds[f"{one['precision']}, drafts"] = one["speedup"]["unquantized"]["median"]
        for i, speed in enumerate(speeds.values()):
            panel.barh(i, speed, height=0.7, color=color(1))
            panel.text(speed, i, f" {speed:.2f}x", va="center", fontsize=8, bbox={"color": "white", "pad": 0})
        panel.axvline(1.0, color="black", linestyle="--", linewidth=1)  # texts are drawn over lines
        panel.set_xlim(0, 1.5 * max(1.0, *speeds.values()))
        panel.set_title(f"{point['batch']} x {point['context']:,}, {draft_label(point)}", fontsize=10)
        panel.set_yticks(range(len(speeds)), [*speeds])
        panel.set_ylim(len(speeds) - 0.5, -0.5)

    size = 4.2, 0.7 + 0.8 * max(len(point["precisions"]) for point in points)
    label = "speed, times plain decoding with nothing quantized"
    draw_panels([[partial(draw, point=point)] for point in points], path, title=title, xlabel=label, size=size)
    return [path]
