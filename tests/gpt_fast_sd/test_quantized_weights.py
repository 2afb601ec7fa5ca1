"""Quantized weights, of a target and of a copy that drafts for it: the copy costs acceptance, and never a token."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.fast.cpu.packing import PackedInt8Linear, PackedLinear, SummedInt4Linear, pack_linears
from gpt_fast_sd.fast.linear_int4 import Int4Linear
from gpt_fast_sd.fast.linear_int8 import Int8Linear
from gpt_fast_sd.fast.ops import int4 as ops_int4
from gpt_fast_sd.fast.ops import int8 as ops_int8
from gpt_fast_sd.loading import MemoryPlan
from gpt_fast_sd.loading.load import load
from gpt_fast_sd.model import Transformer, load_model, save_hugging_face
from gpt_fast_sd.policies import ModelDraft
from gpt_fast_sd.policies.hierarchy import HierarchyDraft
from gpt_fast_sd.quantization.quantize import draft_copy, drafter, quantize
from gpt_fast_sd.steps import Runner
from tests.drafts import MIXTURES, POLICIES, draft_of
from tests.gpt_fast_sd.policies.drafting import compiles_once
from tests.gpuless.live import LiveBytes
from tests.helpers import few, random_ids, tiny_config, tiny_model, whole_text_logits

CPU = torch.device("cpu")
DRAFTED = [name for name in (*POLICIES, *MIXTURES) if name != "lookup"]
PROMPTS = [random_ids(n, seed=n) for n in (300, 7, 90)]
GREEDY = SamplingParams(max_tokens=24)
LAYERS = {"int8": Int8Linear, "int4": Int4Linear}  # of a quantized model; the head of a copy is int8
PRECISIONS = list(LAYERS)


def engine(draft: DraftConfig | None = None, draft_model: Transformer | None = None, **changes: Any) -> Engine:
    wanted: dict[str, Any] = {"batch_size": 2, "max_seq_len": 512, "device": "cpu", "compile": False} | changes
    return Engine(tiny(), None, EngineConfig(**wanted), draft, draft_model)


def tiny(*, seed: int = 0, **changes: Any) -> Transformer:
    """A model all of whose sizes blocks of int4 divide."""
    return tiny_model(tiny_config(**{"ffn_dim": 64} | changes), seed=seed)


def has_precision(model: Transformer, name: str) -> bool:
    """Whether layers have this precision, and the head is int8."""
    layers = {type(m) for m in model.layers.modules() if isinstance(m, nn.Linear)}
    return layers == {LAYERS[name]} and type(model.output) is Int8Linear


def tokens_of(one: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.tokens for completion in one.generate(PROMPTS, params)]


def model_of(**changes: Any) -> Transformer:
    """A bf16 model all of whose weights the kernel serves."""
    config = tiny_config(vocab_size=512, dim=64, head_dim=32, ffn_dim=128, **changes)
    return tiny_model(config, dtype=torch.bfloat16)


def bytes_of(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Where each parameter is, and a copy of what is there."""
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}


def is_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> bool:
    after = bytes_of(model)
    return after.keys() == before.keys() and all(
        after[name][0] == place and after[name][1].equal(value) for name, (place, value) in before.items()
    )


# ---- the copy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    few(
        [{}, {"tie_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True}],
        [{"tie_embeddings": True}, {"qk_norm": True}],
    ),
    ids=str,
)
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copy_owns_its_matrices_and_shares_all_else(precision: str, changes: dict[str, Any], packs: bool) -> None:
    model = model_of(**changes)
    ids = random_ids(40)
    plain = whole_text_logits(model, ids)
    if packs and not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    before, kinds = bytes_of(model), [type(m) for m in model.modules()]
    copy = draft_copy(model, precision)
    assert is_untouched(model, before) and [type(m) for m in model.modules()] == kinds
    assert copy.embedding is model.embedding and copy.norm is model.norm and copy.rope_freqs is model.rope_freqs
    assert copy.config is model.config and not copy.training and copy.embedding.weight.dtype == torch.bfloat16
    linears = {name: m for name, m in copy.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 4 * 2 + 1 and has_precision(copy, precision)
    theirs = {p.data_ptr() for p in model.parameters()}
    own = {f"{name}.{kind}" for name in linears for kind in ("weight", "scale", "blocks")}
    for name, p in copy.named_parameters(remove_duplicate=False):
        assert (p.data_ptr() in theirs) == (name not in own), name
    assert is_untouched(model, before)
    got = whole_text_logits(copy, ids)
    assert 0 < (got - plain).norm() <= {"int8": 0.1, "int4": 0.8}[precision] * plain.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_copy_of_a_part_of_a_model_owns_no_more_than_that_part(precision: str) -> None:
    short = draft_copy(model_of(n_layers=3).first_layers(1), precision)
    assert sum(isinstance(m, nn.Linear) for m in short.modules()) == 5 and short.config.n_layers == 1
    assert has_precision(short, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copy_of_layers_that_have_its_precision_has_them_and_a_head_of_its_own(precision: str) -> None:
    model = model_of()
    quantize(model, precision)
    copy = draft_copy(model, precision)
    assert copy.layers is model.layers and isinstance(copy.output, Int8Linear) and type(model.output) is Linear


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copy_that_is_compiled_is_packed_and_says_the_same(precision: str) -> None:
    model = model_of()
    if not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    cache = Engine(model_of(), None, EngineConfig(batch_size=1, max_seq_len=300, device="cpu", compile=False)).cache
    eager, compiled = (
        drafter(Runner(model, cache, backend=FastBackend(CPU, options)), precision).model for options in (None, {})
    )
    layers = {"int8": PackedInt8Linear, "int4": SummedInt4Linear}[precision]
    assert {type(m) for m in compiled.modules() if isinstance(m, nn.Linear)} == {layers, PackedInt8Linear}
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {PackedLinear}
    ids = random_ids(40)
    expected = whole_text_logits(eager, ids)
    # SwiGLU is taken before what it is taken of is rounded
    torch.testing.assert_close(whole_text_logits(compiled, ids), expected, rtol=0.05, atol=0.2)


# ---- drafts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(DRAFTED, ["streaming", "guided", "hierarchy over standalone"]))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantized_drafts_change_no_token(precision: str, name: str) -> None:
    draft = draft_of(name, gamma=3, quantize=precision)
    small = tiny(seed=1) if draft.draft_model else None
    one = engine(draft, small)
    before = bytes_of(one.model)
    expected = tokens_of(engine())
    assert tokens_of(one) == expected
    assert one.stats.drafted > 0 and is_untouched(one.model, before)
    levels = [one.policy, getattr(one.policy, "cheap", None)]
    drafting = [level.target if isinstance(level, HierarchyDraft) else level.runner for level in levels
                if isinstance(level, (HierarchyDraft, ModelDraft))]  # fmt: skip
    for runner in drafting:
        assert has_precision(runner.model, precision)
    assert one.cache.layers[0].k.data_ptr() in {r.cache.layers[0].k.data_ptr() for r in drafting} or "stand" in name
    if small is not None:
        assert {type(m) for m in small.modules() if isinstance(m, nn.Linear)} == {Linear}


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.8), ("int4", 0.2)])
def test_a_draft_that_reads_all_is_accepted_often_and_not_always(precision: str, least: float) -> None:
    """Below 100 % the copy is what drafts; it is the target's own precision where no copy is made."""
    params = SamplingParams(max_tokens=60)
    own, copied = engine(draft_of("full", gamma=3)), engine(draft_of("full", gamma=3, quantize=precision))
    assert tokens_of(copied, params) == tokens_of(own, params)
    assert own.stats.acceptance_rate == 1.0
    assert least < copied.stats.acceptance_rate < 1.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_drafts_for_a_target_of_their_precision_give_that_targets_tokens(precision: str) -> None:
    plain = engine(quantize=precision)
    one = engine(draft_of("streaming", gamma=3, quantize=precision), quantize=precision)
    assert tokens_of(one) == tokens_of(plain)
    assert one.policy is not None and one.policy.runner.model.layers is one.model.layers  # type: ignore[attr-defined]


def test_another_draft_may_be_quantized_or_not() -> None:
    one = engine(draft_of("streaming", gamma=3))
    expected, before = tokens_of(one), bytes_of(one.model)
    for wanted in ("int8", None, "int4"):
        one.redraft(draft_of("quest", gamma=3, quantize=wanted))
        assert tokens_of(one) == expected and is_untouched(one.model, before)


@pytest.mark.slow
def test_steps_of_a_copy_are_compiled_once() -> None:
    compiles_once("streaming", n_graphs=1, budget=40, quantize="int8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_with_int4_weights_are_compiled_once(dtype: torch.dtype) -> None:
    draft = draft_of("streaming", gamma=3, quantize="int4")
    config = EngineConfig(batch_size=2, max_seq_len=512, device="cpu", quantize="int4")
    shape = tiny_config(vocab_size=512, dim=64, head_dim=32, ffn_dim=128)
    one = Engine(tiny_model(shape, dtype=dtype), None, config, draft)
    spoken = tokens_of(one)
    assert one.stats.recompiles == 0 and one.stats.drafted > 0
    assert [c.tokens for c in one.generate(PROMPTS, GREEDY)] == spoken
    if dtype == torch.float32:
        eager = Engine(tiny_model(shape), None, dataclasses.replace(config, compile=False))
        assert tokens_of(eager) == spoken


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_a_device_that_runs_no_such_draft_refuses_it() -> None:
    model, cache = model_of(), engine().cache
    runner = Runner(model, cache)
    meta = type("Meta", (Runner,), {"device": torch.device("meta")})(model, cache)
    assert drafter(meta, None) is meta and drafter(runner, None) is runner
    with pytest.raises(
        ValueError, match=r"'int8' of a draft runs on device 'cpu' or 'cuda', and the model is on 'meta'$"
    ):
        drafter(meta, "int8")


def test_int4_with_a_width_that_no_block_divides_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = tiny_model()
    config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", compile=False)
    for name, changed, draft in (
        ("quantize 'int4'", {"quantize": "int4"}, None),
        ("quantize 'int4' of a draft", {}, DraftConfig(policy="streaming", budget=24, quantize="int4")),
    ):
        with pytest.raises(ValueError, match=f"^{name} needs inputs that 32 divides, and w_out has 48 and 32$"):
            Engine(model, None, dataclasses.replace(config, **changed), draft)
    one = Engine(model, None, config)
    with pytest.raises(ValueError, match="needs inputs that 32 divides"):
        one.redraft(DraftConfig(policy="streaming", budget=24, quantize="int4"))
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {Linear}
    save_hugging_face(model, tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match="quantize 'int4' needs inputs that 32 divides"):
        load(tmp_path, dataclasses.replace(config, quantize="int4"), DraftConfig(), None)


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plan_counts_what_copies_own(precision: str, name: str) -> None:
    draft = draft_of(name, gamma=3, quantize=precision)
    small = tiny(n_layers=1, dim=64) if draft.draft_model else None
    one = engine(draft, small)
    sources = [one.model, *([small] if small else [])]
    theirs = {p.data_ptr() for model in sources for p in model.parameters()}
    levels = [one.policy, getattr(one.policy, "cheap", None)]
    models = [level.target.model if isinstance(level, HierarchyDraft) else level.runner.model for level in levels
              if isinstance(level, (HierarchyDraft, ModelDraft))]  # fmt: skip
    own = sum(p.nbytes for model in models for p in model.parameters() if p.data_ptr() not in theirs)
    assert one._plan.draft_weights == own
    assert one._plan.parts["quantized draft weights"] == own
    without = dataclasses.replace(one._plan.system, draft=draft_of(name, gamma=3))
    assert MemoryPlan.of(without).draft_weights == 0


@pytest.mark.parametrize(("precision", "other"), [("int8", "int4"), ("int4", "int8")])
def test_weights_that_are_quantized_are_not_run_as_if_they_were_not(precision: str, other: str) -> None:
    model = model_of()
    config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", compile=False, quantize=precision)
    Engine(model, None, config)
    with pytest.raises(ValueError, match=r"weights are quantized: pass the same quantize, or load the model again"):
        Engine(model, None, dataclasses.replace(config, quantize=None))
    with pytest.raises(ValueError, match=f"quantize '{other}' needs plain weights, and this model is quantized alread"):
        Engine(model, None, dataclasses.replace(config, quantize=other))
    Engine(model, None, config)


def test_weights_that_an_engine_runs_are_not_quantized_under_it() -> None:
    """Once a second engine quantized them in place, and the first one's target was another from then on."""
    model, ids = model_of(), random_ids(40)
    config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", compile=False)
    first = Engine(model, None, config)
    said = first.logits(ids)
    with pytest.raises(ValueError, match="runs this model's weights as they are: pass no quantize, or load the"):
        Engine(model, None, dataclasses.replace(config, quantize="int8"))
    assert first.logits(ids).equal(said)
    Engine(copy.deepcopy(model), None, dataclasses.replace(config, quantize="int8"))


def test_a_draft_that_does_not_run_leaves_the_target_as_it_is() -> None:
    model, draft = model_of(), DraftConfig(policy="streaming", quantize="float8")
    config = EngineConfig(batch_size=1, max_seq_len=512, device="cpu", compile=False, quantize="int8")
    with pytest.raises(ValueError, match="quantize 'float8' of a draft"):
        Engine(model, None, config, draft)
    assert not any(isinstance(m, Int8Linear) for m in model.modules())


# ---- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", few([{}, {"tie_embeddings": True}, {"qkv_bias": True}], [{"qkv_bias": True}]), ids=str
)
@pytest.mark.parametrize(("precision", "copies"), [("int8", 5), ("int4", 16)])
def test_a_target_is_quantized_as_it_is_read(
    precision: str, copies: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no time is more there than what is quantized, a matrix and a half, and rows of it in fp32, a few times."""
    monkeypatch.setattr(ops_int8, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(ops_int4, "AT_ONCE", 8 * 160)
    source = tiny_model(tiny_config(n_layers=6, dim=64, ffn_dim=160, **changes), dtype=torch.bfloat16)
    save_hugging_face(source, tmp_path, dtype=torch.bfloat16)
    config = EngineConfig(
        batch_size=1, max_seq_len=300, device="cpu", dtype="bf16", compile=False, quantize=precision, kv_dtype="bf16"
    )
    with LiveBytes() as live:
        loaded = load(tmp_path, config, DraftConfig(), None)
    held = sum(p.nbytes for p in loaded.model.parameters())
    assert loaded.plan.weights == held < 0.75 * sum(p.nbytes for p in source.parameters())
    largest = 2 * 320 * 64
    assert live.peak <= held + 1.5 * largest + copies * 4 * 8 * 160 + 4096  # and tables of few bytes
    whole = load_model(tmp_path, dtype=torch.bfloat16)  # which an engine quantizes later
    expected = Engine(whole, None, config).logits(random_ids(40))
    assert Engine(loaded.model, None, config).logits(random_ids(40)).equal(expected)
