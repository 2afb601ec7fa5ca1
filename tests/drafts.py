"""One row for each policy, and for those made of two: tests of all policies read these tables."""

from dataclasses import replace
from typing import Any

from gpt_fast_sd import DraftConfig, registry
from gpt_fast_sd.model import Transformer

VIEWS = list(registry.VIEWS)
# name -> the draft settings for small models; the policy is the name unless stated otherwise
POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {"budget": 24}, "full": {}, "snapkv": {"budget": 64, "refresh": 4}, "quest": {"budget": 48},
    "guided": {"budget": 48}, "standalone": {"budget": 24}, "early_exit": {"budget": 24}, "lookup": {"ngram": 2},
    "hierarchy": {"budget": 24},
    "hierarchy over standalone": {"policy": "hierarchy", "budget": 24, "cheap": "standalone"},
}  # fmt: skip
# drafts of half an int8 cache, for engines with one: a policy that needs it, and others that may
PLANES: dict[str, dict[str, Any]] = {
    "quantized": {},
    **{
        f"{name} x planes": {"policy": name, "kv_bits": 4} | POLICIES[name]
        for name in ("streaming", "full", "snapkv", "quest", "guided", "early_exit", "hierarchy")
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "standalone, snapkv": {"policy": "standalone", "view": "snapkv", "budget": 64},
    "hierarchy, guided": {"policy": "hierarchy", "view": "guided", "budget": 48},
    "snapkv, once": {"policy": "snapkv", "budget": 64, "refresh": "off"},
    "guided, once": {"policy": "guided", "budget": 48, "refresh": "off"},
    "past its positions": {"policy": "standalone", "budget": 24},
}


def given(name: str, model: Transformer) -> Transformer:
    """The draft model that a row names, of this one: with fewer positions than rows have, if it drafts past them."""
    if name == "past its positions":
        model.config = replace(model.config, max_seq_len=300)
    return model


def draft_of(name: str, gamma: int | str = 3, **changes: Any) -> DraftConfig:
    """The configuration of a row, or of any policy with its defaults; a draft model is `given`."""
    fields = {"policy": name, "gamma": gamma} | (POLICIES | PLANES | MIXTURES).get(name, {}) | changes
    owns_model = "standalone" in (fields["policy"], fields.get("cheap"))
    return DraftConfig(**fields, draft_model="given" if owns_model else None)
