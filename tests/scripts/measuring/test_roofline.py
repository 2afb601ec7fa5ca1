"""The cost model against figures worked out apart from it: H200, Llama-3.1-8B in bf16, drafts reading 512 entries."""

import math

import pytest
import torch

from gpt_fast_sd import DraftConfig
from gpt_fast_sd.model import preset
from measuring.chips import CHIPS, Chip, measure
from measuring.forecast import System
from measuring.roofline import (
    ATTENTION_KERNELS,
    BESIDE_ATTENTION,
    EXPECTED,
    HEAD_KERNELS,
    IDEAL,
    PRACTICAL,
    Conditions,
    Efficiency,
    Forecast,
    Refresh,
    best_gamma,
    kernels,
    linear_params,
    merged_bytes,
    omega,
    refresh_seconds,
    step_cost,
    step_seconds,
)

LLAMA = preset("meta-llama/Llama-3.1-8B")
LLAMA_2 = preset("meta-llama/Llama-2-7b-hf")
H200, A100, H100 = CHIPS["h200"], CHIPS["a100"], CHIPS["h100"]


def rounds(
    batch: int, context: int, gamma: int, alpha: float, *, budget: int = 512, efficiency: Efficiency = IDEAL
) -> Forecast:
    draft = DraftConfig(policy="streaming", budget=budget)
    return System(model=LLAMA, chip=H200).forecast(draft, alpha, batch, context, gamma, efficiency)


def best(batch: int, context: int, alpha: float, efficiency: Efficiency = IDEAL, budget: int = 512) -> Forecast:
    return best_gamma(
        lambda gamma: rounds(batch, context, gamma, alpha, budget=budget, efficiency=efficiency), range(25)
    )


def over_eight(batch: int, context: int) -> float:
    """Speed over plain decoding of rounds of 3 drafts, acceptance 0.8, on eight chips that talk for nothing."""
    plain, draft, verify = (
        step_seconds(LLAMA, A100, batch, n, keys, Conditions(tp=8))
        for n, keys in ((1, context), (1, 512), (4, context))
    )
    return omega(3, 0.8) * plain / (3 * draft + verify)


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
    one = rounds(batch, context, 1, 0.8)
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
        [round(over_eight(batch, context), 2) for batch in (1, 8, 32, 128, 256)] for context in (1000, 32000)
    )
    assert at_1k == pytest.approx([0.74, 0.76, 0.80, 0.68, 0.66], abs=0.006)
    assert at_32k == pytest.approx([0.88, 1.51, 2.19, 2.48, 2.49], abs=0.006)


def test_parameters_cache_and_intensity_are_the_known_ones() -> None:
    assert linear_params(LLAMA) / 1e9 == pytest.approx(7.50, abs=0.006)
    assert linear_params(LLAMA_2) / 1e9 == pytest.approx(6.61, abs=0.006)
    assert step_cost(LLAMA, 4, 1, 1000).kv_bytes == 4000 * LLAMA.kv_bytes_per_token(2)
    # where MagicDec's figure crosses the ridge of an A100, 153 operations per byte, with three queries per row
    for model, context, intensity in ((LLAMA_2, 395, 156), (LLAMA, 1958, 153)):
        cost = step_cost(model, 256, 3, context)
        assert (cost.linear_flops + cost.attention_flops) / cost.bytes == pytest.approx(intensity, abs=1)
    assert [round(chip.peak / chip.bandwidth) for chip in (A100, H100, H200)] == [153, 295, 206]


def test_a_step_is_bound_by_arithmetic_where_many_rows_share_a_weight() -> None:
    few, many = (step_seconds(LLAMA, H200, 256, 8, 1), step_seconds(LLAMA, H200, 256, 16, 1))
    assert many == pytest.approx(2 * few, rel=1e-3)  # reading the weights alone would cost the same both times


def test_more_chips_and_smaller_weights_cost_less_and_reductions_cost_something() -> None:
    one, two = (step_seconds(LLAMA, H200, 16, 1, 32768, Conditions(tp=tp)) for tp in (1, 2))
    assert two == pytest.approx(one / 2)
    joined = step_seconds(LLAMA, H200, 16, 1, 32768, Conditions(tp=2, all_reduce=lambda n_bytes: 10e-6))
    assert joined == pytest.approx(two + (64 + 1 + 1) * 10e-6)  # two per layer, the embedding's, and the best token
    assert step_seconds(LLAMA, H200, 1, 1, 0, Conditions(weight_bytes=1)) == pytest.approx(
        linear_params(LLAMA) / 4.8e12
    )


def test_omega_is_the_closed_form_and_takes_a_chance_for_each_draft() -> None:
    assert omega(5, 0.8) == pytest.approx((1 - 0.8**6) / 0.2)
    assert omega(0, 0.8) == 1.0
    assert omega(4, 1.0) == 5.0
    assert omega(3, [0.5, 0.4]) == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.4)


def test_judging_costs_a_round_of_drafts_and_no_round_without() -> None:
    judging = Efficiency(judge_seconds=1e-3)
    free, paid = (rounds(8, 32768, 4, 0.9, efficiency=e) for e in (IDEAL, judging))
    assert paid.round_seconds == pytest.approx(free.round_seconds + 1e-3)
    assert rounds(8, 32768, 0, 0.9, efficiency=judging).ratio == 1.0


def test_measured_rates_make_a_chip_and_nonsense_makes_none() -> None:
    rates = measure(torch.device("cpu"), n_bytes=1 << 20, size=64, dtype=torch.float32, repeats=3)
    assert all(math.isfinite(rate) and rate > 0 for rate in (rates.copy, rates.read, rates.matmul))
    chip = rates.chip("cpu", memory=1e9)
    assert chip.bandwidth == max(rates.copy, rates.read)
    with pytest.raises(ValueError, match="bandwidth of none must be positive, got 0"):
        Chip(name="none", bandwidth=0, peak=1)


def test_expected_steps_of_a_full_h200_match_the_estimates_of_their_parts() -> None:
    """Worked out apart from the model: milliseconds of parts, and the ranges that they add up to."""
    steps = {
        e: System(model=LLAMA, chip=H200).forecast(
            DraftConfig(policy="guided", budget=1024, page=16), 0.9, 16, 57344, 8, e
        )
        for e in (IDEAL, PRACTICAL, EXPECTED)
    }
    for name, low, high in (("target_seconds", 36, 43), ("draft_seconds", 5.2, 6.2), ("verify_seconds", 38, 46)):
        assert low < getattr(steps[EXPECTED], name) * 1e3 < high
        assert getattr(steps[IDEAL], name) < getattr(steps[PRACTICAL], name) < getattr(steps[EXPECTED], name)
    assert 0.15e-3 <= steps[EXPECTED].select_seconds <= 0.4e-3
    assert steps[PRACTICAL].select_seconds == 0.0


def test_what_splits_hand_on_and_mass_are_the_shares_that_the_kernel_names() -> None:
    cost = step_cost(LLAMA, 16, 6, 57344)  # 24 queries share a kv head
    plain, mass = (merged_bytes(LLAMA, 16, 6, 57344, 2048, page) for page in (0, 16))
    assert plain / cost.kv_bytes == pytest.approx(0.0235, abs=2e-4)  # 2 * R / split, and the sums
    assert (mass - plain) / cost.kv_bytes == pytest.approx(0.0293, abs=2e-4)  # 240 bytes beside 8192
    less = merged_bytes(LLAMA, 16, 6, 57344, 2048, 32) - plain
    assert less / cost.kv_bytes == pytest.approx(0.0176, abs=2e-4)


def test_a_refresh_of_all_rows_at_once_reads_the_weights_once() -> None:
    def seconds(at_once: int, efficiency: Efficiency = IDEAL, batch: int = 16) -> float:
        refresh = Refresh(every=64, n_observed=32, reads=1.5, at_once=at_once)
        return refresh_seconds(LLAMA, H200, batch, 57344, 6.0, refresh, Conditions(efficiency=efficiency))

    rows, weights = 16 * 6.0 / 64, step_cost(LLAMA, 1, 1, 57344).weight_bytes / 4.8e12  # rows that come due a round
    keys = 1.5 * step_cost(LLAMA, 1, 1, 57344).kv_bytes / 4.8e12
    assert seconds(1) == pytest.approx(rows * (weights + keys))
    assert rows * keys < seconds(16) < rows * (weights / 2 + keys)  # 512 tokens are bound by arithmetic, not by weights
    assert seconds(16) == seconds(99)  # there are no more rows
    assert seconds(1, EXPECTED) > seconds(1)
    # row by row about 10 ms each, and so some 13 to 15 ms per round
    assert 0.008 < seconds(1, EXPECTED) / rows < 0.010


def test_kernels_of_a_layer_are_counted_as_they_are_launched() -> None:
    """By the code that Inductor generates for a layer, and what operators launch on a driver that is not there."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from gpt_fast_sd.fast.triton import decode as decode_triton
    from gpt_fast_sd.fast.triton import select as select_triton
    from gpt_fast_sd.fast.triton import sparse as sparse_triton
    from tests.gpt_fast_sd.cuda import test_codegen
    from tests.gpt_fast_sd.fast.references import layer_of
    from tests.gpuless.driver import stand_in

    assert test_codegen.LAYER == BESIDE_ATTENTION + 1 and test_codegen.HEAD == HEAD_KERNELS  # an operator is one there
    found = {}
    for name in ("dense", "mass", "sparse", "quest"):
        with stand_in(90) as launches, FakeTensorMode():

            def ints(*shape: int) -> torch.Tensor:
                return torch.empty(shape, device="cuda", dtype=torch.int64)

            q = torch.empty(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            k, v = (torch.empty(2, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            layer = layer_of(k, v)
            if name == "dense":
                decode_triton.attend(q, layer, ints(2, 1), 8192, 512, arch=90)
            elif name == "mass":
                decode_triton.attend_with_mass(q, layer, ints(2, 1), 8192, 512, 16, arch=90)
            else:
                if name == "quest":
                    bounds = torch.empty(2, 8, 512, 256, device="cuda", dtype=torch.bfloat16)
                    select_triton.quest_pages(q, bounds, ints(2), 48)
                sparse_triton.attend(q, layer, ints(2, 8, 768), ints(2), 265, ints(2, 1), 8192, 16, arch=90)
        found[name] = len(launches)
    of_layers = test_codegen.STEPS["draft quest"][0] - test_codegen.HEAD - 1
    found["quest"] += of_layers // test_codegen.LAYERS - test_codegen.LAYER - 1  # beside the operator that chooses
    assert found == ATTENTION_KERNELS
    assert kernels(LLAMA) == 32 * 11 + 3
