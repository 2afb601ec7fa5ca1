"""What runs in the places of the core's functions: they themselves, or in an engine faster bodies, where these serve.

The functions named here are the truth. A body has the signature and keeps the promises of the one that it stands for;
fast/choose.py puts them in, one by one, as long as what they stand for reads as it did when they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gpt_fast_sd.model import KV, Transformer

from . import acceptance, attention, sampling

Body = Callable[..., Any]


def hidden(model: Transformer, tokens: Tensor, pos: Tensor, kv: KV) -> Tensor:
    """The model's normed final states: tokens, pos [B, T] -> [B, T, D]."""
    return model.hidden(tokens, pos, kv)


def logits(model: Transformer, tokens: Tensor, pos: Tensor, kv: KV) -> Tensor:
    """The model's logits after each token: tokens, pos [B, T] -> [B, T, V]."""
    out: Tensor = model(tokens, pos, kv)
    return out


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """The table of bodies, made when an engine is built; Bodies() is the core as its modules have it just then."""

    hidden: Body = hidden
    logits: Body = logits
    dense: Body = field(default_factory=lambda: attention.dense)
    dense_of_slots: Body = field(default_factory=lambda: attention.dense_of_slots)
    listed: Body = field(default_factory=lambda: attention.listed)
    probabilities: Body = field(default_factory=lambda: sampling.probabilities)
    draw: Body = field(default_factory=lambda: sampling.draw)
    uniform: Body = field(default_factory=lambda: sampling.uniform)
    verify_greedy: Body = field(default_factory=lambda: acceptance.verify_greedy)
    judge_sampled: Body = field(default_factory=lambda: acceptance.judge_sampled)
    commit: Body = field(default_factory=lambda: acceptance.commit)
    others: Mapping[Body, Body] = field(default_factory=dict)  # of functions that policies have
    names: tuple[tuple[str, str], ...] = ()  # what is not the core's own: a part of the work, and who does it

    def of(self, function: Body) -> Body:
        """What runs in the place of a policy's function: a body, or the function itself."""
        return self.others.get(function, function)

    @property
    def about(self) -> str:
        """Who does what, in a line for users: "layers: C++, one call; attention: C++, avx2"."""
        return "; ".join(f"{part}: {who}" for part, who in self.names) or "the core as it is written"

    @property
    def fused(self) -> bool:
        """Whether one call runs all layers: then the bits of a row's results depend on that row alone."""
        return self.hidden is not hidden

    @property
    def reads_own_keys(self) -> bool:
        """Whether attention reads each row's own keys only, not as many as the longest row has in view."""
        return self.dense is not attention.dense


CORE = Bodies()  # the core as it is written
