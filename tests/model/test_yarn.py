"""YaRN and longrope are what transformers does, to the bit in arithmetic, and to fp32 in a model."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.model import ModelConfig, RopeScaling, Transformer, load_model
from tests.helpers import few, random_transformers_model, tiny_config, tiny_engine, tiny_model
from tests.model.test_config import LLAMA as CONFIG
from tests.model.test_config import LONG

LLAMA = CONFIG | {"rope_theta": 10000.0}
LISTS = {"factors": (1.0,), "long_factors": (1.0,)}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "as Qwen says to add it": {},
    "a factor that is no power of 2": {"factor": 2.7},
    "a large factor": {"factor": 40.0},
    "a factor of 1": {"factor": 1.0},
    "an attention factor": {"attention_factor": 0.7},
    "an attention factor of 1": {"attention_factor": 1.0},
    "other turns": {"beta_fast": 8.0, "beta_slow": 0.5},
    "turns of 0, which mean the defaults": {"beta_fast": 0, "beta_slow": None},
    "equal turns": {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
    "pairs in between": {"truncate": False},
    "both mscales": {"mscale": 0.707, "mscale_all_dim": 1.3},
    "equal mscales": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "one mscale, which says nothing": {"mscale": 0.707},
    "an mscale of 0, which says nothing": {"mscale": 0.707, "mscale_all_dim": 0},
    "mscales beside an attention factor": {"mscale": 0.5, "mscale_all_dim": 2.0, "attention_factor": 1.2},
    "an original context of few turns": {"original_max_position_embeddings": 9},
    "everything in the original context": {"original_max_position_embeddings": 100_000_000},
    "null where it may be": {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": None},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", [(128, 1e6, 32768), (64, 1e6, 32768), (128, 10000.0, 4096), (80, 5e5, 8191)])
def test_frequencies_and_length_have_every_bit_of_transformers(shape: tuple[int, float, int], option: str) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    head_dim, theta, original = shape
    rope = YARN | {"original_max_position_embeddings": original, "rope_theta": theta} | OPTIONS[option]
    fields = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"head_dim": head_dim}
    theirs = transformers.LlamaConfig(**fields, rope_parameters=dict(rope))
    expected, length = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    model = Transformer(ModelConfig.from_hugging_face(fields | {"rope_parameters": rope}, "config.json"))
    assert torch.equal(model.rope_freqs, expected)
    assert model.rope_length == length


def test_yarn_is_read_in_every_spelling() -> None:
    rest = {"factor": 4.0, "original_max_position_embeddings": 64}
    spellings: list[dict[str, Any]] = [
        {"rope_scaling": {"type": "yarn", **rest}},
        {"rope_scaling": {"rope_type": "yarn", **rest}},
        {"rope_scaling": {"type": "default", "rope_type": "yarn", **rest, "finetuned": True}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **rest}},
        {"rope_parameters": {"type": "yarn", **rest}, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", **rest}},
    ]
    read = {ModelConfig.from_hugging_face(LLAMA | spelling, "config.json") for spelling in spellings}
    assert [config.rope_scaling for config in read] == [RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=64)]
    outer = {"rope_scaling": {"type": "yarn", **rest}, "original_max_position_embeddings": 32}  # the outer one counts
    scaling = ModelConfig.from_hugging_face(LLAMA | outer, "config.json").rope_scaling
    assert scaling and scaling.original_max_seq_len == 32


@pytest.mark.parametrize(
    ("stated", "scaling", "positions"),
    [
        (32768, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen2.5, as its card says
        (40960, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen3
        (40960, {"factor": 1.0, "original_max_position_embeddings": 32768}, 40960),
        (131072, {"factor": 32.0, "original_max_position_embeddings": 4096}, 131072),  # Yarn-Llama-2-7b-128k
        (131072, {"factor": 2.0, "original_max_position_embeddings": 32768}, 131072),
        (100, {"factor": 2.5, "original_max_position_embeddings": 101}, 252),
    ],
)
def test_yarn_extends_the_positions_and_never_takes_any(stated: int, scaling: dict[str, Any], positions: int) -> None:
    raw = LLAMA | {"max_position_embeddings": stated, "rope_scaling": {"type": "yarn", **scaling}}
    assert ModelConfig.from_hugging_face(raw, "config.json").max_seq_len == positions


@pytest.mark.parametrize("option", OPTIONS)
def test_writing_and_reading_yarn_changes_nothing(option: str) -> None:
    config = ModelConfig.from_hugging_face(LLAMA | {"rope_scaling": YARN | OPTIONS[option]}, "config.json")
    assert ModelConfig.from_hugging_face(json.loads(json.dumps(config.to_hugging_face())), "config.json") == config


def test_positions_that_a_file_cannot_say_are_not_written() -> None:
    config = tiny_config(max_seq_len=100, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=64))
    with pytest.raises(ValueError, match=r"^a config\.json of this YaRN means 256 positions, not 100$"):
        config.to_hugging_face()


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"factor": 0}, "factor is 0, but it must be a positive number"),
    ({"factor": True}, "factor is True, but it must be a positive number"),
    ({"original_max_position_embeddings": None}, "original_max_position_embeddings is None, but"),
    ({"attention_factor": 0.0}, "attention_factor is 0.0, but it must be a positive number"),
    ({"beta_fast": "32"}, "beta_fast is '32', but it must be a positive number"),
    ({"beta_fast": 1, "beta_slow": 32}, "needs beta_fast >= beta_slow > 0, got 1.0 and 32"),
    ({"truncate": "no"}, "truncate is 'no', but it must be true or false"),
    ({"mscale": -1.0, "mscale_all_dim": 1}, "mscale is -1.0, but it must be a positive number"),
    ({"rope_theta": 1.0}, "rope_theta must be above 1 if rope scaling is 'yarn', got 1.0"),
]


@pytest.mark.parametrize(("changes", "says"), NONSENSE)
def test_yarn_that_makes_no_sense_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    for spelling in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=re.escape(says)) as refusal:
            ModelConfig.from_hugging_face(LLAMA | {spelling: YARN | changes}, "config.json")
        assert str(refusal.value).startswith("config.json: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "ntk"}, r"must be 'linear', 'llama3', 'yarn', 'dynamic', 'factors' or 'longrope', got 'ntk'"),
        ({"factor": math.nan}, "factor must be at least 1, got nan"),
        ({"original_max_seq_len": 0}, "original_max_seq_len must be a whole number above 0, got 0"),
        ({"original_max_seq_len": 1.5}, "original_max_seq_len must be a whole number above 0, got 1.5"),
        ({"beta_fast": math.nan}, "needs beta_fast >= beta_slow > 0, got nan and 1.0"),
        ({"attention_factor": 0.0}, "attention_factor must be a positive number in 'yarn' or 'longrope' and None in"),
        ({"kind": "linear", "attention_factor": 1.0}, "got 1.0 in 'linear'"),
        ({"kind": "longrope", "factors": (1.0,)}, r"rope scaling 'longrope' needs positive factors, .*any: \(\)"),
        ({"kind": "longrope", "original_max_seq_len": 1} | LISTS, "must be at least 2 in 'longrope', got 1"),
    ],
)
def test_a_scaling_built_of_nonsense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RopeScaling(**{"kind": "yarn", "factor": 4.0} | changes)


ENGINES: dict[str, tuple[str, dict[str, Any], int, int]] = {  # more fields; tokens of a prompt and of an engine
    "yarn": ("Qwen2", {}, 150, 256), "biases of the feed-forward": ("Llama", {"mlp_bias": True}, 150, 256),
    "all biases": ("Qwen3", {"attention_bias": True, "head_dim": 16}, 150, 256),
    "longrope": ("Llama", {"rope_parameters": LONG}, 150, 256),
    "longrope, short texts": ("Llama", {"rope_parameters": LONG}, 32, 64),
}  # fmt: skip


@pytest.mark.parametrize("case", ENGINES)
@pytest.mark.parametrize("policy", few(["off", "quest", "early_exit"], ["quest"]))
def test_an_engine_says_past_the_original_window_what_transformers_says(policy: str, case: str, tmp_path: Path) -> None:
    family, more, n, longest = ENGINES[case]
    fields = {key: value for key, value in CONFIG.items() if key != "architectures"} | {"vocab_size": 258}
    theirs = random_transformers_model(family, **fields | {"rope_parameters": {"rope_theta": 10000.0} | YARN} | more)
    for layer in theirs.model.layers if family == "Qwen3" else ():
        layer.self_attn.o_proj.bias.data /= 10  # else it says one token only
    theirs.save_pretrained(tmp_path)
    asked, new = torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(2)), min(60, longest - n)
    with torch.no_grad():
        out = theirs.generate(asked, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    draft = DraftConfig(policy=policy, budget=64, gamma=3, exit_layers=1 if policy == "early_exit" else None)
    engine = tiny_engine(draft, model=load_model(tmp_path, dtype=torch.float32), batch_size=1, max_seq_len=longest)
    (found,) = engine.generate(asked.tolist(), SamplingParams(max_tokens=new, ignore_eos=True))
    assert found.tokens == out[0, n:].tolist()
    assert len(set(found.tokens)) > 4


def test_longrope_has_the_factors_of_an_engines_longest_text_in_drafts_too() -> None:
    how = {"factor": 2.0, "factors": (1.0,) * 4, "long_factors": (2.0,) * 4, "original_max_seq_len": 300}
    config = tiny_config(rope_scaling=RopeScaling(kind="longrope", **how))  # type: ignore[arg-type]
    one, other, third = (tiny_model(config) for _ in range(3))
    with pytest.warns(UserWarning, match="max_seq_len 512 is over the 300 tokens up to which longrope has"):
        tiny_engine(DraftConfig(policy="standalone", draft_model="given"), third, model=one)
    held, _ = one.rope_freqs, tiny_engine(model=one)
    tiny_engine(model=other, max_seq_len=300)
    assert (one.reads_long, third.reads_long, other.reads_long, one.rope_freqs is held) == (True, True, False, True)
    with pytest.raises(ValueError, match=r"max_seq_len 512 needs other factors .* up to 300 tokens: load it again"):
        tiny_engine(model=other)
