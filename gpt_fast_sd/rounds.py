"""A round on the device: draft, verify, judge, commit, select. On CUDA it is captured, and launched as one graph.

The host reads nothing inside a round. Captured rounds are launched one ahead of what the host has read: while the
device works on a round, the host looks at the one before.

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import Transformer
from gpt_fast_sd.tp import Landing

from .attending import DenseKV, MassKV
from .compiling import CompiledStep, span, varying
from .config import MAX_GAMMA, DraftConfig
from .devices import ways_of
from .graphs import MOST_STEPS, REFRESH_STEPS, Capture, GraphPool, doubling, steps_of
from .kernels import cpu_attention_fits
from .packing import all_packed
from .policies import Draft, DraftPolicy, Reader
from .replay import Replay
from .requests import Request
from .rows import Rows
from .sampling import ACCEPT_STREAM, TARGET_STREAM

Result = TypeVar("Result")
Lap = Callable[[], None]
Wait = Callable[[Landing], None]


def decode_step(
    model: Transformer, tokens: Tensor, pos: Tensor, k: list[Tensor], v: list[Tensor], in_view: Tensor, page: int
) -> tuple[Tensor, Tensor | None]:
    """Store, attend to everything and judge: tokens, pos [B, T] -> fp32 logits [B, T, V] after each of them.

    in_view [n_splits, 0] carries, as a size that may vary without a recompile, how many key splits are in view. With a
    page, the attention mass that each block of so many keys received comes too: fp32 [L, B, K, n_keys // page].
    """
    kv = MassKV(k, v, in_view.shape[0], page) if page else DenseKV(k, v, in_view.shape[0])
    logits = model(tokens, pos, kv).float()  # [B, T, V]
    return logits, torch.stack(kv.mass) if isinstance(kv, MassKV) else None


def judge_step(rows: Rows, logits: Tensor, draft: Draft, replay: Replay | None) -> Tensor:
    """Judge and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], all that the host has to read of a round.

    A row holds what Rows.commit gives, then who proposed each draft, then the first draft that was refused, if one was.
    """
    cap = torch.minimum(draft.count, rows.remaining - 1).clamp(min=0)  # [B]
    pos = rows.seq_len[:, None] + torch.arange(logits.shape[1], device=logits.device)  # [B, gamma + 1]
    # a token's randomness hangs on its row's seed and its position alone
    verdict, _ = rows.judge(logits, pos, draft.tokens, draft.q, cap, accept=ACCEPT_STREAM, own=TARGET_STREAM)
    if replay is not None:
        verdict = replay.apply(verdict, draft.tokens, cap)
    by_whom = draft.proposer if draft.proposer is not None else torch.zeros_like(draft.tokens)  # [B, gamma]
    # commit puts the next token in its place
    refused = F.pad(draft.tokens, (0, 1)).gather(1, verdict.n_accepted[:, None])  # [B, 1]
    return torch.cat([rows.commit(draft.tokens, cap, verdict), by_whom, refused], 1)


@dataclass
class Flight:
    """A round that was launched: what it was for, and its result, perhaps still on its way to the host."""

    gamma: int
    n_keys: int  # in use at most, when it began
    live: list[tuple[int, Request]]
    planned: bool  # whether gamma was the planner's choice
    begun: float  # clock at the launch
    result: Tensor  # int64 [B, 2 * gamma + 5] on the host
    landed: torch.cuda.Event | None = None  # recorded behind the copy; None: it is there
    laps: list[float] = field(default_factory=list)  # clock at the beginning, after the draft, after the target's step
    seen: Tensor | None = None  # fp32 [B, n_keys + gamma] on the host, see Rounds.seen
    watching: float = 0.0  # seconds that looking at it took

    def read(self, wait: Wait) -> list[list[int]]:
        """Wait for the result and read it."""
        if self.landed is not None:
            wait(self.landed)
        rows: list[list[int]] = self.result.tolist()
        return rows


class Rounds:
    """The target's steps over all slots, and rounds made of them: run as they are, or captured once and replayed."""

    def __init__(
        self,
        target: Reader,
        rows: Rows,
        policy: DraftPolicy | None,
        draft: DraftConfig,
        *,
        width: int = 0,
        capture: Capture | None = None,
        wait: Wait = operator.methodcaller("synchronize"),
    ) -> None:
        """width: tokens that every step of the target feeds (0: as many as needed); capture: how a round is captured.

        wait: how to wait for the device, which a lost rank may keep in a round for ever (see Parallel.wait_for).
        A width also fixes the view to all of the cache: then no sum hangs on what else is in the batch.
        """
        self.target, self.rows, self.policy, self.draft, self.width = target, rows, policy, draft, width
        self.capture, self.wait = capture, wait
        self.replay: Replay | None = None
        self.any_threads = width > 0 and sums_by_row(target)
        compiled = target.compiled
        if self.any_threads and isinstance(compiled, dict):
            compiled = {**compiled, "cpp.threads": 1}  # of generated loops, which may share a long sum among threads
        self.decode = CompiledStep(decode_step, compiled=compiled)  # one token a slot
        self.verify = CompiledStep(decode_step, compiled=compiled)  # several
        compiles_sampling = ways_of(target.device).compiles_sampling
        self.judge = CompiledStep(judge_step, compiled=target.compiled if compiles_sampling else None)
        self._captured: dict[tuple[object, ...], Callable[[], Any]] = {}
        self._steps_held = 0  # in all of them
        self._baked: tuple[object, ...] = ()
        self.capture_seconds = 0.0  # that captures have taken so far
        self._warm: set[tuple[object, ...]] = set()
        self._landing: list[Tensor] = []  # pinned, taken in turns by the flights in the air
        self._launched = 0

    def keep_steps(self, before: Rounds) -> None:
        """Go on with what earlier rounds of the same target have compiled."""
        self.decode, self.verify, self.judge = before.decode, before.verify, before.judge
        self.replay = before.replay

    @property
    def page(self) -> int:
        """Keys whose attention mass the verification sums for the policy, 0 where it wants none."""
        own = getattr(self.policy, "page", None)  # of one that was set, and that selects by its own
        return (own or self.draft.page) if self.policy and self.policy.wants_mass else 0

    @property
    def lateness(self) -> int:
        """Rounds that may be under way when the next one is launched."""
        return 1 if self.capture else 0

    @property
    def captured(self) -> int:
        """CUDA graphs of rounds held now, of at most MOST_STEPS steps."""
        return len(self._captured)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self.decode.graphs + self.verify.graphs + self.judge.graphs

    def device_round(self, gamma: int, lap: Lap = lambda: None) -> Tensor:
        """One round, nothing of which the host reads -> int64 [B, 2 * gamma + 5]; lap is called between its parts."""
        rows, policy = self.rows, self.policy
        if policy and gamma:
            draft = policy.propose(rows, gamma)
        else:
            draft = Draft(rows.pending.new_empty(len(rows.pending), 0), None, torch.zeros_like(rows.pending))
        lap()
        logits, mass = self.feed(torch.cat([rows.pending[:, None], draft.tokens], 1), rows.n_keys + gamma)
        lap()
        result = self.judged(logits[:, : gamma + 1], draft)
        if policy and gamma:
            policy.observe(rows, mass)
        return result

    def feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        """Feed tokens [B, T] from each slot's seq_len on, at least n_keys keys in view -> logits [B, T, V], mass."""
        cache, wanted = self.target.cache, self.width or tokens.shape[1]
        tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], wanted - tokens.shape[1])], 1)
        # a slot without a request scribbles behind what can ever be in view, and so costs no reading of keys
        start = torch.where(self.rows.active, cache.seq_len, cache.capacity)  # [B]
        pos = start[:, None] + torch.arange(wanted, device=tokens.device)  # [B, T]
        step, page = (self.decode, 0) if wanted == 1 else (self.verify, self.page)
        if step is self.verify and not self.width:
            varying(tokens, pos)
        in_view = span(cache, self.in_view(n_keys))
        # with several threads a library may sum one row of a product otherwise than the next
        with one_thread() if self.width and not self.any_threads else contextlib.nullcontext():
            out: tuple[Tensor, Tensor | None] = step(
                self.target.model, tokens, pos, cache.k, cache.v, in_view, page, variant=page
            )
        return out

    def judged(self, logits: Tensor, draft: Draft) -> Tensor:
        """Judge and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], see judge_step.

        Compiled it is one graph for each kind of sampling and each of three lengths: no draft, one, and more.
        """
        rows, width, beside = self.rows, logits.shape[1], (draft.q, draft.proposer, self.replay)
        if width > 2:
            varying(logits, min=3)
            varying(*(x for x in (draft.tokens, draft.q, draft.proposer) if x is not None), max=MAX_GAMMA)
        variant = (min(width, 3), rows.sampled, rows.filtered, *(x is not None for x in beside))
        result: Tensor = self.judge(rows, logits, draft, self.replay, variant=variant)
        return result

    def in_view(self, n_keys: int) -> int:
        """Keys to have in view: with a fixed width all of the cache, so that sums never change their order."""
        return self.target.cache.capacity if self.width else n_keys

    # ---------------------------------------------------------------- rounds under way

    def launch(
        self, gamma: int, live: Sequence[tuple[int, Request]], *, planned: bool, watched: bool = False
    ) -> Flight:
        """Start a round for the live requests, as rows.look has seen them.

        watched: look at what the draft reads, too, unless the round is captured.
        """
        flight = Flight(gamma, self.rows.n_keys, list(live), planned, time.perf_counter(), self.rows.pending)
        if not self.capture:

            def lap() -> None:
                self.synchronize()
                flight.laps.append(time.perf_counter())
                if watched and gamma and self.policy and len(flight.laps) == 3:  # before the policy selects anew
                    flight.seen = self.seen(self.policy, gamma)
                    flight.watching = time.perf_counter() - flight.laps[-1]

            lap()
            flight.result = self.device_round(gamma, lap).cpu()
            return flight
        result = self._captured_round(gamma)()
        if ways_of(result.device).captures:
            flight.result, flight.landed = self._landing_place(result), torch.cuda.Event()
            flight.result.copy_(result, non_blocking=True)
            flight.landed.record()
        else:
            flight.result = result.clone()
        return flight

    def seen(self, policy: DraftPolicy, gamma: int) -> Tensor:
        """The share of layers and kv heads that read each position in a round's last draft step: fp32 [B, S]."""
        mask = policy.positions_read(self.rows.seq_len + gamma - 1)[..., : self.rows.n_keys + gamma]  # [L, B, K, S]
        n_layers, _, n_kv, _ = mask.shape
        return (mask.sum((0, 2), dtype=torch.float32) / (n_layers * n_kv)).cpu()

    def warm_up(self, gammas: Iterable[int], kinds: Iterable[tuple[bool, bool]]) -> None:
        """Run rounds of these gammas over empty slots, for rows of these (sampled, filtered) kinds, each once.

        Whatever is built or allocated at a first call is then there: nothing of the kind may happen in a capture.
        """
        rows, place = self.rows, self.replay.place.clone() if self.replay else None
        for kind in kinds:
            for gamma in gammas:
                if (gamma, *kind) not in self._warm:
                    rows.n_keys, (rows.sampled, rows.filtered) = 1, kind
                    if self.policy and gamma:
                        self.policy.refresh(rows, 1)
                        self._warm.add(("refresh",))
                    self.device_round(gamma)
                    self._warm.add((gamma, *kind))
        if self.replay and place is not None:  # these rounds are none of those that are replayed
            self.replay.place.copy_(place)
        self.synchronize()

    def runner(self, part: Callable[[], Result]) -> Callable[[], Result]:
        """A part of a round as rounds run it: captured, or as it is. It is called once."""
        part()
        self.synchronize()
        capture = self.capture.passing if isinstance(self.capture, GraphPool) else self.capture
        return capture(part) if capture else part

    def refresh(self) -> int:
        """Let the policy select anew before a round that drafts -> passes that this took."""
        passes = self.policy.refreshes(self.rows) if self.policy else []
        for n_keys in passes:
            self._refresh(n_keys)
        return len(passes)

    def _refresh(self, n_keys: int) -> None:
        """One pass with at least n_keys in view; captured, it is a graph for each doubling of the view."""
        rows, policy = self.rows, self.policy
        assert policy
        if not self.capture or ("refresh",) not in self._warm:  # as in a round: what is captured was called before
            policy.refresh(rows, n_keys)
            self._warm.add(("refresh",))
            return
        in_view = doubling(n_keys, self.target.cache.capacity)
        self._graph(("refresh", in_view), REFRESH_STEPS, in_view, lambda: policy.refresh(rows, in_view))()

    def _captured_round(self, gamma: int) -> Callable[[], Tensor]:
        """The graph for rows as they are: one for each gamma, each kind of sampling, and each doubling of the view."""
        rows = self.rows
        if (gamma, rows.sampled, rows.filtered) not in self._warm:  # the first request of its kind in a stream
            self._warm.add((gamma, rows.sampled, rows.filtered))
            return lambda: self.device_round(gamma)  # so that all is built when the next one is captured
        in_view = doubling(rows.n_keys + gamma, self.target.cache.capacity)
        key = (gamma, in_view, rows.sampled, rows.filtered, self.width, self.replay)
        return self._graph(key, steps_of(self.draft, gamma), in_view - gamma, lambda: self.device_round(gamma))

    def _graph(
        self, key: tuple[object, ...], steps: int, n_keys: int, part: Callable[[], Result]
    ) -> Callable[[], Result]:
        """What replays a part of a round for rows of up to n_keys keys; captured now, unless there is one of this key.

        With another policy, configuration or way to capture all graphs go. These and what is in the key are all that a
        round reads on the host, but for what never changes.
        """
        assert self.capture
        baked = self.policy, self.draft, self.capture
        if len(self._baked) != len(baked) or any(a is not b for a, b in zip(self._baked, baked, strict=True)):
            self.forget()
            self._baked = baked
        if key not in self._captured:
            self.synchronize()  # a round under way is no part of the capture's time
            started = time.perf_counter()
            try:
                if self._steps_held + steps > MOST_STEPS:
                    self.forget()  # all of them, see GraphPool
                with self.rows.capturing(n_keys):
                    self._captured[key] = self.capture(part)
                self._steps_held += steps
            except BaseException:
                self.forget()  # those captured before may have lost memory that they shared with this one
                raise
            finally:
                self.capture_seconds += time.perf_counter() - started
        return self._captured[key]

    def forget(self) -> None:
        """Let all captured rounds go, of which none may be under way: they are captured again when they are needed."""
        self._captured.clear()
        self._steps_held = 0
        if isinstance(self.capture, GraphPool):
            self.capture.clear()

    def set_replay(self, replay: Replay | None) -> None:
        """Let it decide how many drafts are kept; what judges by it is compiled before it is captured."""
        self.replay = replay
        self._warm.clear()

    def set_policy(self, policy: DraftPolicy | None) -> None:
        """Let another policy draft, of which nothing is compiled or captured yet."""
        self.policy = policy
        self._warm.clear()
        self.forget()

    def _landing_place(self, result: Tensor) -> Tensor:
        """Pinned host memory [B, 2 * gamma + 5] that no other flight in the air uses."""
        if not self._landing:
            most = result.shape[0] * (2 * self.draft.max_gamma + 5)
            self._landing = [torch.empty(most, dtype=result.dtype, pin_memory=True) for _ in range(self.lateness + 1)]
        self._launched += 1
        return self._landing[self._launched % len(self._landing)][: result.numel()].view(result.shape)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if ways_of(self.target.device).captures:
            self.wait(torch.cuda.current_stream(self.target.device).record_event())
            torch.cuda.synchronize(self.target.device)


def sums_by_row(target: Reader) -> bool:
    """Whether compiled steps of a model on a CPU multiply and attend by our kernels alone.

    A row's sums are each made in one place there, so that its bits do not depend on threads. Of several processes it is
    not said: what adds their parts is a library's.
    """
    keys = target.cache.k[0]
    ours = isinstance(target.compiled, dict) and target.group.size == 1 and cpu_attention_fits(keys, keys)
    return ours and all_packed(target.model)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch's CPU operators run on one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
