"""scripts/plan.py: parsed, called and printed; refusals are one sentence and exit code 2."""

import json
from pathlib import Path

import pytest

from scripts import plan

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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    with pytest.raises(SystemExit):
        plan.main([*argv, "--policy", "streaming", "--draft-kv-bits", "4"])
    assert "int8" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "there is nothing to plan: --model M says what, or --measured FILE what to compare with"),
        ("--measured sweep.json --plot x.png", "--plot draws a forecast, which needs --model"),
        ("--measured sweep.json --max-new-tokens 9", "--max-new-tokens does nothing without --model: leave it out"),
        ("--measured sweep.json --device H200", "--device does nothing without --model"),
    ],
)
def test_without_a_model_one_sentence_says_what_is_missing(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan.main(flags.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--device H300", "got 'H300'"),
        ("--device H200 --tp 3", "tp 3 does not fit the model"),
        ("--device H200 --tp 16", "tp 16 is more than the 8 devices of a machine"),
        ("--device H200 --context 200k", "over the model's 131,072 positions"),
        ("--device H200 --batch 0", "whole numbers of at least 1"),
        ("--device H200 --policy foo", "policy must be one of"),
        ("--device H200 --policy off", "drafts nothing"),
        ("--device H200 --policy lookup", "no published acceptance of lookup is known"),
        ("--device H200 --policy streaming --budget 3", "budget must be at least 12 for streaming, got 3"),
        ("--device H200 --gamma 40", "gamma must be from 1 to 16, got 40"),
        ("--device H200 --acceptance nan", "acceptance must be a rate from 0 to 1"),
        ("--device H200 --memory nan", "memory must be a positive number of GiB, got nan"),
        ("--device H200 --tp 2 --link 0", "bandwidth of a link must be positive, got 0.0"),
        ("--bandwidth -3 --flops 4", "bandwidth must be a positive number of GB/s, got -3"),
        ("--bandwidth 0 --flops 4", "bandwidth must be a positive number of GB/s, got 0"),
        ("--bandwidth 4 --flops nan", "peak must be a positive number of TFLOP/s, got nan"),
        ("--bandwidth 4", "--device says, or --bandwidth and --flops"),
        ("--device H200 --link 100", "--link does nothing on one device: leave it out, or say --tp"),
        ("--device H200 --network 50", "--network does nothing on one device"),
        (
            "--device A100 --quantize float8",
            "quantize 'float8' needs a GPU that multiplies float8, and A100-80G SXM does",
        ),
        ("--device A100 --draft-quantize float8", "quantize 'float8' needs a GPU that multiplies float8"),
        ("--kv-dtype fp8", "argument --kv-dtype: invalid choice: 'fp8' (choose from"),
        ("--device H200 --quantize int4 --dtype fp16", "quantize 'int4' needs bf16 weights, not fp16: use"),
        ("--device H200 --draft-quantize float8 --dtype fp32", "needs bf16 weights, not fp32"),
        ("--device H200 --quantize int8 --draft-quantize int4", "needs a target with plain weights, or of that preci"),
        ("--device H200 --tp 8 --draft-quantize int4", "quantize 'int4' of a draft pads inputs to multiples of 1,024"),
        ("--device H200 --measured README.md", "README.md holds no results"),
        ("--device H200 --measured /dev/zero", "/dev/zero holds no results"),
        ("--device H200 --measured nowhere.json", "nowhere.json: No such file"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    flags: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        plan.main([*LLAMA, *flags.split()])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("plan.py: ") and said in last


@pytest.mark.parametrize("flags", [["--measured"], [*LLAMA, "--device", "H200", "--acceptance"]])
def test_results_that_lack_something_are_refused_by_the_name_of_their_file(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    point = {"status": "measured", "acceptance_by_position": [0.5]}
    file.write_text(json.dumps({"benchmark": "batch", "settings": {}, "points": [point]}))
    with pytest.raises(SystemExit) as stopped:
        plan.main([*flags, str(file)])
    assert stopped.value.code == 2 and f"{file} is damaged: KeyError(" in capsys.readouterr().err


def test_the_page_shows_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    command = next(
        line.split()[2:] for line in page.splitlines() if line.startswith("    python scripts/plan.py --model")
    )
    assert plan.main(command) == 0
    printed = capsys.readouterr().out.rstrip("\n").splitlines()
    assert "\n".join(f"    {line}".rstrip() for line in printed) in page
