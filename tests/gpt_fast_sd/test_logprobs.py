"""Log-probabilities beside tokens are those of the text alone, and processors change what is emitted, never wrongly."""

import gc
import itertools
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.serving import Penalties
from gpt_fast_sd.serving.logprobs import beside, found_of
from gpt_fast_sd.serving.requests import Intake
from tests.drafts import draft_of
from tests.gpt_fast_sd.policies.drafting import drafting, nearly
from tests.gpt_fast_sd.test_rounds import EOS_IDS, PROMPTS, captured, engine
from tests.gpuless.recorder import capture
from tests.helpers import ByteTokenizer, chi_square, few, random_ids, tiny_config, tiny_engine, tiny_model
from tests.helpers import random_transformers_model as random_model
from tests.helpers import whole_text_logits as logits_of

NAMES = ["off", "streaming", "guided", "lookup", "hierarchy", "standalone"]
ASKED = [None, 0, 3, 20, 1, 0]
PARAMS = [
    SamplingParams(max_tokens=14, temperature=(0.0, 1.0, 0.8)[i % 3], top_k=9 if i == 4 else None, seed=i, logprobs=n)
    for i, n in enumerate(ASKED)
]


@pytest.mark.parametrize(
    ("name", "captures"), few(itertools.product(NAMES, [False, True]), [("off", False), ("guided", True)])
)
def test_each_token_has_the_logprob_that_its_text_alone_gives_it(name: str, captures: bool) -> None:
    one = captured(name) if captures else engine(name)
    without = [SamplingParams(**vars(p) | {"logprobs": None}) for p in PARAMS]
    expected = [(c.tokens, c.stats) for c in one.generate(PROMPTS, without)]
    streamed: dict[int, list[Any]] = {i: [] for i in range(len(PROMPTS))}
    for event in one.stream(PROMPTS, PARAMS):
        assert len(event.logprobs) == (len(event.tokens) if ASKED[event.index] is not None else 0)
        streamed[event.index] += event.logprobs
    completions = one.generate(PROMPTS, PARAMS)
    assert [(c.tokens, c.stats) for c in completions] == expected
    for c, prompt, n in zip(completions, PROMPTS, ASKED, strict=True):
        assert len(c.logprobs) == len(streamed[c.index]) == (len(c.tokens) if n is not None else 0)
        if n is None:
            continue
        truth = one.logits(prompt + c.tokens, last=len(c.tokens) + 1)[:-1].log_softmax(-1)  # [n, V]
        best = truth.topk(n)
        for i, (token, found) in enumerate(zip(c.tokens, c.logprobs, strict=True)):
            assert found.logprob == pytest.approx(truth[i, token].item(), abs=1e-4)
            assert [p for _, p in found.top] == pytest.approx(best.values[i].tolist(), abs=1e-4)
            assert all(p == pytest.approx(truth[i, at].item(), abs=1e-4) for at, p in found.top)


def test_the_host_reads_the_numbers_that_were_written() -> None:
    logits = torch.tensor([[[0.0, 1.0, float("-inf"), -300.0]] * 2])
    row = beside(logits, torch.tensor([[2, 3]]), 20)[0].tolist()  # a vocabulary of four
    never, rarely = found_of(row, 2, 20)
    assert never.logprob == float("-inf") and [token for token, _ in never.top] == [1, 0, 3, 2] == [
        t for t, _ in rarely.top
    ]
    assert rarely.logprob == rarely.top[2][1] == pytest.approx(-301.3133, abs=1e-3)
    assert len(found_of(row, 2, 1)[0].top) == 1 and found_of(row, 2, None) == []


def test_processors_of_transformers_give_what_its_generate_gives(tmp_path: Path) -> None:
    """Beside a row without one, whose text stays as it is; eagerly and where rounds are captured."""
    theirs = pytest.importorskip("transformers").generation.logits_process
    model = random_model("Llama", max_position_embeddings=512, vocab_size=256)
    model.save_pretrained(tmp_path)
    makers = [
        theirs.RepetitionPenaltyLogitsProcessor(1.7), theirs.NoRepeatNGramLogitsProcessor(2), None,
        theirs.SuppressTokensLogitsProcessor(list(range(0, 256, 2)), device="cpu"),
    ]  # fmt: skip
    prompts, expected = [random_ids(n, seed=n) for n in (40, 3, 90, 21)], []
    for prompt, maker in zip(prompts, makers, strict=True):
        text = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False,
            eos_token_id=None, pad_token_id=0, logits_processor=[maker] if maker else None,
        )  # fmt: skip
        expected.append(text[0, len(prompt) :].tolist())
    params = [SamplingParams(max_tokens=20, ignore_eos=True, processor=maker) for maker in makers]
    config = EngineConfig(batch_size=2, max_seq_len=256, device="cpu", dtype="fp32", compile=False)
    for name, captures in (("off", None), ("full", capture), ("lookup", None)):
        one = Engine.from_pretrained(tmp_path, config, draft_of(name))
        one.schedule.rounds.capture = captures
        assert [c.tokens for c in one.generate(prompts, params)] == expected
        assert [one.submit(*job).result().tokens for job in zip(prompts, params, strict=True)] == expected


PENALIZED: list[dict[str, Any]] = [
    {"presence_penalty": 0.9, "frequency_penalty": 0.4}, {"frequency_penalty": -1.5, "logit_bias": {"7": 4, 9: -100}},
    {"presence_penalty": np.float32(2), "logit_bias": {np.int64(65): np.int8(99)}}, {"presence_penalty": -2},
]  # fmt: skip


@pytest.mark.parametrize("how", few(["plain", "captured", "compiled"], ["captured"]))
def test_penalties_and_biases_are_those_of_a_slow_loop(how: str) -> None:
    model, expected, prompts = tiny_model(), [], [random_ids(n, seed=n) for n in (40, 3, 90, 21)]
    for prompt, fields in zip(prompts, PENALIZED, strict=True):
        text, a, b = [*prompt], fields.get("presence_penalty", 0), fields.get("frequency_penalty", 0)
        for _ in range(20):
            logits, emitted = logits_of(model, text)[-1].tolist(), text[len(prompt) :]
            for token in {*emitted}:
                logits[token] -= a + b * emitted.count(token)
            for token, by in fields.get("logit_bias", {}).items():
                logits[int(token)] += by
            text.append(max(range(258), key=logits.__getitem__))
        expected.append(text[len(prompt) :])
    params = [SamplingParams(max_tokens=20, ignore_eos=True, processor=Penalties(**each)) for each in PENALIZED]
    with pytest.raises(ValueError, match="n_prompt must be a whole number of at least 0"):
        Penalties(n_prompt=-1)
    one = tiny_engine(draft_of("off" if how == "plain" else "full"), compile=how == "compiled")
    one.schedule.rounds.capture = capture if how == "captured" else None
    assert [c.tokens for c in one.generate(prompts, params)] == expected
    assert [one.submit(*job).result().tokens for job in zip(prompts, params, strict=True)] == expected


TOY, PROMPT = tiny_config(vocab_size=5, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=24), [0, 3, 1, 4, 2, 2]


def no_token_twice(ids: Tensor, logits: Tensor) -> Tensor:
    logits[0, ids[0, -1]] = -math.inf  # in place: it is the processor's own
    return logits


def test_samples_follow_what_a_processor_says_whatever_is_drafted() -> None:
    model, n = tiny_model(TOY), 1024
    joint = torch.ones(1, dtype=torch.float64)
    for length in range(2):
        texts = [[*text] for text in itertools.product(range(5), repeat=length)]
        logits = [no_token_twice(torch.tensor([PROMPT + text]), logits_of(model, PROMPT + text)[-1:].clone())
                  for text in texts]  # fmt: skip
        joint = (joint[:, None] * torch.cat(logits).double().softmax(-1)).flatten()
    near = nearly(model, by=0.3)
    one = drafting("standalone", model=model, draft_model=near, engine={"batch_size": 64, "max_seq_len": 64}, gamma=1)
    params = [SamplingParams(max_tokens=2, temperature=1.0, seed=i, processor=no_token_twice) for i in range(n)]
    tokens = torch.tensor([c.tokens for c in one.generate([PROMPT] * n, params)])
    assert 0 < one.stats.acceptance_rate < 1
    counts = (tokens * torch.tensor([5, 1])).sum(1).bincount(minlength=25)
    possible = joint > 0
    assert not counts[~possible].any() and chi_square(counts[possible], joint[possible] * n) <= 1


BROKEN: list[tuple[Any, ...]] = [
    (lambda ids, logits: logits * math.nan, ValueError, "returned NaN or infinity"),
    (lambda ids, logits: logits + math.inf, ValueError, "returned NaN or infinity"),
    (lambda ids, logits: logits - math.inf, ValueError, "forbids every token"),
    (lambda ids, logits: None, ValueError, r"floating-point logits \[1, 258\], got None"),
    (lambda ids, logits: logits[0], ValueError, r"got torch.float32 \[258\]"),
    (lambda ids, logits: logits.double() + 1e300 * logits.abs(), ValueError, "returned NaN or infinity"),
    (lambda ids, logits: logits.unsqueeze_(0), ValueError, r"got torch.float32 \[1, 1, 258\]"),
    (lambda ids, logits: logits.argmax(-1, True).expand(1, 258), ValueError, r"got torch.int64"),
    (lambda ids, logits: 1 / 0, ZeroDivisionError, "division"),
]  # fmt: skip


@pytest.mark.parametrize(("processor", "error", "said"), few(BROKEN, BROKEN[::4]))
def test_a_processor_that_fails_ends_its_request_and_of_those_submitted_no_other(
    processor: Any, error: type[Exception], said: str
) -> None:
    one, long = engine("streaming"), SamplingParams(max_tokens=40, ignore_eos=True)
    [expected] = one.generate(PROMPTS[:1], long)

    def late(ids: Tensor, logits: Tensor) -> Tensor:
        return processor(ids, logits) if ids.shape[1] > 10 else logits  # type: ignore[no-any-return]

    bad = SamplingParams(max_tokens=30, ignore_eos=True, processor=late)
    with pytest.raises(error, match=said):
        one.generate(PROMPTS[1:4], bad)
    good, wrong = one.submit(PROMPTS[0], long), one.submit([5], bad)
    told = []
    with pytest.raises(error, match=said):
        told += wrong
    with pytest.raises(error, match=said):
        wrong.result()
    assert 0 < sum(len(event.tokens) for event in told) <= 10 and all(event.completion is None for event in told)
    assert good.result().tokens == expected.tokens
    assert one.generate(PROMPTS[:1], long)[0].tokens == expected.tokens  # all slots are free


class OnlySeven:
    def __len__(self) -> int:
        return 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        with torch.enable_grad():  # as under transformers' no_grad
            (slope,) = torch.autograd.grad(logits.requires_grad_().square().sum(), logits)
        return torch.where(torch.arange(258) == 7, slope, -math.inf)


def test_a_processor_is_asked_about_no_text_that_has_ended_and_may_be_false_as_a_value() -> None:
    last = list[int]()

    def grammar(ids: Tensor, logits: Tensor) -> Tensor:
        text = ids[0, len(PROMPTS[1]) :].tolist()
        if len(text) >= 40 or {*EOS_IDS, *last} & {*text}:
            raise RuntimeError("there is no such text")
        return logits

    for make, draft in itertools.product((engine, captured), ("off", "full")):
        one = make(draft)
        for ends in ([], one.generate([PROMPTS[1]], SamplingParams(max_tokens=40))[0].tokens[3:4]):
            last[:], params = ends, SamplingParams(max_tokens=40, stop_token_ids=ends)
            expected = [one.generate([PROMPTS[1]], params)[0].tokens]
            params = SamplingParams(**vars(params) | {"processor": grammar})
            assert [c.tokens for c in one.generate([PROMPTS[1]], params)] == expected
            assert [one.submit(PROMPTS[1], params).result().tokens] == expected
        assert one.generate([[5]], SamplingParams(max_tokens=3, processor=OnlySeven()))[0].tokens == [7, 7, 7]


def test_an_error_at_a_place_that_no_text_reaches_is_nobodys() -> None:
    """Drafts are the target's own, and a stop string cuts the round before the place at which the processor fails."""
    one = tiny_engine(draft_of("full", 8), model=tiny_model(), tokenizer=ByteTokenizer())
    text = "".join(one.generate(["It was"], SamplingParams(max_tokens=30, ignore_eos=True))[0].text.split("\ufffd"))
    stop, said = text[3], list[str]()

    def processor(ids: Tensor, logits: Tensor) -> Tensor:
        if stop in ByteTokenizer().decode(ids[0, 7:].tolist()):
            said.append("asked")
            raise RuntimeError("behind the stop string")
        return logits

    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=stop, processor=processor)
    ends = one.generate(["It was"], params)[0].finish_reason, one.submit("It was", params).result().finish_reason
    assert ends == ("stop", "stop")
    assert said


def test_an_exit_is_of_one_submission_and_none_keeps_its_engine() -> None:
    def leaves(ids: Tensor, logits: Tensor) -> Tensor:
        sys.exit("no more")

    one = engine("streaming")
    wrong, good = one.submit([5], SamplingParams(processor=leaves)), one.submit([6], SamplingParams(max_tokens=9))
    with pytest.raises(SystemExit, match="no more"):
        wrong.result()
    assert len(good.result().tokens) == 9
    gc.disable()
    try:
        kept = one.submit([6], SamplingParams(max_tokens=2, processor=lambda ids, logits: logits))
        held = weakref.ref(kept.result() and kept)
        one.submit([7], SamplingParams(max_tokens=2)).result()  # what ran before is let go of
        del kept
        assert held() is None
    finally:
        gc.enable()


def test_what_cannot_be_asked_for_is_refused() -> None:
    for n in (-1, 21, True, 1.0, "5"):
        with pytest.raises(ValueError, match="logprobs must be a whole number from 0 to 20, got"):
            SamplingParams(logprobs=n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="processor must be a callable of ids and logits, got 3"):
        SamplingParams(processor=3)  # type: ignore[arg-type]
    intake = Intake(tiny_config(), None, 100, is_alone=False)
    with pytest.raises(ValueError, match="prompt 0 has a processor, which changes whole logits"):
        intake.one(0, [1], SamplingParams(processor=no_token_twice))
