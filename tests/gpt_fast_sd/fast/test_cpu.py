"""The CPU kernel against fp64: right at every edge, blind to what it may not see, bit-identical in any batch.

Over bf16 keys and values, over int8 with scales, and over its planes, of which drafts read one.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim, R = G * T,
        M entries listed.
"""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from gpt_fast_sd import attention
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.fast import cpu_attention_fits
from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.fast.compile import own_code
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import build as cpu_build
from gpt_fast_sd.fast.cpu import instruction_sets as cpu_sets
from gpt_fast_sd.fast.cpu import layers as cpu_layers
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.cpu import round as cpu_round
from gpt_fast_sd.fast.cpu import sampling as cpu_sampling
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.model import FORMATS, SPLIT, CacheLayer, KVCache
from gpt_fast_sd.steps import Runner
from tests.gpt_fast_sd.fast import dense, references
from tests.gpt_fast_sd.fast.dense import BF16, NAN
from tests.helpers import Patch, few, thinned, tiny_config, tiny_model

CPP = Bodies(dense=stand_ins.dense, listed=stand_ins.listed)
INF, ALL = float("inf"), slice(None)
PAGE, HEAD_DIMS = cpu.PAGE, cpu.HEAD_DIMS
GROUPS = (1, 2, 3, 4, 5, 7, 8)
TAIL = 64  # entries that a draft reads whole
KEY_SPLIT, TILE = 1024, 64  # of the kernel in attention_avx512.cpp; in that for any CPU a tile is half of it
ANOTHER = "avx512_bf16, as of another maker than Intel"


def why_not() -> str:
    return "" if cpu.available(64) else "no compiler here builds the kernel"


ALL_SETS = [*(one.name for one in cpu_sets.SETS), ANOTHER]
# In the ordinary run: those with kernels of their own, and the narrowest vectors of the others, which share all but
# what simd.hpp makes of them: test_cpu_any shows that with every set, and so do tests of special numbers here.
NARROWEST = [one.name for one in cpu_sets.sets_here() if not one.own and one.name != "plain"] or ["plain"]
KEPT = [*(one.name for one in cpu_sets.SETS if one.own), NARROWEST[-1], ANOTHER]


def built_for(request: pytest.FixtureRequest) -> Iterator[None]:
    """With each instruction set that this CPU has, and with kernels that Intel's CPUs do not take for bf16."""
    name = request.param.partition(",")[0]
    if not next(one for one in cpu_sets.SETS if one.name == name).has():
        pytest.skip(f"no {name} here")
    if request.param == ANOTHER and not cpu_sets.is_intel():
        pytest.skip("this is one")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == ANOTHER:
            patch.setattr(cpu_sets, "is_intel", lambda: False)
        with forced(name):
            yield


body = pytest.fixture(scope="module", params=few(ALL_SETS, KEPT))(built_for)
every_body = pytest.fixture(scope="module", params=ALL_SETS)(built_for)


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Kernels for this instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_sets.VARIABLE, name)
        forget()
        yield
    forget()


def forget() -> None:
    """What was found and built for the last instruction set."""
    found = cpu_build.builds, cpu_build.is_built, cpu_build.library, cpu_sets._best_or
    made = cpu.kernel_for, cpu_linear.kernel_for, cpu_layers.library_of_layers, cpu_round.kernels, cpu_sampling.kernel
    for function in (*found, *made):
        function.cache_clear()


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Whether kernels can be built is asked again, and again when the test is over."""
    forget()
    yield
    forget()


def needs_kernel(test: Callable[..., None], bodies: str = "body") -> Callable[..., None]:
    """It runs with each body of the kernel, if there is one."""
    return pytest.mark.skipif(bool(why_not()), reason=why_not())(pytest.mark.usefixtures(bodies)(test))


needs_each_kernel = partial(needs_kernel, bodies="every_body")


class Case(dense.Case):
    """Queries, and a cache in a format of a batch whose rows end at `ends`; the T queries of a row are its last ones.

    form: "bf16", "int8", "planes", "draft" (planes of which the last TAIL entries are read whole) and so on, "fine"
    behind it if queries are rounded to two bytes a number. What is past a row's end is NaN, of bytes the scales, and
    the bytes are -128. sharp: how large scores are, a power of two or 0 over bytes. whole: queries over bytes are whole
    numbers whose rounding changes nothing.
    """

    def __init__(
        self, ends: Sequence[int], *, form: str = "bf16", n_tokens: int = 1, group: int = 2, n_kv: int = 2,
        head_dim: int = 64, n_keys: int | None = None, dtype: torch.dtype | None = None, sharp: float = 1.0,
        whole: bool = True, tail: int = TAIL, window: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        kind, _, fine = form.partition(" ")
        held = {"int8": dense.INT8, "planes": dense.PLANES, "draft": dense.PLANES}.get(kind)
        super().__init__(
            ends, n_tokens=n_tokens, group=group, n_kv=n_kv, head_dim=head_dim, n_keys=n_keys or max(ends) + 1,
            spare=0, dtype=dtype or (BF16 if held else FORMATS[kind].dtype), held=held,
            tail=tail if kind == "draft" else 0, window=window, seed=seed,
        )  # fmt: skip
        self.fine, self.sharp = bool(fine), sharp
        if held and whole:
            self.q.mul_(40).round_().clamp_(-127, 127)
            self.q[..., seed % head_dim] = -127.0
            self.q.mul_(2.0**-5)
        self.q.mul_(sharp)
        for row, end in enumerate(ends if held else ()):
            for x in (self.k, self.v, *self.low):
                if x is not None:
                    x[row, :, end + 1 :] = -128 if held is dense.INT8 else 0  # which in planes is -128

    def layer(self, rows: slice = ALL) -> CacheLayer:
        return replace(super().layer(rows), fine=self.fine)

    def given(self, rows: slice = ALL, tokens: slice = ALL) -> tuple[Tensor, CacheLayer, Tensor]:
        return self.q[rows, :, tokens], self.layer(rows), self.pos[rows, tokens]

    def attend(self, n_keys: int | None = None, rows: slice = ALL, tokens: slice = ALL) -> Tensor:
        return cpu.cpu_attention(*self.given(rows, tokens), n_keys or self.n_keys)

    def attend_at(self, index: Tensor, tokens: slice = ALL) -> Tensor:
        q, layer, pos = self.given(tokens=tokens)
        return cpu.cpu_attention_at(q, layer, index, pos)

    def attend_with_mass(self, n_keys: int | None = None, rows: slice = ALL) -> tuple[Tensor, Tensor]:
        return cpu.cpu_attention_with_mass(*self.given(rows), n_keys or self.n_keys)

    def every(self) -> Tensor:
        """A list of all entries in their order: [B, K, S]."""
        return torch.arange(self.n_keys).expand(*self.k.shape[:2], -1)

    def seen(self) -> Tensor:
        """The same, without what no query of a row sees."""
        return torch.where(self.every() <= self.pos[:, -1:, None], self.every(), -1)

    def near(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """fp64 attention [B, N, T, H] to the listed entries, or to all, and how far roundings may be from it.

        A weight is rounded to bf16 (off by up to 2^-8 of itself) and so is the output: together 2^-7 of the sum of
        |weight * value|; a score is an fp32 sum of 64 products of some sharp / 8. Over bytes queries are rounded to
        int8 by the largest of each, and the weights of a tile, times the scales of its values, to uint8 by the largest
        of these: each of the 64 is off by half of what its uint8 counts in.
        """
        index = self.every() if index is None else index
        index = F.pad(index, (0, -index.shape[-1] % TILE), value=-1)
        k, v = (picked(x, index) for x in self.meant)  # [B, K, M, H]
        behind = self.pos[:, None, :, None] - index[:, :, None]
        seen = (index[:, :, None] >= 0) & (behind >= 0) & (behind < (self.window or self.n_keys))  # [B, K, T, M]
        out, weights, _ = references.attention(self.q.double(), k, torch.cat([v, v.abs()], -1), seen)
        exact, size = out.chunk(2, -1)
        if self.v_scale is None:
            return exact, (2.0**-7 + self.sharp * 2.0**-20) * size
        shares = weights * picked(self.v_scale, index).double().nan_to_num(0.0)[:, :, None, None]  # [B, K, G, T, M]
        by_tile = shares.unflatten(-1, (-1, TILE)).amax(-1) / 510  # [B, K, G, T, M / TILE]
        numbers = picked(references.meant(self.v, None, self.low[1], self.pos, self.tail), index).double().abs()
        sizes = torch.where(seen.any(2)[..., None], numbers, 0.0).unflatten(2, (-1, TILE)).sum(3)  # [B, K, M / TILE, H]
        return exact, (by_tile @ sizes[:, :, None]).flatten(1, 2) + 2.0**-8 * exact.abs()


def picked(x: Tensor, index: Tensor) -> Tensor:
    """The entries [B, K, M, ...] of x [B, K, S, ...] that an index [B, K, M] names, any for what it does not."""
    rows, heads = torch.arange(x.shape[0])[:, None, None], torch.arange(x.shape[1])[:, None]
    return x[rows, heads, index.clamp(0, x.shape[2] - 1)]


def is_close(got: Tensor, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether the output is as near as its roundings let it be; a twentieth more for fp32 sums and an exp2 of 3e-6."""
    exact, off = expected
    assert got.dtype == BF16 and got.shape == exact.shape
    return bool(((got.double() - exact).abs() <= 1.05 * off + 1e-7).all())


def listing(case: Case, n: int, run: int = 1) -> Tensor:
    """[B, K, M] n entries per head, `run` neighbours at a time, the runs in no order.

    Among them the row's own last entry, entries behind it and behind the cache, and -1s.
    """

    def of_head(end: int, head: int) -> Tensor:
        generator = torch.Generator().manual_seed(head)
        before = torch.arange(end, -1, -run)[1:]
        before = before[torch.randperm(len(before), generator=generator)]
        lasts = torch.cat([torch.tensor([end, end + run, case.n_keys + 4 + run]), before])  # of each run
        runs = (lasts[:, None] + torch.arange(1 - run, 1)).clamp(min=-1)[: max(1, (n - n // 8) // run)]
        runs = F.pad(runs, (0, 0, 0, n // run - len(runs)), value=-1)
        return F.pad(runs[torch.randperm(len(runs), generator=generator)].flatten(), (0, n % run), value=-1)

    ends, n_kv = case.pos[:, -1].tolist(), case.k.shape[1]
    return torch.stack([of_head(end, head) for end in ends for head in range(n_kv)]).view(len(ends), n_kv, n)


def each_shape(*forms: str) -> Any:
    """Forms, G and H of a test: each G and each H of a form in the ordinary run, the other pairs in the slow one."""
    shapes = [
        pytest.param(form, group, head_dim, marks=() if i % 2 == j else pytest.mark.slow)
        for form in forms
        for i, group in enumerate(GROUPS if form == "bf16" else (1, 3, 4))
        for j, head_dim in enumerate(HEAD_DIMS)
    ]
    return pytest.mark.parametrize(("form", "group", "head_dim"), shapes)


def each_of(**values: Sequence[Any]) -> Any:
    """A form and another parameter of a test, whose values for a form are those of this keyword."""
    pairs = [(form, value) for form, of_form in values.items() for value in of_form]
    return pytest.mark.parametrize(("form", "value"), pairs)


over_formats = pytest.mark.parametrize("form", ["bf16", "int8"])


@needs_kernel
@each_shape("bf16", "int8", "draft", "draft fine")
def test_attention_is_that_of_fp64_for_any_number_of_queries(form: str, group: int, head_dim: int) -> None:
    for n_tokens in (*range(1, 10), 33) if form == "bf16" else (1, 2, 4, 5, 8, 33, 63):
        ends = [max(n_tokens - 1, end) for end in (0, 37, 130, 299)]
        case = Case(ends, form=form, n_tokens=n_tokens, group=group, head_dim=head_dim, n_keys=320, seed=n_tokens)
        assert is_close(case.attend(), case.near())


@needs_kernel
@thinned("group,head_dim", [1, 3, 4], HEAD_DIMS)
def test_normal_queries_cost_two_hundredths_of_the_output(head_dim: int, group: int) -> None:
    """A query is off by up to 2^-8 of its largest, a weight by up to 2^-9 of its tile's: measured at most .012."""
    for n_tokens in (1, 5):
        case = Case([40, 130, 4500], form="int8", n_tokens=n_tokens, group=group, head_dim=head_dim, whole=False)
        exact, _ = case.near()
        off = (case.attend().double() - exact).flatten(1).norm(dim=1)
        assert (off <= 0.02 * exact.flatten(1).norm(dim=1)).all()


EDGES = [
    edge + by for edge in (TILE // 2, TILE, 2 * TILE, KEY_SPLIT // 2, KEY_SPLIT - TILE, KEY_SPLIT, KEY_SPLIT + TILE,
                           2 * KEY_SPLIT)
    for by in (-2, -1, 0, 1)
]  # fmt: skip


@needs_kernel
@pytest.mark.parametrize(
    ("form", "head_dim", "n_tokens", "tail"),
    [
        ("bf16", 64, 3, 0),
        *(pytest.param("bf16", *shape, 0, marks=pytest.mark.slow) for shape in ((64, 1), (128, 2))),
        *(("int8", *shape, 0) for shape in ((64, 3), (128, 1))),
        *(("draft", 64, 2, tail) for tail in (1, 17, TAIL, 1000)),  # a tail begins at any place, too
    ],
)
def test_rows_may_end_around_the_edges_of_tiles_and_splits(form: str, head_dim: int, n_tokens: int, tail: int) -> None:
    for ends in ([2, *EDGES[:8]], EDGES[8:16], EDGES[16:24], EDGES[24:]):
        case = Case(ends, form=form, n_tokens=n_tokens, n_kv=1, head_dim=head_dim, tail=tail)
        assert is_close(case.attend(), case.near())


@needs_kernel
@each_of(
    bf16=[1, 2, 31, 33, 63, 64, 65, 100, 2047, 2049, 4095, 4096, 4097, 4160], int8=[1, 2, 63, 64, 65, 100, 4097]
)  # fmt: skip
def test_a_cache_may_end_anywhere_and_nothing_past_it_is_read(form: str, value: int) -> None:
    case = Case([value - 1, value // 2], form=form, group=3, n_keys=value)
    assert is_close(case.attend(), case.near())
    if form == "bf16":  # listed values behind a row must be finite: they count with a weight of 2^-126
        case.v.nan_to_num_(0.0)
    index = case.every().flip(2)
    assert is_close(case.attend_at(index), case.near(index))


@needs_each_kernel
@each_of(bf16=[0.0, 8.0, 100.0], int8=[0.0, 0.125, 8.0, 64.0], draft=[0.0, 0.125, 8.0, 64.0])
def test_attention_may_be_flat_or_sharp_and_scales_of_any_size(form: str, value: float) -> None:
    case = Case([700, 64, 2200], form=form, n_tokens=5, group=3, sharp=value)
    assert is_close(case.attend(), case.near())
    if case.v_scale is None:
        return
    case.v_scale.mul_(2.0 ** torch.randint(-8, 8, case.v_scale.shape))  # one token's values far above its neighbours'
    assert is_close(case.attend(), case.near())
    for scale in (2.0**-24, 65504.0):  # the smallest and the largest
        case.v_scale.masked_fill_(~case.v_scale.isnan(), scale)
        assert is_close(case.attend(), case.near())


@needs_kernel
@over_formats
def test_queries_may_stand_in_any_order_and_past_the_keys_in_view(form: str) -> None:
    case = Case([200, 10], form=form, n_tokens=6)
    case.pos = torch.tensor([[200, 0, 64, 63, 65, 1], [10, 10, 0, 3, 9, 0]])
    exact, off = case.near()
    assert is_close(case.attend(), (exact, off))
    assert is_close(case.attend(64)[:, :, 3:4], (exact[:, :, 3:4], off[:, :, 3:4]))
    assert not case.attend(64)[0, :, [0, 2, 4]].any()


@needs_each_kernel
@pytest.mark.parametrize("window", [1, 64, 100, 1025])
@pytest.mark.parametrize("form", ["bf16", "int8", "draft"])
def test_a_window_is_what_is_seen_and_no_tile_before_it_is_read(form: str, window: int) -> None:
    for n_tokens in (1, 3, 20):
        case = Case([40, 901, 2302], form=form, n_tokens=n_tokens, group=3, window=window)
        got, mass = case.attend_with_mass()
        assert is_close(got, case.near()) and got.equal(case.attend()) and got.equal(case.attend_at(case.seen()))
        torch.testing.assert_close(mass, case.expected_mass(PAGE)[..., : mass.shape[-1]], rtol=0.02, atol=1e-3)
        for spoilt in case.spoilt:  # of the longest row
            spoilt[2, :, : (2303 - n_tokens - window + 1) // TILE * TILE] = NAN
        again, masses = case.attend_with_mass()
        assert got.equal(again) and got.equal(case.attend()) and mass.equal(masses)


@needs_kernel
@each_of(bf16=[NAN, INF, -INF, 3e38], int8=[NAN, INF, 65504.0])
def test_nothing_past_a_row_reaches_it_whatever_it_is(form: str, value: float) -> None:
    for end in (0, 1, 30, 31, 32, 62, 63, 64, 200, 2047, 2048, 4095, 4096):
        case = Case([end, 4200], form=form, n_kv=1, head_dim=128)
        exact, off = case.near()
        case.forget(value)
        got, mass = case.attend_with_mass(4192)
        assert torch.equal(got[0], case.attend(4192)[0])
        assert is_close(got[:1], (exact[:1], off[:1]))
        assert (mass[0, :, end // PAGE + 1 :] <= (1e-30 if form == "bf16" else 0.0)).all()


NO_NUMBERS = [  # form, what is spoilt in the second row, by what
    *((form, "q", value) for form in ("fp32", "fp16", "bf16", "int8", "int8 fine", "planes", "planes fine")
      for value in (NAN, INF, -INF)),
    *((form, which, NAN) for form in ("fp32", "fp16", "bf16") for which in ("k", "v")),
    *(("int8", which, NAN) for which in ("k_scale", "v_scale")),
]  # fmt: skip


@needs_each_kernel
@pytest.mark.parametrize(("form", "which", "value"), NO_NUMBERS)
@pytest.mark.parametrize("group", [1, 3])
def test_what_is_no_number_gives_nan_to_whoever_reads_it_and_touches_no_other(
    group: int, form: str, which: str, value: float
) -> None:
    """Whole numbers once made something finite of it, in most lanes of a vector; over bf16 its output was 0."""
    if form == "bf16" and which != "q" and cpu.source_for(64, BF16) != cpu.ANY:
        pytest.skip("in this kernel keys and values in view are finite")
    for end, place in [*((80, place) for place in (0, 5, 16, 37, 63, 79)), (KEY_SPLIT, KEY_SPLIT)]:
        # a value weighs 0 for a query that does not see it, which is NaN then
        case = Case([end, end], form=form, n_tokens=1 if which == "v" else 3, group=group)
        if which != "q" and case.k_scale is None:
            case.forget(0.0)
        index = case.every().flip(2)
        ways = [case.attend] if which == "q" else [case.attend, lambda case=case, index=index: case.attend_at(index)]
        before = [attend() for attend in ways]
        hit = torch.zeros(before[0].shape[:3], dtype=torch.bool)
        if which == "q":
            case.q[1, group, -1, place % 64] = value
            hit[1, group, -1] = True
        else:
            getattr(case, which)[1, 1, place] = value
            hit[1, group:] = case.pos[1] >= place  # the queries of its kv head
        for was, now in zip(before, (attend() for attend in ways), strict=True):
            assert now[hit].isnan().all() and torch.equal(now[~hit], was[~hit])


@needs_kernel
@pytest.mark.parametrize("fine", ["", " fine"])
@thinned("group,head_dim", [1, 3, 4], HEAD_DIMS)
def test_both_planes_give_the_bits_of_bytes(head_dim: int, group: int, fine: str) -> None:
    for n_tokens, ends in ((1, [0, 37, 4500]), (5, [4, 64, 299]), (33, [40, 130, 4100])):
        shape: Any = {"n_tokens": n_tokens, "group": group, "head_dim": head_dim, "n_keys": 4608, "whole": False}
        byte, plane = (Case(ends, form=kind + fine, **shape) for kind in ("int8", "planes"))
        assert torch.equal(plane.attend(), byte.attend())
        assert all(map(torch.equal, plane.attend_with_mass(), byte.attend_with_mass()))
        index = listing(byte, 150, 5)
        assert torch.equal(plane.attend_at(index), byte.attend_at(index))


@needs_kernel
@pytest.mark.parametrize("form", ["planes", "draft"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_queries_of_two_bytes_lose_nothing_that_bf16_holds(head_dim: int, form: str) -> None:
    """With one byte a query is off by 2^-8 of its largest number, which weighs where others are much smaller."""
    errors = []
    for fine in ("", " fine"):
        how: dict[str, Any] = {"n_tokens": 5, "group": 3, "head_dim": head_dim, "whole": False, "sharp": 0.25}
        case = Case([40, 130, 4500], form=form + fine, **how)
        case.q[..., 3] *= 64.0  # as where keys have been divided by it
        for plane, zero in ((case.k, 8), (case.low[0], 0)):
            assert plane is not None
            plane[..., 3] = plane[..., 3] // 16 * 16 + zero  # the number half a head apart stays
        exact, _ = case.near()
        off = (case.attend().double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        errors.append(float(off.max()))
    one, two = errors
    narrow = cpu.source_for(head_dim, BF16, FORMATS["planes"]) == cpu.SOURCE  # elsewhere queries are fp32 anyway
    assert two < 0.01 and (one > 3 * two if narrow else one == two)


# ---- bit-identical in any batch -----------------------------------------------------------------------------------


@needs_kernel
@each_shape("bf16", "int8", "draft", "draft fine")
def test_a_querys_output_depends_only_on_its_own_row(form: str, group: int, head_dim: int) -> None:
    case = Case([4500, 63, 130, 4096], form=form, n_tokens=7, group=group, head_dim=head_dim, n_keys=5120)
    if form == "bf16":  # a query alone sees less than the last of seven: what is behind it is another row's NaN
        case.forget(0.0)
    together, mass = case.attend_with_mass(4608)
    for n_keys, n_threads in zip((4501, 4544, 4864, 5120, 5120), (1, 2, 3, 4, 7), strict=True):
        torch.set_num_threads(n_threads)  # of the splits of rows and kv heads a thread reads all, several or one
        assert torch.equal(case.attend(n_keys), together)
        assert torch.equal(case.attend_with_mass(n_keys)[1][..., : 4501 // PAGE], mass[..., : 4501 // PAGE])
    for row, end in enumerate(case.pos[:, -1].tolist()):
        one, n_pages = slice(row, row + 1), end // PAGE + 1
        alone = case.attend_with_mass(n_pages * PAGE, one)
        assert torch.equal(alone[0], together[one]) and torch.equal(alone[1], mass[one, :, :n_pages])


@needs_kernel
@pytest.mark.parametrize("form", ["bf16", "int8", "fp32"])
def test_neither_blocks_of_queries_nor_splits_show_in_a_bit_of_a_long_chunk(form: str) -> None:
    """402 rows of a kv head: in one block where mass is summed, else in more of them the more threads there are."""
    case = Case([2150, 133], form=form, n_tokens=134, group=3, n_keys=2304)  # over an edge of splits, and from entry 0
    if form != "int8":
        case.forget(0.0)
    alone = torch.cat([case.attend(tokens=slice(t, t + 1)) for t in range(134)], 2)
    assert case.attend_with_mass()[0].equal(alone)
    for n_threads in (1, 2, 3, 9, 40):
        torch.set_num_threads(n_threads)
        assert case.attend().equal(alone), n_threads


MANY = (2, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 17, 19, 28, 29)  # one head: as many rows scored, some in lanes


@needs_kernel
@pytest.mark.parametrize("form", ["bf16", "int8", "int8 fine"])
@thinned("head_dim,n_tokens", HEAD_DIMS, MANY)
def test_what_many_rows_find_each_finds_alone(head_dim: int, n_tokens: int, form: str) -> None:
    case = Case([300, 150], form=form, n_tokens=n_tokens, group=1, head_dim=head_dim, whole=False)
    case.forget(0.0)
    index = torch.arange(260)
    index[[130, 258]] = -1  # of one head most lie together, and two tiles are whole; of the other none do
    index = torch.stack([index, index.masked_fill(index % 7 == 3, -1).flip(0)]).expand(2, -1, -1).contiguous()
    together = case.attend(), case.attend_at(index)
    assert form != "bf16" or is_close(together[1], case.near(index))
    for t in range(n_tokens):
        at = slice(t, t + 1)
        assert torch.equal(case.attend(tokens=at), together[0][:, :, at])
        assert torch.equal(case.attend_at(index, at), together[1][:, :, at])


@needs_kernel
def test_keys_that_are_no_numbers_change_no_rows_bits_by_the_number_of_rows() -> None:
    case = Case([99, 70], n_tokens=10, group=3)
    case.forget(0.0)
    case.k[0, :, [23, 27, 31]] = NAN
    case.k[1, :, [5, 40]], case.k[1, :, [17, 66]] = INF, -INF
    together = case.attend()
    for t in range(10):
        alone = case.attend(tokens=slice(t, t + 1))
        assert torch.equal(alone.view(torch.int16), together[:, :, t : t + 1].view(torch.int16))


# ---- listed entries -------------------------------------------------------------------------------------------------


@needs_kernel
@each_shape("bf16", "int8", "draft")
def test_listed_entries_are_those_attended_to(form: str, group: int, head_dim: int) -> None:
    """Neither empty entries nor those past a row reach it, and each query sees those before it."""
    for n, run, n_tokens in ((1, 1, 1), (7, 1, 2), (63, 4, 1), (64, 16, 4), (65, 16, 1), (150, 5, 9), (190, 64, 3),
                             (200, 16, 1)):  # fmt: skip
        case = Case([8, 64, 299], form=form, n_tokens=n_tokens, group=group, head_dim=head_dim, n_keys=320, seed=n)
        if form == "bf16":  # values behind a row must be finite: they count with a weight of 2^-126
            case.v.nan_to_num_(0.0)
        index = listing(case, n, run)
        assert is_close(case.attend_at(index), case.near(index))
        for x in case.spoilt:
            x[:, :, 0] = NAN  # where an empty entry would be
        index = index.masked_fill(index == 0, -1)
        assert is_close(case.attend_at(index), case.near(index))


@needs_kernel
@pytest.mark.parametrize("run", [1, 16])
def test_more_entries_than_a_split_may_be_listed(run: int) -> None:
    case = Case([6000, 4200], n_kv=1)
    case.forget(0.0)
    for n in (edge + by for edge in (KEY_SPLIT // 2, KEY_SPLIT) for by in (-1, 0, 1)):
        index = listing(case, n, run)
        assert is_close(case.attend_at(index), case.near(index))


@needs_kernel
@pytest.mark.parametrize("form", ["bf16", "int8", "draft"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_listing_all_entries_in_their_order_gives_the_dense_bits(head_dim: int, form: str) -> None:
    case = Case([4500, 63, 4096], form=form, n_tokens=3, group=3, head_dim=head_dim)
    if form == "bf16":
        case.forget(0.0)
    assert torch.equal(case.attend_at(case.every()), case.attend())


@needs_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@over_formats
def test_what_a_query_may_not_see_weighs_nothing_at_all(form: str, head_dim: int) -> None:
    """If all that it sees is 0 it gets 0, whatever else is in the batch."""
    case = Case([26, 26], form=form, n_tokens=8, n_kv=1, head_dim=head_dim, n_keys=TILE)
    if form == "bf16":
        case.forget(0.0)
    case.v[:, :, :20], case.v[:, :, 20:] = 0, 4
    together, alone = case.attend(), case.attend(tokens=slice(0, 1))
    assert not together[:, :, 0].any() and not alone.any() and together[:, :, 7].any()
    if form == "bf16":
        first = torch.full((2, 1, TILE), -1)  # a whole tile of nothing, whose values are large, before the first key
        named = torch.cat([first, case.every()], -1)
        case.v[:, :, 0], case.v[:, :, 1:] = 1e30, 1.0
        case.pos = torch.full((2, 8), 1)
        assert case.attend_at(torch.where(named == 0, -1, named)).eq(1.0).all()


# ---- the mass of pages ----------------------------------------------------------------------------------------------


@needs_kernel
@each_shape("bf16", "int8")
def test_mass_is_the_attention_that_16_keys_received(form: str, group: int, head_dim: int) -> None:
    for n_tokens, ends, n_keys in ((1, [0, 15, 16], 256), (2, [300, 64, 511], 512), (5, [4095, 4096, 4700], 4864)):
        case = Case(ends, form=form, n_tokens=n_tokens, group=group, head_dim=head_dim, n_keys=n_keys + 3)
        got, mass = case.attend_with_mass(n_keys)
        assert torch.equal(got, case.attend(n_keys))
        assert mass.dtype == torch.float32 and mass.shape == (3, 2, n_keys // PAGE)
        case.n_keys = n_keys
        # fp32 scores, of bytes up to 50, and sums, an exp2 of 3e-6; weights are not rounded here (1.9e-5 was seen)
        rtol = 3e-5 if form == "bf16" else 4e-5
        torch.testing.assert_close(mass, case.expected_mass(PAGE), rtol=rtol, atol=1e-6)
        torch.testing.assert_close(mass.sum(-1), torch.full((3, 2), float(group * n_tokens)), rtol=1e-5, atol=0)


# ---- where it cannot be used ----------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize(
    ("asked", "forms", "head_dim", "fits"),
    [("bf16", "bf16", 64, True), ("bf16", "bf16", 80, True), ("fp32", "fp32", 16, True), ("fp16", "fp16", 256, True),
     ("bf16", "bf16", 24, False), ("bf16", "bf16", 272, False), ("fp32", "bf16", 64, False),
     ("bf16", "fp16", 64, False), ("bf16", "int8 planes", 64, True), ("bf16", "int8 planes", 80, True),
     ("fp32", "int8 planes", 64, True), ("fp16", "int8 planes", 128, True), ("bf16", "int8 planes", 72, False),
     ("int8", "int8 planes", 64, False)],
)  # fmt: skip
def test_it_serves_keys_of_the_queries_dtype_or_bytes_and_whole_sixteens_of_dims(
    asked: str, forms: str, head_dim: int, fits: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(cpu, "builds", lambda *_: True)  # a compiler would read each, which takes a second
    for form in forms.split():
        assert cpu_attention_fits(head_dim, FORMATS[asked].dtype, FORMATS[form]) is fits


def traced(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    """fn as a compiled step runs it, but for the code generator, and its graphs."""
    graphs, how = list[torch.fx.GraphModule](), {"fullgraph": True, "dynamic": False}
    return torch.compile(own_code(fn), backend=lambda graph, _: graphs.append(graph) or graph, **how), graphs


def attends_as_the_core() -> bool:
    """Whether an engine's steps attend as the core is written."""
    model = tiny_model(tiny_config(head_dim=64), dtype=torch.bfloat16)
    cache = KVCache(model.config, 1, 300, format=FORMATS["bf16"], device=torch.device("cpu"))
    bodies = Runner(model, cache, backend=FastBackend(torch.device("cpu"), {})).bodies
    return bodies.dense is CORE.dense and bodies.listed is CORE.listed


@needs_kernel
@over_formats
@thinned("n_tokens,page", [1, 4], [0, 16, 64, 256])
def test_compiled_steps_attend_by_it_and_give_what_the_core_does(n_tokens: int, page: int, form: str) -> None:
    """The core rounds scores of bf16 as well: they are 4 at most here, a weight is off by 2^-8 * 4 then."""
    case = Case([299, 64, n_tokens], form=form, n_tokens=n_tokens, group=3, n_keys=2 * SPLIT)
    case.forget(0.0)
    (q, layer, pos), near = case.given(), {"rtol": 0.03, "atol": 0.03}
    window = torch.arange(200).expand(3, 2, -1), pos.new_full((3,), 200), 100, pos
    for body, core, given in (
        (stand_ins.dense, attention.dense, (pos, 2 * SPLIT, page)),
        (stand_ins.listed, attention.listed, window),
    ):
        step, graphs = traced(body)
        got, expected = (x if isinstance(x, tuple) else (x, None) for x in (f(q, layer, *given) for f in (step, core)))
        torch.testing.assert_close(got[0], expected[0], **near)
        assert sum("cpu_attention" in str(node.target) for node in graphs[0].graph.nodes) == 1
        assert (got[1] is None) == (expected[1] is None)
        if got[1] is not None:
            torch.testing.assert_close(got[1], expected[1], rtol=0.03, atol=1e-5 if form == "bf16" else 0.03)


@needs_kernel
def test_a_compiler_without_the_instructions_is_no_error(asked_anew: None, tmp_path: Path, monkeypatch: Patch) -> None:
    for name, file in (("SOURCE", "attention_avx512.cpp"), ("ANY", "attention.cpp")):
        (source := tmp_path / file).write_text("#error no such instructions\n")
        monkeypatch.setattr(cpu, name, source)
    with pytest.warns(UserWarning, match=r"cannot build attention\.cpp.*no such instructions"):
        assert not cpu.available(64)
    assert not cpu_attention_fits(64, torch.bfloat16, FORMATS["bf16"])
    assert attends_as_the_core()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_one_core_builds_a_kernel_too(tmp_path: Path) -> None:
    """Torch compiles with as many threads as cores; with one, handing over the work once waited for itself."""
    (source := tmp_path / "seven.cpp").write_text('extern "C" int seven() { return 7; }\n')
    code = f"""if True:
        from pathlib import Path
        from torch._inductor import config
        from gpt_fast_sd.fast.cpu import build as cpu_build
        config.cpp_cache_precompile_headers = False  # which takes longer than all else, and this source has none
        assert cpu_build.library(Path({str(source)!r}))().seven() == 7
    """
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=400)


def test_without_a_compiler_the_caches_attend_all_the_same(asked_anew: None, monkeypatch: Patch) -> None:
    def none_found() -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert not cpu.available(64) and attends_as_the_core()


def test_a_maker_decides_which_kernel_bf16_caches_get(asked_anew: None, monkeypatch: Patch) -> None:
    bf16, others = torch.bfloat16, (FORMATS["int8"], FORMATS["planes"])
    monkeypatch.delenv(cpu_sets.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "builds", lambda *_: True)
    for name, of_intel in itertools.product(("amx", "avx512_bf16"), (True, False)):
        best = next(one for one in cpu_sets.SETS if one.name == name)
        monkeypatch.setattr(cpu_sets, "_best_or", lambda _, best=best: best)
        monkeypatch.setattr(cpu_sets, "is_intel", lambda of_intel=of_intel: of_intel)
        monkeypatch.setattr(cpu, "chosen", cpu_sets.chosen)
        wide = cpu.ANY if of_intel and name != "amx" else cpu.SOURCE
        assert cpu.source_for(64, bf16) == cpu.source_for(64, bf16, FORMATS["bf16"]) == wide
        assert {cpu.source_for(128, bf16, one) for one in others} == {cpu.SOURCE}
        assert cpu.source_for(80, bf16, others[0]) == cpu.source_for(64, torch.float32) == cpu.ANY
        assert (wide, 64) in cpu_linear.cpu_kernels(64, bf16)
        assert (cpu.SOURCE, 64) in cpu_linear.cpu_kernels(64, bf16, form=others[0])


@pytest.mark.parametrize("asked", ["avx1024", "neon plain", "AVX2"])
def test_an_instruction_set_that_is_not_here_is_named(asked: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(cpu_sets.VARIABLE, asked)
    with pytest.raises(ValueError, match=f"GPT_FAST_SD_CPU is '{asked}': this CPU has .*plain"):
        cpu_sets.chosen()
