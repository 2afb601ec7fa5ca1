"""Rounds in flight. On CUDA a round is captured, and launched as one graph.

Captured rounds are launched one ahead of what the host has read: while the device works on a round, the host handles
the one before.

Shapes: B slots, L layers, K kv heads, gamma tokens drafted per round.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt_fast_sd.model import Transformer
from gpt_fast_sd.tp import DoneEvent, Parallel

from ..acceptance import Override
from ..config import MAX_GAMMA, MOST_LOGPROBS, EngineConfig
from ..draft import Draft
from ..fast.devices import traits_of
from ..loading import System, draft_group, has_room, ready_draft
from ..policies import DraftConfig, DraftPolicy, build_policy
from ..policies.config import further_tiers, gamma_tiers
from ..policies.costs import MOST_STEPS, REFRESH_STEPS, steps_held, steps_of
from ..policies.policy import wrong_with
from ..round import Round
from ..sampling import Kind
from ..state import BatchState, RoundPlan
from ..steps import Runner
from .cuda_graphs import FAILED_CAPTURES_END, Capture, GraphPool, doubling, is_of_capturing
from .logprobs import beside
from .processing import process
from .requests import Request

Result = TypeVar("Result")
Wait = Callable[[DoneEvent], None]


@dataclass(frozen=True)
class Begun:
    """Where a round begins, on the device and in the time of captures."""

    event: torch.cuda.Event
    capture_seconds: float  # that captures had taken until then


@dataclass
class InFlightRound:
    """A round that was launched: its plan, and its result, which may still be on its way to the host."""

    plan: RoundPlan
    live: list[tuple[int, Request]]
    planned: bool  # whether gamma was the planner's choice
    arm: int  # who drafted, see DraftPolicy.use
    proposers: tuple[str, ...]
    result: Tensor  # int64 [B, 2 * gamma + 5] on the host, and what logprobs.beside gives
    begun_event: torch.cuda.Event | None = None  # recorded before anything of the round; None: its parts are timed
    done_event: torch.cuda.Event | None = None  # recorded after the copy; None: the result is there
    host_seconds: float = 0.0  # that launching it took; where its steps are timed: without them, and from the draft on
    exposed_seconds: float = 0.0  # those of them in which the device had nothing to do
    is_usual: bool = False  # whether nothing was built or captured for it: others like it take as long
    timestamps: list[float] = field(default_factory=list)  # at the beginning, after the draft, after the target's step
    seen: Tensor | None = None  # fp32 [B, n_keys + gamma] on the host, rows as they began it, see Rounds.seen
    watching: float = 0.0  # seconds spent recording what the draft read

    @property
    def device_seconds(self) -> float:
        """What it took the device, once it was read."""
        assert self.begun_event and self.done_event
        milliseconds: float = self.begun_event.elapsed_time(self.done_event)
        return milliseconds / 1e3

    def read(self, wait: Wait) -> list[list[int]]:
        """Wait for the result and read it."""
        if self.done_event is not None:
            wait(self.done_event)
        rows: list[list[int]] = self.result.tolist()
        return rows


class Rounds(Round):
    """Launches rounds: run as they are, or captured once and replayed, one ahead of what the host has read."""

    policy: DraftPolicy | None

    def __init__(
        self,
        target: Runner,
        state: BatchState,
        policy: DraftPolicy | None,
        draft: DraftConfig,
        *,
        width: int = 0,
        capture: Capture | None = None,
        wait: Wait = operator.methodcaller("synchronize"),
        falls_back: bool = FAILED_CAPTURES_END,
    ) -> None:
        """capture: how a round is captured. falls_back: whether one that cannot be captured runs as it is.

        wait: how to wait for the device, which a lost rank may keep in a round forever (see Parallel.wait_for).
        """
        super().__init__(target, state, policy, page=draft.page, width=width)
        self.draft, self.capture, self.wait, self.falls_back = draft, capture, wait, falls_back
        self.further: tuple[int, ...] = ()  # see further_tiers
        self._captured: dict[tuple[object, ...], Callable[[], Any]] = {}
        self.most_steps = steps_held(target.cache.max_seq_len, draft, target.model.config.group_size)
        self._steps_held = 0  # steps in all captured rounds
        self._baked: tuple[object, ...] = ()
        self.capture_seconds = 0.0  # that captures have taken so far
        self._uncapturable: set[tuple[object, ...]] = set()  # keys of parts that run as they are
        self._told = False  # that there are such
        self._drafts = self._capturing = self._empty = False  # of the round that is under way: see _look
        self._named: int | None = None  # of that round: see RoundPlan.logprobs
        self._live: Sequence[tuple[int, Request]] = ()  # of that round, if one of them brings a processor
        self._warm: set[tuple[object, ...]] = set()
        self._pinned: list[Tensor] = []  # pinned host buffers, one per round in flight
        self._launched = 0
        self._stream: Any = None  # of the device, on which the last round was launched

    @property
    def results_behind(self) -> int:
        """Rounds that may be in flight when the next one is launched."""
        return 1 if self.capture else 0

    @property
    def arm(self) -> int:
        """Which of several policies drafts."""
        return self.policy.arm if self.policy else 0

    @property
    def captured(self) -> int:
        """CUDA graphs of rounds held now, with at most most_steps steps in all, or one."""
        return len(self._captured)

    def keys_read(self, plan: RoundPlan) -> int:
        """Keys that each slot reads in a step, on average: the time of the step depends on them."""
        return plan.mean_keys(self.target.shape[1]) if self.target.bodies.reads_own_keys else plan.n_keys

    # ---------------------------------------------------------------- rounds under way

    def launch(
        self, plan: RoundPlan, live: Sequence[tuple[int, Request]], *, planned: bool, watched: bool = False,
        begun: Begun | None = None,
    ) -> InFlightRound:  # fmt: skip
        """Start a round for the live requests.

        watched: also record what the draft reads, unless the round is captured. begun: see `begin`.
        """
        drafter = self.policy.now if self.policy and plan.gamma else None
        who = drafter.proposers if drafter else ()
        round_ = InFlightRound(plan, list(live), planned, self.arm, who, self.state.pending)
        self._live = live if any(request.params.processor is not None for _, request in live) else ()
        if not self.capture:

            def timestamp() -> None:
                self.synchronize()
                round_.timestamps.append(time.perf_counter())
                if watched and plan.gamma and self.policy and len(round_.timestamps) == 3:  # before its next refresh
                    round_.seen = self.seen(self.policy, plan)
                    round_.watching = time.perf_counter() - round_.timestamps[-1]

            timestamp()
            round_.result = self.device_round(plan, timestamp).cpu()
            return round_
        is_built = self.is_warm(plan.gamma, plan.kind, plan.logprobs) and not self._live
        replay = self._captured_round(plan)
        if begun is not None and begun.capture_seconds != self.capture_seconds:  # the device was idle meanwhile
            begun, is_built = self.begin(), False
        result = replay()
        if begun is not None:
            round_.is_usual, round_.begun_event = is_built, begun.event
            round_.done_event = torch.cuda.Event(enable_timing=True)
            round_.result = self._pinned_buffer(result)
            round_.result.copy_(result, non_blocking=True)
            round_.done_event.record()
        else:
            round_.result = result.clone()
        return round_

    def device_round(self, plan: RoundPlan, timestamp: Callable[[], None] = lambda: None) -> Tensor:
        """See Round.device_round; what it feeds after a first token are drafts."""
        self._drafts, self._named = plan.gamma > 0, plan.logprobs
        try:
            return super().device_round(plan, timestamp)
        finally:
            self._drafts, self._named, self._live = False, None, ()

    def feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        """See Round.feed; ValueError for the first drafts if the model has no such tokens, which would end a GPU."""
        if self._drafts and tokens.shape[1] > 1:
            self._look("tokens", lambda: _outside(tokens, len(self.target.model.embedding.weight)))
        return super().feed(tokens, n_keys)

    def accept(self, logits: Tensor, draft: Draft, kind: Kind) -> Tensor:
        """See Round.accept; ValueError where the first draft of its kind is none that a policy may propose."""
        if draft.tokens.shape[1]:
            self._look(kind, lambda: wrong_with(draft, logits.shape[1] - 1, logits.shape[2], self.state.active))
        if self._live:
            process(self.state, logits, draft, self._live)
        result = super().accept(logits, draft, kind)
        if self._named is None:
            return result
        tokens = result[:, 3 : 3 + logits.shape[1]]
        return torch.cat([result, beside(self.state.vocabulary.whole(logits), tokens, self._named)], 1)

    def _look(self, what: object, wrong: Callable[[], str]) -> None:
        """Once for each arm over empty slots, and once more over requests unless rounds are captured by then.

        In a capture the host reads nothing; ranks hold parts.
        """
        key = "looked at", what, self.arm, self._empty
        if key in self._warm or self._capturing or self.target.group.size > 1:
            return
        if said := wrong():
            raise ValueError(f"draft policy {type(self.policy.now if self.policy else None).__name__} proposed {said}")
        self._warm.add(key)

    def begin(self) -> Begun | None:
        """Mark on the device where a round begins, its policy's part included; None where rounds are read at once.

        The device goes on while whoever consumes the tokens works: only its own clock knows how long a round took.
        """
        if not (self.capture and traits_of(self.target.device).captures):
            return None
        stream = torch.cuda.current_stream(self.target.device)
        if self._stream not in (None, stream):
            stream.wait_stream(self._stream)  # on which the round before may still run
        self._stream = stream
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Begun(event, self.capture_seconds)

    def seen(self, policy: DraftPolicy, plan: RoundPlan) -> Tensor:
        """The share of layers and kv heads that read each position in a round's last draft step: fp32 [B, S]."""
        mask = policy.positions_read(self.state.seq_len + plan.gamma - 1)  # [L, B, K, S]
        mask = mask[..., : plan.n_keys + plan.gamma]
        n_layers, _, n_kv, _ = mask.shape
        return (mask.sum((0, 2), dtype=torch.float32) / (n_layers * n_kv)).cpu()

    def warm_up(self, gammas: Iterable[int], kinds: Iterable[Kind]) -> None:
        """Run rounds of these gammas over empty slots, for rows of these kinds, each once.

        Then everything that a first call builds or allocates exists: neither may happen in a capture.
        """
        place = self.replay.place.clone() if self.replay else None
        for kind in kinds:
            for gamma in gammas:
                if not self.is_warm(gamma, kind):
                    if self.policy and gamma:
                        self.policy.device_refresh(self.state, 1)
                        self._warm.add(("refresh",))
                    # as a round to capture: no operator may run for the first time in one
                    plan = RoundPlan(gamma=gamma, n_keys=1, kind=kind, captured=self.capture is not None)
                    self._empty = True
                    try:
                        self.device_round(plan)
                    finally:
                        self._empty = False
                    self._warm.add((gamma, kind, None, self.arm if gamma else 0))
        if self.replay and place is not None:  # these rounds must not advance the replay
            self.replay.place.copy_(place)
        self.synchronize()

    def is_warm(self, gamma: int, kind: Kind, logprobs: int | None = None) -> bool:
        """Whether a round of this gamma, for rows of this kind, has been called."""
        return (gamma, kind, logprobs, self.arm if gamma else 0) in self._warm

    def prepared(self, part: Callable[[], Result]) -> Callable[[], Result]:
        """A part of a round in the form in which rounds run it: captured, or as it is. It is called once."""
        part()
        self.synchronize()
        capture = self.capture.passing if isinstance(self.capture, GraphPool) else self.capture
        return (self._tried(capture, part) or part) if capture else part

    def refresh(self, plan: RoundPlan) -> int:
        """Let the policy refresh its selection before a round that drafts -> number of passes."""
        passes = self.policy.host_refreshes(plan) if self.policy else []
        for n_keys in passes:
            self._refresh(n_keys)
        return len(passes)

    def _refresh(self, n_keys: int) -> None:
        """One pass with at least n_keys in view; captured, it is a graph for each doubling of the view."""
        state, policy = self.state, self.policy
        assert policy
        if not self.capture or ("refresh",) not in self._warm:  # as in a round: call it before capturing it
            policy.device_refresh(state, n_keys)
            self._warm.add(("refresh",))
            return
        in_view = doubling(n_keys, self.target.cache.capacity)
        self._graph(("refresh", in_view), REFRESH_STEPS, lambda: policy.device_refresh(state, in_view))()

    def _captured_round(self, plan: RoundPlan) -> Callable[[], Tensor]:
        """The graph of such a round: one for each gamma, each kind of sampling, and each doubling of the view.

        What a processor makes of logits only the host knows: such a round runs as it is.
        """
        gamma, kind, named = plan.gamma, plan.kind, plan.logprobs
        is_first = not self.is_warm(gamma, kind, named)  # the first request of its kind in a stream
        if is_first or self._live:
            self._warm.add((gamma, kind, named, self.arm if gamma else 0))
            return lambda: self.device_round(plan)  # so that all is built when the next one is captured
        in_view = doubling(plan.n_keys + gamma, self.target.cache.capacity)
        any_rows = plan.to_capture(in_view - gamma)
        # The graph of a wider kind gives the same tokens, slower: a greedy row is one-hot, filters that are off keep
        # all, what nobody asked for is not read. It serves where another one would cost all that are held.
        kinds = (kind, Kind(True, kind.filtered), Kind(True, True))
        arm, steps = self.arm if gamma else 0, steps_of(self.draft, gamma)
        names = (named, 0, MOST_LOGPROBS) if named is None else (named, MOST_LOGPROBS)
        keys = [(gamma, in_view, one, n, self.width, self.replay, arm) for one in kinds for n in names]
        is_full = self._steps_held + steps > self.most_steps
        key = next((key for key in keys if is_full and key in self._captured), keys[0])
        return self._graph(key, steps, lambda: self.device_round(any_rows))

    def _graph(self, key: tuple[object, ...], steps: int, part: Callable[[], Result]) -> Callable[[], Result]:
        """A function that replays a part of a round; captured now, unless there is a graph for this key.

        A new policy, configuration or way to capture frees all graphs. Apart from constants, a round reads only these
        and the key on the host. A part that cannot be captured is called as it is, every time, which a warning says.
        """
        assert self.capture
        baked = self.policy, self.draft, self.capture
        if len(self._baked) != len(baked) or any(a is not b for a, b in zip(self._baked, baked, strict=True)):
            self.forget()
            self._baked = baked
            self._uncapturable.clear()
        if key in self._uncapturable:
            return part
        if key not in self._captured:
            self.synchronize()  # so that a round in flight does not count as capture time
            started = time.perf_counter()
            try:
                if self._steps_held + steps > self.most_steps:
                    self.forget()  # all of them, see GraphPool
                if (graph := self._tried(self.capture, part)) is None:
                    self._uncapturable.add(key)
                    return part
                self._captured[key] = graph
                self._steps_held += steps
            except BaseException:
                self.forget()  # those captured before may have lost memory that they shared with this one
                raise
            finally:
                self.capture_seconds += time.perf_counter() - started
        return self._captured[key]

    def _tried(self, capture: Capture, part: Callable[[], Result]) -> Callable[[], Result] | None:
        """What replays a part of a round; None where it twice cannot be captured, of which a warning tells once.

        What the device itself raises, and a lack of memory, are raised; so is everything where ranks share a round, all
        of which must be captured or none.
        """
        why = ""
        for _ in range(2):
            self._capturing = True
            try:
                return capture(part)
            except Exception as error:
                causes = _causes(error)
                if not (self.falls_back and all(map(is_of_capturing, causes))):
                    raise
                why = str(causes[-1]).strip().partition("\n")[0] or type(causes[-1]).__name__
            finally:
                self._capturing = False
            self.forget()  # those captured before may have lost memory that they shared with this one
        if not self._told:
            self._told = True
            said = f"a round cannot be captured ({why}): its kernels are launched one by one, slower"
            warnings.warn(said, stacklevel=2)
        return None

    def forget(self, *, for_good: bool = False) -> None:
        """Free all captured rounds, none of which may be running: they are captured again when they are needed.

        for_good: not before all that they run has run once more, as some of it may be of another kind by then.
        """
        if for_good:
            self._warm.clear()
        self._captured.clear()
        self._steps_held = 0
        if isinstance(self.capture, GraphPool):
            self.capture.clear()

    def set_replay(self, replay: Override | None) -> None:
        """Set what overrides how many drafts are kept; the steps that judge by it are compiled before a capture."""
        self.replay = replay
        self._warm.clear()

    def set_policy(self, policy: DraftPolicy | None) -> None:
        """Set the draft policy, none of whose steps are compiled or captured yet.

        ValueError if it is not a policy, or if it reads another engine's cache.
        """
        if not (policy is None or isinstance(policy, DraftPolicy)):
            raise ValueError(f"a policy must be a DraftPolicy, got {policy!r:.80}: Engine.redraft takes a DraftConfig")
        for level in (policy, getattr(policy, "cheap", None)):
            runner = getattr(level, "runner", None) or getattr(level, "target", None)
            if isinstance(runner, Runner) and runner.cache.seq_len is not self.target.cache.seq_len:
                raise ValueError("the policy was built for another engine: build it over this one's target")
        self.policy, self.most_steps = policy, MOST_STEPS  # of how many steps its rounds are is its own affair
        self.further = ()  # nor is it known how many tokens it can draft
        self._warm.clear()
        self.forget()

    def _pinned_buffer(self, result: Tensor) -> Tensor:
        """Pinned host memory of a result's size that no other round in flight uses."""
        if not self._pinned:
            width = 1 + max(self.draft.max_gamma, *self.further, 0)
            most, n = result.shape[0] * width * (5 + 1 + 2 * MOST_LOGPROBS), self.results_behind + 1
            self._pinned = [torch.empty(most, dtype=result.dtype, pin_memory=True) for _ in range(n)]
        self._launched += 1
        return self._pinned[self._launched % len(self._pinned)][: result.numel()].view(result.shape)

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        self._stream = None
        if traits_of(self.target.device).captures:
            self.wait(torch.cuda.current_stream(self.target.device).record_event())
            torch.cuda.synchronize(self.target.device)


def _outside(tokens: Tensor, n_rows: int) -> str:
    """What is wrong with tokens of which a model with so many rows in its embedding lacks one."""
    outside = tokens[(tokens < 0) | (tokens >= n_rows)]
    return f"token {int(outside[0])}, where the model has {n_rows:,}" if len(outside) else ""


def _causes(error: BaseException) -> list[BaseException]:
    """An error and those during whose handling it came up, the first one last: ending a capture raises another."""
    causes = [error]
    while (before := causes[-1].__context__) is not None:
        causes.append(before)
    return causes


def rounds_for(
    draft: DraftConfig, draft_model: Transformer | None, target: Runner, state: BatchState, capture: Capture | None,
    parallel: Parallel, config: EngineConfig,
) -> Rounds:  # fmt: skip
    """The rounds of an engine's target with a draft; ValueError if the policy does not fit the models."""
    # exact: plain and speculative decoding run the target with one width, over one number of keys, if that matters
    most = gamma_tiers(target.model.config.group_size)[-1] if isinstance(draft.gamma, str) else draft.gamma
    width = 1 + most if config.exact and not target.bodies.fused else 0  # without a policy, too
    theirs = draft_group(draft, parallel)
    if draft_model:
        ready_draft(draft_model, theirs, target, copied=draft.quantize is not None)
    policy = build_policy(draft, target, draft_model, theirs)
    falls_back = FAILED_CAPTURES_END and parallel.tp == 1
    rounds = Rounds(
        target, state, policy, draft, width=width, capture=capture, wait=parallel.wait_for, falls_back=falls_back
    )
    if policy and isinstance(draft.gamma, str) and not width and parallel.tp == 1:  # ranks would each find another room
        shape = draft_model.config if draft_model else None
        system = System(
            config=config, draft=draft, model=target.model.config, draft_model=shape,
            dtype=target.model.embedding.weight.dtype, device=target.device, held=target.cache.format,
        )  # fmt: skip
        rounds.further = further_tiers(target.model.config.group_size) if has_room(system, MAX_GAMMA) else ()
    return rounds
