"""Flash-decoding compiled for GPUs that are not there: no spills, tensor cores, and copies that run ahead.

Shapes: B batch, T tokens in this call, S keys in view, G query heads per kv head, H head dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_fast_sd.fast.triton import common as triton_common
from gpt_fast_sd.fast.triton import decode as decode_triton

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.aot import RESERVE, SM_SHARED, assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch, stand_in
from tests.helpers import few, thinned

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8 = torch.int8
SELDOM = [(96, BF16), (128, FP16), (256, BF16), (64, FP32), (128, FP32), (256, FP32)]
SHAPES = [(64, BF16), (128, BF16), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SELDOM)]
OTHERS = [89, 100, 120]  # devices that a family serves besides the one it is named after


def launched(
    cap: int, *, n_batch: int = 2, n_tokens: int = 1, group: int = 4, head_dim: int = 128, dtype: torch.dtype = BF16,
    held: torch.dtype | None = None, n_keys: int = 4096, page: int | None = None,
) -> list[Launch]:  # fmt: skip
    """The kernels that one call of the launcher builds and would launch, for 8 kv heads and a cache of 8192."""
    with stand_in(cap) as launches, FakeTensorMode():

        def tensor(*shape: int, **kwargs: Any) -> torch.Tensor:
            return torch.empty(shape, device="cuda", **kwargs)

        q = tensor(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2)
        buffers = [tensor(n_batch, 8, 8192, head_dim, dtype=held or dtype) for _ in range(2)]
        buffers += [tensor(n_batch, 8, 8192, dtype=FP16) for _ in range(2)] if held == INT8 else []
        pos = tensor(n_batch, n_tokens, dtype=torch.int64)
        if page is None:
            decode_triton.attend(q, layer_of(*buffers), pos, n_keys, 512, arch=cap)
        else:
            decode_triton.attend_with_mass(q, layer_of(*buffers), pos, n_keys, 512, page, arch=cap)
    return launches


def assert_built_well(cap: int, n_rows: int, **shape: Any) -> None:
    """All kernels are lean; the one that reads keys copies 16 bytes at once, ahead, and takes the widest products.

    As many of its blocks as the table says fit on an SM. On devices that share a table with another, a few registers
    may be spilled: that is up to the assembler.
    """
    launches = launched(cap, n_tokens=n_rows, group=1, **shape)
    split, kwargs = launches[0].compiled, launches[0].kwargs
    for built in (launch.compiled for launch in launches):
        if shape.get("dtype") == FP32:  # proof, not speed: ptxas gives up a few registers for one more block per SM
            assert built.stack <= 32, built
            assert_fits(built, cap)
        elif cap in OTHERS:
            assert built.stack <= 40, built
            assert_fits(built, cap)
        else:
            assert_lean(built, cap)
    size = triton_common.entry_size(kwargs["p_q"], kwargs["p_k"])
    config = decode_triton.config(cap, size, kwargs["BLOCK_H"], n_rows)
    assert_occupancy(split, cap, config.per_sm)
    assert split.ldgsts > 0 and split.ldgsts == split.sass.count("LDGSTS.E.BYPASS") == split.sass.count(".BYPASS.128")
    if shape.get("dtype") != FP32:
        wide = {90: "hgmma", 100: "utcmma"}.get(cap, "hmma") if kwargs["BLOCK_R"] >= 64 else "hmma"
        products = {"hmma": split.hmma, "hgmma": split.hgmma, "utcmma": split.utcmma}
        assert [kind for kind, n in products.items() if n > 0] == [wide]


@thinned("tile,cap", [(16, None), (32, 16), (64, None)], [80, 90])
def test_the_kernels_of_an_8b_model_are_built_well(tile: tuple[int, int | None], cap: int) -> None:
    n_rows, page = tile
    assert_built_well(cap, n_rows, page=page)


@pytest.mark.parametrize("cap", few(OTHERS, [100]))
def test_they_are_built_well_for_devices_that_no_table_is_named_after(cap: int) -> None:
    assert_built_well(cap, 64, page=16)


@pytest.mark.parametrize(("cap", "n_rows", "page"), [(80, 16, None), (80, 64, 16), (90, 16, 16), (90, 64, None)])
def test_they_are_built_well_over_int8_caches(cap: int, n_rows: int, page: int | None) -> None:
    assert_built_well(cap, n_rows, held=INT8, page=page)


@pytest.mark.parametrize("cap", [80, 90])
def test_bytes_are_widened_by_four_at_once_and_a_block_takes_few_instructions(cap: int) -> None:
    """Triton's own way has an I2F per entry, reads byte by byte and takes 760 to 890 instructions."""
    split = launched(cap, held=INT8)[0]
    block = max(split.compiled.loops, key=len)
    each = 2 * split.kwargs["BLOCK_N"] * split.kwargs["BLOCK_H"] // (32 * split.compiled.warps)  # entries a thread

    def count(code: str) -> int:
        return sum(code in instruction for instruction in block)

    assert count("HFMA2") + count("HMUL2") >= each // 2 and count("PRMT") < each and count("LDS.U8") == 0
    assert count("I2F") <= 2 and count("F2F.") <= 8  # of positions, and of weights
    assert len(block) <= 700


def test_a_64_row_tile_with_mass_leaves_shared_memory_for_two_blocks_an_sm() -> None:
    """Hopper's SM has 228 KiB: a kernel that took 114 KiB with its reserve would need every byte of them."""
    split = launched(90, n_tokens=64, group=1, page=16)[0].compiled
    assert 2 * (split.shared + RESERVE) + RESERVE <= SM_SHARED[90], split.shared


@pytest.mark.parametrize("page", few([None, 16], [16]))
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("cap", [90, *(pytest.param(cap, marks=pytest.mark.slow) for cap in (80, *OTHERS))])
def test_every_entry_of_the_table_is_built_well(cap: int, head_dim: int, dtype: torch.dtype, page: int | None) -> None:
    block_h, family = {96: 128}.get(head_dim, head_dim), triton_common.family(cap)
    for n_rows in decode_triton.CONFIGS[family, dtype.itemsize, block_h][1]:
        assert_built_well(cap, n_rows, head_dim=head_dim, dtype=dtype, page=page)


@pytest.mark.slow
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [80, 90])
def test_every_entry_of_the_table_is_built_well_over_a_cache_of_bytes(
    cap: int, head_dim: int, page: int | None
) -> None:
    for n_rows in decode_triton.CONFIGS[triton_common.family(cap), 1, head_dim][1]:
        assert_built_well(cap, n_rows, head_dim=head_dim, held=INT8, page=page)


@pytest.mark.parametrize("held", [None, INT8])
def test_no_length_and_no_number_of_rows_or_tokens_of_one_tile_builds_another_kernel(held: torch.dtype | None) -> None:
    kernels = [launch.kernel for launch in launched(90, page=16, held=held)]
    assert [kernel.metadata.name for kernel in kernels] == ["split_kernel", "merge_kernel", "mass_kernel"]
    for change in ({"n_keys": 1}, {"n_keys": 17}, {"n_keys": 8191}, {"n_batch": 1}, {"n_batch": 3}, {"n_tokens": 3}):
        again = [launch.kernel for launch in launched(90, page=16, held=held, **change)]
        assert all(one is other for one, other in zip(again, kernels, strict=True)), change


@thinned("cap,held", [80, 90], [None, INT8])
def test_tiles_of_16_and_of_32_rows_sum_over_keys_in_the_same_order(cap: int, held: torch.dtype | None) -> None:
    layouts = []
    for n_tokens in (1, 5):
        kernel = launched(cap, n_tokens=n_tokens, held=held)[0].kernel
        layouts.append([line for line in kernel.asm["ttgir"].splitlines() if line.startswith("#mma")])
    assert len(layouts[0]) == 1 and layouts[0] == layouts[1]


def test_a_program_is_launched_for_each_tile_and_head_and_split() -> None:
    split, merge, mass = launched(90, n_tokens=50, n_batch=3, n_keys=1025, page=32)  # 200 rows of a kv head
    assert split.grid == (2, 24, 3) and merge.grid == (200, 24) and mass.grid == (1, 24)


@pytest.mark.parametrize(("arch", "family"), [(80, 80), (86, 80), (87, 80), (89, 80), (90, 90), (100, 90), (103, 90),
                                              (110, 80), (120, 80), (121, 80)])  # fmt: skip
def test_a_device_takes_the_tables_of_a_family_whose_shared_memory_it_has(arch: int, family: int) -> None:
    assert triton_common.family(arch) == family
    assert SM_SHARED.get(arch, 228 << 10) >= (228 << 10 if family == 90 else 100 << 10)


@pytest.mark.parametrize("arch", [70, 75, "gfx942", "gfx90a"])
def test_a_device_that_no_table_covers_is_refused_in_a_sentence(arch: int | str) -> None:
    with pytest.raises(ValueError, match=f"compute capability 8.0 and later, not for {arch!r}"):
        launched(arch)
