"""The engine: an output depends on the prompt alone, whatever shares its batch; and every refusal comes first.

Shapes: B slots, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import SPLIT, ModelConfig, save_hugging_face
from gpt_fast_sd.serving.requests import TokenEvent
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.helpers import ByteTokenizer, few, random_ids, tiny_config, tiny_model, whole_text_logits

LENGTHS = [1, 2, 700, 3, 255, 256, 257, 10, 511, 512, 513, 7, 90]
PROMPTS = [random_ids(n, seed=n + i) for i, n in enumerate(LENGTHS)]
SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 1.5, "min_p": 0.05},
]


def engine(config: ModelConfig | None = None, *, tokenizer: Any = None, draft: Any = None, **changes: Any) -> Engine:
    """An eager engine of 4 slots around the tiny model."""
    wanted: dict[str, Any] = {"batch_size": 4, "max_seq_len": 768, "device": "cpu", "compile": False} | changes
    return Engine(tiny_model(config), tokenizer, EngineConfig(**wanted), draft)


def slow_greedy(prompt: list[int], n: int) -> list[int]:
    """n greedy tokens, the whole text run again for each."""
    model, ids = tiny_model(), list(prompt)
    for _ in range(n):
        ids.append(int(whole_text_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


# ---- what is no prompt -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", [[True, 2], b"ab", bytearray(b"ab"), {1: 2}, {1, 2}, [1.0], [None], 7, None, torch.ones(2, 3).long()]
)
def test_what_is_no_list_of_ids_is_refused_in_one_line(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt 0 must be a text or a list of whole token ids, got ") as caught:
        engine().generate([prompt])
    assert "\n" not in str(caught.value)


def test_ids_may_come_in_anything_that_has_them_in_order() -> None:
    one, ids = engine(), [3, 1, 4]
    params = SamplingParams(max_tokens=2)
    expected = tokens_of(one.generate([ids], params))
    for given in (tuple(ids), torch.tensor(ids), np.array(ids), range(3, 4)):
        got = tokens_of(one.generate([given], params))
        assert got == expected or list(given) == [3]


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 3}, [5]])
def test_what_are_no_sampling_parameters_are_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="SamplingParams"):
        engine().generate([[1, 2]], params)


@pytest.mark.parametrize("last", ["x", 1.5, True, 0, 4])
def test_how_many_logits_is_a_whole_number_of_them(last: Any) -> None:
    with pytest.raises(ValueError, match="last must be from 1 to the 3 tokens given, got"):
        engine().logits([1, 2, 3], last=last)


# ---- what the caller sets --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unusual_settings() -> Iterator[None]:
    """All that a caller may have set for work of its own."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def are_unusual() -> bool:
    return (torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")) == (
        torch.float64, torch.device("meta"), True,
    )  # fmt: skip


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_the_caller_sets_for_other_work_changes_no_token_and_stays_the_callers(compiled: bool) -> None:
    draft, other = DraftConfig(policy="guided", budget=64, gamma=3), DraftConfig(policy="snapkv", budget=96, gamma=2)
    params = [SamplingParams(max_tokens=6, seed=3, **how) for how in SAMPLED]
    prompts, model = PROMPTS[2:7], tiny_model()

    def outputs() -> list[Any]:
        one = Engine(model, None, EngineConfig(batch_size=4, max_seq_len=768, device="cpu", compile=compiled), draft)
        one.warm_up()
        found: list[Any] = [tokens_of(one.generate(prompts, params))]
        one.redraft(other)
        for event in one.stream(prompts, params):
            found.append(event.tokens)
            assert are_unusual() == unusual
        return [*found, one.logits(prompts[1])]

    unusual = False
    expected = outputs()
    unusual = True
    with unusual_settings():
        assert are_unusual()
        got = outputs()
        assert are_unusual()
    assert got[:-1] == expected[:-1] and torch.equal(got[-1], expected[-1])


def test_a_folder_is_read_as_ever_whatever_the_caller_has_set(tmp_path: Path) -> None:
    save_hugging_face(tiny_model(), tmp_path, dtype=torch.float32)
    config = EngineConfig(batch_size=2, max_seq_len=256, device="cpu", compile=False)
    params = SamplingParams(max_tokens=5)
    expected = tokens_of(Engine.from_pretrained(tmp_path, config).generate(PROMPTS[:2], params))
    with unusual_settings():
        assert tokens_of(Engine.from_pretrained(tmp_path, config).generate(PROMPTS[:2], params)) == expected


# ---- what shares the batch -----------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_the_whole_text_run_again() -> None:
    prompts = [PROMPTS[i] for i in (0, 1, 3, 5, 6)]
    completions = engine().generate(prompts, SamplingParams(max_tokens=8))
    assert tokens_of(completions) == [slow_greedy(prompt, 8) for prompt in prompts]
    assert len({token for c in completions for token in c.tokens}) > 15  # the model is not stuck on a token


@pytest.mark.parametrize("sampled", few([False, True], [True]))
def test_a_mixed_batch_gives_each_prompt_the_tokens_it_gets_alone(sampled: bool) -> None:
    params = [
        SamplingParams(max_tokens=3 + 5 * i % 11, seed=100 + i, **(SAMPLED[i % len(SAMPLED)] if sampled else {}))
        for i in range(len(PROMPTS))
    ]
    many, one = engine(), engine(batch_size=1)
    together = many.generate(PROMPTS, params)
    assert [len(c.tokens) for c in together] == [p.max_tokens for p in params]
    for got, prompt, wanted in zip(together, PROMPTS, params, strict=True):
        assert one.generate([prompt], wanted)[0].tokens == got.tokens
        assert many.generate([prompt], wanted)[0].tokens == got.tokens


def test_completions_come_in_the_order_of_the_prompts_whichever_finishes_first() -> None:
    one = engine(batch_size=2)
    params = [SamplingParams(max_tokens=n) for n in (30, 1, 2, 12, 1)]
    completions = one.generate(PROMPTS[:5], params)
    assert [(c.index, len(c.tokens)) for c in completions] == [(0, 30), (1, 1), (2, 2), (3, 12), (4, 1)]
    # a slot is refilled as soon as it is free: one runs the first prompt, the other all the rest
    assert one.stats.rounds == 30 and one.stats.row_rounds == one.stats.decode_tokens == 46
    assert [event.index for event in one.stream(PROMPTS[:5], params) if event.completion] == [1, 2, 3, 4, 0]


def test_committed_lengths_grow_by_one_a_round_and_a_free_slot_keeps_its_prompt() -> None:
    one = engine()
    rounds = one.stream([PROMPTS[7], PROMPTS[3]], [SamplingParams(max_tokens=n) for n in (5, 3)])
    lengths = [one.cache.seq_len.tolist() for event in rounds if event.index == 0]
    assert lengths == [[10, 3, 0, 0], [11, 4, 0, 0], [12, 2, 0, 0], [13, 2, 0, 0], [9, 2, 0, 0]]


def test_no_prompts_give_no_completions() -> None:
    one = engine()
    assert one.generate([]) == [] and list(one.stream([])) == []
    assert one.stats.rounds == 0


# ---- seeds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(8), [None] * 8])
def test_other_seeds_and_none_at_all_give_other_tokens(seeds: Sequence[int | None]) -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in seeds]
    assert len({tuple(tokens) for tokens in tokens_of(engine().generate([PROMPTS[7]] * 8, params))}) == 8


def test_sampling_that_leaves_one_token_is_greedy() -> None:
    one = engine()
    greedy = tokens_of(one.generate(PROMPTS[:6], SamplingParams(max_tokens=8)))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        params = SamplingParams(max_tokens=8, temperature=1.0, **narrow)
        assert tokens_of(one.generate(PROMPTS[:6], params)) == greedy


def test_one_parameter_set_serves_all_prompts_and_none_means_the_default() -> None:
    one = engine()
    assert tokens_of(one.generate(PROMPTS[:2], SamplingParams(max_tokens=4))) == tokens_of(
        one.generate(PROMPTS[:2], [SamplingParams(max_tokens=4)] * 2)
    )
    default = one.generate([PROMPTS[0]])[0].tokens
    assert len(default) == SamplingParams().max_tokens
    assert default[:4] == one.generate(PROMPTS[:1], SamplingParams(max_tokens=4))[0].tokens


# ---- how an output ends --------------------------------------------------------------------------------------------


def eos_case() -> tuple[int, list[list[int]]]:
    """A token that the first of three prompts emits in mid-output, and what each emits where nothing ends it."""
    free = tokens_of(engine().generate(PROMPTS[5:8], SamplingParams(max_tokens=16)))
    eos = next(token for at, token in enumerate(free[0]) if at >= 5 and token not in free[0][:at] + free[1])
    return eos, free


def cut(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@pytest.mark.parametrize("of", ["the model", "the model, among others", "the tokenizer"])
def test_eos_ends_its_own_row_only_is_the_last_token_and_not_in_the_text(of: str) -> None:
    eos, free = eos_case()
    eos_ids = {"the model": (eos,), "the model, among others": (256, eos), "the tokenizer": ()}[of]
    one = engine(tiny_config(eos_ids=eos_ids), tokenizer=ByteTokenizer(eos_ids=() if eos_ids else (eos,)))
    completions = one.generate(PROMPTS[5:8], SamplingParams(max_tokens=16))
    assert tokens_of(completions) == [cut(tokens, eos) for tokens in free]
    assert 5 < len(completions[0].tokens) < 16 and completions[0].tokens[-1] == eos
    assert completions[0].text == ByteTokenizer().decode(completions[0].tokens[:-1])
    assert [c.finish_reason for c in completions[:2]] == ["stop", "length"]
    completions = one.generate(PROMPTS[5:8], SamplingParams(max_tokens=16, ignore_eos=True))
    assert tokens_of(completions) == free and completions[0].finish_reason == "length"


def test_a_stream_holds_back_what_may_become_a_stop_string() -> None:
    one = engine(tokenizer=ByteTokenizer())
    whole = one.generate([PROMPTS[5]], SamplingParams(max_tokens=24))[0]
    free, shown = whole.text, ""
    for event in one.stream([PROMPTS[5]], SamplingParams(max_tokens=24, stop=[free[9:13], "no such text"])):
        shown += event.text
        assert free[:9].startswith(shown)
    assert shown == free[:9] and event.completion and event.completion.finish_reason == "stop"
    assert event.completion.tokens == whole.tokens[: len(event.completion.tokens)] != whole.tokens
    events = list(one.stream([PROMPTS[5]], SamplingParams(max_tokens=24, stop=free[15:17] + "never")))
    assert "".join(event.text for event in events) == free


# ---- streams -------------------------------------------------------------------------------------------------------


def test_streamed_tokens_and_text_join_to_the_completions_and_are_what_is_decoded() -> None:
    one = engine(tokenizer=ByteTokenizer())
    params = [SamplingParams(max_tokens=4 + i, temperature=1.0, seed=i) for i in range(9)]
    prompts = ["Grüße, 世界", *PROMPTS[:8]]
    expected = one.generate(prompts, params)
    events: list[TokenEvent] = list(one.stream(prompts, params))
    for completion in expected:
        mine = [event for event in events if event.index == completion.index]
        assert [token for event in mine for token in event.tokens] == completion.tokens
        assert "".join(event.text for event in mine) == completion.text
        assert [event.completion for event in mine] == [None] * (len(mine) - 1) + [completion]
        assert all(event.sources == ["target"] * len(event.tokens) for event in mine)
    text, greedy = "Once upon a time", SamplingParams(max_tokens=20)
    of_text, of_ids = (one.generate([x], greedy)[0] for x in (text, ByteTokenizer().encode(text)))
    assert of_text.text == ByteTokenizer().decode(of_text.tokens) and of_ids.tokens == of_text.tokens


def test_a_stream_starts_before_it_ends() -> None:
    stream = engine(batch_size=1).stream(PROMPTS[:3], SamplingParams(max_tokens=3))
    assert [next(stream).index for _ in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize("leave", ["close", "forget"])
def test_a_stream_left_half_way_frees_its_slots(leave: str) -> None:
    one = engine(batch_size=2)
    params = SamplingParams(max_tokens=10)
    expected = tokens_of(one.generate(PROMPTS[3:6], params))
    stream = one.stream(PROMPTS[8:13], params)
    for _ in range(5):
        next(stream)
    if leave == "close":
        stream.close()
    del stream
    gc.collect()
    assert not one.state.active.any()
    assert tokens_of(one.generate(PROMPTS[3:6], params)) == expected


def test_an_engine_that_is_streaming_takes_no_other_work() -> None:
    one = engine(batch_size=1)
    stream = one.stream(PROMPTS[3:6], SamplingParams(max_tokens=2))
    for _ in range(2):  # in the middle of a prompt, and where one is done and the next has not begun
        assert next(stream).index == 0
        for work in (lambda: one.generate([[1]]), lambda: next(one.stream([[9]])), lambda: one.logits([1, 2])):
            with pytest.raises(RuntimeError, match="still streaming"):
                work()
    stream.close()  # type: ignore[attr-defined]
    assert len(one.generate([[1]], SamplingParams(max_tokens=1))[0].tokens) == 1


# ---- logits, dtypes, quantization ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 40, 300])
def test_logits_are_those_of_the_whole_text(n: int) -> None:
    one, ids = engine(), random_ids(n)
    logits = one.logits(ids)
    expected = whole_text_logits(one.model, ids)
    assert logits.shape == (n, 258) and logits.dtype == torch.float32
    # fp32 sums in another order over two layers
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("kv_dtype", "of_model", "most"), [("bf16", False, 0.05), ("fp16", False, 0.05),
                                                            (None, True, 0.1)])  # fmt: skip
def test_16_bits_of_a_cache_or_of_all_run_and_stay_near(kv_dtype: str | None, of_model: bool, most: float) -> None:
    config = EngineConfig(batch_size=4, max_seq_len=768, device="cpu", compile=False, kv_dtype=kv_dtype)
    wide, narrow = engine(), Engine(tiny_model(dtype=torch.bfloat16 if of_model else torch.float32), config=config)
    assert narrow.cache.bytes_per_token == wide.cache.bytes_per_token // 2
    ids = random_ids(60)
    difference = wide.logits(ids) - narrow.logits(ids)
    # bf16 keeps 8 bits (2^-9 relative) of each key and value; sharp scores and two layers multiply that by about ten,
    # where weights and activations have no more by some tens
    assert 0 < difference.norm() <= most * wide.logits(ids).norm()
    params = [SamplingParams(max_tokens=5, temperature=float(i % 2)) for i in range(6)]
    assert [len(tokens) for tokens in tokens_of(narrow.generate(PROMPTS[:6], params))] == [5] * 6


# ---- stats ---------------------------------------------------------------------------------------------------------


def test_stats_count_what_was_done() -> None:
    one = engine(batch_size=2)
    completions = one.generate([PROMPTS[5], PROMPTS[7], [5]], [SamplingParams(max_tokens=n) for n in (4, 2, 3)])
    stats = one.stats
    assert stats.prefill_tokens == 255 + 9 + 0  # the last prompt token is decoded
    assert stats.decode_tokens == 4 + 2 + 3
    assert stats.rounds == 5  # slot 0: four, slot 1: two and three
    assert stats.row_rounds == 9 and stats.tokens_per_round == 1.0
    assert stats.recompiles == 0 and stats.acceptance_rate == 0.0
    assert [c.stats.rounds for c in completions] == [4, 2, 3]
    assert [c.stats.emitted for c in completions] == [4, 2, 3]
    assert [c.stats.tokens_per_round for c in completions] == [1.0, 1.0, 1.0]
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.decode_seconds == pytest.approx(stats.verify_seconds + stats.host_seconds)


def test_kv_bytes_are_every_slot_to_the_end_of_the_last_split_in_view() -> None:
    one = engine(batch_size=2)
    per_split = 2 * SPLIT * (2 * 2 * 2 * 8 * 4)  # 2 slots; keys and values, 2 layers, 2 kv heads of 8, fp32
    one.generate([random_ids(511)], SamplingParams(max_tokens=4))
    # the rounds see 511, 512, 513 and 514 keys
    assert one.stats.kv_bytes == (2 + 2 + 3 + 3) * per_split
    assert one.stats.kv_bytes_per_token == 10 * per_split / 4


def test_stats_are_those_of_the_latest_call() -> None:
    one = engine()
    one.generate(PROMPTS[:5], SamplingParams(max_tokens=5))
    list(one.stream([PROMPTS[7]], SamplingParams(max_tokens=3)))
    assert (one.stats.decode_tokens, one.stats.prefill_tokens, one.stats.rounds) == (3, 9, 3)


# ---- refusals ------------------------------------------------------------------------------------------------------

PROMPT_REFUSED: list[tuple[Any, Any, str]] = [
    ([""], None, "prompt 0 is empty"),
    ([[1], []], None, "prompt 1 is empty"),
    (["text"], None, "no tokenizer"),
    ([[1, 2, 258]], None, "258.* 0 to 257"),
    ([[1], [-1]], None, "prompt 1 .*-1"),
    ("a text", None, "list"),
    ([[1]], SamplingParams(stop="x"), "no tokenizer"),
    ([[1], [2]], [SamplingParams()], "2 prompts .* got 1"),
    ([[1], [2]], [SamplingParams()] * 3, "2 prompts .* got 3"),
    ([random_ids(700)], SamplingParams(max_tokens=69), "700 .* 69: together 769, over max_seq_len 768"),
    ([[1], random_ids(1000)], SamplingParams(max_tokens=200), "prompt 1 has 1,000 .* 200: together 1,200, .* 768"),
]


class Untouched:
    """A compiled step that must not be called."""

    graphs = 0

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("work was done before the refusal")


@pytest.mark.parametrize(("prompts", "params", "sentence"), PROMPT_REFUSED, ids=[case[2] for case in PROMPT_REFUSED])
def test_a_prompt_that_cannot_run_is_refused_before_any_work(prompts: Any, params: Any, sentence: str) -> None:
    one = engine()
    one._prefill = one.schedule.rounds.decode = Untouched()
    for call in (one.generate, one.stream):
        with pytest.raises(ValueError, match=sentence):
            call(prompts, params)
    assert one.cache.seq_len.tolist() == [0] * 4


def test_a_prompt_that_just_fits_runs() -> None:
    one = engine(batch_size=1)
    completion = one.generate([random_ids(700)], SamplingParams(max_tokens=68))[0]
    assert len(completion.tokens) == 68
    assert completion.tokens[:3] == slow_greedy(random_ids(700), 3)


def test_a_text_of_no_tokens_is_refused() -> None:
    one = engine(tokenizer=type("Deaf", (ByteTokenizer,), {"encode": lambda self, text, *, bos=True: []})())
    with pytest.raises(ValueError, match="prompt 0"):
        one.generate(["text"], SamplingParams(max_tokens=1))


def test_logits_refuse_what_cannot_run() -> None:
    one = engine()
    for tokens, sentence in [([], "empty"), ([258], "258"), (random_ids(769), "769.*768")]:
        with pytest.raises(ValueError, match=sentence):
            one.logits(tokens)


@pytest.mark.parametrize(
    ("shape", "changes", "sentence"),
    [
        ({}, {"max_seq_len": 4097}, "4,097 .* 4,096"),
        ({"sliding_window": 500}, {"max_seq_len": 501}, "501 .* sliding window of 500"),
        ({"max_seq_len": 2**30}, {"max_seq_len": 2**30, "batch_size": 1000}, "batch_size 1000 x .* KV cache .* GiB"),
    ],
)
def test_a_configuration_that_does_not_fit_the_model_is_refused(
    shape: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine(tiny_config(**shape), **changes)


def test_a_configuration_at_the_edge_of_the_model_runs() -> None:
    one = engine(tiny_config(max_seq_len=300, sliding_window=300), max_seq_len=300, batch_size=1)
    assert one.generate([random_ids(296)], SamplingParams(max_tokens=4))[0].tokens == slow_greedy(random_ids(296), 4)


def test_drafting_is_off_where_it_is_not_asked_for() -> None:
    assert engine().draft == DraftConfig(policy="off")


@pytest.mark.parametrize(
    ("asked", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("auto", torch.float32)]
)
def test_a_folder_gives_an_engine_in_the_dtype_asked_for(asked: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_hugging_face(tiny_model(), tmp_path, dtype=torch.float32)
    config = EngineConfig(device="cpu", dtype=asked, max_seq_len=512, batch_size=2, compile=False)
    one = Engine.from_pretrained(tmp_path, config)
    assert (one.dtype, one.cache.layers[0].k.dtype, one.tokenizer) == (dtype, dtype, None)
    tokens = one.generate([PROMPTS[5]], SamplingParams(max_tokens=4))[0].tokens
    if dtype == torch.float32:
        assert tokens == slow_greedy(PROMPTS[5], 4)
    assert one.config is config
