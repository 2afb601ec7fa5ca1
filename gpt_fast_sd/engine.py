"""The engine: prompts wait, take a slot, are prefilled, and are decoded round by round, all slots in one static step.

    prompt -> prefill -> (step -> commit)* -> text

Shapes: B slots, T tokens in this call, S cache capacity, L layers, K kv heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import operator
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpt_fast_sd.model import (
    SPLIT,
    FullKV,
    KVCache,
    StreamDecoder,
    Tokenizer,
    Transformer,
    load_model,
    load_tokenizer,
    read_config,
    read_json,
    resolve_model,
    stored_dtype,
)

from .compiling import CompiledStep, can_compile
from .config import DraftConfig, EngineConfig, SamplingParams
from .quantize import quantize
from .requests import Completion, Request, TokenEvent
from .sampling import SamplingTable, draw, filters_anything, probabilities, uniform
from .stats import EngineStats

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TARGET_STREAM = 0  # which random stream draws the target's own tokens
BUNDLED = Path(__file__).resolve().parent / "bundled"


def decode_step(
    model: Transformer, tokens: Tensor, pos: Tensor, k: list[Tensor], v: list[Tensor], span: Tensor
) -> Tensor:
    """Store and attend for one pending token a slot: tokens, pos [B, 1] -> fp32 logits [B, V].

    span [n_splits, 0] carries, as a size that may vary without a recompile, how many key splits are in view.
    """
    logits: Tensor = model(tokens, pos, FullKV(k, v, span.shape[0]))  # [B, 1, V]
    return logits[:, -1].float()


def prefill_step(
    model: Transformer, tokens: Tensor, pos: Tensor, k: list[Tensor], v: list[Tensor], span: Tensor
) -> None:
    """Store the keys and values of one chunk of one slot: tokens, pos [1, T]; k, v L of [1, K, S, H]. No logits."""
    model.hidden(tokens, pos, FullKV(k, v, span.shape[0]))


class Engine:
    """A model with a static cache of B slots, and the loop that keeps the slots busy.

    The last prompt token is not prefilled but decoded, so every emitted token comes out of the same compiled step.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
    ) -> None:
        """Take a model already on its device, in its dtype; ValueError where the configuration does not fit it."""
        self.config = config or EngineConfig()
        self.draft = draft or DraftConfig()
        self.model, self.tokenizer = model, tokenizer
        self.stats = EngineStats()
        weight = model.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        self._check_fit()
        cfg, kv_dtype = self.config, TORCH_DTYPES[self.config.kv_dtype] if self.config.kv_dtype else self.dtype
        self._check_memory(kv_dtype)
        if cfg.quantize:
            quantize(model, cfg.quantize)
        self.cache = KVCache(model.config, cfg.batch_size, cfg.max_seq_len, dtype=kv_dtype, device=self.device)
        self.pending = torch.zeros(cfg.batch_size, dtype=torch.int64, device=self.device)  # [B] sampled, not yet fed
        self.active = torch.zeros_like(self.pending)  # [B] 1 where a request is being decoded
        self.table = SamplingTable.empty(cfg.batch_size, model.config.vocab_size, self.device)
        self.chunk = SPLIT  # prompt tokens a prefill call; a divisor of the capacity, so that padding stays in the slot
        self.compiled = cfg.compile and can_compile(self.device)
        self._decode = CompiledStep(decode_step, compiled=self.compiled)
        self._prefill = CompiledStep(prefill_step, compiled=self.compiled)
        self._slots: list[Request | None] = [None] * cfg.batch_size
        self._warm = self._running = False
        self._compile_seconds = 0.0

    @classmethod
    def from_pretrained(
        cls, model: str | Path, config: EngineConfig | None = None, draft: DraftConfig | None = None
    ) -> Engine:
        """Load "bundled", a folder or a hub id. ValueError or FileNotFoundError, in one sentence, where that fails."""
        config = config or EngineConfig()
        folder = locate(model)
        model_config = read_config(folder)
        device = _device(config.device)
        dtype = (
            TORCH_DTYPES[config.dtype]
            if config.dtype != "auto"
            else _natural_dtype(stored_dtype(read_json(folder / "config.json")), device)
        )
        tokenizer = load_tokenizer(folder, model_config)
        return cls(load_model(folder, device=device, dtype=dtype), tokenizer, config, draft)

    @property
    def dtype_name(self) -> str:
        """The weights' dtype as EngineConfig spells it."""
        return next((name for name, dtype in TORCH_DTYPES.items() if dtype == self.dtype), str(self.dtype))

    # ---------------------------------------------------------------- the public calls

    def check(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> None:
        """Raise the ValueError that generate and stream would raise for these prompts, and do nothing else."""
        self._requests(prompts, params)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt; completions come in the order of the prompts. ValueError before any work is done."""
        requests = self._requests(prompts, params)
        for _ in self._run(requests):
            pass
        return [request.completion() for request in requests]

    def stream(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[TokenEvent]:
        """Yield tokens of all prompts as they are committed. ValueError at the call, before any work is done.

        A stream left half-way ends its prompts: their slots are free again.
        """
        return self._run(self._requests(prompts, params))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The target's logits after each token, by the step that decoding runs: T ids -> fp32 [T, V] on the CPU."""
        ids = self._checked_ids(tokens, "tokens")
        if len(ids) > self.config.max_seq_len:
            raise ValueError(f"logits of {len(ids):,} tokens do not fit: max_seq_len is {self.config.max_seq_len:,}")
        self._require_idle()
        self.warm_up()
        rows = []
        try:
            for position, token in enumerate(ids):
                self.pending[0] = token
                self.cache.seq_len[0] = position
                rows.append(self._decode_logits(position + 1)[0].cpu())
        finally:
            self._release(0)
        return torch.stack(rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile both steps on the empty cache, once; later calls return at once."""
        if self._warm:
            return
        started = time.perf_counter()
        self._prefill_chunk(0, [0], 0)
        self._decode_logits(1)
        self.cache.vacate(0)
        self._warm = True
        self._compile_seconds = time.perf_counter() - started

    # ---------------------------------------------------------------- the path

    @torch.inference_mode()
    def _run(self, requests: list[Request]) -> Iterator[TokenEvent]:
        """Keep the slots filled from the queue, and step until every request is finished."""
        self._require_idle()
        self._running = True
        try:
            self.warm_up()
            self.stats = EngineStats(compile_seconds=self._compile_seconds)
            graphs = self._graphs
            waiting = deque(requests)
            while waiting or any(self._slots):
                for slot, occupant in enumerate(self._slots):
                    if occupant is None and waiting:
                        self._admit(slot, waiting.popleft())
                events = self._round()
                self.stats.recompiles = self._graphs - graphs
                yield from events
        finally:
            for slot, occupant in enumerate(self._slots):
                if occupant is not None:
                    self._release(slot)
            self._running = False

    def _admit(self, slot: int, request: Request) -> None:
        """Prefill all but the last prompt token into the slot; the last one becomes its pending token."""
        started = time.perf_counter()
        body = request.prompt[:-1]
        for start in range(0, len(body), self.chunk):
            self._prefill_chunk(slot, body[start : start + self.chunk], start)
        self.cache.seq_len[slot] = len(body)
        self.pending[slot] = request.prompt[-1]
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        self.table.put(slot, request.params, seed, self.model.config.vocab_size)
        self.active[slot] = 1
        self._slots[slot] = request
        self._synchronize()
        self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.prefill_tokens += len(body)

    def _round(self) -> list[TokenEvent]:
        """One decode step of all slots: every live request commits one token, finished ones leave their slot."""
        started = time.perf_counter()
        live = [(slot, request) for slot, request in enumerate(self._slots) if request is not None]
        n_keys = max(request.length for _, request in live) + 1
        logits = self._decode_logits(n_keys)  # [B, V]
        self._synchronize()
        stepped = time.perf_counter()
        tokens = self._sample(logits, [request.params for _, request in live])  # [B]
        self.pending.copy_(tokens)
        self.cache.seq_len += self.active
        chosen = tokens.tolist()  # the one host read of a round
        events = []
        for slot, request in live:
            events.append(request.commit(chosen[slot], "target"))
            if request.finish_reason:
                self._release(slot)
        ended = time.perf_counter()
        stats = self.stats
        stats.rounds += 1
        stats.row_rounds += len(live)
        stats.decode_tokens += len(live)
        stats.verify_seconds += stepped - started
        stats.host_seconds += ended - stepped
        stats.decode_seconds += ended - started
        stats.kv_bytes += self.config.batch_size * self.cache.splits(n_keys) * SPLIT * self.cache.bytes_per_token
        return events

    def _decode_logits(self, n_keys: int) -> Tensor:
        """Feed every slot's pending token at its seq_len, with at least n_keys keys in view -> fp32 logits [B, V]."""
        span = self._span(self.cache.splits(n_keys))
        pos = self.cache.seq_len[:, None]  # [B, 1]; a slot without a request stays at 0
        out: Tensor = self._decode(self.model, self.pending[:, None], pos, self.cache.k, self.cache.v, span)
        return out

    def _prefill_chunk(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Write the keys and values of up to `chunk` prompt tokens from start on; padding lands beyond them."""
        padded = torch.zeros(1, self.chunk, dtype=torch.int64)
        padded[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        pos = torch.arange(start, start + self.chunk, device=self.device)[None]  # [1, T]
        k, v = self.cache.row(slot)
        span = self._span(self.cache.splits(start + self.chunk))
        self._prefill(self.model, padded.to(self.device), pos, k, v, span)

    def _sample(self, logits: Tensor, params: list[SamplingParams]) -> Tensor:
        """logits [B, V] -> next tokens [B]; a token's randomness hangs on its seed and position alone."""
        if all(p.temperature == 0 for p in params):
            return logits.argmax(-1)
        p = probabilities(logits, self.table, filtered=filters_anything(params))
        return draw(p, uniform(self.table.seed, self.cache.seq_len, TARGET_STREAM))

    def _span(self, n_splits: int) -> Tensor:
        span = torch.empty(n_splits, 0, device=self.device)
        most = self.cache.capacity // SPLIT
        if most > 2:  # a range of one size is no range
            torch._dynamo.mark_dynamic(span, 0, min=2, max=most)
        return span

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self.cache.vacate(slot)
        self.pending[slot] = self.active[slot] = 0
        self.table.temperature[slot] = 0.0

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def _graphs(self) -> int:
        return self._decode.graphs + self._prefill.graphs

    # ---------------------------------------------------------------- checks, all before any work

    def _require_idle(self) -> None:
        if self._running:
            raise RuntimeError("the engine is still streaming: exhaust or close that stream first")

    def _requests(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts must be a list of texts or of lists of token ids, got {prompts!r:.80}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need one SamplingParams, or one each, got {len(params)}")
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]

    def _request(self, index: int, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        name = f"prompt {index}"
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} needs SamplingParams, got {params!r}")
        if isinstance(prompt, str):
            if prompt and self.tokenizer is None:
                raise ValueError(f"{name} is text, but this model has no tokenizer: give token ids")
            prompt = self.tokenizer.encode(prompt) if prompt and self.tokenizer else []
        ids = self._checked_ids(prompt, name)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"{name} has stop strings, but this model has no tokenizer to find them with")
        total = len(ids) + params.max_tokens
        if total > self.config.max_seq_len:
            raise ValueError(
                f"{name} has {len(ids):,} tokens and max_tokens is {params.max_tokens:,}: together {total:,}, "
                f"over max_seq_len {self.config.max_seq_len:,}"
            )
        decoder = StreamDecoder(self.tokenizer, ids) if self.tokenizer else None
        return Request(index, ids, params, frozenset(self._eos_ids), decoder)

    @property
    def _eos_ids(self) -> tuple[int, ...]:
        return self.model.config.eos_ids or (self.tokenizer.eos_ids if self.tokenizer else ())

    def _checked_ids(self, tokens: Sequence[int], name: str) -> list[int]:
        vocab = self.model.config.vocab_size
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError:
            raise ValueError(f"{name} must be a text or a list of whole token ids, got {tokens!r:.80}") from None
        if not ids:
            raise ValueError(f"{name} is empty: give it at least one token")
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ValueError(f"{name} holds token id {wrong}, the vocabulary goes from 0 to {vocab - 1}")
        return ids

    def _check_fit(self) -> None:
        cfg, model = self.config, self.model.config
        if cfg.max_seq_len > model.max_seq_len:
            raise ValueError(f"max_seq_len {cfg.max_seq_len:,} is over the model's {model.max_seq_len:,} positions")
        if model.sliding_window is not None and cfg.max_seq_len > model.sliding_window:
            raise ValueError(
                f"max_seq_len {cfg.max_seq_len:,} is over the model's sliding window of {model.sliding_window:,}, "
                "past which this engine does not go"
            )
        if cfg.exact and self.draft.policy == "off":
            raise ValueError("exact=True needs a draft policy to be exact about, got policy 'off'")

    def _check_memory(self, kv_dtype: torch.dtype) -> None:
        cfg = self.config
        capacity = (KVCache.splits(cfg.max_seq_len) + 1) * SPLIT
        need = cfg.batch_size * capacity * self.model.config.kv_bytes_per_token(kv_dtype.itemsize)
        if self.device.type == "cuda":
            have = torch.cuda.mem_get_info(self.device)[0]
        else:
            have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else need
        if need > have:
            raise ValueError(
                f"the KV cache of {cfg.batch_size} x {capacity:,} tokens takes {need / 2**30:.1f} GiB, "
                f"over the {have / 2**30:.1f} GiB of memory of {self.device}"
            )


def locate(model: str | Path) -> Path:
    """The folder of "bundled", of a local path or of a hub id (downloaded when needed)."""
    return BUNDLED if str(model) == "bundled" else resolve_model(model)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device: use 'cpu' or 'auto'")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _natural_dtype(stored: str | None, device: torch.device) -> torch.dtype:
    """The checkpoint's own dtype, but fp32 on a CPU that has no instructions for a 16-bit one."""
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(stored or "", torch.float32)
    if device.type == "cpu" and dtype != torch.float32:
        return (
            torch.bfloat16
            if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
            else torch.float32
        )
    return dtype
