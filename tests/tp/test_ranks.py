"""Ranks hold one model together: two and four of them, on gloo, against one (workers/checks.py has the checks)."""

from pathlib import Path

import pytest

from tests.tp.spawn import run_checks
from tests.tp.workers.checks import COMPILED, ENGINE, FOUR, GROUPS, MODEL, MORE, SELDOM

# name of a start: ranks, of which so many hold a model, and groups of checks; one start serves them all
GROUPS_OF: dict[str, tuple[int, int, list[str]]] = {
    "two ranks": (2, 2, [MODEL, ENGINE]),
    "no less than four ranks": (4, 4, [FOUR]),
    "two ranks, more": (2, 2, [SELDOM, MORE]),
    "two ranks, compiled": (2, 2, [COMPILED]),
    "four ranks": (4, 4, [MODEL, ENGINE, SELDOM, MORE]),
    "two replicas of two ranks": (4, 2, [MODEL, ENGINE, SELDOM]),
}
STARTS = {start: (n, tp, [name for group in of for name in GROUPS[group]]) for start, (n, tp, of) in GROUPS_OF.items()}


FOUND: dict[str, dict[str, list[str]]] = {}  # complaints by start, then check


@pytest.mark.parametrize(
    ("start", "name"),
    [
        pytest.param(start, name, marks=() if start == "two ranks" else pytest.mark.slow)
        for start, (_, _, names) in STARTS.items()
        for name in names
    ],
)
def test_ranks_together_are_one(start: str, name: str, tmp_path: Path) -> None:
    if start not in FOUND:  # no fixture of the module: pytest would bring together what has a name, not a start
        n, tp, names = STARTS[start]
        FOUND[start] = run_checks(n, tp, names, tmp_path)
    assert not FOUND[start][name], "\n".join(FOUND[start][name])
