"""What the engine says of given texts: log-probabilities, by chunks, are those of the step that decodes."""

from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.fast.compile import CompiledStep
from tests.helpers import ByteTokenizer, Patch, few, random_ids, tiny_engine

TEXTS = [random_ids(700), random_ids(130, seed=1), random_ids(2, seed=2), random_ids(257, seed=3)]


@pytest.mark.parametrize("by", few(["eager", "Dynamo", "Inductor"], ["eager"]))
def test_scores_are_those_of_the_step_that_decodes(by: str, monkeypatch: Patch) -> None:
    if by == "Dynamo":  # runs what it traced
        monkeypatch.setattr(CompiledStep, "_inductor", lambda self, graph, inputs: graph.forward)
    compile, draft = by != "eager", DraftConfig(policy="guided", budget=64, gamma=2)
    one = tiny_engine(draft, max_seq_len=700 + 8, compile=compile)
    greedy = SamplingParams(max_tokens=8)
    before = [completion.tokens for completion in one.generate(TEXTS, greedy)]
    expected = []
    for ids in TEXTS:
        logits, after = one.logits(ids)[:-1], torch.tensor(ids[1:])
        expected.append((logits.log_softmax(-1).gather(-1, after[:, None])[:, 0], logits.argmax(-1) == after))
    lasts: tuple[Any, ...] = (None, 1, [699, 64, None, 255])
    for last in lasts:
        for i, (got, (logprobs, best)) in enumerate(zip(one.score(TEXTS, last), expected, strict=True)):
            n = (last[i] if isinstance(last, list) else last) or len(TEXTS[i]) - 1
            assert got.logprobs.shape == got.greedy.shape == (n,)
            torch.testing.assert_close(got.logprobs, logprobs[-n:], atol=1e-4, rtol=1e-5)
            assert got.greedy.equal(best[-n:]) and got.total == pytest.approx(logprobs[-n:].sum().item(), rel=1e-4)
    assert [completion.tokens for completion in one.generate(TEXTS, greedy)] == before
    assert one._scorer._step.graphs == (3 if compile else 0)  # of 256, 64 and 16 tokens, whatever texts there are


def test_a_text_that_begins_like_the_one_before_has_the_scores_that_it_has_alone() -> None:
    """Up to the last place of a slot: whatever is kept of others, or lies past a chunk's end, changes nothing."""
    one, ids = tiny_engine(max_seq_len=512), random_ids(513)
    texts = [
        ([*ids[:60], 1, 2, 3], 3), ([*ids[:60], 4], 1), ([*ids[:60], 5], 1), ([*ids[:60], 5], 2), (ids[:300], 299),
        (ids[:300] + [7] * 100, 9), ([*ids[:299], 9], 1), (ids, 7), (ids, 7), (ids[:505] + [8] * 8, 8), (ids[:20], 4),
    ]  # fmt: skip
    together, prompt = one.score(*zip(*texts, strict=True)), SamplingParams(max_tokens=8)
    for (text, n), found in zip(texts, together, strict=True):
        alone = tiny_engine(max_seq_len=512)
        torch.testing.assert_close(found.logprobs, alone.score([text], n)[0].logprobs, atol=1e-5, rtol=1e-5)
    assert one.generate([ids[:400]], prompt)[0].tokens == alone.generate([ids[:400]], prompt)[0].tokens


def test_texts_that_cannot_be_scored_are_refused_before_any_work() -> None:
    one = tiny_engine(max_seq_len=100)
    refused: list[tuple[Any, Any, str]] = [
        ("text", None, "texts must be a list of texts or of lists of token ids, got 'text'"),
        ([[1, 2], [3]], None, "text 1 is one token, and nothing precedes it: give it at least two"),
        ([[1, 2], []], None, "text 1 is empty"),
        ([[1, 258]], None, "text 0 holds token id 258"),
        (["text"], None, "text 0 is text, but this model has no tokenizer"),
        ([[1] * 102], None, "text 0: 102 tokens do not fit, max_seq_len is 100"),
        ([[1, 2]], 2, "last must be a whole number from 1 to the 1 tokens of text 0 behind the first, got 2"),
        ([[1, 2]], True, "one for each text, got True"),
        ([[1, 2]], b"\1", "last must be a whole number, or a list of one for each text, got b"),
        ([], "x", "last must be a whole number, or a list of one for each text, got 'x'"),
        ([[1, 2]] * 2, [1], "2 texts need one last, or one each, got 1"),
    ]
    for texts, last, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            one.score(texts, last)
    assert one.score([]) == []
    with_texts = tiny_engine(max_seq_len=100, tokenizer=ByteTokenizer())
    assert len(with_texts.score(["text"])[0].logprobs) == len(ByteTokenizer().encode("text")) - 1
