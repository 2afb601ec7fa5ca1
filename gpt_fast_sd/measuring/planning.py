"""A plan as a document, as text and as a picture: forecasts over batches, contexts and drafts; see scripts/plan.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .. import registry
from ..config import DraftConfig
from .chips import GIB
from .forecast import ESTIMATES, Kept, Record, System, cell, default_policies
from .replay import PROFILES


def drafts_of(
    system: System, policies: Sequence[str] | None, budget: int | None, gamma: int | None, draft_model: str | None
) -> list[DraftConfig]:
    """A configuration of each policy; None: those that have a published acceptance, and budgets as published."""
    drafts = []
    for name in policies or default_policies(system):
        known: Record = {"policy": name, "gamma": gamma or "auto"}
        if budget or name in PROFILES:
            known["budget"] = budget or PROFILES[name].budget
        if name in registry.policies() and registry.policy_class(name).own_cache:
            known["draft_model"] = draft_model
        drafts.append(DraftConfig(**known))
        if not drafts[-1].max_gamma:
            raise ValueError(f"policy {name!r} drafts nothing: there is nothing to plan")
    return drafts


def plan(
    system: System, drafts: Sequence[DraftConfig], kept: Kept, batches: Sequence[int], contexts: Sequence[int],
    estimate: str,
) -> Record:  # fmt: skip
    """Every draft in every batch and context, and the lengths from which on drafting gains; JSON-ready."""
    e = ESTIMATES[estimate]
    cells = [cell(system, draft, kept, n, c, e) for c in contexts for n in batches for draft in drafts]
    lengths = []
    for draft in drafts:
        chances, _ = kept.chances(draft.policy, draft.budget, max(contexts))
        even = {str(n): system.break_even(draft, chances, n, e) for n in batches}
        critical = system.critical(draft, chances, batches, e) if len(batches) > 1 else None
        lengths.append({"policy": draft.policy, "budget": draft.budget, "break_even": even, "critical": critical})
    chip, ranks = system.chip, system.ranks
    return {
        "benchmark": "plan",
        "settings": {
            "estimate": estimate, "dtype": system.dtype, "kv_dtype": system.kv_dtype, "quantize": system.quantize,
            "max_new_tokens": system.room, "tp": system.tp, "positions": system.model.max_seq_len,
            "chip": {
                "name": chip.name, "bandwidth": chip.bandwidth, "peak": chip.peak,
                "memory": None if math.isinf(chip.memory) else chip.memory,
            },
            "link": ranks and {
                "name": ranks.slowest.name, "bandwidth": ranks.slowest.bandwidth, "seconds": ranks.all_reduce(0),
            },
        },
        "cells": cells, "lengths": lengths,
    }  # fmt: skip


# ---------------------------------------------------------------- as text

HEAD = (
    "context", "batch", "draft", "accepted", "gamma", "T_T ms", "T_D ms", "T_V ms", "T_S ms", "tokens", "speed-up",
    "limit", "plain/s", "spec./s", "GiB",
)  # fmt: skip
LEGEND = """\
T_T a step of plain decoding, T_D a draft step, T_V a verification of gamma + 1 tokens, T_S judging and selecting;
tokens: that a round emits a row; speed-up: tokens x T_T / (gamma x T_D + T_V + T_S), below 1 gamma auto drafts nothing;
limit: the speed-up if every kernel reached the full rates; plain/s, spec./s: tokens per second of all rows;
GiB: on each device, when rows have grown by {room:,} tokens, with ! where that does not fit."""


def _bytes(one: Record) -> int:
    held: int = one["memory_bytes"]
    return held


def label(one: Record) -> str:
    """As "streaming 512"."""
    return f"{one['policy']} {one['budget']:,}"


def _row(one: Record) -> list[str]:
    chances = [f"{chance:.2f}" for chance in one["acceptance"]]
    accepted = chances[0] if len(set(chances)) == 1 else f"{chances[0]} to {chances[-1]}"
    mark = "*" if one["acceptance_source"].startswith("assumed") else ""
    ms = (f"{one[key]:.2f}" for key in ("plain_ms", "draft_ms", "verify_ms", "select_ms"))
    speeds = (f"{one[key]:,.0f}" for key in ("plain_tokens_per_second", "speculative_tokens_per_second"))
    return [
        f"{one['context']:,}", f"{one['batch']:,}", label(one), accepted + mark, str(one["gamma"]), *ms,
        f"{one['tokens_per_round']:.2f}", f"{one['speedup']:.2f}x", f"{one['speedup_of_roofline']:.2f}x", *speeds,
        f"{'' if one['fits'] else '! '}{one['memory_bytes'] / GIB:.1f}",
    ]  # fmt: skip


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Lines of a table whose columns stand to the right, but for those that are named."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            one.ljust(w) if i in left else one.rjust(w) for i, (one, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(row) for row in (head, *rows)]


def text(document: Record, subject: str) -> str:
    """The plan as it is printed. subject: what the model is called."""
    cells, settings = document["cells"], document["settings"]
    chip, link, n = settings["chip"], settings["link"], settings["tp"]
    memory = f", {chip['memory'] / GIB:.0f} GiB" if chip["memory"] else ""
    weights = f"{settings['quantize'] or settings['dtype']}, KV cache {settings['kv_dtype'] or settings['dtype']}"
    lines = [
        f"{subject}, weights {weights}, on {n} x {chip['name']}: {chip['bandwidth'] / 1e9:,.0f} GB/s, "
        f"{chip['peak'] / 1e12:,.4g} TFLOP/s{memory}{' each' if n > 1 else ''}",
        f"A forecast, estimate {settings['estimate']!r}: nothing below was measured.",
        "", *columns(HEAD, [_row(one) for one in cells], left=(2,)), "",
        LEGEND.format(room=settings["max_new_tokens"]),
    ]  # fmt: skip
    told = {label(one): one["acceptance_source"] for one in cells if one["acceptance_source"] != "given"}
    lines += [f"{'*' if why.startswith('assumed') else ' '} {name}, {why}" for name, why in told.items()]
    for rows, context in dict.fromkeys((one["batch"], one["context"]) for one in cells if not one["fits"]):
        most = max((one for one in cells if (one["batch"], one["context"]) == (rows, context)), key=_bytes)
        lines.append(f"! {rows} x {context:,} does not fit: with {label(most)}, {most['advice']}")
    if link:
        shares = {one["batch"]: f"{one['collective_ms']:.2f} ms at batch {one['batch']}" for one in cells}
        lines.append(
            f"Sums over {n} devices by {link['name']}, {link['bandwidth'] / 1e9:,.0f} GB/s each way, "
            f"{link['seconds'] * 1e6:.1f} us and their bytes each: of T_T {', '.join(shares.values())}"
        )
    return "\n".join([*lines, "", *_lengths(document)])


def _lengths(document: Record) -> list[str]:
    """From which context on drafting gains, and from which on a larger batch gains more."""

    def shown(context: int | None) -> str:
        return "never" if context is None else "any" if context == 1 else f"{context:,}"

    lengths, positions = document["lengths"], document["settings"]["positions"]
    batches, legend = list(lengths[0]["break_even"]), "drafting is faster than plain decoding (break-even)"
    head = ["draft", *(f"break-even, batch {n}" for n in batches)]
    rows = [[label(one), *map(shown, one["break_even"].values())] for one in lengths]
    if len(batches) > 1:
        legend += f",\nand batch {batches[-1]} gains as much as batch {batches[0]} (critical)"
        head.append("critical")
        rows = [[*row, shown(one["critical"])] for row, one in zip(rows, lengths, strict=True)]
    legend = f"From which context on, of at most {positions:,} tokens, {legend}:"
    return [legend, "", *columns(head, rows, left=(0,))]


def comparison(points: Sequence[Record], name: str) -> str:
    """What was measured beside what was predicted, as it is printed."""
    head = ("context", "batch", "draft", "T", "plain ms", "measured", "round ms", "measured", "speed-up", "measured")
    rows = [
        [
            f"{one['context']:,}", f"{one['batch']}", label(one), f"{one['temperature']:g}",
            *(f"{one[key]:.1f}" for key in ("plain_ms", "plain_ms_measured", "round_ms", "round_ms_measured")),
            *(f"{one[key]:.2f}x" for key in ("speedup", "speedup_measured")),
        ]
        for one in sorted(points, key=lambda one: (one["context"], one["batch"], one["temperature"]))
    ]  # fmt: skip

    def shares(key: str) -> str:
        found = sorted(one[f"{key}_measured"] / one[key] for one in points)
        return f"{found[len(found) // 2]:.2f} ({found[0]:.2f} to {found[-1]:.2f})"

    return "\n".join(
        [
            f"{name}: measured beside what its machine's own rates allow, with the drafts that were kept there",
            "",
            *columns(head, rows, left=(2,)),
            "",
            f"measured over predicted, median (least to greatest): a plain step {shares('plain_ms')}, a round "
            f"{shares('round_ms')}, the speed-up {shares('speedup')}",
        ]
    )


# ---------------------------------------------------------------- as a picture


def draw(document: Record, subject: str, path: Path) -> None:
    """Speed-up over context, a panel a batch and a line a draft; hollow where the memory does not hold it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = document["cells"]
    batches, drafts = (list(dict.fromkeys(key)) for key in ([c["batch"] for c in cells], map(label, cells)))
    figure, panels = pyplot.subplots(
        1, len(batches), figsize=(1.5 + 3.8 * len(batches), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, n in zip(panels[0], batches, strict=True):
        for i, draft in enumerate(drafts):
            ours = [c for c in cells if (c["batch"], label(c)) == (n, draft)]
            at, color = [c["context"] for c in ours], f"C{i}"
            panel.plot(at, [c["speedup"] for c in ours], color=color, label=draft)
            panel.plot(at, [c["speedup_of_roofline"] for c in ours], color=color, linestyle=":", linewidth=1)
            for c in ours:
                face = color if c["fits"] else "white"
                panel.plot(c["context"], c["speedup"], "o", color=color, markerfacecolor=face)
        panel.axhline(1, color="gray", linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks(
            sorted({c["context"] for c in cells}), [f"{c:,}" for c in sorted({c["context"] for c in cells})]
        )
        panel.minorticks_off()
        panel.set_xlabel("context, tokens of each row")
        panel.set_title(f"batch {n}")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed-up over plain decoding")
    panels[0][0].legend()
    chip = document["settings"]["chip"]["name"]
    figure.suptitle(
        f"{subject} on {document['settings']['tp']} x {chip}: a forecast, nothing measured\n"
        "dotted: if every kernel reached the full rates; hollow: does not fit into the memory", fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
