"""Continue any number of prompts from a file into a file; killed at any moment, the same command goes on.

    python scripts/batch.py in.jsonl out.jsonl --batch-size 16 --max-new-tokens 256
    python scripts/batch.py in.jsonl out.jsonl --draft guided --budget 512 --order finished
    torchrun --nproc_per_node=8 scripts/batch.py in.jsonl out.jsonl --model meta-llama/Llama-3.1-8B --tp 2

A line of the input is {"prompt": text or [token ids]} or {"messages": [{"role": ..., "content": ...}]}; it may have an
id, which comes back with its output, and set max_tokens, temperature, top_k, top_p, min_p, seed, stop or ignore_eos for
itself. Blank lines are skipped. A line of the output is

    {"index": line of the input from 0, "id": ..., "tokens": [...], "text": ..., "finish_reason": ..., "stats": {...}}

A line that cannot be continued (no JSON, unknown keys, too long, ...) goes to OUT.rejects.jsonl with its number and the
reason, and the others go on. Without a seed of its own a sampled line draws with --seed and its index, so that a run
that was interrupted writes what another would have written (in 16 bits up to rounding, with --exact bit for bit; with
--gamma auto, which goes by the clock, for greedy lines).

What is written is kept: a line goes out in one piece, and one that a crash tore is cut off at the next start. Goes on
only with the input, the model and the flags of OUT.state.json; --fresh begins anew. Under torchrun every replica of the
model takes its share of the lines and writes a part; the parts are merged when all are done. On several machines the
files lie in a folder that all of them see.

Exit code: 0 all is done, 4 all is done and some lines were rejected (0 under torchrun, which takes any other code for a
crash and says so at length), 2 the command made no sense, 1 it could not go on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import hashlib
import heapq
import json
import os
import re
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tqdm import tqdm

from common import (
    Record,
    as_json,
    refuse,
    sentence,
    write_whole,
)
from flags import CHAT, add_engine_flags, add_flags, config_of, join, positive, room_of
from generate import PER_PROMPT, ProgressLine, as_record, check_writable, encode_record
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import Tokenizer, gguf_parts, load_tokenizer, read_config
from gpt_fast_sd.tp import Parallel

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

PROGRAM = "batch.py"
AHEAD = 16  # lines a slot that may be read before the oldest of them is written, where the order of the input is kept
BEGINNING = 1 << 24  # bytes of a GGUF file: a header with a vocabulary of 128k has 8 MB
ROOM = 8192  # tokens a slot holds, unless --max-seq-len says otherwise or the model ends before
SYNC = 5.0  # seconds after which what was written is forced to the disk
REJECTED = 4  # exit code
OURS = re.compile(rb'\{"index": (\d+), .*\}')
ADVICE = "name another output, or begin anew with --fresh"


# ---- which lines are done --------------------------------------------------------------------------------------------


class Ranges:
    """A set of whole numbers that come mostly in a row."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        for number in sorted(set(numbers)):
            if self.ends and self.ends[-1] == number:
                self.ends[-1] += 1
            else:
                self.starts.append(number)
                self.ends.append(number + 1)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number < self.ends[at]

    def __len__(self) -> int:
        return sum(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def shared(self, parallel: Parallel) -> Ranges:
        """The first rank's numbers, on every rank that holds its model."""
        found = Ranges()
        for i in range(parallel.same(len(self.starts))):
            here = i < len(self.starts)
            found.starts.append(parallel.same(self.starts[i] if here else 0))
            found.ends.append(parallel.same(self.ends[i] if here else 0))
        return found


def indices(path: Path) -> Iterator[int]:
    """The index of every line of an output; none of a file that is not there. ValueError for another program's file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            match = OURS.fullmatch(line.rstrip(b"\n"))
            if match is None:
                raise ValueError(f"{path} line {number} was not written by this program: {ADVICE}")
            yield int(match[1])


def cut_torn_line(path: Path) -> None:
    """Shorten the file to its last whole line: a crash may have torn the one behind it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


class Log:
    """A file of JSON lines that only grows, each line in one piece."""

    def __init__(self, path: Path) -> None:
        """ValueError where another process writes it."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._synced = time.monotonic()
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._file)
                raise ValueError(f"{path} is being written by another process: wait for it, or end it") from None

    def write(self, record: Record) -> None:
        """Append the record; it outlives this process as soon as this returns, the machine after the next sync."""
        line = json.dumps(record).encode() + b"\n"
        while line:  # a call that is interrupted may write less
            line = line[os.write(self._file, line) :]
        if time.monotonic() - self._synced > SYNC:
            self.sync()

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, and let others write."""
        self.sync()
        os.close(self._file)


# ---- the lines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One line of the input, checked."""

    index: int
    id: Any
    prompt: list[int]
    params: SamplingParams


def no_number(name: str) -> NoReturn:
    """Refuse what Python would read and JSON does not know."""
    raise ValueError(f"not JSON: {name}")


@dataclass(frozen=True)
class Reader:
    """Turns lines into tasks."""

    tokenizer: Tokenizer | None
    common: SamplingParams
    chat: bool
    seed: int
    room: int  # tokens of prompt and output together

    def task(self, index: int, raw: bytes) -> Task:
        """The line as a task; ValueError, or whatever else its content brought about."""
        try:
            record = json.loads(raw.decode("utf-8-sig" if index == 0 else "utf-8"), parse_constant=no_number)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        name = None
        if isinstance(record, dict):
            name = record.pop("id", None)
            if isinstance(record.get("prompt"), list) and "tokens" not in record:
                record["tokens"] = record.pop("prompt")
        prompt = encode_record(record, "the line", self.chat, self.tokenizer)
        changes = {key: record[key] for key in PER_PROMPT if key in record}
        if changes.get("seed") is None:
            changes["seed"] = (self.seed + index) % 2**63
        params = dataclasses.replace(self.common, **changes)
        total = len(prompt) + params.max_tokens
        if total > self.room:
            raise ValueError(
                f"too long: {len(prompt):,} tokens and max_tokens {params.max_tokens:,} are {total:,}, "
                f"over --max-seq-len {self.room:,}"
            )
        return Task(index, name, prompt, params)


@dataclass(frozen=True)
class Share:
    """The lines of the input that one replica takes."""

    path: Path
    rank: int
    of: int

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(index, line) of all that are not blank."""
        with self.path.open("rb") as file:
            for index, raw in enumerate(file):
                if index % self.of == self.rank and raw.strip():
                    yield index, raw.strip()

    def __len__(self) -> int:
        return sum(1 for _ in self.lines())


def fingerprint_of_file(path: Path) -> str:
    """A name that changes with the content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def fingerprint_of_pages(path: Path) -> str:
    """A name that changes with the beginning, where a header stands, the last page and 256 pages between."""
    size, page = path.stat().st_size, 1 << 12
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(BEGINNING))
        for i in range(257):
            file.seek(max(0, BEGINNING + (size - BEGINNING - page) * i // 256))
            digest.update(file.read(page))
    return digest.hexdigest()[:16]


def fingerprint_of_model(folder: Path) -> Record:
    """What tells a model from another without reading its weights: config.json, and the sizes of the weight files.

    Of a GGUF file, which begins with its config: pages and size of it and of the other parts it is split into.
    """
    if folder.is_file():
        parts = gguf_parts(folder)
        return {
            "config": [fingerprint_of_pages(part) for part in parts],
            "weights": {part.name: part.stat().st_size for part in parts},
        }
    weights = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    return {
        "config": fingerprint_of_file(folder / "config.json"),
        "weights": {path.name: path.stat().st_size for path in weights},
    }


# ---- the files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """Where a run writes: outputs and rejects, of the whole run and of this replica, and the state they belong to."""

    output: Path
    rejects: Path
    rank: int
    of: int

    @property
    def state(self) -> Path:
        """Holds what the outputs were made with."""
        return beside(self.output, "state.json")

    def parts(self, whole: Path) -> list[Path]:
        """The files that the replicas write; with one replica it writes the whole."""
        if self.of == 1:
            return [whole]
        return [whole.with_name(f"{whole.name}.part{rank}of{self.of}") for rank in range(self.of)]

    def mine(self, whole: Path) -> Path:
        """The part of this replica."""
        return self.parts(whole)[self.rank]

    def begin(self, settings: Record, *, fresh: bool) -> None:
        """Check what is there against these settings, or forget it; ValueError where it was begun with others.

        Only the first process calls it, before any other looks at a file.
        """
        outputs = [self.output, self.rejects]
        outputs += [path for whole in outputs for path in whole.parent.glob(f"{glob.escape(whole.name)}.part*of*")]
        there = [path for path in outputs if path.exists() and path.stat().st_size]
        if fresh:
            os.truncate(self.output, 0)  # it stays the file that is locked
            for path in there:
                if path != self.output:
                    path.unlink()
        elif there:
            self._compare(settings, there[0])
            return
        write_whole(self.state, json.dumps(settings, indent=1) + "\n")

    def _compare(self, settings: Record, found: Path) -> None:
        if not self.state.exists():
            raise ValueError(f"{found} holds something, and no {self.state.name} says what made it: {ADVICE}")
        try:
            before = json.loads(self.state.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            before = None
        if not isinstance(before, dict):
            raise ValueError(f"{self.state} is damaged: {ADVICE}")
        for name, value in settings.items():
            if before.get(name) != value:
                what = "another input" if name == "input" else f"{name} {brief(before.get(name))}, not {brief(value)}"
                raise ValueError(f"{self.output} was begun with {what}: {ADVICE}")

    def done(self) -> Ranges:
        """The indices of this replica's lines that need no more work; what a crash tore is cut off its files."""
        mine = {self.mine(self.output), self.mine(self.rejects)}
        for path in mine:
            cut_torn_line(path)
        found = (index for path in sorted({*mine, self.output, self.rejects}) for index in indices(path))
        return Ranges(index for index in found if index % self.of == self.rank)

    def merge(self, *, ordered: bool) -> None:
        """Put the replicas' parts together, once all are complete; a kill leaves the parts or the whole."""
        for whole, in_order in ((self.output, ordered), (self.rejects, True)):
            parts = [path for path in self.parts(whole) if path.exists()]
            if self.of == 1 or not (parts or whole is self.output):
                continue
            sources = [path for path in (whole, *parts) if path.exists()]
            partial = whole.with_name(f"{whole.name}.partial")
            with contextlib.ExitStack() as stack:
                files = [numbered(stack.enter_context(path.open("rb"))) for path in sources]
                lines = heapq.merge(*files, key=lambda pair: pair[0]) if in_order else chain(*files)
                target, seen = stack.enter_context(partial.open("wb")), set()
                for index, line in lines:
                    if index not in seen:  # a merge that was killed may have left parts of a whole file
                        target.write(line)
                        seen.add(index)
                target.flush()
                os.fsync(target.fileno())
            if seen or whole is self.output:
                partial.replace(whole)
            else:
                partial.unlink()
            for path in parts:
                path.unlink()


def beside(output: Path, ending: str) -> Path:
    """OUT.jsonl -> OUT.ending"""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.{ending}")


def brief(value: object) -> str:
    """The value, or its beginning."""
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def numbered(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Every line of an output with its index."""
    for line in file:
        match = OURS.fullmatch(line.rstrip(b"\n"))
        assert match, "checked when the run began, and written by it since"
        yield int(match[1]), line


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
        """Let it come next."""
        self._expected.append(task.index)

    @property
    def unwritten(self) -> int:
        """Lines that were read and are not written yet, finished or not."""
        return len(self._expected)

    def finished(self, task: Task, completion: Completion) -> None:
        """Write it, or keep it until those before it are there."""
        record = {"index": task.index, "id": task.id} | {
            key: value for key, value in as_record(completion).items() if key != "index"
        }
        if not self.ordered:
            self._expected.remove(task.index)
            self._write(record)
            return
        self._held[task.index] = record
        while self._expected and self._expected[0] in self._held:
            self._write(self._held.pop(self._expected.popleft()))

    def rejected(self, index: int, raw: bytes, reason: str) -> None:
        """Write down which line, why, and what stood there."""
        if self._output is None:
            return
        if self._rejects is None:
            self._rejects = Log(self._place_of_rejects)
        text = raw.decode("utf-8", "replace")
        self._rejects.write({"index": index, "line": index + 1, "reason": reason, "input": text})

    def _write(self, record: Record) -> None:
        if self._output:
            self._output.write(record)

    def close(self) -> None:
        """Everything is on the disk."""
        for log in (self._output, self._rejects):
            if log:
                log.close()


def run(engine: Engine, share: Share, done: Ranges, reader: Reader, writer: Writer, bar: Any) -> int:
    """Continue all lines of the share that are not done; return how many tokens that gave.

    A line is read when a slot is free for it, so that slots idle only at the end of the file; but where the output
    keeps the input's order, no more than AHEAD lines a slot are kept in memory behind one that takes long.
    """
    under_way: dict[int, Task] = {}  # by the number of the prompt
    n_tokens, started = 0, time.perf_counter()

    def prompts() -> Iterator[tuple[list[int], SamplingParams] | None]:
        numbers = count()
        for index, raw in share.lines():
            if index in done:
                continue
            try:
                task = reader.task(index, raw)
                engine.check([task.prompt], [task.params])
            except Exception as error:  # whatever a line brings about is no reason to end the run
                writer.rejected(index, raw, sentence(error).replace("prompt 0", "the prompt"))
                bar.update()
                continue
            while writer.ordered and writer.unwritten >= AHEAD * engine.config.batch_size:
                yield None  # after a round, one more may be written
            under_way[next(numbers)] = task
            writer.expect(task)
            yield task.prompt, task.params

    for event in engine.stream(prompts()):
        n_tokens += len(event.tokens)
        if event.completion:
            writer.finished(under_way.pop(event.index), event.completion)
            bar.set_postfix_str(f"{n_tokens / (time.perf_counter() - started):,.0f} tokens/s", refresh=False)
            bar.update()
    return n_tokens


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("input", metavar="IN.jsonl", type=Path, help="one prompt a line")
    add("output", metavar="OUT.jsonl", type=Path, help="one continuation a line; what it holds already is kept")
    add("--order", choices=("input", "finished"), default="input", help="of the output's lines (default: input)")
    add(
        "--rejects", metavar="F.jsonl", type=Path, help="lines that could not be continued (default: OUT.rejects.jsonl)"
    )
    add("--fresh", action="store_true", help="forget what the output holds")
    add("--chat", action="store_true", help=CHAT)
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
    done: Ranges
    left: int  # lines of this replica to continue
    output: Log | None  # of the replica's first rank
    lock: Log | None  # of the first process: it keeps others from the whole output

    def engine(self) -> Engine:
        """An engine with this many slots of this size."""
        args = self.args
        config = config_of(EngineConfig, args, max_seq_len=self.reader.room)
        return Engine.from_pretrained(args.model, config, self.draft, parallel=self.parallel)


def prepare(args: argparse.Namespace) -> Job:
    """Check everything that can be checked before the work; ValueError or OSError in one sentence."""
    rejects = args.rejects or beside(args.output, "rejects.jsonl")
    check_writable(args.output, rejects)
    if len({path.resolve() for path in (args.input, args.output, rejects)}) < 3:
        raise ValueError(f"input, output and rejects must be three files, got {args.input}, {args.output}, {rejects}")
    if not args.input.is_file():
        raise ValueError(f"there is no file {args.input}")
    common, draft = config_of(SamplingParams, args), config_of(DraftConfig, args)
    folder = locate(args.model)
    config = read_config(folder)
    room = room_of(args, config, ROOM)
    config_of(EngineConfig, args, max_seq_len=room)
    parallel = join(args)
    share = Share(args.input, parallel.dp_rank, parallel.dp)
    files = Files(args.output, rejects, parallel.dp_rank, parallel.dp)
    lock = Log(files.output) if parallel.is_main else None
    try:
        if lock:
            files.begin(settings_of(args, folder, room, parallel), fresh=args.fresh)
        parallel.meet()  # nobody looks at a file before
        done = (files.done() if parallel.tp_rank == 0 else Ranges()).shared(parallel)
    except (ValueError, OSError):
        if lock:
            lock.close()
        raise
    return Job(
        args=args, parallel=parallel, share=share, files=files, draft=draft, done=done, left=len(share) - len(done),
        reader=Reader(load_tokenizer(folder, config), common, args.chat, args.seed, room), lock=lock,
        output=lock if parallel.dp == 1 or parallel.tp_rank else Log(files.mine(files.output)),
    )  # fmt: skip


def settings_of(args: argparse.Namespace, folder: Path, room: int, parallel: Parallel) -> Record:
    """What a run that goes on must have in common with the one before."""
    free = ("input", "output", "rejects", "fresh", "threads", "tp", "max_seq_len")
    found: Record = {
        "input": fingerprint_of_file(args.input),
        "model": str(args.model),
        "model files": fingerprint_of_model(folder),
        "draft model files": fingerprint_of_model(locate(args.draft_model)) if args.draft_model else None,
        "max_seq_len": room,
        "tp": parallel.tp,
        "dp": parallel.dp,
    }
    found |= {name: value for name, value in vars(args).items() if name not in (*free, *found)}
    settings: Record = as_json(found)
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, continue every line, merge, say how it went."""
    args = parse(argv)
    try:
        job = prepare(args)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    writer = Writer(job.output, job.files.mine(job.files.rejects), ordered=args.order == "input")
    try:
        engine = job.engine() if job.left else None
    except (ValueError, OSError) as error:
        writer.close()
        refuse(error, PROGRAM)
    parallel, started, n_tokens = job.parallel, time.perf_counter(), 0
    try:
        with parallel.guard():
            if engine is not None:
                n_tokens = work(job, engine, writer)
            writer.close()
            counts = parallel.gather([(parallel.dp_rank, n_tokens)])  # all replicas are done
            if parallel.is_main:
                job.files.merge(ordered=args.order == "input")
    except OSError as error:
        stop(error)
    parallel.close()
    if parallel.is_main:
        seconds = time.perf_counter() - started
        report(job.files, sum(counts or []), seconds, under_torchrun=parallel.mesh is not None)


def work(job: Job, engine: Engine, writer: Writer) -> int:
    """Continue this replica's lines, with a progress bar; return how many tokens that gave."""
    if engine.compiled and job.parallel.is_main:
        print("compiling (a minute or two the first time, cached afterwards) ...", file=sys.stderr, flush=True)
    if job.parallel.is_main:
        engine.on_progress = ProgressLine()
    engine.warm_up()
    n_done = len(job.done)
    name = "prompts" if job.parallel.dp == 1 else f"prompts of replica 1 of {job.parallel.dp}"
    disable = None if job.parallel.is_main else True
    with tqdm(total=n_done + job.left, initial=n_done, desc=name, unit="prompt", disable=disable) as bar:
        return run(engine, job.share, job.done, job.reader, writer, bar)


def report(files: Files, n_tokens: int, seconds: float, *, under_torchrun: bool) -> None:
    """What there is now, in a sentence or two; exit code 4 where lines were rejected, see the top."""
    n_done, n_rejected = (sum(1 for _ in indices(path)) for path in (files.output, files.rejects))
    speed = f"; {n_tokens:,} tokens in this run, {n_tokens / seconds:,.0f} a second" if n_tokens else ""
    print(f"{n_done:,} prompts continued in {files.output}{speed}")
    if n_rejected:
        print(f"{n_rejected:,} lines were rejected: {files.rejects} says which and why")
        if not under_torchrun:
            raise SystemExit(REJECTED)


def stop(error: OSError) -> NoReturn:
    """A disk that is full, or such: what is written is kept."""
    print(f"{PROGRAM}: {sentence(error)}; the same command goes on from here", file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
