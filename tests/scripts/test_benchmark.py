"""scripts/benchmark.py as a user types it: a sweep, the draft budget, whether it is lossless, and pictures of files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark
from flags import gammas, sizes
from inputs import prompts
from measuring import chips, modes, turns
from measuring.chips import Rates
from measuring.grid import Point
from tests.helpers import Patch, Printed, Refuses, ahead

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
SHORT = ["--no-compile", "--max-new-tokens", "8", "--pairs", "2", "--budget", "16", "--gamma", "2"]
BUDGET = ["--sweep", "budget", "--no-compile", "--batch", "2", "--context", "96", "--max-new-tokens", "6"]
LOSSLESS = ["--lossless", "--no-compile", "--prompts", "3", "--longest", "90", "--max-new-tokens", "5", "--batch", "2"]
PRECISION = ["--sweep", "precision", "--precisions", "none,none/int8,int8,int8/int8"]
PNG = b"\x89PNG"


class Bench:
    """Runs of benchmark.py in this process, whose results go into one file of a folder of their own."""

    def __init__(self, folder: Path, before: list[str], capsys: Printed, refuses: Refuses) -> None:
        self.folder, self.before, self.capsys, self.refuses = folder, before, capsys, refuses
        self.file = folder / "results.json"

    def argv(self, *flags: object) -> list[str]:
        """What is typed: the flags of all runs, and some of this one, a word or several in a text."""
        return [*self.before, "--json", str(self.file), *(word for flag in flags for word in str(flag).split())]

    def code(self, *flags: object) -> int:
        self.capsys.readouterr()
        try:
            benchmark.main(self.argv(*flags))
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            return stopped.code
        return 0

    def said(self, *flags: object, code: int = 0) -> str:
        """What a run prints that ends with this code."""
        assert self.code(*flags) == code
        return self.capsys.readouterr().out

    def refusal(self, *flags: object) -> str:
        return self.refuses(benchmark.main, *self.argv(*flags))

    @property
    def document(self) -> Record:
        found: Record = json.loads(self.file.read_text(encoding="utf-8"))
        return found

    @property
    def points(self) -> list[Record]:
        return list(self.document["points"])

    @property
    def results(self) -> list[Record]:
        return list(self.document["results"])


@pytest.fixture
def sweep(tiny_folder: Path, tmp_path: Path, capsys: Printed, refuses: Refuses, monkeypatch: Patch) -> Bench:
    """Of a tiny model and random tokens; the machine's rates are not measured, which takes seconds."""
    monkeypatch.setattr(modes, "rates_here", lambda *_: Rates(copy=2e9, read=1e9, matmul=4e9))
    return Bench(tmp_path, ["--model", str(tiny_folder), *SHORT, "--synthetic"], capsys, refuses)


@pytest.fixture
def by_budget(tmp_path: Path, capsys: Printed, refuses: Refuses) -> Bench:
    return Bench(tmp_path, BUDGET, capsys, refuses)


@pytest.fixture
def lossless(tmp_path: Path, capsys: Printed, refuses: Refuses) -> Bench:
    return Bench(tmp_path, LOSSLESS, capsys, refuses)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_every_point_is_in_the_file_and_in_the_table(sweep: Bench, monkeypatch: Patch) -> None:
    pytest.importorskip("matplotlib")
    plots, order = sweep.folder / "plots", list[str]()
    ahead(monkeypatch, modes, "rates_here", lambda *_: order.append("rates"))
    ahead(monkeypatch, modes.Job, "build", lambda *_: order.append("engine"))
    out = sweep.said("--batch 1,2 --context 40,300 --draft streaming,lookup --plots", plots)
    assert order == ["rates", "engine", "engine"]  # an engine fills the device
    assert set(sweep.document) == {"benchmark", "settings", "environment", "points", "lengths"}
    assert sorted((r["batch"], r["context"], r["policy"]) for r in sweep.points) == sorted(
        (b, c, d) for b in (1, 2) for c in (40, 300) for d in ("streaming", "lookup")
    )
    for point in sweep.points:
        rows = point["batch"]
        assert point["status"] == "measured" and point["dtype"] == point["kv_dtype"] == "fp32"
        assert point["lossless"] == {"compared": True, "rows": rows, "equal": rows, "differences": []}
        assert [len(ratios) for ratios in point["ratios"].values()] == [2, 2]
        completion = point["speedup"]["completion"]
        assert completion["min"] <= completion["median"] <= completion["max"]
        assert set(point["plain"]) == set(point["speculative"])
        ms = point["speculative"]["round_ms"]
        assert ms["draft"] + ms["verify"] + ms["host"] == pytest.approx(ms["round"], rel=0.2)
        for way in ("plain", "speculative"):
            speed, wait = point[way]["tokens_per_second"]["completion"], point[way]["ms_per_token"]["completion"]
            assert speed * wait == pytest.approx(1e3 * rows)
        assert point["plain"]["tokens_per_round"] == 1 <= point["speculative"]["tokens_per_round"] <= 3
        assert 0 < point["distinct_4grams"]["plain"] == point["distinct_4grams"]["speculative"] <= 1
        assert len(point["acceptance_by_position"]) == 2 and set(point["rounds_by_gamma"]) <= {"0", "1", "2"}
        assert 0 < point["prefill"]["tokens_computed"] <= point["prefill"]["tokens_held"]
        memory = point["memory"]
        assert memory["kv_in_use_bytes"] == rows * (point["context"] + 8) * 2 * 2 * 2 * 8 * 4
        assert memory["peak_bytes"] > memory["kv_cache_bytes"] > memory["kv_in_use_bytes"]
        assert point["collectives_per_step"] == {}
        assert point["predicted"]["plain_ms"] > 0 and point["predicted"]["speedup"] > 0
        assert point["machine"] == {"bandwidth": 2e9, "peak": 4e9}
    kinds = [(r["kind"], r["draft"], r["batch"]) for r in sweep.document["lengths"]]
    assert len(kinds) == 6 and ("critical length", "streaming 16, gamma 2", None) in kinds
    for name in ("speedup_by_batch", "speedup_by_context", "throughput_latency"):
        assert (plots / f"{name}.png").read_bytes().startswith(PNG)
    assert out.count("streaming 16, gamma 2") >= 9  # as measured, in the table, and the critical length
    assert "streaming 16, gamma 2: critical length" in out and "break-even at batch 1" in out
    assert "12 of 12 rows equal plain decoding, token for token" in out


@pytest.mark.parametrize(("free", "copied"), [(6, 1.5), (80, 4)])
def test_rates_of_a_card_take_no_more_than_is_free(free: int, copied: float, monkeypatch: Patch) -> None:
    asked: Record = {}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 1 << 40))
    monkeypatch.setattr(chips, "measure", lambda device, **how: asked.update(how))
    chips.rates_here(torch.device("cuda"), torch.bfloat16)
    assert asked["n_bytes"] == copied * 2**30


def test_capture_seconds_are_kept_out_of_speeds(sweep: Bench, monkeypatch: Patch) -> None:
    done = turns.run

    def capturing(*args: Any, **kwargs: Any) -> turns.Run:
        one = done(*args, **kwargs)
        one.stats.capture_seconds = 1.5
        return one

    flags = "--batch 1 --context 40 --draft streaming --fresh"
    assert "capturing" not in sweep.said(flags)
    monkeypatch.setattr(turns, "run", capturing)
    assert "capturing rounds as CUDA graphs took 9.0 s" in sweep.said(flags)
    (point,) = sweep.points
    assert point["capture_seconds"] == 6 * 1.5  # a short run of each kind, and two pairs


def test_a_smaller_model_and_an_early_exit_draft_beside_the_others(sweep: Bench, tiny_folder: Path) -> None:
    drafts = "--draft streaming,standalone,early_exit,hierarchy --draft-model"
    assert "standalone 16, gamma 2" in sweep.said("--batch 2 --context 40", drafts, tiny_folder)
    assert {r["policy"] for r in sweep.points} == {"streaming", "standalone", "early_exit", "hierarchy"}
    assert all(r["status"] == "measured" and r["lossless"]["equal"] == 2 for r in sweep.points)
    assert all(r["predicted"]["speedup"] > 0 for r in sweep.points)


def test_an_interrupted_sweep_goes_on_where_it_ended(sweep: Bench, monkeypatch: Patch) -> None:
    flags, original, measured = "--batch 1,2 --context 40,60", benchmark.BySize.measure, list[tuple[int, int]]()

    def interrupted(mode: Any, point: Point, *others: Any) -> Record:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((point.batch, point.context))
        return original(mode, point, *others)

    monkeypatch.setattr(benchmark.BySize, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.code(flags)
    before = sweep.points
    assert [(r["batch"], r["context"]) for r in before] == measured == [(1, 40), (1, 60), (2, 40)]
    measured.clear()
    assert "3 of 4 points are in" in sweep.said(flags)
    assert measured == [(2, 60)] and sweep.points[:3] == before
    assert sweep.code(flags, "--batch 1,3") == 0  # more may be asked for
    assert measured == [(2, 60), (3, 40), (3, 60)]
    assert "was measured with seconds 0.0, not 0.5" in sweep.refusal(flags, "--seconds 0.5")
    said = "was measured with pairs 2, not 1: name another file, or start over with --fresh"
    assert said in sweep.refusal(flags, "--pairs 1")
    measured.clear()
    assert sweep.code(flags, "--pairs 1 --fresh --batch 1") == 0
    assert measured == [(1, 40), (1, 60)] and len(sweep.points) == 2


def test_several_temperatures_share_prompts_that_are_prefilled_once(sweep: Bench) -> None:
    flags = "--batch 2 --context 40,300 --temperature"
    out = sweep.said(flags, "0,0.8")
    found = sweep.points
    assert [(r["context"], r["temperature"]) for r in found] == [(40, 0.0), (40, 0.8), (300, 0.0), (300, 0.8)]
    assert [r["prefill"]["tokens_computed"] > 0 for r in found] == [True, False, True, False]
    assert [r["lossless"]["compared"] for r in found] == [True, False, True, False]
    assert "streaming 16, gamma 2, T 0.8: " in out and "4 of 4 rows equal plain decoding" in out
    assert sweep.code(flags, "1") == 0  # more may be asked for
    assert len(sweep.points) == 6


@pytest.mark.parametrize("flags", ["", "--synthetic", "--sweep precision"])
def test_a_batch_no_memory_holds_is_refused_before_its_prompts(sweep: Bench, monkeypatch: Patch, flags: str) -> None:
    monkeypatch.setattr(prompts, "round_the_text", None)
    monkeypatch.setattr(prompts, "MOST_RANDOM", 1000)
    assert sweep.code("--batch 1000000000 --context 40", flags) == 2
    out, err = sweep.capsys.readouterr()
    assert "skipped: batch_size 1000000000 x max_seq_len" in out and "nothing could be measured" in err


def test_a_point_that_does_not_fit_or_fails_is_recorded_and_the_others_go_on(sweep: Bench, monkeypatch: Patch) -> None:
    original, broken = benchmark.BySize.measure, [60]

    def sometimes(mode: Any, point: Point, *others: Any) -> Record:
        if point.context in broken:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")
        return original(mode, point, *others)

    monkeypatch.setattr(benchmark.BySize, "measure", sometimes)
    flags, too_long = "--batch 1 --context 40,60,80,4090", "4,090 tokens and 8 new ones are over 4,096 positions"
    assert f"skipped: {too_long}" in sweep.said(flags)
    found = {r["context"]: (r["status"], r.get("reason")) for r in sweep.points}
    assert [found[context][0] for context in (40, 80)] == ["measured"] * 2
    assert found[60] == ("failed", "OutOfMemoryError: out of memory: tried to allocate 2 GiB")
    assert found[4090] == ("failed", too_long)
    broken.clear()
    assert "2 of 4 points are in" in sweep.said(flags)  # what failed is tried again
    assert sorted(r["status"] for r in sweep.points) == ["failed", "measured", "measured", "measured"]


def test_output_that_is_not_plain_decodings_is_an_error_in_fp32(sweep: Bench, monkeypatch: Patch) -> None:
    original, flags = turns.run, "--batch 2 --context 40 --fresh"

    def lossy(engine: Any, *others: Any, speculate: bool) -> turns.Run:
        done = original(engine, *others, speculate=speculate)
        if speculate:
            done.outputs[1][3] += 1
        return done

    monkeypatch.setattr(turns, "run", lossy)
    assert sweep.code(flags) == 1
    out, err = sweep.capsys.readouterr()
    assert "1 of 2 rows equal plain decoding" in out and "1 rows differ where they must not" in err
    # in bf16 rounding may do so: it is counted
    assert "1 of 2 rows equal plain decoding" in sweep.said(flags, "--dtype bf16")
    assert "outputs are sampled and not compared" in sweep.said(flags, "--temperature 0.8")


@pytest.mark.slow
def test_as_a_program_it_measures_a_text_and_the_machine(tmp_path: Path) -> None:
    file, text = tmp_path / "sweep.json", tmp_path / "text.txt"
    text.write_text("The captain wrote in his journal. " * 40, encoding="utf-8")
    flags = f"--no-compile --batch 1,2 --gamma 2 --pairs 1 --draft lookup --context 90 --max-new-tokens 4 --json {file}"
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *flags.split(), "--text", str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "GB/s and computes" in done.stdout and "rows equal plain decoding, token for token" in done.stdout
    points = json.loads(file.read_text())["points"]
    assert [r["batch"] for r in points] == [1, 2] and all(r["machine"]["bandwidth"] > 1e8 for r in points)


def test_each_precision_is_measured_over_its_own_plain_decoding_and_over_the_unquantized_one(sweep: Bench) -> None:
    pytest.importorskip("matplotlib")
    flags = " ".join([*PRECISION, "--dtype bf16 --batch 2 --context 40,80"])
    twice = "--precisions none,none/int8,int8,int8/none,int8/int8,none"  # what is named twice is one
    out = sweep.said(flags, twice, "--plots", sweep.folder)
    assert [(r["status"], r["context"]) for r in sweep.points] == [("measured", 40), ("measured", 80)]
    for point in sweep.points:
        bf16, draft8, cache8, both = point["precisions"]
        assert [(one["precision"], one["target"]) for one in point["precisions"]] == [
            ("none", "none"), ("none/int8", "none"), ("int8", "int8"), ("int8/int8", "int8"),
        ]  # fmt: skip
        for one in (bf16, draft8):  # their target is the unquantized one
            assert one["speedup"]["own"] == one["speedup"]["unquantized"]
            assert one["plain_over_unquantized"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        for one in (cache8, both):
            assert one["speedup"]["own"] != one["speedup"]["unquantized"]
            read = one["plain"]["kv_bytes_per_token"] / bf16["plain"]["kv_bytes_per_token"]
            assert read == pytest.approx((8 + 2) / 16)  # heads of 8 bytes and a scale
        assert all(len(one["speculative"]["runs"]["completion"]) == 2 for one in point["precisions"])
        assert draft8["plain"] == bf16["plain"] and both["plain"] == cache8["plain"]
    assert out.count("int8/int8") >= 4 and "of its own plain" in out and "of unquantized plain" in out
    assert (sweep.folder / "precisions.png").read_bytes().startswith(PNG)
    assert "2 of 2 points are in" in sweep.said(flags)  # nothing is left to do


# ---- over the draft budget -------------------------------------------------------------------------------------------


def test_every_policy_and_budget_is_a_point_and_what_cannot_be_built_is_named(by_budget: Bench) -> None:
    pytest.importorskip("matplotlib")
    flags = "--draft streaming,snapkv,lookup,standalone --budget 16,64 --pairs 1 --dtype fp32 --plots"
    out, document = by_budget.said(flags, by_budget.folder), by_budget.document
    points = [(r["policy"], r["budget"]) for r in document["results"]]
    assert points == [("streaming", 16), ("streaming", 64), ("snapkv", 64), ("lookup", None)]
    assert set(document["skipped"]) == {"snapkv 16", "standalone 16", "standalone 64"}
    for result in document["results"]:
        assert 0 <= result["acceptance_rate"] <= 1 <= result["tokens_per_round"] <= 5
        distinct, ratio = result["distinct_4grams"], result["ratio"]
        assert 0 < distinct["plain"] == distinct["speculative"] <= 1  # greedy, in fp32
        assert ratio["min"] <= ratio["median"] <= ratio["max"]
        assert set(result["speculative_ms"]) == {"round", "draft", "verify", "host"}
        assert result["kv_bytes_per_token"]["plain"] > 0
    assert document["benchmark"] == "frontier" and document["transformer"]["n_layers"] == 6
    assert document["settings"]["context"] == 96 and not document["settings"]["compiled"]
    assert (by_budget.folder / "budgets.png").read_bytes().startswith(PNG)
    assert "skipped snapkv 16: budget must be at least 64 for snapkv, got 16" in out
    lines = [line.split()[:2] for line in out.splitlines() if line.startswith(("streaming", "snapkv", "lookup"))]
    assert lines == 2 * [["streaming", "16"], ["streaming", "64"], ["snapkv", "64"], ["lookup", "-"]]  # and in the end


def test_without_pairs_acceptance_is_that_of_timed_runs_and_none_is_timed(by_budget: Bench, monkeypatch: Patch) -> None:
    runs, original = [], turns.run

    def noting(*args: Any, speculate: bool = True, **others: Any) -> Any:
        runs.append("PS"[speculate])
        return original(*args, speculate=speculate, **others)

    monkeypatch.setattr(turns, "run", noting)
    monkeypatch.setattr(modes, "run", noting)
    flags = "--draft streaming,lookup --temperature 0.8 --pairs"
    assert by_budget.code(flags, "1 --budget 64") == 0
    before = by_budget.results
    assert "nothing was timed" in by_budget.said(flags, "0 --budget 64 --fresh")
    assert "".join(runs) == 2 * "SPPS" + "P" + "SS"
    for timed, counted in zip(before, by_budget.results, strict=True):
        assert timed["ratio"] and counted["ratio"] is counted["plain_ms"] is counted["speculative_ms"] is None
        for name in ("acceptance_rate", "acceptance_by_position", "tokens_per_round", "distinct_4grams"):
            assert timed[name] == counted[name]
    runs.clear()
    said = by_budget.said(flags, "0 --budget 32,64")  # more may be asked for
    assert "2 of 3 points are in" in said and said.count("\nstreaming ") == 3
    assert "".join(runs) == "PS" and len(by_budget.results) == 3
    assert "was measured with page 16, not 32" in by_budget.refusal(flags, "0 --page 32")


def test_times_of_another_machine_or_of_other_pairs_are_not_continued(by_budget: Bench) -> None:
    flags = "--pairs 0 --draft lookup"
    assert by_budget.code(flags) == 0
    written = by_budget.document
    others = {"threads": 64, "tp": 8, "device": "cuda", "machine": {"cpu": "another"}, "seconds": 5.0}
    for name, value in others.items():
        by_budget.file.write_text(json.dumps(written | {"settings": written["settings"] | {name: value}}))
        assert f"was measured with {name} {value}, not" in by_budget.refusal(flags)


# ---- lossless, and how sizes are read --------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_policy_emits_what_plain_decoding_emits(lossless: Bench) -> None:
    assert "3/3" in lossless.said("--draft streaming,hierarchy/standalone")
    document = lossless.document
    plain, *policies = document["results"]
    assert plain["policy"] == "off" and [len(tokens) for tokens in plain["outputs"]] == [5, 5, 5]
    assert [r["policy"] for r in policies] == ["streaming", "hierarchy/standalone"]
    assert all(r["equal"] == r["prompts"] == 3 and r["differences"] == [] for r in policies)
    assert document["settings"]["dtype"] == "fp32" and document["benchmark"] == "speculation lossless"
    assert "draft_weights" in policies[1] and "draft_weights" not in policies[0]


@pytest.mark.slow
def test_a_divergence_is_printed_with_its_gap_and_fails_the_run_but_for_a_near_tie_of_16_bits(
    lossless: Bench, monkeypatch: Patch
) -> None:
    """Speculation says another token than plain decoding, at one place."""
    decode, flags = benchmark.Lossless.decode, "--draft lookup"

    def astray(mode: Any, engine: Any, what: str, *, speculate: bool) -> turns.Run:
        one = decode(mode, engine, what, speculate=speculate)
        one.outputs[1][2] += speculate
        return one

    monkeypatch.setattr(benchmark.Lossless, "decode", astray)
    assert lossless.code(flags) == 1
    out, err = lossless.capsys.readouterr()
    assert "not token-identical to plain decoding: lookup" in err
    assert "prompt 1 from token 2 on (logits" in out and "2/3" in out
    (difference,) = lossless.results[1]["differences"]
    assert difference["speculative"] == difference["plain"] + 1 and difference["gap"] > 0
    lossless.code(flags, "--dtype bf16 --fresh")
    written = lossless.document
    monkeypatch.setattr(benchmark.Lossless, "decode", None)  # all of it is in the file
    for gap, code in ((0.1, 0), (0.3, 1)):
        written["results"][1]["differences"][0]["gap"] = gap
        lossless.file.write_text(json.dumps(written))
        assert "2/3" in lossless.said(flags, "--dtype bf16", code=code)


def test_sizes_and_gammas_are_read_as_they_are_written() -> None:
    assert sizes("4k,1K,500,4000") == [500, 1000, 4000]
    assert gammas("auto,6,4,6") == ["auto", 6, 4]
