"""What every stage of gpu_suite.py shares: on what it runs, its clock, and what it writes down.

Shapes: B batch rows, T tokens in this call, S cache capacity.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor

from gpt_fast_sd import EngineConfig, __version__
from gpt_fast_sd.measuring.chips import CHIPS, Chip, chip_of, measure
from gpt_fast_sd.model import ModelConfig, Transformer
from gpu_forecast import Cell, cell_for

Record = dict[str, Any]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Setup:
    """On what a suite runs. tiny: shapes of a dry run, whose figures mean nothing."""

    device: torch.device
    tiny: bool
    pairs: int
    max_autotune: bool
    texts: tuple[Path, ...]
    known: Mapping[str, Record]  # results of the stages that are done
    free: int | None = None  # bytes of the device that nobody has taken yet, as a stage's own process sees them

    @property
    def on_cuda(self) -> bool:
        """Whether there is a chip to measure."""
        return self.device.type == "cuda"

    @property
    def measured(self) -> Chip | None:
        """The rates that the first stage measured, None where it was left out."""
        if "machine" not in self.known:
            return None
        rates = self.known["machine"]["rates"]
        return Chip(name="measured", bandwidth=max(rates["copy"], rates["read"]), peak=rates["matmul"])

    @property
    def chip(self) -> Chip:
        """The roofline: the data sheet's where the chip is known, else what was measured.

        Without a chip, or where the rates of an unknown one were not measured: an H200's.
        """
        name = torch.cuda.get_device_name(self.device) if self.on_cuda else ""
        sheet = chip_of(name)
        if sheet is None and self.on_cuda and self.measured:
            return replace(self.measured, name=f"{name}, measured")
        return sheet or replace(CHIPS["h200"], name=f"an {CHIPS['h200'].name}, which is not at hand")

    def cell(self, context: int) -> Cell:
        """The rows of that context that the device has memory for: free now, else when first looked, else as sold."""
        found = self.known.get("machine", {}).get("environment", {}).get("free_bytes")
        return cell_for(context, self.free or found or self.chip.memory)


# ---- timing ----------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds of one call. On CUDA that of a captured graph, by events, behind a write that fills the L2 cache.

    Without the capture the launches of a call would be timed, and without the write what an earlier call left in L2.
    """

    def __init__(self, setup: Setup, repeats: int = 50) -> None:
        self.device, self.repeats = setup.device, 2 if setup.tiny else repeats
        self.flush = torch.empty(64 * 2**20 if setup.on_cuda else 0, dtype=torch.int32, device=setup.device)  # 256 MiB
        # a stream of its own: what a library holds for captures goes when a graph dies that was captured on theirs
        self.stream = torch.cuda.Stream(self.device) if setup.on_cuda else None

    def __call__(self, call: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> float:
        """The median of the repeats. before: called ahead of every call, and not timed."""
        return statistics.median(self.times(call, before=before))

    def times(self, call: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> list[float]:
        """Seconds of each repeat."""
        for _ in range(3):  # whatever is built at a first call is there afterwards
            before()
            call()
        if self.device.type != "cuda":
            return [_clocked(call, before) for _ in range(self.repeats)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            call()
        before()
        graph.replay()
        events = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            self.flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _clocked(call: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ---- the machine and its ceilings ------------------------------------------------------------------------------------


def machine(setup: Setup) -> Record:
    """Names, versions and clocks; and the rates that everything else is held against, measured."""
    small = setup.tiny
    rates = measure(
        setup.device, n_bytes=2**22 if small else 4 * GIB, size=64 if small else 8192,
        dtype=torch.bfloat16 if setup.on_cuda else torch.float32, repeats=3 if small else 20,
    )  # fmt: skip
    print(
        f"copy {rates.copy / 1e9:,.0f} GB/s, read {rates.read / 1e9:,.0f} GB/s, "
        f"matrix products {rates.matmul / 1e12:,.1f} TFLOP/s"
    )
    return {"environment": environment(setup), "rates": asdict(rates), "data_sheet": asdict(setup.chip)}


def environment(setup: Setup) -> Record:
    """What the numbers were measured on."""
    found: Record = {
        "gpt_fast_sd": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "cores": os.cpu_count(), "device": setup.device.type,
        "triton": _version("triton"), "flashinfer": _version("flashinfer-python"),
    }  # fmt: skip
    if setup.on_cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "device": properties.name, "memory_gib": properties.total_memory / GIB, "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size,
            "capability": list(torch.cuda.get_device_capability(setup.device)), "free_bytes": setup.free,
        }  # fmt: skip
        found["nvidia_smi"] = clocks()
    return found


def clocks() -> Record:
    """Power limit, clocks and temperature as they are now; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = "driver_version,power.limit,power.draw,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return dict(zip(fields.split(","), output.split(", "), strict=False))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- what was compared ----------------------------------------------------------------------------------------------


def difference(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| in fp64; inf where anything is not finite."""
    out, expected = out.double().cpu(), expected.double()
    if out.shape != expected.shape or not bool(out.isfinite().all()):
        return float("inf")
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))


class Findings:
    """Rows of what was compared; one line is printed for each that is wrong."""

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def add(self, op: str, what: str, error: float, tolerance: float) -> None:
        """One comparison. error inf: not finite, or not of the right shape."""
        ok = error <= tolerance
        self.rows.append({"op": op, "what": what, "error": min(error, 1e30), "tolerance": tolerance, "ok": ok})
        if not ok:
            print(f"WRONG: {op} {what}: off by {error:.3g}, tolerance {tolerance:.3g}")

    def record(self) -> Record:
        """All rows, and the worst of each op relative to its tolerance."""
        worst: dict[str, Record] = {}
        for row in self.rows:
            if row["op"] not in worst or _share(row) > _share(worst[row["op"]]):
                worst[row["op"]] = row
        for op, row in worst.items():
            n = sum(other["op"] == op for other in self.rows)
            print(f"{op}: {n} comparisons, worst {row['error']:.2g} of {row['tolerance']:.2g} ({row['what']})")
        return {"ok": all(row["ok"] for row in self.rows), "rows": self.rows, "worst": list(worst.values())}


def _share(row: Record) -> float:
    """How much of what is allowed an error is; where nothing is allowed, the error itself."""
    return float(row["error"] / (row["tolerance"] or 1.0))


# ---- small models ----------------------------------------------------------------------------------------------------

SMALL = ModelConfig(
    vocab_size=512, dim=128, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=256, max_seq_len=4096
)


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Random weights, large enough that attention is no average and greedy text keeps varying."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # unit variance in gives a variance of 4 (queries, keys, values) or 2 out
            gain = 1.0 if "embedding" in name else (2.0 if "wqkv" in name else 1.4) * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=gain)
        parameter.data = parameter.data.to(dtype)  # the rotary frequencies, a buffer, stay fp32
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the fp32 ones took is free for others, too
    return model.eval().requires_grad_(False)


def prompts_of(setup: Setup, vocab_size: int) -> list[list[int]]:
    """Random prompts of ragged length, more than there are slots."""
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 200, 40) if setup.tiny else (40, 700, 300, 1500, 90)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def settings_of(setup: Setup, **changes: Any) -> EngineConfig:
    """Four slots of 2,048 tokens; a dry run does not compile."""
    base: Record = {"batch_size": 4, "max_seq_len": 2048, "max_autotune": False, "device": setup.device.type}
    if setup.tiny:
        base |= {"batch_size": 2, "max_seq_len": 512, "compile": False}
    return EngineConfig(**{**base, **changes})
