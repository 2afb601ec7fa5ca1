"""The cost model against figures worked out apart from it: H200, Llama-3.1-8B in bf16, drafts reading 512 entries."""

import math

import pytest
import torch

from gpt_fast_sd.model import preset
from gpt_fast_sd.roofline import (
    CHIPS,
    IDEAL,
    PRACTICAL,
    Chip,
    Efficiency,
    Forecast,
    alpha_of,
    best_gamma,
    linear_params,
    measure,
    omega,
    speedup,
    step_cost,
    step_seconds,
)

LLAMA = preset("meta-llama/Llama-3.1-8B")
LLAMA_2 = preset("meta-llama/Llama-2-7b-hf")
H200, A100, H100 = CHIPS["h200"], CHIPS["a100"], CHIPS["h100"]


def best(batch: int, context: int, alpha: float, efficiency: Efficiency = IDEAL, budget: int = 512) -> Forecast:
    return best_gamma(
        lambda gamma: speedup(LLAMA, H200, batch, context, gamma, alpha, budget=budget, efficiency=efficiency)
    )


@pytest.mark.parametrize(
    ("context", "batch", "plain_ms", "draft_share", "ratios"),
    [
        (1024, 8, 3.35, 0.967, ((1.00, 0), (1.00, 0), (1.00, 0))),
        (4096, 64, 10.29, 0.391, ((1.23, 2), (1.37, 2), (1.53, 3))),
        (8192, 32, 10.29, 0.348, ((1.29, 2), (1.45, 3), (1.71, 4))),
        (16384, 32, 17.44, 0.205, ((1.57, 3), (1.85, 4), (2.32, 6))),
        (32768, 8, 10.29, 0.315, ((1.34, 2), (1.52, 3), (1.82, 5))),
        (32768, 16, 17.44, 0.192, ((1.61, 3), (1.90, 4), (2.43, 7))),
        (100_000, 8, 24.97, 0.130, ((1.83, 4), (2.24, 5), (3.01, 8))),
    ],
)
def test_steps_and_speedups_of_an_h200_are_the_published_ones(
    context: int, batch: int, plain_ms: float, draft_share: float, ratios: tuple[tuple[float, int], ...]
) -> None:
    assert step_seconds(LLAMA, H200, batch, 1, context) * 1e3 == pytest.approx(plain_ms, abs=0.006)
    one = speedup(LLAMA, H200, batch, context, 1, 0.8, budget=512)
    assert one.draft_seconds / one.target_seconds == pytest.approx(draft_share, abs=6e-4)
    for alpha, (ratio, gamma) in zip((0.7, 0.8, 0.9), ratios, strict=True):
        found = best(batch, context, alpha)
        assert (round(found.ratio, 2), found.gamma) == (pytest.approx(ratio, abs=0.006), gamma)


@pytest.mark.parametrize(
    ("batch", "context", "budget", "alpha", "ideal", "practical"),
    [(32, 28672, 512, 0.81, 2.31, 2.29), (16, 57344, 2048, 0.89, 2.76, 2.75), (8, 100_000, 512, 0.81, 2.29, 2.29)],
)
def test_cells_that_fill_an_h200_gain_what_was_published_ideal_and_practical(
    batch: int, context: int, budget: int, alpha: float, ideal: float, practical: float
) -> None:
    assert best(batch, context, alpha, budget=budget).ratio == pytest.approx(ideal, abs=0.006)
    assert best(batch, context, alpha, PRACTICAL, budget).ratio == pytest.approx(practical, abs=0.006)


def test_over_eight_chips_speedup_falls_with_the_batch_at_short_context_and_rises_at_long() -> None:
    at_1k, at_32k = (
        [
            round(speedup(LLAMA, A100, batch, context, 3, 0.8, budget=512, tp=8).ratio, 2)
            for batch in (1, 8, 32, 128, 256)
        ]
        for context in (1000, 32000)
    )
    assert at_1k == pytest.approx([0.74, 0.76, 0.80, 0.68, 0.66], abs=0.006)
    assert at_32k == pytest.approx([0.88, 1.51, 2.19, 2.48, 2.49], abs=0.006)


def test_parameters_cache_and_intensity_are_the_known_ones() -> None:
    assert linear_params(LLAMA) / 1e9 == pytest.approx(7.50, abs=0.006)
    assert linear_params(LLAMA_2) / 1e9 == pytest.approx(6.61, abs=0.006)
    assert step_cost(LLAMA, 4, 1, 1000).kv_bytes == 4000 * LLAMA.kv_bytes_per_token(2)
    # where MagicDec's figure crosses the ridge of an A100, 153 operations a byte, with three queries a row
    assert step_cost(LLAMA_2, 256, 3, 395).intensity == pytest.approx(156, abs=1)
    assert step_cost(LLAMA, 256, 3, 1958).intensity == pytest.approx(153, abs=1)
    assert [round(chip.ridge) for chip in (A100, H100, H200)] == [153, 295, 206]


def test_a_step_is_bound_by_arithmetic_where_many_rows_share_a_weight() -> None:
    few, many = (step_seconds(LLAMA, H200, 256, 8, 1), step_seconds(LLAMA, H200, 256, 16, 1))
    assert many == pytest.approx(2 * few, rel=1e-3)  # reading the weights alone would cost the same both times


def test_more_chips_and_smaller_weights_cost_less_and_reductions_cost_something() -> None:
    one, two = (step_seconds(LLAMA, H200, 16, 1, 32768, tp=tp) for tp in (1, 2))
    assert two == pytest.approx(one / 2)
    joined = Efficiency(all_reduce_seconds=10e-6)
    assert step_seconds(LLAMA, H200, 16, 1, 32768, tp=2, efficiency=joined) == pytest.approx(two + 64 * 10e-6)
    assert step_seconds(LLAMA, H200, 1, 1, 0, weight_bytes=1) == pytest.approx(linear_params(LLAMA) / 4.8e12)
    light = speedup(LLAMA, H200, 16, 57344, 7, 0.92, budget=1024, draft_weight_bytes=1.0)
    assert light.ratio > speedup(LLAMA, H200, 16, 57344, 7, 0.92, budget=1024).ratio
    small = preset("meta-llama/Llama-3.2-1B")
    assert speedup(LLAMA, H200, 16, 57344, 4, 0.7, budget=512, draft=small).draft_seconds < light.draft_seconds


def test_omega_is_the_closed_form_and_takes_a_chance_for_each_draft() -> None:
    assert omega(5, 0.8) == pytest.approx((1 - 0.8**6) / 0.2)
    assert omega(0, 0.8) == 1.0
    assert omega(4, 1.0) == 5.0
    assert omega(3, [0.5, 0.4]) == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.4)
    assert alpha_of(omega(6, 0.87), 6) == pytest.approx(0.87)
    assert alpha_of(3.41, 3) == pytest.approx(0.894, abs=0.002)  # tokens a round of SnapKV drafts on PG-19
    with pytest.raises(ValueError, match=r"a round of 3 drafts emits from 1 to 4 tokens, got 4\.5"):
        alpha_of(4.5, 3)


def test_selecting_costs_a_round_of_drafts_and_no_round_without() -> None:
    free, paid = (speedup(LLAMA, H200, 8, 32768, 4, 0.9, budget=512, select_seconds=s) for s in (0.0, 1e-3))
    assert paid.round_seconds == pytest.approx(free.round_seconds + 1e-3)
    plain = speedup(LLAMA, H200, 8, 32768, 0, 0.9, budget=512, select_seconds=1e-3)
    assert plain.ratio == 1.0


def test_measured_rates_make_a_chip_and_nonsense_makes_none() -> None:
    rates = measure(torch.device("cpu"), n_bytes=1 << 20, size=64, dtype=torch.float32, repeats=3)
    assert all(math.isfinite(rate) and rate > 0 for rate in (rates.copy, rates.read, rates.matmul))
    chip = rates.chip("cpu", memory=1e9)
    assert chip.bandwidth == max(rates.copy, rates.read)
    with pytest.raises(ValueError, match="bandwidth of none must be positive, got 0"):
        Chip(name="none", bandwidth=0, peak=1)
