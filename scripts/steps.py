"""Where the time of a step goes on this CPU: plain decoding, drafts and verification, over batch and context.

    python scripts/steps.py --model smollm2 --batch 1,8 --context 512,4k,7500
    GPT_FAST_SD_CPU=avx2 python scripts/steps.py --model bundled --json steps.json

Columns in milliseconds: all layers, of these products, attention, and what lies between them; the head's product and
sampling are not among them. "least" is what the step would take at the rates that this machine showed when the program
began, the head included. docs/cpu.md explains more. Exit code: 0; 2 where what was asked for makes no sense.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from common import parser_of, refusing, started
from files import check_files, save
from flags import MODELS, add_flags, draft_of, positive, sizes, threads
from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.config import KV_DTYPES
from gpt_fast_sd.loading import sensible_threads
from measuring import prompts, steps
from measuring.chips import rates_here
from measuring.machine import environment

DRAFTERS = ("streaming", "guided", "snapkv")  # whose steps run all layers in one call


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = parser_of("steps.py", __doc__)
    add = parser.add_argument
    add("--model", metavar="M", default="bundled", help=MODELS)
    add("--batch", metavar="N,N", type=sizes, default=[1, 8], help="rows (default: 1,8)")
    add("--context", metavar="N,N", type=sizes, default=[512, 4000], help="tokens of each (default: 512,4k)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the KV cache (default: bf16)")
    add("--max-new-tokens", metavar="N", type=positive, default=48, help="of each row (default: 48)")
    n = sensible_threads()
    add("--threads", metavar="N", type=threads, default=n, help=f"on a CPU (default: {n}, see OMP_NUM_THREADS)")
    add("--json", metavar="FILE", type=Path, help="write everything there")
    policy = {"choices": DRAFTERS, "allowed": DRAFTERS, "default": "streaming"}
    gamma = {"type": positive, "metavar": "N", "default": 4, "help": "tokens drafted per round"}
    add_flags(parser.add_argument_group("who drafts"), DraftConfig, policy=policy, gamma=gamma, budget={"default": 256})
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = parse(argv)
    with refusing("steps.py"):
        check_files({"--json": args.json}, {"--model": args.model})
        torch.set_num_threads(args.threads)
        cpu, found = torch.device("cpu"), []
        chip = rates_here(cpu, torch.bfloat16).chip("this machine", 1.0)
        draft = draft_of(args)
        print(f"{chip.bandwidth / 1e9:.1f} GB/s, {chip.peak / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads")
        for batch in args.batch:
            for context in args.context:
                config = EngineConfig(
                    batch_size=batch, max_seq_len=context + args.max_new_tokens, device="cpu", dtype="bf16",
                    kv_dtype=args.kv_dtype,
                )  # fmt: skip
                engine = Engine.from_pretrained(args.model, config, draft)
                ids = prompts.random_text(context, min(4000, engine.target.model.config.vocab_size), seed=0)
                rows = prompts.round_the_text(ids, batch, context, None)
                found.append(steps.time_steps(engine, rows, args.max_new_tokens, chip))
                if len(found) == 1:
                    print(steps.STEPS.head)
                for step in found[-1][0]:
                    print(steps.STEPS.line(step), flush=True)
        print("\nA round, of which plain decoding is one token:\n" + steps.ROUNDS.head)
        for _, rounds in found:
            for each in rounds:
                print(steps.ROUNDS.line(each))
        if args.json:
            document = {
                "benchmark": "steps", "environment": environment(cpu), "model": args.model,
                "settings": {k: v for k, v in vars(args).items() if k not in ("model", "json")},
                "read_gb_per_second": chip.bandwidth / 1e9, "gflops": chip.peak / 1e9,
                "steps": [asdict(x) | {"between": x.between} for one, _ in found for x in one],
                "rounds": [asdict(x) for _, one in found for x in one],
            }  # fmt: skip
            save({args.json: json.dumps(document, indent=1) + "\n"}, "steps.py")
    return 0


if __name__ == "__main__":
    started(main)
