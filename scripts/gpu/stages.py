"""The stages of gpu_suite.py, in the order in which they are worth having: the time on a chip may end after any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_bench import END_TO_END, bundled_stage, cell_stage
from gpu_checks import (
    correct_decode,
    correct_filters,
    correct_prefill,
    correct_select,
    correct_sparse,
    graphs_bundled,
    graphs_fp32,
    no_syncs,
)
from gpu_forecast import ARMS, FULL
from gpu_setup import Record, Setup, machine
from gpu_smoke import SMOKE_SECONDS, smoke
from gpu_timings import timed_decode, timed_headline, timed_prefill, timed_select, timed_sparse


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of the suite. seconds: what it is reckoned to take on a GPU of 2024, compiling included."""

    name: str
    run: Callable[[Setup], Record]
    seconds: int
    about: str


def _cell(context: int, name: str) -> Stage:
    arm = ARMS[name]
    about = (
        f"{arm.policy}, as many rows of {context:,} as there is memory for, {FULL[context]} at most: steps, rounds "
        f"with replayed acceptance ({', '.join(arm.profiles)})"
    )
    seconds = 200 + 40 * len(arm.also_timed)  # mostly of compiling 32 layers, once for each step
    return Stage(name=f"cell-{context}-{name}", run=cell_stage(context, arm), seconds=seconds, about=about)


def _bundled(name: str) -> Stage:
    batch, context = END_TO_END[name]
    about = f"the bundled model, {batch} rows of {context:,} tokens, acceptance of its own"
    return Stage(name=f"bundled-{name}", run=bundled_stage(name), seconds=90, about=about)


HEADLINES = ((57344, "guided"), (57344, "snapkv"), (28672, "streaming"))  # what targets are about
STAGES = {
    stage.name: stage
    for stage in (
        # does it run at all, by the default configuration; then the one number that all predictions hang on
        Stage(name="smoke", run=smoke, seconds=SMOKE_SECONDS, about="the bundled model as generate.py runs it"),
        Stage(name="time-decode-57344", run=timed_headline, seconds=40, about="dense attention of the headline cell"),
        Stage(name="machine", run=machine, seconds=30, about="what runs, and measured bandwidth and matrix rate"),
        # a kernel that is wrong has no speed
        Stage(name="correct-decode", run=correct_decode, seconds=110, about="dense attention against fp64"),
        Stage(name="correct-sparse", run=correct_sparse, seconds=80, about="sparse attention against fp64"),
        Stage(name="correct-select", run=correct_select, seconds=40, about="selection against plain Python"),
        Stage(name="correct-filters", run=correct_filters, seconds=30, about="top-k and top-p against a sort"),
        *(_cell(*headline) for headline in HEADLINES),
        Stage(name="correct-prefill", run=correct_prefill, seconds=80, about="attention of chunks against fp64"),
        Stage(name="graphs", run=graphs_fp32, seconds=240, about="captured rounds beside others, fp32, each token"),
        Stage(name="syncs", run=no_syncs, seconds=150, about="no host wait in a round, and no idle row"),
        Stage(name="time-decode", run=timed_decode, seconds=120, about="dense attention beside torch's and others'"),
        Stage(name="time-sparse", run=timed_sparse, seconds=45, about="sparse attention by budget"),
        Stage(name="time-select", run=timed_select, seconds=30, about="what selecting costs a round"),
        Stage(name="time-prefill", run=timed_prefill, seconds=45, about="attention of chunks beside torch's"),
        *(_bundled(name) for name in END_TO_END),
        Stage(name="graphs-bundled", run=graphs_bundled, seconds=150, about="the same, bf16: how many rows differ"),
        *(_cell(context, arm) for context in FULL for arm in ARMS if (context, arm) not in HEADLINES),
    )
}
