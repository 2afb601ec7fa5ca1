"""A Linear whose bf16 weight lies in two planes, and the one that reads the upper of them: half the bytes, no copy."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .linear_float8 import by_float8
from .ops.int8 import FLOAT8
from .ops.planes import Planes, join, planes_linear, split


class _OfPlanes(nn.Linear):
    """What both have: the upper plane is `weight`."""

    weight: nn.Parameter  # uint8 [O, I]
    lower: nn.Parameter  # uint8 [O, I]
    scale: nn.Parameter  # fp32 [O]
    rows: nn.Parameter  # int64 [W]
    whole: nn.Parameter  # bf16 [W, I]

    @property
    def held(self) -> Planes:
        """The weight as it is kept."""
        return Planes(self.weight, self.lower, self.scale, self.rows, self.whole)


class UpperLinear(_OfPlanes):
    """A Linear that multiplies with the upper plane of another's weight, all of whose memory it shares."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return planes_linear(x, self.held, self.bias, of_draft=True)


class UpperByFloat8(UpperLinear):
    """An UpperLinear whose rows become float8, too, as the plane is already: products are the library's."""

    one: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return by_float8(x, self.weight, self.scale, self.bias, self.one)


class PlanesLinear(_OfPlanes):
    """A Linear in planes: its products are those of the bf16 weight, which is what is saved and loaded of it."""

    reader: ClassVar[type[UpperLinear]] = UpperLinear

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return planes_linear(x, self.held, self.bias)

    def in_order(self) -> Planes:
        """The weight as its outputs and inputs are numbered."""
        return Planes(*(part.detach() for part in self.held))

    def arranged(self, held: Planes) -> Planes:
        """Such a weight in the order in which this holds its own."""
        return held

    def joined(self) -> Tensor:
        """The bf16 weight [O, I], in memory of its own."""
        return join(self.in_order())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in PARTS[1:]:
            del destination[f"{prefix}{name}"]
        destination[f"{prefix}weight"] = self.joined()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == self.weight.shape:
            held = self.arranged(split(state_dict[name].bfloat16()))
            if len(held.rows) > len(self.rows):  # others know the tensors that are held
                raise ValueError(
                    f"{len(held.rows):,} rows of a weight do not lie in planes, and {len(self.rows):,} are held beside "
                    "them: load the model again"
                )
            held = with_whole(held, len(self.rows))
            own = dict(zip(PARTS, held, strict=True))
            state_dict = {**state_dict, **{f"{prefix}{part}": value for part, value in own.items()}}
        super()._load_from_state_dict(state_dict, prefix, *args)


PARTS = "weight", "lower", "scale", "rows", "whole"


def lay_in_planes(linear: nn.Linear, weight: Tensor, kind: type[PlanesLinear] = PlanesLinear) -> None:
    """Let a Linear, in place, hold this bf16 weight [O, I] of its own in planes."""
    stored = getattr(linear.weight, "in_blocks", None)  # of a file, from which blocks of int4 are made
    linear.__class__ = kind  # as the packed ones: it stays the same object
    assert isinstance(linear, PlanesLinear)
    _hold(linear, linear.arranged(split(weight)))
    if stored is not None:
        linear.weight.in_blocks = stored  # type: ignore[attr-defined]


def keep_whole(linear: PlanesLinear, n: int) -> None:
    """Let n rows be whole: steps are compiled for one layer, and all are to be alike."""
    if n > len(linear.rows):
        _hold(linear, with_whole(linear.held, n))


def with_whole(held: Planes, n: int) -> Planes:
    """A weight of which n rows are whole, the first one again and again."""
    if (more := n - len(held.rows)) <= 0:
        return held
    rows, whole = held.rows.new_zeros(more), join(held)[:1].expand(more, -1)
    return held._replace(rows=torch.cat([held.rows, rows]), whole=torch.cat([held.whole, whole]))


def upper_of(linear: nn.Linear, *, multiplies_float8: bool = False) -> nn.Linear:
    """The Linear that reads the upper plane of one in planes, and shares all that it reads; any other one itself.

    multiplies_float8: whether the device does, and such products are to be taken for sizes that 16 divides.
    """
    if not isinstance(linear, PlanesLinear):
        return linear
    rounds_rows = multiplies_float8 and linear.in_features % 16 == linear.out_features % 16 == 0
    with torch.device("meta"):
        own = (UpperByFloat8 if rounds_rows else linear.reader)(linear.in_features, linear.out_features, bias=False)
    for name in (*PARTS, "bias"):
        own.register_parameter(name, getattr(linear, name))
    if rounds_rows:
        own.weight = nn.Parameter(linear.weight.detach().view(FLOAT8), requires_grad=False)
        own.register_buffer("one", torch.ones((), device=linear.weight.device), persistent=False)
    return own.train(False)


def _hold(linear: nn.Linear, held: Planes) -> None:
    for name, value in zip(PARTS, held, strict=True):
        linear.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))
