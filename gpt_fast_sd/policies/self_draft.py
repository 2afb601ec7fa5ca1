"""The target drafts for itself, through any view of its own cache.

Self-drafts write their approximate keys at the positions that verification overwrites with exact ones, so they need no
cache, no prefill and no rollback of their own.
"""

from __future__ import annotations

from gpt_fast_sd.model import ModelConfig, Transformer
from gpt_fast_sd.tp import Group

from ..quantization.quantize import drafter
from ..steps import Runner
from .config import DraftConfig
from .costs import ModelSteps
from .model_draft import ModelDraft, build_view
from .policy import DraftPolicy


class SelfDraft(ModelDraft):
    """A self-draft; the name of the policy is that of its view."""

    about = "the target itself"
    flags: tuple[str, ...] = ("quantize", "kv_bits")

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> DraftPolicy:
        """Build a self-draft of the target through the view of the policy's name."""
        runner = drafter(target, config.quantize, on_planes=config.needs_planes)
        return ModelDraft(runner, build_view(config, cls.views(config)[0], runner), config.policy)

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """The name of the policy is that of its view."""
        return (config.policy,)

    @classmethod
    def model_steps(
        cls, config: DraftConfig, target: ModelConfig, draft_model: ModelConfig | None, gamma: int
    ) -> list[ModelSteps]:
        """One step of the target per token."""
        return [ModelSteps(target, gamma, cls.views(config)[0])]
