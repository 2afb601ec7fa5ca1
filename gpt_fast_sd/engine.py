"""The engine: prompts wait, take a slot, are prefilled, and are decoded round by round, all slots in static steps.

    prompt -> prefill -> (draft -> verify -> commit)* -> text

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpt_fast_sd.model import (
    SPLIT,
    KVCache,
    Tokenizer,
    Transformer,
)
from gpt_fast_sd.tp import Parallel, Vocabulary, local_config

from .calibration import time_selecting, time_steps
from .compiling import can_compile, inductor_options
from .config import DraftConfig, EngineConfig, SamplingParams, gamma_tiers
from .devices import free_memory, require_current, require_kernels, ways_of
from .graphs import GraphPool
from .inflight import Rounds
from .judging import Override
from .kernels import begin_building, cpu_kernels
from .loading import TORCH_DTYPES, check_positions, draft_group, kv_dtype_of, load, plan_for
from .memory import MemoryPlan
from .packing import pack_linears
from .planner import GammaPlanner
from .policies import DraftPolicy, build_policy
from .prefill import Prefill
from .quantize import quantize
from .reader import Reader
from .requests import Completion, Intake, Prompt, RoundEvent, TokenEvent, Waiting
from .rows import Rows
from .scheduling import Schedule, kinds_of
from .stats import EngineStats


class Engine:
    """A model with a static cache of B slots, and the loop that keeps the slots busy.

    The last prompt token is not prefilled but decoded, so every emitted token comes out of the same compiled step.

    on_progress, where it is set, is told how far something is that may take long: what ("compile": steps, "prefill":
    tokens of a prompt), how much is done, and of how much. The engine itself prints nothing.

    on_round, where it is set, is told of each round once it has landed. What the draft read is looked at only then, and
    the time that this takes is no part of decode_seconds.
    """

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
        self.model = model
        weight = model.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.parallel = parallel or Parallel(self.device)
        group = self.parallel.group
        group.check_part(model)
        if self.config.exact:
            group.sum_in_order(model)
        require_kernels(self.device)
        check_positions(self.config, self.model.config)
        cfg, self._plan = self.config, plan or self._plan_of(self.draft, draft_model)
        if plan is None:
            self._plan.check(free_memory(self.device), self.device, cfg)
        if cfg.quantize:
            quantize(model, cfg.quantize)
        own, kv_dtype = local_config(model.config, group.size), kv_dtype_of(cfg, self.dtype)
        self.cache = KVCache(own, cfg.batch_size, cfg.max_seq_len, dtype=kv_dtype, device=self.device)
        self._intake = Intake(model.config, tokenizer, cfg.max_seq_len)
        self.vocabulary = Vocabulary(group.mesh, model.config.vocab_size)
        self.rows = Rows(
            self.cache.seq_len,
            self.cache.capacity + SPLIT,
            model.config.vocab_size,
            self._intake.eos_ids,
            self.vocabulary,
        )
        self.compiled = cfg.compile and can_compile(self.device)
        self.rows.kernel = self.compiled
        options = inductor_options(cfg, self.device) if self.compiled else None
        if self.compiled and self.device.type == "cpu":
            pack_linears(model)
            begin_building(*cpu_kernels(model.config.head_dim, model.config.vocab_size))
        self.target = Reader(model, self.cache, options, group)
        self._capture = GraphPool(self.device) if ways_of(self.device).captures and cfg.cuda_graphs == "round" else None
        self._prefill = Prefill(self.target)
        self._running = self._closed = False
        self._failure: str | None = None  # what the device failed with
        rounds, planner = self._rounds_of(self.draft, draft_model), GammaPlanner(self.draft.gamma, self._tiers)
        self.schedule = Schedule(self._prefill, self.rows, rounds, planner, self.parallel)
        self._warm, self._compile_seconds = False, 0.0
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
            self.schedule.flights.clear()
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
        self.draft, self.schedule.rounds = draft, rounds
        self.schedule.planner = GammaPlanner(draft.gamma, self._tiers)
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
        loaded = load(model, config, draft, parallel)
        return cls(
            loaded.model, loaded.tokenizer, config, draft, loaded.draft_model, loaded.parallel, loaded.plan
        )  # fmt: skip

    @property
    def stats(self) -> EngineStats:
        """What the latest call counted, or the one that runs so far."""
        return self.schedule.stats

    @property
    def rounds(self) -> Rounds:
        """The target's steps, and the rounds that are made of them."""
        return self.schedule.rounds

    @property
    def planner(self) -> GammaPlanner:
        """What chooses gamma."""
        return self.schedule.planner

    @property
    def on_progress(self) -> Callable[[str, int, int], None] | None:
        """Told how far something is that may take long: what, how much is done, of how much."""
        return self.schedule.on_progress

    @on_progress.setter
    def on_progress(self, tell: Callable[[str, int, int], None] | None) -> None:
        """Tell this one."""
        self.schedule.on_progress = tell

    @property
    def on_round(self) -> Callable[[RoundEvent], None] | None:
        """Told of each round once it has landed."""
        return self.schedule.on_round

    @on_round.setter
    def on_round(self, tell: Callable[[RoundEvent], None] | None) -> None:
        """Tell this one."""
        self.schedule.on_round = tell

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What makes token ids of texts, and texts of them. Without one prompts are token ids, and texts empty."""
        return self._intake.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Let this one do so from now on."""
        self._intake.tokenizer = tokenizer

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
        self.schedule.planner = GammaPlanner(self.draft.gamma, self._tiers)
        self._warm, self._compile_seconds = False, 0.0

    @property
    def replay(self) -> Override | None:
        """What decides how many drafts are kept, in place of their merit: for timing alone. None: their merit."""
        return self.rounds.replay

    @replay.setter
    def replay(self, replay: Override | None) -> None:
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
        self._require_open()
        self._intake.all(prompts, params)

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
        self._require_open()
        requests = self._intake.all(prompts, params)
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
            self._require_open()
            return self._run(Waiting(self._intake.all(prompts, params)), speculate)
        if not isinstance(prompts, Iterable):
            raise ValueError(f"prompts must be a list of texts or of lists of token ids, got {prompts!r:.80}")
        if not (params is None or isinstance(params, SamplingParams)):
            raise ValueError("prompts that are no list take one SamplingParams, or come as (prompt, SamplingParams)")
        return self._run(Waiting(self._intake.each(prompts, params)), speculate)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], *, last: int | None = None) -> Tensor:
        """The target's logits after each token, by the step that decoding runs: T ids -> fp32 [T, V] on the CPU.

        last: only those of the last tokens, [last, V]; the others are prefilled as a prompt is.
        """
        ids = self._intake.checked(tokens, "tokens")
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
            self.schedule.release(0)
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
            selecting = partial(time_selecting, self.schedule) if policy.refresh_every else None
            timed = partial(self.planner.calibrate, partial(time_steps, self.schedule), 2 * SPLIT, self.cache.capacity)
            parts.append(partial(timed, selecting, getattr(policy, "n_steps", None)))
        for done, part in enumerate(parts):
            if self.on_progress:
                self.on_progress("compile" if self.compiled else "warm up", done, len(parts))
            part()
        if self.on_progress:
            self.on_progress("compile" if self.compiled else "warm up", len(parts), len(parts))
        for slot in range(len(self.schedule.slots)):
            self.schedule.release(slot)
        self._warm = True
        self._compile_seconds = time.perf_counter() - started

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
                self.rounds.warm_up(self._gammas, kinds_of([request.params for request in waiting.known]))
            self.schedule.stats = EngineStats(compile_seconds=self._compile_seconds)
            yield from self.schedule.run(waiting, speculate, self._require_open)

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
            try:
                self.schedule.clear(everything=not ended_well)  # it may have failed while a slot was being taken
            except Exception as error:
                self._failure = self._failure or _first_line(error)
                if ended_well:  # else the first error says more
                    raise RuntimeError(self._broken) from error

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

    def _check_policy(self, policy: DraftPolicy | None) -> None:
        if not (policy is None or isinstance(policy, DraftPolicy)):
            raise ValueError(f"a policy is a DraftPolicy, got {policy!r:.80}: Engine.redraft takes a DraftConfig")
        for level in (policy, getattr(policy, "cheap", None)):
            reader = getattr(level, "reader", None) or getattr(level, "target", None)
            if isinstance(reader, Reader) and reader.cache.seq_len is not self.cache.seq_len:
                raise ValueError("the policy was built for another engine: build it over this one's target")


def _first_line(error: BaseException) -> str:
    """What an error says, without the advice that follows."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
