"""The one seam: what attends is an argument. `KV` is the protocol, `KVCache` hands out the layers that it reads.

Shapes: B batch rows ("slots"), T tokens in this call, S cache capacity, L layers, N query heads, K kv heads,
        H head dim. S is the capacity and a spare split.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .buffers import zeros
from .config import ModelConfig

SPLIT = 256  # positions; the capacity, and the part of it that is in view, are whole splits


class KV(Protocol):
    """Whatever can store new keys and values and attend for the queries that come with them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v at pos, then attend: q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]."""
        ...


class CausalSelf:
    """Attend causally within this call and remember nothing: the logits of a whole text at once."""

    def __init__(self, windows: Sequence[int] = ()) -> None:
        """windows: ModelConfig.windows of the model; (): every layer sees all."""
        self.windows = windows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] (unused: the call's order is causal) -> [B, N, T, H]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [B, N, T, H]
        if self.windows and 0 < self.windows[layer] < q.shape[2]:
            causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
            return F.scaled_dot_product_attention(q, k, v, causal.triu(1 - self.windows[layer]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def as_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., H] as int8 with a scale for each [...], fp16: x is about int8 * scale, at most half a scale off.

    What is divided by is the scale as it is stored, so that its own rounding costs nothing. A vector of zeros has one,
    too; one of more than fp16 can scale, 127 * 65504, is cut off there.
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(LEAST, MOST) / 127  # [...]
    bits = scale.view(torch.int32)  # rounded to fp16 by hand: of .half().float() a compiler keeps neither
    rounded = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
    # what fp16 has only whole steps for is rounded up: a smaller scale would cut the largest numbers off
    scale = torch.where(scale >= NORMAL, rounded, (scale / STEP).ceil() * STEP)  # of a NaN too: its bits would wrap
    return (wide / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale.half()


LEAST, MOST = 1e-5, 127 * 65504.0  # largest numbers of a vector whose scale fp16 can hold
NORMAL, STEP = 2.0**-14, 2.0**-24  # fp16's smallest number of full precision, and its steps below that


def as_planes(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 x [..., H] as two planes of nibbles, the upper and the lower ones: uint8 [..., H // 2] each.

    Raised by 128 a number is 16 times its upper nibble and its lower one. Two numbers H / 2 apart share a byte, the
    second in its upper half: whoever reads a plane has both halves of a head side by side without shuffling.
    """
    first, second = (x.view(torch.uint8) ^ 0x80).chunk(2, -1)  # [..., H // 2]
    return (first >> 4) | (second & 0xF0), (first & 15) | (second << 4)


UNREAD = 7.5  # what a lower nibble counts as that a draft does not read: the middle of what it may be


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """Both planes, uint8 [..., H // 2] each -> int8 [..., H]."""
    raised = torch.cat([(upper << 4) | (lower & 15), (upper & 0xF0) | (lower >> 4)], -1)
    return (raised ^ 0x80).view(torch.int8)


def drafted(upper: Tensor, lower: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """What a draft reads, exactly: uint8 [..., H // 2] each, bool [...] whose lower plane counts -> dtype [..., H]."""
    most = torch.cat([upper & 15, upper >> 4], -1).to(dtype) * 16 - 128
    least = torch.cat([lower & 15, lower >> 4], -1).to(dtype)
    return most + torch.where(whole[..., None], least, UNREAD)


class Entries(NamedTuple):
    """Entries of a layer as a query reads them: what one stands for is its numbers times its scale."""

    k: Tensor  # [B, K, M, H]
    v: Tensor
    k_scale: Tensor | None  # [B, K, M], where there are scales
    v_scale: Tensor | None


@dataclass(frozen=True)
class CacheFormat:
    """How a cache holds keys and values; all that knows what the bytes of an entry mean, but for kernels.

    A key or value [H] is one to three parts: its numbers; a scale, by its largest number, stored alone, whatever
    stands beside it; and, where the numbers lie in planes of nibbles (see `as_planes`), the lower one of these.
    """

    name: str
    dtype: torch.dtype  # of the numbers
    scaled: bool = False  # whether each token of a slot and kv head has a scale for its key and one for its value
    planes: bool = False  # both together are the same numbers; with the same scales the upper one is 4 bits of each

    def parts(self, head_dim: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each part of a key or value."""
        scales = [((), torch.float16)] if self.scaled else []
        if not self.planes:
            return [((head_dim,), self.dtype), *scales]
        return [((head_dim // 2,), torch.uint8), *scales, ((head_dim // 2,), torch.uint8)]

    def write(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., H] -> its parts, as they are stored."""
        if not self.scaled:
            return (x.to(self.dtype),)
        numbers, scale = as_int8(x)
        if not self.planes:
            return numbers, scale
        upper, lower = as_planes(numbers)
        return upper, scale, lower

    def read(
        self, parts: Sequence[Tensor], whole: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]:
        """Parts -> numbers [..., H], and scales [...] if there are any: what is stored is their product.

        whole: bool [...], which entries a draft reads the lower plane of, as numbers of dtype then; None: all.
        """
        scale = parts[1] if self.scaled else None
        if not self.planes:
            return parts[0], scale
        upper, lower = parts[0], parts[2]
        return joined(upper, lower) if whole is None else drafted(upper, lower, whole, dtype), scale

    def element_bytes(self, head_dim: int, *, upper: bool = False) -> float:
        """Bytes of each element of a key or value, its share of the scale included. upper: of the upper plane alone."""
        size = self.dtype.itemsize / 2 if upper else self.dtype.itemsize
        return size + (torch.float16.itemsize / head_dim if self.scaled else 0.0)

    @property
    def in_bytes(self) -> CacheFormat:
        """Return the format of the same numbers in bytes, not in planes."""
        return FORMATS["int8"] if self.planes else self


FORMATS = {
    each.name: each
    for each in (
        CacheFormat("fp32", torch.float32),
        CacheFormat("bf16", torch.bfloat16),
        CacheFormat("fp16", torch.float16),
        CacheFormat("int8", torch.int8, scaled=True),
        CacheFormat("planes", torch.int8, scaled=True, planes=True),
    )
}


@dataclass(frozen=True)
class CacheLayer:
    """The keys and values of one layer, B slots, in a format."""

    format: CacheFormat
    k: Tensor  # [B, K, S, H]; of planes the upper one, uint8 [B, K, S, H // 2]
    v: Tensor
    k_scale: Tensor | None = None  # fp16 [B, K, S], where there are scales
    v_scale: Tensor | None = None
    k_low: Tensor | None = None  # the lower planes, where there are planes
    v_low: Tensor | None = None
    # of planes: how many entries, up to and with a query's own, it reads whole; 0: all of them
    tail: int = field(default=0, kw_only=True)
    # whether 8 bits are too few for queries, too, if these are to be rounded
    fine: bool = field(default=False, kw_only=True)
    # of the model's layer: how many entries, up to and with a query's own, it sees; 0: all of them
    window: int = field(default=0, kw_only=True)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every buffer of the layer, each [B, K, S, ...], by turns of keys and of values; made from these again."""
        others = self.k_scale, self.v_scale, self.k_low, self.v_low
        return self.k, self.v, *(x for x in others if x is not None)

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The buffers as kernels take them: six, None where the format has no such part."""
        return self.k, self.v, self.k_scale, self.v_scale, self.k_low, self.v_low

    @property
    def head_dim(self) -> int:
        """H."""
        return self.k.shape[3] * (2 if self.format.planes else 1)

    @property
    def capacity(self) -> int:
        """Positions that can ever be in view."""
        return self.k.shape[2] - SPLIT

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one slot."""
        return _bytes_of_a_token(self.buffers)

    @cached_property
    def bytes_per_entry(self) -> int:
        """Bytes that reading an entry takes that lies before the tail; without one, those of a position."""
        return _bytes_of_a_token(self.buffers[:4]) if self.tail else self.bytes_per_token

    def bytes_read(self, n: int) -> int:
        """Bytes of n entries of one slot that a query reads, at most a window, those of the tail among them."""
        n = min(n, self.window or n)
        return n * self.bytes_per_entry + min(n, self.tail) * (self.bytes_per_token - self.bytes_per_entry)

    def slot(self, slot: int) -> CacheLayer:
        """One slot as a batch of one, sharing memory."""
        return self._of(x[slot : slot + 1] for x in self.buffers)

    def of_slots(self, slots: Tensor, n: int) -> CacheLayer:
        """A copy of the first n entries of some slots, int64 [W]."""
        return self._of(x[:, :, :n][slots] for x in self.buffers)

    def _of(self, buffers: Iterable[Tensor]) -> CacheLayer:
        return CacheLayer(self.format, *buffers, tail=self.tail, fine=self.fine, window=self.window)

    def first(self, n: int, pos: Tensor, dtype: torch.dtype) -> Entries:
        """The first n entries as queries of this dtype at pos [B, T] read them."""
        place = torch.arange(n, device=pos.device)[None, None]  # [1, 1, n]
        return self._entries(lambda x: x.narrow(2, 0, n), place, pos, dtype)

    def at(self, index: Tensor, pos: Tensor, dtype: torch.dtype) -> Entries:
        """The entries in index int64 [B, K, M] as queries of this dtype at pos [B, T] read them."""

        def gathered(x: Tensor) -> Tensor:
            return x.gather(2, index if x.dim() == 3 else index[..., None].expand(-1, -1, -1, x.shape[3]))

        return self._entries(gathered, index, pos, dtype)

    def _entries(self, picked: Callable[[Tensor], Tensor], place: Tensor, pos: Tensor, dtype: torch.dtype) -> Entries:
        whole = place >= (pos[:, 0] - (self.tail - 1))[:, None, None] if self.tail else None  # [B, 1 or K, M]
        parts = [picked(x) for x in self.buffers]
        (k, k_scale), (v, v_scale) = (self.format.read(parts[of::2], whole, dtype) for of in (0, 1))
        return Entries(k, v, k_scale, v_scale)

    def store(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [B, K, T, H] at each row's positions pos [B, T]."""
        row = torch.arange(pos.shape[0], device=pos.device)[:, None]  # [B, 1]
        for buffers, new in ((self.buffers[::2], k), (self.buffers[1::2], v)):
            parts = self.format.write(new.transpose(1, 2))  # [B, T, K, ...] each
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[row, :, pos] = part


def _bytes_of_a_token(buffers: Iterable[Tensor]) -> int:
    return sum(x.shape[1] * math.prod(x.shape[3:]) * x.element_size() for x in buffers)


class KVCache:
    """Static keys and values of B slots; seq_len [B] is the only record of what is committed, the rest is scratch.

    One [B, K, S, H] buffer per layer, not one [L, B, K, S, H]: a compiled step that writes into slices of a single
    buffer makes Inductor copy all of it (measured on CPU: 288 ms per step against 13 ms).
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_seq_len: int, *, format: CacheFormat, device: torch.device
    ) -> None:
        """max_seq_len: tokens of a slot; the capacity is that in whole splits."""
        assert not format.planes or config.head_dim % 2 == 0
        self.format, self.max_seq_len, self.capacity = format, max_seq_len, self.splits(max_seq_len) * SPLIT
        # one spare split that is never in view: a view of the whole buffer is contiguous, which would be another graph
        entries = batch_size, config.n_kv_heads, self.capacity + SPLIT
        # where keys have biases, what makes them fit for 8 bits makes queries need more
        fine = format.scaled and config.qkv_bias and not config.qk_norm

        def layer(window: int) -> CacheLayer:
            twice = [part for part in format.parts(config.head_dim) for _ in "kv"]
            buffers = (zeros(*entries, *shape, dtype=dtype, device=device) for shape, dtype in twice)
            # no text here is longer than a window that is dropped
            return CacheLayer(format, *buffers, fine=fine, window=window if window < self.capacity else 0)

        self.layers = [layer(window) for window in config.windows]
        self.seq_len = torch.zeros(batch_size, dtype=torch.int64, device=device)
        # whether a reader loads what is past a row's last entry, if only to mask it; None: nobody has said
        self.clears: bool | None = None

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

    def bytes_read(self, n: int) -> int:
        """Bytes of n entries of one slot over all layers that a query reads, those of the tail among them."""
        return sum(layer.bytes_read(n) for layer in self.layers)

    def with_tail(self, tail: int) -> KVCache:
        """Share planes and seq_len as drafts read them: the last `tail` entries whole, of others the upper plane."""
        assert self.format.planes
        other = copy.copy(self)
        other.layers = [replace(layer, tail=tail) for layer in self.layers]
        return other

    def slot(self, slot: int) -> list[CacheLayer]:
        """The layers of one slot as a batch of one, sharing memory."""
        return [layer.slot(slot) for layer in self.layers]

    def first_layers(self, n: int) -> KVCache:
        """The first n layers alone, sharing their buffers and seq_len."""
        first = copy.copy(self)
        first.layers = self.layers[:n]
        return first

    def vacate(self, slot: int, keep: int = 0, end: int | None = None) -> None:
        """Forget a slot except its first `keep` entries: no value after them, not even a NaN, reaches the next user.

        They are zeroed, or left where no reader loads what is past a row's end; a KV of your own must not, either.
        end: nothing was written from there on.
        """
        self.seq_len[slot] = 0
        for buffer in () if self.clears is False else self.buffers:
            buffer[slot, :, keep:end].zero_()

    def copy(self, source: int, slot: int, n: int) -> None:
        """Copy the first n entries of one slot to another."""
        for buffer in self.buffers:
            buffer[slot, :, :n] = buffer[source, :, :n]

    @staticmethod
    def splits(n_keys: int) -> int:
        """Splits to have in view for the first n_keys positions: at least two, as a size of 1 would compile apart."""
        return max(2, -(-n_keys // SPLIT))
