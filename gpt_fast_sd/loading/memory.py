"""What an engine will allocate, known beforehand: a batch and context that cannot fit are refused in one sentence.

Shapes: B slots, T tokens in a call, S cache capacity, L layers, N query heads, K kv heads, H head dim, D model width,
F feed-forward width, V vocabulary, gamma tokens drafted per round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpt_fast_sd.model import SPLIT, KVCache, ModelConfig
from gpt_fast_sd.tp import local_config

from .. import registry
from ..config import DraftConfig, EngineConfig
from ..devices import traits_of
from ..fast import LANES, MOST_TILED, QUERY_BLOCK, ROWS_AT_ONCE, prefill_splits, split_for, triton_serves
from ..quantization.table import matrices_of, precision
from ..serving.cuda_graphs import steps_held

Parts = Sequence[tuple[ModelConfig, int]]  # the target and perhaps a draft model, each with the ranks that hold it

GIB = 2**30
CPU = torch.device("cpu")

# fp32 tensors of a size that are alive at a time while rows sample and filter, the most that tests count:
FILTERING = 5  # as large as a step's logits [B, T, V], while distributions are made from them and used to judge
FILTERING_BY_SORT = 8  # the same if `likeliest` sorts, as its body for a CPU does
DRAWING_ALONE = 6  # as large as [B, V], while one token per row is drawn and nothing was drafted
DRAWING = 9  # as large as [B, V], while one token per row is drawn: in fp64, from the residual of p and q

SCORES = 4  # as large as scores [B, N, T, S], with the weights made from them
LOOKUP = 20  # bytes per token of the texts that are searched

# On CUDA only. Allocations outside torch, whose size nothing reports beforehand:
RESERVE, SHARE = GIB, 0.03  # bytes, and a share of the device: cuBLAS, Triton, tuning, fragmentation
COMMUNICATOR = GIB  # NCCL's buffers of one group of ranks
# A captured graph keeps a record of each launch on the device: about 64 KiB, by the growth of memory with graphs of 500
# to 2,000 launches (NVIDIA's developer forum, thread 244901); not measured here.
NODE = 64 * 2**10
LAYER_NODES, STEP_NODES = 12, 30  # launches of a layer, and of everything else in a step


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device. weights: those still to be loaded."""

    weights: int
    kv: int  # the target's cache
    draft_kv: int  # a standalone draft's
    draft_weights: int  # of quantized copies that draft
    text: int  # of every slot
    policy: int  # selections and bounds
    workspace: int  # the most temporary memory of any step
    captured: int = 0  # the same for captured rounds, whose memory nothing else can use
    graphs: int = 0  # records of captured launches
    reserve: int = 0  # allocations outside torch
    of_config: Callable[[EngineConfig], MemoryPlan] = field(repr=False, compare=False)  # this plan for another config

    @staticmethod
    def of(
        config: EngineConfig,
        draft: DraftConfig,
        model: ModelConfig,
        draft_model: ModelConfig | None,
        kv_dtype: torch.dtype,
        *,
        device: torch.device = CPU,
        weights: int = 0,
        groups: int = 0,
        whole: int = 0,
        ranks: int = 1,
        draft_ranks: int = 1,
        packs: bool = False,
        planes: bool = False,
    ) -> MemoryPlan:
        """The plan for a model of these sizes (under tensor parallelism, those of one rank).

        groups: NCCL's groups of ranks; whole: bytes of the device, in use or not. Both count on CUDA only. ranks,
        draft_ranks: how many hold the target and the draft model together. packs: whether weights are packed (see
        pack_linears) once the caches exist. planes: whether the cache lies in planes, whatever drafts now.
        """

        def of_config(other: EngineConfig) -> MemoryPlan:
            return MemoryPlan.of(
                other, draft, model, draft_model, kv_dtype,
                device=device, weights=weights, groups=groups, whole=whole, ranks=ranks, draft_ranks=draft_ranks,
                packs=packs, planes=planes,
            )  # fmt: skip

        b, capacity = config.batch_size, KVCache.splits(config.max_seq_len) * SPLIT
        draft, entries = draft.within(capacity), b * (capacity + SPLIT)
        n_lists = model.n_layers * b * model.n_kv_heads
        wide = entries * model.kv_bytes_per_token(max(kv_dtype.itemsize, 2))
        policy = registry.view_class(draft.view_name).bytes_held(draft, n_lists, wide) if draft.view_name else 0
        quantized, planes = kv_dtype.itemsize == 1, planes or draft.needs_planes
        work = _Work(config, draft, model, capacity, device, ranks, quantized=quantized, planes=planes)
        parts = [(model, ranks), *([(draft_model, draft_ranks)] if draft_model else [])]
        packing = max(_largest_weight(m) for m, _ in parts) * 2 if packs else 0  # a copy, in bf16
        quantizing, widened = 0, _widened_head(config, draft, parts, device)
        for name in filter(None, (config.quantize, draft.quantize)):
            entry = precision(name, device)
            quantizing = max(quantizing, *(_quantizing(m, entry.beside) for m, _ in parts))
            widened = max(widened, *(entry.widened * _largest_of_layers(*part, packs) for part in parts))
        captured = traits_of(device).captures and config.cuda_graphs != "off"
        return MemoryPlan(
            weights=weights,
            kv=entries * _bytes_per_token(model, kv_dtype),
            draft_kv=entries * _bytes_per_token(draft_model, kv_dtype) if draft_model else 0,
            draft_weights=_copied(config, draft, parts, device),
            text=8 * entries,
            policy=policy,
            workspace=max(max(work.prefilling, work.round, work.observing) + widened, packing, quantizing),
            captured=max(work.round, work.observing) + widened if captured else 0,
            graphs=_nodes(config, draft, model, draft_model) * NODE if captured else 0,
            reserve=RESERVE + int(SHARE * whole) + COMMUNICATOR * groups if device.type == "cuda" else 0,
            of_config=of_config,
        )

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by purpose."""
        return {
            "weights": self.weights,
            "KV cache": self.kv,
            "the draft model's KV cache": self.draft_kv,
            "quantized draft weights": self.draft_weights,
            "selections and text": self.policy + self.text,
            "workspace": self.workspace,
            "captured rounds": self.captured,
            "CUDA graphs": self.graphs,
            "reserve": self.reserve,
        }

    @property
    def total(self) -> int:
        """Bytes in total."""
        return sum(self.parts.values())

    def check(self, have: int | None, device: torch.device, config: EngineConfig) -> None:
        """ValueError unless it fits into `have` bytes (None: unknown)."""
        if have is None or self.total <= have:
            return
        room = have  # narrowed for the closures

        def slots_fit(n: int) -> bool:
            return self.of_config(replace(config, batch_size=n)).total <= room

        def tokens_fit(n: int, slots: int) -> bool:
            return self.of_config(replace(config, batch_size=slots, max_seq_len=n * SPLIT)).total <= room

        splits = config.max_seq_len // SPLIT
        slots = _most(slots_fit, config.batch_size - 1)
        tokens = _most(lambda n: tokens_fit(n, config.batch_size), splits) * SPLIT
        fitting = [*([f"batch_size {slots}"] if slots else []), *([f"max_seq_len {tokens:,}"] if tokens else [])]
        advice = f"{' or '.join(fitting)} would fit"
        if not slots:
            alone = _most(lambda n: tokens_fit(n, 1), splits) * SPLIT
            advice = (
                f"not even one slot fits: lower max_seq_len to {alone:,}"
                if alone
                else (
                    "not even the smallest cache fits: share the model among more processes (tp), or take a smaller one"
                )
            )
        raise ValueError(
            f"batch_size {config.batch_size} x max_seq_len {config.max_seq_len:,} takes {self._sum()}, and the "
            f"{_size(have)} of memory of {device} are {_size(self.total - have)} short of that; {advice}"
        )

    def beside(self, other: MemoryPlan) -> MemoryPlan:
        """What another draft adds to an engine that was built by the other plan, and keeps its own draft meanwhile."""
        return replace(
            self,
            weights=0,
            kv=0,
            text=0,
            workspace=max(0, self.workspace - other.workspace),
            captured=max(0, self.captured - other.captured),
            graphs=max(0, self.graphs - other.graphs),
            reserve=0,
        )

    def check_added(self, have: int | None, device: torch.device, draft: DraftConfig) -> None:
        """ValueError unless what another draft adds (see beside) fits into the `have` bytes that are left."""
        if have is not None and self.total > have:
            raise ValueError(
                f"policy {draft.policy!r} with budget {draft.budget:,} takes {self._sum()} more, and the {_size(have)} "
                f"left of the memory of {device} are {_size(self.total - have)} short of that; nothing is changed"
            )

    def _sum(self) -> str:
        sizes = " + ".join(f"{name} {_size(n)}" for name, n in self.parts.items() if n)
        return f"{sizes} = {_size(self.total)}"


def _most(fits: Callable[[int], bool], upper: int) -> int:
    """The largest n up to upper that fits, 0 if none does; whatever is smaller fits, too."""
    lower = 0
    while lower < upper:
        middle = (lower + upper + 1) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle - 1)
    return lower


@dataclass(frozen=True)
class _Work:
    """Roughly the bytes that a part of the work holds at a time, besides weights, caches and selections."""

    config: EngineConfig
    draft: DraftConfig
    model: ModelConfig
    capacity: int
    device: torch.device
    ranks: int
    quantized: bool  # the cache
    planes: bool  # it lies in them

    @property
    def prefilling(self) -> int:
        """The largest chunk of a prompt."""
        chunks = [n for n in traits_of(self.device).chunks if n <= max(self.config.max_seq_len, SPLIT)]
        return max(n * self._token + self._parts(1, n) + self._scores(1, n) for n in chunks)

    @property
    def round(self) -> int:
        """Drafting, the target's widest step, judging, and selecting by its attention mass."""
        draft, model, b, width = self.draft, self.model, self.config.batch_size, self.draft.max_gamma + 1
        row = b * model.vocab_size * 4  # fp32 [B, V]
        # a hierarchy's middle steps judge, too, and may draft too much
        cheap: int = registry.policy_class(draft.policy).beyond
        judged = max(width, 1 + cheap)
        logits = judged * row  # fp32 [B, T, V]
        # the distributions of drafts, fp32 [B, gamma, V] and more
        drafted = (width + cheap) * row if draft.max_gamma else 0
        wide = FILTERING if triton_serves(self.device) else FILTERING_BY_SORT
        # p of every place; q, too, one-hot for deterministic drafts
        judging = logits + max(wide * judged, 2 * (judged - 1) + DRAWING if judged > 1 else DRAWING_ALONE) * row
        attending, mass = self._scores(b, judged), 0
        if triton_serves(self.device):  # partial results of one layer's splits, fp32
            split = split_for(self.capacity)
            attending = b * model.n_heads * judged * (model.head_dim + 2) * 4 * -(-self.capacity // split)
        if draft.view_name and registry.view_class(draft.view_name).wants_mass:
            # for the mass, a layer's sums per block of keys and query
            pages = self.capacity // draft.page
            mass = 2 * model.n_layers * b * model.n_kv_heads * pages * 4 + 2 * b * model.n_heads * width * pages * 4
        step = b * judged * self._token + 2 * logits + attending  # logits as the model has them, and as fp32
        # each row's text, as windows that are compared with its end
        searches = registry.policy_class(draft.policy).searches(draft)
        searched = LOOKUP * b * self.capacity if searches else 0
        return drafted + mass + max(step, judging, searched)

    @property
    def observing(self) -> int:
        """A view's passes over windows of several rows, and their selections."""
        model, b = self.model, self.config.batch_size
        n_observed: int = registry.view_class(self.draft.view_name).n_observed if self.draft.view_name else 0
        if not n_observed:
            return 0
        w, n, k, h = min(b, traits_of(self.device).windows), model.n_heads, model.n_kv_heads, model.head_dim
        chosen = 3 * model.n_layers * w * k * self.draft.budget * 8  # the old ones, the new ones, and those kept
        # fp32 [W, K, S]: the mass, the part of it before the window, and its averages
        scores = 3 * w * k * self.capacity * 4
        if triton_serves(self.device):  # of one layer, whose queries are widened to all slots
            attending = 3 * b * n * n_observed * (h + 1) * 4 + self._parts(b, n_observed) + b * k * self.capacity * 4
        else:  # of one layer, a copy of the keys and values, scores, and places to sort
            attending = w * self.capacity * (2 * k * h * 4 + 2 * k * 8) + self._scores(w, n_observed)
        return w * n_observed * self._token + attending + scores + chosen

    def _parts(self, n_rows: int, n_tokens: int) -> int:
        """For attention of chunks or windows over all keys, if CUDA splits these."""
        model = self.model
        splits = prefill_splits(model.group_size * n_tokens, self.capacity) if triton_serves(self.device) else 0
        return n_rows * model.n_heads * n_tokens * (model.head_dim + 1) * 4 * splits

    def _scores(self, n_rows: int, n_tokens: int) -> int:
        """For attention in plain PyTorch, a few queries at a time over all keys: fp32 [B, N, T, S].

        Keys and values that are quantized are widened first, to fp32 at most; planes are put together before.
        """
        if triton_serves(self.device):
            return 0
        widened = 2 * self.model.n_kv_heads * self.model.head_dim if self.quantized else 0
        widened *= 2 if self.planes else 1
        scores = SCORES * self.model.n_heads * min(n_tokens, QUERY_BLOCK)
        return n_rows * self.capacity * (scores + widened) * 4

    @property
    def _token(self) -> int:
        """For each token that is fed, in one layer."""
        model = self.model
        row = model.dim * 4 + (model.n_heads + 2 * model.n_kv_heads) * model.head_dim * 2 + model.ffn_dim * 3
        # every rank's part, the sum, and the next part in fp32 with its result
        gathered = (self.ranks + 3) * model.dim if self.config.exact and self.ranks > 2 else 0
        return (row + gathered) * 4


def _bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Bytes of one position of one slot in a cache of this dtype."""
    return model.kv_bytes_per_token(KVCache.element_bytes(kv_dtype, model.head_dim))


def _largest_weight(model: ModelConfig) -> int:
    """Elements of the largest matrix that tokens are multiplied by; a rank's head is not larger."""
    heads = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    return model.dim * max(model.vocab_size, 2 * model.ffn_dim, heads)


def _largest_of_layers(model: ModelConfig, ranks: int, packs: bool) -> int:
    """Elements of the largest matrix that is quantized and, where weights are packed, has no size for that."""
    sizes = matrices_of(model, ranks).values()
    return max((rows * columns for rows, columns in sizes if not (packs and rows % LANES == 0)), default=0)


def _widened_head(config: EngineConfig, draft: DraftConfig, parts: Parts, device: torch.device) -> int:
    """Bytes of the largest output head of a copy that drafts, as a product of many rows widens it."""
    if draft.quantize is None:
        return 0
    head = precision(precision(draft.quantize, device, of_draft=True).head, device)
    many = [one for one in _model_steps(draft, parts) if config.batch_size * one[0].n_tokens > MOST_TILED]
    return head.widened * max((-(-step.model.vocab_size // n) * step.model.dim for step, n in many), default=0)


def _model_steps(draft: DraftConfig, parts: Parts) -> list[tuple[Any, int]]:
    """The steps of a draft (ModelSteps of draft.py), each with the number of ranks that hold its model."""
    (model, ranks), (draft_model, draft_ranks) = [*parts, (None, 1)][:2]
    steps = registry.policy_class(draft.policy).model_steps(draft, model, draft_model, 1)
    return [(step, draft_ranks if step.model is draft_model else ranks) for step in steps]


def _quantizing(model: ModelConfig, beside: int) -> int:
    """Bytes of what is there at a time while a matrix is quantized: itself in bf16, and some rows of it in fp32."""
    widest = max(model.dim, model.ffn_dim, model.n_heads * model.head_dim)
    return 2 * _largest_weight(model) + 4 * beside * ROWS_AT_ONCE * widest


def _copied(config: EngineConfig, draft: DraftConfig, parts: Parts, device: torch.device) -> int:
    """Bytes of quantized copies of all models that draft: their heads, and their layers if they have other ones."""
    if draft.quantize is None:
        return 0
    layers, total = precision(draft.quantize, device, of_draft=True), 0
    head = precision(layers.head, device)
    for step, n in _model_steps(draft, parts):
        shape = step.model
        if config.quantize != draft.quantize or any(shape is theirs for theirs, _ in parts[1:]):
            total += bytes_of_layers(shape, n, layers.bytes_of)
        total += head.bytes_of(-(-shape.vocab_size // n), shape.dim)
    return total


def bytes_of_weights(model: ModelConfig, ranks: int, itemsize: int, quantize: str | None, device: torch.device) -> int:
    """Bytes of a rank's part of a whole model, whose layers are quantized."""
    total = model.n_params // ranks * itemsize
    if quantize is None:
        return total
    entry = precision(quantize, device)
    return total + bytes_of_layers(
        local_config(model, ranks), ranks, lambda o, i: entry.bytes_of(o, i) - o * i * itemsize
    )


def bytes_of_layers(shape: ModelConfig, ranks: int, of_matrix: Callable[[int, int], int]) -> int:
    """Bytes of what quantizing changes, the matrices of all layers: of_matrix(rows, columns) each.

    shape: of one of so many ranks, see local_config.
    """
    return shape.n_layers * sum(of_matrix(*sizes) for sizes in matrices_of(shape, ranks).values())


def _nodes(config: EngineConfig, draft: DraftConfig, model: ModelConfig, draft_model: ModelConfig | None) -> int:
    """Launches of all captured rounds that are held at a time, the larger of target and draft model in each step."""
    layers = max(model.n_layers, draft_model.n_layers if draft_model else 0)
    return steps_held(config.max_seq_len, draft, model.group_size) * (LAYER_NODES * layers + STEP_NODES)


def _size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB"
