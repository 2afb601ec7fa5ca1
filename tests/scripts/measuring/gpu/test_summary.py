"""The page of results: what was aimed at, measured and expected; and what it must not claim."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from measuring.chips import CHIPS
from measuring.gpu.aims import AIMS, ARMS, FULL, Cell, cell_for, planned
from measuring.gpu.stages import STAGES, results_of
from measuring.gpu.summary import by_precision, draw, summary, table, targets
from tests.scripts.measuring.gpu.rig import Record, a_ledger, dry_run, dry_setup, found


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
    name = "NVIDIA T1000"
    assert (setup.chip.bandwidth, setup.chip.peak) == (8e11, 1e14)
    assert dry_setup(**known).chip.bandwidth == CHIPS["h200"].bandwidth


def test_cells_are_as_large_as_the_memory_of_the_card_allows() -> None:
    def batches(memory: float) -> list[int]:
        return [cell_for(context, memory).batch for context in (57344, 28672, 100_000)]

    assert batches(CHIPS["h200"].memory) == [FULL[context] for context in (57344, 28672, 100_000)] == [16, 32, 8]
    assert batches(CHIPS["h100"].memory) == [8, 16, 4]
    assert batches(40 * 2**30) == [2, 4, 1]
    with pytest.raises(ValueError, match="not even one row of 100,000 tokens fits into 20 GiB"):
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


def by_target(results: Record, **changes: Any) -> dict[str, dict[str, str]]:
    setup = replace(dry_setup(), **{"tiny": False, **changes})
    return {one["target"]: one for one in targets(results, setup)}


def test_drafts_of_every_precision_have_a_forecast_beside_what_was_measured_or_not() -> None:
    setup = replace(dry_setup(), tiny=False)
    results = {
        "precision-4096-int8": cell_result(1, 4096, "guided", 1.3) | {"quantize": "int8"},
        "cell-57344-guided": cell_result(8, 57344, "guided", 2.9),
        "precision-57344-float8": {"arm": "guided-float8", "skipped": "it does not run here"},
    }
    rows = {(one["cell"], one["draft's weights"]): one for one in by_precision(results, setup)}
    measured = {where: one["measured, replay"] for where, one in rows.items()}
    own = "bf16, the target's own"
    assert len(rows) == 4 * 4 and measured["1x4096", "int8"] == "1.30x" and measured["8x57344", own] == "2.90x"
    assert measured["16x57344", "float8"] == "not run: it does not run here"
    assert sorted(set(measured.values())) == ["1.30x", "2.90x", "not measured", "not run: it does not run here"]
    for cell, least in (("1x4096", 1.4), ("1x32768", 1.5), ("32x28672", 1.15)):  # what few bits bring, by the model
        ratios = {name: float(rows[cell, name]["forecast: good public kernels"][:-1]) for name in (own, "int8", "int4")}
        assert ratios["int4"] > ratios["int8"] > ratios[own] and ratios["int4"] > least * ratios[own]
    assert {one["measured, replay"] for one in by_precision(results, dry_setup())} == {
        "not measured", "not run: it does not run here"
    }  # fmt: skip


def test_every_target_stands_beside_what_was_measured_and_predicted() -> None:
    listed = by_target(MEASURED)
    assert {name: (one["measured"], one["met"]) for name, one in listed.items()} == {
        "plain step, share of the roofline": ("90% (16x57344 snapkv)", "yes"),
        "draft step, share of the roofline": ("60% (16x57344 snapkv)", "no"),
        "T_V / T_T at gamma 5": ("1.20 (32x28672 streaming)", "no"),
        "judging, commit and sampling": ("0.05 ms (32x28672 streaming)", "yes"),
        "replay: speed over plain decoding, guided 1024, 16x57344": ("not measured", "-"),
        "replay: speed over plain decoding, snapkv 2048, 16x57344": ("2.20x", "no"),
        "replay: speed over plain decoding, streaming 512, 32x28672": ("2.00x", "yes"),
    }
    assert all(one["good public kernels"] != "-" for name, one in listed.items() if not name.startswith("judging"))


def test_targets_follow_the_cells_that_were_run_and_need_no_memory_where_none_was() -> None:
    on_80_gb = by_target({"cell-57344-guided": cell_result(8, 57344, "guided", 2.5)})
    found = on_80_gb["replay: speed over plain decoding, guided 1024, 8x57344"]
    assert (found["measured"], found["met"]) == ("2.50x", "no")
    full = by_target({})["replay: speed over plain decoding, guided 1024, 16x57344"]
    assert float(found["expected"][:-1]) < float(full["expected"][:-1])
    assert "replay: speed over plain decoding, guided 1024, 1x57344" in by_target({}, free=16 * 2**30)


def test_the_summary_says_what_is_replayed_and_what_was_not_measured(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path, device="NVIDIA H200", tiny=False)
    for name, result in MEASURED.items():
        found(ledger, name, result)
    setup = replace(dry_setup(), tiny=False, known=results_of(ledger))
    page = summary(ledger, setup, list(STAGES.values()), [])
    lines = page.splitlines()
    guided = next(line for line in lines if "guided 1024" in line)
    assert "not measured" in guided and guided.startswith("| replay: ")
    assert any("2.00x (1.90 to 2.10)" in line and "replay of streaming" in line for line in lines)
    for line in lines:  # a figure that was replayed says so in its row or in the row of its column's names
        assert "2.00x" not in line or "replay" in line
    assert "- test-rounds: not run yet" in lines
    assert "dry run" not in page


def test_what_a_sweep_says_of_its_prompts_stands_below_its_figures(tmp_path: Path) -> None:
    sweep = Path(__file__).resolve().parents[4] / "benchmarks" / "cpu" / "smollm2" / "sweep.json"
    shared = json.loads(sweep.read_text())["points"][0]
    notes = {2000: None, 16000: "the text has 6,001 tokens: rows of 16,000 repeat it, which makes drafting easier"}
    points = [shared | {"batch": 8 * i, "context": c, "note": notes[c]} for i in (1, 2) for c in notes]
    ledger = a_ledger(tmp_path)
    found(ledger, "bundled", {"points": points})
    lines = summary(ledger, dry_setup(), [], []).splitlines()
    assert lines.count(f"- {notes[16000]}") == 1 and "- None" not in lines
    assert lines.index(f"- {notes[16000]}") > max(i for i, line in enumerate(lines) if "| 16,000 | 16 |" in line)


def test_a_dry_run_claims_nothing(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path)
    for name, result in MEASURED.items():
        found(ledger, name, result)
    page = summary(ledger, replace(dry_setup(), known=results_of(ledger)), [], [])
    aims = page[page.index("## Targets") : page.index("## Rounds")]
    assert aims.count("not measured") == len(AIMS) == 7 and "yes" not in aims
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
    ledger = a_ledger(tmp_path)
    found(ledger, "time-decode-57344", dry_run("time-decode-57344"))
    rates = {"copy": 1e3, "read": 1e3, "matmul": 1e3}
    for known, share in ({}, "| - |"), ({"environment": {}, "rates": rates}, "% |"):
        if known:
            found(ledger, "machine", known)
        lines = summary(ledger, replace(dry_setup(), known=results_of(ledger)), [], []).splitlines()
        row = next(line for line in lines if line.startswith("| decode_attention |"))
        assert f"{share} 2 x 512 |" in row


def test_the_page_says_how_many_tests_passed_what_they_saw_and_which_failed(tmp_path: Path) -> None:
    ledger, passed = a_ledger(tmp_path), {"outcome": "passed", "seconds": 2.0, "seen": {}}
    tests = {
        "test_smoke.py::test_redrafted": {**passed, "seen": {"seen": "9 rounds | gamma 4"}},
        "test_smoke.py::test_closed": {**passed, "outcome": "failed", "said": "x\nE  assert 3 == 4\n\n"},
        "test_smoke.py::test_last": {"outcome": "did not end"},
    }
    found(ledger, "test-smoke", {"ok": False, "tree": "today", "tests": tests})
    lines = summary(ledger, dry_setup(), [STAGES["test-smoke"], STAGES["machine"]], []).splitlines()
    assert "| test-smoke | 3 | 1 | 4 |" in lines
    assert "- **test_smoke.py::test_closed**: failed; `E  assert 3 == 4`" in lines
    assert "- **test_smoke.py::test_last**: did not end; it said nothing" in lines
    assert "- test_smoke.py::test_redrafted: 9 rounds | gamma 4" in lines
    assert lines[lines.index("## Missing") + 2 :][:2] == [
        "- test-smoke: a test has not passed",
        "- machine: not run yet",
    ]


def test_the_readme_holds_the_targets_that_the_cost_model_gives_now() -> None:
    """python scripts/gpu_suite.py OUT --device cpu --tiny --stages machine writes them into OUT/summary.md."""
    readme = Path(__file__).resolve().parents[4] / "benchmarks" / "h200" / "README.md"
    written = [line for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert written == [*table(targets({}, dry_setup())), *table(by_precision({}, dry_setup()))]
