"""From a DraftConfig to the policy it names."""

from __future__ import annotations

from gpt_fast_sd.model import Transformer
from gpt_fast_sd.tp import Group

from ..quantization.quantize import put_in_planes, require_planes
from ..steps import Runner
from . import registry
from .config import DraftConfig
from .policy import DraftPolicy


def build_policy(
    config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group | None = None
) -> DraftPolicy | None:
    """The policy that a configuration names, None for "off"; ValueError if it does not fit the models.

    draft_group: the ranks that hold the draft model together; None: those that hold the target.
    """
    if draft_model is not None and config.draft_model is None:  # a configuration names one only if one drafts
        raise ValueError(f"a draft model was given, and policy {config.policy!r} drafts without one")
    if config.policy == "off":
        return None
    found = registry.policy_class(config.policy)
    config = config.within(target.cache.capacity)
    if config.needs_planes:
        require_planes(target)
    if config.quantize == "planes":
        put_in_planes(target)
    policy: DraftPolicy = found.build(config, target, draft_model, draft_group or target.group)
    return policy
