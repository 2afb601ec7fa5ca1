"""Quantized weights: a target's, in place, and those of a copy that drafts for a model and shares all else with it.

quantization/table.py says what runs where. And weights that make keys fit for few bits.

Shapes: D model width, N query heads, K kv heads, G = N // K, H head dim, O x I a weight.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpt_fast_sd.model import Block, FeedForward, HugePageArena, RMSNorm, Transformer

from ..fast.cpu.packing import FEW_ROWS, PackedFeedForward, PackedLinear, PackedPlanesLinear
from ..fast.linear_float8 import float8_from
from ..fast.linear_planes import PlanesLinear, keep_whole, lay_in_planes
from ..fast.ops.planes import fits_planes
from ..steps import Runner
from .table import by_output, plain_weight, precision, precision_of, require_precision

TAIL = 64  # tokens that a draft reads whole where it reads the upper plane of others
LEAST_EVENED = 2.0**-6  # size of keys below which none is made: scales of int8 keys are fp16
MOST_EVENED = 24  # a channel is divided by 2 ** 24 at most: far from what bf16 cannot hold


def quantize(model: Transformer, name: str) -> None:
    """Quantize the linear layers of every block in place; the output head and the embedding keep their dtype.

    What `quantize_as_read` has quantized stays as it is. ValueError for a model that is quantized otherwise, or packed:
    weights are changed in place, so two engines cannot share it at different precisions.
    """
    linears = [(place, m) for place, m in model.named_modules() if isinstance(m, nn.Linear)]
    if all(precision_of(m) == name for place, m in linears if place.startswith("layers.")):
        return
    if is_quantized(model):
        raise ValueError(f"quantize {name!r} needs plain weights, and this model is quantized already: load it again")
    if any(isinstance(m, PackedLinear) for _, m in linears):
        raise ValueError(f"quantize {name!r} needs plain weights, and an engine has packed this model's: load it again")
    places = [place for place, _ in linears]
    del linears  # so that none of them is held
    for place in places:
        quantize_as_read(model, f"{place}.weight", name)


def is_quantized(model: Transformer) -> bool:
    """Whether weights of its layers are quantized, by `quantize` or by torchao."""
    return any(precision_of(m) for m in model.layers.modules() if isinstance(m, nn.Linear))


def quantize_as_read(model: Transformer, name: str, precision_name: str) -> None:
    """Quantize what `quantize` would of the parameter of that name, which has just been read.

    Where a weight cannot be equalized afterwards it waits for what `equalize_keys` looks at.
    """
    place, _, kind = name.rpartition(".")
    if kind != "weight" or not place.startswith("layers."):
        return
    module = model.get_submodule(place)
    if isinstance(module, nn.Linear):
        entry = precision(precision_name, module.weight.device)
        if entry.evens or module.bias is None or not module.bias.is_meta:
            model.set_submodule(place, entry.of(module))
    elif place.endswith(".attention_norm"):
        block = model.get_submodule(place.rpartition(".")[0])
        assert isinstance(block, Block)
        if block.attention.wqkv.bias is not None and precision_of(block.attention.wqkv) is None:
            equalize_keys_of(block)
            quantize_as_read(model, f"{place.removesuffix('_norm')}.wqkv.weight", precision_name)


def keep_float8(model: Transformer, name: str, numbers: Tensor, scales: Tensor) -> None:
    """Let a model have a weight as a checkpoint stores it: float8 [O, I], and what its rows stand for, fp32 [O]."""
    place = name.rpartition(".")[0]
    linear = model.get_submodule(place)
    assert isinstance(linear, nn.Linear)
    model.set_submodule(place, float8_from(linear, numbers, scales))


def require_planes(runner: Runner) -> None:
    """ValueError unless the cache lies in planes."""
    if not runner.cache.format.planes:
        raise ValueError(
            "this engine's cache does not lie in planes, of which kv_bits 4 reads one: build an engine with "
            "kv_dtype 'int8' and such a draft"
        )


def drafter(runner: Runner, name: str | None, *, tokens: int | None = 1, on_planes: bool = False) -> Runner:
    """What drafts in place of a model, over the same cache: a copy of it with weights of this precision; None: itself.

    tokens: of a slot in a step of the copy; None: whole prompts, too. on_planes: whether it reads the upper plane of
    the cache, and only the last entries whole. ValueError where that does not run on the device, or the cache has no
    planes.
    """
    if on_planes:
        require_planes(runner)
        runner = replace(runner, cache=runner.cache.with_tail(TAIL))
    if name is None:
        return runner
    require_precision(name, runner.device, runner.model.embedding.weight.dtype, of_draft=True)
    other = replace(runner, model=draft_copy(runner.model, name))
    runner.backend.pack(other, few_rows=tokens is not None and tokens * runner.shape[1] <= FEW_ROWS)
    return other


@torch.no_grad()
def put_in_planes(target: Runner) -> None:
    """Let the weights of a target's layers lie in planes, in place and for good; its products are what they were.

    So does its output head, unless that is the embedding, too, whose rows are looked up. Packed weights of a kind stay
    as they are in all layers, which are to be alike, if a row of one would have to be kept whole. ValueError, and
    nothing is changed, while another engine runs the model: its captured rounds know where weights lie.
    """
    model = target.model
    linears = {place: m for place, m in model.named_modules() if isinstance(m, nn.Linear) and not is_tied(model, m)}
    if getattr(model, "lies_in_planes", None) == id(model):  # a mark of this model, and of no copy
        return
    if runs_elsewhere(target):
        raise ValueError(
            "quantize 'planes' of a draft lays a model's weights out anew, and another engine runs this one's as they "
            "are: load the model again"
        )
    arena, kinds = HugePageArena(), {place: place.rpartition(".")[2] for place in linears}
    packed = {place: m for place, m in linears.items() if isinstance(m, PackedLinear)}
    as_they_are = {kinds[place] for place, m in packed.items() if not fits_planes(plain_weight(m, "planes"))}
    for place, linear in linears.items():
        if isinstance(linear, PlanesLinear) or (place in packed and kinds[place] in as_they_are):
            continue
        weight = plain_weight(linear, "planes")
        if place not in packed:
            lay_in_planes(linear, weight)
        else:
            lay_in_planes(linear, weight, PackedPlanesLinear)
            assert isinstance(linear, PlanesLinear)
            for part in (linear.weight, linear.lower):
                part.data = arena.keep(part.data)
            linear.weight.is_packed = PackedPlanesLinear  # type: ignore[attr-defined]
    for kind in set(kinds.values()):
        alike = [m for place, m in linears.items() if kinds[place] == kind and type(m) is PlanesLinear]
        for linear in alike:
            keep_whole(linear, max(len(m.rows) for m in alike))
    model.lies_in_planes = id(model)  # type: ignore[assignment]
    vars(target).pop("bodies", None)  # those that read the weights as they were


def is_tied(model: Transformer, linear: nn.Module) -> bool:
    """Whether a layer's weight is the model's embedding, too."""
    return linear.weight is model.embedding.weight


def runs_elsewhere(target: Runner) -> bool:
    """Whether another engine's target has this model, too."""
    gc.collect()  # an engine refers to itself
    of, caches = getattr(target.model, "run_with", (0, ()))
    return of == id(target.model) and any(cache() not in (None, target.cache) for cache in caches)


def draft_copy(model: Transformer, name: str) -> Transformer:
    """The model with quantized weights of its own in layers and head; all else is shared, and nothing of it is changed.

    Of a model whose layers have that precision already the copy has them, too.
    """
    layers = precision(name, model.embedding.weight.device)
    head = precision(layers.head, model.embedding.weight.device)

    def twin(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            return (head if module is model.output else layers).of(module)
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


@torch.no_grad()
def equalize_keys(model: Transformer) -> None:
    """No dimension of a layer's keys is much larger than most of them, or than 1; not a bit of any logit is another.

    Biases of Qwen2's keys reach hundreds where keys are of size 20: one such dimension would set the scale of a whole
    key, and int8 leave nothing of the others. RoPE mixes dimension h with h + H / 2 alone, so where such a pair of keys
    is divided by a number, and that of the queries multiplied by it, all scores stay; by a power of two no rounding
    changes either. So it is done to every model with such biases, unless its keys are normed, in place and once,
    whatever its cache holds: engines that share a model agree on what is in their caches. Weights in fp16, for which no
    cache is quantized, could overflow, and stay as they are.
    """
    for block in model.layers:
        assert isinstance(block, Block)
        equalize_keys_of(block)


@torch.no_grad()
def equalize_keys_of(block: Block) -> None:
    """Rescale the keys of one layer, see equalize_keys."""
    attention, gain = block.attention, block.attention_norm.weight.float()  # [D]
    linear, group = attention.wqkv, attention.group_size
    bias, held = linear.bias, by_output(linear)
    if isinstance(attention.k_norm, RMSNorm):  # which evens keys behind their biases, and not dimension by dimension
        return
    if bias is None or held is None or bias.dtype == torch.float16 or getattr(attention, "keys_are_even", False):
        return
    # a mark of the module: weights are replaced as they are quantized, and copies of them have no marks
    attention.keys_are_even = True  # type: ignore[assignment]
    parts, (numbers, per_output) = (group + 2, attention.head_dim), held
    # [K, G + 2, H, ...], of which [:, G] are the keys, and [K, G + 2, H]; quantized weights keep their numbers, as what
    # these are multiplied with carries the factor
    w, b = per_output.unflatten(0, (-1, *parts)), bias.data.unflatten(0, (-1, *parts))
    norms = (numbers.unflatten(0, (-1, *parts))[:, group].float() * gain).norm(dim=-1)  # [K, H]
    norms = norms if per_output is numbers else norms * w[:, group, :, 0]
    size = b[:, group].float().abs() + 3 * norms  # [K, H], what most keys reach
    pairs = size.unflatten(-1, (2, -1)).amax(-2)  # [K, H // 2]
    # of keys that leave most dimensions unused, the others are not made so small that no cache could hold them
    usual = pairs.median(-1, keepdim=True).values.clamp(min=LEAST_EVENED)
    power = (pairs / usual).log2().round().clamp(0, MOST_EVENED).repeat(1, 2)  # [K, H]
    factor = torch.exp2(power).to(w.dtype)
    for x, by in ((w, factor[..., None]), (b, factor.to(b.dtype))):
        x[:, group] /= by
        x[:, :group] *= by[:, None]
