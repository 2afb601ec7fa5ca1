"""Checkpoints in float8 are read, dequantized or as they are; every other kind is refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_fast_sd.model import (
    CheckpointError,
    Transformer,
    load_model,
    name_table,
    read_config,
    read_stored_dtype,
    read_stored_float8,
    save_hugging_face,
)
from tests.float8_folders import READ, REFUSED, compressed_tensors, describe, save_float8
from tests.helpers import tiny_config, tiny_model

Q = "model.layers.0.self_attn.q_proj.weight"


def rows_of(model: Transformer, meant: dict[str, Tensor], name: str) -> list[Tensor]:
    """What a parameter of a model should hold: the rows of its stored tensors, in their order."""
    layout = name_table(model.config)[name]
    units = [meant[stored].unflatten(0, (-1, rows)) for stored, rows, _ in layout]
    return [part for unit in zip(*units, strict=True) for part in unit]


class Keeper:
    """What loading is asked to keep: numbers and their scales by name."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, model: Transformer, name: str, numbers: Tensor, scales: Tensor) -> None:
        self.kept[name] = numbers, scales
        place, _, kind = name.rpartition(".")
        setattr(model.get_submodule(place), kind, torch.nn.Parameter(numbers.float(), requires_grad=False))


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Store these tensors too, or none of that name."""
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")


def refusal(folder: Path, keep: Keeper | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_config(folder)
        load_model(folder, dtype=torch.bfloat16, keep=keep)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_float8_are_dequantized_row_by_row(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    meant = save_float8(tmp_path, kind)
    model = load_model(tmp_path, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert parameter.equal(torch.cat(rows_of(model, meant, name)).to(dtype)), name


@pytest.mark.parametrize("kind", READ)
def test_weights_in_float8_are_kept_with_a_scale_for_each_row(kind: str, tmp_path: Path) -> None:
    meant, keep = save_float8(tmp_path, kind), Keeper()
    model = load_model(tmp_path, dtype=torch.bfloat16, keep=keep)
    assert len(keep.kept) == 4 * 2
    for name, (numbers, scales) in keep.kept.items():
        assert numbers.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert (numbers.float() * scales[:, None]).equal(torch.cat(rows_of(model, meant, name))), name
    assert model.output.weight.dtype == model.embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [True, False], ids=["as it is", "dequantized"])
@pytest.mark.parametrize(("name", "bad"), [(Q, torch.nan), (f"{Q}_scale", torch.nan), (f"{Q}_scale", torch.inf)])
def test_float8_that_is_no_finite_number_is_refused(name: str, bad: float, kept: bool, tmp_path: Path) -> None:
    save_float8(tmp_path)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    tensor.view(-1)[-1:] = bad
    change(tmp_path, **{name: tensor})
    said = refusal(tmp_path, Keeper() if kept else None)
    assert re.search(f"model.safetensors: {name if kept else Q} holds -?(nan|inf) as ", said)


def test_what_a_checkpoint_ignores_keeps_its_dtype_and_is_found(tmp_path: Path) -> None:
    whole, some, none = (tmp_path / name for name in ("whole", "some", "none"))
    save_float8(whole)
    meant = save_float8(some, plain=("lm_head", "layers.1.mlp.down_proj"), kv_cache_scheme={"num_bits": 8})
    save_hugging_face(tiny_model(), none, dtype=torch.float32)
    stored = read_stored_float8(whole), read_stored_float8(some)
    assert stored[0] is not None and stored[0].other is None and not stored[0].cache
    assert stored[1] is not None and stored[1].other == "model.layers.1.mlp.down_proj.weight" and stored[1].cache
    assert read_stored_float8(none) is None
    assert read_stored_dtype(some) == "bfloat16"
    keep = Keeper()
    model = load_model(some, keep=keep)
    assert len(keep.kept) == 7 and "layers.1.feed_forward.w_out.weight" not in keep.kept
    expected = meant["model.layers.1.mlp.down_proj.weight"]
    assert model.get_parameter("layers.1.feed_forward.w_out.weight").equal(expected.bfloat16())


def test_float8_of_which_config_json_says_nothing_is_refused(tmp_path: Path) -> None:
    save_float8(tmp_path)
    describe(tmp_path, None)
    assert "proj.weight is stored as F8_E4M3, but only F64, F32, F16, BF16 can be" in refusal(tmp_path)


def test_what_concerns_activations_or_a_cache_is_not_read(tmp_path: Path) -> None:
    names = ["q_proj.input_scale", "k_proj.input_scale_ub", "k_scale", "v_scale", "q_scale", "o_proj.output_scale"]
    save_float8(tmp_path, extra={f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names})
    load_model(tmp_path)


@pytest.mark.parametrize(("said", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_other_kinds_are_refused_by_name(said: dict[str, Any], named: str, tmp_path: Path) -> None:
    save_hugging_face(tiny_model(), tmp_path, dtype=torch.float32)
    describe(tmp_path, said)
    advised = "int4" if "4 bits" in named else "int8"
    advice = f"load the unquantized checkpoint and use quantize='{advised}'"
    assert re.search(f"config.json: quantization_config is .*{named}, which is not read .*{advice}$", refusal(tmp_path))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (compressed_tensors(sparsity_config="dense"), "sparsity_config must be an object, got 'dense'"),
        (compressed_tensors(transform_config=[1]), r"transform_config must be an object, got \[1\]"),
        (compressed_tensors(config_groups=[{}]), r"config_groups must be an object, got \[{}\]"),
        ({"quant_method": "a\nb" * 99, "bits": True}, "quantization_config is a ba ba .{,80}, which is not read"),
        ({"quant_method": "fp8", "weight_block_size": [128] * 99}, r"in blocks of \[128, .{,80}, which is not read"),
    ],
)
def test_a_quantization_config_of_any_shape_is_refused(said: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_hugging_face() | {"quantization_config": said}))
    assert re.search(named, refusal(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["self_attn.q_proj.qweight", "self_attn.q_proj.weight_packed", "mlp.up_proj.weight.absmax", "mlp.up_proj.SCB",
     "mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "self_attn.q_proj.weight_scale_inv"],
)  # fmt: skip
def test_packed_weights_are_refused_whatever_config_json_says(name: str, tmp_path: Path) -> None:
    save_hugging_face(tiny_model(), tmp_path, dtype=torch.float32)
    packed = f"model.layers.0.{name}"
    change(tmp_path, **{packed: torch.zeros(4, 4, dtype=torch.int32), Q: None})
    assert f"model.safetensors: {packed} is a part of a quantized weight" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{Q}_scale", torch.ones(2, 2), "_scale is F32 of shape [2, 2], but the scales of 32 outputs are floats of"),
        (f"{Q}_scale", torch.ones(32, 1, dtype=torch.int32), "_scale is I32 of shape [32, 1], but the scales of 32"),
        (f"{Q}_scale", None, "q_proj.weight is stored as F8_E4M3, but only F64, F32, F16, BF16 can be read"),
        ("model.norm.weight_scale", torch.ones(1), "model has no place for model.norm.weight_scale"),
    ],
)
def test_scales_that_belong_to_no_weight_are_refused(
    name: str, tensor: Tensor | None, said: str, tmp_path: Path
) -> None:
    save_float8(tmp_path, config=tiny_config())
    change(tmp_path, **{name: tensor})
    assert said in refusal(tmp_path)
