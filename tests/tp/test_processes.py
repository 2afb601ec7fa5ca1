"""Whole runs of several processes: started by torchrun, on one machine or two, and ended by one that is lost."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import save_hugging_face
from tests.helpers import random_ids, tiny_config, tiny_model
from tests.tp.spawn import ROOT, WORKERS, environment, free_port, run, start_without_agent, torchrun

GENERATE, BENCHMARK = (ROOT / "scripts" / name for name in ("generate.py", "benchmark.py"))
PROMPTS = [random_ids(n, seed=n) for n in (40, 3, 17, 9, 25)]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny model without a tokenizer, and next to it five prompts of token ids."""
    save_hugging_face(tiny_model(tiny_config(n_layers=1)), tmp_path / "model", dtype=torch.float32)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in PROMPTS))
    return tmp_path / "model"


def flags(folder: Path, *more: object) -> list[object]:
    """The arguments of generate.py to continue the prompts next to the folder, eagerly and in fp32."""
    prompts = folder.parent / "prompts.jsonl"
    return ["--model", folder, "--prompts", prompts, "--device", "cpu", "--dtype", "fp32", "--no-compile",
            "--max-new-tokens", 12, "--ignore-eos", "--gamma", 3, *more]  # fmt: skip


@pytest.mark.parametrize(("n", "tp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_generate_under_torchrun_prints_once_and_keeps_the_order(n: int, tp: int, model_folder: Path) -> None:
    output, document = model_folder.parent / "out.jsonl", model_folder.parent / "doc.json"
    done = run(torchrun(n, GENERATE, *flags(model_folder, "--tp", tp, "--output", output, "--json", document)))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3, 4]
    config = EngineConfig(batch_size=5, max_seq_len=64, device="cpu", dtype="fp32", compile=False)
    alone = Engine.from_pretrained(model_folder, config)
    expected = alone.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [record["tokens"] for record in records] == [completion.tokens for completion in expected]
    assert sorted(re.findall(r"^--- (\d): length$", done.stdout, re.M)) == ["0", "1", "2", "3", "4"]
    assert len(re.findall(r"^  draft  ", done.stdout, re.M)) == 1
    assert f"{n // tp} replicas x {tp} that hold one together" in done.stdout
    environment: dict[str, Any] = json.loads(document.read_text())["environment"]
    assert (environment["dp"], environment["tp"]) == (n // tp, tp)


@pytest.mark.slow
def test_a_sweep_under_torchrun_measures_the_model_that_all_ranks_hold(model_folder: Path) -> None:
    document = model_folder.parent / "sweep.json"
    size = ["--batch", 2, "--context", "40,60", "--budget", 16, "--gamma", 2, "--max-new-tokens", 8, "--pairs", 1]
    how = ["--model", model_folder, "--synthetic", "--tp", 2, "--device", "cpu", "--no-compile", "--json", document]
    done = run(torchrun(2, BENCHMARK, *how, *size))
    assert done.returncode == 0, done.stderr
    points = json.loads(document.read_text())["points"]
    assert [(point["context"], point["status"]) for point in points] == [(40, "measured"), (60, "measured")]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "timeout"), [("die", 600), ("raise", 600), ("hang", 4)])
def test_a_rank_that_is_lost_ends_the_others_with_one_sentence(how: str, timeout: float) -> None:
    # a rank that dies is missed at once, whatever the timeout; one that hangs is missed when it is over
    first, second = start_without_agent(2, WORKERS / "lost.py", how, timeout)
    try:
        _, said = first.communicate(timeout=120)
        if how == "raise":
            _, own = second.communicate(timeout=120)
            assert second.returncode == 1 and own.splitlines()[-1] == 'KeyError: "something of rank 1\'s own"'
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    assert first.returncode == 1
    lines = [line for line in said.splitlines() if line.startswith("rank")]
    assert len(lines) == 1 and "Traceback" not in said, said
    assert lines[0].startswith(f"rank 0 of 2 stops: another rank is gone, or did not answer within {timeout:g} s (")


@pytest.mark.slow
def test_two_agents_on_one_machine_decode_as_one_does(tmp_path: Path) -> None:
    check, port = "the_first_ranks_draws_are_everyones", free_port()
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]
    agents = []
    for _ in range(2):
        command = torchrun(2, WORKERS / "checks.py", 4, tmp_path, check, options=options)
        agents.append(subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True))
        time.sleep(1)  # the first one is the host of the meeting
    said = [agent.communicate(timeout=300)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    for rank in range(4):
        assert json.loads((tmp_path / f"{check}.{rank}.json").read_text()) == []
