"""scripts/benchmark.py as a user types it, and its arithmetic: packed prompts, steady speed, critical lengths."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import benchmark
from benchmark import Ceiling, Crossing, Mark, Point, crossing, lengths_of, pack, slope, steady_speed
from common import distinct_4grams
from flags import gammas, sizes
from frontier import Setting
from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.measuring.chips import Chip, Rates
from gpt_fast_sd.model import save_hugging_face
from gpt_fast_sd.stats import EngineStats
from tests.helpers import ByteTokenizer, random_ids, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
FLAGS = ["--no-compile", "--synthetic", "--max-new-tokens", "8", "--pairs", "2", "--budget", "16", "--gamma", "2"]
CHIP = Rates(copy=2e9, read=1e9, matmul=4e9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hugging_face(tiny_model(), folder, dtype=torch.float32)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are not measured: that takes seconds."""
    monkeypatch.setattr(benchmark, "measure", lambda *_, **__: CHIP)


def run(model: Path, *flags: str) -> int:
    """The exit code of a run in this process."""
    try:
        benchmark.main(["--model", str(model), *FLAGS, *flags])
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code
    return 0


def refusal(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> str:
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
    for name in ("speedup_by_batch", "speedup_by_context", "throughput_latency", "hero"):
        assert (plots / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.count("streaming 16, gamma 2") >= 9  # as measured, in the table, and the critical length
    assert "streaming 16, gamma 2: critical length" in out and "break-even at batch 1" in out
    assert "12 of 12 rows equal plain decoding, token for token" in out


@pytest.mark.usefixtures("quick")
def test_seconds_of_captures_are_told_apart_from_speeds(
    model: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, results = benchmark.run, tmp_path / "out.json"

    def capturing(*args: Any, **kwargs: Any) -> benchmark.Run:
        one = done(*args, **kwargs)
        one.stats.capture_seconds = 1.5
        return one

    flags = ["--batch", "1", "--context", "40", "--draft", "streaming", "--json", str(results)]
    assert run(model, *flags) == 0
    assert "capturing" not in capsys.readouterr().out
    monkeypatch.setattr(benchmark, "run", capturing)
    results.unlink()
    assert run(model, *flags) == 0
    (point,) = json.loads(results.read_text(encoding="utf-8"))["points"]
    assert point["capture_seconds"] == 6 * 1.5  # a short run of each kind, and two pairs
    assert "capturing rounds as CUDA graphs took 9.0 s" in capsys.readouterr().out


def test_a_smaller_model_and_an_early_exit_draft_beside_the_others(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, drafts = tmp_path / "sweep.json", "streaming,standalone,early_exit,hierarchy"
    argv = ["--batch", "2", "--context", "40", "--draft", drafts, "--draft-model", str(model), "--json", str(file)]
    assert run(model, *argv) == 0
    points = {r["policy"]: r for r in json.loads(file.read_text())["points"]}
    assert all(r["status"] == "measured" and r["lossless"]["equal"] == 2 for r in points.values())
    predicted = {policy: r["predicted"]["speedup"] for policy, r in points.items()}
    assert predicted.pop("hierarchy") is None and all(predicted.values())
    assert "standalone 16, gamma 2" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_sweep_that_was_interrupted_goes_on_where_it_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, sweep = tmp_path / "sweep.json", ["--batch", "1,2", "--context", "40,60"]
    original, measured = benchmark.measure_point, []

    def interrupted(job: Any, point: Point, *others: Any) -> Record:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((point.batch, point.context))
        return original(job, point, *others)

    monkeypatch.setattr(benchmark, "measure_point", interrupted)
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
    other = [*sweep, "--json", str(file), "--pairs", "1"]
    assert "was measured with pairs 2, not 1: name another file, or begin anew with --fresh" in refusal(
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
def test_a_file_with_one_temperature_for_all_points_is_gone_on_with(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    argv = ["--batch", "1", "--context", "40", "--json", str(file), "--temperature"]
    assert run(model, *argv, "0.8") == 0
    document: Record = json.loads(file.read_text())
    document["settings"]["temperature"] = document["points"][0].pop("temperature")
    file.write_text(json.dumps(document))
    assert run(model, *argv, "0,0.8") == 0
    assert [r["temperature"] for r in json.loads(file.read_text())["points"]] == [0.8, 0.0]


@pytest.mark.usefixtures("quick")
def test_a_point_that_does_not_fit_or_fails_is_recorded_and_the_others_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, broken = benchmark.measure_point, [60]

    def sometimes(job: Any, point: Point, *others: Any) -> Record:
        if point.context in broken:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")
        return original(job, point, *others)

    monkeypatch.setattr(benchmark, "measure_point", sometimes)
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
    original = benchmark.run

    def lossy(engine: Engine, *others: Any, speculate: bool) -> benchmark.Run:
        done = original(engine, *others, speculate=speculate)
        if speculate:
            done.outputs[1][3] += 1
        return done

    monkeypatch.setattr(benchmark, "run", lossy)
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
        (["--pairs", "0"], "expected a whole number of at least 1, got '0'"),
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


def test_a_file_of_something_else_is_left_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, said in (
        ("my notes", "is not JSON"),
        ('{"benchmark": "peers"}', "holds no results of this benchmark"),
    ):
        (tmp_path / "notes").write_text(content)
        assert said in refusal(capsys, model, "--json", str(tmp_path / "notes"))
        assert (tmp_path / "notes").read_text() == content


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


# ---- what was said ---------------------------------------------------------------------------------------------------


def test_text_that_repeats_itself_has_few_distinct_4grams() -> None:
    assert distinct_4grams([[1, 2, 3, 4, 5, 6]]) == 1.0
    assert distinct_4grams([[7] * 13]) == pytest.approx(0.1)  # ten times the same four
    assert distinct_4grams([[1, 2, 1, 2, 1, 2, 1]]) == pytest.approx(0.5)
    assert distinct_4grams([[7] * 13, [1, 2, 3, 4]]) == pytest.approx(0.55)  # every row counts alike
    assert distinct_4grams([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 1.0  # rows are not compared with each other
    assert distinct_4grams([[1, 2, 3], [1, 2, 3, 4]]) == 1.0  # nor do short ones count
    assert distinct_4grams([[1, 2, 3], []]) is None


# ---- the prompts -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 8), st.integers(2, 40), st.booleans())
def test_rows_begin_at_places_of_their_own_and_run_round_the_text(n_ids: int, n: int, length: int, bos: bool) -> None:
    ids = list(range(100, 100 + n_ids))
    prompts, note = pack(ids, n, length, 7 if bos else None)
    assert [len(prompt) for prompt in prompts] == [length] * n
    bodies = [prompt[1:] if bos else prompt for prompt in prompts]
    assert all(prompt[0] == 7 for prompt in prompts) or not bos
    for i, body in enumerate(bodies):
        start = body[0] - 100
        assert start == i * n_ids // n and body == [ids[(start + j) % n_ids] for j in range(len(body))]
    n_taken = sum(map(len, bodies))
    if n_taken <= n_ids:
        assert note is None and len({token for body in bodies for token in body}) == n_taken
    elif len(bodies[0]) <= n_ids:
        assert note is not None and "overlap" in note
    else:
        assert note is not None and "repeat it" in note


def test_shorter_prompts_are_the_beginnings_of_longer_ones_so_that_prefill_is_shared() -> None:
    ids = random_ids(900)
    short, long = pack(ids, 3, 80, 1)[0], pack(ids, 3, 600, 1)[0]
    assert [prompt[:80] for prompt in long] == short
    engine = Engine(tiny_model(), None, EngineConfig(batch_size=3, max_seq_len=620, compile=False))
    for prompts in (pack(ids, 3, 300, 1)[0], long):
        engine.generate(prompts, SamplingParams(max_tokens=2))
    assert engine.stats.prefill_tokens == 3 * (599 - 256)


def test_a_batch_shares_an_engine_but_for_draft_models_and_exact_mode() -> None:
    points = [
        Point(batch=batch, context=context, setting=Setting(policy=policy, budget=64), gamma=gamma)
        for batch in (1, 2)
        for policy in ("streaming", "standalone")
        for gamma in (4, 6)
        for context in (100, 200)
    ]
    shared = [*benchmark.groups(points, exact=False)]
    assert [len(group) for group in shared] == [4, 2, 2, 4, 2, 2]
    assert [point for group in shared for point in group] == points
    assert [len(group) for group in benchmark.groups(points, exact=True)] == [2, 2, 1, 1, 1, 1] * 2


def test_sizes_and_gammas_are_read_as_they_are_written() -> None:
    assert sizes("4k,1K,500,4000") == [500, 1000, 4000]
    assert gammas("auto,6,4,6") == ["auto", 6, 4]


# ---- steady speed ----------------------------------------------------------------------------------------------------


def stream_of(rounds: list[list[tuple[int, int, bool]]]) -> list[Mark]:
    """Marks of rounds a second apart, each a list of (row, tokens, is_last), its events a millisecond apart."""
    return [
        Mark(10.0 + i + 1e-3 * j, *event) for i, events in enumerate(rounds) for j, event in enumerate(events)
    ]  # fmt: skip


def test_steady_speed_leaves_out_the_first_round_and_whatever_comes_when_a_row_ends() -> None:
    rounds = [
        [(0, 9, False), (1, 9, False)],
        [(0, 2, False), (1, 3, False)],
        [(0, 4, False), (1, 1, False)],
        [(0, 1, False), (1, 1, True)],
        [(0, 5, False)],
        [(0, 5, True)],
    ]
    assert steady_speed(stream_of(rounds)) == pytest.approx((2 + 3 + 4 + 1) / 2.0)


def test_runs_of_a_round_or_two_have_no_steady_speed() -> None:
    assert steady_speed([]) is None
    assert steady_speed(stream_of([[(0, 3, True)]])) is None
    assert steady_speed(stream_of([[(0, 3, False)], [(0, 3, True)]])) is None


def test_what_is_timed_is_what_the_engine_streams() -> None:
    engine = Engine(tiny_model(), ByteTokenizer(), EngineConfig(batch_size=2, max_seq_len=64, compile=False))
    prompts, params = [random_ids(9), random_ids(5, seed=1)], [SamplingParams(max_tokens=12, ignore_eos=True)] * 2
    done = benchmark.run(engine, prompts, params, speculate=True)
    assert done.outputs == [c.tokens for c in engine.generate(prompts, params)]
    assert done.steady is not None and done.steady > 0
    assert done.completion == done.stats.decode_tokens_per_second


# ---- where it begins to pay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.1, 1.2, 1.3], Crossing(None, "below")),
        ([0.7, 0.8, 0.9], Crossing(None, "none")),
        ([0.9, 1.1, 1.2], Crossing(math.sqrt(1000 * 4000), "between")),
        ([0.9, 1.0, 1.2], Crossing(4000.0, "between")),
        ([0.5, 0.75, 1.25], Crossing(math.sqrt(4000 * 16000), "between")),
        ([1.2, 0.9, 1.1], Crossing(math.sqrt(4000 * 16000), "between")),  # from there on it stays above
        ([1.2, 1.1, 1.0], Crossing(None, "none")),
    ],
)
def test_a_crossing_is_where_the_line_stays_above_over_log2_of_the_context(
    values: list[float], expected: Crossing
) -> None:
    found = crossing([1000, 4000, 16000], values, 1.0)
    assert found.of_measured == expected.of_measured
    assert found.context == (pytest.approx(expected.context) if expected.context else None)


def test_a_crossing_says_so_where_there_is_none() -> None:
    assert Crossing(None, "below").phrase([1000, 4000]) == "below 1,000"
    assert Crossing(None, "none").phrase([1000, 4000]) == "none up to 4,000"
    assert Crossing(2345.6, "between").phrase([1000, 4000]) == "2,346"


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_the_slope_is_that_of_the_least_squares_line(ys: list[float]) -> None:
    xs = [float(i * i) for i in range(len(ys))]
    line = torch.linalg.lstsq(
        torch.tensor([[x, 1.0] for x in xs], dtype=torch.float64), torch.tensor(ys, dtype=torch.float64)[:, None]
    ).solution
    assert slope(xs, ys) == pytest.approx(float(line[0]), abs=1e-9)


def measured(batch: int, context: int, steady: float) -> Record:
    """As much of a point as the lengths are read from."""
    return {
        "batch": batch, "context": context, "policy": "streaming", "budget": 256, "gamma": 6,
        "speedup": {"steady": {"median": steady}, "completion": {"median": 0.0}},
    }  # fmt: skip


def test_the_critical_length_is_where_the_speedup_begins_to_grow_with_the_batch() -> None:
    """As MagicDec's figure: it falls with the batch at 1K, does not change at 2K, and rises at 8K."""
    table = {1000: [0.8, 0.7, 0.6], 2000: [0.9, 0.9, 0.9], 8000: [1.0, 1.4, 1.8]}
    points = [
        measured(batch, context, value)
        for context, row in table.items()
        for batch, value in zip((1, 4, 16), row, strict=True)
    ]
    *evens, critical = lengths_of(points)
    assert (critical["kind"], critical["context"], critical["of_measured"]) == ("critical length", 2000.0, "between")
    assert critical["slopes"] == pytest.approx([-0.05, 0.0, 0.2])
    assert [(r["kind"], r["batch"]) for r in evens] == [("break-even", batch) for batch in (1, 4, 16)]
    assert [r["phrase"] for r in evens] == ["none up to 8,000", "2,639", "2,333"]
    (alone,) = lengths_of(points[::3])  # one batch: it has no slope
    assert alone["kind"] == "break-even"


# ---- what it had to cost ---------------------------------------------------------------------------------------------


def test_the_prediction_is_the_rooflines_at_the_gammas_and_tokens_that_were_seen() -> None:
    config = tiny_config()
    chip = Chip(name="test", bandwidth=1e6, peak=1e15)
    ceiling = Ceiling(config=config, draft_config=None, chip=chip, weight_bytes=4.0, kv_bytes=4.0, tp=1)
    point = Point(batch=2, context=1000, setting=Setting(policy="streaming", budget=100), gamma=3)
    stats = EngineStats(decode_tokens=60, row_rounds=20, rounds=10, rounds_by_gamma={0: 2, 3: 8})
    weights = 4 * (2 * (2 * 32 * 8 * 6 + 3 * 32 * 48) + 258 * 32)
    entry = 2 * 2 * 2 * 2 * 8 * 4  # of both rows
    plain, drafting = (weights + entry * 1008) / 1e3, (weights + entry * 100) / 1e3
    found = ceiling.predict(point, 16, stats)
    assert found["plain_ms"] == pytest.approx(plain)
    assert found["round_ms"] == pytest.approx(plain + 0.8 * 3 * drafting)
    assert found["speedup"] == pytest.approx(3.0 * plain / (plain + 0.8 * 3 * drafting))

    def draft_ms(policy: str, budget: int | None = 100) -> float | None:
        return ceiling.draft_ms(replace(point, setting=Setting(policy=policy, budget=budget)), 1008.0)

    assert draft_ms("lookup", None) == 0.0 and draft_ms("hierarchy") is None
    assert draft_ms("full", None) == pytest.approx(plain)
    half = weights - 4 * (2 * 32 * 8 * 6 + 3 * 32 * 48)
    assert draft_ms("early_exit") == pytest.approx((half + entry / 2 * 100) / 1e3)
