"""What ranks wait for, and how long: a device that stays in a round, each other, the message of one that refuses."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import common
from gpt_fast_sd.serving.launch import InFlightRound
from gpt_fast_sd.state import RoundPlan
from gpt_fast_sd.tp import TIMEOUT, Agreement, Parallel, start
from measuring.machine import peak_bytes
from tests.helpers import Patch, Printed, tiny_engine, tiny_model
from tests.tp.spawn import WORKERS, run, torchrun


class Left(Exception):
    """The process ended."""


class Round:
    """A stand-in for the event behind a round: the device comes to it when it was asked so many times, or never."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def synchronize(self) -> None:
        assert self.looks < float("inf"), "the host waits for ever"


@pytest.fixture
def two_ranks(as_one_of: Parallel, monkeypatch: Patch) -> Parallel:
    """Rank 1 of two, whose collectives come to nothing, and whose end is an exception."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    return start(device="cpu", timeout=0.05)


def round_(done_event: Round) -> InFlightRound:
    plan, result = RoundPlan(gamma=0, n_keys=1), torch.tensor([[1, 0, 0, 7]])
    return InFlightRound(plan, [], False, 0, (), result, done_event=done_event)  # type: ignore[arg-type]


def test_a_round_that_never_ends_ends_the_process(two_ranks: Parallel, capfd: Printed) -> None:
    began = time.monotonic()
    with pytest.raises(Left, match="1"):
        round_(Round(looks=float("inf"))).read(two_ranks.wait_for)
    assert 0.05 <= time.monotonic() - began < 5
    out, err = capfd.readouterr()
    why = "another rank is gone, or did not answer within 0.05 s (a step that they share does not end)"
    assert (out, err) == ("", f"rank 1 of 2 stops: {why}\n")


def test_a_round_that_ends_is_read_however_often_the_host_has_to_look(two_ranks: Parallel) -> None:
    for looks in (0, 1, 20):
        assert round_(Round(looks)).read(two_ranks.wait_for) == [[1, 0, 0, 7]]
    alone = Parallel(torch.device("cpu"))
    asleep = Round(looks=3)
    assert round_(asleep).read(alone.wait_for) == [[1, 0, 0, 7]]
    assert asleep.looks == 3  # no rank can be lost: the driver waits


def test_an_engines_rounds_wait_as_its_ranks_do_half_an_hour_by_default(two_ranks: Parallel) -> None:
    engine = tiny_engine(model=two_ranks.group.shard(tiny_model()), parallel=two_ranks)
    assert engine.schedule.rounds.wait == two_ranks.wait_for
    assert TIMEOUT == Parallel(torch.device("cpu")).timeout == 1800


def test_ranks_meet_on_the_host_alone(two_ranks: Parallel, monkeypatch: Patch) -> None:
    """On CUDA the default group is NCCL's: its first use would take device memory that nothing else needs."""
    met: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda group=None, **kwargs: met.append(group))
    two_ranks.meet()
    assert set(met) == {two_ranks.host, two_ranks.peers} and None not in met
    met.clear()
    Parallel(torch.device("cpu")).meet()
    assert met == []


def test_processes_apart_are_told_the_missing_setting(two_ranks: Parallel, monkeypatch: Patch) -> None:
    """gloo binds to the address of the machine's name, which the others may not be able to reach."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed: Connection refused, remote=[127.0.1.1]:5\nframes")

    monkeypatch.setattr(dist, "new_group", refused)
    with pytest.raises(ValueError, match=r"cannot reach one another \(Gloo .*:5\): .* GLOO_SOCKET_IFNAME must name"):
        start(device="cpu")


def test_processes_that_do_not_meet_are_one_sentence(monkeypatch: Patch) -> None:
    def late(*args: Any, **kwargs: Any) -> None:
        raise dist.DistStoreError("Timed out after 1801 seconds waiting for clients. 1/2 clients joined.\nframes")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", late)
    with pytest.raises(ValueError, match=r"^the processes did not meet \(Timed out after .* 1/2 clients joined\.\)$"):
        start(device="cpu")


class Silent(list[int]):
    """Token ids that must not be printed."""

    def __repr__(self) -> str:
        raise AssertionError("a whole prompt was printed, to be compared")


def checksum_of(two_ranks: Parallel, *noted: Any) -> int:
    agreement = Agreement(two_ranks.host)
    agreement.note("prompts", *noted)
    assert agreement._sent
    return int(agreement._sent[1][0])


def test_texts_are_compared_as_they_lie_in_memory_and_not_as_they_print(two_ranks: Parallel) -> None:
    texts = [Silent([1, 2]), Silent([3])]
    ours = checksum_of(two_ranks, "greedy", texts)
    assert ours == checksum_of(two_ranks, "greedy", [[1, 2], [3]])
    for other in ([[1], [2, 3]], [[1, 2, 3]], [[3], [1, 2]], [[1, 2], [4]], [[1, 2], [3], []], [[1, 2], [3 + 2**40]]):
        assert checksum_of(two_ranks, "greedy", other) != ours
    assert checksum_of(two_ranks, "sampled", texts) != ours


@pytest.mark.parametrize(
    ("rank", "local", "said", "after"),
    [
        (None, None, "batch.py: GPU 3 is full\n", 0),
        (0, 0, "batch.py: GPU 3 is full\n", 0),
        (3, 3, "batch.py, rank 3: GPU 3 is full\n", 13),
        (8, 0, "batch.py, rank 8: GPU 3 is full\n", 10),  # the first of a second machine
    ],
)
def test_a_rank_that_refuses_says_so_the_first_at_once(
    rank: int | None, local: int | None, said: str, after: float, monkeypatch: Patch, capsys: Printed
) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value)) if value is not None else monkeypatch.delenv(name, raising=False)
    waited = [0.0]
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(SystemExit) as stopped:
        common.refuse(ValueError("GPU 3\nis full"), "batch.py")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == said
    assert sum(waited) == after


@pytest.mark.slow
@pytest.mark.parametrize(("who", "said"), [("1", "refuses.py, rank 1: no room"), ("0,1", "refuses.py: no room")])
def test_a_refusal_is_heard_once_whichever_rank_refuses(who: str, said: str) -> None:
    done = run(torchrun(2, WORKERS / "lost.py", "refuse", who), timeout=120)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("refuses.py")] == [said], done.stderr


def test_peak_memory_is_0_where_the_system_counts_none(monkeypatch: Patch) -> None:
    """On Windows there is no module resource."""
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(Path, "is_file", lambda self: False)  # nor /proc
    assert peak_bytes(torch.device("cpu")) == 0
