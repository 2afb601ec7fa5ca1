"""Who drafts, and how much: from measured step times and acceptance of each candidate, an arm, at a bounded cost.

As a GammaPlanner, but over several arms (policy, view, precision of the draft's weights), whose rounds share the
target's step times. What lookup gains is told by the tokens that come without it, see LookupTrials. Another arm that
has shown little is tried only while the value that it may have, by what is hoped of it (optimism in the face of
uncertainty, Auer et al. 2002), beats what is known best; what tries lose beside that best is added up, and none is
begun that might take the sum past a share of the run as far as it is known (a budget of regret). And a round drafts
only if its view, were every draft refused, would still be behind plain decoding by no more than a share of the run:
what it has gained before counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from operator import mul
from statistics import fmean

from ..config import MAX_GAMMA
from ..policies.config import DraftConfig
from .gamma_planner import (
    CLEARLY,
    GAIN,
    KEPT_WEIGHT,
    PLAIN_AFTER,
    PRIOR_WEIGHT,
    RATE,
    GammaPlanner,
    Steps,
    StepTimes,
    over_rows,
    rising,
)
from .lookup_trials import MOST, LookupTrials, Trial

MOST_ARMS = 64
# What may be lost, as shares of a run, of which HORIZON tokens a row are expected at most (rows may end sooner) and of
# which what is past counts half from LONG on: by tries beside the best that is known; by tries that are expected to
# gain, which lose only where that was wrong; by each view beside plain rounds, which is STAKE plain rounds at least.
LOSING, PAYING, STAKE = 0.012, 0.024, 0.5
HORIZON, LONG = 200.0, 1600.0
MISSED = 8.0  # times what it may lose that lookup would have gained meanwhile, after which its account begins anew
SURPRISE = 1.3  # times what was expected that a round takes, or less by as much
AT_FIRST = 2  # rounds of a run that are plain, and timed, beside which others are judged ...
BRIEF = 0.005  # ... and one more where they are shorter than so many seconds, as they are longer just after others
MOST_AT_FIRST = 8  # ... where a clock tells what they take; else so many
LEAST = 1e-9  # seconds: a clock may stand still
FAR, FAST = 4.0, 2.0  # times as slow, or as fast, that a first round may say the machine is
HICCUP = 2.0  # times what a round was expected to take that it may have lost: the rest is the machine's
SETTLES = 4  # rounds of another arm, or gamma, which show what it takes; later ones show how fast the machine is
FOLLOWS = 0.3  # weight of a round in how fast the machine is
STEADY, LAST_STEADY = 8, 64  # rounds, at least and at most, for which what is best is not asked again: a try takes 8
SELDOM_ASKED = 0.04  # seconds for which it is not asked either where rounds are short: asking takes some 0.2 ms
SURE, UNSURE = 16, 2  # rounds of the best arm in a run, up to which it is asked again after so many
RECORDING, SELDOM_RECORDED = 0.006, 8  # seconds of which a plain round is recorded, but one of so many at least
KNOWN = 12.0  # first drafts after which a view is known and needs no tries, or once it gained more than it may lose
LOOKUP, LOOKED_UP = "lookup", 4  # this view is once the run's tokens have judged so many drafts, without a try
HOPE_WEIGHT = 3.0  # number of drafts that what is hoped of a view counts as ...
OWN_WEIGHT = 4.0  # ... and what is expected of a model's: refusals come in rows, and two of them tell little
KIN = 8.0  # number of drafts that what arms with the same view have shown counts as for each of them
FADE = 0.997  # of what an arm has shown, per round of others: texts change
BETTER = 0.03  # acceptance that one may hope to be above what is expected by that of arms with the same view
SELDOM = 8  # times as many rounds as PLAIN_AFTER, where drafting gains clearly
BARELY, OFTEN = 1.1, 8  # where it gains less, a plain round costs little, and is timed again after so many

Key = tuple[int, int]  # arm and gamma


@dataclass(frozen=True)
class Arm:
    """What is known of who drafts before it has drafted.

    view: of arms that differ in precision alone, which have nearly the same acceptance: a share of it. hope, expected:
    acceptance at best and on average. like, lift: a view whose acceptance tells more, as this one is right wherever
    that one is, and in some of the other cases. step: seconds of its steps as a share of the target's on few keys,
    before they are timed. ngram: for lookup, tokens of the longest match.
    """

    name: str
    view: str
    hope: float = 0.95
    expected: float = 0.8
    share: float = 1.0
    like: str | None = None
    lift: float = 0.0
    step: float = 1.0
    ngram: int = 0


# by who drafts: acceptance at best and on average, and a view whose acceptance tells more, with the lift above it.
# Guesses, which a run corrects: rather too high than too low, as what is never tried never shows that it would pay.
KNOWLEDGE: dict[str, tuple[float, float, str | None, float]] = {
    "lookup": (0.95, 0.3, None, 0.0),
    "standalone": (0.9, 0.65, None, 0.0),
    "streaming": (0.95, 0.8, None, 0.0),
    "guided": (0.97, 0.85, "streaming", 0.3),
}
SHARES = {"int8": (0.99, 0.6), "float8": (0.99, 0.75), "int4": (0.97, 0.4)}  # of acceptance, and of a step's seconds
SOONER = 0.7  # share of its least time that a step is hoped to take until it is timed


def arm_of(draft: DraftConfig, size: float = 1.0) -> Arm:
    """What is known beforehand of a policy's drafts; size: of the model that drafts, as a share of the target's."""
    hope, expected, like, lift = KNOWLEDGE[draft.policy]
    share, step = SHARES.get(draft.quantize or "", (1.0, 1.0))
    return Arm(
        " ".join(filter(None, (draft.policy, draft.quantize))), draft.policy, hope, expected, share, like, lift,
        *((0.0, draft.ngram) if draft.policy == LOOKUP else (SOONER * step * size, 0)),
    )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What is known of an arm: its best gamma, speed over plain decoding, acceptance of first drafts, and rounds.

    None: it was not timed, as what is hoped of it would not pay, or nothing is known of its drafts. judged: tokens of
    the run have judged what it would have drafted.
    """

    name: str
    gamma: int
    speed: float | None
    acceptance: float | None
    rounds: int
    judged: bool = False


class DraftPlanner:
    """Chooses an arm and gamma round by round."""

    fixed = None

    def __init__(self, tiers: Sequence[int], arms: Sequence[Arm], further: Sequence[int] = ()) -> None:
        self.tiers, self.arms = tuple(tiers), list(arms)
        self.of = [GammaPlanner("auto", tiers, further) for _ in arms]
        self.of_view = {arm.view: GammaPlanner("auto", tiers, further) for arm in arms}  # counts what its arms count
        self._all = (*self.of, *self.of_view.values())
        self.ready: tuple[int, ...] = ()  # arms that were timed
        self.arm = 0  # of the round that was chosen last
        self.to_come, self.behind = 0.0, 0  # see GammaPlanner
        self.limits: Sequence[int] = ()  # see GammaPlanner
        self.slowness = 1.0  # of the machine, beside when steps were timed
        self._before: Key | None = None  # arm and gamma of the round before
        self._same = 0  # rounds since arm or gamma changed
        self._last: Key = (0, 0)  # the best one, when this was asked last
        self._going: Key = (0, 0)  # of the rounds since, which may be a try
        self._skipped = 0  # plain rounds that were not recorded, since one was
        self._since_plain = 0
        self.seconds_run = self.lost = self._best = self._needs = self._share = self._missed = 0.0
        self._gained = dict.fromkeys(self.of_view, 0.0)  # by view, seconds beside plain rounds
        self._slow_when_plain = 1.0
        self._n_keys, self._rounds = 1, [0] * len(self.arms)
        self._steady = self._after = self._plain_seen = self._at_first = 0
        self._every, self._beginning, self._stalled = 1, True, False
        self._looked_up = 0  # drafts that this run's tokens have judged
        self._waiting = list[Sequence[tuple[LookupTrials, Sequence[int]]]]()  # what rounds emitted that judged none yet

    @property
    def plain(self) -> GammaPlanner:
        """The planner that knows plain rounds."""
        return self.of[0]

    def time_target(
        self, measure: Callable[[int, int], float], few: int, many: int, arms: Sequence[int] | None = None
    ) -> None:
        """Time the target's step over each number of drafts: measure(gamma, n_keys) gives seconds.

        arms: those for which a step does more than for others, such as sum attention mass; None: for all.
        """

        def times(n_keys: int) -> list[float]:
            """Of each gamma, beside plain steps before and after two of them: the machine may be slower meanwhile."""
            found, before = list[float](), max(LEAST, measure(0, n_keys))
            plain = before if arms is None else self.plain.verify[0](n_keys)
            for at in range(1, len(self.tiers), 2):
                two = [measure(gamma, n_keys) for gamma in self.tiers[at : at + 2]]
                after = max(LEAST, measure(0, n_keys))
                found += [2 * plain * one / (before + after) for one in two]
                before = after
            return [plain, *found]

        quick, slow = rising(times(few)), rising(times(many))
        verify = {g: StepTimes((few, a), (many, b)) for g, a, b in zip(self.tiers, quick, slow, strict=True)}
        if arms is not None:
            verify[0] = self.plain.verify[0]
        for planner in self.of if arms is None else [self.of[i] for i in arms]:
            planner.verify, planner._timed = verify, self.plain._timed
            planner.draft = planner.start = StepTimes((few, 0.0), (many, 0.0))  # until it is timed

    def promising(self, few: int, many: int) -> list[int]:
        """The arms that would pay somewhere between few and many keys if what is hoped of them came true."""
        step = self.plain.verify[0](few)
        return [
            i
            for i, arm in enumerate(self.arms)
            if any(
                sum(arm.hope**k for k in range(g + 1)) * self.plain.verify[0](n)
                > GAIN * (g * arm.step * step + self.plain.verify[g](n))
                for g in self.tiers[1:]
                for n in (few, many)
            )
        ]

    def time_arm(
        self, i: int, drafting: Callable[[int], float], beside: Callable[[], float], many: int, *, steps: Steps = float
    ) -> None:
        """Time an arm's own steps on many keys, of which it reads few; from now on it may be chosen.

        drafting(gamma): seconds of drafting a token. beside: those of a plain step now, on many keys.
        """
        planner, verify = self.of[i], self.of[i].verify
        # the machine, than when the target's steps were timed
        slower = max(LEAST, beside()) / self.plain.verify[0](many)
        took = {g: drafting(g) / slower for g in {self.tiers[1], max(self.tiers)}}
        planner.calibrate(lambda g, n: (took.get(g, 0.0), 0.0), many, many, None, steps)
        planner.verify = verify
        self.ready = tuple(sorted({*self.ready, i}))

    def begin(self) -> None:
        """A new run: acceptance in earlier ones counts little, least what was looked up, as it is of their texts."""
        for view, planner in (*zip((arm.view for arm in self.arms), self.of, strict=True), *self.of_view.items()):
            planner.begin(PRIOR_WEIGHT if view == LOOKUP else KEPT_WEIGHT)
        self.seconds_run = self.lost = self._missed = 0.0
        self._gained = dict.fromkeys(self.of_view, 0.0)
        self._steady, self._rounds = 0, [0] * len(self.arms)
        self._last = self._going = (0, 0)
        self._before, self._plain_seen, self._beginning = None, 0, True
        self._skipped = self._at_first = self._looked_up = 0
        self._stalled, self._waiting = False, []

    def rates(self, i: int, n: int = MAX_GAMMA, *, hoped: bool = False) -> list[float]:
        """The chance of the first, second, ... n-th draft of an arm; hoped: as high as it may still turn out to be."""
        return self._own_rates(i, self._rates_of_view(i, n, hoped), n, hoped)

    def _rates_of_view(self, i: int, n: int, hoped: bool) -> list[float]:
        """The same of any arm with the view of this one, whose precision is not looked at."""
        arm = self.arms[i]
        prior: list[float] | float = arm.hope if hoped else arm.expected
        if arm.like in self.of_view and self._shows(arm.like):
            lift = min(1.0, (1 + hoped) * arm.lift)
            prior = [rate + (1 - rate) * lift for rate in self.of_view[arm.like].rates(n=n)]
        weight = HOPE_WEIGHT if hoped else PRIOR_WEIGHT if arm.view == LOOKUP else OWN_WEIGHT
        return self.of_view[arm.view].rates(prior, weight, n)

    def _own_rates(self, i: int, of_view: list[float], n: int, hoped: bool) -> list[float]:
        share, better = self.arms[i].share, BETTER if hoped else 0.0
        return self.of[i].rates([min(0.999, share * (rate + better)) for rate in of_view], KIN, n)

    def _shows(self, view: str) -> bool:
        if view == LOOKUP:
            return self._looked_up >= LOOKED_UP
        return self.of_view[view].shown >= KNOWN or self._gained[view] > self._share > 0

    def _seconds(self, n_keys: int) -> dict[int, dict[int, float]]:
        """Those of the rounds of each arm that is ready, by gamma."""
        most, verifying, found = max(self.limits, default=MAX_GAMMA), dict[int, dict[int, float]](), {}
        for i in self.ready:
            arm = self.of[i]
            if id(arm.verify) not in verifying:  # arms share it, and the host's seconds
                of_tier = {g: arm.verify[g](n_keys) + arm.host[g].seconds for g in self.tiers[1:] if g <= most}
                verifying[id(arm.verify)] = of_tier
            assert arm.start and arm.draft
            start, step = arm.start(n_keys), arm.draft(n_keys)
            found[i] = {g: start + arm.steps(g) * step + rest for g, rest in verifying[id(arm.verify)].items()}
        return found

    def _speeds(self, took: dict[int, dict[int, float]], *, hoped: bool = False) -> dict[Key, float]:
        """Tokens per row and second of the rounds of arms, by arm and gamma, from the seconds that they take."""
        of_view, speeds, n = dict[str, list[float]](), dict[Key, float](), max(self.tiers)
        for i, seconds in took.items():
            view = self.arms[i].view
            if view not in of_view:
                of_view[view] = self._rates_of_view(i, n, hoped)
            rates = self._own_rates(i, of_view[view], n, hoped)
            emitted = over_rows([*accumulate(accumulate(rates, mul, initial=1.0))], self.limits)
            speeds |= {(i, g): emitted[g] / seconds[g] for g in seconds}
        return speeds

    def choose(self, n_keys: int) -> int:
        """Gamma of the next round, whose arm is `arm`."""
        self._at_first += self._beginning
        self._beginning = self._beginning and self._at_first <= MOST_AT_FIRST  # whatever the clock says
        if self._beginning:
            self.arm = self._since_plain = 0
            return 0
        self._steady -= 1
        may_go_on = self._going[1] <= max(self.limits, default=MAX_GAMMA)
        # many rounds of an arm that is slower than before look like a slower machine, which a plain round tells apart
        odd = self._going[1] and not 1 / SURPRISE < self.slowness / self._slow_when_plain < SURPRISE
        if self._steady > 0 and self._since_plain + 1 < self._after and may_go_on and not odd:
            self.arm, gamma = self._going
            self._since_plain = self._since_plain + 1 if gamma else 0
            return gamma
        self._n_keys, plain = n_keys, 1 / self.plain.seconds(0, n_keys)
        self._count_waiting()
        took = self._seconds(n_keys)
        speeds = {(0, 0): plain} | self._speeds(took)
        run = self.seconds_run + min(self.to_come, HORIZON) / plain  # seconds, if no more is drafted
        share = self._share = max(LOSING * run, STAKE / plain)
        # rounds that lose so much if no draft is kept: this one, and those that are not known yet
        n = 1 + (self.behind if self._going[1] else 0)
        gained = {view: gained + share for view, gained in self._gained.items() if self._shows(view)}
        most = {i: gained.get(self.arms[i].view, -inf) / n + 1 / plain for i in self.ready}  # seconds that one may take
        known = {(i, g): v for (i, g), v in speeds.items() if not g or took[i][g] <= most[i]}
        best = max(known, key=lambda key: known[key])
        if self._last in known and known[best] < GAIN * known[self._last]:
            best = self._last
        run = self.seconds_run + min(self.to_come, HORIZON) / known[best]
        debt = max(self.lost, -sum(gained for gained in self._gained.values() if gained < 0))
        room = (LOSING * run - self.lost) / n
        paying = max(room, (PAYING * run - debt) / n)
        tried = self._to_try(took, best, speeds, room, paying)
        seen = min(self.plain.verify[0].seen, 4)  # only plain rounds show what they take
        gains = known[best] / plain
        after = min(2 << seen, PLAIN_AFTER if gains > BARELY else OFTEN)
        after *= SELDOM if seen > 3 and gains > CLEARLY else 1
        self._after = after
        if tried is None and best[1] and (self._since_plain >= after or (odd and self._since_plain > 1)):
            tried = 0, 0
        i, g = tried or best
        self._best, self._needs = known[best], n * (took[i][g] - 1 / plain) - share if g else -inf
        seconds = self.of[best[0]].seconds(best[1], n_keys)
        asking = ceil(SELDOM_ASKED / seconds)
        self._every = min(ceil(RECORDING / seconds), SELDOM_RECORDED)
        self._steady = min(max(STEADY, asking), LAST_STEADY)
        if best[1] and self._rounds[best[0]] < SURE:
            self._steady = min(self._steady, max(UNSURE, asking // STEADY))
        if tried is not None:
            at_worst = took[tried[0]][tried[1]] - 1 / known[best] if tried[1] else inf  # lost if no draft is kept
            room = paying if speeds[tried] >= known[best] else room
            self._steady = min(STEADY, asking // STEADY, int(room / max(LEAST, at_worst)))
        if tried is None and best[1] == self.tiers[-1]:
            emitted = over_rows([*accumulate(accumulate(self.rates(best[0]), mul, initial=1.0))], self.limits)
            best = best[0], self.of[best[0]].one_further(n_keys, emitted, known[best]) or best[1]
        if tried is None:
            self._last = best
        self.arm, gamma = self._going = tried or best
        self._since_plain = self._since_plain + 1 if gamma else 0
        return gamma

    def _to_try(
        self, took: dict[int, dict[int, float]], known: Key, speeds: dict[Key, float], room: float, paying_room: float
    ) -> Key | None:
        """The arm and gamma that might be faster than the best and is worth trying now; None: there is none.

        room, paying_room: seconds that it may lose; the second if it is expected to be faster.
        """
        best, could = speeds[known], list[Key]()
        if paying_room <= min((least for one in took.values() for least in one.values()), default=0.0) - 1 / best:
            return None
        others = {i: took[i] for i in self.ready if self.arms[i].view != LOOKUP}
        for (i, g), hoped in self._speeds(others, hoped=True).items():
            speed, lost = speeds[i, g], took[i][g] - 1 / best  # if no draft is kept
            if (i, g) != known and hoped > GAIN * best and lost <= (room if speed < best else paying_room):
                could += [(i, g)] * (hoped > GAIN * speed or not self._shows(self.arms[i].view))
        losses = {key: took[key[0]][key[1]] * (1 - speeds[key] / best) for key in could}
        paying = [key for key in could if losses[key] <= 0]
        if paying:
            arm, _ = max(paying, key=lambda key: speeds[key])
            return min(key for key in paying if key[0] == arm)
        return min(could, key=lambda key: losses[key], default=None)

    def found(self) -> list[Found]:
        """What is known of each arm by now, by the keys that the last rounds read; the fastest first."""
        self._count_waiting()
        plain, known, seconds = self.plain.seconds(0, self._n_keys), [], self._seconds(self._n_keys)
        for i, arm in enumerate(self.arms):
            if i not in self.ready:
                known.append(Found(arm.name, 0, None, None, 0))
                continue
            speeds = self._speeds({i: seconds[i]})
            (_, gamma), speed = max(speeds.items(), key=lambda one: one[1], default=((i, 0), 0.0))
            seen = self.of[i].shown
            judged = arm.view == LOOKUP and self._shows(LOOKUP)
            kept = self.rates(i)[0] if seen else None
            known.append(Found(arm.name, gamma, speed * plain, kept, self._rounds[i], judged))
        return sorted(known, key=lambda one: -(one.speed or 0.0))

    def why_not(self) -> str:
        """Why nothing pays, in a sentence; "" where something does."""
        if any(one.speed and one.speed > GAIN and (one.rounds or one.judged) for one in self.found()):
            return ""
        plain, n, (gamma, *_) = self.plain.seconds(0, self._n_keys), self._n_keys, self.tiers[1:]
        steps = [self.of[i].seconds(gamma, n) / plain for i in self.ready if self.arms[i].view != LOOKUP]
        costs = self.plain.seconds(gamma, n) / plain
        rounds = f", with a draft at least {min(steps):.1f}" if steps else ""
        if not any(self._rounds):
            judged = "too few of lookup's drafts would be kept, and " * self._shows(LOOKUP)
            rounds += f": {judged}nothing was worth a try"
            return f"verifying {gamma + 1} tokens costs {costs:.1f} plain steps here{rounds}"
        return (
            f"verifying {gamma + 1} tokens costs {costs:.1f} plain steps here{rounds}: too few drafts were kept for it"
        )

    def record(
        self, gamma: int, n_keys: int, drafting: float, verifying: float, accepted: Sequence[int], *, arm: int = 0
    ) -> None:
        """Record a round of an arm, as GammaPlanner.record does."""
        if self._skips(gamma):
            return
        self._reads(n_keys)
        self._open(gamma)
        planner = self.of[arm if gamma else 0]
        tier = planner._tier(gamma)
        expected = planner.drafting(gamma, n_keys) + planner.verify[tier](n_keys)
        learns, by = self._follow((arm if gamma else 0, gamma), drafting + verifying, expected, planner.verify[tier])
        if learns:
            planner.record(gamma, n_keys, drafting / by, verifying / by, accepted)
        else:
            planner._count(gamma, accepted)
        self._count(gamma, (drafting + verifying) / by, expected, accepted, arm)

    def record_whole(
        self, gamma: int, n_keys: int, seconds: float | None, accepted: Sequence[int], *, arm: int = 0
    ) -> None:
        """Record a round of an arm, as GammaPlanner.record_whole does."""
        if self._skips(gamma):
            return
        self._reads(n_keys)
        self._open(gamma)
        planner = self.of[arm if gamma else 0]
        tier, learns, expected = planner._tier(gamma), True, 0.0
        if seconds is not None:
            who, expected = (arm if gamma else 0, gamma), planner.seconds(tier, n_keys)
            learns, by = self._follow(who, seconds, expected, planner.verify[tier])
            seconds /= by
        if learns:
            planner.record_whole(gamma, n_keys, seconds, accepted)
        else:
            planner._count(gamma, accepted)
        self._count(gamma, seconds or 0.0, expected, accepted, arm)

    @property
    def _lookup(self) -> int | None:
        """The arm that looks up, if it is ready."""
        return next((i for i in self.ready if self.arms[i].view == LOOKUP), None)

    @property
    def _judged(self) -> tuple[GammaPlanner, ...]:
        """Those that count what it drafts, or would have."""
        return () if self._lookup is None else (self.of[self._lookup], self.of_view[LOOKUP])

    def reader(self, text: Sequence[int]) -> LookupTrials | None:
        """Who judges what lookup would draft for a row that begins; None: nobody, as it may not be chosen."""
        if self._lookup is None:
            return None
        return LookupTrials(text, self.arms[self._lookup].ngram, max(self.tiers))

    def count_lookup(self, rows: Sequence[tuple[LookupTrials, Sequence[int]]], gamma: int, *, arm: int) -> None:
        """Count what lookup would have drafted for rows that continue with what a round of an arm emitted.

        Once that is known it waits until it is asked who drafts, as rounds may be short, unless one in flight hides it.
        """
        if arm == self._lookup and gamma:
            self._count_waiting()
            trials = [one for row, new in rows for one in row.follow_own(new, gamma)]
            self._count_trials(trials, 0)
            return
        self._waiting.append(rows)
        known = self._shows(LOOKUP)
        if not known or self.behind or len(self._waiting) >= LAST_STEADY:
            self._count_waiting()
            if self._shows(LOOKUP) and not known:
                self._steady = 0

    def _count_trials(self, trials: Sequence[Trial], rounds: int) -> None:
        for planner in self._judged:
            planner.count_trials(trials, rounds)
        self._looked_up += len(trials)

    def _count_waiting(self) -> None:
        """Count what waits, and what lookup would have gained: after MISSED times what it may lose it may lose anew."""
        if not self._waiting:
            return
        gamma, plain = self.plain._tier(min(MOST, max(self.tiers))), self.plain.seconds(0, self._n_keys)
        costs = self.of[self._lookup or 0].seconds(gamma, self._n_keys) - plain
        for rows in self._waiting:
            of_round = [one for row, new in rows for one in row.follow(new)]
            gained = sum(accepted * plain - (not before) * costs for before, accepted in of_round) / len(rows)
            self._missed = max(0.0, self._missed + gained)
            self._count_trials(of_round, 1)
        self._waiting = []
        if self._gained[LOOKUP] < 0 and self._missed > MISSED * self._share > 0:
            self._gained[LOOKUP] = self._missed = 0.0
            self._steady = 0

    def _skips(self, gamma: int) -> bool:
        """Whether a plain round among others is left out: recording takes time, and one of several tells of all."""
        self._skipped += 1
        plain = not gamma and self._last == self._going == (0, 0) and not self._beginning
        return plain and self._skipped < self._every

    def _reads(self, n_keys: int) -> None:
        """Rounds read so many keys now; where that has changed much, what is best is asked at once."""
        if max(n_keys, self._n_keys) > SURPRISE * min(n_keys, self._n_keys):
            self._steady = 0
        self._n_keys = n_keys

    def _open(self, gamma: int) -> None:
        """See GammaPlanner.open: arms share the target's steps."""
        if gamma in self.plain.further:
            for planner in self.of:
                planner.open(gamma)
            self.tiers = self.plain.tiers

    def _follow(self, who: Key, seconds: float, expected: float, verify: StepTimes) -> tuple[bool, float]:
        """Whether a round tells what its steps take, and how slow the machine is beside when they were timed.

        It slows down and recovers as its other users come and go, and all steps with it. Where a round is off what was
        expected it is the machine's doing; in the first rounds after a change of arm partly the arm's, the more so the
        fewer of its rounds were timed.
        """
        slowness = self.slowness
        surprise = seconds / expected / slowness
        if not 0 < surprise < inf:  # no clock's
            return False, slowness
        self._same = self._same + 1 if who == self._before else 0
        self._before = who
        if not who[1] and self._beginning:  # the first one may be slow for once, as threads awake
            self._plain_seen += 1
            self._beginning = self._plain_seen < AT_FIRST + (expected < BRIEF)
            first = self._plain_seen == 1
            self.slowness *= min(max(surprise, 1 / FAST), FAR) if first else min(max(surprise, 1 / FAR), 1.0)
            self._slow_when_plain = self.slowness
            return False, self.slowness
        learns = self._same < SETTLES
        if learns and not 1 / SURPRISE < surprise < SURPRISE:
            self._steady = 0
            if not who[1] and surprise > 1 and not self._stalled:  # one may stall for once, as something else runs
                self._stalled = True
                return False, slowness
            verify.seen = min(verify.seen, 1)  # what was known is known no longer: it is asked again soon
        self._stalled = self._stalled and bool(who[1])
        of_arm = max(RATE, 1 / (2 + verify.seen)) if learns else 0.0
        self.slowness *= 1 + FOLLOWS * (1 - of_arm) * (min(max(surprise, 1 / FAR), 1.5) - 1)
        if not who[1]:
            self._slow_when_plain = self.slowness
        return learns, slowness if learns else self.slowness

    def record_host(self, gamma: int, seconds: float, *, arm: int = 0) -> None:
        """Record a round's seconds outside its steps, which all arms share."""
        if self._skipped:
            return
        self.plain.record_host(gamma, seconds / self.slowness)
        if self.of[-1].host is not self.plain.host:
            for planner in self.of:
                planner.host = self.plain.host

    def _count(self, gamma: int, took: float, expected: float, accepted: Sequence[int], arm: int) -> None:
        """Count what a round took, what it lost beside the best that is known, and for its view what was accepted."""
        skipped, self._skipped = max(0, self._skipped - 1), 0  # plain ones before this one
        if not 0 <= took < inf:  # no clock's
            return
        plain, judged = self.plain.seconds(0, self._n_keys), self._judged  # every round shows what these gain
        seconds = min(took, HICCUP * expected) + self.plain.host[self.plain._tier(gamma)].seconds if took else 0.0
        self.seconds_run += seconds + skipped * plain
        if self.seconds_run > LONG * plain:  # what was long ago allows no losses now, and forbids none
            self.seconds_run, self.lost, self._missed = self.seconds_run / 2, self.lost / 2, self._missed / 2
            self._gained, self._steady = {view: gained / 2 for view, gained in self._gained.items()}, 0
        self._rounds[arm] += gamma > 0
        view = self.arms[arm].view if gamma and accepted else None
        own = (self.of[arm], self.of_view[view]) if view else ()
        by = FADE ** (skipped + 1)
        for planner in (one for one in self._all if one not in judged):
            planner.fade(by / FADE if planner in own else by)
        if not view:
            return
        kept = sum(accepted) / len(accepted)  # by rows that keep as many as are accepted
        emitted = 1 + (fmean(min(kept, most) for most in self.limits) if self.limits else kept)
        if seconds and self._best and (not self._shows(view) or (arm, gamma) != self._last):
            self.lost = max(0.0, self.lost + seconds - emitted / self._best)
        self._gained[view] += emitted * plain - seconds if seconds else 0.0
        if self._gained[view] < self._needs:
            self._steady = 0
        if self.of_view[view]._count(gamma, accepted):  # the text is another: what is best is asked at once
            self._steady = 0
