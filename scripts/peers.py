"""Time plain decoding of one model in this engine, transformers and llama.cpp: same weights, prompt, dtype and threads.

    python scripts/peers.py                                   # the bundled model, everything that is installed
    python scripts/peers.py --model FOLDER --contexts 512,8192 --batches 1,8 --json peers.json --plot peers.png
    python scripts/peers.py --model smollm2 --contexts 512,2000 --json peers.json   # or FILE.gguf

What is compared, and why it is fair:
* Decoding only. Prefill is timed apart: one row is prefilled and its keys and values are *copied* into the other rows,
  so every row has its own memory and a step reads all of it. For llama.cpp that takes one stream per sequence
  (kv_unified=False, where copying a sequence copies buffers; in a unified cache it would only share cells, and a step
  would read 1/B of the bytes). The size of the KV buffer that llama.cpp reports is checked against B full rows.
* Every peer runs in a process of its own, with the same number of threads; the others wait on a pipe meanwhile. Peers
  take turns, A B C A B C: a block of steps each, its first step untimed (caches and thread pools wake up).
* Every mode of a peer is timed and the fastest counts (marked *): transformers with sdpa and eager attention; its
  static cache under torch.compile with both; llama.cpp with F16 and BF16 weights and KV, flash attention off and on.
* A GGUF file is dequantized to 16 bits once, for all peers alike. llama.cpp is timed on the file as it comes, too, as a
  peer of its own: it then reads fewer bytes per weight, which its ceiling takes into account, and computes in 8 bits.
* Each mode holds a model and all rows of its own at the same time: --without leaves out what memory cannot hold.
* Prefill is timed once per cell and mode: tokens/s of the one row, its copying into the others included.
* The ceiling is the time to read the weights and the context's keys and values once, at the read bandwidth that this
  machine shows in this run. Cells that fit into a CPU cache can pass 100 %.
* Greedy tokens are compared with transformers in fp32: every peer in fp32 (they must agree), and every timed cell in
  its own dtype (where rounding may decide between near-equal logits: the gap there is shown).

--json FILE is whole after every cell. Started again with the same settings it goes on where it ended; contexts and
batches may be added. Other settings are refused; --fresh begins anew.

Shapes: B batch rows, S tokens a row holds, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from common import refuse, refusing, started
from files import check_files
from flags import MODELS, count, names_of, positive, sizes, threads
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.measuring import plots, prompts
from gpt_fast_sd.measuring.chips import measure
from gpt_fast_sd.measuring.gguf_export import export_gguf
from gpt_fast_sd.measuring.ledger import Ledger
from gpt_fast_sd.measuring.lossless import first_difference
from gpt_fast_sd.measuring.machine import environment
from gpt_fast_sd.measuring.peers import AS_IT_COMES, Entry, PeerFailed, PeerMissing, Setup, Worker, entries, one_line
from gpt_fast_sd.measuring.tables import Column, Table, shown
from gpt_fast_sd.model import ModelConfig, gguf_parts, load_model, load_tokenizer, read_config, save_hugging_face

PROGRAM = "peers.py"
PACKAGES = ("torch", "transformers", "llama-cpp-python", "gguf")
WARMUP_STEPS = 3
INSTALL = {
    "ours": "pip install -e .",
    "transformers": "pip install transformers",
    "transformers-compiled": "pip install transformers (and a C++ compiler for torch.compile)",
    "llama.cpp": 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python gguf',
}
INSTALL["llama.cpp-file"] = INSTALL["llama.cpp"]


# ------------------------------------------------------------------------------------------ prompt and ceiling


def prompt_tokens(folder: Path, config: ModelConfig, text: Path, length: int) -> list[int]:
    """BOS and the text's tokens, repeated or cut to length [S]."""
    tokenizer = load_tokenizer(folder, config)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer to read the prompt's text with")
    return prompts.round_the_text(prompts.tokens_of(text, tokenizer), 1, length, config.bos_id)[0]


def read_bandwidth() -> float:
    """GB/s at which torch reads 1 GiB."""
    return measure(torch.device("cpu"), n_bytes=2**30, size=64, dtype=torch.float32, repeats=10).read / 1e9


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of 16-bit weights that a step reads; of an untied input embedding it reads B rows only."""
    unread = 0 if config.tie_embeddings else config.vocab_size * config.dim
    return 2 * (config.n_params - unread)


# --------------------------------------------------------------------------------------------- the measurement


@dataclass(kw_only=True)
class Timing:
    """What one entry did in one cell."""

    entry: Entry
    prefill_seconds: float
    tokens: list[list[int]]  # [steps, B], from the first one on
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Milliseconds per step; half of the steps took less."""
        return statistics.median(self.milliseconds)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers computes in fp32: greedy tokens [n] and each one's lead over the runner-up [n]."""

    tokens: list[int]
    gaps: list[float]

    def agreement(self, tokens: Sequence[list[int]]) -> dict[str, Any]:
        """How many leading tokens of row 0 are the same, and how close the choice was where they part."""
        pairs = list(zip(self.tokens, (row[0] for row in tokens), strict=False))
        parted = first_difference(*zip(*pairs, strict=True)) if pairs else None
        agreed = len(pairs) if parted is None else parted
        return {
            "agreed": agreed, "compared": len(pairs),
            "fp32_logit_gap_where_they_part": None if agreed == len(pairs) else self.gaps[agreed],
            "rows_alike": all(len(set(row)) == 1 for row in tokens[: len(pairs)]),
        }  # fmt: skip


class Run:
    """One run of the benchmark: its settings, the peers still in it, and the report it grows."""

    def __init__(self, args: argparse.Namespace, setup: Setup) -> None:
        self.args, self.setup = args, setup
        self.prompt: list[int] = []
        timed = [entry for peer in args.peers for entry in entries(peer, "bf16")]
        self.entries = [entry for entry in timed if entry.mode not in args.without]
        self.workers: dict[Entry, Worker] = {}
        self.skipped: dict[str, str] = {}
        self.failures: list[str] = []
        self.notes: dict[str, str] = {}

    @property
    def decoded(self) -> int:
        """Tokens that each row emits in a cell: one out of prefill, one per step."""
        return int(1 + WARMUP_STEPS + self.args.repeats * (1 + self.args.steps))

    def skip(self, peer: str, reason: str) -> None:
        """The peer takes no part from here on; the report names it."""
        self.skipped[peer] = reason
        self.entries = [entry for entry in self.entries if entry.peer != peer]
        print(f"  skipped {peer}: {reason}. To install it: {INSTALL[peer]}", flush=True)

    def fail(self, entry: Entry, where: str, reason: str) -> None:
        """Note a failure: this entry has no result there."""
        self.failures.append(f"{entry.label}, {entry.dtype}, {where}: {reason}")
        print(f"  failed: {self.failures[-1]}", flush=True)

    def worker(self, entry: Entry) -> Worker:
        """The entry's process, started when it is first asked for."""
        if entry not in self.workers:
            self.workers[entry] = Worker(entry, self.setup)
            self.notes[entry.peer] = self.workers[entry].notes
        return self.workers[entry]

    def find_missing(self) -> None:
        """Start every timed entry once; peers that are not installed are skipped by name."""
        for entry in list(self.entries):
            if entry.peer in self.skipped:
                continue
            try:
                self.worker(entry)
            except PeerMissing as reason:
                self.skip(entry.peer, str(reason))
            except PeerFailed as reason:
                self.fail(entry, "start", str(reason))
                self.entries.remove(entry)

    def reference(self, context: int) -> Reference | None:
        """The tokens that every peer should emit after this context, or None without transformers."""
        entry = Entry(peer="transformers", mode="eager", dtype="fp32", attention="eager")
        try:
            worker = Worker(entry, self.setup)
            worker.call("reserve", 1, context + self.args.agree)
            tokens = [worker.call("prefill", self.prompt[:context])[0]]
            gaps = [worker.call("top2_gap")]
            for _ in range(self.args.agree - 1):
                tokens.append(worker.call("step")[0])
                gaps.append(worker.call("top2_gap"))
            worker.close()
        except (PeerMissing, PeerFailed) as reason:
            print(f"  no fp32 reference at context {context}: {reason}")
            return None
        return Reference(tokens=tokens, gaps=gaps)

    def agreement_in_fp32(self, context: int, reference: Reference) -> dict[str, Any]:
        """Every peer in fp32 against the reference, two rows each, by label."""
        report = {}
        for peer in [peer for peer in self.args.peers if peer not in self.skipped]:
            for entry in entries(peer, "fp32"):
                try:
                    worker = Worker(entry, self.setup)
                    worker.call("reserve", 2, context + self.args.agree)
                    tokens = [worker.call("prefill", self.prompt[:context])]
                    tokens += worker.call("steps", self.args.agree - 1, 0)[0]
                    worker.close()
                    report[entry.label] = reference.agreement(tokens)
                    print(f"  {entry.label:<62}{agreement_phrase(report[entry.label])}", flush=True)
                except (PeerMissing, PeerFailed) as reason:
                    self.fail(entry, f"context {context}", str(reason))
        return report

    def cell(self, context: int, batch: int) -> list[Timing]:
        """Prefill every entry, then let them take turns -> what each one took."""
        timings: dict[Entry, Timing] = {}

        def attempt(entry: Entry, work: Callable[[Entry], None]) -> None:
            try:
                work(entry)
            except (PeerMissing, PeerFailed) as reason:
                self.fail(entry, f"context {context}, batch {batch}", str(reason))
                self.workers.pop(entry, None)
                timings.pop(entry, None)

        def prepare(entry: Entry) -> None:
            worker = self.worker(entry)
            worker.call("reserve", batch, context + self.decoded)
            start = time.perf_counter()
            first = worker.call("prefill", self.prompt[:context])
            timings[entry] = Timing(entry=entry, prefill_seconds=time.perf_counter() - start, tokens=[first])
            timings[entry].tokens += worker.call("steps", WARMUP_STEPS, 0)[0]

        def take_turn(entry: Entry) -> None:
            tokens, milliseconds = self.worker(entry).call("steps", 1, self.args.steps)
            timings[entry].tokens += tokens
            timings[entry].milliseconds += milliseconds

        for entry in self.entries:
            attempt(entry, prepare)
        for _ in range(self.args.repeats):
            for entry in list(timings):
                attempt(entry, take_turn)
        return list(timings.values())

    def close(self) -> None:
        """No process is left."""
        for worker in self.workers.values():
            worker.close()


# --------------------------------------------------------------------------------------------------- the report


def cell_report(
    timings: list[Timing], context: int, batch: int, needs: dict[str, Any], reference: Reference | None
) -> dict[str, Any]:
    """One cell as plain data: every entry beside the roofline and beside ours."""
    fastest = {peer: min(t.median for t in timings if t.entry.peer == peer) for peer in {t.entry.peer for t in timings}}
    rows = [
        {
            "peer": t.entry.peer, "mode": t.entry.mode, "counts": t.median == fastest[t.entry.peer],
            "ms_per_step": {"median": t.median, "min": min(t.milliseconds), "max": max(t.milliseconds)},
            "tokens_per_second": batch / t.median * 1e3,
            "percent_of_roofline": 100 * needs[roofline_of(t.entry)] / t.median,
            "time_over_ours": t.median / fastest["ours"] if "ours" in fastest else None,
            "prefill_one_row_seconds": t.prefill_seconds,
            "prefill_tokens_per_second": context / t.prefill_seconds,
            "greedy": reference.agreement(t.tokens) if reference else None,
            "first_tokens": [row[0] for row in t.tokens[:16]],
        }
        for t in timings
    ]  # fmt: skip
    return {"context": context, "batch": batch, **needs, "results": rows}


def roofline_of(entry: Entry) -> str:
    """The name of the ceiling that holds for it among what a cell needs."""
    return "file_roofline_ms" if entry.weights == AS_IT_COMES else "roofline_ms"


def agreement_phrase(greedy: dict[str, Any] | None) -> str:
    """One agreement as a table cell."""
    if greedy is None:
        return "-"
    phrase = f"{greedy['agreed']}/{greedy['compared']}"
    if greedy["fp32_logit_gap_where_they_part"] is not None:
        phrase += f", gap {greedy['fp32_logit_gap_where_they_part']:.3f}"
    return phrase if greedy["rows_alike"] else phrase + ", rows differ"


def entry_text(r: dict[str, Any]) -> str:
    """A peer and its mode, starred where it is the one that counts."""
    return f"{'*' if r['counts'] else ' '} {r['peer']}{' (' + r['mode'] + ')' if r['mode'] else ''}"


CELL = Table(
    Column("peer", entry_text, 62, left=True),
    Column("ms/step", lambda r: f"{r['ms_per_step']['median']:.2f}", 7),
    Column("min", lambda r: f"{r['ms_per_step']['min']:.2f}", 7),
    Column("max", lambda r: f"{r['ms_per_step']['max']:.2f}", 7),
    Column("tok/s", lambda r: f"{r['tokens_per_second']:.0f}"),
    Column("% roof", lambda r: f"{r['percent_of_roofline']:.0f}"),
    Column("/ ours", lambda r: shown(r["time_over_ours"], ".2f")),
    Column("prefill/s", lambda r: f"{r['prefill_tokens_per_second']:,.0f}"),
    Column("same tokens as fp32", lambda r: agreement_phrase(r["greedy"]), left=True),
)


def plot(cells: list[dict[str, Any]], title: str, file: Path) -> None:
    """Save one panel per cell: milliseconds per step of each peer's fastest mode, and the roofline."""
    rows: dict[int, list[Any]] = {}
    for cell in cells:
        bars = {
            row["peer"]: (ms := row["ms_per_step"]["median"], f" {ms:.2f} ms, {row['percent_of_roofline']:.0f} %")
            for row in cell["results"]
            if row["counts"]
        }
        name = f"context {cell['context']}, batch {cell['batch']}"
        rows.setdefault(cell["batch"], []).append((name, bars, cell["roofline_ms"]))
    plots.draw_bars(
        [*rows.values()], file, title=title, first="ours",
        xlabel="ms per step; dashed line and percentage: reading weights and KV once",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ command line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without the model."""
    about = "Time plain decoding in this engine, transformers and llama.cpp."
    parser = argparse.ArgumentParser(prog=PROGRAM, description=about)
    add = parser.add_argument
    add("--model", default="bundled", help=f"{MODELS} (default: bundled)")
    document = BUNDLED / "document.txt"
    add("--text", type=Path, default=document, help="of the prompt, repeated or cut (default: the bundled document)")
    add("--contexts", type=sizes, default=[512, 8192, 16000], help="tokens in the cache (default: 512,8192,16000)")
    add("--batches", type=sizes, default=[1, 8], help="rows (default: 1,8)")
    peers = list(INSTALL)
    add("--peers", type=names_of("peer", peers), default=peers, help=f"among {','.join(peers)} (default: all)")
    add("--without", metavar="MODE", nargs="+", default=[], help="not timed, as the table names them")
    add("--steps", type=positive, default=16, help="timed steps of a block (default: 16)")
    add("--repeats", type=positive, default=5, help="blocks each peer gets, in turns (default: 5)")
    add("--threads", type=threads, default=torch.get_num_threads(), help="of every peer (default: %(default)s)")
    add("--agree", type=count, default=16, help="greedy tokens compared with fp32 (default: 16; 0: none)")
    add("--json", metavar="FILE", help="keep one JSON document here, go on from it; - prints it as the last line")
    add("--fresh", action="store_true", help="forget what --json holds")
    add("--plot", type=Path, metavar="FILE", help="write a bar plot (PNG)")
    return parser.parse_args(argv)


def up_to_date(document: dict[str, Any]) -> None:
    """Let a file of an earlier version name what it did not name then, by the defaults."""
    document["settings"] = {"agree": 16, "without": [], **document["settings"]}


def benchmark(args: argparse.Namespace, ggufs: Path) -> dict[str, Any]:
    """Run everything, printing as it goes, and return the report; ValueError for input that makes no sense."""
    source = locate(args.model)
    config = read_config(source)
    if args.contexts[0] < 2:
        raise ValueError(f"a context has at least 2 tokens, got {args.contexts[0]}")
    is_file = source.suffix.lower() == ".gguf"
    peers = [peer for peer in args.peers if is_file or peer != "llama.cpp-file"]
    file = Path(args.json) if args.json and args.json != "-" else None
    if args.fresh and not file:
        raise ValueError("--fresh forgets what the file of --json holds, and there is none")
    settings = {
        "model": source.name, "transformer": asdict(config), "text": args.text.name, "threads": args.threads,
        "steps": args.steps, "repeats": args.repeats, "warmup": WARMUP_STEPS, "peers": peers,
        "agree": args.agree, "without": sorted(args.without),
    }  # fmt: skip
    torch.set_num_threads(args.threads)
    here = environment(torch.device("cpu"), *PACKAGES)
    ledger = Ledger(file, "peers", settings, here, fresh=args.fresh, results="cells", adapt=up_to_date)
    folder = source
    if is_file:  # every peer reads the same 16-bit weights
        folder = ggufs / source.stem
        save_hugging_face(load_model(source, dtype=torch.bfloat16), folder, dtype=torch.bfloat16)
        (ggufs / f"{AS_IT_COMES}.gguf").symlink_to(source.resolve())
    setup = Setup(folder=folder.resolve(), config=config, ggufs=ggufs, threads=args.threads)
    args.peers = peers
    run = Run(args, setup)
    room = config.max_seq_len - run.decoded
    if max(args.contexts) > room:
        raise ValueError(
            f"context {max(args.contexts)} and {run.decoded} decoded tokens pass the model's {config.max_seq_len} "
            f"positions; use at most {room}, or fewer --steps or --repeats"
        )
    run.prompt = prompt_tokens(source, config, args.text, max(args.contexts))

    bandwidth = read_bandwidth()
    weights, per_token = weight_bytes(config), config.kv_bytes_per_token(2)
    print(f"model {args.model}: {config.n_params / 1e6:.1f} M parameters, {per_token} bytes of KV per token (16 bit)")
    print(f"read bandwidth {bandwidth:.1f} GB/s, {args.threads} threads, 1 GiB")
    in_file = sum(part.stat().st_size for part in gguf_parts(source)) if is_file else 0
    if is_file:
        print(f"the file has {in_file / 1e6:.1f} MB, dequantized to bf16 {weights / 1e6:.1f}")
    print(f"{'context':>9}{'batch':>7}{'weights MB':>12}{'KV MB':>9}{'roofline ms':>13}")
    needs = {}
    for context in args.contexts:
        for batch in args.batches:
            kv = batch * (context + run.decoded // 2) * per_token  # the cache grows: its mean over the steps
            needs[context, batch] = {
                "read_gb_per_second": bandwidth, "weight_bytes": weights, "kv_bytes": kv,
                "roofline_ms": (weights + kv) / bandwidth / 1e6,
                **({"file_roofline_ms": (in_file + kv) / bandwidth / 1e6} if is_file else {}),
            }  # fmt: skip
            roofline = needs[context, batch]["roofline_ms"]
            print(f"{context:>9}{batch:>7}{weights / 1e6:>12.1f}{kv / 1e6:>9.1f}{roofline:>13.2f}")

    todo = [cell for cell in needs if not ledger.find(dict(zip(("context", "batch"), cell, strict=True)))]
    if len(todo) < len(needs):
        print(f"{len(needs) - len(todo)} of {len(needs)} cells are in {args.json} already")
    rates = ledger.document.get("read_gb_per_second", {"best": bandwidth})  # every cell has its own run's beside it
    extra: dict[str, Any] = {"read_gb_per_second": rates}
    try:
        if todo and any(peer.startswith("llama.cpp") for peer in args.peers):
            try:
                for name in ("F16", "BF16", "F32"):
                    export_gguf(folder, ggufs / f"{name}.gguf", name.lower())
            except ImportError as error:
                run.skip("llama.cpp", one_line(error))
        if todo:
            run.find_missing()
        for peer, notes in run.notes.items():
            print(f"{peer}: {notes}")
        extra["notes"] = ledger.document.get("notes", {}) | run.notes
        wanted = dict.fromkeys(context for context, _ in todo)
        references = {context: run.reference(context) if args.agree else None for context in wanted}
        shortest = min(args.contexts)
        if reference := references.get(shortest):
            print(f"first {args.agree} greedy tokens in fp32, context {shortest}, the same as transformers (eager):")
            extra["greedy_fp32"] = {"context": shortest, "peers": run.agreement_in_fp32(shortest, reference)}
        for context, batch in todo:
            timings = run.cell(context, batch)
            cell = cell_report(timings, context, batch, needs[context, batch], references[context])
            print(f"context {context}, batch {batch}: roofline {cell['roofline_ms']:.2f} ms")
            print(*CELL.lines(cell["results"]), sep="\n", flush=True)
            ledger.put({"context": context, "batch": batch}, cell)
            ledger.write(**extra)
    finally:
        run.close()
    again = read_bandwidth()
    print(f"* the mode that counts for its peer. Read bandwidth at the end: {again:.1f} GB/s", end="")
    print(": the percentages are too high, something else was running at the start" if again > 1.1 * bandwidth else "")
    for peer, reason in run.skipped.items():
        print(f"skipped {peer}: {reason}. To install it: {INSTALL[peer]}")
    for failure in run.failures:
        print(f"failed: {failure}")
    if todo:
        extra["read_gb_per_second"]["end"] = again
        ledger.write(
            **extra,
            skipped=[{"peer": p, "reason": r, "install": INSTALL[p]} for p, r in run.skipped.items()],
            failures=ledger.document.get("failures", []) + run.failures,
        )
    return ledger.document


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and write what was asked for, or exit with one sentence."""
    args = parse(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the peers' processes, as the next one
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with refusing(PROGRAM):
        json_file = Path(args.json) if args.json and args.json != "-" else None
        check_files({"--json": json_file, "--plot": args.plot}, {"--text": args.text, "--model": args.model})
        plots.check_drawable("--plot", args.plot)
        with tempfile.TemporaryDirectory() as ggufs:
            report = benchmark(args, Path(ggufs))
        if args.plot:
            cpu, rate = report["environment"]["cpu"], report["read_gb_per_second"]["best"]
            plot(report["cells"], f"Plain decoding: {cpu}, threads {args.threads}, {rate:.0f} GB/s", args.plot)
    if args.json == "-":
        print(json.dumps(report))
    if not any(cell["results"] for cell in report["cells"]):
        refuse(ValueError("no peer gave a result; the reasons are above"), PROGRAM, code=1)


if __name__ == "__main__":
    started(main)
