"""Where the time of a step goes on a CPU: its products, its attention, what lies between them, the host.

The engine generates as ever, and each call of its layers says how long its parts took, in the loop, where weights and
keys compete for the same caches. Beside it stands what the step must cost at the rates that the machine showed: the
longer of reading and arithmetic, for weights and for keys (roofline.py).

Shapes: B rows, T tokens of each in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.engine import Engine
from gpt_fast_sd.fast import Spent, Stack
from gpt_fast_sd.fast.cpu.fused_layers import FusedLayers
from gpt_fast_sd.policies import ModelDraft
from gpt_fast_sd.steps import Runner
from measuring.chips import Chip
from measuring.roofline import step_cost
from measuring.tables import Column, Table

UNTIMED = 3  # first steps of a kind
MOST_TOKENS = 64  # of a row in a step; more of them are a prompt's


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Medians of one kind of step: milliseconds."""

    kind: str  # plain, draft or verify
    batch: int
    context: int
    n_tokens: int  # of a row
    n: int  # steps
    layers: float
    products: float  # of the layers, the head's not counted
    attention: float
    least: float  # by the roofline, the head included

    @property
    def between(self) -> float:
        """Norms, rotations, storing, sums."""
        return self.layers - self.products - self.attention


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Milliseconds of a round, and tokens that it emits per row."""

    batch: int
    context: int
    speculative: bool
    draft: float
    verify: float
    host: float
    tokens: float


def watch(engine: Engine, told: list[Spent]) -> list[Stack]:
    """Let the engine's models tell of their calls. ValueError if they run otherwise than whole."""
    runners = [engine.target]
    if isinstance(engine.policy, ModelDraft):
        runners.append(engine.policy.runner)
    for runner in runners:
        if not isinstance(runner.bodies.hidden, FusedLayers):
            raise ValueError(
                "this engine's steps run operator by operator, which is not timed: steps are timed of models in bf16 "
                "on a CPU that has a C++ compiler"
            )
    stacks = [r.bodies.hidden.stack for r in runners if isinstance(r.bodies.hidden, FusedLayers)]
    for stack in stacks:
        stack.watched = told
    return stacks


def least_seconds(runner: Runner, chip: Chip, batch: int, n_tokens: int, reads: int) -> float:
    """What a step costs at the chip's rates: for weights and for keys the longer of reading and arithmetic."""
    cost = step_cost(runner.model.config, batch, n_tokens, reads)
    weights = sum(x.nbytes for x in (*runner.model.layers.parameters(), runner.model.output.weight))
    keys = batch * runner.cache.bytes_read(reads)
    linear = max(weights / chip.bandwidth, cost.linear_flops / chip.peak)
    return linear + max(keys / chip.bandwidth, cost.attention_flops / chip.peak)


def time_steps(
    engine: Engine, prompts: Sequence[Sequence[int]], n_new: int, chip: Chip
) -> tuple[list[StepTime], list[RoundTime]]:
    """Generate plainly and with drafts -> the engine's steps and rounds. prompts: as many as slots, equally long."""
    told, steps, rounds = list[Spent](), list[StepTime](), list[RoundTime]()
    watched = watch(engine, told)
    batch, context = len(prompts), len(prompts[0])
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    engine.generate([list(prompt) for prompt in prompts], params)  # prefill, and whatever is built at first use
    drafter = getattr(engine.policy, "runner", engine.target)
    for speculative in (False, True):
        told.clear()
        engine.generate([list(prompt) for prompt in prompts], params, speculate=speculative)
        for kind in ("draft", "verify") if speculative else ("plain",):
            found = [x for x in told if x.n_tokens <= MOST_TOKENS and x.listed is (kind == "draft")]
            found = [x for x in found if (x.n_tokens > 1) is (kind == "verify")]
            kept = found[UNTIMED:] or found
            if not kept:
                continue
            runner, reads = (drafter, engine.draft.budget) if kind == "draft" else (engine.target, context)
            least = least_seconds(runner, chip, batch, kept[0].n_tokens, min(reads, context))
            parts = {
                name: 1e3 * statistics.median(getattr(x, name) for x in kept)
                for name in ("layers", "products", "attention")
            }
            steps.append(
                StepTime(
                    kind=kind, batch=batch, context=context, n_tokens=kept[0].n_tokens, n=len(kept), least=1e3 * least,
                    **parts,
                )
            )  # fmt: skip
        stats = engine.stats
        n = max(1, stats.rounds)
        rounds.append(
            RoundTime(
                batch=batch, context=context, speculative=speculative, draft=1e3 * stats.draft_seconds / n,
                verify=1e3 * stats.verify_seconds / n, host=1e3 * stats.host_seconds / n, tokens=stats.tokens_per_round,
            )
        )  # fmt: skip
    for stack in watched:
        stack.watched = None
    return steps, rounds


def ms(name: str) -> Column:
    """A column of milliseconds."""
    return Column(name, lambda row: f"{getattr(row, name):.2f}", 6)


STEPS = Table(
    Column("context x batch", lambda row: f"{row.context:,} x {row.batch}"),
    Column("step", lambda row: row.kind, left=True, width=6),
    Column("tokens", lambda row: str(row.n_tokens)),
    ms("layers"), ms("products"), ms("attention"), ms("between"), ms("least"),
    Column("n", lambda row: str(row.n)),
)  # fmt: skip
ROUNDS = Table(
    Column("context x batch", lambda row: f"{row.context:,} x {row.batch}"),
    Column("rounds", lambda row: "speculative" if row.speculative else "plain", left=True, width=11),
    ms("draft"), ms("verify"), ms("host"),
    Column("tokens", lambda row: f"{row.tokens:.2f}"),
)  # fmt: skip
