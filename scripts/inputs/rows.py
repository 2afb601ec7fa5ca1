"""The rows that a benchmark decodes, of any number and length, from texts, from whole prompts or from RULER's tasks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt_fast_sd.model import Tokenizer
from inputs.prompts import digest, round_the_text, tokens_of
from inputs.ruler import RULER, Task
from inputs.sources import OURS, as_ours, holds_rows, prompts_of, rows_of

Record = dict[str, Any]
MOST_ROWS = 2000  # that are read of a file or dataset


@dataclass
class RoundTheText:
    """Stretches of texts joined, or of random tokens, that begin evenly spread and go round their end."""

    ids: Sequence[int]
    bos: int | None
    about: Record  # what they are of: measurements that go on have the same

    def rows(self, n: int, length: int, turn: int = 0, turns: int = 1) -> list[list[int]]:
        """n prompts of length tokens, BOS first, for one of so many turns; those of others share nothing with them."""
        if turns > 1 and n * turns * length > len(self.ids):
            raise ValueError(
                f"--sets {turns} of {n} rows of {length:,} tokens take {n * turns * length:,} tokens, and the texts "
                f"have {len(self.ids):,}"
            )
        return round_the_text(self.ids, n * turns, length, self.bos)[turn::turns]

    def note(self, n: int, length: int) -> str | None:
        """What is to be said of such prompts."""
        if "synthetic" in self.about:
            return "the tokens are random: SPEED-Bench found that such prompts overstate throughput by 23 %"
        body, there = length - (self.bos is not None), f"the text has {len(self.ids):,} tokens:"
        if body > len(self.ids):
            return f"{there} rows of {length:,} repeat it, which makes drafting easier"
        return f"{there} {n:,} rows of {length:,} overlap" if n * body > len(self.ids) else None


@dataclass
class WholePrompts:
    """Prompts as they end; what is too long loses its middle, as LongBench's do."""

    found: list[list[int]] = field(repr=False)
    about: Record = field(default_factory=dict)

    def rows(self, n: int, length: int, turn: int = 0, turns: int = 1) -> list[list[int]]:
        fitting = [ids for ids in self.found if len(ids) >= length]
        if n * turns > len(fitting):
            raise ValueError(
                f"{n * turns} prompts of at least {length:,} tokens are needed, and there are {len(fitting)}: "
                "give more, fewer rows or sets, or less context"
            )
        head = length // 2
        return [ids[:head] + ids[len(ids) - (length - head) :] for ids in fitting[turn * n : (turn + 1) * n]]

    def note(self, n: int, length: int) -> str | None:
        return None


@dataclass
class OfTask:
    """Samples of one of RULER's tasks, each as long as fits."""

    task: Task
    tokenizer: Tokenizer
    seed: int
    about: Record
    made: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by length and seed

    def rows(self, n: int, length: int, turn: int = 0, turns: int = 1) -> list[list[int]]:
        def sample(seed: int) -> list[int]:
            if (length, seed) not in self.made:
                found = self.task.sample(length, lambda text: len(self.tokenizer.encode(text)), seed)
                self.made[length, seed] = self.tokenizer.encode(found.prompt)
            return self.made[length, seed]

        return [sample(self.seed + turn * n + i) for i in range(n)]

    def note(self, n: int, length: int) -> str | None:
        return None


Rows = RoundTheText | WholePrompts | OfTask


def first_rows(source: Path, fields: Sequence[str]) -> list[tuple[str, Record]]:
    """The rows that are read, see prompts_of; a warning if there are more."""
    rows = prompts_of(source, fields, MOST_ROWS + 1)
    if len(rows) > MOST_ROWS:
        warnings.warn(f"{source} has more than {MOST_ROWS:,} rows: the first {MOST_ROWS:,} are read", stacklevel=4)
    return rows[:MOST_ROWS]


def texts_of(sources: Sequence[Path], tokenizer: Tokenizer, skip: int = 0) -> dict[str, list[int]]:
    """The tokens of texts by their names, but for the first `skip` of each, no BOS; ValueError if none has more.

    A file of rows holds as many texts as it has rows with a text.
    """
    found = dict[str, list[int]]()
    for source in sources:
        if not holds_rows(source):
            named = {source.name: tokens_of(source, tokenizer)}
        else:
            rows = first_rows(source, ["text"])
            named = {where: tokenizer.encode(record["prompt"], bos=False) for where, record in rows}
        if twice := found.keys() & named.keys():
            raise ValueError(f"two texts have one name, {min(twice)}: give each once, by a name of its own")
        found |= named
    if skip:
        longest, n = max(map(len, found.values())), len(found)
        found = {name: ids[skip:] for name, ids in found.items() if len(ids) > skip}
        if not found:
            raise ValueError(f"the longest of {n} texts has {longest:,} tokens, and --skip leaves out {skip:,}")
        if len(found) < n:
            warnings.warn(f"{n - len(found)} of {n} texts have no more than {skip:,} tokens: left out", stacklevel=3)
    return found


def holds_prompts(source: Path, fields: Sequence[str]) -> bool:
    """Whether the rows of a source are whole prompts, and not texts to go on with."""
    if str(source).startswith(RULER):
        return True
    if not holds_rows(source):
        return False
    where, first = next(rows_of(source), (str(source), {}))
    return bool(fields) or not isinstance(first, dict) or "text" not in first or as_ours(first, where) is first


def prompts_for(
    source: Path, fields: Sequence[str], tokenizer: Tokenizer, encode: Callable[[object, str], list[int]], *,
    essay: Path, seed: int,
) -> WholePrompts | OfTask:  # fmt: skip
    """The prompts of one source that holds some; encode: the tokens of a row of ours that stands there."""
    if str(source).startswith(RULER):
        return OfTask(Task.of(str(source), essay), tokenizer, seed, {"task": str(source), "seed": seed})
    rows = first_rows(source, fields)
    ours = [(where, {key: record[key] for key in OURS if key in record}) for where, record in rows]
    found = [encode(record, where) for where, record in ours]
    ids = [token for one in found for token in one]
    return WholePrompts(found, {"prompts": source.name, "count": len(found), "digest": digest(ids)})


def round_the_texts(texts: Mapping[str, Sequence[int]], bos: int | None, skip: int) -> RoundTheText:
    """All texts, one after another."""
    ids = [token for each in texts.values() for token in each]
    about: Record = {"files": list(texts), "tokens": len(ids), "digest": digest(ids)}
    return RoundTheText(ids, bos, about | ({"skip": skip} if skip else {}))
