"""A standalone draft's cache holds what a prefill of the text would give, whatever was accepted, skipped or idle."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt_fast_sd
from gpt_fast_sd import Engine, SamplingParams
from gpt_fast_sd.loading.fit import check_same_vocabulary
from gpt_fast_sd.model import KVCache, Transformer, load_tokenizer, read_config
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.policies.standalone import StandaloneDraft
from gpt_fast_sd.serving.requests import Request
from gpt_fast_sd.state import BatchState, RoundPlan
from tests.gpt_fast_sd.policies.drafting import (
    PROMPTS,
    drafting,
    drafting_now_and_then,
    entries,
    holds_a_prefill,
    nearly,
    prefilled,
    tokens_of,
)
from tests.gpuless.recorder import mixed_devices
from tests.helpers import ByteTokenizer, ahead, few, random_ids, tiny_config, tiny_model

SMALLER = tiny_config(n_layers=1, dim=24, n_heads=3, n_kv_heads=3, ffn_dim=32)


def standalone(draft_model: Transformer | None = None, **draft: Any) -> tuple[Engine, StandaloneDraft]:
    """An engine whose draft model has the target's own weights unless another is given, and sees everything."""
    one = drafting("standalone", draft_model=draft_model or tiny_model(), **{"view": "full", "gamma": 4} | draft)
    assert isinstance(one.policy, StandaloneDraft)
    return one, one.policy


# ---- the cache -----------------------------------------------------------------------------------------------------


def test_after_every_round_the_cache_holds_what_a_prefill_gives() -> None:
    one, policy = standalone(nearly(tiny_model(), by=0.05))
    assert set(holds_a_prefill(one, policy.runner, PROMPTS, lag=2)) == {0, 1, 2, 3, 4}  # every pattern occurred


def assert_prefilled(policy: StandaloneDraft, slot: int, body: Sequence[int]) -> None:
    """The cache of a slot begins, bit for bit, with what a prefill gives."""
    assert all(map(torch.equal, entries(policy.runner.cache, slot, len(body)), prefilled(policy.runner, body)))


def assert_holds(policy: StandaloneDraft, state: BatchState, lengths: Mapping[int, int]) -> None:
    """The cache of each slot begins with about what a prefill of so many tokens of its text gives."""
    for slot, length in lengths.items():
        found = entries(policy.runner.cache, slot, length)
        wanted = prefilled(policy.runner, state.history[slot, :length].tolist())
        # fp32, the same sums in another order
        assert all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "pattern",
    few([[4], [3, 0, 0], [4, 0], [0, 0, 0, 1, 5], [3, 3, 0], [0] * 290 + [4] * 5], [[3, 0, 0], [0, 0, 0, 1, 5]]),
)
def test_rounds_without_a_draft_are_made_up_for_and_a_view_is_shown_what_is_there(pattern: list[int]) -> None:
    """290 of them take more than one chunk. Where all drafts were accepted, the last is not there as a round begins."""
    one, policy = standalone()
    drafting_now_and_then(one, pattern)
    propose, shown, rounds = policy.propose, list[int](), 0

    def begin(state: BatchState, plan: RoundPlan) -> None:
        assert all(int(state.seq_len[slot]) == length for slot, length in plan.lengths.items())
        assert_holds(policy, state, plan.lengths)
        shown.extend(plan.lengths.values())

    def checked(state: BatchState, plan: RoundPlan) -> Draft:
        nonlocal rounds
        rounds += 1
        draft = propose(state, plan)
        assert_holds(policy, state, {slot: length + 1 for slot, length in plan.lengths.items()})
        return draft

    policy.propose, policy.view.device_before_draft = checked, begin  # type: ignore[method-assign]
    n = 310 if len(pattern) > 100 else 30
    one.generate(PROMPTS[:2] if n > 100 else PROMPTS, SamplingParams(max_tokens=n))
    assert rounds >= 3 and (0 not in pattern or one.stats.rounds_by_gamma[0] > 2)
    assert max(shown) > 250 and (min(shown) == 0 or not pattern[0])
    assert one.stats.acceptance_rate == 1.0


def test_calls_with_and_without_speculation_may_take_turns() -> None:
    one, _ = standalone()
    plain = tokens_of(drafting("off").generate(PROMPTS, SamplingParams(max_tokens=12)))
    for speculate in (True, False, True):
        assert tokens_of(one.generate(PROMPTS, SamplingParams(max_tokens=12), speculate=speculate)) == plain
        assert one.stats.acceptance_rate == (1.0 if speculate else 0.0)


def test_a_prompt_that_a_live_slot_holds_is_copied_as_it_was_prefilled() -> None:
    """Its last token was fed again since, through a view that sees less than a prefill."""
    prompt = random_ids(300)
    one, policy = standalone(view="streaming", budget=16)
    rounds = one.stream([prompt, *PROMPTS[:3], prompt], [SamplingParams(max_tokens=n) for n in (40, 4, 40, 40, 40)])
    while one.schedule.slots[1] is None or one.schedule.slots[1].index != 4:
        next(rounds)
    assert_prefilled(policy, 1, prompt[:-2])
    request = Request(0, prompt, SamplingParams(), frozenset(), None)
    one.schedule.release(1)
    with torch.inference_mode():
        one.schedule._admit(request)
        while one.schedule.arrival:
            one.schedule._fill()
    assert_prefilled(policy, 1, prompt[:-1])


@pytest.mark.parametrize("view", few(["full", "streaming"], ["full"]))
def test_a_prompt_held_by_an_idle_slot_is_there_unharmed_when_it_comes_again(view: str) -> None:
    """Idle slots are fed too, and a two-token step begins inside the prompt: the bits must still be a prefill's."""
    prompt, other = random_ids(300, seed=1), random_ids(40, seed=2)
    one, policy = standalone(view=view, budget=16)
    (fresh, expected), params = standalone(view=view, budget=16), SamplingParams(max_tokens=30)
    for _ in range(2):
        one.generate([prompt, other], params)
        one.generate([other], params)  # the prompt's slot is idle
        one.logits(other[:3])  # empties slot 0 of the target's cache
        one.generate([other], params)
    next(one.stream([prompt], params))
    slot = next(i for i in range(4) if one.state.history[i, :300].tolist() == prompt)
    next(fresh.stream([prompt], params))
    found, wanted = entries(policy.runner.cache, slot, 298), entries(expected.runner.cache, 0, 298)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_prompt_that_was_prepared_is_not_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what is past it made zero a second time, which is most of a slot."""
    one, policy = standalone()
    one.warm_up()
    cleared = list[tuple[bool, int]]()
    ahead(monkeypatch, KVCache, "vacate", lambda kv, slot, **_: cleared.append((kv is policy.runner.cache, slot)))
    one.generate(PROMPTS[:4], SamplingParams(max_tokens=5))
    assert sorted(cleared) == [(drafts, slot) for drafts in (False, True) for slot in range(4)]


def test_a_policy_that_is_admitted_to_without_preparing_prefills_by_itself() -> None:
    _, policy = standalone()
    prompt = random_ids(300, seed=9)
    with torch.inference_mode():
        for fillings in ([], policy.prepare(0, random_ids(300, seed=8)), policy.prepare(0, prompt)):
            for filling in fillings[:1]:  # the last one has all its chunks, but was never marked as finished
                while filling.left and filling.body == prompt[:-1]:
                    filling.step()
            policy.host_admit(0, prompt)
            assert_prefilled(policy, 0, prompt[:-1])
            policy.host_free(0)


def test_a_slot_is_given_up_without_asking_the_device_for_anything() -> None:
    """A host read there would wait for the round in flight."""
    one, _ = standalone(gamma=2)
    one.generate(PROMPTS[:4], SamplingParams(max_tokens=5))
    with mixed_devices() as seen, torch.inference_mode():
        one.schedule.release(0)
    assert not seen


def test_a_policy_that_is_given_back_does_not_rely_on_what_timing_wrote_over() -> None:
    """Its steps are timed over about 512 keys, in the middle of a prompt that its cache held."""
    prompt, params = random_ids(600, seed=1), SamplingParams(max_tokens=8)
    one, policy = standalone(gamma="auto")
    drafting_now_and_then(one, [4])
    one.generate([prompt], params)
    one.policy = policy
    drafting_now_and_then(one, [4])
    one.generate([prompt], params)
    assert one.stats.acceptance_rate == 1.0
    assert one.state.history[0, :599].tolist() == prompt[:-1]
    assert_holds(policy, one.state, {0: 599})


def test_a_draft_model_of_another_shape_shares_the_record_of_what_is_committed() -> None:
    one, policy = standalone(tiny_model(SMALLER))
    assert policy.runner.cache.seq_len is one.cache.seq_len
    assert policy.runner.cache.capacity == one.cache.capacity and policy.runner.shape == (1, 4, 3)
    assert policy.positions_read(one.cache.seq_len).shape == (1, 4, 3, one.cache.layers[0].k.shape[2])
    params = SamplingParams(max_tokens=16)
    expected = tokens_of(one.generate(PROMPTS, params, speculate=False))
    assert tokens_of(one.generate(PROMPTS, params)) == expected and one.stats.drafted > 0


# ---- refusals, and vocabularies that differ in rows of padding -----------------------------------------------------


def test_a_draft_model_with_just_enough_positions_is_taken_and_redrafting_takes_a_configuration() -> None:
    one, _ = standalone(tiny_model(tiny_config(max_seq_len=640)))
    with pytest.raises(ValueError, match=r"draft must be DraftConfig\(...\), got None"):
        one.redraft(None)  # type: ignore[arg-type]
    one.generate([random_ids(630)], SamplingParams(max_tokens=10))
    assert one.stats.acceptance_rate == 1.0


def test_a_draft_model_with_another_tokenizer_is_refused_be_it_in_one_token(tmp_path: Path) -> None:
    bundled = Path(gpt_fast_sd.__file__).parent / "bundled"
    config = read_config(bundled)
    own = load_tokenizer(bundled, config)
    check_same_vocabulary(own, config, bundled)
    with pytest.raises(ValueError, match=r"has another tokenizer than the target .*: they must share one"):
        check_same_vocabulary(ByteTokenizer(), config, bundled)
    with pytest.raises(ValueError, match="without a tokenizer of each nobody can tell"):
        check_same_vocabulary(None, replace(config, vocab_size=4100), bundled)
    shutil.copytree(bundled, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    pieces = (bundled / "tokenizer.model").read_bytes()
    assert pieces.count(b"\xe2\x96\x81the") > 1 and own
    first = own.encode("the", bos=False)
    (tmp_path / "other" / "tokenizer.model").write_bytes(pieces.replace(b"\xe2\x96\x81the", b"\xe2\x96\x81thq", 1))
    with pytest.raises(ValueError, match=rf"\(token {first[0]} is ' the', not ' thq'\): they must share one"):
        check_same_vocabulary(own, config, tmp_path / "other")


@pytest.mark.parametrize("rows", [180, 290])
def test_a_draft_model_may_have_other_rows_of_padding(rows: int) -> None:
    """What it lacks it reads as its last token and never drafts; what it has besides it never drafts, either."""
    target = tiny_model()
    draft = tiny_model(tiny_config(vocab_size=rows))
    common = min(rows, 258)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine[:common].copy_(theirs[:common]) if mine.shape != theirs.shape else mine.copy_(theirs)
    one, policy = standalone(draft, gamma=3)
    drafting_now_and_then(one, [3, 0, 3])
    drafts, propose = list[Draft](), policy.propose
    policy.propose = lambda *args: drafts.append(propose(*args)) or drafts[-1]  # type: ignore[func-returns-value, method-assign]
    greedy, sampled = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, top_k=50, seed=1)
    prompts = [random_ids(40, seed=1, vocab_size=258), random_ids(300, seed=2, vocab_size=258)]
    assert max(map(max, prompts)) > 180
    assert tokens_of(one.generate(prompts, greedy, speculate=False)) == tokens_of(one.generate(prompts, greedy))
    assert one.stats.acceptance_rate > (0.5 if rows > 258 else 0)
    one.generate(prompts, sampled)
    assert all(int(draft.tokens.max()) < common for draft in drafts)
    qs = [draft.q for draft in drafts if draft.q is not None]
    assert qs and all(q.shape[-1] == 258 and not q[..., common:].any() for q in qs)
    assert all(torch.allclose(q.sum(-1), torch.ones(())) for q in qs)
