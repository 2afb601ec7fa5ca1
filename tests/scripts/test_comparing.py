"""Beside a quantized target is told how fast nothing quantized is, or why that is not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comparing
from gpt_fast_sd.config import EngineConfig
from tests.helpers import Patch


class Other:
    """An engine that must not decode."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is a step that all ranks share")


def told(monkeypatch: Patch, other: Other, *, everywhere: bool) -> object:
    """What is told of the unquantized model, whose engine is this one here."""
    monkeypatch.setattr(comparing.Engine, "from_pretrained", lambda *_, **__: other)
    parallel = SimpleNamespace(everywhere=lambda holds: holds and everywhere)
    engine: Any = SimpleNamespace(config=EngineConfig(quantize="float8"), parallel=parallel, on_progress=None)
    return comparing.plainly_unquantized(engine, "model", [[1]], [], 1)


def test_where_another_rank_has_no_room_for_it_no_rank_waits(monkeypatch: Patch) -> None:
    assert told(monkeypatch, Other(EngineConfig()), everywhere=False) == "not every process has room for it"


def test_a_checkpoint_that_stays_float8_is_not_called_unquantized(monkeypatch: Patch) -> None:
    said = told(monkeypatch, Other(EngineConfig(quantize="float8")), everywhere=True)
    assert said == "its checkpoint stores weights in float8, which run as they are"
