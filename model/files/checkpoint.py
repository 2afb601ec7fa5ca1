"""A Hugging Face folder or a GGUF file -> a Transformer, and a folder back.

The model is built on the meta device; each stored tensor is then read once, some megabytes at a time, into its place
in our fused layout, so the peak is the model and those. Every failure is a CheckpointError: one sentence that names the
file.
"""

from __future__ import annotations

import json
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..config import ModelConfig, stored_dtype, token_ids
from ..llama import Transformer
from ..rope import rope_frequencies
from .fields import CHANGES_TEXTS, not_neutral, say, unknown_of_texts
from .float8 import (
    FLOAT8,
    block_of,
    has_float8_cache,
    is_packed,
    is_stored_in_float8,
    is_unused,
    scale_ending,
    scale_shapes,
)
from .pickled import describe_tensors, span
from .reading import (
    CheckpointError,
    OpenFile,
    first_line,
    is_gguf,
    parse_json,
    read_json,
    readable_name,
    refuse_pointer,
)

if TYPE_CHECKING:
    from .gguf import Header

# ---- folders -------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model in the folder; generation_config.json, if present, decides the end-of-text ids.

    Ids of a folder that are past its vocabulary are left out with a warning: no text ends with them, and what a text
    begins with is the tokenizer's. For a GGUF file its header decides everything, and there they are refused; its
    tokens that end answers elsewhere, such as <|im_end|>, end them here, too.
    """
    if is_gguf(folder):
        from .gguf import read_header  # slow to import, and few runs need it

        return read_header(folder).config()
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no config.json")
    generation = folder / "generation_config.json"
    raw = read_json(path)
    later = read_json(generation) if generation.is_file() else {}
    try:
        return config_of(raw, later, path, generation)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def config_of(raw: Mapping[str, Any], later: Mapping[str, Any], path: object, generation: object) -> ModelConfig:
    """See read_config, for what these two hold; {}: there is no second."""
    config = ModelConfig.from_hugging_face(raw, str(path))
    eos_ids = token_ids(later, "eos_token_id", str(generation))
    beside = "not applied: a request says how it samples, and SamplingParams.processor may do that"
    say(generation if later else path, not_neutral(later or raw, CHANGES_TEXTS), beside)
    say(generation, unknown_of_texts(later), "not known here, and ignored")
    ends = _in_vocabulary(eos_ids, config, generation, "eos_token_id")
    instead = _in_vocabulary(config.eos_ids, config, path, "eos_token_id")
    bos = _in_vocabulary(() if config.bos_id is None else (config.bos_id,), config, path, "bos_token_id")
    return replace(config, eos_ids=ends or instead, bos_id=next(iter(bos), None))


def _in_vocabulary(ids: tuple[int, ...], config: ModelConfig, path: object, field: str) -> tuple[int, ...]:
    """Those ids that a text can hold; a warning names the others, which other programs keep and never meet."""
    unknown = [str(i) for i in ids if i >= config.vocab_size]
    if unknown:
        warnings.warn(
            f"{path}: {field} {', '.join(unknown):.80} is past the vocabulary of {config.vocab_size:,} tokens, and is "
            "not used",
            stacklevel=1,  # the same line whoever asks, so that it is said once
        )
    return tuple(i for i in ids if i < config.vocab_size)


def read_stored_dtype(folder: Path) -> str | None:
    """The dtype of the weights as config.json says, or of a GGUF file's embedding; None if nothing says it."""
    if is_gguf(folder):
        return str(Weights(folder).dtype("model.embed_tokens.weight")).removeprefix("torch.")
    return stored_dtype(read_json(folder / "config.json"))


@dataclass(frozen=True)
class StoredFloat8:
    """What a folder says of the float8 that it holds."""

    cache: bool  # whether it wants a cache of few bits, too
    other: str | None  # the first weight of a layer that is not float8
    block: tuple[int, int] | None = None  # that has a scale, rows and columns; None: an output has, or all of a weight


def read_stored_float8(folder: Path) -> StoredFloat8 | None:
    """Whether weights of the folder's model are float8, and how many of them; None if none is."""
    if is_gguf(folder):
        return None
    raw = read_json(folder / "config.json")
    if not is_stored_in_float8(raw):
        return None
    weights = Weights(folder)
    matrices = [
        name for ours, layout in name_table(read_config(folder)).items() for name, *_ in layout
        if ours.startswith("layers.") and ours.endswith(MATRICES)
    ]  # fmt: skip
    other = next((name for name in matrices if not weights.is_float8(name)), None)
    return StoredFloat8(has_float8_cache(raw), other, weights.block)


# ---- names ---------------------------------------------------------------------------------------------------------

# Our tensor is a run of equal units along its rows; (name, rows, copies) says how many rows of every unit come from a
# stored tensor, in order, and how many consecutive units get the same ones. With one copy, unit u of ours is rows
# [u * rows, (u + 1) * rows) of each stored tensor, so any run of units can be read on its own. A tensor that is stored
# unchanged has units of one row.
Layout = tuple[tuple[str, int, int], ...]


def name_table(config: ModelConfig, kv_copies: int = 1) -> dict[str, Layout]:
    """Our parameter names -> where Hugging Face keeps their rows; a tied output is not listed.

    kv_copies: config's kv heads are runs of so many copies of a stored one.
    """
    head, group = config.head_dim, config.group_size
    table: dict[str, Layout] = {"embedding.weight": (("model.embed_tokens.weight", 1, 1),)}
    for i in range(config.n_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            table[f"{ours}.attention.wqkv.{kind}"] = (  # [K, G + 2, H, D]
                (f"{theirs}.self_attn.q_proj.{kind}", group * head, 1),
                (f"{theirs}.self_attn.k_proj.{kind}", head, kv_copies),
                (f"{theirs}.self_attn.v_proj.{kind}", head, kv_copies),
            )
        if config.o_bias:
            table[f"{ours}.attention.wo.bias"] = ((f"{theirs}.self_attn.o_proj.bias", 1, 1),)
        if config.mlp_bias:
            table[f"{ours}.feed_forward.w_out.bias"] = ((f"{theirs}.mlp.down_proj.bias", 1, 1),)
        for kind in ("bias", "weight") if config.mlp_bias else ("weight",):  # a weight is quantized once it is read
            table[f"{ours}.feed_forward.w_in.{kind}"] = (  # [F, 2, D]
                (f"{theirs}.mlp.gate_proj.{kind}", 1, 1),
                (f"{theirs}.mlp.up_proj.{kind}", 1, 1),
            )
        plain = {
            "attention_norm": "input_layernorm",
            "attention.wo": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "feed_forward.w_out": "mlp.down_proj",
        }
        if config.qk_norm:
            plain |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
        for our, their in plain.items():
            table[f"{ours}.{our}.weight"] = ((f"{theirs}.{their}.weight", 1, 1),)
    table["norm.weight"] = (("model.norm.weight", 1, 1),)
    if not config.tie_embeddings:
        table["output.weight"] = (("lm_head.weight", 1, 1),)
    return table


MATRICES = tuple(f"{name}.weight" for name in ("wqkv", "wo", "w_in", "w_out"))  # ends of our names


def units_of(tensor: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Views of our tensor, one per stored tensor: [units, rows, ...] each."""
    rows = [rows for _, rows, _ in layout]
    parts: tuple[Tensor, ...] = tensor.unflatten(0, (-1, sum(rows))).split(rows, dim=1)
    return parts


# ---- reading -------------------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 1024  # that are looked at
_LONGEST_HEADER = 10**8  # bytes: safetensors' own limit
_NUMBERS_AT_ONCE = 2**20  # that are read and put in place: what a core's cache holds
_READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = {**_READABLE, FLOAT8: torch.float8_e4m3fn}


class StoredTensors(Protocol):
    """The tensors of one open weight file; nothing is read before `read`."""

    @property
    def readable(self) -> Collection[str]:
        """The dtypes that can be read, as the file spells them."""
        ...

    def names(self) -> list[str]:
        """The file's names of its tensors."""
        ...

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype, the dtype as the file spells it."""
        ...

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """The rows of a [R] tensor, or the rows and columns of a [R, C] tensor; a [] tensor whole."""
        ...


class _SafetensorsFile:
    """Its tensors are read, not mapped: looking at a mapped byte that is gone by then would end the process."""

    readable = _READABLE

    def __init__(self, path: Path) -> None:
        self._file = OpenFile(path)
        if self._file.n_bytes < 8:
            raise OSError(f"it has only {self._file.n_bytes} bytes")
        length = int.from_bytes(self._file.part(0, 8), "little")
        if length > min(self._file.n_bytes - 8, _LONGEST_HEADER):
            raise OSError(f"it has {self._file.n_bytes:,} bytes, but says that its header alone has {length:,}")
        header = parse_json(self._file.part(8, length).decode())
        if not isinstance(header, dict):
            raise OSError("its header is no JSON object")
        header.pop("__metadata__", None)
        self._found = {name: _Place.of(name, raw, length + 8, self._file.n_bytes) for name, raw in header.items()}

    def names(self) -> list[str]:
        return list(self._found)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        place = self._found[name]
        return place.shape, place.dtype

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        place = self._found[name]
        dtype = _STORED[place.dtype]
        n_rows, n_columns = (*place.shape, 1, 1)[:2]
        first, stop, _ = rows.indices(n_rows)
        left, right, _ = columns.indices(n_columns)
        part = torch.empty(max(0, stop - first), max(0, right - left), dtype=dtype)
        runs = part.view(torch.uint8).numpy()
        for row, run in enumerate(runs.reshape(1, -1) if part.shape[1] == n_columns else runs, first):
            self._file.fill(run, place.begin + (row * n_columns + left) * dtype.itemsize)
        return part.reshape(part.shape[: len(place.shape)])


@dataclass(frozen=True)
class _Place:
    """Where a safetensors file has a tensor, as its header says."""

    shape: tuple[int, ...]
    dtype: str
    begin: int  # bytes of the file before it

    @staticmethod
    def of(name: str, raw: object, begin: int, n_bytes: int) -> _Place:
        """What a header's entry says; OSError unless it makes sense in a file of so many bytes."""
        match raw:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(end)]} if all(
                isinstance(size, int) and size >= 0 for size in shape
            ):
                if not 0 <= first <= end or begin + end > n_bytes:
                    raise OSError(f"it has {n_bytes:,} bytes, but {readable_name(name)} ends at byte {begin + end:,}")
                if dtype in _STORED and math.prod(shape) * _STORED[dtype].itemsize != end - first:
                    raise OSError(f"{readable_name(name)} is {dtype} of shape {shape}, but has {end - first:,} bytes")
                return _Place(tuple(shape), dtype, begin + first)
        raise OSError(f"its header describes {readable_name(name)} in no known way")


class _PickleFile:
    """Its tensors are read, not mapped, either."""

    readable = _READABLE

    def __init__(self, path: Path) -> None:
        self._file = OpenFile(path)
        self._found = describe_tensors(self._file)

    def names(self) -> list[str]:
        return list(self._found)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor, _ = self._found[name]
        spelling = {dtype: name for name, dtype in _READABLE.items()}
        return tuple(tensor.shape), spelling.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        tensor, begin = self._found[name]
        part = tensor[(rows, columns)[: tensor.dim()]]  # on the meta device: where it lies in the storage
        if begin is None:
            return part
        if tensor.is_neg() or tensor.is_conj():
            raise OSError("it was saved as the negative or the conjugate of its numbers")
        begin += int(part.storage_offset()) * part.itemsize
        turned = part.dim() == 2 and part.stride(0) < part.stride(1)  # it lies there by columns
        lines = part.t() if turned else part
        if part.dim() != 2 or not part.numel() or lines.stride(0) <= span(lines[:1]):  # one run
            numbers = torch.empty(span(part), dtype=tensor.dtype)
            self._file.fill(numbers.view(torch.uint8).numpy(), begin)
            return numbers.as_strided(part.shape, part.stride())
        numbers = torch.empty(len(lines), span(lines[:1]), dtype=tensor.dtype)
        for i, run in enumerate(numbers.view(torch.uint8).numpy()):
            self._file.fill(run, begin + i * lines.stride(0) * part.itemsize)
        found = numbers.as_strided(lines.shape, (numbers.shape[1], lines.stride(1)))
        return found.t() if turned else found


class Weights:
    """The stored tensors of a folder: safetensors or, where there are none, pytorch_model.bin.

    Or those of a GGUF file and of the other parts that it is split into. They are looked up by their Hugging Face
    names, whatever the file calls them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.header = folder, "config.json"
        self.called: Callable[[str], str] = str  # Hugging Face's name -> the file's
        described = folder / "config.json"
        # whether there may be float8 with scales: names alone would not say what these multiply
        raw = read_json(described) if described.is_file() else {}
        self.scaled, self.block, self.scale = is_stored_in_float8(raw), block_of(raw), scale_ending(raw)
        self._gguf: Header | None = None
        self._file: dict[str, tuple[Path, StoredTensors]] = {}
        if is_gguf(folder):
            from .gguf import read_header

            found = read_header(folder)
            self.header, self.called, self._gguf = "the header", found.name_of, found
            self._file = {name: (found.file_of(name), found) for name in found.names()}
            return
        for single, opener in (("model.safetensors", _SafetensorsFile), ("pytorch_model.bin", _PickleFile)):
            index = folder / f"{single}.index.json"
            if (folder / single).is_file():
                opened = _open(folder / single, opener)
                self._file = {name: (folder / single, opened) for name in opened.names()}
                return
            if index.is_file():
                self._read_index(index, opener)
                return
        raise CheckpointError(f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index")

    def _read_index(self, index: Path, opener: type[_SafetensorsFile] | type[_PickleFile]) -> None:
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
            raise CheckpointError(f"{index} must have a weight_map from tensor names to file names")
        opened: dict[str, StoredTensors] = {}
        for shard in sorted(set(where.values())):
            if Path(shard).name != shard:  # a model reads files of its own folder alone
                raise CheckpointError(f"{index} names {readable_name(shard)}, which is no file of its own folder")
            if not (self.folder / shard).is_file():
                raise CheckpointError(f"{self.folder / shard} is missing, but {index.name} names it")
            opened[shard] = _open(self.folder / shard, opener)
        inside = {shard: set(file.names()) for shard, file in opened.items()}
        for name, shard in where.items():
            if name not in inside[shard]:
                raise CheckpointError(f"{self.folder / shard} has no tensor {name}, but {index.name} says it has")
            self._file[name] = (self.folder / shard, opened[shard])

    def __contains__(self, name: str) -> bool:
        return self.called(name) in self._file

    def is_float8(self, name: str) -> bool:
        """Whether a stored tensor is float8 with scales of its own."""
        return self._is_float8(self.called(name))

    def _is_float8(self, name: str) -> bool:
        if not self.scaled or not {name, f"{name}{self.scale}"} <= self._file.keys():
            return False
        shape, dtype = self._file[name][1].describe(name)
        return dtype == FLOAT8 and len(shape) == 2

    def file_of(self, name: str) -> Path:
        """The file that holds a stored tensor."""
        return self._file[self.called(name)][0]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless exactly these tensors are stored, with these shapes, as floats; old rotary tables may stay.

        Tensors that are float8 have their scales beside them; what concerns activations or a cache is not read.
        """
        asked = {self.called(name): shape for name, shape in shapes.items()}
        scales = {f"{name}{self.scale}" for name in asked if self._is_float8(name)}
        packed = next((name for name in self._file if is_packed(name) and name not in scales), None)
        if packed is not None and not is_gguf(self.folder):
            raise CheckpointError(
                f"{self._file[packed][0]}: {readable_name(packed)} is a part of a quantized weight, of a kind that is "
                "not read; load the unquantized checkpoint and pass quantize"
            )
        for name, shape in asked.items():
            if name not in self._file:
                raise CheckpointError(
                    f"{self.folder} has no tensor {name}, which its {self.header.removeprefix('the ')} asks for"
                )
            path, file = self._file[name]
            stored, dtype = file.describe(name)
            if stored != shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(stored)}, but {self.header} asks for {list(shape)}"
                )
            if self._is_float8(name):
                self._check_scale(f"{name}{self.scale}", shape)
            elif dtype not in file.readable:
                scale, what = f"{name}{self.scale}", f"only {', '.join(file.readable)} can be read"
                if self.scaled and dtype == FLOAT8 and scale not in self._file:
                    what = f"{scale} is missing"
                raise CheckpointError(f"{path}: {name} is stored as {dtype}, but {what}")
        extra = [
            n for n in self._file
            if n not in asked and n not in scales and not n.endswith("rotary_emb.inv_freq")
            and not (scales and is_unused(n))
        ]  # fmt: skip
        if extra:
            more = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
            first = readable_name(extra[0])
            raise CheckpointError(f"{self._file[extra[0]][0]}: {self.header}'s model has no place for {first}{more}")

    def _check_scale(self, name: str, weight: tuple[int, ...]) -> None:
        path, file = self._file[name]
        shape, dtype = file.describe(name)
        allowed = scale_shapes(weight, self.block)
        if shape not in allowed or dtype not in file.readable:
            raise CheckpointError(
                f"{path}: {name} is {dtype} of shape {list(shape)}, but the scales of {weight[0]} outputs are floats "
                f"of shape {' or '.join(str(list(one)) for one in allowed[:2])}"
            )

    def scales(self, name: str, rows: slice = slice(None)) -> Tensor:
        """What the numbers of rows of a float8 tensor without blocks stand for: fp32 [R]."""
        n_rows, scale = len(range(*rows.indices(self._file[name][1].describe(name)[0][0]))), f"{name}_scale"
        alone = all(size == 1 for size in self._file[scale][1].describe(scale)[0])
        stored = self._read(scale, slice(None) if alone else rows, slice(None))
        return stored.float().flatten().expand(n_rows)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in; for blocks, bfloat16, in which most models were trained."""
        name = self.called(name)
        return _READABLE.get(self._file[name][1].describe(name)[1], torch.bfloat16)

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Rows and columns of a stored [R, C] tensor, or rows of a stored [R], on the CPU in the stored dtype.

        Tensors that are stored in blocks, or in float8 with scales, are returned as fp32.
        """
        stored = self._read(self.called(name), rows, columns)
        if not self.is_float8(name):
            return stored
        scales = self._block_scales(name, rows, columns) if self.block else self.scales(name, rows)[:, None]
        return stored.float().mul_(scales)

    def _block_scales(self, name: str, rows: slice, columns: slice) -> Tensor:
        """What the numbers of rows and columns of a float8 tensor in blocks stand for: fp32 [R, C]."""
        assert self.block
        read, places = [], []  # of both dims: the blocks that are touched, and each number's block among them
        for part, size, length in zip((rows, columns), self.block, self._file[name][1].describe(name)[0], strict=True):
            begin, end, _ = part.indices(length)
            read.append(slice(begin // size, -(-end // size)))
            places.append(torch.arange(begin, end) // size - begin // size)
        held = self._read(f"{name}{self.scale}", *read).float()
        return held[places[0]][:, places[1]]

    def _read(self, name: str, rows: slice, columns: slice) -> Tensor:
        path, file = self._file[name]
        try:
            stored = file.read(name, rows, columns)
            if stored.is_meta:
                raise OSError("it was saved without its numbers (on the meta device)")
            return stored
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {first_line(error)}") from None

    def read_into(
        self,
        ours: Tensor,
        layout: Layout,
        first_row: int = 0,
        first_column: int = 0,
        read: Callable[[str, slice, slice], Tensor] | None = None,
    ) -> None:
        """Fill ours, [R] or [R, C] in whole units: the part of a parameter that starts at (first_row, first_column).

        read: what of each stored tensor is put there; None: the tensor itself.
        """
        read = read or self.read
        unit = sum(rows for _, rows, _ in layout)
        assert first_row % unit == 0 and ours.shape[0] % unit == 0
        first, last = first_row // unit, (first_row + ours.shape[0]) // unit
        columns = slice(first_column, first_column + ours.shape[1]) if ours.dim() == 2 else slice(None)
        for (name, rows, copies), place in zip(layout, units_of(ours, layout), strict=True):
            for units in torch.arange(first, last).split(max(1, _NUMBERS_AT_ONCE // place[0].numel())):
                since, until = int(units[0]), int(units[-1]) + 1
                begin, end = since // copies, -(-until // copies)  # stored units, each for `copies` of ours
                stored = read(name, slice(begin * rows, end * rows), columns).unflatten(0, (-1, rows))
                part = place[since - first : until - first]  # [units, rows, ...]
                part.copy_(stored if copies == 1 else stored[units // copies - begin])

    def in_blocks(
        self, layout: Layout, shape: tuple[int, ...], first_row: int = 0, first_column: int = 0
    ) -> Callable[[], tuple[Tensor, Tensor] | None] | None:
        """What reads a part of a parameter (see read_into) as the file has it, if it has all of it in blocks of 4 bits.

        It needs nothing but the file: see Blocks.read; None if that has changed.
        """
        found = [self._gguf.blocks(self.called(name)) for name, *_ in layout] if self._gguf else [None]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found) or len(shape) != 2 or (first_column | shape[1]) % 32:
            return None
        unit = sum(rows for _, rows, _ in layout)
        first, last = first_row // unit, (first_row + shape[0]) // unit
        columns = slice(first_column, first_column + shape[1])

        def read() -> tuple[Tensor, Tensor] | None:
            numbers = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8)
            scales = torch.empty(shape[0], shape[1] // 32, 2, dtype=torch.float16)
            for i, (part, (_, rows, copies)) in enumerate(zip(parts, layout, strict=True)):
                begin, end = first // copies, -(-last // copies)
                own = torch.arange(first, last) // copies - begin
                try:
                    stored = part.read(slice(begin * rows, end * rows), columns)
                except (OSError, ValueError):
                    return None
                for whole, piece in zip((numbers, scales), stored, strict=True):
                    units_of(whole, layout)[i].copy_(piece.unflatten(0, (-1, rows))[own])
            return numbers, scales

        return read


def _open(path: Path, opener: type[_SafetensorsFile] | type[_PickleFile]) -> StoredTensors:
    try:
        return opener(path)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        refuse_pointer(path)
        raise CheckpointError(f"{path} is damaged or incomplete: {first_line(error)}") from None


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor Hugging Face stores for this config, and its shape."""
    with torch.device("meta"):
        parameters = dict(Transformer(config).named_parameters())
    return {
        name: tuple(place.flatten(0, 1).shape)
        for ours, layout in name_table(config).items()
        for (name, *_), place in zip(layout, units_of(parameters[ours], layout), strict=True)
    }


class Part(Protocol):
    """Which part of a model to load."""

    def kv_copies(self, config: ModelConfig) -> int:
        """How many copies of each kv head the whole model shall have, each for that many times fewer query heads."""
        ...

    def cut(self, model: Transformer) -> Mapping[str, tuple[int, int]]:
        """Cut a model on the meta device down -> the first row and column of each parameter in the whole one.

        A part may extend past the whole model: the rest is padding.
        """
        ...


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    part: Part | None = None,
    settle: Callable[[Transformer, str], None] | None = None,
    keep: Callable[[Transformer, str, Tensor, Tensor], None] | None = None,
) -> Transformer:
    """The folder's model in evaluation mode, without gradients; dtype None keeps the stored one.

    With a part, nothing else is read. Its config is the whole model's.
    settle: called with the model and the name of each parameter as soon as it is read; it may replace the parameter's
    module. keep: called instead for each weight of a layer that is stored in float8, with the model, its name, the
    weight as it is, float8 [O, I], and what its rows stand for, fp32 [O]; it replaces the parameter's module. Without
    it, or if scales are those of blocks, such weights are dequantized.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a float type, got {dtype}")
    config = read_config(folder)
    kv_copies = part.kv_copies(config) if part else 1
    weights = Weights(folder)
    shapes = stored_shapes(config)
    tied_twice = config.tie_embeddings and "lm_head.weight" in weights  # a second copy is fine, a different one is not
    if tied_twice:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    weights.check(shapes)
    dtype = dtype or weights.dtype("model.embed_tokens.weight")

    laid_out = replace(config, n_kv_heads=config.n_kv_heads * kv_copies)
    with torch.device("meta"):
        model = Transformer(laid_out)
    n_rows = {name: len(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    begins = part.cut(model) if part else {}
    for name, layout in name_table(laid_out, kv_copies).items():
        first_row, first_column = begins.get(name, (0, 0))
        place, _, kind = name.rpartition(".")
        as_stored = keep if name.endswith(MATRICES) and not weights.block else None
        if as_stored and all(weights.is_float8(stored) for stored, *_ in layout):
            shape = model.get_parameter(name).shape
            numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            scales = torch.empty(shape[0], dtype=torch.float32, device=device)
            weights.read_into(numbers, layout, first_row, first_column, weights._read)
            weights.read_into(scales, layout, first_row, 0, lambda name, rows, _: weights.scales(name, rows))
            require_finite(numbers, layout, weights)
            require_finite(scales, layout, weights, "_scale")
            as_stored(model, name, numbers, scales)
            continue
        tensor = torch.empty(model.get_parameter(name).shape, dtype=dtype, device=device)
        stored, padding = tensor.tensor_split([max(0, n_rows[name] - first_row)])
        padding.zero_()
        if len(stored):
            weights.read_into(stored, layout, first_row, first_column)
            require_finite(stored, layout, weights)
        parameter = nn.Parameter(tensor, requires_grad=False)
        if not len(padding) and (blocks := weights.in_blocks(layout, tuple(tensor.shape), first_row, first_column)):
            parameter.in_blocks = blocks  # type: ignore[attr-defined]
        setattr(model.get_submodule(place), kind, parameter)
        del tensor, stored, padding, parameter
        if settle:
            settle(model, name)
    if tied_twice:
        first = min(begins.get("embedding.weight", (0, 0))[0], config.vocab_size)
        rows = slice(first, min(first + len(model.embedding.weight), config.vocab_size))
        if not torch.equal(weights.read("lm_head.weight", rows), weights.read("model.embed_tokens.weight", rows)):
            raise CheckpointError(
                f"{weights.file_of('lm_head.weight')}: lm_head.weight differs from the embedding, "
                "but config.json has tie_word_embeddings true"
            )
    if config.tie_embeddings:
        model.output.weight = model.embedding.weight
    assert not any(p.is_meta for p in model.parameters()), "the table names every parameter"
    model.rope_freqs = rope_frequencies(config).to(device)  # not stored, and the meta device computed nothing
    model.config = config
    return model.eval().requires_grad_(False)


def require_finite(ours: Tensor, layout: Layout, weights: Weights, ending: str = "") -> None:
    """CheckpointError by the stored tensor's name if what was read holds NaN or infinity; ours [R] or [R, C].

    ending: of that name, behind the layout's.
    """
    # of finite numbers it may be infinite, and then all are looked at; a CPU widens all of what it sums
    if all(_wide(rows).sum(dtype=torch.float32).isfinite() for rows in ours.split(_ROWS_AT_ONCE)):
        return
    for (name, *_), place in zip(layout, units_of(_wide(ours), layout), strict=True):
        wrong = place[~place.isfinite()]
        if len(wrong):
            stored, spelled = f"{name}{ending}", str(ours.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{weights.file_of(stored)}: {readable_name(stored)} holds {wrong[0].item()} as {spelled}"
            )


def _wide(tensor: Tensor) -> Tensor:
    """The tensor; float8, of which there are neither sums nor comparisons, as fp32."""
    return tensor.float() if tensor.itemsize == 1 else tensor


# ---- writing -------------------------------------------------------------------------------------------------------


def save_hugging_face(
    model: Transformer, folder: Path, *, dtype: torch.dtype, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write config.json and model.safetensors as transformers reads them: the exact inverse of load_model."""
    config = model.config
    spelled = str(dtype).removeprefix("torch.")
    raw = config.to_hugging_face() | {"torch_dtype": spelled} | dict(extra_config or {})
    parameters = model.state_dict()
    tensors = {
        name: place.flatten(0, 1).to(device="cpu", dtype=dtype, copy=True).contiguous()
        for ours, layout in name_table(config).items()
        for (name, *_), place in zip(layout, units_of(parameters[ours], layout), strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
