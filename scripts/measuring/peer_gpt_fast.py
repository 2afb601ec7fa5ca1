"""gpt-fast next to this engine: its model and its own compiled step, on the same weights; B batch rows of S tokens."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_fast_sd.model import ModelConfig

FOLDER = "GPT_FAST"  # the environment variable that names a clone of github.com/pytorch-labs/gpt-fast
NAMES = {  # of Hugging Face's parameters -> gpt-fast's
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


class GptFast:
    """Its step as its program compiles it; prompts go through its prefill, uncompiled as there, in chunks."""

    def __init__(self, folder: Path, dtype: torch.dtype, config: ModelConfig, chunk: int) -> None:
        """ImportError if there is no clone; folder: weights in Hugging Face's layout."""
        if not (source := os.environ.get(FOLDER)):
            raise ImportError(f"{FOLDER} does not name a folder")
        if config.head_dim * config.n_heads != config.dim or config.rope_scaling:
            raise ValueError("gpt-fast's heads have dim / n_heads dims, and positions that are not scaled")
        sys.path.insert(0, source)
        for name in ("generate", "model", "tokenizer"):  # ours have such names, too
            sys.modules.pop(name, None)
        self.program, theirs = importlib.import_module("generate"), importlib.import_module("model")
        shape = theirs.ModelArgs(
            block_size=config.max_seq_len, vocab_size=config.vocab_size, n_layer=config.n_layers, n_head=config.n_heads,
            dim=config.dim, intermediate_size=config.ffn_dim, n_local_heads=config.n_kv_heads,
            rope_base=config.rope_theta, norm_eps=config.norm_eps,
        )  # fmt: skip
        with torch.device("meta"):
            self.model = theirs.Transformer(shape)
        self.model.load_state_dict(weights(folder, config), assign=True)
        self.model.to(dtype=dtype).eval()
        commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        self.chunk, self.notes = chunk, f"commit {commit.stdout[:12] or 'unknown'}, compiled by mode reduce-overhead"

    def reserve(self, batch: int, capacity: int) -> None:
        """Forget graphs and, with the next prompt, caches: shapes are static."""
        self.batch, self.capacity = batch, capacity
        torch.compiler.reset()
        self.compiled: Any = torch.compile(self.program.decode_one_token, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def prefill(self, tokens: list[int]) -> list[int]:
        """Prefill one row, then repeat its keys and values: tokens [S] -> [B]."""
        self._reserve(1)
        for positions in torch.arange(len(tokens)).split(self.chunk):
            prompt = torch.tensor([tokens])[:, positions]
            first = self.program.prefill(self.model, prompt, positions, temperature=0.0)
        held = [dict(layer.attention.kv_cache.named_buffers()) for layer in self.model.layers]
        self._reserve(self.batch)
        for layer, caches in zip(self.model.layers, held, strict=True):
            for name, cache in layer.attention.kv_cache.named_buffers():
                cache.copy_(caches[name].expand(self.batch, -1, -1, -1))
        self.tokens, self.position = first.view(1, 1).repeat(self.batch, 1), torch.tensor([len(tokens)])
        return cast(list[int], self.tokens[:, 0].tolist())

    @torch.no_grad()
    def step(self) -> list[int]:
        """As its loop does: with that attention, and what a step gives is copied before the next one."""
        with sdpa_kernel(SDPBackend.MATH):
            found = self.compiled(self.model, self.tokens, self.position, temperature=0.0)[0]
        self.tokens, self.position = found.view(-1, 1).clone(), self.position + 1
        return cast(list[int], self.tokens[:, 0].tolist())

    def _reserve(self, batch: int) -> None:
        self.model.max_batch_size = self.model.max_seq_length = -1  # else it keeps caches that are large enough
        self.model.setup_caches(batch, self.capacity)


def weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The checkpoint under gpt-fast's names; it rotates neighbouring dims, Hugging Face halves of a head."""
    from safetensors.torch import load_file

    stored = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
    found = {}
    for name, tensor in stored.items():
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
    for i in range(config.n_layers):
        q, k, v = (stored[f"model.layers.{i}.self_attn.{one}_proj.weight"] for one in "qkv")
        q, k = (w.view(-1, 2, config.head_dim // 2, config.dim).transpose(1, 2).reshape(w.shape) for w in (q, k))
        found[f"layers.{i}.attention.wqkv.weight"] = torch.cat([q, k, v])
    return found
