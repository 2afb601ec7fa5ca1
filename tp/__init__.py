"""Where tensors live: a mesh of processes, and the plan by which a model is shared among them.

It exports `start`, which joins the processes that torchrun started to a `Parallel`; the `Group` of ranks that
hold one model together, which loads or shards it by `PLAN`; the `Vocabulary` that they share; the `Agreement`, which
checks that they do the same; `take_device`, which finds the device of one of them, and `why_no_cuda`.
"""

from .agree import Agreement, Disagreement
from .collectives import broadcast, sum_in_order
from .devices import in_short, take_device, why_no_cuda
from .mesh import TIMEOUT, DoneEvent, Parallel, start
from .plan import ALONE, PLAN, Group, collectives_per_step, local_config
from .vocab import Vocabulary

__all__ = [
    "ALONE",
    "PLAN",
    "TIMEOUT",
    "Agreement",
    "Disagreement",
    "DoneEvent",
    "Group",
    "Parallel",
    "Vocabulary",
    "broadcast",
    "collectives_per_step",
    "in_short",
    "local_config",
    "start",
    "sum_in_order",
    "take_device",
    "why_no_cuda",
]
