"""Numbers and values that made no sense, and were once taken or ended in a traceback."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import CheckpointError, read_config
from scripts import generate
from tests.helpers import tiny_model


def test_a_top_p_that_rounds_to_0_leaves_the_best_token() -> None:
    """Every token was id 0: of nothing that is kept the softmax is NaN."""
    engine = Engine(tiny_model(), None, EngineConfig(batch_size=1, max_seq_len=64, compile=False))
    params = [SamplingParams(max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=8, ignore_eos=True, seed=1,
              temperature=1.0, top_p=1e-46)]  # fmt: skip
    greedy, sampled = engine.generate([[3, 1, 4], [3, 1, 4]], params)
    assert sampled.tokens == greedy.tokens


@pytest.mark.parametrize("field", ["hidden_size", "rope_theta", "vocab_size", "rms_norm_eps"])
def test_a_config_of_400_digits_is_refused(tmp_path: Path, field: str) -> None:
    raw = json.loads((BUNDLED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: 10**399}))
    shutil.copy(BUNDLED / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        read_config(tmp_path)
        Engine.from_pretrained(tmp_path, EngineConfig(compile=False))
    assert isinstance(caught.value, CheckpointError) and "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["quest", "snapkv", "streaming", "guided"])
def test_a_budget_beyond_the_cache_holds_what_all_of_it_needs(policy: str) -> None:
    """A billion entries were listed, sorted and waited for over a cache of a few hundred."""
    held, tokens, budgets = [], [], [10**9]
    for budget in budgets:
        draft = DraftConfig(policy=policy, budget=budget, gamma=2)
        engine = Engine(tiny_model(), None, EngineConfig(batch_size=1, max_seq_len=256, compile=False), draft)
        budgets += [engine.cache.capacity] * (len(budgets) == 1)
        tokens.append(engine.generate([[3, 1, 4]], SamplingParams(max_tokens=8, ignore_eos=True))[0].tokens)
        own = engine.schedule.rounds.policy
        assert own is not None
        parts = [
            *vars(own).values(),
            *(part for one in vars(own).values() for part in getattr(one, "__dict__", {}).values()),
        ]
        flat = [x for part in parts for x in (part if isinstance(part, list) else [part])]
        held.append(sorted(tuple(x.shape) for x in flat if isinstance(x, torch.Tensor)))
    assert tokens[0] == tokens[1] and held[0] == held[1] and held[0]


@pytest.mark.parametrize("model", [None, 7, b"x"])
def test_what_is_no_model_is_a_value_error(model: Any) -> None:
    with pytest.raises(ValueError):
        Engine.from_pretrained(model)


def test_a_tensor_for_prompts_and_a_number_for_a_model_are_one_sentence() -> None:
    engine = Engine(tiny_model(), None, EngineConfig(batch_size=1, max_seq_len=64, compile=False))
    two: Any = torch.zeros(2, 3, dtype=torch.int64)
    for prompts in (two, [two]):
        with pytest.raises(ValueError, match="must be") as caught:
            engine.generate(prompts)
        assert "\n" not in str(caught.value)
    number: Any = 7
    with pytest.raises(ValueError, match="draft_model must be a folder or a hub id, got 7"):
        DraftConfig(policy="standalone", draft_model=number)


@pytest.mark.parametrize(
    ("environment", "flags", "said"),
    [
        ({"RANK": "x"}, [], "generate.py, rank x: RANK must be a whole number, as torchrun sets it, got 'x'"),
        ({"WORLD_SIZE": "2.0"}, [], "generate.py: WORLD_SIZE must be a whole number, as torchrun sets it, got '2.0'"),
        ({}, ["--model", "~nobody-of-this-name/x"], "generate.py: no folder ~nobody-of-this-name/x, and "),
        ({}, ["--prompt-file", "/dev/zero"], "generate.py: /dev/zero has more than 1,000 bytes"),
    ],
)
def test_what_is_absurd_around_a_program_is_one_sentence(
    environment: dict[str, str], flags: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr("measuring.prompts.LONGEST_TEXT", 1000)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", "bundled", *(flags or ["--prompt", "One"])])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.startswith(said) and len(err.splitlines()) == 1
