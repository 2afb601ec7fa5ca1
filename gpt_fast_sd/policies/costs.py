"""What plans and forecasts ask of a policy and of a view, before anything is built: memory, and steps of which models.

Both classes answer for the simplest; a policy or view that takes more says so in its own file.

Shapes: B slots, L layers, K kv heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt_fast_sd.model import KVCache, ModelConfig

from ..config import MAX_GAMMA
from . import registry
from .config import DraftConfig, gamma_tiers


@dataclass(frozen=True)
class ModelSteps:
    """Equal steps of one model that drafts."""

    model: ModelConfig
    count: int
    view: str  # through which the model reads its cache
    n_tokens: int = 1  # of each row


class PolicyCosts:
    """What a policy needs."""

    extra_tokens = 0  # tokens past gamma that one of its steps may feed
    own_cache = False  # whether it drafts from a cache that is not the target's
    needs_planes = False  # whether it reads the upper plane of an int8 cache, whatever kv_bits says

    @classmethod
    def needs_model(cls, config: DraftConfig) -> bool:
        """Whether it drafts with a model of its own."""
        return False

    @classmethod
    def searches(cls, config: DraftConfig) -> bool:
        """Whether it searches the texts of all rows."""
        return False

    @classmethod
    def steps(cls, gamma: int) -> int:
        """The most steps of models, and searches, that drafting gamma tokens takes."""
        return gamma

    @classmethod
    def model_steps(
        cls, config: DraftConfig, target: ModelConfig, draft_model: ModelConfig | None, gamma: int
    ) -> list[ModelSteps]:
        """The steps of models that drafting gamma tokens takes; ValueError if it does not fit the models."""
        return []


class ViewCosts:
    """What a view needs and reads."""

    n_observed = 0  # committed tokens that it feeds again to select, in a pass of its own

    @classmethod
    def least_budget(cls, config: DraftConfig) -> int:
        """The smallest budget that makes sense."""
        return 1

    @classmethod
    def bytes_held(cls, config: DraftConfig, n_lists: int, kv_bytes: int) -> int:
        """Bytes of selections: n_lists = L * B * K of them, next to a cache of kv_bytes if it were not quantized."""
        return 0

    @classmethod
    def reads(cls, config: DraftConfig, n_keys: int) -> int:
        """Entries that a step over a row of n_keys reads in each layer and kv head."""
        return min(config.budget, n_keys)

    @classmethod
    def bounds_read(cls, config: DraftConfig, n_keys: int) -> int:
        """Pages whose bounds it looks at: two numbers for each of a key's, in bf16 where the cache has fewer bits."""
        return 0

    @classmethod
    def refresh_period(cls, config: DraftConfig) -> int:
        """The refresh_every of the view that a configuration describes."""
        return 0


# Steps, of target and draft, in all the rounds held at a time: each is some hundred launches, and a graph's share of
# the driver's memory grows with its launches, so steps are what a plan can budget for (see MemoryPlan). Enough for the
# longest rounds in all three kinds of sampling, or for three tiers of gamma "auto", over one view: when a batch grows
# into the next doubling of the view, graphs of the one before are useless. Every tier, kind and view of 128K tokens
# would be sixteen times as many. A hierarchy has up to 33 steps per round, and "auto" in several kinds also needs more
# than these: if a batch then alternates between kinds, rounds are captured again, which costs only time. With one gamma
# those of one view suffice, of all kinds: a batch of one kind holds two views and more in their room.
KINDS = 3
MOST_STEPS = KINDS * (1 + MAX_GAMMA)
REFRESH_STEPS = 2  # what a refreshing pass counts for: it launches more than a step does


def steps_of(draft: DraftConfig, gamma: int) -> int:
    """The most steps of a round that drafts gamma tokens, the target's own included."""
    drafting: int = registry.policy_class(draft.policy).steps(gamma)
    return drafting + 1


def steps_held(max_seq_len: int, draft: DraftConfig, group: int) -> int:
    """The most steps of captured rounds that are held: MOST_STEPS, or all that exist; with one gamma those of one view.

    group: query heads per kv head of the target.
    """
    gammas = [0] if draft.policy == "off" else gamma_tiers(group) if isinstance(draft.gamma, str) else [0, draft.gamma]
    views = max(1, (KVCache.splits(max_seq_len) - 1).bit_length()) if isinstance(draft.gamma, str) else 1  # doublings
    there_are = KINDS * sum(steps_of(draft, gamma) for gamma in gammas)
    there_are += REFRESH_STEPS if draft.view_name and registry.view_class(draft.view_name).n_observed else 0
    return min(MOST_STEPS, views * there_are)
