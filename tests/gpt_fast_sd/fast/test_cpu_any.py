"""The kernels for any CPU, with each instruction set that this one has: every dtype and head dim, beside fp64.

What they share with those for AVX-512 the tests of these check, with the same sets.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim, M rows, I inputs,
        O outputs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast import dequantize_blocks, int4_by_sums, int8_linear, quantize_blocks, quantize_rows
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import instruction_sets as cpu_sets
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.model import as_int8, as_planes
from gpt_fast_sd.model.cache import drafted
from tests.gpt_fast_sd.fast.references import attend_reference, layer_of
from tests.gpt_fast_sd.fast.test_cpu import forced
from tests.helpers import few, random_ids, tiny_config, tiny_model

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# what an output's rounding costs, or in fp32 all sums and an exp2
ROUNDING = {FP32: 4e-6, FP16: 2.0**-11, BF16: 2.0**-8}
ANY_SETS = [one for one in cpu_sets.SETS if not one.own]
HEAD_DIMS = list(range(16, 257, 16))


@pytest.fixture(scope="module", params=ANY_SETS, ids=lambda one: one.name)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    if not request.param.has():
        pytest.skip(f"no {request.param.name} here")
    with forced(request.param.name):
        if not cpu.available(64) or not cpu_linear.packing_builds():
            pytest.skip("no compiler here builds the kernels")
        yield request.param.name


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head_dim", few(HEAD_DIMS, [16, 80, 256]))
def test_attention_is_that_of_fp64_for_every_dtype_and_head_dim(instructions: str, head_dim: int) -> None:
    """Dense, listed and with mass; the same bits for a query alone, and for the entries listed."""
    ends, n_tokens, n_keys = [5, 700, 2300], 3, 2368  # around an edge of splits, which have 2,048 keys
    pos = torch.tensor(ends)[:, None] + torch.arange(n_tokens)
    every = torch.arange(n_keys).expand(3, 2, -1)
    for dtype in (FP32, FP16, BF16):
        q = noise(3, 6, n_tokens, head_dim, seed=1).to(dtype)
        k, v = (noise(3, 2, n_keys, head_dim, seed=seed).to(dtype) for seed in (2, 3))
        for kind in (dtype, torch.int8):
            beside: tuple[Tensor | None, ...] = (None, None)
            if kind == torch.int8:
                (k, k_scale), (v, v_scale) = (quantized(x) for x in (k, v))
                beside = k_scale, v_scale
            whole = [
                x if s is None else x.double() * s.double()[..., None] for x, s in zip((k, v), beside, strict=True)
            ]
            expected = attend_reference(q, whole[0], whole[1], pos)
            size = attend_reference(q, whole[0], whole[1].abs(), pos)
            got = cpu.cpu_attention(q, layer_of(k, v, *beside), pos, n_keys)
            assert got.dtype == dtype
            assert ((got.double() - expected).abs() <= 1.05 * ROUNDING[dtype] * size + 1e-6).all()
            with_mass, mass = cpu.cpu_attention_with_mass(q, layer_of(k, v, *beside), pos, n_keys)
            assert with_mass.equal(got)
            torch.testing.assert_close(mass.sum(-1), torch.full((3, 2), 9.0), rtol=1e-5, atol=0.0)
            for t in range(n_tokens):
                alone = cpu.cpu_attention(q[:, :, t : t + 1], layer_of(k, v, *beside), pos[:, t : t + 1], n_keys)
                assert alone.equal(got[:, :, t : t + 1])
            last = pos[:, -1:, None].expand(-1, 2, -1)
            listed = torch.where(every <= last, every, -1)
            assert cpu.cpu_attention_at(q, layer_of(k, v, *beside), listed, pos).equal(got)


@pytest.mark.parametrize("head_dim", few(HEAD_DIMS, [16, 48, 80, 256]))
def test_planes_give_the_bits_of_bytes_and_drafts_what_the_upper_one_says(instructions: str, head_dim: int) -> None:
    pos, n_keys = torch.tensor([[40, 41], [2050, 2051]]), 2112
    q = noise(2, 6, 2, head_dim, seed=1).to(BF16)
    (k, k_scale), (v, v_scale) = (quantized(noise(2, 2, n_keys, head_dim, seed=seed)) for seed in (2, 3))
    (k_upper, k_low), (v_upper, v_low) = (as_planes(x) for x in (k, v))
    beside = k_scale, v_scale, k_low, v_low
    whole = cpu.cpu_attention(q, layer_of(k, v, k_scale, v_scale), pos, n_keys)
    assert cpu.cpu_attention(q, layer_of(k_upper, v_upper, *beside), pos, n_keys).equal(whole)
    tail = 17
    read = torch.arange(n_keys) >= (pos[:, 0] - (tail - 1))[:, None, None]  # [B, 1, S]
    keys, values = (
        drafted(upper, low, read.expand(-1, 2, -1), torch.float64) * scale.double()[..., None]
        for upper, low, scale in ((k_upper, k_low, k_scale), (v_upper, v_low, v_scale))
    )
    expected, size = attend_reference(q, keys, values, pos), attend_reference(q, keys, values.abs(), pos)
    got = cpu.cpu_attention(q, layer_of(k_upper, v_upper, *beside, tail), pos, n_keys)
    assert ((got.double() - expected).abs() <= 1.05 * ROUNDING[BF16] * size + 1e-6).all()
    every = torch.arange(n_keys).expand(2, 2, -1)
    listed = torch.where(every <= pos[:, -1:, None], every, -1)
    assert cpu.cpu_attention_at(q, layer_of(k_upper, v_upper, *beside, tail), listed, pos).equal(got)


def test_listed_entries_that_no_query_sees_count_as_nothing_whatever_they_hold(instructions: str) -> None:
    q, pos = noise(1, 4, 2, 64), torch.tensor([[10, 11]])
    k, v = (noise(1, 2, 128, 64, seed=seed) for seed in (1, 2))
    every = torch.arange(64).expand(1, 2, -1)
    for dtype in (FP32, FP16, BF16, torch.int8):
        beside: tuple[Tensor | None, ...] = (None, None)
        if dtype == torch.int8:
            (keys, k_scale), (values, v_scale) = (quantized(x) for x in (k, v))
            beside, spoilt = (k_scale, v_scale), (k_scale, v_scale)
        else:
            keys, values = k.to(dtype), v.to(dtype)
            spoilt = keys, values
        asked = q if dtype == torch.int8 else q.to(dtype)
        clean = cpu.cpu_attention_at(asked, layer_of(keys, values, *beside), every, pos)
        for x in spoilt:
            x[:, :, 12:] = float("nan")
        assert cpu.cpu_attention_at(asked, layer_of(keys, values, *beside), every, pos).equal(clean)


@pytest.mark.parametrize("place", [-1, -(2**31), -(2**32), -(2**63)])
def test_a_query_before_all_keys_sees_none(instructions: str, place: int) -> None:
    q, pos = noise(1, 2, 1, 64), torch.tensor([[place]])
    k, v = (noise(1, 2, 48, 64, seed=seed) for seed in (1, 2))
    assert not cpu.cpu_attention(q, layer_of(k, v), pos, 48).any()
    assert not cpu.cpu_attention_at(q, layer_of(k, v), torch.arange(48).expand(1, 2, -1), pos).any()


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [B, K, S, H] and fp16 scales [B, K, S]."""
    scale = (x.float().abs().amax(-1) / 127).half()
    return (x.float() / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_what_is_not_finite_shows_in_what_sees_it_and_nowhere_else(
    instructions: str, dtype: torch.dtype, strange: float
) -> None:
    q, k, v = (
        noise(2, 2, 1, 64).to(dtype),
        noise(2, 2, 128, 64, seed=1).to(dtype),
        noise(2, 2, 128, 64, seed=2).to(dtype),
    )
    pos = torch.tensor([[9], [99]])
    clean = cpu.cpu_attention(q, layer_of(k, v), pos, 128)
    for x, at in ((q, (1, 1, 0, 5)), (k, (1, 1, 50, 5)), (v, (1, 1, 50, 5))):
        kept = x[at].clone()
        x[at] = strange
        got = cpu.cpu_attention(q, layer_of(k, v), pos, 128)
        x[at] = kept
        assert got[0].equal(clean[0]) and got[1, 0].equal(clean[1, 0])
        sees = got[1, 1, 0, 5]
        if x is k and abs(strange) == float("inf"):  # a score of infinity is above all others, or below
            assert sees.isnan() if q[1, 1, 0, 5] * strange > 0 else sees.isfinite()
        else:
            assert not sees.isfinite()
    k[:, :, 10:], v[:, :, 10:] = float("nan"), float("nan")  # behind the first row's end
    assert cpu.cpu_attention(q[:1], layer_of(k[:1], v[:1]), pos[:1], 128).equal(clean[:1])


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1, 0x7F800001])
def test_a_nan_of_any_bits_stays_one(instructions: str, bits: int) -> None:
    q, k, v = (noise(1, 1, n, 16, seed=seed) for seed, n in enumerate((1, 9, 9)))
    k.view(torch.int32)[0, 0, 3, 2] = bits
    got = cpu.cpu_attention(q, layer_of(k, v), torch.tensor([[8]]), 9)
    assert got.isnan().all()


def test_scales_that_fp16_holds_below_its_normal_numbers_count_where_such_numbers_are_flushed(
    instructions: str,
) -> None:
    q, pos = noise(1, 1, 1, 16), torch.tensor([[79]])
    k, v = (torch.randint(-127, 128, (1, 1, 80, 16), dtype=torch.int8) for _ in range(2))
    scale = torch.full((1, 1, 80), 3e-5).half()
    expected = cpu.cpu_attention(q, layer_of(k, v, scale, scale), pos, 80)
    torch.set_flush_denormal(True)
    try:
        assert cpu.cpu_attention(q, layer_of(k, v, scale, scale), pos, 80).equal(expected) and expected.any()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("n_in", [64, 576])
def test_products_of_every_kind_of_weight_are_their_references_for_any_number_of_rows(
    instructions: str, n_in: int
) -> None:
    n_out, bias = 96, noise(96, seed=9).to(BF16)
    weight = (noise(n_out, n_in, seed=1) * 0.05).to(BF16)
    integers, scale = quantize_rows(weight)
    held = quantize_blocks(weight)
    lanes, summed = cpu_linear.pack_int4(held), cpu_linear.pack_int4(held, by_sums=True)
    unpacked = dequantize_blocks(held, BF16)
    for n_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 49, 130):
        x = noise(n_rows, n_in, seed=n_rows).to(BF16)
        got = cpu_linear.packed_linear(x, cpu_linear.pack(weight), bias)
        expected = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-5)
        alone = torch.cat([cpu_linear.packed_linear(row, cpu_linear.pack(weight), bias) for row in x.split(1)])
        assert alone.equal(got)
        got = cpu_linear.packed_linear(x, cpu_linear.pack(integers), bias, scale)
        assert got.equal(int8_linear(x, integers, scale, bias))
        got = cpu_linear.packed_linear(x, lanes.numbers, bias, held.power, lanes.blocks)
        assert got.equal(cpu_linear.packed_linear(x, cpu_linear.pack(unpacked), bias))
        got, reference = (
            cpu_linear.packed_linear(x, summed.numbers, bias, held.power, summed.blocks, by_sums=True),
            int4_by_sums(x, held, bias),
        )
        if instructions == "plain":  # which rounds products before it adds them
            torch.testing.assert_close(got.float(), reference.float(), rtol=2.0**-7, atol=1e-5)
        else:
            assert got.equal(reference)
        gate, up = F.linear(x.double(), weight.double()).unflatten(-1, (-1, 2)).unbind(-1)
        gated = cpu_linear.packed_swiglu(x, cpu_linear.pack(weight))
        torch.testing.assert_close(gated.double(), F.silu(gate) * up, rtol=2.0**-8, atol=1e-5)


def test_gates_of_any_size_are_taken(instructions: str) -> None:
    x = torch.tensor([0.0, -0.0, 88.0, 200.0, -88.0, -200.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan")])
    weight = torch.zeros(32, 32).to(BF16)
    weight[0, 0] = weight[1, 1] = 1.0
    rows = torch.zeros(len(x), 32).to(BF16)
    rows[:, 0], rows[:, 1] = x.to(BF16), 1.0
    rows[-3:, 1:] = 0.0
    got = cpu_linear.packed_swiglu(rows, cpu_linear.pack(weight))[:, 0].float()
    expected = F.silu(x.to(BF16).double()) * rows[:, 1].double()
    assert got.isnan().equal(expected.isnan())
    torch.testing.assert_close(got[:8].double(), expected[:8], rtol=2.0**-8, atol=1e-30)


def test_bits_do_not_depend_on_threads(instructions: str) -> None:
    """Of up to 4 splits of 5 x 2 kv heads a thread reads all, several or one, by how many threads there are."""
    before = torch.get_num_threads()
    q, k, v = noise(5, 4, 2, 80), noise(5, 2, 3900, 80, seed=1), noise(5, 2, 3900, 80, seed=2)
    pos = torch.tensor([[3800, 3801], [3100, 3101], [1023, 1024], [3071, 3072], [3600, 3601]])
    x, weight = noise(40, 64).to(BF16), cpu_linear.pack(noise(128, 64, seed=3).to(BF16))
    try:
        results = []
        for n in (1, 2, 3, 6):
            torch.set_num_threads(n)
            results.append((cpu.cpu_attention(q, layer_of(k, v), pos, 3840), cpu_linear.packed_linear(x, weight, None)))
    finally:
        torch.set_num_threads(before)
    assert all(a.equal(b) for one in results[1:] for a, b in zip(one, results[0], strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int8])
def test_a_long_chunk_is_read_by_blocks_of_queries_which_show_in_no_bit(instructions: str, dtype: torch.dtype) -> None:
    """402 rows of a kv head: in one block where mass is summed, else in more of them the more threads there are."""
    n_tokens, n_keys = 201, 2304
    q, k, v = noise(2, 4, n_tokens, 32), noise(2, 2, n_keys, 32, seed=1), noise(2, 2, n_keys, 32, seed=2)
    scales: tuple[Tensor, ...] = ()
    if dtype == torch.int8:
        (k, k_scale), (v, v_scale), q = as_int8(k), as_int8(v), q.to(BF16)
        scales = k_scale, v_scale
    else:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    pos = torch.tensor([[1950], [0]]) + torch.arange(n_tokens)  # over an edge of splits, and from the first entry on
    alone = torch.cat([cpu.cpu_attention(q[:, :, t : t + 1], layer_of(k, v, *scales), pos[:, t : t + 1], n_keys)
                       for t in range(n_tokens)], 2)  # fmt: skip
    assert cpu.cpu_attention_with_mass(q, layer_of(k, v, *scales), pos, n_keys)[0].equal(alone)
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 40):
            torch.set_num_threads(n)
            assert cpu.cpu_attention(q, layer_of(k, v, *scales), pos, n_keys).equal(alone), n
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", few([FP32, BF16], [BF16]))
def test_an_engine_speculates_without_loss(instructions: str, dtype: torch.dtype) -> None:
    """Its compiled steps attend, and multiply bf16, by them."""
    model = tiny_model(tiny_config(dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96), dtype=dtype)
    prompts, params = [random_ids(300), random_ids(40, seed=1)], SamplingParams(max_tokens=20, ignore_eos=True)
    config = EngineConfig(
        batch_size=2, max_seq_len=512, device="cpu", dtype="fp32" if dtype == FP32 else "bf16", exact=dtype == BF16
    )
    engine = Engine(model, None, config, DraftConfig(policy="streaming", budget=64, gamma=3))
    drafted = engine.generate(prompts, params)
    assert sum(one.stats.drafted for one in drafted) and engine.target.bodies.reads_own_keys
    engine.redraft(DraftConfig())
    assert [one.tokens for one in engine.generate(prompts, params)] == [one.tokens for one in drafted]


@pytest.mark.slow
def test_a_cache_of_graphs_that_machines_share_gives_each_its_own(tmp_path: Path) -> None:
    """Loops generated for vectors of 256 bits wrote past the ends of tensors where vectors have 512."""
    code = (
        "import torch\nfrom gpt_fast_sd.fast.compile import CompiledStep\nfrom gpt_fast_sd.fast import vector_options\n"
        "def step(x):\n    return (x.sin() + 1).sum(-1)\n"
        "print(float(CompiledStep(step, dict(vector_options()))(torch.ones(3, 36))[0]))\n"
    )
    here = [one.name for one in cpu_sets.sets_here() if one.name in ("avx512", "avx2")]
    for name in reversed(here):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), cpu_sets.VARIABLE: name}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert float(done.stdout) == pytest.approx(36 * 1.841471, rel=1e-5)
    generated = "".join(file.read_text() for file in tmp_path.rglob("*.py"))
    lanes = {"avx512": "static_cast<int64_t>(16)", "avx2": "static_cast<int64_t>(8)"}
    assert all(lanes[name] in generated for name in here)
