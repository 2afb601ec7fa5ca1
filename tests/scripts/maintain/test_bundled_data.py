"""Documents hold what they promise: their length, their first token, and answers that their own facts give."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maintain import bundled_data
from maintain.bundled_data import MIXTURES, Books, book_paths, skipped_positions, training_document


class Words:
    """A token is a word with the space before it, a digit or any other character; ids are given as they come."""

    bos_id, eos_id = 1, 2

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, 3 + len(self.ids)) for piece in re.findall(r" ?[A-Za-z]+|.|\n", text)]

    def decode(self, ids: np.ndarray) -> str:
        pieces = {i: piece for piece, i in self.ids.items()}
        return "".join(pieces.get(i, "") for i in ids.tolist())


WORDS = Words()


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Books:
    folder = tmp_path_factory.mktemp("books")
    for n in range(3):
        (folder / f"{n}.txt").write_text(
            "".join(f"Line {i} of book {n} tells of {i * i}. " for i in range(4000 + 500 * n))
        )
    return Books(book_paths(folder), WORDS, folder / "cache")


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("kind", {**MIXTURES["copying"], **MIXTURES["prose"]}, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("n", [65, 513, 2049])
def test_a_document_has_exactly_n_tokens_and_starts_with_bos(kind: bundled_data.Kind, n: int, books: Books) -> None:
    for seed in range(5):
        ids = kind(rng(seed), n, books, WORDS)
        assert ids.shape == (n,)
        assert ids.dtype == np.int64
        assert ids[0] == WORDS.bos_id
        assert not (ids[1:] == WORDS.bos_id).any()


@pytest.mark.parametrize("kind", [bundled_data.lookup_document, bundled_data.needle_document])
def test_every_answer_in_a_document_is_the_value_its_fact_stated_before(kind: bundled_data.Kind, books: Books) -> None:
    answered = 0
    for seed in range(8):
        text = WORDS.decode(kind(rng(seed), 8193, books, WORDS))
        first_question = text.find("Recall ")
        stated = dict(re.findall(r"Remember ([^.?]+) (\d{5})\.", text[:first_question]))
        asked = re.findall(r"Recall ([^.?]+) (\d{5})\.", text)
        assert stated
        for name, value in asked:
            assert stated[name] == value
        answered += len(asked)
    assert answered >= 8


def test_the_same_seed_gives_the_same_documents_and_another_seed_others(books: Books) -> None:
    first, again, other = (
        [training_document(r, 257, books, WORDS, "prose") for _ in range(8)] for r in (rng(1), rng(1), rng(2))
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_held_out_passages_never_reach_training(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("x." * 490 + "!" * 20)
    books = Books(book_paths(tmp_path), WORDS, tmp_path / "cache")
    assert not any("!" in WORDS.decode(books.passage(rng(seed), 50)) for seed in range(20))
    assert WORDS.decode(books.passage(rng(0), 10, held_out=True)) == "!" * 10


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), n=st.integers(4, 300), slack=st.integers(0, 5000))
def test_skipped_positions_rise_from_zero_and_stay_in_range(seed: int, n: int, slack: int) -> None:
    pos = skipped_positions(rng(seed), n, n + slack)
    assert pos.shape == (n,)
    assert pos[0] == 0
    assert (np.diff(pos) >= 1).all()
    assert (np.diff(pos) > 1).sum() <= 3
    assert pos[-1] < n + slack


def test_a_book_is_tokenized_once_and_a_half_written_cache_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one and the same text " * 50)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "b.4711").write_bytes(b"a killed process left this")
    first = Books(book_paths(tmp_path), WORDS, cache)
    (tmp_path / "b.txt").write_text("changed")
    again = Books(book_paths(tmp_path), WORDS, cache)
    assert np.array_equal(first.parts[0], again.parts[0])
    assert [path.name for path in cache.glob("*.npy")] == ["b.npy"]
