"""Linears with int4 weights, in blocks and for CUDA in tiles: a third of bf16's bytes to read, and products of bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import Int4, dequantize_blocks, int4_linear, power_between, quantize_blocks
from .ops.int4_tiles import GROUP, TILE, Int4Tiles, dequantize_tiles, int4_tiles_linear


class Int4Linear(nn.Linear):
    """int4 weights in blocks of 32 inputs of an output; products are those of the weights that they stand for.

    What is saved and loaded of it is a weight in the dtype that it was made from.
    """

    blocks: nn.Parameter  # fp16 [O, I / 32, 2]
    scale: nn.Parameter  # fp32 [O], powers of two
    made_from: torch.dtype

    def __init__(self, held: Int4, bias: nn.Parameter | None, made_from: torch.dtype) -> None:
        """Hold a weight [O, I] that was of that dtype; the bias is shared."""
        with torch.device("meta"):
            super().__init__(2 * held.numbers.shape[1], len(held.numbers), bias=False)
        self.weight, self.blocks, self.scale = (nn.Parameter(x, requires_grad=False) for x in held)
        self.register_parameter("bias", bias)
        self.made_from, self.training = made_from, False

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return int4_linear(x, self.held, self.bias)

    @property
    def held(self) -> Int4:
        """The weight as it is kept."""
        return Int4(self.weight, self.blocks, self.scale)

    def in_order(self) -> Int4:
        """The weight as its outputs and inputs are numbered."""
        return Int4(*(part.detach() for part in self.held))

    def arranged(self, held: Int4) -> Int4:
        """Such a weight in the order in which this keeps its own."""
        return held

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("blocks", "scale"):
            del destination[f"{prefix}{name}"]
        destination[f"{prefix}weight"] = dequantize_blocks(self.in_order(), self.made_from)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == (self.out_features, self.in_features):
            held = self.arranged(quantize_blocks(state_dict[name].to(self.made_from)))
            own = dict(zip(("weight", "blocks", "scale"), held, strict=True))
            state_dict = {**state_dict, **{f"{prefix}{kind}": value for kind, value in own.items()}}
        super()._load_from_state_dict(state_dict, prefix, *args)


class Int4TilesLinear(nn.Linear):
    """int4 weights in groups of 128 inputs and tiles of 64 outputs, for CUDA. Saved and loaded is a bf16 weight."""

    scale_and_zero: nn.Parameter  # bf16 [I / 128, O, 2]
    ones: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, quantized: Callable[[Tensor], Int4Tiles]) -> None:
        """Quantize a weight [O, I]; the bias is shared. quantized: how."""
        held = quantized(weight)
        with torch.device("meta"):
            super().__init__(GROUP * held.numbers.shape[1], TILE * len(held.numbers), bias=False)
        self.weight, self.scale_and_zero = (nn.Parameter(x, requires_grad=False) for x in held)
        self.register_parameter("bias", bias)
        # kept: to make it would be a launch
        self.register_buffer("ones", weight.new_ones(TILE, GROUP, dtype=torch.bfloat16), persistent=False)
        self.quantized, self.training = quantized, False

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return int4_tiles_linear(x, self.held, self.ones, self.bias)

    @property
    def held(self) -> Int4Tiles:
        """The weight as it is kept."""
        return Int4Tiles(self.weight, self.scale_and_zero)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}scale_and_zero"]
        destination[f"{prefix}weight"] = dequantize_tiles(Int4Tiles(*(part.detach() for part in self.held)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == (self.out_features, self.in_features):
            numbers, scales = self.quantized(state_dict[name].to(self.weight.device, torch.bfloat16))
            state_dict = {**state_dict, name: numbers, f"{prefix}scale_and_zero": scales}
        super()._load_from_state_dict(state_dict, prefix, *args)


def int4_from(weight: Tensor, parameter: Tensor) -> Int4:
    """A weight [O, I] in blocks: those that the parameter was read from, if they are still that weight, or the nearest.

    A row may have been multiplied by a power of two since, see equalize_keys.
    """
    read = getattr(parameter, "in_blocks", None)
    stored = read() if read else None
    if stored is not None:
        numbers, blocks = (part.to(weight.device) for part in stored)
        kept = Int4(numbers, blocks, torch.ones(len(weight), device=weight.device))
        power = power_between(kept, weight)
        if power is not None:
            return kept._replace(power=power)
    return quantize_blocks(weight)
