"""One prompt's output: EOS, max_tokens and stop strings end it, and nothing is shown that may have to be taken back."""

from __future__ import annotations

from typing import Any

import pytest

from gpt_fast_sd import Completion, SamplingParams
from gpt_fast_sd.model import StreamDecoder
from gpt_fast_sd.requests import Decoder, Request
from tests.helpers import EOS, ByteTokenizer


class Pieces:
    """A decoder whose token i is the i-th of these texts."""

    def __init__(self, *texts: str, rest: str = "") -> None:
        self.texts, self.rest = texts, rest

    def push(self, ids: list[int]) -> str:
        return "".join(self.texts[i] for i in ids)

    def flush(self) -> str:
        return self.rest


def request(decoder: Decoder | None, **params: Any) -> Request:
    return Request(0, [1, 2, 3], SamplingParams(**params), frozenset({EOS}), decoder)


def feed(request: Request, tokens: list[int]) -> list[str]:
    """What is shown after each token, until the request ends."""
    shown = []
    for token in tokens:
        event = request.commit(token, "target")
        shown.append(event.text)
        if request.finish_reason:
            break
    return shown


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
        (["one ", "END", " two"], "END", ["one ", ""]),
        (["one E", "ND two"], "END", ["one ", ""]),
        (["a", "E", "N", "D", "b"], "END", ["a", "", "", ""]),
        (["xxEN", "ENDy"], "END", ["xx", "EN"]),  # what was held is shown once it cannot be the stop string
        (["aEND", "b"], "END", ["a"]),
        (["END"], "END", [""]),
        (["aEND", "b"], ["zzz", "END"], ["a"]),
        (["one two", " three"], ["three", "two"], ["one "]),
        (["one two three"], ["three", "two"], ["one "]),  # both in one piece: the first to come
        (["aa", "aa", "bc"], "aaabc", ["", "a", ""]),  # the held text begins the stop string again, one letter later
        (["\n", "\n", "x"], "\n\n", ["", ""]),
        (["日本", "語テ", "キスト"], "語テキ", ["日本", "", ""]),
    ],
)
def test_a_stop_string_ends_the_text_before_it(texts: list[str], stop: str | list[str], shown: list[str]) -> None:
    got, completion = run(texts, stop)
    assert got == shown
    assert completion.finish_reason == "stop"
    assert completion.tokens == list(range(len(shown)))  # the token that completed it included


@pytest.mark.parametrize(
    ("texts", "stop", "shown"),
    [
        (["a", "E", "N"], "END", ["a", "", "EN"]),  # the output ends before the stop string does
        (["EN", "EN", "X"], "END", ["", "EN", "ENX"]),
        (["stop", "ped"], "stops", ["", "stopped"]),
        (["a", "", "b"], "END", ["a", "", "b"]),
    ],
)
def test_held_text_is_shown_when_no_stop_string_comes(texts: list[str], stop: str, shown: list[str]) -> None:
    got, completion = run(texts, stop)
    assert got == shown
    assert completion.text == "".join(texts) and completion.finish_reason == "length"


def test_every_way_to_cut_a_text_into_pieces_stops_at_the_same_place() -> None:
    text, stops = "abcabdabcabcabd!xyz", ["abcabd!", "zzz"]
    for cuts in range(2 ** (len(text) - 1)):
        if cuts % 97:  # a sample of them, from no cut to a cut everywhere
            continue
        pieces, start = [], 0
        for at in range(1, len(text)):
            if cuts >> (at - 1) & 1:
                pieces.append(text[start:at])
                start = at
        _, completion = run([*pieces, text[start:]], stops)
        assert completion.text == "abcabdabc"


def test_max_tokens_ends_the_output() -> None:
    one = request(Pieces("a", "b", "c"), max_tokens=2)
    assert feed(one, [0, 1, 2]) == ["a", "b"]
    assert one.completion().finish_reason == "length" and one.completion().tokens == [0, 1]


def test_eos_ends_the_tokens_and_is_not_in_the_text() -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=9)
    assert feed(one, [*b"hi", EOS, *b"!"]) == ["h", "i", ""]
    completion = one.completion()
    assert (completion.tokens, completion.text, completion.finish_reason) == ([*b"hi", EOS], "hi", "stop")


def test_eos_is_not_in_the_text_even_where_it_has_one() -> None:
    one = Request(0, [1], SamplingParams(max_tokens=9), frozenset({1}), Pieces("a", "</s>"))
    assert feed(one, [0, 1]) == ["a", ""]


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=2)
    feed(one, [104, EOS])
    assert one.finish_reason == "stop"


def test_eos_shows_what_was_held_for_a_stop_string() -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=9, stop="END")
    assert feed(one, [*b"aEN", EOS]) == ["a", "", "", "EN"]


def test_ignored_eos_is_a_token_like_any_other() -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=4, ignore_eos=True)
    assert feed(one, [*b"h", EOS, *b"i!", 1]) == ["h", "", "i", "!"]
    assert one.completion().tokens == [*b"h", EOS, *b"i!"] and one.finish_reason == "length"


def test_an_unfinished_character_waits_for_its_bytes() -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=20)
    assert feed(one, [*"aé語".encode(), EOS]) == ["a", "", "é", "", "", "語", ""]


@pytest.mark.parametrize("end", [EOS, 0xE8])
def test_a_character_that_is_never_finished_is_shown_as_a_replacement(end: int) -> None:
    one = request(StreamDecoder(ByteTokenizer()), max_tokens=4)
    feed(one, [*b"ab", 0xE8, end])
    assert one.text == "ab\ufffd" + ("\ufffd" if end != EOS else "")


def test_a_stop_string_is_found_in_what_the_end_of_the_output_sets_free() -> None:
    one = request(Pieces("ab", "c", rest="de"), max_tokens=2, stop="cd")
    assert feed(one, [0, 1]) == ["ab", ""]
    assert one.finish_reason == "stop"


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    one = request(None, max_tokens=3)
    assert feed(one, [7, 8, 9]) == ["", "", ""]
    assert one.completion().tokens == [7, 8, 9] and one.completion().text == ""


def test_an_event_names_the_prompt_its_token_and_who_proposed_it() -> None:
    one = Request(5, [1], SamplingParams(max_tokens=2), frozenset(), Pieces("a", "b"))
    first, last = one.commit(0, "target"), one.commit(1, "streaming")
    assert (first.index, first.tokens, first.text, first.sources) == (5, [0], "a", ["target"])
    assert (last.index, last.tokens, last.text, last.sources) == (5, [1], "b", ["streaming"])
    assert first.completion is None and last.completion == one.completion()


def test_length_is_where_the_pending_token_goes() -> None:
    one = request(None, max_tokens=9)
    assert one.length == 2  # three prompt tokens, the last of them pending
    one.commit(7, "target")
    assert one.length == 3
