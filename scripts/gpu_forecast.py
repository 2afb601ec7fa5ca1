"""What is aimed at on a GPU and what the cost model expects: print the tables of benchmarks/h200/README.md.

    python scripts/gpu_forecast.py             the targets and the parts of a round on an H200, and cells by memory

Everything printed is an estimate from gpt_fast_sd/measuring/roofline.py, by a chip's data sheet; nothing of it was
measured. The same cells, drafts and estimates are what scripts/gpu_suite.py measures and compares.

Shapes: B batch rows, T tokens of each in a step, gamma tokens drafted a round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

import torch

from gpt_fast_sd import DraftConfig, EngineConfig
from gpt_fast_sd.config import gamma_tiers
from gpt_fast_sd.devices import WAYS
from gpt_fast_sd.measuring.chips import CHIPS, Chip
from gpt_fast_sd.measuring.replay import PROFILES
from gpt_fast_sd.measuring.roofline import (
    EXPECTED,
    FASTER,
    IDEAL,
    PRACTICAL,
    SLOWER,
    Efficiency,
    Forecast,
    Refresh,
    best_gamma,
    kernels,
    refresh_seconds,
    speedup,
    step_cost,
)
from gpt_fast_sd.memory import MemoryPlan
from gpt_fast_sd.model import preset

LLAMA = preset("meta-llama/Llama-3.1-8B")
MOST_DRAFTED = gamma_tiers(LLAMA.group_size)[-1]
ROOM = 512  # tokens behind the context
PAGE = DraftConfig().page
DUE_AT_ONCE = WAYS["cuda"].windows  # rows whose windows a refresh feeds as one batch


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A draft policy as it is measured in every cell, and whose published acceptance it replays."""

    name: str
    policy: str
    budget: int
    profiles: tuple[str, ...]
    selecting: float = 0.0  # share of a round that published measurements put down to selection
    refresh: Refresh | None = None  # of a selection that a pass of its own renews
    also_timed: tuple[int, ...] = ()  # gammas whose steps are timed, whatever the cost model chooses


ARMS = {  # of profiles of one arm the steps are compiled once, where the cost model chooses the same gamma
    arm.name: arm
    for arm in (
        Arm(  # its share of selecting: arXiv 2602.07223
            name="guided", policy="guided", budget=1024, profiles=("guided", "guided_all"), selecting=0.06
        ),
        Arm(name="snapkv", policy="snapkv", budget=2048, profiles=("snapkv",), refresh=Refresh(at_once=DUE_AT_ONCE)),
        Arm(name="streaming", policy="streaming", budget=512, profiles=("streaming",), also_timed=(5,)),
        Arm(name="low", policy="streaming", budget=512, profiles=("low",)),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """So many rows of so many tokens each."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """As "16x57344"."""
        return f"{self.batch}x{self.context}"

    @property
    def label(self) -> str:
        """As "16 x 57,344"."""
        return f"{self.batch} x {self.context:,}"


FULL = {57344: 16, 28672: 32, 100_000: 8}  # context -> rows that fill 139 GiB beside 15 GiB of weights


def cell_for(context: int, memory: float) -> Cell:
    """The cell of that context for a chip with so many free bytes: rows are halved until every arm's plan fits.

    ValueError where not even one row does.
    """
    batch = FULL[context]
    while True:
        config = EngineConfig(batch_size=batch, max_seq_len=context + ROOM, device="cuda", dtype="bf16")
        try:
            for arm in ARMS.values():
                draft = DraftConfig(policy=arm.policy, budget=arm.budget, gamma=MOST_DRAFTED)
                have, device, weights = int(memory), torch.device("cuda"), LLAMA.n_params * 2
                # as an engine will plan, with the share of the device that it keeps in reserve
                MemoryPlan.of(
                    config, draft, LLAMA, None, torch.bfloat16, device=device, weights=weights, whole=have
                ).check(have, device, config)
            return Cell(batch=batch, context=context)
        except ValueError:
            if batch == 1:
                raise
            batch //= 2


# ---- what is expected of a cell --------------------------------------------------------------------------------------


def predict(chip: Chip, cell: Cell, arm: Arm, profile: str, gamma: int, efficiency: Efficiency) -> Forecast:
    """The cost model's rounds of gamma drafts in a cell, whose acceptance follows the profile.

    IDEAL and PRACTICAL take for selection the share of a round that was published; the others reckon what our own
    costs: the mass that a verification sums, judging, and the passes that renew a selection.
    """
    published, tokens = efficiency in (IDEAL, PRACTICAL), PROFILES[profile].tokens(gamma)
    size, selecting = (LLAMA, chip, cell.batch), 0.0
    if arm.refresh and not published:
        selecting = refresh_seconds(*size, cell.context, tokens, arm.refresh, efficiency=efficiency)
    one = speedup(
        *size, cell.context, gamma, 0.0, budget=arm.budget, select_seconds=selecting, efficiency=efficiency,
        mass_page=PAGE if arm.policy == "guided" else 0,
    )  # fmt: skip
    if published:
        one = replace(one, select_seconds=one.round_seconds * arm.selecting / (1 - arm.selecting))
    return replace(one, tokens=tokens)


def planned(chip: Chip, cell: Cell, arm: Arm, profile: str) -> Forecast:
    """The forecast for the gamma that the cost model would choose, by the shares of a chip that good kernels reach."""
    return best_gamma(lambda gamma: predict(chip, cell, arm, profile, gamma, PRACTICAL), range(1, MOST_DRAFTED + 1))


# ---- targets ---------------------------------------------------------------------------------------------------------

Figure = Callable[[Forecast, Forecast], float]  # of rounds as they are expected, and of ideal ones


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure that is aimed at, and how it is told from a forecast.

    context and arm: of the cell it is forecast for. gamma None: what the cost model chooses. least: whether more is
    better, so that the bound is the least that will do.
    """

    key: str
    name: str
    bound: float
    least: bool
    unit: str  # "%", "x", " ms" or none
    context: int
    arm: str
    figure: Figure
    gamma: int | None = None
    note: str = ""

    @property
    def aim(self) -> str:
        """The bound in words."""
        text = f"{'at least' if self.least else 'at most'} {show(self.bound, self.unit, digits=2)}"
        return f"{text}, {self.note}" if self.note else text

    def met(self, value: float) -> bool:
        """Whether a figure reaches the bound."""
        return value >= self.bound if self.least else value <= self.bound

    def forecast(self, chip: Chip, cell: Cell, efficiency: Efficiency) -> float:
        """The figure by the cost model."""
        arm = ARMS[self.arm]
        profile = arm.profiles[0]
        gamma = self.gamma or planned(chip, cell, arm, profile).gamma
        one, ideal = (predict(chip, cell, arm, profile, gamma, e) for e in (efficiency, IDEAL))
        return self.figure(one, ideal)


def show(value: float, unit: str, digits: int = 3) -> str:
    """A figure with its unit."""
    if unit == "%":
        return f"{value:.0%}"
    if unit == " ms":
        return f"{value:.2g} ms"
    return f"{value:.{digits - 1}f}{unit}"


def _speed(one: Forecast, ideal: Forecast) -> float:
    return one.ratio


AIMS = (
    Aim(
        key="plain", name="plain step, share of the roofline", bound=0.80, least=True, unit="%", context=57344,
        arm="guided", figure=lambda one, ideal: ideal.target_seconds / one.target_seconds,
    ),
    Aim(
        key="draft", name="draft step, share of the roofline", bound=0.70, least=True, unit="%", context=57344,
        arm="guided", figure=lambda one, ideal: ideal.draft_seconds / one.draft_seconds,
    ),
    Aim(
        key="verify", name="T_V / T_T at gamma 5", bound=1.10, least=False, unit="", context=57344, arm="streaming",
        figure=lambda one, ideal: one.verify_seconds / one.target_seconds, gamma=5,
    ),
    Aim(
        key="judge", name="judging, commit and sampling", bound=0.1, least=False, unit=" ms", context=57344,
        arm="streaming", figure=lambda one, ideal: one.select_seconds * 1e3,
    ),
    Aim(
        key="guided", name="replay: speed over plain decoding, guided 1024", bound=3.0, least=True, unit="x",
        context=57344, arm="guided", figure=_speed, note="the moonshot",
    ),
    Aim(
        key="snapkv", name="replay: speed over plain decoding, SnapKV 2048", bound=2.4, least=True, unit="x",
        context=57344, arm="snapkv", figure=_speed,
    ),
    Aim(
        key="streaming", name="replay: speed over plain decoding, StreamingLLM 512", bound=1.9, least=True, unit="x",
        context=28672, arm="streaming", figure=_speed,
    ),
)  # fmt: skip


# ---- the tables ------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def expected(value: Callable[[Efficiency], float], unit: str) -> str:
    """What is expected, and from slower to faster kernels in brackets."""
    low, high = sorted((value(SLOWER), value(FASTER)))
    return f"{show(value(EXPECTED), unit)} ({show(low, unit)} to {show(high, unit)})"


def target_table(chip: Chip) -> list[str]:
    """Every target, what good public kernels would give, and what is expected of ours."""
    rows = []
    for aim in AIMS:
        cell = cell_for(aim.context, chip.memory)
        arm = ARMS[aim.arm]
        gamma = aim.gamma or planned(chip, cell, arm, arm.profiles[0]).gamma
        where = f"{aim.name}, {cell.label}" + (f", gamma {gamma}" if aim.unit == "x" else "")
        good = "-" if aim.key == "judge" else show(aim.forecast(chip, cell, PRACTICAL), aim.unit)
        rows.append([where, aim.aim, good, expected(partial(aim.forecast, chip, cell), aim.unit), "not measured"])
    return table(["target", "aim", "good public kernels", "expected (range)", "measured"], rows)


REASONS = {
    "weights, a step": "four thin products a layer, the shortest of 7 us, at 75 to 80 %",
    "keys and values of the target": "flash-decoding with its weights passed through shared memory, at 68 to 76 %",
    "gaps, norms, rope, SwiGLU": "{launches} kernels of 1.5 to 2.5 us each, and 10 us of latency a layer's attention",
    "plain step, T_T": "the sum",
    "draft step of 1,024 entries": "a layer's attention reads for 14 us and takes about 30",
    "verification of 9 tokens, T_V": "what splits hand on for 36 queries a kv head, and the mass of pages",
    "judging, commit, selection": "fp32 logits of {rows} tokens written and read, 12 to 19 launches, one selection; "
    "in the columns before, the 6 % of a round that others published for selecting",
    "round, guided 1024, gamma 8": "the sum; the host is hidden behind the round before",
    "SnapKV's refresh, a round, row by row": "weights read once a row, keys twice, values once, every 64 tokens",
    "SnapKV's refresh, a round, four rows at once": "weights read once for four rows",
    "round, SnapKV 2048, gamma 8": "with the refresh of four rows at once",
}


def part_table(chip: Chip, cell: Cell, gamma: int = 8) -> list[str]:
    """The parts of a round: by the roofline, by good public kernels, and what is expected of ours, with the reason."""
    cost, guided, snapkv = step_cost(LLAMA, cell.batch, 1, cell.context), ARMS["guided"], ARMS["snapkv"]

    def rounds(e: Efficiency, arm: Arm) -> Forecast:
        return predict(chip, cell, arm, arm.profiles[0], gamma, e)

    def refresh(e: Efficiency, at_once: int) -> float:
        tokens = PROFILES["snapkv"].tokens(gamma)
        return refresh_seconds(LLAMA, chip, cell.batch, cell.context, tokens, Refresh(at_once=at_once), efficiency=e)

    def gaps(e: Efficiency) -> float:
        beside = LLAMA.n_layers * (e.layer_seconds + e.attention_seconds) + e.step_seconds
        return kernels(LLAMA) * e.kernel_seconds + beside

    parts: dict[str, Callable[[Efficiency], float]] = {
        "weights, a step": lambda e: cost.weight_bytes / (chip.bandwidth * e.linear_bandwidth),
        "keys and values of the target": lambda e: cost.kv_bytes / (chip.bandwidth * e.attention_bandwidth),
        "gaps, norms, rope, SwiGLU": gaps,
        "plain step, T_T": lambda e: rounds(e, guided).target_seconds,
        "draft step of 1,024 entries": lambda e: rounds(e, guided).draft_seconds,
        "verification of 9 tokens, T_V": lambda e: rounds(e, guided).verify_seconds,
        "judging, commit, selection": lambda e: rounds(e, guided).select_seconds,
        "round, guided 1024, gamma 8": lambda e: rounds(e, guided).round_seconds,
        "SnapKV's refresh, a round, row by row": lambda e: refresh(e, 1),
        "SnapKV's refresh, a round, four rows at once": lambda e: refresh(e, DUE_AT_ONCE),
        "round, SnapKV 2048, gamma 8": lambda e: rounds(e, snapkv).round_seconds,
    }

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}"

    rows = []
    for name, part in parts.items():
        low, high = sorted((part(SLOWER), part(FASTER)))
        why = REASONS[name].format(launches=kernels(LLAMA), rows=cell.batch * (gamma + 1))
        rows.append(
            [name, ms(part(IDEAL)), ms(part(PRACTICAL)), f"{ms(part(EXPECTED))} ({ms(low)} to {ms(high)})", why]
        )
    return table(["ms", "roofline", "good public kernels", "expected (range)", "why"], rows)


def chip_table() -> list[str]:
    """The cells of each chip, by its memory, and what their replays are expected to give."""
    rows = []
    for chip in (CHIPS["h200"], CHIPS["h100"]):
        drafts = {f"{ARMS[key].policy} {ARMS[key].budget}": ARMS[key] for key in ("guided", "snapkv", "streaming")}
        by_row = replace(ARMS["snapkv"], refresh=Refresh())
        for name, arm in {**drafts, "snapkv 2048, refreshed row by row": by_row}.items():
            cell = cell_for(28672 if arm.name == "streaming" else 57344, chip.memory)
            forecast = planned(chip, cell, arm, arm.profiles[0])
            ratio = partial(_ratio, chip, cell, arm, forecast.gamma)
            good = show(forecast.ratio, "x")
            rows.append([chip.name, cell.label, name, str(forecast.gamma), good, expected(ratio, "x")])
    return table(["chip", "cell", "draft", "gamma", "good public kernels", "expected (range)"], rows)


def _ratio(chip: Chip, cell: Cell, arm: Arm, gamma: int, efficiency: Efficiency) -> float:
    return predict(chip, cell, arm, arm.profiles[0], gamma, efficiency).ratio


def tables() -> list[str]:
    """All that stands in benchmarks/h200/README.md, in its order: three tables, an empty line between them."""
    h200 = CHIPS["h200"]
    parts = part_table(h200, cell_for(57344, h200.memory))
    return [*target_table(h200), "", *parts, "", *chip_table()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    argparse.ArgumentParser(
        prog="gpu_forecast.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    print("\n".join(tables()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
