"""Time plain decoding of one model in this engine, transformers and llama.cpp: same weights, prompt, dtype and threads.

    python scripts/peers.py                                   # the bundled model, everything that is installed
    python scripts/peers.py --model FOLDER --contexts 512,8192 --batches 1,8 --json peers.json --plot peers.png
    python scripts/peers.py --model smollm2 --contexts 512,2000 --json peers.json   # or FILE.gguf

What is compared, and why it is fair:
* Decoding only. Prefill is timed apart: one row is prefilled and its keys and values are *copied* into the other rows,
  so every row has its own memory and a step reads all of it. For llama.cpp that takes one stream per sequence
  (kv_unified=False, where copying a sequence copies buffers; in a unified cache it would only share cells, and a step
  would read 1/B of the bytes). The size of the KV buffer that llama.cpp reports is checked against B full rows.
* Every peer runs in a process of its own, with the same number of threads; the others wait on a pipe meanwhile. Peers
  take turns, A B C A B C: a block of steps each, its first step untimed (caches and thread pools wake up).
* Every mode of a peer is timed and the fastest counts (marked *): transformers with sdpa and eager attention; its
  static cache under torch.compile with both; llama.cpp with F16 and BF16 weights and KV, flash attention off and on.
* A GGUF file is dequantized to 16 bits once, for all peers alike. llama.cpp is timed on the file as it comes, too, as a
  peer of its own: it then reads fewer bytes a weight, which its ceiling takes into account, and computes in 8 bits.
* Each mode holds a model and all rows of its own at the same time: --without leaves out what memory cannot hold.
* Prefill is timed once a cell and mode: tokens/s of the one row, its copying into the others included.
* The ceiling is the time to read the weights and the context's keys and values once, at the read bandwidth that this
  machine shows in this run. Cells that fit into a CPU cache can pass 100 %.
* Greedy tokens are compared with transformers in fp32: every peer in fp32 (they must agree), and every timed cell in
  its own dtype (where rounding may decide between near-equal logits: the gap there is shown).

--json FILE is whole after every cell. Started again with the same settings it goes on where it ended; contexts and
batches may be added. Other settings are refused; --fresh begins anew.

Shapes: B batch rows, S tokens a row holds, V vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed

from common import refuse
from flags import count, positive, sizes
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.measuring import plots, prompts
from gpt_fast_sd.measuring.chips import measure
from gpt_fast_sd.measuring.gguf_export import export_gguf
from gpt_fast_sd.measuring.ledger import Ledger, check_writable
from gpt_fast_sd.measuring.lossless import first_difference
from gpt_fast_sd.measuring.machine import environment, version
from gpt_fast_sd.measuring.tables import Column, Table, shown
from gpt_fast_sd.model import (
    ModelConfig,
    gguf_parts,
    load_model,
    load_tokenizer,
    read_config,
    save_hugging_face,
)

PROGRAM = "peers.py"
PACKAGES = ("torch", "transformers", "llama-cpp-python", "gguf")
PREFILL_CHUNK = 512
WARMUP_STEPS = 3
DEBUG = 1  # ggml's number of that level: of many layers it says more than is kept
INSTALL = {
    "ours": "pip install -e .",
    "transformers": "pip install transformers",
    "transformers-compiled": "pip install transformers (and a C++ compiler for torch.compile)",
    "llama.cpp": 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python gguf',
}
INSTALL["llama.cpp-file"] = INSTALL["llama.cpp"]
AS_IT_COMES = "file"  # weights of llama.cpp-file
# Weights, KV, flash attention. With BF16 KV its flash attention leaves the fast path on a CPU. In F32 it has none: it
# casts keys and values to F16 and sums in F16, which costs digits as the context grows (each cell shows its agreement).
LLAMA_MODES = {
    "bf16": (
        ("F16", "F16", False),
        ("F16", "F16", True),
        ("BF16", "F16", False),
        ("BF16", "F16", True),
        ("BF16", "BF16", False),
    ),
    "fp32": (("F32", "F32", False),),
}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# ---------------------------------------------------------------------------------------------------- the peers


class Peer(Protocol):
    """One engine with the model loaded. All rows hold the same prompt, each in its own memory."""

    notes: str

    def reserve(self, batch: int, capacity: int) -> None:
        """Room for batch rows of capacity tokens; whatever was held before is gone."""
        ...

    def prefill(self, tokens: list[int]) -> list[int]:
        """Every row holds tokens [S]; returns the greedy token that follows, per row [B]."""
        ...

    def step(self) -> list[int]:
        """Every row holds its latest token too; returns the greedy token that follows, per row [B]."""
        ...


class Ours:
    """Plain decoding by this engine: whole rounds, the host's part included."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from gpt_fast_sd import DraftConfig, Engine, EngineConfig

        def start(batch: int, capacity: int) -> Engine:
            config = EngineConfig(batch_size=batch, max_seq_len=capacity, device="cpu", dtype=dtype)
            return Engine.from_pretrained(folder, config, DraftConfig(policy="off"))

        self.start = start
        self.notes = f"version {version('gpt_fast_sd') or 'of this checkout'}"

    def reserve(self, batch: int, capacity: int) -> None:
        """A new engine of that shape, compiled."""
        self.events: Any = None
        self.engine: Any = None  # let go of the old cache first
        self.engine = self.start(batch, capacity)
        self.engine.tokenizer = None  # tokens only, as the others
        self.engine.warm_up()

    def prefill(self, tokens: list[int]) -> list[int]:
        """Prefill one slot (the engine copies its keys into the others), decode the first token: tokens [S] -> [B]."""
        from gpt_fast_sd import SamplingParams

        batch, room = self.engine.config.batch_size, self.engine.config.max_seq_len - len(tokens)
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        self.events = self.engine.stream([tokens] * batch, params)
        return self.step()

    def step(self) -> list[int]:
        """One round of plain decoding, which gives every slot an event -> [B]."""
        return [next(self.events).tokens[-1] for _ in range(self.engine.config.batch_size)]


class Transformers:
    """Hugging Face transformers: a growing cache run eagerly, or a static cache under torch.compile."""

    def __init__(self, folder: Path, dtype: str, attention: str, *, compiled: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=TORCH_DTYPES[dtype], attn_implementation=attention
        )
        self.compiled = compiled
        self.cache: Any = None
        self.notes = f"version {version('transformers')}"

    def reserve(self, batch: int, capacity: int) -> None:
        """Forget the old cache and, when compiled, the old graphs: shapes are static."""
        self.batch, self.capacity, self.cache = batch, capacity, None
        self.decode: Callable[..., Any] = self.model
        if self.compiled:
            torch.compiler.reset()
            self.decode = torch.compile(self.model, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def prefill(self, tokens: list[int]) -> list[int]:
        """Prefill one row in chunks, then repeat its keys and values: tokens [S] -> [B]."""
        from transformers import DynamicCache, StaticCache

        cache: Any = DynamicCache(config=self.model.config)
        for chunk in torch.tensor([tokens]).split(PREFILL_CHUNK, dim=1):  # [1, chunk]
            logits = self.model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        if self.compiled:
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.capacity)
            for i, layer in enumerate(cache.layers):
                k, v = (x.expand(self.batch, -1, -1, -1) for x in (layer.keys, layer.values))  # [B, K, S, H]
                self.cache.update(k, v, i)
        else:
            cache.batch_repeat_interleave(self.batch)
            self.cache = cache
        return self._choose(logits.expand(self.batch, -1, -1))

    @torch.no_grad()
    def step(self) -> list[int]:
        """One forward of [B, 1] -> [B]."""
        return self._choose(self.decode(self.tokens, past_key_values=self.cache, use_cache=True).logits)

    def top2_gap(self) -> float:
        """How far the latest token's logit lies above the runner-up, in row 0."""
        best, second = self.logits[0].topk(2).values.tolist()
        return float(best - second)

    def _choose(self, logits: Tensor) -> list[int]:
        """[B, 1, V] -> the greedy tokens [B], kept for the next step."""
        self.logits = logits[:, -1].float()
        self.tokens = logits.argmax(-1)  # [B, 1]
        tokens: list[int] = self.tokens[:, 0].tolist()
        return tokens


class LlamaCpp:
    """llama.cpp through the low-level calls of llama-cpp-python, one KV stream per sequence."""

    def __init__(self, gguf: Path, config: ModelConfig, kv: str, threads: int, *, flash: bool, repacked: bool) -> None:
        import gguf as gguf_format
        import llama_cpp
        import numpy as np

        self.api, self.np, self.config = llama_cpp, np, config
        self.types: Any = gguf_format.GGMLQuantizationType  # numbered as ggml numbers them
        self.kv, self.threads, self.flash = kv, threads, flash
        self.log = ""
        self._on_log = llama_cpp.llama_log_callback(self._keep_log)  # held here: C keeps only the pointer
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repacked
        self.model: Any = llama_cpp.llama_model_load_from_file(str(gguf).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp refused the model: {self.log.strip().splitlines()[-1:]}")
        self.context: Any = None
        self.prompt_batch: Any = None
        self.step_batch: Any = None
        features = " ".join(re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode()))
        self.notes = (
            f"version {version('llama-cpp-python')} of llama-cpp-python, one KV stream per sequence; {features}"
        )

    def reserve(self, batch: int, capacity: int) -> None:
        """A new context whose KV buffer holds batch separate rows."""
        api = self.api
        if self.context:
            api.llama_free(self.context)
            api.llama_batch_free(self.prompt_batch)
            api.llama_batch_free(self.step_batch)
        params = api.llama_context_default_params()
        params.n_seq_max = batch
        params.kv_unified = False
        params.n_ctx = batch * -(-capacity // 256) * 256
        params.n_batch = params.n_ubatch = PREFILL_CHUNK
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = int(self.types[self.kv])
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if self.flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        self.log = ""
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp refused the context: {self.log.strip().splitlines()[-1:]}")
        self._refuse_shared_rows(batch, capacity)
        self.batch = batch
        self.prompt_batch = api.llama_batch_init(PREFILL_CHUNK, 0, 1)
        self.step_batch = api.llama_batch_init(batch, 0, 1)
        self.step_batch.n_tokens = batch
        for row in range(batch):
            self.step_batch.n_seq_id[row], self.step_batch.seq_id[row][0] = 1, row
            self.step_batch.logits[row] = True

    def prefill(self, tokens: list[int]) -> list[int]:
        """Prefill sequence 0, copy its buffers into the other streams: tokens [S] -> [B]."""
        batch = self.prompt_batch
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            batch.n_tokens = len(chunk)
            for i, token in enumerate(chunk):
                batch.token[i], batch.pos[i] = token, start + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = start + i == len(tokens) - 1
            self._decode(batch)
        self.tokens = self._choose(1) * self.batch
        memory = self.api.llama_get_memory(self.context)
        for row in range(1, self.batch):
            self.api.llama_memory_seq_cp(memory, 0, row, -1, -1)
        self.length = len(tokens)
        return self.tokens

    def step(self) -> list[int]:
        """One llama_decode of B tokens, one per sequence -> [B]."""
        for row, token in enumerate(self.tokens):
            self.step_batch.token[row], self.step_batch.pos[row] = token, self.length
        self._decode(self.step_batch)
        self.length += 1
        self.tokens = self._choose(self.batch)
        return self.tokens

    def _decode(self, batch: Any) -> None:
        status = self.api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _choose(self, rows: int) -> list[int]:
        """The greedy tokens of the latest batch's outputs [rows, V] -> [rows]."""
        logits = self.np.ctypeslib.as_array(self.api.llama_get_logits(self.context), (rows, self.config.vocab_size))
        tokens: list[int] = logits.argmax(1).tolist()
        return tokens

    def _keep_log(self, level: int, text: bytes, user_data: Any) -> None:
        if level != DEBUG:
            self.log = (self.log + text.decode(errors="replace"))[-100_000:]

    def _refuse_shared_rows(self, batch: int, capacity: int) -> None:
        """RuntimeError unless llama.cpp says that it allocated keys and values for batch full rows."""
        needed = batch * capacity * self.config.kv_bytes_per_token(4 if self.kv == "F32" else 2)
        held = sum(float(size) for size in re.findall(r"KV buffer size = +([\d.]+) MiB", self.log)) * 2**20
        if held < needed:
            raise RuntimeError(
                f"llama.cpp reports {held / 2**20:.0f} MiB of KV where {batch} separate rows need {needed / 2**20:.0f}"
            )


# ------------------------------------------------------------------------------------- one process for each peer


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One mode of one peer in one dtype."""

    peer: str
    mode: str
    dtype: str
    attention: str = ""  # transformers' name of it
    weights: str = ""  # ggml's dtypes
    kv: str = ""
    flash: bool = False
    repacked: bool = True  # as llama.cpp does it by itself; with AMX its Q4_1 ended the process (0.3.36)

    @property
    def label(self) -> str:
        """Peer and mode in one phrase."""
        return f"{self.peer} ({self.mode})" if self.mode else self.peer


def entries(peer: str, dtype: str) -> list[Entry]:
    """Every mode in which a peer may compete."""
    if peer == "ours":
        return [Entry(peer=peer, mode="", dtype=dtype)]
    if peer == "llama.cpp-file":
        return [
            Entry(
                peer=peer, dtype=dtype,
                mode=f"fewer bytes a weight, {'repacked' if repacked else 'mapped'}, flash {'on' if flash else 'off'}",
                weights=AS_IT_COMES, kv="F16", flash=flash, repacked=repacked,
            )
            for repacked in (True, False) for flash in (False, True) if dtype != "fp32"
        ]  # fmt: skip
    if peer == "llama.cpp":
        return [
            Entry(
                peer=peer, mode=f"{w}, {kv} KV, flash {'on' if flash else 'off'}",
                dtype=dtype, weights=w, kv=kv, flash=flash,
            )
            for w, kv, flash in LLAMA_MODES[dtype]
        ]  # fmt: skip
    return [Entry(peer=peer, mode=attention, dtype=dtype, attention=attention) for attention in ("sdpa", "eager")]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all peers share."""

    folder: Path
    config: ModelConfig
    ggufs: Path  # folder of the GGUF files, F16.gguf and so on
    threads: int


def build(entry: Entry, setup: Setup) -> Peer:
    """The peer an entry names, its model loaded."""
    if entry.peer == "ours":
        return Ours(setup.folder, entry.dtype)
    if entry.peer.startswith("llama.cpp"):
        gguf = setup.ggufs / f"{entry.weights}.gguf"
        return LlamaCpp(gguf, setup.config, entry.kv, setup.threads, flash=entry.flash, repacked=entry.repacked)
    compiled = entry.peer == "transformers-compiled"
    return Transformers(setup.folder, entry.dtype, entry.attention, compiled=compiled)


def timed_steps(peer: Peer, untimed: int, timed: int) -> tuple[list[list[int]], list[float]]:
    """Take untimed + timed steps -> all their tokens [steps, B] and the milliseconds of the timed ones."""
    tokens, milliseconds = [], []
    for i in range(untimed + timed):
        start = time.perf_counter()
        tokens.append(peer.step())
        if i >= untimed:
            milliseconds.append((time.perf_counter() - start) * 1e3)
    return tokens, milliseconds


def serve(pipe: Connection, entry: Entry, setup: Setup) -> None:
    """Build the peer, then answer calls until the pipe closes. Answers are ("ok" | "missing" | "failed", value)."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(setup.threads)
    try:
        peer = build(entry, setup)
        pipe.send(("ok", peer.notes))
    except ImportError as error:
        pipe.send(("missing", one_line(error)))
        return
    except Exception as error:  # whatever a peer dies of is this peer's line in the report
        pipe.send(("failed", one_line(error)))
        return
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            call = timed_steps if name == "steps" else getattr(type(peer), name)
            pipe.send(("ok", call(peer, *arguments)))
        except Exception as error:  # as above
            pipe.send(("failed", one_line(error)))


class PeerMissing(Exception):
    """The peer is not installed."""


class PeerFailed(Exception):
    """The peer is installed and could not do what it was asked."""


class Worker:
    """A peer in its own process; calls block until it answers."""

    def __init__(self, entry: Entry, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, entry, setup), daemon=True)
        self._process.start()
        theirs.close()
        self.notes = str(self._answer())

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of a peer's method (or of timed_steps, as "steps"); PeerFailed with the reason."""
        self._pipe.send((name, arguments))
        return self._answer()

    def close(self) -> None:
        """The process is gone and its memory free."""
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()

    def _answer(self) -> Any:
        try:
            state, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise PeerFailed(f"its process ended with code {self._process.exitcode}") from None
        if state == "ok":
            return value
        self.close()
        raise (PeerMissing if state == "missing" else PeerFailed)(value)


# ------------------------------------------------------------------------------------------ prompt and ceiling


def prompt_tokens(folder: Path, config: ModelConfig, text: Path, length: int) -> list[int]:
    """BOS and the text's tokens, repeated or cut to length [S]."""
    tokenizer = load_tokenizer(folder, config)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer to read the prompt's text with")
    return prompts.round_the_text(prompts.tokens_of(text, tokenizer), 1, length, config.bos_id)[0][0]


def read_bandwidth() -> float:
    """GB/s at which torch reads 1 GiB."""
    return measure(torch.device("cpu"), n_bytes=2**30, size=64, dtype=torch.float32, repeats=10).read / 1e9


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of 16-bit weights that a step reads; of an untied input embedding it reads B rows only."""
    unread = 0 if config.tie_embeddings else config.vocab_size * config.dim
    return 2 * (config.n_params - unread)


# --------------------------------------------------------------------------------------------- the measurement


@dataclass(kw_only=True)
class Timing:
    """What one entry did in one cell."""

    entry: Entry
    prefill_seconds: float
    tokens: list[list[int]]  # [steps, B], from the first one on
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Milliseconds a step, half of the steps took less."""
        return statistics.median(self.milliseconds)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers says in fp32: greedy tokens [n] and each one's lead over the runner-up [n]."""

    tokens: list[int]
    gaps: list[float]

    def agreement(self, tokens: Sequence[list[int]]) -> dict[str, Any]:
        """How many leading tokens of row 0 are the same, and how close the choice was where they part."""
        pairs = list(zip(self.tokens, (row[0] for row in tokens), strict=False))
        parted = first_difference(*zip(*pairs, strict=True)) if pairs else None
        agreed = len(pairs) if parted is None else parted
        return {
            "agreed": agreed,
            "compared": len(pairs),
            "fp32_logit_gap_where_they_part": None if agreed == len(pairs) else self.gaps[agreed],
            "rows_alike": all(len(set(row)) == 1 for row in tokens[: len(pairs)]),
        }


class Run:
    """One run of the benchmark: its settings, the peers still in it, and the report it grows."""

    def __init__(self, args: argparse.Namespace, setup: Setup) -> None:
        self.args, self.setup = args, setup
        self.prompt: list[int] = []
        timed = [entry for peer in args.peers for entry in entries(peer, "bf16")]
        self.entries = [entry for entry in timed if entry.mode not in args.without]
        self.workers: dict[Entry, Worker] = {}
        self.skipped: dict[str, str] = {}
        self.failures: list[str] = []
        self.notes: dict[str, str] = {}

    @property
    def decoded(self) -> int:
        """Tokens each row says in a cell: one out of prefill, one a step."""
        return int(1 + WARMUP_STEPS + self.args.repeats * (1 + self.args.steps))

    def skip(self, peer: str, reason: str) -> None:
        """The peer takes no part from here on; the report names it."""
        self.skipped[peer] = reason
        self.entries = [entry for entry in self.entries if entry.peer != peer]
        print(f"  skipped {peer}: {reason}. To install it: {INSTALL[peer]}", flush=True)

    def fail(self, entry: Entry, where: str, reason: str) -> None:
        """Note a failure: this entry has no result there."""
        self.failures.append(f"{entry.label}, {entry.dtype}, {where}: {reason}")
        print(f"  failed: {self.failures[-1]}", flush=True)

    def worker(self, entry: Entry) -> Worker:
        """The entry's process, started when it is first asked for."""
        if entry not in self.workers:
            self.workers[entry] = Worker(entry, self.setup)
            self.notes[entry.peer] = self.workers[entry].notes
        return self.workers[entry]

    def find_missing(self) -> None:
        """Start every timed entry once; peers that are not installed are skipped by name."""
        for entry in list(self.entries):
            if entry.peer in self.skipped:
                continue
            try:
                self.worker(entry)
            except PeerMissing as reason:
                self.skip(entry.peer, str(reason))
            except PeerFailed as reason:
                self.fail(entry, "start", str(reason))
                self.entries.remove(entry)

    def reference(self, context: int) -> Reference | None:
        """The tokens every peer should say after this context, or None without transformers."""
        entry = Entry(peer="transformers", mode="eager", dtype="fp32", attention="eager")
        try:
            worker = Worker(entry, self.setup)
            worker.call("reserve", 1, context + self.args.agree)
            tokens = [worker.call("prefill", self.prompt[:context])[0]]
            gaps = [worker.call("top2_gap")]
            for _ in range(self.args.agree - 1):
                tokens.append(worker.call("step")[0])
                gaps.append(worker.call("top2_gap"))
            worker.close()
        except (PeerMissing, PeerFailed) as reason:
            print(f"  no fp32 reference at context {context}: {reason}")
            return None
        return Reference(tokens=tokens, gaps=gaps)

    def agreement_in_fp32(self, context: int, reference: Reference) -> dict[str, Any]:
        """Every peer in fp32 against the reference, two rows each, by label."""
        report = {}
        for peer in [peer for peer in self.args.peers if peer not in self.skipped]:
            for entry in entries(peer, "fp32"):
                try:
                    worker = Worker(entry, self.setup)
                    worker.call("reserve", 2, context + self.args.agree)
                    tokens = [worker.call("prefill", self.prompt[:context])]
                    tokens += worker.call("steps", self.args.agree - 1, 0)[0]
                    worker.close()
                    report[entry.label] = reference.agreement(tokens)
                    print(f"  {entry.label:<62}{agreement_phrase(report[entry.label])}", flush=True)
                except (PeerMissing, PeerFailed) as reason:
                    self.fail(entry, f"context {context}", str(reason))
        return report

    def cell(self, context: int, batch: int) -> list[Timing]:
        """Prefill every entry, then let them take turns -> what each one took."""
        timings: dict[Entry, Timing] = {}

        def attempt(entry: Entry, work: Callable[[Entry], None]) -> None:
            try:
                work(entry)
            except (PeerMissing, PeerFailed) as reason:
                self.fail(entry, f"context {context}, batch {batch}", str(reason))
                self.workers.pop(entry, None)
                timings.pop(entry, None)

        def prepare(entry: Entry) -> None:
            worker = self.worker(entry)
            worker.call("reserve", batch, context + self.decoded)
            start = time.perf_counter()
            first = worker.call("prefill", self.prompt[:context])
            timings[entry] = Timing(entry=entry, prefill_seconds=time.perf_counter() - start, tokens=[first])
            timings[entry].tokens += worker.call("steps", WARMUP_STEPS, 0)[0]

        def take_turn(entry: Entry) -> None:
            tokens, milliseconds = self.worker(entry).call("steps", 1, self.args.steps)
            timings[entry].tokens += tokens
            timings[entry].milliseconds += milliseconds

        for entry in self.entries:
            attempt(entry, prepare)
        for _ in range(self.args.repeats):
            for entry in list(timings):
                attempt(entry, take_turn)
        return list(timings.values())

    def close(self) -> None:
        """No process is left."""
        for worker in self.workers.values():
            worker.close()


# --------------------------------------------------------------------------------------------------- the report


def cell_report(
    timings: list[Timing], context: int, batch: int, needs: dict[str, Any], reference: Reference | None
) -> dict[str, Any]:
    """One cell as plain data: every entry beside the roofline and beside ours."""
    fastest = {peer: min(t.median for t in timings if t.entry.peer == peer) for peer in {t.entry.peer for t in timings}}
    rows = [
        {
            "peer": t.entry.peer,
            "mode": t.entry.mode,
            "counts": t.median == fastest[t.entry.peer],
            "ms_per_step": {"median": t.median, "min": min(t.milliseconds), "max": max(t.milliseconds)},
            "tokens_per_second": batch / t.median * 1e3,
            "percent_of_roofline": 100 * needs[roofline_of(t.entry)] / t.median,
            "time_over_ours": t.median / fastest["ours"] if "ours" in fastest else None,
            "prefill_one_row_seconds": t.prefill_seconds,
            "prefill_tokens_per_second": context / t.prefill_seconds,
            "greedy": reference.agreement(t.tokens) if reference else None,
            "first_tokens": [row[0] for row in t.tokens[:16]],
        }
        for t in timings
    ]
    return {"context": context, "batch": batch, **needs, "results": rows}


def roofline_of(entry: Entry) -> str:
    """The name of the ceiling that holds for it among what a cell needs."""
    return "file_roofline_ms" if entry.weights == AS_IT_COMES else "roofline_ms"


def agreement_phrase(greedy: dict[str, Any] | None) -> str:
    """One agreement as a table cell."""
    if greedy is None:
        return "-"
    phrase = f"{greedy['agreed']}/{greedy['compared']}"
    if greedy["fp32_logit_gap_where_they_part"] is not None:
        phrase += f", gap {greedy['fp32_logit_gap_where_they_part']:.3f}"
    return phrase if greedy["rows_alike"] else phrase + ", rows differ"


CELL = Table(
    Column(
        "peer",
        lambda r: f"{'*' if r['counts'] else ' '} {r['peer']}{' (' + r['mode'] + ')' if r['mode'] else ''}",
        62,
        left=True,
    ),
    *(
        Column(name, lambda r, end=end: f"{r['ms_per_step'][end]:.2f}", 7)
        for name, end in (("ms/step", "median"), ("min", "min"), ("max", "max"))
    ),
    Column("tok/s", lambda r: f"{r['tokens_per_second']:.0f}"),
    Column("% roof", lambda r: f"{r['percent_of_roofline']:.0f}"),
    Column("/ ours", lambda r: shown(r["time_over_ours"], ".2f")),
    Column("prefill/s", lambda r: f"{r['prefill_tokens_per_second']:,.0f}"),
    Column("same tokens as fp32", lambda r: agreement_phrase(r["greedy"]), left=True),
)


def plot(cells: list[dict[str, Any]], title: str, file: Path) -> None:
    """Save one panel per cell: milliseconds a step of each peer's fastest mode, and the roofline."""
    rows: dict[int, list[Any]] = {}
    for cell in cells:
        bars = {
            row["peer"]: (
                row["ms_per_step"]["median"],
                f" {row['ms_per_step']['median']:.2f} ms, {row['percent_of_roofline']:.0f} %",
            )
            for row in cell["results"]
            if row["counts"]
        }
        name = f"context {cell['context']}, batch {cell['batch']}"
        rows.setdefault(cell["batch"], []).append((name, bars, cell["roofline_ms"]))
    plots.draw_bars(
        [*rows.values()], file, title=title, first="ours",
        xlabel="ms per step; dashed line and percentage: reading weights and KV once",
    )  # fmt: skip


def one_line(error: BaseException) -> str:
    """An exception as one line of a report."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ------------------------------------------------------------------------------------------------ command line


def peer_names(text: str) -> list[str]:
    """A parser of "ours,llama.cpp"."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in INSTALL:
            raise argparse.ArgumentTypeError(f"there is no peer {name!r}; there are {', '.join(INSTALL)}")
    return list(dict.fromkeys(names))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without the model."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Time plain decoding in this engine, transformers and llama.cpp.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", default="bundled", help="'bundled', 'smollm2', a model folder, a GGUF file or a hub id of a Llama")
    add("--text", type=Path, default=BUNDLED / "document.txt", help="text the prompt is made of, repeated or cut")
    add("--contexts", type=sizes, default=[512, 8192, 16000], help="tokens in the cache, as 512,8192")
    add("--batches", type=sizes, default=[1, 8], help="rows, as 1,8")
    add("--peers", type=peer_names, default=list(INSTALL), help=f"among {','.join(INSTALL)}")
    add("--without", metavar="MODE", nargs="+", default=[], help="modes that are not timed, as the table names them")
    add("--steps", type=positive, default=16, help="timed steps of a block")
    add("--repeats", type=positive, default=5, help="blocks each peer gets, in turns")
    add("--threads", type=positive, default=torch.get_num_threads(), help="threads of every peer")
    add("--agree", type=count, default=16, help="greedy tokens compared with fp32; 0: none")
    add("--json", metavar="FILE", help="keep one JSON document here, go on from it; - prints it as the last line")
    add("--fresh", action="store_true", help="forget what --json holds")
    add("--plot", type=Path, metavar="FILE", help="write a bar plot (PNG)")
    return parser.parse_args(argv)


def benchmark(args: argparse.Namespace, ggufs: Path) -> dict[str, Any]:
    """Run everything, printing as it goes, and return the report; ValueError for input that makes no sense."""
    source = locate(args.model)
    config = read_config(source)
    if args.contexts[0] < 2:
        raise ValueError(f"a context has at least 2 tokens, got {args.contexts[0]}")
    is_file = source.suffix.lower() == ".gguf"
    peers = [peer for peer in args.peers if is_file or peer != "llama.cpp-file"]
    file = Path(args.json) if args.json and args.json != "-" else None
    settings = {
        "model": source.name, "transformer": asdict(config), "text": args.text.name, "threads": args.threads,
        "steps": args.steps, "repeats": args.repeats, "warmup": WARMUP_STEPS, "peers": peers,
    }  # fmt: skip
    torch.set_num_threads(args.threads)
    here = environment(torch.device("cpu"), *PACKAGES)
    ledger = Ledger(file, "peers", settings, here, fresh=args.fresh, results="cells")
    folder = source
    if is_file:  # every peer reads the same 16-bit weights
        folder = ggufs / source.stem
        save_hugging_face(load_model(source, dtype=torch.bfloat16), folder, dtype=torch.bfloat16)
        (ggufs / f"{AS_IT_COMES}.gguf").symlink_to(source.resolve())
    setup = Setup(folder=folder.resolve(), config=config, ggufs=ggufs, threads=args.threads)
    args.peers = peers
    run = Run(args, setup)
    room = config.max_seq_len - run.decoded
    if max(args.contexts) > room:
        raise ValueError(
            f"context {max(args.contexts)} and {run.decoded} decoded tokens pass the model's {config.max_seq_len} "
            f"positions; use at most {room}, or fewer --steps or --repeats"
        )
    run.prompt = prompt_tokens(source, config, args.text, max(args.contexts))

    bandwidth = read_bandwidth()
    weights, per_token = weight_bytes(config), config.kv_bytes_per_token(2)
    print(f"model {args.model}: {config.n_params / 1e6:.1f} M parameters, {per_token} bytes of KV per token (16 bit)")
    print(f"read bandwidth {bandwidth:.1f} GB/s, {args.threads} threads, 1 GiB")
    in_file = sum(part.stat().st_size for part in gguf_parts(source)) if is_file else 0
    if is_file:
        print(f"the file has {in_file / 1e6:.1f} MB, dequantized to bf16 {weights / 1e6:.1f}")
    print(f"{'context':>9}{'batch':>7}{'weights MB':>12}{'KV MB':>9}{'roofline ms':>13}")
    needs = {}
    for context in args.contexts:
        for batch in args.batches:
            kv = batch * (context + run.decoded // 2) * per_token  # the cache grows: its mean over the steps
            needs[context, batch] = {
                "read_gb_per_second": bandwidth,
                "weight_bytes": weights,
                "kv_bytes": kv,
                "roofline_ms": (weights + kv) / bandwidth / 1e6,
                **({"file_roofline_ms": (in_file + kv) / bandwidth / 1e6} if is_file else {}),
            }
            roofline = needs[context, batch]["roofline_ms"]
            print(f"{context:>9}{batch:>7}{weights / 1e6:>12.1f}{kv / 1e6:>9.1f}{roofline:>13.2f}")

    todo = [cell for cell in needs if not ledger.find(dict(zip(("context", "batch"), cell, strict=True)))]
    if len(todo) < len(needs):
        print(f"{len(needs) - len(todo)} of {len(needs)} cells are in {args.json} already")
    extra: dict[str, Any] = {"read_gb_per_second": {"best": bandwidth}}
    try:
        if todo and any(peer.startswith("llama.cpp") for peer in args.peers):
            try:
                for name in ("F16", "BF16", "F32"):
                    export_gguf(folder, ggufs / f"{name}.gguf", name.lower())
            except ImportError as error:
                run.skip("llama.cpp", one_line(error))
        if todo:
            run.find_missing()
        for peer, notes in run.notes.items():
            print(f"{peer}: {notes}")
        extra["notes"] = ledger.document.get("notes", {}) | run.notes
        wanted = dict.fromkeys(context for context, _ in todo)
        references = {context: run.reference(context) if args.agree else None for context in wanted}
        shortest = min(args.contexts)
        if reference := references.get(shortest):
            print(f"first {args.agree} greedy tokens in fp32, context {shortest}, the same as transformers (eager):")
            extra["greedy_fp32"] = {"context": shortest, "peers": run.agreement_in_fp32(shortest, reference)}
        for context, batch in todo:
            timings = run.cell(context, batch)
            cell = cell_report(timings, context, batch, needs[context, batch], references[context])
            print(f"context {context}, batch {batch}: roofline {cell['roofline_ms']:.2f} ms")
            print(*CELL.lines(cell["results"]), sep="\n", flush=True)
            ledger.put({"context": context, "batch": batch}, cell)
            ledger.write(**extra)
    finally:
        run.close()
    again = read_bandwidth()
    print(f"* the mode that counts for its peer. Read bandwidth at the end: {again:.1f} GB/s", end="")
    print(": the percentages are too high, something else was running at the start" if again > 1.1 * bandwidth else "")
    for peer, reason in run.skipped.items():
        print(f"skipped {peer}: {reason}. To install it: {INSTALL[peer]}")
    for failure in run.failures:
        print(f"failed: {failure}")
    if todo:
        extra["read_gb_per_second"]["end"] = again
        ledger.write(
            **extra,
            skipped=[{"peer": p, "reason": r, "install": INSTALL[p]} for p, r in run.skipped.items()],
            failures=ledger.document.get("failures", []) + run.failures,
        )
    return ledger.document


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and write what was asked for, or exit with one sentence."""
    args = parse(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the peers' processes, as the next one
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        check_writable(Path(args.json) if args.json and args.json != "-" else None, args.plot)
        if args.plot:
            plots.check_drawable("--plot", args.plot)
        with tempfile.TemporaryDirectory() as ggufs:
            report = benchmark(args, Path(ggufs))
        if args.plot:
            cpu, rate = report["environment"]["cpu"], report["read_gb_per_second"]["best"]
            plot(report["cells"], f"Plain decoding: {cpu}, threads {args.threads}, {rate:.0f} GB/s", args.plot)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    if args.json == "-":
        print(json.dumps(report))
    if not any(cell["results"] for cell in report["cells"]):
        refuse(ValueError("no peer gave a result; the reasons are above"), PROGRAM, code=1)


if __name__ == "__main__":
    main()
