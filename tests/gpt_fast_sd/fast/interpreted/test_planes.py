"""Interpreted attention over planes of nibbles against fp64 on what is read: all of them whole, or as drafts do.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import pytest
import torch

from gpt_fast_sd.fast.triton import decode as decode_triton
from gpt_fast_sd.fast.triton import prefill as prefill_triton
from gpt_fast_sd.fast.triton import select as select_triton
from gpt_fast_sd.fast.triton import sparse as sparse_triton
from gpt_fast_sd.model import as_planes
from tests.gpt_fast_sd.fast import dense, listed, references
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32, INT8, NAN, PLANES, TAIL, assert_close, quantized
from tests.gpt_fast_sd.fast.references import layer_of
from tests.helpers import thinned

SPLIT = 64


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces are full of NaN before a kernel writes them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))


@thinned(
    "asked,tail",
    [(BF16, 64, 1, 3), (BF16, 128, 3, 4), (FP16, 96, 3, 2), (FP32, 64, 5, 1), (BF16, 32, 9, 2)],
    [TAIL, 0],
)
def test_a_few_queries_read_planes_and_their_mass_is_that_of_what_they_read(
    asked: tuple[torch.dtype, int, int, int], tail: int
) -> None:
    """What is behind a row has a NaN for a scale."""
    dtype, head_dim, n_tokens, group = asked
    shape = {"n_tokens": n_tokens, "group": group, "head_dim": head_dim, "n_keys": 112}
    case = dense.Case([37, 100], dtype=dtype, held=PLANES, **shape)  # type: ignore[arg-type]
    case.tail = tail
    arguments = case.q, case.layer(), case.pos, case.n_keys, SPLIT
    out, mass = decode_triton.attend_with_mass(*arguments, 16, arch=89)
    assert_close(out, case.expected())
    torch.testing.assert_close(mass, case.expected_mass(16), rtol=1e-5, atol=1e-5)
    assert decode_triton.attend(*arguments, arch=89).equal(out)
    # alone, with fewer keys in view, and one token of several
    given = case.q[:1], case.layer(slice(1)), case.pos[:1]
    assert decode_triton.attend(*given, 38, SPLIT, arch=89).equal(out[:1])


def test_both_planes_are_read_as_bytes_are() -> None:
    outs = []
    for held in (INT8, PLANES):
        case = dense.Case([37, 100], n_tokens=3, group=4, n_keys=112, dtype=FP16, held=held)
        given = case.q, case.layer(), case.pos, case.n_keys
        outs.append(decode_triton.attend(*given, SPLIT, arch=89))
    torch.testing.assert_close(*outs, rtol=2e-3, atol=2e-3)


@thinned("asked,tail", [(BF16, 64), (FP32, 96)], [TAIL, 0])
def test_many_queries_read_planes(asked: tuple[torch.dtype, int], tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, head_dim = asked
    monkeypatch.setattr(prefill_triton, "FEW_ROWS", 0)
    case = dense.Case([50, 99], n_tokens=9, n_keys=100, head_dim=head_dim, dtype=dtype, held=PLANES)
    case.tail = tail
    out, lse = prefill_triton.attend_with_lse(case.q, case.layer(), case.pos, 100, arch=89)
    assert_close(out, case.expected())
    expected = case.scores().logsumexp(-1).float()
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)
    mass = prefill_triton.key_mass(case.q, case.layer(), expected, case.pos, 100, 16, arch=89)
    torch.testing.assert_close(mass, case.expected_mass(16), rtol=1e-5, atol=1e-5)


@thinned("asked,tail", [(BF16, 64, 16), (FP16, 128, 1), (FP32, 96, 16)], [TAIL, 0])
def test_listed_entries_are_read_of_planes(asked: tuple[torch.dtype, int, int], tail: int) -> None:
    """In one chunk, and in several that are merged."""
    dtype, head_dim, page = asked
    for n_listed, width in ((48, 16), (160, 40)):
        shape = {"page": page, "n_listed": n_listed, "width": width, "n_tokens": 2, "head_dim": head_dim}
        case = listed.Case([192, 40], [220, 52], dtype=dtype, held=PLANES, **shape)  # type: ignore[arg-type]
        case.tail = tail
        arguments = case.q, case.layer(), case.kv_indices, case.window_start, width, case.pos, case.n_keys, page
        assert_close(sparse_triton.attend(*arguments, arch=90), case.expected())
        assert_close(references.sparse_attention(*arguments), case.expected())


@pytest.mark.parametrize("head_dim", [64, 96])
def test_bounds_of_pages_are_those_of_bytes(head_dim: int) -> None:
    (k, scale), first = quantized(torch.randn(2, 2, 96, head_dim)), torch.tensor([0, 3])
    upper, lower = as_planes(k)
    made = [torch.zeros(2, 2, 6, 2 * head_dim, dtype=BF16) for _ in range(2)]
    select_triton.page_bounds(layer_of(k, k, scale, scale), made[0], first, 3, 16)
    select_triton.page_bounds(layer_of(upper, upper, scale, scale, lower, lower), made[1], first, 3, 16)
    assert made[0].any() and made[0].equal(made[1])
