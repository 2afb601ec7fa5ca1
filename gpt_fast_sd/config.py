"""What a user may ask for: frozen dataclasses that refuse nonsense when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import registry

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "fp32", "bf16", "fp16")
CUDA_GRAPHS = ("round", "off")
KV_DTYPES = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("int8",)
CHEAP = ("lookup", "standalone")  # who may draft for a hierarchy's middle level
GAMMA_TIERS = (0, 1, 2, 3, 4, 6, 8)  # what gamma="auto" chooses from; 0 is plain decoding
MAX_GAMMA = 16
PAGES = (16, 32, 64, 128)  # whole vectors of scores, and whole pages in a split of the cache


def gamma_tiers(group: int) -> tuple[int, ...]:
    """What gamma="auto" chooses from for a model with `group` query heads a kv head.

    Attention gives each kv head a tile of 64 or 128 rows, G for each of the gamma + 1 tokens that are judged. In groups
    of 8 gamma 8 makes 72, a tile that is nearly half empty, for one token: they draft 7 at most. Where nine of ten
    drafts are accepted that is 7 % less a round, and a round is 7 % shorter if a draft step costs 0.15 of the target's.
    """
    return (*GAMMA_TIERS[:-1], 7) if group % 8 == 0 else GAMMA_TIERS


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the target model runs.

    batch_size: static slots; more prompts than that wait in a queue. max_seq_len: tokens one slot can hold, prompt and
    output together. dtype "auto": what the checkpoint stores, or fp32 on a CPU without bf16 instructions. kv_dtype
    None: as dtype. quantize "int8": weight-only, per output channel (torchao). exact: bit-identical plain and
    speculative decoding; it needs a draft policy.

    On CUDA only: cuda_graphs "round" captures a round (draft, verify, judge, commit) as one graph and reads its result
    while the next one runs; "off" launches every kernel from the host. max_autotune: Inductor times its choices of
    kernels for matrix products, which makes the first start minutes slower.
    """

    batch_size: int = 8
    max_seq_len: int = 8192
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = True
    exact: bool = False
    quantize: str | None = None
    kv_dtype: str | None = None
    cuda_graphs: str = "round"
    max_autotune: bool = False

    def __post_init__(self) -> None:
        _at_least_one("batch_size", self.batch_size)
        _at_least_one("max_seq_len", self.max_seq_len)
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("cuda_graphs", self.cuda_graphs, CUDA_GRAPHS)
        for name in ("compile", "exact", "max_autotune"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.kv_dtype is not None:
            _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.quantize is not None:
            _one_of("quantize", self.quantize, QUANTIZATIONS)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Who drafts, and what it may read.

    policy: "off" is plain decoding. "full", "streaming", "snapkv", "quest" and "guided" are the target itself with that
    view of its own cache; "standalone" is draft_model, "early_exit" the target's first exit_layers layers, "lookup" an
    n-gram of at most `ngram` tokens from the row's own text, "hierarchy" lets `cheap` draft for the target with a
    sparse view of its cache, which drafts for the target.
    view: which entries standalone, early_exit and hierarchy read, by the name of a view (None: "streaming").
    budget: committed cache entries a draft step may read in every layer and kv head. gamma: tokens drafted a round, or
    "auto". n_sink: first tokens that streaming always reads (Xiao et al. 2023, arXiv 2309.17453, use 4). refresh:
    tokens after which snapkv and guided select anew (None: 64 for snapkv, every round for guided). page: entries that
    quest and guided select together. draft_tp: processes that hold draft_model together, a divisor of those that hold
    the target (None: all of them); each such part of them has a copy, and the first one's tokens count.
    """

    policy: str = "off"
    budget: int = 256
    gamma: int | str = "auto"
    draft_model: str | Path | None = None
    view: str | None = None
    cheap: str = "lookup"
    exit_layers: int | None = None
    ngram: int = 3
    n_sink: int = 4
    refresh: int | None = None
    page: int = 16
    draft_tp: int | None = None

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, registry.policies())
        _one_of("cheap", self.cheap, CHEAP)
        for name in ("budget", "ngram", "n_sink", "page"):
            _at_least_one(name, getattr(self, name))
        if self.gamma != "auto":
            if not isinstance(self.gamma, int) or isinstance(self.gamma, bool):
                raise ValueError(f"gamma must be 'auto' or a whole number from 1 to {MAX_GAMMA}, got {self.gamma!r}")
            if not 1 <= self.gamma <= MAX_GAMMA:
                raise ValueError(f"gamma must be from 1 to {MAX_GAMMA}, got {self.gamma}")
        for name in ("exit_layers", "refresh", "draft_tp"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.page not in PAGES:
            raise ValueError(f"page must be one of {', '.join(map(str, PAGES))}, got {self.page}")
        self._check_views()
        needs_model = registry.policy_class(self.policy).needs_model(self)
        if needs_model and self.draft_model is None:
            raise ValueError(f"policy {self.policy!r} with a standalone draft needs draft_model, a folder or a hub id")
        if self.draft_model is not None and not needs_model:
            raise ValueError(f"draft_model is for policy 'standalone' or a hierarchy over it, got {self.policy!r}")
        if self.draft_tp is not None and self.draft_model is None:
            raise ValueError(
                f"draft_tp is for a draft_model: policy {self.policy!r} drafts with the target's own weights"
            )
        if self.exit_layers is not None and "exit_layers" not in registry.policy_class(self.policy).flags:
            raise ValueError(f"exit_layers is for policy 'early_exit', got policy {self.policy!r}")

    def _check_views(self) -> None:
        policy = registry.policy_class(self.policy)
        if self.view is not None:
            if "view" not in policy.flags:
                *others, last = (name for name in registry.DRAFTERS if "view" in registry.policy_class(name).flags)
                raise ValueError(f"view is for {', '.join(others)} and {last}; policy {self.policy!r} is its own")
            _one_of("view", self.view, tuple(registry.VIEWS))
            if registry.view_class(self.view).of_target and policy.own_cache:
                raise ValueError(
                    f"view {self.view!r} needs the target's own cache: a {self.policy} draft cannot have it"
                )
        for view in policy.views(self):
            least = registry.view_class(view).least_budget(self)
            if self.budget < least:
                raise ValueError(f"budget must be at least {least} for {view}, got {self.budget}")

    @property
    def view_name(self) -> str | None:
        """Which view of a cache the drafting model has; None where no model with a cache drafts."""
        return next(iter(registry.policy_class(self.policy).views(self)), None)

    @property
    def max_gamma(self) -> int:
        """The most tokens a round may draft."""
        if self.policy == "off":
            return 0
        return max(GAMMA_TIERS) if isinstance(self.gamma, str) else self.gamma


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    temperature 0 is greedy. top_k, top_p and min_p filter in that order, after the temperature. A seed fixes the row's
    output whatever shares its batch, for one draft policy and one gamma (gamma="auto" goes by the clock, so there it
    fixes the output of greedy rows only); None draws a fresh one. stop: strings that end the text (they are cut off).
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        _at_least_one("max_tokens", self.max_tokens)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) and not (value is None and name != "temperature"):
                raise ValueError(f"{name} must be a number, got {value!r}")
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
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        stops = tuple(stops) if isinstance(stops, Sequence) else (stops,)
        if not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop must be a non-empty string or several, got {self.stop!r}")
        if half := next((c for s in stops for c in s if 0xD800 <= ord(c) < 0xE000), None):
            raise ValueError(f"stop holds U+{ord(half):04X}, half a character, which no text has, got {self.stop!r}")
        object.__setattr__(self, "stop_strings", stops)
