"""What cannot be is refused when it is built, in a sentence that names the field and the value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams

REFUSED: list[tuple[type, dict[str, Any]]] = [
    *((EngineConfig, {"batch_size": value}) for value in (0, -1, 2.0, "8", True, None)),
    *((EngineConfig, {"max_seq_len": value}) for value in (0, -5, 8192.0, False)),
    *((EngineConfig, {"device": value}) for value in ("gpu", "CPU", "cuda:0", None)),
    *((EngineConfig, {"dtype": value}) for value in ("float32", "bfloat16", "int8", None)),
    *((EngineConfig, {"kv_dtype": value}) for value in ("auto", "int8", "float16")),
    *((EngineConfig, {"quantize": value}) for value in ("int4wo", "INT8", "", True)),
    *((DraftConfig, {"policy": value}) for value in ("none", "Off", "", None)),
    *((DraftConfig, {"budget": value}) for value in (0, -1, 1.5, "256")),
    *((DraftConfig, {"gamma": value}) for value in (0, -3, 2.5, "4", "Auto", None, True)),
    *((SamplingParams, {"max_tokens": value}) for value in (0, -1, 1.0, None)),
    *((SamplingParams, {"temperature": value}) for value in (-0.1, -1, math.inf, math.nan)),
    *((SamplingParams, {"top_k": value}) for value in (0, -1, 2.0)),
    *((SamplingParams, {"top_p": value}) for value in (0, 0.0, -0.5, 1.01, math.nan)),
    *((SamplingParams, {"min_p": value}) for value in (-0.01, 1.5, math.nan)),
    *((SamplingParams, {"seed": value}) for value in (-1, 2**63, 1.0, "7")),
    *((SamplingParams, {"stop": value}) for value in ("", ["a", ""], [3], ("x", None))),
]


@pytest.mark.parametrize(("config", "fields"), REFUSED, ids=[f"{c.__name__} {f}" for c, f in REFUSED])
def test_nonsense_is_refused_by_name(config: type, fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=name) as caught:
        config(**fields)
    shown = str(caught.value)
    assert repr(value) in shown or str(value) in shown
    assert "\n" not in shown


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (EngineConfig, {"batch_size": 1, "max_seq_len": 1}),
        (EngineConfig, {"dtype": "bf16", "kv_dtype": "fp16", "quantize": "int8", "device": "cpu", "compile": False}),
        (DraftConfig, {"policy": "off", "budget": 1, "gamma": 1}),
        (SamplingParams, {"max_tokens": 1, "temperature": 0, "top_k": 1, "top_p": 1, "min_p": 0, "seed": 0}),
        (SamplingParams, {"temperature": 5, "top_p": 1e-6, "min_p": 1.0, "seed": 2**63 - 1, "stop": []}),
    ],
    ids=str,
)
def test_the_edges_of_what_can_be_are_taken(config: type, fields: dict[str, Any]) -> None:
    built = config(**fields)
    assert {name: getattr(built, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, ()), ("end", ("end",)), (["a", "b c"], ("a", "b c")), (("x",), ("x",)), ([], ())],
)
def test_stop_is_one_string_or_several(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize("config", [EngineConfig, DraftConfig, SamplingParams])
def test_a_configuration_never_changes_and_takes_no_unknown_name(config: type) -> None:
    built = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(built, dataclasses.fields(built)[0].name, 1)
    with pytest.raises(TypeError, match="beam_width"):
        config(beam_width=4)
    with pytest.raises(TypeError):
        config(1)


def test_a_configuration_can_be_copied_with_a_change() -> None:
    params = dataclasses.replace(SamplingParams(stop=["a"], seed=3), stop="b", max_tokens=5)
    assert (params.stop_strings, params.seed, params.max_tokens) == (("b",), 3, 5)
    with pytest.raises(ValueError, match="max_tokens"):
        dataclasses.replace(params, max_tokens=0)
