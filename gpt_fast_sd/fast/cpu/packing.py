"""Weights held once, packed for the CPU's products of few rows, in modules that read them only through the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd.model import FeedForward, HugePageArena

from .. import (
    LINE,
    Int4,
    pack,
    pack_int4,
    pack_planes,
    packable,
    packed_linear,
    packed_rows,
    unpack,
    unpack_int4,
    unpack_planes,
)
from ..linear_int4 import Int4Linear
from ..linear_int8 import Int8Linear
from ..linear_planes import PlanesLinear, UpperLinear
from ..marks import edited, stands_for
from ..ops.planes import Planes
from .generated import GeneratedFeedForward, GeneratedLinear


class _Packed(nn.Module):
    """A module whose weight is packed; it is saved and loaded in the usual order."""

    weight: Tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = unpack(self.weight.detach())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == self.weight.shape:
            state_dict = {**state_dict, name: pack(state_dict[name].to(self.weight.dtype))}
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Multiplies(Linear):
    """A Linear whose products run in the kernel, which takes its weight and what belongs to it."""

    beside: tuple[str, ...] = ()  # names of its scales and blocks, see packed_linear
    by_sums = False

    def forward(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """[..., I] -> [..., O]"""
        scale, blocks = (*(getattr(self, name) for name in self.beside), None, None)[:2]
        return packed_linear(x, self.weight, self.bias, scale, blocks, self.by_sums, gated)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up of its outputs: [..., I] -> [..., O / 2]"""
        return self.forward(x, gated=True)


class PackedLinear(_Multiplies, _Packed, Linear):
    """A Linear whose weight [O, I] holds its elements in the order that `pack` gives them."""


class PackedInt8Linear(_Multiplies, Int8Linear):
    """An Int8Linear whose weight [O, I] holds its elements in the order that `pack` gives them."""

    beside = ("scale",)

    def in_order(self) -> Tensor:
        """The weight as its outputs and inputs are numbered: int8 [O, I]."""
        return unpack(super().in_order())

    def arranged(self, weight: Tensor) -> Tensor:
        """Such a weight, packed."""
        return pack(weight)


class PackedInt4Linear(_Multiplies, Int4Linear):
    """An Int4Linear that keeps its weight in the order that `pack_int4` gives it."""

    beside = "scale", "blocks"

    def in_order(self) -> Int4:
        """The weight as its outputs and inputs are numbered."""
        return unpack_int4(super().in_order(), self.by_sums)

    def arranged(self, held: Int4) -> Int4:
        """Such a weight, packed."""
        return pack_int4(held, self.by_sums)


class SummedInt4Linear(PackedInt4Linear):
    """Packed int4 weights for few rows: activations of 15 bits, faster for one row, slower from 16 on."""

    by_sums = True


class PackedUpperLinear(_Multiplies, UpperLinear):
    """An UpperLinear of a PackedPlanesLinear."""

    beside = ("scale",)


class PackedPlanesLinear(_Multiplies, PlanesLinear):
    """A PlanesLinear, no row of which is whole, whose planes lie in the order that `pack_planes` gives them."""

    reader = PackedUpperLinear
    beside = "scale", "lower"

    def in_order(self) -> Planes:
        """The weight as its outputs and inputs are numbered."""
        held = super().in_order()
        upper, lower = unpack_planes(held.upper, held.lower)
        return held._replace(upper=upper, lower=lower)

    def arranged(self, held: Planes) -> Planes:
        """Such a weight, packed; ValueError for one with rows that are whole, which the kernel does not read."""
        if len(held.rows):
            raise ValueError(f"{len(held.rows):,} rows of a packed weight do not lie in planes: load the model again")
        upper, lower = pack_planes(held.upper, held.lower)
        return held._replace(upper=upper, lower=lower)


class PackedEmbedding(_Packed, nn.Embedding):
    """An Embedding that shares the packed weight of an output head."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        return packed_rows(self.weight, tokens)


@stands_for("gpt_fast_sd.model.llama:FeedForward.forward")
class PackedFeedForward(FeedForward):
    """A FeedForward that applies SwiGLU to the results of its packed w_in inside the kernel."""

    w_in: _Multiplies

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        out: Tensor = self.w_out(self.w_in.swiglu(x))
        return out


PACKED: dict[type[nn.Linear], type[nn.Linear]] = {
    Linear: PackedLinear,
    GeneratedLinear: PackedLinear,
    Int8Linear: PackedInt8Linear,
    Int4Linear: PackedInt4Linear,
}
SERVED = PackedFeedForward, GeneratedFeedForward  # what a FeedForward may be in a model that an engine has laid out
FEW_ROWS = 8  # up to which SummedInt4Linear is not slower
FOR_FEW_ROWS = PACKED | {Int4Linear: SummedInt4Linear}


def all_packed(model: nn.Module) -> bool:
    """Whether every product with the model's weights runs through the kernel."""
    return all(isinstance(module, _Multiplies) for module in model.modules() if isinstance(module, nn.Linear))


def pack_linears(model: nn.Module, *, few_rows: bool = False) -> int:
    """Pack in place the weights that the kernel serves, if they multiply bf16, one after another -> their number.

    few_rows: for products of no more than FEW_ROWS rows.
    Modules keep their names and shapes; their weights are read only through them. A head that shares its weight with
    the embedding packs both. Nothing is packed if this CPU or its compiler lacks the instructions.
    """
    n_packed, arena = 0, HugePageArena()
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or type(module) not in PACKED:
            continue
        plain = type(module.weight) is nn.Parameter and type(module.weight.data) is Tensor
        dtype = module.made_from if isinstance(module, (Int8Linear, Int4Linear)) else module.weight.dtype
        if not plain or dtype != torch.bfloat16 or not packable(module.weight):
            continue
        tied = embeddings.get(id(module.weight))
        if type(tied) not in (type(None), nn.Embedding, PackedEmbedding):
            continue  # one rank's rows of a vocabulary, which have their own look-up
        kind = getattr(module.weight, "is_packed", None)  # another model may share it
        if kind is None:
            kind = (FOR_FEW_ROWS if few_rows and not module.in_features % LINE else PACKED)[type(module)]
            if isinstance(module, Int4Linear):
                by_sums = kind is SummedInt4Linear
                numbers, blocks, _ = pack_int4(module.in_order(), by_sums)
                module.weight.data, module.blocks.data = arena.keep(numbers), arena.keep(blocks)
            else:
                module.weight.data = pack(module.weight.data, arena.keep)
            module.weight.is_packed = kind  # type: ignore[attr-defined]
        module.__class__ = kind
        if tied is not None:
            tied.__class__ = PackedEmbedding
        n_packed += 1
    changed = edited(PackedFeedForward)
    for module in model.modules():
        if not isinstance(module, FeedForward) or type(module) not in (FeedForward, *SERVED):
            continue
        if changed:  # since another engine has laid it out
            module.__class__ = FeedForward
        elif isinstance(module.w_in, _Multiplies) and module.w_in.bias is None:
            module.__class__ = PackedFeedForward
    return n_packed


def is_packed(model: nn.Module) -> bool:
    """Whether some of a model's weights lie in the order of the kernel's products."""
    return any(hasattr(weight, "is_packed") for weight in model.parameters())
