"""Programs on a small scale: verify.py, needles.py, evaluate.py and steps.py print, write and go on as they should."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import evaluate
import needles
import verify
from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.loading import BUNDLED
from measuring import lossless, soak
from measuring.chips import Chip
from measuring.lossless import Finding
from scripts.steps import main as steps_main
from scripts.steps import time_steps
from tests.helpers import Refuses, random_ids, tiny_config, tiny_model

DOCUMENT = BUNDLED / "document.txt"
NEEDLES = f"--text {DOCUMENT} --lengths 192 --n 3 --budget 64 --batch-size 2".split()
NEEDLES += ["--draft", "streaming,guided", "--kinds", "needle,prose"]
EVALUATE = f"--text {DOCUMENT} --contexts 128 --lengths 96 --depths 0.5 --entries 2 --n 1 --compared 12".split()
EVALUATE += ["--device", "cpu"]
CONFIG = tiny_config(vocab_size=256, dim=64, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128, tie_embeddings=True)
ENGINE = EngineConfig(batch_size=2, max_seq_len=512, device="cpu")
CHIP = Chip(name="test", bandwidth=1e9, peak=1e9, memory=1.0)


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


# ---- verify.py -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tiny_folder: Path) -> list[str]:
    sizes = ["--batch-size", "2", "--context", "40", "--max-new-tokens", "6"]
    return ["--model", str(tiny_folder), "--no-compile", "--dtype", "fp32", *sizes]


def test_it_prints_a_line_for_each_check_and_writes_what_it_found(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "proof.json"
    assert verify.main([*small, "--budget", "32", "--samples", "40", "--json", str(file)]) == 0
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{small[1]}, fp32, cache fp32, 5 prompts of up to 40 tokens"
    assert second == "drafts: streaming, gamma 4; 2 slots, cpu"
    checks = ["greedy", "samples", "seeds", "refill", "exact"]
    assert [line.split()[:2] for line in lines[:-1]] == [["passed", check] for check in checks]
    assert lines[-1].startswith("all passed, ")
    document = read(file)
    assert document["passed"] and [one["check"] for one in document["findings"]] == checks


def test_one_failed_check_is_named_and_is_exit_code_1(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("greedy", True, "fine"), Finding("seeds", False, "1 of 4 outputs are others")]
    monkeypatch.setattr(lossless, "prove", lambda *_: iter(findings))
    assert verify.main(small) == 1
    out = capsys.readouterr().out
    assert "FAILED  seeds    1 of 4" in out and "FAILED: seeds, " in out


def test_a_soak_goes_through_all_policies(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, drafts = soak.soak, list[str]()

    def short(engine: Any, every: Any, texts: Any, seconds: float, **how: Any) -> soak.Soaked:
        assert seconds == 60
        drafts.extend(draft.policy for draft in every)
        return real(engine, every[1:3], texts, 0, calls=1, **how)

    monkeypatch.setattr(soak, "soak", short)
    assert verify.main([*small, "--soak", "1", "--kv-dtype", "int8"]) == 0
    assert "quantized" not in drafts  # whose cache lies otherwise
    drafts.clear()
    assert verify.main([*small, "--soak", "1", "--kv-dtype", "int8", "--draft", "quantized"]) == 0
    assert "quantized" in drafts
    drafts.clear()
    assert verify.main([*small, "--soak", "1"]) == 0
    assert "passed  soak" in capsys.readouterr().out
    assert [*dict.fromkeys(drafts)] == [
        "off", "full", "streaming", "snapkv", "quest", "guided", "lookup", "early_exit", "hierarchy",
    ]  # fmt: skip


# ---- needles.py ------------------------------------------------------------------------------------------------------


def test_needles_writes_counts_and_spread_of_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refuses: Refuses
) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "needles.json", tmp_path / "needles.png"
    needles.main([*NEEDLES, "--json", str(file), "--plot", str(picture)])
    document = read(file)
    assert [(r["kind"], r["length"], len(r["right"])) for r in document["results"]] == [
        ("needle", 192, 3), ("prose", 192, 3),
    ]  # fmt: skip
    assert [len(s["prompts"]) for r in document["results"] for s in r["settings"]] == [3, 3, 3, 3]
    overall = [r for r in document["summary"] if r["prompts"] == "all"]
    assert [(r["kind"], r["policy"]) for r in overall] == [
        ("needle", "streaming"), ("needle", "guided"), ("prose", "streaming"), ("prose", "guided"),
    ]  # fmt: skip
    for r in overall:
        low, high = r["acceptance_interval"]
        assert r["n"] == 3 and low <= r["acceptance_rate"] <= high
        assert ("over_streaming" in r) == (r["policy"] == "guided")
    assert picture.read_bytes().startswith(b"\x89PNG")
    first = capsys.readouterr().out
    assert "of 3 answered right" in first
    needles.main([*NEEDLES, "--json", str(file)])  # nothing is left to measure, the sums are the same
    assert capsys.readouterr().out.split("\n\n")[1:] == first.split("\n\n")[1:]
    document["results"].pop()
    file.write_text(json.dumps(document))
    needles.main([*NEEDLES, "--json", str(file)])  # what is not there is measured again
    assert len(read(file)["results"]) == 2 and "prose" in capsys.readouterr().out
    assert "was measured with gamma 4, not 2" in refuses(needles.main, *NEEDLES, "--json", file, "--gamma", 2)


def test_the_slots_keep_their_keys_from_policy_to_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled: list[tuple[str, int]] = []
    generate = Engine.generate

    def noting(engine: Engine, *args: Any, speculate: bool = True, **others: Any) -> Any:
        found = generate(engine, *args, speculate=speculate, **others)
        prefilled.append((engine.draft.policy if speculate else "off", engine.stats.prefill_tokens))
        return found

    monkeypatch.setattr(Engine, "generate", noting)
    needles.main([*NEEDLES, "--kinds", "needle"])
    assert [policy for policy, _ in prefilled] == ["off", "streaming", "guided"] * 2
    assert all(n == 0 for policy, n in prefilled if policy != "off")


# ---- evaluate.py -----------------------------------------------------------------------------------------------------


def measured(tmp_path: Path, *flags: str) -> dict[str, Any]:
    evaluate.main([*EVALUATE, *flags, "--json", str(tmp_path / "measured.json")])
    return read(tmp_path / "measured.json")


def test_fewer_bits_are_compared_with_the_same_model_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured(tmp_path, "--kv-dtype", "bf16")
    assert (result["dtype"], result["kv_dtype"], result["quantize"]) == ("fp32", "bf16", None)
    (one,) = result["reference"]["logits"]
    assert (one["book"], one["tokens"]) == ("document", 12)
    assert 0 < one["logit_error"] < 0.05 and one["same_best"] > 0.9 and 0 < one["divergence"] < 0.01
    assert one["perplexity"] == pytest.approx(one["reference_perplexity"], rel=0.05) and one["perplexity"] > 1
    for kind, n in (("needle", 1), ("lookup", 4)):
        for found in (result, result["reference"]):
            assert [r["n"] for r in found[kind]] == [n] and 0 <= found[kind][0]["exact"] <= found[kind][0]["digits"]
    out = capsys.readouterr().out
    assert "Beside bundled, fp32, nothing quantized" in out and "same best token" in out and "Its needles" in out


@pytest.mark.slow
def test_a_model_equals_itself_and_is_compared_with_nothing_unless_asked(tmp_path: Path) -> None:
    (one,) = measured(tmp_path, "--reference", "bundled")["reference"]["logits"]
    assert one["logit_error"] == 0 and one["same_best"] == 1.0 and one["perplexity"] == one["reference_perplexity"]
    assert "reference" not in measured(tmp_path)


def test_default_sizes_are_those_that_fit() -> None:
    assert evaluate.fitting(None, 512, 2, 16384) == [512, 1024, 2048, 4096, 8192, 16384]
    assert evaluate.fitting(None, 1024, 4, 8000) == [1024, 4096] and evaluate.fitting(None, 1024, 4, 300) == [300]
    assert evaluate.fitting([7], 512, 2, 300) == [7]


# ---- steps.py --------------------------------------------------------------------------------------------------------


def test_steps_are_told_apart_and_their_parts_add_up() -> None:
    engine = Engine(
        tiny_model(CONFIG, dtype=torch.bfloat16), config=ENGINE, draft=DraftConfig(policy="streaming", gamma=3)
    )
    if not engine.target.bodies.fused:
        pytest.skip("no C++ compiler builds the kernels here")
    prompts = [random_ids(200, seed=seed) for seed in range(2)]
    found, rounds = time_steps(engine, prompts, 12, CHIP)
    assert [(x["kind"], x["n_tokens"]) for x in found] == [("plain", 1), ("draft", 1), ("verify", 4)]
    for step in found:
        assert all(step[part] > 0 for part in ("between", "products", "attention", "n"))
    plain, _, verify = found
    model = engine.target.model
    weights = sum(x.nbytes for x in (*model.layers.parameters(), model.output.weight))
    keys = 2 * 200 * engine.cache.bytes_per_token
    macs = 2 * (sum(x.numel() for x in model.layers.parameters() if x.dim() == 2) + model.output.weight.numel())
    least = max(weights, 2 * macs) / 1e9 + max(keys, 4 * 2 * 4 * 64 * 200 * 2) / 1e9
    assert plain["least"] == pytest.approx(1e3 * least) and verify["least"] > plain["least"]
    assert [x["speculative"] for x in rounds] == [False, True]
    assert rounds[0]["tokens"] == 1 and rounds[1]["draft"] > 0
    assert engine.target.bodies.hidden.stack.watched is None


def test_steps_that_are_made_of_operators_are_refused() -> None:
    engine = Engine(tiny_model(CONFIG), config=ENGINE)
    with pytest.raises(ValueError, match="steps are timed of models in bf16 on a CPU that has a C\\+\\+ compiler"):
        time_steps(engine, [random_ids(20)] * 2, 4, CHIP)


@pytest.fixture
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are not measured: that takes a minute."""
    monkeypatch.setattr("scripts.steps.rates_here", lambda *_: SimpleNamespace(chip=lambda *_: CHIP))


@pytest.mark.usefixtures("_rates")
def test_the_program_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    n = str(torch.get_num_threads())
    asked = ["--batch", "1", "--context", "100", "--max-new-tokens", "8", "--gamma", "2", "--threads", n]
    assert steps_main([*asked, "--json", str(file)]) == 0
    printed, document = capsys.readouterr().out, read(file)
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
        steps_main(asked)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and "Traceback" not in error
