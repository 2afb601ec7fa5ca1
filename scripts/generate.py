"""Continue text with a Llama that drafts and verifies: parse, build, generate, print.

    python scripts/generate.py                                   SmolLM2, or the bundled model, continues a document
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
max_tokens, temperature, top_k, top_p, min_p, seed, stop or ignore_eos for itself.

Under torchrun --tp processes hold one model together; replicas, as many as there are processes for, share the prompts.
The first process prints; the tokens of its card are the first replica's, the bytes its own.
"""

from __future__ import annotations

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
from files import check_files, path_of, save, trace_of
from flags import CHAT, PARSE_SPECIAL, add_engine_flags, add_flags, config_of, draft_of, join, positive, room_of
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, TokenEvent, registry
from gpt_fast_sd.loading import BUNDLED, SMOLLM2_COMMAND, find_smollm2, locate
from gpt_fast_sd.model import ModelConfig, Tokenizer, load_tokenizer, read_config
from gpt_fast_sd.policies.registry import VIEWS
from gpt_fast_sd.quantization.table import bytes_held
from gpt_fast_sd.serving.stats import EngineStats
from gpt_fast_sd.tp import Parallel
from measuring import Recorder, Way, page
from measuring.card import over, time_split
from measuring.comparing import Comparison, compare
from measuring.machine import environment
from measuring.prompts import read_text
from records import Encoder, as_record, check_prompts, read_document, read_lines, requests_of

PROGRAM = "generate.py"
READ = "prompts", "prompt_file", "document", "draft_model"
LONG_READ = 50_000_000  # parameters from which on a line says what takes its time
SHOWN_AT: dict[bool, dict[str, float]] = {  # how texts are drawn where no prompt is given; True: SmolLM2
    False: {"temperature": 0.7},
    # two of 96 texts fell into a loop or a list, one request being for a letter; of letters and a speech nine of 96
    True: {"temperature": 1.1, "min_p": 0.03, "top_p": 0.95},
}
OWN = ("ngram", "n_sink", "refresh", "page")  # settings of few policies, which the card shows if they were changed
Rows = list[tuple[str, str]]  # names and texts
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
    source.add_argument("--prompts", metavar="F.jsonl", type=Path, help="one JSON object per line")
    prompts.add_argument(
        "--document", metavar="FILE", type=Path, help="UTF-8 text that stands before every prompt; it is prefilled once"
    )
    prompts.add_argument("--chat", action="store_true", help=CHAT)
    prompts.add_argument("--parse-special", action="store_true", help=PARSE_SPECIAL)
    sampling = parser.add_argument_group("how they are continued")
    beside = "0; more if no prompt is given"
    add_flags(sampling, SamplingParams, max_tokens={"default": 200}, temperature={"default": None, "unset": beside})
    add_flags(parser.add_argument_group("who drafts"), DraftConfig, policy={"default": "streaming"})
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
    if (showpiece := is_showpiece(args)) and args.model == "smollm2":
        write_about_the_logbook(args)
    prompts, params = read_requests(args, load_tokenizer(folder, config), config, showpiece)
    check_prompts(prompts, params, config, args.max_seq_len, args.prompts)
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
    """Whether no prompt was given: then SmolLM2 writes about a logbook, and any other model continues a document."""
    if args.prompt is not None or args.prompt_file is not None or args.prompts is not None:
        return False
    if args.document is not None:
        raise ValueError(f"--document {args.document} stands before prompts: give --prompt, --prompt-file or --prompts")
    return True


def write_about_the_logbook(args: argparse.Namespace) -> None:
    """Eight requests on one long document, which all slots share."""
    args.document, args.prompts = BUNDLED / "document.txt", BUNDLED / "requests.jsonl"


def read_requests(
    args: argparse.Namespace, tokenizer: Tokenizer | None, config: ModelConfig, showpiece: bool | None = None
) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts as token ids and the parameters of each."""
    drawn, showpiece = {"seed": args.seed}, is_showpiece(args) if showpiece is None else showpiece
    if args.temperature is None:
        drawn["temperature"] = 0.0
        if showpiece:  # so small a model repeats itself when greedy
            here = SHOWN_AT[args.model == "smollm2"]
            drawn = here | {name: given for name in here if (given := getattr(args, name)) is not None}
            drawn["seed"] = args.seed or 0
    encoder = Encoder(tokenizer, args.chat, read_document(args.document), args.parse_special)
    common = config_of(SamplingParams, args, **drawn)
    if args.prompts is not None:
        return read_lines(args.prompts, encoder, common)
    if args.prompt is not None:
        named = [("--prompt", args.prompt)]
    else:
        named = [(str(path), read_text(path)) for path in args.prompt_file or [BUNDLED / "document.txt"]]
    prompts = [encoder.text(text, name) for name, text in named]
    if showpiece:  # as much of the document as this model has positions for
        prompts = [ids[: max(1, config.max_seq_len - args.max_new_tokens)] for ids in prompts]
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
        self.asked = requests_of(args.prompts) if args.document and args.prompts else []  # before each text
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
    done = {}
    for event in engine.stream(prompts, params):
        screen.show(event, mine[event.index])
        if screen.alone:
            end_if_nobody_reads()
        if event.completion:
            done[event.index] = dataclasses.replace(event.completion, index=mine[event.index])
    return [done[index] for index in range(len(prompts))]


def say(parallel: Parallel, text: str) -> None:
    """One line on stderr, of the first process."""
    if parallel.is_main:
        print(text, file=sys.stderr, flush=True)


# ---- the card, the page and the document -----------------------------------------------------------------------------


def card(engine: Engine, prompts: Sequence[Sequence[int]], stats: EngineStats, comparison: Comparison | None) -> str:
    """What was run and how fast, next to plain decoding if there is a comparison."""
    rows = about(engine, prompts, stats, comparison)
    rows += side_by_side(comparison) if comparison else alone(engine, stats)
    if stats.drafted:
        shares = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        rows.append(("acceptance", f"{stats.acceptance_rate:.0%} of {stats.drafted:,} drafts; by position {shares}"))
    if engine.policy:
        by_gamma = sorted(stats.rounds_by_gamma.items(), reverse=True)
        rows.append(("rounds", ", ".join(f"{n:,} of gamma {gamma}" for gamma, n in by_gamma)))
    if comparison:
        n = len(comparison.plain)
        rows += unquantized(comparison)
        rows += [("outputs", line) for line in verdict(engine, comparison)]
        rows.append(("measured", f"{n} runs each, in turns; the medians are shown" if n > 1 else "one run each"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)


def about(engine: Engine, prompts: Sequence[Sequence[int]], stats: EngineStats, comparison: Comparison | None) -> Rows:
    """What was run: names and texts."""
    config, lengths, parallel = engine.model.config, [len(ids) for ids in prompts], engine.parallel
    runs = comparison.plain + comparison.speculative if comparison else [stats]
    recompiles, capturing = sum(s.recompiles for s in runs), sum(s.capture_seconds for s in runs)
    weights = (
        f"{engine.config.quantize} weights in {engine.dtype_name}" if engine.config.quantize else engine.dtype_name
    )
    cache = f", KV cache {kv}" if (kv := engine.config.kv_dtype or engine.dtype_name) != engine.dtype_name else ""
    rows = [
        ("model", f"{config.n_params / 1e6:.1f} M parameters, {weights}{cache} on {engine.device.type}"
                  f"{'' if engine.compiled else ', not compiled'}{', exact' if engine.config.exact else ''}"),
        ("prompts", f"{len(prompts)} of {min(lengths):,} to {max(lengths):,} tokens, {engine.config.batch_size} slots"
                    if len(prompts) > 1 else f"{lengths[0]:,} tokens"),
        ("prefill", f"{stats.prefill_seconds:.2f} s, {stats.prefill_tokens_per_second:,.0f} tokens/s"),
        ("compiling", f"{stats.compile_seconds:.1f} s before the first token, {recompiles} recompiles since"),
    ]  # fmt: skip
    rows.append(("bodies", engine.target.bodies.about))
    if capturing:
        rows.append(("capturing", f"{capturing:.1f} s for CUDA graphs, not counted as decoding"))
    if parallel.dp * parallel.tp > 1:
        rows.insert(1, ("processes", f"{parallel.dp} replicas x {parallel.tp} that hold one together"))
    if engine.policy:
        rows.append(("draft", who_drafts(engine.draft)))
    return rows


def who_drafts(draft: DraftConfig) -> str:
    """The policy and the settings that concern it."""
    settings = {
        "of": draft.draft_model, "layers": draft.exit_layers,
        "cheap": draft.cheap if draft.policy == "hierarchy" else None,
        "view": draft.view_name if draft.policy not in VIEWS else None,
        "budget": draft.budget if draft.view_name not in (None, "full") else None,
        "weights": draft.quantize, "kv bits": draft.kv_bits, "gamma": draft.gamma,
        **{name: getattr(draft, name) for name in OWN if getattr(draft, name) != getattr(DraftConfig, name)},
        "on processes": draft.draft_tp,
    }  # fmt: skip
    return ", ".join([draft.policy, *(f"{name} {value}" for name, value in settings.items() if value is not None)])


def alone(engine: Engine, stats: EngineStats) -> Rows:
    """The speed of one run; for plain decoding, with the bytes that each step has to read."""
    rows = [
        ("decoding", f"{stats.decode_tokens:,} tokens at {stats.decode_tokens_per_second:,.1f} tokens/s"),
        ("KV read", f"{stats.kv_bytes_per_token / 1e6:.2f} MB per token"),
    ]
    if engine.policy:
        spent = ", ".join(f"{part} {share}" for part, share in time_split(stats).items())
        return [*rows, ("a round", f"{stats.tokens_per_round:.2f} tokens"), ("time", spent)]
    weights = bytes_held(engine.model)
    step, moved = over(stats.decode_seconds, stats.rounds), weights + over(stats.kv_bytes, stats.rounds)
    reading = f"{step * 1e3:.2f} ms for {moved / 1e6:.1f} MB of weights and keys, {over(moved, step) / 1e9:.1f} GB/s"
    return [*rows, ("a step", reading)]


def side_by_side(comparison: Comparison) -> Rows:
    """Both ways in two columns, and their ratio where it is meaningful."""
    ways = [way.stats for way in comparison.ways.values()]
    read, split = [stats.kv_bytes_per_token / 1e6 for stats in ways], [time_split(stats) for stats in ways]
    rows = [
        ("", "plain", "speculative", ""),
        ("tokens/s", *(f"{stats.decode_tokens_per_second:,.1f}" for stats in ways), f"{comparison.ratio:.2f} x"),
        ("KV MB per token", *(f"{mb:,.2f}" for mb in read), f"{over(read[1], read[0]):.2f} x"),
        ("tokens per round", *(f"{stats.tokens_per_round:.2f}" for stats in ways), ""),
        ("ms per round", *(f"{over(stats.decode_seconds, stats.rounds) * 1e3:.2f}" for stats in ways), ""),
        *((f"{part} time", *(shares[part] for shares in split), "") for part in split[0]),
    ]
    return [("", ""), *((name, f"{plain:>9}  {spec:>11}  {ratio}") for name, plain, spec, ratio in rows), ("", "")]


def unquantized(comparison: Comparison) -> Rows:
    """The speed over plain decoding with nothing quantized, which the ratio above is not; or why it is not known."""
    if comparison.unquantized is None:
        return []
    if isinstance(comparison.unquantized, str):
        return [("unquantized", f"not decoded: {comparison.unquantized}")]
    speed, ratio = Way.of(comparison.unquantized).speed, comparison.over_unquantized or 0.0
    text = (
        f"decoded plainly with nothing quantized, afterwards: {speed:,.1f} tokens/s; speculative {ratio:.2f} x of that"
    )
    return [("unquantized", text)]


def verdict(engine: Engine, comparison: Comparison) -> list[str]:
    """Whether both ways gave the same outputs, or whether rounding in the engine's dtypes explains the differences."""
    return comparison.verdict(engine.dtype_name, engine.config.kv_dtype or engine.dtype_name)


def report(
    engine: Engine, model: str, recorder: Recorder, prompts: list[list[int]], mine: list[int], n_requests: int,
    stats: EngineStats, comparison: Comparison | None,
) -> str:  # fmt: skip
    """The page of a run; mine: places of the recorded prompts among all n_requests; model: its name as given."""
    others = n_requests - len(mine)
    return page(
        recorder,
        f"{Path(model).name}, {f'{engine.draft.policy} drafts' if engine.policy else 'decoded plainly'}",
        ways=comparison.ways if comparison else {"speculative" if engine.policy else "plain": Way.of([stats])},
        facts=about(engine, prompts, stats, comparison),
        names=mine,
        verdict=verdict(engine, comparison) if comparison else (),
        left_out=[f"Texts: those of other replicas ({others:,}), whose rounds are their own."] if others else (),
    )


def document(
    engine: Engine, model: str, completions: Sequence[Completion], stats: EngineStats, comparison: Comparison | None
) -> dict[str, Any]:
    """The JSON document of a run: completions and their cost; model: its name as given."""
    return {
        "completions": [as_record(completion) for completion in completions],
        "stats": stats.as_dict(),
        **({"plain": comparison.as_dict()} if comparison else {}),
        "config": {
            "model": model,
            "engine": dataclasses.asdict(engine.config),
            "draft": dataclasses.asdict(engine.draft),
            "transformer": dataclasses.asdict(engine.model.config),
        },
        "environment": environment(engine.device)
        | {"dp": engine.parallel.dp, "tp": engine.parallel.tp, "bodies": dict(engine.target.bodies.names)},
    }


if __name__ == "__main__":
    started(main)
