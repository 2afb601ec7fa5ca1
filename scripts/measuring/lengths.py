"""The contexts beyond which speculation pays: break-even of a batch, critical length of a draft, by measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

from measuring.grid import draft_label

Record = dict[str, Any]


@dataclass(frozen=True)
class Crossing:
    """The context beyond which something is above a level; of_measured says which of the three cases it is."""

    context: float | None
    of_measured: str  # "below": above at all of them; "between"; "none": not above at the longest

    def phrase(self, contexts: Sequence[int]) -> str:
        """The crossing in words."""
        if self.of_measured == "below":
            return f"below {min(contexts):,}"
        return f"{self.context:,.0f}" if self.context is not None else f"none up to {max(contexts):,}"


def crossing(contexts: Sequence[int], values: Sequence[float], level: float) -> Crossing:
    """The context beyond which values stay above the level, interpolated over its log2; contexts are ascending."""
    under = [i for i, value in enumerate(values) if value <= level]
    if not under:
        return Crossing(None, "below")
    last = under[-1]
    if last == len(values) - 1:
        return Crossing(None, "none")
    share = (level - values[last]) / (values[last + 1] - values[last])
    low, high = math.log2(contexts[last]), math.log2(contexts[last + 1])
    return Crossing(2 ** (low + share * (high - low)), "between")


def shown_speedup(record: Record) -> Record:
    """The steady speed-up or, if runs were too short for one, that to completion."""
    found: Record = record["speedup"]["steady"] or record["speedup"]["completion"]
    return found


def lengths_of(points: Sequence[Record]) -> list[Record]:
    """Break-even of every batch and critical length of every draft, JSON-ready."""
    found = []
    for draft in dict.fromkeys(map(draft_label, points)):
        ours = [r for r in points if draft_label(r) == draft]
        table = {(r["batch"], r["context"]): shown_speedup(r)["median"] for r in ours}
        batches, contexts = sorted({b for b, _ in table}), sorted({c for _, c in table})
        for batch in batches:
            there = [c for c in contexts if (batch, c) in table]
            at = crossing(there, [table[batch, c] for c in there], 1.0)
            found.append(_record("break-even", draft, batch, at, there))
        by_context = {c: [b for b in batches if (b, c) in table] for c in contexts}
        there = [c for c in contexts if len(by_context[c]) > 1]
        if there:
            slopes = [
                linear_regression([math.log2(b) for b in by_context[c]], [table[b, c] for b in by_context[c]]).slope
                for c in there
            ]
            at = crossing(there, slopes, 0.0)
            found.append(_record("critical length", draft, None, at, there) | {"slopes": slopes})
    return found


def _record(kind: str, draft: str, batch: int | None, at: Crossing, contexts: Sequence[int]) -> Record:
    return {
        "kind": kind, "draft": draft, "batch": batch, "context": at.context, "of_measured": at.of_measured,
        "phrase": at.phrase(contexts), "contexts": list(contexts),
    }  # fmt: skip


def lines_of(lengths: Sequence[Record]) -> list[str]:
    """Break-even and critical lengths, one line per draft."""
    lines = []
    for draft in dict.fromkeys(r["draft"] for r in lengths):
        ours = [r for r in lengths if r["draft"] == draft]
        evens = ", ".join(f"batch {r['batch']} {r['phrase']}" for r in ours if r["kind"] == "break-even")
        found = (f"{r['phrase']} tokens" for r in ours if r["kind"] == "critical length")
        lines.append(f"{draft}: critical length {next(found, 'needs two batches')}; break-even at {evens}")
    return lines
