"""Stages that time kernels, dry: what is timed is what is charged, and others are beside it."""

from __future__ import annotations

import contextlib
import json
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.quantization.table import TABLE
from measuring.chips import Rates
from measuring.gpu import kernels as timings
from measuring.gpu import setup as shared
from measuring.gpu.setup import Stopwatch
from tests.gpuless import pools
from tests.gpuless.fakecuda import fake_cuda_tensors, needs_fake_cuda
from tests.scripts.measuring.gpu.rig import dry_run, dry_setup


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


@pytest.mark.parametrize("stage", ["time-decode", "time-formats", "time-sparse", "time-prefill", "time-select"])
def test_every_timed_kernel_has_its_bytes_and_its_share_of_both_ceilings(stage: str) -> None:
    rates = {"environment": {}, "rates": {"copy": 1e10, "read": 2e10, "matmul": 1e11}}
    for row in dry_run(stage, machine=rates)["rows"]:
        assert row["bytes"] > 0 and row["seconds"] > 0
        floor = {name: max(row["bytes"] / rate, row["flops"] / peak) for name, rate, peak in
                 (("share", 4.8e12, 989e12), ("share_of_measured", 2e10, 1e11))}  # fmt: skip
        for name, seconds in floor.items():
            assert row[name] == pytest.approx(seconds / row["seconds"])


def test_a_peer_that_cannot_run_is_a_row_that_says_why_and_a_kernel_of_ours_stops_the_stage() -> None:
    timed, does = timings.Timings(dry_setup()), {"rows_active": 1, "tokens_fed": 1, "keys_in_view": [1, 1]}

    def broken() -> None:
        raise RuntimeError("no kernel for this chip")

    timed.time("theirs", "shape", broken, 1.0, does=does, peer=True)
    assert timed.rows[0]["failed"] == "RuntimeError: no kernel for this chip"
    with pytest.raises(RuntimeError, match="no kernel"):
        timed.time("ours", "shape", broken, 1.0, does=does)


@pytest.mark.parametrize("stage", ["time-decode-57344", "time-decode", "time-sparse", "time-prefill", "time-select"])
def test_every_timed_kernel_reads_the_keys_whose_bytes_it_is_charged_for_and_peers_compute_the_same(stage: str) -> None:
    heads = timings.dense_heads(dry_setup(), 57344)[0]
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


def test_a_cache_of_narrow_entries_is_charged_for_its_own_bytes() -> None:
    heads = timings.dense_heads(dry_setup(), 28672)[0]
    entries = 2 * heads.batch * heads.n_kv * heads.context  # keys and values
    rows = dry_run("time-formats")["rows"]
    dim = heads.head_dim
    sizes = {"bfloat16": 2 * dim, "int8": dim + 2, "planes": dim + 2, "float8_e4m3fn": dim}
    lists = {"sparse_attention": heads.batch * heads.n_kv * 64 * 8}
    read = {  # keys and values of all rows
        "decode_attention": entries, "sparse_attention": entries // heads.context * 128,
        "prefill_attention": entries // heads.batch,
    }  # fmt: skip
    found: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        n_bytes = (row["bytes"] - lists.get(row["op"], 0)) / read[row["op"]]
        found.setdefault(row["what"].split(", ")[-1], []).append((row["op"], n_bytes))
        assert row["keys_in_view"] == [read[row["op"]] // entries * heads.context or 128] * 2 or row["tokens_fed"] > 1
    drafts = found.pop("upper plane")
    ops = ["decode_attention", "decode_attention", "sparse_attention", "prefill_attention"]
    assert found == {held: [(op, size) for op in ops] for held, size in sizes.items()}
    # half of an entry but for the last 64 of a row
    n_read = {"decode_attention": heads.context, "sparse_attention": 128}
    assert drafts == [(op, dim / 2 + 2 + 64 / n * dim / 2) for op, n in n_read.items()]


def test_products_are_charged_for_the_bytes_of_their_weights_rows_and_results() -> None:
    rows = dry_run("time-linears")["rows"]
    weights = {"bf16": 2 * 64 * 128} | {name: on["cpu"].bytes_of(64, 128) for name, on in TABLE.items() if "cpu" in on}
    assert weights["int8"] == 64 * (128 + 4)
    assert [(row["op"], row["what"], row["bytes"]) for row in rows] == [
        (f"linear, {name}", f"wo 64 x 128, {n} rows", n_bytes + 2 * n * (128 + 64))
        for name, n_bytes in weights.items()
        for n in (1, 5)
    ]
    assert all("failed" not in row and row["flops"] == 2 * row["rows_active"] * 64 * 128 for row in rows)


def test_every_product_is_compiled_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_kernel_that_lets_rows_idle_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.decode_attention

    def half(q: Tensor, *rest: Any) -> Tensor:
        out = right(q, *rest)
        return out * (torch.arange(len(out)) % 2 == 0)[:, None, None, None]

    monkeypatch.setattr(kernels, "decode_attention", half)
    with pytest.raises(RuntimeError, match="decode_attention, 2 x 512, T 1, is not timed, as rows idle"):
        dry_run("time-decode-57344")
    monkeypatch.undo()
    monkeypatch.setattr(
        timings,
        "queries",
        lambda setup, heads, n: (torch.randn(2, 4, n, 16).bfloat16(), torch.full((2, n), heads.context)),
    )
    with pytest.raises(RuntimeError, match=r"rows idle: {'rows_active': 0, 'tokens_fed': 1, 'keys_in_view': \[0, 0\]}"):
        dry_run("time-decode-57344")


# ---- what only a chip has, beside stand-ins --------------------------------------------------------------------------


@needs_fake_cuda
def test_on_cuda_others_are_torchs_backends() -> None:
    with fake_cuda_tensors():
        setup = replace(dry_setup(), device=torch.device("cuda"))
        q, k = (torch.empty(2, n, t, 16, dtype=torch.bfloat16, device="cuda") for n, t in ((8, 6), (2, 28672)))
        found = timings.peers(setup, q, k, k)
    assert {name.split(",")[0] for name in found} == {
        "torch SDPA flash", "torch SDPA efficient", "torch SDPA cuDNN", "torch FlexAttention",
    }  # fmt: skip


@needs_fake_cuda
def test_the_causal_peer_on_cuda_reads_the_keys_of_a_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "causal_lower_right", lambda *size: None)  # no fake tensor can be of its class
    heads = timings.Heads(batch=1, context=512, group=2, n_kv=2, head_dim=16)
    with fake_cuda_tensors():
        q, k = (torch.empty(1, n, t, 16, dtype=torch.bfloat16, device="cuda") for n, t in ((4, 32), (2, 768)))
        setup = replace(dry_setup(), device=torch.device("cuda"))
        found = timings.prefill_peers(setup, heads, q, k, k)
        assert found["torch SDPA flash, keys shared"]().shape == q.shape  # type: ignore[attr-defined]


def test_the_machine_of_a_chip_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(
        total_memory=141 * 2**30, multi_processor_count=132, L2_cache_size=50 * 2**20, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(shared, "rates_here", lambda *args: Rates(copy=4e12, read=4.1e12, matmul=7e14))
    found = shared.machine(replace(dry_setup(), device=torch.device("cuda"), tiny=False, free=139 * 2**30))
    json.dumps(found)
    assert found["data_sheet"]["name"] == "H200 SXM" and found["rates"]["read"] == 4.1e12
    assert found["environment"]["capability"] == [9, 0] and found["environment"]["free_bytes"] == 139 * 2**30
