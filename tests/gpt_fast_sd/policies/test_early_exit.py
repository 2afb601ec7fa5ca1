"""Early exit drafts with the target's own first layers: the same weights, the same cache, less of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.model import Transformer
from gpt_fast_sd.policies import ModelDraft
from gpt_fast_sd.state import RoundPlan
from tests.gpt_fast_sd.policies.drafting import (
    PROMPTS,
    drafting,
    misfit,
    toy_engine,
)
from tests.helpers import random_ids, tiny_config, tiny_model, whole_text_logits

DEEP = tiny_config(n_layers=4)


def idle_after(n: int) -> Transformer:
    """A target of four layers of which those after the first n add nothing."""
    model = tiny_model(DEEP)
    with torch.no_grad():
        for layer in model.layers[n:]:
            layer.attention.wo.weight.zero_()
            layer.feed_forward.w_out.weight.zero_()
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_layers_are_the_models_own_and_give_the_logits_of_a_truncated_one(n: int, tied: bool) -> None:
    model = tiny_model(tiny_config(n_layers=4, tie_embeddings=tied))
    short = model.first_layers(n)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in own for parameter in short.parameters())
    assert short.rope_freqs is model.rope_freqs and not short.training
    assert len(model.layers) == model.config.n_layers == 4 and short.config.n_layers == n
    truncated = Transformer(tiny_config(n_layers=n, tie_embeddings=tied)).eval().requires_grad_(False)
    truncated.load_state_dict({name: x for name, x in model.state_dict().items() if name in truncated.state_dict()})
    ids = random_ids(40)
    assert torch.equal(whole_text_logits(short, ids), whole_text_logits(truncated, ids))


def test_it_reads_the_first_layers_of_the_targets_own_cache() -> None:
    one = drafting("early_exit", model=tiny_model(DEEP), exit_layers=3, view="full", gamma=2)
    assert isinstance(one.policy, ModelDraft)
    cache = one.policy.runner.cache
    assert [id(layer) for layer in cache.layers] == [id(layer) for layer in one.cache.layers[:3]]
    assert cache.seq_len is one.cache.seq_len and cache.capacity == one.cache.capacity
    assert len(one.cache.layers) == 4 and cache.bytes_per_token * 4 == one.cache.bytes_per_token * 3


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


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_exactly() -> None:
    assert misfit(toy_engine("early_exit", n_layers=2), 4, SamplingParams(temperature=1.0)) < 1


@pytest.mark.parametrize(("exit_layers", "all_accepted"), [(1, False), (2, True), (3, True)])
def test_drafts_are_all_accepted_where_the_layers_left_out_add_nothing(exit_layers: int, all_accepted: bool) -> None:
    one = drafting("early_exit", model=idle_after(2), exit_layers=exit_layers, view="full", gamma=4)
    one.generate(PROMPTS, SamplingParams(max_tokens=11))
    assert (one.stats.acceptance_rate == 1.0) == all_accepted and one.stats.drafted > 50


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
    one: Any = drafting("early_exit", model=tiny_model(DEEP), gamma=2).policy
    assert one.runner.model.config.n_layers == 2
    one = drafting("early_exit", model=tiny_model(tiny_config(n_layers=3)), gamma=2).policy
    assert one.runner.model.config.n_layers == 1


@pytest.mark.parametrize(("n_layers", "exit_layers"), [(4, 4), (4, 9), (1, None)])
def test_an_exit_after_all_layers_is_refused(n_layers: int, exit_layers: int | None) -> None:
    with pytest.raises(ValueError, match=f"exit_layers must be below the model's {n_layers} layers"):
        drafting("early_exit", model=tiny_model(tiny_config(n_layers=n_layers)), exit_layers=exit_layers)
