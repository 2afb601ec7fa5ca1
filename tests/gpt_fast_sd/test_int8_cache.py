"""A KV cache of int8 is another target, and whoever drafts for it changes none of its tokens.

Shapes: B slots, T tokens, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.fast.compile import CompiledStep, can_compile
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.fast.cpu.packing import pack_linears
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.kv import DenseKV
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import FORMATS, SPLIT, KVCache, ModelConfig, Transformer, load_model, load_tokenizer, read_config
from gpt_fast_sd.quantization import quantize
from tests.drafts import MIXTURES, POLICIES, draft_of
from tests.gpt_fast_sd.test_exact import Watched, covers
from tests.gpuless.pools import RULES, stand_in
from tests.helpers import few, form_of, random_ids, tiny_config, tiny_model

PROMPTS = [random_ids(n, seed=n) for n in (150, 3, 257)]  # more than slots, over the end of a chunk
PARAMS = [SamplingParams(max_tokens=n) for n in (14, 9, 12)]


def engine(name: str = "off", gamma: int | str = 4, *, model: Transformer | None = None, **changes: Any) -> Engine:
    """An eager engine of 2 slots with an int8 cache around the tiny model, with that policy."""
    model, draft = model or tiny_model(), draft_of(name, gamma)
    settings = {"batch_size": 2, "max_seq_len": 640, "device": "cpu", "compile": False, "kv_dtype": "int8"} | changes
    # the same weights but for the last digits: a draft model whose drafts are often right
    theirs = tiny_model(seed=0).bfloat16().float() if draft.draft_model else None
    return Engine(model, None, EngineConfig(**settings), draft, theirs)


@functools.cache
def plain_tokens(kv_dtype: str = "int8") -> list[list[int]]:
    """What plain decoding makes of PROMPTS."""
    found = tokens(engine(kv_dtype=kv_dtype))
    assert len({token for row in found for token in row}) > 10  # the model is not stuck on a token
    return found


def tokens(one: Engine, **how: Any) -> list[list[int]]:
    return [completion.tokens for completion in one.generate(PROMPTS, PARAMS, **how)]


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    few([*POLICIES, *MIXTURES], ["streaming", "snapkv", "lookup", "hierarchy over standalone", "hierarchy, guided"]),
)
def test_speculation_with_an_int8_cache_gives_what_plain_decoding_gives(name: str) -> None:
    one = engine(name)
    assert tokens(one) == plain_tokens() and max(one.stats.rounds_by_gamma) == 4
    assert one.stats.accepted > 0 or name == "lookup"


@pytest.mark.parametrize(
    "name", few([name for name in POLICIES if " over " not in name], ["guided", "standalone", "hierarchy"])
)
def test_exact_speculation_with_an_int8_cache_gives_the_same_bits(name: str) -> None:
    one = Watched(name, dtype="bf16", kv_dtype="int8")
    plain = one.run(PROMPTS, PARAMS, speculate=False)
    assert covers(one.run(PROMPTS, PARAMS), plain)
    assert one.engine.cache.layers[0].k.dtype == torch.int8


def test_an_int8_cache_is_another_target_than_a_wide_one() -> None:
    ids = random_ids(300)
    int8, wide = engine().logits(ids), engine(kv_dtype=None).logits(ids)
    # an error of each key and value of up to 1 / 254 of its token's largest, behind sharp scores and two layers
    assert 1e-3 < (int8 - wide).norm() / wide.norm() < 0.1


@pytest.mark.parametrize("name", few(["off", "guided"], ["guided"]))
def test_a_row_says_the_same_alone_and_beside_others(name: str) -> None:
    one = engine(name)
    together = tokens(one)
    for i in (0, 2):
        assert one.generate([PROMPTS[i]], PARAMS[i])[0].tokens == together[i]


@pytest.mark.parametrize("rule", RULES[:1])
@pytest.mark.parametrize("name", few(["streaming", "quest", "snapkv"], ["quest"]))
def test_captured_rounds_draft_with_an_int8_cache(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_tokens()
    gc.collect()
    monkeypatch.setitem(TRAITS, "cpu", dataclasses.replace(TRAITS["cpu"], captures=True))
    with stand_in(rule):
        one = engine(name)
        assert tokens(one) == expected and one.schedule.rounds.captured > 0
        one.close()


@pytest.mark.parametrize(
    "name", ["snapkv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("streaming", "quest", "guided"))]
)
def test_compiled_steps_are_traced_once_with_an_int8_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled steps run, but for the code generator."""
    monkeypatch.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: graph)
    one = engine(name, compile=True)
    assert tokens(one) == plain_tokens()
    assert one.stats.recompiles == 0 and one.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming", "snapkv", "quest", "guided"])
def test_compiled_steps_draft_with_a_quantized_cache(name: str) -> None:
    with warnings.catch_warnings(record=True):
        if not can_compile(torch.device("cpu")):
            pytest.skip("there is no C++ compiler")
    one = engine(name, compile=True)
    assert tokens(one) == plain_tokens()
    assert one.stats.recompiles == 0 and one.stats.accepted > 0


# ---- what slots hold -------------------------------------------------------------------------------------------------


def test_a_prompt_that_shares_its_beginning_copies_numbers_and_scales() -> None:
    document = random_ids(2 * SPLIT + 9, seed=7)
    first, second = [*document, 1, 2, 3], [*document, 9, 8, 7, 6]
    sharing, alone = engine(), engine()
    sharing.generate([first], SamplingParams(max_tokens=3))
    got = sharing.generate([second], SamplingParams(max_tokens=20))[0]
    assert got.tokens == alone.generate([second], SamplingParams(max_tokens=20))[0].tokens
    assert sharing.stats.prefill_tokens < alone.stats.prefill_tokens
    body = second[:-1]
    slots = [max(range(2), key=lambda slot, of=one: of._prefill.reusable(slot, body)) for one in (sharing, alone)]
    for mine, other in zip(sharing.cache.buffers, alone.cache.buffers, strict=True):
        assert torch.equal(mine[slots[0], :, : len(body)], other[slots[1], :, : len(body)])


@pytest.mark.parametrize(
    "name", few(["off", "full", "streaming", "snapkv", "quest", "guided", "hierarchy"], ["off", "quest", "hierarchy"])
)
def test_nothing_behind_a_text_is_read_neither_numbers_nor_scales(name: str) -> None:
    one = engine(name)
    place, feed = torch.arange(one.cache.layers[0].k.shape[2]), one.schedule.rounds.feed
    poisoned = []

    def poison(fed: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        behind = (place > one.cache.seq_len[:, None])[:, None]  # [B, 1, S], drafts of the round among them
        for layer in one.cache.layers:
            for data, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
                assert scale is not None
                data.masked_fill_(behind[..., None], -128)
                scale.masked_fill_(behind, math.nan)
        poisoned.append(int(behind.sum()))
        return feed(fed, n_keys)

    one.schedule.rounds.feed = poison  # type: ignore[method-assign]
    assert tokens(one) == plain_tokens() and min(poisoned) > 0


def test_a_draft_model_has_a_cache_of_int8_too() -> None:
    one = engine("standalone")
    cache: KVCache = one.policy.runner.cache  # type: ignore[union-attr]
    assert cache.layers[0].k.dtype == torch.int8 and cache.layers[0].k_scale is not None


def test_what_is_read_is_counted_in_bytes_of_int8() -> None:
    stats = {}
    for kv_dtype in ("int8", "bf16"):
        one = engine(kv_dtype=kv_dtype)
        tokens(one)
        stats[kv_dtype] = one.stats.kv_bytes_per_token
    assert stats["int8"] / stats["bf16"] == pytest.approx((8 + 2) / 16)  # 8 dimensions a head


# ---- quality ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def cached_logits(
    model: Transformer, ids: list[int], dtype: torch.dtype, fine: bool | None = None, bodies: Bodies = CORE
) -> Tensor:
    """The logits of a text whose keys are stored chunk by chunk: T ids -> [T, V]. fine: see CacheLayer."""
    cache = KVCache(model.config, 1, len(ids), format=form_of(dtype), device=torch.device("cpu"))
    if fine is not None:
        cache.layers = [dataclasses.replace(layer, fine=fine) for layer in cache.layers]
    rows = []
    for start in range(0, len(ids), SPLIT):
        chunk = torch.tensor([ids[start : start + SPLIT]])  # [1, T]
        pos = torch.arange(start, start + chunk.shape[1])[None]
        kv = DenseKV(cache.layers, torch.empty(cache.splits(start + chunk.shape[1]), 0), bodies=bodies)
        rows.append(model(chunk, pos, kv)[0].float())
    return torch.cat(rows)


def test_the_bundled_model_says_nearly_as_much_of_its_document_with_an_int8_cache() -> None:
    """2,048 tokens of the document that ships; the last 1,536 count."""
    tokenizer, model = load_tokenizer(BUNDLED, read_config(BUNDLED)), load_model(BUNDLED, dtype=torch.float32)
    assert tokenizer is not None
    ids = tokenizer.encode((BUNDLED / "document.txt").read_text(encoding="utf-8"))[:2048]
    assert len(ids) == 2048
    logits = {dtype: cached_logits(model, ids, dtype)[511:-1] for dtype in (torch.float32, torch.bfloat16, torch.int8)}
    said = torch.tensor(ids[512:])
    nll = {dtype: float(torch.nn.functional.cross_entropy(x, said)) for dtype, x in logits.items()}
    assert abs(math.exp(nll[torch.int8] - nll[torch.bfloat16]) - 1) < 3e-3
    agreed = (logits[torch.int8].argmax(-1) == logits[torch.float32].argmax(-1)).float().mean()
    assert agreed >= 0.985


# ---- keys with outliers ----------------------------------------------------------------------------------------------


def qwen2(
    bias: float = 0.0, dtype: torch.dtype = torch.float32, *, queries: float = 0.01, **changes: Any
) -> Transformer:
    """Qwen2's shape; a pair of each key head's dimensions has this bias, and its queries are small, as Qwen2's are."""
    shape = {"dim": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "ffn_dim": 192, "qkv_bias": True} | changes
    model = tiny_model(tiny_config(**shape))
    group, head_dim = model.config.group_size, model.config.head_dim
    for layer in model.layers if bias else ():
        parts = layer.attention.wqkv.weight.data.unflatten(0, (-1, group + 2, head_dim))  # type: ignore[operator, union-attr]
        biases = layer.attention.wqkv.bias.data.unflatten(0, (-1, group + 2, head_dim))  # type: ignore[operator, union-attr]
        for dim in (3, 3 + head_dim // 2):
            biases[:, group, dim] = bias
            biases[:, :group, dim] *= queries
            parts[:, :group, dim] *= queries
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equalization_changes_no_bit(kv_heads: int, dtype: torch.dtype) -> None:
    ids = random_ids(400)
    one, other = (qwen2(300.0, dtype, n_kv_heads=kv_heads) for _ in range(2))
    quantize.equalize_keys(other)
    assert torch.equal(cached_logits(one, ids, dtype), cached_logits(other, ids, dtype))
    assert not torch.equal(one.layers[0].attention.wqkv.weight, other.layers[0].attention.wqkv.weight)  # type: ignore[union-attr, arg-type]
    weights = [p.clone() for p in other.parameters()]
    quantize.equalize_keys(other)  # for another engine
    assert all(map(torch.equal, other.parameters(), weights))


def test_equalization_changes_no_bit_of_a_model_with_int8_weights() -> None:
    """Their scales carry the factors: once the numbers themselves were divided, and rounded away."""
    ids, (one, other) = random_ids(400), [qwen2(300.0, torch.bfloat16) for _ in range(2)]
    for model in (one, other):
        quantize.quantize(model, "int8")
    quantize.equalize_keys(other)
    assert torch.equal(cached_logits(one, ids, torch.bfloat16), cached_logits(other, ids, torch.bfloat16))
    wqkv = [model.layers[0].attention.wqkv for model in (one, other)]  # type: ignore[union-attr]
    assert torch.equal(wqkv[0].weight, wqkv[1].weight) and not torch.equal(wqkv[0].scale, wqkv[1].scale)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_second_engine_over_a_model_finds_its_keys_even(precision: str | None) -> None:
    """Once quantized weights took the place of those that were marked: what the first engine held was another's."""
    model, ids = qwen2(), random_ids(100)
    for layer in model.layers:
        bias = layer.attention.wqkv.bias.data  # type: ignore[union-attr]
        bias.copy_((1.5 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(1))).exp())
    first = engine(model=model, quantize=precision)
    said, before = first.logits(ids), [p.clone() for p in model.parameters()]
    engine(model=model, quantize=precision)
    assert all(map(torch.equal, model.parameters(), before))
    assert first.logits(ids).equal(said)


def test_a_copy_of_a_packed_model_is_not_taken_for_a_plain_one() -> None:
    """Once it was: a copied parameter has no marks, and its packed bytes were scaled as if they were rows."""
    model = qwen2(300.0, torch.bfloat16, dim=64, n_heads=2, n_kv_heads=1, head_dim=32, ffn_dim=128, vocab_size=512)
    quantize.equalize_keys(model)
    if not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    other = copy.deepcopy(model)
    for layer in other.layers:
        layer.attention.keys_are_even = False
    quantize.equalize_keys(other)
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_keys_with_a_large_bias_are_stored_as_well_as_others_once_they_are_equalized() -> None:
    ids, errors = random_ids(300), {}
    for bias in (0.0, 300.0):
        model = qwen2(bias)
        truth = cached_logits(model, ids, torch.float32)
        for equalized in (False, True):
            if equalized:
                quantize.equalize_keys(model)
            off = cached_logits(model, ids, torch.int8) - truth
            errors[bias, equalized] = float(off.norm() / (truth - truth.mean(-1, keepdim=True)).norm())
    assert errors[300.0, False] > 0.3
    assert errors[300.0, True] < 0.05 and errors[300.0, True] < 2 * errors[0.0, True]


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.05), ("fp16", 0.01)])
def test_keys_that_leave_most_dimensions_unused_are_stored_as_well_as_others(kv_dtype: str, error: float) -> None:
    """Once the others were divided by 2 ** 24: no cache held anything of them, and queries overflowed in fp16."""
    model, ids = qwen2(), random_ids(200)
    group, used = model.config.group_size, 20
    for layer in model.layers:
        for x in (layer.attention.wqkv.weight, layer.attention.wqkv.bias):  # type: ignore[union-attr]
            x.data.unflatten(0, (-1, group + 2, 2, 32))[:, group, :, used // 2 :] = 0  # type: ignore[operator]
    truth = cached_logits(model, ids, torch.float32)[-20:]
    off = engine(model=model, kv_dtype=kv_dtype).logits(ids, last=20) - truth
    assert off.norm() < error * truth.norm()


def test_an_engine_equalizes_its_models_and_says_what_they_said_before() -> None:
    ids = random_ids(200)
    model = qwen2(300.0)
    truth = cached_logits(qwen2(300.0), ids, torch.float32)[-1]
    one = engine(model=model)
    keys = (
        buffer.float().abs().amax() for buffer in (layer.k_scale for layer in one.cache.layers) if buffer is not None
    )
    off = one.logits(ids, last=1)[0] - truth
    assert off.norm() < 0.05 * truth.norm() and max(map(float, keys)) < 300 / 127


def test_queries_of_biased_keys_have_two_bytes_where_others_have_one() -> None:
    """What equalized keys lose in size their queries gain: in 8 bits these would cost more than the cache does."""
    if cpu.source_for(64, torch.bfloat16, FORMATS["int8"]) != cpu.SOURCE:  # that for any CPU keeps queries as they are
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    ids, model = random_ids(300), qwen2(300.0, torch.bfloat16)
    truth = cached_logits(qwen2(300.0), ids, torch.float32)
    quantize.equalize_keys(model)

    def off(fine: bool | None = None, *, in_cpp: bool = True) -> float:
        bodies = Bodies(dense=stand_ins.dense) if in_cpp else CORE
        got = cached_logits(model, ids, torch.int8, fine, bodies) - truth
        return float(got.norm() / (truth - truth.mean(-1, keepdim=True)).norm())

    eager = off(in_cpp=False)  # PyTorch has the queries as they are
    assert off() == off(True) < 1.1 * eager and off(False) > off(True)
    assert KVCache(tiny_config(), 1, 300, format=FORMATS["int8"], device=torch.device("cpu")).layers[0].fine is False


@pytest.mark.slow
def test_compiled_steps_of_a_model_with_biased_keys_draft_with_an_int8_cache() -> None:
    """Once this was refused on a CPU."""
    model = qwen2(300.0, torch.bfloat16, vocab_size=512)
    one = engine("streaming", model=model, compile=True)
    assert len(tokens(one)[0]) == 14 and one.stats.recompiles == 0 and one.stats.accepted > 0


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False, "qk_norm": True}], ids=str)
def test_models_without_such_biases_are_left_alone(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model, before = tiny_model(config), tiny_model(config)
    quantize.equalize_keys(model)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_int8_cache_under_a_model_in_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_dtype 'int8' is not for models in fp16.* use dtype 'bf16'") as caught:
        engine(model=tiny_model(dtype=torch.float16))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head_dim", [8, 80])
def test_heads_of_any_size_have_an_int8_cache_on_a_cpu(head_dim: int) -> None:
    config: ModelConfig = tiny_config(head_dim=head_dim)
    plain = engine(model=tiny_model(config)).generate([PROMPTS[0]], SamplingParams(max_tokens=12))
    drafted = Engine(
        tiny_model(config), None,
        EngineConfig(batch_size=1, max_seq_len=640, device="cpu", compile=False, kv_dtype="int8"),
        DraftConfig(policy="streaming", budget=24, gamma=3),
    ).generate([PROMPTS[0]], SamplingParams(max_tokens=12))  # fmt: skip
    assert plain[0].tokens == drafted[0].tokens
