"""Who may draft, by name, and the file in policies/ that each stands in: a new one is its file and one line here.

A view says which entries of a cache a drafting model reads. The target drafts through any of them, so that the name of
a view is the name of a policy, too.
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
    "standalone": "standalone.StandaloneDraft",
    "lookup": "lookup.LookupDraft",
    "early_exit": "early_exit.EarlyExitDraft",
    "hierarchy": "hierarchy.HierarchyDraft",
}


def policies() -> tuple[str, ...]:
    """All that DraftConfig.policy may be."""
    return ("off", *VIEWS, *DRAFTERS)


def view_class(name: str) -> Any:
    """The class of a view, a View of policies/base.py."""
    return _found(VIEWS[name])


def policy_class(name: str) -> Any:
    """The class of a policy, a DraftPolicy of policies/base.py; for "off" the one that does nothing."""
    if name in DRAFTERS:
        return _found(DRAFTERS[name])
    return _found("base.ModelDraft" if name in VIEWS else "base.DraftPolicy")


def heeds(name: str) -> set[str]:
    """The fields of DraftConfig that a policy heeds."""
    return {*policy_class(name).flags, *(view_class(name).flags if name in VIEWS else ())}


def register(name: str, made: type) -> None:
    """Let a View or a DraftPolicy of your own be named; ValueError where it is neither, or the name is taken."""
    kinds = (("View", VIEWS), ("DraftPolicy", DRAFTERS))
    places = [place for kind, place in kinds if isinstance(made, type) and issubclass(made, _found(f"base.{kind}"))]
    if not places:
        raise ValueError(f"what is registered is a class of View or of DraftPolicy, got {made!r:.80}")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the name of a policy is one word, got {name!r:.80}")
    if name in policies():
        raise ValueError(f"there is a policy {name!r} already")
    places[0][name] = made


def _found(where: Any) -> Any:
    if not isinstance(where, str):
        return where
    file, _, name = where.partition(".")
    return getattr(import_module(f"{__package__}.policies.{file}"), name)
