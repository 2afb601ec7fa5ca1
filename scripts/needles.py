"""Measure acceptance where the continuation has to be copied from far back, beside prose of the same length.

    python scripts/needles.py --text books/*.txt --json needles.json

needle    prose with one fact far back, asked for at the end
lookup    a register of facts, one of which is asked for
copy      a passage, the prose behind it, and the first half of the passage again: its second half should follow
prose     a stretch of a book

Every policy and budget drafts on the same prompts, whose slots keep their keys meanwhile. Texts should be unknown to
the model. --json FILE is whole after every kind and length: started again with the same settings it goes on where it
ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from common import parser_of, refusing, started
from files import check_files
from flags import add_engine_flags, add_flags, config_of, drafters, join, names_of, positive, seed, sizes
from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import read_config
from inputs import prompts
from inputs.prompts import digest
from inputs.rows import texts_of
from measuring import grid, machine
from measuring.grid import Setting, has_a_model, known_drafters
from measuring.ledger import Ledger, fingerprint
from measuring.needles import KINDS, Case, Cases, measure_cell, print_summary, summarize

PROGRAM = "needles.py"
Cells = dict[tuple[str, int], list[Case]]  # of a kind and length


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("--text", metavar="FILE", type=Path, nargs="+", required=True, help="UTF-8 texts unknown to the model")
    add("--kinds", metavar="K,K", type=names_of("kind", KINDS), default=list(KINDS), help=f"default: {','.join(KINDS)}")
    add("--lengths", metavar="N,N", type=sizes, default=[512, 1024, 2048], help="default: 512,1024,2048")
    add("--n", metavar="N", type=positive, default=40, help="prompts of each kind and length (default: 40)")
    add("--seed", metavar="S", type=seed, default=1, help="of the prompts (default: 1)")
    add("--compile", action="store_true", help="compile the steps: pays off from some thousands of prompts on")
    add("--json", metavar="FILE", type=Path, help="keep every result here; go on from what it holds")
    add("--fresh", action="store_true", help="forget what --json holds")
    add_flags(
        parser.add_argument_group("who drafts"), DraftConfig,
        policy={
            "metavar": "P,P", "type": drafters, "default": ["streaming", "snapkv", "quest", "guided"],
            "allowed": [name for name in known_drafters() if not has_a_model(name)],
        },
        budget={"metavar": "K,K", "type": sizes, "default": [64, 96, 128, 256]}, gamma={"default": 4},
        draft_model=None, draft_tp=None, cheap=None,
    )  # fmt: skip
    add_engine_flags(parser, alone=True, batch_size={"default": 4}, max_seq_len=None, compile=None)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> tuple[Engine, Cells, dict[Setting, DraftConfig], dict[str, str], Ledger]:
    """Check all before the work -> what decodes, what, with which drafts, why some are skipped, the file of results."""
    if args.fresh and not args.json:
        raise ValueError("--fresh forgets what --json holds, and there is no --json")
    check_files({"--json": args.json}, {"--text": args.text, "--model": args.model})
    common = grid.draft_fields(vars(args))
    settings, skipped = grid.buildable(grid.settings_of(args.draft, args.budget), [args.gamma], common)
    drafts, longest = {setting: setting.draft(args.gamma, common) for setting in settings}, max(args.lengths)
    folder = locate(args.model)
    config = read_config(folder)
    if longest > config.max_seq_len:
        raise ValueError(f"prompts of {longest:,} tokens are over the model's {config.max_seq_len:,} positions")
    tokenizer = prompts.reader_of(args.model, folder, config)
    texts = texts_of(args.text, tokenizer)
    for name, ids in texts.items():
        if len(ids) < longest:
            raise ValueError(f"{name} has {len(ids):,} tokens, too few for prompts of {longest:,}")
    maker = Cases(tokenizer, texts, args.seed)
    cells = {(kind, length): maker.make(kind, length, args.n) for kind in args.kinds for length in args.lengths}
    parallel = join(args, PROGRAM)
    engine_config = config_of(EngineConfig, args, max_seq_len=longest, compile=args.compile)
    first = max(drafts.values(), key=lambda draft: draft.needs_planes)  # of whose cache all can draft
    engine = Engine.from_pretrained(args.model, engine_config, first, parallel=parallel)
    here = machine.environment(engine.device)
    in_common = grid.in_common(vars(args)) | {
        "model": str(args.model), "weights": fingerprint(engine.model), "dtype": engine.dtype_name,
        "compiled": engine.compiled, "threads": here["threads"],
        "texts": {name: digest(ids) for name, ids in texts.items()}, "n": args.n, "gamma": args.gamma,
        "seed": args.seed, "drafts": [[setting.policy, setting.budget] for setting in settings],
    }  # fmt: skip
    ledger = Ledger(args.json, "speculation needles", in_common, here, fresh=args.fresh)
    return engine, cells, drafts, skipped, ledger


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every kind and length that is not in the file yet, then sum up."""
    args = parse(argv)
    with refusing(PROGRAM):
        engine, cells, drafts, skipped, ledger = prepare(args)
    what = f"{args.model}, {engine.dtype_name}, gamma {args.gamma}"
    print(f"{what}: {args.n} prompts of each kind and length")
    for label, reason in skipped.items():
        print(f"skipped {label}: {reason}")
    todo = [cell for cell in cells if ledger.find({"kind": cell[0], "length": cell[1]}) is None]
    for kind, length in tqdm(todo, desc="needles", unit="cell", leave=False):
        right, counts = measure_cell(engine, cells[kind, length], [*drafts.values()])
        key = {"kind": kind, "length": length}
        told = [
            {"policy": setting.policy, "budget": setting.budget, "prompts": found}
            for setting, found in zip(drafts, counts, strict=True)
        ]
        ledger.put(key, key | {"right": right, "settings": told})
        ledger.write()
        answered = "" if kind == "prose" else f", {sum(map(bool, right))} of {len(right)} answered right"
        tqdm.write(f"{kind:<8}{length:>7,} tokens{answered}")
    summary = summarize([r for r in ledger.records if (r["kind"], r["length"]) in cells])
    ledger.write(summary=summary, skipped=skipped)
    print_summary(summary)


if __name__ == "__main__":
    started(main)
