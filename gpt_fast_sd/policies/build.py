"""From a DraftConfig to the policy it names."""

from __future__ import annotations

from gpt_fast_sd.model import Transformer
from gpt_fast_sd.tp import Group

from ..config import DraftConfig
from ..reader import Reader
from ..sampling import CHEAP_STREAM
from .base import DraftPolicy, ModelDraft, View
from .early_exit import EarlyExitDraft, first_layers
from .full import FullView
from .guided import GuidedView
from .hierarchy import CHEAP_GAMMA, HierarchyDraft
from .lookup import LookupDraft
from .quest import QuestView
from .snapkv import SnapKVView
from .standalone import StandaloneDraft, beside
from .streaming import StreamingView


def build_view(config: DraftConfig, name: str, reader: Reader) -> View:
    """The view of that name over a reader's cache."""
    room = config.max_gamma + 2 + (CHEAP_GAMMA if config.policy == "hierarchy" else 0)
    if name == "full":
        return FullView(reader)
    if name == "streaming":
        return StreamingView(reader, budget=config.budget, n_sink=config.n_sink, room=room)
    if name == "snapkv":
        return SnapKVView(reader, budget=config.budget, refresh=config.refresh or 64, room=room)
    if name == "quest":
        return QuestView(reader, budget=config.budget, page=config.page, room=room)
    if name == "guided":
        return GuidedView(reader, budget=config.budget, page=config.page, refresh=config.refresh or 1, room=room)
    raise AssertionError(name)


def build_policy(
    config: DraftConfig, target: Reader, draft_model: Transformer | None, draft_group: Group | None = None
) -> DraftPolicy | None:
    """The policy a configuration names, None for "off"; ValueError where it does not fit the models.

    draft_group: the ranks that hold the draft model together; None: those that hold the target.
    """
    draft_group = draft_group or target.group
    if draft_model is not None and config.draft_model is None:  # a configuration names one only where one drafts
        raise ValueError(f"a draft model was given, and policy {config.policy!r} drafts without one")
    if config.policy == "off":
        return None
    if config.policy == "lookup":
        return LookupDraft(target, config.ngram)
    name = config.view_name
    assert name is not None
    if config.policy == "standalone":
        reader = beside(target, _given(draft_model), draft_group)
        return StandaloneDraft(reader, build_view(config, name, reader), target.group)
    if config.policy == "early_exit":
        reader = first_layers(target, config.exit_layers)
        return EarlyExitDraft(reader, build_view(config, name, reader), config.policy)
    view = build_view(config, name, target)
    if config.policy == "hierarchy":
        return HierarchyDraft(target, view, name, _build_cheap(config, target, draft_model, draft_group))
    return ModelDraft(target, view, config.policy)


def _build_cheap(
    config: DraftConfig, target: Reader, draft_model: Transformer | None, draft_group: Group
) -> DraftPolicy:
    """Who drafts for the middle level of a hierarchy."""
    if config.cheap == "lookup":
        return LookupDraft(target, config.ngram)
    reader = beside(target, _given(draft_model), draft_group)
    # the middle level's own token comes between the cheap drafts and the target's: one more may be unfed
    cheap = StandaloneDraft(reader, build_view(config, "streaming", reader), target.group, unfed=3)
    cheap.stream = CHEAP_STREAM
    return cheap


def _given(draft_model: Transformer | None) -> Transformer:
    if draft_model is None:
        raise ValueError("a standalone draft needs a draft model: give one to Engine, or use Engine.from_pretrained")
    return draft_model
