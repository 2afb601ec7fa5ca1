"""A Linear with int8 weights: half the bytes of bf16 to read, and products of integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import int8_linear, quantize_rows


class Int8Linear(nn.Linear):
    """int8 weights with one scale for each output; each row of activations becomes integers with a scale of its own.

    What is saved and loaded of it is a weight in the dtype that it was made from.
    """

    scale: nn.Parameter  # fp32 [O]
    made_from: torch.dtype

    def __init__(
        self,
        weight: Tensor,
        bias: nn.Parameter | None,
        scale: Tensor | None = None,
        made_from: torch.dtype | None = None,
    ) -> None:
        """Quantize weight [O, I]; the bias is shared. scale: of a weight that is quantized already, of that dtype."""
        with torch.device("meta"):
            super().__init__(weight.shape[1], weight.shape[0], bias=False)
        held = self.quantized(weight.detach()) if scale is None else (weight, scale)
        self.weight, self.scale = (nn.Parameter(x, requires_grad=False) for x in held)
        self.register_parameter("bias", bias)
        self.made_from, self.training = made_from or weight.dtype, False

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See quantize_rows."""
        return quantize_rows(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return int8_linear(x, self.weight, self.scale, self.bias)

    def in_order(self) -> Tensor:
        """The weight as its outputs and inputs are numbered: int8 [O, I]."""
        return self.weight.detach()

    def arranged(self, weight: Tensor) -> Tensor:
        """Such a weight in the order in which this holds its own."""
        return weight

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scale = destination.pop(f"{prefix}scale").detach()
        destination[f"{prefix}weight"] = (self.in_order().float() * scale[:, None]).to(self.made_from)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == self.weight.shape:
            weight, scale = self.quantized(state_dict[name].to(self.made_from))
            state_dict = {**state_dict, name: self.arranged(weight), f"{prefix}scale": scale}
        super()._load_from_state_dict(state_dict, prefix, *args)
