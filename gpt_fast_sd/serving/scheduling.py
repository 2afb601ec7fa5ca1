"""Which request is where: waiting, being prefilled, decoded in a slot. Rounds are launched for the last, and collected.

Shapes: B slots, S cache capacity.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.tp import Parallel

from ..config import MAX_GAMMA, SamplingParams
from ..policies import DraftPolicy, OwnPrefill
from ..policies.auto import AutoDraft
from ..policies.config import gamma_tiers
from ..prefill import Prefill
from ..sampling import GREEDY, Kind
from ..state import BatchState, RoundPlan
from ..steps import splits_in_view
from .draft_planner import MOST_ARMS, DraftPlanner, arm_of
from .gamma_planner import GammaPlanner
from .launch import InFlightRound, Rounds
from .logprobs import found_of
from .lookup_trials import LookupTrials
from .requests import Arrival, Request, RoundEvent, TokenEvent, Waiting
from .stats import EngineStats


class Schedule:
    """B slots, what occupies them, and the rounds in flight; see Engine for on_progress and on_round."""

    on_progress: Callable[[str, int, int], None] | None = None
    on_round: Callable[[RoundEvent], None] | None = None

    def __init__(self, prefill: Prefill, state: BatchState, rounds: Rounds, parallel: Parallel) -> None:
        self.prefill, self.state, self.parallel = prefill, state, parallel
        self.cache, self.agreement = prefill.runner.cache, parallel.agreement()
        self.slots: list[Request | None] = [None] * prefill.runner.shape[1]  # what is decoded
        self.arrival: Arrival | None = None  # what is being prefilled, into a slot that is None above
        self.in_flight: deque[InFlightRound] = deque()
        self._cancelled = set[int]()  # indices of requests, some of which may have ended
        self.on_failed: Callable[[int, BaseException], None] = raised  # told whose processor did, and how; others go on
        self.n_rounds = 0  # launched, in all calls
        self._follows_a_draft, self._drafted_at = False, dict[int, int]()  # see RoundPlan
        self.stats = EngineStats()
        self._chosen: int | None = None  # gamma of the next round
        self._speculates = False
        self._graphs_before = 0  # at the start of the current call
        self._told = 0.0, 0.0  # decode and prefill seconds at the last call of on_round
        self.use(rounds)

    def use(self, rounds: Rounds) -> None:
        """Launch these rounds from now on, with a planner that has seen none of them."""
        self.rounds = rounds
        gamma, tiers = rounds.draft.gamma, gamma_tiers(self.prefill.runner.model.config.group_size)
        self.planner: GammaPlanner | DraftPlanner = GammaPlanner(gamma, tiers, rounds.further)
        if isinstance(rounds.policy, AutoDraft):
            sizes = {"standalone": rounds.policy.size_of_model}
            arms = [arm_of(arm, sizes.get(arm.policy, 1.0)) for arm in rounds.policy.arms]
            self.planner = DraftPlanner(tiers if isinstance(gamma, str) else (0, gamma), arms, rounds.further)

    @property
    def policy(self) -> DraftPolicy | None:
        """The draft policy, None for plain decoding."""
        return self.rounds.policy

    @property
    def gammas(self) -> list[int]:
        """The gammas that a round may have, the largest first: a step of varying width is built for its first call."""
        if not self.policy:
            return [0]
        return list(self.planner.tiers[::-1]) if self.planner.fixed is None else [self.planner.fixed, 0]

    def before_captures(self, params: Sequence[SamplingParams]) -> float:
        """Call all that such requests may run, once: nothing may be built in a capture -> seconds taken."""
        started, kind = time.perf_counter(), Kind.of(params)
        some_end_before_others = [Kind(True, False)] * kind.sampled + [kind] * kind.filtered
        kinds = [GREEDY, *some_end_before_others] if self.rounds.capture else []
        arms = self.planner.ready or (-1,)  # none drafts
        new = [(arm, gamma, one) for arm in arms for one in kinds for gamma in (self.gammas if arm >= 0 else [0])]
        what = "compile" if self.rounds.target.backend.compiles else "warm up"
        new = [parts for parts in new if not self.use_arm(parts[0]).is_warm(*parts[1:])]
        for done, (arm, gamma, one) in enumerate(new):
            self.tell(what, done, len(new))
            self.use_arm(arm).warm_up([gamma], [one])
        self.tell(what, len(new), len(new))
        return time.perf_counter() - started if new else 0.0

    def use_arm(self, arm: int) -> Rounds:
        """Let an arm of the policy draft, if it has several -> the rounds in which it does."""
        if self.policy and arm >= 0:
            self.policy.use(arm)
        return self.rounds

    def run(
        self, waiting: Waiting, speculate: bool, require_open: Callable[[], None]
    ) -> Generator[TokenEvent, None, None]:
        """Keep the slots filled from the queue, and run rounds until every request is finished.

        require_open raises if the engine was closed meanwhile, by who takes events or makes prompts, or another thread.
        """
        self._speculates = speculate
        if speculate:
            self.planner.begin()
        self._chosen, self._graphs_before = None, self.graphs
        self._told, self.on_failed = (0.0, 0.0), raised
        self._cancelled.clear()
        while not waiting.over or self.arrival or any(self.slots):
            require_open()
            yield from self._refill(waiting, require_open)
            require_open()
            if any(self.slots):
                launched = self._launch(speculate)
                yield from self._collect_all_but(self.rounds.results_behind if launched else 0)
        self.agreement.settle()

    def clear(self, *, everything: bool = False) -> None:
        """End work in progress and free every slot in use, or every slot.

        Rounds may still be running that were launched before their rows were known to be finished.
        """
        if self.arrival:  # it ends together with the requests being decoded
            self.slots[self.arrival.slot], self.arrival = self.arrival.request, None
        self.rounds.synchronize()
        self.in_flight.clear()
        for slot, occupant in enumerate(self.slots):
            if occupant is not None or everything:
                self.release(slot)

    def _refill(self, waiting: Waiting, require_open: Callable[[], None]) -> Iterator[TokenEvent]:
        """Let waiting requests into free slots; once some row has begun its text, a round follows each chunk.

        Until then nothing has to wait: rows that can begin together do, so the first rounds are as full as later ones.
        """
        yield from self._end_cancelled()
        while self.arrival or (None in self.slots and not waiting.over):
            request = None if self.arrival else self._next(waiting)
            require_open()  # it may have taken long, as may the chunk before
            if not (self.arrival or request):
                return
            yield from self._collect_all_but(0)  # events come first, and prefill does not count as a round's time
            if request:
                self._admit(request)
            if self._fill() and any(row.rounds for row in self.slots if row):
                return
            yield from self._end_cancelled()

    def cancel(self, index: int) -> None:
        """End a request before the next round or chunk of a prompt, if it is at work. Any thread may call it."""
        self._cancelled.add(index)

    def _end_cancelled(self) -> Iterator[TokenEvent]:
        """Free the slots of requests that were cancelled."""
        while self._cancelled:
            index = self._cancelled.pop()
            if self.arrival and self.arrival.request.index == index:
                self.slots[self.arrival.slot], self.arrival = self.arrival.request, None
            for slot, request in enumerate(self.slots):
                if request and request.index == index:
                    self.release(slot)
                    yield request.cancel()

    def _next(self, waiting: Waiting) -> Request | None:
        """The next request; None if there is none now."""
        with torch.inference_mode(False):  # the caller's iterator is not part of the engine
            request = waiting.take()
        # compared before ranks could diverge
        params, texts = (request.params, [request.prompt]) if request else (waiting.over, [])
        self.agreement.note("prompts and parameters", params, texts)
        self.agreement.settle()
        return request

    def _admit(self, request: Request) -> None:
        """Give the request a free slot, and begin to prefill all but its last prompt token."""
        started, body = time.perf_counter(), request.prompt[:-1]
        free = [slot for slot, occupant in enumerate(self.slots) if occupant is None]
        slot = max(free, key=lambda slot: self.prefill.reusable(slot, body))  # ties go to the first
        fillings = [self.prefill.begin(slot, body)]
        if isinstance(self.policy, OwnPrefill):
            fillings += self.policy.prepare(slot, request.prompt)
        self.arrival = Arrival(slot, request, fillings)
        self.stats.prefill_seconds += time.perf_counter() - started
        self.tell("prefill", self.arrival.total - self.arrival.left, self.arrival.total)

    def _fill(self) -> bool:
        """Prefill the next chunk; after the last one the request is decoded. False if there was nothing to compute."""
        started, arrival = time.perf_counter(), self.arrival
        assert arrival
        slot, request = arrival.slot, arrival.request
        filling = next((filling for filling in arrival.fillings if filling.left), None)
        if filling:
            n = filling.step()
            self.stats.prefill_tokens += n if filling.prefill is self.prefill else 0
        if not arrival.left:  # its last prompt token becomes the pending one
            for filled in arrival.fillings:
                filled.finish()
            seed = request.params.seed if request.params.seed is not None else self.parallel.same(secrets.randbits(63))
            self.state.assign(slot, request.prompt, request.params, seed)
            if self.policy:
                self.policy.host_admit(slot, request.prompt)
            self.slots[slot], self.arrival = request, None
            request.lookup = self.planner.reader(request.prompt) if self._speculates else None
            self._drafted_at = {**self._drafted_at, slot: request.length}
        self.rounds.synchronize()
        self.stats.prefill_seconds += time.perf_counter() - started
        self.tell("prefill", arrival.total - arrival.left, arrival.total)
        return filling is not None

    def tell(self, what: str, done: int, total: int) -> None:
        """Call on_progress, if there is anything to do."""
        if self.on_progress and total:
            self.on_progress(what, done, total)

    def _launch(self, speculate: bool) -> bool:
        """Start a round: draft, verify, judge, commit. False if the rounds in flight must be collected first."""
        started, captured = time.perf_counter(), self.rounds.capture_seconds
        aside = 0.0  # seconds of what is no round's own: asking who drafts, and refreshing what drafts read
        live = [(slot, request) for slot, request in enumerate(self.slots) if request is not None]
        if self.in_flight and any(request.params.processor is not None for _, request in live):
            return False  # it is asked about texts as they are
        policy = self.policy if speculate and any(request.may_keep for _, request in live) else None
        plan = RoundPlan.of(
            {slot: request.length for slot, request in live}, [request.params for _, request in live],
            ahead=sum(round_.plan.gamma + 1 for round_ in self.in_flight), number=self.n_rounds + 1,
            follows_a_draft=self._follows_a_draft, drafted_at=self._drafted_at,
        )  # fmt: skip
        if policy is None:  # also where the row for which a round was chosen has ended since
            self._chosen = 0
        if self._chosen is None:  # once per round, even if its launch is delayed: a retry of drafting must count once
            self.planner.to_come = sum(one.params.max_tokens - len(one.tokens) for _, one in live) / len(live)
            limits = [request.may_keep for _, request in live]
            self.planner.limits = limits if min(limits) < MAX_GAMMA else ()
            self.planner.behind = len(self.in_flight)
            asked = time.perf_counter()
            gamma = self.planner.choose(self.rounds.keys_read(plan))
            if self.planner.fixed is None:  # each process has its own clock
                gamma, self.planner.arm = divmod(self.parallel.same(gamma * MOST_ARMS + self.planner.arm), MOST_ARMS)
            self._chosen, aside = gamma, time.perf_counter() - asked
            if policy and gamma:
                policy.use(self.planner.arm)
        plan = plan.with_gamma(self._chosen)
        # a policy is asked even if nothing is drafted, as it may have to follow every round
        if policy and self.in_flight and policy.host_must_wait(plan) and plan.gamma:
            return False
        gamma, self._chosen, self.n_rounds = plan.gamma, None, plan.number
        if not self.rounds.capture:  # a captured round drafts as planned, and keeps only what may still be emitted
            room = max(min(r.params.max_tokens - len(r.tokens) - 1, r.may_keep) for _, r in live)
            # mass sums all that is verified, which must not depend on how long a row's neighbours go on
            if not (policy and policy.wants_mass and room > 0):
                gamma = min(gamma, room)
        plan, self._follows_a_draft = plan.with_gamma(gamma), policy is not None and gamma > 0
        begun = self.rounds.begin()
        before = 0.0 if self.in_flight else time.perf_counter() - started
        if policy and gamma:
            policy.host_before_round(self.state, plan)
            asked = time.perf_counter()
            self.rounds.refresh(plan)
            self._drafted_at = {**self._drafted_at, **plan.lengths}
            self.stats.kv_bytes += policy.kv_bytes(plan)
            if not self.rounds.capture:
                self.rounds.synchronize()
            aside += time.perf_counter() - asked
        n_splits = splits_in_view(self.cache, self.rounds.in_view(plan.n_keys + gamma))
        self.stats.kv_bytes += len(self.slots) * self.cache.bytes_read(n_splits * SPLIT)
        watched = self.on_round is not None
        round_ = self.rounds.launch(plan, live, planned=policy is not None, watched=watched, begun=begun)
        self.in_flight.append(round_)
        capturing = self.rounds.capture_seconds - captured
        self.stats.capture_seconds += capturing
        seconds = time.perf_counter() - started - capturing - round_.watching
        if begun is None:
            self.stats.decode_seconds += seconds
            if round_.timestamps:
                begun_at, *_, verified = round_.timestamps
                round_.host_seconds = seconds - aside - (verified - begun_at)
        else:
            round_.host_seconds, round_.exposed_seconds = seconds, before
        return True

    def _collect_all_but(self, n: int) -> Iterator[TokenEvent]:
        """Collect rounds, the oldest first, until at most n are in flight."""
        while len(self.in_flight) > n:
            events = self._collect()
            self.stats.recompiles = self.graphs - self._graphs_before
            yield from events

    def _collect(self) -> list[TokenEvent]:
        """Read a round's result: every live request emits at least one token, finished ones leave their slot."""
        started, round_ = time.perf_counter(), self.in_flight.popleft()
        gamma, arm, events, looking_up = round_.plan.gamma, round_.arm, [], list[tuple[LookupTrials, Sequence[int]]]()
        cut = set[int]()  # rows that could not keep all drafts, so that nobody knows what they would have kept
        read = round_.read(self.rounds.wait)  # the one host read of a round
        collected = time.perf_counter()
        for slot, request in round_.live:
            if request.finish_reason:  # it finished after this round was launched
                continue
            emitted, judged, accepted, *rest = read[slot][: 2 * gamma + 5]
            tokens, whose, first_refused = rest[: gamma + 1], rest[gamma + 1 : -1], rest[-1]
            refused = [first_refused, *tokens[accepted + 1 : judged]] if accepted < judged else []
            sources = [*(round_.proposers[i] for i in whose[:accepted]), "target"]
            if request.may_keep < gamma or request.params.max_tokens - len(request.tokens) <= gamma:
                cut.add(request.index)
            logprobs = found_of(read[slot][2 * gamma + 5 :], gamma + 1, request.params.logprobs)
            event = request.commit(tokens[:emitted], sources, judged, accepted, refused, logprobs)
            if request.failed and len(event.tokens) > request.failed[0]:
                request.finish_reason = "failed"
                self.on_failed(request.index, request.failed[1])
            else:
                events.append(event)
                looking_up += [(request.lookup, (*event.tokens,))] if request.lookup else []
            if request.finish_reason:
                if request.finish_reason != "length":
                    cut.add(request.index)
                self.release(slot)
        self.agreement.note(f"tokens of round {self.n_rounds}", [(e.index, e.tokens, e.accepted) for e in events])
        stats, keys_read = self.stats, self.rounds.keys_read(round_.plan)
        stats.count(gamma, [event.drafted for event in events], [event.accepted for event in events])
        taken = [event.accepted for event in events if event.index not in cut]
        stats.row_rounds += len(events)
        stats.decode_tokens += sum(len(event.tokens) for event in events)
        judging = -time.perf_counter()  # of any round now, or when it is asked who drafts
        if looking_up:
            self.planner.count_lookup(looking_up, gamma, arm=arm)
        judging += time.perf_counter()
        own = working = time.perf_counter() - started
        if round_.begun_event:  # it ran while the host worked, and perhaps whoever consumes the tokens: not his time
            device, collecting = round_.device_seconds, time.perf_counter() - collected
            exposed = round_.exposed_seconds + (0.0 if self.in_flight else collecting)  # the device waited meanwhile
            working = max(device + exposed, round_.host_seconds + collecting)
            stats.device_seconds += device
        stats.decode_seconds += working
        if not round_.timestamps and round_.planned and events:
            self.planner.record_whole(gamma, keys_read, working if round_.is_usual else None, taken, arm=arm)
        if round_.timestamps:
            begun, drafted, verified = round_.timestamps
            if gamma:
                stats.draft_seconds += drafted - begun
            stats.verify_seconds += verified - drafted
            if round_.planned and events:
                self.planner.record(gamma, keys_read, drafted - begun, verified - drafted, taken, arm=arm)
                if gamma:  # of plain rounds hardly any is recorded
                    own = time.perf_counter() - started
                self.planner.record_host(gamma, round_.host_seconds + own - judging, arm=arm)
        if self.on_round:
            self.on_round(self._round_event(round_, events))
        return events

    def _round_event(self, round_: InFlightRound, events: list[TokenEvent]) -> RoundEvent:
        told, self._told = self._told, (self.stats.decode_seconds, self.stats.prefill_seconds)
        begun, drafted, verified = round_.timestamps or (0.0, 0.0, 0.0)
        seen, places = round_.seen, {request.index: slot for slot, request in round_.live}
        return RoundEvent(
            gamma=round_.plan.gamma, events=events, seconds=self._told[0] - told[0],
            draft_seconds=drafted - begun if round_.plan.gamma else 0.0, verify_seconds=verified - drafted,
            prefill_seconds=self._told[1] - told[1],
            read={} if seen is None else {event.index: seen[places[event.index]] for event in events},
        )  # fmt: skip

    def release(self, slot: int) -> None:
        """Free a slot."""
        self.slots[slot] = None
        self.cache.seq_len[slot] = self.prefill.held(slot)  # an idle slot keeps its prompt and writes past it
        self.state.free(slot)
        if self.policy:
            self.policy.host_free(slot)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self.rounds.graphs + self.prefill.graphs + (self.policy.graphs if self.policy else 0)


def raised(_: int, error: BaseException) -> None:
    """An error of one request ends all of them."""
    raise error
