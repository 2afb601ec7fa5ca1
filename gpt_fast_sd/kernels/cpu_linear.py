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


class PackedLinear(Linear):
    """A Linear whose weight [O, I] holds its elements in the order that `pack` gives them."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        out: Tensor = torch.ops.gpt_fast_sd.cpu_linear(x, self.weight, self.bias)
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = unpack(self.weight)


class PackedEmbedding(nn.Embedding):
    """An Embedding that shares the packed weight of an output head."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        blocks = _blocks(self.weight)  # [V / 32, D / 32, 2, 16, 16, 2]
        inside = tokens % LANES
        found: Tensor = blocks[tokens // LANES, :, inside // 16, :, inside % 16]  # [..., D / 32, 16, 2]
        return found.flatten(-3)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = unpack(self.weight)


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
        if tied is not None and type(tied) is not nn.Embedding:
            continue  # one rank's rows of a vocabulary, which has a look-up of its own
        module.weight.data = pack(module.weight.data)
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
    rows = weight.view(n_out // LANES, 2, 16, n_in // DEPTH, 16, 2)
    return rows.permute(0, 3, 1, 4, 2, 5).contiguous().view(n_out, n_in)


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
