"""Write a Hugging Face style Llama folder as one GGUF file, so that llama.cpp can be timed on the same weights.

Needs the `gguf` package. Matrices are written in --dtype, norms and rotary factors in fp32, as llama.cpp reads them;
of q4_0 the embedding is Q8_0, as llama.cpp's own program makes it.

Shapes: N heads, H head dim, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gpt_fast_sd.model import ModelConfig, load_model, read_config

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "q4_0": torch.float32}


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ValueError(f"{folder} holds no .safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, the handle is not a dict
                yield name, tensors.get_tensor(name)


def _add_tokenizer(writer: Any, folder: Path, config: ModelConfig) -> None:
    """Store sentencepiece pieces, scores and types, or mark the file as one with token ids only."""
    import gguf

    writer.add_vocab_size(config.vocab_size)
    if not (folder / "tokenizer.model").is_file():
        writer.add_tokenizer_model("none")
        return
    vocab = gguf.SentencePieceVocab(folder)
    pieces, scores, kinds = (list(column) for column in zip(*vocab.all_tokens(), strict=True))
    missing = config.vocab_size - len(pieces)
    if missing < 0:
        raise ValueError(f"the tokenizer has {len(pieces)} pieces, the model only {config.vocab_size} rows for them")
    pieces += [f"[unused {i}]".encode() for i in range(missing)]
    scores += [-1000.0] * missing
    kinds += [gguf.TokenType.UNUSED] * missing
    for name, value in {
        "tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": pieces, "token_scores": scores,
        "token_types": kinds, "bos_token_id": config.bos_id, "add_bos_token": config.bos_id is not None,
        "add_space_prefix": vocab.sentencepiece_tokenizer.encode("a", out_type=str)[0].startswith("\u2581"),
        "eos_token_id": config.eos_ids[0] if config.eos_ids else None,
    }.items():  # fmt: skip
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def _copy_tokenizer(writer: Any, source: Path, config: ModelConfig) -> None:
    import gguf

    writer.add_vocab_size(config.vocab_size)
    for name, field in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            kind, *of = field.types
            writer.add_key_value(name, field.contents(), kind, of[-1] if of else None)


def export_gguf(folder: Path, out: Path, dtype: str, tokenizer_of: Path | None = None) -> None:
    """Write the folder's model, with its tokenizer or that of a GGUF file; ValueError if it cannot be done."""
    import gguf

    config = read_config(folder)
    if config.qkv_bias or config.mlp_bias or config.qk_norm or config.sliding_window:
        raise ValueError(f"{folder} is not a plain Llama: only that shape is exported")
    if config.rope_scaling and (config.rope_scaling.length != 1.0 or config.rope_scaling.kind == "longrope"):
        raise ValueError(f"{folder} has YaRN or longrope, whose longer queries and keys or two lists are not exported")
    writer, file_type = gguf.GGUFWriter(out, "llama"), "ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"
    for name, value in {
        "name": folder.resolve().name, "file_type": gguf.LlamaFileType[file_type],
        "context_length": config.max_seq_len, "embedding_length": config.dim, "block_count": config.n_layers,
        "feed_forward_length": config.ffn_dim, "head_count": config.n_heads, "head_count_kv": config.n_kv_heads,
        "key_length": config.head_dim, "value_length": config.head_dim, "layer_norm_rms_eps": config.norm_eps,
        "rope_dimension_count": config.head_dim, "rope_freq_base": config.rope_theta,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    if tokenizer_of:
        _copy_tokenizer(writer, tokenizer_of, config)
    else:
        _add_tokenizer(writer, folder, config)

    def add(name: str, tensor: Tensor) -> None:
        stored = tensor.to(DTYPES[dtype] if tensor.ndim > 1 else torch.float32).contiguous()
        if stored.dtype == torch.bfloat16:  # numpy has no bfloat16: pass the raw bits and name their type
            writer.add_tensor(name, stored.view(torch.uint16).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
        elif dtype == "q4_0" and tensor.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q8_0 if name.startswith("token_embd") else gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(stored.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored.numpy())

    if config.rope_scaling and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    elif config.rope_scaling:  # llama3: llama.cpp divides each frequency by a stored factor
        plain = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)  # [H / 2]
        add("rope_freqs.weight", plain / load_model(folder).rope_freqs)

    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layers)
    for name, tensor in stored_tensors(folder):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings):
            continue
        for kind, n_heads in ((".q_proj.", config.n_heads), (".k_proj.", config.n_kv_heads)):
            if kind in name:  # Hugging Face rotates the two halves of a head, llama.cpp neighbouring pairs
                pairs = tensor.unflatten(0, (n_heads, 2, -1)).transpose(1, 2)  # [N, H/2, 2, ...]
                tensor = pairs.flatten(0, 2)  # [N * H, ...]
        known = theirs.get_name(name, try_suffixes=(".weight",))
        if known is None:
            raise ValueError(f"{folder} holds a tensor that llama.cpp has no name for: {name}")
        add(known, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
