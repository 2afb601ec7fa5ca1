"""Cells, dry: every timed call finds all rows in the middle of decoding, and replays keep what the table says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.config import gamma_tiers
from gpt_fast_sd.kv import DenseKV, ListedKV
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies.list_and_window import positions_of
from measuring.gpu import cells
from measuring.gpu.aims import ARMS, PRECISIONS, Cell
from measuring.gpu.cells import Bench
from measuring.gpu.setup import SMALL, Stopwatch, random_model
from measuring.replay import PROFILES, Replay, replay_table
from tests.gpuless.fakecuda import fake_cuda_tensors, needs_fake_cuda
from tests.scripts.measuring.gpu.rig import dry_run, dry_setup


@pytest.mark.parametrize("stage", ["cell-28672-streaming", "cell-28672-low", "cell-57344-guided", "cell-100000-snapkv"])
def test_a_cell_gives_steps_and_a_replay_of_every_profile_of_its_policy(stage: str) -> None:
    result = dry_run(stage)
    arm = ARMS[result["arm"]]
    assert [row["profile"] for row in result["replay"]] == list(arm.profiles)
    for row in result["replay"]:
        assert row["rows_active"] == result["batch"] and row["keys_in_view"][0] == result["context"] + 1
        table = replay_table(PROFILES[row["profile"]], 12, result["batch"], row["gamma"], 0, torch.device("cpu"))
        assert row["tokens_per_round"] == float((table[: row["rounds_of_a_run"]] + 1).double().mean())
        assert row["replayed"] is True
        assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
        assert row["predicted_practical"] <= row["predicted_ideal"]
    for name in ("draft", "verify"):
        assert result["steps"][name].keys() == result["roofline"][name].keys()
    assert bool(result["steps"]["select"]) == (arm.policy == "guided")
    assert ("5" in result["steps"]["verify"]) == (arm.name == "streaming")  # what a target is about


def test_a_cell_by_precision_replays_what_few_bits_leave_of_acceptance_or_says_why_not() -> None:
    result = dry_run("precision-4096-int8")
    assert (result["arm"], result["quantize"], result["policy"]) == ("guided-int8", "int8", "guided")
    (row,) = result["replay"]
    assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
    draft, plain = result["roofline"]["draft"], dry_run("precision-4096-None")["roofline"]["draft"]
    assert all(draft[gamma] < plain[gamma] for gamma in draft.keys() & plain.keys())
    said = "quantize 'float8' of a draft runs on device 'cuda', and the model is on 'cpu': use 'int8' or 'int4'"
    assert dry_run("precision-57344-float8") == {"arm": "guided-float8", "skipped": said}
    assert PRECISIONS["int4"].profile("guided").chances[0] == 0.97 * PROFILES["guided"].chances[0]


def a_bench(arm: str, gammas: dict[str, int]) -> Bench:
    return Bench(dry_setup(), Cell(batch=16, context=57344), ARMS[arm], gammas)


@pytest.mark.parametrize(
    ("arm", "gammas"),
    [("streaming", {"streaming": 2}), ("guided", {"guided": 2, "guided_all": 1}), ("snapkv", {"snapkv": 2})],
)
def test_every_repeat_of_every_timed_call_finds_all_rows_in_the_middle_of_decoding(
    arm: str, gammas: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What calls do is counted where attention, judging and selecting happen, apart from what the records say."""
    bench, read, calls = a_bench(arm, gammas), list[tuple[str, int, int]](), list[list[Any]]()

    def dense(self: Any, layer: int, *args: Any, right: Any = DenseKV.attend) -> Tensor:
        pos, n_keys = args[-1], self.n_splits_carrier.shape[0] * SPLIT
        n = torch.where(pos < n_keys, pos + 1, 0).amax(1)
        if layer == 0:
            read.append((f"target T {pos.shape[1]}", int(n.min()), int(n.max())))
        out: Tensor = right(self, layer, *args)
        return out

    monkeypatch.setattr(DenseKV, "attend", dense)

    def sparse(self: Any, layer: int, *args: Any, right: Any = ListedKV.attend) -> Tensor:
        lists, n_positions = torch.stack(list(self.kv_indices)), self.layers[0].k.shape[2]
        n = positions_of(lists, self.window_start, self.window_width, args[-1][:, 0], n_positions).sum(-1)
        if layer == 0:
            read.append(("draft", int(n.min()), int(n.max())))
        out: Tensor = right(self, layer, *args)
        return out

    monkeypatch.setattr(ListedKV, "attend", sparse)

    def watch(self: Stopwatch, call: Callable[[], Any], before: Callable[[], object]) -> float:
        repeats = []
        for _ in range(4):
            before()
            read.clear()
            state, kv_indices = bench.engine.state, bench.engine.policy.view.kv_indices.clone()  # type: ignore[union-attr]
            active, seq_len = int(state.active.sum()), state.seq_len.tolist()
            out = call()
            judged = out[:, :3].tolist() if isinstance(out, Tensor) and out.dtype == torch.int64 else None
            changed = (kv_indices != bench.engine.policy.view.kv_indices).any(-1).any(-1).any(0)  # type: ignore[union-attr]
            repeats.append([active, seq_len, list(read), judged, changed.tolist()])
        calls.append(repeats)
        return 1.0

    monkeypatch.setattr(Stopwatch, "__call__", watch)
    steps, n, context = bench.steps(), bench.batch, bench.context
    figures = [steps["target"]]
    for gamma in map(str, bench.timed):
        figures += [steps[name][gamma] for name in ("draft", "verify", "judge", "select") if gamma in steps[name]]
    assert len(figures) == len(calls)  # the plain step is timed once, the others for every gamma
    for figure, repeats in zip(figures, calls, strict=True):
        assert all(repeat == repeats[0] for repeat in repeats)
        active, seq_len, fed, judged, changed = repeats[0]
        assert (active, seq_len, figure["rows_active"]) == (n, [context] * n, n)
        if "keys_in_view" in figure:
            assert [min(least for _, least, _ in fed), max(most for *_, most in fed)] == figure["keys_in_view"]
        gamma = figure["gamma"]
        if figure is steps["target"]:
            assert fed == [("target T 1", context + 1, context + 1)]
        elif figure is steps["verify"].get(str(gamma)):
            assert fed == [(f"target T {gamma + 1}", context + gamma + 1, context + gamma + 1)]
        elif figure is steps["draft"].get(str(gamma)):
            assert [what for what, *_ in fed] == ["draft"] * gamma
            assert all(0.7 * bench.budget < least <= most <= bench.budget + gamma for _, least, most in fed)
        elif figure is steps["judge"].get(str(gamma)):
            kept = (gamma + 1) // 2  # what the table says
            assert (fed, judged) == ([], [[kept + 1, gamma, kept]] * n)
        else:
            assert (fed, changed) == ([], [True] * n)


def row_idles(bench: Bench, gamma: int) -> None:
    bench.engine.state.active[0] = False


def rows_end(bench: Bench, gamma: int) -> None:
    bench.engine.state.remaining.zero_()


def rows_are_short(bench: Bench, gamma: int) -> None:
    bench.engine.state.seq_len.fill_(9)


def nothing_is_due(bench: Bench, gamma: int) -> None:
    bench.engine.policy.view.selected_at.copy_(bench.engine.state.seq_len)  # type: ignore[union-attr]


def nothing_is_listed(bench: Bench, gamma: int) -> None:
    view: Any = bench.engine.policy.view  # type: ignore[union-attr]
    view.kv_indices.fill_(-1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (row_idles, "target at gamma 0 is not timed: of 2 rows only 1 are active"),
        (rows_are_short, "target at gamma 0 is not timed: rows read 10 to 10 keys, not 321 to 321"),
        (nothing_is_listed, "draft at gamma 2 is not timed: rows read .* keys, not 89 to 130"),
        (rows_end, r"judge at gamma 2 is not timed: {'tokens_judged': \[0, 0\]"),
        (nothing_is_due, "select at gamma 2 is not timed: {'rows_selected': 0} should be {'rows_selected': 2}"),
    ],
)
def test_a_call_that_does_not_do_what_it_is_timed_for_is_an_error_and_has_no_seconds(
    wrong: Callable[[Bench, int], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Bench.restore_state

    def restore_state(self: Bench, gamma: int) -> None:
        right(self, gamma)
        wrong(self, gamma)

    monkeypatch.setattr(Bench, "restore_state", restore_state)
    with pytest.raises(RuntimeError, match=said):
        a_bench("guided", {"guided": 2, "guided_all": 2}).steps()


def test_a_replay_whose_rounds_do_not_keep_what_the_table_says_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_kept(self: Replay, result: AcceptResult, drafted: Tensor, max_accept: Tensor) -> AcceptResult:
        return AcceptResult(max_accept.clone(), result.next_token)

    bench = a_bench("streaming", {"streaming": 2})
    bench.replay("streaming")
    monkeypatch.setattr(Replay, "apply", all_kept)
    with pytest.raises(RuntimeError, match=r"gave 18 tokens in 6 rounds of a row, but they owe 1\d, as the table"):
        bench.run(True, rounds=3)


@pytest.mark.parametrize("captured", [False, True])
def test_replayed_rounds_emit_exactly_what_the_table_says_and_plain_ones_one_token_per_row(captured: bool) -> None:
    bench = a_bench("streaming", {"streaming": 2, "low": 1})
    if captured:  # results are read one round late, as those of captured rounds are
        bench.engine.schedule.rounds.capture = lambda part: part
    for profile, gamma in bench.gammas.items():
        bench.replay(profile)
        table = replay_table(PROFILES[profile], 12, bench.batch, gamma, 0, torch.device("cpu"))
        for _ in range(2):  # every run begins at the table's first row
            run = bench.run(True, rounds=3)
            assert run["tokens"] == int((table[:3] + 1).sum())
        assert bench.run(False, rounds=3)["tokens"] == 3 * bench.batch
        assert bench.run(True, new=4)["tokens"] == 4 * bench.batch


def test_a_replay_knows_the_tiers_of_the_model_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SMALL", replace(cells.SMALL, n_heads=16, n_kv_heads=2))
    bench = a_bench("streaming", {"streaming": 2})
    bench.replay("streaming")
    tiers = bench.engine.schedule.planner.tiers
    assert max(tiers) == 7 and tiers == gamma_tiers(bench.config.group_size)


@needs_fake_cuda
def test_a_random_model_on_a_chip_gives_back_what_its_first_weights_took(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    with fake_cuda_tensors():
        model = random_model(SMALL, torch.device("cuda"), torch.bfloat16)
    assert given_back and {x.device.type for x in model.parameters()} == {"cuda"}
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
