"""Precisions of cache and weights beside each other: all ways of decoding in turns, each over two baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt_fast_sd.config import DraftConfig, EngineConfig, SamplingParams
from gpt_fast_sd.engine import Engine
from measuring.grid import draft_label
from measuring.points import distinct_text, ratio_text, round_text, speed_of
from measuring.tables import Column, Table, shown
from measuring.turns import SHORT, Run, Turns, run, spread, way_of

NOTHING = "none"
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What is quantized, and to what; None: nothing, it has the engine's dtype."""

    cache: str | None = None
    drafts: str | None = None  # the weights of the draft's copy
    weights: str | None = None  # the target's

    @classmethod
    def parse(cls, text: str) -> Precision:
        """From CACHE[/DRAFTS[/WEIGHTS]], with "none" for what is not quantized; ValueError for more parts than that."""
        parts = [part.strip() for part in text.split("/")]
        if len(parts) > 3 or not all(parts):
            raise ValueError(
                f"a precision is CACHE, CACHE/DRAFTS or CACHE/DRAFTS/WEIGHTS, as in int8/int8; got {text!r}"
            )
        return cls(
            **dict(zip(("cache", "drafts", "weights"), (None if p == NOTHING else p for p in parts), strict=False))
        )

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        parts = [self.cache or NOTHING, self.drafts or NOTHING, self.weights or NOTHING]
        while len(parts) > 1 and parts[-1] == NOTHING:
            parts.pop()
        return "/".join(parts)

    @property
    def of_target(self) -> Precision:
        """Without the draft's: plain decoding is the same."""
        return replace(self, drafts=None)

    def engine(self, config: EngineConfig) -> EngineConfig:
        """The configuration of an engine of this precision."""
        return replace(config, kv_dtype=self.cache, quantize=self.weights)

    def draft(self, draft: DraftConfig) -> DraftConfig:
        """Who drafts, with weights of this precision."""
        return replace(draft, quantize=self.drafts)


def take_turns(
    engines: Callable[[Precision], Engine],
    precisions: Sequence[Precision],
    draft: DraftConfig,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    n: int,
    *,
    progress: Callable[[str], object] = lambda what: None,
) -> list[Record]:
    """Decode plainly with every target and speculatively at every precision, n times in turns -> a record of each.

    engines: the engine of a target's precision, the same one whenever it is asked for; what drafts there is exchanged
    between runs. Before the turns every way runs once, short and untimed; in every other turn the order is reversed.
    """
    plain = [*dict.fromkeys([Precision(), *(one.of_target for one in precisions)])]
    ways = [*((one, False) for one in plain), *((one, True) for one in precisions)]
    found: dict[tuple[Precision, bool], list[Run]] = {way: [] for way in ways}
    short = [replace(p, max_tokens=min(SHORT, p.max_tokens)) for p in params]

    def once(precision: Precision, speculate: bool, how: Sequence[SamplingParams], when: str) -> Run:
        progress(f"{when}: {precision.text}, {'drafts' if speculate else 'plain'}")
        engine = engines(precision.of_target)
        if speculate and engine.draft != precision.draft(draft):
            engine.redraft(precision.draft(draft))
            engine.warm_up()
        return run(engine, prompts, how, speculate=speculate)

    for way in ways:
        once(*way, short, "prefill")
    for turn in range(n):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            found[way].append(once(*way, params, f"turn {turn + 1} of {n}"))
    base = found[Precision(), False]
    return [record(one, base, found[one.of_target, False], found[one, True]) for one in precisions]


def record(precision: Precision, base: Sequence[Run], plain: Sequence[Run], speculative: Sequence[Run]) -> Record:
    """The figures of one precision, JSON-ready: its runs over those of the same target's plain decoding, and over base.

    base: plain decoding of the model of which nothing is quantized.
    """
    rows, turns = len(plain[0].outputs), Turns([*plain], [*speculative])
    counts = turns.counts
    return {
        "precision": precision.text,
        "target": precision.of_target.text,
        "plain_over_unquantized": ratios(plain, base),
        "speedup": {"own": ratios(speculative, plain), "unquantized": ratios(speculative, base)},
        "plain": way_of(plain, rows),
        "speculative": way_of(speculative, rows),
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_by_position": counts.acceptance_by_position,
        "rounds_by_gamma": {str(gamma): n for gamma, n in sorted(counts.rounds_by_gamma.items())},
        "distinct_4grams": turns.distinct_4grams,
        "equal": rows - len(turns.first_differences),
        "recompiles_while_timed": counts.recompiles,
    }


def ratios(runs: Sequence[Run], over: Sequence[Run]) -> Record:
    """The speed of runs over that of others, turn by turn, while all rows are live or else to the end."""
    pairs = [*zip(runs, over, strict=True)]
    name = "steady" if all(a.steady and b.steady for a, b in pairs) else "completion"
    return spread([getattr(a, name) / getattr(b, name) for a, b in pairs])


def flat(point: Record) -> list[Record]:
    """The rows of PRECISIONS for one point."""
    return [point | one for one in point["precisions"]]


PRECISIONS = Table(
    Column("context", lambda r: f"{r['context']:,}"), Column("batch", lambda r: str(r["batch"])),
    Column("draft", draft_label, 34, left=True),
    Column("cache/drafts/weights", lambda r: r["precision"], left=True),
    Column("plain/s", lambda r: shown(speed_of(r["plain"]), ",.0f")),
    Column("of unquantized", lambda r: ratio_text(r["plain_over_unquantized"]), 22),
    Column("spec./s", lambda r: shown(speed_of(r["speculative"]), ",.0f")),
    Column("of its own plain", lambda r: ratio_text(r["speedup"]["own"]), 22),
    Column("of unquantized plain", lambda r: ratio_text(r["speedup"]["unquantized"]), 22),
    Column("accept", lambda r: f"{r['acceptance_rate']:.1%}"),
    Column("tok/round", lambda r: f"{r['speculative']['tokens_per_round']:.2f}"),
    Column("round ms = draft + verify + host", lambda r: round_text(r["speculative"]["round_ms"]), 34, left=True),
    Column("distinct 4-grams", distinct_text),
    Column("equal", lambda r: "-" if r["temperature"] else f"{r['equal']}/{r['batch']}"),
)  # fmt: skip
