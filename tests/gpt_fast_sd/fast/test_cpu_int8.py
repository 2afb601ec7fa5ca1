"""The CPU kernel over int8 keys and values beside fp64 on what they stand for: as near as its whole numbers let it be.

Queries are rounded to int8 by the largest of each, and the weights of a tile, times the scales of its values, to uint8
by the largest of these; nothing else is. Most queries here are whole numbers whose rounding changes nothing.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        M entries listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd import attention
from gpt_fast_sd.fast import cpu_attention_fits
from gpt_fast_sd.fast.compile import own_code
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.fast.ops.layer import flat
from gpt_fast_sd.model import FORMATS, CacheLayer
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.fast.test_cpu import body, listing, needs_kernel  # noqa: F401  body: needs_kernel asks for it
from tests.helpers import thinned

PAGE, TILE, KEY_SPLIT = cpu.PAGE, 64, 1024  # the last two of the kernel
NAN = float("nan")


class Case:
    """bf16 queries, int8 keys and values of a batch whose rows end at `ends`; the T queries of a row are its last ones.

    Behind a row's end keys and values are -128, their scales NaN. sharp: how large scores are, a power of two or 0.
    """

    def __init__(
        self, ends: Sequence[int], *, n_tokens: int = 1, group: int = 2, n_kv: int = 2, head_dim: int = 64,
        capacity: int | None = None, sharp: float = 1.0, whole: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        generator, n_rows, capacity = torch.Generator().manual_seed(seed), len(ends), capacity or max(ends) + 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q = normal(n_rows, n_tokens, n_kv * group + 3, head_dim)
        if whole:
            q = (q * 40).round().clamp(-127, 127)
            q[..., seed % head_dim] = -127.0
            q = q * 2.0**-5
        # as a model gives them: [B, T, N, H] transposed, one of several tensors in a row
        self.q = (q * sharp).bfloat16()[:, :, 1:-2].transpose(1, 2)
        # as a cache holds them: some slots of a larger buffer, of which some entries are there
        held = (normal(n_rows + 2, n_kv, capacity + 5, head_dim) for _ in range(2))
        (self.k, self.k_scale), (self.v, self.v_scale) = (to_int8(x) for x in held)
        self.pos = (torch.tensor(ends)[:, None] + torch.arange(1 - n_tokens, 1)).clamp(min=0)  # [B, T]
        for name in ("k", "v", "k_scale", "v_scale"):
            setattr(self, name, getattr(self, name)[1:-1, :, :capacity])
        for row, end in enumerate(ends):
            self.k[row, :, end + 1 :] = self.v[row, :, end + 1 :] = -128
            self.k_scale[row, :, end + 1 :] = self.v_scale[row, :, end + 1 :] = NAN

    def attend(self, n_keys: int | None = None, rows: slice = slice(None), tokens: slice = slice(None)) -> Tensor:
        out: Tensor = cpu.cpu_attention(*self.given(rows, tokens), n_keys or self.k.shape[2])
        return out

    def attend_at(self, index: Tensor) -> Tensor:
        out: Tensor = cpu.cpu_attention_at(self.q, self.layer(slice(None)), index, self.pos)
        return out

    def attend_with_mass(self, n_keys: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        out, mass = cpu.cpu_attention_with_mass(*self.given(rows, slice(None)), n_keys)
        return out, mass

    def given(self, rows: slice, tokens: slice) -> tuple[Tensor, CacheLayer, Tensor]:
        return self.q[rows, :, tokens], self.layer(rows), self.pos[rows, tokens]

    def layer(self, rows: slice) -> CacheLayer:
        return layer_of(self.k[rows], self.v[rows], *self.scales(rows))

    def scales(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self.k_scale[rows], self.v_scale[rows]

    def weights(self, index: Tensor) -> Tensor:
        """fp64 softmax over the listed entries that each query sees: [B, K, R, M], 0 where it sees none."""
        k = picked(self.k, index).double() * picked(self.k_scale, index).double()[..., None]  # [B, K, M, H]
        rows = self.q.double().unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, K, R, H]
        scores = rows @ k.mT * k.shape[-1] ** -0.5  # [B, K, R, M]
        seen = (index[:, :, None] >= 0) & (index[:, :, None] <= self.pos[:, None, :, None])  # [B, K, T, M]
        seen = seen.repeat(1, 1, rows.shape[2] // seen.shape[2], 1)
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)

    def expected(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """fp64 attention [B, N, T, H] to the listed entries, or to all, and how far whole numbers may be from it.

        Of a tile's 64 weights, times the scales of values, each is off by half of what its uint8 counts in.
        """
        if index is None:
            index = torch.arange(self.k.shape[2]).expand(*self.k.shape[:2], -1)
        index = F.pad(index, (0, -index.shape[-1] % TILE), value=-1)
        v = picked(self.v, index).double()  # [B, K, M, H]
        shares = self.weights(index) * picked(self.v_scale, index).double().nan_to_num(0.0)[:, :, None]  # [B, K, R, M]
        by_tile = shares.unflatten(-1, (-1, TILE)).amax(-1) / 510  # [B, K, R, M / TILE]
        sizes = v.abs().masked_fill((index > self.pos.amax(1)[:, None, None])[..., None], 0.0)
        off = by_tile @ sizes.unflatten(2, (-1, TILE)).sum(3)
        shape = self.q.shape[1] // self.k.shape[1], self.q.shape[2]
        exact, off = (x.unflatten(2, shape).flatten(1, 2) for x in (shares @ v, off))
        return exact, off


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers of x [..., H], and what one of them is worth, fp16 [...]."""
    scale = (x.abs().amax(-1) / 127).half()
    return (x / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def picked(x: Tensor, index: Tensor) -> Tensor:
    """The entries [B, K, M, ...] of x [B, K, S, ...] that an index [B, K, M] names, any for what it does not."""
    rows, heads = torch.arange(x.shape[0])[:, None, None], torch.arange(x.shape[1])[:, None]
    return x[rows, heads, index.clamp(0, x.shape[2] - 1)]


def is_close(got: Tensor, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether it is within what whole numbers cost, 2^-8 for the output's own rounding and a twentieth for fp32's."""
    exact, off = expected
    assert got.dtype == torch.bfloat16 and got.shape == exact.shape
    return bool(((got.double() - exact).abs() <= 1.05 * (off + 2.0**-8 * exact.abs()) + 1e-7).all())


@needs_kernel
@thinned("group,head_dim", [1, 3, 4], cpu.HEAD_DIMS)
def test_attention_is_that_of_fp64_but_for_whole_weights(head_dim: int, group: int) -> None:
    for n_tokens in (1, 2, 5, 8, 33, 63):
        ends = [max(n_tokens - 1, end) for end in (0, 37, 130, 299)]
        case = Case(ends, n_tokens=n_tokens, group=group, head_dim=head_dim, capacity=320, seed=n_tokens)
        assert is_close(case.attend(), case.expected())


@needs_kernel
@thinned("group,head_dim", [1, 3, 4], cpu.HEAD_DIMS)
def test_normal_queries_cost_two_hundredths_of_the_output(head_dim: int, group: int) -> None:
    """A query is off by up to 2^-8 of its largest, a weight by up to 2^-9 of its tile's: measured at most .012."""
    for n_tokens in (1, 5):
        case = Case([40, 130, 4500], n_tokens=n_tokens, group=group, head_dim=head_dim, whole=False)
        exact, off = case.expected()
        off = (case.attend().double() - exact).flatten(1).norm(dim=1)
        assert (off <= 0.02 * exact.flatten(1).norm(dim=1)).all()


@needs_kernel
@pytest.mark.parametrize(("head_dim", "n_tokens"), [(64, 3), (128, 1)])
def test_rows_may_end_anywhere_around_the_edges_of_tiles_and_splits(head_dim: int, n_tokens: int) -> None:
    middles = TILE // 2, TILE, KEY_SPLIT // 2, KEY_SPLIT - TILE, KEY_SPLIT, KEY_SPLIT + TILE
    edges = [edge + by for edge in middles for by in (-2, -1, 0, 1)]
    for ends in ([2, *edges[:8]], edges[8:16], edges[16:]):
        case = Case(ends, n_tokens=n_tokens, n_kv=1, head_dim=head_dim)
        assert is_close(case.attend(), case.expected())


@needs_kernel
@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65, 100, 4097])
def test_a_cache_may_end_anywhere(capacity: int) -> None:
    case = Case([capacity - 1, capacity // 2], group=3, capacity=capacity)
    assert is_close(case.attend(), case.expected())
    index = torch.arange(capacity).flip(0).expand(2, 2, -1)
    assert is_close(case.attend_at(index), case.expected(index))


@needs_kernel
@pytest.mark.parametrize("sharp", [0.0, 0.125, 8.0, 64.0])
def test_attention_may_be_flat_or_sharp_and_scales_of_any_size(sharp: float) -> None:
    case = Case([700, 64, 5000], n_tokens=5, group=3, sharp=sharp)
    assert is_close(case.attend(), case.expected())
    case.v_scale.mul_(2.0 ** torch.randint(-8, 8, case.v_scale.shape))  # one token's values far above its neighbours'
    assert is_close(case.attend(), case.expected())
    for scale in (2.0**-24, 65504.0):  # the smallest and the largest
        case.v_scale.masked_fill_(~case.v_scale.isnan(), scale)
        assert is_close(case.attend(), case.expected())


@needs_kernel
def test_queries_may_stand_in_any_order_and_past_the_keys_in_view() -> None:
    case = Case([200, 10], n_tokens=6)
    case.pos = torch.tensor([[200, 0, 64, 63, 65, 1], [10, 10, 0, 3, 9, 0]])
    assert is_close(case.attend(), case.expected())
    exact, off = case.expected()
    assert is_close(case.attend(64)[:, :, 3:4], (exact[:, :, 3:4], off[:, :, 3:4]))
    assert not case.attend(64)[0, :, [0, 2, 4]].any()


@needs_kernel
@pytest.mark.parametrize("bad", [NAN, float("inf"), 65504.0])
def test_no_scale_behind_a_row_reaches_it_whatever_it_is(bad: float) -> None:
    for end in (0, 62, 63, 64, 4095, 4096):
        case = Case([end, 4200], n_kv=1, head_dim=128)
        expected = case.expected()
        case.k_scale[0, :, end + 1 :] = case.v_scale[0, :, end + 1 :] = bad
        got, mass = case.attend_with_mass(4192)
        assert is_close(got[:1], (expected[0][:1], expected[1][:1]))
        assert (mass[0, :, end // PAGE + 1 :] == 0).all()


@needs_kernel
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("group", [1, 3])
def test_a_scale_that_is_no_number_gives_nan_to_whoever_reads_it_and_touches_no_other(group: int, which: str) -> None:
    """Whole numbers once made nothing of it, in most lanes of a vector: a damaged token was as if it were not there."""
    for end, place in [*((80, place) for place in (0, 5, 16, 37, 63, 79)), (KEY_SPLIT, KEY_SPLIT)]:
        case = Case([end, end], n_tokens=3, group=group)
        index = torch.arange(end + 1).flip(0).expand(2, 2, -1).contiguous()
        before = case.attend(), case.attend_at(index)
        getattr(case, which)[1, 1, place] = NAN
        hit = torch.zeros(before[0].shape[:3], dtype=torch.bool)
        hit[1, group:] = case.pos[1] >= place  # the queries of its kv head
        for was, now in zip(before, (case.attend(), case.attend_at(index)), strict=True):
            assert now[hit].isnan().all() and torch.equal(now[~hit], was[~hit])


@needs_kernel
@thinned("group,head_dim", [1, 3, 4], cpu.HEAD_DIMS)
def test_a_querys_output_hangs_on_nothing_but_its_own_row_nor_on_threads(group: int, head_dim: int) -> None:
    case = Case([4500, 63, 130, 4096], n_tokens=7, group=group, head_dim=head_dim, capacity=5120)
    together, mass = case.attend_with_mass(4608)
    for n_keys in (4501, 4544, 5120):
        assert torch.equal(case.attend(n_keys), together)
    for row, end in enumerate(case.pos[:, -1].tolist()):
        one, n_pages = slice(row, row + 1), end // PAGE + 1
        alone = case.attend_with_mass(n_pages * PAGE, one)
        assert torch.equal(alone[0], together[one]) and torch.equal(alone[1], mass[one, :, :n_pages])
        for t in (0, 1, 4, 6):
            assert torch.equal(case.attend(end + 1, one, slice(t, t + 1))[:, :, 0], together[one, :, t])
    threads = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 4, 7):
            torch.set_num_threads(n_threads)
            assert all(map(torch.equal, case.attend_with_mass(4608), (together, mass)))
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@pytest.mark.parametrize("fine", [False, True])
@thinned("head_dim,n_tokens", cpu.HEAD_DIMS, [2, 5, 6, 7, 8, 9, 10, 13, 19])  # one head: as many rows scored
def test_what_many_rows_find_over_bytes_each_finds_alone(head_dim: int, n_tokens: int, fine: bool) -> None:
    case = Case([300, 150], n_tokens=n_tokens, group=1, head_dim=head_dim, whole=False)

    def attend(tokens: slice) -> Tensor:
        q, layer, pos = case.given(slice(None), tokens)
        out: Tensor = cpu.cpu_attention(q, replace(layer, fine=fine), pos, 301)
        return out

    together = attend(slice(None))
    for t in range(n_tokens):
        assert torch.equal(attend(slice(t, t + 1)), together[:, :, t : t + 1])


@needs_kernel
def test_neither_blocks_of_queries_nor_splits_show_in_a_bit_of_a_long_chunk() -> None:
    case = Case([2300], n_tokens=130, group=3)
    each = [case.attend(tokens=slice(t, t + 1)) for t in range(130)]
    threads = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 9):
            torch.set_num_threads(n_threads)
            assert case.attend().equal(torch.cat(each, 2))
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("head_dim", cpu.HEAD_DIMS)
def test_listed_entries_are_those_attended_to(head_dim: int, group: int) -> None:
    for n, run, n_tokens in ((1, 1, 1), (7, 1, 2), (63, 4, 1), (64, 16, 4), (150, 5, 9), (200, 16, 1)):
        case: Any = Case([8, 64, 299], n_tokens=n_tokens, group=group, head_dim=head_dim, capacity=320, seed=n)
        index = listing(case, n, run)
        assert is_close(case.attend_at(index), case.expected(index))
        case.k_scale[:, :, 0] = case.v_scale[:, :, 0] = NAN  # where an empty entry would be
        index = index.masked_fill(index == 0, -1)
        assert is_close(case.attend_at(index), case.expected(index))


@needs_kernel
@pytest.mark.parametrize("head_dim", cpu.HEAD_DIMS)
def test_listing_all_entries_in_their_order_gives_the_dense_bits(head_dim: int) -> None:
    case = Case([4500, 63, 4096], n_tokens=3, group=3, head_dim=head_dim)
    assert torch.equal(case.attend_at(torch.arange(4501).expand(3, 2, -1)), case.attend())


@needs_kernel
@thinned("group,head_dim", [1, 3, 4], cpu.HEAD_DIMS)
def test_mass_is_the_attention_that_16_keys_received(head_dim: int, group: int) -> None:
    for n_tokens, ends, n_keys in ((1, [0, 15, 16], 256), (5, [4095, 4096, 4700], 4864)):
        case = Case(ends, n_tokens=n_tokens, group=group, head_dim=head_dim, capacity=n_keys + 3)
        got, mass = case.attend_with_mass(n_keys)
        assert torch.equal(got, case.attend(n_keys))
        p = case.weights(torch.arange(n_keys).expand(3, 2, -1)).sum(2)  # [B, K, S]
        # scores of up to 50 are fp32, off by 2^-23 of that, an exp2 by 3e-6; weights are not rounded here
        torch.testing.assert_close(mass.double(), p.unflatten(-1, (-1, PAGE)).sum(-1), rtol=4e-5, atol=1e-6)
        torch.testing.assert_close(mass.sum(-1), torch.full((3, 2), float(group * n_tokens)), rtol=1e-5, atol=0)


@needs_kernel
def test_what_a_query_may_not_see_weighs_nothing_at_all() -> None:
    case = Case([26, 26], n_tokens=8, n_kv=1, capacity=TILE)
    case.v[:, :, :20] = 0
    assert not case.attend(TILE, tokens=slice(0, 1)).any()
    together = case.attend(TILE)
    assert not together[:, :, 0].any() and together[:, :, 7].any()


# ---- as torch operators ---------------------------------------------------------------------------------------------


@needs_kernel
def test_the_operators_pass_torchs_own_checks() -> None:
    case: Any = Case([40, 7], n_tokens=2, capacity=64)
    dense, with_mass = torch.ops.gpt_fast_sd.cpu_attention, torch.ops.gpt_fast_sd.cpu_attention_with_mass
    layer = flat(layer_of(case.k, case.v, case.k_scale.nan_to_num(1.0), case.v_scale.nan_to_num(1.0)))
    torch.library.opcheck(dense.default, (case.q, *layer, case.pos, None, 64))
    torch.library.opcheck(dense.default, (case.q, *layer, case.pos, listing(case, 12), 0))
    torch.library.opcheck(with_mass.default, (case.q, *layer, case.pos, 64))


@needs_kernel
@pytest.mark.parametrize(
    ("dtype", "head_dim", "fits"),
    [("bfloat16", 64, True), ("bfloat16", 80, True), ("float32", 64, True), ("float16", 128, True),
     ("bfloat16", 72, False), ("int8", 64, False)],
)  # fmt: skip
def test_it_serves_queries_of_any_dtype_over_int8_keys(dtype: str, head_dim: int, fits: bool) -> None:
    for form in ("int8", "planes"):
        assert cpu_attention_fits(head_dim, getattr(torch, dtype), FORMATS[form]) is fits


@needs_kernel
def test_compiled_steps_attend_by_it_and_give_what_the_core_does() -> None:
    """In the core queries are as they are, and weights are rounded to bf16."""
    case = Case([299, 64, 0], n_tokens=2, group=3, capacity=512)
    case.k_scale, case.v_scale = case.k_scale.nan_to_num(0.0), case.v_scale.nan_to_num(0.0)
    given = *case.given(slice(None), slice(None)), 512
    for page in (0, 16):
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
            graphs.append(graph)  # noqa: B023  called at once
            return graph

        step = torch.compile(own_code(stand_ins.dense), fullgraph=True, dynamic=False, backend=backend)
        for got, expected in zip(step(*given, page), attention.dense(*given, page), strict=True):
            torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)
        assert sum("cpu_attention" in str(node.target) for node in graphs[0].graph.nodes) == 1
