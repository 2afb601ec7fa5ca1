"""scripts/peers.py: what it reads of a GGUF file, and of what llama.cpp says."""

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import peers
from gpt_fast_sd.model import load_tokenizer, read_config, save_hugging_face
from inputs.prompts import read_text
from measuring import peer_speculation, peer_turns
from measuring.peer_gpt_fast import GptFast, weights
from measuring.peers import Decoded, Entry, LlamaCpp, PeerFailed, Transformers, Worker
from tests.helpers import Patch, Printed, Refuses, ahead, tiny_model
from tests.llama_server import write_llama_server


def test_the_size_of_a_cache_is_found_behind_any_amount_of_debugging() -> None:
    """Of 30 layers llama.cpp says so much that the line of interest was cut off, and every cell failed."""
    peer: Any = SimpleNamespace(log="", config=SimpleNamespace(kv_bytes_per_token=lambda _: 2**20), kv="F16")
    LlamaCpp._keep_log(peer, 2, b"llama_kv_cache: CPU KV buffer size = 20.00 MiB\n", None)
    for _ in range(2000):
        LlamaCpp._keep_log(peer, 1, b"llama_graph_n_input_tensors: input tensor is used by a node, and so on" * 2, None)
    LlamaCpp._refuse_shared_rows(peer, 2, 10)
    with pytest.raises(RuntimeError, match="reports 20 MiB of KV where 2 separate rows need 22"):
        LlamaCpp._refuse_shared_rows(peer, 2, 11)


class Quick:
    """A worker that says 7 at once; of two drafts a round one is accepted."""

    notes = "a stand-in"

    def __init__(self, entry: Entry, setup: Any) -> None:
        self.is_plain = entry.draft is None

    def call(self, name: str, *given: Any) -> Any:
        return [7] if name == "prefill" else ([[7]] * sum(given), [1.0] * given[1]) if name == "steps" else 0

    def decode(self, tokens: list[int], n: int) -> Decoded:
        drafts = (0, 0) if self.is_plain else (n, n // 2)
        return Decoded(tokens=[7] * n, seconds=n * 1e-3, rounds=n - drafts[1], drafted=drafts[0], accepted=drafts[1])

    def close(self) -> None:
        pass


def test_a_gguf_file_is_timed_by_all_peers_with_the_same_16_bit_weights_and_cells_are_kept(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed, refuses: Refuses
) -> None:
    source = tmp_path / "model.gguf"
    peers.export_gguf(peers.BUNDLED, source, "f32")
    seen: list[tuple[Entry, Path]] = []

    def started(_: Quick, entry: Entry, setup: Any) -> None:
        assert read_config(setup.folder).n_params == read_config(source).n_params
        seen.append((entry, setup.folder))
        assert {tensor.dtype for tensor in peers.load_model(setup.folder).state_dict().values()} == {torch.bfloat16}

    ahead(monkeypatch, Quick, "__init__", started)
    monkeypatch.setattr(peer_turns, "Worker", Quick)
    rates = iter([10.0, 9.0, *[20.0] * 9])
    monkeypatch.setattr(peers, "read_bandwidth", lambda: next(rates))
    file = tmp_path / "peers.json"
    argv = ["--model", str(source), "--peers", "ours,transformers", "--batches", "1", "--steps", "2"]
    argv += ["--repeats", "1", "--without", "eager", "--agree", "0", "--json", str(file)]
    peers.main([*argv, "--contexts", "20"])
    assert [entry.peer for entry, _ in seen] == ["ours", "transformers"] and seen[1][0].mode == "sdpa"
    assert f"the file has {source.stat().st_size / 1e6:.1f} MB, dequantized to bf16" in capsys.readouterr().out
    first = json.loads(file.read_text())["cells"]
    peers.main([*argv, "--contexts", "20,30"])
    cells = json.loads(file.read_text())["cells"]
    assert cells[:1] == first and [cell["context"] for cell in cells] == [20, 30]
    assert "1 of 2 cells are in" in capsys.readouterr().out
    assert json.loads(file.read_text())["read_gb_per_second"]["best"] == 10.0  # not of the run that went on
    assert [cell["read_gb_per_second"] for cell in cells] == [10.0, 20.0]
    for flags, said in (
        ("--steps 3", "was measured with steps 2, not 3"),
        ("--agree 2", "was measured with agree 0, not 2"),
        ("--without sdpa", "was measured with without ['eager'], not ['sdpa']"),
        ("--json - --fresh", "--fresh forgets what the file of --json holds"),
        ("--contexts 1", "a context has at least 2 tokens, got 1"),
        ("--json nowhere/x.json", "there is no folder"),
    ):
        assert said in refuses(peers.main, *argv, "--contexts", "20", *flags.split())


@pytest.mark.slow
def test_speculation_is_timed_beside_llama_cpps_own_and_cells_are_kept(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed, refuses: Refuses
) -> None:
    source, file = tmp_path / "model.gguf", tmp_path / "speculation.json"
    peers.export_gguf(peers.BUNDLED, source, "f32")
    monkeypatch.setattr(peer_speculation, "Worker", Quick)
    monkeypatch.setattr(peers.signal, "signal", lambda *_: None)  # this process goes on
    monkeypatch.setattr(peers, "read_bandwidth", lambda: 10.0)
    starts = write_llama_server(tmp_path, last_words="GGML_ASSERT failed", only="ngram-cache")
    argv = ["--model", str(source), "--llama-bin", str(tmp_path), "--new-tokens", "8", "--repeats", "2"]
    argv += ["--json", str(file)]
    peers.main([*argv, "--contexts", "20"])
    report = json.loads(file.read_text())
    rows = {row["peer"]: row for row in report["cells"][0]["results"]}
    kinds = {"ours": ("", ", int4 drafts", ", lookup"), "llama.cpp": ("", ", draft model", ", lookup")}
    kinds["transformers"] = ("", ", lookup")
    assert list(rows) == [f"{peer}{kind}" for peer, its in kinds.items() for kind in its]
    assert rows["ours, lookup"]["tokens_per_round"] == 2.0 and rows["llama.cpp, lookup"]["accepted_share"] == 0.5
    assert len(report["cells"][0]["heats"]) == len(peer_speculation.entries()) - 1
    assert report["failures"] == [
        "llama.cpp, lookup (n-gram cache), context 20: llama-server ended with code 1: GGML_ASSERT failed"
    ]
    assert report["notes"]["llama-server"].startswith("version: 0.5.0-dev")
    said = capsys.readouterr().out
    assert "drafted/round" in said and "GB/s" in said and "failed: llama.cpp, lookup (n-gram cache)" in said
    starts.write_text("")
    peers.main([*argv, "--contexts", "20"])
    assert "context 20 is in" in capsys.readouterr().out and not starts.read_text()

    (tmp_path / "empty").mkdir()
    for flags, said in (
        ("--new-tokens 9", "was measured with new_tokens 8, not 9"),
        (f"--llama-bin {tmp_path}/empty", "holds no llama-server: build it"),
        ("--batches 8", "--batches does nothing with --llama-bin"),
        ("--model bundled", "--llama-bin needs a GGUF file as --model"),
        ("--contexts 90k", "contexts must be from 2 to"),
    ):
        assert said in refuses(peers.main, *argv, "--contexts", "20", *flags.split())
    assert "--new-tokens does nothing without --llama-bin" in refuses(peers.main, "--new-tokens", 8)

    write_llama_server(tmp_path, last_words="illegal instruction")
    with pytest.raises(SystemExit) as stopped:
        peers.main([*argv, "--contexts", "20", "--fresh"])
    heard = capsys.readouterr()
    assert stopped.value.code == 1 and "no llama.cpp gave a result; the reasons are above" in heard.err
    assert "failed: llama.cpp, context 20: llama-server ended with code 1: illegal instruction" in heard.out


def test_a_peer_that_ends_between_two_calls_is_its_own_failure_and_no_other_peers() -> None:
    """Two of fourteen were out of memory; the next call to one of them was an OSError that ended the whole run."""
    context = multiprocessing.get_context("spawn")
    worker, (pipe, theirs) = object.__new__(Worker), context.Pipe()
    process = context.Process(target=os._exit, args=(7,))
    process.start()
    theirs.close()
    process.join()
    worker._pipe, worker._process = pipe, process
    for _ in range(2):
        with pytest.raises(PeerFailed, match="its process ended with code 7"):
            worker.call("steps", 1, 1)


def test_help_is_the_same_on_every_machine(capsys: Printed) -> None:
    with pytest.raises(SystemExit):
        peers.parse(["--help"])
    shown = capsys.readouterr().out
    assert str(peers.BUNDLED) not in "".join(shown.split()) and "default: [" not in " ".join(shown.split())


def test_transformers_speculates_by_lookup_and_says_what_it_says_plainly() -> None:
    tokenizer = load_tokenizer(peers.BUNDLED, read_config(peers.BUNDLED))
    assert tokenizer
    prompt = tokenizer.encode(read_text(peers.BUNDLED / "document.txt")[:3000])
    told = []
    for lookup in (0, 3):
        peer = Transformers(peers.BUNDLED, "fp32", "sdpa", compiled=False, lookup=lookup)
        peer.reserve(1, 2000)
        told.append(peer.decode(prompt, 12))
    plain, drafted = told
    assert plain.tokens == drafted.tokens and len(plain.tokens) == 12
    assert (plain.rounds, plain.accepted, plain.drafted) == (12, 0, 0)
    assert drafted.rounds < 12 and drafted.accepted == 12 - drafted.rounds and 0 < drafted.drafted <= 3 * drafted.rounds


def test_gpt_fast_has_the_same_weights_by_other_names_and_rotates_neighbours(tmp_path: Path) -> None:
    model = tiny_model()
    save_hugging_face(model, tmp_path, dtype=torch.float32)
    found, layer = weights(tmp_path, model.config), model.layers[0]
    assert torch.equal(found["layers.0.feed_forward.w2.weight"], layer.feed_forward.w_out.weight)
    stored = load_file(tmp_path / "model.safetensors")
    q, half = stored["model.layers.0.self_attn.q_proj.weight"], model.config.head_dim // 2
    first = found["layers.0.attention.wqkv.weight"][: 2 * half]  # of the first head
    assert torch.equal(first[0::2], q[:half]) and torch.equal(first[1::2], q[half : 2 * half])
    with pytest.raises(ImportError, match="GPT_FAST does not name a folder"):
        GptFast(tmp_path, torch.float32, model.config, 512)
