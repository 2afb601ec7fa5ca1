"""Selection, interpreted and in the core, equals references and plain Python: ties, NaN, infinities, any length.

And the search for the cut finds the token that a sort finds, and that plain Python finds in fractions.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K, H head dim,
        P pages, n pages chosen, C listed entries; of filters B rows of scores, V vocabulary.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import filters as reference
from gpt_fast_sd.fast.triton import filters as filters_triton
from gpt_fast_sd.fast.triton import select as select_triton
from gpt_fast_sd.model import as_planes
from gpt_fast_sd.policies import selection
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.dense import BF16, DTYPES, FP16, FP32, NAN, quantized
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.fast.rows import expected as kept
from tests.gpt_fast_sd.fast.rows import found, full_of_ties, places
from tests.gpt_fast_sd.fast.rows import rows_of_every_kind as scores_of_every_kind
from tests.gpt_fast_sd.fast.selected import INF, best, rows_of_every_kind
from tests.helpers import few, thinned

ROOMS = selection, select_triton, references  # the core, CUDA's code, and for two of them the obvious one


def assert_best(scores: Tensor, n_valid: Tensor, n: int) -> None:
    """Each room selects of rows [..., P] what Python's stable sort does."""
    rows = zip(scores.flatten(0, -2).tolist(), n_valid.expand(scores.shape[:-1]).flatten().tolist(), strict=True)
    expected = [best(row, valid, n) for row, valid in rows]
    for room in ROOMS:
        got = room.top_pages(scores, n_valid, n)
        assert got.shape == (*scores.shape[:-1], n) and got.flatten(0, -2).tolist() == expected


@pytest.mark.parametrize("n_pages", few([1, 5, 1000, 100], [1, 5, 1000]))
def test_the_best_pages_are_those_of_a_stable_sort(n_pages: int) -> None:
    n_valid = torch.tensor([n_pages, n_pages * 2 // 3, n_pages]).repeat(3)
    for n in {1, min(7, n_pages), n_pages, n_pages + 3}:
        assert_best(rows_of_every_kind(n_pages), n_valid, n)


MET = [  # scores that a bisection meets, and 0, its first middle of symmetric ones, of both signs
    *([sign * (1.0 + i * 2.0**-23) for i in (5, 0, 7, 2, 6, 1, 4, 3)] for sign in (1, -1)),
    *([-1.0, *zeros, 1.0] for zeros in ([0.0], [-0.0], [-0.0, 0.0], [0.0, -0.0])),
    # 0.0 is the score above -0.0, and as -0.0 is at or above it, all zeros were taken, past the end of the list
    [-0.0], [-0.0] * 5, [-1.0, -0.0, -2.0, -0.0, -0.0], [NAN, -0.0, -0.0],
]  # fmt: skip


def test_a_bisection_takes_what_it_meets_and_zeros_of_both_signs_and_no_more_than_is_wanted() -> None:
    for scores in MET:
        for n in range(1, len(scores) + 2):
            assert_best(torch.tensor([scores, scores]), torch.tensor(9), n)


def test_rows_may_be_longer_than_what_is_looked_at_together() -> None:
    scores = rows_of_every_kind(2 * select_triton.BLOCK + 100)
    n_valid = torch.tensor([10**6, select_triton.BLOCK, 3000]).repeat(3)
    for n in (64, 2500):
        assert_best(scores, n_valid, n)


def test_how_many_are_valid_is_broadcast_and_may_be_none_and_what_is_past_them_does_not_matter() -> None:
    for n_valid in (torch.tensor(20), torch.tensor([[0], [50], [3]]), torch.randint(0, 51, (2, 1, 2))):
        assert_best(torch.randn(2, 3, 2, 50), n_valid, 9)
    scores = torch.randn(4, 60)
    for behind in (NAN, INF, 5.0):
        scores[:, 33:] = behind
        assert_best(scores, torch.tensor(33), 8)


@pytest.mark.parametrize(("n_pages", "n_listed", "page"), [(9, 64, 16), (3, 128, 16), (20, 96, 32), (40, 24, 8)])
def test_guided_lists_the_pages_of_most_mass_of_the_rows_that_are_due(n_pages: int, n_listed: int, page: int) -> None:
    n_kv = 2 if n_pages < 10 else 1
    mass = torch.randint(0, 6, (2, 4, n_kv, n_pages)).float()
    due, first_window_page = torch.tensor([True, False, True, True]), torch.tensor([2, 5, n_pages, n_pages + 7])
    before = torch.randint(-1, 500, (2, 4, n_kv, n_listed))
    expected = before.clone()
    for layer in range(2):
        for row in (0, 2, 3):
            for head in range(n_kv):
                pages = best(mass[layer, row, head].tolist(), int(first_window_page[row]), n_listed // page)
                entries = [page * p + i if p >= 0 else -1 for p in pages for i in range(page)]
                expected[layer, row, head] = torch.tensor(entries)
    for room in ROOMS[:2]:
        kv_indices = before.clone()
        room.guided_select(mass, kv_indices, due, first_window_page, page)
        assert kv_indices.equal(expected)


@thinned("shape,dtype", [(64, 16), (128, 32), (96, 16), (8, 128)], DTYPES)
def test_bounds_are_the_largest_and_the_smallest_keys_of_a_page(shape: tuple[int, int], dtype: torch.dtype) -> None:
    head_dim, page = shape
    k = torch.randn(5, 2, 6 * page, head_dim).to(dtype)[1:-1]
    before = torch.full((5, 2, 6, 2 * head_dim), NAN).to(dtype)[1:-1]
    first = torch.tensor([0, 3, 5])
    in_pages = k.unflatten(2, (-1, page)).double()
    every = torch.cat([in_pages.amax(3), in_pages.amin(3)], -1).to(dtype)  # [B, K, P, 2H]
    for room in ROOMS[:2]:
        bounds = before.clone()
        room.page_bounds(layer_of(k, k), bounds, first, 2, page)
        for row, pages in enumerate(([0, 1], [3, 4], [5])):
            assert bounds[row, :, pages].equal(every[row, :, pages])
            bounds[row, :, pages] = NAN
        assert bounds.isnan().all()


def test_bounds_of_int8_keys_and_of_their_planes_are_the_nearest_bf16_outside_of_what_is_read_or_the_next() -> None:
    """Of whole keys, also where a draft reads all but a tail of them in half."""
    k = torch.randn(3, 2, 96, 96)
    k[0, :, :16], k[1, :, 3] = 0.0, 1e-9
    k, k_scale = quantized(k)
    k_scale[2, :, 80:] = 6e4
    read = (k.double() * k_scale.double()[..., None]).unflatten(2, (-1, 16))  # [B, K, P, page, H]
    upper, lower = as_planes(k)
    planes = upper, upper, k_scale, k_scale, lower, lower
    layers = layer_of(k, k, k_scale, k_scale), layer_of(*planes), layer_of(*planes, tail=20)
    got = []
    for room, layer in itertools.product(ROOMS[:2], layers):
        bounds = torch.zeros(3, 2, 6, 192, dtype=BF16)
        room.page_bounds(layer, bounds, torch.tensor([0, 0, 0]), 6, 16)
        high, low = bounds.double().split(96, -1)
        assert (high > read.amax(3)).all() and (low < read.amin(3)).all()
        assert (high - read.amax(3) <= read.amax(3).abs() * 2.0**-6 + 1e-38).all()
        got.append(bounds)
    assert all(each.equal(got[0]) for each in got)


def plain_quest(q: Tensor, bounds: Tensor, n_closed: Tensor, n: int) -> list[list[list[int]]]:
    """Corner by corner in fp64, the shortfall of each row, and Python's stable sort."""
    n_kv, head_dim = bounds.shape[1], q.shape[3]
    rows = q.double().unflatten(1, (n_kv, -1)).flatten(2, 3)[:, :, :, None]  # [B, K, R, 1, H]
    upper, lower = bounds.double()[:, :, None].split(head_dim, -1)  # [B, K, 1, P, H]
    scores = torch.maximum(rows * upper, rows * lower).sum(-1)  # [B, K, R, P]
    chosen = []
    for row, closed in enumerate(n_closed.tolist()):
        seen = scores[row, :, :, :closed]  # [K, R, closed]
        short = (seen - seen.amax(-1, keepdim=True)).amax(1) if closed else seen.new_zeros(n_kv, 0)
        chosen.append([best(s.tolist(), closed, n) for s in short])
    return chosen


@pytest.mark.parametrize("dtype", few([BF16, FP32, FP16], [BF16]))
@pytest.mark.parametrize(
    ("n_pages", "group", "n_tokens", "head_dim"),
    [(1, 1, 1, 64), (5, 4, 1, 128), (100, 3, 3, 96), (300, 8, 2, 8), (70, 8, 10, 64), (40, 2, 1, 256)],
)
def test_quest_takes_the_pages_whose_boxes_promise_most(
    n_pages: int, group: int, n_tokens: int, head_dim: int, dtype: torch.dtype
) -> None:
    # whole numbers: no sum is rounded, so ties are ties
    q = torch.randint(-3, 4, (3, n_tokens, 2 * group, head_dim)).to(dtype).transpose(1, 2)
    corners = torch.randint(-3, 4, (2, 4, 2, n_pages + 2, head_dim)).to(dtype)
    bounds = torch.cat([corners.amax(0), corners.amin(0)], -1)[:-1, :, :n_pages]  # of a larger buffer
    n_closed = torch.tensor([n_pages, n_pages // 3, 0])
    expected = plain_quest(q, bounds, n_closed, 4)
    for behind in (NAN, 99.0):
        for row, closed in enumerate(n_closed.tolist()):
            bounds[row, :, closed:] = behind
        for room in ROOMS:
            assert room.quest_pages(q, bounds, n_closed, 4).tolist() == expected


# ---- the search for the cut ------------------------------------------------------------------------------------------


def check(scores: Tensor, top_k: list[int], top_p: list[str]) -> None:
    """The kernels keep what plain Python keeps, and cut at the very score and place of the reference."""
    args = scores, torch.tensor(top_k), torch.tensor([float(x) for x in top_p], dtype=torch.float64)
    (cut, last), theirs = filters_triton.likeliest(*args), reference.likeliest(*args)
    filtered = (args[1] < scores.shape[1]) | (args[2] < 1)  # of other rows the cut is any that keeps all
    assert cut[filtered].equal(theirs[0][filtered]) and last.equal(theirs[1])
    assert places(scores, cut, last) == kept(scores, top_k, top_p)


@pytest.mark.parametrize("n_vocab", few([17, 1, 300], [17]))
def test_kept_is_what_plain_python_keeps(n_vocab: int) -> None:
    scores = scores_of_every_kind(n_vocab)
    ks = [min(k, n_vocab) for k in (n_vocab, 5, n_vocab, 1, 40, n_vocab - 1 or 1)]
    check(scores, ks * 2, ["0.9", "1", "0.5", "1", "0.999", "1e-12"] * 2)


@pytest.mark.parametrize("n_rows", few([8, 100], [8]))
def test_ties_are_cut_as_plain_python_cuts_them(n_rows: int) -> None:
    check(*full_of_ties(n_rows, 12))


def test_a_row_may_be_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_triton, "BLOCK", 128)
    n_vocab = 2 * 128 + 27
    scores = scores_of_every_kind(n_vocab)[[0, 4, 5, 10]]  # no ties, nothing but ties, many, some
    check(scores, [n_vocab, n_vocab, 200, 40], ["0.9", "0.7", "0.6", "1"])


def test_a_row_that_holds_nan_neither_hangs_nor_troubles_the_others() -> None:
    scores = scores_of_every_kind(100)[:3]
    bad = scores.clone()
    bad[0], bad[2, 1::2] = math.nan, math.nan
    for body in (filters_triton.likeliest, reference.likeliest):
        assert found(body, bad, [30] * 3, ["0.9"] * 3)[1] == kept(scores[1:2], [30], ["0.9"])[0]
