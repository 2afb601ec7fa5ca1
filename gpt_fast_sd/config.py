"""The configuration of a user: frozen dataclasses that refuse invalid values when they are built."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from . import registry

T = TypeVar("T")

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "fp32", "bf16", "fp16")
BODIES = ("fast", "reference")  # what stands in for the core, or the core itself
CUDA_GRAPHS = ("round", "off")
QUANTIZED_CACHES = ("int8",)
KV_DTYPES = ("fp32", "bf16", "fp16", *QUANTIZED_CACHES)
QUANTIZATIONS = ("int8", "int4", "float8")
KV_BITS = (4,)  # of an int8 cache that a draft may read
CHEAP = ("lookup", "standalone")  # who may draft for a hierarchy's middle level
GAMMA_TIERS = (0, 1, 2, 3, 4, 6, 8)  # what gamma="auto" chooses from; 0 is plain decoding
MAX_GAMMA = 16
MOST = 2**31 - 1  # of what is counted: sums and products of two of them fit into 64 bits
PAGES = (16, 32, 64, 128)  # whole vectors of scores, and whole pages in a split of the cache


def gamma_tiers(group: int) -> tuple[int, ...]:
    """What gamma="auto" chooses from for a model with `group` query heads per kv head.

    Attention gives each kv head a tile of 64 or 128 rows, G for each of the gamma + 1 tokens that are judged. In groups
    of 8, gamma 8 makes 72, a tile that is nearly half empty for the sake of one token: they draft 7 at most. If nine of
    ten drafts are accepted, that is 7 % fewer per round, and a round is 7 % shorter if a draft step costs 0.15 of the
    target's.
    """
    return (*GAMMA_TIERS[:-1], 7) if group % 8 == 0 else GAMMA_TIERS


def _flag(
    default: T,
    text: str,
    *,
    allowed: Collection[object] | Callable[[], Collection[object]] = (),
    unset: str = "",
    flag: str = "",
    metavar: str = "",
    switch: bool = False,
) -> T:
    """A field that programs turn into a flag; text: what it is or, if it is on by default, what turning it off does.

    allowed: the allowed values, or a function that returns them. unset: the meaning of its default None. flag: its
    name, if it is not the field's. metavar: the placeholder of its value in a program's help. switch: the flag takes no
    value and means the last one allowed.
    """
    metadata = {"help": text, "allowed": allowed, "unset": unset, "flag": flag, "metavar": metavar, "switch": switch}
    return field(default=default, metadata=metadata)


def allowed_values(field: Field[Any]) -> tuple[object, ...]:
    """The values that a field of a configuration may have besides None; () if it checks its value itself."""
    allowed = field.metadata["allowed"]
    return tuple(allowed() if callable(allowed) else allowed)


def _check_allowed(config: EngineConfig | DraftConfig, *names: str) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        allowed = allowed_values(one) if one.name in names and (value, one.default) != (None, None) else ()
        if allowed and value not in allowed:
            which = "one of " if len(allowed) > 1 else ""
            raise ValueError(f"{one.name} must be {which}{', '.join(map(str, allowed))}, got {value!r}")


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _countable(name: str, value: int) -> None:
    """ValueError unless it is a whole number of at least 1 that tensors of 64 bits can count with."""
    _at_least_one(name, value)
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST:,}, got {value}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the target model runs.

    dtype "auto" is bf16 or fp32 on a CPU, see loading/machine.py; quantization/table.py says what runs where.
    cuda_graphs "round" captures a round (draft, verify, judge, commit) as one graph and reads its result while the next
    one runs; "off" launches every kernel from the host.
    """

    batch_size: int = _flag(8, "slots; more prompts wait in a queue", metavar="B")
    max_seq_len: int = _flag(8192, "tokens that a slot can hold, prompt and output together")
    device: str = _flag("auto", "where the model runs", allowed=DEVICES)
    dtype: str = _flag("auto", "of weights and activations; auto: as stored, if that is fast", allowed=DTYPES)
    compile: bool = _flag(True, "run eagerly: starts at once, decodes slower")
    bodies: str = _flag(
        "fast", "run the core as it is written, in the same dtype: what stands in for it is left out; slower",
        allowed=BODIES, flag="reference", switch=True,
    )  # fmt: skip
    exact: bool = _flag(
        False, "plain and speculative decoding are bit-identical in any dtype; slower, needs a draft policy"
    )
    quantize: str | None = _flag(
        None, "weights of all layers, which makes another target; float8 on CUDA alone", allowed=QUANTIZATIONS
    )
    kv_dtype: str | None = _flag(
        None, "dtype of the KV cache; int8: with one scale per token and kv head",
        allowed=KV_DTYPES, unset="as --dtype",
    )  # fmt: skip
    cuda_graphs: str = _flag("round", "on CUDA: what is captured as one graph", allowed=CUDA_GRAPHS)
    max_autotune: bool = _flag(False, "on CUDA: time several kernels for matrix products; minutes at the start")

    def __post_init__(self) -> None:
        _countable("batch_size", self.batch_size)
        _countable("max_seq_len", self.max_seq_len)
        _check_allowed(self, "device", "dtype", "bodies", "cuda_graphs", "kv_dtype", "quantize")
        for name in ("compile", "exact", "max_autotune"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Who drafts, and what it may read.

    policy: "off" is plain decoding. "full", "streaming", "snapkv", "quest" and "guided" are the target itself with that
    view of its own cache; "standalone" is draft_model, "early_exit" the target's first exit_layers layers, "lookup" an
    n-gram of at most `ngram` tokens from the row's own text, "hierarchy" lets `cheap` draft for the target with a
    sparse view of its cache, which drafts for the target.
    quantize: a copy of the drafting model drafts, with weights of that precision in its layers and head; it shares all
    else, and the target's weights are not touched.
    kv_bits 4: drafts read the upper four bits of the target's int8 cache, and its last 64 tokens whole; "quantized"
    reads so of all tokens.
    n_sink: Xiao et al. 2023, arXiv 2309.17453, use 4. draft_tp: a divisor of the number of processes that hold the
    target; each group of that size has a copy of draft_model, and the tokens of the first group count.
    """

    policy: str = _flag("off", "who drafts", allowed=registry.policies, flag="draft", metavar="POLICY")
    budget: int = _flag(256, "cache entries that a draft step may read in each layer and kv head", metavar="K")
    gamma: int | str = _flag(
        "auto", f"tokens drafted per round, 1 to {MAX_GAMMA}, or auto: what pays best", metavar="N|auto"
    )
    draft_model: str | Path | None = _flag(  # noqa: RUF009  its default is None
        None, "folder, GGUF file or hub id of a standalone draft model", metavar="M"
    )
    view: str | None = _flag(
        None, "which entries of a cache are read", allowed=registry.VIEWS, unset="streaming", metavar="VIEW"
    )
    cheap: str = _flag("lookup", "who drafts for the middle level", allowed=CHEAP, metavar="WHO")
    exit_layers: int | None = _flag(None, "how many of the target's first layers draft", unset="half of them")
    ngram: int = _flag(3, "tokens of the longest n-gram that is looked up")
    n_sink: int = _flag(4, "first tokens that are always read")
    refresh: int | None = _flag(
        None, "tokens after which the selection is refreshed", unset="64 for snapkv, every round for guided"
    )
    page: int = _flag(16, "entries that are selected together", allowed=PAGES)
    quantize: str | None = _flag(
        None,
        "weights of a copy that drafts; float8 on CUDA alone",
        allowed=QUANTIZATIONS,
        unset="no copy",
        flag="draft_quantize",
    )
    kv_bits: int | None = _flag(
        None,
        "bits that drafts read of each number of the target's int8 cache, except in the last 64 tokens",
        allowed=KV_BITS,
        unset="all",
        flag="draft_kv_bits",
    )
    draft_tp: int | None = _flag(
        None, "processes that hold the draft model together, a divisor of --tp", unset="all", metavar="M"
    )

    def __post_init__(self) -> None:
        _check_allowed(self, "policy", "cheap")
        for name in ("budget", "ngram", "n_sink", "page"):
            _countable(name, getattr(self, name))
        if self.gamma != "auto":
            if not isinstance(self.gamma, int) or isinstance(self.gamma, bool):
                raise ValueError(f"gamma must be 'auto' or a whole number from 1 to {MAX_GAMMA}, got {self.gamma!r}")
            if not 1 <= self.gamma <= MAX_GAMMA:
                raise ValueError(f"gamma must be from 1 to {MAX_GAMMA}, got {self.gamma}")
        for name in ("exit_layers", "refresh", "draft_tp"):
            if getattr(self, name) is not None:
                _countable(name, getattr(self, name))
        _check_allowed(self, "page", "quantize", "kv_bits")
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
            _check_allowed(self, "view")
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
        """The same for a cache of so many entries: a larger budget reads no more, and takes memory."""
        fitting = replace(self, n_sink=min(self.n_sink, capacity))
        views = map(registry.view_class, registry.policy_class(self.policy).views(self))
        least = max((view.least_budget(fitting) for view in views), default=1)
        return replace(fitting, budget=max(least, min(self.budget, capacity)))

    @property
    def needs_planes(self) -> bool:
        """Whether drafts read a part of the target's cache that only planes can be read for."""
        return self.kv_bits is not None or bool(registry.policy_class(self.policy).of_planes)

    @property
    def max_gamma(self) -> int:
        """The most tokens that a round may draft."""
        if self.policy == "off":
            return 0
        return max(GAMMA_TIERS) if isinstance(self.gamma, str) else self.gamma


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    top_k, top_p and min_p filter in that order, after the temperature. A seed fixes the row's output, whatever shares
    its batch, for one draft policy and one gamma (gamma="auto" depends on measured times, so there only the output of
    greedy rows is fixed); None draws a fresh seed.
    """

    max_tokens: int = _flag(128, "tokens to add to each prompt", flag="max_new_tokens")
    temperature: float = _flag(0.0, "0 is greedy", metavar="T")
    top_k: int | None = _flag(None, "keep the K likeliest tokens", metavar="K")
    top_p: float | None = _flag(None, "keep the likeliest tokens that hold P of the mass", metavar="P")
    min_p: float | None = _flag(None, "keep tokens at least P times as likely as the best", metavar="P")
    seed: int | None = _flag(
        None, "makes sampling repeatable for a fixed --gamma (auto depends on measured times)", metavar="S"
    )
    stop: str | Sequence[str] | None = _flag(
        None, "end before this text, which is cut off; may be given several times", metavar="TEXT"
    )
    ignore_eos: bool = _flag(False, "continue past the end-of-sequence token")
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        _at_least_one("max_tokens", self.max_tokens)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)  # numpy's fp64 is a float, too
            if not is_number and not (value is None and name != "temperature"):
                raise ValueError(f"{name} must be a number, got {value!r:.80}")
        if not 0.0 <= self.temperature <= 3.4e38:  # fp32 holds no more
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None:
            _at_least_one("top_k", self.top_k)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r:.80}")
        stops = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        stops = tuple(stops) if isinstance(stops, Sequence) else (stops,)
        if not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop must be a non-empty string or several, got {self.stop!r}")
        if half := next((c for s in stops for c in s if 0xD800 <= ord(c) < 0xE000), None):
            raise ValueError(f"stop holds U+{ord(half):04X}, half a character, which no text has, got {self.stop!r}")
        object.__setattr__(self, "stop_strings", stops)
