"""Which rows and columns of a model's weights each rank keeps, as a dict from module names to DTensor styles.

The fused weights are stored so that contiguous parts keep together what belongs together: wqkv by kv heads, w_in by
pairs of gate and up. So each style is a plain Shard(0) or Shard(1). A rank's part of a weight is an ordinary tensor,
not a DTensor: quantization, kernels and Inductor see nothing new, and an eager step costs no more Python.

DTensor takes a second to import: this file is imported where a model is split.

Shapes: K kv heads, G query heads of each, N = K * G, H head dim, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from .collectives import all_reduce, sum_in_order
from .vocab import rows_held


class Split(ParallelStyle):
    """The module keeps this rank's part of every parameter: Shard(0) of its outputs, Shard(1) of its inputs.

    Parts have one size: if it does not divide a vocabulary, zeros follow the last rows. A bias of outputs that will be
    summed is whole on the first rank, and zeros on the others.
    """

    def __init__(self, placement: Shard) -> None:
        self.dim = placement.dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        n, rank = device_mesh.size(), device_mesh.get_local_rank()
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() <= self.dim:
                part = parameter.detach().clone() if rank == 0 else torch.zeros_like(parameter)
                module.register_parameter(name, nn.Parameter(part, requires_grad=False))
                continue
            size = parameter.shape[self.dim]
            own = rows_held(size, n)
            begin, end = (min(place * own, size) for place in (rank, rank + 1))
            part = parameter.detach().narrow(self.dim, begin, end - begin).clone()
            if end - begin < own:
                assert self.dim == 0, "check_split lets nothing but a vocabulary be uneven"
                part = torch.cat([part, part.new_zeros(own - (end - begin), *part.shape[1:])])
            module.register_parameter(name, nn.Parameter(part, requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = len(module.weight)
        return module


class SplitVocabulary(Split):
    """An embedding that keeps this rank's rows; a rank that does not hold a token's row adds zeros to the sum."""

    def __init__(self) -> None:
        super().__init__(Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.__class__ = VocabularyEmbedding  # as torch's fully_shard does: the module stays the same object
        assert isinstance(module, VocabularyEmbedding)
        module.mesh, module.first_row = device_mesh, device_mesh.get_local_rank() * module.weight.shape[0]
        return module


class Summed(ParallelStyle):
    """The module's output is a partial sum: one all-reduce completes it.

    It is set on the block around a Shard(1) weight, so that quantization may replace the module of that weight.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(Sum(device_mesh))
        return module


class Sum:
    """Completes such a partial sum, as the module's forward hook."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.in_order = False  # see Group.sum_in_order

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The sum over the ranks' outputs: any shape -> that shape."""
        return sum_in_order(output, self.mesh) if self.in_order else all_reduce(output, self.mesh)


class VocabularyEmbedding(nn.Embedding):
    """Some rows of an embedding, from first_row on, and a mesh whose ranks hold the others."""

    mesh: DeviceMesh
    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        row, n_rows = tokens - self.first_row, self.weight.shape[0]
        held = (row >= 0) & (row < n_rows)
        found = F.embedding(row.clamp(0, n_rows - 1), self.weight)
        # one part and zeros: bit-identical in whatever order they are added
        return all_reduce(torch.where(held[..., None], found, 0.0), self.mesh)


PLAN: dict[str, ParallelStyle] = {
    "embedding": SplitVocabulary(),  # [V, D]
    "layers.*.attention.wqkv": Split(Shard(0)),  # [K, G + 2, H, D], and a bias [K, G + 2, H] where there is one
    "layers.*.attention.wo": Split(Shard(1)),  # [D, N, H], and a bias [D] where there is one
    "layers.*.attention": Summed(),
    "layers.*.feed_forward.w_in": Split(Shard(0)),  # [F, 2, D], and a bias [F, 2] where there is one
    "layers.*.feed_forward.w_out": Split(Shard(1)),  # [D, F], and a bias [D] where there is one
    "layers.*.feed_forward": Summed(),
    "output": Split(Shard(0)),  # [V, D]: its logits stay where they are, see Vocabulary, which also handles padding
    # everything else is whole on each rank: norms of D, and q_norm and k_norm, which every head shares
}
