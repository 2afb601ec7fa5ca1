"""Measure a model on text it never saw: perplexity by context, needles by depth and length, look-ups by entries.

    python scripts/evaluate_bundled.py --model WORK/model --books BOOKS/eval
    python scripts/evaluate_bundled.py --model WORK/model --books BOOKS/eval --log WORK/log.jsonl --card README.md

Perplexity: stretches of a book, as long as the longest context, are cut into windows of every context, BOS first, so
that every context is measured on the same tokens; the last 512 tokens of a stretch, seen with little and with much
before them, show whether far context helps. Needles: book prose with one fact at a given depth, then the question for
it; the answer is five digits, greedy. Look-ups: a register of facts, then the question for one of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bundled_data import (
    DIGITS,
    MIXTURES,
    Probe,
    book_document,
    book_paths,
    distinct,
    fact,
    needle,
    number,
    person,
    question,
    thing,
)
from common import refuse
from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import CausalSelf, Tokenizer, Transformer, read_config

END = 512  # tokens at the end of a window that are averaged on their own
LOGITS_BLOCK = 1024  # positions whose logits are in memory at once
PROMPTS = (  # our own
    "The road to the harbour was steep, and before we had gone half a mile",
    '"You have kept me waiting," said the old clockmaker, "and I should like to know',
    "Of all the islands which we visited that summer, the smallest was",
)
Record = dict[str, Any]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="bundled", help="'bundled', a model folder, or a hub id (default: bundled)")
    add("--books", type=Path, required=True, help="folder of UTF-8 text files the model was not trained on")
    add("--contexts", type=int, nargs="*", default=[1024, 4096, 16384], help="window lengths for perplexity")
    add("--stretches", type=int, default=1, help="stretches of the longest context per book (default: 1)")
    add("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384], help="needle prompts, tokens")
    add("--depths", type=float, nargs="*", default=[0.0, 0.25, 0.5, 0.75, 1.0], help="where the fact stands, 0 to 1")
    add("--entries", type=int, nargs="*", default=[4, 16, 64, 256], help="facts of a look-up")
    add("--n", type=int, default=2, help="prompts per needle cell; four times as many per look-up (default: 2)")
    add("--batch-size", type=int, default=2, help="prompts decoded at once (default: 2)")
    add("--dtype", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    add("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    add("--compile", action="store_true", help="compile the steps: pays off from about ten minutes on")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", type=Path, help="write every number")
    add("--plot", metavar="F.png", type=Path, help="draw needle accuracy by depth and length")
    add("--card", metavar="F.md", type=Path, help="write a model card of what was measured; needs --log")
    add("--note", metavar="TEXT", default="", help="a paragraph for the card: where this training left the recipe")
    add("--log", metavar="F.jsonl", type=Path, help="the training run's log.jsonl")
    args = parser.parse_args(argv)
    if args.card and not args.log:
        parser.error("--card needs --log, to say how the model was trained")
    return args


# ---- perplexity ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def token_losses(model: Transformer, tokens: Tensor) -> Tensor:
    """Next-token losses in nats of one text: tokens [T + 1] -> fp32 [T]."""
    tokens = tokens.to(model.embedding.weight.device)
    pos = torch.arange(len(tokens) - 1, device=tokens.device)[None]  # [1, T]
    hidden = model.hidden(tokens[None, :-1], pos, CausalSelf())[0]  # [T, D]
    blocks = zip(hidden.split(LOGITS_BLOCK), tokens[1:].split(LOGITS_BLOCK), strict=True)
    return torch.cat([F.cross_entropy(model.output(h).float(), t, reduction="none") for h, t in blocks]).cpu()


def measure_perplexity(
    engine: Engine, tokenizer: Tokenizer, books: dict[str, Tensor], contexts: Sequence[int], n_stretches: int
) -> list[Record]:
    """One record a book and context. ValueError where a book is too short."""
    if not contexts:
        return []
    longest = max(contexts)
    work = {name: stretches(ids, longest, n_stretches, name) for name, ids in books.items()}
    records = []
    bar = tqdm(total=len(books) * n_stretches * longest * len(contexts), desc="perplexity", unit="tok", unit_scale=True)
    for name, cuts in work.items():
        n_bytes = sum(len(tokenizer.token_bytes(token)) for cut in cuts for token in cut.tolist())
        for context in contexts:
            losses = []
            for cut in cuts:
                for window in cut.split(context):
                    losses.append(token_losses(engine.model, with_bos(tokenizer, window)))
                    bar.update(len(window))
            per_stretch = torch.cat(losses).view(len(cuts), -1)  # [stretches, longest]
            mean = per_stretch.mean().item()
            records.append(
                {
                    "book": name,
                    "context": context,
                    "tokens": per_stretch.numel(),
                    "loss": mean,
                    "perplexity": math.exp(mean),
                    "bits_per_byte": per_stretch.double().sum().item() / math.log(2) / n_bytes,
                    "loss_window_end": torch.cat([window[-END:] for window in losses]).mean().item(),
                    "loss_stretch_end": per_stretch[:, -END:].mean().item(),
                }
            )
    bar.close()
    return records


def stretches(ids: Tensor, length: int, n: int, name: str) -> list[Tensor]:
    """n runs of length tokens, spread evenly over the book, that do not overlap."""
    if len(ids) < n * length:
        raise ValueError(f"{name} has {len(ids):,} tokens, too few for {n} stretches of {length:,}")
    return [ids[start : start + length] for start in np.linspace(0, len(ids) - length, n + 2)[1:-1].astype(int)]


def with_bos(tokenizer: Tokenizer, ids: Tensor) -> Tensor:
    assert tokenizer.bos_id is not None
    return torch.cat([torch.tensor([tokenizer.bos_id]), ids])


# ---- needles and look-ups ------------------------------------------------------------------------------------------


def lookup(tokenizer: Tokenizer, rng: np.random.Generator, entries: int) -> Probe:
    """A register of facts, then the question for one of them."""
    names = distinct(person if rng.random() < 0.5 else thing, rng, entries)
    values = [number(rng) for _ in names]
    lines = [fact(name, value) for name, value in zip(names, values, strict=True)]
    asked = int(rng.integers(entries))
    return Probe(tokenizer.encode("\n".join([*lines, question(names[asked])])), values[asked], (entries,))


def measure_probes(
    engine: Engine, probes: Sequence[Probe], what: str, name_cell: Callable[[tuple[float, ...]], Record]
) -> list[Record]:
    """Accuracy of greedy answers, one record a cell: exact matches and single digits at their place."""
    answered: dict[tuple[float, ...], list[float]] = {}
    digits = SamplingParams(max_tokens=DIGITS, ignore_eos=True)
    events = engine.stream([probe.prompt for probe in probes], digits)
    bar = tqdm(total=len(probes), desc=what, unit="prompt")
    for event in events:
        if event.completion:
            probe, text = probes[event.index], event.completion.text
            right = sum(a == b for a, b in zip(text, probe.answer, strict=False)) / DIGITS
            answered.setdefault(probe.cell, []).append(right)
            bar.update()
    bar.close()
    return [
        name_cell(cell)
        | {"n": len(right), "exact": float(np.mean([r == 1.0 for r in right])), "digits": float(np.mean(right))}
        for cell, right in sorted(answered.items())
    ]


# ---- samples -------------------------------------------------------------------------------------------------------


def write_samples(engine: Engine, seed: int) -> list[Record]:
    """What the model writes after our own openings, greedy and at temperature 0.8."""
    samples = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=80, temperature=temperature, seed=seed, ignore_eos=True)
        for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
            samples.append({"prompt": prompt, "temperature": temperature, "text": completion.text})
    return samples


# ---- training ------------------------------------------------------------------------------------------------------


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
    held_out = [record["held_out"] for record in records if "held_out" in record]
    stored = sorted((log.parent / "tokens").glob("*.npy"))
    books = {path.stem: int(np.load(path, mmap_mode="r").size) for path in stored}
    return {
        "steps": records[-1]["step"],
        "tokens": records[-1]["tokens"],
        "stages": list(stages.values()),
        "held_out_loss": held_out[-1] if held_out else None,
        "books": list(books),
        "book_tokens": sum(books.values()),
    }


# ---- output --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also readable as text."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * (width - 1) + ":" for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines
    )


def perplexity_table(records: Sequence[Record]) -> str:
    rows = [
        [
            r["book"], f"{r['context']:,}", f"{r['tokens']:,}", f"{r['perplexity']:.2f}", f"{r['bits_per_byte']:.3f}",
            f"{math.exp(r['loss_stretch_end']):.2f}",
        ]
        for r in records
    ]  # fmt: skip
    return table(["book", "context", "tokens", "perplexity", "bits per byte", f"on the last {END}"], rows)


def needle_table(records: Sequence[Record]) -> str:
    depths = sorted({r["depth"] for r in records})
    cells = {(r["length"], r["depth"]): f"{r['exact']:.0%} / {r['digits']:.0%}" for r in records}
    lengths = sorted({r["length"] for r in records})
    rows = [[f"{length:,}", *(cells.get((length, depth), "-") for depth in depths)] for length in lengths]
    return table(["tokens", *(f"depth {depth:.0%}" for depth in depths)], rows)


def lookup_table(records: Sequence[Record]) -> str:
    rows = [[f"{r['entries']:,}", str(r["n"]), f"{r['exact']:.0%}", f"{r['digits']:.0%}"] for r in records]
    return table(["entries", "prompts", "exact", "digits"], rows)


def report(result: Record) -> str:
    """The three tables that were measured."""
    sections = (
        ("perplexity", "Perplexity on held-out books", perplexity_table),
        ("needle", "Needles: exact answers / digits right", needle_table),
        ("lookup", "Look-ups", lookup_table),
    )
    return "\n\n".join(f"{title}\n\n{make(result[key])}" for key, title, make in sections if result[key])


def draw_needles(records: Sequence[Record], path: Path) -> None:
    """A heat map of exact needle answers; the small figure is the share of single digits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths, depths = sorted({r["length"] for r in records}), sorted({r["depth"] for r in records})
    exact = np.full((len(depths), len(lengths)), np.nan)
    figure, axes = plt.subplots(figsize=(1.6 + 0.95 * len(lengths), 1.6 + 0.6 * len(depths)), layout="constrained")
    for r in records:
        row, column = depths.index(r["depth"]), lengths.index(r["length"])
        exact[row, column] = r["exact"]
        ink = "white" if r["exact"] < 0.6 else "black"
        axes.text(column, row - 0.1, f"{r['exact']:.0%}", ha="center", va="center", color=ink)
        axes.text(column, row + 0.24, f"digits {r['digits']:.0%}", ha="center", va="center", color=ink, fontsize=7)
    image = axes.imshow(exact, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("prompt and answer, tokens")
    axes.set_ylabel("depth of the fact (0% is the start)")
    axes.set_title(f"Needles answered exactly, {records[0]['n']} prompts a cell", fontsize=11)
    figure.colorbar(image, format=matplotlib.ticker.PercentFormatter(1.0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def card(result: Record, training: Record, note: str) -> str:
    """The model card: measured facts, text the model wrote itself, and a note on how this training went."""
    shape = result["shape"]
    stages = table(
        ["context", "steps", "tokens", "training loss at its end"],
        [[f"{s['context']:,}", f"{s['steps']:,}", f"{s['tokens']:,}", f"{s['loss']:.3f}"] for s in training["stages"]],
    )
    n_books, book_tokens = len(training["books"]), training["book_tokens"]
    books = f"{n_books} public-domain books ({book_tokens / 1e6:.1f} million tokens, 2 % of each held out)"
    synthetic = f"{1 - MIXTURES['prose'][book_document]:.0%}"
    heads = f"{shape['heads']} query and {shape['kv_heads']} key-value heads"
    held_out = (
        f"\nIts loss on the held-out ends of the training books is {training['held_out_loss']:.3f} nats a token."
        if training["held_out_loss"] is not None
        else ""
    )
    per_parameter = training["tokens"] / shape["parameters"]
    samples = "\n\n".join(
        f"{'Greedy' if s['temperature'] == 0 else 'Temperature ' + str(s['temperature'])}:\n\n> **{s['prompt']}**"
        + "\n> ".join(s["text"].splitlines())
        for s in result["samples"]
    )
    n_needle = result["needle"][0]["n"] if result["needle"] else 0
    return f"""# The bundled model

A Llama of {shape["parameters"] / 1e6:.1f} million parameters, made for this project by `scripts/train_bundled.py`:
{shape["layers"]} layers, width {shape["dim"]}, {heads}, vocabulary {shape["vocab"]:,},
positions to {shape["positions"]:,}, stored in bf16. Licence: MIT, as the rest of the project.

**For** trying the engine without a download, for its tests, and for benchmarks in which a draft that reads part of the
cache has to be right for real reasons. **Not for** facts, answers or advice: it writes English prose without sense,
and it carries the views of books more than a century old.

## Training

On {books}, none of which is
part of this project, and on synthetic documents ({synthetic} of all), made by `scripts/bundled_data.py`: needles,
registers, copies, lists and repetitions. {training["steps"]:,} steps, {training["tokens"] / 1e6:.1f} million tokens:

{stages}

That is {per_parameter:.1f} tokens a parameter, where about 20 would be compute-optimal (Hoffmann et al. 2022,
arXiv 2203.15556).{held_out}
{chr(10) + textwrap.fill(note, 120) + chr(10) if note else ""}
## Held-out perplexity

On books that it was not trained on, {result["dtype"]}. Every context is measured on the same tokens; the last column
is the perplexity of the last {END} tokens of each stretch, seen with that much text before them.

{perplexity_table(result["perplexity"])}

## Needles

One fact in book prose, asked for at the end: exact five-digit answers / digits right (chance: 0.001 % / 10 %),
greedy, {n_needle} prompts a cell.

{needle_table(result["needle"])}

A register of facts, then the question for one of them:

{lookup_table(result["lookup"])}

## What it writes

{samples}

Measured with `scripts/evaluate_bundled.py`, seed {result["seed"]}.
"""


# ---- the run -------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    for path in (args.json, args.plot, args.card):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.resolve().parent}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "gpt_fast_sd[plot]"')
    training = read_training(args.log) if args.log else {}
    paths = book_paths(args.books)
    if args.card and not training["books"]:
        raise ValueError(f"{args.log.parent} has no tokens/ beside the log, so the card cannot say what was read")
    if known := [path for path in paths if path.stem in training.get("books", [])]:
        raise ValueError(f"{known[0]} is no held-out text: the model was trained on it")
    config = read_config(locate(args.model))
    limit = config.max_seq_len
    if (longest := max([*args.contexts, *args.lengths, 0])) > limit:
        raise ValueError(f"the model has {limit:,} positions, too few for {longest:,} tokens")
    if odd := [c for c in args.contexts if max(args.contexts) % c]:
        raise ValueError(f"the longest context, {max(args.contexts):,}, must be a multiple of {odd[0]:,}")
    engine = Engine.from_pretrained(
        args.model,
        EngineConfig(
            batch_size=args.batch_size, max_seq_len=limit, device=args.device, dtype=args.dtype, compile=args.compile
        ),
    )
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.bos_id is None:
        raise ValueError(f"{args.model} has no tokenizer that begins a text with BOS")
    books = {path.stem: torch.tensor(tokenizer.encode(path.read_text(encoding="utf-8"), bos=False)) for path in paths}
    rng = np.random.default_rng(args.seed)
    needles = [
        needle(tokenizer, rng, list(books.values()), length, depth)
        for length in args.lengths for depth in args.depths for _ in range(args.n)
    ]  # fmt: skip
    lookups = [lookup(tokenizer, rng, entries) for entries in args.entries for _ in range(4 * args.n)]
    for probe in lookups:
        if len(probe.prompt) + DIGITS > limit:
            raise ValueError(f"{probe.cell[0]:,} entries take {len(probe.prompt):,} tokens, over the model's {limit:,}")

    result: Record = {
        "model": str(args.model),
        "dtype": engine.dtype_name,
        "seed": args.seed,
        "shape": {
            "parameters": config.n_params, "layers": config.n_layers, "dim": config.dim, "heads": config.n_heads,
            "kv_heads": config.n_kv_heads, "vocab": config.vocab_size, "positions": config.max_seq_len,
        },
        "training": training,
        "perplexity": measure_perplexity(engine, tokenizer, books, args.contexts, args.stretches),
        "lookup": measure_probes(engine, lookups, "look-ups", lambda cell: {"entries": int(cell[0])}),
        "needle": measure_probes(
            engine, needles, "needles", lambda cell: {"length": int(cell[0]), "depth": cell[1]}
        ),
        "samples": write_samples(engine, args.seed),
    }  # fmt: skip
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot and result["needle"]:
        draw_needles(result["needle"], args.plot)
    if args.card:
        args.card.write_text(card(result, training, args.note), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        refuse(error, "evaluate_bundled.py")


if __name__ == "__main__":
    main()
