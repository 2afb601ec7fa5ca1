"""The file of results: complete after each of them, resumed, and left alone if it is not ours."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from inputs.prompts import digest
from measuring.ledger import Ledger, complete, fingerprint, read_document, write_whole
from tests.helpers import tiny_model


def ledger(path: Path | None, benchmark: str = "speed", fresh: bool = False, **settings: Any) -> Ledger:
    return Ledger(path, benchmark, settings, {"cpu": "a"}, fresh=fresh)


def test_results_stay_for_a_run_with_the_same_settings_and_take_each_others_place(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    first = ledger(file, pairs=7)
    first.put({"n": 1}, {"n": 1, "x": (1, 2)})
    assert not file.exists()  # until it is written
    first.put({"n": 2}, {"n": 2, "x": None})
    first.write(more="said")
    again = ledger(file, pairs=7)
    assert again.find({"n": 1}) == {"n": 1, "x": [1, 2]} and again.find({"n": 3}) is None
    assert again.find({"n": 1, "missing": 4}) is None
    again.put({"n": 1}, {"n": 1, "x": 5})
    again.write()
    document = json.loads(file.read_text())
    assert document["results"] == [{"n": 2, "x": None}, {"n": 1, "x": 5}] and document["more"] == "said"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert ledger(file, pairs=8, fresh=True).records == []
    nowhere = ledger(None)  # without a file nothing is written
    nowhere.put({"n": 1}, {"n": 1})
    nowhere.write()
    assert nowhere.records == [{"n": 1}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("my notes", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "holds no results of this benchmark"),
        ('{"benchmark": "speed", "settings": 7}', "holds no results of this benchmark"),
        ('{"benchmark": "speed", "results": {"n": 1}}', "holds no results of this benchmark"),
        ('{"benchmark": "speed", "points": [1]}', "holds no results of this benchmark"),
        ('{"benchmark": "peers"}', "holds no results of this benchmark"),
        ('{"benchmark": "speed"}', "was measured with pairs None, not 7"),
        ('{"benchmark": "speed", "settings": {"pairs": 8}}', "was measured with pairs 8, not 7: name another file"),
    ],
)
def test_a_file_of_something_else_or_of_other_settings_is_left_alone(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=said):
        ledger(file, pairs=7)
    assert file.read_text() == content
    if "measured" not in said:
        with pytest.raises(ValueError, match=r"x\.json holds no results of this program"):
            read_document(file, "speed")


def test_what_results_lack_is_said_with_the_name_of_their_file(tmp_path: Path) -> None:
    record: dict[str, Any] = {}
    with pytest.raises(ValueError, match=r"x\.json is damaged: KeyError\('speedup'\)"), complete(tmp_path / "x.json"):
        record["speedup"]
    with pytest.raises(ValueError, match="as it is"), complete(tmp_path / "x.json"):
        raise ValueError("as it is")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "x.json"
    write_whole(file, "old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        write_whole(file, "new")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]
    with pytest.raises(OSError, match="not a file that can be replaced"):
        write_whole(tmp_path, "x")


def test_names_of_tokens_and_weights_change_with_them() -> None:
    assert digest([1, 2]) == digest((1, 2)) != digest([12])
    assert fingerprint(tiny_model()) == fingerprint(tiny_model()) != fingerprint(tiny_model(seed=1))
