"""What tests of gpu_suite.py share: a dry setup, results of its stages through JSON and back, its file of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from measuring.gpu.setup import Setup
from measuring.gpu.stages import DONE, STAGES, Stage
from measuring.ledger import Ledger

Record = dict[str, Any]
SETTINGS = {"device": "cpu", "tiny": True, "pairs": 1, "max_autotune": False, "texts": []}


def dry_setup(out: Path = Path(), **known: Record) -> Setup:
    return Setup(device=torch.device("cpu"), tiny=True, pairs=1, max_autotune=False, texts=(), out=out, known=known)


def dry_run(stage: str, **known: Record) -> Record:
    """What the stage finds, through JSON and back."""
    result: Record = json.loads(json.dumps(STAGES[stage].run(dry_setup(**known))))
    return result


def a_ledger(out: Path, *, fresh: bool = False, **changes: Any) -> Ledger:
    """OUT/results.json."""
    settings = SETTINGS | changes
    return Ledger(out / "results.json", "gpu_suite", settings, {}, fresh=fresh, results="stages")


def found(ledger: Ledger, stage: str, result: Record) -> None:
    """A stage has found this."""
    ledger.put({"stage": stage}, {"stage": stage, "status": DONE, "seconds": 1.0, "result": result})


class FakeProcesses:
    """Launches nothing; every stage comes to the end it was given, done if none."""

    def __init__(self, **ends: Record) -> None:
        self.ends, self.launched = ends, list[str]()

    def __call__(self, stage: Stage, timeout: float) -> Record:
        assert timeout > 0
        self.launched.append(stage.name)
        return dict(self.ends.get(stage.name, {"status": DONE, "result": {"ok": True}}))
