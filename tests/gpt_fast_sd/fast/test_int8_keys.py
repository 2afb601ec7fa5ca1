"""Keys and values of int8 with their scales: what attends and selects in PyTorch against references in fp64 and fp32.

What nobody reads of a row has NaNs for scales: empty slots, drafts that were rejected, and neighbours' longer texts.

Shapes: B rows, T tokens in this call, S entries, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast.cpu import attention_torch as on_cpu
from gpt_fast_sd.model import as_int8
from tests.gpt_fast_sd.fast import references

B, K, S, N_KEYS = 3, 2, 1024, 768
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of the norm; bf16 rounds queries, scores and weights


class Case:
    """Queries at the ends of texts of several lengths, and an int8 cache of which the first N_KEYS are in view."""

    def __init__(self, n_tokens: int, group: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(n_tokens + group + head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = normal(B, n_tokens, group * K, head_dim).transpose(1, 2).to(dtype)  # [B, N, T, H]
        self.k, self.k_scale = as_int8(normal(B, K, S, head_dim) * normal(B, K, S, 1).exp())
        self.v, self.v_scale = as_int8(normal(B, K, S, head_dim) * normal(B, K, S, 1).exp())
        ends = torch.tensor([300, 511, 700])
        self.pos = ends[:, None] + torch.arange(n_tokens) - n_tokens + 1  # [B, T]
        for row, end in enumerate(ends.tolist()):
            for scale in (self.k_scale, self.v_scale):
                scale[row, :, end + 1 :] = float("nan")

    @property
    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        return self.q, self.k, self.v, self.pos, N_KEYS

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return self.k_scale, self.v_scale

    def expected(self) -> Tensor:
        """fp64 [B, N, T, H]"""
        k, v = (references.meant(*x) for x in ((self.k, self.k_scale), (self.v, self.v_scale)))
        return references.attend_reference(self.q, k, v, self.pos)


def is_close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected.double()).norm() <= tolerance * expected.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("n_tokens", "group", "head_dim"),
    [(1, 1, 64), (1, 3, 128), (1, 4, 80), (5, 1, 128), (5, 3, 64), (63, 4, 64), (63, 3, 80), (200, 1, 64)],
)
def test_attention_is_that_of_what_the_numbers_stand_for(
    n_tokens: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(n_tokens, group, head_dim, dtype)
    expected = case.expected()
    outs = (
        kernels.decode_attention(*case.dense, 256, *case.scales),
        kernels.prefill_attention(*case.dense, *case.scales),
        kernels.prefill_attention_with_lse(*case.dense, *case.scales)[0],
        kernels.decode_attention_with_mass(*case.dense, 256, 16, *case.scales)[0],
    )
    for out in outs:
        assert out.dtype == dtype and is_close(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_rows_that_are_reduced_one_by_one_give_the_same(n_tokens: int) -> None:
    case = Case(n_tokens, group=1)
    q, k, v, pos, n_keys = case.dense
    k, v, *scales = (x[:, :, :n_keys] for x in (k, v, *case.scales))
    assert is_close(on_cpu.attend_rows(q, k, v, pos, *scales), case.expected(), 1e-5)


def test_masses_and_sums_are_those_of_the_references() -> None:
    case = Case(5, group=3)
    _, mass = kernels.decode_attention_with_mass(*case.dense, 256, 32, *case.scales)
    torch.testing.assert_close(
        mass, references.decode_attention_with_mass(*case.dense, 256, 32, *case.scales)[1], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(mass.sum(-1), torch.full((B, K), 15.0))
    _, lse = kernels.prefill_attention_with_lse(*case.dense, *case.scales)
    torch.testing.assert_close(lse, references.prefill_attention_with_lse(*case.dense, *case.scales)[1])
    q, k, _, pos, n_keys = case.dense
    again = kernels.key_mass(q, k, lse, pos, n_keys, 32, case.k_scale)
    torch.testing.assert_close(again, mass, atol=1e-5, rtol=1e-4)


def test_queries_of_some_slots_read_those_with_their_scales() -> None:
    case, slots = Case(32), torch.tensor([2, 0])
    q, k, v, pos, n_keys = case.dense
    out, mass = kernels.prefill_attention_of_slots(q[slots], k, v, slots, pos[slots], n_keys, *case.scales)
    assert is_close(out, case.expected()[slots], 1e-5)
    whole = kernels.decode_attention_with_mass(*case.dense, 256, 1, *case.scales)[1]
    torch.testing.assert_close(mass, whole[slots])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_listed_entries_come_with_their_scales(n_tokens: int, dtype: torch.dtype) -> None:
    case = Case(n_tokens, group=3, dtype=dtype)
    pages = torch.tensor([[3, 0, -1], [7, 1, 2]]).repeat(B, 1, 1)  # [B, K, 3]
    listed = kernels.entries_of(pages, 16)  # [B, K, 48]
    arguments = (case.q, case.k, case.v, listed, case.pos[:, 0] - 40, 60, case.pos, N_KEYS, 16, *case.scales)
    assert is_close(kernels.sparse_attention(*arguments), references.sparse_attention(*arguments), TOLERANCE[dtype])


def test_bounds_of_pages_hold_every_key_and_are_those_of_the_reference() -> None:
    case, page = Case(1, head_dim=8), 16
    scale = torch.where(case.k_scale.isnan(), 0.5, case.k_scale)
    scale[0, 0, :page] = 0.0  # a page of zeros
    made = [torch.full((B, K, S // page, 16), 7.0).bfloat16() for _ in range(2)]
    first = torch.tensor([0, 5, 60])
    for room, bounds in zip((kernels, references), made, strict=True):
        room.page_bounds(case.k, bounds, first, 4, page, scale)  # type: ignore[attr-defined]
    assert torch.equal(*made)
    keys = references.meant(case.k, scale).unflatten(2, (-1, page))  # [B, K, P, page, H]
    for row, start in enumerate(first.tolist()):
        for at in range(start, start + 4):
            high, low = made[0][row, :, min(at, S // page - 1)].float().chunk(2, -1)  # [K, H] each
            of_page = keys[row, :, min(at, S // page - 1)]  # [K, page, H]
            assert (of_page <= high[:, None]).all() and (of_page >= low[:, None]).all()
            assert (high - of_page.amax(1) <= of_page.amax(1).abs() / 64 + 1e-38).all()


BODIES: dict[str, Callable[[Case], Tensor]] = {
    "decode": lambda case: kernels.decode_attention(*case.dense, 256, *case.scales),
    "mass": lambda case: kernels.decode_attention_with_mass(*case.dense, 256, 16, *case.scales)[1],
}


@pytest.mark.parametrize("body", BODIES)
def test_a_scale_that_nobody_reads_may_be_anything(body: str) -> None:
    case = Case(5)
    poisoned = BODIES[body](case)
    for scale in case.scales:
        scale.nan_to_num_(3.0)
    assert torch.equal(poisoned, BODIES[body](case)) and poisoned.isfinite().all()
