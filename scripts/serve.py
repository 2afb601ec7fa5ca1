"""Serve a model as OpenAI's API does: completions and chats, streamed or whole, all decoded together.

    python scripts/serve.py --model smollm2
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The harbour was", "stream": true}'

POST /v1/completions takes a prompt (a text, a list of token ids, or a list of several) and /v1/chat/completions
messages; both take what READ and ALLOWED of asked.py name, with that API's defaults, but a chat may go on to the end of
its slot. What is not computed here is refused by its name. GET /v1/models names the model, /health counts idle slots
and the queue, and measures the engine since it was last idle. SIGTERM and Ctrl-C end the server: new requests are
refused, those at work have --grace seconds, or none after a second signal. Exit code: 0 it was ended, 2 nonsense, 1 it
failed.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from common import ProgressLine, parser_of, refusing, sentence, started
from asked import Asked, Refused
from flags import add_engine_flags, add_flags, config_of, count, draft_of, join, positive, real, room_of
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, TokenEvent
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import read_config
from gpt_fast_sd.serving.service import Submission, never_begun
from records import LONGEST_LINE, Encoder, echoes_of, joined, usage_of

with contextlib.suppress(ImportError):  # prepare says so
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route

PROGRAM = "serve.py"
ROOM = 8192  # tokens that a slot holds, unless --max-seq-len says otherwise or the model ends before


def cut() -> Refused:
    """What a client is told whose time is over."""
    return Refused("the server is ending, and could wait no longer", code="ending", status=503)


def answer_of(document: object, status: int = 200) -> Response:
    """A document as it is sent."""
    later = {"retry-after": "1"} if status == 429 else None
    return Response(json.dumps(document), status, later, media_type="application/json")


def refused(_: Request, error: Exception) -> Response:
    """The answer where an error ended a request."""
    if not isinstance(error, Refused):
        error = Refused(getattr(error, "detail", sentence(error)), status=getattr(error, "status_code", 500))
    return answer_of(error.document, error.status)


class Server:
    """Hands requests to an engine, answers them, and ends in order; all in one event loop, but for what says so."""

    def __init__(self, engine: Engine, model: str, max_queue: int, grace: float) -> None:
        self.engine, self.model, self.grace = engine, model, grace
        self.encoder, self.slots = Encoder(engine.tokenizer), engine.config.batch_size
        self.most, self.unanswered = self.slots + max_queue, 0  # prompts
        self.submissions, self.ending, self.failed = set[Submission](), False, False
        self.scoring = ThreadPoolExecutor(1, "echoes")  # which wait for the engine: others encode meanwhile
        post = [Route(f"/v1/{path}", self.post, methods=["POST"]) for path in ("completions", "chat/completions")]
        get = [Route("/v1/models", self.models), Route("/health", self.health)]
        handlers: dict[Any, Any] = dict.fromkeys((Refused, 404, 405, ClientDisconnect, Exception), refused)
        self.uvicorn = uvicorn.Server(uvicorn.Config(
            Starlette(routes=[*post, *get], exception_handlers=handlers), lifespan="off", ws="none",
            log_level="warning", access_log=False, timeout_graceful_shutdown=10,  # seconds for unread answers
        ))  # fmt: skip

    async def serve(self, listening: socket.socket) -> int:
        """Say that it begins, and answer until it is ended -> exit code."""
        serving = asyncio.create_task(self.uvicorn.serve(sockets=[listening]))
        while not (self.uvicorn.started or serving.done()):
            await asyncio.sleep(0.01)
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread, which has the signals
            for number in (signal.SIGINT, signal.SIGTERM):  # in place of uvicorn's handlers
                asyncio.get_running_loop().add_signal_handler(number, self.end)
        host, port = listening.getsockname()[:2]
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{at} serves {self.model}, --draft {self.engine.draft.policy}", flush=True)
        await serving
        return int(self.failed)

    def end(self) -> None:
        """Let nobody in, and end when all have their answers or --grace is over; at once when it is said again."""
        asyncio.get_running_loop().call_later(0.0 if self.ending else self.grace, self.cancel_all)
        self.ending = True
        self.uvicorn.should_exit |= not self.unanswered

    def cancel_all(self) -> None:
        """Wait for nobody."""
        for one in self.submissions:
            one.cancel()
        self.uvicorn.should_exit = True

    def fail(self, error: Exception) -> Refused:
        """End, as the engine failed -> what clients are told."""
        if not self.failed:
            print(f"{PROGRAM}: the engine failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self.failed = self.ending = self.uvicorn.should_exit = True
        return Refused("the engine failed, and the server ends", code="engine_failed", status=500)

    async def models(self, _: Request) -> Response:
        """The list of one."""
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "gpt_fast_sd"}
        return answer_of({"object": "list", "data": [one | {"max_model_len": self.engine.config.max_seq_len}]})

    async def health(self, _: Request) -> Response:
        """What it is doing; 503 when it is ending."""
        busy, status = min(self.unanswered, self.slots), "ending" if self.ending else "ok"
        found = {"status": status, "model": self.model, "slots": self.slots, "idle": self.slots - busy}
        found |= {"queue": self.unanswered - busy, "engine": self.engine.stats.as_dict()}
        return answer_of(found, 503 if self.ending else 200)

    async def post(self, request: Request) -> Any:
        """Answer one request, or refuse it."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_LINE:
                raise Refused(f"the body has over {LONGEST_LINE:,} bytes, more than any prompt needs", status=413)
        given = body, self.model, self.engine.tokenizer, self.most
        asked = await asyncio.to_thread(Asked, *given, chat="chat" in request.url.path)
        if self.ending:
            raise Refused("the server is ending", code="ending", status=503)
        if self.unanswered + asked.n > self.most:
            raise Refused(f"{self.unanswered:,} wait or are at work: try again", code="queue_full", status=429)
        return lambda *to: self.answer(asked, *to)

    async def answer(self, asked: Asked, scope: Any, receive: Any, send: Any) -> None:
        """Decode and answer, while the client is there."""
        submissions: list[Submission] = []

        async def decode() -> None:
            prompts, params = await asyncio.to_thread(self.encode, asked)
            try:
                echoes = await self.echoes(asked, prompts) if asked.echo else []
                if not asked.ends_there:
                    submissions.extend(self.engine.submit(prompt, one) for prompt in prompts for one in params)
            except RuntimeError as error:
                raise self.fail(error) from error
            self.submissions.update(submissions)
            events = self.events(submissions, asked.n)
            if asked.stream:
                return await stream(asked, prompts, events, send, echoes)
            completions = [event.completion async for _, event in events if event.completion]
            whole = [joined(*pair) for pair in zip(echoes, completions, strict=True)] if echoes else completions
            choices = [asked.choice(i, one, one.finish_reason) for i, one in enumerate(whole)]
            usage = usage_of(prompts, completions)
            await answer_of({**asked.head, "choices": choices, "usage": usage})(scope, receive, send)

        self.unanswered += asked.n
        try:
            working, left = asyncio.ensure_future(decode()), asyncio.ensure_future(receive())
            await asyncio.wait([working, left], return_when=asyncio.FIRST_COMPLETED)  # the body is read: it is gone
            left.cancel()
            working.cancel()  # which does nothing if it is done
            with contextlib.suppress(asyncio.CancelledError):
                await working
        finally:
            for one in submissions:
                one.cancel()
            self.submissions.difference_update(submissions)
            self.unanswered -= asked.n
            self.uvicorn.should_exit |= self.ending and not self.unanswered

    def encode(self, asked: Asked) -> tuple[list[list[int]], list[SamplingParams]]:
        """In any thread: prompts as token ids that the engine takes, and how each is continued; Refused where not."""
        name, limit = "messages" if asked.chat else "prompt", self.engine.config.max_seq_len
        try:
            prompts = [
                self.encoder.record({"messages": one}, "the request") if asked.chat
                else self.encoder.text(one, f"prompt {i}") if isinstance(one, str) else one
                for i, one in enumerate(asked.prompts)
            ]  # fmt: skip
            longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
            wanted = asked.max_tokens or max(1, min(limit - longest, limit if asked.chat else 16))
            if longest + wanted > limit:
                said = f"{longest:,} tokens of {name} and max_tokens {wanted:,} are over the {limit:,} of a slot"
                raise Refused(said, name, "context_length_exceeded")
            params = [replace(one, max_tokens=wanted) for one in asked.params]
            self.engine.check(prompts, params[0])
        except ValueError as error:
            names = (one for one in ("logit_bias", "stop_token_ids") if one in str(error))
            raise Refused(sentence(error), next(names, name)) from None
        asked.begin(prompts)
        return prompts, params

    async def echoes(self, asked: Asked, prompts: list[list[int]]) -> list[TokenEvent]:
        """The prompt of each completion; where its client leaves, it ends once the text at hand is scored."""
        left = threading.Event()
        job = self.scoring.submit(self.scored, asked, prompts, left)
        found = asyncio.wrap_future(job)
        try:
            return [one for one in await asyncio.shield(found) for _ in asked.params]
        except asyncio.CancelledError:
            left.set()
            if not job.cancel():
                await asyncio.wait([found])
            raise

    def scored(self, asked: Asked, prompts: list[list[int]], left: threading.Event) -> list[TokenEvent]:
        """In the thread for it: the prompts with their scores, unless nobody waits for them."""

        def go_on(what: str, *_: int) -> None:
            if what == "score" and (left.is_set() or self.uvicorn.should_exit):
                raise cut()

        self.engine.on_progress = go_on  # between texts
        return echoes_of(self.engine, prompts, asked.prompts, asked.params[0].logprobs)

    async def events(self, submissions: list[Submission], n: int) -> AsyncIterator[tuple[int, TokenEvent]]:
        """All events of n completions and whose they are, one's after another's; Refused if one is cut off."""
        for i in range(0 if submissions else n):
            yield i, never_begun(i, "length")
        for i, one in enumerate(submissions):
            try:
                async for event in one:
                    if event.completion and event.completion.finish_reason == "cancelled":
                        raise cut()
                    yield i, event
            except Exception as error:
                raise (error if isinstance(error, Refused) else self.fail(error)) from None


async def stream(
    asked: Asked, prompts: list[list[int]], events: AsyncIterator[Any], send: Any, echoes: Sequence[TokenEvent]
) -> None:
    """Send the events, behind the prompts of those that are echoed, as server-sent ones."""

    async def say(*choices: dict[str, Any], usage: Any = None, last: str = "") -> None:
        piece = json.dumps({**asked.head, "choices": choices} | ({"usage": usage} if asked.counts else {}))
        await send({"type": "http.response.body", "body": f"data: {last or piece}\n\n".encode(), "more_body": not last})

    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    completions, last = list[Completion](), "[DONE]"
    try:
        for i in range(asked.n if asked.chat else 0):
            await say(asked.choice(i, None) | {"delta": {"role": "assistant", "content": ""}})
        for i, echo in enumerate(echoes):
            await say(asked.choice(i, echo))
        async for i, event in events:
            if event.text or event.logprobs:
                await say(asked.choice(i, event))
            if event.completion:
                completions.append(event.completion)
                await say(asked.choice(i, None, event.completion.finish_reason))
        if asked.counts:
            await say(usage=usage_of(prompts, completions))
    except Refused as error:
        last = json.dumps(error.document)
    await say(last=last)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = parser_of(PROGRAM, __doc__)
    add, seconds = parser.add_argument, real("a number of seconds", lambda number: 0 <= number <= 1e6)
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, for this machine alone)")
    add("--port", metavar="N", type=count, default=8000, help="0: any that is free (default: 8000)")
    add("--max-queue", metavar="N", type=count, default=64, help="prompts that may wait for a slot (default: 64)")
    add("--grace", metavar="SECONDS", type=seconds, default=30.0, help="for what is at work at the end (default: 30)")
    add_flags(parser.add_argument_group("who drafts"), DraftConfig, policy={"default": "auto"})
    room = {"type": positive, "default": None, "unset": f"{ROOM:,}, or what the model can"}
    add_engine_flags(parser, alone=True, batch_size={"type": positive}, max_seq_len=room)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> tuple[Engine, socket.socket]:
    """An engine and where to listen; ValueError or OSError in one sentence, where possible before weights are read."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ValueError(f'there is no {missing[0]} here: pip install -e ".[serve]"')
    draft, model = draft_of(args), read_config(locate(args.model))
    config = config_of(EngineConfig, args, max_seq_len=room_of(args, model, ROOM))
    parallel = join(args, alone=PROGRAM)
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listening = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen at --host {args.host} --port {args.port}: {error}") from None
    return Engine.from_pretrained(args.model, config, draft, parallel=parallel), listening


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, serve."""
    args = parse(argv)
    with refusing(PROGRAM):
        engine, listening = prepare(args)
    if engine.compiled:
        print("compiling (up to two minutes the first time, cached afterwards) ...", file=sys.stderr, flush=True)
    engine.on_progress = ProgressLine()
    engine.warm_up([SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)])
    engine.on_progress = None
    return asyncio.run(Server(engine, args.model, args.max_queue, args.grace).serve(listening))


if __name__ == "__main__":
    started(main)
