"""A small model, its cache and its drafts, all with fake tensors on a GPU that does not exist."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.model import FORMATS, KVCache, ModelConfig, Transformer
from gpt_fast_sd.policies import View, build_view
from gpt_fast_sd.policies.config import DraftConfig
from gpt_fast_sd.state import BatchState
from gpt_fast_sd.steps import Runner

SLOTS, LAYERS, CAPACITY, EOS = 4, 2, 4096, (7, 9)
CUDA = torch.device("cuda")


@dataclass
class Rig:
    """B = 4 slots of 4096 positions, G = 4, L = 2; call it inside fake_cuda_tensors."""

    model: Transformer
    cache: KVCache
    state: BatchState

    def view(self, name: str, budget: int = 512) -> View:
        """The view of that name over the cache, as an engine builds it."""
        config = DraftConfig(policy=name, budget=budget, gamma=5)
        return build_view(config, name, self.runner)

    @property
    def runner(self) -> Runner:
        """The model and the cache, with what stands in for the core on CUDA."""
        return Runner(self.model, self.cache, backend=FastBackend(CUDA, None))

    def tokens(self, n: int, slots: int = SLOTS) -> Tensor:
        """int64 [B, n]: token ids, or positions, which have no values here."""
        return torch.zeros(slots, n, dtype=torch.int64, device=CUDA)


def fake_rig(head_dim: int = 64, form: str = "bf16", dim: int = 512) -> Rig:
    config = ModelConfig(
        vocab_size=128_256, dim=dim, n_layers=LAYERS, n_heads=dim // head_dim, n_kv_heads=dim // 4 // head_dim,
        head_dim=head_dim, ffn_dim=2 * dim, max_seq_len=CAPACITY,
    )  # fmt: skip
    with CUDA:
        model = Transformer(config).eval().requires_grad_(False)
    for module in model.modules():  # Module.to swaps parameters, which fake tensors refuse
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.bfloat16(), requires_grad=False))
    cache = KVCache(config, SLOTS, CAPACITY, format=FORMATS[form], device=CUDA)
    bodies = Runner(model, cache, backend=FastBackend(CUDA, None)).bodies
    state = BatchState.idle(cache.seq_len, cache.capacity + 256, config.vocab_size, EOS, bodies=bodies)
    return Rig(model, cache, state)
