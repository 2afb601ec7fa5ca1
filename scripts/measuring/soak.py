"""A soak: random requests over draft policies for as long as you like, outputs checked, memory and recompiles watched.

One engine changes its draft policy again and again and decodes batches of random requests through it: more prompts than
slots, greedy and sampled, some calls left half-way, some prompts late. Greedy outputs are compared with one forward of
the model over the whole text, which shares neither cache nor steps with the engine (where the cache has fewer bits than
the model, with the target's own steps over such a cache); samples with what the same request gave before, beside other
rows; and an engine at rest should hold no more memory than it did before.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.policies.registry import fields_used
from measuring import lossless
from measuring.grid import Setting
from measuring.lossless import Finding, dtypes_of
from measuring.machine import allocated_bytes, process_bytes

LEFT = 0.25  # share of the calls that are left half-way
LATE = 0.3  # share of the times that a prompt lets the engine wait
AGAIN = 0.3  # share of the sampled requests that were asked before
KEPT = 64  # sampled outputs of a policy that are kept for that
PAIRS = 8  # of rests with one policy that growth is told of
MOST_GROWTH = 4 * 2**20  # bytes per change of policy: torch keeps a mark at every weight of each step it has compiled
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7}, {"temperature": 1.0, "top_k": 20}, {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1},
)  # fmt: skip

Request = tuple[tuple[int, ...], SamplingParams]


@dataclass(frozen=True)
class Rest:
    """The engine at rest after one policy's calls: seconds since the start, and what the process holds then."""

    seconds: float
    draft: str
    resident: int | None  # bytes of the process; None if unknown
    allocated: int | None  # bytes that tensors take on a CUDA device; None on others
    graphs: int  # compiled for the target's steps since the start
    recompiles: int  # graphs compiled while rows were decoded


@dataclass
class Soaked:
    """What a soak did and found."""

    calls: int = 0
    left: int = 0  # of the calls
    requests: int = 0
    tokens: int = 0
    greedy: int = 0  # outputs compared with a forward
    ties: int = 0  # tokens among them that are not the forward's best, but within what rounding may decide
    again: int = 0  # samples compared with what the same request gave before
    rests: list[Rest] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # a sentence each

    @property
    def recompiles(self) -> int:
        return sum(rest.recompiles for rest in self.rests)

    def growth(self, what: str = "resident") -> float | None:
        """Bytes by which what a rest tells, "resident" or "allocated", grew with each change in the soak's second half.

        The median over all pairs of rests with the same policy (Theil and Sen's slope), which a few large allocations
        do not move: policies hold different amounts. None for fewer than PAIRS pairs, or if the sizes are unknown; the
        first half is left out, since every policy compiles something new at first.
        """
        rests = self.rests[len(self.rests) // 2 :]
        sizes: list[int | None] = [getattr(rest, what) for rest in rests]
        pairs = [(i, j) for j in range(len(rests)) for i in range(j) if rests[i].draft == rests[j].draft]
        both = ((sizes[i], sizes[j], j - i) for i, j in pairs)
        slopes = [(b - a) / apart for a, b, apart in both if a is not None and b is not None]
        return statistics.median(slopes) if len(slopes) >= PAIRS and None not in sizes else None


def finding(found: Soaked) -> Finding:
    growth = {what: found.growth(what) for what in ("resident", "allocated")}
    text = (
        f"{found.requests:,} requests over {len(found.rests):,} changes of policy: {found.greedy:,} greedy outputs "
        f"compared with the target's logits ({found.ties:,} near-ties), {found.again:,} samples with earlier ones; "
        f"{found.left:,} calls left; {found.recompiles:,} recompiles"
    )
    for what, size in growth.items():
        text += f"; {size / 2**20:+.1f} MiB {what} per change" if size is not None else ""
    if all(size is None for size in growth.values()):
        text += "; growth of memory not known after so few changes" if found.rests else ""
    if found.wrong:
        text += f"; {len(found.wrong):,} wrong: {found.wrong[0]}"
    passed = not (found.wrong or found.recompiles or max(size or 0 for size in growth.values()) > MOST_GROWTH)
    return Finding("soak", passed, text, asdict(found) | {"growth": growth})


def name_of(draft: DraftConfig) -> str:
    reads = "budget" in fields_used(draft.policy)
    parts = [Setting(policy=draft.policy, budget=draft.budget if reads else None).label, f"gamma {draft.gamma}"]
    parts += [f"{name} {value}" for name in ("quantize", "kv_bits") if (value := getattr(draft, name)) is not None]
    return ", ".join(parts)


@dataclass(kw_only=True)
class Soak:
    """A soak of one engine: what it is asked, was answered before, and what was found; calls: of a draft."""

    engine: Engine
    texts: Sequence[Sequence[int]]
    longest: int
    most_tokens: int
    calls: int
    rng: random.Random
    found: Soaked = field(default_factory=Soaked)
    known: dict[DraftConfig, list[tuple[Request, list[int]]]] = field(default_factory=dict)

    def turn(self, draft: DraftConfig, began: float) -> None:
        """The calls of one draft, checked, and then a rest."""
        self.engine.redraft(draft)
        recompiles, before = 0, self.known.setdefault(draft, [])
        for _ in range(self.calls):
            # so that slots are filled again, or some stay empty
            requests = [self.request(before) for _ in range(self.rng.randint(1, 3 * self.engine.config.batch_size))]
            outputs = self.decoded(requests)
            recompiles += self.engine.stats.recompiles
            for request, output in zip(requests, outputs, strict=True):
                if output is not None:
                    self.check(draft, request, output)
        gc.collect()
        so_far, held = time.perf_counter() - began, (process_bytes("VmRSS"), allocated_bytes(self.engine.device))
        self.found.rests.append(Rest(so_far, name_of(draft), *held, self.engine.schedule.rounds.graphs, recompiles))

    def request(self, before: Sequence[tuple[Request, list[int]]]) -> Request:
        """A random prompt and how it is continued, or one of before."""
        rng = self.rng
        if before and rng.random() < AGAIN:
            return rng.choice(before)[0]
        text = rng.choice(self.texts)
        n = min(rng.choice([1, 2, rng.randint(1, self.longest), rng.randint(1, self.longest)]), len(text))
        start = rng.randrange(len(text) - n + 1)
        how = rng.choice(KINDS) if rng.random() < 0.5 else {}
        room = max(1, min(self.most_tokens, self.engine.config.max_seq_len - n))
        seed = rng.randrange(2**62)
        params = SamplingParams(max_tokens=rng.randint(1, room), seed=seed, ignore_eos=rng.random() < 0.5, **how)
        return tuple(text[start : start + n]), params

    def decoded(self, requests: Sequence[Request]) -> list[list[int] | None]:
        """The outputs of requests, None for one that was not finished when the call was left."""
        rng, found = self.rng, self.found
        found.calls += 1
        found.requests += len(requests)
        outputs: list[list[int] | None] = [None] * len(requests)
        ends = rng.randint(1, 4 * len(requests)) if rng.random() < LEFT else None  # events after which it is left
        late = rng.random() < 0.5

        def coming() -> Iterator[tuple[list[int], SamplingParams] | None]:
            for ids, params in requests:
                while late and rng.random() < LATE:
                    yield None
                yield list(ids), params

        with contextlib.closing(self.engine.stream(coming())) as stream:  # type: ignore[type-var]
            for n, event in enumerate(stream, 1):
                found.tokens += len(event.tokens)
                if event.completion:
                    outputs[event.index] = event.completion.tokens
                if n == ends:
                    found.left += 1
                    break
        return outputs

    def check(self, draft: DraftConfig, request: Request, output: list[int]) -> None:
        """Compare an output with a forward if it is greedy, else with what this request gave before."""
        (prompt, params), before, found = request, self.known[draft], self.found
        if params.temperature == 0:
            found.greedy += 1
            found.ties += _ties(self.engine, draft, prompt, output, found)
            return
        if draft.gamma == "auto":
            return  # which depends on measured times
        earlier = next((tokens for one, tokens in before if one == request), None)
        if earlier is None:
            before[:] = [*before[-KEPT + 1 :], (request, output)]
            return
        found.again += 1
        if earlier != output:
            where = lossless.first_difference(earlier, output)
            found.wrong.append(
                f"{name_of(draft)}: a prompt of {len(prompt):,} tokens, seed {params.seed}, gave other tokens than "
                f"before, from new token {where} on"
            )


def soak(
    engine: Engine, drafts: Sequence[DraftConfig], texts: Sequence[Sequence[int]], seconds: float, *, seed: int = 0,
    longest: int = 400, most_tokens: int = 48, calls: int = 3,
    progress: Callable[[Soaked], object] = lambda so_far: None,
) -> Soaked:  # fmt: skip
    """Let an engine work for so many seconds, at least once through all drafts, none of which needs a draft model."""
    rng, began = random.Random(seed), time.perf_counter()
    one = Soak(engine=engine, texts=texts, longest=longest, most_tokens=most_tokens, calls=calls, rng=rng)
    while (at := len(one.found.rests)) < len(drafts) or time.perf_counter() - began < seconds:
        one.turn(drafts[at] if at < len(drafts) else rng.choice(drafts), began)
        progress(one.found)
    return one.found


def _ties(engine: Engine, draft: DraftConfig, prompt: Sequence[int], output: Sequence[int], found: Soaked) -> int:
    """How many greedy tokens are not the best of a forward over the whole text; those too far from it are told."""
    ids, last = [*prompt, *output[:-1]], len(output)
    # a forward has no cache, so it cannot judge one of fewer bits: there the engine's own logits do, token by token
    same = engine.config.kv_dtype in (None, engine.dtype_name)
    logits = lossless.logits_after(engine.model, ids, last) if same else engine.logits(ids, last=last)
    chosen = torch.tensor(output, device=logits.device)
    gaps = logits.max(1).values - logits.gather(1, chosen[:, None])[:, 0]
    both = zip(gaps.tolist(), logits.max(1).values.tolist(), strict=True)
    ties = [gap <= lossless.near_tie(best, *dtypes_of(engine)) for gap, best in both]
    for at in (i for i, tie in enumerate(ties) if not tie):
        if _rounded_away(engine, [*prompt, *output[:at]], output[at], logits[at]):
            continue
        found.wrong.append(
            f"{name_of(draft)}: greedy token {at} after a prompt of {len(prompt):,} tokens is {output[at]}, whose "
            f"logit is {gaps[at]:.3g} below the best"
        )
    return int((gaps > 0).sum())


def _rounded_away(engine: Engine, ids: Sequence[int], token: int, logits: torch.Tensor) -> bool:
    """Whether roundings of 16 bits alone may have made this token the best after ids, against a forward's logits [V].

    The engine, asked again for this text alone, must find it so, too; and its logits may be no farther from those of
    the model in fp32 than the forward's are, within what two ways to round differ by.
    """
    if engine.dtype_name == "fp32" or engine.config.kv_dtype not in (None, engine.dtype_name):
        return False
    exact = lossless.logits_in_fp32(engine.model, ids)
    if exact is None:
        return False
    own = engine.logits(ids, last=1)[0].to(exact.device)
    best = float(own.max())
    decides = best - float(own[token]) <= lossless.near_tie(best, *dtypes_of(engine))
    return decides and bool((own - exact).abs().max() <= lossless.FARTHER * (logits - exact).abs().max())
