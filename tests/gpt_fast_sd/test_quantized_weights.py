"""Quantized weights, of a target and of a copy that drafts for it: the copy costs acceptance, and never a token.

Precisions that run on CUDA alone run on a CPU that is told to run them: weights are quantized as ever, and products are
PyTorch's.
"""

import copy
import dataclasses
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.fast.cpu.packing import PackedInt8Linear, PackedLinear, SummedInt4Linear
from gpt_fast_sd.fast.linear_int4 import Int4Linear
from gpt_fast_sd.fast.linear_int8 import Int8Linear
from gpt_fast_sd.fast.linear_planes import PlanesLinear
from gpt_fast_sd.fast.ops import int4 as ops_int4
from gpt_fast_sd.fast.ops import int8 as ops_int8
from gpt_fast_sd.loading import MemoryPlan, System, fit, plan_for, workspace
from gpt_fast_sd.loading.load import load
from gpt_fast_sd.loading.load import plan_of as plan_of_models
from gpt_fast_sd.model import Transformer, load_model, save_hugging_face
from gpt_fast_sd.policies import ModelDraft
from gpt_fast_sd.policies.hierarchy import HierarchyDraft
from gpt_fast_sd.quantization import table as precisions
from gpt_fast_sd.quantization.quantize import draft_copy, drafter, equalize_keys, quantize
from gpt_fast_sd.quantization.table import TABLE, bytes_held, precision_of
from gpt_fast_sd.steps import Runner
from gpt_fast_sd.tp import local_config
from tests.drafts import MIXTURES, POLICIES, draft_of
from tests.float8_folders import save_float8
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.gpuless.live import LiveBytes
from tests.helpers import few, pack_or_skip, random_ids, tiny_config, tiny_engine, tiny_model, whole_text_logits

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
ALREADY = "needs plain weights, and this model is quantized already"
OF_CUDA = ("int4", "float8")
PROMPTS = [random_ids(n, seed=n) for n in (300, 7, 90)]


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which int4 and float8 run, in the layouts and bytes of a GPU."""
    for name in OF_CUDA:
        monkeypatch.setitem(TABLE[name], "cpu", replace(TABLE[name]["cuda"], capability=None))  # type: ignore[index]


def model_of(**changes: Any) -> Transformer:
    """A bf16 model whose widths every precision takes."""
    small = {"vocab_size": 512, "dim": 128, "n_heads": 8, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    return tiny_model(tiny_config(**small | changes), dtype=torch.bfloat16)


WIDE = {"dim": 1024, "head_dim": 128, "ffn_dim": 1024}


def linears_of(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def loaded_from(folder: Path, draft: DraftConfig | None = None, **changes: Any) -> Any:
    wanted = {"batch_size": 1, "max_seq_len": 300, "device": "cpu", "dtype": "bf16", "compile": False} | changes
    return load(folder, EngineConfig(**wanted), draft or DraftConfig(), None)


def plan_of(quantize: str | None = None, **system: Any) -> MemoryPlan:
    """The plan of a slot of the wide model, unless another is given."""
    config = EngineConfig(batch_size=system.pop("batch", 1), max_seq_len=300, quantize=quantize)
    wanted = {"draft": DraftConfig(), "model": model_of(**WIDE).config, "dtype": BF16} | system
    return MemoryPlan.of(System(config=config, **wanted))


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("name", "least", "most"), [("int8", 0.002, 0.1), ("int4", 0.02, 0.8), ("float8", 0.005, 0.3)])
def test_layers_of_a_target_are_quantized_and_say_nearly_the_same(name: str, least: float, most: float) -> None:
    model, ids = model_of(qkv_bias=True), random_ids(24)
    plain, head = whole_text_logits(model, ids).float(), model.output.weight
    quantize(model, name)
    assert [precision_of(m) for m in linears_of(model)] == [name] * 4 * 2 + [None]
    assert model.output.weight is head
    assert least < (whole_text_logits(model, ids).float() - plain).norm() / plain.norm() < most
    before = linears_of(model)
    quantize(model, name)  # once more changes nothing
    assert all(m is was for m, was in zip(linears_of(model), before, strict=True))
    other = "int8" if name != "int8" else "float8"
    with pytest.raises(ValueError, match=f"quantize '{other}' {ALREADY}"):
        quantize(model, other)


@pytest.mark.usefixtures("as_on_cuda")
def test_some_rows_at_a_time_are_quantized_as_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = model_of().layers[0].attention.wqkv  # type: ignore[union-attr]
    whole = TABLE["int4"]["cpu"].of(linear)
    monkeypatch.setattr(precisions, "ROWS_AT_ONCE", 128)  # the last part is shorter
    parts = TABLE["int4"]["cpu"].of(linear)
    for got, want in zip(parts.parameters(), whole.parameters(), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
    # no bits: it stops improving when the mean error of what it looks at no longer falls
    errors = [(one.state_dict()["weight"] - linear.weight).norm() / linear.weight.norm() for one in (parts, whole)]
    assert errors[0] < 1.05 * errors[1] and errors[1] < 0.12
    parts.load_state_dict(whole.state_dict())
    assert (parts.state_dict()["weight"] - whole.state_dict()["weight"]).norm() < 0.02 * linear.weight.norm()


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", ["int8", *OF_CUDA])
def test_a_copy_that_drafts_has_an_int8_head_or_one_of_float8(name: str) -> None:
    model = model_of()
    before, copy = bytes_of(model), draft_copy(model, name)
    assert [precision_of(m) for m in linears_of(copy)] == [name] * 4 * 2 + ["float8" if name == "float8" else "int8"]
    assert is_untouched(model, before) and copy.embedding is model.embedding and copy.norm is model.norm
    quantize(model, name)
    again = draft_copy(model, name)
    assert again.layers is model.layers and again.output is not model.output
    one = tiny_engine(DraftConfig(policy="full", gamma=1, quantize=name), model=model, quantize=name, batch_size=1)
    assert one._plan.draft_weights == bytes_held(again.output)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("name", "of_target"),
    few([(name, of_target) for name in ("int8", *OF_CUDA) for of_target in (False, True)],
        [("float8", False), ("int4", True)]),
)  # fmt: skip
def test_drafts_of_any_precision_give_what_plain_decoding_of_the_target_gives(name: str, of_target: bool) -> None:
    draft = DraftConfig(policy="streaming", budget=40, gamma=3, quantize=name)
    one = tiny_engine(draft, model=model_of(), exact=True, quantize=name if of_target else None)
    params = SamplingParams(max_tokens=12)
    expected = tokens_of(one.generate(PROMPTS, params, speculate=False))
    assert one.stats.drafted == 0
    assert tokens_of(one.generate(PROMPTS, params)) == expected
    assert one.stats.drafted > 0


# ---- equalized keys, and memory -------------------------------------------------------------------------------------


def biases_of_keys(model: Transformer) -> list[Tensor]:
    """Of each layer: [K, H]."""
    return [block.attention.wqkv.bias.data.unflatten(0, (2, 6, -1))[:, 4] for block in model.layers]  # type: ignore[union-attr]


def with_a_large_bias(**changes: Any) -> Transformer:
    """A model one of whose keys' dimensions is far larger than the others."""
    model = model_of(qkv_bias=True, **changes)
    for bias in biases_of_keys(model):
        bias[:, 3] = 300.0
    return model


@pytest.mark.usefixtures("as_on_cuda")
def test_keys_of_float8_weights_are_equalized_by_their_scales_and_no_bit_changes() -> None:
    model, ids = with_a_large_bias(), random_ids(24)
    quantize(model, "float8")
    expected = whole_text_logits(model, ids)
    equalize_keys(model)
    assert max(bias.abs().max() for bias in biases_of_keys(model)) < 10
    assert whole_text_logits(model, ids).equal(expected)


# fp32 numbers that are kept beside each row that is quantized at a time
BESIDE = {("int8", "cpu"): 5, ("int4", "cpu"): 16, ("float8", "cuda"): 4, ("int4", "cuda"): 10}


@pytest.mark.parametrize(("name", "place"), few(BESIDE, list(BESIDE)[:1]))
def test_a_target_is_quantized_as_it_is_read_and_says_what_one_says_that_is_quantized_later(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """At no time is more there than what is quantized, a matrix and a half, and what is planned beside some rows."""
    if place == "cuda":
        request.getfixturevalue("as_on_cuda")
    rows = 256 if (name, place) == ("int4", "cuda") else 64
    for module in (precisions, ops_int8):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(ops_int4, "AT_ONCE", rows * 1024)
    source = with_a_large_bias(**WIDE, tie_embeddings=place == "cpu")
    save_hugging_face(source, tmp_path, dtype=torch.bfloat16)
    with LiveBytes() as live:
        loaded = loaded_from(tmp_path, quantize=name)
    held = bytes_held(loaded.model)
    assert loaded.plan.weights == held < 0.75 * bytes_held(source)
    # half of a matrix is stored, and read, by itself
    assert live.peak <= held + 1.5 * 2 * 2048 * 1024 + 4 * BESIDE[name, place] * rows * 1024 + 2**14
    whole, ids = load_model(tmp_path, dtype=torch.bfloat16), random_ids(40)
    got, expected = (Engine(model, None, loaded.config).logits(ids) for model in (loaded.model, whole))
    assert got.equal(expected) and max(bias.abs().max() for bias in biases_of_keys(loaded.model)) < 10


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", few(["int8", *OF_CUDA], ["int8", "float8"]))
def test_making_a_copy_takes_no_more_than_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (precisions, workspace, ops_int8):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 256)
    one = tiny_engine(model=model_of(**WIDE, n_layers=1), batch_size=1, max_seq_len=300)
    draft = DraftConfig(policy="full", gamma=1, quantize=name)
    plan = plan_of_models(one.model, None, one.config, draft, one.parallel)
    with LiveBytes() as live:
        copy = draft_copy(one.model, name)
    own = bytes_held(copy) - sum(p.nbytes for p in one.model.parameters() if any(p is q for q in copy.parameters()))
    beside = workspace._quantizing(one.model.config, TABLE[name]["cpu"].beside)
    assert own == plan.draft_weights < live.peak <= own + beside and plan.workspace >= beside


@pytest.mark.parametrize(("n_rows", "copies"), [(256, 0), (300, 1)])
def test_int8_products_of_many_rows_copy_a_weight(n_rows: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No others do, as CUDA's body allocates; the copy is in the memory plan."""
    references.as_on_cuda(monkeypatch)
    linear, x = Int8Linear(torch.randn(512, 2048).bfloat16(), None), torch.randn(n_rows, 2048).bfloat16()
    with LiveBytes("cuda") as live, torch.inference_mode():
        linear(x)
    assert live.peak == copies * TABLE["int8"]["cuda"].widened * linear.weight.numel() + 2 * n_rows * 512
    plans = [plan_of(quantize, device=CUDA) for quantize in (None, "int8")]
    assert plans[1].workspace >= plans[0].workspace + 2 * 2048 * 1024
    assert plans[1].captured >= plans[0].captured + 2 * 2048 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_an_int4_weight_in_each_product_is_planned_for(dtype: torch.dtype) -> None:
    """Where no kernel reads the blocks, PyTorch writes the weight that they stand for, by way of fp32."""
    linear = precisions.int4_in_blocks(Linear(2048, 512, bias=False).to(dtype).requires_grad_(False))
    x = torch.randn(1, 2048).to(dtype)
    with LiveBytes("cpu") as live, torch.inference_mode():
        linear(x)
    most = TABLE["int4"]["cpu"].widened * 2048 * 512
    assert 0.9 * most < live.peak <= most
    plain, int4, packed = plan_of(dtype=dtype), plan_of("int4", dtype=dtype), plan_of("int4", dtype=dtype, packs=True)
    largest = max(rows * columns for rows, columns in precisions.matrices_of(model_of(**WIDE).config, 1).values())
    assert int4.workspace >= plain.workspace + 10 * largest and packed.workspace < int4.workspace


@pytest.mark.parametrize("builds", [True, False])
def test_unpacking_is_planned_for_where_no_kernel_can_be_built(builds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "packing_builds", lambda: builds)
    config, model = EngineConfig(batch_size=1, max_seq_len=300, quantize="int4"), model_of(**WIDE).config
    system = System(config=config, draft=DraftConfig(), model=model, dtype=BF16)
    assert plan_for(system).workspace == MemoryPlan.of(replace(system, packs=builds)).workspace
    # no kernel reads weights of other outputs than multiples of 32: of ten heads of 40
    odd = replace(model, n_heads=8, n_kv_heads=1, head_dim=40)
    assert workspace._largest_of_layers(model, 1, packs=True) == 0
    assert workspace._largest_of_layers(odd, 1, packs=True) == 400 * model.dim


def test_a_draft_model_of_several_ranks_has_its_part_of_a_copy_on_each() -> None:
    theirs, draft = model_of(**WIDE).config, DraftConfig(policy="standalone", draft_model="small", quantize="int8")
    plans = [plan_of(draft=draft, draft_model=local_config(theirs, n), draft_ranks=n) for n in (1, 2)]
    whole, part = (plan.draft_weights for plan in plans)
    assert whole / 2 <= part <= 0.51 * whole  # of sums each rank has a scale for every output


@pytest.mark.parametrize("policy", ["hierarchy", "full"])
def test_an_int8_head_of_many_rows_is_planned_as_it_is_widened(policy: str) -> None:
    """A hierarchy's middle level gives logits after four tokens of each row: 65 rows are more than are tiled."""
    model = replace(model_of(**WIDE).config, vocab_size=64_000)

    def widened(batch: int) -> int:
        drafts = (DraftConfig(policy=policy, quantize=q) for q in ("int8", None))
        own, none = (plan_of(draft=draft, batch=batch, model=model, device=CUDA).captured for draft in drafts)
        return own - none

    largest = 2 * max(rows * columns for rows, columns in precisions.matrices_of(model, 1).values())
    few, many = (64, 65) if policy == "hierarchy" else (256, 257)
    assert (widened(few), widened(many)) == (largest, 2 * 64_000 * model.dim)


# ---- float8 as it is stored -----------------------------------------------------------------------------------------

WHOLE = tiny_config(dim=64, head_dim=16, ffn_dim=96)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kind", ["channel", "tensor", "fbgemm_fp8"])
@pytest.mark.filterwarnings("error")
def test_weights_that_are_stored_in_float8_stay_so_where_it_runs(kind: str, tmp_path: Path) -> None:
    meant = save_float8(tmp_path, kind, config=WHOLE)
    with LiveBytes() as live:
        loaded = loaded_from(tmp_path)
    assert loaded.config.quantize == "float8"
    assert [precision_of(m) for m in linears_of(loaded.model)] == ["float8"] * 4 * 2 + [None]
    held = bytes_held(loaded.model)
    assert loaded.plan.weights == held and live.peak <= held + 1.5 * 2 * 192 * 64 + 2**14
    # a weight is what it was stored as, seen through a product with one input at a time
    down = loaded.model.layers[1].feed_forward.w_out
    got = torch.stack([down(row[None])[0] for row in 256 * torch.eye(96, dtype=torch.bfloat16)], 1) / 256
    expected = meant["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=1e-6)  # bf16, inside the product, too
    one = Engine(loaded.model, None, loaded.config)
    assert one.config.quantize == "float8"
    assert len(one.generate([random_ids(20)], SamplingParams(max_tokens=4))[0].tokens) == 4


@pytest.mark.filterwarnings("ignore:.*dequantized")
def test_float8_that_does_not_run_is_dequantized_as_is_said_once_and_a_cache_is_left_to_the_user(
    tmp_path: Path,
) -> None:
    save_float8(tmp_path, config=WHOLE)
    with pytest.warns(UserWarning) as said:
        loaded = loaded_from(tmp_path)
    (one,) = [str(w.message) for w in said]
    assert "stored in float8 are dequantized as they are read: quantize 'float8' runs on device 'cuda', and" in one
    assert loaded.config.quantize is None and {precision_of(m) for m in linears_of(loaded.model)} == {None}
    with pytest.warns(UserWarning, match="dequantized as they are read: --quantize int8"):
        loaded = loaded_from(tmp_path, quantize="int8")
    assert {type(m) for m in linears_of(loaded.model.layers)} == {Int8Linear}
    save_float8(tmp_path, config=WHOLE, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})
    with pytest.warns(UserWarning, match="kv_cache_scheme is ignored, .* pass --kv-dtype int8"):
        assert loaded_from(tmp_path).config.kv_dtype is None


@pytest.mark.usefixtures("as_on_cuda")
def test_float8_in_blocks_is_dequantized_and_may_become_float8_with_a_scale_for_each_output(tmp_path: Path) -> None:
    save_float8(tmp_path, "blocks", config=WHOLE)
    for asked in (None, "float8"):
        with pytest.warns(
            UserWarning, match=r"dequantized .*: a scale is that of a block, and those of layers are of ou"
        ):
            loaded = loaded_from(tmp_path, quantize=asked)
        assert {precision_of(m) for m in linears_of(loaded.model.layers)} == {asked}


@pytest.mark.usefixtures("as_on_cuda")
def test_layers_that_a_checkpoint_leaves_alone_let_all_run_at_one_precision(tmp_path: Path) -> None:
    """Steps are compiled for one layer, so layers do not differ in kind."""
    save_float8(tmp_path, config=WHOLE, plain=("lm_head", "layers.1.mlp.down_proj"))
    with pytest.warns(UserWarning, match=r"dequantized .*: model\.layers\.1\.mlp\.down_proj\.weight is not, and all"):
        loaded = loaded_from(tmp_path)
    assert {precision_of(m) for m in linears_of(loaded.model)} == {None} and loaded.config.quantize is None
    assert {precision_of(m) for m in linears_of(loaded_from(tmp_path, quantize="float8").model.layers)} == {"float8"}


def test_a_cpu_refuses_what_it_does_not_run_before_weights_are_read(tmp_path: Path) -> None:
    float8 = "runs on device 'cuda', and the model is on 'cpu': use 'int8' or 'int4'$"
    for source, draft, changes, said in (
        (model_of(), DraftConfig(), {"quantize": "float8"}, f"quantize 'float8' {float8}"),
        (model_of(), DraftConfig(policy="full", quantize="float8"), {}, f"quantize 'float8' of a draft {float8}"),
        (tiny_model(), DraftConfig(), {"quantize": "int4"}, f"quantize 'int4' {BY_32}"),
        (tiny_model(), DraftConfig(), {"max_seq_len": 5000}, "max_seq_len 5,000 is over the model's 4,096 positions"),
        (tiny_model(), DraftConfig(policy="early_exit", exit_layers=60), {}, "exit_layers must be below the model's 2"),
    ):
        save_hugging_face(source, tmp_path, dtype=torch.bfloat16)
        (tmp_path / "model.safetensors").write_bytes(b"")  # what is in it is not looked at
        with pytest.raises(ValueError, match=said):
            loaded_from(tmp_path, draft, **changes)


# ---- weights that run on a CPU, and the copy -------------------------------------------------------------------------

DRAFTED = [name for name in (*POLICIES, *MIXTURES) if name != "lookup"]
GREEDY = SamplingParams(max_tokens=24)
LAYERS = {"int8": Int8Linear, "int4": Int4Linear}  # of a quantized model; the head of a copy is int8
PRECISIONS = list(LAYERS)


def engine(draft: DraftConfig | None = None, draft_model: Transformer | None = None, **settings: Any) -> Engine:
    return tiny_engine(draft, draft_model, model=tiny(), **settings)


def tiny(*, seed: int = 0, **changes: Any) -> Transformer:
    """A model all of whose sizes blocks of int4 divide."""
    return tiny_model(tiny_config(**{"ffn_dim": 64} | changes), seed=seed)


def has_precision(model: Transformer, name: str) -> bool:
    """Whether layers have this precision, and the head is int8."""
    layers = {type(m) for m in model.layers.modules() if isinstance(m, nn.Linear)}
    return layers == {LAYERS[name]} and type(model.output) is Int8Linear


def spoken(one: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    return tokens_of(one.generate(PROMPTS, params))


def drafters(one: Engine) -> list[Runner]:
    """The models that draft, with their caches."""
    levels = (one.policy, getattr(one.policy, "cheap", None))
    return [level.target if isinstance(level, HierarchyDraft) else level.runner for level in levels
            if isinstance(level, (HierarchyDraft, ModelDraft))]  # fmt: skip


def packable(**changes: Any) -> Transformer:
    """A bf16 model all of whose weights the kernel serves."""
    return tiny_model(tiny_config(vocab_size=512, dim=64, head_dim=32, ffn_dim=128, **changes), dtype=torch.bfloat16)


def bytes_of(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Where each parameter is, and a copy of what is there."""
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}


def is_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> bool:
    after = bytes_of(model)
    return after.keys() == before.keys() and all(
        after[name][0] == place and after[name][1].equal(value) for name, (place, value) in before.items()
    )


@pytest.mark.parametrize("own", few(["", "tie_embeddings", "qkv_bias", "qk_norm"], ["tie_embeddings", "qk_norm"]))
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copy_owns_its_matrices_and_shares_all_else(precision: str, own: str, packs: bool) -> None:
    model, ids = packable(**{own: True} if own else {}), random_ids(40)
    plain = whole_text_logits(model, ids)
    if packs:
        pack_or_skip(model)
    before, kinds = bytes_of(model), [type(m) for m in model.modules()]
    copy = draft_copy(model, precision)
    assert is_untouched(model, before) and [type(m) for m in model.modules()] == kinds
    assert copy.embedding is model.embedding and copy.norm is model.norm and copy.rope_freqs is model.rope_freqs
    assert copy.config is model.config and not copy.training and copy.embedding.weight.dtype == torch.bfloat16
    linears = {name: m for name, m in copy.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 4 * 2 + 1 and has_precision(copy, precision)
    theirs = {p.data_ptr() for p in model.parameters()}
    matrices = {f"{name}.{kind}" for name in linears for kind in ("weight", "scale", "blocks")}
    for name, p in copy.named_parameters(remove_duplicate=False):
        assert (p.data_ptr() in theirs) == (name not in matrices), name
    assert is_untouched(model, before)
    got = whole_text_logits(copy, ids)
    assert 0 < (got - plain).norm() <= {"int8": 0.1, "int4": 0.8}[precision] * plain.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copy_that_is_compiled_is_packed_and_says_the_same(precision: str) -> None:
    model, cache = packable(), tiny_engine(model=packable()).cache
    pack_or_skip(model)
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
    assert spoken(one) == spoken(engine())
    assert one.stats.drafted > 0 and is_untouched(one.model, before)
    assert all(has_precision(runner.model, precision) for runner in drafters(one))
    caches = {runner.cache.layers[0].k.data_ptr() for runner in drafters(one)}
    assert one.cache.layers[0].k.data_ptr() in caches or small is not None
    if small is not None:
        assert {type(m) for m in small.modules() if isinstance(m, nn.Linear)} == {Linear}


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.8), ("int4", 0.2)])
def test_a_draft_that_reads_all_is_accepted_often_and_not_always(precision: str, least: float) -> None:
    """Below 100 % the copy is what drafts; it is the target's own precision where no copy is made."""
    params = SamplingParams(max_tokens=60)
    own, copied = engine(draft_of("full", gamma=3)), engine(draft_of("full", gamma=3, quantize=precision))
    assert spoken(copied, params) == spoken(own, params)
    assert own.stats.acceptance_rate == 1.0
    assert least < copied.stats.acceptance_rate < 1.0


# ---- planes: half of the target's own weights --------------------------------------------------------------------


def shares(one: Engine) -> bool:
    own = {p.data_ptr() for p in one.model.parameters()}
    return all(p.data_ptr() in own for runner in drafters(one) for p in runner.model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_target_in_planes_says_what_it_said_and_what_drafts_from_them_owns_nothing(tied: bool) -> None:
    """Once there they stay there, whatever drafts next, and are saved as the weights that they are."""
    one = tiny_engine(model=packable(tie_embeddings=tied), compile=not tied)
    expected, first, size = spoken(one), one.target.bodies, bytes_held(one.model)
    scales = 4 * sum(len(m.weight) for m in linears_of(one.model if not tied else one.model.layers))
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    for wanted in ("int8", "planes", "int4", "planes", None):
        one.redraft(draft_of("full", gamma=3, quantize=wanted))
        assert spoken(one) == expected and shares(one) == (wanted in ("planes", None))
        who, joins = one.target.bodies.names, ("products", "bf16 weights, joined from planes in each call")
        assert who == (*first.names, *[joins] * (PlanesLinear in map(type, one.model.modules())))
        assert wanted != "planes" or (one._plan.draft_weights == scales and one.stats.acceptance_rate < 1.0)
    assert bytes_held(one.model) == size + scales and one.target.bodies is not first
    for n in (1, 2):
        assert all(one.model.state_dict()[name].equal(n * value) for name, value in before.items())
        one.model.load_state_dict({name: 2 * value for name, value in before.items()})


@pytest.mark.parametrize("name", few([n for n in DRAFTED if not draft_of(n).draft_model], ["early_exit", "hierarchy"]))
def test_drafts_from_planes_change_no_token_though_a_row_is_kept_whole(name: str) -> None:
    model = packable()
    with torch.no_grad():
        model.layers[1].feed_forward.w_out.weight[3, 5] = 2.0**-60  # type: ignore[union-attr]
    expected = spoken(tiny_engine(model=copy.deepcopy(model)))
    for _ in range(2):  # engines share it
        one = tiny_engine(draft_of(name, gamma=3, quantize="planes"), model=model)
        assert spoken(one) == expected and one.stats.drafted > 0 and shares(one)
    model.load_state_dict(before := model.state_dict())  # rows that are whole have room, and no more of them
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="2 rows of a weight do not lie in planes, and 1 are held beside them"):
        weight = before["layers.0.feed_forward.w_out.weight"].clone()
        weight[:2, 0] = 2.0**-60
        model.load_state_dict(before | {"layers.0.feed_forward.w_out.weight": weight})


def test_weights_in_planes_are_held_once_and_lie_nowhere_else_where_that_is_refused() -> None:
    one, half = (
        tiny_engine(model=packable(), compile=True),
        draft_of("streaming", gamma=3, quantize="planes", kv_bits=4),
    )
    expected, before = spoken(one), [weakref.ref(m.weight.untyped_storage()) for m in linears_of(one.model.layers)]
    with pytest.raises(ValueError, match="this engine's cache does not lie in planes"):
        one.redraft(half)
    assert before and all(ref() is not None for ref in before) and spoken(one) == expected
    one.redraft(replace(half, kv_bits=None))
    gc.collect()
    assert not any(ref() for ref in before) and spoken(one) == expected


@pytest.mark.slow
def test_packed_weights_of_a_kind_lie_in_planes_in_all_layers_or_in_none() -> None:
    model, config = packable(), EngineConfig(batch_size=2, max_seq_len=512)
    with torch.no_grad():
        model.layers[1].feed_forward.w_out.weight[3, 5] = 2.0**-60  # type: ignore[union-attr]
    expected = spoken(Engine(copy.deepcopy(model), None, config))
    one = Engine(model, None, config, draft_of("quest", gamma=3, quantize="planes"))  # steps compiled for one layer
    assert spoken(one) == expected and one.stats.drafted > 0


# ---- refusals ------------------------------------------------------------------------------------------------------

BY_32 = "needs inputs that 32 divides, and w_out has 48 and 32$"
# a model, how an engine runs it already, the precision of another engine and of its draft
REFUSED: list[tuple[Any, tuple[str | None, ...], str | None, str | None, str]] = [
    (tiny_model, (), "int4", None, f"^quantize 'int4' {BY_32}"),
    (tiny_model, (), None, "int4", f"^quantize 'int4' of a draft {BY_32}"),
    (packable, ("int8",), None, None, "weights are quantized: pass the same quantize, or load the model again"),
    (packable, ("int4",), "int8", None, f"quantize 'int8' {ALREADY}"),
    # once a second engine quantized them in place, and the first one's target was another from then on
    (packable, (None,), "int8", None, "runs this model's weights as they are: pass no quantize, or load the"),
    (packable, (), "int8", "float8", "quantize 'float8' of a draft runs on device 'cuda'"),
    (tiny, (), None, "planes", "'planes' of a draft needs bf16 weights, and the model's are float32: use dtype 'bf16'"),
    (packable, ("int8",), "int8", "planes", "needs a target with plain weights, .* this one's are int8"),
    (packable, (None,), None, "planes", "and another engine runs this one's as they are: load the model again"),
    (packable, (), "int8", "int4", "'int4' of a draft needs a target with plain weights, .* this one's are int8"),
]


@pytest.mark.parametrize(("made", "runs", "quantize", "drafts", "said"), REFUSED)
def test_weights_that_cannot_be_quantized_so_are_refused_and_stay_as_they_are(
    made: Any, runs: tuple[str | None, ...], quantize: str | None, drafts: str | None, said: str
) -> None:
    model, draft = made(), DraftConfig(policy="streaming", budget=24, quantize=drafts) if drafts else None
    engines = [tiny_engine(model=model, quantize=name) for name in runs]
    kinds, before, ids = [type(m) for m in model.modules()], bytes_of(model), random_ids(40)
    expected = [one.logits(ids) for one in engines]
    with pytest.raises(ValueError, match=said):
        tiny_engine(draft, model=model, quantize=quantize)
    assert [type(m) for m in model.modules()] == kinds and is_untouched(model, before)
    if draft and not quantize:
        with pytest.raises(ValueError, match=said):
            tiny_engine(model=model).redraft(draft)
    assert all(one.logits(ids).equal(said) for one, said in zip(engines, expected, strict=True))
    if runs:  # it may run once more as it does, and a copy of plain weights in any way
        again, name = (model, runs[0]) if runs[0] else (copy.deepcopy(model), quantize)
        tiny_engine(model=again, quantize=name)


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plan_counts_what_copies_own(precision: str, name: str) -> None:
    draft = draft_of(name, gamma=3, quantize=precision)
    small = tiny(n_layers=1, dim=64) if draft.draft_model else None
    one = engine(draft, small)
    sources = [one.model, *([small] if small else [])]
    theirs = {p.data_ptr() for model in sources for p in model.parameters()}
    own = sum(p.nbytes for r in drafters(one) for p in r.model.parameters() if p.data_ptr() not in theirs)
    assert one._plan.draft_weights == one._plan.parts["quantized draft weights"] == own
    assert MemoryPlan.of(dataclasses.replace(one._plan.system, draft=draft_of(name, gamma=3))).draft_weights == 0
