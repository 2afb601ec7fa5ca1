"""N-gram lookup proposes what the obvious search would, and nothing but the row's own text.

Shapes: B slots, S places of text, gamma tokens drafted.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.model import Transformer
from gpt_fast_sd.policies.lookup import look_up
from gpt_fast_sd.state import RoundPlan
from tests.gpt_fast_sd.policies.drafting import (
    PROMPTS,
    drafting,
    misfit,
    tokens_of,
    told_the_targets_own,
    toy_engine,
)
from tests.helpers import random_ids, tiny_config, tiny_model


def naive(text: list[int], ngram: int, gamma: int) -> list[int] | None:
    """The tokens after the longest earlier match of the end of text, ties go to the latest; None without a match."""
    for n in range(min(ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                longer = list(text)
                for _ in range(gamma):
                    longer.append(longer[start + n])
                    start += 1
                return longer[len(text) :]
    return None


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=4),
    ngram=st.integers(1, 5),
    gamma=st.integers(1, 8),
    junk=st.integers(0, 2),
)
def test_it_drafts_what_followed_the_latest_longest_match(
    rows: list[list[int]], ngram: int, gamma: int, junk: int
) -> None:
    text = torch.full((len(rows), 24), junk)  # what is past the text must not count
    for i, row in enumerate(rows):
        text[i, : len(row)] = torch.tensor(row)
    tokens, matched = look_up(text, torch.tensor([len(row) - 1 for row in rows]), ngram, gamma)
    for i, row in enumerate(rows):
        expected = naive(row, ngram, gamma)
        assert matched[i] == (expected is not None)
        assert expected is None or tokens[i].tolist() == expected


@pytest.mark.parametrize(
    ("row", "ngram", "drafted"),
    [
        ([1, 2, 3, 1, 2], 99, [3, 1]),  # as long as the text at most
        ([7, 1, 2, 3, 1, 2], 2, [3, 1, 2, 3, 1, 2, 3]),  # close to the end it goes on with its period
    ],
)
def test_drafts_that_were_found_by_hand(row: list[int], ngram: int, drafted: list[int]) -> None:
    tokens, matched = look_up(torch.tensor([[*row, 0, 0, 0]]), torch.tensor([len(row) - 1]), ngram, len(drafted))
    assert matched.tolist() == [True] and tokens.tolist() == [drafted]


def test_sampled_tokens_follow_the_target_exactly() -> None:
    assert misfit(toy_engine("lookup"), 4, SamplingParams(temperature=1.0)) < 1
    assert misfit(toy_engine("lookup"), 4, SamplingParams(temperature=1.0), told_the_targets_own) > 1


def without_attention() -> Transformer:
    """A target whose next token depends on the last one alone: its greedy text soon goes round in a circle."""
    model = tiny_model(tiny_config(vocab_size=12))
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.wo.weight.zero_()
    return model


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_all_drafts_for_a_text_that_repeats_itself_are_accepted(gamma: int) -> None:
    model = without_attention()
    plain = drafting("off", model=model).generate([[1], [2], [5]], SamplingParams(max_tokens=60))
    prompts = [[start, *completion.tokens] for start, completion in zip((1, 2, 5), plain, strict=True)]
    one = drafting("lookup", model=model, gamma=gamma)
    one.generate(prompts, SamplingParams(max_tokens=50))
    assert one.stats.acceptance_rate == 1.0 and one.stats.drafted >= 75


def test_a_row_without_a_match_drafts_nothing_while_its_neighbour_does() -> None:
    one = drafting("lookup", model=without_attention(), gamma=4)
    lone, pair = one.generate([[3], [3, 4, 3]], SamplingParams(max_tokens=2))
    assert lone.stats.drafted == 0 and pair.stats.drafted == 1


def test_what_a_slot_held_before_is_not_looked_at() -> None:
    used, fresh = drafting("lookup", gamma=4), drafting("lookup", gamma=4)
    used.generate([random_ids(600, seed=seed, vocab_size=4) for seed in range(4)], SamplingParams(max_tokens=8))
    prompts = [random_ids(n, seed=n, vocab_size=8) for n in (1, 5, 30, 100)]
    got, expected = (one.generate(prompts, SamplingParams(max_tokens=12)) for one in (used, fresh))
    assert [c.stats for c in got] == [c.stats for c in expected]
    assert tokens_of(got) == tokens_of(expected)


def test_an_idle_slot_may_hold_more_text_than_is_in_view() -> None:
    """The end of its text once lay outside the part of the history that was searched."""
    one = drafting("lookup", gamma=2, engine={"max_seq_len": 1200})
    one.generate([[1], [2], [3], random_ids(1100)], SamplingParams(max_tokens=2))
    got = one.generate(PROMPTS[:3], SamplingParams(max_tokens=5))
    assert one.cache.seq_len.max() > 1000  # the long prompt, held by the slot that was not taken
    assert tokens_of(got) == tokens_of(drafting("off").generate(PROMPTS[:3], SamplingParams(max_tokens=5)))


def test_it_reads_no_keys() -> None:
    one = drafting("lookup", gamma=4)
    assert one.policy is not None
    assert one.policy.kv_bytes(RoundPlan.of({0: 9}, gamma=4)) == 0
    read = one.policy.positions_read(one.cache.seq_len)
    assert read.shape == (2, 4, 2, one.cache.layers[0].k.shape[2]) and not read.any()
    one.generate(PROMPTS[:4], SamplingParams(max_tokens=5))
    assert one.policy.graphs == 0
