"""scripts/generate.py as a user types it: what it prints and writes, and the one sentence it gives for a mistake."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--no-compile", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_script", ROOT / "scripts" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_script"] = module
    spec.loader.exec_module(module)
    return module


def refusal(script: ModuleType, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a run that must exit with 2 and print nothing else."""
    with pytest.raises(SystemExit) as stopped:
        script.main([*QUICK, *argv])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == "" and "Traceback" not in err
    return err.strip().splitlines()[-1]


def test_json_on_stdout_is_the_last_line_and_holds_the_whole_run(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*QUICK, "--prompt", "It was a dark night", "--json", "-"])
    lines = capsys.readouterr().out.strip().splitlines()
    run = json.loads(lines[-1])
    assert set(run) == {"completions", "stats", "config", "environment"}
    (completion,) = run["completions"]
    assert len(completion["tokens"]) == 6 and completion["finish_reason"] == "length"
    assert completion["text"].strip() in "\n".join(lines[:-1])  # the streamed text
    assert completion["stats"]["rounds"] == 6
    assert run["stats"]["decode_tokens"] == 6 and run["stats"]["kv_bytes_per_token"] > 0
    assert any("tokens/s" in line for line in lines[:-1])  # the card


def test_many_prompts_are_written_in_their_order_with_their_own_parameters(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prompt": "One"},
        {"tokens": [1, 500, 600], "max_tokens": 2},
        {"prompt": "Three", "temperature": 0.7, "seed": 1},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    argv = [*QUICK, "--prompts", str(prompts), "--output", str(output), "--batch-size", "2"]
    script.main(argv)
    first = output.read_text(encoding="utf-8")
    script.main(argv)
    assert output.read_text(encoding="utf-8") == first  # greedy and seeded rows repeat
    written = [json.loads(line) for line in first.splitlines()]
    assert [row["index"] for row in written] == [0, 1, 2]
    assert [len(row["tokens"]) for row in written] == [6, 2, 6]


def test_a_file_is_continued_and_a_trace_is_written(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, trace = tmp_path / "text.txt", tmp_path / "trace.json"
    text.write_text("The captain wrote in his journal — « déjà vu » —", encoding="utf-8")
    script.main([*QUICK, "--prompt-file", str(text), "--no-stream", "--profile", str(trace)])
    assert "--- 0: length" in capsys.readouterr().out
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", " \n"], "empty"),
        (["--prompt", "word " * 20000], "over max_seq_len 16,384"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompt", "a", "--dtype", "fp8"], "'fp8'"),
        (["--prompt", "a", "--gamma", "0"], "gamma must be at least 1, got 0"),
        (["--prompt", "a", "--gamma", "few"], "'few'"),
        (["--prompt", "a", "--temperature", "-1"], "-1"),
        (["--prompt", "a", "--temperature", "nan"], "nan"),
        (["--prompt", "a", "--top-p", "0"], "top_p"),
        (["--prompt", "a", "--top-k", "0"], "top_k"),
        (["--prompt", "a", "--batch-size", "0"], "batch_size"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_tokens"),
        (["--prompt", "a", "--quantize", "int3"], "'int3'"),
        (["--prompt", "a", "--kv-dtype", "int1"], "'int1'"),
        (["--prompt", "a", "--draft", "psychic"], "'psychic'"),
        (["--prompt", "a", "--model", "tests"], "no config.json"),
        (["--prompt", "a", "--json", "nowhere/run.json"], "nowhere"),
        (["--prompt", "a", "--chat"], "chat template"),
        (["--prompt", "a", "--frobnicate"], "--frobnicate"),
        (["--prompt", "a", "--prompts", "b.jsonl"], "not allowed with"),
    ],
)
def test_a_mistake_gets_one_sentence_that_names_it(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in refusal(script, capsys, *argv)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{bad", "line 2 is not JSON"),
        ('{"prompt": "a", "temperatur": 1}', "temperatur"),
        ('{"text": "a"}', "exactly one of"),
        ('{"prompt": "a", "tokens": [1]}', "exactly one of"),
        ('{"tokens": ["a"]}', "whole numbers"),
        ('{"tokens": [99999]}', "99999"),
        ('{"prompt": 5}', "must be a text"),
        ('{"prompt": "a", "top_p": 3}', "top_p"),
        ("[1, 2]", "JSON object"),
    ],
)
def test_a_wrong_line_of_a_prompts_file_is_named(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    assert said in refusal(script, capsys, "--prompts", str(path))


def test_a_file_that_is_not_utf8_is_named_with_the_byte(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("café".encode("latin-1"))
    assert "is not UTF-8 text: byte 3 is 0xe9" in refusal(script, capsys, "--prompt-file", str(path))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.model"):
        (tmp_path / name).write_bytes((ROOT / "gpt_fast_sd" / "bundled" / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 3000}), encoding="utf-8")
    said = refusal(script, capsys, "--prompt", "a", "--model", str(tmp_path))
    assert "4096" in said and "3000" in said
