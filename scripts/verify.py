"""Prove on your own model and machine, in minutes, that speculation changes nothing.

    python scripts/verify.py
    python scripts/verify.py --model meta-llama/Llama-3.2-1B --draft guided --budget 512
    python scripts/verify.py --soak 60 --kv-dtype int8 --draft quantized
    python scripts/verify.py --model smollm2 --kv-dtype int8 --draft-quantize int8 --json proof.json

Six checks, each a line, which says how rare a fault it would have found:

    greedy    tokens are those of plain decoding; an output may part from it only where the two logits are closer than
              rounding is coarse: 0.25 in bf16, 0.03 in fp16 and int8, 0.0001 in fp32, more for logits above 16
    cache     rounds leave the keys and values that plain steps of the same text leave, but for rounding
    samples   sampled tokens follow the target's exact distributions at every place of a round, and do not depend on
              their neighbours: where they lie in these is uniform (a G-test over quarters, of all contexts together)
    seeds     a seed gives the same tokens alone, beside others, again, in another order and in another slot
    refill    NaN or the largest numbers in all that is unused of the caches change no token
    exact     with --exact logits and tokens are those of plain decoding, bit for bit

A third of the drafts are made worse on purpose, by a q of half of the tokens and by unlikely ones, so that some are
refused however good drafts are; where none was, the check says that nothing was tested, and fails. What drafts leave in
the target's cache is NaN when it verifies.

--soak MINUTES in their place lets one engine change its policy again and again, through all of them, and decode random
requests: every greedy output is compared with one forward of the model (over a cache of fewer bits, with the target's
own steps), samples with what the same seed gave before, and memory and recompiles are watched.

Exit code: 0 all passed; 1 something failed; 2 what was asked for makes no sense.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common import ProgressLine, parser_of, refusing, started
from files import check_files, save_json
from flags import add_engine_flags, add_flags, config_of, draft_of, join, positive, room_of
from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.loading import BUNDLED, find_smollm2, locate
from gpt_fast_sd.model import ModelConfig, load_tokenizer, read_config
from gpt_fast_sd.policies.registry import policy_class
from inputs import prompts
from measuring import grid, lossless, machine, soak

PROGRAM = "verify.py"
GAMMA = {"default": 4, "type": positive, "metavar": "N", "help": "tokens drafted per round"}
SHORTEST, LONGEST = 16, 600  # tokens of prompts
MOST_SAMPLES = 10**6


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("--text", metavar="FILE", type=Path, default=BUNDLED / "document.txt", help="to take prompts from, UTF-8")
    add("--context", metavar="N", type=positive, help=f"tokens of the longest prompt (default: {LONGEST}, or fewer)")
    add("--max-new-tokens", metavar="N", type=positive, default=32, help="of each output (default: 32)")
    add("--samples", metavar="N", type=samples, default=4000, help="tokens that are sampled (default: 4000)")
    add("--soak", metavar="MINUTES", type=positive, help="random requests over all policies for so long, instead")
    add("--json", metavar="FILE", type=Path, help="write what was found there")
    who = parser.add_argument_group("who drafts")
    add_flags(who, DraftConfig, policy={"default": "streaming"}, gamma=GAMMA)
    add_engine_flags(
        parser, model={"default": None, "unset": "smollm2 if there, else bundled"}, alone=True,
        batch_size={"default": 4}, max_seq_len={"type": positive, "default": None, "unset": "what the prompts need"},
    )  # fmt: skip
    return parser.parse_args(argv)


def samples(text: str) -> int:
    if (found := positive(text)) > MOST_SAMPLES:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_SAMPLES:,} samples, got {text!r}")
    return found


def prompts_of(args: argparse.Namespace, config: ModelConfig) -> Callable[[int], list[list[int]]]:
    """Makes n + 1 stretches of the text of uneven length, the longest one first; ValueError at once if none fits."""
    most = (args.max_seq_len or config.max_seq_len) - max(args.max_new_tokens, args.gamma + 2)
    longest = min(LONGEST, most) if args.context is None else args.context
    if most < SHORTEST:
        raise ValueError(
            f"this output leaves {max(0, most):,} tokens of max_seq_len for prompts, which need at least {SHORTEST}"
        )
    if not SHORTEST <= longest <= most:
        raise ValueError(f"prompts of up to {longest:,} tokens: allowed are {SHORTEST} to {most:,} with this output")
    tokenizer = load_tokenizer(locate(args.model), config)
    bos = tokenizer.bos_id if tokenizer else None
    made_up = prompts.random_text(4 * longest, config.vocab_size, 0)
    ids = prompts.tokens_of(args.text, tokenizer) if tokenizer else made_up
    start = [] if bos is None else [bos]

    def make(n: int) -> list[list[int]]:
        made = prompts.ragged({args.text.name: ids}, n, SHORTEST, longest, bos, seed=0)
        return [start + ids[: longest - len(start)], *made]

    make(0)
    return make


def soaked(engine: Engine, args: argparse.Namespace, rows: list[list[int]]) -> Iterator[lossless.Finding]:
    """The finding of a soak over all policies that need no draft model, each with a fixed gamma and auto."""
    common = grid.draft_fields(grid.in_common(vars(args)))
    known = [name for name in grid.known_drafters() if not grid.has_a_model(name)]
    known = [name for name in known if engine.cache.format.planes or not policy_class(name).needs_planes]
    settings, _ = grid.buildable(grid.settings_of(known, [args.budget]), [args.gamma], common)
    drafts = [DraftConfig(), *(one.draft(gamma, common) for one in settings for gamma in (args.gamma, "auto"))]
    tell, seconds = engine.on_progress or (lambda what, done, of: None), 60 * args.soak

    def progress(found: soak.Soaked) -> None:
        tell("soaking, seconds", min(int(found.rests[-1].seconds), seconds), seconds)

    yield soak.finding(soak.soak(engine, drafts, rows, seconds, most_tokens=args.max_new_tokens, progress=progress))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.model = args.model or ("bundled" if find_smollm2() is None else "smollm2")
    with refusing(PROGRAM):
        reads = {"--text": args.text, "--model": args.model, "--draft-model": args.draft_model}
        check_files({"--json": args.json}, reads)
        draft = draft_of(args)
        if draft.policy == "off":
            raise ValueError("--draft off is plain decoding, which the others are compared with: name a policy")
        config, parallel = read_config(locate(args.model)), join(args, PROGRAM)
        make_rows = prompts_of(args, config)
        longest = len(make_rows(0)[0]) + max(args.max_new_tokens, draft.max_gamma + 2)
        how = config_of(EngineConfig, args, max_seq_len=room_of(args, config, longest))
        progress, began = ProgressLine(), time.perf_counter()
        first: Engine | None = Engine.from_pretrained(args.model, how, draft, parallel=parallel)
        rows = make_rows(2 * args.batch_size)  # which are as many as there is room for

    def build(config: EngineConfig) -> Engine:
        nonlocal first
        engine, first = first or Engine.from_pretrained(args.model, config, draft, parallel=parallel), None
        engine.on_progress = progress
        return engine

    assert first
    cache, most = how.kv_dtype or first.dtype_name, max(map(len, rows))
    print(f"{args.model}, {first.dtype_name}, cache {cache}, {len(rows)} prompts of up to {most:,} tokens")
    print(f"drafts: {draft.policy}, gamma {draft.gamma}; {how.batch_size} slots, {first.device}", flush=True)
    environment, findings = machine.environment(first.device), []
    with refusing(PROGRAM):  # there may be no room for the exact engine
        prove = partial(lossless.prove, build, how, rows, args.max_new_tokens, args.samples)
        for finding in soaked(build(how), args, rows) if args.soak else prove():
            progress.clear()
            print(finding.line, flush=True)
            findings.append(finding)
    failed, seconds = [one.check for one in findings if not one.passed], time.perf_counter() - began
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'all passed'}, {seconds:.0f} seconds")
    document = {
        "benchmark": "proof", "model": args.model, "engine": asdict(how), "draft": asdict(draft),
        "environment": environment, "seconds": seconds, "passed": not failed,
        "findings": [asdict(one) for one in findings],
    }  # fmt: skip
    save_json(args.json, document, PROGRAM)
    return 1 if failed else 0


if __name__ == "__main__":
    started(main)
