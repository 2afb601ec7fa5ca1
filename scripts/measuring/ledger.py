"""Results on disk: one JSON document that is complete after each of them, and resumes where a killed run ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt_fast_sd.model import Transformer
from inputs.prompts import read_text, short_name

Record = dict[str, Any]


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file with a text or bytes: a kill leaves the old file or the new one, and no other file is touched.

    Of a link it is the file that it names. Half a character, as the name of a file may have, is escaped.
    OSError if that fails, and for anything but a regular file, such as a device, which would be lost.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file that can be replaced", str(path))
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.partial")  # 255 bytes at most
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    file = partial.open("xb")  # a new file: an existing one is never opened
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def as_json(value: object) -> Any:
    """The value as a JSON file returns it: tuples are lists, keys are texts."""
    return json.loads(json.dumps(value))


def fingerprint(model: Transformer) -> str:
    """A short name that changes with the weights: of the first 1,024 of every parameter."""
    parts = [parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes() for parameter in model.parameters()]
    return short_name(b"".join(parts))


class Ledger:
    """A JSON document of results, on disk after every one; those of an earlier run with the same settings stay."""

    def __init__(
        self, path: Path | None, benchmark: str, settings: Record, machine: Record, *, fresh: bool = False,
        results: str = "results",
    ) -> None:  # fmt: skip
        """results: the document's name for its list of them.

        path None: nothing is read or written.

        ValueError if the file holds something else, or was measured with other settings.
        """
        self.path, self._results = path, results
        self.document: Record = {
            "benchmark": benchmark, "settings": as_json(settings), "environment": machine, results: [],
        }  # fmt: skip
        if path is None or fresh or not path.exists():
            return
        advice = "name another file, or start over with --fresh"
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} exists and is not JSON: {advice}") from None
        if not _is_document(old, benchmark):
            raise ValueError(f"{path} exists and holds no results of this benchmark: {advice}")
        old = {"settings": {}, results: [], **old}
        for name, value in self.document["settings"].items():
            before = old["settings"].get(name)
            if before != value:
                raise ValueError(f"{path} was measured with {name} {before}, not {value}: {advice}")
        self.document = old

    @property
    def records(self) -> list[Record]:
        found: list[Record] = self.document[self._results]
        return found

    def find(self, key: Record) -> Record | None:
        return next((r for r in self.records if all(r.get(name) == value for name, value in key.items())), None)

    def put(self, key: Record, record: Record) -> None:
        """Set the result with these values; nothing is written yet."""
        older = self.find(key)
        self.document[self._results] = [*(r for r in self.records if r is not older), as_json(record)]

    def write(self, **more: Any) -> None:
        self.document |= more
        if self.path:
            write_whole(self.path, json.dumps(self.document, indent=1) + "\n")


def read_document(path: Path, *benchmarks: str) -> Record:
    """The document that one of these benchmarks wrote into a file; ValueError if none did."""
    document: Record = {}
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(read_text(path))
    if not _is_document(document, *benchmarks):
        raise ValueError(f"{path} holds no results of this program")
    return document


@contextlib.contextmanager
def complete(path: Path) -> Iterator[None]:
    """Raise a ValueError that names the file where its document turns out to lack what it must hold."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None


def _is_document(found: object, *benchmarks: str) -> bool:
    """Whether JSON has the form of a document of one of these benchmarks; older ones may lack parts."""
    if not isinstance(found, dict) or found.get("benchmark") not in benchmarks:
        return False
    lists = [found.get(name, []) for name in ("results", "points", "stages")]
    is_whole = all(isinstance(one, list) and all(isinstance(r, dict) for r in one) for one in lists)
    return is_whole and isinstance(found.get("settings", {}), dict)
