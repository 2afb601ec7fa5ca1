"""Drafts that read half of an int8 cache change nothing of what the target says, whose cache is the one of bytes.

Shapes: B slots, T tokens, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams
from gpt_fast_sd.fast.compile import CompiledStep, can_compile
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.loading import MemoryPlan, System
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.quantization.quantize import TAIL
from tests.drafts import PLANES, draft_of
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.test_exact import Watched, covers
from tests.gpt_fast_sd.test_int8_cache import PARAMS, PROMPTS, engine, plain_tokens, tokens
from tests.gpuless.pools import RULES, stand_in
from tests.helpers import few, random_ids, tiny_config, tiny_model

SELF = ["quantized", "streaming x planes", "snapkv x planes", "quest x planes", "guided x planes"]


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANES)
def test_drafts_of_half_a_cache_give_what_plain_decoding_with_bytes_gives(name: str) -> None:
    one = engine(name)
    assert one.cache.format.planes and tokens(one) == plain_tokens() and max(one.stats.rounds_by_gamma) == 4
    assert one.stats.accepted > 0


@pytest.mark.parametrize("name", few(PLANES, ["quantized", "hierarchy x planes"]))
def test_exact_drafts_of_half_a_cache_give_the_same_bits(name: str) -> None:
    one = Watched(name, dtype="bf16", kv_dtype="int8")
    plain = one.run(PROMPTS, PARAMS, speculate=False)
    assert covers(one.run(PROMPTS, PARAMS), plain)
    # without drafts, in a cache of bytes
    assert covers(Watched("off", dtype="bf16", kv_dtype="int8").run(PROMPTS, PARAMS), plain)


def test_drafts_read_half_of_a_cache_and_not_all_of_it() -> None:
    """Else all of them would be accepted: the target itself drafts, and it reads every token."""
    one = engine("quantized")
    said = tokens(one)
    assert said == plain_tokens() and 0 < one.stats.accepted < one.stats.drafted
    whole = engine("full")
    assert tokens(whole) == said and whole.stats.accepted == whole.stats.drafted
    assert one.stats.kv_bytes_per_token < 0.9 * whole.stats.kv_bytes_per_token


def test_a_text_within_the_tail_is_drafted_as_the_target_says_it() -> None:
    """All of it is read whole."""
    one = engine("quantized")
    prompt, length = random_ids(5, seed=3), TAIL - 20
    done = one.generate([prompt], SamplingParams(max_tokens=length))[0]
    assert len(done.tokens) == length and one.stats.accepted == one.stats.drafted > 0


@pytest.mark.parametrize("name", ["quantized", "streaming x planes"])
def test_sampled_text_is_the_same_alone_and_beside_others(name: str) -> None:
    one = engine(name)
    params = [SamplingParams(max_tokens=n, temperature=0.8, seed=n) for n in (14, 9, 12)]
    together = [c.tokens for c in one.generate(PROMPTS, params)]
    for i in (0, 2):
        assert one.generate([PROMPTS[i]], params[i])[0].tokens == together[i]


def test_planes_and_bytes_hold_the_same_prompt_and_give_the_same_logits() -> None:
    ids = random_ids(300)
    assert torch.equal(engine("quantized").logits(ids), engine().logits(ids))


@pytest.mark.parametrize("rule", RULES[:1])
@pytest.mark.parametrize("name", few(SELF, ["quantized", "snapkv x planes"]))
def test_captured_rounds_draft_from_planes(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_tokens()
    gc.collect()
    monkeypatch.setitem(TRAITS, "cpu", dataclasses.replace(TRAITS["cpu"], captures=True))
    with stand_in(rule):
        one = engine(name)
        assert tokens(one) == expected and one.schedule.rounds.captured > 0
        one.close()


# ---- what slots hold -------------------------------------------------------------------------------------------------


def test_a_prompt_that_shares_its_beginning_copies_planes() -> None:
    document = random_ids(2 * SPLIT + 9, seed=7)
    first, second = [*document, 1, 2, 3], [*document, 9, 8, 7, 6]
    sharing, alone = engine("quantized"), engine("quantized")
    sharing.generate([first], SamplingParams(max_tokens=3))
    got = sharing.generate([second], SamplingParams(max_tokens=20))[0]
    assert got.tokens == alone.generate([second], SamplingParams(max_tokens=20))[0].tokens
    assert sharing.stats.prefill_tokens < alone.stats.prefill_tokens


@pytest.mark.parametrize("name", PLANES)
def test_nothing_behind_a_text_is_read_of_any_plane(name: str) -> None:
    one = engine(name)
    place, feed = torch.arange(one.cache.layers[0].k.shape[2]), one.schedule.rounds.feed
    poisoned = []

    def poison(fed: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        behind = (place > one.cache.seq_len[:, None])[:, None]  # [B, 1, S], drafts of the round among them
        for buffer in one.cache.buffers:
            bad = math.nan if buffer.dtype == torch.float16 else 0
            buffer.masked_fill_(behind if buffer.dim() == 3 else behind[..., None], bad)
        poisoned.append(int(behind.sum()))
        return feed(fed, n_keys)

    one.schedule.rounds.feed = poison  # type: ignore[method-assign]
    assert tokens(one) == plain_tokens() and min(poisoned) > 0


def test_a_cache_of_planes_is_planned_with_the_bytes_of_one_without() -> None:
    def plan(name: str) -> MemoryPlan:
        return MemoryPlan.of(
            System(config=EngineConfig(kv_dtype="int8"), draft=draft_of(name), model=tiny_config(), dtype=torch.float32)
        )

    assert plan("quantized").kv == plan("full").kv
    one = engine("quantized")
    assert sum(x.nbytes for x in one.cache.buffers) == one._plan.kv


def test_an_engine_with_planes_takes_drafts_that_read_them_whole_and_back() -> None:
    one = engine("quantized")
    for name in ("full", "guided", "lookup", "off", "quest x planes", "standalone"):
        draft = draft_of(name, 4)
        one.redraft(draft, tiny_model(seed=0).bfloat16().float() if draft.draft_model else None)
        assert tokens(one) == plain_tokens()
        assert name != "full" or one.stats.accepted == one.stats.drafted


def test_planes_are_put_together_in_the_plan_of_drafts_that_do_not_ask_for_them() -> None:
    """They stay: any draft that follows reads them."""
    one, of_bytes = engine("quantized"), engine("full")
    one.redraft(draft_of("full", 4))
    assert one._plan.workspace > of_bytes._plan.workspace and one._plan.kv == of_bytes._plan.kv


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"policy": "streaming", "kv_bits": n}, f"kv_bits must be 4, got {n!r}") for n in (8, 2, 0, "4")),
        ({"kv_bits": 4}, "kv_bits 4 is for drafts from the target's own cache, which policy 'off' does not read"),
        ({"policy": "lookup", "kv_bits": 4}, "which policy 'lookup' does not read"),
        ({"policy": "standalone", "draft_model": "m", "kv_bits": 4}, "which policy 'standalone' does not read"),
        ({"policy": "quantized", "view": "streaming"}, "view is for .* policy 'quantized' is its own view"),
    ],
    ids=str,
)
def test_a_draft_that_cannot_read_half_a_cache_is_refused_by_a_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        DraftConfig(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv_dtype", [None, "bf16"])
@pytest.mark.parametrize(("name", "asked"), [("quantized", "policy 'quantized'"), ("quest x planes", "kv_bits 4")])
def test_half_of_another_cache_than_int8_is_refused(name: str, asked: str, kv_dtype: str | None) -> None:
    said = f"{asked} reads half of an int8 cache: it needs kv_dtype 'int8', got {kv_dtype!r}"
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        engine(name, kv_dtype=kv_dtype)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["quantized", "hierarchy x planes", "early_exit x planes"])
def test_a_switch_from_bytes_to_planes_is_refused_and_changes_nothing(name: str) -> None:
    one = engine("streaming")
    with pytest.raises(ValueError, match=r"cache does not lie in planes, .* build an engine with .* such a draft"):
        one.redraft(draft_of(name, 4))
    assert one.draft.policy == "streaming" and tokens(one) == plain_tokens()


@pytest.mark.parametrize("head_dim", [8, 80])
def test_heads_of_any_even_size_lie_in_planes_on_a_cpu(head_dim: int) -> None:
    config = tiny_config(head_dim=head_dim)
    plain = engine(model=tiny_model(config)).generate([PROMPTS[0]], SamplingParams(max_tokens=12))
    drafted = engine("quantized", model=tiny_model(config)).generate([PROMPTS[0]], SamplingParams(max_tokens=12))
    assert plain[0].tokens == drafted[0].tokens


# ---- compiled, and as on CUDA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(SELF, ["quest x planes"]))
def test_compiled_steps_are_traced_once_over_planes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled steps run, but for the code generator."""
    monkeypatch.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: graph)
    one = engine(name, compile=True)
    assert tokens(one) == plain_tokens()
    assert one.stats.recompiles == 0 and one.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["quantized", "guided x planes", "quest x planes"])
def test_compiled_steps_draft_from_planes(name: str, dtype: torch.dtype) -> None:
    """In fp32 in PyTorch, in bf16 with heads of 64 in C++ where the CPU has it."""
    with warnings.catch_warnings(record=True):
        if not can_compile(torch.device("cpu")):
            pytest.skip("there is no C++ compiler")
    config = tiny_config(dim=64, n_heads=2, n_kv_heads=1, head_dim=64) if dtype == torch.bfloat16 else tiny_config()
    one = engine(name, model=tiny_model(config, dtype=dtype), compile=True, exact=dtype == torch.bfloat16)
    plain = tokens(one, speculate=False)
    assert tokens(one) == plain and one.stats.recompiles == 0 and one.stats.accepted > 0


@pytest.mark.parametrize("name", few(SELF, ["guided x planes"]))
def test_the_operators_of_cuda_draft_from_planes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    references.as_on_cuda(monkeypatch)
    one = engine(name)
    assert tokens(one) == plain_tokens() and one.stats.accepted > 0
