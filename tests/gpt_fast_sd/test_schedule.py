"""Who gets the device next: a chunk of a prompt or a round; and prompts that come while others are decoded.

Shapes: L layers, K kv heads, T tokens, H head dim.
"""

import gc
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.policies.standalone import StandaloneDraft
from gpt_fast_sd.prefill import CHUNK, Prefill
from gpt_fast_sd.serving import lifecycle
from tests.gpt_fast_sd.policies.drafting import drafting_now_and_then, entries, prefilled
from tests.gpt_fast_sd.test_rounds import NAMES, captured, engine, told
from tests.helpers import ByteTokenizer, Printed, ahead, few, random_ids, thinned

Watch = Callable[[Engine], list[str]]
KINDS = {"eager": engine, "captured": captured}
# a row that decodes all the time, short ones next to it, and long ones that take their slots
PROMPTS = [random_ids(n, seed=n) for n in (40, 9, 20, 520, 3, 300)]
PARAMS = [
    SamplingParams(max_tokens=n, temperature=0.9 * (i % 3 == 2), seed=i, ignore_eos=True)
    for i, n in enumerate((60, 3, 5, 7, 9, 8))
]
SOON = {"eager": ["quest", "guided", "hierarchy over standalone"], "captured": ["off", "standalone"]}
ALL = few(((name, kind) for kind in KINDS for name in NAMES), {(name, kind) for kind in KINDS for name in SOON[kind]})
N_CHUNKS = [-(-(len(prompt) - 1) // CHUNK) for prompt in PROMPTS]


def own_prefill(one: Engine) -> Prefill | None:
    """What a draft prefills its own cache with."""
    level = getattr(one.policy, "cheap", one.policy)
    return level._prefill if isinstance(level, StandaloneDraft) else None


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Begin to note an engine's chunks and rounds, in a list."""

    def watch(one: Engine) -> list[str]:
        calls = list[str]()
        one.warm_up()
        ahead(monkeypatch, Prefill, "chunk", lambda self, *_: calls.append("chunk" if len(self._held) > 1 else "other"))
        ahead(monkeypatch, one.schedule.rounds, "launch", lambda *_, **how: calls.append("round"))
        return calls

    return watch


def waits(calls: list[str]) -> list[int]:
    """Chunks before the first round, between every two, and after the last."""
    return [len(part.split()) for part in " ".join(calls).split("round")]


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_between_two_rounds_there_is_one_chunk_at_most(name: str, kind: str, order: Watch) -> None:
    """And rounds write nothing into the slot that is half filled.

    They write for idle rows, too: a draft from where the row stands, a second model from a token or two before.
    """
    one, seen = KINDS[kind](name), []
    turned = "past" in name  # its model's keys are not those of one prefill
    calls, models = order(one), 2 if "standalone" in name or turned else 1
    fill = one.schedule._fill

    def watched() -> bool:
        arrival = one.schedule.arrival
        assert arrival
        computed, body = fill(), arrival.request.prompt[:-1]
        for prefill in (one._prefill, own_prefill(one)):
            if prefill and one.schedule.arrival is None:
                found = entries(prefill.runner.cache, arrival.slot, len(body))
                own = turned and prefill is not one._prefill
                assert own or all(map(torch.equal, found, prefilled(prefill.runner, body)))
                seen.append(len(body))
        return computed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one.schedule, "_fill", watched)
        got = one.generate(PROMPTS, PARAMS)
    assert len(seen) == models * len(PROMPTS)
    first, *later = waits([call for call in calls if call != "other"])
    assert first == models * sum(N_CHUNKS[:3])  # as long as no row waits, without a pause
    assert max(later) == 1 and sum(later) == models * sum(N_CHUNKS[3:])
    # Samples depend on the draft. A guided draft depends on all that was verified, and eager rounds draft less if no
    # row has room for more; and if two pages tie, topk takes either, depending on the number of pages in view.
    steady = "guided" not in name and name != "quest"
    for i in (0, 2, 3, 5) if steady else (0, 3):
        alone = one.generate([PROMPTS[i]], PARAMS[i])
        assert told(alone)[0][:2] == told([got[i]])[0][:2]
        if name != "quest":
            assert told(alone) == told([got[i]])


# ---- what ends half-way ----------------------------------------------------------------------------------------------


LEFT = [("quest", "eager"), ("standalone", "captured"), ("off", "eager"), ("hierarchy over standalone", "eager")]


@pytest.mark.parametrize(("name", "kind"), few(LEFT, LEFT[:2]))
def test_a_stream_left_with_a_prompt_half_filled_leaves_the_engine_as_good_as_new(name: str, kind: str) -> None:
    one = KINDS[kind](name)
    expected = told(KINDS[kind](name).generate(PROMPTS, PARAMS))
    for leave in ("close", "forget"):
        stream: Any = one.stream(PROMPTS, PARAMS)
        while not (one.schedule.arrival and one.schedule.arrival.left < one.schedule.arrival.total):
            next(stream)
        if leave == "close":  # between two chunks of a prompt
            stream.close()
        del stream
        gc.collect()
        assert one.schedule.arrival is None and not any(one.schedule.slots) and not one.state.active.any()
        assert not one.schedule.in_flight
        assert int(one.cache.seq_len.max()) < one.config.max_seq_len
    assert told(one.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("name", few(["off", "guided", "standalone"], ["guided", "standalone"]))
def test_a_chunk_that_fails_leaves_nothing_to_rely_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, chunk = engine(name), Prefill.chunk
    one.warm_up()

    def failing(self: Prefill, slot: int, tokens: Sequence[int], start: int) -> None:
        chunk(self, slot, tokens, start)
        if start == CHUNK:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Prefill, "chunk", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            one.generate(PROMPTS, PARAMS)
    assert one.schedule.arrival is None and not any(one.schedule.slots) and not one.state.active.any()
    prefills = [prefill for prefill in (one._prefill, own_prefill(one)) if prefill]
    assert max(prefill.held(slot) for prefill in prefills for slot in range(3)) < CHUNK
    assert told(one.generate(PROMPTS, PARAMS)) == told(engine(name).generate(PROMPTS, PARAMS))


# ---- seconds, and progress -------------------------------------------------------------------------------------------


@thinned("name,kind", ["streaming", "standalone"], list(KINDS))
def test_the_time_of_a_chunk_is_no_rounds(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes by chunks, of a second each, and by rounds, of a thousandth."""
    seconds, took, one = list[float](), [], KINDS[kind](name, gamma="auto")
    drafting_now_and_then(one, [3], timed=False)
    one.warm_up()
    stub = types.SimpleNamespace(perf_counter=lambda: sum(seconds))
    for module in ("serving.scheduling", "serving.launch"):
        monkeypatch.setattr(f"gpt_fast_sd.{module}.time", stub)
    ahead(monkeypatch, Prefill, "chunk", lambda *_: seconds.append(1.0))
    ahead(monkeypatch, one.schedule.rounds, "device_round", lambda *_: seconds.append(1e-3))
    monkeypatch.setattr(one.schedule.rounds, "capture", (lambda part: part) if kind == "captured" else None)
    monkeypatch.setattr(one.schedule.planner, "record", lambda g, n, *times, **arm: took.append(sum(times[:2])))
    monkeypatch.setattr(one.schedule.planner, "record_whole", lambda g, n, s, accepted, **arm: took.append(s or 0.0))
    one.generate(PROMPTS, PARAMS)
    assert one.stats.prefill_seconds == pytest.approx(seconds.count(1.0))
    assert seconds.count(1.0) == (2 if name == "standalone" else 1) * sum(N_CHUNKS)
    assert one.stats.prefill_tokens == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert 0 < one.stats.decode_seconds < 1e-3 * (one.stats.rounds + 2)  # the last one may be launched for no row
    assert took and max(took) < 0.01


def test_on_progress_tells_how_far_a_prompt_is_and_an_engine_says_nothing_by_itself(capfd: Printed) -> None:
    one, told_so = engine("standalone"), list[tuple[str, int, int]]()
    one.warm_up()
    one.on_progress = lambda what, done, total: told_so.append((what, done, total))
    one.generate([PROMPTS[3], [5]], SamplingParams(max_tokens=2))  # 519 tokens, by either model
    assert told_so == [("prefill", done, 1038) for done in (0, 256, 512, 519, 775, 1031, 1038)]
    plain = engine("off")
    plain.generate(PROMPTS[3:4], SamplingParams(max_tokens=2))
    assert capfd.readouterr() == ("", "")
    plain.on_progress = one.on_progress
    plain.generate(PROMPTS[3:4], SamplingParams(max_tokens=2))  # held: nothing to compute
    assert len(told_so) == 7


# ---- prompts that come one by one ------------------------------------------------------------------------------------


@thinned("name,kind", ["off", "streaming"], list(KINDS))
def test_prompts_that_are_asked_for_one_by_one_give_what_a_list_gives(name: str, kind: str) -> None:
    """In captured rounds, rows that sample or filter come when others have been captured already."""
    params = [SamplingParams(max_tokens=9, temperature=t, top_k=k, seed=1) for t, k in ((0, None), (1, None), (1, 9))]
    wanted = [params[min(i // 2, 2)] for i in range(len(PROMPTS))]
    expected = told(KINDS[kind](name).generate(PROMPTS, wanted))
    one = KINDS[kind](name)
    found = {e.index: e.completion for e in one.stream(zip(PROMPTS, wanted, strict=True)) if e.completion}
    assert told([found[i] for i in range(len(PROMPTS))]) == expected


def test_a_prompt_is_asked_for_when_a_slot_is_free_for_it() -> None:
    one, asked, done = engine("off"), list[int](), 0

    def prompts() -> Iterator[list[int]]:
        for i in range(12):
            assert not torch.is_inference_mode_enabled()  # what others do here is their own
            asked.append(i)
            yield PROMPTS[i % 3]

    stream = one.stream(prompts(), SamplingParams(max_tokens=4, ignore_eos=True))
    assert asked == []
    for event in stream:
        done += event.completion is not None
        assert len(asked) <= 3 + done  # three slots
    assert asked == list(range(12)) and done == 12
    assert one.stats.row_rounds == 48 and one.stats.rounds == 16  # no slot ran dry


def test_an_iterator_may_have_no_prompt_now_or_none_at_all() -> None:
    one, polls = engine("off"), list[int]()
    given = [PROMPTS[0], None, None, PROMPTS[1], None, PROMPTS[2]]

    def prompts() -> Iterator[list[int] | None]:
        for prompt in given:
            polls.append(one.stats.rounds)
            yield prompt

    events = list(one.stream(prompts(), SamplingParams(max_tokens=4, ignore_eos=True)))
    assert [e.index for e in events if e.completion] == [0, 1, 2]
    assert polls == [0, 0, 1, 2, 3, 4]  # asked again after a round, as a chunk has one behind it
    assert list(one.stream(iter([]))) == list(one.stream(iter([None, None]))) == []


def test_a_prompt_that_cannot_run_and_an_iterators_error_end_the_stream_where_they_are_reached() -> None:
    def failing() -> Iterator[list[int]]:
        yield [1]
        raise OSError(5, "Input/output error", "prompts.txt")

    one, params = engine("off"), SamplingParams(max_tokens=4, ignore_eos=True)
    for prompts, said in (
        (iter([PROMPTS[0], [1], [999], [2]]), "prompt 2 holds token id 999"),
        (iter([[1], 5]), "prompt 1 must be a text or a list"),
        (iter([(random_ids(800), params)]), "together 804, over max_seq_len 800"),
        (failing(), r"prompts\.txt"),
    ):
        with pytest.raises((ValueError, OSError), match=said):
            list(one.stream(prompts, params))
        assert not any(one.schedule.slots) and not one._access.running
    assert len(one.generate([[1]], params)[0].tokens) == 4


def test_a_prompt_may_bring_its_own_parameters_as_it_must_from_an_iterator() -> None:
    one = engine("off", tokenizer=ByteTokenizer())
    few, many = SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)
    prompts: list[Any] = [[1, 2], ("text", few), "text", ([1, 2], few), (1, 2)]
    wanted = [c.tokens for c in one.generate([[1, 2], "text", "text", [1, 2], [1, 2]], [many, few, many, few, many])]
    assert [c.tokens for c in one.generate(prompts, many)] == wanted
    found = {e.index: e.completion.tokens for e in one.stream(iter(prompts), many) if e.completion}
    assert [found[i] for i in range(5)] == wanted
    with pytest.raises(ValueError, match=r"take one SamplingParams, or come as \(prompt, SamplingParams\)"):
        one.stream(iter([[1]]), [few])


def test_of_two_threads_that_begin_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both, refused, told = threading.Barrier(2), threading.Event(), list[str]()
    monkeypatch.setattr(lifecycle, "require_current", lambda device: both.wait(30))  # both have found it idle
    access, schedule = lifecycle.Access(torch.device("cpu")), mock.Mock()

    def work() -> None:
        try:
            with access.at_work(schedule):
                told.append("at work" if refused.wait(30) else "alone")
        except RuntimeError as error:
            told.append(str(error))
            refused.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert sorted(told) == ["at work", lifecycle.BUSY] and not access.running
