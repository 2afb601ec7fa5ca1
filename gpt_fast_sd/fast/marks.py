"""What a body stands for, and whether that still reads as it did when the body was written.

A mark is a hash of a function's syntax tree without docstring, comments and annotations: not of its text. A body names
the functions of the core that it stands for; whatever of the core these call or read by name counts, too. If one of
them has another mark now, because a file was edited or a name bound anew, the body is not used, and one line says so.

    python -m gpt_fast_sd.fast            # which marks are out of date, and which bodies stand for what changed
    python -m gpt_fast_sd.fast --write    # the bodies were brought up to date: remember the core as it is
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

MARKS = Path(__file__).with_name("marks.json")
Made = TypeVar("Made", bound=Callable[..., Any])
STANDS_FOR: dict[str, tuple[str, ...]] = {}  # body -> what it stands for, each as "module:qualified.name"


def stands_for(*names: str) -> Callable[[Made], Made]:
    """Declare what a body, a function or class, stands for: names like "gpt_fast_sd.acceptance:commit"."""

    def declared(body: Made) -> Made:
        STANDS_FOR[name_of(body)] = names
        return body

    return declared


def edited(body: Callable[..., Any]) -> list[str]:
    """The functions of the core, as "module:qualified.name", that a body does not stand for any more."""
    return edited_of(STANDS_FOR[name_of(body)])


def edited_of(names: Iterable[str]) -> list[str]:
    """Those of these functions, and of what they read of the core, whose marks are not the ones that are known."""
    return [name for name, mark in marks_of(names).items() if _known().get(name) != mark]


def marks_of(names: Iterable[str]) -> dict[str, str]:
    """The marks of these functions, and of all of the core that they read by name; "" for what has no source."""
    marks: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in marks:
            continue
        found = _found(name)
        if not isinstance(found, types.FunctionType):
            marks[name] = repr(found)
            continue
        node = _node_of(found.__code__.co_filename, found.__code__.co_firstlineno, found.__name__)
        marks[name] = "" if node is None else hashlib.sha256(_written(node).encode()).hexdigest()[:16]
        read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node else set()
        waiting += [other for word in sorted(read) if (other := _of_the_core(found, word))]
    return dict(sorted(marks.items()))


def name_of(thing: Any) -> str:
    """The name of a function or class: "module:qualified.name"."""
    return f"{thing.__module__}:{thing.__qualname__}"


def _of_the_core(reader: types.FunctionType, word: str) -> str | None:
    """The name of the core's function or number that a function reads by this word; None for anything else."""
    module = sys.modules[reader.__module__]
    value = reader.__globals__.get(word)
    if isinstance(value, types.FunctionType):
        where = value.__module__
        if _is_core(where):
            return f"{where}:{value.__qualname__}"
        library = where.partition(".")[0] in sys.stdlib_module_names | {"torch"}
        return None if library else f"{module.__name__}:{word}"  # bound anew by somebody
    return f"{module.__name__}:{word}" if isinstance(value, (int, float, str)) and word in vars(module) else None


def _is_core(module: str) -> bool:
    return module.startswith("gpt_fast_sd.") and not module.startswith("gpt_fast_sd.fast.")


def _found(name: str) -> Any:
    module, _, place = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in place.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else found
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


@functools.cache
def _nodes(file: str, changed: int) -> dict[tuple[int, str], ast.AST]:
    """The functions of a file by their first line and name; none of what cannot be read."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {(min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.name): n for n in functions}


def _node_of(file: str, line: int, name: str) -> ast.AST | None:
    try:
        return _nodes(file, os.stat(file).st_mtime_ns).get((line, name))
    except OSError:  # of no file: typed in, say
        return None


def _written(node: Any) -> str:
    """A syntax tree as text that no version of Python writes differently."""
    if isinstance(node, list):
        return f"[{','.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    left_out = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
    fields = {key: value for key, value in ast.iter_fields(node) if key not in left_out and value not in (None, [])}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return f"{type(node).__name__}({','.join(f'{key}={_written(value)}' for key, value in fields.items())})"


@functools.cache
def _known() -> dict[str, str]:
    known: dict[str, str] = json.loads(MARKS.read_text(encoding="utf-8"))
    return known


def write() -> None:
    """Remember the core as it is, once the bodies do what it says."""
    marks = marks_of(name for names in STANDS_FOR.values() for name in names)
    MARKS.write_text(json.dumps(marks, indent=0) + "\n", encoding="utf-8")
