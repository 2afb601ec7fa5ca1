"""What all programs share: they import it first, so a checkout need not be installed; parser, progress, refusals."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

from tqdm import tqdm

from gpt_fast_sd.tp import Parallel

ROOT = Path(__file__).resolve().parent.parent
LONG_PREFILL = 1000  # tokens; a longer prefill is announced by a line where there is no terminal
PATIENCE = 10.0  # seconds within which torchrun ends the other processes after a refusal; each rank waits one more


class Parser(argparse.ArgumentParser):
    """argparse's, but that a value of no characters is none: as a path it would be the folder here, as a host all."""

    def _get_values(self, action: argparse.Action, given: list[str]) -> Any:
        if "" in given and action.dest not in ("prompt", "stop"):  # texts, of which the program says what they lack
            raise argparse.ArgumentError(action, "expected a value, got an empty text")
        return super()._get_values(action, given)


def parser_of(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the program's own page, line by line as it is written there."""
    return Parser(prog=program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


# ---- progress --------------------------------------------------------------------------------------------------------


class ProgressLine:
    """Draws the progress of work that takes over a second, on stderr if that is a terminal; see Engine.on_progress.

    The line shows each second that passes, also while nothing is reported (a compiler runs), and disappears when the
    work is done. Without a terminal one plain line says that a long prefill begins.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""
        self._said = False  # that a long prefill begins
        self._closed, self._ticked = threading.Event(), False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that this much of the total is done; what: the name of the work."""
        if self._bar is None or (what, total) != (self._what, self._bar.total) or done < self._bar.n:
            self.clear()
            self._what = what
            if what == "prefill" and total - done >= LONG_PREFILL and not (self._said or sys.stderr.isatty()):
                self._said = True
                print(f"prefilling {total - done:,} tokens ...", file=sys.stderr, flush=True)
            self._bar = tqdm(
                total=total, initial=done, desc=what, unit="", unit_scale=True, leave=False, delay=1.0, mininterval=0.5,
                disable=None,
            )  # fmt: skip
            self._closed, self._ticked = threading.Event(), False
            if not self._bar.disable:
                threading.Thread(target=self._tick, args=(self._bar, self._closed), daemon=True).start()
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.clear()

    def clear(self) -> None:
        """Remove the line; it returns if the same work goes on."""
        with tqdm.get_lock():
            self._closed.set()
        if self._bar is not None:
            if self._ticked:
                self._bar.clear()  # which close leaves to the first report
            self._bar.close()
        self._bar = None

    def _tick(self, bar: Any, closed: threading.Event) -> None:
        while not closed.wait(1.0):
            with tqdm.get_lock():
                if not closed.is_set():  # else it would stand there for good
                    bar.refresh(nolock=True)
                    self._ticked = True


@contextlib.contextmanager
def alone_prints(parallel: Parallel) -> Iterator[None]:
    """Only the first process writes to stdout."""
    if parallel.is_main:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# ---- refusals --------------------------------------------------------------------------------------------------------


def sentence(error: Exception) -> str:
    """What was wrong, in one line."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text[:300]}"


@contextlib.contextmanager
def refusing(program: str) -> Iterator[None]:
    """Input that makes no sense and files that cannot be used end the program with one sentence, see refuse."""
    try:
        yield
    except (ValueError, OSError) as error:
        refuse(error, program)


class Stdout:
    """A stdout that outlives its reader: what cannot be written any more is dropped, and the program ends in order.

    It stands in for sys.stdout in programs that `started` runs. Characters that its encoding lacks become "?".
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.lost = stream, None
        with contextlib.suppress(AttributeError):  # not every stream can
            stream.reconfigure(errors="replace")

    lost: OSError | None  # why nothing is written any more

    def write(self, text: str) -> int:
        """Write the text, or nothing if that fails once."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's."""
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        if self.lost is not None:
            return
        try:
            act()
        except OSError as error:
            self.lost = error
            with open(os.devnull, "w") as nowhere:  # for what is buffered still, and is written when Python ends
                os.dup2(nowhere.fileno(), self._stream.fileno())


def end_if_nobody_reads() -> None:
    """End a program of which nothing is wanted but its stdout, if that was closed by whom it was for.

    With the code that `started` gives: of several processes the others are ended by torchrun, but not after a 0.
    """
    if code := code_of(getattr(sys.stdout, "lost", None)):
        raise SystemExit(code)


def code_of(lost: OSError | None) -> int:
    """The exit code where stdout was lost so, 0 if it was not; what is no reader's leaving is said on stderr."""
    if lost is None or isinstance(lost, BrokenPipeError):
        return 0 if lost is None else 141
    print(f"stdout: {lost.strerror}", file=sys.stderr)
    return 1


def started(main: Callable[[], int | None], interrupted: str = "") -> NoReturn:
    """Run a program and exit with its code; with 130 as shells do if it is interrupted, after saying this on stderr.

    Where stdout could not be written to the end the code is 141, as shells have it, if its reader left, and else 1.
    """
    while (place := os.open(os.devnull, os.O_RDWR)) <= 2:  # or a file of ours is where libraries write their warnings
        pass
    os.close(place)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for good
    out = sys.stdout = Stdout(sys.stdout)
    standard: Any = warnings.formatwarning
    code: Any = 0
    warnings.formatwarning = partial(_warned, standard=standard)
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
        if interrupted:
            print(interrupted, file=sys.stderr)
    except SystemExit as stopped:
        code = stopped.code
    finally:
        warnings.formatwarning = standard
    out.flush()
    raise SystemExit(code or code_of(out.lost))


def _warned(message: Warning | str, category: type[Warning], file: str, *rest: Any, standard: Any) -> str:
    """A warning of ours as one line without its place in the source; others as ever."""
    if category is UserWarning and ROOT in Path(file).resolve().parents and "site-packages" not in file:
        return f"warning: {message}\n"
    text: str = standard(message, category, file, *rest)
    return text


def refuse(error: Exception, program: str, *, code: int = 2) -> NoReturn:
    """One sentence on stderr and the exit code; of several processes the first one speaks at once.

    The others wait and name their rank: where the first of them refuses too, torchrun ends them before they repeat it,
    and where it does not, one of them is heard.
    """
    rank, local = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK"))
    if rank != "0":
        time.sleep(PATIENCE + (int(local) if local.isdecimal() else 0))
    who = program if rank == "0" else f"{program}, rank {rank}"
    print(f"{who}: {sentence(error)}", file=sys.stderr, flush=True)
    raise SystemExit(code)
