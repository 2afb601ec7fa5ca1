"""The points of a sweep, each at several precisions: what quantizing cache, drafts and target gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpt_fast_sd.config import EngineConfig, SamplingParams
from gpt_fast_sd.engine import Engine
from gpt_fast_sd.loading import TORCH_DTYPES, System, check_kv_dtype, locate, plan_for
from gpt_fast_sd.model import read_stored_float8
from gpt_fast_sd.policies.config import DraftConfig
from measuring import machine, plots, prompts
from measuring.grid import Point, draft_fields, draft_label, has_a_model
from measuring.modes.mode import Job, Record, describe
from measuring.modes.size import BySize
from measuring.points import distinct_text, ratio_text, round_text, speed_of
from measuring.tables import Column, Table, shown
from measuring.turns import SHORT, Run, Turns, run, spread, way_of

NOTHING = "none"


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


class ByPrecision(BySize):
    """The points of a sweep, each at several precisions of cache and weights."""

    benchmark, rows_of = "precision", PRECISIONS

    def __init__(self, job: Job) -> None:
        args = job.args
        for name in ("kv_dtype", "quantize", "draft_quantize"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is what --precisions varies: name it there")
        if any(has_a_model(setting.policy) for setting in job.settings):
            raise ValueError("--sweep precision is about targets that draft for themselves: leave the draft model out")
        if job.parallel.device.type == "cuda" and read_stored_float8(locate(args.model)):
            raise ValueError(f"{args.model} is stored in float8, and --sweep precision begins with nothing quantized")
        self.precisions = list(dict.fromkeys(map(Precision.parse, args.precisions)))
        device, dtype = job.parallel.device, TORCH_DTYPES[job.dtype_name]
        for one in self.precisions:  # refused before any work
            config = one.engine(job.engine_config)
            check_kv_dtype(config, dtype)
            for setting in job.settings:
                draft = one.draft(setting.draft(args.gamma[0], draft_fields(vars(args))))
                if draft.needs_planes:
                    raise ValueError(f"--sweep precision measures caches in bytes, and {draft.policy} reads planes")
                system = System(config=config, draft=draft, model=job.config, dtype=dtype, device=device)
                plan_for(system.of_rank(job.parallel))
        super().__init__(job, precisions=[one.text for one in self.precisions])
        self.engines: dict[Precision, Engine] = {}  # beside the one that is measured, and for the same rows

    def engine(self, base: Engine, precision: Precision) -> Engine:
        """The engine of a target of this precision; those of an earlier base are dropped."""
        if self.engines.get(Precision()) is not base:
            self.engines = {Precision(): base}
            machine.release_memory(base.device)
        if precision not in self.engines:
            self.step(f"{precision.text}: loading and compiling")
            config, parallel = precision.engine(base.config), base.parallel
            if precision.weights is None:  # the weights are the same
                found = Engine(base.model, base.tokenizer, config, parallel=parallel)
            else:
                found = Engine.from_pretrained(self.job.args.model, config, parallel=parallel)
            self.engines[precision] = found
        return self.engines[precision]

    def measure(self, point: Point, engine: Engine) -> Record:
        """One point's figures at every precision."""
        rows = prompts.round_the_text(self.ids, point.batch, point.context, self.job.bos)
        note = self.note(point.batch, point.context)
        name = f"{point.batch} x {point.context:,}, {draft_label(point.key)}"
        found = take_turns(
            lambda one: self.engine(engine, one), self.precisions, self.job.draft(point), rows,
            self.job.params(point.batch, point.temperature), self.job.args.pairs,
            progress=lambda what: self.step(f"{name}, {what}"),
        )  # fmt: skip
        rates = self.system(engine).chip
        return {
            "status": "measured", "dtype": engine.dtype_name, "precisions": found, "note": note,
            "machine": {"bandwidth": rates.bandwidth, "peak": rates.peak}, "load_average": machine.load_average(),
        }  # fmt: skip

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print the figures, or why there are none; they replace older ones."""
        if isinstance(found, Exception):
            found = {"status": "failed", "reason": self.job.told(found)}
        self.ledger.put(point.key, point.key | found)
        self.ledger.write()
        self.bar.write(self.line(self.ledger.find(point.key) or {}))

    def line(self, record: Record) -> str:
        """The rows of the table, or why there are none."""
        if record["status"] == "measured":
            return "\n".join(self.table.line(row) for row in flat(record))
        return super().line(record)

    def report(self, found: list[Record]) -> None:
        """All points in one table, and a picture."""
        args, measured = self.job.args, self.listed(found)
        self.warn_of_speeds()
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plots.draw_precisions(measured, describe(self.ledger.document), args.plots / "precisions.png")
            print(f"drawn: {args.plots / 'precisions.png'}")
