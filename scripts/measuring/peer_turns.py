"""Peers that decode the same rows in turns: what each step took, and how far its tokens are those of fp32.

Shapes: B batch rows, S tokens a row holds, V vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpt_fast_sd.model import ModelConfig
from inputs import prompts
from measuring.chips import measure
from measuring.lossless import n_agreeing
from measuring.peers import AS_IT_COMES, Entry, Field, PeerFailed, PeerMissing, Setup, Worker, entries
from measuring.tables import Column, Table, number

WARMUP_STEPS = 3
INSTALL = {
    "ours": "pip install -e .",
    "transformers": "pip install transformers",
    "transformers-compiled": "pip install transformers (and a C++ compiler for torch.compile)",
    "gpt-fast": "github.com/pytorch-labs/gpt-fast at 32971d3, in a folder that GPT_FAST names; pip install tiktoken",
    "llama.cpp": 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python gguf',
}
INSTALL["llama.cpp-file"] = INSTALL["llama.cpp"]


def prompt_tokens(folder: Path, config: ModelConfig, text: Path, length: int) -> list[int]:
    tokenizer = prompts.reader_of(folder, folder, config)
    return prompts.round_the_text(prompts.tokens_of(text, tokenizer), 1, length, config.bos_id)[0]


def read_bandwidth() -> float:
    return measure(torch.device("cpu"), n_bytes=2**30, size=64, dtype=torch.float32, repeats=10).read / 1e9


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of 16-bit weights that a step reads; of an untied input embedding it reads B rows only."""
    unread = 0 if config.tie_embeddings else config.vocab_size * config.dim
    return 2 * (config.n_params - unread)


@dataclass(kw_only=True)
class Timing:
    """What one entry did in one cell."""

    entry: Entry
    prefill_seconds: float
    tokens: list[list[int]]  # [steps, B], from the first one on
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers computes in fp32: greedy tokens [n] and each one's lead over the runner-up [n]."""

    tokens: list[int]
    gaps: list[float]

    def agreement(self, tokens: Sequence[list[int]]) -> dict[str, Any]:
        """How many leading tokens of row 0 are the same, and how close the choice was where they part."""
        pairs = list(zip(self.tokens, (row[0] for row in tokens), strict=False))
        agreed = n_agreeing(*zip(*pairs, strict=True)) if pairs else 0
        return {
            "agreed": agreed, "compared": len(pairs),
            "fp32_logit_gap_where_they_part": None if agreed == len(pairs) else self.gaps[agreed],
            "rows_alike": all(len(set(row)) == 1 for row in tokens[: len(pairs)]),
        }  # fmt: skip


class Run(Field):
    """One run of the benchmark: its settings, the peers still in it, and the report it grows."""

    def __init__(
        self, setup: Setup, peers: Sequence[str], without: Sequence[str], *, steps: int, repeats: int, agree: int
    ) -> None:
        """without: modes that are not timed. steps: timed ones of a block. repeats: blocks. agree: tokens compared."""
        super().__init__(setup, (entry for peer in peers for entry in entries(peer, "bf16")), without)
        self.peers, self.steps, self.repeats, self.agree = peers, steps, repeats, agree
        self.prompt: list[int] = []
        self.workers: dict[Entry, Worker] = {}
        self.skipped: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    @property
    def decoded(self) -> int:
        return 1 + WARMUP_STEPS + self.repeats * (1 + self.steps)

    def skip(self, peer: str, reason: str) -> None:
        self.skipped[peer] = reason
        self.entries = [entry for entry in self.entries if entry.peer != peer]
        print(f"  skipped {peer}: {reason}. To install it: {INSTALL[peer]}", flush=True)

    def worker(self, entry: Entry) -> Worker:
        if entry not in self.workers:
            self.workers[entry] = Worker(entry, self.setup)
            self.notes[entry.peer] = self.workers[entry].notes
        return self.workers[entry]

    def find_missing(self) -> None:
        """Start every timed entry once; peers that are not installed are skipped by name."""
        for entry in [*self.entries]:
            try:
                if entry.peer not in self.skipped:
                    self.worker(entry)
            except PeerMissing as reason:
                self.skip(entry.peer, str(reason))
            except PeerFailed as reason:
                self.fail(entry, "bf16, start", reason)
                self.entries.remove(entry)

    def reference(self, context: int) -> Reference | None:
        """The tokens that every peer should emit after this context, or None without transformers."""
        entry = Entry(peer="transformers", mode="eager", dtype="fp32", attention="eager")
        try:
            with contextlib.closing(Worker(entry, self.setup)) as worker:
                worker.call("reserve", 1, context + self.agree)
                calls: list[tuple[Any, ...]] = [("prefill", self.prompt[:context]), *[("step",)] * (self.agree - 1)]
                told = [(worker.call(*one)[0], worker.call("top2_gap")) for one in calls]
        except (PeerMissing, PeerFailed) as reason:
            print(f"  no fp32 reference at context {context}: {reason}")
            return None
        return Reference(tokens=[token for token, _ in told], gaps=[gap for _, gap in told])

    def agreement_in_fp32(self, context: int, reference: Reference) -> dict[str, Any]:
        """Every peer in fp32 against the reference, two rows each, by label."""

        def agreement(entry: Entry) -> dict[str, Any]:
            with contextlib.closing(Worker(entry, self.setup)) as worker:
                worker.call("reserve", 2, context + self.agree)
                tokens = [worker.call("prefill", self.prompt[:context])]
                return reference.agreement(tokens + worker.call("steps", self.agree - 1, 0)[0])

        report = {}
        for entry in (one for peer in self.peers if peer not in self.skipped for one in entries(peer, "fp32")):
            if found := self.attempt(entry, f"fp32, context {context}", agreement, entry):
                report[entry.label] = found
                print(f"  {entry.label:<62}{agreement_phrase(found)}", flush=True)
        return report

    def cell(self, context: int, batch: int) -> list[Timing]:
        """Prefill every entry, then let them take turns -> what each one took."""
        timings: dict[Entry, Timing] = {}

        def prepare(entry: Entry) -> Timing:
            worker = self.worker(entry)
            worker.call("reserve", batch, context + self.decoded)
            start = time.perf_counter()
            first = worker.call("prefill", self.prompt[:context])
            timings[entry] = Timing(entry=entry, prefill_seconds=time.perf_counter() - start, tokens=[first])
            timings[entry].tokens += worker.call("steps", WARMUP_STEPS, 0)[0]
            return timings[entry]

        def take_turn(entry: Entry) -> Timing:
            tokens, milliseconds = self.worker(entry).call("steps", 1, self.steps)
            timings[entry].tokens += tokens
            timings[entry].milliseconds += milliseconds
            return timings[entry]

        turns, where = [prepare, *[take_turn] * self.repeats], f"bf16, context {context}, batch {batch}"
        return [timings[entry] for entry in self.in_turns(self.entries, where, turns)]

    def fail(self, entry: Entry, where: str, reason: Exception) -> None:
        super().fail(entry, where, reason)
        self.workers.pop(entry, None)  # another cell may start it again

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def cell_report(
    timings: list[Timing], context: int, batch: int, needs: dict[str, Any], reference: Reference | None
) -> dict[str, Any]:
    """One cell as plain data: every entry beside the roofline and beside ours."""
    fastest = {peer: min(t.median for t in timings if t.entry.peer == peer) for peer in {t.entry.peer for t in timings}}
    ceilings = {True: "file_roofline_ms", False: "roofline_ms"}  # by whether the file's own bytes are read
    rows = [
        {
            "peer": t.entry.peer, "mode": t.entry.mode, "counts": t.median == fastest[t.entry.peer],
            "ms_per_step": {"median": t.median, "min": min(t.milliseconds), "max": max(t.milliseconds)},
            "tokens_per_second": batch / t.median * 1e3,
            "percent_of_roofline": 100 * needs[ceilings[t.entry.weights == AS_IT_COMES]] / t.median,
            "time_over_ours": t.median / fastest["ours"] if "ours" in fastest else None,
            "prefill_one_row_seconds": t.prefill_seconds,
            "prefill_tokens_per_second": context / t.prefill_seconds,
            "greedy": reference.agreement(t.tokens) if reference else None,
            "first_tokens": [row[0] for row in t.tokens[:16]],
        }
        for t in timings
    ]  # fmt: skip
    return {"context": context, "batch": batch, **needs, "results": rows}


def agreement_phrase(greedy: dict[str, Any] | None) -> str:
    if greedy is None:
        return "-"
    phrase = f"{greedy['agreed']}/{greedy['compared']}"
    if greedy["fp32_logit_gap_where_they_part"] is not None:
        phrase += f", gap {greedy['fp32_logit_gap_where_they_part']:.3f}"
    return phrase if greedy["rows_alike"] else phrase + ", rows differ"


CELL = Table(
    Column("peer", lambda r: f"{'*' if r['counts'] else ' '} {r['peer']}{' (' + r['mode'] + ')' if r['mode'] else ''}",
           62, left=True),
    number("ms/step", "ms_per_step.median", ".2f", 7), number("min", "ms_per_step.min", ".2f", 7),
    number("max", "ms_per_step.max", ".2f", 7), number("tok/s", "tokens_per_second", ".0f"),
    number("% roof", "percent_of_roofline", ".0f"), number("/ ours", "time_over_ours", ".2f"),
    number("prefill/s", "prefill_tokens_per_second", ",.0f"),
    Column("same tokens as fp32", lambda r: agreement_phrase(r["greedy"]), left=True),
)  # fmt: skip
