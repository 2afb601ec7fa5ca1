"""Which rank holds which rows and columns of a model, as a dict from module names to DTensor styles.

The fused weights are stored so that contiguous parts keep together what belongs together: wqkv by kv heads, w_in by
pairs of gate and up. So each style is a plain Shard(0) or Shard(1). A rank's part of a weight is an ordinary tensor,
not a DTensor: quantization, kernels and Inductor see nothing new, and an eager step costs no more Python.

Shapes: N query heads, K kv heads, G = N // K, H head dim, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from gpt_fast_sd.model import Attention, ModelConfig, Transformer, load_model

from .collectives import all_reduce, sum_in_order
from .vocab import rows_held


class Split(ParallelStyle):
    """The module keeps this rank's part of every parameter: Shard(0) of its outputs, Shard(1) of its inputs.

    Parts have one size: if it does not divide a vocabulary, zeros follow the last rows.
    """

    def __init__(self, placement: Shard) -> None:
        self.dim = placement.dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        n, rank = device_mesh.size(), device_mesh.get_local_rank()
        for name, parameter in list(module.named_parameters(recurse=False)):
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
    "layers.*.attention.wo": Split(Shard(1)),  # [D, N, H]
    "layers.*.attention": Summed(),
    "layers.*.feed_forward.w_in": Split(Shard(0)),  # [F, 2, D]
    "layers.*.feed_forward.w_out": Split(Shard(1)),  # [D, F]
    "layers.*.feed_forward": Summed(),
    "output": Split(Shard(0)),  # [V, D]: its logits stay where they are, see Vocabulary, which also handles padding
    # everything else is whole on each rank: norms of D, and q_norm and k_norm, which every head shares
}


@dataclass(frozen=True)
class Group:
    """The ranks that hold one model together, and this one's place among them."""

    size: int = 1
    rank: int = 0
    mesh: DeviceMesh | None = None  # of one dimension; None: this process has the whole model

    def shard(self, model: Transformer) -> Transformer:
        """Cut a whole model down, in place, to this rank's part; ValueError if it cannot be split into that many."""
        if self.mesh is not None:
            assert len(model.embedding.weight) == model.config.vocab_size, "the model is a part already"
            if any(hasattr(weight, "is_packed") for weight in model.parameters()):  # packed rows are in another order
                raise ValueError("an engine has packed this model's weights for its CPU: load it again to split it")
            check_split(model.config, self.size)
            repeat_kv_heads(model, kv_copies(model.config, self.size))
            self._cut(model)
        return model

    def load(
        self, folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Transformer:
        """The part of the folder's model for this rank; no other weights are read. See load_model."""
        if self.mesh is None:
            return load_model(folder, device=device, dtype=dtype)
        return load_model(folder, device=device, dtype=dtype, part=Part(self))

    def check_part(self, model: Transformer) -> None:
        """ValueError unless the model has been cut down to this rank's part."""
        held, whole = model.embedding.weight.shape[0], model.config.vocab_size
        if held != rows_held(whole, self.size):
            raise ValueError(
                f"the model holds {held:,} of {whole:,} embedding rows, but {self.size} processes are to share it: "
                "load or shard it with the group of these processes"
            )

    def sum_in_order(self, model: Transformer) -> None:
        """Make a token's sums over the ranks bit-identical wherever it is in a step; slower.

        A sum of two has no order, so nothing changes with two ranks.
        """
        if self.size > 2:
            for module in model.modules():
                for hook in module._forward_hooks.values():
                    if isinstance(hook, Sum):
                        hook.in_order = True

    def _cut(self, model: Transformer) -> None:
        assert self.mesh is not None
        parallelize_module(model, self.mesh, PLAN)
        if model.config.tie_embeddings:
            model.output.weight = model.embedding.weight


ALONE = Group()


@dataclass(frozen=True)
class Part:
    """Tells load_model which part of a model a rank of a group holds."""

    group: Group

    def kv_copies(self, config: ModelConfig) -> int:
        """How many ranks hold each kv head; ValueError if the model cannot be split among the ranks."""
        check_split(config, self.group.size)
        return kv_copies(config, self.group.size)

    def cut(self, model: Transformer) -> Mapping[str, tuple[int, int]]:
        """Cut the model down -> the first row and column of each parameter in the whole one."""
        whole = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
        self.group._cut(model)
        begins = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            first = [self.group.rank * own * (own != full) for own, full in zip(p.shape, whole[name], strict=True)]
            begins[name] = (first[0], first[1] if len(first) > 1 else 0)
        return begins


def check_split(config: ModelConfig, tp: int) -> None:
    """ValueError, naming the sizes that do not fit, if tp ranks cannot hold equal parts of a model.

    Any vocabulary will do: its last rows are padded.
    """
    parts = {"n_heads": config.n_heads, "ffn_dim": config.ffn_dim}
    wrong = [f"{name} {size:,}" for name, size in parts.items() if size % tp]
    if config.n_kv_heads % tp and tp % config.n_kv_heads:
        wrong.append(f"n_kv_heads {config.n_kv_heads} (which may also divide it)")
    if wrong:
        raise ValueError(f"tp {tp} does not fit the model: it must divide {' and '.join(wrong)}")


def kv_copies(config: ModelConfig, tp: int) -> int:
    """Ranks that hold the same kv head: 1, or more if there are fewer kv heads than ranks."""
    return max(1, tp // config.n_kv_heads)


def local_config(config: ModelConfig, tp: int) -> ModelConfig:
    """The model as one of tp ranks sees it in attention, with its own heads: the shape of its KV cache."""
    check_split(config, tp)
    return replace(config, n_heads=config.n_heads // tp, n_kv_heads=max(1, config.n_kv_heads // tp))


def repeat_kv_heads(model: Transformer, copies: int) -> None:
    """Store each kv head `copies` times, each with that many times fewer query heads; the function is unchanged.

    [K, G + 2, H, ...] -> [K * copies, G // copies + 2, H, ...]
    """
    config = model.config
    if copies == 1:
        return
    group = config.group_size // copies
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        for name, p in list(attention.wqkv.named_parameters()):
            units = p.detach().unflatten(0, (config.n_kv_heads, config.group_size + 2, config.head_dim))
            q, kv = units.split((config.group_size, 2), dim=1)
            q = q.unflatten(1, (copies, group))  # [K, copies, G // copies, H, ...]
            kv = kv[:, None].expand(-1, copies, *kv.shape[1:])  # [K, copies, 2, H, ...]
            repeated = torch.cat([q, kv], 2).flatten(0, 3)
            attention.wqkv.register_parameter(name, nn.Parameter(repeated, requires_grad=False))
        attention.group_size = group


def collectives_per_step(config: ModelConfig, tp: int, *, exact: bool = False) -> dict[str, int]:
    """Collectives of one greedy step: two sums per layer and the embedding's; the best token of all parts.

    exact: the sums of the layers are added in order. (A step that samples also broadcasts what was drawn.)
    """
    if tp == 1:
        return {}
    in_order = 2 * config.n_layers if exact and tp > 2 else 0
    return {"all_reduce": 2 * config.n_layers + 1 - in_order, "all_gather": 1 + in_order}
