"""What speculation would gain, and whether it fits, before anyone waits for a run or buys a chip: the cost model alone.

    python scripts/plan.py --model meta-llama/Llama-3.1-8B --device H200 --batch 16,64 --context 8k,32k,128k
    python scripts/plan.py --model smollm2 --device this --batch 8 --context 7500 --max-new-tokens 64
    python scripts/plan.py --measured benchmarks/cpu/smollm2/sweep.json

Nothing is run but, for --device this, a measurement of the machine's rates; a preset needs no weights. docs/plan.md
explains what is printed. Exit code: 0; 2 where what was asked for makes no sense.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import parser_of, refusing, started
from files import check_files, save
from flags import given_beside, positive, sizes
from gpt_fast_sd.config import KV_DTYPES, QUANTIZATIONS
from gpt_fast_sd.loading import TORCH_DTYPES
from gpt_fast_sd.policies.config import KV_BITS
from measuring import forecast, planning
from measuring.chips import CHIPS
from measuring.plots import check_drawable


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = parser_of("plan.py", __doc__)
    add = parser.add_argument
    add("--model", metavar="M", help="a preset, by its hub id; bundled, smollm2, a model folder, a GGUF file")
    add("--draft-model", metavar="M", help="the same for a standalone draft")
    add("--device", metavar="NAME", help=f"{', '.join(CHIPS)}; or this, which is measured")
    add("--bandwidth", metavar="GB/s", type=float, help="that memory was seen to give, in place of a data sheet's")
    add("--flops", metavar="T", type=float, help="10^12 operations per second that products were seen to make")
    add("--memory", metavar="GiB", type=float, help="that are free on a device")
    add("--tp", metavar="N", type=positive, default=1, help="devices that hold the model together (default: 1)")
    add("--per-node", metavar="N", type=positive, default=8, help="devices in a machine (default: 8)")
    add("--link", metavar="GB/s", type=float, help="each way between devices of a machine (default: as published)")
    add("--network", metavar="GB/s", type=float, help="each way between machines, for each device")
    add("--batch", metavar="N,N", type=sizes, default=[1, 8], help="rows (default: 1,8)")
    add("--context", metavar="N,N", type=sizes, help="tokens of each, k for thousands (default: 8k, or what fits)")
    add("--max-new-tokens", metavar="N", type=positive, default=512, help="that a row grows by (default: 512)")
    add("--policy", metavar="P,P", help="who drafts (default: all for whom an acceptance is known)")
    add("--budget", metavar="N", type=positive, help="entries that a draft step reads (default: as --policy's)")
    add("--gamma", metavar="N", type=positive, help="tokens drafted per round (default: the best of gamma auto's)")
    add(
        "--acceptance", metavar="A", action="append", default=[],
        help="0.8, streaming=0.8, or a .json of benchmark.py; may come again (default: as published)",
    )  # fmt: skip
    add("--dtype", default="bf16", choices=list(TORCH_DTYPES), help="of weights (default: bf16)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the KV cache (default: as --dtype)")
    add("--quantize", choices=QUANTIZATIONS, help="of the layers' weights (default: none)")
    add("--draft-quantize", choices=QUANTIZATIONS, help="of a copy that drafts, or of a draft model (default: none)")
    add("--draft-kv-bits", type=int, choices=KV_BITS, help="that drafts read of an int8 cache's numbers (default: all)")
    add(
        "--estimate", choices=list(forecast.ESTIMATES), help="what kernels reach: roofline, all of the rates; good, as "
        "public ones; expected, as ours were estimated to (default: that, but for measured or given rates roofline)",
    )  # fmt: skip
    add("--measured", metavar="FILE", type=Path, help="a sweep of benchmark.py, beside what is predicted for it")
    add("--json", metavar="FILE", type=Path, help="write everything there")
    add("--plot", metavar="FILE", type=Path, help="draw the speed-up over context there")
    args = parser.parse_args(argv)
    if not (args.model or args.measured):
        parser.error("there is nothing to plan: --model M says what, or --measured FILE what to compare with")
    if args.plot and not args.model:
        parser.error("--plot draws a forecast, which needs --model: --measured alone has none")
    if not args.model and (idle := given_beside(parser, args, "measured", "json")):
        parser.error(f"{idle[0]} does nothing without --model: leave it out")
    for name in ("link", "network"):
        if args.tp == 1 and getattr(args, name) is not None:
            parser.error(f"--{name} does nothing on one device: leave it out, or say --tp")
    if args.model and not (args.device or None not in (args.bandwidth, args.flops)):
        parser.error("on what? --device says, or --bandwidth and --flops")
    return args


def system_of(args: argparse.Namespace) -> forecast.System:
    """The model on its chips."""
    chip, kind = forecast.chip_for(args.device, TORCH_DTYPES[args.dtype], args.bandwidth, args.flops, args.memory)
    return forecast.System(
        model=forecast.shape_of(args.model), chip=chip, device=kind, dtype=args.dtype, kv_dtype=args.kv_dtype,
        draft_model=forecast.shape_of(args.draft_model) if args.draft_model else None, quantize=args.quantize,
        ranks=forecast.ranks_for(chip, args.tp, args.per_node, args.link, args.network), room=args.max_new_tokens,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Forecast, print and write."""
    args = parse(argv)
    with refusing("plan.py"):
        given = [part.partition("=")[2] or part for part in args.acceptance]
        check_files(
            {"--json": args.json, "--plot": args.plot},
            {"--measured": args.measured, "--acceptance": given, "--model": args.model},
        )
        check_drawable("--plot", args.plot)
        document: dict[str, Any] = {"benchmark": "plan"}
        if args.model:
            system, kept = system_of(args), forecast.Kept.of(args.acceptance)
            policies = [name.strip() for name in args.policy.split(",")] if args.policy else None
            drafts = planning.drafts_of(
                system, policies, args.budget, args.gamma, args.draft_model, kept.measured, args.draft_quantize,
                args.draft_kv_bits,
            )  # fmt: skip
            contexts = args.context or [max(1, min(8000, system.model.n_positions - system.room))]
            estimate = args.estimate or ("roofline" if args.device in (None, "this") else "expected")
            document = planning.plan(system, drafts, kept, args.batch, contexts, estimate)
            document["settings"]["model"] = args.model
            print(planning.text(document, args.model))
        if args.measured:
            document["measured"] = forecast.compare(args.measured)
            print("\n" * bool(args.model) + planning.comparison(document["measured"], args.measured.name))
        if args.plot and args.model:
            planning.draw(document, args.model, args.plot)
        if args.json:
            save({args.json: json.dumps(document, indent=1) + "\n"}, "plan.py")
    return 0


if __name__ == "__main__":
    started(main)
