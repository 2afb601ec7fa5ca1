"""From a model's name to what an engine is built of.

`locate` finds a model, load.py reads it; `plan_for` plans the memory of a `System` on this machine and refuses what
does not run there, as fit.py's `check_...` and `require_...` do; prepare.py makes a model an engine's.
"""

from .fit import check_kv_dtype, check_planes, check_positions, has_room, plan_for, require_fit, require_plain
from .load import BUNDLED, SMOLLM2_COMMAND, find_smollm2, locate, plan_of
from .machine import free_memory, natural_dtype, sensible_threads
from .memory import MemoryPlan, bytes_of_layers, bytes_of_weights
from .prepare import ready_draft, target_of
from .system import TORCH_DTYPES, System, draft_group

__all__ = [
    "BUNDLED",
    "SMOLLM2_COMMAND",
    "TORCH_DTYPES",
    "MemoryPlan",
    "System",
    "bytes_of_layers",
    "bytes_of_weights",
    "check_kv_dtype",
    "check_planes",
    "check_positions",
    "draft_group",
    "find_smollm2",
    "free_memory",
    "has_room",
    "locate",
    "natural_dtype",
    "plan_for",
    "plan_of",
    "ready_draft",
    "require_fit",
    "require_plain",
    "sensible_threads",
    "target_of",
]
