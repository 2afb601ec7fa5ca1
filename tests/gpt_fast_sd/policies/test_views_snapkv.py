"""SnapKV's selection against loops in fp64, and when it is refreshed.

Shapes: L layers, N query heads, K kv heads, G = N // K, H head dim, n tokens, C listed entries.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.model import FORMATS, SPLIT, CausalSelf, KVCache, ModelConfig, Transformer
from gpt_fast_sd.policies import snapkv
from gpt_fast_sd.policies.snapkv import OBSERVED, SnapKVView, best_entries
from gpt_fast_sd.prefill import Prefill
from gpt_fast_sd.state import BatchState, RoundPlan
from gpt_fast_sd.steps import Runner
from tests.gpt_fast_sd.fast.references import as_on_cuda
from tests.gpt_fast_sd.policies.views_rig import Rig
from tests.gpuless.recorder import capture
from tests.helpers import few, random_ids, tiny_config, tiny_model

GROUPS, WINDOWS = [1, 2, 4, 5, 7, 8], [16, 32, 64]
LONGEST = 330


class Recording(CausalSelf):
    """Keeps the queries and keys of every layer."""

    def __init__(self) -> None:
        self.q: list[Tensor] = []  # L of [N, n, H]
        self.k: list[Tensor] = []  # L of [K, n, H]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.q.append(q[0])
        self.k.append(k[0])
        return super().attend(layer, q, k, v, pos)


@functools.cache
def text(group: int) -> tuple[Transformer, list[int], KVCache, Recording]:
    """A model of this G, a text, its cache, and the same text's queries and keys in fp64."""
    config = tiny_config(n_heads=2 * group, n_kv_heads=2)
    model, ids = tiny_model(config), random_ids(LONGEST + 1, seed=group)
    recording = Recording()
    tokens = torch.tensor(ids[:-1])[None]
    tiny_model(config).double().hidden(tokens, torch.arange(LONGEST)[None], recording)
    cache = KVCache(config, 3, 512, format=FORMATS["fp32"], device=torch.device("cpu"))
    prefill = Prefill(Runner(model, cache))
    for slot in range(3):
        prefill.fill(slot, ids[:-1])
    return model, ids, cache, recording


def slow_scores(q: Tensor, k: Tensor, n: int, observed: int, scale: float) -> Tensor:
    """fp64 [K, n - window]: head by head, query by query."""
    start, group = n - observed, q.shape[0] // k.shape[0]
    scores = torch.zeros(k.shape[0], start, dtype=torch.float64)
    for kv_head in range(k.shape[0]):
        for head in range(kv_head * group, (kv_head + 1) * group):
            total = torch.zeros(start, dtype=torch.float64)
            for t in range(start, n):
                total += (k[kv_head, : t + 1] @ q[head, t] * scale).softmax(0)[:start]
            padded = torch.cat([total.new_zeros(2), total, total.new_zeros(2)])
            scores[kv_head] += sum(padded[i : i + start] for i in range(5)) / 5
    return scores


def state_of(model: Transformer, cache: KVCache) -> BatchState:
    return BatchState.idle(cache.seq_len, cache.capacity + SPLIT, model.config.vocab_size, ())


def admit(view: SnapKVView, state: BatchState, slot: int, prompt: list[int]) -> None:
    """Put a prompt into a slot, whose keys are there, and let a round begin."""
    state.assign(slot, prompt, SamplingParams(), 0)
    view.host_admit(slot, prompt)
    for n_keys in view.host_refreshes(RoundPlan.of({slot: len(prompt) - 1})):
        view.device_refresh(state, n_keys)


def are_best(listed: Tensor, scores: Tensor) -> bool:
    """Whether the listed entries [K, C] are different ones, and none left out has a clearly higher score [K, start]."""
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, listed, True)
    worst = scores.masked_fill(~chosen, float("inf")).amin(1)
    missed = scores.masked_fill(chosen, 0.0).amax(1)
    # the view works in fp32, and a near tie may go either way
    return bool((chosen.sum(1) == listed.shape[1]).all() and (worst >= missed * (1 - 1e-3)).all())


@pytest.mark.parametrize("observed", WINDOWS)
@pytest.mark.parametrize("group", GROUPS)
def test_the_listed_entries_are_those_that_loops_over_heads_and_queries_find(group: int, observed: int) -> None:
    model, ids, cache, recording = text(group)
    runner = Runner(model, cache)
    view = SnapKVView(runner, budget=observed + 40, refresh=8, max_new=6, n_observed=observed)
    state = state_of(model, cache)
    n_listed = view.kv_indices.shape[-1]
    for i, n in enumerate(
        [1, observed - 1, observed, observed + 1, observed + 39, observed + 40, observed + 41, 2 * observed + 57, 330]
    ):
        slot = i % 3
        admit(view, state, slot, ids[: n + 1])
        if n <= observed + 40:  # the window, which slides when a round begins, and the list hold it all
            assert int(view.window_start[slot]) == 0 and (view.kv_indices[:, slot] == -1).all()
            continue
        assert int(view.window_start[slot]) == n - observed
        for layer, (q, k) in enumerate(zip(recording.q, recording.k, strict=True)):
            listed = view.kv_indices[layer, slot]  # [K, C]
            assert are_best(listed, slow_scores(q, k, n, observed, q.shape[-1] ** -0.5))
            assert listed.shape == (2, n_listed) and int(listed.max()) < n - observed


def test_without_the_scale_by_the_head_dim_other_entries_would_be_listed() -> None:
    model, ids, cache, recording = text(4)
    view = SnapKVView(Runner(model, cache), budget=72, refresh=8, max_new=6)
    admit(view, state_of(model, cache), 0, ids)
    q, k = recording.q[0], recording.k[0]
    assert are_best(view.kv_indices[0, 0], slow_scores(q, k, LONGEST, 32, q.shape[-1] ** -0.5))
    assert not are_best(view.kv_indices[0, 0], slow_scores(q, k, LONGEST, 32, 1.0))


def test_neighbours_of_an_attended_entry_are_listed_and_none_of_the_window_counts() -> None:
    mass = torch.zeros(1, 1, 50)
    mass[..., 20], mass[..., 40:] = 1.0, 100.0
    assert sorted(best_entries(mass, torch.tensor([40]), 5).flatten().tolist()) == [18, 19, 20, 21, 22]


def test_observing_changes_no_bit_of_the_cache() -> None:
    rig = Rig("snapkv", [700, 500, 300, 200], budget=80)
    before = [x.clone() for x in rig.cache.buffers]
    rig.begin()
    assert rig.view.window_start.tolist() == [668, 468, 268, 168]
    assert all(torch.equal(a, b) for a, b in zip(rig.cache.buffers, before, strict=True))


def test_a_selection_within_an_output_is_that_of_a_prompt_of_the_same_tokens() -> None:
    grown = Rig("snapkv", [150, 300, 420, 90], budget=80, refresh=10)
    for _ in range(12):
        grown.begin()
        grown.grow([1, 2, 3, 4])
    grown.begin()
    for slot in range(4):
        prompt = grown.prompts[slot]
        length = int(grown.view.window_start[slot]) + 32
        assert grown.lengths[slot] - length <= 8  # at a budget of 80, room for 8 tokens
        fresh = Rig("snapkv", [0] * 4, budget=80, refresh=10)
        fresh.admit(slot, length)
        fresh.begin()
        assert fresh.prompts[slot] is prompt
        assert torch.equal(fresh.view.kv_indices[:, slot], grown.view.kv_indices[:, slot])


class Watched(SnapKVView):
    """Counts selections, and looks at every round's beginning that nothing falls between list and window.

    What the host knows of the device's decisions must be what they were, where no round is under way.
    """

    def __init__(self, runner: Runner, **kwargs: Any) -> None:
        super().__init__(runner, **kwargs)
        self.selections: list[tuple[int, int]] = []  # slot, length
        self.passes = 0
        self.selected_to = [0] * runner.shape[1]

    def host_refreshes(self, plan: RoundPlan) -> list[int]:
        self.lengths = plan.lengths
        return super().host_refreshes(plan)

    def device_refresh(self, state: BatchState, n_keys: int) -> None:
        before, self.passes = self.window_start.tolist(), self.passes + 1
        super().device_refresh(state, n_keys)
        for slot, (was, start) in enumerate(zip(before, self.window_start.tolist(), strict=True)):
            if start != was:
                self.selections.append((slot, self.lengths[slot]))
                self.selected_to[slot] = self.lengths[slot] - self.n_observed
                assert start == self.selected_to[slot]

    def device_before_draft(self, state: BatchState, plan: RoundPlan) -> None:
        super().device_before_draft(state, plan)
        self._learn(plan)
        for slot, length in plan.lengths.items():
            start = int(self.window_start[slot])
            assert self._bounds[slot] == (start, start) or length <= self.budget
            assert length - start <= self.window
            if length > self.budget:
                assert start == self.selected_to[slot]


def watched_engine(config: ModelConfig, *, refresh: int, gamma: int) -> tuple[Engine, Watched]:
    engine_config = EngineConfig(batch_size=2, max_seq_len=900, device="cpu", dtype="fp32", compile=False)
    draft = DraftConfig(policy="snapkv", budget=160, refresh=refresh, gamma=gamma)
    engine = Engine(tiny_model(config), None, engine_config, draft)
    policy: Any = engine.policy
    policy.view = Watched(policy.runner, budget=160, refresh=refresh, max_new=gamma + 2)
    return engine, policy.view


@pytest.mark.parametrize(
    ("refresh", "gamma", "n_tokens"),
    [(16, 3, 200), *(pytest.param(*one, 400, marks=pytest.mark.slow) for one in ((1, 2), (48, 4), (1000, 4)))],
)
def test_long_outputs_are_selected_for_again_and_again(refresh: int, gamma: int, n_tokens: int) -> None:
    engine, view = watched_engine(tiny_config(), refresh=refresh, gamma=gamma)
    engine.warm_up()
    view.passes = 0
    lengths = {"long": 301, "short": 61}
    engine.generate([random_ids(n) for n in lengths.values()], SamplingParams(max_tokens=n_tokens))
    apart = min(refresh, 160 // 2 - 32)  # half of the budget is window at most
    assert view.window == 32 + apart and view.window + view.kv_indices.shape[-1] == 160 and view.refresh_every == apart
    assert view.passes == len(view.selections)  # none was in vain
    for slot, n in enumerate(lengths.values()):
        at = [length for selected, length in view.selections if selected == slot]
        steps = [b - a for a, b in itertools.pairwise(at)]
        assert all(apart < step <= apart + gamma + 1 for step in steps)
        assert at[0] == n - 1 if n > 160 else 160 < at[0] <= 160 + gamma + 1
        assert len(at) >= (n_tokens - max(0, 160 - n)) // (apart + gamma + 1) - 1


def test_a_row_that_fits_the_budget_is_never_selected_for() -> None:
    engine, view = watched_engine(tiny_config(), refresh=16, gamma=4)
    engine.generate([random_ids(n) for n in (1, 40, 90)], SamplingParams(max_tokens=70))
    assert view.selections == [] and engine.stats.acceptance_rate == 1.0


# ---- what is read together, and when -------------------------------------------------------------------------------


@pytest.fixture
def four_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of four rows are one batch, as on CUDA."""
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], windows=4))


@pytest.fixture
def windows_fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all windows that the model is fed from now on."""
    shapes, hidden = list[tuple[int, ...]](), Transformer.hidden

    def noted(self: Transformer, tokens: Tensor, pos: Tensor, kv: Any) -> Tensor:
        if tokens.shape[1] == OBSERVED:
            shapes.append(tuple(tokens.shape))
        return hidden(self, tokens, pos, kv)

    monkeypatch.setattr(Transformer, "hidden", noted)
    return shapes


LONG = [random_ids(n, seed=n) for n in (150, 300, 1, 420)]  # more than slots
SAMPLED = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(LONG))]
DRAFTS: dict[str, dict[str, Any]] = {
    "snapkv": {"budget": 64, "refresh": 4},
    "standalone": {"view": "snapkv", "budget": 72, "refresh": 20},
    "hierarchy": {"view": "snapkv", "budget": 64},
}


def drafting(name: str, *, slots: int = 2, captured: bool = True, gamma: int | str = 3) -> Engine:
    config = EngineConfig(batch_size=slots, max_seq_len=500, device="cpu", dtype="fp32", compile=False)
    draft = DraftConfig(policy=name, gamma=gamma, **DRAFTS[name], draft_model="given" if name == "standalone" else None)
    theirs = tiny_model(tiny_config(n_layers=1), seed=1) if name == "standalone" else None
    one = Engine(tiny_model(), None, config, draft, theirs)
    one.schedule.rounds.capture = capture if captured else None
    return one


def told(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.tokens, c.stats.rounds, c.stats.accepted_by_position) for c in completions]


@pytest.mark.usefixtures("four_together")
def test_the_windows_of_all_rows_that_are_due_are_one_batch(windows_fed: list[tuple[int, ...]]) -> None:
    rig = Rig("snapkv", [700, 500, 300, 200], budget=80)
    rig.begin()
    assert windows_fed == [(4, OBSERVED)]
    windows_fed.clear()
    rig.grow([40, 40, 40, 40])
    rig.begin()
    assert windows_fed == [(4, OBSERVED)]
    rig.grow([1, 2, 3, 4])
    rig.begin()
    assert len(windows_fed) == 1


@pytest.mark.parametrize("name", few(DRAFTS, ["standalone"]))
@pytest.mark.usefixtures("four_together")
def test_no_round_waits_for_the_one_before_and_the_host_feeds_no_window(
    name: str, windows_fed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, launched = drafting(name), list[bool]()
    launch = one.schedule._launch
    monkeypatch.setattr(one.schedule, "_launch", lambda speculate: launched.append(launch(speculate)) or launched[-1])
    one.generate(LONG, SAMPLED)
    assert set(launched) == {True}
    assert windows_fed  # what is captured is called once
    windows_fed.clear()
    one.generate(LONG, SAMPLED)
    assert windows_fed == []


@pytest.mark.parametrize(
    ("name", "windows"),
    few([("snapkv", 1), ("snapkv", 2), ("standalone", 2), ("hierarchy", 1)], [("hierarchy", 1)]),
)
def test_rows_are_selected_for_as_in_eager_rounds(name: str, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], windows=windows))
    assert told(drafting(name).generate(LONG, SAMPLED)) == told(drafting(name, captured=False).generate(LONG, SAMPLED))


@pytest.mark.usefixtures("four_together")
def test_what_a_row_drafts_does_not_depend_on_its_neighbours() -> None:
    together = told(drafting("snapkv", slots=4).generate(LONG, SAMPLED))
    for i in (3,):
        assert told(drafting("snapkv", slots=4).generate([LONG[i]], SAMPLED[i])) == [together[i]]


@pytest.mark.usefixtures("four_together")
def test_the_host_knows_when_a_row_may_be_due_to_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts rounds by the most that they may add, so it asks early, once or twice; else it asks for nothing."""
    one = drafting("snapkv", slots=1, gamma=4)
    policy: Any = one.policy
    view = policy.view = SnapKVView(policy.runner, budget=160, refresh=20, max_new=6)
    asked, starts, refresh = [], [], one.schedule.rounds.refresh

    def noted(plan: RoundPlan) -> int:
        before = int(view.window_start[0])
        passes = refresh(plan)
        asked.append(passes)
        starts.append(int(view.window_start[0]) != before)
        return passes

    monkeypatch.setattr(one.schedule.rounds, "refresh", noted)
    one.generate([random_ids(200)], SamplingParams(max_tokens=150, ignore_eos=True))
    selections = sum(starts)
    assert selections >= 150 // 25
    assert all(n for n, selected in zip(asked, starts, strict=True) if selected)  # every one was requested
    assert sum(asked) <= 3 * selections


def test_rounds_without_a_draft_in_between_do_not_confuse_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = (3, 0, 3, 3, 0, 0, 0, 2, 4)
    tokens = []
    for name in ("snapkv", "standalone"):
        one, turns = drafting(name, gamma="auto"), itertools.cycle(tiers)
        monkeypatch.setattr(one.schedule.planner, "calibrate", lambda *args, **kwargs: None)
        monkeypatch.setattr(one.schedule.planner, "choose", lambda n_keys, turns=turns: next(turns))
        view: Any = one.policy.view  # type: ignore[union-attr]
        refresh = one.schedule.rounds.refresh

        def checked(
            plan: RoundPlan, view: Any = view, refresh: Any = refresh, state: BatchState = one.state, name: str = name
        ) -> int:
            passes: int = refresh(plan)
            seq_len = (state.seq_len - int(name == "standalone")).tolist()
            starts = view.window_start.tolist()
            for slot in plan.lengths:
                assert not view._full(seq_len[slot], starts[slot]) or not state.active[slot]
                low, high = view._bounds[slot]
                if view._full(seq_len[slot], 0) and slot not in view._asked:
                    assert low <= starts[slot] <= high
            return passes

        monkeypatch.setattr(one.schedule.rounds, "refresh", checked)
        got = one.generate(LONG, SamplingParams(max_tokens=24, ignore_eos=True))
        tokens.append([c.tokens for c in got])
    assert tokens[0] == tokens[1]


def test_the_entries_of_most_mass_lie_before_each_rows_own_end() -> None:
    torch.manual_seed(0)
    mass, ends = torch.rand(3, 2, 512), torch.tensor([100, 481, 33])
    mass[0, 0, 10:60] = 0.5  # ties
    listed = best_entries(mass, ends, 24)  # [W, K, n]
    assert torch.equal(listed, best_entries(F.pad(mass, (0, 256), value=9.0), ends, 24))
    for row, end in enumerate(ends.tolist()):
        alone = F.avg_pool1d(mass[row, :, :end], 5, stride=1, padding=2)  # [K, end]
        assert torch.equal(alone.gather(1, listed[row]).sort(-1, descending=True).values, alone.topk(24, -1).values)
    constant = best_entries(torch.full((1, 1, 300), 2.0), torch.tensor([300]), 5)
    assert constant.flatten().tolist() == [2, 3, 4, 5, 6]  # ties go to the first, but the edges are averaged with zeros


@pytest.mark.parametrize("together", [1, 4])
def test_cudas_operators_list_the_same_entries(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = []
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], windows=together))
    for operators in (False, True):
        if operators:
            as_on_cuda(monkeypatch)
        rig = Rig("snapkv", [700, 70, 300, 200], budget=80)
        rig.begin()
        rig.grow([20, 20, 20, 20])
        rig.begin()
        assert rig.view.window_start.tolist() == [688, 58, 288, 188]
        lists.append(rig.view.kv_indices.sort(-1).values)
    assert torch.equal(*lists)


def test_the_planner_counts_what_selecting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = snapkv.observe_step

    def slow(*args: Any) -> Tensor:
        time.sleep(0.02)
        return step(*args)

    monkeypatch.setattr(snapkv, "observe_step", slow)
    one = drafting("snapkv", gamma="auto", captured=False)
    one.warm_up()
    plan, n_keys = one.schedule.planner, one.cache.capacity
    assert plan.draft is not None
    steps = 8 * plan.draft(n_keys) + plan.verify[8](n_keys)
    # two rows, each selected for after 4 tokens in a pass of its own
    assert plan.seconds(8, n_keys) - steps >= plan.tokens(8) * 2 * 0.02 / 4
    assert plan.seconds(0, n_keys) == plan.verify[0](n_keys)
