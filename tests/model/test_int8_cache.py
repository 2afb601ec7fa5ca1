"""Keys and values of int8, as they are or in two planes: each token of a slot and kv head has a scale and lies alone.

Shapes: B slots, T tokens in this call, S cache capacity, K kv heads, H head dim.
"""

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.model import FORMATS, PRESETS, SPLIT, KVCache, as_int8, as_planes
from tests.helpers import tiny_config

B, K, H = 3, 2, 8


def cache_of(n_layers: int = 2, form: str = "int8") -> KVCache:
    return KVCache(tiny_config(n_layers=n_layers), B, 300, format=FORMATS[form], device=torch.device("cpu"))


def meant(x: Tensor, scale: Tensor | None) -> Tensor:
    """What int8 numbers [..., H] with their scales [...] stand for, fp32."""
    assert scale is not None
    return x.float() * scale.float()[..., None]


def words(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        *((dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (1e-3, 1.0, 300.0, 6e4)),
        # a scale that fp16 has only coarse steps for was rounded down: the largest number was 40 scales off
        *((torch.float32, size) for size in (2e-6, 1e-5, 3e-5, 1e-4, 5e-4, 7e-3)),
    ],
)
def test_a_number_is_at_most_half_a_scale_off(dtype: torch.dtype, largest: float) -> None:
    x = words(5, 70, 64)
    x = (x * (largest / x.abs().amax(-1, keepdim=True))).to(dtype)
    data, scale = as_int8(x)
    assert (data.dtype, data.shape, scale.dtype, scale.shape) == (torch.int8, x.shape, torch.float16, (5, 70))
    # the largest number is cut off where its scale was rounded down: by 127 * 2^-11 of a scale at most
    assert ((meant(data, scale) - x.float()).abs() <= 0.5001 * scale.float()[..., None]).all()
    assert data.min() >= -127 and (largest < 1e-3 or (data.abs().amax(-1) >= 126).all())


def test_numbers_are_divided_by_the_stored_scale_and_halves_rounded_to_even() -> None:
    data, scale = as_int8(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]))
    assert scale == 1.0 and data.tolist() == [127, 0, 2, 2, 0, -2, -127, 126]
    x = torch.tensor([100.0, 63.394, -71.7, 50.2])  # by 100 / 127 the second would be 81
    data, scale = as_int8(x)
    assert float(scale) != 100 / 127
    assert data.tolist() == [round(float(v) / float(scale)) for v in x] and data[1] == 80


def test_a_compiler_that_drops_casts_between_fp16_and_fp32_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor does on CUDA: numbers were made for a scale that was not the stored one, and off by 0.53 of it."""
    x = words(300, 64)
    expected = as_int8(x)
    monkeypatch.setattr(Tensor, "half", lambda self: self)
    data, scale = as_int8(x)
    assert data.equal(expected[0]) and scale.equal(expected[1].float())


def test_scales_are_within_what_fp16_holds() -> None:
    for scale in (1e-7, 6e4):
        x = torch.tensor([127.0, -63.0, 3.0, 0.0]) * scale
        data, stored = as_int8(x)
        assert 0 < float(stored) < float("inf")
        # 1e-7 is nearly two steps of a subnormal fp16 number
        assert (meant(data, stored) - x).abs().max() <= 0.51 * float(stored)
    data, stored = as_int8(torch.tensor([1e9, -2e9, 1.0]))  # what no scale reaches is cut off
    assert data.tolist() == [127, -127, 0] and float(stored) == 65504.0
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)  # CUDA's, and CPUs'
    assert as_int8(nan[:, None].expand(3, H))[1].isnan().all()
    data, stored = as_int8(torch.zeros(2, H))
    assert data.eq(0).all() and stored.gt(0).all()


@pytest.mark.parametrize(
    ("name", "share"), [("HuggingFaceTB/SmolLM2-135M", 66 / 128), ("meta-llama/Llama-3.1-8B", 130 / 256)]
)
def test_a_position_takes_its_numbers_and_a_scale_a_head_and_drafts_of_planes_half(name: str, share: float) -> None:
    config, meta = PRESETS[name], torch.device("meta")
    caches = {form: KVCache(config, 1, SPLIT, format=FORMATS[form], device=meta) for form in ("bf16", "int8", "planes")}
    bf16, int8, planes = (cache.bytes_per_token for cache in caches.values())
    assert int8 / bf16 == pytest.approx(share, abs=1e-9) and planes == int8
    for form, cache in caches.items():
        assert config.kv_bytes_per_token(FORMATS[form].element_bytes(config.head_dim)) == cache.bytes_per_token
        assert cache.bytes_per_token == sum(buffer.nbytes for buffer in cache.buffers) // cache.layers[0].k.shape[2]
    drafts, per_head = caches["planes"].with_tail(64), 2 * config.n_layers * config.n_kv_heads
    assert drafts.bytes_read(1000) == per_head * (1000 * (config.head_dim // 2 + 2) + 64 * config.head_dim // 2)
    assert drafts.bytes_read(10) == caches["planes"].bytes_read(10) == 10 * planes
    half = FORMATS["planes"].element_bytes(config.head_dim, upper=True)
    assert drafts.layers[0].bytes_per_entry == config.n_kv_heads * 2 * config.head_dim * half


def whole(upper: Tensor, lower: Tensor) -> Tensor:
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


def test_drafts_share_every_buffer_and_what_is_committed() -> None:
    cache = cache_of(form="planes")
    drafts = cache.with_tail(64)
    assert all(a is b for a, b in zip(cache.buffers, drafts.buffers, strict=True)) and drafts.seq_len is cache.seq_len
    assert [layer.tail for layer in drafts.layers] == [64, 64] and [layer.tail for layer in cache.layers] == [0, 0]
    assert drafts.slot(1)[0].tail == drafts.first_layers(1).layers[0].tail == 64
    assert drafts.layers[0].head_dim == cache.layers[0].head_dim == H
