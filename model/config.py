"""The shape of a model: a frozen dataclass, read from a Hugging Face config.json or found by exact name."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeGuard

from .files.fields import COMPUTES, YARN_COMPUTES, not_neutral, say, unknown
from .files.float8 import block_of, is_stored_in_float8


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context.

    kind "linear" divides every frequency by factor (Chen et al. 2023, arXiv 2306.15595); kind "llama3" keeps the high
    frequencies, divides the low ones and blends between (Llama 3.1, arXiv 2407.21783); kind "yarn" does the same with
    another ramp, between the pairs that turn beta_fast and beta_slow times in the original context (whole pairs if
    truncate is set), and lengthens queries and keys by attention_factor (Peng et al. 2023, arXiv 2309.00071); kind
    "factors" also divides each frequency by its own entry of factors, which is how a GGUF file stores the result of
    any such rule; kind "longrope" does that alone, with factors or, for texts longer than the original context, with
    long_factors, and lengthens by attention_factor (Ding et al. 2024, arXiv 2402.13753). Which of the two is decided
    once for all texts of an engine, see Transformer.fit_texts: keys that are cached have been turned.

    Kind "dynamic" changes nothing in the trained context, and there the model's positions end. Past it transformers
    takes frequencies for the length that a step reaches, while cached keys keep those of their own steps: what comes
    next would depend on how a text was cut into steps.
    """

    kind: str
    factor: float
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_KINDS:
            raise ValueError(f"rope scaling must be {_one_of(_ROPE_KINDS)}, got {self.kind!r}")
        if not (_positive(self.factor) and self.factor >= 1.0):
            raise ValueError(f"rope scaling factor must be at least 1, got {self.factor!r}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope scaling needs low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )
        for names, found in ((("factors", "longrope"), self.factors), (("longrope",), self.long_factors)):
            if (self.kind in names) != bool(found) or not all(_positive(each) for each in found):
                raise ValueError(
                    f"rope scaling {_one_of(names)} needs positive factors, and no other kind any: {found}"
                )
        original = self.original_max_seq_len
        if not isinstance(original, int) or isinstance(original, bool) or original < 1:
            raise ValueError(f"rope scaling original_max_seq_len must be a whole number above 0, got {original!r}")
        if not (_positive(self.beta_fast) and _positive(self.beta_slow) and self.beta_fast >= self.beta_slow):
            raise ValueError(
                f"rope scaling needs beta_fast >= beta_slow > 0, got {self.beta_fast!r} and {self.beta_slow!r}"
            )
        longer = self.kind in ("yarn", "longrope")
        if self.attention_factor is not None and not (longer and _positive(self.attention_factor)):
            raise ValueError(
                "rope scaling attention_factor must be a positive number in 'yarn' or 'longrope' and None in every "
                f"other kind, got {self.attention_factor!r} in {self.kind!r}"
            )
        if self.kind == "longrope" and original < 2:
            raise ValueError("rope scaling original_max_seq_len must be at least 2 in 'longrope', got 1")

    @property
    def length(self) -> float:
        """What queries and keys are multiplied by: the attention_factor of YaRN or LongRoPE, or the papers'; else 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))
        return yarn_length(self.factor) if self.kind == "yarn" else 1.0

    def reach(self, stated: int) -> int:
        """The positions of a model whose file states this many.

        YaRN makes them at least the original length times the factor. That is how Qwen's files are used: their
        max_position_embeddings stays that of training when the scaling is added. A file that states more keeps it.
        """
        return max(stated, int(self.original_max_seq_len * self.factor)) if self.kind == "yarn" else stated


_ROPE_KINDS = ("linear", "llama3", "yarn", "dynamic", "factors", "longrope")


def yarn_length(factor: float, weight: float = 1.0) -> float:
    """How much longer YaRN makes queries and keys: 0.1 ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


MOST = 2**31 - 1  # of a size or count: what is computed of them stays far below the ends of int64


def _positive(value: object) -> TypeGuard[float]:
    """Whether it is a positive number that a float holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _one_of(names: tuple[str, ...]) -> str:
    """'a', 'b' or 'c'."""
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number that defines a Llama-like decoder; refuses impossible ones when built (ValueError)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens, up to and with its own, that a query sees
    full_layers: tuple[int, ...] = ()  # where it sees all of them in spite of a window
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary pairs), got {self.head_dim}")
        for found in (self.rope_scaling.factors, self.rope_scaling.long_factors) if self.rope_scaling else ():
            if found and len(found) != self.head_dim // 2:
                raise ValueError(f"rope scaling must have {self.head_dim // 2} factors, one per pair, got {len(found)}")
        if self.norm_eps <= 0 or self.rope_theta <= 0:
            raise ValueError(f"norm_eps and rope_theta must be positive, got {self.norm_eps} and {self.rope_theta}")
        if self.rope_scaling and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta must be above 1 if rope scaling is 'yarn', got {self.rope_theta}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 or None, got {self.sliding_window}")
        if self.full_layers and (self.sliding_window is None or min(self.full_layers) < 0):
            raise ValueError(f"full_layers must be layers of a model with a sliding_window, got {self.full_layers}")

    @property
    def group_size(self) -> int:
        """G, the number of query heads that share one kv head."""
        return self.n_heads // self.n_kv_heads

    @property
    def windows(self) -> tuple[int, ...]:
        """How many tokens, up to and with its own, a query sees in each layer; 0: all."""
        return tuple(0 if i in self.full_layers else self.sliding_window or 0 for i in range(self.n_layers))

    @property
    def n_params(self) -> int:
        """Stored parameters; tied embeddings count once."""
        attention = self.dim * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        bias = self.head_dim * (self.n_heads + 2 * self.n_kv_heads) if self.qkv_bias else 0
        bias += self.dim if self.o_bias else 0
        bias += 2 * self.ffn_dim + self.dim if self.mlp_bias else 0
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + bias + norms + 3 * self.dim * self.ffn_dim
        return self.n_layers * layer + self.dim + self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)

    def kv_bytes_per_token(self, bytes_per_element: float) -> int:
        """Bytes of keys and values that one position occupies over all layers."""
        return round(2 * self.n_layers * self.n_kv_heads * self.head_dim * bytes_per_element)

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """The shape a config.json describes; whatever this Llama cannot do exactly is refused by name (ValueError).

        A warning names fields that are not known here, see files/fields.py.

        max_seq_len is max_position_embeddings, which YaRN may extend: `RopeScaling.reach`.
        """
        try:
            config = cls._from_fields(Fields(raw))
            say(where, unknown(raw), "not known here, and ignored")
            return config
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def _from_fields(cls, fields: Fields) -> ModelConfig:
        family = fields.family()
        raw = _LEFT_OUT[family] | dict(fields.raw)
        fields = Fields(raw)
        fields.only("hidden_act", "silu" if raw.get("hidden_act") != "swish" else "swish")  # two names of one function
        mlp_biased, biased = (bool(raw.get(name)) and fields.flag(name) for name in ("mlp_bias", "attention_bias"))
        if family != "LlamaForCausalLM":
            fields.only("mlp_bias", False)
        if family in ("MistralForCausalLM", "MinistralForCausalLM"):
            fields.only("attention_bias", False)
        biased = biased and family != "Qwen2ForCausalLM"  # which has its own whatever this field says
        fields.only("partial_rotary_factor", 1.0)
        fields.only("quantization", None)  # what MLX writes
        for name in not_neutral(raw, COMPUTES):
            fields.refuse(name, " or ".join(map(repr, ("absent", *COMPUTES[name]))).replace("'absent'", "absent"))
        is_stored_in_float8(raw)  # refuses all else
        for size in block_of(raw) or ():
            Fields({"block size": size}, "quantization_config's ").whole("block size")
        window, full_layers = fields.windows(family)

        dim, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        if raw.get("head_dim") is not None or family == "Qwen3ForCausalLM":
            head_dim = fields.whole("head_dim")
        elif dim % n_heads:
            fields.refuse("hidden_size", f"a multiple of num_attention_heads ({n_heads}) if head_dim is not given")
        else:
            head_dim = dim // n_heads
        counted = raw.get("num_key_value_heads") is not None  # the first Llama files do not have it
        theta, scaling = fields.rope()
        stated = min(fields.whole("max_position_embeddings"), fields.chunk())
        return cls(
            vocab_size=fields.whole("vocab_size"),
            dim=dim,
            n_layers=fields.whole("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=fields.whole("num_key_value_heads") if counted else n_heads,
            head_dim=head_dim,
            ffn_dim=fields.whole("intermediate_size"),
            max_seq_len=scaling.reach(stated) if scaling else stated,
            norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=biased or family == "Qwen2ForCausalLM",
            o_bias=biased,
            mlp_bias=mlp_biased,
            qk_norm=family == "Qwen3ForCausalLM",
            sliding_window=window,
            full_layers=full_layers,
            bos_id=next(iter(fields.ids("bos_token_id")), None),
            eos_ids=fields.ids("eos_token_id"),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """The config.json fields of this shape: from_hugging_face gives the same shape back."""
        family = _FAMILY_OF.get((self.qkv_bias, self.o_bias, self.qk_norm))
        if family == "LlamaForCausalLM" and self.sliding_window is not None:
            family = None if self.o_bias else "MinistralForCausalLM" if self.full_layers else "MistralForCausalLM"
        if family is None or (self.mlp_bias and family != "LlamaForCausalLM"):
            raise ValueError(
                "no Hugging Face family has this shape: "
                f"qkv_bias {self.qkv_bias}, o_bias {self.o_bias}, mlp_bias {self.mlp_bias}, qk_norm {self.qk_norm}, "
                f"sliding_window {self.sliding_window}"
            )
        raw: dict[str, Any] = {
            "architectures": [family],
            "model_type": _FAMILIES[family],
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn_dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
        }
        if self.sliding_window is not None:
            raw["sliding_window"] = self.sliding_window
            if family != "MistralForCausalLM":
                raw["layer_types"] = ["sliding_attention" if one else "full_attention" for one in self.windows]
            if family in _QWEN:
                raw["use_sliding_window"] = True
        if family in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            raw["attention_bias"] = self.o_bias
        if family == "LlamaForCausalLM":
            raw["mlp_bias"] = self.mlp_bias
        if self.rope_scaling is not None:
            raw["rope_scaling"] = self._rope_fields(self.rope_scaling)
        return raw

    def _rope_fields(self, scaling: RopeScaling) -> dict[str, Any]:
        """A config.json's rope_scaling."""
        raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
        match scaling.kind:
            case "factors":
                raise ValueError("a config.json has no place for a rotary factor per frequency")
            case "llama3":
                raw |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
            case "yarn":
                reach = scaling.reach(self.max_seq_len)
                if reach > self.max_seq_len:
                    raise ValueError(f"a config.json of this YaRN means {reach:,} positions, not {self.max_seq_len:,}")
                raw |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
            case "longrope":
                raw |= {"short_factor": list(scaling.factors), "long_factor": list(scaling.long_factors)}
        raw |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
        if scaling.kind not in ("linear", "dynamic"):
            raw["original_max_position_embeddings"] = scaling.original_max_seq_len
        return raw


FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_QWEN = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
# family -> what transformers takes where its config.json leaves a field out. Its own sizes are not taken: no file means
# them; and tokens that begin and end a text are the tokenizer's then.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    family: {"rms_norm_eps": 1e-6, "max_position_embeddings": positions, "sliding_window": 4096, **more}
    for family, positions, more in (
        ("LlamaForCausalLM", 2048, {}),
        *((name, 131072, {"num_key_value_heads": 8}) for name in ("MistralForCausalLM", "MinistralForCausalLM")),
        ("Qwen2ForCausalLM", 32768, {"num_key_value_heads": 32, "max_window_layers": 28}),
        ("Qwen3ForCausalLM", 32768, {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28}),
    )
}
_FAMILY_OF = {  # (qkv_bias, o_bias, qk_norm)
    (False, False, False): "LlamaForCausalLM",
    (True, True, False): "LlamaForCausalLM",
    (True, False, False): "Qwen2ForCausalLM",
    (False, False, True): "Qwen3ForCausalLM",
    (True, True, True): "Qwen3ForCausalLM",
}


def stored_dtype(raw: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json gives for its weights, such as "bfloat16"; None if it gives none."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None


def token_ids(raw: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    """The ids of a field that holds none, one or a list."""
    try:
        return Fields(raw).ids(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class Fields:
    """The fields of a config.json or a header; each getter returns the kind of value it is named after, or refuses."""

    def __init__(self, raw: Mapping[str, Any], inside: str = "") -> None:
        self.raw, self.inside = raw, inside

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """ValueError that says what the field holds and what it must be."""
        got = repr(self.raw[name]) if name in self.raw else "missing"
        got = got if len(got) <= 100 else f"{got[:100]} ..."
        raise ValueError(f"{self.inside}{name} is {got}, but it must be {allowed}")

    def only(self, name: str, allowed: object) -> None:
        """Refuse every value except this one and None."""
        if self.raw.get(name) not in (None, allowed):
            self.refuse(name, f"{allowed!r}" if allowed is not None else "absent: only float weights can be read")

    def whole(self, name: str, least: int = 1) -> int:
        """A whole number from the least to MOST."""
        value = self.raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
            self.refuse(name, f"a whole number of at least {least} and at most {MOST:,}")
        return value

    def number(self, name: str) -> float:
        """A positive number."""
        value = self.raw.get(name)
        if not _positive(value):
            self.refuse(name, "a positive number")
        return float(value)

    def number_or(self, name: str, default: float) -> float:
        """A positive number, or the default if it is absent or 0."""
        value = self.raw.get(name)
        absent = value is None or (value == 0 and not isinstance(value, bool))
        return default if absent else self.number(name)

    def numbers_of(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self.raw.get(name)
        if not isinstance(value, list) or not value or not all(_positive(each) for each in value):
            self.refuse(name, "a list of positive numbers")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; the default if it is absent."""
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def family(self) -> str:
        """The architecture; where a file names none, that of its model_type."""
        known = {kind: family for family, kind in _FAMILIES.items()}
        kind = self.raw.get("model_type")
        names = self.raw.get("architectures") or [known.get(kind) if isinstance(kind, str) else None]
        if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_FAMILIES):
            self.refuse("architectures", f"one of {', '.join(_FAMILIES)}")
        return str(names[0])

    def windows(self, family: str) -> tuple[int | None, tuple[int, ...]]:
        """The sliding window, None if there is none, and the layers that see all in spite of it.

        As transformers reads them: of Llama no layer has one, of Mistral all do, whatever layer_types says; of others
        those that it names, or all, of Qwen from max_window_layers on, and only if use_sliding_window is set.
        """
        n, kinds = self.whole("num_hidden_layers"), self.raw.get("layer_types")
        if family == "LlamaForCausalLM":
            self.only("use_sliding_window", False)
        used = self.flag("use_sliding_window") if family in _QWEN else family != "LlamaForCausalLM"
        window = self.whole("sliding_window") if used and self.raw["sliding_window"] is not None else None
        if kinds is None:
            first = self.whole("max_window_layers", 0) if window is not None and family in _QWEN else 0
            return (None, ()) if window is None or first >= n else (window, tuple(range(first)))
        known = (FULL,) if window is None else (SLIDING,) if family == "MistralForCausalLM" else (FULL, SLIDING)
        if not isinstance(kinds, list) or len(kinds) != n or any(kind not in known for kind in kinds):
            names = " and ".join(map(repr, known)) + (" where no sliding_window is used" if window is None else "")
            self.refuse("layer_types", f"a list of {n}, one a layer, of {names} in a {family}")
        full = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
        return (None, ()) if len(full) == n else (window, full)

    def chunk(self) -> int:
        """Positions up to which dual chunk attention (Qwen2.5-1M, arXiv 2501.15383) is plain attention."""
        raw = self.raw.get("dual_chunk_attention_config")
        if raw is None:
            return MOST
        if not isinstance(raw, dict):
            self.refuse("dual_chunk_attention_config", "absent or a set of values")
        inner = Fields(raw, "dual_chunk_attention_config: ")
        size, local = inner.whole("chunk_size"), inner.whole("local_size")
        return size - local if local < size else inner.refuse("local_size", f"below chunk_size, {size}")

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: none, one or a list of them."""
        value = self.raw.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
            self.refuse(name, "a token id or a list of them")
        return tuple(found)

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Base and scaling: both in rope_parameters (transformers 5), or in rope_theta and rope_scaling (before)."""
        spelling = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        raw = self.raw.get(spelling) or {}
        original = "original_max_position_embeddings"  # if there are two, transformers prefers the outer one
        if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
            self.refuse(spelling, "one set of values for all layers")
        outside = {original: self.raw[original]} if self.raw.get(original) is not None else {}
        inner = Fields({"rope_theta": self.raw.get("rope_theta", 10000.0), **raw, **outside}, f"{spelling}: ")
        inner.only("partial_rotary_factor", 1.0)
        theta = inner.number("rope_theta")
        key = "rope_type" if "rope_type" in raw else "type"
        match raw.get(key, "default"):
            case "default":
                return theta, None
            case "linear" | "dynamic" as kind:
                return theta, RopeScaling(kind=kind, factor=inner.number("factor"))
            case "llama3":
                return theta, RopeScaling(
                    kind="llama3",
                    factor=inner.number("factor"),
                    low_freq_factor=inner.number("low_freq_factor"),
                    high_freq_factor=inner.number("high_freq_factor"),
                    original_max_seq_len=inner.whole(original),
                )
            case "yarn":
                factor = inner.number("factor")
                for name in not_neutral(inner.raw, YARN_COMPUTES):
                    inner.refuse(name, f"absent or {YARN_COMPUTES[name][0]!r}")
                return theta, RopeScaling(
                    kind="yarn",
                    factor=factor,
                    original_max_seq_len=inner.whole(original),
                    beta_fast=inner.number_or("beta_fast", 32.0),
                    beta_slow=inner.number_or("beta_slow", 1.0),
                    truncate=inner.flag("truncate", True),
                    attention_factor=inner.attention_factor(factor),
                )
            case "longrope":
                positions = self.whole("max_position_embeddings")
                whole = inner.whole(original) if original in inner.raw else positions
                ratio = max(1.0, positions / whole)  # both as transformers has them
                stated = inner.raw.get("attention_factor")
                scaling = RopeScaling(
                    kind="longrope",
                    factor=inner.number_or("factor", ratio),
                    factors=inner.numbers_of("short_factor"),
                    long_factors=inner.numbers_of("long_factor"),
                    original_max_seq_len=whole,
                    attention_factor=None if stated is None else inner.number("attention_factor"),
                )
                for name in ("short_mscale", "long_mscale"):  # by which vLLM computes, and transformers does not
                    if inner.raw.get(name) is not None and not math.isclose(inner.number(name), scaling.length):
                        inner.refuse(name, f"absent or {scaling.length!r}")
                return theta, scaling
            case _:
                inner.refuse(key, "'default', 'linear', 'llama3', 'yarn', 'longrope' or 'dynamic'")

    def attention_factor(self, factor: float) -> float | None:
        """YaRN's, as transformers finds it: the field, else by mscale and mscale_all_dim if both are present.

        Or attn_factor times the paper's length, as vLLM reads it and DeepSeek's files mean it.
        """
        if self.raw.get("attn_factor") is not None:
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                if self.raw.get(name) is not None:
                    self.refuse(name, "absent beside attn_factor")
            return self.number("attn_factor") * yarn_length(factor)
        if self.raw.get("attention_factor") is not None:
            return self.number("attention_factor")
        scale, scale_all = self.number_or("mscale", 0.0), self.number_or("mscale_all_dim", 0.0)
        return yarn_length(factor, scale) / yarn_length(factor, scale_all) if scale and scale_all else None


_LLAMA_3 = ModelConfig(
    vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=14336,
    max_seq_len=8192, rope_theta=500000.0, bos_id=128000, eos_ids=(128001,),
)  # fmt: skip
_LLAMA_3_1 = replace(_LLAMA_3, max_seq_len=131072, rope_scaling=RopeScaling(kind="llama3", factor=8.0))
_LLAMA_3_2 = replace(_LLAMA_3_1, tie_embeddings=True, rope_scaling=RopeScaling(kind="llama3", factor=32.0))
_LLAMA_2 = ModelConfig(
    vocab_size=32000, dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, ffn_dim=11008,
    max_seq_len=4096, bos_id=1, eos_ids=(2,),
)  # fmt: skip
_TINY_LLAMA = replace(_LLAMA_2, dim=2048, n_layers=22, n_kv_heads=4, head_dim=64, ffn_dim=5632, max_seq_len=2048)
_MISTRAL = replace(_LLAMA_2, n_kv_heads=8, ffn_dim=14336, max_seq_len=32768)
_QWEN_2_5 = ModelConfig(
    vocab_size=152064, dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128, ffn_dim=18944,
    max_seq_len=131072, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, bos_id=151643, eos_ids=(151643,),
)  # fmt: skip
_QWEN_2_5_SMALL = replace(_QWEN_2_5, vocab_size=151936, n_kv_heads=2, tie_embeddings=True)
_QWEN_2_5_LARGE = replace(_QWEN_2_5, dim=5120, n_heads=40, n_kv_heads=8, norm_eps=1e-5)
_QWEN_3 = ModelConfig(
    vocab_size=151936, dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=12288,
    max_seq_len=40960, norm_eps=1e-6, rope_theta=1e6, qk_norm=True, bos_id=151643, eos_ids=(151645,),
)  # fmt: skip
_QWEN_3_SMALL = replace(_QWEN_3, n_layers=28, n_heads=16, tie_embeddings=True)
_SMOLLM_2 = ModelConfig(
    vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, ffn_dim=1536,
    max_seq_len=8192, rope_theta=100000.0, tie_embeddings=True, bos_id=0, eos_ids=(0,),
)  # fmt: skip

PRESETS = {
    "meta-llama/Llama-2-7b-hf": _LLAMA_2,
    "meta-llama/Llama-2-13b-hf": replace(_LLAMA_2, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824),
    "meta-llama/Llama-2-70b-hf": replace(_LLAMA_2, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "NousResearch/Yarn-Llama-2-7b-128k": replace(
        _LLAMA_2, max_seq_len=131072, rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_max_seq_len=4096)
    ),
    "JackFram/llama-68m": replace(
        _LLAMA_2, dim=768, n_layers=2, n_heads=12, n_kv_heads=12, head_dim=64, ffn_dim=3072, max_seq_len=2048
    ),
    "togethercomputer/LLaMA-2-7B-32K": replace(
        _LLAMA_2, max_seq_len=32768, rope_scaling=RopeScaling(kind="linear", factor=8.0)
    ),
    "meta-llama/Meta-Llama-3-8B": _LLAMA_3,
    "meta-llama/Meta-Llama-3-70B": replace(_LLAMA_3, dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1,
    "meta-llama/Llama-3.1-70B": replace(_LLAMA_3_1, dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "meta-llama/Llama-3.2-1B": replace(_LLAMA_3_2, dim=2048, n_layers=16, head_dim=64, ffn_dim=8192),
    "meta-llama/Llama-3.2-3B": replace(_LLAMA_3_2, dim=3072, n_layers=28, n_heads=24, ffn_dim=8192),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": _TINY_LLAMA,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _TINY_LLAMA,
    "TinyLlama/TinyLlama_v1.1": _TINY_LLAMA,
    "mistralai/Mistral-7B-v0.1": replace(_MISTRAL, sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": replace(_MISTRAL, vocab_size=32768, rope_theta=1e6),
    "Qwen/Qwen2.5-0.5B": replace(
        _QWEN_2_5_SMALL, dim=896, n_layers=24, n_heads=14, head_dim=64, ffn_dim=4864, max_seq_len=32768
    ),
    "Qwen/Qwen2.5-1.5B": replace(_QWEN_2_5_SMALL, dim=1536, n_heads=12, ffn_dim=8960),
    "Qwen/Qwen2.5-3B": replace(_QWEN_2_5_SMALL, dim=2048, n_layers=36, n_heads=16, ffn_dim=11008, max_seq_len=32768),
    "Qwen/Qwen2.5-7B": _QWEN_2_5,
    "Qwen/Qwen2.5-14B": replace(_QWEN_2_5_LARGE, n_layers=48, ffn_dim=13824),
    "Qwen/Qwen2.5-32B": replace(_QWEN_2_5_LARGE, n_layers=64, ffn_dim=27648),
    "Qwen/Qwen2.5-72B": replace(_QWEN_2_5_LARGE, dim=8192, n_layers=80, n_heads=64, ffn_dim=29568),
    "Qwen/Qwen3-0.6B": replace(_QWEN_3_SMALL, dim=1024, ffn_dim=3072),
    "Qwen/Qwen3-1.7B": replace(_QWEN_3_SMALL, dim=2048, ffn_dim=6144),
    "Qwen/Qwen3-4B": replace(_QWEN_3, dim=2560, ffn_dim=9728, tie_embeddings=True),
    "Qwen/Qwen3-8B": _QWEN_3,
    "Qwen/Qwen3-14B": replace(_QWEN_3, dim=5120, n_layers=40, n_heads=40, ffn_dim=17408),
    "Qwen/Qwen3-32B": replace(_QWEN_3, dim=5120, n_layers=64, n_heads=64, ffn_dim=25600),
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM_2,
    "HuggingFaceTB/SmolLM2-360M": replace(_SMOLLM_2, dim=960, n_layers=32, n_heads=15, n_kv_heads=5, ffn_dim=2560),
    "HuggingFaceTB/SmolLM2-1.7B": replace(
        _SMOLLM_2, dim=2048, n_layers=24, n_heads=32, n_kv_heads=32, ffn_dim=8192, rope_theta=130000.0
    ),
    "01-ai/Yi-6B": replace(_LLAMA_2, vocab_size=64000, n_kv_heads=4, rope_theta=5e6),
    "01-ai/Yi-1.5-6B": replace(_LLAMA_2, vocab_size=64000, n_kv_heads=4, rope_theta=5e6),
    "01-ai/Yi-1.5-34B": replace(
        _LLAMA_2, vocab_size=64000, dim=7168, n_layers=60, n_heads=56, n_kv_heads=8, ffn_dim=20480, rope_theta=5e6
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The published shape of a model, found by its exact hub name."""
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]
