"""The plan of an engine's memory is what it allocates, and what cannot fit is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.memory import GIB, MemoryPlan
from gpt_fast_sd.model import PRESETS
from tests.helpers import tiny_config, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def plan(batch: int, context: int, policy: str = "off", **draft: Any) -> MemoryPlan:
    """Llama 3.1 8B in bf16 on CUDA."""
    model = PRESETS["meta-llama/Llama-3.1-8B"]
    config = EngineConfig(batch_size=batch, max_seq_len=context, dtype="bf16")
    drafts = DraftConfig(policy=policy, **draft)
    return MemoryPlan.of(config, drafts, model, None, torch.bfloat16, device=CUDA, weights=2 * model.n_params)


@pytest.mark.parametrize("policy", ["off", "full", "streaming", "snapkv", "quest", "guided", "standalone", "lookup"])
def test_caches_and_selections_take_what_the_plan_says(policy: str) -> None:
    small = tiny_model(tiny_config(n_layers=1)) if policy == "standalone" else None
    draft = DraftConfig(policy=policy, budget=96, gamma=4, draft_model="given" if small else None)
    config = EngineConfig(batch_size=3, max_seq_len=900, device="cpu", dtype="fp32", compile=False)
    engine = Engine(tiny_model(), None, config, draft, small)
    expected = MemoryPlan.of(config, draft, engine.model.config, small.config if small else None, torch.float32)

    def nbytes(*tensors: torch.Tensor) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    assert expected.kv == nbytes(*engine.cache.k, *engine.cache.v)
    policy_bytes = nbytes(engine.rows.history)
    view: Any = getattr(engine.policy, "view", None)
    if policy == "standalone":
        cache = view.reader.cache
        assert expected.draft_kv == nbytes(*cache.k, *cache.v)
    elif policy == "quest":
        policy_bytes += nbytes(*view.bounds, *view.chosen)
    elif policy in ("streaming", "snapkv", "guided"):
        policy_bytes += nbytes(view.slots)
    assert policy_bytes <= expected.policy <= 1.5 * policy_bytes + 2 * 3 * 2 * 96 * 8


@pytest.mark.parametrize(
    ("batch", "context", "fits"), [(32, 28_672, True), (16, 57_344, True), (8, 100_000, True), (16, 100_000, False)]
)
def test_llama_8b_fits_an_h200_where_it_should(batch: int, context: int, fits: bool) -> None:
    for policy, draft in (("off", {}), ("streaming", {"budget": 512}), ("guided", {"budget": 1024})):
        wanted = plan(batch, context, policy, **draft)
        assert (wanted.total <= 139 * GIB) is fits


def test_the_refusal_names_every_size_and_what_would_fit() -> None:
    wanted = plan(16, 100_000, "snapkv", budget=2048)
    with pytest.raises(ValueError) as refusal:
        wanted.check(139 * GIB, torch.device("cuda", 0), EngineConfig(batch_size=16, max_seq_len=100_000))
    sentence = str(refusal.value)
    assert sentence.startswith("batch_size 16 x max_seq_len 100,000 takes weights 15.0 GiB + KV cache 196.0 GiB + ")
    assert "over the 139.0 GiB of memory of cuda:0; batch_size 10 would fit" in sentence
    plan(10, 100_000, "snapkv", budget=2048).check(139 * GIB, CPU, EngineConfig(batch_size=10))


def test_one_slot_that_does_not_fit_is_told_to_be_shorter() -> None:
    with pytest.raises(ValueError, match="not even one slot fits: lower max_seq_len"):
        plan(1, 131_072).check(20 * GIB, CPU, EngineConfig(batch_size=1, max_seq_len=131_072))


def test_memory_is_checked_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpt_fast_sd.engine as engine_module

    def untouched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(engine_module, "_free_memory", lambda device: 2**20)
    monkeypatch.setattr("safetensors.safe_open", untouched)
    with pytest.raises(ValueError, match=r"batch_size 8 x max_seq_len 8,192 takes weights .* memory of cpu"):
        Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False))


def test_what_cannot_be_told_is_not_refused() -> None:
    plan(1000, 131_072).check(None, CPU, EngineConfig())
