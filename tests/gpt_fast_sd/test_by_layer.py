"""A step compiled for one layer gives what the step over all layers gives, however many there are."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # sizes are marked from then on
from torch import Tensor

import gpt_fast_sd.loading.prepare
from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.draft import draft_step
from gpt_fast_sd.fast.compile import CompiledStep
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.model import FORMATS, KVCache, Transformer
from gpt_fast_sd.model.llama import Block
from gpt_fast_sd.policies import build_policy
from gpt_fast_sd.prefill import prefill_step
from gpt_fast_sd.quantization.quantize import quantize
from gpt_fast_sd.round import decode_step
from gpt_fast_sd.steps import Runner, Step, size_carrier, varying
from tests.gpt_fast_sd.fast.references import as_on_cuda
from tests.helpers import Patch, ahead, few, random_ids, tiny_config, tiny_engine, tiny_model

SLOTS, CAPACITY = 2, 600
CPU = torch.device("cpu")
Parts = list[torch.fx.GraphModule]


def filled_cache(model: Transformer) -> KVCache:
    cache = KVCache(model.config, SLOTS, CAPACITY, format=FORMATS["fp32"], device=CPU)
    generator = torch.Generator().manual_seed(1)
    for buffer in cache.buffers:
        buffer.normal_(generator=generator)
    return cache


def tokens_at(start: int, n: int, slots: int = SLOTS) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([random_ids(n, seed=slot) for slot in range(slots)])
    return tokens, torch.arange(start, start + n).expand(slots, -1).clone()


def arguments(name: str, model: Transformer, cache: KVCache) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of the engine, with its arguments."""
    kind, _, detail = name.partition(" ")
    if kind == "prefill":
        return prefill_step, (model, *tokens_at(256, 256, 1), cache.slot(1), size_carrier(cache, 512))
    if kind == "draft":
        policy: Any = build_policy(DraftConfig(policy=detail, budget=64, gamma=3), Runner(model, cache), None)
        for slot in range(SLOTS):
            policy.host_admit(slot, random_ids(400, seed=slot))
        return draft_step, (model, *tokens_at(399, 1), cache.layers, size_carrier(cache, 400), *policy.view.kv())
    n, page = (1, 0) if kind == "decode" else (4, 16 if detail else 0)
    tokens, pos = tokens_at(300, n)
    if n > 1:
        varying(tokens, pos)
    return decode_step, (model, tokens, pos, cache.layers, size_carrier(cache, 400), page)


STEPS = ("decode", "verify", "verify mass", "prefill", "draft full", "draft streaming", "draft quest", "draft guided")


def check_equal(name: str, model: Transformer, tolerance: float = 1e-4) -> Step:
    results = []
    with torch.inference_mode():
        for compiled in (False, True):
            cache = filled_cache(model)
            step, args = arguments(name, model, cache)
            one = CompiledStep(step) if compiled else Step(step)
            out = one(*args)
            outs = out if isinstance(out, tuple) else (out,)
            results.append((*(x for x in outs if x is not None), *cache.buffers))
    for expected, got in zip(*results, strict=True):
        assert expected.shape == got.shape
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    return one


FAMILIES: list[dict[str, Any]] = [{"qkv_bias": True}, {"qk_norm": True}, {"tie_embeddings": True}]
MODELS = [*((name, {}) for name in STEPS), *((name, {"n_layers": 1}) for name in ("decode", "prefill"))]
MODELS += [(name, changes) for name in ("decode", "prefill") for changes in FAMILIES]


@pytest.mark.parametrize(
    ("name", "changes"),
    few(MODELS, [("decode", {"n_layers": 1}), *((name, {}) for name in ("verify mass", "prefill", "draft guided")),
                 *((name, {"tie_embeddings": True}) for name in ("decode", "prefill"))]),
)  # fmt: skip
def test_a_step_gives_what_the_step_over_all_layers_gives(name: str, changes: dict[str, Any], traced: Parts) -> None:
    model = tiny_model(tiny_config(**{"n_layers": 3} | changes))
    assert check_equal(name, model).graphs == 1
    # before the layers, one of them, after them; of a prompt nothing comes after, but the last layer does less
    assert len(traced) == (2 if (name, model.config.n_layers) == ("prefill", 1) else 3)
    if (name, changes) == ("decode", {"tie_embeddings": True}):  # quantized weights are those of each layer, too
        quantize(model, "int8")
        check_equal(name, model, tolerance=1e-3)


@pytest.mark.parametrize("full_layers", [(), (1,)])
def test_where_windows_differ_a_step_is_compiled_for_all_layers(full_layers: tuple[int, ...], traced: Parts) -> None:
    model = tiny_model(tiny_config(n_layers=3, sliding_window=20, full_layers=full_layers))
    assert check_equal("verify mass", model).graphs == 1 and len(traced) == (1 if full_layers else 3)


class Times(torch.nn.Module):
    """A norm by a tensor that is no parameter of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.__dict__["by"] = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.by.shape, self.by, 1e-5)


class ByOne(torch.nn.Linear):
    """A Linear with a number beside its weight, as a float8 one has."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.T.shape, bias=False)
        self.weight.data = weight
        self.register_buffer("one", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.one


def test_a_size_comes_with_the_cache(traced: Parts) -> None:
    """Inductor finds what it has built by the shapes of inputs: a longer cache must be among those that differ."""
    model = tiny_model(tiny_config(n_layers=3))
    for layer in model.layers:
        layer.attention.wqkv = ByOne(layer.attention.wqkv.weight.data)
    check_equal("verify mass", model)
    for part in traced:
        given = [node.meta["example_value"] for node in part.graph.nodes if node.op == "placeholder"]
        long = [x for x in given if isinstance(x, Tensor) and x.dim() == 4 and x.shape[2] >= CAPACITY]
        assert long or not any(isinstance(x, torch.SymInt) for x in given)


class TwoResults(torch.nn.Module):
    """A norm that gives its input in fp32, too, or that keeps it to itself."""

    def __init__(self, size: int, *, both: bool = True) -> None:
        super().__init__()
        self.both = both
        self.weight = torch.nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        wide = x.float() * 0.5
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight
        return (wide, normed) if self.both else normed


@pytest.mark.parametrize("what", ["a bias", "a weight", "two results", "a weight of nobody", "a layer's weight"])
def test_norms_that_are_not_the_same_are_taken_for_what_they_are(what: str, traced: Parts, monkeypatch: Patch) -> None:
    """Of layers and behind them: what only one has, or what others read, was that of the first layer in each."""
    model = tiny_model(tiny_config(n_layers=3))
    size, shared = model.config.dim, torch.rand(model.config.dim)
    of_layer, last = {
        "a bias": (lambda: torch.nn.LayerNorm(size), torch.nn.LayerNorm(size, bias=False)),
        "a weight": (lambda: torch.nn.RMSNorm(size), torch.nn.RMSNorm(size, elementwise_affine=False)),
        "two results": (lambda: TwoResults(size), TwoResults(size, both=False)),
        "a weight of nobody": (lambda: Times(shared), Times(shared)),
        "a layer's weight": (lambda: torch.nn.RMSNorm(size), torch.nn.RMSNorm(size)),
    }[what]
    for layer in model.layers:
        layer.attention_norm = of_layer()
        for parameter in layer.attention_norm.parameters():
            torch.nn.init.uniform_(parameter)
    model.norm = last
    if what == "a layer's weight":
        model.layers[0].ffn_norm.weight = last.weight
    if what == "two results":

        def forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, kv: Any) -> Tensor:
            wide, normed = self.attention_norm(x)
            x = wide + self.attention(normed, cos, sin, pos, kv)
            return x + self.feed_forward(self.ffn_norm(x))

        monkeypatch.setattr(Block, "forward", forward)
    model.requires_grad_(False)
    for name in ("decode", "prefill"):
        check_equal(name, model)


def test_engines_of_few_and_many_layers_compile_as_many_nodes(traced: Parts, monkeypatch: Patch) -> None:
    """What compiling takes, without a clock: it was minutes for 32 layers, and is as long as for two."""
    monkeypatch.setattr(gpt_fast_sd.loading.prepare, "can_compile", lambda device: True)
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cuda"], captures=False))
    as_on_cuda(monkeypatch)
    found = []
    for n_layers in (2, 32):
        model, draft = tiny_model(tiny_config(n_layers=n_layers)), DraftConfig(policy="guided", budget=48, gamma=3)
        one = tiny_engine(draft, model=model, max_seq_len=300, compile=True)
        one.warm_up()
        n_nodes = sum(node.op.startswith("call") for part in traced for node in part.graph.nodes)
        found.append((one.schedule.graphs, len(traced), n_nodes))
        traced.clear()
    assert found[0] == found[1]
    graphs, n_parts, n_nodes = found[1]
    # a prefill, decoding, verification, a draft step; a choice; judging of none and of three drafts
    assert graphs <= 7 and n_parts <= 15 and n_nodes <= 700


@pytest.mark.parametrize("what", ["strides", "dtype", "shape"])
def test_a_model_whose_layers_differ_is_refused(what: str, traced: Parts) -> None:
    """Code for the first layer would misread the weights of the others."""
    model = tiny_model(tiny_config(n_layers=3))
    owner: Any = model.layers[2].attention.wo if what == "strides" else model.layers[2].attention_norm
    weight = owner.weight.data
    other = {"strides": weight.t().contiguous().t(), "dtype": weight.double(), "shape": weight[:1].clone()}[what]
    owner.weight = torch.nn.Parameter(other, requires_grad=False)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"^layer 2 differs from the first one in the shapes"):
        step, args = arguments("decode", model, filled_cache(model))
        CompiledStep(step)(*args)


def test_a_step_serves_one_model_after_another_and_weights_that_take_the_place_of_others(traced: Parts) -> None:
    """The layers of the call count, not those of the first one."""
    model, other, step = tiny_model(), tiny_model(seed=1), CompiledStep(decode_step)
    args = (*tokens_at(300, 1), filled_cache(model).layers, size_carrier(filled_cache(model), 400), 0)
    with torch.inference_mode():
        for one in (model, other):
            expected = decode_step(one, *args)[0]
            torch.testing.assert_close(step(one, *args)[0], expected, atol=1e-4, rtol=1e-4)
        model.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(step(model, *args)[0], expected, atol=1e-4, rtol=1e-4)


def test_steps_are_warmed_up_with_the_most_drafts_first(monkeypatch: Patch) -> None:
    """What serves several widths is built for the first that it meets."""
    one, seen = tiny_engine(DraftConfig(policy="streaming", budget=24)), list[int]()
    ahead(monkeypatch, one.schedule.rounds, "feed", lambda tokens, n_keys: seen.append(tokens.shape[1]))
    one.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert seen[0] == max(seen) == 9


def test_an_engine_that_is_gone_leaves_nothing_behind(traced: Parts, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpt_fast_sd.loading.prepare, "can_compile", lambda device: True)
    one = tiny_engine(DraftConfig(policy="streaming", budget=24, gamma=2), compile=True)
    one.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    left = [weakref.ref(x) for x in (one.model.layers[0].attention.wqkv.weight, one.cache.layers[0].k, one.policy)]
    del one
    gc.collect()
    assert [x() is None for x in left] == [True] * 3


@pytest.mark.parametrize("cheap", ["lookup", "standalone"])
def test_timing_steps_leaves_the_prompts_alone_that_slots_hold(cheap: str) -> None:
    one, prompt, params = tiny_engine(batch_size=1, max_seq_len=900), random_ids(600), SamplingParams(max_tokens=9)
    expected = one.generate([prompt], params)[0].tokens
    before = [buffer[:, :, :599].clone() for buffer in one.cache.buffers]
    theirs = tiny_model(tiny_config(n_layers=1), seed=1) if cheap == "standalone" else None
    draft = DraftConfig(policy="hierarchy", budget=24, cheap=cheap, draft_model="given" if theirs else None)
    one.redraft(draft, theirs)  # its steps write further than it drafts
    one.warm_up()
    assert all(torch.equal(a, b[:, :, :599]) for a, b in zip(before, one.cache.buffers, strict=True))
    assert one.generate([prompt], params)[0].tokens == expected and one.stats.prefill_tokens == 0
