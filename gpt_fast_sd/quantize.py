"""Weights in fewer bits, by torchao and after they are where they belong, and weights that make keys fit for few bits.

Shapes: D model width, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_fast_sd.model import Block, Transformer

from .packing import PackedLinear

MOST_EVENED = 24  # a channel is divided by 2 ** 24 at most: far from what bf16 cannot hold


def quantize(model: nn.Module, name: str) -> None:
    """Quantize the linear layers of every block in place; the output head and the embedding keep their dtype.

    "int8": weight-only, one scale per output channel (torchao Int8WeightOnlyConfig). ValueError for a model that is
    quantized already: its weights are changed in place, so two engines cannot share it at different precisions.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if any(type(p.data) is not Tensor for p in model.parameters()):
        raise ValueError(f"quantize {name!r} needs plain weights, and this model is quantized already: load it again")
    if any(isinstance(m, PackedLinear) for m in model.modules()):
        raise ValueError(f"quantize {name!r} needs plain weights, and an engine has packed this model's: load it again")
    configs = {"int8": Int8WeightOnlyConfig}
    quantize_(
        model, configs[name](), filter_fn=lambda m, where: isinstance(m, nn.Linear) and where.startswith("layers.")
    )


@torch.no_grad()
def equalize_keys(model: Transformer) -> None:
    """No dimension of a layer's keys is much larger than most; not a bit of any logit is another.

    Biases of Qwen2's keys reach hundreds where keys are of size 20: one such dimension would set the scale of a whole
    key, and int8 leave nothing of the others. RoPE mixes dimension h with h + H / 2 alone, so where such a pair of keys
    is divided by a number, and that of the queries multiplied by it, all scores stay; by a power of two no rounding
    changes either. So it is done to every model with such biases, in place and once, whatever its cache holds: engines
    that share a model agree on what is in their caches. Weights in fp16, for which no cache is quantized, could
    overflow, and stay as they are.
    """
    for block in model.layers:
        assert isinstance(block, Block)
        attention, gain = block.attention, block.attention_norm.weight.float()  # [D]
        weight, bias, group = attention.wqkv.weight, attention.wqkv.bias, attention.group_size
        plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype != torch.float16
        if bias is None or not plain or hasattr(weight, "keys_are_even") or hasattr(weight, "is_packed"):
            continue
        weight.keys_are_even = True  # type: ignore[attr-defined]
        parts = (group + 2, attention.head_dim)
        # [K, G + 2, H, D], of which [:, G] are the keys, and [K, G + 2, H]
        w, b = weight.data.unflatten(0, (-1, *parts)), bias.data.unflatten(0, (-1, *parts))
        size = b[:, group].float().abs() + 3 * (w[:, group].float() * gain).norm(dim=-1)  # [K, H], what most keys reach
        pairs = size.unflatten(-1, (2, -1)).amax(-2)  # [K, H // 2]
        usual = pairs.median(-1, keepdim=True).values.clamp(min=1e-30)
        power = (pairs / usual).log2().round().clamp(0, MOST_EVENED).repeat(1, 2)  # [K, H]
        factor = torch.exp2(power).to(weight.dtype)
        for x, by in ((w, factor[..., None]), (b, factor)):
            x[:, group] /= by
            x[:, :group] *= by[:, None]
