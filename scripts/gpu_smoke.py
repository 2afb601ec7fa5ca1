"""The first stage of gpu_suite.py: whatever a user types first, in a minute and a half, with the bundled model.

Engines are made by scripts/generate.py's own functions from its own flags, so that the configuration is the default one
to the letter: gamma by the clock, rounds captured, a cache as long as the prompts ask for.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

import generate
from gpt_fast_sd import Completion, DraftConfig, Engine, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.measuring.lossless import NEAR_TIE, differences
from gpt_fast_sd.model import load_tokenizer, read_config
from gpt_fast_sd.policies import build_policy
from gpt_fast_sd.tp import Parallel
from gpu_setup import Record, Setup

SMOKE_SECONDS = 90
FEW = 128  # entries of a draft's budget: fewer than the prompts have, in a dry run too
SHORT = "Once upon a time"
FILTERS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 2}


@dataclass
class Made:
    """An engine as generate.py makes it, and the requests it was made for."""

    engine: Engine
    prompts: list[list[int]]
    params: list[SamplingParams]


def make(setup: Setup, *flags: str) -> Made:
    """What generate.py makes of these flags; a dry run does not compile."""
    args = generate.parse(
        ["--model", "bundled", *flags, "--device", setup.device.type, *(["--no-compile"] if setup.tiny else [])]
    )
    config = read_config(BUNDLED)
    prompts, params = generate.read_requests(args, load_tokenizer(BUNDLED, config), config)
    return Made(generate.build(args, prompts, params, config, Parallel(setup.device)), prompts, params)


class Steps:
    """One after the other, each with its seconds and what was wrong, if anything; one that fails loses no other."""

    def __init__(self) -> None:
        self.rows: list[Record] = []
        self.began = time.perf_counter()

    def take(self, name: str, step: Callable[[], str]) -> None:
        """Run a step, which gives what it saw in a phrase; an exception makes it not ok."""
        began = time.perf_counter()
        try:
            row: Record = {"step": name, "ok": True, "said": step()}
        except Exception as error:
            row = {"step": name, "ok": False, "said": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        row["seconds"] = time.perf_counter() - began
        self.rows.append(row)
        print(f"{name}: {'ok' if row['ok'] else 'NOT OK'} in {row['seconds']:.1f} s; {row['said']}", flush=True)

    def record(self) -> Record:
        """All steps, and whether they were ok and quick enough."""
        return {
            "ok": all(row["ok"] for row in self.rows), "steps": self.rows,
            "seconds": time.perf_counter() - self.began, "seconds_meant": SMOKE_SECONDS,
        }  # fmt: skip


def smoke(setup: Setup) -> Record:
    """A short prompt in a small cache, the bundled document in a large one, and what may happen to an engine."""
    steps, made = Steps(), dict[str, Made]()
    new = 6 if setup.tiny else 96
    flags = ["--max-new-tokens", str(new), "--ignore-eos"]
    first: list[list[int]] = []  # the tokens of the first engine's first run

    def engine(name: str) -> Made:
        if name not in made:
            raise RuntimeError(f"there is no engine for {name}")
        return made[name]

    def plain(one: Made) -> list[SamplingParams]:
        return [SamplingParams(max_tokens=new, ignore_eos=True)] * len(one.prompts)

    def short_greedy() -> str:
        made["the short prompt"] = make(setup, "--prompt", SHORT, *flags)
        one = made["the short prompt"]
        said = greedy(one, new)
        first.extend(completion.tokens for completion in one.engine.generate(one.prompts, one.params, speculate=False))
        return f"cache of {one.engine.cache.capacity:,} positions; {said}"

    def short_with(**params: object) -> Callable[[], str]:
        def run() -> str:
            one = engine("the short prompt")
            return drawn(one.engine, one.prompts, [SamplingParams(max_tokens=new, ignore_eos=True, **params)], new)  # type: ignore[arg-type]

        return run

    def document_greedy() -> str:
        text = (BUNDLED / "document.txt").read_text(encoding="utf-8")
        text = text[:700] if setup.tiny else text
        sampled = {"prompt": SHORT, "temperature": 0.7, "seed": 0}
        lines: list[Record] = [{"prompt": text}, sampled, {"prompt": text, **FILTERS}]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "prompts.jsonl")
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            made["the document"] = make(setup, "--prompts", str(path), *flags)
        one = made["the document"]
        said = greedy(Made(one.engine, one.prompts, plain(one)), new)
        return f"cache of {one.engine.cache.capacity:,} positions; {said}"

    def mixed() -> str:
        one = engine("the document")
        return drawn(one.engine, one.prompts, one.params, new)

    def redrafted() -> str:
        one = engine("the document")
        one.engine.redraft(DraftConfig(policy="guided", budget=FEW, gamma=4))
        said = drawn(one.engine, one.prompts, one.params, new, drafts=True)
        return f"{said}; all greedy: {greedy(Made(one.engine, one.prompts, plain(one)), new, drafts=True)}"

    def swapped() -> str:
        one = engine("the document")
        one.engine.policy = build_policy(DraftConfig(policy="snapkv", budget=FEW, gamma=4), one.engine.target, None)
        said = drawn(one.engine, one.prompts, one.params, new, drafts=True)
        who = {source for event in one.engine.stream(one.prompts, one.params) for source in event.sources}
        require(who == {"snapkv", "target"}, f"tokens came from {sorted(who)}, but snapkv was to draft")
        return f"{said}; all greedy: {greedy(Made(one.engine, one.prompts, plain(one)), new, drafts=True)}"

    def closed() -> str:
        other = made.pop("the document").engine
        getattr(other, "close", lambda: None)()
        del other
        gc.collect()
        if setup.on_cuda:
            torch.cuda.synchronize()
        one = engine("the short prompt")
        again = [c.tokens for c in one.engine.generate(one.prompts, one.params, speculate=False)]
        require(again == first, "the first engine says something else than before the second one was made and dropped")
        return greedy(one, new)

    steps.take("short prompt, greedy", short_greedy)
    steps.take("short prompt, sampled", short_with(temperature=0.7, seed=1))
    steps.take("short prompt, filtered", short_with(**FILTERS))
    steps.take("document in a second engine, greedy", document_greedy)
    steps.take("document, greedy, sampled and filtered in one batch", mixed)
    steps.take("redrafted", redrafted)
    steps.take("another policy set", swapped)
    steps.take("second engine closed and dropped, the first again", closed)
    return steps.record()


def require(fine: bool, otherwise: str) -> None:
    """RuntimeError that says what is wrong."""
    if not fine:
        raise RuntimeError(otherwise)


def greedy(made: Made, new: int, *, drafts: bool = False) -> str:
    """Both ways of decoding say the same, up to what rounding may decide -> in a phrase what was drafted.

    drafts: every round is to draft.
    """
    engine, prompts = made.engine, made.prompts
    plain = engine.generate(prompts, made.params, speculate=False)
    require(engine.stats.rounds == new, f"plain decoding took {engine.stats.rounds} rounds for {new} tokens a row")
    drafted = engine.generate(prompts, made.params)
    said = counted(engine, drafted, new)
    require(engine.stats.drafted > 0 or not drafts, "not one token was drafted")
    outputs = [(i, prompts[i], a.tokens, b.tokens) for i, (a, b) in enumerate(zip(plain, drafted, strict=True))]
    allowed, parted = NEAR_TIE[engine.dtype_name], differences(outputs, lambda ids: engine.logits(ids, last=1)[0])
    wide = [f"row {d.index} at {d.position} by {d.gap:.3g}" for d in parted if d.gap is None or d.gap > allowed]
    require(not wide, f"speculation says something else: {', '.join(wide)} (a gap of {allowed:g} may be rounding)")
    return f"{said}; {len(parted)} of {len(prompts)} rows part at a near tie"


def drawn(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    new: int,
    *,
    drafts: bool = False,
) -> str:
    """Generate twice: all tokens are there, and nothing is compiled in the second run -> what was drafted.

    drafts: every round is to draft.
    """
    engine.generate(prompts, params)
    said = counted(engine, engine.generate(prompts, params), new)
    require(engine.stats.drafted > 0 or not drafts, "not one token was drafted")
    require(engine.stats.recompiles == 0, f"{engine.stats.recompiles} graphs were compiled in a second run")
    return said


def counted(engine: Engine, completions: Sequence[Completion], new: int) -> str:
    """Every row has its tokens -> rounds by gamma and acceptance in a phrase."""
    lengths = [len(completion.tokens) for completion in completions]
    require(lengths == [new] * len(completions), f"rows have {lengths} tokens, not {new} each")
    stats, vocabulary = engine.stats, engine.model.config.vocab_size
    strange = [token for completion in completions for token in completion.tokens if not 0 <= token < vocabulary]
    require(not strange, f"token ids {strange[:4]} are not in the vocabulary")
    gammas = ", ".join(f"{n} of gamma {gamma}" for gamma, n in sorted(stats.rounds_by_gamma.items()))
    return f"{stats.rounds} rounds ({gammas}), {stats.acceptance_rate:.0%} of {stats.drafted} drafts kept"
