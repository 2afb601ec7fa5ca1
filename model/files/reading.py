"""Files of models before they are read: which there are, and the errors for those that cannot be used."""

from __future__ import annotations

import json
import os
import re
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

MOST_DIGITS = 400  # of a number, more than any float has
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


class CheckpointError(ValueError):
    """A model folder or file cannot be used; one sentence says which file and why."""


class OpenFile:
    """A file that is read, not mapped, and stays the one that was opened, even if another has taken its name."""

    def __init__(self, path: Path) -> None:
        self.raw = path.open("rb", buffering=0)
        weakref.finalize(self, self.raw.close)
        self.n_bytes = os.fstat(self.raw.fileno()).st_size  # when it was opened

    def fill(self, buffer: NDArray[Any], offset: int) -> None:
        """Read the bytes that begin there, contiguous numbers of any shape; OSError if the file has become shorter."""
        self.raw.seek(offset)
        rest = memoryview(buffer.reshape(-1).view(np.uint8).data)
        while rest:
            n_read = self.raw.readinto(rest)
            if not n_read:
                self.require_whole()
                raise OSError(f"the file has {self.n_bytes:,} bytes, and ends before what it describes")
            rest = rest[n_read:]

    def require_whole(self) -> None:
        """OSError if the file has become shorter."""
        left = os.fstat(self.raw.fileno()).st_size
        if left < self.n_bytes:
            raise OSError(f"the file had {self.n_bytes:,} bytes when it was opened, and has {left:,}")

    def part(self, offset: int, count: int) -> bytes:
        """These bytes; OSError if the file has become shorter."""
        found = np.empty(count, np.uint8)
        self.fill(found, offset)
        return found.tobytes()


def at_home(path: Path) -> Path:
    """The path with ~ or ~user as their folder; as it is where the system knows none."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_gguf(path: Path) -> bool:
    """Whether the path of a model is a GGUF file, by its name, and not a folder."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model to which this GGUF file belongs, by number; CheckpointError if one is missing."""
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return [path]
    stem, number, count = named.groups()
    if not 1 <= int(number) <= int(count):
        raise CheckpointError(
            f"{path} is named as part {int(number)} of {int(count)}, but parts count from 1 to their number"
        )
    parts = [path.with_name(f"{stem}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count))]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing: {path.name} is one of {int(count)} parts of a model")
    return parts


def parse_json(text: str, *, constants: bool = True) -> Any:
    """What JSON says; ValueError in one line, also for keys that come twice, depth and digits without end.

    constants: NaN and Infinity, which Python reads although JSON has none such, are read.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"not JSON: the key {name!r:.80} comes twice")
            found[name] = value
        return found

    def whole(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"not JSON: a number of {len(digits):,} digits")
        return int(digits)

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"not JSON: {name}")

    try:
        return json.loads(text, object_pairs_hook=once, parse_int=whole, parse_constant=None if constants else refuse)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.rstrip() else ""
        raise ValueError(f"not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds."""
    try:
        found = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        refuse_pointer(path)
        raise CheckpointError(f"{path} cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but holds a {type(found).__name__}")
    return found


def refuse_pointer(path: Path) -> None:
    """Raise if the file is only a git-lfs pointer, the usual result of a clone without git-lfs."""
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run: git lfs pull")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without characters that a terminal would act on."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in said)


def readable_name(name: str) -> str:
    """A tensor's name as it is, or quoted and escaped if it has characters that a terminal would act on."""
    return name if name.isprintable() else repr(name)
