"""What an engine is built of and runs on, in one object: all that its memory plan depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpt_fast_sd.model import FORMATS, SPLIT, CacheFormat, KVCache, ModelConfig
from gpt_fast_sd.tp import Group, Parallel, local_config

from ..config import EngineConfig
from ..fast import triton_serves
from ..policies import registry
from ..policies.config import DraftConfig
from ..policies.costs import ModelSteps

CPU = torch.device("cpu")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class System:
    """Models, how they are configured to run, and the device of one rank that holds its part of them.

    model, draft_model: shapes of whole models, or after of_rank those of a rank's parts; ranks, draft_ranks: how many
    hold them together. dtype: of weights that are not quantized. weights: bytes of those still to be loaded. groups:
    NCCL's groups of ranks; whole: bytes of the device, in use or not; both count on CUDA only. packs: whether weights
    are packed (see pack_linears) once the caches exist. held: the format of a cache that is there already, whatever
    drafts now.
    """

    config: EngineConfig
    draft: DraftConfig
    model: ModelConfig
    draft_model: ModelConfig | None = None
    dtype: torch.dtype
    device: torch.device = CPU
    ranks: int = 1
    draft_ranks: int = 1
    groups: int = 0
    weights: int = 0
    whole: int = 0
    packs: bool = False
    held: CacheFormat | None = None

    @property
    def in_triton(self) -> bool:
        """Whether its steps attend and select in Triton."""
        return triton_serves(self.device) and self.config.bodies == "fast"

    def of_rank(self, parallel: Parallel) -> System:
        """The part of one rank; ValueError if ranks cannot share a model."""
        ranks, theirs = parallel.group.size, draft_group(self.draft, parallel).size
        return replace(
            self,
            model=local_config(self.model, ranks),
            draft_model=local_config(self.draft_model, theirs) if self.draft_model else None,
            ranks=ranks,
            draft_ranks=theirs,
            groups=len({size for size in (ranks, theirs) if size > 1}),
        )

    @property
    def format(self) -> CacheFormat:
        """How the target's cache holds keys and values: in planes if drafts read one of them."""
        if self.held:
            return self.held
        form = FORMATS[self.config.kv_dtype or dtype_name(self.dtype)]
        return FORMATS["planes"] if form.name == "int8" and self.draft.needs_planes else form

    @property
    def capacity(self) -> int:
        """Entries of a slot's cache, S."""
        return KVCache.splits(self.config.max_seq_len) * SPLIT

    @property
    def shapes(self) -> list[tuple[ModelConfig, int]]:
        """The target and, if there is one, the draft model, each with the number of ranks that hold it."""
        theirs = [(self.draft_model, self.draft_ranks)] if self.draft_model else []
        return [(self.model, self.ranks), *theirs]

    def draft_steps(self) -> list[tuple[ModelSteps, int]]:
        """The steps of models that draft, each with the number of ranks that hold its model.

        ValueError if the draft does not fit the models.
        """
        policy = registry.policy_class(self.draft.policy)
        steps = policy.model_steps(self.draft, self.model, self.draft_model, 1)
        return [(step, self.draft_ranks if step.model is self.draft_model else self.ranks) for step in steps]


def draft_group(draft: DraftConfig, parallel: Parallel) -> Group:
    """The processes that hold a draft model together, never more than those of the target."""
    return parallel.smaller_group(draft.draft_tp or parallel.tp)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype of weights as EngineConfig spells it."""
    return next((name for name, other in TORCH_DTYPES.items() if other == dtype), str(dtype))
