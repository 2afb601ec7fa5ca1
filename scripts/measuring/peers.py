"""Other engines next to this one: the same calls for each, and a process of its own for every mode.

Shapes: B batch rows, S tokens that a row holds, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import TORCH_DTYPES
from gpt_fast_sd.model import ModelConfig
from measuring.machine import version
from measuring.peer_gpt_fast import GptFast

PREFILL_CHUNK = 512
DEBUG = 1  # ggml's number of that level: with many layers it logs more than is kept
AS_IT_COMES = "file"  # weights of llama.cpp-file
# Weights, KV, flash attention. With BF16 KV its flash attention leaves the fast path on a CPU. In F32 there is none: it
# casts keys and values to F16 and sums in F16, which loses digits as the context grows (each cell shows its agreement).
LLAMA_MODES = {
    "bf16": (("F16", "F16", False), ("F16", "F16", True), ("BF16", "F16", False), ("BF16", "F16", True),
             ("BF16", "BF16", False)),
    "fp32": (("F32", "F32", False),),
}  # fmt: skip
T = TypeVar("T")

# One engine each with its model loaded; all rows hold the same prompt, each in its own memory.
# reserve: make room for so many rows of so many tokens. prefill: make every row hold tokens [S] -> the greedy token
# that follows, per row [B]. step: make every row also hold its latest token -> the next one, per row [B].


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A row's new tokens and the seconds of the rounds that gave them: the prompt's time is not among them."""

    tokens: list[int]
    seconds: float
    rounds: int
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


class Ours:
    """Plain or speculative decoding by this engine: whole rounds, the host's part included."""

    def __init__(self, folder: Path, dtype: str, draft: DraftConfig | None = None) -> None:
        self.model = folder, dtype, draft
        self.notes = f"version {version('gpt_fast_sd') or 'of this checkout'}"

    def reserve(self, batch: int, capacity: int) -> None:
        self.events: Any = None
        self.engine: Any = None  # free the old cache first
        folder, dtype, draft = self.model
        config = EngineConfig(batch_size=batch, max_seq_len=capacity, device="cpu", dtype=dtype)
        self.engine = Engine.from_pretrained(folder, config, draft)
        self.engine.tokenizer = None  # tokens only, like the others
        self.engine.warm_up()

    def prefill(self, tokens: list[int]) -> list[int]:
        """Prefill one slot (the engine copies its keys into the others), decode the first token: tokens [S] -> [B]."""
        batch, room = self.engine.config.batch_size, self.engine.config.max_seq_len - len(tokens)
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        self.events = self.engine.stream([tokens] * batch, params)
        return self.step()

    def step(self) -> list[int]:
        return [next(self.events).tokens[-1] for _ in range(self.engine.config.batch_size)]

    def decode(self, tokens: list[int], n: int) -> Decoded:
        params = SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
        found = [token for event in self.engine.stream([tokens], params) for token in event.tokens]
        stats = self.engine.stats
        drafts = {"drafted": stats.drafted, "accepted": stats.accepted}
        return Decoded(tokens=found, seconds=stats.decode_seconds, rounds=stats.rounds, **drafts)


class Transformers:
    """Hugging Face transformers: a growing cache run eagerly, or a static cache under torch.compile."""

    def __init__(self, folder: Path, dtype: str, attention: str, *, compiled: bool, lookup: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        how = {"dtype": TORCH_DTYPES[dtype], "attn_implementation": attention}
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
        self.compiled, self.lookup = compiled, lookup
        self.cache: Any = None
        self.notes = f"version {version('transformers')}"

    def reserve(self, batch: int, capacity: int) -> None:
        """Forget the old cache and, when compiled, the old graphs: shapes are static."""
        self.batch, self.capacity, self.cache = batch, capacity, None
        self.forward: Callable[..., Any] = self.model
        if self.compiled:
            torch.compiler.reset()
            self.forward = torch.compile(self.model, dynamic=False, fullgraph=True)

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
        return self._choose(self.forward(self.tokens, past_key_values=self.cache, use_cache=True).logits)

    def top2_gap(self) -> float:
        best, second = self.logits[0].topk(2).values.tolist()
        return float(best - second)

    @torch.no_grad()
    def decode(self, tokens: list[int], n: int) -> Decoded:
        """n greedy tokens by its own generate, after a prompt [S] whose keys are there; rounds are its passes."""
        self.prefill(tokens[:-1])
        passes, prepare = list[int](), type(self.model).prepare_inputs_for_generation

        def prepared(ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any) -> Any:
            # by lookup its first pass would take the whole prompt again, whatever the cache holds
            n_new = next_sequence_length or ids.shape[1] - self.cache.get_seq_length()
            passes.append(n_new)
            return prepare(self.model, ids, next_sequence_length=n_new, **kwargs)

        self.model.prepare_inputs_for_generation = prepared
        self.model.generation_config.eos_token_id = None  # the text's end is never chosen
        how = {"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}
        started, prompt = time.perf_counter(), torch.tensor([tokens])
        found = self.model.generate(prompt, past_key_values=self.cache, do_sample=False, max_new_tokens=n, **how)
        seconds, rounds = time.perf_counter() - started, len(passes)
        new = cast(list[int], found[0, len(tokens) :].tolist())
        return Decoded(tokens=new, seconds=seconds, rounds=rounds, drafted=sum(passes) - rounds, accepted=n - rounds)

    def _choose(self, logits: Tensor) -> list[int]:
        self.logits = logits[:, -1].float()
        self.tokens = logits.argmax(-1)  # [B, 1]
        return cast(list[int], self.tokens[:, 0].tolist())


class LlamaCpp:
    """llama.cpp through the low-level calls of llama-cpp-python, one KV stream per sequence."""

    def __init__(self, gguf: Path, config: ModelConfig, kv: str, threads: int, *, flash: bool, repacked: bool) -> None:
        import gguf as gguf_format
        import llama_cpp

        self.api, self.config = llama_cpp, config
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
        self.context = self.prompt_batch = self.step_batch = cast(Any, None)
        has = " ".join(re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode()))
        self.notes = f"version {version('llama-cpp-python')} of llama-cpp-python, one KV stream per sequence; {has}"

    def reserve(self, batch: int, capacity: int) -> None:
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
        for row, token in enumerate(self.tokens):
            self.step_batch.token[row], self.step_batch.pos[row] = token, self.length
        self._decode(self.step_batch)
        self.length += 1
        self.tokens = self._choose(self.batch)
        return self.tokens

    def _decode(self, batch: Any) -> None:
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")

    def _choose(self, rows: int) -> list[int]:
        logits = np.ctypeslib.as_array(self.api.llama_get_logits(self.context), (rows, self.config.vocab_size))
        return cast(list[int], logits.argmax(1).tolist())

    def _keep_log(self, level: int, text: bytes, user_data: Any) -> None:
        if level != DEBUG:
            self.log = (self.log + text.decode(errors="replace"))[-100_000:]

    def _refuse_shared_rows(self, batch: int, capacity: int) -> None:
        """RuntimeError unless llama.cpp reports that it allocated keys and values for batch full rows."""
        needed = batch * capacity * self.config.kv_bytes_per_token(4 if self.kv == "F32" else 2) / 2**20  # MiB
        held = sum(map(float, re.findall(r"KV buffer size = +([\d.]+) MiB", self.log)))
        if held < needed:
            raise RuntimeError(f"llama.cpp reports {held:.0f} MiB of KV where {batch} separate rows need {needed:.0f}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One mode of one peer in one dtype."""

    peer: str
    mode: str
    dtype: str
    attention: str = ""  # transformers' name for it
    weights: str = ""  # ggml's dtypes
    kv: str = ""
    flash: bool = False
    repacked: bool = True  # llama.cpp's default; with AMX its Q4_1 ended the process (0.3.36)
    draft: DraftConfig | None = None  # ours
    lookup: int = 0  # drafts of transformers' prompt lookup
    server: tuple[str, ...] = ()  # flags of llama.cpp's server that say who drafts

    @property
    def label(self) -> str:
        return f"{self.peer} ({self.mode})" if self.mode else self.peer


def entries(peer: str, dtype: str) -> list[Entry]:
    """Every mode in which a peer may compete."""
    if peer in ("ours", "gpt-fast"):
        return [Entry(peer=peer, mode="", dtype=dtype)]
    if peer == "llama.cpp-file":
        return [
            Entry(peer=peer, dtype=dtype, weights=AS_IT_COMES, kv="F16", flash=flash, repacked=repacked,
                  mode=f"smaller weights, {'repacked' if repacked else 'mapped'}, flash {'on' if flash else 'off'}")
            for repacked in (True, False) for flash in (False, True) if dtype != "fp32"
        ]  # fmt: skip
    if peer == "llama.cpp":
        return [
            Entry(peer=peer, dtype=dtype, weights=weights, kv=kv, flash=flash,
                  mode=f"{weights}, {kv} KV, flash {'on' if flash else 'off'}")
            for weights, kv, flash in LLAMA_MODES[dtype]
        ]  # fmt: skip
    return [Entry(peer=peer, mode=attention, dtype=dtype, attention=attention) for attention in ("sdpa", "eager")]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all peers share."""

    folder: Path
    config: ModelConfig
    ggufs: Path  # folder of the GGUF files, F16.gguf and so on
    threads: int


def build(entry: Entry, setup: Setup) -> Any:
    if entry.peer.startswith("ours"):
        return Ours(setup.folder, entry.dtype, entry.draft)
    if entry.peer.startswith("llama.cpp"):
        gguf = setup.ggufs / f"{entry.weights}.gguf"
        return LlamaCpp(gguf, setup.config, entry.kv, setup.threads, flash=entry.flash, repacked=entry.repacked)
    if entry.peer == "gpt-fast":
        return GptFast(setup.folder, TORCH_DTYPES[entry.dtype], setup.config, PREFILL_CHUNK)
    compiled = entry.peer == "transformers-compiled"
    return Transformers(setup.folder, entry.dtype, entry.attention, compiled=compiled, lookup=entry.lookup)


def timed_steps(peer: Any, untimed: int, timed: int) -> tuple[list[list[int]], list[float]]:
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
    except Exception as error:  # any error of a peer becomes its line in the report
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
    """The peer is installed but failed."""


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
        try:
            self._pipe.send((name, arguments))
        except OSError:  # it ended since it answered
            raise self._ended() from None
        return self._answer()

    def decode(self, tokens: list[int], n: int) -> Decoded:
        return cast(Decoded, self.call("decode", tokens, n))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()

    def _answer(self) -> Any:
        try:
            state, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if state == "ok":
            return value
        self.close()
        raise (PeerMissing if state == "missing" else PeerFailed)(value)

    def _ended(self) -> PeerFailed:
        self._process.join()
        return PeerFailed(f"its process ended with code {self._process.exitcode}")


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Field:
    """The modes that compete, but for those left out, and what has failed."""

    def __init__(self, setup: Setup, entries: Iterable[Entry], without: Sequence[str]) -> None:
        self.setup, self.failures = setup, list[str]()
        self.entries = [entry for entry in entries if entry.mode not in without]

    def attempt(self, entry: Entry, where: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """What the work gives; None if it fails, which is noted as this mode's alone."""
        try:
            return work(*arguments)
        except (PeerMissing, PeerFailed) as reason:
            self.fail(entry, where, reason)
            return None

    def in_turns(
        self, entries: Sequence[Entry], where: str, turns: Sequence[Callable[[Entry], T]]
    ) -> dict[Entry, list[T]]:
        """What each mode gives in each turn; one that fails is out."""
        found: dict[Entry, list[T]] = {entry: [] for entry in entries}
        for turn in turns:
            for entry in [*found]:
                if (given := self.attempt(entry, where, turn, entry)) is None:
                    del found[entry]
                else:
                    found[entry].append(given)
        return found

    def fail(self, entry: Entry, where: str, reason: Exception) -> None:
        self.failures.append(f"{entry.label}, {where}: {reason}")
        print(f"  failed: {self.failures[-1]}", flush=True)
