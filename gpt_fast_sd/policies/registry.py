"""The draft policies by name, each with its file in this folder: a new one is its file and one line here.

A view says which entries of a cache a drafting model reads. The target can draft through any of them, so the name of
a view is also the name of a policy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VIEWS: dict[str, Any] = {
    "full": "full.FullView",
    "streaming": "streaming.StreamingView",
    "snapkv": "snapkv.SnapKVView",
    "quest": "quest.QuestView",
    "guided": "guided.GuidedView",
}
DRAFTERS: dict[str, Any] = {
    "auto": "auto.AutoDraft",
    "standalone": "standalone.StandaloneDraft",
    "quantized": "quantized.QuantizedDraft",
    "lookup": "lookup.LookupDraft",
    "early_exit": "early_exit.EarlyExitDraft",
    "hierarchy": "hierarchy.HierarchyDraft",
}


def policies() -> tuple[str, ...]:
    """All allowed values of DraftConfig.policy."""
    return ("off", *VIEWS, *DRAFTERS)


def view_class(name: str) -> Any:
    """The class of a view, a View of policy.py."""
    return _found(VIEWS[name])


def policy_class(name: str) -> Any:
    """The class of a policy, a DraftPolicy of policy.py; for "off" the one that does nothing."""
    if name in DRAFTERS:
        return _found(DRAFTERS[name])
    return _found("self_draft.SelfDraft") if name in VIEWS else _of_policy("DraftPolicy")


def about(name: str) -> tuple[str, str]:
    """Who proposes with this policy, and what that reads, "" if nothing: phrases for users, in Markdown."""
    made = policy_class(name)
    return made.about, view_class(name).about if name in VIEWS else made.reads


def fields_used(name: str) -> set[str]:
    """The fields of DraftConfig that a policy uses."""
    return {*policy_class(name).flags, *(view_class(name).flags if name in VIEWS else ())}


def register(name: str, made: type) -> None:
    """Register a View or a DraftPolicy of your own by name; ValueError if it is neither, or the name is taken."""
    kinds = (("View", VIEWS), ("DraftPolicy", DRAFTERS))
    bases = [(_of_policy(kind), place) for kind, place in kinds]
    places = [place for base, place in bases if isinstance(made, type) and issubclass(made, base) and made is not base]
    if not places:
        raise ValueError(f"a registered policy must be a subclass of View or DraftPolicy, got {made!r:.80}")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the name of a policy must be one word, got {name!r:.80}")
    if name in policies():
        raise ValueError(f"there is already a policy {name!r}")
    places[0][name] = made


def _of_policy(name: str) -> Any:
    return getattr(import_module(f"{__package__}.policy"), name)


def _found(where: Any) -> Any:
    if not isinstance(where, str):
        return where
    file, _, name = where.partition(".")
    return getattr(import_module(f"{__package__}.{file}"), name)
