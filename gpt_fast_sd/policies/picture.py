"""A picture of a policy: which stretches of a text a draft step reads, as lines of text.

    mask = policy.positions_read(pos)  # [L, B, K, S]
    print(picture(mask[:, slot, :, : pos[slot] + 1]))

Shapes: L layers, K kv heads, S positions, W stretches.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHADES = " ░▒▓█"  # none of a stretch, under a third, under two thirds, less than all, all


def picture(mask: Tensor, width: int = 64) -> str:
    """One line per layer and kv head: the share of each of `width` stretches that is read. mask bool [L, K, S].

    Only a stretch that is not read at all is blank, and only one that is read completely is solid.
    """
    n_layers, n_kv, n = mask.shape
    width = min(width, n)
    edges = torch.arange(width + 1) * n // width  # [W + 1]
    counts = torch.stack([mask[..., a:b].sum(-1) for a, b in edges.unfold(0, 2, 1).tolist()], -1).cpu()  # [L, K, W]
    whole = edges.diff()  # [W]
    shade = torch.where(counts == 0, 0, torch.where(counts == whole, 4, 1 + 3 * counts // whole))
    lines = [f"{'':15}0{n - 1:>{width + 1},}"]
    for layer in range(n_layers):
        for head in range(n_kv):
            stretches = "".join(SHADES[i] for i in shade[layer, head].tolist())
            lines.append(f"layer {layer:<2} head {head:<2}|{stretches}| {int(counts[layer, head].sum()):,}")
    return "\n".join(lines)
