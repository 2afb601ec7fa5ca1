"""The configuration of a user: frozen dataclasses that refuse invalid values when they are built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "fp32", "bf16", "fp16")
BODIES = ("fast", "reference")  # what stands in for the core, or the core itself
CUDA_GRAPHS = ("round", "off")
QUANTIZED_CACHES = ("int8",)
KV_DTYPES = ("fp32", "bf16", "fp16", *QUANTIZED_CACHES)
QUANTIZATIONS = ("int8", "int4", "float8")
MAX_GAMMA = 16
MOST_LOGPROBS = 20  # likeliest tokens that are named, as by OpenAI's API
MOST_SAMPLES = 10_000  # completions of one prompt
MOST = 2**31 - 1  # of what is counted: sums and products of two of them fit into 64 bits
PAGES = (16, 32, 64, 128)  # whole vectors of scores, and whole pages in a split of the cache


def flag_field(
    default: T, text: str, *, allowed: Collection[object] | Callable[[], Collection[object]] = (), unset: str = "",
    flag: str = "", metavar: str = "", switch: bool = False,
) -> T:  # fmt: skip
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


def check_allowed(config: Any, *names: str) -> None:
    """ValueError if one of these fields of a configuration has a value that is not among the allowed ones."""
    for one in fields(config):
        value = getattr(config, one.name)
        allowed = allowed_values(one) if one.name in names and (value, one.default) != (None, None) else ()
        if allowed and value not in allowed:
            which = "one of " if len(allowed) > 1 else ""
            raise ValueError(f"{one.name} must be {which}{', '.join(map(str, allowed))}, got {value!r}")


def at_least_one(name: str, value: object) -> None:
    """ValueError unless it is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def countable(name: str, value: int) -> None:
    """ValueError unless it is a whole number of at least 1 that tensors of 64 bits can count with."""
    at_least_one(name, value)
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST:,}, got {value}")


def require_kind(name: str, value: object, kind: type) -> None:
    """ValueError if a configuration is none of this kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {kind.__name__}(...), got {' '.join(repr(value).split()):.80}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the target model runs.

    dtype "auto" is bf16 or fp32 on a CPU, see loading/machine.py; quantization/table.py says what runs where.
    cuda_graphs "round" captures a round (draft, verify, judge, commit) as one graph and reads its result while the next
    one runs; "off" launches every kernel from the host.
    """

    batch_size: int = flag_field(8, "slots; more prompts wait in a queue", metavar="B")
    max_seq_len: int = flag_field(8192, "tokens that a slot can hold, prompt and output together")
    device: str = flag_field("auto", "where the model runs", allowed=DEVICES)
    dtype: str = flag_field("auto", "of weights and activations; auto: as stored, if that is fast", allowed=DTYPES)
    compile: bool = flag_field(True, "run eagerly: starts at once, decodes slower")
    bodies: str = flag_field(
        "fast", "run the core as it is written, in the same dtype: what stands in for it is left out; slower",
        allowed=BODIES, flag="reference", switch=True,
    )  # fmt: skip
    exact: bool = flag_field(
        False, "plain and speculative decoding are bit-identical in any dtype; slower, needs a draft policy"
    )
    quantize: str | None = flag_field(
        None, "weights of all layers, which makes another target; float8 on CUDA alone", allowed=QUANTIZATIONS
    )
    kv_dtype: str | None = flag_field(
        None, "dtype of the KV cache; int8: with one scale per token and kv head", allowed=KV_DTYPES, unset="as --dtype"
    )
    cuda_graphs: str = flag_field("round", "on CUDA: what is captured as one graph", allowed=CUDA_GRAPHS)
    max_autotune: bool = flag_field(False, "on CUDA: time several kernels for matrix products; minutes at the start")

    def __post_init__(self) -> None:
        countable("batch_size", self.batch_size)
        countable("max_seq_len", self.max_seq_len)
        check_allowed(self, "device", "dtype", "bodies", "cuda_graphs", "kv_dtype", "quantize")
        for name in ("compile", "exact", "max_autotune"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    top_k, top_p and min_p filter in that order, after the temperature. A seed fixes the row's output, whatever shares
    its batch, for one draft policy and one gamma (gamma="auto" depends on measured times, so there only the output of
    greedy rows is fixed); None draws a fresh seed.
    processor: what changes logits [1, V] after ids [1, n], before the temperature, as transformers' do:
    processor(ids, logits) -> logits, a function of these alone, as it is asked at places that no text reaches, too.
    """

    max_tokens: int = flag_field(128, "tokens to add to each prompt", flag="max_new_tokens")
    temperature: float = flag_field(0.0, "0 is greedy", metavar="T")
    top_k: int | None = flag_field(None, "keep the K likeliest tokens", metavar="K")
    top_p: float | None = flag_field(None, "keep the likeliest tokens that hold P of the mass", metavar="P")
    min_p: float | None = flag_field(None, "keep tokens at least P times as likely as the best", metavar="P")
    seed: int | None = flag_field(
        None, "makes sampling repeatable for a fixed --gamma (auto depends on measured times)", metavar="S"
    )
    stop: str | Sequence[str] | None = flag_field(
        None, "end before this text, which is cut off; may be given several times", metavar="TEXT"
    )
    ignore_eos: bool = flag_field(False, "continue past the end-of-sequence token")
    max_drafts: int | None = flag_field(
        None, "drafts that a row may keep in a round; 0: it decodes plainly beside others", unset="all", metavar="N"
    )
    stop_token_ids: Sequence[int] | None = flag_field(None, "also end at it; repeatable", flag="stop_token_id")
    logprobs: int | None = flag_field(
        None, "of each token the log-probability, and the N likeliest in its place", unset="none", metavar="N"
    )
    processor: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # of which a number may be numpy's or torch's
            object.__setattr__(self, name, value.item() if getattr(value, "ndim", 1) == 0 else value)
        at_least_one("max_tokens", self.max_tokens)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number and not (value is None and name != "temperature"):
                raise ValueError(f"{name} must be a number, got {value!r:.80}")
        if not 0.0 <= self.temperature <= 3.4e38:  # fp32 holds no more
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None:
            at_least_one("top_k", self.top_k)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}")
        if self.max_drafts is not None and not (type(self.max_drafts) is int and self.max_drafts >= 0):
            raise ValueError(f"max_drafts must be a whole number of at least 0, got {self.max_drafts!r:.80}")
        if self.logprobs is not None and not (type(self.logprobs) is int and 0 <= self.logprobs <= MOST_LOGPROBS):
            raise ValueError(f"logprobs must be a whole number from 0 to {MOST_LOGPROBS}, got {self.logprobs!r:.80}")
        if self.processor is not None and not callable(self.processor):
            raise ValueError(f"processor must be a callable of ids and logits, got {self.processor!r:.80}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r:.80}")
        stops, ids = self.stop_strings, self.stop_token_ids
        if ids is not None and not (isinstance(ids, list | tuple) and all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {' '.join(repr(ids).split()):.80}")
        if not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop must be a non-empty string or several, got {self.stop!r}")
        if half := next((c for s in stops for c in s if 0xD800 <= ord(c) < 0xE000), None):
            raise ValueError(f"stop holds U+{ord(half):04X}, half a character, which no text has, got {self.stop!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Those of stop."""
        several = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        return tuple(self.stop or ()) if several or self.stop is None else (self.stop,)  # type: ignore[return-value]

    def samples(self, n: int) -> list[SamplingParams]:
        """Of n completions of one prompt: if it has a seed, each has its own, and the first one has this."""
        if type(n) is not int or not 1 <= n <= MOST_SAMPLES:
            raise ValueError(f"n must be a whole number from 1 to {MOST_SAMPLES:,}, got {n!r:.80}")
        apart = 0x9E3779B97F4A7C15  # as the next seed may be that of another request
        return [self if self.seed is None else replace(self, seed=(self.seed + i * apart) % 2**63) for i in range(n)]
