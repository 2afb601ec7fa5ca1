"""SnapKV's selection against loops in fp64, and when it is made anew.

Shapes: L layers, N query heads, K kv heads, G = N // K, H head dim, n tokens, C listed entries.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import CausalSelf, KVCache, ModelConfig, Transformer
from gpt_fast_sd.policies import Reader
from gpt_fast_sd.policies.snapkv import SnapKVView, best_entries
from gpt_fast_sd.prefill import Prefill
from tests.gpt_fast_sd.policies.views_rig import Rig
from tests.helpers import random_ids, tiny_config, tiny_model

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
    cache = KVCache(config, 3, 512, dtype=torch.float32, device=torch.device("cpu"))
    prefill = Prefill(Reader(model, cache, compiled=False))
    for slot in range(3):
        prefill.fill(slot, ids[:-1])
    return model, ids, cache, recording


def slow_scores(q: Tensor, k: Tensor, n: int, window: int, scale: float) -> Tensor:
    """fp64 [K, n - window]: head by head, query by query."""
    start, group = n - window, q.shape[0] // k.shape[0]
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


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("group", GROUPS)
def test_the_listed_entries_are_those_that_loops_over_heads_and_queries_find(group: int, window: int) -> None:
    model, ids, cache, recording = text(group)
    view = SnapKVView(Reader(model, cache, compiled=False), budget=window + 40, refresh=8, room=6, window=window)
    n_listed = view.slots.shape[-1]
    for i, n in enumerate(
        [1, window - 1, window, window + 1, window + 39, window + 40, window + 41, 2 * window + 57, 330]
    ):
        slot = i % 3
        cache.seq_len[slot] = n
        view.admit(slot, ids[: n + 1])
        if n <= window + 40:  # the tail, which slides when a round begins, and the list hold it all
            assert int(view.tail_start[slot]) == 0 and (view.slots[:, slot] == -1).all()
            continue
        assert int(view.tail_start[slot]) == n - window
        for layer, (q, k) in enumerate(zip(recording.q, recording.k, strict=True)):
            listed = view.slots[layer, slot]  # [K, C]
            assert are_best(listed, slow_scores(q, k, n, window, q.shape[-1] ** -0.5))
            assert listed.shape == (2, n_listed) and int(listed.max()) < n - window


def test_without_the_scale_by_the_head_dim_other_entries_would_be_listed() -> None:
    model, ids, cache, recording = text(4)
    view = SnapKVView(Reader(model, cache, compiled=False), budget=72, refresh=8, room=6)
    view.admit(0, ids)
    q, k = recording.q[0], recording.k[0]
    assert are_best(view.slots[0, 0], slow_scores(q, k, LONGEST, 32, q.shape[-1] ** -0.5))
    assert not are_best(view.slots[0, 0], slow_scores(q, k, LONGEST, 32, 1.0))


def test_neighbours_of_an_attended_entry_are_listed_with_it_but_none_of_the_window_counts() -> None:
    mass = torch.zeros(1, 1, 50)
    mass[..., 20], mass[..., 40:] = 1.0, 100.0
    assert sorted(best_entries(mass, 40, 5).flatten().tolist()) == [18, 19, 20, 21, 22]


def test_observing_changes_no_bit_of_the_cache() -> None:
    rig = Rig("snapkv", [700, 500, 300, 200], budget=80)
    before = [x.clone() for x in (*rig.cache.k, *rig.cache.v)]
    for slot, n in rig.lengths.items():
        rig.view.select(slot, torch.tensor(rig.prompts[slot][n - 32 : n]), n)
    assert all(torch.equal(a, b) for a, b in zip((*rig.cache.k, *rig.cache.v), before, strict=True))


def test_a_selection_in_the_middle_of_an_output_is_that_of_a_prompt_of_the_same_tokens() -> None:
    grown = Rig("snapkv", [150, 300, 420, 90], budget=80, refresh=10)
    for _ in range(12):
        grown.begin()
        grown.grow([1, 2, 3, 4])
    grown.begin()
    for slot in range(4):
        prompt = grown.prompts[slot]
        length = int(grown.view.tail_start[slot]) + 32
        assert grown.lengths[slot] - length <= 8  # at a budget of 80, room for 8 tokens
        fresh = Rig("snapkv", [0] * 4, budget=80, refresh=10)
        fresh.admit(slot, length)
        assert fresh.prompts[slot] is prompt
        assert torch.equal(fresh.view.slots[:, slot], grown.view.slots[:, slot])


class Watched(SnapKVView):
    """Counts selections, and looks at every round's beginning that nothing falls between list and tail."""

    def __init__(self, reader: Reader, **kwargs: Any) -> None:
        super().__init__(reader, **kwargs)
        self.selections: list[tuple[int, int]] = []  # slot, length
        self.selected_to = [0] * reader.shape[1]

    def select(self, slot: int, window: Tensor, length: int) -> None:
        super().select(slot, window, length)
        self.selections.append((slot, length))
        self.selected_to[slot] = length - self.window

    def begin(self, rows: Any) -> None:
        super().begin(rows)
        for slot, length in rows.lengths.items():
            start = int(self.tail_start[slot])
            assert start == self.start[slot] or length <= self.budget
            assert length - start <= self.tail
            if length > self.budget:
                assert start == self.selected_to[slot]


def watched_engine(config: ModelConfig, *, refresh: int, gamma: int) -> tuple[Engine, Watched]:
    engine_config = EngineConfig(batch_size=2, max_seq_len=900, device="cpu", dtype="fp32", compile=False)
    draft = DraftConfig(policy="snapkv", budget=160, refresh=refresh, gamma=gamma)
    engine = Engine(tiny_model(config), None, engine_config, draft)
    policy: Any = engine.policy
    policy.view = Watched(policy.reader, budget=160, refresh=refresh, room=gamma + 2)
    return engine, policy.view


@pytest.mark.parametrize(("refresh", "gamma"), [(1, 2), (16, 3), (48, 4), (1000, 4)])
def test_long_outputs_are_selected_for_again_and_again(refresh: int, gamma: int) -> None:
    engine, view = watched_engine(tiny_config(), refresh=refresh, gamma=gamma)
    lengths = {"long": 301, "short": 61}
    engine.generate([random_ids(n) for n in lengths.values()], SamplingParams(max_tokens=400))
    apart = min(refresh, 160 // 2 - 32)  # half of the budget is tail at most
    assert view.tail == 32 + apart and view.tail + view.slots.shape[-1] == 160
    for slot, n in enumerate(lengths.values()):
        at = [length for selected, length in view.selections if selected == slot]
        steps = [b - a for a, b in itertools.pairwise(at)]
        assert all(apart < step <= apart + gamma + 1 for step in steps)
        assert at[0] == n - 1 if n > 160 else 160 < at[0] <= 160 + gamma + 1
        assert len(at) >= (400 - max(0, 160 - n)) // (apart + gamma + 1) - 1


def test_a_row_that_fits_the_budget_is_never_selected_for() -> None:
    engine, view = watched_engine(tiny_config(), refresh=16, gamma=4)
    engine.generate([random_ids(n) for n in (1, 40, 90)], SamplingParams(max_tokens=70))
    assert view.selections == [] and engine.stats.acceptance_rate == 1.0
