"""The model and the document that ship: small, readable by transformers, and trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import CausalSelf, Tokenizer, Transformer, load_model, load_tokenizer, read_config
from tests.helpers import whole_text_logits


@pytest.fixture(scope="module")
def folder() -> Path:
    assert (BUNDLED / "model.safetensors").is_file(), f"{BUNDLED} holds no model: train_bundled.py makes it"
    return BUNDLED


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder, read_config(folder))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def document(folder: Path) -> str:
    return (folder / "document.txt").read_text(encoding="utf-8")


def test_the_shipped_folder_is_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 32 * 2**20


def test_every_piece_of_the_vocabulary_has_an_embedding(model: Transformer, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == model.config.vocab_size
    assert tokenizer.bos_id == model.config.bos_id
    assert tokenizer.eos_ids == model.config.eos_ids


def test_the_weights_are_finite(model: Transformer) -> None:
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_logits_and_the_ids_are_those_of_transformers(
    folder: Path, model: Transformer, tokenizer: Tokenizer, document: str
) -> None:
    transformers = pytest.importorskip("transformers")
    text = document[:1200]
    ids = tokenizer.encode(text)
    assert transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(tokens, torch.arange(len(ids))[None], CausalSelf())
        torch.testing.assert_close(logits, reference(tokens).logits, rtol=1e-3, atol=1e-3)  # sums in another order


def test_the_default_document_is_long_and_leaves_room_to_go_on(
    model: Transformer, tokenizer: Tokenizer, document: str
) -> None:
    n_tokens = len(tokenizer.encode(document))
    assert 4096 <= n_tokens <= 12288
    assert n_tokens + 2048 <= model.config.max_seq_len
    assert "\ufffd" not in document
    assert document.endswith("by the brass bolt.\n")  # a whole text, which was written by hand


def test_the_model_reads_prose_far_better_than_chance(model: Transformer, tokenizer: Tokenizer, document: str) -> None:
    ids = tokenizer.encode(document)[:1025]
    loss = torch.nn.functional.cross_entropy(whole_text_logits(model, ids[:-1]), torch.tensor(ids[1:]))
    assert loss < 5.0  # a uniform guess among 4,096 costs 8.3, the best unigram guess about 6.5


def test_the_model_copies_a_run_of_random_tokens_it_has_seen_before(
    model: Transformer, tokenizer: Tokenizer, document: str
) -> None:
    """Nothing but the first copy predicts the second one: this is the far reading that drafts need."""
    n = 64
    words = torch.tensor(tokenizer.encode(document, bos=False))
    costs = []
    for seed in range(4):
        shuffled = words[torch.randperm(len(words), generator=torch.Generator().manual_seed(seed))[:n]]
        ids = torch.cat([torch.tensor([model.config.bos_id]), shuffled, shuffled])
        logits = whole_text_logits(model, ids[:-1].tolist())
        costs.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").split(n))
    first, second = (torch.stack(part).mean() for part in zip(*costs, strict=True))
    assert second < 0.6 * first
