"""How many of a chip's issue slots a kernel takes while its bytes arrive, by its machine code: a ceiling for each.

An SM has four schedulers, and each issues an instruction of one warp per clock. A kernel that takes all slots or more
waits for instructions and not for memory, whatever it has in flight. That is the least it takes: an instruction may
occupy its unit for several clocks, and what comes before and after the loop is not counted.

`python -m pytest tests/gpt_fast_sd/fast/test_slots_aot.py -m "" -s` prints what is counted, and docs/gpu.md's table.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from measuring.chips import CHIPS
from tests.gpt_fast_sd.fast.dense import FP16, INT8, PLANES
from tests.gpt_fast_sd.fast.launching import attended, int4_product, product
from tests.gpuless.aot import assert_overlapping
from tests.gpuless.driver import Launch

KIB, SCHEDULERS = 1 << 10, 4
# what sm_<cap> a chip is, its SMs and its clock: data sheets; of Hopper and Blackwell, which may clock higher, what is
# expected of them under load
CHIP = {
    "a100": (80, 108, 1.41e9), "h100": (90, 132, 1.75e9), "h200": (90, 132, 1.75e9), "b200": (100, 148, 1.85e9),
    "rtx 4090": (89, 128, 2.52e9),
}  # fmt: skip


def slots_offered(chip: str) -> float:
    """Slots that pass on a chip while a KiB arrives at the full bandwidth of its data sheet."""
    _, n_sms, clock = CHIP[chip]
    return SCHEDULERS * n_sms * clock * KIB / CHIPS[chip].bandwidth


def slots_taken(launch: Launch) -> float:
    """Slots that the loop of a kernel takes for a KiB from memory: attention of few rows or a product.

    Tiles of rows beyond the first find in the cache what it has read, and take slots as it does.
    """
    given, warps = launch.kwargs, launch.compiled.warps

    def copied(loop: list[str]) -> int:
        copies = re.findall(r"LDGSTS\.[A-Z.]*(64|128)?", " ".join(loop))
        return 32 * warps * sum(int(bits or 32) // 8 for bits in copies)

    if launch.name == "tiles_kernel":  # two groups of 64 outputs, with their scales
        loop = max(launch.compiled.loops, key=len)
        assert 0 <= copied(loop) - 2 * (4096 + 256 * given["BLOCK_M"]) <= 512, "and some scales"
        return len(loop) * warps * launch.grid[0] * KIB / (2 * (4096 + 256))
    if "p_w" in given:
        tiles, n_bytes = launch.grid[0], given["BLOCK_N"] * given["BLOCK_K"] * (1 if given["p_low"] is None else 2)
        one_block = n_bytes + 2 * given["BLOCK_M"] * given["BLOCK_K"]  # rows are in the cache
    else:
        tiles = launch.grid[2 if launch.name == "chunk_kernel" else 0]
        plane = 2 * given["BLOCK_N"] * given["p_k"].shape[3] * given["p_k"].element_size()
        one_block = plane * (1 if given["p_k_low"] is None else 2)
        n_bytes = plane if given["TAIL"] else one_block  # copies of the lower plane are masked, but issued

    # of two loops over planes the one that reads less runs for most keys
    n_copied = min(filter(None, map(copied, launch.compiled.loops)))
    assert n_bytes <= n_copied < 2 * one_block, "a turn of the loop reads one block, and parts of a list besides"
    n_instructions = max(len(loop) for loop in launch.compiled.loops if copied(loop) == n_copied)
    scales = 4 * given["BLOCK_N"] if given.get("p_k_scale") is not None else 0
    return n_instructions * warps * tiles * KIB / (n_bytes + scales)


FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp16": {"dtype": FP16}, "int8": {"held": INT8}, "planes": {"held": PLANES},
    "upper_plane": {"held": PLANES, "tail": 64},
}  # fmt: skip
# operator and tokens of 4 query heads: tiles of 16, 32 and 64 rows, 72 rows; drafts over a list
ATTENTION = {
    "16": ("decode", 4), "32": ("decode", 8), "32_mass": ("mass", 8), "64": ("decode", 16), "72": ("decode", 18),
    "list_16": ("sparse", 4), "list_32": ("sparse", 8),
}  # fmt: skip
# how many planes of weights are read
OF_WEIGHTS = {"int8_linear": 0, "planes_linear": 2, "planes_linear_upper": 1, "int4_linear": 0}
PRODUCTS = {f"{n_rows}_x_{n_out}": (n_rows, n_out) for n_out in (4096, 28672) for n_rows in (16, 32, 64)}
# (what is read, sm_<cap>) -> slots for a KiB in each column of ATTENTION or PRODUCTS: 3 % above what Triton 3.7.1 needs
CEILINGS = {
    ("bf16", 80): (43, 61, 76, 111, 174, 70, 94), ("bf16", 89): (42, 61, 77, 111, 174, 70, 94),
    ("bf16", 90): (42, 60, 75, 74, 139, 39, 58), ("bf16", 100): (42, 59, 75, 87, 154, 41, 60),
    ("int8", 80): (169, 206, 234, 368, 736, 209, 254), ("int8", 89): (172, 206, 237, 373, 745, 213, 254),
    ("int8", 90): (171, 204, 236, 246, 402, 213, 255), ("int8", 100): (168, 202, 234, 292, 462, 211, 254),
    ("planes", 80): (185, 229, 255, 494, 988, 216, 259), ("planes", 89): (188, 229, 255, 500, 1001, 217, 260),
    ("planes", 90): (182, 226, 253, 263, 424, 222, 259), ("planes", 100): (180, 223, 251, 312, 506, 218, 259),
    ("upper_plane", 80): (300, 399, 460, 961, 1923, 462, 569),
    ("upper_plane", 89): (300, 401, 460, 977, 1955, 468, 568),
    ("upper_plane", 90): (299, 398, 457, 472, 825, 472, 568),
    ("upper_plane", 100): (299, 393, 452, 572, 1005, 472, 562),
    ("int8_linear", 80): (173, 194, 243, 133, 153, 185), ("int8_linear", 89): (170, 194, 243, 131, 150, 185),
    ("int8_linear", 90): (154, 172, 243, 164, 170, 187), ("int8_linear", 100): (147, 172, 244, 148, 153, 169),
    ("planes_linear", 80): (156, 162, 187, 126, 131, 146), ("planes_linear", 89): (156, 162, 187, 126, 132, 151),
    ("planes_linear", 90): (130, 140, 186, 146, 147, 156), ("planes_linear", 100): (130, 140, 184, 139, 141, 147),
    ("planes_linear_upper", 80): (170, 192, 244, 135, 157, 184),
    ("planes_linear_upper", 89): (170, 192, 244, 135, 151, 184),
    ("planes_linear_upper", 90): (154, 174, 243, 164, 170, 187),
    ("planes_linear_upper", 100): (150, 172, 243, 149, 155, 172),
    ("int4_linear", 80): (164, 221, 442, 159, 217, 434), ("int4_linear", 89): (169, 228, 455, 160, 221, 441),
    ("int4_linear", 90): (164, 188, 239, 156, 181, 235), ("int4_linear", 100): (299, 321, 336, 296, 313, 329),
}  # fmt: skip
OLDER = 1.4 if triton.__version__.startswith("3.6.") else 1.0  # whose loops over lists are up to 40 % longer


def percents(name: str, chip: str) -> list[float]:
    """The ceilings in percent of the slots that a chip has while a KiB arrives."""
    return [100 * most / slots_offered(chip) for most in CEILINGS[name, CHIP[chip][0]]]


def cells() -> Iterator[Any]:
    """Every cell, its percents in its id; one of each format in the ordinary run."""
    for (name, cap), ceilings in CEILINGS.items():
        names, chips = ("bf16", "fp16") if name == "bf16" else (name,), [chip for chip in CHIP if CHIP[chip][0] == cap]
        for i, (column, most) in enumerate(zip(PRODUCTS if "linear" in name else ATTENTION, ceilings, strict=True)):
            share = [f"{chip.replace(' ', '_')}_{percents(name, chip)[i]:.0f}%" for chip in chips]
            for each in names:
                often = cap == 90 and (i == 0 or (each, column) in (("bf16", "list_16"), ("int8_linear", "16_x_28672")))
                marks = () if often else pytest.mark.slow
                yield pytest.param(each, column, cap, most, id="-".join([each, column, *share]), marks=marks)


def built(name: str, column: str, cap: int) -> Launch:
    """The kernel that reads: keys and values of 128 dims, or weights of 4,096 inputs."""
    if column in PRODUCTS:
        n_rows, n_out = PRODUCTS[column]
        if name == "int4_linear":
            return int4_product(cap, n_rows, n_out=n_out)
        return product(cap, n_rows, n_out=n_out, n_planes=OF_WEIGHTS[name])
    op, n_tokens = ATTENTION[column]
    return attended(op, cap, n_tokens=n_tokens, **FORMATS[name])[0]


@pytest.mark.parametrize(("name", "column", "cap", "most"), [*cells()])
def test_a_loop_takes_no_more_issue_slots_than_it_is_known_to(name: str, column: str, cap: int, most: int) -> None:
    launch = built(name, column, cap)
    assert_overlapping(launch.compiled)
    taken = slots_taken(launch)
    shares = (f"{chip} {taken / slots_offered(chip):.0%}" for chip in CHIP if CHIP[chip][0] == cap)
    print(f"{name} {column} sm_{cap}: {taken:.1f} slots a KiB,", *shares)
    assert taken <= most * OLDER


def test_the_page_about_gpus_shows_the_ceilings() -> None:
    names = {"bf16": "bf16, fp16", "int8": "int8", "planes": "planes, both", "upper_plane": "the upper plane",
             "int8_linear": "int8 weights", "planes_linear": "weights in planes, both",
             "planes_linear_upper": "the upper plane of weights", "int4_linear": "int4 weights"}  # fmt: skip
    rows = [["percent", *(chip.upper() for chip in CHIP)], ["---"] * 6]
    for name, title in names.items():
        every = [[f"{share:.0f}" for share in percents(name, chip)] for chip in CHIP]
        n = 3 if name in OF_WEIGHTS else 5
        rows.append([title, *("; ".join((" / ".join(some[:n]), " / ".join(some[n:]))) for some in every)])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    print(table)
    assert table in (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
