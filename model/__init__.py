"""A Llama that knows nothing of ranks, quantization or speculation."""

from .attention import SPLIT, attend_reference
from .cache import KV, CausalSelf, FullKV, KVCache
from .checkpoint import (
    CheckpointError,
    Weights,
    load_model,
    name_table,
    read_config,
    read_json,
    resolve_model,
    save_hugging_face,
)
from .config import PRESETS, ModelConfig, RopeScaling, preset, stored_dtype
from .llama import Transformer
from .tokenizer import StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "KV",
    "PRESETS",
    "SPLIT",
    "CausalSelf",
    "CheckpointError",
    "FullKV",
    "KVCache",
    "ModelConfig",
    "RopeScaling",
    "StreamDecoder",
    "Tokenizer",
    "Transformer",
    "Weights",
    "attend_reference",
    "load_model",
    "load_tokenizer",
    "name_table",
    "preset",
    "read_config",
    "read_json",
    "resolve_model",
    "save_hugging_face",
    "stored_dtype",
]
