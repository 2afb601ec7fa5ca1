"""Chat templates, which are untrusted programs: rendered in a sandbox, in a process of bounded memory and time.

A sandbox keeps a template from reaching outside, not from looping for hours or filling the memory. So it runs in a
process of its own, which reads what to render line by line, answers in lines, and is ended if it takes too long. This
file is also that process's program, and then needs only jinja2. Threads may share a template: they take turns. A fork
and a copy start a process of their own.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

MOST_OF_A_TEMPLATE = 1 << 20  # characters; the longest ones have a fiftieth of this
MOST_RENDERED = 1 << 25  # characters: more than any model has positions for
SECONDS = 20.0  # per text; a millisecond is usual, and the first one waits for the process to start
MOST_MEMORY = 1 << 30  # bytes of the process, if the system can limit them


class TemplateError(ValueError):
    """A template refuses, fails, or needs too much; one sentence says why."""


class Template:
    """A chat template as a function from messages to text. The process that runs it starts with the first text."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """source: the template; special: texts that it can refer to by name, such as bos_token."""
        self._source, self._special = source, dict(special)
        self._renderers: dict[int, _Renderer] = {}  # by the asking process: a fork must not use what it inherits

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._source, self._special)

    def render(self, messages: Sequence[Mapping[str, str]], *, asks: bool = True) -> str:
        """The text of a conversation, asks: up to where the assistant answers; TemplateError if there is none."""
        try:
            asked = json.dumps([messages, asks], default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"they cannot be written as JSON: {error}") from None
        here = os.getpid()
        for other in {*self._renderers} - {here}:
            self._renderers.pop(other, None)
        renderer = self._renderers.setdefault(here, _Renderer(self._source, self._special))
        told = renderer.answer(asked)
        if "text" not in told:
            raise TemplateError(told["why"])
        return told["text"]


class _Renderer:
    """The process of one template, which answers one question at a time."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def answer(self, messages: str) -> dict[str, str]:
        """The text of these messages, or why there is none; TemplateError if the process had to be ended."""
        with self._lock:
            self._asked += 1
            number = f"{self._asked} ".encode()  # comes back with the answer
            late = threading.Event()
            timer = threading.Timer(SECONDS, self._be_late, [late])
            timer.daemon = True
            try:
                timer.start()
                process = self._running(late)
                assert process.stdin and process.stdout
                process.stdin.write(number + messages.encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:  # it has ended
                answer = b""
            except BaseException:  # its answer would be taken for that of the next request
                self._end()
                raise
            finally:
                timer.cancel()
                if timer.is_alive():
                    timer.join()
            whole = answer.startswith(number) and answer.endswith(b"\n")
            if late.is_set() or not whole:
                self._end()
            if not whole:
                raise TemplateError(
                    f"it takes more than {SECONDS:.0f} s" if late.is_set() else "the process that renders it broke down"
                )
        told: dict[str, str] = json.loads(answer[len(number) :])
        return told

    def _running(self, late: threading.Event) -> subprocess.Popen[bytes]:
        """The process, started if there is none or it has ended."""
        if self._process and self._process.poll() is None:
            return self._process
        self._end()
        python = _interpreter()
        if python is None:
            raise TemplateError("no process can be started for it: this program has no Python interpreter of its own")
        command = [python, "-I", str(Path(__file__).resolve())]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
        except OSError as error:
            raise TemplateError(f"no process can be started for it: {error.strerror}") from None
        self._finalizer = weakref.finalize(self, _end, process, os.getpid())
        self._process = process
        if late.is_set():  # perhaps before there was a process to end
            process.kill()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        given = {"path": path, "source": self._source, "special": self._special, "seconds": SECONDS}
        assert process.stdin
        process.stdin.write(f"{json.dumps(given)}\n".encode())
        return process

    def _be_late(self, late: threading.Event) -> None:
        late.set()
        if process := self._process:
            process.kill()

    def _end(self) -> None:
        if self._process:
            self._process = None
            self._finalizer()


def _interpreter() -> str | None:
    """The Python that runs this, or the same version beside it where a program such as uWSGI is what runs."""
    if getattr(sys, "frozen", False):
        return None
    if sys.executable and Path(sys.executable).name.lower().startswith(("python", "pypy")):
        return sys.executable
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [Path(prefix) / "bin" / name for prefix in (sys.prefix, sys.base_prefix)]
    places += [Path(sys.prefix, "Scripts", "python.exe"), Path(sys.base_prefix, "python.exe")]
    return next((str(place) for place in places if place.is_file()), None)


def _plain(value: object) -> object:
    """Any other mapping as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is not a text, number, list or object")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process and close its pipes; if a fork inherited it, only the pipes."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # not our child to wait for
    for pipe in (process.stdin, process.stdout):
        assert isinstance(pipe, (io.BufferedWriter, io.BufferedReader))
        with suppress(OSError):
            pipe.raw.close()  # closing the buffered pipe would send the rest


# ---- what the process does -------------------------------------------------------------------------------------------


def _answers(given: Mapping[str, Any], asked: Iterator[str]) -> Iterator[str]:
    """For each line, a number, messages and whether they ask: the same number and a text, or why there is none."""
    from jinja2 import TemplateError as Refusal
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: what an assistant says, which training asks for; here its text is as any other."""

        tags = {"generation"}  # noqa: RUF012  jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise Refusal(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def why(error: Exception) -> str:
        if isinstance(error, MemoryError):
            return f"MemoryError: it takes more than {MOST_MEMORY >> 20:,} MiB"
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:1000]
        return said if isinstance(error, Refusal) else f"{type(error).__name__}: {said}"

    def rendered(messages: object, asks: bool) -> str:
        pieces, length = [], 0
        for piece in template.generate(
            **given["special"], messages=messages, tools=None, documents=None, add_generation_prompt=asks
        ):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_RENDERED:
                raise Refusal(f"its text is longer than {MOST_RENDERED:,} characters")
        return "".join(pieces)

    damage = ""
    try:
        template = environment.from_string(given["source"])
    except Exception as error:  # a template is a program: it divides by 0, recurses, does not even compile
        damage = why(error)
    for line in asked:
        number, _, messages = line.partition(" ")
        try:
            told = {"why": damage} if damage else {"text": rendered(*json.loads(messages))}
        except Exception as error:
            told = {"why": why(error)}
        yield f"{number} {json.dumps(told)}"


def _timed(lines: Iterator[str], seconds: float) -> Iterator[str]:
    """The lines; an alarm ends this process if one takes too long and the process that asked is not there to end it."""
    alarm = getattr(signal, "setitimer", None)  # none on Windows
    for line in lines:
        if alarm:
            alarm(signal.ITIMER_REAL, 2 * seconds)
        yield line
        if alarm:
            alarm(signal.ITIMER_REAL, 0)


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = MOST_MEMORY if most == resource.RLIM_INFINITY else min(MOST_MEMORY, most)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    except (ValueError, OSError):  # some systems only have the name
        return


if __name__ == "__main__":
    lines = iter(sys.stdin.readline, "")
    given = json.loads(next(lines))
    sys.path[:] = given["path"]
    _bound_memory()
    for answer in _answers(given, _timed(lines, given["seconds"])):
        print(answer, flush=True)
