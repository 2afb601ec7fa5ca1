"""Prompts as token ids: texts, conversations and the lines of a JSONL file, as generate.py and batch.py take them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt_fast_sd import Completion, Engine, SamplingParams, TokenEvent
from gpt_fast_sd.model import CheckpointError, ModelConfig, StreamDecoder, Tokenizer
from gpt_fast_sd.serving import Penalties
from gpt_fast_sd.serving.logprobs import TokenLogprobs
from inputs.prompts import read_text
from inputs.sources import OURS, as_ours, prompts_of

Record = dict[str, Any]
NOTHING = TokenLogprobs(0.0)  # of a token that nothing precedes
LONGEST_LINE = 2**26  # bytes, also of a request: more than any model has positions for
PER_PROMPT = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "max_drafts",
              "stop_token_ids", "logprobs")  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """Turns texts and records into token ids; ValueError that names where they come from.

    chat: texts are user messages of the model's chat template. before: a document that precedes every prompt.
    parse_special: special tokens written out in messages are read as such, and not as text. fields: see as_ours.
    """

    tokenizer: Tokenizer | None
    chat: bool = False
    before: str = ""
    parse_special: bool = False
    fields: Sequence[str] = ()

    def text(self, text: str, where: str) -> list[int]:
        """A text as it is, or as a user message."""
        if not text:
            raise ValueError(f"{where} is empty: give it some text to continue")
        if self.tokenizer is None:
            raise ValueError(f"{where} is text, but this model has no tokenizer: give token ids")
        text = self.before + text
        with naming(where):
            if self.chat:
                return self.tokenizer.chat([{"role": "user", "content": text}], parse_special=self.parse_special)
            return self.tokenizer.encode(text)

    def record(self, record: object, where: str) -> list[int]:
        """The prompt of one JSONL line."""
        record = checked(as_ours(record, where, self.fields), where)
        if self.before and "tokens" in record:
            raise ValueError(f"{where} has tokens, and --document stands before texts: give a prompt or messages")
        if "tokens" in record:
            return list(record["tokens"])
        if "messages" in record:
            if self.tokenizer is None:
                raise ValueError(f"{where} has messages, but this model has no tokenizer: give token ids")
            with naming(where):
                return self.tokenizer.chat(self._behind(record["messages"]), parse_special=self.parse_special)
        return self.text(record["prompt"], where)

    def _behind(self, messages: Any) -> Any:
        """A conversation with the document at the head of its system message, which it is given where it has none."""
        if not self.before:
            return messages
        if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
            raise ValueError(f"messages must be a list of objects with role and content, got {messages!r:.80}")
        match messages:
            case [{"role": "system", "content": str(content)} as first, *rest]:
                return [{**first, "content": self.before + content}, *rest]
        return [{"role": "system", "content": self.before.rstrip("\n")}, *messages]


def checked(record: Record, where: str) -> Record:
    """The record, if a line may hold it, whatever the model; ValueError."""
    allowed = {*OURS, *PER_PROMPT, *Penalties.NAMES, "speculate", "id", "n"}
    if len({*OURS} & set(record)) != 1:
        raise ValueError(f"{where} must be a JSON object with exactly one of prompt, tokens and messages")
    if unknown := sorted(set(record) - allowed):
        known = f"known are {', '.join(sorted(allowed))}; --fields reads what it names and leaves the rest"
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}; {known}")
    ids = record.get("tokens", [])
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{where}: tokens must be a list of whole numbers")
    if not isinstance(record.get("prompt", ""), str):
        raise ValueError(f"{where}: prompt must be a text, got {record['prompt']!r}")
    return record


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix errors about a text with where it comes from; a CheckpointError names its own file."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def own(record: Record) -> Record:
    """The sampling parameters that a line sets for itself, if its form is ours; speculate false: max_drafts 0."""
    if record.keys().isdisjoint(OURS):
        return {}
    found = {key: record[key] for key in PER_PROMPT if key in record}
    if penalties := Penalties.of(record):
        found["processor"] = penalties
    if "speculate" in record:
        if not isinstance(record["speculate"], bool) or "max_drafts" in record:
            raise ValueError(
                f"speculate is true or false, and stands without max_drafts; got {record['speculate']!r:.60}"
            )
        found["max_drafts"] = None if record["speculate"] else 0
    return found


def n_of(record: Record) -> int | None:
    """How many completions a line asks for, if its form is ours and it does."""
    return None if record.keys().isdisjoint(OURS) else record.get("n")


def wanted(record: Record, common: SamplingParams) -> list[SamplingParams]:
    """The parameters of each continuation that a line asks for, common's where it says nothing; ValueError."""
    n = n_of(record)
    return replace(common, **own(record)).samples(1 if n is None else n)


def read_document(path: Path | None) -> str:
    """The text before every prompt, with a blank line after it; empty without a file."""
    if path is None:
        return ""
    before = f"{read_text(path)}\n\n"
    if not before.strip():
        raise ValueError(f"--document {path} is empty: give it some text, or leave it out")
    return before


def as_record(completion: Completion) -> Record:
    """A completion as JSON; logprobs, if asked for, has the token's first and then those of the likeliest."""
    found = {name: getattr(completion, name) for name in ("index", "tokens", "text", "finish_reason")}
    each = [{"logprob": one.logprob, "top": one.top} for one in completion.logprobs]
    return {**found, "stats": completion.stats.as_dict(), **({"logprobs": each} if each else {})}


class Offsets:
    """Where in a text its tokens begin, in characters, as they come; context: tokens before it, that are no part."""

    def __init__(self, tokenizer: Tokenizer | None, context: Sequence[int] = ()) -> None:
        self._decoder, self._at = StreamDecoder(tokenizer, context) if tokenizer else None, 0

    def of(self, token: int) -> int:
        """Where the next token begins: with an unfinished character, where that does."""
        at = self._at
        self._at += len(self._decoder.push([token])) if self._decoder else 0
        return at


@functools.lru_cache(maxsize=8)
def _written(tokenizer: Any) -> dict[int, str]:
    """How special tokens are written."""
    read = ((tokenizer.encode(text, bos=False), text) for text in getattr(tokenizer, "special", ()))
    return {ids[-1]: text for ids, text in read if ids}


def name_of(tokenizer: Any, token: int) -> str:
    r"""A token in an answer: its text or, if it adds none, as it is written; part of a character: "bytes:\xe6"."""
    data = tokenizer.token_bytes(token) if tokenizer else b""
    try:
        return data.decode() or _written(tokenizer).get(token, f"token_id:{token}")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def logprobs_of(tokenizer: Tokenizer | None, one: Completion | TokenEvent, offsets: Offsets | None) -> Any:
    """Log-probabilities of its tokens in OpenAI's form: of a chat an object each, else lists; None if there are none.

    offsets: of its text, unless it is a chat's. A token without one, which nothing precedes, has null.
    """

    def named(token: int, logprob: float | None) -> Record:
        data = tokenizer.token_bytes(token) if tokenizer else b""
        return {"token": name_of(tokenizer, token), "bytes": list(data), "logprob": logprob}

    each = [(named(token, None if one is NOTHING else one.logprob), [named(*other) for other in one.top])
            for token, one in zip(one.tokens, one.logprobs, strict=False)]  # fmt: skip
    if offsets is None or not each:
        return {"content": [one | {"top_logprobs": top} for one, top in each]} if each else None
    return {
        "text_offset": [offsets.of(token) for token in one.tokens], "tokens": [one["token"] for one, _ in each],
        "token_logprobs": [one["logprob"] for one, _ in each],
        # from the end, so that of tokens of one name the likeliest stays
        "top_logprobs": [{other["token"]: other["logprob"] for other in [one, *reversed(top)]}
                         if one["logprob"] is not None else None for one, top in each],
    }  # fmt: skip


def echoes_of(engine: Engine, prompts: Sequence[Sequence[int]], given: Sequence[Any], top: int | None
) -> list[TokenEvent]:  # fmt: skip
    """Prompts as if they had been emitted, with log-probabilities unless top is None; a first token has none.

    given: of each the text, or its token ids.
    """
    scored = [ids for ids in prompts if len(ids) > 1] if top is not None else []
    found, echoes = iter(engine.score(scored, top=top or 0) if scored else ()), []
    for ids, text in zip(prompts, given, strict=True):
        logprobs = [NOTHING] if top is not None else []
        if top is not None and len(ids) > 1:
            scores = next(found)
            best = zip(scores.best_ids.tolist(), scores.best.tolist(), strict=True)
            likeliest = [tuple(zip(*pair, strict=True)) for pair in best]
            logprobs += [TokenLogprobs(*one) for one in zip(scores.logprobs.tolist(), likeliest, strict=True)]
        shown = text if isinstance(text, str) else engine.tokenizer.decode(ids) if engine.tokenizer else ""
        echoes.append(TokenEvent(
            index=0, tokens=[*ids], text=shown, pieces=[], sources=[], drafted=0, accepted=0, logprobs=logprobs
        ))  # fmt: skip
    return echoes


def joined(echo: TokenEvent, completion: Completion) -> Completion:
    """A completion behind its prompt."""
    tokens, logprobs = [*echo.tokens, *completion.tokens], [*echo.logprobs, *completion.logprobs]
    return replace(completion, text=echo.text + completion.text, tokens=tokens, logprobs=logprobs)


def usage_of(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Record:
    """In OpenAI's form tokens in and out, and what became of the drafts."""
    given, made = sum(map(len, prompts)), sum(len(one.tokens) for one in completions)
    counts = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
    rounds, drafted, kept = (sum(getattr(c.stats, n) for c in completions) for n in ("rounds", "drafted", "accepted"))
    details = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": drafted - kept, "rounds": rounds}
    return counts | {"completion_tokens_details": details}


def requests_of(path: Path, fields: Sequence[str] = ()) -> list[str]:
    """The texts of a source as they are printed before their answers: of a conversation the last message."""
    records = [record for _, record in _each_of(path, fields)]
    return [f"> {r['prompt'] if 'prompt' in r else r['messages'][-1].get('content')}" for r in records]


def _each_of(path: Path, fields: Sequence[str]) -> list[tuple[str, Record]]:
    """Where a source's rows stand and what they hold, as often as they are continued."""
    return [row for row in prompts_of(path, fields) for _ in range(n_of(row[1]) or 1)]


def read_lines(path: Path, encoder: Encoder, common: SamplingParams) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts of a source as token ids, and the parameters of each: common's where a row says nothing.

    One whose row asks for n completions comes n times.
    """
    prompts, params = [], []
    for where, record in prompts_of(path, encoder.fields):
        ids = replace(encoder, fields=()).record(record, where)
        with naming(where):
            each = wanted(record, common)
        prompts += [ids] * len(each)
        params += each
    return prompts, params


def check_prompts(
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: ModelConfig,
    max_seq_len: int | None = None,
    source: Path | None = None,
    fields: Sequence[str] = (),
) -> None:
    """Refuse, before weights are read, prompts that the engine would refuse for their length or an unknown token.

    source: the file whose rows they are, by which they are named.
    """

    def name(i: int) -> str:
        return _each_of(source, fields)[i][0] if source else f"prompt {i}"

    limit, whose = max_seq_len, "as --max-seq-len says"
    if limit is None:
        limit, whose = config.max_seq_len, "the positions that the model has"
    for i, (ids, p) in enumerate(zip(prompts, params, strict=True)):
        if (total := len(ids) + p.max_tokens) > limit:
            raise ValueError(
                f"{name(i)} has {len(ids):,} tokens, what stands before it included, and max_tokens is "
                f"{p.max_tokens:,}: together {total:,}, over max_seq_len {limit:,}, {whose}"
            )
        wrong = next((token for token in ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None or not ids:
            what = "is empty" if wrong is None else f"holds token id {wrong}"
            raise ValueError(f"{name(i)} {what}; the vocabulary goes from 0 to {config.vocab_size - 1}")
