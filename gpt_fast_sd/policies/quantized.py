"""Half of each number: drafts read the upper plane of an int8 cache, verification both (QuantSpec, arXiv 2502.10424).

QuantSpec (Tiwari et al. 2025) quantizes groups of tokens, and keeps recent ones in full precision until a group is
full. Here each token has a scale of its own, so nothing is ever quantized again or flushed, and of the last tokens a
draft reads both planes in place of that buffer.
"""

from __future__ import annotations

from .config import DraftConfig
from .self_draft import SelfDraft


class QuantizedDraft(SelfDraft):
    """The target reads every token of its own cache, 4 bits of each number, and the last tokens whole."""

    about = "the target itself, from the upper 4 bits of its int8 cache"
    reads = "everything, and its last 64 tokens whole"
    flags = ("quantize", "kv_bits")
    needs_planes = True

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """All tokens."""
        return ("full",)
