"""Quantized weights: a target's, in place, and those of a copy that drafts for a model and shares all else with it.

"int8" on a CPU is ours: a scale for each output, rows quantized as they come, products of integers. On CUDA it is
torchao's, weight-only.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpt_fast_sd.model import FeedForward, Transformer

from .int8 import Int8Linear
from .kernels import unpack
from .packing import PackedFeedForward, PackedLinear, pack_linears
from .runner import Runner


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

    quantize_(model.layers, Int8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, nn.Linear))


def quantize_as_read(model: Transformer, name: str) -> None:
    """Quantize what `quantize` would on a CPU of the parameter of that name, which has just been read."""
    place, _, kind = name.rpartition(".")
    linear = model.get_submodule(place)
    if kind == "weight" and place.startswith("layers.") and isinstance(linear, nn.Linear):
        model.set_submodule(place, Int8Linear(linear.weight, linear.bias))


def require_draft_precision(name: str | None, device: torch.device) -> None:
    """ValueError where drafts with weights of this precision do not run on a device."""
    if name is not None and device.type != "cpu":
        raise ValueError(f"quantize {name!r} of a draft runs on a CPU alone, and the model is on {device.type!r}")


def drafter(runner: Runner, name: str | None) -> Runner:
    """What drafts in place of a model, over the same cache: a copy of it with weights of this precision; None: itself.

    ValueError where that does not run on the device.
    """
    require_draft_precision(name, runner.device)
    if name is None:
        return runner
    model = draft_copy(runner.model)
    if runner.compiles:
        pack_linears(model)
    return replace(runner, model=model)


def draft_copy(model: Transformer) -> Transformer:
    """The model with int8 weights of its own in every layer and the head; all else is shared, and it is not touched.

    Of a model whose layers are int8 already the copy has them, too.
    """

    def twin(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear) and not isinstance(module, Int8Linear):
            weight = unpack(module.weight.detach()) if isinstance(module, PackedLinear) else module.weight
            return Int8Linear(weight, module.bias)
        children = {place: twin(child) for place, child in module.named_children()}
        if all(child is module._modules[place] for place, child in children.items()):
            return module
        other = copy.copy(module)
        other._modules = {**module._modules, **children}
        if isinstance(other, PackedFeedForward):
            other.__class__ = FeedForward
        return other

    found = twin(model)
    assert isinstance(found, Transformer)
    return found
