"""Draw README's plot out of a sweep of benchmark.py: speed-up over context, a line for each batch, as an SVG.

    python scripts/hero.py benchmarks/cpu/smollm2/sweep.json docs/hero.svg --draft streaming --temperature 0.8

The lines are the medians of the pairs, their whiskers the least and the greatest. Colours follow a light or dark page.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

from gpt_fast_sd.measuring.grid import draft_label, up_to_date
from gpt_fast_sd.measuring.ledger import read_document
from gpt_fast_sd.measuring.lengths import shown_speedup

WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 46, 118, 44, 52  # margins of the plot
KINDS = ("min", "median", "max")
LABEL = 19  # pixels between two labels
COLORS = ("#1f77b4", "#8250df", "#1a7f37", "#bc4c00"), ("#6cb6ff", "#b083f0", "#57ab5a", "#f69d50")  # light, dark


def hero(points: Sequence[dict[str, Any]]) -> str:
    """The SVG of measured points of one draft and temperature, of several contexts and at most four batches."""
    contexts: list[int] = sorted({point["context"] for point in points})
    batches = sorted({point["batch"] for point in points})
    ends: list[float] = [shown_speedup(point)[end] for point in points for end in ("min", "max")]
    low, high = math.floor(min(ends) * 5) / 5, math.ceil(max(ends) * 5) / 5

    def x_of(context: float) -> float:
        share = math.log(context / contexts[0]) / math.log(contexts[-1] / contexts[0])
        return LEFT + 14 + share * (WIDTH - LEFT - RIGHT - 28)

    def y_of(speedup: float) -> float:
        return HEIGHT - BOTTOM - (speedup - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body = ['<text x="8" y="20" class="ink">speed, times plain decoding</text>']
    for tick in range(round(low * 5), round(high * 5) + 1):
        y, name = y_of(tick / 5), ' class="one"' if tick == 5 else ""
        body.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"{name}/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{tick / 5:.1f}x</text>')
    for context in contexts:
        body.append(f'<text x="{x_of(context):.1f}" y="{HEIGHT - 30}" text-anchor="middle">{context:,}</text>')
    middle = (x_of(contexts[0]) + x_of(contexts[-1])) / 2
    body.append(f'<text x="{middle:.1f}" y="{HEIGHT - 9}" text-anchor="middle">context, tokens</text>')
    last = []
    for color, batch in enumerate(batches):
        line = sorted((p for p in points if p["batch"] == batch), key=lambda p: p["context"])
        dots = []
        body.append(f'<g class="c{color}">')
        for point in line:
            x, (least, median, most) = x_of(point["context"]), (shown_speedup(point)[k] for k in KINDS)
            body.append(f'<path d="M{x:.1f} {y_of(least):.1f}V{y_of(most):.1f}" class="whisker"/>')
            dots.append((x, y_of(median)))
        body.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in dots)}"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in dots]
        body.append("</g>")
        last.append((median, batch, color))
    below = -math.inf
    for speedup, batch, color in sorted(last, reverse=True):  # from the top down, none over another
        y = below = max(y_of(speedup) + 5, below + LABEL)
        where = f'x="{WIDTH - RIGHT - 2}" y="{y:.1f}" class="l{color}"'
        rows = f"{batch} row{'s' if batch > 1 else ''}"
        body.append(f'<text {where}><tspan class="b">{speedup:.2f}x</tspan> {rows}</text>')
    nl = "\n"
    said = ", ".join(f"{batch} rows {speedup:.2f}x" for speedup, batch, _ in sorted(last, reverse=True))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">
<title>Speed over plain decoding by context, a line for each batch; at {contexts[-1]:,} tokens: {said}</title>
<style>
text{{font:14px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#59636e}}.ink{{fill:#1f2328}}.b{{font-weight:600}}
path{{stroke:#d1d9e0;fill:none}}.one{{stroke:#818b98;stroke-width:1.5}}.whisker{{stroke-width:1.5;opacity:.5}}polyline{{fill:none;stroke-width:2.5}}
{palette(COLORS[0], len(batches))}
@media (prefers-color-scheme:dark){{text{{fill:#9198a1}}.ink{{fill:#f0f6fc}}path{{stroke:#3d444d}}.one{{stroke:#656c76}}
{palette(COLORS[1], len(batches))}}}
</style>
{nl.join(body)}
</svg>
"""  # noqa: E501


def palette(colors: Sequence[str], n: int) -> str:
    """The style of so many lines, the last colour for the greatest batch."""
    named = list(enumerate(colors[len(colors) - n :]))
    return "".join(
        f".c{i} polyline,.c{i} .whisker{{stroke:{color}}}.c{i} circle,.l{i}{{fill:{color}}}" for i, color in named
    )


def points_of(path: Path, draft: str, temperature: float) -> list[dict[str, Any]]:
    """The measured points of one draft and temperature of a sweep; ValueError or OSError in one sentence."""
    document = read_document(path, "batch")
    try:
        up_to_date(document)
        found = [
            point for point in document["points"]
            if point["status"] == "measured" and (point["policy"], point["temperature"]) == (draft, temperature)
        ]  # fmt: skip
        drafts = [*dict.fromkeys(map(draft_label, found))]
        sizes = [{point[name] for point in found} for name in ("context", "batch")]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is no sweep of benchmark.py: {error!r}") from None
    if len(sizes[0]) < 2:
        raise ValueError(f"{path} has fewer than two contexts of {draft} at temperature {temperature:g}")
    if len(drafts) > 1:
        raise ValueError(f"{path} has several drafts of {draft}, and one can be drawn: {'; '.join(drafts)}")
    if len(sizes[1]) > len(COLORS[0]):
        raise ValueError(
            f"{path} has {len(sizes[1])} batches of {draft} at temperature {temperature:g}, and at most "
            f"{len(COLORS[0])} can be told apart"
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Read, choose, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="SWEEP.json", type=Path, help="written by benchmark.py --json")
    parser.add_argument("svg", metavar="FILE.svg", type=Path, help="the picture")
    parser.add_argument("--draft", metavar="POLICY", default="streaming", help="(default: streaming)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="(default: 0, greedy)")
    args = parser.parse_args(argv)
    try:
        args.svg.write_text(hero(points_of(args.sweep, args.draft, args.temperature)), encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
