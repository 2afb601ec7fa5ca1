"""What the stages of gpu_suite.py run. Each gives a JSON-ready record; what was replayed says so in its own name.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K,
        H head dim, gamma tokens drafted a round.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from frontier import spread, stretches, take_turns, tokens_of
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams, __version__, kernels
from gpt_fast_sd.config import GAMMA_TIERS
from gpt_fast_sd.engine import BUNDLED
from gpt_fast_sd.model import SPLIT, ModelConfig, Transformer, preset
from gpt_fast_sd.planner import GammaPlanner
from gpt_fast_sd.replay import PROFILES, Replay, replay_table
from gpt_fast_sd.roofline import (
    CHIPS,
    IDEAL,
    PRACTICAL,
    Chip,
    Efficiency,
    Forecast,
    best_gamma,
    measure,
    speedup,
    step_seconds,
)

Record = dict[str, Any]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Setup:
    """On what a suite runs. tiny: shapes of a dry run, whose figures mean nothing."""

    device: torch.device
    tiny: bool
    pairs: int
    max_autotune: bool
    texts: tuple[Path, ...]
    known: Mapping[str, Record]  # results of the stages that are done

    @property
    def on_cuda(self) -> bool:
        """Whether there is a chip to measure."""
        return self.device.type == "cuda"

    @property
    def measured(self) -> Chip | None:
        """The rates that the first stage measured, None where it was left out."""
        if "machine" not in self.known:
            return None
        rates = self.known["machine"]["rates"]
        return Chip(name="measured", bandwidth=max(rates["copy"], rates["read"]), peak=rates["matmul"])

    @property
    def chip(self) -> Chip:
        """The roofline: the data sheet's where the chip is known, else what was measured.

        Without a chip, or where the rates of an unknown one were not measured: an H200's.
        """
        name = torch.cuda.get_device_name(self.device) if self.on_cuda else ""
        sheet = next((chip for short, chip in CHIPS.items() if short in name.lower()), None)
        if sheet is None and self.on_cuda and self.measured:
            return replace(self.measured, name=f"{name}, measured")
        return sheet or replace(CHIPS["h200"], name=f"an {CHIPS['h200'].name}, which is not at hand")


# ---- timing ----------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds of one call. On CUDA that of a captured graph, by events, behind a write that fills the L2 cache.

    Without the capture the launches of a call would be timed, and without the write what an earlier call left in L2.
    """

    def __init__(self, setup: Setup, repeats: int = 50) -> None:
        self.device, self.repeats = setup.device, 2 if setup.tiny else repeats
        self.flush = torch.empty(64 * 2**20 if setup.on_cuda else 0, dtype=torch.int32, device=setup.device)  # 256 MiB

    def __call__(self, call: Callable[[], object], *, capture: bool = True) -> float:
        """The median of the repeats."""
        return statistics.median(self.times(call, capture=capture))

    def times(self, call: Callable[[], object], *, capture: bool = True) -> list[float]:
        """Seconds of each repeat."""
        for _ in range(3):  # whatever is built at a first call is there afterwards
            call()
        if self.device.type != "cuda":
            return [_clocked(call) for _ in range(self.repeats)]
        torch.cuda.synchronize()
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
            call()
        events = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _clocked(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ---- the machine and its ceilings ------------------------------------------------------------------------------------


def machine(setup: Setup) -> Record:
    """Names, versions and clocks; and the rates that everything else is held against, measured."""
    small = setup.tiny
    rates = measure(
        setup.device, n_bytes=2**22 if small else 4 * GIB, size=64 if small else 8192,
        dtype=torch.bfloat16 if setup.on_cuda else torch.float32, repeats=3 if small else 20,
    )  # fmt: skip
    print(
        f"copy {rates.copy / 1e9:,.0f} GB/s, read {rates.read / 1e9:,.0f} GB/s, "
        f"matrix products {rates.matmul / 1e12:,.1f} TFLOP/s"
    )
    return {"environment": environment(setup), "rates": asdict(rates), "data_sheet": asdict(setup.chip)}


def environment(setup: Setup) -> Record:
    """What the numbers were measured on."""
    found: Record = {
        "gpt_fast_sd": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "cores": os.cpu_count(), "device": setup.device.type,
        "triton": _version("triton"), "flashinfer": _version("flashinfer-python"),
    }  # fmt: skip
    if setup.on_cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "device": properties.name, "memory_gib": properties.total_memory / GIB, "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size,
            "capability": list(torch.cuda.get_device_capability(setup.device)),
        }  # fmt: skip
        found["nvidia_smi"] = clocks()
    return found


def clocks() -> Record:
    """Power limit, clocks and temperature as they are now; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = "driver_version,power.limit,power.draw,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return dict(zip(fields.split(","), output.split(", "), strict=False))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    """Inputs of an attention kernel: ragged rows, NaN behind the last entry of each, and the last row idle."""

    q: Tensor  # [B, N, T, H]
    k: Tensor  # [B, K, S, H]
    v: Tensor
    pos: Tensor  # int64 [B, T]
    n_keys: int

    @staticmethod
    def random(shape: tuple[int, int, int], dtype: torch.dtype, lengths: Sequence[int], seed: int) -> Problem:
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
            k[row, :, length + n_tokens :] = v[row, :, length + n_tokens :] = float("nan")
        k[-1] = v[-1] = float("nan")
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


def difference(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| in fp64; inf where anything is not finite."""
    out, expected = out.double().cpu(), expected.double()
    if out.shape != expected.shape or not bool(out.isfinite().all()):
        return float("inf")
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))


class Findings:
    """Rows of what was compared; one line is printed for each that is wrong."""

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def add(self, op: str, what: str, error: float, tolerance: float) -> None:
        """One comparison. error inf: not finite, or not of the right shape."""
        ok = error <= tolerance
        self.rows.append({"op": op, "what": what, "error": min(error, 1e30), "tolerance": tolerance, "ok": ok})
        if not ok:
            print(f"WRONG: {op} {what}: off by {error:.3g}, tolerance {tolerance:.3g}")

    def record(self) -> Record:
        """All rows, and the worst of each op relative to its tolerance."""
        worst: dict[str, Record] = {}
        for row in self.rows:
            if row["op"] not in worst or _share(row) > _share(worst[row["op"]]):
                worst[row["op"]] = row
        for op, row in worst.items():
            n = sum(other["op"] == op for other in self.rows)
            print(f"{op}: {n} comparisons, worst {row['error']:.2g} of {row['tolerance']:.2g} ({row['what']})")
        return {"ok": all(row["ok"] for row in self.rows), "rows": self.rows, "worst": list(worst.values())}


def _share(row: Record) -> float:
    """How much of what is allowed an error is; where nothing is allowed, the error itself."""
    return float(row["error"] / (row["tolerance"] or 1.0))


def problems(setup: Setup, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Iterator[tuple[str, Problem]]:
    """bf16 in every shape, fp16 and fp32 in some; each with other numbers."""
    lengths = (0, 37, 300) if setup.tiny else (0, 37, 255, 1023, 2600)
    for i, shape in enumerate(shapes):
        for dtype in TOLERANCE if i % 3 == 0 else (torch.bfloat16,):
            group, head_dim, n_tokens = shape
            what = f"{str(dtype).removeprefix('torch.')} G {group} H {head_dim} T {n_tokens}"
            yield what, Problem.random(shape, dtype, lengths, seed=i)


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
    for dtype in TOLERANCE:
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
            chosen = kernels.quest_pages(*(x.to(setup.device) for x in (q, bounds, n_closed)), 12)
            findings.add("quest_pages", what, shortfall(q, bounds, n_closed, chosen.cpu()), 1e-5)
    return findings.record()


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


# ---- how fast are the kernels? ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One layer's attention over rows of one length: what a kernel is timed on."""

    batch: int
    context: int
    group: int = 4
    n_kv: int = 8
    head_dim: int = 128

    def label(self, n_tokens: int) -> str:
        """Shape in one phrase."""
        return f"{self.batch} x {self.context:,}, T {n_tokens}"

    @property
    def kv_bytes(self) -> int:
        """Keys and values in view, bf16."""
        return 2 * 2 * self.batch * self.context * self.n_kv * self.head_dim


def dense_heads(setup: Setup) -> tuple[Heads, ...]:
    """A layer of Llama-3.1-8B at the context lengths of the cells, and one that others published figures for."""
    if setup.tiny:
        return (Heads(batch=2, context=512, group=2, n_kv=2, head_dim=16),)
    return tuple(Heads(batch=b, context=s) for b, s in ((32, 4096), (32, 28672), (16, 57344), (8, 100_096)))


def buffers(setup: Setup, heads: Heads) -> tuple[Tensor, Tensor]:
    """Random keys and values as a cache holds them, with its spare split: two of bf16 [B, K, S + SPLIT, H]."""
    shape = (heads.batch, heads.n_kv, heads.context + SPLIT, heads.head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=setup.device).normal_() for _ in range(2))
    return k, v


def queries(setup: Setup, heads: Heads, n_tokens: int) -> tuple[Tensor, Tensor]:
    """The last T tokens of every row: q bf16 [B, N, T, H], a view as the model makes it, and pos int64 [B, T]."""
    size = (heads.batch, n_tokens, heads.n_kv * heads.group, heads.head_dim)
    q = torch.randn(size, device=setup.device).bfloat16().transpose(1, 2)
    pos = torch.arange(heads.context - n_tokens, heads.context, device=setup.device).expand(heads.batch, -1)
    return q, pos.contiguous()


class Timings:
    """Rows of what was timed, each beside the bytes that it has to move."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.watch, self.rows = setup, Stopwatch(setup), list[Record]()

    def time(
        self, op: str, what: str, call: Callable[[], object], n_bytes: float, flops: float = 0.0, *, peer: bool = False
    ) -> None:
        """Time one call. What belongs to others may fail: then the row says why."""
        row: Record = {"op": op, "what": what, "bytes": n_bytes, "flops": flops, "peer": peer}
        try:
            seconds = self.watch(call)
        except Exception as error:
            if not peer:
                raise
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
            print(f"{op:<34} {what:<24} not run: {row['failed']}")
        else:
            ceilings = {"share": self.setup.chip, "share_of_measured": self.setup.measured}
            for name, chip in ceilings.items():
                row[name] = max(n_bytes / chip.bandwidth, flops / chip.peak) / seconds if chip else None
            row |= {"seconds": seconds, "gb_per_second": n_bytes / seconds / 1e9, "tflops": flops / seconds / 1e12}
            print(
                f"{op:<34} {what:<24} {seconds * 1e6:10.1f} us {row['gb_per_second']:8.0f} GB/s "
                f"{row['tflops']:7.1f} TFLOP/s {row['share']:7.1%} of the roofline"
            )
        self.rows.append(row)

    def record(self) -> Record:
        """All rows."""
        return {"rows": self.rows, "chip": asdict(self.setup.chip)}


def timed_decode(setup: Setup) -> Record:
    """Dense attention of one query and of six, with and without mass, beside what else there is."""
    timings = Timings(setup)
    for heads in dense_heads(setup):
        k, v = buffers(setup, heads)
        split = kernels.split_for(k.shape[2])
        for n_tokens in (1, 6):
            q, pos = queries(setup, heads, n_tokens)
            args, what = (q, k, v, pos, heads.context, split), heads.label(n_tokens)
            flops = 4 * heads.batch * heads.context * heads.n_kv * heads.group * heads.head_dim * n_tokens
            timings.time("decode_attention", what, partial(kernels.decode_attention, *args), heads.kv_bytes, flops)
            timings.time(
                "decode_attention_with_mass", what,
                partial(kernels.decode_attention_with_mass, *args, 16), heads.kv_bytes, flops,
            )  # fmt: skip
            seen = k.narrow(2, 0, heads.context), v.narrow(2, 0, heads.context)
            for name, call in peers(setup, q, *seen).items():
                timings.time(name, what, call, heads.kv_bytes, flops, peer=True)
        del k, v, q, pos, args, seen
    return timings.record()


def peers(setup: Setup, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Others' attention over the same keys, with no mask: a few more keys for some queries, which costs nothing."""

    def sdpa(backend: SDPBackend) -> Callable[[], object]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return call

    found: dict[str, Callable[[], object]] = {"torch SDPA math": sdpa(SDPBackend.MATH)}
    if not setup.on_cuda:
        return found
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, dynamic=False)
    found = {
        "torch SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "torch SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "torch SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    if k.shape[2] == 28672:  # it compiles anew for every shape, half a minute each
        found["torch FlexAttention"] = lambda: flex(q, k, v, enable_gqa=True)
    if importlib.util.find_spec("flashinfer"):
        found["FlashInfer"] = flashinfer_decode(q, k, v)
    return found


def flashinfer_decode(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """FlashInfer over the same keys in pages of 128: prepared at the first call, which is not timed."""
    prepared: list[Callable[[], object]] = []

    def prepare() -> Callable[[], object]:
        flashinfer = importlib.import_module("flashinfer")
        batch, n_kv, context, head_dim = k.shape
        n_heads, n_tokens, page = q.shape[1], q.shape[2], 128
        pages = context // page
        paged = [
            x[:, :, : pages * page].unflatten(2, (pages, page)).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()
            for x in (k, v)
        ]  # [B * pages, page, K, H] each
        space = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)

        def ints(values: Tensor) -> Tensor:
            return values.to(device=q.device, dtype=torch.int32)

        indptr, indices = ints(torch.arange(batch + 1) * pages), ints(torch.arange(batch * pages))
        last = ints(torch.full((batch,), page))
        rows = q.transpose(1, 2).flatten(0, 1).contiguous()  # [B * T, N, H]
        if n_tokens == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            wrapper.plan(
                indptr, indices, last, n_heads, n_kv, head_dim, page, q_data_type=q.dtype, kv_data_type=k.dtype
            )
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
            begin = ints(torch.arange(batch + 1) * n_tokens)
            wrapper.plan(begin, indptr, indices, last, n_heads, n_kv, head_dim, page, causal=True, q_data_type=q.dtype)
        return lambda: wrapper.run(rows, tuple(paged))

    def call() -> object:
        if not prepared:
            prepared.append(prepare())
        return prepared[0]()

    return call


def timed_sparse(setup: Setup) -> Record:
    """A draft step's attention at several budgets: half of them listed by pages of 16 or one by one, half a tail."""
    timings = Timings(setup)
    heads = dense_heads(setup)[0] if setup.tiny else Heads(batch=32, context=28672)
    k, v = buffers(setup, heads)
    q, pos = queries(setup, heads, 1)
    for budget in (64, 128) if setup.tiny else (128, 256, 512, 1024, 2048, 4096):
        listed, tail = budget // 2, budget // 2
        start = torch.full((heads.batch,), heads.context - tail, device=setup.device)
        for page in (1, 16):
            n = (heads.context - tail) // page
            choice = torch.rand(heads.batch, heads.n_kv, n, device=setup.device).topk(listed // page).indices
            slots = (choice[..., None] * page + torch.arange(page, device=setup.device)).flatten(-2)  # [B, K, C]
            args = (q, k, v, slots, start, tail, pos, heads.context, page)
            timings.time(
                "sparse_attention", f"{heads.batch} rows, budget {budget:,}, page {page}",
                partial(kernels.sparse_attention, *args),
                heads.kv_bytes / heads.context * budget + slots.numel() * slots.element_size(),
            )  # fmt: skip
    return timings.record()


def timed_prefill(setup: Setup) -> Record:
    """A prompt's chunks at the end of a long prompt, beside torch's; and the pass of SnapKV over its window."""
    timings = Timings(setup)
    base = dense_heads(setup)[0]
    for n_tokens, context in ((32, 256),) if setup.tiny else ((2048, 8192), (2048, 28672), (256, 28672)):
        heads = replace(base, batch=1, context=context)
        k, v = buffers(setup, heads)
        q, pos = queries(setup, heads, n_tokens)
        pairs = n_tokens * (context - (n_tokens - 1) / 2)  # of a query and a key that it sees
        flops, what = 4 * pairs * heads.n_kv * heads.group * heads.head_dim, heads.label(n_tokens)
        args = q, k, v, pos, context
        timings.time("prefill_attention", what, partial(kernels.prefill_attention, *args), heads.kv_bytes, flops)
        seen = [x.narrow(2, 0, context).repeat_interleave(heads.group, 1) for x in (k, v)]  # as torch wants them
        mask = causal_lower_right(n_tokens, context)
        timings.time(
            "torch SDPA, causal", what, partial(F.scaled_dot_product_attention, q, seen[0], seen[1], mask),
            heads.kv_bytes, flops, peer=True,
        )  # fmt: skip
    window = queries(setup, heads, 32)
    _, sums = kernels.prefill_attention_with_lse(window[0], k, v, window[1], context)
    timings.time(
        "key_mass", heads.label(32), partial(kernels.key_mass, window[0], k, sums, window[1], context, 1),
        heads.kv_bytes / 2, 2 * 32 * context * heads.n_kv * heads.group * heads.head_dim,
    )  # fmt: skip
    return timings.record()


def timed_select(setup: Setup) -> Record:
    """What selecting costs a round: all layers for guided and one for the others, 32 rows of 28,672 entries."""
    timings, page = Timings(setup), 16
    n_layers, batch, n_kv, context = (2, 2, 2, 512) if setup.tiny else (32, 32, 8, 28672)
    group, head_dim = 4, 128
    n_pages, n = context // page, 4 if setup.tiny else 56
    mass = torch.rand(n_layers, batch, n_kv, n_pages, device=setup.device)
    slots = torch.full((n_layers, batch, n_kv, n * page), -1, device=setup.device)
    due = torch.ones(batch, dtype=torch.bool, device=setup.device)
    all_of = torch.full((batch,), n_pages, device=setup.device)
    bytes_of = mass.numel() * 4 + slots.numel() * 8
    what = f"{n_layers} layers, {n} of {n_pages:,} pages"
    timings.time("guided_select", what, partial(kernels.guided_select, mass, slots, due, all_of, page), bytes_of)
    scores = torch.rand(n_layers, 1, n_kv, context, device=setup.device)
    one, many = torch.full((1, 1), context, device=setup.device), 64 if setup.tiny else 1900
    timings.time(
        "top_pages, one row of snapkv", f"{n_layers} layers, {many:,} of {context:,}",
        partial(kernels.top_pages, scores, one, many), scores.numel() * 4 + n_layers * n_kv * many * 8,
    )  # fmt: skip
    k = torch.randn(batch, n_kv, context, head_dim, device=setup.device).bfloat16()
    bounds = torch.randn(batch, n_kv, n_pages, 2 * head_dim, device=setup.device).bfloat16()
    first = torch.full((batch,), n_pages - 2, device=setup.device)
    read = batch * n_kv * 2 * page * head_dim * 2
    timings.time("page_bounds", "one layer, 2 pages", partial(kernels.page_bounds, k, bounds, first, 2, page), read)
    q = torch.randn(batch, 1, n_kv * group, head_dim, device=setup.device).bfloat16().transpose(1, 2)
    what = f"one layer, {n} of {n_pages:,} pages"
    timings.time("quest_pages", what, partial(kernels.quest_pages, q, bounds, all_of, n), bounds.numel() * 2)
    return timings.record()


# ---- do captured rounds change anything? -----------------------------------------------------------------------------

SMALL = ModelConfig(
    vocab_size=512, dim=128, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=256, max_seq_len=4096
)
DRAFTS = (  # of every kind that shares no code with the others
    DraftConfig(policy="streaming", budget=128, gamma=4),
    DraftConfig(policy="snapkv", budget=128, gamma=3),
    DraftConfig(policy="guided", budget=128, gamma=5),
    DraftConfig(policy="quest", budget=128, gamma=2),
    DraftConfig(policy="lookup", gamma=4),
)


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Random weights, large enough that attention is no average and greedy text keeps varying."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # unit variance in gives a variance of 4 (queries, keys, values) or 2 out
            gain = 1.0 if "embedding" in name else (2.0 if "wqkv" in name else 1.4) * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=gain)
        parameter.data = parameter.data.to(dtype)  # the rotary frequencies, a buffer, stay fp32
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the fp32 ones took is free for others, too
    return model.eval().requires_grad_(False)


def prompts_of(setup: Setup, vocab_size: int) -> list[list[int]]:
    """Random prompts of ragged length, more than there are slots."""
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 200, 40) if setup.tiny else (40, 700, 300, 1500, 90)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def settings_of(setup: Setup, **changes: Any) -> EngineConfig:
    """Four slots of 2,048 tokens; a dry run does not compile."""
    base: Record = {"batch_size": 4, "max_seq_len": 2048, "max_autotune": False, "device": setup.device.type}
    if setup.tiny:
        base |= {"batch_size": 2, "max_seq_len": 512, "compile": False}
    return EngineConfig(**{**base, **changes})


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
    """The host never waits inside a round, and Inductor captures every single step where it is asked to."""
    findings = Findings()
    model = random_model(SMALL, setup.device, torch.float32)
    prompts, params = prompts_of(setup, SMALL.vocab_size), SamplingParams(max_tokens=8, ignore_eos=True)
    engine = Engine(model, None, settings_of(setup, cuda_graphs="off"))
    for draft in DRAFTS:
        engine.redraft(draft)
        engine.generate(prompts, params)  # compiles
        for sampled in (False, True):
            what = f"{draft.policy}, {'sampled' if sampled else 'greedy'}"
            findings.add("host waits in a round", what, float(syncs(setup, engine, draft.max_gamma, sampled)), 0.0)
    import torch._inductor.config as inductor

    inductor.triton.cudagraph_or_error = True  # a step that is not captured raises
    engine = Engine(model, None, settings_of(setup, cuda_graphs="step"))
    for draft in DRAFTS[:3]:
        engine.redraft(draft)
        for _ in range(2):
            engine.generate(prompts, params)
        findings.add("recompiles with steps captured", draft.policy, float(engine.stats.recompiles), 0.0)
    return findings.record()


@torch.inference_mode()
def syncs(setup: Setup, engine: Engine, gamma: int, sampled: bool) -> int:
    """Whether the device's part of a round makes the host wait: 0 or 1, with the place printed."""
    rows = engine.rows
    rows.seq_len.fill_(64)
    rows.active.fill_(True)
    rows.remaining.zero_()  # commits nothing
    rows.sampled = rows.filtered = sampled
    failed = 0
    with rows.capturing(engine.cache.capacity - gamma):
        engine.rounds.device_round(gamma)
        if setup.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.rounds.device_round(gamma)
        except RuntimeError as error:
            print(f"a round of {engine.draft.policy} makes the host wait: {error}")
            failed = 1
        finally:
            if setup.on_cuda:
                torch.cuda.set_sync_debug_mode("default")
    rows.active.fill_(False)
    return failed


# ---- a model of 8 B parameters with random weights -------------------------------------------------------------------

LLAMA = preset("meta-llama/Llama-3.1-8B")
ROUNDS = 40  # of one run: few enough that the context stays within 1 % of where it began
ROOM = 512  # tokens behind the context
TO_THE_END = 96  # new tokens of the runs that go on until the last row is finished


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A draft policy as it is measured in every cell, and whose published acceptance it replays."""

    name: str
    policy: str
    budget: int
    profiles: tuple[str, ...]
    selecting: float = 0.0  # share of a round that published measurements put down to selection
    also_timed: tuple[int, ...] = ()  # gammas whose steps are timed, whatever the cost model chooses


CELLS = {"32x28672": (32, 28672), "16x57344": (16, 57344), "8x100000": (8, 100_000)}
ARMS = {  # of profiles of one arm the steps are compiled once, where the cost model chooses the same gamma
    arm.name: arm
    for arm in (
        Arm(name="streaming", policy="streaming", budget=512, profiles=("streaming",), also_timed=(5,)),
        Arm(name="low", policy="streaming", budget=512, profiles=("low",)),
        Arm(name="snapkv", policy="snapkv", budget=2048, profiles=("snapkv",)),
        Arm(  # its share of selecting: arXiv 2602.07223
            name="guided", policy="guided", budget=1024, profiles=("guided", "guided_all"), selecting=0.06
        ),
    )
}


def predict(setup: Setup, cell: str, arm: Arm, profile: str, gamma: int, efficiency: Efficiency) -> Forecast:
    """The cost model's rounds of gamma drafts in a cell, whose acceptance follows the profile."""
    batch, context = CELLS[cell]
    one = speedup(LLAMA, setup.chip, batch, context, gamma, 0.0, budget=arm.budget, efficiency=efficiency)
    selecting = one.round_seconds * arm.selecting / (1 - arm.selecting)
    return replace(one, tokens=PROFILES[profile].tokens(gamma), select_seconds=selecting)


def planned(setup: Setup, cell: str, arm: Arm, profile: str) -> Forecast:
    """The forecast for the gamma that the cost model would choose, by the shares of a chip that good kernels reach."""
    return best_gamma(lambda gamma: predict(setup, cell, arm, profile, gamma, PRACTICAL), range(1, GAMMA_TIERS[-1] + 1))


def pretend(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Let the slots hold these prompts, over random keys and values: a step costs what it would after a prefill."""
    for buffer in (*engine.cache.k, *engine.cache.v):
        buffer.normal_()
    for slot, prompt in enumerate(prompts):
        engine._prefill._held[slot] = list(prompt[:-1])


class Bench:
    """An engine of a cell's shape with random weights and keys, whose rows keep as many drafts as a table says."""

    def __init__(self, setup: Setup, cell: str, arm: Arm, gammas: Mapping[str, int]) -> None:
        """gammas: what is drafted where a profile is replayed."""
        batch, context = (2, 320) if setup.tiny else CELLS[cell]
        config = replace(SMALL, max_seq_len=1024) if setup.tiny else LLAMA
        budget = min(arm.budget, 128) if setup.tiny else arm.budget
        self.setup, self.gammas, self.context, self.batch, self.config = setup, gammas, context, batch, config
        self.timed = sorted({*gammas.values(), *arm.also_timed})
        self.rounds = 3 if setup.tiny else ROUNDS
        dtype = "bf16" if setup.on_cuda else "fp32"
        model = random_model(config, setup.device, torch.bfloat16 if setup.on_cuda else torch.float32)
        self.itemsize = model.embedding.weight.element_size()
        room = 2 * self.rounds * (max(self.timed) + 1) if setup.tiny else ROOM
        self.engine = Engine(
            model, None,
            EngineConfig(
                batch_size=batch, max_seq_len=context + room, device=setup.device.type, dtype=dtype,
                compile=setup.on_cuda, cuda_graphs="round", max_autotune=setup.max_autotune,
            ),
            DraftConfig(policy=arm.policy, budget=budget, gamma=max(self.timed)),
        )  # fmt: skip
        self.budget = budget
        self.params = SamplingParams(max_tokens=room - 1, ignore_eos=True)
        # each prompt begins otherwise, so that no slot is compared with another's to its end
        generator = torch.Generator().manual_seed(0)
        self.prompts = [
            [slot, *torch.randint(config.vocab_size, (context,), generator=generator).tolist()] for slot in range(batch)
        ]
        engine = self.engine
        engine.replay = Replay(torch.zeros(4 * self.rounds, batch, dtype=torch.int64, device=setup.device))
        engine._prefill._warm = True  # nothing will be prefilled, so nothing is compiled for it
        engine.warm_up()
        with torch.inference_mode():  # as rounds run: outside of it the steps would be compiled once more
            engine.rounds.warm_up([0, *self.timed], [(False, False)])
        pretend(engine, self.prompts)

    def replay(self, profile: str) -> float:
        """Replay this profile from now on -> tokens a round of its table."""
        gamma, replay = self.gammas[profile], self.engine.replay
        assert replay is not None
        replay.table.copy_(replay_table(PROFILES[profile], len(replay.table), self.batch, gamma, 0, self.setup.device))
        self.engine.planner = GammaPlanner(gamma, GAMMA_TIERS)
        return float(replay.table.double().mean()) + 1

    def run(self, speculate: bool, rounds: int | None = None, new: int | None = None) -> Record:
        """So many rounds, or so many new tokens of each row -> tokens, seconds of decoding and rounds."""
        engine, params = self.engine, self.params if new is None else replace(self.params, max_tokens=new)
        assert engine.replay is not None
        engine.replay.rewind()
        stream = engine.stream(self.prompts, params, speculate=speculate)
        for _ in stream:
            if rounds and engine.stats.rounds >= rounds:
                break
        stats = engine.stats
        stream.close()  # type: ignore[attr-defined]
        return {"tokens": stats.decode_tokens, "seconds": stats.decode_seconds, "rounds": stats.rounds}

    @torch.inference_mode()
    def steps(self) -> Record:
        """Seconds of the parts of a round: T_T, T_D, T_V by gamma, judging with commit, selecting by mass."""
        engine, watch = self.engine, Stopwatch(self.setup, repeats=20)
        rows, policy, rounds = engine.rows, engine.policy, engine.rounds
        assert policy
        rows.seq_len.fill_(self.context)
        rows.active.fill_(True)
        for slot, prompt in enumerate(self.prompts):
            policy.admit(slot, prompt)
        rows.lengths = dict.fromkeys(range(self.batch), self.context)
        rounds.refresh()  # a view that lists by a pass of its own has no list before
        rows.remaining.zero_()  # judging commits nothing, whatever it judges
        found: Record = {"verify": {}, "judge": {}, "draft": {}, "select": {}}
        for gamma in self.timed:
            with rows.capturing(engine.cache.capacity - gamma):
                draft = policy.propose(rows, gamma)
                tokens = torch.cat([rows.pending[:, None], draft.tokens], 1)  # [B, gamma + 1]
                logits, mass = rounds.feed(tokens, rows.n_keys + gamma)
                found["target"] = watch(lambda: rounds.feed(rows.pending[:, None], rows.n_keys))
                found["draft"][str(gamma)] = watch(partial(policy.propose, rows, gamma)) / gamma
                found["verify"][str(gamma)] = watch(partial(rounds.feed, tokens, rows.n_keys + gamma))
                found["judge"][str(gamma)] = watch(partial(rounds.judge, rows, logits, draft, engine.replay))
                if policy.wants_mass:
                    found["select"][str(gamma)] = watch(partial(policy.observe, rows, mass))
        rows.active.fill_(False)
        for slot in range(self.batch):
            policy.vacate(slot)
        return found


def cell_stage(cell: str, arm: Arm) -> Callable[[Setup], Record]:
    """The stage that measures one policy in one cell: steps, then rounds with replayed acceptance."""

    def run(setup: Setup) -> Record:
        plans = {profile: planned(setup, cell, arm, profile) for profile in arm.profiles}
        gammas = {profile: min(plan.gamma, 2) if setup.tiny else plan.gamma for profile, plan in plans.items()}
        began = time.perf_counter()
        bench = Bench(setup, cell, arm, gammas)
        print(f"built and compiled in {time.perf_counter() - began:.0f} s; gamma by the cost model: {gammas}")
        steps = bench.steps()
        ceilings = ceilings_of(setup, bench)
        for name, seconds in ceilings.items():
            print(f"{name:>8} ms: {_ms(steps[name])}, roofline {_ms(seconds)}")
        print(f"   judge ms: {_ms(steps['judge'])}; selecting {_ms(steps['select']) or 'nothing'}")
        replayed = []
        for profile, plan in plans.items():
            row = replay_row(setup, cell, arm, bench, profile, plan)
            replayed.append(row)
            print(
                f"replay of {profile}, gamma {row['gamma']}: {row['ratio']['median']:.2f}x "
                f"({row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}), "
                f"cost model {row['predicted_practical']:.2f}x"
            )
        return {
            "cell": cell, "arm": arm.name, "policy": arm.policy, "budget": bench.budget,
            "batch": bench.batch, "context": bench.context,
            "chip": asdict(setup.chip), "steps": steps, "roofline": ceilings, "replay": replayed,
            "just_after": clocks() if setup.on_cuda else {},
        }  # fmt: skip

    return run


def _ms(seconds: float | Mapping[str, float]) -> str:
    """One figure, or those by gamma."""
    if isinstance(seconds, Mapping):
        return ", ".join(f"{value * 1e3:.3f} (gamma {gamma})" for gamma, value in seconds.items())
    return f"{seconds * 1e3:.3f}"


def ceilings_of(setup: Setup, bench: Bench) -> Record:
    """Seconds of the steps that the roofline allows, on the shape that was run."""

    def floor(n_tokens: int, context: int) -> float:
        size = bench.itemsize
        return step_seconds(
            bench.config, setup.chip, bench.batch, n_tokens, context, weight_bytes=size, kv_bytes=size, efficiency=IDEAL
        )

    return {
        "target": floor(1, bench.context),
        "draft": {str(gamma): floor(1, bench.budget) for gamma in bench.timed},
        "verify": {str(gamma): floor(gamma + 1, bench.context) for gamma in bench.timed},
    }


def replay_row(setup: Setup, cell: str, arm: Arm, bench: Bench, profile: str, plan: Forecast) -> Record:
    """Plain and speculative rounds in turns, A B B A, acceptance replayed; a ratio is that of a pair."""
    gamma = bench.gammas[profile]
    tokens = bench.replay(profile)
    for speculate in (True, False):  # captures
        bench.run(speculate, rounds=2)
    runs: dict[bool, list[Record]] = {True: [], False: []}
    for pair in range(setup.pairs):
        for speculate in (False, True) if pair % 2 == 0 else (True, False):
            runs[speculate].append(bench.run(speculate, rounds=bench.rounds))
    speeds = {how: [run["tokens"] / run["seconds"] for run in those] for how, those in runs.items()}
    new = 4 if setup.tiny else TO_THE_END
    whole = {how: bench.run(how, new=new) for how in (False, True)}
    ideal, practical = (
        predict(setup, cell, arm, profile, gamma, efficiency).ratio for efficiency in (IDEAL, PRACTICAL)
    )
    return {
        "profile": profile, "replayed": True, "gamma": gamma, "tokens_per_round_of_table": tokens,
        "predicted_ideal": ideal, "predicted_practical": practical, "predicted_tokens": plan.tokens,
        "ratio": spread([s / p for s, p in zip(speeds[True], speeds[False], strict=True)]),
        "plain_tokens_per_second": statistics.median(speeds[False]),
        "replayed_tokens_per_second": statistics.median(speeds[True]),
        "tokens_per_round": sum(r["tokens"] for r in runs[True]) / sum(r["rounds"] for r in runs[True]) / bench.batch,
        "rounds_of_a_run": bench.rounds, "pairs": setup.pairs,
        "to_the_end_ratio": whole[False]["seconds"] / whole[True]["seconds"], "to_the_end_new_tokens": new,
    }  # fmt: skip


# ---- the bundled model, with acceptance of its own -------------------------------------------------------------------

END_TO_END = {"8x8192": (8, 8192), "32x8192": (32, 8192), "8x16000": (8, 16000), "32x16000": (32, 16000)}


def bundled_stage(name: str) -> Callable[[Setup], Record]:
    """The stage that decodes with the bundled model, plainly and speculatively in turns; nothing is replayed."""

    def run(setup: Setup) -> Record:
        batch, context = (2, 160) if setup.tiny else END_TO_END[name]
        new, temperature = (4, 0.8) if setup.tiny else (128, 0.8)
        config = EngineConfig(
            batch_size=batch, max_seq_len=context + new, device=setup.device.type, compile=setup.on_cuda,
            max_autotune=setup.max_autotune,
        )  # fmt: skip
        engine = Engine.from_pretrained(BUNDLED, config)
        prompts = long_prompts(setup, engine, batch, context)
        params = [
            SamplingParams(max_tokens=new, ignore_eos=True, temperature=temperature, seed=i) for i in range(batch)
        ]
        found: list[Record] = []
        for policy, budget in (("streaming", 256), ("snapkv", 512), ("guided", 512)):
            engine.redraft(DraftConfig(policy=policy, budget=min(budget, 96) if setup.tiny else budget, gamma=4))
            pairs = take_turns(engine, prompts, params, 1 if setup.tiny else setup.pairs)
            counts = pairs.counts
            found.append(
                {
                    "policy": policy, "budget": engine.draft.budget, "gamma": 4, "ratio": spread(pairs.ratios),
                    "acceptance_rate": counts.acceptance_rate, "tokens_per_round": counts.tokens_per_round,
                    "plain_tokens_per_second": statistics.median(s.decode_tokens_per_second for s in pairs.plain),
                    "speculative_tokens_per_second": statistics.median(
                        s.decode_tokens_per_second for s in pairs.speculative
                    ),
                }
            )  # fmt: skip
            print(
                f"{policy} {engine.draft.budget}: {found[-1]['ratio']['median']:.2f}x, "
                f"acceptance {counts.acceptance_rate:.1%}, {counts.tokens_per_round:.2f} tokens a round"
            )
        return {
            "batch": batch, "context": context, "new_tokens": new, "temperature": temperature, "results": found,
            "text": [path.name for path in setup.texts] or "sampled by the model itself, temperature 1",
        }  # fmt: skip

    return run


def long_prompts(setup: Setup, engine: Engine, batch: int, context: int) -> list[list[int]]:
    """A prompt for each row: a stretch of the texts given, or what the model writes after its bundled document."""
    tokenizer = engine.tokenizer
    assert tokenizer
    if setup.texts:
        texts = {path.name: tokens_of(path, tokenizer) for path in setup.texts}
        return stretches(texts, batch, context, tokenizer.bos_id)
    document = tokens_of(BUNDLED / "document.txt", tokenizer)
    start = min(len(document) // 2, context // 2)
    openings = [document[row * 37 :][:start] for row in range(batch)]
    params = [
        SamplingParams(max_tokens=context - start, ignore_eos=True, temperature=1.0, seed=i) for i in range(batch)
    ]
    written = engine.generate(openings, params, speculate=False)
    return [opening + list(one.tokens) for opening, one in zip(openings, written, strict=True)]


# ---- all of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of the suite. seconds: what it is reckoned to take on a GPU of 2024, compiling included."""

    name: str
    run: Callable[[Setup], Record]
    seconds: int
    about: str


def _cell(cell: str, name: str) -> Stage:
    (batch, context), arm = CELLS[cell], ARMS[name]
    about = (
        f"{arm.policy}, {batch} rows of {context:,}: steps, rounds with replayed acceptance ({', '.join(arm.profiles)})"
    )
    seconds = 200 + 40 * len(arm.also_timed)  # mostly of compiling 32 layers, once for each step
    return Stage(name=f"cell-{cell}-{name}", run=cell_stage(cell, arm), seconds=seconds, about=about)


def _bundled(name: str) -> Stage:
    batch, context = END_TO_END[name]
    about = f"the bundled model, {batch} rows of {context:,} tokens, acceptance of its own"
    return Stage(name=f"bundled-{name}", run=bundled_stage(name), seconds=90, about=about)


HEADLINES = (("32x28672", "streaming"), ("16x57344", "snapkv"), ("16x57344", "guided"))  # what targets are about
STAGES = {  # what matters most comes first, as the time on a chip may end
    stage.name: stage
    for stage in (
        Stage(name="machine", run=machine, seconds=30, about="what runs, and measured bandwidth and matrix rate"),
        Stage(name="correct-decode", run=correct_decode, seconds=110, about="dense attention against fp64"),
        Stage(name="correct-sparse", run=correct_sparse, seconds=80, about="sparse attention against fp64"),
        Stage(name="correct-select", run=correct_select, seconds=40, about="selection against plain Python"),
        Stage(name="correct-prefill", run=correct_prefill, seconds=80, about="attention of chunks against fp64"),
        Stage(name="graphs", run=graphs_fp32, seconds=240, about="captured rounds beside others, fp32, each token"),
        *(_cell(*headline) for headline in HEADLINES),
        Stage(name="syncs", run=no_syncs, seconds=200, about="no host wait in a round, every step captured"),
        Stage(name="time-decode", run=timed_decode, seconds=120, about="dense attention beside torch's and others'"),
        Stage(name="time-sparse", run=timed_sparse, seconds=45, about="sparse attention by budget"),
        Stage(name="time-select", run=timed_select, seconds=30, about="what selecting costs a round"),
        Stage(name="time-prefill", run=timed_prefill, seconds=45, about="attention of chunks beside torch's"),
        *(_bundled(name) for name in END_TO_END),
        Stage(name="graphs-bundled", run=graphs_bundled, seconds=150, about="the same, bf16: how many rows differ"),
        *(_cell(cell, arm) for cell in CELLS for arm in ARMS if (cell, arm) not in HEADLINES),
    )
}
