"""Precisions that run on CUDA alone, on a CPU that is told to run them: what is quantized, how, and how much is there.

torchao quantizes as ever. Only what is a GPU's own is replaced: that it is asked for, the layout of packed int4 and the
product with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.linear_int8 import Int8Linear
from gpt_fast_sd.fast.ops import int8 as ops_int8
from gpt_fast_sd.loading import MemoryPlan, System, fit, plan_for, workspace
from gpt_fast_sd.loading.load import load
from gpt_fast_sd.model import Transformer, load_model, save_hugging_face
from gpt_fast_sd.quantization import table as precisions
from gpt_fast_sd.quantization.quantize import draft_copy, equalize_keys, quantize
from gpt_fast_sd.quantization.table import TABLE, bytes_held, precision_of
from gpt_fast_sd.tp import local_config
from tests.float8_folders import save_float8
from tests.gpt_fast_sd.fast import references
from tests.gpuless.live import LiveBytes
from tests.helpers import few, random_ids, tiny_config, tiny_model, whole_text_logits

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
OF_CUDA = ("int4", "float8")
PROMPTS = [random_ids(n, seed=n) for n in (300, 7, 90)]


def unpacked(packed: Tensor, scale_and_zero: Tensor) -> Tensor:
    """int32 [O / 8, I / 128, 32, 4], bf16 [I / group, O, 2] -> fp32 [O, I]"""
    n_out = 8 * len(packed)
    pairs = packed.reshape(n_out, -1).view(torch.uint8)  # [O, I / 2]
    numbers = torch.stack([pairs >> 4, pairs & 15], -1).flatten(1).float() - 8
    scale, zero = scale_and_zero.float().transpose(0, 1).unbind(-1)  # [O, I / group] each
    groups: Tensor = numbers.unflatten(1, (scale.shape[1], -1)) * scale[..., None] + zero[..., None]
    return groups.flatten(1)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU on which int4 and float8 run, in torchao's tensors, and bytes of which a GPU would have the same."""
    for name in OF_CUDA:
        monkeypatch.setitem(TABLE[name], "cpu", replace(TABLE[name]["cuda"], capability=None))  # type: ignore[index]
    quant_api = importlib.import_module("torchao.quantization.quant_api")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(precisions, "TOO_MUCH", 10.0)  # of small models most would be padding
    library = torch.library.Library("aten", "IMPL")

    def pack(pairs: Tensor, inner_k_tiles: int) -> Tensor:
        assert inner_k_tiles == 8
        return pairs.view(torch.int32).view(len(pairs) // 8, -1, 32, 4).clone()

    def multiply(x: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
        return (x.float() @ unpacked(packed, scale_and_zero).t()).to(x.dtype)

    library.impl("_convert_weight_to_int4pack", pack, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    yield
    library._destroy()  # type: ignore[no-untyped-call]


def model_of(**changes: Any) -> Transformer:
    """A bf16 model whose widths every precision takes, though int4 pads them."""
    small = {"vocab_size": 512, "dim": 128, "n_heads": 8, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    return tiny_model(tiny_config(**small | changes), dtype=torch.bfloat16)


WIDE = {"dim": 1024, "head_dim": 128, "ffn_dim": 1024}  # int4 pads nothing of it


def engine(model: Transformer, draft: DraftConfig | None = None, **changes: Any) -> Engine:
    wanted: dict[str, Any] = {"batch_size": 2, "max_seq_len": 512, "device": "cpu", "compile": False} | changes
    return Engine(model, None, EngineConfig(**wanted), draft)


def linears_of(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("name", "least", "most"), [("int8", 0.002, 0.1), ("int4", 0.02, 0.8), ("float8", 0.005, 0.3)])
def test_layers_of_a_target_are_quantized_and_say_nearly_the_same(name: str, least: float, most: float) -> None:
    model, ids = model_of(qkv_bias=True), random_ids(24)
    plain, head = whole_text_logits(model, ids).float(), model.output.weight
    quantize(model, name)
    assert [precision_of(m) for m in linears_of(model)] == [name] * 4 * 2 + [None]
    assert model.output.weight is head
    error = (whole_text_logits(model, ids).float() - plain).norm() / plain.norm()
    assert least < error < most
    before = linears_of(model)
    quantize(model, name)  # once more changes nothing
    assert all(m is was for m, was in zip(linears_of(model), before, strict=True))
    other = "int8" if name != "int8" else "float8"
    with pytest.raises(
        ValueError, match=f"quantize '{other}' needs plain weights, and this model is quantized already"
    ):
        quantize(model, other)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", OF_CUDA)
def test_some_rows_at_a_time_are_quantized_as_all_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = model_of().layers[0].attention.wqkv  # type: ignore[union-attr]
    assert isinstance(linear, nn.Linear)
    whole = TABLE[name]["cpu"].of(linear).weight.data
    monkeypatch.setattr(precisions, "ROWS_AT_ONCE", 80)  # the last part is shorter
    parts = TABLE[name]["cpu"].of(linear).weight.data
    assert type(parts) is type(whole) and parts.shape == linear.weight.shape
    (names, attributes), (_, expected) = parts.__tensor_flatten__(), whole.__tensor_flatten__()  # type: ignore[attr-defined]
    assert attributes == expected
    for each in names:
        got, want = getattr(parts, each), getattr(whole, each)
        assert got.shape == want.shape and got.dtype == want.dtype
        # int4 stops improving when the mean error of what it looks at no longer falls
        assert name == "int4" or got.float().equal(want.float())
    x = torch.eye(128, dtype=torch.bfloat16)
    weights = [nn.functional.linear(x, w).t().float() for w in (parts, whole)]
    errors = [(w - linear.weight.float()).norm() / linear.weight.float().norm() for w in weights]
    assert errors[0] < 1.05 * errors[1] and errors[1] < (0.12 if name == "int4" else 0.03)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", ["int8", *OF_CUDA])
def test_a_copy_that_drafts_has_an_int8_head_or_one_of_float8(name: str) -> None:
    model = model_of()
    before = {key: (p.data_ptr(), p.clone()) for key, p in model.named_parameters()}
    copy = draft_copy(model, name)
    assert [precision_of(m) for m in linears_of(copy)] == [name] * 4 * 2 + ["float8" if name == "float8" else "int8"]
    assert all(p.data_ptr() == before[key][0] and p.equal(before[key][1]) for key, p in model.named_parameters())
    assert copy.embedding is model.embedding and copy.norm is model.norm
    quantize(model, name)
    again = draft_copy(model, name)
    assert again.layers is model.layers and again.output is not model.output
    one = engine(
        model, DraftConfig(policy="full", gamma=1, quantize=name), quantize=name, batch_size=1, max_seq_len=300
    )
    assert one._plan.draft_weights == bytes_held(again.output)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("name", "of_target"),
    few([(name, of_target) for name in ("int8", *OF_CUDA) for of_target in (False, True)],
        [("float8", False), ("int4", True)]),
)  # fmt: skip
def test_drafts_of_any_precision_give_what_plain_decoding_of_the_target_gives(name: str, of_target: bool) -> None:
    draft = DraftConfig(policy="streaming", budget=40, gamma=3, quantize=name)
    one = engine(model_of(), draft, exact=True, quantize=name if of_target else None)
    params = SamplingParams(max_tokens=12)
    expected = [c.tokens for c in one.generate(PROMPTS, params, speculate=False)]
    assert one.stats.drafted == 0
    assert [c.tokens for c in one.generate(PROMPTS, params)] == expected
    assert one.stats.drafted > 0


# ---- equalized keys -------------------------------------------------------------------------------------------------


def with_a_large_bias() -> Transformer:
    """A model one of whose keys' dimensions is far larger than the others."""
    model = model_of(qkv_bias=True)
    for block in model.layers:
        bias = block.attention.wqkv.bias.data.unflatten(0, (2, 6, 16))  # type: ignore[union-attr]
        bias[:, 4, 3] = 300.0
    return model


@pytest.mark.usefixtures("as_on_cuda")
def test_keys_of_float8_weights_are_equalized_by_their_scales_and_no_bit_changes() -> None:
    model, ids = with_a_large_bias(), random_ids(24)
    quantize(model, "float8")
    expected = whole_text_logits(model, ids)
    equalize_keys(model)
    for block in model.layers:
        bias = block.attention.wqkv.bias.unflatten(0, (2, 6, 16))  # type: ignore[union-attr]
        assert bias[:, 4].abs().max() < 10
    assert whole_text_logits(model, ids).equal(expected)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", few(["int8", *OF_CUDA], ["int8", "float8"]))
def test_keys_of_weights_that_are_quantized_as_they_are_read_are_equalized(name: str, tmp_path: Path) -> None:
    save_hugging_face(with_a_large_bias(), tmp_path, dtype=torch.bfloat16)
    config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", dtype="bf16", compile=False, quantize=name)
    model = load(tmp_path, config, DraftConfig(), None).model
    whole = load_model(tmp_path, dtype=torch.bfloat16)
    got = Engine(model, None, config).logits(random_ids(40))
    assert got.equal(Engine(whole, None, config).logits(random_ids(40)))
    for block in model.layers:
        assert block.attention.wqkv.bias.unflatten(0, (2, 6, 16))[:, 4].abs().max() < 10  # type: ignore[union-attr]


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", few(["int8", *OF_CUDA], ["float8"]))
def test_a_target_is_quantized_as_it_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time is more there than what is quantized, a matrix, and what is planned beside it."""
    rows = 256 if name == "int4" else 64
    for module in (precisions, ops_int8):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    source = model_of(**WIDE)
    save_hugging_face(source, tmp_path, dtype=torch.bfloat16)
    config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", dtype="bf16", compile=False, quantize=name)
    with LiveBytes() as live:
        loaded = load(tmp_path, config, DraftConfig(), None)
    held = bytes_held(loaded.model)
    assert loaded.plan.weights == held < 0.75 * bytes_held(source)
    largest, beside = 2 * 2048 * 1024, 4 * TABLE[name]["cpu"].beside * rows * 1024
    # half of a matrix is stored, and read, by itself
    assert live.peak <= held + 1.5 * largest + beside + 2**14


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", few(["int8", *OF_CUDA], ["int8", "float8"]))
def test_making_a_copy_takes_no_more_than_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (precisions, workspace, ops_int8):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 256)
    one = engine(model_of(**WIDE, n_layers=1), batch_size=1, max_seq_len=300)
    draft = DraftConfig(policy="full", gamma=1, quantize=name)
    plan = one._plan_of(draft, None)
    with LiveBytes() as live:
        copy = draft_copy(one.model, name)
    own = bytes_held(copy) - sum(p.nbytes for p in one.model.parameters() if any(p is q for q in copy.parameters()))
    assert plan.draft_weights == own
    assert (
        plan.draft_weights
        < live.peak
        <= plan.draft_weights + workspace._quantizing(one.model.config, TABLE[name]["cpu"].beside)
    )
    assert plan.workspace >= workspace._quantizing(one.model.config, TABLE[name]["cpu"].beside)


@pytest.mark.parametrize(("n_rows", "copies"), [(256, 0), (300, 1)])
def test_only_int8_products_of_many_rows_copy_a_weight(
    n_rows: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA's body allocates; the copy is in the memory plan."""
    references.as_on_cuda(monkeypatch)
    linear = Int8Linear(torch.randn(512, 2048).bfloat16(), None)
    x = torch.randn(n_rows, 2048).bfloat16()
    with LiveBytes("cuda") as live, torch.inference_mode():
        linear(x)
    assert live.peak == copies * TABLE["int8"]["cuda"].widened * linear.weight.numel() + 2 * n_rows * 512
    config, model = EngineConfig(batch_size=1, max_seq_len=300), model_of(**WIDE).config
    system = System(config=config, draft=DraftConfig(), model=model, dtype=torch.bfloat16, device=CUDA)
    plans = [MemoryPlan.of(replace(system, config=replace(config, quantize=q))) for q in (None, "int8")]
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
    config, model = EngineConfig(batch_size=1, max_seq_len=300), model_of(**WIDE).config
    plain = System(config=config, draft=DraftConfig(), model=model, dtype=dtype)
    system = replace(plain, config=replace(config, quantize="int4"))
    plans = [MemoryPlan.of(one) for one in (plain, system)]
    largest = max(rows * columns for rows, columns in precisions.matrices_of(model, 1).values())
    assert plans[1].workspace >= plans[0].workspace + 10 * largest
    packed = MemoryPlan.of(replace(system, packs=True))
    assert packed.workspace < plans[1].workspace


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

    def copied(ranks: int) -> int:
        config, own = EngineConfig(batch_size=1, max_seq_len=300), local_config(theirs, ranks)
        system = System(config=config, draft=draft, model=theirs, draft_model=own, dtype=BF16, draft_ranks=ranks)
        return MemoryPlan.of(system).draft_weights

    assert copied(1) / 2 <= copied(2) <= 0.51 * copied(1)  # of sums each rank has a scale for every output


@pytest.mark.parametrize("policy", ["hierarchy", "full"])
def test_an_int8_head_of_many_rows_is_planned_as_it_is_widened(policy: str) -> None:
    """A hierarchy's middle level gives logits after four tokens of each row: 65 rows are more than are tiled."""
    model = replace(model_of(**WIDE).config, vocab_size=64_000)

    def widened(batch: int) -> int:
        config = EngineConfig(batch_size=batch, max_seq_len=300)
        drafts = (DraftConfig(policy=policy, quantize=q) for q in ("int8", None))
        with_copy, without = (
            MemoryPlan.of(System(config=config, draft=draft, model=model, dtype=BF16, device=CUDA)).captured
            for draft in drafts
        )
        return with_copy - without

    largest = 2 * max(rows * columns for rows, columns in precisions.matrices_of(model, 1).values())
    few, many = (64, 65) if policy == "hierarchy" else (256, 257)
    assert (widened(few), widened(many)) == (largest, 2 * 64_000 * model.dim)


# ---- float8 as it is stored -----------------------------------------------------------------------------------------

WHOLE = tiny_config(dim=64, head_dim=16, ffn_dim=96)


def loaded_from(folder: Path, **changes: Any) -> Any:
    wanted = {"batch_size": 1, "max_seq_len": 300, "device": "cpu", "dtype": "bf16", "compile": False} | changes
    return load(folder, EngineConfig(**wanted), DraftConfig(), None)


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


def test_float8_that_does_not_run_is_dequantized_and_it_is_said_once(tmp_path: Path) -> None:
    meant = save_float8(tmp_path, config=WHOLE)
    with pytest.warns(UserWarning) as said:
        loaded = loaded_from(tmp_path)
    (one,) = [str(w.message) for w in said]
    assert "stored in float8 are dequantized as they are read: quantize 'float8' runs on device 'cuda', and" in one
    assert loaded.config.quantize is None and {precision_of(m) for m in linears_of(loaded.model)} == {None}
    expected = meant["model.layers.1.mlp.down_proj.weight"].bfloat16()
    assert loaded.model.layers[1].feed_forward.w_out.weight.equal(expected)
    with pytest.warns(UserWarning, match="dequantized as they are read: --quantize int8"):
        loaded = loaded_from(tmp_path, quantize="int8")
    assert {type(m) for m in linears_of(loaded.model.layers)} == {Int8Linear}


@pytest.mark.usefixtures("as_on_cuda")
def test_layers_that_a_checkpoint_leaves_alone_let_all_run_at_one_precision(tmp_path: Path) -> None:
    """Steps are compiled for one layer, so layers do not differ in kind."""
    save_float8(tmp_path, config=WHOLE, plain=("lm_head", "layers.1.mlp.down_proj"))
    with pytest.warns(UserWarning, match=r"dequantized .*: model\.layers\.1\.mlp\.down_proj\.weight is not, and all"):
        loaded = loaded_from(tmp_path)
    assert {precision_of(m) for m in linears_of(loaded.model)} == {None} and loaded.config.quantize is None
    asked = loaded_from(tmp_path, quantize="float8")
    assert {precision_of(m) for m in linears_of(asked.model.layers)} == {"float8"}


@pytest.mark.filterwarnings("ignore:.*dequantized")
def test_what_a_checkpoint_says_of_a_cache_is_left_to_the_user(tmp_path: Path) -> None:
    save_float8(tmp_path, config=WHOLE, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})
    with pytest.warns(UserWarning, match="kv_cache_scheme is ignored, .* pass --kv-dtype int8"):
        loaded = loaded_from(tmp_path)
    assert loaded.config.kv_dtype is None


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_cpu_refuses_what_runs_on_cuda_before_weights_are_read(tmp_path: Path) -> None:
    save_hugging_face(model_of(), tmp_path, dtype=torch.bfloat16)
    (tmp_path / "model.safetensors").write_bytes(b"")  # what is in it is not looked at
    said = "quantize 'float8' runs on device 'cuda', and the model is on 'cpu': use 'int8' or 'int4'$"
    config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", compile=False)
    with pytest.raises(ValueError, match=said):
        load(tmp_path, replace(config, quantize="float8"), DraftConfig(), None)
    with pytest.raises(ValueError, match=said.replace("' runs", "' of a draft runs")):
        load(tmp_path, config, DraftConfig(policy="full", quantize="float8"), None)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_draft_of_another_precision_than_a_quantized_target_is_refused() -> None:
    model = model_of()
    with pytest.raises(
        ValueError, match=r"'float8' of a draft needs a target with plain weights, .* this one's are int4"
    ):
        engine(model, DraftConfig(policy="full", quantize="float8"), quantize="int4")
    assert {precision_of(m) for m in linears_of(model)} == {None}


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", OF_CUDA)
def test_steps_over_a_librarys_tensors_are_compiled_for_one_layer_and_once(name: str) -> None:
    draft = DraftConfig(policy="streaming", budget=40, gamma=3, quantize=name)
    one = engine(model_of(n_layers=3), draft, quantize=name, compile=True)
    for speculate in (True, False):
        found = one.generate(PROMPTS, SamplingParams(max_tokens=12), speculate=speculate)
        assert [len(c.tokens) for c in found] == [12] * 3
        assert one.stats.recompiles == 0
