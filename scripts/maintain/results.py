"""Make every CPU result that this project commits, with the engine that is here, on the machine that runs this.

    python scripts/maintain/results.py --text books/*.txt           four hours on two cores of Zen 3; it goes on
    python scripts/maintain/results.py --text books/*.txt --llama-bin build/bin      also llama.cpp's speculation
    python scripts/maintain/results.py --pages                      measure nothing: write the pages anew

Each part is a command that anybody can type (the page shows it) and one JSON file in benchmarks/cpu/SET, which is named
after the kernels that the CPU has, or is told to take (docs/cpu.md). A set is of one engine: files of another one are
refused, --fresh forgets them. A page tells the parts that are there, README what the newest set that has them says.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import ast
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))  # where the other programs and their helpers lie

from common import parser_of, refusing, started
from gpt_fast_sd.fast import chosen
from gpt_fast_sd.fast.cpu.instruction_sets import VARIABLE, sets_here
from gpt_fast_sd.loading import sensible_threads
from inputs.prompts import short_name
from maintain.hero import hero
from measuring.chips import rates_here
from measuring.ledger import write_whole
from measuring.machine import environment
from measuring.points import steady_of
from measuring.tables import Column, Table, number, shown

PROGRAM, CPU = "results.py", ROOT / "benchmarks" / "cpu"
SOURCES = "gpt_fast_sd", "model", "tp"  # what an engine is
KERNELS = re.compile(r"gpt_fast_sd/fast/triton/(?!stand_ins)")  # of it, what no CPU runs
Record = dict[str, Any]
MODEL = "--model smollm2 --dtype bf16"
DRAFTERS = "streaming,snapkv,quest,guided,early_exit,hierarchy,lookup"
ACCEPTED = f"benchmark.py --sweep budget --pairs 0 {MODEL} --batch 6 --context 4000 --budget 64,256,1k --gamma 4 \
--max-new-tokens 48 --draft {DRAFTERS} --text TEXTS"
QUALITY = "evaluate.py --model smollm2 --text TEXTS --dtype bf16 --compile --contexts 4096 --lengths 1024 --depths 0.5 \
--n 2 --entries 16 --compared 256"
AUTO = "--draft auto --gamma auto --temperature 0,0.8 --max-new-tokens 128 --pairs 2 --seconds 8 --text TEXTS"
FIXED = f"{MODEL} --batch 1,4 --context 512,4k --temperature 0,0.8 --max-new-tokens 128 --pairs 2 --text TEXTS"
SLOWER = "eager 'BF16, F16 KV, flash off' 'BF16, F16 KV, flash on' 'BF16, BF16 KV, flash off' \
'smaller weights, repacked, flash off' 'smaller weights, repacked, flash on'"  # without instructions for bf16
PEERS = "peers.py --model smollm2 --text TEXT --repeats 3 --contexts"


@dataclass(frozen=True)
class Part:
    """A command of this project, with TEXTS, TEXT and LLAMA for what is not everywhere the same, and its section."""

    name: str
    command: str
    section: Callable[[Record], list[str]] | None = None  # its lines; None: it stands in another one
    goes_on: bool = False  # its file holds what was measured so far

    def here(self, instructions: str) -> Part:
        """Return the same where there are instructions for bf16: then no mode of others is left out."""
        has_bf16 = instructions in ("amx", "avx512_bf16")
        return replace(self, command=self.command.replace(f" --without {SLOWER}", "")) if has_bf16 else self

    def argv(self, texts: Sequence[Path], llama: Path | None, out: Path) -> list[str]:
        """What is run."""
        values = {"TEXTS": [*map(str, texts)], "TEXT": [str(texts[0])], "LLAMA": [str(llama)]}
        words = [word for part in shlex.split(self.command) for word in values.get(part, [part])]
        return [sys.executable, str(ROOT / "scripts" / words[0]), *words[1:], "--json", str(out)]

    @property
    def shown(self) -> str:
        """The command as the page shows it, which keeps what was typed in its set."""
        text = self.command.replace("TEXTS", "*.txt").replace("TEXT", "book.txt").replace("LLAMA", "build/bin")
        return f"    python scripts/{text} --json {self.name}.json"


def read(file: Path) -> Record:
    document: Record = json.loads(file.read_text(encoding="utf-8"))
    return document


# ---- sections of the page --------------------------------------------------------------------------------------------


def ratio(found: Record) -> str:
    """A median with its ends."""
    return f"{found['median']:.2f}x ({found['min']:.2f}-{found['max']:.2f})"


def where(row: Record) -> str:
    return f"{row['context']:,} x {row['batch']}"


def drafted_of(point: Record) -> float:
    """The share of a point's rounds that drafted."""
    return float(1 - point["rounds_by_gamma"].get("0", 0) / sum(point["rounds_by_gamma"].values()))


def parted(points: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Speeds of the points that drafted in 2 % of their rounds or more, and of the others."""
    busy, idle = (
        [steady_of(point)["median"] for point in points if (drafted_of(point) >= 0.02) == drafts]
        for drafts in (True, False)
    )
    return busy, idle


def who(point: Record) -> str:
    """Who drafted in most rounds of the last run of a point, and the share of all rounds that drafted."""
    arms, drafted = [one for one in point.get("found", []) if one["rounds"]], drafted_of(point)
    if not arms or drafted < 0.01:
        return "nobody"
    return f"{max(arms, key=lambda one: one['rounds'])['name']} ({drafted:.0%})"


def of_sweep(found: Record) -> list[str]:
    """Auto over batch and context, greedy beside sampled."""
    cells: dict[tuple[int, int], dict[float, Record]] = {}
    for point in measured(found):
        cells.setdefault((point["batch"], point["context"]), {})[point["temperature"]] = point
    temperatures = sorted({point["temperature"] for point in measured(found)})
    columns = [Column("context x batch", lambda row: where(next(iter(row.values()))))]

    def at(t: float) -> list[Column]:
        name = "greedy" if t == 0 else f"T {t:g}"

        def plain(point: Record) -> str:
            return shown(steady_of(point["plain"], "tokens_per_second"), ".0f")

        def show(row: dict[float, Record], text: Callable[[Record], str]) -> str:
            return text(row[t]) if t in row else "-"

        return [
            Column(f"{name}: plain/s", lambda row: show(row, plain)),
            Column("steady", lambda row: show(row, lambda p: ratio(steady_of(p)))),
            Column("to the end", lambda row: show(row, lambda p: f"{p['speedup']['completion']['median']:.2f}x")),
            Column("most drafts by", lambda row: show(row, who)),
            Column("distinct", lambda row: show(row, lambda p: f"{p['distinct_4grams']['plain']:.0%}")),
        ]

    columns += [column for t in temperatures for column in at(t)]
    ratios = [steady_of(point)["median"] for point in measured(found)]
    n_rows, n_equal = equal_rows(found)
    busy, idle = parted(measured(found))
    said = (
        f"`auto` makes {min(ratios):.2f}x to {max(ratios):.2f}x of plain decoding; {sum(r >= 0.98 for r in ratios)} of "
        f"{len(ratios)} cells are at 0.98x or more. In brackets: the least and the greatest pair, and the share of "
        "rounds that drafted. Distinct: the share of 4-grams of plain texts; greedy ones of so small a model repeat "
        f"themselves, which makes them easy to look up. {n_equal} of {n_rows} greedy rows equal plain decoding, token "
        "for token."
    )
    if idle:
        said += (
            f" In {len(idle)} cells fewer than 2 % of the rounds drafted, so that both sides ran the same steps: their "
            f"{min(idle):.2f}x to {max(idle):.2f}x are how far two runs of one program part on this machine. The "
            f"others make {min(busy):.2f}x to {max(busy):.2f}x."
        )
    return [*Table(*columns).markdown(cells[key] for key in sorted(cells)), "", said]


def measured(found: Record) -> list[Record]:
    return [point for point in found["points"] if point["status"] == "measured"]


def equal_rows(found: Record) -> tuple[int, int]:
    """How many greedy rows there were, and how many equal plain decoding."""
    greedy = [point for point in measured(found) if point["lossless"]["compared"]]
    return sum(point["batch"] for point in greedy), sum(point["lossless"]["equal"] for point in greedy)


def of_first(found: Record) -> list[str]:
    """README's first command."""
    ways = {"plain": found["plain"]["stats"], "speculative": found["stats"]}
    rows = [{"way": name, **stats} for name, stats in ways.items()]
    table = Table(
        Column("", lambda row: row["way"]), number("tokens/s", "decode_tokens_per_second", ".1f"),
        number("tokens a round", "tokens_per_round", ".2f"), number("accepted", "acceptance_rate", ".0%"),
        number("prefill, tokens/s", "prefill_tokens_per_second", ".0f"),
    )  # fmt: skip
    arms = [one for one in found.get("found", []) if one["rounds"]]
    said = ", ".join(f"{one['name']} in {one['rounds']} rounds" for one in arms)
    about = "Medians of three runs of each kind in turns; the prompt is a text whose form repeats. Who drafts differs "
    about += "from one call of the program to the next, and with it what is sampled, how often it repeats, and the gain"
    return [*table.markdown(rows), "", f"{about}. Who drafted in the last one: {said or 'nobody'}."]


def of_steps(found: Record) -> list[str]:
    """Where the time of a step goes."""
    table = Table(
        Column("context x batch", where), Column("step", lambda row: f"{row['kind']}, {row['n_tokens']}"),
        *(number(name, name, ".2f") for name in ("layers", "products", "attention", "between", "least")),
    )  # fmt: skip
    read = f"{found['read_gb_per_second']:.1f} GB/s, {found['gflops']:.0f} GFLOP/s"
    said = f'Milliseconds of all layers; "least" at {read}.'
    return [*table.markdown(found["steps"]), "", said]


def of_accepted(greedy: Record, sampled: Record) -> list[str]:
    """Acceptance over the budget, greedy / sampled."""
    rows: dict[str, dict[int | None, str]] = {}
    pairs = {(r["policy"], r["budget"]): r for r in sampled["results"]}
    for r in greedy["results"]:
        other = pairs[r["policy"], r["budget"]]
        text = f"{r['acceptance_rate']:.0%} / {other['acceptance_rate']:.0%}"
        rows.setdefault(r["policy"], {})[r["budget"]] = text
    budgets = sorted({b for row in rows.values() for b in row if b is not None})
    columns = [Column("policy", lambda row: f"`{row[0]}`")]

    def within(budget: int) -> Column:
        return Column(f"{budget:,}", lambda row: row[1].get(budget) or row[1].get(None, ""))

    columns += map(within, budgets)
    distinct = [d["results"][0]["distinct_4grams"]["plain"] for d in (greedy, sampled)]
    said = f"Greedy / temperature 0.8; of the plain texts' 4-grams {distinct[0]:.0%} / {distinct[1]:.0%} are distinct."
    return [*Table(*columns).markdown(rows.items()), "", said]


def of_precision(found: Record) -> list[str]:
    """What is quantized, over its own plain decoding and over that of nothing quantized."""
    rows = [{**point, **one} for point in measured(found) for one in point["precisions"]]
    table = Table(
        Column("context x batch", where), Column("cache/drafts/weights", lambda row: row["precision"]),
        number("plain/s", "plain.tokens_per_second.steady", ".0f"),
        number("speculative/s", "speculative.tokens_per_second.steady", ".0f"),
        Column("of its own plain", lambda row: ratio(row["speedup"]["own"])),
        Column("of bf16 plain", lambda row: ratio(row["speedup"]["unquantized"])),
        number("accepted", "acceptance_rate", ".0%"),
    )  # fmt: skip
    return table.markdown(rows)


def of_fixed(sweep: Record, *fixed: Record) -> list[str]:
    """Auto beside the best of some drafts with as many tokens in every round, in the same cells."""
    keys = "context", "batch", "temperature"
    cells: dict[tuple[Any, ...], list[Record]] = {}
    for point in (point for found in fixed for point in measured(found)):
        cells.setdefault(tuple(point[key] for key in keys), []).append(point)
    made = {tuple(point[key] for key in keys): steady_of(point) for point in measured(sweep)}
    rows = []
    for key, points in sorted(cells.items()):
        best = max(points, key=lambda point: steady_of(point)["median"])
        rows.append({**best, "best": steady_of(best), "auto": made[key]})
    shares = [row["auto"]["median"] / max(1.0, row["best"]["median"]) for row in rows]
    table = Table(
        Column("context x batch", where), Column("T", lambda row: f"{row['temperature']:g}"),
        Column("auto", lambda row: ratio(row["auto"])),
        Column("best fixed one", lambda row: f"{row['policy']}, {row['gamma']} tokens"),
        Column("", lambda row: ratio(row["best"])), number("auto / best", "share", ".2f"),
    )  # fmt: skip
    said = (
        "Of plain decoding beside each, where the best is at least plain decoding; `auto` is the table's of above. It "
        f"is at 0.97 of the best or more in {sum(share >= 0.97 for share in shares)} of {len(shares)} cells. Who is "
        f"the best of {max(map(len, cells.values()))} was chosen by these same pairs, and so seems better than it is."
    )
    return [*table.markdown({**row, "share": share} for row, share in zip(rows, shares, strict=True)), "", said]


def of_proof(found: Record) -> list[str]:
    """What verify.py found."""
    table = Table(
        Column("check", lambda row: row["check"]), Column("", lambda row: "passed" if row["passed"] else "**FAILED**"),
        Column("found", lambda row: row["text"]),
    )  # fmt: skip
    return table.markdown(found["findings"])


def of_quality(founds: dict[str, Record]) -> list[str]:
    """What storing in fewer bits costs, next to the model as it is."""

    def books(row: Record, show: Callable[[Record], str]) -> str:
        return ", ".join(show(one) for one in row["reference"]["logits"])

    table = Table(
        Column("quantized", lambda row: row["what"]),
        Column(
            "perplexity, times the whole model's",
            lambda row: books(row, lambda one: f"{one['perplexity'] / one['reference_perplexity']:.3f}"),
        ),
        Column("same best token", lambda row: books(row, lambda one: f"{one['same_best']:.1%}")),
        Column("error of logits", lambda row: books(row, lambda one: f"{one['logit_error']:.1%}")),
    )
    return [*table.markdown({"what": what, **found} for what, found in founds.items()), "", "By book."]


def of_peers(found: Record) -> list[str]:
    """Plain decoding next to others, each by its fastest mode."""
    peers = [*dict.fromkeys(row["peer"] for cell in found["cells"] for row in cell["results"])]

    def best(cell: Record, peer: str, key: str) -> Any:
        return next((row[key] for row in cell["results"] if row["peer"] == peer and row["counts"]), None)

    def time_of(peer: str) -> Column:
        def text(cell: Record) -> str:
            ms = best(cell, peer, "ms_per_step")
            return f"{ms['median']:.2f} ({ms['min']:.2f})" if ms else "-"

        return Column(peer, text)

    def over_ours(peer: str) -> Column:
        return Column(f"{peer} / ours", lambda cell: shown(best(cell, peer, "time_over_ours"), ".2f"))

    def prefill_of(peer: str) -> Column:
        return Column(peer, lambda cell: shown(best(cell, peer, "prefill_tokens_per_second"), ",.0f"))

    columns = [Column("context x batch", where), number("ceiling", "roofline_ms", ".2f")]
    columns += [*map(time_of, peers), *map(over_ours, peers[1:])]
    prefill = [number("context", "context", ","), *map(prefill_of, peers)]
    said = (
        "Milliseconds a step, medians (least), of each peer the fastest mode that was timed; of the file as it comes "
    )
    said += "llama.cpp reads fewer bytes. "
    absent = [f"{one['peer']} was not there" for one in found.get("skipped", [])]
    said += " ".join(f"{one}." for one in [*absent, *found.get("failures", [])])
    said += " Prefill of one row, tokens/s:"
    first = [next(cells) for _, cells in groupby(found["cells"], key=lambda cell: cell["context"])]
    return [*Table(*columns).markdown(found["cells"]), "", said, "", *Table(*prefill).markdown(first)]


def of_speculation(found: Record) -> list[str]:
    """The best lossless way of each, one row."""
    table = Table(
        number("context", "context", ","),
        Column("", lambda row: f"{row['peer']}{': ' + row['mode'] if row['mode'] else ''}"),
        Column("tokens/s", lambda row: "{median:.1f} ({min:.1f}-{max:.1f})".format(**row["tokens_per_second"])),
        number("of its plain", "over_its_plain", ".2f", unit="x"),
        number("of our plain", "over_our_plain", ".2f", unit="x"),
        number("accepted", "accepted_share", ".0%"), number("tokens a round", "tokens_per_round", ".2f"),
        number("tokens as its plain", "same_as_its_plain"),
    )  # fmt: skip
    rows = [{"context": cell["context"], **row} for cell in found["cells"] for row in cell["results"]]
    distinct = ", ".join(f"{cell['results'][0]['distinct_4grams']:.0%}" for cell in found["cells"])
    return [*table.markdown(rows), "", f"Greedy; distinct 4-grams of our plain text, by context: {distinct}."]


def of_beside(found: Record) -> list[str]:
    """Plain decoding of an engine that is not alone on the cores."""
    table = Table(
        Column("beside", lambda row: row["beside"]), number("tokens/s", "tokens_per_second", ".1f"),
        Column("of alone", lambda row: "{over_alone:.0%} ({least:.0%}-{most:.0%})".format(**row)),
    )  # fmt: skip
    what = f"Plain decoding, {found['rows']} rows of {found['context']} tokens, {found['threads']} threads an engine."
    return [*table.markdown(found["results"]), "", what]


PARTS = (
    Part("first", "generate.py", of_first),
    Part("steps", "steps.py --model smollm2 --batch 1,8 --context 512,6000 --gamma 2", of_steps),
    Part("sweep", f"benchmark.py {MODEL} --batch 1,4,8,16 --context 512,2k,4k,7500 {AUTO}", of_sweep, goes_on=True),
    Part("fixed", f"benchmark.py --draft streaming,guided --draft-quantize int4 --gamma 2,4 {FIXED}", goes_on=True),
    Part("fixed_lookup", f"benchmark.py --draft lookup --gamma 4,10 {FIXED}", goes_on=True),
    Part(
        "long", f"benchmark.py --model bundled --dtype bf16 --batch 1,4,8,16 --context 1k,4k,16k {AUTO}", of_sweep,
        goes_on=True,
    ),
    Part("accepted_greedy", f"{ACCEPTED} --temperature 0", goes_on=True),
    Part("accepted_sampled", f"{ACCEPTED} --temperature 0.8", goes_on=True),
    Part(
        "precision", f"benchmark.py --sweep precision {MODEL} --precisions none,none/int8,none/int4,int8,int8/int4 "
        "--draft guided --budget 256 --batch 1 --context 512,4k --gamma 3 --max-new-tokens 128 --pairs 3 --text TEXTS",
        of_precision, goes_on=True,
    ),
    Part("beside", "maintain/not_alone.py --model smollm2", of_beside),
    Part("proof", "verify.py --model smollm2 --draft guided --budget 64 --exact", of_proof),
    Part("int8_cache", f"{QUALITY} --kv-dtype int8"),
    Part("int8_weights", f"{QUALITY} --quantize int8"),
    Part("int4_weights", f"{QUALITY} --quantize int4"),
    Part("peers", f"{PEERS} 512,4000 --batches 1,8 --steps 8 --agree 8 --without {SLOWER}", of_peers, goes_on=True),
    Part(
        "peers_longer", f"{PEERS} 7500 --batches 1,8 --steps 8 --agree 0 --peers ours,llama.cpp --without {SLOWER}",
        of_peers, goes_on=True,
    ),
    Part(
        "peers_bundled", "peers.py --text TEXT --contexts 512,8192,16000 --batches 1,8 --steps 16 --agree 0 "
        f"--repeats 5 --peers ours,llama.cpp --without {SLOWER}", of_peers, goes_on=True,
    ),
    Part("speculation", f"{PEERS} 512,4000 --llama-bin LLAMA", of_speculation, goes_on=True),
)  # fmt: skip
NAMED = {part.name: part for part in PARTS}
ON_FRONT = "first", "sweep", "long"  # what README tells of
CALLED = {"amx": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512": "AVX-512", "avx2": "AVX2"}
PAGE: dict[str, tuple[str, ...]] = {  # headings, and the parts below each
    "README's first command": ("first",), "Speed over batch and context": ("sweep",),
    "The same to 16,000 tokens, the bundled model of 8 M parameters": ("long",),
    "Auto beside fixed drafts": ("sweep", "fixed", "fixed_lookup"),
    "Acceptance over the budget": ("accepted_greedy", "accepted_sampled"), "Where a step's time goes": ("steps",),
    "Not alone on the cores": ("beside",),
    "Fewer bits: speed": ("precision",), "Fewer bits: what they cost": ("int8_cache", "int8_weights", "int4_weights"),
    "Lossless": ("proof",), "Next to others: plain decoding": ("peers",),
    "The same at 7,500 tokens, llama.cpp alone": ("peers_longer",),
    "The same, the bundled model": ("peers_bundled",), "Next to others: speculation, one row": ("speculation",),
}  # fmt: skip


def section(names: Sequence[str], found: dict[str, Record]) -> list[str]:
    """The lines below a heading."""
    if names[0] == "int8_cache":
        return of_quality({name.replace("_", " "): found[name] for name in names})
    if len(names) > 1:
        return (of_fixed if names[0] == "sweep" else of_accepted)(*(found[name] for name in names))
    one = NAMED[names[0]].section
    assert one
    return one(found[names[0]])


def page(folder: Path) -> str:
    """The page of a set, with a heading for every part that is there."""
    about = read(folder / "set.json")
    found = {name: read(folder / f"{name}.json") for name in about["parts"]}
    here = about["environment"]
    kernels = here["instructions"] + " (forced: it has more)" * here.get("forced", False)
    lines = [
        f"# {here['cpu']}, {kernels}, {here['cores']} cores: {about['date']}", "",
        "SmolLM2-135M in bf16, of a file in Q4_1 (int4 copies keep its blocks and lose nothing; other models' would), "
        f"{here['threads']} threads, torch {here['torch'].partition('+')[0]}; the machine read "
        f"{about['gb_per_second']:.1f} GB/s and computed {about['gflops']:.0f} GFLOP/s in fp32 when this began. "
        f"Written by `scripts/maintain/results.py`; [what the words mean](../../../docs/measure.md). Prompts of "
        f"sweeps are stretches of books that no setting was tuned on. Engine {about['engine']}.",
    ]  # fmt: skip
    told = set[str]()
    for heading, names in PAGE.items():
        if all(name in found for name in names):
            own = [name for name in names if name not in told]
            told.update(own)
            commands = [about["parts"][name]["command"] for name in own]
            lines += ["", f"## {heading}", "", *section(names, found), "", *commands]
            lines += ["", "Files: " + ", ".join(f"[{name}]({name}.json)" for name in own)]
    return "\n".join(lines) + "\n"


# ---- README ----------------------------------------------------------------------------------------------------------


def front(folder: Path, readme: str) -> str:
    """README with the figures of a set between its marks."""
    found = {name: read(folder / f"{name}.json") for name in ON_FRONT}
    place = folder.relative_to(ROOT).as_posix()
    made = {name: parted([p for p in measured(found[name]) if p["temperature"]]) for name in ("sweep", "long")}
    n_rows, n_equal = map(sum, zip(*(equal_rows(found[name]) for name in made), strict=True))
    equal = f"**all {n_rows}**" if n_equal == n_rows else f"**{n_equal} of {n_rows}**"
    ends = {name: f"{min(busy):.2f}x to {max(busy):.2f}x" for name, (busy, _) in made.items()}
    cpus, sets = dict[str, str](), sorted(CPU.glob("*/set.json"), key=lambda file: str(read(file)["date"]))
    for file in sets:  # the newest of each kind tells
        other = read(file)
        if "first" in other["parts"] and not other["environment"].get("forced"):
            older = "" if other["engine"] == read(folder / "set.json")["engine"] else ", an older engine"
            name = CALLED[other["environment"]["instructions"]]
            cpus[name] = f"**{gain(read(file.parent / 'first.json')):.2f}x** ({name}{older})"
    gains = ", ".join(cpus[name] for name in sorted(cpus))
    text = (
        f"On two cores the first command below runs at {gains} of plain decoding (calls differ).\nOver batches and "
        f"contexts, sampled, `--draft auto` makes, where it drafts (else plain), {ends['sweep']} with SmolLM2-135M\n"
        f"(a quantized file: drafts in few bits lose nothing) and {ends['long']} with the bundled test model "
        "(the plot);\n"
        f"{equal} greedy rows equal plain decoding, token for token: [all figures]({place}/README.md), "
        "[other CPUs](benchmarks/README.md)."
    )
    return between(readme, "measured", text)


def gain(first: Record) -> float:
    """Times plain decoding, of README's first command."""
    plain, ours = (stats["decode_tokens_per_second"] for stats in (first["plain"]["stats"], first["stats"]))
    return float(ours / plain)


def between(page: str, mark: str, text: str) -> str:
    """The page with this text between its two marks; ValueError if they are not there."""
    new, n = re.subn(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.S)
    if n != 1:
        raise ValueError(f"README.md has no place for its figures, <!-- {mark} --> to <!-- /{mark} -->")
    return new


def newest() -> Path | None:
    """The folder of the newest set that has all that README says; None if there is none."""
    dates = {
        one.parent: about["date"] for one in CPU.glob("*/set.json") if {*ON_FRONT} <= {*(about := read(one))["parts"]}
    }
    return max(dates, key=lambda folder: str(dates[folder]), default=None)


def write_pages() -> Iterable[Path]:
    """Write the page and the plot of every set, and README's figures from the newest whole one -> what was written."""
    for folder in sorted(file.parent for file in CPU.glob("*/set.json")):
        if "long" in read(folder / "set.json")["parts"]:
            points = measured(read(folder / "long.json"))
            write_whole(folder / "long.svg", hero([point for point in points if point["temperature"]]))
        write_whole(folder / "README.md", page(folder))
        yield folder / "README.md"
    if latest := newest():
        readme = ROOT / "README.md"
        write_whole(readme, front(latest, readme.read_text("utf-8")))
        write_whole(ROOT / "docs" / "hero.svg", (latest / "long.svg").read_text("utf-8"))
        yield readme


# ---- measuring -------------------------------------------------------------------------------------------------------


def engine_here() -> str:
    """A short name of the sources that an engine on a CPU is of: of Python's by their syntax, without comments."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = sorted(name for name in listed.split() if not KERNELS.match(name))
    files = [file for name in names if not (file := ROOT / name).is_symlink() and file.suffix != ".md"]
    parts = [ast.dump(ast.parse(f.read_bytes())).encode() if f.suffix == ".py" else f.read_bytes() for f in files]
    return short_name(b"\0".join(parts))


def begin(*, fresh: bool) -> Path:
    """The folder of this machine's set, begun or gone on with; ValueError if another engine or machine began it."""
    torch.set_num_threads(sensible_threads())  # as many as the programs take
    here, engine = environment(torch.device("cpu")), engine_here()
    here["forced"] = VARIABLE in os.environ and chosen() != sets_here()[0]
    name = f"{here['instructions']} {'forced ' * here['forced']}{here['cpu']}".lower()
    folder = CPU / re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    file = folder / "set.json"
    if fresh and folder.exists():
        for old in folder.iterdir():
            old.unlink()
    if file.exists():
        about = read(file)
        told = [(what, here[what], about["environment"][what]) for what in ("cpu", "threads", "torch")]
        for what, mine, theirs in [("engine", engine, about["engine"]), *told]:
            if mine != theirs:
                raise ValueError(f"{folder} was begun with {what} {theirs}, and this is {mine}: --fresh forgets it")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rates = rates_here(torch.device("cpu"), torch.float32).chip("", math.inf)
    about = {
        "engine": engine, "date": datetime.date.today().isoformat(), "environment": here,
        "gb_per_second": rates.bandwidth / 1e9, "gflops": rates.peak / 1e9, "parts": {},
    }  # fmt: skip
    write_whole(file, json.dumps(about, indent=1) + "\n")
    return folder


def is_whole(found: Record) -> bool:
    """Whether every point of a sweep was measured; other documents have none."""
    return all(point.get("status", "measured") == "measured" for point in found.get("points", ()))


def measure(args: argparse.Namespace) -> int:
    """Run what is missing -> the number of parts that failed."""
    folder, failed = begin(fresh=args.fresh), 0
    for part in (one.here(chosen().name) for one in PARTS):
        out = folder / f"{part.name}.json"
        about = read(folder / "set.json")
        if part.name in about["parts"] or (args.only and part.name not in args.only):
            continue
        if "LLAMA" in part.command and args.llama_bin is None:
            print(f"--- {part.name}: left out, there is no --llama-bin", flush=True)
            continue
        if out.exists() and not part.goes_on:
            out.unlink()  # of a run that was stopped
        argv = part.argv(args.text, args.llama_bin, out)
        print(f"--- {part.name}: {shlex.join(argv[1:])}", flush=True)
        start = time.monotonic()
        code = subprocess.run(argv, check=False, cwd=ROOT).returncode
        seconds = round(time.monotonic() - start)  # of its last run alone, if it went on
        print(f"--- {part.name}: {seconds} s, exit code {code}", flush=True)
        if engine_here() != about["engine"]:
            raise ValueError(f"{', '.join(SOURCES)} changed while {part.name} was measured: --fresh begins anew")
        if code or not is_whole(read(out)):
            failed += 1
            continue
        about["parts"][part.name] = {"seconds": seconds, "command": part.shown}
        write_whole(folder / "set.json", json.dumps(about, indent=1) + "\n")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then write the pages."""
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("--text", metavar="FILE", type=Path, nargs="+", help="UTF-8 texts that prompts are taken from")
    add("--llama-bin", metavar="FOLDER", type=Path, help="of llama.cpp's programs; without it one part is left out")
    add("--only", metavar="PART", nargs="+", choices=[*NAMED], help=f"among {', '.join(NAMED)} (default: all)")
    add("--pages", action="store_true", help="measure nothing: write the pages of what is there")
    add("--fresh", action="store_true", help="forget what this machine's set holds")
    args = parser.parse_args(argv)
    failed = 0
    with refusing(PROGRAM):
        if not args.pages:
            if not args.text:
                raise ValueError("prompts are taken from texts: name them with --text")
            for path in args.text:
                path.open("rb").close()
            args.text = [path.resolve() for path in args.text]
            args.llama_bin = args.llama_bin and args.llama_bin.resolve()
            failed = measure(args)
        for path in write_pages():
            print(f"written: {path.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    started(main)
