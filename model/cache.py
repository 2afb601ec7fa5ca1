"""The one seam: what attends is an argument. `KV` is the protocol, `KVCache` hands out the layers that it reads.

Shapes: B batch rows ("slots"), T tokens in this call, S cache capacity, L layers, N query heads, K kv heads,
        H head dim. S is the capacity and a spare split.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig

SPLIT = 256  # positions; the capacity, and the part of it that is in view, are whole splits


class KV(Protocol):
    """Whatever can store new keys and values and attend for the queries that come with them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        ...


class CausalSelf:
    """Attend causally within this call and remember nothing: the logits of a whole text at once."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] (unused: the call's order is causal) -> [B, N, T, H]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [B, N, T, H]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def as_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., H] as int8 with a scale for each [...], fp16: x is about int8 * scale, at most half a scale off.

    What is divided by is the scale as it is stored, so that its own rounding costs nothing. A vector of zeros has one,
    too; one of more than fp16 can scale, 127 * 65504, is cut off there.
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(LEAST, MOST) / 127  # [...]
    # what fp16 has only whole steps for is rounded up: a smaller scale would cut the largest numbers off
    scale = torch.where(scale < NORMAL, (scale / STEP).ceil() * STEP, scale).half()
    return (wide / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale


LEAST, MOST = 1e-5, 127 * 65504.0  # largest numbers of a vector whose scale fp16 can hold
NORMAL, STEP = 2.0**-14, 2.0**-24  # fp16's smallest number of full precision, and its steps below that
FLOAT8 = torch.float8_e4m3fn  # without a scale


@dataclass(frozen=True)
class CacheLayer:
    """The keys and values of one layer, B slots: how they are stored, and how many bytes they take.

    As int8 each token of a slot and kv head has a scale of its own, by its largest number, for its key and one for its
    value: it is stored alone, whatever stands beside it.
    """

    k: Tensor  # [B, K, S, H]
    v: Tensor
    k_scale: Tensor | None = None  # fp16 [B, K, S], of int8 alone
    v_scale: Tensor | None = None

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every buffer of the layer, each [B, K, S, ...]; CacheLayer takes them in this order."""
        scales = () if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)
        return self.k, self.v, *scales

    @property
    def quantized(self) -> bool:
        """Whether keys and values are of fewer bits than queries can be."""
        return self.k.dtype.itemsize == 1

    @property
    def capacity(self) -> int:
        """Positions that can ever be in view."""
        return self.k.shape[2] - SPLIT

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one slot."""
        return sum(x.shape[1] * math.prod(x.shape[3:]) * x.element_size() for x in self.buffers)

    def slot(self, slot: int) -> CacheLayer:
        """One slot as a batch of one, sharing memory."""
        return CacheLayer(*(x[slot : slot + 1] for x in self.buffers))

    def store(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [B, K, T, H] at each row's positions pos [B, T]."""
        row = torch.arange(pos.shape[0], device=pos.device)[:, None]  # [B, 1]
        for buffer, scales, new in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            new = new.transpose(1, 2)  # [B, T, K, H]
            if scales is not None:
                new, scales[row, :, pos] = as_int8(new)
            elif buffer.dtype == FLOAT8:
                most = torch.finfo(FLOAT8).max
                new = new.clamp(-most, most)  # what is larger some casts make a NaN of
            buffer[row, :, pos] = new.to(buffer.dtype)


class KVCache:
    """Static keys and values of B slots; seq_len [B] is the only record of what is committed, the rest is scratch.

    One [B, K, S, H] buffer per layer, not one [L, B, K, S, H]: a compiled step that writes into slices of a single
    buffer makes Inductor copy all of it (measured on CPU: 288 ms per step against 13 ms).
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_seq_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.max_seq_len, self.capacity = dtype, max_seq_len, self.splits(max_seq_len) * SPLIT
        # one spare split that is never in view: a view of the whole buffer is contiguous, which would be another graph
        entries = batch_size, config.n_kv_heads, self.capacity + SPLIT

        def layer() -> CacheLayer:
            k, v = (torch.zeros(*entries, config.head_dim, dtype=dtype, device=device) for _ in range(2))
            if dtype != torch.int8:
                return CacheLayer(k, v)
            return CacheLayer(k, v, *(torch.zeros(entries, dtype=torch.float16, device=device) for _ in range(2)))

        self.layers = [layer() for _ in range(config.n_layers)]
        self.seq_len = torch.zeros(batch_size, dtype=torch.int64, device=device)

    @staticmethod
    def element_bytes(dtype: torch.dtype, head_dim: int) -> float:
        """Bytes of each element of a key or value, its share of the scale included."""
        return dtype.itemsize + (torch.float16.itemsize / head_dim if dtype == torch.int8 else 0.0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, B, K)"""
        return len(self.layers), *self.layers[0].k.shape[:2]

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer, layer by layer, each [B, K, S, ...]."""
        return [buffer for layer in self.layers for buffer in layer.buffers]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one slot over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def slot(self, slot: int) -> list[CacheLayer]:
        """The layers of one slot as a batch of one, sharing memory."""
        return [layer.slot(slot) for layer in self.layers]

    def first_layers(self, n: int) -> KVCache:
        """The first n layers alone, sharing their buffers and seq_len."""
        first = copy.copy(self)
        first.layers = self.layers[:n]
        return first

    def vacate(self, slot: int, keep: int = 0) -> None:
        """Forget a slot except its first `keep` entries: no value after them, not even a NaN, reaches the next user."""
        self.seq_len[slot] = 0
        for buffer in self.buffers:
            buffer[slot, :, keep:].zero_()

    def copy(self, source: int, slot: int, n: int) -> None:
        """Copy the first n entries of one slot to another."""
        for buffer in self.buffers:
            buffer[slot, :, :n] = buffer[source, :, :n]

    @staticmethod
    def splits(n_keys: int) -> int:
        """Splits to have in view for the first n_keys positions: at least two, as a size of 1 would compile apart."""
        return max(2, -(-n_keys // SPLIT))
