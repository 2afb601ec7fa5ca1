"""The page of the bundled model, bundled_card.md filled in: how it was trained, what was measured, what it writes."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from inputs.prompts import END
from maintain.bundled_data import MIXTURES, book_document
from measuring.tables import Column, Table

TEMPLATE = Path(__file__).with_suffix(".md")
Record = dict[str, Any]

PERPLEXITY = Table(
    Column("text", lambda r: r["book"], 26, left=True), Column("context", lambda r: f"{r['context']:,}"),
    Column("tokens", lambda r: f"{r['tokens']:,}"), Column("perplexity", lambda r: f"{r['perplexity']:.2f}"),
    Column("bits per byte", lambda r: f"{r['bits_per_byte']:.3f}"),
    Column(f"on the last {END}", lambda r: f"{math.exp(r['loss_stretch_end']):.2f}"),
)  # fmt: skip
LOOKUPS = Table(
    Column("entries", lambda r: f"{r['entries']:,}"), Column("prompts", lambda r: str(r["n"])),
    Column("exact", lambda r: f"{r['exact']:.0%}"), Column("digits", lambda r: f"{r['digits']:.0%}"),
)  # fmt: skip
STAGES = Table(
    Column("context", lambda r: f"{r['context']:,}"), Column("steps", lambda r: f"{r['steps']:,}"),
    Column("tokens", lambda r: f"{r['tokens']:,}"), Column("training loss at its end", lambda r: f"{r['loss']:.3f}"),
)  # fmt: skip


def needle_table(records: Sequence[Record]) -> tuple[Table, list[Record]]:
    """A column for each depth, and the rows, one for each length: {depth: exact answers / digits right}."""
    rows: dict[int, Record] = {r["length"]: {"tokens": f"{r['length']:,}"} for r in records}
    for r in records:
        rows[r["length"]][f"depth {r['depth']:.0%}"] = f"{r['exact']:.0%} / {r['digits']:.0%}"
    headings = dict.fromkeys(heading for row in rows.values() for heading in row)
    return Table(*(Column(heading, itemgetter(heading), 11) for heading in headings)), [*rows.values()]


def read_training(log: Path) -> Record:
    """What log.jsonl says of the run, and which books, and how many tokens of them, the folder beside it holds."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    if not records:
        raise ValueError(f"{log} is empty: it says nothing of the training")
    stages: dict[int, Record] = {}
    before = {"tokens": 0, "step": 0}
    for record in records:
        stage = stages.setdefault(record["context"], {"context": record["context"], "tokens": 0, "steps": 0})
        stage["tokens"] += record["tokens"] - before["tokens"]
        stage["steps"] += record["step"] - before["step"]
        stage["loss"] = record["loss"]
        before = record
    stored = sorted((log.parent / "tokens").glob("*.npy"))
    books = {path.stem: int(np.load(path, mmap_mode="r").size) for path in stored}
    return {
        "steps": before["step"], "tokens": before["tokens"], "stages": list(stages.values()),
        "held_out_loss": next((record["held_out"] for record in reversed(records) if "held_out" in record), None),
        "books": list(books), "book_tokens": sum(books.values()),
    }  # fmt: skip


def card(result: Record, training: Record, note: str) -> str:
    """The page: measured facts, text the model wrote itself, and a note on how this training went."""
    held_out = training["held_out_loss"]
    said = f"\nIts loss on the held-out ends of the training books is {held_out or 0:.3f} nats per token."
    samples = "\n\n".join(
        f"{'Greedy' if s['temperature'] == 0 else 'Temperature ' + str(s['temperature'])}:\n\n> **{s['prompt']}**"
        + "\n> ".join(s["text"].splitlines())
        for s in result["samples"]
    )
    depths, lengths = needle_table(result["needle"])
    tables = {
        "stages": STAGES.markdown(training["stages"]), "perplexity": PERPLEXITY.markdown(result["perplexity"]),
        "needles": depths.markdown(lengths), "lookups": LOOKUPS.markdown(result["lookup"]),
    }  # fmt: skip
    return TEMPLATE.read_text(encoding="utf-8").format(
        **result["shape"], **{name: "\n".join(lines) for name, lines in tables.items()}, dtype=result["dtype"],
        millions=result["shape"]["parameters"] / 1e6, steps=training["steps"], tokens=training["tokens"] / 1e6,
        per_parameter=training["tokens"] / result["shape"]["parameters"], n_books=len(training["books"]),
        book_tokens=training["book_tokens"] / 1e6, synthetic=1 - MIXTURES["prose"][book_document],
        held_out="" if held_out is None else said, note=f"\n{textwrap.fill(note, 120)}\n" if note else "", end=END,
        n_needle=result["needle"][0]["n"] if result["needle"] else 0, samples=samples, seed=result["seed"],
    )  # fmt: skip
