"""How fast are the kernels? Each beside the bytes that it must move, and beside torch's own.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K,
        H head dim, C listed entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_fast_sd import attention, fast
from gpt_fast_sd.fast.compile import own_code
from gpt_fast_sd.fast.linear_planes import lay_in_planes
from gpt_fast_sd.model import FORMATS, SPLIT, CacheLayer, as_planes
from gpt_fast_sd.policies import selection
from gpt_fast_sd.quantization.quantize import TAIL
from gpt_fast_sd.quantization.table import TABLE, precision, require_precision
from measuring.gpu.cells import FULL, cell_for
from measuring.gpu.setup import Record, Setup, Stopwatch, difference

CONTEXT, PAGE = 28672, 16  # entries of what is timed at one length, and of a page


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One layer's attention over rows of one length: what a kernel is timed on."""

    batch: int
    context: int
    group: int = 4
    n_kv: int = 8
    head_dim: int = 128

    @classmethod
    def of(cls, setup: Setup, context: int) -> Heads:
        """A layer of Llama-3.1-8B over as many rows as the cells have, of a short context 32."""
        if setup.tiny:
            return cls(batch=2, context=512, group=2, n_kv=2, head_dim=16)
        try:
            batch = cell_for(context, setup.memory).batch if context in FULL else 32
        except ValueError:  # of a row whose cache does not fit one layer does
            batch = 1
        return cls(batch=batch, context=-(-context // SPLIT) * SPLIT)

    def flops(self, n_tokens: int) -> float:
        """Operations of the last n_tokens of every row on the keys that each of them sees, and on their values."""
        pairs = n_tokens * (self.context - (n_tokens - 1) / 2)  # of a query and a key that it sees
        return 4 * self.batch * pairs * self.n_kv * self.group * self.head_dim

    def layer(self, device: torch.device) -> CacheLayer:
        """Random keys and values as a cache holds them, with its spare split: bf16 [B, K, S + SPLIT, H]."""
        shape = (self.batch, self.n_kv, self.context + SPLIT, self.head_dim)
        buffers = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
        return CacheLayer(FORMATS["bf16"], *buffers)

    def queries(self, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The last T tokens of every row: q bf16 [B, N, T, H], a view as the model makes it, and pos int64 [B, T]."""
        size = (self.batch, n_tokens, self.n_kv * self.group, self.head_dim)
        q = torch.randn(size, device=device).bfloat16().transpose(1, 2)
        pos = torch.arange(self.context - n_tokens, self.context, device=device).expand(self.batch, -1)
        return q, pos.contiguous()


# What a dry run calls in the places of CUDA's operators: the core.
DRY = SimpleNamespace(
    decode_attention=lambda q, layer, pos, n_keys, split: attention.dense(q, layer, pos, n_keys)[0],
    decode_attention_with_mass=lambda q, layer, pos, n_keys, split, page: attention.dense(q, layer, pos, n_keys, page),
    prefill_attention=lambda q, layer, pos, n_keys: attention.dense(q, layer, pos, n_keys)[0],
    prefill_attention_with_lse=lambda q, layer, pos, n_keys: (attention.dense(q, layer, pos, n_keys)[0], None),
    key_mass=lambda q, layer, lse, pos, n_keys, page: attention.dense(q, layer, pos, n_keys, page)[1],
    sparse_attention=lambda q, layer, kv_indices, start, width, pos, n_keys, page: attention.listed(
        q, layer, kv_indices, start, width, pos, page
    ),
    guided_select=selection.guided_select, top_pages=selection.top_pages, page_bounds=selection.page_bounds,
    quest_pages=selection.quest_pages,
)  # fmt: skip


def operators(setup: Setup) -> Any:
    return fast if setup.on_cuda else DRY


class Timings:
    """Rows of what was timed, each beside the bytes that it has to move."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.watch, self.rows = setup, Stopwatch(setup), list[Record]()

    def time(
        self, op: str, what: str, call: Callable[[], object], n_bytes: float, flops: float = 0.0,
        *, ours: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Time one call; RuntimeError where a row of its result idles: it is all zeros, not finite, or chose nothing.

        ours: our result beside which this one, of others, is so far off. What belongs to others may fail: then the row
        says why.
        """
        row: Record = {"op": op, "what": what, "bytes": n_bytes, "flops": flops, "peer": ours is not None}
        self.rows.append(row)
        try:
            out = call()
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor) and ours is None:
                rows = first.flatten(1).float() if first.is_floating_point() else (first >= 0).flatten(1).float()
                if idle := int((~rows.isfinite().all(-1) | (rows == 0).all(-1)).sum()):
                    raise RuntimeError(f"{op}, {what}, is not timed: {idle} of {len(rows)} rows idle")
            elif isinstance(first, Tensor) and ours is not None:
                row["off_by"] = difference(first.transpose(1, 2) if first.shape != ours.shape else first, ours)
            del out, first
            seconds = self.watch(call)
        except Exception as error:
            if ours is None:
                raise
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
            return
        for name, chip in {"share": self.setup.chip, "share_of_measured": self.setup.measured}.items():
            row[name] = max(n_bytes / chip.bandwidth, flops / chip.peak) / seconds if chip else None
        row |= {"seconds": seconds, "gb_per_second": n_bytes / seconds / 1e9, "tflops": flops / seconds / 1e12}
        print(f"{op:<34} {what:<30} {seconds * 1e6:10.1f} us {row['share']:7.1%} of the roofline", flush=True)


def timed_attention(
    setup: Setup, contexts: Sequence[int], widths: Sequence[int] = (), budgets: Sequence[int] = (), chunk: int = 0,
    *, by_format: bool = False,
) -> list[Record]:  # fmt: skip
    """Attention over rows of these lengths: dense of so many queries, sparse of these budgets, of a prompt's chunk.

    by_format: of all that a cache may hold; else of bf16, with the mass of pages, and beside torch's own.
    """
    timings, device, ops = Timings(setup), setup.device, operators(setup)
    budgets, chunk = ([min(budget, 128) for budget in budgets[-1:]], min(chunk, 32)) if setup.tiny else (budgets, chunk)
    for heads in dict.fromkeys(Heads.of(setup, context) for context in contexts):
        n, wide = heads.context, heads.layer(device)
        for held, layer in (formats(wide) if by_format else {"bfloat16": wide}).items():
            split = fast.split_for(n, len(layer.k) * layer.k.shape[1])
            for n_tokens in widths[:1] if layer.tail else widths:  # what verifies reads both planes
                (q, pos), what = heads.queries(n_tokens, device), f"{heads.batch} x {n:,}, T {n_tokens}, {held}"
                cost, args = (heads.batch * layer.bytes_read(n), heads.flops(n_tokens)), (q, layer, pos, n)
                call = partial(ops.decode_attention, *args, split)
                timings.time("decode_attention", what, call, *cost)
                if not by_format:
                    mass = partial(ops.decode_attention_with_mass, *args, split, PAGE)
                    timings.time("decode_attention_with_mass", what, mass, *cost)
                    for name, theirs in peers(setup, q, *(x.narrow(2, 0, n) for x in layer.buffers)).items():
                        timings.time(name, what, theirs, *cost, ours=call().cpu())
            for budget in budgets:  # half of it listed in pages, half a window
                (q, pos), half = heads.queries(1, device), budget // 2
                chances = torch.rand(heads.batch, heads.n_kv, (n - half) // PAGE, device=device)
                pages = chances.topk(half // PAGE).indices
                listed = (pages[..., None] * PAGE + torch.arange(PAGE, device=device)).flatten(-2)  # [B, K, C]
                where = listed, torch.full((heads.batch,), n - half, device=device), half, pos, n, PAGE
                call = partial(ops.sparse_attention, q, layer, *where)
                n_bytes = heads.batch * layer.bytes_read(budget) + listed.numel() * listed.element_size()
                timings.time("sparse_attention", f"{heads.batch} rows, budget {budget:,}, {held}", call, n_bytes)
            if chunk and not layer.tail:
                one, row, what = replace(heads, batch=1), layer.slot(0), f"1 x {n:,}, T {chunk}, {held}"
                (q, pos), cost = one.queries(chunk, device), (row.bytes_read(n), one.flops(chunk))
                call = partial(ops.prefill_attention, q, row, pos, n)
                timings.time("prefill_attention", what, call, *cost)
                if not by_format:
                    theirs = causal(q, row.k.narrow(2, 0, n), row.v.narrow(2, 0, n))
                    timings.time("torch SDPA, causal", what, theirs, *cost, ours=call().cpu())
    return timings.rows


def peers(setup: Setup, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """torch's attention over the same keys, with no mask: a few more keys for some queries, which costs nothing."""
    packed = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, K, G * T, H]: the queries that share keys

    def sdpa(backend: SDPBackend, queries: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = F.scaled_dot_product_attention(queries, k, v, enable_gqa=queries is q)
        return out.reshape(q.shape)  # [B, N, T, H]

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    backends = backends | {"cuDNN": SDPBackend.CUDNN_ATTENTION} if setup.on_cuda else {"math": SDPBackend.MATH}
    how = {"": q, ", heads as tokens": packed}
    return {f"torch SDPA {b}{h}": partial(sdpa, backends[b], how[h]) for b in backends for h in how}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """torch's attention of a chunk, causal from its own place on: what its own causal bias calls, keys shared."""
    if q.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return lambda: flash(q, k, v, 0.0, is_causal=True, return_debug_mask=False)[0]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return partial(F.scaled_dot_product_attention, q, k, v, mask, enable_gqa=True)


def formats(wide: CacheLayer) -> dict[str, CacheLayer]:
    """A layer by what its cache holds: bf16, int8, int8 in planes, and as drafts read these."""
    integers = [(x * 32).clamp(-127, 127).to(torch.int8) for x in wide.buffers]
    scales = [torch.full(x.shape[:3], 1 / 32, dtype=torch.float16, device=x.device) for x in integers]
    upper, lower = zip(*map(as_planes, integers), strict=True)
    byte = CacheLayer(FORMATS["int8"], *integers, *scales)
    planes = CacheLayer(FORMATS["planes"], *upper, *scales, *lower)
    return {"bfloat16": wide, "int8": byte, "planes": planes, "upper plane": replace(planes, tail=TAIL)}


def timed_linears(setup: Setup) -> list[Record]:
    """Products with weights of a Llama-3.1-8B's layer by precision, of few rows and of a chunk's; bf16 is torch's."""
    timings, dtype = Timings(setup), torch.bfloat16
    sizes = {"wo": (64, 128)} if setup.tiny else {"wo": (4096, 4096), "w_in": (28672, 4096), "w_out": (4096, 14336)}
    for place, (n_out, n_in) in sizes.items():
        for name in (None, *TABLE, "both planes"):
            linear = torch.nn.Linear(n_in, n_out, bias=False, device=setup.device, dtype=dtype).requires_grad_(False)
            n_bytes = float(n_out * n_in * dtype.itemsize)
            if name is not None:
                try:
                    require_precision(known := name.removeprefix("both "), setup.device, dtype)
                except ValueError as error:
                    print(f"{name} is not timed: {error}")
                    continue
                if (entry := precision(known, setup.device)).shares:
                    lay_in_planes(linear, linear.weight)
                n_bytes = float(entry.bytes_of(n_out, n_in) + (name != known) * n_out * n_in)
                linear = entry.of(linear) if name == known else linear
            for n_rows in (1, 5) if setup.tiny else (1, 16, 64, 96, 256, 2048):
                x = torch.randn(n_rows, n_in, device=setup.device).to(dtype)
                what, moved = f"{place} {n_out:,} x {n_in:,}, {n_rows:,} rows", (x.numel() + n_rows * n_out) * 2
                call = multiplied(linear, x, compiled=setup.on_cuda)
                timings.time(f"linear, {name or 'bf16'}", what, call, n_bytes + moved, 2.0 * n_rows * n_in * n_out)
    return timings.rows


def _product(linear: torch.nn.Module, x: Tensor) -> object:
    return linear(x)


def multiplied(linear: torch.nn.Module, x: Tensor, *, compiled: bool) -> Callable[[], object]:
    """A product as steps compile it: what quantizes the rows of float8 is a part of it."""
    if not compiled:
        return torch.inference_mode()(lambda: linear(x))
    # to Dynamo products of all sizes are one function, of which it would compile the first eight
    step = torch.compile(own_code(_product), dynamic=False, fullgraph=True)
    return torch.inference_mode()(lambda: step(linear, x))


def timed_select(setup: Setup) -> list[Record]:
    """What selecting costs: SnapKV's pass over its window, all layers for guided, a layer for the others."""
    timings, device, ops = Timings(setup), setup.device, operators(setup)
    heads = Heads.of(setup, CONTEXT)
    one, row = replace(heads, batch=1), heads.layer(device).slot(0)
    q, pos = one.queries(32, device)
    _, sums = ops.prefill_attention_with_lse(q, row, pos, one.context)
    call = partial(ops.key_mass, q, row, sums, pos, one.context, 1)
    timings.time("key_mass", f"1 x {one.context:,}, T 32", call, row.bytes_read(one.context) / 2, one.flops(32) / 2)
    n_layers, batch, n_kv, context = (2, 2, 2, 512) if setup.tiny else (32, 32, 8, CONTEXT)
    head_dim, (n, many) = 128, (4, 64) if setup.tiny else (56, 1900)
    n_pages, what = context // PAGE, f"{n_layers} layers, {n} of {context // PAGE:,} pages"
    mass = torch.rand(n_layers, batch, n_kv, n_pages, device=device)
    kv_indices = torch.full((n_layers, batch, n_kv, n * PAGE), -1, device=device)
    due, all_of = torch.ones(batch, dtype=torch.bool, device=device), torch.full((batch,), n_pages, device=device)

    def select() -> Tensor:
        ops.guided_select(mass, kv_indices, due, all_of, PAGE)
        return kv_indices.transpose(0, 1)

    timings.time("guided_select", what, select, mass.numel() * 4 + kv_indices.numel() * 8)
    scores, limit = torch.rand(n_layers, 1, n_kv, context, device=device), torch.full((1, 1), context, device=device)
    n_bytes = scores.numel() * 4 + n_layers * n_kv * many * 8
    call = partial(ops.top_pages, scores, limit, many)
    timings.time("top_pages, one row of snapkv", f"{n_layers} layers, {many:,} of {context:,}", call, n_bytes)
    k = torch.randn(batch, n_kv, context, head_dim, device=device).bfloat16()
    bounds = torch.randn(batch, n_kv, n_pages, 2 * head_dim, device=device).bfloat16()
    first = torch.full((batch,), n_pages - 2, device=device)
    bound = partial(ops.page_bounds, CacheLayer(FORMATS["bf16"], k, k), bounds, first, 2, PAGE)
    timings.time("page_bounds", "one layer, 2 pages", bound, batch * n_kv * 2 * PAGE * head_dim * 2)
    q = torch.randn(batch, 1, n_kv * 4, head_dim, device=device).bfloat16().transpose(1, 2)
    call = partial(ops.quest_pages, q, bounds, all_of, n)
    timings.time("quest_pages", f"one layer, {n} of {n_pages:,} pages", call, bounds.numel() * 2)
    return timings.rows
