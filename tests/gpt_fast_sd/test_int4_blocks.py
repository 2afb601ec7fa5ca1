"""Blocks of 4 bits in a GGUF file are kept: a copy, or a quantized target, has the very numbers of the file's model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast import dequantize_blocks
from gpt_fast_sd.fast.linear_int4 import Int4Linear
from gpt_fast_sd.model import Transformer, load_model
from gpt_fast_sd.quantization.quantize import draft_copy, equalize_keys, quantize
from tests.helpers import random_ids

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from gguf import GGMLQuantizationType as Kind  # noqa: E402

from tests.gguf_files import stored, transformers_model, write_gguf  # noqa: E402

BF16 = torch.bfloat16
FAMILIES = {"Llama": {"num_key_value_heads": 2}, "Qwen2": {"num_key_value_heads": 6}, "Qwen3": {"head_dim": 32}}
PROMPTS = [[token % 160 for token in random_ids(n, seed=n)] for n in (40, 7)]
GREEDY = SamplingParams(max_tokens=24)


def file_of(folder: Path, kind: Kind = Kind.Q4_1, family: str = "Llama", **changes: Any) -> Path:
    return write_gguf(folder / "model.gguf", transformers_model(family, **FAMILIES[family]), kind, **changes)


def layers_of(model: Transformer) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.layers.named_modules() if isinstance(m, nn.Linear)}


def kept(copy: Transformer, model: Transformer) -> set[str]:
    """The matrices of a copy that are, number by number, those of the model."""
    theirs = {name: m.weight for name, m in layers_of(model).items()}
    own = {name: m.held for name, m in layers_of(copy).items() if isinstance(m, Int4Linear)}
    return {name for name, x in own.items() if dequantize_blocks(x, theirs[name].dtype).equal(theirs[name])}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_has_the_numbers_of_the_file(family: str, kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(file_of(tmp_path, kind, family), dtype=dtype)
    copy = draft_copy(model, "int4")
    assert kept(copy, model) == layers_of(model).keys() and len(layers_of(model)) == 8
    x = torch.randn(5, 96).to(dtype)
    for own, theirs in zip(copy.layers, model.layers, strict=True):
        assert own.attention.wqkv(x).equal(theirs.attention.wqkv(x))
        assert own.feed_forward(x).equal(theirs.feed_forward(x))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_keys_that_were_evened_are_known_by_their_powers_of_two(kind: Kind, tmp_path: Path) -> None:
    theirs = transformers_model("Qwen2", **FAMILIES["Qwen2"])
    with torch.no_grad():
        theirs.model.layers[0].self_attn.k_proj.bias[3] = 300.0
    path = write_gguf(tmp_path / "model.gguf", theirs, kind)
    model, quantized = load_model(path, dtype=BF16), load_model(path, dtype=BF16)
    quantize(quantized, "int4")
    before = model.layers[0].attention.wqkv.weight.clone()
    for one in (model, quantized):
        equalize_keys(one)
    assert not model.layers[0].attention.wqkv.weight.equal(before)
    copy = draft_copy(model, "int4")
    assert kept(copy, model) == kept(quantized, model) == layers_of(model).keys()
    assert copy.layers[0].attention.wqkv.scale.unique().numel() > 1
    for own, other in zip(quantized.layers, model.layers, strict=True):
        assert own.attention.wqkv.bias.equal(other.attention.wqkv.bias)


def test_only_a_matrix_with_a_part_of_another_kind_is_quantized_anew(tmp_path: Path) -> None:
    mixed = {"blk.1.attn_v.weight": (stored(torch.randn(32, 96).numpy(), Kind.Q8_0), Kind.Q8_0)}
    model = load_model(file_of(tmp_path, tensors=mixed), dtype=torch.float32)
    copy = draft_copy(model, "int4")
    assert layers_of(model).keys() - kept(copy, model) == {"1.attention.wqkv"}
    own, theirs = copy.layers[1].attention.wqkv, model.layers[1].attention.wqkv.weight
    assert isinstance(own, Int4Linear)
    assert (dequantize_blocks(own.held, torch.float32) - theirs).norm() <= 0.09 * theirs.norm()


@pytest.mark.parametrize("change", ["gone", "shorter", "other numbers", "other weights"])
def test_where_the_file_is_no_longer_the_model_the_model_is_quantized(change: str, tmp_path: Path) -> None:
    path = file_of(tmp_path)
    model = load_model(path, dtype=torch.float32)
    if change == "gone":
        path.unlink()
    elif change == "other weights":
        for linear in layers_of(model).values():
            linear.weight.mul_(1.1)
    else:
        raw = path.read_bytes()
        path.write_bytes(raw[:1000] if change == "shorter" else raw[:-60000] + bytes(60000))
    for name, own in layers_of(draft_copy(model, "int4")).items():
        theirs = layers_of(model)[name].weight
        assert isinstance(own, Int4Linear)
        assert (dequantize_blocks(own.held, torch.float32) - theirs).norm() <= 0.09 * theirs.norm()


def engine(path: Path, draft: DraftConfig | None = None, **changes: Any) -> Engine:
    wanted: dict[str, Any] = {"batch_size": 2, "max_seq_len": 300, "device": "cpu", "dtype": "fp32", "compile": False}
    return Engine.from_pretrained(path, EngineConfig(**wanted | changes), draft)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_a_target_in_the_blocks_of_its_file_says_bit_for_bit_what_the_file_says(kind: Kind, tmp_path: Path) -> None:
    path = file_of(tmp_path, kind)
    plain, quantized = engine(path), engine(path, quantize="int4")
    assert quantized.logits(PROMPTS[0]).equal(plain.logits(PROMPTS[0]))
    held = sum(m.weight.nbytes + m.blocks.nbytes for m in layers_of(quantized.model).values())  # type: ignore[operator]
    assert held * 6.4 == sum(m.weight.nbytes for m in layers_of(plain.model).values())


def test_a_draft_with_the_blocks_of_its_file_is_refused_for_its_head_alone(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    expected = [c.tokens for c in engine(path).generate(PROMPTS, GREEDY)]
    draft = DraftConfig(policy="full", gamma=3, quantize="int4")
    one = engine(path, draft)
    assert [c.tokens for c in one.generate(PROMPTS, GREEDY)] == expected
    assert one.stats.acceptance_rate > 0.9
    one = engine(path)
    one.redraft(draft)
    assert kept(one.policy.runner.model, one.model) == layers_of(one.model).keys()  # type: ignore[union-attr]
