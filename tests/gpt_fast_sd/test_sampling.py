"""Distributions against an independent slow implementation; draws against those distributions.

Shapes: B batch rows, T positions of a row, V vocabulary.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.fast import likeliest
from gpt_fast_sd.sampling import Kind, draw, probabilities, uniform
from tests.gpt_fast_sd.fast.rows import expected, found, full_of_ties, paired, rows_of_every_kind
from tests.helpers import chi_square, table_of

N_DRAWS = 50_000
BELOW_1 = 1.0 - 2.0**-24  # the largest number uniform() gives


def slow_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row in fp64, one token at a time: [V] -> [V]."""
    n = len(logits)
    out = np.zeros(n)
    order = sorted(range(n), key=lambda i: (-logits[i], i))  # likeliest first, ties go to the lowest id
    if params.temperature == 0:
        out[order[0]] = 1.0
        return out
    weight = [math.exp((float(logits[i]) - float(logits[order[0]])) / params.temperature) for i in range(n)]
    kept = order
    if params.top_k is not None and params.top_k < n:
        bar = logits[order[params.top_k - 1]]
        kept = [i for i in kept if logits[i] >= bar]
    if params.top_p is not None and params.top_p < 1:
        total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            if mass / total >= params.top_p:
                break
            nucleus.append(i)
            mass += weight[i]
        kept = nucleus
    if params.min_p is not None:
        kept = [i for i in kept if weight[i] >= params.min_p * weight[order[0]]]
    for i in kept:
        out[i] = weight[i]
    return out / out.sum()


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Any mix of filters, each off half of the time, and a greedy row now and then."""
    return SamplingParams(
        temperature=0.0 if rng.random() < 0.1 else float(rng.uniform(0.2, 2.5)),
        top_k=int(rng.integers(1, 2 * vocab_size)) if rng.random() < 0.5 else None,
        top_p=float(rng.uniform(0.05, 0.999)) if rng.random() < 0.5 else None,
        min_p=float(rng.uniform(0.0, 0.5)) if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 50, 300])
@pytest.mark.parametrize("levels", [None, 4], ids=["all logits differ", "many logits are equal"])
def test_any_mix_of_filters_gives_the_slow_distribution(vocab_size: int, levels: int | None) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(60, vocab_size)).astype(np.float32) * 3
    if levels is not None:
        logits = np.round(logits / 3 * levels / 2).astype(np.float32)
    params = [random_params(rng, vocab_size) for _ in logits]
    p = probabilities(torch.from_numpy(logits), table_of(params, vocab_size)).numpy()
    expected = np.stack([slow_probabilities(row, q) for row, q in zip(logits, params, strict=True)])
    assert p.dtype == np.float32
    sure = (expected == 0) | (expected > 1e-35)  # below that fp32 may have no number left
    assert ((p > 0) == (expected > 0))[sure].all()  # the very same tokens
    assert np.abs(p - expected).max() <= 2e-6  # fp32 exp and sum of at most 300 terms
    assert np.abs(p.sum(-1, dtype=np.float64) - 1).max() <= 1e-5


def test_of_equal_tokens_as_many_stay_as_the_share_says_and_the_best_survives_any_filter() -> None:
    """Three of ten equal ones are 0.3, not four because the nearest fp32 is a little more."""
    kept = [(torch.zeros(n), {"top_p": i / n}, list(range(i))) for n in (3, 7, 10, 20, 100) for i in range(1, n + 1)]
    kept += [(torch.arange(4.0), narrow, [3]) for narrow in ({"top_k": 1}, {"top_p": 1e-46}, {"min_p": 1.0})]
    for logits, filters, ids in kept:
        params = SamplingParams(temperature=1, **filters)  # type: ignore[arg-type]
        p = probabilities(logits[None], table_of([params], len(logits)))[0]
        assert p.nonzero()[:, 0].tolist() == ids, (len(ids), filters)


@pytest.mark.parametrize("n_vocab", [1, 2, 17, 100, 300])
def test_the_search_for_the_cut_keeps_what_plain_python_keeps_in_fractions(n_vocab: int) -> None:
    top_p = ["1e-12", "0.1", "0.5", "0.73", "0.9", "0.999", "1"]
    for rows in (paired(rows_of_every_kind(n_vocab), top_p), full_of_ties(500, min(12, n_vocab))):
        assert found(likeliest, *rows) == expected(*rows)


def test_what_weighs_less_than_the_unit_of_the_sums_moves_no_cut() -> None:
    """Half of six tokens and of a seventh that weighs 2**-45 of one: three, where fractions would ask for a fourth."""
    assert found(likeliest, torch.tensor([[0.0] * 6 + [-31.0]]), [7], ["0.5"]) == [[0, 1, 2]]


@pytest.mark.parametrize("filtered", [True, False])
def test_a_row_and_its_positions_have_the_same_bits_in_any_company(filtered: bool) -> None:
    rng = np.random.default_rng(4)
    params = [random_params(rng, 30) for _ in range(16)]
    table = table_of(params, 30)
    for n_positions in (0, 1, 5):
        logits = torch.randn(16, n_positions, 30)
        p = probabilities(logits, table, filtered=filtered)
        assert p.shape == logits.shape
        for t in range(n_positions):
            assert torch.equal(p[:, t], probabilities(logits[:, t], table, filtered=filtered))
        for i, own in enumerate(params):
            assert torch.equal(p[i : i + 1], probabilities(logits[i : i + 1], table_of([own], 30), filtered=filtered))


def test_skipping_the_filters_changes_no_bit_where_every_filter_is_off() -> None:
    cases = [(0.0, None), (0.5, 90), (2.0, 50)]
    params = [SamplingParams(temperature=t, top_p=1.0, min_p=0.0, top_k=k) for t, k in cases]
    logits = torch.randn(3, 50)
    table = table_of(params, 50)
    assert torch.equal(probabilities(logits, table, filtered=False), probabilities(logits, table))


def test_the_nucleus_of_a_large_vocabulary_is_not_lost_to_rounding() -> None:
    """One likely token, and 130,000 that are each too small to change the mass before them in fp32."""
    weight = np.full(130_001, 1e-9)
    weight[0] = 1 - 130_000 * 1e-9
    logits = torch.from_numpy(np.log(weight).astype(np.float32))[None]
    for top_p in (0.99989, 0.9999, 0.99995, 0.99999):
        params = SamplingParams(temperature=1, top_p=top_p)
        p = probabilities(logits, table_of([params], weight.size))
        expected = slow_probabilities(logits[0].numpy(), params)
        wrong = np.abs((p[0].numpy() > 0) * weight - (expected > 0) * weight).sum()
        # each weight is rounded to units of 2**-44, and the sums end within a token
        assert wrong <= weight.size * 2.0**-45 + 2e-9, (top_p, wrong)


def test_a_row_without_a_distribution_is_nan_and_alone_in_it() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    logits = torch.randn(5, 40)
    expected = probabilities(logits, table_of([params] * 5, 40))
    logits[1, 3], logits[2], logits[4, 0] = math.nan, -math.inf, math.inf
    p = probabilities(logits, table_of([params] * 5, 40))
    assert p[[1, 2, 4]].isnan().all() and torch.equal(p[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({}, Kind(False, False)),
        ({"temperature": 0.7}, Kind(True, False)),
        ({"temperature": 0.7, "top_p": 1.0, "min_p": 0.0}, Kind(True, False)),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, Kind(False, False)),
        ({"temperature": 0.7, "top_k": 3}, Kind(True, True)),
        ({"temperature": 0.7, "top_p": 0.99}, Kind(True, True)),
        ({"temperature": 0.7, "min_p": 0.01}, Kind(True, True)),
    ],
)
def test_filters_are_run_where_a_sampled_row_filters(params: dict[str, float], kind: Kind) -> None:
    assert Kind.of([SamplingParams(), SamplingParams(**params)]) == kind


def test_16_bit_logits_and_forbidden_tokens_are_taken() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0, 1.5]], dtype=torch.bfloat16)
    for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_k=3, top_p=0.99, min_p=0.01)):
        p = probabilities(logits, table_of([params], 4))
        assert p.dtype == torch.float32 and p[0, 1] == 0 and abs(float(p.sum()) - 1) < 1e-6


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-39])
def test_a_temperature_near_0_is_nearly_greedy(temperature: float) -> None:
    logits = torch.randn(4, 50) * 5
    p = probabilities(logits, table_of([SamplingParams(temperature=temperature)] * 4, 50))
    assert torch.equal(p.argmax(-1), logits.argmax(-1)) and p.isfinite().all()


# ---- drawing, and randomness ---------------------------------------------------------------------------------------


def test_a_token_of_probability_0_is_never_drawn() -> None:
    p = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0])
    u = torch.tensor([0.0, 1e-30, 0.29, 0.2999999, 0.3000001, 0.9, BELOW_1])
    assert draw(p.expand(7, -1), u).tolist() == [2, 2, 2, 2, 4, 4, 4]
    for only in (0, 3, 9):
        p = torch.zeros(3, 10)
        p[:, only] = 0.1  # need not sum to 1
        assert draw(p, torch.tensor([0.0, 0.5, BELOW_1])).tolist() == [only] * 3


def test_a_large_vocabulary_whose_sum_rounds_is_drawn_from_within() -> None:
    p = torch.rand(64, 130_000)
    p[:, -500:] = 0
    p[:, :500] = 0
    tokens = draw(p / p.sum(-1, keepdim=True) * 0.999, torch.linspace(0, BELOW_1, 64))
    assert p.gather(-1, tokens[:, None]).gt(0).all() and tokens.diff().ge(0).all()
    assert tokens[0] < 510 and tokens[-1] >= 129_490


def test_the_tail_of_a_large_vocabulary_is_not_lost_to_rounding() -> None:
    p = torch.full((1, 130_001), 1e-9)
    p[0, 0] = 1 - 130_000 * 1e-9
    u = torch.tensor([1 - 7e-5])
    exact = p[0].double().numpy().cumsum()
    token = int(draw(p, u))
    assert exact[token - 1] / exact[-1] <= float(u) < exact[token] / exact[-1]
    assert 59_000 < token < 61_000


def slow_uniform(seed: int, position: int, stream: int) -> float:
    """The same function in Python's own whole numbers."""
    h = 0x9E3779B9
    for word in (seed % 2**32, seed // 2**32 ^ stream * 0x9E3779B9 % 2**32, position, 0):
        h ^= word
        h ^= h >> 16
        h = h * 0x7FEB352D % 2**32
        h ^= h >> 15
        h = h * 0x846CA68B % 2**32
        h ^= h >> 16
    return (h >> 8) / 2**24


def test_uniform_is_the_function_it_says_it_is() -> None:
    rng = np.random.default_rng(0)
    seed = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**63 - 1, *rng.integers(0, 2**63, 200).tolist()])
    position = torch.tensor([0, 1, 2, 2**31, 131071, *rng.integers(0, 2**17, 200).tolist()])
    for stream in (0, 1, 7):
        u = uniform(seed, position, stream)
        assert u.dtype == torch.float32
        arguments = zip(seed.tolist(), position.tolist(), strict=True)
        assert u.tolist() == [slow_uniform(s, at, stream) for s, at in arguments]
        several = uniform(seed[:6, None], position[:24].view(6, 4), stream)  # one seed a row, many positions
        assert several.shape == (6, 4)
        assert several.flatten().equal(uniform(seed[:6].repeat_interleave(4), position[:24], stream))


N = torch.arange(N_DRAWS)
KEYS: dict[str, tuple[Tensor, Tensor, int]] = {
    "consecutive positions": (torch.full_like(N, 42), N, 0),
    "consecutive positions, stream 1": (torch.full_like(N, 42), N, 1),
    "consecutive seeds": (N, torch.full_like(N, 100), 0),
    "seeds in the high word": (N << 32, torch.full_like(N, 100), 0),
    "seed and position together": (N, N, 0),
    "even positions": (torch.zeros_like(N), 2 * N, 0),
}
EVEN = torch.full((256,), 1 / 256)


@pytest.mark.parametrize("name", KEYS)
def test_uniform_fills_its_buckets_evenly_and_neighbours_do_not_know_of_each_other(name: str) -> None:
    u = uniform(*KEYS[name])
    for values in (u, u * 256 % 1):  # the high bits and the middle ones
        assert chi_square((values * 256).long().bincount(minlength=256), EVEN * N_DRAWS) < 1
    for lag in (1, 2, 16):
        pairs = (u[:-lag] * 16).long() * 16 + (u[lag:] * 16).long()
        assert chi_square(pairs.bincount(minlength=256), EVEN * len(pairs)) < 1


def test_streams_do_not_know_of_each_other() -> None:
    """At one place each pair of streams is as two dice, in the highest and in the lowest bits.

    All pairs, and lags of positions and of seeds, were within 3 sigma over 100 M draws.
    """
    places = torch.randint(2**62, (8 * N_DRAWS,), generator=torch.Generator().manual_seed(1)), torch.tensor(7201)
    u = [uniform(places[0], places[1].expand_as(places[0]), stream) for stream in range(5)]
    for a, b in itertools.combinations(u, 2):
        for shift in (1, 2**20):
            x, y = ((one * shift % 1 * 16).long() for one in (a, b))
            assert chi_square((x * 16 + y).bincount(minlength=256), EVEN * len(x)) < 1
