"""benchmarks/speculation.py on a small scale: what it writes, that it resumes, its sums, and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import frontier
import speculation
from frontier import Pairs, Setting
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import load_tokenizer, read_config
from gpt_fast_sd.stats import EngineStats
from speculation import (
    KINDS,
    Cases,
    Ceiling,
    Ledger,
    account,
    alpha_of,
    distinct_share,
    median_interval,
    omega,
    ragged,
    summarize,
)
from tests.helpers import random_ids

DOCUMENT = BUNDLED / "document.txt"
SPEED = ["speed", "--texts", str(DOCUMENT), "--no-compile", "--cells", "96x2", "--gammas", "2", "--budgets", "64"]
SPEED += ["--pairs", "2", "--new-tokens", "6", "--policies", "streaming,lookup"]
LOSSLESS = ["lossless", "--texts", str(DOCUMENT), "--no-compile", "--prompts", "3", "--longest", "90"]
LOSSLESS += ["--new-tokens", "5", "--batch-size", "2", "--policies", "streaming,hierarchy/standalone"]
NEEDLES = ["needles", "--texts", str(DOCUMENT), "--lengths", "192", "--n", "3", "--budgets", "64"]
NEEDLES += ["--batch-size", "2", "--policies", "streaming,guided", "--kinds", "needle,prose"]


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads a GiB."""
    monkeypatch.setattr(speculation, "read_bandwidth", lambda: {"fp32 sum": 10.0})


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line on stderr of a run that must exit with 2 before it prints anything."""
    with pytest.raises(SystemExit) as stopped:
        speculation.main(argv)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == "" and "Traceback" not in err
    line: str = err.strip().splitlines()[-1]
    return line


# ---- speed -----------------------------------------------------------------------------------------------------------


def test_speed_writes_every_number_after_the_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    speculation.main([*SPEED, "--json", str(file), "--plot", str(picture)])
    out = capsys.readouterr().out
    assert out.index("roofline ms") < out.index("x plain")
    document = read(file)
    assert document["benchmark"] == "speculation speed" and document["settings"]["pairs"] == 2
    streaming, lookup = document["results"]
    assert (streaming["policy"], streaming["budget"], lookup["policy"], lookup["budget"]) == (
        "streaming", 64, "lookup", None,
    )  # fmt: skip
    for result in document["results"]:
        assert (result["context"], result["batch"], result["gamma"]) == (96, 2, 2)
        assert len(result["ratios"]) == 2
        assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]
        assert set(result["plain_ms"]) == set(result["speculative_ms"]) == {"round", "draft", "verify", "host"}
        assert result["outputs_equal"] + len(result["differences"]) == 2
        assert result["kv_bytes_per_token"]["ratio"] > 0 and result["predicted_ratio"] > 0
        assert result["roofline_ms"] > 0 and 0 < result["distinct_4_grams"] <= 1
        assert result["recompiles_while_timed"] == 0
        assert 1 <= result["tokens_per_round"] <= 3 and 0 < result["rows_live"] <= 1
    assert streaming["ceiling_ratio"] > 1 and lookup["ceiling_ratio"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_goes_on_where_it_ended_and_a_finished_one_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, measured = tmp_path / "speed.json", []
    take_turns = frontier.take_turns

    def killed_at_the_second(engine: Any, *rest: Any) -> Pairs:
        measured.append(engine.draft.policy)
        if measured == ["streaming", "lookup"]:
            raise KeyboardInterrupt
        pairs: Pairs = take_turns(engine, *rest)
        return pairs

    monkeypatch.setattr(speculation, "take_turns", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        speculation.main([*SPEED, "--json", str(file)])
    (first,) = read(file)["results"]
    speculation.main([*SPEED, "--json", str(file)])
    assert measured == ["streaming", "lookup", "lookup"]
    assert read(file)["results"][0] == first and len(read(file)["results"]) == 2
    capsys.readouterr()
    speculation.main([*SPEED, "--json", str(file), "--gammas", "2,1"])  # more of the same may be asked for
    assert measured == ["streaming", "lookup", "lookup", "streaming", "lookup"]
    assert "2 of 4 results are in" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_waves_refill_the_rows_and_all_their_outputs_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    speculation.main([*SPEED, "--policies", "streaming", "--waves", "2", "--pairs", "1", "--json", str(file)])
    (result,) = read(file)["results"]
    assert result["batch"] == 2 and result["outputs"] == 4
    assert result["outputs_equal"] + len(result["differences"]) == 4


def test_sampled_outputs_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    argv = [*SPEED, "--cells", "64x1", "--policies", "lookup", "--temperature", "0.8"]
    speculation.main([*argv, "--json", str(file)])
    (result,) = read(file)["results"]
    assert result["outputs_equal"] is None and result["differences"] == []
    capsys.readouterr()
    assert "was measured with temperature 0.8, not 0.0" in refusal(capsys, *SPEED, "--json", str(file))


def test_the_interval_of_a_median_is_made_of_its_values() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == [1.0, 3.0]  # of so few, no inner pair is sure enough
    assert median_interval(list(range(9))) == [1, 7]  # coverage 0.961; the pair inside has 0.82
    assert median_interval(list(range(100))) == [39, 60]  # coverage 0.965, as tables of order statistics have it


def test_repetition_is_told_from_the_runs_of_tokens_that_come_again() -> None:
    assert distinct_share([[1, 2, 3, 4, 5, 6]], 4) == 1.0
    assert distinct_share([[7] * 8, [1, 2, 3, 4, 5]], 4) == (1 + 2) / (5 + 2)
    assert distinct_share([[1]], 4) == 0.0


def test_auto_is_speed_that_chooses_gamma_itself(tmp_path: Path) -> None:
    file = tmp_path / "auto.json"
    argv = ["auto", *SPEED[1:4], "--cells", "64x1", "--budgets", "64", "--pairs", "1", "--new-tokens", "6"]
    speculation.main([*argv, "--seconds", "0", "--json", str(file)])
    (result,) = read(file)["results"]
    assert result["gamma"] == "auto" and result["ceiling_ratio"] is None
    assert result["loss_percent"] == pytest.approx(100 * (1 - result["ratio"]["median"]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--texts", "nowhere.txt"], "there is no text file nowhere.txt"),
        (["--texts", str(DOCUMENT), str(DOCUMENT)], "two texts are named document.txt"),
        (["--cells", "5000x8"], "tokens, but 8 prompts of 5,000 need 39,992"),
        (["--cells", "16384x1"], "a context of 16,384 does not fit: from 2 to 16,378 tokens"),
        (["--cells", "512"], "expected context x batch"),
        (["--cells", "512x0"], "expected a whole number of at least 1, got '0'"),
        (["--budgets", "8"], "budget must be at least 12 for streaming, got 8"),
        (["--gammas", "2,few"], "got 'few'"),
        (["--gammas", "20"], "gamma must be from 1 to 16, got 20"),
        (["--policies", "psychic"], "there is no policy 'psychic'"),
        (["--policies", "standalone"], "needs draft_model"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--json", "nowhere/x.json"], "there is no folder"),
        (["--plot", "x.txt"], "its name must end in .png"),
        (["--model", "nowhere"], "no folder nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert said in refusal(capsys, *SPEED, *argv)


def test_results_of_other_settings_are_neither_mixed_nor_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    for content, said in (
        ("not JSON", "is not JSON"),
        ("[1]", "holds no results of speculation speed"),
        (json.dumps({"benchmark": "speculation needles"}), "holds no results of speculation speed"),
        (json.dumps({"benchmark": "speculation speed"}), "was measured with model None, not bundled"),
    ):
        file.write_text(content)
        assert said in refusal(capsys, *SPEED, "--json", str(file))
        assert file.read_text() == content
    file.unlink()
    Ledger(file, "speed", {"pairs": 7}).add({"context": 1})
    assert Ledger(file, "speed", {"pairs": 7}).find(context=1) == {"context": 1}
    with pytest.raises(ValueError, match="was measured with pairs 7, not 8"):
        Ledger(file, "speed", {"pairs": 8})


# ---- the sums of speed -----------------------------------------------------------------------------------------------


def test_alpha_counts_a_draft_only_where_those_before_it_were_kept() -> None:
    stats = EngineStats(drafted_by_position=[10, 10, 9], accepted_by_position=[8, 4, 3])
    assert alpha_of(stats) == pytest.approx(15 / (10 + 8 + 4))
    assert alpha_of(EngineStats()) == 0.0


def test_omega_is_that_of_leviathan() -> None:
    assert omega(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert omega(1.0, 4) == 5.0 and omega(0.0, 4) == 1.0


def test_the_prediction_meets_the_measurement_where_nothing_is_lost() -> None:
    """Independent drafts, all rows live to the end, no time on the host: then the formula is the measurement."""
    plain = EngineStats(
        decode_seconds=10.0, verify_seconds=10.0, decode_tokens=7000, rounds=1750, row_rounds=7000,
        rounds_by_gamma={0: 1750}, kv_bytes=14000,
    )  # fmt: skip
    speculative = EngineStats(
        decode_seconds=8.0, draft_seconds=2.0, verify_seconds=6.0, decode_tokens=7000, rounds=1000, row_rounds=4000,
        drafted_by_position=[4000, 4000], accepted_by_position=[2000, 1000], rounds_by_gamma={2: 1000}, kv_bytes=7000,
    )  # fmt: skip
    record = account(
        Pairs(plain=[plain], speculative=[speculative]), 4,
        Ceiling(weights=1000, kv=3000, kv_per_entry=10, gb_per_second=1e-3),
    )  # fmt: skip
    assert record["alpha"] == 0.5 and record["tokens_per_round"] == record["predicted_tokens_per_round"] == 1.75
    assert record["ratio"]["median"] == record["predicted_ratio"] == record["refilled_ratio"] == pytest.approx(1.25)
    assert record["rows_live"] == 1.0 and record["kv_bytes_per_token"]["ratio"] == 0.5
    assert record["percent_of_roofline"] == pytest.approx(100 * 4.0 / (10_000 / 1750))


def test_the_ceiling_of_a_ratio_counts_bytes() -> None:
    limit = Ceiling(weights=1000, kv=3000, kv_per_entry=10, gb_per_second=1.0)
    assert limit.ratio(Setting(policy="guided", budget=20), 4) == 5 * 4000 / (5 * 1000 + 3000 + 4 * 200)
    assert limit.ratio(Setting(policy="guided", budget=1000), 1) == 2 * 4000 / (2 * 1000 + 3000 + 3000)
    assert limit.ratio(Setting(policy="lookup", budget=None), 4) is None


# ---- lossless --------------------------------------------------------------------------------------------------------


def test_every_policy_says_what_plain_decoding_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lossless.json"
    speculation.main([*LOSSLESS, "--json", str(file)])
    plain, *policies = read(file)["results"]
    assert plain["policy"] == "off" and [len(tokens) for tokens in plain["outputs"]] == [5, 5, 5]
    assert [r["policy"] for r in policies] == ["streaming", "hierarchy/standalone"]
    assert all(r["equal"] == r["prompts"] == 3 and r["differences"] == [] for r in policies)
    assert read(file)["settings"]["dtype"] == "fp32"
    assert "3/3" in capsys.readouterr().out


def test_a_divergence_is_printed_with_its_gap_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, decode_all = tmp_path / "lossless.json", speculation.decode_all

    def astray(*arguments: Any) -> list[list[int]]:
        outputs: list[list[int]] = decode_all(*arguments)
        if arguments[-1] == "lookup":
            outputs[1][2] += 1
        return outputs

    monkeypatch.setattr(speculation, "decode_all", astray)
    with pytest.raises(SystemExit) as stopped:
        speculation.main([*LOSSLESS, "--policies", "lookup", "--json", str(file)])
    out, err = capsys.readouterr()
    assert stopped.value.code == 1 and "not token-identical to plain decoding: lookup" in err
    assert "prompt 1 from token 2 on (logits" in out and "2/3" in out
    (difference,) = read(file)["results"][1]["differences"]
    assert difference["speculative"] == difference["plain"] + 1 and difference["gap"] > 0

    def never(*arguments: Any) -> list[list[int]]:
        raise AssertionError("all of it was in the file")

    monkeypatch.setattr(speculation, "decode_all", never)
    with pytest.raises(SystemExit):
        speculation.main([*LOSSLESS, "--policies", "lookup", "--json", str(file)])


def test_prompts_are_ragged_and_the_same_for_the_same_seed() -> None:
    texts = {"a": list(range(500)), "b": list(range(1000, 1400))}
    prompts = ragged(texts, 40, 5, 60, bos=7, seed=1)
    assert prompts == ragged(texts, 40, 5, 60, bos=7, seed=1) != ragged(texts, 40, 5, 60, bos=7, seed=2)
    lengths = {len(prompt) for prompt in prompts}
    assert 5 <= min(lengths) < 15 and 50 < max(lengths) <= 60
    assert all(prompt[0] == 7 and np.all(np.diff(prompt[1:]) == 1) for prompt in prompts)
    with pytest.raises(ValueError, match="b has 400 tokens, too few for prompts of up to 450"):
        ragged(texts, 1, 5, 450, bos=7, seed=1)


# ---- needles ---------------------------------------------------------------------------------------------------------


def test_needles_writes_counts_and_spread_of_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "needles.json", tmp_path / "needles.png"
    speculation.main([*NEEDLES, "--json", str(file), "--plot", str(picture)])
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
    speculation.main([*NEEDLES, "--json", str(file)])  # nothing is left to measure, the sums are the same
    assert capsys.readouterr().out.split("\n\n")[1:] == first.split("\n\n")[1:]


def test_the_slots_keep_their_keys_from_policy_to_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled: dict[int, int] = {}
    take = speculation.Tally.take

    def noting(tally: Any, completions: Any) -> None:
        take(tally, completions)
        prefilled[id(tally)] = prefilled.get(id(tally), 0) + engines[0].stats.prefill_tokens

    engines: list[Any] = []
    engine_of = speculation.Subject.engine

    def kept(*arguments: Any, **more: Any) -> Any:
        engines.append(engine_of(*arguments, **more))
        return engines[-1]

    monkeypatch.setattr(speculation.Tally, "take", noting)
    monkeypatch.setattr(speculation.Subject, "engine", kept)
    speculation.main([*NEEDLES, "--kinds", "needle"])
    assert list(prefilled.values()) == [0, 0] and len(engines) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [200, 512])
def test_a_case_fits_its_length_and_its_answer_stands_far_back(kind: str, length: int) -> None:
    tokenizer = load_tokenizer(BUNDLED, read_config(BUNDLED))
    assert tokenizer is not None
    maker = Cases(tokenizer, {"words": random_ids(4000, vocab_size=tokenizer.vocab_size)}, seed=3)
    cases = maker.make(kind, length, 6)
    assert cases == maker.make(kind, length, 6)
    for case in cases:
        assert length - 40 <= len(case.prompt) + case.new_tokens <= length
        text = tokenizer.decode(case.prompt)
        if isinstance(case.answer, str):
            place = text.index(case.answer)
            assert text.count(case.answer) == 1 and place < 0.6 * len(text)
        elif case.answer is not None:
            n = len(case.answer)
            places = [i for i in range(len(case.prompt)) if case.prompt[i : i + n] == case.answer]
            assert len(places) == 1 and places[0] < length / 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--kinds", "riddle"], "there is no kind 'riddle'"),
        (["--lengths", "20000"], "prompts of 20,000 tokens are over the model's 16,384 positions"),
        (["--lengths", "16000"], "tokens, too few for prompts of 16,000"),
        (["--lengths", "30"], "does not fit into 30 tokens"),
        (["--policies", "standalone"], "needs draft_model"),
    ],
)
def test_needles_refuses_what_it_cannot_make(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in refusal(capsys, *NEEDLES, *argv)


def test_the_lead_over_streaming_is_that_of_the_same_prompts() -> None:
    streaming = {"policy": "streaming", "budget": 64, "prompts": [[0, 4, 1, 1], [4, 4, 5, 1]]}
    guided = {"policy": "guided", "budget": 64, "prompts": [[4, 4, 5, 1], [4, 4, 5, 1]]}
    result = {"kind": "needle", "length": 9, "right": [True, False], "settings": [streaming, guided]}
    summary = {(r["prompts"], r["policy"]): r for r in summarize([result, result])}
    assert summary["all", "streaming"]["acceptance_rate"] == 0.5 and summary["all", "streaming"]["n"] == 4
    assert summary["all", "streaming"]["tokens_per_round"] == 3.0
    lead = summary["all", "guided"]
    assert lead["over_streaming"] == 0.5 and lead["acceptance_interval"] == [1.0, 1.0]
    assert (lead["prompts_above_streaming"], lead["prompts_below_streaming"]) == (2, 0)
    low, high = lead["over_streaming_interval"]
    assert 0 <= low < 0.5 < high <= 1
    right = summary["right", "streaming"]
    assert (right["n"], right["acceptance_rate"]) == (2, 0.0)
