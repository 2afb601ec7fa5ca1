"""Small GGUF files of every architecture, written with the library as llama.cpp's converter writes them.

Shapes: N heads, H head dim.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.helpers import random_transformers_model

Fields = Mapping[str, Any] | None
Tensors = Mapping[str, tuple[np.ndarray, Kind] | None] | None
ALPHABET = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are their own Latin-1 character
BYTES = [chr(b) if b in ALPHABET else chr(256 + n) for n, b in enumerate(sorted(range(256), key=ALPHABET.__contains__))]


def transformers_model(family: str, **changes: Any) -> Any:
    """A tiny random model of transformers, whose sizes are multiples of 32, the commonest block."""
    fields: dict[str, Any] = {
        "vocab_size": 160, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    } | changes  # fmt: skip
    return random_transformers_model(family, **fields)


def model_of(folder: Path) -> Any:
    """The part of a safetensors folder that this file needs from a model of transformers."""
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = SimpleNamespace(**raw, rope_parameters={"rope_theta": raw["rope_theta"]})
    return SimpleNamespace(config=config, state_dict=partial(load_file, folder / "model.safetensors"))


def stored(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """The matrix as blocks of this kind."""
    return gguf.quantize(np.ascontiguousarray(weight, dtype=np.float32), kind)


def fields_of(theirs: Any) -> dict[str, Any]:
    """The fields that llama.cpp's converter writes for this model; fields of the architecture without their prefix."""
    config = theirs.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        ".vocab_size": config.vocab_size, ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size, ".block_count": config.num_hidden_layers,
        ".feed_forward_length": config.intermediate_size, ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads, ".attention.key_length": head_dim,
        ".attention.value_length": head_dim, ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".rope.freq_base": config.rope_parameters["rope_theta"], ".rope.dimension_count": head_dim,
    }  # fmt: skip


def tensors_of(theirs: Any, kind: Kind) -> dict[str, tuple[np.ndarray, Kind]]:
    """The model's tensors by llama.cpp's names: matrices in blocks of this kind, all else as it is."""
    config = theirs.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture(theirs))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if architecture(theirs) == "llama" and (".q_proj." in name or ".k_proj." in name):
            n_heads = config.num_attention_heads if ".q_" in name else config.num_key_value_heads
            rotary = weight.reshape(n_heads, 2, -1, *weight.shape[1:])  # halves, neighbours in llama.cpp's llama
            weight = rotary.swapaxes(1, 2).reshape(weight.shape)
        own = kind if weight.ndim == 2 else Kind.F32
        found[names.get_name(name, (".weight", ".bias"))] = (stored(weight, own), own)
    return found


def architecture(theirs: Any) -> str:
    return "llama" if theirs.config.model_type == "mistral" else str(theirs.config.model_type)


def write_gguf(
    path: Path, theirs: Any, kind: Kind = Kind.F32, *, fields: Fields = None, tensors: Tensors = None, parts: int = 1
) -> Path:
    """Write the model, some fields or tensors changed, or left out where the change is None; -> its first file."""
    all_fields, all_tensors = fields_of(theirs) | dict(fields or {}), tensors_of(theirs, kind) | dict(tensors or {})
    return write_parts(path, architecture(theirs), all_fields, all_tensors, parts)


def write_parts(path: Path, named: str, fields: Fields, tensors: Tensors, parts: int = 1) -> Path:
    """Write a file of this architecture with these fields and tensors, but for those that are None; -> its first."""
    writer = gguf.GGUFWriter(path, named, split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    for name, value in fields.items():  # each as the kind of value that its Python type is
        key = f"{named}{name}" if name.startswith(".") else name
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                (writer.add_uint32 if 0 <= value < 2**32 else writer.add_uint64)(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                if key != "general.architecture":
                    writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def byte_pair_fields(n: int, *, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """A vocabulary of the 256 bytes, a merge and control tokens, n in all."""
    special = [f"<|{i}|>" for i in range(n - 257)]
    tokens: Sequence[str] = [*BYTES, "th", *special]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 257 + [3] * len(special),
    } | {f"tokenizer.{name.replace('__', '.')}": value for name, value in more.items()}  # fmt: skip
