"""Prompts on their way through the engine: checked, waiting, arriving, and what each may still emit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from gpt_fast_sd.model import ModelConfig, StreamDecoder, Tokenizer

from ..config import MAX_GAMMA, MOST_LOGPROBS, SamplingParams
from .logprobs import TokenLogprobs
from .penalties import Penalties
from .stats import CompletionStats

if TYPE_CHECKING:
    from torch import Tensor

    from ..prefill import Filling
    from .lookup_trials import LookupTrials

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt | tuple[Prompt, SamplingParams]]
Last = int | Sequence[int | None] | None  # tokens of each text
Params = SamplingParams | Sequence[SamplingParams] | None


class Decoder(Protocol):
    """Turns tokens into text, up to what is certain."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Whatever is still held back."""
        ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished prompt.

    tokens end with the EOS token, or with the one that completed a stop string, if that ended them; text has neither.
    logprobs has an entry for each token, if SamplingParams.logprobs asks for them.
    """

    index: int
    tokens: list[int]
    text: str
    finish_reason: str  # "stop": EOS or a stop string; "length": max_tokens; "cancelled": see Submission.cancel
    stats: CompletionStats
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """What one round committed for one prompt. sources names who proposed each token: "target" or a draft policy.

    pieces holds the text that became certain with each token, text all of it; both may lag behind tokens (an unfinished
    character, a possible stop string). refused holds the drafts that the target judged and did not keep, in their
    order: the last token is in the place of the first of them. completion comes with the last event.
    """

    index: int
    tokens: list[int]
    text: str
    pieces: list[str]
    sources: list[str]
    drafted: int  # drafts judged, and how many of them were accepted
    accepted: int
    refused: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if asked for
    completion: Completion | None = None


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """The record of one round of all rows; see Engine.on_round.

    seconds is its part of EngineStats.decode_seconds, draft_seconds and verify_seconds are parts of it (both 0 if the
    round was one CUDA graph); prefill_seconds passed between the round before and this one. read holds, for each
    prompt by its index, the share of layers and kv heads that read each position in the last draft step, fp32 [S]; for
    a draft model, those of its own cache. It is empty if nothing was drafted, or if the round was one CUDA graph.
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
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)  # by position in the round
    accepted: list[int] = field(default_factory=list)
    failed: tuple[int, BaseException] | None = None  # at which place of the round its processor failed, and how
    lookup: LookupTrials | None = None  # what lookup would draft, if that is counted
    _held: str = ""  # certain text that may be the beginning of a stop string

    @property
    def length(self) -> int:
        """Positions committed once the last emitted token is fed: prompt and output, less that token."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def may_keep(self) -> int:
        """Drafts that it may keep in a round."""
        return MAX_GAMMA if self.params.max_drafts is None else min(self.params.max_drafts, MAX_GAMMA)

    def commit(
        self,
        tokens: Sequence[int],
        sources: Sequence[str],
        judged: int = 0,
        accepted: int = 0,
        refused: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenEvent:
        """Take the tokens of one round, up to the one that ends the text; finish_reason is set if one did.

        judged and accepted count the round's drafts, refused are the others; drafts past the end of the text do not
        count.
        """
        self.rounds += 1
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self._take(token))
            if self.finish_reason:
                break
        taken = len(pieces)
        self.logprobs += logprobs[:taken]
        if taken < len(tokens):  # a stop string ended the text among the accepted drafts
            judged, accepted, refused = min(judged, taken), min(accepted, taken), ()
        for counts, n in ((self.drafted, judged), (self.accepted, accepted)):
            counts.extend([0] * (n - len(counts)))
            for i in range(n):
                counts[i] += 1
        return TokenEvent(
            index=self.index, tokens=list(tokens[:taken]), text="".join(pieces), pieces=pieces,
            sources=list(sources[:taken]), drafted=judged, accepted=accepted, refused=list(refused),
            logprobs=list(logprobs[:taken]),
            completion=self.completion() if self.finish_reason else None,
        )  # fmt: skip

    def ends_at(self, token: int) -> bool:
        """Whether this token ends the text."""
        return token in (self.params.stop_token_ids or ()) or (token in self.eos_ids and not self.params.ignore_eos)

    def cancel(self) -> TokenEvent:
        """End it with the tokens it has."""
        self.finish_reason = "cancelled"
        shown = self._settle(self.decoder.flush() if self.decoder else "")
        self.text, self.finish_reason = self.text + shown, "cancelled"  # not "stop", though the end may show one
        return TokenEvent(
            index=self.index, tokens=[], text=shown, pieces=[], sources=[], drafted=0, accepted=0,
            completion=self.completion(),
        )  # fmt: skip

    def _take(self, token: int) -> str:
        """Append one token; return the text that became certain."""
        self.tokens.append(token)
        ended = self.ends_at(token)
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
        """Text that can be shown: no part of a stop string, nor of what may yet become one."""
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
            index=self.index, tokens=self.tokens, text=self.text, finish_reason=self.finish_reason, stats=stats,
            logprobs=self.logprobs,
        )  # fmt: skip


class Intake:
    """Makes requests from prompts, for one model and one row length; every error is raised before any work.

    A prompt is a text or a list of token ids, alone or as (prompt, SamplingParams).
    """

    def __init__(
        self, model: ModelConfig, tokenizer: Tokenizer | None, max_seq_len: int, *, is_alone: bool = True
    ) -> None:
        """is_alone: whether one process holds the model."""
        self.is_alone = is_alone
        self.tokenizer, self.vocab_size, self.max_seq_len = tokenizer, model.vocab_size, max_seq_len
        # the tokens that end a text: the model's or, if it names none, the tokenizer's; the device has them, too
        self.eos_ids = model.eos_ids or (tokenizer.eos_ids if tokenizer else ())

    def all(self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
        """A request per prompt, params one for all or one each; ValueError for the first that cannot run."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(prompts, Sequence):
            raise ValueError(
                f"prompts must be a list of texts or of lists of token ids, got {' '.join(repr(prompts).split()):.80}"
            )
        if params is None or isinstance(params, SamplingParams):
            return [self.one(i, *_apart(prompt, params)) for i, prompt in enumerate(prompts)]
        if not isinstance(params, Sequence):
            raise ValueError(f"params must be a SamplingParams, or a list of one for each prompt, got {params!r:.80}")
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need one SamplingParams, or one each, got {len(params)}")
        twice = next((i for i, prompt in enumerate(prompts) if _brings_params(prompt)), None)
        if twice is not None:
            raise ValueError(f"prompt {twice} has its own SamplingParams, and params has some for it, too")
        return [self.one(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]

    def params(self, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        """Those of requests to come, one or several; ValueError if they are something else."""
        several = [] if params is None else [params] if isinstance(params, SamplingParams) else params
        if not (isinstance(several, Sequence) and all(isinstance(one, SamplingParams) for one in several)):
            raise ValueError(f"params must be a SamplingParams, or a list of them, got {params!r:.80}")
        return list(several)

    def each(self, prompts: Iterable[Any], params: SamplingParams | None) -> Iterator[Request | None]:
        """Each request is made, and its ValueError raised, when it is taken; None means no prompt now."""
        index = 0
        for prompt in prompts:
            yield None if prompt is None else self.one(index, *_apart(prompt, params))
            index += prompt is not None

    def queue(self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None) -> Waiting:
        """Requests of a list, all made at once, or of any other iterable; see Engine.stream."""
        if isinstance(prompts, Sequence):  # a text is one
            return Waiting(self.all(prompts, params))
        if not isinstance(prompts, Iterable):
            raise ValueError(
                f"prompts must be a list of texts or of lists of token ids, got {' '.join(repr(prompts).split()):.80}"
            )
        if not (params is None or isinstance(params, SamplingParams)):
            raise ValueError("prompts that are not a list take one SamplingParams, or come as (prompt, SamplingParams)")
        return Waiting(self.each(prompts, params))

    def one(self, index: int, prompt: object, params: object) -> Request:
        """The request of one prompt."""
        name = f"prompt {index}"
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} needs SamplingParams, got {params!r}")
        ids = self.encoded(prompt, name)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"{name} has stop strings, but this model has no tokenizer to find them with")
        if params.processor is not None and not self.is_alone:
            raise ValueError(f"{name} has a processor, which changes whole logits: ranks that hold a model have parts")
        if isinstance(params.processor, Penalties):
            params = replace(params, processor=params.processor.behind(ids, self.vocab_size))
        self.checked([0, *(params.stop_token_ids or ())], f"{name}'s stop_token_ids")
        params = self._stopping(params)
        total = len(ids) + params.max_tokens
        if total > self.max_seq_len:
            raise ValueError(
                f"{name} has {len(ids):,} tokens and max_tokens is {params.max_tokens:,}: together {total:,}, "
                f"over max_seq_len {self.max_seq_len:,}"
            )
        decoder = StreamDecoder(self.tokenizer, ids) if self.tokenizer else None
        return Request(index, ids, params, frozenset(self.eos_ids), decoder)

    def _stopping(self, params: SamplingParams) -> SamplingParams:
        """These, where a stop string that is a special token means it, as such a token adds no text."""
        tokenizer = self.tokenizer
        special = [stop for stop in params.stop_strings if stop in getattr(tokenizer, "special", ())]
        if tokenizer is None or not special:
            return params
        last = [token for stop in special for token in tokenizer.encode(stop, bos=False)[-1:]]  # behind a space, maybe
        ids = [token for token in last if not tokenizer.token_bytes(token)]
        return replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ids])

    def encoded(self, prompt: object, name: str) -> list[int]:
        """Token ids of a text, or those given, see checked."""
        if isinstance(prompt, str):
            if prompt and self.tokenizer is None:
                raise ValueError(f"{name} is text, but this model has no tokenizer: give token ids")
            prompt = self.tokenizer.encode(prompt) if prompt and self.tokenizer else []
        return self.checked(prompt, name)

    def checked(self, tokens: Any, name: str) -> list[int]:
        """Token ids of the vocabulary, at least one; the ValueError calls them by this name."""
        try:
            if isinstance(tokens, bytes | bytearray | Mapping | Set):  # which have whole numbers, but are no text
                raise TypeError
            given = list(tokens)
            ids = [operator.index(token) for token in given]
            if any(isinstance(token, bool) for token in given):
                raise TypeError
        except TypeError:
            got = " ".join(repr(tokens).split())[:80]
            raise ValueError(f"{name} must be a text or a list of whole token ids, got {got}") from None
        if not ids:
            raise ValueError(f"{name} is empty: give it at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name} holds token id {wrong}, the vocabulary goes from 0 to {self.vocab_size - 1}")
        return ids

    def scored(self, tokens: Any, last: Any, name: str = "tokens", first: int = 0) -> tuple[list[int], int]:
        """Something is wanted of the last tokens of a text, or (None) of all from the first on -> ids, of how many."""
        ids = self.encoded(tokens, name)
        if len(ids) > self.max_seq_len + first:  # of a scored text the last token is not fed
            raise ValueError(f"{name}: {len(ids):,} tokens do not fit, max_seq_len is {self.max_seq_len:,}")
        if len(ids) == first:
            raise ValueError(f"{name} is one token, and nothing precedes it: give it at least two")
        if last is not None and not (type(last) is int and 1 <= last <= len(ids) - first):
            which = (
                f"{len(ids):,} tokens given" if not first else f"{len(ids) - first:,} tokens of {name} behind the first"
            )
            got = " ".join(repr(last).split())[:80]
            raise ValueError(f"last must be a whole number from 1 to the {which}, got {got}")
        return ids, len(ids) - first if last is None else last

    def texts(self, texts: Any, last: Any, top: Any) -> list[tuple[list[int], int]]:
        """Texts to be scored, last one for all or one each -> of each its ids, and how many are scored."""
        if type(top) is not int or not 0 <= top <= MOST_LOGPROBS:
            raise ValueError(f"top must be a whole number from 0 to {MOST_LOGPROBS}, got {top!r:.80}")
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            got = " ".join(repr(texts).split())[:80]
            raise ValueError(f"texts must be a list of texts or of lists of token ids, got {got}")
        if not (last is None or type(last) is int or isinstance(last, Sequence)) or isinstance(last, str | bytes):
            got = " ".join(repr(last).split())[:80]
            raise ValueError(f"last must be a whole number, or a list of one for each text, got {got}")
        each = last if isinstance(last, Sequence) else [last] * len(texts)
        if len(each) != len(texts):
            raise ValueError(f"{len(texts)} texts need one last, or one each, got {len(each)}")
        return [self.scored(text, n, f"text {i}", 1) for i, (text, n) in enumerate(zip(texts, each, strict=True))]


class Waiting:
    """Requests in the order they came, each taken when a slot is free for it; `over` is set when no more will come."""

    def __init__(self, requests: Sequence[Request] | Iterator[Request | None]) -> None:
        """An iterator makes each request when it is taken; None from it means no request now."""
        self.known = requests if isinstance(requests, Sequence) else ()  # before they are taken
        self.over = False
        self._rest = iter(requests)
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # the engine waits in it

    def take(self) -> Request | None:
        """The next one; None if there is none now, or no more."""
        try:
            with self.around():
                return next(self._rest)
        except StopIteration:
            self.over = True
            return None


class Arrival:
    """A request whose slot is being filled, and the caches being filled for it: the target's, and a draft's own."""

    def __init__(self, slot: int, request: Request, fillings: Sequence[Filling]) -> None:
        self.slot, self.request, self.fillings = slot, request, fillings
        self.total = self.left

    @property
    def left(self) -> int:
        """Tokens that are still to be computed."""
        return sum(filling.left for filling in self.fillings)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _brings_params(prompt: object) -> bool:
    """Whether it is (prompt, SamplingParams)."""
    return isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], SamplingParams)


def _apart(prompt: Any, params: SamplingParams | None) -> tuple[Any, SamplingParams]:
    """A prompt, with its own parameters if it has them, else these (None: the default)."""
    return (prompt[0], prompt[1]) if _brings_params(prompt) else (prompt, params or SamplingParams())
