"""One Llama. It knows nothing of ranks, quantization or speculation: the `kv` that it is given attends.

Shapes: B batch, T tokens in this call, D model width, F feed-forward width, V vocabulary,
        N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KV
from .config import ModelConfig
from .rope import apply_rope, rope_cos_sin, rope_frequencies


class Linear(nn.Linear):
    """nn.Linear, except that Inductor on a CPU gets a product with a single row as multiply-and-sum.

    The sums then fuse with the code around them, and all that is left is reading a bf16 weight once: measured 3x faster
    than a library call, whose fixed cost is larger than such a product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        one_row = x.numel() == self.in_features and x.device.type == "cpu" and torch.compiler.is_compiling()
        if not one_row or type(self.weight) is not nn.Parameter:  # a tensor subclass has a product of its own
            return super().forward(x)
        out = (x.flatten().float() * self.weight.float()).sum(-1)  # [out]
        if self.bias is not None:
            out = out + self.bias.float()
        return out.to(x.dtype).expand(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in fp32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], dtype kept."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention; storing and reading keys is left to the kv.

    wqkv holds, for each kv head in turn, its G query heads, its key head and its value head ([K, G + 2, H, D]), so that
    a plain split of the rows into contiguous parts keeps every group whole.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.group_size = config.group_size
        rows = config.n_kv_heads * (config.group_size + 2) * config.head_dim
        self.wqkv = Linear(config.dim, rows, bias=config.qkv_bias)
        self.wo = Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, kv: KV) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        qkv = self.wqkv(x).unflatten(-1, (-1, self.group_size + 2, self.head_dim))  # [B, T, K, G + 2, H]
        q, k, v = qkv.split((self.group_size, 1, 1), dim=-2)
        q = apply_rope(self.q_norm(q.flatten(2, 3)), cos, sin)  # [B, T, N, H]
        k = apply_rope(self.k_norm(k.squeeze(-2)), cos, sin)  # [B, T, K, H]
        v = v.squeeze(-2)  # [B, T, K, H]
        out = kv.attend(self.layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pos)  # [B, N, T, H]
        mixed: Tensor = self.wo(out.transpose(1, 2).flatten(2))  # [B, T, D]
        return mixed


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202); w_in interleaves gate and up row by row, so splits keep pairs whole."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w_in = Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w_out = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        out: Tensor = self.w_out(gated(self.w_in(x)))  # [B, T, D]
        return out


def gated(pairs: Tensor) -> Tensor:
    """silu(gate) * up, side by side in pairs: [..., 2 * F] -> [..., F]"""
    if (
        pairs.dtype == torch.bfloat16
        and pairs.device.type == "cpu"
        and torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
    ):
        # Inductor reads every other element one by one, but whole words, each two bf16, as vectors
        words = pairs.view(torch.int32)  # [..., F]
        low, high = (words << 16).view(torch.float32), (words & -(1 << 16)).view(torch.float32)
        return (F.silu(low) * high).to(pairs.dtype)
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)  # [..., F] each
    out: Tensor = F.silu(gate) * up
    return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, kv: KV) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.attention(self.attention_norm(x), cos, sin, pos, kv)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Tokens and positions in, next-token logits out; prefill, decode, verify and draft differ only in `kv`."""

    rope_freqs: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight
        self.rope_length = config.rope_scaling.length if config.rope_scaling else 1.0
        self.register_buffer("rope_freqs", rope_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """As nn.Module's, behind `to` and all its kin, but frequencies are not rounded to 16 bits.

        A position times a rounded frequency is off by radians after a few hundred tokens.
        """
        before = self.rope_freqs
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.rope_freqs.dtype.itemsize < torch.float32.itemsize <= before.dtype.itemsize and not before.is_meta:
            self.rope_freqs = before.to(self.rope_freqs.device)
        return self

    def first_layers(self, n: int) -> Transformer:
        """A model of the first n layers with the same embedding, norm and head; the weights are shared, not copied."""
        with torch.device("meta"):
            short = Transformer(replace(self.config, n_layers=n))
        short.embedding, short.layers = self.embedding, self.layers[:n]
        short.norm, short.output, short.rope_freqs = self.norm, self.output, self.rope_freqs
        return short.train(self.training)

    def hidden(self, tokens: Tensor, pos: Tensor, kv: KV) -> Tensor:
        """Normed final states: tokens [B, T], pos [B, T] -> [B, T, D]. Prefill stops here: it needs no logits."""
        x = self.embedding(tokens)  # [B, T, D]
        cos, sin = rope_cos_sin(pos, self.rope_freqs, self.rope_length)  # [B, T, 1, H // 2] each
        for layer in self.layers:
            x = layer(x, cos, sin, pos, kv)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor, pos: Tensor, kv: KV) -> Tensor:
        """Next-token logits: tokens [B, T], pos [B, T] (positions of those tokens) -> [B, T, V]."""
        logits: Tensor = self.output(self.hidden(tokens, pos, kv))
        return logits
