"""Quantized weights: a target's, in place, and those of a copy that drafts for a model and shares all else with it.

"int8" on a CPU is our own: a scale for each output, activations as integers, see kernels/int8.py. On CUDA a target's is
torchao's, weight-only; copies are "float8" there, also torchao's. And weights that make keys fit for few bits.

Shapes: D model width, N query heads, K kv heads, G = N // K, H head dim, O x I a weight.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpt_fast_sd.model import Block, FeedForward, Linear, Transformer

from .int8 import Int8Linear
from .kernels import unpack
from .packing import PackedFeedForward, PackedInt8Linear, PackedLinear, pack_linears
from .runner import Runner

FLOAT8_CAPABILITY = 8, 9  # the least that multiplies float8
TAIL = 64  # tokens that a draft reads whole where it reads the upper plane of others
MOST_EVENED = 24  # a channel is divided by 2 ** 24 at most: far from what bf16 cannot hold


def quantize(model: Transformer, name: str) -> None:
    """Quantize the linear layers of every block in place; the output head and the embedding keep their dtype.

    What `quantize_as_read` has quantized stays as it is. ValueError for a model that is quantized otherwise, or packed:
    weights are changed in place, so two engines cannot share it at different precisions.
    """
    on_cpu = model.embedding.weight.device.type == "cpu"
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]  # none of them is held
    if on_cpu and all(isinstance(model.get_submodule(n), Int8Linear) for n in names if n.startswith("layers.")):
        return
    if any(type(p.data) is not Tensor for p in model.parameters()):
        raise ValueError(f"quantize {name!r} needs plain weights, and this model is quantized already: load it again")
    if any(isinstance(m, PackedLinear) for m in model.modules()):
        raise ValueError(f"quantize {name!r} needs plain weights, and an engine has packed this model's: load it again")
    if on_cpu:
        for name_of_linear in names:
            quantize_as_read(model, f"{name_of_linear}.weight")
        return
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # by default torchao changes Inductor's settings of the whole process
    config = Int8WeightOnlyConfig(set_inductor_config=False)
    quantize_(model.layers, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))


def is_quantized(model: Transformer) -> bool:
    """Whether weights of its layers are quantized, by `quantize` or by torchao."""
    linears = (m for m in model.layers.modules() if isinstance(m, nn.Linear))
    return any(isinstance(m, Int8Linear) or type(m.weight.data) is not Tensor for m in linears)


def quantize_as_read(model: Transformer, name: str) -> None:
    """Quantize what `quantize` would on a CPU of the parameter of that name, which has just been read."""
    place, _, kind = name.rpartition(".")
    linear = model.get_submodule(place)
    if kind == "weight" and place.startswith("layers.") and isinstance(linear, nn.Linear):
        model.set_submodule(place, Int8Linear(linear.weight, linear.bias))


def require_draft_precision(name: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError where a device runs no drafts with weights of this precision, made from weights of this dtype."""
    if name is None:
        return
    said = f"quantize {name!r} of a draft"
    other = {"int8": "float8", "float8": "int8"}[name]
    needed = {"int8": "cpu", "float8": "cuda"}[name]
    if device.type != needed:
        raise ValueError(f"{said} runs on device {needed!r}, and the model is on {device.type!r}: use {other!r}")
    if name == "int8":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        has, least = (".".join(map(str, c)) for c in (capability, FLOAT8_CAPABILITY))
        raise ValueError(
            f"{said} needs compute capability {least} or more (L40S, H100, or later), and this GPU has {has}"
        )
    if str(torch.version.cuda).startswith("12.9"):  # https://github.com/pytorch/ao/issues/4582
        raise ValueError(f"{said} may crash in CUDA 12.9's cuBLAS: use a torch built for another CUDA")
    if dtype != torch.bfloat16:
        raise ValueError(f"{said} needs bf16 weights, and the model's are {str(dtype).removeprefix('torch.')}")


def drafter(runner: Runner, name: str | None, *, on_planes: bool = False) -> Runner:
    """What drafts in place of a model, over the same cache: a copy of it with weights of this precision; None: itself.

    on_planes: whether it reads the upper plane of the cache, and only the last entries whole. ValueError where that
    does not run on the device, or the cache has no planes.
    """
    if on_planes:
        if not runner.cache.planes:
            raise ValueError(
                "this engine's cache does not lie in planes, of which kv_bits 4 reads one: build an engine with "
                "kv_dtype 'int8' and such a draft"
            )
        runner = replace(runner, cache=runner.cache.with_tail(TAIL))
    if name is None:
        return runner
    require_draft_precision(name, runner.device, runner.model.embedding.weight.dtype)
    model = draft_copy(runner.model, name)
    if runner.compiles and runner.device.type == "cpu":
        pack_linears(model)
    return replace(runner, model=model)


def draft_copy(model: Transformer, name: str) -> Transformer:
    """The model with quantized weights of its own in layers and head; all else is shared, and nothing of it is changed.

    Of a model whose layers are int8 already an int8 copy has them, too.
    """
    quantized = {"int8": int8_of, "float8": float8_of}[name]

    def twin(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            return quantized(module)
        children = {place: twin(child) for place, child in module.named_children()}
        if all(child is module._modules[place] for place, child in children.items()):
            return module
        other = copy.copy(module)
        other._modules = {**module._modules, **children}
        if type(module) is PackedFeedForward:
            other.__class__ = FeedForward
        return other

    found = twin(model)
    assert isinstance(found, Transformer)
    return found


def int8_of(linear: nn.Linear) -> Int8Linear:
    """The same with int8 weights, the bias shared; itself where it has them."""
    if isinstance(linear, Int8Linear):
        return linear
    weight = unpack(linear.weight.detach()) if isinstance(linear, PackedLinear) else linear.weight
    return Int8Linear(weight, linear.bias)


def float8_of(linear: nn.Linear) -> nn.Linear:
    """The same with torchao's float8 weights (e4m3), a scale for each output and one for each row that comes.

    ValueError for a size that 16 does not divide.
    """
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.utils import TorchAOBaseTensor

    if isinstance(linear.weight.data, TorchAOBaseTensor):
        raise ValueError(
            "quantize 'float8' of a draft needs a model with plain weights, and the target's are quantized"
        )
    # its own kernels are torch's; by default torchao changes Inductor's settings of the whole process
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), kernel_preference=KernelPreference.TORCH, set_inductor_config=False
    )
    with torch.device("meta"):
        own = Linear(linear.in_features, linear.out_features, bias=False)
    own.weight, own.bias = linear.weight, linear.bias
    quantize_(own.train(False), config, filter_fn=lambda module, _: True)
    if not isinstance(own.weight.data, TorchAOBaseTensor):  # torchao leaves such a one as it is, and says nothing
        shape = list(linear.weight.shape)
        raise ValueError(f"quantize 'float8' of a draft needs sizes that 16 divides, and a weight has {shape}")
    return own


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
        linear, group = attention.wqkv, attention.group_size
        weight, bias = linear.weight, linear.bias
        plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.dtype != torch.float16
        packed = isinstance(linear, (PackedLinear, PackedInt8Linear))
        if bias is None or not plain or packed or getattr(attention, "keys_are_even", False):
            continue
        # a mark of the module: weights are replaced as they are quantized, and copies of them have no marks
        attention.keys_are_even = True  # type: ignore[assignment]
        parts = (group + 2, attention.head_dim)
        # int8 weights keep their numbers, as their scales, one per output, carry the factor
        per_output = linear.scale[:, None] if isinstance(linear, Int8Linear) else weight  # [O, 1] or [O, D]
        # [K, G + 2, H, ...], of which [:, G] are the keys, and [K, G + 2, H]
        w, b = per_output.data.unflatten(0, (-1, *parts)), bias.data.unflatten(0, (-1, *parts))
        norms = (weight.data.unflatten(0, (-1, *parts))[:, group].float() * gain).norm(dim=-1)  # [K, H]
        norms = norms * w[:, group, :, 0] if isinstance(linear, Int8Linear) else norms
        size = b[:, group].float().abs() + 3 * norms  # [K, H], what most keys reach
        pairs = size.unflatten(-1, (2, -1)).amax(-2)  # [K, H // 2]
        usual = pairs.median(-1, keepdim=True).values.clamp(min=1e-30)
        power = (pairs / usual).log2().round().clamp(0, MOST_EVENED).repeat(1, 2)  # [K, H]
        factor = torch.exp2(power).to(w.dtype)
        for x, by in ((w, factor[..., None]), (b, factor.to(b.dtype))):
            x[:, group] /= by
            x[:, :group] *= by[:, None]
