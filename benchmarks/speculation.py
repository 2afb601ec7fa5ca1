"""Measure speculation beside plain decoding: what it gains, that it changes nothing, where far context decides.

    python benchmarks/speculation.py speed    --texts A.txt B.txt --json speed.json --plot speed.png
    python benchmarks/speculation.py auto     --texts A.txt B.txt --json auto.json
    python benchmarks/speculation.py lossless --texts A.txt B.txt --json lossless.json
    python benchmarks/speculation.py needles  --texts A.txt B.txt --json needles.json --plot needles.png

speed     Every policy, budget and gamma in every cell (context x batch): the same prompts, each row its own stretch of
          the texts, are decoded plainly and speculatively in turns by one engine. A ratio is that of a pair; the median
          over the pairs counts, and so a machine that stops for a while changes little. Plain decoding is held against
          the time to read weights and keys once, at the read bandwidth of this machine in this run.
auto      The same with gamma "auto" at 512 tokens, where drafting does not pay: what asking for it costs.
lossless  fp32: prompts of ragged length through all slots, every policy, compared token for token with plain decoding.
needles   Acceptance where the continuation has to be copied from far back (needles, look-ups, passages read again),
          beside prose of the same length, on the same prompts for every policy and budget.

Every result is in the JSON file as soon as it is there: a run that was killed goes on where it ended if it is started
again with the same settings, and cells or policies that are asked for later are added to the file.
Texts should be unknown to the model. A small greedy model repeats itself, which every draft finds easy: the share of
distinct 4-grams says how much of that there was, and --temperature avoids it.

Omega (Leviathan et al. 2023, arXiv 2211.17192): if a draft is accepted with chance alpha, gamma of them give
(1 - alpha ** (gamma + 1)) / (1 - alpha) tokens a round, and the ratio is Omega T_T / (gamma T_D + T_V) of the steps.
What is predicted so from the measured steps leaves out the host and rows that end before the last one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bundled_data import distinct, fact, number, person, question, thing
from evaluate_bundled import DIGITS, needle
from frontier import (
    Pairs,
    Setting,
    buildable,
    by_position,
    check_outputs,
    draft_with,
    drafters,
    has_a_model,
    known_drafters,
    refuse,
    round_ms,
    settings_of,
    spread,
    stretches,
    take_turns,
    tokens_of,
    whole_number,
    whole_numbers,
)
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import CausalSelf, ModelConfig, Tokenizer, Transformer, load_model
from gpt_fast_sd.registry import VIEWS
from gpt_fast_sd.stats import EngineStats
from peers import environment, read_bandwidth, weight_bytes

PROGRAM = "speculation.py"
LOOKING = 60.0  # seconds after which the gaps of further differences of a cell are left unknown
COPIED = 20  # tokens of a passage read again, or of prose, that needles generates
DEPTHS = (0.05, 0.4)  # of the facts that needles asks for: far from both ends
RESAMPLES = 2000  # of a bootstrap interval
ENOUGH = 10  # prompts answered right, for a picture of them alone
Record = dict[str, Any]
Texts = dict[str, list[int]]


# ---- what every measurement needs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A loaded model, the texts it continues, and a model that may draft for it."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    texts: Texts
    dtype: str
    compiled: bool
    draft_model: Transformer | None
    draft_name: str | None

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config

    @property
    def positions(self) -> int:
        """How many tokens a row may hold."""
        return self.config.n_positions

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, a key or a value."""
        return self.model.embedding.weight.element_size()

    def engine(self, batch: int, room: int, draft: DraftConfig | None = None) -> Engine:
        """An engine of its own around the shared weights."""
        config = EngineConfig(batch_size=batch, max_seq_len=room, device="cpu", dtype=self.dtype, compile=self.compiled)
        needs_model = draft is not None and draft.draft_model is not None
        return Engine(self.model, self.tokenizer, config, draft, self.draft_model if needs_model else None)

    def settings(self) -> Record:
        """What results that may stand in one file have in common."""
        return {
            "model": self.name,
            "weights": fingerprint(self.model),
            "dtype": self.dtype,
            "compiled": self.compiled,
            "threads": torch.get_num_threads(),
            "texts": {name: digest(str(ids).encode()) for name, ids in self.texts.items()},
        }

    def draft_weights(self, policy: str) -> Record:
        """What else tells a result of this policy from others: the draft model, where it has one."""
        if not has_a_model(policy) or self.draft_model is None:
            return {}
        return {"draft_model": self.draft_name, "draft_weights": fingerprint(self.draft_model)}


def load(args: argparse.Namespace, policies: Sequence[str]) -> Subject:
    """Load model and texts; ValueError or OSError in one sentence."""
    torch.set_num_threads(args.threads)
    names = [path.name for path in args.texts]
    for i, path in enumerate(args.texts):
        if not path.is_file():
            raise ValueError(f"there is no text file {path}")
        if path.name in names[:i]:
            raise ValueError(f"two texts are named {path.name}: give each once, by a name of its own")
    base = Engine.from_pretrained(
        args.model, EngineConfig(batch_size=1, max_seq_len=16, device="cpu", dtype=args.dtype, compile=False)
    )
    if base.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer to read the texts with")
    draft_model = None
    if args.draft_model and any(map(has_a_model, policies)):
        draft_model = load_model(locate(args.draft_model), device=base.device, dtype=base.dtype)
    return Subject(
        name=str(args.model), model=base.model, tokenizer=base.tokenizer,
        texts={path.name: tokens_of(path, base.tokenizer) for path in args.texts},
        dtype=base.dtype_name, compiled=args.compile, draft_model=draft_model, draft_name=args.draft_model,
    )  # fmt: skip


def digest(data: bytes) -> str:
    """A short name that changes with the data."""
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(model: Transformer) -> str:
    """A short name that changes with the weights: of the first 1,024 of every parameter."""
    parts = [parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes() for parameter in model.parameters()]
    return digest(b"".join(parts))


class Ledger:
    """Results in a JSON file that is whole after each of them; those of an earlier run with the same settings stay."""

    def __init__(self, path: Path | None, benchmark: str, settings: Record) -> None:
        """ValueError where the file holds something else, or was measured with other settings."""
        self.path = path
        self.document: Record = {
            "benchmark": f"speculation {benchmark}",
            "settings": json.loads(json.dumps(settings)),
            "environment": environment(torch.get_num_threads()),
            "results": [],
        }
        if path is None or not path.exists():
            return
        advice = "name another file, or remove this one"
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} exists and is not JSON: {advice}") from None
        if not isinstance(old, dict) or old.get("benchmark") != self.document["benchmark"]:
            raise ValueError(f"{path} exists and holds no results of {self.document['benchmark']}: {advice}")
        for name, value in self.document["settings"].items():
            before = old.get("settings", {}).get(name)
            if before != value:
                raise ValueError(f"{path} was measured with {name} {before}, not {value}: {advice}")
        self.document = old

    @property
    def results(self) -> list[Record]:
        """All results so far."""
        results: list[Record] = self.document["results"]
        return results

    def find(self, **key: Any) -> Record | None:
        """The result with these values, if it is there."""
        return next((r for r in self.results if all(r.get(name) == value for name, value in key.items())), None)

    def add(self, record: Record) -> None:
        """One more result, on the disk when this returns."""
        self.results.append(record)
        self.write()

    def write(self, **more: Any) -> None:
        """Write the file anew, with what else belongs in it; a kill leaves the old one or the new one."""
        self.document |= more
        if self.path:
            partial = self.path.with_name(f"{self.path.name}.partial")
            partial.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.path)


class Gaps:
    """How close a call it was where two outputs part, by the model's forward of the whole text, in its own dtype.

    Not Engine.logits: that goes token by token, minutes at 16,000 tokens, and takes a slot's prefilled keys away.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.seen: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits [V] after these tokens."""
        key = tuple(ids)
        if key not in self.seen:
            tokens = torch.tensor([ids])
            hidden = self.model.hidden(tokens, torch.arange(len(ids))[None], CausalSelf())[0, -1:]  # [1, D]
            self.seen[key] = self.model.output(hidden)[0].float()
        return self.seen[key]

    def differences(
        self, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]
    ) -> list[Record]:
        """Where outputs of the same length part: row, position, both tokens, and how far apart their logits are."""
        found, began = [], time.perf_counter()
        for row, (prompt, ours, theirs) in enumerate(zip(prompts, plain, speculative, strict=True)):
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if at is None:
                continue
            gap = None
            if time.perf_counter() - began < LOOKING:
                logits = self.logits([*prompt, *ours[:at]])
                gap = float(logits.max() - min(logits[ours[at]], logits[theirs[at]]))
            found.append({"row": row, "position": at, "plain": ours[at], "speculative": theirs[at], "gap": gap})
        return found


def difference_phrase(one: Record) -> str:
    """A difference in words."""
    gap = "not looked into" if one["gap"] is None else f"logits {one['gap']:.2g} apart"
    return f"{one['row']} from token {one['position']} on ({gap})"


# ---- speed and auto --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The bytes that a plain step has to read, and the time that takes at the bandwidth measured."""

    weights: int
    kv: int  # of all rows, at the mean length of the run
    kv_per_entry: int  # of all rows
    gb_per_second: float

    @property
    def step_ms(self) -> float:
        """Milliseconds to read weights, keys and values once."""
        return (self.weights + self.kv) / self.gb_per_second / 1e6

    def ratio(self, setting: Setting, gamma: int | str) -> float | None:
        """The most that a sparse self-draft could gain: every draft accepted, nothing but bytes costs time."""
        if setting.policy not in VIEWS or setting.budget is None or isinstance(gamma, str):
            return None
        entries = min(setting.budget, self.kv // self.kv_per_entry)
        round_bytes = (gamma + 1) * self.weights + self.kv + gamma * entries * self.kv_per_entry
        return (gamma + 1) * (self.weights + self.kv) / round_bytes


def ceiling(subject: Subject, context: int, batch: int, new_tokens: int, gb_per_second: float) -> Ceiling:
    """The ceiling of plain decoding in a cell."""
    entry = batch * subject.config.kv_bytes_per_token(subject.itemsize)
    weights = weight_bytes(subject.config) * subject.itemsize // 2
    return Ceiling(
        weights=weights, kv=entry * (context + new_tokens // 2), kv_per_entry=entry, gb_per_second=gb_per_second
    )


def alpha_of(stats: EngineStats) -> float:
    """The chance that a draft is accepted if those before it were: accepted over reached drafts."""
    drafted, accepted = stats.drafted_by_position, stats.accepted_by_position
    reached = sum(min(judged, before) for judged, before in zip(drafted, [*drafted[:1], *accepted], strict=False))
    return sum(accepted) / reached if reached else 0.0


def omega(alpha: float, gamma: int) -> float:
    """Tokens a round of gamma drafts is expected to emit."""
    return float(sum(alpha**i for i in range(gamma + 1)))


def predicted_tokens(stats: EngineStats, alpha: float) -> float:
    """Tokens a row and round by Omega, of the run's gammas and share of row rounds that drafted at all."""
    rounds = sum(stats.rounds_by_gamma.values())
    drafting = sum(n for gamma, n in stats.rounds_by_gamma.items() if gamma)
    if not drafting or not stats.drafted:
        return 1.0
    share = min(1.0, stats.drafted_by_position[0] / (stats.row_rounds * drafting / rounds))
    return sum(n * (1 + share * (omega(alpha, g) - 1)) for g, n in stats.rounds_by_gamma.items()) / rounds


def median_interval(values: Sequence[float]) -> list[float]:
    """Between which of the values their median lies with a chance of 95 %, whatever they are drawn from."""
    n, outside, below = len(values), 0, 0.0
    while 2 * (below := below + math.comb(n, outside) / 2**n) <= 0.05:
        outside += 1
    ordered = sorted(values)
    return [ordered[outside - 1 if outside else 0], ordered[-outside if outside else -1]]


def account(pairs: Pairs, batch: int, limit: Ceiling) -> Record:
    """What the pairs say, JSON-ready: ratios are medians over the pairs, counts are those of all of them."""
    stats, plain_ms = pairs.counts, round_ms(pairs.plain)
    alpha, ratio = alpha_of(stats), spread(pairs.ratios)
    plain_kv, kv = pairs.plain[-1].kv_bytes_per_token, stats.kv_bytes_per_token
    plain_steps, speculative_steps = (
        [stats.decode_seconds / stats.decode_tokens for stats in runs] for runs in (pairs.plain, pairs.speculative)
    )
    predicted, refilled = [], []
    for plain, speculative in zip(pairs.plain, pairs.speculative, strict=True):
        one, other = round_ms([plain]), round_ms([speculative])
        predicted.append(predicted_tokens(speculative, alpha) * one["verify"] / (other["draft"] + other["verify"]))
        refilled.append(speculative.tokens_per_round * one["round"] / other["round"])
    return {
        "ratio": ratio,
        "ratio_interval": median_interval(pairs.ratios),
        "fastest_ratio": min(plain_steps) / min(speculative_steps),
        "ratios": pairs.ratios,
        "loss_percent": 100 * (1 - ratio["median"]),
        "predicted_ratio": statistics.median(predicted),
        "refilled_ratio": statistics.median(refilled),
        "plain_ms": plain_ms,
        "roofline_ms": limit.step_ms,
        "read_gb_per_second": limit.gb_per_second,
        "percent_of_roofline": 100 * limit.step_ms / plain_ms["round"],
        "speculative_ms": round_ms(pairs.speculative),
        "tokens_per_round": stats.tokens_per_round,
        "predicted_tokens_per_round": predicted_tokens(stats, alpha),
        "rows_live": stats.row_rounds / (stats.rounds * batch),
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": by_position(stats),
        "alpha": alpha,
        "rounds_by_gamma": {str(gamma): n for gamma, n in sorted(stats.rounds_by_gamma.items())},
        "kv_bytes_per_token": {"plain": plain_kv, "speculative": kv, "ratio": kv / plain_kv},
        "recompiles_while_timed": stats.recompiles + sum(plain.recompiles for plain in pairs.plain),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def drafts_label(record: Record) -> str:
    """Who drafted, and how many."""
    return f"{Setting(policy=record['policy'], budget=record['budget']).label}, gamma {record['gamma']}"


def phrase(record: Record) -> str:
    """A result of speed in four lines."""
    ratio, plain, ms, kv = (record[k] for k in ("ratio", "plain_ms", "speculative_ms", "kv_bytes_per_token"))
    low, high = record.get("ratio_interval", [ratio["min"], ratio["max"]])
    sure = f"; {len(record['ratios'])} pairs, 95 % {low:.3f} to {high:.3f}"
    if "fastest_ratio" in record:
        sure += f"; fastest runs {record['fastest_ratio']:.3f}"
    top = "" if record["ceiling_ratio"] is None else f" (at most {record['ceiling_ratio']:.2f})"
    shares = " ".join(f"{share:.0%}" for share in record["acceptance_by_position"])
    equal = record["outputs_equal"]
    outputs = "sampled" if equal is None else f"{equal} of {record.get('outputs', record['batch'])} outputs equal"
    if record["differences"]:
        outputs += ", row " + "; ".join(map(difference_phrase, record["differences"]))
    rounds = record["rounds_by_gamma"]
    gammas = ", ".join(f"{gamma} in {n / sum(rounds.values()):.0%}" for gamma, n in rounds.items())
    return (
        f"  {drafts_label(record):<28}{ratio['median']:.2f}x plain ({ratio['min']:.2f} to {ratio['max']:.2f}{sure}), "
        f"predicted {record['predicted_ratio']:.2f}{top}, rows refilled {record['refilled_ratio']:.2f}\n"
        f"      plain {plain['round']:.2f} ms a step, {record['percent_of_roofline']:.0f} % of the roofline; "
        f"round {ms['round']:.2f} ms: draft {ms['draft']:.2f}, verify {ms['verify']:.2f}, host {ms['host']:.2f}\n"
        f"      {record['tokens_per_round']:.2f} tokens a round (by alpha {record['alpha']:.3f}: "
        f"{record['predicted_tokens_per_round']:.2f}), accepted {shares or '-'}; gamma {gammas}\n"
        f"      KV read a token {kv['speculative'] / 1e6:.2f} of {kv['plain'] / 1e6:.2f} MB, {kv['ratio']:.2f}x; "
        f"{record['distinct_4_grams']:.0%} of 4-grams distinct; {outputs}"
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement of speed."""

    context: int
    batch: int
    setting: Setting
    gamma: int | str

    @property
    def key(self) -> Record:
        """How its result is found again."""
        return {
            "context": self.context,
            "batch": self.batch,
            "policy": self.setting.policy,
            "budget": self.setting.budget,
            "gamma": self.gamma,
        }


def points(cells: Sequence[tuple[int, int]], settings: Sequence[Setting], gammas: Sequence[int | str]) -> list[Point]:
    """All measurements, those that may share an engine and its prefilled keys side by side."""
    return [
        Point(context=context, batch=batch, setting=setting, gamma=gamma)
        for context, batch in cells
        for gamma in gammas
        for setting in settings
    ]


def engines(subject: Subject, todo: Sequence[Point], new_tokens: int) -> Iterator[tuple[Point, Engine | ValueError]]:
    """Every point with an engine that drafts so, or with the reason why none can.

    Points of one cell and gamma share an engine, so that their prompts are prefilled once and their verification is
    compiled for just that gamma; gamma "auto" times its steps on empty slots, and gets an engine for each point.
    """
    shared: tuple[tuple[int, int, int | str], Engine] | None = None
    for point in todo:
        batch, room = point.batch, point.context + new_tokens
        draft = point.setting.draft(point.gamma, subject.draft_name)
        group = (point.context, point.batch, point.gamma)
        try:
            if point.gamma == "auto":
                shared = None
                yield point, subject.engine(batch, room, draft)
                continue
            if shared is None or shared[0] != group:
                shared = None  # let go of the old cache first
                shared = group, subject.engine(batch, room)
            draft_with(shared[1], draft, subject.draft_model)
        except ValueError as error:
            yield point, error
        else:
            yield point, shared[1]


def compare(pairs: Pairs, prompts: Sequence[Sequence[int]], gaps: Gaps | None) -> Record:
    """How far greedy outputs agree (no gaps: they were sampled), and how much of the text is repetition."""
    plain, speculative = ([one.tokens for one in way] for way in (pairs.plain_outputs, pairs.speculative_outputs))
    differences = gaps.differences(prompts, plain, speculative) if gaps else []
    return {
        "outputs": len(prompts),
        "outputs_equal": len(prompts) - len(differences) if gaps else None,
        "differences": differences,
        "distinct_4_grams": distinct_share(speculative, 4),
    }


def distinct_share(outputs: Sequence[Sequence[int]], n: int) -> float:
    """How many of the outputs' runs of n tokens are the first of their kind in the row; little where a text loops."""
    runs = [[tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for tokens in outputs]
    return sum(len(set(row)) for row in runs) / max(1, sum(len(row) for row in runs))


def sampling_params(args: argparse.Namespace, n: int) -> list[SamplingParams]:
    """Of every prompt; sampled ones draw with a seed of their own, so that every run is the same."""
    return [
        SamplingParams(
            max_tokens=args.new_tokens, temperature=args.temperature, seed=row if args.temperature else None,
            ignore_eos=True,
        )
        for row in range(n)
    ]  # fmt: skip


def speed(args: argparse.Namespace) -> None:
    """Measure every point that is not in the file yet."""
    check_outputs(args.json, args.plot)
    settings, skipped = buildable(settings_of(args.policies, args.budgets), args.gammas, args.draft_model)
    subject = load(args, args.policies)
    prompts = {}
    for context, batch in args.cells:
        if not 2 <= context <= subject.positions - args.new_tokens:
            raise ValueError(
                f"a context of {context:,} does not fit: from 2 to {max(0, subject.positions - args.new_tokens):,} "
                f"tokens leave the model's {subject.positions:,} positions room for {args.new_tokens:,} new ones"
            )
        prompts[context, batch] = stretches(subject.texts, batch, context, subject.tokenizer.bos_id)
    names = ("new_tokens", "pairs", "temperature", "waves")
    ledger = Ledger(args.json, args.command, subject.settings() | {name: vars(args)[name] for name in names})
    sampling_params(args, 1)  # refuses a temperature that makes no sense
    rates = read_bandwidth()
    limits = {(c, b): ceiling(subject, c, b, args.new_tokens, max(rates.values())) for c, b in args.cells}
    print_ceilings(subject, rates, limits)
    for label, reason in skipped.items():
        print(f"skipped {label}: {reason}")

    wanted = points(args.cells, settings, args.gammas)
    keys = {point: point.key | subject.draft_weights(point.setting.policy) for point in wanted}
    todo = [point for point in wanted if ledger.find(**keys[point]) is None]
    gaps = Gaps(subject.model)
    if len(todo) < len(wanted):
        print(f"{len(wanted) - len(todo)} of {len(wanted)} results are in {args.json} already")
    shown, bar = (0, 0), tqdm(total=len(todo), unit="point", leave=False)
    for point, engine in engines(subject, todo, args.new_tokens):
        cell = point.context, point.batch
        bar.set_description(f"{point.context} x {point.batch}, {point.setting.label}, gamma {point.gamma}")
        if isinstance(engine, ValueError):
            bar.write(f"skipped {point.setting.label}, gamma {point.gamma}: {engine}")
        else:
            queue = prompts[cell] * args.waves
            pairs = take_turns(engine, queue, sampling_params(args, len(queue)), args.pairs, args.seconds)
            record = keys[point] | account(pairs, point.batch, limits[cell])
            record |= compare(pairs, queue, None if args.temperature else gaps)
            record |= {"ceiling_ratio": limits[cell].ratio(point.setting, point.gamma)}
            ledger.add(record)
            if cell != shown:
                shown = cell
                bar.write(
                    f"context {point.context:,}, batch {point.batch}: roofline {limits[cell].step_ms:.2f} ms a step"
                )
            bar.write(phrase(record))
        bar.update()
        del engine  # its cache is gone before the next one's is there
    bar.close()

    results = [r for r in (ledger.find(**keys[point]) for point in wanted) if r]
    again = max(read_bandwidth().values())
    print(f"read bandwidth at the end: {again:.1f} GB/s")
    ledger.write(read_gb_per_second={"start": rates, "end": again}, skipped=skipped)
    print_speed(results)
    if args.plot and results:
        draw_speed(results, f"{subject.name}, {subject.dtype}, {torch.get_num_threads()} threads", args.plot)
    if not results:
        refuse(ValueError("nothing could be measured; the reasons are above"), PROGRAM)


def print_ceilings(subject: Subject, rates: dict[str, float], limits: dict[tuple[int, int], Ceiling]) -> None:
    """The bytes of a plain step and the time that reading them takes, cell by cell."""
    per_token = subject.config.kv_bytes_per_token(subject.itemsize)
    size = f"{subject.config.n_params / 1e6:.1f} M parameters, {subject.dtype}, {per_token:,} bytes of KV a token"
    print(f"model {subject.name}: {size}")
    ways = ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items())
    print(f"read bandwidth {max(rates.values()):.1f} GB/s, {torch.get_num_threads()} threads, 1 GiB ({ways})")
    print(f"{'context':>9}{'batch':>7}{'weights MB':>12}{'KV MB':>9}{'roofline ms':>13}   of a plain step")
    for (context, batch), limit in limits.items():
        sizes = f"{limit.weights / 1e6:>12.1f}{limit.kv / 1e6:>9.1f}{limit.step_ms:>13.2f}"
        print(f"{context:>9,}{batch:>7}{sizes}", flush=True)


def print_speed(results: Sequence[Record]) -> None:
    """All ratios in one table."""
    head = "ratio    min    max  predicted  refilled  tokens   KV x  loss %  equal"
    print(f"{'context':>9}{'batch':>7}  {'draft':<34}{head}")
    for r in results:
        ratio, n_outputs = r["ratio"], r.get("outputs", r["batch"])
        equal = "-" if r["outputs_equal"] is None else f"{r['outputs_equal']}/{n_outputs}"
        print(
            f"{r['context']:>9,}{r['batch']:>7}  {drafts_label(r):<34}{ratio['median']:>5.2f}{ratio['min']:>7.2f}"
            f"{ratio['max']:>7.2f}{r['predicted_ratio']:>11.2f}{r['refilled_ratio']:>10.2f}"
            f"{r['tokens_per_round']:>8.2f}{r['kv_bytes_per_token']['ratio']:>7.2f}{r['loss_percent']:>8.1f}{equal:>7}"
        )


def draw_speed(results: Sequence[Record], title: str, path: Path) -> None:
    """One panel a cell: measured ratio with the spread of its pairs, predicted ratio, and plain decoding at 1."""
    pyplot = load_pyplot()
    cells = [*dict.fromkeys((r["context"], r["batch"]) for r in results)]
    labels = [*dict.fromkeys(drafts_label(r) for r in results)]
    size = (2.5 + 3.2 * len(cells), 1.6 + 0.36 * len(labels))
    figure, axes = pyplot.subplots(1, len(cells), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for panel, (context, batch) in zip(axes[0], cells, strict=True):
        for r in results:
            if (r["context"], r["batch"]) != (context, batch):
                continue
            i, ratio = labels.index(drafts_label(r)), r["ratio"]
            ends = [[ratio["median"] - ratio["min"]], [ratio["max"] - ratio["median"]]]
            color = "tab:orange" if ratio["median"] > 1 else "tab:gray"
            panel.barh(i, ratio["median"], height=0.65, color=color, xerr=ends, ecolor="black", capsize=2)
            panel.plot(r["predicted_ratio"], i, "D", color="tab:blue", markersize=4)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"context {context:,}, batch {batch}", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(labels)), labels)
    axes[0][0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("speed, times plain decoding; whiskers: least and greatest pair; diamond: predicted", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def load_pyplot() -> Any:
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# ---- lossless --------------------------------------------------------------------------------------------------------


def ragged(texts: Texts, n: int, shortest: int, longest: int, bos: int | None, seed: int) -> list[list[int]]:
    """n prompts of shortest to longest tokens from anywhere in the texts; the same for the same seed."""
    rng, pool = np.random.default_rng(seed), list(texts.values())
    for name, ids in texts.items():
        if len(ids) < longest:
            raise ValueError(f"{name} has {len(ids):,} tokens, too few for prompts of up to {longest:,}")
    prompts = []
    for _ in range(n):
        length, ids = int(rng.integers(shortest, longest + 1)), pool[int(rng.integers(len(pool)))]
        body = length - (bos is not None)
        start = int(rng.integers(0, len(ids) - body + 1))
        prompts.append([*([] if bos is None else [bos]), *ids[start : start + body]])
    return prompts


def decode_all(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, what: str) -> list[list[int]]:
    """The outputs of all prompts, with a progress bar."""
    outputs: list[list[int]] = [[] for _ in prompts]
    with tqdm(total=len(prompts), desc=what, unit="prompt", leave=False) as bar:
        for event in engine.stream(prompts, params):
            if event.completion:
                outputs[event.index] = event.completion.tokens
                bar.update()
    return outputs


def lossless(args: argparse.Namespace) -> None:
    """Compare every policy with plain decoding; exit code 1 where one said something else."""
    check_outputs(args.json, None)
    args.draft_model = args.draft_model or str(args.model)  # no smaller one: the target drafts for itself, sparsely
    if not 2 <= args.shortest <= args.longest:
        raise ValueError(f"prompts of {args.shortest:,} to {args.longest:,} tokens: the shortest has at least 2")
    settings, skipped = buildable(settings_of(args.policies, [args.budget]), [args.gamma], args.draft_model)
    subject = load(args, args.policies)
    room = args.longest + args.new_tokens
    if room > subject.positions:
        raise ValueError(f"{room:,} tokens a row are over the model's {subject.positions:,} positions")
    prompts = ragged(subject.texts, args.prompts, args.shortest, args.longest, subject.tokenizer.bos_id, args.seed)
    names = ("prompts", "shortest", "longest", "new_tokens", "batch_size", "budget", "gamma", "seed")
    ledger = Ledger(args.json, args.command, subject.settings() | {name: vars(args)[name] for name in names})
    params, gaps = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True), Gaps(subject.model)
    n_tokens = sum(map(len, prompts))
    print(
        f"model {subject.name}, {subject.dtype}: {len(prompts)} prompts of {min(map(len, prompts)):,} to "
        f"{max(map(len, prompts)):,} tokens, {n_tokens:,} in all, through {args.batch_size} slots; gamma {args.gamma}"
    )
    for label, reason in skipped.items():
        print(f"skipped {label}: {reason}")
    plain = ledger.find(policy="off")
    if plain is None:
        outputs = decode_all(subject.engine(args.batch_size, room), prompts, params, "plain")
        plain = {"policy": "off", "outputs": outputs}
        ledger.add(plain)
    print(f"{'policy':<26}{'equal':>10}{'acceptance':>12}{'tokens/round':>14}{'recompiles':>12}", flush=True)
    for setting in settings:
        key = {"policy": setting.policy, "budget": setting.budget} | subject.draft_weights(setting.policy)
        record = ledger.find(**key)
        if record is None:
            try:
                draft = setting.draft(args.gamma, args.draft_model)
                engine = subject.engine(args.batch_size, room, draft)
            except ValueError as error:
                skipped[setting.label] = str(error)
                print(f"skipped {setting.label}: {error}")
                continue
            outputs = decode_all(engine, prompts, params, setting.label)
            differences = gaps.differences(prompts, plain["outputs"], outputs)
            record = key | {
                "prompts": len(prompts),
                "equal": len(prompts) - len(differences),
                "differences": differences,
                "acceptance_rate": engine.stats.acceptance_rate,
                "acceptance_by_position": by_position(engine.stats),
                "tokens_per_round": engine.stats.tokens_per_round,
                "recompiles": engine.stats.recompiles,
            }
            ledger.add(record)
        equal = f"{record['equal']}/{record['prompts']}"
        print(
            f"{setting.label:<26}{equal:>10}{record['acceptance_rate']:>12.1%}{record['tokens_per_round']:>14.2f}"
            f"{record['recompiles']:>12}", flush=True,
        )  # fmt: skip
        for one in record["differences"]:
            print(f"    prompt {difference_phrase(one)}")
    ledger.write(skipped=skipped)
    policies = [r for r in ledger.results if r["policy"] != "off"]
    if not policies:
        refuse(ValueError("no policy could be built; the reasons are above"), PROGRAM)
    if wrong := [r["policy"] for r in policies if r["differences"]]:
        print(f"{PROGRAM}: not token-identical to plain decoding: {', '.join(wrong)}", file=sys.stderr)
        raise SystemExit(1)


# ---- needles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt, how many tokens follow it, and what they should be: a text, tokens, or (prose) anything."""

    prompt: list[int]
    new_tokens: int
    answer: str | list[int] | None

    def is_right(self, completion: Completion) -> bool | None:
        """Whether this is the answer; None where there is none."""
        if isinstance(self.answer, str):
            return completion.text.startswith(self.answer)
        return None if self.answer is None else completion.tokens == self.answer


class Cases:
    """Makes cases of a kind and length, prompt and answer together, out of held-out prose."""

    def __init__(self, tokenizer: Tokenizer, texts: Texts, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.books = [torch.tensor(ids) for ids in texts.values()]

    def make(self, kind: str, length: int, n: int) -> list[Case]:
        """n cases; the same for the same seed, kind and length, whatever else was asked for."""
        rng = np.random.default_rng([self.seed, KINDS.index(kind), length])
        made: dict[str, Callable[[np.random.Generator, int], Case]] = {
            "needle": self.needle, "lookup": self.lookup, "copy": self.copy, "prose": self.prose,
        }  # fmt: skip
        return [made[kind](rng, length) for _ in range(n)]

    def needle(self, rng: np.random.Generator, length: int) -> Case:
        """Prose with one fact far back, asked for at the end."""
        probe = needle(self.tokenizer, rng, self.books, length, rng.uniform(*DEPTHS))
        return Case(prompt=probe.prompt, new_tokens=DIGITS, answer=probe.answer)

    def lookup(self, rng: np.random.Generator, length: int) -> Case:
        """A register of facts that fills the length; one from its first part is asked for."""
        make, entries = (person if rng.random() < 0.5 else thing), max(2, length // 14)
        names = distinct(make, rng, min(entries, 2000))
        values = [number(rng) for _ in names]
        place = rng.uniform(*DEPTHS)
        while True:
            asked = int(place * len(names))
            lines = [fact(name, value) for name, value in zip(names, values, strict=False)]
            prompt = self.tokenizer.encode("\n".join([*lines, question(names[asked])]))
            excess = len(prompt) + DIGITS - length
            if excess <= 0:
                return Case(prompt=prompt, new_tokens=DIGITS, answer=values[asked])
            if len(names) <= 2:
                raise ValueError(f"a register of two facts does not fit into {length} tokens")
            del names[max(2, len(names) - 1 - excess // 20) :]

    def copy(self, rng: np.random.Generator, length: int) -> Case:
        """A passage, the prose behind it, and the first half of the passage again: its second half should follow."""
        cue = self.tokenizer.encode("\nRead it once more, word for word:\n", bos=False)
        half = max(COPIED, length // 10)
        between = length - 3 * half - len(cue) - COPIED - 1
        if between < 0:
            raise ValueError(f"a passage read twice does not fit into {length} tokens")
        text = self.stretch(rng, 2 * half + between)  # in one piece: the answer does not come again by chance
        prompt = [*self.bos, *text, *cue, *text[:half]]
        return Case(prompt=prompt, new_tokens=COPIED, answer=text[half : half + COPIED])

    def prose(self, rng: np.random.Generator, length: int) -> Case:
        """A stretch of a book."""
        if length <= COPIED + 1:
            raise ValueError(f"prose needs more than {COPIED + 1} tokens, got {length}")
        prompt = [*self.bos, *self.stretch(rng, length - COPIED - len(self.bos))]
        return Case(prompt=prompt, new_tokens=COPIED, answer=None)

    @property
    def bos(self) -> list[int]:
        """What a text begins with."""
        return [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]

    def stretch(self, rng: np.random.Generator, n: int) -> list[int]:
        """n tokens from anywhere in one of the books."""
        book = self.books[int(rng.integers(len(self.books)))]
        start = int(rng.integers(0, len(book) - n + 1))
        ids: list[int] = book[start : start + n].tolist()
        return ids


KINDS = ("needle", "lookup", "copy", "prose")


@dataclass
class Tally:
    """What one policy and budget did on each prompt of a cell: (accepted, drafted, emitted, rounds)."""

    setting: Setting
    prompts: list[list[int]] = field(default_factory=list)

    def take(self, completions: Sequence[Completion]) -> None:
        """Count these completions."""
        for stats in (completion.stats for completion in completions):
            self.prompts.append([stats.accepted, stats.drafted, stats.emitted, stats.rounds])


def measure_cell(
    engine: Engine, cases: Sequence[Case], policies: Sequence[tuple[Setting, Callable[[], None]]]
) -> tuple[list[bool | None], list[Tally]]:
    """Decode the cases plainly, then by every policy, a batch at a time: its slots keep their keys meanwhile."""
    tallies, right = [Tally(setting) for setting, _ in policies], []
    batch = engine.config.batch_size
    for start in range(0, len(cases), batch):
        wave = cases[start : start + batch]
        prompts = [case.prompt for case in wave]
        params = [SamplingParams(max_tokens=case.new_tokens, ignore_eos=True) for case in wave]
        plainly = engine.generate(prompts, params, speculate=False)
        right += [case.is_right(completion) for case, completion in zip(wave, plainly, strict=True)]
        for tally, (_, use) in zip(tallies, policies, strict=True):
            use()
            tally.take(engine.generate(prompts, params))
    return right, tallies


def swappable(engine: Engine, draft: DraftConfig) -> Callable[[], None]:
    """A call that lets the engine draft so: built once, so that nothing is compiled twice. ValueError as draft_with."""
    draft_with(engine, draft)
    rounds, planner = engine.rounds, engine.planner

    def use() -> None:
        engine.draft, engine.schedule.rounds, engine.schedule.planner = draft, rounds, planner

    return use


def interval(values: Sequence[float]) -> list[float]:
    """The middle 95 %."""
    return [float(end) for end in np.percentile(values, [2.5, 97.5])]


def summarize(results: Sequence[Record], seed: int = 0) -> list[Record]:
    """Per kind, prompts (all, or those answered right), budget and policy: ratios of sums and bootstrap intervals.

    Prompts are resampled, the same ones for every policy, so that the lead over streaming is that of pairs.
    """
    summary = []
    for kind in [k for k in KINDS if any(r["kind"] == k for r in results)]:
        cells = [r for r in results if r["kind"] == kind]
        right = [bool(x) for r in cells for x in r["right"]]
        for subset in ("all",) if kind == "prose" else ("all", "right"):
            keep = np.array([subset == "all" or x for x in right])
            if not keep.any():
                continue
            counts = {  # of every policy and budget: [prompts, 4]
                (t["policy"], t["budget"]): np.array(
                    [row for r in cells for s in r["settings"] if same_setting(s, t) for row in s["prompts"]],
                    dtype=float,
                )[keep]
                for t in cells[0]["settings"]
            }
            drawn = np.random.default_rng(seed).integers(0, keep.sum(), (RESAMPLES, keep.sum()))
            resampled = {key: rows[drawn].sum(1) for key, rows in counts.items()}  # [resamples, 4]
            for (policy, budget), rows in counts.items():
                accepted, drafted, emitted, rounds = rows.sum(0)
                again = resampled[policy, budget]
                record = {
                    "kind": kind, "prompts": subset, "n": int(keep.sum()), "policy": policy, "budget": budget,
                    "drafted": int(drafted),
                    "acceptance_rate": accepted / max(1, drafted),
                    "acceptance_interval": interval(again[:, 0] / np.maximum(1, again[:, 1])),
                    "tokens_per_round": emitted / rounds,
                    "tokens_per_round_interval": interval(again[:, 2] / again[:, 3]),
                }  # fmt: skip
                if policy != "streaming" and ("streaming", budget) in counts:
                    record |= lead(rows, counts["streaming", budget], again, resampled["streaming", budget])
                summary.append(record)
    return summary


def same_setting(a: Record, b: Record) -> bool:
    """Whether both are of one policy and budget."""
    return bool(a["policy"] == b["policy"] and a["budget"] == b["budget"])


def lead(rows: Any, others: Any, again: Any, others_again: Any) -> Record:
    """By how much acceptance is above that of others on the same prompts, and on how many it is above and below."""
    shares, other_shares = (x[:, 0] / np.maximum(1, x[:, 1]) for x in (rows, others))
    totals, other_totals = (x.sum(0) for x in (rows, others))
    resampled = again[:, 0] / np.maximum(1, again[:, 1]) - others_again[:, 0] / np.maximum(1, others_again[:, 1])
    return {
        "over_streaming": totals[0] / max(1, totals[1]) - other_totals[0] / max(1, other_totals[1]),
        "over_streaming_interval": interval(resampled),
        "prompts_above_streaming": int((shares > other_shares).sum()),
        "prompts_below_streaming": int((shares < other_shares).sum()),
    }


def needles(args: argparse.Namespace) -> None:
    """Measure every kind and length that is not in the file yet, then sum up."""
    check_outputs(args.json, args.plot)
    settings, skipped = buildable(settings_of(args.policies, args.budgets), [args.gamma], None)
    subject = load(args, args.policies)
    if (longest := max(args.lengths)) > subject.positions:
        raise ValueError(f"prompts of {longest:,} tokens are over the model's {subject.positions:,} positions")
    for name, ids in subject.texts.items():
        if len(ids) < longest:
            raise ValueError(f"{name} has {len(ids):,} tokens, too few for prompts of {longest:,}")
    maker = Cases(subject.tokenizer, subject.texts, args.seed)
    work = {(kind, length): maker.make(kind, length, args.n) for kind in args.kinds for length in args.lengths}
    drafted = [[setting.policy, setting.budget] for setting in settings]
    names = ("n", "gamma", "seed")
    common = subject.settings() | {name: vars(args)[name] for name in names} | {"drafts": drafted}
    ledger = Ledger(args.json, args.command, common)
    print(f"model {subject.name}, {subject.dtype}, gamma {args.gamma}: {args.n} prompts of each kind and length")
    for label, reason in skipped.items():
        print(f"skipped {label}: {reason}")

    engine = subject.engine(args.batch_size, longest)
    policies = [(setting, swappable(engine, setting.draft(args.gamma, None))) for setting in settings]
    todo = [cell for cell in work if ledger.find(kind=cell[0], length=cell[1]) is None]
    for kind, length in tqdm(todo, desc="needles", unit="cell", leave=False):
        right, tallies = measure_cell(engine, work[kind, length], policies)
        ledger.add(
            {
                "kind": kind,
                "length": length,
                "right": right,
                "settings": [
                    {"policy": t.setting.policy, "budget": t.setting.budget, "prompts": t.prompts} for t in tallies
                ],
            }
        )
        answered = "" if kind == "prose" else f", {sum(map(bool, right))} of {len(right)} answered right"
        tqdm.write(f"{kind:<8}{length:>7,} tokens{answered}")
    results = [r for r in ledger.results if (r["kind"], r["length"]) in work]
    summary = summarize(results)
    ledger.write(summary=summary, skipped=skipped)
    print_needles(summary)
    if args.plot:
        draw_needles(summary, f"{subject.name}, {subject.dtype}, gamma {args.gamma}", args.plot)


def print_needles(summary: Sequence[Record]) -> None:
    """Acceptance with its interval, tokens a round, and the lead over streaming on the same prompts."""
    for kind, subset in dict.fromkeys((r["kind"], r["prompts"]) for r in summary):
        rows = [r for r in summary if (r["kind"], r["prompts"]) == (kind, subset)]
        which = "" if kind == "prose" else " answered right" if subset == "right" else ", all of them"
        print(f"\n{kind}, {rows[0]['n']} prompts{which}")
        head = f"{'acceptance':>12}{'95 %':>16}{'tokens/round':>14}{'95 %':>14}{'over streaming':>17}"
        print(f"  {'policy':<12}{'budget':>7}{head}{'95 %':>18}  above/below")
        for r in sorted(rows, key=lambda r: (r["budget"] or 0, r["policy"] != "streaming")):
            low, high = r["acceptance_interval"]
            tokens_low, tokens_high = r["tokens_per_round_interval"]
            line = (
                f"  {r['policy']:<12}{r['budget'] or '-':>7}{r['acceptance_rate']:>12.1%}{f'{low:.1%} {high:.1%}':>16}"
                f"{r['tokens_per_round']:>14.2f}{f'{tokens_low:.2f} {tokens_high:.2f}':>14}"
            )
            if "over_streaming" in r:
                low, high = r["over_streaming_interval"]
                line += (
                    f"{r['over_streaming']:>+17.1%}{f'{low:+.1%} {high:+.1%}':>18}"
                    f"  {r['prompts_above_streaming']}/{r['prompts_below_streaming']}"
                )
            print(line)


def draw_needles(summary: Sequence[Record], title: str, path: Path) -> None:
    """One panel a kind: acceptance over the budget with its interval, on prompts answered right if these are enough."""
    pyplot = load_pyplot()
    from matplotlib.ticker import PercentFormatter

    kinds = [*dict.fromkeys(r["kind"] for r in summary)]
    figure, axes = pyplot.subplots(
        1, len(kinds), figsize=(2 + 3.4 * len(kinds), 4.0), squeeze=False, sharey=True, layout="constrained"
    )
    policies = [*dict.fromkeys(r["policy"] for r in summary)]
    for panel, kind in zip(axes[0], kinds, strict=True):
        enough = [r for r in summary if r["kind"] == kind and r["prompts"] == "right" and r["n"] >= ENOUGH]
        subset = "right" if enough else "all"
        rows = [r for r in summary if (r["kind"], r["prompts"]) == (kind, subset)]
        for color, policy in enumerate(policies):
            ours = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["budget"] or 0)
            if not ours:
                continue
            if ours[0]["budget"] is None:
                panel.axhline(ours[0]["acceptance_rate"], color=f"C{color}", linestyle="--", label=policy)
                continue
            middle = [r["acceptance_rate"] for r in ours]
            ends = [[abs(r["acceptance_interval"][i] - r["acceptance_rate"]) for r in ours] for i in (0, 1)]
            where = [r["budget"] * (1 + 0.03 * (color - len(policies) / 2)) for r in ours]  # side by side
            panel.errorbar(where, middle, yerr=ends, fmt="o-", color=f"C{color}", label=policy, capsize=2, markersize=4)
        budgets = sorted({r["budget"] for r in rows if r["budget"]})
        panel.set_xscale("log", base=2)
        panel.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
        panel.set_xlabel("draft budget")
        panel.set_title(f"{kind}, {rows[0]['n']} prompts{' answered right' if subset == 'right' else ''}", fontsize=10)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("accepted drafts, 95 % interval")
    axes[0][0].yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(policies), frameon=False
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- command line ----------------------------------------------------------------------------------------------------


def cells_of(text: str) -> list[tuple[int, int]]:
    """Contexts and batches: "16000x8,512x1"."""
    cells = []
    for part in text.split(","):
        context, times, batch = part.strip().partition("x")
        if not times:
            raise argparse.ArgumentTypeError(f"expected context x batch, as in 16000x8,512x1; got {text!r}")
        cells.append((whole_number(context), whole_number(batch)))
    return list(dict.fromkeys(cells))


def gammas_of(text: str) -> list[int | str]:
    """Whole numbers, or auto: "2,4,auto"."""
    return list(
        dict.fromkeys(part.strip() if part.strip() == "auto" else whole_number(part) for part in text.split(","))
    )


def kinds_of(text: str) -> list[str]:
    """Names of KINDS: "needle,prose"."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    return list(dict.fromkeys(names))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Callable[..., argparse.Action]:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        add = sub.add_argument
        add("--texts", metavar="FILE", type=Path, nargs="+", required=True, help="UTF-8 texts unknown to the model")
        add("--model", default="bundled", help="'bundled', a model folder, or a hub id (default: bundled)")
        add("--json", metavar="FILE", type=Path, help="keep every result here; go on from what it holds")
        add("--threads", metavar="N", type=whole_number, default=torch.get_num_threads(), help="of torch")
        return add

    for name, text, cells, policies, gammas, pairs, seconds in (
        ("speed", "speculative over plain decoding, cell by cell", "16000x8,8000x1,512x1,512x8",
         "streaming,snapkv,quest,guided", "4", 7, 0.0),
        ("auto", "what gamma auto costs where drafting does not pay", "512x1,512x8", "streaming", "auto", 15, 30.0),
    ):  # fmt: skip
        add = command(name, speed, text)
        add("--cells", metavar="SxB", type=cells_of, default=cells_of(cells), help=f"default: {cells}")
        add("--policies", metavar="P,P", type=drafters, default=drafters(policies), help=f"default: {policies}")
        add("--budgets", metavar="K,K", type=whole_numbers, default=[256], help="default: 256")
        add("--gammas", metavar="N,N", type=gammas_of, default=gammas_of(gammas), help=f"default: {gammas}")
        add("--pairs", metavar="N", type=whole_number, default=pairs, help=f"pairs of timed runs (default: {pairs})")
        add(
            "--seconds", metavar="S", type=float, default=seconds,
            help=f"go on with pairs until they took so long: short runs need many (default: {seconds:g})",
        )  # fmt: skip
        add("--new-tokens", metavar="N", type=whole_number, default=96, help="tokens a row and run (default: 96)")
        add(
            "--waves", metavar="N", type=whole_number, default=1,
            help="ask for every prompt N times: rows that are done are refilled, as in a busy engine (default: 1)",
        )  # fmt: skip
        add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
        add("--draft-model", metavar="M", help="folder, GGUF file or hub id of a standalone draft model")
        add("--dtype", default="auto", help="fp32, bf16, fp16 or auto (default: auto)")
        add("--no-compile", dest="compile", action="store_false", help="run eagerly: for tests, not for numbers")
        add("--plot", metavar="FILE.png", type=Path, help="draw the ratios")

    add = command("lossless", lossless, "token-identical to plain decoding, every policy, fp32")
    add("--prompts", metavar="N", type=whole_number, default=200, help="default: 200")
    add("--shortest", metavar="N", type=whole_number, default=20, help="tokens of the shortest prompt (default: 20)")
    add("--longest", metavar="N", type=whole_number, default=1500, help="tokens of the longest prompt (default: 1500)")
    add("--new-tokens", metavar="N", type=whole_number, default=32, help="tokens to add to each prompt (default: 32)")
    add("--batch-size", metavar="B", type=whole_number, default=8, help="slots (default: 8)")
    add(
        "--policies",
        metavar="P,P",
        type=drafters,
        default=list(known_drafters()),
        help=f"default: {','.join(known_drafters())}",
    )
    add("--budget", metavar="K", type=whole_number, default=64, help="so small that views leave much out (default: 64)")
    add("--gamma", metavar="N", type=whole_number, default=4, help="tokens drafted a round (default: 4)")
    add(
        "--draft-model",
        metavar="M",
        help="standalone draft model, a folder, GGUF file or hub id (default: the model itself, with a sparse view)",
    )
    add("--seed", metavar="S", type=whole_number, default=1, help="of the prompts (default: 1)")
    add("--dtype", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    add("--no-compile", dest="compile", action="store_false", help="run eagerly")

    add = command("needles", needles, "acceptance where the answer lies far back, beside prose")
    add("--kinds", metavar="K,K", type=kinds_of, default=list(KINDS), help=f"default: {','.join(KINDS)}")
    add("--lengths", metavar="N,N", type=whole_numbers, default=[512, 1024, 2048], help="default: 512,1024,2048")
    add("--n", metavar="N", type=whole_number, default=40, help="prompts of each kind and length (default: 40)")
    add("--batch-size", metavar="B", type=whole_number, default=4, help="prompts decoded together (default: 4)")
    add(
        "--policies", metavar="P,P", type=drafters, default=["streaming", "snapkv", "quest", "guided"],
        help="default: streaming,snapkv,quest,guided",
    )  # fmt: skip
    add("--budgets", metavar="K,K", type=whole_numbers, default=[64, 96, 128, 256], help="default: 64,96,128,256")
    add("--gamma", metavar="N", type=whole_number, default=4, help="tokens drafted a round (default: 4)")
    add("--seed", metavar="S", type=whole_number, default=1, help="of the prompts (default: 1)")
    add("--dtype", default="auto", help="fp32, bf16, fp16 or auto (default: auto)")
    add("--compile", action="store_true", help="compile the steps: pays off from some thousands of prompts on")
    add("--plot", metavar="FILE.png", type=Path, help="draw acceptance over the budget")
    args = parser.parse_args(argv)
    args.draft_model = getattr(args, "draft_model", None)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what was asked for, or say in one sentence why not."""
    args = parse(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
