"""Which tokens top-k and top-p keep, without sorting the vocabulary: where to cut a row of scores, exactly.

The op has three bodies: NumPy's sort below, which a CPU runs and which sorts, but only values; on CUDA Triton
(triton/filters.py), which sorts nothing; a fake. Weights are whole numbers, so their sums are exact in any order:
every body cuts at the same token, and a row is cut alike whatever its batch.

Shapes: B rows of scores, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**44  # weight of the best token; sums of 2**18 tokens stay below 2**62
INFINITE = 0x7F800000  # key of a score of -inf; those of NaN are larger
LAST_KEY = 0x7FFFFFFF


@torch.library.custom_op("gpt_fast_sd::likeliest", mutates_args=())
def likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Where to cut each row: the lowest score that is kept, and the last place at which that score is kept.

    Top-k first: the top_k best and all that tie with the last of them. Then top-p of these: the smallest set whose
    weight is top_p of their sum, where ties go to the first. A weight is exp(score) in units of 2**-44, rounded, and
    top_p of a sum whole units; the best token stays. top_p at or above 1 cuts nothing. The result is unspecified for a
    row with a NaN, and for one whose best score is not 0.
    fp32 scores [B, V] of at most 0; int64 top_k [B], 1..V; fp64 top_p [B] -> cut fp32 [B], last int64 [B]
    """
    keys = scores.view(torch.int32) & LAST_KEY  # [B, V] the bits of -score: the better a token, the smaller
    everything = torch.full_like(keys[:, :1], INFINITE)
    cut, last = everything, torch.full_like(top_k[:, None], scores.shape[1] - 1)  # [B, 1]
    by_k, by_p = bool((top_k < scores.shape[1]).any()), bool((top_p < 1).any())
    if by_k or by_p:
        ordered = keys.clone()
        ordered.numpy().sort(-1)  # far faster than torch's, which also sorts places
        cut = ordered.gather(-1, top_k[:, None] - 1)
    if by_p:
        mass = torch.where(ordered <= cut, weights(ordered), 0).cumsum(-1)  # [B, V]
        total, taken = mass[:, -1:], (mass[:, -1:] * top_p[:, None]).long().clamp(min=1)
        at = torch.searchsorted(mass, taken).clamp(max=scores.shape[1] - 1)  # [B, 1] the last one kept
        key = ordered.gather(-1, at)
        nth = at - torch.searchsorted(ordered, key)  # how many equal ones are kept before it
        place = ((keys == key).cumsum(-1) <= nth).sum(-1, keepdim=True)
        by_p_too = (top_p[:, None] < 1) & (total > 0)
        cut, last = torch.where(by_p_too, key, cut), torch.where(by_p_too, place, last)
    return -cut[:, 0].view(torch.float32), last[:, 0]


def weights(keys: Tensor) -> Tensor:
    """exp(score) in whole units, from the keys of scores: int32 -> int64, the same shape; 0 for NaN."""
    weight = (keys.view(torch.float32).double().neg_().exp_() * UNIT).add_(0.5).nan_to_num_(0.0)
    return weight.long()


@likeliest.register_kernel("cuda")
def _likeliest_cuda(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    from ..triton import filters as filters_triton

    return filters_triton.likeliest(scores, top_k, top_p)


@likeliest.register_fake
def _likeliest_fake(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores[:, 0]), torch.empty_like(top_k)
