"""scripts/gpu_suite.py without a GPU: how it goes on, what it survives, what it says; each of its stages, dry."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_bench
import gpu_checks
import gpu_forecast
import gpu_smoke
import gpu_suite
import gpu_timings
from gpt_fast_sd import Engine, kernels
from gpt_fast_sd.attending import DenseKV, ListedKV
from gpt_fast_sd.judging import Verdict
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies.sparse import positions_of
from gpt_fast_sd.replay import PROFILES, Replay, replay_table
from gpt_fast_sd.roofline import CHIPS
from gpt_fast_sd.rows import Rows
from gpu_bench import Bench
from gpu_checks import best_places, shortfall
from gpu_forecast import AIMS, ARMS, FULL, Cell, cell_for, planned, tables
from gpu_setup import Findings, Setup, Stopwatch, difference
from gpu_stages import STAGES, Stage
from gpu_suite import conduct, run_process
from gpu_summary import DONE, FAILED, LEFT, Ledger, draw, summary, targets
from tests.gpuless import pools

Record = dict[str, Any]
DRY = ["--device", "cpu", "--tiny", "--pairs", "1"]
SETTINGS = {"device": "cpu", "tiny": True, "pairs": 1, "max_autotune": False, "texts": []}


def dry_setup(**known: Record) -> Setup:
    return Setup(device=torch.device("cpu"), tiny=True, pairs=1, max_autotune=False, texts=(), known=known)


def dry_run(stage: str, **known: Record) -> Record:
    """What the stage finds, through JSON and back."""
    result: Record = json.loads(json.dumps(STAGES[stage].run(dry_setup(**known))))
    return result


def some_stages(*names: str, seconds: int = 10) -> list[Stage]:
    return [Stage(name=name, run=lambda setup: {}, seconds=seconds, about="a test") for name in names]


class FakeProcesses:
    """Launches nothing; every stage comes to the end it was given, done if none."""

    def __init__(self, **ends: Record) -> None:
        self.ends, self.launched = ends, list[str]()

    def __call__(self, stage: Stage, timeout: float) -> Record:
        assert timeout > 0
        self.launched.append(stage.name)
        return dict(self.ends.get(stage.name, {"status": DONE, "result": {"ok": True}}))


BROKEN = {"status": FAILED, "error": "exit code 1", "output": "first\nRuntimeError: CUDA error\n"}


# ---- one stage after the other ---------------------------------------------------------------------------------------


def test_a_stage_that_fails_loses_no_other_and_is_tried_again_after_those_not_run_yet(tmp_path: Path) -> None:
    stages = some_stages("a", "b", "c")
    first = FakeProcesses(a=BROKEN)
    assert conduct(stages[:2], Ledger(tmp_path, SETTINGS, fresh=False), 500, first) == []
    assert first.launched == ["a", "b"]
    again, ledger = FakeProcesses(), Ledger(tmp_path, SETTINGS, fresh=False)
    assert ledger.stages["a"]["error"] == "exit code 1" and not ledger.is_done("a")
    assert conduct(stages, ledger, 500, again) == []
    assert again.launched == ["c", "a"]
    assert set(ledger.results) == {"a", "b", "c"}


def test_what_does_not_fit_the_budget_is_left_but_the_first_stage_of_a_call_never_is(tmp_path: Path) -> None:
    stages = [*some_stages("slow", seconds=900), *some_stages("quick"), *some_stages("long", seconds=600)]
    processes, ledger = FakeProcesses(), Ledger(tmp_path, SETTINGS, fresh=False)
    assert conduct(stages, ledger, 500, processes) == ["long"]
    assert processes.launched == ["slow", "quick"]
    assert conduct(stages, ledger, 500, processes) == []


def test_a_stage_that_takes_longer_than_it_is_reckoned_to_says_so_in_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(float(100 * i) for i in range(99))
    monkeypatch.setattr(gpu_suite.time, "perf_counter", lambda: next(clock))
    ledger = Ledger(tmp_path, SETTINGS, fresh=False)
    conduct([*some_stages("one", seconds=90), *some_stages("two", seconds=240)], ledger, 5000, FakeProcesses())
    written = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert [written[name]["seconds_over"] for name in ("one", "two")] == [10.0, 0.0]
    assert "--- one done in 100.0 s, 10.0 s more than it is reckoned to take\n" in capsys.readouterr().out
    page = summary(ledger, dry_setup(), [], [])
    assert "## Longer than reckoned\n\n- one: 100 s, reckoned 90 s\n\n" in page and "- two" not in page


def test_a_stage_that_was_stopped_early_is_left_and_nothing_is_written_of_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SETTINGS, fresh=False)
    assert conduct(some_stages("a", "b"), ledger, 500, FakeProcesses(a={"status": LEFT})) == ["a"]
    assert set(ledger.stages) == {"b"}


def test_fresh_forgets_what_there_is(tmp_path: Path) -> None:
    Ledger(tmp_path, SETTINGS, fresh=False).put("a", {"status": DONE, "result": {}})
    assert Ledger(tmp_path, SETTINGS, fresh=False).is_done("a")
    assert not Ledger(tmp_path, {**SETTINGS, "pairs": 9}, fresh=True).is_done("a")
    assert not Ledger(tmp_path, {**SETTINGS, "pairs": 9}, fresh=False).is_done("a")  # what the first stage will read


def test_a_process_is_stopped_in_time_and_what_it_said_is_kept() -> None:
    code, output = run_process([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 5.0)
    assert (code, output) == (None, "begun\n")
    code, output = run_process([sys.executable, "-c", "print('so far'); raise ValueError('no chip')"], 60.0)
    assert code == 1
    assert output.startswith("so far\n") and output.endswith("ValueError: no chip\n")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_stage_runs_in_a_process_of_its_own_and_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "out"), *DRY, "--stages", "correct-select"]
    assert gpu_suite.main(argv) == 0
    assert "--- correct-select done" in capsys.readouterr().out
    before = (tmp_path / "out" / "results.json").read_text()
    assert gpu_suite.main(argv) == 0
    assert "correct-select: there already" in capsys.readouterr().out
    assert (tmp_path / "out" / "results.json").read_text() == before


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ({}, 0, None),
        ({"graphs": {"status": LEFT}}, 3, "left for the next call: graphs"),
        ({"graphs": BROKEN}, 1, "failed: graphs"),
        ({"graphs": {"status": DONE, "result": {"ok": False, "worst": []}}}, 1, "found errors: graphs"),
    ],
)
def test_the_exit_code_tells_done_left_and_failed_apart(
    ends: dict[str, Record], code: int, said: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_suite, "launcher", lambda args, ledger: FakeProcesses(**ends))
    argv = [str(tmp_path), *DRY, "--stages", "correct-decode,graphs,correct-select"]
    assert gpu_suite.main(argv) == code
    out = capsys.readouterr().out
    assert said is None or said in out
    page = (tmp_path / "summary.md").read_text()
    assert "cpu dry run" in page
    assert ("failed, exit code 1: `RuntimeError: CUDA error`" in page) == (ends.get("graphs") is BROKEN)
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tiny"], "; run this on a GPU, or dry with --device cpu --tiny"),
        (["--device", "cpu"], "--device cpu is for a dry run: give --tiny too"),
        ([*DRY, "--stages", "machine,lunch"], "--stages names 'lunch'; there are smoke,"),
        ([*DRY, "--budget-seconds", "0"], "--budget-seconds must be positive, got 0"),
        (["--device", "cpu", "--tiny", "--pairs", "0"], "--pairs must be at least 1, got 0"),
        ([*DRY, "--texts", "nowhere.txt"], "there is no text file nowhere.txt"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu_suite.main([str(tmp_path / "out"), *argv])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("hidden", "cuda", "why"),
    [
        (None, None, "is built without CUDA (pytorch.org has builds with it)"),
        ("", "13.0", "CUDA_VISIBLE_DEVICES is ''"),
        (None, "13.0", "is built for CUDA 13.0 and says: the driver is too old"),
    ],
)
def test_a_suite_that_finds_no_device_says_why(
    hidden: str | None, cuda: str | None, why: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def init() -> None:
        raise RuntimeError("the driver is too old\nand more of the kind")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(SystemExit):
        gpu_suite.main([str(tmp_path / "out"), "--tiny"])
    said = capsys.readouterr().err
    assert "torch sees no CUDA device here: " in said and f"{why}; run this on a GPU" in said and said.count("\n") == 1


def test_results_of_other_settings_or_of_nothing_of_ours_are_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "results.json"

    def refusal() -> str:
        with pytest.raises(SystemExit) as stopped:
            gpu_suite.main([str(tmp_path), *DRY])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    Ledger(tmp_path, {**SETTINGS, "device": "NVIDIA H200"}, fresh=False).put("a", {"status": DONE, "result": {}})
    assert (
        "was measured with device NVIDIA H200, not cpu: name another folder, or forget them with --fresh" in refusal()
    )
    found.write_text("{}")
    assert "holds no results of this suite" in refusal()
    found.write_text("half a docu")
    assert "is not JSON" in refusal()
    assert found.read_text() == "half a docu"


# ---- the stages, dry -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["correct-decode", "correct-sparse", "correct-prefill", "correct-select"])
def test_what_runs_on_a_cpu_agrees_with_fp64_and_plain_python(stage: str) -> None:
    result = dry_run(stage)
    assert result["ok"] and len(result["rows"]) >= 14
    assert all(row["tolerance"] < 0.02 for row in result["rows"])


def test_a_kernel_that_reads_one_key_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.decode_attention

    def short(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, n_keys: int, split: int) -> Tensor:
        return right(q, k, v, (pos - 1).clamp(min=0), n_keys, split)

    monkeypatch.setattr(kernels, "decode_attention", short)
    result = dry_run("correct-decode")
    assert not result["ok"]
    assert {row["op"] for row in result["rows"] if not row["ok"]} == {"decode_attention"}


def test_filters_are_checked_over_whole_vocabularies_and_a_wrong_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    result = dry_run("correct-filters")
    assert result["ok"] and len(result["rows"]) == 2 * 2 * 3 * 9
    assert {row["error"] for row in result["rows"]} == {0.0}
    right = kernels.likeliest

    def wrong_of(what: str) -> set[str]:
        monkeypatch.setattr(kernels, "likeliest", what)
        rows = dry_run("correct-filters")["rows"]
        return {row["what"].split(", ")[1] for row in rows if not row["ok"]}

    def one_tie_fewer(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
        cut, last = right(scores, top_k, top_p)
        return cut, torch.where(last == scores.shape[1] - 1, last, last - 1)

    monkeypatch.setattr(gpu_checks, "FILTERED_VOCABULARIES", (512,))
    assert wrong_of(one_tie_fewer) >= {"k 50 p 0.9", "k all p 0.9", "k all p 0"}  # type: ignore[arg-type]
    no_k = wrong_of(lambda scores, top_k, top_p: right(scores, torch.full_like(top_k, scores.shape[1]), top_p))  # type: ignore[arg-type]
    assert {"k 1 p 1", "k 50 p 1", "k 50 p 0.9"} <= no_k and not any("k all" in what for what in no_k)
    no_p = wrong_of(lambda scores, top_k, top_p: right(scores, top_k, torch.ones_like(top_p)))  # type: ignore[arg-type]
    assert {"k all p 0", "k 50 p 0.9"} <= no_p and not any("p 1" in what for what in no_p)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_graph_is_timed_by_events_on_the_stream_that_it_is_replayed_on(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is captured on a stream of the watch's own; what it is replayed on is whoever's turn it is, here and there."""
    seen: list[tuple[str, int]] = []
    with pools.stand_in("2.13") as cuda, contextlib.ExitStack() as within:

        class Noted:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:  # of the current stream, as in torch
                seen.append(("event", cuda.current.cuda_stream))

            def elapsed_time(self, end: Noted) -> float:
                return 7.0

        replay = pools.Graph.replay

        def noted(self: pools.Graph) -> None:
            seen.append(("replay", cuda.current.cuda_stream))
            replay(self)

        monkeypatch.setattr(torch.cuda, "Event", Noted)
        monkeypatch.setattr(pools.Graph, "replay", noted)
        watch, calls = Stopwatch(dry_setup()), torch.zeros(1)
        watch.device, watch.stream = torch.device("cuda"), cuda.stream_of_pool()  # type: ignore[assignment]
        if elsewhere:
            within.enter_context(torch.cuda.stream(cuda.stream_of_pool()))  # type: ignore[arg-type]
        here = cuda.current.cuda_stream
        assert watch.times(lambda: calls.add_(1)) == [0.007] * 2
        assert cuda.captures[0]["stream"] == watch.stream.cuda_stream != here  # type: ignore[union-attr]
    assert seen == [("replay", here), *[("event", here), ("replay", here), ("event", here)] * 2]
    assert int(calls) == 3 + 1 + 2  # before the capture, and replayed


def test_what_is_not_finite_or_of_another_shape_is_never_within_a_tolerance() -> None:
    ones, findings = torch.ones(3), Findings()
    for out in (torch.tensor([1.0, float("nan"), 1.0]), torch.ones(4)):
        assert difference(out, ones) == float("inf")
        findings.add("op", "what", difference(out, ones), 1e-2)
    assert not findings.record()["ok"]
    assert json.loads(json.dumps(findings.record(), allow_nan=False))


def test_the_truth_of_selections_breaks_ties_downwards_and_takes_nan_last() -> None:
    nan = float("nan")
    assert best_places([1.0, 3.0, nan, 3.0, 3.0], 2) == [1, 3]
    assert best_places([1.0, nan], 3) == [0, 1, -1]
    q, bounds = torch.ones(1, 1, 1, 2), torch.tensor([[1.0, 1, 0, 0], [3, 3, 0, 0], [2, 2, 0, 0]])[None, None]
    closed = torch.tensor([3])
    assert shortfall(q, bounds, closed, torch.tensor([[[1, 2]]])) == 0.0
    assert shortfall(q, bounds, closed, torch.tensor([[[0, 1]]])) == pytest.approx(0.5)  # of a spread of 4, 2 too few
    assert shortfall(q, bounds, closed, torch.tensor([[[2, 1]]])) == float("inf")  # not in order


@pytest.mark.parametrize("stage", ["time-decode", "time-sparse", "time-prefill", "time-select"])
def test_every_timed_kernel_has_its_bytes_and_its_share_of_both_ceilings(stage: str) -> None:
    rates = {"environment": {}, "rates": {"copy": 1e10, "read": 2e10, "matmul": 1e11}}
    for row in dry_run(stage, machine=rates)["rows"]:
        assert row["bytes"] > 0 and row["seconds"] > 0
        floor = {name: max(row["bytes"] / rate, row["flops"] / peak) for name, rate, peak in
                 (("share", 4.8e12, 989e12), ("share_of_measured", 2e10, 1e11))}  # fmt: skip
        for name, seconds in floor.items():
            assert row[name] == pytest.approx(seconds / row["seconds"])


def test_a_peer_that_cannot_run_is_a_row_that_says_why_and_a_kernel_of_ours_stops_the_stage() -> None:
    timings, does = gpu_timings.Timings(dry_setup()), {"rows_active": 1, "tokens_fed": 1, "keys_in_view": [1, 1]}

    def broken() -> None:
        raise RuntimeError("no kernel for this chip")

    timings.time("theirs", "shape", broken, 1.0, does=does, peer=True)
    assert timings.rows[0]["failed"] == "RuntimeError: no kernel for this chip"
    with pytest.raises(RuntimeError, match="no kernel"):
        timings.time("ours", "shape", broken, 1.0, does=does)


@pytest.mark.parametrize("stage", ["time-decode-57344", "time-decode", "time-sparse", "time-prefill", "time-select"])
def test_every_timed_kernel_reads_the_keys_whose_bytes_it_is_charged_for_and_peers_compute_the_same(stage: str) -> None:
    heads = gpu_timings.dense_heads(dry_setup(), 57344)[0]
    of_a_key = 2 * 2 * heads.n_kv * heads.head_dim  # bytes of a key and a value
    for row in dry_run(stage)["rows"]:
        assert "failed" not in row, row
        assert row["rows_active"] > 0
        if "keys_in_view" not in row:
            assert row["chosen"] > 0
            continue
        least, most = row["keys_in_view"]
        assert 0 < least == most
        read = row["rows_active"] * most * of_a_key
        lists = row["bytes"] - read if row["op"] == "sparse_attention" else 0  # half of the entries, int64 each
        assert lists == (row["rows_active"] * heads.n_kv * most / 2 * 8 if lists else 0)
        assert row["bytes"] == (read / 2 if row["op"] == "key_mass" else read + lists)
        # the mask that others lack leaves them a few more of hundreds of keys; of one query they compute the very same
        assert row.get("off_by", 0.0) < (0.02 if row["tokens_fed"] == 1 or stage == "time-prefill" else 0.3)


def test_a_kernel_that_lets_rows_idle_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.decode_attention

    def half(q: Tensor, *rest: Any) -> Tensor:
        out = right(q, *rest)
        return out * (torch.arange(len(out)) % 2 == 0)[:, None, None, None]

    monkeypatch.setattr(kernels, "decode_attention", half)
    with pytest.raises(RuntimeError, match="decode_attention, 2 x 512, T 1, is not timed, as rows idle"):
        dry_run("time-decode-57344")
    monkeypatch.undo()
    q = torch.randn(2, 4, 6, 16).bfloat16()
    monkeypatch.setattr(
        gpu_timings, "queries", lambda setup, heads, n: (q[:, :, :n], torch.full((2, n), heads.context))
    )
    with pytest.raises(RuntimeError, match=r"rows idle: {'rows_active': 0, 'tokens_fed': 1, 'keys_in_view': \[0, 0\]}"):
        dry_run("time-decode-57344")


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
        pos, n_keys = args[-1], self.in_view.shape[0] * SPLIT
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
            rows, slots = bench.engine.rows, bench.engine.policy.view.slots.clone()  # type: ignore[union-attr]
            active, seq_len = int(rows.active.sum()), rows.seq_len.tolist()
            out = call()
            judged = out[:, :3].tolist() if isinstance(out, Tensor) and out.dtype == torch.int64 else None
            changed = (slots != bench.engine.policy.view.slots).any(-1).any(-1).any(0)  # type: ignore[union-attr]
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
    bench.engine.rows.active[0] = False


def rows_end(bench: Bench, gamma: int) -> None:
    bench.engine.rows.remaining.zero_()


def rows_are_short(bench: Bench, gamma: int) -> None:
    bench.engine.rows.seq_len.fill_(9)


def nothing_is_due(bench: Bench, gamma: int) -> None:
    bench.engine.policy.view.selected_at.copy_(bench.engine.rows.seq_len)  # type: ignore[union-attr]


def nothing_is_listed(bench: Bench, gamma: int) -> None:
    view: Any = bench.engine.policy.view  # type: ignore[union-attr]
    view.slots.fill_(-1)


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
    right = Bench.pose

    def pose(self: Bench, gamma: int) -> None:
        right(self, gamma)
        wrong(self, gamma)

    monkeypatch.setattr(Bench, "pose", pose)
    with pytest.raises(RuntimeError, match=said):
        a_bench("guided", {"guided": 2, "guided_all": 2}).steps()


def test_a_replay_whose_rounds_do_not_keep_what_the_table_says_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_kept(self: Replay, verdict: Verdict, drafted: Tensor, cap: Tensor) -> Verdict:
        return Verdict(cap.clone(), verdict.next_token)

    bench = a_bench("streaming", {"streaming": 2})
    bench.replay("streaming")
    monkeypatch.setattr(Replay, "apply", all_kept)
    with pytest.raises(RuntimeError, match=r"gave 18 tokens in 6 rounds of a row, but they owe 1\d, as the table"):
        bench.run(True, rounds=3)


@pytest.mark.parametrize("captured", [False, True])
def test_replayed_rounds_emit_exactly_what_the_table_says_and_plain_ones_one_token_a_row(captured: bool) -> None:
    bench = a_bench("streaming", {"streaming": 2, "low": 1})
    if captured:  # results are read one round late, as those of captured rounds are
        bench.engine.rounds.capture = lambda part: part
    for profile, gamma in bench.gammas.items():
        bench.replay(profile)
        table = replay_table(PROFILES[profile], 12, bench.batch, gamma, 0, torch.device("cpu"))
        for _ in range(2):  # every run begins at the table's first row
            run = bench.run(True, rounds=3)
            assert run["tokens"] == int((table[:3] + 1).sum())
        assert bench.run(False, rounds=3)["tokens"] == 3 * bench.batch
        assert bench.run(True, new=4)["tokens"] == 4 * bench.batch


def test_a_replay_knows_the_tiers_of_the_model_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "SMALL", replace(gpu_bench.SMALL, n_heads=16, n_kv_heads=2))
    bench = a_bench("streaming", {"streaming": 2})
    bench.replay("streaming")
    assert max(bench.engine.planner.tiers) == 7 and bench.engine.planner.tiers == bench.engine._tiers


def test_gamma_is_the_cost_models_and_its_forecasts_pass_the_targets() -> None:
    chosen = {
        (cell.name, profile): planned(CHIPS["h200"], cell, arm, profile)
        for cell in (Cell(batch=32, context=28672), Cell(batch=16, context=57344))
        for arm in ARMS.values()
        for profile in arm.profiles
    }
    assert chosen["16x57344", "streaming"].gamma == 5
    assert chosen["32x28672", "low"].gamma < chosen["32x28672", "snapkv"].gamma <= 8
    assert chosen["32x28672", "streaming"].ratio > 1.9
    assert chosen["16x57344", "snapkv"].ratio > 2.4
    assert chosen["16x57344", "guided"].ratio > 3.0


def test_the_roofline_is_the_data_sheets_of_a_known_chip_and_measured_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    known = {"machine": {"rates": {"copy": 7e11, "read": 8e11, "matmul": 1e14}}}
    setup = replace(dry_setup(**known), device=torch.device("cuda"))
    assert setup.chip == CHIPS["h100"]
    name = "NVIDIA GeForce RTX 4090"
    assert (setup.chip.bandwidth, setup.chip.peak) == (8e11, 1e14)
    assert dry_setup(**known).chip.bandwidth == CHIPS["h200"].bandwidth


def test_cells_are_as_large_as_the_memory_of_the_card_allows() -> None:
    def batches(memory: float) -> list[int]:
        return [cell_for(context, memory).batch for context in (57344, 28672, 100_000)]

    assert batches(CHIPS["h200"].memory) == [FULL[context] for context in (57344, 28672, 100_000)] == [16, 32, 8]
    assert batches(CHIPS["h100"].memory) == [8, 16, 4]
    assert batches(40 * 2**30) == [2, 4, 1]
    with pytest.raises(ValueError, match="not even one slot fits"):
        cell_for(100_000, 20 * 2**30)


def test_a_stage_goes_by_the_memory_that_is_free_the_page_by_what_the_first_look_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    setup = replace(dry_setup(), device=torch.device("cuda"))
    assert setup.cell(57344).batch == 8  # by the data sheet
    assert replace(setup, known={"machine": {"environment": {"free_bytes": 40 * 2**30}}}).cell(57344).batch == 2
    assert (
        replace(setup, known={"machine": {"environment": {"free_bytes": None}}}, free=139 * 2**30).cell(57344).batch
        == 16
    )


def test_what_runs_at_all_is_tried_first_then_the_headline_kernel_and_guided_before_snapkv() -> None:
    order = list(STAGES)
    assert order[:2] == ["smoke", "time-decode-57344"]
    cells = [name for name in order if name.startswith("cell-")]
    assert cells[:3] == ["cell-57344-guided", "cell-57344-snapkv", "cell-28672-streaming"]
    assert len(cells) == len(FULL) * len(ARMS)
    assert all(order.index(f"correct-{what}") < order.index(cells[0]) for what in ("decode", "sparse", "select"))
    assert STAGES["smoke"].seconds <= 90


def test_the_smoke_stage_tries_what_users_type_first_and_says_how_each_step_went() -> None:
    result = dry_run("smoke")
    assert [step["step"] for step in result["steps"] if not step["ok"]] == [] and result["ok"]
    assert len(result["steps"]) == 8 and all(step["seconds"] > 0 for step in result["steps"])
    said = {step["step"]: step["said"] for step in result["steps"]}
    assert "cache of 512 positions" in said["short prompt, greedy"]
    assert "cache of 512 positions" in said["document in a second engine, greedy"]  # of a dry run's part of it
    for name in ("redrafted", "another policy set"):
        assert said[name].count("gamma 4") == 2 and " of 0 drafts" not in said[name]


def test_the_smoke_stages_engines_are_those_of_generate_but_for_compiling() -> None:
    made = gpu_smoke.make(dry_setup(), "--prompt", "Once upon a time")
    config, draft = made.engine.config, made.engine.draft
    assert (draft.policy, draft.gamma, draft.budget) == ("streaming", "auto", 256)
    assert (config.cuda_graphs, config.exact, config.dtype) == ("round", False, "auto")
    assert config.max_seq_len == len(made.prompts[0]) + 200


def test_a_smoke_step_that_fails_is_not_ok_and_loses_no_other() -> None:
    def broken() -> str:
        raise ValueError("no such\ndraft")

    steps = gpu_smoke.Steps()
    steps.take("redrafted", broken)
    steps.take("the first again", lambda: "as before")
    result = steps.record()
    assert [step["ok"] for step in result["steps"]] == [False, True] and not result["ok"]
    assert [step["said"] for step in result["steps"]] == ["ValueError: no such draft", "as before"]


def test_the_smoke_stage_finds_rows_that_are_short_and_text_that_drafting_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = gpu_smoke.make(dry_setup(), "--prompt", "Once upon a time", "--max-new-tokens", "6", "--gamma", "2")
    with pytest.raises(RuntimeError, match="plain decoding took 6 rounds for 9 tokens a row"):
        gpu_smoke.greedy(made, 9)
    with pytest.raises(RuntimeError, match=r"rows have \[6\] tokens, not 9 each"):
        gpu_smoke.drawn(made.engine, made.prompts, made.params, 9)
    right = Rows.judge

    def all_kept(self: Rows, logits: Tensor, pos: Tensor, drafted: Tensor, *args: Any, **kwargs: Any) -> Any:
        verdict, p = right(self, logits, pos, drafted, *args, **kwargs)
        return (Verdict(verdict.n_accepted, torch.full_like(verdict.next_token, 7)) if drafted.shape[1] else verdict), p

    monkeypatch.setattr(Rows, "judge", all_kept)
    with pytest.raises(RuntimeError, match="speculation says something else: row 0 at"):
        gpu_smoke.greedy(made, 6)


def test_a_round_that_is_watched_for_host_waits_has_rows_that_decode() -> None:
    setup = dry_setup()
    engine = Engine(
        gpu_checks.random_model(gpu_checks.SMALL, setup.device, torch.float32), None,
        gpu_checks.settings_of(setup, cuda_graphs="off"), gpu_checks.DRAFTS[0],
    )  # fmt: skip
    engine.warm_up()
    with torch.inference_mode():
        assert gpu_checks.syncs(setup, engine, 4, sampled=False) == (0, 0)
        assert gpu_checks.syncs(setup, engine, 4, sampled=True) == (0, 0)


def test_the_bundled_model_runs_end_to_end_with_acceptance_of_its_own() -> None:
    result = dry_run("bundled-8x8192")
    assert [row["policy"] for row in result["results"]] == ["streaming", "snapkv", "guided"]
    for row in result["results"]:
        assert 0 <= row["acceptance_rate"] <= 1 <= row["tokens_per_round"] <= 5


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["graphs", "graphs-bundled", "syncs"])
def test_rounds_in_every_mode_of_graphs_agree_and_recompile_nothing(stage: str) -> None:
    assert dry_run(stage)["ok"]


@pytest.mark.slow
def test_the_whole_suite_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gpu_suite.main([str(out), *DRY, "--budget-seconds", "3000"]) == 0
    assert set(json.loads((out / "results.json").read_text())["stages"]) == set(STAGES)
    assert len(list(out.iterdir())) <= 8


# ---- the summary -----------------------------------------------------------------------------------------------------


def figure(seconds: float) -> Record:
    return {"seconds": seconds, "gamma": 5, "rows_active": 16, "tokens_fed": 1, "keys_in_view": [57345, 57345]}


def cell_result(batch: int, context: int, policy: str, ratio: float) -> Record:
    """A cell as if it had been measured: the steps at 0.9 and 0.6 of the roofline."""
    row = {
        "profile": policy, "replayed": True, "gamma": 5, "predicted_ideal": 3.0, "predicted_practical": 2.9,
        "predicted_expected": 2.8,
        "ratio": {"median": ratio, "min": ratio - 0.1, "max": ratio + 0.1}, "plain_tokens_per_second": 900.0,
        "replayed_tokens_per_second": 900.0 * ratio, "tokens_per_round": 4.0, "to_the_end_ratio": ratio - 0.3,
    }  # fmt: skip
    return {
        "cell": f"{batch}x{context}", "planned_batch": batch, "arm": policy, "policy": policy, "budget": 512,
        "replay": [row],
        "steps": {
            "target": figure(0.030), "draft": {"5": figure(0.005)}, "verify": {"5": figure(0.036)},
            "judge": {"5": {"seconds": 5e-5, "gamma": 5, "rows_active": 16}}, "select": {},
        },
        "roofline": {"target": 0.027, "draft": {"5": 0.003}, "verify": {"5": 0.027}},
    }  # fmt: skip


MEASURED = {
    "cell-28672-streaming": cell_result(32, 28672, "streaming", 2.0),
    "cell-57344-snapkv": cell_result(16, 57344, "snapkv", 2.2),
}


def test_every_target_stands_beside_what_was_measured_and_predicted() -> None:
    found = {one.name: one for one in targets(MEASURED, dry_setup())}
    met = {name.split(",")[0]: one.met for name, one in found.items() if not name.startswith("replay")}
    assert met == {
        "plain step": True, "draft step": False, "T_V / T_T at gamma 5": False, "judging": True,
    }  # fmt: skip
    replays = [one for name, one in found.items() if name.startswith("replay")]
    assert [(one.aim.key, one.met) for one in replays] == [("guided", None), ("snapkv", False), ("streaming", True)]
    assert found["plain step, share of the roofline"].measured == pytest.approx(0.9)
    assert all(one.good for one in found.values() if not one.name.startswith("judging"))
    assert all(one.expected for one in found.values())


def test_targets_follow_the_cells_that_were_run_and_need_no_memory_where_none_was() -> None:
    on_80_gb = {"cell-57344-guided": cell_result(8, 57344, "guided", 2.5)}
    found = {one.aim.key: one for one in targets(on_80_gb, dry_setup())}
    assert found["guided"].name == "replay: speed over plain decoding, guided 1024, 8x57344"
    assert (found["guided"].measured, found["guided"].met) == (2.5, False)
    aim = next(aim for aim in AIMS if aim.key == "guided")
    assert found["guided"].expected < aim.forecast(CHIPS["h200"], Cell(batch=16, context=57344), gpu_forecast.EXPECTED)
    small = {one.aim.key: one.name for one in targets({}, replace(dry_setup(), free=16 * 2**30))}
    assert small["guided"].endswith("guided 1024, 1x57344")


def test_the_summary_says_what_is_replayed_and_what_was_not_measured(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, {**SETTINGS, "device": "NVIDIA H200", "tiny": False}, fresh=False)
    for name, result in MEASURED.items():
        ledger.put(name, {"status": DONE, "result": result, "seconds": 1.0})
    setup = replace(dry_setup(), tiny=False, known=ledger.results)
    page = summary(ledger, setup, list(STAGES.values()), [])
    lines = page.splitlines()
    moonshot = next(line for line in lines if "moonshot" in line)
    assert "not measured" in moonshot and moonshot.startswith("| replay: ")
    assert any("2.00x (1.90 to 2.10)" in line and "replay of streaming" in line for line in lines)
    for line in lines:  # a figure that was replayed says so in its row or in the row of its column's names
        assert "2.00x" not in line or "replay" in line
    assert "- graphs: not run yet" in lines
    assert "dry run" not in page


def test_a_dry_run_claims_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SETTINGS, fresh=False)
    for name, result in MEASURED.items():
        ledger.put(name, {"status": DONE, "result": result, "seconds": 1.0})
    page = summary(ledger, replace(dry_setup(), known=ledger.results), [], [])
    table = page[page.index("## Targets") : page.index("## Rounds")]
    assert table.count("not measured") == len(AIMS) == 7 and "yes" not in table
    assert page.index("cpu dry run") < page.index("## Targets")


def test_plots_show_kernels_and_replays(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"op": "decode_attention", "what": "shape", "peer": False, "share": 0.8}
    drawn = draw({**MEASURED, "time-decode": {"rows": [row, {**row, "peer": True}]}}, tmp_path, dry=False)
    assert [path.name for path in drawn] == ["kernels.png", "replay.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert draw({}, tmp_path, dry=False) == []


def test_a_kernel_that_was_timed_before_the_chip_has_its_share_of_the_measured_ceilings_all_the_same(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path, SETTINGS, fresh=False)
    ledger.put("time-decode-57344", {"status": DONE, "result": dry_run("time-decode-57344"), "seconds": 1.0})
    rates = {"copy": 1e3, "read": 1e3, "matmul": 1e3}
    for known, share in ({}, "| - |"), ({"environment": {}, "rates": rates}, "% |"):
        if known:
            ledger.put("machine", {"status": DONE, "result": known, "seconds": 1.0})
        lines = summary(ledger, replace(dry_setup(), known=ledger.results), [], []).splitlines()
        row = next(line for line in lines if line.startswith("| decode_attention |"))
        assert f"{share} 2 x 512 |" in row


def test_the_page_says_what_the_smoke_stage_saw(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SETTINGS, fresh=False)
    steps = [{"step": "redrafted", "ok": False, "said": "RuntimeError: a | b", "seconds": 1.0}]
    ledger.put("smoke", {"status": DONE, "result": {"ok": False, "steps": steps, "seconds": 9.0, "seconds_meant": 90}})
    assert "| redrafted | 1.0 | **no** | RuntimeError: a / b |" in summary(ledger, dry_setup(), [], []).splitlines()


def test_the_readme_holds_the_tables_that_the_cost_model_gives_now() -> None:
    """python scripts/gpu_forecast.py prints them."""
    readme = Path(__file__).resolve().parents[2] / "benchmarks" / "h200" / "README.md"
    written = [line for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert written == [line for line in tables() if line]
