"""Rotary position embedding in the half-rotation layout of Hugging Face checkpoints (Su et al. 2021, arXiv 2104.09864).

Shapes: B batch, T tokens in this call, N heads, H head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import ModelConfig


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotary pair, fp32 [H // 2], scaling applied."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freqs = 1.0 / (config.rope_theta**exponent)  # [H // 2]
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.factors) / scaling.factor
    # llama3: wavelengths that the original context saw in full stay, those it never completed are divided, a linear
    # blend between
    wavelength = 2 * math.pi / freqs
    turns = scaling.original_max_seq_len / wavelength
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * freqs / scaling.factor + keep * freqs


def rope_cos_sin(pos: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every (position, pair) angle: pos [B, T], freqs [H // 2] -> two fp32 [B, T, 1, H // 2]."""
    angle = pos.float()[..., None, None] * freqs  # [B, T, 1, H // 2]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, i + H // 2) of each head by its angle, in fp32: x [B, T, N, H] -> [B, T, N, H], dtype kept."""
    a, b = x.float().chunk(2, dim=-1)  # [B, T, N, H // 2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
