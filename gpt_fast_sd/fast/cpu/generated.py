"""Modules written so that Inductor generates fast loops of them for a CPU; eagerly they are the model's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_fast_sd.model import FeedForward

from ..marks import edited, stands_for


class GeneratedLinear(nn.Linear):
    """A Linear whose product with a single row Inductor gets as multiply-and-sum.

    The sums then fuse with the code around them, and all that is left is reading a bf16 weight once: measured 3x faster
    than a library call, whose fixed cost is larger than such a product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        one_row = x.numel() == self.in_features and torch.compiler.is_compiling()
        if not one_row or type(self.weight) is not nn.Parameter:  # a tensor subclass has a product of its own
            return super().forward(x)
        out = (x.flatten().float() * self.weight.float()).sum(-1)  # [out]
        if self.bias is not None:
            out = out + self.bias.float()
        return out.to(x.dtype).expand(*x.shape[:-1], -1)


@stands_for("gpt_fast_sd.model.llama:FeedForward.forward")
class GeneratedFeedForward(FeedForward):
    """A FeedForward whose gates and ups in bf16 Inductor reads as vectors of words."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        pairs = self.w_in(x)  # [B, T, 2 * F]
        if pairs.dtype != torch.bfloat16 or not torch.compiler.is_compiling() or torch.is_grad_enabled():
            return super().forward(x)
        # it reads every other element one by one, but whole words, each two bf16, as vectors
        words = pairs.view(torch.int32)  # [B, T, F]
        low, high = (words << 16).view(torch.float32), (words & -(1 << 16)).view(torch.float32)
        out: Tensor = self.w_out((F.silu(low) * high).to(pairs.dtype))  # [B, T, D]
        return out


def prepare_for_inductor(model: nn.Module) -> None:
    """Let the plain modules of a model on a CPU be those above, in place; they keep their weights and names."""
    changed = edited(GeneratedFeedForward)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = GeneratedLinear
        elif type(module) is FeedForward and not changed:
            module.__class__ = GeneratedFeedForward


def as_written(model: nn.Module) -> None:
    """Let the modules of a model be the plain ones again, in place."""
    for module in model.modules():
        if type(module) is GeneratedLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif type(module) is GeneratedFeedForward:
            module.__class__ = FeedForward  # type: ignore[assignment]
