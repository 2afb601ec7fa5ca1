"""What pytorch_model.bin describes: tensors without their numbers, and where the file has these.

The file is a zip of records that are not compressed: a pickle that names the tensors, and the numbers of each storage.
The pickle is read by torch's own reader, which runs no code of it; the numbers are not looked at.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch
from torch import Tensor, nn
from torch._weights_only_unpickler import Unpickler

from .reading import OpenFile, first_line

_LOCAL_HEADER = 30  # bytes before the name of a record; the last four are the lengths of that and of what follows it
_Place = tuple[int, int]  # from byte to byte of the file


def describe_tensors(file: OpenFile) -> dict[str, tuple[Tensor, int | None]]:
    """Each tensor, on the meta device, and the byte at which its storage begins; None: it was saved without one.

    OSError unless that makes sense in this file.
    """
    try:
        found, places = _unpickle(file)
    except (OSError, pickle.UnpicklingError):
        raise
    except zipfile.BadZipFile:
        raise OSError("it is no zip file, which PyTorch writes since 1.6") from None
    except Exception as error:  # a pickle that makes no sense fails in ways we cannot list
        raise OSError(f"its pickle makes no sense: {type(error).__name__}: {first_line(error)}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        for name, tensor in found.items()
    ):
        raise OSError("it holds something other than named tensors")
    described: dict[str, tuple[Tensor, int | None]] = {}
    for name, given in found.items():
        tensor = Tensor.detach(given)  # without attributes of its own, which could stand for methods
        begin, end = places.get(tensor.untyped_storage()._cdata, (None, 0))
        if begin is not None and begin + (tensor.storage_offset() + span(tensor)) * tensor.itemsize > end:
            raise OSError(f"{name!r:.80} is larger than its storage")
        described[name] = tensor, begin
    return described


def span(tensor: Tensor) -> int:
    """How many numbers of its storage lie from the first to the last one of a strided tensor."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 if tensor.numel() else 0


def _unpickle(file: OpenFile) -> tuple[Any, dict[int, _Place]]:
    """What the pickle holds, and where the storages of its tensors lie, by their addresses."""
    records = _records(file)
    if (order := records.get("byteorder")) and file.part(order[0], order[1] - order[0]) != b"little":
        raise OSError("its numbers are not little-endian")
    begin, end = records["data.pkl"]
    reader = _Reader(io.BytesIO(file.part(begin, end - begin)), records)
    return reader.load(), reader.places  # type: ignore[no-untyped-call]


class _Reader(Unpickler):
    """Makes storages on the meta device."""

    def __init__(self, pickled: io.BytesIO, records: dict[str, _Place]) -> None:
        super().__init__(pickled, encoding="utf-8")
        self._records, self._made = records, dict[str, Any]()
        self.places = dict[int, _Place]()

    def persistent_load(self, pid: Any) -> Any:
        """The storage that a tensor names; tensors may share one."""
        _, kind, key, _, _ = pid
        if key not in self._made:
            begin, end = self._records[f"data/{key}"]
            storage = torch.UntypedStorage(end - begin, device="meta")
            self.places[storage._cdata] = begin, end
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            self._made[key] = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return self._made[key]


def _records(file: OpenFile) -> dict[str, _Place]:
    """The records by their names inside the zip's only folder."""
    with zipfile.ZipFile(file.raw) as archive:
        infos = archive.infolist()
    records: dict[str, _Place] = {}
    first, *_ = infos[0].filename.partition("/") if infos else [""]
    for info in infos:
        folder, _, name = info.filename.partition("/")
        if folder != first or name in records:  # readers disagree on which of two records counts
            raise OSError(f"{info.filename!r:.80} in it comes twice, or lies in another folder than the rest")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise OSError(f"{info.filename!r:.80} in it is compressed")
        lengths = file.part(info.header_offset, _LOCAL_HEADER)[-4:]
        begin = info.header_offset + _LOCAL_HEADER + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
        if begin + info.file_size > file.n_bytes:
            raise OSError(f"it has {file.n_bytes:,} bytes, but {info.filename!r:.80} ends behind them")
        records[name] = begin, begin + info.file_size
    return records
