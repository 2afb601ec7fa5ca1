"""What plans and forecasts ask of a policy and of a view, before anything is built: memory, and steps of which models.

Both classes answer for the simplest; a policy or view that takes more says so in its own file.

Shapes: B slots, L layers, K kv heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt_fast_sd.model import ModelConfig

from .config import DraftConfig


@dataclass(frozen=True)
class ModelSteps:
    """Equal steps of one model that drafts."""

    model: ModelConfig
    count: int
    view: str  # through which the model reads its cache
    n_tokens: int = 1  # of each row


class PolicyCosts:
    """What a policy needs."""

    beyond = 0  # tokens past gamma that one of its steps may feed
    own_cache = False  # whether it drafts from a cache that is not the target's
    of_planes = False  # whether it reads the upper plane of an int8 cache, whatever kv_bits says

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
