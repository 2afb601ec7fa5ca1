"""Chat templates, which are programs of strangers: rendered in a sandbox, in a process of bounded memory and time.

A sandbox keeps a template from reaching outside, not from looping for hours or filling the memory. So it runs in a
process of its own, which is told what to render a line at a time, answers in lines, and is ended where it takes too
long. This file is also that process's program, and then needs jinja2 alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

MOST_OF_A_TEMPLATE = 1 << 20  # characters; the longest ones have a fiftieth of it
MOST_RENDERED = 1 << 25  # characters: more than any model has positions for
SECONDS = 20.0  # for a text, where a millisecond is usual; the first one waits for the process to start
MOST_MEMORY = 1 << 30  # bytes of the process, where the system can bound them


class TemplateError(ValueError):
    """A template refuses, fails, or asks for too much; one sentence says why."""


class Template:
    """A chat template as a function from messages to text. The process that runs it starts with the first text."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """source: the template; special: texts that it knows by name, such as bos_token."""
        self._first = json.dumps({"path": sys.path, "source": source, "special": dict(special)})
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation; TemplateError in one sentence."""
        try:
            asked = json.dumps(messages, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"they are not what JSON can say: {error}") from None
        late = threading.Event()
        process = self._process = self._process or self._started()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(SECONDS, end)
        timer.start()
        try:
            assert process.stdin and process.stdout
            process.stdin.write(f"{asked}\n".encode())
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it has ended
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            process.kill()
            self._process = None
            raise TemplateError(
                f"it takes more than {SECONDS:.0f} s" if late.is_set() else "the process that renders it broke down"
            )
        told: dict[str, str] = json.loads(answer)
        if "text" not in told:
            raise TemplateError(told["why"])
        return told["text"]

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", str(Path(__file__).resolve())]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert process.stdin
            process.stdin.write(f"{self._first}\n".encode())
        except OSError as error:
            raise TemplateError(f"no process can be started for it: {error.strerror}") from None
        weakref.finalize(self, _end, process)
        return process


def _plain(value: object) -> object:
    """A mapping of another kind as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is no text, number, list or object")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


# ---- what the process does -------------------------------------------------------------------------------------------


def _rendered(first: Mapping[str, Any], asked: Iterator[str]) -> Iterator[dict[str, str]]:
    """A text, or why there is none, for each line of messages."""
    from jinja2 import TemplateError as Refusal
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise Refusal(message)

    def to_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    for line in asked:
        pieces, length = [], 0
        try:
            template = environment.from_string(first["source"])  # which remembers what it has compiled
            for piece in template.generate(
                **first["special"], messages=json.loads(line), tools=None, documents=None, add_generation_prompt=True
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_RENDERED:
                    raise Refusal(f"its text is longer than {MOST_RENDERED:,} characters")
            yield {"text": "".join(pieces)}
        except MemoryError:
            yield {"why": f"MemoryError: it takes more than {MOST_MEMORY >> 20:,} MiB"}
        except Exception as error:  # a template is a program: it divides by 0, recurses, does not even compile
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:1000]
            yield {"why": said if isinstance(error, Refusal) else f"{type(error).__name__}: {said}"}


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = MOST_MEMORY if most == resource.RLIM_INFINITY else min(MOST_MEMORY, most)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    except (ValueError, OSError):  # some systems have the name alone
        return


if __name__ == "__main__":
    lines = iter(sys.stdin.readline, "")
    given = json.loads(next(lines))
    sys.path[:] = given["path"]
    _bound_memory()
    for told in _rendered(given, lines):
        print(json.dumps(told), flush=True)
