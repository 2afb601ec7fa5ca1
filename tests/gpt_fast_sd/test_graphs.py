"""Engines that capture, over a stand-in that knows how long memory lives: graphs live, and are freed in time.

The engine's own pool, its streams, its pinned results and its events run here on the CPU, with real values.
"""

import dataclasses
import gc
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.loading.memory import LAYER_NODES, NODE, STEP_NODES, MemoryPlan
from gpt_fast_sd.model import save_hugging_face
from gpt_fast_sd.policies import build_policy
from gpt_fast_sd.policies.costs import steps_of
from gpt_fast_sd.serving.calibration import time_selecting, time_steps
from gpt_fast_sd.serving.cuda_graphs import GraphPool
from gpt_fast_sd.tp import Parallel
from measuring.replay import Replay
from tests.gpt_fast_sd.policies.drafting import drafting_now_and_then, tokens_of
from tests.gpuless.pools import RULES, Cuda, Event, Graph
from tests.helpers import Patch, ahead, few, random_ids, tiny_config, tiny_engine, tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import batch

PROMPTS = [random_ids(n, seed=n) for n in (100, 1, 300, 40)]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, seed=3)
FILTERED = SamplingParams(max_tokens=6, temperature=0.9, seed=3, top_k=20)

ONE_RULE = pytest.mark.parametrize("rule", ["2.13"])  # for what depends on no version


# The rules of the oldest torch are of the ordinary run where int8 caches and planes are captured.
@pytest.fixture(params=few(RULES, RULES[-1:]))
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(policy: str = "streaming", gamma: int | str = 2, **changes: Any) -> Engine:
    draft, model = DraftConfig(policy=policy, gamma=gamma, budget=96), tiny_model(tiny_config(n_layers=1))
    return tiny_engine(draft, model=model, **{"batch_size": 3, "max_seq_len": 500} | changes)


def tokens(one: Engine, params: SamplingParams = GREEDY, **how: Any) -> list[list[int]]:
    return tokens_of(one.generate(PROMPTS, params, **how))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What every greedy run has to emit: made without any capture, outside of the stand-in."""
    assert not TRAITS["cpu"].captures
    return tokens(engine("off"))


@pytest.fixture
def steady(cuda: Cuda, expected: list[list[int]]) -> Iterator[Engine]:
    """An engine that emits the same after the test as before it."""
    one = engine()
    assert tokens(one) == expected
    yield one
    assert tokens(one) == expected


# ---- which memory lives how long -------------------------------------------------------------------------------------


def test_a_sweep_of_drafts_captures_round_after_round_into_one_pool(cuda: Cuda, expected: list[list[int]]) -> None:
    one = engine(gamma=2)
    for policy, gamma in [("streaming", 4), ("guided", 2), ("snapkv", 3), ("guided", "auto")]:
        assert tokens(one) == expected
        kept = one.schedule.rounds  # somebody may still look at it
        one.redraft(DraftConfig(policy=policy, gamma=gamma, budget=96))
        del kept
    assert tokens(one) == expected


def test_an_engine_that_goes_takes_nothing_along_that_another_needs(steady: Engine, expected: list[list[int]]) -> None:
    other = engine("guided", gamma="auto")
    assert tokens(other) == tokens(steady) == expected
    other.redraft(DraftConfig(policy="streaming", gamma=2, budget=96))
    assert tokens(steady) == tokens(other) == expected
    del other
    gc.collect()


def test_pools_and_graphs_of_others_leave_alone_the_streams_of_one_that_stays(steady: Engine) -> None:
    timed, x = torch.cuda.CUDAGraph(), torch.ones(4, 4)
    with torch.cuda.graph(timed):  # on torch's own capture stream
        x @ x
    del timed
    for _ in range(20):  # torch hands out 32 streams cyclically
        pool = GraphPool(steady.device)
        pool(lambda: torch.ones(2, 2) @ torch.ones(2, 2))()
        del pool


def test_captures_that_fail_leave_no_pool_in_use(cuda: Cuda, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gpt_fast_sd.serving.cuda_graphs.KEEPS_POOLS", True)
    pool = GraphPool(torch.device("cpu"))
    for at, capture in itertools.product(("capture", "end", "part"), (pool, pool.passing)):
        cuda.fail(at, ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            capture(lambda: cuda.reach("part"))
    assert [one.users for one in cuda.pools.values() if one.users] == [1]  # its own graph, which stays


@ONE_RULE
def test_an_engine_is_refused_where_others_have_all_streams(cuda: Cuda) -> None:
    pools = [GraphPool(torch.device("cpu")) for _ in range(16)]
    with pytest.raises(RuntimeError, match=r"^all 32 CUDA streams of cpu belong to other engines: close one of them$"):
        engine()
    pools[3].close()
    engine()


@ONE_RULE
def test_a_capture_lets_other_threads_call_cuda_and_results_land_in_pinned_memory(cuda: Cuda) -> None:
    one = engine()
    tokens(one)
    assert cuda.captures and {capture["mode"] for capture in cuda.captures} == {"thread_local"}
    widest = 3 * 3 * (6 + 40)  # with the 20 likeliest of each token
    assert [place.numel() for place in one.schedule.rounds._pinned] == [widest] * 2
    assert all(type(place).__name__ == "Pinned" for place in one.schedule.rounds._pinned)


def test_an_engine_that_is_dropped_leaves_no_graph(cuda: Cuda) -> None:
    one = engine(gamma="auto")
    tokens(one)
    assert cuda.graphs
    gone = weakref.ref(one)
    del one
    assert gone() is None and not cuda.graphs  # at once, by counting references


def test_graphs_hold_no_more_steps_than_the_bound(cuda: Cuda, expected: list[list[int]], monkeypatch: Patch) -> None:
    """They are freed together: one freed alone would take memory that the others need."""
    one, held, steps = engine(gamma="auto"), list[int](), list[int]()
    one.schedule.rounds.most_steps = 6
    drafting_now_and_then(one, [3, 1, 2, 3, 3, 1, 0], timed=False)

    def note(n_keys: int) -> None:
        held.append(one.schedule.rounds.captured)
        steps.append(sum(1 + key[0] for key in one.schedule.rounds._captured))  # type: ignore[operator]

    ahead(monkeypatch, one.schedule.planner, "choose", note)
    assert tokens(one) == expected
    assert max(held) == 2 and len(cuda.graphs) <= 3  # and the pool's own
    assert max(steps) == 6  # of 3 drafts and of 1, until one of 2 comes


def test_the_graphs_that_are_held_are_those_that_were_planned_for(cuda: Cuda) -> None:
    """What the driver keeps of a graph grows with its launches: rounds of many drafts count for more."""
    one = engine(gamma=3)
    tokens(one)
    longer = dataclasses.replace(one.config, max_seq_len=100_000)
    planned = MemoryPlan.of(dataclasses.replace(one._plan.system, config=longer)).graphs
    steps = planned // (NODE * (LAYER_NODES * one.model.config.n_layers + STEP_NODES))
    for i in range(steps):
        one.schedule.rounds._graph(("another", i), steps_of(one.draft, 3), lambda: torch.ones(1))()
        assert one.schedule.rounds.captured * (1 + 3) <= steps


@ONE_RULE
def test_a_result_is_waited_for_where_its_round_is_replayed(cuda: Cuda, monkeypatch: Patch) -> None:
    """Rounds are captured on a stream of the engine's pool, and replayed on the current one, where events stand."""
    one, seen = engine(), list[tuple[str, int]]()
    tokens(one)
    for kind, name in ((Graph, "replay"), (Event, "record")):
        ahead(monkeypatch, kind, name, lambda *_, name=name: seen.append((name, cuda.current.cuda_stream)))
    with torch.cuda.stream(cuda.stream_of_pool()):  # type: ignore[arg-type]
        here = cuda.current.cuda_stream
        tokens(one)
    assert {capture["stream"] for capture in cuda.captures}.isdisjoint({here, 0})
    assert [name for name, _ in seen].count("replay") > 3 and {stream for _, stream in seen} == {here}


@ONE_RULE
@pytest.mark.parametrize("policy", ["streaming", "lookup"])
def test_rows_of_all_kinds_may_come_and_go_in_every_order(policy: str, cuda: Cuda) -> None:
    """Each is what it is alone, whatever shares its rounds: some graphs sample and filter, and others do not."""
    one, kinds = engine(policy, batch_size=2), (GREEDY, SAMPLED, FILTERED)
    rows = [dataclasses.replace(p, max_tokens=n) for p, n in zip(kinds * 2, (2, 6, 3, 5, 1, 4), strict=True)]
    alone = [one.generate(PROMPTS[:1], params)[0].tokens for params in rows]
    for order in itertools.permutations(range(3)):
        there = [*order, *(3 + i for i in reversed(order))]
        assert tokens_of(one.generate(PROMPTS[:1] * 6, [rows[i] for i in there])) == [alone[i] for i in there]


# ---- what a graph has baked in ---------------------------------------------------------------------------------------


def test_a_policy_may_be_taken_away_given_back_and_exchanged(cuda: Cuda, expected: list[list[int]]) -> None:
    one = engine(gamma=3)
    policy = one.policy
    for drafting in (policy, None, policy, None):
        one.policy = drafting
        assert tokens(one) == expected
        assert one.stats.acceptance_rate < 0.9 and (one.stats.drafted > 0) is (drafting is not None)
    one.policy = build_policy(DraftConfig(policy="full", gamma=3), one.target, None)
    assert tokens(one) == expected
    assert one.stats.acceptance_rate > 0.99  # it is the target itself


@ONE_RULE
def test_a_policy_of_another_page_is_given_the_mass_by_its_own(cuda: Cuda, expected: list[list[int]]) -> None:
    one, draft = engine("guided", gamma=3), DraftConfig(policy="guided", gamma=3, budget=96, page=32)
    one.redraft(draft)
    assert tokens(one) == expected
    wanted = one.stats.accepted_by_position
    one.redraft(dataclasses.replace(draft, page=16))
    one.policy = build_policy(draft, one.target, None)
    assert tokens(one) == expected and one.schedule.rounds.page == 32
    assert one.stats.accepted_by_position == wanted


@ONE_RULE
def test_what_is_not_a_policy_of_this_engine_is_refused_when_it_is_set(steady: Engine) -> None:
    other = engine("hierarchy").policy
    for policy, said in (("guided", "got 'guided': Engine.redraft takes a DraftConfig"), (other, "another")):
        with pytest.raises(ValueError, match=said):
            steady.policy = policy  # type: ignore[assignment]
    assert steady.policy and steady.policy is not other


GUIDED = DraftConfig(policy="guided", gamma=2, budget=96)
CHANGES: dict[str, Callable[[Engine], Any] | dict[str, Any]] = {  # what is done to an engine, or how it is called
    "policy": lambda one: setattr(one, "policy", build_policy(GUIDED, one.target, None)),
    "page": lambda one: setattr(one.schedule.rounds, "draft", dataclasses.replace(GUIDED, page=32)),
    "width": lambda one: setattr(one.schedule.rounds, "width", 6),
    "replay": lambda one: setattr(one, "replay", Replay(torch.tensor([[3, 1, 0], [0, 3, 2]]))),
    "gamma": lambda one: one.redraft(DraftConfig(policy="streaming", gamma=3, budget=96)),
    "sampled": {"params": SAMPLED},
    "filtered": {"params": FILTERED},
    "speculate": {"speculate": False},
}


@ONE_RULE
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_round_reads_on_the_host_asks_for_another_graph(name: str, cuda: Cuda) -> None:
    change, one, usual = CHANGES[name], engine("guided", max_seq_len=400), {"params": GREEDY}
    one.generate(PROMPTS[:1], **usual)
    before = len(cuda.captures)
    one.generate(PROMPTS[:1], **usual)
    assert len(cuda.captures) == before
    if callable(change):
        change(one)
    one.generate(PROMPTS[:1], **usual | ({} if callable(change) else change))
    assert len(cuda.captures) > before


@ONE_RULE
def test_a_round_on_another_stream_waits_for_the_one_before(cuda: Cuda, steady: Engine) -> None:
    stream, side = steady.stream(PROMPTS, GREEDY), cuda.stream_of_pool()
    for on in (cuda.current, side, side, cuda.current):
        with torch.cuda.stream(on):
            [next(stream) for _ in PROMPTS]
    assert cuda.waits == [(side.cuda_stream, 0), (0, side.cuda_stream)]
    stream.close()  # type: ignore[attr-defined]


# ---- the end, and faults ---------------------------------------------------------------------------------------------

CLOSED = "the engine is closed: build a new one"


@ONE_RULE
def test_a_closed_engine_holds_no_graph_and_refuses_calls_in_one_sentence(cuda: Cuda) -> None:
    with engine(gamma="auto") as one:
        tokens(one)
        stream = one.stream(PROMPTS, GREEDY)
        next(stream)
    one.close()  # the end of the block has closed it
    assert not cuda.graphs and one.schedule.rounds.captured == 0
    given = {"generate": PROMPTS, "stream": PROMPTS, "check": PROMPTS, "logits": [1, 2, 3], "redraft": DraftConfig()}
    calls: list[Callable[[], Any]] = [partial(getattr(one, name), what) for name, what in given.items()]
    calls += [one.warm_up, one.__enter__, partial(list, stream), partial(setattr, one, "policy", None)]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"^{CLOSED}$"):
            call()


@ONE_RULE
def test_a_pool_is_closed_even_where_letting_rounds_go_fails(cuda: Cuda, monkeypatch: Patch) -> None:
    """Otherwise its two streams would be lost for as long as the engine is in scope."""
    one = engine()
    tokens(one)
    failing_once(monkeypatch, one.schedule.rounds, "forget", RuntimeError("something odd"))
    with pytest.raises(RuntimeError, match="something odd"):
        one.close()
    assert one.schedule.rounds.capture not in GraphPool._alive and not cuda.graphs


class Left(Exception):
    """The process has ended."""


@pytest.fixture
def grouped(cuda: Cuda, monkeypatch: Patch) -> Parallel:
    """A process in a group of one, as torchrun starts it, whose group waits for captured graphs."""

    def leave(self: Parallel, code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda group=None: None)
    monkeypatch.setattr(Parallel, "leave", leave)
    return Parallel(torch.device("cpu"), mesh=object(), owned=True)  # type: ignore[arg-type]


def test_a_group_ends_with_engines_in_scope(cuda: Cuda, grouped: Parallel, expected: list[list[int]]) -> None:
    with grouped.guard():
        one, other = engine(parallel=grouped), engine("off", parallel=grouped)
        assert tokens(one) == tokens(other) == expected
        dropped = weakref.ref(engine(parallel=grouped))
        assert dropped() is None  # a group keeps no engine alive
    assert cuda.events == ["process group destroyed"]
    with pytest.raises(RuntimeError, match=CLOSED):
        tokens(one)


def test_a_batch_job_ends_its_group_at_last(cuda: Cuda, grouped: Parallel, tmp_path: Path, monkeypatch: Patch) -> None:
    save_hugging_face(tiny_model(), tmp_path / "model", dtype=torch.float32)
    asked, done = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps({"prompt": ids, "max_tokens": 5}) + "\n" for ids in PROMPTS[:3]))
    monkeypatch.setattr(batch, "join", lambda args: grouped)
    flags = "--no-compile --gamma 2 --budget 16 --batch-size 2 --max-seq-len 400".split()
    batch.main([str(asked), str(done), "--model", str(tmp_path / "model"), *flags])
    assert "process group destroyed" in cuda.events and len(done.read_text().splitlines()) == 3


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def device_error() -> Exception:
    return torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported late")


ERRORS: dict[str, Callable[[], Exception]] = {"2.11": out_of_memory, "2.13": lambda: RuntimeError("something odd")}
BROKEN = r"^the device failed \(CUDA error: device-side assert triggered\): build a new engine$"


def failing_once(monkeypatch: Patch, owner: Any, name: str, error: Exception, after: int = 0) -> None:
    """Let a method fail at a call, and at no other."""
    calls = itertools.count()

    def fail(*args: Any, **kwargs: Any) -> None:
        if next(calls) == after:
            raise error

    ahead(monkeypatch, owner, name, fail)


STEPS: dict[str, Callable[[Engine], tuple[Any, str, int]]] = {
    "prefill": lambda one: (one._prefill, "chunk", 1),
    "verification": lambda one: (one.schedule.rounds, "feed", 0),
    "judgement": lambda one: (one.schedule.rounds, "accept_compiled", 0),
    "collection": lambda one: (one.schedule, "_collect", 1),
    "admission of the third": lambda one: (one.policy, "host_admit", 2),
    "renewal": lambda one: (one.policy, "host_before_round", 1),
    "draft": lambda one: (one.policy, "propose", 0),
    "observation": lambda one: (one.policy, "device_after_verify", 0),
}
FAILED = [("quest", "draft"), *(("guided", step) for step in STEPS), ("quest", "renewal")]


@pytest.mark.parametrize(("policy", "step"), few(FAILED, FAILED[:5]))
def test_an_engine_works_after_a_step_failed(
    policy: str, step: str, rule: str, cuda: Cuda, expected: list[list[int]], monkeypatch: Patch
) -> None:
    one, error = engine(policy), ERRORS[rule]()
    one.generate(PROMPTS[:1], GREEDY)  # graphs of this kind of rows are there
    owner, name, after = STEPS[step](one)
    with monkeypatch.context() as failing:
        failing_once(failing, owner, name, error, after)
        with pytest.raises(type(error)) as told:
            tokens(one, SAMPLED)
    assert told.value is error and not one._access.running and not one.state.active.any()
    assert tokens(one) == expected
    assert one.generate(PROMPTS[2:3], GREEDY)[0].tokens == expected[2]


def test_a_warm_up_that_failed_is_made_again(steady: Engine, rule: str, monkeypatch: Patch) -> None:
    error = ERRORS[rule]()
    steady.redraft(DraftConfig(policy="streaming", gamma="auto", budget=96))
    with monkeypatch.context() as failing:
        failing_once(failing, steady.schedule.rounds, "feed", error, 9)  # while steps are timed over slots' prompts
        with pytest.raises(type(error)):
            tokens(steady)
    assert not steady._access.running and not steady.state.active.any()


@ONE_RULE
@pytest.mark.parametrize("timed", [time_steps, time_selecting])
def test_timing_that_fails_puts_back_what_it_changed(timed: Callable[..., Any], cuda: Cuda, monkeypatch: Patch) -> None:
    one = engine("snapkv")
    one.generate(PROMPTS[2:3], GREEDY)
    before = one.cache.seq_len.clone()
    with monkeypatch.context() as failing, torch.inference_mode():
        failing_once(failing, one.schedule.rounds, "synchronize", out_of_memory(), 1)
        with pytest.raises(torch.OutOfMemoryError):
            timed(one.schedule, *([2] if timed is time_steps else []), 500)
    assert not one.state.active.any() and torch.equal(one.cache.seq_len, before)


def test_an_engine_works_after_a_failed_capture(steady: Engine, cuda: Cuda, expected: list[list[int]]) -> None:
    for at in ("capture", "replay"):
        cuda.fail(at, out_of_memory())
        with pytest.raises(torch.OutOfMemoryError):
            tokens(steady, SAMPLED)
        assert cuda.current.cuda_stream == 0
        assert tokens(steady) == expected


@pytest.mark.parametrize(
    "at", few(["capture", "end", "replay", "wait", "synchronize"], ["capture", "replay", "synchronize"])
)
def test_an_engine_whose_device_failed_says_so_and_why(at: str, cuda: Cuda) -> None:
    one = engine()
    tokens(one)
    cuda.fail(at, device_error(), dead=True)
    with pytest.raises(torch.AcceleratorError):
        tokens(one, SAMPLED)
    assert not one._access.running and cuda.current.cuda_stream == 0
    for call in (lambda: tokens(one), lambda: one.stream(PROMPTS), lambda: one.redraft(DraftConfig(policy="off"))):
        with pytest.raises(RuntimeError, match=BROKEN):
            call()
    one.close()


@ONE_RULE
def test_a_device_that_fails_after_the_last_token_is_told(cuda: Cuda) -> None:
    """Rounds that were launched ahead fail when they are no longer read."""
    one = engine()
    stream = one.stream(PROMPTS, GREEDY)
    for _ in range(3):
        next(stream)
    cuda.fail("synchronize", device_error(), dead=True)
    with pytest.raises(RuntimeError, match=BROKEN):
        stream.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=BROKEN):
        tokens(one)
    one.close()
