"""The stages of gpu_suite.py, in the order in which they are worth having: the time on a chip may end after any."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from measuring.gpu.aims import ALONE, ARMS, BY_PRECISION, FULL, PRECISIONS
from measuring.gpu.cells import cell_stage
from measuring.gpu.kernels import (
    timed_decode,
    timed_formats,
    timed_headline,
    timed_linears,
    timed_prefill,
    timed_select,
    timed_sparse,
)
from measuring.gpu.setup import ROOT, Record, Setup, machine, tree_of
from measuring.grid import draft_label
from measuring.ledger import Ledger

DONE, FAILED, LEFT = "done", "failed", "left"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of the suite. seconds: its estimated time on a GPU of 2024, compiling included."""

    name: str
    seconds: int
    about: str
    run: Callable[[Setup], Record] = field(repr=False)

    def is_done(self, ledger: Ledger) -> bool:
        """Whether there is a result; tests are done when all of them have passed on the sources as they are now."""
        result = results_of(ledger).get(self.name)
        return result is not None and ("tests" not in result or (result["ok"] and result["tree"] == tree_of()))


def results_of(ledger: Ledger) -> dict[str, Record]:
    """What the stages that are done have found, by stage."""
    return {record["stage"]: record["result"] for record in ledger.records if record["status"] == DONE}


def _tests(name: str, seconds: int, about: str) -> Stage:
    """The tests of tests/gpu/test_NAME.py."""

    def run(setup: Setup) -> Record:
        from measuring.gpu.correct import run_tests  # it needs pytest, which nothing else here does

        return run_tests(setup, f"test_{name}.py")

    return Stage(name=f"test-{name}", run=run, seconds=seconds, about=about)


def _cell(context: int, name: str) -> Stage:
    arm = ARMS[name]
    about = (
        f"{arm.policy}, as many rows of {context:,} as there is memory for, {FULL[context]} at most: steps, rounds "
        f"with replayed acceptance ({', '.join(arm.profiles)})"
    )
    seconds = 200 + 40 * len(arm.also_timed)  # mostly of compiling 32 layers, once for each step
    return Stage(name=f"cell-{context}-{name}", run=cell_stage(context, arm), seconds=seconds, about=about)


def _precision(context: int, name: str) -> Stage:
    arm = PRECISIONS[name]
    weights = "its own weights" if arm.quantize is None else f"{arm.quantize} weights"
    about = f"{arm.policy} with {weights}, {(FULL | ALONE)[context]} rows of {context:,} at most: as the cells"
    return Stage(name=f"precision-{context}-{name}", run=cell_stage(context, arm), seconds=240, about=about)


def bundled(setup: Setup) -> Record:
    """The points of a sweep by benchmark.py, which goes on where an earlier call was stopped.

    RuntimeError where a point could not be measured: benchmark.py is content with one that could.
    """
    file = setup.out / "bundled.json"
    contexts = "8k,16k" if setup.texts else "4k,7k"  # of the bundled document, which text repeated would flatter
    size = {"--batch": "8,32", "--context": contexts, "--max-new-tokens": "128", "--budget": "512"}
    if setup.tiny:
        size = {"--batch": "2", "--context": "160", "--max-new-tokens": "8", "--budget": "96"}
    how = {"--draft": "streaming,snapkv,guided", "--gamma": "4", "--temperature": "0.8", "--pairs": str(setup.pairs)}
    where = {"--model": "bundled", "--device": setup.device.type, "--json": str(file)}
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py")]
    command += [word for pair in (size | how | where).items() for word in pair]
    command += ["--text", *map(str, setup.texts)] if setup.texts else []
    command += ["--no-compile"] if setup.tiny else ["--max-autotune"] if setup.max_autotune else []
    subprocess.run(command, check=True)
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    failed = [one for one in points if one["status"] != "measured"]
    if failed:
        labels = (f"{one['batch']} x {one['context']:,}, {draft_label(one)}: {one['reason']}" for one in failed)
        raise RuntimeError("; ".join(labels))
    return {"points": points}


HEADLINES = ((57344, "guided"), (57344, "snapkv"), (28672, "streaming"))  # what targets are about
STAGES = {
    stage.name: stage
    for stage in (
        # does it run at all, by the default configuration; then the one number that all predictions depend on
        _tests("smoke", 90, "the bundled model as generate.py runs it"),
        Stage(name="time-decode-57344", run=timed_headline, seconds=40, about="dense attention of the headline cell"),
        Stage(name="machine", run=machine, seconds=30, about="what runs, and measured bandwidth and matrix rate"),
        # a kernel that is wrong has no speed
        _tests("kernels", 240, "attention against fp64, selection against plain Python, filters against a sort"),
        *(_cell(*headline) for headline in HEADLINES),
        _tests("rounds", 400, "captured rounds beside others, each token; no host wait in a round, and no idle row"),
        Stage(name="time-decode", run=timed_decode, seconds=120, about="dense attention beside torch's and others'"),
        Stage(name="time-formats", run=timed_formats, seconds=90, about="attention by what the cache holds"),
        _tests("weights", 60, "products with quantized weights against fp64"),
        Stage(name="time-linears", run=timed_linears, seconds=90, about="products by the precision of their weights"),
        Stage(name="time-sparse", run=timed_sparse, seconds=45, about="sparse attention by budget"),
        Stage(name="time-select", run=timed_select, seconds=30, about="what selecting costs per round"),
        Stage(name="time-prefill", run=timed_prefill, seconds=45, about="attention of chunks beside torch's"),
        Stage(name="bundled", run=bundled, seconds=360, about="the bundled model end to end, acceptance of its own"),
        *(_precision(*one) for one in BY_PRECISION),
        *(_cell(context, arm) for context in FULL for arm in ARMS if (context, arm) not in HEADLINES),
    )
}
