"""int8 keys and values that lie in two planes of nibbles, and how they are read: whole, or as drafts do.

Raised by 128 a number is 16 times its upper nibble plus its lower one; numbers h and h + H / 2 share a byte, the second
in its upper half. Both planes are the number. A draft reads the upper plane, and takes the lower nibble to be 7.5, the
middle of what it may be: 16 * upper + 7.5 - 128. That of the last entries up to its query it reads, too: recent
tokens receive much attention, and are few.

Shapes: B batch rows, T tokens in this call, K kv heads, H head dim, M entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNREAD = 7.5  # what a lower nibble counts as that is not read


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """Both planes, uint8 [..., H // 2] each -> int8 [..., H]."""
    raised = torch.cat([(upper << 4) | (lower & 15), (upper & 0xF0) | (lower >> 4)], -1)
    return (raised ^ 0x80).view(torch.int8)


def drafted(upper: Tensor, lower: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """What a draft reads, exactly: uint8 [..., H // 2] each, bool [...] whose lower plane counts -> dtype [..., H]."""
    most = torch.cat([upper & 15, upper >> 4], -1).to(dtype) * 16 - 128
    least = torch.cat([lower & 15, lower >> 4], -1).to(dtype)
    return most + torch.where(whole[..., None], least, UNREAD)


def first_whole(pos: Tensor, tail: int) -> Tensor:
    """The first entry that drafts with queries at pos int64 [B, T] read whole: the last `tail` before the first are."""
    return pos[:, 0] - (tail - 1)  # [B]
