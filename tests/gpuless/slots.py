"""Issue slots: those that the loop of a kernel takes for each KiB it reads, and those a chip has while a KiB arrives.

An SM has four schedulers, and each issues an instruction of one warp per clock. A kernel that takes all slots or more
waits for instructions and not for memory, whatever it has in flight. That is the least it takes: an instruction may
occupy its unit for several clocks, and what comes before and after the loop is not counted.
"""

import re

from measuring.chips import CHIPS
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
    """Slots that the loop of a kernel takes for a KiB from memory: attention of few rows or a product of int8 weights.

    Tiles of rows beyond the first find in the cache what it has read, and take slots as it does.
    """
    given, warps = launch.kwargs, launch.compiled.warps
    if "p_w" in given:
        tiles, n_bytes = launch.grid[0], given["BLOCK_N"] * given["BLOCK_K"]
        one_block = n_bytes + 2 * given["BLOCK_M"] * given["BLOCK_K"]  # rows are in the cache
    else:
        tiles = launch.grid[2 if launch.name == "chunk_kernel" else 0]
        plane = 2 * given["BLOCK_N"] * given["p_k"].shape[3] * given["p_k"].element_size()
        one_block = plane * (1 if given["p_k_low"] is None else 2)
        n_bytes = plane if given["TAIL"] else one_block  # copies of the lower plane are masked, but issued

    def copied(loop: list[str]) -> int:
        copies = re.findall(r"LDGSTS\.[A-Z.]*(64|128)?", " ".join(loop))
        return 32 * warps * sum(int(bits or 32) // 8 for bits in copies)

    # of two loops over planes the one that reads less runs for most keys
    n_copied = min(filter(None, map(copied, launch.compiled.loops)))
    assert n_bytes <= n_copied < 2 * one_block, "a turn of the loop reads one block, and parts of a list besides"
    n_instructions = max(len(loop) for loop in launch.compiled.loops if copied(loop) == n_copied)
    scales = 4 * given["BLOCK_N"] if given.get("p_k_scale") is not None else 0
    return n_instructions * warps * tiles * KIB / (n_bytes + scales)
