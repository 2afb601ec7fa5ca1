"""scripts/plan.py: parsed, called and printed; refusals are one sentence and exit code 2."""

import json
from pathlib import Path

import pytest

from scripts import plan
from tests.helpers import Refuses

LLAMA = ["--model", "meta-llama/Llama-3.1-8B"]
ROOT = Path(__file__).resolve().parents[2]


def test_a_plan_is_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.png")]
    rates = ["--bandwidth", "4800", "--flops", "989", "--memory", "139", "--estimate", "roofline"]
    assert plan.main([*LLAMA, *rates, "--batch", "8", "--context", "32k", "--acceptance", "0.8", *files]) == 0
    out = capsys.readouterr().out
    document = json.loads((tmp_path / "plan.json").read_text())
    one = next(c for c in document["cells"] if c["policy"] == "streaming")
    assert (one["budget"], one["gamma"], one["fits"]) == (512, 3, True)
    assert f"{one['speedup']:.2f}x" in out and "a device of given rates" in out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_named_device_with_its_own_rates_is_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    cell = ["--batch", "8", "--context", "32k", "--estimate", "good"]
    rows = []
    for device in (["--device", "H200"], ["--bandwidth", "4800", "--flops", "989", "--memory", "139"]):
        assert plan.main([*LLAMA, *device, *cell]) == 0
        rows.append([line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("32,000")])
    assert rows[0] == rows[1] != []


def test_weights_of_few_bits_cost_their_bytes_and_their_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name in ("none", "int8", "int4"):
        flags = [] if name == "none" else ["--draft-quantize", name, "--quantize", name]
        argv = [*LLAMA, "--device", "H200", "--batch", "1", "--context", "8k", "--policy", "guided", *flags]
        assert plan.main([*argv, "--json", str(tmp_path / "plan.json")]) == 0
        document = json.loads((tmp_path / "plan.json").read_text())
        assert document["settings"]["draft_quantize"] == document["settings"]["quantize"] == (flags or [None])[-1]
        (found[name],) = document["cells"]
    out = capsys.readouterr().out
    assert "weights int4, KV cache bf16, drafts' weights int4, on" in out and "times 0.97 for int4 weights" in out
    for key in ("plain_ms", "draft_ms", "memory_bytes"):
        assert found["none"][key] > found["int8"][key] > found["int4"][key]
    assert found["int4"]["acceptance"][0] == pytest.approx(0.97 * found["none"]["acceptance"][0])


def test_drafts_that_read_half_of_each_number_are_planned_and_only_of_an_int8_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refuses: Refuses
) -> None:
    found, argv = {}, [*LLAMA, "--device", "H200", "--batch", "64", "--context", "32k", "--budget", "4096"]
    argv += ["--acceptance", "lookup=0.5"]
    for name, flags in {"whole": [], "half": ["--draft-kv-bits", "4"]}.items():
        said = ["--policy", "streaming,lookup", "--kv-dtype", "int8", *flags, "--json", str(tmp_path / "plan.json")]
        assert plan.main([*argv, *said]) == 0
        document = json.loads((tmp_path / "plan.json").read_text())
        assert document["settings"]["draft_kv_bits"] == (4 if flags else None)
        found[name] = document["cells"]
    out = capsys.readouterr().out
    assert out.count("KV cache int8, of which drafts read 4 bits a number, on") == 1
    assert found["half"][0]["draft_ms"] < found["whole"][0]["draft_ms"]
    assert found["half"][0]["verify_ms"] == found["whole"][0]["verify_ms"]
    assert found["half"][1] == found["whole"][1]  # lookup, which reads no cache
    assert "int8" in refuses(plan.main, *argv, "--policy", "streaming", "--draft-kv-bits", 4)


def test_what_was_measured_is_shown_beside_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--measured", str(ROOT / "benchmarks" / "cpu" / "smollm2" / "sweep.json")]) == 0
    out = capsys.readouterr().out
    assert "measured over predicted" in out and "streaming 256" in out


def test_the_drafts_of_a_file_are_planned_with_the_acceptance_that_it_holds(tmp_path: Path) -> None:
    sweep, file = ROOT / "benchmarks" / "cpu" / "smollm2" / "sweep.json", tmp_path / "plan.json"
    rates = ["--bandwidth", "15", "--flops", "0.5"]
    argv = ["--model", "HuggingFaceTB/SmolLM2-135M", *rates, "--acceptance", str(sweep), "--json", str(file)]
    assert plan.main(argv) == 0
    held = {(one["policy"], one["budget"]) for one in json.loads(sweep.read_text())["points"]}
    cells = json.loads(file.read_text())["cells"]
    assert {(one["policy"], one["budget"]) for one in cells} == held
    assert all(one["acceptance_source"].startswith("measured: sweep.json") for one in cells)


def test_the_page_shows_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    command = next(
        line.split()[2:] for line in page.splitlines() if line.startswith("    python scripts/plan.py --model")
    )
    assert plan.main(command) == 0
    printed = capsys.readouterr().out.rstrip("\n").splitlines()
    assert "\n".join(f"    {line}".rstrip() for line in printed) in page
