"""An invalid configuration is refused when it is built, in a sentence that names the field and the value."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.policies.config import GAMMA_TIERS, further_tiers, gamma_tiers

NONSENSE: list[tuple[type, str, tuple[Any, ...]]] = [
    (EngineConfig, "batch_size", (0, -1, 2.0, "8", True, None, 2**31)),
    (EngineConfig, "max_seq_len", (0, -5, 8192.0, False, 10**30)),
    (EngineConfig, "device", ("gpu", "CPU", "cuda:0", None)),
    (EngineConfig, "dtype", ("float32", "bfloat16", "int8", None)),
    (EngineConfig, "kv_dtype", ("auto", "int4", "INT8", "float16")), (EngineConfig, "compile", (1, "yes", None)),
    (EngineConfig, "exact", (0, "bits", None)), (EngineConfig, "quantize", ("int4wo", "INT8", "", True)),
    (DraftConfig, "policy", ("none", "Off", "", None)), (DraftConfig, "budget", (0, -1, 1.5, "256", 2**31)),
    (DraftConfig, "gamma", (0, -3, 17, 2.5, "4", "Auto", None, True)),
    *((DraftConfig, name, (0, -1, 2.0, None, True, 2**63)) for name in ("ngram", "n_sink", "page")),
    (DraftConfig, "page", (8, 17, 256)), (DraftConfig, "refresh", (0, -1, 2.0, True, "64", "on", 2**63)),
    (DraftConfig, "cheap", ("streaming", "Lookup", None)), (SamplingParams, "max_tokens", (0, -1, 1.0, None)),
    (SamplingParams, "temperature", (-0.1, -1, math.inf, math.nan, True, "1", 1e39, 10**30 * 10**30)),
    (SamplingParams, "top_k", (0, -1, 2.0)), (SamplingParams, "top_p", (0, 0.0, -0.5, 1.01, math.nan, True)),
    (SamplingParams, "min_p", (-0.01, 1.5, math.nan, False)), (SamplingParams, "seed", (-1, 2**63, 1.0, "7")),
    (SamplingParams, "stop", ("", ["a", ""], [3], ("x", None), 0, False, 7)),
    (
        SamplingParams,
        "stop_token_ids",
        (3, "3", b"3", [-1], [True], [1.5], [np.int64(7)], np.array([5]), torch.ones(2)),
    ),
    (SamplingParams, "ignore_eos", ("false", "yes", 1, None, [])),
]  # fmt: skip
REFUSED = [(config, name, value) for config, name, values in NONSENSE for value in values]


@pytest.mark.parametrize(("config", "name", "value"), REFUSED, ids=[f"{c.__name__} {n}={v}" for c, n, v in REFUSED])
def test_nonsense_is_refused_by_name(config: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        config(**{name: value})
    shown = str(caught.value)
    assert repr(value) in shown or str(value) in shown
    assert "\n" not in shown


OVER = {"policy": "hierarchy", "cheap": "standalone", "draft_model": "m"}
OWN_VIEWS = ("off", "full", "streaming", "snapkv", "quest", "guided", "lookup", "quantized")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"policy": "early_exit", "exit_layers": n}, f"exit_layers must be .* at least 1, got {n}") for n in (0, -2)),
        ({"policy": "early_exit", "exit_layers": "2"}, "exit_layers must be .* got '2'"),
        ({"policy": "streaming", "exit_layers": 2}, "exit_layers is for policy 'early_exit', got policy 'streaming'"),
        ({"policy": "standalone"}, "'standalone' .* needs draft_model"),
        ({"policy": "hierarchy", "cheap": "standalone"}, "'hierarchy' .* needs draft_model"),
        ({"policy": "streaming", "draft_model": "m"}, "draft_model is for policy 'standalone' .* got 'streaming'"),
        ({"policy": "hierarchy", "draft_model": "m"}, "draft_model is for .* got 'hierarchy'"),  # lookup drafts for it
        *(({"policy": p, "view": "streaming"}, f"view is for .*; policy '{p}' is its own") for p in OWN_VIEWS),
        ({"policy": "early_exit", "view": "all"}, "view must be one of .*, got 'all'"),
        ({"policy": "standalone", "draft_model": "m", "view": "guided"}, "view 'guided' needs the target's own cache"),
        ({"policy": "lookup", "quantize": "int8"}, "quantize 'int8' is for a model that drafts: policy 'lookup'"),
        ({"policy": "standalone", "draft_model": "m", "quantize": "planes"}, "'planes' is of a target's own weights"),
        ({"policy": "streaming", "quantize": "int3"}, "quantize must be one of int8, int4, float8, planes, got 'int3'"),
        ({"policy": "streaming", "budget": 11}, "budget must be at least 12 for streaming, got 11"),
        ({"policy": "streaming", "n_sink": 9, "budget": 16}, "budget must be at least 17 for streaming, got 16"),
        ({"policy": "snapkv", "budget": 63}, "budget must be at least 64 for snapkv, got 63"),
        ({"policy": "quest", "budget": 47}, "budget must be at least 48 for quest, got 47"),
        ({"policy": "guided", "budget": 47}, "budget must be at least 48 for guided, got 47"),
        ({"policy": "quest", "page": 32, "budget": 95}, "budget must be at least 96 for quest, got 95"),
        ({"policy": "early_exit", "budget": 11}, "budget must be at least 12 for streaming, got 11"),
        ({"policy": "hierarchy", "view": "quest", "budget": 47}, "budget must be at least 48 for quest, got 47"),
        # for the cheap level's window
        (OVER | {"view": "full", "budget": 5}, "budget must be at least 12 for streaming, got 5"),
        (
            {"policy": "snapkv", "draft_tp": 1},
            "draft_tp is for a draft_model: policy 'snapkv' drafts with the target's own",
        ),
        (OVER | {"draft_tp": 0}, "draft_tp must be a whole number of at least 1, got 0"),
        *(({"policy": "streaming", "kv_bits": n}, f"kv_bits must be 4, got {n!r}") for n in (8, 2, 0, "4")),
        ({"kv_bits": 4}, "kv_bits 4 is for drafts from the target's own cache, which policy 'off' does not read"),
        ({"policy": "standalone", "draft_model": "m", "kv_bits": 4}, "which policy 'standalone' does not read"),
    ],
    ids=str,
)
def test_a_draft_whose_fields_do_not_fit_each_other_is_refused_in_a_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        DraftConfig(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "view", "most"),
    [
        ({}, None, 0), ({"policy": "full"}, "full", max(GAMMA_TIERS)),
        ({"policy": "streaming", "gamma": 16}, "streaming", 16),
        ({"policy": "lookup", "budget": 1, "gamma": 2}, None, 2),
        ({"policy": "standalone", "draft_model": "m", "view": "snapkv", "gamma": 1}, "snapkv", 1),
        ({"policy": "hierarchy", "view": "guided", "gamma": 3}, "guided", 3), (OVER | {"gamma": 3}, "streaming", 3),
    ],
    ids=str,
)  # fmt: skip
def test_a_draft_knows_its_view_and_how_far_it_looks_ahead(fields: dict[str, Any], view: str | None, most: int) -> None:
    draft = DraftConfig(**fields)
    assert (draft.view_name, draft.max_gamma) == (view, most)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (EngineConfig, {"batch_size": 1, "max_seq_len": 1}),
        (EngineConfig, {"dtype": "bf16", "kv_dtype": "fp16", "quantize": "int8", "device": "cpu", "compile": False}),
        (EngineConfig, {"exact": True, "dtype": "bf16"}),  # with any policy, "off" too
        (DraftConfig, {"policy": "off", "budget": 1, "gamma": 1}),
        (DraftConfig, {"policy": "streaming", "budget": 12, "gamma": 16}),
        (DraftConfig, {"policy": "guided", "budget": 2**31 - 1, "refresh": 2**31 - 1}),
        (DraftConfig, {"policy": "streaming", "budget": 9, "n_sink": 1}),
        (DraftConfig, {"policy": "quest", "budget": 48, "page": 16}),
        (DraftConfig, {"policy": "guided", "budget": 384, "page": 128, "refresh": 1}),
        (DraftConfig, {"policy": "lookup", "budget": 1, "ngram": 1}),
        (DraftConfig, {"policy": "early_exit", "exit_layers": 1, "view": "full", "budget": 1}),
        (SamplingParams, {"max_tokens": 1, "temperature": 0, "top_k": 1, "top_p": 1, "min_p": 0, "seed": 0}),
        (SamplingParams, {"temperature": np.float64(0.5), "min_p": np.linspace(0, 1, 3)[1]}),
        (SamplingParams, {"temperature": 5, "top_p": 1e-6, "min_p": 1.0, "seed": 2**63 - 1, "stop": []}),
    ],
    ids=str,
)
def test_the_edges_of_what_can_be_are_taken(config: type, fields: dict[str, Any]) -> None:
    built = config(**fields)
    assert {name: getattr(built, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("end", ("end",)), (["a", "b c"], ("a", "b c")), (("x",), ("x",)), ([], ())]
)
def test_stop_is_one_string_or_several(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


def test_parameters_are_made_anew_from_what_they_hold_and_from_numbers_of_numpy_and_torch() -> None:
    given = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(4), seed=torch.tensor(5), stop=("a", "b")
    )  # type: ignore[arg-type]
    assert given == SamplingParams(max_tokens=3, temperature=0.5, top_k=4, seed=5, stop=("a", "b"))
    assert SamplingParams(**dataclasses.asdict(given)) == given and type(given.seed) is type(given.max_tokens) is int


@pytest.mark.parametrize("made", [Engine, Engine.from_pretrained])
def test_what_is_no_configuration_is_refused_before_anything_is_read(made: Callable[..., Engine]) -> None:
    for config, draft, said in (({"device": "cpu"}, None, "config must be EngineConfig(...), got {'device': 'cpu'}"),
                                ("cpu", None, "config must be EngineConfig(...), got 'cpu'"),
                                (None, {"gamma": 3}, "draft must be DraftConfig(...), got {'gamma': 3}")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            made("nowhere", config=config, draft=draft)


@pytest.mark.parametrize("config", [EngineConfig, DraftConfig, SamplingParams])
def test_a_configuration_never_changes_and_takes_no_unknown_name(config: type) -> None:
    built = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(built, dataclasses.fields(built)[0].name, 1)
    with pytest.raises(TypeError, match="beam_width"):
        config(beam_width=4)
    with pytest.raises(TypeError):
        config(1)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_auto_never_asks_for_a_tile_that_one_token_less_would_halve(group: int) -> None:
    """Attention serves up to 64 rows of a kv head in one tile, or up to 128: 9 tokens of 8 heads are 72."""
    rows = group * (1 + max(gamma_tiers(group)))
    assert rows <= (64 if group <= 8 else 128)
    assert len(gamma_tiers(group)) == len(GAMMA_TIERS)  # as many graphs for every model
    assert max(gamma_tiers(group)) < min(further_tiers(group)) and max(further_tiers(group)) in (15, 16)
