"""Random cases of every kernel, interpreted, against truth that is written here from what the operators promise.

A case is named by a kernel and a seed. Its sizes lie at edges: 1, the largest, a tile, one beside it. What must not be
read is poison: entries past a row or not listed, other slots, whatever surrounds a tensor. What must not be written is
compared afterwards. `GPT_FAST_SD_FUZZ=<first seed>:<how many>` runs other cases; one that fails prints what was drawn.

Shapes: B batch rows, T tokens in this call, L layers, N query heads, K kv heads, G = N // K, H head dim, R = G * T,
        P scores or pages of a row, n of them chosen, C listed entries, V vocabulary, M rows, I inputs, O outputs.
"""

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.config import PAGES
from gpt_fast_sd.fast.triton import decode, filters, int8, prefill, select, sparse
from gpt_fast_sd.model import FORMATS, CacheLayer
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES, FP16, FP32, NAN
from tests.gpt_fast_sd.fast.selected import INF, best
from tests.helpers import few

FIRST, CASES = map(int, os.environ.get("GPT_FAST_SD_FUZZ", "0:32").split(":"))
SEEDS = range(FIRST, FIRST + CASES)
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
        self.window = d.one("window", [0, 0, 0, 1, 20, 64, 150])
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
        q = d.normal(n_batch, self.n_kv * group, n_tokens, self.head_dim) * d.one("sharp", [1, 1, 0, 8, 100])
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
        """The layer, of which queries see those of these entries [B, K, S] that are not after them; else poison.

        Entries before a window are numbers, which may be read.
        """
        d, upto = self.draw, torch.where(self.pos < self.n_keys, self.pos, -1)  # [B, T]
        place = torch.arange(self.shape[2])
        seen = entries[:, :, None] & (place <= upto[..., None])[:, None]  # [B, K, T, S]
        self.find(seen & (place > upto[..., None] - (self.window or self.shape[2]))[:, None])
        for x in self.scales or self.stored:
            x[~seen.any(2)] = d.poison
        pads = [d.pads(2), d.pads(2)] * 2, d.pads(2)  # keys have other strides than values
        fill = 119 if self.scales else d.poison
        numbers = [d.keep(x, 2, fill, pad) for x, pad in zip(self.stored, pads[0], strict=False)]
        scales = [d.keep(x, 1, d.poison, pads[1]) for x in self.scales] or [None, None]
        name = self.held or {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[self.dtype]
        return CacheLayer(FORMATS[name], *numbers[:2], *scales, *numbers[2:], tail=self.tail, window=self.window)

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
        assert mass.dtype == FP32 and mass.is_contiguous()
        rounded = 2.0**-11 * pages + 2.0**-24 * halves if halves else 0.0
        assert_near(mass, pages, 2 * self.near * pages + 1e-12 + rounded)


def assert_near(got: Tensor, exact: Tensor, off: Tensor | float) -> None:
    """Nothing is further off than this, or a NaN."""
    assert got.shape == exact.shape
    wrong = (~((got.double() - exact).abs() <= off) & (got.double() != exact)).nonzero()[:4].tolist()
    assert not wrong, [(at, float(got[tuple(at)]), float(exact[tuple(at)])) for at in wrong]


# ---- attention -------------------------------------------------------------------------------------------------------


def decode_attention(d: Draw) -> None:
    case, split = Asked(d, most_keys=d.one("most", [130, 1100])), d.one("split", [64, 64, 128, 256])
    given, shape = case.dense(), (*case.shape[:2], case.q.shape[2], case.q.shape[1] // case.n_kv)
    lse = torch.empty(shape, dtype=FP32) if d.one("lse", [True, False]) else None  # [B, K, T, G], of base 2
    case.check(decode.attend(*given, split, lse, arch=case.arch))
    if lse is not None:
        assert_near(lse * math.log(2), case.lse.unflatten(1, (case.n_kv, -1)).transpose(2, 3), case.near)


def decode_with_mass(d: Draw) -> None:
    case, split, page = Asked(d), d.one("split", [64, 128, 256]), d.one("page", [16, 16, *PAGES])
    given = case.dense()
    out, mass = decode.attend_with_mass(*given, split, page, arch=case.arch)
    case.check(out)
    assert out.equal(decode.attend(*given, split, arch=case.arch))
    n_sums = case.q[0, :, :, 0].numel() * max(1, page // 16)  # of all queries, in units of 16 keys at least
    case.check_mass(mass, page, 0 if case.dtype == FP32 else n_sums)


def prefill_attention(d: Draw) -> None:
    d.patch.setattr(prefill, "FEW_ROWS", d.one("FEW_ROWS", [0, 0, 0, prefill.FEW_ROWS, 10**9]))
    d.patch.setattr(prefill, "PREFILL_SPLIT", d.one("PREFILL_SPLIT", [64, 128, prefill.PREFILL_SPLIT]))
    case = Asked(d, many=True)
    given = case.dense()
    out, lse = prefill.attend_with_lse(*given, arch=case.arch)
    case.check(out)
    assert lse.dtype == FP32 and lse.is_contiguous() and out.equal(prefill.attend(*given, arch=case.arch))
    assert_near(lse, case.lse, case.near)


def key_mass(d: Draw) -> None:
    case, page = Asked(d, many=d.one("many", [True, True, False])), d.one("page", [1, 1, 2, 16, 32, 64, 128, 256])
    q, layer, pos, n_keys = case.dense()
    lse = d.keep(case.lse.float(), 3, d.poison)
    case.check_mass(prefill.key_mass(q, layer, lse, pos, n_keys, page, arch=case.arch), page)


def sparse_attention(d: Draw) -> None:
    case, page = Asked(d), d.one("page", [1, 1, 8, 16, 32, 128])
    n_runs = d.size("runs", max(1, 64 // page), d.one("most", [64, 230, 230, 1030]) // page, 0)
    width = d.size("width", 64, case.n_keys + 40, 0 if n_runs else 1)
    capacity, place = case.shape[2], torch.arange(case.shape[2])
    lists, read = torch.full((*case.shape[:2], n_runs, page), -1), torch.zeros(case.shape, dtype=torch.bool)
    first = case.pos[:, 0].clamp(max=case.n_keys).tolist()
    starts = [d.rng.choice([0, f, f + 1, max(0, f - width + 1), case.n_keys, d.rng.randint(0, f)]) for f in first]
    for (b, start), k in itertools.product(enumerate(starts), range(case.n_kv)):
        n_whole = max(0, -(-min(start, capacity - page + 1) // page))  # pages that begin before the window
        most = min(n_runs, n_whole)
        chosen = d.rng.sample(range(n_whole), d.rng.choice([0, most, d.rng.randint(0, most)]))
        for run, of in zip(d.rng.sample(range(n_runs), len(chosen)), chosen, strict=True):
            lists[b, k, run] = of * page + torch.arange(page)
            read[b, k, of * page : min(of * page + page, start)] = True
        read[b, k] |= (place >= start) & (place < start + width)
        # a run is empty if it is -1, or if it begins in the window or behind it
        behind = -(-start // page) * page + page * d.whole(0, 9, n_runs)
        empty = (lists[b, k, :, 0] < 0) & (d.whole(0, 1, n_runs) > 0)
        lists[b, k, :, 0] = torch.where(empty, behind, lists[b, k, :, 0])
    print(f"window_start={starts}", end=" ")
    if d.one("first entries alone", [True, False]):  # are looked at
        lists[..., 1:] = d.whole(-1, case.n_keys, *lists[..., 1:].shape)
    indices = d.keep(lists.flatten(2).to(d.one("lists", [torch.int64, torch.int32])), 1, 0)
    given = case.q, case.seen(read), indices, d.keep(torch.tensor(starts), 1, 0), width, case.pos, case.n_keys, page
    case.check(sparse.attend(*given, arch=case.arch))


# ---- selection -------------------------------------------------------------------------------------------------------


def scores_of(d: Draw, *shape: int) -> Tensor:
    """fp32, of a kind that is hard to select from."""
    signs, normal = d.whole(0, 1, *shape).float() * 2 - 1, d.normal(*shape)
    by = {
        "normal": normal, "ties": normal.round(), "equal": normal * 0 + 2, "zeros": signs * 0.0,
        "neighbours": signs * (1 + d.whole(0, 9, *shape) * 2.0**-23), "tiny": d.whole(-3, 3, *shape) * 2.0**-149,
        "infinite": torch.where(normal.abs() > 1, signs * INF, normal),
        "numbers": torch.where(normal.abs() > d.rng.choice([0.1, 1, 3]), normal, NAN),
    }  # fmt: skip
    return by[d.one("scores", by)]


def top_pages(d: Draw) -> None:
    block = d.one("BLOCK", [32, 256, 256, 2048])
    d.patch.setattr(select, "BLOCK", block)
    lead = [d.rng.randint(1, 3) for _ in range(d.one("dims", [0, 1, 2, 3] if block < 2048 else [0]))]
    n_scores = d.size("P", block, 2 * block + 5)
    scores, n = scores_of(d, *lead, n_scores), d.size("n", 16, n_scores + 3)
    n_valid = d.keep(d.whole(-1, n_scores + 3, *(d.rng.choice([1, size]) for size in lead)), 0, n_scores)  # broadcast
    scores[torch.arange(n_scores) >= n_valid[..., None].expand(*lead, 1)] = d.poison
    rows = zip(scores.view(-1, n_scores).tolist(), n_valid.expand(lead).flatten().tolist(), strict=True)
    expected = torch.tensor([best(row, of_row, n) for row, of_row in rows]).view(*lead, n)
    assert select.top_pages(d.keep(scores, scores.dim(), d.poison), n_valid, n).equal(expected)


def guided_select(d: Draw) -> None:
    d.patch.setattr(select, "BLOCK", d.one("BLOCK", [32, 256, select.BLOCK]))
    lead, page = [d.rng.randint(1, 3) for _ in "LBK"], d.one("page", [1, 8, *PAGES])
    n_pages, n_listed = d.size("P", 32, 40), d.size("C", page, 5 * page + 1)
    mass, before = scores_of(d, *lead, n_pages), d.whole(-1, 999, *lead, n_listed)
    due, window = d.whole(0, 2, lead[1]) > 0, d.whole(0, n_pages + 3, lead[1])
    mass[(torch.arange(n_pages) >= window[:, None])[None, :, None].expand(mass.shape)] = d.poison
    expected = before.clone()
    for layer, b, k in itertools.product(*map(range, lead)):
        if due[b]:
            pages = best(mass[layer, b, k].tolist(), int(window[b]), n_listed // page)
            entries = [p * page + i if p >= 0 else -1 for p in pages for i in range(page)]
            expected[layer, b, k] = torch.tensor(entries + [-1] * (n_listed - len(entries)))
    kv_indices, mass = d.keep_as(before, 4, 7, expected), d.keep(mass, 4, d.poison)
    select.guided_select(mass, kv_indices, d.keep(due, 1, 1), d.keep(window, 1, n_pages), page)


def page_bounds(d: Draw) -> None:
    page, n = d.one("page", [4, *PAGES]), d.one("n", [1, 2, 3])
    case = Asked(d, most_keys=page * d.one("pages", range(1, 7)))
    (n_batch, n_kv, capacity), dtype = case.shape, case.dtype if case.held is None else BF16
    capacity, n_pages = max(capacity, page), max(1, capacity // page)
    case.shape, case.tail, case.n_keys = (n_batch, n_kv, capacity), 0, capacity
    case.pos = torch.full_like(case.pos, capacity - 1)
    case.draw_entries()
    first, read = d.whole(0, n_pages + 2, n_batch), torch.zeros(case.shape, dtype=torch.bool)
    before = torch.full((n_batch, n_kv, n_pages, 2 * case.head_dim), 5.0).to(dtype)
    expected, keys = before.clone(), case.numbers[0] * case.by[0]
    for b, i in itertools.product(range(n_batch), range(n)):
        p = min(int(first[b]) + i, n_pages - 1)
        entries = slice(p * page, p * page + page)
        read[b, :, entries] = True
        high, low = keys[b, :, entries].amax(1).to(dtype), keys[b, :, entries].amin(1).to(dtype)  # [K, H]
        if case.held is not None:  # outward by a step, so that rounding leaves a bound
            high, low = (x.nextafter(torch.full_like(x, to)) for x, to in ((high, INF), (low, -INF)))
        expected[b, :, p] = torch.cat([high, low], -1)
    select.page_bounds(case.seen(read), d.keep_as(before, 2, d.poison, expected), d.keep(first, 1, 0), n, page)


def quest_pages(d: Draw) -> None:
    head_dim, group, most_pages = d.one("H", HEAD_DIMS), d.one("G", GROUPS), d.one("pages", [70, 270, 270, 1900])
    few = most_pages > 1000  # more maxima of blocks of 16 pages than are read at once, in little time
    n_batch, n_tokens, n_kv = (1, 1, 1) if few else (d.rng.randint(1, 3), d.rng.randint(1, 9), d.rng.randint(1, 3))
    dtype, step, n = FP32 if few else d.one("dtype", DTYPES), d.one("step", [16, 64, 128]), d.size("n", 4, 20)
    n_pages, most = d.size("P", step, most_pages, most_pages // 9), d.one("most", [0, 1, 1, 1, 3, 3, 3])
    print(f"B={n_batch} T={n_tokens} K={n_kv}", end=" ")
    # whole numbers: no sum is rounded, so that ties are ties
    shape = n_batch, n_tokens, n_kv, group
    q = d.whole(-most, most, *shape, head_dim) * d.whole(1, 4, *shape, 1)  # not 0: all pages are alike to that
    corners = d.whole(-3, 3, 2, n_batch, n_kv, n_pages, head_dim)
    bounds = torch.cat([corners.amax(0), corners.amin(0)], -1).to(dtype)
    some = [0, 1, n_pages, n_pages, n_pages + 2, n_pages // step * step]
    closed = [d.rng.choice([*some, *(d.rng.randint(0, n_pages) for _ in some)]) for _ in range(n_batch)]
    expected, behind = torch.full((n_batch, n_kv, n), -1), d.one("behind", [d.poison, 1e3])  # or what seems to be best
    for b, k in itertools.product(range(n_batch), range(n_kv)):
        rows, seen = q[b, :, k].reshape(-1, 1, head_dim), bounds[b, k, : closed[b]].long()  # [R, 1, H], [P, 2H]
        scores = torch.where(rows > 0, rows * seen[:, :head_dim], rows * seen[:, head_dim:]).sum(-1)  # [R, P]
        if closed[b]:
            short = (scores - scores.amax(-1, keepdim=True)).amax(0)
            expected[b, k] = torch.tensor(best(short.tolist(), closed[b], n))
        bounds[b, k, closed[b] :, :head_dim], bounds[b, k, closed[b] :, head_dim:] = behind, -behind
    asked = d.keep(q.flatten(2, 3).to(dtype), 1, d.poison).transpose(1, 2)
    n_closed = d.keep(torch.tensor(closed), 1, n_pages)
    assert select.quest_pages(asked, d.keep(bounds, 2, d.poison), n_closed, n).equal(expected)


# ---- products and filters --------------------------------------------------------------------------------------------


def int8_linear(d: Draw) -> None:
    dtype, biased = d.one("dtype", DTYPES), d.one("biased", [True, False])
    d.patch.setattr(int8, "MANY_OUTPUTS", d.one("MANY_OUTPUTS", [1, int8.MANY_OUTPUTS]))
    n_rows, n_in, n_out = d.size("M", 16, 140), d.size("I", d.one("step", [32, 128, 256]), 600), d.size("O", 32, 140)
    x, weight = (d.normal(n_rows, n_in) * d.one("by", [1, 1e-3, 20])).to(dtype), d.whole(-128, 127, n_out, n_in)
    scale, bias = d.normal(n_out).abs() / 128, d.normal(n_out).to(dtype) * biased
    bad = d.whole(0, 9, n_rows) == 0  # nothing is asked of these rows but that they reach no other
    scale[d.whole(0, 9, n_out) == 0], x[bad] = 1e-30 / 127, d.poison
    wide = weight.double() * scale.double()[:, None]
    exact, most = x.double() @ wide.t() + bias, x.double().abs() @ wide.abs().t() + bias.abs()
    # rounded to the dtype, half an eps; sums in fp32 are off by some roundings of what products add up to
    off = torch.finfo(dtype).eps * 0.51 * exact.abs() + 64 * ROUNDING * most + (2.0**-25 if dtype == FP16 else 1e-38)
    given = d.keep(x, 0, d.poison), d.keep(weight.to(torch.int8), 2, 99), d.keep(scale, 1, d.poison)
    got = int8.linear(*given, d.keep(bias, 1, d.poison) if biased else None, arch=d.one("arch", ARCHS))
    assert got.dtype == dtype and got.is_contiguous()
    assert_near(got[~bad], exact[~bad], off[~bad])


def likeliest(d: Draw) -> None:
    d.patch.setattr(filters, "BLOCK", d.one("BLOCK", [32, 128, filters.BLOCK]))
    n_rows, n = d.one("B", [1, 3, 4, 5]), d.size("V", 32, d.one("of", [40, 130, 130, 300]))
    scores, top_k, top_p = [], [], []
    for _ in range(n_rows):
        normal = d.normal(n)
        by = {
            "normal": normal * 2, "flat": normal * 1e-3, "sharp": normal * 1e3, "equal": normal * 0,
            "ties": d.whole(-3, 0, n) * 0.7, "close": d.whole(-4, 0, n) * 2.0**-23,
            "impossible": torch.where(normal > 0.5, normal.round(), -INF), "half a unit": d.whole(-1, 0, n) * 31.1,
        }  # fmt: skip
        kind, some = d.one("scores", by), d.rng.randint(1, n)
        row = by[kind]
        row[d.rng.randrange(n)] = d.rng.choice([0.0, 3.0])
        scores.append(row - row.max())
        units = 2.0**44 * int((row == row.max()).sum())
        # some of equal tokens are exactly enough, and so are all but some units of weight
        exactly = {"equal": (n, some / n), "half a unit": (n, 1 - some / units)}
        at_random = d.rng.choice([1, n, some]), d.rng.choice([d.rng.random(), 1e-12, 0.999999, 1.0, 1.5])
        top_k.append(exactly.get(kind, at_random)[0])
        top_p.append(exactly.get(kind, at_random)[1])
    print(f"k={top_k} p={top_p}", end=" ")
    x, k, p = torch.stack(scores), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)
    n_bad = min(n_rows - 1, d.one("rows with a NaN", [0, 0, 1]))  # of which nothing is asked
    x[:n_bad, d.rng.randrange(n)] = NAN
    cuts, lasts = filters.likeliest(d.keep(x, 2, NAN), d.keep(k, 1, 1), d.keep(p, 1, 0.5))
    found = zip(x.tolist(), cuts.tolist(), lasts.tolist(), top_k, top_p, strict=True)
    for row, cut, last, most, share in itertools.islice(found, n_bad, None):
        order = sorted(range(n), key=lambda i: (-row[i], i))
        kept = [i for i in order if row[i] >= row[order[most - 1]]]
        if share < 1:
            mass = [*itertools.accumulate(int(math.exp(row[i]) * 2.0**44 + 0.5) for i in kept)]
            taken = max(1, int(mass[-1] * share))
            kept = kept[: 1 + sum(before < taken for before in mass[:-1])]
        assert [i for i in order if row[i] > cut or (row[i] == cut and i <= last)] == kept
        assert len(kept) == n or cut == row[kept[-1]]


OFTEN = decode_attention, decode_with_mass, prefill_attention, key_mass, sparse_attention, int8_linear
SELDOM = top_pages, guided_select, page_bounds, quest_pages, likeliest  # which test_select has in the ordinary run


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # poison in rows of which nothing is asked
@pytest.mark.parametrize(
    ("kernel", "seed"),
    few(itertools.product((*OFTEN, *SELDOM), SEEDS), [*itertools.product(OFTEN, SEEDS[:8])]),
)
def test_a_kernel_gives_what_it_promises_whatever_it_is_given(
    kernel: Callable[[Draw], None], seed: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    print(f"GPT_FAST_SD_FUZZ={seed}:1 TRITON_INTERPRET=1 python -m pytest -m '' '{request.node.nodeid}'")
    draw = Draw(f"{kernel.__name__} {seed}", monkeypatch)
    for _ in range({top_pages: 5, decode_with_mass: 2, key_mass: 2}.get(kernel, 1)):  # those of most kinds of edges
        kernel(draw)
    draw.assert_kept()


def test_a_seed_draws_the_same_case_again_and_a_write_past_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Draw("a", monkeypatch).normal(9).equal(Draw("a", monkeypatch).normal(9))
    draw = Draw("b", monkeypatch)
    x, made = draw.keep(torch.zeros(2, 3), 2, NAN), torch.empty((2, 3), dtype=FP32)
    made.fill_(1.0)
    draw.assert_kept()
    for tensor in (x, made):
        end = tensor.as_strided((1,), (1,), tensor.storage_offset() + 6)
        before = end.clone()
        end.fill_(1.0)
        with pytest.raises(AssertionError):
            draw.assert_kept()
        end.fill_(float(before))
