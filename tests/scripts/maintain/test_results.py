"""Pages of CPU results show what their JSON files hold, and an engine that is not alone is timed beside others."""

import json
from pathlib import Path

import pytest

from maintain import not_alone, results
from tests.helpers import Patch

ROOT = Path(__file__).resolve().parents[3]


def test_every_page_shows_what_the_program_writes(monkeypatch: Patch) -> None:
    written = dict[str, str]()
    monkeypatch.setattr(results, "write_whole", lambda path, text: written.update({str(path): text}))
    pages = [*results.write_pages()]
    assert ROOT / "README.md" in pages and len(written) > len(pages)
    for path, text in written.items():
        assert Path(path).read_text("utf-8") == text, f"{path}: python scripts/maintain/results.py --pages"


@pytest.mark.slow
def test_company_takes_a_part_of_the_speed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(not_alone, "TURNS", 2)
    monkeypatch.setattr(not_alone, "STEPS", 8)
    not_alone.main(["--json", str(tmp_path / "beside.json")])
    found = json.loads((tmp_path / "beside.json").read_text())["results"]
    assert found[0]["beside"] == "alone" and len(found) == 3
    assert all(row["tokens_per_second"] > 0 and row["least"] <= row["over_alone"] <= row["most"] for row in found)
