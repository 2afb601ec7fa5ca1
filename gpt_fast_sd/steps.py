"""A model with its cache, and what runs its steps: as the core is written, or faster bodies in its place.

Shapes: B slots, L layers, K kv heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt_fast_sd.model import SPLIT, KVCache, Transformer

from .bodies import CORE, Bodies
from .config import MAX_GAMMA
from .kv import DenseKV, ListedKV
from .sampling import WHOLE, Vocabulary


class Step:
    """A function over tensors, called as it is; what compiles it is a subclass, which counts its graphs."""

    graphs = 0
    compiles = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, variant: Hashable = None) -> Any:
        """Call the function. variant: a key for differences in the arguments that need a graph of their own."""
        return self.fn(*args)


class Ranks(Protocol):
    """The processes that hold a model together: here one; tp's Group is for several."""

    @property
    def size(self) -> int:
        """How many they are."""
        return 1

    @property
    def mesh(self) -> Any:
        """Of torch's, by which they reach each other; None: there is one."""
        return None

    def vocabulary(self, size: int) -> Vocabulary:
        """Who holds which of the logits of a vocabulary of this size."""
        return WHOLE


class OneProcess(Ranks):
    """One process that holds the model alone."""


class Backend:
    """Runs the core as it is written: eagerly, every body the core's own."""

    compiles = False

    @property
    def chunks(self) -> tuple[int, ...]:
        """Prompt tokens of a prefill step, the largest first; each divides the ones before it, SPLIT is the last."""
        return (SPLIT,)

    def pack(self, runner: Runner, *, few_rows: bool = False) -> None:
        """Lay out a model's weights as kernels read them, in place."""

    def bodies(self, runner: Runner) -> Bodies:
        """What runs in the places of the core's functions for a model and its cache."""
        return Bodies()

    def step(self, fn: Callable[..., Any]) -> Step:
        """A step that runs this function."""
        return Step(fn)

    def sampling_step(self, fn: Callable[..., Any]) -> Step:
        """A step that judges or chooses: many small operators."""
        return Step(fn)


@dataclass(frozen=True)
class Runner:
    """A model and the cache that it reads and writes. A self-draft uses the target's own."""

    model: Transformer
    cache: KVCache
    group: Any = OneProcess()  # noqa: RUF009  the Ranks that hold the model together
    backend: Backend = Backend()  # noqa: RUF009  it has no state

    @cached_property
    def bodies(self) -> Bodies:
        """What runs in the places of the core's functions; asked for when weights are as steps will read them."""
        return self.backend.bodies(self)

    def bodies_of(self, kv: Callable[..., Any]) -> Bodies:
        """Those for steps that read the cache through such a KV: a body of all layers serves only two kinds."""
        return (
            self.bodies if kv in (DenseKV, ListedKV) else replace(self.bodies, hidden=CORE.hidden, logits=CORE.logits)
        )

    def step(self, fn: Callable[..., Any], kv: Callable[..., Any] = DenseKV) -> Step:
        """A step of this model through such a KV; where one call runs all layers, nothing is left to compile."""
        return Step(fn) if self.bodies_of(kv).fused else self.backend.step(fn)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, B, K) of the cache."""
        return self.cache.shape

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.cache.seq_len.device


def splits_in_view(cache: KVCache, n_keys: int) -> int:
    """How many key splits are in view for the first n_keys positions."""
    return min(cache.splits(n_keys), cache.capacity // SPLIT)


def size_carrier(cache: KVCache, n_keys: int, *, compiled: bool = True) -> Tensor:
    """[n_splits, 0]: how many key splits are in view for the first n_keys positions, as a size.

    A size may vary without a recompile, whereas a number would be baked in. compiled: whether the step that it is for
    may be.
    """
    most = cache.capacity // SPLIT
    size = torch.empty(splits_in_view(cache, n_keys), 0, device=cache.seq_len.device)
    if compiled and most > 2:  # torch refuses a range of one size
        varying(size, dim=0, max=most)
    return size


def varying(*tensors: Tensor, dim: int = 1, min: int = 2, max: int = 1 + MAX_GAMMA) -> None:
    """Let one graph serve tensors of any size in this dimension from min to max: [B, T, ...].

    One range for every engine, whatever it drafts: graphs in Inductor's cache are stored with their range.
    """
    if "torch._dynamo" in sys.modules:  # where nothing compiles it is not even imported, which would take a second
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, dim, min=min, max=max)
