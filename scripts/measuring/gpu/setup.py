"""What every stage of gpu_suite.py shares: on what it runs, its clock, the machine's ceilings, small models.

Shapes: B batch rows, T tokens in this call, S cache capacity.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.model import ModelConfig, Transformer, rope_frequencies
from inputs.prompts import short_name
from measuring.chips import CHIPS, Chip, Rates, chip_of, measure, rates_here, seconds_of
from measuring.machine import clocks, environment

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]  # of the checkout, which gpu_suite.py is run from
SOURCES = ("gpt_fast_sd", "model", "tp", "scripts", "tests")
SMALL = ModelConfig(
    vocab_size=512, dim=128, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=256, max_seq_len=4096
)


@functools.cache
def tree_of() -> str:
    kinds = ".py", ".cpp", ".hpp"
    files = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in kinds)
    return short_name(b"".join(str(path.relative_to(ROOT)).encode() + path.read_bytes() for path in files))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """On what a suite runs. tiny: shapes of a dry run, whose figures mean nothing."""

    device: torch.device
    tiny: bool
    pairs: int
    max_autotune: bool
    texts: tuple[Path, ...]
    out: Path
    known: Mapping[str, Record]  # results of the stages that are done
    free: int | None = None  # bytes of the device that nobody has taken yet, as a stage's own process sees them

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_cuda else "cpu"

    @property
    def measured(self) -> Chip | None:
        if "machine" not in self.known:
            return None
        rates = self.known["machine"]["rates"]
        return Rates(**rates).chip("measured", math.inf)

    @property
    def chip(self) -> Chip:
        """The roofline: the data sheet's where the chip is known, else what was measured; an H200's if nothing was."""
        sheet = chip_of(self.device_name) if self.on_cuda else None
        if sheet is None and self.on_cuda and self.measured:
            return replace(self.measured, name=f"{self.device_name}, measured")
        return sheet or replace(CHIPS["h200"], name=f"an {CHIPS['h200'].name}, which is not at hand")

    @property
    def memory(self) -> float:
        """Bytes of the device: those that are free now, else when first looked, else as it is sold."""
        return self.free or self.known.get("machine", {}).get("environment", {}).get("free_bytes") or self.chip.memory


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
        return statistics.median(self.times(call, before))

    def times(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
        for _ in range(3):  # whatever is built at a first call is there afterwards
            before()
            call()
        if self.device.type != "cuda":
            seconds = []
            for _ in range(self.repeats):
                before()
                seconds.append(seconds_of(call, self.device))
            return seconds
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


def difference(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| in fp64; inf where anything is not finite, or of another shape."""
    out, expected = out.double().cpu(), expected.double().cpu()
    if out.shape != expected.shape or not bool(out.isfinite().all()):
        return float("inf")
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))


def machine(setup: Setup) -> Record:
    """Names, versions and clocks; and the rates that everything else is held against, measured."""
    dtype = torch.bfloat16 if setup.on_cuda else torch.float32
    tiny = {"n_bytes": 2**22, "size": 64, "repeats": 3}
    rates = measure(setup.device, dtype=dtype, **tiny) if setup.tiny else rates_here(setup.device, dtype)
    found = environment(setup.device, "triton")
    if setup.on_cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "free_bytes": setup.free, "cuda": torch.version.cuda, "multiprocessors": properties.multi_processor_count,
            "capability": [properties.major, properties.minor], "nvidia_smi": clocks(),
        }  # fmt: skip
    return {"environment": found, "rates": asdict(rates), "data_sheet": asdict(setup.chip)}


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Random weights, large enough that attention is no average and greedy text keeps varying."""
    torch.manual_seed(0)
    with torch.device("meta"):  # in fp32 the weights of 8B alone are 30 GiB, more than a card of 24 or 32 GB has
        model = Transformer(config)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    model.rope_freqs = rope_frequencies(config).to(device)  # a buffer, which stays fp32
    if config.tie_embeddings:
        model.output.weight = model.embedding.weight
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # unit variance in gives a variance of 4 (queries, keys, values) or 2 out
            gain = 1.0 if "embedding" in name else (2.0 if "wqkv" in name else 1.4) * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=gain)
            parameter.data[parameter.abs() < gain * 2.0**-20] = 0  # no trained weight has such, see ops/planes.py
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        else:
            torch.nn.init.ones_(parameter)
    return model.eval().requires_grad_(False)
