"""Record a program on a terminal, and draw the recording as one animated SVG that asks the network for nothing.

    python scripts/maintain/record.py docs/terminal.svg -- python scripts/generate.py     runs it, then draws it
    python scripts/maintain/record.py docs/terminal.svg                                   draws the recording anew

What the program wrote, and when, is kept beside the picture in asciinema's format (version 2): docs/terminal.cast. The
picture plays --speed times as fast, no pause in it lasts longer than --pause seconds, and lines that came all at once
come at --lines per second; the clock in its title bar shows the seconds that really passed. Without animation, or where
motion is not wanted, it shows the last screen.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

CELL, LINE, MARGIN, BAR = 8.4, 19, 16, 38  # pixels: width of a character, height of a line, around the text, title bar
COLORS = {31: "#ff7b72", 32: "#56d364", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#56d4dd"}  # by ANSI's numbers
INK, DIM, PAPER, EDGE = "#e6edf3", "#9198a1", "#0d1117", "#3d444d"
FRAME = 0.1  # played seconds that a screen is shown at least
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]|\x1b\][^\x07]*\x07")
BEGUN = re.compile(r"\x1b(\[[0-9;?]*|[()]|\][^\x07]*)?$")

Cell = tuple[str, int]  # a character and ANSI's number of its colour, 0 for none
Event = tuple[float, str]  # seconds since the start, what was written then


class Screen:
    """A terminal of so many columns that forgets nothing: all lines since the start, as far as programs here need."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column, self.color, self._rest = columns, 0, 0, 0, ""
        self.lines: list[list[Cell]] = [[]]

    def write(self, text: str) -> None:
        """Take text with its control sequences; those of no effect on characters or colours are left out."""
        text = self._rest + text
        begun = BEGUN.search(text)  # the end of a sequence comes with the next text
        self._rest = begun[0] if begun else ""
        text = text[: len(text) - len(self._rest)]
        at = 0
        for found in SEQUENCE.finditer(text):
            self._print(text[at : found.start()])
            at = found.end()
            if found[2]:
                self._control(found[2], found[1])
        self._print(text[at:])

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self._move(self.row + 1)
            elif character == "\b":
                self.column = max(0, self.column - 1)
            elif character >= " ":
                if self.column == self.columns:
                    self.column = 0
                    self._move(self.row + 1)
                line = self.lines[self.row]
                line.extend([(" ", 0)] * (self.column + 1 - len(line)))
                line[self.column] = (character, self.color)
                self.column += 1

    def _move(self, row: int) -> None:
        self.row = max(0, row)
        self.lines.extend([] for _ in range(self.row + 1 - len(self.lines)))

    def _control(self, letter: str, numbers: str) -> None:
        values = [int(number or 0) for number in re.sub(r"[^0-9;]", "", numbers).split(";")]
        if letter == "m":
            for value in values:
                self.color = 0 if value in (0, 39) else value if value in COLORS else self.color
        elif letter == "K":
            line = self.lines[self.row]
            kept = {0: line[: self.column], 1: [(" ", 0)] * self.column + line[self.column :], 2: []}
            self.lines[self.row] = kept.get(values[0], line)
        elif letter in "AB":
            self._move(self.row + (-1 if letter == "A" else 1) * max(1, values[0]))


@dataclass(frozen=True)
class Shown:
    """One thing on the picture from one played second to another, None: to the end."""

    start: float
    end: float | None
    row: int  # of all lines since the start
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Film:
    """A recording as it is played: lines with their times, how far it has scrolled when, and the clock."""

    lines: list[Shown]
    tops: list[tuple[float, int]]
    clock: list[tuple[float, float]]  # played, real seconds
    seconds: float


def film(events: Sequence[Event], columns: int, rows: int, speed: float, pause: float, most: float) -> Film:
    """Play events: speed times as fast, no pause longer than that, at most so many lines per second."""
    screen, played, last = Screen(columns), 0.0, 0.0
    frames: list[tuple[float, float, str]] = []  # played, real, what came until the next frame
    for real, text in events:
        played += min((real - last) / speed, pause)
        last = real
        for piece in text.splitlines(keepends=True):
            if frames and played - frames[-1][0] < FRAME:
                frames[-1] = (frames[-1][0], real, frames[-1][2] + piece)
            else:
                frames.append((played, real, piece))
            played += piece.endswith("\n") / most
    lines: list[Shown] = []
    since: dict[int, tuple[float, tuple[Cell, ...]]] = {}  # row -> when it was last changed, and to what
    tops, clock = [(0.0, 0)], [(0.0, 0.0)]
    for at, real, text in frames:
        screen.write(text)
        for row, line in enumerate(screen.lines):
            cells = trimmed(line)
            start, before = since.get(row, (0.0, ()))
            if cells != before:
                if before:
                    lines.append(Shown(start, at, row, before))
                since[row] = at, cells
        top = max(0, max((row for row, (_, cells) in since.items() if cells), default=0) + 1 - rows, tops[-1][1])
        if top != tops[-1][1]:
            tops.append((at, top))
        clock.append((at, real))
    lines += [Shown(start, None, row, cells) for row, (start, cells) in since.items() if cells]
    return Film(lines, tops, clock, played)


def trimmed(line: Sequence[Cell]) -> tuple[Cell, ...]:
    """A line without the blanks at its end."""
    n = max((i + 1 for i, (character, _) in enumerate(line) if character != " "), default=0)
    return tuple(line[:n])


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(reel: Film, columns: int, rows: int, title: str, hold: float) -> str:
    """The SVG: the last screen stands still, and where motion is welcome it is played again and again."""
    total = reel.seconds + hold
    width, height = columns * CELL + 2 * MARGIN, BAR + rows * LINE + MARGIN
    spans: dict[tuple[float, float | None], str] = {}
    body = []
    for shown in reel.lines:
        body.append(text_line(shown, spans.setdefault((shown.start, shown.end), f"t{len(spans)}")))
    clock = []
    ticks = [next(group) for _, group in itertools.groupby(reel.clock, key=lambda one: int(one[1]))]
    for (at, real), after in zip(ticks, [*(at for at, _ in ticks[1:]), None], strict=True):
        name = spans.setdefault((at, after), f"t{len(spans)}")
        time_of = f"{int(real) // 60}:{int(real) % 60:02}"
        clock.append(f'<text class="{name}" x="{width - MARGIN:g}" y="24" text-anchor="end">{time_of}</text>')
    scroll = "".join(f"{100 * at / total:.2f}%{{transform:translateY({-top * LINE}px)}}" for at, top in reel.tops)
    moving = [f"@keyframes scroll{{{scroll}}}#lines{{animation:scroll {total:.1f}s step-end infinite}}"]
    still = []
    for (start, end), name in spans.items():
        if (start, end) == (0.0, None):
            continue
        steps = [(0.0, "hidden"), (start, "visible")] if start else [(0.0, "visible")]
        steps += [(end, "hidden")] if end is not None else []
        frames = "".join(f"{100 * at / total:.2f}%{{visibility:{how}}}" for at, how in steps)
        moving.append(f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {total:.1f}s step-end infinite}}")
        if end is not None:
            still.append(f".{name}")
    colors = "".join(f".c{number}{{fill:{color}}}" for number, color in COLORS.items())
    nl = "\n"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">
<title>{escape(title)}</title>
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;fill:{INK};white-space:pre}}
.bar text{{fill:{DIM}}}{colors}
{",".join(still) or ".none"}{{visibility:hidden}}
#lines{{transform:translateY({-reel.tops[-1][1] * LINE}px)}}
@media (prefers-reduced-motion:no-preference){{
{nl.join(moving)}
}}
</style>
<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8" fill="{PAPER}" stroke="{EDGE}"/>
<g class="bar"><circle cx="20" cy="19" r="5.5" fill="#ff5f57"/><circle cx="38" cy="19" r="5.5" fill="#febc2e"/><circle cx="56" cy="19" r="5.5" fill="#28c840"/>
<text x="76" y="24">{escape(title)}</text>
{nl.join(clock)}
</g>
<svg x="0" y="{BAR}" width="{width:g}" height="{rows * LINE}"><g id="lines">
{nl.join(body)}
</g></svg>
</svg>
"""  # noqa: E501


def text_line(shown: Shown, name: str) -> str:
    """One line: its length is said, so that columns stand where they stood whatever font there is."""
    parts = []
    for color, cells in itertools.groupby(shown.cells, key=lambda cell: cell[1]):
        text = escape("".join(character for character, _ in cells), quote=False)
        parts.append(f'<tspan class="c{color}">{text}</tspan>' if color else text)
    where = f'x="{MARGIN}" y="{shown.row * LINE + 14}" textLength="{len(shown.cells) * CELL:g}"'
    return f'<text class="{name}" {where}>{"".join(parts)}</text>'


# ---- recording -------------------------------------------------------------------------------------------------------


def record(command: Sequence[str], columns: int, rows: int) -> tuple[list[Event], int]:
    """Run a command on a terminal of that size -> what it wrote and when, its exit code."""
    import fcntl
    import pty
    import struct
    import termios

    began, events = time.perf_counter(), []
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        try:
            os.execvpe(command[0], [*command], {**environment, "TERM": "xterm-256color"})
        except OSError as error:
            os.write(1, f"cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        for chunk in iter(lambda: os.read(terminal, 65536), b""):
            text = decoder.decode(chunk)
            events.append((round(time.perf_counter() - began, 3), text))
            print(text, end="", flush=True)
    except OSError as error:
        if error.errno != errno.EIO:  # so Linux says that nobody is there any more
            raise
    return events, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def read_cast(path: Path) -> tuple[str, int, int, list[Event]]:
    """The command, columns, rows and events of a recording in asciinema's format, version 2; ValueError or OSError."""
    try:
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        events = [(float(at), str(text)) for at, kind, text in lines if kind == "o"]
        return str(header["command"]), int(header["width"]), int(header["height"]), events
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no recording: {error!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Record where a command is given, then draw."""
    parser = argparse.ArgumentParser(
        prog="record.py", usage="%(prog)s [flags] FILE.svg [-- COMMAND ...]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    given = [*(sys.argv[1:] if argv is None else argv)]
    at = [*given, "--"].index("--")
    flags, command = given[:at], given[at + 1 :]
    add = parser.add_argument
    add("svg", metavar="FILE.svg", type=Path, help="the picture; the recording stands beside it as FILE.cast")
    add("--columns", metavar="N", type=int, default=88, help="of the terminal (default: 88)")
    add("--rows", metavar="N", type=int, default=34, help="of the terminal (default: 34)")
    add("--speed", metavar="X", type=float, default=8.0, help="times as fast as it was (default: 8)")
    add("--pause", metavar="S", type=float, default=1.5, help="played seconds of the longest pause (default: 1.5)")
    add("--lines", metavar="N", type=float, default=15.0, help="lines per played second at most (default: 15)")
    add("--hold", metavar="S", type=float, default=10.0, help="seconds that the last screen stands (default: 10)")
    args = parser.parse_args(flags)
    if args.svg.suffix != ".svg" or not args.svg.resolve().parent.is_dir():
        parser.error(f"the picture must be a file in a folder that is there, its name ending in .svg, got {args.svg}")
    for name in ("columns", "rows", "speed", "pause", "lines", "hold"):
        value = getattr(args, name)
        least = "at least 1" if name == "hold" else "greater than 0"
        if not math.isfinite(value) or value <= 0 or (name == "hold" and value < 1):
            parser.error(f"--{name} must be {least if math.isfinite(value) else 'finite'}, got {value}")
    cast = args.svg.with_suffix(".cast")
    if command:
        events, code = record(command, args.columns, args.rows)
        if code:  # the recording of an earlier run stays
            print(f"the command ended with {code}: nothing was drawn", file=sys.stderr)
            return 1
        header = {"version": 2, "width": args.columns, "height": args.rows, "command": shlex.join(command)}
        cast.write_text("".join(f"{json.dumps(line)}\n" for line in [header, *([t, "o", s] for t, s in events)]))
    try:
        title, columns, rows, events = read_cast(cast)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    prompt = (0.0, f"\x1b[32m$\x1b[0m {title}\r\n")
    reel = film([prompt, *events], columns, rows, args.speed, args.pause, args.lines)
    args.svg.write_text(draw(reel, columns, rows, title, args.hold), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
