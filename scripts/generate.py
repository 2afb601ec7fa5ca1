"""Continue text with a Llama that drafts and verifies: parse, build, generate, print.

    python scripts/generate.py                                   SmolLM2, or the bundled model, continues a text
    python scripts/generate.py --prompt "Once upon a time"       ... your text
    python scripts/generate.py --prompt-file book.txt --draft guided --budget 512 --gamma 4 --compare
    python scripts/generate.py --prompts in.jsonl --output out.jsonl --batch-size 8
    python scripts/generate.py --prompt-file book.txt --compare --report run.html       a page to look at
    python scripts/generate.py --model meta-llama/Llama-3.2-1B-Instruct --chat --prompt "Why is the sky blue?"
    python scripts/generate.py --model some.Q4_K_M.gguf --chat --prompt "Why is the sky blue?"
    torchrun --nproc_per_node=4 scripts/generate.py --tp 2 --prompts in.jsonl --output out.jsonl

Who drafts is --draft. The target verifies every draft, so a policy changes the speed and never what is said:

POLICIES

A line of --prompts is {"prompt": text}, {"tokens": [ids]} or {"messages": [{"role": ..., "content": ...}]}, and may set
max_tokens, temperature, top_k, top_p, min_p, seed, stop, ignore_eos or max_drafts for itself; with "n": 3 it is
continued three times.

Under torchrun --tp processes hold one model together; replicas, as many as there are processes for, share the prompts.
The first process prints; the tokens of its card are the first replica's, the bytes its own.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import ProgressLine, alone_prints, end_if_nobody_reads, parser_of, refusing, started
from card import card, document, report
from comparing import compare
from files import check_files, path_of, save, trace_of
from flags import (
    CHAT,
    FIELDS,
    PARSE_SPECIAL,
    PROMPTS,
    add_engine_flags,
    add_flags,
    config_of,
    draft_of,
    join,
    names,
    positive,
    room_of,
)
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, TokenEvent, registry
from gpt_fast_sd.loading import BUNDLED, SMOLLM2_COMMAND, find_smollm2, locate
from gpt_fast_sd.model import ModelConfig, Tokenizer, load_tokenizer, read_config
from gpt_fast_sd.tp import Parallel
from inputs.prompts import read_text
from measuring import Recorder
from records import Encoder, as_record, check_prompts, read_document, read_lines, requests_of

PROGRAM = "generate.py"
READ = "prompts", "prompt_file", "document", "draft_model"
LONG_READ = 50_000_000  # parameters from which on a line says what takes its time
SHOWN_AT: dict[bool, dict[str, float]] = {  # how texts are drawn where no prompt is given; True: SmolLM2
    False: {"temperature": 0.7},
    True: {"temperature": 0.8, "min_p": 0.03, "top_p": 0.95},
}
COLORS = {"green": 32, "yellow": 33, "cyan": 36, "magenta": 35}  # of proposers, in the order a policy names them in


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = parser_of(PROGRAM, (__doc__ or "").replace("POLICIES", known_policies()))
    prompts = parser.add_argument_group("prompts")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="continue this text")
    source.add_argument(
        "--prompt-file", metavar="F", nargs="+", type=Path, help="continue these UTF-8 files, one prompt each"
    )
    source.add_argument("--prompts", metavar="F.jsonl", type=Path, help=PROMPTS)
    prompts.add_argument("--fields", metavar="A,B", type=names, default=[], help=FIELDS)
    prompts.add_argument(
        "--document", metavar="FILE", type=Path, help="UTF-8 text that stands before every prompt; it is prefilled once"
    )
    prompts.add_argument("--chat", action="store_true", help=CHAT)
    prompts.add_argument("--parse-special", action="store_true", help=PARSE_SPECIAL)
    sampling = parser.add_argument_group("how they are continued")
    beside = "0; more if no prompt is given"
    add_flags(
        sampling,
        SamplingParams,
        max_tokens={"default": None, "unset": "200; 400 if no prompt is given"},
        temperature={"default": None, "unset": beside},
    )
    add_flags(parser.add_argument_group("who drafts"), DraftConfig, policy={"default": "auto"})
    add_engine_flags(
        parser,
        model={"default": None, "unset": "smollm2 if there, else bundled"},
        batch_size={"default": None, "unset": "number of prompts, at most 8"},
        max_seq_len={"type": positive, "default": None, "unset": "what the prompts need"},
    )
    shown = parser.add_argument_group("what is shown and written")
    shown.add_argument(
        "--compare", action=argparse.BooleanOptionalAction,
        help="decode the same prompts plainly too, and show both side by side (default: if no prompt is given)",
    )  # fmt: skip
    add = shown.add_argument
    add("--json", metavar="FILE|-", help="write completions, stats, config and environment as one JSON document")
    add("--output", metavar="F.jsonl", type=Path, help="write one JSON object per completion")
    add("--profile", metavar="F.json", type=Path, help="write a Chrome trace of the run")
    add("--report", metavar="F.html", type=Path, help="write a page to look at: tokens, rounds, what drafts read")
    add("--no-stream", action="store_true", help="print each text when it is finished, not as it grows")
    add(
        "--color", choices=("auto", "always", "never"), default="auto",
        help="colour accepted drafts by who proposed them; auto: on a terminal, unless NO_COLOR is set",
    )  # fmt: skip
    return parser.parse_args(argv)


def known_policies() -> str:
    """A line for each policy: who drafts, and what that reads."""
    rows = ((name, ", reading ".join(filter(None, registry.about(name)))) for name in registry.policies())
    return "\n".join(f"    {name:<12} {said}" for name, said in rows).replace("`", "")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, build, generate, print."""
    args = parse(argv)
    with refusing(PROGRAM):
        check_files(
            {f"--{name}": path_of(getattr(args, name)) for name in ("output", "profile", "json", "report")},
            {f"--{name.replace('_', '-')}": getattr(args, name) for name in READ}
            | {"--model": args.model or ["smollm2", "bundled"]},
        )
        draft_config(args)  # refused before any file is read
        parallel = join(args)
    with parallel.guard(), alone_prints(parallel):
        generate(args, parallel)


def generate(args: argparse.Namespace, parallel: Parallel) -> None:
    """What main does once the processes have met."""
    with refusing(PROGRAM):
        engine, prompts, params = prepare(args, parallel)
    if engine.compiled:
        say(parallel, "compiling (up to two minutes the first time, cached afterwards) ...")
    screen = Screen(engine, prompts, args)
    engine.on_progress = screen.progress if parallel.is_main else None
    engine.warm_up()
    if screen.colors:
        print(legend(screen.colors))
    mine = [index for index, _ in parallel.share(prompts)]
    prompts, params = [prompts[index] for index in mine], [params[index] for index in mine]
    recorder = None
    if args.report and parallel.is_main:
        recorder = Recorder(engine.tokenizer, prompts, params, engine.policy.proposers if engine.policy else ())
    engine.on_round = recorder  # of the run that is shown, of no other
    profiler = torch.profiler.profile() if args.profile and parallel.is_main else None
    with profiler or contextlib.nullcontext():
        own = run(engine, mine, prompts, params, screen)
    engine.on_round = None
    stats, comparison = engine.stats, None
    if args.compare:
        say(parallel, "\ndecoding the same plainly ...")
        comparison = compare(engine, prompts, params, own, args.model)
        stats = comparison.ways["speculative"].stats
    completions = parallel.gather([(completion.index, completion) for completion in own])
    if completions is None:
        return
    for completion in completions:
        if completion.index not in mine:  # another replica's
            print(f"--- {completion.index}: {completion.finish_reason}\n{completion.text}", flush=True)
    print(f"\n{card(engine, prompts, stats, comparison)}")
    texts: dict[Path, str | bytes] = {}
    if args.output:
        texts[args.output] = "".join(json.dumps(as_record(c)) + "\n" for c in completions)
    if args.json:
        text = json.dumps(document(engine, args.model, completions, stats, comparison))
        if args.json == "-":
            print(text)
        else:
            texts[Path(args.json)] = text + "\n"
    if recorder:
        texts[args.report] = report(engine, args.model, recorder, prompts, mine, len(completions), stats, comparison)
    save(texts, PROGRAM, {args.profile: lambda: trace_of(profiler, args.profile)} if profiler else {})


# ---- the engine and its prompts --------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, parallel: Parallel) -> tuple[Engine, list[list[int]], list[SamplingParams]]:
    """An engine and what it is to continue; args say afterwards which model that is and whether there is a comparison.

    ValueError or OSError in one sentence, where possible before weights are read.
    """
    nobody_named = args.model is None
    if nobody_named:
        args.model = "bundled" if find_smollm2() is None else "smollm2"
    folder = locate(args.model)
    config = read_config(folder)
    showpiece = is_showpiece(args)
    prompts, params = read_requests(args, load_tokenizer(folder, config), config, showpiece)
    check_prompts(prompts, params, config, args.max_seq_len, args.prompts, args.fields)
    if config.n_params >= LONG_READ:
        say(parallel, f"reading {config.n_params / 1e6:,.0f} M parameters ...")
    engine = build(args, prompts, params, config, parallel)
    engine.check(prompts, params)
    if args.compare is None:
        args.compare = showpiece and engine.policy is not None
    if nobody_named and args.model == "bundled":
        say(parallel, f"the small bundled model writes; for a real one: {SMOLLM2_COMMAND}")
    return engine, prompts, params


def is_showpiece(args: argparse.Namespace) -> bool:
    """Whether no prompt was given: then SmolLM2 continues a boy's copybook, and any other model a long document."""
    if args.prompt is not None or args.prompt_file is not None or args.prompts is not None:
        return False
    if args.document is not None:
        raise ValueError(f"--document {args.document} stands before prompts: give --prompt, --prompt-file or --prompts")
    return True


def read_requests(
    args: argparse.Namespace, tokenizer: Tokenizer | None, config: ModelConfig, showpiece: bool | None = None
) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts as token ids and the parameters of each."""
    showpiece = is_showpiece(args) if showpiece is None else showpiece
    room = args.max_new_tokens if args.max_new_tokens is not None else 400 if showpiece else 200
    drawn: dict[str, Any] = {"seed": args.seed, "max_tokens": room}
    if args.temperature is None:
        drawn["temperature"] = 0.0
        if showpiece:  # so small a model repeats itself when greedy
            here = SHOWN_AT[args.model == "smollm2"]
            drawn |= here | {name: given for name in here if (given := getattr(args, name)) is not None}
            drawn["seed"] = args.seed or 0
    encoder = Encoder(tokenizer, args.chat, read_document(args.document), args.parse_special, args.fields)
    common = config_of(SamplingParams, args, **drawn)
    if args.prompts is not None:
        return read_lines(args.prompts, encoder, common)
    if args.prompt is not None:
        named = [("--prompt", args.prompt)]
    else:
        shown = BUNDLED / ("copybook.txt" if args.model == "smollm2" else "document.txt")
        named = [(str(path), read_text(path)) for path in args.prompt_file or [shown]]
    if blank := next((name for name, text in named if not text.strip()), None):  # a shell's mistake, or an empty file
        raise ValueError(f"{blank} is empty: give it some text to continue")
    prompts = [encoder.text(text, name) for name, text in named]
    if showpiece:  # as much of the document as this model has positions for
        prompts = [ids[: max(1, config.max_seq_len - room)] for ids in prompts]
    return prompts, [common] * len(prompts)


def draft_config(args: argparse.Namespace) -> DraftConfig:
    """Who drafts; ValueError where the flags do not fit each other."""
    if args.compare and args.draft == "off":
        raise ValueError("--compare needs a draft policy: with --draft off both sides would be plain decoding")
    return draft_of(args)


def build(
    args: argparse.Namespace,
    prompts: list[list[int]],
    params: list[SamplingParams],
    config: ModelConfig,
    parallel: Parallel,
) -> Engine:
    """An engine with room for these prompts, or for this replica's share of them."""
    longest = max(len(ids) + p.max_tokens for ids, p in zip(prompts, params, strict=True))
    slots = args.batch_size if args.batch_size is not None else min(8, -(-len(prompts) // parallel.dp))
    how = config_of(EngineConfig, args, batch_size=slots, max_seq_len=room_of(args, config, longest))
    return Engine.from_pretrained(args.model, how, draft_config(args), parallel=parallel)


# ---- text, coloured by who proposed it -------------------------------------------------------------------------------


def colors_of(engine: Engine, when: str) -> dict[str, str]:
    """The colour of each proposer; empty where nothing is to be coloured."""
    terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if engine.policy is None or when == "never" or (when == "auto" and not terminal):
        return {}
    return dict(zip(engine.policy.proposers, itertools.cycle(COLORS), strict=False))


def paint(text: str, color: str | None) -> str:
    """The text in that colour, and the terminal's own again behind it."""
    return f"\033[{COLORS[color]}m{text}\033[0m" if text and color else text


def legend(colors: dict[str, str]) -> str:
    """One line that says who has which colour."""
    named = ", ".join(paint(f"{proposer} ({color})", color) for proposer, color in colors.items())
    return f"[accepted drafts: {named}; the target's own tokens are not coloured]\n"


def painted(event: TokenEvent, colors: dict[str, str]) -> str:
    """The event's text, accepted drafts in the colour of who proposed them."""
    by_source = itertools.groupby(zip(event.sources, event.pieces, strict=True), key=lambda pair: pair[0])
    return "".join(paint("".join(piece for _, piece in pairs), colors.get(source)) for source, pairs in by_source)


# ---- what is printed -------------------------------------------------------------------------------------------------


class Screen:
    """Texts as they are printed: a single one as it is committed, several each when it is finished."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> None:
        self.progress, self.colors = ProgressLine(), colors_of(engine, args.color)
        self.live = len(prompts) == 1 and not args.no_stream
        self.alone = not (args.output or args.json or args.report or args.profile)  # nothing else is written
        self.asked = requests_of(args.prompts, args.fields) if args.document and args.prompts else []
        self.opening = ""  # before the first one
        if self.live and args.prompt is None:
            self.opening = "..." + (engine.tokenizer.decode(list(prompts[0][-60:])) if engine.tokenizer else "")
        self._texts: defaultdict[int, str] = defaultdict(str)

    def show(self, event: TokenEvent, place: int) -> None:
        """What was committed of the text at this place among those of all replicas."""
        text, completion = painted(event, self.colors), event.completion
        if completion:
            self.progress.clear()  # what is printed now would stand behind it
        if self.live:
            print(self.opening + text, end="\n" if completion else "", flush=True)
            self.opening = ""
            return
        self._texts[place] += text
        if completion:
            text = self._texts.pop(place)
            text = f"{self.asked[place]}\n\n{text}\n" if self.asked else text
            print(f"--- {place}: {completion.finish_reason}\n{text}", flush=True)


def run(
    engine: Engine, mine: list[int], prompts: list[list[int]], params: list[SamplingParams], screen: Screen
) -> list[Completion]:
    """Generate and print; mine: the places of these prompts among those of all replicas."""
    done, n, total = {}, 0, sum(p.max_tokens for p in params)
    for event in engine.stream(prompts, params):
        screen.show(event, mine[event.index])
        n += len(event.tokens)
        if engine.on_progress and not screen.live:
            engine.on_progress("decode", n, total)
        if screen.alone:
            end_if_nobody_reads()
        if event.completion:
            done[event.index] = dataclasses.replace(event.completion, index=mine[event.index])
    screen.progress.clear()
    return [done[index] for index in range(len(prompts))]


def say(parallel: Parallel, text: str) -> None:
    """One line on stderr, of the first process."""
    if parallel.is_main:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    started(main)
