"""All layers of a packed model in one call on a CPU: no compiler, no graph, no operators between them.

Shapes: B slots, T tokens in this call, L layers, K kv heads, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from gpt_fast_sd.model import SPLIT, Attention, Block, KVCache, RMSNorm, Transformer

from ...attention import page_sums
from ...kv import DenseKV, ListedKV
from .. import MASS_PAGE as PAGE
from .. import LayerWeights, Listed, Product, Stack, cpu_attention_fits, layers_build
from ..marks import stands_for
from .packing import (
    PackedEmbedding,
    PackedFeedForward,
    PackedInt4Linear,
    PackedInt8Linear,
    PackedLinear,
    PackedPlanesLinear,
    PackedUpperLinear,
    SummedInt4Linear,
    all_packed,
)
from .stand_ins import DENSE, LISTED


@stands_for(
    "gpt_fast_sd.bodies:hidden", "gpt_fast_sd.bodies:logits",
    "gpt_fast_sd.model.llama:Transformer.forward", "gpt_fast_sd.model.llama:Transformer.hidden",
    "gpt_fast_sd.model.llama:Block.forward",
    "gpt_fast_sd.model.llama:Attention.forward", "gpt_fast_sd.model.llama:FeedForward.forward",
    "gpt_fast_sd.model.llama:RMSNorm.forward", "gpt_fast_sd.model.cache:CacheLayer.store",
    "gpt_fast_sd.model.cache:CacheFormat.write",
    "gpt_fast_sd.kv:DenseKV.attend", "gpt_fast_sd.kv:ListedKV.attend", *DENSE, *LISTED,
)  # fmt: skip
class FusedLayers:
    """Transformer.hidden of one model, for steps that read the cache through DenseKV or ListedKV."""

    def __init__(self, model: Transformer) -> None:
        """The weights are the model's own; a model that `fuses` allows.

        They may move and change; modules and parameters that are put in their places are not seen.
        """
        self.stack = Stack(
            layers=[_weights_of(layer) for layer in model.layers],
            embedding=model.embedding.weight,
            embedding_is_packed=type(model.embedding) is PackedEmbedding,
            norm=model.norm.weight,
            freqs=model.rope_freqs,
            rope_length=model.rope_length,
            eps=model.norm.eps,
            n_heads=model.config.n_heads,
            n_kv_heads=model.config.n_kv_heads,
        )

    def __call__(self, model: Transformer, tokens: Tensor, pos: Tensor, kv: DenseKV | ListedKV) -> Tensor:
        """As Transformer.hidden of the model that this was made for: tokens, pos [B, T] -> [B, T, D]."""
        first, caches = kv.layers[0], kv.layers
        if isinstance(kv, ListedKV):
            listed = Listed(kv.kv_indices, kv.window_start, kv.window_width)
            return self.stack(tokens, pos, caches, first.capacity, listed=listed)
        n_keys, mass = kv.n_splits_carrier.shape[0] * SPLIT, None
        if kv.page:
            size = len(caches), *first.k.shape[:2], n_keys // PAGE
            mass = torch.empty(size, dtype=torch.float32, device="cpu")
        out = self.stack(tokens, pos, caches, n_keys, mass=mass)
        if mass is not None:
            kv.mass.extend(page_sums(mass.flatten(0, 1), kv.page // PAGE).unflatten(0, (len(caches), -1)))
        return out

    def logits(self, model: Transformer, tokens: Tensor, pos: Tensor, kv: DenseKV | ListedKV) -> Tensor:
        """As Transformer.forward: tokens, pos [B, T] -> [B, T, V]."""
        out: Tensor = model.output(self(model, tokens, pos, kv))
        return out


def fuses(model: Transformer, cache: KVCache) -> bool:
    """Whether FusedLayers serve this model, held by one process, and its cache on this machine."""
    dtypes = model.embedding.weight.dtype, model.rope_freqs.dtype
    if dtypes != (torch.bfloat16, torch.float32) or not all_packed(model):
        return False
    fits = cpu_attention_fits(model.config.head_dim, torch.bfloat16, cache.format)
    return is_plain(model) and fits and layers_build()


def is_plain(model: Transformer) -> bool:
    """Whether its layers are those of model/llama.py, and nothing is hooked to them."""
    kinds = Block, Attention, PackedFeedForward, RMSNorm, nn.Identity, nn.ModuleList, nn.Embedding, PackedEmbedding
    modules = [module for module in model.modules() if not isinstance(module, nn.Linear)][1:]
    norms = [module for module in modules if isinstance(module, RMSNorm)]
    own = {"forward", "hidden"}  # set on an instance
    anywhere = hooks._global_forward_hooks or hooks._global_forward_pre_hooks
    hooked = bool(anywhere) or any(
        m._forward_hooks or m._forward_pre_hooks or own & vars(m).keys() for m in model.modules()
    )
    same = all(norm.eps == model.norm.eps for norm in norms)
    return type(model) is Transformer and all(type(m) in kinds for m in modules) and same and not hooked


def _weights_of(layer: nn.Module) -> LayerWeights:
    assert isinstance(layer, Block) and isinstance(layer.attention, Attention)
    attention, ffn = layer.attention, layer.feed_forward
    return LayerWeights(
        attention_norm=layer.attention_norm.weight,
        ffn_norm=layer.ffn_norm.weight,
        q_norm=getattr(attention.q_norm, "weight", None),
        k_norm=getattr(attention.k_norm, "weight", None),
        wqkv=_product_of(attention.wqkv),
        wo=_product_of(attention.wo),
        w_in=_product_of(ffn.w_in),
        w_out=_product_of(ffn.w_out),
    )


def _product_of(linear: nn.Module) -> Product:
    if isinstance(linear, PackedPlanesLinear | PackedUpperLinear):
        lower = linear.lower if isinstance(linear, PackedPlanesLinear) else None
        return Product(linear.weight, linear.bias, linear.scale, lower)
    assert isinstance(linear, (PackedLinear, PackedInt8Linear, PackedInt4Linear))
    if isinstance(linear, PackedLinear):
        return Product(linear.weight, linear.bias)
    blocks = linear.blocks if isinstance(linear, PackedInt4Linear) else None
    return Product(linear.weight, linear.bias, linear.scale, blocks, isinstance(linear, SummedInt4Linear))
