"""Where the time of a step goes on this CPU: plain decoding, drafts and verification, over batch and context.

    python scripts/steps.py --model smollm2 --batch 1,8 --context 512,4k,7500
    GPT_FAST_SD_CPU=avx2 python scripts/steps.py --model bundled --json steps.json

Columns in milliseconds: all layers, of these products, attention, and what lies between them; the head's product and
sampling are not among them, nor in "least", what the layers would take at the rates that this machine showed when the
program began. docs/cpu.md explains more. Exit code: 0; 2 where what was asked for makes no sense.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import parser_of, refusing, started
from files import check_files, save_json
from flags import MODELS, add_flags, draft_of, positive, sizes, threads
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.config import KV_DTYPES
from gpt_fast_sd.fast import Spent, Stack
from gpt_fast_sd.fast.cpu.fused_layers import FusedLayers
from gpt_fast_sd.loading import sensible_threads
from gpt_fast_sd.policies import ModelDraft
from gpt_fast_sd.steps import Runner
from inputs import prompts
from measuring.chips import Chip, rates_here
from measuring.machine import environment
from measuring.roofline import step_cost
from measuring.tables import Column, Table, number

Record = dict[str, Any]
DRAFTERS = ("streaming", "guided", "snapkv")  # whose steps run all layers in one call
UNTIMED = 3  # first steps of a kind
MOST_TOKENS = 64  # of a row in a step; more of them are a prompt's
WHERE = Column("context x batch", lambda row: f"{row['context']:,} x {row['batch']}")
STEPS = Table(
    WHERE, Column("step", lambda row: row["kind"], left=True, width=6), number("tokens", "n_tokens"),
    *(number(part, part, ".2f", 6) for part in ("layers", "products", "attention", "between", "least")),
    number("n", "n"),
)  # fmt: skip
ROUNDS = Table(
    WHERE, Column("rounds", lambda row: "speculative" if row["speculative"] else "plain", left=True, width=11),
    *(number(part, part, ".2f", 6) for part in ("draft", "verify", "host")), number("tokens", "tokens", ".2f"),
)  # fmt: skip


def watch(engine: Engine, told: list[Spent]) -> list[Stack]:
    """Let the engine's models tell of their calls. ValueError if they run otherwise than whole."""
    runners = [engine.target] + ([engine.policy.runner] if isinstance(engine.policy, ModelDraft) else [])
    stacks = [r.bodies.hidden.stack for r in runners if isinstance(r.bodies.hidden, FusedLayers)]
    if len(stacks) < len(runners):
        raise ValueError(
            "this engine's steps run operator by operator, which is not timed: steps are timed of models in bf16 "
            "on a CPU that has a C++ compiler"
        )
    for stack in stacks:
        stack.watched = told
    return stacks


def least_seconds(runner: Runner, chip: Chip, batch: int, n_tokens: int, reads: int) -> float:
    """What a step's layers cost at the chip's rates: for weights and for keys the longer of reading and arithmetic."""
    config = runner.model.config
    cost, head = step_cost(config, batch, n_tokens, reads), 2 * config.vocab_size * config.dim * batch * n_tokens
    weights = sum(x.nbytes for x in runner.model.layers.parameters())
    keys = batch * runner.cache.bytes_read(reads)
    linear = max(weights / chip.bandwidth, (cost.linear_flops - head) / chip.peak)
    return linear + max(keys / chip.bandwidth, cost.attention_flops / chip.peak)


def time_steps(engine: Engine, prompts: Sequence[Sequence[int]], n_new: int, chip: Chip) -> list[list[Record]]:
    """Generate plainly and with drafts -> medians of each kind of step, and rounds: JSON-ready, in milliseconds."""
    told, steps, rounds = list[Spent](), list[Record](), list[Record]()
    watched = watch(engine, told)
    batch, context = len(prompts), len(prompts[0])
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    engine.generate([list(prompt) for prompt in prompts], params)  # prefill, and whatever is built at first use
    drafter = getattr(engine.policy, "runner", engine.target)
    for speculative in (False, True):
        told.clear()
        engine.generate([list(prompt) for prompt in prompts], params, speculate=speculative)
        for kind in ("draft", "verify") if speculative else ("plain",):
            found = [x for x in told if x.n_tokens <= MOST_TOKENS and x.listed is (kind == "draft")]
            found = [x for x in found if (x.n_tokens > 1) is (kind == "verify")]
            kept = found[UNTIMED:] or found
            if not kept:
                continue
            runner, reads = (drafter, engine.draft.budget) if kind == "draft" else (engine.target, context)
            parts = ("layers", "products", "attention")  # of the layers' products: the head's is not counted
            ms = {part: 1e3 * statistics.median(getattr(x, part) for x in kept) for part in parts}
            steps.append({
                "kind": kind, "batch": batch, "context": context, "n_tokens": kept[0].n_tokens, "n": len(kept), **ms,
                "least": 1e3 * least_seconds(runner, chip, batch, kept[0].n_tokens, min(reads, context)),
                "between": ms["layers"] - ms["products"] - ms["attention"],  # norms, rotations, storing, sums
            })  # fmt: skip
        stats, where = engine.stats, {"batch": batch, "context": context, "speculative": speculative}
        seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "host": stats.host_seconds}
        ms = {part: 1e3 * spent / max(1, stats.rounds) for part, spent in seconds.items()}
        rounds.append({**where, **ms, "tokens": stats.tokens_per_round})
    for stack in watched:
        stack.watched = None
    return [steps, rounds]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
                found.append(time_steps(engine, rows, args.max_new_tokens, chip))
                if len(found) == 1:
                    print(STEPS.head)
                for step in found[-1][0]:
                    print(STEPS.line(step), flush=True)
        print("\nA round, of which plain decoding is one token:\n" + ROUNDS.head)
        for _, rounds in found:
            for each in rounds:
                print(ROUNDS.line(each))
        document = {
            "benchmark": "steps", "environment": environment(cpu), "model": args.model,
            "settings": {k: v for k, v in vars(args).items() if k not in ("model", "json")},
            "read_gb_per_second": chip.bandwidth / 1e9, "gflops": chip.peak / 1e9,
            "steps": [x for one, _ in found for x in one], "rounds": [x for _, one in found for x in one],
        }  # fmt: skip
        save_json(args.json, document, "steps.py")
    return 0


if __name__ == "__main__":
    started(main)
