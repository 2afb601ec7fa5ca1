"""What fits together and runs on this machine: each refusal is one sentence, before any work is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gpt_fast_sd.model import ModelConfig, Tokenizer, Transformer, difference, load_tokenizer, read_config
from gpt_fast_sd.tp import Group

from ..config import EngineConfig
from ..fast import kernels_are_built, packing_builds
from ..fast.cpu.packing import is_packed
from ..policies.auto import AutoConfig
from ..policies.config import DraftConfig
from ..quantization.quantize import is_quantized
from ..quantization.table import require_copy, require_precision, require_sizes
from .machine import free_memory, require_kernels, whole_memory
from .memory import MemoryPlan
from .system import System


def check_device(config: EngineConfig, device: torch.device) -> None:
    """ValueError if the processes were started for another kind of device than is requested."""
    if config.device not in ("auto", device.type):
        raise ValueError(f"device {config.device!r} was requested, but the processes were started for {device.type!r}")


def check_positions(config: EngineConfig, model: ModelConfig) -> None:
    """ValueError if rows may grow longer than a model of this shape allows."""
    asked = config.max_seq_len
    if asked > model.max_seq_len:
        raise ValueError(f"max_seq_len {asked:,} is over the model's {model.max_seq_len:,} positions")


def check_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> None:
    """ValueError if queries of a model of this dtype cannot be multiplied with the keys of such a cache."""
    if config.kv_dtype == "int8" and dtype == torch.float16:
        raise ValueError(
            "kv_dtype 'int8' is not for models in fp16, in which products with whole numbers overflow: use dtype 'bf16'"
        )


def check_planes(config: EngineConfig, draft: DraftConfig, model: ModelConfig) -> None:
    """ValueError if drafts are to read a plane of a cache that has none."""
    if not draft.needs_planes:
        return
    asked = f"policy {draft.policy!r}" if draft.kv_bits is None else f"kv_bits {draft.kv_bits}"
    if config.kv_dtype != "int8":
        raise ValueError(f"{asked} reads half of an int8 cache: it needs kv_dtype 'int8', got {config.kv_dtype!r}")
    if model.head_dim % 2:
        raise ValueError(f"{asked} needs an even head dim, of which two numbers share a byte, got {model.head_dim}")


def check_same_vocabulary(tokenizer: Tokenizer | None, target: ModelConfig, draft_folder: Path) -> ModelConfig:
    """The draft model's configuration; ValueError unless its token ids mean the same as the target's."""
    config = read_config(draft_folder)
    theirs = load_tokenizer(draft_folder, config)
    if not (tokenizer and theirs) and config.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft model {draft_folder} has a vocabulary of {config.vocab_size:,}, the target one of "
            f"{target.vocab_size:,}, and without a tokenizer of each nobody can tell whether they are one"
        )
    if tokenizer and theirs and (how := difference(tokenizer, theirs)):
        said = f"draft model {draft_folder} has another tokenizer than the target ({how})"
        raise ValueError(f"{said}: they must share one")
    return config


def require_fit(model: Transformer, config: EngineConfig, draft: DraftConfig, group: Group) -> None:
    """ValueError if a rank's part of a model cannot run here, or not with such a configuration; it is not changed."""
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    group.check_part(model)
    require_kernels(device)
    check_positions(config, model.config)
    check_kv_dtype(config, dtype)
    check_planes(config, draft, model.config)
    if config.quantize is None and is_quantized(model):
        raise ValueError("this model's weights are quantized: pass the same quantize, or load the model again")
    if config.quantize and getattr(model, "unquantized_in", None) == id(model):
        raise ValueError("an engine runs this model's weights as they are: pass no quantize, or load the model again")
    require_plain(model, config)


def require_plain(model: Transformer, config: EngineConfig) -> None:
    """ValueError if the reference is to run a target or a draft model whose weights an engine has packed."""
    if config.bodies == "reference" and is_packed(model):
        raise ValueError("bodies 'reference' needs plain weights, and an engine has packed this model's: load it again")


def plan_for(system: System) -> MemoryPlan:
    """The memory plan of a rank's part on this machine; ValueError for a precision that does not run here."""
    _require_precisions(system)
    system = replace(system, whole=whole_memory(system.device), packs=packs(system))
    if system.draft.policy != "auto":
        return MemoryPlan.of(system)
    have, precisions = free_memory(system.device), [system.draft.quantize]
    if system.draft.quantize is None and system.ranks == 1:  # the ranks of a model must have the same arms
        precisions += copies(system)
    while True:  # without the copies that do not fit
        draft = AutoConfig.of(system.draft, precisions)
        for arm in draft.arms:
            _require_precisions(replace(system, draft=arm))
        plan = MemoryPlan.of(replace(system, draft=draft))
        if len(precisions) == 1 or have is None or (plan.draft_weights if system.held else plan.total) <= have:
            return plan
        precisions.pop()


def has_room(system: System, gamma: int) -> bool:
    """Whether rounds of so many drafts fit beside what an engine holds that has captured nothing yet."""
    draft = replace(system.draft, gamma=gamma)
    if isinstance(draft, AutoConfig):
        draft = replace(draft, arms=tuple(replace(arm, gamma=gamma) for arm in draft.arms))
    plan = MemoryPlan.of(replace(system, draft=draft, whole=whole_memory(system.device)))
    have = free_memory(system.device)
    copies_to_come = plan.draft_weights if isinstance(draft, AutoConfig) else 0
    return have is None or plan.workspace + plan.captured + plan.graphs + plan.reserve + copies_to_come <= have


# On an H200 torch's int4 products were fast for one row and slow for 16; ours, which replaced them, were not timed.
MOST_INT4_ROWS = 4


def copies(system: System) -> list[str]:
    """Precisions of the target's weights in copies that may pay, those that take more memory last.

    On CUDA int4 for few rows, and float8 where it runs: there int8 reads a weight no faster than bf16.
    """
    names = [name for name in ("int4", "float8", "int8") if _may_draft(system, name)]
    if "float8" in names and "int8" in names:
        names.remove("int8")
    if "int4" in names and system.device.type == "cuda" and system.config.batch_size > MOST_INT4_ROWS:
        names.remove("int4")
    return names


def _may_draft(system: System, precision: str) -> bool:
    """Whether the target may draft for itself with weights of this precision."""
    try:
        _require_precisions(replace(system, draft=DraftConfig(policy="streaming", quantize=precision)))
    except ValueError:
        return False
    return system.config.quantize != precision and system.config.bodies == "fast"


def _require_precisions(system: System) -> None:
    """ValueError if weights of the target, or of copies that draft, are of a precision that does not run here."""
    config, draft, device = system.config, system.draft, system.device
    require_precision(config.quantize, device, system.dtype)
    require_sizes(config.quantize, device, system.model, system.ranks)
    require_precision(draft.quantize, device, system.dtype, of_draft=True)
    steps = system.draft_steps()  # refuses a draft that does not fit the models
    if draft.quantize:
        for step, ranks in steps:
            if step.model is not system.draft_model:
                require_copy(draft.quantize, config.quantize)
            require_sizes(draft.quantize, device, step.model, ranks, of_draft=True)


def packs(system: System) -> bool:
    """Whether steps read packed weights."""
    config, model = system.config, system.model
    found = config.compile or kernels_are_built(model.head_dim, system.dtype, model.vocab_size, system.format)
    found = found and system.dtype == torch.bfloat16 and system.device.type == "cpu" and config.bodies == "fast"
    # what is not packed may have to be unpacked in every product
    if config.quantize or system.draft.quantize or system.draft.policy == "auto":
        found = found and packing_builds()
    return found
