"""The CPU kernel over planes: both give the bits of bytes, one what drafts read; and queries of two bytes a number.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, G = N // K, H head dim,
        M entries listed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.ops.layer import flat
from gpt_fast_sd.model import FORMATS, CacheLayer, as_planes
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.fast.test_cpu import Case as WideCase
from tests.gpt_fast_sd.fast.test_cpu import body, listing, needs_kernel  # noqa: F401  body: needs_kernel asks for it
from tests.gpt_fast_sd.fast.test_cpu_int8 import KEY_SPLIT, NAN, PAGE, TILE, Case, is_close
from tests.helpers import thinned

TAIL = 64


class Planes(Case):
    """The same, in planes; with a tail a draft reads them."""

    def __init__(self, *ends: Any, tail: int = 0, fine: bool = False, **more: Any) -> None:
        super().__init__(*ends, **more)
        self.upper, self.lower = zip(*(as_planes(x.contiguous()) for x in (self.k, self.v)), strict=True)
        self.tail, self.fine = tail, fine

    def layer(self, rows: slice) -> CacheLayer:
        return layer_of(self.upper[0][rows], self.upper[1][rows], *self.scales(rows))

    def scales(self, rows: slice) -> Any:
        beside = self.k_scale, self.v_scale, *self.lower
        return *(x[rows] for x in beside), self.tail, self.fine

    def expected(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of what is read; the kernel may be as far from it as from whole bytes."""
        read: Any = copy.copy(self)
        read.k, read.v = (
            references.meant(x, None, low, self.pos, self.tail) for x, low in zip(self.upper, self.lower, strict=True)
        )
        exact, off = Case.expected(read, index)
        return exact, off


@needs_kernel
@pytest.mark.parametrize("fine", [False, True])
@thinned("group,head_dim", [1, 3, 4], cpu.HEAD_DIMS)
def test_both_planes_give_the_bits_of_bytes(head_dim: int, group: int, fine: bool) -> None:
    for n_tokens, ends in ((1, [0, 37, 4500]), (5, [4, 64, 299]), (33, [40, 130, 4100])):
        shape = {"n_tokens": n_tokens, "group": group, "head_dim": head_dim, "capacity": 4608, "whole": False}
        byte: Any = Case(ends, **shape)  # type: ignore[arg-type]
        plane: Any = Planes(ends, fine=fine, **shape)
        byte.scales = lambda rows, of=byte: (of.k_scale[rows], of.v_scale[rows], None, None, 0, fine)
        assert torch.equal(plane.attend(), byte.attend())
        assert all(map(torch.equal, plane.attend_with_mass(4608), byte.attend_with_mass(4608)))
        index = listing(byte, 150, 5)
        beside = byte.scales(slice(None))
        assert torch.equal(
            plane.attend_at(index), cpu.cpu_attention_at(byte.q, layer_of(byte.k, byte.v, *beside), index, byte.pos)
        )


@needs_kernel
@pytest.mark.parametrize("fine", [False, True])
@thinned("group,head_dim", [1, 3, 4], cpu.HEAD_DIMS)
def test_a_draft_reads_the_upper_plane_and_the_last_entries_whole(head_dim: int, group: int, fine: bool) -> None:
    for n_tokens in (1, 4, 33):
        ends = [max(n_tokens - 1, end) for end in (0, 37, 130, 299)]
        case = Planes(
            ends, tail=TAIL, fine=fine, n_tokens=n_tokens, group=group, head_dim=head_dim, capacity=320, seed=n_tokens
        )
        assert is_close(case.attend(), case.expected())


@needs_kernel
@pytest.mark.parametrize("tail", [1, 17, TAIL, 1000])
def test_the_tail_may_begin_anywhere(tail: int) -> None:
    middles = TILE // 2, TILE, KEY_SPLIT // 2, KEY_SPLIT - TILE, KEY_SPLIT, KEY_SPLIT + TILE
    edges = [edge + by for edge in middles for by in (-1, 0, 1)]
    case = Planes([2, *edges], tail=tail, n_kv=1, n_tokens=2)
    assert is_close(case.attend(), case.expected())


@needs_kernel
@pytest.mark.parametrize("sharp", [0.0, 0.125, 8.0, 64.0])
def test_attention_may_be_flat_or_sharp(sharp: float) -> None:
    case = Planes([700, 64, 5000], tail=TAIL, n_tokens=5, group=3, sharp=sharp)
    assert is_close(case.attend(), case.expected())


@needs_kernel
@pytest.mark.parametrize("head_dim", cpu.HEAD_DIMS)
def test_listed_entries_of_planes_are_those_attended_to(head_dim: int) -> None:
    for n, run, n_tokens in ((7, 1, 2), (63, 4, 1), (64, 16, 4), (150, 5, 9), (200, 16, 1)):
        case: Any = Planes([8, 64, 299], tail=TAIL, n_tokens=n_tokens, group=3, head_dim=head_dim, capacity=320, seed=n)
        index = listing(case, n, run)
        assert is_close(case.attend_at(index), case.expected(index))
        case.k_scale[:, :, 0] = case.v_scale[:, :, 0] = NAN  # where an empty entry would be
        index = index.masked_fill(index == 0, -1)
        assert is_close(case.attend_at(index), case.expected(index))
    case = Planes([4500, 63, 4096], tail=TAIL, n_tokens=3, group=3, head_dim=head_dim)
    assert torch.equal(case.attend_at(torch.arange(4501).expand(3, 2, -1)), case.attend())


@needs_kernel
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("head_dim", cpu.HEAD_DIMS)
def test_what_a_draft_reads_hangs_on_its_own_row_alone(head_dim: int, fine: bool) -> None:
    case = Planes([4500, 63, 130, 4096], tail=TAIL, fine=fine, group=3, head_dim=head_dim, capacity=5120)
    together, mass = case.attend_with_mass(4608)
    for n_keys in (4501, 4544, 5120):
        assert torch.equal(case.attend(n_keys), together)
    for row, end in enumerate(case.pos[:, -1].tolist()):
        one, n_pages = slice(row, row + 1), end // PAGE + 1
        alone = case.attend_with_mass(n_pages * PAGE, one)
        assert torch.equal(alone[0], together[one]) and torch.equal(alone[1], mass[one, :, :n_pages])


@needs_kernel
@pytest.mark.parametrize("tail", [0, TAIL])
@pytest.mark.parametrize("head_dim", cpu.HEAD_DIMS)
def test_queries_of_two_bytes_lose_nothing_that_bf16_holds(head_dim: int, tail: int) -> None:
    """With one byte a query is off by 2^-8 of its largest number, which weighs where others are much smaller."""
    errors = {}
    for fine in (False, True):
        case: Any = Planes(
            [40, 130, 4500], tail=tail, fine=fine, n_tokens=5, group=3, head_dim=head_dim, whole=False, sharp=0.25
        )
        case.q[..., 3] *= 64.0  # as where keys have been divided by it
        case.k[..., 3] = 0
        case.upper, case.lower = zip(*(as_planes(x.contiguous()) for x in (case.k, case.v)), strict=True)
        exact, _ = case.expected()
        off = (case.attend().double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        errors[fine] = float(off.max())
    narrow = (
        cpu.source_for(head_dim, torch.bfloat16, FORMATS["planes"]) == cpu.SOURCE
    )  # elsewhere queries are fp32 anyway
    assert errors[True] < 0.01 and (errors[False] > 3 * errors[True] if narrow else errors[False] == errors[True])


def strange(case: Any, bad: float) -> Any:
    """The same with a number of one query that is not finite."""
    case.q = case.q.clone()
    case.q[1, 1, -1, 5] = bad
    return case


@needs_kernel
@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("group", [2, 3])
def test_a_query_that_is_not_finite_gives_nan_and_touches_no_other(group: int, bad: float) -> None:
    """Whole numbers once made something finite of it."""
    for fine in (False, True):
        for kind in (Case, Planes):
            shape = {"n_tokens": 3, "group": group, "capacity": 512}
            case: Any = kind([500, 130, 70], **shape)  # type: ignore[arg-type]
            beside = (case.k_scale, case.v_scale, *getattr(case, "lower", (None, None)), 0, fine)
            case.scales = lambda rows, beside=beside: (*(x if x is None else x[rows] for x in beside[:4]), *beside[4:])
            before = case.attend()
            after = strange(case, bad).attend()
            hit = torch.zeros(after.shape[:3], dtype=torch.bool)
            hit[1, 1, -1] = True
            assert after[hit].isnan().all() and torch.equal(after[~hit], before[~hit])


@needs_kernel
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_query_that_is_not_finite_gives_nan_over_bf16_keys_too(bad: float) -> None:
    """Once its output was 0, as if it saw nothing."""
    case: Any = WideCase([130, 130], n_tokens=2)
    case.k, case.v = case.finite()
    before = cpu.cpu_attention(case.q, layer_of(case.k, case.v), case.pos, 131)
    after = cpu.cpu_attention(strange(case, bad).q, layer_of(case.k, case.v), case.pos, 131)
    hit = torch.zeros(after.shape[:3], dtype=torch.bool)
    hit[1, 1, -1] = True
    assert after[hit].isnan().all() and torch.equal(after[~hit], before[~hit])


@needs_kernel
def test_the_operators_pass_torchs_own_checks_with_planes() -> None:
    case: Any = Planes([40, 7], n_tokens=2, capacity=64, tail=TAIL)
    case.k_scale, case.v_scale = case.k_scale.nan_to_num(1.0), case.v_scale.nan_to_num(1.0)
    dense, with_mass = torch.ops.gpt_fast_sd.cpu_attention, torch.ops.gpt_fast_sd.cpu_attention_with_mass
    q, layer, pos = case.given(slice(None), slice(None))
    torch.library.opcheck(dense.default, (q, *flat(layer), pos, None, 64))
    torch.library.opcheck(dense.default, (q, *flat(layer), pos, listing(case, 12), 0))
    torch.library.opcheck(with_mass.default, (q, *flat(layer), pos, 64))
