"""The measurements of benchmark.py: each has its points, its file, and what it prints."""

from measuring.modes.budget import ByBudget
from measuring.modes.lossless import Lossless
from measuring.modes.mode import Job, Mode, NothingMeasured, OutputsDiffer, describe, params_of
from measuring.modes.precision import ByPrecision
from measuring.modes.size import BySize

__all__ = [
    "ByBudget", "ByPrecision", "BySize", "Job", "Lossless", "Mode", "NothingMeasured", "OutputsDiffer", "describe",
    "params_of",
]  # fmt: skip
