"""Who drafts: one file per policy, all behind `DraftPolicy`; sparse ones are a `View` of a cache that a model reads.

It exports `build_policy`, which makes the policy that a DraftConfig names.
"""

from ..draft import Draft
from . import registry
from .build import build_policy
from .config import DraftConfig
from .model_draft import ModelDraft, build_view
from .policy import DraftPolicy, OwnPrefill, View

__all__ = [
    "Draft",
    "DraftConfig",
    "DraftPolicy",
    "ModelDraft",
    "OwnPrefill",
    "View",
    "build_policy",
    "build_view",
    "registry",
]
