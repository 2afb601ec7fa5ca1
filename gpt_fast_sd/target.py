"""The target's steps over all slots: one token per slot or several, compiled once for all policies.

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import CacheLayer, Transformer

from .attention import DenseKV, asked_of
from .fast import cpu_attention_fits, triton_serves
from .fast.compile import CompiledStep, span, varying
from .runner import Runner
from .state import BatchState, RoundPlan


class TargetSteps:
    """Feeds tokens to the target: each slot's own, from its seq_len on."""

    def __init__(self, target: Runner, state: BatchState, *, width: int = 0) -> None:
        """width: tokens that every step feeds (0: as many as needed).

        A width also fixes the view to all of the cache: then no sum depends on what else is in the batch.
        """
        self.target, self.state, self.width = target, state, width
        self.decode = CompiledStep(decode_step, compiled=target.compiled, whole=target.whole)  # one token per slot
        self.verify = CompiledStep(decode_step, compiled=target.compiled, whole=target.whole)  # several

    @property
    def page(self) -> int:
        """Keys whose attention mass a step of several tokens sums, 0: of none."""
        return 0

    def feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        """Feed tokens [B, T] from each slot's seq_len on, at least n_keys keys in view -> logits [B, T, V], mass."""
        cache, wanted = self.target.cache, self.width or tokens.shape[1]
        if wanted > tokens.shape[1]:
            tokens = F.pad(tokens, (0, wanted - tokens.shape[1]))
        # a slot without a request writes past everything that can be in view, so it costs no reading of keys
        pos = torch.where(self.state.active, cache.seq_len, cache.capacity)[:, None]  # [B, 1]
        if wanted > 1:
            pos = pos + torch.arange(wanted, device=tokens.device)  # [B, T]
        step, page = (self.decode, 0) if wanted == 1 else (self.verify, self.page)
        compiled = self.target.compiles and self.target.whole is None
        if compiled and step is self.verify and not self.width:
            varying(tokens, pos)
        n_splits_carrier = span(cache, self.in_view(n_keys), compiled=compiled)
        # with several threads a library may sum one row of a product in a different order than the next
        with one_thread() if self.width else contextlib.nullcontext():
            out: tuple[Tensor, Tensor | None] = step(
                self.target.model, tokens, pos, cache.layers, n_splits_carrier, page, variant=page
            )
        return out

    def in_view(self, n_keys: int) -> int:
        """Keys to have in view: with a fixed width the whole cache, so that sums never change their order."""
        return self.target.cache.capacity if self.width else n_keys

    def keys_read(self, plan: RoundPlan) -> int:
        """Keys that each slot reads in a step, on average: the time of the step depends on them."""
        return plan.mean_keys(self.target.shape[1]) if self._reads_own_keys else plan.n_keys

    @functools.cached_property
    def _reads_own_keys(self) -> bool:
        return reads_own_keys(self.target)


def decode_step(
    model: Transformer, tokens: Tensor, pos: Tensor, layers: list[CacheLayer], n_splits_carrier: Tensor, page: int
) -> tuple[Tensor, Tensor | None]:
    """Store, attend to everything and judge: tokens, pos [B, T] -> fp32 logits [B, T, V] after each of them.

    n_splits_carrier [n_splits, 0] carries, as a size that may vary without a recompile, how many key splits are in
    view. With a page, also the attention mass that each block of page keys received: fp32 [L, B, K, n_keys // page].
    """
    kv = DenseKV(layers, n_splits_carrier, page)
    logits = model(tokens, pos, kv).float()  # [B, T, V]
    return logits, torch.stack(kv.mass) if page else None


def reads_own_keys(target: Runner) -> bool:
    """Whether the target's steps attend with our kernels, which read only each row's own keys.

    Other attention reads for every row, including idle ones, as many keys as the longest one has in view.
    """
    return triton_serves(target.device) or (target.uses_kernels and cpp_fits(target))


def cpp_fits(target: Runner) -> bool:
    """Whether the C++ kernel serves the target's queries and cache on this machine."""
    layer = target.cache.layers[0]
    shape = *layer.k.shape[:2], 0, layer.head_dim
    queries = layer.k.new_empty(shape, dtype=target.model.embedding.weight.dtype)  # [B, K, 0, H], of no bytes
    return cpu_attention_fits(asked_of(layer, queries), layer.k)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Meanwhile torch's CPU operators run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
