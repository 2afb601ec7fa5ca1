"""What a capture must not meet, what its seconds are, and what happens where there is none: over the stand-in."""

import dataclasses
import gc
import time
import warnings
from typing import Any

import pytest
import torch

from card import time_split
from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.sampling import GREEDY, Kind
from gpt_fast_sd.serving.launch import Rounds
from gpt_fast_sd.serving.requests import Request
from gpt_fast_sd.state import RoundPlan
from measuring import turns
from tests.drafts import draft_of
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.gpuless.pools import Cuda
from tests.helpers import Noting, Patch, ahead, few, random_ids, tiny_config, tiny_engine, tiny_model

PROMPTS = [random_ids(n, seed=n) for n in (100, 1, 300)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
KINDS = [GREEDY, Kind(True, False), Kind(True, True)]
NOT_PERMITTED = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def engine(policy: str = "streaming", *, gamma: int | str = 2, **changes: Any) -> Engine:
    draft = dataclasses.replace(draft_of(policy, budget=96), gamma=gamma)
    small = tiny_model(tiny_config(n_layers=1), seed=1) if draft.draft_model else None
    return tiny_engine(draft, small, **{"batch_size": 3, "max_seq_len": 700} | changes)


def tokens(one: Engine, params: SamplingParams = PARAMS) -> list[list[int]]:
    return tokens_of(one.generate(PROMPTS, params))


def by_its_clock(cuda: Cuda, monkeypatch: Patch, slow: float = 0.0) -> None:
    """A round takes the device 10 ms, the host itself no time, and a capture so long."""
    cuda.work, cuda.slow = 0.01, slow
    monkeypatch.setattr(time, "perf_counter", lambda: cuda.clock)


def after(monkeypatch: Patch, cuda: Cuda, seconds: float, owner: Any, name: str) -> None:
    """Let the clock go on by so much ahead of each call of a method."""
    ahead(monkeypatch, owner, name, lambda *_, **how: setattr(cuda, "clock", cuda.clock + seconds))


# ---- what must not happen in a capture -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["streaming", "guided", "snapkv", "quest", "lookup", "early_exit", "hierarchy"])
def test_no_operator_runs_for_the_first_time_in_a_capture(policy: str, cuda: Cuda) -> None:
    """A kernel is loaded when it first runs, which CUDA does not promise to do while a stream is captured."""
    one, plan = engine(policy), RoundPlan(gamma=2, n_keys=510, captured=True)

    def kernel(op: Any, args: Any) -> Any:  # and the dtypes and dimensions that it runs over; a view runs none
        return None if op.is_view else (op, *((a.dtype, a.dim()) for a in args if isinstance(a, torch.Tensor)))

    with torch.inference_mode():
        with Noting(kernel) as before:
            one.schedule.rounds.warm_up([2], KINDS)
        for kind in KINDS:
            with Noting(kernel) as captured:
                one.schedule.rounds.device_round(dataclasses.replace(plan, kind=kind))
            ran = {*captured.seen} - {None}
            assert ran and ran <= {*before.seen}


def test_a_capture_makes_no_handle_and_collects_no_garbage_and_leaves_the_collector_as_it_was(cuda: Cuda) -> None:
    one = engine("snapkv", gamma="auto")
    assert tokens(one) and len(cuda.captures) > 5 and gc.isenabled()
    assert all(capture["handle"] and not capture["collects"] for capture in cuda.captures)
    gc.disable()
    try:
        one.schedule.rounds.forget()
        assert tokens(one) and not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", few(["streaming", "guided", "snapkv", "hierarchy"], ["streaming"]))
@pytest.mark.usefixtures("traced")
def test_a_captured_plan_compiles_nothing_that_a_warm_up_has_not(policy: str, monkeypatch: Patch) -> None:
    """Dynamo's work in a capture would be a failure, not a delay: compiled rounds, as on CUDA, over each view."""
    monkeypatch.setitem(TRAITS, "cpu", dataclasses.replace(TRAITS["cuda"], captures=False))
    one = engine(policy, compile=True, max_seq_len=1500)
    one.warm_up()
    rounds, policy_ = one.schedule.rounds, one.policy
    assert policy_
    with torch.inference_mode():
        rounds.warm_up(one.schedule.gammas, KINDS)
        before = rounds.graphs + policy_.graphs
        one.state.active.fill_(True)
        one.state.remaining.fill_(1000)
        for kind in KINDS:
            one.state.table.temperature.fill_(0.8 if kind.sampled else 0.0)
            one.state.table.top_k.fill_(20 if kind.filtered else one.state.vocab_size)
            for gamma in one.schedule.gammas:
                for in_view in (512, 1024, one.cache.capacity):
                    one.cache.seq_len.fill_(300)
                    rounds.device_round(RoundPlan(gamma=gamma, n_keys=in_view - gamma, kind=kind, captured=True))
    of_steps = rounds.decode.graphs
    one.logits(PROMPTS[0], last=1)  # of the graph that rounds have
    assert rounds.graphs + policy_.graphs == before > 0 and rounds.decode.graphs == of_steps > 0


# ---- seconds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", [0.0, 0.005, 0.02])
def test_work_between_rounds_makes_no_tokens_faster(consumer: float, cuda: Cuda, monkeypatch: Patch) -> None:
    """The device goes on meanwhile: 10 ms of its clock are 10 ms, however long anybody prints."""
    one = engine()
    tokens(one, dataclasses.replace(PARAMS, max_tokens=40))  # all that has to be captured is
    by_its_clock(cuda, monkeypatch)
    for _ in one.stream(PROMPTS, dataclasses.replace(PARAMS, max_tokens=40)):
        cuda.clock += consumer
    stats = one.stats
    assert stats.device_seconds == pytest.approx(0.01 * stats.rounds) and stats.rounds > 10
    assert stats.decode_seconds == pytest.approx(stats.device_seconds) and stats.host_seconds == pytest.approx(0)
    assert stats.capture_seconds == 0 and stats.as_dict()["device_seconds"] == stats.device_seconds
    assert time_split(stats) == {"rounds on the device": "100%", "host": "0%"}  # and no parts that nobody timed


def test_a_slow_host_is_charged_where_the_device_waits_for_it(cuda: Cuda, monkeypatch: Patch) -> None:
    one = engine()
    tokens(one)
    by_its_clock(cuda, monkeypatch)
    after(monkeypatch, cuda, 0.03, one.schedule.rounds, "launch")
    tokens(one)
    assert 1 <= one.stats.decode_seconds / (one.stats.rounds * 0.03) <= 1.4


def test_the_planner_learns_what_the_device_took_and_nothing_of_captures(cuda: Cuda, monkeypatch: Patch) -> None:
    one, learned = engine(gamma="auto"), list[float | None]()
    one.warm_up()
    monkeypatch.setattr(one.schedule.planner, "choose", lambda n_keys: 1)
    monkeypatch.setattr(one.schedule.planner, "record_whole", lambda *args, **arm: learned.append(args[2]))
    by_its_clock(cuda, monkeypatch, slow=1000.0)
    for _ in one.stream(PROMPTS, dataclasses.replace(PARAMS, max_tokens=30)):
        cuda.clock += 0.1
    known = [seconds for seconds in learned if seconds is not None]
    assert None in learned and len(known) > 5 and known == pytest.approx([0.01] * len(known))


def test_a_capture_of_a_refresh_alone_is_time_of_no_round(cuda: Cuda, monkeypatch: Patch) -> None:
    """A row outgrows the budget of a selection while its rounds have their graphs: the refresh alone is captured."""
    one, learned = engine("snapkv", gamma=1), list[float | None]()
    one.warm_up()
    monkeypatch.setattr(one.schedule.planner, "record_whole", lambda *args, **arm: learned.append(args[2]))
    by_its_clock(cuda, monkeypatch, slow=1000.0)
    one.generate([random_ids(80)], dataclasses.replace(PARAMS, max_tokens=40))
    assert "refresh" in {key[0] for key in one.schedule.rounds._captured} and one.stats.capture_seconds >= 2000
    assert one.stats.decode_seconds < 10 and all(seconds is None or seconds < 10 for seconds in learned)


@pytest.mark.parametrize(("behind", "seconds"), [(0, 0.014), (1, 0.010)])
def test_a_host_that_is_waited_for_counts_too(behind: int, seconds: float, cuda: Cuda, monkeypatch: Patch) -> None:
    """A round with none in flight before and behind it is as long as both, else as long as the longer one."""
    one = engine("off")
    tokens(one)
    by_its_clock(cuda, monkeypatch)
    monkeypatch.setattr(Rounds, "results_behind", behind)
    after(monkeypatch, cuda, 0.004, Request, "commit")
    one.generate([random_ids(5)], dataclasses.replace(PARAMS, max_tokens=20))
    assert one.stats.decode_seconds == pytest.approx(one.stats.rounds * seconds, abs=0.005) and one.stats.rounds == 20


def test_a_first_round_of_a_kind_teaches_nothing(cuda: Cuda, monkeypatch: Patch) -> None:
    """It may build what its sampling needs; the next one is captured, those behind it are as all others."""
    one, usual = engine(), list[bool]()
    launch = one.schedule.rounds.launch

    def noted(*args: Any, **how: Any) -> Any:
        usual.append((round_ := launch(*args, **how)).is_usual)
        return round_

    monkeypatch.setattr(one.schedule.rounds, "launch", noted)
    list(one.stream(iter([(PROMPTS[0], dataclasses.replace(PARAMS, temperature=0.9, seed=1))])))
    assert usual[:2] == [False, False] and all(usual[2:]) and len(usual) > 3


def test_the_time_of_captures_is_in_no_speed(cuda: Cuda, monkeypatch: Patch) -> None:
    """10 ms a round of three rows and more tokens, though captures, one when the view doubles, take a quarter hour."""
    one = engine()
    by_its_clock(cuda, monkeypatch, slow=1000.0)
    found = turns.run(one, [*PROMPTS[:2], random_ids(504)], [dataclasses.replace(PARAMS, max_tokens=24)] * 3)
    assert found.stats.capture_seconds >= 1000 and found.steady and found.steady >= 290 <= found.completion


# ---- where a capture is refused --------------------------------------------------------------------------------------


class ReadsTheHost(Exception):
    """What a part raises that needs a value in a capture."""


def unlucky(error: Exception, cuda: Cuda, monkeypatch: Patch, times: int) -> list[int]:
    """Captures end with the error so many times; what is returned counts them."""
    left = [times]

    def reached(at: str) -> None:
        if at == "end" and left[0]:
            left[0] -= 1
            raise error

    ahead(monkeypatch, cuda, "reach", reached)
    return left


@pytest.mark.parametrize("error", [ReadsTheHost("a value"), RuntimeError("operation not permitted"), NOT_PERMITTED])
def test_what_cannot_be_captured_runs_and_says_so_once(error: Exception, cuda: Cuda, monkeypatch: Patch) -> None:
    one, other = engine(), engine()
    expected = tokens(one)
    left = unlucky(error, cuda, monkeypatch, 1000)
    with pytest.warns(UserWarning, match="cannot be captured") as said:
        assert tokens(other) == expected
    assert len(said) == 1 and str(error).split("\n")[0] in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(other) == expected
    assert left[0] < 1000 and other.stats.rounds


@pytest.mark.parametrize("policy", ["streaming", "snapkv"])
def test_parts_that_cannot_be_captured_are_tried_twice_and_no_more(policy: str, cuda: Cuda, monkeypatch: Patch) -> None:
    one = engine(policy)
    one.warm_up()
    left = unlucky(ReadsTheHost("a value was read"), cuda, monkeypatch, 1000)
    with pytest.warns(UserWarning, match="cannot be captured"):
        tokens(one, dataclasses.replace(PARAMS, max_tokens=30))
    keys = one.schedule.rounds._uncapturable
    assert 1000 - left[0] == 2 * len(keys) and (len(keys) > 1 or policy == "streaming")
    tokens(one, dataclasses.replace(PARAMS, max_tokens=30))
    assert 1000 - left[0] == 2 * len(keys)


def test_a_capture_that_failed_once_is_tried_again(cuda: Cuda, monkeypatch: Patch) -> None:
    one = engine()
    expected = tokens(one)
    one.schedule.rounds.forget()
    unlucky(ReadsTheHost("once"), cuda, monkeypatch, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(one) == expected
    assert cuda.graphs


NO_MEMORY = torch.OutOfMemoryError("no memory")
LATE = RuntimeError("operation failed due to a previous error during capture")
LATE.__context__ = NO_MEMORY


@pytest.mark.parametrize(
    ("error", "alone"),
    [(NO_MEMORY, True), (torch.AcceleratorError("CUDA error: lost"), True), (LATE, True), (ReadsTheHost("one"), False)],
)
def test_what_the_device_raises_in_a_capture_is_raised_and_all_that_one_of_several_ranks_does(
    error: Exception, alone: bool, cuda: Cuda, monkeypatch: Patch
) -> None:
    one = engine()
    one.warm_up()
    one.schedule.rounds.falls_back &= alone
    unlucky(error, cuda, monkeypatch, 1)
    with pytest.raises(type(error), match=str(error)):
        tokens(one)


# ---- which graph serves ----------------------------------------------------------------------------------------------


def test_a_graph_of_a_wider_kind_serves_a_narrower_batch(cuda: Cuda) -> None:
    sampled = dataclasses.replace(PARAMS, temperature=0.9, seed=3)
    filtered = dataclasses.replace(sampled, top_k=20)
    one, other = engine(), engine()
    expected = [tokens(other, params) for params in (PARAMS, sampled, filtered)]
    one.warm_up([filtered])
    tokens(one, filtered)  # all three kinds are called, and graphs of rows that filter are captured
    before, rounds = len(cuda.captures), one.schedule.rounds
    rounds._captured = {key: graph for key, graph in rounds._captured.items() if key[2] == KINDS[2]}
    rounds.most_steps = rounds._steps_held  # there is no room for more
    assert [tokens(one, params) for params in (PARAMS, sampled, filtered)] == expected
    assert len(cuda.captures) == before


def test_kinds_that_are_known_are_compiled_before_and_shown_as_progress(cuda: Cuda) -> None:
    one, told = engine(), list[tuple[str, int, int]]()
    one.on_progress = lambda *args: told.append(args)
    one.warm_up([dataclasses.replace(PARAMS, temperature=0.9, top_p=0.9)])
    assert told[-5:] == [("warm up", i, 4) for i in range(5)]  # two gammas, of rows that sample and that filter
    assert all(one.schedule.rounds.is_warm(gamma, kind) for gamma in (2, 0) for kind in KINDS)
    told.clear()
    one.warm_up([PARAMS])
    one.warm_up(PARAMS)
    one.warm_up()
    assert told == []
    for wrong in (3, [3], "greedy"):
        with pytest.raises(ValueError, match="params must be a SamplingParams, or a list of them, got "):
            one.warm_up(wrong)  # type: ignore[arg-type]


def test_seconds_of_compiling_include_those_of_kinds_that_came_later(cuda: Cuda) -> None:
    one = engine()
    tokens(one)
    first = one.stats.compile_seconds
    started = time.perf_counter()
    tokens(one, dataclasses.replace(PARAMS, temperature=0.9))
    assert first < one.stats.compile_seconds < first + time.perf_counter() - started
    tokens(one)
    assert one.stats.compile_seconds > first
