"""Chips by name, with their vendor's figures, or the one of this machine, measured; the links between several of them.

A data sheet's figure is a ceiling, and none of these was measured with this code.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GIB = 2**30


def _check_rates(thing: Link | Chip, *names: str) -> None:
    for name in names:
        if not 0 < getattr(thing, name) < math.inf:
            raise ValueError(f"{name} of {thing.name} must be positive, got {getattr(thing, name)}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices. bandwidth: bytes per second that one device sends while it receives as many."""

    name: str
    bandwidth: float
    hop: float  # seconds until data of one device arrives at the next

    def __post_init__(self) -> None:
        _check_rates(self, "bandwidth")


# A ring of n devices adds numbers up in 2 (n - 1) hops, after a start; NCCL's own figures for its fastest protocol
# (src/graph/tuning.cc: baseLat and hwLat of Ring, LL), which it takes for sums as small as those of a step.
RING_START, NVLINK_HOP, PCIE_HOP, NETWORK_HOP = 6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6
PCIE_4 = Link(name="PCIe 4.0 x16", bandwidth=32e9, hop=PCIE_HOP)
PCIE_5 = Link(name="PCIe 5.0 x16", bandwidth=64e9, hop=PCIE_HOP)


def nvlink(both_ways: float) -> Link:
    """NVLink by its data sheet's bytes per second, which count both directions together."""
    return Link(name="NVLink", bandwidth=both_ways / 2, hop=NVLINK_HOP)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Devices that hold a model together, `per_node` of them in a machine; network: the link between machines."""

    n: int
    link: Link
    per_node: int = 8
    network: Link | None = None

    def __post_init__(self) -> None:
        if self.n > self.per_node and self.network is None:
            raise ValueError(f"tp {self.n} is more than the {self.per_node} devices of a machine: it needs --network")
        if self.n > self.per_node and self.n % self.per_node:
            raise ValueError(f"tp over several machines must be a multiple of {self.per_node}, got {self.n}")

    @property
    def slowest(self) -> Link:
        return self.network if self.network and self.n > self.per_node else self.link

    def all_reduce(self, n_bytes: float) -> float:
        """Seconds of adding up n_bytes of every rank: in a ring each sends them twice, except its own share."""
        machines = -(-self.n // self.per_node)
        outside = 2 * machines if machines > 1 else 0
        hops = (2 * (self.n - 1) - outside) * self.link.hop + outside * (self.network.hop if self.network else 0.0)
        return RING_START + hops + 2 * (self.n - 1) / self.n * n_bytes / self.slowest.bandwidth


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator's rates: a vendor's figures, or measured ones."""

    name: str
    bandwidth: float  # bytes per second
    peak: float  # dense operations per second, in the working dtype; in the table below, bf16 and fp16
    memory: float = math.inf  # usable bytes
    fp32: float | None = None  # dense operations per second in fp32; None: the same as peak
    link: Link = PCIE_4  # to other devices in its machine
    float8: bool = True  # whether it multiplies such numbers

    def __post_init__(self) -> None:
        _check_rates(self, "bandwidth", "peak")
        if not self.memory > 0:
            raise ValueError(f"memory of {self.name} must be positive, got {self.memory}")

    def working_in(self, dtype: torch.dtype) -> Chip:
        """Return the chip with the peak that it has in this dtype."""
        return replace(self, peak=self.fp32) if dtype == torch.float32 and self.fp32 else self


# Bandwidth, dense rates (half of figures "with sparsity") and links from NVIDIA's data sheets; for GeForce from the
# white papers of Ampere GA102, Ada and Blackwell: tensor cores, bf16, sums in fp32. memory: what a driver leaves of the
# nominal size; the 141 GB of an H200 are some 140 GiB to nvidia-smi, and ECC takes a part of GDDR6.
# Behind each its sheet, and the TFLOP/s "with sparsity" that it names.
CHIPS = {
    key: Chip(name=name, bandwidth=bandwidth, peak=peak, fp32=fp32, memory=memory * GIB, link=link, float8=float8)
    for key, name, bandwidth, peak, fp32, memory, link, float8 in (
        ("a100", "A100-80G SXM", 2.039e12, 312e12, 19.5e12, 79, nvlink(600e9), False),  # A100 80GB data sheet, SXM
        ("a100 40gb", "A100-40G SXM", 1.555e12, 312e12, 19.5e12, 39, nvlink(600e9), False),  # A100 40GB data sheet, SXM
        ("h100", "H100 SXM", 3.352e12, 989e12, 67e12, 79, nvlink(900e9), True),  # H100 data sheet, SXM: 1,979
        ("h100 pcie", "H100 PCIe", 2.0e12, 756e12, 51e12, 79, PCIE_5, True),  # product brief: 1,513; NVLink joins two
        ("h100 nvl", "H100 NVL", 3.9e12, 835e12, 60e12, 93, PCIE_5, True),  # data sheet, NVL: 1,671; NVLink joins two
        ("h200", "H200 SXM", 4.8e12, 989e12, 67e12, 139, nvlink(900e9), True),  # H200 data sheet, SXM: 1,979
        ("b200", "B200", 7.7e12, 2250e12, 75e12, 178, nvlink(1800e9), True),  # HGX data sheet, an eighth: 180 GB, 4,500
        ("l4", "L4", 0.3e12, 121e12, 30.3e12, 22, PCIE_4, True),  # L4 data sheet: 242
        ("l40", "L40", 0.864e12, 181e12, 90.5e12, 44, PCIE_4, True),  # L40 data sheet: 362, no NVLink
        ("a6000", "RTX A6000", 0.768e12, 154.8e12, 38.7e12, 47, PCIE_4, False),  # RTX A6000 data sheet: 309.7
        ("l40s", "L40S", 0.864e12, 362e12, 91.6e12, 44, PCIE_4, True),  # L40S data sheet: 733, no NVLink
        ("a10", "A10", 0.6e12, 125e12, 31.2e12, 22, PCIE_4, False),  # A10 data sheet: 250
        ("rtx 3090", "RTX 3090", 0.936e12, 71e12, 35.6e12, 23.5, PCIE_4, False),  # GA102 white paper; NVLink joins two
        ("rtx 4090", "RTX 4090", 1.008e12, 165.2e12, 82.6e12, 23.5, PCIE_4, True),  # Ada white paper
        ("rtx 5090", "RTX 5090", 1.792e12, 209.5e12, 104.8e12, 31, PCIE_5, True),  # Blackwell white paper
    )
}  # fmt: skip


def chip_named(name: str) -> Chip:
    """The chip with this key, ignoring spaces, dashes and case; ValueError if there is none."""
    wanted = "".join(_words(name))
    found = next((chip for key, chip in CHIPS.items() if "".join(_words(key)) == wanted), None)
    if found is None:
        raise ValueError(f"device must be 'this' or one of {', '.join(CHIPS)}, got {name!r:.80}")
    return found


def chip_of(device_name: str) -> Chip | None:
    """The chip with this driver name, such as "NVIDIA H100 80GB HBM3"; None if it is not in the table."""
    said = set(_words(device_name))
    keys = [key for key in CHIPS if set(_words(key)) <= said]
    return CHIPS[max(keys, key=len)] if keys else None


def _words(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of one device, per second: bytes copied (read and written), bytes read, operations."""

    copy: float
    read: float
    matmul: float

    def chip(self, name: str, memory: float) -> Chip:
        """The ceiling that measured steps are compared with: a step reads, so the better of both bandwidths counts."""
        return Chip(name=name, bandwidth=max(self.copy, self.read), peak=self.matmul, memory=memory)


def rates_here(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of this machine, over half a GiB (on a GPU four, or a quarter of what is free); takes a few seconds."""
    if device.type != "cuda":
        return measure(device, n_bytes=2**29, size=1024, dtype=dtype)
    n_bytes = min(2**32, torch.cuda.mem_get_info(device)[0] // 4)
    return measure(device, n_bytes=n_bytes // 4096 * 4096, size=8192, dtype=dtype)


PATIENCE = 1.0  # seconds of three calls, after which no more are timed


@torch.inference_mode()
def measure(device: torch.device, *, n_bytes: int, size: int, dtype: torch.dtype, repeats: int = 20) -> Rates:
    """Measure the ceilings: a copy and a sum of n_bytes, far more than any cache holds, and a product of size**3.

    All on random numbers: zeros are multiplied faster than real data. Each figure is from the median time. On a CPU the
    product is that of fp32 where that is the faster one: our kernels may widen what they multiply, and without
    instructions for bf16 a library's product in it says nothing of the machine.
    """
    numbers = torch.rand(n_bytes // 4096, 1024, device=device)
    other = torch.empty_like(numbers)
    dtypes = {dtype} if device.type == "cuda" else {dtype, torch.float32}
    factors = [[torch.randn(size, size, device=device).to(one) for _ in range(2)] for one in dtypes]
    # which reduction is the fastest depends on the machine: the best one counts
    reads: list[Callable[[], Tensor]] = [numbers.sum, lambda: numbers.sum(-1), lambda: numbers.amax(-1)]
    products = [functools.partial(torch.matmul, *two) for two in factors]
    return Rates(
        copy=2 * n_bytes / _median_seconds(lambda: other.copy_(numbers), device, repeats),
        read=n_bytes / min(_median_seconds(read, device, repeats) for read in reads),
        matmul=2 * size**3 / min(_median_seconds(product, device, repeats) for product in products),
    )


def _median_seconds(call: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    seconds = [seconds_of(call, device) for _ in range(3)]  # the first three do not count
    if sum(seconds) > PATIENCE:  # a library without instructions for a dtype
        return seconds[-1]
    return statistics.median(seconds_of(call, device) for _ in range(repeats))


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end) / 1e3)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
