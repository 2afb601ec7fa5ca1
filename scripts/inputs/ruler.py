"""RULER's tasks, made anew from their definition (Hsieh et al. 2024, arXiv 2404.06654), for any tokenizer and length.

    niah_single_1, _2, _3       one needle: a number among sentences that repeat, a number or a code in an essay
    niah_multikey_1, _2, _3     among four needles, among needles alone, the same with codes for keys and values
    niah_multivalue, _multiquery    four values of one key; four keys are asked for
    vt                          variables that are given others' values, four hops from the first
    cwe, fwe                    the ten words that a list has most often; the three of a text that follows Zipf's law
    qa                          a question about one of many paragraphs, of a local file in SQuAD's form

Each has as much of what distracts as fits into the length. Words, noise and questions are ours, so scores are not
RULER's own; what a model has to do is.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gpt_fast_sd.model import parse_json
from inputs.facts import ADJECTIVE, FIRST, LAST, NOUN
from inputs.prompts import read_text

RULER = "ruler:"
NOISE = "The field is wide. The road is dry. The well is deep. On we walk. Home is far, and then it is near. "
WORDS = sorted({*map(str.lower, FIRST + LAST), *ADJECTIVE, *NOUN})
NEEDLES = {  # kind of keys, kind of values, what distracts, keys beside the one asked for, values of it, keys asked for
    "niah_single_1": ("word", "number", "noise", 0, 1, 1),
    "niah_single_2": ("word", "number", "essay", 0, 1, 1),
    "niah_single_3": ("word", "code", "essay", 0, 1, 1),
    "niah_multikey_1": ("word", "number", "essay", 3, 1, 1),
    "niah_multikey_2": ("word", "number", "needles", 0, 1, 1),
    "niah_multikey_3": ("code", "code", "needles", 0, 1, 1),
    "niah_multivalue": ("word", "number", "essay", 0, 4, 1),
    "niah_multiquery": ("word", "number", "essay", 0, 1, 4),
}
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa")
HOPS, COMMON, OFTEN, SELDOM, MOST_FREQUENT, ZIPF = 4, 10, 30, 3, 3, 2.0
Rng = np.random.Generator


@dataclass(frozen=True)
class Sample:
    """A prompt and the texts that a right answer holds."""

    prompt: str
    answers: list[str]


@dataclass(frozen=True)
class Task:
    """One of the tasks. text: of the essay, or the file of questions, where it needs one."""

    name: str
    text: str = ""

    @classmethod
    def of(cls, spec: str, essay: Path) -> Task:
        """ruler:NAME or ruler:NAME=FILE; ValueError for one that is not known. essay: what it reads without a FILE."""
        name, _, file = spec.removeprefix(RULER).partition("=")
        if name not in TASKS:
            raise ValueError(f"RULER's tasks are {', '.join(TASKS)}; got {name!r}")
        if name == "qa" and not file:
            raise ValueError("ruler:qa asks about a file of questions: ruler:qa=FILE.json, in SQuAD's form")
        if not (name == "qa" or NEEDLES.get(name, ("", "", ""))[2] == "essay"):
            if file:
                raise ValueError(f"ruler:{name} reads no file: leave ={file} out")
            return cls(name)
        text = read_text(Path(file) if file else essay)
        if not text.strip():
            raise ValueError(f"{file or essay} is empty: give it some text")
        return cls(name, text)

    def sample(self, n_tokens: int, count: Callable[[str], int], seed: int) -> Sample:
        """The longest sample of at most n_tokens, as count has them; ValueError if even the shortest has more."""
        make = self._maker(seed)
        if (least := count(make(1).prompt)) > n_tokens:
            raise ValueError(f"{RULER}{self.name} takes at least {least:,} tokens, and {n_tokens:,} are asked for")
        low, high = 1, 2
        while count(make(high).prompt) <= n_tokens and high < 4 * n_tokens:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if count(make(middle).prompt) <= n_tokens else (low, middle)
        found = make(low)
        if (most := count(found.prompt)) < n_tokens / 2:
            raise ValueError(
                f"{RULER}{self.name} has no more than {most:,} tokens here, and {n_tokens:,} are asked for"
            )
        return found

    def _maker(self, seed: int) -> Callable[[int], Sample]:
        """What makes a sample with so much that distracts; the same seed asks the same."""
        if self.name in NEEDLES:
            return lambda size: _needles(self.name, size, self.text, np.random.default_rng(seed))
        if self.name == "qa":
            questions = _questions(self.text)
            return lambda size: _answer(questions, size, seed)
        make = {"vt": _variables, "cwe": _common_words, "fwe": _frequent_words}[self.name]
        return lambda size: make(size, np.random.default_rng(seed))


def _code(rng: Rng) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _value(kind: str, rng: Rng) -> str:
    if kind == "number":
        return str(rng.integers(10**6, 10**7))
    return _code(rng) if kind == "code" else f"{rng.choice(ADJECTIVE)}-{rng.choice(WORDS)}-{rng.choice(NOUN)}"


def _hidden(sentences: Sequence[str], facts: Sequence[str], rng: Rng) -> str:
    """Facts between sentences, anywhere."""
    places = np.sort(rng.integers(0, len(sentences) + 1, len(facts)))
    parts, start = [], 0
    for place, fact in zip(places, facts, strict=True):
        parts += [*sentences[start:place], fact]
        start = place
    return " ".join([*parts, *sentences[start:]])


def _needles(name: str, size: int, essay: str, rng: Rng) -> Sample:
    of_key, of_value, among, beside, values, asked = NEEDLES[name]

    def fact(key: str, value: str) -> str:
        return f"The secret {of_value} of {key} is {value}."

    def keys(n: int, taken: Collection[str] = ()) -> list[str]:
        found = dict[str, None]()
        while len(found) < n:
            if (key := _value(of_key, rng)) not in taken:
                found[key] = None
        return [*found]

    wanted = {key: [_value(of_value, rng) for _ in range(values)] for key in keys(asked)}
    facts = [fact(key, value) for key, held in wanted.items() for value in held]
    facts += [fact(key, _value(of_value, rng)) for key in keys(beside, wanted)]
    if among == "needles":
        sentences = [fact(key, _value(of_value, rng)) for key in keys(size, wanted)]
    elif among == "noise":
        sentences = NOISE.split(". ")[:-1] * size
        sentences = [f"{one}." for one in sentences]
    else:
        words = essay.split()
        words = (words * (-(-10 * size // max(1, len(words)))))[: 10 * size]
        sentences = [" ".join(words[i : i + 10]) for i in range(0, len(words), 10)]
    rng.shuffle(facts)
    text, of = _hidden(sentences, facts, rng), ", ".join(wanted)
    several = "s" if values * asked > 1 else ""
    prompt = (
        f"Secret {of_value}s stand in this text. Remember them: you will be asked for some.\n{text}\n"
        f"What {'are' if several else 'is'} the secret {of_value}{several} of {of}?\n"
        f"The secret {of_value}{several} of {of}, as the text has {'them' if several else 'it'}:"
    )
    return Sample(prompt, [value for held in wanted.values() for value in held])


def _variables(size: int, rng: Rng) -> Sample:
    names = dict[str, None]()
    while len(names) <= HOPS:
        names["".join(rng.choice([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"], 5))] = None
    chain, value = [*names], str(rng.integers(10**4, 10**5))
    facts = [f"VAR {chain[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in pairwise(chain)]
    noise = [f"{one}." for one in NOISE.split(". ")[:-1] * size]
    prompt = (
        "Variables are set in this text, some to what another one holds. Follow them.\n"
        f"{_hidden(noise, facts, rng)}\n"
        f"Which {len(chain)} variables hold {value}, by what the text says?\nThe variables that hold {value} are:"
    )
    return Sample(prompt, chain)


def _pairs(n: int, rng: Rng) -> list[str]:
    """n different words of two parts."""
    most = len(WORDS) ** 2
    return [f"{WORDS[i // len(WORDS)]}{WORDS[i % len(WORDS)]}" for i in rng.choice(most, min(n, most), replace=False)]


def _common_words(size: int, rng: Rng) -> Sample:
    words = _pairs(COMMON + size, rng)
    common, others = words[:COMMON], words[COMMON:]
    often = min(OFTEN, OFTEN // 3 + max(0, size - COMMON))
    seldom = max(1, often * SELDOM // OFTEN)
    listed = common * often + others * seldom
    rng.shuffle(listed)
    lines = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
    prompt = (
        f"Some words of this numbered list come up far more often than the others.\n{lines}\n"
        f"Which {COMMON} words does the list have most often?\nThe {COMMON} words that it has most often are:"
    )
    return Sample(prompt, common)


def _frequent_words(size: int, rng: Rng) -> Sample:
    n_words = min(2000, max(8, size // 4))
    words = ["".join(rng.choice([*"abcdefghijklmnopqrstuvwxyz"], 6)) for _ in range(n_words)]
    shares = 1.0 / np.arange(1, n_words + 1) ** ZIPF
    times = np.maximum(1, np.floor(8 * size * shares / shares.sum())).astype(int)
    times[:MOST_FREQUENT] += np.arange(MOST_FREQUENT, 0, -1)  # no tie among those asked for, or with the next
    listed = [word for word, n in zip(words, times, strict=True) for _ in range(n)]
    rng.shuffle(listed)
    prompt = (
        f"Each word of this coded text stands for something; dots stand for nothing.\n{' ... '.join(listed)}\n"
        f"Which {MOST_FREQUENT} words does the text have most often?\n"
        f"The {MOST_FREQUENT} words that it has most often are:"
    )
    return Sample(prompt, words[:MOST_FREQUENT])


def _questions(text: str) -> list[dict[str, Any]]:
    """context, question and answers of a file in SQuAD's form, or of a list of such rows; ValueError for others."""
    try:
        found = parse_json(text, constants=False)
        if isinstance(found, dict):
            found = [
                {"context": part["context"], "question": qa["question"], "answers": [a["text"] for a in qa["answers"]]}
                for article in found["data"]
                for part in article["paragraphs"]
                for qa in part["qas"]
                if qa["answers"]
            ]
        rows = [{key: row[key] for key in ("context", "question", "answers")} for row in found if row["answers"]]
        if rows:
            return rows
        raise ValueError("no question")
    except (ValueError, KeyError, TypeError):
        said = "ruler:qa reads SQuAD's JSON, or a list of objects with context, question and answers"
        raise ValueError(f"{said}; got {text!r:.60}") from None


def _answer(questions: Sequence[dict[str, Any]], size: int, seed: int) -> Sample:
    asked, rng = questions[seed % len(questions)], np.random.default_rng(seed)
    others = [*dict.fromkeys(one["context"] for one in questions if one["context"] != asked["context"])]
    rng.shuffle(others)
    documents = [asked["context"], *others[: size - 1]]
    rng.shuffle(documents)
    text = "\n\n".join(f"Document {i}:\n{one}" for i, one in enumerate(documents, start=1))
    prompt = (
        f"Answer from these documents, in a few words and nothing else.\n\n{text}\n\n"
        f"Question: {asked['question']}\nAnswer:"
    )
    return Sample(prompt, [str(answer) for answer in asked["answers"]])
