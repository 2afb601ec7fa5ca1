"""GGUF files, llama.cpp's format: what the header says, the shape it describes, and tensors dequantized row by row.

The `gguf` library parses and dequantizes. Whatever it takes from a file is checked here before it costs memory or
time, so that a damaged or hostile file also gives one sentence: every read must end inside the file, counts have
limits, and every size of the model must be one that some tensor really has.

Shapes: R rows, C columns, V vocabulary, D model width, H head dim.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor
from torch import Tensor

from ..config import Fields, ModelConfig, RopeScaling, yarn_length
from .fields import say
from .reading import CheckpointError, OpenFile, first_line, gguf_parts, readable_name, refuse_pointer

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's models are written as llama
MOST_ENTRIES = 1 << 22  # of an array: vocabularies and their merges have a tenth of this
MOST_RECORDS = 1 << 16  # tensors, or fields, of a file
MOST_LAYERS = 1 << 10  # the largest models have an eighth of this
# texts of tokens that end an answer whatever the header names, as in llama.cpp: many files name only one of theirs
ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".encode().split()  # noqa: RUF001
)
# and those of filling in the middle, where the header names none
FILLS = {
    "fim_pad": frozenset(b"<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split()),
    "fim_rep": frozenset(b"<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split()),
    "fim_sep": frozenset((b"<|file_sep|>",)),
}
CHUNK = 1 << 18  # numbers that are dequantized at once, which keeps the library's own memory small
WINDOW = 1 << 20  # bytes of a header that are read at once

# Fields that change how these architectures compute: (name, the values that change nothing).
_NEUTRAL: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("expert_count", (0,)),
    ("attention.causal", (True,)),
    ("attention.scale", (0.0,)),
    ("attention.clamp_kqv", (0.0,)),
    ("attention.max_alibi_bias", (0.0,)),
    ("attn_logit_softcapping", (0.0,)),
    ("final_logit_softcapping", (0.0,)),
    ("logit_scale", (0.0, 1.0)),
    ("residual_scale", (0.0, 1.0)),
    ("embedding_scale", (0.0, 1.0)),
)
_NEUTRAL_ROPE: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("rope.scaling.alpha", (0.0,)),
    ("rope.scaling.attn_factor", (1.0,)),
    ("rope.scaling.yarn_ext_factor", (-1.0, 0.0)),  # below 0: the default of the kind
)
_NEUTRAL_YARN: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("rope.scaling.alpha", (0.0,)),
    ("rope.scaling.yarn_ext_factor", (-1.0, 1.0)),
    ("rope.scaling.yarn_log_multiplier", (0.0,)),  # files write it in two different scales
)
_NEUTRAL_LONGROPE: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("rope.scaling.alpha", (0.0,)),
    ("rope.scaling.factor", (0.0, 1.0)),  # of which its own factors are in place
    ("rope.scale_linear", (0.0, 1.0)),
    ("rope.scaling.yarn_attn_factor", (1.0,)),
    ("rope.scaling.yarn_ext_factor", (-1.0, 0.0)),
)
_READ = frozenset(
    "vocab_size context_length embedding_length block_count feed_forward_length attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "attention.sliding_window rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor "
    "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    # of no effect in these architectures; the last, true in Qwen1.5's files, llama.cpp reads for GPT-NeoX alone
    "tensor_data_layout expert_used_count pooling_type classifier.output_labels rope.dimension_sections "
    "attention.layer_norm_epsilon use_parallel_residual".split()
)


class _Damaged(ValueError):
    """A file claims something about itself that is not true."""


class _Reader(GGUFReader):
    """gguf's reader, which trusts a file, with checks; each array is one part, not one part per number.

    The library maps the file into memory, where a byte that is gone by the time it is read ends the process. Here no
    byte of that map is touched: see OpenFile.
    """

    def __init__(self, path: Path) -> None:
        self.file = OpenFile(path)
        self.n_bytes = self.file.n_bytes
        self._begin, self._window = 0, b""  # the part of the header that was read last, and where it begins
        self._in_header = True
        super().__init__(path)
        del self.data, self._window

    def _bytes(self, offset: int, count: int) -> bytes:
        """These bytes of the header."""
        begin, end = offset - self._begin, offset - self._begin + count
        if begin < 0 or end > len(self._window):
            self._require(offset + count)
            self._begin = offset
            self._window = self.file.part(offset, min(max(count, WINDOW), self.n_bytes - offset))
            begin, end = 0, count
        return self._window[begin:end]

    def _require(self, end: int) -> None:
        """Raise unless the file has this many bytes."""
        if end > self.n_bytes:
            raise _Damaged(f"it has {self.n_bytes:,} bytes, but what it describes ends at byte {end:,}")

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Numbers of the header; for a tensor, zeros that take no memory."""
        kind, offset, count = np.dtype(dtype), int(offset), int(count)
        self._require(offset + kind.itemsize * count)
        if not self._in_header:
            return np.broadcast_to(np.zeros((), kind), count)
        return np.frombuffer(self._bytes(offset, kind.itemsize * count), kind)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self._in_header = False
        super()._build_tensors(start_offs, fields)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            found: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(orig_offs, raw_type)
            return found
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        begin = orig_offs + 12
        if count > MOST_ENTRIES:
            raise _Damaged(f"it has an array of {count:,} entries")
        if kind == GGUFValueType.STRING:
            entries, end = self._strings(begin, count)
            return end - orig_offs, [entries], [0], [GGUFValueType.ARRAY, kind]
        if kind not in self.gguf_scalar_to_np:
            raise _Damaged(f"it has an array of {kind.name.lower()}s")
        values = self._get(begin, self.gguf_scalar_to_np[kind], count)
        return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, kind]

    def _strings(self, offset: int, count: int) -> tuple[list[bytes], int]:
        """The strings that begin there, and where they end."""
        found = []
        self._require(offset + 8 * count)  # each takes at least its length field
        for _ in range(count):
            length = int.from_bytes(self._bytes(offset, 8), "little")
            if offset + 8 + length > self.n_bytes:
                raise _Damaged(f"it has {self.n_bytes:,} bytes, but a text in it ends at byte {offset + 8 + length:,}")
            found.append(self._bytes(offset + 8, length))
            offset += 8 + length
        return found, offset


def _open(path: Path) -> _Reader:
    """The file's header and views of its tensors; CheckpointError unless it is a complete GGUF file."""
    try:
        with path.open("rb") as file:
            start = file.read(24)
        if start[:4] != b"GGUF":
            refuse_pointer(path)
            raise CheckpointError(f"{path} is not a GGUF file: it begins with {start[:4]!r}, not with b'GGUF'")
        if len(start) < 24:
            raise _Damaged(f"it has only {len(start)} bytes")
        version, *counts = struct.unpack("<IQQ", start[4:])
        if version not in (2, 3):
            raise CheckpointError(f"{path} has GGUF version {version:#x}, but only little-endian 2 and 3 can be read")
        if max(counts) > MOST_RECORDS:
            raise _Damaged(f"it claims {counts[0]:,} tensors and {counts[1]:,} fields")
        with np.errstate(over="ignore"):  # offsets that wrap around are caught below
            reader = _Reader(path)
        for tensor in reader.tensors:
            name, sizes = readable_name(tensor.name), tensor.shape.tolist()[::-1]
            if not sizes or 0 in sizes:  # a small file may have any number of these
                raise _Damaged(f"{name} is empty: its shape is {sizes}")
            end = reader.data_offset + int(tensor.field.parts[-1][0]) + tensor.n_bytes
            if end > reader.n_bytes:
                raise _Damaged(f"{name} ends at byte {end:,}, but the file has {reader.n_bytes:,}")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {first_line(error)}") from None
    return reader


def _value(field: ReaderField) -> Any:
    """The value of a field: a number, a bool, a text (bytes, if not UTF-8), or a list of numbers, bools or bytes."""
    part = field.parts[field.data[0]]
    if field.types[0] == GGUFValueType.ARRAY:
        return part if isinstance(part, list) else part.tolist()
    if field.types[0] != GGUFValueType.STRING:
        return part.tolist()[0]
    raw: bytes = part.tobytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


@dataclass(frozen=True)
class Blocks:
    """Where a file has a matrix [R, C] in blocks of 32 numbers of 4 bits with a scale, and in Q4_1 with a minimum."""

    path: Path
    offset: int  # bytes before it
    n_columns: int
    kind: str
    pairs: int  # of rotary halves in a head whose rows are stored adjacently, see Header.read; 0: rows are in order

    def read(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """uint8 [R, C / 2], numbers i and i + 16 of a block in a byte, and fp16 [R, C / 32, 2], scales and minima.

        A number is minimum + scale * (0 to 15). Whole blocks, and whole heads where rows are paired. OSError if the
        file cannot be read, ValueError if a scale or a minimum is not finite in fp16.
        """
        n_scales = 2 if self.kind == "Q4_1" else 1
        block_bytes = 16 + 2 * n_scales
        row_bytes = self.n_columns // 32 * block_bytes
        begin, end = columns.start // 32, columns.stop // 32
        raw = np.empty((rows.stop - rows.start, end - begin, block_bytes), np.uint8)
        runs = raw[None] if end - begin == self.n_columns // 32 else raw  # whole rows are read at once
        with self.path.open("rb", buffering=0) as file:
            for row, into in enumerate(runs, rows.start):
                file.seek(self.offset + row * row_bytes + begin * block_bytes)
                if file.readinto(into) != into.nbytes:
                    raise OSError(f"{self.path} has become shorter")
        scales = torch.from_numpy(np.ascontiguousarray(raw[..., : 2 * n_scales])).view(torch.float16)  # [R, C / 32, n]
        if n_scales == 1:
            scales = torch.cat([scales, -8 * scales], -1)
        if not scales.isfinite().all():
            raise ValueError(f"{self.path}: scales that are not finite")
        numbers = torch.from_numpy(np.ascontiguousarray(raw[..., 2 * n_scales :])).flatten(1)
        return _halves(numbers, self.pairs), _halves(scales, self.pairs)


class Header(Fields):
    """The fields and tensors of a model's file, or of all its parts. No tensor is read before `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = gguf_parts(path)
        readers = [_open(part) for part in parts]
        super().__init__({name: _value(field) for name, field in readers[0].fields.items()}, f"{path}: ")
        self._tensors: dict[str, tuple[Path, ReaderTensor]] = {}
        self._readers = dict(zip(parts, readers, strict=True))
        for part, reader in zip(parts, readers, strict=True):
            for tensor in reader.tensors:
                if tensor.name in self._tensors:
                    name = readable_name(tensor.name)
                    raise CheckpointError(f"{part} has the tensor {name}, but so has {self.file_of(tensor.name)}")
                self._tensors[tensor.name] = (part, tensor)
        self._check_parts(parts)
        self.architecture = self._architecture()
        self._check_layers()
        self.arch_fields = Fields(self._of_architecture(), f"{path}: {self.architecture}.")
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = gguf.get_tensor_name_map(arch, 1)  # layers are named alike, and the library is slow for many

    # ---------------------------------------------------------------- fields

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text, or the default if it is absent; CheckpointError if it is something else."""
        found = self.raw.get(name, default)
        if found is not None and not isinstance(found, str):
            self.refuse(name, "a text, in UTF-8")
        return found

    def texts(self, name: str) -> list[str] | None:
        """A list of texts, None if it is absent."""
        raw = self.raw.get(name)
        if raw is None:
            return None
        if not isinstance(raw, list) or not all(isinstance(entry, bytes) for entry in raw):
            self.refuse(name, "a list of texts")
        try:
            return [entry.decode("utf-8") for entry in raw]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: an entry of {name} is not UTF-8: {error.object[:40]!r}") from None

    def numbers(self, name: str) -> list[float] | None:
        """A list of numbers, None if it is absent."""
        raw = self.raw.get(name)
        if raw is not None and (not isinstance(raw, list) or any(isinstance(entry, bytes) for entry in raw)):
            self.refuse(name, "a list of numbers")
        return raw

    def yes(self, name: str, default: bool) -> bool:
        """A flag, or the default if it is absent."""
        return self.flag(name) if name in self.raw else default

    def token(self, name: str, default: int | None = None) -> int | None:
        """A token id of the vocabulary, or the default if it is absent."""
        found = self.raw.get(name, default)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < self.vocab_size:
            if name not in self.raw:
                return None
            self.refuse(name, f"a token id below {self.vocab_size:,}")
        return found

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """CheckpointError that says what the field holds and what it must be."""
        try:
            super().refuse(name, allowed)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @property
    def vocab_size(self) -> int:
        """V, the rows of the embedding."""
        return self.shape("token_embd.weight")[0]

    def _architecture(self) -> str:
        kind = self.text("general.type", "model")
        if kind != "model":
            self.refuse("general.type", "'model'")
        name = self.text("general.architecture")
        if name not in ARCHITECTURES:
            self.refuse("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
        return name

    def _of_architecture(self) -> dict[str, Any]:
        own = f"{self.architecture}."
        return {name.removeprefix(own): value for name, value in self.raw.items() if name.startswith(own)}

    def _check_layers(self) -> None:
        """Raise if there are more layers than tensors, or than any model has."""
        name = f"{self.architecture}.block_count"
        n_layers = self.raw.get(name)
        if not isinstance(n_layers, int) or isinstance(n_layers, bool) or not 1 <= n_layers <= len(self._tensors):
            self.refuse(name, f"a number from 1 to the number of tensors, {len(self._tensors):,}")
        if n_layers > MOST_LAYERS:
            self.refuse(name, f"at most {MOST_LAYERS:,}")

    def _check_parts(self, parts: list[Path]) -> None:
        """Raise unless these are all the parts of the model."""
        count = self.raw.get("split.count", 0)
        if count not in ((0, 1) if len(parts) == 1 else (len(parts),)):
            said = "and names of parts end in -00001-of-00002.gguf" if len(parts) == 1 else "as their names say"
            self.refuse("split.count", f"{len(parts)}, {said}")
        held = self.raw.get("split.tensors.count")
        if held is not None and count and held != len(self._tensors):
            self.refuse("split.tensors.count", f"the number of tensors in the parts, {len(self._tensors):,}")

    # ---------------------------------------------------------------- the shape of the model

    def config(self) -> ModelConfig:
        """The shape that the header describes; whatever this Llama cannot do exactly is refused by name."""
        try:
            return self._config()
        except CheckpointError:
            raise
        except ValueError as error:
            said = str(error)
            raise CheckpointError(said if said.startswith(f"{self.path}: ") else f"{self.path}: {said}") from None

    def _config(self) -> ModelConfig:
        fields = self.arch_fields
        self._only_neutral(_NEUTRAL)
        ruled = (name for name, _ in (*_NEUTRAL, *_NEUTRAL_ROPE, *_NEUTRAL_YARN))
        say(self.path, sorted(fields.raw.keys() - _READ.union(ruled)), "not known here, and ignored")
        dim, n_heads = self._size("embedding_length"), self._size("attention.head_count")
        if "attention.key_length" in fields.raw:
            head_dim = self._size("attention.key_length")
        elif dim % n_heads:
            fields.refuse("embedding_length", f"a multiple of attention.head_count ({n_heads}) without a key_length")
        else:
            head_dim = dim // n_heads
        for name in ("attention.value_length", "rope.dimension_count"):
            if fields.raw.get(name) not in (None, head_dim):
                fields.refuse(name, f"the size of a head, {head_dim}")
        vocab_size = self.vocab_size
        if fields.raw.get("vocab_size") not in (None, vocab_size):
            fields.refuse("vocab_size", f"the number of rows of token_embd.weight, {vocab_size:,}")
        tokens = self.raw.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != vocab_size:
            raise CheckpointError(
                f"{self.path}: tokenizer.ggml.tokens has {len(tokens):,} entries, but token_embd.weight has "
                f"{vocab_size:,} rows"
            )
        scaling = self._rope_scaling(head_dim)
        stated = fields.whole("context_length")
        positions = scaling.reach(stated) if scaling else stated
        window = fields.whole("attention.sliding_window", 0) if "attention.sliding_window" in fields.raw else 0
        if 0 < window < positions:
            # whoever trained it meant one, and llama.cpp, for which the file is, reads none in these architectures
            said = f"texts end where it does, at {window:,}: past it llama.cpp and the model's authors differ"
            say(self.path, ["attention.sliding_window"], said)
            positions = window
        biased = self.architecture == "llama" and "blk.0.attn_output.bias" in self._tensors  # no field says it
        return ModelConfig(
            vocab_size=vocab_size,
            dim=dim,
            n_layers=fields.whole("block_count"),
            n_heads=n_heads,
            n_kv_heads=self._size("attention.head_count_kv") if "attention.head_count_kv" in fields.raw else n_heads,
            head_dim=head_dim,
            ffn_dim=self._size("feed_forward_length"),
            max_seq_len=positions,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base") if "rope.freq_base" in fields.raw else 10000.0,
            rope_scaling=scaling,
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias=self.architecture == "qwen2" or biased,
            o_bias=biased,
            mlp_bias=self.architecture == "llama" and "blk.0.ffn_down.bias" in self._tensors,
            qk_norm=self.architecture == "qwen3",
            bos_id=self.token("tokenizer.ggml.bos_token_id"),
            eos_ids=self._eos_ids(),
        )

    def ends_by_text(self) -> dict[int, bytes]:
        """Tokens whose texts say that they end an answer, id -> text: as control tokens, whatever kind they are."""
        texts = self.raw.get("tokenizer.ggml.tokens")
        fills = [own for name, own in FILLS.items() if self.token(f"tokenizer.ggml.{name}_token_id") is None]
        ends = ENDS.union(*fills)
        return {i: text for i, text in enumerate(texts) if text in ends} if isinstance(texts, list) else {}

    def _eos_ids(self) -> tuple[int, ...]:
        """Those and what the header names, but for two that llama.cpp leaves out beside others."""
        unsaid = {"eos": 2} if self.raw.get("tokenizer.ggml.model") == "llama" else {}  # Llama 2's
        named = [self.token(f"tokenizer.ggml.{x}_token_id", unsaid.get(x)) for x in ("eos", "eot", "eom", *FILLS)]
        by_text = self.ends_by_text()
        ids = {text: i for i, text in by_text.items()}
        calls = ids.keys() & {b"<|call|>", b"<|calls|>"} and ids.keys() & {b"<|return|>", b"<|flush|>"}
        spared = {ids.get(b"<|end|>") if calls else None, ids.get(b"</s>") if b"<|tool_response>" in ids else None}
        return tuple(end for end in dict.fromkeys([*named, *by_text]) if end is not None and end not in spared)

    def _only_neutral(self, rules: tuple[tuple[str, tuple[object, ...]], ...]) -> None:
        """Refuse every value of these fields that would change the computation."""
        for name, neutral in rules:
            if self.arch_fields.raw.get(name) not in (None, *neutral):
                self.arch_fields.refuse(name, f"absent or {neutral[-1]}")

    def _size(self, name: str) -> int:
        """A size of the model, which cannot be larger than the largest of any tensor."""
        found = self.arch_fields.whole(name)
        largest = max(size for name in self._tensors for size in (*self.shape(name), 0))
        if found > largest:
            self.arch_fields.refuse(name, f"at most {largest:,}, the largest size of any tensor")
        return found

    def _rope_scaling(self, head_dim: int) -> RopeScaling | None:
        """The scaling of rotary frequencies, as llama.cpp reads it: linear unless stated otherwise; 0 is none."""
        fields = self.arch_fields
        kind = self.text(f"{self.architecture}.rope.scaling.type", "linear")
        rules = {"yarn": _NEUTRAL_YARN, "longrope": _NEUTRAL_LONGROPE, "none": _NEUTRAL_ROPE, "linear": _NEUTRAL_ROPE}
        if kind not in rules:
            fields.refuse("rope.scaling.type", "'none', 'linear', 'yarn' or 'longrope'")
        self._only_neutral(rules[kind])
        if kind in ("yarn", "longrope") and "rope_freqs.weight" in self._tensors:
            raise CheckpointError(f"{self.path} has rope_freqs.weight, but with rope.scaling.type {kind!r} it must not")
        if kind == "yarn":
            return self._yarn()
        if kind == "longrope":  # llama.cpp's converter gives the length, and llama.cpp takes 1 without
            short, long = (self._rope_factors(f"rope_factors_{name}.weight", head_dim) for name in ("short", "long"))
            return RopeScaling(
                kind="longrope", factor=1.0, factors=short, long_factors=long,
                original_max_seq_len=fields.whole("rope.scaling.original_context_length"),
                attention_factor=fields.number_or("rope.scaling.attn_factor", 1.0),
            )  # fmt: skip
        named = [
            name for name in ("rope.scaling.factor", "rope.scale_linear") if name in fields.raw
        ]  # the older name last
        said = kind == "linear" and bool(named) and fields.raw[named[0]] != 0
        factor = fields.number(named[0]) if said else 1.0
        if "rope_freqs.weight" in self._tensors:
            factors = self._rope_factors("rope_freqs.weight", head_dim)
            return RopeScaling(kind="factors", factor=factor, factors=factors)
        return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None

    def _yarn(self) -> RopeScaling:
        """YaRN as llama.cpp's converter writes it from a config.json, whose attention_factor it calls yarn_attn_factor.

        attn_factor multiplies the resulting length; finetuned says where a model comes from and changes nothing. The
        converter writes a config.json's attn_factor, too, as yarn_attn_factor: of the two it is the one below 1.
        """
        fields, prefix = self.arch_fields, "rope.scaling."
        factor = fields.number(f"{prefix}factor")
        own = f"{prefix}yarn_attn_factor"
        stated = fields.number(own) if own in fields.raw else None
        if stated is not None and stated < 1:
            stated *= yarn_length(factor)
        more = fields.number(f"{prefix}attn_factor") if f"{prefix}attn_factor" in fields.raw else 1.0
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_seq_len=fields.whole(f"{prefix}original_context_length"),
            beta_fast=fields.number_or(f"{prefix}yarn_beta_fast", 32.0),
            beta_slow=fields.number_or(f"{prefix}yarn_beta_slow", 1.0),
            attention_factor=stated if more == 1.0 else more * (yarn_length(factor) if stated is None else stated),
        )

    def _rope_factors(self, name: str, head_dim: int) -> tuple[float, ...]:
        """The factor of each rotary pair, [H/2]."""
        shape, kind = self.describe(name)
        where = f"{self.path}: {name}"
        if len(shape) != 1:
            raise CheckpointError(f"{where} must be a factor for each rotary pair")
        if shape[0] != head_dim // 2:
            raise CheckpointError(f"{where} must have {head_dim // 2} factors, one per pair, got {shape[0]:,}")
        if kind not in self.readable:
            raise CheckpointError(f"{where} is stored as {kind}, but only {', '.join(self.readable)} can be read")
        factors = self._read(name, slice(None), slice(None)).tolist()
        for i, factor in enumerate(factors):
            if not 0 < factor < math.inf:
                raise CheckpointError(f"{where} needs positive factors, but factor {i} is {factor}")
        return tuple(factors)

    # ---------------------------------------------------------------- tensors

    def names(self) -> list[str]:
        """The tensors that are weights; rotary tables are not."""
        long = self.arch_fields.raw.get("rope.scaling.type") == "longrope"
        tables = rf"rope_{'factors_(long|short)' if long else 'freqs'}\.weight|blk\.\d+\.attn_rot_embd\.weight"
        return [name for name in self._tensors if not re.fullmatch(tables, name)]

    def name_of(self, name: str) -> str:
        """The file's name of the tensor that has this name in a Hugging Face checkpoint."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            return self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        first = f"model.layers.0.{name[layer.end() :]}"
        found = self._names.get_name(first, try_suffixes=(".weight", ".bias"))
        return f"blk.{layer[1]}.{found.removeprefix('blk.0.')}" if found else name

    def file_of(self, name: str) -> Path:
        """The part that holds a tensor."""
        return self._tensors[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, [R, C] or [R]."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}, which its header asks for")
        sizes: Iterable[int] = reversed(self._tensors[name][1].shape.tolist())
        return tuple(sizes)

    @property
    def readable(self) -> list[str]:
        """The kinds of blocks that the library dequantizes."""
        return _readable()

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and kind of a tensor, such as Q4_1."""
        return self.shape(name), self._tensors[name][1].tensor_type.name

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Rows of a [R] tensor, or rows and columns of a [R, C] one, in fp32; no other block is dequantized.

        CheckpointError if the file has become shorter, or if a value is not a number.
        """
        out = self._read(name, rows, columns)
        if not torch.isfinite(out.sum()) and not torch.isfinite(out).all():
            raise CheckpointError(f"{self.file_of(name)} is damaged: {readable_name(name)} holds NaN or infinity")
        return _halves(out, self._pairs(name))

    def blocks(self, name: str) -> Blocks | None:
        """Where a matrix is stored in blocks of 4 bits, None if it is stored otherwise."""
        (path, stored), shape = self._tensors[name], self.shape(name)
        if len(shape) != 2 or stored.tensor_type.name not in ("Q4_0", "Q4_1"):
            return None
        return Blocks(path, int(stored.data_offset), shape[1], stored.tensor_type.name, self._pairs(name))

    def _read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a tensor with its rows in the order of the file, and numbers unchecked."""
        (part, stored), shape = self._tensors[name], self.shape(name)
        block, block_bytes = gguf.GGML_QUANT_SIZES[stored.tensor_type]
        n_rows, n_columns = shape if len(shape) == 2 else (1, *shape)
        if len(shape) == 1:
            rows, columns = slice(None), rows
        (top, bottom, _), (first, last, _) = rows.indices(n_rows), columns.indices(n_columns)
        begin, end, row_bytes = first // block, -(-last // block), n_columns // block * block_bytes
        out = torch.empty(bottom - top, last - first)  # [R, C]
        step = max(1, CHUNK // n_columns)
        held = np.empty((step, row_bytes), np.uint8)
        for row in range(0, len(out), step):
            raw = held[: len(out) - row]
            try:
                self._readers[part].file.fill(raw, stored.data_offset + (top + row) * row_bytes)
            except OSError as error:
                raise CheckpointError(f"{part}: {name} cannot be read: {error.strerror or error}") from None
            own = np.ascontiguousarray(raw[:, begin * block_bytes : end * block_bytes]).reshape(1, -1)
            with np.errstate(all="ignore"):  # a damaged file's scales show in the results
                flat = gguf.dequantize(own, stored.tensor_type)  # takes 16 rows at a time, however short they are
            whole = flat.reshape(len(raw), -1)  # whole blocks of each row
            out[row : row + step].numpy()[:] = whole[:, first - begin * block : last - begin * block]
        return out if len(shape) == 2 else out[0]

    def _pairs(self, name: str) -> int:
        """H/2 if the rows of a tensor's heads are stored as adjacent pairs, 0 if they are in order."""
        if self.architecture != "llama" or not re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
            return 0
        fields = self.arch_fields.raw
        head_dim = fields.get("attention.key_length") or fields["embedding_length"] // fields["attention.head_count"]
        return int(head_dim) // 2


def _halves(rows: Tensor, pairs: int) -> Tensor:
    """Whole heads with their rows back in rotary halves, (i, i + H/2): llama.cpp stores such pairs adjacently."""
    if not pairs:
        return rows
    whole: Tensor = rows.unflatten(0, (-1, pairs, 2)).transpose(1, 2)  # [heads, 2, H/2, ...]
    return whole.flatten(0, 2)


@cache
def _readable() -> list[str]:
    """The kinds of blocks that the library dequantizes: it has no list of them, so each is tried."""
    found = []
    for kind, (_, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            found.append(kind.name)
    return found


def read_header(path: Path) -> Header:
    """The header of a GGUF file, which may be any part of a split one; CheckpointError if it cannot be used."""
    return Header(path)
