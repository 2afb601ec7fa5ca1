"""Measure what a model knows, and what storing it in fewer bits costs, on text that it never saw.

    python scripts/evaluate.py --model smollm2 --text book.txt
    python scripts/evaluate.py --model bundled --text book1.txt book2.txt --dtype bf16 --quantize int8 --json int8.json
    python scripts/evaluate.py --model some.Q4_K_M.gguf --reference ORIGINAL --text book.txt
    python scripts/evaluate.py --model WORK/model --books BOOKS/eval --log WORK/log.jsonl --card README.md

Perplexity: stretches of a text, as long as the longest context, are cut into windows of every context, BOS first, so
that every context is measured on the same tokens; the last 512 tokens of a stretch, seen with little and with much
before them, show whether far context helps. Needles: prose with one fact at a given depth, then the question for it;
the answer is five digits, greedy. Look-ups: a register of facts, then the question for one of them.

Beside a reference: --reference M, or where --quantize or --kv-dtype asks for fewer bits the same model without them.
Both decode the last --compared tokens of the longest context of each text, every key through their caches: perplexity
of each, how often both like the same token best, and how far the logits of the one are from those of the other, the
root of the mean square beside that of the reference's own (centred: a constant changes no choice). Both are asked for
the same needles and look-ups.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import parser_of, refusing, started
from files import check_files, save
from flags import add_engine_flags, config_of, count, join, positive, real, seed
from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import CausalSelf, Tokenizer, Transformer, read_config
from inputs import prompts
from inputs.facts import DIGITS, made_up
from maintain.bundled_card import LOOKUPS, PERPLEXITY, card, needle_table, read_training
from maintain.bundled_data import book_paths
from measuring import machine
from measuring.needles import Case, Cases
from measuring.tables import Column, Table, number

# Shapes: T tokens, D hidden size, V vocabulary.
PROGRAM = "evaluate.py"
Record = dict[str, Any]
Cuts = Mapping[str, Sequence[Tensor]]  # of texts, by name
NEW_TOKENS = 80  # of a sample
LOGITS_BLOCK = 1024  # positions whose logits are in memory at once
OPENINGS = (  # our own
    "The road to the harbour was steep, and before we had gone half a mile",
    '"You have kept me waiting," said the old clockmaker, "and I should like to know',
    "Of all the islands which we visited that summer, the smallest was",
)


@torch.inference_mode()
def token_losses(model: Transformer, tokens: Tensor) -> Tensor:
    """Next-token losses in nats of one text: tokens [T + 1] -> fp32 [T]."""
    tokens = tokens.to(model.embedding.weight.device)
    pos = torch.arange(len(tokens) - 1, device=tokens.device)[None]  # [1, T]
    hidden = model.hidden(tokens[None, :-1], pos, CausalSelf(model.config.windows))[0]  # [T, D]
    blocks = zip(hidden.split(LOGITS_BLOCK), tokens[1:].split(LOGITS_BLOCK), strict=True)
    return torch.cat([F.cross_entropy(model.output(h).float(), t, reduction="none") for h, t in blocks]).cpu()


def measure_perplexity(engine: Engine, tokenizer: Tokenizer, cuts: Cuts, contexts: Sequence[int]) -> list[Record]:
    """One record a text and context; cuts: stretches of each text, int64 [longest context] each."""
    records = []
    n_tokens = sum(len(cut) for one in cuts.values() for cut in one) * len(contexts)
    bar = tqdm(total=n_tokens, desc="perplexity", unit="tok", unit_scale=True, disable=not n_tokens)
    for name, own in cuts.items():
        n_bytes = sum(len(tokenizer.token_bytes(token)) for cut in own for token in cut.tolist())
        for context in contexts:
            losses = []
            for window in (window for cut in own for window in cut.split(context)):
                losses.append(token_losses(engine.model, torch.cat([bos_of(tokenizer), window])))
                bar.update(len(window))
            per_stretch = torch.cat(losses).view(len(own), -1)  # [stretches, longest]
            mean = per_stretch.mean().item()
            records.append({
                "book": name, "context": context, "tokens": per_stretch.numel(), "loss": mean,
                "perplexity": math.exp(mean),
                "bits_per_byte": per_stretch.double().sum().item() / math.log(2) / n_bytes,
                "loss_window_end": torch.cat([window[-prompts.END:] for window in losses]).mean().item(),
                "loss_stretch_end": per_stretch[:, -prompts.END:].mean().item(),
            })  # fmt: skip
    bar.close()
    return records


def stretches(ids: Sequence[int], length: int, n: int, name: str) -> list[Tensor]:
    """n runs of length tokens, spread evenly over the text, that do not overlap."""
    if len(ids) < n * length:
        raise ValueError(f"{name} has {len(ids):,} tokens, too few for {n} stretches of {length:,}")
    starts = np.linspace(0, len(ids) - length, n + 2)[1:-1].astype(int)
    return [torch.tensor(ids[start : start + length]) for start in starts]


def bos_of(tokenizer: Tokenizer) -> Tensor:
    return torch.tensor([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=torch.int64)


def measure_probes(engine: Engine, probes: Sequence[Case], what: str, names: Sequence[str]) -> list[Record]:
    """Accuracy of greedy answers, a record for each cell: exact matches and single digits at their place."""
    answered: dict[tuple[float, ...], list[float]] = {}
    digits = SamplingParams(max_tokens=DIGITS, ignore_eos=True)
    with tqdm(total=len(probes), desc=what, unit="prompt", disable=not probes) as bar:
        for event in engine.stream([probe.prompt for probe in probes], digits):
            if event.completion:
                probe, text = probes[event.index], event.completion.text
                right = sum(a == b for a, b in zip(text, probe.answer or "", strict=False)) / DIGITS
                answered.setdefault(probe.cell, []).append(right)
                bar.update()
    return [
        dict(zip(names, cell, strict=True))
        | {"n": len(right), "exact": float(np.mean([r == 1.0 for r in right])), "digits": float(np.mean(right))}
        for cell, right in sorted(answered.items())
    ]


def write_samples(engine: Engine, seed: int) -> list[Record]:
    samples = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for prompt, completion in zip(OPENINGS, engine.generate(OPENINGS, params), strict=True):
            samples.append({"prompt": prompt, "temperature": temperature, "text": completion.text})
    return samples


def last_logits(engine: Engine, tokenizer: Tokenizer, cuts: Cuts, n: int) -> list[Tensor]:
    """The logits for each of the last n tokens of each text's first stretch: fp32 [n, V] on the CPU."""
    first = tqdm([own[0] for own in cuts.values()], desc="logits", unit="text", disable=not cuts)
    return [engine.logits(torch.cat([bos_of(tokenizer), cut])[:-1].tolist(), last=min(n, len(cut))) for cut in first]


def distance(name: str, tokens: Tensor, own: Tensor, theirs: Tensor) -> Record:
    """How far logits are from the reference's: own and theirs [T, V], tokens [T] those that came."""
    centred, reference = (logits - logits.mean(-1, keepdim=True) for logits in (own, theirs))
    error = (centred - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp(min=1e-30)
    return {
        "book": name, "tokens": len(tokens), "perplexity": F.cross_entropy(own, tokens).exp().item(),
        "reference_perplexity": F.cross_entropy(theirs, tokens).exp().item(),
        "same_best": (own.argmax(-1) == theirs.argmax(-1)).double().mean().item(), "logit_error": error.item(),
        "divergence": F.kl_div(own.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
        .item(),
    }  # fmt: skip


BESIDE = Table(
    Column("text", lambda r: r["book"], 26, left=True), number("tokens", "tokens", ","),
    number("perplexity", "perplexity", ".3f"), number("reference", "reference_perplexity", ".3f"),
    Column("ratio", lambda r: f"{r['perplexity'] / r['reference_perplexity']:.4f}", 7),
    number("same best token", "same_best", ".2%"), number("logit error", "logit_error", ".2%"),
    number("divergence, nats", "divergence", ".2e"),
)  # fmt: skip


def report(result: Record) -> str:
    sections = [("Perplexity on text that it never saw", PERPLEXITY, result["perplexity"]),
                ("Needles: exact answers / digits right", *needle_table(result["needle"])),
                ("Look-ups", LOOKUPS, result["lookup"])]  # fmt: skip
    if reference := result.get("reference"):
        sections += [
            (f"Beside {reference['name']}", BESIDE, reference["logits"]),
            ("Its needles", *needle_table(reference["needle"])), ("Its look-ups", LOOKUPS, reference["lookup"]),
        ]  # fmt: skip
    return "\n\n".join("\n".join([title, "", *table.lines(rows)]) for title, table, rows in sections if rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = parser_of(PROGRAM, __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", type=Path, nargs="+", help="UTF-8 texts that the model never saw")
    source.add_argument("--books", metavar="DIR", type=Path, help="the same: a folder of .txt files")
    add = parser.add_argument
    add("--contexts", type=positive, nargs="*", help="windows for perplexity (default: 1024 4096 16384, what fits)")
    add("--stretches", type=positive, default=1, help="stretches of the longest context in each text (default: 1)")
    add("--lengths", type=positive, nargs="*", help="needle prompts, tokens (default: 512 1024 ... 16384, what fits)")
    depth = real("a number from 0 to 1", lambda found: 0 <= found <= 1)
    add("--depths", type=depth, nargs="*", default=[0.0, 0.25, 0.5, 0.75, 1.0], help="where the fact stands, 0 to 1")
    add("--entries", type=positive, nargs="*", help="facts of a look-up (default: 4 16 64 256, what fits)")
    add("--n", type=positive, default=2, help="prompts per needle cell; four times as many per look-up (default: 2)")
    add("--reference", metavar="M", help="the model to compare with (default: the same one, nothing quantized)")
    add("--compared", metavar="N", type=count, default=256, help="tokens of each text that are compared (default: 256)")
    add("--compile", action="store_true", help="compile the steps: pays off from about ten minutes on")
    add("--seed", metavar="S", type=seed, default=0, help="of needles, look-ups and samples (default: 0)")
    add("--json", metavar="FILE", type=Path, help="write every number")
    add("--card", metavar="F.md", type=Path, help="write the bundled model's page; needs --log")
    add("--note", metavar="TEXT", default="", help="a paragraph for the card: where this training left the recipe")
    add("--log", metavar="F.jsonl", type=Path, help="the training run's log.jsonl")
    add_engine_flags(
        parser, bodies=None, alone=True, batch_size={"default": 2}, dtype={"default": "fp32"}, max_seq_len=None,
        compile=None,
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.card and not args.log:
        parser.error("--card needs --log, to say how the model was trained")
    return args


def fitting(given: list[int] | None, first: int, factor: int, most: int) -> list[int]:
    """What was given, or rising sizes to 16,384 that do not exceed the most that fits."""
    tried = [first * factor**i for i in range(6) if first * factor**i <= min(most, 16384)]
    return (tried or [most]) if given is None else given


def settle(args: argparse.Namespace, limit: int, shortest: int) -> None:
    """Let lists that nobody gave be what fits into the model and the shortest text; ValueError for what does not."""
    args.contexts = fitting(args.contexts, 1024, 4, min(limit, shortest // args.stretches))
    args.lengths = fitting(args.lengths, 512, 2, limit)
    args.entries = [n for n in (4, 16, 64, 256) if 16 * n < limit] if args.entries is None else args.entries
    if (longest := max([*args.contexts, *args.lengths, 0])) > limit:
        raise ValueError(f"the model has {limit:,} positions, too few for {longest:,} tokens")
    if odd := [c for c in args.contexts if max(args.contexts) % c]:
        raise ValueError(f"the longest context, {max(args.contexts):,}, must be a multiple of {odd[0]:,}")


def probes_of(args: argparse.Namespace, maker: Cases, limit: int) -> list[list[Case]]:
    """Needles and look-ups; ValueError for those that do not fit."""
    rng = np.random.default_rng(args.seed)
    cells = [(length, depth) for length in args.lengths for depth in args.depths for _ in range(args.n)]
    needles = [maker.needle(rng, *cell) for cell in cells]
    asked = ((made_up(rng, n), int(rng.integers(n))) for n in args.entries for _ in range(4 * args.n))
    lookups = [maker.asked(*facts, place) for facts, place in asked]
    for probe in lookups:
        if (n := len(probe.prompt)) + DIGITS > limit:
            raise ValueError(f"{probe.cell[0]:,} entries take {n:,} tokens, over the model's {limit:,}")
    return [needles, lookups]


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    reads = {"--text": args.text, "--books": args.books, "--log": args.log, "--model": args.model}
    check_files({"--json": args.json, "--card": args.card}, reads)
    training = read_training(args.log) if args.log else {}
    paths = book_paths(args.books) if args.books else args.text
    if args.card and not training["books"]:
        raise ValueError(f"{args.log.parent} has no tokens/ beside the log, so the card cannot say what was read")
    if known := [path for path in paths if path.stem in training.get("books", [])]:
        raise ValueError(f"{known[0]} is no held-out text: the model was trained on it")
    folder = locate(args.model)
    config = read_config(folder)
    tokenizer = prompts.reader_of(args.model, folder, config)
    texts = {path.stem: prompts.tokens_of(path, tokenizer) for path in paths}
    settle(args, config.max_seq_len, min(map(len, texts.values())))
    longest = max(args.contexts, default=0)
    cuts = {name: stretches(ids, longest, args.stretches, name) for name, ids in texts.items()} if longest else {}
    needles, lookups = probes_of(args, Cases(tokenizer, texts), config.max_seq_len)
    if args.reference and read_config(locate(args.reference)).vocab_size != config.vocab_size:
        raise ValueError(f"{args.reference} and {args.model} have different vocabularies: their logits do not compare")
    room = max([longest, NEW_TOKENS * 2, *(len(probe.prompt) + DIGITS for probe in (*needles, *lookups))])
    room = min(room, config.max_seq_len)
    how = config_of(EngineConfig, args, max_seq_len=room, compile=args.compile, bodies="fast")
    plain = replace(how, quantize=None, kv_dtype=None)
    compared = args.compared if args.reference or how != plain else 0

    def asked(engine: Engine) -> Record:
        return {
            "lookup": measure_probes(engine, lookups, "look-ups", ["entries"]),
            "needle": measure_probes(engine, needles, "needles", ["length", "depth"]),
        }

    parallel = join(args, PROGRAM)
    engine = Engine.from_pretrained(args.model, how, parallel=parallel)
    result: Record = {
        "model": str(args.model), "dtype": engine.dtype_name, "quantize": engine.config.quantize,
        "kv_dtype": how.kv_dtype, "seed": args.seed,
        "shape": {
            "parameters": config.n_params, "layers": config.n_layers, "dim": config.dim, "heads": config.n_heads,
            "kv_heads": config.n_kv_heads, "vocab": config.vocab_size, "positions": config.max_seq_len,
        },
        "training": training, "perplexity": measure_perplexity(engine, tokenizer, cuts, args.contexts),
        **asked(engine), "samples": write_samples(engine, args.seed),
    }  # fmt: skip
    if compared:
        own = last_logits(engine, tokenizer, cuts, compared)
        del engine
        machine.release_memory(parallel.device)
        name = args.reference or args.model
        engine = Engine.from_pretrained(name, plain, parallel=parallel)
        theirs = last_logits(engine, tokenizer, cuts, compared)
        result["reference"] = {
            "name": f"{name}, {engine.dtype_name}, nothing quantized", **asked(engine),
            "logits": [
                distance(book, cut[0][-len(a) :], a, b)
                for (book, cut), a, b in zip(cuts.items(), own, theirs, strict=True)
            ],
        }  # fmt: skip
    print(report(result))
    written = {args.json: json.dumps(result, indent=1) + "\n"} if args.json else {}
    if args.card:
        written[args.card] = card(result, training, args.note)
    save(written, PROGRAM)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with refusing(PROGRAM):
        run(args)


if __name__ == "__main__":
    started(main)
