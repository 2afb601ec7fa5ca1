"""From torchrun's environment to a mesh ("dp", "tp"): which process this is, and what hosts tell each other.

torchrun starts the processes, torch.distributed joins them, DeviceMesh names the groups; a single process needs none
of these and is a mesh of 1 x 1. Every rank runs the same host loop: dp replicas share a list of prompts, and the tp
ranks of a replica hold one model together.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agree import Agreement, Disagreement
from .devices import take_device
from .plan import ALONE, Group

Item = TypeVar("Item")

# seconds that a rank waits for the others: 80 layers may take 20 minutes to compile, and if the caches of compiled
# code differ, one rank compiles while the others wait
TIMEOUT = 1800.0
POLL = 5e-5  # seconds between two checks of a device
LOST = ("connection", "peer", "timed out", "timeout", "socket", "gloo", "nccl")  # words in the errors of a lost rank


class Closes(Protocol):
    """Something that keeps a process group alive until it is closed."""

    def close(self) -> None:
        """Release the group; it may be closed already."""
        ...


class DoneEvent(Protocol):
    """A place in a device's queue of work, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


@dataclass(frozen=True)
class Parallel:
    """One process among dp * tp: replica dp_rank of the model, of which it holds shard tp_rank."""

    device: torch.device
    dp: int = 1
    tp: int = 1
    dp_rank: int = 0
    tp_rank: int = 0
    mesh: DeviceMesh | None = None  # ("dp", "tp"); None: one process without a process group
    # both gloo: for messages between host loops
    host: dist.ProcessGroup | None = None  # the replica's ranks
    peers: dist.ProcessGroup | None = None  # the ranks of this shard in all replicas, which wait without a limit
    owned: bool = False  # whether start made the process group, so that close ends it
    timeout: float = TIMEOUT
    _smaller: dict[int, Group] = field(default_factory=dict, repr=False, compare=False)
    _users: weakref.WeakSet[Closes] = field(default_factory=weakref.WeakSet, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """The rank in the whole world, replica by replica."""
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes files."""
        return self.rank == 0

    @property
    def group(self) -> Group:
        """The ranks that hold this rank's model together."""
        return Group(self.tp, self.tp_rank, self.mesh["tp"]) if self.mesh is not None and self.tp > 1 else ALONE

    def smaller_group(self, size: int) -> Group:
        """The group of this rank if the tp ranks form groups of `size`; every rank must call it."""
        if size < 1 or self.tp % size:
            raise ValueError(f"draft_tp must divide tp, got draft_tp {size} and tp {self.tp}")
        if size == self.tp or size == 1:
            return self.group if size == self.tp else ALONE
        if size not in self._smaller:
            world = torch.arange(self.dp * self.tp).view(-1, size)
            group = _own_group(world, timedelta(seconds=self.timeout))
            mesh = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("draft",))
            self._smaller[size] = Group(size, self.tp_rank % size, mesh)
        return self._smaller[size]

    def agreement(self) -> Agreement:
        """A check that the ranks that hold one model do the same."""
        return Agreement(self.host if self.tp > 1 else None)

    def log(self, *what: object) -> None:
        """Print on rank 0 alone."""
        if self.is_main:
            print(*what, flush=True)

    def share(self, items: Sequence[Item]) -> list[tuple[int, Item]]:
        """The replica's part of a list that all ranks have, each item with its index; parts differ by one item."""
        return list(enumerate(items))[self.dp_rank :: self.dp]

    def gather(self, results: Sequence[tuple[int, Item]]) -> list[Item] | None:
        """All replicas' (index, result) as one list in the order of the indices, on rank 0; None elsewhere.

        Every rank calls it; in each replica the first rank's results count. It waits for the slowest replica.
        """
        found = list(results)
        if self.dp > 1 and self.tp_rank == 0:
            parts: list[Any] | None = [None] * self.dp if self.is_main else None
            dist.gather_object(found, parts, dst=0, group=self.peers)
            found = [pair for part in parts or [] for pair in part]
        if not self.is_main:
            return None
        found.sort(key=lambda pair: pair[0])
        assert [index for index, _ in found] == list(range(len(found))), "an index is missing or came twice"
        return [result for _, result in found]

    def same(self, number: int) -> int:
        """The number of the replica's first rank, on each of its ranks: for a fresh seed or a measured time."""
        return number if self.host is None else int(self.same_values(torch.tensor([number])))

    def same_values(self, values: Tensor) -> Tensor:
        """Overwrite the values with those of the replica's first rank; every rank of it has as many."""
        if self.host is not None:
            dist.broadcast(values, group=self.host, group_src=0)
        return values

    def everywhere(self, holds: bool) -> bool:
        """Whether it holds on each of the replica's ranks."""
        return bool(self.least(int(holds)))

    def least(self, number: int | None) -> int | None:
        """The least number of the replica's ranks, on each of them; None if it is unknown, as it then is on all."""
        if self.host is None or number is None:
            return number
        least = torch.tensor([number])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.host)
        return int(least)

    def meet(self) -> None:
        """Wait until every rank of every replica is here: on the host, so no device group is needed."""
        if self.mesh is not None:
            dist.barrier(self.peers)  # this shard's ranks of all replicas,
            dist.barrier(self.host)  # and this replica's: each has met its own peers

    def wait_for(self, done_event: DoneEvent) -> None:
        """Return when the device has reached the event; end this process if that takes longer than the timeout.

        Nothing watches a collective in a captured graph: if another rank is gone, the device stays in it, and so would
        any code that waits for the device, such as the clean-up after an error.
        """
        if self.tp == 1:
            done_event.synchronize()
            return
        until = time.monotonic() + self.timeout
        while not done_event.query():
            if time.monotonic() > until:
                self._say_lost("a step that they share does not end")
                self.leave(1)
            time.sleep(POLL)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Close at the end of the block; if this rank fails in it, or another one is lost, end the process at once.

        A lost rank and a disagreement are reported in one sentence, other errors with their traceback. In a single
        process, errors propagate.
        """
        try:
            yield
            self.close()
        except BaseException as error:
            if self.mesh is None:
                raise
            text = str(error)
            lost = isinstance(error, RuntimeError) and any(word in text.lower() for word in LOST)
            if isinstance(error, Disagreement):
                self._say(text)
            elif isinstance(error, dist.DistError) or lost:
                self._say_lost(re.sub(r"^(\[[^]]*\]:? *)*", "", text.partition("\n")[0])[:200])
            elif not isinstance(error, (SystemExit, KeyboardInterrupt)):
                traceback.print_exc()
            code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
            self.leave(code if isinstance(code, int) else 1 if code else 0)

    def _say(self, why: str) -> None:
        print(f"rank {self.rank} of {self.dp * self.tp} stops: {why}", file=sys.stderr)

    def _say_lost(self, reason: str) -> None:
        self._say(f"another rank is gone, or did not answer within {self.timeout:g} s ({reason})")

    def leave(self, code: int) -> NoReturn:
        """End this process with an exit code, at once if there are others: an orderly exit may wait for a lost one."""
        if self.mesh is None:
            raise SystemExit(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close_before(self, user: Closes) -> None:
        """Close this user before the group is left, if it is still alive then: only a weak reference is kept.

        Ending an NCCL group waits until all CUDA graphs in which its collectives were captured are gone.
        """
        self._users.add(user)

    def close(self) -> None:
        """Close engines, wait until every rank is done (leaving early breaks others), leave the group start made."""
        for user in list(self._users):
            user.close()
        if self.mesh is not None and dist.is_initialized():
            self.meet()
            if self.owned:
                dist.destroy_process_group()


def start(tp: int | None = None, device: str = "auto", timeout: float = TIMEOUT) -> Parallel:
    """Join the other processes that torchrun started; ValueError if tp does not fit or they cannot be reached.

    tp: ranks that hold one model together (None: all of them), the rest are replicas. device: "cpu" (gloo), "cuda"
    (nccl, one device per process) or "auto". timeout: seconds that a rank waits for the others.
    """
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if dist.is_initialized():  # by the program around us
        world, rank = dist.get_world_size(), dist.get_rank()
    wanted = world if tp is None else tp
    if wanted < 1 or world % wanted:
        started = "one process was" if world == 1 else f"{world} processes were"
        raise ValueError(
            f"tp must divide the number of processes, and {started} started, got tp {wanted}: "
            f"torchrun --nproc_per_node={max(1, wanted)} starts {max(1, wanted)}"
        )
    place = take_device(device)
    if world == 1:
        return Parallel(place, timeout=timeout)
    wait = timedelta(seconds=timeout)
    owned = not dist.is_initialized()
    if owned:
        try:
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=wait)
        except dist.DistError as error:
            raise ValueError(f"the processes did not meet ({str(error).partition(chr(10))[0][:200]})") from error
    grid = torch.arange(world).view(-1, wanted)  # [dp, tp]
    by_host = "gloo" if place.type == "cuda" else None  # None: the default backend
    by_column, by_row = _own_group(grid.T, wait), _own_group(grid, wait)
    mesh = DeviceMesh.from_group([by_column, by_row], place.type, grid, mesh_dim_names=("dp", "tp"))
    return Parallel(
        device=place,
        dp=world // wanted,
        tp=wanted,
        dp_rank=rank // wanted,
        tp_rank=rank % wanted,
        mesh=mesh,
        host=_own_group(grid, wait, by_host),
        peers=_own_group(grid.T, timedelta(days=1), by_host),
        owned=owned,
        timeout=timeout,
    )


def _number(name: str, default: int) -> int:
    """What torchrun says in its environment."""
    said = os.environ.get(name, str(default))
    if not said.isdecimal():
        raise ValueError(f"{name} must be a whole number, as torchrun sets it, got {said!r:.80}")
    return int(said)


def _own_group(rows: Tensor, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """One group per row of ranks -> the one that this process is in. Every process makes all of them."""
    try:
        made = [dist.new_group(row, timeout=timeout, backend=backend) for row in rows.tolist()]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"the processes met, but cannot reach one another ({reason}): across machines GLOO_SOCKET_IFNAME must name "
            "the network interface that they share, unless each machine's name resolves to its address there"
        ) from error
    own: dist.ProcessGroup = next(
        group for row, group in zip(rows.tolist(), made, strict=True) if dist.get_rank() in row
    )
    return own
