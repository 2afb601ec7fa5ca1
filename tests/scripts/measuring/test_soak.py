"""A soak of a small engine finds nothing wrong, and finds what is made wrong."""

import random
from dataclasses import replace

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.model import CausalSelf, Transformer
from measuring import lossless
from measuring.lossless import Finding
from measuring.soak import Rest, Soaked, _ties, finding, soak
from tests.helpers import Patch, ahead, random_ids, tiny_model

SMALL = EngineConfig(batch_size=3, max_seq_len=256, compile=False)
DRAFTS = [DraftConfig(), DraftConfig(policy="streaming", budget=16, gamma=3),
          DraftConfig(policy="guided", budget=64, gamma=2), DraftConfig(policy="lookup", gamma=4),
          DraftConfig(policy="early_exit", exit_layers=1, gamma=2)]  # fmt: skip


def engine() -> Engine:
    return Engine(tiny_model(), None, SMALL)


def soaked(one: Engine, drafts: list[DraftConfig], calls: int = 3) -> Soaked:
    return soak(one, drafts, [random_ids(300)], 0, longest=100, most_tokens=16, calls=calls)


def test_nothing_is_wrong_over_policies_calls_that_are_left_and_late_prompts() -> None:
    found = soaked(engine(), DRAFTS, calls=4)
    assert not found.wrong
    first = [rest.draft for rest in found.rests[:3]]
    assert first == ["off, gamma auto", "streaming 16, gamma 3", "guided 64, gamma 2"]
    assert found.calls == 20 and found.left > 2 and found.again > 0 and found.greedy > 15
    assert all(rest.recompiles == 0 for rest in found.rests)


def test_tokens_over_an_int8_cache_are_those_of_the_target_over_such_a_cache() -> None:
    planes = DraftConfig(policy="quantized", gamma=2)
    found = soaked(Engine(tiny_model(), None, replace(SMALL, kv_dtype="int8"), planes), [DRAFTS[1], planes], calls=2)
    assert not found.wrong and found.greedy >= 5


def test_forwards_have_few_lengths_and_the_same_logits(monkeypatch: Patch) -> None:
    """A library keeps primitives for each length that it meets: a soak in bf16 grew by some MiB with every new one."""
    one, ids, lengths = engine(), random_ids(150), set[int]()
    ahead(monkeypatch, Transformer, "hidden", lambda self, tokens, *_: lengths.add(tokens.shape[1]))
    for n in range(2, 151):
        found = lossless.logits_after(one.model, ids[: n - 1], last := min(3, n - 1))
        if n % 29 == 0:
            with torch.no_grad():
                whole = one.model(torch.tensor([ids[: n - 1]]), torch.arange(n - 1)[None], CausalSelf())[0, -last:]
            assert torch.allclose(found, whole, atol=1e-5)  # fp32 sums in another order
    assert {n for n in lengths if n % 64 == 0} == {64, 128, 192} and all(n % 64 == 0 or n % 29 == 28 for n in lengths)


class Meddler:
    """Now and then commits another token than the one that was chosen, whatever the row or its seed."""

    def __init__(self) -> None:
        self.place = torch.zeros(1, dtype=torch.int64)

    def apply(self, result: AcceptResult, drafted: torch.Tensor, max_accept: torch.Tensor) -> AcceptResult:
        self.place += 1
        return replace(result, next_token=(result.next_token + (self.place % 7 == 0)) % 50)


def test_tokens_that_are_not_the_target_s_and_samples_that_do_not_repeat_are_found() -> None:
    one = engine()
    one.replay = Meddler()
    found = soaked(one, DRAFTS[1:2], calls=12)
    assert any("below the best" in line for line in found.wrong)
    assert any("gave other tokens than before" in line for line in found.wrong)


@pytest.mark.parametrize(("rank", "again", "is_wrong"), [(1, True, False), (1, False, True), (40, True, True)])
def test_what_bf16_rounds_is_told_from_what_is_wrong(
    rank: int, again: bool, is_wrong: bool, monkeypatch: Patch
) -> None:
    """Where no gap at all counts as a tie, fp32 tells a second best token that is near from one that is far.

    again: whether the engine finds the token the best one again.
    """
    monkeypatch.setattr(lossless, "NEAR_TIE", {"bf16": 0.0})
    one = Engine(tiny_model(dtype=torch.bfloat16), None, SMALL)
    logits = {}
    for seed in range(40):
        ids = random_ids(30, seed=seed)
        exact = lossless.logits_in_fp32(one.model, ids)
        assert exact is not None
        logits[float(exact.topk(2).values.diff().abs())] = ids, exact
    (ids, exact), counted = logits[min(logits)], Soaked()
    token = int(exact.argsort(descending=True)[rank])
    if int(lossless.logits_after(one.model, ids).argmax()) == token:
        token = int(exact.argmax())
    own = lossless.logits_after(one.model, ids)[0].clone()
    own[token if again else int(exact.argmax())] = own.max() + 1e-3
    monkeypatch.setattr(one, "logits", lambda asked, last: own[None] if asked == ids else None)
    assert _ties(one, DraftConfig(), ids, [token], counted) == 1 and bool(counted.wrong) is is_wrong


def test_memory_that_grows_with_each_change_is_seen_and_what_policies_hold_is_no_growth() -> None:
    sizes = [1000 + 7 * i + random.Random(i).choice([0, 0, 0, 100]) for i in range(40)]
    rests = [Rest(float(i), "off", size, None, 1, 0) for i, size in enumerate(sizes)]
    assert Soaked(rests=rests).growth() == pytest.approx(7, abs=2)
    assert Soaked(rests=rests).growth("allocated") is None
    assert Soaked(rests=rests[:8]).growth() is None and Soaked(rests=rests[:10]).growth() is not None  # of 6, 10 pairs
    held = [40, 44, 48, 900]  # of policies, of which one holds more than others
    order = [random.Random(i).randrange(4) for i in range(40)]
    rests = [Rest(float(i), f"draft {one}", held[one] * 2**20, None, 1, 0) for i, one in enumerate(order)]
    assert Soaked(rests=rests).growth() == 0


@pytest.mark.parametrize("what", ["resident", "allocated"])
def test_memory_that_grows_too_fast_fails_and_unknown_memory_is_not_called_steady(what: str) -> None:
    steady = {"resident": None, "allocated": 100}

    def found(step: int) -> Finding:
        rests = [Rest(float(i), "off", graphs=1, recompiles=0, **steady | {what: step * i}) for i in range(20)]
        return finding(Soaked(rests=rests))

    slow, fast = found(2**20), found(5 * 2**20)
    assert slow.passed and f"+1.0 MiB {what} per change" in slow.text
    assert not fast.passed and f"+5.0 MiB {what} per change" in fast.text
    unknown = finding(Soaked(rests=[Rest(0.0, "off", None, None, 1, 0)] * 20))
    assert unknown.passed and "growth of memory not known" in unknown.text and "MiB" not in unknown.text
