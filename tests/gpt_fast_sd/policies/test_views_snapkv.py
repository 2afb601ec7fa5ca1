"""SnapKV's selection against loops in fp64, and when it is refreshed.

Shapes: L layers, N query heads, K kv heads, G = N // K, H head dim, n tokens, C listed entries.
"""

import functools
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.model import FORMATS, SPLIT, CausalSelf, KVCache, Transformer
from gpt_fast_sd.policies import snapkv
from gpt_fast_sd.policies.snapkv import OBSERVED, SnapKVView, best_entries
from gpt_fast_sd.prefill import Prefill
from gpt_fast_sd.state import BatchState, RoundPlan
from gpt_fast_sd.steps import Runner
from tests.gpt_fast_sd.policies.drafting import drafting_now_and_then, tokens_of
from tests.gpt_fast_sd.policies.views_rig import Rig
from tests.gpt_fast_sd.test_rounds import captured, engine, told
from tests.helpers import Patch, ahead, random_ids, tiny_config, tiny_model

GROUPS, WINDOWS = [1, 2, 4, 5, 7, 8], [16, 32, 64]
LONGEST = 330


class Recording(CausalSelf):
    """Keeps the queries and keys of every layer."""

    def __init__(self) -> None:
        super().__init__()
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
    view = SnapKVView(Runner(model, cache), budget=observed + 40, refresh=8, max_new=6, n_observed=observed)
    state = BatchState.idle(cache.seq_len, cache.capacity + SPLIT, model.config.vocab_size, ())
    n_listed = view.kv_indices.shape[-1]
    for i, n in enumerate([1, *(observed + more for more in (-1, 0, 1, 39, 40, 41, observed + 57)), 330]):
        slot, prompt = i % 3, ids[: n + 1]
        state.assign(slot, prompt, SamplingParams(), 0)
        view.host_admit(slot, prompt)
        for n_keys in view.host_refreshes(RoundPlan.of({slot: n})):
            view.device_refresh(state, n_keys)
        if n <= observed + 40:  # the window, which slides when a round begins, and the list hold it all
            assert int(view.window_start[slot]) == 0 and (view.kv_indices[:, slot] == -1).all()
            continue
        assert int(view.observed_at[slot]) == n - observed
        for layer, (q, k) in enumerate(zip(recording.q, recording.k, strict=True)):
            listed = view.kv_indices[layer, slot]  # [K, C]
            assert are_best(listed, slow_scores(q, k, n, observed, q.shape[-1] ** -0.5))
            assert listed.shape == (2, n_listed) and int(listed.max()) < n - observed


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
        length = int(grown.view.observed_at[slot]) + 32
        assert grown.lengths[slot] - length <= 8  # at a budget of 80, room for 8 tokens
        fresh = Rig("snapkv", [0] * 4, budget=80, refresh=10)
        fresh.admit(slot, length)
        fresh.begin()
        assert fresh.prompts[slot] is prompt
        new = grown.lengths[slot] - length  # they took the places of the worst
        listed, at_first = (rig.view.kv_indices[:, slot] for rig in (grown, fresh))  # [L, K, C]
        assert torch.equal(listed[..., : 48 - new], at_first[..., : 48 - new])
        assert (listed[..., 48 - new :] == torch.arange(length - 33 + new, length - 33, -1)).all()


# ---- what is read together, and when -------------------------------------------------------------------------------


@pytest.fixture
def four_together(monkeypatch: Patch) -> None:
    """The windows of four rows are one batch, as on CUDA."""
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], windows=4))


@pytest.fixture
def windows_fed(monkeypatch: Patch) -> list[tuple[int, ...]]:
    """The shapes of all windows that the model is fed from now on."""
    shapes = list[tuple[int, ...]]()

    def note(self: Transformer, tokens: Tensor, pos: Tensor, kv: Any) -> None:
        shapes.extend([tuple(tokens.shape)] if tokens.shape[1] == OBSERVED else [])

    ahead(monkeypatch, Transformer, "hidden", note)
    return shapes


LONG = [random_ids(n, seed=n) for n in (150, 300, 1, 420)]  # more than slots
SAMPLED = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(LONG))]


@pytest.mark.usefixtures("four_together")
def test_the_windows_of_all_rows_that_are_due_are_one_batch(windows_fed: list[tuple[int, ...]]) -> None:
    rig = Rig("snapkv", [700, 500, 300, 200], budget=80)
    for by, n in (([0] * 4, 1), ([40] * 4, 2), ([1, 2, 3, 4], 2)):
        rig.grow(by, observed=any(by))
        rig.begin()
        assert windows_fed == [(4, OBSERVED)] * n


@pytest.mark.parametrize("name", ["snapkv", "standalone, snapkv"])
@pytest.mark.usefixtures("four_together")
def test_no_round_waits_for_the_one_before_and_the_host_feeds_no_window(
    name: str, windows_fed: list[tuple[int, ...]], monkeypatch: Patch
) -> None:
    one, launched = captured(name), list[bool]()
    launch = one.schedule._launch
    monkeypatch.setattr(one.schedule, "_launch", lambda speculate: launched.append(launch(speculate)) or launched[-1])
    one.generate(LONG, SAMPLED)
    assert set(launched) == {True}
    assert windows_fed  # what is captured is called once
    windows_fed.clear()
    one.generate(LONG, SAMPLED)
    assert windows_fed == []


@pytest.mark.usefixtures("four_together")
def test_what_a_row_drafts_does_not_depend_on_its_neighbours() -> None:
    together, alone = (captured("snapkv", batch_size=4) for _ in range(2))
    assert told(alone.generate([LONG[3]], SAMPLED[3])) == told(together.generate(LONG, SAMPLED))[3:]


@pytest.mark.usefixtures("four_together")
@pytest.mark.parametrize("refresh", [20, 1000])
def test_a_row_is_selected_for_when_due_and_the_host_knows_to_within_a_round(refresh: int, monkeypatch: Patch) -> None:
    """It counts rounds by the most that they may add, so it asks early, once or twice; else it asks for nothing."""
    one = captured("snapkv", gamma=4)
    policy: Any = one.policy
    view = policy.view = SnapKVView(policy.runner, budget=160, refresh=refresh, max_new=6)
    apart = min(refresh, 160 // 2 - OBSERVED)  # half of the budget is window at most
    assert view.room == apart and view.window + view.kv_indices.shape[-1] == 160
    asked, starts, real = [], [], one.schedule.rounds.refresh

    def noted(plan: RoundPlan) -> int:
        asked.append(real(plan))
        starts.append(int(view.observed_at[0]))
        return asked[-1]

    monkeypatch.setattr(one.schedule.rounds, "refresh", noted)
    one.generate([random_ids(200)], SamplingParams(max_tokens=150, ignore_eos=True))
    steps = [b - a for a, b in itertools.pairwise([0, *starts])]
    assert steps[0] == 199 - OBSERVED and all(not step or apart < step <= apart + 5 for step in steps[1:])
    assert sum(map(bool, steps)) >= 150 // (apart + 5)
    assert all(n for n, step in zip(asked, steps, strict=True) if step)  # every one was requested
    assert sum(asked) <= 3 * sum(map(bool, steps))
    asked.clear()
    one.generate([random_ids(9)], SamplingParams(max_tokens=100))  # fits the budget
    assert not any(asked)


@pytest.mark.usefixtures("four_together")
def test_a_row_is_selected_for_once_and_then_the_host_asks_for_nothing(monkeypatch: Patch) -> None:
    one, asked = captured("snapkv, once"), list[int]()
    refresh = one.schedule.rounds.refresh
    monkeypatch.setattr(one.schedule.rounds, "refresh", lambda plan: asked.append(refresh(plan)) or asked[-1])
    one.generate([random_ids(200), random_ids(20), random_ids(63)], SamplingParams(max_tokens=90, ignore_eos=True))
    assert asked[0] == 1 and 3 <= sum(asked) <= 7  # about two for each, as it asks before it knows
    assert not any(asked[-5:])


def test_rounds_without_a_draft_in_between_do_not_confuse_the_host(monkeypatch: Patch) -> None:
    def tokens(name: str) -> list[list[int]]:
        one = captured(name, gamma="auto")
        drafting_now_and_then(one, (3, 0, 3, 3, 0, 0, 0, 2, 4), timed=False)
        view: Any = one.policy.view  # type: ignore[union-attr]
        refresh = one.schedule.rounds.refresh

        def checked(plan: RoundPlan) -> int:
            passes = refresh(plan)
            seq_len, starts = (one.state.seq_len - int(name != "snapkv")).tolist(), view.observed_at.tolist()
            for slot in plan.lengths:
                assert not view._full(seq_len[slot], starts[slot]) or not one.state.active[slot]
                low, high = view._bounds[slot]
                if view._full(seq_len[slot], 0) and slot not in view._asked:
                    assert low <= starts[slot] <= high
            return passes

        monkeypatch.setattr(one.schedule.rounds, "refresh", checked)
        return tokens_of(one.generate(LONG, SamplingParams(max_tokens=60, ignore_eos=True)))

    assert tokens("snapkv") == tokens("standalone, snapkv")


def test_the_entries_of_most_mass_lie_before_each_rows_own_end() -> None:
    torch.manual_seed(0)
    mass, ends = torch.rand(3, 2, 512), torch.tensor([100, 481, 33])
    mass[0, 0, 10:60] = 0.5  # ties
    listed = best_entries(mass, ends, 24)  # [W, K, n]
    assert torch.equal(listed, best_entries(F.pad(mass, (0, 256), value=9.0), ends, 24))
    for row, end in enumerate(ends.tolist()):
        alone = F.avg_pool1d(mass[row, :, :end], 5, stride=1, padding=2)  # [K, end]
        assert torch.equal(alone.gather(1, listed[row]), alone.topk(24, -1).values)
    constant = best_entries(torch.full((1, 1, 300), 2.0), torch.tensor([300]), 5)
    assert constant.flatten().tolist() == [2, 3, 4, 5, 6]  # ties go to the first, but the edges are averaged with zeros


def test_the_planner_counts_what_selecting_costs(monkeypatch: Patch) -> None:
    ahead(monkeypatch, snapkv, "observe_step", lambda *_: time.sleep(0.02))
    one = engine("snapkv", gamma="auto", batch_size=2)
    one.warm_up()
    plan, n_keys = one.schedule.planner, one.cache.capacity
    assert plan.draft is not None
    steps = 8 * plan.draft(n_keys) + plan.verify[8](n_keys)
    # two rows, each selected for after 4 tokens in a pass of its own
    assert plan.seconds(8, n_keys) - steps >= plan.tokens(8) * 2 * 0.02 / 4
    assert plan.seconds(0, n_keys) == plan.verify[0](n_keys)
