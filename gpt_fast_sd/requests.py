"""One prompt on its way through the engine: what it may still emit, and when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .config import SamplingParams
from .stats import CompletionStats

if TYPE_CHECKING:
    from torch import Tensor

    from .prefill import Filling

Prompt = str | Sequence[int]


class Decoder(Protocol):
    """Turns tokens into text as far as it is settled."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Whatever is still held back."""
        ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished prompt.

    tokens end with the EOS token, or the one that completed a stop string, if that ended them; text holds neither.
    """

    index: int
    tokens: list[int]
    text: str
    finish_reason: str  # "stop": EOS or a stop string; "length": max_tokens
    stats: CompletionStats


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """What one round committed for one prompt. sources names who proposed each token: "target" or a draft policy.

    pieces holds the text that became certain with each token, text all of it; both may lag behind tokens (an unfinished
    character, a possible stop string). refused holds the drafts that the target judged and did not keep, in their
    order: the last token stands in the place of the first of them. completion comes with the last event.
    """

    index: int
    tokens: list[int]
    text: str
    pieces: list[str]
    sources: list[str]
    drafted: int  # drafts judged, and how many of them were accepted
    accepted: int
    refused: list[int] = field(default_factory=list)
    completion: Completion | None = None


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """One round of all rows, as it went; see Engine.on_round.

    seconds is its part of EngineStats.decode_seconds, draft_seconds and verify_seconds are parts of it (both 0 where
    the round was one CUDA graph); prefill_seconds came between the round before and this one. read holds, of each
    prompt by its index, the share of layers and kv heads that read each position in the last draft step, fp32 [S]; of
    a draft model those of its own cache. It is empty where nothing was drafted, and where the round was one CUDA graph.
    """

    gamma: int
    events: list[TokenEvent]
    seconds: float
    draft_seconds: float
    verify_seconds: float
    prefill_seconds: float
    read: dict[int, Tensor]


@dataclass
class Request:
    """A prompt, its parameters and its output so far."""

    index: int
    prompt: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    decoder: Decoder | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)  # by position in the round
    accepted: list[int] = field(default_factory=list)
    _held: str = ""  # settled text that may be the beginning of a stop string

    @property
    def length(self) -> int:
        """Positions committed once the last emitted token is fed: prompt and output, less that token."""
        return len(self.prompt) + len(self.tokens) - 1

    def commit(
        self,
        tokens: Sequence[int],
        sources: Sequence[str],
        judged: int = 0,
        accepted: int = 0,
        refused: Sequence[int] = (),
    ) -> TokenEvent:
        """Take the tokens of one round, up to the one that ends the text; finish_reason is set when one did.

        judged and accepted count the round's drafts, refused are those between; what is behind the end of the text does
        not count.
        """
        self.rounds += 1
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self._take(token))
            if self.finish_reason:
                break
        taken = len(pieces)
        if taken < len(tokens):  # a stop string ended the text among the accepted drafts
            judged, accepted, refused = min(judged, taken), min(accepted, taken), ()
        for counts, n in ((self.drafted, judged), (self.accepted, accepted)):
            counts.extend([0] * (n - len(counts)))
            for i in range(n):
                counts[i] += 1
        return TokenEvent(
            index=self.index, tokens=list(tokens[:taken]), text="".join(pieces), pieces=pieces,
            sources=list(sources[:taken]), drafted=judged, accepted=accepted, refused=list(refused),
            completion=self.completion() if self.finish_reason else None,
        )  # fmt: skip

    def _take(self, token: int) -> str:
        """Append one token; return the text that became certain."""
        self.tokens.append(token)
        ended = token in self.eos_ids and not self.params.ignore_eos
        piece = self.decoder.push([token]) if self.decoder and not ended else ""
        if ended:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.params.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason and self.decoder:
            piece += self.decoder.flush()
        shown = self._settle(piece)
        self.text += shown
        return shown

    def _settle(self, piece: str) -> str:
        """Text that can be shown: nothing of a stop string, nor of what may yet become one."""
        pending = self._held + piece
        stops = self.params.stop_strings
        found = [at for at in (pending.find(stop) for stop in stops) if at >= 0]
        if found:
            self.finish_reason, self._held = "stop", ""
            return pending[: min(found)]
        keep = 0 if self.finish_reason else max((_overlap(pending, stop) for stop in stops), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def completion(self) -> Completion:
        """The finished account."""
        assert self.finish_reason is not None
        stats = CompletionStats(
            rounds=self.rounds, emitted=len(self.tokens), drafted_by_position=tuple(self.drafted),
            accepted_by_position=tuple(self.accepted) + (0,) * (len(self.drafted) - len(self.accepted)),
        )  # fmt: skip
        return Completion(
            index=self.index, tokens=self.tokens, text=self.text, finish_reason=self.finish_reason, stats=stats
        )


class Waiting:
    """Requests in the order they came, each taken when a slot is free for it; `over` is set when no more will come."""

    def __init__(self, requests: Sequence[Request] | Iterator[Request | None]) -> None:
        """An iterator makes each request when it is asked for it; its None is no request now."""
        self.known = requests if isinstance(requests, Sequence) else ()  # before they are taken
        self.over = False
        self._rest = iter(requests)

    def take(self) -> Request | None:
        """The next one; None where there is none, now or any more."""
        try:
            return next(self._rest)
        except StopIteration:
            self.over = True
            return None


class Arrival:
    """A request whose slot is being filled, and what is prefilled for it: the target's cache, and a draft's own."""

    def __init__(self, slot: int, request: Request, fillings: Sequence[Filling]) -> None:
        self.slot, self.request, self.fillings = slot, request, fillings
        self.total = self.left

    @property
    def left(self) -> int:
        """Tokens that are still to be computed."""
        return sum(filling.left for filling in self.fillings)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
