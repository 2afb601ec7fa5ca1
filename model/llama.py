"""One Llama. It knows nothing of ranks, quantization or speculation: the `kv` that it is given attends.

Shapes: B batch, T tokens in this call, D model width, F feed-forward width, V vocabulary,
        N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KV
from .config import ModelConfig
from .rope import apply_rope, rope_cos_sin, rope_frequencies


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
        self.wqkv = nn.Linear(config.dim, rows, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.o_bias)
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
        self.w_in = nn.Linear(config.dim, 2 * config.ffn_dim, bias=config.mlp_bias)
        self.w_out = nn.Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        gate, up = self.w_in(x).unflatten(-1, (-1, 2)).unbind(-1)  # [B, T, F] each
        out: Tensor = self.w_out(F.silu(gate) * up)  # [B, T, D]
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
    reads_long: bool | None = None  # whether it has been fitted to long texts; None: to none, see fit_texts

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
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

    def fit_texts(self, longest: int) -> None:
        """Turn keys as texts of up to so many tokens need it, where that depends on it: longrope's two lists.

        The rule is that of vLLM and llama.cpp. By that of transformers, the length that a text has reached, queries
        would be turned otherwise than cached keys. A warning says that short texts are read as long ones; ValueError if
        the model was fitted to texts of the other kind: an engine may be running it.
        """
        scaling = self.config.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return
        original = scaling.original_max_seq_len
        is_long = longest > original
        if self.reads_long == is_long:  # graphs of another engine may hold its frequencies
            return
        if self.reads_long is not None:
            raise ValueError(
                f"max_seq_len {longest:,} needs other factors of longrope than an engine runs this model with, those "
                f"for {'up to' if is_long else 'over'} {original:,} tokens: load it again"
            )
        if is_long:
            warnings.warn(
                f"max_seq_len {longest:,} is over the {original:,} tokens up to which longrope has factors for short "
                f"texts: all are read with those for long ones (max_seq_len {original:,} reads all with the others)",
                stacklevel=1,  # the same line for a draft model
            )
        self.reads_long = is_long
        self.rope_freqs = rope_frequencies(self.config, longest).to(self.rope_freqs.device)

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
