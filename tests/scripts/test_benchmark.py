"""scripts/benchmark.py as a user types it: a sweep, the draft budget, whether it is lossless, and pictures of files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import benchmark
from flags import gammas, sizes
from gpt_fast_sd import DraftConfig, EngineConfig
from gpt_fast_sd.model import save_hugging_face
from gpt_fast_sd.serving.stats import EngineStats
from measuring import modes, points, turns
from measuring.chips import Chip, Rates
from measuring.forecast import System
from measuring.grid import Point, Setting, name_of
from tests.helpers import tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "cpu"
Record = dict[str, Any]
SHORT = ["--no-compile", "--max-new-tokens", "8", "--pairs", "2", "--budget", "16", "--gamma", "2"]
FLAGS = [*SHORT, "--synthetic"]
BUDGET = ["--sweep", "budget", "--no-compile", "--batch", "2", "--context", "96", "--max-new-tokens", "6"]
LOSSLESS = ["--lossless", "--no-compile", "--prompts", "3", "--longest", "90", "--max-new-tokens", "5", "--batch", "2"]
CHIP = Rates(copy=2e9, read=1e9, matmul=4e9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hugging_face(tiny_model(), folder, dtype=torch.float32)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are not measured: that takes seconds."""
    monkeypatch.setattr(points, "rates_here", lambda *_: CHIP)


def run(model: Path | None, *flags: str) -> int:
    """The exit code of a run in this process; without a model the flags are all there are."""
    try:
        benchmark.main([*(["--model", str(model), *FLAGS] if model else []), *flags])
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code
    return 0


def refusal(capsys: pytest.CaptureFixture[str], model: Path | None, *flags: str) -> str:
    """The one line on stderr of a run that must exit with 2 and print nothing else."""
    assert run(model, *flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    line: str = err.strip().splitlines()[-1]
    return line


def keys(document: Record) -> list[tuple[int, int, str]]:
    return [(r["batch"], r["context"], r["policy"]) for r in document["points"]]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_every_point_is_in_the_file_and_in_the_table(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plots = tmp_path / "sweep.json", tmp_path / "plots"
    sweep = ["--batch", "1,2", "--context", "40,300", "--draft", "streaming,lookup"]
    assert run(model, *sweep, "--json", str(file), "--plots", str(plots)) == 0
    document: Record = json.loads(file.read_text())
    assert set(document) == {"benchmark", "settings", "environment", "points", "lengths"}
    assert sorted(keys(document)) == sorted(
        (b, c, d) for b in (1, 2) for c in (40, 300) for d in ("streaming", "lookup")
    )
    for point in document["points"]:
        assert point["status"] == "measured" and point["dtype"] == point["kv_dtype"] == "fp32"
        assert point["lossless"] == {
            "compared": True, "rows": point["batch"], "equal": point["batch"], "differences": []
        }  # fmt: skip
        assert [len(ratios) for ratios in point["ratios"].values()] == [2, 2]
        completion = point["speedup"]["completion"]
        assert completion["min"] <= completion["median"] <= completion["max"]
        assert set(point["plain"]) == set(point["speculative"])
        ms = point["speculative"]["round_ms"]
        assert ms["draft"] + ms["verify"] + ms["host"] == pytest.approx(ms["round"], rel=0.2)
        for way in ("plain", "speculative"):
            speed, wait = point[way]["tokens_per_second"]["completion"], point[way]["ms_per_token"]["completion"]
            assert speed * wait == pytest.approx(1e3 * point["batch"])
        assert point["plain"]["tokens_per_round"] == 1 <= point["speculative"]["tokens_per_round"] <= 3
        assert 0 < point["distinct_4grams"]["plain"] == point["distinct_4grams"]["speculative"] <= 1
        assert len(point["acceptance_by_position"]) == 2 and set(point["rounds_by_gamma"]) <= {"0", "1", "2"}
        assert 0 < point["prefill"]["tokens_computed"] <= point["prefill"]["tokens_held"]
        assert point["memory"]["kv_in_use_bytes"] == point["batch"] * (point["context"] + 8) * 2 * 2 * 2 * 8 * 4
        assert point["memory"]["kv_cache_bytes"] > point["memory"]["kv_in_use_bytes"]
        assert point["memory"]["peak_bytes"] > point["memory"]["kv_cache_bytes"]
        assert point["collectives_per_step"] == {}
        assert point["predicted"]["plain_ms"] > 0 and point["predicted"]["speedup"] > 0
        assert point["machine"] == {"bandwidth": 2e9, "peak": 4e9}
    kinds = [(r["kind"], r["draft"], r["batch"]) for r in document["lengths"]]
    assert len(kinds) == 6 and ("critical length", "streaming 16, gamma 2", None) in kinds
    for name in ("speedup_by_batch", "speedup_by_context", "throughput_latency"):
        assert (plots / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.count("streaming 16, gamma 2") >= 9  # as measured, in the table, and the critical length
    assert "streaming 16, gamma 2: critical length" in out and "break-even at batch 1" in out
    assert "12 of 12 rows equal plain decoding, token for token" in out


@pytest.mark.usefixtures("quick")
def test_capture_seconds_are_kept_out_of_speeds(
    model: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, results = turns.run, tmp_path / "out.json"

    def capturing(*args: Any, **kwargs: Any) -> turns.Run:
        one = done(*args, **kwargs)
        one.stats.capture_seconds = 1.5
        return one

    flags = ["--batch", "1", "--context", "40", "--draft", "streaming", "--json", str(results)]
    assert run(model, *flags) == 0
    assert "capturing" not in capsys.readouterr().out
    monkeypatch.setattr(turns, "run", capturing)
    results.unlink()
    assert run(model, *flags) == 0
    (point,) = json.loads(results.read_text(encoding="utf-8"))["points"]
    assert point["capture_seconds"] == 6 * 1.5  # a short run of each kind, and two pairs
    assert "capturing rounds as CUDA graphs took 9.0 s" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_smaller_model_and_an_early_exit_draft_beside_the_others(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, drafts = tmp_path / "sweep.json", "streaming,standalone,early_exit,hierarchy"
    argv = ["--batch", "2", "--context", "40", "--draft", drafts, "--draft-model", str(model), "--json", str(file)]
    assert run(model, *argv) == 0
    points = {r["policy"]: r for r in json.loads(file.read_text())["points"]}
    assert all(r["status"] == "measured" and r["lossless"]["equal"] == 2 for r in points.values())
    assert all(r["predicted"]["speedup"] > 0 for r in points.values())
    assert "standalone 16, gamma 2" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_sweep_that_was_interrupted_goes_on_where_it_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, sweep = tmp_path / "sweep.json", ["--batch", "1,2", "--context", "40,60"]
    original, measured = benchmark.BySize.measure, []

    def interrupted(mode: Any, point: Point, *others: Any) -> Record:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((point.batch, point.context))
        return original(mode, point, *others)

    monkeypatch.setattr(benchmark.BySize, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, *sweep, "--json", str(file))
    before: Record = json.loads(file.read_text())
    assert [key[:2] for key in keys(before)] == measured == [(1, 40), (1, 60), (2, 40)]
    measured.clear()
    assert run(model, *sweep, "--json", str(file)) == 0
    assert measured == [(2, 60)]
    after: Record = json.loads(file.read_text())
    assert after["points"][:3] == before["points"]
    assert "3 of 4 points are in" in capsys.readouterr().out
    assert run(model, *sweep, "--json", str(file), "--batch", "1,3") == 0  # more may be asked for
    assert measured == [(2, 60), (3, 40), (3, 60)]
    capsys.readouterr()
    assert "was measured with seconds 0.0, not 0.5" in refusal(
        capsys, model, *sweep, "--json", str(file), "--seconds", "0.5"
    )
    other = [*sweep, "--json", str(file), "--pairs", "1"]
    assert "was measured with pairs 2, not 1: name another file, or start over with --fresh" in refusal(
        capsys, model, *other
    )
    measured.clear()
    assert run(model, *other, "--fresh", "--batch", "1") == 0
    assert measured == [(1, 40), (1, 60)] and len(json.loads(file.read_text())["points"]) == 2


@pytest.mark.usefixtures("quick")
def test_several_temperatures_share_prompts_that_are_prefilled_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    argv = ["--batch", "2", "--context", "40,300", "--json", str(file)]
    assert run(model, *argv, "--temperature", "0,0.8") == 0
    points = json.loads(file.read_text())["points"]
    assert [(r["context"], r["temperature"]) for r in points] == [(40, 0.0), (40, 0.8), (300, 0.0), (300, 0.8)]
    assert [r["prefill"]["tokens_computed"] > 0 for r in points] == [True, False, True, False]
    assert [r["lossless"]["compared"] for r in points] == [True, False, True, False]
    out = capsys.readouterr().out
    assert "streaming 16, gamma 2, T 0.8: " in out and "4 of 4 rows equal plain decoding" in out
    assert run(model, *argv, "--temperature", "1") == 0  # more may be asked for
    assert len(json.loads(file.read_text())["points"]) == 6


@pytest.mark.usefixtures("quick")
def test_a_file_with_one_temperature_for_all_points_is_continued(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    argv = ["--batch", "1", "--context", "40", "--json", str(file), "--temperature"]
    assert run(model, *argv, "0.8") == 0
    document: Record = json.loads(file.read_text())
    document["settings"]["temperature"] = document["points"][0].pop("temperature")
    file.write_text(json.dumps(document))
    assert run(model, *argv, "0,0.8") == 0
    assert [r["temperature"] for r in json.loads(file.read_text())["points"]] == [0.8, 0.0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("flags", [[], ["--synthetic"], ["--sweep", "precision"]])
def test_a_batch_that_no_memory_holds_is_refused_before_its_prompts_are_made(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def made(*args: Any) -> None:
        raise AssertionError("prompts were made")

    monkeypatch.setattr(benchmark.prompts, "round_the_text", made)
    monkeypatch.setattr(modes, "MOST_RANDOM", 1000)
    assert run(model, "--batch", "1000000000", "--context", "40", *flags) == 2
    out, err = capsys.readouterr()
    assert "skipped: batch_size 1000000000 x max_seq_len" in out and "nothing could be measured" in err


@pytest.mark.usefixtures("quick")
def test_a_point_that_does_not_fit_or_fails_is_recorded_and_the_others_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, broken = benchmark.BySize.measure, [60]

    def sometimes(mode: Any, point: Point, *others: Any) -> Record:
        if point.context in broken:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")
        return original(mode, point, *others)

    monkeypatch.setattr(benchmark.BySize, "measure", sometimes)
    file = tmp_path / "sweep.json"
    argv = ["--batch", "1", "--context", "40,60,80,4090", "--json", str(file)]
    assert run(model, *argv) == 0
    points = {r["context"]: r for r in json.loads(file.read_text())["points"]}
    assert [points[context]["status"] for context in (40, 60, 80, 4090)] == ["measured", "failed", "measured", "failed"]
    assert points[4090]["reason"] == "4,090 tokens and 8 new ones are over 4,096 positions"
    assert points[60]["reason"] == "OutOfMemoryError: out of memory: tried to allocate 2 GiB"
    out = capsys.readouterr().out
    assert "skipped: 4,090 tokens and 8 new ones are over 4,096 positions" in out
    broken.clear()
    assert run(model, *argv) == 0  # what failed is tried again
    statuses = [r["status"] for r in json.loads(file.read_text())["points"]]
    assert sorted(statuses) == ["failed", "measured", "measured", "measured"]
    assert "2 of 4 points are in" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_output_that_is_not_plain_decodings_is_an_error_in_fp32(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = turns.run

    def lossy(engine: Any, *others: Any, speculate: bool) -> turns.Run:
        done = original(engine, *others, speculate=speculate)
        if speculate:
            done.outputs[1][3] += 1
        return done

    monkeypatch.setattr(turns, "run", lossy)
    argv = ["--batch", "2", "--context", "40"]
    assert run(model, *argv) == 1
    out, err = capsys.readouterr()
    assert "1 of 2 rows equal plain decoding" in out and "1 rows differ where they must not" in err
    assert run(model, *argv, "--dtype", "bf16") == 0  # there rounding may do so: it is counted
    assert "1 of 2 rows equal plain decoding" in capsys.readouterr().out
    assert run(model, *argv, "--temperature", "0.8") == 0
    assert "outputs are sampled and not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch", "0"], "expected whole numbers of at least 1"),
        (["--batch", "four"], "expected whole numbers of at least 1"),
        (["--context", "1"], "a context has at least 2 tokens, got 1"),
        (["--context", "1m"], "as in 1k,4k,500; got '1m'"),
        (["--draft", "psychic"], "there is no policy 'psychic'"),
        (["--draft", "off"], "there is no policy 'off'"),
        (["--draft", "standalone"], "needs draft_model"),
        (["--budget", "8"], "budget must be at least 12 for streaming, got 8"),
        (["--gamma", "17"], "gamma must be from 1 to 16, got 17"),
        (["--gamma", "few"], "'few'"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--temperature", "0,hot"], "expected numbers, as in 0,0.8; got '0,hot'"),
        (["--pairs", "0"], "--pairs 0 counts acceptance, which is for --sweep budget"),
        (["--dtype", "fp8"], "'fp8'"),
        (["--device", "tpu"], "'tpu'"),
        (["--tp", "3"], "tp must divide the number of processes"),
        (["--json", "nowhere/x.json"], "there is no folder"),
        (["--plots", "README.md"], "--plots needs a folder"),
        (["--model", "nowhere"], "no folder nowhere"),
        (["--text", "README.md"], "exclude each other"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in refusal(capsys, model, *flags)


@pytest.mark.slow
def test_as_a_program_it_measures_a_text_and_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "--no-compile", "--batch", "1,2", "--gamma", "2"]
    command += ["--pairs", "1", "--draft", "lookup", "--json", str(file)]
    text = tmp_path / "text.txt"
    text.write_text("The captain wrote in his journal. " * 40, encoding="utf-8")
    command += ["--text", str(text), "--context", "90", "--max-new-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "GB/s and computes" in done.stdout and "rows equal plain decoding, token for token" in done.stdout
    points = json.loads(file.read_text())["points"]
    assert [r["batch"] for r in points] == [1, 2] and all(r["machine"]["bandwidth"] > 1e8 for r in points)


# ---- over precisions -------------------------------------------------------------------------------------------------

PRECISION = ["--sweep", "precision", "--precisions", "none,none/int8,int8,int8/int8"]


@pytest.mark.usefixtures("quick")
def test_each_precision_is_measured_over_its_own_plain_decoding_and_over_the_unquantized_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, sweep = tmp_path / "precision.json", [*PRECISION, "--dtype", "bf16", "--batch", "2", "--context", "40,80"]
    twice = [*sweep, "--precisions", "none,none/int8,int8,int8/none,int8/int8,none"]  # what is named twice is one
    assert run(model, *twice, "--json", str(file), "--plots", str(tmp_path)) == 0
    points = json.loads(file.read_text())["points"]
    assert [(r["status"], r["context"]) for r in points] == [("measured", 40), ("measured", 80)]
    for point in points:
        bf16, draft8, cache8, both = point["precisions"]
        assert [one["precision"] for one in point["precisions"]] == ["none", "none/int8", "int8", "int8/int8"]
        assert [one["target"] for one in point["precisions"]] == ["none", "none", "int8", "int8"]
        for one in (bf16, draft8):  # their target is the unquantized one
            assert one["speedup"]["own"] == one["speedup"]["unquantized"]
            assert one["plain_over_unquantized"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        for one in (cache8, both):
            assert one["speedup"]["own"] != one["speedup"]["unquantized"]
            read = one["plain"]["kv_bytes_per_token"] / bf16["plain"]["kv_bytes_per_token"]
            assert read == pytest.approx((8 + 2) / 16)  # heads of 8 bytes and a scale
        assert all(len(one["speculative"]["runs"]["completion"]) == 2 for one in point["precisions"])
        assert draft8["plain"] == bf16["plain"] and both["plain"] == cache8["plain"]
    out = capsys.readouterr().out
    assert out.count("int8/int8") >= 4 and "of its own plain" in out and "of unquantized plain" in out
    assert (tmp_path / "precisions.png").read_bytes().startswith(b"\x89PNG")
    assert run(model, *sweep, "--json", str(file)) == 0  # nothing is left to do
    assert "2 of 2 points are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--precisions", "none"], "--precisions does nothing with --sweep size"),
        ([*PRECISION, "--kv-dtype", "int8"], "--kv-dtype is what --precisions varies: name it there"),
        ([*PRECISION, "--precisions", "int8/int8/int8/int8"], "a precision is CACHE, CACHE/DRAFTS or"),
        ([*PRECISION, "--precisions", "int7"], "kv_dtype"),
        ([*PRECISION, "--precisions", "none/int7"], "quantize"),
        ([*PRECISION, "--draft", "lookup"], "quantize"),
        ([*PRECISION, "--precisions", "none,none/float8"], "quantize 'float8' of a draft runs on device 'cuda'"),
        ([*PRECISION, "--precisions", "none/int4/int8"], "needs a target with plain weights, or of that precision"),
        ([*PRECISION, "--precisions", "int8", "--dtype", "fp16"], "kv_dtype 'int8' is not for models in fp16"),
        ([*PRECISION, "--draft", "quantized"], "measures caches in bytes, and quantized reads planes"),
        ([*PRECISION, "--draft-kv-bits", "4"], "measures caches in bytes, and streaming reads planes"),
    ],
)
def test_a_precision_that_makes_no_sense_is_one_sentence(
    model: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, model, *flags)


# ---- over the draft budget -------------------------------------------------------------------------------------------


def test_every_policy_and_budget_is_a_point_and_what_cannot_be_built_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, policies = tmp_path / "frontier.json", "streaming,snapkv,lookup,standalone"
    argv = ["--draft", policies, "--budget", "16,64", "--pairs", "1", "--dtype", "fp32"]
    assert run(None, *BUDGET, *argv, "--json", str(file), "--plots", str(tmp_path)) == 0
    document: Record = json.loads(file.read_text())
    points = [(r["policy"], r["budget"]) for r in document["results"]]
    assert points == [("streaming", 16), ("streaming", 64), ("snapkv", 64), ("lookup", None)]
    assert set(document["skipped"]) == {"snapkv 16", "standalone 16", "standalone 64"}
    for result in document["results"]:
        assert 0 <= result["acceptance_rate"] <= 1 <= result["tokens_per_round"] <= 5
        assert 0 < result["distinct_4grams"]["plain"] <= 1
        assert result["distinct_4grams"]["speculative"] == result["distinct_4grams"]["plain"]  # greedy, in fp32
        assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]
        assert set(result["speculative_ms"]) == {"round", "draft", "verify", "host"}
        assert result["kv_bytes_per_token"]["plain"] > 0
    assert document["benchmark"] == "frontier" and document["transformer"]["n_layers"] == 6
    assert document["settings"]["context"] == 96 and not document["settings"]["compiled"]
    assert (tmp_path / "budgets.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "skipped snapkv 16: budget must be at least 64 for snapkv, got 16" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("streaming", "snapkv", "lookup"))] == [
        ["streaming", "16"], ["streaming", "64"], ["snapkv", "64"], ["lookup", "-"],
    ]  # fmt: skip


def test_without_pairs_acceptance_is_that_of_timed_runs_and_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, original = [], turns.run

    def noting(*args: Any, speculate: bool = True, **others: Any) -> Any:
        runs.append("PS"[speculate])
        return original(*args, speculate=speculate, **others)

    monkeypatch.setattr(turns, "run", noting)
    monkeypatch.setattr(modes, "run", noting)
    found = []
    for pairs in ("1", "0"):
        file = tmp_path / f"{pairs}.json"
        argv = ["--draft", "streaming,lookup", "--budget", "64", "--pairs", pairs, "--json", str(file)]
        assert run(None, *BUDGET, *argv, "--temperature", "0.8") == 0
        found.append(json.loads(file.read_text())["results"])
    assert "".join(runs) == 2 * "SPPS" + "P" + "SS"
    for timed, counted in zip(*found, strict=True):
        assert timed["ratio"] and counted["ratio"] is counted["plain_ms"] is counted["speculative_ms"] is None
        for name in ("acceptance_rate", "acceptance_by_position", "tokens_per_round", "distinct_4grams"):
            assert timed[name] == counted[name]
    assert "nothing was timed" in capsys.readouterr().out
    file = tmp_path / "0.json"
    argv = ["--draft", "streaming,lookup", "--pairs", "0", "--temperature", "0.8", "--json", str(file)]
    runs.clear()
    assert run(None, *BUDGET, *argv, "--budget", "32,64") == 0  # more may be asked for
    assert "".join(runs) == "PS" and len(json.loads(file.read_text())["results"]) == 3
    assert "2 of 3 points are in" in capsys.readouterr().out
    assert "was measured with page 16, not 32" in refusal(capsys, None, *BUDGET, *argv, "--page", "32")


def test_times_of_another_machine_or_of_other_pairs_are_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    argv = [*BUDGET, "--pairs", "0", "--draft", "lookup", "--json", str(file)]
    assert run(None, *argv) == 0
    written: Record = json.loads(file.read_text())
    capsys.readouterr()
    for name, value in (
        ("threads", 64),
        ("tp", 8),
        ("device", "cuda"),
        ("machine", {"cpu": "another"}),
        ("seconds", 5.0),
    ):
        file.write_text(json.dumps(written | {"settings": written["settings"] | {name: value}}))
        assert f"was measured with {name} {value}, not" in refusal(capsys, None, *argv)
    for name in ("threads", "tp", "device", "machine", "seconds"):  # as files of before they were told
        del written["settings"][name]
    file.write_text(json.dumps(written))
    assert run(None, *argv) == 0
    assert "1 of 1 points are in" in capsys.readouterr().out
    file.write_text(json.dumps(written | {"environment": written["environment"] | {"threads": 64}}))
    assert "was measured with threads 64, not" in refusal(capsys, None, *argv)


def test_several_texts_share_the_rows(tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path, sentence in zip(texts, ("The captain wrote. ", "Rain fell on the hills. "), strict=True):
        path.write_text(sentence * 60, encoding="utf-8")
    file = tmp_path / "x.json"
    argv = ["--text", *map(str, texts), "--pairs", "0", "--draft", "lookup", "--json", str(file)]
    assert run(None, *BUDGET, *argv) == 0
    assert json.loads(file.read_text())["settings"]["text"] == "a.txt, b.txt"


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_policy_emits_what_plain_decoding_emits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lossless.json"
    assert run(None, *LOSSLESS, "--draft", "streaming,hierarchy/standalone", "--json", str(file)) == 0
    document: Record = json.loads(file.read_text())
    plain, *policies = document["results"]
    assert plain["policy"] == "off" and [len(tokens) for tokens in plain["outputs"]] == [5, 5, 5]
    assert [r["policy"] for r in policies] == ["streaming", "hierarchy/standalone"]
    assert all(r["equal"] == r["prompts"] == 3 and r["differences"] == [] for r in policies)
    assert document["settings"]["dtype"] == "fp32" and document["benchmark"] == "speculation lossless"
    assert "draft_weights" in policies[1] and "draft_weights" not in policies[0]
    assert "3/3" in capsys.readouterr().out


def go_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation says another token than plain decoding, at one place."""
    decode = benchmark.Lossless.decode

    def astray(mode: Any, engine: Any, what: str, *, speculate: bool) -> turns.Run:
        one = decode(mode, engine, what, speculate=speculate)
        one.outputs[1][2] += speculate
        return one

    monkeypatch.setattr(benchmark.Lossless, "decode", astray)


def test_a_divergence_is_printed_with_its_gap_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lossless.json"
    go_astray(monkeypatch)
    argv = [*LOSSLESS, "--draft", "lookup", "--json", str(file)]
    assert run(None, *argv) == 1
    out, err = capsys.readouterr()
    assert "not token-identical to plain decoding: lookup" in err
    assert "prompt 1 from token 2 on (logits" in out and "2/3" in out
    (difference,) = json.loads(file.read_text())["results"][1]["differences"]
    assert difference["speculative"] == difference["plain"] + 1 and difference["gap"] > 0
    monkeypatch.setattr(benchmark.Lossless, "decode", None)  # all of it is in the file
    assert run(None, *argv) == 1


def test_in_16_bits_a_near_tie_is_counted_and_anything_further_apart_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lossless.json"
    go_astray(monkeypatch)
    argv = [*LOSSLESS, "--draft", "lookup", "--json", str(file), "--dtype", "bf16"]
    run(None, *argv)
    written: Record = json.loads(file.read_text())
    for gap, code in ((0.1, 0), (0.3, 1)):
        (difference,) = written["results"][1]["differences"]
        difference["gap"] = gap
        file.write_text(json.dumps(written))
        capsys.readouterr()
        assert run(None, *argv) == code
        assert "2/3" in capsys.readouterr().out


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*BUDGET, "--text", "nowhere.txt"], "nowhere.txt: No such file"),
        ([*BUDGET, "--context", "5000"], "tokens, but 2 prompts of 5,000 need 9,998"),
        ([*BUDGET, "--context", "1"], "a context of 1 does not fit: from 2 to 16,378"),
        ([*BUDGET, "--context", "100,200"], "--sweep budget measures with one --context, got 2"),
        ([*BUDGET, "--gamma", "2,3"], "--sweep budget measures with one --gamma, got 2"),
        ([*BUDGET, "--budget", "8,64"], "budget must be at least 12 for streaming, got 8"),
        ([*BUDGET, "--synthetic"], "--sweep budget is about texts: leave --synthetic out"),
        ([*LOSSLESS, "--budget", "64,128"], "--lossless measures with one --budget, got 2"),
        ([*LOSSLESS, "--shortest", "99"], "prompts of 99 to 90 tokens"),
        ([*LOSSLESS, "--longest", "20000"], "tokens, too few for prompts of up to 20,000"),
        ([*LOSSLESS, "--temperature", "0.8"], "--lossless compares greedy outputs"),
        ([*LOSSLESS, "--draft", "standalone", "--draft-model", "nowhere"], "no folder nowhere"),
        (["--draw", "README.md", "--plots", "x"], "README.md holds no results of this program"),
        (["--draw", "x.json"], "--draw needs --plots DIR to draw into"),
        (["--text", "README.md", "README.md"], "two texts have one name"),
        ([*LOSSLESS, "--pairs", "9"], "benchmark.py: --pairs does nothing with --lossless: leave it out"),
        ([*LOSSLESS, "--seconds", "9"], "--seconds does nothing with --lossless"),
        ([*LOSSLESS, "--context", "99"], "--context does nothing with --lossless"),
        ([*LOSSLESS, "--plots", "x"], "--plots does nothing with --lossless"),
        ([*BUDGET, "--prompts", "9"], "--prompts does nothing with --sweep budget"),
        ([*BUDGET, "--pairs", "0", "--seconds", "9"], "--seconds goes on with pairs, and --pairs 0 times none"),
        (["--shortest", "9"], "--shortest does nothing with --sweep size"),
        (["--longest", "9"], "--longest does nothing with --sweep size"),
        (["--draw", "x.json", "--plots", "x", "--pairs", "9"], "--pairs does nothing with --draw"),
        (["--draw", "x.json", "--plots", "x", "--json", "y.json"], "--json does nothing with --draw: leave it out"),
        (["--draw", "x.json", "--plots", "x", "--no-compile"], "--no-compile does nothing with --draw"),
        (["--exit-layers", "1"], "exit_layers does nothing for streaming: leave it out"),
        (["--draft-model", "bundled"], "draft_model does nothing for streaming"),
        ([*BUDGET, "--draft", "quest,lookup", "--view", "full"], "view does nothing for quest and lookup"),
        (["--fresh"], "--fresh forgets what --json holds, and there is no --json"),
        (["--seconds", "inf"], "expected a positive number of seconds, got 'inf'"),
        (["--seconds", "nan"], "expected a positive number of seconds, got 'nan'"),
        (["--seconds", "0"], "expected a positive number of seconds, got '0'"),
    ],
)
def test_a_mistake_in_another_mode_is_one_sentence_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in refusal(capsys, None, *flags)


def test_an_empty_text_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt is empty" in refusal(capsys, None, "--text", str(tmp_path / "empty.txt"))


# ---- the pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "picture"),
    [
        (["sweep/sweep.json"], "speedup_by_context.png"),
        (["smollm2/acceptance_2000_t0.json", "smollm2/acceptance_4000_t0.json"], "acceptance.png"),
        (["speculation/speed_8000x1.json", "speculation/speed_16000x8.json"], "ratios.png"),
        (["speculation/auto_512.json"], "ratios.png"),
    ],
)
def test_files_in_the_repository_are_drawn(tmp_path: Path, files: list[str], picture: str) -> None:
    pytest.importorskip("matplotlib")
    assert run(None, "--draw", *(str(RESULTS / file) for file in files), "--plots", str(tmp_path)) == 0
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_sizes_and_gammas_are_read_as_they_are_written() -> None:
    assert sizes("4k,1K,500,4000") == [500, 1000, 4000]
    assert gammas("auto,6,4,6") == ["auto", 6, 4]


def test_help_names_who_may_draft_and_what_stands_in_for_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "who drafts; one of full, streaming" in shown and "hierarchy, hierarchy/standalone (default: str" in shown
    for said in (
        "streaming; all but full with --sweep budget, all with --lossless", "for each point (default: 3)",
        "256; 64,128,256,512 with --sweep budget; 64 with --lossless", "--lossless (default: 0; 1 with --lossless)",
    ):  # fmt: skip
        assert said in shown


def test_every_field_of_an_engine_and_a_draft_has_its_flag_or_follows_from_another() -> None:
    args = benchmark.parse([])
    here = {*vars(args), "compile", "max_seq_len", "policy", "cheap", "batch_size"}  # --no-compile, --context, --draft
    assert {name_of(f) for config in (EngineConfig, DraftConfig) for f in fields(config) if f.init} <= here | {"draft"}
    draft = ["--draft", "quest", "--page", "32", "--n-sink", "8", "--ngram", "5", "--refresh", "9"]
    given = benchmark.draft_fields(vars(benchmark.parse(draft)))
    assert (given["page"], given["n_sink"], given["ngram"], given["refresh"]) == (32, 8, 5, 9)


def test_without_a_text_the_bundled_document_is_shared_out_over_the_rows() -> None:
    args = benchmark.parse(["--sweep", "budget", "--no-compile"])
    mode = benchmark.ByBudget(benchmark.prepare(args))
    assert len(mode.prompts) == 4 and len({tuple(prompt) for prompt in mode.prompts}) == 4
    assert {len(prompt) for prompt in mode.prompts} == {len(mode.prompts[0])}
    assert 1000 <= len(mode.prompts[0]) <= 4096
    assert {point.setting.policy for point in mode.points} >= {"streaming", "snapkv", "quest", "guided", "lookup"}
    assert not mode.job.skipped


def test_the_prediction_is_the_rooflines_at_the_gammas_and_tokens_that_were_seen() -> None:
    chip = Chip(name="test", bandwidth=1e6, peak=1e15)
    system = System(model=tiny_config(), chip=chip, device="cpu", dtype="fp32", room=16)
    point = Point(batch=2, context=1000, setting=Setting(policy="streaming", budget=100), gamma=3)
    stats = EngineStats(decode_tokens=60, row_rounds=20, rounds=10, rounds_by_gamma={0: 2, 3: 8})
    weights = 4 * (2 * (2 * 32 * 8 * 6 + 3 * 32 * 48) + 258 * 32)
    entry = 2 * 2 * 2 * 2 * 8 * 4  # of both rows
    plain, drafting = (weights + entry * 1008) / 1e3, (weights + entry * 100) / 1e3
    found = points.predict(point, system, point.setting.draft(3, {}), stats)
    assert found["plain_ms"] == pytest.approx(plain)
    assert found["round_ms"] == pytest.approx(plain + 0.8 * 3 * drafting)
    assert found["speedup"] == pytest.approx(3.0 * plain / (plain + 0.8 * 3 * drafting))
