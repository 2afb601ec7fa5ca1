"""Beside a quantized target is told how fast nothing quantized is, or why that is not known."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import comparing
from gpt_fast_sd.config import EngineConfig
from tests.helpers import Patch


def told(monkeypatch: Patch, found: str | None, *, everywhere: bool) -> object:
    """What is told of the unquantized model, whose engine has this precision here, and can do nothing."""
    other = mock.MagicMock(spec_set=["config", "__enter__", "__exit__"], config=EngineConfig(quantize=found))
    monkeypatch.setattr(comparing.Engine, "from_pretrained", lambda *_, **__: other)
    parallel = SimpleNamespace(everywhere=lambda holds: holds and everywhere)
    engine: Any = SimpleNamespace(config=EngineConfig(quantize="float8"), parallel=parallel, on_progress=None)
    return comparing.plainly_unquantized(engine, "model", [[1]], [], 1)


def test_where_another_rank_has_no_room_for_it_no_rank_waits(monkeypatch: Patch) -> None:
    assert told(monkeypatch, None, everywhere=False) == "not every process has room for it"


def test_a_checkpoint_that_stays_float8_is_not_called_unquantized(monkeypatch: Patch) -> None:
    said = told(monkeypatch, "float8", everywhere=True)
    assert said == "its checkpoint stores weights in float8, which run as they are"
