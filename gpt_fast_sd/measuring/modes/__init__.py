"""The measurements of benchmark.py: each has its points, its file, and what it prints."""

from .budget import ByBudget
from .lossless import Lossless
from .mode import Job, Mode, NothingMeasured, OutputsDiffer, describe, params_of
from .precision import ByPrecision
from .size import BySize

__all__ = [
    "ByBudget", "ByPrecision", "BySize", "Job", "Lossless", "Mode", "NothingMeasured", "OutputsDiffer", "describe",
    "params_of",
]  # fmt: skip
