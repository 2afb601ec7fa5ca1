"""One prompt's output: EOS, max_tokens and stop strings end it, and nothing is shown that may have to be taken back.

A round commits several tokens; it may end among them.
"""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpt_fast_sd import Completion, SamplingParams
from gpt_fast_sd.loading.load import BUNDLED
from gpt_fast_sd.model import StreamDecoder, load_tokenizer, read_config
from gpt_fast_sd.serving.requests import Decoder, Intake, Request, TokenEvent
from gpt_fast_sd.serving.stats import CompletionStats, EngineStats
from tests.helpers import EOS, ByteTokenizer, tiny_config


class Pieces:
    """A decoder whose token i is the i-th of these texts."""

    def __init__(self, *texts: str, rest: str = "") -> None:
        self.texts, self.rest = texts, rest

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[i] for i in ids)

    def flush(self) -> str:
        return self.rest


def request(decoder: Decoder | None, **params: Any) -> Request:
    return Request(0, [1, 2, 3], SamplingParams(**params), frozenset({EOS}), decoder)


def feed(request: Request, tokens: list[int]) -> list[str]:
    """What is shown after each token, one per round, until the request ends."""
    shown = []
    for token in tokens:
        shown.append(request.commit([token], ["target"]).text)
        if request.finish_reason:
            break
    return shown


def commit(request: Request, tokens: list[int], *, judged: int) -> TokenEvent:
    """A round that accepted all of these tokens but the last, which is the target's own."""
    accepted = len(tokens) - 1
    return request.commit(tokens, ["streaming"] * accepted + ["target"], judged, accepted)


def run(texts: list[str], stop: str | list[str], **params: Any) -> tuple[list[str], Completion]:
    """Feed one token for each text; the shown pieces and the completion."""
    one = request(Pieces(*texts), stop=stop, max_tokens=len(texts), **params)
    shown = feed(one, list(range(len(texts))))
    completion = one.completion()
    assert "".join(shown) == completion.text
    return shown, completion


@pytest.mark.parametrize(
    ("texts", "stop", "shown"),
    [
        (["one ", "END", " two"], "END", ["one ", ""]), (["one E", "ND two"], "END", ["one ", ""]),
        (["a", "E", "N", "D", "b"], "END", ["a", "", "", ""]),
        (["xxEN", "ENDy"], "END", ["xx", "EN"]),  # what was held is shown once it cannot be the stop string
        (["aEND", "b"], ["zzz", "END"], ["a"]), (["END"], "END", [""]),
        (["one two", " three"], ["three", "two"], ["one "]),
        (["one two three"], ["three", "two"], ["one "]),  # both in one piece: the first to come
        (["aa", "aa", "bc"], "aaabc", ["", "a", ""]),  # the held text begins the stop string again, one letter later
        (["\n", "\n", "x"], "\n\n", ["", ""]), (["日本", "語テ", "キスト"], "語テキ", ["日本", "", ""]),
        # never completed: what was held is shown
        (["a", "E", "N"], "END", ["a", "", "EN"]), (["EN", "EN", "X"], "END", ["", "EN", "ENX"]),
        (["stop", "ped"], "stops", ["", "stopped"]), (["a", "", "b"], "END", ["a", "", "b"]),
    ],
)  # fmt: skip
def test_a_stop_string_ends_the_text_before_it(texts: list[str], stop: str | list[str], shown: list[str]) -> None:
    got, completion = run(texts, stop)
    assert got == shown
    assert completion.finish_reason == ("length" if "".join(shown) == "".join(texts) else "stop")
    assert completion.tokens == list(range(len(shown)))  # the token that completed it included


@pytest.mark.parametrize(
    ("params", "tokens", "shown", "reason"),
    [
        ({"max_tokens": 2}, [*b"abc"], ["a", "b"], "length"),
        ({"max_tokens": 9}, [*b"hi", EOS, *b"!"], ["h", "i", ""], "stop"),
        ({"max_tokens": 2}, [*b"h", EOS], ["h", ""], "stop"),  # as the last token allowed
        ({"stop_token_ids": [33, 63], "ignore_eos": True}, [*b"h", EOS, *b"i?x"], ["h", "", "i", ""], "stop"),
        ({"max_tokens": 9, "stop": "END"}, [*b"aEN", EOS], ["a", "", "", "EN"], "stop"),  # shows what was held
        ({"max_tokens": 4, "ignore_eos": True}, [*b"h", EOS, *b"i!", 1], ["h", "", "i", "!"], "length"),
        ({"max_tokens": 20}, [*"aé語".encode(), EOS], ["a", "", "é", "", "", "語", ""], "stop"),
        # a character that is never finished is shown as a replacement
        ({"max_tokens": 4}, [*b"ab", 0xE8, EOS], ["a", "b", "", "\ufffd"], "stop"),
        ({"max_tokens": 4}, [*b"ab", 0xE8, 0xE8], ["a", "b", "", "\ufffd\ufffd"], "length"),
    ],
)  # fmt: skip
def test_eos_or_max_tokens_end_a_text(params: dict[str, Any], tokens: list[int], shown: list[str], reason: str) -> None:
    one = request(StreamDecoder(ByteTokenizer()), **params)
    assert feed(one, tokens) == shown
    completion = one.completion()
    assert (completion.text, completion.finish_reason) == ("".join(shown), reason)
    assert completion.tokens == tokens[: len(shown)]


def test_what_a_decoder_says_of_eos_of_its_end_and_no_decoder_at_all() -> None:
    one = Request(0, [1], SamplingParams(max_tokens=9), frozenset({1}), Pieces("a", "</s>"))
    assert feed(one, [0, 1]) == ["a", ""]  # not even where eos has a text
    one = request(Pieces("ab", "c", rest="de"), max_tokens=2, stop="cd")
    assert feed(one, [0, 1]) == ["ab", ""] and one.finish_reason == "stop"
    one = request(None, max_tokens=3)
    assert feed(one, [7, 8, 9]) == ["", "", ""]
    assert one.completion().tokens == [7, 8, 9] and one.completion().text == ""


@pytest.mark.parametrize(("stop", "n", "last"), [("<s>", 1, 1), (["fourth", "</s>"], 2, 2), (["<unk>", "r<s>"], 3, 0)])
def test_a_stop_string_that_is_a_special_token_means_it(stop: str | list[str], n: int, last: int) -> None:
    tokenizer: Any = load_tokenizer(BUNDLED, config := read_config(BUNDLED))
    one = Intake(config, tokenizer, 99).one(0, [1], SamplingParams(stop=stop, ignore_eos=True, max_tokens=90))
    feed(one, [token for special in (1, 2, 0) for token in (*tokenizer.encode("four", bos=False), special)])
    assert (one.text, one.finish_reason, one.tokens[-1]) == (" ".join(["four"] * n), "stop", last)


def test_what_ends_a_text_is_what_the_device_was_told_at_first() -> None:
    one = Intake(tiny_config(eos_ids=()), SimpleNamespace(eos_ids=(5,)), 999)  # type: ignore[arg-type]
    one.tokenizer = None  # once such a row went on for ever, as the device had ended it
    assert one.one(0, [1], SamplingParams()).eos_ids == {5}


def test_an_event_names_the_drafts_that_were_refused_before_the_texts_end() -> None:
    one = request(Pieces("a", "b", "c", "d", "e"), max_tokens=9, stop="d")
    assert one.commit([0, 1], ["streaming", "target"], 3, 1, [8, 9]).refused == [8, 9]
    assert one.commit([2, 3, 4], ["streaming", "streaming", "target"], 4, 2, [8, 9]).refused == []


# ---- rounds of several tokens, and the account of drafts -------------------------------------------------------------


def test_a_piece_is_the_text_that_its_token_made_certain() -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=20, stop="END")
    event = commit(one, [*"é!EN".encode(), ord("x")], judged=5)
    assert event.pieces == ["", "é", "!", "", "", "ENx"]
    assert event.text == "é!ENx" == one.text


HI, STOP = [*b"hi", EOS, *b"!?"], {"stop": "END", "max_tokens": 99}
# texts of tokens 0, 1, ..., or the ids of bytes; parameters and drafts judged -> tokens kept, text, drafted, reason
ENDS: list[tuple[list[Any], dict[str, Any], int, int, str, int, str]] = [
    (["one ", "END", " two", " three", "."], STOP, 4, 2, "one ", 2, "stop"),  # whole in one draft
    (["a", "E", "N", "D", "b"], STOP, 4, 4, "a", 4, "stop"),  # over three, the last draft completes it
    (["a", "bEN", "D", "c", "d"], STOP, 4, 3, "ab", 3, "stop"),
    (["END", "a", "b", "c", "d"], STOP, 4, 1, "", 1, "stop"),
    (["a", "EN", "D"], STOP, 4, 3, "a", 4, "stop"),  # the target's own token completes it: the round is whole
    (["a", "b", "c", "d"], {"max_tokens": 2}, 3, 2, "ab", 2, "length"),
    (["a", "b", "c", "d"], {"max_tokens": 4}, 3, 4, "abcd", 3, "length"),
    (HI, {"max_tokens": 20}, 4, 3, "hi", 3, "stop"),  # the fourth draft stood past the end
    (HI, {"max_tokens": 5, "ignore_eos": True}, 4, 5, "hi!?", 4, "length"),
]


@pytest.mark.parametrize(("said", "params", "judged", "kept", "text", "drafted", "reason"), ENDS)
def test_what_ends_a_text_among_accepted_drafts_cuts_the_round_there(
    said: list[Any], params: dict[str, Any], judged: int, kept: int, text: str, drafted: int, reason: str
) -> None:
    """What is past the end does not count."""
    one = request(StreamDecoder(ByteTokenizer()) if said is HI else Pieces(*said), **params)
    tokens = HI if said is HI else list(range(len(said)))
    event, accepted = commit(one, tokens, judged=judged), min(kept, len(said) - 1)
    sources = ["streaming"] * accepted + ["target"] * (kept - accepted)
    assert (event.tokens, event.text, event.sources) == (tokens[:kept], text, sources)
    assert (event.drafted, event.accepted, one.finish_reason) == (drafted, accepted, reason)
    completion = one.completion()
    assert event.completion == completion
    assert (completion.text, completion.tokens) == (text, tokens[:kept])
    stats = completion.stats
    assert (stats.drafted, stats.accepted, stats.rounds, stats.emitted) == (drafted, accepted, 1, kept)


def test_a_text_ends_the_same_however_its_tokens_come_in_rounds() -> None:
    texts, stop = ["x", "a", "ab", "aba", "b", "c!", "yz"], "abc!"
    for cuts in range(2 ** (len(texts) - 1)):
        one = request(Pieces(*texts), max_tokens=99, stop=stop)
        shown, start = "", 0
        for at in range(1, len(texts) + 1):
            if (at == len(texts) or cuts >> (at - 1) & 1) and not one.finish_reason:
                event = commit(one, list(range(start, at)), judged=at - start)
                shown, kept = shown + event.text, len(event.tokens)
                # within the drafts that were accepted, or by the target's own token
                assert (event.drafted, event.accepted) == ((kept, kept) if at == 7 else (at - start, kept - 1))
                start = at
        assert shown == one.text == "xaabab" and one.tokens == [0, 1, 2, 3, 4, 5]


def test_drafts_are_counted_by_their_position_in_the_round() -> None:
    one, lengths = request(None, max_tokens=8), []
    for judged, tokens in ((3, [1, 2]), (3, [3, 4, 5]), (1, [6]), (0, [7]), (0, [8])):
        lengths.append(one.length)
        commit(one, tokens, judged=judged)
    assert lengths == [2, 4, 7, 8, 9]  # where the pending token goes: of three prompt tokens the last one is pending
    stats = one.completion().stats
    assert stats.drafted_by_position == (3, 2, 2)
    assert stats.accepted_by_position == (2, 1, 0)  # as long as what was drafted
    assert json.loads(json.dumps(stats.as_dict())) == {
        "rounds": 5, "drafted": 7, "accepted": 3, "acceptance_rate": 3 / 7, "tokens_per_round": 8 / 5,
        "drafted_by_position": [3, 2, 2], "accepted_by_position": [2, 1, 0],
    }  # fmt: skip
    assert stats.emitted == 8
    assert CompletionStats().tokens_per_round == EngineStats().kv_bytes_per_token == 0.0  # nothing divides by nothing
