"""OpenAI's penalties and biases of tokens as a processor of logits, see SamplingParams.processor.

Shapes: n tokens of a text, V vocabulary.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

MOST_PENALTY, MOST_BIAS = 2, 100  # as in OpenAI's API


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """logit + logit_bias - frequency_penalty * c - presence_penalty * (c > 0), where a token was emitted c times.

    What was emitted is the text behind the prompt. Penalties are from -2 to 2; logit_bias maps token ids, as numbers or
    in decimal, to what is added, from -100 to 100. It may be the processor of any number of requests; called by another
    processor it must be told n_prompt, the tokens of the prompt.
    """

    NAMES: ClassVar = ("presence_penalty", "frequency_penalty", "logit_bias")

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[Any, float] = field(default_factory=dict, hash=False)
    n_prompt: int | None = None
    _held: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.NAMES[:2]:
            object.__setattr__(self, name, _number(name, getattr(self, name), MOST_PENALTY))
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}")
        bias = dict[int, float]()
        for said, value in self.logit_bias.items():
            if (token := _id_of(said)) in bias:
                raise ValueError(f"logit_bias has token {token} twice, as a number or in decimal")
            bias[token] = _number(f"logit_bias of token {token}", value, MOST_BIAS)
        if self.n_prompt is not None and (type(self.n_prompt) is not int or self.n_prompt < 0):
            raise ValueError(f"n_prompt must be a whole number of at least 0, or None, got {self.n_prompt!r:.80}")
        object.__setattr__(self, "logit_bias", bias)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Penalties | None:
        """Those that a request asks for by name, where null is nothing; None if they change nothing."""
        found = cls(**{name: fields[name] for name in cls.NAMES if fields.get(name) is not None})
        return None if found == cls() else found

    def behind(self, prompt: Sequence[int], vocab_size: int) -> Penalties:
        """These, of what follows this prompt; ValueError for a bias of a token that there is not."""
        if (last := max(self.logit_bias, default=0)) >= vocab_size:
            raise ValueError(f"logit_bias holds token id {last}, the vocabulary goes from 0 to {vocab_size - 1}")
        return self if self.n_prompt is not None else replace(self, n_prompt=len(prompt))

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """ids int64 [1, n], logits fp32 [1, V] -> fp32 [1, V]"""
        if self.n_prompt is None:
            raise ValueError("Penalties count what follows a prompt: another processor must give them n_prompt")
        counts = ids[0, self.n_prompt :].bincount(minlength=logits.shape[-1])  # [V]
        logits = logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        if (on := logits.device) not in self._held:  # once, as this is called for each place of each round
            values = torch.tensor(list(self.logit_bias.values()), dtype=logits.dtype, device=on)
            self._held[on] = torch.tensor(list(self.logit_bias), dtype=torch.int64, device=on), values
        biased, bias = self._held[on]
        logits[0, biased] += bias
        return logits


def _number(name: str, value: Any, most: int) -> float:
    """One of Python or numpy; ValueError unless it is from -most to most."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not -most <= value <= most:
        raise ValueError(f"{name} must be a number from -{most} to {most}, got {value!r:.80}")
    return float(value)


def _id_of(token: object) -> int:
    """A token id, of which JSON makes a text."""
    if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 20:
        token = int(token)
    if not isinstance(token, numbers.Integral) or isinstance(token, bool) or token < 0:
        raise ValueError(f"logit_bias must map token ids to numbers, got the token {token!r:.80}")
    return int(token)
