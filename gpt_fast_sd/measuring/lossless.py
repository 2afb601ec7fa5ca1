"""Whether two greedy outputs are equal, and where they are not, how close a call it was.

Shapes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_fast_sd.model import CausalSelf, Transformer

# A gap of logits that rounding may close: 4 steps of one near 10. In a cache of int8 a number between two steps may be
# rounded to the one or the other, and such a step is small beside what bf16 rounds away; one of fp8 is not.
NEAR_TIE = {"bf16": 0.25, "fp8": 0.25, "fp16": 0.03, "int8": 0.03, "fp32": 1e-4}


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs of a prompt part, and the tokens there, None where an output had ended.

    gap: how far the target's logit of the worse of the two is below its best one; None where nobody looked.
    """

    index: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float | None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two outputs are not the same, the end of the shorter one included; None if they are."""
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), None)


def differences(
    outputs: Iterable[tuple[int, Sequence[int], Sequence[int], Sequence[int]]],
    logits_after: Callable[[list[int]], Tensor],
    seconds: float = float("inf"),
) -> list[Difference]:
    """Where outputs, each (index, prompt, plain tokens, speculative tokens), part, and by how close a call.

    logits_after: the target's logits [V] after these tokens. Past so many seconds gaps are left unknown.
    """
    found, began = [], time.perf_counter()
    for index, prompt, plain, speculative in outputs:
        position = first_difference(plain, speculative)
        if position is None:
            continue
        a, b = (tokens[position] if position < len(tokens) else None for tokens in (plain, speculative))
        gap = None
        if time.perf_counter() - began < seconds:
            logits = logits_after([*prompt, *plain[:position]])
            gap = float(logits.max() - min(logits[token] for token in (a, b) if token is not None))
        found.append(Difference(index, position, a, b, gap))
    return found


def is_near_tie(gap: float, *dtypes: str) -> bool:
    """Whether rounding in the coarsest of these dtypes may decide between logits so far apart."""
    return gap <= max(NEAR_TIE[dtype] for dtype in dtypes)


@torch.inference_mode()
def logits_after(model: Transformer, ids: Sequence[int]) -> Tensor:
    """The logits [V] after T tokens, by one forward of the whole text in the model's own dtype.

    Engine.logits goes as the engine does, token by token, and takes a slot's prefilled keys away.
    """
    tokens = torch.tensor([list(ids)], device=model.embedding.weight.device)
    hidden = model.hidden(tokens, torch.arange(len(ids), device=tokens.device)[None], CausalSelf())[0, -1:]  # [1, D]
    logits: Tensor = model.output(hidden)[0].float()
    return logits
