"""Attention compiled for GPUs that are not there: no spills, tensor cores, wide copies that run ahead.

Over caches in the queries' dtype, in bytes, and in planes of nibbles.
Shapes: B batch, T tokens in this call, S keys in view, G query heads per kv head, H head dim.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from gpt_fast_sd.fast import launches
from gpt_fast_sd.fast.ops.int8 import LEAST, LONGEST
from gpt_fast_sd.fast.triton import common as triton_common
from gpt_fast_sd.fast.triton import decode as decode_triton
from gpt_fast_sd.fast.triton import int8, select
from gpt_fast_sd.fast.triton import prefill as prefill_triton
from gpt_fast_sd.fast.triton import sparse as sparse_triton
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32, INT8, PLANES
from tests.gpt_fast_sd.fast.launching import FEW, MANY, OTHERS, attend, attended, bound, launched, new
from tests.gpuless.aot import SM_SHARED, assert_fits, assert_lean, assert_occupancy
from tests.gpuless.driver import Launch, stand_in
from tests.helpers import Noting, thinned

ONE_CHUNK, SEVERAL = {"n_listed": 112, "width": 42}, {"n_listed": 448, "width": 74}
TAIL = 64
PROOF = 32  # bytes per thread that ptxas may spill of fp32, a proof and no matter of speed, for one more block per SM


def spilled(op: str, cap: int, dtype: torch.dtype, held: torch.dtype | None) -> int:
    """Bytes of registers per thread that may be spilled; where a table is of another device the assembler may, too."""
    if dtype == FP32:
        return 16 if op == "sparse" else PROOF
    if held is PLANES:  # tiles of 64 rows and of 256 dims: 2 to 22 instructions
        return 40
    if (op, cap) == ("mass", 80):
        return 8  # two instructions around a tile of 128 rows of 96 dims
    if (op, held) == ("lse", INT8):
        return 16  # six around a tile of 256 dims
    return 48 if op in FEW and cap in OTHERS else 0


def per_sm(op: str, cap: int, launch: Launch, n_rows: int) -> int:
    """Thread blocks that the table of a kernel says an SM should hold."""
    size = triton_common.entry_size(launch.kwargs["p_q"], launch.kwargs["p_k"])
    block_h = max(launch.kwargs["BLOCK_H"] * (2 if launch.kwargs.get("FORMAT") == 3 else 1), 64)  # of planes half
    if op in MANY:
        table = prefill_triton.KEY_MASS if op == "key_mass" else prefill_triton.PREFILL
        return int(table[triton_common.family(cap), size, block_h][-1])
    config = sparse_triton.config if op == "sparse" else decode_triton.config
    found = int(config(cap, size, block_h, n_rows).per_sm)
    # what two products of 32 rows and half a head leave in registers allows two
    return min(found, 2) if op == "sparse" and launch.kwargs.get("FORMAT") == 3 and n_rows == 32 else found


def assert_built_well(
    op: str, cap: int, n_rows: int, dtype: torch.dtype = BF16, held: torch.dtype | None = None, **shape: Any
) -> None:
    """All kernels are lean; the one that reads keys copies 16 bytes at once, ahead, and takes the widest products.

    As many of its blocks as the table says fit on an SM.
    """
    group = 4 if op in MANY else 1
    built_of = attended(op, cap, n_tokens=n_rows // group, group=group, dtype=dtype, held=held, **shape)
    first, kwargs, stack = built_of[0].compiled, built_of[0].kwargs, spilled(op, cap, dtype, held)
    for built in (launch.compiled for launch in built_of):
        assert built.stack <= stack, built
        (assert_fits if stack else assert_lean)(built, cap)
    assert_occupancy(first, cap, per_sm(op, cap, built_of[0], n_rows))
    if dtype != FP32:
        widest = {90: "hgmma", 100: "utcmma"}.get(cap, "hmma") if kwargs["BLOCK_R"] >= 64 or op in MANY else "hmma"
        found = [kind for kind in ("hmma", "hgmma", "utcmma") if getattr(first, kind) > 0]
        # over planes and lists others may be beside them
        assert found == [widest] or ((held is PLANES or op == "sparse") and widest in found)
    if held is PLANES:
        assert first.ldgsts > 0
    elif op != "sparse":
        assert first.ldgsts == first.sass.count("LDGSTS.E.BYPASS") == first.sass.count(".BYPASS.128") > 0
    else:
        assert [launch.name for launch in built_of] == ["chunk_kernel", "merge_kernel"][: len(built_of)]
        assert len(built_of) == 1 + (shape["n_listed"] == SEVERAL["n_listed"])
        # all numbers of a block of keys and values, once in the loop and once for each block fetched ahead of it
        block = 2 * kwargs["BLOCK_N"] * kwargs["BLOCK_H"] * kwargs["p_k"].element_size()
        ahead = kwargs["STAGES"] // 2
        copies, wide = block * (1 + ahead) // (16 * 32 * kwargs["num_warps"]), first.sass.count("LDGSTS.E.BYPASS.128")
        # products in tensor memory (sm_100) have a prologue of their own, which copies again
        assert wide == copies or (cap == 100 and first.utcmma > 0 and wide > copies)
        assert first.shared >= block * ahead


SHAPES = [(64, BF16), (128, BF16), (256, BF16), (96, BF16), (128, FP16), (64, FP32), (128, FP32), (256, FP32)]
OF_OTHERS = [(128, BF16), (256, BF16), (128, FP32)]  # for devices that take the tables of another
OF_SPARSE = [(64, FP16), (96, FP16), (256, FP16), (96, FP32)]
CACHES = [(None, 0, [80, 90, *OTHERS]), (INT8, 0, [80, 90]), (PLANES, 0, [80, 89, 90]), (PLANES, TAIL, [80, 89, 90])]
# what the ordinary run builds, of 128 dims in bf16: operator, device, query rows of a kv head, what a cache holds, tail
OFTEN = {
    *(("decode", 80, n_rows, None, 0) for n_rows in (16, 64)), *(("mass", cap, 64, None, 0) for cap in (90, 100)),
    ("decode", 80, 16, INT8, 0), ("decode", 90, 64, INT8, 0), ("mass", 80, 64, INT8, 0), ("mass", 90, 16, INT8, 0),
    *(("decode", cap, 16, PLANES, 0) for cap in (80, 90)), ("mass", 90, 32, PLANES, TAIL),
    ("key_mass", 120, 1024, None, 0), *((op, cap, 1024, INT8, 0) for op in ("lse", "key_mass") for cap in (80, 90)),
    ("prefill", 90, 1024, PLANES, TAIL), ("key_mass", 90, 1024, PLANES, 0),
    *(("sparse", cap, 4, None, 0) for cap in (80, 100)), *(("sparse", cap, 4, INT8, 0) for cap in (80, 90)),
    ("sparse", 90, 4, PLANES, 0), ("sparse", 80, 4, PLANES, TAIL),
}  # fmt: skip
WINDOWED = [("mass", 80, 64, None, 0), ("decode", 80, 64, PLANES, TAIL), ("prefill", 90, 1024, None, 0),
            ("key_mass", 90, 1024, None, 0)]  # fmt: skip


def entries() -> Iterator[Any]:
    """Every entry of the tables, most of them in the slow run."""
    for op, (held, tail, caps) in itertools.product((*FEW, *MANY, "sparse"), CACHES):
        shapes = SHAPES[:3] if held else SHAPES + OF_SPARSE * (op == "sparse")
        built = [(*shape, cap) for shape in shapes for cap in caps if cap not in OTHERS or shape in OF_OTHERS]
        for head_dim, dtype, cap in built:
            size, block_h = 1 if held else dtype.itemsize, {96: 128}.get(head_dim, head_dim)
            tiles = decode_triton.CONFIGS[triton_common.family(cap), size, block_h][1]
            for n_rows in tiles if op in FEW else (1024,) if op in MANY else (4, 32, 136):
                often = head_dim == 128 and (op, cap, n_rows, held, tail) in OFTEN
                if held is None and head_dim in (64, 128):
                    often = often or (op in MANY and cap == 90) or (op == "mass" and cap == 90)
                    often = often or (op == "sparse" and cap == 90 and n_rows == 32)
                marks = () if often and dtype == BF16 else pytest.mark.slow
                yield pytest.param(op, cap, n_rows, head_dim, dtype, held, tail, 0, marks=marks)
    yield from ((op, cap, n_rows, 128, BF16, held, tail, 1000) for op, cap, n_rows, held, tail in WINDOWED)


@pytest.mark.parametrize(("op", "cap", "n_rows", "head_dim", "dtype", "held", "tail", "window"), [*entries()])
def test_every_entry_of_the_tables_is_built_well(
    op: str, cap: int, n_rows: int, head_dim: int, dtype: torch.dtype, held: torch.dtype | None, tail: int, window: int
) -> None:
    ways: list[dict[str, Any]] = [{}]
    if op == "key_mass" and not held:
        ways = [{"page": 1}, {"page": 16}]
    elif op == "sparse":
        ways = [SEVERAL if held is PLANES else ONE_CHUNK]
        ways = ways if held else [way | {"page": page} for way in (ONE_CHUNK, SEVERAL) for page in (1, 16)]
    for way in ways:
        assert_built_well(op, cap, n_rows, dtype, held, head_dim=head_dim, tail=tail, window=window, **way)


@pytest.mark.parametrize(
    ("cap", "op", "held"),
    [
        *((100, op, held) for op in ("mass", "prefill", "sparse") for held in (INT8, PLANES)),
        *((120, "prefill", held) for held in (INT8, PLANES)), (103, "sparse", INT8),
    ],
)  # fmt: skip
def test_caches_of_bytes_are_built_for_blackwell(cap: int, op: str, held: torch.dtype) -> None:
    """Of 64 rows and more: Triton cannot predicate impure assembler in loops whose products go to tensor memory."""
    shape = SEVERAL if op == "sparse" else {}
    reader = attended(op, cap, n_tokens=256 if op in MANY else 9, group=4, held=held, **shape)[0]
    assert reader.kwargs["BLOCK_R"] >= 64 and reader.compiled.hmma + reader.compiled.utcmma > 0
    assert_lean(reader.compiled, cap)


# ---- what a loop has, and what is built and launched -----------------------------------------------------------------


@pytest.mark.parametrize("cap", [80, 90])
def test_bytes_and_nibbles_are_widened_by_four_at_once_and_a_block_takes_few_instructions(cap: int) -> None:
    """Triton's own way has an I2F per entry, reads byte by byte and takes 760 to 890 instructions."""
    split = attended("decode", cap, held=INT8)[0]
    block = max(split.compiled.loops, key=len)
    each = 2 * split.kwargs["BLOCK_N"] * split.kwargs["BLOCK_H"] // (32 * split.compiled.warps)  # entries a thread
    codes = ("HFMA2", "HMUL2", "PRMT", "LDS.U8", "I2F", "F2F.")
    count = {code: sum(code in instruction for instruction in block) for code in codes}
    assert count["HFMA2"] + count["HMUL2"] >= each // 2 and count["PRMT"] < each and count["LDS.U8"] == 0
    assert count["I2F"] <= 2 and count["F2F."] <= 8 and len(block) <= 700  # of positions, and of weights
    planes = attended("decode", cap, n_tokens=4, group=1, held=PLANES, tail=TAIL)[0]
    mixed, upper = sorted(planes.compiled.loops, key=len, reverse=True)[:2]  # of keys near the end, and before them
    assert sum("I2F" in instruction for instruction in mixed) <= 4 and len(upper) <= 630  # of positions and masks


@pytest.mark.parametrize(("cap", "most"), [(80, 320), (90, 540)])
def test_blocks_without_a_mask_take_few_instructions_and_scale_no_score_by_itself(cap: int, most: int) -> None:
    """A score is scaled and made an exponent in one instruction: a multiplication each would be a ninth more."""
    [launch] = attended("prefill", cap, n_tokens=256)
    tile = launch.kwargs["BLOCK_R"] * launch.kwargs["BLOCK_N"] // (32 * launch.compiled.warps)
    out = launch.kwargs["BLOCK_R"] * launch.kwargs["BLOCK_H"] // (32 * launch.compiled.warps)
    plain = min(launch.compiled.loops, key=len)
    assert len(plain) <= most
    assert sum("FMUL" in code for code in plain) < tile // 4 + out  # what was summed shrinks, rows' maxima are scaled


@thinned("cap,held", [80, 90], [None, INT8])
def test_tiles_of_16_and_of_32_rows_sum_over_keys_in_the_same_order(cap: int, held: torch.dtype | None) -> None:
    kernels = [attended("decode", cap, n_tokens=n_tokens, held=held)[0].kernel for n_tokens in (1, 5)]
    few, more = ([line for line in k.asm["ttgir"].splitlines() if line.startswith("#mma")] for k in kernels)
    assert len(few) == 1 and few == more


@pytest.mark.parametrize("cap", [80, 90, 100])
def test_a_merge_loads_sixteen_splits_before_it_waits_for_any(cap: int) -> None:
    merge = attended("decode", cap, n_tokens=4)[1]
    [loop] = merge.compiled.loops
    said = " ".join(loop)
    loaded = said.partition("BAR.")[0].count("LDG.E.128") * 16 * 32 * merge.compiled.warps
    assert loaded == 16 * merge.kwargs["BLOCK_H"] * 4 and said.count("BAR.") <= 4


KERNELS = {"mass": ["split_kernel", "merge_kernel", "mass_kernel"], "sparse": ["chunk_kernel", "merge_kernel"]}


@pytest.mark.parametrize(
    ("op", "cap", "how"),
    [
        *(("mass", 90, {"held": held}) for held in (None, INT8)),
        *(("decode", cap, {"held": PLANES, "tail": TAIL}) for cap in (80, 90)),  # how long a tail is, is built in
        *((op, 90, {"n_tokens": 256}) for op in MANY),
        *(("sparse", cap, {}) for cap in (80, 90)),
    ],
)
def test_no_length_or_number_of_rows_or_tokens_builds_another_kernel(op: str, cap: int, how: dict[str, Any]) -> None:
    """Of 1, not of 16, one more than before."""
    first = attended(op, cap, **how)
    assert [launch.name for launch in first] == KERNELS.get(op, [launch.name for launch in first])
    tokens = [301] if op in MANY else [2, 3]
    changes = [*({"n_keys": n} for n in (1, 17, 4097, 8191)), *({"n_batch": n} for n in (1, 3))]
    changes += [{"n_tokens": n, "n_batch": n_batch} for n in tokens for n_batch in (2, 3)]
    changes += [{"n_listed": 400, "width": 121}, {"n_listed": 368, "width": 160}] if op == "sparse" else []
    for change in changes:
        again = attended(op, cap, **{**how, **change})
        assert all(one.kernel is other.kernel for one, other in zip(again, first, strict=True)), change


@pytest.mark.parametrize(
    ("op", "how", "grids"),
    [
        ("mass", {"n_tokens": 50, "n_batch": 3, "n_keys": 1025, "page": 32}, [(2, 24, 3), (200, 24), (1, 24)]),
        ("prefill", {"n_tokens": 290, "n_batch": 3}, [(10, 24)]),
        ("key_mass", {"n_tokens": 256, "n_batch": 3, "n_keys": 1025}, [(9, 24)]),
        # a short chunk is decoded in splits
        ("prefill", {"n_tokens": 32, "n_batch": 1}, [(1, 8, 4096 // prefill_triton.PREFILL_SPLIT), (128, 8)]),
        ("sparse", SEVERAL, [(5, 16, 1), (4, 16)]),
        ("sparse", SEVERAL | {"n_batch": 16, "n_tokens": 4}, [(3, 128, 1), (16, 128)]),
        ("sparse", SEVERAL | {"n_batch": 32}, [(1, 256, 1)]),
        ("sparse", {"n_listed": 4000, "width": 138}, [(17, 16, 1), (4, 16)]), ("sparse", ONE_CHUNK, [(1, 16, 1)]),
    ],
)  # fmt: skip
def test_a_program_is_launched_for_each_tile_and_head_and_split(
    op: str, how: dict[str, Any], grids: list[tuple[int, ...]]
) -> None:
    assert [launch.grid for launch in attended(op, **how)] == grids


@pytest.mark.parametrize("cap", [89, 90, 100, 120])
def test_the_longest_rows_become_float8_without_spills(cap: int) -> None:
    assert_lean(launched(cap, lambda: int8.float8_rows(new(16, LONGEST, dtype=BF16), LEAST))[0].compiled, cap)


@pytest.mark.parametrize(("arch", "family"), [(80, 80), (86, 80), (87, 80), (89, 80), (90, 90), (100, 90), (103, 90),
                                              (110, 80), (120, 80), (121, 80)])  # fmt: skip
def test_a_device_takes_the_tables_of_a_family_whose_shared_memory_it_has(arch: int, family: int) -> None:
    assert triton_common.family(arch) == family
    assert SM_SHARED.get(arch, 228 << 10) >= (228 << 10 if family == 90 else 100 << 10)


@pytest.mark.parametrize("arch", [70, 75, "gfx942", "gfx90a"])
def test_a_device_that_no_table_covers_is_refused_in_a_sentence(arch: int | str) -> None:
    with pytest.raises(ValueError, match=f"compute capability 8.0 and later, not for {arch!r}"):
        attended("decode", arch)


# ---- how many kernels an operator launches is what `launches` says --------------------------------------------------

G, H = 4, 128


def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Kernels that a call launches, Triton's and torch's."""

    def is_kernel(op: Any, _: Any) -> bool:  # neither views nor these are
        return op.overloadpacket.__name__ not in ("device", "empty", "empty_strided") and not op.is_view

    with stand_in(90) as triton_launches, FakeTensorMode(), Noting(is_kernel) as of_torch:
        call(*args, **kwargs)
    return len(triton_launches) + sum(of_torch.seen)


BYTES = [{"held": INT8}, {"held": PLANES, "tail": TAIL}]  # the latter as a draft reads it
NAMES = {"decode": "decode_attention", "mass": "decode_attention_with_mass", "prefill": "prefill_attention",
         "lse": "prefill_attention_with_lse", "key_mass": "key_mass", "sparse": "sparse_attention"}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "how", "sizes", "n"),
    [
        # attention of a step is split and merged, and mass is one kernel more
        ("decode", {"n_tokens": 5}, {}, 2), ("mass", {"n_tokens": 5}, {}, 3),
        # attention of a chunk is one kernel unless it is short
        *((op, {"n_tokens": 65}, {"n_rows": 65 * G}, 1) for op in ("prefill", "lse")),
        *((op, {"n_tokens": 64}, {"n_rows": 64 * G}, n) for op, n in (("prefill", 2), ("lse", 3))),
        # mass of a chunk is one kernel unless pages are longer than a block
        *(("key_mass", {"n_tokens": 70, "page": page, "dtype": dtype}, {"page": page, "itemsize": dtype.itemsize}, n)
          for page, dtype, n in ((16, BF16, 1), (128, BF16, 1), (32, FP32, 1), (64, FP32, 2))),
        # a sparse step is merged unless one program reads all its entries
        *(("sparse", {"n_listed": listed, "width": 48}, {"n_entries": listed + 48}, n)
          for listed, n in ((144, 1), (160, 2), (1024, 2), (4096, 2))),
        # an int8 cache takes no kernel more
        *((op, how | held, sizes, n) for held in BYTES for op, how, sizes, n in (
            ("mass", {"n_tokens": 5}, {}, 3), ("lse", {"n_tokens": 70}, {"n_rows": 70 * G}, 1),
            ("key_mass", {"n_tokens": 70, "page": 128}, {"page": 128, "itemsize": 1}, 1),
            ("sparse", {"n_listed": 144, "width": 48}, {"n_entries": 192}, 1))),
    ],
)  # fmt: skip
def test_attention_takes_as_many_kernels_as_said(op: str, how: dict[str, Any], sizes: dict[str, int], n: int) -> None:
    assert counted(attend, op, **how) == launches(NAMES[op], **sizes) == n


def test_selection_is_one_kernel_and_that_of_quest_three_and_a_product_with_int8_weights_one() -> None:
    n = 4096
    calls: dict[str, Callable[[], Any]] = {
        "top_pages": lambda: select.top_pages(new(2, 8, 500, dtype=FP32), new(2, 1), 24),
        "guided_select": lambda: select.guided_select(
            new(32, 2, 8, 500, dtype=FP32), new(32, 2, 8, 384), new(2, dtype=torch.bool), new(2), 16
        ),
        "page_bounds": partial(bound, 2),
        "quest_pages": lambda: select.quest_pages(
            new(2, 1, 8 * G, H, dtype=BF16).transpose(1, 2), new(2, 8, 512, 2 * H, dtype=BF16), new(2), 24
        ),
        "int8_linear": lambda: int8.linear(
            new(64, n, dtype=BF16), new(n, n, dtype=INT8), new(n, dtype=FP32), new(n, dtype=BF16), arch=90
        ),
    }
    assert {op: counted(call) for op, call in calls.items()} == {op: launches(op) for op in calls}
    assert launches("quest_pages") == 3 and [launches("int8_linear", n_rows=n) for n in (1, 256, 257)] == [1, 1, 2]
    with pytest.raises(ValueError, match="no operator 'softmax'"):
        launches("softmax")
