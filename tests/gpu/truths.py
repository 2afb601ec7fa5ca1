"""How far a result is from the truth, where rounding may decide: of attention, of the cut of a filter, of a selection.

Shapes: B batch rows, T tokens in this call, K kv heads, H head dim, R query rows that share a kv head, P pages,
        n pages chosen, V vocabulary.
"""

import torch
from torch import Tensor

from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32

# ||out - truth|| / ||truth||: fp32 sums of fp32 products; results and weights rounded to 11 and to 8 bits. A product in
# tf32, the mode a GPU takes if it is let, would be off by 3e-4.
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}


def miscut(scores: Tensor, top_k: Tensor, top_p: Tensor, cut: Tensor, last: Tensor) -> float:
    """The share of a row's mass that is kept or left by mistake, inf where the tokens kept are not the likeliest.

    fp32 scores [V] of at most 0 and where they are cut, see kernels.likeliest. The truth is a stable sort and sums in
    fp64.
    """
    place = torch.arange(len(scores))
    kept = (scores > cut) | ((scores == cut) & (place <= last))
    order = scores.sort(descending=True, stable=True).indices  # ties go to the first
    n_kept = int(kept.sum())
    if n_kept == 0 or not bool(kept[order[:n_kept]].all()):
        return float("inf")
    best_k = scores >= scores[order[int(top_k) - 1]]  # with all that are equal to the last of them
    mass = torch.where(best_k, scores.double().exp(), 0.0)[order].cumsum(0)
    wanted = int(best_k.sum())
    if top_p < 1:
        wanted = max(1, int((mass < top_p * mass[-1]).sum()) + 1)
    few, many = sorted((wanted, n_kept))
    if few == many:
        return 0.0
    # a token that is kept against top-k has mass of its own
    own = scores[order].double().exp()
    return float(own[few:many].sum() / mass[-1]) or float("inf")


def shortfall(q: Tensor, bounds: Tensor, n_closed: Tensor, chosen: Tensor) -> float:
    """By how much the worst page chosen is worse than the worst that should be, relative to the spread of scores.

    In fp64, since near ties may fall either way; inf where pages repeat, are out of order, or may not be chosen.
    q [B, N, T, H], bounds [B, K, P, 2H], chosen [B, K, n].
    """
    rows = q.double().unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)  # [B, K, R, H]
    worst = 0.0
    for b, closed in enumerate(n_closed.tolist()):
        for kv in range(bounds.shape[1]):
            high, low = bounds[b, kv, :closed].double().chunk(2, -1)  # [closed, H] each
            scores = rows[b, kv].clamp(min=0) @ high.T + rows[b, kv].clamp(max=0) @ low.T  # [R, closed]
            short = (scores - scores.amax(-1, keepdim=True)).amax(0) if closed else scores.new_empty(0)  # [closed]
            got = [page for page in chosen[b, kv].tolist() if page >= 0]
            n = min(closed, chosen.shape[-1])
            if len(set(got)) != n or got != sorted(got) or any(page >= closed for page in got):
                return float("inf")
            if n:
                span = float(short.max() - short.min()) or 1.0
                worst = max(worst, float(short.topk(n).values[-1] - short[got].min()) / span)
    return worst
