"""How many tokens to draft per round: from measured step times and the run's own acceptance, over a few tiers.

A round of gamma drafts costs T_D(gamma), a start and a step per draft, T_V(gamma), T_H, the host's share, and T_S for
every token that it emits per row, the share of a pass that refreshes the selection that drafts read, if there are such
passes. It emits 1 + r_1 + r_1 r_2 + ... tokens per row, where r_i is how often the i-th draft was accepted if the one
before it was (Leviathan et al. 2023, arXiv 2211.17192, with a measured r_i in place of alpha). The tier with the most
tokens per second wins; 0 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import fmean, mean

from .lookup_trials import LookupTrials, Trial

Measure = Callable[
    [int, int], tuple[float, float]
]  # (gamma, n_keys) -> seconds of drafting per token (for 1 and the highest tier), seconds of the target's step

Steps = Callable[[int], float]  # gamma -> draft steps that drafting so many tokens takes

Selecting = Callable[[int], float]  # n_keys -> seconds of selecting for a token that every row emits

# chance that a draft is accepted, until the run has shown its own; later positions as the last seen. Rather too high
# than too low: a few rounds show that drafting does not pay, and plain rounds never show that it would
PRIOR = 0.8
PRIOR_WEIGHT = 2.0  # number of drafts that this expectation counts as
RATE = 0.1  # weight of a new step time, once a few were seen
KEPT_WEIGHT = 8.0  # number of drafts that earlier runs count as: a round of eight rows outweighs them
DECAY = 0.98  # of older observations, per round that drafts
UNLIKELY = 0.001  # chance of so many refusals of first drafts in a row, below which the text is another than before ...
LEAST_REFUSED = 4  # ... if they are as many
GAIN = 1.02  # a tier must promise this factor before it replaces the last one
FIRST_PROBE, LAST_PROBE = 16, 1024  # plain rounds after which drafting is tried again: doubled while it does not pay
PAYING = 48  # rounds that draft after which it has paid for a while, and is tried again as soon as at first
PLAIN_AFTER = 32  # rounds that draft after which a plain one is timed again ...
CLEARLY, RARELY = 1.25, 16  # ... so many times as many where drafting gains more than that, once one was timed
FURTHER = 1.03  # the same for a tier for which nothing is built yet
NEARLY, TRIED = 0.9, 3  # a tier beside the best one that promises this share of it has so many rounds to show itself
FIRST_ROUNDS = 8  # the quickest of them gives the host's share: the others may build what they are the first to use


def rising(seconds: Sequence[float]) -> list[float]:
    """The nearest non-decreasing numbers (least squares): those that decrease are pooled."""
    pools: list[list[float]] = []
    for one in seconds:
        pools.append([one])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [mean(pool) for pool in pools for _ in pool]


class StepTimes:
    """Seconds of one kind of step as a line over the keys in view, corrected as the run goes.

    With fewer keys than were timed it is expected to take as long as with the fewest: a line tilted by noise would
    promise steps at no cost there.
    """

    def __init__(self, small: tuple[int, float], large: tuple[int, float]) -> None:
        (self.few, fast), (many, slow) = small, large
        self.slope = max(0.0, (slow - fast) / (many - self.few)) if many > self.few else 0.0
        self.base = max(fast, 1e-9)  # with few keys; a factor could never correct 0
        self.correction, self.seen = 1.0, 0

    def __call__(self, n_keys: int) -> float:
        """Expected seconds with n_keys in view."""
        return (self.base + self.slope * max(0, n_keys - self.few)) * self.correction

    def learn(self, n_keys: int, seconds: float) -> None:
        """Follow the machine: the first steps change much, later ones little, and one slow step at most half of it."""
        if not 0 <= seconds < inf:  # no clock's
            return
        self.seen += 1
        self.correction *= 1 + max(RATE, 1 / (1 + self.seen)) * (min(seconds / self(n_keys), 1.5) - 1)


class HostTime:
    """Seconds of a round outside its steps."""

    def __init__(self) -> None:
        self.seconds, self.seen = 0.0, -1

    def learn(self, seconds: float) -> None:
        """Follow the machine: the quickest of the first rounds, then one slow round among many changes little.

        The very first may build something, and counts for nothing.
        """
        if not 0 <= seconds < inf:  # no clock's
            return
        self.seen += 1
        if self.seen <= FIRST_ROUNDS:
            self.seconds = min(seconds, self.seconds or seconds) if self.seen else 0.0
        else:
            self.seconds += RATE * (min(seconds, 1.5 * self.seconds) - self.seconds)


def over_rows(emitted: list[float], limits: Sequence[int]) -> list[float]:
    """Tokens of a round of 0, 1, ... drafts, its mean over rows that keep at most so many."""
    return [fmean(emitted[min(g, n)] for n in limits) for g in range(len(emitted))] if limits else emitted


class GammaPlanner:
    """Chooses gamma round by round; a fixed gamma is always chosen."""

    arm, ready = 0, (0,)  # there is one
    to_come = 0.0  # tokens of a row that the run may still bring
    behind = 0  # rounds in flight, of which nothing is known yet
    limits: Sequence[int] = ()  # drafts that each row may keep in the next round; (): none keeps fewer than others

    def __init__(self, gamma: int | str, tiers: Sequence[int], further: Sequence[int] = ()) -> None:
        """further: tiers that are neither timed nor chosen before the highest of the others promises that they pay."""
        self.fixed = None if isinstance(gamma, str) else gamma
        self.tiers, self.further = tuple(tiers), tuple(further)
        self.draft: StepTimes | None = None  # one draft step
        self.start: StepTimes | None = None  # the time of drafting outside its steps, such as from cold caches
        self.verify: dict[int, StepTimes] = {}  # the target's step, by gamma
        # the rest of a round, in which tokens are drawn and compared: by gamma, that of the nearest one that was timed
        self.host = dict.fromkeys(self.tiers, HostTime())
        self._timed = {g: HostTime() for g in self.tiers}
        self.steps: Steps = float
        self.select: StepTimes | None = None  # selecting, for a token that every row emits
        self._last = 0
        self._plain_rounds = 0  # in a row
        self._drafting_rounds = 0  # since drafting was last retried
        self._since_plain = 0  # rounds that drafted since a plain one
        self._probe_after = FIRST_PROBE
        # by position in the round: drafts that followed accepted ones, and how many of them were; older ones fade
        self._trials = [0.0] * max([*self.tiers, *self.further], default=0)
        self._accepted = [0.0] * len(self._trials)
        self._faded = 1.0  # what of these still counts
        self._refused, self._luck = 0.0, 1.0  # first drafts in a row among these trials, and the chance of that

    def calibrate(
        self, measure: Measure, few: int, many: int, selecting: Selecting | None = None, steps: Steps | None = None
    ) -> None:
        """Time the steps, and selecting if there is any, with few and with many keys in view.

        steps: None if each token takes one draft step.
        """
        if self.fixed is not None:
            return
        self.steps, (least, *_, highest) = steps or float, [self.tiers[1], *self.tiers[1:]]
        # each tier: kernels take rows by tiles, so one more draft may cost nothing, or as much as the four before it
        at = {(g, n): measure(g, n) for g in self.tiers for n in (few, many)}
        parts = [self._parted(least * at[least, n][0], highest * at[highest, n][0]) for n in (few, many)]
        self.start, self.draft = (StepTimes((few, quick), (many, slow)) for quick, slow in zip(*parts, strict=True))
        # an additional draft never makes the target's step shorter: if it seems to, that is noise
        quick, slow = (rising([at[g, n][1] for g in self.tiers]) for n in (few, many))
        times = zip(self.tiers, quick, slow, strict=True)
        self.verify = {g: StepTimes((few, at_few), (many, at_many)) for g, at_few, at_many in times}
        if selecting:
            self.select = StepTimes((few, selecting(few)), (many, selecting(many)))

    def _parted(self, least: float, most: float) -> tuple[float, float]:
        """Seconds of drafting outside its steps, and of one step: from drafting the fewest tokens and the most."""
        fewer, more = self.steps(self.tiers[1]), self.steps(max(self.tiers))
        # noise must not make either negative; of one tier nothing is known to be outside
        step = min(max(0.0, most - least) / (more - fewer), most / more) if more > fewer else most / more
        return most - more * step, step

    def begin(self, weight: float = KEPT_WEIGHT) -> None:
        """A new run: acceptance in earlier ones counts as so many drafts."""
        self._forget(weight)
        self._probe_after = FIRST_PROBE

    def _forget(self, weight: float) -> None:
        """Let past observations count as at most this many drafts."""
        self._apply()
        self._keep(weight)
        self._plain_rounds = self._drafting_rounds = 0
        self._refused, self._luck = 0.0, 1.0

    def _keep(self, weight: float) -> None:
        for i, trials in enumerate(self._trials):
            keep = min(1.0, weight / trials) if trials > 0 else 1.0
            self._trials[i], self._accepted[i] = trials * keep, self._accepted[i] * keep

    def choose(self, n_keys: int) -> int:
        """Gamma of the next round; its steps take as long as if each slot read n_keys, see Round.keys_read."""
        if self.fixed is not None:
            return self.fixed
        emitted = over_rows(self.emitted(), self.limits)
        tiers = [g for g in self.tiers if g <= max(self.limits, default=g)]
        speeds = {g: emitted[g] / self.seconds(g, n_keys, emitted[g]) for g in tiers}
        best = max(speeds, key=lambda g: speeds[g])
        if speeds[best] < GAIN * speeds.get(self._last, 0.0):
            best = self._last
        if best == 0 and self._plain_rounds >= self._probe_after:
            could = {g: (g + 1) / self.seconds(g, n_keys, g + 1) for g in tiers if g}  # if all were accepted
            if max(could.values(), default=0.0) > speeds[0]:
                self._forget(PRIOR_WEIGHT / 2)  # so that one accepted draft is enough for more
                self._probe_after = min(2 * self._probe_after, LAST_PROBE)
                best = max(could, key=lambda g: speeds[g])  # the one that loses least
        best = self._untried_beside(best, speeds) or best
        if best == self.tiers[-1]:
            best = self.one_further(n_keys, emitted, speeds[best]) or best
        self._last = best
        # only plain rounds show what they take, and the first of them correct it most
        seen = min(self.verify[0].seen, 4)
        pays = best not in speeds or speeds[best] >= CLEARLY * speeds[0]
        after = min(2 << seen, PLAIN_AFTER) * (RARELY if seen and pays else 1)
        if best and self._since_plain >= after:
            self._since_plain = 0  # now: of captured rounds the next one is chosen before this one is recorded
            return 0
        return best

    def _untried_beside(self, best: int, speeds: Mapping[int, float]) -> int:
        """A tier next to the best one that seems nearly as good and has hardly run; 0: there is none.

        What was timed before the run may be off by more than what lies between two tiers, and only rounds show it.
        """
        at = self.tiers.index(best)
        runs = best and self.verify[best].seen >= TRIED
        beside = self.tiers[at - 1 : at] + self.tiers[at + 1 : at + 2] if runs else ()
        near = [g for g in beside if g and self.verify[g].seen < TRIED and speeds.get(g, 0) >= NEARLY * speeds[best]]
        return max(near, key=lambda g: speeds[g], default=0)

    def one_further(self, n_keys: int, emitted: Sequence[float], speed: float) -> int:
        """The next further tier, if rounds have shown what the highest one takes, and it promises more; else 0."""
        gamma, known = next(iter(self.further), 0), self.verify[self.tiers[-1]]
        if not gamma or known.seen < TRIED or gamma > max(self.limits, default=gamma):
            return 0
        seconds = self.drafting(gamma, n_keys) + self._beyond(gamma, n_keys) + self.host[self.tiers[-1]].seconds
        promised = emitted[gamma] / (seconds + self.selecting(gamma, n_keys, emitted[gamma]))
        return gamma if promised > FURTHER * speed else 0

    def _beyond(self, gamma: int, n_keys: int) -> float:
        """Seconds of the target's step past the highest tier: each draft takes as long as one there, or on average."""
        first, *_, before, last = self.tiers
        least, less, most = (self.verify[g](n_keys) for g in (first, before, last))
        return most + (gamma - last) * max((most - less) / (last - before), (most - least) / (last - first))

    def open(self, gamma: int) -> None:
        """A tier that was a further one is one of all from now on: a round of it was launched."""
        if gamma not in self.further:
            return
        if self.verify and gamma not in self.verify:  # which others may share
            few = self.verify[self.tiers[-1]].few
            self.verify[gamma] = StepTimes((few, self._beyond(gamma, few)), (2 * few, self._beyond(gamma, 2 * few)))
        self._timed.setdefault(gamma, HostTime())
        self.host.setdefault(gamma, self.host[self.tiers[-1]])
        self.tiers, self.further = (*self.tiers, gamma), tuple(g for g in self.further if g > gamma)

    def record(
        self, gamma: int, n_keys: int, drafting: float, verifying: float, accepted: Sequence[int], *, arm: int = 0
    ) -> None:
        """Record a round: seconds in the draft's and in the target's steps, accepted drafts of each live row."""
        if self.fixed is not None or self.draft is None or self.start is None:
            return
        self.open(gamma)
        self.verify[self._tier(gamma)].learn(n_keys, verifying)
        if gamma:
            share = drafting / self.drafting(gamma, n_keys)
            self.draft.learn(n_keys, share * self.draft(n_keys))
            self.start.correction = self.draft.correction
        self._count(gamma, accepted)

    def count_trials(self, trials: Sequence[Trial], rounds: int = 1) -> None:
        """Count drafts that no round verified. rounds: whose they are, but for one that is recorded."""
        self.fade(DECAY**rounds)
        self._apply()
        if (0, True) in trials:
            self._refused, self._luck = 0.0, 1.0
        for i, accepted in trials:
            if i < len(self._trials):
                self._trials[i] += 1
                self._accepted[i] += accepted

    def _decay(self) -> None:
        self._trials = [trials * DECAY for trials in self._trials]
        self._accepted = [accepted * DECAY for accepted in self._accepted]

    def _count(self, gamma: int, accepted: Sequence[int]) -> bool:
        """Count a round, and its accepted drafts -> whether they tell that the text is another than before."""
        if not gamma:
            self._plain_rounds, self._since_plain = self._plain_rounds + 1, 0
            return False
        self._apply()
        anew = self._is_another_text(accepted)
        self._decay()
        for i in range(min(gamma, len(self._trials))):
            self._trials[i] += sum(n >= i for n in accepted)
            self._accepted[i] += sum(n > i for n in accepted)
        self._plain_rounds, self._since_plain = 0, self._since_plain + 1
        self._drafting_rounds += 1
        if self._drafting_rounds >= PAYING:
            self._probe_after = FIRST_PROBE
        return anew

    def _is_another_text(self, accepted: Sequence[int]) -> bool:
        """Whether a round's refusals, and those before them in a row, are too many for the text that was seen before.

        If so, what was seen before them counts little from now on.
        """
        if not accepted or any(accepted):
            self._refused, self._luck = 0.0, 1.0
            return False
        before, n = self._refused, len(accepted)  # those before have been counted, this round's have not
        self._luck *= (1 - self.rates(n=1)[0]) ** n
        self._refused = DECAY * before + n
        if self._luck >= UNLIKELY or before + n < LEAST_REFUSED:
            return False
        self._trials[0] -= before
        self._keep(PRIOR_WEIGHT)
        self._trials[0] += before
        self._luck = 1.0
        return True

    def record_host(self, gamma: int, seconds: float, *, arm: int = 0) -> None:
        """Record a round's seconds outside its steps."""
        tier = self._tier(gamma)
        self._timed[tier].learn(seconds)
        if self._timed[tier].seen == 1:
            known = [g for g in self.tiers if self._timed[g].seen > 0]
            self.host = {g: self._timed[min(known, key=lambda t: (abs(t - g), t))] for g in self.tiers}

    def record_whole(
        self, gamma: int, n_keys: int, seconds: float | None, accepted: Sequence[int], *, arm: int = 0
    ) -> None:
        """Record a round's total seconds (None: unknown); its parts are assumed to have the expected shares."""
        if self.fixed is not None or self.draft is None:
            return
        self.open(gamma)
        if seconds is None:
            self._count(gamma, accepted)
            return
        drafting, verifying = self.drafting(gamma, n_keys), self.verify[self._tier(gamma)](n_keys)
        scale = seconds / (drafting + verifying + self.selecting(gamma, n_keys))
        if gamma and self.select:
            self.select.learn(n_keys, scale * self.select(n_keys))
        self.record(gamma, n_keys, drafting * scale, verifying * scale, accepted)

    def rates(
        self, prior: float | Sequence[float] = PRIOR, weight: float = PRIOR_WEIGHT, n: int | None = None
    ) -> list[float]:
        """The chance of each draft if those before it were accepted, expected as a number of drafts of this prior.

        n: of so many drafts, None: of all.
        """
        self._apply()
        shown, rates = zip(self._accepted[:n], self._trials[:n], strict=True), list[float]()
        if not isinstance(prior, float):
            return [(kept + weight * rate) / (of + weight) for (kept, of), rate in zip(shown, prior, strict=True)]
        for accepted, trials in shown:
            prior = (accepted + weight * prior) / (trials + weight)
            rates.append(prior)
        return rates

    def reader(self, text: Sequence[int]) -> LookupTrials | None:
        """Who judges what lookup would draft for a row that begins; None: nobody."""

    def count_lookup(self, rows: Sequence[tuple[LookupTrials, Sequence[int]]], gamma: int, *, arm: int) -> None:
        """Count what lookup would have drafted for rows that continue with what a round of an arm emitted."""

    @property
    def shown(self) -> float:
        """First drafts of rounds that count, the older ones less."""
        return self._trials[0] * self._faded if self._trials else 0.0

    def fade(self, by: float) -> None:
        """Let what was seen count less."""
        self._faded *= by

    def _apply(self) -> None:
        """Let what was seen count as much less as it has faded: every round fades what others have shown."""
        if self._faded != 1.0:
            self._refused *= self._faded
            self._trials = [trials * self._faded for trials in self._trials]
            self._accepted = [accepted * self._faded for accepted in self._accepted]
            self._faded = 1.0

    def emitted(self) -> list[float]:
        """Tokens per row that a round of 0, 1, ... drafts is expected to emit, up to the highest tier."""
        total, share = [1.0], 1.0
        for rate in self.rates():
            share *= rate
            total.append(total[-1] + share)
        return total

    def tokens(self, gamma: int) -> float:
        """Tokens per row that a round of gamma drafts is expected to emit."""
        return self.emitted()[gamma]

    def seconds(self, gamma: int, n_keys: int, tokens: float | None = None) -> float:
        """Seconds that a round of gamma drafts is expected to take; tokens: what it emits, where that is known."""
        known = self.drafting(gamma, n_keys) + self.verify[gamma](n_keys) + self.host[gamma].seconds
        return known + self.selecting(gamma, n_keys, tokens)

    def drafting(self, gamma: int, n_keys: int) -> float:
        """Seconds that drafting gamma tokens is expected to take."""
        assert self.draft is not None and self.start is not None
        return self.start(n_keys) + self.steps(gamma) * self.draft(n_keys) if gamma else 0.0

    def selecting(self, gamma: int, n_keys: int, tokens: float | None = None) -> float:
        """Seconds of refreshing passes that a round of gamma drafts is expected to cause: they come by tokens."""
        if not (gamma and self.select):
            return 0.0
        return (self.tokens(gamma) if tokens is None else tokens) * self.select(n_keys)

    def _tier(self, gamma: int) -> int:
        """The tier nearest to a round of gamma drafts: rounds at the end of a text draft less than was chosen."""
        if gamma in self.tiers:
            return gamma
        return min((g for g in self.tiers if (g > 0) == (gamma > 0)), key=lambda g: (abs(g - gamma), g))
