"""Weights held once, packed for the CPU's products of few rows, in modules that read them only through the kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gpt_fast_sd.model import FeedForward, Linear

from .kernels import pack, packable, packed_linear, packed_rows, packed_swiglu, unpack


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


class PackedLinear(_Packed, Linear):
    """A Linear whose weight [O, I] holds its elements in the order that `pack` gives them."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return packed_linear(x, self.weight, self.bias)


class PackedEmbedding(_Packed, nn.Embedding):
    """An Embedding that shares the packed weight of an output head."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        return packed_rows(self.weight, tokens)


class PackedFeedForward(FeedForward):
    """A FeedForward that applies SwiGLU to the results of its packed w_in inside the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        out: Tensor = self.w_out(packed_swiglu(x, self.w_in.weight))
        return out


def all_packed(model: nn.Module) -> bool:
    """Whether every product with the model's weights runs through the kernel."""
    return all(type(module) is PackedLinear for module in model.modules() if isinstance(module, nn.Linear))


def pack_linears(model: nn.Module) -> int:
    """Pack in place the weights of a bf16 model that the kernel serves, one after another -> their number.

    Modules keep their names and shapes; their weights are read only through them. A head that shares its weight with
    the embedding packs both. Nothing is packed if this CPU or its compiler lacks the instructions.
    """
    n_packed = 0
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        plain = type(module) is Linear and type(module.weight) is nn.Parameter and type(module.weight.data) is Tensor
        if not plain or not packable(module.weight):  # type: ignore[arg-type]
            continue
        tied = embeddings.get(id(module.weight))
        if type(tied) not in (type(None), nn.Embedding, PackedEmbedding):
            continue  # one rank's rows of a vocabulary, which have their own look-up
        if not hasattr(module.weight, "is_packed"):  # another model may share it
            module.weight.data = pack(module.weight.data)
            module.weight.is_packed = True  # type: ignore[attr-defined]
        module.__class__ = PackedLinear
        if tied is not None:
            tied.__class__ = PackedEmbedding
        n_packed += 1
    for module in model.modules():
        if type(module) is FeedForward and type(module.w_in) is PackedLinear and module.w_in.bias is None:
            module.__class__ = PackedFeedForward
    return n_packed
