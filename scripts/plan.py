"""What speculation would gain, and whether it fits, before anyone waits for a run or buys a chip: the cost model alone.

    python scripts/plan.py --model meta-llama/Llama-3.1-8B --device H200 --batch 16,64 --context 8k,32k,128k
    python scripts/plan.py --model smollm2 --device this --batch 8 --context 7500 --max-new-tokens 64
    python scripts/plan.py --measured sweep.json

Nothing is run but, for --device this, a measurement of the machine's rates; a preset needs no weights. docs/plan.md
explains what is printed. Exit code: 0; 2 where what was asked for makes no sense.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import parser_of, refusing, started
from files import check_files, save_json
from flags import given_beside, positive, sizes
from gpt_fast_sd import DraftConfig, registry
from gpt_fast_sd.config import KV_DTYPES, QUANTIZATIONS
from gpt_fast_sd.loading import TORCH_DTYPES
from gpt_fast_sd.policies.config import DRAFT_QUANTIZATIONS, KV_BITS
from measuring import forecast
from measuring.chips import CHIPS, GIB
from measuring.forecast import ESTIMATES, Kept, System, budget_of, cell, default_policies, label
from measuring.grid import Record, Setting
from measuring.plots import SPEED, check_drawable, color, draw_panels, over_log2
from measuring.replay import PROFILES
from measuring.tables import Column, Table, number


def drafts_of(
    system: System, policies: Sequence[str] | None, budget: int | None, gamma: int | None, draft_model: str | None,
    measured: Sequence[Record] = (), quantize: str | None = None, kv_bits: int | None = None,
) -> list[DraftConfig]:  # fmt: skip
    """A configuration of each policy; None: those that have a published acceptance, and budgets as published.

    measured: results with an acceptance, whose drafts are planned if neither policies nor a budget are given. quantize:
    of the weights of models that draft. kv_bits: that drafts read of each number of the target's cache.
    """
    if measured and not (policies or budget):
        pairs = dict.fromkeys((one["policy"], one["budget"]) for one in measured)
        wanted = [Setting(policy=name, budget=size) for name, size in pairs if name in registry.policies()]
    else:
        published = {name: profile.budget for name, profile in PROFILES.items()}
        names = policies or default_policies(system)
        wanted = [Setting(policy=name, budget=budget or published.get(name)) for name in names]
    known = {"draft_model": draft_model, "quantize": quantize, "kv_bits": kv_bits}
    drafts = [one.draft(gamma or "auto", known) for one in wanted]
    if idle := [draft.policy for draft in drafts if not draft.max_gamma]:
        raise ValueError(f"policy {idle[0]!r} drafts nothing: there is nothing to plan")
    return drafts


def plan(
    system: System, drafts: Sequence[DraftConfig], kept: Kept, batches: Sequence[int], contexts: Sequence[int],
    estimate: str,
) -> Record:  # fmt: skip
    """Every draft at every batch and context, and the lengths beyond which drafting gains; JSON-ready."""
    e = ESTIMATES[estimate]
    cells = [cell(system, draft, kept, n, c, e) for c in contexts for n in batches for draft in drafts]
    lengths = []
    for draft in drafts:
        chances, _ = kept.chances(draft, max(contexts))
        even = {str(n): system.break_even(draft, chances, n, e) for n in batches}
        critical = system.critical(draft, chances, [*batches], e) if len(batches) > 1 else None
        who = {"policy": draft.policy, "budget": budget_of(draft)}
        lengths.append({**who, "break_even": even, "critical": critical})
    chip, ranks = system.chip, system.ranks
    return {
        "benchmark": "plan",
        "settings": {
            "estimate": estimate, "dtype": system.dtype, "kv_dtype": system.kv_dtype, "quantize": system.quantize,
            "draft_quantize": next((draft.quantize for draft in drafts if draft.quantize), None),
            "draft_kv_bits": next((draft.kv_bits for draft in drafts if draft.kv_bits), None),
            "max_new_tokens": system.room, "tp": system.tp, "positions": system.model.max_seq_len,
            "chip": {
                "name": chip.name, "bandwidth": chip.bandwidth, "peak": chip.peak,
                "memory": None if math.isinf(chip.memory) else chip.memory,
            },
            "link": ranks and {
                "name": ranks.slowest.name, "bandwidth": ranks.slowest.bandwidth, "seconds": ranks.all_reduce(0),
            },
        },
        "cells": cells, "lengths": lengths,
    }  # fmt: skip


LEGEND = """\
T_T a step of plain decoding, T_D a draft step, T_V a verification of gamma + 1 tokens, T_S judging and selecting;
tokens: per row and round; speed-up: tokens x T_T / (gamma x T_D + T_V + T_S), below 1 gamma auto drafts nothing;
roofline: the speed-up if every kernel reached the full rates; plain/s, spec./s: tokens per second of all rows;
GiB: on each device, when rows have grown by {room:,} tokens, with ! if that does not fit."""


def _accepted(one: Record) -> str:
    chances = list(dict.fromkeys(f"{chance:.2f}" for chance in one["acceptance"]))
    mark = "*" if one["acceptance_source"].startswith("assumed") else ""
    return " to ".join([chances[0], *chances[1:][-1:]]) + mark


WHERE = number("context", "context", ","), number("batch", "batch", ","), Column("draft", label, 16, left=True)
TABLE = Table(
    *WHERE, Column("accepted", _accepted, 13), number("gamma", "gamma", ""), number("T_T ms", "plain_ms", ".2f", 7),
    number("T_D ms", "draft_ms", ".2f"), number("T_V ms", "verify_ms", ".2f", 7),
    number("T_S ms", "select_ms", ".2f"), number("tokens", "tokens_per_round", ".2f"),
    number("speed-up", "speedup", ".2f", unit="x"), number("roofline", "speedup_of_roofline", ".2f", unit="x"),
    number("plain/s", "plain_tokens_per_second", ",.0f"), number("spec./s", "speculative_tokens_per_second", ",.0f"),
    Column("GiB", lambda one: f"{'' if one['fits'] else '! '}{one['memory_bytes'] / GIB:,.1f}", 9),
)  # fmt: skip
MEASURED = Table(
    *WHERE, number("gamma", "gamma"), number("T", "temperature", "g", 3), number("plain ms", "plain_ms", ".1f"),
    number("measured", "plain_ms_measured", ".1f"), number("round ms", "round_ms", ".1f"),
    number("measured", "round_ms_measured", ".1f"), number("speed-up", "speedup", ".2f", unit="x"),
    number("measured", "speedup_measured", ".2f", unit="x"),
)  # fmt: skip


def text(document: Record, subject: str) -> str:
    """The plan as it is printed. subject: the model's name."""
    cells, settings = document["cells"], document["settings"]
    chip, link, n = settings["chip"], settings["link"], settings["tp"]
    memory = f", {chip['memory'] / GIB:.0f} GiB" if chip["memory"] else ""
    weights = f"{settings['quantize'] or settings['dtype']}, KV cache {settings['kv_dtype'] or settings['dtype']}"
    weights += f", drafts' weights {settings['draft_quantize']}" if settings.get("draft_quantize") else ""
    bits = settings.get("draft_kv_bits")
    weights += f", of which drafts read {bits} bits a number" if bits else ""
    lines = [
        f"{subject}, weights {weights}, on {n} x {chip['name']}: {chip['bandwidth'] / 1e9:,.0f} GB/s, "
        f"{chip['peak'] / 1e12:,.4g} TFLOP/s{memory}{' each' if n > 1 else ''}",
        f"A forecast, estimate {settings['estimate']!r}: nothing below was measured.",
        "", *TABLE.lines(cells), "",
        LEGEND.format(room=settings["max_new_tokens"]),
    ]  # fmt: skip
    told = dict.fromkeys((label(one), one["acceptance_source"]) for one in cells if one["acceptance_source"] != "given")
    lines += [f"{'*' if why.startswith('assumed') else ' '} {name}, {why}" for name, why in told]
    for rows, context in dict.fromkeys((one["batch"], one["context"]) for one in cells if not one["fits"]):
        alike = [one for one in cells if (one["batch"], one["context"]) == (rows, context)]
        most = max(alike, key=lambda one: int(one["memory_bytes"]))
        lines.append(f"! {rows} x {context:,} does not fit: with {label(most)}, {most['advice']}")
    if link:
        shares = {one["batch"]: f"{one['collective_ms']:.2f} ms at batch {one['batch']}" for one in cells}
        lines.append(
            f"Sums over {n} devices by {link['name']}, {link['bandwidth'] / 1e9:,.0f} GB/s each way, "
            f"{link['seconds'] * 1e6:.1f} us and their bytes each: of T_T {', '.join(shares.values())}"
        )
    return "\n".join([*lines, "", *_lengths(document)])


def _lengths(document: Record) -> list[str]:
    """The contexts beyond which drafting gains, and beyond which a larger batch gains more."""

    def shown(context: int | None) -> str:
        return "never" if context is None else "any" if context == 1 else f"{context:,}"

    def even(batch: str) -> Column:
        return Column(f"break-even, batch {batch}", lambda one: shown(one["break_even"][batch]))

    lengths, positions = document["lengths"], document["settings"]["positions"]
    batches, legend = list(lengths[0]["break_even"]), "drafting is faster than plain decoding (break-even)"
    columns = [Column("draft", label, 16, left=True)]
    columns += [even(n) for n in batches]
    if len(batches) > 1:
        legend += f",\nand batch {batches[-1]} gains as much as batch {batches[0]} (critical)"
        columns.append(Column("critical", lambda one: shown(one["critical"])))
    return [f"The context, up to {positions:,} tokens, beyond which {legend}:", "", *Table(*columns).lines(lengths)]


def comparison(points: Sequence[Record], name: str) -> str:

    def shares(key: str) -> str:
        found = sorted(one[f"{key}_measured"] / one[key] for one in points)
        return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"

    rows = sorted(points, key=lambda one: (one["context"], one["batch"], one["temperature"]))
    return "\n".join([
        f"{name}: measured, next to what its machine's own rates allow, with the drafts that were kept there", "",
        *MEASURED.lines(rows), "",
        "measured over predicted, median (least to greatest):", f"a plain step {shares('plain_ms')}, "
        f"a round {shares('round_ms')}, the speed-up {shares('speedup')}",
    ])  # fmt: skip


def draw(document: Record, subject: str, path: Path) -> None:
    """Speed-up over context, one panel per batch and one line per draft; hollow where it does not fit into memory."""
    cells, settings = document["cells"], document["settings"]
    drafts = list(dict.fromkeys(map(label, cells)))

    def draw_panel(panel: Any, batch: int) -> None:
        for i, draft in enumerate(drafts):
            ours = [one for one in cells if (one["batch"], label(one)) == (batch, draft)]
            at, style = [one["context"] for one in ours], {"color": color(i)}
            panel.plot(at, [one["speedup"] for one in ours], label=draft, **style)
            panel.plot(at, [one["speedup_of_roofline"] for one in ours], ":", linewidth=1, **style)
            for one in ours:
                face = color(i) if one["fits"] else "white"
                panel.plot(one["context"], one["speedup"], "o", markerfacecolor=face, **style)
        panel.axhline(1, color="gray", linewidth=1)
        over_log2(panel, sorted({one["context"] for one in cells}))
        panel.set_title(f"batch {batch}", fontsize=10)

    title = (
        f"{subject} on {settings['tp']} x {settings['chip']['name']}: a forecast, nothing measured\n"
        "dotted: if every kernel reached the full rates; hollow: does not fit into the memory"
    )
    panels = [partial(draw_panel, batch=batch) for batch in dict.fromkeys(one["batch"] for one in cells)]
    draw_panels([panels], path, title=title, xlabel="context, tokens of each row", ylabel=SPEED, share="y", legend=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("plan.py", __doc__)
    add = parser.add_argument
    add("--model", metavar="M", help="a preset, by its hub id; bundled, smollm2, a model folder, a GGUF file; "
        f"of others {', '.join(forecast.OTHERS)}")  # fmt: skip
    add("--draft-model", metavar="M", help="the same for a standalone draft")
    add("--device", metavar="NAME", help=f"{', '.join(CHIPS)}; or this, which is measured")
    add("--bandwidth", metavar="GB/s", type=float, help="that memory was seen to give, in place of a data sheet's")
    add("--flops", metavar="T", type=float, help="10^12 operations per second that products were seen to make")
    add("--memory", metavar="GiB", type=float, help="that are free on a device")
    add("--tp", metavar="N", type=positive, default=1, help="devices that hold the model together (default: 1)")
    add("--per-node", metavar="N", type=positive, default=8, help="devices in a machine (default: 8)")
    add("--link", metavar="GB/s", type=float, help="each way between devices of a machine (default: as published)")
    add("--network", metavar="GB/s", type=float, help="each way between machines, for each device")
    others = "of a model that the engine does not run"
    add("--full-layers", metavar="N", type=int, help=f"{others}: layers that attend to everything (default: all)")
    add("--window", metavar="N", type=int, help=f"{others}: entries that other layers read (default: 0, linear "
        "attention)")  # fmt: skip
    add("--experts", metavar="ALL/OWN", type=experts, help=f"{others}: of a layer, and of a token, as in 32/4")
    add("--kv-link", metavar="GB/s", type=float, help="of a link behind which the cache lies, but for what drafts read")
    add("--batch", metavar="N,N", type=sizes, default=[1, 8], help="rows (default: 1,8)")
    add("--context", metavar="N,N", type=sizes, help="tokens of each, k for thousands (default: 8k, or what fits)")
    add("--max-new-tokens", metavar="N", type=positive, default=512, help="that a row grows by (default: 512)")
    add("--policy", metavar="P,P", help="who drafts (default: all for whom an acceptance is known)")
    add("--budget", metavar="N", type=positive, help="entries that a draft step reads (default: as --policy's)")
    add("--gamma", metavar="N", type=positive, help="tokens drafted per round (default: the best of gamma auto's)")
    add("--acceptance", metavar="A", action="append", default=[], help="0.8, streaming=0.8, or a .json of "
        "benchmark.py; may come again (default: as published)")  # fmt: skip
    add("--dtype", default="bf16", choices=list(TORCH_DTYPES), help="of weights (default: bf16)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the KV cache (default: as --dtype)")
    add("--quantize", choices=QUANTIZATIONS, help="of the layers' weights (default: none)")
    add("--draft-quantize", choices=DRAFT_QUANTIZATIONS, help="of what drafts (default: none)")
    add("--draft-kv-bits", type=int, choices=KV_BITS, help="that drafts read of an int8 cache's numbers (default: all)")
    add(
        "--estimate", choices=list(ESTIMATES), help="what kernels reach: roofline, all of the rates; good, as "
        "public ones; expected, as ours did on an H200 (default: that, but for measured or given rates roofline)",
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


def experts(text: str) -> tuple[int, int]:
    """How many there are, and how many a token has: "32/4"."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected how many there are and a token has, as in 32/4; got {text!r}")
    return int(parts[0]), int(parts[1])


def system_of(args: argparse.Namespace) -> System:
    chip, kind = forecast.chip_for(args.device, TORCH_DTYPES[args.dtype], args.bandwidth, args.flops, args.memory)
    given = {name: found for name in ("full_layers", "window", "experts") if (found := getattr(args, name)) is not None}
    if args.kv_link is not None:
        if not 0 < args.kv_link < math.inf:
            raise ValueError(f"--kv-link must be a positive number of GB/s, got {args.kv_link:g}")
        given["kv_link"] = args.kv_link * 1e9
    return System(
        model=forecast.shape_of(args.model), chip=chip, device=kind, dtype=args.dtype, kv_dtype=args.kv_dtype,
        draft_model=forecast.shape_of(args.draft_model) if args.draft_model else None, quantize=args.quantize,
        ranks=forecast.ranks_for(chip, args.tp, args.per_node, args.link, args.network), room=args.max_new_tokens,
        **(forecast.OTHERS.get(args.model, (None, {}))[1] | given),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with refusing("plan.py"):
        given = [part.partition("=")[2] or part for part in args.acceptance]
        reads = {"--measured": args.measured, "--acceptance": given, "--model": args.model}
        check_files({"--json": args.json, "--plot": args.plot}, reads)
        if args.plot:
            check_drawable("--plot", args.plot)
        document: Record = {"benchmark": "plan"}
        if args.model:
            system, kept = system_of(args), Kept.of(args.acceptance)
            policies = [name.strip() for name in args.policy.split(",")] if args.policy else None
            drafts = drafts_of(
                system, policies, args.budget, args.gamma, args.draft_model, kept.measured, args.draft_quantize,
                args.draft_kv_bits,
            )  # fmt: skip
            contexts = args.context or [max(1, min(8000, system.model.max_seq_len - system.room))]
            estimate = args.estimate or ("roofline" if args.device in (None, "this") else "expected")
            document = plan(system, drafts, kept, args.batch, contexts, estimate)
            document["settings"]["model"] = args.model
            print(text(document, args.model))
        if args.measured:
            document["measured"] = forecast.compare(args.measured)
            print("\n" * bool(args.model) + comparison(document["measured"], args.measured.name))
        if args.plot and args.model:
            draw(document, args.model, args.plot)
        save_json(args.json, document, "plan.py")
    return 0


if __name__ == "__main__":
    started(main)
