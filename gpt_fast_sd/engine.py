"""The engine: prompts wait, take a slot, are prefilled, and are decoded round by round, all slots in static steps.

    prompt -> prefill -> (draft -> verify -> commit)* -> text

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted a round.
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
    KVCache,
    ModelConfig,
    StreamDecoder,
    Tokenizer,
    Transformer,
    load_tokenizer,
    read_config,
    read_json,
    resolve_model,
    stored_dtype,
)
from gpt_fast_sd.tp import Group, Parallel, Vocabulary, local_config

from .compiling import can_compile, hold_still, inductor_options, require_kernels, span
from .config import DraftConfig, EngineConfig, SamplingParams, gamma_tiers
from .devices import ways_of
from .memory import MemoryPlan
from .planner import GammaPlanner
from .policies import DraftPolicy, Reader, build_policy
from .prefill import Prefill
from .quantize import quantize
from .replay import Replay
from .requests import Completion, Request, TokenEvent
from .rounds import Flight, GraphPool, Rounds
from .rows import Rows
from .sampling import filters_anything
from .stats import EngineStats

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUNDLED = Path(__file__).resolve().parent / "bundled"


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
        parallel: Parallel | None = None,
    ) -> None:
        """Take a model already on its device, in its dtype; ValueError where the configuration does not fit it.

        parallel: the processes that hold the model together, of which each was given its part (`Group.load` or
        `Group.shard`, for a draft model those of `draft_group`). All of them must make the same calls.
        """
        self.config = config or EngineConfig()
        self.draft = draft or DraftConfig()
        self.model, self.tokenizer = model, tokenizer
        self.stats = EngineStats()
        weight = model.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.parallel = parallel or Parallel(self.device)
        self._agreement, group = self.parallel.agreement(), self.parallel.group
        group.check_part(model)
        require_kernels(self.device)
        self._check_fit()
        cfg, kv_dtype = self.config, TORCH_DTYPES[self.config.kv_dtype] if self.config.kv_dtype else self.dtype
        own = local_config(model.config, group.size)
        theirs = local_config(draft_model.config, draft_group(self.draft, self.parallel).size) if draft_model else None
        plan = MemoryPlan.of(cfg, self.draft, own, theirs, kv_dtype, device=self.device)
        plan.check(_free_memory(self.device), self.device, cfg)
        if cfg.quantize:
            quantize(model, cfg.quantize)
        self.cache = KVCache(own, cfg.batch_size, cfg.max_seq_len, dtype=kv_dtype, device=self.device)
        self.vocabulary = Vocabulary(group.mesh)
        if self.device.type == "cuda":
            hold_still(*self.cache.k, *self.cache.v)
        self.rows = Rows(
            self.cache.seq_len,
            self.cache.capacity + SPLIT,
            model.config.vocab_size,
            self._eos_ids,
            self.vocabulary,
        )
        self.compiled = cfg.compile and can_compile(self.device)
        self.target = Reader(model, self.cache, inductor_options(cfg, self.device) if self.compiled else None, group)
        self._capture = GraphPool() if ways_of(self.device).captures and cfg.cuda_graphs == "round" else None
        self._prefill = Prefill(self.target)
        self._slots: list[Request | None] = [None] * cfg.batch_size
        self._flights: deque[Flight] = deque()
        self._landed_at: float | None = None  # clock at the last landing, None: something else came since
        self._running = False
        self.rounds = self._rounds_of(self.draft, draft_model)
        self.planner = GammaPlanner(self.draft.gamma, self._tiers)
        self._warm, self._compile_seconds = False, 0.0

    def redraft(self, draft: DraftConfig, draft_model: Transformer | None = None) -> None:
        """Let another policy draft from now on; ValueError where it does not fit, and nothing is changed then.

        The target's steps stay compiled, and its slots keep the prompts that they hold: these are not prefilled again.
        """
        self._require_idle()
        rounds, before = self._rounds_of(draft, draft_model), self.rounds
        rounds.decode, rounds.verify, rounds.replay = before.decode, before.verify, before.replay
        self.draft, self.rounds, self.planner = draft, rounds, GammaPlanner(draft.gamma, self._tiers)
        self._warm, self._compile_seconds = False, 0.0

    def _rounds_of(self, draft: DraftConfig, draft_model: Transformer | None) -> Rounds:
        # exact: plain and speculative decoding run the target through one width, over one number of keys
        gamma = draft.gamma  # without a policy, too
        width = 1 + (self._tiers[-1] if isinstance(gamma, str) else gamma) if self.config.exact else 0
        theirs = draft_group(draft, self.parallel)
        if draft_model:
            theirs.check_part(draft_model)
        policy = build_policy(draft, self.target, draft_model, theirs)
        return Rounds(self.target, self.rows, policy, draft, width=width, capture=self._capture)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        *,
        parallel: Parallel | None = None,
    ) -> Engine:
        """Load "bundled", a folder or a hub id. ValueError or FileNotFoundError, in one sentence, where that fails.

        parallel: the processes that hold the model together; each reads its own part of the weights alone.
        """
        config, draft = config or EngineConfig(), draft or DraftConfig()
        folder = locate(model)
        model_config = read_config(folder)
        device = parallel.device if parallel else _device(config.device)
        require_kernels(device)  # before weights are read
        if config.device not in ("auto", device.type):
            raise ValueError(
                f"device {config.device!r} was asked for, but the processes were started for {device.type!r}"
            )
        parallel = parallel or Parallel(device)
        group, theirs = parallel.group, draft_group(draft, parallel)
        dtype = (
            TORCH_DTYPES[config.dtype]
            if config.dtype != "auto"
            else _natural_dtype(stored_dtype(read_json(folder / "config.json")), device)
        )
        tokenizer = load_tokenizer(folder, model_config)
        draft_folder, draft_config = None, None
        if draft.draft_model is not None:
            draft_folder = locate(draft.draft_model)
            _check_same_vocabulary(tokenizer, model_config, draft_folder)
            draft_config = read_config(draft_folder)
        n_params = model_config.n_params // group.size + (draft_config.n_params // theirs.size if draft_config else 0)
        kv_dtype = TORCH_DTYPES[config.kv_dtype] if config.kv_dtype else dtype
        plan = MemoryPlan.of(
            config,
            draft,
            local_config(model_config, group.size),
            local_config(draft_config, theirs.size) if draft_config else None,
            kv_dtype,
            device=device,
            weights=n_params * dtype.itemsize,
        )
        plan.check(_free_memory(device), device, config)
        draft_model = theirs.load(draft_folder, device=device, dtype=dtype) if draft_folder else None
        target = group.load(folder, device=device, dtype=dtype)
        return cls(target, tokenizer, config, draft, draft_model, parallel)

    @property
    def dtype_name(self) -> str:
        """The weights' dtype as EngineConfig spells it."""
        return next((name for name, dtype in TORCH_DTYPES.items() if dtype == self.dtype), str(self.dtype))

    @property
    def policy(self) -> DraftPolicy | None:
        """Who drafts. One of your own may be set, with a DraftConfig whose gamma it is to draft."""
        return self.rounds.policy

    @policy.setter
    def policy(self, policy: DraftPolicy | None) -> None:
        """Let this one draft from now on."""
        self.rounds.policy = policy

    @property
    def replay(self) -> Replay | None:
        """What decides how many drafts are kept, in place of their merit: for timing alone. None: their merit."""
        return self.rounds.replay

    @replay.setter
    def replay(self, replay: Replay | None) -> None:
        """Let it decide from now on."""
        self.rounds.replay = replay

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
                logits = self.rounds.feed(self.rows.pending[:, None], position + 1)[0][0, 0]
                rows.append(self.vocabulary.whole(logits).cpu())
        finally:
            self._release(0)
        return torch.stack(rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile all steps on the empty cache, once; later calls return at once."""
        if self._warm:
            return
        started = time.perf_counter()
        self._prefill.warm_up()
        if self.policy:
            self.policy.warm_up()
        self.rounds.warm_up(self._gammas, [(False, False)])
        if self.policy:
            self.planner.calibrate(self._time_steps, few=2 * SPLIT, many=self.cache.capacity)
        for slot in range(len(self._slots)):
            self._release(slot)
        self._warm = True
        self._compile_seconds = time.perf_counter() - started

    def _time_steps(self, gamma: int, n_keys: int) -> tuple[float, float]:
        """Seconds of one draft step and of the target's step over gamma drafts, n_keys in view: the best of three."""
        assert self.policy
        rows, policy, seconds, fed = self.rows, self.policy, [], slice(n_keys - gamma - 1, n_keys)
        held = [(buffer, buffer[:, :, fed].clone()) for buffer in (*self.cache.k, *self.cache.v)]
        rows.seq_len.fill_(fed.start)
        rows.active.fill_(True)
        rows.n_keys = n_keys - gamma
        tokens = torch.zeros(len(self._slots), gamma + 1, dtype=torch.int64, device=self.device)
        # once each before they are timed, since a first call may compile
        propose = self.rounds.runner(lambda: policy.propose(rows, gamma)) if gamma else lambda: None
        verify = self.rounds.runner(lambda: self.rounds.feed(tokens, n_keys))
        for _ in range(3):
            started = time.perf_counter()
            propose()
            self.rounds.synchronize()
            drafted = time.perf_counter()
            verify()
            self.rounds.synchronize()
            seconds.append(((drafted - started) / max(1, gamma), time.perf_counter() - drafted))
        for buffer, before in held:  # slots keep the prompts that they hold
            buffer[:, :, fed] = before
        for slot in range(len(self._slots)):
            self._release(slot)
        return min(s for s, _ in seconds), min(s for _, s in seconds)

    @property
    def _tiers(self) -> tuple[int, ...]:
        return gamma_tiers(self.target.model.config.group_size)

    @property
    def _gammas(self) -> list[int]:
        """What a round may draft."""
        if not self.policy:
            return [0]
        return list(self._tiers) if isinstance(self.draft.gamma, str) else [0, self.draft.gamma]

    # ---------------------------------------------------------------- the path

    @torch.inference_mode()
    def _run(self, requests: list[Request], speculate: bool) -> Iterator[TokenEvent]:
        """Keep the slots filled from the queue, and go round until every request is finished."""
        self._require_idle()
        self._running = True
        try:
            self._agreement.note("prompts and parameters", [(r.prompt, r.params) for r in requests])
            self.warm_up()
            if self.rounds.capture:  # a capture may build nothing, so all that may come is called once before
                self.rounds.warm_up(self._gammas, _kinds([request.params for request in requests]))
            self.stats = EngineStats(compile_seconds=self._compile_seconds)
            self.planner.begin()
            self._landed_at = None
            graphs = self._graphs
            waiting = deque(requests)
            while waiting or any(self._slots):
                while waiting and None in self._slots:
                    self._admit(waiting.popleft())
                airborne = self._launch(speculate)
                while self._flights and (not airborne or len(self._flights) > self.rounds.lateness):
                    events = self._land()
                    self.stats.recompiles = self._graphs - graphs
                    yield from events
            self._agreement.settle()
        finally:
            self.rounds.synchronize()  # rounds that were launched before their rows were known to be finished
            self._flights.clear()
            for slot, occupant in enumerate(self._slots):
                if occupant is not None:
                    self._release(slot)
            self._running = False

    def _admit(self, request: Request) -> None:
        """Prefill all but the last prompt token into a free slot; the last one becomes its pending token."""
        self.rounds.synchronize()  # a round under way is no part of the prefill's time
        started = time.perf_counter()
        body = request.prompt[:-1]
        free = [slot for slot, occupant in enumerate(self._slots) if occupant is None]
        slot = max(free, key=lambda slot: self._prefill.reusable(slot, body))  # of equals the first
        self.stats.prefill_tokens += self._prefill.fill(slot, body)
        seed = request.params.seed if request.params.seed is not None else self.parallel.same(secrets.randbits(63))
        self.rows.put(slot, request.prompt, request.params, seed)
        if self.policy:
            self.policy.admit(slot, request.prompt)
        self._slots[slot], self._landed_at = request, None
        self.rounds.synchronize()
        self.stats.prefill_seconds += time.perf_counter() - started

    def _launch(self, speculate: bool) -> bool:
        """Start a round: draft, verify, judge, commit. False where those under way have to land before."""
        started = time.perf_counter()
        live = [(slot, request) for slot, request in enumerate(self._slots) if request is not None]
        ahead = sum(flight.gamma + 1 for flight in self._flights)
        rows, policy = self.rows, self.policy if speculate else None
        rows.look({slot: request.length for slot, request in live}, [request.params for _, request in live], ahead)
        if policy and self._flights and policy.due(rows):
            return False
        gamma = self.planner.choose(rows.n_keys) if policy else 0
        if isinstance(self.draft.gamma, str):  # each process has its own clock
            gamma = self.parallel.same(gamma)
        if not self.rounds.capture:  # a captured round drafts as planned, and keeps what may still be emitted
            longest = max(request.params.max_tokens - len(request.tokens) for _, request in live) - 1
            gamma = min(gamma, longest)
        if policy and gamma:
            policy.renew(rows)
            self.stats.kv_bytes += policy.kv_bytes(rows, gamma)
        n_splits = span(self.cache, self.rounds.in_view(rows.n_keys + gamma)).shape[0]
        self.stats.kv_bytes += self.config.batch_size * n_splits * SPLIT * self.cache.bytes_per_token
        self._flights.append(self.rounds.launch(gamma, live, planned=policy is not None))
        self.stats.decode_seconds += time.perf_counter() - started
        return True

    def _land(self) -> list[TokenEvent]:
        """Read a round's result: every live request emits a token at least, finished ones leave their slot."""
        started, flight = time.perf_counter(), self._flights.popleft()
        gamma, policy, events, read = flight.gamma, self.policy, [], flight.read()  # the one host read of a round
        landed = time.perf_counter()
        for slot, request in flight.live:
            if request.finish_reason:  # known only since the round was launched
                continue
            emitted, judged, accepted, *rest = read[slot]
            tokens, whose = rest[: gamma + 1], rest[gamma + 1 :]
            sources = [*(policy.proposers[i] for i in whose[:accepted]), "target"] if policy else ["target"]
            events.append(request.commit(tokens[:emitted], sources, judged, accepted))
            if request.finish_reason:
                self._release(slot)
        self._agreement.note(f"tokens of round {self.rows.round}", [(e.index, e.tokens, e.accepted) for e in events])
        stats, taken = self.stats, [event.accepted for event in events]
        stats.count(gamma, [event.drafted for event in events], taken)
        stats.row_rounds += len(events)
        stats.decode_tokens += sum(len(event.tokens) for event in events)
        stats.decode_seconds += time.perf_counter() - started
        if flight.laps:
            begun, drafted, verified = flight.laps
            if gamma:
                stats.draft_seconds += drafted - begun
            stats.verify_seconds += verified - drafted
            if flight.planned:
                self.planner.record(gamma, flight.n_keys, drafted - begun, verified - drafted, taken)
        elif flight.planned and events:
            # it ran alone from the landing of the round before, if it was launched by then
            followed = self._landed_at is not None and flight.begun < self._landed_at
            whole = landed - self._landed_at if followed and self._landed_at else None
            self.planner.record_whole(gamma, flight.n_keys, whole, taken)
        self._landed_at = landed
        return events

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self.cache.seq_len[slot] = self._prefill.held(slot)  # an idle slot keeps its prompt and scribbles behind it
        self.rows.vacate(slot)
        if self.policy:
            self.policy.vacate(slot)

    @property
    def _graphs(self) -> int:
        return self.rounds.graphs + self._prefill.graphs + (self.policy.graphs if self.policy else 0)

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


def _kinds(params: Sequence[SamplingParams]) -> list[tuple[bool, bool]]:
    """(sampled, filtered) of the rounds that a batch of such requests may come to: some end before others."""
    sampled = any(p.temperature > 0 for p in params)
    filtered = filters_anything(params)
    return [(False, False), *([(True, False)] if sampled else []), *([(True, True)] if filtered else [])]


def draft_group(draft: DraftConfig, parallel: Parallel) -> Group:
    """The processes that hold a draft model together, which is never more than those of the target."""
    return parallel.smaller_group(draft.draft_tp or parallel.tp)


def _free_memory(device: torch.device) -> int | None:
    """Bytes that may still be allocated; None where it cannot be told. Of a CPU, its whole memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


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
