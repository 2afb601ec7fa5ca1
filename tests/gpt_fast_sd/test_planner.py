"""The planner drafts as much as pays in simulated worlds of step times and acceptance, and finds out at little cost.

Rounds are simulated with the true times of a world; the planner sees them with noise.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest

from gpt_fast_sd.policies.config import GAMMA_TIERS, further_tiers
from gpt_fast_sd.serving.gamma_planner import FIRST_PROBE, FIRST_ROUNDS, LAST_PROBE, GammaPlanner, StepTimes, rising
from tests.helpers import Patch, few, thinned

FEW, MANY = 512, 8192
Measure = Callable[[int, int], tuple[float, float]]
Acceptance = Callable[[int], float]  # of a draft after accepted ones, by round
Seen = Callable[[int, int, float, float], tuple[float, float]]  # round, gamma and its two times -> as they were timed


@dataclass(frozen=True)
class World:
    """Seconds of a machine: a draft step, and the target's step, which takes one where it judges no draft."""

    draft: float
    per_draft: float = 0.05  # what judging one more draft costs
    draft_per_key: float = 0.0
    target_per_key: float = 0.0

    def draft_step(self, n_keys: int) -> float:
        return self.draft + self.draft_per_key * n_keys

    def target_step(self, gamma: int, n_keys: int) -> float:
        return 1.0 + self.per_draft * gamma + self.target_per_key * n_keys

    def round(self, gamma: int, n_keys: int) -> float:
        return gamma * self.draft_step(n_keys) + self.target_step(gamma, n_keys)

    def measure(self, gamma: int, n_keys: int) -> tuple[float, float]:
        return self.draft_step(n_keys) if gamma else 0.0, self.target_step(gamma, n_keys)

    def best(self, acceptance: float, n_keys: int = 1000) -> tuple[float, int]:
        """Tokens per second of the best tier, and that tier, where every draft after an accepted one is as good."""
        tokens = {g: sum(acceptance**i for i in range(g + 1)) for g in GAMMA_TIERS}
        return max((tokens[g] / self.round(g, n_keys), g) for g in GAMMA_TIERS)


def planner(world: World, measure: Measure | None = None, further: Sequence[int] = (), **how: Any) -> GammaPlanner:
    """A planner that begins, by the times of a world, or as they were measured."""
    made = GammaPlanner("auto", GAMMA_TIERS, further)
    made.calibrate(measure or world.measure, few=FEW, many=MANY, **how)
    made.begin()
    return made


def test_rows_that_keep_few_drafts_count_for_what_they_keep_and_no_tier_is_above_them() -> None:
    world = World(draft=0.1)
    plan = planner(world)
    for _ in range(30):
        plan.record(4, 1000, 0.4, world.target_step(4, 1000), [4] * 8)

    def most() -> int:
        return max(plan.choose(1000) for _ in range(3))  # a plain round comes now and then

    assert most() >= 4
    plan.limits = [16, *[0] * 7]  # seven of eight rows would pay for the drafts of one
    assert most() == 0
    plan.limits = [1] * 8
    assert most() <= 1
    plan.limits = ()
    assert most() >= 4


def tiers(seconds: Callable[[int, int], float], n_keys: int = 1000) -> list[float]:
    return [seconds(gamma, n_keys) for gamma in GAMMA_TIERS]


def simulate(
    world: World, acceptance: Acceptance, *, rounds: int, rows: int = 8, seed: int = 0, n_keys: int = 1000,
    plan: GammaPlanner | None = None, seen: Seen | None = None,
) -> tuple[float, list[int]]:  # fmt: skip
    """Tokens per row and second, and the gammas chosen. Steps seem slower than they are, by 4 %, or `seen`."""
    rng, plan = random.Random(seed), plan or planner(world)
    seconds = tokens = 0.0
    gammas: list[int] = []
    for i in range(rounds):
        gamma = plan.choose(n_keys)
        taken = [n_accepted(rng, gamma, acceptance(i)) for _ in range(rows)]
        times = gamma * world.draft_step(n_keys), world.target_step(gamma, n_keys)
        noisy = times[0] * (1 + 0.05 * abs(rng.gauss(0, 1))), times[1] * (1 + 0.05 * abs(rng.gauss(0, 1)))
        plan.record(gamma, n_keys, *(seen(i, gamma, *times) if seen else noisy), taken)
        seconds += sum(times)
        tokens += mean(taken) + 1
        gammas.append(gamma)
    return tokens / seconds, gammas


def tokens_a_second(world: World, acceptance: float, gammas: Sequence[int]) -> float:
    """What rounds of these gammas bring on average."""
    return mean(sum(acceptance**i for i in range(g + 1)) / world.round(g, 1000) for g in gammas)


def n_accepted(rng: random.Random, gamma: int, chance: float) -> int:
    """How many of a row's drafts are accepted before the first that is not."""
    n = 0
    while n < gamma and rng.random() < chance:
        n += 1
    return n


# ---- what it chooses ------------------------------------------------------------------------------------------------

DRAFTS = (0.02, 0.1, 0.3, 0.5, 0.7)  # seconds of a draft step where the target's take one


@thinned("acceptance,draft", [0.0, 0.3, 0.6, 0.8, 0.9, 0.97], DRAFTS)
def test_it_settles_on_a_tier_that_is_nearly_the_fastest(draft: float, acceptance: float) -> None:
    world = World(draft)
    best, _ = world.best(acceptance)
    speed, gammas = simulate(world, lambda i: acceptance, rounds=600)
    # probes, noise, and tiers that promise less than 2 % more than the one in use
    assert speed > 0.97 * best
    assert tokens_a_second(world, acceptance, gammas[300:]) > 0.975 * best


@pytest.mark.parametrize(("acceptance", "draft", "gains"), [(0.97, 0.05, 1.2), (0.97, 0.1, 1.1), (0.8, 0.05, 0.995)])
def test_further_tiers_are_found_where_they_pay_and_cost_nothing(acceptance: float, draft: float, gains: float) -> None:
    """Verification is nearly flat. They are timed by their own rounds alone."""
    world, most = World(draft, per_draft=0.005), list[int]()
    for seed in range(6):
        plans = [planner(world), planner(world, further=further_tiers(1))]
        assert all(plan.verify.keys() == {*GAMMA_TIERS} for plan in plans)
        found = [simulate(world, lambda i: acceptance, rounds=200, seed=seed, plan=plan)[0] for plan in plans]
        assert found[1] >= gains * found[0]
        most.append(plans[1].tiers[-1])
    assert {*most} == ({16} if acceptance > 0.9 else {8})


def after_plain(plan: GammaPlanner, n_keys: int = 1000) -> int:
    """What is chosen after the plain round that is due, as none was timed."""
    assert plan.choose(n_keys) == 0
    return plan.choose(n_keys)


def test_tokens_and_seconds_are_those_of_the_formula() -> None:
    """With much seen, (1 - a ** (gamma + 1)) / (1 - a) tokens for gamma T_D + T_V(gamma) seconds (Leviathan et al.)."""
    world, plan, rng = World(0.3), planner(World(0.3)), random.Random(1)
    for _ in range(40):
        plan.record(8, 1000, 8 * 0.3, 1.4, [n_accepted(rng, 8, 0.8) for _ in range(500)])
    for gamma in GAMMA_TIERS:
        assert plan.tokens(gamma) == pytest.approx((1 - 0.8 ** (gamma + 1)) / 0.2, rel=0.02)
        assert plan.seconds(gamma, 1000) == pytest.approx(world.round(gamma, 1000), rel=0.01)
    assert after_plain(plan) == world.best(0.8)[1]
    plan = planner(World(0.1))
    for _ in range(50):
        plan.record(8, 1000, 0.8, 1.4, [2] * 4)  # the third is never accepted
    assert after_plain(plan) == 2


def test_a_longer_text_may_pay_where_a_short_one_does_not() -> None:
    """MagicDec's point: the target's step grows with the cache, a draft of a fixed budget does not."""
    world = World(1.2, target_per_key=1e-3)
    plan = planner(world)
    for _ in range(20):
        plan.record(3, FEW, 3 * world.draft_step(FEW), world.target_step(3, FEW), [n % 4 for n in range(8)])
    assert plan.choose(64) == plan.choose(FEW) == 0
    assert after_plain(plan, MANY) > 0
    assert world.best(0.6, 64)[1] == 0 and world.best(0.6, MANY)[1] > 0


@pytest.mark.parametrize("gamma", [1, 5, 16])
def test_a_fixed_gamma_is_chosen_always_and_nothing_is_measured(gamma: int) -> None:
    plan = GammaPlanner(gamma, GAMMA_TIERS)
    plan.calibrate(lambda *_: pytest.fail("measured"), few=FEW, many=MANY)
    plan.begin()
    for _ in range(100):
        assert plan.choose(1000) == gamma
        plan.record(gamma, 1000, 1e9, 1e9, [0] * 8)


# ---- what finding out costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", few([128, 256, 512], [256]))
@thinned("rows,draft", [1, 4, 8], DRAFTS[1:])
def test_drafts_that_are_never_accepted_cost_little(draft: float, rows: int, rounds: int) -> None:
    speed, _ = simulate(World(draft, per_draft=0.02), lambda i: 0.0, rounds=rounds, rows=rows)
    # in rounds of plain decoding; a single row shows little per round, and where drafts are cheap few of them would pay
    assert (1 - speed) * rounds < {(1, 0.1): 11, (1, 0.3): 7}.get((rows, draft), 4.5)


@pytest.mark.parametrize("rows", [1, 8])
def test_where_not_even_perfect_drafts_would_pay_nothing_is_ever_drafted(rows: int) -> None:
    _, gammas = simulate(World(1.1), lambda i: 1.0, rounds=1000, rows=rows)
    assert set(gammas) == {0}


@pytest.mark.parametrize(("acceptance", "rows"), [(0.95, 8), (0.95, 1), (0.3, 8), (0.3, 1)])
def test_a_run_of_64_rounds_suffices_to_find_what_pays(acceptance: float, rows: int) -> None:
    """Once it did not draft before 48 plain rounds where 0.7 accepted would not have paid."""
    world = World(0.45, per_draft=0.3)
    assert world.best(0.7)[1] == 0
    speeds = [simulate(world, lambda i: acceptance, rounds=64, rows=rows, seed=seed)[0] for seed in range(16)]
    assert mean(speeds) > 0.96 * world.best(acceptance)[0]


@pytest.mark.parametrize("faster", [0.7, 0.8])
def test_plain_decoding_that_is_faster_than_it_was_timed_is_found(faster: float) -> None:
    """Once nothing timed it again while drafts were made, and they seemed to pay for as long as they lasted."""
    plan = planner(World(0.5))
    assert plan.choose(1000) > 0
    _, gammas = simulate(World(0.5, per_draft=0.15), lambda i: 0.8, rounds=120, plan=plan, seen=plainly([], faster))
    assert sum(g > 0 for g in gammas[20:]) < 10


def plainly(first: list[float], later: float) -> Seen:
    """Plain steps seem to take the first seconds, in turn, and then others."""
    return lambda i, gamma, drafting, verifying: (drafting, verifying if gamma else first.pop() if first else later)


@pytest.mark.parametrize("slow", [2.0, 9.0])
def test_a_plain_step_that_was_slow_is_timed_again(slow: float) -> None:
    """Once a single slow one made drafts seem to gain so much that plain decoding was never timed again."""
    _, gammas = simulate(World(0.5, per_draft=0.15), lambda i: 0.8, rounds=600, seen=plainly([slow], 0.8))
    assert sum(g > 0 for g in gammas[-200:]) < 20


def test_of_captured_rounds_one_at_a_time_is_plain() -> None:
    """The next round is chosen before this one is recorded: once each plain round that was to be timed came twice."""
    world, rng = World(0.55), random.Random(0)
    plan, gammas = planner(world), [0, 0]
    for _ in range(300):
        gammas.append(plan.choose(1000))
        before = gammas[-2]
        plan.record_whole(before, 1000, world.round(before, 1000), [n_accepted(rng, before, 0.9) for _ in range(8)])
    plain = [i for i, g in enumerate(gammas) if not g and i > 60]
    assert len(plain) > 4 and all(b - a > 10 for a, b in itertools.pairwise(plain))


def test_probes_are_rarer_and_rarer_and_never_end() -> None:
    _, gammas = simulate(World(0.5), lambda i: 0.0, rounds=8 * LAST_PROBE)
    probes = [i for i, g in enumerate(gammas) if g > 0 and i > FIRST_PROBE // 2]
    apart = [b - a for a, b in itertools.pairwise(probes)]
    doubled = [FIRST_PROBE * 2**i for i in range(1, LAST_PROBE // FIRST_PROBE) if FIRST_PROBE * 2**i < LAST_PROBE]
    assert apart[: len(doubled)] == [n + 1 for n in doubled] and len(doubled) > 3
    assert set(apart[len(doubled) :]) == {LAST_PROBE + 1} and len(apart) > len(doubled) + 3


@thinned("draft,rows", [0.1, 0.3, 0.5], [1, 8])
def test_it_recovers_when_acceptance_rises(draft: float, rows: int) -> None:
    """Old evidence must fade: once it stayed at a gamma of 1, or plain, for as long as it had been right to."""
    world = World(draft)
    for before in (0.0, 0.3):  # nothing is accepted at first, or little, after a good beginning
        phases = [0.9] * 60 + [before] * 400 + [0.9] * 2600
        _, gammas = simulate(world, phases.__getitem__, rounds=len(phases), rows=rows)
        assert tokens_a_second(world, 0.9, gammas[-600:]) > 0.96 * world.best(0.9)[0]


def test_it_stops_soon_when_acceptance_falls() -> None:
    _, gammas = simulate(World(0.3), lambda i: 0.95 if i < 300 else 0.05, rounds=600)
    assert min(gammas[250:300]) >= 4
    assert sum(g > 0 for g in gammas[400:]) <= 4


# ---- what it knows of time ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Together(World):
    """A world whose drafts of a round take a time that is more or less than that of each alone."""

    drafts: Callable[[int], float] = float

    def round(self, gamma: int, n_keys: int) -> float:
        return self.drafts(gamma) + self.target_step(gamma, n_keys)

    def measure(self, gamma: int, n_keys: int) -> tuple[float, float]:
        return self.drafts(gamma) / max(1, gamma), self.target_step(gamma, n_keys)


class Tiled(World):
    """A machine that judges up to four drafts in the time of none, and more in half as much again."""

    def target_step(self, gamma: int, n_keys: int) -> float:
        return 1.5 if gamma > 4 else 1.0


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (World(0.4, per_draft=0.1, draft_per_key=1e-5, target_per_key=3e-4), {}),
        # the first step of a draft finds the caches as the target's step left them: empty
        (Together(0.5, drafts=lambda gamma: gamma * 0.5 + (0.4 if gamma else 0.0)), {}),
        # a hierarchy: a step of its middle level, of 1.6 target steps, brings two drafts at once
        (Together(1.6, drafts=lambda gamma: -(-gamma // 2) * 1.6), {"steps": lambda gamma: -(-gamma // 2)}),
        (Tiled(0.1), {}),
    ],
)
def test_every_tier_is_measured_and_known_to_cost_what_it_takes(world: World, how: dict[str, Any]) -> None:
    """Times are lines over the keys, with fewer keys than were timed as with the fewest.

    Once a first draft seemed to cost an eighth of eight, or half of a middle step, and was drafted where plain is
    faster; and tiers between were taken to lie on a line, and four drafts to cost a fifth more than they did.
    """
    asked = list[tuple[int, int]]()
    plan = planner(world, lambda *of: asked.append(of) or world.measure(*of), **how)
    assert sorted(asked) == [(gamma, n) for gamma in GAMMA_TIERS for n in (FEW, MANY)]
    for n_keys in (0, 100, FEW, 3000, MANY, 16000):
        assert tiers(plan.seconds, n_keys) == pytest.approx(tiers(world.round, max(n_keys, FEW)))
    before, target = tiers(plan.seconds), world.target_step(1, 1000)
    plan.record(1, 1000, world.round(1, 1000) - target, target, [1] * 8)  # as long as expected: nothing changes
    assert tiers(plan.seconds) == pytest.approx(before)


def test_a_step_that_takes_longer_in_the_loop_than_when_it_was_timed_is_soon_known() -> None:
    """Once it took ten rounds to see it, of a run of sixty."""
    plan = planner(World(0.3))
    for _ in range(3):
        plan.record(2, 1000, 2 * 0.4, 1.1, [2, 0])
    assert plan.drafting(2, 1000) == pytest.approx(0.8, rel=0.07)


@pytest.mark.parametrize(("draft", "acceptance"), [(0.1, 0.8), (0.15, 0.85), (0.2, 0.9)])
def test_it_finds_the_last_draft_that_is_judged_for_nothing(draft: float, acceptance: float) -> None:
    world = Tiled(draft)
    speed, gammas = simulate(world, lambda i: acceptance, rounds=64)
    assert world.best(acceptance)[1] == 4 and gammas[32:].count(4) > 24
    assert speed > 0.97 * world.best(acceptance)[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_tier_that_was_timed_while_the_machine_was_slow_is_tried(seed: int) -> None:
    """Once one draft was chosen where two were faster by a tenth, for as long as a run went on."""
    world = World(0.2, per_draft=0.1)

    def measure(gamma: int, n_keys: int) -> tuple[float, float]:
        draft, target = world.measure(gamma, n_keys)
        return draft, target * (1.2 if gamma > 1 else 1.0)

    speed, gammas = simulate(world, lambda i: 0.8, rounds=96, seed=seed, plan=planner(world, measure))
    assert world.best(0.8)[1] > 1 and gammas[48:].count(1) < 8
    assert speed > 0.93 * world.best(0.8)[0]


def test_what_the_host_adds_to_a_round_is_part_of_what_it_costs() -> None:
    """Rounds that draft have a time of their own: once what is drawn and compared for each draft looked as if free."""
    world, plan = World(0.5), planner(World(0.5))
    for _ in range(FIRST_ROUNDS + 1):  # the first ones may have built something
        plan.record_host(0, 0.4)
    for host in ([0.4] * 5, [0.4, 0.4, 0.9, 0.9, 0.9]):
        assert [plan.seconds(g, 1000) - world.round(g, 1000) for g in (0, 1, 3, 4, 8)] == pytest.approx(host)
        for _ in range(2):
            plan.record_host(4, 0.9)
    plan.record_host(0, 40.0)  # one slow round changes it little
    assert plan.host[0].seconds == pytest.approx(0.42)


@pytest.mark.parametrize("slow", [0.5, 5.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_a_gamma_whose_first_round_builds_something_is_chosen_again(acceptance: float, slow: float) -> None:
    """Once the first round of each gamma was all that was known of its host time, and it was never chosen again."""
    world, rng, gammas = World(0.3, per_draft=0.15), random.Random(0), []
    plan = planner(world)
    for _ in range(300):
        gamma = plan.choose(1000)
        taken = [n_accepted(rng, gamma, acceptance) for _ in range(8)]
        plan.record(gamma, 1000, gamma * 0.3, world.target_step(gamma, 1000), taken)
        plan.record_host(gamma, 0.02 if gamma in gammas else slow)
        gammas.append(gamma)
    assert tokens_a_second(world, acceptance, gammas[100:]) > 0.97 * world.best(acceptance)[0]


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_seconds_that_no_clock_gives_change_nothing(seconds: float) -> None:
    plan = planner(World(0.3))
    before = tiers(plan.seconds)
    for gamma in (0, 2):
        plan.record(gamma, 1000, seconds, seconds, [gamma])
        for _ in range(3):
            plan.record_host(gamma, seconds)
    assert tiers(plan.seconds) == before


def test_a_line_that_noise_tilts_gives_no_step_for_nothing_and_follows_the_machine() -> None:
    """Once such a line began at 0, which no factor corrects: eight drafts forever cost as much as none."""
    falls, rises = StepTimes((512, 1.0), (8192, 0.7)), StepTimes((512, 0.1), (8192, 9.0))
    assert falls(512) == falls(100_000) == 1.0
    assert [rises(n_keys) for n_keys in (0, 1, 20, 512)] == pytest.approx([0.1] * 4)
    for _ in range(60):
        rises.learn(0, 1.0)
    assert rises(0) == pytest.approx(1.0, rel=0.1)
    assert StepTimes((512, 1.0), (512, 3.0))(4000) == 1.0  # a cache of two splits: both are the same place


@pytest.mark.parametrize("n_keys", [0, 1, 20, FEW])
def test_drafts_that_are_never_accepted_are_given_up_with_fewer_keys_than_were_timed(n_keys: int) -> None:
    """One short prompt among many slots, after a calibration in which some steps seemed to cost by the key alone."""
    world = World(0.3)

    def measure(gamma: int, n: int) -> tuple[float, float]:
        drafting, verifying = world.measure(gamma, n)
        return drafting, verifying * (MANY / FEW * 1.1 if n == MANY and gamma in (0, 8) else 1.0)

    plan = planner(world, measure)
    assert min(tiers(plan.seconds, n_keys)) > 0.9  # of a step at least
    _, gammas = simulate(world, lambda i: 0.0, rounds=150, n_keys=n_keys, plan=plan)
    assert sum(g > 0 for g in gammas) < 12


def test_steps_that_take_no_time_at_all_divide_nothing_by_zero() -> None:
    plan = planner(World(0.0), lambda gamma, n_keys: (0.0, 0.0))
    for seconds in (0.0, None, 1.0):
        plan.record_whole(plan.choose(0), 0, seconds, [0])
        plan.record(plan.choose(0), 0, 0.0, 0.0, [0])
    assert plan.seconds(plan.choose(0), 0) > 0


def test_tiers_that_noise_put_in_the_wrong_order_share_what_they_took() -> None:
    """Once each tier went by its own two points: six drafts could seem cheaper to judge than three."""
    assert rising([1.0, 1.1, 1.2, 1.2]) == [1.0, 1.1, 1.2, 1.2]
    assert rising([3.0, 2.0, 1.0]) == pytest.approx([2.0] * 3)
    assert rising([1.0, 1.3, 1.1, 1.5, 1.4, 1.0, 2.0]) == pytest.approx([1.0, 1.2, 1.2, 1.3, 1.3, 1.3, 2.0])
    noise = dict(zip(GAMMA_TIERS, itertools.cycle([1.1, 0.9]), strict=False))
    plan = planner(World(0.1), lambda gamma, n_keys: (0.1, (1 + n_keys / MANY) * noise[gamma]))
    for n_keys in (FEW, 3000, MANY):
        took = [plan.verify[g](n_keys) for g in GAMMA_TIERS]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(took))
        assert mean(took) == pytest.approx((1 + n_keys / MANY) * mean(noise.values()))  # and none is put too high


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("draft", "acceptance"), [(0.3, 0.0), (0.3, 0.95), (0.1, 0.97)])
def test_one_slow_step_does_not_turn_drafting_on_or_off(draft: float, acceptance: float, which: int) -> None:
    world = World(draft)

    def drafts(slow: int) -> list[bool]:
        def seen(i: int, gamma: int, *times: float) -> tuple[float, float]:
            return times[0] * (100 if i == slow and not which else 1), times[1] * (100 if i == slow and which else 1)

        return [g > 0 for g in simulate(world, lambda i: acceptance, rounds=200, seen=seen)[1]]

    usual, pays = drafts(-1), world.best(acceptance)[1] > 0
    assert mean(found == pays for found in usual[120:]) > 0.95  # but for probes, and plain rounds that are timed
    assert drafts(130) == usual


def test_refreshing_a_selection_is_part_of_the_cost_of_a_round() -> None:
    world, free = World(0.1), planner(World(0.1))
    plan = planner(world, selecting=lambda n_keys: 1e-4 * n_keys)
    for gamma in GAMMA_TIERS:
        extra = 0.1 * plan.tokens(gamma) if gamma else 0.0
        assert plan.seconds(gamma, 1000) == pytest.approx(free.seconds(gamma, 1000) + extra)
    for gamma in (3, 8, 0):  # rounds that take as long as expected teach nothing new
        plan.record_whole(gamma, 1000, plan.seconds(gamma, 1000), [gamma] * 4)
        assert plan.verify[gamma].correction == pytest.approx(1.0)
    assert plan.draft is not None and plan.draft.correction == pytest.approx(1.0)
    for _ in range(200):  # where they are timed as a whole, what refreshes take is corrected, too
        plan.record_whole(2, 1000, 0.5 * plan.seconds(2, 1000), [1] * 8)
    assert plan.select is not None and plan.select.correction < 0.5
    assert free.choose(MANY) > 0
    plan.begin()
    plan.calibrate(world.measure, FEW, MANY, lambda n_keys: 1.0)  # a second for a token, as plain decoding takes
    assert plan.choose(MANY) == 0


@pytest.mark.parametrize(("faster", "changes"), [(1.01, False), (1.03, True)])
def test_another_tier_is_taken_for_two_percent_more(faster: float, changes: bool, monkeypatch: Patch) -> None:
    plan = planner(World(0.1))
    used, other = plan.tiers[-1], plan.tiers[-2]
    for times in plan.verify.values():
        times.seen = 99  # none is tried for its own sake
    plan._last = used
    monkeypatch.setattr(plan, "emitted", lambda: dict.fromkeys(plan.tiers, 1.0))
    monkeypatch.setattr(plan, "seconds", lambda gamma, *_: 1 / {used: 1.0, other: faster}.get(gamma, 0.1))
    assert plan.choose(1000) == (other if changes else used)
