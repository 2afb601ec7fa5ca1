"""What a seed draws for a kernel: tensors between guards, poison in all that nobody may read, and attention in fp64.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim.
"""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.model import FORMATS, CacheLayer
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32, NAN
from tests.gpt_fast_sd.fast.selected import INF

GUARD = 1024  # numbers before and after every tensor
ROUNDING = 2.0**-24  # of fp32
HEAD_DIMS, GROUPS, ARCHS = [64, 80, 96, 128, 256, 8], [1, 3, 4, 8, 8], [80, 86, 89, 90, 100, 120]


class Draw:
    """Choices of a seed, which are printed. What is given to a kernel, or made by its launcher, lies between guards."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        self.rng, self.patch = random.Random(name), patch
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(60))
        self.poison = self.one("poison", [NAN, INF, -INF, 6e4])
        self.unwritten = self.one("unwritten", [NAN, INF])  # a maximum leaves a NaN out
        self.kept: list[tuple[Tensor, Tensor]] = []  # memory that a kernel may not change, and what it is to hold
        patch.setattr(torch, "empty", self.empty)

    def one(self, name: str, values: Iterable[Any]) -> Any:
        value = self.rng.choice(list(values))
        print(f"{name}={value}", end=" ")
        return value

    def size(self, name: str, step: int, most: int, least: int = 1) -> int:
        """The smallest, the largest, a multiple of step or one beside it, or any."""
        edge = step * self.rng.randint(1, max(1, most // step))
        size: int = self.one(name, [least, most, edge - 1, edge, edge + 1, self.rng.randint(least, most)])
        return min(max(size, least), most)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from low to high."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def pads(self, n: int) -> list[tuple[int, int]]:
        return [(self.rng.randint(0, 1), self.rng.randint(0, 1)) for _ in range(n)]

    def keep(self, x: Tensor, n_dense: int, fill: float, pads: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """x, its last n_dense dims dense, inside a larger tensor that is full of `fill`."""
        pads = self.pads(x.dim() - n_dense) if pads is None else pads
        shape = [n + sum(pad) for n, pad in zip(x.shape, pads, strict=False)] + [*x.shape[len(pads) :]]
        flat = torch.full((math.prod(shape) + 2 * GUARD,), fill, dtype=x.dtype)
        view = flat[GUARD : len(flat) - GUARD].view(shape)
        for dim, (before, _) in enumerate(pads):
            view = view.narrow(dim, before, x.shape[dim])
        view.copy_(x)
        self.kept.append((flat, flat.clone()))
        return view

    def keep_as(self, x: Tensor, n_dense: int, fill: float, expected: Tensor) -> Tensor:
        """The same of an x that a kernel is to change to this, and to nothing else."""
        view = self.keep(x, n_dense, fill)
        self.kept[-1][1].as_strided(view.shape, view.stride(), view.storage_offset()).copy_(expected)
        return view

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: object = None) -> Tensor:
        """torch.empty with guards, full of what is no result."""
        n, fill = math.prod(shape), self.unwritten if dtype.is_floating_point else torch.iinfo(dtype).min // 3
        flat = torch.full((n + 2 * GUARD,), fill, dtype=dtype)
        self.kept += [(end, end.clone()) for end in (flat[:GUARD], flat[GUARD + n :])]
        return flat[GUARD : GUARD + n].view(tuple(shape))

    def assert_kept(self) -> None:
        for memory, expected in self.kept:
            changed = memory.view(torch.uint8) != expected.view(torch.uint8)
            assert not changed.any(), (memory.dtype, len(memory), changed.nonzero()[:4].tolist())


class Asked:
    """Queries over a layer that is read up to n_keys, and what fp64 makes of them."""

    def __init__(self, draw: Draw, *, many: bool = False, most_keys: int = 520) -> None:
        """many: tokens, as a chunk of a prompt has, and not up to 9."""
        self.draw = d = draw
        self.dtype = d.one("dtype", [BF16, FP16, FP32])
        self.held = d.one("held", [None, None, "int8", "planes"])
        self.tail = d.one("tail", [0, 1, 20, 300]) if self.held == "planes" else 0
        self.head_dim, group = d.one("H", HEAD_DIMS), d.one("G", GROUPS)
        n_tokens = d.size("T", 128 // group, 2 * 128 // group + 3) if many else d.one("T", range(1, 10))
        # where keys are split a program merges each row, so there are not many of all at once
        self.n_kv = d.one("K", range(1, 1 + max(1, min(3, (300 if many else 150) // (group * n_tokens)))))
        n_batch = d.one("B", range(1, 1 + max(1, min(4, (500 if many else 300) // (group * n_tokens * self.n_kv)))))
        self.n_keys, self.arch = d.size("n_keys", 64, most_keys), d.one("arch", ARCHS)
        self.shape = n_batch, self.n_kv, self.n_keys + d.one("spare", [0, 1, 64])  # B, K, S
        pos = torch.tensor([self.row(n_tokens) for _ in range(n_batch)])  # [B, T]
        if not self.tail and d.one("any order", [False, False, True]):
            pos = pos[:, d.rng.sample(range(n_tokens), n_tokens)]
        print(f"pos={(pos if n_tokens < 10 else pos[:, [0, -1]]).tolist()}", end=" ")
        by_token = d.one("pos by token", [True, False])
        kept = d.keep(pos.t() if by_token else pos, 0, self.n_keys - 1)
        self.pos = kept.t() if by_token else kept
        q = d.normal(n_batch, self.n_kv * group, n_tokens, self.head_dim) * d.one("sharp", [1, 1, 0, 8, 40])
        q.transpose(1, 2)[pos >= self.n_keys] = d.poison  # they read nothing, whatever they are
        order = d.rng.sample(range(3), 3)  # of B, N, T in memory
        kept = d.keep(q.to(self.dtype).permute(*order, 3), 1, d.poison)
        self.q = kept.permute(*(order.index(i) for i in range(3)), 3)
        self.draw_entries()

    def row(self, n_tokens: int) -> list[int]:
        """Consecutive positions that begin or end at an edge, or past the keys; behind them padding; or no request."""
        rng, n = self.draw.rng, self.n_keys
        edge = 64 * rng.randint(0, n // 64) + rng.randint(-2, 1)
        end = rng.choice([0, 1, n - 1, n - 1, n - 2, edge, edge, edge, edge, rng.randrange(n), n + n_tokens // 2])
        n_real = rng.choice([0, n_tokens, n_tokens, n_tokens, n_tokens, rng.randint(1, n_tokens)])
        first = max(0, end if rng.random() < 0.5 else end - n_tokens + 1)
        past = rng.choice([n, self.shape[2], 10**12])
        return [first + i if i < n_real else past for i in range(n_tokens)]

    def draw_entries(self) -> None:
        """What is stored; as fp64 [B, K, S, H] its numbers, of keys and of values, and [B, K, S, 1] their scales."""
        d = self.draw
        if self.held is None:
            self.stored, self.scales = [d.normal(*self.shape, self.head_dim).to(self.dtype) for _ in "kv"], []
            self.numbers, self.by = [x.double() for x in self.stored], [torch.ones(*self.shape, 1).double()] * 2
            return
        raised = [d.whole(1, 255, *self.shape, self.head_dim) for _ in "kv"]  # by 128
        spread = d.one("spread", [1, 1, 6])  # 6: from 0 to what fp16 outputs can hold
        self.scales = [(2.0 ** (-7 + spread * d.normal(*self.shape))).clamp(max=2.0).half() for _ in "kv"]
        self.by, low = [x.double()[..., None] for x in self.scales], [(x % 16).double() for x in raised]
        if self.held == "int8":
            self.stored = [(x - 128).to(torch.int8) for x in raised]
        else:  # two nibbles half a head apart in a byte, first all upper ones
            parts = [nibbles.chunk(2, -1) for nibbles in (*(x // 16 for x in raised), *(x % 16 for x in raised))]
            self.stored = [(first + 16 * second).to(torch.uint8) for first, second in parts]
        if self.tail:  # a lower nibble that is not read counts as the middle of what it may be
            unread = torch.arange(self.shape[2]) < self.pos[:, :1] - (self.tail - 1)  # [B, S]
            low = [torch.where(unread[:, None, :, None], 7.5, x) for x in low]
        self.numbers = [x // 16 * 16 - 128 + rest for x, rest in zip(raised, low, strict=True)]

    def seen(self, entries: Tensor) -> CacheLayer:
        """The layer, of which queries see those of these entries [B, K, S] that are not after them; else poison."""
        d, upto = self.draw, torch.where(self.pos < self.n_keys, self.pos, -1)  # [B, T]
        seen = entries[:, :, None] & (torch.arange(self.shape[2]) <= upto[..., None])[:, None]  # [B, K, T, S]
        self.find(seen)
        for x in self.scales or self.stored:
            x[~seen.any(2)] = d.poison
        pads = [d.pads(2), d.pads(2)] * 2, d.pads(2)  # keys have other strides than values
        fill = 119 if self.scales else d.poison
        numbers = [d.keep(x, 2, fill, pad) for x, pad in zip(self.stored, pads[0], strict=False)]
        scales = [d.keep(x, 1, d.poison, pads[1]) for x in self.scales] or [None, None]
        name = self.held or {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[self.dtype]
        return CacheLayer(FORMATS[name], *numbers[:2], *scales, *numbers[2:], tail=self.tail)

    def dense(self) -> tuple[Tensor, CacheLayer, Tensor, int]:
        """What dense attention is given: all entries may be seen."""
        return self.q, self.seen(torch.ones(self.shape, dtype=torch.bool)), self.pos, self.n_keys

    def find(self, seen: Tensor) -> None:
        """One query after the other: out, how far it may be off [B, N, T, H], lse [B, N, T], mass [B, K, S]."""
        q, largest, spare = self.q.double(), 0.0, 0.5 if self.tail else 0.0
        self.out, size, small = (torch.zeros_like(q) for _ in range(3))
        self.lse, self.mass = torch.full(q.shape[:3], -INF).double(), torch.zeros(self.shape).double()
        for b, n, t in itertools.product(*map(range, q.shape[:3])):
            head = b, n // (q.shape[1] // self.n_kv)
            at = seen[head][t].nonzero()[:, 0]
            if not len(at):
                continue
            (k, v), (k_by, v_by) = ([x[head][at] for x in both] for both in (self.numbers, self.by))
            rows = k * k_by * self.head_dim**-0.5
            scores = rows @ q[b, n, t]
            w = (scores - scores.max()).exp()
            self.out[b, n, t] = w @ (v * v_by) / w.sum()
            self.lse[b, n, t] = scores.max() + w.sum().log()
            self.mass[head].index_add_(0, at, w / w.sum())
            # unread nibbles are at first half a number too small
            size[b, n, t], small[b, n, t] = w @ ((v.abs() + spare) * v_by) / w.sum(), (v.abs() + spare).sum(0) / w.sum()
            largest = max(largest, float((rows.abs() @ q[b, n, t].abs()).max()))
        # A weight is off by what its score is, a sum of products in fp32, and by a rounding for each block of keys.
        self.near = ROUNDING * (64 + 16 * largest + self.shape[2] / 8)
        # It is rounded to the dtype, and so is the output: two halves of an eps. fp16 has steps of 2^-24 near 0, for
        # weights, whatever they are multiplied by, and for the output.
        eps = 0.0 if self.dtype == FP32 else torch.finfo(self.dtype).eps
        self.off = (self.near + 1.02 * eps) * size + (2.0**-25 * small if self.dtype == FP16 else 0.0) + 2.0**-25

    def check(self, out: Tensor) -> None:
        assert out.dtype == self.dtype and out.transpose(1, 2).is_contiguous()
        assert_near(out, self.out, self.off)

    def check_mass(self, mass: Tensor, page: int, halves: int = 0) -> None:
        """halves: sums of exps that fp16 held, of each page."""
        n_pages = self.n_keys // page
        pages = self.mass[..., : n_pages * page].unflatten(-1, (n_pages, page)).sum(-1)
        assert mass.dtype == FP32
        rounded = 2.0**-11 * pages + 2.0**-24 * halves if halves else 0.0
        assert_near(mass, pages, 2 * self.near * pages + 1e-12 + rounded)


def assert_near(got: Tensor, exact: Tensor, off: Tensor | float) -> None:
    """Nothing is further off than this, or a NaN."""
    assert got.shape == exact.shape
    wrong = (~((got.double() - exact).abs() <= off) & (got.double() != exact)).nonzero()[:4].tolist()
    assert not wrong, [(at, float(got[tuple(at)]), float(exact[tuple(at)])) for at in wrong]
