"""Tables whose columns are declared once, and pictures of all results in the repository."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmark
from measuring import plots
from measuring.tables import Column, Table, shown
from tests.helpers import DATA


def test_a_row_stands_under_its_headings_and_in_markdown() -> None:
    name, speed = (lambda r: str(r["name"])), (lambda r: shown(r["speed"], ",.1f"))
    table = Table(Column("name", name, 8, left=True), Column("speed", speed))
    rows = [{"name": "a|b", "speed": 12345.67}, {"name": "c", "speed": None}]
    assert table.lines(rows) == ["name      speed", "a|b       12,345.7", "c             -"]
    assert table.line({"name": "much too long", "speed": 1}) == "much too long    1.0"
    assert table.markdown(rows) == ["| name | speed |", "| --- | --- |", "| a/b | 12,345.7 |", "| c | - |"]


def test_a_picture_that_could_not_be_drawn_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot draw x\.txt: its name must end in"):
        plots.check_drawable("--plot", Path("x.txt"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plots needs matplotlib: pip install"):
        plots.check_drawable("--plots")


def test_spreads_have_whiskers_and_numbers_have_none() -> None:
    drawn: list[Any] = []
    panel = SimpleNamespace(errorbar=lambda xs, ys, yerr, **_: drawn.append((ys, yerr)))
    for value in ({"median": 2.0, "min": 1.0, "max": 5.0}, 2.0):
        plots.line(panel, [1], [value], 0, "")
    assert drawn == [([2.0], [[1.0], [3.0]]), ([2.0], None)]


def test_what_is_in_the_repository_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = json.loads((DATA / "sweep.json").read_text(encoding="utf-8"))
    drawn = plots.draw_sweep(sweep["points"], sweep["lengths"], "a sweep", tmp_path / "sweep")
    assert [path.stem for path in drawn] == ["speedup_by_batch", "speedup_by_context", "throughput_latency"]
    files = [str(DATA / f"acceptance_{name}.json") for name in ("2000_t0", "4000_t0", "2000_t0.8")]
    benchmark.main(["--draw", *files, "--plots", str(tmp_path)])
    for path in (*drawn, tmp_path / "acceptance.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
