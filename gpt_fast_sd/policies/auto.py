"""Whoever pays best drafts: several policies over one target, of which each round has one, its arm.

Which one that is, serving/draft_planner.py says. The arms that it wants are built when the engine warms up; copies with
weights of few bits are made then, one for all arms of that precision.

Shapes: B slots, L layers, K kv heads, S cache capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor

from gpt_fast_sd.model import ModelConfig, Transformer
from gpt_fast_sd.tp import Group

from ..draft import Draft
from ..prefill import Filling
from ..quantization.quantize import drafter
from ..state import BatchState, RoundPlan
from ..steps import Runner
from . import registry
from .config import DraftConfig
from .costs import ModelSteps
from .model_draft import ModelDraft, build_view
from .policy import DraftPolicy, OwnPrefill, RoundHooks
from .standalone import check_draft_model

OF_TARGET = "streaming", "guided"  # views through which the target may draft for itself


@dataclass(frozen=True, kw_only=True)
class AutoConfig(DraftConfig):
    """The configuration "auto" with the policies that an engine may choose from."""

    arms: tuple[DraftConfig, ...] = ()

    @staticmethod
    def of(config: DraftConfig, precisions: Sequence[str | None]) -> AutoConfig:
        """The policies, those that take most memory last. precisions: of the weights of a target that drafts."""
        own = {field.name: getattr(config, field.name) for field in fields(DraftConfig)}
        alone = own | {"draft_model": None, "draft_tp": None}
        arms = [DraftConfig(**alone | {"policy": "lookup", "quantize": None, "kv_bits": None})]
        if config.draft_model is not None:
            arms.append(DraftConfig(**own | {"policy": "standalone", "kv_bits": None}))
        drafting = ({"policy": view, "quantize": name} for name in precisions for view in AutoDraft.views(config))
        return AutoConfig(**own, arms=(*arms, *(DraftConfig(**alone | one) for one in drafting)))


class AutoDraft(DraftPolicy):
    """In every round one of several policies, each of which is asked about its own rounds alone."""

    about = "whoever pays best here, round by round, or nobody"
    reads = "what that one reads"
    flags = ("budget", "n_sink", "page", "refresh", "ngram", "quantize", "kv_bits", "draft_model", "draft_tp")

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> AutoDraft:
        """Build a draft whose arms are those of the configuration, none of which is made yet."""
        arms = config.arms if isinstance(config, AutoConfig) else AutoConfig.of(config, [config.quantize]).arms
        if config.draft_model is not None:
            if draft_model is None:
                raise ValueError("draft_model names one, and none was given: use Engine.from_pretrained")
            check_draft_model(draft_model.config, target.model.config, target.cache.max_seq_len, config)
        return cls(arms, target, draft_model, draft_group)

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """Those of its arms for which the budget suffices."""
        least = {view: registry.view_class(view).least_budget(config) for view in OF_TARGET}
        return tuple(view for view in OF_TARGET if config.budget >= least[view]) or OF_TARGET[:1]

    @classmethod
    def model_steps(
        cls, config: DraftConfig, target: ModelConfig, draft_model: ModelConfig | None, gamma: int
    ) -> list[ModelSteps]:
        """One step of the target per token."""
        return [ModelSteps(target, gamma, OF_TARGET[0])]

    @classmethod
    def needs_model(cls, config: DraftConfig) -> bool:
        """Whether one is given."""
        return config.draft_model is not None

    def __init__(
        self, arms: Sequence[DraftConfig], target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> None:
        self.arms, self.target = arms, target
        self._models = draft_model, draft_group
        self._runners: dict[str | None, Runner] = {}  # by the precision of weights
        self.made: dict[int, DraftPolicy] = {}
        self.arm = -1  # of the round that is launched next or was launched last
        self._last = -1  # the arm that drafted last
        self._admitted: dict[int, int] = {}  # lengths of slots when they were filled
        self._drafted_at: dict[int, dict[int, int]] = {}  # by arm, see RoundPlan
        self._before: dict[int, int] = {}  # those of the arm, before the round that is launched
        self.proposers = tuple(dict.fromkeys(arm.policy for arm in arms))

    def make(self, arm: int) -> DraftPolicy:
        """Build an arm; its steps are not compiled yet."""
        if not 0 <= arm < len(self.arms):
            raise IndexError(f"there is no arm {arm}")
        if arm not in self.made:
            config = self.arms[arm].within(self.target.cache.capacity)
            if config.policy in OF_TARGET:
                if config.quantize not in self._runners:
                    self._runners[config.quantize] = drafter(
                        self.target, config.quantize, on_planes=config.needs_planes
                    )
                runner = self._runners[config.quantize]
                made: DraftPolicy = ModelDraft(runner, build_view(config, config.policy, runner), config.policy)
            else:
                made = registry.policy_class(config.policy).build(config, self.target, *self._models)
            self.made[arm], self._drafted_at[arm] = made, {}
        return self.made[arm]

    def use(self, arm: int) -> DraftPolicy:
        """Let an arm draft from now on; returns it."""
        self.arm = arm
        return self.make(arm)

    @property
    def now(self) -> DraftPolicy | None:
        """Who drafts now; None: nobody was asked to."""
        return self.made.get(self.arm)

    @property
    def size_of_model(self) -> float:
        """Parameters of the draft model as a share of the target's."""
        model, _ = self._models
        return model.config.n_params / self.target.model.config.n_params if model else 1.0

    @property
    def parts(self) -> tuple[RoundHooks, ...]:
        """The arms that are made."""
        return tuple(self.made.values())

    @property
    def wants_mass(self) -> bool:  # type: ignore[override]
        """Whether the arm that drafts now does."""
        return self.now is not None and self.now.wants_mass

    @property
    def page(self) -> int | None:
        """That of the arm that drafts now."""
        return getattr(self.now, "page", None)

    def prepare(self, slot: int, prompt: Sequence[int]) -> list[Filling]:
        """Begin the prefills of arms with a cache of their own."""
        return [filling for arm in self.parts if isinstance(arm, OwnPrefill) for filling in arm.prepare(slot, prompt)]

    def host_admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Admit the request to all arms, none of which has drafted for it."""
        super().host_admit(slot, prompt)
        self._admitted[slot] = len(prompt) - 1
        for drafted_at in self._drafted_at.values():
            drafted_at.pop(slot, None)

    def host_must_wait(self, plan: RoundPlan) -> bool:
        """Whether the arm that drafts now must."""
        return self.now is not None and self.now.host_must_wait(self._of_arm(plan))

    def host_before_round(self, state: BatchState, plan: RoundPlan) -> None:
        """Prepare the arm that drafts now, for which rounds of others are rounds without a draft."""
        assert self.now
        mine = self._of_arm(plan)
        self._before = dict(mine.drafted_at)
        self.now.host_before_round(state, mine)
        self._drafted_at[self.arm] |= plan.lengths
        self._last = self.arm

    def host_refreshes(self, plan: RoundPlan) -> list[int]:
        """Those of the arm that drafts now."""
        return self.now.host_refreshes(self._of_arm(plan)) if self.now else []

    def device_refresh(self, state: BatchState, n_keys: int) -> None:
        """Refresh the selection of the arm that drafts now."""
        if self.now:
            self.now.device_refresh(state, n_keys)

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """What the arm that drafts now proposes."""
        assert self.now
        return self.now.propose(state, plan if plan.captured else replace(plan, drafted_at=self._before))

    def device_after_verify(self, state: BatchState, mass: Tensor | None) -> None:
        """Tell the arm that has drafted."""
        if self.now:
            self.now.device_after_verify(state, mass)

    def kv_bytes(self, plan: RoundPlan) -> int:
        """Those of the arm that drafts now."""
        return self.now.kv_bytes(plan) if self.now else 0

    def positions_read(self, pos: Tensor) -> Tensor:
        """What the arm that drafts now reads: bool [L, B, K, S]."""
        assert self.now
        return self.now.positions_read(pos)

    def _of_arm(self, plan: RoundPlan) -> RoundPlan:
        """The plan as the arm that drafts now knows the rounds before."""
        drafted_at = self._drafted_at.get(self.arm, {})
        lengths = {slot: drafted_at.get(slot, self._admitted.get(slot, 0)) for slot in plan.lengths}
        return replace(plan, drafted_at=lengths, follows_a_draft=plan.follows_a_draft and self._last == self.arm)
