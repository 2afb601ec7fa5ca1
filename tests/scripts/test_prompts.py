"""Prompts to measure with: their lengths, where they begin, and that no more is said than the texts hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from inputs.prompts import longest_context, ragged, random_text, round_the_text, stretches
from inputs.rows import RoundTheText
from tests.helpers import random_ids, tiny_model


def test_every_row_has_its_own_stretch_the_texts_take_turns_and_one_too_short_is_refused() -> None:
    texts = {"a": list(range(100)), "b": list(range(1000, 1030))}
    prompts = stretches(texts, 3, 11, bos=7)
    assert [prompt[0] for prompt in prompts] == [7, 7, 7] and {len(prompt) for prompt in prompts} == {11}
    assert prompts[0][1] < 50 <= prompts[2][1] and prompts[1][1] >= 1000
    assert len({token for prompt in prompts for token in prompt[1:]}) == 30  # no two overlap
    exact = stretches({"b": texts["b"]}, 3, 10, bos=None)
    assert [token for prompt in exact for token in prompt] == texts["b"]
    with pytest.raises(ValueError, match=r"b has 30 tokens, but 4 prompts of 11 need 40"):
        stretches({"b": texts["b"]}, 4, 11, bos=0)
    with pytest.raises(ValueError, match=r"b has 30 tokens, but 1 prompt of 40 needs 39"):
        stretches(texts, 2, 40, bos=0)


@pytest.mark.parametrize(
    ("n_tokens", "positions", "context"), [(10**6, 16384, 4096), (7813, 16384, 1900), (10**6, 1000, 1000), (40, 99, 11)]
)
def test_the_default_context_is_what_text_and_model_hold(n_tokens: int, positions: int, context: int) -> None:
    assert longest_context(n_tokens, 4, positions) == context


@given(st.integers(1, 60), st.integers(1, 8), st.integers(2, 40), st.booleans())
def test_rows_begin_at_places_of_their_own_and_run_round_the_text(n_ids: int, n: int, length: int, bos: bool) -> None:
    ids = list(range(100, 100 + n_ids))
    prompts = round_the_text(ids, n, length, 7 if bos else None)
    note = RoundTheText(ids, 7 if bos else None, {}).note(n, length)
    assert [len(prompt) for prompt in prompts] == [length] * n
    bodies = [prompt[1:] if bos else prompt for prompt in prompts]
    assert all(prompt[0] == 7 for prompt in prompts) or not bos
    for i, body in enumerate(bodies):
        start = body[0] - 100
        assert start == i * n_ids // n and body == [ids[(start + j) % n_ids] for j in range(len(body))]
    n_taken = sum(map(len, bodies))
    if n_taken <= n_ids:
        assert note is None and len({token for body in bodies for token in body}) == n_taken
    elif len(bodies[0]) <= n_ids:
        assert note is not None and "overlap" in note
    else:
        assert note is not None and "repeat it" in note


def test_shorter_prompts_are_the_beginnings_of_longer_ones_so_that_prefill_is_shared() -> None:
    ids = random_ids(900)
    short, long = round_the_text(ids, 3, 80, 1), round_the_text(ids, 3, 600, 1)
    assert [prompt[:80] for prompt in long] == short
    engine = Engine(tiny_model(), None, EngineConfig(batch_size=3, max_seq_len=620, compile=False))
    for prompts in (round_the_text(ids, 3, 300, 1), long):
        engine.generate(prompts, SamplingParams(max_tokens=2))
    assert engine.stats.prefill_tokens == 3 * (599 - 256)


def test_prompts_are_ragged_and_they_and_random_text_are_the_same_for_the_same_seed() -> None:
    texts = {"a": list(range(500)), "b": list(range(1000, 1400))}
    prompts = ragged(texts, 40, 5, 60, bos=7, seed=1)
    assert prompts == ragged(texts, 40, 5, 60, bos=7, seed=1) != ragged(texts, 40, 5, 60, bos=7, seed=2)
    lengths = {len(prompt) for prompt in prompts}
    assert 5 <= min(lengths) < 15 and 50 < max(lengths) <= 60
    assert all(prompt[0] == 7 and np.all(np.diff(prompt[1:]) == 1) for prompt in prompts)
    with pytest.raises(ValueError, match="b has 400 tokens, too few for prompts of up to 450"):
        ragged(texts, 1, 5, 450, bos=7, seed=1)
    assert random_text(9, 50, 1) == random_text(9, 50, 1) != random_text(9, 50, 2)
    assert max(random_text(900, 50, 1)) < 50
