"""An engine's memory plan is what it allocates, and a plan that cannot fit is refused before anything is loaded."""

import itertools
import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import gpt_fast_sd.fast.cpu.packing as packing
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.bodies import Bodies
from gpt_fast_sd.config import MAX_GAMMA
from gpt_fast_sd.fast import pack
from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.fast.triton import stand_ins
from gpt_fast_sd.loading import MemoryPlan, System, bytes_of_weights, plan_for
from gpt_fast_sd.loading.memory import GIB, NODE
from gpt_fast_sd.loading.workspace import DRAWING, DRAWING_ALONE, FILTERING, FILTERING_BY_SORT
from gpt_fast_sd.model import PRESETS, SPLIT, HugePageArena, ModelConfig, Weights
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.policies.costs import MOST_STEPS
from gpt_fast_sd.round import accept_step
from gpt_fast_sd.sampling import Kind
from gpt_fast_sd.serving import launch
from gpt_fast_sd.state import BatchState, RoundPlan
from tests.gpt_fast_sd.fast.references import as_on_cuda
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.gpuless.live import LiveBytes
from tests.helpers import Patch, pack_or_skip, random_ids, tiny_config, tiny_engine, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA = PRESETS["meta-llama/Llama-3.1-8B"]
SMALL = 2**12  # numbers of slots and drafts, which no plan counts
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.7)
FILTERED = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)


def plan_of(
    config: EngineConfig, draft: DraftConfig, model: ModelConfig, draft_model: ModelConfig | None = None, **system: Any
) -> MemoryPlan:
    """The plan of a system whose weights, unless something else is said, are fp32."""
    return MemoryPlan.of(
        System(config=config, draft=draft, model=model, draft_model=draft_model, **{"dtype": torch.float32} | system)
    )


def plan(
    batch: int, context: int, policy: str = "off", groups: int = 0, device: torch.device = CUDA, **draft: Any
) -> MemoryPlan:
    """Llama 3.1 8B in bf16 on an H200."""
    config, drafts = EngineConfig(batch_size=batch, max_seq_len=context), DraftConfig(policy=policy, **draft)
    sizes: dict[str, Any] = {"weights": 2 * LLAMA.n_params, "groups": groups, "whole": 140 * GIB}
    return plan_of(config, drafts, LLAMA, dtype=torch.bfloat16, device=device, **sizes)


@pytest.mark.parametrize("policy", ["off", "full", "streaming", "snapkv", "quest", "guided", "standalone", "lookup"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_caches_and_selections_take_what_the_plan_says(policy: str, kv_dtype: str) -> None:
    small = tiny_model(tiny_config(n_layers=1)) if policy == "standalone" else None
    draft = DraftConfig(policy=policy, budget=96, gamma=4, draft_model="given" if small else None)
    engine = tiny_engine(draft, small, batch_size=3, max_seq_len=900, kv_dtype=kv_dtype)
    expected = plan_of(engine.config, draft, engine.model.config, small.config if small else None)
    view, own = getattr(engine.policy, "view", None), list[torch.Tensor]()
    if policy == "standalone":
        assert view and expected.draft_kv == sum(x.nbytes for x in view.runner.cache.buffers)
    elif policy == "quest":
        own = [*view.bounds, *view.chosen]  # type: ignore[union-attr]
    elif policy in ("streaming", "snapkv", "guided"):
        own = [view.kv_indices]  # type: ignore[union-attr]
    assert expected.kv == sum(x.nbytes for x in engine.cache.buffers)
    assert expected.text == engine.state.history.nbytes
    assert sum(x.nbytes for x in own) <= expected.policy <= 1.5 * sum(x.nbytes for x in own) + 2 * 3 * 2 * 96 * 8


def test_a_device_keeps_a_reserve_for_what_is_allocated_outside_torch_and_a_rank_its_share_of_weights() -> None:
    alone, shared = plan(16, 57_344), plan(16, 57_344, groups=2)
    assert alone.reserve == GIB + int(0.015 * 140 * GIB)
    assert shared.total - alone.total == shared.reserve - alone.reserve == 2 * GIB
    on_cpu = plan_of(EngineConfig(), DraftConfig(), LLAMA, groups=2, whole=140 * GIB)
    assert on_cpu.reserve == on_cpu.graphs == 0
    assert bytes_of_weights(LLAMA, 8, 2, None, CUDA) == LLAMA.n_params // 8 * 2  # of eight ranks


def test_captured_rounds_are_planned_for_by_the_launches_of_all_that_may_be_held() -> None:
    fixed, auto, plain = (
        plan(16, 57_344, policy, **draft).graphs // NODE
        for policy, draft in (("streaming", {"gamma": 8}), ("streaming", {"gamma": "auto"}), ("off", {}))
    )
    launches = auto // MOST_STEPS
    assert auto == MOST_STEPS * launches and 300 <= launches <= 500  # a step of 32 layers
    assert fixed == 3 * (1 + 9) * launches  # of one view, whose graphs of a wider kind serve narrower ones
    assert plain == 3 * 8 * launches  # three kinds of sampling over views of 512 to 65,536: there are no more
    assert plan(16, 500, "streaming", gamma=1).graphs // NODE == 3 * (1 + 2) * launches  # one view
    for name in ("int8", "int4"):  # copies of weights for more than 256 rows of a step
        few, many = (plan(n, 500, "streaming", gamma=1, quantize=name).graphs // NODE for n in (128, 129))
        assert many - few == 3 * (1 + 2) * 4 * 32
    uncaptured = plan_of(EngineConfig(cuda_graphs="off"), DraftConfig(), LLAMA, device=CUDA, whole=GIB)
    assert uncaptured.graphs == uncaptured.captured == 0


def test_captured_rounds_have_memory_that_prompts_cannot_use() -> None:
    """While a graph lives the allocator keeps its pool from all else, be it free between two replays or not."""
    for policy, draft in (("streaming", {"budget": 512}), ("guided", {"budget": 1024}), ("snapkv", {"budget": 2048})):
        for batch_size in (1, 16):
            wanted = plan(batch_size, 57_344, policy, **draft)
            assert 0 < wanted.captured <= wanted.workspace
            assert wanted.total == sum(wanted.parts.values()) and wanted.parts["captured rounds"] == wanted.captured
    assert plan(16, 57_344, "streaming").added_to(plan(16, 57_344)).captured > 0  # what drafts adds
    streaming, snapkv = (plan(16, 57_344, policy, budget=2048) for policy in ("streaming", "snapkv"))
    assert snapkv.captured > streaming.captured  # its observing pass is captured, too


# ---- what sampling holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["cpu", "cuda"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
@pytest.mark.parametrize("with_q", [True, False], ids=["drawn", "certain"])
def test_drawing_and_judging_hold_what_the_plan_says(of: str, params: SamplingParams, gamma: int, with_q: bool) -> None:
    n_slots, vocab = 3, 20_000
    bodies = Bodies(probabilities=stand_ins.probabilities)
    state = BatchState.idle(torch.zeros(n_slots, dtype=torch.int64), 2 * SPLIT, vocab, (), bodies=bodies)
    for slot in range(n_slots):
        state.assign(slot, [1, 2, 3], params, seed=slot)
    with torch.inference_mode():
        kind, logits = Kind.of([params]), torch.randn(n_slots, gamma + 1, vocab)
        q = torch.rand(n_slots, gamma, vocab).softmax(-1) if with_q and gamma and params.temperature else None
        draft = Draft(torch.zeros(n_slots, gamma, dtype=torch.int64), q, torch.full((n_slots,), gamma))
        with LiveBytes(of) as judging:
            accept_step(state, kind, logits, draft, None)
        with LiveBytes(of) as choosing:
            state.choose(logits[:, 0], state.seq_len + 3, kind, 1)
    row, wide = logits[:, 0].nbytes, FILTERING_BY_SORT if of == "cpu" else FILTERING
    planned = max(wide * (gamma + 1), 2 * gamma + DRAWING if gamma else DRAWING_ALONE)
    assert judging.peak <= planned * row + SMALL
    assert choosing.peak <= DRAWING * row + SMALL
    if params is FILTERED:  # and not much less
        assert judging.peak >= 0.8 * planned * row and choosing.peak >= 0.5 * DRAWING * row


def fill(engine: Engine, length: int, params: SamplingParams = GREEDY, gamma: int = 0) -> RoundPlan:
    """All slots hold texts of this length: the plan of a round."""
    n, vocab = engine.config.batch_size, engine.model.config.vocab_size
    for slot in range(n):
        engine.state.assign(slot, random_ids(length, seed=slot, vocab_size=vocab), params, seed=slot)
    return RoundPlan.of(dict.fromkeys(range(n), length - 1), [params], gamma=gamma)


def held(policy: str, of: str, patch: Patch, *, length: int, vocab: int, kv_dtype: str = "fp32") -> tuple[int, int]:
    """The most bytes of a chunk of a prompt, of refreshing, of a round and of scores, and the plan's workspace.

    of "cuda": an engine on a CPU that works as on CUDA, except for captures.
    """
    if of == "cuda":
        patch.setitem(TRAITS, "cpu", replace(TRAITS["cuda"], captures=False))
        as_on_cuda(patch)
    draft, model = DraftConfig(policy=policy, budget=96, gamma=4), tiny_model(tiny_config(vocab_size=vocab))
    engine = tiny_engine(draft, model=model, batch_size=3, max_seq_len=length + 100, kv_dtype=kv_dtype)
    with torch.inference_mode():
        with LiveBytes(of) as prefilling:
            engine._prefill.chunk(0, [1] * engine._prefill.sizes[0], 0)
        plan = fill(engine, length, replace(FILTERED, logprobs=20), draft.max_gamma)
        with LiveBytes(of) as refreshing:
            if engine.policy:
                engine.policy.host_before_round(engine.state, plan)
                assert engine.schedule.rounds.refresh(plan) == (policy == "snapkv") * (1 if of == "cuda" else 3)
        with LiveBytes(of) as live:
            engine.schedule.rounds.device_round(plan)
        with LiveBytes(of) as scoring:
            list(engine._scorer.scores([([1] * n, n - 1) for n in (min(length, 300), min(length, 280))]))
    peak = max(prefilling.peak, refreshing.peak, live.peak, scoring.peak)
    return peak, plan_of(engine.config, draft, model.config).workspace


MANY_TOKENS, MANY_KEYS = (400, 4_000), (3_000, 64)  # length, vocabulary


@pytest.mark.parametrize(
    ("policy", "of", "sizes", "kv_dtype"),
    [*(pytest.param(policy, of, sizes, "fp32", marks=() if (of == "cpu") == (sizes is MANY_KEYS) else pytest.mark.slow)
       for policy in ("off", "streaming", "snapkv", "quest", "guided", "lookup", "hierarchy")
       for of in ("cpu", "cuda") for sizes in (MANY_TOKENS, MANY_KEYS)),
     *itertools.product(["off", "snapkv", "quest", "guided"], ["cpu"], [MANY_KEYS], ["int8"])],
)  # fmt: skip
def test_no_step_holds_more_than_the_plan_s_workspace(
    policy: str, of: str, sizes: tuple[int, int], kv_dtype: str, monkeypatch: Patch
) -> None:
    """Prefilling, refreshing a selection, drafting, verifying and judging, as CPU and CUDA operators allocate."""
    length, vocab = sizes
    peak, planned = held(policy, of, monkeypatch, length=length, vocab=vocab, kv_dtype=kv_dtype)
    assert peak <= planned + SMALL
    if vocab > length:
        assert peak >= 0.3 * planned


@pytest.mark.parametrize("group", [1, 16, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch_size", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_observing_windows_holds_what_the_plan_says(group: int, batch_size: int, monkeypatch: Patch) -> None:
    """As CUDA's operators allocate: keys of few rows are split, but 16 query heads per kv head are too many."""
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cuda"], captures=False, chunks=(SPLIT,)))
    as_on_cuda(monkeypatch)
    sizes = {"n_heads": 16, "n_kv_heads": 16 // group, "head_dim": 16, "n_layers": 3, "vocab_size": 64}
    model = tiny_model(tiny_config(**sizes, max_seq_len=8_192))
    draft = DraftConfig(policy="snapkv", budget=1_024, gamma=1)
    engine = tiny_engine(draft, model=model, batch_size=batch_size, max_seq_len=6_000)
    planned = plan_of(engine.config, draft, model.config).workspace
    with torch.inference_mode():
        plan = fill(engine, 5_800, gamma=1)
        with LiveBytes("cuda") as live:
            assert engine.schedule.rounds.refresh(plan) == -(-batch_size // TRAITS["cpu"].windows)
    assert 0.4 * planned <= live.peak <= planned + SMALL


def test_sums_in_the_order_of_ranks_are_planned_for(monkeypatch: Patch) -> None:
    """With exact and more than two ranks, each rank receives all parts of every sum."""
    ranks, n_tokens, dim = 8, 2_048, 64
    from gpt_fast_sd.tp import collectives

    monkeypatch.setattr(collectives, "all_gather", lambda x, mesh: torch.stack([x] * ranks))
    part = torch.randn(1, n_tokens, dim)
    with torch.inference_mode(), LiveBytes() as live:
        collectives.sum_in_order(part, None)  # type: ignore[arg-type]
    model, draft = tiny_config(dim=dim, ffn_dim=64, vocab_size=64), DraftConfig(policy="streaming")

    def workspace(exact: bool, n: int) -> int:
        config = EngineConfig(batch_size=1, max_seq_len=4_096, exact=exact)
        return plan_of(config, draft, model, device=CUDA, ranks=n).workspace

    assert workspace(False, ranks) == workspace(False, 1) == workspace(True, 1) == workspace(True, 2)
    assert 0.8 * live.peak <= workspace(True, ranks) - workspace(True, 2) <= 1.2 * live.peak


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_the_refusal_names_every_size_what_is_missing_and_what_would_fit() -> None:
    wanted = plan(16, 100_000, "snapkv", budget=2048, device=torch.device("cuda", 0))
    with pytest.raises(ValueError) as refusal:
        wanted.check(139 * GIB)
    sentence = str(refusal.value)
    assert sentence.startswith("batch_size 16 x max_seq_len 100,000 takes weights 15.0 GiB + KV cache 196.0 GiB + ")
    assert re.search(r" \+ CUDA graphs \d\.\d GiB \+ reserve 3\.1 GiB = ", sentence)
    missing = (wanted.total - 139 * GIB) / GIB
    assert f"the 139.0 GiB of memory of cuda:0 are {missing:.1f} GiB short of that; batch_size 9 or " in sentence
    slots, tokens = (int(number.replace(",", "")) for number in sentence.split("; batch_size ")[1].split()[:4:3])
    fitting = [plan(n, 100_000, "snapkv", budget=2048).total <= 139 * GIB for n in (slots, slots + 1)]
    longest = [plan(16, n, "snapkv", budget=2048).total <= 139 * GIB for n in (tokens, tokens + 1)]
    assert fitting == longest == [True, False]


def test_one_byte_too_few_is_refused_what_cannot_be_told_is_not_and_one_slot_is_told_how_short_to_be() -> None:
    wanted = plan(8, 57_344)
    wanted.check(wanted.total)
    wanted.check(None)
    with pytest.raises(ValueError, match=r"short of that; batch_size 7 or max_seq_len 57,088 would fit"):
        wanted.check(wanted.total - 1)
    with pytest.raises(ValueError, match=r"not even one slot fits: lower max_seq_len to [0-9,]+$") as refusal:
        plan(1, 131_072).check(30 * GIB)
    tokens = int(str(refusal.value).split()[-1].replace(",", ""))
    assert plan(1, tokens).total <= 30 * GIB < plan(1, tokens + 1).total
    with pytest.raises(ValueError, match=r"not even the smallest cache fits: .* more processes \(tp\)"):
        plan(1, 131_072).check(15 * GIB)


def test_memory_is_checked_before_weights_are_loaded(monkeypatch: Patch) -> None:
    asked(monkeypatch, 2**20)
    monkeypatch.setattr(Weights, "_read", lambda *_, **how: pytest.fail("weights were read before the refusal"))
    with pytest.raises(ValueError, match=r"batch_size 8 x max_seq_len 8,192 takes weights .* memory of cpu"):
        Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False))


def asked(monkeypatch: Patch, have: int | None) -> list[int]:
    """The engine finds this much memory; the list records the bytes held each time it asks."""
    held: list[int] = []

    def free_memory(device: torch.device, held_: int = 0, **kwargs: int) -> int | None:
        held.append(kwargs.get("held", held_))
        return None if have is None else have - held[-1]

    for module in ("engine", "loading.load"):
        monkeypatch.setattr(f"gpt_fast_sd.{module}.free_memory", free_memory)
    return held


def test_gamma_auto_goes_further_where_there_is_room_for_what_is_not_built_yet(monkeypatch: Patch) -> None:
    draft = DraftConfig(policy="streaming", budget=64, gamma="auto")

    def further(have: int) -> tuple[int, ...]:
        monkeypatch.setattr("gpt_fast_sd.loading.fit.free_memory", lambda device: have)
        return tiny_engine(draft).schedule.rounds.further

    needed = plan_of(tiny_engine(draft).config, replace(draft, gamma=MAX_GAMMA), tiny_config()).workspace
    assert further(needed) == (12, 16) and further(needed - 1) == ()


def test_an_engine_that_is_loaded_asks_for_memory_once(monkeypatch: Patch) -> None:
    held = asked(monkeypatch, 2**40)
    Engine.from_pretrained("bundled", EngineConfig(device="cpu", compile=False, max_seq_len=512, batch_size=1))
    assert held == [0]
    tiny_engine()
    assert held == [0, 0]


def test_a_redraft_that_cannot_fit_is_refused_and_nothing_is_changed(monkeypatch: Patch) -> None:
    first, small = DraftConfig(policy="streaming", budget=64, gamma=3), tiny_model(tiny_config(n_layers=1), seed=1)
    engine = tiny_engine(first, max_seq_len=900)
    second = DraftConfig(policy="standalone", draft_model="given", gamma=3)
    prompts = [random_ids(40, seed=seed) for seed in (1, 2)]
    before = tokens_of(engine.generate(prompts))
    state = dict(vars(engine))
    plans = [plan_of(engine.config, draft, engine.model.config, theirs)
             for draft, theirs in ((first, None), (second, small.config))]  # fmt: skip
    enough = plans[0].total + plans[1].added_to(plans[0]).total
    own = plans[1].draft_kv + plans[1].policy + max(0, plans[1].workspace - plans[0].workspace)
    assert enough == plans[0].total + own  # the text of a slot is there already
    held = asked(monkeypatch, enough - 1)
    with monkeypatch.context() as within:
        within.setattr(launch, "build_policy", lambda *args: pytest.fail("something was built"))
        with pytest.raises(ValueError) as refusal:
            engine.redraft(second, small)
    sentence = str(refusal.value)
    assert sentence.startswith("policy 'standalone' with budget 256 takes the draft model's KV cache ")
    assert " left of the memory of cpu are " in sentence and sentence.endswith(" short of that; nothing is changed")
    assert held == [plans[0].total]
    assert all(vars(engine)[name] is value for name, value in state.items())
    assert tokens_of(engine.generate(prompts)) == before
    asked(monkeypatch, enough)
    engine.redraft(second, small)
    assert engine.draft is second
    assert tokens_of(engine.generate(prompts)) == before


def test_packing_a_model_s_weights_is_planned_for(monkeypatch: Patch) -> None:
    """One weight at a time exists twice, and a head is larger than what small steps need."""
    big = tiny_config(vocab_size=64_000, dim=64, n_heads=1, n_kv_heads=1, head_dim=64, ffn_dim=96)
    config = EngineConfig(batch_size=1, max_seq_len=256, device="cpu", dtype="bf16", kv_dtype="bf16")
    model = tiny_model(big, dtype=torch.bfloat16)
    held, copies = list[weakref.ref[torch.UntypedStorage]](), list[int]()

    def copied(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype).copy_(x)

    def counted(weight: torch.Tensor, keep: Any) -> torch.Tensor:
        assert isinstance(keep.__self__, HugePageArena)  # a copy that was made before it keeps one would be a third
        assert all(storage() is None for storage in held)  # those packed before are gone
        with LiveBytes() as live:
            packed = pack(weight, copied)
        held[:] = [weakref.ref(weight.untyped_storage())]
        copies.append(live.peak)
        return packed

    monkeypatch.setattr(packing, "pack", counted)
    pack_or_skip(model)
    planned = [
        plan_for(System(config=replace(config, compile=compiles), draft=DraftConfig(), model=big, dtype=torch.bfloat16))
        for compiles in (True, False)
    ]
    assert max(copies) == 2 * 64_000 * 64
    assert planned[0].workspace == max(planned[1].workspace, max(copies))
    small = replace(big, vocab_size=64, dim=4096, ffn_dim=8192)
    for other, draft in ((small, None), (big, small)):
        found = plan_of(config, DraftConfig(), other, draft, dtype=torch.bfloat16, packs=True).workspace
        assert found >= 2 * 4096 * 2 * 8192
