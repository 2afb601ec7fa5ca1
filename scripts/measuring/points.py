"""The results of a point: its figures, their lower bounds, and the tables that show them."""

from __future__ import annotations

from typing import Any

import torch

from gpt_fast_sd.engine import Engine
from gpt_fast_sd.policies.config import DraftConfig
from gpt_fast_sd.serving.stats import EngineStats
from gpt_fast_sd.tp import collectives_per_step
from measuring import machine
from measuring.chips import Chip, rates_here
from measuring.forecast import System
from measuring.grid import Point, Setting, draft_label
from measuring.lengths import shown_speedup
from measuring.tables import Column, Table, shown
from measuring.turns import WAYS, Turns, median_interval, spread, totals, way_of

Record = dict[str, Any]


# ---- the figures -----------------------------------------------------------------------------------------------------


def rates_of(device: torch.device, dtype: torch.dtype) -> Chip:
    """The machine's rates, measured."""
    return rates_here(device, dtype).chip(machine.environment(device)["device"], memory=float("inf"))


def predict(point: Point, system: System, draft: DraftConfig, stats: EngineStats) -> Record:
    """A plain step, a round of the gammas that were run, and the speed-up at the measured tokens per round."""
    size = point.batch, point.context + system.room / 2
    plain, a_round = system.plain(*size), system.mean_round(draft, stats.acceptance_rate, *size, stats.rounds_by_gamma)
    speedup = stats.tokens_per_round * plain / a_round
    return {"plain_ms": plain * 1e3, "round_ms": a_round * 1e3, "speedup": speedup}


def summarize(point: Point, turns: Turns, engine: Engine, system: System, draft: DraftConfig) -> Record:
    """All results of a point, JSON-ready."""
    counts, plain_counts = turns.counts, totals(turns.plain)
    is_comparable = point.temperature == 0
    differences = turns.first_differences if is_comparable else []
    ratios = {name: turns.ratios(name) for name in ("steady", "completion")}
    predicted = predict(point, system, draft, counts)
    plain, speculative = (way_of(runs, point.batch) for runs in (turns.plain, turns.speculative))
    return {
        "status": "measured",
        "dtype": engine.dtype_name,
        "kv_dtype": engine.config.kv_dtype or engine.dtype_name,
        "speedup": {name: spread(found) if found else None for name, found in ratios.items()},
        "ratios": ratios,
        "ratio_interval": median_interval(ratios["completion"]),
        "plain": plain,
        "speculative": speculative,
        "predicted": predicted | {"by_steps": turns.by_steps},
        "percent_of_roofline": {
            "plain": 100 * predicted["plain_ms"] / plain["round_ms"]["round"],
            "round": 100 * predicted["round_ms"] / speculative["round_ms"]["round"],
        },
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_by_position": counts.acceptance_by_position,
        "distinct_4grams": turns.distinct_4grams,
        "rounds_by_gamma": {str(gamma): n for gamma, n in sorted(counts.rounds_by_gamma.items())},
        "lossless": {
            "compared": is_comparable, "rows": point.batch, "equal": point.batch - len(differences),
            "differences": differences,
        },
        "prefill": {
            "seconds": turns.prefill.prefill_seconds, "tokens_computed": turns.prefill.prefill_tokens,
            "tokens_held": point.batch * (point.context - 1),
            "tokens_per_second": turns.prefill.prefill_tokens_per_second,
        },
        "memory": {
            "kv_cache_bytes": machine.kv_bytes(engine),
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
    """Further results of a point, in one line."""
    kv, memory, prefill = (r[way]["kv_bytes_per_token"] for way in WAYS), r["memory"], r["prefill"]
    by_position = " ".join(f"{share:.0%}" for share in r["acceptance_by_position"])
    return (
        f"{'':16}accepted by position {by_position or '-'}; plain {r['plain']['round_ms']['round']:.2f} ms per step, "
        f"{r['percent_of_roofline']['plain']:.0f} % of the roofline, rounds {r['percent_of_roofline']['round']:.0f} %; "
        f"by steps {shown(r['predicted']['by_steps'], '.2f')}x; KV read per token "
        f"{' to '.join(f'{one / 1e6:.2f}' for one in kv)} MB; cache {memory['kv_cache_bytes'] / 2**20:,.0f} MiB, "
        f"peak {memory['peak_bytes'] / 2**20:,.0f} MiB; prefilled {prefill['tokens_computed']:,} of "
        f"{prefill['tokens_held']:,} tokens at {prefill['tokens_per_second']:,.0f}/s"
    )


# ---- the tables ------------------------------------------------------------------------------------------------------


def speed_of(record: Record) -> float | None:
    """Tokens per second while all rows are live or, if runs were too short for that, to completion."""
    found: float | None = record["tokens_per_second"]["steady"] or record["tokens_per_second"]["completion"]
    return found


def round_text(ms: Record) -> str:
    """Milliseconds of a round and of its parts."""
    parts = [] if ms["verify"] is None else [" + ".join(f"{ms[part]:.2f}" for part in ("draft", "verify", "host"))]
    return " = ".join([f"{ms['round']:.2f}", *parts])


def distinct_text(record: Record) -> str:
    """The share of distinct 4-grams of both ways; older files have none."""
    found = record.get("distinct_4grams", dict.fromkeys(WAYS))
    return ", ".join(shown(found[way], ".0%") for way in WAYS)


def equal_text(record: Record) -> str:
    """How many greedy rows equal plain decoding."""
    found = record["lossless"]
    return f"{found['equal']}/{found['rows']}" if found["compared"] else "-"


def ends_text(found: Record) -> str:
    """The least and the greatest of the pairs."""
    return f"({found['min']:.2f} to {found['max']:.2f})"


def ratio_text(found: Record) -> str:
    """The median of the pairs, and these."""
    return f"{found['median']:.2f}x {ends_text(found)}"


SIZES = Table(
    Column("context", lambda r: f"{r['context']:,}"), Column("batch", lambda r: str(r["batch"])),
    Column("draft", draft_label, 34, left=True),
    Column("plain/s", lambda r: shown(speed_of(r["plain"]), ",.0f")),
    Column("spec./s", lambda r: shown(speed_of(r["speculative"]), ",.0f")),
    Column("steady", lambda r: f"{shown_speedup(r)['median']:.2f}x"),
    Column("least, greatest", lambda r: ends_text(shown_speedup(r)), left=True),
    Column("to end", lambda r: f"{r['speedup']['completion']['median']:.2f}x"),
    Column("pred.", lambda r: shown(r["predicted"]["speedup"], ".2f")),
    Column("accept", lambda r: f"{r['acceptance_rate']:.1%}"),
    Column("distinct 4-grams", distinct_text),
    Column("tok/round", lambda r: f"{r['speculative']['tokens_per_round']:.2f}"),
    Column("round ms = draft + verify + host", lambda r: round_text(r["speculative"]["round_ms"]), 34, left=True),
    Column("equal", equal_text),
)  # fmt: skip


BUDGETS = Table(
    Column("policy", lambda r: r["policy"], 20, left=True),
    Column("budget", lambda r: shown(r["budget"], ",")),
    Column("acceptance", lambda r: f"{r['acceptance_rate']:.1%}"),
    Column("tokens/round", lambda r: f"{r['tokens_per_round']:.2f}"),
    Column("distinct 4-grams", distinct_text),
    Column("ms/round", lambda r: shown(r["speculative_ms"] and r["speculative_ms"]["round"], ".2f")),
    Column("plain ms", lambda r: shown(r["plain_ms"] and r["plain_ms"]["round"], ".2f")),
    Column("speed", lambda r: f"{r['ratio']['median']:.2f}x" if r["ratio"] else "-"),
    Column("least, greatest", lambda r: ends_text(r["ratio"]) if r["ratio"] else "", left=True),
)


POLICIES = Table(
    Column("policy", lambda r: Setting(policy=r["policy"], budget=r["budget"]).label, 26, left=True),
    Column("equal", lambda r: f"{r['equal']}/{r['prompts']}", 9),
    Column("acceptance", lambda r: f"{r['acceptance_rate']:.1%}"),
    Column("tokens/round", lambda r: f"{r['tokens_per_round']:.2f}"),
    Column("recompiles", lambda r: str(r["recompiles"])),
)


def difference_text(one: Record) -> str:
    """A difference in words."""
    gap = "not examined" if one["gap"] is None else f"logits {one['gap']:.2g} apart"
    return f"    prompt {one['row']} from token {one['position']} on ({gap})"
