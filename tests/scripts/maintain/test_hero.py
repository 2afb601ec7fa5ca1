"""README's plot shows what a sweep measured, with labels that do not lie over each other."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from maintain import hero
from maintain.hero import LABEL


def point(batch: int, context: int, speedup: float, **changes: Any) -> dict[str, Any]:
    spread = {"min": speedup - 0.1, "median": speedup, "max": speedup + 0.1}
    shared = {"policy": "streaming", "budget": 256, "gamma": "auto", "temperature": 0.0, "status": "measured"}
    shared |= {"speedup": {"steady": spread}}
    return {"batch": batch, "context": context} | shared | changes


SWEEP = [point(batch, context, 1.0 + batch / 100) for batch in (1, 2, 4, 16) for context in (1000, 4000)]


def test_lines_end_with_labels_that_stand_apart_and_in_their_order() -> None:
    svg = hero.hero(SWEEP)
    ElementTree.fromstring(svg)
    labels = re.findall(r'y="([\d.]+)" class="l\d"><tspan class="b">([\d.]+)x</tspan> (\d+ rows?)', svg)
    assert [label[1:] for label in labels] == [
        ("1.16", "16 rows"), ("1.04", "4 rows"), ("1.02", "2 rows"), ("1.01", "1 row"),
    ]  # fmt: skip
    heights = [float(label[0]) for label in labels]
    assert all(below - above >= LABEL for above, below in itertools.pairwise(heights))
    assert svg.count("<circle") == svg.count('class="whisker"') == len(SWEEP) and svg.count("<polyline") == 4


def test_several_drafts_have_panels_side_by_side_and_a_context_alone_stands_at_the_left() -> None:
    one = [point(batch, 1000, 1.5, policy=policy) for policy in ("streaming", "guided") for batch in (1, 4)]
    root = ElementTree.fromstring(hero.hero(one))
    assert root.get("width") == str(2 * 520)
    panels = root.findall("{http://www.w3.org/2000/svg}g")
    assert [panel.get("transform") for panel in panels] == ["translate(0 0)", "translate(520 0)"]
    assert [panel[0].text for panel in panels] == [
        f"{policy} 256, gamma auto: speed, times plain decoding" for policy in ("streaming", "guided")
    ]
    assert {dot.get("cx") for dot in root.iter("{http://www.w3.org/2000/svg}circle")} == {"60.0"}


def written(points: list[dict[str, Any]], **settings: Any) -> str:
    """The text of a sweep's file."""
    return json.dumps({"benchmark": "batch", "settings": settings, "points": points})


def test_runs_too_short_for_a_steady_speed_are_drawn_by_the_one_to_the_end() -> None:
    short = [one | {"speedup": {"steady": None, "completion": one["speedup"]["steady"]}} for one in SWEEP]
    assert hero.hero(short) == hero.hero(SWEEP)


def test_a_sweep_that_names_its_temperature_once_is_drawn_as_any_other(tmp_path: Path) -> None:
    older = [{name: value for name, value in one.items() if name != "temperature"} for one in SWEEP]
    (tmp_path / "sweep.json").write_text(written(older, temperature=0.0))
    hero.main([str(tmp_path / "sweep.json"), str(tmp_path / "hero.svg")])
    assert (tmp_path / "hero.svg").read_text() == hero.hero(SWEEP)


def test_only_what_was_asked_for_is_drawn(tmp_path: Path) -> None:
    others = [point(8, 1000, 2.0, temperature=0.8), point(8, 1000, 3.0, policy="guided"), point(8, 1, 4.0, status="x")]
    (tmp_path / "sweep.json").write_text(written([*SWEEP, *others]))
    hero.main([str(tmp_path / "sweep.json"), str(tmp_path / "hero.svg")])
    assert (tmp_path / "hero.svg").read_text() == hero.hero(SWEEP)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "sweep.json holds no results of this program"),
        ("[]", "sweep.json holds no results of this program"),
        ("no", "sweep.json holds no results of this program"),
        (written([{"batch": 1}]), "sweep.json is no sweep of benchmark.py: KeyError('status')"),
        (written(SWEEP[:1]), "fewer than two contexts of streaming at temperature 0"),
        (
            written([*SWEEP, *(one | {"gamma": 6} for one in SWEEP), point(1, 1000, 1.0, budget=64)]),
            "sweep.json has several drafts of streaming, and one can be drawn: streaming 256, gamma auto; streaming "
            "256, gamma 6; streaming 64, gamma auto",
        ),
        (
            written([*SWEEP, *(point(batch, 1000, 1.0) for batch in (3, 5, 6, 7, 8))]),
            "sweep.json has 9 batches of streaming at temperature 0, and at most 8 can be told apart",
        ),
    ],
)
def test_a_mistake_is_one_sentence(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(SystemExit) as refusal:
        hero.main([str(tmp_path / "sweep.json"), str(tmp_path / "hero.svg")])
    assert refusal.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_speeds_that_are_all_the_same_are_drawn_too() -> None:
    spread = {"min": 1.0, "median": 1.0, "max": 1.0}
    svg = hero.hero([point(1, context, 1.0) | {"speedup": {"steady": spread}} for context in (1000, 4000)])
    ElementTree.fromstring(svg)
    assert svg.count("<circle") == 2


def test_a_sweep_whose_points_lack_their_speed_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(written([{k: v for k, v in one.items() if k != "speedup"} for one in SWEEP]))
    with pytest.raises(SystemExit) as stopped:
        hero.main([str(file), str(tmp_path / "hero.svg")])
    assert stopped.value.code == 2 and f"{file} is damaged: KeyError('speedup')" in capsys.readouterr().err
