"""lm_eval's door: texts are encoded, cut, scored and continued as lm_eval's own model hf does it."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import harness
from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from tests.helpers import Patch, Refuses

BUNDLED = Path(harness.__file__).parents[1] / "gpt_fast_sd/bundled"
CONTEXT = "The harbour was quiet, and the keeper's boy"
PAIRS = [
    *((CONTEXT, f" {words}") for words in ("wrote it down.", "wrote 17 lines", "slept", "rowed", "wrote it")),
    ("", "A lamp was lit."), ("The wind, ", "he said"), ("<s>Who", " was it?"), ("so " * 200, " far away"),
]  # fmt: skip
TEXTS = ["The lamp burned all night. " * 30, "A short one", "<s>"]
CUT = {"max_seq_len": 96, "dtype": "fp32", "no_compile": True}


@pytest.fixture(scope="module")
def ours() -> Any:
    made: Any = harness.Harness("bundled", draft="lookup", batch_size="2", **CUT)
    made.cache_hook, made.kept = SimpleNamespace(add_partial=lambda *args: made.kept.append(args)), []
    return made


def asked(pairs: Any) -> list[Any]:
    return [SimpleNamespace(args=args, task_name="a task") for args in pairs]


def test_model_args_are_flags_by_name() -> None:
    config, draft = harness.configs("bundled", {"batch_size": "3", "draft": "streaming", "budget": 64, **CUT})
    assert config == EngineConfig(batch_size=3, max_seq_len=96, dtype="fp32", compile=False)
    assert draft == DraftConfig(policy="streaming", budget=64)
    config, draft = harness.configs("bundled", {"reference": True, "device": "cuda:0"})
    assert config == EngineConfig(batch_size=1, max_seq_len=16384, bodies="reference") and draft == DraftConfig()
    for args, said in (
        ({"budge": 64}, "--model_args has the unknown 'budge'; there are pretrained, batch_size, "),
        ({"batch_size": "auto"}, "batch_size must be a whole number of at least 1, got 'auto'"),
        ({"dtype": "float32"}, "dtype must be one of auto, fp32"),
        ({"draft": "lookup", "budget": 64}, "--budget does nothing for --draft lookup"),
    ):
        with pytest.raises(ValueError, match=said):
            harness.configs("bundled", args)


def test_bos_comes_first_once_and_of_what_is_too_long_the_end_stays(ours: Any) -> None:
    assert harness.window([1, 2, 3], [4, 5], 4) == ([1, 2, 3, 4, 5], 2)  # the last one is not fed
    assert harness.window([1, 2, 3], [4, 5], 3) == ([2, 3, 4, 5], 2)
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"must have 1 to 4 tokens, as max_seq_len says, got {n}"):
            harness.window([1], [2] * n, 4)
    ids = ours.tokens.encode("It was", bos=False)
    assert ours.tok_encode("It was") == [1, *ids] and ours.tok_encode("It was", add_special_tokens=False) == ids
    assert ours.tok_encode("<s>It was")[:2].count(1) == 1 and ours.tok_encode("It was", None, 1) == ids[-1:]


def test_what_can_be_asked_of_a_continuation() -> None:
    greedy = {"max_gen_toks": 9, "until": ["", "\n"], "do_sample": False, "temperature": 0.0}
    params = harness.sampling(greedy, 5)
    assert (params.max_tokens, params.stop_strings, params.temperature, params.seed) == (9, ("\n",), 0.0, 5)
    params = harness.sampling({**greedy, "do_sample": True, "temperature": 0.7, "top_p": 0.9}, 5)
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 50, 0.9)
    with pytest.raises(ValueError, match=r"unknown generation_kwargs \['num_beams'\]"):
        harness.sampling({**greedy, "num_beams": 4}, 5)


def test_without_lm_eval_a_sentence_says_what_to_install(monkeypatch: Patch, refuses: Refuses) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "lm_eval", None)
    monkeypatch.setattr("sys.argv", ["harness.py"])
    assert 'pip install -e ".[eval]"' in refuses(harness.main, "ls", "tasks")


def test_scores_are_those_of_the_last_tokens_and_go_into_the_cache(ours: Any) -> None:
    ids = [ours.tok_encode(CONTEXT), *(ours.tok_encode(f" {word}", False) for word in ("slept", "rowed"))]
    found = ours._loglikelihood_tokens([(("a", "b"), ids[0], ids[1]), (None, ids[0], ids[2])])
    engine: Engine = ours.engine
    for (total, best), continuation in zip(found, ids[1:], strict=True):
        logits = engine.logits([*ids[0], *continuation])[len(ids[0]) - 1 : -1]
        each = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])
        assert math.isclose(total, each.sum().item(), rel_tol=1e-5)
        assert best == (logits.argmax(-1).tolist() == continuation)
    assert ours.kept == [("loglikelihood", ("a", "b"), found[0])]


def test_all_is_as_lm_eval_finds_it_of_transformers() -> None:
    pytest.importorskip("lm_eval")
    harness.register()
    get = importlib.import_module("lm_eval.api.registry").get_model
    ours = get("gpt_fast_sd")(pretrained="bundled", draft="lookup", batch_size=2, **CUT)
    theirs = get("hf")(pretrained=str(BUNDLED), dtype="float32", device="cpu", max_length=CUT["max_seq_len"])
    for (mine, best), (other, same) in zip(*(m.loglikelihood(asked(PAIRS)) for m in (ours, theirs)), strict=True):
        assert math.isclose(mine, other, rel_tol=1e-5, abs_tol=1e-4) and best == same  # fp32, summed in other orders
    rolling = [model.loglikelihood_rolling(asked((text,) for text in TEXTS)) for model in (ours, theirs)]
    torch.testing.assert_close(*map(torch.tensor, rolling), rtol=1e-5, atol=1e-4)
    how = {"until": [".", "\n\n"], "max_gen_toks": 24}
    wanted = asked([(context, how) for context in (CONTEXT, "so " * 200 + "far", "The lamp", "", CONTEXT)])
    wanted += asked([(CONTEXT, {"until": [], "max_gen_toks": 9}), (CONTEXT, {"max_gen_toks": 9})])
    assert ours.generate_until(wanted) == theirs.generate_until(wanted)
