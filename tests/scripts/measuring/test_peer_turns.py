"""What a cell says of peers that took turns."""

from __future__ import annotations

from measuring.peer_turns import Reference, Timing, cell_report
from measuring.peers import entries

NEEDS = {"weight_bytes": 4_000, "kv_bytes": 1_000, "roofline_ms": 5.0, "file_roofline_ms": 2.0}


def test_a_file_as_it_comes_is_a_peer_of_its_own_with_the_ceiling_of_its_own_bytes() -> None:
    """Weights of fewer bits are other weights: they must not stand for llama.cpp at our dtype."""
    timings = [
        Timing(entry=entry, prefill_seconds=4.0, tokens=[[1], [2]], milliseconds=[10.0])
        for entry in (*entries("ours", "bf16"), *entries("llama.cpp", "bf16"), *entries("llama.cpp-file", "bf16"))
    ]
    cell = cell_report(timings, 400, 1, NEEDS, Reference(tokens=[1, 2], gaps=[0.5, 0.5]))
    shares = {row["peer"]: row["percent_of_roofline"] for row in cell["results"]}
    assert shares == {"ours": 50.0, "llama.cpp": 50.0, "llama.cpp-file": 20.0}
    assert {row["prefill_tokens_per_second"] for row in cell["results"]} == {100.0}
    assert all("smaller weights" in row["mode"] for row in cell["results"] if row["peer"] == "llama.cpp-file")
    assert entries("llama.cpp-file", "fp32") == []  # it has no such weights
