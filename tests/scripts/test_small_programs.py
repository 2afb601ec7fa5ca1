"""Programs on a small scale: verify, needles, evaluate, steps and plan print, write and go on as they should."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import evaluate
import needles
import plan
import verify
from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.loading import BUNDLED
from measuring import lossless, soak
from measuring.chips import Chip
from measuring.lossless import Finding
from scripts.steps import main as steps_main
from scripts.steps import time_steps
from tests.helpers import DATA, Patch, Printed, Refuses, random_ids, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = BUNDLED / "document.txt"
NEEDLES = f"--text {DOCUMENT} --lengths 192 --n 3 --budget 64 --batch-size 2".split()
NEEDLES += ["--draft", "streaming,guided", "--kinds", "needle,prose"]
EVALUATE = f"--text {DOCUMENT} --contexts 128 --lengths 96 --depths 0.5 --entries 2 --n 1 --compared 12".split()
EVALUATE += ["--device", "cpu"]
CONFIG = tiny_config(vocab_size=256, dim=64, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128, tie_embeddings=True)
ENGINE = EngineConfig(batch_size=2, max_seq_len=512, device="cpu")
CHIP = Chip(name="test", bandwidth=1e9, peak=1e9, memory=1.0)


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_wait_for_little_time_unless_they_are_told_to(given: dict[str, str]) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
    told = [sys.executable, "-c", "import gpt_fast_sd, os; print(os.environ.get('GOMP_SPINCOUNT'))"]
    said = subprocess.run(told, cwd=ROOT, env=env, text=True, capture_output=True, check=True).stdout
    assert said.strip() == ("None" if "OMP_WAIT_POLICY" in given else given.get("GOMP_SPINCOUNT", "1000"))


# all but those that decode on no kernel of a CPU, and peers, whose children are others' engines, too
OTHERS = "gpu_suite", "minimal", "peers"
FILES = sorted((ROOT / "scripts").glob("*.py"))
PROGRAMS = [path for path in FILES if path.stem not in OTHERS and "__main__" in path.read_text()]
AT_TORCH = """import os, runpy, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv[1], run_name="__main__")"""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_threads_wait_before_torch_is_loaded(program: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = [sys.executable, "-c", AT_TORCH, str(program), "--help"]
    assert subprocess.run(told, cwd=ROOT, env=env, text=True, capture_output=True).stdout.split()[:1] == ["1000"]


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


# ---- verify.py -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tiny_folder: Path) -> list[str]:
    sizes = ["--batch-size", "2", "--context", "40", "--max-new-tokens", "6"]
    return ["--model", str(tiny_folder), "--no-compile", "--dtype", "fp32", *sizes]


def test_each_check_is_a_line_and_is_written(small: list[str], tmp_path: Path, capsys: Printed) -> None:
    file = tmp_path / "proof.json"
    assert verify.main([*small, "--budget", "32", "--samples", "40", "--json", str(file)]) == 0
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{small[1]}, fp32, cache fp32, 5 prompts of up to 40 tokens"
    assert second == "drafts: streaming, gamma 4; 2 slots, cpu"
    checks = ["greedy", "cache", "samples", "seeds", "refill", "exact"]
    assert [line.split()[:2] for line in lines[:-1]] == [["passed", check] for check in checks]
    assert lines[-1].startswith("all passed, ")
    document = read(file)
    assert document["passed"] and [one["check"] for one in document["findings"]] == checks


def test_one_failed_check_is_named_and_is_exit_code_1(small: list[str], capsys: Printed, monkeypatch: Patch) -> None:
    findings = [Finding("greedy", True, "fine"), Finding("seeds", False, "1 of 4 outputs are others")]
    monkeypatch.setattr(lossless, "prove", lambda *_: iter(findings))
    assert verify.main(small) == 1
    out = capsys.readouterr().out
    assert "FAILED  seeds    1 of 4" in out and "FAILED: seeds, " in out


def test_a_soak_goes_through_all_policies(small: list[str], capsys: Printed, monkeypatch: Patch) -> None:
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


@pytest.mark.slow
def test_needles_writes_counts_and_spread_of_every_policy(tmp_path: Path, capsys: Printed, refuses: Refuses) -> None:
    file = tmp_path / "needles.json"
    needles.main([*NEEDLES, "--json", str(file)])
    document = read(file)
    results, kinds = document["results"], ("needle", "prose")
    assert [(r["kind"], r["length"], len(r["right"])) for r in results] == [(kind, 192, 3) for kind in kinds]
    assert [len(s["prompts"]) for r in results for s in r["settings"]] == [3, 3, 3, 3]
    overall = [r for r in document["summary"] if r["prompts"] == "all"]
    assert [(r["kind"], r["policy"]) for r in overall] == [(k, p) for k in kinds for p in ("streaming", "guided")]
    for r in overall:
        low, high = r["acceptance_interval"]
        assert r["n"] == 3 and low <= r["acceptance_rate"] <= high
        assert ("over_streaming" in r) == (r["policy"] == "guided")
    first = capsys.readouterr().out
    assert "of 3 answered right" in first
    needles.main([*NEEDLES, "--json", str(file)])  # nothing is left to measure, the sums are the same
    assert capsys.readouterr().out.split("\n\n")[1:] == first.split("\n\n")[1:]
    document["results"].pop()
    file.write_text(json.dumps(document))
    needles.main([*NEEDLES, "--json", str(file)])  # what is not there is measured again
    assert len(read(file)["results"]) == 2 and "prose" in capsys.readouterr().out
    assert "was measured with gamma 4, not 2" in refuses(needles.main, *NEEDLES, "--json", file, "--gamma", 2)


# ---- evaluate.py -----------------------------------------------------------------------------------------------------


def measured(tmp_path: Path, *flags: str) -> dict[str, Any]:
    evaluate.main([*EVALUATE, *flags, "--json", str(tmp_path / "measured.json")])
    return read(tmp_path / "measured.json")


def test_fewer_bits_are_compared_with_the_whole_model(tmp_path: Path, capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 8)  # of samples, which take most of the time
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
    model, draft = tiny_model(CONFIG, dtype=torch.bfloat16), DraftConfig(policy="streaming", gamma=3)
    engine = Engine(model, config=ENGINE, draft=draft)
    if not engine.target.bodies.fused:
        pytest.skip("no C++ compiler builds the kernels here")
    found, rounds = time_steps(engine, [random_ids(200, seed=seed) for seed in range(2)], 12, CHIP)
    assert [(x["kind"], x["n_tokens"]) for x in found] == [("plain", 1), ("draft", 1), ("verify", 4)]
    for step in found:
        assert all(step[part] > 0 for part in ("products", "attention", "n"))  # medians, each of its own
    plain, _, verify = found
    layers = engine.target.model.layers  # without the head, as what was timed
    weights = sum(x.nbytes for x in layers.parameters())
    keys = 2 * 200 * engine.cache.bytes_per_token
    macs = 2 * sum(x.numel() for x in layers.parameters() if x.dim() == 2)
    least = max(weights, 2 * macs) / 1e9 + max(keys, 4 * 2 * 4 * 64 * 200 * 2) / 1e9
    assert plain["least"] == pytest.approx(1e3 * least) and verify["least"] > plain["least"]
    assert [x["speculative"] for x in rounds] == [False, True]
    assert rounds[0]["tokens"] == 1 and rounds[1]["draft"] > 0
    assert engine.target.bodies.hidden.stack.watched is None


def test_steps_that_are_made_of_operators_are_refused() -> None:
    engine = Engine(tiny_model(CONFIG), config=ENGINE)
    with pytest.raises(ValueError, match="steps are timed of models in bf16 on a CPU that has a C\\+\\+ compiler"):
        time_steps(engine, [random_ids(20)] * 2, 4, CHIP)


def test_the_program_prints_a_table_and_writes_json(tmp_path: Path, capsys: Printed, monkeypatch: Patch) -> None:
    """The machine's rates are not measured: that takes a minute."""
    monkeypatch.setattr("scripts.steps.rates_here", lambda *_: SimpleNamespace(chip=lambda *_: CHIP))
    file = tmp_path / "steps.json"
    n = str(torch.get_num_threads())
    asked = ["--batch", "1", "--context", "100", "--max-new-tokens", "8", "--gamma", "2", "--threads", n]
    assert steps_main([*asked, "--json", str(file)]) == 0
    printed, document = capsys.readouterr().out, read(file)
    assert "context x batch" in printed and "speculative" in printed
    assert [x["kind"] for x in document["steps"]] == ["plain", "draft", "verify"] and document["settings"]["gamma"] == 2
    assert len(document["rounds"]) == 2 and document["environment"]["instructions"]


# ---- plan.py ---------------------------------------------------------------------------------------------------------

LLAMA = ["--model", "meta-llama/Llama-3.1-8B"]
CELL = "--device H200 --batch 8 --context 32k --policy streaming"


def test_a_plan_is_printed_written_and_drawn(tmp_path: Path, capsys: Printed) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.png")]
    rates = ["--bandwidth", "4800", "--flops", "989", "--memory", "139", "--estimate", "roofline"]
    assert plan.main([*LLAMA, *rates, "--batch", "8", "--context", "32k", "--acceptance", "0.8", *files]) == 0
    out = capsys.readouterr().out
    one = next(c for c in json.loads((tmp_path / "plan.json").read_text())["cells"] if c["policy"] == "streaming")
    assert (one["budget"], one["gamma"], one["fits"]) == (512, 3, True)
    assert one["plain_ms"] == pytest.approx(10.1, abs=0.05)  # 15 GB of weights and 33.6 of keys at 4.8 TB/s
    assert f"{one['speedup']:.2f}x" in out and "a device of given rates" in out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "more", "settings", "said"),
    [
        ("", "--quantize float8 --draft-quantize float8", {"quantize": "float8", "draft_quantize": "float8"},
         "weights float8, KV cache bf16, drafts' weights float8, on"),
        ("--kv-dtype int8", "--draft-kv-bits 4", {"kv_dtype": "int8", "draft_kv_bits": 4},
         "KV cache int8, of which drafts read 4 bits a number, on"),
    ],
)  # fmt: skip
def test_few_bits_reach_the_plan_and_its_heading_and_drafts_take_less_time(
    given: str, more: str, settings: dict[str, object], said: str, tmp_path: Path, capsys: Printed
) -> None:
    argv = [*LLAMA, *CELL.split(), "--json", str(tmp_path / "plan.json")]
    found = []
    for flags in (given, f"{given} {more}"):
        assert plan.main([*argv, *flags.split()]) == 0
        found.append(json.loads((tmp_path / "plan.json").read_text()))
    assert settings.items() <= found[1]["settings"].items() and said in capsys.readouterr().out
    assert found[1]["cells"][0]["draft_ms"] < found[0]["cells"][0]["draft_ms"]


def test_the_drafts_of_a_file_are_planned_with_the_acceptance_that_it_holds(tmp_path: Path) -> None:
    sweep, file = DATA / "sweep.json", tmp_path / "plan.json"
    rates = ["--bandwidth", "15", "--flops", "0.5"]
    argv = ["--model", "HuggingFaceTB/SmolLM2-135M", *rates, "--acceptance", str(sweep), "--json", str(file)]
    assert plan.main(argv) == 0
    held = {(one["policy"], one["budget"]) for one in json.loads(sweep.read_text())["points"]}
    cells = json.loads(file.read_text())["cells"]
    assert {(one["policy"], one["budget"]) for one in cells} == held
    assert all(one["acceptance_source"].startswith("measured: sweep.json") for one in cells)


def test_the_page_shows_what_the_program_prints(capsys: Printed) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    command = next(line.split()[2:] for line in page.splitlines() if line.startswith("    python scripts/plan.py --"))
    assert plan.main(command) == 0
    printed = capsys.readouterr().out.rstrip("\n").splitlines()
    assert "\n".join(f"    {line}".rstrip() for line in printed) in page
