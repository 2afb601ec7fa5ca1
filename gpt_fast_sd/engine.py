"""The engine: prompts wait, take a slot, are prefilled, and are decoded round by round, all slots in static steps.

    prompt -> prefill -> (draft -> verify -> commit)* -> text

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import (
    SPLIT,
    KVCache,
    ModelConfig,
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

from .attending import DenseKV, MassKV
from .compiling import CompiledStep, can_compile, span
from .config import GAMMA_TIERS, DraftConfig, EngineConfig, SamplingParams
from .judging import Verdict, verify_greedy, verify_sampled
from .planner import GammaPlanner
from .policies import Draft, Reader, build_policy
from .prefill import Prefill
from .quantize import quantize
from .requests import Completion, Request, TokenEvent
from .rows import Rows
from .sampling import ACCEPT_STREAM, TARGET_STREAM
from .stats import EngineStats

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUNDLED = Path(__file__).resolve().parent / "bundled"


def decode_step(
    model: Transformer, tokens: Tensor, pos: Tensor, k: list[Tensor], v: list[Tensor], in_view: Tensor, page: int
) -> tuple[Tensor, Tensor | None]:
    """Store, attend to everything and judge: tokens, pos [B, T] -> fp32 logits [B, T, V] after each of them.

    in_view [n_splits, 0] carries, as a size that may vary without a recompile, how many key splits are in view. With a
    page, the attention mass that each block of so many keys received comes too: fp32 [L, B, K, n_keys // page].
    """
    kv = MassKV(k, v, in_view.shape[0], page) if page else DenseKV(k, v, in_view.shape[0])
    logits = model(tokens, pos, kv).float()  # [B, T, V]
    return logits, torch.stack(kv.mass) if isinstance(kv, MassKV) else None


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
        draft_model: Transformer | None = None,
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
        self._check_memory(kv_dtype, [model, *([draft_model] if draft_model else [])])
        if cfg.quantize:
            quantize(model, cfg.quantize)
        self.cache = KVCache(model.config, cfg.batch_size, cfg.max_seq_len, dtype=kv_dtype, device=self.device)
        self.rows = Rows(self.cache.seq_len, self.cache.capacity + SPLIT, model.config.vocab_size, self._eos_ids)
        self.compiled = cfg.compile and can_compile(self.device)
        target = Reader(model, self.cache, self.compiled)
        self.policy = build_policy(self.draft, target, draft_model)
        self.planner = GammaPlanner(self.draft.gamma, GAMMA_TIERS)
        # exact: plain and speculative decoding run the target through one width, over one number of keys
        gamma = self.draft.gamma  # without a policy, too
        self._width = 1 + (GAMMA_TIERS[-1] if isinstance(gamma, str) else gamma) if cfg.exact else 0
        self._decode = CompiledStep(decode_step, compiled=self.compiled)  # one token a slot
        self._verify = CompiledStep(decode_step, compiled=self.compiled)  # several
        self._prefill = Prefill(target)
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
        draft_model = None
        if draft and draft.draft_model is not None:
            draft_folder = locate(draft.draft_model)
            _check_same_vocabulary(tokenizer, model_config, draft_folder)
            draft_model = load_model(draft_folder, device=device, dtype=dtype)
        return cls(load_model(folder, device=device, dtype=dtype), tokenizer, config, draft, draft_model)

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
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> list[Completion]:
        """Continue every prompt; completions come in the order of the prompts. ValueError before any work is done.

        speculate=False decodes plainly, whatever the draft policy.
        """
        requests = self._requests(prompts, params)
        for _ in self._run(requests, speculate):
            pass
        return [request.completion() for request in requests]

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> Iterator[TokenEvent]:
        """Yield tokens of all prompts as they are committed. ValueError at the call, before any work is done.

        A stream left half-way ends its prompts: their slots are free again.
        """
        return self._run(self._requests(prompts, params), speculate)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], *, last: int | None = None) -> Tensor:
        """The target's logits after each token, by the step that decoding runs: T ids -> fp32 [T, V] on the CPU.

        last: only those of the last tokens, [last, V]; the others are prefilled as a prompt is.
        """
        ids = self._checked_ids(tokens, "tokens")
        if len(ids) > self.config.max_seq_len:
            raise ValueError(f"logits of {len(ids):,} tokens do not fit: max_seq_len is {self.config.max_seq_len:,}")
        if last is not None and not 1 <= last <= len(ids):
            raise ValueError(f"last must be from 1 to the {len(ids):,} tokens given, got {last!r}")
        self._require_idle()
        self.warm_up()
        rows, start = [], 0 if last is None else len(ids) - last
        self._prefill.fill(0, ids[:start])
        try:
            for position, token in enumerate(ids[start:], start):
                self.rows.pending[0], self.rows.active[0] = token, True
                self.cache.seq_len[0] = position
                rows.append(self._feed(self.rows.pending[:, None], position + 1)[0][0, 0].cpu())
        finally:
            self._release(0)
        return torch.stack(rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile all steps on the empty cache, once; later calls return at once."""
        if self._warm:
            return
        started = time.perf_counter()
        self._prefill.chunk(0, [0], 0)
        blank = torch.zeros_like(self.rows.pending)[:, None]  # [B, 1]
        self._feed(blank, 1)
        if self.policy:
            self._feed(blank.expand(-1, 1 + self.draft.max_gamma), 1)
            self.policy.warm_up()
            self.planner.calibrate(self._time_steps, few=2 * SPLIT, many=self.cache.capacity)
        self._warm = True
        self._compile_seconds = time.perf_counter() - started

    def _time_steps(self, gamma: int, n_keys: int) -> tuple[float, float]:
        """Seconds of one draft step and of the target's step over gamma drafts, n_keys in view: the best of three."""
        assert self.policy
        rows, seconds = self.rows, []
        rows.seq_len.fill_(n_keys - gamma - 1)
        rows.active.fill_(True)
        rows.n_keys = n_keys - gamma
        tokens = torch.zeros(len(self._slots), gamma + 1, dtype=torch.int64, device=self.device)
        for _ in range(4):  # the first one is not counted: it may compile
            started = time.perf_counter()
            if gamma:
                self.policy.propose(rows, gamma)
            self._synchronize()
            drafted = time.perf_counter()
            self._feed(tokens, n_keys)
            self._synchronize()
            seconds.append(((drafted - started) / max(1, gamma), time.perf_counter() - drafted))
        for slot in range(len(self._slots)):
            self._prefill.fill(slot, [])
            self._release(slot)
        return min(s for s, _ in seconds[1:]), min(s for _, s in seconds[1:])

    # ---------------------------------------------------------------- the path

    @torch.inference_mode()
    def _run(self, requests: list[Request], speculate: bool) -> Iterator[TokenEvent]:
        """Keep the slots filled from the queue, and go round until every request is finished."""
        self._require_idle()
        self._running = True
        try:
            self.warm_up()
            self.stats = EngineStats(compile_seconds=self._compile_seconds)
            self.planner.begin()
            graphs = self._graphs
            waiting = deque(requests)
            while waiting or any(self._slots):
                while waiting and None in self._slots:
                    self._admit(waiting.popleft())
                events = self._round(speculate)
                self.stats.recompiles = self._graphs - graphs
                yield from events
        finally:
            for slot, occupant in enumerate(self._slots):
                if occupant is not None:
                    self._release(slot)
            self._running = False

    def _admit(self, request: Request) -> None:
        """Prefill all but the last prompt token into a free slot; the last one becomes its pending token."""
        started = time.perf_counter()
        body = request.prompt[:-1]
        free = [slot for slot, occupant in enumerate(self._slots) if occupant is None]
        slot = max(free, key=lambda slot: self._prefill.reusable(slot, body))  # of equals the first
        self.stats.prefill_tokens += self._prefill.fill(slot, body)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        self.rows.put(slot, request.prompt, request.params, seed)
        if self.policy:
            self.policy.admit(slot, request.prompt)
        self._slots[slot] = request
        self._synchronize()
        self.stats.prefill_seconds += time.perf_counter() - started

    def _round(self, speculate: bool) -> list[TokenEvent]:
        """Draft, verify, judge, commit: every live request emits a token at least, finished ones leave their slot."""
        live = [(slot, request) for slot, request in enumerate(self._slots) if request is not None]
        rows, policy, started = self.rows, self.policy, time.perf_counter()
        rows.look({slot: request.length for slot, request in live}, [request.params for _, request in live])
        longest = max(request.params.max_tokens - len(request.tokens) for _, request in live) - 1
        gamma = min(self.planner.choose(rows.n_keys), longest) if speculate and policy else 0
        if policy and gamma:
            draft = policy.propose(rows, gamma)
        else:
            draft = Draft(rows.pending.new_empty(len(self._slots), 0), None, torch.zeros_like(rows.pending))
        self._synchronize()
        drafted = time.perf_counter()

        logits, mass = self._feed(torch.cat([rows.pending[:, None], draft.tokens], 1), rows.n_keys + gamma)
        self._synchronize()
        verified = time.perf_counter()

        cap = torch.minimum(draft.count, rows.remaining - 1).clamp(min=0)  # [B]
        verdict = self._judge(logits[:, : gamma + 1], draft, cap)
        chosen = rows.commit(draft.tokens, cap, verdict)  # [B, gamma + 4]
        if policy and gamma:
            policy.observe(rows, mass)
        by_whom = draft.proposer if draft.proposer is not None else torch.zeros_like(draft.tokens)  # [B, gamma]
        events, read = [], torch.cat([chosen, by_whom], 1).tolist()  # the one host read of a round
        for slot, request in live:
            emitted, judged, accepted, *rest = read[slot]
            tokens, whose = rest[: gamma + 1], rest[gamma + 1 :]
            sources = [*(policy.proposers[i] for i in whose[:accepted]), "target"] if policy else ["target"]
            events.append(request.commit(tokens[:emitted], sources, judged, accepted))
            if request.finish_reason:
                self._release(slot)
        ended = time.perf_counter()

        stats = self.stats
        if policy and speculate:
            taken = [event.accepted for event in events]
            self.planner.record(gamma, rows.n_keys, drafted - started, verified - drafted, taken)
        stats.count(gamma, [event.drafted for event in events], [event.accepted for event in events])
        stats.row_rounds += len(live)
        stats.decode_tokens += sum(len(event.tokens) for event in events)
        if gamma:
            stats.draft_seconds += drafted - started
        stats.verify_seconds += verified - drafted
        stats.host_seconds += ended - verified + (0 if gamma else drafted - started)
        stats.decode_seconds += ended - started
        n_splits = span(self.cache, self._in_view(rows.n_keys + gamma)).shape[0]
        stats.kv_bytes += self.config.batch_size * n_splits * SPLIT * self.cache.bytes_per_token
        if policy and gamma:
            stats.kv_bytes += policy.kv_bytes(rows, gamma)
        return events

    def _feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        """Feed tokens [B, T] from each slot's seq_len on, at least n_keys keys in view -> logits [B, T, V], mass."""
        wanted = self._width or tokens.shape[1]
        tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], wanted - tokens.shape[1])], 1)
        # a slot without a request scribbles behind what can ever be in view, and so costs no reading of keys
        start = torch.where(self.rows.active, self.cache.seq_len, self.cache.capacity)  # [B]
        pos = start[:, None] + torch.arange(wanted, device=self.device)  # [B, T]
        step, page = (self._decode, 0) if wanted == 1 else (self._verify, self._page)
        if step is self._verify and not self._width and self.draft.max_gamma > 1:
            for varying in (tokens, pos):
                torch._dynamo.mark_dynamic(varying, 1, min=2, max=1 + self.draft.max_gamma)
        n_splits = span(self.cache, self._in_view(n_keys))
        # exact: with several threads a library may sum one row of a product otherwise than the next
        with one_thread() if self._width else contextlib.nullcontext():
            out: tuple[Tensor, Tensor | None] = step(
                self.model, tokens, pos, self.cache.k, self.cache.v, n_splits, page
            )
        return out

    def _judge(self, logits: Tensor, draft: Draft, cap: Tensor) -> Verdict:
        """logits [B, gamma + 1, V]; a token's randomness hangs on its row's seed and its position alone."""
        rows = self.rows
        if not rows.sampled:
            return verify_greedy(logits, draft.tokens, cap)
        p = rows.probabilities(logits)  # [B, gamma + 1, V]
        q = draft.q if draft.q is not None else F.one_hot(draft.tokens, p.shape[-1]).to(p.dtype)
        pos = rows.seq_len[:, None] + torch.arange(p.shape[1], device=self.device)  # [B, gamma + 1]
        accept_u, next_u = rows.uniform(pos[:, :-1], ACCEPT_STREAM), rows.uniform(pos, TARGET_STREAM)
        return verify_sampled(p, q, draft.tokens, cap, accept_u, next_u)

    def _in_view(self, n_keys: int) -> int:
        """Keys to have in view: all of the cache in exact mode, so that sums never change their order."""
        return self.cache.capacity if self._width else n_keys

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self.cache.seq_len[slot] = self._prefill.held(slot)  # an idle slot keeps its prompt and scribbles behind it
        self.rows.vacate(slot)
        if self.policy:
            self.policy.vacate(slot)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def _page(self) -> int:
        return self.draft.page if self.policy and self.policy.wants_mass else 0

    @property
    def _graphs(self) -> int:
        steps = self._decode.graphs + self._verify.graphs + self._prefill.graphs
        return steps + (self.policy.graphs if self.policy else 0)

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

    def _check_memory(self, kv_dtype: torch.dtype, models: Sequence[Transformer]) -> None:
        cfg = self.config
        capacity = (KVCache.splits(cfg.max_seq_len) + 1) * SPLIT
        need = cfg.batch_size * capacity * sum(m.config.kv_bytes_per_token(kv_dtype.itemsize) for m in models)
        if self.device.type == "cuda":
            have = torch.cuda.mem_get_info(self.device)[0]
        else:
            have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else need
        if need > have:
            whose = " and that of the draft model" if len(models) > 1 else ""
            raise ValueError(
                f"the KV cache of {cfg.batch_size} x {capacity:,} tokens{whose} "
                f"takes {need / 2**30:.1f} GiB, over the {have / 2**30:.1f} GiB of memory of {self.device}"
            )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch's CPU operators run on one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def locate(model: str | Path) -> Path:
    """The folder of "bundled", of a local path or of a hub id (downloaded when needed)."""
    return BUNDLED if str(model) == "bundled" else resolve_model(model)


def _check_same_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig, draft_folder: Path) -> None:
    """ValueError unless the draft model's token ids mean what the target's do."""
    other = read_config(draft_folder)
    if other.vocab_size != config.vocab_size:
        raise ValueError(
            f"draft model {draft_folder} has a vocabulary of {other.vocab_size:,}, the target one of "
            f"{config.vocab_size:,}: they must be the same"
        )
    theirs = load_tokenizer(draft_folder, other)
    sample = "The quick brown fox jumps over the lazy dog, 1234567890 times; naïve café, \u00fcber \u4e2d\u6587."
    if tokenizer and theirs and tokenizer.encode(sample) != theirs.encode(sample):
        raise ValueError(f"draft model {draft_folder} has another tokenizer than the target: they must share one")


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
