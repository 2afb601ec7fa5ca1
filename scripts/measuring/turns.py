"""Plain and speculative decoding of the same prompts in turns: the ratio of a pair of runs is what counts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.serving.stats import EngineStats
from measuring.lossless import first_difference
from measuring.roofline import omega

SHORT = 16  # new tokens of the untimed runs: every step has run once, and all slots are prefilled
WAYS = ("plain", "speculative")
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # quantiles of Student's t, two-sided
T = TypeVar("T")
Way = TypeVar("Way")
Record = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """An event of a stream: when it came (captures not counted), whose it was, its tokens, whether it was the last."""

    seconds: float
    row: int
    tokens: int
    is_last: bool


def steady_speed(marks: Sequence[Mark]) -> float | None:
    """Tokens per second from the end of the first round to that of the last in which no row ended; None for one round.

    In a round every live row has one event, and they come together: when a row comes again, another round begins.
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
    """One run of all prompts to their ends."""

    stats: EngineStats
    steady: float | None  # tokens per second
    outputs: list[list[int]]

    @property
    def completion(self) -> float:
        return self.stats.decode_tokens_per_second


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, speculate: bool = True,
    finished: Callable[[int], object] = lambda index: None,
) -> Run:  # fmt: skip
    """Decode all prompts; finished is called with the index of each that ends."""
    marks, outputs = [], [[0]] * len(prompts)
    for event in engine.stream(prompts, params, speculate=speculate):
        now = time.perf_counter() - engine.stats.capture_seconds
        marks.append(Mark(now, event.index, len(event.tokens), event.completion is not None))
        if event.completion:
            outputs[event.index] = event.completion.tokens
            finished(event.index)
    return Run(engine.stats, steady_speed(marks), outputs)


@dataclass(frozen=True)
class Turns:
    """Plain and speculative runs of the same prompts, pair by pair, and the untimed run that prefilled them."""

    plain: list[Run] = field(default_factory=list)
    speculative: list[Run] = field(default_factory=list)
    prefill: EngineStats = field(default_factory=EngineStats)
    capture_seconds: float = 0.0  # of the untimed runs
    sets: int = 1  # of prompts, one after another

    @staticmethod
    def together(sets: Sequence[Turns]) -> Turns:
        """As many pairs of several sets of as many prompts."""
        return Turns(
            [one for each in sets for one in each.plain], [one for each in sets for one in each.speculative],
            sum((each.prefill for each in sets), EngineStats()), sum(each.capture_seconds for each in sets), len(sets),
        )  # fmt: skip

    @property
    def over_sets(self) -> Record | None:
        """The mean of the sets' median ratios to completion, and its interval of 95 % by Student's t; None for one."""
        found, per = self.ratios(), len(self.plain) // self.sets
        if self.sets == 1 or not found:
            return None
        medians = [statistics.median(found[i : i + per]) for i in range(0, len(found), per)]
        df, mean = self.sets - 1, statistics.fmean(medians)
        quantile = T_95[df - 1] if df <= len(T_95) else 1.96 + 2.5 / df
        half = quantile * statistics.stdev(medians) / math.sqrt(self.sets)
        return {"sets": medians, "mean": mean, "interval": [mean - half, mean + half]}

    def ratios(self, speed: str = "completion") -> list[float]:
        """Speculative over plain speed of each pair, "steady" or "completion"; empty if a run was too short."""
        pairs = [(getattr(s, speed), getattr(p, speed)) for p, s in zip(self.plain, self.speculative, strict=True)]
        return [s / p for s, p in pairs] if all(s and p for s, p in pairs) else []

    @property
    def counts(self) -> EngineStats:
        return totals(self.speculative)

    @property
    def first_differences(self) -> list[Record]:
        """Where a speculative output first differs from the plain one of its pair: row and position."""
        found, per = dict[int, int](), max(1, len(self.plain) // self.sets)
        for i, (plain, speculative) in enumerate(zip(self.plain, self.speculative, strict=True)):
            first = i // per * len(plain.outputs)  # row of its set
            for row, outputs in enumerate(zip(plain.outputs, speculative.outputs, strict=True), start=first):
                if (at := first_difference(*outputs)) is not None:
                    found[row] = min(at, found.get(row, at))
        return [{"row": row, "position": found[row]} for row in sorted(found)]

    @property
    def acceptance(self) -> Record:
        """How many drafts were kept, and how much of the outputs repeats itself; JSON-ready."""
        counts = self.counts
        outputs = {way: [row for one in getattr(self, way) for row in one.outputs] for way in WAYS}
        return {
            "acceptance_rate": counts.acceptance_rate, "acceptance_by_position": counts.acceptance_by_position,
            "distinct_4grams": {way: distinct_4grams(rows) for way, rows in outputs.items()},
        }  # fmt: skip

    @property
    def rounds_by_gamma(self) -> Record:
        return {str(gamma): n for gamma, n in sorted(self.counts.rounds_by_gamma.items())}

    @property
    def by_steps(self) -> float | None:
        """The ratio Omega T_T / (gamma T_D + T_V) of measured steps, hosts ignored; None if parts were not timed."""
        alpha, found = alpha_of(self.counts), []
        for plain, speculative in zip(self.plain, self.speculative, strict=True):
            spent = speculative.stats.draft_seconds + speculative.stats.verify_seconds
            if not (spent and plain.stats.verify_seconds):
                return None
            step, round_ = plain.stats.verify_seconds / plain.stats.rounds, spent / speculative.stats.rounds
            found.append(tokens_by_alpha(speculative.stats, alpha) * step / round_)
        return statistics.median(found) if found else None


def in_turns(ways: Sequence[Way], once: Callable[[Way, int], T], more: Callable[[int], object]) -> dict[Way, list[T]]:
    """The results of each way, which take turns, in every other turn in reversed order; more: whether a turn comes."""
    found: dict[Way, list[T]] = {way: [] for way in ways}
    turn = 0
    while more(turn):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            found[way].append(once(way, turn))
        turn += 1
    return found


def shortened(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    return [replace(p, max_tokens=min(SHORT, p.max_tokens)) for p in params]


def take_turns(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], n: int, *,
    seconds: float = 0.0, progress: Callable[[str], object] = lambda what: None,
) -> Turns:  # fmt: skip
    """n pairs of runs, or as many as take this long, after an untimed short one of each kind; the order alternates."""
    progress("prefill")
    prefill, plain = (run(engine, prompts, shortened(params), speculate=way).stats for way in (True, False))
    done = list[Run]()

    def once(speculate: bool, turn: int) -> Run:
        done.append(run(engine, prompts, params, speculate=speculate))
        return done[-1]

    def more(turn: int) -> bool:
        took = sum(one.stats.decode_seconds for one in done)
        wanted = bool(engine.parallel.same(turn < n or took < seconds))  # each process has its own clock
        if wanted:
            progress(f"pair {turn + 1} of {max(n, turn + 1)}")
        return wanted

    runs = in_turns((False, True), once, more)
    return Turns(runs[False], runs[True], prefill, prefill.capture_seconds + plain.capture_seconds)


def totals(runs: Sequence[Run]) -> EngineStats:
    return sum((one.stats for one in runs), EngineStats())


def spread(values: Sequence[float]) -> Record:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def median_interval(values: Sequence[float]) -> list[float]:
    """The two values between which the median is with a chance of 95 %, whatever their distribution."""
    n, outside, below = len(values), 0, 0.0
    while 2 * (below := below + math.comb(n, outside) / 2**n) <= 0.05:
        outside += 1
    ordered = sorted(values)
    return [ordered[outside - 1 if outside else 0], ordered[-outside if outside else -1]]


def round_ms(runs: Sequence[Run]) -> Record:
    """Milliseconds of a round and of its parts, None where it is one graph: medians, so that no interruption counts."""
    found: Record = {
        part: 1e3 * statistics.median(getattr(one.stats, name) / one.stats.rounds for one in runs)
        for part, name in (
            ("round", "decode_seconds"), ("draft", "draft_seconds"), ("verify", "verify_seconds"),
            ("host", "host_seconds"),
        )
    }  # fmt: skip
    return found if found["verify"] else {**found, "draft": None, "verify": None, "host": None}


def distinct_4grams(outputs: Sequence[Sequence[int]]) -> float | None:
    """The share of distinct ones among each row's runs of four tokens, its mean over the rows; 1: nothing repeats.

    Text that repeats itself is easy to draft. Rows of fewer than four tokens do not count; None if there are no others.
    """
    rows = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in outputs]
    shares = [len(set(runs)) / len(runs) for runs in rows if runs]
    return statistics.fmean(shares) if shares else None


def alpha_of(stats: EngineStats) -> float:
    """The chance that a draft is accepted if those before it were: accepted over reached drafts."""
    drafted, accepted = stats.drafted_by_position, stats.accepted_by_position
    reached = sum(min(judged, before) for judged, before in zip(drafted, [*drafted[:1], *accepted], strict=False))
    return sum(accepted) / reached if reached else 0.0


def tokens_by_alpha(stats: EngineStats, alpha: float) -> float:
    """Tokens per row and round by Omega, at the run's gammas and its share of row rounds that drafted at all."""
    rounds = sum(stats.rounds_by_gamma.values())
    drafting = sum(n for gamma, n in stats.rounds_by_gamma.items() if gamma)
    if not drafting or not stats.drafted:
        return 1.0
    share = min(1.0, stats.drafted_by_position[0] / (stats.row_rounds * drafting / rounds))
    return sum(n * (1 + share * (omega(g, alpha) - 1)) for g, n in stats.rounds_by_gamma.items()) / rounds


def way_of(runs: Sequence[Run], batch: int) -> Record:
    """One way of decoding, JSON-ready: medians over its runs; ms_per_token is how long a row waits for a token."""
    speeds = {name: [getattr(one, name) for one in runs] for name in ("steady", "completion")}
    middle = {name: statistics.median(found) if None not in found else None for name, found in speeds.items()}
    total = totals(runs)
    return {
        "tokens_per_second": middle,
        "ms_per_token": {name: 1e3 * batch / speed if speed else None for name, speed in middle.items()},
        "round_ms": round_ms(runs), "tokens_per_round": total.tokens_per_round,
        "kv_bytes_per_token": total.kv_bytes_per_token, "runs": speeds,
    }  # fmt: skip
