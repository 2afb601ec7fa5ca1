"""Measure speculation beside plain decoding: what it gains, where from, and that it changes nothing.

    python scripts/benchmark.py                                  the bundled model on the bundled document, small
    python scripts/benchmark.py --batch 1,4,8,16 --context 1k,4k,8k,16k --draft streaming,guided --budget 256
        --gamma 6,auto --text books/*.txt --json sweep.json --plots sweep/
    python scripts/benchmark.py --sweep budget --text book.txt --plots .      every policy over the draft budget
    python scripts/benchmark.py --sweep budget --pairs 0 --json 4k.json       acceptance alone, nothing is timed
    python scripts/benchmark.py --sweep precision --precisions none,none/int8,int8,int8/int8 --gamma 4 --text book.txt
    python scripts/benchmark.py --lossless --text books/*.txt --json lossless.json
    python scripts/benchmark.py --draw 2k.json 4k.json --plots .              pictures of files that are there
    torchrun --nproc_per_node=8 scripts/benchmark.py --model meta-llama/Llama-3.1-8B --tp 8 --batch 32,64,128 ...

A point is one batch, context, draft policy, budget, gamma and temperature. Its rows are prompts of `context` tokens (k
is 1,000, as in MagicDec's tables), each from another place of the texts, and every run adds --max-new-tokens to each of
them. Plain and speculative runs take turns on one engine (A B, B A, A B, ...), whose slots keep their prompts, so that
only the first run prefills, for all temperatures. What counts is the ratio of a pair: the median over the pairs, with
the least and the greatest. All points of a batch share an engine, whose cache is as long as the longest context needs.

Two speeds are told: steady, while all rows are live, and to completion, the end of the slowest row. docs/measure.md
defines them, what is predicted, break-even and the critical length. The machine's rates are measured before the first
point.

--sweep budget takes one batch, context, gamma and temperature, and prompts that share no text. --no-compile starts at
once and gives the same acceptance, but no speed that means anything.

--sweep precision measures every point at each of --precisions: what the KV cache, the draft's weights and the target's
weights are quantized to. Two ratios are told: over plain decoding of the same target, which is what a lossless
policy reproduces, and over plain decoding of the model of which nothing is quantized. Each target has an engine.

--lossless decodes --prompts prompts of ragged length through all slots, in fp32 and with every policy, and compares
them with plain decoding, token for token: exit code 1 where one differs. So does the sweep in fp32, and with --exact.
In 16 bits rows that part are counted; --lossless exits with 1 there where logits are too far apart for rounding. Of
several processes it is the sweep that compares.

--json FILE is whole after every point. Started again with the same settings it goes on where it ended, and what failed
is tried again; batches, contexts and drafts may be added. Other settings are refused; --fresh begins anew.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common  # noqa: F401  before torch: it says how threads wait
import flags
from common import parser_of, refuse, refusing, sentence, started
from files import check_files
from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.model import load_tokenizer, read_config
from inputs.prompts import random_text
from inputs.rows import RoundTheText, Rows, holds_prompts, prompts_for, round_the_texts, texts_of
from measuring import grid, modes, plots
from measuring.grid import draft_fields, has_a_model, known_drafters
from measuring.ledger import Record, complete, read_document
from measuring.modes import ByBudget, ByPrecision, BySize, Job, Lossless, describe
from measuring.points import lengths_of
from records import Encoder

PROGRAM = "benchmark.py"
SECONDS = flags.real("a positive number of seconds", lambda found: 0 < found < math.inf)
TIMED = {"max_new_tokens": 64, "pairs": 3, "seed": 0, "dtype": "auto", "plots": None}
DEFAULTS: dict[str, Record] = {  # of flags that were not given, by what is measured; what is not here is not read there
    "size": {
        **TIMED, "batch": [1, 4], "context": [1000, 4000], "draft": ["streaming"], "budget": [256], "gamma": ["auto"],
        "max_new_tokens": 96, "seconds": 0.0, "sets": 1,
    },
    "budget": {
        **TIMED, "batch": [4], "context": None, "draft": None, "budget": [64, 128, 256, 512], "gamma": [4],
        "seconds": 0.0,
    },
    "precision": {
        **TIMED, "batch": [4], "context": [4000], "draft": ["streaming"], "budget": [256], "gamma": [4],
        "precisions": ["none", "none/int8", "int8", "int8/int8"],
    },
    "lossless": {
        "batch": [8], "draft": list(known_drafters()), "budget": [64], "gamma": [4], "max_new_tokens": 32, "seed": 1,
        "dtype": "fp32", "prompts": 200, "shortest": 20, "longest": 1500,
    },
    "draw": {"plots": None},
}  # fmt: skip
MODES = {name: f"--{name}" if name in ("lossless", "draw") else f"--sweep {name}" for name in DEFAULTS}


def prepare(args: argparse.Namespace) -> Job:
    """Check everything that can be checked before the work; ValueError or OSError in one sentence."""
    reads = {"--text": args.text, "--model": args.model, "--draft-model": args.draft_model}
    check_files({"--json": args.json}, reads)
    if args.plots is not None:
        plots.check_drawable("--plots")
    if getattr(args, "seconds", None) and (getattr(args, "sets", None) or 1) > 1:
        raise ValueError("--sets times each set in as many pairs: leave --seconds out")
    if args.skip and args.synthetic:
        raise ValueError("--skip leaves out tokens of texts: leave it out with --synthetic")
    if args.text and args.synthetic:
        raise ValueError("--text and --synthetic exclude each other: prompts are read or made up")
    if args.mode in ("budget", "lossless"):
        for name in ("batch", "gamma", "temperature", *(("budget",) if args.mode == "lossless" else ())):
            if len(getattr(args, name)) > 1:
                raise ValueError(f"{MODES[args.mode]} measures with one --{name}, got {len(getattr(args, name))}")
        if args.synthetic:
            raise ValueError(f"{MODES[args.mode]} is about texts: leave --synthetic out")
    elif not args.pairs:
        raise ValueError("--pairs 0 counts acceptance, which is for --sweep budget")
    policies = args.draft or [x for x in known_drafters() if x != "full" and (args.draft_model or not has_a_model(x))]
    if args.mode == "lossless" and not args.draft_model and any(map(has_a_model, policies)):
        args.draft_model = str(args.model)  # no smaller one: the target drafts for itself, sparsely
    wanted = grid.settings_of(policies, args.budget)
    settings, skipped = grid.buildable(wanted, args.gamma, draft_fields(vars(args)))
    for temperature in args.temperature:
        modes.params_of(args, temperature, 0)
    engine_config = flags.config_of(EngineConfig, args, batch_size=1, max_seq_len=1)
    folder = locate(args.model)
    config = read_config(folder)
    if args.draft_model:
        locate(args.draft_model)
    tokenizer, texts = load_tokenizer(folder, config), dict[str, list[int]]()
    kept: Rows | None = None
    if not args.synthetic:
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer to read texts with: use --synthetic")
        paths, essay = args.text or [BUNDLED / "document.txt"], BUNDLED / "document.txt"
        if whole := [path for path in paths if holds_prompts(path, args.fields)]:
            if len(paths) > 1 or args.mode in ("budget", "lossless") or args.skip:
                raise ValueError(f"{whole[0]} holds prompts: it stands alone, in a sweep over size, without --skip")
            encode = Encoder(tokenizer).record
            kept = prompts_for(paths[0], args.fields, tokenizer, encode, essay=essay, seed=args.seed)
        else:
            texts = texts_of(paths, tokenizer, args.skip)
            kept = round_the_texts(texts, tokenizer.bos_id, args.skip)
    if kept is None and args.mode in ("size", "precision"):
        most = max(args.batch) * max(args.context) * (getattr(args, "sets", None) or 1)
        made = random_text(most, config.vocab_size, args.seed)
        kept = RoundTheText(made, config.bos_id, {"synthetic": args.seed})
    parallel = flags.join(args)
    if parallel.dp > 1:
        raise ValueError(
            f"a benchmark measures one copy of the model, and {parallel.dp * parallel.tp} processes with --tp "
            f"{parallel.tp} make {parallel.dp}: start as many processes as --tp says"
        )
    return Job(
        args=args, engine_config=engine_config, parallel=parallel, config=config,
        tokenizer=None if args.synthetic else tokenizer, texts=texts, rows=kept, settings=settings, skipped=skipped,
        told=sentence,
    )  # fmt: skip


def draw_files(args: argparse.Namespace) -> None:
    """Draw the files of --draw into --plots: a sweep, or acceptance over the budget, a panel a file."""
    if not args.plots:
        raise ValueError("--draw needs --plots DIR to draw into")
    plots.check_drawable("--draw")
    documents = [read_document(path, "batch", "frontier") for path in args.draw]
    if len({document["benchmark"] for document in documents}) > 1:
        raise ValueError("--draw draws files of one kind of measurement at a time")
    args.plots.mkdir(parents=True, exist_ok=True)
    first, title = documents[0], describe(documents[0])
    if first["benchmark"] == "batch":
        if len(documents) > 1:
            raise ValueError("--draw draws one sweep at a time")
        points = [r for r in first["points"] if r["status"] == "measured"]
        drawn = plots.draw_sweep(points, lengths_of(points), title, args.plots)
    else:
        s, drawn = first["settings"], [args.plots / "acceptance.png"]
        title = f"{s['model']}, {s['dtype']}: acceptance of each policy, gamma {s['gamma']}"
        plots.draw_acceptance(documents, f"{title}\n{s['batch_size']} rows of {s['text']}", drawn[0])
    for path in drawn:
        print(f"drawn: {path}")


def temperatures(text: str) -> list[float]:
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, as in 0,0.8; got {text!r}") from None


def defaults(name: str) -> str:
    """What stands in for a flag that is not given: in the first mode that reads it, then in those that differ."""

    def text(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    (_, first), *others = [(mode, text(values[name])) for mode, values in DEFAULTS.items() if name in values]
    return "; ".join([first, *(f"{value} with {MODES[mode]}" for mode, value in others if value != first)])


def settle(args: argparse.Namespace) -> None:
    """Fill in what was not given; ValueError for a flag that this measurement would not read."""
    for name in dict.fromkeys(name for values in DEFAULTS.values() for name in values):
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS[args.mode].get(name))
        elif name not in DEFAULTS[args.mode]:
            raise ValueError(f"--{name.replace('_', '-')} does nothing with {MODES[args.mode]}: leave it out")
    if args.seconds and not args.pairs:
        raise ValueError("--seconds goes on with pairs, and --pairs 0 times none")
    if args.fresh and not args.json:
        raise ValueError("--fresh forgets what --json holds, and there is no --json")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags, ValueError those that would do nothing."""
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sweep", choices=("size", "budget", "precision"), default="size",
        help="over batch, context and drafts; over the draft budget at one batch and context; or the first, each point "
        "at several precisions (default: size)",
    )  # fmt: skip
    what.add_argument("--lossless", action="store_true", help="compare every policy with plain decoding, in fp32")
    what.add_argument("--draw", metavar="FILE.json", type=Path, nargs="+", help="measure nothing: draw what is there")
    add("--context", metavar="S,S", type=flags.sizes, help="tokens of a prompt (default: 1k,4k; what the text holds "
        "for every row, at most 4,096, with --sweep budget)")  # fmt: skip
    add("--pairs", metavar="N", type=flags.count, help=f"pairs of timed runs of a point (default: {defaults('pairs')})")
    add("--seconds", metavar="S", type=SECONDS, help="go on with pairs until they took so long: short runs need many "
        "(default: as many as --pairs says)")  # fmt: skip
    add("--precisions", metavar="P,P", type=lambda text: text.split(","), help="what is quantized, each CACHE, "
        f"CACHE/DRAFTS or CACHE/DRAFTS/WEIGHTS (default: {defaults('precisions')})")  # fmt: skip
    add("--prompts", metavar="N", type=flags.positive, help="with --lossless (default: 200)")
    add("--shortest", metavar="N", type=flags.positive, help="tokens of its shortest prompt (default: 20)")
    add("--longest", metavar="N", type=flags.positive, help="tokens of its longest prompt (default: 1500)")
    add("--text", metavar="FILE", type=Path, nargs="+", help="texts or prompts, a file of a published form, "
        "hf:NAME[:CONFIG][:SPLIT] or ruler:TASK[=FILE] (default: the bundled document)")  # fmt: skip
    add("--fields", metavar="A,B", type=flags.names, default=[], help=flags.FIELDS)
    add("--skip", metavar="N", type=flags.count, default=0, help="first tokens of each text, left out (default: 0)")
    add("--sets", metavar="N", type=flags.positive, help="of prompts that share no text, each timed in --pairs pairs; "
        "the mean over sets has an interval of 95 %% (default: 1)")  # fmt: skip
    add("--synthetic", action="store_true", help="prompts of random tokens: real work, acceptance without meaning")
    add("--json", metavar="FILE", type=Path, help="keep every point here; go on from what it holds")
    add("--fresh", action="store_true", help="forget what --json holds")
    add("--plots", metavar="DIR", type=Path, help="draw pictures into this folder")

    def several(name: str, kind: Callable[[str], Any], metavar: str) -> Record:
        return {"metavar": metavar, "type": kind, "default": None, "unset": defaults(name)}

    flags.add_flags(
        parser.add_argument_group("who drafts"), DraftConfig,
        policy={
            "flag": "--draft", "metavar": "P,P", "type": flags.drafters, "default": None, "allowed": known_drafters(),
            "unset": "streaming; all but full with --sweep budget, all with --lossless",
        },
        budget=several("budget", flags.sizes, "K,K"), gamma=several("gamma", flags.gammas, "N,N"), cheap=None,
    )  # fmt: skip
    flags.add_flags(
        parser.add_argument_group("how rows are continued"), SamplingParams,
        max_tokens={"type": flags.positive, "default": None, "unset": defaults("max_new_tokens")},
        temperature={"metavar": "T,T", "type": temperatures, "default": [0.0]},
        seed={"type": flags.seed, "unset": defaults("seed"),
              "help": "of sampling (row i: S + i), of --synthetic and of --lossless"},
        stop=None, ignore_eos=None, stop_token_ids=None, logprobs=None,
    )  # fmt: skip
    flags.add_engine_flags(
        parser, batch_size=several("batch", flags.sizes, "B,B") | {"flag": "--batch", "help": "rows decoded together"},
        max_seq_len=None, dtype={"default": None, "unset": defaults("dtype")},
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.mode = "draw" if args.draw else "lossless" if args.lossless else args.sweep
    settle(args)
    if args.draw and (idle := flags.given_beside(parser, args, "draw", "plots", "mode")):
        raise ValueError(f"{idle[0]} does nothing with --draw: leave it out")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with refusing(PROGRAM):
        args = parse(argv)
        if args.draw:
            with complete(args.draw[0]):
                draw_files(args)
            return
        if args.plots is not None and args.plots.exists() and not args.plots.is_dir():
            raise ValueError(f"--plots needs a folder, and {args.plots} is a file")
        job = prepare(args)
        mode = {"size": BySize, "budget": ByBudget, "precision": ByPrecision, "lossless": Lossless}[args.mode](job)
    with job.parallel.guard():
        found = mode.run()
    job.parallel.close()
    if job.parallel.is_main:
        try:
            mode.report(found)
        except (modes.NothingMeasured, modes.OutputsDiffer) as error:
            refuse(error, PROGRAM, code=1 if isinstance(error, modes.OutputsDiffer) else 2)


if __name__ == "__main__":
    started(main)
