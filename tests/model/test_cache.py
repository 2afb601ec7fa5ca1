"""The static cache: writes land where they belong and nowhere else; read back, it gives the logits of the whole text.

Shapes: B batch rows ("slots"), T tokens in this call, S cache capacity, K kv heads, H head dim, V vocabulary.
"""

import errno
import mmap
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.kv import DenseKV
from gpt_fast_sd.model import FORMATS, SPLIT, KVCache, ModelConfig, Transformer, buffers
from tests.helpers import form_of, random_ids, tiny_config, tiny_model, whole_text_logits

B = 4

CANARY = -7.5  # exact in every float type


def cache_for(config: ModelConfig, *, max_seq_len: int = 3 * SPLIT, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(config, B, max_seq_len, format=form_of(dtype), device=torch.device("cpu"))


@torch.inference_mode()
def prefill(model: Transformer, cache: KVCache, slot: int, ids: Sequence[int]) -> None:
    """Write ids into one slot by whole chunks of SPLIT, padded with token 0, and commit them."""
    for start in range(0, len(ids), SPLIT):
        chunk = [*ids[start : start + SPLIT]]
        tokens = torch.tensor([chunk + [0] * (SPLIT - len(chunk))])  # [1, T]
        pos = torch.arange(start, start + SPLIT)[None]  # [1, T]
        model.hidden(tokens, pos, DenseKV(cache.slot(slot), torch.empty(cache.splits(start + SPLIT), 0)))
    cache.seq_len[slot] = len(ids)


@torch.inference_mode()
def decode(model: Transformer, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    """Feed one token per slot at its seq_len, committing nothing -> [B, V]."""
    pos = cache.seq_len[:, None]  # [B, 1]
    kv = DenseKV(cache.layers, torch.empty(cache.splits(int(cache.seq_len.max()) + 1), 0))
    return model(torch.tensor(tokens)[:, None], pos, kv)[:, -1]


def fill(cache: KVCache, value: float) -> None:
    for buffer in cache.buffers:
        buffer.fill_(value)


def changed(cache: KVCache, before: KVCache | float) -> Tensor:
    """Whether any layer, head or component of a position differs from what it was, by its bytes: bool [B, S]."""
    out = torch.zeros(B, cache.layers[0].k.shape[2], dtype=torch.bool)
    for i, now in enumerate(cache.buffers):
        was = torch.full_like(now, before) if isinstance(before, float) else before.buffers[i]
        out |= (now.view(torch.int32) != was.view(torch.int32)).any(3).any(1)
    return out


def test_capacity_and_views_are_of_whole_splits_and_of_two_at_least() -> None:
    for asked, capacity in ((1, 512), (257, 512), (512, 512), (513, 768), (768, 768)):
        cache = cache_for(tiny_config(), max_seq_len=asked)
        assert cache.capacity == capacity
        assert all(buffer.shape[2] >= capacity for buffer in cache.buffers)
    for n_keys, n_splits in ((1, 2), (256, 2), (512, 2), (513, 3), (768, 3), (769, 4)):
        assert KVCache.splits(n_keys) == n_splits


def test_a_slots_layers_share_its_memory_and_vacating_it_leaves_the_others() -> None:
    cache = cache_for(tiny_config())
    layers = cache.slot(2)
    layers[1].k.fill_(1.0)
    layers[0].v.fill_(2.0)
    assert cache.layers[1].k[2].eq(1).all() and cache.layers[0].v[2].eq(2).all()
    assert sum(float(buffer.abs().sum()) for buffer in cache.buffers) == 3 * cache.layers[0].k[2].numel()
    fill(cache, CANARY)
    cache.seq_len.fill_(5)
    cache.vacate(1)
    assert cache.seq_len.tolist() == [5, 0, 5, 5]
    assert not changed(cache, CANARY)[[0, 2, 3]].any() and not any(buffer[1].any() for buffer in cache.buffers)


@pytest.mark.parametrize("n", [1, 256, 257, 600])
def test_prefill_touches_its_own_slot_up_to_the_end_of_its_last_chunk(n: int) -> None:
    model = tiny_model()
    cache = cache_for(model.config)
    fill(cache, CANARY)
    prefill(model, cache, 2, random_ids(n))
    touched = changed(cache, CANARY)
    padded = -(-n // SPLIT) * SPLIT
    assert touched[2, :padded].all() and touched.sum() == padded
    assert cache.seq_len.tolist() == [0, 0, n, 0]


@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_a_call_writes_its_tokens_at_each_rows_own_positions_and_nowhere_else(n_tokens: int) -> None:
    model = tiny_model()
    cache = cache_for(model.config)
    fill(cache, CANARY)
    start = torch.tensor([0, 254, 300, 768 - n_tokens])
    pos = start[:, None] + torch.arange(n_tokens)  # [B, T], one row across the edge of a split
    with torch.inference_mode():
        model(torch.full((B, n_tokens), 9), pos, DenseKV(cache.layers, torch.empty(3, 0)))
    touched = changed(cache, CANARY)
    assert touched.gather(1, pos).all() and touched.sum() == pos.numel()
    assert not cache.seq_len.any()  # only a commit advances it


def test_a_token_fed_again_changes_nothing_and_a_rejected_one_leaves_no_trace() -> None:
    model = tiny_model()
    plain, speculative = cache_for(model.config), cache_for(model.config)
    for cache in (plain, speculative):
        prefill(model, cache, 0, random_ids(40))
    first = decode(model, plain, [3, 0, 0, 0])
    before = deepcopy(plain)
    assert torch.equal(decode(model, plain, [3, 0, 0, 0]), first)
    assert not changed(plain, before).any()
    decode(model, speculative, [99, 0, 0, 0])  # written, not committed
    assert torch.equal(decode(model, speculative, [3, 0, 0, 0]), first)


def cached_logits(model: Transformer, ids: Sequence[int], n_prompt: int) -> Tensor:
    """Prefill all but the last prompt token into slot 1 of a busy cache, feed the rest one by one -> [T, V]."""
    cache = cache_for(model.config)
    for slot, n in [(0, 30), (3, 400)]:
        prefill(model, cache, slot, random_ids(n, seed=50 + slot, vocab_size=100))
    prefill(model, cache, 1, ids[: n_prompt - 1])
    rows = []
    for token in ids[n_prompt - 1 :]:
        rows.append(decode(model, cache, [1, token, 2, 3])[1])
        cache.seq_len[1] += 1
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("n_prompt", "changes"),
    [
        *((n, {}) for n in (1, 255, 256, 257, 513)),
        *((250, shape) for shape in ({"n_heads": 6}, {"qkv_bias": True}, {"qk_norm": True, "head_dim": 24})),
    ],
    ids=str,
)
def test_prefill_then_token_by_token_gives_the_logits_of_the_whole_text(n_prompt: int, changes: dict[str, Any]) -> None:
    model = tiny_model(tiny_config(**changes))
    ids = random_ids(n_prompt + 10, seed=n_prompt)  # of 250 tokens the text grows over the edge of a split
    expected = whole_text_logits(model, ids)[n_prompt - 1 :]
    # fp32 sums in another order over two layers: measured at most 2e-6 of the largest logit
    assert (cached_logits(model, ids, n_prompt) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_large_buffers_ask_for_huge_pages_and_small_ones_do_not(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    large = KVCache(tiny_config(n_layers=1), B, 2**21 // (B * 2), format=form_of(dtype), device=cpu)
    small = KVCache(tiny_config(n_layers=1), B, 300, format=form_of(dtype), device=cpu)
    halves = [large.layers[0].k, large.layers[0].v]
    assert all(x.nbytes >= buffers.HUGE_PAGE and not x.any() for x in halves)
    if asks_for_huge_pages(torch.zeros(1)) or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("no huge pages here, or all memory asks for them")
    assert all(asks_for_huge_pages(x) for x in halves)
    assert not any(asks_for_huge_pages(x) for x in small.buffers)
    for x in halves:  # a tensor like any other
        x[1, :, 7] = 3
        assert x.sum() == 3 * x.shape[1] * x.shape[3] and x.clone().equal(x) and x.data_ptr() % 64 == 0


def asks_for_huge_pages(x: Tensor) -> bool:
    """Whether the mapping that holds a tensor is marked so, as /proc/PID/smaps says."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= x.data_ptr() < end
        elif first == "VmFlags:" and inside:
            return "hg" in rest
    raise AssertionError("no mapping holds it")


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize("name", ["mmap", "madvise"])  # what the system refuses
def test_without_huge_pages_or_a_mapping_the_cache_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    stand_in = refused if name == "mmap" else type("Refusing", (mmap.mmap,), {"madvise": refused})
    monkeypatch.setattr(buffers.mmap, "mmap", stand_in)
    cache = KVCache(tiny_config(n_layers=1), B, 2**21 // B, format=FORMATS["bf16"], device=torch.device("cpu"))
    assert cache.layers[0].k.nbytes >= buffers.HUGE_PAGE and not any(x.any() for x in cache.buffers)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_a_room_holds_small_tensors_side_by_side_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    room = buffers.HugePageArena()
    weights = [torch.randn(33, 7), torch.randn(5, 2, 3).bfloat16(), torch.arange(9, dtype=torch.uint8)]
    kept = [room.keep(x) for x in weights]
    assert all(x.equal(own) and x.dtype == own.dtype for x, own in zip(kept, weights, strict=True))
    assert [x.data_ptr() - kept[0].data_ptr() for x in kept] == [0, 15 * 64, 16 * 64]
    assert not kept[0].data_ptr() % 64
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert asks_for_huge_pages(kept[2])
    large = room.keep(torch.zeros(buffers.ARENA + 1, dtype=torch.uint8))  # more than is taken at a time
    assert len(large) == buffers.ARENA + 1 and kept[0].equal(weights[0])
    monkeypatch.setattr(buffers.sys, "platform", "darwin")
    assert buffers.HugePageArena().keep(weights[0]) is weights[0]
