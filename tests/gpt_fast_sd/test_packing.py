"""Products with packed weights against fp64: right for any number of rows, and a row's bits depend only on itself.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast import packed_swiglu
from gpt_fast_sd.fast.cpu import build
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.cpu.packing import pack_linears
from gpt_fast_sd.model import Transformer, load_model, save_hugging_face
from gpt_fast_sd.quantization.table import int4_in_blocks
from tests.helpers import few, random_ids, tiny_config, tiny_model

BF16 = torch.bfloat16
ROWS = [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 130]


def packed(n_out: int, n_in: int, *, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor | None]:
    """A packed product, and its weight and bias in fp64."""
    linear = Linear(n_in, n_out, bias=bias).to(BF16).requires_grad_(False)
    weight, plus = linear.weight.double(), linear.bias.double() if bias else None
    if not pack_linears(linear):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    return linear, weight, plus


@pytest.fixture
def threads() -> Iterator[None]:
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.mark.parametrize(("n_out", "n_in"), [(32, 32), (96, 64), (64, 576), (1056, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_fp64_for_any_number_of_rows(n_out: int, n_in: int, bias: bool) -> None:
    linear, weight, plus = packed(n_out, n_in, bias=bias)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16)
        expected = nn.functional.linear(x.double(), weight, plus)
        got = linear(x)
        assert got.dtype == BF16 and got.is_contiguous()
        # one rounding to bf16, and fp32 sums of n_in products that may cancel
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-5 * n_in**0.5)


@pytest.mark.parametrize(("n_out", "n_in"), [(32, 32), (96, 64), (192, 576)])
def test_swiglu_is_that_of_fp64_for_any_number_of_rows(n_out: int, n_in: int) -> None:
    linear, weight, _ = packed(n_out, n_in)
    for n_rows in ROWS:
        x = torch.randn(n_rows, n_in).to(BF16) * 3
        gate, up = nn.functional.linear(x.double(), weight).unflatten(-1, (-1, 2)).unbind(-1)
        got = packed_swiglu(x, linear.weight)
        assert got.dtype == BF16 and got.is_contiguous()
        torch.testing.assert_close(got.double(), nn.functional.silu(gate) * up, rtol=2**-8, atol=3e-5 * n_in**0.5)


def test_swiglu_takes_gates_of_any_size() -> None:
    """Past 88 the exponential is infinite; the first input is the gate, the second one is up."""
    linear = Linear(32, 32, bias=False).to(BF16).requires_grad_(False)
    linear.weight.copy_(torch.eye(32))
    if not pack_linears(linear):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    x = torch.zeros(13, 32).to(BF16)
    x[:, 0] = torch.tensor([0, 1e-30, 1, -1, 80, -80, -87.5, -88, -89, 1e4, -1e4, 1e38, -1e38])
    x[:, 1] = 2.0
    expected = 2 * nn.functional.silu(x[:, 0].double())
    torch.testing.assert_close(packed_swiglu(x, linear.weight)[:, 0].double(), expected, rtol=2**-8, atol=1e-35)
    x[4, 0] = torch.nan
    got = packed_swiglu(x, linear.weight)
    assert got[4].isnan().all() and got[[3, 5]].isfinite().all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_row_is_bit_identical_in_any_batch_and_on_any_number_of_threads(n_threads: int) -> None:
    linear, *_ = packed(160, 96)
    x = torch.randn(130, 96).to(BF16)
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    torch.set_num_threads(n_threads)
    for n_rows in ROWS:
        assert linear(x[:n_rows]).equal(alone[:n_rows])
        assert linear(x[-n_rows:]).equal(alone[-n_rows:])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_row_of_swiglu_is_bit_identical_in_any_batch_and_on_any_number_of_threads(n_threads: int) -> None:
    linear, *_ = packed(160, 96)
    x = torch.randn(130, 96).to(BF16)
    torch.set_num_threads(1)
    alone = torch.cat([packed_swiglu(x[i : i + 1], linear.weight) for i in range(len(x))])
    torch.set_num_threads(n_threads)
    for n_rows in ROWS:
        assert packed_swiglu(x[-n_rows:], linear.weight).equal(alone[-n_rows:])


@pytest.mark.parametrize("apart", [96, 104, 200, 224, 1024, 2048])
def test_where_rows_lie_changes_no_bit(apart: int) -> None:
    """Rows of whole lines are read in place, those that begin anywhere or would meet in a cache are put together."""
    linear, *_ = packed(64, 96)
    wide = torch.randn(70, apart).to(BF16)
    for begin in (0, 7) if apart > 103 else (0,):
        x = wide[:, begin : begin + 96]
        assert linear(x).equal(torch.cat([linear(row.clone()[None]) for row in x]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_in_a_row_reaches_no_other(bad: float) -> None:
    linear, *_ = packed(64, 64)
    x = torch.randn(37, 64).to(BF16)
    clean = linear(x)
    x[[0, 16, 36]] = bad
    got = linear(x)
    others = [i for i in range(37) if i not in (0, 16, 36)]
    assert got[others].equal(clean[others])
    assert not got[0].isfinite().any()


def test_rows_may_lie_apart_and_in_any_number_of_dimensions() -> None:
    linear, *_ = packed(64, 96)
    wide = torch.randn(2, 5, 200).to(BF16)
    x = wide[..., 7:103]  # rows 200 apart that begin anywhere
    expected = linear(x.clone())
    assert linear(x).equal(expected) and expected.shape == (2, 5, 64)
    assert linear(x[:, 2]).equal(expected[:, 2])
    turned = torch.randn(96, 5).to(BF16).T
    assert linear(turned).equal(linear(turned.contiguous()))
    assert linear(x[:0]).shape == (0, 5, 64)


def model_of(**changes: object) -> Transformer:
    config = tiny_config(**{"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ffn_dim": 96, **changes})
    return tiny_model(config).to(BF16).eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_used_like_the_model_itself(tied: bool, tmp_path: Path) -> None:
    model = model_of(vocab_size=512, tie_embeddings=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(0, 512, (3, 7))
    looked_up = model.embedding(tokens)
    if not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    assert (model.output.weight is model.embedding.weight) is tied
    assert not model.output.weight.equal(before["output.weight"])  # another order
    assert model.embedding(tokens).equal(looked_up)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(after[name].equal(before[name]) for name in before)
    save_hugging_face(model, tmp_path, dtype=BF16)
    again = load_model(tmp_path, dtype=BF16)
    assert all(again.state_dict()[name].equal(before[name]) for name in before)


def test_what_the_kernel_does_not_serve_is_left_as_it_is() -> None:
    assert not pack_linears(model_of().float())
    odd = Linear(40, 64, bias=False).to(BF16)
    assert not pack_linears(odd) and type(odd) is Linear


def test_packing_twice_packs_once() -> None:
    linear, *_ = packed(64, 64)
    weight = linear.weight.clone()
    assert not pack_linears(linear) and linear.weight.equal(weight)


@pytest.mark.parametrize("decodes", few([False, True], [False]))
def test_a_compiled_engine_packs_and_says_what_an_eager_one_says(decodes: bool) -> None:
    config = EngineConfig(batch_size=3, max_seq_len=300, device="cpu")
    prompts = [random_ids(n, seed=n) for n in (40, 1, 7)]
    how = SamplingParams(max_tokens=6, ignore_eos=True)
    model = model_of(n_layers=1)
    eager = Engine(model, None, EngineConfig(batch_size=3, max_seq_len=300, device="cpu", compile=False))
    expected = eager.logits(prompts[0])
    compiled = Engine(model, None, config)
    assert {type(m).__name__ for m in model.modules()} >= {"PackedLinear"}
    # bf16 activations are rounded at other places
    torch.testing.assert_close(compiled.logits(prompts[0]), expected, rtol=0.05, atol=0.2)
    if decodes:
        assert len(list(compiled.generate(prompts, how))) == 3


def test_quantizing_packed_weights_is_refused() -> None:
    model = model_of(n_layers=1)
    if not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    with pytest.raises(ValueError, match="packed"):
        Engine(model, None, EngineConfig(batch_size=1, max_seq_len=300, device="cpu", quantize="int8"))


def test_a_weight_that_two_models_share_is_packed_once() -> None:
    one, other = model_of(n_layers=1), model_of(n_layers=1)
    other.embedding.weight, other.output.weight = one.embedding.weight, one.output.weight
    x, tokens = torch.randn(3, 64).to(BF16), torch.arange(9)
    product, looked_up = one.output(x), one.embedding(tokens)
    if not pack_linears(one):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    pack_linears(other)
    for model in (one, other):
        torch.testing.assert_close(model.output(x), product, rtol=2**-7, atol=1e-3)
        assert model.embedding(tokens).equal(looked_up)


@pytest.mark.parametrize("few_rows", [True, False])
def test_a_weight_that_two_models_share_is_read_as_it_was_packed(few_rows: bool) -> None:
    """int4 is packed in one of two orders; what was asked for last once decided how all of them were read."""
    one = int4_in_blocks(Linear(128, 64, bias=False).to(BF16).requires_grad_(False))
    other, x = copy.copy(one), torch.randn(3, 128).to(BF16)
    expected = one(x)
    if not pack_linears(nn.Sequential(one), few_rows=few_rows):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    pack_linears(nn.Sequential(other), few_rows=not few_rows)
    assert other(x).equal(one(x))
    torch.testing.assert_close(other(x), expected, rtol=2**-6, atol=1e-2)


def test_what_was_saved_can_be_loaded_again() -> None:
    model = model_of(n_layers=1)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    if not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    with torch.no_grad():
        model.layers[0].attention.wo.weight.zero_()
    model.load_state_dict(saved)
    assert all(model.state_dict()[name].equal(value) for name, value in saved.items())


def test_another_dtype_is_refused() -> None:
    linear, *_ = packed(64, 64)
    with pytest.raises(TypeError, match=r"multiply bf16, got torch\.float32"):
        linear(torch.randn(2, 64))
    with pytest.raises(TypeError, match=r"got torch\.float32"):
        linear.float()(torch.randn(2, 64))


def test_a_process_that_may_not_use_tiles_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    build.library.cache_clear()
    cpu_linear.kernel_for.cache_clear()
    try:
        linear, weight, _ = packed(96, 64)
        for n_rows in ROWS:
            x = torch.randn(n_rows, 64).to(BF16)
            torch.testing.assert_close(linear(x).double(), x.double() @ weight.T, rtol=2**-8, atol=1e-4)
    finally:
        build.library.cache_clear()
        cpu_linear.kernel_for.cache_clear()


@pytest.mark.parametrize("shape", [(1, 64), (4, 64), (3, 2, 160)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    linear, *_ = packed(32, 128)
    with pytest.raises(ValueError, match="packed weights of 128 inputs need rows of 128 numbers, got"):
        linear(torch.zeros(shape, dtype=BF16))
