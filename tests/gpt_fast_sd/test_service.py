"""What several threads and an event loop submit is decoded together, as `generate` decodes it."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, SamplingParams, TokenEvent
from gpt_fast_sd.serving import service
from tests.helpers import ByteTokenizer, Patch, random_ids, tiny_engine

PROMPTS = [random_ids(n, seed=n) for n in (40, 3, 300, 21, 7)]
PARAMS = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=9, temperature=0.8, seed=3)]
LONG = SamplingParams(max_tokens=400)


def an_engine(**settings: Any) -> Engine:
    return tiny_engine(DraftConfig(policy="streaming", budget=32, gamma=2), **settings)


def test_threads_get_what_generate_gives_and_other_calls_wait_for_their_turn() -> None:
    one = an_engine()
    jobs = [(prompt, PARAMS[i % 2]) for i, prompt in enumerate(PROMPTS * 4)]
    expected = [completion.tokens for completion in one.generate(jobs)]
    got: dict[int, list[TokenEvent]] = {}

    def user(i: int) -> None:
        got[i] = list(one.submit(*jobs[i]))

    with ThreadPoolExecutor(len(jobs)) as users:
        list(users.map(user, range(len(jobs))))
    for i, events in got.items():
        assert [token for event in events for token in event.tokens] == expected[i]
        assert events[-1].completion and events[-1].completion.tokens == expected[i]
        assert len({event.index for event in events}) == 1 and events[-1].completion.index == events[0].index
    assert len({events[0].index for events in got.values()}) == len(jobs)
    events = iter(one.submit(PROMPTS[0], LONG))
    next(events)
    with pytest.raises(RuntimeError, match="still streaming"):
        one.generate([PROMPTS[0]], PARAMS[0])
    assert len({event.index for event in events}) == 1


def test_whoever_has_a_result_may_call_the_engine_and_ask_again_and_may_have_lost_the_engine() -> None:
    ids, one = [5, 6, 7], an_engine()
    one.schedule.rounds.synchronize = lambda: time.sleep(0.002)  # type: ignore[method-assign]
    for _ in range(5):
        request = one.submit((token for token in ids), PARAMS[0])  # type: ignore[arg-type]
        assert request.result() is request.result()
        assert [request.result().tokens] == [c.tokens for c in one.generate([ids], PARAMS[0])]
    del one
    assert an_engine().submit(ids, PARAMS[0]).result().tokens == request.result().tokens


def test_scores_have_their_turn_between_submissions_and_all_get_what_they_get_alone() -> None:
    one = an_engine()
    [whole] = one.generate([PROMPTS[1]], LONG)
    [alone] = one.score([text := [*PROMPTS[1], *whole.tokens[:20]]], top=2)
    assert alone.best.shape == (22, 2) and alone.best_ids[2:, 0].tolist() == whole.tokens[:20]
    assert torch.equal(alone.greedy, alone.best[:, 0] == alone.logprobs)
    requests = [one.submit(PROMPTS[1], LONG) for _ in range(4)]
    with ThreadPoolExecutor(4) as users:
        found = [*users.map(lambda _: one.score([text])[0].logprobs, range(8))]
    assert all(torch.equal(each, alone.logprobs) for each in found)
    assert [request.result().tokens for request in requests] == [whole.tokens] * 4


def test_a_score_waits_for_what_has_begun_and_not_for_what_is_submitted_meanwhile() -> None:
    one, begun, go, waiting = an_engine(), threading.Event(), threading.Event(), list[int]()

    def within(*given: Any) -> Any:
        waiting.append(len(one._service._inbox))
        with pytest.raises(RuntimeError, match="still streaming"):  # the thread that asks has the engine
            one.score([PROMPTS[1]])
        begun.set()
        return given[1] if go.wait(60) else None

    requests = [one.submit(PROMPTS[1], SamplingParams(max_tokens=1, processor=within))]
    assert begun.wait(60)
    with ThreadPoolExecutor(1) as user:
        score = user.submit(one.score, [PROMPTS[1]])
        while len(one._service._turns) < 2:
            time.sleep(0.01)
        requests += [one.submit([i], PARAMS[0]) for i in range(1, 30)]
        one.on_progress = within
        go.set()
        assert score.result()
    assert waiting[:3] == [0, 29, 29] and all(request.result().tokens for request in requests)


def test_closing_ends_what_threads_have_at_work() -> None:
    with an_engine() as one:
        requests = [one.submit(prompt, LONG) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
        events = iter(requests[0])
        next(events)
    ended = [list(events)[-1].completion, *(request.result() for request in requests[1:])]
    assert [each and each.finish_reason for each in ended] == ["cancelled"] * 3 and not one._service._at_work


def test_closing_from_another_thread_waits_for_the_round_under_way_and_other_calls_do_not(monkeypatch: Patch) -> None:
    one, begun, refused, under_way = an_engine(), threading.Event(), threading.Event(), threading.Lock()

    def slow(_: object) -> None:
        with under_way:
            begun.set()
            assert refused.wait(60)

    def later() -> None:
        while not one._access.closed:
            time.sleep(0.001)
        time.sleep(0.05)
        refused.set()

    one.on_round, forget = slow, one.schedule.rounds.forget
    monkeypatch.setattr(one.schedule.rounds, "forget", lambda: found.append(under_way.locked()) or forget())  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(2) as pool:
        found, generating = list[bool](), pool.submit(one.generate, [PROMPTS[0]], LONG)
        assert begun.wait(60)
        for call in (partial(one.generate, [PROMPTS[1]]), partial(one.logits, PROMPTS[1])):
            with pytest.raises(RuntimeError, match="still streaming"):
                call()  # type: ignore[operator]
        pool.submit(later)
        one.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            generating.result()
    assert found == [False]


def test_closing_does_not_wait_for_a_thread_that_waits_for_prompts() -> None:
    one, begun, go, told = an_engine(), threading.Event(), threading.Event(), list[str]()
    one.on_progress = lambda what, done, n: told.append(what)

    def prompts() -> Any:
        yield PROMPTS[0]
        begun.set()
        assert go.wait(60)
        yield PROMPTS[1]

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(lambda: list(one.stream(prompts(), PARAMS[0])))
        assert begun.wait(60)
        one.close()
        n_told = len(told)
        assert not go.is_set() and not streaming.done()
        go.set()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            streaming.result()
        assert len(told) == n_told  # the prompt that came then was not prefilled


def test_what_is_submitted_while_another_call_is_at_work_is_decoded_after_it() -> None:
    one = an_engine()
    stream = one.stream([PROMPTS[0]], PARAMS[0])
    next(stream)
    waiting = one.submit(PROMPTS[1], PARAMS[0])
    left = [event.completion for event in stream][-1]
    assert left and left.finish_reason == "length" and waiting.result().finish_reason == "length"


def test_a_request_is_cancelled_wherever_it_is_and_others_go_on_as_they_were() -> None:
    one = an_engine(batch_size=3, max_seq_len=4_096)
    [alone] = one.generate([PROMPTS[0]], LONG)
    long: list[Any] = []
    one.on_progress = lambda what, done, n: long[0].cancel() if what == "prefill" and 0 < done < n > 3_000 else None
    stays, goes = one.submit(PROMPTS[0], LONG), one.submit(PROMPTS[1], LONG)
    long.append(filled := one.submit(random_ids(3_600), LONG))
    waits = one.submit(PROMPTS[3], LONG)
    waits.cancel()  # before one of three slots is free for it
    events = iter(goes)
    first = next(events)
    goes.cancel()
    *_, last = [first, *events]
    assert last.completion and last.completion.finish_reason == "cancelled"
    assert 0 < last.completion.stats.emitted < 400 and last.completion.stats.emitted == len(last.completion.tokens)
    for each in (waits, filled):
        ended = each.result()
        assert (ended.finish_reason, ended.tokens, ended.stats.rounds) == ("cancelled", [], 0)
    assert stays.result().tokens == alone.tokens
    stays.cancel()  # it has ended
    assert one.submit(PROMPTS[1], PARAMS[0]).result().finish_reason == "length"


def test_text_that_a_stop_string_held_back_is_shown_when_it_is_cancelled() -> None:
    one = an_engine(tokenizer=ByteTokenizer())
    [whole] = one.generate(["abc"], SamplingParams(max_tokens=100))
    stream = one.stream(["abc"], SamplingParams(max_tokens=100, stop=whole.text))  # nothing is shown before its end
    texts = []
    for event in stream:
        texts.append(event.text)
        one.schedule.cancel(0)
        last = event
    assert last.completion and last.completion.finish_reason == "cancelled"
    assert "".join(texts) == last.completion.text and whole.text.startswith(last.completion.text.rstrip("\ufffd"))


def test_an_event_loop_serves_users_of_whom_one_leaves() -> None:
    one = an_engine(batch_size=3, max_seq_len=800)
    expected = [completion.tokens for completion in one.generate(PROMPTS[:2], PARAMS[0])]

    async def user(prompt: list[int], leaves: bool) -> list[int]:
        tokens: list[int] = []
        async for event in one.submit(prompt, LONG if leaves else PARAMS[0]):
            tokens += event.tokens
        return tokens

    async def all_of_them() -> list[Any]:
        leaving = asyncio.create_task(user(PROMPTS[2], True))
        others = [asyncio.create_task(user(prompt, False)) for prompt in PROMPTS[:2]]
        await asyncio.sleep(0.05)
        leaving.cancel()
        return await asyncio.gather(*others, leaving, return_exceptions=True)

    *got, left = asyncio.run(all_of_them())
    assert got == expected and isinstance(left, asyncio.CancelledError)
    assert one.submit(PROMPTS[1], PARAMS[0]).result().tokens == expected[1]  # a slot is free


def test_what_cannot_run_is_refused_where_it_is_submitted_and_ends_no_one_elses() -> None:
    one = an_engine()
    good = one.submit(PROMPTS[0], LONG)
    for prompt, params, said in (([], None, "is empty"), ([999], None, "token id 999"), ("a", None, "no tokenizer"),
                                 ([1], SamplingParams(max_tokens=600), "over max_seq_len 512")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            one.submit(prompt, params)
    assert good.result().finish_reason == "length"
    one.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        one.submit([1])


def test_a_failure_is_raised_where_events_are_waited_for_and_the_next_request_runs(monkeypatch: Patch) -> None:
    one = an_engine()
    with monkeypatch.context() as within:
        within.setattr(one.schedule.rounds, "launch", lambda *args, **how: 1 / 0)
        for each in [one.submit(prompt, PARAMS[0]) for prompt in PROMPTS]:
            with pytest.raises(ZeroDivisionError):
                each.result()
    assert one.submit(PROMPTS[0], PARAMS[0]).result().finish_reason == "length"


def test_the_thread_ends_when_nothing_comes_and_begins_again(monkeypatch: Patch) -> None:
    monkeypatch.setattr(service, "LINGER", 0.01)
    one, threads = an_engine(), list[threading.Thread | None]()
    for _ in range(2):
        assert one.submit(PROMPTS[0], PARAMS[0]).result().tokens
        if thread := one._service._thread:
            thread.join(10)
            threads.append(thread)
        assert one._service._thread is None
    assert not any(thread.is_alive() for thread in threads if thread)


def test_a_program_may_end_while_requests_are_at_work() -> None:
    program = """
        from gpt_fast_sd import Engine, EngineConfig, SamplingParams
        one = Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False, max_seq_len=4096))
        at_work = [one.submit("It was", SamplingParams(max_tokens=4000, ignore_eos=True)) for _ in range(20)]
        print(next(iter(at_work[0])).tokens)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("[") and not done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked here")
def test_a_process_that_was_forked_says_so_and_does_not_wait_for_threads_it_lacks() -> None:
    program = """
        import os, torch
        from gpt_fast_sd import Engine, EngineConfig, SamplingParams
        torch.set_num_threads(2)
        one = Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False, max_seq_len=512))
        one.generate("It was", SamplingParams(max_tokens=2))
        for n, calls in (2, (one.generate, one.submit)), (1, (one.submit,)):
            torch.set_num_threads(n)
            next(events := iter(one.submit("It was", SamplingParams(max_tokens=400, ignore_eos=True))))
            if not os.fork():
                for call in calls:
                    try:
                        call("It was")
                    except RuntimeError as error:
                        print(error, flush=True)
                os._exit(0)
            os.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("forked from the one that built the engine: build one in each process") == 3, done.stderr
