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

    off          nobody: plain decoding
    full         the target itself, reading its whole cache: a check of the engine, everything is accepted
    streaming    the target, reading the first tokens and a sliding window
    snapkv       the target, reading what the latest tokens attended to most when it last looked, and a window
    quest        the target, reading for each token the pages of its cache that may matter most to it, and a window
    guided       the target, reading the pages that the last verification attended to most, and a window
    standalone   --draft-model, a smaller model with the same vocabulary, reading --view of its own cache
    lookup       no model: what followed the same words earlier in the text
    early_exit   the first --exit-layers layers of the target, reading --view of its cache
    hierarchy    --cheap drafts for the target reading --view of its cache, which drafts for the target reading all

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
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from tqdm import tqdm

from common import refuse, write_whole
from flags import CHAT, add_engine_flags, add_flags, config_of, join, positive, room_of
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, TokenEvent, __version__
from gpt_fast_sd.loading import BUNDLED, SMOLLM2_COMMAND, find_smollm2, locate
from gpt_fast_sd.measuring import Recorder, Way, page
from gpt_fast_sd.model import CheckpointError, ModelConfig, Tokenizer, load_tokenizer, read_config
from gpt_fast_sd.registry import VIEWS
from gpt_fast_sd.stats import EngineStats
from gpt_fast_sd.tp import Parallel

PROGRAM = "generate.py"
LONG_READ, LONG_PREFILL = 50_000_000, 1000  # parameters, and tokens, from which on a line says what takes its time
SHOWN_AT = {False: (0.7, None), True: (1.0, 0.05)}  # temperature and min_p where no prompt is given; True: SmolLM2
PER_PROMPT = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
COLORS = {"green": 32, "yellow": 33, "cyan": 36, "magenta": 35}  # of proposers, in the order a policy names them in
RUNS, SHORT_RUN = 3, 20.0  # runs of each kind in a comparison, where a run takes fewer seconds than that
NEAR_TIE = {"bf16": 0.25, "fp16": 0.03, "fp32": 1e-4}  # a gap of logits that rounding may close: 4 steps of one near 10


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prompts = parser.add_argument_group("prompts")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="continue this text")
    source.add_argument(
        "--prompt-file", metavar="F", nargs="+", type=Path, help="continue these UTF-8 files, one prompt each"
    )
    source.add_argument("--prompts", metavar="F.jsonl", type=Path, help="one JSON object a line")
    prompts.add_argument(
        "--document", metavar="FILE", type=Path, help="UTF-8 text that stands before every prompt; it is prefilled once"
    )
    prompts.add_argument("--chat", action="store_true", help=CHAT)
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
    add("--output", metavar="F.jsonl", type=Path, help="write one JSON object a completion")
    add("--profile", metavar="F.json", type=Path, help="write a Chrome trace of the run")
    add("--report", metavar="F.html", type=Path, help="write a page to look at: tokens, rounds, what drafts read")
    add("--no-stream", action="store_true", help="print each text when it is finished, not as it grows")
    add(
        "--color", choices=("auto", "always", "never"), default="auto",
        help="colour accepted drafts by who proposed them; auto: on a terminal, unless NO_COLOR is set",
    )  # fmt: skip
    return parser.parse_args(argv)


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


def read_text(path: Path) -> str:
    """A UTF-8 file as text; ValueError or OSError in one sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None


def read_requests(
    args: argparse.Namespace, tokenizer: Tokenizer | None, config: ModelConfig, showpiece: bool | None = None
) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts as token ids and the parameters of each."""
    temperature, min_p, seed = args.temperature, args.min_p, args.seed
    showpiece = is_showpiece(args) if showpiece is None else showpiece
    if temperature is None:  # so small a model repeats itself when greedy
        temperature = 0.0
        if showpiece:
            temperature, shown_p = SHOWN_AT[args.model == "smollm2"]
            min_p, seed = shown_p if min_p is None else min_p, seed or 0
    before = f"{read_text(args.document)}\n\n" if args.document else ""
    if args.document and not before.strip():
        raise ValueError(f"--document {args.document} is empty: give it some text, or leave it out")
    common = config_of(SamplingParams, args, temperature=temperature, min_p=min_p, seed=seed)
    if args.prompts is None:
        if args.prompt is not None:
            named = [("--prompt", args.prompt)]
        else:
            named = [(str(path), read_text(path)) for path in args.prompt_file or [BUNDLED / "document.txt"]]
        prompts = [encode(text, name, args.chat, tokenizer, before) for name, text in named]
        if showpiece:  # as much of the document as this model has positions for
            prompts = [ids[: max(1, config.max_seq_len - args.max_new_tokens)] for ids in prompts]
        return prompts, [common] * len(named)
    prompts, params = [], []
    for number, line in enumerate(read_text(args.prompts).splitlines(), start=1):
        where = f"{args.prompts} line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
        prompts.append(encode_record(record, where, args.chat, tokenizer, before))
        try:
            params.append(dataclasses.replace(common, **{key: record[key] for key in PER_PROMPT if key in record}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
    if not prompts:
        raise ValueError(f"{args.prompts} holds no prompt")
    return prompts, params


def requests_shown(args: argparse.Namespace) -> list[str]:
    """The requests on a document as they are printed before their answers; none where prompts are long texts."""
    if not (args.document and args.prompts):
        return []
    records = [json.loads(line) for line in read_text(args.prompts).splitlines() if line.strip()]
    return [f"> {r['prompt'] if 'prompt' in r else r['messages'][-1].get('content')}" for r in records]


def encode_record(record: object, where: str, chat: bool, tokenizer: Tokenizer | None, before: str = "") -> list[int]:
    """The prompt of one JSONL line as token ids; before: the document that stands before it."""
    allowed = {"prompt", "tokens", "messages", *PER_PROMPT}
    if not isinstance(record, dict) or len({"prompt", "tokens", "messages"} & set(record)) != 1:
        raise ValueError(f"{where} must be a JSON object with exactly one of prompt, tokens and messages")
    if unknown := sorted(set(record) - allowed):
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    if before and "tokens" in record:
        raise ValueError(f"{where} has tokens, and --document stands before texts: give a prompt or messages")
    if "tokens" in record:
        ids = record["tokens"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"{where}: tokens must be a list of whole numbers")
        return ids
    if "messages" in record:
        if tokenizer is None:
            raise ValueError(f"{where} has messages, but this model has no tokenizer: give token ids")
        with naming(where):
            return tokenizer.chat(behind(before, record["messages"]))
    if not isinstance(record["prompt"], str):
        raise ValueError(f"{where}: prompt must be a text, got {record['prompt']!r}")
    return encode(record["prompt"], where, chat, tokenizer, before)


def behind(before: str, messages: Any) -> Any:
    """A conversation with a document at the head of its system message, which it is given where it has none."""
    if not before:
        return messages
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise ValueError(f"messages must be a list of objects with role and content, got {messages!r:.80}")
    match messages:
        case [{"role": "system", "content": str(content)} as first, *rest]:
            return [{**first, "content": before + content}, *rest]
    return [{"role": "system", "content": before.rstrip("\n")}, *messages]


def encode(text: str, name: str, chat: bool, tokenizer: Tokenizer | None, before: str = "") -> list[int]:
    """A text prompt as token ids; before: the document that stands before it."""
    if not text.strip():
        raise ValueError(f"{name} is empty: give it some text to continue")
    if tokenizer is None:
        raise ValueError(f"{name} is text, but this model has no tokenizer: use --prompts with token ids")
    text = before + text
    with naming(name):
        return tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Put where a text comes from before what a tokenizer says against it; a CheckpointError names its own file."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def draft_config(args: argparse.Namespace) -> DraftConfig:
    """Who drafts; ValueError where the flags do not fit each other."""
    if args.compare and args.draft == "off":
        raise ValueError("--compare needs a draft policy: with --draft off both sides would be plain decoding")
    return config_of(DraftConfig, args)


def check_prompts(
    prompts: list[list[int]], params: list[SamplingParams], config: ModelConfig, max_seq_len: int | None = None
) -> None:
    """Refuse before weights are read what the engine would refuse for its length, or for a token it has not."""
    limit, whose = max_seq_len, "as --max-seq-len says"
    if limit is None:
        limit, whose = config.n_positions, "the positions that the model has"
    for index, (ids, p) in enumerate(zip(prompts, params, strict=True)):
        if (total := len(ids) + p.max_tokens) > limit:
            raise ValueError(
                f"prompt {index} has {len(ids):,} tokens, what stands before it included, and max_tokens is "
                f"{p.max_tokens:,}: together {total:,}, over max_seq_len {limit:,}, {whose}"
            )
        wrong = next((token for token in ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None or not ids:
            what = "is empty" if wrong is None else f"holds token id {wrong}"
            raise ValueError(f"prompt {index} {what}; the vocabulary goes from 0 to {config.vocab_size - 1}")


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


class ProgressLine:
    """Draws how far something is that takes over a second, on stderr where that is a terminal; see Engine.on_progress.

    The line goes away when all is done. Where there is no terminal, a plain line says once that a long prefill begins.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""
        self._said = False  # that a long prefill begins

    def __call__(self, what: str, done: int, total: int) -> None:
        """So much of what is done, of so much."""
        if self._bar is None or (what, total) != (self._what, self._bar.total) or done < self._bar.n:
            self.clear()
            self._what = what
            if what == "prefill" and total - done >= LONG_PREFILL and not (self._said or sys.stderr.isatty()):
                self._said = True
                print(f"prefilling {total - done:,} tokens ...", file=sys.stderr, flush=True)
            self._bar = tqdm(
                total=total, initial=done, desc=what, unit="", unit_scale=True, leave=False, delay=1.0, disable=None
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.clear()

    def clear(self) -> None:
        """Take the line away; it comes again if what it told of goes on."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


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


def run(
    engine: Engine,
    mine: list[int],
    prompts: list[list[int]],
    params: list[SamplingParams],
    live: bool,
    colors: dict[str, str],
    progress: ProgressLine,
    opening: str = "",
    asked: Sequence[str] = (),
) -> list[Completion]:
    """Generate; print the text as it is committed, or each one when it is finished.

    mine: the places of these prompts among those of all replicas. opening: printed before the first text. asked: before
    each, by its place.
    """
    done, texts = {}, [""] * len(prompts)
    for event in engine.stream(prompts, params):
        text = painted(event, colors)
        texts[event.index] += text
        if live:
            print(opening + text, end="", flush=True)
            opening = ""
        if event.completion:
            progress.clear()  # what is printed now would stand behind it
            done[event.index] = dataclasses.replace(event.completion, index=mine[event.index])
            if not live:
                place = mine[event.index]
                text = f"{asked[place]}\n\n{texts[event.index]}\n" if asked else texts[event.index]
                print(f"--- {place}: {event.completion.finish_reason}\n{text}", flush=True)
    if live:
        print()
    return [done[index] for index in range(len(prompts))]


# ---- plain decoding beside speculation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs of a prompt part, and the tokens there, None where an output had ended.

    gap: how far the target's logit of the worse of the two is below its best one.
    """

    index: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float


@dataclass(frozen=True)
class Comparison:
    """The same prompts decoded both ways; of each kind of run the one of median speed stands for all."""

    plain: list[EngineStats]
    speculative: list[EngineStats]
    n_greedy: int  # outputs that can be compared: samples differ by design
    differences: list[Difference]

    @property
    def ratio(self) -> float:
        """Speculative over plain tokens/s."""
        return over(speed(median(self.speculative)), speed(median(self.plain)))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; outputs_equal is null where all outputs were sampled."""
        return {
            "stats": median(self.plain).as_dict(),
            "ratio": self.ratio,
            "outputs_compared": self.n_greedy,
            "outputs_equal": not self.differences if self.n_greedy else None,
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
            "plain_tokens_per_second": [speed(stats) for stats in self.plain],
            "speculative_tokens_per_second": [speed(stats) for stats in self.speculative],
        }


def speed(stats: EngineStats) -> float:
    """Tokens/s of decoding."""
    return stats.decode_tokens_per_second


def median(runs: list[EngineStats]) -> EngineStats:
    """The run of median speed."""
    return sorted(runs, key=speed)[len(runs) // 2]


def over(a: float, b: float) -> float:
    """a / b; 0 where b is 0."""
    return a / b if b else 0.0


def compare(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], shown: list[Completion]
) -> Comparison:
    """Decode the prompts of the run just shown plainly too; where that is quick, go on in turns to RUNS of each kind.

    Later runs find the first one's keys in their slots; its prefill stands in the stats of all.
    """
    first = engine.stats
    plain, speculative = [], [first]
    began = time.perf_counter()
    plainly = engine.generate(prompts, params, speculate=False)
    plain.append(engine.stats)
    quick = engine.parallel.same(time.perf_counter() - began < SHORT_RUN)  # each process has its own clock
    for _ in range(RUNS - 1 if quick else 0):
        engine.generate(prompts, params)
        speculative.append(engine.stats)
        engine.generate(prompts, params, speculate=False)
        plain.append(engine.stats)
    for stats in plain + speculative:
        stats.prefill_seconds, stats.prefill_tokens = first.prefill_seconds, first.prefill_tokens
    greedy = [index for index, p in enumerate(params) if p.temperature == 0]
    outputs = [(index, plainly[index].tokens, shown[index].tokens) for index in greedy]
    return Comparison(plain, speculative, len(greedy), differences(engine, prompts, outputs))


def differences(
    engine: Engine, prompts: list[list[int]], outputs: list[tuple[int, list[int], list[int]]]
) -> list[Difference]:
    """Where outputs, each (index of the prompt, plain tokens, speculative tokens), part, and by how close a call."""
    found = []
    for index, plain, speculative in outputs:
        pairs = enumerate(itertools.zip_longest(plain, speculative))
        position, (a, b) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (-1, (None, None)))
        if position >= 0:
            logits = engine.logits([*prompts[index], *plain[:position]], last=1)[0]  # [V]
            gap = float(logits.max() - min(logits[token] for token in (a, b) if token is not None))
            found.append(Difference(index, position, a, b, gap))
    return found


# ---- the card and the JSON document ----------------------------------------------------------------------------------


def card(engine: Engine, prompts: list[list[int]], stats: EngineStats, comparison: Comparison | None) -> str:
    """What the run was and how fast it went, beside plain decoding where there is a comparison."""
    rows = about(engine, prompts, stats, comparison)
    rows += side_by_side(comparison) if comparison else alone(engine, stats)
    if stats.drafted:
        positions = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
        shares = " ".join(f"{over(accepted, drafted):.0%}" for accepted, drafted in positions)
        rows.append(("acceptance", f"{stats.acceptance_rate:.0%} of {stats.drafted:,} drafts; by position {shares}"))
    if engine.policy:
        by_gamma = sorted(stats.rounds_by_gamma.items(), reverse=True)
        rows.append(("rounds", ", ".join(f"{n:,} of gamma {gamma}" for gamma, n in by_gamma)))
    if comparison:
        n = len(comparison.plain)
        rows += [("outputs", line) for line in verdict(engine, comparison)]
        rows.append(("measured", f"{n} runs each, in turns; the medians are shown" if n > 1 else "one run each"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)


def about(
    engine: Engine, prompts: list[list[int]], stats: EngineStats, comparison: Comparison | None
) -> list[tuple[str, str]]:
    """What the run was: names and texts."""
    config, lengths, parallel = engine.model.config, [len(ids) for ids in prompts], engine.parallel
    runs = comparison.plain + comparison.speculative if comparison else [stats]
    recompiles, capturing = sum(s.recompiles for s in runs), sum(s.capture_seconds for s in runs)
    rows = [
        ("model", f"{config.n_params / 1e6:.1f} M parameters, {engine.dtype_name} on {engine.device.type}"
                  f"{'' if engine.compiled else ', not compiled'}{', exact' if engine.config.exact else ''}"),
        ("prompts", f"{len(prompts)} of {min(lengths):,} to {max(lengths):,} tokens, {engine.config.batch_size} slots"
                    if len(prompts) > 1 else f"{lengths[0]:,} tokens"),
        ("prefill", f"{stats.prefill_seconds:.2f} s, {stats.prefill_tokens_per_second:,.0f} tokens/s"),
        ("compiling", f"{stats.compile_seconds:.1f} s before the first token, {recompiles} recompiles since"),
    ]  # fmt: skip
    if capturing:
        rows.append(("capturing", f"{capturing:.1f} s for CUDA graphs, no part of decoding"))
    if parallel.dp * parallel.tp > 1:
        rows.insert(1, ("processes", f"{parallel.dp} replicas x {parallel.tp} that hold one together"))
    if engine.policy:
        rows.append(("draft", who_drafts(engine.draft)))
    return rows


def who_drafts(draft: DraftConfig) -> str:
    """The policy and the settings that concern it."""
    settings = {
        "of": draft.draft_model,
        "layers": draft.exit_layers,
        "cheap": draft.cheap if draft.policy == "hierarchy" else None,
        "view": draft.view_name if draft.policy not in VIEWS else None,
        "budget": draft.budget if draft.view_name not in (None, "full") else None,
        "gamma": draft.gamma,
        "on processes": draft.draft_tp,
    }
    return ", ".join([draft.policy, *(f"{name} {value}" for name, value in settings.items() if value is not None)])


def alone(engine: Engine, stats: EngineStats) -> list[tuple[str, str]]:
    """The speed of one run; of plain steps with the bytes that each has to read."""
    rows = [
        ("decoding", f"{stats.decode_tokens:,} tokens at {speed(stats):,.1f} tokens/s"),
        ("KV read", f"{stats.kv_bytes_per_token / 1e6:.2f} MB a token"),
    ]
    if engine.policy:
        spent = ", ".join(f"{part} {share}" for part, share in time_split(stats).items())
        return [*rows, ("a round", f"{stats.tokens_per_round:.2f} tokens"), ("time", spent)]
    weights = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    step, moved = over(stats.decode_seconds, stats.rounds), weights + over(stats.kv_bytes, stats.rounds)
    reading = f"{step * 1e3:.2f} ms for {moved / 1e6:.1f} MB of weights and keys, {over(moved, step) / 1e9:.1f} GB/s"
    return [*rows, ("a step", reading)]


def side_by_side(comparison: Comparison) -> list[tuple[str, str]]:
    """Both ways in two columns, and the ratio where it says something."""
    ways = median(comparison.plain), median(comparison.speculative)
    read, split = [stats.kv_bytes_per_token / 1e6 for stats in ways], [time_split(stats) for stats in ways]
    rows = [
        ("", "plain", "speculative", ""),
        ("tokens/s", *(f"{speed(stats):,.1f}" for stats in ways), f"{comparison.ratio:.2f} x"),
        ("KV MB a token", *(f"{mb:,.2f}" for mb in read), f"{over(read[1], read[0]):.2f} x"),
        ("tokens a round", *(f"{stats.tokens_per_round:.2f}" for stats in ways), ""),
        ("ms a round", *(f"{over(stats.decode_seconds, stats.rounds) * 1e3:.2f}" for stats in ways), ""),
        *((f"{part} time", *(shares[part] for shares in split), "") for part in split[0]),
    ]
    return [("", ""), *((name, f"{plain:>9}  {spec:>11}  {ratio}") for name, plain, spec, ratio in rows), ("", "")]


def time_split(stats: EngineStats) -> dict[str, str]:
    """Where the time of decoding went, in percent."""
    seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "host": stats.host_seconds}
    return {part: f"{over(value, stats.decode_seconds):.0%}" for part, value in seconds.items()}


def verdict(engine: Engine, comparison: Comparison) -> list[str]:
    """Whether both ways said the same; where they did not, whether rounding explains it."""
    n_greedy, found = comparison.n_greedy, comparison.differences
    if not n_greedy:
        return ["not compared: they were sampled, and samples differ by design"]
    if not found:
        return ["equal, token for token" if n_greedy == 1 else f"all {n_greedy} greedy ones equal, token for token"]
    dtypes = engine.dtype_name, engine.config.kv_dtype or engine.dtype_name
    dtype = max(dtypes, key=NEAR_TIE.__getitem__)  # the coarser one
    lines = [f"{n_greedy - len(found)} of {n_greedy} greedy ones equal, token for token"]
    for one in found:
        line = f"prompt {one.index} differs from output token {one.position} on"
        if one.gap <= NEAR_TIE[dtype]:
            lines.append(f"{line}: a near-tie, the two best logits are {one.gap:.2g} apart, which {dtype} rounds away")
        else:
            lines.append(f"{line}: the logits are {one.gap:.2g} apart, more than {dtype} rounds away; please report it")
    return lines


def document(
    engine: Engine,
    completions: list[Completion],
    stats: EngineStats,
    comparison: Comparison | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The JSON document of a run."""
    return {
        "completions": [as_record(completion) for completion in completions],
        "stats": stats.as_dict(),
        **({"plain": comparison.as_dict()} if comparison else {}),
        "config": {
            "model": args.model,
            "engine": dataclasses.asdict(engine.config),
            "draft": dataclasses.asdict(engine.draft),
            "transformer": dataclasses.asdict(engine.model.config),
        },
        "environment": {
            "gpt_fast_sd": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dp": engine.parallel.dp,
            "tp": engine.parallel.tp,
            "cores": os.cpu_count(),
        },
    }


def as_record(completion: Completion) -> dict[str, Any]:
    """A completion as JSON."""
    return {
        "index": completion.index,
        "tokens": completion.tokens,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.as_dict(),
    }


@contextlib.contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Record a Chrome trace of the block, where a file is named."""
    if path is None:
        yield
        return
    with torch.profiler.profile() as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def recorder_of(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Recorder:
    """What listens to the rounds of a run of these prompts."""
    return Recorder(engine.tokenizer, prompts, params, engine.policy.proposers if engine.policy else ())


def report(
    engine: Engine,
    recorder: Recorder,
    prompts: list[list[int]],
    mine: list[int],
    n_requests: int,
    stats: EngineStats,
    comparison: Comparison | None,
    args: argparse.Namespace,
) -> str:
    """The page of a run; mine: the places of the recorded prompts among all n_requests."""
    if comparison:
        ways = {"plain": Way.of(comparison.plain), "speculative": Way.of(comparison.speculative)}
    else:
        ways = {"speculative" if engine.policy else "plain": Way.of([stats])}
    others = n_requests - len(mine)
    return page(
        recorder,
        f"{Path(args.model).name}, {f'{engine.draft.policy} drafts' if engine.policy else 'decoded plainly'}",
        ways=ways,
        facts=about(engine, prompts, stats, comparison),
        names=mine,
        verdict=verdict(engine, comparison) if comparison else (),
        left_out=[f"Texts: those of other replicas ({others:,}), whose rounds are their own."] if others else (),
    )


def check_apart(report: Path | None, args: argparse.Namespace) -> None:
    """Refuse a report that would take the place of a file of the same run."""
    if report is None:
        return
    if report.exists() and not (report.is_file() or report.is_dir()):
        raise ValueError(f"cannot write {report}: it is no file that can be replaced")
    others = {
        "--output": args.output, "--json": args.json if args.json != "-" else None, "--profile": args.profile,
        "--prompts": args.prompts, "--document": args.document, "--model": args.model,
        "--draft-model": args.draft_model,
    }  # fmt: skip
    named = [(flag, Path(path)) for flag, path in others.items() if path is not None]
    for flag, path in [*named, *(("--prompt-file", path) for path in args.prompt_file or [])]:
        if path.resolve() == report.resolve() or (path.exists() and report.exists() and path.samefile(report)):
            raise ValueError(f"--report {report} and {flag} {path} are the same file")
        if path.is_dir() and report.exists() and report.resolve().parent == path.resolve():
            raise ValueError(f"--report {report} would take the place of a file of {flag} {path}")


def check_writable(*paths: Path | None) -> None:
    """Refuse an output that cannot be written before any work is done."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.resolve().parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, build, generate, print."""
    args = parse(argv)
    try:
        to_json = Path(args.json) if args.json not in (None, "-") else None
        check_writable(args.output, args.profile, to_json, args.report)
        check_apart(args.report, args)
        draft_config(args)  # refused before any file is read
        parallel = join(args)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    with parallel.guard(), alone_prints(parallel):
        generate(args, parallel)


def generate(args: argparse.Namespace, parallel: Parallel) -> None:
    """What main does once the processes have met."""
    try:
        nobody_named = args.model is None
        if nobody_named:
            args.model = "bundled" if find_smollm2() is None else "smollm2"
        folder = locate(args.model)
        config = read_config(folder)
        if (showpiece := is_showpiece(args)) and args.model == "smollm2":
            write_about_the_logbook(args)
        prompts, params = read_requests(args, load_tokenizer(folder, config), config, showpiece)
        check_prompts(prompts, params, config, args.max_seq_len)
        if config.n_params >= LONG_READ and parallel.is_main:
            print(f"reading {config.n_params / 1e6:,.0f} M parameters ...", file=sys.stderr, flush=True)
        engine = build(args, prompts, params, config, parallel)
        engine.check(prompts, params)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    if nobody_named and args.model == "bundled" and parallel.is_main:
        print(f"the small bundled model writes; for a real one: {SMOLLM2_COMMAND}", file=sys.stderr, flush=True)
    if engine.compiled and parallel.is_main:
        print("compiling (a minute or two the first time, cached afterwards) ...", file=sys.stderr, flush=True)
    progress = ProgressLine()
    if parallel.is_main:
        engine.on_progress = progress
    engine.warm_up()
    colors = colors_of(engine, args.color)
    if colors:
        print(legend(colors))
    live = len(prompts) == 1 and not args.no_stream
    mine = [index for index, _ in parallel.share(prompts)]
    prompts, params = [prompts[index] for index in mine], [params[index] for index in mine]
    opening = ""
    if live and prompts and args.prompt is None:
        opening = "..." + (engine.tokenizer.decode(prompts[0][-60:]) if engine.tokenizer else "")
    recorder = recorder_of(engine, prompts, params) if args.report and parallel.is_main else None
    engine.on_round = recorder  # of the run that is shown, of no other
    with traced(args.profile if parallel.is_main else None):
        own = run(engine, mine, prompts, params, live, colors, progress, opening, requests_shown(args))
    engine.on_round = None
    stats, comparison = engine.stats, None
    if args.compare or (args.compare is None and showpiece and engine.policy):
        if parallel.is_main:
            print("\ndecoding the same plainly ...", file=sys.stderr, flush=True)
        comparison = compare(engine, prompts, params, own)
        stats = median(comparison.speculative)
    completions = parallel.gather([(completion.index, completion) for completion in own])
    if completions is None:
        return
    for completion in completions:
        if completion.index not in mine:  # another replica's
            print(f"--- {completion.index}: {completion.finish_reason}\n{completion.text}", flush=True)
    print(f"\n{card(engine, prompts, stats, comparison)}")
    if args.output:
        args.output.write_text("".join(json.dumps(as_record(c)) + "\n" for c in completions), encoding="utf-8")
    if args.json:
        text = json.dumps(document(engine, completions, stats, comparison, args))
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if recorder:
        text = report(engine, recorder, prompts, mine, len(completions), stats, comparison, args)
        try:
            write_whole(args.report, text)
        except OSError as error:
            refuse(error, PROGRAM, code=1)


@contextlib.contextmanager
def alone_prints(parallel: Parallel) -> Iterator[None]:
    """Only the first process writes to stdout."""
    if parallel.is_main:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
