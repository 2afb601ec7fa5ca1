"""scripts/gpu_suite.py without a GPU: how it goes on, what it survives, what it says; each of its stages, dry."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_stages
import gpu_suite
from gpt_fast_sd import kernels
from gpt_fast_sd.replay import PROFILES, replay_table
from gpt_fast_sd.roofline import CHIPS
from gpu_stages import ARMS, STAGES, Bench, Findings, Setup, Stage, best_places, difference, planned, shortfall
from gpu_suite import DONE, FAILED, LEFT, Ledger, conduct, draw, run_process, summary, targets

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
        (["--tiny"], "torch sees no CUDA device here: run this on a GPU, or dry with --device cpu --tiny"),
        (["--device", "cpu"], "--device cpu is for a dry run: give --tiny too"),
        ([*DRY, "--stages", "machine,lunch"], "--stages names 'lunch'; there are machine,"),
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
def test_the_kernels_reference_bodies_agree_with_fp64_and_plain_python(stage: str) -> None:
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
    rates = {"rates": {"copy": 1e10, "read": 2e10, "matmul": 1e11}}
    for row in dry_run(stage, machine=rates)["rows"]:
        assert row["bytes"] > 0 and row["seconds"] > 0
        floor = {name: max(row["bytes"] / rate, row["flops"] / peak) for name, rate, peak in
                 (("share", 4.8e12, 989e12), ("share_of_measured", 2e10, 1e11))}  # fmt: skip
        for name, seconds in floor.items():
            assert row[name] == pytest.approx(seconds / row["seconds"])


def test_a_peer_that_cannot_run_is_a_row_that_says_why_and_a_kernel_of_ours_stops_the_stage() -> None:
    timings = gpu_stages.Timings(dry_setup())

    def broken() -> None:
        raise RuntimeError("no kernel for this chip")

    timings.time("theirs", "shape", broken, 1.0, peer=True)
    assert timings.rows[0]["failed"] == "RuntimeError: no kernel for this chip"
    with pytest.raises(RuntimeError, match="no kernel"):
        timings.time("ours", "shape", broken, 1.0)


@pytest.mark.parametrize(
    "stage", ["cell-32x28672-streaming", "cell-32x28672-low", "cell-16x57344-guided", "cell-8x100000-snapkv"]
)
def test_a_cell_gives_steps_and_a_replay_of_every_profile_of_its_policy(stage: str) -> None:
    result = dry_run(stage)
    arm = ARMS[result["arm"]]
    assert [row["profile"] for row in result["replay"]] == list(arm.profiles)
    for row in result["replay"]:
        assert row["replayed"] is True
        assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
        assert row["predicted_practical"] <= row["predicted_ideal"]
    for name in ("draft", "verify"):
        assert result["steps"][name].keys() == result["roofline"][name].keys()
    assert bool(result["steps"]["select"]) == (arm.policy == "guided")
    assert ("5" in result["steps"]["verify"]) == (arm.name == "streaming")  # what a target is about


@pytest.mark.parametrize("captured", [False, True])
def test_replayed_rounds_emit_exactly_what_the_table_says_and_plain_ones_one_token_a_row(captured: bool) -> None:
    bench = Bench(dry_setup(), "32x28672", ARMS["streaming"], {"streaming": 2, "low": 1})
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


def test_gamma_is_the_cost_models_and_its_forecasts_pass_the_targets() -> None:
    chosen = {
        (cell, profile): planned(dry_setup(), cell, arm, profile)
        for cell in ("32x28672", "16x57344")
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


def cell_result(cell: str, policy: str, profile: str, ratio: float) -> Record:
    """A cell as if it had been measured: the steps at 0.9 and 0.6 of the roofline."""
    row = {
        "profile": profile, "replayed": True, "gamma": 5, "predicted_ideal": 3.0, "predicted_practical": 2.9,
        "ratio": {"median": ratio, "min": ratio - 0.1, "max": ratio + 0.1}, "plain_tokens_per_second": 900.0,
        "replayed_tokens_per_second": 900.0 * ratio, "tokens_per_round": 4.0, "to_the_end_ratio": ratio - 0.3,
    }  # fmt: skip
    return {
        "cell": cell, "arm": policy, "policy": policy, "budget": 512, "replay": [row],
        "steps": {"target": 0.030, "draft": {"5": 0.005}, "verify": {"5": 0.036}, "judge": {"5": 5e-5}, "select": {}},
        "roofline": {"target": 0.027, "draft": {"5": 0.003}, "verify": {"5": 0.027}},
    }  # fmt: skip


MEASURED = {
    "cell-32x28672-streaming": cell_result("32x28672", "streaming", "streaming", 2.0),
    "cell-16x57344-snapkv": cell_result("16x57344", "snapkv", "snapkv", 2.2),
}


def test_every_target_stands_beside_what_was_measured_and_predicted() -> None:
    found = {one.name: one for one in targets(MEASURED, dry_setup())}
    met = {name.split(",")[0]: one.met for name, one in found.items() if not name.startswith("replay")}
    assert met == {
        "plain step": True, "draft step": False, "T_V / T_T at gamma 5": False, "judging": True,
    }  # fmt: skip
    assert [one.met for name, one in found.items() if name.startswith("replay")] == [True, False, None]
    assert found["plain step, share of the roofline"].measured == pytest.approx(0.9)
    assert all(one.predicted for one in found.values() if not one.name.startswith("judging"))


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
    assert table.count("not measured") == 7 and "yes" not in table
    assert page.index("cpu dry run") < page.index("## Targets")


def test_plots_show_kernels_and_replays(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"op": "decode_attention", "what": "shape", "peer": False, "share": 0.8}
    drawn = draw({**MEASURED, "time-decode": {"rows": [row, {**row, "peer": True}]}}, tmp_path, dry=False)
    assert [path.name for path in drawn] == ["kernels.png", "replay.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert draw({}, tmp_path, dry=False) == []
