"""What is measured on a GPU and aimed at: drafts, cells by memory, targets, and what the cost model expects of each.

Shapes: B batch rows, gamma tokens drafted per round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from gpt_fast_sd.config import DraftConfig, gamma_tiers
from gpt_fast_sd.model import preset
from measuring.chips import CHIPS, GIB, Chip
from measuring.forecast import System
from measuring.replay import PROFILES, Profile
from measuring.roofline import IDEAL, PRACTICAL, Efficiency, Forecast, best_gamma

LLAMA = preset("meta-llama/Llama-3.1-8B")
MOST_DRAFTED = gamma_tiers(LLAMA.group_size)[-1]
ROOM = 512  # tokens behind the context


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A draft as it is measured in every cell, and whose published acceptance it replays."""

    name: str
    policy: str
    budget: int
    profiles: tuple[str, ...]
    also_timed: tuple[int, ...] = ()  # gammas whose steps are timed, whatever the cost model chooses
    quantize: str | None = None  # of the draft's weights

    def draft(self, gamma: int) -> DraftConfig:
        """Its configuration."""
        return DraftConfig(policy=self.policy, budget=self.budget, gamma=gamma, quantize=self.quantize)

    def profile(self, name: str) -> Profile:
        """The acceptance that is replayed under this name."""
        return PROFILES[name].with_weights(self.quantize)


ARMS = {  # of profiles of one arm the steps are compiled once, where the cost model chooses the same gamma
    arm.name: arm
    for arm in (
        Arm(name="guided", policy="guided", budget=1024, profiles=("guided", "guided_all")),
        Arm(name="snapkv", policy="snapkv", budget=2048, profiles=("snapkv",)),
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


FULL = {57344: 16, 28672: 32, 100_000: 8}  # context -> rows that fill 139 GiB beside 15 GiB of weights
ALONE = {4096: 1, 32768: 1}  # where a draft's weights are most of what it reads
# The same draft by the precision of its weights, None: the target's own, which arms time where rows fill the memory.
PRECISIONS = {
    str(name): replace(ARMS["guided"], name=f"guided-{name}", profiles=("guided",), quantize=name)
    for name in (None, "int8", "float8", "int4")
}
BY_PRECISION = (
    *((context, name) for context in ALONE for name in PRECISIONS),
    *((context, name) for context in (57344, 28672) for name in PRECISIONS if name != "None"),
)


def cell_for(context: int, memory: float, arms: Collection[Arm] = tuple(ARMS.values())) -> Cell:
    """The cell of that context for a chip with so many free bytes: rows are halved until every arm's plan fits.

    ValueError where not even one row does.
    """
    batch, system = (FULL | ALONE)[context], _system(replace(CHIPS["h200"], memory=memory))
    while any(system.memory(arm.draft(MOST_DRAFTED), batch, context)[1] for arm in arms):
        if batch == 1:
            raise ValueError(f"not even one row of {context:,} tokens fits into {memory / GIB:.0f} GiB")
        batch //= 2
    return Cell(batch=batch, context=context)


# ---- what is expected of a cell --------------------------------------------------------------------------------------


def _system(chip: Chip) -> System:
    return System(model=LLAMA, chip=chip, room=ROOM)


def predict(chip: Chip, cell: Cell, arm: Arm, profile: str, gamma: int, efficiency: Efficiency) -> Forecast:
    """The cost model's rounds of gamma drafts in a cell, whose rows are as unlike as those of a replay's table."""
    acceptance = arm.profile(profile)
    one = _system(chip).forecast(
        arm.draft(gamma), acceptance.chances, cell.batch, cell.context, gamma, efficiency=efficiency
    )
    return replace(one, tokens=acceptance.tokens(gamma))


def planned(chip: Chip, cell: Cell, arm: Arm, profile: str) -> Forecast:
    """The forecast for the gamma that the cost model would choose, by the shares of a chip that good kernels reach."""
    return best_gamma(lambda gamma: predict(chip, cell, arm, profile, gamma, PRACTICAL), range(1, MOST_DRAFTED + 1))


# ---- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure that is aimed at, and how it is told from a forecast.

    context and arm: of the cell it is forecast for. gamma None: what the cost model chooses. least: whether more is
    better, so that the bound is the least that will do. figure: of rounds as they are expected, and of ideal ones.
    """

    key: str
    name: str
    bound: float
    least: bool
    unit: str  # "%", "x", " ms" or none
    context: int
    arm: str
    figure: Callable[[Forecast, Forecast], float]
    gamma: int | None = None

    @property
    def aim(self) -> str:
        """The bound in words."""
        return f"{'at least' if self.least else 'at most'} {show(self.bound, self.unit, digits=2)}"

    def met(self, value: float) -> bool:
        """Whether a figure reaches the bound."""
        return value >= self.bound if self.least else value <= self.bound

    def forecast(self, chip: Chip, cell: Cell, efficiency: Efficiency) -> float:
        """The figure by the cost model."""
        arm = ARMS[self.arm]
        gamma = self.gamma or planned(chip, cell, arm, arm.profiles[0]).gamma
        return self.figure(*(predict(chip, cell, arm, arm.profiles[0], gamma, e) for e in (efficiency, IDEAL)))


def show(value: float, unit: str, digits: int = 3) -> str:
    """A figure with its unit."""
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:.2g} ms" if unit == " ms" else f"{value:.{digits - 1}f}{unit}"


def _replay(arm: str, bound: float, context: int) -> Aim:
    return Aim(
        key=arm, name=f"replay: speed over plain decoding, {arm} {ARMS[arm].budget}", bound=bound, least=True, unit="x",
        context=context, arm=arm, figure=lambda one, ideal: one.ratio,
    )  # fmt: skip


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
    _replay("guided", 3.0, 57344),
    _replay("snapkv", 2.4, 57344),
    _replay("streaming", 1.9, 28672),
)  # fmt: skip
