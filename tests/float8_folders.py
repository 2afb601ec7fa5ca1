"""Tiny folders whose weights are stored in float8, as tools of others write them; and what other kinds say.

Shapes: O x I a weight.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_fast_sd.model import ModelConfig, save_hugging_face
from tests.helpers import tiny_config, tiny_model

Scaled = Callable[[Tensor], Tensor]  # of a weight [O, I]: what its numbers stand for, in the shape that is stored

HELD = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "dynamic": False, "actorder": None}


def by_channel(weight: Tensor) -> Tensor:
    """[O, 1]"""
    return weight.float().abs().amax(1, keepdim=True) / 448


def by_tensor(weight: Tensor) -> Tensor:
    """[1]"""
    return weight.float().abs().amax().view(1) / 448


def compressed_tensors(strategy: str | None = "channel", block: Any = None, **changes: Any) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    activations = {**HELD, "strategy": "token", "dynamic": True}
    weights = {**HELD, "strategy": strategy, "block_structure": block}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": None, "sparsity_config": {},
    } | changes  # fmt: skip


def by_block(weight: Tensor) -> Tensor:
    """[O / 16, I / 24], rounded up: of blocks that end inside heads, the last ones smaller."""
    height, width = -(-weight.shape[0] // 16), -(-weight.shape[1] // 24)
    blocks = [[part.float().abs().amax() for part in rows.split(24, 1)] for rows in weight.split(16)]
    return torch.tensor(blocks).view(height, width) / 448


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 24]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}

# kind -> what config.json says, and how weights are scaled
READ: Mapping[str, tuple[dict[str, Any], Scaled]] = {
    "channel": (compressed_tensors(), by_channel),
    "channel in bf16": (compressed_tensors("CHANNEL"), lambda weight: by_channel(weight).bfloat16()),
    "tensor": (compressed_tensors("tensor"), by_tensor),
    "tensor without dims": (compressed_tensors(None), lambda weight: by_tensor(weight)[0]),
    "preset": (compressed_tensors(config_groups={"FP8_DYNAMIC": ["Linear"]}), by_channel),
    "fbgemm_fp8": (FBGEMM, by_channel),
    "blocks": (BLOCKS, by_block),
    "compressed blocks": (compressed_tensors("block", [16, 24]), by_block),
    "compressed blocks, in a text": (compressed_tensors("block", "16x24"), by_block),
    "blocks in bf16": (BLOCKS, lambda weight: by_block(weight).bfloat16()),
}


def _group(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {**HELD, **weights}}}


# what config.json says -> how the refusal names it
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "gptq, 4 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, "awq, 4 bits"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes, 4 bits"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
    ({"quant_method": "hqq", "quant_config": {}}, "hqq"),
    ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "mxfp4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
    (BLOCKS | {"weight_block_size": [0, 128]}, r"fp8, in blocks of \[0, 128\]"),
    (BLOCKS | {"weight_block_size": [128, True]}, r"fp8, in blocks of \[128, True\]"),
    (BLOCKS | {"fmt": "e5m2"}, r"fp8, in blocks of \[16, 24\], with fmt 'e5m2'"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
    (compressed_tensors(format="pack-quantized", config_groups=_group(type="int", num_bits=4, strategy="group")),
     "compressed-tensors pack-quantized, 4 bits"),
    (compressed_tensors(format="int-quantized", config_groups=_group(type="int", strategy="channel")),
     "compressed-tensors int-quantized, 8 bits"),
    (compressed_tensors("block", "128x0"), "compressed-tensors float-quantized, 8 bits"),
    (compressed_tensors(config_groups=_group(strategy="channel") | {"FP8_BLOCK": ["mlp"]}), "float-quantized, 8 bits"),
    (compressed_tensors(config_groups=_group(strategy="channel", symmetric=False)), "float-quantized, 8 bits"),
    (compressed_tensors(config_groups=_group(strategy=None, group_size=128)), "float-quantized, 8 bits"),
    (compressed_tensors(config_groups={"W8A8": ["Linear"]}), "compressed-tensors float-quantized"),
    (compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}), "float-quantized, 8 bits"),
    (compressed_tensors(transform_config={"config_groups": {"R1": {}}}), "float-quantized, 8 bits"),
    ({"bits": 4}, "of no known kind, 4 bits"),
)  # fmt: skip


def save_float8(
    folder: Path, kind: str = "channel", *, config: ModelConfig | None = None, plain: Collection[str] = ("lm_head",),
    extra: Mapping[str, Tensor] | None = None, **changes: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Write a model of float8 linears -> the weights that they stand for, and all else, fp32 by Hugging Face's names.

    plain: parts of names of what stays bf16. extra: further tensors. changes: of quantization_config.
    """
    said, scaled = READ[kind]
    save_hugging_face(tiny_model(config or tiny_config(), dtype=torch.bfloat16), folder, dtype=torch.bfloat16)
    stored, meant = load_file(folder / "model.safetensors"), {}
    for name, weight in list(stored.items()):
        meant[name] = weight.float()
        if not name.endswith("_proj.weight") or any(part in name for part in plain):
            continue
        scale = scaled(weight)
        each = scale.float()  # of each number, or what broadcasts to it
        for dim, size in enumerate((16, 24) if "blocks" in kind else ()):
            each = each.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        stored[name] = (weight.float() / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale{'_inv' if 'weight_block_size' in said else ''}"] = scale
        meant[name] = stored[name].float() * each
    save_file(stored | dict(extra or {}), folder / "model.safetensors")
    describe(folder, said | changes)
    return meant


def describe(folder: Path, said: dict[str, Any] | None) -> None:
    """Let config.json say this of its quantization."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
