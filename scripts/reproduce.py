"""A table of a paper, cell by cell: theirs, our forecast for their chip, our measurement where there is one.

    python scripts/reproduce.py magicdec:table2 --forecast-only      nothing is run
    python scripts/reproduce.py magicdec:all --forecast-only --plot magicdec.png
    python scripts/reproduce.py magicdec:table3a --pg19 pg19/*.json  the command of each group, on this machine's GPUs
    python scripts/reproduce.py magicdec:table6 --measured h100.json beside what benchmark.py measured before
    python scripts/reproduce.py --list

Each group of cells is one command of benchmark.py, which is printed. A forecast has the gamma of the paper and the
acceptance that its tokens per round tell, or else one that the recipe assumes; "ours" is the best gamma at that
acceptance, and where no gamma was published there is no other forecast. Theirs have other kernels, machines and
baselines: they stand there to compare kinds, not decimals. recipes.json holds what was published; files that a command
names, such as squad.json, lie in the folder above scripts/.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common import parser_of, refusing, started
from files import check_files, save_json
from gpt_fast_sd import DraftConfig
from gpt_fast_sd.model import preset
from measuring.chips import chip_named, chip_of
from measuring.forecast import System, budget_of, ranks_for
from measuring.ledger import Record, complete, read_document
from measuring.plots import check_drawable, color, draw_panels
from measuring.points import steady_of
from measuring.roofline import EXPECTED, omega
from measuring.tables import Column, Table, number, shown

PROGRAM = "reproduce.py"
RECIPES: dict[str, Any] = json.loads((Path(__file__).parent / "recipes.json").read_text(encoding="utf-8"))
ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 96  # that each row is continued by, as in MagicDec


class Cell(NamedTuple):
    """What was published of one batch and context; None: it was not."""

    batch: int
    context: int
    gamma: int | None
    tokens: float | None  # per round
    plain_ms: float | None
    speedup: float


@dataclass(frozen=True)
class Group:
    """Cells of one model, draft and machine."""

    recipe: str
    raw: Record

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*cell) for cell in self.raw["cells"]]

    @property
    def identity(self) -> Record:
        """What a measurement of its cells has in common with them."""
        draft, raw = self.draft, self.raw
        return {
            "model": raw["model"], "draft_model": raw.get("draft_model"), "tp": raw["tp"], "policy": draft.policy,
            "kv_dtype": raw.get("kv_dtype"), "budget": budget_of(draft), "chip": chip_named(raw["chip"]).name,
        }  # fmt: skip

    @property
    def draft(self) -> DraftConfig:
        return DraftConfig(**self.raw["draft"], draft_model=self.raw.get("draft_model"))

    @property
    def system(self) -> System:
        raw, chip = self.raw, chip_named(self.raw["chip"])
        shapes = [preset(name) for name in (raw["model"], raw.get("draft_model")) if name]
        model = replace(shapes[0], max_seq_len=max(shapes[0].max_seq_len, raw.get("positions", 0)))
        return System(
            model=model, draft_model=shapes[1] if len(shapes) > 1 else None, chip=chip, room=NEW_TOKENS,
            kv_dtype=raw.get("kv_dtype"), ranks=ranks_for(chip, raw["tp"], 8, None, None),
        )  # fmt: skip

    def command(self, pg19: Sequence[Path], out: str) -> list[str]:
        """What runs its cells: every batch with every context, of which those that were not published may be left."""
        raw, cells = self.raw, self.cells
        argv = ["torchrun", "--standalone", f"--nproc_per_node={raw['tp']}"] if raw["tp"] > 1 else ["python"]
        argv += ["scripts/benchmark.py", "--model", raw["model"], "--max-new-tokens", str(NEW_TOKENS)]
        argv += ["--tp", str(raw["tp"])] if raw["tp"] > 1 else []
        for flag, values in (("--batch", [c.batch for c in cells]), ("--context", [c.context for c in cells])):
            argv += [flag, ",".join(map(str, sorted({*values})))]
        own = dict(raw["draft"])
        policy, cheap = own.pop("policy"), own.pop("cheap", None)
        argv += ["--draft", f"{policy}/{cheap}" if cheap else policy]
        for name, value in own.items():
            argv += ["--draft-quantize" if name == "quantize" else f"--{name.replace('_', '-')}", str(value)]
        argv += ["--draft-model", raw["draft_model"]] if "draft_model" in raw else []
        argv += ["--kv-dtype", raw["kv_dtype"]] if "kv_dtype" in raw else []
        gammas = sorted({c.gamma for c in cells if c.gamma})
        argv += ["--gamma", ",".join([*map(str, gammas), "auto"])]
        text = raw.get("text", "PG19 --skip 8000").split()
        argv += ["--text", *([*map(str, pg19)] or ["PG19"] if text[0] == "PG19" else text[:1]), *text[1:]]
        return [*argv, "--json", out]

    def chances(self, cell: Cell) -> tuple[float, ...]:
        """The chance that a draft is kept: what the tokens per round tell, or what the recipe says."""
        if cell.tokens is None or cell.gamma is None:
            found: float = self.raw.get("acceptance") or next(
                chance for one in self.cells if one.tokens and one.gamma for chance in self.chances(one)
            )
            return (found,)
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if omega(cell.gamma, (middle,)) < cell.tokens else (low, middle)
        return (low,)


def row(group: Group, cell: Cell, measured: Sequence[Record]) -> Record:
    """One cell: theirs, forecast and, if there is one, measured."""
    system, draft, chances = group.system, group.draft, group.chances(cell)
    middle = cell.context + NEW_TOKENS / 2
    best = system.best(draft, chances, cell.batch, middle, EXPECTED)
    gamma = cell.gamma or best.gamma
    same = system.forecast(draft, chances, cell.batch, middle, gamma, EXPECTED)
    _, advice = system.memory(draft, cell.batch, cell.context)
    matching = [one for one in measured if one["of"] == group.identity and one["gamma"] == (cell.gamma or "auto")
                and (one["batch"], one["context"]) == (cell.batch, cell.context)]  # fmt: skip
    return {
        "recipe": group.recipe, "chip": f"{group.raw['tp']} x {system.chip.name}", "model": group.raw["model"],
        "note": group.raw.get("note"), "draft": group.raw.get("draft_model") or draft.policy, **cell._asdict(),
        "acceptance": chances[0], "forecast_plain_ms": same.target_seconds * 1e3,
        "forecast": same.ratio if cell.gamma else None, "ours": best.ratio, "ours_gamma": best.gamma,
        "fits": advice is None, "measured": matching[0]["speed"] if matching else None,
    }  # fmt: skip


TABLE = Table(
    Column("model", lambda r: short(r["model"]), 20, left=True),
    Column("draft", lambda r: short(r["draft"]), 16, left=True),
    number("context", "context", ","), number("batch", "batch"), Column("gamma", lambda r: shown(r["gamma"], "")),
    number("accepted", "acceptance", ".2f"), Column("T_T ms", lambda r: shown(r["plain_ms"], ".1f")),
    number("forecast", "forecast_plain_ms", ".1f"), number("theirs", "speedup", ".2f", unit="x"),
    Column("forecast", lambda r: f"{r['forecast']:.2f}x" if r["forecast"] else "-"),
    Column("ours (gamma)", lambda r: f"{r['ours']:.2f}x ({r['ours_gamma']}){'' if r['fits'] else ' !'}", 12),
    Column("measured", lambda r: f"{r['measured']:.2f}x" if r["measured"] else "-"),
)  # fmt: skip


def short(name: str) -> str:
    return name.rpartition("/")[2]


def chosen(names: Sequence[str]) -> list[str]:
    """The recipes of these names, PAPER:all being all of a paper; ValueError for one that is none."""
    found = []
    for name in names:
        paper, _, which = name.partition(":")
        mine = [one for one in RECIPES if one == name or (which == "all" and one.startswith(f"{paper}:"))]
        if not mine:
            raise ValueError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}, and PAPER:all")
        found += mine
    return list(dict.fromkeys(found))


def run(group: Group, pg19: Sequence[Path]) -> list[Record]:
    """Measure a group here -> its points; ValueError where the machine lacks the GPUs, or the text."""
    needed, there = group.raw["tp"], torch.cuda.device_count()
    if there < needed:
        raise ValueError(f"{group.recipe} needs {needed} GPUs, and torch sees {there}: --forecast-only runs nothing")
    if not pg19 and group.raw.get("text", "PG19").startswith("PG19"):
        raise ValueError(f"{group.recipe} reads PG-19: --pg19 names its files")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "points.json"
        argv = group.command(pg19, str(out))
        done = subprocess.run([sys.executable, *argv[1:]] if argv[0] == "python" else argv, check=False, cwd=ROOT)
        if done.returncode:
            raise ValueError(f"the command of {group.recipe} ended with code {done.returncode}: {shlex.join(argv)}")
        return measured_in(out)


def measured_in(path: Path) -> list[Record]:
    """The points of a sweep, each with what it is of."""
    document = read_document(path, "batch")
    with complete(path):
        settings, chip = document["settings"], chip_of(str(document["environment"]["device"]))
        common = {key: settings[key] for key in ("model", "draft_model", "tp", "kv_dtype")}
        common |= {"chip": chip.name if chip else None}
        return [
            {key: one[key] for key in ("batch", "context", "gamma")}
            | {"of": common | {"policy": one["policy"], "budget": one["budget"]}, "speed": steady_of(one)["median"]}
            for one in document["points"]
            if one["status"] == "measured"
        ]


def draw(rows: Sequence[Record], path: Path) -> None:
    """Theirs on one axis, our forecast on the other: a point a cell."""

    def panel(axes: Any) -> None:
        told = [one for one in rows if one["forecast"]]
        for i, recipe in enumerate(dict.fromkeys(one["recipe"] for one in told)):
            ours = [one for one in told if one["recipe"] == recipe]
            axes.plot([r["speedup"] for r in ours], [r["forecast"] for r in ours], "o", color=color(i), label=recipe)
        ends = [0.5, max((max(r["speedup"], r["forecast"]) for r in told), default=1.0)]
        axes.plot(ends, ends, color="gray", linewidth=1)
        axes.set_title("each cell at the paper's gamma and acceptance", fontsize=10)
        axes.legend(fontsize=8)

    title = "speed over plain decoding: published, and forecast for us\nno point of this picture was measured by us"
    draw_panels([[panel]], path, title=title, xlabel="published", ylabel="forecast")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("recipes", metavar="RECIPE", nargs="*", help="PAPER:TABLE, or PAPER:all")
    add("--list", action="store_true", help="say which there are")
    add("--forecast-only", action="store_true", help="run nothing")
    add("--pg19", metavar="FILE", type=Path, nargs="+", default=[], help="files of PG-19, for what reads it")
    add("--measured", metavar="FILE", type=Path, nargs="+", default=[], help="of benchmark.py, of the same cells")
    add("--json", metavar="FILE", type=Path, help="write every cell there")
    add("--plot", metavar="FILE", type=Path, help="draw theirs beside the forecast there")
    args = parser.parse_args(argv)
    if not (args.recipes or args.list):
        parser.error("which recipe? --list says which there are")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, run what is asked for, print."""
    args, rows = parse(argv), list[Record]()
    with refusing(PROGRAM):
        names = chosen(args.recipes)
        check_files({"--json": args.json, "--plot": args.plot}, {"--measured": args.measured, "--pg19": args.pg19})
        if args.plot:
            check_drawable("--plot", args.plot)
        known = [point for path in args.measured for point in measured_in(path)]
        if args.list:
            print(*(f"{name:22}{one['what']} ({one['source']})" for name, one in RECIPES.items()), sep="\n")
        for name in names:
            print(f"\n{name}: {RECIPES[name]['what']}\n{RECIPES[name]['source']}")
            for group in (Group(name, raw) for raw in RECIPES[name]["groups"]):
                found = known if args.forecast_only or known else run(group, args.pg19)
                cells = [row(group, cell, found) for cell in group.cells]
                notes = [group.raw["note"]] if "note" in group.raw else []
                if "positions" in group.raw:
                    notes.append(
                        f"needs a folder of the model whose config.json has {group.raw['positions']:,} positions"
                    )
                note = "".join(f"; {one}" for one in notes)
                print(f"\n{cells[0]['chip']}{note}:\n{shlex.join(group.command(args.pg19, 'points.json'))}\n")
                print(*TABLE.lines(cells), sep="\n")
                rows += cells
        if any(not one["fits"] for one in rows):
            print("\n! does not fit into the chips' memory by our plan, which keeps room for graphs and their pools")
        if args.plot and rows:
            draw(rows, args.plot)
        save_json(args.json, rows, PROGRAM)


if __name__ == "__main__":
    started(main)
