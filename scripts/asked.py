"""What a request of OpenAI's API asks, as far as that is seen without an engine, and the form of its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from gpt_fast_sd import Completion, SamplingParams, TokenEvent
from gpt_fast_sd.model import Tokenizer, parse_json
from gpt_fast_sd.serving import Penalties
from records import PER_PROMPT, Offsets, logprobs_of, own

READ = {*PER_PROMPT, *Penalties.NAMES, "model", "prompt", "n", "best_of"}
READ_OF_CHATS = READ - {"prompt", "logprobs"} | {"messages", "max_completion_tokens", "top_logprobs"}
MOST_STOPS, LONGEST_STOP = 64, 1000
CHANGE_NOTHING = {"user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"}
ALLOWED: dict[str, tuple[object, ...]] = {  # fields that may have these values, and no others
    "stream": (False, True), "stream_options": ({}, {"include_usage": False}, {"include_usage": True}),
    "echo": (False, True), "suffix": ("",), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (False, True), "logprobs": (False, True),
}  # fmt: skip


class Refused(Exception):
    """What a client is told in place of an answer, in OpenAI's form."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        self.status, self.document = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Asked:
    """A request that makes sense and is supported, as far as that is seen without the engine; else Refused."""

    def __init__(self, body: bytearray, model: str, tokenizer: Tokenizer | None, most: int, *, chat: bool) -> None:
        """most: completions that may wait at once."""
        try:
            if not isinstance(record := parse_json(body.decode(), constants=False), dict):
                raise ValueError(f"got {record!r:.80}")
        except ValueError as error:
            raise Refused(f"the body must be a JSON object in UTF-8: {error}") from None
        record = {name: value for name, value in record.items() if value is not None}
        prompt = "messages" if chat else "prompt"
        for name in sorted(record.keys() - (READ_OF_CHATS if chat else READ) - CHANGE_NOTHING):
            allowed = [json.dumps(value) for value in ALLOWED.get(name, ())]
            if json.dumps(record[name]) not in allowed:
                said = f"must be {' or '.join(allowed)}, or left out" if allowed else "is not supported: leave it out"
                raise Refused(f"{name} {said}", name, "unsupported_value" if allowed else "unsupported_parameter")
        if record.get("model", model) != model:
            raise Refused(f"there is no such model here, but {model!r}", "model", "model_not_found", 404)
        self.max_tokens = record.get("max_completion_tokens", record.get("max_tokens"))
        n, wanted = record.get("n", 1), None if record.get("logprobs") is False else record.get("logprobs")
        best, both = record.get("best_of", n), "max_tokens" in record and "max_completion_tokens" in record
        for said, wrong in {
            f"{prompt} is missing": prompt not in record,
            "max_tokens and max_completion_tokens mean the same: give one of them": both,
            "top_logprobs needs logprobs true": chat and record.get("top_logprobs") and not wanted,
            "echo is of completions alone": chat and record.get("echo"),
            f"best_of must be n, or left out, got {best!r:.80}": (type(best), best) != (type(n), n),
        }.items():
            if wrong:
                raise Refused(said, said.split()[0])
        how = {"logprobs": wanted if not (chat and wanted) else record.get("top_logprobs", 0)}
        self.echo = record.get("echo", False)
        self.ends_there = self.echo and type(self.max_tokens) is int and self.max_tokens == 0  # where the prompt does
        self.max_tokens = 1 if self.ends_there else self.max_tokens  # for which there must be room
        how |= {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        several = isinstance(record[prompt], list) and any(isinstance(one, str | list) for one in record[prompt])
        self.prompts = record[prompt] if several and not chat else [record[prompt]]  # of a chat one list of messages
        if type(n) is int and n * len(self.prompts) > most:
            said = f"{n * len(self.prompts):,} completions are more than the {most:,} that may wait at once"
            raise Refused(said, "n" if n > most else prompt)
        try:
            given: dict[str, Any] = {"temperature": 1.0, **own(record), **how}
            self.params = SamplingParams(**given).samples(n)
            stops = *self.params[0].stop_strings, *map(str, self.params[0].stop_token_ids or ())
            if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
                raise ValueError(f"stop may have {MOST_STOPS} texts and ids of {LONGEST_STOP:,} characters, not more")
        except ValueError as error:
            said = str(error).replace("logprobs", "top_logprobs") if chat else str(error)
            raise Refused(said, said.split()[0]) from None
        self.tokenizer, self.chat, self.n = tokenizer, chat, len(self.prompts) * n
        self.offsets = list[Offsets | None]()  # of each completion
        self.stream, self.counts = record.get("stream", False), record.get("stream_options") == {"include_usage": True}
        self.head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}", "created": int(time.time())}
        kind = "text_completion" if not chat else "chat.completion.chunk" if self.stream else "chat.completion"
        self.head |= {"object": kind, "model": model}

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Take the token ids of the prompts: a text that is not echoed goes on behind its own."""
        each = (() if self.echo else prompt for prompt in prompts for _ in self.params)
        self.offsets = [None if self.chat else Offsets(self.tokenizer, one) for one in each]

    def choice(self, i: int, one: Completion | TokenEvent | None, reason: str | None = None) -> dict[str, Any]:
        """What a prompt's text has become, or the next piece of it; None: nothing more."""
        found = logprobs_of(self.tokenizer, one, self.offsets[i]) if one else None
        text = one.text if one else ""
        piece = {"delta": {"content": text}} if self.stream else {"message": {"role": "assistant", "content": text}}
        return {"index": i, **(piece if self.chat else {"text": text}), "logprobs": found, "finish_reason": reason}
