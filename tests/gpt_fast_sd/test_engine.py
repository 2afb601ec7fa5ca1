"""The engine: an output depends on the prompt alone, whatever shares its batch; and every refusal comes first.

Shapes: B slots, T tokens, V vocabulary.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils import _device

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import ModelConfig, save_hugging_face
from gpt_fast_sd.serving.requests import TokenEvent
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.helpers import ByteTokenizer, few, random_ids, tiny_config, tiny_engine, tiny_model, whole_text_logits
from tests.helpers import random_transformers_model as random_model

LENGTHS = [1, 2, 700, 3, 255, 256, 257, 10, 511, 512, 513, 7, 90]
PROMPTS = [random_ids(n, seed=n + i) for i, n in enumerate(LENGTHS)]
SAMPLED = [
    {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.0},
    {"temperature": 1.5, "min_p": 0.05},
]  # fmt: skip


def engine(config: ModelConfig | None = None, **settings: Any) -> Engine:
    """An eager engine of 4 slots around the tiny model."""
    return tiny_engine(model=tiny_model(config), **{"batch_size": 4, "max_seq_len": 768} | settings)


def slow_greedy(prompt: list[int], n: int) -> list[int]:
    """n greedy tokens, the whole text run again for each."""
    model, ids = tiny_model(), list(prompt)
    for _ in range(n):
        ids.append(int(whole_text_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


# ---- what the caller gives and sets ----------------------------------------------------------------------------------


def test_ids_may_come_in_anything_that_has_them_in_order_and_parameters_once_for_all_or_not_at_all() -> None:
    one, ids, params = engine(), [3, 1, 4], SamplingParams(max_tokens=2)
    expected = tokens_of(one.generate([ids], params))
    for given in (tuple(ids), torch.tensor(ids), np.array(ids)):
        assert tokens_of(one.generate([given], params)) == expected
    assert tokens_of(one.generate([range(3, 4), ids], params)) == tokens_of(one.generate([[3], ids], [params] * 2))
    (default,) = tokens_of(one.generate([ids]))
    assert len(default) == SamplingParams().max_tokens and [default[:2]] == expected
    assert one.generate([]) == [] and list(one.stream([])) == [] and one.stats.rounds == 0


@contextlib.contextmanager
def unusual_settings() -> Iterator[None]:
    """All that a caller may have set for work of its own."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("cpu")  # whose mode is below that of a block
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        assert torch.device("cpu") == _device.CURRENT_DEVICE  # Dynamo's guards ask for it
        torch.set_default_device(None)
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
        one = tiny_engine(draft, model=model, batch_size=4, max_seq_len=768, compile=compiled)
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


# ---- what shares the batch -----------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_the_whole_text_run_again() -> None:
    prompts = [PROMPTS[i] for i in (0, 2, 3, 5, 6)]
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


@pytest.mark.parametrize("seeds", [range(8), [None] * 8])
def test_other_seeds_and_none_at_all_give_other_tokens(seeds: Sequence[int | None]) -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in seeds]
    assert len({tuple(tokens) for tokens in tokens_of(engine().generate([PROMPTS[7]] * 8, params))}) == 8


# ---- how an output ends, and how it is streamed --------------------------------------------------------------------


def cut(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@pytest.mark.parametrize("of", ["the model", "the model, among others", "the tokenizer"])
def test_eos_ends_its_own_row_only_is_the_last_token_and_not_in_the_text(of: str) -> None:
    """MagicDec ended all rows where one met EOS."""
    free = tokens_of(engine().generate(PROMPTS[5:8], SamplingParams(max_tokens=16)))
    # the first emits it in mid-output
    eos = next(token for at, token in enumerate(free[0]) if at >= 5 and token not in free[0][:at] + free[1])
    eos_ids = {"the model": (eos,), "the model, among others": (256, eos), "the tokenizer": ()}[of]
    one = engine(tiny_config(eos_ids=eos_ids), tokenizer=ByteTokenizer(eos_ids=() if eos_ids else (eos,)))
    completions = one.generate(PROMPTS[5:8], SamplingParams(max_tokens=16))
    assert tokens_of(completions) == [cut(tokens, eos) for tokens in free]
    assert 5 < len(completions[0].tokens) < 16 and completions[0].tokens[-1] == eos
    assert completions[0].text == ByteTokenizer().decode(completions[0].tokens[:-1])
    assert [c.finish_reason for c in completions[:2]] == ["stop", "length"]
    completions = one.generate(PROMPTS[5:8], SamplingParams(max_tokens=16, ignore_eos=True))
    assert tokens_of(completions) == free and completions[0].finish_reason == "length"


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


@pytest.mark.parametrize("n", [1, 2, 40, 700])
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
    model = tiny_model(dtype=torch.bfloat16 if of_model else torch.float32)
    wide, narrow = engine(), tiny_engine(model=model, batch_size=4, max_seq_len=768, kv_dtype=kv_dtype)
    assert narrow.cache.bytes_per_token == wide.cache.bytes_per_token // 2
    ids = random_ids(60)
    difference = wide.logits(ids) - narrow.logits(ids)
    # bf16 keeps 8 bits (2^-9 relative) of each key and value; sharp scores and two layers multiply that by about ten,
    # where weights and activations have no more by some tens
    assert 0 < difference.norm() <= most * wide.logits(ids).norm()
    params = [SamplingParams(max_tokens=5, temperature=float(i % 2)) for i in range(6)]
    assert [len(tokens) for tokens in tokens_of(narrow.generate(PROMPTS[:6], params))] == [5] * 6


# ---- refusals ------------------------------------------------------------------------------------------------------

NO_PROMPTS = [True, 2], b"ab", bytearray(b"ab"), {1: 2}, {1, 2}, [1.0], [None], 7, None, torch.ones(2, 3).long()
PROMPT_REFUSED: list[tuple[Any, Any, str]] = [
    *(([prompt], None, "prompt 0 must be a text or a list of whole token ids, got ") for prompt in NO_PROMPTS),
    *(([[1, 2]], params, "SamplingParams") for params in (5, "greedy", {"max_tokens": 3}, [5])),
    ([""], None, "prompt 0 is empty"), ([[1], []], None, "prompt 1 is empty"), (["text"], None, "no tokenizer"),
    ([[1, 2, 258]], None, "258.* 0 to 257"), ([[1], [-1]], None, "prompt 1 .*-1"),
    *(([[1]], SamplingParams(stop_token_ids=[n]), f"stop_token_ids holds token id {n}") for n in (258, 2**40)),
    (5, None, "prompts must be a list"),
    ([([1], SamplingParams())], [SamplingParams()], "prompt 0 has its own SamplingParams"),
    ([[1]], SamplingParams(stop="x"), "no tokenizer"), ([[1], [2]], [SamplingParams()], "2 prompts .* got 1"),
    ([[1], [2]], [SamplingParams()] * 3, "2 prompts .* got 3"),
    ([random_ids(700)], SamplingParams(max_tokens=69), "700 .* 69: together 769, over max_seq_len 768"),
    ([[1], random_ids(1000)], SamplingParams(max_tokens=200), "prompt 1 has 1,000 .* 200: together 1,200, .* 768"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "params", "sentence"), PROMPT_REFUSED, ids=[case[2] for case in PROMPT_REFUSED])
def test_a_prompt_that_cannot_run_is_refused_before_any_work(prompts: Any, params: Any, sentence: str) -> None:
    one = engine()
    step = mock.Mock(side_effect=AssertionError("work was done before the refusal"), graphs=0)
    one._prefill = one.schedule.rounds.decode = step
    for call in (one.generate, one.stream):
        with pytest.raises(ValueError, match=sentence) as caught:
            call(prompts, params)
        assert "\n" not in str(caught.value)
    assert one.cache.seq_len.tolist() == [0] * 4


def test_a_text_alone_is_one_prompt_and_one_of_no_tokens_is_refused() -> None:
    one, params = engine(tokenizer=ByteTokenizer()), SamplingParams(max_tokens=4)
    assert [c.tokens for c in one.generate("text", params)] == [c.tokens for c in one.generate(["text"], params)]
    assert [event.index for event in one.stream("text", params)] == [0] * 4
    one = engine(tokenizer=type("Deaf", (ByteTokenizer,), {"encode": lambda self, text, *, bos=True: []})())
    with pytest.raises(ValueError, match="prompt 0"):
        one.generate(["text"], SamplingParams(max_tokens=1))


def test_logits_refuse_what_cannot_run() -> None:
    one = engine()
    for tokens, sentence in [([], "empty"), ([258], "258"), (random_ids(769), "769.*768")]:
        with pytest.raises(ValueError, match=sentence):
            one.logits(tokens)
    for last in ("x", 1.5, True, 0, 4):
        with pytest.raises(ValueError, match="last must be a whole number from 1 to the 3 tokens given, got"):
            one.logits([1, 2, 3], last=last)


ENGINES_REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any] | None, str]] = [
    # settings of an engine and its draft; what its model and a draft model have of their own
    ({"max_seq_len": 4097}, {}, {}, None, "4,097 .* 4,096"),
    ({"max_seq_len": 2**30, "batch_size": 1000}, {}, {"max_seq_len": 2**30}, None,
     "batch_size 1000 x .* KV cache .* GiB"),
    *(({}, {"policy": "early_exit", "exit_layers": n}, {"n_layers": layers}, None,
       f"exit_layers must be below the model's {layers} layers") for layers, n in ((4, 4), (4, 9), (1, None))),
    *(({"max_seq_len": 640}, {"policy": "standalone", "view": "full"}, {}, theirs, said) for theirs, said in (
        ({"vocab_size": 1283}, "the draft model has a vocabulary of 1,283, the target of 258"),
        ({"max_seq_len": 639}, "max_seq_len 640 is over the draft model's 639 positions"),
        (None, "needs a draft model"))),
    ({"max_seq_len": 640}, {"policy": "standalone", "budget": 200}, {}, {"max_seq_len": 400},
     "budget 200 and a chunk of 256 prompt tokens are over the draft model's 400 positions: .* at most 144"),
    *(({}, {"policy": policy}, {}, {}, f"policy '{policy}' drafts without one")
      for policy in ("off", "streaming", "lookup", "hierarchy")),
    ({"kv_dtype": "int8"}, {}, {"dtype": torch.float16}, None,
     "kv_dtype 'int8' is not for models in fp16.* dtype 'bf16'"),
    *(({"kv_dtype": kv}, draft, {}, None, f"{asked} reads half of an int8 cache: it needs kv_dtype 'int8', got {kv!r}")
      for draft, asked in (({"policy": "quantized"}, "policy 'quantized'"),
                           ({"policy": "quest", "kv_bits": 4}, "kv_bits 4")) for kv in (None, "bf16")),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "draft", "own", "theirs", "sentence"), ENGINES_REFUSED)
def test_a_configuration_that_does_not_fit_the_models_is_refused(
    settings: dict[str, Any], draft: dict[str, Any], own: dict[str, Any], theirs: dict[str, Any] | None, sentence: str
) -> None:
    given = {"draft_model": "given"} if draft.get("policy") == "standalone" else {}
    dtype, own = own.get("dtype", torch.float32), {name: value for name, value in own.items() if name != "dtype"}
    model, small = (None if each is None else tiny_model(tiny_config(**each), dtype=dtype) for each in (own, theirs))
    with pytest.raises(ValueError, match=sentence) as caught:
        tiny_engine(DraftConfig(**draft, **given), small, model=model, **settings)
    assert "\n" not in str(caught.value)


def test_a_configuration_at_the_edge_of_the_model_runs() -> None:
    one = engine(tiny_config(max_seq_len=300, sliding_window=400), max_seq_len=300, batch_size=1)
    assert one.generate([random_ids(296)], SamplingParams(max_tokens=4))[0].tokens == slow_greedy(random_ids(296), 4)
    assert one.draft == DraftConfig(policy="off")  # where none is asked for


@pytest.mark.parametrize("asked", ["fp32", "bf16", "auto"])
def test_a_folder_gives_an_engine_in_the_dtype_asked_for_whatever_a_caller_has_set(asked: str, tmp_path: Path) -> None:
    save_hugging_face(tiny_model(), tmp_path, dtype=torch.float32)
    config = EngineConfig(device="cpu", dtype=asked, max_seq_len=512, batch_size=2, compile=False)
    dtype = torch.bfloat16 if asked == "bf16" else torch.float32
    with unusual_settings() if asked == "auto" else contextlib.nullcontext():
        one = Engine.from_pretrained(tmp_path, config)
        tokens = one.generate([PROMPTS[5]], SamplingParams(max_tokens=4))[0].tokens
    assert (one.dtype, one.cache.layers[0].k.dtype, one.tokenizer) == (dtype, dtype, None)
    assert dtype == torch.bfloat16 or tokens == slow_greedy(PROMPTS[5], 4)
    assert one.config is config


EAGER = EngineConfig(batch_size=2, max_seq_len=256, device="cpu", compile=False)
FAMILIES = {"Llama": {}, "Mistral": {}, "Qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 1}, "Qwen3": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_shares_its_memory_and_computes_what_it_did(family: str) -> None:
    for share in (False, True):
        theirs, ids = random_model(family, **FAMILIES[family]), torch.tensor([random_ids(50, vocab_size=131)])
        before, sizes = theirs(ids).logits, {name: p.nbytes for name, p in theirs.named_parameters()}
        copied = [n for name, n in sizes.items() if not share or re.search("[qkv]_proj", name)]
        held = {name: weight.clone() for name, weight in theirs.state_dict().items()}
        with torch.inference_mode(share):
            one = Engine.from_transformers(theirs, None, EAGER, share=share)
        assert torch.equal(theirs(ids).logits, before)
        assert not any(p.is_inference() for p in (*one.model.parameters(), *theirs.parameters()))
        assert all(torch.equal(weight, held[name]) for name, weight in theirs.state_dict().items())
        torch.testing.assert_close(one.logits(ids[0].tolist()), before[0], rtol=1e-5, atol=1e-4)
        storages = [p.untyped_storage() for p in (*theirs.parameters(), *one.model.parameters())]
        assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == sum(sizes.values()) + sum(copied)
        greedy = theirs.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 50:]
        assert one.generate(ids.tolist(), SamplingParams(max_tokens=9, ignore_eos=True))[0].tokens == greedy.tolist()


@pytest.mark.parametrize("how", [{}, {"quantize": "int8"}, {"compile": True}], ids=str)
def test_what_an_engine_holds_beside_a_model_of_transformers_is_planned_for(how: dict[str, Any]) -> None:
    theirs = random_model("Llama", vocab_size=256, intermediate_size=128).to(torch.bfloat16)  # which may be packed
    one = Engine.from_transformers(theirs, None, replace(EAGER, **how))
    shared = {x.data_ptr() for x in (*theirs.parameters(), one.model.rope_freqs)}
    own = sum(x.nbytes for x in (*one.model.parameters(), *one.model.buffers()) if x.data_ptr() not in shared)
    assert own <= one._plan.weights <= sum(x.nbytes for x in theirs.parameters())


def test_what_is_no_plain_model_of_transformers_is_refused_and_is_as_it_was(tmp_path: Path) -> None:
    peft = type("PeftModelForCausalLM", (), {"__module__": "peft.peft_model"})()
    whole = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    with torch.inference_mode():
        norm = torch.nn.RMSNorm(64).requires_grad_(False)
    changes: list[tuple[Callable[[Any], object], dict[str, Any], str]] = [
        (lambda m: setattr(m.config, "quantization_config", {"bits": 4}), {}, "quantized by transformers"),
        (lambda m: setattr(m.model.layers[0].self_attn.q_proj, "weight", whole), {}, "is quantized"),
        (lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.zeros(131))), {}, "has the parameter"),
        (lambda m: m.model.norm.to("meta"), {}, r"norm.weight has no weights yet \(meta\)"),
        (lambda m: setattr(m.model.norm, "weight", norm.weight), {}, "inference_mode, and .*: say share=False"),
        (lambda m: m.model.norm.double(), {}, "norm.weight is float64, and float64 is not run: fp32, bf16 or fp16"),
        (lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.GELU()), {}, "act_fn is GELU, and only SiLU"),
        (lambda m: m.model.layers[1].mlp.gate_proj.register_forward_hook(print), {}, "1.mlp.gate_proj has a forward h"),
        (lambda m: m.register_forward_pre_hook(print), {}, "this model has a forward hook"),
        (lambda m: setattr(m.config, "rope_parameters", {"rope_type": "default", "rope_theta": 7e3}), {}, "inv_freq"),
        (lambda m: 0, {"dtype": "bf16"}, "dtype 'bf16' was requested, and the model is in fp32"),
        (lambda m: 0, {"max_seq_len": 300}, "max_seq_len 300 is over the model's 256 positions"),
        (lambda m: 0, {"quantize": "float8"}, "float8"),
        (lambda m: 0, {"batch_size": 10**9}, "batch_size 1000000000 x max_seq_len 256 takes"),
    ]
    given: list[Any] = [(peft, id, {}, "must be transformers' LlamaForC.*, got PeftM.* what merge_and_unload")]
    for model, change, how, said in given + [(random_model("Llama"), *one) for one in changes]:
        change(model)
        with pytest.raises(ValueError, match=said):
            Engine.from_transformers(model, None, replace(EAGER, **how))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer must be None, one of ours .*, got 'gpt2'"):
        Engine.from_transformers(model, "gpt2", EAGER)
