"""Measure speculation beside plain decoding: what it gains, where from, and that it changes nothing.

    python scripts/benchmark.py                                  the bundled model on the bundled document, small
    python scripts/benchmark.py --batch 1,4,8,16 --context 1k,4k,8k,16k --draft streaming,guided --budget 256
        --gamma 6,auto --text books/*.txt --json sweep.json --plots sweep/
    python scripts/benchmark.py --sweep budget --text book.txt --plots .      every policy over the draft budget
    python scripts/benchmark.py --sweep budget --pairs 0 --json 4k.json       acceptance alone, nothing is timed
    python scripts/benchmark.py --sweep precision --precisions none,none/int8,int8,int8/int8 --gamma 4 --text book.txt
    python scripts/benchmark.py --lossless --text books/*.txt --json lossless.json
    python scripts/benchmark.py --draw 2k.json 4k.json --plots .              pictures of files that are there
    torchrun --nproc_per_node=8 scripts/benchmark.py --model meta-llama/Llama-3.1-8B --tp 8 --batch 32,64,128 ...

A point is one batch, context, draft policy, budget, gamma and temperature. Its rows are prompts of `context` tokens (k
is 1,000, as in MagicDec's tables), each from another place of the texts, and every run adds --max-new-tokens to each of
them. Plain and speculative runs take turns on one engine (A B, B A, A B, ...), whose slots keep their prompts, so that
only the first run prefills, for all temperatures. What counts is the ratio of a pair: the median over the pairs, with
the least and the greatest. All points of a batch share an engine, whose cache is as long as the longest context needs.

Two speeds are told: steady, while all rows are live, and to completion, the end of the slowest row. docs/measure.md
defines them, what is predicted, break-even and the critical length. The machine's rates are measured before the first
point.

--sweep budget takes one batch, context, gamma and temperature, and prompts that share no text. --no-compile starts at
once and gives the same acceptance, but no speed that means anything.

--sweep precision measures every point at each of --precisions: what the KV cache, the draft's weights and the target's
weights are quantized to. Two ratios are told: over plain decoding of the same target, which is what a lossless
policy reproduces, and over plain decoding of the model of which nothing is quantized. Each target has an engine.

--lossless decodes --prompts prompts of ragged length through all slots, in fp32 and with every policy, and compares
them with plain decoding, token for token: exit code 1 where one differs. So does the sweep in fp32, and with --exact.
In 16 bits rows that part are counted; --lossless exits with 1 there where logits are too far apart for rounding. Of
several processes it is the sweep that compares.

--json FILE is whole after every point. Started again with the same settings it goes on where it ended, and what failed
is tried again; batches, contexts and drafts may be added. Other settings are refused; --fresh begins anew.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import parser_of, refuse, refusing, sentence, started
from files import check_files
from flags import add_engine_flags, add_flags, config_of, count, drafters, gammas, given_beside, join, positive, sizes
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.compiling import can_compile
from gpt_fast_sd.devices import natural_dtype
from gpt_fast_sd.loading import BUNDLED, TORCH_DTYPES, check_kv_dtype, locate, plan_for
from gpt_fast_sd.measuring import grid, lossless, machine, plots, precisions, prompts
from gpt_fast_sd.measuring.chips import Chip, Ranks, chip_of
from gpt_fast_sd.measuring.forecast import System
from gpt_fast_sd.measuring.grid import Point, Setting, Sweep, draft_fields, draft_label, has_a_model, known_drafters
from gpt_fast_sd.measuring.ledger import Ledger, complete, digest, fingerprint, read_document
from gpt_fast_sd.measuring.lengths import lengths_of, lines_of
from gpt_fast_sd.measuring.points import (
    BUDGETS,
    POLICIES,
    SIZES,
    difference_text,
    more,
    rates_of,
    ratio_text,
    summarize,
)
from gpt_fast_sd.measuring.precisions import PRECISIONS, Precision
from gpt_fast_sd.measuring.tables import Table
from gpt_fast_sd.measuring.turns import Run, Turns, round_ms, run, spread, take_turns, totals
from gpt_fast_sd.model import (
    ModelConfig,
    Tokenizer,
    load_model,
    load_tokenizer,
    read_config,
    read_stored_dtype,
    read_stored_float8,
)
from gpt_fast_sd.tp import Parallel

PROGRAM = "benchmark.py"
MOST_RANDOM = 1 << 24  # tokens of --synthetic, which longer rows go round
LOOKING = 60.0  # seconds after which no more gaps of a policy's differences are computed
Record = dict[str, Any]
DEFAULTS: dict[str, Record] = {  # of flags that were not given, by what is measured; what is not here is not read there
    "size": {
        "batch": [1, 4], "context": [1000, 4000], "draft": ["streaming"], "budget": [256], "gamma": ["auto"],
        "max_new_tokens": 96, "pairs": 3, "seconds": 0.0, "seed": 0, "dtype": "auto", "plots": None,
    },
    "budget": {
        "batch": [4], "context": None, "draft": None, "budget": [64, 128, 256, 512], "gamma": [4],
        "max_new_tokens": 64, "pairs": 3, "seconds": 0.0, "seed": 0, "dtype": "auto", "plots": None,
    },
    "precision": {
        "batch": [4], "context": [4000], "draft": ["streaming"], "budget": [256], "gamma": [4],
        "max_new_tokens": 64, "pairs": 3, "seed": 0, "dtype": "auto", "plots": None,
        "precisions": ["none", "none/int8", "int8", "int8/int8"],
    },
    "lossless": {
        "batch": [8], "draft": list(known_drafters()), "budget": [64], "gamma": [4], "max_new_tokens": 32, "seed": 1,
        "dtype": "fp32", "prompts": 200, "shortest": 20, "longest": 1500,
    },
    "draw": {"plots": None},
}  # fmt: skip
MODES = {
    "size": "--sweep size", "budget": "--sweep budget", "precision": "--sweep precision", "lossless": "--lossless",
    "draw": "--draw",
}  # fmt: skip

# ---- what every measurement needs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, texts, processes and drafts, checked."""

    args: argparse.Namespace
    parallel: Parallel
    config: ModelConfig
    tokenizer: Tokenizer | None
    texts: Mapping[str, Sequence[int]]  # none where prompts are made up
    settings: list[Setting]
    skipped: dict[str, str]

    @property
    def bos(self) -> int | None:
        """What a prompt begins with."""
        return self.tokenizer.bos_id if self.tokenizer else self.config.bos_id

    def in_common(self, **more: Any) -> Record:
        """What results that may stand in one file have in common."""
        return {"model": str(self.args.model), **more, **grid.in_common(vars(self.args))}

    @property
    def timed(self) -> Record:
        """What else times that may stand in one file have in common."""
        here, device = machine.environment(self.parallel.device), self.parallel.device.type
        return grid.timed_on(here, device, self.parallel.tp) | {"seconds": self.args.seconds}

    def ledger(self, benchmark: str, settings: Record, results: str = "results") -> Ledger:
        """The file of --json, which the first process has; ValueError where it holds something else."""
        path = self.args.json if self.parallel.is_main else None
        here = machine.environment(self.parallel.device)
        return Ledger(path, benchmark, settings, here, fresh=self.args.fresh, results=results, adapt=grid.up_to_date)

    @property
    def dtype_name(self) -> str:
        """The weights' dtype as an engine will have it."""
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
        """Who drafts for a point."""
        return point.setting.draft(point.gamma, draft_fields(vars(self.args)))

    def params(self, n: int, temperature: float) -> list[SamplingParams]:
        """Of n prompts; sampled ones draw with a seed of their own, so that every run is the same."""
        return [params_of(self.args, temperature, row) for row in range(n)]

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        """An engine for rows of up to so many tokens."""
        args, room, most = self.args, context + self.args.max_new_tokens, self.config.n_positions
        if room > most:
            raise ValueError(f"{context:,} tokens and {args.max_new_tokens:,} new ones are over {most:,} positions")
        config = config_of(EngineConfig, args, batch_size=batch, max_seq_len=room)
        return Engine.from_pretrained(args.model, config, draft, parallel=self.parallel)


def params_of(args: argparse.Namespace, temperature: float, row: int) -> SamplingParams:
    """How a row is continued; ValueError where the flags make no sense."""
    seed = (args.seed + row) % 2**63 if temperature else None
    filters = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p")}
    return SamplingParams(
        max_tokens=args.max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True, **filters
    )


def prepare(args: argparse.Namespace) -> Job:
    """Check everything that can be checked before the work; ValueError or OSError in one sentence."""
    check_files(
        {"--json": args.json},
        {"--text": args.text, "--model": args.model, "--draft-model": args.draft_model},
    )
    if args.plots is not None:
        plots.check_drawable("--plots")
    if args.text and args.synthetic:
        raise ValueError("--text and --synthetic exclude each other: prompts are read or made up")
    if args.mode in ("budget", "lossless"):
        for name in ("batch", "gamma", "temperature", *(("budget",) if args.mode == "lossless" else ())):
            if len(getattr(args, name)) > 1:
                raise ValueError(f"{MODES[args.mode]} measures with one --{name}, got {len(getattr(args, name))}")
        if args.synthetic:
            raise ValueError(f"{MODES[args.mode]} is about texts: leave --synthetic out")
    elif not args.pairs:
        raise ValueError("--pairs 0 counts acceptance, which is for --sweep budget")
    policies = args.draft or [
        name for name in known_drafters() if name != "full" and (args.draft_model or not has_a_model(name))
    ]
    if args.mode == "lossless" and not args.draft_model and any(map(has_a_model, policies)):
        args.draft_model = str(args.model)  # no smaller one: the target drafts for itself, sparsely
    wanted = grid.settings_of(policies, args.budget)
    settings, skipped = grid.buildable(wanted, args.gamma, draft_fields(vars(args)))
    for temperature in args.temperature:
        params_of(args, temperature, 0)
    config_of(EngineConfig, args, batch_size=1, max_seq_len=1)
    folder = locate(args.model)
    config = read_config(folder)
    if args.draft_model:
        locate(args.draft_model)
    tokenizer, texts = load_tokenizer(folder, config), {}
    if not args.synthetic:
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer to read texts with: use --synthetic")
        paths = args.text or [BUNDLED / "document.txt"]
        texts = prompts.texts_of(paths, tokenizer)
    parallel = join(args)
    if parallel.dp > 1:
        raise ValueError(
            f"a benchmark measures one copy of the model, and {parallel.dp * parallel.tp} processes with --tp "
            f"{parallel.tp} make {parallel.dp}: start as many processes as --tp says"
        )
    return Job(
        args=args, parallel=parallel, config=config, tokenizer=tokenizer if texts else None, texts=texts,
        settings=settings, skipped=skipped,
    )  # fmt: skip


@dataclass
class Mode:
    """One kind of measurement: its points, its file, and what it prints."""

    job: Job
    points: list[Point]
    ledger: Ledger
    table: Table
    bar: Any = None

    def key(self, point: Point) -> Record:
        """The key under which a point's result is stored."""
        return point.key

    def known(self, point: Point) -> Record | None:
        """The result that the file holds."""
        return self.ledger.find(self.key(point))

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        """An engine for rows of up to so many tokens."""
        return self.job.build(batch, context, draft)

    def measure(self, point: Point, engine: Engine) -> Record:
        """The result of a point, without its key."""
        raise NotImplementedError

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print a result; the reason for a missing one is printed and not stored."""
        if isinstance(found, Exception):
            self.job.skipped[point.setting.label] = sentence(found)
            self.bar.write(f"skipped {point.setting.label}: {sentence(found)}")
            return
        self.ledger.put(self.key(point), self.key(point) | found)
        self.ledger.write(skipped=self.job.skipped)
        self.bar.write(self.line(self.ledger.find(self.key(point)) or {}))

    def line(self, record: Record) -> str:
        """A result as it is printed when it is there."""
        return self.table.line(record)

    def step(self, what: str) -> None:
        """Show what is being done."""
        if self.bar is not None:
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
            parallel.log(self.table.head)
        with tqdm(total=len(todo), unit="point", leave=False, disable=None if parallel.is_main else True) as self.bar:
            sweep = Sweep(
                parallel=parallel, exact=args.exact, build=self.build, draft=self.job.draft, measure=self.measure,
                done=self._taken, progress=self.step,
            )  # fmt: skip
            sweep.run(todo)
        return [record for point in self.points if (record := self.known(point))]

    def _taken(self, point: Point, found: Record | Exception) -> None:
        if self.job.parallel.is_main:
            self.done(point, found)
        self.bar.update()

    def warn_of_speeds(self) -> None:
        """A line where steps were not compiled."""
        if self.job.args.no_compile:
            print("not compiled: acceptance and tokens per round hold, the speeds mean little")

    def report(self, found: list[Record]) -> None:
        """Print what follows from the results, and draw them; SystemExit where they are not what they must be."""
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


# ---- over batch and context ------------------------------------------------------------------------------------------


class BySize(Mode):
    """A sweep over batch, context, draft, budget, gamma and temperature."""

    benchmark, rows_of = "batch", SIZES

    def __init__(self, job: Job, **settings: object) -> None:
        args = job.args
        if args.context[0] < 2:
            raise ValueError(f"a context has at least 2 tokens, got {args.context[0]}")
        if args.synthetic:
            n = min(max(args.batch) * max(args.context), MOST_RANDOM)
            self.ids = prompts.random_text(n, job.config.vocab_size, args.seed)
            text: Record = {"synthetic": args.seed}
        else:
            self.ids = [token for ids in job.texts.values() for token in ids]
            text = {"files": list(job.texts), "tokens": len(self.ids), "digest": digest(self.ids)}
        names = ("draft_model", "max_new_tokens", "pairs", "seed", "dtype")
        draft_config = read_config(locate(args.draft_model)) if args.draft_model else None
        settings = job.in_common(
            transformer=asdict(job.config), text=text, compiled=not args.no_compile,
            draft_transformer=asdict(draft_config) if draft_config else None,
            **{name: getattr(args, name) for name in names}, **job.timed, **settings,
        )  # fmt: skip
        ledger = job.ledger(self.benchmark, settings, "points")
        super().__init__(job, job.points(args.context), ledger, self.rows_of)
        self.draft_config, self.chip = draft_config, None

    chip: Chip | None  # the machine's rates, once they are measured

    def note(self, batch: int, context: int) -> str | None:
        """What is to be said of a point's prompts, which are not made before an engine has room for them."""
        return prompts.remark_on(len(self.ids), batch, context, self.job.bos)

    def known(self, point: Point) -> Record | None:
        """The figures that the file holds: what failed is tried again."""
        found = super().known(point)
        return found if found and found["status"] == "measured" else None

    def run(self) -> list[Record]:
        """As every mode, after the notes about the prompts."""
        for note in dict.fromkeys(self.note(b, c) for b in self.job.args.batch for c in self.job.args.context):
            if note:
                self.job.parallel.log(note)
        super().run()
        return [record for point in self.points if (record := self.ledger.find(point.key))]

    def system(self, engine: Engine) -> System:
        """The model on this machine, whose rates are measured once."""
        self.chip = self.chip or rates_of(engine.device, engine.dtype)
        job, args = self.job, self.job.args
        link = (chip_of(self.chip.name) or self.chip).link
        return System(
            model=job.config, chip=self.chip, device=engine.device.type, dtype=engine.dtype_name,
            kv_dtype=args.kv_dtype, quantize=args.quantize, draft_model=self.draft_config, room=args.max_new_tokens,
            ranks=Ranks(n=job.parallel.tp, link=link, per_node=job.parallel.tp) if job.parallel.tp > 1 else None,
        )  # fmt: skip

    def measure(self, point: Point, engine: Engine) -> Record:
        """One point's figures."""
        rows = prompts.round_the_text(self.ids, point.batch, point.context, self.job.bos)
        note, system = self.note(point.batch, point.context), self.system(engine)
        name = f"{point.batch} x {point.context:,}, {draft_label(point.key)}"
        machine.restart_peak(engine.device)
        turns = take_turns(
            engine, rows, self.job.params(point.batch, point.temperature), self.job.args.pairs,
            seconds=self.job.args.seconds, progress=lambda what: self.step(f"{name}: {what}"),
        )  # fmt: skip
        rates = {"bandwidth": system.chip.bandwidth, "peak": system.chip.peak}
        return summarize(point, turns, engine, system, self.job.draft(point)) | {"note": note, "machine": rates}

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print the figures, or why there are none; they replace older ones."""
        if isinstance(found, Exception):
            found = {"status": "failed", "reason": sentence(found)}
        self.ledger.put(point.key, point.key | found)
        self.ledger.write(lengths=lengths_of([r for r in self.ledger.records if r["status"] == "measured"]))
        self.bar.write(self.line(self.ledger.find(point.key) or {}))
        if found["status"] == "measured":
            self.bar.write(more(found))

    def line(self, record: Record) -> str:
        """A row of the table, or why there is none."""
        if record["status"] == "measured":
            return self.table.line(record)
        return f"{record['context']:>7,}  {record['batch']:>5}  {draft_label(record):<34}  skipped: {record['reason']}"

    def listed(self, found: list[Record]) -> list[Record]:
        """Print all points in one table -> those that were measured; SystemExit where there is none."""
        print("", self.table.head, *map(self.line, found), sep="\n")
        if measured := [r for r in found if r["status"] == "measured"]:
            return measured
        refuse(ValueError("nothing could be measured; the reasons are above"), PROGRAM)

    def report(self, found: list[Record]) -> None:
        """All points in one table, the lengths, the pictures."""
        args = self.job.args
        found.sort(key=lambda r: (draft_label(r), r["context"], r["batch"]))
        measured = self.listed(found)
        rates = measured[-1]["machine"]
        print(f"the machine reads {rates['bandwidth'] / 1e9:,.1f} GB/s and computes {rates['peak'] / 1e9:,.0f} GFLOP/s")
        capturing = sum(r.get("capture_seconds", 0.0) for r in measured)  # files of before it was told have none
        if capturing:
            print(f"capturing rounds as CUDA graphs took {capturing:.1f} s, which are in no speed above")
        lengths = lengths_of(measured)
        print(*lines_of(lengths), sep="\n")
        self.warn_of_speeds()
        if args.plots:
            for path in plots.draw_sweep(measured, lengths, describe(self.ledger.document), args.plots):
                print(f"drawn: {path}")
        compared = [r["lossless"] for r in measured if r["lossless"]["compared"]]
        rows, equal = sum(one["rows"] for one in compared), sum(one["equal"] for one in compared)
        if not compared:
            print("outputs are sampled and not compared: samples differ by design")
            return
        print(f"{equal} of {rows} rows equal plain decoding, token for token")
        must = args.exact or (measured[-1]["dtype"], measured[-1]["kv_dtype"]) == ("fp32", "fp32")
        if equal < rows and must:
            refuse(ValueError(f"{rows - equal} rows differ where they must not; please report it"), PROGRAM, code=1)


# ---- over precisions -------------------------------------------------------------------------------------------------


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
            config = one.engine(config_of(EngineConfig, args, batch_size=1, max_seq_len=1))
            check_kv_dtype(config, dtype, device)
            for setting in job.settings:
                draft = one.draft(setting.draft(args.gamma[0], draft_fields(vars(args))))
                if draft.needs_planes:
                    raise ValueError(f"--sweep precision measures caches in bytes, and {draft.policy} reads planes")
                plan_for(config, draft, job.config, None, dtype, job.parallel, device)
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
        found = precisions.take_turns(
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
            found = {"status": "failed", "reason": sentence(found)}
        self.ledger.put(point.key, point.key | found)
        self.ledger.write()
        self.bar.write(self.line(self.ledger.find(point.key) or {}))

    def line(self, record: Record) -> str:
        """The rows of the table, or why there are none."""
        if record["status"] == "measured":
            return "\n".join(self.table.line(row) for row in precisions.flat(record))
        return super().line(record)

    def report(self, found: list[Record]) -> None:
        """All points in one table, and a picture."""
        args, measured = self.job.args, self.listed(found)
        self.warn_of_speeds()
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plots.draw_precisions(measured, describe(self.ledger.document), args.plots / "precisions.png")
            print(f"drawn: {args.plots / 'precisions.png'}")


# ---- over the draft budget -------------------------------------------------------------------------------------------


class ByBudget(Mode):
    """Acceptance, tokens per round and speed over the draft budget, at one batch and context."""

    def __init__(self, job: Job) -> None:
        args = job.args
        if args.context and len(args.context) > 1:
            raise ValueError(f"--sweep budget measures with one --context, got {len(args.context)}")
        (batch,), room = args.batch, job.config.n_positions - args.max_new_tokens
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
        """Policy and budget: all else is in the settings."""
        return {"policy": point.setting.policy, "budget": point.setting.budget}

    def measure(self, point: Point, engine: Engine) -> Record:
        """One point of the frontier; where nothing is timed, ratio and milliseconds are None."""
        params, n = self.job.params(point.batch, point.temperature), self.job.args.pairs
        if n:
            turns = take_turns(engine, self.prompts, params, n, seconds=self.job.args.seconds, progress=self.step)
        else:  # how they are decoded plainly is the same for all points
            self.plain = self.plain or run(engine, self.prompts, params, speculate=False)
            turns = Turns([self.plain], [run(engine, self.prompts, params)])
        counts = turns.counts
        return {
            "acceptance_rate": counts.acceptance_rate,
            "acceptance_by_position": counts.acceptance_by_position,
            "tokens_per_round": counts.tokens_per_round,
            "distinct_4grams": turns.distinct_4grams,
            "ratio": spread(turns.ratios()) if n else None,
            "plain_ms": round_ms(turns.plain) if n else None,
            "speculative_ms": round_ms(turns.speculative) if n else None,
            "kv_bytes_per_token": {
                "plain": totals(turns.plain).kv_bytes_per_token, "speculative": counts.kv_bytes_per_token,
            },
        }  # fmt: skip

    def report(self, found: list[Record]) -> None:
        """What was not timed, and the picture."""
        args = self.job.args
        if not found:
            refuse(ValueError("no policy could be measured; the reasons are above"), PROGRAM)
        if not args.pairs:
            print("no pairs: each point was decoded once to count acceptance, and nothing was timed")
        else:
            self.warn_of_speeds()
        self.ledger.write(transformer=asdict(self.job.config), skipped=self.job.skipped)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plots.draw_budgets(found, describe(self.ledger.document), args.plots / "budgets.png")
            print(f"drawn: {args.plots / 'budgets.png'}")


# ---- lossless --------------------------------------------------------------------------------------------------------


class Lossless(Mode):
    """Every policy compared with plain decoding, token for token, on prompts of ragged length."""

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
        """Policy and budget, and the draft model where there is one."""
        key: Record = {"policy": point.setting.policy, "budget": point.setting.budget}
        if point.needs_model:
            key |= {"draft_model": self.job.args.draft_model, "draft_weights": self.theirs}
        return key

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        """An engine; the first one that asks for no draft model has the one that is there."""
        engine, self.engine = (self.engine, None) if draft is None else (None, self.engine)
        return engine or super().build(batch, context, draft)

    def decode(self, engine: Engine, what: str, *, speculate: bool) -> Run:
        """All prompts, with a progress bar."""
        params = self.job.params(len(self.prompts), 0.0)
        with tqdm(total=len(params), desc=what, unit="prompt", leave=False) as bar:
            return run(engine, self.prompts, params, speculate=speculate, finished=lambda _: bar.update())

    def measure(self, point: Point, engine: Engine) -> Record:
        """Where a policy's outputs leave the plain ones, and how close a call it was."""
        plain = self.ledger.find({"policy": "off"})
        if plain is None:
            plain = {"policy": "off", "outputs": self.decode(engine, "plain", speculate=False).outputs}
            self.ledger.put({"policy": "off"}, plain)
        one = self.decode(engine, point.setting.label, speculate=True)
        found = lossless.differences(
            zip(range(len(self.prompts)), self.prompts, plain["outputs"], one.outputs, strict=True),
            lambda ids: lossless.logits_after(engine.model, ids), LOOKING,
        )  # fmt: skip
        return {
            "prompts": len(self.prompts),
            "equal": len(self.prompts) - len(found),
            "differences": [
                {"row": d.index, "position": d.position, "plain": d.plain, "speculative": d.speculative, "gap": d.gap,
                 "best": d.best}
                for d in found
            ],
            "acceptance_rate": one.stats.acceptance_rate,
            "acceptance_by_position": one.stats.acceptance_by_position,
            "tokens_per_round": one.stats.tokens_per_round,
            "recompiles": one.stats.recompiles,
        }  # fmt: skip

    def line(self, record: Record) -> str:
        """A row of the table, and a line for each difference."""
        return "\n".join([self.table.line(record), *map(difference_text, record["differences"])])

    def report(self, found: list[Record]) -> None:
        """Which policies are not lossless."""
        if not found:
            refuse(ValueError("no policy could be built; the reasons are above"), PROGRAM)
        print("", self.table.head, *map(self.line, found), sep="\n")
        engine = self.ledger.document["settings"]
        dtypes = engine["dtype"], engine["kv_dtype"] or engine["dtype"]
        must = engine["exact"] or dtypes == ("fp32", "fp32")

        def is_wrong(one: Record) -> bool:
            if must or one["gap"] is None:
                return must
            return not lossless.is_near_tie(one["gap"], *dtypes, best=one.get("best", 0.0))

        if wrong := [r["policy"] for r in found if any(map(is_wrong, r["differences"]))]:
            refuse(ValueError(f"not token-identical to plain decoding: {', '.join(wrong)}"), PROGRAM, code=1)


# ---- pictures of files that are there --------------------------------------------------------------------------------


def draw_files(args: argparse.Namespace) -> None:
    """Draw the files of --draw into --plots: a sweep, acceptance over the budget (a panel a file), or ratios."""
    if not args.plots:
        raise ValueError("--draw needs --plots DIR to draw into")
    plots.check_drawable("--draw")
    names = ("batch", "frontier", "speculation speed", "speculation auto")
    documents = [read_document(path, *names) for path in args.draw]
    if len({document["benchmark"] for document in documents}) > 1:
        raise ValueError("--draw draws files of one kind of measurement at a time")
    args.plots.mkdir(parents=True, exist_ok=True)
    first, title = documents[0], describe(documents[0])
    drawn = [args.plots / "ratios.png"]
    if first["benchmark"] == "batch":
        if len(documents) > 1:
            raise ValueError("--draw draws one sweep at a time")
        grid.up_to_date(first)
        points = [r for r in first["points"] if r["status"] == "measured"]
        drawn = plots.draw_sweep(points, lengths_of(points), title, args.plots)
    elif first["benchmark"] == "frontier":
        s, drawn = first["settings"], [args.plots / "acceptance.png"]
        title = f"{s['model']}, {s['dtype']}: acceptance of each policy, gamma {s['gamma']}"
        plots.draw_acceptance(documents, f"{title}\n{s['batch_size']} rows of {s['text']}", drawn[0])
    else:
        cells: dict[str, dict[str, tuple[float, str]]] = {}
        for r in (r for document in documents for r in document["results"]):
            bars = cells.setdefault(f"context {r['context']:,}, batch {r['batch']}", {})
            bars[draft_label(r)] = r["ratio"]["median"], f" {ratio_text(r['ratio'])}"
        panels = [[(name, bars, 1.0) for name, bars in cells.items()]]
        plots.draw_bars(panels, drawn[0], title=title, xlabel=plots.SPEED, first="")
    for path in drawn:
        print(f"drawn: {path}")


# ---- command line ----------------------------------------------------------------------------------------------------


def temperatures(text: str) -> list[float]:
    """Numbers: "0,0.8"."""
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, as in 0,0.8; got {text!r}") from None


def seconds(text: str) -> float:
    """A time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return found


def defaults(name: str) -> str:
    """What stands in for a flag that is not given: in the first mode that reads it, then in those that differ."""

    def text(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    (_, first), *others = [(mode, text(values[name])) for mode, values in DEFAULTS.items() if name in values]
    return "; ".join([first, *(f"{value} with {MODES[mode]}" for mode, value in others if value != first)])


def settle(args: argparse.Namespace) -> None:
    """Fill in what was not given; ValueError for a flag that this measurement would not read."""
    for name in dict.fromkeys(name for values in DEFAULTS.values() for name in values):
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS[args.mode].get(name))
        elif name not in DEFAULTS[args.mode]:
            raise ValueError(f"--{name.replace('_', '-')} does nothing with {MODES[args.mode]}: leave it out")
    if args.seconds and not args.pairs:
        raise ValueError("--seconds goes on with pairs, and --pairs 0 times none")
    if args.fresh and not args.json:
        raise ValueError("--fresh forgets what --json holds, and there is no --json")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags, ValueError those that would do nothing."""
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sweep", choices=("size", "budget", "precision"), default="size",
        help="over batch, context and drafts; over the draft budget at one batch and context; or the first, each point "
        "at several precisions (default: size)",
    )  # fmt: skip
    what.add_argument("--lossless", action="store_true", help="compare every policy with plain decoding, in fp32")
    what.add_argument("--draw", metavar="FILE.json", type=Path, nargs="+", help="measure nothing: draw what is there")
    add("--context", metavar="S,S", type=sizes, help="tokens of a prompt (default: 1k,4k; what the text holds for "
        "every row, at most 4,096, with --sweep budget)")  # fmt: skip
    add("--pairs", metavar="N", type=count, help=f"pairs of timed runs for each point (default: {defaults('pairs')})")
    add("--seconds", metavar="S", type=seconds, help="go on with pairs until they took so long: short runs need many "
        "(default: as many as --pairs says)")  # fmt: skip
    add("--precisions", metavar="P,P", type=lambda text: text.split(","), help="what is quantized, each CACHE, "
        f"CACHE/DRAFTS or CACHE/DRAFTS/WEIGHTS (default: {defaults('precisions')})")  # fmt: skip
    add("--prompts", metavar="N", type=positive, help="with --lossless (default: 200)")
    add("--shortest", metavar="N", type=positive, help="tokens of its shortest prompt (default: 20)")
    add("--longest", metavar="N", type=positive, help="tokens of its longest prompt (default: 1500)")
    add("--text", metavar="FILE", type=Path, nargs="+", help="UTF-8 texts to continue (default: the bundled document)")
    add("--synthetic", action="store_true", help="prompts of random tokens: real work, acceptance without meaning")
    add("--json", metavar="FILE", type=Path, help="keep every point here; go on from what it holds")
    add("--fresh", action="store_true", help="forget what --json holds")
    add("--plots", metavar="DIR", type=Path, help="draw pictures into this folder")

    def several(name: str, kind: Callable[[str], Any], metavar: str) -> Record:
        return {"metavar": metavar, "type": kind, "default": None, "unset": defaults(name)}

    add_flags(
        parser.add_argument_group("who drafts"), DraftConfig,
        policy={
            "flag": "--draft", "metavar": "P,P", "type": drafters, "default": None, "allowed": known_drafters(),
            "unset": "streaming; all but full with --sweep budget, all with --lossless",
        },
        budget=several("budget", sizes, "K,K"), gamma=several("gamma", gammas, "N,N"), cheap=None,
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("how rows are continued"), SamplingParams,
        max_tokens={"type": positive, "default": None, "unset": defaults("max_new_tokens")},
        temperature={"metavar": "T,T", "type": temperatures, "default": [0.0]},
        seed={"unset": defaults("seed"), "help": "of sampling (row i: S + i), of --synthetic and of --lossless"},
        stop=None, ignore_eos=None,
    )  # fmt: skip
    add_engine_flags(
        parser, batch_size=several("batch", sizes, "B,B") | {"flag": "--batch", "help": "rows decoded together"},
        max_seq_len=None, dtype={"default": None, "unset": defaults("dtype")},
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.mode = "draw" if args.draw else "lossless" if args.lossless else args.sweep
    settle(args)
    if args.draw and (idle := given_beside(parser, args, "draw", "plots", "mode")):
        raise ValueError(f"{idle[0]} does nothing with --draw: leave it out")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, measure, write."""
    with refusing(PROGRAM):
        args = parse(argv)
        if args.draw:
            with complete(args.draw[0]):
                draw_files(args)
            return
        if args.plots is not None and args.plots.exists() and not args.plots.is_dir():
            raise ValueError(f"--plots needs a folder, and {args.plots} is a file")
        job = prepare(args)
        mode: Mode = {"size": BySize, "budget": ByBudget, "precision": ByPrecision, "lossless": Lossless}[args.mode](
            job
        )
    with job.parallel.guard():
        found = mode.run()
    job.parallel.close()
    if job.parallel.is_main:
        mode.report(found)


if __name__ == "__main__":
    started(main)
