"""The kernels for any CPU, with each instruction set that this one has: every dtype and head dim, beside fp64.

What they share with those for AVX-512 the tests of these check, with the same sets.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim, M rows, I inputs,
        O outputs.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.fast import dequantize_blocks, int4_by_sums, int8_linear, quantize_blocks, quantize_rows
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import instruction_sets as cpu_sets
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.ops import planes
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpt_fast_sd.fast.test_cpu import Case, forced
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.helpers import few, form_of, random_ids, tiny_config, tiny_engine, tiny_model

# what an output's rounding costs, or in fp32 all sums and an exp2
ROUNDING = {FP32: 4e-6, FP16: 2.0**-11, BF16: 2.0**-8}
ANY_SETS = [one for one in cpu_sets.SETS if not one.own]
HEAD_DIMS = list(range(16, 257, 16))  # each takes seconds to build: 80 serves the other tests, too


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


def is_close(got: Tensor, case: Case) -> bool:
    """Whether the output is that of fp64 but for its rounding: no other number is rounded."""
    exact, size = case.expected()
    return bool(((got.double() - exact).abs() <= 1.05 * ROUNDING[got.dtype] * size + 1e-6).all())


@pytest.mark.parametrize("head_dim", few(HEAD_DIMS, [80]))
def test_attention_is_that_of_fp64_for_every_dtype_and_head_dim(instructions: str, head_dim: int) -> None:
    """Dense, listed and with mass; the same bits for a query alone, and for all entries listed, seen or not."""

    def of(form: str, dtype: torch.dtype) -> Case:
        # around an edge of splits, which have 2,048 keys
        return Case([7, 702, 2302], form=form, dtype=dtype, n_tokens=3, group=3, head_dim=head_dim, n_keys=2368,
                    whole=False, tail=17)  # fmt: skip

    for dtype, form in [*itertools.product((FP32, FP16, BF16), ("own", "int8")), (BF16, "draft")]:
        case = of(form_of(dtype).name if form == "own" else form, dtype)
        got = case.attend()
        assert got.dtype == dtype and is_close(got, case)
        assert (form, dtype) != ("int8", BF16) or of("planes", dtype).attend().equal(got)
        with_mass, mass = case.attend_with_mass()
        assert with_mass.equal(got)
        torch.testing.assert_close(mass.sum(-1), torch.full((3, 2), 9.0), rtol=1e-5, atol=0.0)
        for t in () if case.tail else range(3):  # a tail is counted from the first query
            assert case.attend(tokens=slice(t, t + 1)).equal(got[:, :, t : t + 1])
        assert case.attend_at(case.every()).equal(got)


@pytest.mark.parametrize("place", [-1, -(2**31), -(2**32), -(2**63)])
def test_a_query_before_all_keys_sees_none(instructions: str, place: int) -> None:
    q, pos = noise(1, 2, 1, 64), torch.tensor([[place]])
    k, v = (noise(1, 2, 48, 64, seed=seed) for seed in (1, 2))
    assert not cpu.cpu_attention(q, layer_of(k, v), pos, 48).any()
    assert not cpu.cpu_attention_at(q, layer_of(k, v), torch.arange(48).expand(1, 2, -1), pos).any()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1, 0x7F800001])
def test_a_nan_of_any_bits_stays_one(instructions: str, bits: int) -> None:
    q, k, v = (noise(1, 1, n, 80, seed=seed) for seed, n in enumerate((1, 9, 9)))
    k.view(torch.int32)[0, 0, 3, 2] = bits
    got = cpu.cpu_attention(q, layer_of(k, v), torch.tensor([[8]]), 9)
    assert got.isnan().all()


def test_scales_below_fp16s_normal_numbers_count_where_such_numbers_are_flushed(instructions: str) -> None:
    q, pos = noise(1, 1, 1, 80), torch.tensor([[79]])
    k, v = (torch.randint(-127, 128, (1, 1, 80, 80), dtype=torch.int8) for _ in range(2))
    scale = torch.full((1, 1, 80), 3e-5).half()
    expected = cpu.cpu_attention(q, layer_of(k, v, scale, scale), pos, 80)
    torch.set_flush_denormal(True)
    try:
        assert cpu.cpu_attention(q, layer_of(k, v, scale, scale), pos, 80).equal(expected) and expected.any()
    finally:
        torch.set_flush_denormal(False)


def check_products(product: Callable[..., Tensor], n_in: int, rows: Sequence[int], *, fused: bool = True) -> None:
    """product(x, numbers, blocks, scales, bias, gated=, by_sums=) of every kind of weight is its reference.

    fused: products are not rounded before they are added.
    """
    weight, bias = (noise(96, n_in, seed=1) * 0.05).to(BF16), noise(96, seed=9).to(BF16)
    integers, scale = quantize_rows(weight)
    held = quantize_blocks(weight)
    integers[0], held.numbers[0] = -128, 255  # with rows of ones, the most that comes together
    lanes, summed = cpu_linear.pack_int4(held), cpu_linear.pack_int4(held, by_sums=True)
    generator = torch.Generator().manual_seed(n_in)
    spread = (weight * torch.exp2(-torch.randint(12, weight.shape, generator=generator))).to(BF16)
    spread[:, ::7], spread[6] = 0, weight[6].sign() * 2.0**-120
    halves = planes.split(spread)
    upper, lower = cpu_linear.pack_planes(halves.upper, halves.lower)
    exact, read = map(cpu_linear.pack, (spread, planes.reading(halves)))
    own, of_integers, unpacked = map(cpu_linear.pack, (weight, integers, dequantize_blocks(held, BF16)))
    for n_rows in rows:
        x = noise(n_rows, n_in, seed=n_rows).to(BF16)
        x[0] = 1
        got = product(x, own, None, None, bias)
        expected = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-5)
        assert torch.cat([product(row, own, None, None, bias) for row in x.split(1)]).equal(got)
        assert product(x, of_integers, None, scale, bias).equal(int8_linear(x, integers, scale, bias))
        got = product(x, lanes.numbers, lanes.blocks, held.power, bias)
        assert got.equal(product(x, unpacked, None, None, bias))
        got = product(x, summed.numbers, summed.blocks, held.power, bias, by_sums=True)
        near = {"rtol": 0.0, "atol": 0.0} if fused else {"rtol": 2.0**-7, "atol": 1e-5}
        torch.testing.assert_close(got, int4_by_sums(x, held, bias), **near)
        ones = torch.cat([x, torch.eye(n_in)[-n_rows:].to(BF16)])  # each of some weights by itself
        for plane, packed in ((lower, exact), (None, read)):
            got = product(ones, upper, plane, halves.scale, None, by_sums=cpu_linear.IN_PLANES)
            assert got.equal(product(ones, packed, None, None, None))
        gate, up = F.linear(x.double(), weight.double()).unflatten(-1, (-1, 2)).unbind(-1)
        gated = product(x, own, None, None, None, gated=True)
        torch.testing.assert_close(gated.double(), F.silu(gate) * up, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("n_in", [64, 576])
def test_products_of_every_kind_of_weight_are_their_references_for_any_rows(instructions: str, n_in: int) -> None:
    def product(
        x: Tensor, numbers: Tensor, blocks: Tensor | None, scales: Tensor | None, bias: Tensor | None,
        gated: bool = False, by_sums: int = False,
    ) -> Tensor:  # fmt: skip
        return cpu_linear.packed_linear(x, numbers, bias, scales, blocks, by_sums is True, gated)

    check_products(product, n_in, (1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 49, 130), fused=instructions != "plain")


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("dtype", few([FP32, BF16], [BF16]))
def test_an_engine_speculates_without_loss(instructions: str, dtype: torch.dtype) -> None:
    """Its compiled steps attend, and multiply bf16, by them."""
    model = tiny_model(tiny_config(dim=64, head_dim=80, ffn_dim=96), dtype=dtype)
    prompts, params = [random_ids(300), random_ids(40, seed=1)], SamplingParams(max_tokens=20, ignore_eos=True)
    draft = DraftConfig(policy="streaming", budget=64, gamma=3)
    engine = tiny_engine(draft, model=model, compile=True, exact=dtype == BF16)
    drafted = engine.generate(prompts, params)
    assert sum(one.stats.drafted for one in drafted) and engine.target.bodies.reads_own_keys
    engine.redraft(DraftConfig())
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(drafted)


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
