"""Cases whose answer stands far back, the sums of what drafts come to on them, and how far logits are from others."""

import math

import pytest
import torch

from evaluate import distance
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import load_tokenizer, read_config
from measuring.needles import KINDS, Cases, summarize
from tests.helpers import random_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [200, 512])
def test_a_case_fits_its_length_and_its_answer_stands_far_back(kind: str, length: int) -> None:
    tokenizer = load_tokenizer(BUNDLED, read_config(BUNDLED))
    assert tokenizer is not None
    maker = Cases(tokenizer, {"words": random_ids(4000, vocab_size=tokenizer.vocab_size)}, seed=3)
    cases = maker.make(kind, length, 6)
    assert cases == maker.make(kind, length, 6)
    for case in cases:
        assert length - 40 <= len(case.prompt) + case.new_tokens <= length
        text = tokenizer.decode(case.prompt)
        if isinstance(case.answer, str):
            assert text.count(case.answer) == 1 and text.index(case.answer) < 0.6 * len(text)
        elif case.answer is not None:
            n = len(case.answer)
            places = [i for i in range(len(case.prompt)) if case.prompt[i : i + n] == case.answer]
            assert len(places) == 1 and places[0] < length / 2


def test_the_lead_over_streaming_is_that_of_the_same_prompts() -> None:
    streaming = {"policy": "streaming", "budget": 64, "prompts": [[0, 4, 1, 1], [4, 4, 5, 1]]}
    guided = {"policy": "guided", "budget": 64, "prompts": [[4, 4, 5, 1], [4, 4, 5, 1]]}
    result = {"kind": "needle", "length": 9, "right": [True, False], "settings": [streaming, guided]}
    summary = {(r["prompts"], r["policy"]): r for r in summarize([result, result])}
    assert summary["all", "streaming"]["acceptance_rate"] == 0.5 and summary["all", "streaming"]["n"] == 4
    assert summary["all", "streaming"]["tokens_per_round"] == 3.0
    lead = summary["all", "guided"]
    assert lead["over_streaming"] == 0.5 and lead["acceptance_interval"] == [1.0, 1.0]
    assert (lead["prompts_above_streaming"], lead["prompts_below_streaming"]) == (2, 0)
    low, high = lead["over_streaming_interval"]
    assert 0 <= low < 0.5 < high <= 1
    right = summary["right", "streaming"]
    assert (right["n"], right["acceptance_rate"]) == (2, 0.0)


def test_the_logits_that_are_compared_are_those_of_the_tokens_that_came() -> None:
    own, theirs = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    found = distance("book", torch.tensor([0, 1]), own, theirs)
    nll = math.log1p(math.exp(-2.0))
    assert found["perplexity"] == pytest.approx(math.exp(nll))
    assert found["same_best"] == 0.5
    # centred: own +-1, +-1 and theirs +-0.5, +-1, the second the other way round
    assert found["logit_error"] == pytest.approx(math.sqrt((0.25 + 4.0) / 2) / math.sqrt((0.25 + 1.0) / 2))
    shifted = distance("book", torch.tensor([0, 1]), own + 5.0, theirs)
    assert shifted["logit_error"] == pytest.approx(found["logit_error"])  # a constant changes no choice
