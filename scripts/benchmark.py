"""Measure speculation over batch and context, beside plain decoding and the roofline: what it gains, and from where on.

    python scripts/benchmark.py                                  the bundled model on the bundled document, small
    python scripts/benchmark.py --batch 1,4,8,16 --context 1k,4k,8k,16k --draft streaming,guided --budget 256
        --gamma 6,auto --text books/*.txt --json sweep.json --plots sweep/
    torchrun --nproc_per_node=8 scripts/benchmark.py --model meta-llama/Llama-3.1-8B --tp 8 --batch 32,64,128 ...

A point is one batch, context, draft policy, budget, gamma and temperature. Its rows are prompts of `context` tokens (k
is 1,000, as in MagicDec's tables), each from another place of the texts, and every run adds --max-new-tokens to each of
them. Plain and speculative runs take turns on one engine (A B, B A, A B, ...), whose slots keep their prompts, so that
only the first run prefills, for all temperatures. What counts is the ratio of a pair: the median over the pairs, with
the least and the greatest. All points of a batch share an engine, whose cache is as long as the longest context needs.

steady        tokens a second while all rows are live: from the end of the first round to the last one that ended no row
completion    tokens a second from the first round to the end of the slowest row
predicted     the same by bytes and operations alone, at the measured tokens a round and the machine's rates, which are
              measured before the first point (gpt_fast_sd/roofline.py)

break-even       of a batch: the context from which on the steady speed-up is above 1
critical length  of a draft: the context from which on the steady speed-up grows with the batch, that is, from which on
                 its least-squares slope over log2 of the batch is above 0
Both are where the line between two measured contexts crosses, over log2 of the context, after the last one that is not
above; none if that is the longest one, and below the shortest if there is no such context.

In fp32, and with --exact, greedy output must be that of plain decoding, token for token: a row that differs makes the
exit code 1. In 16 bits rows that part by rounding are counted.

--json FILE is whole after every point. Started again with the same settings it goes on where it ended, and what failed
is tried again; batches, contexts and drafts may be added. Other settings are refused; --fresh begins anew.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from tqdm import tqdm

from common import (
    Ledger,
    Record,
    digest,
    distinct_4grams,
    environment,
    kv_bytes,
    peak_bytes,
    refuse,
    restart_peak,
    sentence,
)
from flags import add_engine_flags, add_flags, config_of, gammas, join, positive, sizes
from frontier import (
    Setting,
    buildable,
    by_position,
    drafters,
    has_a_model,
    round_ms,
    settings_of,
    shares,
    spread,
    tokens_of,
)
from generate import check_writable
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams, TokenEvent
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.model import ModelConfig, load_tokenizer, read_config
from gpt_fast_sd.registry import VIEWS
from gpt_fast_sd.roofline import Chip, measure, step_seconds
from gpt_fast_sd.stats import EngineStats
from gpt_fast_sd.tp import Parallel, collectives_per_step

PROGRAM = "benchmark.py"
SPEED = "speed, times plain decoding"
SHORT = 16  # new tokens of the untimed runs: every step has run once, and all slots are prefilled


# ---- the prompts -----------------------------------------------------------------------------------------------------


def pack(ids: Sequence[int], n: int, length: int, bos: int | None) -> tuple[list[list[int]], str | None]:
    """n prompts of length tokens, BOS first, and what is to be said about them.

    Row i begins i / n through the ids and goes on at their beginning where they end. A row's shorter prompts are the
    beginnings of its longer ones, so that a slot that holds one need not compute it again.
    """
    first = [] if bos is None else [bos]
    body = length - len(first)
    starts = [i * len(ids) // n for i in range(n)]
    prompts = [first + [ids[(start + i) % len(ids)] for i in range(body)] for start in starts]
    if body > len(ids):
        return prompts, f"the text has {len(ids):,} tokens: rows of {length:,} repeat it, which makes drafting easier"
    if n * body > len(ids):
        return prompts, f"the text has {len(ids):,} tokens: {n} rows of {length:,} overlap"
    return prompts, None


def random_text(n: int, vocab_size: int, seed: int) -> list[int]:
    """n token ids without meaning, the same for the same seed."""
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- a point ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement."""

    batch: int
    context: int
    setting: Setting
    gamma: int | str
    temperature: float = 0.0

    @property
    def key(self) -> Record:
        """How its result is found again."""
        return {
            "batch": self.batch, "context": self.context, "policy": self.setting.policy,
            "budget": self.setting.budget, "gamma": self.gamma, "temperature": self.temperature,
        }  # fmt: skip


def draft_label(record: Record) -> str:
    """Who drafted, with which budget and gamma, and the temperature where it is not greedy."""
    who = f"{Setting(policy=record['policy'], budget=record['budget']).label}, gamma {record['gamma']}"
    return f"{who}, T {record['temperature']:g}" if record.get("temperature") else who


def same_key(record: Record, point: Point) -> bool:
    """Whether the record is this point's."""
    return all(record[name] == value for name, value in point.key.items())


@dataclass(frozen=True)
class Mark:
    """When an event of a stream came, whose it was, how many tokens it brought, and whether they were its last."""

    seconds: float
    row: int
    tokens: int
    is_last: bool


def steady_speed(marks: Sequence[Mark]) -> float | None:
    """Tokens a second from the end of the first round to that of the last one that ended no row; None if they are one.

    Of a round every live row has one event, and they come together: a row that comes again begins another round.
    """
    rounds: list[list[Mark]] = []
    for mark in marks:
        if not rounds or any(mark.row == other.row for other in rounds[-1]):
            rounds.append([])
        rounds[-1].append(mark)
    ended = next((i for i, one in enumerate(rounds) if any(mark.is_last for mark in one)), len(rounds))
    live = rounds[:ended]
    if len(live) < 2:
        return None
    seconds = live[-1][0].seconds - live[0][0].seconds
    return sum(mark.tokens for one in live[1:] for mark in one) / seconds


@dataclass(frozen=True)
class Run:
    """All rows to their ends, once."""

    stats: EngineStats
    steady: float | None  # tokens a second
    outputs: list[list[int]]

    @property
    def completion(self) -> float:
        """Tokens a second to the end of the slowest row."""
        return self.stats.decode_tokens_per_second


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], *, speculate: bool) -> Run:
    """Decode all prompts, one a slot."""
    marks, outputs = [], [[0]] * len(prompts)

    def mark(event: TokenEvent) -> Mark:
        return Mark(time.perf_counter(), event.index, len(event.tokens), event.completion is not None)

    for event in engine.stream(prompts, params, speculate=speculate):
        marks.append(mark(event))
        if event.completion:
            outputs[event.index] = event.completion.tokens
    return Run(engine.stats, steady_speed(marks), outputs)


@dataclass(frozen=True)
class Turns:
    """Plain and speculative runs of the same prompts, pair by pair, and the untimed run that prefilled them."""

    prefill: EngineStats
    plain: list[Run]
    speculative: list[Run]
    capture_seconds: float = 0.0  # of the untimed runs

    def ratios(self, speed: str) -> list[float]:
        """Speculative over plain speed of each pair, "steady" or "completion"; empty where a run was too short."""
        pairs = [(getattr(s, speed), getattr(p, speed)) for p, s in zip(self.plain, self.speculative, strict=True)]
        return [s / p for s, p in pairs] if all(s and p for s, p in pairs) else []

    @property
    def first_differences(self) -> list[Record]:
        """Where a speculative output first leaves the plain one of its pair: row and position."""
        found: dict[int, int] = {}
        for plain, speculative in zip(self.plain, self.speculative, strict=True):
            for row, (ours, theirs) in enumerate(zip(plain.outputs, speculative.outputs, strict=True)):
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
                if at is not None:
                    found[row] = min(at, found.get(row, at))
        return [{"row": row, "position": found[row]} for row in sorted(found)]


def take_turns(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], n: int, progress: Callable[[str], None]
) -> Turns:
    """n pairs of runs after an untimed short one of each kind; who goes first alternates."""
    short = [replace(p, max_tokens=min(SHORT, p.max_tokens)) for p in params]
    progress("prefill")
    prefill = run(engine, prompts, short, speculate=True).stats
    plain = run(engine, prompts, short, speculate=False).stats
    turns = Turns(prefill, [], [], prefill.capture_seconds + plain.capture_seconds)
    for pair in range(n):
        progress(f"pair {pair + 1} of {n}")
        for speculate in (False, True) if pair % 2 == 0 else (True, False):
            done = run(engine, prompts, params, speculate=speculate)
            (turns.speculative if speculate else turns.plain).append(done)
    return turns


def totals(runs: Sequence[Run]) -> EngineStats:
    """What all runs counted together."""
    total = EngineStats()
    for one in runs:
        for name in ("decode_tokens", "rounds", "row_rounds", "kv_bytes", "recompiles", "capture_seconds"):
            setattr(total, name, getattr(total, name) + getattr(one.stats, name))
        for counts, more in (
            (total.drafted_by_position, one.stats.drafted_by_position),
            (total.accepted_by_position, one.stats.accepted_by_position),
        ):
            counts.extend([0] * (len(more) - len(counts)))
            for i, number in enumerate(more):
                counts[i] += number
        for gamma, number in one.stats.rounds_by_gamma.items():
            total.rounds_by_gamma[gamma] = total.rounds_by_gamma.get(gamma, 0) + number
    return total


def way(runs: Sequence[Run], batch: int) -> Record:
    """One way of decoding, JSON-ready: medians over its runs.

    ms_per_token is what one row waits for a token on average. The parts of a round are None where it is one graph.
    """
    speeds = {name: [getattr(one, name) for one in runs] for name in ("steady", "completion")}
    middle = {name: statistics.median(found) if None not in found else None for name, found in speeds.items()}
    parts: Record = dict(round_ms([one.stats for one in runs]))
    if not parts["verify"]:
        parts |= {"draft": None, "verify": None, "host": None}
    total = totals(runs)
    return {
        "tokens_per_second": middle,
        "ms_per_token": {name: 1e3 * batch / speed if speed else None for name, speed in middle.items()},
        "round_ms": parts,
        "tokens_per_round": total.tokens_per_round,
        "kv_bytes_per_token": total.kv_bytes_per_token,
        "runs": speeds,
    }


# ---- what it had to cost ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What the steps of a model cost at least on this machine."""

    config: ModelConfig
    draft_config: ModelConfig | None  # of a standalone draft
    chip: Chip
    weight_bytes: float  # of one weight
    kv_bytes: float  # of one number of a key or value
    tp: int

    def step_ms(self, batch: int, n_tokens: int, context: float, config: ModelConfig | None = None) -> float:
        """Milliseconds of feeding n_tokens to each of batch rows that attend to so many entries."""
        return 1e3 * step_seconds(
            config or self.config, self.chip, batch, n_tokens, context,
            weight_bytes=self.weight_bytes, kv_bytes=self.kv_bytes, tp=self.tp,
        )  # fmt: skip

    def draft_ms(self, point: Point, context: float) -> float | None:
        """Milliseconds of one draft step; None for a hierarchy, whose steps hang on its text."""
        policy, entries = point.setting.policy, min(point.setting.budget or context, context)
        if policy == "lookup":
            return 0.0
        if policy == "early_exit":
            layers = point.setting.draft(point.gamma, None).exit_layers or max(1, self.config.n_layers // 2)
            return self.step_ms(point.batch, 1, entries, replace(self.config, n_layers=layers))
        if policy == "standalone":
            return self.step_ms(point.batch, 1, entries, self.draft_config)
        return self.step_ms(point.batch, 1, entries) if policy in VIEWS else None

    def predict(self, point: Point, new_tokens: int, stats: EngineStats) -> Record:
        """A plain step, a round of the gammas that were run, and the speed-up at the tokens a round that were seen."""
        context = point.context + new_tokens / 2
        plain, drafting = self.step_ms(point.batch, 1, context), self.draft_ms(point, context)
        if drafting is None:
            return {"plain_ms": plain, "round_ms": None, "speedup": None}
        rounds = sum(stats.rounds_by_gamma.values())
        spent = sum(
            n * (gamma * drafting + self.step_ms(point.batch, gamma + 1, context))
            for gamma, n in stats.rounds_by_gamma.items()
        )
        return {
            "plain_ms": plain, "round_ms": spent / rounds, "speedup": stats.tokens_per_round * plain * rounds / spent,
        }  # fmt: skip


def rates_of(device: torch.device, dtype: torch.dtype) -> Chip:
    """The machine's rates, measured: reading half a GiB (of a GPU four), and products of matrices."""
    on_cuda = device.type == "cuda"
    found = measure(device, n_bytes=2**32 if on_cuda else 2**29, size=8192 if on_cuda else 1024, dtype=dtype)
    return found.chip(environment(device)["device"], memory=math.inf)


def account(point: Point, turns: Turns, engine: Engine, args: argparse.Namespace, ceiling: Ceiling) -> Record:
    """Everything that a point says, JSON-ready."""
    counts = totals(turns.speculative)
    is_comparable = point.temperature == 0
    differences = turns.first_differences if is_comparable else []
    speedup = {name: spread(turns.ratios(name)) if turns.ratios(name) else None for name in ("steady", "completion")}
    predicted = ceiling.predict(point, args.max_new_tokens, counts)
    plain, speculative = way(turns.plain, point.batch), way(turns.speculative, point.batch)
    return point.key | {
        "status": "measured",
        "dtype": engine.dtype_name,
        "kv_dtype": engine.config.kv_dtype or engine.dtype_name,
        "speedup": speedup,
        "ratios": {name: turns.ratios(name) for name in speedup},
        "plain": plain,
        "speculative": speculative,
        "predicted": predicted,
        "percent_of_roofline": {
            "plain": 100 * predicted["plain_ms"] / plain["round_ms"]["round"],
            "round": 100 * predicted["round_ms"] / speculative["round_ms"]["round"] if predicted["round_ms"] else None,
        },
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_by_position": by_position(counts),
        "distinct_4grams": {
            "plain": distinct_4grams([row for one in turns.plain for row in one.outputs]),
            "speculative": distinct_4grams([row for one in turns.speculative for row in one.outputs]),
        },
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
            "kv_cache_bytes": kv_bytes(engine),
            "kv_in_use_bytes": point.batch * (point.context + args.max_new_tokens) * engine.cache.bytes_per_token,
            "peak_bytes": peak_bytes(engine.device),
        },
        "collectives_per_step": collectives_per_step(ceiling.config, ceiling.tp, exact=engine.config.exact),
        "recompiles_while_timed": counts.recompiles + totals(turns.plain).recompiles,
        "compile_seconds": turns.prefill.compile_seconds,
        "capture_seconds": turns.capture_seconds + counts.capture_seconds + totals(turns.plain).capture_seconds,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }  # fmt: skip


# ---- where it begins to pay ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossing:
    """From which context on something is above a level; of_measured says which of the three cases it is."""

    context: float | None
    of_measured: str  # "below": above at all of them; "between"; "none": not above at the longest

    def phrase(self, contexts: Sequence[int]) -> str:
        """The crossing in words."""
        if self.of_measured == "below":
            return f"below {min(contexts):,}"
        return f"{self.context:,.0f}" if self.context is not None else f"none up to {max(contexts):,}"


def crossing(contexts: Sequence[int], values: Sequence[float], level: float) -> Crossing:
    """The context from which on values stay above the level, on lines over log2 of the context; contexts rise."""
    under = [i for i, value in enumerate(values) if value <= level]
    if not under:
        return Crossing(None, "below")
    last = under[-1]
    if last == len(values) - 1:
        return Crossing(None, "none")
    share = (level - values[last]) / (values[last + 1] - values[last])
    low, high = math.log2(contexts[last]), math.log2(contexts[last + 1])
    return Crossing(2 ** (low + share * (high - low)), "between")


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line."""
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    spread_of_x = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread_of_x


def shown_speedup(record: Record) -> Record:
    """The steady speed-up, or where runs were too short for one, that to completion."""
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
            found.append(length_record("break-even", draft, batch, at, there))
        by_context = {c: [b for b in batches if (b, c) in table] for c in contexts}
        there = [c for c in contexts if len(by_context[c]) > 1]
        if there:
            slopes = [slope([math.log2(b) for b in by_context[c]], [table[b, c] for b in by_context[c]]) for c in there]
            at = crossing(there, slopes, 0.0)
            found.append(length_record("critical length", draft, None, at, there) | {"slopes": slopes})
    return found


def length_record(kind: str, draft: str, batch: int | None, at: Crossing, contexts: Sequence[int]) -> Record:
    """A crossing with what it is of."""
    return {
        "kind": kind, "draft": draft, "batch": batch, "context": at.context, "of_measured": at.of_measured,
        "phrase": at.phrase(contexts), "contexts": list(contexts),
    }  # fmt: skip


# ---- the file --------------------------------------------------------------------------------------------------------


class Points(Ledger):
    """The JSON document: points, and what follows from them."""

    def __init__(self, path: Path | None, settings: Record, machine: Record, *, fresh: bool) -> None:
        """ValueError where the file holds something else, or was measured with other settings."""
        super().__init__(path, "batch", settings, machine, fresh=fresh, results="points")
        for record in self.records:  # files of before several temperatures could be asked for
            record.setdefault("temperature", self.document["settings"].get("temperature", 0.0))

    @property
    def measured(self) -> list[Record]:
        """Points that have figures."""
        return [record for record in self.records if record["status"] == "measured"]

    def holds(self, point: Point) -> bool:
        """Whether the point has its figures."""
        return any(same_key(record, point) for record in self.measured)

    def add(self, point: Point, record: Record) -> None:
        """Put the point's result, or why there is none, in the place of an older one."""
        self.put(point.key, record)
        self.write(lengths=lengths_of(self.measured))


# ---- the sweep -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run needs, checked."""

    args: argparse.Namespace
    parallel: Parallel
    config: ModelConfig
    ids: list[int]
    bos: int | None
    points: list[Point]
    skipped: dict[str, str]
    settings: Record

    def prompts(self, batch: int, context: int) -> tuple[list[list[int]], str | None]:
        """The rows of a point."""
        return pack(self.ids, batch, context, self.bos)

    def params(self, batch: int, temperature: float) -> list[SamplingParams]:
        """Of the rows; sampled ones draw with a seed of their own, so that every run is the same."""
        args = self.args
        return [
            SamplingParams(
                max_tokens=args.max_new_tokens, temperature=temperature,
                seed=args.seed + row if temperature else None, ignore_eos=True,
            )
            for row in range(batch)
        ]  # fmt: skip

    def draft(self, point: Point) -> DraftConfig:
        """Who drafts for a point."""
        draft = point.setting.draft(point.gamma, self.args.draft_model)
        return replace(draft, draft_tp=self.args.draft_tp) if needs_model(point) else draft

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        """An engine for rows of up to so many tokens."""
        args = self.args
        room = context + args.max_new_tokens
        limit = self.config.n_positions
        if room > limit:
            raise ValueError(f"{context:,} tokens and {args.max_new_tokens:,} new ones are over {limit:,} positions")
        config = config_of(EngineConfig, args, batch_size=batch, max_seq_len=room)
        return Engine.from_pretrained(args.model, config, draft, parallel=self.parallel)


def needs_model(point: Point) -> bool:
    """Whether another model drafts, which an engine is built with."""
    return has_a_model(point.setting.policy)


def prepare(args: argparse.Namespace) -> Job:
    """Check everything that can be checked before the work; ValueError or OSError in one sentence."""
    check_writable(args.json)
    if args.plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plots needs matplotlib: pip install "gpt_fast_sd[plot]"')
    if args.plots is not None and args.plots.exists() and not args.plots.is_dir():
        raise ValueError(f"--plots needs a folder, and {args.plots} is a file")
    if args.text and args.synthetic:
        raise ValueError("--text and --synthetic exclude each other: prompts are read or made up")
    settings, skipped = buildable(settings_of(args.draft, args.budget), args.gamma, args.draft_model)
    for temperature in args.temperature:
        SamplingParams(max_tokens=args.max_new_tokens, temperature=temperature, seed=args.seed)
    config_of(EngineConfig, args, batch_size=1, max_seq_len=1)
    folder = locate(args.model)
    config = read_config(folder)
    draft_config = read_config(locate(args.draft_model)) if args.draft_model else None
    if args.context[0] < 2:
        raise ValueError(f"a context has at least 2 tokens, got {args.context[0]}")
    parallel = join(args)
    if parallel.dp > 1:
        raise ValueError(
            f"a benchmark measures one copy of the model, and {parallel.dp * parallel.tp} processes with --tp "
            f"{parallel.tp} make {parallel.dp}: start as many processes as --tp says"
        )
    bos, machine = config.bos_id, environment(parallel.device)
    if args.synthetic:
        ids = random_text(max(args.batch) * max(args.context), config.vocab_size, args.seed)
        text: Record = {"synthetic": args.seed}
    else:
        tokenizer = load_tokenizer(folder, config)
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer to read texts with: use --synthetic")
        paths = args.text or [BUNDLED / "document.txt"]
        ids, bos = [token for path in paths for token in tokens_of(path, tokenizer)], tokenizer.bos_id
        text = {"files": [path.name for path in paths], "tokens": len(ids), "digest": digest(ids)}
    names = (
        "draft_model",
        "draft_tp",
        "max_new_tokens",
        "pairs",
        "seed",
        "exact",
        "dtype",
        "kv_dtype",
        "quantize",
    )
    points = [
        Point(batch=batch, context=context, setting=setting, gamma=gamma, temperature=temperature)
        for batch in args.batch
        for setting in settings
        for gamma in args.gamma
        for context in args.context  # rising: a longer prompt begins as the shorter one that a slot holds
        for temperature in args.temperature
    ]
    return Job(
        args=args, parallel=parallel, config=config, ids=ids, bos=bos, points=points, skipped=skipped,
        settings={
            "model": str(args.model), "transformer": asdict(config), "text": text, "compiled": not args.no_compile,
            "machine": {name: machine[name] for name in ("cpu", "device", "torch")},
            "device": parallel.device.type, "threads": args.threads, "tp": parallel.tp,
            "draft_transformer": asdict(draft_config) if draft_config else None,
            **({"cuda_graphs": args.cuda_graphs} if parallel.device.type == "cuda" else {}),
            **{name: getattr(args, name) for name in names},
        },
    )  # fmt: skip


def groups(points: Sequence[Point], *, exact: bool) -> Iterator[list[Point]]:
    """Points that one engine measures, of the size of their longest context: those of a batch.

    A draft model needs an engine of its own, and so does every context in exact mode, which always reads all of a slot.
    """

    def key(point: Point) -> tuple[object, ...]:
        whose = (point.setting, point.gamma) if needs_model(point) else None
        return point.batch, whose, point.context if exact else None

    for one in dict.fromkeys(map(key, points)):
        yield [point for point in points if key(point) == one]


def bearable(parallel: Parallel) -> tuple[type[Exception], ...]:
    """Errors that cost a point; any other one ends the run.

    With several processes memory may end on one alone, and the others would wait for it.
    """
    return (ValueError,) if parallel.dp * parallel.tp > 1 else (ValueError, RuntimeError, MemoryError)


def sweep(job: Job, todo: Sequence[Point], done: Callable[[Point, Record], None], bar: Any) -> None:
    """Measure every point, or say why not: done is called with each result as soon as it is there."""
    kinds = bearable(job.parallel)
    ceiling: Ceiling | None = None

    def failed(points: Sequence[Point], error: Exception) -> None:
        for point in points:
            done(point, point.key | {"status": "failed", "reason": sentence(error)})

    for group in groups(todo, exact=job.args.exact):
        left, engine, drafting = list(group), None, None
        while left:
            point = left[0]
            draft = job.draft(point)
            bar.set_description(f"batch {point.batch}, {draft_label(point.key)}: loading and compiling")
            if engine is None:
                let_go(job.parallel.device)
                longest = max(p.context for p in left)
                drafting = draft if needs_model(point) else None
                try:
                    engine = job.build(point.batch, longest, drafting)
                except kinds as error:
                    failed([p for p in left if p.context == longest], error)
                    left = [p for p in left if p.context < longest]
                    continue
                ceiling = ceiling or ceiling_of(job, engine)
            try:
                if drafting != draft:
                    engine.redraft(draft)
                    drafting = draft
                engine.warm_up()
            except kinds as error:
                failed([p for p in left if job.draft(p) == draft], error)
                left = [p for p in left if job.draft(p) != draft]
                engine = None
                continue
            left.pop(0)
            try:
                assert ceiling
                done(point, measure_point(job, point, engine, ceiling, bar))
            except kinds as error:
                failed([point], error)
                engine = None  # who knows what state it is in: the others get a new one


def let_go(device: torch.device) -> None:
    """Give the memory of engines that are gone back before the next one's is taken."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ceiling_of(job: Job, engine: Engine) -> Ceiling:
    """The roofline of this model on this machine, whose rates are measured here."""
    draft_model = job.args.draft_model
    weights = [parameter for parameter in engine.model.parameters()]
    return Ceiling(
        config=job.config, draft_config=read_config(locate(draft_model)) if draft_model else None,
        chip=rates_of(engine.device, engine.dtype),
        weight_bytes=sum(w.numel() * w.element_size() for w in weights) / sum(w.numel() for w in weights),
        kv_bytes=engine.cache.k[0].element_size(), tp=job.parallel.tp,
    )  # fmt: skip


def measure_point(job: Job, point: Point, engine: Engine, ceiling: Ceiling, bar: Any) -> Record:
    """One point's figures."""
    prompts, note = job.prompts(point.batch, point.context)
    name = f"{point.batch} x {point.context:,}, {draft_label(point.key)}"
    restart_peak(engine.device)
    turns = take_turns(
        engine,
        prompts,
        job.params(point.batch, point.temperature),
        job.args.pairs,
        lambda what: bar.set_description(f"{name}: {what}"),
    )
    rates = {"bandwidth": ceiling.chip.bandwidth, "peak": ceiling.chip.peak}
    return account(point, turns, engine, job.args, ceiling) | {"note": note, "machine": rates}


# ---- the report ------------------------------------------------------------------------------------------------------

HEAD = (
    f"{'context':>8}{'batch':>6}  {'draft':<34}{'plain':>8}{'spec.':>8} tok/s{'steady':>8} {'(min to max)':<14}"
    f"{'to end':>7}{'pred.':>6}{'accept':>8}{'4-grams':>11}{'tok/round':>10}  {'round ms = draft + verify + host':<34}"
    f"{'equal':>6}"
)


def cell(value: float | None, width: int, digits: int) -> str:
    """A number, or a dash where there is none."""
    return f"{'-' if value is None else f'{value:,.{digits}f}':>{width}}"


def line(r: Record) -> str:
    """A point as a row under HEAD."""
    head = f"{r['context']:>8,}{r['batch']:>6}  {draft_label(r):<34}"
    if r["status"] != "measured":
        return f"{head}skipped: {r['reason']}"
    shown, ms, lossless = shown_speedup(r), r["speculative"]["round_ms"], r["lossless"]
    speeds = [r[way]["tokens_per_second"]["steady"] or r[way]["tokens_per_second"]["completion"] for way in WAYS]
    parts = [f"{ms['round']:.2f}"]
    if ms["verify"] is not None:
        parts.append(" + ".join(f"{ms[part]:.2f}" for part in ("draft", "verify", "host")))
    equal = f"{lossless['equal']}/{lossless['rows']}" if lossless["compared"] else "-"
    extremes = f"({shown['min']:.2f} to {shown['max']:.2f})"
    return (
        f"{head}{cell(speeds[0], 8, 0)}{cell(speeds[1], 8, 0)}      {shown['median']:>7.2f}x {extremes:<14}"
        f"{r['speedup']['completion']['median']:>6.2f}x{cell(r['predicted']['speedup'], 6, 2)}"
        f"{r['acceptance_rate']:>8.1%}{shares(r['distinct_4grams']) if 'distinct_4grams' in r else '-':>11}"
        f"{r['speculative']['tokens_per_round']:>10.2f}  {' = '.join(parts):<34}{equal:>6}"
    )


WAYS = ("plain", "speculative")


def more(r: Record) -> str:
    """What else a point says, in one line."""
    kv, memory, prefill = (r[way]["kv_bytes_per_token"] for way in WAYS), r["memory"], r["prefill"]
    shares = " ".join(f"{share:.0%}" for share in r["acceptance_by_position"])
    roofline = r["percent_of_roofline"]
    round_share = "" if roofline["round"] is None else f", rounds {roofline['round']:.0f} %"
    return (
        f"{'':16}accepted by position {shares or '-'}; plain {r['plain']['round_ms']['round']:.2f} ms a step, "
        f"{roofline['plain']:.0f} % of the roofline{round_share}; KV read a token "
        f"{' to '.join(f'{one / 1e6:.2f}' for one in kv)} MB; cache {memory['kv_cache_bytes'] / 2**20:,.0f} MiB, "
        f"peak {memory['peak_bytes'] / 2**20:,.0f} MiB; prefilled {prefill['tokens_computed']:,} of "
        f"{prefill['tokens_held']:,} tokens at {prefill['tokens_per_second']:,.0f}/s"
    )


def summary(lengths: Sequence[Record]) -> str:
    """Break-even and critical lengths, one line a draft."""
    lines = []
    for draft in dict.fromkeys(r["draft"] for r in lengths):
        ours = [r for r in lengths if r["draft"] == draft]
        evens = ", ".join(f"batch {r['batch']} {r['phrase']}" for r in ours if r["kind"] == "break-even")
        found = (f"{r['phrase']} tokens" for r in ours if r["kind"] == "critical length")
        lines.append(f"{draft}: critical length {next(found, 'needs two batches')}; break-even at {evens}")
    return "\n".join(lines)


def draw(points: Sequence[Record], lengths: Sequence[Record], title: str, folder: Path) -> list[Path]:
    """Three pictures, one panel a draft: speed-up over batch, over context, and throughput over latency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drafts = [*dict.fromkeys(map(draft_label, points))]
    steady = "steady, whiskers: least and greatest pair; dotted: to completion"
    critical = (
        f"{steady}\ncritical length (red): from there on the speed-up grows with the batch, "
        "its least-squares slope over log2 of the batch is above 0"
    )
    pictures: list[tuple[str, Callable[[Any, str, list[Record]], None], str, str, str]] = [
        ("speedup_by_batch.png", lambda panel, _, ours: draw_speedup(panel, ours, "batch", "context"),
         "batch", SPEED, steady),
        ("speedup_by_context.png", lambda panel, draft, ours: draw_contexts(panel, draft, ours, lengths),
         "context, tokens", SPEED, critical),
        ("throughput_latency.png", lambda panel, _, ours: draw_latency(panel, ours),
         "milliseconds a token, of one row", "tokens a second, of all rows", "each point a batch; dashed: plain"),
    ]  # fmt: skip
    n_columns = min(2, len(drafts))
    n_rows = -(-len(drafts) // n_columns)
    for name, draw_panel, xlabel, ylabel, how in pictures:
        figure, axes = pyplot.subplots(
            n_rows, n_columns, figsize=(1 + 5 * n_columns, 0.8 + 3.8 * n_rows), squeeze=False, sharex=True, sharey=True,
            layout="constrained",
        )  # fmt: skip
        for panel in axes.flat[len(drafts) :]:
            panel.set_visible(False)
        for panel, draft in zip(axes.flat, drafts, strict=False):
            panel.set_title(draft, fontsize=10)
            draw_panel(panel, draft, [r for r in points if draft_label(r) == draft])
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(fontsize=7, frameon=False)
        figure.supxlabel(xlabel, fontsize=9)
        figure.supylabel(ylabel, fontsize=9)
        figure.suptitle(f"{title}\n{how}", fontsize=8)
        figure.savefig(folder / name, dpi=150)
        pyplot.close(figure)
    draw_hero(points, folder / "hero.png")
    return [folder / name for name in (*(name for name, *_ in pictures), "hero.png")]


INK = "#808890"  # and the colours below: read on white and on black
COLORS = ("#9277dd", "#3d8fd6", "#22a385", "#d18a16", "#e0574f", "#a87850", "#cf62a8", "#7f9a2c")


def draw_hero(points: Sequence[Record], path: Path) -> None:
    """Speed-up over context, a line for each batch, a panel a draft, on no background: for a page light or dark."""
    from matplotlib import pyplot

    drafts = [*dict.fromkeys(map(draft_label, points))]
    colors = dict(zip(sorted({r["batch"] for r in points}), COLORS * 9, strict=False))
    figure, axes = pyplot.subplots(
        1, len(drafts), figsize=(0.8 + 4.2 * len(drafts), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, draft in zip(axes.flat, drafts, strict=True):
        ours = [r for r in points if draft_label(r) == draft]
        xs = sorted({r["context"] for r in ours})
        for batch, color in colors.items():
            row = sorted((r for r in ours if r["batch"] == batch), key=lambda r: r["context"])
            shown = [shown_speedup(r) for r in row]
            middle = [one["median"] for one in shown]
            ends = [[abs(one[end] - one["median"]) for one in shown] for end in ("min", "max")]
            panel.errorbar(
                [r["context"] for r in row], middle, yerr=ends, fmt="o-", color=color, lw=2, ms=4, elinewidth=1,
                label=f"batch {batch}",
            )  # fmt: skip
        panel.axhline(1.0, color=INK, linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(xs, [f"{x:,}" for x in xs])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter("{x:.1f}x")
        panel.set_title(draft, fontsize=10, color=INK)
        panel.set_xlabel("context, tokens", color=INK)
        panel.tick_params(colors=INK)
        panel.grid(alpha=0.25, color=INK)
        panel.spines[:].set_visible(False)
    axes[0][0].set_ylabel(SPEED, color=INK)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, labelcolor=INK
    )  # as the lines lie, the greatest batch on top
    figure.savefig(path, dpi=200, transparent=True)
    pyplot.close(figure)


def draw_speedup(panel: Any, ours: Sequence[Record], over: str, by: str) -> None:
    """Speed-up over batch or context, a line for each value of the other; thin: to completion."""
    for color, value in enumerate(sorted({r[by] for r in ours})):
        row = sorted((r for r in ours if r[by] == value), key=lambda r: r[over])
        xs, shown = [r[over] for r in row], [shown_speedup(r) for r in row]
        middle = [one["median"] for one in shown]
        ends = [[abs(one[end] - one["median"]) for one in shown] for end in ("min", "max")]
        panel.errorbar(xs, middle, yerr=ends, fmt="o-", color=f"C{color}", label=f"{by} {value:,}", capsize=2, ms=4)
        to_end = [r["speedup"]["completion"]["median"] for r in row]
        panel.plot(
            xs,
            to_end,
            ":",
            color=f"C{color}",
            linewidth=0.9,
        )
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    xs = sorted({r[over] for r in ours})
    panel.set_xticks(xs, [f"{x:,}" for x in xs])
    panel.minorticks_off()


def draw_contexts(panel: Any, draft: str, ours: Sequence[Record], lengths: Sequence[Record]) -> None:
    """Speed-up over context, with the critical length of the draft."""
    draw_speedup(panel, ours, "context", "batch")
    found = next((r for r in lengths if r["draft"] == draft and r["kind"] == "critical length"), None)
    text = f"critical length: {found['phrase']} tokens" if found else "critical length: needs two batches"
    if found and found["context"] is not None:
        panel.axvline(found["context"], color="tab:red", linestyle="--", linewidth=1)
    panel.set_title(f"{draft}\n{text}", fontsize=10)


def draw_latency(panel: Any, ours: Sequence[Record]) -> None:
    """Tokens a second of all rows over the milliseconds that a row waits for a token, plain dashed."""
    for color, context in enumerate(sorted({r["context"] for r in ours})):
        row = sorted((r for r in ours if r["context"] == context), key=lambda r: r["batch"])
        for name, style in (("plain", "s--"), ("speculative", "o-")):
            kind = "steady" if all(r[name]["tokens_per_second"]["steady"] for r in row) else "completion"
            xs, ys = [r[name]["ms_per_token"][kind] for r in row], [r[name]["tokens_per_second"][kind] for r in row]
            label = f"context {context:,}" if name == "speculative" else None
            panel.plot(xs, ys, style, color=f"C{color}", label=label, markersize=4)
            for r, x, y in zip(row, xs, ys, strict=True):
                panel.annotate(f"{r['batch']}", (x, y), fontsize=6, xytext=(2, 2), textcoords="offset points")
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_formatter(NullFormatter())


# ---- command line ----------------------------------------------------------------------------------------------------


def temperatures(text: str) -> list[float]:
    """Numbers: "0,0.8"."""
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, as in 0,0.8; got {text!r}") from None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch", metavar="B,B", type=sizes, default=[1, 4], help="rows decoded together (default: 1,4)")
    add("--context", metavar="S,S", type=sizes, default=[1000, 4000], help="tokens of a prompt (default: 1k,4k)")
    add_flags(
        parser, DraftConfig,
        policy={"metavar": "P,P", "type": drafters, "default": ["streaming"]},
        budget={"metavar": "K,K", "type": sizes, "default": [256]},
        gamma={"metavar": "N,N", "type": gammas, "default": ["auto"]},
        view=None, cheap=None, exit_layers=None, ngram=None, n_sink=None, refresh=None, page=None,
    )  # fmt: skip
    add("--max-new-tokens", metavar="N", type=positive, default=96, help="tokens to add to each row (default: 96)")
    add("--pairs", metavar="N", type=positive, default=3, help="pairs of timed runs for each point (default: 3)")
    add("--temperature", metavar="T,T", type=temperatures, default=[0.0], help="0 is greedy (default: 0)")
    add("--seed", metavar="S", type=int, default=0, help="of sampling (row i: S + i) and of --synthetic (default: 0)")
    add("--text", metavar="FILE", type=Path, nargs="+", help="UTF-8 texts to continue (default: the bundled document)")
    add("--synthetic", action="store_true", help="prompts of random tokens: real work, acceptance without meaning")
    add_engine_flags(parser, batch_size=None, max_seq_len=None)
    add("--json", metavar="FILE", type=Path, help="keep every point here; go on from what it holds")
    add("--fresh", action="store_true", help="forget what --json holds")
    add("--plots", metavar="DIR", type=Path, help="draw speed-up over batch and context, and throughput over latency")
    return parser.parse_args(argv)


def describe(job: Job, dtype: str) -> str:
    """What is measured, in one line."""
    args, config = job.args, job.config
    text = "synthetic prompts" if args.synthetic else f"{job.settings['text']['tokens']:,} tokens of text"
    how = ", ".join(f"temperature {t:g}" if t else "greedy" for t in args.temperature)
    where = f"{job.parallel.device.type}, tp {job.parallel.tp}, {args.threads} threads"
    return (
        f"{args.model}, {config.n_params / 1e6:.1f} M parameters, {dtype}{', exact' if args.exact else ''} on "
        f"{where}; {text}; {how}, {args.max_new_tokens} new tokens, {args.pairs} pairs"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, measure, write."""
    args = parse(argv)
    try:
        job = prepare(args)
        machine = environment(job.parallel.device)
        main_only = args.json if job.parallel.is_main else None
        ledger = Points(main_only, job.settings, machine, fresh=args.fresh)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    with job.parallel.guard():
        measure_all(job, ledger)
    job.parallel.close()
    if job.parallel.is_main:
        report(job, ledger)


def measure_all(job: Job, ledger: Points) -> None:
    """Measure what the ledger does not hold yet, and print it."""
    parallel, args = job.parallel, job.args
    # the first rank has the file, and says what is left
    todo = [point for point in job.points if not parallel.same(int(ledger.holds(point)))]
    parallel.log(describe(job, args.dtype))
    for label, reason in job.skipped.items():
        parallel.log(f"skipped {label}: {reason}")
    for note in dict.fromkeys(pack(job.ids, b, c, job.bos)[1] for b in args.batch for c in args.context):
        if note:
            parallel.log(note)
    if len(todo) < len(job.points):
        parallel.log(f"{len(job.points) - len(todo)} of {len(job.points)} points are in {args.json} already")
    if not todo:
        return
    parallel.log(HEAD)
    with tqdm(total=len(todo), unit="point", disable=None if parallel.is_main else True) as bar:

        def done(point: Point, record: Record) -> None:
            ledger.add(point, record)
            if parallel.is_main:
                bar.write(line(record))
                if record["status"] == "measured":
                    bar.write(more(record))
            bar.update()

        sweep(job, todo, done, bar)


def report(job: Job, ledger: Points) -> None:
    """All points in one table, the lengths, the pictures; exit code 2 without a point, 1 where output was not equal."""
    args = job.args
    wanted = [r for r in ledger.document["points"] if any(same_key(r, point) for point in job.points)]
    wanted.sort(key=lambda r: (draft_label(r), r["context"], r["batch"]))
    measured = [r for r in wanted if r["status"] == "measured"]
    print(f"\n{HEAD}")
    for record in wanted:
        print(line(record))
    if not measured:
        refuse(ValueError("nothing could be measured; the reasons are above"), PROGRAM)
    rates = measured[-1]["machine"]
    print(f"the machine reads {rates['bandwidth'] / 1e9:,.1f} GB/s and computes {rates['peak'] / 1e9:,.0f} GFLOP/s")
    capturing = sum(r.get("capture_seconds", 0.0) for r in measured)  # files of before it was told have none
    if capturing:
        print(f"capturing rounds as CUDA graphs took {capturing:.1f} s, which are in no speed above")
    lengths = lengths_of(measured)
    print(summary(lengths))
    if args.no_compile:
        print("not compiled: acceptance and tokens a round hold, the speeds mean little")
    if args.plots:
        for path in draw(measured, lengths, describe(job, measured[-1]["dtype"]), args.plots):
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


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
