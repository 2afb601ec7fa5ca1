"""What an engine will allocate, told before it does: a batch and context that cannot fit are refused in one sentence.

Shapes: B slots, T tokens in a call, S cache capacity, L layers, N query heads, K kv heads, H head dim, D model width,
        F feed-forward width, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from gpt_fast_sd.model import SPLIT, KVCache, ModelConfig

from .config import GAMMA_TIERS, DraftConfig, EngineConfig
from .devices import ways_of
from .kernels import split_for
from .policies.hierarchy import CHEAP_GAMMA
from .policies.snapkv import WINDOW

GIB = 2**30
CPU = torch.device("cpu")

# fp32 tensors as large as a step's logits [B, T, V] that drawing from them, or judging by them, holds at a time where
# rows filter: the widest that its tests saw
DRAWING = 9
# as large as a mass of attention [L, B, K, S]: what the layers gave, the same as one tensor, and its averages
MASSES = 3

# On CUDA only. What is allocated beside torch, of which nobody tells beforehand:
RESERVE, SHARE = GIB, 0.03  # bytes, and a share of the device: cuBLAS, Triton, tuning, blocks that do not quite fit
COMMUNICATOR = GIB  # NCCL's buffers of one group of ranks
# A captured graph keeps a record of each launch on the device: about 64 KiB, by memory seen to grow with graphs of 500
# to 2,000 launches (NVIDIA's developer forum, thread 244901); not measured here.
NODE = 64 * 2**10
LAYER_NODES, STEP_NODES = 12, 30  # launches of a layer, and of all else in a step
# Kinds of sampling times doublings of the view that are captured for each gamma: as many as a usual run comes to.
GRAPH_SETS = 3


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device. weights: those that are still to be loaded."""

    weights: int
    kv: int  # the target's cache
    draft_kv: int  # a standalone draft's
    text: int  # of every slot
    policy: int  # selections and bounds
    workspace: int  # the largest that a step needs meanwhile
    graphs: int = 0  # records of captured launches
    reserve: int = 0  # what is allocated beside torch
    of_config: Callable[[EngineConfig], MemoryPlan] = field(repr=False, compare=False)  # the same plan for another one

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
    ) -> MemoryPlan:
        """The plan for a model of these sizes (under tensor parallelism, those of one rank).

        groups: NCCL's groups of ranks; whole: bytes of the device, in use or not. Both count on CUDA only.
        """

        def of_config(other: EngineConfig) -> MemoryPlan:
            return MemoryPlan.of(
                other, draft, model, draft_model, kv_dtype, device=device, weights=weights, groups=groups, whole=whole
            )

        b, capacity = config.batch_size, KVCache.splits(config.max_seq_len) * SPLIT
        entries = b * (capacity + SPLIT)
        kv = entries * model.kv_bytes_per_token(kv_dtype.itemsize)
        view, n_lists = draft.view_name, model.n_layers * b * model.n_kv_heads
        policy = n_lists * draft.budget * 8 if view in ("streaming", "snapkv", "guided") else 0
        if view == "quest":
            policy = kv // draft.page + n_lists * draft.budget // draft.page * 8
        captured = ways_of(device).captures and config.cuda_graphs != "off"
        return MemoryPlan(
            weights=weights,
            kv=kv,
            draft_kv=entries * draft_model.kv_bytes_per_token(kv_dtype.itemsize) if draft_model else 0,
            text=8 * entries,
            policy=policy,
            workspace=_workspace(config, draft, model, capacity, device),
            graphs=_nodes(draft, model, draft_model) * NODE * GRAPH_SETS if captured else 0,
            reserve=RESERVE + int(SHARE * whole) + COMMUNICATOR * groups if device.type == "cuda" else 0,
            of_config=of_config,
        )

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by what they are for."""
        return {
            "weights": self.weights,
            "KV cache": self.kv,
            "the draft model's KV cache": self.draft_kv,
            "selections and text": self.policy + self.text,
            "workspace": self.workspace,
            "CUDA graphs": self.graphs,
            "reserve": self.reserve,
        }

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    def check(self, have: int | None, device: torch.device, config: EngineConfig) -> None:
        """ValueError unless it fits into `have` bytes (None: it cannot be told)."""
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
        """What another draft adds to an engine that was built by the other plan, and keeps its draft meanwhile."""
        return replace(
            self,
            weights=0,
            kv=0,
            text=0,
            workspace=max(0, self.workspace - other.workspace),
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
    """The largest n up to upper that fits, 0 where none does; what is smaller fits, too."""
    lower = 0
    while lower < upper:
        middle = (lower + upper + 1) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle - 1)
    return lower


def _workspace(
    config: EngineConfig, draft: DraftConfig, model: ModelConfig, capacity: int, device: torch.device
) -> int:
    """The largest of what prefilling, the target's widest step, judging and selecting hold at a time, roughly."""
    b, width = config.batch_size, draft.max_gamma + 1
    row = model.dim * 4 + (model.n_heads + 2 * model.n_kv_heads) * model.head_dim * 2 + model.ffn_dim * 3  # elements
    lists = model.n_layers * b * model.n_kv_heads
    prefill = max(ways_of(device).chunks) * row * 4
    cheap = CHEAP_GAMMA if draft.policy == "hierarchy" else 0  # its middle steps judge, too, and may draft too much
    logits = b * max(width, 1 + cheap) * model.vocab_size * 4  # fp32 [B, T, V]
    # what drafts were drawn from, fp32 [B, gamma, V] and more
    drafted = b * (width + cheap) * model.vocab_size * 4 if draft.max_gamma else 0
    partials = 0
    if ways_of(device).operators:  # of the attention of one layer, fp32
        partials = b * model.n_heads * width * (model.head_dim + 2) * 4 * -(-capacity // split_for(capacity))
    mass = 0
    if draft.view_name == "guided":
        # with the mass, a layer's sums of every block of keys and query
        mass = 2 * lists * capacity // draft.page * 4 + 2 * b * model.n_heads * width * capacity // draft.page * 4
    step = b * width * row * 4 + 2 * logits + partials  # as the model has them, and as fp32
    observing = 0
    if draft.view_name == "snapkv":
        observing = b * WINDOW * row * 4 + MASSES * lists * capacity * 4
    return max(prefill, drafted + mass + max(step, logits * (1 + DRAWING)), observing)


def _nodes(draft: DraftConfig, model: ModelConfig, draft_model: ModelConfig | None) -> int:
    """Launches of one round of each gamma."""
    target = LAYER_NODES * model.n_layers + STEP_NODES
    drafting = LAYER_NODES * draft_model.n_layers + STEP_NODES if draft_model else target
    gammas = GAMMA_TIERS if isinstance(draft.gamma, str) else (0, draft.gamma)
    if draft.policy == "off":
        return target
    return sum(target + gamma * drafting for gamma in gammas)


def _size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB"
