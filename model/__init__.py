"""A Llama that knows nothing of ranks, quantization or speculation.

It exports `ModelConfig`, read from a config.json or found in `PRESETS`; `Transformer`, whose one forward serves
prefill, decode, verify and draft alike, because what attends is its argument, a `KV`; `KVCache`, static keys and
values, a `CacheLayer` for each layer; checkpoints read as Hugging Face or, in a GGUF file, llama.cpp stores them
(`load_model`, `save_hugging_face`); and sentencepiece, tokenizer.json and tiktoken behind one `Tokenizer`.
"""

from .buffers import HugePageArena
from .cache import FORMATS, KV, SPLIT, CacheFormat, CacheLayer, CausalSelf, Entries, KVCache, as_int8, as_planes
from .config import PRESETS, ModelConfig, RopeScaling, preset, stored_dtype
from .files.checkpoint import (
    Weights,
    load_model,
    name_table,
    read_config,
    read_stored_dtype,
    read_stored_float8,
    save_hugging_face,
)
from .files.hub import find_downloaded, resolve_model
from .files.loaded import config_of_loaded, share_model
from .files.reading import CheckpointError, gguf_parts, parse_json, read_json
from .files.tokenizer import StreamDecoder, Tokenizer, difference, load_tokenizer
from .llama import Attention, Block, FeedForward, RMSNorm, Transformer
from .rope import apply_rope, rope_cos_sin, rope_frequencies

__all__ = [
    "FORMATS",
    "KV",
    "PRESETS",
    "SPLIT",
    "Attention",
    "Block",
    "CacheFormat",
    "CacheLayer",
    "CausalSelf",
    "CheckpointError",
    "Entries",
    "FeedForward",
    "HugePageArena",
    "KVCache",
    "ModelConfig",
    "RMSNorm",
    "RopeScaling",
    "StreamDecoder",
    "Tokenizer",
    "Transformer",
    "Weights",
    "apply_rope",
    "as_int8",
    "as_planes",
    "config_of_loaded",
    "difference",
    "find_downloaded",
    "gguf_parts",
    "load_model",
    "load_tokenizer",
    "name_table",
    "parse_json",
    "preset",
    "read_config",
    "read_json",
    "read_stored_dtype",
    "read_stored_float8",
    "resolve_model",
    "rope_cos_sin",
    "rope_frequencies",
    "save_hugging_face",
    "share_model",
    "stored_dtype",
]
