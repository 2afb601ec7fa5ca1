"""How often drafts are accepted where a draft model's positions end before the target's: before and behind that end.

    python scripts/maintain/past_context.py --text books/*.txt --json past.json --plot past.svg

The draft model is SmolLM2 as it is, of 8,192 positions; it keeps its first tokens and a window, whose sinks are turned
to stand just before the window once positions run out (StreamingLLM, arXiv 2309.17453). The target is the same weights
with positions stretched twofold by YaRN (arXiv 2309.00071), so 16,384, untrained for them. Beside it the target's own
cache with the same view, which has no such end.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the other programs and their helpers lie

from common import parser_of, refusing, started
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import RopeScaling, Transformer, load_model
from inputs.prompts import reader_of, stretches, tokens_of
from measuring.ledger import write_whole
from measuring.machine import environment
from measuring.plots import check_drawable, draw_panels, line

PROGRAM = "past_context.py"
CONTEXTS = 1000, 2000, 4000, 6000, 7500, 8100, 9000, 10000, 12000, 14000
BATCH, TOKENS, GAMMA, BUDGET, TEMPERATURES = 2, 48, 4, 1024, (0.0, 0.8)
DRAFTS = {
    "SmolLM2 of 8,192 positions": DraftConfig(
        policy="standalone", draft_model="smollm2", view="streaming", gamma=GAMMA, budget=BUDGET
    ),
    "the target's own cache": DraftConfig(policy="streaming", gamma=GAMMA, budget=BUDGET),
}


def stretched(model: Transformer) -> Transformer:
    """The same weights with twice the positions."""
    scaling = RopeScaling(kind="yarn", factor=2.0, original_max_seq_len=model.config.max_seq_len)
    config = replace(model.config, max_seq_len=2 * model.config.max_seq_len, rope_scaling=scaling)
    twin = Transformer(config).to(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def acceptances(texts: list[Path], n_prompts: int) -> list[dict[str, Any]]:
    """One record for each context, draft and temperature."""
    file, found = locate("smollm2"), []
    drafter = load_model(file, dtype=torch.bfloat16)
    tokenizer = reader_of("smollm2", file, drafter.config)
    ids = {str(text): tokens_of(text, tokenizer) for text in texts}
    for context in CONTEXTS:
        prompts = stretches(ids, n_prompts, context, tokenizer.bos_id)
        config = EngineConfig(batch_size=BATCH, max_seq_len=context + TOKENS + GAMMA + 1, dtype="bf16")
        for name, draft in DRAFTS.items():
            model = drafter if draft.draft_model else None
            with Engine(stretched(drafter), tokenizer, config, draft, model) as engine:
                for t in TEMPERATURES:
                    params = SamplingParams(max_tokens=TOKENS, temperature=t, ignore_eos=True)
                    engine.generate(prompts, [replace(params, seed=i) for i in range(n_prompts)])
                    rate, drafted = engine.stats.acceptance_rate, engine.stats.drafted
                    found.append({
                        "context": context, "draft": name, "temperature": t, "acceptance": rate, "drafted": drafted,
                    })  # fmt: skip
                    print(f"{context:,} tokens, {name}, T {t}: {rate:.3f} of {drafted}", flush=True)
    return found


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Acceptance over the context, a mark where the draft model's positions end."""

    def panel(axes: Any) -> None:
        for i, (name, t) in enumerate((name, t) for name in DRAFTS for t in TEMPERATURES):
            ours = [one for one in found if (one["draft"], one["temperature"]) == (name, t)]
            label = f"{name}, {'greedy' if t == 0 else f'T {t}'}"
            line(axes, [one["context"] for one in ours], [one["acceptance"] for one in ours], i, label)
        axes.axvline(8192, color="gray", linestyle=":")
        axes.set_ylim(0, 1)
        axes.legend(fontsize=7, loc="lower left", frameon=False)

    title = "SmolLM2 drafts for itself, stretched to 16,384 positions"
    draw_panels([[panel]], path, title=title, xlabel="tokens of the prompt", ylabel="drafts accepted", size=(5.6, 3.4))


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="(default: 6)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE")
    args: argparse.Namespace = parser.parse_args(argv)
    with refusing(PROGRAM):
        check_drawable("--plot", args.plot)
        found = acceptances(args.text, args.prompts)
        document = {**environment(torch.device("cpu")), "points": found}
        write_whole(args.json, json.dumps(document, indent=1) + "\n")
        draw(found, args.plot)
    return 0


if __name__ == "__main__":
    started(main)
