"""A KV cache of int8 is another target, and drafts that read all or half of it change none of its tokens.

Shapes: B slots, T tokens, V vocabulary, gamma tokens drafted a round.
"""

import copy
import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.kv import DenseKV
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import FORMATS, SPLIT, KVCache, Transformer, load_model, load_tokenizer, read_config
from gpt_fast_sd.quantization import quantize
from gpt_fast_sd.quantization.quantize import TAIL
from tests.drafts import MIXTURES, PLANES, POLICIES, draft_of, given
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.gpt_fast_sd.test_exact import Watched, covers
from tests.gpuless.pools import RULES
from tests.helpers import ahead, few, form_of, pack_or_skip, random_ids, tiny_config, tiny_engine, tiny_model

PROMPTS = [random_ids(n, seed=n) for n in (150, 3, 257)]  # more than slots, over the end of a chunk
PARAMS = [SamplingParams(max_tokens=n) for n in (14, 9, 12)]
HALF = ["quantized", *(f"{view} x planes" for view in ("streaming", "snapkv", "quest", "guided"))]


def engine(name: str = "off", gamma: int | str = 4, *, model: Transformer | None = None, **changes: Any) -> Engine:
    """An eager engine of 2 slots with an int8 cache around the tiny model, with that policy."""
    draft = draft_of(name, gamma)
    # the same weights but for the last digits: a draft model whose drafts are often right
    theirs = given(name, tiny_model(seed=0).bfloat16().float()) if draft.draft_model else None
    return tiny_engine(draft, theirs, model=model, **{"max_seq_len": 640, "kv_dtype": "int8"} | changes)


@functools.cache
def plain_tokens(kv_dtype: str = "int8") -> list[list[int]]:
    """What plain decoding makes of PROMPTS."""
    found = tokens(engine(kv_dtype=kv_dtype))
    assert len({token for row in found for token in row}) > 10  # the model is not stuck on a token
    return found


def tokens(one: Engine, **how: Any) -> list[list[int]]:
    return tokens_of(one.generate(PROMPTS, PARAMS, **how))


# ---- lossless --------------------------------------------------------------------------------------------------------

EVERYWHERE = {  # who drafts where: eagerly, in captured rounds, in compiled steps as traced, by the operators of CUDA
    "eager": [*POLICIES, *MIXTURES, *PLANES],
    "captured": ["streaming", "quest", "snapkv", *HALF],
    "traced": ["streaming", "snapkv", "quest", "guided", *HALF],
    "by operators of CUDA": HALF,
}
SOON = {
    "eager": ["streaming", "snapkv", "lookup", "hierarchy over standalone", "hierarchy, guided", "past its positions",
              *PLANES],
    "captured": ["quest", "quantized", "snapkv x planes"],
    "traced": ["quest x planes"],
    "by operators of CUDA": ["guided x planes"],
}  # fmt: skip


@pytest.fixture
def rule() -> str:
    """Of captures: that of the oldest torch, as the tests of graphs are of the newest in the ordinary run."""
    return RULES[0]


@pytest.mark.parametrize(
    ("where", "name"),
    few([(where, name) for where, names in EVERYWHERE.items() for name in names],
        [(where, name) for where, names in SOON.items() for name in names]),
)  # fmt: skip
def test_speculation_with_an_int8_cache_gives_what_plain_decoding_gives(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    expected = plain_tokens()
    if where == "by operators of CUDA":
        references.as_on_cuda(monkeypatch)
    elif where != "eager":
        request.getfixturevalue({"captured": "cuda"}.get(where, where))
    with engine(name, compile=where == "traced") as one:
        assert tokens(one) == expected and max(one.stats.rounds_by_gamma) == 4
        assert one.stats.accepted > 0 or name == "lookup"
        assert one.cache.format.planes is (name in PLANES)
        assert one.stats.recompiles == 0 and (one.schedule.rounds.captured > 0) is (where == "captured")


@pytest.mark.parametrize(
    "name",
    few([*(name for name in POLICIES if " over " not in name), *PLANES],
        ["guided", "standalone", "hierarchy", "quantized", "hierarchy x planes"]),
)  # fmt: skip
def test_exact_speculation_with_an_int8_cache_gives_the_same_bits(name: str) -> None:
    one = Watched(name, dtype="bf16", kv_dtype="int8")
    plain = one.run(PROMPTS, PARAMS, speculate=False)
    assert covers(one.run(PROMPTS, PARAMS), plain)
    assert one.engine.cache.layers[0].k.dtype == (torch.uint8 if name in PLANES else torch.int8)
    if name in PLANES:  # without drafts, in a cache of bytes
        assert covers(Watched("off", dtype="bf16", kv_dtype="int8").run(PROMPTS, PARAMS), plain)
    if name == "standalone":  # the draft model's is like it
        own: KVCache = one.engine.policy.runner.cache  # type: ignore[union-attr]
        assert own.format == one.engine.cache.format and own.layers[0].k_scale is not None


def test_drafts_read_half_of_a_cache_but_for_its_tail() -> None:
    """Else all of them would be accepted: the target itself drafts, and it reads every token."""
    one, whole, length = engine("quantized"), engine("full"), TAIL - 20
    assert tokens(one) == tokens(whole) and 0 < one.stats.accepted < one.stats.drafted
    assert whole.stats.accepted == whole.stats.drafted
    assert one.stats.kv_bytes_per_token < 0.9 * whole.stats.kv_bytes_per_token
    done = one.generate([random_ids(5, seed=3)], SamplingParams(max_tokens=length))[0]
    assert len(done.tokens) == length and one.stats.accepted == one.stats.drafted > 0


# ---- what slots hold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    few(["off", "full", "streaming", "snapkv", "quest", "guided", "hierarchy", *PLANES],
        ["off", "quest", "hierarchy", *PLANES]),
)  # fmt: skip
def test_nothing_behind_a_text_is_read_neither_numbers_nor_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(name)
    place, poisoned = torch.arange(one.cache.layers[0].k.shape[2]), list[int]()
    bad = {torch.float16: math.nan, torch.int8: -128, torch.uint8: 0}

    def poison(fed: Tensor, n_keys: int) -> None:
        behind = (place > one.cache.seq_len[:, None])[:, None]  # [B, 1, S], drafts of the round among them
        for buffer in one.cache.buffers:
            buffer.masked_fill_(behind if buffer.dim() == 3 else behind[..., None], bad[buffer.dtype])
        poisoned.append(int(behind.sum()))

    ahead(monkeypatch, one.schedule.rounds, "feed", poison)
    assert tokens(one) == plain_tokens() and min(poisoned) > 0


def test_an_engine_with_planes_has_the_bytes_of_one_without_and_takes_drafts_that_read_them_whole_and_back() -> None:
    """To put planes together is planned for, as they stay when the draft changes."""
    one, of_bytes = engine("quantized"), engine("full")
    assert sum(x.nbytes for x in one.cache.buffers) == one._plan.kv == of_bytes._plan.kv
    for name in ("full", "guided", "lookup", "off", "quest x planes", "standalone"):
        draft = draft_of(name, 4)
        one.redraft(draft, tiny_model(seed=0).bfloat16().float() if draft.draft_model else None)
        assert tokens(one) == plain_tokens()
        if name == "full":
            assert one._plan.workspace > of_bytes._plan.workspace and one._plan.kv == of_bytes._plan.kv
            assert one.stats.accepted == one.stats.drafted


# ---- quality, and keys with outliers ---------------------------------------------------------------------------------


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
    logits = {dtype: cached_logits(model, ids, dtype)[511:-1] for dtype in (torch.float32, torch.int8)}
    said = torch.tensor(ids[512:])
    nll = {dtype: float(torch.nn.functional.cross_entropy(x, said)) for dtype, x in logits.items()}
    assert abs(math.exp(nll[torch.int8] - nll[torch.float32]) - 1) < 3e-3
    assert (logits[torch.int8].argmax(-1) == logits[torch.float32].argmax(-1)).float().mean() >= 0.985


def qwen2(bias: float = 0, dtype: torch.dtype = torch.float32, *, queries: float = 0.01, **changes: Any) -> Transformer:
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


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "precision"),
    [*itertools.product((1, 2, 4), (torch.float32, torch.bfloat16), [None]), (2, torch.bfloat16, "int8")],
)
def test_equalization_changes_no_bit(kv_heads: int, dtype: torch.dtype, precision: str | None) -> None:
    """Scales of int8 weights carry the factors: once the numbers themselves were divided, and rounded away."""
    ids = random_ids(400)
    one, other = (qwen2(300.0, dtype, n_kv_heads=kv_heads) for _ in range(2))
    for model in (one, other) if precision else ():
        quantize.quantize(model, precision)
    quantize.equalize_keys(other)
    assert torch.equal(cached_logits(one, ids, dtype), cached_logits(other, ids, dtype))
    mine, theirs = (model.layers[0].attention.wqkv for model in (one, other))
    assert torch.equal(mine.weight, theirs.weight) is (precision is not None)
    assert not precision or not torch.equal(mine.scale, theirs.scale)
    weights = [p.clone() for p in other.parameters()]
    quantize.equalize_keys(other)  # for another engine
    assert all(map(torch.equal, other.parameters(), weights))


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
    pack_or_skip(model)
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
        one = engine(model=qwen2(bias))  # which equalizes its model
        assert (one.logits(ids) - truth).norm() < 0.05 * truth.norm()
        scales = [layer.k_scale for layer in one.cache.layers if layer.k_scale is not None]
        assert len(scales) == 2 and max(float(x.float().amax()) for x in scales) < 300 / 127
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
    assert (engine(model=model, kv_dtype=kv_dtype).logits(ids, last=20) - truth).norm() < error * truth.norm()


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


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False, "qk_norm": True}], ids=str)
def test_models_without_such_biases_are_left_alone(changes: dict[str, Any]) -> None:
    model, before = (tiny_model(tiny_config(**changes)) for _ in range(2))
    quantize.equalize_keys(model)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quantized", "hierarchy x planes", "early_exit x planes"])
def test_a_switch_from_bytes_to_planes_is_refused_and_changes_nothing(name: str) -> None:
    one = engine("streaming")
    with pytest.raises(ValueError, match=r"cache does not lie in planes, .* build an engine with .* such a draft"):
        one.redraft(draft_of(name, 4))
    assert one.draft.policy == "streaming" and tokens(one) == plain_tokens()


@pytest.mark.parametrize("head_dim", [8, 80])
def test_heads_of_any_size_have_an_int8_cache_on_a_cpu(head_dim: int) -> None:
    model = tiny_model(tiny_config(head_dim=head_dim))
    plain, *drafted = (tokens(engine(name, 3, model=model)) for name in ("off", "streaming", "quantized"))
    assert drafted == [plain] * 2
