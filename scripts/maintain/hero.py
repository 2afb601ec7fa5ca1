"""Draw README's plot out of a sweep of benchmark.py: speed-up over context, a line for each batch, as an SVG.

    python scripts/maintain/hero.py benchmarks/cpu/smollm2/sweep.json docs/hero.svg --draft streaming --temperature 0.8

The lines are the medians of the pairs, their whiskers the least and the greatest. Colours follow a light or dark page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the other programs and their helpers lie

from common import parser_of, refusing, started
from files import check_files, save
from measuring.grid import draft_label, up_to_date
from measuring.hero import COLORS, Record, hero
from measuring.ledger import complete, read_document

MOST = len(COLORS[0])  # batches that can be told apart


def points_of(path: Path, draft: str, temperature: float) -> list[Record]:
    """The measured points of one draft and temperature of a sweep; ValueError or OSError in one sentence."""
    document, what = read_document(path, "batch"), f"{draft} at temperature {temperature:g}"
    try:
        up_to_date(document)
        measured = [point for point in document["points"] if point["status"] == "measured"]
        found = [point for point in measured if (point["policy"], point["temperature"]) == (draft, temperature)]
        drafts = [*dict.fromkeys(map(draft_label, found))]
        n_contexts, n_batches = (len({point[name] for point in found}) for name in ("context", "batch"))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is no sweep of benchmark.py: {error!r}") from None
    if n_contexts < 2:
        raise ValueError(f"{path} has fewer than two contexts of {what}")
    if len(drafts) > 1:
        raise ValueError(f"{path} has several drafts of {draft}, and one can be drawn: {'; '.join(drafts)}")
    if n_batches > MOST:
        raise ValueError(f"{path} has {n_batches} batches of {what}, and at most {MOST} can be told apart")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Read, choose, draw."""
    parser = parser_of("hero.py", __doc__)
    parser.add_argument("sweep", metavar="SWEEP.json", type=Path, help="written by benchmark.py --json")
    parser.add_argument("svg", metavar="FILE.svg", type=Path, help="the picture")
    parser.add_argument("--draft", metavar="POLICY", default="streaming", help="(default: streaming)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="(default: 0, greedy)")
    args = parser.parse_args(argv)
    with refusing("hero.py"), complete(args.sweep):
        check_files({"the picture": args.svg}, {"the sweep": args.sweep})
        drawn = hero(points_of(args.sweep, args.draft, args.temperature))
    save({args.svg: drawn}, "hero.py")


if __name__ == "__main__":
    started(main)
