"""Print what the project has set itself to stay below, and what it is: lines by room, words of pages.

    python scripts/maintain/budgets.py        # exit code 1 if something is over its budget

Lines are those of `wc -l`: blank ones and comments count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = {
    "asked",
    "batch",
    "card",
    "common",
    "comparing",
    "files",
    "flags",
    "generate",
    "harness",
    "journal",
    "minimal",
    "records",
    "serve",
}  # programs that run, not measure


def lines(paths: Iterable[Path]) -> int:
    """Lines of these files; links are not followed."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def under(folder: str, *kinds: str) -> list[Path]:
    """The files of these kinds below a folder of the project."""
    return [p for kind in kinds or ("*.py",) for p in (ROOT / folder).rglob(kind) if "__pycache__" not in p.parts]


def prose(page: str) -> int:
    """Words of a page without code, tables, pictures and addresses."""
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    text = re.sub(r"^(\||    ).*$", "", text, flags=re.M)
    return len(re.sub(r"\]\([^)]*\)", "]", re.sub(r"<[^>]*>", "", text)).split())


def budgets() -> list[tuple[str, int, int | None]]:
    """(what, how many, at most so many; None: no budget)."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.sub(r"<a href.*?</a>|\]\([^)]*\)", "", readme.split("## Run it")[0], flags=re.S)
    inputs = [*under("scripts/inputs"), ROOT / "scripts/make_prompts.py"]
    programs = [p for p in under("scripts", "*.py", "*.html") if p.stem not in RUN and "maintain" not in p.parts]
    measuring = [p for p in programs if p not in inputs]
    widest = max(
        len(line) for p in under("gpt_fast_sd/fast/cpu", "*.cpp", "*.hpp") for line in p.read_text().splitlines()
    )
    rooms = [(room, lines(under(room, "*.py", "*.cpp", "*.hpp")), None) for room in (
        "model", "tp", "gpt_fast_sd/policies", "gpt_fast_sd/serving", "gpt_fast_sd/loading", "gpt_fast_sd/quantization",
        "gpt_fast_sd/fast",
    )]  # fmt: skip
    return [
        ("scripts/minimal.py", lines([ROOT / "scripts/minimal.py"]), 200),
        ("the core: files of gpt_fast_sd/", lines((ROOT / "gpt_fast_sd").glob("*.py")), 1800),
        *rooms,
        ("programs that run", lines(p for p in under("scripts") if p.stem in RUN), None),
        ("inputs of all programs", lines(inputs), None),
        ("measuring, with its programs", lines(measuring), 8500),
        ("maintainers' tools", lines(under("scripts/maintain")), None),
        ("tests", lines(under("tests", "*.py", "*.cpp")), 30_645),
        ("columns of the widest line in C++", widest, 120),
        ("words of README", prose(readme), 600),
        ("figures of README before Run it", len(re.findall(r"(?<![\w.,-])\d", first)), 12),  # not H200, float8
        ("lines of CHANGELOG", lines([ROOT / "CHANGELOG.md"]), 80),
        (
            "words of results pages",
            sum(prose(p.read_text(encoding="utf-8")) for p in under("benchmarks", "*.md")),
            None,
        ),
    ]


def main() -> None:
    """Print the table."""
    over = False
    for what, found, most in budgets():
        over |= most is not None and found > most
        limit = "" if most is None else f"of {most:,}{'  OVER' if found > most else ''}"
        print(f"{what:36} {found:7,}  {limit}".rstrip())
    sys.exit(int(over))


if __name__ == "__main__":
    main()
