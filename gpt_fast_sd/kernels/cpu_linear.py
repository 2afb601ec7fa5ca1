"""Products of few rows on a CPU: weights held once, packed for cpu_linear.cpp, behind a torch operator.

A library packs the weights anew in every call, or reads them with a horizontal sum a row; packed once, a product reads
each weight from memory a single time, and a row's bits hang neither on the other rows nor on the number of threads.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt_fast_sd.model import Linear

from . import cpu as attention
from .cpu_build import builds, library

SOURCE = Path(__file__).with_name("cpu_linear.cpp")
LANES, DEPTH = 32, 32  # outputs and inputs of a block; both sizes of a packed weight are multiples of them

_library = torch.library.Library("gpt_fast_sd", "FRAGMENT")
_library.define("cpu_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")


class _Packed(nn.Module):
    """Whose weight is packed, though what is saved and loaded of it is in the usual order."""

    weight: Tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = unpack(self.weight.detach())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == self.weight.shape:
            state_dict = {**state_dict, name: pack(state_dict[name].to(self.weight.dtype))}
        super()._load_from_state_dict(state_dict, prefix, *args)


class PackedLinear(_Packed, Linear):
    """A Linear whose weight [O, I] holds its elements in the order that `pack` gives them."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        out: Tensor = torch.ops.gpt_fast_sd.cpu_linear(x, self.weight, self.bias)
        return out


class PackedEmbedding(_Packed, nn.Embedding):
    """An Embedding that shares the packed weight of an output head."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        blocks = _blocks(self.weight)  # [V / 32, D / 32, 2, 16, 16, 2]
        inside = tokens % LANES
        found: Tensor = blocks[tokens // LANES, :, inside // 16, :, inside % 16]  # [..., D / 32, 16, 2]
        return found.flatten(-3)


def pack_linears(model: nn.Module) -> int:
    """Pack in place the weights of a bf16 model that the kernel serves, one after another; how many there are.

    Modules keep their names and shapes; what they hold is read through them alone. A head that shares its weight with
    the embedding takes it along. Nothing is packed where this CPU or its compiler lacks the instructions.
    """
    n_packed = 0
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if type(module) is not Linear or not _fits(module.weight) or not builds(SOURCE):
            continue
        tied = embeddings.get(id(module.weight))
        if type(tied) not in (type(None), nn.Embedding, PackedEmbedding):
            continue  # one rank's rows of a vocabulary, which has a look-up of its own
        if not hasattr(module.weight, "is_packed"):  # another model may share it
            module.weight.data = pack(module.weight.data)
            module.weight.is_packed = True  # type: ignore[attr-defined]
        module.__class__ = PackedLinear
        if tied is not None:
            tied.__class__ = PackedEmbedding
        n_packed += 1
    return n_packed


def cpu_kernels(head_dim: int) -> tuple[tuple[Path, int], ...]:
    """What `begin_building` is to build for a model: sources, each with the head dim that it is built for."""
    own = [(attention.SOURCE, head_dim)] if head_dim in attention.HEAD_DIMS else []
    return (*own, (SOURCE, 0))


def _fits(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    if not plain or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return False
    return not weight.shape[0] % LANES and not weight.shape[1] % DEPTH


def pack(weight: Tensor) -> Tensor:
    """[O, I] -> the same shape, as [O / 32, I / 32, 2, 16, 16, 2]: blocks of 32 outputs and inputs, inputs by pairs."""
    n_out, n_in = weight.shape
    pairs = weight.contiguous().view(torch.int32).view(n_out // LANES, 2, 16, n_in // DEPTH, 16)
    return pairs.permute(0, 3, 1, 4, 2).contiguous().view(weight.dtype).view(n_out, n_in)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return _blocks(packed).permute(0, 2, 4, 1, 3, 5).reshape(packed.shape)


def _blocks(packed: Tensor) -> Tensor:
    n_out, n_in = packed.shape
    return packed.view(n_out // LANES, n_in // DEPTH, 2, 16, 16, 2)


@functools.cache
def _kernel() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    kernel = library(SOURCE)().linear_cpu
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes, kernel.restype = [pointer] * 4 + [size] * 4 + [ctypes.c_int], None
    return kernel


@torch.library.impl(_library, "cpu_linear", "CPU")
def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if not x.dtype == packed.dtype == torch.bfloat16 or not packed.is_contiguous():
        raise TypeError(f"packed weights are contiguous bf16 and multiply bf16, got {packed.dtype} and {x.dtype}")
    if bias is not None and bias.dtype != torch.bfloat16:
        raise TypeError(f"the bias of packed weights is bf16, got {bias.dtype}")
    n_out, n_in = packed.shape
    rows = x.reshape(-1, n_in)  # [M, I]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(*x.shape[:-1], n_out, dtype=x.dtype)
    _kernel()(
        rows.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        len(rows), n_in, n_out, rows.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


@torch.library.register_fake("gpt_fast_sd::cpu_linear", lib=_library)  # type: ignore[untyped-decorator]
def _linear_fake(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])
