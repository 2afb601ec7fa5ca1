"""A model that transformers holds in memory -> a Transformer that shares what our fused layout allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..llama import Transformer
from ..rope import rope_frequencies
from .checkpoint import Layout, config_of, name_table, stored_shapes, units_of

FAMILIES = "LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
DTYPES = torch.float32, torch.bfloat16, torch.float16


def config_of_loaded(theirs: Any) -> ModelConfig:
    """The shape of a model of transformers; ValueError unless it has plain weights, and all of it is computed here."""
    kind, module = type(theirs).__name__, type(theirs).__module__
    if kind not in FAMILIES or not module.startswith("transformers."):
        said = f"a model must be transformers' {', '.join(FAMILIES)}, got {kind}"
        raise ValueError(f"{said}: give what merge_and_unload() returns" if module.startswith("peft") else said)
    raw, ends = theirs.config.to_dict(), getattr(theirs, "generation_config", None)
    if raw.get("quantization_config") is not None:
        raise ValueError(f"this {kind} is quantized by transformers: load it without, and let EngineConfig quantize it")
    raw |= {"architectures": [kind]}
    config = config_of(raw, ends.to_dict() if ends else {}, f"this {kind}'s config", "its generation_config")
    _require_plain(dict(theirs.named_parameters()), config)
    _require_unchanged(theirs, config)
    return config


@torch.inference_mode(False)
@torch.no_grad()
def share_model(theirs: nn.Module, config: ModelConfig, *, copy: bool = False) -> Transformer:
    """Our form of a transformers model, on its device and in its dtype; config: what `config_of_loaded` says of it.

    Embeddings, norms, o_proj, down_proj and lm_head are the same memory. Rows of gate_proj and up_proj take turns in
    one matrix of ours, of which theirs become views: transformers computes the same with them, and cannot save them.
    q_proj, k_proj and v_proj are copied, as an engine may rescale keys.
    copy: share nothing, and leave theirs as it is.
    """
    held = dict(theirs.named_parameters())
    if not copy and any(weight.is_inference() for weight in held.values()):
        raise ValueError("this model was made under torch.inference_mode, and cannot be shared: say share=False")
    with torch.device("meta"):
        model = Transformer(config)
    for name, layout in name_table(config).items():
        place, _, kind = name.rpartition(".")
        ours = _laid_out([held[stored] for stored, *_ in layout], layout, copy or place.endswith("wqkv"))
        setattr(model.get_submodule(place), kind, nn.Parameter(ours, requires_grad=False))
    if config.tie_embeddings:
        model.output.weight = model.embedding.weight
    model.rope_freqs = rope_frequencies(config).to(held["model.embed_tokens.weight"].device)
    return model.eval()


def _laid_out(parts: list[nn.Parameter], layout: Layout, copy: bool) -> Tensor:
    """Our tensor of these parameters, which unless it is a copy become views of it."""
    if len(parts) == 1:
        return parts[0].data.clone() if copy else parts[0].data
    ours = torch.cat([part.data for part in parts])  # for its shape
    places = units_of(ours, layout)
    for part, place in zip(parts, places, strict=True):
        place.copy_(part.data.unflatten(0, place.shape[:2]))
    for part, place in zip(parts, places, strict=True):
        if not copy:
            part.data = place.flatten(0, 1)
    return ours


def _require_plain(held: dict[str, nn.Parameter], config: ModelConfig) -> None:
    """ValueError unless these are the weights of such a model, in one dtype on one device."""
    shapes = stored_shapes(config)
    if other := sorted(shapes.keys() ^ held.keys()):
        what = "lacks" if other[0] in shapes else "has"
        raise ValueError(f"this model {what} the parameter {other[0]}: it was changed since its class made it")
    first = held["model.embed_tokens.weight"]
    for name, weight in held.items():
        if weight.is_meta:
            raise ValueError(f"{name} has no weights yet (meta)")
        if weight.dtype == torch.float64:
            raise ValueError(f"{name} is float64, and float64 is not run: fp32, bf16 or fp16")
        if type(weight.data) is not Tensor or weight.dtype not in DTYPES:
            raise ValueError(f"{name} is quantized ({type(weight.data).__name__}, {weight.dtype}): load it plain")
        if (weight.device, weight.dtype) != (first.device, first.dtype):
            said = f"{name} is {weight.dtype} on {weight.device}, the embedding {first.dtype} on {first.device}"
            raise ValueError(f"{said}: one dtype and one device hold all of a model")
        if tuple(weight.shape) != shapes[name]:
            raise ValueError(f"{name} has shape {list(weight.shape)}, the config says {list(shapes[name])}")


def _require_unchanged(theirs: Any, config: ModelConfig) -> None:
    """ValueError if modules of such a model compute something else than its class does by this config."""
    for name, module in theirs.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # its own hand hidden states out, and change none
        if not all(str(getattr(hook, "__module__", None)).startswith("transformers.") for hook in hooks):
            raise ValueError(f"{name or 'this model'} has a forward hook, which would not run: remove it")
        act = getattr(module, "act_fn", None)
        if act is not None and not isinstance(act, nn.SiLU) and type(act).__name__ != "SiLUActivation":
            raise ValueError(f"{name}.act_fn is {type(act).__name__}, and only SiLU is computed")
    kind, rope = config.rope_scaling and config.rope_scaling.kind, theirs.model.rotary_emb
    # those of two kinds go by the last text, and begin with a short one's
    found = (rope.original_inv_freq if kind in ("dynamic", "longrope") else rope.inv_freq).cpu()
    expected, limits = rope_frequencies(config, 1).to(found.dtype), torch.finfo(found.dtype)  # rounded, as by to(dtype)
    if found.shape != expected.shape or not torch.allclose(
        found.double(), expected.double(), rtol=max(1e-6, limits.eps), atol=limits.smallest_normal * limits.eps
    ):
        raise ValueError("model.rotary_emb.inv_freq is not what the config gives: one of them was changed")
