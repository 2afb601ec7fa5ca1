"""Pictures of docs/: a recording plays what a program wrote, when and in which colours; a plot shows a sweep."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from maintain import hero, record, results
from tests.helpers import DATA, Printed

ROOT = Path(__file__).resolve().parents[3]


def lines_of(screen: record.Screen) -> list[str]:
    return ["".join(character for character, _ in line).rstrip() for line in screen.lines]


def last_screen(svg: str) -> list[str]:
    """The texts of the lines that stand without an animation, in order."""
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    style = root.findtext(f"{name}style") or ""
    hidden = re.findall(r"\.(t\d+)", style.split("visibility:hidden}")[0])
    lines = root.find(f"{name}svg/{name}g")
    assert lines is not None
    return ["".join(text.itertext()) for text in lines if text.get("class") not in hidden]


def test_a_line_is_written_over_erased_and_wrapped_as_a_terminal_does() -> None:
    screen = record.Screen(columns=6)
    screen.write("abc\rX\r\n12345678\r\nlong\r\x1b[Kno\r\n\x1b[Aon\x1b[?25l")
    assert lines_of(screen) == ["Xbc", "123456", "78", "on", ""]
    # text that comes in pieces is the same text
    text = "\x1b[1;32mgreen\x1b[0m\x1b(B\x1b]0;title\x07\r\n\x1b[?25lend\x1b[K\r\x1b[35mE"
    whole = record.Screen(columns=20)
    whole.write(text)
    for cut in range(len(text)):
        pieces = record.Screen(columns=20)
        pieces.write(text[:cut])
        pieces.write(text[cut:])
        assert pieces.lines == whole.lines, cut
    assert lines_of(whole) == ["green", "End"]


def test_a_program_is_recorded_on_a_terminal_and_drawn_anew_from_its_recording(tmp_path: Path, capsys: Printed) -> None:
    code = "import os, sys; print('\\033[32mé<&>\\033[0m', sys.stdin.isatty()); print(*os.get_terminal_size())"
    out = tmp_path / "run.svg"
    assert record.main([str(out), "--columns", "30", "--rows", "4", "--", sys.executable, "-c", code]) == 0
    header, *events = [json.loads(line) for line in out.with_suffix(".cast").read_text().splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, 30, 4)
    assert "".join(text for _, _, text in events).split() == ["\x1b[32mé<&>\x1b[0m", "True", "30", "4"]
    assert "True" in capsys.readouterr().out  # one sees it run
    first = out.read_text()
    assert last_screen(first)[-2:] == ["é<&> True", "30 4"] and '<tspan class="c32">é&lt;&amp;&gt;</tspan>' in first
    out.unlink()
    assert record.main([str(out)]) == 0 and out.read_text() == first


def test_a_program_that_fails_leaves_what_was_drawn(tmp_path: Path, capsys: Printed) -> None:
    out = tmp_path / "run.svg"
    assert record.main([str(out), "--", sys.executable, "-c", "print('right')"]) == 0
    kept = out.read_text(), out.with_suffix(".cast").read_text()
    for command, said in (([sys.executable, "-c", "raise SystemExit(3)"], "3"), (["no-such-program"], "127")):
        assert record.main([str(out), "--", *command]) == 1
        assert f"ended with {said}" in capsys.readouterr().err
        assert (out.read_text(), out.with_suffix(".cast").read_text()) == kept


def test_the_picture_in_docs_is_that_of_the_recording_beside_it(tmp_path: Path) -> None:
    cast, svg = (ROOT / "docs" / f"terminal.{kind}" for kind in ("cast", "svg"))
    (tmp_path / cast.name).write_bytes(cast.read_bytes())
    assert record.main([str(tmp_path / svg.name)]) == 0
    assert (tmp_path / svg.name).read_text(encoding="utf-8") == svg.read_text(encoding="utf-8")


def test_a_plot_has_a_line_for_each_batch_and_its_title_says_what_it_shows() -> None:
    """In a panel for each draft, here at two temperatures."""
    points = json.loads((DATA / "sweep.json").read_text())["points"]
    svg = hero.hero(points)
    assert svg.count("<polyline") == 2 * 2 and svg.count("<circle") == len(points) == 8
    told = ("at 7,500 tokens: 16 rows 1.27x, 1 rows 1.08x", "at 7,500 tokens: 16 rows 1.27x, 1 rows 1.06x")
    assert f"{'; '.join(told)}</title>" in svg


def test_a_page_of_results_tells_what_was_measured_and_nothing_of_a_part_that_is_not_whole(tmp_path: Path) -> None:
    sweep = json.loads((DATA / "sweep.json").read_text())
    del sweep["points"][0]  # of a cell one temperature is left
    here = sweep["environment"] | {"instructions": "avx2", "cores": 2}
    about = {"environment": here, "date": "today", "engine": "x", "gb_per_second": 1.0, "gflops": 1.0}
    (tmp_path / "set.json").write_text(json.dumps(about | {"parts": {"sweep": {"command": "    a command"}}}))
    for name in ("sweep", "long"):
        (tmp_path / f"{name}.json").write_text(json.dumps(sweep))
    page = results.page(tmp_path)
    assert page.count("\n## ") == 1 and "    a command" in page and "| 7,500 x 16 |" in page and "| - | - |" in page
    assert results.is_whole(sweep) and not results.is_whole({"points": [{"status": "failed"}]})
