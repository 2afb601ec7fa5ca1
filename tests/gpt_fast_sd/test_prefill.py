"""Prefill: keys that slots already hold are not computed again, and reused or not, they are those of a fresh prefill.

Shapes: B slots, T tokens, K kv heads, S cache capacity, H head dim, L layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.fast.choose import FastBackend
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.model import FORMATS, KVCache
from gpt_fast_sd.prefill import CHUNK, Prefill
from gpt_fast_sd.steps import Runner
from tests.drafts import POLICIES, draft_of
from tests.helpers import ahead, few, random_ids, thinned, tiny_config, tiny_engine, tiny_model

MAX_LEN = 4 * CHUNK
MODEL = tiny_model()
TEXT = random_ids(MAX_LEN, seed=1)
OTHER = random_ids(MAX_LEN, seed=2)


def prefill(n_slots: int = 3, form: str = "fp32") -> Prefill:
    """An eager prefill of the tiny model over an empty cache."""
    cache = KVCache(MODEL.config, n_slots, MAX_LEN, format=FORMATS[form], device=torch.device("cpu"))
    return Prefill(Runner(MODEL, cache))


def spoil(one: Prefill, slot: int, start: int, end: int | None = None) -> None:
    """Overwrite what a slot holds there, as decoding and its last occupant may have."""
    for buffer in one.runner.cache.buffers:
        buffer[slot, :, start:end] = float("nan") if buffer.is_floating_point() else 77


def keeps(one: Prefill, slot: int, body: Sequence[int]) -> bool:
    """Whether the slot begins with what a prefill of body alone makes of an empty cache, bit for bit, scales too."""
    alone = prefill(1, one.runner.cache.format.name)
    assert alone.fill(0, body) == len(body)
    both = zip(one.runner.cache.buffers, alone.runner.cache.buffers, strict=True)
    return all(torch.equal(x[slot, :, : len(body)], y[0, :, : len(body)]) for x, y in both)


def holds(one: Prefill, slot: int, body: Sequence[int]) -> bool:
    """Whether the slot is what a fresh prefill makes it, with zeros past the last chunk."""
    past = -(-len(body) // CHUNK) * CHUNK
    assert int(one.runner.cache.seq_len[slot]) == one.held(slot) == len(body)
    return keeps(one, slot, body) and not any(x[slot, :, past:].any() for x in one.runner.cache.buffers)


# held before, requested -> tokens to compute: whole chunks from the first that differs, or nothing at all.
CASES: dict[str, tuple[list[int], list[int], int]] = {
    "nothing held": ([], TEXT[:300], 300),
    "the same": (TEXT[:300], TEXT[:300], 0),
    "the same, whole chunks": (TEXT[: 2 * CHUNK], TEXT[: 2 * CHUNK], 0),
    "less than a chunk in common": (TEXT[:200], TEXT[:300], 300),
    "longer": (TEXT[:300], TEXT[:600], 600 - CHUNK),
    "longer by whole chunks": (TEXT[:CHUNK], TEXT[: 3 * CHUNK], 2 * CHUNK),
    "shorter": (TEXT[:700], TEXT[:600], 600 - 2 * CHUNK),
    "shorter, to a chunk's edge": (TEXT[:700], TEXT[: 2 * CHUNK], 0),
    "shorter than a chunk": (TEXT[:700], TEXT[:100], 100),
    "another end": (TEXT[:600], [*TEXT[:520], *OTHER[520:700]], 700 - 2 * CHUNK),
    "another last token": (TEXT[:300], [*TEXT[:299], (TEXT[299] + 1) % 256], 300 - CHUNK),
    "another first token": (TEXT[:600], [(TEXT[0] + 1) % 256, *TEXT[1:600]], 600),
    "another token at a chunk's edge": (TEXT[:600], [*TEXT[:CHUNK], (TEXT[CHUNK] + 1) % 256, *TEXT[257:600]], 344),
    "nothing asked for": (TEXT[:300], [], 0),
}


@torch.inference_mode()
@thinned("source,poison", [1, 2], [False, True])  # the same slot, another
@pytest.mark.parametrize("case", CASES)
def test_a_reused_prefix_has_the_keys_of_a_fresh_prefill_bit_for_bit(case: str, source: int, poison: bool) -> None:
    held, body, computed = CASES[case]
    one = prefill(form=("fp32", "int8", "planes")[list(CASES).index(case) % 3])
    one.fill(source, held)
    one.fill(1 if source == 2 else 2, OTHER[:400])
    if poison:  # what decoding left behind a text, and what the slot's last occupant was
        spoil(one, source, len(held))
        if source != 1:
            spoil(one, 1, 0)
            one.keep(1, 0)
    assert one.fill(1, body) == computed
    assert holds(one, 1, body)


@torch.inference_mode()
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_whatever_slots_held_before_each_holds_what_it_was_last_filled_with(data: st.DataObject) -> None:
    one, bodies = prefill(), [[], [], []]
    for _ in range(data.draw(st.integers(1, 5))):
        slot, common = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 800))
        n = data.draw(st.sampled_from([0, 1, 100, CHUNK, CHUNK + 1, 2 * CHUNK, 700, MAX_LEN]))
        body = [*TEXT[:common], *OTHER[common:]][:n]
        reused = max(len(body) if body == held else _common(body, held) // CHUNK * CHUNK for held in bodies)
        assert one.fill(slot, body) == len(body) - reused
        bodies[slot] = body
        spoil(one, slot, len(body), len(body) + 9)  # decoding writes behind the text
    assert all(keeps(one, slot, body) for slot, body in enumerate(bodies))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def test_a_slot_is_relied_on_no_further_than_it_is_kept() -> None:
    one = prefill()
    one.fill(0, TEXT[:600])
    one.keep(0, 2 * CHUNK - 1)
    spoil(one, 0, 2 * CHUNK - 1)
    assert one.fill(1, TEXT[:600]) == 600 - CHUNK
    assert holds(one, 1, TEXT[:600])
    one.keep(0, -3)
    assert one.held(0) == 0


# ---- in the engine --------------------------------------------------------------------------------------------------


def engine(policy: str = "off", **changes: Any) -> Engine:
    draft = DraftConfig(policy=policy, gamma=3, budget=64)
    return tiny_engine(draft, model=MODEL, **{"max_seq_len": MAX_LEN} | changes)


def alone(prompt: list[int], n: int) -> list[int]:
    return engine(batch_size=1).generate([prompt], SamplingParams(max_tokens=n))[0].tokens


@pytest.mark.parametrize("policy", ["off", "full", "streaming", "snapkv", "quest", "guided"])
def test_a_prompt_in_a_busy_slot_is_copied_or_as_much_as_is_shared(policy: str) -> None:
    one, prompt = engine(policy), TEXT[:600]
    params = [SamplingParams(max_tokens=n) for n in (40, 3, 12, 5)]
    alike = [*TEXT[:600], *OTHER[:30]]
    got = one.generate(
        [prompt, OTHER[:20], prompt, alike], params
    )  # the third takes the second's slot, then the fourth
    assert [c.tokens for c in got] == [alone(prompt, 40), alone(OTHER[:20], 3), alone(prompt, 12), alone(alike, 5)]
    assert one.stats.prefill_tokens == 599 + 19 + 0 + 629 - 2 * CHUNK


def test_a_prompt_takes_the_free_slot_that_holds_most_of_it() -> None:
    one = engine(batch_size=3)
    one.generate([OTHER[:300], TEXT[:600], TEXT[:300]], SamplingParams(max_tokens=2))
    stream = one.stream([TEXT[:700]], SamplingParams(max_tokens=4))
    next(stream)
    assert [request is not None for request in one.schedule.slots] == [False, True, False]
    assert one.stats.prefill_tokens == 699 - 2 * CHUNK


@pytest.mark.parametrize(
    "policy",
    few(["off", "full", "streaming", "snapkv", "quest", "guided", "early_exit"], ["off", "snapkv", "early_exit"]),
)
def test_nothing_past_a_held_prompt_reaches_the_next_occupant(policy: str) -> None:
    one = engine(policy)
    params = SamplingParams(max_tokens=12)
    one.generate([TEXT[:600], OTHER[:300]], params)
    for slot in range(2):
        for buffer in one.cache.buffers:
            buffer[slot, :, int(one.cache.seq_len[slot]) :] = float("nan")
    prompts = [[*TEXT[:520], *OTHER[:80]], TEXT[:600], OTHER[:300], OTHER[:100]]
    assert [c.tokens for c in one.generate(prompts, params)] == [alone(prompt, 12) for prompt in prompts]
    # the first prompt takes the slot of TEXT[:600] and keeps two chunks of it
    assert one.stats.prefill_tokens == (599 - 2 * CHUNK) + (599 - 2 * CHUNK) + 299 + 99


def test_logits_of_a_text_neither_use_nor_leave_a_prefix() -> None:
    one = engine()
    expected = one.logits(TEXT[:30])
    one.generate([TEXT[:30], OTHER[:30]], SamplingParams(max_tokens=3))
    assert torch.equal(one.logits(TEXT[:30]), expected)
    assert one.generate([TEXT[:30]], SamplingParams(max_tokens=3))[0].tokens == alone(TEXT[:30], 3)
    assert one.stats.prefill_tokens == 29


# ---- with the chunks of CUDA -----------------------------------------------------------------------------------------


@pytest.fixture
def chunks_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU prefills by the chunks that CUDA has; its indexing checks every bound."""
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], chunks=TRAITS["cuda"].chunks))


LENGTHS = [2, 3, 300, 1024, 1536, 1537, 1800, 2048, 4096]  # around the largest chunk, and around splits
CACHES = [("off", n) for n in LENGTHS] + [(policy, n) for policy in ("off", *POLICIES) for n in (2, 1536, 2304)]


@pytest.mark.parametrize(
    ("policy", "max_seq_len"),
    few(CACHES, [("off", n) for n in LENGTHS[:-1]] + [("quest", 2304), ("standalone", 2), ("hierarchy", 1536)]),
)
def test_no_chunk_of_cuda_is_written_past_the_end_of_a_cache(
    policy: str, max_seq_len: int, chunks_of_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding included, of a prompt that is one token short of what the cache holds, after a warm-up."""
    written = list[int]()

    def watch(self: Prefill, slot: int, tokens: Tensor, start: int) -> None:
        written.append(start + len(tokens))
        assert written[-1] <= self.runner.cache.capacity

    ahead(monkeypatch, Prefill, "feed", watch)
    draft = draft_of(policy, budget=64)
    model = tiny_model(tiny_config(n_layers=2 if policy == "early_exit" else 1))
    theirs = tiny_model(tiny_config(n_layers=1), seed=1) if draft.draft_model else None
    one = tiny_engine(draft, theirs, model=model, batch_size=1, max_seq_len=max_seq_len)
    assert len(one.generate([random_ids(max_seq_len - 1)], SamplingParams(max_tokens=1))[0].tokens) == 1
    assert max(written) == max(1, -(-(max_seq_len - 2) // CHUNK)) * CHUNK


@pytest.mark.parametrize(("max_seq_len", "sizes"), [(2, [256]), (1800, [256]), (2048, [256]), (2049, [2048, 256])])
def test_a_size_that_no_prompt_fills_is_not_built(max_seq_len: int, sizes: list[int], chunks_of_cuda: None) -> None:
    cpu = torch.device("cpu")
    cache = KVCache(MODEL.config, 1, max_seq_len, format=FORMATS["fp32"], device=cpu)
    assert Prefill(Runner(MODEL, cache, backend=FastBackend(cpu, None))).sizes == sizes
