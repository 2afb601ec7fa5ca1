"""Runs to make pages of: told by hand, so that every token, refusal and view is known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.model import StreamDecoder
from gpt_fast_sd.serving.requests import Request, RoundEvent, TokenEvent
from gpt_fast_sd.serving.stats import EngineStats
from measuring import Recorder, Way, page
from tests.helpers import ByteTokenizer

NASTY = (
    "</script><script>document.title='broken'</script><!-- <b>&amp; \u2028\u2029 \x00\x07\x1b \u202eleft\u202c "
    "\"\\ '`${run} \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f642\U0001f468\u200d\U0001f469 __RUN__\n\tend"
)


class Pieces:
    """A tokenizer whose token i is the i-th text, which may be one that no UTF-8 can hold; and their decoder."""

    vocab_size, drops_first_space = 10_000, False

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[i] for i in ids)

    def flush(self) -> str:
        return ""

    def decode(self, ids: Sequence[int]) -> str:
        return self.push(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode("utf-8", "surrogatepass")


class Story:
    """One request told round by round, and what a recorder made of it."""

    def __init__(
        self,
        text: str,
        *,
        prompt: str = "Once",
        refused: bytes = b" no",
        sources: Sequence[str] = ("streaming",),
        timed: bool = True,
        title: str = "a run",
    ) -> None:
        """Three tokens per round, the last of them the target's own after refusing these bytes every other time."""
        tokenizer, ids = ByteTokenizer(bos_id=None), [*text.encode()]
        params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
        self.request = Request(0, [*prompt.encode()], params, frozenset(), StreamDecoder(tokenizer, [*prompt.encode()]))
        self.recorder = Recorder(tokenizer, [self.request.prompt], [params], sources)  # type: ignore[list-item]
        self.events: list[RoundEvent] = []
        self.stats = EngineStats()
        self.title = title
        for number, start in enumerate(range(0, len(ids), 3)):
            tokens, last = ids[start : start + 3], number % 2 == 0
            accepted = len(tokens) - 1
            drafts = [sources[i % len(sources)] for i in range(accepted)]
            length = self.request.length
            unkept = [*refused] if last else []
            event = self.request.commit(tokens, [*drafts, "target"], accepted + len(unkept), accepted, unkept)
            read = torch.zeros(length + 4)
            read[:4] = read[max(0, length - 8) :] = 1
            draft, verify = (0.04 + number % 5 / 100, 0.1) if timed else (0.0, 0.0)
            told = RoundEvent(
                gamma=2 + len(refused), events=[event], seconds=0.2, draft_seconds=draft, verify_seconds=verify,
                prefill_seconds=0.0 if number else 1.5, read={0: read} if timed else {},
            )  # fmt: skip
            self.events.append(told)
            self.recorder(told)
            self.stats.count(told.gamma, [event.drafted], [event.accepted])
            self.stats.row_rounds += 1
            self.stats.decode_tokens += len(tokens)
            self.stats.decode_seconds += 0.2
            self.stats.draft_seconds += draft
            self.stats.verify_seconds += verify

    def page(self) -> str:
        slower = EngineStats(decode_tokens=100, decode_seconds=20.0, rounds=100, row_rounds=100)
        ways = {"plain": Way.of([slower]), "speculative": Way.of([self.stats])}
        return page(self.recorder, self.title, ways=ways, facts=[("model", self.title)])


def a_round(*events: TokenEvent, read: dict[int, Tensor] | None = None, gamma: int = 1) -> RoundEvent:
    """A round of these events; what its times are cannot be read from a page by eye, so they are odd."""
    times = {"seconds": 123.456789, "draft_seconds": 23.456789, "verify_seconds": 99.999999}
    return RoundEvent(gamma=gamma, events=[*events], prefill_seconds=12.345678, read=read or {}, **times)


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


def page_of_one_token(text: str) -> str:
    """The page of a run that wrote the text as a single token, after it had refused the same one, behind the same."""
    recorder = recorder_of([text], [0])
    recorder(a_round(an_event([text], drafted=1)))
    return page(recorder, text, ways={"speculative": Way.of([EngineStats()])}, facts=[(text, text)], verdict=[text])
