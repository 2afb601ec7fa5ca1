"""The contexts beyond which speculation pays, interpolated between measured ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from measuring.points import Crossing, crossing, lengths_of, lines_of

Record = dict[str, Any]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.1, 1.2, 1.3], Crossing(None, "below")),
        ([0.7, 0.8, 0.9], Crossing(None, "none")),
        ([0.9, 1.1, 1.2], Crossing(math.sqrt(1000 * 4000), "between")),
        ([0.9, 1.0, 1.2], Crossing(4000.0, "between")),
        ([0.5, 0.75, 1.25], Crossing(math.sqrt(4000 * 16000), "between")),
        ([1.2, 0.9, 1.1], Crossing(math.sqrt(4000 * 16000), "between")),  # from there on it stays above
        ([1.2, 1.1, 1.0], Crossing(None, "none")),
    ],
)
def test_a_crossing_is_where_the_line_stays_above_over_log2_of_the_context(
    values: list[float], expected: Crossing
) -> None:
    found = crossing([1000, 4000, 16000], values, 1.0)
    assert found.of_measured == expected.of_measured
    assert found.context == (pytest.approx(expected.context) if expected.context else None)


def test_a_crossing_says_so_where_there_is_none() -> None:
    assert Crossing(None, "below").phrase([1000, 4000]) == "below 1,000"
    assert Crossing(None, "none").phrase([1000, 4000]) == "none up to 4,000"
    assert Crossing(2345.6, "between").phrase([1000, 4000]) == "2,346"


def measured(batch: int, context: int, steady: float) -> Record:
    """As much of a point as the lengths are read from."""
    return {
        "batch": batch, "context": context, "policy": "streaming", "budget": 256, "gamma": 6,
        "speedup": {"steady": {"median": steady}, "completion": {"median": 0.0}},
    }  # fmt: skip


def test_the_critical_length_is_where_the_speedup_begins_to_grow_with_the_batch() -> None:
    """As MagicDec's figure: it falls with the batch at 1K, does not change at 2K, and rises at 8K."""
    table = {1000: [0.8, 0.7, 0.6], 2000: [0.9, 0.9, 0.9], 8000: [1.0, 1.4, 1.8]}
    points = [
        measured(batch, context, value)
        for context, row in table.items()
        for batch, value in zip((1, 4, 16), row, strict=True)
    ]
    *evens, critical = lengths_of(points)
    assert (critical["kind"], critical["context"], critical["of_measured"]) == ("critical length", 2000.0, "between")
    assert critical["slopes"] == pytest.approx([-0.05, 0.0, 0.2])
    assert [(r["kind"], r["batch"]) for r in evens] == [("break-even", batch) for batch in (1, 4, 16)]
    assert [r["phrase"] for r in evens] == ["none up to 8,000", "2,639", "2,333"]
    (alone,) = lengths_of(points[::3])  # one batch: it has no slope
    assert alone["kind"] == "break-even"
    assert lines_of(lengths_of(points)) == [
        "streaming 256, gamma 6: critical length 2,000 tokens; break-even at batch 1 none up to 8,000, "
        "batch 4 2,639, batch 16 2,333"
    ]
    assert "critical length needs two batches" in lines_of([alone])[0]
