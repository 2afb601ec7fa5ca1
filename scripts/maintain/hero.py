"""README's plot, of a sweep of benchmark.py: speed-up over context, a line for each batch, as an SVG; see results.py.

The lines are the medians of the pairs, their whiskers the least and the greatest. Colours follow a light or dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from measuring.grid import draft_label
from measuring.points import steady_of

WIDTH, HEIGHT = 520, 330  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 118, 44, 52  # margins of its plot
KINDS = ("min", "median", "max")
LABEL = 19  # pixels between two labels
COLORS = (  # light and dark page; the last one for the greatest batch
    ("#6e7781", "#b35588", "#0a7ea4", "#8c6d1f", "#1f77b4", "#8250df", "#1a7f37", "#bc4c00"),
    ("#9ea7b3", "#e08bb8", "#4fb8d8", "#c9a94f", "#6cb6ff", "#b083f0", "#57ab5a", "#f69d50"),
)
Record = dict[str, Any]


def hero(points: Sequence[Record]) -> str:
    """The SVG of measured points; the colours of more batches than there are colours repeat."""
    drafts, batches = [*dict.fromkeys(map(draft_label, points))], sorted({point["batch"] for point in points})
    ends: list[float] = [steady_of(point)[end] for point in points for end in ("min", "max")]
    low = math.floor(min(ends) * 5) / 5
    high = max(math.ceil(max(ends) * 5) / 5, low + 0.2)  # one tick at least

    def y_of(speedup: float) -> float:
        return HEIGHT - BOTTOM - (speedup - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body, said = [], []
    ticks = [tick / 5 for tick in range(round(low * 5), round(high * 5) + 1)]
    for i, draft in enumerate(drafts):
        ours = [point for point in points if draft_label(point) == draft]
        lines, told = panel(ours, batches, ticks, y_of, f"{draft}: " if len(drafts) > 1 else "")
        said.append(f"at {max(point['context'] for point in ours):,} tokens: {told}")
        body += [f'<g transform="translate({i * WIDTH} 0)">', *lines, "</g>"] if len(drafts) > 1 else lines
    nl, width = "\n", WIDTH * len(drafts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" role="img">
<title>Speed over plain decoding by context, a line for each batch, of the bundled test model on two CPU cores; {"; ".join(said)}</title>
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


def panel(
    points: Sequence[Record], batches: Sequence[int], ticks: Sequence[float], y_of: Callable[[float], float], what: str
) -> tuple[list[str], str]:
    """The elements of one draft's panel, and its speed-ups at the longest context of each batch in words."""
    contexts: list[int] = sorted({point["context"] for point in points})
    decades = math.log(contexts[-1] / contexts[0]) or 1.0

    def x_of(context: float) -> float:
        return LEFT + 14 + math.log(context / contexts[0]) / decades * (WIDTH - LEFT - RIGHT - 28)

    body = [f'<text x="8" y="20" class="ink">{what}speed, times plain decoding</text>']
    for tick in ticks:
        y, name = y_of(tick), ' class="one"' if tick == 1 else ""
        body.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"{name}/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{tick:.1f}x</text>')
    for context in contexts:
        body.append(f'<text x="{x_of(context):.1f}" y="{HEIGHT - 30}" text-anchor="middle">{context:,}</text>')
    middle = (x_of(contexts[0]) + x_of(contexts[-1])) / 2
    body.append(f'<text x="{middle:.1f}" y="{HEIGHT - 9}" text-anchor="middle">context, tokens</text>')
    last = []
    for color, batch in enumerate(batches):
        line = sorted((p for p in points if p["batch"] == batch), key=lambda p: p["context"])
        if not line:
            continue
        dots = []
        body.append(f'<g class="c{color}">')
        for point in line:
            x, (least, median, most) = x_of(point["context"]), (steady_of(point)[k] for k in KINDS)
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
    return body, ", ".join(f"{batch} rows {speedup:.2f}x" for speedup, batch, _ in sorted(last, reverse=True))


def palette(colors: Sequence[str], n: int) -> str:
    """The style of so many lines."""
    named = [(i, colors[(i - n) % len(colors)]) for i in range(n)]
    return "".join(
        f".c{i} polyline,.c{i} .whisker{{stroke:{color}}}.c{i} circle,.l{i}{{fill:{color}}}" for i, color in named
    )
