"""Checkpoints whose weights are float8 (e4m3) with scales of their own: which are read, and why others are not.

Three kinds are: compressed-tensors' "float-quantized" with one scale for each output ("channel"), for a whole weight
("tensor") or for each block, and fbgemm_fp8, which has one for each output. Both store a weight [O, I] next to its
`weight_scale`. And fp8 in blocks, such as Qwen's of 128 x 128, whose scales are `weight_scale_inv` [O / 128, I / 128];
at the ends blocks may be smaller, and in spite of the name numbers are multiplied by it. How they would quantize
activations is not taken over: the scales of inputs are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

FLOAT8 = "F8_E4M3"  # as safetensors spells it
PRESETS = {"FP8": None, "FP8_DYNAMIC": None, "FP8_BLOCK": (128, 128)}  # of compressed-tensors: their blocks
READ = (
    "compressed-tensors float-quantized with a scale for each channel, tensor or block, fbgemm_fp8, and fp8 (e4m3) in "
    "blocks"
)
# ends of names in which other kinds keep weights: integers that are packed, codes, tables of scales
PACKED = (
    "qweight", "qzeros", "g_idx", "weight_packed", "weight_shape", "weight_zero_point", "weight_scale_inv",
    "absmax", "quant_map", "quant_state", "bitsandbytes__nf4", "bitsandbytes__fp4", "SCB", "weight_format",
    "weight_global_scale", "codebooks", "codes", "_blocks", "_scales",
)  # fmt: skip
UNUSED = ("input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale")


def is_stored_in_float8(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are float8 of a kind that is read; ValueError for any other kind."""
    found = raw.get("quantization_config")
    if found is None:
        return False
    if not isinstance(found, dict):
        raise ValueError(f"quantization_config must be an object, got {found!r:.80}")
    method = found.get("quant_method")
    if method == "fbgemm_fp8" or (method == "compressed-tensors" and _is_float_quantized(found)) or block_of(raw):
        return True
    bits = _bits(found)
    words = [str(word) for word in (method, found.get("format")) if word]
    name = f"{' '.join(' '.join(words).split()):.80}" or "of no known kind"
    blocks = f", in blocks of {found['weight_block_size']!s:.80}" if found.get("weight_block_size") else ""
    if found.get("fmt", "e4m3") != "e4m3":
        blocks += f", with fmt {found['fmt']!r:.80}"
    raise ValueError(
        f"quantization_config is {name}{f', {bits} bits' if bits else ''}{blocks}, which is not read (only {READ}); "
        f"load the unquantized checkpoint and use quantize={'int4' if bits == 4 else 'int8'!r}"
    )


def block_of(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale each, where a config.json says float8 in blocks."""
    match raw.get("quantization_config"):
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)], **rest}:
            fits = type(rows) is type(columns) is int and rows > 0 < columns and rest.get("fmt", "e4m3") == "e4m3"
            return (rows, columns) if fits else None
        case {"quant_method": "compressed-tensors"}:
            found = raw["quantization_config"]
            return next(iter(_blocks(found))) if _is_float_quantized(found) else None
    return None


def has_float8_cache(raw: Mapping[str, Any]) -> bool:
    """Whether such a config.json also wants a cache of few bits, which is for the user to ask for."""
    return bool((raw.get("quantization_config") or {}).get("kv_cache_scheme"))


def is_packed(name: str) -> bool:
    """Whether a tensor of that name is a part of a weight that is kept in some kind that is not read."""
    last = name.rpartition(".")[2]
    return any(last == end or (end.startswith("_") and last.endswith(end)) for end in PACKED)


def is_unused(name: str) -> bool:
    """Whether a tensor of that name describes activations or a cache."""
    return name.rpartition(".")[2] in UNUSED


def scale_ending(raw: Mapping[str, Any]) -> str:
    """What the scales of a weight are called behind its name."""
    return "_scale_inv" if (raw.get("quantization_config") or {}).get("quant_method") == "fp8" else "_scale"


def scale_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    """What shapes the scales of a weight [O, I] may have."""
    if block:
        return ((-(-shape[0] // block[0]), -(-shape[1] // block[1])),)
    return (shape[0], 1), (1,), (shape[0],), ()


def _is_float_quantized(found: Mapping[str, Any]) -> bool:
    sparse = _described(found, "sparsity_config").get("format", "dense")
    rotated = _described(found, "transform_config").get("config_groups")
    if found.get("format") != "float-quantized" or sparse != "dense" or rotated:
        return False
    return len(_blocks(found)) == 1


def _blocks(found: Mapping[str, Any]) -> set[tuple[int, int] | None]:
    """The blocks that have a scale each in the groups of layers, None where outputs have; more than one: not read."""
    return {each for name, group in _described(found, "config_groups").items() for each in _blocks_of(name, group)}


def _described(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside of what config.json says, empty where it says nothing; ValueError for anything else."""
    value = found.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config's {key} must be an object, got {value!r:.80}")
    return value


def _blocks_of(name: str, group: object) -> set[tuple[int, int] | None]:
    """The blocks of a group of layers, as in _blocks."""
    other = {None, (0, 0)}
    if isinstance(group, list):  # of names of layers, whose description is the group's own name
        return {PRESETS[name]} if name in PRESETS else other
    match group.get("weights") if isinstance(group, dict) else None:
        case {"type": "float" | "FLOAT", "num_bits": 8, **rest} if rest.get("symmetric", True) is True:
            strategy, block = rest.get("strategy"), rest.get("block_structure")
            if isinstance(block, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", block):
                block = [int(size) for size in block.split("x")]
            match strategy.lower() if isinstance(strategy, str) else strategy, block:
                case (("channel" | "tensor"), _):
                    return {None}
                case None, _ if rest.get("group_size") in (None, -1):  # of a tensor, or of a channel
                    return {None}
                case "block", [int(rows), int(columns)] if type(rows) is type(columns) is int and rows > 0 < columns:
                    return {(rows, columns)}
    return other


def _bits(found: Mapping[str, Any]) -> int | None:
    """The bits of a weight, if it is said somewhere."""
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if found.get(key) is True:
            return bits
    return next(_numbers(found), None)


def _numbers(found: Mapping[str, Any]) -> Iterator[int]:
    groups = _described(found, "config_groups").values()
    described = [group.get("weights") for group in groups if isinstance(group, dict)]
    for one in (found, *(weights for weights in described if isinstance(weights, dict))):
        for key in ("bits", "num_bits", "nbits", "w_bit"):
            if type(one.get(key)) is int:
                yield one[key]
