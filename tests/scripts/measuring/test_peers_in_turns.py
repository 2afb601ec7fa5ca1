"""Peers that take turns, llama.cpp's server as one that speculates, and what is told of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from measuring import peer_speculation, peers
from measuring.peer_speculation import Contest, LlamaServer, decoded, entries, find_program, rows_of
from measuring.peer_turns import Reference, Timing, cell_report
from measuring.peers import Decoded, Entry, PeerFailed, Setup
from tests.helpers import Patch, Printed, tiny_config
from tests.llama_server import write_llama_server

NEEDS = {"weight_bytes": 4_000, "kv_bytes": 1_000, "roofline_ms": 5.0, "file_roofline_ms": 2.0}


def test_a_file_as_it_comes_is_a_peer_of_its_own_with_the_ceiling_of_its_own_bytes() -> None:
    """Weights of fewer bits are other weights: they must not stand for llama.cpp at our dtype."""
    timings = [
        Timing(entry=entry, prefill_seconds=4.0, tokens=[[1], [2]], milliseconds=[10.0])
        for peer in ("ours", "llama.cpp", "llama.cpp-file") for entry in peers.entries(peer, "bf16")
    ]  # fmt: skip
    cell = cell_report(timings, 400, 1, NEEDS, Reference(tokens=[1, 2], gaps=[0.5, 0.5]))
    shares = {row["peer"]: row["percent_of_roofline"] for row in cell["results"]}
    assert shares == {"ours": 50.0, "llama.cpp": 50.0, "llama.cpp-file": 20.0}
    assert {row["prefill_tokens_per_second"] for row in cell["results"]} == {100.0}
    assert all("smaller weights" in row["mode"] for row in cell["results"] if row["peer"] == "llama.cpp-file")
    assert peers.entries("llama.cpp-file", "fp32") == []  # it has no such weights


TIMINGS = {  # of llama-server 0.5.0, SmolLM2 with four drafts of its Q4_1 file
    "cache_n": 511, "prompt_n": 1, "prompt_ms": 21.61, "prompt_per_token_ms": 21.61, "prompt_per_second": 46.29,
    "predicted_n": 129, "predicted_ms": 2764.59, "predicted_per_token_ms": 21.6, "predicted_per_second": 46.3,
    "draft_n": 104, "draft_n_accepted": 102,
}  # fmt: skip


def entry_of(peer: str, mode: str) -> Entry:
    return next(entry for entry in entries() if (entry.peer, entry.mode) == (peer, mode))


def setup_in(folder: Path) -> Setup:
    return Setup(folder=folder, config=tiny_config(), ggufs=folder, threads=2)


def test_decoding_is_what_the_server_spent_after_the_first_token() -> None:
    found = decoded({"tokens": [*range(129)], "timings": TIMINGS}, 128, waited=2.79)
    assert found.tokens == [*range(128)] and (found.rounds, found.drafted, found.accepted) == (26, 104, 102)
    assert found.tokens_per_second == pytest.approx(TIMINGS["predicted_per_second"], rel=1e-3)
    without = {name: value for name, value in TIMINGS.items() if not name.startswith("draft")}
    plain = decoded({"tokens": [*range(129)], "timings": without}, 128, waited=2.79)
    assert (plain.rounds, plain.drafted, plain.accepted) == (128, 0, 0)


@pytest.mark.parametrize(
    ("changes", "waited", "said"),
    [
        ({"tokens": [7] * 128}, 3.0, "gave 128 tokens and counted 129 where 129 were asked for"),
        ({"timings": TIMINGS | {"predicted_n": 20}}, 3.0, "gave 129 tokens and counted 20"),
        ({"timings": {}}, 3.0, "an answer without its tokens and timings"),
        ({"timings": None}, 3.0, "an answer without its tokens and timings"),
        ({"timings": TIMINGS | {"draft_n": float("inf")}}, 3.0, "an answer without its tokens and timings"),
        ({"timings": TIMINGS | {"draft_n": 5}}, 3.0, "accepted 102 of 5 drafts for 128 tokens"),
        ({"timings": TIMINGS | {"draft_n": 200, "draft_n_accepted": 128}}, 3.0, "accepted 128 of 200 drafts"),
        ({}, 2.7, "says that 2.765 s of 2.700 s were decoding"),
    ],
)
def test_an_answer_that_cannot_be_is_a_failure(changes: dict[str, Any], waited: float, said: str) -> None:
    with pytest.raises(PeerFailed, match=said):
        decoded({"tokens": [7] * 129, "timings": TIMINGS} | changes, 128, waited)


def test_a_server_is_asked_for_one_token_more_and_only_what_remembers_starts_anew(tmp_path: Path) -> None:
    """Its n-gram cache kept a request's answer, and drafted it whole for the next request of the same prompt."""
    starts = write_llama_server(tmp_path)
    for peer, mode, n_starts in (
        ("llama.cpp", "", 1),
        ("llama.cpp, draft model", "4 drafts, Q4_0", 1),
        ("llama.cpp, lookup", "n-gram cache", 3),
    ):
        starts.write_text("")
        server = LlamaServer(tmp_path / "llama-server", entry_of(peer, mode), setup_in(tmp_path), 300)
        runs = [server.decode([1, 2, 3], 6) for _ in range(2)]
        server.close()
        assert [run.tokens for run in runs] == [[7] * 6] * 2
        assert [run.rounds for run in runs] == [6 if peer == "llama.cpp" else 3] * 2
        flags = [json.loads(line) for line in starts.read_text().splitlines()]
        assert len(flags) == n_starts and flags[0][flags[0].index("-c") + 1] == "512"
        drafted = "Q4_0.gguf" in flags[0] and flags[0][flags[0].index("--spec-draft-n-max") + 1] == "4"
        assert drafted == ("draft" in peer)


def test_a_server_that_ends_or_is_never_ready_says_its_last_words(tmp_path: Path, monkeypatch: Patch) -> None:
    write_llama_server(tmp_path, last_words="failed to load model 'F16.gguf'")
    entry = entry_of("llama.cpp", "")
    with pytest.raises(PeerFailed, match=r"llama-server ended with code 1: failed to load model 'F16.gguf'"):
        LlamaServer(tmp_path / "llama-server", entry, setup_in(tmp_path), 300)
    (tmp_path / "llama-server").write_text("#!/bin/sh\necho loading\nexec sleep 60\n")
    monkeypatch.setattr(peer_speculation, "START_SECONDS", 0.3)
    with pytest.raises(PeerFailed, match="was not ready after 0 s: loading"):
        LlamaServer(tmp_path / "llama-server", entry, setup_in(tmp_path), 300)
    rubbish = (
        "import socket, sys\ns = socket.create_server(('127.0.0.1', int(sys.argv[-1])))\n"
        "while s: s.accept()[0].send(b'rubbish\\r\\n')"
    )
    (tmp_path / "llama-server").write_text(f"#!{sys.executable}\n{rubbish}\n")
    monkeypatch.setattr(peer_speculation, "START_SECONDS", 1.5)
    with pytest.raises(PeerFailed, match="was not ready after 2 s"):
        LlamaServer(tmp_path / "llama-server", entry, setup_in(tmp_path), 300)


def test_a_program_that_fails_or_gives_no_answer_is_refused(tmp_path: Path) -> None:
    write_llama_server(tmp_path, version_code=3)
    with pytest.raises(ValueError, match=r"--version ended with code 3: built with GNU"):
        find_program(tmp_path)
    (tmp_path / "llama-server").write_text("#!/bin/sh\nexec sleep 60\n")
    with Patch.context() as patch, pytest.raises(ValueError, match="--version gave no answer in 0 s"):
        patch.setattr(peer_speculation, "START_SECONDS", 0.2)
        find_program(tmp_path)
    write_llama_server(tmp_path)
    program, version = find_program(tmp_path)
    assert program.name == "llama-server" and version.startswith("version: 0.5.0-dev (build 1, commit 0c1e570)")


def run_of(speed: float, tokens: list[int], drafted: int = 0, accepted: int = 0) -> Decoded:
    n = len(tokens)
    return Decoded(tokens=tokens, seconds=n / speed, rounds=n - accepted, drafted=drafted, accepted=accepted)


def test_a_mode_is_told_beside_its_own_plain_decoding_turn_by_turn() -> None:
    """A machine that is slow for one turn slows both sides of it."""
    text = [1, 2, 3, 4, 5, 6]
    runs = {
        entry_of("ours", ""): [run_of(100, text), run_of(50, text), run_of(100, text)],
        entry_of("llama.cpp", ""): [run_of(80, text), run_of(40, text), run_of(80, text)],
        entry_of("llama.cpp, draft model", "2 drafts, the file"): [
            run_of(160, [1, 2, 3, 9, 9, 9], 4, 3), run_of(80, text, 4, 3), run_of(160, text, 4, 3)
        ],
    }  # fmt: skip
    ours, theirs, drafts = rows_of(runs)
    assert (ours["over_its_plain"], theirs["over_its_plain"], theirs["over_our_plain"]) == (1.0, 1.0, 0.8)
    assert drafts["over_its_plain"] == pytest.approx(2.0) and drafts["over_our_plain"] == pytest.approx(1.6)
    assert (drafts["same_as_its_plain"], drafts["same_in_every_turn"]) == (3, False)
    assert (drafts["accepted_share"], drafts["drafted_per_round"], drafts["tokens_per_round"]) == (0.75, 4 / 3, 2.0)
    assert ours["accepted_share"] is None and ours["tokens_per_second"] == {"median": 100.0, "min": 50.0, "max": 100.0}


class Scripted:
    """Decodes at a mode's speed, or fails when it is asked for the last time."""

    def __init__(self, speeds: list[float]) -> None:
        self.speeds = speeds

    def decode(self, tokens: list[int], n: int) -> Decoded:
        if not self.speeds:
            raise PeerFailed("its process ended with code -11")
        return run_of(self.speeds.pop(0), [7] * n)

    def close(self) -> None:
        pass


def test_the_best_mode_takes_turns_and_one_fails_alone(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    heats = {
        ("ours", ""): [1, 10, 10], ("ours, lookup", "gamma 1"): [1, 20, 30], ("ours, lookup", "gamma 2"): [1, 25, 25],
        ("llama.cpp", ""): [1, 9, 9], ("llama.cpp, lookup", "n-gram cache"): [1],
    }  # fmt: skip
    turns = {"ours": [1, 10, 10], "ours, lookup": [1, 20, 40], "llama.cpp": [1, 5]}
    seen: list[tuple[str, str]] = []

    def start(self: Contest, entry: Entry, context: int) -> Scripted:
        key = entry.peer, entry.mode
        again = key in seen
        seen.append(key)
        return Scripted([*(turns[entry.peer] if again else heats[key])])

    monkeypatch.setattr(Contest, "start", start)
    contest = Contest(setup_in(tmp_path), tmp_path, [], new_tokens=20, repeats=2)
    contest.entries = [entry_of(*key) for key in heats]
    cell = contest.cell([1, 2, 3])
    assert [(row["peer"], row["mode"]) for row in cell["results"]] == [("ours", ""), ("ours, lookup", "gamma 1")]
    assert cell["results"][1]["over_its_plain"] == 3.0 and len(cell["heats"]) == 4
    assert contest.failures == [
        "llama.cpp, lookup (n-gram cache), context 3: its process ended with code -11",
        "llama.cpp, context 3: its process ended with code -11",
    ]
    assert capsys.readouterr().out.count("failed: ") == 2
    others = Contest(setup_in(tmp_path), tmp_path, ["gamma 2"], new_tokens=2, repeats=2).entries
    assert {entry.mode for entry in entries()} - {entry.mode for entry in others} == {"gamma 2"}
