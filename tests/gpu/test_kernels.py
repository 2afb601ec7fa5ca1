"""Each kernel on the device, through the operators that the engine calls, against fp64 and plain Python.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K,
        H head dim, P pages, V vocabulary.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.model import FORMATS, KVCache, as_planes
from tests.gpt_fast_sd.fast.dense import DTYPES, FP32
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.fast.selected import best, rows_of_every_kind
from tests.gpu.place import HAS_CUDA, SMALL, Held, Place, difference, of_dtypes
from tests.gpu.truths import TOLERANCE, miscut, shortfall

pytestmark = pytest.mark.usefixtures("bodies")

SHAPES = ((1, 128, 1), (4, 128, 1), (8, 128, 1), (4, 128, 5), (3, 96, 3), (8, 128, 9), (4, 64, 17), (1, 64, 5))
CHUNKS = ((4, 128, 256), (1, 64, 63), (3, 96, 130), (8, 128, 33), (4, 64, 32))
PAGE = 16


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether a result is as far from the truth as roundings in that dtype may bring it."""
    return difference(got, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("group", "head_dim", "n_tokens", "dtype", "held"), of_dtypes(SHAPES))
def test_few_queries_attend_as_in_fp64_and_pages_get_the_mass_that_was_paid_them(
    place: Place, group: int, head_dim: int, n_tokens: int, dtype: torch.dtype, held: Held
) -> None:
    case = place.dense_case(group, head_dim, n_tokens, dtype, held)
    expected, _ = case.expected()
    (q, pos), layer = place.put(case.q, case.pos), place.layer_of(case)
    args = q, layer, pos, case.n_keys, kernels.split_for(case.k.shape[2], case.k.shape[0] * case.k.shape[1])
    assert near(kernels.decode_attention(*args), expected, dtype)
    for page in (PAGE, 64):
        out, mass = kernels.decode_attention_with_mass(*args, page)
        assert near(out, expected, dtype) and near(mass, case.expected_mass(page), dtype)


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize(
    ("group", "head_dim", "n_tokens", "dtype", "held"), of_dtypes(tuple(shape for shape in SHAPES if shape[2] <= 9))
)
def test_listed_entries_and_a_window_are_attended_to_as_in_fp64(
    place: Place, group: int, head_dim: int, n_tokens: int, dtype: torch.dtype, held: Held, page: int
) -> None:
    case = place.listed_case(group, head_dim, n_tokens, dtype, held, page)
    q, kv_indices, start, pos = place.put(case.q, case.kv_indices, case.window_start, case.pos)
    where = kv_indices, start, case.width, pos, case.n_keys, page
    got = kernels.sparse_attention(q, place.layer_of(case), *where)
    assert near(got, case.expected()[0], dtype)


@pytest.mark.parametrize(("group", "head_dim", "n_tokens", "dtype", "held"), of_dtypes(CHUNKS))
def test_chunks_attend_as_in_fp64_and_keys_get_the_mass_that_was_paid_them(
    place: Place, group: int, head_dim: int, n_tokens: int, dtype: torch.dtype, held: Held
) -> None:
    case = place.dense_case(group, head_dim, n_tokens, dtype, held)
    expected, _ = case.expected()
    (q, pos), layer = place.put(case.q, case.pos), place.layer_of(case)
    assert near(kernels.prefill_attention(q, layer, pos, case.n_keys), expected, dtype)
    out, lse = kernels.prefill_attention_with_lse(q, layer, pos, case.n_keys)
    assert near(out, expected, dtype)
    # the idle row reads nothing, and says so: -inf in both
    assert near(lse.exp().log1p(), case.lse().exp().log1p(), FP32)
    for page in (1, PAGE):
        mass = kernels.key_mass(q, layer, lse, pos, case.n_keys, page)
        assert near(mass, case.expected_mass(page), dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tokens_are_stored_as_the_nearest_integers_and_planes_hold_the_same(place: Place, head_dim: int) -> None:
    config = replace(SMALL, n_layers=1, head_dim=head_dim)
    row, pos = torch.arange(3)[:, None], torch.tensor([[0, 1, 2], [254, 255, 256], [300, 301, 302]])  # [B, T]
    k, v = torch.randn(2, 3, config.n_kv_heads, 3, head_dim).bfloat16() * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    made = []
    for form in ("int8", "planes"):
        (layer,) = KVCache(config, 3, 512, format=FORMATS[form], device=place.device).layers
        # steps are compiled: on a chip what Inductor generates stores
        store = torch.compile(layer.store, fullgraph=True) if place.on_cuda else layer.store
        store(*place.put(pos, k, v))
        made.append([x.cpu() for x in layer.buffers])
    whole, in_planes = made
    for x, numbers, scale in zip((k, v), whole[:2], whole[2:], strict=True):
        at, of = (y[row, :, pos].transpose(1, 2).double() for y in (numbers, scale))  # [B, K, T, H], [B, K, T]
        assert ((x.double() - at * of[..., None]).abs() <= 0.5001 * of[..., None]).all()
        assert numbers.any(-1).sum() == scale.count_nonzero() == of.numel()
    stored = whole[2].bool()[..., None]  # elsewhere a plane is 0, where the nibbles of an int8 of 0 are not
    upper, lower = zip(*map(as_planes, whole[:2]), strict=True)
    expected = *upper, *whole[2:], *lower
    for got, wanted in zip(in_planes, expected, strict=True):
        assert got.equal(wanted if got.dim() == 3 else torch.where(stored, wanted, 0))


SELECTIONS = ((7, 3), (100, 33), (1024, 64), (1792, 56), (40, 64), (28672, 1900))


@pytest.mark.parametrize(("n_scores", "n"), SELECTIONS if HAS_CUDA else SELECTIONS[:3])
def test_the_places_selected_are_those_of_a_stable_sort(place: Place, n_scores: int, n: int) -> None:
    rows = rows_of_every_kind(n_scores)  # ties, NaN, infinities
    scores, n_valid = torch.stack([rows, rows.flip(0)]).view(2, 3, 3, -1), torch.tensor([n_scores, n_scores // 2, 0])
    places = [best(row.tolist(), int(n_valid[b]), n) for layer in scores for b in range(3) for row in layer[b]]
    expected = torch.tensor(places).view(2, 3, 3, n)
    here, valid, due = place.put(scores, n_valid, torch.tensor([True, True, False]))
    assert kernels.top_pages(here, valid[:, None], n).cpu().equal(expected)
    kv_indices = torch.full((2, 3, 3, n * PAGE), 5)
    listed = torch.where(expected[..., None] < 0, -1, expected[..., None] * PAGE + torch.arange(PAGE)).flatten(-2)
    (after,) = place.put(kv_indices)
    kernels.guided_select(here, after, due, valid, PAGE)
    assert after.cpu().equal(torch.where(due.cpu()[:, None, None], listed, kv_indices))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim", "page"), [(4, 128, 16), (1, 64, 32), (3, 96, 16)])
def test_bounds_are_the_keys_own_and_the_pages_chosen_by_them_promise_most(
    place: Place, group: int, head_dim: int, page: int, dtype: torch.dtype
) -> None:
    k = torch.randn(3, 2, 40 * page, head_dim).to(dtype)
    in_pages = k.unflatten(2, (-1, page))
    bounds = torch.cat([in_pages.amax(3), in_pages.amin(3)], -1)  # [B, K, P, 2H]
    first = torch.tensor([0, 7, 37])
    here, got, begin = place.put(k, torch.zeros_like(bounds), first)
    kernels.page_bounds(layer_of(here, here), got, begin, 5, page)
    nth = torch.arange(40) - first[:, None]  # [B, P]
    assert got.cpu().equal(torch.where(((nth >= 0) & (nth < 5))[:, None, :, None], bounds, 0.0))
    q, n_closed = torch.randn(3, 2 * group, 2, head_dim).to(dtype), torch.tensor([40, 9, 0])
    chosen = kernels.quest_pages(*place.put(q, bounds, n_closed), 12)
    assert shortfall(q, bounds, n_closed, chosen.cpu()) <= 1e-5


VOCABULARIES = (49_152, 128_256)  # of the bundled model and of Llama 3.1
FILTERS = [(k, p) for k in (1, 50, None) for p in (0.0, 0.9, 1.0)]  # top_k, None being all of them, and top_p
ROUNDING = 1e-12  # of the mass of a row: exp in fp64 may differ by a bit where the last token kept is decided


@pytest.mark.parametrize("kind", ["all differ", "ties", "few possible"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", VOCABULARIES if HAS_CUDA else (512,))
def test_filters_cut_where_a_sort_of_the_whole_vocabulary_does(
    place: Place, vocabulary: int, dtype: torch.dtype, kind: str
) -> None:
    assert max(miscuts(place, vocabulary, dtype, kind).values()) <= ROUNDING


def miscuts(place: Place, vocabulary: int, dtype: torch.dtype, kind: str) -> dict[tuple[int | None, float], float]:
    """How wrong the cut of a row by each filter is."""
    logits = 3 * torch.randn(len(FILTERS), vocabulary)
    if kind == "ties":  # of the best as well
        logits = (logits / 4).round() * 4
    elif kind == "few possible":
        logits[:, 40:] = float("-inf")
    logits = logits.to(dtype).float()
    scores = logits - logits.amax(-1, keepdim=True)
    top_k = torch.tensor([k or vocabulary for k, _ in FILTERS])
    top_p = torch.tensor([p for _, p in FILTERS], dtype=torch.float64)
    cut, last = (x.cpu() for x in kernels.likeliest(*place.put(scores, top_k, top_p)))
    rows = zip(FILTERS, scores, top_k, top_p, cut, last, strict=True)
    return {which: miscut(*row) for which, *row in rows}
