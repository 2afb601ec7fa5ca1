"""Every public field of every configuration is a flag of every program, which describes it and gives it back."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import batch
import benchmark
import evaluate
import flags
import generate
import needles
import steps
import verify
from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams

Parse = Callable[[list[str]], argparse.Namespace]
CONFIGS = (EngineConfig, DraftConfig, SamplingParams)
PROGRAMS: dict[str, tuple[Parse, list[str]]] = {  # and what they cannot do without
    "generate.py": (generate.parse, []),
    "batch.py": (batch.parse, ["in.jsonl", "out.jsonl"]),
}
VALUES: dict[str, Any] = {  # by the name of a field, of which its flag has dashes; True: the flag alone
    "batch_size": 3, "max_seq_len": 77, "device": "cpu", "dtype": "bf16", "exact": True, "quantize": "int8",
    "draft_quantize": "int8", "kv_dtype": "fp16", "cuda_graphs": "off", "max_autotune": True, "budget": 192, "gamma": 5,
    "draft_model": "bundled", "view": "quest", "cheap": "standalone", "exit_layers": 2, "ngram": 5, "n_sink": 8,
    "refresh": 32, "page": 64, "draft_tp": 2, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 7,
    "ignore_eos": True, "max_drafts": 2, "logprobs": 3,
}  # fmt: skip
GIVEN: dict[str, tuple[list[str], Any]] = {  # what is typed, what it means
    name: ([f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])], value)
    for name, value in VALUES.items()
} | {
    "compile": (["--no-compile"], False),
    "bodies": (["--reference"], "reference"),
    "policy": (["--draft", "hierarchy"], "hierarchy"),
    "kv_bits": (["--draft-kv-bits", "4"], 4),
    "max_tokens": (["--max-new-tokens", "9"], 9),
    "stop": (["--stop", "a", "--stop", "b"], ["a", "b"]),
    "stop_token_ids": (["--stop-token-id", "7", "--stop-token-id", "9"], [7, 9]),
}
# but for what no flag can say
FIELDS = [(c, f.name) for c in CONFIGS for f in dataclasses.fields(c) if f.init and f.name != "processor"]


def given(config: type[Any], name: str) -> tuple[list[str], Any]:
    """What is typed for a field, and what it means; two configurations have one called quantize."""
    return GIVEN["draft_quantize" if (config, name) == (DraftConfig, "quantize") else name]


def test_every_field_describes_itself() -> None:
    assert {id(given(*field)) for field in FIELDS} == {id(one) for one in GIVEN.values()}
    silent = [name for c in CONFIGS for name in (f.name for f in flags.public(c) if not f.metadata.get("help"))]
    assert not silent


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_field_is_a_flag_with_its_help_text(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse, needed = PROGRAMS[program]
    shown = helped(parse, capsys, *needed)
    for config in CONFIGS:
        for field in flags.public(config):
            assert f" {flags.flag_of(field)} " in shown
            changed = program == "batch.py" and field.name == "seed"  # line i has one of its own
            assert field.metadata["help"] in shown or changed, field.name
            assert ", ".join(map(str, flags.allowed_values(field))) in shown or field.metadata["switch"]
    assert "for quest, guided, auto; default: 16" in shown  # by the classes of the policies that heed it


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("config", "name"), FIELDS, ids=[name for _, name in FIELDS])
def test_what_is_typed_is_what_the_configuration_holds(program: str, config: type[Any], name: str) -> None:
    parse, needed = PROGRAMS[program]
    typed, value = given(config, name)
    heeding = {"draft_model": "standalone", "draft_tp": "standalone", "cheap": "hierarchy"}  # policies, without which
    heeding |= dict.fromkeys(("exit_layers", "view", "quantize"), "early_exit")  # they are refused
    if config is DraftConfig and name in heeding:
        typed = [*typed, "--draft", heeding[name]]
    if name in ("cheap", "draft_tp"):
        typed += ["--draft-model", "bundled"]
    rest = {} if config is DraftConfig else {"max_seq_len": 99, "batch_size": 1, "temperature": 0.0, "max_tokens": 8}
    left_open = {field.name for field in flags.public(config)} - {name}
    made = flags.config_of(config, parse([*needed, *typed]), **{key: rest[key] for key in rest.keys() & left_open})
    assert getattr(made, name) == value
    given_else = {key: rest[key] for key in rest.keys() & (left_open | {name})}
    assert getattr(flags.config_of(config, parse(needed), **given_else), name) != value


# fields that benchmark.py has no flag for: --draft names who is cheap, --context says how long, and no row ends early
ELSEWHERE = {"cheap", "max_seq_len", "stop", "stop_token_ids", "ignore_eos", "logprobs"}
WITH_A_MODEL = {"draft_model", "draft_tp", "cheap"}
# configurations of other programs, and fields of theirs that are said otherwise
OTHERS: dict[str, tuple[Parse, tuple[type[Any], ...], set[str]]] = {
    "verify.py": (verify.parse, (EngineConfig, DraftConfig), set()),
    # drafts of the target's own; as long as --lengths and --contexts say; not compiled unless --compile is given
    "needles.py": (needles.parse, (EngineConfig, DraftConfig), {"max_seq_len", "compile"} | WITH_A_MODEL),
    # whose --reference is the model that it compares with
    "evaluate.py": (evaluate.parse, (EngineConfig,), {"max_seq_len", "compile"}),
    "steps.py": (steps.parse, (DraftConfig,), set()),  # of one kind of engine
    "benchmark.py": (benchmark.parse, CONFIGS, ELSEWHERE),
}
SEVERAL = {
    "batch_size": "--batch", "policy": "--draft", "budget": "--budget", "gamma": "--gamma",
    "temperature": "--temperature",
}  # fmt: skip


def helped(parse: Parse, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse([*argv, "--help"])
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("program", OTHERS)
def test_every_field_is_a_flag_of_other_programs(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse, configs, elsewhere = OTHERS[program]
    shown = helped(parse, capsys)
    named = SEVERAL if program == "benchmark.py" else {}
    fields = [field for config in configs for field in flags.public(config)]
    assert {f.name for f in fields if f" {named.get(f.name, flags.flag_of(f))} " not in shown} == elsewhere


@pytest.mark.parametrize(("config", "name"), [f for f in FIELDS if f[1] not in ELSEWHERE | SEVERAL.keys()])
def test_what_is_typed_reaches_benchmark(config: type[Any], name: str) -> None:
    typed, value = given(config, name)
    (field,) = (field for field in flags.public(config) if field.name == name)
    got = getattr(benchmark.parse(typed), flags.flag_of(field).removeprefix("--").replace("-", "_"))
    assert got == (not value if name == "compile" else value)
