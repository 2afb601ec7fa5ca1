"""Training and probing text for the bundled model: books, and documents in which far context decides the next token.

Every document is a numpy array of token ids that starts with BOS. The synthetic kinds are
  lookup  a long register of facts, "Remember NAME 12345.", then questions about some of them
  needle  book prose with a few facts dropped in, asked for later
  copy    a passage that comes back word for word
  list    a list of names that is recited again, in order
  repeat  a passage's tokens in random order, again and again (induction: Olsson et al. 2022, arXiv 2209.11895)
  drill   a short run of tokens drawn uniformly, again and again
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inputs.facts import made_up, question, register

Ids = NDArray[np.int64]


class Encoder(Protocol):
    """The part of a tokenizer that documents need; encode adds no BOS."""

    bos_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids, no BOS."""
        ...


def book_paths(folder: Path) -> list[Path]:
    """The text files of a folder, by name; ValueError where there are none."""
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise ValueError(f"no books: {folder} holds no .txt file")
    return paths


class Books:
    """Token ids of some books, each cut once into a training part and a held-out tail; cache keeps them tokenized."""

    def __init__(self, paths: Sequence[Path], encoder: Encoder, cache: Path, held_out: float = 0.02) -> None:
        self.parts: list[Ids] = []
        self.tails: list[Ids] = []
        for path in paths:
            stored = cache / f"{path.stem}.npy"
            if not stored.exists():
                stored.parent.mkdir(parents=True, exist_ok=True)
                partial = stored.with_suffix(f".{os.getpid()}")  # so that neither a kill nor a second process halves it
                with partial.open("wb") as file:
                    np.save(file, np.asarray(encoder.encode(path.read_text(encoding="utf-8")), dtype=np.uint16))
                partial.replace(stored)
            ids = np.load(stored).astype(np.int64)
            cut = int(len(ids) * (1 - held_out))
            self.parts.append(ids[:cut])
            self.tails.append(ids[cut:])
        self.weights = np.array([len(part) for part in self.parts], dtype=np.float64)
        self.weights /= self.weights.sum()
        self.vocabulary = np.unique(np.concatenate(self.parts))

    def require(self, training: int, held_out: int) -> None:
        """Raise ValueError unless every book gives held-out passages, and one of them training passages, this long."""
        shortest, longest = min(map(len, self.tails)), max(map(len, self.parts))
        if shortest < held_out or longest < training:
            raise ValueError(
                f"too few tokens: the longest book trains on {longest:,} and the shortest holds out {shortest:,}, "
                f"but passages of {training:,} and {held_out:,} are needed"
            )

    def passage(self, rng: np.random.Generator, n: int, held_out: bool = False) -> Ids:
        """n consecutive tokens of one book, drawn with probability proportional to its length."""
        pool = self.tails if held_out else self.parts
        ids = pool[int(rng.choice(len(pool), p=self.weights))]
        start = int(rng.integers(0, max(1, len(ids) - n)))
        return ids[start : start + n]


def lookup_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """A register of facts filling most of n tokens, then questions about some of them."""
    names, values = made_up(rng, min(1500, max(2, int(n * rng.uniform(0.3, 0.7) / 15))))
    lines = register(names, values)
    asked = rng.permutation(len(names))[: max(1, (n - 15 * len(lines)) // 15)]
    lines += [question(names[i]) + values[i] + "." for i in asked]
    return fit(encoder.encode("\n".join(lines)), n, encoder)


def needle_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """Book prose in which a few facts are stated at random places and asked for at the end."""
    count = int(rng.integers(1, 5 + n // 1024))
    names, values = made_up(rng, count)
    tail: list[int] = []
    for i in rng.permutation(count):
        tail += encoder.encode("\n" + question(names[i]) + values[i] + ".")
    facts = [encoder.encode(f"\n{line}\n") for line in register(names, values)]
    prose = books.passage(rng, max(1, n - len(tail) - sum(map(len, facts)) - 1))
    places = np.sort(rng.integers(0, len(prose) + 1, count))
    pieces: list[int] = []
    last = 0
    for place, piece in zip(places, facts, strict=True):
        pieces += [*prose[last:place].tolist(), *piece]
        last = int(place)
    return fit(pieces + prose[last:].tolist() + tail, n, encoder)


def copy_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """Passage, other prose, and the passage again, word for word."""
    length = int(n * rng.uniform(0.15, 0.4))
    passage = books.passage(rng, length).tolist()
    between = books.passage(rng, int(rng.integers(0, max(1, n - 2 * length - 16)))).tolist()
    cue = encoder.encode("\nRead it once more, word for word:\n")
    return fit(passage + between + cue + passage + cue + passage, n, encoder)


def list_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """Names in order, then prose that uses them and the same names in the same order, again and again."""
    names, _ = made_up(rng, int(rng.integers(4, 16 + n // 128)))
    block = encoder.encode("".join(f"{i + 1}. {name}\n" for i, name in enumerate(names)))
    ids = encoder.encode("The list:\n") + block
    while len(ids) < n:
        ids += books.passage(rng, int(rng.integers(16, 64 + n // 4))).tolist() + encoder.encode("\nThe list:\n") + block
    return fit(ids, n, encoder)


def repeat_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """A run of tokens drawn at random from a passage's vocabulary, over and over."""
    run = rng.permutation(books.passage(rng, int(rng.integers(8, max(17, n // 2))))).tolist()
    return fit(run * (n // len(run) + 1), n, encoder)


def book_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """Plain prose."""
    return fit(books.passage(rng, n).tolist(), n, encoder)


def fit(ids: list[int], n: int, encoder: Encoder) -> Ids:
    """BOS, then ids, cut or closed by EOS and filled with EOS to exactly n tokens."""
    ids = [encoder.bos_id, *ids][:n]
    return np.asarray(ids + [encoder.eos_id] * (n - len(ids)), dtype=np.int64)


def drill_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder) -> Ids:
    """A short run of tokens drawn uniformly, over and over: only copying helps, and it helps at once."""
    run = rng.choice(books.vocabulary, int(rng.integers(6, 30))).tolist()
    return fit(run * (n // len(run) + 1), n, encoder)


Kind = Callable[[np.random.Generator, int, Books, Encoder], Ids]
MIXTURES: dict[str, dict[Kind, float]] = {
    # Comes first and is short. Among prose alone the heads that copy did not form in 12 M tokens, here they do in 1 M.
    "copying": {book_document: 0.10, lookup_document: 0.15, copy_document: 0.05, drill_document: 0.70},
    "prose": {
        book_document: 0.50, needle_document: 0.12, lookup_document: 0.14, copy_document: 0.10, list_document: 0.04,
        repeat_document: 0.10,
    },
}  # fmt: skip


def training_document(rng: np.random.Generator, n: int, books: Books, encoder: Encoder, mixture: str) -> Ids:
    """One document of exactly n tokens, its kind drawn from MIXTURES[mixture]."""
    kinds = MIXTURES[mixture]
    kind = list(kinds)[int(rng.choice(len(kinds), p=list(kinds.values())))]
    return kind(rng, n, books, encoder)


def skipped_positions(rng: np.random.Generator, n: int, max_pos: int) -> Ids:
    """n rising positions from 0, all below max_pos, with up to three gaps: a short text seen at long range.

    Trains far rotary distances at the price of short sequences (PoSE: Zhu et al. 2023, arXiv 2309.10400).
    """
    runs = int(rng.integers(1, 4))
    cuts = np.sort(rng.choice(np.arange(1, n), size=runs, replace=False))
    gaps = np.sort(rng.integers(0, max_pos - n + 1, size=runs))
    pos = np.arange(n, dtype=np.int64)
    for cut, gap in zip(cuts, np.diff(gaps, prepend=0), strict=True):
        pos[cut:] += gap
    return pos
