"""The CPU kernel against fp64: right at every edge, blind to what it may not see, bit-identical in any batch.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        M entries listed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from gpt_fast_sd.fast.ops.layer import flat
from gpt_fast_sd.kv import DenseKV
from gpt_fast_sd.model import FORMATS, SPLIT, KVCache
from gpt_fast_sd.steps import Runner
from tests.gpt_fast_sd.fast.references import attend_reference, layer_of
from tests.helpers import few, thinned, tiny_config, tiny_model

CPP = Bodies(dense=stand_ins.dense, listed=stand_ins.listed)
cpu_attention, cpu_attention_at, cpu_attention_with_mass = (
    cpu.cpu_attention,
    cpu.cpu_attention_at,
    cpu.cpu_attention_with_mass,
)
PAGE = cpu.PAGE
GROUPS = (1, 2, 3, 4, 5, 7, 8)
HEAD_DIMS = (64, 128)
KEY_SPLIT, TILE = 1024, 64  # of the kernel in attention_avx512.cpp; in that for any CPU a tile is half of it
ANOTHER = "avx512_bf16, as of another maker than Intel"


def why_not() -> str:
    return "" if cpu.available(64) else "no compiler here builds the kernel"


@pytest.fixture(scope="module", params=[*(one.name for one in cpu_sets.SETS), ANOTHER])
def body(request: pytest.FixtureRequest) -> Iterator[None]:
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
    for found in (cpu_build.builds, cpu_build.is_built, cpu_build.library):
        found.cache_clear()
    made = cpu.kernel_for, cpu_linear.kernel_for, cpu_layers.library_of_layers, cpu_round.kernels, cpu_sampling.kernel
    for kernel in made:
        kernel.cache_clear()


def needs_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """It runs with each body of the kernel, if there is one."""
    return pytest.mark.skipif(bool(why_not()), reason=why_not())(pytest.mark.usefixtures("body")(test))


class Case:
    """bf16 queries, keys and values of a batch whose rows end at `ends`; the T queries of a row are its last ones.

    What is past a row's end is NaN. sharp: how large scores are.
    """

    def __init__(
        self, ends: Sequence[int], *, n_tokens: int = 1, group: int = 2, n_kv: int = 2, head_dim: int = 64,
        capacity: int | None = None, sharp: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator, n_rows = torch.Generator().manual_seed(seed), len(ends)
        capacity = capacity or max(ends) + 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)

        # as a model gives them: [B, T, N, H] transposed, one of several tensors in a row
        self.q = (normal(n_rows, n_tokens, n_kv * group + 3, head_dim) * sharp)[:, :, 1:-2].transpose(1, 2)
        # as a cache holds them: some slots of a larger buffer
        self.k, self.v = (normal(n_rows + 2, n_kv, capacity, head_dim)[1:-1] for _ in range(2))
        self.pos = (torch.tensor(ends)[:, None] + torch.arange(1 - n_tokens, 1)).clamp(min=0)  # [B, T]
        for row, end in enumerate(ends):
            for x in (self.k, self.v):
                x[row, :, end + 1 :] = float("nan")

    def finite(self) -> tuple[Tensor, Tensor]:
        """Keys and values with zeros for NaN."""
        return self.k.nan_to_num(0.0), self.v.nan_to_num(0.0)

    def expected(self) -> tuple[Tensor, Tensor]:
        """fp64 attention [B, N, T, H], and what the same weights make of |v|."""
        k, v = self.finite()
        exact, size = attend_reference(self.q, k, torch.cat([v, v.abs()], -1), self.pos).chunk(2, -1)
        return exact, size


def is_close(got: Tensor, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether the output is as near as its roundings let it be.

    A weight is rounded to bf16 (off by up to 2^-8 of itself) and so is the output: together 2^-7 of the sum of
    |weight * value|, which no output exceeds. A twentieth more for fp32 sums, scores and an exp2 of 3e-6.
    """
    exact, size = expected
    assert got.dtype == torch.bfloat16 and got.shape == exact.shape
    return bool(((got.double() - exact).abs() <= 1.05 * 2.0**-7 * size + 1e-7).all())


@needs_kernel
@thinned("group,head_dim", GROUPS, HEAD_DIMS)
def test_attention_is_that_of_fp64_for_any_number_of_queries(head_dim: int, group: int) -> None:
    for n_tokens in (*range(1, 10), 33):
        ends = [max(n_tokens - 1, end) for end in (0, 37, 130, 299)]
        case = Case(ends, n_tokens=n_tokens, group=group, head_dim=head_dim, capacity=320, seed=n_tokens)
        assert is_close(cpu_attention(case.q, layer_of(case.k, case.v), case.pos, 320), case.expected())


EDGES = [
    edge + by for edge in (TILE // 2, TILE, 2 * TILE, KEY_SPLIT // 2, KEY_SPLIT - TILE, KEY_SPLIT, KEY_SPLIT + TILE,
                           2 * KEY_SPLIT)
    for by in (-2, -1, 0, 1)
]  # fmt: skip


@needs_kernel
@pytest.mark.parametrize(("head_dim", "n_tokens"), few([(64, 1), (64, 3), (128, 2)], [(64, 3)]))
def test_rows_may_end_anywhere_around_the_edges_of_tiles_and_splits(head_dim: int, n_tokens: int) -> None:
    for ends in ([2, *EDGES[:8]], EDGES[8:16], EDGES[16:24], EDGES[24:]):
        case = Case(ends, n_tokens=n_tokens, n_kv=1, group=2, head_dim=head_dim, capacity=2 * KEY_SPLIT + TILE)
        n_keys = max(ends) + 1
        assert is_close(cpu_attention(case.q, layer_of(case.k, case.v), case.pos, n_keys), case.expected())


@needs_kernel
@pytest.mark.parametrize("capacity", [1, 2, 31, 33, 63, 64, 65, 100, 2047, 2049, 4095, 4096, 4097, 4160])
def test_a_cache_may_end_anywhere_and_nothing_past_it_is_read(capacity: int) -> None:
    case = Case([capacity - 1, capacity // 2], n_kv=2, group=3, capacity=capacity)
    assert is_close(cpu_attention(case.q, layer_of(case.k, case.v), case.pos, capacity), case.expected())
    index = torch.arange(capacity).flip(0).expand(2, 2, -1)
    assert is_close(
        cpu_attention_at(case.q, layer_of(case.k, case.v.nan_to_num(0.0)), index, case.pos), case.expected()
    )


@needs_kernel
@pytest.mark.parametrize("sharp", [0.0, 8.0, 100.0])
def test_attention_may_be_flat_or_sharp(sharp: float) -> None:
    case = Case([700, 64, 5000], n_tokens=5, group=3, sharp=sharp)
    exact, size = case.expected()
    got = cpu_attention(case.q, layer_of(case.k, case.v), case.pos, 5001).double()
    # a score is an fp32 sum of 64 products of some 100 / 8: off by some 2^-24 of 64 * 100 / 8
    assert ((got - exact).abs() <= (1.05 * 2.0**-7 + sharp * 2.0**-20) * size + 1e-7).all()


@needs_kernel
def test_queries_may_stand_in_any_order_and_at_position_0() -> None:
    case = Case([200, 10], n_tokens=6, group=2)
    case.pos = torch.tensor([[200, 0, 64, 63, 65, 1], [10, 10, 0, 3, 9, 0]])
    assert is_close(cpu_attention(case.q, layer_of(case.k, case.v), case.pos, 201), case.expected())


@needs_kernel
def test_no_value_and_no_key_past_a_row_reaches_it_whatever_it_is() -> None:
    for end in (0, 1, 30, 31, 32, 62, 63, 64, 200, 2047, 2048, 4095, 4096):
        case = Case([end, 4200], n_tokens=1, n_kv=1, head_dim=128)
        expected = case.expected()
        for bad in (float("nan"), float("inf"), float("-inf"), 3e38):
            for x in (case.k, case.v):
                x[0, :, end + 1 :] = bad
            got, mass = cpu_attention_with_mass(case.q, layer_of(case.k, case.v), case.pos, 4192)
            assert torch.equal(got[0], cpu_attention(case.q, layer_of(case.k, case.v), case.pos, 4192)[0])
            assert is_close(got[:1], (expected[0][:1], expected[1][:1]))
            assert (mass[0, :, end // PAGE + 1 :] < 1e-30).all()


# ---- bit-identical in any batch -----------------------------------------------------------------------------------


@needs_kernel
@thinned("group,head_dim", [1, 3, 4, 7], HEAD_DIMS)
def test_a_querys_output_depends_only_on_its_own_row(group: int, head_dim: int) -> None:
    case = Case([4500, 63, 130, 4096], n_tokens=7, group=group, head_dim=head_dim, capacity=5120)
    k, v = case.finite()  # a query alone sees less than the last of seven: what is behind it is another row's NaN
    together, mass = cpu_attention_with_mass(case.q, layer_of(k, v), case.pos, 4608)
    for n_keys in (4501, 4544, 4864, 5120):
        assert torch.equal(cpu_attention(case.q, layer_of(k, v), case.pos, n_keys), together)
        assert torch.equal(
            cpu_attention_with_mass(case.q, layer_of(k, v), case.pos, n_keys)[1][..., : 4501 // PAGE],
            mass[..., : 4501 // PAGE],
        )
    for row in range(4):
        one = slice(row, row + 1)
        n_keys = int(case.pos[row].max()) + 1
        alone = cpu_attention_with_mass(
            case.q[one], layer_of(k[one], v[one]), case.pos[one], -(-n_keys // SPLIT) * SPLIT
        )
        assert torch.equal(alone[0], together[one])
        assert torch.equal(alone[1], mass[one, :, : alone[1].shape[-1]])
        for t in (0, 1, 4, 6):
            at = slice(t, t + 1)
            got = cpu_attention(case.q[one, :, at], layer_of(k[one], v[one]), case.pos[one, at], n_keys)
            assert torch.equal(got[:, :, 0], together[one, :, t])


@needs_kernel
def test_threads_and_earlier_calls_change_no_bit() -> None:
    """Of the splits of rows and kv heads a thread reads all, several or one, by how many threads there are."""
    large, small = Case([9000, 300, 8200, 1023], n_tokens=4, group=2), Case([70], n_tokens=2, group=5, head_dim=128)
    alike = Case([3000] * 5, n_tokens=4, group=2)

    def run(case: Case) -> list[Tensor]:
        n_keys = case.k.shape[2] // PAGE * PAGE
        given = case.q, layer_of(case.k, case.v), case.pos, n_keys
        return [*cpu_attention_with_mass(*given), cpu_attention(*given)]

    first = [run(case) for case in (large, small, alike)]
    threads = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3, 4, 7):
            torch.set_num_threads(n_threads)
            for case, expected in ((small, first[1]), (large, first[0]), (small, first[1]), (alike, first[2])):
                assert all(torch.equal(a, b) for a, b in zip(run(case), expected, strict=True))
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_neither_blocks_of_queries_nor_splits_show_in_a_bit_of_a_long_chunk() -> None:
    case = Case([2300], n_tokens=130, group=3)
    k, v = case.finite()
    each = [cpu_attention(case.q[:, :, t : t + 1], layer_of(k, v), case.pos[:, t : t + 1], 2301) for t in range(130)]
    threads = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 9):
            torch.set_num_threads(n_threads)
            assert cpu_attention(case.q, layer_of(k, v), case.pos, 2301).equal(torch.cat(each, 2))
    finally:
        torch.set_num_threads(threads)


# ---- listed entries -------------------------------------------------------------------------------------------------


def expected_at(case: Case, index: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 attention to listed entries, row by row and head by head, and the same for |v|: [B, N, T, H] each."""
    group, (k, v) = case.q.shape[1] // case.k.shape[1], case.finite()
    outs = torch.zeros(2, *case.q.shape, dtype=torch.float64)
    for b in range(index.shape[0]):
        for n in range(case.q.shape[1]):
            for t in range(case.q.shape[2]):
                listed = index[b, n // group]
                seen = listed[(listed >= 0) & (listed <= case.pos[b, t])]
                scores = k[b, n // group, seen].double() @ case.q[b, n, t].double() * case.q.shape[-1] ** -0.5  # [n]
                p, values = scores.softmax(0), v[b, n // group, seen].double()
                outs[0, b, n, t], outs[1, b, n, t] = p @ values, p @ values.abs()
    return outs[0], outs[1]


def listing(case: Case, n: int, run: int = 1) -> Tensor:
    """[B, K, M] n entries per head, `run` neighbours at a time, the runs in no order.

    Among them the row's own last entry, entries behind it and behind the cache, and -1s.
    """
    rows = []
    for end in case.pos[:, -1].tolist():
        heads = []
        for head in range(case.k.shape[1]):
            generator = torch.Generator().manual_seed(head)
            starts = [end, end + 1, case.k.shape[2] + 5, *torch.randperm(end + 1, generator=generator).tolist()]
            seen: list[int] = []
            taken: set[int] = set()
            for start in starts:
                if len(seen) + run <= n - n // 8:
                    new = [entry for entry in range(start - run + 1, start + 1) if entry not in taken and entry >= 0]
                    seen += [*new, *[-1] * (run - len(new))]
                    taken |= {*new}
            seen = seen or [end]
            full = torch.tensor(seen + [-1] * (n - len(seen)))
            whole = full[: n // run * run].view(-1, run)
            heads.append(
                torch.cat([whole[torch.randperm(len(whole), generator=generator)].flatten(), full[len(whole) * run :]])
            )
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@needs_kernel
@thinned("group,head_dim", GROUPS, HEAD_DIMS)
def test_listed_entries_are_those_attended_to(head_dim: int, group: int) -> None:
    for n, run in ((1, 1), (7, 1), (63, 4), (64, 16), (65, 16), (150, 5), (200, 16)):
        case = Case([0, 5, 64, 299], group=group, head_dim=head_dim, capacity=320, seed=n)
        case.k, case.v = case.finite()
        index = listing(case, n, run)
        assert is_close(cpu_attention_at(case.q, layer_of(case.k, case.v), index, case.pos), expected_at(case, index))


@needs_kernel
@thinned("n_tokens,run", [2, 4, 9], [1, 16, 64])
def test_of_listed_entries_each_query_sees_those_before_it(n_tokens: int, run: int) -> None:
    case = Case([40, 130, 299], n_tokens=n_tokens, group=3, capacity=320)
    case.k, case.v = case.finite()
    earlier = Case([end - n_tokens for end in (40, 130, 299)], capacity=320)
    own = case.pos[:, None].expand(-1, 2, -1)  # of the queries
    listed = listing(earlier, 90, run)
    index = torch.cat([own[..., 1:], listed.masked_fill(listed >= own[..., :1], -1), own[..., :1]], -1)
    assert is_close(cpu_attention_at(case.q, layer_of(case.k, case.v), index, case.pos), expected_at(case, index))


@needs_kernel
@pytest.mark.parametrize("run", [1, 16])
def test_more_entries_than_a_split_may_be_listed(run: int) -> None:
    case = Case([6000, 4200], n_kv=1, group=2)
    case.k, case.v = case.finite()
    for n in (edge + by for edge in (KEY_SPLIT // 2, KEY_SPLIT) for by in (-1, 0, 1)):
        index = listing(case, n, run)
        assert is_close(cpu_attention_at(case.q, layer_of(case.k, case.v), index, case.pos), expected_at(case, index))


@needs_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_listing_all_entries_in_their_order_gives_the_dense_bits(head_dim: int) -> None:
    case = Case([4500, 63, 4096], n_tokens=3, group=3, head_dim=head_dim)
    k, v = case.finite()
    index = torch.arange(4501).expand(3, 2, -1)
    assert torch.equal(
        cpu_attention_at(case.q, layer_of(k, v), index, case.pos), cpu_attention(case.q, layer_of(k, v), case.pos, 4501)
    )


@needs_kernel
@thinned("head_dim,n_tokens", HEAD_DIMS, [9, 12, 13, 15, 16, 17, 28, 29])  # one head: as many rows, some in lanes
def test_what_many_rows_find_among_listed_entries_each_finds_alone(head_dim: int, n_tokens: int) -> None:
    case = Case([300, 150], n_tokens=n_tokens, group=1, head_dim=head_dim)
    k, v = case.finite()
    index = torch.arange(260)
    index[[130, 258]] = -1  # of one head most lie together, and two tiles are whole; of the other none do
    index = torch.stack([index, index.masked_fill(index % 7 == 3, -1).flip(0)]).expand(2, -1, -1).contiguous()
    together = cpu_attention_at(case.q, layer_of(k, v), index, case.pos)
    assert is_close(together, expected_at(case, index))
    for t in range(n_tokens):
        at = slice(t, t + 1)
        assert torch.equal(
            cpu_attention_at(case.q[:, :, at], layer_of(k, v), index, case.pos[:, at]), together[:, :, at]
        )


@needs_kernel
def test_keys_that_are_no_numbers_change_no_rows_bits_by_the_number_of_rows() -> None:
    case = Case([99, 70], n_tokens=10, group=3)
    case.k, case.v = case.finite()
    case.k[0, :, [23, 27, 31]] = float("nan")
    case.k[1, :, [5, 40]], case.k[1, :, [17, 66]] = float("inf"), -float("inf")
    together = cpu_attention(case.q, layer_of(case.k, case.v), case.pos, 100)
    for t in range(10):
        alone = cpu_attention(case.q[:, :, t : t + 1], layer_of(case.k, case.v), case.pos[:, t : t + 1], 100)
        assert torch.equal(alone.view(torch.int16), together[:, :, t : t + 1].view(torch.int16))


@needs_kernel
@pytest.mark.parametrize("run", [1, 16])
def test_neither_empty_entries_nor_keys_past_a_row_reach_it(run: int) -> None:
    case = Case([100, 30], group=2, capacity=320)  # NaN behind 100 and 30
    case.v = case.v.nan_to_num(0.0)  # values behind it must be finite: they count with a weight of 2^-126
    index = listing(case, 60, run)
    assert is_close(cpu_attention_at(case.q, layer_of(case.k, case.v), index, case.pos), expected_at(case, index))
    case.k[:, :, 0] = case.v[:, :, 0] = float("nan")  # where an empty entry would be
    index = index.masked_fill(index == 0, -1)
    assert is_close(cpu_attention_at(case.q, layer_of(case.k, case.v), index, case.pos), expected_at(case, index))


# ---- the mass of pages ----------------------------------------------------------------------------------------------


@needs_kernel
@thinned("group,head_dim", GROUPS, HEAD_DIMS)
def test_mass_is_the_attention_that_16_keys_received(head_dim: int, group: int) -> None:
    for n_tokens, ends, n_keys in ((1, [0, 15, 16], 256), (2, [300, 64, 511], 512), (5, [4095, 4096, 4700], 4864)):
        case = Case(ends, n_tokens=n_tokens, group=group, head_dim=head_dim, capacity=n_keys + SPLIT)
        got, mass = cpu_attention_with_mass(case.q, layer_of(case.k, case.v), case.pos, n_keys)
        assert torch.equal(got, cpu_attention(case.q, layer_of(case.k, case.v), case.pos, n_keys))
        k, _ = case.finite()
        keys = k[:, :, :n_keys].double().repeat_interleave(group, 1)  # [B, N, S, H]
        scores = case.q.double() @ keys.transpose(-1, -2) * head_dim**-0.5  # [B, N, T, S]
        seen = torch.arange(n_keys) <= case.pos[:, None, :, None]  # [B, 1, T, S]
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1).unflatten(1, (-1, group)).sum((2, 3))  # [B, K, S]
        assert mass.dtype == torch.float32 and mass.shape == (len(ends), 2, n_keys // PAGE)
        # fp32 scores and sums, an exp2 of 3e-6; weights are not rounded here
        torch.testing.assert_close(mass.double(), p.unflatten(-1, (-1, PAGE)).sum(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mass.sum(-1), torch.full((len(ends), 2), float(group * n_tokens)), rtol=1e-5, atol=0)


# ---- as torch operators ---------------------------------------------------------------------------------------------


@needs_kernel
def test_the_operators_pass_torchs_own_checks() -> None:
    case = Case([40, 7], n_tokens=2, capacity=64)
    index = listing(case, 12)
    dense, with_mass = (
        torch.ops.gpt_fast_sd.cpu_attention.default,
        torch.ops.gpt_fast_sd.cpu_attention_with_mass.default,
    )
    k, v = case.finite()
    layer = flat(layer_of(k, v))
    torch.library.opcheck(dense, (case.q, *layer, case.pos, None, 64))
    torch.library.opcheck(dense, (case.q, *layer, case.pos, index, 0))
    torch.library.opcheck(with_mass, (case.q, *layer, case.pos, 64))


# ---- where it cannot be used ----------------------------------------------------------------------------------------


@pytest.fixture
def rebuilt() -> Iterator[None]:
    """Ask again whether the kernel can be built, and again when the test is over."""
    caches = (cpu_build.builds, cpu_build.library, cpu.kernel_for, cpu_sets._best_or)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@needs_kernel
@pytest.mark.parametrize(
    ("dtypes", "head_dim", "fits"),
    [("bf16 bf16", 64, True), ("bf16 bf16", 80, True), ("fp32 fp32", 16, True), ("fp16 fp16", 256, True),
     ("bf16 bf16", 24, False), ("bf16 bf16", 272, False), ("fp32 bf16", 64, False), ("bf16 fp16", 64, False)],
)  # fmt: skip
def test_it_serves_keys_of_the_queries_dtype_and_whole_sixteens_of_dims(dtypes: str, head_dim: int, fits: bool) -> None:
    asked, held = (FORMATS[name] for name in dtypes.split())
    assert cpu_attention_fits(head_dim, asked.dtype, held) is fits


def traced(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    """fn as a compiled step runs it, but for the code generator, and its graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    return torch.compile(own_code(fn), fullgraph=True, dynamic=False, backend=backend), graphs


def n_kernels(graph: torch.fx.GraphModule) -> int:
    return sum("cpu_attention" in str(node.target) for node in graph.graph.nodes)


def attend_all_ways(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_splits_carrier: Tensor, page: int, bodies: Bodies
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention, attention with mass, the mass, and attention to listed entries, as the engine's caches do it."""
    new, layer = k[:, :, : q.shape[2]] * 0.5, layer_of(k, v)
    kv = DenseKV([layer], n_splits_carrier, page, bodies=bodies)
    kv_indices, window_start = torch.arange(200).expand(k.shape[0], k.shape[1], -1), pos.new_full((len(pos),), 200)
    with_mass = kv.attend(0, q, new, new, pos)
    dense = DenseKV([layer], n_splits_carrier, bodies=bodies).attend(0, q, new, new, pos)
    return dense, with_mass, kv.mass[0], bodies.listed(q, layer, kv_indices, window_start, 100, pos)


def attends_as_the_core() -> bool:
    """Whether an engine's steps attend as the core is written."""
    model = tiny_model(tiny_config(head_dim=64), dtype=torch.bfloat16)
    cache = KVCache(model.config, 1, 300, format=FORMATS["bf16"], device=torch.device("cpu"))
    bodies = Runner(model, cache, backend=FastBackend(torch.device("cpu"), {})).bodies
    return bodies.dense is CORE.dense and bodies.listed is CORE.listed


def a_step(n_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of attend_all_ways."""
    case = Case([299 - n_tokens, 64, 0], n_tokens=1, group=3, capacity=6 * SPLIT)
    q = case.q.repeat(1, 1, n_tokens, 1)
    return q, *case.finite(), case.pos + torch.arange(n_tokens), torch.empty(2, 0)


@needs_kernel
def test_one_graph_serves_every_number_of_keys_in_view() -> None:
    step, graphs = traced(attend_all_ways)
    results = []
    for n in (2, 3, 6, 4):
        *args, n_splits_carrier = a_step(2)[:-1], torch.empty(n, 0)
        torch._dynamo.mark_dynamic(n_splits_carrier, 0, min=2, max=6)
        results.append(step(*args[0], n_splits_carrier, 64, CPP))
    assert len(graphs) == 1 and n_kernels(graphs[0]) == 3
    for n, (dense, with_mass, mass, at_listed) in zip((2, 3, 6, 4), results, strict=True):
        assert torch.equal(dense, results[0][0]) and torch.equal(with_mass, dense) and torch.equal(at_listed, dense)
        assert mass.shape == (3, 2, n * SPLIT // 64)
        assert torch.equal(mass[..., : 2 * SPLIT // 64], results[0][2])


@needs_kernel
@thinned("n_tokens,page", [1, 4], [16, 64, 256])
def test_what_attends_without_the_kernel_gives_the_same(n_tokens: int, page: int) -> None:
    step, graphs = traced(attend_all_ways)
    fast = step(*a_step(n_tokens), page, CPP)
    assert n_kernels(graphs[0]) == 3
    step, graphs = traced(attend_all_ways)
    compiled = step(*a_step(n_tokens), page, CORE)
    assert n_kernels(graphs[0]) == 0
    for slow in (compiled, attend_all_ways(*a_step(n_tokens), page, CORE)):
        for i in (0, 1, 3):
            # The plain bodies round scores to bf16 as well: they are 4 at most here, a weight is off by 2^-8 * 4 then.
            torch.testing.assert_close(fast[i], slow[i], rtol=0.03, atol=0.03)
        torch.testing.assert_close(fast[2], slow[2], rtol=0.03, atol=1e-5)
        assert fast[2].shape == slow[2].shape == (3, 2, 2 * SPLIT // page)


@needs_kernel
def test_a_compiler_that_does_not_know_the_instructions_is_not_an_error(
    rebuilt: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        from gpt_fast_sd.fast import cpu_build
        config.cpp_cache_precompile_headers = False  # which takes longer than all else, and this source has none
        assert cpu_build.library(Path({str(source)!r}))().seven() == 7
    """
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=400)


def test_without_a_compiler_the_caches_attend_all_the_same(rebuilt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found() -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert not cpu.available(64) and attends_as_the_core()


def test_a_maker_decides_which_kernel_bf16_caches_get(rebuilt: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert (wide, 64) in cpu_linear.cpu_kernels(64, bf16) and (cpu.SOURCE, 64) in cpu_linear.cpu_kernels(
            64, bf16, form=others[0]
        )


def test_a_cpu_without_avx512_gets_the_kernel_for_any(rebuilt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.delenv(cpu_sets.VARIABLE, raising=False)
    assert cpu.source_for(64, torch.bfloat16) == cpu.ANY
    assert cpu_sets.chosen().name not in ("amx", "avx512_bf16")
    monkeypatch.undo()


@pytest.mark.parametrize("asked", ["avx1024", "neon plain", "AVX2"])
def test_an_instruction_set_that_is_not_here_is_named(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_sets.VARIABLE, asked)
    with pytest.raises(ValueError, match=f"GPT_FAST_SD_CPU is '{asked}': this CPU has .*plain"):
        cpu_sets.chosen()


@needs_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_a_query_may_not_see_weighs_nothing_at_all(head_dim: int) -> None:
    """If all that it sees is 0 it gets 0, whatever else is in the batch."""
    q, k = torch.randn(2, 1, 8, head_dim).bfloat16(), torch.randn(2, 1, TILE, head_dim).bfloat16()
    v = torch.full((2, 1, TILE, head_dim), 4.0).bfloat16()
    v[:, :, :20] = 0.0
    pos = torch.arange(19, 27).expand(2, -1)
    together, alone = (cpu_attention(q[:, :, :n], layer_of(k, v), pos[:, :n].contiguous(), TILE) for n in (8, 1))
    assert not together[:, :, 0].any() and not alone.any() and together[:, :, 7].any()
    first = torch.full((2, 1, TILE), -1)  # a whole tile of nothing, whose values are large, before the first key
    named = torch.cat([first, torch.arange(TILE).expand(2, 1, -1)], -1)
    v[:, :, 0], v[:, :, 1:] = 1e30, 1.0
    at_1 = pos.new_full((2, 1), 1)
    listed = cpu_attention_at(q[:, :, :1], layer_of(k, v), torch.where(named == 0, -1, named), at_1)
    assert listed.eq(1.0).all()
