"""The collectives of a step, functional: in a compiled graph, or a captured one, they are operators like any other.

A result is complete when the function returns.
"""

from __future__ import annotations

import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.11 has only the older of the two names, later versions warn about it
_all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks of a one-dimensional mesh, bit-identical on each: any shape -> that shape."""
    return _complete(functional.all_reduce(x.contiguous(), "sum", mesh))


def sum_in_order(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks in fp32 and in rank order, wherever an element is: any shape -> that shape.

    An all-reduce splits the work by place in the buffer, and each rank begins with its own part: beyond two ranks,
    equal rows in different places may differ in their last bits. Here they do not, at a price: every rank receives all
    parts, ranks / 2 times the bytes.
    """
    first, *others = all_gather(x, mesh).unbind(0)
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(x.dtype)


def all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensors of all ranks, in rank order: [...] -> [ranks, ...]."""
    return _complete(_all_gather(x.contiguous()[None], 0, mesh))


def broadcast(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The first rank's tensor: any shape -> that shape."""
    return _complete(functional.broadcast(x.contiguous(), 0, mesh))


def _complete(x: Tensor) -> Tensor:
    """Wait for the result; outside a graph it may be on its way."""
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x
