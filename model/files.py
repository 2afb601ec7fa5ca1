"""Files of models before they are read: which there are, and the errors for those that cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


class CheckpointError(ValueError):
    """A model folder or file cannot be used; one sentence says which file and why."""


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


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
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
