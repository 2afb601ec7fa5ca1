"""Continue any number of prompts from a file into a file; killed at any moment, the same command goes on.

    python scripts/batch.py in.jsonl out.jsonl --batch-size 16 --max-new-tokens 256
    python scripts/batch.py in.jsonl out.jsonl --draft guided --budget 512 --order finished
    torchrun --nproc_per_node=8 scripts/batch.py in.jsonl out.jsonl --model meta-llama/Llama-3.1-8B --tp 2

A line of the input is {"prompt": text or [token ids]} or {"messages": [{"role": ..., "content": ...}]}; it may have an
id, which comes back with its output, and set max_tokens, temperature, top_k, top_p, min_p, seed, stop, ignore_eos,
max_drafts or n for itself. Blank lines are skipped. A line of the output is

    {"index": line of the input from 0, "id": ..., "tokens": [...], "text": ..., "finish_reason": ..., "stats": {...}}

and of a line with n completions {"index": ..., "id": ..., "completions": [{"tokens": [...], ...}, ...]}.

A line that cannot be continued (no JSON, unknown keys, too long, ...) goes to OUT.rejects.jsonl with its number and the
reason, and the others go on; so does one on which the engine fails, alone too. Without a seed of its own a sampled line
draws with --seed and its index, so that a run that was interrupted writes what another would have written (in 16 bits
up to rounding, with --exact bit for bit; with --gamma auto, which goes by the clock, for greedy lines).

What is written is kept: a line goes out in one piece, and one that a crash tore is cut off at the next start; while a
process writes OUT.jsonl it holds OUT.jsonl.lock, and no other one can. Goes on only with the input, the model and the
flags of OUT.state.json; --fresh begins anew. Under torchrun every replica of the model takes its share of the lines and
writes a part; the parts are merged when all are done. On several machines the files lie in a folder that all of them
see.

Exit code: 0 all is done, 4 all is done and some lines were rejected (0 under torchrun, which takes any other code for a
crash and says so at length), 2 the command made no sense, 1 it could not go on.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import contextlib
import dataclasses
import hashlib
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from common import ProgressLine, parser_of, refusing, sentence, started
from files import check_files
from flags import (
    CHAT,
    FIELDS,
    PARSE_SPECIAL,
    add_engine_flags,
    add_flags,
    config_of,
    draft_of,
    join,
    names,
    positive,
    room_of,
)
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, TokenEvent
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import gguf_parts, load_tokenizer, parse_json, read_config
from gpt_fast_sd.tp import Parallel
from inputs.ruler import RULER
from inputs.sources import HUB
from journal import Files, Log, beside, indices, lock_of
from measuring.ledger import as_json
from records import LONGEST_LINE, Encoder, Record, as_record, n_of, own

PROGRAM = "batch.py"
AHEAD = 16  # lines per slot that may be read before the oldest of them is written, where the order of the input is kept
BEGINNING = 1 << 24  # bytes of a GGUF file: a header with a vocabulary of 128k has 8 MB
ROOM = 8192  # tokens that a slot holds, unless --max-seq-len says otherwise or the model ends before
REJECTED = 4  # exit code
PROBE = SamplingParams(max_tokens=4, ignore_eos=True)  # of one token, to see whether the engine works at all


# ---- the lines -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Task:
    """One line of the input, checked, and what there is of its completions."""

    index: int
    id: Any
    prompt: list[int]
    params: list[SamplingParams]  # of each completion
    several: bool  # whether the line says how many
    begun: int = 0
    found: dict[int, Completion] = field(default_factory=dict)

    @property
    def record(self) -> Record:
        """Its line of the output, once all are found."""
        each = [{k: v for k, v in as_record(self.found[i]).items() if k != "index"} for i in range(len(self.params))]
        return {"index": self.index, "id": self.id, **({"completions": each} if self.several else each[0])}


@dataclass(frozen=True)
class Reader:
    """Turns lines into tasks."""

    encoder: Encoder
    common: SamplingParams
    seed: int
    room: int  # tokens of prompt and output together

    def task(self, index: int, raw: bytes) -> Task:
        """The line as a task; ValueError, or whatever else its content causes."""
        if len(raw) > LONGEST_LINE:
            raise ValueError(f"too long: over {LONGEST_LINE:,} bytes")
        try:
            text = raw.decode("utf-8-sig" if index == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
        record, name = parse_json(text, constants=False), None
        if isinstance(record, dict):
            name = record.pop("id", None)
            if isinstance(record.get("prompt"), list) and "tokens" not in record:
                record["tokens"] = record.pop("prompt")
        prompt, changes = self.encoder.record(record, "the line"), own(record)
        if changes.get("seed") is None:
            changes["seed"] = (self.seed + index) % 2**63
        params, n = dataclasses.replace(self.common, **changes), n_of(record)
        total = len(prompt) + params.max_tokens
        if total > self.room:
            raise ValueError(
                f"too long: {len(prompt):,} tokens and max_tokens {params.max_tokens:,} are {total:,}, "
                f"over --max-seq-len {self.room:,}"
            )
        return Task(index, name, prompt, params.samples(1 if n is None else n), n is not None)


@dataclass(frozen=True)
class Share:
    """The lines of the input that one replica takes."""

    path: Path
    rank: int
    of: int

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(index, line) of all that are not blank; of one that is too long its beginning."""
        for index, raw in enumerate(self._raw()):
            line = raw.strip() if len(raw.removesuffix(b"\n")) <= LONGEST_LINE else raw
            if index % self.of == self.rank and line:
                yield index, line

    def _raw(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while raw := file.readline(LONGEST_LINE + 1):
                rest = raw
                while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(LONGEST_LINE + 1)
                yield raw

    def line(self, index: int) -> bytes:
        """One of them."""
        return next(raw for i, raw in self.lines() if i == index)

    def __len__(self) -> int:
        return sum(1 for _ in self.lines())

    @property
    def n_lines(self) -> int:
        """All lines of the file, blank ones and those of other replicas included."""
        return sum(1 for _ in self._raw())


def fingerprint_of_file(path: Path, *, whole: bool = True) -> str:
    """A name that changes with the content; not whole: with the header, the last page and 256 between."""
    size, page, digest = path.stat().st_size, 1 << 12, hashlib.sha256()
    with path.open("rb") as file:
        while (whole or file.tell() < BEGINNING) and (chunk := file.read(1 << 20)):
            digest.update(chunk)
        for i in range(0 if whole else 257):
            file.seek(max(0, BEGINNING + (size - BEGINNING - page) * i // 256))
            digest.update(file.read(page))
    return digest.hexdigest()[:16]


def fingerprint_of_model(folder: Path) -> Record:
    """What tells a model from another without reading all of it: config.json, and size and pages of the weight files.

    A GGUF file begins with its config; it may be split into several.
    """
    if folder.is_file():
        weights = gguf_parts(folder)
        config: object = [fingerprint_of_file(part, whole=False) for part in weights]
    else:
        weights = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
        config = fingerprint_of_file(folder / "config.json")
    found = {path.name: [path.stat().st_size, fingerprint_of_file(path, whole=False)] for path in weights}
    return {"config": config, "weights": found}


# ---- the run ---------------------------------------------------------------------------------------------------------


class Writer:
    """Takes completions as they come and writes them in the order asked for; only a replica's first rank writes."""

    def __init__(self, output: Log | None, rejects: Path, *, ordered: bool) -> None:
        self.ordered = ordered
        self._output, self._place_of_rejects = output, rejects
        self._rejects: Log | None = None
        self._expected: deque[int] = deque()  # indices of lines that were read and are not written yet
        self._held: dict[int, Record] = {}  # finished before one of those ahead of them

    def expect(self, task: Task) -> None:
        """Expect its completions next."""
        self._expected.append(task.index)

    @property
    def unwritten(self) -> int:
        """Number of lines that were read and are not written yet, finished or not."""
        return len(self._expected)

    def finished(self, task: Task) -> None:
        """Write it, or keep it until those before it are written."""
        if not self.ordered:
            self._expected.remove(task.index)
            self._write(task.record)
            return
        self._held[task.index] = task.record
        self._write_held()

    def dropped(self, task: Task) -> None:
        """Expect its completions no more, and write those that waited for it."""
        self._expected.remove(task.index)
        self._write_held()

    def rejected(self, index: int, raw: bytes, reason: str) -> None:
        """Record which line was rejected, why, and its text."""
        if self._output is None:
            return
        if self._rejects is None:
            self._rejects = Log(self._place_of_rejects, locked=False).open()
        text = raw[:LONGEST_LINE].decode("utf-8", "replace")
        self._rejects.write({"index": index, "line": index + 1, "reason": reason, "input": text})

    def _write_held(self) -> None:
        while self._expected and self._expected[0] in self._held:
            self._write(self._held.pop(self._expected.popleft()))

    def _write(self, record: Record) -> None:
        if self._output:
            self._output.write(record)

    def close(self) -> None:
        """Flush everything to the disk."""
        for log in (self._output, self._rejects):
            if log:
                log.close()


class EngineFailed(Exception):
    """The engine raised, not what stands around it. lost: its device is, and with it the engine."""

    def __init__(self, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        super().__init__(f"{sentence(error)} ({Path(place.filename).name}:{place.lineno})")
        self.lost = isinstance(error, torch.AcceleratorError) or "build a new engine" in str(error)


def run(engine: Engine, share: Share, done: NDArray[np.bool_], reader: Reader, writer: Writer, bar: Any) -> int:
    """Continue all lines of the share that are not done; return how many tokens that gave.

    A line is read when a slot is free for it, so that slots idle only at the end of the file; but where the output
    keeps the input's order, no more than AHEAD lines per slot are kept in memory behind one that takes long.

    Where the engine raises, each line that it was at is continued alone, and rejected if it raises again. EngineFailed
    if it does so with PROBE, too: then it is not the line. Errors of an engine in several processes,
    which do not fail together, are left as they are.
    """
    under_way: dict[int, tuple[Task, int]] = {}  # by the number of the prompt in this stream; which completion
    n_tokens, started, numbers = 0, time.perf_counter(), count()
    own: list[Exception] = []  # errors of what reads the lines, which are not the engine's

    def prompts() -> Iterator[tuple[list[int], SamplingParams] | None]:
        for index, raw in share.lines():
            if done[index]:
                continue
            try:
                task = reader.task(index, raw)
                engine.check([task.prompt], task.params[:1])
            except Exception as error:  # whatever a line causes is no reason to end the run
                writer.rejected(index, raw, sentence(error).replace("prompt 0", "the prompt"))
                bar.update()
                continue
            while writer.ordered and writer.unwritten >= AHEAD * engine.config.batch_size:
                yield None  # after a round, one more may be written
            writer.expect(task)
            while task.begun < len(task.params):
                under_way[next(numbers)] = task, task.begun
                task.begun += 1
                yield task.prompt, task.params[task.begun - 1]

    def read() -> Iterator[tuple[list[int], SamplingParams] | None]:
        try:
            yield from prompts()
        except Exception as error:
            own.append(error)
            raise

    def events(source: Iterable[tuple[list[int], SamplingParams] | None]) -> Iterator[TokenEvent]:
        try:
            yield from engine.stream(source)
        except Exception as error:
            if own or engine.parallel.mesh is not None:
                raise
            raise EngineFailed(error) from error

    def work(source: Iterable[tuple[list[int], SamplingParams] | None]) -> None:
        nonlocal n_tokens
        for event in events(source):
            if event.completion:
                n_tokens += len(event.completion.tokens)
                task, i = under_way.pop(event.index)
                task.found[i] = event.completion
                bar.set_postfix_str(f"{n_tokens / (time.perf_counter() - started):,.0f} tokens/s", refresh=False)
                if len(task.found) == len(task.params):
                    writer.finished(task)
                    bar.update()

    def work_alone(task: Task) -> None:
        left = [i for i in range(len(task.params)) if i not in task.found]
        under_way.update((at, (task, i)) for at, i in enumerate(left))
        task.begun = len(task.params)
        try:
            work([(task.prompt, task.params[i]) for i in left])
        except EngineFailed as error:
            if error.lost:
                raise
            list(events([([0], PROBE)]))
            writer.rejected(task.index, share.line(task.index), f"the engine failed on it, alone too: {error}")
            writer.dropped(task)
            bar.update()

    lines = read()  # another stream goes on with it
    while True:
        try:
            work(lines)
            return n_tokens
        except EngineFailed as error:
            if error.lost or not under_way:  # it is none of the lines
                raise
            print(f"\n{PROGRAM}: the engine failed: {error}; each line is tried alone", file=sys.stderr, flush=True)
            at = dict.fromkeys(task for task, _ in under_way.values())
        for task in at:
            under_way.clear()
            work_alone(task)
        under_way.clear()
        numbers = count()


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("input", metavar="IN.jsonl", type=Path, help="one prompt per line")
    add("output", metavar="OUT.jsonl", type=Path, help="one continuation per line; what it holds already is kept")
    add("--order", choices=("input", "finished"), default="input", help="of the output's lines (default: input)")
    add("--rejects", metavar="F.jsonl", type=Path,
        help="lines that could not be continued (default: OUT.rejects.jsonl)")  # fmt: skip
    add("--fresh", action="store_true", help="forget what the output holds")
    add("--chat", action="store_true", help=CHAT)
    add("--parse-special", action="store_true", help=PARSE_SPECIAL)
    add("--fields", metavar="A,B", type=names, default=[], help=FIELDS)
    sampling = parser.add_argument_group("how lines are continued that do not say it themselves")
    seed = {"default": 0, "help": "line i draws with S + i"}
    add_flags(sampling, SamplingParams, max_tokens={"default": 128}, seed=seed)
    add_flags(parser.add_argument_group("who drafts"), DraftConfig, policy={"default": "streaming"})
    add_engine_flags(
        parser,
        batch_size={"type": positive},
        max_seq_len={"type": positive, "default": None, "unset": f"{ROOM:,}, or what the model can"},
    )
    return parser.parse_args(argv)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run needs, checked."""

    args: argparse.Namespace
    parallel: Parallel
    share: Share
    files: Files
    reader: Reader
    draft: DraftConfig
    done: NDArray[np.bool_]  # one bool for each line of the input
    left: int  # lines of this replica to continue
    # of the first process
    settings: Record
    lock: Log | None  # keeps others from the whole output

    def engine(self) -> Engine:
        """An engine with this many slots of this size."""
        args = self.args
        config = config_of(EngineConfig, args, max_seq_len=self.reader.room)
        return Engine.from_pretrained(args.model, config, self.draft, parallel=self.parallel)

    def begin(self) -> Log | None:
        """Forget what --fresh is to forget, note the settings -> where to write, None: another rank does."""
        if self.lock:
            self.files.begin(self.settings, fresh=self.args.fresh)
        self.parallel.meet()  # nobody opens a file before
        if self.parallel.tp_rank:
            return None
        return (self.lock if self.parallel.dp == 1 and self.lock else Log(self.files.mine(self.files.output))).open()


def prepare(args: argparse.Namespace, at_end: contextlib.ExitStack) -> Job:
    """Check everything that can be checked before the work, and change no file; ValueError or OSError in one sentence.

    at_end: takes the lock and, as soon as there are several processes, what ends all of them if one is lost.
    """
    rejects = args.rejects or beside(args.output, "rejects.jsonl")
    if str(args.input).startswith((HUB, RULER)) or args.input.suffix == ".parquet":
        raise ValueError(
            f"the input must hold one JSON object a line: make_prompts.py makes such a file of {args.input}"
        )
    if not args.input.is_file():
        what = "is no file that can be read twice" if args.input.exists() else "is not there"
        raise ValueError(f"the input {args.input} {what}")
    check_files(
        {
            "the output": args.output, "its lock": lock_of(args.output), "its state": beside(args.output, "state.json"),
            "--rejects": rejects, "their lock": lock_of(rejects) if args.rejects else None,
        },
        {"the input": args.input, "--model": args.model, "--draft-model": args.draft_model},
    )  # fmt: skip
    common, draft = config_of(SamplingParams, args), draft_of(args)
    folder = locate(args.model)
    config = read_config(folder)
    room = room_of(args, config, ROOM)
    config_of(EngineConfig, args, max_seq_len=room)
    parallel = join(args)
    at_end.enter_context(parallel.guard())
    share = Share(args.input, parallel.dp_rank, parallel.dp)
    files, settings, lock = Files(args.output, rejects, parallel.dp_rank, parallel.dp), Record(), None
    if parallel.is_main:
        lock, settings = Log(files.output, other=args.rejects), settings_of(args, folder, room, parallel)
        at_end.callback(lock.close)
        if not args.fresh:
            files.check(settings)
    parallel.meet()  # nobody looks at a file before
    done = np.zeros(share.n_lines, dtype=bool)
    if parallel.tp_rank == 0 and not args.fresh:
        done = files.done(len(done))
    parallel.same_values(torch.from_numpy(done.view(np.uint8)))
    encoder = Encoder(load_tokenizer(folder, config), args.chat, parse_special=args.parse_special, fields=args.fields)
    return Job(
        args=args, parallel=parallel, share=share, files=files, draft=draft, done=done, settings=settings, lock=lock,
        left=len(share) - int(done.sum()), reader=Reader(encoder, common, args.seed, room),
    )  # fmt: skip


def settings_of(args: argparse.Namespace, folder: Path, room: int, parallel: Parallel) -> Record:
    """What a run that goes on must have in common with the one before."""
    free = ("input", "output", "rejects", "fresh", "threads", "tp", "max_seq_len")
    found: Record = {
        "input": fingerprint_of_file(args.input), "model": str(args.model),
        "model files": fingerprint_of_model(folder),
        "draft model files": fingerprint_of_model(locate(args.draft_model)) if args.draft_model else None,
        "max_seq_len": room, "tp": parallel.tp, "dp": parallel.dp,
    }  # fmt: skip
    found |= {name: value for name, value in vars(args).items() if name not in (*free, *found)}
    settings: Record = as_json(found)
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, continue every line, merge, say how it went."""
    args = parse(argv)
    with contextlib.ExitStack() as at_end:
        with refusing(PROGRAM):
            job = prepare(args, at_end)
            engine = job.engine() if job.left else None
            writer = Writer(job.begin(), job.files.mine(job.files.rejects), ordered=args.order == "input")
        parallel, n_tokens, seconds = job.parallel, 0, 0.0
        try:
            if engine is not None:
                n_tokens, seconds = work(job, engine, writer)
            writer.close()
            done = parallel.gather([(parallel.dp_rank, (n_tokens, seconds))])  # all replicas are
            if parallel.is_main:
                job.files.merge(ordered=args.order == "input")
        except (EngineFailed, OSError) as error:
            with contextlib.suppress(OSError):  # of a full disk, say: this error came first
                writer.close()
            stop(error)
    if parallel.is_main:
        counts, times = zip(*done or [(0, 0.0)], strict=True)
        report(job.files, sum(counts), max(times), under_torchrun=parallel.mesh is not None)


def work(job: Job, engine: Engine, writer: Writer) -> tuple[int, float]:
    """Continue this replica's lines, with a progress bar -> how many tokens that gave, and in how many seconds."""
    if engine.compiled and job.parallel.is_main:
        print("compiling (up to two minutes the first time, cached afterwards) ...", file=sys.stderr, flush=True)
    if job.parallel.is_main:
        engine.on_progress = ProgressLine()
    engine.warm_up()
    n_done = int(job.done.sum())
    name = "prompts" if job.parallel.dp == 1 else f"prompts of replica 1 of {job.parallel.dp}"
    disable = None if job.parallel.is_main else True
    with tqdm(total=n_done + job.left, initial=n_done, desc=name, unit="prompt", disable=disable) as bar:
        started = time.perf_counter()  # all steps are compiled
        return run(engine, job.share, job.done, job.reader, writer, bar), time.perf_counter() - started


def report(files: Files, n_tokens: int, seconds: float, *, under_torchrun: bool) -> None:
    """Summarize the outputs in a sentence or two; exit code 4 if lines were rejected, see the top."""
    n_done, n_rejected = (sum(1 for _ in indices(path)) for path in (files.output, files.rejects))
    speed = f"; {n_tokens:,} tokens in this run, {n_tokens / seconds:,.1f} per second" if n_tokens else ""
    print(f"{n_done:,} prompts continued in {files.output}{speed}")
    if n_rejected:
        print(f"{n_rejected:,} lines were rejected: {files.rejects} says which and why")
        if not under_torchrun:
            raise SystemExit(REJECTED)


def stop(error: OSError | EngineFailed) -> NoReturn:
    """Exit because of a full disk, an engine that fails or the like; what is written is kept."""
    said = sentence(error) if isinstance(error, OSError) else f"the engine failed: {error}"
    print(f"{PROGRAM}: {said}; the same command goes on from here", file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    started(main, "\nstopped; the same command goes on from here")
