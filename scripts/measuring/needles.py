"""Continuations that have to be copied from far back: made-up facts, registers, passages; and what drafts come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gpt_fast_sd import Completion, DraftConfig, Engine, SamplingParams
from gpt_fast_sd.model import Tokenizer
from inputs.facts import DIGITS, fact, made_up, question, register
from measuring.tables import Column, Table, shown

KINDS = ("needle", "lookup", "copy", "prose")
COPIED = 20  # tokens of a passage read again, or of prose, that are generated
DEPTHS = (0.05, 0.4)  # of the facts that are asked for: far from both ends
RESAMPLES = 2000  # of a bootstrap interval
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt, how many tokens follow it, and what they should be: a text, tokens, or (prose) anything."""

    prompt: list[int]
    answer: str | list[int] | None
    new_tokens: int = DIGITS
    cell: tuple[float, ...] = ()  # what cases are put together by

    def is_right(self, completion: Completion) -> bool | None:
        """Whether this is the answer; None where there is none."""
        if isinstance(self.answer, str):
            return completion.text.startswith(self.answer)
        return None if self.answer is None else completion.tokens == self.answer


class Cases:
    """Makes cases of a kind and length, prompt and answer together, out of held-out prose."""

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[str, Sequence[int]], seed: int = 0) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.books = [torch.tensor(ids) for ids in texts.values()]
        self.bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def make(self, kind: str, length: int, n: int) -> list[Case]:
        """n cases; the same for the same seed, kind and length, whatever else was asked for."""
        rng = np.random.default_rng([self.seed, KINDS.index(kind), length])
        return [getattr(self, kind)(rng, length) for _ in range(n)]

    def needle(self, rng: np.random.Generator, length: int, depth: float | None = None) -> Case:
        """Prose with one fact at depth, None: far back, asked for at the end."""
        depth = rng.uniform(*DEPTHS) if depth is None else depth
        (name,), (value,) = made_up(rng, 1)
        ids = self.books[int(rng.integers(len(self.books)))]
        start, room = int(rng.integers(0, max(1, len(ids) - length))), length
        while True:
            place = start + round(depth * room)
            parts = ids[start:place], ids[place : start + room]
            before, after = (self.tokenizer.decode(part.tolist()).strip("\ufffd") for part in parts)
            prompt = self.tokenizer.encode(f"{before}\n{fact(name, value)}\n{after}\n{question(name)}")
            excess = len(prompt) + DIGITS - length
            if excess <= 0:
                return Case(prompt=prompt, answer=value, cell=(length, depth))
            if room <= excess:
                raise ValueError(f"a needle does not fit into {length} tokens")
            room -= excess

    def asked(self, names: Sequence[str], values: Sequence[str], place: int) -> Case:
        """A register of facts, one of which is asked for."""
        prompt = self.tokenizer.encode("\n".join([*register(names, values), question(names[place])]))
        return Case(prompt=prompt, answer=values[place], cell=(len(names),))

    def lookup(self, rng: np.random.Generator, length: int) -> Case:
        names, values = made_up(rng, min(2000, max(2, length // 14)))
        place = rng.uniform(*DEPTHS)
        while True:
            case = self.asked(names, values, int(place * len(names)))
            excess = len(case.prompt) + DIGITS - length
            if excess <= 0:
                return case
            if len(names) <= 2:
                raise ValueError(f"a register of two facts does not fit into {length} tokens")
            kept = max(2, len(names) - 1 - excess // 20)
            names, values = names[:kept], values[:kept]

    def copy(self, rng: np.random.Generator, length: int) -> Case:
        """A passage, the prose behind it, and the first half of the passage again: its second half should follow."""
        cue = self.tokenizer.encode("\nRead it once more, word for word:\n", bos=False)
        half = max(COPIED, length // 10)
        between = length - 3 * half - len(cue) - COPIED - 1
        if between < 0:
            raise ValueError(f"a passage read twice does not fit into {length} tokens")
        text = self.stretch(rng, 2 * half + between)  # in one piece: the answer does not come again by chance
        prompt = [*self.bos, *text, *cue, *text[:half]]
        return Case(prompt=prompt, new_tokens=COPIED, answer=text[half : half + COPIED])

    def prose(self, rng: np.random.Generator, length: int) -> Case:
        if length <= COPIED + 1:
            raise ValueError(f"prose needs more than {COPIED + 1} tokens, got {length}")
        prompt = [*self.bos, *self.stretch(rng, length - COPIED - len(self.bos))]
        return Case(prompt=prompt, new_tokens=COPIED, answer=None)

    def stretch(self, rng: np.random.Generator, n: int) -> list[int]:
        book = self.books[int(rng.integers(len(self.books)))]
        start = int(rng.integers(0, len(book) - n + 1))
        return cast(list[int], book[start : start + n].tolist())


def measure_cell(engine: Engine, cases: Sequence[Case], drafts: Sequence[DraftConfig]) -> tuple[list[Any], list[Any]]:
    """Decode the cases plainly, then with every draft, a batch at a time: its slots keep their keys meanwhile.

    Whether each was answered right (None: there is no answer), and of every draft (accepted, drafted, emitted, rounds)
    of each case.
    """
    right: list[bool | None] = []
    counts: list[list[list[int]]] = [[] for _ in drafts]
    for start in range(0, len(cases), engine.config.batch_size):
        wave = cases[start : start + engine.config.batch_size]
        rows = [case.prompt for case in wave]
        params = [SamplingParams(max_tokens=case.new_tokens, ignore_eos=True) for case in wave]
        plainly = engine.generate(rows, params, speculate=False)
        right += [case.is_right(completion) for case, completion in zip(wave, plainly, strict=True)]
        for draft, found in zip(drafts, counts, strict=True):
            engine.redraft(draft)
            told = [completion.stats for completion in engine.generate(rows, params)]
            found += [[stats.accepted, stats.drafted, stats.emitted, stats.rounds] for stats in told]
    return right, counts


def accepted(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of drafts that were accepted: [..., 4] -> [...]"""
    return np.asarray(counts[..., 0] / np.maximum(1, counts[..., 1]))


def interval(values: NDArray[np.float64]) -> list[float]:
    return [float(end) for end in np.percentile(values, [2.5, 97.5])]


def summarize(results: Sequence[Record], seed: int = 0) -> list[Record]:
    """Per kind, prompts (all, or those answered right), budget and policy: ratios of sums and bootstrap intervals.

    Prompts are resampled, the same ones for every policy, so that the lead over streaming is that of pairs.
    """
    summary = []
    for kind in [k for k in KINDS if any(r["kind"] == k for r in results)]:
        cells = [r for r in results if r["kind"] == kind]
        right = [bool(x) for r in cells for x in r["right"]]
        told = [{(s["policy"], s["budget"]): s["prompts"] for s in r["settings"]} for r in cells]
        for subset in ("all",) if kind == "prose" else ("all", "right"):
            keep = np.array([subset == "all" or x for x in right])
            if not keep.any():
                continue
            counts = {  # of every policy and budget: [prompts, 4]
                key: np.array([row for one in told for row in one[key]], dtype=float)[keep] for key in told[0]
            }
            drawn = np.random.default_rng(seed).integers(0, keep.sum(), (RESAMPLES, keep.sum()))
            resampled = {key: rows[drawn].sum(1) for key, rows in counts.items()}  # [resamples, 4]
            for (policy, budget), rows in counts.items():
                total, again = rows.sum(0), resampled[policy, budget]
                record = {
                    "kind": kind, "prompts": subset, "n": int(keep.sum()), "policy": policy, "budget": budget,
                    "drafted": int(total[1]), "acceptance_rate": float(accepted(total)),
                    "acceptance_interval": interval(accepted(again)), "tokens_per_round": total[2] / total[3],
                    "tokens_per_round_interval": interval(again[:, 2] / again[:, 3]),
                }  # fmt: skip
                if policy != "streaming" and ("streaming", budget) in counts:
                    record |= lead(rows, counts["streaming", budget], again, resampled["streaming", budget])
                summary.append(record)
    return summary


def lead(rows: Any, others: Any, again: Any, others_again: Any) -> Record:
    return {
        "over_streaming": float(accepted(rows.sum(0)) - accepted(others.sum(0))),
        "over_streaming_interval": interval(accepted(again) - accepted(others_again)),
        "prompts_above_streaming": int((accepted(rows) > accepted(others)).sum()),
        "prompts_below_streaming": int((accepted(rows) < accepted(others)).sum()),
    }


def share(name: str, how: str) -> Callable[[Record], str]:
    def text(r: Record) -> str:
        if name not in r:
            return ""
        low, high = r[f"{name.removesuffix('_rate')}_interval"]
        return f"{r[name]:{how}} ({low:{how}} to {high:{how}})"

    return text


SUMMARY = Table(
    Column("policy", lambda r: r["policy"], 12, left=True),
    Column("budget", lambda r: shown(r["budget"], ",")),
    Column("acceptance, 95 %", share("acceptance_rate", ".1%"), 24),
    Column("tokens/round, 95 %", share("tokens_per_round", ".2f"), 20),
    Column("over streaming, 95 %", share("over_streaming", "+.1%"), 26),
    Column("above/below", lambda r: f"{r['prompts_above_streaming']}/{r['prompts_below_streaming']}"
           if "over_streaming" in r else ""),
)  # fmt: skip


def print_summary(summary: Sequence[Record]) -> None:
    """Acceptance with its interval, tokens per round, and the lead over streaming on the same prompts."""
    for kind, subset in dict.fromkeys((r["kind"], r["prompts"]) for r in summary):
        rows = [r for r in summary if (r["kind"], r["prompts"]) == (kind, subset)]
        which = "" if kind == "prose" else " answered right" if subset == "right" else ", all of them"
        print(f"\n{kind}, {rows[0]['n']} prompts{which}")
        rows.sort(key=lambda r: (r["budget"] or 0, r["policy"] != "streaming"))
        print(*SUMMARY.lines(rows), sep="\n")
