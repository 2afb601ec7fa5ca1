"""Drafts that need no model of their own: the target's first layers with its own cache, and n-grams of the row's text.

Shapes: B slots, S places of text, gamma tokens drafted.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.model import RopeScaling, Transformer
from gpt_fast_sd.policies.lookup import look_up
from gpt_fast_sd.serving.lookup_trials import LookupTrials, Trial
from gpt_fast_sd.state import RoundPlan
from tests.gpt_fast_sd.policies.drafting import PROMPTS, drafting, tokens_of
from tests.helpers import random_ids, tiny_config, tiny_model, whole_text_logits

# ---- early exit: the same weights, the same cache, less of both ------------------------------------------------------

DEEP = tiny_config(n_layers=4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_layers_are_the_models_own_and_give_the_logits_of_a_truncated_one(n: int, tied: bool) -> None:
    how: dict[str, Any] = {"tie_embeddings": tied}
    how |= {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32)}  # which has a length, too
    model = tiny_model(tiny_config(n_layers=4, **how))
    short = model.first_layers(n)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in own for parameter in short.parameters())
    assert short.rope_freqs is model.rope_freqs and not short.training
    assert len(model.layers) == model.config.n_layers == 4 and short.config.n_layers == n
    truncated = Transformer(tiny_config(n_layers=n, **how)).eval().requires_grad_(False)
    truncated.load_state_dict({name: x for name, x in model.state_dict().items() if name in truncated.state_dict()})
    ids = random_ids(40)
    assert torch.equal(whole_text_logits(short, ids), whole_text_logits(truncated, ids))


def test_its_draft_is_what_the_first_layers_would_say_of_the_whole_text() -> None:
    model = tiny_model(DEEP)
    one = drafting("early_exit", model=model, exit_layers=2, view="full", gamma=4)
    prompt, short = random_ids(300), model.first_layers(2)
    rounds = one.stream([prompt], SamplingParams(max_tokens=50))
    next(rounds)  # what drafts and verification wrote is in the cache now
    text = one.state.history[0, : int(one.state.seq_len[0]) + 1].tolist()
    assert one.policy is not None
    with torch.inference_mode():
        drafted = one.policy.propose(one.state, RoundPlan.of({0: len(text) - 1}, gamma=4)).tokens[0].tolist()
    for token in drafted:
        assert token == int(whole_text_logits(short, text)[-1].argmax())
        text.append(token)


def test_a_guided_view_selects_from_the_mass_of_its_own_layers() -> None:
    """The later layers' mass lies elsewhere."""
    one = drafting("early_exit", model=tiny_model(DEEP), exit_layers=2, view="guided", budget=64, gamma=3)
    policy: Any = one.policy
    mass = torch.zeros(4, 4, 2, one.cache.capacity // 16)
    mass[:2, ..., 4] = 1.0
    mass[2:, ..., 9] = 100.0
    one.state.seq_len.fill_(500)
    policy.device_after_verify(one.state, mass)
    read = policy.positions_read(one.state.seq_len)
    assert read.shape[0] == 2
    assert read[..., 64:80].all() and not read[..., 144:160].any()


def test_half_of_the_layers_draft_unless_told_otherwise() -> None:
    for n_layers, n in ((4, 2), (3, 1)):
        one = drafting("early_exit", model=tiny_model(tiny_config(n_layers=n_layers)), gamma=2)
        policy: Any = one.policy
        assert policy.runner.model.config.n_layers == n
        assert policy.runner.cache.bytes_per_token * n_layers == one.cache.bytes_per_token * n


# ---- lookup: what the obvious search would propose -------------------------------------------------------------------


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
def test_it_drafts_what_followed_the_longest_match(rows: list[list[int]], ngram: int, gamma: int, junk: int) -> None:
    text = torch.full((len(rows), 24), junk)  # what is past the text must not count
    for i, row in enumerate(rows):
        text[i, : len(row)] = torch.tensor(row)
    tokens, matched = look_up(text, torch.tensor([len(row) - 1 for row in rows]), ngram, gamma)
    for i, row in enumerate(rows):
        expected = naive(row, ngram, gamma)
        assert matched[i] == (expected is not None)
        assert expected is None or tokens[i].tolist() == expected


def trials_of(text: Sequence[int], start: int, ngram: int, gamma: int) -> list[Trial]:
    """What rounds of gamma tokens that are looked up would show of the tokens from start on."""
    found, at = list[Trial](), start
    while at < len(text):
        drafts, n = naive([*text[:at]], ngram, gamma) or [], 0
        while n < min(gamma, len(text) - at) and drafts[n : n + 1] == [text[at + n]]:
            n += 1
        found += [(i, i < n) for i in range(min(n + 1, gamma, len(text) - at))]
        at += n + 1
    return found


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    pieces=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 5)), max_size=4),
    ngram=st.integers(1, 5),
    gamma=st.integers(1, 4),
)
def test_what_it_would_have_drafted_is_judged_as_if_it_had(
    text: list[int], pieces: list[tuple[list[int], int]], ngram: int, gamma: int
) -> None:
    reader = LookupTrials(text, ngram, gamma)
    for tokens, own in pieces:
        drafts, start = naive(text, ngram, own + 1) if own else None, len(text)
        if drafts:  # a round of its own, which accepts what is so, and ends with a token of the target's
            kept = next((i for i in range(min(own, len(tokens) - 1)) if drafts[i] != tokens[i]), len(tokens) - 1)
            text = text + (tokens := tokens[: min(kept, own) + 1])
            assert reader.follow_own(tokens, own) == [(own, drafts[own] == tokens[-1])] * (len(tokens) > own)
        else:
            text = text + tokens
            got = [trial for token in tokens for trial in reader.follow([token])]
            assert got == trials_of(text, start, ngram, gamma)
            assert not reader.follow_own([], 1)


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


def test_an_idle_slot_may_hold_more_text_than_is_in_view() -> None:
    """The end of its text once lay outside the part of the history that was searched."""
    one = drafting("lookup", gamma=2, engine={"max_seq_len": 1200})
    one.generate([[1], [2], [3], random_ids(1100)], SamplingParams(max_tokens=2))
    got = one.generate(PROMPTS[:3], SamplingParams(max_tokens=5))
    assert one.cache.seq_len.max() > 1000  # the long prompt, held by the slot that was not taken
    assert tokens_of(got) == tokens_of(drafting("off").generate(PROMPTS[:3], SamplingParams(max_tokens=5)))
