"""A config.json as the hub has it gives its shape, or one sentence; unknown fields that change nothing are harmless."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt_fast_sd.model import CheckpointError, ModelConfig, RopeScaling, preset, read_config, read_stored_dtype

QWEN_2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN_3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
    "intermediate_size": 28672, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
SMOLLM_2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
LLAMA_2_32K: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"},
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 32768, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "type": "linear"}, "tie_word_embeddings": False, "torch_dtype": "float16",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": None, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 32768,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_READ = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32768)
INSTRUCT_2_5 = replace(preset("Qwen/Qwen2.5-7B"), max_seq_len=32768, eos_ids=(151645,))

# What a folder holds: config.json, generation_config.json; and what is read of it.
READ: dict[str, tuple[dict[str, Any], dict[str, Any] | None, ModelConfig, str | None]] = {
    "Qwen2.5-7B-Instruct": (
        QWEN_2_5, {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.7},
        replace(INSTRUCT_2_5, eos_ids=(151645, 151643)), "bfloat16",
    ),
    "the same with YaRN, as its card says to add it": (
        QWEN_2_5 | {"rope_scaling": YARN}, None,
        replace(INSTRUCT_2_5, max_seq_len=131072, rope_scaling=YARN_READ), "bfloat16",
    ),
    "the same saved by transformers 5": (
        {key: value for key, value in QWEN_2_5.items() if key not in ("rope_theta", "torch_dtype")}
        | {
            "dtype": "bfloat16", "layer_types": ["full_attention"] * 28, "pad_token_id": None, "sliding_window": None,
            "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1000000.0}, "transformers_version": "5.17.0",
        },
        None, replace(INSTRUCT_2_5, max_seq_len=131072, rope_scaling=YARN_READ), "bfloat16",
    ),
    "QwQ-32B's first file, whose window begins behind its last layer": (
        QWEN_2_5
        | {
            "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 40960, "max_window_layers": 64,
            "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "sliding_window": 40960, "use_sliding_window": True,
        },
        None, replace(preset("Qwen/Qwen2.5-32B"), max_seq_len=40960, eos_ids=(151645,)), "bfloat16",
    ),
    "Qwen3-0.6B": (
        QWEN_3, {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "top_k": 20},
        replace(preset("Qwen/Qwen3-0.6B"), eos_ids=(151645, 151643)), "bfloat16",
    ),
    "Llama-3.1-70B-Instruct, whose EOS is a list": (
        LLAMA_3_1, {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009]},
        replace(preset("meta-llama/Llama-3.1-70B"), eos_ids=(128001, 128008, 128009)), "bfloat16",
    ),
    "Llama-3.2-1B, tied": (
        LLAMA_3_1
        | {
            "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
            "num_attention_heads": 32, "num_hidden_layers": 16, "tie_word_embeddings": True,
            "rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
        },
        None, preset("meta-llama/Llama-3.2-1B"), "bfloat16",
    ),
    "SmolLM2-135M, with fields of other programs": (SMOLLM_2, None, preset("HuggingFaceTB/SmolLM2-135M"), "bfloat16"),
    "TinyLlama, without a head_dim": (
        TINY_LLAMA, {"bos_token_id": 1, "eos_token_id": 2, "max_length": 2048, "pad_token_id": 0},
        preset("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), "bfloat16",
    ),
    "LLaMA-2-7B-32K, with code of its own": (LLAMA_2_32K, None, preset("togethercomputer/LLaMA-2-7B-32K"), "float16"),
    "Mistral-7B-v0.3, whose window and head_dim are null": (
        MISTRAL, None, preset("mistralai/Mistral-7B-v0.3"), "bfloat16",
    ),
    "Yi-6B": (
        TINY_LLAMA
        | {
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_hidden_layers": 32,
            "rope_theta": 5000000.0, "vocab_size": 64000,
        },
        None, preset("01-ai/Yi-6B"), "bfloat16",
    ),
    "a llama of 2023, without most fields": (
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-05,
            "vocab_size": 32000, "max_sequence_length": 2048, "_name_or_path": "/scratch/llama-2",
        },
        None, replace(preset("meta-llama/Llama-2-7b-hf"), bos_id=None, eos_ids=()), None,
    ),
    "empty dictionaries and nulls": (
        TINY_LLAMA | {"rope_scaling": {}, "rope_parameters": None, "quantization_config": None, "layer_types": None},
        {}, preset("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), "bfloat16",
    ),
}  # fmt: skip

# Beside what test_config.py refuses.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ": (
        QWEN_2_5 | {"quantization_config": {"bits": 4, "group_size": 128, "quant_method": "awq", "zero_point": True}},
        "quantization_config is awq, 4 bits, which is not read (only compressed-tensors float-quantized with a scale "
        "for each channel or tensor, and fbgemm_fp8); load the unquantized checkpoint and use quantize='int4'",
    ),
    "MLX": (
        QWEN_3 | {"quantization": {"group_size": 64, "bits": 4}},
        "quantization is {'group_size': 64, 'bits': 4}, but it must be absent: only float weights can be read",
    ),
    "experts": ({**QWEN_3, "architectures": ["Qwen3MoeForCausalLM"]}, "architectures is ['Qwen3MoeForCausalLM'], but"),
    "a window in some layers": (
        QWEN_2_5 | {"use_sliding_window": True, "max_window_layers": 21},
        "use_sliding_window is True, but it must be False",
    ),
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return folder


@pytest.mark.parametrize("name", READ)
def test_a_folder_of_the_hub_gives_its_shape(name: str, tmp_path: Path) -> None:
    config, generation, expected, dtype = READ[name]
    folder = write(tmp_path, config, generation)
    assert read_config(folder) == expected
    assert read_stored_dtype(folder) == dtype


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_of_the_hub_that_is_not_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, says = REFUSED[name]
    with pytest.raises(CheckpointError, match=re.escape(f"config.json: {says}")) as refusal:
        read_config(write(tmp_path, config, None))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", READ)
def test_transformers_reads_the_same_of_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, generation, expected, _ = READ[name]
    raw = config if "model_type" in config else config | {"model_type": "llama"}
    theirs = transformers.AutoConfig.from_pretrained(write(tmp_path, raw, generation), trust_remote_code=False)
    rope, scaling = theirs.rope_parameters, expected.rope_scaling
    assert rope["rope_theta"] == expected.rope_theta
    assert rope.get("rope_type") == (scaling.kind if scaling else "default")
    if scaling:
        assert rope["factor"] == scaling.factor
    assert set(getattr(theirs, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    ours = (expected.head_dim, expected.n_kv_heads, expected.tie_embeddings, expected.norm_eps)
    assert ours == (head_dim, theirs.num_key_value_heads, theirs.tie_word_embeddings, theirs.rms_norm_eps)
