"""Rotary position embedding in the half-rotation layout of Hugging Face checkpoints (Su et al. 2021, arXiv 2104.09864).

Shapes: B batch, T tokens in this call, N heads, H head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig, longest: int | None = None) -> Tensor:
    """Radians per position of each rotary pair, fp32 [H // 2], scaling applied.

    longest: tokens of the longest text that they shall serve; None: as many as the model has positions.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    periods = config.rope_theta**exponent  # [H // 2]
    freqs = 1.0 / periods
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.factors) / scaling.factor
    if scaling.kind == "longrope":
        is_long = (longest or config.max_seq_len) > scaling.original_max_seq_len
        return 1.0 / (torch.tensor(scaling.long_factors if is_long else scaling.factors) * periods)
    if scaling.kind == "yarn":
        keep = 1 - _yarn_ramp(config.head_dim, config.rope_theta, scaling)
        return 1.0 / (scaling.factor * periods) * (1 - keep) + freqs * keep
    # llama3: wavelengths that fit into the original context several times stay, longer ones are divided, with a
    # linear blend between
    wavelength = 2 * math.pi / freqs
    turns = scaling.original_max_seq_len / wavelength
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * freqs / scaling.factor + keep * freqs


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """How much of each pair's frequency is divided, 0 to 1: fp32 [H // 2]."""

    def pair(turns: float) -> float:
        """The pair, as a real number, that turns this many times in the original context."""
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)  # not H // 2 - 1: as in the authors' code and all since
    if first == last:
        last += 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)


def rope_cos_sin(pos: Tensor, freqs: Tensor, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every (position, pair) angle, times length: pos [B, T], freqs [H // 2] -> fp32 [B, T, 1, H // 2].

    So rotating by them makes a query or key `length` times as long, as YaRN and LongRoPE require.
    """
    angle = pos.float()[..., None, None] * freqs  # [B, T, 1, H // 2]
    cos, sin = angle.cos(), angle.sin()
    return (cos, sin) if length == 1.0 else (cos * length, sin * length)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, i + H // 2) of each head by its angle, in fp32: x [B, T, N, H] -> [B, T, N, H], dtype kept."""
    a, b = x.float().chunk(2, dim=-1)  # [B, T, N, H // 2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
