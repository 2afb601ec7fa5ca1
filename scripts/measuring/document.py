"""A run as JSON: its completions, their cost, how they were made and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpt_fast_sd.engine import Engine
from gpt_fast_sd.serving.requests import Completion
from gpt_fast_sd.serving.stats import EngineStats
from measuring.comparing import Comparison
from measuring.machine import environment


def as_record(completion: Completion) -> dict[str, Any]:
    """A completion as JSON."""
    return {
        "index": completion.index,
        "tokens": completion.tokens,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.as_dict(),
    }


def document(
    engine: Engine, model: str, completions: Sequence[Completion], stats: EngineStats, comparison: Comparison | None
) -> dict[str, Any]:
    """The JSON document of a run; model: its name as given."""
    return {
        "completions": [as_record(completion) for completion in completions],
        "stats": stats.as_dict(),
        **({"plain": comparison.as_dict()} if comparison else {}),
        "config": {
            "model": model,
            "engine": asdict(engine.config),
            "draft": asdict(engine.draft),
            "transformer": asdict(engine.model.config),
        },
        "environment": environment(engine.device)
        | {"dp": engine.parallel.dp, "tp": engine.parallel.tp, "bodies": dict(engine.target.bodies.names)},
    }
