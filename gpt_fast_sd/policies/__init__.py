"""Who drafts: one file per policy, all behind `DraftPolicy`; sparse ones are a `View` of a cache that a model reads.

It exports `build_policy`, which makes the policy that a DraftConfig names.
"""

from ..draft import Draft, DraftPolicy, ModelDraft, OwnPrefill, View, build_view
from .build import build_policy

__all__ = ["Draft", "DraftPolicy", "ModelDraft", "OwnPrefill", "View", "build_policy", "build_view"]
