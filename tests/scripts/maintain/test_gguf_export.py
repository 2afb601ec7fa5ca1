"""What export_gguf writes, read again."""

from pathlib import Path

import pytest
import torch

from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import load_model, load_tokenizer, read_config, save_hugging_face
from maintain.gguf_writer import export_gguf


def test_a_model_without_its_tokenizer_takes_that_of_the_file_it_came_from(tmp_path: Path) -> None:
    """llama.cpp lets a model draft only for one of the same vocabulary, and ours was marked as one that has none."""
    source, folder, out = tmp_path / "source.gguf", tmp_path / "folder", tmp_path / "out.gguf"
    export_gguf(BUNDLED, source, "f16")
    save_hugging_face(load_model(source, dtype=torch.bfloat16), folder, dtype=torch.bfloat16)
    export_gguf(folder, out, "f16", tokenizer_of=source)
    text = "She had never seen a place 12 times; 東京."
    theirs, ours = (load_tokenizer(path, read_config(path)) for path in (source, out))
    assert theirs is not None and ours is not None
    assert ours.encode(text, bos=True) == theirs.encode(text, bos=True)


def test_a_draft_of_four_bits_has_an_embedding_of_eight(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    export_gguf(BUNDLED, tmp_path / "q4_0.gguf", "q4_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q4_0.gguf").tensors}
    assert (kinds["token_embd.weight"], kinds["blk.0.ffn_up.weight"]) == ("Q8_0", "Q4_0")
    whole, small = (load_model(path, dtype=torch.float32) for path in (BUNDLED, tmp_path / "q4_0.gguf"))
    for name, weight in whole.state_dict().items():
        error = (small.state_dict()[name] - weight).norm() / weight.norm()
        assert error < 0.12, name  # blocks of 32 numbers share a step of an eighth of the largest
