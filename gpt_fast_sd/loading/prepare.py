"""Models as an engine runs them: keys equalized, weights quantized and packed, kernels being built."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from gpt_fast_sd.model import CacheFormat, KVCache, ModelConfig, Transformer
from gpt_fast_sd.tp import Group, local_config

from ..config import EngineConfig
from ..fast import begin_building, cpu_kernels
from ..fast.choose import FastBackend
from ..fast.compile import can_compile, inductor_options
from ..quantization.quantize import equalize_keys, quantize
from ..steps import Runner


def target_of(model: Transformer, config: EngineConfig, group: Group, form: CacheFormat) -> Runner:
    """A rank's part of a model with its cache of this format, as an engine of this configuration runs it.

    Its weights are quantized if requested, and packed if its steps read packed weights.
    """
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    model.fit_texts(config.max_seq_len)
    if config.exact:
        group.sum_in_order(model)
    equalize_keys(model)
    if config.quantize:
        quantize(model, config.quantize)
    else:  # a mark of this model, and of no copy: quantized in place, it would be another model to this engine, too
        model.unquantized_in = id(model)  # type: ignore[assignment]
    own = local_config(model.config, group.size)
    cache = KVCache(own, config.batch_size, config.max_seq_len, format=form, device=device)
    compiled = config.compile and can_compile(device)
    options, stand_ins = inductor_options(config, device) if compiled else None, config.bodies == "fast"
    runner = Runner(model, cache, group, FastBackend(device, options, stand_ins))
    runner.backend.pack(runner)
    mark_run(model, cache)
    if compiled and device.type == "cpu" and stand_ins:
        begin_building_for(model.config, dtype, form, compiles=not runner.bodies.fused)
    return runner


def ready_draft(model: Transformer, group: Group, target: Runner, *, copied: bool) -> None:
    """Prepare a draft model, whose cache its policy makes; ValueError if it is not the rank's part.

    copied: whether a quantized copy drafts in its place.
    """
    group.check_part(model)
    model.fit_texts(target.cache.max_seq_len)
    equalize_keys(model)
    mark_run(model, target.cache)
    if not copied:
        target.backend.pack(replace(target, model=model))


def mark_run(model: Transformer, cache: KVCache) -> None:
    """Note that an engine, whose target has this cache, runs a model: see quantize.runs_elsewhere."""
    of, caches = getattr(model, "run_with", (0, ()))  # of this model, and of no copy
    model.run_with = id(model), (*(caches if of == id(model) else ()), weakref.ref(cache))  # type: ignore[assignment]


def begin_building_for(model: ModelConfig, dtype: torch.dtype, form: CacheFormat, *, compiles: bool) -> None:
    """Build in the background what steps of such a model wait for. compiles: whether some are compiled even in bf16."""
    kernels = cpu_kernels(model.head_dim, dtype, model.vocab_size, form)
    begin_building(*kernels, header=compiles or dtype != torch.bfloat16)
