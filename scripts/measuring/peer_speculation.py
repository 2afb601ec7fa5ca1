"""Speculation next to llama.cpp's own: one row, greedy, each peer with its drafts of every length, the best in turns.

llama.cpp speculates in its server, so that is timed: a process of its own for every mode. What a request tells of its
generation (`predicted_ms`) begins when the first token is there, and ends with the last round: loading, the prompt and
the text's way through HTTP are not in it.

Shapes: S tokens of the prompt, n new tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gpt_fast_sd.policies.config import DraftConfig
from measuring.lossless import n_agreeing
from measuring.peers import AS_IT_COMES, Decoded, Entry, Field, PeerFailed, Setup, Worker
from measuring.tables import Column, Table, number
from measuring.turns import SHORT, distinct_4grams, spread

PROGRAM = "llama-server"
START_SECONDS = 120.0  # within which a server has loaded its models
ANSWER_SECONDS = 3600.0  # within which it has answered, a long prompt included
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy there is for others
HEATS = 2  # runs of each mode, the faster of which decides whether it takes turns
GAMMAS = range(1, 7)
LLAMA_WEIGHTS = "F16"  # of the target: on a CPU llama.cpp's BF16 is no faster
LLAMA_DRAFTS, LOOKED_UP = (2, 4, 8), (3, 10)
SMALLER = "Q4_0"  # a draft of the layout that llama.cpp has its fastest products of four bits for
LLAMA_LOOKUPS = {  # n-gram simple drafts nothing if fewer than N tokens follow the match, so M is at least N
    "n-gram cache": ("ngram-cache",),
    **{
        f"n-gram simple {n}, {m} drafts": (
            "ngram-simple", "--spec-ngram-simple-size-n", str(n), "--spec-ngram-simple-size-m", str(m)
        )
        for n, m in ((2, 2), (3, 4), (3, 8), (12, 48))
    },
}  # fmt: skip
REMEMBERS = "ngram-cache"  # what a request wrote, and would draft it for the next one of the same prompt


def entries() -> list[Entry]:
    """Every mode of every peer, its plain decoding among them."""

    def ours(kind: str, mode: str, **how: Any) -> list[Entry]:
        drafts = [DraftConfig(gamma=gamma, **how) for gamma in GAMMAS]
        return [Entry(peer=f"ours, {kind}", mode=f"{mode}gamma {one.gamma}", dtype="bf16", draft=one) for one in drafts]

    def llama(kind: str, modes: Mapping[str, tuple[str, ...]]) -> list[Entry]:
        return [
            Entry(peer=f"llama.cpp{kind}", mode=mode, dtype="bf16", weights=LLAMA_WEIGHTS, kv="F16", server=flags)
            for mode, flags in modes.items()
        ]

    draft = {
        f"{n} drafts, {'the file' if weights == AS_IT_COMES else weights}": (
            "draft-simple", "--spec-draft-n-max", str(n), "--spec-draft-model", f"{weights}.gguf"
        )
        for weights in (AS_IT_COMES, SMALLER) for n in LLAMA_DRAFTS
    }  # fmt: skip
    plain = Entry(peer="transformers", mode="", dtype="bf16", attention="sdpa")
    return [
        Entry(peer="ours", mode="", dtype="bf16"),
        *ours("int4 drafts", "all keys, ", policy="full", quantize="int4"),
        *ours("int4 drafts", "256 keys, ", policy="streaming", budget=256, quantize="int4"),
        *ours("lookup", "", policy="lookup"), *llama("", {"": ("none",)}), *llama(", draft model", draft),
        *llama(", lookup", LLAMA_LOOKUPS), plain,
        *(replace(plain, peer="transformers, lookup", mode=f"{n} drafts", lookup=n) for n in LOOKED_UP),
    ]  # fmt: skip


def find_program(folder: Path) -> tuple[Path, str]:
    """The server in a folder of llama.cpp's programs and what it says of its version; ValueError in one sentence."""
    program = folder / PROGRAM
    if not program.is_file():
        raise ValueError(f"{folder} holds no {PROGRAM}: build it of llama.cpp's source, as docs/measure.md says")
    try:
        said = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{program} --version gave no answer in {START_SECONDS:.0f} s") from None
    text = (said.stdout + said.stderr).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if said.returncode:
        raise ValueError(f"{program} --version ended with code {said.returncode}: {(lines or ['it said nothing'])[-1]}")
    return program, "; ".join(lines)


class LlamaServer:
    """llama.cpp's server with one slot and one model, or two if one drafts."""

    def __init__(self, program: Path, entry: Entry, setup: Setup, capacity: int) -> None:
        kind, *flags = entry.server
        numbers = {
            "-c": -(-capacity // 256) * 256, "-np": 1, "-t": setup.threads, "-tb": setup.threads, "-b": 512,
            "-ub": 512, "-ngl": 0, "--cache-ram": 0, "--ctx-checkpoints": 0,
        }  # fmt: skip
        self._command = [
            str(program.resolve()), "-m", f"{entry.weights}.gguf", "--spec-type", kind, *flags,
            *(str(part) for pair in numbers.items() for part in pair),
            "-ctk", entry.kv.lower(), "-ctv", entry.kv.lower(), "-fa", "on" if entry.flash else "off",
            "--fit", "off", "--offline", "--no-ui", "--host", "127.0.0.1",
        ]  # fmt: skip
        self._ggufs = setup.ggufs
        self._forgets = kind != REMEMBERS
        try:
            self._start()
        except BaseException:  # nobody else can close it
            self.close()
            raise

    def decode(self, tokens: list[int], n: int) -> Decoded:
        """n greedy tokens after the prompt [S], whose keys the slot keeps for the next call, and the one before them.

        That one comes out of the prompt's own pass, so n + 1 are asked for. The end of the text is never chosen.
        """
        if not self._forgets:
            self.close()
            self._start()
        request = {
            "prompt": tokens, "n_predict": n + 1, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"],
            "ignore_eos": True, "cache_prompt": True, "return_tokens": True,
        }  # fmt: skip
        started = time.perf_counter()
        try:
            answer = json.loads(self._ask("/completion", request))
        except urllib.error.HTTPError as refused:
            raise self._failed(f"refused a request: {refused.read(300).decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise self._failed(f"gave no answer ({type(error).__name__})") from None
        return decoded(answer, n, time.perf_counter() - started)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(
            [*self._command, "--port", str(self._port)], cwd=self._ggufs, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log,
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):  # not yet, or never
                self._ask("/health", timeout=deadline - time.monotonic())
                return
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode}")
            time.sleep(0.1)
        raise self._failed(f"was not ready after {START_SECONDS:.0f} s")

    def _ask(self, path: str, request: dict[str, Any] | None = None, timeout: float = ANSWER_SECONDS) -> bytes:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", None if request is None else json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with DIRECTLY.open(asked, timeout=max(timeout, 0.1)) as answer:
            return cast(bytes, answer.read())

    def _failed(self, how: str) -> PeerFailed:
        """The reason, with the last thing that the program said; the process is ended."""
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        last = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()][-1:]
        self._log.close()
        return PeerFailed(f"{PROGRAM} {how}{': ' if last else ''}{''.join(last)[:300]}")


def decoded(answer: dict[str, Any], n: int, waited: float) -> Decoded:
    """What a server's answer after so many seconds says of n tokens behind the first; PeerFailed if that cannot be."""
    try:
        timings, tokens = answer["timings"], [int(token) for token in answer["tokens"]]
        told, seconds = int(timings["predicted_n"]), float(timings["predicted_ms"]) / 1e3
        drafted, accepted = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))  # absent if none
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PeerFailed(f"{PROGRAM} gave an answer without its tokens and timings: {str(answer)[:200]}") from None
    if not told == len(tokens) == n + 1:
        raise PeerFailed(f"{PROGRAM} gave {len(tokens)} tokens and counted {told} where {n + 1} were asked for")
    if not 0 < seconds <= waited:
        raise PeerFailed(f"{PROGRAM} says that {seconds:.3f} s of {waited:.3f} s were decoding")
    if not 0 <= accepted <= drafted or accepted >= n:
        raise PeerFailed(f"{PROGRAM} says that it accepted {accepted} of {drafted} drafts for {n} tokens")
    return Decoded(tokens=tokens[:n], seconds=seconds, rounds=n - accepted, drafted=drafted, accepted=accepted)


class Contest(Field):
    """One run of the benchmark: every mode in a heat of its own, then the best mode of each peer in turns."""

    def __init__(self, setup: Setup, program: Path, without: Sequence[str], *, new_tokens: int, repeats: int) -> None:
        """without: modes that are left out. new_tokens: of each run. repeats: turns."""
        super().__init__(setup, entries(), without)
        self.program, self.new_tokens, self.repeats = program, new_tokens, repeats

    def start(self, entry: Entry, context: int) -> Worker | LlamaServer:
        capacity = context + self.new_tokens + 1
        if entry.server:
            return LlamaServer(self.program, entry, self.setup, capacity)
        worker = Worker(entry, self.setup)
        worker.call("reserve", 1, capacity)
        return worker

    def heat(self, entry: Entry, prompt: list[int]) -> Decoded:
        with contextlib.closing(self.start(entry, len(prompt))) as peer:
            peer.decode(prompt, min(SHORT, self.new_tokens))
            return min((peer.decode(prompt, self.new_tokens) for _ in range(HEATS)), key=lambda run: run.seconds)

    def turns(self, best: Sequence[Entry], prompt: list[int]) -> dict[Entry, list[Decoded]]:
        peers: dict[Entry, Worker | LlamaServer] = {}

        def begin(entry: Entry) -> Decoded:
            peers[entry] = started.enter_context(contextlib.closing(self.start(entry, len(prompt))))
            return peers[entry].decode(prompt, min(SHORT, self.new_tokens))

        def run(entry: Entry) -> Decoded:
            return peers[entry].decode(prompt, self.new_tokens)

        with contextlib.ExitStack() as started:
            found = self.in_turns(best, f"context {len(prompt)}", [begin, *[run] * self.repeats])
        return {entry: runs[1:] for entry, runs in found.items()}

    def cell(self, prompt: list[int]) -> dict[str, Any]:
        heats: dict[Entry, Decoded] = {}
        print(HEAT.head, flush=True)
        for entry in self.entries:
            if run := self.attempt(entry, f"context {len(prompt)}", self.heat, entry, prompt):
                heats[entry] = run
                print(HEAT.line(heat_row(entry, run)), flush=True)
        best = {entry.peer: entry for entry in sorted(heats, key=lambda entry: heats[entry].tokens_per_second)}
        runs = self.turns([entry for entry in heats if best[entry.peer] == entry], prompt)
        return {"heats": [heat_row(*pair) for pair in heats.items()], "results": rows_of(runs)}


def heat_row(entry: Entry, run: Decoded) -> dict[str, Any]:
    """One mode and what its drafts did, as plain data."""
    return {
        "peer": entry.peer, "mode": entry.mode, "tokens_per_second": run.tokens_per_second,
        "accepted_share": run.accepted / run.drafted if run.drafted else None,
        "drafted_per_round": run.drafted / run.rounds, "tokens_per_round": len(run.tokens) / run.rounds,
    }  # fmt: skip


def rows_of(runs: dict[Entry, list[Decoded]]) -> list[dict[str, Any]]:
    plain = {entry.peer: found for entry, found in runs.items() if "," not in entry.peer}
    rows = []
    for entry, found in runs.items():
        own, first = plain.get(entry.peer.split(",")[0]), found[0].tokens
        speeds = [run.tokens_per_second for run in found]
        rows.append(heat_row(entry, found[0]) | {
            "tokens_per_second": spread(speeds), "over_its_plain": over(found, own),
            "over_our_plain": over(found, plain.get("ours")), "distinct_4grams": distinct_4grams([first]),
            "same_as_its_plain": n_agreeing(first, own[0].tokens) if own else None,
            "same_in_every_turn": all(run.tokens == first for run in found), "tokens": first,
        })  # fmt: skip
    return rows


def over(runs: Sequence[Decoded], others: Sequence[Decoded] | None) -> float | None:
    """How many times as fast as the others' run of the same turn, the median over the turns."""
    pairs = zip(runs, others or (), strict=False)
    return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs) if others else None


DRAFTS = (
    number("accepted", "accepted_share", ".0%"), number("drafted/round", "drafted_per_round", ".2f"),
    number("tokens/round", "tokens_per_round", ".2f"),
)  # fmt: skip
PEER = Column("peer", lambda r: r["peer"], 22, left=True)
HEAT = Table(
    PEER, Column("mode, alone", lambda r: r["mode"], 34, left=True), number("tokens/s", "tokens_per_second", ".1f"),
    *DRAFTS,
)  # fmt: skip
TURNS = Table(
    PEER, Column("its best mode, in turns", lambda r: r["mode"], 34, left=True),
    number("tokens/s", "tokens_per_second.median", ".1f"), number("least", "tokens_per_second.min", ".1f", 6),
    number("most", "tokens_per_second.max", ".1f", 6), number("/ its plain", "over_its_plain", ".2f"),
    number("/ our plain", "over_our_plain", ".2f"), *DRAFTS, number("as its plain", "same_as_its_plain", "d"),
    number("distinct 4-grams", "distinct_4grams", ".0%"),
)  # fmt: skip
