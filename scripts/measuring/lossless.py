"""Whether speculation changes anything: where outputs part and how close it was, and the six checks of verify.py.

Meanwhile a third of the drafts are made worse, as no check would find what goes wrong where a draft is refused if none
is: then nothing was tested, which fails. And what drafts leave in the target's cache is no number any more.

Shapes: B slots, T tokens in this call, S cache capacity, L layers, K kv heads, H head dim, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.draft import Draft
from gpt_fast_sd.model import CausalSelf, KVCache, Transformer
from gpt_fast_sd.prefill import Prefill
from gpt_fast_sd.sampling import Kind, SamplingTable, draw, probabilities, uniform
from gpt_fast_sd.state import BatchState, RoundPlan
from measuring.machine import release_memory

# Gap of logits near 10 that rounding may close: four units in the last place in 16 bits; in fp32 a hundred, which are
# the roundings of long sums. In an int8 cache a number between two steps may be rounded to either, and such a step is
# small compared with what bf16 rounds away.
NEAR_TIE = {"bf16": 0.25, "fp16": 0.03, "int8": 0.03, "fp32": 1e-4}
# of an entry of a cache, over its layer's root mean square: four units in the last place of 16 bits, a step of int8
ROUNDED = {"bf16": 2**-6, "fp16": 2**-9, "int8": 2**-5, "fp32": 1e-5}
# times that rounding of one kind may be as large as of another, a round's and a prefill's, an engine's and a forward's:
# for logits of 8,192 prompts of two tokens of the bundled model it was 4.7 times at most, and 2.9 for all but 8
FARTHER, FARTHEST = 6.0, 0.25  # FARTHEST: no more than this of a layer's size in any case
LENGTHS = 64  # tokens of which every forward has a multiple


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs of a prompt diverge, and the tokens there, None if an output had ended.

    gap: how far the target's logit of the worse of the two is below its best one; None if it was not computed.
    best: that best logit; 0 if it was not computed.
    """

    index: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float | None
    best: float = 0.0

    def is_near_tie(self, *dtypes: str) -> bool:
        """Whether rounding in the coarsest of these dtypes may decide between the two."""
        return self.gap is not None and self.gap <= near_tie(self.best, *dtypes)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two outputs differ, including the end of the shorter one; None if they are equal."""
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), None)


def n_agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    parted = first_difference(ours, theirs)
    return len(ours) if parted is None else parted


def differences(
    outputs: Iterable[tuple[int, Sequence[int], Sequence[int], Sequence[int]]],
    logits_after: Callable[[list[int]], Tensor],
    seconds: float = float("inf"),
) -> list[Difference]:
    """Where outputs, each (index, prompt, plain tokens, speculative tokens), diverge, and the gap of the logits there.

    logits_after: the target's logits [V] after these tokens. After this many seconds gaps are left unknown.
    """
    found, began = [], time.perf_counter()
    for index, prompt, plain, speculative in outputs:
        position = first_difference(plain, speculative)
        if position is None:
            continue
        a, b = (tokens[position] if position < len(tokens) else None for tokens in (plain, speculative))
        gap, best = None, 0.0
        if time.perf_counter() - began < seconds:
            logits = logits_after([*prompt, *plain[:position]])
            best = float(logits.max())
            gap = best - float(min(logits[token] for token in (a, b) if token is not None))
        found.append(Difference(index, position, a, b, gap, best))
    return found


def near_tie(best: float, *dtypes: str) -> float:
    """The gap that rounding in the coarsest of these dtypes may close below a logit: the last place grows with it."""
    widest = max(NEAR_TIE[dtype] for dtype in dtypes)
    return widest * 2.0 ** max(0, math.frexp(best)[1] - 4)  # frexp: 4 for 8 to 16


@torch.inference_mode()
def logits_in_fp32(model: Transformer, ids: Sequence[int]) -> Tensor | None:
    """The logits [V] after T tokens, by a copy of the model in fp32; None for quantized weights."""
    device, weights = model.embedding.weight.device, model.state_dict()
    with device:
        twin = Transformer(model.config).float()
    if twin.state_dict().keys() != weights.keys():
        return None
    twin.load_state_dict(weights)
    return logits_after(twin.eval(), ids)[0]


@torch.inference_mode()
def logits_after(model: Transformer, ids: Sequence[int], last: int = 1) -> Tensor:
    """The logits [last, V] after each of the last of T tokens, by one forward of the text in the model's own dtype."""
    n, padding = len(ids), -len(ids) % LENGTHS  # a library keeps what it made for each length that it meets, some MiB
    tokens = torch.tensor([[*ids, *[0] * padding]], device=model.embedding.weight.device)
    pos = torch.arange(n + padding, device=tokens.device)[None]
    hidden = model.hidden(tokens, pos, CausalSelf(model.config.windows))[0, n - last : n]  # [last, D]
    return cast(Tensor, model.output(hidden).float())


Prompts = Sequence[Sequence[int]]
CHANCE, POWER = 1e-5, 0.99  # of failing without a cause; of finding a distance
BINS, LEAST = 4, 40  # equal parts of distributions, and how many tokens must be at a place
MOST = 8000.0  # the largest statistic and noncentrality that are computed with
FREE: dict[str, Any] = {"temperature": 1.0}
WORSE, TOP = 3, 32  # of so many drafts one is made worse; of its tokens, the likeliest, whose order is noted
OTHER_STREAM = 9  # of random numbers, which no engine uses
FILTERED: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}


@dataclass(frozen=True)
class Finding:
    """What a check found: a sentence, and its figures."""

    check: str
    passed: bool
    text: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}  {self.check:<8} {self.text}"


def prove(
    build: Callable[[EngineConfig], Engine], config: EngineConfig, prompts: Prompts, n_tokens: int, n_samples: int
) -> Iterator[Finding]:
    """Each check's finding, as it comes; build makes an engine of a configuration, one at a time.

    ValueError for what is "auto" and follows measured times: no seed fixes what is drafted.
    """
    with build(config) as engine:
        if "auto" in (engine.draft.gamma, engine.draft.policy):
            what = "gamma" if engine.draft.gamma == "auto" else "draft"
            raise ValueError(f'{what} "auto" depends on measured times, which no seed fixes: name one')
        with worsened(engine):
            yield tested(greedy(engine, prompts, n_tokens), engine)
            yield tested(cache(engine, prompts, n_tokens), engine)
            try:
                yield tested(samples(engine, prompts, n_tokens, n_samples), engine)
            except ArithmeticError as error:
                yield Finding("samples", False, str(error))
            yield seeds(engine, prompts, n_tokens)
            yield refill(engine, prompts, n_tokens)
        device = engine.device
        del engine
    release_memory(device)
    with build(replace(config, exact=True, cuda_graphs="off")) as engine, worsened(engine):
        yield exact(engine, prompts[: config.batch_size], n_tokens)


@contextlib.contextmanager
def worsened(engine: Engine) -> Iterator[None]:
    """Meanwhile a draft at every third place of a text follows a worse q: some are refused, however good a policy is.

    It knows half of the tokens, so that what is right after a refusal is far from p, and for 30 % is another token; of
    a policy without a q it is that one. What drafts leave in the target's cache is NaN by the time of verification.
    """
    policy, rounds = engine.policy, engine.schedule.rounds
    assert policy
    propose = policy.propose

    def worse(state: BatchState, plan: RoundPlan) -> Draft:
        draft = propose(state, plan)
        step = torch.arange(draft.tokens.shape[1] + 1, device=state.seq_len.device)  # [gamma + 1]
        fed = torch.where(state.active, state.seq_len, engine.cache.capacity)[:, None] + step  # see Round.feed
        row = torch.arange(len(fed), device=fed.device)[:, None]  # [B, 1]
        for buffer in (x for x in engine.cache.buffers if x.dtype.is_floating_point):  # of int8 the scales
            buffer[row, :, fed] = buffer.new_full((), math.nan)  # a capture takes no number from the host
        place = state.seq_len[:, None] + step[:-1]  # [B, gamma]
        here, other = place % WORSE == 0, (state.pending[:, None] + place) % engine.model.config.vocab_size
        if draft.q is None or not draft.tokens.numel():
            return replace(draft, tokens=torch.where(here, other, draft.tokens))
        half = torch.arange(draft.q.shape[-1], device=place.device) % 2 != place[..., None] % 2  # [B, gamma, V]
        likely = draft.q * (half + 0.02)
        rest = torch.full_like(likely[..., :1], 0.3)
        q = (0.7 * likely / likely.sum(-1, keepdim=True)).scatter_add(-1, other[..., None], rest)
        u = uniform(state.table.seed[:, None], place, OTHER_STREAM)
        (drawn,) = state.vocabulary.decided(draw(q.flatten(0, 1), u.flatten()).view_as(place))
        tokens = torch.where(here, drawn, draft.tokens)
        return replace(draft, tokens=tokens, q=torch.where(here[..., None], q, draft.q))

    policy.propose = worse  # type: ignore[method-assign]
    rounds.set_replay(rounds.replay)  # so that what is new does not first run in a capture
    rounds.forget()
    try:
        yield
    finally:
        del policy.propose
        rounds.forget()


def tested(finding: Finding, engine: Engine) -> Finding:
    """The finding, failed where no draft was refused: nothing is known of what follows one then."""
    stats, why = engine.stats, "nothing was drafted: longer outputs, or another --draft, may"
    if not finding.passed or stats.accepted < stats.drafted:
        return finding
    why = "all drafts were accepted" if stats.drafted else why
    return replace(finding, passed=False, text=f"nothing tested: {why}")


def seen(n: int) -> str:
    """The power of n tokens that were compared one by one."""
    rarest = 1 / -math.expm1(math.log1p(-POWER) / max(1, n))
    return f"; a fault in one of {rarest:,.0f} tokens would have been found with {POWER:.0%}"


def greedy(engine: Engine, prompts: Prompts, n_tokens: int) -> Finding:
    """Both ways give the same greedy tokens, or part where the logits of Engine.logits are NEAR_TIE apart at most."""
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    plain, ours = ([c.tokens for c in engine.generate(prompts, params, speculate=way)] for way in (False, True))
    stats, rows = engine.stats, [(i, prompts[i], plain[i], ours[i]) for i in range(len(prompts))]
    found = differences(rows, lambda ids: engine.logits(ids, last=1)[0])
    dtypes, compared = dtypes_of(engine), sum(n_agreeing(*both) for _, _, *both in rows)
    wrong = [one for one in found if not one.is_near_tie(*dtypes)]  # NaN is wrong
    limit = max((near_tie(one.best, *dtypes) for one in found), default=0.0)
    text = (
        f"{len(rows) - len(found)} of {len(rows)} outputs of {n_tokens} tokens are those of plain decoding "
        f"({stats.acceptance_rate:.0%} of drafts accepted){seen(compared)}"
    )
    if found:
        text += f"; {len(found) - len(wrong)} part at a near-tie, where logits are at most {limit:g} apart"
    if wrong:
        at = max(wrong, key=lambda one: one.gap or 0.0)
        text += f"; prompt {at.index} parts at token {at.position}, where they are {at.gap:.2g} apart"
    figures = {"differences": [asdict(one) for one in found], "near_tie": limit, "acceptance": stats.acceptance_rate}
    return Finding("greedy", not wrong, text, figures | {"outputs": len(rows)})


@torch.inference_mode()
def cache(engine: Engine, prompts: Prompts, n_tokens: int) -> Finding:
    """Rounds leave the keys and values of plain steps, up to ROUNDED, or FARTHER times as far as a prefill is off."""
    schedule, kept = engine.schedule, list[tuple[list[int], int, Tensor]]()
    distances, squares, release = list[Tensor](), list[Tensor](), schedule.release

    def noted(slot: int) -> None:
        if request := schedule.slots[slot]:
            ids, n = [*request.prompt, *request.tokens[:-1]], len(request.tokens)
            kept.append((ids, n, entries_of(engine, slot, len(ids), n)))
        release(slot)

    schedule.release = noted  # type: ignore[method-assign]
    try:
        engine.generate(prompts, _mixed(len(prompts), n_tokens))
    finally:
        del schedule.release
    for slot in range(len(schedule.slots)):  # nothing that rounds may have changed is compared with itself
        schedule.prefill.keep(slot, 0)
    for ids, n, ours in kept:
        engine.logits(ids, last=n)
        plain = entries_of(engine, 0, len(ids), n)
        schedule.prefill.fill(0, ids)
        both = torch.stack([ours, entries_of(engine, 0, len(ids), n)])  # [2, L, 2, K, n, H]
        distances.append((both - plain).square().mean(-1).amax(3))
        squares.append(plain.square().mean((2, 3, 4)))
        release(0)
    off, rounding = torch.cat(distances, 3).sqrt() / torch.stack(squares).mean(0).sqrt()[..., None]  # [L, 2, n] each
    limit = (FARTHER * rounding.amax(2, True)).clamp(min=max(ROUNDED[dtype] for dtype in dtypes_of(engine)))
    share = (off / limit).nan_to_num(1e9)  # NaN is wrong
    right, worst, most = (share <= 1).all(0).all(0), float(share.max()), float(limit.max())
    text = (
        f"keys and values of {int(right.sum()):,} of {len(right):,} tokens are those of plain steps, off by at most "
        f"{worst:.2g} times what rounding explains, which is {most:.2g} of a layer's size{seen(len(right) // 2)}"
    )
    if most > FARTHEST:  # a fault of a prefill or of plain steps, which would hide others
        text += f"; a prefill and plain steps may not differ so much, by more than {FARTHEST:g}"
    return Finding(
        "cache", bool(right.all()) and most <= FARTHEST, text, {"tokens": len(right), "farthest": worst, "limit": most}
    )


def entries_of(engine: Engine, slot: int, end: int, n: int) -> Tensor:
    """Keys and values of the last 2 n tokens of a slot that holds `end`, fp32 [L, 2, K, 2 n, H]: n are a prompt's."""
    found = []
    for layer in engine.cache.layers:
        parts = [buffer[slot, :, max(0, end - 2 * n) : end] for buffer in layer.buffers]
        for numbers, scale in (layer.format.read(parts[of::2]) for of in (0, 1)):
            found.append(numbers.float() if scale is None else numbers * scale.float()[..., None])  # [K, n, H]
    return torch.stack(found).unflatten(0, (-1, 2)).cpu()  # type: ignore[no-any-return]


def dtypes_of(engine: Engine) -> list[str]:
    return [engine.dtype_name, engine.config.kv_dtype or engine.dtype_name]


def exact(engine: Engine, prompts: Prompts, n_tokens: int) -> Finding:
    """Both ways give the same logits, bit for bit, and the same greedy tokens: at most B prompts."""
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    assert engine.config.exact and not engine.schedule.rounds.capture and len(prompts) <= engine.config.batch_size
    (plain, before), (ours, after) = (_with_logits(engine, prompts, params, way) for way in (False, True))
    places = [(i, len(prompts[i]) - 1 + n) for i in range(len(prompts)) for n in range(n_tokens)]
    other = [place for place in places if not torch.equal(before[place], after[place])]
    tokens = sum(a != b for a, b in zip(plain, ours, strict=True))
    text = f"{len(places) - len(other):,} of {len(places):,} vectors of logits have the same bits"
    text += f", and {len(plain) - tokens} of {len(plain)} outputs the same tokens{seen(len(places))}"
    return Finding("exact", not (other or tokens), text, {"vectors": len(places), "different": len(other)})


def _with_logits(
    engine: Engine, prompts: Prompts, params: SamplingParams, speculate: bool
) -> tuple[list[list[int]], dict[tuple[int, int], Tensor]]:
    """The outputs, and the target's logits [V] by prompt and position: the last ones fed there are those that count."""
    logits, feed = dict[tuple[int, int], Tensor](), engine.schedule.rounds.feed

    def noted(tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        start, (out, mass) = engine.state.seq_len.tolist(), feed(tokens, n_keys)
        for slot, request in enumerate(engine.schedule.slots):
            if request is not None:
                logits.update(((request.index, start[slot] + t), out[slot, t].clone()) for t in range(tokens.shape[1]))
        return out, mass

    engine.warm_up()
    engine.schedule.rounds.feed = noted  # type: ignore[method-assign]
    try:
        return [c.tokens for c in engine.generate(prompts, params, speculate=speculate)], logits
    finally:
        engine.schedule.rounds.feed = feed  # type: ignore[method-assign]


def chance_of(statistic: float, freedom: int, noncentrality: float = 0.0) -> float:
    """How likely a chi-square of this freedom, central or not, is at least so large.

    One that is not central is a central one of more freedom: of 2 j more, where j is a Poisson's of half as much.
    """
    j = torch.arange(MOST, dtype=torch.float64)
    mean = torch.tensor(noncentrality / 2, dtype=torch.float64)
    weights = (torch.special.xlogy(j, mean) - mean - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, statistic / 2))
    return float((weights * tails).sum())


def next_above(freedom: int, rounding: float = 0.0, chance: float = CHANCE) -> float:
    """The statistic that chance, and what rounding adds, exceed so often."""
    return _falls_to(lambda x: chance_of(x, freedom, rounding), chance)


def smallest_distance(n: int, freedom: int, rounding: float = 0.0) -> float:
    """The distance d that n samples find with POWER in one of eight tests.

    It adds at least 4 n d^2 to the statistic (Cauchy, Schwarz).
    """
    limit = next_above(freedom, rounding, CHANCE / 8)
    return math.sqrt(_falls_to(lambda x: 1 - chance_of(limit, freedom, x), 1 - POWER) / (4 * n))


def _falls_to(chance: Callable[[float], float], level: float) -> float:
    """Where a chance that falls from 0 to MOST on is at this level."""
    low, high = 0.0, MOST
    for _ in range(60):
        low, high = (middle, high) if chance(middle := (low + high) / 2) > level else (low, middle)
    return high


@dataclass
class Ranks:
    """Where sampled tokens lie in the target's distributions, by their place in a round.

    A token x that tokens of mass F precede lies at F + v p(x), v drawn anew: uniform in [0, 1) if tokens follow p
    (Rosenblatt's transform, Ann. Math. Stat. 23, 1952, randomised, as tokens are discrete), whatever their order, if it
    is fixed before the token is drawn. So is which place it has in its round, from the first to the one after all
    drafts: what is said of all tokens holds at each place. Nor do tokens depend on those before them.
    """

    by_p: dict[int, list[float]] = field(default_factory=dict)  # the target's likeliest tokens come first
    by_q: dict[int, list[float]] = field(default_factory=dict)  # the draft's: a wrong judge prefers these, or others
    worse: dict[int, list[float]] = field(default_factory=dict)  # by q where drafts are made worse, of all places
    by_id: dict[int, list[float]] = field(default_factory=dict)  # as numbers are drawn, of all places: used twice?
    products: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # of two: mean 0, variance 1

    def statistics(self) -> list[tuple[float, int, int]]:
        """Chi-squares, freedoms, tokens: G of all places together, with squared correlations, and of each."""
        squares = [sum(found) ** 2 / len(found) for found in self.products if len(found) >= LEAST]
        tests = list[tuple[float, int, int]]()
        for by_place in filter(None, (self.by_p, self.by_q, self.worse, self.by_id)):
            counts = list(counts_of(by_place).values())
            if counts:
                every = torch.stack(counts).sum(0)
                n, whole = int(every.sum()), (g_statistic(every) + sum(squares), BINS - 1 + len(squares))
                tests += [(*whole, n), (sum(map(g_statistic, counts)), len(counts) * (BINS - 1), n)]
        return tests


def counts_of(by_place: dict[int, list[float]]) -> dict[int, Tensor]:
    """By place, how many ranks lie in each of BINS equal parts: fp64 [BINS]; places of few tokens are one, -1."""
    found = dict[int, list[float]]()
    for place, ranks in sorted(by_place.items()):
        found.setdefault(place if len(ranks) >= LEAST else -1, []).extend(ranks)
    parts = {place: (torch.tensor(ranks) * BINS).long() for place, ranks in found.items() if len(ranks) >= LEAST}
    return {place: part.clamp(max=BINS - 1).bincount(minlength=BINS).double() for place, part in parts.items()}


def g_statistic(counts: Tensor) -> float:
    """2 sum O ln(O / E) of counts that are expected to be equal."""
    return max(0.0, 2 * float(torch.special.xlogy(counts, counts / counts.mean()).sum()))


def samples(engine: Engine, prompts: Prompts, n_tokens: int, n: int) -> Finding:
    """About n sampled tokens, half of them filtered, each against the target's exact distribution where it stands.

    A token that its filter leaves out is wrong, however rare. ValueError if n is so large that rounding would decide,
    ArithmeticError where logits are not finite.
    """
    length, dtypes = max(min(n_tokens, LENGTHS), engine.draft.max_gamma + 2), dtypes_of(engine)
    ways = [SamplingParams(max_tokens=length, ignore_eos=True, **how) for how in (FREE, FILTERED)]
    rows = [prompts[i // len(ways) % len(prompts)] for i in range(-(-n // length))]
    asked = [replace(ways[i % len(ways)], seed=i) for i in range(len(rows))]
    gap = near_tie(float(_finite_logits(engine, rows[0], 1).max()), *dtypes)
    if len(rows) * length * rounding_of(gap) > MOST / 4:
        fewer = int(MOST / 5 / rounding_of(gap))
        raise ValueError(f"{n:,} sampled tokens would tell how {engine.dtype_name} rounds: try {fewer:,}")
    outputs, places, first = _sampled(engine, rows, asked)
    found, by_id, left_out, rounding = Ranks(), [list[float]()] * len(rows), 0, 0.0
    generator = torch.Generator().manual_seed(0)
    for i in sorted(range(len(rows)), key=lambda i: i // len(ways) % len(prompts)):  # a prompt is prefilled once
        logits = _finite_logits(engine, [*rows[i], *outputs[i][:-1]], length)
        gap = near_tie(float(logits.max()), *dtypes)
        by_p, by_q, by_id[i], wrong = ranks_of(
            logits, outputs[i], asked[i], gap, generator, [ids for _, ids in places[i]]
        )
        found.by_id.setdefault(0, []).extend(by_id[i])
        left_out, rounding = left_out + wrong, rounding + length * rounding_of(gap)
        for at, ((place, ids), of_p, of_q) in enumerate(zip(places[i], by_p, by_q, strict=True), len(rows[i]) - 1):
            found.by_p.setdefault(place, []).append(of_p)
            if len(ids):
                found.by_q.setdefault(place, []).append(of_q)
                found.worse.setdefault(0, []).extend([of_q] * (at % WORSE == 0))
    beside = [(by_id[i][k], by_id[j][m]) for (i, k), (j, m) in itertools.pairwise(first) if i != j]
    then = [pair for ranks in by_id for pair in itertools.pairwise(ranks)]
    for products, pairs in zip(found.products, (then, beside), strict=True):
        products += [12 * (a - 0.5) * (b - 0.5) for a, b in pairs]
    return _judged(found, len(rows) * length, left_out, rounding, engine.draft.max_gamma)


def _sampled(
    engine: Engine, rows: Prompts, params: Sequence[SamplingParams]
) -> tuple[list[list[int]], list[list[tuple[int, Tensor]]], list[tuple[int, int]]]:
    """Outputs; of each token its place in a round, and what its draft found likeliest, the best first: int64 [n].

    n is 0 where there was no draft or rounds are captured. And of each round of a row its number, and where it began.
    """
    policy, captured = engine.policy, engine.schedule.rounds.capture
    assert policy
    propose, own = policy.propose, vars(policy).get("propose")
    likeliest = torch.zeros(engine.config.batch_size, 0, 0).long()

    def noted(state: BatchState, plan: RoundPlan) -> Draft:
        nonlocal likeliest
        draft = propose(state, plan)
        q, likeliest = draft.q, draft.tokens[..., None].cpu()
        if q is not None and q.numel():
            likeliest = q.topk(min(TOP, q.shape[-1])).indices.cpu()
        return draft

    outputs, first, slots = [list[int]() for _ in rows], list[tuple[int, int]](), dict[int, int]()
    places, nothing = [list[tuple[int, Tensor]]() for _ in rows], torch.zeros(0).long()
    if not captured:
        policy.propose = noted  # type: ignore[method-assign]
    try:
        for event in engine.stream(rows, params):
            slots |= {one.index: slot for slot, one in enumerate(engine.schedule.slots) if one}
            drafts, i = likeliest[slots[event.index]], event.index
            first.append((i, len(outputs[i])))
            outputs[i] += event.tokens
            places[i] += [(k, drafts[k] if k < len(drafts) else nothing) for k in range(len(event.tokens))]
    finally:
        if not captured:
            del policy.propose
            vars(policy).update({"propose": own} if own else {})
    return outputs, places, first


def rounding_of(tie: float) -> float:
    """What rounding may add to the statistic for each token: logits are a quarter of a tie off, but both ways.

    A quarter of that may go one way for all of a place, where twice its square bounds the divergence.
    """
    return 2 * (tie / 16) ** 2


def ranks_of(
    logits: Tensor, tokens: Sequence[int], params: SamplingParams, tie: float, generator: torch.Generator,
    first: Sequence[Tensor] = (),
) -> tuple[list[float], list[float], list[float], int]:  # fmt: skip
    """The ranks of T tokens by logits [T, V], by what comes first, int64 [n] each, by id; how many are filtered out.

    Rounding may move logits by a quarter of a tie, and sums of probabilities by half as much: a filter's edge, too.
    """
    filtered = Kind.of([params]).filtered

    def through(top_p: float | None) -> Tensor:
        table = SamplingTable.empty(len(logits), logits.shape[1], logits.device)
        for row in range(len(logits)):  # each by itself: a fault of rounds of several tokens is not shared
            table.assign(row, replace(params, top_p=top_p), 0, logits.shape[1])
        return probabilities(logits, table, filtered=filtered).double()

    p, ids = through(params.top_p), torch.tensor(tokens)[:, None]  # [T, V], [T, 1]
    own, place = p.gather(1, ids), torch.arange(p.shape[1])
    v = torch.rand(len(p), generator=generator).double()
    drafted = (place + len(place)).repeat(len(p), 1)
    for row, those in zip(drafted, first, strict=False):
        row[those] = torch.arange(len(those))
    orders = (p > own) | ((p == own) & (place < ids)), drafted < drafted.gather(1, ids), place < ids
    by_p, by_q, by_id = (((p * before).sum(1) + v * own[:, 0]).tolist() for before in orders)
    wider = p if params.top_p is None else through(min(1.0, params.top_p + tie / 8))
    least = logits.masked_fill(wider == 0, math.inf).amin(1)
    return by_p, by_q, by_id, int(((own[:, 0] == 0) & (logits.gather(1, ids)[:, 0] < least - tie)).sum())


def _judged(found: Ranks, n: int, left_out: int, rounding: float, last: int) -> Finding:
    """What the ranks of n tokens say; rounding: what it may add to the statistic; last: the place after all drafts."""
    counts, tests = counts_of(found.by_p), found.statistics()
    figures = {"samples": n, "tests": tests, "left_out": left_out, "rounding": rounding}
    figures["places"] = {place: len(ranks) for place, ranks in sorted(found.by_p.items())}
    if not tests:
        text = f"nothing tested: {n:,} sampled tokens are too few"
        return Finding("samples", False, text, figures)
    chance = min(1.0, len(tests) * min(chance_of(g, k, rounding * m / n) for g, k, m in tests))
    sizes = sum(int(c.sum()) for c in counts.values()), min(int(c.sum()) for c in counts.values())
    in_all, in_one = (smallest_distance(m, k, rounding) for m, (_, k, _) in zip(sizes, tests, strict=False))
    text = (
        f"{n:,} sampled tokens at {len(counts)} places of a round against their exact distributions: p = {chance:.2g} "
        f"(fails below {CHANCE:g}); {in_all:.1%} of them in a wrong quarter of these, or {in_one:.1%} at the rarest "
        f"place, would have been found with {POWER:.0%}"
    )
    if last not in counts:
        text += f"; too few rounds kept all {last} drafts to test what follows those"
    if left_out:
        text += f"; {left_out:,} tokens are ones that their filter leaves out"
    figures |= {"p": chance, "finds_in_all": in_all, "finds_in_one": in_one}
    return Finding("samples", chance >= CHANCE and not left_out, text, figures)


def _finite_logits(engine: Engine, ids: Sequence[int], last: int) -> Tensor:
    """The target's logits [last, V] after a text; ArithmeticError if one is NaN or infinitely large."""
    logits = engine.logits(ids, last=last)
    if not logits.amax(-1).isfinite().all():
        raise ArithmeticError(f"the target's logits after {len(ids):,} tokens are not finite")
    return logits


def seeds(engine: Engine, prompts: Prompts, n_tokens: int) -> Finding:
    """Rows with seeds of their own, sampled and greedy, give the same tokens whatever happens beside them."""
    params, order = _mixed(len(prompts), n_tokens), list(range(len(prompts)))
    first, slots = _decode(engine, prompts, params, order)
    turned = order[1:] + order[:1]
    runs = {"again": order, "in another order": order[::-1], "in another slot": turned}
    different, moved = list[str](), 0
    for name, places in runs.items():
        if name == "in another slot":  # nothing is held, so they take slots as they come
            engine.generate([[prompts[0][0]]] * engine.config.batch_size, SamplingParams(max_tokens=1))
        tokens, where = _decode(engine, prompts, params, places)
        moved += sum(where.get(i, slot) != slot for i, slot in slots.items())
        different += [f"row {i} {name}" for i in order if tokens[i] != first[i]]
    for i in order:
        alone, _ = _decode(engine, prompts, params, [i])
        different += [f"row {i} alone"] if alone[i] != first[i] else []
    where_to = f", in {moved} other slots" if moved else "; no row came to another slot, which is not tested"
    text = f"{len(order)} rows: the same tokens alone, beside others, again, in another order{where_to}"
    text += seen(4 * len(order) * n_tokens)
    if different:
        text = f"{len(different)} of {4 * len(order)} outputs are others: {', '.join(different[:3])}"
    return Finding("seeds", not different, text, {"rows": len(order), "different": different, "moved": moved})


def refill(engine: Engine, prompts: Prompts, n_tokens: int) -> Finding:
    """Tokens stay when all that no slot holds is poisoned before the work, and each slot again when it is free."""
    params, order, different, poisoned = _mixed(len(prompts), n_tokens), list(range(len(prompts))), set[int](), 0
    clean, _ = _decode(engine, prompts, params, order)
    for kind in (math.nan, math.inf):
        poisoned += poison_all(engine, kind)
        tokens, _ = _decode(engine, prompts, params, order, partial(poison_all, engine, kind))
        different |= {i for i in order if tokens[i] != clean[i]}
    poison_all(engine, 0.0)
    text = f"{len(order)} rows: the same tokens over {poisoned:,} poisoned numbers, and in slots poisoned between rows"
    text += seen(2 * len(order) * n_tokens)
    if different:
        text = f"{len(different)} of {len(order)} rows change over poisoned caches: {sorted(different)[:5]}"
    return Finding("refill", not different, text, {"rows": len(order), "different": sorted(different)})


def _mixed(n: int, n_tokens: int) -> list[SamplingParams]:
    ways: list[dict[str, Any]] = [FREE, {}, FILTERED]
    lengths = [max(1, n_tokens - i % 3) for i in range(n)]
    return [SamplingParams(max_tokens=m, seed=1000 + i, ignore_eos=True, **ways[i % 3]) for i, m in enumerate(lengths)]


def _decode(
    engine: Engine, prompts: Prompts, params: Sequence[SamplingParams], order: Sequence[int],
    freed: Callable[[], object] = lambda: None,
) -> tuple[dict[int, list[int]], dict[int, int]]:  # fmt: skip
    """Tokens of each prompt, begun in this order, and its slot if it was seen; freed: called when a row has left."""
    tokens, slots = dict[int, list[int]](), dict[int, int]()
    for event in engine.stream([prompts[i] for i in order], [params[i] for i in order]):
        for slot, request in enumerate(engine.schedule.slots):
            if request is not None:
                slots[order[request.index]] = slot
        if event.completion:
            tokens[order[event.index]] = event.completion.tokens
            freed()
    return tokens, slots


def _caches(engine: Engine) -> Iterator[tuple[KVCache, Prefill | None]]:
    """The target's cache and those of drafts, each with what knows what its slots hold."""
    yield engine.cache, engine.schedule.prefill
    levels: tuple[Any, Any] = (engine.policy, getattr(engine.policy, "cheap", None))
    for level in levels:
        if getattr(level, "own_cache", False) and hasattr(level, "runner"):
            yield level.runner.cache, next((x for x in vars(level).values() if isinstance(x, Prefill)), None)


def poison_all(engine: Engine, kind: float) -> int:
    return sum(poison(engine, slot, kind) for slot in range(engine.config.batch_size))


@torch.inference_mode()
def poison(engine: Engine, slot: int, kind: float) -> int:
    """Overwrite all that a free slot does not hold -> how many numbers; kind: NaN, 0, or inf for the largest ones."""
    count, arrival = 0, engine.schedule.arrival
    if engine.schedule.slots[slot] is not None or (arrival and arrival.slot == slot):
        return 0
    for cache, prefill in _caches(engine):
        for buffer in cache.buffers:
            kept = prefill.held(slot) if prefill else 0
            whole = not buffer.dtype.is_floating_point
            info: Any = torch.iinfo(buffer.dtype) if whole else torch.finfo(buffer.dtype)
            buffer[slot, :, kept:] = kind if kind == 0 or not (whole or kind == math.inf) else info.max
            count += buffer[slot, :, kept:].numel()
    return count
