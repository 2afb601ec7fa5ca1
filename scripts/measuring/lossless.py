"""Whether two greedy outputs are equal, and if not, how close the logits were.

Shapes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_fast_sd.model import CausalSelf, Transformer

# Gap of logits near 10 that rounding may close: four units in the last place in 16 bits; in fp32 a hundred, which are
# the roundings of long sums. In an int8 cache a number between two steps may be rounded to either, and such a step is
# small compared with what bf16 rounds away; one of fp8 is not.
NEAR_TIE = {"bf16": 0.25, "fp8": 0.25, "fp16": 0.03, "int8": 0.03, "fp32": 1e-4}


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs of a prompt diverge, and the tokens there, None if an output had ended.

    gap: how far the target's logit of the worse of the two is below its best one; None if it was not computed.
    best: that best logit; 0 if it was not computed.
    """

    index: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float | None
    best: float = 0.0


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two outputs differ, including the end of the shorter one; None if they are equal."""
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), None)


def differences(
    outputs: Iterable[tuple[int, Sequence[int], Sequence[int], Sequence[int]]],
    logits_after: Callable[[list[int]], Tensor],
    seconds: float = float("inf"),
) -> list[Difference]:
    """Where outputs, each (index, prompt, plain tokens, speculative tokens), diverge, and the gap of the logits there.

    logits_after: the target's logits [V] after these tokens. After this many seconds gaps are left unknown.
    """
    found, began = [], time.perf_counter()
    for index, prompt, plain, speculative in outputs:
        position = first_difference(plain, speculative)
        if position is None:
            continue
        a, b = (tokens[position] if position < len(tokens) else None for tokens in (plain, speculative))
        gap, best = None, 0.0
        if time.perf_counter() - began < seconds:
            logits = logits_after([*prompt, *plain[:position]])
            best = float(logits.max())
            gap = best - float(min(logits[token] for token in (a, b) if token is not None))
        found.append(Difference(index, position, a, b, gap, best))
    return found


def near_tie(best: float, *dtypes: str) -> float:
    """The gap that rounding in the coarsest of these dtypes may close below a logit: the last place grows with it."""
    widest = max(NEAR_TIE[dtype] for dtype in dtypes)
    return widest * 2.0 ** max(0, math.frexp(best)[1] - 4)  # frexp: 4 for 8 to 16


def is_near_tie(gap: float, *dtypes: str, best: float = 0.0) -> bool:
    """Whether rounding in the coarsest of these dtypes may decide between logits so far apart, of which one is best."""
    return gap <= near_tie(best, *dtypes)


@torch.inference_mode()
def logits_in_fp32(model: Transformer, ids: Sequence[int]) -> Tensor | None:
    """The logits [V] after T tokens, by a copy of the model in fp32, which is made for this call.

    None for quantized weights, of which there is no such copy.
    """
    device, weights = model.embedding.weight.device, model.state_dict()
    with device:
        twin = Transformer(model.config).float()
    if twin.state_dict().keys() != weights.keys():
        return None
    twin.load_state_dict(weights)
    return logits_after(twin.eval(), ids)


@torch.inference_mode()
def logits_after(model: Transformer, ids: Sequence[int]) -> Tensor:
    """The logits [V] after T tokens, by one forward of the whole text in the model's own dtype.

    Engine.logits works like the engine, token by token, and discards a slot's prefilled keys.
    """
    tokens = torch.tensor([list(ids)], device=model.embedding.weight.device)
    hidden = model.hidden(tokens, torch.arange(len(ids), device=tokens.device)[None], CausalSelf())[0, -1:]  # [1, D]
    logits: Tensor = model.output(hidden)[0].float()
    return logits
