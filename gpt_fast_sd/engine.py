"""The engine: prompts wait, take a slot, are prefilled, and are decoded round by round, all slots in static steps.

    prompt -> prefill -> (draft -> verify -> commit)* -> text

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted per round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpt_fast_sd.model import SPLIT, Tokenizer, Transformer
from gpt_fast_sd.tp import Parallel, Vocabulary

from .acceptance import Override
from .bodies import CORE
from .config import EngineConfig, SamplingParams, require_kind
from .fast.devices import traits_of
from .loading import MemoryPlan, free_memory, plan_of, require_fit, target_of
from .loading.load import load, taken
from .loading.system import dtype_name
from .policies import DraftConfig, DraftPolicy
from .prefill import Prefill
from .serving.calibration import warm_up
from .serving.cuda_graphs import GraphPool
from .serving.launch import rounds_for
from .serving.lifecycle import Access, kept_by, own_settings, sheltered
from .serving.requests import Completion, Intake, Last, Params, Prompt, Prompts, RoundEvent, TokenEvent, Waiting
from .serving.scheduling import Schedule
from .serving.scoring import Scorer, Scores
from .serving.service import Service, Submission
from .serving.stats import EngineStats
from .state import BatchState


class Engine:
    """A model with a static cache of B slots, and the loop that keeps the slots busy.

    The last prompt token is not prefilled but decoded, so every emitted token comes from the same compiled step.

    tokenizer turns texts into token ids, and back; None: prompts are ids, texts empty. Its EOS is asked for once.
    on_progress, if set, is called with the progress of anything that may take long: what ("compile": steps, "prefill":
    tokens of a prompt), how much is done, and of how much. The engine itself prints nothing.
    on_round, if set, is called with each collected round; only then what drafts read is recorded, apart from all times.
    """

    tokenizer: Tokenizer | None = kept_by("_intake", "tokenizer")
    on_progress: Callable[[str, int, int], None] | None = kept_by("schedule", "on_progress")
    on_round: Callable[[RoundEvent], None] | None = kept_by("schedule", "on_round")
    stats: EngineStats = kept_by("schedule", "stats")  # of the latest call, or so far of the one that is running

    @own_settings()
    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None,
        draft: DraftConfig | None = None, draft_model: Transformer | None = None, parallel: Parallel | None = None,
        plan: MemoryPlan | None = None,
    ) -> None:  # fmt: skip
        """Take a model already on its device, in its dtype; ValueError if the configuration does not fit it.

        parallel: the processes that hold the model together, each with its part (by `Group.load` or `Group.shard`, for
        a draft model those of `draft_group`). All of them must make the same calls.
        plan: the memory plan that was checked before the models were loaded; None: it is checked here.
        """
        cfg = self.config = config or EngineConfig()
        self.draft = draft or DraftConfig()
        require_kind("config", cfg, EngineConfig)
        require_kind("draft", self.draft, DraftConfig)
        self.model = model
        self.device, self.dtype = model.embedding.weight.device, model.embedding.weight.dtype
        self.dtype_name = dtype_name(self.dtype)
        self.parallel = parallel or Parallel(self.device)
        group = self.parallel.group
        require_fit(model, cfg, self.draft, group)
        self._plan = plan or plan_of(model, draft_model, cfg, self.draft, self.parallel)
        self.target = target_of(model, cfg, group, self._plan.system.format)
        self.cache, self.compiled = self.target.cache, self.target.backend.compiles
        self._intake = Intake(model.config, tokenizer, cfg.max_seq_len, is_alone=group.size == 1)
        self.vocabulary = Vocabulary(group.mesh, model.config.vocab_size)
        self.state = BatchState.idle(
            self.cache.seq_len, self.cache.capacity + SPLIT, model.config.vocab_size, self._intake.eos_ids,
            self.vocabulary, bodies=replace(self.target.bodies, hidden=CORE.hidden, logits=CORE.logits),  # no weights
        )  # fmt: skip
        captures = cfg.cuda_graphs == "round" and traits_of(self.device).captures
        capture = GraphPool(self.device) if captures else None
        made = self._plan.system.draft, draft_model, self.target, self.state, capture, self.parallel, cfg
        self._prefill, self._access = Prefill(self.target), Access(self.device)
        self._compile_seconds: float | None = None  # None: the steps are not compiled yet
        self.schedule = Schedule(self._prefill, self.state, rounds_for(*made), self.parallel)
        self._scorer, self._service = Scorer(self.schedule), Service(self, self._intake)
        self.parallel.close_before(self)

    def __enter__(self) -> Engine:
        """Return the engine itself; it is closed at the end of the block."""
        self._access.require_open()
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End work in progress and free captured rounds; from now on calls are refused. It may be called twice.

        An NCCL process group does not end while such a round exists: close engines before it, as Parallel.close does.
        """
        self._access.close(self.schedule, self._service.end)

    @own_settings()
    def redraft(self, draft: DraftConfig, draft_model: Transformer | None = None) -> None:
        """Switch to another draft policy; ValueError if it does not fit, and then nothing changes.

        The target's steps stay compiled, and its slots keep their prompts, which are not prefilled again.
        """
        require_kind("draft", draft, DraftConfig)
        with self._access.alone():
            cfg, old = self.config, self.schedule.rounds
            plan = plan_of(self.model, draft_model, cfg, draft, self.parallel, self.cache.format)
            plan.added_to(self._plan).check_added(self.parallel.least(free_memory(self.device, held=self._plan.total)))
            made = plan.system.draft, draft_model, self.target, self.state, old.capture, self.parallel, cfg
            try:
                new = rounds_for(*made)
            finally:
                old.forget(for_good=True)  # also where making it failed: weights may lie elsewhere by then
            new.keep_steps(old)
            self.draft, self._plan = draft, replace(plan, weights=self._plan.weights)
            self.schedule.use(new)
            self._compile_seconds = None

    @classmethod
    @own_settings()
    def from_pretrained(
        cls, model: str | Path, config: EngineConfig | None = None, draft: DraftConfig | None = None, *,
        parallel: Parallel | None = None,
    ) -> Engine:  # fmt: skip
        """Load "bundled", "smollm2", a folder, a GGUF file or a hub id.

        ValueError or FileNotFoundError, in one sentence, if that fails.

        parallel: the processes that hold the model together; each reads only its own part of the weights.
        """
        return load(model, config or EngineConfig(), draft or DraftConfig(), parallel).into(cls)

    @classmethod
    @own_settings()
    def from_transformers(
        cls, model: torch.nn.Module, tokenizer: object = None, config: EngineConfig | None = None,
        draft: DraftConfig | None = None, *, share: bool = True,
    ) -> Engine:  # fmt: skip
        """Run a Llama, Mistral, Qwen2 or Qwen3 that transformers has loaded; ValueError, before work, for any other.

        tokenizer: transformers' or one of ours. share: see `model.share_model`; False: weights are copied.
        """
        return taken(model, tokenizer, config or EngineConfig(), draft or DraftConfig(), share).into(cls)

    @property
    def policy(self) -> DraftPolicy | None:
        """The draft policy. You may set one of your own, with a DraftConfig that gives its gamma."""
        return self.schedule.policy

    @policy.setter
    def policy(self, policy: DraftPolicy | None) -> None:
        """Set one, which is compiled and timed anew; ValueError if it is no policy, or reads another engine's cache."""
        with self._access.alone():
            self.schedule.rounds.set_policy(policy)
            self.schedule.use(self.schedule.rounds)
            self._compile_seconds = None

    @property
    def replay(self) -> Override | None:
        """Overrides how many drafts are accepted, for timing only. None: the target decides."""
        return self.schedule.rounds.replay

    @replay.setter
    def replay(self, replay: Override | None) -> None:
        """Set the override."""
        with self._access.alone():
            self.schedule.rounds.set_replay(replay)

    # ---------------------------------------------------------------- the public calls

    def check(self, prompts: Prompts, params: Params = None) -> None:
        """Raise the ValueError that generate and stream would raise for these prompts, and do nothing else."""
        self._access.require_open()
        self._intake.all(prompts, params)

    def generate(self, prompts: Prompts, params: Params = None, *, speculate: bool = True) -> list[Completion]:
        """Continue every prompt; completions come in the order of the prompts. ValueError before any work is done.

        prompts: a text, or a list of texts and lists of token ids, each alone or as (prompt, SamplingParams); params
        applies to all others, or is a list with one for each.
        speculate=False decodes plainly, whatever the draft policy.
        """
        self._access.require_open()
        requests = self._intake.all(prompts, params)
        for _ in sheltered(self._run(Waiting(requests), speculate)):
            pass
        return [request.completion() for request in requests]

    def stream(
        self, prompts: Prompts | Iterable[Prompt | tuple[Prompt, SamplingParams] | None], params: Params = None, *,
        speculate: bool = True,
    ) -> Iterator[TokenEvent]:  # fmt: skip
        """Yield tokens of all prompts as they are committed. ValueError at the call, before any work is done.

        prompts and params are as in generate, or prompts is any other iterable, such as a file's lines or users'
        requests: the next one is taken when a slot is free for it, between two rounds, and events number them as they
        come. Such an iterable may yield None, for no prompt now: it is asked again after the next round, or at once if
        nothing is being decoded. It runs under the engine's settings, not the caller's: in inference mode, without
        autocast, with torch's own default dtype and device. An error that it raises, and the ValueError of a prompt
        that cannot run (see check), end the stream.
        Prompts are prefilled by chunks; rows being decoded wait for one at most. Leaving a stream frees its slots.
        """
        self._access.require_open()
        return sheltered(self._run(self._intake.queue(prompts, params), speculate))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Submission:
        """Decode a prompt beside those of other threads, in a thread of the engine's own; ValueError before any work.

        Any thread may call it; other calls are refused until all that was submitted has ended. Iterate over what it
        returns, also by `async for`; see Submission.
        """
        return self._service.submit(prompt, params)

    @own_settings()
    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], *, last: int | None = None) -> Tensor:
        """The target's logits after each token, from the step that decoding runs: T ids -> fp32 [T, V] on the CPU.

        last: only those of the last tokens, [last, V]; the others are prefilled like a prompt.
        """
        ids, n = self._intake.scored(tokens, last)
        with self._access.at_work(self.schedule):
            self._warm_up()
            return self._scorer.logits(ids, len(ids) - n)

    @own_settings()
    @torch.inference_mode()
    def score(self, texts: Sequence[Prompt], last: Last = None, top: int = 0) -> list[Scores]:
        """Log-probabilities of the tokens of each text, chunk by chunk; ValueError before any work is done.

        last: of so many last tokens, of all texts or of each; None: of all but the first. top: and so many likeliest.
        """
        scored = self._intake.texts(texts, last, top)
        with self._service.apart(), self._access.at_work(self.schedule):
            return list(self._scorer.scores(scored, top))

    @own_settings()
    @torch.inference_mode()
    def warm_up(self, params: Params = None) -> None:
        """Compile all steps on the empty cache, once, and what requests with these params need besides."""
        known = self._intake.params(params)
        with self._access.at_work(self.schedule):
            self._warm_up(known)

    # ---------------------------------------------------------------- the path

    @torch.inference_mode()
    def _run(self, waiting: Waiting, speculate: bool) -> Generator[TokenEvent, None, None]:
        """Keep the slots filled from the queue, and run rounds until every request is finished."""
        with self._access.at_work(self.schedule):
            compile_seconds = self._warm_up([request.params for request in waiting.known])
            self.schedule.stats = EngineStats(compile_seconds=compile_seconds)
            yield from self._access.events(self.schedule, waiting, speculate)

    def _warm_up(self, params: Sequence[SamplingParams] = ()) -> float:
        """Seconds that compiling all steps took; what such requests need and is not compiled yet, this compiles."""
        if self._compile_seconds is None:
            self._compile_seconds = warm_up(self.schedule)
        self._compile_seconds += self.schedule.before_captures(params)
        return self._compile_seconds
