"""What a user may ask for: frozen dataclasses that refuse nonsense when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "fp32", "bf16", "fp16")
KV_DTYPES = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("int8",)
POLICIES = ("off",)


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
    """

    batch_size: int = 8
    max_seq_len: int = 8192
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = True
    exact: bool = False
    quantize: str | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        _at_least_one("batch_size", self.batch_size)
        _at_least_one("max_seq_len", self.max_seq_len)
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        for name in ("compile", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.kv_dtype is not None:
            _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.quantize is not None:
            _one_of("quantize", self.quantize, QUANTIZATIONS)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Who drafts. policy "off" is plain decoding, and the only policy of this version."""

    policy: str = "off"
    budget: int = 256
    gamma: int | str = "auto"

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        _at_least_one("budget", self.budget)
        if self.gamma != "auto":
            if not isinstance(self.gamma, int) or isinstance(self.gamma, bool):
                raise ValueError(f"gamma must be 'auto' or a whole number of at least 1, got {self.gamma!r}")
            if self.gamma < 1:
                raise ValueError(f"gamma must be at least 1, got {self.gamma}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    temperature 0 is greedy. top_k, top_p and min_p filter in that order, after the temperature. A seed fixes the row's
    output whatever shares its batch; None draws a fresh one. stop: strings that end the text (they are cut off).
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
        if not 0.0 <= self.temperature < float("inf"):
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
        object.__setattr__(self, "stop_strings", stops)
