"""scripts/frontier.py as a user types it, and the parts that benchmarks/speculation.py shares with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import frontier
from frontier import (
    Pairs,
    Setting,
    buildable,
    draft_with,
    longest_context,
    parse,
    prepare,
    round_ms,
    settings_of,
    stretches,
    take_turns,
)
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.stats import EngineStats
from tests.helpers import ByteTokenizer, random_ids, tiny_model

QUICK = ["--no-compile", "--batch-size", "2", "--context", "96", "--new-tokens", "6", "--pairs", "1"]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line on stderr of a run that must exit with 2 before it prints anything."""
    with pytest.raises(SystemExit) as stopped:
        frontier.main([*QUICK, *argv])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == "" and "Traceback" not in err
    line: str = err.strip().splitlines()[-1]
    return line


# ---- the command -----------------------------------------------------------------------------------------------------


def test_every_policy_and_budget_is_a_point_and_what_cannot_be_built_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    found, picture = tmp_path / "frontier.json", tmp_path / "frontier.png"
    policies = "streaming,snapkv,lookup,standalone"
    argv = [
        "--policies",
        policies,
        "--budgets",
        "16,64",
        "--json",
        str(found),
        "--plot",
        str(picture),
        "--dtype",
        "fp32",
    ]
    frontier.main([*QUICK, *argv])
    document: dict[str, Any] = json.loads(found.read_text())
    points = [(r["policy"], r["budget"]) for r in document["results"]]
    assert points == [("streaming", 16), ("streaming", 64), ("snapkv", 64), ("lookup", None)]
    assert set(document["skipped"]) == {"snapkv 16", "standalone 16", "standalone 64"}
    for result in document["results"]:
        assert 0 <= result["acceptance_rate"] <= 1 <= result["tokens_per_round"] <= 5
        assert 0 < result["distinct_4grams"]["plain"] <= 1
        assert result["distinct_4grams"]["speculative"] == result["distinct_4grams"]["plain"]  # greedy, in fp32
        assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]
        assert set(result["speculative_ms"]) == {"round", "draft", "verify", "host"}
        assert result["kv_bytes_per_token"]["plain"] > 0
    assert document["settings"]["context"] == 96 and not document["settings"]["compiled"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "skipped snapkv 16: budget must be at least 64 for snapkv, got 16" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("streaming", "snapkv", "lookup"))] == [
        ["streaming", "16"], ["streaming", "64"], ["snapkv", "64"], ["lookup", "-"],
    ]  # fmt: skip


def test_a_frontier_that_was_interrupted_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, original, drafted = tmp_path / "frontier.json", frontier.draft_with, []

    def interrupted(engine: Engine, draft: DraftConfig, draft_model: Any = None) -> None:
        if len(drafted) == 2:
            raise KeyboardInterrupt
        drafted.append(draft.budget)
        original(engine, draft, draft_model)

    monkeypatch.setattr(frontier, "draft_with", interrupted)
    argv = [*QUICK, "--policies", "streaming", "--budgets", "16,32,64", "--pairs", "0", "--json", str(found)]
    with pytest.raises(KeyboardInterrupt):
        frontier.main(argv)
    before = json.loads(found.read_text())["results"]
    assert [r["budget"] for r in before] == drafted == [16, 32]
    drafted.clear()
    frontier.main(argv)
    after = json.loads(found.read_text())["results"]
    assert drafted == [64] and after[:2] == before and len(after) == 3
    capsys.readouterr()
    said = refusal(capsys, *argv, "--gamma", "2")
    assert "was measured with gamma 4, not 2: name another file, or begin anew with --fresh" in said
    drafted.clear()
    frontier.main([*argv, "--gamma", "2", "--budgets", "16", "--fresh"])
    assert len(json.loads(found.read_text())["results"]) == 1


def test_without_pairs_acceptance_is_that_of_timed_runs_and_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, generate = [], Engine.generate

    def noting(*args: Any, speculate: bool = True, **others: Any) -> Any:
        runs.append("SP"[not speculate])
        return generate(*args, speculate=speculate, **others)

    monkeypatch.setattr(Engine, "generate", noting)
    found = []
    for pairs in ("1", "0"):
        file = tmp_path / f"{pairs}.json"
        argv = ["--policies", "streaming,lookup", "--budgets", "64", "--pairs", pairs, "--json", str(file)]
        frontier.main([*QUICK, *argv, "--temperature", "0.8"])
        found.append(json.loads(file.read_text())["results"])
    assert "".join(runs) == 2 * "SPPS" + "P" + "SS"
    for timed, counted in zip(*found, strict=True):
        assert timed["ratio"] and counted["ratio"] is counted["plain_ms"] is counted["speculative_ms"] is None
        for name in ("acceptance_rate", "acceptance_by_position", "tokens_per_round", "distinct_4grams"):
            assert timed[name] == counted[name]
    assert "nothing was timed" in capsys.readouterr().out


def test_several_texts_share_the_rows_and_several_files_are_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path, sentence in zip(texts, ("The captain wrote. ", "Rain fell on the hills. "), strict=True):
        path.write_text(sentence * 60, encoding="utf-8")
    files = []
    for context, temperature in (("90", "0"), ("60", "0"), ("60", "0.8")):
        files.append(str(tmp_path / f"{context}_{temperature}.json"))
        argv = ["--text", *map(str, texts), "--context", context, "--temperature", temperature, "--json", files[-1]]
        frontier.main([*QUICK, *argv, "--pairs", "0", "--policies", "streaming,lookup", "--budgets", "16,32"])
        assert json.loads(Path(files[-1]).read_text())["settings"]["text"] == "a.txt, b.txt"
    picture = tmp_path / "all.png"
    frontier.main(["--draw", *files, "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert "--draw needs --plot" in refusal(capsys, "--draw", *files)
    assert "a.txt holds no results of this program" in refusal(capsys, "--draw", str(texts[0]), "--plot", str(picture))


def test_a_policy_that_does_not_fit_the_model_is_skipped_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = frontier.draft_with

    def picky(engine: Engine, draft: DraftConfig, draft_model: Any = None) -> None:
        if draft.policy == "early_exit":
            raise ValueError("no layer to leave after")
        original(engine, draft, draft_model)

    monkeypatch.setattr(frontier, "draft_with", picky)
    frontier.main([*QUICK, "--policies", "early_exit,lookup", "--budgets", "64"])
    out = capsys.readouterr().out
    assert "skipped early_exit 64: no layer to leave after" in out and "\nlookup" in out


def test_without_a_text_the_bundled_document_is_shared_out_over_the_rows() -> None:
    args = parse(["--no-compile"])
    job = prepare(args)
    assert len(job.prompts) == 4 and len({tuple(prompt) for prompt in job.prompts}) == 4
    assert {len(prompt) for prompt in job.prompts} == {len(job.prompts[0])}
    assert 1000 <= len(job.prompts[0]) <= 4096
    assert {setting.policy for setting in job.settings} >= {"streaming", "snapkv", "quest", "guided", "lookup"}
    assert not job.skipped


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--context", "5000"], "tokens, but 2 prompts of 5,000 need 9,998"),
        (["--context", "1"], "a context of 1 does not fit: from 2 to 16,378"),
        (["--context", "16384"], "a context of 16,384 does not fit"),
        (["--budgets", "8,64"], "budget must be at least 12 for streaming, got 8"),
        (["--budgets", "0"], "expected a whole number of at least 1, got '0'"),
        (["--policies", "psychic"], "there is no policy 'psychic'"),
        (["--policies", "standalone"], "needs draft_model"),
        (["--policies", "standalone", "--draft-model", "nowhere"], "no folder nowhere"),
        (["--gamma", "17"], "gamma must be from 1 to 16, got 17"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--json", "nowhere/x.json"], "there is no folder"),
        (["--plot", "nowhere/x.png"], "there is no folder"),
        (["--plot", "x.txt"], "its name must end in .png"),
        (["--dtype", "fp8"], "'fp8'"),
        (["--model", "nowhere"], "no folder nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert said in refusal(capsys, *argv)


def test_an_empty_text_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt is empty" in refusal(capsys, "--text", str(tmp_path / "empty.txt"))


# ---- the pieces ------------------------------------------------------------------------------------------------------


def test_every_row_has_its_own_stretch_and_the_texts_take_turns() -> None:
    texts = {"a": list(range(100)), "b": list(range(1000, 1030))}
    prompts = stretches(texts, 3, 11, bos=7)
    assert [prompt[0] for prompt in prompts] == [7, 7, 7] and {len(prompt) for prompt in prompts} == {11}
    assert prompts[0][1] < 50 <= prompts[2][1] and prompts[1][1] >= 1000
    assert len({token for prompt in prompts for token in prompt[1:]}) == 30  # no two overlap
    exact = stretches({"b": texts["b"]}, 3, 10, bos=None)
    assert [token for prompt in exact for token in prompt] == texts["b"]


def test_a_text_too_short_says_how_many_tokens_there_are_and_are_needed() -> None:
    with pytest.raises(ValueError, match=r"b has 30 tokens, but 4 prompts of 11 need 40"):
        stretches({"b": list(range(30))}, 4, 11, bos=0)
    with pytest.raises(ValueError, match=r"b has 30 tokens, but 1 prompt of 40 needs 39"):
        stretches({"a": list(range(100)), "b": list(range(30))}, 2, 40, bos=0)


@pytest.mark.parametrize(
    ("n_tokens", "positions", "context"), [(10**6, 16384, 4096), (7813, 16384, 1900), (10**6, 1000, 1000), (40, 99, 11)]
)
def test_the_default_context_is_what_text_and_model_hold(n_tokens: int, positions: int, context: int) -> None:
    assert longest_context(n_tokens, 4, positions) == context


def test_a_policy_without_a_budget_is_measured_once() -> None:
    settings = settings_of(["lookup", "full", "quest"], [48, 64])
    assert [(s.policy, s.budget) for s in settings] == [("lookup", None), ("full", None), ("quest", 48), ("quest", 64)]


def test_the_name_of_a_hierarchy_says_who_is_its_cheap_level() -> None:
    over = Setting(policy="hierarchy/standalone", budget=64).draft(4, "bundled")
    assert (over.policy, over.cheap, over.draft_model, over.gamma) == ("hierarchy", "standalone", "bundled", 4)
    assert Setting(policy="hierarchy", budget=64).draft(4, "bundled").draft_model is None


def test_a_budget_that_no_policy_can_have_is_refused() -> None:
    settings = settings_of(["snapkv", "streaming"], [16, 64])
    fine, skipped = buildable(settings, [4], None)
    assert len(fine) == 3 and list(skipped) == ["snapkv 16"]
    with pytest.raises(ValueError, match="budget must be at least 64 for snapkv, got 16"):
        buildable(settings_of(["snapkv"], [16, 64]), [4], None)


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "quest", "guided", "lookup", "early_exit", "standalone"])
def test_an_engine_that_changes_its_draft_is_the_engine_that_was_built_with_it(policy: str) -> None:
    """Otherwise the frontier would not be what a user gets; the prompts are prefilled once for all of it."""
    model, small = tiny_model(), tiny_model(seed=1)
    config = EngineConfig(batch_size=2, max_seq_len=400, dtype="fp32", compile=False)
    prompts, params = [random_ids(300), random_ids(120, seed=1)], SamplingParams(max_tokens=24)
    changing = Engine(model, ByteTokenizer(), config)
    plain = [c.tokens for c in changing.generate(prompts, params)]
    for other in ("guided", policy):
        draft = Setting(policy=other, budget=None if other == "lookup" else 64).draft(3, "a folder")
        draft_with(changing, draft, small)
        changed = changing.generate(prompts, params)
    assert changing.stats.prefill_tokens == 0
    built = Engine(model, ByteTokenizer(), config, draft, small if policy == "standalone" else None)
    fresh = built.generate(prompts, params)
    assert [c.tokens for c in changed] == [c.tokens for c in fresh] == plain
    assert [c.stats for c in changed] == [c.stats for c in fresh]
    assert changing.stats.kv_bytes == built.stats.kv_bytes


def test_pairs_alternate_who_goes_first_after_an_untimed_run_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = Engine(
        model, ByteTokenizer(), EngineConfig(batch_size=1, max_seq_len=64, compile=False, dtype="fp32"),
        DraftConfig(policy="streaming", budget=16, gamma=2),
    )  # fmt: skip
    order, generate = [], engine.generate

    def noting(*args: Any, speculate: bool = True) -> Any:
        order.append("SP"[not speculate])
        return generate(*args, speculate=speculate)

    monkeypatch.setattr(engine, "generate", noting)
    pairs = take_turns(engine, [random_ids(40)], SamplingParams(max_tokens=5), 3)
    assert "".join(order) == "SP" + "PS" + "SP" + "PS"
    assert len(pairs.ratios) == 3
    assert [c.tokens for c in pairs.plain_outputs] == [c.tokens for c in pairs.speculative_outputs]
    assert pairs.counts.decode_tokens == 15 and sum(pairs.counts.rounds_by_gamma.values()) == pairs.counts.rounds


def test_short_runs_go_on_until_they_took_the_time_asked_for() -> None:
    class Quick:
        """Decodes in a quarter of a second, it says."""

        stats = EngineStats()

        def generate(self, *args: Any, speculate: bool) -> list[Any]:
            self.stats = EngineStats(decode_seconds=0.25, decode_tokens=1, rounds=1)
            return []

    engine: Any = Quick()
    assert len(take_turns(engine, [], SamplingParams(), 2).ratios) == 2
    assert len(take_turns(engine, [], SamplingParams(), 2, seconds=3.0).ratios) == 6


def test_a_run_that_the_machine_stopped_does_not_move_the_medians() -> None:
    def run(seconds: float) -> EngineStats:
        return EngineStats(decode_seconds=seconds, verify_seconds=seconds, decode_tokens=10, rounds=10)

    pairs = Pairs(plain=[run(1.0), run(1.0), run(60.0)], speculative=[run(0.5), run(0.5), run(0.5)])
    assert sorted(pairs.ratios) == [2.0, 2.0, 120.0]
    assert round_ms(pairs.plain)["round"] == 100.0
