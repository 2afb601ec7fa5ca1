"""The measurements of benchmark.py: each has a checked job, points, a file that it goes on from, and what it prints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams, loading
from gpt_fast_sd.fast.compile import can_compile
from gpt_fast_sd.loading import TORCH_DTYPES, check_kv_dtype, locate, natural_dtype, plan_for
from gpt_fast_sd.model import ModelConfig, Tokenizer, load_model, read_config, read_stored_dtype, read_stored_float8
from gpt_fast_sd.serving.draft_planner import DraftPlanner
from gpt_fast_sd.tp import Parallel
from inputs import prompts
from inputs.prompts import digest
from inputs.rows import Rows
from measuring import grid, lossless, machine, plots, points
from measuring.chips import Chip, Ranks, chip_of, rates_here
from measuring.forecast import System
from measuring.grid import Point, Setting, draft_fields, draft_label, has_a_model
from measuring.ledger import Ledger, Record, fingerprint
from measuring.points import BUDGETS, POLICIES, PRECISIONS, SIZES, lengths_of
from measuring.tables import Table
from measuring.turns import Run, Turns, in_turns, round_ms, run, shortened, spread, take_turns, totals, way_of

Progress = Callable[[str], object]
Sets = Sequence[list[list[int]]]  # of a point's prompts
LOOKING = 60.0  # seconds after which no more gaps of a policy's differences are computed
NOTHING = "none"


class NothingMeasured(ValueError):
    """There is no result at all."""


class OutputsDiffer(ValueError):
    """Outputs are not those of plain decoding where they must be."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, texts, processes and drafts, checked.

    args: what is asked for, by the names of benchmark.py's flags. told: an error in one line.
    """

    args: argparse.Namespace
    engine_config: EngineConfig  # but for the rows and their length
    parallel: Parallel
    config: ModelConfig
    tokenizer: Tokenizer | None
    texts: Mapping[str, Sequence[int]]  # none where prompts are made up
    rows: Rows | None  # of sweeps over size and precision
    settings: list[Setting]
    skipped: dict[str, str]
    told: Callable[[Exception], str]

    @property
    def bos(self) -> int | None:
        return self.tokenizer.bos_id if self.tokenizer else self.config.bos_id

    def in_common(self, **more: Any) -> Record:
        return {"model": str(self.args.model), **more, **grid.in_common(vars(self.args))}

    @property
    def timed(self) -> Record:
        """The properties of a machine, and of how it is timed, that all times in one file must share."""
        here, parallel = machine.environment(self.parallel.device), self.parallel
        where = {name: here[name] for name in ("cpu", "device", "torch")}
        how = {"device": parallel.device.type, "tp": parallel.tp, "threads": here["threads"]}
        return {"machine": where, **how, "seconds": self.args.seconds}

    def ledger(self, benchmark: str, settings: Record, results: str = "results") -> Ledger:
        path = self.args.json if self.parallel.is_main else None
        here = machine.environment(self.parallel.device)
        return Ledger(path, benchmark, settings, here, fresh=self.args.fresh, results=results)

    @property
    def dtype_name(self) -> str:
        args = self.args
        if args.dtype != "auto":
            return str(args.dtype)
        dtype = natural_dtype(read_stored_dtype(locate(args.model)), self.parallel.device, not args.no_compile)
        return next(name for name, one in TORCH_DTYPES.items() if one == dtype)

    def points(self, contexts: Sequence[int]) -> list[Point]:
        """All measurements, those that may share an engine and its prefilled keys side by side."""
        args = self.args
        return [
            Point(batch=batch, context=context, setting=setting, gamma=gamma, temperature=temperature)
            for batch in args.batch
            for setting in self.settings
            for gamma in args.gamma
            for context in contexts  # rising: a longer prompt begins as the shorter one that a slot holds
            for temperature in args.temperature
        ]

    def draft(self, point: Point) -> DraftConfig:
        return point.setting.draft(point.gamma, draft_fields(vars(self.args)))

    def params(self, n: int, temperature: float) -> list[SamplingParams]:
        """Of n prompts; sampled ones draw with a seed of their own, so that every run is the same."""
        return [params_of(self.args, temperature, row) for row in range(n)]

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        args, room, most = self.args, context + self.args.max_new_tokens, self.config.max_seq_len
        if room > most:
            raise ValueError(f"{context:,} tokens and {args.max_new_tokens:,} new ones are over {most:,} positions")
        config = replace(self.engine_config, batch_size=batch, max_seq_len=room)
        return Engine.from_pretrained(args.model, config, draft, parallel=self.parallel)


def params_of(args: argparse.Namespace, temperature: float, row: int) -> SamplingParams:
    """How a row is continued; ValueError where the flags make no sense."""
    seed = (args.seed + row) % 2**63 if temperature else None
    how = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p")}
    return SamplingParams(max_tokens=args.max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True, **how)


@dataclass
class Mode:
    """One kind of measurement: its points, its file, and what it prints."""

    job: Job
    points: list[Point]
    ledger: Ledger
    table: Table
    bar: Any = None
    nothing = "nothing could be measured; the reasons are above"

    def key(self, point: Point) -> Record:
        return point.key

    def known(self, point: Point) -> Record | None:
        return self.ledger.find(self.key(point))

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        return self.job.build(batch, context, draft)

    def measure(self, point: Point, engine: Engine) -> Record:
        """The result of a point, without its key."""
        raise NotImplementedError

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print a result; the reason for a missing one is printed and not stored."""
        if isinstance(found, Exception):
            self.job.skipped[point.setting.label] = self.job.told(found)
            self.bar.write(f"skipped {point.setting.label}: {self.job.told(found)}")
            return
        self.ledger.put(self.key(point), self.key(point) | found)
        self.ledger.write(**self.summary())
        self.bar.write(self.line(self.ledger.find(self.key(point)) or {}))

    def summary(self) -> Record:
        """What the file says beside its results."""
        return {"skipped": self.job.skipped}

    def line(self, record: Record) -> str:
        return self.table.line(record)

    def step(self, what: str) -> None:
        self.bar.set_description(what)

    def run(self) -> list[Record]:
        """Measure what the file does not hold yet -> the results of all points, as far as there are any."""
        parallel, args = self.job.parallel, self.job.args
        # the first rank holds the file and decides what is left
        todo = [point for point in self.points if not parallel.same(int(self.known(point) is not None))]
        parallel.log(describe(self.ledger.document))
        for label, reason in self.job.skipped.items():
            parallel.log(f"skipped {label}: {reason}")
        if len(todo) < len(self.points):
            parallel.log(f"{len(self.points) - len(todo)} of {len(self.points)} points are in {args.json} already")
        if todo:
            self.before_engines()
            parallel.log(self.table.head)
        with tqdm(total=len(todo), unit="point", leave=False, disable=None if parallel.is_main else True) as self.bar:
            for group in grid.groups(todo, exact=args.exact):
                self.measure_group(group)
        return [record for point in self.points if (record := self.ledger.find(self.key(point)))]

    def before_engines(self) -> None:
        """Measure what needs a device that no engine fills."""

    def measure_group(self, left: list[Point]) -> None:
        """Measure points that may share an engine, whose draft is exchanged, or report why not.

        A failure costs no other point. With several processes, one alone may run out of memory, and the others would
        wait for it: that ends the run.
        """
        parallel = self.job.parallel
        alone = parallel.dp * parallel.tp == 1
        kinds: tuple[type[Exception], ...] = (ValueError, RuntimeError, MemoryError) if alone else (ValueError,)
        engine: Engine | None = None
        drafting: DraftConfig | None = None

        def taken(points: list[Point], found: Record | Exception) -> None:
            for one in points:
                left.remove(one)
                if parallel.is_main:
                    self.done(one, found)
                self.bar.update()

        while left:
            point, draft = left[0], self.job.draft(left[0])
            self.step(f"batch {point.batch}, {draft_label(point.key)}: loading and compiling")
            if engine is None or (draft.needs_planes and not engine.cache.format.planes):
                engine = None
                machine.release_memory(parallel.device)
                drafting = draft if point.needs_model or draft.needs_planes else None
                try:
                    engine = self.build(point.batch, max(p.context for p in left), drafting)
                except kinds as error:
                    # it may be this draft for which none can be built: the others of its length get one without it
                    concerned = [p for p in left if drafting is None or self.job.draft(p) == draft]
                    longest = max(p.context for p in concerned)
                    taken([p for p in concerned if p.context == longest], error)
                    continue
            concerned = [p for p in left if self.job.draft(p) == draft]
            try:
                if drafting != draft:
                    engine.redraft(draft)
                    drafting = draft
                engine.warm_up()
                concerned = [point]
                found = self.measure(point, engine)
            except kinds as error:
                taken(concerned, error)
                engine = None  # its state is unknown: the others get a new one
            else:
                taken(concerned, found)

    def warn_of_speeds(self) -> None:
        if self.job.args.no_compile:
            print("not compiled: acceptance and tokens per round hold, the speeds mean little")

    def draw(self, draw: Callable[[str, Path], list[Path]]) -> None:
        """Draw into --plots, if there is one; draw: from a title, into a folder -> what it has drawn."""
        if folder := self.job.args.plots:
            folder.mkdir(parents=True, exist_ok=True)
            for path in draw(describe(self.ledger.document), folder):
                print(f"drawn: {path}")

    def listed(self, found: list[Record]) -> list[Record]:
        """Print all results in one table -> those that were measured; NothingMeasured where there is none."""
        if found:
            print("", self.table.head, *map(self.line, found), sep="\n")
        if measured := [r for r in found if r.get("status") != "failed"]:
            return measured
        raise NothingMeasured(self.nothing)

    def report(self, found: list[Record]) -> None:
        """Print what follows from the results, and draw them; NothingMeasured, or OutputsDiffer where they must not."""
        raise NotImplementedError


def describe(document: Record) -> str:
    """What was measured, in one line."""
    s, here = document["settings"], document["environment"]
    dtype = next((r["dtype"] for r in document.get("points", ()) if "dtype" in r), s["dtype"])
    parts = [s["model"], f"{dtype}{', exact' if s.get('exact') else ''} on {here.get('device', 'cpu')}"]
    parts += [f"tp {s['tp']}"] if s.get("tp", 1) > 1 else []
    parts.append(f"{here['threads']} threads")
    if "batch_size" in s:
        n = f"{s['context']:,} tokens" if "context" in s else f"{s['shortest']:,} to {s['longest']:,} tokens"
        parts.append(f"{s['batch_size']} x {n}, gamma {s['gamma']}")
    if "temperature" in s:
        parts.append(f"temperature {s['temperature']:g}" if s["temperature"] else "greedy")
    parts.append(f"{s.get('max_new_tokens', s.get('new_tokens'))} new tokens")
    return ", ".join(parts + ([f"{s['pairs']} pairs"] if s.get("pairs") else []))


class BySize(Mode):
    """A sweep over batch, context, draft, budget, gamma and temperature."""

    benchmark, rows_of = "batch", SIZES

    def __init__(self, job: Job, **settings: object) -> None:
        args = job.args
        if args.context[0] < 2:
            raise ValueError(f"a context has at least 2 tokens, got {args.context[0]}")
        assert job.rows
        self.rows, self.sets = job.rows, getattr(args, "sets", None) or 1
        names = ("draft_model", "max_new_tokens", "pairs", "seed", "dtype")
        draft_config = read_config(locate(args.draft_model)) if args.draft_model else None
        settings = job.in_common(
            transformer=asdict(job.config), text=job.rows.about, compiled=not args.no_compile,
            **({"sets": self.sets} if self.sets > 1 else {}),
            draft_transformer=asdict(draft_config) if draft_config else None,
            **{name: getattr(args, name) for name in names}, **job.timed, **settings,
        )  # fmt: skip
        super().__init__(job, job.points(args.context), job.ledger(self.benchmark, settings, "points"), self.rows_of)
        self.draft_config = draft_config
        self.chip: Chip | None = None  # the machine's rates, once they are measured
        for note in dict.fromkeys(self.rows.note(b, c) for b in args.batch for c in args.context):
            if note:
                job.parallel.log(note)

    def known(self, point: Point) -> Record | None:
        """The figures that the file holds: what failed is tried again."""
        found = super().known(point)
        return found if found and found.get("status") == "measured" else None

    def before_engines(self) -> None:
        """The rates of the machine: an engine leaves no room for what is copied and multiplied to measure them."""
        rates = rates_here(self.job.parallel.device, TORCH_DTYPES[self.job.dtype_name])
        self.chip = rates.chip(machine.environment(self.job.parallel.device)["device"], memory=float("inf"))

    def system(self, engine: Engine) -> System:
        job, args = self.job, self.job.args
        assert self.chip
        link = (chip_of(self.chip.name) or self.chip).link
        return System(
            model=job.config, chip=self.chip, device=engine.device.type, dtype=engine.dtype_name,
            kv_dtype=args.kv_dtype, quantize=args.quantize, draft_model=self.draft_config, room=args.max_new_tokens,
            ranks=Ranks(n=job.parallel.tp, link=link, per_node=job.parallel.tp) if job.parallel.tp > 1 else None,
        )  # fmt: skip

    def measure(self, point: Point, engine: Engine) -> Record:
        sets = [self.rows.rows(point.batch, point.context, i, self.sets) for i in range(self.sets)]
        system, name = self.system(engine), f"{point.batch} x {point.context:,}, {draft_label(point.key)}"
        found = self.figures(point, engine, system, sets, lambda what: self.step(f"{name}: {what}"))
        rates = {"bandwidth": system.chip.bandwidth, "peak": system.chip.peak}
        return found | {"note": self.rows.note(point.batch, point.context), "machine": rates}

    def figures(self, point: Point, engine: Engine, system: System, sets: Sets, tell: Progress) -> Record:
        machine.restart_peak(engine.device)
        params, args = self.job.params(point.batch, point.temperature), self.job.args
        how: Record = {"seconds": args.seconds, "progress": tell}
        turns = Turns.together([take_turns(engine, rows, params, args.pairs, **how) for rows in sets])
        planner = engine.schedule.planner  # which tells of the last run that drafted
        found = {"found": [vars(one) for one in planner.found()]} if isinstance(planner, DraftPlanner) else {}
        return points.summarize(point, turns, engine, system, self.job.draft(point)) | found

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print the figures, or why there are none; they replace older ones."""
        if isinstance(found, Exception):
            found = {"status": "failed", "reason": self.job.told(found)}
        super().done(point, found)
        if "speedup" in found:
            self.bar.write(points.more(found))

    def summary(self) -> Record:
        """The lengths, which are of one precision."""
        measured = [r for r in self.ledger.records if r.get("status") == "measured"]
        return {"lengths": lengths_of(measured)} if self.benchmark == "batch" else {}

    def line(self, record: Record) -> str:
        if record["status"] == "measured":
            return "\n".join(self.table.line(record | one) for one in record.get("precisions", [{}]))
        return f"{record['context']:>7,}  {record['batch']:>5}  {draft_label(record):<34}  skipped: {record['reason']}"

    def report(self, found: list[Record]) -> None:
        found.sort(key=lambda r: (draft_label(r), r["context"], r["batch"]))
        measured = self.listed(found)
        rates = measured[-1]["machine"]
        print(f"the machine reads {rates['bandwidth'] / 1e9:,.1f} GB/s and computes {rates['peak'] / 1e9:,.0f} GFLOP/s")
        capturing = sum(r["capture_seconds"] for r in measured)  # files of before it was told have none
        if capturing:
            print(f"capturing rounds as CUDA graphs took {capturing:.1f} s, which are in no speed above")
        lengths = lengths_of(measured)
        print(*points.lines_of(lengths), sep="\n")
        self.warn_of_speeds()
        self.draw(lambda title, folder: plots.draw_sweep(measured, lengths, title, folder))
        compared = [r["lossless"] for r in measured if r["lossless"]["compared"]]
        rows, equal = sum(one["rows"] for one in compared), sum(one["equal"] for one in compared)
        if not compared:
            print("outputs are sampled and not compared: samples differ by design")
            return
        print(f"{equal} of {rows} rows equal plain decoding, token for token")
        must = self.job.args.exact or (measured[-1]["dtype"], measured[-1]["kv_dtype"]) == ("fp32", "fp32")
        if equal < rows and must:
            raise OutputsDiffer(f"{rows - equal} rows differ where they must not; please report it")


class ByBudget(Mode):
    """Acceptance, tokens per round and speed over the draft budget, at one batch and context."""

    nothing = "no policy could be measured; the reasons are above"

    def __init__(self, job: Job) -> None:
        args = job.args
        if args.context and len(args.context) > 1:
            raise ValueError(f"--sweep budget measures with one --context, got {len(args.context)}")
        (batch,), room = args.batch, job.config.max_seq_len - args.max_new_tokens
        share = -(-batch // len(job.texts))  # rows of a text
        context = (args.context or [prompts.longest_context(min(map(len, job.texts.values())), share, room)])[0]
        if not 2 <= context <= room:
            raise ValueError(
                f"a context of {context:,} does not fit: from 2 to {max(room, 0):,} tokens leave the model's "
                f"{room + args.max_new_tokens:,} positions room for {args.max_new_tokens:,} new ones"
            )
        self.prompts = prompts.stretches(job.texts, batch, context, job.bos)
        self.plain: Run | None = None
        settings = job.in_common(
            batch_size=batch, gamma=args.gamma[0], new_tokens=args.max_new_tokens, pairs=args.pairs,
            temperature=args.temperature[0], seed=args.seed, draft_model=args.draft_model, text=", ".join(job.texts),
            digest=digest(self.prompts), context=context, dtype=job.dtype_name,
            compiled=not args.no_compile and can_compile(job.parallel.device), **job.timed,
        )  # fmt: skip
        super().__init__(job, job.points([context]), job.ledger("frontier", settings), BUDGETS)

    def key(self, point: Point) -> Record:
        return {"policy": point.setting.policy, "budget": point.setting.budget}

    def measure(self, point: Point, engine: Engine) -> Record:
        params, n = self.job.params(point.batch, point.temperature), self.job.args.pairs
        if n:
            turns = take_turns(engine, self.prompts, params, n, seconds=self.job.args.seconds, progress=self.step)
        else:  # how they are decoded plainly is the same for all points
            self.plain = self.plain or run(engine, self.prompts, params, speculate=False)
            turns = Turns([self.plain], [run(engine, self.prompts, params)])
        counts = turns.counts
        return turns.acceptance | {
            "tokens_per_round": counts.tokens_per_round, "ratio": spread(turns.ratios()) if n else None,
            "plain_ms": round_ms(turns.plain) if n else None,
            "speculative_ms": round_ms(turns.speculative) if n else None,
            "kv_bytes_per_token": {
                "plain": totals(turns.plain).kv_bytes_per_token, "speculative": counts.kv_bytes_per_token,
            },
        }  # fmt: skip

    def report(self, found: list[Record]) -> None:
        self.listed(found)
        if not self.job.args.pairs:
            print("no pairs: each point was decoded once to count acceptance, and nothing was timed")
        else:
            self.warn_of_speeds()
        self.ledger.write(transformer=asdict(self.job.config), **self.summary())
        self.draw(lambda title, folder: plots.draw_budgets(found, title, folder / "budgets.png"))


class Lossless(Mode):
    """Every policy compared with plain decoding, token for token, on prompts of ragged length."""

    nothing = "no policy could be built; the reasons are above"

    def __init__(self, job: Job) -> None:
        args = job.args
        (batch,), (budget,), (gamma,) = args.batch, args.budget, args.gamma
        if not 2 <= args.shortest <= args.longest:
            raise ValueError(
                f"prompts of {args.shortest:,} to {args.longest:,} tokens: the shortest has at least 2, the longest "
                "at least as many"
            )
        if args.temperature != [0.0]:
            raise ValueError("--lossless compares greedy outputs: samples differ by design, leave --temperature out")
        if job.parallel.tp > 1:
            raise ValueError("--lossless runs in one process; of several the sweep compares")
        self.prompts = prompts.ragged(job.texts, args.prompts, args.shortest, args.longest, job.bos, args.seed)
        self.engine: Engine | None = job.build(batch, args.longest, None)  # which the first points take
        self.theirs = ""
        if any(has_a_model(setting.policy) for setting in job.settings):
            self.theirs = fingerprint(load_model(locate(args.draft_model), dtype=self.engine.dtype))
        settings = job.in_common(
            weights=fingerprint(self.engine.model), dtype=self.engine.dtype_name, compiled=self.engine.compiled,
            threads=args.threads, texts={name: digest(ids) for name, ids in job.texts.items()}, prompts=args.prompts,
            shortest=args.shortest, longest=args.longest, new_tokens=args.max_new_tokens, batch_size=batch,
            budget=budget, gamma=gamma, seed=args.seed,
        )  # fmt: skip
        super().__init__(job, job.points([args.longest]), job.ledger("speculation lossless", settings), POLICIES)

    def key(self, point: Point) -> Record:
        key: Record = {"policy": point.setting.policy, "budget": point.setting.budget}
        if point.needs_model:
            key |= {"draft_model": self.job.args.draft_model, "draft_weights": self.theirs}
        return key

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        engine, self.engine = (self.engine, None) if draft is None else (None, self.engine)
        return engine or super().build(batch, context, draft)

    def decode(self, engine: Engine, what: str, *, speculate: bool) -> Run:
        params = self.job.params(len(self.prompts), 0.0)
        with tqdm(total=len(params), desc=what, unit="prompt", leave=False) as bar:
            return run(engine, self.prompts, params, speculate=speculate, finished=lambda _: bar.update())

    def measure(self, point: Point, engine: Engine) -> Record:
        plain = self.ledger.find({"policy": "off"})
        if plain is None:
            plain = {"policy": "off", "outputs": self.decode(engine, "plain", speculate=False).outputs}
            self.ledger.put({"policy": "off"}, plain)
        stats = (ours := self.decode(engine, point.setting.label, speculate=True)).stats
        found = lossless.differences(
            zip(range(len(self.prompts)), self.prompts, plain["outputs"], ours.outputs, strict=True),
            lambda ids: lossless.logits_after(engine.model, ids)[0], LOOKING,
        )  # fmt: skip
        return {
            "prompts": len(self.prompts), "equal": len(self.prompts) - len(found),
            "differences": [{"row": (one := asdict(d)).pop("index"), **one} for d in found],
            "acceptance_rate": stats.acceptance_rate, "acceptance_by_position": stats.acceptance_by_position,
            "tokens_per_round": stats.tokens_per_round, "recompiles": stats.recompiles,
        }  # fmt: skip

    def line(self, record: Record) -> str:
        lines = [self.table.line(record)]
        for one in record["differences"]:
            gap = "not examined" if one["gap"] is None else f"logits {one['gap']:.2g} apart"
            lines.append(f"    prompt {one['row']} from token {one['position']} on ({gap})")
        return "\n".join(lines)

    def report(self, found: list[Record]) -> None:
        self.listed(found)
        engine = self.ledger.document["settings"]
        dtypes = engine["dtype"], engine["kv_dtype"] or engine["dtype"]
        must = engine["exact"] or dtypes == ("fp32", "fp32")

        def is_wrong(one: Record) -> bool:
            if must or one["gap"] is None:
                return must
            return not one["gap"] <= lossless.near_tie(one.get("best", 0.0), *dtypes)  # NaN is wrong

        if wrong := [r["policy"] for r in found if any(map(is_wrong, r["differences"]))]:
            raise OutputsDiffer(f"not token-identical to plain decoding: {', '.join(wrong)}")


class Precision(NamedTuple):
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
        return cls(*(None if part == NOTHING else part for part in parts))

    @property
    def text(self) -> str:
        return re.sub(rf"(/{NOTHING})+$", "", "/".join(one or NOTHING for one in self))

    @property
    def of_target(self) -> Precision:
        return self._replace(drafts=None)

    def engine(self, config: EngineConfig) -> EngineConfig:
        return replace(config, kv_dtype=self.cache, quantize=self.weights)

    def draft(self, draft: DraftConfig) -> DraftConfig:
        return replace(draft, quantize=self.drafts)


def record(precision: Precision, base: Sequence[Run], plain: Sequence[Run], speculative: Sequence[Run]) -> Record:
    """The figures of one precision: its runs over the plain ones of its target, and of nothing quantized (base)."""
    rows, turns = len(plain[0].outputs), Turns([*plain], [*speculative])
    return {
        "precision": precision.text, "target": precision.of_target.text, "plain_over_unquantized": ratios(plain, base),
        "speedup": {"own": ratios(speculative, plain), "unquantized": ratios(speculative, base)},
        "plain": way_of(plain, rows), "speculative": way_of(speculative, rows), **turns.acceptance,
        "rounds_by_gamma": turns.rounds_by_gamma, "equal": rows - len(turns.first_differences),
        "recompiles_while_timed": turns.counts.recompiles,
    }  # fmt: skip


def ratios(runs: Sequence[Run], over: Sequence[Run]) -> Record:
    """The speed of runs over that of others, turn by turn, while all rows are live or else to the end."""
    pairs = [*zip(runs, over, strict=True)]
    name = "steady" if all(a.steady and b.steady for a, b in pairs) else "completion"
    return spread([getattr(a, name) / getattr(b, name) for a, b in pairs])


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
                system = loading.System(config=config, draft=draft, model=job.config, dtype=dtype, device=device)
                plan_for(system.of_rank(job.parallel))
        super().__init__(job, precisions=[one.text for one in self.precisions])
        self.engines: dict[Precision, Engine] = {}  # beside the one that is measured, and for the same rows

    def engine(self, base: Engine, precision: Precision) -> Engine:
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

    def figures(self, point: Point, engine: Engine, system: System, sets: Sets, tell: Progress) -> Record:
        """Decode plainly with every target and with drafts at every precision, in turns after short untimed runs."""
        params, n, (rows,) = self.job.params(point.batch, point.temperature), self.job.args.pairs, sets
        plain = [*dict.fromkeys([Precision(), *(one.of_target for one in self.precisions)])]
        ways = [*((one, False) for one in plain), *((one, True) for one in self.precisions)]

        def once(way: tuple[Precision, bool], turn: int | None) -> Run:
            precision, speculate = way
            when = "prefill" if turn is None else f"turn {turn + 1} of {n}"
            tell(f"{when}: {precision.text}, {'drafts' if speculate else 'plain'}")
            target, draft = self.engine(engine, precision.of_target), precision.draft(self.job.draft(point))
            if speculate and target.draft != draft:
                target.redraft(draft)
                target.warm_up()
            return run(target, rows, shortened(params) if turn is None else params, speculate=speculate)

        for way in ways:
            once(way, None)
        found = in_turns(ways, once, lambda turn: turn < n)
        base = found[Precision(), False]
        records = [record(one, base, found[one.of_target, False], found[one, True]) for one in self.precisions]
        load = machine.load_average()
        return {"status": "measured", "dtype": engine.dtype_name, "precisions": records, "load_average": load}

    def report(self, found: list[Record]) -> None:
        measured = self.listed(found)
        self.warn_of_speeds()
        self.draw(lambda title, folder: plots.draw_precisions(measured, title, folder / "precisions.png"))
