"""Callables of users that change the target's logits before drafts are judged by them: constraints, biases, penalties.

Lossless with every policy: what is emitted follows the processed distribution exactly, whatever was drafted. A draft
that it forbids is refused, so drafts are kept less often.

Shapes: B slots, T places of a round, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..draft import Draft
from ..state import BatchState
from .requests import Request

Processor = Callable[[Tensor, Tensor], Tensor]


def process(state: BatchState, logits: Tensor, draft: Draft, live: Sequence[tuple[int, Request]]) -> None:
    """Change logits [B, T, V] in place, for the rows that bring a processor, at the places that may be reached.

    The host reads what was drafted. A place after a draft that cannot be kept, or that ends the text, is not asked for.
    An error, also an exit, is the request's only if its text gets to that place: see Request.failed.
    """
    most = torch.minimum(torch.minimum(draft.count, state.most_drafts), state.remaining - 1).clamp(min=0).tolist()
    for slot, request in live:
        processor, request.failed = request.params.processor, None
        if processor is None:
            continue
        n = int(state.seq_len[slot]) + 1  # what was committed, and the pending token
        ids = torch.cat([state.history[slot, :n], draft.tokens[slot]])
        for i in range(most[slot] + 1):
            try:
                scores = logits[slot, i] = processed(processor, ids[None, : n + i], logits[slot, i, None])
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):  # which is of nobody's processor
                    raise
                request.failed = i, error
                break
            if i < most[slot]:
                token = int(ids[n + i])
                chosen = request.params.temperature > 0 or int(scores.argmax()) == token
                if not chosen or request.ends_at(token) or float(scores[token]) == float("-inf"):
                    break


def processed(processor: Processor, ids: Tensor, scores: Tensor) -> Tensor:
    """The row [V] that it makes of scores fp32 [1, V] after ids int64 [1, n]; ValueError if that is no distribution.

    It is given copies, and runs as in transformers' generate: without gradients, unless it asks for them.
    """
    with torch.inference_mode(False), torch.no_grad():
        found = processor(ids.clone(), scores.clone())
    if not (isinstance(found, Tensor) and found.shape == scores.shape and found.dtype.is_floating_point):
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.80}"
        raise ValueError(f"a processor must return floating-point logits {list(scores.shape)}, got {got}")
    found = found.detach().to(scores)  # before it is judged: fp32 holds less than fp64
    if bool(found.isnan().any()) or bool((found == float("inf")).any()):
        raise ValueError("a processor returned NaN or infinity: logits are numbers, -inf forbids a token")
    if bool((found == float("-inf")).all()):
        raise ValueError("a processor forbids every token: one at least must stay")
    return found[0]
