"""Inductor's code for the engine's steps on a GPU: few launches, no copy of a cache, fit for a CUDA graph."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt_fast_sd.config import MAX_GAMMA
from gpt_fast_sd.draft import draft_step
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.policies.selection import top_pages
from gpt_fast_sd.policies.snapkv import OBSERVED, observe_step
from gpt_fast_sd.prefill import CHUNK, prefill_step
from gpt_fast_sd.round import accept_step, decode_step
from gpt_fast_sd.sampling import Kind
from gpt_fast_sd.steps import size_carrier, varying
from tests.gpt_fast_sd.cuda import rig
from tests.gpt_fast_sd.cuda.rig import CAPACITY, LAYERS, SLOTS, Rig, fake_rig
from tests.gpuless.fakecuda import Generated, cuda_code, fake_cuda_tensors, needs_cuda_code
from tests.helpers import few

pytestmark = needs_cuda_code

# A layer, which ends with the norm of the next one: rope of queries and keys with both cache writes, the attention
# operator, SwiGLU, two norms (each with the residual sum before it), and the products wqkv, wo, w_in, w_out.
LAYER = 9
# Before them cosines and the first norm, which looks the embedding up; behind them the product with the vocabulary, and
# its logits to fp32.
HEAD = 4

FORWARD = LAYERS * LAYER + HEAD
STEPS = {  # launches, and which of them are ours
    **dict.fromkeys(("decode", "verify", "draft full"), (FORWARD, {"decode_attention": LAYERS})),
    # the mass of all layers is put into one tensor
    "verify mass": (FORWARD + 1, {"decode_attention_with_mass": LAYERS}),
    **{f"draft {view}": (FORWARD, {"sparse_attention": LAYERS}) for view in ("streaming", "snapkv", "guided")},
    # a layer counts the pages that are closed as it turns keys, chooses some, notes which, and lists their entries
    "draft quest": (FORWARD + LAYERS * 3, {"quest_pages": LAYERS, "sparse_attention": LAYERS}),
    # of the last layer only the keys are needed: wqkv, rope with the cache writes
    "prefill": ((LAYERS - 1) * LAYER + 4, {"prefill_attention": LAYERS - 1}),
    # no keys are written; a layer spreads queries and positions over all slots, picks outputs and mass of its own,
    # averages them, lists the best in order; of the last layer that is all; once, the lists are put into one tensor
    "observe": (
        (LAYERS - 1) * (LAYER + 10) + 15,
        {"prefill_attention_with_lse": LAYERS, "key_mass": LAYERS, "top_pages": LAYERS},
    ),
}


def step_of(name: str, rig: Rig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of the engine and its arguments, as the engine calls it."""
    cache, n_splits_carrier, bodies = rig.cache, size_carrier(rig.cache, CAPACITY), rig.state.bodies
    kind, _, detail = name.partition(" ")
    if kind == "prefill":
        tokens = rig.tokens(CHUNK, slots=1)
        return prefill_step, (rig.model, tokens, tokens.clone(), cache.slot(2), n_splits_carrier, bodies)
    if kind == "observe":
        tokens, slots = rig.tokens(OBSERVED, slots=2), rig.tokens(1, slots=2)[:, 0]
        chosen = 96, bodies, bodies.of(top_pages)
        return observe_step, (rig.model, tokens, tokens.clone(), slots, cache.layers, n_splits_carrier, *chosen)
    tokens = rig.tokens(6 if kind == "verify" else 1)
    common = (rig.model, tokens, tokens.clone(), cache.layers, n_splits_carrier)
    if kind == "draft":
        return draft_step, (*common, *rig.view(detail).kv(), bodies)
    return decode_step, (*common, 64 if detail == "mass" else 0, bodies)


def generate(name: str, head_dim: int = 64, form: str = "bf16", tail: int = 0) -> Generated:
    """tail: of planes."""
    with fake_cuda_tensors(), torch.inference_mode():
        rig = fake_rig(head_dim, form)
        if tail:
            rig.cache = rig.cache.with_tail(tail)
        step, args = step_of(name, rig)
        return cuda_code(step, *args)


def cache_sized(generated: Generated) -> list[tuple[str, ...]]:
    """Buffers as long as the cache, or as what is in view of it (a number of splits, which may vary)."""
    lengths = str(CAPACITY + SPLIT), f"{SPLIT}*s"
    return [sizes for sizes in generated.allocated if any(size.startswith(lengths) for size in sizes)]


# how keys are stored -> launches more of a layer, buffers written of a layer and of a layer of quest, which notes pages
CACHES: dict[str, tuple[int, int, int]] = {
    "bf16": (0, 2, 3),
    # those that find the largest number of each key and of each value; what rounds them writes them, and scales, too
    "int8": (1, 4, 5),
    # as bytes do, and a nibble of two numbers that lie half a head apart is put together where these are rounded
    "planes": (2, 6, 7),
    "planes, tail": (2, 6, 7),
}
CASES = [
    *((name, head_dim, "bf16") for name in STEPS for head_dim in (64, 128)),
    *((name, 64, "int8") for name in STEPS),
    ("decode", 64, "planes"),
    *((name, 64, "planes, tail") for name in STEPS if "draft" in name),
]
QUICK = [("decode", 64, "bf16"), ("verify mass", 64, "bf16"), ("decode", 64, "planes")]


@pytest.mark.parametrize(("name", "head_dim", "cache"), few(CASES, QUICK))
def test_a_step_is_few_launches_copies_no_cache_and_may_be_captured(name: str, head_dim: int, cache: str) -> None:
    form, _, tail = cache.partition(", ")
    step = generate(name, head_dim, form, 64 if tail else 0)
    (launches, ours), (more, written, by_quest) = STEPS[name], CACHES[cache]
    assert step.launches <= launches + more * LAYERS, step
    assert Counter(step.ours) == ours and step.others == []
    # what it is for: the attention that each key received, of rows that are due, masked and averaged, by each layer
    assert [sizes[0] for sizes in cache_sized(step)] == ["2"] * 2 * LAYERS * (name == "observe")
    assert step.graphs == 1 and step.no_cudagraph is None and "'autotune_pointwise': True" not in step.code
    assert_reduces_alone(step)
    assert len(step.mutated) == {"observe": 0, "draft quest": by_quest}.get(name, written) * LAYERS


def test_masses_of_many_layers_are_copied_by_eights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts and memory plans count so."""
    monkeypatch.setattr(rig, "LAYERS", 9)
    assert generate("verify mass").launches == 9 * LAYER + HEAD + 2


def test_a_layer_that_begins_otherwise_than_what_follows_the_last_is_cut_before_its_norm() -> None:
    """The sum is a launch of its own then."""
    with fake_cuda_tensors(), torch.inference_mode():
        one = fake_rig()
        one.model.norm.eps *= 2
        step, args = step_of("decode", one)
        assert cuda_code(step, *args).launches == LAYERS * (LAYER + 1) + HEAD


@pytest.mark.slow
def test_one_graph_serves_verifications_of_several_widths() -> None:
    with fake_cuda_tensors(), torch.inference_mode():
        step, (model, tokens, pos, *rest) = step_of("verify", fake_rig())
        for varying in (tokens, pos):
            torch._dynamo.mark_dynamic(varying, 1, min=2, max=9)
        generated = cuda_code(step, model, tokens, pos, *rest)
    assert generated.launches <= STEPS["verify"][0]
    assert cache_sized(generated) == [] and generated.no_cudagraph is None
    assert any(size.startswith(f"{SLOTS}*s") for sizes in generated.allocated for size in sizes)


def assert_reduces_alone(step: Generated) -> None:
    """Of several reductions one kernel would hold all rows in one block: it is made without timing."""
    assert not re.search(r"def \w+_for_\w+\((?:(?!async_compile).)*R0_BLOCK", step.code, re.DOTALL)


def assert_one_graph(step: Generated, launches: int, filtered: bool) -> None:
    """Fit to be captured, of at most so many launches; what filters sorts nothing."""
    assert_reduces_alone(step)
    assert step.launches <= launches, step
    assert step.ours == ["likeliest"] * filtered and step.others == step.products == []
    assert step.graphs == 1 and step.no_cudagraph is None


# Some reductions over the vocabulary, and the writes of the rows; uncompiled they are 58 operators where all rows are
# greedy, 268 where any samples, 288 where any filters. What filters sort nothing, however large the vocabulary.
@pytest.mark.slow
@pytest.mark.parametrize(("sampled", "filtered", "launches"), [(False, False, 12), (True, False, 21), (True, True, 20)])
def test_judging_is_one_graph_of_few_launches(sampled: bool, filtered: bool, launches: int) -> None:
    with fake_cuda_tensors(), torch.inference_mode():
        state, tokens = (rig := fake_rig()).state, rig.tokens(5)
        logits = torch.zeros(SLOTS, 6, state.vocab_size, device=tokens.device)
        q = logits[:, 1:].softmax(-1) if sampled else None
        varying(logits, min=3)
        varying(*(x for x in (tokens, q) if x is not None), max=MAX_GAMMA)
        draft = Draft(tokens, q, state.remaining.clone())
        step = cuda_code(accept_step, state, Kind(sampled, filtered), logits, draft, None)
    assert_one_graph(step, launches, filtered)


def test_filtering_rows_of_any_number_of_positions_is_one_graph_without_a_sort() -> None:
    with fake_cuda_tensors(), torch.inference_mode():
        state = fake_rig().state
        logits = torch.zeros(SLOTS, 6, state.vocab_size, device=state.pending.device)
        torch._dynamo.mark_dynamic(logits, 1, min=2, max=9)
        step = cuda_code(lambda state, logits: state.probabilities(logits, Kind(True, True)), state, logits)
    assert_one_graph(step, 9, filtered=True)
    assert any("s" in size for sizes in step.allocated for size in sizes)
