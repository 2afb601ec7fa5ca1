"""Files of JSON lines that a killed run goes on with: each is locked, only grows, and knows which lines are done."""

from __future__ import annotations

import contextlib
import glob
import heapq
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from gpt_fast_sd import DraftConfig
from measuring.ledger import write_whole
from records import Record

SYNC = 5.0  # seconds after which what was written is forced to the disk
LATER = ("ngram", "n_sink", "refresh", "page")  # flags that there were not always: older states have their defaults
ADVICE = "name another output, or begin anew with --fresh"


# ---- one file --------------------------------------------------------------------------------------------------------


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line of an output with its index; none of a missing file.

    ValueError for another program's file, a damaged line, and an index that comes twice.
    """
    if not path.exists():
        return
    seen = set[int]()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            index = index_of(line)
            if index is None:
                raise ValueError(f"{path} line {number} was not written by this program, or is damaged: {ADVICE}")
            if index in seen:
                raise ValueError(f"{path} line {number} has index {index}, which an earlier line has: {ADVICE}")
            seen.add(index)
            yield index, line


def index_of(line: bytes) -> int | None:
    """The index of a line of ours; None of any other, such as one that was torn and goes on as the next one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    index = record.get("index") if isinstance(record, dict) else None
    return index if type(index) is int and index >= 0 else None


def indices(path: Path) -> Iterator[int]:
    """The index of every line of an output, see numbered."""
    return (index for index, _ in numbered(path))


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


def lock_of(path: Path) -> Path:
    """The file whose lock says that somebody writes this one; it stays, empty, when nobody does any more."""
    return path.with_name(f"{path.name}.lock")


class Log:
    """A file of JSON lines that only grows, each line in one piece."""

    def __init__(self, path: Path, *, locked: bool = True, other: Path | None = None) -> None:
        """Not open yet. locked: no other process is to write it, nor the other file; ValueError where one does."""
        self.path, self._file = path, -1
        self._locks = [FileLock(lock_of(one), timeout=0) for one in (path, other) if one is not None and locked]
        for lock, one in zip(self._locks, (path, other), strict=False):
            try:
                lock.acquire()
            except Timeout:
                self._release()
                raise ValueError(f"{one} is being written by another process: wait for it, or end it") from None

    def open(self) -> Log:
        """Open it, new where there is none."""
        binary = getattr(os, "O_BINARY", 0)  # or Windows writes two characters at the end of a line
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | binary, 0o644)
        self._synced = time.monotonic()
        return self

    def write(self, record: Record) -> None:
        """Append the record; it outlives this process as soon as this returns, the machine after the next sync."""
        line = json.dumps(record).encode() + b"\n"
        with self._named():
            while line:  # a call that is interrupted may write less
                line = line[os.write(self._file, line) :]
        if time.monotonic() - self._synced > SYNC:
            self.sync()

    def sync(self) -> None:
        """Force what was written to the disk."""
        with self._named():
            os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, and let others write; it may be closed already."""
        try:
            if self._file >= 0:
                self.sync()
        finally:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
            self._release()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error says which file it is about: there is only a number that the system could name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()


# ---- all files of a run ----------------------------------------------------------------------------------------------


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

    def _there(self) -> list[Path]:
        """Those of all replicas' outputs that hold something."""
        outputs = [self.output, self.rejects]
        outputs += [path for whole in outputs for path in whole.parent.glob(f"{glob.escape(whole.name)}.part*of*")]
        return [path for path in outputs if path.exists() and path.stat().st_size]

    def check(self, settings: Record) -> None:
        """ValueError where what is there was begun with other settings; before any other process looks at a file."""
        if there := self._there():
            self._compare(settings, there[0])

    def begin(self, settings: Record, *, fresh: bool) -> None:
        """Note what the outputs are made with; fresh: forget what is there. Before any other process opens a file."""
        if fresh:
            for path in self._there():
                if path == self.output:
                    os.truncate(path, 0)  # it may be a link
                else:
                    path.unlink()
        if not self._there():
            write_whole(self.state, json.dumps(settings, indent=1) + "\n")

    def _compare(self, settings: Record, found: Path) -> None:
        if not self.state.exists():
            raise ValueError(f"{found} holds something, and no {self.state.name} says what made it: {ADVICE}")
        try:
            before = json.loads(self.state.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            before = None
        if not isinstance(before, dict):
            raise ValueError(f"{self.state} is damaged: {ADVICE}")
        before = {name: getattr(DraftConfig, name) for name in LATER} | {"parse_special": True} | before
        for name, value in settings.items():
            if before.get(name) != value:
                what = "another input" if name == "input" else f"{name} {brief(before.get(name))}, not {brief(value)}"
                raise ValueError(f"{self.output} was begun with {what}: {ADVICE}")

    def done(self, n_lines: int) -> NDArray[np.bool_]:
        """bool [n_lines]: which of this replica's lines need no more work; what a crash tore is cut off its files."""
        mine, done = {self.mine(self.output), self.mine(self.rejects)}, np.zeros(n_lines, dtype=bool)
        for path in mine:
            cut_torn_line(path)
        for index in chain.from_iterable(map(indices, sorted({*mine, self.output, self.rejects}))):
            if index >= n_lines:
                raise ValueError(f"{self.output} has index {index}, and the input {n_lines} lines: {ADVICE}")
            if index % self.of == self.rank:
                done[index] = True
        return done

    def merge(self, *, ordered: bool) -> None:
        """Put the replicas' parts together, once all are complete; a kill leaves the parts or the whole."""
        for whole, in_order in ((self.output, ordered), (self.rejects, True)):
            parts = [path for path in self.parts(whole) if path.exists()]
            if self.of == 1 or not (parts or whole is self.output):
                continue
            sources, seen = [numbered(path) for path in (whole, *parts)], set[int]()
            real = Path(os.path.realpath(whole))  # of a link the file that it names
            partial = real.with_name(f"{real.name}.partial")
            with partial.open("wb") as target:
                for index, line in heapq.merge(*sources, key=itemgetter(0)) if in_order else chain(*sources):
                    if index not in seen:  # a merge that was killed may have left parts of a whole file
                        target.write(line)
                        seen.add(index)
                target.flush()
                os.fsync(target.fileno())
            if seen or whole is self.output:
                partial.replace(real)
            else:
                partial.unlink()
            for path in parts:
                path.unlink()
        for path in self.parts(self.output) if self.of > 1 else []:
            lock_of(path).unlink(missing_ok=True)


def beside(output: Path, ending: str) -> Path:
    """OUT.jsonl -> OUT.ending"""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.{ending}")


def brief(value: object) -> str:
    """The value, or its beginning."""
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."
