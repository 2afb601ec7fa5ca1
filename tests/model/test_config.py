"""A config.json is read whole or refused by name, as the hub has them, too; presets carry the published numbers."""

import json
import math
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt_fast_sd import model as models
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import PRESETS, CheckpointError, ModelConfig, RopeScaling, load_tokenizer, preset, read_config
from gpt_fast_sd.model.files import fields

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
LONG: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 1.1, 1.2, 1.3, 1.4, 2.0, 1.0], "rope_theta": 10000.0,
    "long_factor": [1.0, 1.0, 2.0, 3.0, 5.0, 9.0, 20.0, 40], "original_max_position_embeddings": 64,
}  # fmt: skip
LONG_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "su"}, "must be 'default', 'linear', 'llama3', 'yarn', 'longrope' or"),
    ({"original_max_position_embeddings": None}, "original_max_position_embeddings is None, but"),
    ({"long_factor": [1.0, -1.0]}, "rope_scaling: long_factor is [1.0, -1.0], but it must be a list of positive"),
    ({"long_factor": [1.0] * 7}, "rope scaling must have 8 factors, one per pair, got"),
    ({"short_mscale": 1.1547005383792515, "long_mscale": 1.0}, "long_mscale is 1.0, but it must be absent or 1.1547"),
]
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
MIXED, SLIDING = ["full_attention", "sliding_attention"], QWEN3 | {"use_sliding_window": True}

# Parameters that the hub counts in the files (tied heads once). Shapes, bases and epsilons were compared with litgpt's
# table of models (github.com/Lightning-AI/litgpt, litgpt/config.py, commit 26857050), which names the config.json of
# each; Yi-6B is not in it, and of LLaMA-2-7B-32K it has no positions: those are in MagicDec's own table
# (github.com/Infini-AI-Lab/MagicDec, Engine/SnapKV/model.py). Ids are those of the base models' config.json.
PUBLISHED_SIZES = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616, "togethercomputer/LLaMA-2-7B-32K": 6_738_415_616,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248, "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496, "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824, "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": 1_100_048_384,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384, "TinyLlama/TinyLlama_v1.1": 1_100_048_384,
    "JackFram/llama-68m": 68_030_208, "NousResearch/Yarn-Llama-2-7b-128k": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320, "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496, "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552, "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352, "Qwen/Qwen2.5-72B": 72_706_203_648, "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976, "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200, "Qwen/Qwen3-32B": 32_762_123_264, "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120, "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "01-ai/Yi-6B": 6_061_035_520, "01-ai/Yi-1.5-6B": 6_061_035_520, "01-ai/Yi-1.5-34B": 34_388_917_248,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters_and_is_written_and_read_unchanged(name: str) -> None:
    assert preset(name).n_params == PUBLISHED_SIZES[name]
    assert ModelConfig.from_hugging_face(json.loads(json.dumps(preset(name).to_hugging_face())), name) == preset(name)


def test_a_preset_is_found_by_its_exact_name_only() -> None:
    with pytest.raises(ValueError, match=r"no preset is called 'Llama-3.1-8B'; .* are .*meta-llama/Llama-3.1-8B"):
        preset("Llama-3.1-8B")


def test_a_number_of_kv_heads_that_is_null_is_that_of_query_heads() -> None:
    assert ModelConfig.from_hugging_face(QWEN3 | {"num_key_value_heads": None}, "c").n_kv_heads == 4


LEAVABLE = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 5e5,
    "tie_word_embeddings": True, "sliding_window": 64, "hidden_act": "swish",
}  # fmt: skip


@pytest.mark.parametrize("left_out", [*LEAVABLE, "all"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_field_that_is_left_out_means_what_transformers_takes(kind: str, left_out: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_attention_heads": 64, "bos_token_id": None, "eos_token_id": None}
    whole = LLAMA | sizes | LEAVABLE | {"model_type": kind}
    raw = {k: v for k, v in whole.items() if k not in (LEAVABLE if left_out == "all" else [left_out, "architectures"])}
    if left_out == "all":
        raw["architectures"] = None
    theirs = transformers.AutoConfig.for_model(**raw).to_dict() | {"architectures": None}
    assert "rope_parameters" in theirs and {*LEAVABLE} - {"head_dim", "rope_theta", "sliding_window"} <= {*theirs}
    assert ModelConfig.from_hugging_face(raw, "c") == ModelConfig.from_hugging_face(theirs, "c")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "architectures is ['GPT2LMHeadModel'], but it must be one of"),
        (LLAMA | {"architectures": []}, "architectures is [], but it must be one of LlamaForCausalLM"),
        ({}, "architectures is missing"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu', but it must be 'silu'"),
        (LLAMA | {"attention_bias": 1}, "attention_bias is 1, but it must be true or false"),
        (MISTRAL | {"attention_bias": True}, "attention_bias is True, but it must be False"),
        (QWEN3 | {"mlp_bias": True}, "mlp_bias is True, but it must be False"),
        (LLAMA | {"use_sliding_window": True}, "use_sliding_window is True, but it must be False"),
        (QWEN3 | {"use_sliding_window": 1}, "use_sliding_window is 1, but it must be true or false"),
        (SLIDING | {"max_window_layers": -1}, "max_window_layers is -1, but it must be a whole number of at least 0"),
        *((SLIDING | {"layer_types": bad}, "a list of 2, one a") for bad in (MIXED * 2, ["chunked"] * 2, 2, [])),
        *((raw | {"layer_types": MIXED}, "of 'full_attention' where no sliding_window") for raw in (LLAMA, QWEN3)),
        (MISTRAL | {"layer_types": MIXED}, "a list of 2, one a layer, of 'sliding_attention' in a MistralForCausalLM"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but it must be 1.0"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor is 0.5"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: original_max_position_embedd"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 0.0}}, "rope_scaling: factor is 0.0"),
        *((LLAMA | {"rope_scaling": LONG | wrong}, says) for wrong, says in LONG_REFUSED),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is"),
        (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
        (LLAMA | {"quantization": {"bits": 4}}, "quantization is {'bits': 4}, but it must be absent: only float weigh"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64', but it must be a whole number"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers is None"),
        (LLAMA | {"hidden_size": 66}, "hidden_size is 66, but it must be a multiple of num_attention_heads (4)"),
        (LLAMA | {"num_key_value_heads": 3}, "n_heads must be a multiple of n_kv_heads, got 4 and 3"),
        (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        *((LLAMA | {"rms_norm_eps": bad}, f"rms_norm_eps is {bad}") for bad in (math.nan, math.inf, -math.inf)),
        *((LLAMA | {"rope_theta": bad}, f"rope_theta is {bad}") for bad in (math.nan, math.inf)),
        *((LLAMA | {x: 10**399}, f"{x} is 1000") for x in ("hidden_size", "rope_theta", "vocab_size", "rms_norm_eps")),
        *((LLAMA | {"rope_scaling": {"type": "linear", "factor": x}}, f"factor is {x}") for x in (math.nan, math.inf)),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        (LLAMA | {"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2']"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"), (QWEN3 | {"head_dim": None}, "head_dim is None"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_exactly_is_refused_by_name(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        ModelConfig.from_hugging_face(raw, "folder/config.json")
    assert str(refusal.value).startswith("folder/config.json: ")
    assert str(refusal.value).count("folder/config.json") == 1
    assert "\n" not in str(refusal.value)


def test_a_shape_without_a_family_cannot_be_written() -> None:
    config = ModelConfig.from_hugging_face(QWEN3 | {"architectures": ["Qwen2ForCausalLM"]}, "c")
    with pytest.raises(ValueError, match="qkv_bias True, o_bias False, mlp_bias False, qk_norm True"):
        replace(config, qk_norm=True).to_hugging_face()


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("in_config", "in_generation", "bos", "ends", "said"),
    [
        ({"eos_token_id": 128}, None, 1, (), ["config.json: eos_token_id 128"]),
        ({"eos_token_id": [2, 128, 10**10]}, {}, 1, (2,), ["config.json: eos_token_id 128, 10000000000"]),
        ({"eos_token_id": 2}, {"eos_token_id": 99999}, 1, (2,), ["generation_config.json: eos_token_id 99999"]),
        ({"eos_token_id": 128}, {"eos_token_id": [127, 2]}, 1, (127, 2), ["config.json: eos_token_id 128"]),
        ({"bos_token_id": 128}, None, None, (2,), ["config.json: bos_token_id 128"]),
        *(({"eos_token_id": own}, given, 1, ends, []) for own, given, ends in (  # of which all are there
            (2, None, (2,)), ([2, 3], None, (2, 3)), (2, {"eos_token_id": [5, 6, 7]}, (5, 6, 7)),
            (2, {"eos_token_id": 9}, (9,)), (2, {"temperature": 1.0}, (2,)))),
    ],
)  # fmt: skip
def test_generation_config_decides_the_end_of_text_ids_and_those_past_the_vocabulary_are_named(
    tmp_path: Path, in_config: Any, in_generation: Any, bos: int | None, ends: tuple[int, ...], said: list[str]
) -> None:
    write(tmp_path, LLAMA | {"bos_token_id": 1, "eos_token_id": 2} | in_config, in_generation)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = read_config(tmp_path)
    assert (config.bos_id, config.eos_ids) == (bos, ends)
    rest = " is past the vocabulary of 128 tokens, and is not used"
    assert [str(one.message) for one in warned] == [f"{tmp_path}/{what}{rest}" for what in said]


@pytest.mark.parametrize("name", fields.COMPUTES)
def test_a_field_that_computes_elsewhere_is_refused_unless_it_computes_nothing(name: str) -> None:
    for nothing in (None, *fields.COMPUTES[name]):
        ModelConfig.from_hugging_face(LLAMA | {name: nothing}, "c")
    for something in (2.5, [2.5], {"a": 1}):
        with pytest.raises(ValueError, match=re.escape(f"c: {name} is {something!r}, but it must be absent")):
            ModelConfig.from_hugging_face(LLAMA | {name: something}, "c")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
NOTES = {"architectures": None, "initializer_range": 0.02, "transformers_version": "5", "use_cache": True}


@pytest.mark.parametrize(
    ("file", "raw", "said"),
    [
        ("config", NOTES, None), ("config", {"repetition_penalty": 1.3}, "repetition_penalty: not applied"),
        ("config", {"new_attention": 3, "logit_bias_rank": None}, "logit_bias_rank, new_attention: not known here"),
        ("config", {"rope_scaling": YARN | {"extrapolation": 1}}, "rope_scaling.extrapolation: not known"),
        ("config", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "rope_scaling.mscale: not known"),
        ("generation_config", {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.0}, None),
        (
            "generation_config",
            {"repetition_penalty": 1.1, "suppress_tokens": [3]},
            "repetition_penalty, suppress_",
        ),
        ("tokenizer_config", {"add_eos_token": True}, "add_eos_token: not applied"),
        ("tokenizer_config", {"add_eos_token": False, "image_token": "<s>", "add_prefix_space": True}, None),
        ("tokenizer_config", {"add_prefix_space": False}, "add_prefix_space: not applied"),
        ("tokenizer_config", {"cut_token": 3, "legacy": True, "word_cutter": 1}, "cut_token, word_cutter: not known"),
        ("generation_config", {"sampler": 1, "temperature": 1.0}, "sampler: not known"),
        ("generation_config", "all of transformers", None),
    ],
)  # fmt: skip
def test_a_field_that_is_not_known_or_not_applied_is_said(
    file: str, raw: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    shutil.copytree(BUNDLED, tmp_path / "model")
    path = tmp_path / "model" / f"{file}.json"
    if isinstance(raw, str):
        raw = dict.fromkeys(pytest.importorskip("transformers").GenerationConfig().__dict__)
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(held | {name: value for name, value in raw.items() if name != "architectures"}))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_tokenizer(path.parent, read_config(path.parent))
    assert [f"{path}: {said}" in str(one.message) for one in warned] == [True] * bool(said)


def test_dual_chunks_are_plain_attention_up_to_one_of_them() -> None:
    chunks = {"chunk_size": 200, "local_size": 50, "original_max_position_embeddings": 200}
    read = ModelConfig.from_hugging_face
    assert read(LLAMA | {"dual_chunk_attention_config": chunks}, "c").max_seq_len == 150
    for wrong, said in (
        ({}, "chunk_size is missing"),
        (chunks | {"local_size": 200}, "below chunk_size, 200"),
        (3, "set of"),
    ):
        with pytest.raises(ValueError, match=said):
            read(LLAMA | {"dual_chunk_attention_config": wrong}, "c")


def test_yarn_lengthens_by_attn_factor_as_in_a_gguf_file_and_by_nothing_else_then() -> None:
    scaling = ModelConfig.from_hugging_face(LLAMA | {"rope_scaling": YARN | {"attn_factor": 0.5}}, "c").rope_scaling
    assert scaling and scaling.length == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    with pytest.raises(ValueError, match=r"attention_factor is 1\.2, but it must be absent beside attn_factor"):
        ModelConfig.from_hugging_face(
            LLAMA | {"rope_scaling": YARN | {"attn_factor": 0.5, "attention_factor": 1.2}}, "c"
        )


def test_a_text_ends_as_the_tokenizer_says_where_no_other_end_is_valid(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": 10**6, "eos_token_id": 10**6}))
    with pytest.warns(UserWarning, match="past the vocabulary"):
        config = read_config(path.parent)
    tokenizer = load_tokenizer(path.parent, config)
    assert tokenizer and (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"config\.json cannot be read as JSON: "),
        ("[1]", r"config\.json must hold a JSON object, but holds a list"),
        ('{"architectures": ["X"]}', r"config\.json: architectures is \['X'\]"),
        ("version https://git-lfs.github.com/spec/v1\n", r"config\.json is a git-lfs pointer"),
    ],
)
def test_a_broken_config_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, LLAMA, {"eos_token_id": "</s>"})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_config(tmp_path)


# ---- as the hub has them ---------------------------------------------------------------------------------------------

HUB: dict[str, Any] = {  # what most of them have
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN_2_5 = HUB | {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "transformers_version": "4.43.1", "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN_3 = HUB | {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "transformers_version": "4.51.0", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA_3_1 = HUB | {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_size": 8192, "intermediate_size": 28672,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
    "rope_theta": 500000.0, "transformers_version": "4.42.3", "vocab_size": 128256,
}  # fmt: skip
SMOLLM_2 = HUB | {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 0,
    "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152,
}  # fmt: skip
LLAMA_2_32K = HUB | {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "type": "linear"},
    "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
MISTRAL_7B = HUB | {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": None,
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_READ = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32768)
INSTRUCT_2_5 = replace(preset("Qwen/Qwen2.5-7B"), max_seq_len=32768, eos_ids=(151645,))

# What a folder holds: config.json, generation_config.json; and what is read of it.
READ: dict[str, tuple[dict[str, Any], dict[str, Any] | None, ModelConfig, str | None]] = {
    "Qwen2.5-7B-Instruct": (
        QWEN_2_5, {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.7},
        replace(INSTRUCT_2_5, eos_ids=(151645, 151643)), "bfloat16",
    ),
    "the same with YaRN, saved by transformers 5": (
        {key: value for key, value in QWEN_2_5.items() if key not in ("rope_theta", "torch_dtype")}
        | {
            "dtype": "bfloat16", "layer_types": ["full_attention"] * 28, "pad_token_id": None, "sliding_window": None,
            "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1000000.0}, "transformers_version": "5.17.0",
        },
        None, replace(INSTRUCT_2_5, max_seq_len=131072, rope_scaling=YARN_READ), "bfloat16",
    ),
    "QwQ-32B's first file, whose window begins behind its last layer": (
        QWEN_2_5
        | {
            "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 40960, "max_window_layers": 64,
            "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "sliding_window": 40960, "use_sliding_window": True,
        },
        None, replace(preset("Qwen/Qwen2.5-32B"), max_seq_len=40960, eos_ids=(151645,)), "bfloat16",
    ),
    "Qwen3-0.6B": (
        QWEN_3, {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "top_k": 20},
        replace(preset("Qwen/Qwen3-0.6B"), eos_ids=(151645, 151643)), "bfloat16",
    ),
    "Llama-3.1-70B-Instruct, whose EOS is a list": (
        LLAMA_3_1, {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009]},
        replace(preset("meta-llama/Llama-3.1-70B"), eos_ids=(128001, 128008, 128009)), "bfloat16",
    ),
    "SmolLM2-135M, with fields of other programs": (SMOLLM_2, None, preset("HuggingFaceTB/SmolLM2-135M"), "bfloat16"),
    "LLaMA-2-7B-32K, with code of its own": (LLAMA_2_32K, None, preset("togethercomputer/LLaMA-2-7B-32K"), "float16"),
    "Mistral-7B-v0.3, whose window and head_dim are null": (
        MISTRAL_7B, None, preset("mistralai/Mistral-7B-v0.3"), "bfloat16",
    ),
    "a llama of 2023, without most fields": (
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-05,
            "vocab_size": 32000, "max_sequence_length": 2048, "_name_or_path": "/scratch/llama-2",
        },
        None, replace(preset("meta-llama/Llama-2-7b-hf"), bos_id=None, eos_ids=()), None,
    ),
    "empty dictionaries and nulls": (
        SMOLLM_2 | {"rope_scaling": {}, "rope_parameters": None, "quantization_config": None, "layer_types": None},
        {}, preset("HuggingFaceTB/SmolLM2-135M"), "bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_folder_of_the_hub_gives_its_shape(name: str, tmp_path: Path) -> None:
    config, generation, expected, dtype = READ[name]
    folder = write(tmp_path, config, generation)
    assert read_config(folder) == expected
    assert models.read_stored_dtype(folder) == dtype
