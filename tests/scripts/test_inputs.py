"""Files of others' forms become prompts, RULER's tasks hold their answers, and rows are of the length asked for."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import batch
import benchmark
import generate
import make_prompts
from gpt_fast_sd.loading import BUNDLED
from inputs import rows, ruler, sources
from records import Encoder
from tests.helpers import ByteTokenizer, Patch, Printed

DOCUMENT = BUNDLED / "document.txt"


def prompts_for(source: Path, fields: list[str], tokenizer: Any, seed: int) -> Any:
    return rows.prompts_for(source, fields, tokenizer, Encoder(tokenizer).record, essay=DOCUMENT, seed=seed)


LONGBENCH = {
    "input": "Who rang?", "context": "The keeper rang.", "answers": ["The keeper"], "length": 4, "dataset": "qasper",
    "language": "en", "all_classes": None, "_id": "5a1",
}  # fmt: skip
INFINITE = {"id": 0, "context": "Long text.", "input": "What is the key?", "answer": ["71432"], "options": []}
SPEED = {
    "question_id": "a1", "category": "coding", "sub_category": "x", "turns": ["Sort a list.", "Now backwards."],
    "source": "s", "src_id": "1", "difficulty": "easy", "multiturn": True,
}  # fmt: skip
CHOICES = {f"choice_{name}": name for name in "ABCD"}
LONGBENCH_2 = {"_id": "b", "domain": "d", "question": "Which?", **CHOICES, "answer": "A", "context": "Text."}
PG19 = {"short_book_title": "A Book", "publication_date": 1860, "url": "http://x", "text": "It was a dark night."}
FORMS: list[tuple[dict[str, Any], str]] = [
    (LONGBENCH, "The keeper rang.\n\nWho rang?"), (INFINITE, "Long text.\n\nWhat is the key?"), (SPEED, "Sort a list."),
    (LONGBENCH_2, "Text.\n\nWhich?\n\nA\n\nB\n\nC\n\nD"),
    ({"index": 0, "input": "Words: a b.", "outputs": ["a"], "length": 9}, "Words: a b."),
    (PG19, "It was a dark night."),
]  # fmt: skip


def written(path: Path, found: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.Table.from_pylist(found), path)
    else:
        lines = "".join(f"{json.dumps(one)}\n" for one in found)
        path.write_text(json.dumps(found) if path.suffix == ".json" else lines)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(("row", "prompt"), FORMS)
def test_a_file_in_a_published_form_is_read(suffix: str, row: dict[str, Any], prompt: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"rows{suffix}", [row, row])
    assert [record for _, record in sources.prompts_of(path)] == 2 * [{"prompt": prompt}]
    assert len(sources.prompts_of(path, most=1)) == 1
    *_, last = row
    if isinstance(row[last], str):
        assert sources.prompts_of(path, [last])[0][1] == {"prompt": row[last]}
    with pytest.raises(ValueError, match=r"rows\S* (line|row) \d has no field 'nowhere'; it has"):
        sources.prompts_of(path, ["nowhere"])


def test_json_may_be_a_row_a_list_in_a_row_or_lines_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps(PG19)
    for text, n in ((row, 1), (json.dumps({"data": [PG19, PG19]}), 2), (f"{row}\n{row}\n", 2)):
        path.write_text(text)
        assert len(sources.prompts_of(path)) == n
    for text, said in (("[", "neither JSON nor JSON lines"), ("7", "must hold rows"), ("[]", "holds no prompt"),
                       ('[{"a": 1}]', "row 0 must be .* published form, and has a: --fields"),
                       ('[{"turns": []}]', "turns must be a text")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            sources.prompts_of(path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is no parquet file"):
        sources.prompts_of(tmp_path / "a.parquet")


def test_a_dataset_of_the_hub_is_read_by_its_library_and_what_lacks_is_said(monkeypatch: Patch, tmp_path: Path) -> None:
    asked = []

    def load_dataset(*args: object, **how: object) -> list[dict[str, Any]]:
        asked.append((*args, how))
        return [SPEED]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for name in ("hf:nvidia/SPEED-Bench:throughput_8k:test", "hf:a/b:train", "hf:a/b"):
        assert [record for _, record in sources.prompts_of(name)] == [{"prompt": "Sort a list."}]
    assert [(*args, how["split"]) for *args, how in asked] == [
        ("nvidia/SPEED-Bench", "throughput_8k", "test"), ("a/b", None, "train"), ("a/b", None, "test"),
    ]  # fmt: skip
    for library, source in (("datasets", "hf:a/b"), ("pyarrow.parquet", str(tmp_path / "x.parquet"))):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=rf"needs the library {library.partition('.')[0]}: pip install"):
            sources.prompts_of(source)


# ---- RULER -----------------------------------------------------------------------------------------------------------

SQUAD = {"data": [{"paragraphs": [
    {"context": f"Paragraph {i} is about the number {i * i}.",
     "qas": [{"question": f"What is paragraph {i} about?", "answers": [{"text": f"the number {i * i}"}]}]}
    for i in range(400)]}]}  # fmt: skip


@pytest.mark.parametrize("name", ruler.TASKS)
def test_a_sample_of_a_task_is_as_long_as_fits_and_holds_its_answers(name: str, tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    task = ruler.Task.of(f"ruler:{name}" + (f"={tmp_path}/squad.json" if name == "qa" else ""), DOCUMENT)
    samples = [task.sample(n, len, seed) for n, seed in ((9000, 0), (9000, 1), (3900, 0), (9000, 0))]
    assert samples[0] == samples[3] != samples[1]
    assert 7650 <= len(samples[0].prompt) <= 9000 and len(samples[2].prompt) <= 3900
    for sample in samples:
        assert sample.answers and all(answer in sample.prompt for answer in sample.answers)
    with pytest.raises(ValueError, match=rf"ruler:{name} takes at least \S+ tokens, and 10 are asked for"):
        task.sample(10, len, 0)


def test_what_lists_and_variables_ask_for_is_what_they_hold() -> None:
    common = ruler.Task("cwe").sample(20_000, len, 3)
    words = [word for word in common.prompt.split("\n")[1].split(" ") if not word.endswith(".")]
    counts = {word: words.count(word) for word in set(words)}
    assert {*sorted(counts, key=lambda word: -counts[word])[:10]} == {*common.answers}
    assert {counts[word] for word in common.answers} == {30} and {*counts.values()} == {30, 3}
    frequent = ruler.Task("fwe").sample(20_000, len, 3)
    words = frequent.prompt.split("\n")[1].split(" ... ")
    ranked = sorted({*words}, key=lambda word: -words.count(word))
    assert ranked[:3] == frequent.answers and words.count(ranked[2]) > words.count(ranked[3])
    chain = ruler.Task("vt").sample(5000, len, 3).answers
    assert len(chain) == len({*chain}) == 5


def test_tasks_that_are_none_and_files_without_questions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text('{"data": 3}')
    (tmp_path / "empty.txt").write_text(" ")
    for spec, said in (
        ("ruler:cwee", "tasks are .* got 'cwee'"), ("ruler:qa", "asks about a file of questions"),
        (f"ruler:vt={DOCUMENT}", "ruler:vt reads no file"),
        (f"ruler:niah_single_2={tmp_path}/empty.txt", "empty.txt is empty"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            ruler.Task.of(spec, DOCUMENT)
    for text in ('{"data": 3}', "[]", "[" * 10**5):
        (tmp_path / "none.json").write_text(text)
        with pytest.raises(ValueError, match="ruler:qa reads SQuAD's JSON"):
            ruler.Task.of(f"ruler:qa={tmp_path}/none.json", DOCUMENT).sample(900, len, 0)
    (tmp_path / "none.json").write_text(json.dumps(SQUAD))
    with pytest.raises(ValueError, match=r"ruler:qa has no more than \S+ tokens here, and 90,000 are asked for"):
        ruler.Task.of(f"ruler:qa={tmp_path}/none.json", DOCUMENT).sample(90_000, len, 0)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_sets_share_no_text_and_too_little_text_is_refused() -> None:
    kept = rows.RoundTheText(range(100), None, {})
    sets = [kept.rows(3, 8, turn, 4) for turn in range(4)]
    seen = [token for each in sets for row in each for token in row]
    assert len(seen) == len({*seen}) == 96
    assert kept.rows(2, 40) == [[*range(40)], [*range(50, 90)]]  # as ever
    with pytest.raises(ValueError, match="--sets 4 of 3 rows of 9 tokens take 108 tokens, and the texts have 100"):
        kept.rows(3, 9, 0, 4)
    assert "random" in (rows.RoundTheText(range(9), None, {"synthetic": 0}).note(1, 4) or "")


def test_whole_prompts_lose_their_middle_and_there_must_be_enough(tmp_path: Path) -> None:
    path = written(
        tmp_path / "l.jsonl", [LONGBENCH | {"context": "x" * 50}, LONGBENCH, INFINITE | {"context": "y" * 99}]
    )
    kept = prompts_for(path, [], ByteTokenizer(bos_id=None), 0)
    first, second = kept.rows(2, 40)
    assert bytes(first) == b"x" * 20 + b"x" * 9 + b"\n\nWho rang?" and len(second) == 40
    assert kept.rows(1, 40, turn=1, turns=2) == [second]
    longest = max(kept.found, key=len)
    assert kept.rows(1, len(longest)) == [longest]
    with pytest.raises(ValueError, match="2 prompts of at least 70 tokens are needed, and there are 1"):
        kept.rows(2, 70)
    task = prompts_for(Path("ruler:vt"), [], ByteTokenizer(), 4)
    made = [task.rows(2, 900, turn, 2) for turn in range(2)]
    assert len({str(row) for each in made for row in each}) == 4
    assert all(600 < len(row) <= 900 for each in made for row in each)


def test_texts_of_a_file_of_rows_are_many_and_lose_their_beginnings(tmp_path: Path, monkeypatch: Patch) -> None:
    path = written(tmp_path / "pg19.json", [PG19, PG19 | {"text": "x" * 30}])
    assert not rows.holds_prompts(path, []) and rows.holds_prompts(path, ["url"])
    found = rows.texts_of([path], ByteTokenizer(), skip=10)
    assert [bytes(ids) for ids in found.values()] == [PG19["text"].encode()[10:], b"x" * 20]
    (tmp_path / "a").mkdir()
    books = [tmp_path / "book.txt", tmp_path / "a" / "book.txt"]
    for book in books:
        book.write_text("some text")
    with pytest.raises(ValueError, match=r"two texts have one name, book\.txt: give each once"):
        rows.texts_of(books, ByteTokenizer())
    with pytest.warns(UserWarning, match="1 of 2 texts have no more than 25 tokens: left out"):
        assert [*rows.texts_of([path], ByteTokenizer(), skip=25).values()] == [[*b"x" * 5]]
    with pytest.raises(ValueError, match="the longest of 2 texts has 30 tokens, and --skip leaves out 30"):
        rows.texts_of([path], ByteTokenizer(), skip=30)
    monkeypatch.setattr(rows, "MOST_ROWS", 1)
    with pytest.warns(UserWarning, match=r"pg19\.json has more than 1 rows: the first 1 are read"):
        assert len(rows.texts_of([path], ByteTokenizer())) == 1
    with pytest.warns(UserWarning, match="the first 1 are read"):
        assert len(prompts_for(path, ["url"], ByteTokenizer(), 0).found) == 1


# ---- programs --------------------------------------------------------------------------------------------------------


def test_what_is_made_is_decoded_by_batch_and_scored(tmp_path: Path, capsys: Printed) -> None:
    def make(*argv: object) -> str:
        make_prompts.main([*map(str, argv)])
        return capsys.readouterr().out

    longbench, out = written(tmp_path / "l.parquet", [LONGBENCH]), tmp_path / "prompts.jsonl"
    sizes = "--tokens", "700", "--count", "2"
    assert make("ruler:vt", longbench, DOCUMENT, out, *sizes).startswith("5 prompts in ")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["id"] for one in lines[2:]] == [f"{longbench} row 0", "document.txt from 0", "document.txt from 699"]
    assert lines[2]["prompt"] == "The keeper rang.\n\nWho rang?" and len(lines[3]["tokens"]) == 700
    done = tmp_path / "done.jsonl"
    flags = ["--model", "bundled", "--draft", "lookup", "--no-compile", "--max-new-tokens", "4", "--device", "cpu"]
    batch.main([str(out), str(done), *flags, "--max-seq-len", "800"])
    answers = [json.loads(line) for line in done.read_text().splitlines()]
    assert [one["id"] for one in answers] == [one["id"] for one in lines]
    capsys.readouterr()
    done.write_text(json.dumps({"id": {"task": "vt", "answers": ["ABC", "DEF"]}, "text": "abc."}) + "\n")
    assert make("--score", done).split() == ["vt", "50.0%", "of", "1"]
    foreign = written(tmp_path / "speed.txt", [SPEED, lines[2]])  # whatever its name
    generate.main(["--prompts", str(foreign), *flags, "--output", str(tmp_path / "g.jsonl")])
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_benchmark_takes_sets_and_tasks(tmp_path: Path, capsys: Printed) -> None:
    file = tmp_path / "s.json"
    flags = (f"--model bundled --draft streaming --gamma 2 --pairs 1 --fresh --no-compile --dtype fp32 --batch 2 "
             f"--max-new-tokens 6 --budget 32 --json {file}").split()  # fmt: skip
    benchmark.main([*flags, "--context", "150", "--sets", "2", "--skip", "100"])
    (point,) = json.loads(file.read_text())["points"]
    over = point["over_sets"]
    assert len(over["sets"]) == len(point["ratios"]["completion"]) == 2 and over["interval"][0] < over["mean"]
    assert point["lossless"]["rows"] == point["lossless"]["equal"] == 4 and "over 2 sets" in capsys.readouterr().out
    benchmark.main([*flags, "--context", "700", "--text", "ruler:vt"])
    assert json.loads(file.read_text())["settings"]["text"] == {"task": "ruler:vt", "seed": 0}
    for more, said in ((["--sets", "40"], "--sets 40 of 2 rows of 150 tokens take"),
                       (["--text", "ruler:vt", "--sweep", "budget"], "holds prompts: it stands alone"),
                       (["--synthetic", "--skip", "9"], "--skip leaves out tokens of texts")):  # fmt: skip
        with pytest.raises(SystemExit):
            benchmark.main([*flags, "--context", "150", *more])
        assert said in " ".join(capsys.readouterr()).replace("\n", " ")
