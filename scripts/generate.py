"""Continue text with a Llama on a static cache: parse, build, generate, print.

    python scripts/generate.py                                   the bundled model continues the bundled document
    python scripts/generate.py --prompt "Once upon a time"       ... your text
    python scripts/generate.py --prompts in.jsonl --output out.jsonl --batch-size 8
    python scripts/generate.py --model meta-llama/Llama-3.2-1B-Instruct --chat --prompt "Why is the sky blue?"

A line of --prompts is {"prompt": text}, {"tokens": [ids]} or {"messages": [{"role": ..., "content": ...}]}, and may set
max_tokens, temperature, top_k, top_p, min_p, seed, stop or ignore_eos for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

import torch

from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, __version__
from gpt_fast_sd.engine import BUNDLED, locate
from gpt_fast_sd.model import ModelConfig, Tokenizer, load_tokenizer, read_config

PER_PROMPT = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="bundled", help="'bundled', a model folder, or a hub id (default: bundled)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="continue this text")
    source.add_argument(
        "--prompt-file", metavar="F", nargs="+", type=Path, help="continue these UTF-8 files, one prompt each"
    )
    source.add_argument("--prompts", metavar="F.jsonl", type=Path, help="one JSON object a line")
    add("--chat", action="store_true", help="wrap each text in the model's chat template as a user message")
    add("--max-new-tokens", metavar="N", type=int, default=200, help="tokens to add to each prompt (default: 200)")
    add("--batch-size", metavar="B", type=int, help="slots; more prompts wait (default: number of prompts, at most 8)")
    add("--draft", metavar="POLICY", default="off", help="who drafts; this version knows 'off', plain decoding")
    add("--budget", metavar="K", type=int, default=256, help="cache entries a draft may read (default: 256)")
    add("--gamma", metavar="N|auto", type=number_or_auto, default="auto", help="tokens drafted a round (default: auto)")
    add("--temperature", metavar="T", type=float, help="0 is greedy (default: 0; 0.7 for the bundled document)")
    add("--top-k", metavar="K", type=int, help="keep the K likeliest tokens")
    add("--top-p", metavar="P", type=float, help="keep the likeliest tokens that hold P of the mass")
    add("--min-p", metavar="P", type=float, help="keep tokens at least P times as likely as the best")
    add("--seed", metavar="S", type=int, help="makes sampling repeatable")
    add("--stop", metavar="TEXT", action="append", help="end before this text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    add("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    add(
        "--dtype",
        default="auto",
        help="fp32, bf16, fp16 or auto: as stored, if the device is fast at it (default: auto)",
    )
    add("--kv-dtype", metavar="NAME", help="dtype of the KV cache: fp32, bf16 or fp16 (default: as --dtype)")
    add("--quantize", metavar="NAME", help="weights: int8")
    add("--no-compile", action="store_true", help="run eagerly: starts at once, decodes slower")
    add("--json", metavar="FILE|-", help="write completions, stats, config and environment as one JSON document")
    add("--output", metavar="F.jsonl", type=Path, help="write one JSON object a completion")
    add("--profile", metavar="F.json", type=Path, help="write a Chrome trace of the run")
    add("--no-stream", action="store_true", help="print each text when it is finished, not as it grows")
    return parser.parse_args(argv)


def number_or_auto(text: str) -> int | str:
    """gamma's two spellings."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be 'auto' or a whole number of at least 1, got {text!r}") from None


def read_text(path: Path) -> str:
    """A UTF-8 file as text; ValueError or OSError in one sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None


def read_requests(
    args: argparse.Namespace, tokenizer: Tokenizer | None, config: ModelConfig
) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts as token ids and the parameters of each."""
    temperature, seed = args.temperature, args.seed
    if temperature is None:  # so small a model repeats itself when greedy; a fixed seed keeps the showpiece the same
        own_text = args.prompt is None and args.prompt_file is None and args.prompts is None
        temperature, seed = (0.7, 0 if seed is None else seed) if own_text else (0.0, seed)
    common = SamplingParams(
        max_tokens=args.max_new_tokens, temperature=temperature, top_k=args.top_k, top_p=args.top_p,
        min_p=args.min_p, seed=seed, stop=args.stop, ignore_eos=args.ignore_eos,
    )  # fmt: skip
    if args.prompts is None:
        if args.prompt is not None:
            named = [("--prompt", args.prompt)]
        else:
            named = [(str(path), read_text(path)) for path in args.prompt_file or [BUNDLED / "document.txt"]]
        return [encode(text, name, args.chat, tokenizer) for name, text in named], [common] * len(named)
    prompts, params = [], []
    for number, line in enumerate(read_text(args.prompts).splitlines(), start=1):
        where = f"{args.prompts} line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
        prompts.append(encode_record(record, where, args.chat, tokenizer))
        try:
            params.append(dataclasses.replace(common, **{key: record[key] for key in PER_PROMPT if key in record}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
    if not prompts:
        raise ValueError(f"{args.prompts} holds no prompt")
    return prompts, params


def encode_record(record: object, where: str, chat: bool, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt of one JSONL line as token ids."""
    allowed = {"prompt", "tokens", "messages", *PER_PROMPT}
    if not isinstance(record, dict) or len({"prompt", "tokens", "messages"} & set(record)) != 1:
        raise ValueError(f"{where} must be a JSON object with exactly one of prompt, tokens and messages")
    if unknown := sorted(set(record) - allowed):
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    if "tokens" in record:
        ids = record["tokens"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"{where}: tokens must be a list of whole numbers")
        return ids
    if "messages" in record:
        if tokenizer is None:
            raise ValueError(f"{where} has messages, but this model has no tokenizer: give token ids")
        return tokenizer.chat(record["messages"])
    if not isinstance(record["prompt"], str):
        raise ValueError(f"{where}: prompt must be a text, got {record['prompt']!r}")
    return encode(record["prompt"], where, chat, tokenizer)


def encode(text: str, name: str, chat: bool, tokenizer: Tokenizer | None) -> list[int]:
    """A text prompt as token ids."""
    if not text.strip():
        raise ValueError(f"{name} is empty: give it some text to continue")
    if tokenizer is None:
        raise ValueError(f"{name} is text, but this model has no tokenizer: use --prompts with token ids")
    return tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def build(
    args: argparse.Namespace, prompts: list[list[int]], params: list[SamplingParams], config: ModelConfig
) -> Engine:
    """An engine with room for these prompts."""
    room = max(len(ids) + p.max_tokens for ids, p in zip(prompts, params, strict=True))
    limit = min(config.max_seq_len, config.sliding_window or config.max_seq_len)
    engine_config = EngineConfig(
        batch_size=args.batch_size if args.batch_size is not None else min(8, len(prompts)),
        max_seq_len=min(room, limit), device=args.device, dtype=args.dtype, compile=not args.no_compile,
        quantize=args.quantize, kv_dtype=args.kv_dtype,
    )  # fmt: skip
    draft = DraftConfig(policy=args.draft, budget=args.budget, gamma=args.gamma)
    return Engine.from_pretrained(args.model, engine_config, draft)


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], live: bool) -> list[Completion]:
    """Generate; print the text as it is committed, or each one when it is finished."""
    done = {}
    for event in engine.stream(prompts, params):
        if live:
            print(event.text, end="", flush=True)
        if event.completion:
            done[event.index] = event.completion
            if not live:
                print(f"--- {event.index}: {event.completion.finish_reason}\n{event.completion.text}", flush=True)
    if live:
        print()
    return [done[index] for index in range(len(prompts))]


def card(engine: Engine, prompts: list[list[int]]) -> str:
    """What the run was and how fast, with the bytes that a step has to read beside its time."""
    stats, config = engine.stats, engine.model.config
    weights = sum(p.numel() * p.element_size() for name, p in engine.model.named_parameters())
    step = stats.decode_seconds / max(1, stats.rounds)
    moved = weights + stats.kv_bytes / max(1, stats.rounds)
    lengths = [len(ids) for ids in prompts]
    rows = [
        ("model", f"{config.n_params / 1e6:.1f} M parameters, {engine.dtype_name} on {engine.device.type}"
                  f"{'' if engine.compiled else ', not compiled'}"),
        ("prompts", f"{len(prompts)} of {min(lengths):,} to {max(lengths):,} tokens, {engine.config.batch_size} slots"
                    if len(prompts) > 1 else f"{lengths[0]:,} tokens"),
        ("prefill", f"{stats.prefill_seconds:.2f} s, {stats.prefill_tokens_per_second:,.0f} tokens/s"),
        ("plain decoding", f"{stats.decode_tokens:,} tokens at {stats.decode_tokens_per_second:,.1f} tokens/s"),
        ("a step", f"{step * 1e3:.2f} ms for {moved / 1e6:.1f} MB of weights and keys, {moved / step / 1e9:.1f} GB/s"),
        ("KV read", f"{stats.kv_bytes_per_token / 1e6:.2f} MB a token"),
        ("compiling", f"{stats.compile_seconds:.1f} s before the first token, {stats.recompiles} recompiles since"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def document(engine: Engine, completions: list[Completion], args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document of a run."""
    return {
        "completions": [as_record(completion) for completion in completions],
        "stats": engine.stats.as_dict(),
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
        check_writable(args.output, args.profile, Path(args.json) if args.json not in (None, "-") else None)
        DraftConfig(policy=args.draft, budget=args.budget, gamma=args.gamma)  # refused before any file is read
        folder = locate(args.model)
        config = read_config(folder)
        prompts, params = read_requests(args, load_tokenizer(folder, config), config)
        engine = build(args, prompts, params, config)
        engine.check(prompts, params)
    except (ValueError, OSError) as error:
        refuse(error)
    if engine.compiled:
        print("compiling the steps (about a minute the first time, cached afterwards) ...", file=sys.stderr, flush=True)
    engine.warm_up()
    live = len(prompts) == 1 and not args.no_stream
    if live and args.prompt is None:
        print("..." + (engine.tokenizer.decode(prompts[0][-60:]) if engine.tokenizer else ""), end="", flush=True)
    with traced(args.profile):
        completions = run(engine, prompts, params, live)
    print(f"\n{card(engine, prompts)}")
    if args.output:
        args.output.write_text("".join(json.dumps(as_record(c)) + "\n" for c in completions), encoding="utf-8")
    if args.json:
        text = json.dumps(document(engine, completions, args))
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")


def refuse(error: Exception) -> NoReturn:
    """One sentence on stderr and exit code 2."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"generate.py: {text}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
