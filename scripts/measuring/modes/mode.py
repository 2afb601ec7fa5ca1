"""What every measurement has: a checked job, points, a file that it goes on from, and a line for each result."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from gpt_fast_sd.config import EngineConfig, SamplingParams
from gpt_fast_sd.engine import Engine
from gpt_fast_sd.loading import TORCH_DTYPES, locate, natural_dtype
from gpt_fast_sd.model import ModelConfig, Tokenizer, read_stored_dtype
from gpt_fast_sd.policies.config import DraftConfig
from gpt_fast_sd.tp import Parallel
from measuring import grid, machine
from measuring.grid import Point, Setting, Sweep, draft_fields
from measuring.ledger import Ledger
from measuring.tables import Table

Record = dict[str, Any]


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
    settings: list[Setting]
    skipped: dict[str, str]
    told: Callable[[Exception], str]

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
        config = replace(self.engine_config, batch_size=batch, max_seq_len=room)
        return Engine.from_pretrained(args.model, config, draft, parallel=self.parallel)


def params_of(args: argparse.Namespace, temperature: float, row: int) -> SamplingParams:
    """How a row is continued; ValueError where the flags make no sense."""
    seed = (args.seed + row) % 2**63 if temperature else None
    filters = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p")}
    return SamplingParams(
        max_tokens=args.max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True, **filters
    )


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
            self.job.skipped[point.setting.label] = self.job.told(found)
            self.bar.write(f"skipped {point.setting.label}: {self.job.told(found)}")
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
