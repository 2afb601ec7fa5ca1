"""Numbers and values that made no sense, and were once taken or ended in a traceback."""

import time
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from scripts import generate
from tests.helpers import tiny_engine


@pytest.mark.parametrize("policy", ["quest", "snapkv", "streaming", "guided"])
def test_a_budget_beyond_the_cache_holds_what_all_of_it_needs(policy: str) -> None:
    """A billion entries were listed, sorted and waited for over a cache of a few hundred."""
    held, tokens = [], []
    for budget in (10**9, 512):
        engine = tiny_engine(DraftConfig(policy=policy, budget=budget, gamma=2), batch_size=1, max_seq_len=256)
        tokens.append(engine.generate([[3, 1, 4]], SamplingParams(max_tokens=8, ignore_eos=True))[0].tokens)
        parts = [*vars(engine.schedule.rounds.policy).values()]
        parts += [inner for part in parts for inner in getattr(part, "__dict__", {}).values()]
        flat = [x for part in parts for x in (part if isinstance(part, list) else [part])]
        held.append(sorted(tuple(x.shape) for x in flat if isinstance(x, torch.Tensor)))
    assert engine.cache.capacity == 512 and tokens[0] == tokens[1] and held[0] == held[1] and held[0]


@pytest.mark.parametrize("model", [None, 7, b"x"])
def test_what_is_no_model_is_a_value_error(model: Any) -> None:
    with pytest.raises(ValueError):
        Engine.from_pretrained(model)
    if model is not None:
        with pytest.raises(ValueError, match="draft_model must be a folder or a hub id, got "):
            DraftConfig(policy="standalone", draft_model=model)


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
    monkeypatch.setattr("inputs.prompts.LONGEST_TEXT", 1000)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", "bundled", *(flags or ["--prompt", "One"])])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.startswith(said) and len(err.splitlines()) == 1
