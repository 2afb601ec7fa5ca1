"""The results of a point: its figures, their lower bounds, the lengths from which on speculation pays, the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression
from typing import Any

from gpt_fast_sd import DraftConfig, Engine
from gpt_fast_sd.tp import collectives_per_step
from measuring import machine
from measuring.forecast import System
from measuring.grid import Point, Record, Setting, draft_label
from measuring.tables import Column, Table, number, shown
from measuring.turns import WAYS, Turns, median_interval, spread, totals, way_of


def summarize(point: Point, turns: Turns, engine: Engine, system: System, draft: DraftConfig) -> Record:
    """All results of a point, JSON-ready."""
    counts, plain_counts = turns.counts, totals(turns.plain)
    is_comparable = point.temperature == 0
    differences = turns.first_differences if is_comparable else []
    ratios = {name: turns.ratios(name) for name in ("steady", "completion")}
    kept = counts.acceptance_rate, counts.tokens_per_round, counts.rounds_by_gamma
    predicted = system.predict(draft, point.batch, point.context + system.room / 2, *kept)
    plain, speculative = (way_of(runs, point.batch) for runs in (turns.plain, turns.speculative))
    return {
        "status": "measured", "dtype": engine.dtype_name, "kv_dtype": engine.config.kv_dtype or engine.dtype_name,
        "speedup": {name: spread(found) if found else None for name, found in ratios.items()},
        "ratios": ratios, "ratio_interval": median_interval(ratios["completion"]), "over_sets": turns.over_sets,
        "plain": plain, "speculative": speculative, "predicted": predicted | {"by_steps": turns.by_steps},
        "percent_of_roofline": {
            "plain": 100 * predicted["plain_ms"] / plain["round_ms"]["round"],
            "round": 100 * predicted["round_ms"] / speculative["round_ms"]["round"],
        },
        **turns.acceptance,
        "rounds_by_gamma": turns.rounds_by_gamma,
        "lossless": {
            "compared": is_comparable, "rows": point.batch * turns.sets,
            "equal": point.batch * turns.sets - len(differences),
            "differences": differences,
        },
        "prefill": {
            "seconds": turns.prefill.prefill_seconds, "tokens_computed": turns.prefill.prefill_tokens,
            "tokens_held": turns.sets * point.batch * (point.context - 1),
            "tokens_per_second": turns.prefill.prefill_tokens_per_second,
        },
        "memory": {
            "kv_cache_bytes": sum(buffer.nbytes for buffer in engine.cache.buffers),
            "kv_in_use_bytes": point.batch * (point.context + system.room) * engine.cache.bytes_per_token,
            "peak_bytes": machine.peak_bytes(engine.device),
        },
        "collectives_per_step": collectives_per_step(system.model, system.tp, exact=engine.config.exact),
        "recompiles_while_timed": counts.recompiles + plain_counts.recompiles,
        "compile_seconds": turns.prefill.compile_seconds,
        "capture_seconds": turns.capture_seconds + counts.capture_seconds + plain_counts.capture_seconds,
        "load_average": machine.load_average(),
    }  # fmt: skip


def more(r: Record) -> str:
    kv, memory, prefill = (r[way]["kv_bytes_per_token"] for way in WAYS), r["memory"], r["prefill"]
    by_position, over = " ".join(f"{share:.0%}" for share in r["acceptance_by_position"]), r.get("over_sets")
    told = ""
    if over:
        told = f"over {len(over['sets'])} sets {over['mean']:.2f}x ± {over['interval'][1] - over['mean']:.2f}; "
    return (
        f"{'':16}{told}accepted by position {by_position or '-'}; "
        f"plain {r['plain']['round_ms']['round']:.2f} ms per step, "
        f"{r['percent_of_roofline']['plain']:.0f} % of the roofline, rounds {r['percent_of_roofline']['round']:.0f} %; "
        f"by steps {shown(r['predicted']['by_steps'], '.2f')}x; KV read per token "
        f"{' to '.join(f'{one / 1e6:.2f}' for one in kv)} MB; cache {memory['kv_cache_bytes'] / 2**20:,.0f} MiB, "
        f"peak {memory['peak_bytes'] / 2**20:,.0f} MiB; prefilled {prefill['tokens_computed']:,} of "
        f"{prefill['tokens_held']:,} tokens at {prefill['tokens_per_second']:,.0f}/s"
    )


def crossing(contexts: Sequence[int], values: Sequence[float], level: float) -> Record:
    """The context beyond which values stay above the level, interpolated over its log2; contexts are ascending."""
    under = [i for i, value in enumerate(values) if value <= level]
    if not under:
        return {"context": None, "of_measured": "below", "phrase": f"below {min(contexts):,}"}
    last = under[-1]
    if last == len(values) - 1:
        return {"context": None, "of_measured": "none", "phrase": f"none up to {max(contexts):,}"}
    share = (level - values[last]) / (values[last + 1] - values[last])
    low, high = math.log2(contexts[last]), math.log2(contexts[last + 1])
    at = 2 ** (low + share * (high - low))
    return {"context": at, "of_measured": "between", "phrase": f"{at:,.0f}"}


def steady_of(record: Record, figure: str = "speedup") -> Any:
    """The steady figure or, if runs were too short for one, that to completion."""
    return record[figure]["steady"] or record[figure]["completion"]


def lengths_of(points: Sequence[Record]) -> list[Record]:
    """Break-even of every batch and critical length of every draft, JSON-ready."""
    found = []
    for draft in dict.fromkeys(map(draft_label, points)):
        ours = [r for r in points if draft_label(r) == draft]
        table = {(r["batch"], r["context"]): steady_of(r)["median"] for r in ours}
        batches, contexts = sorted({b for b, _ in table}), sorted({c for _, c in table})
        for batch in batches:
            there = [c for c in contexts if (batch, c) in table]
            at = crossing(there, [table[batch, c] for c in there], 1.0)
            found.append({"kind": "break-even", "draft": draft, "batch": batch, **at, "contexts": there})
        by_context = {c: [b for b in batches if (b, c) in table] for c in contexts}
        there = [c for c in contexts if len(by_context[c]) > 1]
        if there:
            lines = [([math.log2(b) for b in by_context[c]], [table[b, c] for b in by_context[c]]) for c in there]
            slopes = [linear_regression(*line).slope for line in lines]
            what = {"kind": "critical length", "draft": draft, "batch": None, **crossing(there, slopes, 0.0)}
            found.append(what | {"contexts": there, "slopes": slopes})
    return found


def lines_of(lengths: Sequence[Record]) -> list[str]:
    lines = []
    for draft in dict.fromkeys(r["draft"] for r in lengths):
        ours = [r for r in lengths if r["draft"] == draft]
        evens = ", ".join(f"batch {r['batch']} {r['phrase']}" for r in ours if r["kind"] == "break-even")
        found = (f"{r['phrase']} tokens" for r in ours if r["kind"] == "critical length")
        lines.append(f"{draft}: critical length {next(found, 'needs two batches')}; break-even at {evens}")
    return lines


def round_text(ms: Record) -> str:
    parts = [] if ms["verify"] is None else [" + ".join(f"{ms[part]:.2f}" for part in ("draft", "verify", "host"))]
    return " = ".join([f"{ms['round']:.2f}", *parts])


def ends_text(found: Record) -> str:
    return f"({found['min']:.2f} to {found['max']:.2f})"


def ratio_text(found: Record) -> str:
    return f"{found['median']:.2f}x {ends_text(found)}"


POINT = (number("context", "context", ","), number("batch", "batch"), Column("draft", draft_label, 34, left=True))
PLAIN = Column("plain/s", lambda r: shown(steady_of(r["plain"], "tokens_per_second"), ",.0f"))
SPECULATIVE = Column("spec./s", lambda r: shown(steady_of(r["speculative"], "tokens_per_second"), ",.0f"))
ACCEPTED, YIELD = number("accept", "acceptance_rate", ".1%"), number("tok/round", "speculative.tokens_per_round", ".2f")
PARTS = Column("round ms = draft + verify + host", lambda r: round_text(r["speculative"]["round_ms"]), 34, left=True)
DISTINCT = Column("distinct 4-grams", lambda r: ", ".join(shown(r["distinct_4grams"][way], ".0%") for way in WAYS))
SIZES = Table(
    *POINT, PLAIN, SPECULATIVE,
    Column("steady", lambda r: f"{steady_of(r)['median']:.2f}x"),
    Column("least, greatest", lambda r: ends_text(steady_of(r)), left=True),
    number("to end", "speedup.completion.median", ".2f", unit="x"), number("pred.", "predicted.speedup", ".2f"),
    ACCEPTED, DISTINCT, YIELD, PARTS,
    Column("equal", lambda r: "{equal}/{rows}".format_map(r["lossless"]) if r["lossless"]["compared"] else "-"),
)  # fmt: skip
PRECISIONS = Table(
    *POINT, Column("cache/drafts/weights", lambda r: r["precision"], left=True), PLAIN,
    Column("of unquantized", lambda r: ratio_text(r["plain_over_unquantized"]), 22), SPECULATIVE,
    Column("of its own plain", lambda r: ratio_text(r["speedup"]["own"]), 22),
    Column("of unquantized plain", lambda r: ratio_text(r["speedup"]["unquantized"]), 22),
    ACCEPTED, YIELD, PARTS, DISTINCT,
    Column("equal", lambda r: "-" if r["temperature"] else f"{r['equal']}/{r['batch']}"),
)  # fmt: skip
BUDGETS = Table(
    Column("policy", lambda r: r["policy"], 20, left=True), number("budget", "budget", ","),
    number("acceptance", "acceptance_rate", ".1%"), number("tokens/round", "tokens_per_round", ".2f"), DISTINCT,
    Column("ms/round", lambda r: shown(r["speculative_ms"] and r["speculative_ms"]["round"], ".2f")),
    Column("plain ms", lambda r: shown(r["plain_ms"] and r["plain_ms"]["round"], ".2f")),
    Column("speed", lambda r: f"{r['ratio']['median']:.2f}x" if r["ratio"] else "-"),
    Column("least, greatest", lambda r: ends_text(r["ratio"]) if r["ratio"] else "", left=True),
)  # fmt: skip
POLICIES = Table(
    Column("policy", lambda r: Setting(policy=r["policy"], budget=r["budget"]).label, 26, left=True),
    Column("equal", lambda r: f"{r['equal']}/{r['prompts']}", 9), number("acceptance", "acceptance_rate", ".1%"),
    number("tokens/round", "tokens_per_round", ".2f"), number("recompiles", "recompiles"),
)  # fmt: skip
