"""The plan of an engine's memory is what it allocates, and what cannot fit is refused before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpt_fast_sd.engine as engine_module
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.memory import DRAWING, GIB, GRAPH_SETS, NODE, MemoryPlan
from gpt_fast_sd.model import PRESETS, SPLIT
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.rounds import judge_step
from gpt_fast_sd.rows import Rows
from scripts import batch
from tests.helpers import random_ids, tiny_config, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = 2**12  # numbers of slots and drafts, which no plan counts
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.7)
FILTERED = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)


def plan(batch: int, context: int, policy: str = "off", groups: int = 0, **draft: Any) -> MemoryPlan:
    """Llama 3.1 8B in bf16 on an H200."""
    model = PRESETS["meta-llama/Llama-3.1-8B"]
    config = EngineConfig(batch_size=batch, max_seq_len=context, dtype="bf16")
    drafts, loaded = DraftConfig(policy=policy, **draft), 2 * model.n_params
    return MemoryPlan.of(
        config, drafts, model, None, torch.bfloat16, device=CUDA, weights=loaded, groups=groups, whole=140 * GIB
    )


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made inside, that were there at a time; what operators take inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(n for _, n in self._live.values()))
        return out


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
    assert expected.text == nbytes(engine.rows.history)
    policy_bytes = 0
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


def test_a_device_keeps_a_reserve_for_what_is_allocated_beside_torch() -> None:
    alone, shared = plan(16, 57_344), plan(16, 57_344, groups=2)
    assert alone.reserve == GIB + int(0.03 * 140 * GIB)
    assert shared.total - alone.total == shared.reserve - alone.reserve == 2 * GIB
    model = tiny_config()
    on_cpu = MemoryPlan.of(EngineConfig(), DraftConfig(), model, None, torch.float32, groups=2, whole=140 * GIB)
    assert on_cpu.reserve == on_cpu.graphs == 0


def test_captured_rounds_are_planned_for_by_their_launches() -> None:
    fixed, auto = (plan(16, 57_344, "streaming", gamma=gamma, budget=512).graphs for gamma in (8, "auto"))
    assert 3_000 <= fixed // (GRAPH_SETS * NODE) <= 5_000  # rounds of 0 and 8 drafts, of 32 layers each
    assert 2 * fixed < auto < 4 * fixed  # 31 steps instead of 10
    assert plan(16, 57_344).graphs * 10 == fixed
    config = EngineConfig(cuda_graphs="off")
    model = tiny_config()
    assert MemoryPlan.of(config, DraftConfig(), model, None, torch.bfloat16, device=CUDA, whole=GIB).graphs == 0


# ---- what sampling holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("gamma", [0, 3, 8])
@pytest.mark.parametrize("with_q", [True, False], ids=["drawn", "certain"])
def test_drawing_and_judging_hold_no_more_than_the_plan_says(params: SamplingParams, gamma: int, with_q: bool) -> None:
    n_slots, vocab = 3, 20_000
    rows = Rows(torch.zeros(n_slots, dtype=torch.int64), 2 * SPLIT, vocab, ())
    for slot in range(n_slots):
        rows.put(slot, [1, 2, 3], params, seed=slot)
    rows.look(dict.fromkeys(range(n_slots), 2), [params] * n_slots)
    with torch.inference_mode():
        logits = torch.randn(n_slots, gamma + 1, vocab)
        q = torch.rand(n_slots, gamma, vocab).softmax(-1) if with_q and gamma and params.temperature else None
        draft = Draft(torch.zeros(n_slots, gamma, dtype=torch.int64), q, torch.full((n_slots,), gamma))
        with LiveBytes() as judging:
            judge_step(rows, logits, draft, None)
        with LiveBytes() as choosing:
            rows.choose(logits[:, 0], rows.seq_len + 3, 1)
    assert judging.peak <= DRAWING * logits.nbytes + SMALL
    assert choosing.peak <= DRAWING * logits[:, 0].nbytes + SMALL
    if params.temperature:  # it does measure
        assert judging.peak >= logits.nbytes and choosing.peak >= logits[:, 0].nbytes


@pytest.mark.parametrize("policy", ["off", "streaming", "snapkv", "guided", "lookup", "hierarchy"])
def test_a_whole_round_holds_no_more_than_the_plan_s_workspace(policy: str) -> None:
    """Selecting anew, drafting, verifying and judging, with a vocabulary that is large beside the layers."""
    vocab, length = 4_000, 400
    config = EngineConfig(batch_size=3, max_seq_len=500, device="cpu", dtype="fp32", compile=False)
    draft = DraftConfig(policy=policy, budget=96, gamma=4)
    engine = Engine(tiny_model(tiny_config(vocab_size=vocab)), None, config, draft)
    expected = MemoryPlan.of(config, draft, engine.model.config, None, torch.float32).workspace
    rows = engine.rows
    with torch.inference_mode():
        for slot in range(3):
            rows.put(slot, random_ids(length, seed=slot, vocab_size=vocab), FILTERED, seed=slot)
        rows.look(dict.fromkeys(range(3), length - 1), [FILTERED] * 3)
        with LiveBytes() as live:
            if engine.policy:
                engine.policy.renew(rows)
            engine.rounds.device_round(draft.max_gamma)
    assert 0.3 * expected <= live.peak <= expected + SMALL


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_the_refusal_names_every_size_what_is_missing_and_what_would_fit() -> None:
    wanted = plan(16, 100_000, "snapkv", budget=2048)
    config = EngineConfig(batch_size=16, max_seq_len=100_000)
    with pytest.raises(ValueError) as refusal:
        wanted.check(139 * GIB, torch.device("cuda", 0), config)
    sentence = str(refusal.value)
    assert sentence.startswith("batch_size 16 x max_seq_len 100,000 takes weights 15.0 GiB + KV cache 196.0 GiB + ")
    assert re.search(r" \+ CUDA graphs \d\.\d GiB \+ reserve 5\.2 GiB = ", sentence)
    missing = (wanted.total - 139 * GIB) / GIB
    assert f"the 139.0 GiB of memory of cuda:0 are {missing:.1f} GiB short of that; batch_size 9 or " in sentence
    slots, tokens = (int(number.replace(",", "")) for number in sentence.split("; batch_size ")[1].split()[:4:3])
    fitting = [plan(n, 100_000, "snapkv", budget=2048).total <= 139 * GIB for n in (slots, slots + 1)]
    longest = [plan(16, n, "snapkv", budget=2048).total <= 139 * GIB for n in (tokens, tokens + 1)]
    assert fitting == longest == [True, False]


def test_one_byte_too_few_is_refused() -> None:
    wanted, config = plan(8, 57_344), EngineConfig(batch_size=8, max_seq_len=57_344)
    wanted.check(wanted.total, CUDA, config)
    with pytest.raises(ValueError, match=r"short of that; batch_size 7 or max_seq_len 57,088 would fit"):
        wanted.check(wanted.total - 1, CUDA, config)


def test_one_slot_that_does_not_fit_is_told_how_short_to_be() -> None:
    with pytest.raises(ValueError, match=r"not even one slot fits: lower max_seq_len to [0-9,]+$") as refusal:
        plan(1, 131_072).check(30 * GIB, CPU, EngineConfig(batch_size=1, max_seq_len=131_072))
    tokens = int(str(refusal.value).split()[-1].replace(",", ""))
    assert plan(1, tokens).total <= 30 * GIB < plan(1, tokens + 1).total
    with pytest.raises(ValueError, match=r"not even the smallest cache fits: .* more processes \(tp\)"):
        plan(1, 131_072).check(15 * GIB, CPU, EngineConfig(batch_size=1, max_seq_len=131_072))


def test_memory_is_checked_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(engine_module, "free_memory", lambda device, held=0: 2**20)
    monkeypatch.setattr("safetensors.safe_open", untouched)
    with pytest.raises(ValueError, match=r"batch_size 8 x max_seq_len 8,192 takes weights .* memory of cpu"):
        Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False))


def test_a_batch_that_no_machine_holds_ends_a_program_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "hi"}\n', encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        batch.main([str(prompts), str(tmp_path / "out.jsonl"), "--device", "cpu", "--batch-size", "10000000"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and " short of that; batch_size " in said


def asked(monkeypatch: pytest.MonkeyPatch, have: int | None) -> list[int]:
    """The engine finds this much memory; the list fills with the bytes held as often as it asks."""
    held: list[int] = []

    def free_memory(device: torch.device, held_: int = 0, **kwargs: int) -> int | None:
        held.append(kwargs.get("held", held_))
        return None if have is None else have - held[-1]

    monkeypatch.setattr(engine_module, "free_memory", free_memory)
    return held


def test_an_engine_that_is_loaded_asks_for_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held = asked(monkeypatch, 2**40)
    Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False, max_seq_len=512, batch_size=1))
    assert held == [0]
    Engine(tiny_model(), None, EngineConfig(device="cpu", compile=False, max_seq_len=512, batch_size=1))
    assert held == [0, 0]


def test_a_redraft_that_cannot_fit_is_refused_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(batch_size=2, max_seq_len=900, device="cpu", dtype="fp32", compile=False)
    first = DraftConfig(policy="streaming", budget=64, gamma=3)
    engine, small = Engine(tiny_model(), None, config, first), tiny_model(tiny_config(n_layers=1), seed=1)
    second = DraftConfig(policy="standalone", draft_model="given", gamma=3)
    prompts = [random_ids(40, seed=seed) for seed in (1, 2)]
    before = [completion.tokens for completion in engine.generate(prompts)]
    state = dict(vars(engine))
    plans = [
        MemoryPlan.of(config, draft, engine.model.config, theirs, torch.float32)
        for draft, theirs in ((first, None), (second, small.config))
    ]
    enough = plans[0].total + plans[1].beside(plans[0]).total
    assert enough > plans[0].total + plans[1].draft_kv
    held = asked(monkeypatch, enough - 1)
    with monkeypatch.context() as within:
        within.setattr(engine_module, "build_policy", lambda *args: pytest.fail("something was built"))
        with pytest.raises(ValueError) as refusal:
            engine.redraft(second, small)
    sentence = str(refusal.value)
    assert sentence.startswith("policy 'standalone' with budget 256 takes the draft model's KV cache ")
    assert " left of the memory of cpu are " in sentence and sentence.endswith(" short of that; nothing is changed")
    assert held == [plans[0].total]
    assert all(vars(engine)[name] is value for name, value in state.items())
    assert [completion.tokens for completion in engine.generate(prompts)] == before
    asked(monkeypatch, enough)
    engine.redraft(second, small)
    assert engine.draft is second
    assert [completion.tokens for completion in engine.generate(prompts)] == before


def test_what_cannot_be_told_is_not_refused() -> None:
    plan(1000, 131_072).check(None, CPU, EngineConfig())
