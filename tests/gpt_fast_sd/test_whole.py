"""Steps that run all layers in one call of C++: what PyTorch computes of the same weights, row by row, bit by bit.

Shapes: B rows, T tokens, L layers, K kv heads, C listed entries.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.fast.cpu.fused_layers import FusedLayers, fuses
from gpt_fast_sd.fast.cpu.packing import pack_linears
from gpt_fast_sd.kv import DenseKV, ListedKV
from gpt_fast_sd.model import FORMATS, SPLIT, Attention, KVCache, RopeScaling, Transformer, as_int8, as_planes
from gpt_fast_sd.quantization.quantize import quantize
from gpt_fast_sd.steps import Runner
from tests.drafts import draft_of
from tests.gpt_fast_sd.fast.test_cpu import body, needs_kernel  # noqa: F401  needs_kernel asks for body
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.gpt_fast_sd.test_exact import PARAMS, PROMPTS, Watched, covers
from tests.helpers import few, random_ids, thinned, tiny_config, tiny_engine, tiny_model

BF16 = torch.bfloat16
CPU = torch.device("cpu")
CONFIG = tiny_config(vocab_size=256, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=256)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "tied": {"tie_embeddings": True}, "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True}, "one kv head": {"n_kv_heads": 1}, "80 dims": {"head_dim": 80},
    "llama3": {"rope_scaling": LLAMA3}, "biases": {"qkv_bias": True, "o_bias": True},
    "qwen3 with biases": {"qk_norm": True, "qkv_bias": True, "o_bias": True},
    "windows": {"sliding_window": 70, "full_layers": (1,)},
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=256)},
}  # fmt: skip
CACHES = "bf16", "int8", "planes"
ENDS = (5, 300, 690)  # of the rows


def model_of(name: str, weights: str = "bf16", **changes: Any) -> Transformer:
    """A model in bf16, packed, whose norms, biases and vocabulary are not the usual ones."""
    model = tiny_model(replace(CONFIG, **MODELS[name], **changes))
    generator = torch.Generator().manual_seed(1)
    for place, parameter in model.named_parameters():
        if parameter.dim() == 1:
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.data = noise + 0.5 if "norm" in place else noise - 0.5
        parameter.data = parameter.data.to(BF16)
    if weights != "bf16":
        quantize(model, weights.removesuffix(" for few rows"))
    pack_linears(model, few_rows=weights.endswith("rows"))
    return model.requires_grad_(False)


class Fused:
    """A model whose layers run in one call."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.layers = model, FusedLayers(model)

    def __call__(self, tokens: Tensor, pos: Tensor, kv: Any) -> Tensor:
        """tokens, pos [B, T] -> logits [B, T, V]"""
        return self.model.output(self.layers(self.model, tokens, pos, kv))


class Ways:
    """A filled cache, and steps over it; each step begins with a copy of the cache."""

    bodies = CORE  # of what attends

    def __init__(self, model: Transformer, cache: str = "bf16", *, tail: int = 0) -> None:
        self.model, self.tail = model, tail
        self.cache = KVCache(model.config, len(ENDS), 3 * SPLIT, format=FORMATS[cache], device=CPU)
        ids = torch.tensor([random_ids(700, seed=row) for row in range(len(ENDS))])
        model.hidden(ids, torch.arange(700).expand(len(ENDS), -1), DenseKV(self.cache.layers, torch.empty(3, 0)))

    def tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """n tokens of each row, and where they stand."""
        ids = torch.tensor([random_ids(n, seed=10 + row) for row in range(len(ENDS))])
        return ids, torch.tensor(ENDS)[:, None] + torch.arange(n)

    def step(
        self, model: Transformer | Fused, n: int, *, page: int = 0, listed: bool = False, rows: slice = slice(None)
    ) -> tuple[Tensor, KVCache, list[Tensor]]:
        """-> logits [B, n, V], the cache after them, and the attention mass of each layer."""
        cache = copy.deepcopy(self.cache.with_tail(self.tail) if self.tail else self.cache)
        layers = [x._of(part[rows] for part in x.buffers) for x in cache.layers]
        tokens, pos = (x[rows] for x in self.tokens(n))
        if not listed:
            kv: Any = DenseKV(layers, torch.empty(3, 0), page, bodies=self.bodies)
        else:
            generator, shape = torch.Generator().manual_seed(2), (len(ENDS), layers[0].k.shape[1], 690)
            lists = [torch.rand(shape, generator=generator).argsort(-1)[rows, :, :48].clone() for _ in layers]
            lists[0][0, 0, 7:] = -1
            start = (torch.tensor(ENDS) - 60).clamp(min=0)[rows]
            kv = ListedKV(layers, torch.empty(3, 0), lists, start.contiguous(), 80, bodies=self.bodies)
        return model(tokens, pos, kv).float(), cache, getattr(kv, "mass", [])


@pytest.fixture
def by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps attend with the same kernels."""
    monkeypatch.setattr(Ways, "bodies", Bodies(dense=stand_ins.dense, listed=stand_ins.listed))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def off(got: Tensor, truth: Tensor) -> float:
    """The error as a share of what it is an error of."""
    return float((got.double() - truth.double()).norm() / truth.double().norm())


STEPS: list[dict[str, Any]] = [
    {"n": 1}, {"n": 5}, {"n": 5, "page": 16}, {"n": 2, "page": 64}, {"n": 1, "listed": True}, {"n": 3, "listed": True},
    {"n": 40},
]  # fmt: skip


@needs_kernel
@thinned("name,cache", [*MODELS], [*CACHES])
def test_it_is_the_model(by_operators: None, name: str, cache: str) -> None:
    """Of the same operators called one by one it differs in what the sums of norms and the angles are rounded to."""
    model = model_of(name)
    ways, whole = Ways(model, cache), Fused(model)
    assert fuses(model, ways.cache)
    for how in STEPS:
        expected, stored, mass = ways.step(model, **how)
        got, kept, own = ways.step(whole, **how)
        assert got.shape == expected.shape and off(got, expected) < 0.02, how
        written = torch.arange(len(ENDS))[:, None], slice(None), ways.tokens(how["n"])[1]
        for a, b, before in zip(kept.buffers, stored.buffers, ways.cache.buffers, strict=True):
            new, expected = a[written], b[written]
            if a.dtype == torch.uint8:  # of two nibbles: a number beside a step of the upper one has others in both
                assert (new != expected).double().mean() < 0.2, how
            else:
                assert off(new, expected) < 0.02, how
            a[written] = b[written] = before[written]
            assert torch.equal(a, before) and torch.equal(b, before), "nothing else is written"
        assert len(own) == len(mass) == (model.config.n_layers if how.get("page") else 0)
        for a, b in zip(own, mass, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@needs_kernel
@pytest.mark.parametrize(
    ("weights", "cache", "tail"),
    [("int8", "bf16", 0), ("int4", "bf16", 0), ("int4 for few rows", "bf16", 0), ("bf16", "planes", 64)],
)
def test_so_it_is_with_quantized_weights_and_over_the_upper_plane_and_a_tail(
    by_operators: None, weights: str, cache: str, tail: int
) -> None:
    model = model_of("qwen2", weights)
    ways, whole = Ways(model, cache, tail=tail), Fused(model)
    for how in STEPS[:2] + STEPS[4:6]:
        assert off(ways.step(whole, **how)[0], ways.step(model, **how)[0]) < 0.02
    if tail:  # otherwise nothing is shown
        assert off(Ways(model, cache).step(whole, 1)[0], ways.step(whole, 1)[0]) > 0.001


@needs_kernel
@pytest.mark.parametrize("cache", CACHES)
def test_a_tokens_bits_depend_on_its_row_alone(cache: str) -> None:
    """Neither on how many tokens are fed together, nor on other rows, nor on threads: so drafts are judged exactly."""
    model = model_of("qwen2")
    ways, whole = Ways(model, cache), Fused(model)
    together = ways.step(whole, 20)[0]
    for n in (1, 2, 5, 17):
        assert torch.equal(ways.step(whole, n)[0], together[:, :n])
        assert torch.equal(ways.step(whole, n, page=16)[0], together[:, :n]), "summing mass changes nothing"
    for row in range(len(ENDS)):
        assert torch.equal(ways.step(whole, 5, rows=slice(row, row + 1))[0], together[row : row + 1, :5])
    for n_threads, n in itertools.product((2, 3), (1, 2, 20)):
        torch.set_num_threads(n_threads)
        assert torch.equal(ways.step(whole, n)[0], together[:, :n])


@needs_kernel
def test_what_is_in_view_past_a_row_and_rows_that_idle_change_no_bit() -> None:
    """Also where the keys of a row are cut into several splits."""
    model = model_of("llama", n_layers=1)
    cache = KVCache(model.config, 3, 24 * SPLIT, format=FORMATS["bf16"], device=CPU)
    generator, whole = torch.Generator().manual_seed(3), Fused(model)
    for x in cache.buffers:
        x.copy_(torch.randn(x.shape, generator=generator))
    tokens, found = torch.tensor([[5], [6], [7]]), list[Tensor]()
    for pos, splits in (([5000, 40, 4100], 20), ([5000, 40, 4100], 24), ([5000, 24 * SPLIT, 4100], 21)):
        found.append(whole(tokens, torch.tensor(pos)[:, None], DenseKV(cache.layers, torch.empty(splits, 0))))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][[0, 2]], found[2][[0, 2]]) and found[2].isfinite().all()
    alone = DenseKV(list(cache.slot(2)), torch.empty(17, 0))
    assert torch.equal(whole(tokens[2:], torch.tensor([[4100]]), alone), found[0][2:])


@needs_kernel
@pytest.mark.parametrize("cache", CACHES)
def test_keys_and_values_are_stored_as_the_cache_rounds_them(cache: str) -> None:
    """Embeddings of 1 and -1 leave a norm nothing to round, and position 0 an angle nothing."""
    model = model_of("llama", n_layers=1, norm_eps=1e-30)
    model.embedding.weight.copy_(torch.randn(model.embedding.weight.shape).sign())
    layer = model.layers[0]
    layer.attention_norm.weight.fill_(1.0)
    layer.attention.wqkv.weight[: 2**10].mul_(1e-6)  # scales below fp16's normal numbers
    (held,), tokens = Ways(model, cache).cache.layers, torch.arange(3)[:, None]
    Fused(model)(tokens, torch.zeros(3, 1, dtype=torch.int64), DenseKV([held], torch.empty(2, 0)))
    qkv = layer.attention.wqkv(model.embedding(tokens)).unflatten(-1, (2, -1, 64))  # [3, 1, K, G + 2, H]
    for x, buffer, scales, low in (
        (qkv[:, 0, :, -2], held.k, held.k_scale, held.k_low), (qkv[:, 0, :, -1], held.v, held.v_scale, held.v_low),
    ):  # fmt: skip
        if cache == "bf16":
            assert torch.equal(buffer[:, :, 0], x)
            continue
        numbers, scale = as_int8(x)
        assert scales is not None and torch.equal(scales[:, :, 0], scale)
        found, meant = ([buffer], [numbers]) if low is None else ([buffer, low], as_planes(numbers))
        assert all(torch.equal(a[:, :, 0], b) for a, b in zip(found, meant, strict=True))


@needs_kernel
def test_a_row_that_is_not_a_number_is_alone_with_it() -> None:
    model = model_of("tied")
    ways, whole = Ways(model, "int8"), Fused(model)
    good = ways.step(whole, 1)[0]
    spoilt = copy.deepcopy(model)
    spoilt.norm.weight.fill_(float("nan"))
    assert ways.step(Fused(spoilt), 1)[0].isnan().all()
    ways.cache.layers[1].v_scale[1] = float("nan")  # type: ignore[index]
    got = ways.step(whole, 1)[0]
    assert got[1].isnan().all() and torch.equal(got[[0, 2]], good[[0, 2]])


@needs_kernel
def test_what_does_not_exist_is_refused_before_anything_is_stored() -> None:
    model = model_of("llama")
    ways, whole = Ways(model), Fused(model)
    before = [x.clone() for x in ways.cache.buffers]
    for token, pos, said in ((256, 0, "token"), (-1, 0, "token"), (0, 4 * SPLIT, "position"), (0, -1, "position")):
        tokens, at = torch.tensor([[0], [token], [0]]), torch.tensor([[0], [pos], [0]])
        with pytest.raises(IndexError, match=f"a {said} is not among the {256 if said == 'token' else 4 * SPLIT}"):
            whole(tokens, at, DenseKV(ways.cache.layers, torch.empty(2, 0)))
    assert all(map(torch.equal, ways.cache.buffers, before))


@needs_kernel
def test_weights_may_move_and_change() -> None:
    model = model_of("llama")
    ways, whole = Ways(model), Fused(model)
    first = ways.step(whole, 1)[0]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(ways.step(whole, 1)[0], first)
    model.layers[1].attention.wo.weight.zero_()
    assert not torch.equal(ways.step(whole, 1)[0], first)
    assert torch.equal(ways.step(whole, 1)[0], ways.step(Fused(model), 1)[0])


def patched(module: Any, name: str = "forward") -> None:
    vars(module)[name] = lambda x, *_: x


CHANGES: dict[str, Callable[[Transformer], object]] = {
    "frequencies of 16 bits": lambda m: setattr(m, "rope_freqs", m.rope_freqs.to(BF16)),
    "another attention": lambda m: setattr(m.layers[2].attention, "__class__", type("Capped", (Attention,), {})),
    "a norm with an eps of its own": lambda m: setattr(m.layers[0].ffn_norm, "eps", 1e-3),
    "another norm": lambda m: m.layers[0].set_submodule("ffn_norm", torch.nn.LayerNorm(64, dtype=BF16)),
    "a hook": lambda m: m.layers[1].register_forward_hook(lambda *_: None),
    "another way through a model": lambda m: patched(m, "hidden"),
    "another way through a block": lambda m: patched(m.layers[0]),
    "another way through a norm": lambda m: patched(m.layers[0].ffn_norm),
    "another way through an embedding": lambda m: patched(m.embedding),
}


@needs_kernel
def test_what_it_does_not_serve_is_compiled() -> None:
    def cache_of(model: Transformer, form: str = "bf16") -> KVCache:
        return KVCache(model.config, 1, SPLIT, format=FORMATS[form], device=CPU)

    model = model_of("llama")
    assert fuses(model, cache_of(model)) and not fuses(model, cache_of(model, "fp32"))
    for what, change in CHANGES.items():
        changed = model_of("llama")
        change(changed)
        assert not fuses(changed, cache_of(changed)), what
    with register_module_forward_hook(lambda *_: None):
        assert not fuses(model, cache_of(model)), "a hook of all modules"
    derived = cache_of(model)
    derived.format = type("Own", (type(derived.format),), {})("bf16", BF16)
    assert not fuses(model, derived), "a format of somebody's own"
    for head_dim in (8, 24, 100, 272):  # not served by attention, though all products pack
        odd = tiny_model(replace(CONFIG, n_heads=8, n_kv_heads=4, head_dim=head_dim), dtype=BF16)
        assert pack_linears(odd) and not fuses(odd, cache_of(odd))
    plain = tiny_model(CONFIG, dtype=BF16)
    assert not fuses(plain, cache_of(plain)), "weights that are not packed"
    for what in ({"vocab_size": 258}, {"mlp_bias": True}):  # a head that is not, biases between gates and ups
        other = tiny_model(replace(CONFIG, **what), dtype=BF16)
        assert pack_linears(other) and not fuses(other, cache_of(other)), what
    assert not Runner(plain, cache_of(plain), backend=FastBackend(CPU, {})).bodies.fused


@needs_kernel
def test_weights_that_the_kernel_would_misread_are_refused() -> None:
    ways, narrow = Ways(model_of("qwen2")), tiny_model(replace(CONFIG, ffn_dim=64), dtype=BF16)
    pack_linears(narrow)
    one, other, third = (model_of("qwen2") for _ in range(3))
    bias, norm = one.layers[1].attention.wqkv.bias, third.layers[2].ffn_norm.weight
    bias.data, norm.data = bias.data.float(), norm.data.float()
    other.layers[1].feed_forward = narrow.layers[1].feed_forward
    for model, error, said in (
        (one, TypeError, r"packed weights have a bf16 bias for each output, got torch\.float32"),
        (other, ValueError, "products of a layer are of"),
        (third, TypeError, "contiguous and bf16"),
    ):
        with pytest.raises(error, match=said):
            ways.step(Fused(model), 1)


@needs_kernel
@pytest.mark.parametrize(
    ("name", "quantize"),
    few([("guided", None), ("quest", None), ("streaming", "int8"), ("streaming", None), ("snapkv", None),
         ("early_exit", None), ("hierarchy", None)],
        [("guided", None), ("streaming", "int8")]),
)  # fmt: skip
def test_in_bf16_speculation_is_plain_decoding_token_for_token(name: str, quantize: str | None) -> None:
    """A step of one token and a verification of several give the same bits, so not even near ties part."""
    model, draft = model_of("tied", max_seq_len=1024), draft_of(name, budget=128, quantize=quantize)
    one = tiny_engine(draft, model=model, batch_size=3, max_seq_len=1024, compile=True)
    assert one.target.bodies.fused and one.schedule.rounds.graphs == 0
    prompts = [random_ids(n, seed=n) for n in (40, 300, 500, 7)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = tokens_of(one.generate(prompts, params, speculate=False))
    assert tokens_of(one.generate(prompts, params)) == plain and one.stats.acceptance_rate > 0


@needs_kernel
@pytest.mark.parametrize("name", few(["streaming", "guided", "lookup", "hierarchy"], {"guided"}))
def test_exact_needs_no_wider_steps(name: str) -> None:
    """Steps have the width that they need, and all bits are the same."""
    one = Watched(name, 3, dtype="bf16", config=CONFIG, compile=True)
    assert one.engine.target.bodies.fused and one.engine.schedule.rounds.width == 0
    assert covers(one.run(PROMPTS, PARAMS), one.run(PROMPTS, PARAMS, speculate=False))
    odd = Watched(name, 3, dtype="bf16", config=replace(CONFIG, vocab_size=258), compile=True)
    rounds = odd.engine.schedule.rounds
    assert not odd.engine.target.bodies.fused and rounds.width == 4, "a library multiplies with the head"
