"""Tables whose columns are declared once: a row at a time on a terminal as results come, or whole in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


def shown(value: float | None, how: str) -> str:
    """A number in this format; a dash if there is none."""
    return "-" if value is None else format(value, how)


@dataclass(frozen=True)
class Column:
    """A column: its heading, its text for a row, and on a terminal its width and alignment."""

    heading: str
    show: Callable[[Any], str]
    width: int = 0
    left: bool = False


def number(heading: str, key: str, how: str = "", width: int = 0, unit: str = "") -> Column:
    """A column of a figure in this format, of a nested one as in "plain.round_ms"; a dash where there is none."""

    def text(row: Any) -> str:
        for part in key.split("."):
            row = row[part]
        return "-" if row is None else f"{row:{how}}{unit}"

    return Column(heading, text, width)


class Table:
    """Columns in order, none narrower than its heading. Rows are whatever the columns can show."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    @property
    def head(self) -> str:
        return self._line([column.heading for column in self.columns])

    def line(self, row: Any) -> str:
        return self._line([column.show(row) for column in self.columns])

    def lines(self, rows: Iterable[Any]) -> list[str]:
        return [self.head, *map(self.line, rows)]

    def markdown(self, rows: Iterable[Any]) -> list[str]:
        head = [column.heading for column in self.columns]
        return [_bars(head), _bars(["---"] * len(head)), *(_bars([c.show(row) for c in self.columns]) for row in rows)]

    def _line(self, texts: list[str]) -> str:
        pairs = zip(self.columns, texts, strict=True)
        padded = (f"{text:{'<' if c.left else '>'}{max(c.width, len(c.heading))}}" for c, text in pairs)
        return "  ".join(padded).rstrip()


def _bars(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
