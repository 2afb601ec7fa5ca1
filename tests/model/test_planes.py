"""An int8 cache in two planes of nibbles holds the same numbers, and each token is still stored alone.

Shapes: B slots, T tokens in this call, S cache capacity, K kv heads, H head dim.
"""

from __future__ import annotations

import pytest
import torch

from gpt_fast_sd.model import FORMATS, PRESETS, SPLIT, CacheLayer, KVCache, as_planes
from tests.helpers import tiny_config
from tests.model.test_int8_cache import B, H, K, words

CPU = torch.device("cpu")


def cache_of(form: str, n_layers: int = 2) -> KVCache:
    return KVCache(tiny_config(n_layers=n_layers), B, 300, format=FORMATS[form], device=CPU)


def whole(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """16 times the upper nibble, and the lower one, less 128: of the low halves of the bytes, then of the others."""
    parts = [16 * n.int() + m.int() for n, m in ((upper % 16, lower % 16), (upper // 16, lower // 16))]
    return torch.cat(parts, -1) - 128


def test_every_number_lies_in_both_planes() -> None:
    x = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)
    upper, lower = as_planes(x)
    assert upper.dtype == lower.dtype == torch.uint8 and upper.shape == lower.shape == (4, 32)
    assert torch.equal(whole(upper, lower), x.int())
    # the first half of a head in the low nibbles
    assert torch.equal(upper[0] % 16, (x[0, :32].int() + 128).byte() // 16)
    assert torch.equal(upper[0] // 16, (x[0, 32:].int() + 128).byte() // 16)


def test_planes_hold_the_bytes_and_the_scales_of_a_cache_without() -> None:
    byte, plane = cache_of("int8"), cache_of("planes")
    pos, k, v = torch.tensor([[3, 4], [255, 256], [0, 299]]), words(B, K, 2, H), 50 * words(B, K, 2, H, seed=2)
    for cache in (byte, plane):
        cache.layers[1].store(pos, k, v)
    one, other = byte.layers[1], plane.layers[1]
    assert other.k_low is not None and other.v_low is not None
    # -128, which is never stored, is both nibbles of 0: what nobody has written reads as that
    row = torch.arange(B)[:, None]
    for data, upper, lower in ((one.k, other.k, other.k_low), (one.v, other.v, other.v_low)):
        assert torch.equal(whole(upper, lower)[row, :, pos], data[row, :, pos].int())
        written = torch.zeros(upper.shape[:3], dtype=torch.bool)
        written[row, :, pos] = True
        assert not upper[~written].any() and not lower[~written].any()
    for x, y in ((one.k_scale, other.k_scale), (one.v_scale, other.v_scale)):
        assert x is not None and y is not None and torch.equal(x, y)


def test_planes_go_wherever_their_scales_go() -> None:
    cache = cache_of("planes")
    generator = torch.Generator().manual_seed(0)
    for buffer in cache.buffers:
        buffer.copy_(torch.randint(1, 128, buffer.shape, generator=generator))
    before = [buffer.clone() for buffer in cache.buffers]
    assert [len(layer.buffers) for layer in cache.layers] == [6, 6]
    again = CacheLayer(cache.format, *cache.layers[0].buffers)
    assert again == cache.layers[0] or all(a is b for a, b in zip(again.buffers, cache.layers[0].buffers, strict=True))
    assert [x.data_ptr() for x in cache.slot(1)[1].buffers] == [x[1:].data_ptr() for x in cache.layers[1].buffers]
    cache.copy(0, 2, 100)
    assert all(torch.equal(x[2, :, :100], x[0, :, :100]) for x in cache.buffers)
    cache.vacate(1, keep=7)
    assert all(not x[1, :, 7:].any() for x in cache.buffers)
    assert all(torch.equal(x[0], was[0]) for x, was in zip(cache.buffers, before, strict=True))


def test_drafts_share_every_buffer_and_what_is_committed() -> None:
    cache = cache_of("planes")
    drafts = cache.with_tail(64)
    assert all(a is b for a, b in zip(cache.buffers, drafts.buffers, strict=True)) and drafts.seq_len is cache.seq_len
    assert [layer.tail for layer in drafts.layers] == [64, 64] and [layer.tail for layer in cache.layers] == [0, 0]
    assert drafts.slot(1)[0].tail == drafts.first_layers(1).layers[0].tail == 64
    assert drafts.layers[0].head_dim == cache.layers[0].head_dim == H


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "meta-llama/Llama-3.1-8B"])
def test_planes_take_the_bytes_of_a_cache_without_and_drafts_read_half_of_them(name: str) -> None:
    config, meta = PRESETS[name], torch.device("meta")
    byte, plane = (KVCache(config, 1, SPLIT, format=FORMATS[x], device=meta) for x in ("int8", "planes"))
    assert plane.bytes_per_token == byte.bytes_per_token
    assert sum(x.nbytes for x in plane.buffers) == sum(x.nbytes for x in byte.buffers)
    drafts, per_head = plane.with_tail(64), 2 * config.n_layers * config.n_kv_heads
    assert drafts.bytes_read(1000) == per_head * (1000 * (config.head_dim // 2 + 2) + 64 * config.head_dim // 2)
    assert drafts.bytes_read(10) == plane.bytes_read(10) == 10 * plane.bytes_per_token
    half = FORMATS["planes"].element_bytes(config.head_dim, upper=True)
    assert drafts.layers[0].bytes_per_entry == config.n_kv_heads * 2 * config.head_dim * half
