"""Turns of plain and speculative runs, and their results: speeds, spreads, repetition, predictions, lengths."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.serving.stats import EngineStats
from gpt_fast_sd.tp import Parallel
from measuring import turns as timing
from measuring.points import crossing, lengths_of, lines_of
from measuring.turns import Mark, Run, Turns, alpha_of, distinct_4grams, median_interval, steady_speed, take_turns
from tests.helpers import ByteTokenizer, Patch, ahead, random_ids, tiny_engine


def test_pairs_alternate_who_goes_first_after_a_short_untimed_run_of_each(monkeypatch: Patch) -> None:
    draft, said, streams = DraftConfig(policy="streaming", budget=16, gamma=2), list[str](), list[tuple[bool, int]]()
    engine = tiny_engine(draft, tokenizer=ByteTokenizer(), batch_size=1, max_seq_len=64)
    ahead(monkeypatch, engine, "stream", lambda _, p, *, speculate: streams.append((speculate, p[0].max_tokens)))
    turns = take_turns(engine, [random_ids(40)], [SamplingParams(max_tokens=20)], 3, progress=said.append)
    order = "".join("PS"[speculate] for speculate, _ in streams)
    assert order == "SP" + "PS" + "SP" + "PS" and [n for _, n in streams] == [16, 16, *[20] * 6]
    assert said == ["prefill", "pair 1 of 3", "pair 2 of 3", "pair 3 of 3"]
    assert len(turns.ratios("completion")) == len(turns.ratios("steady")) == 3 and turns.first_differences == []
    assert turns.prefill.prefill_tokens > 0 == turns.counts.prefill_tokens
    assert turns.counts.decode_tokens == 60 and sum(turns.counts.rounds_by_gamma.values()) == turns.counts.rounds
    assert set(turns.acceptance["distinct_4grams"]) == {"plain", "speculative"}
    assert turns.by_steps and turns.by_steps > 0


def quick(seconds: float) -> Any:
    """An engine that decodes nothing, and says that it took so long."""
    stats = EngineStats(decode_seconds=seconds, decode_tokens=1, rounds=1)
    return SimpleNamespace(stats=stats, stream=lambda *_, speculate: [])


def test_short_runs_go_on_until_they_took_the_time_asked_for() -> None:
    engine = quick(seconds=0.25)
    engine.parallel = Parallel(torch.device("cpu"))
    assert len(take_turns(engine, [], [SamplingParams()], 2).plain) == 2
    assert len(take_turns(engine, [], [SamplingParams()], 2, seconds=3.0).plain) == 6


def test_ranks_go_on_for_as_long_as_the_first_one_by_its_clock() -> None:
    """Each rank has its own clock: one that stopped alone would leave the others in a collective of the next pair.

    This one is through by its own clock after one pair, and the first rank is after three.
    """
    rank, first, asked = quick(seconds=9.0), iter([1, 1, 1, 0]), list[int]()
    rank.parallel = SimpleNamespace(same=lambda number: (asked.append(number), next(first))[1])
    assert len(take_turns(rank, [], [SamplingParams()], 1, seconds=3.0).plain) == 3
    assert asked == [1, 0, 0, 0]


def seconds(decode: float) -> Run:
    """A run of ten rounds."""
    return Run(EngineStats(decode_seconds=decode, verify_seconds=decode, decode_tokens=10, rounds=10), None, [])


def test_a_run_that_the_machine_stopped_does_not_move_the_medians_of_rounds_and_their_parts() -> None:
    turns = Turns([seconds(1.0), seconds(1.0), seconds(60.0)], [seconds(0.5), seconds(0.5), seconds(0.5)])
    assert sorted(turns.ratios()) == [2.0, 2.0, 120.0] and turns.ratios("steady") == []
    assert timing.round_ms(turns.plain) == {"round": 100.0, "draft": 0.0, "verify": 100.0, "host": 0.0}
    # and a round that is one graph is not told by part
    graph = Run(EngineStats(decode_seconds=1.0, decode_tokens=10, rounds=10), None, [])
    assert timing.round_ms([graph]) == {"round": 100.0, "draft": None, "verify": None, "host": None}
    assert Turns([graph], [graph]).by_steps is None


def test_stats_of_several_runs_add_up_position_by_position() -> None:
    one = EngineStats(rounds=2, compile_seconds=3.0, drafted_by_position=[2, 1], rounds_by_gamma={2: 2})
    other = EngineStats(rounds=1, compile_seconds=3.0, drafted_by_position=[1, 1, 1], rounds_by_gamma={0: 1, 2: 1})
    both = EngineStats(rounds=3, compile_seconds=3.0, drafted_by_position=[3, 2, 1], rounds_by_gamma={0: 1, 2: 3})
    assert one + other == both
    assert one.drafted_by_position == [2, 1]  # neither is changed
    shares = EngineStats(drafted_by_position=[4, 2, 0], accepted_by_position=[3, 1, 0])
    assert shares.acceptance_by_position == [0.75, 0.5, 0.0]


def test_outputs_that_part_are_told_by_row_and_first_position() -> None:
    outputs = [[1, 2, 3]] * 2, [[1, 2, 4]] * 2, [[1, 9, 3], [1, 2, 3]]
    plain, one, two = (Run(EngineStats(), None, rows) for rows in outputs)
    found = Turns([plain, plain], [one, two]).first_differences
    assert found == [{"row": 0, "position": 1}, {"row": 1, "position": 2}]


def test_what_is_timed_is_what_the_engine_streams() -> None:
    engine = tiny_engine(max_seq_len=64)
    prompts, params = [random_ids(9), random_ids(5, seed=1)], [SamplingParams(max_tokens=12, ignore_eos=True)] * 2
    finished: list[int] = []
    done = timing.run(engine, prompts, params, finished=finished.append)
    assert done.outputs == [c.tokens for c in engine.generate(prompts, params)]
    assert done.steady is not None and done.steady > 0 and sorted(finished) == [0, 1]
    assert done.completion == done.stats.decode_tokens_per_second


def stream_of(rounds: list[list[tuple[int, int, bool]]]) -> list[Mark]:
    """Marks of rounds a second apart, each a list of (row, tokens, is_last), its events a millisecond apart."""
    return [Mark(10.0 + i + 1e-3 * j, *event) for i, events in enumerate(rounds) for j, event in enumerate(events)]


def test_steady_speed_leaves_out_the_first_round_and_whatever_comes_when_a_row_ends() -> None:
    rounds = [
        [(0, 9, False), (1, 9, False)], [(0, 2, False), (1, 3, False)], [(0, 4, False), (1, 1, False)],
        [(0, 1, False), (1, 1, True)], [(0, 5, False)], [(0, 5, True)],
    ]  # fmt: skip
    assert steady_speed(stream_of(rounds)) == pytest.approx((2 + 3 + 4 + 1) / 2.0)
    assert steady_speed([]) is None  # nor has a run of a round or two one
    assert steady_speed(stream_of([[(0, 3, True)]])) is None
    assert steady_speed(stream_of([[(0, 3, False)], [(0, 3, True)]])) is None


def test_text_that_repeats_itself_has_few_distinct_4grams() -> None:
    assert distinct_4grams([[1, 2, 3, 4, 5, 6]]) == 1.0
    assert distinct_4grams([[7] * 13]) == pytest.approx(0.1)  # ten times the same four
    assert distinct_4grams([[1, 2, 1, 2, 1, 2, 1]]) == pytest.approx(0.5)
    assert distinct_4grams([[7] * 13, [1, 2, 3, 4]]) == pytest.approx(0.55)  # every row counts alike
    assert distinct_4grams([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 1.0  # rows are not compared with each other
    assert distinct_4grams([[1, 2, 3], [1, 2, 3, 4]]) == 1.0  # nor do short ones count
    assert distinct_4grams([[1, 2, 3], []]) is None


def test_the_interval_of_a_median_is_made_of_its_values() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == [1.0, 3.0]  # of so few, no inner pair is sure enough
    assert median_interval(list(range(9))) == [1, 7]  # coverage 0.961; the pair inside has 0.82
    assert median_interval(list(range(100))) == [39, 60]  # coverage 0.965, as tables of order statistics have it


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
    turns = Turns([Run(plain, None, [])], [Run(speculative, None, [])])
    # a draft counts only where those before it were kept
    assert alpha_of(speculative) == 3000 / (4000 + 2000) and alpha_of(EngineStats()) == 0.0
    assert timing.tokens_by_alpha(speculative, 0.5) == speculative.tokens_per_round == 1.75
    assert turns.ratios() == [pytest.approx(1.25)] and turns.by_steps == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("values", "context", "of_measured", "phrase"),
    [
        ([1.1, 1.2, 1.3], None, "below", "below 1,000"),
        ([0.7, 0.8, 0.9], None, "none", "none up to 16,000"),
        ([0.9, 1.1, 1.2], math.sqrt(1000 * 4000), "between", "2,000"),
        ([0.9, 1.0, 1.2], 4000.0, "between", "4,000"),
        ([0.5, 0.75, 1.25], math.sqrt(4000 * 16000), "between", "8,000"),
        ([1.2, 0.9, 1.1], math.sqrt(4000 * 16000), "between", "8,000"),  # from there on it stays above
        ([1.2, 1.1, 1.0], None, "none", "none up to 16,000"),
    ],
)
def test_a_crossing_is_where_the_line_stays_above_over_log2_of_the_context(
    values: list[float], context: float | None, of_measured: str, phrase: str
) -> None:
    found = crossing([1000, 4000, 16000], values, 1.0)
    assert (found["of_measured"], found["phrase"]) == (of_measured, phrase)
    assert found["context"] == (pytest.approx(context) if context else None)


def test_the_critical_length_is_where_the_speedup_begins_to_grow_with_the_batch() -> None:
    """As MagicDec's figure: it falls with the batch at 1K, does not change at 2K, and rises at 8K."""
    points = [
        {"batch": batch, "context": context, "policy": "streaming", "budget": 256, "gamma": 6,
         "speedup": {"steady": {"median": steady}, "completion": {"median": 0.0}}}
        for context, row in {1000: [0.8, 0.7, 0.6], 2000: [0.9, 0.9, 0.9], 8000: [1.0, 1.4, 1.8]}.items()
        for batch, steady in zip((1, 4, 16), row, strict=True)
    ]  # fmt: skip
    *evens, critical = lengths_of(points)
    assert (critical["kind"], critical["context"], critical["of_measured"]) == ("critical length", 2000.0, "between")
    assert critical["slopes"] == pytest.approx([-0.05, 0.0, 0.2])
    assert [(r["kind"], r["batch"]) for r in evens] == [("break-even", batch) for batch in (1, 4, 16)]
    assert [r["phrase"] for r in evens] == ["none up to 8,000", "2,639", "2,333"]
    (alone,) = lengths_of(points[::3])  # one batch: it has no slope
    assert alone["kind"] == "break-even"
    assert lines_of(lengths_of(points)) == [
        "streaming 256, gamma 6: critical length 2,000 tokens; break-even at batch 1 none up to 8,000, "
        "batch 4 2,639, batch 16 2,333"
    ]
    assert "critical length needs two batches" in lines_of([alone])[0]
