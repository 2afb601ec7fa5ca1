"""What an engine will allocate, known beforehand: a batch and context that cannot fit are refused in one sentence.

Shapes: B slots, S cache capacity, L layers, K kv heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from gpt_fast_sd.model import SPLIT, CacheFormat, ModelConfig
from gpt_fast_sd.tp import local_config

from ..fast import MOST_TILED
from ..fast.devices import traits_of
from ..policies import registry
from ..policies.auto import AutoConfig
from ..policies.config import DraftConfig
from ..policies.costs import steps_held
from ..quantization.table import matrices_of, precision
from .system import System
from .workspace import Workspace

GIB = 2**30

# On CUDA only. Allocations outside torch, whose size nothing reports beforehand:
RESERVE, SHARE = GIB, 0.015  # bytes, and a share of the device: cuBLAS, modules of kernels, ends of blocks
COMMUNICATOR = GIB  # NCCL's buffers of one group of ranks
# A captured graph keeps a record of each launch on the device: about 64 KiB, by the growth of memory with graphs of 500
# to 2,000 launches (NVIDIA's developer forum, thread 244901); not measured here.
NODE = 64 * 2**10
# Launches of a layer with bf16 weights and cache, of which attention has three with mass; and of everything else
# in a step, with a copy of the mass of eight layers. What the code of a GPU has is counted in tests.
LAYER_NODES, STEP_NODES = 11, 40
# of a layer with such a cache, weights or view; of one that ranks share: two sums and their ends; and of one that many
# rows are multiplied with copies of
MORE_NODES = {"int8": 1, "planes": 2, "float8": 4, "quest": 4, "ranks": 4, "copies": 4}


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
    system: System = field(repr=False, compare=False)  # what it is the plan of

    @staticmethod
    def of(system: System) -> MemoryPlan:
        """The plan of one rank (see System.of_rank)."""
        if isinstance(system.draft, AutoConfig):
            return _of_arms(system, system.draft.arms)
        within = replace(system, draft=system.draft.within(system.capacity))
        config, model, device = within.config, within.model, within.device
        work, entries = Workspace(within), config.batch_size * (within.capacity + SPLIT)
        captured = traits_of(device).captures and config.cuda_graphs != "off"
        return MemoryPlan(
            weights=system.weights,
            kv=entries * _bytes_per_token(model, system.format),
            draft_kv=entries * _bytes_per_token(system.draft_model, system.format) if system.draft_model else 0,
            draft_weights=_copied(within),
            text=8 * entries,
            policy=_selections(within, entries) + _turned_sinks(within),
            workspace=work.total,
            captured=work.captured if captured else 0,
            graphs=_launches(within) * NODE if captured else 0,
            reserve=RESERVE + int(SHARE * system.whole) + COMMUNICATOR * system.groups if device.type == "cuda" else 0,
            system=system,
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

    def check(self, have: int | None) -> None:
        """ValueError unless it fits into `have` bytes (None: unknown)."""
        if have is None or self.total <= have:
            return
        config, room = self.system.config, have  # narrowed for the closures

        def fits(batch_size: int, max_seq_len: int) -> bool:
            other = replace(config, batch_size=batch_size, max_seq_len=max_seq_len)
            return MemoryPlan.of(replace(self.system, config=other)).total <= room

        splits = config.max_seq_len // SPLIT
        slots = _largest(lambda n: fits(n, config.max_seq_len), config.batch_size - 1)
        tokens = _largest(lambda n: fits(config.batch_size, n * SPLIT), splits) * SPLIT
        fitting = [*([f"batch_size {slots}"] if slots else []), *([f"max_seq_len {tokens:,}"] if tokens else [])]
        advice = f"{' or '.join(fitting)} would fit"
        if not slots:
            alone = _largest(lambda n: fits(1, n * SPLIT), splits) * SPLIT
            advice = (
                f"not even one slot fits: lower max_seq_len to {alone:,}"
                if alone
                else (
                    "not even the smallest cache fits: share the model among more processes (tp), or take a smaller one"
                )
            )
        raise ValueError(
            f"batch_size {config.batch_size} x max_seq_len {config.max_seq_len:,} takes {self._sum()}, and the "
            f"{_size(have)} of memory of {self.system.device} are {_size(self.total - have)} short of that; {advice}"
        )

    def added_to(self, other: MemoryPlan) -> MemoryPlan:
        """What a new draft adds to an engine that was built by the other plan, and keeps its own draft meanwhile."""
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

    def check_added(self, have: int | None) -> None:
        """ValueError unless what a new draft adds (see added_to) fits into the `have` bytes that are left."""
        draft, device = self.system.draft, self.system.device
        if have is not None and self.total > have:
            raise ValueError(
                f"policy {draft.policy!r} with budget {draft.budget:,} takes {self._sum()} more, and the {_size(have)} "
                f"left of the memory of {device} are {_size(self.total - have)} short of that; nothing is changed"
            )

    def _sum(self) -> str:
        sizes = " + ".join(f"{name} {_size(n)}" for name, n in self.parts.items() if n)
        return f"{sizes} = {_size(self.total)}"


def _of_arms(system: System, arms: tuple[DraftConfig, ...]) -> MemoryPlan:
    """The plan of an engine in which one of several policies drafts at a time: with one copy of each precision."""
    plans = [MemoryPlan.of(replace(system, draft=arm, held=system.format)) for arm in arms]
    copies = {(arm.quantize, arm.policy == "standalone"): plan.draft_weights
              for arm, plan in zip(arms, plans, strict=True)}  # fmt: skip
    most = {name: max(getattr(plan, name) for plan in plans) for name in ("workspace", "captured", "graphs")}
    policy = sum(plan.policy for plan in plans)
    return replace(plans[0], system=system, draft_weights=sum(copies.values()), policy=policy, **most)


def _largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest n up to upper that fits, 0 if none does; whatever is smaller fits, too."""
    lower = 0
    while lower < upper:
        middle = (lower + upper + 1) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle - 1)
    return lower


def _bytes_per_token(model: ModelConfig, form: CacheFormat) -> int:
    """Bytes of one position of one slot in a cache of this format."""
    return model.kv_bytes_per_token(form.element_bytes(model.head_dim))


def _selections(system: System, entries: int) -> int:
    """Bytes of what a view selects, and of the bounds that it selects by; entries: of the cache, all slots."""
    draft, model = system.draft, system.model
    n_lists = model.n_layers * system.config.batch_size * model.n_kv_heads
    unquantized = entries * model.kv_bytes_per_token(max(system.format.dtype.itemsize, 2))
    return registry.view_class(draft.view_name).bytes_held(draft, n_lists, unquantized) if draft.view_name else 0


def _turned_sinks(system: System) -> int:
    """Bytes of a draft model's sinks as they were, and of turning them, where rows are longer than it has positions."""
    model = system.draft_model
    if model is None or system.config.max_seq_len <= model.max_seq_len:
        return 0
    numbers = model.n_layers * system.config.batch_size * model.n_kv_heads * model.head_dim * system.draft.n_sink
    return 6 * 4 * numbers  # in fp32; as held, turned, two halves and what is written


def _copied(system: System) -> int:
    """Bytes of quantized copies of all models that draft: their heads, and their layers if they have other ones."""
    name, device, total = system.draft.quantize, system.device, 0
    if name is None:
        return 0
    layers = precision(name, device, of_draft=True)
    if layers.shares:  # scales of all of the target's outputs, however many layers draft
        model, tied = system.model, system.model.tie_embeddings
        n_outputs = 0 if tied else -(-model.vocab_size // system.ranks)
        return layers.per_row * n_outputs + bytes_of_layers(model, system.ranks, lambda o, _: layers.per_row * o)
    head = precision(layers.head, device)
    for step, ranks in system.draft_steps():
        shape = step.model
        if system.config.quantize != name or shape is system.draft_model:
            total += bytes_of_layers(shape, ranks, layers.bytes_of)
        total += head.bytes_of(-(-shape.vocab_size // ranks), shape.dim)
    return total


def bytes_of_weights(model: ModelConfig, ranks: int, itemsize: int, quantize: str | None, device: torch.device) -> int:
    """Bytes of a rank's part of a whole model, whose layers are quantized."""
    total = model.n_params // ranks * itemsize
    if quantize is None:
        return total
    entry = precision(quantize, device)
    own = local_config(model, ranks)
    return total + bytes_of_layers(own, ranks, lambda o, i: entry.bytes_of(o, i) - o * i * itemsize)


def bytes_of_layers(shape: ModelConfig, ranks: int, of_matrix: Callable[[int, int], int]) -> int:
    """Bytes of what quantizing changes, the matrices of all layers: of_matrix(rows, columns) each.

    shape: of one of so many ranks, see local_config.
    """
    return shape.n_layers * sum(of_matrix(*sizes) for sizes in matrices_of(shape, ranks).values())


def _launches(system: System) -> int:
    """Launches of all captured rounds that are held at a time, the larger of target and draft model in each step."""
    layers = max(model.n_layers for model, _ in system.shapes)
    steps = steps_held(system.config.max_seq_len, system.draft, system.model.group_size)
    views = registry.policy_class(system.draft.policy).views(system.draft)
    weights = {system.config.quantize, system.draft.quantize}
    widest = system.config.batch_size * (1 + system.draft.max_gamma)
    copies = bool(weights & {"int8", "int4", "planes"}) and widest > MOST_TILED
    others = [
        *(["float8"] * bool(weights & {"float8", "planes"})),
        *(["ranks"] * (system.ranks > 1)),
        *(["copies"] * copies),
    ]
    more = sum(MORE_NODES.get(str(name), 0) for name in {system.format.name, *views, *others})
    return steps * ((LAYER_NODES + more) * layers + STEP_NODES)


def _size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB"
