"""How fast are the kernels? Each beside the bytes that it must move, and beside torch's own.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, N query heads, K kv heads, G = N // K,
        H head dim, C listed entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast.triton.stand_ins import beside_of
from gpt_fast_sd.model import SPLIT, CacheLayer, as_planes
from gpt_fast_sd.quantization.quantize import TAIL
from gpt_fast_sd.quantization.table import FLOAT8_CAPABILITY, TABLE, precision, require_precision
from measuring.gpu.aims import FULL
from measuring.gpu.setup import Record, Setup, Stopwatch, difference


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
        return 2 * self.batch * self.context * self.n_kv * self.head_dim * torch.bfloat16.itemsize

    def flops(self, n_tokens: int) -> float:
        """Operations of the last n_tokens of every row on the keys that each of them sees, and on their values."""
        pairs = n_tokens * (self.context - (n_tokens - 1) / 2)  # of a query and a key that it sees
        return 4 * self.batch * pairs * self.n_kv * self.group * self.head_dim


def dense_heads(setup: Setup, *contexts: int) -> tuple[Heads, ...]:
    """A layer of Llama-3.1-8B over rows of these lengths, as many as the cells have, of a short one 32."""
    if setup.tiny:
        return (Heads(batch=2, context=512, group=2, n_kv=2, head_dim=16),)
    found = (Heads(batch=setup.cell(c).batch if c in FULL else 32, context=c) for c in contexts)
    return tuple(replace(heads, context=-(-heads.context // SPLIT) * SPLIT) for heads in found)


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


def dense(pos: Tensor, n_keys: int) -> Record:
    """What queries at pos int64 [B, T] have in view of n_keys: rows that read at all, least and most keys of a row."""
    return among(torch.where(pos < n_keys, pos + 1, 0).amax(-1), pos)


def sparse(kv_indices: Tensor, start: Tensor, window: int, pos: Tensor, n_keys: int) -> Record:
    """The same of a list [B, K, C], -1 being nothing, and a window from start [B] on."""
    seen, listed = pos[:, -1:, None], (kv_indices >= 0) & (kv_indices < start[:, None, None])
    n_listed = (listed & (kv_indices <= seen)).sum(-1)  # [B, K]
    in_window = (torch.minimum(pos[:, -1] + 1, start + window) - start).clamp(min=0)[:, None]  # [B, 1]
    return among(torch.where(pos[:, -1:] < n_keys, n_listed + in_window, 0).amin(-1), pos)


def among(keys: Tensor, pos: Tensor) -> Record:
    """Rows that read, and the least and the most keys of a row: keys int64 [B]."""
    return {
        "rows_active": int((keys > 0).sum()), "tokens_fed": pos.shape[-1],
        "keys_in_view": [int(keys.min()), int(keys.max())],
    }  # fmt: skip


def chosen(places: Tensor, rows: int) -> Record:
    """What a selection gave: rows that were to select, and places that were chosen, -1 being none."""
    return {"rows_active": rows, "chosen": int((places >= 0).sum())}


def idle_rows(out: object) -> int:
    """Rows of what attention gave, [B, ...] or a tuple that begins with it, that are zeros or not finite."""
    first = out[0] if isinstance(out, tuple) else out
    if not isinstance(first, Tensor):
        return 0
    rows = first.flatten(1).float()
    return int((~rows.isfinite().all(-1) | (rows == 0).all(-1)).sum())


class Timings:
    """Rows of what was timed, each beside the bytes that it has to move, and with what it does."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.watch, self.rows = setup, Stopwatch(setup), list[Record]()

    def time(
        self, op: str, what: str, call: Callable[[], object], n_bytes: float, flops: float = 0.0, *, does: Record,
        beside: Tensor | None = None, peer: bool = False,
    ) -> None:  # fmt: skip
        """Time one call. What belongs to others may fail: then the row says why.

        does: what the call reads, see dense; RuntimeError where that, or what it gives, shows rows that idle. beside:
        what ours gives, of which a peer's result is so far off: one that computes something else is no peer.
        """
        row: Record = {"op": op, "what": what, "bytes": n_bytes, "flops": flops, "peer": peer, **does}
        try:
            out = call()
            reads = does.get("keys_in_view", [does.get("chosen", 0)])
            if min(reads) < 1 or (beside is None and "tokens_fed" in does and idle_rows(out)):
                raise RuntimeError(f"{op}, {what}, is not timed, as rows idle: {does}")
            if beside is not None and isinstance(out, Tensor):
                row["off_by"] = difference(out.transpose(1, 2) if out.shape != beside.shape else out, beside.cpu())
            del out
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


def timed_headline(setup: Setup) -> Record:
    """Attention of a plain step and of verifications in the cell that most targets are about, and nothing else."""
    return timed_dense(setup, dense_heads(setup, 57344), (1, 6, 9))


def timed_decode(setup: Setup) -> Record:
    """Dense attention of one query and of six, with and without mass, beside what else there is."""
    return timed_dense(setup, dense_heads(setup, 4096, 28672, 100_000), (1, 6))


def timed_dense(setup: Setup, shapes: Sequence[Heads], widths: Sequence[int]) -> Record:
    """Dense attention over these shapes, of so many queries a row, ours and others'."""
    timings = Timings(setup)
    for heads in shapes:
        k, v = buffers(setup, heads)
        split = kernels.split_for(k.shape[2] - SPLIT)
        for n_tokens in widths:
            q, pos = queries(setup, heads, n_tokens)
            args, what = (q, k, v, pos, heads.context, split), heads.label(n_tokens)
            flops, does = heads.flops(n_tokens), dense(pos, heads.context)
            ours = partial(kernels.decode_attention, *args)
            with_mass = partial(kernels.decode_attention_with_mass, *args, 16)
            timings.time("decode_attention", what, ours, heads.kv_bytes, flops, does=does)
            timings.time("decode_attention_with_mass", what, with_mass, heads.kv_bytes, flops, does=does)
            beside, seen = ours(), (k.narrow(2, 0, heads.context), v.narrow(2, 0, heads.context))
            for name, call in peers(setup, q, *seen).items():
                timings.time(name, what, call, heads.kv_bytes, flops, does=does, beside=beside, peer=True)
        del k, v, q, pos, args, seen, ours, with_mass
    return timings.record()


def formats(setup: Setup, heads: Heads) -> dict[str, CacheLayer]:
    """A layer by what its cache holds: bf16, int8, int8 in planes, as drafts read these, and float8 where that runs."""
    wide = buffers(setup, heads)
    integers = [(x * 32).clamp(-127, 127).to(torch.int8) for x in wide]
    scales = [torch.full(x.shape[:3], 1 / 32, dtype=torch.float16, device=x.device) for x in wide]
    upper, lower = zip(*map(as_planes, integers), strict=True)
    planes = CacheLayer(*upper, *scales, *lower)
    found = {
        "bfloat16": CacheLayer(*wide), "int8": CacheLayer(*integers, *scales), "planes": planes,
        "upper plane": replace(planes, tail=TAIL),
    }  # fmt: skip
    if not setup.on_cuda or torch.cuda.get_device_capability(setup.device) >= FLOAT8_CAPABILITY:
        found["float8_e4m3fn"] = CacheLayer(*(x.to(torch.float8_e4m3fn) for x in wide))
    return found


def timed_formats(setup: Setup) -> Record:
    """Attention by what the cache holds, see formats: of a step, of a verification, of a draft, of a chunk."""
    timings = Timings(setup)
    heads = dense_heads(setup, 28672)[0]
    for held, layer in formats(setup, heads).items():
        beside, split = beside_of(layer), kernels.split_for(layer.capacity)
        for n_tokens in (1,) if layer.tail else (1, 5):  # what verifies reads both planes
            q, pos = queries(setup, heads, n_tokens)
            timings.time(
                "decode_attention", f"{heads.label(n_tokens)}, {held}",
                partial(kernels.decode_attention, q, layer.k, layer.v, pos, heads.context, split, *beside),
                heads.batch * layer.bytes_read(heads.context), heads.flops(n_tokens), does=dense(pos, heads.context),
            )  # fmt: skip
        q, pos = queries(setup, heads, 1)
        budget = 128 if setup.tiny else 1024
        start = torch.full((heads.batch,), heads.context - budget // 2, device=setup.device)
        listed = torch.arange(budget // 2, device=setup.device).expand(heads.batch, heads.n_kv, -1).contiguous()
        where = listed, start, budget // 2, pos, heads.context, 16
        timings.time(
            "sparse_attention", f"{heads.batch} rows, budget {budget:,}, {held}",
            partial(kernels.sparse_attention, q, layer.k, layer.v, *where, *beside),
            heads.batch * layer.bytes_read(budget) + listed.numel() * listed.element_size(),
            does=sparse(listed, start, budget // 2, pos, heads.context),
        )  # fmt: skip
        if layer.tail:
            continue
        one, row, n_tokens = replace(heads, batch=1), layer.slot(0), 32 if setup.tiny else 2048
        q, pos = queries(setup, one, n_tokens)
        timings.time(
            "prefill_attention", f"{one.label(n_tokens)}, {held}",
            partial(kernels.prefill_attention, q, row.k, row.v, pos, one.context, *beside_of(row)),
            row.bytes_read(one.context), one.flops(n_tokens), does=dense(pos, one.context),
        )  # fmt: skip
    return timings.record()


def timed_linears(setup: Setup) -> Record:
    """Products with weights of a Llama-3.1-8B's layer by precision, of few rows and of a chunk's; bf16 is torch's."""
    timings, dtype = Timings(setup), torch.bfloat16
    sizes = {"wo": (64, 128)} if setup.tiny else {"wo": (4096, 4096), "w_in": (28672, 4096), "w_out": (4096, 14336)}
    for place, (n_out, n_in) in sizes.items():
        plain = Linear(n_in, n_out, bias=False, device=setup.device, dtype=dtype).requires_grad_(False)
        for name in (None, *TABLE):
            linear: torch.nn.Linear = plain
            n_bytes = float(n_out * n_in * dtype.itemsize)
            if name is not None:
                try:
                    require_precision(name, setup.device, dtype)
                except ValueError as error:
                    print(f"{name} is not timed: {error}")
                    continue
                entry = precision(name, setup.device)
                linear, n_bytes = entry.of(plain), float(entry.bytes_of(n_out, n_in))
            for n_rows in (1, 5) if setup.tiny else (1, 16, 64, 96, 256, 2048):
                x = torch.randn(n_rows, n_in, device=setup.device).to(dtype)
                timings.time(
                    f"linear, {name or 'bf16'}", f"{place} {n_out:,} x {n_in:,}, {n_rows:,} rows",
                    multiplied(linear, x, compiled=setup.on_cuda),
                    n_bytes + (x.numel() + n_rows * n_out) * dtype.itemsize,
                    2.0 * n_rows * n_in * n_out, does={"rows_active": n_rows, "chosen": n_rows},
                )  # fmt: skip
    return timings.record()


def multiplied(linear: torch.nn.Module, x: Tensor, *, compiled: bool) -> Callable[[], object]:
    """A product as steps compile it: what quantizes the rows of float8 is a part of it."""
    if compiled:
        torch._dynamo.reset()  # to which products of all sizes are one function: it would compile the first eight
    step = torch.compile(linear, dynamic=False, fullgraph=True) if compiled else linear

    @torch.inference_mode()
    def call() -> object:
        return step(x)

    return call


def peers(setup: Setup, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Others' attention over the same keys, with no mask: a few more keys for some queries, which costs nothing."""
    packed = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, K, G * T, H]: the queries that share keys

    def sdpa(backend: SDPBackend, queries: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = F.scaled_dot_product_attention(queries, k, v, enable_gqa=queries is q)
        return out.reshape(q.shape)  # [B, N, T, H]

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    backends = backends | {"cuDNN": SDPBackend.CUDNN_ATTENTION} if setup.on_cuda else {"math": SDPBackend.MATH}
    found: dict[str, Callable[[], object]] = {
        f"torch SDPA {name}{how}": partial(sdpa, backend, queries)
        for name, backend in backends.items()
        for how, queries in {"": q, ", heads as tokens": packed}.items()
    }
    if k.shape[2] == 28672:  # it compiles anew for every shape, half a minute each
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        found["torch FlexAttention"] = partial(flex, q, k, v, enable_gqa=True)
    return found


def timed_sparse(setup: Setup) -> Record:
    """A draft step's attention at several budgets: half of them listed by pages of 16 or one by one, half a window."""
    timings = Timings(setup)
    heads = dense_heads(setup, 28672)[0]
    k, v = buffers(setup, heads)
    q, pos = queries(setup, heads, 1)
    for budget in (64, 128) if setup.tiny else (128, 256, 512, 1024, 2048, 4096):
        listed, window = budget // 2, budget // 2
        start = torch.full((heads.batch,), heads.context - window, device=setup.device)
        for page in (1, 16):
            n = (heads.context - window) // page
            choice = torch.rand(heads.batch, heads.n_kv, n, device=setup.device).topk(listed // page).indices
            kv_indices = (choice[..., None] * page + torch.arange(page, device=setup.device)).flatten(-2)  # [B, K, C]
            args = (q, k, v, kv_indices, start, window, pos, heads.context, page)
            timings.time(
                "sparse_attention", f"{heads.batch} rows, budget {budget:,}, page {page}",
                partial(kernels.sparse_attention, *args),
                heads.kv_bytes / heads.context * budget + kv_indices.numel() * kv_indices.element_size(),
                does=sparse(kv_indices, start, window, pos, heads.context),
            )  # fmt: skip
    return timings.record()


def timed_prefill(setup: Setup) -> Record:
    """A prompt's chunks at the end of a long prompt, beside torch's; and the pass of SnapKV over its window."""
    timings = Timings(setup)
    base = dense_heads(setup, 28672)[0]
    for n_tokens, context in ((32, 256),) if setup.tiny else ((2048, 8192), (2048, 28672), (256, 28672), (2048, 57344)):
        heads = replace(base, batch=1, context=context)
        k, v = buffers(setup, heads)
        q, pos = queries(setup, heads, n_tokens)
        flops, what = heads.flops(n_tokens), heads.label(n_tokens)
        ours, does = partial(kernels.prefill_attention, q, k, v, pos, context), dense(pos, context)
        timings.time("prefill_attention", what, ours, heads.kv_bytes, flops, does=does)
        beside = ours()
        for name, call in prefill_peers(setup, heads, q, k, v).items():
            timings.time(name, what, call, heads.kv_bytes, flops, does=does, beside=beside, peer=True)
    observed = queries(setup, heads, 32)
    _, sums = kernels.prefill_attention_with_lse(observed[0], k, v, observed[1], context)
    timings.time(
        "key_mass", heads.label(32), partial(kernels.key_mass, observed[0], k, sums, observed[1], context, 1),
        heads.kv_bytes / 2, 2 * 32 * context * heads.n_kv * heads.group * heads.head_dim,
        does=dense(observed[1], context),
    )  # fmt: skip
    return timings.record()


def prefill_peers(setup: Setup, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """torch's attention of a chunk, causal from its own place on: over shared keys, and as it takes them everywhere."""
    n_tokens = q.shape[2]
    seen = [x.narrow(2, 0, heads.context) for x in (k, v)]
    each = [x.repeat_interleave(heads.group, 1) for x in seen]  # a copy of the keys for every head
    mask = causal_lower_right(n_tokens, heads.context)
    found: dict[str, Callable[[], object]] = {
        "torch SDPA, causal": partial(F.scaled_dot_product_attention, q, each[0], each[1], mask)
    }
    if setup.on_cuda:

        def flash() -> Tensor:  # what torch's own causal bias calls; it reads keys that heads share but once
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                q, seen[0], seen[1], 0.0, is_causal=True, return_debug_mask=False
            )[0]
            return out

        found["torch SDPA flash, keys shared"] = flash
    return found


def timed_select(setup: Setup) -> Record:
    """What selecting costs per round: all layers for guided and one for the others, 32 rows of 28,672 entries."""
    timings, page = Timings(setup), 16
    n_layers, batch, n_kv, context = (2, 2, 2, 512) if setup.tiny else (32, 32, 8, 28672)
    group, head_dim = 4, 128
    n_pages, n = context // page, 4 if setup.tiny else 56
    mass = torch.rand(n_layers, batch, n_kv, n_pages, device=setup.device)
    kv_indices = torch.full((n_layers, batch, n_kv, n * page), -1, device=setup.device)
    due = torch.ones(batch, dtype=torch.bool, device=setup.device)
    all_of = torch.full((batch,), n_pages, device=setup.device)
    bytes_of = mass.numel() * 4 + kv_indices.numel() * 8
    what = f"{n_layers} layers, {n} of {n_pages:,} pages"
    select = partial(kernels.guided_select, mass, kv_indices, due, all_of, page)
    select()
    timings.time("guided_select", what, select, bytes_of, does=chosen(kv_indices, int(due.sum())))
    scores = torch.rand(n_layers, 1, n_kv, context, device=setup.device)
    one, many = torch.full((1, 1), context, device=setup.device), 64 if setup.tiny else 1900
    top = partial(kernels.top_pages, scores, one, many)
    timings.time(
        "top_pages, one row of snapkv", f"{n_layers} layers, {many:,} of {context:,}", top,
        scores.numel() * 4 + n_layers * n_kv * many * 8, does=chosen(top(), 1),
    )  # fmt: skip
    k = torch.randn(batch, n_kv, context, head_dim, device=setup.device).bfloat16()
    bounds = torch.randn(batch, n_kv, n_pages, 2 * head_dim, device=setup.device).bfloat16()
    first = torch.full((batch,), n_pages - 2, device=setup.device)
    read = batch * n_kv * 2 * page * head_dim * 2
    bound, before = partial(kernels.page_bounds, k, bounds, first, 2, page), bounds.clone()
    bound()
    written = (bounds != before).any(-1)  # [B, K, P]
    timings.time("page_bounds", "one layer, 2 pages", bound, read, does=chosen(written.long() - 1, batch))
    del before, written
    q = torch.randn(batch, 1, n_kv * group, head_dim, device=setup.device).bfloat16().transpose(1, 2)
    what = f"one layer, {n} of {n_pages:,} pages"
    quest = partial(kernels.quest_pages, q, bounds, all_of, n)
    timings.time("quest_pages", what, quest, bounds.numel() * 2, does=chosen(quest(), batch))
    return timings.record()
