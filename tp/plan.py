"""The ranks that hold one model together: into how many parts it may be split, and what a rank loads of it.

Shapes: K kv heads, G query heads of each, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gpt_fast_sd.model import Attention, ModelConfig, Transformer, load_model

from .vocab import Vocabulary, rows_held


@dataclass(frozen=True)
class Group:
    """The ranks that hold one model together, and this one's place among them."""

    size: int = 1
    rank: int = 0
    mesh: DeviceMesh | None = None  # of one dimension; None: this process has the whole model

    def vocabulary(self, size: int) -> Vocabulary:
        """Who holds which of the logits of a vocabulary of this size."""
        return Vocabulary(self.mesh, size)

    def shard(self, model: Transformer) -> Transformer:
        """Cut a whole model down, in place, to this rank's part; ValueError if it cannot be split into that many."""
        if self.mesh is not None:
            assert len(model.embedding.weight) == model.config.vocab_size, "the model is a part already"
            if any(hasattr(x, "is_packed") or name.endswith(".lower") for name, x in model.named_parameters()):
                raise ValueError("an engine has packed this model's weights or split their bytes: load it again")
            check_split(model.config, self.size)
            repeat_kv_heads(model, kv_copies(model.config, self.size))
            self._cut(model)
        return model

    def load(
        self,
        folder: Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        settle: Callable[[Transformer, str], None] | None = None,
        keep: Callable[[Transformer, str, Tensor, Tensor], None] | None = None,
    ) -> Transformer:
        """The part of the folder's model for this rank; no other weights are read. See load_model."""
        part = None if self.mesh is None else Part(self)
        return load_model(folder, device=device, dtype=dtype, part=part, settle=settle, keep=keep)

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
            from .styles import Sum

            for module in model.modules():
                for hook in module._forward_hooks.values():
                    if isinstance(hook, Sum):
                        hook.in_order = True

    def _cut(self, model: Transformer) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        from .styles import PLAN

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
            if (
                name.endswith((".wo.bias", ".w_out.bias")) and self.group.rank > 0
            ):  # the first rank's, see Split: zeros behind its end
                first = [len(p)]
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
