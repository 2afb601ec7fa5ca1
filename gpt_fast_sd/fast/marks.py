"""What a body stands for, and whether that still reads as it did when the body was written.

A mark is a hash of a function's syntax tree without docstring, comments and annotations: not of its text. A body names
the functions of the core that it stands for; what these read by a word of their module counts, too (what they read as
an attribute, such as a method, has to be named). If one of them has another mark now, because a file was edited or a
name bound anew, the body is not used, and one line says so.

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
    """The marks of these functions, and of all that they read by a word of their module; "" for what has no source."""
    marks: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in marks:
            continue
        found = original(name)
        if not isinstance(found, types.FunctionType):
            marks[name] = _described(found)
            continue
        if not found.__module__.startswith("gpt_fast_sd."):  # a library's: it reads otherwise in other versions
            marks[name] = f"of {found.__module__.partition('.')[0]}"
            continue
        node = _node_of(found)
        if node is None and _is_installed_without_source(found):  # then nobody edits it either
            marks[name] = _known().get(name, "")
            continue
        marks[name] = "" if node is None else hashlib.sha256(_written(node).encode()).hexdigest()[:16]
        read = _words(node) if node else set()
        for word in sorted(read):
            if other := _of_the_core(found, word):
                waiting.append(other)
                if other != f"{found.__module__}:{word}":  # that it is this one's is a part of what the reader says
                    marks[f"{found.__module__}:{word}"] = f"is {other}"
    return dict(sorted(marks.items()))


def name_of(thing: Any) -> str:
    """The name of a function or class: "module:qualified.name"."""
    return f"{thing.__module__}:{thing.__qualname__}"


def _of_the_core(reader: types.FunctionType, word: str) -> str | None:
    """The name of what a function of the core reads by this word; None for a module, and for what is no global."""
    value = reader.__globals__.get(word, types)
    if isinstance(value, types.ModuleType):
        return None
    if isinstance(value, types.FunctionType) and _is_core(value.__module__) and original(name_of(value)) is value:
        return name_of(value)
    return f"{reader.__module__}:{word}"  # a number, a class, a library's function, or what somebody bound anew


def _described(found: Any) -> str:
    """The mark of what is no function: a number or text itself, of others what they are."""
    if found is None or isinstance(found, (int, float, str)):
        return repr(found)
    where = [getattr(found, name, "") for name in ("__module__", "__qualname__")]
    return " ".join([type(found).__name__, *(part for part in where if isinstance(part, str))])


def _words(node: Any) -> set[str]:
    """The names that a syntax tree reads, but those of annotations."""
    if isinstance(node, list):
        return set().union(*map(_words, node))
    if not isinstance(node, ast.AST):
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*(_words(value) for key, value in ast.iter_fields(node) if key not in ("annotation", "returns")))


def _is_core(module: str) -> bool:
    return module.startswith("gpt_fast_sd.") and not module.startswith("gpt_fast_sd.fast.")


def original(name: str) -> Any:
    """What a name like "gpt_fast_sd.acceptance:commit" means now; None if it is gone."""
    module, _, place = name.partition(":")
    found: Any = importlib.import_module(module)
    try:
        for part in place.split("."):
            found = inspect.getattr_static(found, part)
    except AttributeError:
        return None
    found = found.fget if isinstance(found, property) else found
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def _is_installed_without_source(found: types.FunctionType) -> bool:
    file = found.__code__.co_filename
    return file == getattr(sys.modules.get(found.__module__), "__file__", None) and not os.path.exists(file)


@functools.cache
def _nodes(file: str, changed: int) -> dict[tuple[int, str], ast.AST]:
    """The functions of a file by their first line and name; none of what cannot be read."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {(min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.name): n for n in functions}


def _node_of(found: types.FunctionType) -> ast.AST | None:
    code = found.__code__
    try:
        return _nodes(code.co_filename, os.stat(code.co_filename).st_mtime_ns).get((code.co_firstlineno, code.co_name))
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
