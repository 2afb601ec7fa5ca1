"""The training pipeline on its miniature recipe: what it trains on, logs, resumes from and exports."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import evaluate
from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import CausalSelf, Tokenizer, Transformer, load_model, load_tokenizer, read_config
from inputs.facts import person, thing
from maintain import train_bundled
from maintain.bundled_data import MIXTURES, Books, Kind, book_paths
from maintain.train_bundled import RECIPES, Pieces, TrainingAttention
from tests.helpers import whole_text_logits

DOCUMENT = (BUNDLED / "document.txt").read_text(encoding="utf-8")
TOKENS = 20_000  # 79 steps of the test recipe, all three stages


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two made-up books of about 60 KB."""
    folder = tmp_path_factory.mktemp("books")
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        lines = [f"{person(rng)} saw {thing(rng)} near {thing(rng)}, and told {person(rng)} of it." for _ in range(900)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


def flags(books: Path, work: Path, *more: str) -> list[str]:
    return ["--recipe", "test", "--books", str(books), "--work", str(work), "--tokens", str(TOKENS), *more]


@pytest.fixture(scope="module")
def trained(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of an uninterrupted run, made in this process."""
    work = tmp_path_factory.mktemp("trained")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_bundled.main(flags(books, work))
    torch.set_num_threads(threads)
    return work


def checkpoint(work: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(work / "checkpoint.pt", weights_only=True)
    return state


@pytest.mark.parametrize("kind", {**MIXTURES["copying"], **MIXTURES["prose"]}, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("n", [65, 513, 2049])
def test_a_document_has_exactly_n_tokens_and_starts_with_bos(kind: Kind, n: int, books: Path, trained: Path) -> None:
    pieces = Pieces(trained / "tokenizer.model")
    tokens = Books(book_paths(books), pieces, trained / "tokens")
    for seed in range(5):
        ids = kind(np.random.default_rng(seed), n, tokens, pieces)
        assert (ids.shape, ids.dtype, ids[0]) == ((n,), np.int64, pieces.bos_id)
        assert not (ids[1:] == pieces.bos_id).any()


def test_held_out_passages_never_reach_training_and_a_half_written_cache_is_never_read(tmp_path: Path) -> None:
    letters: Any = SimpleNamespace(encode=lambda text: [*map(ord, text)])
    book, cache = tmp_path / "b.txt", tmp_path / "cache"
    cache.mkdir()
    (cache / "b.4711").write_bytes(b"a killed process left this")
    for text in ("x." * 490 + "!" * 20, "changed"):  # a book is tokenized once
        book.write_text(text)
        tokens = Books(book_paths(tmp_path), letters, cache)
        assert [path.name for path in cache.glob("*.npy")] == ["b.npy"]
        passages = [tokens.passage(np.random.default_rng(seed), 50) for seed in range(20)]
        assert not any(ord("!") in ids for ids in passages)
        assert tokens.passage(np.random.default_rng(0), 10, held_out=True).tolist() == [ord("!")] * 10


def test_training_attention_and_its_gradients_are_those_of_plain_attention() -> None:
    q, k, v = (torch.randn(2, n, 300, 16, dtype=torch.float64).requires_grad_() for n in (4, 2, 2))
    ours, plain = (kv.attend(0, q, k, v, torch.arange(300)[None]) for kv in (TrainingAttention(), CausalSelf()))
    torch.testing.assert_close(ours.double(), plain, rtol=0, atol=0.03)  # bf16 has 8 bits
    weight = torch.randn_like(plain)
    grads, theirs = (torch.autograd.grad((out.double() * weight).sum(), (q, k, v)) for out in (ours, plain))
    for grad, expected in zip(grads, theirs, strict=True):
        assert (grad - expected).norm() < 0.02 * expected.norm()


def test_training_lowers_the_loss_and_logs_it(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(25, checkpoint(trained)["step"] + 1, 25))
    assert records[0]["held_out"] < np.log(512)
    assert records[-1]["held_out"] < records[0]["held_out"]
    assert checkpoint(trained)["tokens"] >= TOKENS


def test_the_export_runs_in_the_engine_and_matches_the_checkpoint(trained: Path) -> None:
    folder = trained / "model"
    assert read_config(folder) == RECIPES["test"].config
    weights = checkpoint(trained)["model"]
    for name, tensor in load_model(folder, dtype=torch.float32).state_dict().items():
        torch.testing.assert_close(tensor, weights[name].bfloat16().float(), rtol=0, atol=0)
    config = EngineConfig(batch_size=1, max_seq_len=128, compile=False, dtype="fp32", device="cpu")
    engine = Engine.from_pretrained(folder, config)
    completion = engine.generate(["Clara Lockwood saw the"], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert len(completion.tokens) == 8


def test_the_export_can_be_measured_and_described(books: Path, trained: Path, tmp_path: Path) -> None:
    measured, written = tmp_path / "measured.json", tmp_path / "card.md"
    for book in books.iterdir():
        shutil.copy(book, tmp_path / f"new_{book.name}")
    argv = "--n 1 --device cpu --contexts 64 256 --lengths 224 256 --depths 0 1 --entries 2".split()
    argv += ["--model", str(trained / "model"), "--books", str(tmp_path), "--log", str(trained / "log.jsonl")]
    evaluate.main([*argv, "--json", str(measured), "--card", str(written)])
    result = json.loads(measured.read_text())
    assert [(r["book"], r["context"]) for r in result["perplexity"]] == [
        (book, context) for book in ("new_first", "new_second") for context in (64, 256)
    ]
    assert all(0 < r["loss"] < np.log(512) and r["bits_per_byte"] < 8 for r in result["perplexity"])
    assert [(r["length"], r["depth"]) for r in result["needle"]] == [(224, 0.0), (224, 1.0), (256, 0.0), (256, 1.0)]
    assert result["training"]["steps"] == 75  # the last that was logged
    assert sum(stage["steps"] for stage in result["training"]["stages"]) == 75
    assert "2 public-domain books" in written.read_text()


# ---- the model and the document that ship: small, readable by transformers, and trained ------------------------------


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(BUNDLED, read_config(BUNDLED))
    assert tokenizer is not None
    return tokenizer


def test_logits_and_ids_are_those_of_transformers(model: Transformer, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    text = DOCUMENT[:1200]
    ids = tokenizer.encode(text)
    assert transformers.AutoTokenizer.from_pretrained(BUNDLED)(text)["input_ids"] == ids
    reference = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(whole_text_logits(model, ids), expected, rtol=1e-3, atol=1e-3)  # sums in another order


def test_the_shipped_folder_is_small_and_its_long_document_fits(model: Transformer, tokenizer: Tokenizer) -> None:
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) < 32 * 2**20
    n_tokens = len(tokenizer.encode(DOCUMENT))
    assert 4096 <= n_tokens <= 12288
    assert n_tokens + 2048 <= model.config.max_seq_len
    assert "\ufffd" not in DOCUMENT
    assert DOCUMENT.endswith("by the brass bolt.\n")  # a whole text, which was written by hand


def test_the_model_reads_prose_and_copies_random_tokens_it_has_seen(model: Transformer, tokenizer: Tokenizer) -> None:
    """Nothing but the first copy predicts the second one: this is the far reading that drafts need."""
    ids = tokenizer.encode(DOCUMENT)[:1025]
    loss = torch.nn.functional.cross_entropy(whole_text_logits(model, ids[:-1]), torch.tensor(ids[1:]))
    assert loss < 5.0  # a uniform guess among 4,096 costs 8.3, the best unigram guess about 6.5
    n = 64
    words = torch.tensor(tokenizer.encode(DOCUMENT, bos=False))
    costs = []
    for seed in range(4):
        shuffled = words[torch.randperm(len(words), generator=torch.Generator().manual_seed(seed))[:n]]
        ids = torch.cat([torch.tensor([model.config.bos_id]), shuffled, shuffled])
        logits = whole_text_logits(model, ids[:-1].tolist())
        costs.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").split(n))
    first, second = (torch.stack(part).mean() for part in zip(*costs, strict=True))
    assert second < 0.6 * first
