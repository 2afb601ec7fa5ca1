"""A model folder is read completely, in float8 too, or refused in one sentence that names the file."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_fast_sd import model as models
from gpt_fast_sd.model import CheckpointError, ModelConfig, Transformer, Weights, load_model, save_hugging_face
from gpt_fast_sd.model.files.reading import OpenFile
from tests.float8_folders import READ, REFUSED, compressed_tensors, describe, save_float8
from tests.helpers import Patch, ahead, few, tiny_config, tiny_model

Keep = Callable[[Transformer, str, Tensor, Tensor], None]  # asked to keep numbers and their scales by name
CONFIG = ModelConfig(
    vocab_size=50, dim=32, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=8, ffn_dim=40, max_seq_len=64, qkv_bias=True
)
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def save(folder: Path, config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config)
    save_hugging_face(model, folder, dtype=torch.float32)
    return model


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> Path:
    """Split model.safetensors in two and return the second file."""
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + (name == K)}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()
    return folder / files[K]


def pickled(folder: Path, tensors: object = None) -> Path:
    """Save the model and replace its weights by a pickle of these, or of the same -> the pickle."""
    save(folder)
    path, stored = folder / "pytorch_model.bin", folder / "model.safetensors"
    torch.save(load_file(stored) if tensors is None else tensors, path)
    stored.unlink()
    return path


def refusal(folder: Path, keep: Keep | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, keep=keep)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(loaded: Transformer, saved: Transformer) -> None:
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), tensor), name


def test_loading_gives_every_parameter_in_parts_too_and_needs_no_file_later(tmp_path: Path, monkeypatch: Patch) -> None:
    saved = save(tmp_path)
    loaded = load_model(tmp_path)
    monkeypatch.setattr("gpt_fast_sd.model.files.checkpoint._NUMBERS_AT_ONCE", 70)
    assert_same(load_model(tmp_path), saved)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert_same(loaded, saved)
    assert torch.equal(loaded.rope_freqs, saved.rope_freqs)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stored_dtype_is_kept_unless_another_is_asked_for(stored: torch.dtype, tmp_path: Path) -> None:
    save_hugging_face(Transformer(CONFIG), tmp_path, dtype=stored)
    kept, asked = load_model(tmp_path), load_model(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in kept.parameters()} == {stored}
    assert {p.dtype for p in asked.parameters()} == {torch.float32}
    assert kept.rope_freqs.dtype == torch.float32
    name = "layers.0.attention.wqkv.weight"
    assert torch.equal(kept.get_parameter(name).float(), asked.get_parameter(name))
    with pytest.raises(ValueError, match=r"dtype must be a float type, got torch\.int8"):
        load_model(tmp_path, dtype=torch.int8)


@pytest.mark.parametrize("save_as", [save, pickled])
@pytest.mark.parametrize("cut", [0, 4, 20, -5])
def test_a_truncated_file_is_named(cut: int, save_as: Callable[[Path], object], tmp_path: Path) -> None:
    save_as(tmp_path)
    (path,) = {*tmp_path.iterdir()} - {tmp_path / "config.json"}
    path.write_bytes(path.read_bytes()[:cut])
    assert refusal(tmp_path).startswith(f"{path} is damaged or incomplete: ")


SHRINKING = """
import os, sys
from pathlib import Path
from gpt_fast_sd.model import CheckpointError, Weights, load_model
for path in map(Path, sys.argv[1:]):
    read = Weights._read
    def shrink(self, name, rows, columns):
        found = read(self, name, rows, columns)
        if name in ("model.norm.weight", "output_norm.weight"):
            os.truncate(path, 0)
        return found
    Weights._read = shrink
    try:
        load_model(path if path.suffix == ".gguf" else path.parent)
    except CheckpointError as error:
        print(error)
    Weights._read = read
"""


def test_a_file_that_shrinks_while_it_is_loaded_is_one_sentence(tmp_path: Path) -> None:
    """Through a memory map, looking at a byte that is gone ended the process: SIGBUS."""
    from tests.gguf_files import model_of, write_gguf

    save(tmp_path / "a", replace(CONFIG, vocab_size=5000))
    paths = [tmp_path / "a" / "model.safetensors", pickled(tmp_path / "b"), tmp_path / "model.gguf"]
    torch.save(load_file(paths[0]), paths[1])
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "b")
    save(tmp_path / "c", replace(CONFIG, vocab_size=5000, qkv_bias=False))
    write_gguf(paths[2], model_of(tmp_path / "c"))
    sizes = [path.stat().st_size for path in paths]
    command = [sys.executable, "-c", SHRINKING, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-500:]
    for line, path, size in zip(done.stdout.splitlines(), paths, sizes, strict=True):
        lost = f"the file had {size:,} bytes when it was opened, and has 0"
        assert re.fullmatch(rf"{path}: (model\.norm|lm_head|output_norm|output)\.weight cannot be read: {lost}", line)


def test_a_file_removed_or_replaced_while_it_is_loaded_is_read_to_its_end(tmp_path: Path, monkeypatch: Patch) -> None:
    whole, path = save(tmp_path), tmp_path / "model.safetensors"
    changes = {Q: path.unlink, K: lambda: path.write_bytes(b"another")}
    ahead(monkeypatch, Weights, "_read", lambda self, name, *_: changes.get(name, lambda: None)())
    loaded = load_model(tmp_path)
    assert path.read_bytes() == b"another"
    assert_same(loaded, whole)


def entry(**changes: object) -> bytes:
    """The header of a file with one tensor, changed."""
    described = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    return json.dumps({"model.norm.weight": described}).encode()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (entry(data_offsets=[0, 128]), r"model\.norm\.weight is F32 of shape \[1\], but has 128 bytes"),
        (entry(data_offsets=[4, 0]), r"model\.norm\.weight ends at byte"),
        (entry(data_offsets=[0, 10**6], shape=[250_000]), r"it has \d+ bytes, but model\.norm\.weight ends at byte"),
        (entry(data_offsets=[-4, 0]), r"model\.norm\.weight ends at byte"),
        (entry(data_offsets=None), r"its header describes model\.norm\.weight in no known way"),
        (entry(shape=[-1]), r"its header describes model\.norm\.weight in no known way"),
        *((no_object, "") for no_object in (b"[]", b"{", b"\xff", b'{"a": 1, "a": 1}', b"[" * 10**5)),
    ],
    ids=lambda value: value[:40],
)
def test_a_header_that_lies_or_is_no_json_object_is_refused(header: bytes, said: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    assert re.search(rf"model\.safetensors is damaged or incomplete: .*{said}", refusal(tmp_path))


def test_a_header_longer_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(10**9 + 8)  # which takes no room on the disk
    assert "bytes, but says that its header alone has 1,000,000,000" in refusal(tmp_path)


@pytest.mark.parametrize("pickle", [False, True])
def test_tensors_are_those_that_their_library_reads_in_whole_and_in_part(pickle: bool, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(5, 7), "scalar": torch.tensor(2.5), "bfloat16": torch.randn(3, 4).bfloat16(),
        "double": torch.randn(6).double(), "none": torch.empty(0, 4), "half": torch.randn(9, 2).half(),
    }  # fmt: skip
    if pickle:
        shared = torch.randn(40)
        tensors |= {
            "transposed": torch.randn(4, 6).T, "steps": torch.randn(9, 8)[::2, 1::3],
            "expanded": torch.randn(3, 1).expand(3, 4), "every second": torch.randn(6, 1)[::2].expand(3, 4),
            "first": shared[:12].view(3, 4), "second": shared[10:30].view(4, 5),
            "parameter": torch.nn.Parameter(torch.randn(6).double()),
        }  # fmt: skip
        pickled(tmp_path, tensors)
    else:
        save(tmp_path)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = Weights(tmp_path)
    for name, tensor in tensors.items():
        read = weights.read(name)
        assert torch.equal(read, tensor) and (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        cuts = [slice(None), slice(1, 3), slice(2), slice(2, None), slice(2, 2), slice(4, 99)]
        for part in itertools.product(*[cuts] * tensor.dim()):  # rows, and columns of a matrix
            assert torch.equal(weights.read(name, *part), tensor[part]), (name, part)


def rewritten(path: Path, edit: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in reversed(archive.namelist())}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, edit(name.partition("/")[2], content))


def test_a_zip_in_another_order_is_read_by_its_directory(tmp_path: Path) -> None:
    """Two tensors of one shape would change places if offsets went by the order of the pickle."""
    tensors = {name: torch.randn(7, 3) for name in "abcd"}
    rewritten(pickled(tmp_path, tensors), lambda name, content: content)
    for name, tensor in tensors.items():
        assert torch.equal(Weights(tmp_path).read(name), tensor)


def other(record: str, changed: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda name, content: changed(content) if name == record else content)


def appended(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"1234")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: rewritten(path, lambda name, content: content, zipfile.ZIP_DEFLATED), "in it is compressed"),
        (other("byteorder", lambda content: b"big"), "its numbers are not little-endian"),
        (other("data/3", lambda content: content[:-4]), "is larger than its storage"),
        (other("data.pkl", lambda content: content[:-9]), "its pickle makes no sense: IndexError"),
        (other("data.pkl", lambda content: b""), "its pickle makes no sense: EOFError"),
        (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "which PyTorch writes since 1.6"),
        (lambda path: torch.save([torch.ones(1)], path), "it holds something other than named tensors"),
        (lambda path: torch.save({1: torch.ones(1)}, path), "it holds something other than named tensors"),
        (lambda path: torch.save({"a": torch.eye(2).to_sparse()}, path), ""),
        (lambda path: zipfile.ZipFile(path, "w").close(), "its pickle makes no sense: KeyError"),
        (lambda path: appended(path, "pytorch_model/data/0"), "data/0' in it comes twice, or lies in another fol"),
        (lambda path: appended(path, "other/data/0"), "'other/data/0' in it comes twice, or lies in another folder"),
        (lambda path: appended(path, "data/0"), "'data/0' in it comes twice, or lies in another folder"),
    ],
)
def test_a_pickle_that_lies_is_refused(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    path = pickled(tmp_path)
    damage(path)
    answer = refusal(tmp_path)
    assert answer.startswith(f"{path} is damaged or incomplete: ") and said in answer


@pytest.mark.parametrize("name", ["stride", "dim", "storage_offset", "untyped_storage", "numel", "is_neg", "harmless"])
def test_attributes_of_a_pickled_tensor_do_not_stand_for_its_methods(name: str, tmp_path: Path) -> None:
    """They ended in a TypeError, as a stride of -5 cannot be called."""
    tensors = {"a": torch.randn(5, 3), "b": torch.nn.Parameter(torch.randn(3))}
    for tensor, value in zip(tensors.values(), (-5, {}), strict=True):
        setattr(tensor, name.upper(), value)
    path = pickled(tmp_path, tensors)
    other("data.pkl", lambda content: content.replace(name.upper().encode(), name.encode()))(path)
    weights = Weights(tmp_path)
    assert torch.equal(weights.read("a", slice(1, 4)), tensors["a"][1:4])
    assert torch.equal(weights.read("b"), tensors["b"])


def test_a_tensor_saved_by_columns_is_read_once_in_parts(tmp_path: Path, monkeypatch: Patch) -> None:
    """Nearly all of it was read for each part."""
    tensors = {
        "by columns": torch.randn(16, 64).t(), "by rows": torch.randn(64, 16), "a part": torch.randn(16, 200).t()[:64],
        "steps": torch.randn(16, 128)[:, ::2].t(), "one column": torch.randn(1, 64).t(),
    }  # fmt: skip
    pickled(tmp_path, tensors)
    weights, n_read = Weights(tmp_path), list[int]()
    ahead(monkeypatch, OpenFile, "fill", lambda self, buffer, offset: n_read.append(buffer.nbytes))
    for name, tensor in tensors.items():
        for by in (1, 4, 64):
            for parts in (
                [(slice(i, i + by), slice(None)) for i in range(0, 64, by)],
                [(slice(None), slice(i, i + by)) for i in range(0, tensor.shape[1], by)],
            ):
                n_read.clear()
                for part in parts:
                    assert torch.equal(weights.read(name, *part), tensor[part]), (name, part)
                assert sum(n_read) <= (2 if name == "steps" else 1) * tensor.nbytes, (name, by)


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (torch._neg_view(torch.ones(32)), "model.norm.weight cannot be read: it was saved as the negative"),
        (torch.empty(32, device="meta"), "model.norm.weight cannot be read: it was saved without its numbers"),
        (SimpleNamespace(), "pytorch_model.bin is damaged or incomplete"),  # it would run code
    ],
)
def test_what_is_no_tensor_of_numbers_in_a_pickle_is_named(norm: object, said: str, tmp_path: Path) -> None:
    """One that was saved as its negative was read with the other sign."""
    save(tmp_path)
    pickled(tmp_path, load_file(tmp_path / "model.safetensors") | {"model.norm.weight": norm})
    assert said in refusal(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("step", few([13, 1], [13]))
def test_whatever_byte_of_a_pickle_is_changed_it_is_read_or_refused(step: int, tmp_path: Path) -> None:
    path = pickled(tmp_path, {"model.norm.weight": torch.ones(32), "b": torch.nn.Parameter(torch.ones(3))})
    whole = path.read_bytes()
    for at in range(0, len(whole), step):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        assert refusal(tmp_path)  # it lacks all other tensors, at least


def test_a_missing_shard_tensor_or_weight_map_is_named(tmp_path: Path) -> None:
    whole, second, index = save(tmp_path), shard(tmp_path), tmp_path / "model.safetensors.index.json"
    assert_same(load_model(tmp_path), whole)
    second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert refusal(tmp_path) == f"{second} is a git-lfs pointer, not the file itself; run: git lfs pull"
    second.unlink()
    assert refusal(tmp_path) == f"{second} is missing, but {index.name} names it"
    save_file({"other": torch.zeros(1)}, second)
    assert refusal(tmp_path) == f"{second} has no tensor {K}, but {index.name} says it has"
    index.write_text("{}")
    assert f"{index.name} must have a weight_map" in refusal(tmp_path)


@pytest.mark.parametrize("outside", ["../model.safetensors", "{}/model.safetensors", "a/b.safetensors", "a/.."])
def test_a_file_outside_the_folder_is_not_read_whoever_names_it(outside: str, tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path / "model")
    shard(tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**files, K: outside.format(tmp_path)}}))
    assert "which is no file of its own folder" in refusal(tmp_path / "model")


def test_a_weight_that_overflows_the_dtype_is_refused_and_large_ones_are_read(tmp_path: Path) -> None:
    save(tmp_path)
    change(tmp_path, lambda tensors: tensors[Q].fill_(3e38))  # their sum is infinite
    assert load_model(tmp_path).layers[0].attention.wqkv.weight.max() == 3e38
    with pytest.raises(CheckpointError, match=f"{Q} holds inf as float16"):
        load_model(tmp_path, dtype=torch.float16)


def test_few_rows_at_a_time_are_widened_to_find_infinities(tmp_path: Path, monkeypatch: Patch) -> None:
    """A CPU's sum in another dtype is one of a copy: of an embedding in bf16 it would take twice its bytes."""
    save(tmp_path)
    sums, real = [], torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda x, **how: (sums.append(len(x)), real(x, **how))[1])
    monkeypatch.setattr("gpt_fast_sd.model.files.checkpoint._ROWS_AT_ONCE", 8)
    load_model(tmp_path, dtype=torch.bfloat16)
    assert sums and max(sums) <= 8


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        *((lambda tensors, name=name: tensors.pop(name), rf" has no tensor {name}, which its config\.json asks for.*")
          for name in (Q, "lm_head.weight")),
        (lambda tensors: tensors.update(adapter=torch.zeros(2), other=torch.zeros(2)),
         r"/model\.safetensors: config\.json's model has no place for \w+ and 1 more tensors"),
        (lambda tensors: tensors.update({Q: torch.zeros(40, 32)}),
         rf"/model\.safetensors: {Q} has shape \[40, 32\], but config\.json asks for \[48, 32\]"),
        *((lambda tensors, name=name, bad=bad: tensors[name].view(-1)[-1:].fill_(bad),
           rf"/model\.safetensors: {re.escape(name)} holds {bad} as float32")
          for name in (Q, K, "model.norm.weight", "model.layers.1.mlp.up_proj.weight")
          for bad in (torch.nan, torch.inf, -torch.inf)),
    ],
)  # fmt: skip
def test_a_tensor_missing_without_a_place_of_another_shape_or_not_finite_is_named(
    edit: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path
) -> None:
    save(tmp_path)
    change(tmp_path, edit)
    assert re.fullmatch(re.escape(str(tmp_path)) + said, refusal(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("save_as", [save, pickled])
def test_quantized_tensors_are_refused(dtype: torch.dtype, save_as: Any, tmp_path: Path) -> None:
    save(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({Q: torch.zeros(48, 32).to(dtype)}))
    if save_as is pickled:
        pickled(tmp_path, load_file(tmp_path / "model.safetensors"))
    said = rf"{Q} is stored as (I8|int8|F8_E4M3|float8_e4m3fn), but only F64, F32, F16, BF16 can be read$"
    assert re.search(said, refusal(tmp_path))


def test_a_tied_output_is_stored_once_and_a_second_copy_must_be_equal(tmp_path: Path) -> None:
    save(tmp_path, replace(CONFIG, tie_embeddings=True))
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    embedding = stored["model.embed_tokens.weight"]
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    loaded = load_model(tmp_path)
    assert loaded.output.weight is loaded.embedding.weight
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    said = refusal(tmp_path)
    assert said.endswith("lm_head.weight differs from the embedding, but config.json has tie_word_embeddings true")


def test_a_folder_without_weights_or_config_and_a_file_are_no_models(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert refusal(tmp_path).startswith(f"{tmp_path} has no weights: neither model.safetensors nor pytorch_model.bin")
    (tmp_path / "config.json").unlink()
    said = f"{tmp_path} is not a model folder: it has no config.json"
    assert refusal(tmp_path) == said
    with pytest.raises(CheckpointError, match=re.escape(said)):
        models.resolve_model(tmp_path)
    (tmp_path / "weights").write_text("")
    with pytest.raises(CheckpointError, match="is a file; a model is a folder"):
        models.resolve_model(tmp_path / "weights")


def test_a_local_folder_is_found_before_the_hub_or_what_is_missing_is_said(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("no-such-folder", "./no/such", "/no/such/folder", "a/b/c"):
        with pytest.raises(CheckpointError, match=r"no folder .* is not a hub id of the form owner/name or own"):
            models.resolve_model(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r'no folder owner/name; .* pip install -e "\.\[hf\]"'):
        models.resolve_model("owner/name")
    save(tmp_path / "owner" / "name")
    assert models.resolve_model("owner/name") == Path("owner/name")


def test_the_hub_gives_pickles_only_without_safetensors_or_one_sentence(tmp_path: Path, monkeypatch: Patch) -> None:
    asked, errors = list[str](), pytest.importorskip("huggingface_hub.errors")
    error, listed = errors.LocalEntryNotFoundError("no network\nmore"), [SimpleNamespace(path="chat_template.jinja")]

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        if name == "owner/none":
            raise error
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=download, try_to_load_from_cache=lambda *_: str(tmp_path / "config.json"))
    hub.errors, hub.get_cached_repo_tree = errors, lambda _: listed
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    save(tmp_path)
    assert models.resolve_model("owner/name") == tmp_path
    assert "model*.safetensors" in asked and "pytorch_model*.bin" not in asked
    (tmp_path / "model.safetensors").unlink()
    models.resolve_model("owner/name")
    assert "pytorch_model*.bin" in asked
    for name, said in (("owner/none", "^no folder owner/none, and the hub did not provide it: no network$"),
                       ("a" * 256 + "/b:Q4", "/b:Q4 is too long for a name: 255 bytes between")):  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            models.resolve_model(name)
    assert models.find_downloaded("a" * 256 + "/b") is None
    for file in ("tokenizer.json", "model.safetensors", "chat_template.jinja"):  # what else it asks for is not needed
        (tmp_path / file).touch()
        with pytest.warns(match="of reach") if file == listed[0].path else pytest.raises(ValueError, match="no net"):
            assert models.resolve_model("owner/none") == tmp_path
    error.__cause__ = errors.GatedRepoError("gated", response=SimpleNamespace(status_code=403, headers={}, request=0))
    with pytest.raises(CheckpointError, match="hub did not provide it: gated"):
        models.resolve_model("owner/none")


GGUF_FILES = (
    "README.md m.Q4_K_M.gguf m-Q4_K.gguf m-IQ4_XS.gguf m_q8_0.gguf m-F16.GGUF m-Q5_K_XL.gguf m-UD-Q5_K_XL.gguf "
    "m-Q6_K-00001-of-00002.gguf m-Q6_K-00002-of-00002.gguf m-Q5_0.gguf m-Q5_0-v2.gguf m-Q5_0-00001-of-00001.gguf "
    "a/m-Q2.gguf b/M-Q2.gguf mmproj-m-Q8_0.gguf"
).split()
CHOSEN = {
    "Q4_K_M": [1], "q4_k_m": [1], "Q4_K": [2], "IQ4_XS": [3], "Q8_0": [4], "f16": [5], "m-Q5_K_XL": [6],
    "UD-Q5_K_XL": [7], "Q6_K": [8, 9], "m-q5_0": [10], "M-Q5_0.GGUF": [10], "b/m-q2": [14], "M-Q2": [14],
    "Q2_K": "no GGUF model of Q2_K; it has a/m-Q2, b/M-Q2, m-F16, ",
    "Q2": "several GGUF models of Q2: a/m-Q2, b/M-Q2; put one of these names", "mmproj-m-Q8_0": "no GGUF model",
    "K_M": "no GGUF model of K_M; it has ", "Q4_XS": "no GGUF model of Q4_XS; it has ",
    "Q5_K_XL": "several GGUF models of Q5_K_XL: m-Q5_K_XL, m-UD-Q5_K_XL; put one of these names behind the colon",
}  # fmt: skip


@pytest.mark.parametrize("asked", CHOSEN)
def test_what_is_behind_a_colon_is_a_gguf_file_of_hub_or_cache(asked: str, tmp_path: Path, monkeypatch: Patch) -> None:
    def download(repository: str, file: str) -> str:
        fetched.append(file)
        return str(tmp_path / file)

    def out_of_reach(repository: str) -> list[str]:
        raise OSError("no network\nand more lines")

    fetched: list[str] = []
    hub = SimpleNamespace(hf_hub_download=download, list_repo_files=lambda repository: GGUF_FILES)
    hub.snapshot_download, hub.errors = lambda *_, **__: str(tmp_path), pytest.importorskip("huggingface_hub.errors")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for file in GGUF_FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    name, expected = f"owner/name:{asked}", CHOSEN[asked]
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=f"^owner/name has {expected}"):
            models.resolve_model(name)
    else:
        files = [GGUF_FILES[i] for i in expected]
        assert models.resolve_model(name) == tmp_path / files[0] and fetched == files
    hub.list_repo_files = out_of_reach
    if isinstance(expected, str):
        assert models.find_downloaded(name) is None
        with pytest.raises(CheckpointError, match=f"^owner/name has {expected}.*; that is its cache, as"):
            models.resolve_model(name)
    else:
        assert models.resolve_model(name) == models.find_downloaded(name) == tmp_path / files[0] and fetched == files


# ---- in float8 -------------------------------------------------------------------------------------------------------


def rows_of(model: Transformer, meant: dict[str, Tensor], name: str) -> list[Tensor]:
    """What a parameter of a model should hold: the rows of its stored tensors, in their order."""
    units = [meant[stored].unflatten(0, (-1, rows)) for stored, rows, _ in models.name_table(model.config)[name]]
    return [part for unit in zip(*units, strict=True) for part in unit]


class Keeper:
    """What loading is asked to keep: numbers and their scales by name."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, model: Transformer, name: str, numbers: Tensor, scales: Tensor) -> None:
        self.kept[name] = numbers, scales
        place, _, kind = name.rpartition(".")
        setattr(model.get_submodule(place), kind, torch.nn.Parameter(numbers.float(), requires_grad=False))


@pytest.mark.parametrize("kind", READ)
def test_weights_in_float8_are_dequantized_row_by_row_or_kept_with_a_scale_for_each(kind: str, tmp_path: Path) -> None:
    # what concerns activations or a cache is not read
    names = ["q_proj.input_scale", "k_proj.input_scale_ub", "k_scale", "v_scale", "q_scale", "o_proj.output_scale"]
    unread = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names}
    meant, keep = save_float8(tmp_path, kind, extra=unread), Keeper()
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path, dtype=dtype)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == dtype
            assert parameter.equal(torch.cat(rows_of(model, meant, name)).to(dtype)), name
    model = load_model(tmp_path, dtype=torch.bfloat16, keep=keep)
    assert len(keep.kept) == (0 if "blocks" in kind else 4 * 2)
    for name, (numbers, scales) in keep.kept.items():
        assert numbers.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert (numbers.float() * scales[:, None]).equal(torch.cat(rows_of(model, meant, name))), name
    assert model.output.weight.dtype == model.embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [True, False], ids=["as it is", "dequantized"])
@pytest.mark.parametrize("of", ["channel", "compressed blocks"])
@pytest.mark.parametrize(("name", "bad"), [(Q, torch.nan), (f"{Q}_scale", torch.nan), (f"{Q}_scale", torch.inf)])
def test_float8_that_is_no_finite_number_is_refused(name: str, bad: float, of: str, kept: bool, tmp_path: Path) -> None:
    save_float8(tmp_path, of)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    tensor.view(-1)[-1:] = bad
    change(tmp_path, lambda tensors: tensors.update({name: tensor}))
    said = refusal(tmp_path, Keeper() if kept else None)
    assert re.search(f"model.safetensors: {name if kept and of == 'channel' else Q} holds -?(nan|inf) as ", said)


def test_what_a_checkpoint_ignores_keeps_its_dtype_and_is_found(tmp_path: Path) -> None:
    whole, some, none = (tmp_path / name for name in ("whole", "some", "none"))
    save_float8(whole)
    meant = save_float8(some, plain=("lm_head", "layers.1.mlp.down_proj"), kv_cache_scheme={"num_bits": 8})
    save_hugging_face(tiny_model(), none, dtype=torch.float32)
    stored = models.read_stored_float8(whole), models.read_stored_float8(some)
    assert stored[0] is not None and stored[0].other is None and not stored[0].cache
    assert stored[1] is not None and stored[1].other == "model.layers.1.mlp.down_proj.weight" and stored[1].cache
    assert models.read_stored_float8(none) is None
    assert models.read_stored_dtype(some) == "bfloat16"
    keep = Keeper()
    model = load_model(some, keep=keep)
    assert len(keep.kept) == 7 and "layers.1.feed_forward.w_out.weight" not in keep.kept
    expected = meant["model.layers.1.mlp.down_proj.weight"]
    assert model.get_parameter("layers.1.feed_forward.w_out.weight").equal(expected.bfloat16())


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
        (compressed_tensors("block", [128, 2**63]), "block size is 9223372036854775808, but .* at most 2,147,483,647"),
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
    change(tmp_path, lambda tensors: (tensors.pop(Q), tensors.update({packed: torch.zeros(4, 4, dtype=torch.int32)})))
    assert f"model.safetensors: {packed} is a part of a quantized weight" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{Q}_scale", torch.ones(2, 2), "_scale is F32 of shape [2, 2], but the scales of 32 outputs are floats of"),
        (f"{Q}_scale", torch.ones(32, 1, dtype=torch.int32), "_scale is I32 of shape [32, 1], but the scales of 32"),
        (f"{Q}_scale", None, "q_proj.weight is stored as F8_E4M3, but model.layers.0.self_attn.q_proj.weight_scale"),
        ("model.norm.weight_scale", torch.ones(1), "model has no place for model.norm.weight_scale"),
        (f"{Q}_scale_inv", torch.ones(2, 3), "shape [2, 3], but the scales of 32 outputs are floats of shape [2, 2]"),
        (f"{Q}_scale_inv", None, "weight is stored as F8_E4M3, but model.layers.0.self_attn.q_proj.weight_scale"),
    ],
)
def test_scales_that_belong_to_no_weight_are_named(name: str, tensor: Tensor | None, said: str, tmp_path: Path) -> None:
    save_float8(tmp_path, "blocks" if name.endswith("_inv") else "channel")
    change(tmp_path, lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor}))
    assert said in refusal(tmp_path)
