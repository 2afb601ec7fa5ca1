"""Rows of files as their authors publish them, as prompts: JSON, JSONL, parquet, datasets of the hub, plain text.

A row is one of ours (prompt, tokens or messages), or has the fields of a form that is known:

    PG-19                                 text
    LongBench, InfiniteBench              context, input
    LongBench v2                          context, question, choice_A ... choice_D
    RULER                                 input, outputs
    SPEED-Bench, Spec-Bench, MT-Bench     turns, of which the first is asked

Prompts hold what the fields hold, a blank line between them, and no benchmark's own instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gpt_fast_sd.model import parse_json
from inputs.prompts import read_text

Record = dict[str, Any]
HUB, OURS = "hf:", ("prompt", "tokens", "messages")
FORMS: tuple[tuple[tuple[str, ...], set[str]], ...] = (  # the fields that are read, in this order, and others it has
    (("context", "question", "choice_A", "choice_B", "choice_C", "choice_D"), set()),
    (("context", "input"), set()),
    (("turns",), set()),
    (("input",), {"outputs"}),
    (("text",), set()),
)
TABLES = (".json", ".jsonl", ".parquet")  # of files that hold rows


def holds_rows(source: str | Path) -> bool:
    """Whether a source holds rows, not a text."""
    return str(source).startswith(HUB) or Path(source).suffix.lower() in TABLES


def rows_of(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Every row and where it stands; ValueError or OSError in one sentence, also for a library that is missing."""
    if str(source).startswith(HUB):
        yield from _of_the_hub(str(source))
        return
    path = Path(source)
    kinds = {".parquet": _of_parquet, ".json": _of_json}
    yield from kinds.get(path.suffix.lower(), lines_of)(path)  # of any other name, too


def prompts_of(source: str | Path, fields: Sequence[str] = (), most: int | None = None) -> list[tuple[str, Record]]:
    """The first `most` rows (None: all) as records of ours, and where they stand; ValueError if there is none."""
    found = [(where, as_ours(row, where, fields)) for where, row in islice(rows_of(source), most)]
    if not found:
        raise ValueError(f"{source} holds no prompt")
    return found


def as_ours(row: object, where: str, fields: Sequence[str] = ()) -> Record:
    """A row as one of ours; fields: those to read, in place of what its form says."""
    if not fields and isinstance(row, dict):
        if any(name in row for name in OURS):
            return row
        fields = next((read for read, others in FORMS if {*read, *others} <= row.keys()), ())
    names = ", ".join(map(str, row)) if isinstance(row, dict) and row else f"{row!r:.60}"
    if not fields or not isinstance(row, dict):
        said = f"{where} must be a JSON object with exactly one of prompt, tokens and messages, or of a published form"
        raise ValueError(f"{said}, and has {names:.200}: --fields says what to read")
    if missing := [name for name in fields if name not in row]:
        raise ValueError(f"{where} has no field {missing[0]!r}; it has {names:.200}")
    return {"prompt": "\n\n".join(_text(row[name], name, where) for name in fields)}


def _text(value: object, name: str, where: str) -> str:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if not isinstance(first, str):
        raise ValueError(f"{where}: {name} must be a text, got {value!r:.60}")
    return first


def lines_of(path: Path) -> Iterator[tuple[str, Any]]:
    """What each line that is not blank holds, and which one it is; ValueError for one that is not JSON."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # texts may hold what else ends lines
        if line.strip():
            where = f"{path} line {number}"
            try:
                yield where, parse_json(line, constants=False)
            except ValueError as error:
                raise ValueError(f"{where} is {error}") from None


def _of_json(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows, one row, a dict with one list of them, or, whatever the name says, one row a line."""
    text = read_text(path)
    try:
        whole = parse_json(text, constants=False)
    except ValueError:
        try:
            parse_json(text.lstrip().partition("\n")[0], constants=False)
        except ValueError:
            raise ValueError(f"{path} is neither JSON nor JSON lines") from None
        yield from lines_of(path)
        return
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list)]
        whole = lists[0] if len(whole) == len(lists) == 1 else [whole]
    if not isinstance(whole, list):
        raise ValueError(f"{path} must hold rows, got {whole!r:.60}")
    for number, row in enumerate(whole):
        yield f"{path} row {number}", row


def _of_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f'{path} needs the library pyarrow: pip install -e ".[data]"') from None
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file" if not path.exists() else "this is no file", str(path))
    try:
        file = parquet.ParquetFile(path)
        batches = file.iter_batches(batch_size=64)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no parquet file that can be read: {' '.join(str(error).split()):.200}") from None


def _of_the_hub(source: str) -> Iterator[tuple[str, Any]]:
    """hf:OWNER/NAME[:CONFIG][:SPLIT], by the library datasets, which keeps what it downloads."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f'{source} needs the library datasets: pip install -e ".[data]"') from None
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise ValueError(f"a dataset is hf:OWNER/NAME[:CONFIG][:SPLIT], got {source!r}")
    if len(rest) == 1:  # a split by one of the usual names, or else a configuration
        rest = ["", *rest] if rest[0] in ("train", "validation", "test") else [*rest, "test"]
    config, split = rest or ("", "test")
    try:
        rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        for number, row in enumerate(rows):
            yield f"{source} row {number}", row
    except Exception as error:  # the library has many, of its own and of what it downloads with
        raise ValueError(f"{source}: {' '.join(str(error).split()):.300}") from None
