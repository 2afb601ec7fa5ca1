"""What the server says is what the engine says, to clients of OpenAI's library, of whom some leave."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import serve
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from tests.helpers import ByteTokenizer, Patch, Refuses, tiny_engine

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
PROMPTS: list[Any] = ["The harbour was", [5, 6, 7], "Chapter 1", "It was"]
CHAT = [{"role": "system", "content": "Be </s> brief."}, {"role": "user", "content": "Why is it late?"}]
GREEDY = {"model": "m", "temperature": 0.0, "max_tokens": 24}
LONG = {"model": "m", "temperature": 0.0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, engine: Engine, max_queue: int = 200, grace: float = 60.0) -> None:
        self.engine, self.server = engine, serve.Server(engine, "m", max_queue, grace)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:{}/v1".format(listening.getsockname()[1])
        self.loop, self.code = asyncio.new_event_loop(), list[int]()
        run = self.server.serve(listening)
        self.thread = threading.Thread(target=lambda: self.code.append(self.loop.run_until_complete(run)))
        self.thread.start()
        self.client = client_of(self.url)

    def end(self) -> int:
        """The exit code."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.end)
        self.thread.join()
        return self.code[0]

    def until(self, **wanted: object) -> None:
        """Wait until /health says so."""
        for _ in range(6000):
            found = self.client.get("/health", cast_to=object, options={"path": self.url[:-2] + "health"})
            if wanted.items() <= found.items():
                return
            time.sleep(0.01)
        raise AssertionError(f"{found}, not {wanted}")


def client_of(url: str, **how: Any) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **how)


@contextlib.contextmanager
def running(engine: Engine, **how: Any) -> Iterator[Running]:
    one = Running(engine, **how)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a chat template."""
    found = shutil.copytree(BUNDLED, tmp_path_factory.mktemp("chat") / "model")
    notes = json.loads((found / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (found / "tokenizer_config.json").write_text(json.dumps(notes))
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Running]:
    config = EngineConfig(batch_size=2, max_seq_len=1024, device="cpu", dtype="fp32", compile=False)
    with running(Engine.from_pretrained(folder, config, DraftConfig(policy="lookup", gamma=2))) as one:
        yield one


def texts_of(one: Running, prompts: list[Any], **params: Any) -> list[str]:
    """What the engine's own submissions give."""
    submitted = [one.engine.submit(prompt, SamplingParams(**params)) for prompt in prompts]
    return [each.result().text for each in submitted]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"stop": [" the"]}], ids=str)
def test_answers_are_what_the_engine_gives(served: Running, params: dict[str, Any]) -> None:
    wanted = {"temperature": 0.0, "max_tokens": 24} | params
    texts = texts_of(served, PROMPTS, **wanted)
    ids = served.engine.tokenizer.chat(CHAT) if served.engine.tokenizer else []
    [chat] = texts_of(served, [ids], **wanted)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        answer = served.client.completions.create(**GREEDY | params, prompt=prompt)
        [choice], usage = answer.choices, answer.usage
        assert choice.text == text and choice.finish_reason == ("stop" if "stop" in params else "length") or params
        details = usage.completion_tokens_details
        assert usage.completion_tokens <= 24 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert details.rounds + details.accepted_prediction_tokens >= usage.completion_tokens
    several = served.client.completions.create(**GREEDY | params, prompt=[PROMPTS[0], PROMPTS[2], PROMPTS[3]])
    assert [choice.text for choice in several.choices] == [texts[0], texts[2], texts[3]]
    answer = served.client.chat.completions.create(**GREEDY | params, messages=CHAT)
    assert answer.choices[0].message.content == chat and answer.usage.prompt_tokens == len(ids)
    how = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = served.client.chat.completions.create(**GREEDY | params | how, messages=CHAT)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == chat and last.usage == answer.usage
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices[0].finish_reason
    told = ["", ""]
    for piece in served.client.completions.create(**GREEDY | params, prompt=[PROMPTS[0], PROMPTS[3]], stream=True):
        told[piece.choices[0].index] += piece.choices[0].text
    assert told == [texts[0], texts[3]]


def test_what_is_left_out_is_as_in_openais_api(served: Running) -> None:
    assert served.client.completions.create(model="m", prompt="It was").usage.completion_tokens <= 16
    served.client.chat.completions.create(model="m", messages=CHAT, user="me", n=1, tools=[], max_completion_tokens=3)
    assert [model.id for model in served.client.models.list()] == ["m"]


def test_a_client_that_leaves_frees_its_slot_and_the_other_streams_on(served: Running) -> None:
    [text] = texts_of(served, [PROMPTS[0]], max_tokens=400, ignore_eos=True)
    stays = served.client.completions.create(**LONG, prompt=PROMPTS[0], stream=True)
    begun = next(iter(stays)).choices[0].text
    with served.client.completions.create(**LONG, prompt=PROMPTS[2], stream=True) as leaves:
        next(iter(leaves))
    assert served.client.completions.create(**GREEDY, prompt=PROMPTS[3]).choices[0].text
    assert begun + "".join(piece.choices[0].text for piece in stays) == text
    served.until(idle=2, queue=0)


@pytest.mark.parametrize("n", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_of_a_crowd_of_whom_half_leave_none_hangs_and_all_slots_are_free(served: Running, n: int) -> None:
    [text] = texts_of(served, [PROMPTS[0]], max_tokens=24)
    told: dict[int, Any] = {}

    def user(i: int) -> None:
        if i % 2 == 0:
            told[i] = served.client.completions.create(**GREEDY, prompt=PROMPTS[0]).choices[0].text
        elif i % 4 == 1:  # before its first token, or in the queue
            with pytest.raises(openai.APITimeoutError):
                client_of(served.url, timeout=0.05).completions.create(**LONG, prompt=PROMPTS[2])
        else:
            with served.client.completions.create(**LONG, prompt=PROMPTS[2], stream=True) as pieces:
                next(iter(pieces))

    threads = [threading.Thread(target=user, args=(i,)) for i in range(n)]
    for do in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            do(thread)
    assert told == dict.fromkeys(range(0, n, 2), text)
    served.until(idle=2, queue=0, status="ok")
