"""scripts/steps.py: the parts of a step are told apart, and add up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from measuring import steps
from measuring.chips import Chip
from scripts.steps import main
from tests.helpers import random_ids, tiny_config, tiny_model

CONFIG = tiny_config(vocab_size=256, dim=64, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128, tie_embeddings=True)
SMALL = EngineConfig(batch_size=2, max_seq_len=512, device="cpu")
CHIP = Chip(name="test", bandwidth=1e9, peak=1e9, memory=1.0)


def test_steps_are_told_apart_and_their_parts_add_up() -> None:
    engine = Engine(
        tiny_model(CONFIG, dtype=torch.bfloat16), config=SMALL, draft=DraftConfig(policy="streaming", gamma=3)
    )
    if not engine.target.bodies.fused:
        pytest.skip("no C++ compiler builds the kernels here")
    prompts = [random_ids(200, seed=seed) for seed in range(2)]
    found, rounds = steps.time_steps(engine, prompts, 12, CHIP)
    assert [(x.kind, x.n_tokens) for x in found] == [("plain", 1), ("draft", 1), ("verify", 4)]
    for step in found:
        assert step.between > 0 and step.products > 0 and step.attention > 0 and step.n >= 1
    plain, _, verify = found
    model = engine.target.model
    weights = sum(x.nbytes for x in (*model.layers.parameters(), model.output.weight))
    keys = 2 * 200 * engine.cache.bytes_per_token
    macs = 2 * (sum(x.numel() for x in model.layers.parameters() if x.dim() == 2) + model.output.weight.numel())
    least = max(weights, 2 * macs) / 1e9 + max(keys, 4 * 2 * 4 * 64 * 200 * 2) / 1e9
    assert plain.least == pytest.approx(1e3 * least) and verify.least > plain.least
    assert [x.speculative for x in rounds] == [False, True] and rounds[0].tokens == 1 and rounds[1].draft > 0
    assert engine.target.bodies.hidden.stack.watched is None


def test_steps_that_are_made_of_operators_are_refused() -> None:
    engine = Engine(tiny_model(CONFIG), config=SMALL)
    with pytest.raises(ValueError, match="steps are timed of models in bf16 on a CPU that has a C\\+\\+ compiler"):
        steps.time_steps(engine, [random_ids(20)] * 2, 4, CHIP)


@pytest.fixture
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are not measured: that takes a minute."""
    monkeypatch.setattr("scripts.steps.rates_here", lambda *_: SimpleNamespace(chip=lambda *_: CHIP))


@pytest.mark.usefixtures("_rates")
def test_the_program_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    n = str(torch.get_num_threads())
    asked = ["--batch", "1", "--context", "100", "--max-new-tokens", "8", "--gamma", "2", "--threads", n]
    assert main([*asked, "--json", str(file)]) == 0
    printed, document = capsys.readouterr().out, json.loads(file.read_text())
    assert "context x batch" in printed and "speculative" in printed
    assert [x["kind"] for x in document["steps"]] == ["plain", "draft", "verify"] and document["settings"]["gamma"] == 2
    assert len(document["rounds"]) == 2 and document["environment"]["instructions"]


@pytest.mark.usefixtures("_rates")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--batch", "0"], "--batch"),
        (["--model", "nowhere"], "nowhere"),
        (["--context", "100000000"], "max_seq_len"),
        (["--budget", "3"], "budget"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(asked)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and "Traceback" not in error
