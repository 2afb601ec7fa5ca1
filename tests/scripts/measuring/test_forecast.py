"""Forecasts against figures worked out apart from them, published ones, and what was measured on a CPU."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import plan as program
from gpt_fast_sd import DraftConfig, registry
from gpt_fast_sd.fast import launches
from gpt_fast_sd.loading.memory import LAYER_NODES, MORE_NODES
from gpt_fast_sd.model import PRESETS, ModelConfig, preset
from gpt_fast_sd.policies import View
from measuring import forecast, roofline
from measuring.chips import CHIPS, Chip, Link, Ranks, chip_named, chip_of, measure, nvlink
from measuring.forecast import Kept, System, compare, default_policies, shape_of
from measuring.replay import PROFILES
from measuring.roofline import EXPECTED, IDEAL, PRACTICAL, Conditions, Efficiency, Forecast, step_cost, step_seconds
from plan import drafts_of, plan, text
from tests.helpers import DATA, Printed

LLAMA, SMALL = preset("meta-llama/Llama-3.1-8B"), preset("meta-llama/Llama-3.2-1B")
LLAMA_2 = preset("meta-llama/Llama-2-7b-hf")
H200, A100, H100 = CHIPS["h200"], CHIPS["a100"], CHIPS["h100"]
BESIDE = DraftConfig(policy="standalone", draft_model="given")
STREAMING = DraftConfig(policy="streaming", budget=512)


def on_h200(**more: object) -> System:
    return System(model=LLAMA, chip=H200, **more)  # type: ignore[arg-type]


def tokens(gamma: int, alpha: float) -> float:
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


# ---- worked out by hand ----------------------------------------------------------------------------------------------

# Llama-3.1-8B: 32 layers, width 4096, 32 query and 8 kv heads of 128, 14336 wide inside, 128256 tokens
OF_HEAD = 128256 * 4096  # weights
WEIGHTS = 32 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336) + OF_HEAD
KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token, in bf16
OUTPUTS = 32 * (4096 + 2048 + 4096 + 28672 + 4096)  # of the matrices of all layers, each of which has a scale in int8


def test_eight_ranks_share_bytes_and_add_up_65_times_per_step() -> None:
    system = on_h200(ranks=Ranks(n=8, link=nvlink(900e9)))
    own = (2 * WEIGHTS + KV_BYTES * 32000 * 64) / 8 / 4.8e12
    start = 6.6e-6 + 14 * 0.6e-6  # a ring of eight: 14 hops
    sums = 65 * (start + 14 / 8 * 64 * 4096 * 2 / 450e9)
    best = start + 14 / 8 * 64 * 8 / 450e9
    assert system.plain(64, 32000) == pytest.approx(own + sums + best)


def test_ranks_with_fewer_kv_heads_than_they_are_hold_a_whole_one_each() -> None:
    model = preset("Qwen/Qwen2.5-1.5B")  # two kv heads of 128, 28 layers
    ranks = Ranks(n=4, link=Link(name="none", bandwidth=1e30, hop=0))
    at_1, at_2 = (System(model=model, chip=H200, ranks=ranks).plain(1, context) for context in (1000, 2000))
    assert at_2 - at_1 == pytest.approx(1000 * 2 * 28 * 1 * 128 * 2 / 4.8e12)


def test_sums_over_machines_wait_for_the_network() -> None:
    network = Link(name="InfiniBand", bandwidth=50e9, hop=2.7e-6)
    sixteen = Ranks(n=16, link=nvlink(900e9), network=network)
    hops = (30 - 4) * 0.6e-6 + 4 * 2.7e-6  # of 30 hops four leave a machine
    assert sixteen.all_reduce(1e6) == pytest.approx(6.6e-6 + hops + 30 / 16 * 1e6 / 50e9)
    assert Ranks(n=8, link=nvlink(900e9), network=network).slowest.name == "NVLink"


def test_fp32_and_int8_weights_have_their_bytes_and_fp32_its_own_rate() -> None:
    halves, fours = (on_h200(dtype=dtype).plain(1, 1) for dtype in ("bf16", "fp32"))
    assert fours == pytest.approx(2 * halves)
    # int8 leaves the head in bf16
    assert on_h200(quantize="int8").plain(1, 0) == pytest.approx((WEIGHTS + OF_HEAD + 4 * OUTPUTS) / 4.8e12)
    assert on_h200(kv_dtype="fp32").plain(8, 10**6) == pytest.approx(on_h200().plain(16, 10**6), rel=1e-2)
    assert H200.working_in(torch.float32).peak == 67e12
    assert H200.working_in(torch.float16).peak == 989e12


# ---- a policy says what it reads and runs ----------------------------------------------------------------------------


def reading(entries: float, batch: int, params: float = WEIGHTS) -> float:
    return (2 * params + KV_BYTES * entries * batch) / 4.8e12


def test_each_policy_says_what_a_draft_step_reads_of_a_short_text_what_there_is() -> None:
    def drafting(policy: str, **more: object) -> float:
        draft = DraftConfig(policy=policy, budget=1024, **more)  # type: ignore[arg-type]
        return on_h200(draft_model=SMALL).forecast(draft, 0.8, 8, 64000, 4).draft_seconds

    assert drafting("streaming") == drafting("snapkv") == drafting("guided") == pytest.approx(reading(1024, 8))
    assert drafting("quest", page=16) == pytest.approx(reading(1024 + 4000, 8))
    assert drafting("full") == pytest.approx(reading(64000, 8))
    assert drafting("lookup") == 0
    half = replace(LLAMA, n_layers=16)
    for model, own in ((half, drafting("early_exit")), (SMALL, drafting("standalone", draft_model="small"))):
        alone = System(model=model, chip=H200).forecast(replace(STREAMING, budget=1024), 0.8, 8, 64000, 4)
        assert own == pytest.approx(alone.draft_seconds)
    assert on_h200().forecast(STREAMING, 0.8, 8, 300, 4).draft_seconds == pytest.approx(reading(300, 8))
    # of a hierarchy two middle steps of four tokens each for four drafts: as long as of one token each
    assert drafting("hierarchy") == pytest.approx(reading(1024, 8) / 2)


def test_a_draft_models_int8_keys_have_the_scales_of_its_own_head_dim() -> None:
    """66 bytes for 64 dimensions, whatever the target's keys take."""
    draft = DraftConfig(policy="standalone", draft_model="small", budget=4096)
    assert (LLAMA.head_dim, SMALL.head_dim) == (128, 64)
    found = [
        System(model=model, chip=H200, draft_model=SMALL, kv_dtype="int8").forecast(draft, 0.8, 8, 64000, 4)
        for model in (LLAMA, replace(LLAMA, head_dim=64))
    ]
    assert found[0].draft_seconds == found[1].draft_seconds and found[0].target_seconds > found[1].target_seconds


def test_bounds_over_an_int8_cache_stay_in_bf16_and_drafts_of_planes_read_half_and_64_entries_whole() -> None:
    def drafting(**more: object) -> float:
        return on_h200(kv_dtype="int8").forecast(DraftConfig(**more), 0.8, 8, 64000, 4).draft_seconds  # type: ignore[arg-type]

    # once bounds were counted as one entry a page, of which they take nearly two
    assert drafting(policy="quest", budget=1024) == pytest.approx(reading(1024 * 130 / 256 + 4000, 8))
    half, rest = 66 / 256, 64 / 256  # of an entry in bf16
    assert drafting(policy="quantized") == pytest.approx(reading(64000 * half + 64 * rest, 8))
    assert drafting(policy="streaming", budget=512, kv_bits=4) == pytest.approx(reading(512 * half + 64 * rest, 8))
    whole = on_h200(kv_dtype="int8").forecast(DraftConfig(policy="quantized"), 0.8, 8, 64000, 4)
    assert whole.verify_seconds == whole.target_seconds == pytest.approx(reading(64000 * 130 / 256, 8))


# Llama-3.2-1B: 16 layers, width 2048, 32 query and 8 kv heads of 64, 8192 wide inside
SMALL_WEIGHTS = 16 * (2 * 2048 * 64 * (32 + 8) + 3 * 2048 * 8192) + 128256 * 2048
SMALL_KV_BYTES = 2 * 16 * 8 * 64 * 2


@pytest.mark.parametrize("model", [LLAMA, SMALL])
def test_a_draft_model_is_never_quantized_even_of_the_targets_shape(model: ModelConfig) -> None:
    draft = DraftConfig(policy="standalone", draft_model="small", budget=1024)
    system = System(model=model, chip=H200, draft_model=SMALL, quantize="int8")
    step = (2 * SMALL_WEIGHTS + SMALL_KV_BYTES * 1024 * 8) / 4.8e12
    assert system.forecast(draft, 0.8, 8, 64000, 4).draft_seconds == pytest.approx(step)


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        ("float8", WEIGHTS + 4 * (OUTPUTS + 128256)),  # a scale for each output
        *((name, WEIGHTS + 4 * (OUTPUTS + 128256)) for name in ("int8", "planes")),
        # half a byte, and a scale and a zero of two bytes for 128 weights; the head in int8
        ("int4", (WEIGHTS - OF_HEAD) * (0.5 + 4 / 128) + OF_HEAD + 4 * 128256),
    ],
)
def test_a_quantized_copy_reads_few_bytes_a_weight_and_the_target_what_it_did(name: str, n_bytes: float) -> None:
    plain, copied = (on_h200().forecast(replace(STREAMING, quantize=q), 0.8, 8, 64000, 4) for q in (None, name))
    budget = STREAMING.budget
    assert copied.draft_seconds == pytest.approx(reading(budget, 8, n_bytes / 2))
    assert copied.verify_seconds == plain.verify_seconds and plain.draft_seconds == pytest.approx(reading(budget, 8))


def test_a_quantized_target_reads_few_bytes_a_weight_but_for_its_head_and_takes_as_much_memory() -> None:
    plain, small = on_h200(), on_h200(quantize="int4")
    own = (WEIGHTS - OF_HEAD) * (0.5 + 4 / 128)
    assert small.plain(8, 64000) == pytest.approx(reading(64000, 8, own / 2 + OF_HEAD))
    saved = plain.memory(STREAMING, 8, 64000)[0] - small.memory(STREAMING, 8, 64000)[0]
    less = 2 * (WEIGHTS - OF_HEAD) - own
    assert 0.8 * less < saved <= less  # but for the work of quantizing


def test_a_published_acceptance_is_less_for_weights_of_few_bits() -> None:
    kept = Kept.of([])
    plain, source = kept.chances(STREAMING, 8000)
    for name, less in (("int8", 1.0), ("float8", 0.99), ("int4", 0.97)):
        chances, said = kept.chances(replace(STREAMING, quantize=name), 8000)
        assert chances == pytest.approx([chance * less for chance in plain])
        assert said == source + (f", times {less} for {name} weights" if less < 1 else "")


def test_a_draft_model_is_divided_by_the_ranks_that_hold_it() -> None:
    ranks = Ranks(n=8, link=Link(name="none", bandwidth=1e30, hop=0))
    one, eight = (DraftConfig(policy="standalone", draft_model="small", budget=1024, draft_tp=n) for n in (1, None))
    system = on_h200(draft_model=SMALL, ranks=ranks)
    alone, together = (system.forecast(draft, 0.8, 8, 64000, 4).draft_seconds for draft in (one, eight))
    step = (2 * SMALL_WEIGHTS + SMALL_KV_BYTES * 1024 * 8) / 4.8e12
    assert alone == pytest.approx(step)  # nor does it wait for any sum
    assert together == pytest.approx(step / 8 + 34 * 6.6e-6)  # of 16 layers, an embedding and the best token
    assert system.memory(one, 8, 64000)[0] > system.memory(eight, 8, 64000)[0] + 2 * SMALL_WEIGHTS * 7 / 8
    odd = replace(SMALL, n_heads=20, n_kv_heads=4)  # of whose heads eight ranks have no equal share
    assert on_h200(draft_model=odd, ranks=ranks).memory(one, 8, 64000)[1] is None
    with pytest.raises(ValueError, match="tp 8 does not fit the model: it must divide n_heads 20"):
        on_h200(draft_model=odd, ranks=ranks).memory(eight, 8, 64000)


def test_snapkv_pays_for_refreshing_and_only_where_it_selects() -> None:
    draft = DraftConfig(policy="snapkv", budget=2048, refresh=64)
    assert on_h200().forecast(draft, 0.9, 16, 2000, 4).select_seconds == 0
    one = on_h200().forecast(draft, 0.9, 16, 64000, 4)
    passes = 16 * one.tokens / 64 / 4  # of four rows each
    linear = max(2 * WEIGHTS / 4.8e12, 2 * WEIGHTS * 4 * 32 / 989e12)
    attention = max(KV_BYTES * 64000 * 4 / 4.8e12, 4 * 32 * 32 * 128 * 64000 * 4 * 32 / 989e12)
    assert one.select_seconds == pytest.approx(passes * (linear + 1.5 * attention))


def test_a_registered_view_is_planned_by_its_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Toy(View):
        @classmethod
        def reads(cls, config: DraftConfig, n_keys: int) -> int:
            return 7

    monkeypatch.setattr(registry, "VIEWS", dict(registry.VIEWS))
    registry.register("toy", Toy)
    one = on_h200().forecast(DraftConfig(policy="toy"), 0.5, 8, 64000, 2)
    assert one.draft_seconds == pytest.approx(reading(7, 8))


# ---- published figures, and steps of Llama-3.1-8B whose drafts read 512 entries --------------------------------------


MAGICDEC = [  # arXiv 2408.11049, tables 2 and 6: Llama-3.1-8B on eight H100, SnapKV 2049: ms of T_T, T_D and T_V
    (16, 32000, 3, 6.18, 10.55 / 3, 6.84),
    (128, 32000, 6, 26.07, 33.33 / 6, 31.60),
    (41, 100_000, 7, 25.96, 34.34 / 7, 28.50),
]


@pytest.mark.parametrize(("batch", "context", "gamma", "plain", "draft", "verify"), MAGICDEC)
def test_nothing_that_magicdec_measured_is_faster_than_the_roofline_and_what_is_expected_is_near(
    batch: int, context: int, gamma: int, plain: float, draft: float, verify: float
) -> None:
    system = System(model=LLAMA, chip=CHIPS["h100"], ranks=Ranks(n=8, link=nvlink(900e9)))
    config = DraftConfig(policy="snapkv", budget=2049)
    ideal, ours = (system.forecast(config, 0.89, batch, context, gamma, e) for e in (IDEAL, EXPECTED))
    for name, ms in {"target_seconds": plain, "draft_seconds": draft, "verify_seconds": verify}.items():
        assert getattr(ideal, name) * 1e3 < ms
    assert 0.75 < ours.target_seconds * 1e3 / plain < 1.25
    assert 0.75 < ours.verify_seconds * 1e3 / verify < 1.25
    assert ours.draft_seconds * 1e3 < draft  # its draft steps were mostly gaps


def rounds(batch: int, context: int, gamma: int, alpha: float, e: Efficiency = IDEAL) -> Forecast:
    return on_h200().forecast(STREAMING, alpha, batch, context, gamma, e)


def best(batch: int, context: int, alpha: float) -> Forecast:
    return roofline.best_gamma(lambda gamma: rounds(batch, context, gamma, alpha))


@pytest.mark.parametrize(
    ("context", "batch", "plain_ms", "draft_share", "ratios"),
    [
        (1024, 8, 3.35, 0.967, ((1.00, 0), (1.00, 0), (1.00, 0))),
        (4096, 64, 10.29, 0.391, ((1.23, 2), (1.37, 2), (1.53, 3))),
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


def test_intensity_takes_what_is_known() -> None:
    # where MagicDec's figure crosses the ridge of an A100, 153 operations per byte, with three queries per row
    for model, context, intensity in ((LLAMA_2, 395, 156), (LLAMA, 1958, 153)):
        cost = step_cost(model, 256, 3, context)
        found = (cost.linear_flops + cost.attention_flops) / (cost.weight_bytes + cost.kv_bytes)
        assert found == pytest.approx(intensity, abs=1)
    assert [round(chip.peak / chip.bandwidth) for chip in (A100, H100, H200)] == [153, 295, 206]


def test_omega_is_the_closed_form_and_takes_a_chance_for_each_draft() -> None:
    assert roofline.omega(5, 0.8) == pytest.approx((1 - 0.8**6) / 0.2)
    assert roofline.omega(0, 0.8) == 1.0
    assert roofline.omega(4, 1.0) == 5.0
    assert roofline.omega(3, [0.5, 0.4]) == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.4)


def test_judging_costs_a_round_of_drafts_and_no_round_without() -> None:
    judging = Efficiency(judge_seconds=1e-3)
    free, paid = (rounds(8, 32768, 4, 0.9, e) for e in (IDEAL, judging))
    assert paid.round_seconds == pytest.approx(free.round_seconds + 1e-3)
    assert rounds(8, 32768, 0, 0.9, judging).ratio == 1.0


def test_measured_rates_make_a_chip() -> None:
    rates = measure(torch.device("cpu"), n_bytes=1 << 20, size=64, dtype=torch.float32, repeats=3)
    assert all(math.isfinite(rate) and rate > 0 for rate in (rates.copy, rates.read, rates.matmul))
    assert rates.chip("cpu", memory=1e9).bandwidth == max(rates.copy, rates.read)


# by one H200, benchmarks/h200: rows, weights of the draft, ms of T_T, T_D, T_V
STEPS = [(16, None, 30.83, 5.33, 36.71), (15, "float8", 29.19, 3.96, 34.53)]


@pytest.mark.parametrize(("rows", "quantize", "plain", "draft", "verify"), STEPS)
def test_expected_steps_of_a_full_h200_are_those_that_one_took(
    rows: int, quantize: str | None, plain: float, draft: float, verify: float
) -> None:
    guided = DraftConfig(policy="guided", budget=1024, page=16, quantize=quantize)
    ideal, good, ours = (on_h200().forecast(guided, 0.9, rows, 57344, 8, e) for e in (IDEAL, PRACTICAL, EXPECTED))
    for name, ms in (("target_seconds", plain), ("draft_seconds", draft), ("verify_seconds", verify)):
        assert getattr(ours, name) * 1e3 == pytest.approx(ms, rel=0.05)
        assert getattr(ideal, name) < min(getattr(good, name), getattr(ours, name))
    assert 0.25e-3 <= ours.select_seconds <= 0.4e-3 and good.select_seconds == 0.0


def test_quantized_products_reach_the_shares_that_were_published_on_a_gpu_alone() -> None:
    def draft_seconds(quantize: str | None, efficiency: Efficiency, device: str = "cuda") -> float:
        draft = DraftConfig(policy="guided", budget=1024, quantize=quantize)
        return replace(on_h200(), device=device).forecast(draft, 0.9, 1, 4096, 4, efficiency).draft_seconds

    shares = roofline.PUBLISHED
    published = Efficiency(narrow=shares)
    per_byte = {name: draft_seconds(name, published) / draft_seconds(name, IDEAL) for name in (None, *shares)}
    weights = [per_byte.pop(None), *(1 / x for x in per_byte.values())]  # the keys of one row are 2 % of the bytes
    assert weights == pytest.approx([1.0, *shares.values()], rel=0.02)
    assert draft_seconds("int8", published, "cpu") == draft_seconds("int8", IDEAL, "cpu")
    how = 2, 64, Conditions(precision="int8", efficiency=EXPECTED)  # more than 256 rows are multiplied with copies
    assert 4e-3 < step_seconds(LLAMA, H200, 129, *how) - step_seconds(LLAMA, H200, 128, *how) < 5e-3


def test_a_refresh_of_all_rows_at_once_reads_the_weights_once() -> None:
    def seconds(at_once: int, efficiency: Efficiency = IDEAL, batch: int = 16) -> float:
        under, how = Conditions(efficiency=efficiency), {"every": 64, "n_observed": 32, "at_once": at_once}
        return roofline.refresh_seconds(LLAMA, H200, batch, 57344, 6.0, under, reads=1.5, **how)

    rows, weights = 16 * 6.0 / 64, step_cost(LLAMA, 1, 1, 57344).weight_bytes / 4.8e12  # rows that come due a round
    keys = 1.5 * step_cost(LLAMA, 1, 1, 57344).kv_bytes / 4.8e12
    assert seconds(1) == pytest.approx(rows * (weights + keys))
    assert rows * keys < seconds(16) < rows * (weights / 2 + keys)  # 512 tokens are bound by arithmetic, not by weights
    assert seconds(16) == seconds(99)  # there are no more rows
    assert seconds(1, EXPECTED) > seconds(1)
    # row by row about 10 ms each, and so some 13 to 15 ms per round
    assert 0.008 < seconds(1, EXPECTED) / rows < 0.010


def test_kernels_of_a_layer_are_counted_as_they_are_launched() -> None:
    """By the code that Inductor generates for a layer, and what operators launch, of which test_attention_aot knows."""
    from tests.gpt_fast_sd.cuda import test_codegen

    assert test_codegen.LAYER == roofline.BESIDE_ATTENTION + 1  # an operator is one there
    assert test_codegen.HEAD == roofline.HEAD_KERNELS
    sparse = launches("sparse_attention", n_entries=1033)  # 768 listed ones, and a window
    found = {
        "dense": launches("decode_attention"),
        "mass": launches("decode_attention_with_mass"),
        "sparse": sparse,
        "quest": sparse + launches("quest_pages"),
    }
    of_layers = test_codegen.STEPS["draft quest"][0] - test_codegen.HEAD
    found["quest"] += of_layers // test_codegen.LAYERS - test_codegen.LAYER - 1  # beside the operator that chooses
    assert found == roofline.ATTENTION_KERNELS
    assert roofline.kernels(LLAMA) == 32 * 10 + 4
    assert roofline.BESIDE_ATTENTION + found["mass"] == LAYER_NODES
    assert MORE_NODES["quest"] == found["quest"] - found["mass"] and {
        name: MORE_NODES[name] for name in ("int8", "planes")
    } == {name: test_codegen.CACHES[name][0] for name in ("int8", "planes")}


# ---- lengths, and memory ---------------------------------------------------------------------------------------------


def test_break_even_is_where_the_speedup_crosses_one() -> None:
    system = on_h200()
    for batch in (8, 32):
        at = system.break_even(STREAMING, 0.8, batch, EXPECTED)
        assert at
        assert system.best(STREAMING, 0.8, batch, at, EXPECTED).ratio > 1
        assert system.best(STREAMING, 0.8, batch, at - 1, EXPECTED).ratio <= 1
    assert system.break_even(DraftConfig(policy="full"), 0.9, 8) is None  # a draft step is a step


def test_the_critical_length_is_where_a_larger_batch_begins_to_gain_more() -> None:
    """About 1.5K on an H200 with three drafts of acceptance 0.8, by the same model worked out in steps of 250."""
    draft = DraftConfig(policy="streaming", budget=512, gamma=3)
    at = on_h200().critical(draft, 0.8, [32, 256])
    assert at and 1250 < at <= 1500
    few, many = (on_h200().best(draft, 0.8, batch, at - 1).ratio for batch in (32, 256))
    assert many < few


def test_what_does_not_fit_comes_with_what_does_and_unknown_memory_holds_everything() -> None:
    unknown = Chip(name="some", bandwidth=1e12, peak=1e14)
    assert System(model=LLAMA, chip=unknown).memory(STREAMING, 64, 100_000)[1] is None
    system = on_h200()
    assert system.memory(STREAMING, 16, 8000)[1] is None
    need, advice = system.memory(STREAMING, 64, 32000)
    assert need > H200.memory and advice
    found = re.fullmatch(r"batch_size (\d+) or max_seq_len ([\d,]+) would fit", advice)
    assert found
    rows = int(found[1])
    assert system.memory(STREAMING, rows, 32000)[1] is None and system.memory(STREAMING, rows + 1, 32000)[1]
    assert on_h200(ranks=Ranks(n=8, link=nvlink(900e9))).memory(STREAMING, 64, 32000)[0] < need / 4
    assert "not even" in str(System(model=LLAMA, chip=CHIPS["l4"]).memory(STREAMING, 64, 120_000)[1])


BY_A100 = System(model=LLAMA, chip=A100)
NO_FLOAT8 = "quantize 'float8' needs a GPU that multiplies float8, and A100-80G SXM does not"
NO_RATES, NOT_POSITIVE = (0.0, -1.0, math.nan, math.inf), "bandwidth of x must be positive"
HALVED = DraftConfig(policy="quantized")  # once half of each number of bf16 was forecast, which no engine reads


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: on_h200().memory(STREAMING, 0, 1000), "batch_size must be a whole number of at least 1, got 0"),
        (lambda: on_h200(draft_model=LLAMA_2).memory(BESIDE, 1, 1000), "of 32,000, the target of 128,256"),
        (lambda: on_h200(dtype="fp16", kv_dtype="int8").memory(STREAMING, 1, 1000), "'int8' is not for models in fp16"),
        (lambda: replace(BY_A100, quantize="float8"), NO_FLOAT8),
        (lambda: BY_A100.forecast(replace(STREAMING, quantize="float8"), 0.8, 8, 64000, 4), NO_FLOAT8),
        (lambda: replace(BY_A100, model=replace(LLAMA, ffn_dim=14_400), quantize="int4"),
         "'int4' needs inputs that 128 divides and outputs that 64 divides, and w_out has 14,400 and 4,096"),
        (lambda: replace(BY_A100, device="cpu", quantize="float8"), "runs on device 'cuda', and the model is on 'cpu'"),
        (lambda: on_h200().forecast(HALVED, 0.8, 8, 8000, 4), "'quantized' reads half of an int8 cache.* got None"),
        # and what is no rate, or no model
        *((lambda rate=rate: Chip(name="x", bandwidth=rate, peak=1e12), NOT_POSITIVE) for rate in NO_RATES),
        *((lambda rate=rate: Link(name="x", bandwidth=rate, hop=0), NOT_POSITIVE) for rate in NO_RATES),
        *((lambda said=said: Kept.of([said]), "acceptance must be a rate from 0 to 1")
          for said in ("1.5", "nan", "-0.1", "x", "foo=0.5", "streaming=", "=")),
        (lambda: shape_of("nobody/nothing"), "no preset is called 'nobody/nothing'"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_is_refused_in_its_words(asked: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked()


# ---- chips, and acceptance -------------------------------------------------------------------------------------------


def test_chips_are_known_by_what_users_and_drivers_call_them() -> None:
    assert chip_named("RTX-4090") is chip_named("rtx 4090") is CHIPS["rtx 4090"]
    assert chip_named("H100-PCIe") is CHIPS["h100 pcie"]
    assert chip_of("NVIDIA H100 80GB HBM3") is CHIPS["h100"]
    assert chip_of("NVIDIA H100 NVL") is CHIPS["h100 nvl"]
    assert chip_of("NVIDIA A100-SXM4-40GB") is CHIPS["a100 40gb"]
    assert chip_of("NVIDIA L40S") is CHIPS["l40s"] and chip_of("NVIDIA L4") is CHIPS["l4"]
    assert chip_of("NVIDIA GeForce GTX 1080") is None


def test_acceptance_is_what_is_said_else_what_was_measured_else_what_was_published() -> None:
    file = str(DATA / "acceptance_7900_t0.json")
    kept, few = Kept.of(["snapkv=0.5", file]), DraftConfig(policy="streaming", budget=256)
    assert kept.chances(DraftConfig(policy="snapkv", budget=999), 8000) == ((0.5,), "given")
    chances, source = kept.chances(few, 8000)
    shares = next(
        one["acceptance_by_position"]
        for one in json.loads(Path(file).read_text())["results"]
        if (one["policy"], one["budget"]) == ("streaming", 256)
    )
    assert math.prod(chances) == pytest.approx(shares[-1]) and chances[0] == shares[0]
    assert source == "measured: acceptance_7900_t0.json, context 7,900, T 0"
    with pytest.raises(ValueError, match=r"no acceptance of streaming 999 was measured there, only of .*streaming 128"):
        kept.chances(replace(few, budget=999), 8000)
    assert "measured" in kept.chances(DraftConfig(policy="lookup"), 8000)[1]  # which has no budget
    chances, source = Kept.of([]).chances(STREAMING, 8000)
    assert chances == PROFILES["streaming"].chances and source.startswith("assumed: StreamingLLM 512")


def test_measured_acceptance_is_that_of_the_nearest_context_and_the_lowest_temperature() -> None:
    kept = Kept.of([str(path) for path in sorted(DATA.glob("acceptance_*.json"))])
    draft = DraftConfig(policy="streaming", budget=256)
    assert "context 2,000, T 0" in kept.chances(draft, 1500)[1]
    assert "context 4,000, T 0" in kept.chances(draft, 5000)[1]


# ---- whole plans, and models that the engine does not run ------------------------------------------------------------


def test_a_standalone_draft_is_planned_only_with_a_model() -> None:
    assert "standalone" not in default_policies(on_h200())
    assert "standalone" in default_policies(on_h200(draft_model=SMALL))


def test_columns_of_a_plan_line_up_and_its_json_is_json() -> None:
    system = on_h200(ranks=Ranks(n=2, link=nvlink(900e9)))
    drafts = drafts_of(system, None, None, None, None)
    document = plan(system, drafts, Kept.of([]), [1, 64], [8000, 120_000], "expected")
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert len(document["cells"]) == 2 * 2 * len(drafts)
    lines = text(document, "a model").splitlines()
    table = [line for line in lines if re.match(r"context  batch|\s*[\d,]+ +\d+  \w+ [\d,]+ ", line)]
    assert len(table) == 1 + len(document["cells"]) and len({len(line) for line in table}) == 1
    assert any("nothing below was measured" in line for line in lines)
    assert any(line.startswith("! 64 x 120,000 does not fit") for line in lines)


def test_what_was_measured_is_shown_next_to_what_the_sweep_itself_predicted() -> None:
    path = DATA / "sweep.json"
    stored = [one for one in json.loads(path.read_text())["points"] if one["status"] == "measured"]
    found = compare(path)
    assert len(found) == len(stored) > 0
    for ours, theirs in zip(found, stored, strict=True):
        assert ours["plain_ms"] == pytest.approx(theirs["predicted"]["plain_ms"])
        assert ours["speedup"] == pytest.approx(theirs["predicted"]["speedup"], rel=1e-6)
        assert ours["plain_ms"] < ours["plain_ms_measured"]  # a roofline is a floor


def test_shapes_are_those_of_presets_folders_and_the_bundled_model() -> None:
    assert shape_of("meta-llama/Llama-3.1-8B") is LLAMA
    assert shape_of("bundled").n_layers > 0


def test_drafts_without_a_budget_and_over_a_draft_model_are_compared(tmp_path: Path, capsys: Printed) -> None:
    document = json.loads((DATA / "sweep.json").read_text())
    shape = document["settings"]["transformer"]
    document["settings"] |= {"draft_model": "small", "draft_transformer": {**shape, "n_layers": 2}}
    names = (("lookup", None), ("hierarchy/standalone", 64), ("early_exit", 64), ("quest", 256))
    document["points"] = [{**document["points"][-1], "policy": policy, "budget": budget} for policy, budget in names]
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(document))
    points = compare(file)
    found = {one["policy"]: one for one in points}
    assert list(found) == [policy for policy, _ in names] and all(one["speedup"] > 0 for one in points)
    assert program.main(["--measured", str(file)]) == 0
    out = capsys.readouterr().out
    assert "measured over predicted" in out and "hierarchy/standalone 64" in out


def test_layers_with_a_window_read_no_more_and_experts_of_other_tokens_are_read_too() -> None:
    dense = on_h200()
    windowed = replace(dense, full_layers=8, window=1000)
    long = [system.conditions().entries(system.model, 32_000) for system in (dense, windowed)]
    assert long == [32 * 32_000, 8 * 32_000 + 24 * 1000]
    assert replace(windowed.conditions(), beside=1).entries(dense.model, 500) == 32 * 500 + 8  # a draft's budget
    under, model = replace(dense, experts=(8, 2)).conditions(), dense.model
    assert [round(under.experts_read(n), 3) for n in (1, 2, 1000)] == [2.0, 3.5, 8.0]
    cost, one = step_cost(model, 1, 1, 0, under), step_cost(model, 1, 1, 0)
    expert = 2 * 32 * 3 * model.dim * model.ffn_dim
    assert cost.weight_bytes - one.weight_bytes == pytest.approx(expert)
    assert cost.linear_flops - one.linear_flops == pytest.approx(expert)
    far = replace(dense, kv_link=50e9)
    kv = step_cost(model, 4, 1, 32_000).kv_bytes / 50e9
    assert far.plain(4, 32_000) == pytest.approx(kv, rel=0.05) and far.plain(4, 32_000) > dense.plain(4, 32_000)
    assert far.best(STREAMING, 0.8, 4, 32_000).draft_seconds == dense.best(STREAMING, 0.8, 4, 32_000).draft_seconds


def test_the_page_of_plans_says_what_the_model_gives_for_others(capsys: Printed) -> None:
    page = (DATA.parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
    number = r"([\d.]+)( !)? \|"
    row = rf"^\| (\S+?)(, cache behind 50 GB/s)? \|.*?\| (\d) \| {number} {number} {number}$"
    rows = re.findall(row, page, re.M)
    assert len(rows) == 6
    for name, link, tp, *shown in rows:
        model = next(one for one in (*PRESETS, *forecast.OTHERS) if name.lower() in one.lower())
        argv = ["--model", model, "--device", "h200", "--tp", tp, "--policy", "guided", "--max-new-tokens", "64"]
        argv += ["--kv-link", "50"] if link else []
        for (batch, context), speed, mark in zip(((16, 32), (64, 32), (16, 128)), shown[::2], shown[1::2], strict=True):
            program.main([*argv, "--batch", str(batch), "--context", f"{context}k"])
            said = capsys.readouterr().out
            assert f" {speed}x " in said and (f"\n! {batch} x" in said) == bool(mark), name
