"""What gpu_suite.py times, dry: kernels are charged for what they read, cells keep what their table says."""

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gpu_suite
from gpt_fast_sd import attention
from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.model import SPLIT, Transformer
from gpt_fast_sd.policies.config import DraftConfig
from gpt_fast_sd.quantization.table import TABLE
from measuring import machine
from measuring.chips import CHIPS, GIB
from measuring.forecast import System
from measuring.gpu import cells
from measuring.gpu import kernels as timings
from measuring.gpu.cells import ARMS, FULL, PRECISIONS, Bench, Cell, cell_for, planned, predict
from measuring.gpu.setup import SMALL, Setup, Stopwatch, random_model
from measuring.replay import PROFILES, Replay, replay_table
from measuring.roofline import EXPECTED, IDEAL, PRACTICAL
from tests.gpuless import pools
from tests.helpers import Patch, ahead

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]


def dry_setup(**known: Record) -> Setup:
    cpu = torch.device("cpu")
    return Setup(device=cpu, tiny=True, pairs=1, max_autotune=False, texts=(), out=Path(), known=known)


def dry_run(stage: str, **known: Record) -> Record:
    """What the stage finds, through JSON and back."""
    result: Record = json.loads(json.dumps(gpu_suite.STAGES[stage].run(dry_setup(**known))))
    return result


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_clocks_are_those_of_the_gpu_that_is_used_though_others_are_hidden(tmp_path: Path, monkeypatch: Patch) -> None:
    (smi := tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$3, 700 W"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device}"))
    assert machine.clocks() == {"driver_version": "--id=GPU-of-0", "power.limit": "700 W"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_graph_is_timed_by_events_on_the_stream_that_it_is_replayed_on(elsewhere: bool, monkeypatch: Patch) -> None:
    """It is captured on a stream of the watch's own; what it is replayed on is whoever's turn it is, here and there."""
    seen: list[tuple[str, int]] = []
    with pools.stand_in("2.13") as cuda, contextlib.ExitStack() as within:
        for kind, name in ((pools.Graph, "replay"), (pools.Event, "record")):  # of the current stream, as in torch
            ahead(monkeypatch, kind, name, lambda *_, name=name: seen.append((name, cuda.current.cuda_stream)))
        cuda.work = 7.0
        watch, calls = Stopwatch(dry_setup()), torch.zeros(1)
        watch.device, watch.stream = torch.device("cuda"), cuda.stream_of_pool()  # type: ignore[assignment]
        if elsewhere:
            within.enter_context(torch.cuda.stream(cuda.stream_of_pool()))  # type: ignore[arg-type]
        here = cuda.current.cuda_stream
        assert watch.times(lambda: calls.add_(1)) == pytest.approx([7.0] * 2)
        assert cuda.captures[0]["stream"] == watch.stream.cuda_stream != here  # type: ignore[union-attr]
    assert seen == [("replay", here), *[("record", here), ("replay", here), ("record", here)] * 2]
    assert int(calls) == 3 + 1 + 2  # before the capture, and replayed


@pytest.mark.parametrize("stage", ["decode", "formats", "sparse", "prefill", "select"])
def test_every_timed_kernel_has_its_bytes_and_its_share_of_both_ceilings_and_peers_compute_the_same(stage: str) -> None:
    rates = {"environment": {}, "rates": {"copy": 1e10, "read": 2e10, "matmul": 1e11}}
    for row in dry_run(f"time-{stage}", machine=rates)["rows"]:
        assert row["bytes"] > 0 and row["seconds"] > 0 and "failed" not in row, row
        floor = {name: max(row["bytes"] / rate, row["flops"] / peak) for name, rate, peak in
                 (("share", 4.8e12, 989e12), ("share_of_measured", 2e10, 1e11))}  # fmt: skip
        for name, seconds in floor.items():
            assert row[name] == pytest.approx(seconds / row["seconds"])
        # the mask that others lack leaves them a few more of hundreds of keys; of one query they compute the very same
        assert row.get("off_by", 0.0) < (0.02 if "T 1," in row["what"] or stage == "prefill" else 0.3)
        assert row["peer"] == ("off_by" in row)


def test_a_cache_of_narrow_entries_is_charged_for_its_own_bytes() -> None:
    heads = timings.Heads.of(dry_setup(), timings.CONTEXT)
    entries, dim = 2 * heads.batch * heads.n_kv * heads.context, heads.head_dim  # keys and values
    sizes = {"bfloat16": 2 * dim, "int8": dim + 2, "planes": dim + 2}
    lists = {"sparse_attention": heads.batch * heads.n_kv * 64 * 8}
    n_read = {"decode_attention": entries, "sparse_attention": entries // heads.context * 128,
              "prefill_attention": entries // heads.batch}  # fmt: skip
    found: dict[str, list[tuple[str, float]]] = {}
    for row in dry_run("time-formats")["rows"]:
        n_bytes = (row["bytes"] - lists.get(row["op"], 0)) / n_read[row["op"]]
        found.setdefault(row["what"].split(", ")[-1], []).append((row["op"], n_bytes))
    drafts = found.pop("upper plane")
    ops = ["decode_attention", "decode_attention", "sparse_attention", "prefill_attention"]
    assert found == {held: [(op, size) for op in ops] for held, size in sizes.items()}
    # half of an entry but for the last 64 of a row
    keys = {"decode_attention": heads.context, "sparse_attention": 128}
    assert drafts == [(op, dim / 2 + 2 + 64 / n * dim / 2) for op, n in keys.items()]


def test_products_are_charged_for_the_bytes_of_their_weights_rows_and_results() -> None:
    weights = {"bf16": 2 * 64 * 128} | {name: on["cpu"].bytes_of(64, 128) for name, on in TABLE.items() if "cpu" in on}
    weights["both planes"] = weights["bf16"] + 4 * 64
    assert [(row["op"], row["what"], row["bytes"]) for row in dry_run("time-linears")["rows"]] == [
        (f"linear, {name}", f"wo 64 x 128, {n} rows", n_bytes + 2 * n * (128 + 64))
        for name, n_bytes in weights.items() for n in (1, 5)
    ]  # fmt: skip


def test_every_product_is_compiled_before_it_is_timed(monkeypatch: Patch) -> None:
    """Dynamo compiles one function for eight shapes and runs it eagerly for others, and all of these are one to it."""
    real, built = torch.compile, [0]

    def backend(graph: Any, inputs: Any) -> Any:
        built[0] += 1
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **how: real(module, backend=backend, **how))
    for n_in in (8, 16):
        linear = torch.nn.Linear(n_in, 8).requires_grad_(False)
        for n_rows in (1, 2, 3, 4, 5):
            timings.multiplied(linear, torch.zeros(n_rows, n_in), compiled=True)()
    assert built == [10]


def test_kernels_that_fail_or_idle_stop_the_stage_and_a_failing_peer_is_a_row_that_says_why(monkeypatch: Patch) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel for this chip")

    timed = timings.Timings(dry_setup())
    timed.time("theirs", "shape", broken, 1.0, ours=torch.zeros(1))
    assert timed.rows[0]["failed"] == "RuntimeError: no kernel for this chip"
    with pytest.raises(RuntimeError, match="no kernel"):
        timed.time("ours", "shape", broken, 1.0)
    with pytest.raises(RuntimeError, match="selects, shape, is not timed: 1 of 2 rows idle"):
        timed.time("selects", "shape", lambda: torch.tensor([[3, -1], [-1, -1]]), 1.0)
    right = attention.dense

    def half(q: Tensor, *rest: Any) -> Any:
        out, mass = right(q, *rest)
        return out * (torch.arange(len(out)) % 2 == 0)[:, None, None, None], mass

    monkeypatch.setattr(attention, "dense", half)
    with pytest.raises(RuntimeError, match="decode_attention, 2 x 512, T 1, bfloat16, is not timed: 1 of 2 rows idle"):
        dry_run("time-decode-57344")


@pytest.mark.parametrize("stage", ["cell-28672-streaming", "cell-57344-guided", "cell-100000-snapkv"])
def test_a_cell_gives_steps_with_what_they_read_and_a_replay_of_what_its_table_says(stage: str) -> None:
    result = dry_run(stage)
    arm, n, context, gamma = ARMS[result["arm"]], result["batch"], result["context"], result["gamma"]
    table = replay_table(arm.profile, 4 * result["rounds_of_a_run"], n, gamma, 0, torch.device("cpu"))
    tokens = float((table[: result["rounds_of_a_run"]] + 1).double().mean())
    assert result["replayed"] is True and result["tokens_per_round"] == pytest.approx(tokens)
    assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]
    assert result["predicted"]["practical"] <= result["predicted"]["ideal"]
    steps = result["steps"]
    assert all(one["seconds"] > 0 and one["rows_active"] == n for one in steps.values())
    assert steps["target"]["keys_in_view"] == [context + 1] * 2
    assert steps["verify"]["keys_in_view"] == [context + gamma + 1] * 2
    least, most = steps["draft"]["keys_in_view"]
    assert 0.7 * result["budget"] <= least <= most <= result["budget"] + gamma
    assert ("select" in steps) == (arm.policy == "guided") and {"target", "draft", "verify"} == {*result["roofline"]}


def test_a_cell_by_precision_replays_what_few_bits_leave_of_acceptance_or_says_why_not() -> None:
    result, plain = dry_run("precision-4096-int8"), dry_run("precision-4096-None")
    assert (result["arm"], result["quantize"]) == ("guided", "int8")
    assert result["roofline"]["draft"] < plain["roofline"]["draft"]
    said = "quantize 'float8' of a draft runs on device 'cuda', and the model is on 'cpu': use 'int8' or 'int4'"
    assert dry_run("precision-57344-float8") == {"arm": "guided", "quantize": "float8", "skipped": said}
    assert PRECISIONS["int4"].profile.chances[0] == 0.97 * PROFILES["guided"].chances[0]


def a_bench(arm: str) -> Bench:
    return Bench(dry_setup(), Cell(batch=16, context=57344), ARMS[arm], 2)


@pytest.mark.parametrize(
    ("wrong", "what", "why"),
    [
        (lambda one: one.engine.state.active[:1].fill_(False), "target", "of 2 rows only 1 are active"),
        (lambda one: one.engine.state.seq_len.fill_(9), "target", "rows read 10 to 10 keys, not 321 to 321"),
        (lambda one: one.view.kv_indices.fill_(-1), "draft", "rows read .* keys, not 89 to 130"),
        (lambda one: one.engine.state.remaining.zero_(), "judge", r"tokens emitted and judged are \[\[\d, 0\]"),
        (lambda one: one.view.selected_at.copy_(one.engine.state.seq_len), "select", "0 of 2 rows have selected"),
    ],
)
def test_a_call_that_does_not_do_what_it_is_timed_for_is_an_error_and_has_no_seconds(
    wrong: Callable[[Bench], object], what: str, why: str, monkeypatch: Patch
) -> None:
    right = Bench.restore_state

    def restore_state(self: Bench) -> None:
        right(self)
        wrong(self)

    monkeypatch.setattr(Bench, "restore_state", restore_state)
    with pytest.raises(RuntimeError, match=f"{what} at gamma 2 is not timed: {why}"):
        a_bench("guided").steps()


def test_every_repeat_of_every_timed_call_starts_from_the_same_state(monkeypatch: Patch) -> None:
    bench, starts = a_bench("guided"), list[Any]()

    def watch(self: Stopwatch, call: Callable[[], object], before: Callable[[], object]) -> float:
        for _ in range(3):
            before()
            state = bench.engine.state
            starts.append([state.active.tolist(), state.seq_len.tolist(), bench.view.kv_indices.tolist()])
            call()
        return 1.0

    monkeypatch.setattr(Stopwatch, "__call__", watch)
    assert len(bench.steps()) * 3 == len(starts) == 15 and all(one == starts[0] for one in starts)
    assert starts[0][:2] == [[True, True], [320, 320]]


@pytest.mark.parametrize("captured", [False, True])
def test_replays_emit_what_the_table_says_and_plain_rounds_a_token_a_row(captured: bool, monkeypatch: Patch) -> None:
    bench = a_bench("streaming")
    if captured:  # results are read one round late, as those of captured rounds are
        bench.engine.schedule.rounds.capture = lambda part: part
    for _ in range(2):  # every run begins at the table's first row
        assert bench.run(True, rounds=3)["per_round"] == float((bench.table[:3] + 1).double().mean())
    assert bench.run(False, rounds=3)["per_round"] == 1.0

    def all_kept(self: Replay, result: AcceptResult, drafted: Tensor, max_accept: Tensor) -> AcceptResult:
        return AcceptResult(max_accept.clone(), result.next_token)

    monkeypatch.setattr(Replay, "apply", all_kept)
    with pytest.raises(RuntimeError, match=r"3 rounds came to .* \(18, 6, \[2\]\), not \(1\d, 6, \[2\]\)"):
        bench.run(True, rounds=3)


def test_a_random_model_is_the_one_that_was_meant() -> None:
    model = random_model(replace(SMALL, tie_embeddings=True, qkv_bias=True), torch.device("cpu"), torch.float32)
    assert model.output.weight is model.embedding.weight and model.rope_freqs.dtype == torch.float32
    assert torch.equal(model.rope_freqs, Transformer(SMALL).rope_freqs)
    assert all(x.isfinite().all() for x in model.parameters()) and float(model.embedding.weight.std()) > 0.9
    assert bool((model.norm.weight == 1).all()) and not bool(model.layers[0].attention.wqkv.bias.any())


def test_cells_are_as_large_as_the_memory_of_the_card_allows() -> None:
    """And no larger than the full ones; the page says how large they are on others."""
    for memory, batches in ((CHIPS["h200"].memory, [*FULL.values()]), (130 * 2**30, [15, 30, 8])):
        assert [cell_for(context, memory).batch for context in FULL] == batches  # not half as many for want of a row
    with pytest.raises(ValueError, match="not even one row of 100,000 tokens fits into 20 GiB"):
        cell_for(100_000, 20 * 2**30)
    small = replace(dry_setup(), tiny=False, free=20 << 30)  # whose cells are skipped, and whose kernels are timed
    assert timings.Heads.of(small, 100_000).batch == 1 and "skipped" in cells.timed_cell(small, 100_000, ARMS["guided"])


def test_the_roofline_is_a_known_chips_data_sheet_or_measured_and_memory_is_what_is_free(monkeypatch: Patch) -> None:
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    known = {"machine": {"rates": {"copy": 7e11, "read": 8e11, "matmul": 1e14}, "environment": {"free_bytes": 7.0}}}
    setup = replace(dry_setup(**known), device=torch.device("cuda"))
    assert setup.chip == CHIPS["h100"]
    name = "NVIDIA T1000"
    assert (setup.chip.bandwidth, setup.chip.peak) == (8e11, 1e14)
    assert (setup.memory, replace(setup, free=5).memory) == (7.0, 5)
    assert dry_setup().chip.bandwidth == CHIPS["h200"].bandwidth and dry_setup().memory == CHIPS["h200"].memory


def test_the_readme_of_benchmarks_holds_what_the_cost_model_gives_now() -> None:
    lines = (ROOT / "benchmarks" / "h200" / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[text.strip() for text in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    chip = CHIPS["h200"]

    def forecasts(name: str, context: int, arm: str) -> list[Any]:
        cell = Cell(batch=int(name.split("x")[0]), context=context)
        one = PRECISIONS[arm] if arm in PRECISIONS else ARMS[arm]
        gamma = planned(chip, cell, one).gamma
        return [predict(chip, cell, one, gamma, e) for e in (PRACTICAL, EXPECTED, IDEAL)]

    good, expected, ideal = forecasts("16x", 57344, "guided")
    shares = {"plain step": "target_seconds", "draft step": "draft_seconds"}
    streaming = forecasts("16x", 57344, "streaming")[:2]
    checked = 0
    for row in rows:
        if row[0].split(",")[0] in shares:
            part = shares[row[0].split(",")[0]]
            assert row[3:5] == [f"{getattr(ideal, part) / getattr(one, part):.0%}" for one in (good, expected)]
        elif row[0].startswith("T_V / T_T"):
            assert row[3:5] == [f"{one.verify_seconds / one.target_seconds:.2f}" for one in streaming]
        elif row[0].startswith("judging"):
            assert row[4] == f"{streaming[1].select_seconds * 1e3:.2f} ms"
        elif row[0].startswith("replay:"):
            arm, cell = row[0].split(", ")[1].split()[0], row[0].split(", ")[2]
            assert row[3:5] == [f"{one.ratio:.2f}x" for one in forecasts(cell, int(cell.split("x")[1]), arm)[:2]]
        elif re.match(r"\d+x", row[0]):
            cell, arm = row[0].rstrip("*"), "None" if "bf16" in row[1] else row[1]
            batch, context = map(int, cell.split("x"))
            fits = batch == 1 or cell_for(context, chip.memory, PRECISIONS[arm]).batch >= batch
            assert (row[0] == cell) == fits, row  # a row that no plan lets through is marked
            ours = forecasts(cell, context, arm)
            assert row[2:6] == [
                str(ours[0].gamma), f"{ours[0].draft_seconds / ours[0].target_seconds:.3f}",
                *(f"{one.ratio:.2f}x" for one in ours[:2]),
            ]  # fmt: skip
        else:
            continue
        checked += 1
    assert checked == 7 + 16


def rows_of(context: int, memory: float) -> int:
    try:
        return cell_for(context, memory).batch
    except ValueError:
        return 0


def test_the_page_says_how_long_rows_may_be_on_cards_of_each_size() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line.split("|")[3:-1] for line in page.splitlines() if line.startswith("| ")}
    memory = [7.5 * GIB, *(CHIPS[name].memory for name in ("rtx 4090", "rtx 5090", "h100", "h200"))]
    guided, streaming = DraftConfig(policy="guided", budget=512, gamma=4), DraftConfig(policy="streaming")
    asked: dict[str, tuple[int, DraftConfig, dict[str, Any]]] = {
        "5": (1, guided, {}), "6": (1, replace(guided, quantize="int8"), {}),
        "7": (8, streaming, {}), "8": (8, streaming, {"quantize": "int8"}),
        "9": (8, streaming, {"quantize": "int8", "kv_dtype": "int8"}),
    }  # fmt: skip
    for row, (batch, draft, how) in asked.items():
        for have, cell in zip(memory, rows[row], strict=True):
            system = System(model=cells.LLAMA, chip=replace(CHIPS["h200"], memory=have), room=128, **how)
            longest = int(cell.replace(",", ""))
            assert longest == 0 or system.memory(draft, batch, longest)[1] is None, (row, cell)
            longer = longest + SPLIT
            assert longer > cells.LLAMA.max_seq_len - 128 or system.memory(draft, batch, longer)[1], (row, cell)
    for have, cell in zip(memory, rows["4"], strict=True):
        assert cell.strip() == ", ".join(str(rows_of(context, have)) for context in (57344, 28672, 100_000))
