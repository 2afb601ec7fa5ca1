"""What the server says is what the engine says, to clients of OpenAI's library, of whom some leave."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import records
import serve
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.serving import Penalties
from gpt_fast_sd.serving.logprobs import TokenLogprobs
from tests.helpers import ByteTokenizer, Patch, Printed, Refuses, tiny_engine

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
CHAT = [{"role": "system", "content": "Be </s> brief."}, {"role": "user", "content": "Why is it late?"}]
GREEDY: dict[str, Any] = {"model": "m", "temperature": 0.0, "max_tokens": 12}
LONG = GREEDY | {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def client_of(url: str, **how: Any) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **how)


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, engine: Engine, max_queue: int = 200, grace: float = 60.0) -> None:
        self.engine, self.server = engine, serve.Server(engine, "m", max_queue, grace)
        listening, self.loop, self.code = socket.create_server(("127.0.0.1", 0)), asyncio.new_event_loop(), list[int]()
        self.url, run = f"http://127.0.0.1:{listening.getsockname()[1]}/v1", self.server.serve(listening)
        self.thread = threading.Thread(target=lambda: self.code.append(self.loop.run_until_complete(run)))
        self.thread.start()
        self.client = client_of(self.url)
        self.ask, self.chat = self.client.completions.create, self.client.chat.completions.create

    def end(self) -> int:
        """The exit code."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.end)
        self.thread.join()
        return self.code[0]

    def until(self, **wanted: object) -> None:
        """Wait until /health says so."""
        found: dict[str, object] = {}
        while not wanted.items() <= found.items():
            time.sleep(0.01)
            found = json.load(urllib.request.urlopen(self.url.replace("v1", "health")))

    def texts(self, *prompts: Any, **params: Any) -> list[str]:
        """What the engine itself gives."""
        bias = Penalties(logit_bias=params.pop("logit_bias")) if "logit_bias" in params else None
        submitted = [self.engine.submit(prompt, SamplingParams(**params, processor=bias)) for prompt in prompts]
        return [each.result().text for each in submitted]


@contextlib.contextmanager
def tiny(**how: Any) -> Iterator[Running]:
    one = Running(tiny_engine(tokenizer=ByteTokenizer(), batch_size=1), **how)
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
    one = Running(Engine.from_pretrained(folder, config, DraftConfig(policy="lookup", gamma=2)))
    yield one
    one.end()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"stop": " the", "logit_bias": {"70": 9}}], ids=str
)
def test_answers_are_what_the_engine_gives(served: Running, params: dict[str, Any]) -> None:
    assert served.engine.tokenizer
    ids, how, prompts = served.engine.tokenizer.chat(CHAT), GREEDY | params, ["The harbour was", "Chapter 1", "It was"]
    *texts, of_ids, chat = served.texts(*prompts, [5, 6, 7], ids, **{"temperature": 0.0, "max_tokens": 12} | params)
    answer = served.ask(**how, prompt=prompts)
    assert [choice.text for choice in answer.choices] == texts
    assert served.ask(**how, prompt=[5, 6, 7]).choices[0].text == of_ids
    details, n = answer.usage.completion_tokens_details, answer.usage.completion_tokens
    assert n <= 36 and details.rounds + details.accepted_prediction_tokens >= n
    assert params or (n == 36 and {choice.finish_reason for choice in answer.choices} == {"length"})
    told = ["", "", ""]
    for piece in served.ask(**how, prompt=prompts, stream=True):
        told[piece.choices[0].index] += piece.choices[0].text
    assert told == texts
    answer = served.chat(**how, messages=CHAT)
    assert answer.choices[0].message.content == chat and answer.usage.prompt_tokens == len(ids)
    *pieces, last = served.chat(**how, messages=CHAT, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].delta.content for piece in pieces) == chat and last.usage == answer.usage
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices[0].finish_reason


def test_logprobs_are_those_of_the_engine(served: Running) -> None:
    expected = served.engine.submit("It was", SamplingParams(max_tokens=12, logprobs=2)).result()
    whole = served.ask(**GREEDY, prompt="It was", logprobs=2).choices[0]
    assert whole.text == "".join(whole.logprobs.tokens) and len(whole.logprobs.tokens) == 12
    assert whole.logprobs.token_logprobs == [one.logprob for one in expected.logprobs]
    assert [max(top.values()) for top in whole.logprobs.top_logprobs] == whole.logprobs.token_logprobs
    hot = served.ask(model="m", prompt="It was", temperature=1.5, seed=3, logprobs=0).choices[0].logprobs
    assert hot.top_logprobs == [{token: p} for token, p in zip(hot.tokens, hot.token_logprobs, strict=True)]
    pieces = [piece.choices[0] for piece in served.ask(**GREEDY, prompt="It was", logprobs=2, stream=True)]
    told = [p for one in pieces if one.logprobs for p in one.logprobs.token_logprobs]
    assert told == whole.logprobs.token_logprobs
    at = [place for one in pieces if one.logprobs for place in one.logprobs.text_offset]
    places = zip(whole.logprobs.tokens, at, strict=True)
    assert all(whole.text.startswith(token, at) for token, at in places)
    chat = served.chat(**GREEDY, messages=CHAT, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(one.token for one in chat.logprobs.content) == chat.message.content
    for one in chat.logprobs.content:
        assert bytes(one.bytes).decode("utf-8", "replace") == one.token == one.top_logprobs[0].token
        assert one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) == 3
    assert served.chat(**GREEDY, messages=CHAT, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert served.chat(**GREEDY, messages=CHAT, logprobs=False).choices[0].logprobs is None


def test_prompts_are_echoed_with_the_logprobs_that_they_have_as_lm_eval_reads_them(served: Running) -> None:
    prompts = [[1, 70, 300, 5], [1, 9, 8, 7, 6]]
    how: dict[str, Any] = GREEDY | {"max_tokens": 1, "logprobs": 1, "echo": True}
    for choice, ids in zip(served.ask(**how, prompt=prompts).choices, prompts, strict=True):
        (truth,) = served.engine.score([ids])
        found = choice.logprobs
        assert found.token_logprobs[0] is found.top_logprobs[0] is None and len(found.tokens) == len(ids) + 1
        assert found.token_logprobs[1:-1] == pytest.approx(truth.logprobs.tolist(), abs=1e-4)
        pairs = zip(found.token_logprobs[1:-1], found.top_logprobs[1:-1], strict=True)
        assert [p == max(top.values()) for p, top in pairs] == truth.greedy.tolist()
    how |= {"max_tokens": 0}
    for text, at in ("It was", [0, 0, 2]), ("naïve 日本 done", [0, 0, 1, 2, 2, 3, 5, 6, 6, 6, 7, 7, 7, 8]):
        [choice] = served.ask(**how, prompt=text).choices
        assert [choice.text, choice.logprobs.tokens[0], *choice.logprobs.text_offset] == [text, "<s>", *at]
        *_, piece, last = (piece.choices[0] for piece in served.ask(**how, prompt=text, stream=True))
        assert (piece.text, piece.logprobs, last.finish_reason) == (text, choice.logprobs, "length")
    [text] = served.texts("It was", max_tokens=12)
    pieces = [piece.choices[0].text for piece in served.ask(**GREEDY, prompt="It was", echo=True, stream=True)]
    assert pieces[0] == "It was" and "".join(pieces) == f"It was{text}"


def test_tokens_that_are_no_text_have_names_of_their_own_and_of_two_of_one_name_the_likelier_has_it() -> None:
    logprobs = [TokenLogprobs(-5.0, ((233, -0.1),)), TokenLogprobs(-7.0, ((65, -0.5),)), TokenLogprobs(0.0)]
    one = Completion(index=0, tokens=[198, 97, 256], text="", finish_reason="", stats=None, logprobs=logprobs)  # type: ignore[arg-type]
    tokens = ByteTokenizer()
    tokens.token_bytes = lambda token: bytes([token]).lower() if token < 256 else b""  # type: ignore[method-assign]
    found = records.logprobs_of(tokens, one, records.Offsets(tokens))["top_logprobs"]
    assert found == [{"bytes:\\xc6": -5.0, "bytes:\\xe9": -0.1}, {"a": -0.5}, {"token_id:256": 0.0}]


def test_an_echo_keeps_its_place_until_it_ends_soon_after_its_client_has_left_or_the_server_ends() -> None:
    how: dict[str, Any] = GREEDY | {"max_tokens": 0, "logprobs": 0, "echo": True, "prompt": ["ab"] * 40}
    with tiny(grace=0.0) as one, ThreadPoolExecutor(1) as user:
        told, go, tell = list[int](), threading.Event(), one.engine.schedule.tell
        one.engine.schedule.tell = lambda *at: (tell(*at), told.append(at[1]), go.wait(60))  # type: ignore
        with pytest.raises(openai.APITimeoutError):
            client_of(one.url, timeout=1.0).completions.create(**how)
        one.until(idle=0, queue=39)
        go.set()
        one.until(idle=1, queue=0)
        go.clear()
        cut_off = user.submit(one.ask, **how)
        one.until(idle=0, queue=39)
        one.loop.call_soon_threadsafe(one.server.end)
        while not one.server.uvicorn.should_exit:
            time.sleep(0.01)
        go.set()
        with pytest.raises(openai.InternalServerError, match="could wait no longer"):
            cut_off.result()
        assert told in ([0], [0, 0])


def test_n_completions_of_a_prompt_have_seeds_of_their_own_and_stand_beside_each_other(served: Running) -> None:
    assert served.engine.tokenizer
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    prompts = ["One lamp of two", "Two oars of one"]  # no slot has them
    given = [(prompt, one) for prompt in prompts for one in SamplingParams(**how).samples(3)]
    expected = [completion.text for completion in served.engine.generate(given)]
    assert served.engine.stats.prefill_tokens == sum(len(served.engine.tokenizer.encode(p)) - 1 for p in prompts)
    answer = served.ask(**how, model="m", prompt=prompts, n=3, best_of=3)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(expected)) and len({*expected}) == 6
    assert answer.usage.prompt_tokens == served.ask(**how, model="m", prompt=prompts).usage.prompt_tokens
    pieces = [piece.choices[0] for piece in served.chat(**how, model="m", messages=CHAT, n=2, stream=True)]
    assert [piece.index for piece in pieces if piece.delta.role] == [0, 1]


def test_what_is_left_out_is_as_in_openais_api(served: Running) -> None:
    assert served.ask(model="m", prompt="It was").usage.completion_tokens <= 16
    served.chat(model="m", messages=CHAT, user="me", n=1, tools=[], max_completion_tokens=3)
    assert [model.id for model in served.client.models.list()] == ["m"]


@pytest.mark.parametrize("n", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_of_a_crowd_of_whom_half_leave_all_others_are_answered_and_all_slots_are_free(served: Running, n: int) -> None:
    [text], [whole] = served.texts("It was", max_tokens=12), served.texts("It was", max_tokens=400, ignore_eos=True)
    stays, told = served.ask(**LONG, prompt="It was", stream=True), dict[int, str]()
    begun = next(iter(stays)).choices[0].text

    def user(i: int) -> None:
        if i % 2 == 0:
            told[i] = served.ask(**GREEDY, prompt="It was").choices[0].text
        elif i % 4 == 1:  # before its first token, or in the queue
            with pytest.raises(openai.APITimeoutError):
                client_of(served.url, timeout=0.05).completions.create(**LONG, prompt="Chapter 1")
        else:
            with served.ask(**LONG, prompt="Chapter 1", stream=True) as pieces:
                next(iter(pieces))

    threads = [threading.Thread(target=user, args=(i,)) for i in range(n)]
    for do in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            do(thread)
    assert told == dict.fromkeys(range(0, n, 2), text)
    assert begun + "".join(piece.choices[0].text for piece in stays) == whole
    served.until(idle=2, queue=0, status="ok")


FIELDS: dict[str, list[Any]] = {  # values that are refused by the field's name
    "n": [0, 1.5, True], "best_of": [2, 1.0], "logprobs": [21, True], "echo": ["yes"], "presence_penalty": ["a", 3],
    "tools": [[{}]], "logit_bias": [{"5": "1"}, {"5": 1, "05": 2}, {"-1": 1}, [1], {"99999": 1}], "stream": ["yes"],
    "response_format": [{"type": "json_object"}], "stream_options": [{"include": 1}],
    "temperature": ["hot", True], "top_p": [0], "top_k": [1.5], "min_p": [2], "seed": [-1],
    "stop_token_ids": [[99999]], "stop": [[1], ["a"] * 65, "a" * 1001], "max_tokens": [0, "9"], "prompt": [7, [[1], 2]],
}  # fmt: skip
OTHERS: list[tuple[str, Any, str]] = [  # what is changed, and what is said of it
    ("completions", {"functions": []}, "functions is not supported"), ("completions", {"prompt": ""}, "0 is empty"),
    ("completions", {"model": "gpt"}, "there is no such model here, but 'm'"), ("completions", b"\xff", "UTF-8"),
    ("completions", {"prompt": None}, "prompt is missing"), ("completions", {"prompt": ["a", ""]}, "prompt 1 is empty"),
    ("completions", {"prompt": []}, "0 is empty"), ("completions", {"prompt": [1, 99999]}, "holds token id 99999"),
    ("completions", {"prompt": "a \ud800"}, "half a character"), ("completions", b"[1]", "must be a JSON object"),
    ("completions", {"prompt": [5] * 1024}, "1,024 tokens of prompt and max_tokens 1 are over the 1,024 of a slot"),
    ("completions", {"prompt": ["a"] * 3, "n": 100}, "300 completions are more than the 202 that may wait at once"),
    ("models", {}, "Method Not Allowed"),
    ("completions", b"too long", "the body has over 67,108,864 bytes"),
    ("chat/completions", {"max_completion_tokens": 9, "max_tokens": 9}, "mean the same"), ("x", {}, "Not Found"),
    ("chat/completions", {"echo": True}, "echo is of completions alone"),
    ("chat/completions", {"logprobs": 3}, "logprobs must be"), ("chat/completions", {"top_logprobs": 2}, "needs log"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be a whole number from 0 to 20"),
    ("chat/completions", {"messages": []}, "messages must be a list"), ("chat/completions", b"{", "not JSON"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
]  # fmt: skip
OTHERS += [("completions", {name: one}, f"{name} ") for name, values in FIELDS.items() for one in values]


@pytest.mark.parametrize(("address", "changes", "said"), OTHERS, ids=lambda value: ascii(value)[:40])
def test_what_is_not_supported_or_makes_no_sense_is_refused(
    served: Running, address: str, changes: Any, said: str
) -> None:
    start: dict[str, Any] = {"model": "m", "messages": CHAT} if "chat" in address else {"model": "m", "prompt": "a"}
    body = changes if isinstance(changes, bytes) else json.dumps(start | changes).encode()
    body *= 2**23 + 1 if body == b"too long" else 1
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{served.url}/{address}", body)
    error = json.load(refused.value)["error"]
    assert said in error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert not said.endswith(" ") or error["param"] == said[:-1]
    assert refused.value.code in (400, 404, 405, 413) and error["type"] == "invalid_request_error"


def test_a_full_queue_says_so_and_who_waits_may_leave_it_and_time_that_is_over_cuts_off() -> None:
    with tiny(max_queue=1, grace=0.0) as one:
        stream = one.ask(**LONG, prompt="a", stream=True)
        with one.ask(**LONG, prompt="b", stream=True):
            one.until(idle=0, queue=1)
            with pytest.raises(openai.RateLimitError) as refused:
                one.ask(**LONG, prompt="c")
            assert refused.value.response.headers["retry-after"] == "1" and refused.value.code == "queue_full"
        one.until(queue=0)
        stream.close()
        assert one.ask(**GREEDY, prompt="d").usage.completion_tokens == 12
        stream = one.ask(**LONG, prompt="a", stream=True)
        next(iter(stream))
        assert one.end() == 0
        with pytest.raises(openai.APIError, match="could wait no longer"):
            list(stream)


def test_an_engine_that_fails_ends_the_server(monkeypatch: Patch, capsys: Printed) -> None:
    with tiny() as one:
        monkeypatch.setattr(one.engine.schedule.rounds, "launch", lambda *args, **how: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the engine failed, and the server ends"):
            one.ask(**GREEDY, prompt="a")
        assert one.end() == 1 and "the engine failed: ZeroDivisionError" in capsys.readouterr().err


def test_a_signal_ends_the_program_when_all_have_their_answers(folder: Path) -> None:
    flags = f"--model {folder} --no-compile --port 0 --draft off --device cpu --max-seq-len 4096".split()
    command = [sys.executable, "scripts/serve.py", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            url, said = program.stdout.readline().split(" ", 1)
            assert url.startswith("http://127.0.0.1:") and said == f"serves {folder}, --draft off\n"
            ask, how = client_of(url).completions.create, {"prompt": "a", "stream": True, "model": str(folder)}
            stays, cut = (ask(**LONG | how | {"max_tokens": n}) for n in (120, 4000))
            assert next(iter(stays)) and next(iter(cut))
            program.send_signal(signal.SIGTERM)
            with pytest.raises(openai.InternalServerError, match="503 - the server is ending"):
                while True:  # until the signal has come
                    ask(**GREEDY | {"model": str(folder)}, prompt="b")
            assert [piece.choices[0].finish_reason for piece in stays][-1] == "length"
            program.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="could wait no longer"):
                list(cut)
            assert program.wait() == 0
        finally:
            program.kill()


def test_without_its_libraries_it_says_how_to_get_them(monkeypatch: Patch, refuses: Refuses) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refuses(serve.main) == 'serve.py: there is no uvicorn here: pip install -e ".[serve]"'


def test_the_client_that_a_page_shows_is_answered(served: Running, capsys: Printed) -> None:
    code = (ROOT / "docs/use.md").read_text(encoding="utf-8").split("```py\n")[1].split("```")[0]
    exec(code.replace("http://127.0.0.1:8000/v1", served.url).replace("smollm2", "m"), {})
    assert capsys.readouterr().out.strip()
