"""A run as one HTML page: who proposed each token, what was refused, how rounds went, and what drafts read.

    recorder = Recorder(engine.tokenizer, prompts, params, engine.policy.proposers)
    engine.on_round = recorder
    engine.generate(prompts, params)
    Path("run.html").write_text(page(recorder, "my run", ways={"speculative": Way.of([engine.stats])}))

The page needs no other file and no network. The data of a long run is thinned or cut, and the page says so: it never
grows beyond MOST_BYTES.

Shapes: S positions, W stretches of positions that are drawn as one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
from torch import Tensor

from gpt_fast_sd.config import SamplingParams
from gpt_fast_sd.model import StreamDecoder, Tokenizer
from gpt_fast_sd.serving.requests import RoundEvent, TokenEvent
from gpt_fast_sd.serving.stats import EngineStats

MOST_BYTES = 400_000  # of a page
TEXT_BYTES, VIEW_BYTES = 160_000, 80_000  # of it, for tokens and for what drafts read
MOST_REQUESTS, MOST_ROUNDS, MOST_VIEWS = 48, 1000, 256  # shown: texts, rounds of the timeline, rounds of a text's views
WIDTH = 192  # stretches in the picture of what a draft reads
MOST_CHARS, ENDING = 400, 240  # of a name or a fact, and of the end of a prompt
DIGITS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
HERE = "__RUN__"  # the template's placeholder for the run

Json = dict[str, Any]
Part = tuple[int, list[str], list[int], int, list[str]]  # round, its pieces and their sources, drafted, refused


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to decode the prompts: the statistics of its run, and the tokens/s of all timed runs."""

    stats: EngineStats
    speeds: Sequence[float]

    @classmethod
    def of(cls, runs: Sequence[EngineStats]) -> Way:
        """The run of median speed represents all."""
        ranked = sorted(runs, key=lambda stats: stats.decode_tokens_per_second)
        return cls(stats=ranked[len(runs) // 2], speeds=[stats.decode_tokens_per_second for stats in runs])

    @property
    def speed(self) -> float:
        return self.stats.decode_tokens_per_second

    def as_dict(self) -> Json:
        stats, rounds = self.stats, max(1, self.stats.rounds)
        return {
            "speed": self.speed, "speeds": list(self.speeds), "tokens": stats.decode_tokens, "rounds": stats.rounds,
            "per_round": stats.tokens_per_round, "seconds": stats.decode_seconds,
            "ms_a_round": 1e3 * stats.decode_seconds / rounds, "kv_mb": stats.kv_bytes_per_token / 1e6,
            "parts": [stats.draft_seconds, stats.verify_seconds, stats.host_seconds],
        }  # fmt: skip


@dataclass
class _Views:
    """The entries that drafts for one text read: the sum of all rounds, and a limited number of single rounds."""

    length: int  # the most positions of the text
    total: np.ndarray[Any, np.dtype[np.float64]] = field(init=False)  # [W]
    seen: int = 0  # rounds
    every: int = 1  # every n-th of which is kept
    kept: list[tuple[int, str, int]] = field(default_factory=list)  # round, one digit per stretch, entries read

    def __post_init__(self) -> None:
        width = min(WIDTH, self.length)
        self.edges = np.arange(width + 1) * self.length // width  # [W + 1]
        self.total = np.zeros(width)

    def add(self, number: int, read: Tensor) -> None:
        """Add a round that read these shares of positions, fp32 [S]."""
        n = min(len(read), self.length)
        sums = np.concatenate(([0.0], read[:n].double().cumsum(0).numpy()))  # [n + 1]
        shares = np.diff(sums[np.minimum(self.edges, n)]) / np.diff(self.edges)  # [W]
        self.total += shares
        if self.seen % self.every == 0:
            self.kept.append((number, digits(shares), round(float(sums[-1]))))
            if len(self.kept) > MOST_VIEWS:
                self.every, self.kept = 2 * self.every, self.kept[::2]
        self.seen += 1

    def as_dict(self, n_written: int, allowed: int) -> Json | None:
        if not self.total.any():  # a policy that reads no keys, or nothing drafted
            return None
        used = int(np.searchsorted(self.edges, n_written))  # stretches that are not empty
        most = max(1, allowed // (used + 24))
        apart = -(-len(self.kept) // most)
        rounds = [[number, shares[:used], entries] for number, shares, entries in self.kept[::apart]]
        read = {"sum": digits(self.total / self.seen)[:used], "rounds": rounds}
        return {"length": int(self.edges[used]), "every": self.every * apart, **read}


@dataclass
class _Text:
    """The record of one request."""

    n_prompt: int
    ending: str  # of the prompt
    tail: list[int]  # the latest tokens: what a refused draft would have followed
    views: _Views
    rounds: list[Part] = field(default_factory=list)
    accepted: int = 0
    finish: str = ""


class Recorder:
    """Takes the rounds of one run, see Engine.on_round; it holds no tensor, and no more views than a page can show."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams],
        proposers: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """The prompts and parameters of the run, in the order in which its events number them; who may draft."""
        self.tokenizer, self.sources = tokenizer, ["target", *proposers]
        self.n_requests, self.n_rounds = len(prompts), 0
        self.rounds: list[list[float]] = []
        self.drafted: list[int] = []  # by position
        self.accepted: list[int] = []
        self.whole = False  # rounds were CUDA graphs
        self.texts = {
            index: _Text(len(ids), self._ending(ids), list(ids[-8:]), _Views(len(ids) + p.max_tokens))
            for index, (ids, p) in enumerate(zip(prompts[:MOST_REQUESTS], params, strict=False))
        }

    def __call__(self, event: RoundEvent) -> None:
        number = self.n_rounds
        self.n_rounds += 1
        self.whole = self.whole or not event.verify_seconds
        if number < MOST_ROUNDS:
            seconds = event.seconds, event.draft_seconds, event.verify_seconds, event.prefill_seconds
            sums = len(event.events), sum(e.drafted for e in event.events), sum(e.accepted for e in event.events)
            self.rounds.append([event.gamma, *(round(1e3 * s, 2) for s in seconds), *sums])
        for one in event.events:
            for counts, n in ((self.drafted, one.drafted), (self.accepted, one.accepted)):
                counts.extend([0] * (one.drafted - len(counts)))
                counts[:n] = [count + 1 for count in counts[:n]]
            if one.index in self.texts:
                self._take(self.texts[one.index], number, one)
                if one.index in event.read:
                    self.texts[one.index].views.add(number, event.read[one.index])

    def _take(self, text: _Text, number: int, event: TokenEvent) -> None:
        sources = [self.sources.index(source) for source in event.sources]
        pieces = event.pieces if self.tokenizer else [f"{token} " for token in event.tokens]
        refused = self._texts_of([*text.tail, *event.tokens[: event.accepted]], event.refused)
        text.rounds.append((number, list(pieces), sources, event.drafted, refused))
        text.tail = [*text.tail, *event.tokens][-8:]
        text.accepted += event.accepted
        if event.completion:
            text.finish = event.completion.finish_reason

    def _texts_of(self, context: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """The text that each of these tokens would have added after the context, or its id if that is not text."""
        if self.tokenizer is None:
            return [f"{token} " for token in tokens]
        decoder = StreamDecoder(self.tokenizer, context)
        return [decoder.push([token]) or f"#{token}" for token in tokens]

    def _ending(self, prompt: Sequence[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, prompt[-20:]))
        return self.tokenizer.decode(list(prompt[-80:]))[-ENDING:].lstrip("\ufffd")

    def as_dict(self, names: Sequence[int]) -> Json:
        requests, left, views_left = [], TEXT_BYTES, VIEW_BYTES
        cut = 0
        for behind, (index, text) in zip(range(len(self.texts), 0, -1), self.texts.items(), strict=True):
            spent, shown = len(in_script(text.ending)), []
            for one in text.rounds:
                size = len(in_script(one)) + 1
                if spent + size > left // behind:
                    break
                shown.append(one)
                spent += size
            left -= spent
            cut += len(shown) < len(text.rounds)
            n_tokens = sum(len(pieces) for _, pieces, *_ in text.rounds)
            views = text.views.as_dict(text.n_prompt + n_tokens, views_left // behind)
            views_left -= len(in_script(views)) if views else 0
            requests.append({
                "name": names[index], "prompt": text.n_prompt, "ending": text.ending, "finish": text.finish,
                "tokens": n_tokens, "rounds": shown, "n_rounds": len(text.rounds),
                "drafted": sum(n for _, _, _, n, _ in text.rounds), "accepted": text.accepted, "views": views,
            })  # fmt: skip
        return {
            "sources": self.sources, "requests": requests, "rounds": self.rounds, "n_rounds": self.n_rounds,
            "whole": self.whole, "positions": [self.accepted, self.drafted], "left_out": self._left_out(requests, cut),
        }  # fmt: skip

    def _left_out(self, requests: Sequence[Json], cut: int) -> list[str]:
        """Sentences on what is not on the page."""
        texts, n, rounds, of = len(requests), self.n_requests, len(self.rounds), self.n_rounds
        thinned = any(one["views"] and one["views"]["every"] > 1 for one in requests)
        said = {
            f"Texts: the first {texts:,} of {n:,} requests are shown.": n > texts,
            f"Texts: {cut:,} of them are cut off, so that the page stays small; each says where.": cut,
            f"Rounds: the first {rounds:,} of {of:,} are drawn; the bars count all.": of > rounds,
            "Reading: not every round has a line of its own; the sums are of all rounds.": thinned,
            "Each round was one CUDA graph: how long its parts took and what its draft read was not recorded "
            "(--cuda-graphs off records both).": self.whole and of,
        }
        return [sentence for sentence, is_so in said.items() if is_so]


def digits(shares: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """Shares from 0 to 1 as one of 64 digits each; the first means exactly 0."""
    text: str = DIGITS[np.ceil(63 * shares.clip(0, 1) - 1e-9).astype(np.int64)].tobytes().decode("ascii")
    return text


def in_script(value: object) -> str:
    """JSON that is safe in a script element of an HTML page, whatever texts it holds; all ASCII."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(
    recorder: Recorder, title: str, *, ways: Mapping[str, Way], facts: Sequence[tuple[str, str]] = (),
    names: Sequence[int] | None = None, verdict: Sequence[str] = (), left_out: Sequence[str] = (),
) -> str:  # fmt: skip
    """The HTML document of a run.

    ways: "plain" and "speculative", those that ran. facts: other facts about the run, name and text. names: the name of
    each request, if not its index. verdict: sentences on how the ways' outputs compare. left_out: sentences on what the
    recorder was not given.
    """
    run = recorder.as_dict(names if names is not None else range(recorder.n_requests))
    run["left_out"] += left_out
    run["verdict"] = [line[:MOST_CHARS] for line in verdict]
    run["title"] = title[:MOST_CHARS]
    run["facts"] = [(name[:MOST_CHARS], text[:MOST_CHARS]) for name, text in facts]
    run["ways"] = {name: way.as_dict() for name, way in ways.items()}
    template = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    before, after = template.split(HERE)
    return before + in_script(run) + after
