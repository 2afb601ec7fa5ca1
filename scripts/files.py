"""The files of a program: what it reads and what it writes is checked together, before any work; nothing is lost after.

Before the work `check_files` is told everything that will be read and written; `save` writes at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import refuse
from gpt_fast_sd.loading import BUNDLED, find_smollm2
from gpt_fast_sd.model import find_downloaded, gguf_parts
from measuring.ledger import write_whole


def check_files(writes: Mapping[str, Path | None], reads: Mapping[str, Any] | None = None) -> None:
    """ValueError for an output that cannot be written, or that is an input or another output by whatever name.

    Both by the flags that name them. What is read may be a path, several, None, or the name of a model; of a folder
    every file is read.
    """
    outputs = [(f"{flag} {path}", path) for flag, path in writes.items() if path is not None]
    taken = [(f"{flag} {path}", path) for flag, one in (reads or {}).items() for path in paths_of(one)]
    for named, path in outputs:
        if os.environ.get("RANK", "0") == "0":  # others write nothing, perhaps on machines without the folder
            require_writable(path)
        for other, there in taken:
            if same_file(path, there):
                raise ValueError(f"{named} and {other} are the same file")
            if there.is_dir() and any(same_file(path, file) for file in there.iterdir()):
                raise ValueError(f"{named} would take the place of a file of {other}")
        taken.append((named, path))


def paths_of(value: Any) -> Iterator[Path]:
    """The paths that a flag names."""
    for one in value if isinstance(value, list | tuple) else [value]:
        path = {"bundled": BUNDLED, "smollm2": find_smollm2()}.get(str(one), one)
        if path is not None:
            yield from gguf_parts(find_downloaded(str(path)) or Path(path))


def same_file(one: Path, other: Path) -> bool:
    """Whether two names stand for one file, through links too, there or not."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False


def require_writable(path: Path) -> None:
    """ValueError unless a file of this name can be replaced by a new one; it is tried, and nothing changes."""
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {real.parent}")
    if real.is_symlink():
        raise ValueError(f"cannot write {path}: it is a link to itself")
    if path.exists() and not path.is_file():
        raise ValueError(f"cannot write {path}: it is no file that can be replaced")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))  # not truncated; one that is write-protected stays as it is
        beside = real.with_name(f".{secrets.token_hex(8)}.tried")
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        beside.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def save(
    contents: Mapping[Path, str | bytes], program: str, more: Mapping[Path, Callable[[], str | bytes]] | None = None
) -> None:
    """Replace each file with its content; where one cannot be written, all others are, and the exit code is 1.

    What was meant for it goes into the current folder or that of temporary files, as one sentence says. more: contents
    that are made only then, as this may fail, too.
    """
    failed = []
    makers: dict[Path, Callable[[], str | bytes]] = {path: partial(contents.__getitem__, path) for path in contents}
    for path, make in {**makers, **(more or {})}.items():
        content: str | bytes | None = None
        try:
            content = make()
            write_whole(path, content)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}{'' if content is None else elsewhere(path, content)}")
    if failed:
        refuse(ValueError("; ".join(failed)), program, code=1)


def save_json(path: Path | None, document: object, program: str) -> None:
    """Save a document as JSON, if there is a file for it; what JSON does not know is a text."""
    if path:
        save({path: json.dumps(document, indent=1, default=str) + "\n"}, program)


def elsewhere(path: Path, content: str | bytes) -> str:
    """Write it where that can be done -> a phrase that says where."""
    name = f"{path.stem[:100]}.{secrets.token_hex(4)}{path.suffix}"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            write_whole(folder / name, content)
            return f"; what it was to hold is in {folder / name}"
    return "; nor can it be written anywhere else"


def path_of(given: str | Path | None) -> Path | None:
    """The file of an output's flag; none of "-", which is stdout."""
    return None if given in (None, "-") else Path(str(given))


def trace_of(profiler: Any, path: Path) -> bytes:
    """The Chrome trace of what a torch.profiler.profile recorded, compressed if the name of the file says so."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / ("trace.json.gz" if path.suffix == ".gz" else "trace.json")
        profiler.export_chrome_trace(str(made))
        return made.read_bytes()
