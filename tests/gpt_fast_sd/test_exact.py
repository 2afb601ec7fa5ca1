"""exact=True: the target's results for a text are bit-identical, however it was drafted and whatever shares its batch.

Shapes: B slots, T tokens in this call, V vocabulary.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import SamplingParams
from gpt_fast_sd import round as rounds_of
from gpt_fast_sd.fast import cpu_attention_fits
from gpt_fast_sd.model import FORMATS, ModelConfig
from tests.drafts import POLICIES, draft_of
from tests.helpers import Patch, ahead, few, random_ids, thinned, tiny_config, tiny_engine, tiny_model

NAMES = [name for name in POLICIES if " over " not in name]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = [random_ids(n, seed=n) for n in (1, 2, 150, 31, 256, 257)]  # more than slots, around a chunk
PARAMS = [SamplingParams(max_tokens=4 + 7 * i % 15) for i in range(len(PROMPTS))]

Bits = dict[tuple[int, ...], Tensor]  # the target's logits [V] after each text that it was fed


class Watched:
    """An exact engine of 3 slots, and the bits that it came by."""

    def __init__(
        self, name: str, gamma: int | str = 4, *, dtype: str = "fp32", config: ModelConfig | None = None, **changes: Any
    ) -> None:
        config = config or tiny_config()
        draft_model = tiny_model(config, seed=1, dtype=DTYPES[dtype]) if name == "standalone" else None
        model, wanted = tiny_model(config, dtype=DTYPES[dtype]), {"batch_size": 3, "max_seq_len": 320} | changes
        self.engine = tiny_engine(draft_of(name, gamma), draft_model, model=model, exact=True, **wanted)
        self.bits: Bits = {}
        rounds = self.engine.schedule.rounds
        self._feed, rounds.feed = rounds.feed, self.feed  # type: ignore[method-assign]

    def feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        logits, mass = self._feed(tokens, n_keys)
        for slot, request in enumerate(self.engine.schedule.slots):
            if request is not None:
                text = [*request.prompt, *request.tokens]
                for i in range(tokens.shape[1]):
                    self.bits[(*text, *tokens[slot, 1 : 1 + i].tolist())] = logits[slot, i].clone()
        return logits, mass

    def run(self, prompts: Sequence[list[int]], params: Any, *, speculate: bool = True) -> tuple[list[list[int]], Bits]:
        """The tokens of the prompts, and the bits."""
        self.bits.clear()
        completions = self.engine.generate(prompts, params, speculate=speculate)
        assert (self.engine.stats.drafted > 0) is (speculate and self.engine.policy is not None)
        return [c.tokens for c in completions], dict(self.bits)


def covers(got: tuple[list[list[int]], Bits], plain: tuple[list[list[int]], Bits]) -> bool:
    """Whether the tokens are the same, and the bits of every text that plain decoding fed."""
    assert sum(map(len, plain[0])) == len(plain[1]) and all(x.isfinite().all() for x in plain[1].values())
    return got[0] == plain[0] and all(torch.equal(got[1][text], bits) for text, bits in plain[1].items())


@thinned("name,dtype", NAMES, DTYPES)
def test_plain_and_speculative_decoding_are_bit_identical(name: str, dtype: str) -> None:
    one = Watched(name, dtype=dtype)
    plain = one.run(PROMPTS, PARAMS, speculate=False)
    assert len({token for tokens in plain[0] for token in tokens}) > 20  # the model is not stuck on a token
    assert covers(one.run(PROMPTS, PARAMS), plain)
    assert one.engine.stats.accepted > 0 or name in ("standalone", "lookup")
    # without a draft policy, but with the same gamma
    assert covers(Watched("off", dtype=dtype).run(PROMPTS, PARAMS), plain)


def bits_of(run: tuple[list[list[int]], Bits], i: int, prompt: list[int]) -> list[Tensor]:
    """The bits after a run's i-th prompt, and after each token that it was continued with but the last."""
    tokens, bits = run
    return [bits[(*prompt, *tokens[i][:n])] for n in range(len(tokens[i]))]


@thinned("name,dtype", ["streaming", "guided", "hierarchy"], DTYPES)
def test_a_text_is_bit_identical_alone_and_in_a_batch_and_in_any_slot(name: str, dtype: str) -> None:
    one, other = Watched(name, dtype=dtype, max_seq_len=900), random_ids(800)  # with it four splits of keys are in view
    together = one.run(PROMPTS, PARAMS)
    for i in (1, 2, 5):
        prompt, params = PROMPTS[i], [SamplingParams(max_tokens=6), PARAMS[i]]
        alone, beside = one.run([prompt], PARAMS[i]), one.run([other, prompt], params)
        after = one.run([prompt, other, prompt], [PARAMS[i], params[0], PARAMS[i]])
        for run, at in ((alone, 0), (beside, 1), (after, 0), (after, 2)):
            assert run[0][at] == together[0][i]
            assert all(map(torch.equal, bits_of(run, at, prompt), bits_of(together, i, prompt)))


@thinned("gamma,slots", [1, 2, 7, "auto"], [1, 3])
def test_any_gamma_and_number_of_slots_gives_the_bits_of_an_engine_without_drafts(gamma: int | str, slots: int) -> None:
    """With one slot and a gamma of 1 the target sees two tokens per step: few enough for other matrix products."""
    one, off = Watched("full", gamma, batch_size=slots), Watched("off", gamma, batch_size=slots)
    if gamma == "auto":
        one.engine.warm_up()
        assert one.engine.schedule.planner.further == ()  # steps are as wide as the tiers' highest
        tiers = [3, 0, 8, 1, 6]
        one.engine.schedule.planner.choose = lambda n_keys: tiers[one.engine.stats.rounds % 5]  # type: ignore[method-assign]
    assert covers(one.run(PROMPTS, PARAMS), off.run(PROMPTS, PARAMS))


def test_arms_that_take_turns_with_plain_rounds_give_the_bits_of_an_engine_without_drafts(monkeypatch: Patch) -> None:
    one = Watched("auto")
    planner: Any = one.engine.schedule.planner
    monkeypatch.setattr(planner, "promising", lambda few, many: range(len(planner.arms)))
    turns = itertools.cycle([(arm, gamma) for arm in range(len(planner.arms)) for gamma in (4, 0)])

    def choose(n_keys: int) -> int:
        planner.arm, gamma = next(turns)
        return gamma

    monkeypatch.setattr(planner, "choose", choose)
    assert covers(one.run(PROMPTS, PARAMS), Watched("off").run(PROMPTS, PARAMS))


@thinned("name,dtype", ["off", "snapkv", "guided"], DTYPES)
def test_logits_have_the_bits_of_decoding(name: str, dtype: str) -> None:
    one, first = Watched(name, dtype=dtype), PROMPTS[0]
    run = one.run([first, PROMPTS[3]], SamplingParams(max_tokens=20))
    # A prompt of one token is not prefilled: all its text went through the step that logits run, too.
    logits = one.engine.logits([*first, *run[0][0]])
    assert all(map(torch.equal, logits, bits_of(run, 0, first)))
    # Prefill feeds 256 tokens per step, logits one: no bits are promised then, only roundings.
    logits = one.engine.logits([*PROMPTS[3], *run[0][1]])[30:-1]
    expected = torch.stack(bits_of(run, 1, PROMPTS[3]))
    assert (logits - expected).norm() <= (1e-5 if dtype == "fp32" else 0.05) * expected.norm()


@pytest.mark.parametrize("group", few([1, 3, 5, 8], [3, 8]))
def test_bits_are_the_same_for_any_number_of_heads(group: int) -> None:
    one = Watched("streaming", 3, config=tiny_config(n_heads=group * 2, n_kv_heads=2, n_layers=2), dtype="bf16")
    assert covers(one.run(PROMPTS, PARAMS), one.run(PROMPTS, PARAMS, speculate=False))


# ---- compiled, and on several threads --------------------------------------------------------------------------------

WIDE = tiny_config(dim=128, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=192)  # heads that the CPU kernel serves
PACKED = replace(WIDE, vocab_size=288)  # and products that it serves, too
ODD = replace(PACKED, ffn_dim=200)  # and some that it does not


def compiled_bits_are_the_same(name: str, dtype: str, config: ModelConfig, **changes: Any) -> None:
    one = Watched(name, 3, dtype=dtype, config=config, compile=True, **changes)
    plain = one.run(PROMPTS, PARAMS, speculate=False)
    assert covers(one.run(PROMPTS, PARAMS), plain)
    assert one.engine.stats.recompiles == 0
    assert covers(Watched("off", 3, dtype=dtype, config=config, compile=True, **changes).run(PROMPTS, PARAMS), plain)
    for i in (0, 2):
        alone = one.run([PROMPTS[i]], PARAMS[i])
        assert all(map(torch.equal, bits_of(alone, 0, PROMPTS[i]), bits_of(plain, i, PROMPTS[i])))


@pytest.mark.parametrize("name", few(["streaming", "guided"], ["guided"]))
def test_traced_steps_are_bit_identical(name: str, traced: list[torch.fx.GraphModule], monkeypatch: Patch) -> None:
    """What compiled steps run, but for the code generator: attention by the CPU kernel where there is one."""
    monkeypatch.setattr("gpt_fast_sd.fast.choose.fuses", lambda *_: False)  # in one call nothing is traced
    compiled_bits_are_the_same(name, "bf16", WIDE)
    kernels = {sum("cpu_attention" in str(node.target) for node in graph.graph.nodes) for graph in traced}
    # once in what runs for each layer, and not before or after them
    assert (kernels == {0, 1}) is cpu_attention_fits(64, torch.bfloat16, FORMATS["bf16"])


@pytest.mark.usefixtures("traced")
def test_so_they_are_with_a_target_in_int4() -> None:
    compiled_bits_are_the_same("streaming", "bf16", PACKED, quantize="int4")


@pytest.mark.slow
@pytest.mark.usefixtures("a_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "config"), [("streaming", WIDE), ("guided", WIDE), ("snapkv", tiny_config())])
def test_compiled_steps_are_bit_identical(name: str, config: ModelConfig, dtype: str) -> None:
    compiled_bits_are_the_same(name, dtype, config)


@pytest.mark.parametrize(("dtype", "config"), [("fp32", PACKED), ("bf16", tiny_config()), ("bf16", ODD)])
def test_what_a_library_sums_runs_on_one_thread(dtype: str, config: ModelConfig, monkeypatch: Patch) -> None:
    """Weights of another dtype, heads that no kernel serves, and a width that the products' blocks do not divide."""
    on = set[int]()
    ahead(monkeypatch, rounds_of, "decode_step", lambda *_: on.add(torch.get_num_threads()))
    one = Watched("off", dtype=dtype, config=config)
    torch.set_num_threads(3)
    one.run(PROMPTS[:1], PARAMS[0])
    assert one.engine.schedule.rounds.width and on == {1} and torch.get_num_threads() == 3
