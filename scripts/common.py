"""What all programs share: they import it first, so a checkout need not be installed; progress, and refusals."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

from tqdm import tqdm

from gpt_fast_sd.tp import Parallel

LONG_PREFILL = 1000  # tokens; a longer prefill is announced by a line where there is no terminal
PATIENCE = 10.0  # seconds within which torchrun ends the other processes after a refusal; each rank waits one more


# ---- progress --------------------------------------------------------------------------------------------------------


class ProgressLine:
    """Draws the progress of work that takes over a second, on stderr if that is a terminal; see Engine.on_progress.

    The line disappears when the work is done. Without a terminal one plain line says that a long prefill begins.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""
        self._said = False  # that a long prefill begins

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that this much of the total is done; what: the name of the work."""
        if self._bar is None or (what, total) != (self._what, self._bar.total) or done < self._bar.n:
            self.clear()
            self._what = what
            if what == "prefill" and total - done >= LONG_PREFILL and not (self._said or sys.stderr.isatty()):
                self._said = True
                print(f"prefilling {total - done:,} tokens ...", file=sys.stderr, flush=True)
            self._bar = tqdm(
                total=total, initial=done, desc=what, unit="", unit_scale=True, leave=False, delay=1.0, disable=None
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.clear()

    def clear(self) -> None:
        """Remove the line; it returns if the same work goes on."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


@contextlib.contextmanager
def alone_prints(parallel: Parallel) -> Iterator[None]:
    """Only the first process writes to stdout."""
    if parallel.is_main:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# ---- refusals --------------------------------------------------------------------------------------------------------


def check_apart(report: Path | None, others: Mapping[str, Any]) -> None:
    """Refuse a --report that would overwrite another file of the same run; others: by their names in args."""
    if report is None:
        return
    if report.exists() and not (report.is_file() or report.is_dir()):
        raise ValueError(f"cannot write {report}: it is no file that can be replaced")
    for name, value in others.items():
        for path in map(Path, value if isinstance(value, list) else [] if value in (None, "-") else [value]):
            named = f"--{name.replace('_', '-')} {path}"
            if path.resolve() == report.resolve() or (path.exists() and report.exists() and path.samefile(report)):
                raise ValueError(f"--report {report} and {named} are the same file")
            if path.is_dir() and report.exists() and report.resolve().parent == path.resolve():
                raise ValueError(f"--report {report} would take the place of a file of {named}")


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


def started(main: Callable[[], int | None]) -> NoReturn:
    """Run a program and exit with its code, with 130 as shells do if it is interrupted."""
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def refuse(error: Exception, program: str, *, code: int = 2) -> NoReturn:
    """One sentence on stderr and the exit code; of several processes the first one speaks at once.

    The others wait and name their rank: where the first of them refuses too, torchrun ends them before they repeat it,
    and where it does not, one of them is heard.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(PATIENCE + int(os.environ.get("LOCAL_RANK", "0")))
    who = f"{program}, rank {rank}" if rank else program
    print(f"{who}: {sentence(error)}", file=sys.stderr, flush=True)
    raise SystemExit(code)
