"""Stages of gpu_suite.py that ask whether it is right: kernels against fp64, captured rounds beside others.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K,
        H head dim, gamma tokens drafted a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor

from frontier import tokens_of
from gpt_fast_sd import DraftConfig, Engine, SamplingParams, kernels
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import SPLIT, Transformer
from gpu_setup import SMALL, Findings, Record, Setup, difference, prompts_of, random_model, settings_of

# ---- are the kernels right? ------------------------------------------------------------------------------------------

# ||out - truth|| / ||truth||: fp32 sums of fp32 products; results and weights rounded to 11 and to 8 bits. A product in
# tf32, the mode a GPU takes if it is let, would be off by 3e-4.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = (  # G, H, T
    (1, 128, 1), (4, 128, 1), (8, 128, 1), (4, 128, 5), (3, 96, 3), (8, 128, 9), (4, 64, 17), (1, 64, 5),
)  # fmt: skip
N_KV = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of an attention kernel: ragged rows, `unread` behind the last entry of each, and the last row idle."""

    q: Tensor  # [B, N, T, H]
    k: Tensor  # [B, K, S, H]
    v: Tensor
    pos: Tensor  # int64 [B, T]
    n_keys: int

    @staticmethod
    def random(
        shape: tuple[int, int, int], dtype: torch.dtype, lengths: Sequence[int], seed: int, unread: float
    ) -> Problem:
        """On the CPU; lengths: committed entries of each row, the queries come behind them."""
        group, head_dim, n_tokens = shape
        generator = torch.Generator().manual_seed(seed)
        n_keys = -(-(max(lengths) + n_tokens) // SPLIT) * SPLIT

        def numbers(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        batch = len(lengths) + 1
        k, v = (numbers(batch, N_KV, n_keys + SPLIT, head_dim) for _ in range(2))
        pos = torch.tensor([*lengths, n_keys])[:, None] + torch.arange(n_tokens)
        for row, length in enumerate(lengths):
            k[row, :, length + n_tokens :] = v[row, :, length + n_tokens :] = unread
        k[-1] = v[-1] = unread
        # scores of about 3, so that attention is neither flat nor on one key
        return Problem(q=2 * numbers(batch, N_KV * group, n_tokens, head_dim), k=k, v=v, pos=pos, n_keys=n_keys)

    def to(self, device: torch.device) -> Problem:
        """The same on a device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("q", "k", "v", "pos")})

    @property
    def seen(self) -> Tensor:
        """What each query may read: bool [B, K, T, S]."""
        key = torch.arange(self.k.shape[2])
        seen = (key <= self.pos[..., None]) & (self.pos < self.n_keys)[..., None]  # [B, T, S]
        return seen[:, None].expand(-1, N_KV, -1, -1)


def truth(problem: Problem, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in fp64 to what is seen [B, K, T, S] -> [B, N, T, H], weights [B, K, G, T, S], lse [B, N, T]."""
    q = problem.q.double().unflatten(1, (N_KV, -1))  # [B, K, G, T, H]
    read = seen.any(2)[..., None]  # [B, K, S, 1]
    k, v = (torch.where(read, x.double(), 0.0) for x in (problem.k, problem.v))
    scores = torch.einsum("bkgth,bksh->bkgts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    lse = scores.logsumexp(-1)  # [B, K, G, T]
    weights = torch.where(seen[:, :, None], (scores - lse[..., None]).exp(), 0.0)
    return torch.einsum("bkgts,bksh->bkgth", weights, v).flatten(1, 2), weights, lse.flatten(1, 2)


def pages_of(weights: Tensor, n_keys: int, page: int) -> Tensor:
    """Attention mass of each page: weights [B, K, G, T, S] -> [B, K, n_keys // page]."""
    mass: Tensor = weights.sum((2, 3))[..., : n_keys // page * page]  # [B, K, pages * page]
    sums: Tensor = mass.unflatten(-1, (-1, page)).sum(-1)
    return sums


def problems(setup: Setup, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Iterator[tuple[str, Problem]]:
    """bf16 in every shape, fp16 and fp32 in some; each with other numbers.

    On a CPU fp32 alone, as products there round scores to their dtype, and finite numbers, of which NaN is none.
    """
    cuda = setup.device.type == "cuda"
    lengths = (0, 37, 300) if setup.tiny else (0, 37, 255, 1023, 2600)
    for i, shape in enumerate(shapes):
        for dtype in (torch.float32,) if not cuda else TOLERANCE if i % 3 == 0 else (torch.bfloat16,):
            group, head_dim, n_tokens = shape
            what = f"{str(dtype).removeprefix('torch.')} G {group} H {head_dim} T {n_tokens}"
            yield what, Problem.random(shape, dtype, lengths, seed=i, unread=float("nan") if cuda else 1e4)


def correct_decode(setup: Setup) -> Record:
    """Dense attention of a few queries, and the mass that came with it, against fp64."""
    findings = Findings()
    for what, problem in problems(setup):
        out, weights, _ = truth(problem, problem.seen)
        here, tolerance = problem.to(setup.device), TOLERANCE[problem.q.dtype]
        args = here.q, here.k, here.v, here.pos, here.n_keys, kernels.split_for(here.k.shape[2])
        findings.add("decode_attention", what, difference(kernels.decode_attention(*args), out), tolerance)
        for page in (16, 64):
            got, mass = kernels.decode_attention_with_mass(*args, page)
            expected = pages_of(weights, problem.n_keys, page)
            findings.add("decode_attention_with_mass", f"{what} page {page}", difference(got, out), tolerance)
            findings.add("its mass", f"{what} page {page}", difference(mass, expected), tolerance)
    return findings.record()


def listed(problem: Problem, page: int, n_listed: int, tail: int, seed: int) -> tuple[Tensor, Tensor]:
    """A list for sparse attention, some of it empty, and where the tail begins: int64 [B, K, C], int64 [B]."""
    generator = torch.Generator().manual_seed(seed)
    start = (problem.pos[:, 0] - tail // 2).clamp(min=0, max=problem.n_keys) // page * page  # [B]
    n_pages = -(-n_listed // page)
    slots = torch.full((*problem.k.shape[:2], n_pages * page), -1)
    for row in range(len(start)):
        for head in range(N_KV):
            order = torch.randperm(int(start[row]) // page, generator=generator)[: n_pages - 1]  # one stays empty
            entries = (order[:, None] * page + torch.arange(page)).flatten()
            slots[row, head, : len(entries)] = entries
    return slots, start


def correct_sparse(setup: Setup) -> Record:
    """Attention to listed entries and a tail, against fp64."""
    findings = Findings()
    for i, (what, problem) in enumerate(problems(setup, [shape for shape in SHAPES if shape[2] <= 9])):
        here = problem.to(setup.device)
        for page in (1, 16):
            tail = 40
            slots, start = listed(problem, page, n_listed=96, tail=tail, seed=i)
            key = torch.arange(problem.k.shape[2] + 1)
            named = torch.zeros(*slots.shape[:2], len(key), dtype=torch.bool)
            named.scatter_(2, torch.where(slots >= 0, slots, len(key) - 1), True)
            in_tail = (key >= start[:, None]) & (key < start[:, None] + tail)  # [B, S + 1]
            read = (named | in_tail[:, None])[..., :-1]  # [B, K, S]
            out, *_ = truth(problem, problem.seen & read[:, :, None])
            got = kernels.sparse_attention(
                here.q,
                here.k,
                here.v,
                slots.to(setup.device),
                start.to(setup.device),
                tail,
                here.pos,
                here.n_keys,
                page,
            )
            findings.add("sparse_attention", f"{what} page {page}", difference(got, out), TOLERANCE[problem.q.dtype])
    return findings.record()


PREFILL_SHAPES = ((4, 128, 256), (1, 64, 63), (3, 96, 130), (8, 128, 33), (4, 64, 32))  # G, H, T


def correct_prefill(setup: Setup) -> Record:
    """Attention of long chunks, its log-sum-exp, and the mass that is computed with that, against fp64."""
    findings = Findings()
    for what, problem in problems(setup, PREFILL_SHAPES):
        out, weights, lse = truth(problem, problem.seen)
        here, tolerance = problem.to(setup.device), TOLERANCE[problem.q.dtype]
        args = here.q, here.k, here.v, here.pos, here.n_keys
        findings.add("prefill_attention", what, difference(kernels.prefill_attention(*args), out), tolerance)
        got, sums = kernels.prefill_attention_with_lse(*args)
        findings.add("prefill_attention_with_lse", what, difference(got, out), tolerance)
        # the idle row reads nothing, and says so: -inf in both
        error = difference(sums.cpu().exp().log1p(), lse.exp().log1p())
        findings.add("its log-sum-exp", what, error, TOLERANCE[torch.float32])
        for page in (1, 16):
            mass = kernels.key_mass(here.q, here.k, sums, here.pos, here.n_keys, page)
            expected = pages_of(weights, problem.n_keys, page)
            findings.add("key_mass", f"{what} page {page}", difference(mass, expected), tolerance)
    return findings.record()


def best_places(scores: Sequence[float], n: int) -> list[int]:
    """The n best places, in ascending order, of equal scores the first, NaN last, then -1."""
    order = sorted(range(len(scores)), key=lambda i: (scores[i] != scores[i], -scores[i], i))[:n]
    return [*sorted(order), *[-1] * (n - len(order))]


def correct_select(setup: Setup) -> Record:
    """Selections and bounds against plain Python: they are whole numbers or copies, so not one may differ."""
    findings, generator = Findings(), torch.Generator().manual_seed(0)

    def wrong(got: Tensor, expected: Tensor) -> float:
        return float((got.cpu() != expected).sum()) if got.shape == expected.shape else float("inf")

    for n_scores, n in ((7, 3), (100, 33), (1024, 64), (1792, 56), (40, 64), *([] if setup.tiny else [(28672, 1900)])):
        scores = torch.randn(2, 3, 2, n_scores, generator=generator)
        scores[0] = (scores[0] * 4).round()  # full of ties
        scores[1, 0, 0, ::5] = float("nan")
        n_valid = torch.tensor([n_scores, n_scores // 2, 0])
        here, what = scores.to(setup.device), f"{n} of {n_scores:,}"
        places = [
            best_places(row[: int(n_valid[b])].tolist(), n) for layer in scores for b in range(3) for row in layer[b]
        ]
        expected = torch.tensor(places).view(2, 3, 2, n)
        got = kernels.top_pages(here, n_valid.to(setup.device)[:, None], n)
        findings.add("top_pages", what, wrong(got, expected), 0.0)
        page, due = 16, torch.tensor([True, True, False])
        slots = torch.full((2, 3, 2, n * page), 5)
        listed = (expected[..., None] * page + torch.arange(page)).masked_fill(expected[..., None] < 0, -1).flatten(-2)
        after, first = slots.to(setup.device), n_valid.to(setup.device)
        kernels.guided_select(here, after, due.to(setup.device), first, page)
        findings.add("guided_select", what, wrong(after, torch.where(due[:, None, None], listed, slots)), 0.0)
    for dtype in TOLERANCE if setup.device.type == "cuda" else (torch.float32,):
        for group, head_dim, page in ((4, 128, 16), (1, 64, 32), (3, 96, 16)):
            what = f"{str(dtype).removeprefix('torch.')} G {group} H {head_dim} page {page}"
            k = torch.randn(3, N_KV, 40 * page, head_dim, generator=generator).to(dtype)
            high, low = (getattr(k.unflatten(2, (-1, page)), name)(3) for name in ("amax", "amin"))
            bounds = torch.cat([high, low], -1)  # [B, K, P, 2H]
            first, got = torch.tensor([0, 7, 37]), torch.zeros_like(bounds).to(setup.device)
            kernels.page_bounds(k.to(setup.device), got, first.to(setup.device), 5, page)
            written = (torch.arange(40) - first[:, None]).clamp(min=-1)  # [B, P]
            written = (written >= 0) & (written < 5)
            expected = torch.where(written[:, None, :, None], bounds, torch.zeros_like(bounds))
            findings.add("page_bounds", what, wrong(got, expected), 0.0)
            q = torch.randn(3, N_KV * group, 2, head_dim, generator=generator).to(dtype)
            n_closed = torch.tensor([40, 9, 0])
            given = q.to(setup.device), bounds.to(setup.device), n_closed.to(setup.device)
            chosen = kernels.quest_pages(*given, 12)
            findings.add("quest_pages", what, shortfall(q, bounds, n_closed, chosen.cpu()), 1e-5)
    return findings.record()


FILTERED_VOCABULARIES = (49_152, 128_256)  # of the bundled model and of Llama 3.1
TOP_K, TOP_P = (1, 50, None), (0.0, 0.9, 1.0)
ROUNDING = 1e-12  # of the mass of a row: exp in fp64 may differ by a bit where the last token kept is decided


def correct_filters(setup: Setup) -> Record:
    """Where top-k and top-p cut rows of logits, against a sort of the whole vocabulary."""
    findings, generator = Findings(), torch.Generator().manual_seed(0)
    filters = [(k, p) for k in TOP_K for p in TOP_P]
    for vocabulary in FILTERED_VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            for name in ("all differ", "ties", "few possible"):
                logits = 3 * torch.randn(len(filters), vocabulary, generator=generator)
                if name == "ties":  # of the best as well
                    logits = (logits / 4).round() * 4
                elif name == "few possible":
                    logits[:, 40:] = float("-inf")
                logits = logits.to(dtype).float()
                scores = logits - logits.amax(-1, keepdim=True)
                top_k = torch.tensor([k or vocabulary for k, _ in filters])
                top_p = torch.tensor([p for _, p in filters], dtype=torch.float64)
                got = kernels.likeliest(*(x.to(setup.device) for x in (scores, top_k, top_p)))
                what = f"{str(dtype).removeprefix('torch.')} {vocabulary:,} {name}"
                for i, (k, p) in enumerate(filters):
                    error = miscut(scores[i], top_k[i], top_p[i], *(x[i].cpu() for x in got))
                    findings.add("likeliest", f"{what}, k {k or 'all'} p {p:g}", error, ROUNDING)
    return findings.record()


def miscut(scores: Tensor, top_k: Tensor, top_p: Tensor, cut: Tensor, last: Tensor) -> float:
    """The share of a row's mass that is kept or left by mistake, inf where the tokens kept are not the likeliest.

    fp32 scores [V] of at most 0 and where they are cut, see kernels.likeliest. The truth is a stable sort and sums in
    fp64.
    """
    place = torch.arange(len(scores))
    kept = (scores > cut) | ((scores == cut) & (place <= last))
    order = scores.sort(descending=True, stable=True).indices  # of equals the first comes first
    n_kept = int(kept.sum())
    if n_kept == 0 or not bool(kept[order[:n_kept]].all()):
        return float("inf")
    best_k = scores >= scores[order[int(top_k) - 1]]  # with all that are equal to the last of them
    mass = torch.where(best_k, scores.double().exp(), 0.0)[order].cumsum(0)
    wanted = int(best_k.sum())
    if top_p < 1:
        wanted = max(1, int((mass < top_p * mass[-1]).sum()) + 1)
    few, many = sorted((wanted, n_kept))
    if few == many:
        return 0.0
    # a token that is kept against top-k has mass of its own
    own = scores[order].double().exp()
    return float(own[few:many].sum() / mass[-1]) or float("inf")


def shortfall(q: Tensor, bounds: Tensor, n_closed: Tensor, chosen: Tensor) -> float:
    """By how much the worst page chosen is worse than the worst that should be, relative to the spread of scores.

    In fp64, since near ties may fall either way. q [B, N, T, H], bounds [B, K, P, 2H], chosen [B, K, n].
    """
    rows = q.double().unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)  # [B, K, R, H]
    worst = 0.0
    for b, closed in enumerate(n_closed.tolist()):
        for kv in range(bounds.shape[1]):
            high, low = bounds[b, kv, :closed].double().chunk(2, -1)  # [closed, H] each
            scores = rows[b, kv].clamp(min=0) @ high.T + rows[b, kv].clamp(max=0) @ low.T  # [R, closed]
            short = (scores - scores.amax(-1, keepdim=True)).amax(0) if closed else scores.new_empty(0)  # [closed]
            got = [page for page in chosen[b, kv].tolist() if page >= 0]
            n = min(closed, chosen.shape[-1])
            if len(set(got)) != n or got != sorted(got) or any(page >= closed for page in got):
                return float("inf")
            if n:
                span = float(short.max() - short.min()) or 1.0
                worst = max(worst, float(short.topk(n).values[-1] - short[got].min()) / span)
    return worst


# ---- do captured rounds change anything? -----------------------------------------------------------------------------

DRAFTS = (  # of every kind that shares no code with the others
    DraftConfig(policy="streaming", budget=128, gamma=4),
    DraftConfig(policy="snapkv", budget=128, gamma=3),
    DraftConfig(policy="guided", budget=128, gamma=5),
    DraftConfig(policy="quest", budget=128, gamma=2),
    DraftConfig(policy="lookup", gamma=4),
)


def same_rounds(
    setup: Setup, model: Transformer, prompts: Sequence[Sequence[int]], drafts: Sequence[DraftConfig], *, exact: bool
) -> Record:
    """Rounds as one CUDA graph beside rounds launched kernel by kernel: the same tokens, and nothing compiled anew.

    exact: a row that differs is an error; else the rows that differ are counted.
    """
    findings, differing = Findings(), dict[str, int]()
    new = 6 if setup.tiny else 48
    kinds = {
        "greedy": SamplingParams(max_tokens=new, ignore_eos=True),
        "sampled": SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7),
    }
    engines = {mode: Engine(model, None, settings_of(setup, cuda_graphs=mode)) for mode in ("round", "off")}
    for draft in drafts:
        for engine in engines.values():
            engine.redraft(draft)
        for kind, params in kinds.items():
            outputs, label = [], f"{draft.policy}, {kind}"
            for mode, engine in engines.items():
                outputs.append([completion.tokens for completion in engine.generate(prompts, params)])
                engine.generate(prompts, params)
                findings.add("recompiles of a second run", f"{label}, {mode!r}", float(engine.stats.recompiles), 0.0)
            missing = sum(new - len(tokens) for mode in outputs for tokens in mode)
            findings.add("tokens that are missing", label, float(missing), 0.0)
            differing[label] = sum(a != b for a, b in zip(*outputs, strict=True))
            print(f"{label}: {differing[label]} of {len(prompts)} rows differ")
            findings.add("rows that differ", label, float(differing[label]), 0.0 if exact else float(len(prompts)))
    return {**findings.record(), "rows": len(prompts), "differing": differing}


def graphs_fp32(setup: Setup) -> Record:
    """Captured rounds of a random model in fp32: not a token may differ."""
    model = random_model(SMALL, setup.device, torch.float32)
    return same_rounds(setup, model, prompts_of(setup, SMALL.vocab_size), DRAFTS, exact=True)


def graphs_bundled(setup: Setup) -> Record:
    """Captured rounds of the bundled model, in bf16 on a chip, where roundings may decide: what differs is counted."""
    config = settings_of(setup, batch_size=1, dtype="bf16" if setup.on_cuda else "fp32", compile=False)
    bundled = Engine.from_pretrained(BUNDLED, config)
    assert bundled.tokenizer
    text = tokens_of(BUNDLED / "document.txt", bundled.tokenizer)
    prompts = [text[i * 50 :][: len(prompt)] for i, prompt in enumerate(prompts_of(setup, SMALL.vocab_size))]
    return same_rounds(setup, bundled.model, prompts, DRAFTS[:3], exact=False)


def no_syncs(setup: Setup) -> Record:
    """The host never waits inside a round, whoever drafts and however tokens are drawn."""
    findings = Findings()
    model = random_model(SMALL, setup.device, torch.float32)
    prompts, params = prompts_of(setup, SMALL.vocab_size), SamplingParams(max_tokens=8, ignore_eos=True)
    engine = Engine(model, None, settings_of(setup, cuda_graphs="off"))
    for draft in DRAFTS:
        engine.redraft(draft)
        engine.generate(prompts, params)  # compiles
        for sampled in (False, True):
            what = f"{draft.policy}, {'sampled' if sampled else 'greedy'}"
            waits, idle = syncs(setup, engine, draft.max_gamma, sampled)
            findings.add("host waits in a round", what, float(waits), 0.0)
            findings.add("idle rows in that round", what, float(idle), 0.0)
    return findings.record()


@torch.inference_mode()
def syncs(setup: Setup, engine: Engine, gamma: int, sampled: bool) -> tuple[int, int]:
    """Whether the device's part of a round makes the host wait, 0 or 1 with the place printed; and rows that idled."""
    rows = engine.rows
    rows.seq_len.fill_(64)
    rows.active.fill_(True)
    rows.heeds_eos.fill_(False)
    rows.remaining.fill_(4 * (gamma + 1))  # neither round is the last of a row
    rows.sampled = rows.filtered = sampled
    rows.table.temperature.fill_(0.8 if sampled else 0.0)
    waits, result = 0, None
    with rows.capturing(engine.cache.capacity - gamma):
        engine.rounds.device_round(gamma)
        if setup.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = engine.rounds.device_round(gamma)
        except RuntimeError as error:
            print(f"a round of {engine.draft.policy} makes the host wait: {error}")
            waits = 1
        finally:
            if setup.on_cuda:
                torch.cuda.set_sync_debug_mode("default")
    idle = 0 if result is None else int((result[:, 0] == 0).sum())  # each live row emits a token at least
    rows.active.fill_(False)
    rows.sampled = rows.filtered = False
    rows.table.temperature.fill_(0.0)
    return waits, idle
