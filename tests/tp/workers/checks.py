"""What ranks check together: torchrun ... checks.py TP FOLDER CHECK...; each rank writes its complaints for a check.

Every rank computes the truth itself, with the whole model, and compares the joint result of the ranks with it.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gguf import GGMLQuantizationType
from torch import Tensor

from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams, acceptance, sampling
from gpt_fast_sd.bodies import Bodies
from gpt_fast_sd.fast import dequantize_blocks
from gpt_fast_sd.fast.compile import CompiledStep
from gpt_fast_sd.fast.linear_int4 import Int4Linear
from gpt_fast_sd.loading import draft_group
from gpt_fast_sd.model import CausalSelf, ModelConfig, Transformer, Weights, load_model, save_hugging_face
from gpt_fast_sd.quantization.quantize import draft_copy
from gpt_fast_sd.round import accept_step
from gpt_fast_sd.tp import Disagreement, Parallel, Vocabulary, broadcast, start, sum_in_order
from tests.float8_folders import save_float8
from tests.gguf_files import model_of, write_gguf
from tests.helpers import Noting, random_ids, tiny_config, tiny_model, whole_text_logits

Check = Callable[[Parallel, Path], None]
CHECKS: dict[str, Check] = {}
GROUPS: dict[str, list[str]] = {}  # of names, in whose starts (test_ranks.py) a check is run
MODEL, ENGINE, COMPILED = "model", "engine", "compiled"
SELDOM = "seldom"  # like others of the engine's
FOUR = "four"  # which two ranks could not fail
MORE = "more"


def check(*groups: str, name: str = "") -> Callable[[Check], Check]:
    """Register a function, under its name unless another is given."""

    def registered(function: Check) -> Check:
        CHECKS[name or function.__name__] = function
        for group in groups:
            GROUPS.setdefault(group, []).append(name or function.__name__)
        return function

    return registered


def wide_config(**changes: Any) -> ModelConfig:
    """The tiny shape with enough heads, kv heads and ids for four ranks."""
    return tiny_config(**{"vocab_size": 260, "n_heads": 8, "n_kv_heads": 4} | changes)


SUMMED = "wo.bias", "w_out.bias"  # of which the first rank has all
FAMILIES = {
    "llama": wide_config(),
    "tied": wide_config(tie_embeddings=True),
    "biased": wide_config(qkv_bias=True),  # as Qwen2
    "all_biased": wide_config(qkv_bias=True, o_bias=True, mlp_bias=True),  # as Llama with attention_bias, mlp_bias
    "normed": wide_config(qk_norm=True, sliding_window=7, full_layers=(0,)),  # as Qwen3, some layers with a window
    "two_kv_heads": wide_config(n_kv_heads=2, qkv_bias=True),
    "one_kv_head": wide_config(n_kv_heads=1),
    # ids that no number of ranks here divides, and so few that of four ranks the last one has none
    "odd_vocabulary": wide_config(vocab_size=257),
    "tied_odd_vocabulary": wide_config(vocab_size=257, tie_embeddings=True),
    "few_ids": wide_config(vocab_size=9, tie_embeddings=True),
}


def rows_of(parallel: Parallel, vocab_size: int) -> tuple[int, int]:
    """Rows of a vocabulary on each rank, equal on all, and how many of this rank's are not padding."""
    n = -(-vocab_size // parallel.tp)
    return n, min(n, max(0, vocab_size - parallel.tp_rank * n))


def same_parts(sharded: Transformer, held: dict[str, Tensor], what: object) -> None:
    for key, parameter in sharded.named_parameters():
        assert torch.equal(parameter, held[key]), (what, key)


@check(MODEL)
def a_sharded_model_says_what_the_whole_one_says(parallel: Parallel, folder: Path) -> None:
    for name, config in FAMILIES.items():
        vocabulary, ids = Vocabulary(parallel.group.mesh, config.vocab_size), random_ids(20)
        ids = [token % config.vocab_size for token in ids]
        whole = whole_text_logits(tiny_model(config), ids)  # [T, V]
        own = whole_text_logits(parallel.group.shard(tiny_model(config)), ids)
        assert own.shape == (20, rows_of(parallel, config.vocab_size)[0]), name
        together = vocabulary.whole(own)
        assert (together - whole).abs().max() < 2e-5, name  # fp32: logits up to 60, summed in another order
        assert torch.equal(vocabulary.argmax(own), whole.argmax(-1)), name
        assert torch.equal(vocabulary.argmax(own), together.argmax(-1)), name


@check(MODEL, FOUR)
def of_equal_logits_the_lowest_id_wins_and_padding_never(parallel: Parallel, folder: Path) -> None:
    logits = torch.zeros(3, 40)
    logits[0, [7, 39]] = logits[1, [10, 30]] = 2.0  # row 2: all are equal
    own = logits.chunk(parallel.tp, -1)[parallel.tp_rank]
    assert Vocabulary(parallel.group.mesh).argmax(own).tolist() == [7, 10, 0]
    for size in (41, 5):
        n, held = rows_of(parallel, size)
        whole = -1 - torch.rand(3, 2, size, generator=torch.Generator().manual_seed(size))
        own = torch.zeros(3, 2, n)  # what padding says is better than anything real
        own[..., :held] = whole[..., parallel.tp_rank * n :][..., :held]
        vocabulary = Vocabulary(parallel.group.mesh, size)
        assert torch.equal(vocabulary.whole(own), whole)
        assert torch.equal(vocabulary.argmax(own), whole.argmax(-1))


@check(MODEL, FOUR)
def a_rank_reads_its_own_slices_and_nothing_else(parallel: Parallel, folder: Path) -> None:
    read_bytes, read = [0], Weights.read

    def counting(self: Weights, *args: Any) -> torch.Tensor:
        found = read(self, *args)
        read_bytes[0] += found.nbytes
        return found

    for name, config in FAMILIES.items():
        model, place = tiny_model(config), folder / f"{name}.{parallel.rank}"
        save_hugging_face(model, place, dtype=torch.float32)
        read_bytes[0], Weights.read = 0, counting  # type: ignore[method-assign]
        loaded = parallel.group.load(place)
        Weights.read = read  # type: ignore[method-assign]
        held = dict(loaded.named_parameters())
        n, real = rows_of(parallel, config.vocab_size)
        padding = (n - real) * config.dim * 4 * (1 if config.tie_embeddings else 2)
        padding += sum(p.nbytes for key, p in held.items() if key.endswith(SUMMED) and parallel.tp_rank > 0)
        assert read_bytes[0] == sum(p.nbytes for p in held.values()) - padding, name
        replicated = sum(p.nbytes for key, p in held.items() if "norm" in key or key.endswith(SUMMED))
        copies = sum(p.nbytes for key, p in held.items() if "wqkv" in key) if config.n_kv_heads < parallel.tp else 0
        total = sum(p.nbytes for p in model.parameters())
        rounding = config.dim * 4 * 2 * (config.vocab_size % parallel.tp > 0)
        assert read_bytes[0] <= (total - replicated) / parallel.tp + replicated + copies + rounding, name
        same_parts(parallel.group.shard(tiny_model(config)), held, name)
        assert loaded.config == load_model(place).config, name
        assert (loaded.output.weight is loaded.embedding.weight) == config.tie_embeddings, name


@check(MODEL, FOUR)
def a_rank_dequantizes_its_own_rows_and_blocks_of_a_gguf_file(parallel: Parallel, folder: Path) -> None:
    numbers, dequantize = [0], gguf.dequantize

    def counting(data: Any, kind: Any) -> Any:
        found = dequantize(data, kind)
        numbers[0] += found.size
        return found

    for name in ("llama", "tied", "biased", "normed", "two_kv_heads", "odd_vocabulary", "tied_odd_vocabulary"):
        # a rank's columns of w_out, 96 / tp, begin and end inside blocks of 32
        config = dataclasses.replace(FAMILIES[name], dim=64, ffn_dim=96)
        place = folder / f"gguf.{name}.{parallel.rank}"
        save_hugging_face(tiny_model(config), place, dtype=torch.float32)
        path = write_gguf(place / "model.gguf", model_of(place), GGMLQuantizationType.Q8_0)
        load_model(path)  # tries once what the library can dequantize
        with mock.patch.object(gguf, "dequantize", counting):
            numbers[0] = 0
            loaded = parallel.group.load(path)
        held = dict(loaded.named_parameters())
        blocks = config.n_layers * config.dim * 2 * 32 * 2  # of w_out and of wo, cut at both ends
        assert numbers[0] <= sum(p.numel() for p in held.values()) + blocks, name
        same_parts(parallel.group.shard(load_model(path)), held, name)


@check(MODEL)
def every_rank_is_given_what_the_first_rank_of_its_group_has(parallel: Parallel, folder: Path) -> None:
    first = parallel.dp_rank * parallel.tp
    assert parallel.same(2**62 + parallel.rank) == 2**62 + first
    assert broadcast(torch.tensor([parallel.rank]), parallel.group.mesh).tolist() == [first]
    assert parallel.least(7 - parallel.rank % parallel.tp) == 8 - parallel.tp and parallel.least(None) is None
    assert parallel.everywhere(parallel.rank != first) is False


@check(MODEL)
def replicas_share_a_list_and_its_results_come_back_in_order(parallel: Parallel, folder: Path) -> None:
    items = list("abcdefghi")
    part = parallel.share(items)
    assert len(items) // parallel.dp <= len(part) <= -(-len(items) // parallel.dp)
    # a replica may finish its items in any order
    gathered = parallel.gather([(index, item.upper()) for index, item in reversed(part)])
    assert gathered == (list("ABCDEFGHI") if parallel.is_main else None)


# ---- decoding --------------------------------------------------------------------------------------------------------

PROMPTS = [random_ids(300, seed=1), random_ids(47, seed=2), random_ids(5, seed=3)]
PLAIN, WIDE = DraftConfig(), wide_config()
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_tokens=16, temperature=0.8, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=11, temperature=1.0, top_k=20, top_p=0.9, seed=12, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.7, min_p=0.05, seed=13, ignore_eos=True),
]


def engine_of(
    parallel: Parallel | None, draft: DraftConfig = PLAIN, *, config: ModelConfig = WIDE, **settings: Any
) -> Engine:
    """An engine over the tiny model, or over this rank's part of it, and over a draft model where the draft names one.

    Two slots: of three prompts one waits.
    """
    draft_shape = settings.pop("draft_shape", wide_config(n_layers=1))
    engine_config = EngineConfig(**{"batch_size": 2, "max_seq_len": 400, "device": "cpu", "compile": False} | settings)
    dtype = {"bf16": torch.bfloat16}.get(engine_config.dtype, torch.float32)
    model, small = tiny_model(config, dtype=dtype), tiny_model(draft_shape) if draft.draft_model is not None else None
    if parallel is not None:
        parallel.group.shard(model)
        if small is not None:
            draft_group(draft, parallel).shard(small)
    return Engine(model, None, engine_config, draft, small, parallel)


def same_texts(together: Engine, alone: Engine, runs: Sequence[Any] = (GREEDY, SAMPLED)) -> list[list[Completion]]:
    """The texts of each run, which must be the same of both, tokens and all."""
    found = []
    for params in runs:
        theirs, ours = together.generate(PROMPTS, params), alone.generate(PROMPTS, params)
        assert [c.tokens for c in theirs] == [c.tokens for c in ours], together.draft
        found.append(theirs)
    return found


def compare(parallel: Parallel, draft: DraftConfig, *, sampled: bool = True, **settings: Any) -> list[Completion]:
    """Greedy texts of all ranks, which must be those of one alone, as sampled ones must, drafts and all."""
    together = engine_of(parallel, draft, **settings)
    alone = engine_of(None, dataclasses.replace(draft, draft_tp=None), **settings)
    return same_texts(together, alone, [GREEDY, SAMPLED] if sampled else [GREEDY])[0]


SMALL = {"draft_model": "tiny"}
DRAFTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("full", "streaming", "lookup", "early_exit")},
    "snapkv": {"budget": 72},
    "quest": {"budget": 64},
    "guided": {"budget": 64},
    "hierarchy": {"gamma": 4},
    "hierarchy_over_a_model": {"policy": "hierarchy", "cheap": "standalone", "gamma": 4, **SMALL},
    "standalone": SMALL,
    "standalone_on_one": {"policy": "standalone", "draft_tp": 1, **SMALL},
    "standalone_on_two": {"policy": "standalone", "draft_tp": 2, **SMALL},
    "standalone_past_its_positions": {"policy": "standalone", **SMALL},
    "snapkv_where_kv_heads_are_few": {"policy": "snapkv", "budget": 72},
    "streaming_where_kv_heads_are_few": {"policy": "streaming"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    # a kv head is on several ranks, each of which selects by its own query heads: other drafts, so samples may differ
    "snapkv_where_kv_heads_are_few": {"config": wide_config(n_kv_heads=1, qkv_bias=True), "sampled": False},
    "streaming_where_kv_heads_are_few": {"config": wide_config(n_kv_heads=2, tie_embeddings=True)},
    # and with fewer rows of padding than the target
    "standalone_past_its_positions": {"draft_shape": wide_config(n_layers=1, max_seq_len=300, vocab_size=251)},
}


def draft_of(policy: str, **changes: Any) -> DraftConfig:
    """With a small budget, and one layer of two."""
    fields = {"budget": 40, "gamma": 3} | ({"exit_layers": 1} if policy == "early_exit" else {}) | changes
    return DraftConfig(policy=policy, **fields)


def drafts_give_the_tokens_of_one_rank(name: str, parallel: Parallel, folder: Path) -> None:
    texts = compare(parallel, draft_of(**{"policy": name} | DRAFTS[name]), **SETTINGS.get(name, {}))
    assert sum(c.stats.drafted for c in texts) > 0


for name in DRAFTS:
    often = "guided", "standalone_on_one", "standalone_past_its_positions"
    group = ENGINE if name in often else SELDOM if name in ("snapkv", "hierarchy") else MORE
    own_name = f"drafts_by_{name}_give_the_tokens_of_one_rank"
    check(group, name=own_name)(partial(drafts_give_the_tokens_of_one_rank, name))


@check(SELDOM)
def a_draft_on_fewer_ranks_leaves_the_target_split_as_it_was(parallel: Parallel, folder: Path) -> None:
    for draft_tp in (1, parallel.tp):
        engine = engine_of(parallel, draft_of("standalone", draft_tp=draft_tp, **SMALL))
        assert engine.model.output.weight.shape[0] == 260 // parallel.tp
        assert engine.cache.layers[0].k.shape[1] == 4 // parallel.tp
        assert engine.policy is not None
        assert engine.policy.runner.model.output.weight.shape[0] == 260 // draft_tp
        assert engine.policy.runner.cache.layers[0].k.shape[1] == 4 // draft_tp
        with Noting(lambda op, _: op.overloadpacket.__name__) as seen:
            engine.generate(PROMPTS[2:], SamplingParams(max_tokens=4, ignore_eos=True))
        assert ("broadcast" in seen.seen) == (draft_tp < parallel.tp), seen.seen
        assert {"all_reduce", "all_gather_into_tensor"} <= {*seen.seen}


@check(MORE)
def gamma_auto_and_fresh_seeds_are_the_first_ranks(parallel: Parallel, folder: Path) -> None:
    engine = engine_of(parallel, draft_of("streaming", gamma="auto"))
    assert engine.schedule.rounds.further == ()  # ranks would each find another room
    fresh = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    completions = engine.generate(PROMPTS, fresh)  # the engine itself notices tokens that differ
    assert all(len(c.tokens) == 40 for c in completions)
    assert [c.tokens for c in engine.generate(PROMPTS, fresh)] != [c.tokens for c in completions]


@check(SELDOM)
def the_first_rank_says_who_drafts_whatever_the_others_measured(parallel: Parallel, folder: Path) -> None:
    engine = engine_of(parallel, draft_of("auto", budget=64, **SMALL))
    planner, arms = engine.schedule.planner, range(4)  # lookup, the draft model, and two views
    planner.promising = lambda few, many: arms if parallel.tp_rank == 0 else arms[:1]  # type: ignore[union-attr]
    turns = itertools.cycle([2, 1, 3, 0, 1, 2] if parallel.tp_rank == 0 else [0])

    def choose(n_keys: int) -> int:
        planner.arm = next(turns)
        return 3

    planner.choose = choose  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    found = engine.generate(PROMPTS, params)  # the engine itself notices tokens that differ
    assert len(engine.policy.made) == 4 and engine.stats.drafted > 0  # type: ignore[union-attr]
    assert [c.tokens for c in found] == [c.tokens for c in engine_of(None).generate(PROMPTS, params)]


def ring_all_reduce(x: Tensor, op: str, mesh: Any) -> Tensor:
    """A sum as a ring of ranks makes it: chunk c of the buffer is added up in x's dtype from rank c on."""
    n, n_elements = mesh.size(), x.numel()
    parts = [torch.empty_like(x).flatten() for _ in range(n)]
    dist.all_gather(parts, x.contiguous().flatten(), group=mesh.get_group())
    sums = [reduce(torch.add, (parts[(c + i) % n] for i in range(n))) for c in range(n)]
    chunk = torch.arange(n_elements) * n // n_elements
    return torch.stack(sums).gather(0, chunk[None])[0].view_as(x)


def bits_of(engine: Engine, *, speculate: bool) -> tuple[list[list[int]], dict[tuple[int, ...], Tensor]]:
    """The greedy texts, and the target's logits [V] after each text that it was fed."""
    bits, feed = {}, engine.schedule.rounds.feed

    def listening(tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        logits, mass = feed(tokens, n_keys)
        whole = engine.vocabulary.whole(logits)
        for slot, request in enumerate(engine.schedule.slots):
            if request is not None:
                text = [*request.prompt, *request.tokens]
                for i in range(tokens.shape[1]):
                    bits[(*text, *tokens[slot, 1 : 1 + i].tolist())] = whole[slot, i].clone()
        return logits, mass

    with mock.patch.object(engine.schedule.rounds, "feed", listening):
        completions = engine.generate(PROMPTS[1:], SamplingParams(max_tokens=8, ignore_eos=True), speculate=speculate)
    return [c.tokens for c in completions], bits


@check(FOUR)
def exact_decoding_is_bit_identical_though_sums_depend_on_the_place(parallel: Parallel, folder: Path) -> None:
    draft = draft_of("streaming")
    for dtype in ("fp32", "bf16"):
        with mock.patch.object(functional, "all_reduce", ring_all_reduce):
            engine = engine_of(parallel, draft, exact=True, dtype=dtype)
            texts, plain = bits_of(engine, speculate=False)
            assert len(plain) == sum(map(len, texts)) == 16
            spoken, speculative = bits_of(engine, speculate=True)
        assert engine.stats.accepted > 0
        other = sum(not torch.equal(speculative.get(text, bits.new_zeros(1)), bits) for text, bits in plain.items())
        assert not other, f"{dtype}: of {len(plain)} texts {other} have other logits in speculative decoding"
        assert spoken == texts


@check(FOUR)
def sums_in_order_are_the_first_ranks_and_then_the_others(parallel: Parallel, folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.randn(parallel.tp, 5, 7, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = sum(parts.float(), torch.zeros(5, 7, 33))
        assert torch.equal(sum_in_order(parts[parallel.tp_rank], parallel.group.mesh), expected.to(dtype))


@contextlib.contextmanager
def other_probabilities(engine: Engine, parallel: Parallel, harshly: bool) -> Iterator[None]:
    """On each rank but the first probabilities are other ones: every second in its last bit, or all by up to a third.

    In the last bit it matters where a draw falls on the edge between two tokens, and here each draw does: of 256 tokens
    that are all as likely. What is impossible stays so.
    """
    true, place, rank = engine.state.bodies.probabilities, sampling.uniform, parallel.tp_rank

    def probabilities(*args: Any, **kwargs: Any) -> Tensor:
        p = true(*args, **kwargs)
        if not rank:
            return p
        token = torch.arange(p.shape[-1])  # [V]
        if harshly:
            return p * (1 + (token * (7 + rank) % 11 - 5) / 15)
        return torch.where((p > 0) & (token % 2 == 1), torch.nextafter(p, torch.tensor(0.0)), p)

    def uniform(*args: Any) -> Tensor:
        return (place(*args) * 256).floor() / 256

    before, drawn = engine.state.bodies, place if harshly else uniform
    object.__setattr__(engine.state, "bodies", Bodies(probabilities=probabilities, uniform=drawn))
    with mock.patch.object(acceptance, "uniform", drawn):
        yield
    object.__setattr__(engine.state, "bodies", before)


def drawn_together(parallel: Parallel, *drafts: DraftConfig) -> None:
    """What is drawn by each of these is what the first rank draws, though the others know other probabilities."""
    prompts, params = PROMPTS[1:], [dataclasses.replace(p, max_tokens=16) for p in SAMPLED[1:]]
    for draft in drafts:
        together, alone = engine_of(parallel, draft), engine_of(None, dataclasses.replace(draft, draft_tp=None))
        with other_probabilities(together, parallel, harshly=True):
            theirs = together.generate(prompts, params)  # the engine itself notices tokens that differ
        assert [c.tokens for c in theirs] == [c.tokens for c in alone.generate(prompts, params)], draft


@check(ENGINE)
def the_first_ranks_draws_are_everyones(parallel: Parallel, folder: Path) -> None:
    drawn_together(parallel, DraftConfig(), draft_of("streaming"), draft_of("standalone", draft_tp=1, **SMALL))


@check(MORE)
def the_first_ranks_draws_count_for_all_whatever_drafts(parallel: Parallel, folder: Path) -> None:
    drawn_together(
        parallel, draft_of("lookup"), draft_of("hierarchy", gamma=4), draft_of("standalone", **SMALL),
        draft_of("standalone", draft_tp=2, **SMALL),
        draft_of("hierarchy", cheap="standalone", gamma=4, draft_tp=1, **SMALL),
    )  # fmt: skip


@check(SELDOM)
def draws_stay_together_where_the_last_bits_of_probabilities_differ(parallel: Parallel, folder: Path) -> None:
    for draft in (DraftConfig(), draft_of("streaming")):
        engine = engine_of(parallel, draft, config=wide_config(vocab_size=256))
        engine.model.output.weight.zero_()  # all tokens are as likely
        with other_probabilities(engine, parallel, harshly=False):
            completions = engine.generate(PROMPTS[1:], SAMPLED[0])
        assert len({token for c in completions for token in c.tokens}) > 24


@check(SELDOM)
def a_vocabulary_that_ranks_do_not_divide_gives_the_tokens_of_one_rank(parallel: Parallel, folder: Path) -> None:
    odd = wide_config(vocab_size=257, tie_embeddings=True)
    small = dataclasses.replace(odd, n_layers=1)
    compare(parallel, draft_of("standalone", draft_tp=parallel.tp // 2, **SMALL), config=odd, draft_shape=small)
    theirs, ours = (engine_of(at, config=odd).logits([1, 2, 3]) for at in (parallel, None))
    assert theirs.shape == (3, 257) and (theirs - ours).abs().max() < 2e-5


@check(MORE)
def weights_are_quantized_after_they_are_split(parallel: Parallel, folder: Path) -> None:
    together, alone = engine_of(parallel, quantize="int8"), engine_of(None, quantize="int8")
    ids = random_ids(30, seed=5)
    theirs, ours = together.logits(ids), alone.logits(ids)
    plain = engine_of(None).logits(ids)
    # wo and w_out have scales of their own on each rank, so the rounding is another, but no larger
    assert 0 < (theirs - plain).norm() < 1.5 * (ours - plain).norm()
    drafting = engine_of(parallel, draft_of("full"), quantize="int8")
    spoken, spelled = drafting.generate(PROMPTS, GREEDY), together.generate(PROMPTS, GREEDY)
    assert [c.tokens for c in spoken] == [c.tokens for c in spelled]
    # each rank copies its part, or lays it in planes
    compare(parallel, draft_of("streaming", quantize="int8"), sampled=False)
    halves = engine_of(parallel, draft_of("full"), dtype="bf16", exact=True)
    spoken = halves.generate(PROMPTS, GREEDY)
    halves.redraft(draft_of("streaming", quantize="planes"))
    assert [c.tokens for c in halves.generate(PROMPTS, GREEDY)] == [c.tokens for c in spoken]
    assert halves.stats.drafted > 0


@check(MORE)
def int4_weights_are_on_ranks_what_they_are_on_one(parallel: Parallel, folder: Path) -> None:
    """Blocks are never split, so each rank has its part of the very blocks that one rank has."""
    config = wide_config(head_dim=16, ffn_dim=128)  # of which four ranks have whole blocks, too
    compare(parallel, draft_of("full"), config=config, quantize="int4")
    compare(parallel, draft_of("streaming", quantize="int4"), config=config, sampled=False)
    place = folder / f"int4.{parallel.rank}"
    save_hugging_face(tiny_model(config), place, dtype=torch.float32)
    path = write_gguf(place / "model.gguf", model_of(place), GGMLQuantizationType.Q4_1)
    loaded = parallel.group.load(path, dtype=torch.float32)
    for layer, copied in zip(loaded.layers, draft_copy(loaded, "int4").layers, strict=True):
        for name, linear in layer.named_modules():
            if isinstance(linear, torch.nn.Linear):
                held = copied.get_submodule(name)
                assert isinstance(held, Int4Linear), name
                assert torch.equal(dequantize_blocks(held.held, torch.float32), linear.weight), name


@check(MODEL)
def ranks_read_their_parts_of_a_checkpoint_in_float8(parallel: Parallel, folder: Path) -> None:
    """Dequantized they hold what cutting the whole model gives, and kept as it is the same numbers and their scales."""
    kept: dict[str, Tensor] = {}

    def keep(model: Transformer, key: str, numbers: Tensor, scales: Tensor) -> None:
        kept[key] = numbers.float() * scales[:, None]
        where, _, part = key.rpartition(".")
        setattr(model.get_submodule(where), part, torch.nn.Parameter(kept[key], requires_grad=False))

    for name, kind in itertools.product(("llama", "two_kv_heads", "one_kv_head"), ("channel", "tensor", "blocks")):
        place = folder / f"float8.{name}.{kind}.{parallel.rank}"
        save_float8(place, kind, config=dataclasses.replace(FAMILIES[name], qkv_bias=False))
        held = dict(parallel.group.load(place, dtype=torch.float32).named_parameters())
        same_parts(parallel.group.shard(load_model(place, dtype=torch.float32)), held, (name, kind))
        kept.clear()
        parallel.group.load(place, dtype=torch.bfloat16, keep=keep)
        assert len(kept) == (0 if kind == "blocks" else 4 * 2) and all(
            torch.equal(kept[key], held[key]) for key in kept
        ), (name, kind)


@check(SELDOM)
def an_int8_cache_on_ranks_gives_the_tokens_of_one(parallel: Parallel, folder: Path) -> None:
    """Keys of a biased model are equalized by each rank for its own kv heads, as they are where one has all of them."""
    for config in (wide_config(), FAMILIES["two_kv_heads"]):
        draft = draft_of("streaming")
        together, alone = (engine_of(at, draft, config=config, kv_dtype="int8") for at in (parallel, None))
        (said,) = same_texts(together, alone, [GREEDY])
        assert together.cache.layers[0].k.dtype == torch.int8
        halved = engine_of(parallel, draft_of("quantized"), config=config, kv_dtype="int8")
        assert [c.tokens for c in halved.generate(PROMPTS, GREEDY)] == [c.tokens for c in said]
        assert halved.cache.format.planes and halved.stats.accepted > 0


@check(ENGINE)
def other_prompts_on_a_rank_are_noticed(parallel: Parallel, folder: Path) -> None:
    with pytest.raises(Disagreement, match=r"^prompts and parameters"):
        engine_of(parallel).generate([[1, 2, 3 + parallel.tp_rank]], GREEDY)


@check(ENGINE)
def other_tokens_on_a_rank_are_noticed_in_that_round(parallel: Parallel, folder: Path) -> None:
    engine = engine_of(parallel)
    stream = engine.stream([[1, 2, 3]], dataclasses.replace(GREEDY, max_tokens=60))
    next(stream)
    engine.state.active.logical_and_(torch.tensor(parallel.tp_rank == 0))
    with pytest.raises(Disagreement, match=r"^tokens of round "):
        list(stream)


@check(COMPILED)
def a_step_with_its_collectives_is_one_graph(parallel: Parallel, folder: Path) -> None:
    mesh = parallel.group.mesh
    vocabulary, model = Vocabulary(mesh, 257), parallel.group.shard(tiny_model(wide_config(vocab_size=257)))

    def step(tokens: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        logits = model(tokens, pos, CausalSelf())
        best = vocabulary.argmax(logits)
        return best, vocabulary.whole(logits), broadcast(tokens, mesh), *vocabulary.decided(best, tokens)

    tokens, pos = torch.tensor([random_ids(4)]), torch.arange(4)[None]
    for in_order in (False, True):
        if in_order:
            parallel.group.sum_in_order(model)
        compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
        with torch.inference_mode():
            assert all(map(torch.equal, compiled(tokens, pos), step(tokens, pos)))


@check(COMPILED)
def compiled_rounds_give_the_tokens_of_one_rank(parallel: Parallel, folder: Path) -> None:
    # fullgraph: a collective that broke the graph would be an error
    draft = draft_of("snapkv", budget=72)
    together = engine_of(parallel, draft, compile=True)
    same_texts(together, engine_of(None, draft))
    assert together.compiled and together.stats.recompiles == 0


@check(COMPILED)
def compiled_judging_gives_the_tokens_of_one_rank(parallel: Parallel, folder: Path) -> None:
    # as on CUDA, where what gathers the vocabulary's parts is compiled with what judges
    together = engine_of(parallel)
    together.schedule.rounds.accept_compiled = CompiledStep(accept_step)
    same_texts(together, engine_of(None))
    assert together.schedule.rounds.accept_compiled.graphs > 0


@check(MORE)
def a_folder_is_loaded_and_decoded_by_all_ranks(parallel: Parallel, folder: Path) -> None:
    place, small = folder / f"target.{parallel.rank}", folder / f"draft.{parallel.rank}"
    save_hugging_face(tiny_model(wide_config()), place, dtype=torch.float32)
    save_hugging_face(tiny_model(wide_config(n_layers=1)), small, dtype=torch.float32)
    config = EngineConfig(batch_size=2, max_seq_len=400, dtype="fp32", device="cpu", compile=False)
    other = draft_of("standalone", draft_model=small)
    for draft in (DraftConfig(), dataclasses.replace(other, draft_tp=1), other):
        together = Engine.from_pretrained(place, config, draft, parallel=parallel)
        alone = Engine.from_pretrained(place, config, dataclasses.replace(draft, draft_tp=None))
        same_texts(together, alone, [GREEDY])


def main() -> None:
    warnings.filterwarnings("error", category=FutureWarning, module="gpt_fast_sd")
    tp, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    parallel = start(tp, "cpu", timeout=600)
    with parallel.guard():
        for name in names:
            complaints, began = [], time.perf_counter()
            try:
                CHECKS[name](parallel, folder)
            except (Exception, pytest.fail.Exception):  # of a check, so that the others are run
                complaints = [f"rank {parallel.rank}: {traceback.format_exc()}"]
            parallel.log(f"{time.perf_counter() - began:6.1f} s {name}")
            (folder / f"{name}.{parallel.rank}.json").write_text(json.dumps(complaints))


if __name__ == "__main__":
    main()
