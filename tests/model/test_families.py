"""Ground truth is transformers: every family's logits, from every way a checkpoint is stored, and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd.fast.cpu.generated import GeneratedFeedForward, prepare_for_inductor
from gpt_fast_sd.model import CausalSelf, FeedForward, load_model, read_config, save_hugging_face
from tests.helpers import SIZES, random_transformers_model, tiny_config
from tests.model.test_config import LONG

transformers = pytest.importorskip("transformers")

THREE_GROUPS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
DYNAMIC_ROPE = LINEAR_ROPE | {"rope_type": "dynamic"}  # texts here have as many tokens as positions
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGER = LONG | {"original_max_position_embeddings": 62}  # than texts here
YARN_OPTIONS = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
MIXED, WINDOWED = ["full_attention", "sliding_attention"], {"use_sliding_window": True, "sliding_window": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one query head per kv head": ("Llama", {"num_key_value_heads": 4}),
    "llama, G = 3": ("Llama", THREE_GROUPS),
    "llama 3.1 rotary scaling": ("Llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 512}),
    "linear rotary scaling": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "yarn": ("Qwen2", {"rope_parameters": YARN_ROPE | {"attention_factor": 1.2}}),
    "yarn with every option": ("Qwen3", {"head_dim": 24, "rope_parameters": YARN_ROPE | YARN_OPTIONS}),
    "dynamic rotary scaling": ("Llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 63}),
    "longrope, texts of up to 64": ("Mistral", {"rope_parameters": LONG, "max_position_embeddings": 64}),
    "longrope": ("Qwen2", {"rope_parameters": LONGER}),
    "longrope, its length said": ("Llama", {"rope_parameters": LONGER | {"attention_factor": 0.9, "factor": 8.0}}),
    "tied embeddings, its own head_dim": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "granite-3b-code, all biases": ("Llama", THREE_GROUPS | {"attention_bias": True, "mlp_bias": True}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True, "head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral v0.1, window longer than the text": ("Mistral", {"sliding_window": 128}),
    "mistral v0.1, window shorter than the text": ("Mistral", {"sliding_window": 8}),
    "ministral, one layer windowed": ("Ministral", {"sliding_window": 9, "layer_types": MIXED, "head_dim": 16}),
    "qwen2, last layer windowed": ("Qwen2", WINDOWED | {"max_window_layers": 1}),
    "qwen3, first layer windowed": ("Qwen3", WINDOWED | {"layer_types": MIXED[::-1], "head_dim": 24}),
    "qwen2, window behind the last layer": ("Qwen2", WINDOWED | {"max_window_layers": 5}),
    "qwen2, biases, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3, normed queries and keys": ("Qwen3", {"head_dim": 24}),
    "yi": ("Llama", {"num_key_value_heads": 1, "rope_theta": 5e6}),
}


def make(family: str, **changes: Any) -> Any:
    if "rope_theta" in changes:
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": changes.pop("rope_theta")}
    return random_transformers_model(family, **changes)


@torch.no_grad()
def assert_same_logits(theirs: Any, folder: Path) -> None:
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 63))
    expected = theirs(tokens).logits
    ours = load_model(folder, dtype=torch.float32)
    logits = ours(tokens, torch.arange(63).expand_as(tokens), CausalSelf(ours.config.windows))
    # fp32 sums in another order: measured at most 1.3e-6 of the largest logit
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert ours.config.n_params == sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("case", ["llama, G = 3", "tied embeddings, its own head_dim"])
def test_pickled_weights_give_the_same_logits(case: str, n_shards: int, tmp_path: Path) -> None:
    family, changes = FAMILIES[case]
    theirs = make(family, **changes)
    theirs.config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [f"{family}ForCausalLM"]}))
    state = theirs.state_dict()  # holds lm_head.weight also when it is tied
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # as files of 2023 have it
    if n_shards == 1:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        files = {name: f"pytorch_model-{i % n_shards}.bin" for i, name in enumerate(state)}
        for file in set(files.values()):
            torch.save({name: state[name] for name in state if files[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert_same_logits(theirs, tmp_path)


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers_which_reads_what_is_saved(case: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[case]
    theirs = make(family, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same_logits(theirs, tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    save_hugging_face(ours, tmp_path / "ours", dtype=torch.float32, extra_config={"note": "kept"})
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["note"] == "kept"
    assert read_config(tmp_path / "ours") == ours.config
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **how)
    assert_same_logits(again, tmp_path / "ours")
    read = load_model(tmp_path / "ours")
    for (name, tensor), (_, other) in zip(ours.state_dict().items(), read.state_dict().items(), strict=True):
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("n_rows", [1, 8])
def test_what_inductor_reads_of_a_layer_is_the_layer(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of words, which a compiler reads as vectors, are the elements side by side, gate first."""
    config, x = tiny_config(), torch.randn(n_rows, 1, tiny_config().dim).bfloat16()
    plain, layer = (FeedForward(config).to(torch.bfloat16).requires_grad_(False) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    prepare_for_inductor(layer)
    assert type(layer) is GeneratedFeedForward and layer(x).equal(plain(x))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x), rtol=2**-6, atol=1e-3)


def test_compiled_bf16_training_gives_every_weight_a_gradient() -> None:
    layer = FeedForward(tiny_config()).to(torch.bfloat16)
    step = torch.compile(lambda x: layer(x).float().square().sum(), backend="aot_eager", fullgraph=True)
    step(torch.randn(2, 3, tiny_config().dim).to(torch.bfloat16)).backward()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
