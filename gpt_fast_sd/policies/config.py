"""The configuration of a draft: who drafts, and what it may read. It refuses invalid values when it is built."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import MAX_GAMMA, PAGES, QUANTIZATIONS, check_allowed, countable, flag_field
from . import registry

DRAFT_QUANTIZATIONS = (*QUANTIZATIONS, "planes")
KV_BITS = (4,)  # of an int8 cache that a draft may read
CHEAP = ("lookup", "standalone")  # who may draft for a hierarchy's middle level
GAMMA_TIERS = (0, 1, 2, 3, 4, 6, 8)  # what gamma="auto" chooses from; 0 is plain decoding


def gamma_tiers(group: int) -> tuple[int, ...]:
    """What gamma="auto" chooses from for a model with `group` query heads per kv head.

    Attention gives each kv head a tile of 64 or 128 rows, G for each of the gamma + 1 tokens that are judged. In groups
    of 8, gamma 8 makes 72, a tile that is nearly half empty for the sake of one token: they draft 7 at most. If nine of
    ten drafts are accepted, that is 7 % fewer per round, and a round is 7 % shorter if a draft step costs 0.15 of the
    target's.
    """
    return (*GAMMA_TIERS[:-1], 7) if group % 8 == 0 else GAMMA_TIERS


def further_tiers(group: int) -> tuple[int, ...]:
    """What it may also choose where the highest tier pays so well that more promises more; else they cost nothing.

    17 tokens in groups of 4 or 8 would just overflow a tile.
    """
    return (12, MAX_GAMMA - 1 if group % 4 == 0 else MAX_GAMMA)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Who drafts, and what it may read.

    policy: "off" is plain decoding; "auto" is in every round whoever pays best, or nobody (see auto.py). "full",
    "streaming", "snapkv", "quest" and "guided" are the target itself with that view of its own cache; "standalone" is
    draft_model, "early_exit" the target's first exit_layers layers, "lookup" an n-gram of at most `ngram` tokens from
    the row's own text, "hierarchy" lets `cheap` draft for the target with a sparse view of its cache, which drafts for
    the target.
    quantize: a copy of the drafting model drafts, with weights of that precision in its layers and head; it shares all
    else, and the target's weights are not touched. "planes": no copy, but the upper byte of the target's own weights.
    kv_bits 4: drafts read the upper four bits of the target's int8 cache, and its last 64 tokens whole; "quantized"
    reads so of all tokens.
    n_sink: Xiao et al. 2023, arXiv 2309.17453, use 4. draft_tp: a divisor of the number of processes that hold the
    target; each group of that size has a copy of draft_model, and the tokens of the first group count.
    """

    policy: str = flag_field("off", "who drafts", allowed=registry.policies, flag="draft", metavar="POLICY")
    budget: int = flag_field(256, "cache entries that a draft step may read in each layer and kv head", metavar="K")
    gamma: int | str = flag_field(
        "auto", f"tokens drafted per round, 1 to {MAX_GAMMA}, or auto: what pays best", metavar="N|auto"
    )
    draft_model: str | Path | None = flag_field(  # noqa: RUF009  its default is None
        None, "folder, GGUF file or hub id of a standalone draft model", metavar="M"
    )
    view: str | None = flag_field(
        None, "which entries of a cache are read", allowed=registry.VIEWS, unset="streaming", metavar="VIEW"
    )
    cheap: str = flag_field("lookup", "who drafts for the middle level", allowed=CHEAP, metavar="WHO")
    exit_layers: int | None = flag_field(None, "how many of the target's first layers draft", unset="half of them")
    ngram: int = flag_field(3, "tokens of the longest n-gram that is looked up")
    n_sink: int = flag_field(4, "first tokens that are always read")
    refresh: int | str | None = flag_field(
        None, "tokens after which the selection is refreshed, or off: the first one stays", metavar="N|off",
        unset="64 for snapkv, every round for guided",
    )  # fmt: skip
    page: int = flag_field(16, "entries that are selected together", allowed=PAGES)
    quantize: str | None = flag_field(
        None,
        "weights of a copy that drafts, float8 on CUDA alone; planes: half of each of the target's own",
        allowed=DRAFT_QUANTIZATIONS,
        unset="no copy",
        flag="draft_quantize",
    )
    kv_bits: int | None = flag_field(
        None,
        "bits that drafts read of each number of the target's int8 cache, except in the last 64 tokens",
        allowed=KV_BITS,
        unset="all",
        flag="draft_kv_bits",
    )
    draft_tp: int | None = flag_field(
        None, "processes that hold the draft model together, a divisor of --tp", unset="all", metavar="M"
    )

    def __post_init__(self) -> None:
        check_allowed(self, "policy", "cheap")
        for name in ("budget", "ngram", "n_sink", "page"):
            countable(name, getattr(self, name))
        if self.gamma != "auto":
            if not isinstance(self.gamma, int) or isinstance(self.gamma, bool):
                raise ValueError(f"gamma must be 'auto' or a whole number from 1 to {MAX_GAMMA}, got {self.gamma!r}")
            if not 1 <= self.gamma <= MAX_GAMMA:
                raise ValueError(f"gamma must be from 1 to {MAX_GAMMA}, got {self.gamma}")
        for name in ("exit_layers", "draft_tp"):
            if getattr(self, name) is not None:
                countable(name, getattr(self, name))
        if isinstance(self.refresh, str) and not self.selects_once:
            raise ValueError(f"refresh must be 'off' or a whole number of at least 1, got {self.refresh!r:.80}")
        if self.refresh is not None and not isinstance(self.refresh, str):
            countable("refresh", self.refresh)
        check_allowed(self, "page", "quantize", "kv_bits")
        self._check_views()
        if self.draft_model is not None and not isinstance(self.draft_model, (str, os.PathLike)):
            raise ValueError(f"draft_model must be a folder or a hub id, got {self.draft_model!r:.80}")
        needs_model = registry.policy_class(self.policy).needs_model(self)
        if needs_model and self.draft_model is None:
            raise ValueError(f"policy {self.policy!r} with a standalone draft needs draft_model, a folder or a hub id")
        if self.draft_model is not None and not needs_model:
            raise ValueError(f"draft_model is for policy 'standalone' or a hierarchy over it, got {self.policy!r}")
        if self.draft_tp is not None and self.draft_model is None:
            raise ValueError(
                f"draft_tp is for a draft_model: policy {self.policy!r} drafts with the target's own weights"
            )
        if self.quantize is not None and "quantize" not in registry.policy_class(self.policy).flags:
            raise ValueError(f"quantize {self.quantize!r} is for a model that drafts: policy {self.policy!r} has none")
        if self.quantize == "planes" and needs_model:
            raise ValueError("quantize 'planes' is of a target's own weights, and a draft_model has others: use 'int8'")
        if self.kv_bits is not None and "kv_bits" not in registry.policy_class(self.policy).flags:
            raise ValueError(
                f"kv_bits {self.kv_bits} is for drafts from the target's own cache, which policy {self.policy!r} does "
                "not read"
            )
        if self.exit_layers is not None and "exit_layers" not in registry.policy_class(self.policy).flags:
            raise ValueError(f"exit_layers is for policy 'early_exit', got policy {self.policy!r}")

    def _check_views(self) -> None:
        policy = registry.policy_class(self.policy)
        if self.view is not None:
            if "view" not in policy.flags:
                *others, last = (name for name in registry.DRAFTERS if "view" in registry.policy_class(name).flags)
                raise ValueError(f"view is for {', '.join(others)} and {last}; policy {self.policy!r} is its own view")
            check_allowed(self, "view")
            if registry.view_class(self.view).of_target and policy.own_cache:
                raise ValueError(
                    f"view {self.view!r} needs the target's own cache: a {self.policy} draft cannot use it"
                )
        for view in policy.views(self):
            least = registry.view_class(view).least_budget(self)
            if self.budget < least:
                raise ValueError(f"budget must be at least {least} for {view}, got {self.budget}")

    @property
    def view_name(self) -> str | None:
        """Which view of a cache the drafting model has; None if no model with a cache drafts."""
        return next(iter(registry.policy_class(self.policy).views(self)), None)

    def within(self, capacity: int) -> DraftConfig:
        """Limit the budget to a cache of so many entries: a larger one reads no more, and takes memory."""
        fitting = replace(self, n_sink=min(self.n_sink, capacity))
        views = map(registry.view_class, registry.policy_class(self.policy).views(self))
        least = max((view.least_budget(fitting) for view in views), default=1)
        return replace(fitting, budget=max(least, min(self.budget, capacity)))

    @property
    def selects_once(self) -> bool:
        """Whether a selection, once made, stays."""
        return self.refresh == "off"

    def refresh_or(self, default: int) -> int:
        """Tokens after which a selection is refreshed or, where it stays, for which a window has room before it."""
        return self.refresh if isinstance(self.refresh, int) else default

    @property
    def needs_planes(self) -> bool:
        """Whether drafts read a part of the target's cache that only planes can be read for."""
        return self.kv_bits is not None or bool(registry.policy_class(self.policy).needs_planes)

    @property
    def max_gamma(self) -> int:
        """The most tokens that a round may draft, further tiers aside."""
        if self.policy == "off":
            return 0
        return max(GAMMA_TIERS) if isinstance(self.gamma, str) else self.gamma
