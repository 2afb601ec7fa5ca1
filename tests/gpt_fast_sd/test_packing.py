"""Weights of integers, near what they were made from; and packed products of every kind, whose rows stand alone.

Shapes: M rows, I inputs, O outputs.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.fast import int8_linear, quantize_rows
from gpt_fast_sd.fast.cpu import build, packing
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.cpu.instruction_sets import chosen
from gpt_fast_sd.fast.cpu.linear import pack, packed_linear
from gpt_fast_sd.fast.linear_int4 import Int4Linear
from gpt_fast_sd.fast.linear_int8 import Int8Linear
from gpt_fast_sd.fast.ops import int8
from gpt_fast_sd.fast.ops.int4 import BLOCK, Int4, dequantize_blocks, int4_by_sums, power_between, quantize_blocks
from gpt_fast_sd.model import Transformer, load_model, save_hugging_face
from gpt_fast_sd.quantization.table import int4_in_blocks
from tests.gpt_fast_sd.fast.test_cpu import body, needs_kernel  # noqa: F401  needs_kernel asks for body
from tests.helpers import few, pack_or_skip, random_ids, tiny_config, tiny_engine, tiny_model

BF16 = torch.bfloat16


def weight_of(n_out: int, n_in: int, *, seed: int = 0) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed))


def rounded(block: list[float]) -> tuple[float, float]:
    """The root mean square error of a block's nearest numbers between its ends, as an obvious loop, and its scale."""
    least, scale = min(block), (max(block) - min(block)) / 15
    errors = [(least + scale * round((x - least) / scale) - x) ** 2 for x in block]
    return (sum(errors) / len(block)) ** 0.5, scale


# ---- what is kept of a weight --------------------------------------------------------------------------------------


@pytest.mark.parametrize("larger", [1.0, 1e4, 1e7])
def test_a_block_is_nearer_than_its_ends_cut_into_fifteen_steps_however_large_its_neighbour_is(larger: float) -> None:
    weight = weight_of(40, 4 * BLOCK)
    weight[:, 0] = larger
    error = (dequantize_blocks(quantize_blocks(weight), torch.float32) - weight)[:, BLOCK:].unflatten(1, (-1, BLOCK))
    own = error.square().mean(-1).sqrt().flatten()
    plain = torch.tensor([rounded(block)[0] for block in weight[:, BLOCK:].reshape(-1, BLOCK).tolist()])
    # scales and minima in fp16 are off by 2^-12 of a number at most 4 times a block's deviation
    assert own.le(plain * 1.02).all() and own.mean() < 0.93 * plain.mean()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_row_is_quantized_alone_whatever_its_size(dtype: torch.dtype) -> None:
    weight = (weight_of(5, 96) * torch.tensor([1.0, 1e-4, 3e-5, 7.0, 1e3])[:, None]).to(dtype)
    whole = quantize_blocks(weight)
    error = (dequantize_blocks(whole, torch.float32) - weight.float()).norm(dim=1) / weight.float().norm(dim=1)
    # steps of a fifteenth of a block's range, four deviations; in fp16 3e-5 has few digits itself
    assert error.max() < 0.09
    assert dequantize_blocks(whole, dtype).equal(dequantize_blocks(whole, torch.float32).to(dtype))
    for row in range(5):
        alone = quantize_blocks(weight[row : row + 1])
        assert all(a.equal(b[row : row + 1]) for a, b in zip(alone, whole, strict=True))


def test_numbers_on_such_steps_and_constants_and_zeros_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(16, (8, 3, BLOCK), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, 15
    scale = torch.rand(8, 3, 1, generator=generator).mul(0.1).half().float()
    weight = (levels * scale - (7.5 * scale).half().float()).flatten(1)
    weight[5, :32], weight[6], weight[7, 64:] = 0.25, 0, 0
    # the line through them is found to the digits of fp16
    got = dequantize_blocks(quantize_blocks(weight), torch.float32)
    torch.testing.assert_close(got, weight, rtol=1e-3, atol=1e-4)
    assert not got[6].any()


def test_blocks_that_are_a_weight_but_for_powers_of_two_are_known() -> None:
    held = quantize_blocks(weight_of(6, 64).to(BF16))._replace(power=torch.ones(6))
    weight = dequantize_blocks(held, BF16)
    powers = torch.tensor([1.0, 4.0, 2.0**-9, 1.0, 2.0**13, 0.5])
    found = power_between(held, weight * powers.to(BF16)[:, None])
    assert found is not None and found.equal(powers)
    assert power_between(held, weight * torch.tensor(3.0).to(BF16)) is None
    other = weight.clone()
    other[3, 5] += other[3].abs().amax() / 100
    assert power_between(held, other) is None
    weight[2] = 0
    assert power_between(held, weight) is None


# ---- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "most", "off"), [("int4", 0.09, 1e-5), ("int8", 0.006, 1e-4)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_in_pytorch_is_that_of_fp64(kind: str, most: float, off: float, bias: bool) -> None:
    """An int8 weight is off by up to 1/254 of its row's largest, which is nearly twice what is typical."""
    plain, x = Linear(192, 96, bias=bias).requires_grad_(False), torch.randn(3, 7, 192)
    plus = plain.bias.double() if bias else None
    of_int4 = Int4Linear(quantize_blocks(plain.weight), plain.bias, torch.float32)
    linear = of_int4 if kind == "int4" else Int8Linear(plain.weight, plain.bias)
    weight = stood_for(linear)
    got, expected = linear(x), nn.functional.linear(x.double(), plain.weight.double(), plus)
    assert got.dtype == torch.float32 and got.shape == (3, 7, 96)
    assert 0 < (got - expected).norm() <= most * expected.norm()
    # fp32 sums; int8 products take x as integers, off by up to 2^-15 of its row's largest, three times what is typical
    exact = nn.functional.linear(x.double(), weight, plus)
    assert (got - exact).norm() <= off * exact.norm()


@pytest.mark.parametrize("n_in", [64, 1024, 1536])
def test_a_cpu_that_saturates_products_of_bytes_gives_the_same_bits(n_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Int8Linear(Linear(n_in, 48, bias=False).to(BF16).requires_grad_(False).weight, None)
    x = torch.randn(9, n_in, generator=torch.Generator().manual_seed(2)).to(BF16)
    expected = linear(x)
    monkeypatch.setattr(int8, "has_vnni", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    assert linear(x).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_an_int8_weight_is_kept_to_half_a_step_of_its_rows_scale(dtype: torch.dtype) -> None:
    weight = torch.randn(2 * int8.ROWS_AT_ONCE + 3, 40).to(dtype)
    weight[7] = 0
    integers, scale = quantize_rows(weight)
    assert integers.dtype == torch.int8 and scale.dtype == torch.float32 and integers.abs().max() == 127
    assert (integers.float() * scale[:, None] - weight.float()).abs().max(1).values.le(scale * 0.5001).all()
    assert not integers[7].any()
    alone = quantize_rows(weight[5:6])
    assert alone[0].equal(integers[5:6]) and alone[1].equal(scale[5:6])


# ---- packed products -------------------------------------------------------------------------------------------------

ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 130]
KINDS = {
    "bf16": packing.PackedLinear, "int8": packing.PackedInt8Linear, "int4": packing.PackedInt4Linear,
    "int4 for few rows": packing.SummedInt4Linear,
}  # fmt: skip
TWICE = ["int4 for few rows"] * (chosen().name == "plain")  # sums of blocks are rounded, and once added again
UNITS = {"bf16": 32, "int8": 64, "int4": 32, "int4 for few rows": 64}  # which divide their inputs
SIZES = [(kind, n_out, n_in) for kind, n in UNITS.items() for n_out, n_in in ((32, n), (96, 64), (64, 576))]
kinds = pytest.mark.parametrize("kind", KINDS)


def linear_of(kind: str, n_out: int, n_in: int, *, bias: bool = False, dtype: torch.dtype = BF16) -> Linear:
    """A product that is not packed yet."""
    plain = Linear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)
    if kind == "bf16":
        return plain
    if kind == "int8":
        return Int8Linear(plain.weight, plain.bias)
    made = Int4Linear(quantize_blocks(plain.weight), plain.bias, dtype)
    made.scale.data *= torch.exp2(torch.arange(n_out) % 9 - 4.0)  # powers of two, which multiply the sums
    return made


def packed(kind: str, n_out: int, n_in: int, *, bias: bool = False) -> Linear:
    linear = linear_of(kind, n_out, n_in, bias=bias)
    pack_or_skip(linear, few_rows=kind.endswith("rows"))
    assert type(linear) is KINDS[kind]
    return linear


def stood_for(linear: Linear) -> Tensor:
    """The weight that a product stands for before it is packed, in fp64."""
    if isinstance(linear, Int4Linear):
        return dequantize_blocks(linear.held, torch.float64)
    return linear.weight.double() * (linear.scale.double()[:, None] if isinstance(linear, Int8Linear) else 1.0)


def same_bits(kind: str, linear: Linear) -> Callable[[Tensor, Tensor | None], Tensor]:
    """What has the bits of a product that will be packed: in PyTorch, or of the bf16 weight; x, bias -> outputs."""
    if isinstance(linear, Int8Linear):
        weight, scale = linear.weight.clone(), linear.scale.clone()
        return lambda x, bias: int8_linear(x, weight, scale, bias)
    if kind.endswith("rows"):
        held = Int4(*(part.clone() for part in linear.in_order()))  # type: ignore[operator]
        return lambda x, bias: int4_by_sums(x, held, bias)
    bf16 = pack(dequantize_blocks(linear.held, BF16) if isinstance(linear, Int4Linear) else linear.weight.clone())
    return lambda x, bias: packed_linear(x, bf16, bias)


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """False: a process that may not use tiles, and so multiplies by vectors."""
    if not request.param:
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
        build.library.cache_clear()
        cpu_linear.kernel_for.cache_clear()
    yield
    if not request.param:
        build.library.cache_clear()
        cpu_linear.kernel_for.cache_clear()


@pytest.mark.parametrize(
    ("kind", "n_out", "n_in", "bias", "tiles"),
    [
        *((*size, bias, True) for size in SIZES for bias in (False, True)),
        *((kind, 1056, 3 * n, True, True) for kind, n in UNITS.items()),
        *((*size, False, False) for size in SIZES),
    ],
    indirect=["tiles"],
)
def test_products_have_the_bits_that_they_stand_for(kind: str, n_out: int, n_in: int, bias: bool, tiles: None) -> None:
    linear = linear_of(kind, n_out, n_in, bias=bias)
    weight, expected = stood_for(linear), same_bits(kind, linear)
    if kind == "int4":  # whose products are those of the bf16 weight that the numbers stand for
        weight = weight.to(BF16).double()
    plus = linear.bias.double() if bias else None
    pack_or_skip(linear, few_rows=kind.endswith("rows"))
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * torch.logspace(-6, 6, n_rows)[:, None].to(BF16)
        got = linear(x)
        assert got.dtype == BF16 and got.is_contiguous() and (kind in TWICE or got.equal(expected(x, linear.bias)))
        exact = nn.functional.linear(x.double(), weight, plus)
        # one rounding to bf16; fp32 sums of n_in products that may cancel, or x off by up to 2^-15 of its row's
        # largest, which is three times what is typical
        size = x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)
        assert (got - exact).abs().le(2**-8 * exact.abs() + (1e-5 if kind in ("bf16", "int4") else 2e-4) * size).all()


@pytest.mark.parametrize(("kind", "n_out", "n_in"), [(kind, 192 if n == 576 else o, n) for kind, o, n in SIZES])
def test_swiglu_is_that_of_its_sums_for_any_number_of_rows(kind: str, n_out: int, n_in: int) -> None:
    linear = linear_of(kind, n_out, n_in)
    weight, sums = stood_for(linear), same_bits(kind, linear)
    bf16 = pack(weight.to(BF16)) if kind == "int4" else None
    pack_or_skip(linear, few_rows=kind.endswith("rows"))
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * 3
        got = linear.swiglu(x)  # type: ignore[operator]
        assert got.dtype == BF16 and got.is_contiguous()
        if bf16 is not None:
            assert got.equal(packed_linear(x, bf16, gated=True))
            continue
        whole = nn.functional.linear(x.double(), weight) if kind == "bf16" else sums(x.float(), None).double()
        gate, up = whole.unflatten(-1, (-1, 2)).unbind(-1)
        atol = 3e-5 * n_in**0.5 if kind == "bf16" or kind in TWICE else 1e-30
        # one rounding to bf16; the exponential is off by 3e-6
        torch.testing.assert_close(got.double(), nn.functional.silu(gate) * up, rtol=2**-8 + 1e-5, atol=atol)


@needs_kernel
def test_swiglu_takes_gates_of_any_size() -> None:
    """Past 88 the exponential is infinite; the first input is the gate, the second one is up."""
    linear = Linear(32, 32, bias=False).to(BF16).requires_grad_(False)
    linear.weight.copy_(torch.eye(32))
    pack_or_skip(linear)
    x = torch.zeros(13, 32).to(BF16)
    x[:, 0] = torch.tensor([0, 1e-30, 1, -1, 80, -80, -87.5, -88, -89, 1e4, -1e4, 1e38, -1e38])
    x[:, 1] = 2.0
    expected = 2 * nn.functional.silu(x[:, 0].double())
    got = packed_linear(x, linear.weight, gated=True)
    torch.testing.assert_close(got[:, 0].double(), expected, rtol=2**-8, atol=1e-30)
    x[4, 0] = torch.nan
    got = packed_linear(x, linear.weight, gated=True)
    assert got[4].isnan().all() and got[[3, 5]].isfinite().all()


@needs_kernel
@kinds
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(kind: str) -> None:
    linear = packed(kind, 160, 128 if UNITS[kind] == 64 else 96)
    x = torch.randn(130, linear.in_features).to(BF16)
    for product, n_threads in itertools.product((linear, linear.swiglu), (1, 2, 3)):
        torch.set_num_threads(1)
        alone = torch.cat([product(x[i : i + 1]) for i in range(len(x))])  # type: ignore[operator]
        torch.set_num_threads(n_threads)
        for n_rows in ROWS:
            assert product(x[:n_rows]).equal(alone[:n_rows])  # type: ignore[operator]
            assert product(x[-n_rows:]).equal(alone[-n_rows:])  # type: ignore[operator]


@pytest.mark.parametrize("apart", [0, 8, 104, 128, 928, 1952])
@kinds
def test_where_rows_lie_changes_no_bit(kind: str, apart: int) -> None:
    """Rows of whole lines are read in place, those that begin anywhere or would meet in a cache are put together."""
    n_in = 128 if UNITS[kind] == 64 else 96
    linear, wide = packed(kind, 64, n_in), torch.randn(2, 35, n_in + apart).to(BF16)
    for begin in (0, 7) if apart > 7 else (0,):
        x = wide[..., begin : begin + n_in]
        alone = torch.stack([torch.cat([linear(row.clone()[None]) for row in rows]) for rows in x])
        assert linear(x).equal(alone) and linear(x[:, 2]).equal(alone[:, 2])
    assert linear(x[:0]).shape == (0, 35, 64)
    turned = torch.randn(n_in, 5).to(BF16).T
    assert linear(turned).equal(linear(turned.contiguous()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [*KINDS, "int8 in PyTorch"])
def test_what_is_in_a_row_reaches_no_other(kind: str, bad: float) -> None:
    linear = packed(kind, 64, 64) if kind in KINDS else linear_of("int8", 64, 64)
    x = torch.randn(37, 64).to(BF16)
    clean = linear(x)
    x[[0, 16, 36], 5] = bad
    got = linear(x)
    others = [i for i in range(37) if i not in (0, 16, 36)]
    assert got[others].equal(clean[others])
    assert not got[[0, 16, 36]].isfinite().any()


@pytest.mark.parametrize("packs", [False, True])
@kinds
def test_a_row_of_zeros_gives_zeros_and_no_row_at_all_gives_none(kind: str, packs: bool) -> None:
    linear = packed(kind, 64, 64) if packs else linear_of(kind, 64, 64)
    assert not linear(torch.zeros(3, 64).to(BF16)).any()
    assert linear(torch.zeros(0, 64).to(BF16)).shape == (0, 64)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bf16"])
def test_the_operators_are_what_they_say(kind: str) -> None:
    linear, x = packed(kind, 96, 64), torch.randn(5, 64).to(BF16)
    more = (linear.scale,) if kind == "int8" else (linear.scale, linear.blocks, kind.endswith("rows"))
    for bias, how in ((torch.randn(96).to(BF16), {}), (None, {"gated": True})):
        torch.library.opcheck(torch.ops.gpt_fast_sd.cpu_linear.default, (x, linear.weight, bias, *more), how)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bf16"])
def test_what_is_saved_of_it_is_a_weight_in_the_dtype_it_was_made_from(kind: str, packs: bool) -> None:
    weight = Linear(128, 64).to(BF16).requires_grad_(False)
    linear = Int8Linear(weight.weight, weight.bias) if kind == "int8" else int4_in_blocks(weight)
    stands_for, x = stood_for(linear).to(BF16), torch.randn(3, 128).to(BF16)
    if packs:
        pack_or_skip(linear, few_rows=kind.endswith("rows"))
    before, saved = linear(x), linear.state_dict()
    assert saved.keys() == {"weight", "bias"} and (kind == "int8" or saved["weight"].equal(stands_for))
    torch.testing.assert_close(saved["weight"], stands_for, rtol=2**-7, atol=0.0)  # in bf16, too
    linear.load_state_dict({"weight": torch.zeros(64, 128), "bias": saved["bias"]})
    assert linear(x).equal(linear.bias.expand(3, -1))
    linear.load_state_dict({"weight": weight.weight, "bias": saved["bias"]})
    assert linear(x).equal(before)


# ---- a model of them -------------------------------------------------------------------------------------------------


def model_of(**changes: Any) -> Transformer:
    return tiny_model(tiny_config(**{"dim": 64, "head_dim": 64, "ffn_dim": 96} | changes), dtype=BF16)


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_used_like_the_model_itself(tied: bool, tmp_path: Path) -> None:
    model = model_of(vocab_size=512, tie_embeddings=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(0, 512, (3, 7))
    looked_up = model.embedding(tokens)
    pack_or_skip(model)
    assert (model.output.weight is model.embedding.weight) is tied
    assert not model.output.weight.equal(before["output.weight"])  # another order
    assert model.embedding(tokens).equal(looked_up)
    save_hugging_face(model, tmp_path, dtype=BF16)
    for again in (model, load_model(tmp_path, dtype=BF16)):
        after = again.state_dict()
        assert after.keys() == before.keys() and all(after[name].equal(before[name]) for name in before)
    model.layers[0].attention.wo.weight.zero_()
    model.load_state_dict(before)
    assert all(model.state_dict()[name].equal(value) for name, value in before.items())


@pytest.mark.parametrize(
    ("kind", "n_out", "n_in", "dtype"),
    [
        ("bf16", 64, 40, BF16), ("bf16", 64, 64, torch.float32), ("int8", 64, 96, BF16), ("int8", 48, 64, BF16),
        ("int8", 64, 64, torch.float32), ("int4", 48, 64, BF16), ("int4", 64, 64, torch.float32),
        ("int4", 64, 64, torch.float16),
    ],
)  # fmt: skip
def test_pytorch_multiplies_what_no_kernel_serves(kind: str, n_out: int, n_in: int, dtype: torch.dtype) -> None:
    linear, x = linear_of(kind, n_out, n_in, dtype=dtype), torch.randn(2, n_in).to(dtype)
    own, expected = type(linear), linear(x)
    assert not packing.pack_linears(linear) and type(linear) is own
    assert linear(x).equal(expected) and expected.dtype == dtype


def test_what_is_packed_is_neither_packed_nor_quantized_again_and_inputs_of_96_are_not_summed() -> None:
    linear, other, model = packed("bf16", 64, 64), linear_of("int4", 64, 96), model_of(n_layers=1)
    weight = linear.weight.clone()
    assert not packing.pack_linears(linear) and linear.weight.equal(weight)
    assert packing.pack_linears(other, few_rows=True) and type(other) is packing.PackedInt4Linear
    pack_or_skip(model)
    with pytest.raises(ValueError, match="packed"):
        tiny_engine(model=model, compile=True, quantize="int8")


@pytest.mark.parametrize("decodes", few([False, True], [False]))
def test_a_compiled_engine_packs_and_says_what_an_eager_one_says(decodes: bool, request: pytest.FixtureRequest) -> None:
    """Without Inductor, if it is not to decode as well."""
    if not decodes:
        request.getfixturevalue("traced")
    prompts, model = [random_ids(n, seed=n) for n in (40, 1, 7)], model_of(n_layers=1)
    expected = tiny_engine(model=model).logits(prompts[0])
    compiled = tiny_engine(model=model, compile=True)
    assert {type(m).__name__ for m in model.modules()} >= {"PackedLinear"}
    # bf16 activations are rounded at other places
    torch.testing.assert_close(compiled.logits(prompts[0]), expected, rtol=0.05, atol=0.2)
    if decodes:
        assert len(list(compiled.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True)))) == 3


def test_a_weight_that_two_models_share_is_packed_once() -> None:
    one, other = model_of(n_layers=1), model_of(n_layers=1)
    other.embedding.weight, other.output.weight = one.embedding.weight, one.output.weight
    x, tokens = torch.randn(3, 64).to(BF16), torch.arange(9)
    product, looked_up = one.output(x), one.embedding(tokens)
    pack_or_skip(one)
    packing.pack_linears(other)
    for model in (one, other):
        torch.testing.assert_close(model.output(x), product, rtol=2**-7, atol=1e-3)
        assert model.embedding(tokens).equal(looked_up)


@pytest.mark.parametrize("few_rows", [True, False])
def test_a_weight_that_two_models_share_is_read_as_it_was_packed(few_rows: bool) -> None:
    """int4 is packed in one of two orders; what was asked for last once decided how all of them were read."""
    one = int4_in_blocks(Linear(128, 64, bias=False).to(BF16).requires_grad_(False))
    other, x = copy.copy(one), torch.randn(3, 128).to(BF16)
    expected = one(x)
    pack_or_skip(nn.Sequential(one), few_rows=few_rows)
    packing.pack_linears(nn.Sequential(other), few_rows=not few_rows)
    assert other(x).equal(one(x))
    torch.testing.assert_close(other(x), expected, rtol=2**-6, atol=1e-2)


@kinds
def test_another_dtype_is_refused(kind: str) -> None:
    linear = packed(kind, 64, 64)
    with pytest.raises(TypeError, match=r"packed weights multiply bf16, got torch\.float32"):
        linear(torch.randn(2, 64))
    if kind == "bf16":
        with pytest.raises(TypeError, match=r"got torch\.float32"):
            linear.float()(torch.randn(2, 64))
    if kind == "int4":
        with pytest.raises(TypeError, match=r"packed int4 weights have fp16 blocks, got torch\.float32 \(64, 2, 2\)"):
            packed_linear(torch.randn(2, 64).to(BF16), linear.weight, None, linear.scale, linear.blocks.float())


@pytest.mark.parametrize(("kind", "shape"), [("bf16", (1, 64)), ("bf16", (3, 2, 160)), ("int4", (4, 64))])
def test_rows_of_another_width_are_refused(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="packed weights of 128 inputs need rows of 128 numbers, got"):
        packed(kind, 32, 128)(torch.zeros(shape, dtype=BF16))
