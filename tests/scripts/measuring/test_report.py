"""The page of a run holds what the run did, whatever its texts hold, in a few hundred KB at most."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.model import StreamDecoder
from gpt_fast_sd.serving.requests import Request, RoundEvent, TokenEvent
from gpt_fast_sd.serving.stats import EngineStats
from measuring import Recorder, Way, page
from measuring.report import DIGITS, MOST_BYTES, MOST_REQUESTS, MOST_ROUNDS, WIDTH, digits, in_script
from tests.helpers import ByteTokenizer, random_ids, tiny_engine

SCRIPT = re.compile(r'<script type="application/json" id="run">(.*?)</script>', re.DOTALL)
NASTY = (
    "</script><script>document.title='broken'</script><!-- <b>&amp; \u2028\u2029 \x00\x07\x1b \u202eleft\u202c "
    "\"\\ '`${run} \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f642\U0001f468\u200d\U0001f469 __RUN__\n\tend"
)


class Pieces:
    """A tokenizer whose token i is the i-th text, which may be one that no UTF-8 can hold."""

    vocab_size, drops_first_space = 10_000, False

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[i] for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode("utf-8", "surrogatepass")


def story(text: str, *, prompt: str = "Once", refused: bytes = b" no", timed: bool = True) -> str:
    """The page of one request: three tokens per round, the last of them the target's own.

    Every other time it took the place of a draft of these bytes.
    """
    tokenizer, ids = ByteTokenizer(bos_id=None), [*text.encode()]
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
    request = Request(0, [*prompt.encode()], params, frozenset(), StreamDecoder(tokenizer, [*prompt.encode()]))
    recorder = Recorder(tokenizer, [request.prompt], [params], ["streaming"])
    for number, start in enumerate(range(0, len(ids), 3)):
        tokens, unkept, length = ids[start : start + 3], [*refused] * (number % 2 == 0), request.length
        accepted = len(tokens) - 1
        sources = ["streaming"] * accepted + ["target"]
        event = request.commit(tokens, sources, accepted + len(unkept), accepted, unkept)
        read = torch.zeros(length + 4)
        read[:4] = read[max(0, length - 8) :] = 1
        draft, verify = (0.04 + number % 5 / 100, 0.1) if timed else (0.0, 0.0)
        times = {"seconds": 0.2, "draft_seconds": draft, "verify_seconds": verify, "prefill_seconds": 0.0}
        recorder(RoundEvent(gamma=2 + len(refused), events=[event], read={0: read} if timed else {}, **times))
    return page(recorder, "a run", ways={name: Way.of([EngineStats()]) for name in ("plain", "speculative")})


def a_round(*events: TokenEvent, read: dict[int, Tensor] | None = None, gamma: int = 1) -> RoundEvent:
    times = {"seconds": 123.456789, "draft_seconds": 23.456789, "verify_seconds": 99.999999, "prefill_seconds": 1.2}
    return RoundEvent(gamma=gamma, events=[*events], read=read or {}, **times)


def an_event(pieces: Sequence[str], *, drafted: int = 0, accepted: int = 0, index: int = 0) -> TokenEvent:
    """What a round wrote: token i is the i-th piece; what was refused is the first token, again and again."""
    sources = ["streaming"] * accepted + ["target"] * (len(pieces) - accepted)
    return TokenEvent(
        index=index, tokens=[*range(len(pieces))], text="".join(pieces), pieces=[*pieces], sources=sources,
        drafted=drafted, accepted=accepted, refused=[0] * (drafted - accepted),
    )  # fmt: skip


def recorder_of(pieces: Sequence[str], *prompts: list[int], most: int = 9, drafter: str = "streaming") -> Recorder:
    """A recorder of a run on these prompts, each of at most so many tokens."""
    return Recorder(Pieces(pieces), prompts, [SamplingParams(max_tokens=most)] * len(prompts), [drafter])  # type: ignore[arg-type]


def run_of(html: str) -> dict[str, Any]:
    """What a page holds."""
    (text,) = SCRIPT.findall(html)
    run: dict[str, Any] = json.loads(text)
    return run


@pytest.mark.parametrize("policy", ["streaming", "hierarchy", "off"])
def test_a_page_holds_the_printed_texts_and_counts_that_agree_with_the_stats(policy: str) -> None:
    draft = DraftConfig(policy="off") if policy == "off" else DraftConfig(policy=policy, gamma=3, budget=64)
    one = tiny_engine(draft, tokenizer=ByteTokenizer(), max_seq_len=256)
    prompts = [random_ids(n, seed=n) for n in (150, 20, 90)]
    params = [SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True)] * 3
    recorder = Recorder(one.tokenizer, prompts, params, one.policy.proposers if one.policy else ())
    one.on_round = recorder
    completions = one.generate(prompts, params)
    run = run_of(page(recorder, "a run", ways={"speculative": Way.of([one.stats])}))
    stats = one.stats
    assert run["positions"] == [stats.accepted_by_position, stats.drafted_by_position]
    assert run["n_rounds"] == len(run["rounds"]) == stats.rounds
    assert sum(ms for _, ms, *_ in run["rounds"]) == pytest.approx(1e3 * stats.decode_seconds, rel=1e-2)
    parts = [part for request in run["requests"] for part in request["rounds"]]
    assert sum(len(pieces) for _, pieces, *_ in parts) == stats.decode_tokens == 120
    assert sum(drafted for *_, drafted, _ in parts) == stats.drafted
    assert sum(len(refused) for *_, refused in parts) == stats.drafted - stats.accepted
    assert sum(source > 0 for _, _, sources, *_ in parts for source in sources) == stats.accepted
    assert run["sources"] == ["target", *(one.policy.proposers if one.policy else ())]
    assert run["left_out"] == []
    for request, completion in zip(run["requests"], completions, strict=True):
        assert "".join(piece for _, pieces, *_ in request["rounds"] for piece in pieces) == completion.text
        assert (request["tokens"], request["finish"]) == (len(completion.tokens), completion.finish_reason)
        assert (request["views"] is None) == (policy == "off")


def test_a_character_stands_where_its_last_byte_came_and_a_refused_one_as_it_would_have_been() -> None:
    (request,) = run_of(story("a\U0001f642b"))["requests"]
    assert [part[1] for part in request["rounds"]] == [["a", "", ""], ["", "\U0001f642", "b"]]
    html = story("a\u00e9", refused=b"\xa8x\xc3")  # behind a and C3, where the target wrote A9; C3 ends no character
    (request,) = run_of(html)["requests"]
    assert request["rounds"][0][4] == ["\u00e8", "x", "#195"]


def test_a_token_that_would_end_the_script_is_one_of_its_texts() -> None:
    """Nor one that was refused, the end of a prompt, a title, a fact or a verdict."""
    recorder, ways = recorder_of([NASTY], [0]), {"speculative": Way.of([EngineStats()])}
    recorder(a_round(an_event([NASTY], drafted=1)))
    html, plain = page(recorder, NASTY, ways=ways, facts=[(NASTY, NASTY)], verdict=[NASTY]), story("abc")
    assert all(html.count(mark) == plain.count(mark) for mark in ("<script", "</script", "<!--"))
    (held,) = SCRIPT.findall(html)
    assert held.isascii() and not set("<>&") & set(held)
    run = run_of(html)
    assert (run["title"], run["facts"]) == (NASTY, [[NASTY, NASTY]])
    (request,) = run["requests"]
    assert request["rounds"] == [[0, [NASTY], [0], 1, [NASTY]]] and request["ending"] == NASTY


def test_json_in_a_script_refuses_what_is_not_json() -> None:
    assert in_script({"a": "</x>&\u2028"}) == '{"a":"\\u003c/x\\u003e\\u0026\\u2028"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        in_script(float("nan"))


@pytest.mark.parametrize("shape", [(1, 1200), (60, 60), (8, 300)], ids=str)
@pytest.mark.parametrize("piece", ["a", " \u2028<&>\U0001f642" * 12], ids=["short", "long"])
def test_a_page_stays_small_and_says_what_it_leaves_out(shape: tuple[int, int], piece: str) -> None:
    """Of 17 such tokens for each request a round, of which the drafts of every second are refused, all views full."""
    n_requests, n_rounds = shape
    recorder = recorder_of([piece] * 17, *[[0] * 5000] * n_requests, most=17 * n_rounds)
    read = dict.fromkeys(range(n_requests), torch.rand(5000 + 17 * n_rounds))
    for number in range(n_rounds):
        kept = 0 if number % 2 else 16
        events = [an_event([piece] * (kept + 1), drafted=16, accepted=kept, index=i) for i in range(n_requests)]
        recorder(a_round(*events, read=read, gamma=16))
    facts = [(piece * 100, piece * 100)] * 12
    html = page(recorder, piece * 1000, ways={"speculative": Way.of([EngineStats()] * 3)}, facts=facts)
    assert len(html.encode("utf-8")) <= MOST_BYTES
    run = run_of(html)
    said = " ".join(run["left_out"])
    assert (f"first {MOST_REQUESTS} of {n_requests}" in said) == (n_requests > MOST_REQUESTS)
    assert (f"first {MOST_ROUNDS:,} of {n_rounds:,}" in said) == (n_rounds > MOST_ROUNDS)
    cut = [request for request in run["requests"] if len(request["rounds"]) < request["n_rounds"]]
    assert bool(cut) == (f"{len(cut):,} of them are cut off" in said)
    assert (cut or piece == "a") and all(request["n_rounds"] == n_rounds for request in run["requests"])
    assert run["positions"][1] == [n_requests * n_rounds] * 16  # the bars are of all rounds and requests
    for request in run["requests"]:
        assert all(len(line[1]) == len(request["views"]["sum"]) <= WIDTH for line in request["views"]["rounds"])
        assert (len(request["views"]["rounds"]) < n_rounds) == ("not every round has a line" in said)


def test_only_nothing_at_all_is_drawn_as_nothing() -> None:
    shares = np.array([0.0, 1e-6, 1 / 63, 0.5, 1.0])
    assert [bytes(DIGITS).index(digit.encode()) for digit in digits(shares)] == [0, 1, 1, 32, 63]
    assert len(set(bytes(DIGITS))) == 64


def test_stretches_of_a_view_hold_the_share_of_their_positions_that_was_read() -> None:
    (request,) = run_of(story("x" * 9, prompt="p" * 991))["requests"]
    views = request["views"]
    assert views["length"] == 1000 and len(views["sum"]) == WIDTH and views["every"] == 1
    number, line, entries = views["rounds"][0]
    assert (number, entries) == (0, 4 + 12)
    values = [bytes(DIGITS).index(digit.encode()) for digit in line]
    edges = [i * 1000 // WIDTH for i in range(WIDTH + 1)]
    read = {*range(4), *range(982, 994)}  # 990 positions were committed, the next four are the round's own
    for i, value in enumerate(values):
        here = range(edges[i], edges[i + 1])
        assert value == int(np.ceil(63 * len(read & set(here)) / len(here) - 1e-9))


def test_a_text_that_ends_early_is_not_drawn_as_long_as_it_might_have_been_nor_are_keys_that_nobody_reads() -> None:
    found = []
    for drafter, read in (("full", torch.ones(100)), ("lookup", torch.zeros(100))):
        recorder = recorder_of(["a"], [0] * 100, most=900, drafter=drafter)
        recorder(a_round(an_event(["a"], drafted=1), read={0: read}))
        found.append(recorder.as_dict([0])["requests"][0]["views"])
    views, none = found
    assert none is None
    assert 101 <= views["length"] < 101 + 1000 / WIDTH + 1
    assert len(views["sum"]) == len(views["rounds"][0][1]) < WIDTH


def test_a_run_of_cuda_graphs_says_that_its_parts_were_not_seen() -> None:
    run = run_of(story("abcdef", timed=False))
    assert run["whole"] and "CUDA graph" in run["left_out"][0]


def test_a_page_of_a_run_of_nothing_too_names_no_other_file_and_no_address() -> None:
    nothing = page(Recorder(None, [], []), "nothing", ways={"plain": Way.of([EngineStats()])})
    assert run_of(nothing)["requests"] == run_of(nothing)["rounds"] == run_of(nothing)["left_out"] == []
    html = nothing + story("abc")
    assert not re.search(r"(?i)https?:|//[a-z]|@import|url\(|\bsrc=|<link(?! rel=\"icon\" href=\"data:,\")", html)
    assert html.count("default-src 'none'") == 2
