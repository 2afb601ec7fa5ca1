"""The net: what a redesign must not move, measured in some fifty cells and compared with the frozen tests/net.json.

    python tests/net.py --check [--only "snapkv"]    each difference is a line: cell, what, expected, got
    python tests/net.py --write                      freeze what this checkout does

A cell is an engine that answers ragged prompts three times, and gives logits. Bits depend on the machine: where its
mark is not the frozen one, cells in fp32 that are not compiled are compared by tokens, all others by counts alone.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

CHECKOUT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(CHECKOUT)

import torch  # noqa: E402

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams  # noqa: E402
from tests.drafts import draft_of  # noqa: E402
from tests.helpers import random_ids, tiny_config, tiny_model  # noqa: E402

FROZEN = Path(__file__).with_name("net.json")
# model, dtype, cache, way: policies, as tests/drafts.py names them; + what else is set; * frozen for "plain", too
TABLE = """
tiny fp32 same eager: off *, streaming *, full, snapkv, quest, guided, standalone, early_exit, lookup, hierarchy *
tiny fp32 same eager: hierarchy over standalone, streaming +exact
tiny fp32 int8 eager: snapkv, quantized *, guided x planes; tiny bf16 same eager: streaming
tiny fp16 same eager: snapkv; tiny fp32 int8 compiled: hierarchy
tiny fp32 same compiled: guided *; bundled fp32 same compiled: streaming
tiny fp32 same captured: off, streaming, guided, hierarchy over standalone
tiny fp32 int8 captured: snapkv, quantized; wide bf16 same compiled: off *, snapkv, early_exit, lookup +int4
wide bf16 int8 compiled: guided *, quest x planes; bundled bf16 int8 compiled: streaming *, quantized *
bundled fp32 same eager: off *, streaming, lookup; bundled fp32 int8 eager: hierarchy
bundled bf16 same compiled: off *, streaming *, quest, lookup, standalone, hierarchy, snapkv +exact, guided +int8
"""
ROWS = [row.split(": ") for row in re.split("; |\n", TABLE.strip())]
STARRED = [f"{engine} {policy}" for engine, policies in ROWS for policy in policies.split(", ")]
CELLS = {"avx2": [cell.removesuffix(" *") for cell in STARRED], "plain": [cell[:-2] for cell in STARRED if "*" in cell]}
TEXT = "Long ago a river ran past the town, and the miller counted sacks of flour: 12, then 34, then 56. Nobody asked "
FILTERS = {"top_k": 20}, {"top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.05}  # of each row
CALLS = {"greedy": [{}] * 4, "sampled": [{"temperature": 0.9}] * 4}
CALLS["filtered"] = [{"temperature": 1.0} | one for one in FILTERS]
COUNTS = "recompiles", "compiled graphs", "captured rounds held", "captures", "plan", "error"  # alike on every machine


# Adapters: the next three functions alone know names that are not public, and may change with them.
def inside(engine: Engine) -> dict[str, Any]:
    """Graphs that were compiled, captured rounds that are held, and bytes of the memory plan by purpose."""
    plan = {name: n for name, n in engine._plan.parts.items() if n}
    schedule = engine.schedule
    return {"compiled graphs": schedule.graphs, "captured rounds held": schedule.rounds.captured, "plan": plan}


@contextlib.contextmanager
def as_on_cuda() -> Iterator[Any]:
    """Engines on a CPU work as on CUDA and capture their rounds; what is yielded lists the captures."""
    from gpt_fast_sd.fast.devices import TRAITS
    from tests.gpuless.pools import RULES, stand_in

    gc.collect()
    with mock.patch.dict(TRAITS, cpu=TRAITS["cuda"]), stand_in(RULES[-1]) as cuda:
        yield cuda


def mark() -> str:
    """What bits depend on: the instruction set of our kernels, torch, and how torch's own operators round here."""
    from gpt_fast_sd.fast import chosen

    a = torch.linspace(-1, 1, 64 * 257).sin().view(64, 257)
    own = torch.stack([a @ a.T, (a.bfloat16() @ a.bfloat16().T).float(), a.exp()[:, :64], a.softmax(1)[:, :64]])
    return f"{chosen().name}, torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}, {digest(own)[:8]}"


def engine_of(cell: str) -> Engine:
    """The engine of a cell: two slots of 700 tokens."""
    model, dtype, cache, way, policy, extra = (*cell.partition(" +")[0].split(" ", 4), cell.partition(" +")[2])
    draft = DraftConfig() if policy == "off" else draft_of(policy)
    config = EngineConfig(
        batch_size=2, max_seq_len=700, device="cpu", dtype=dtype, kv_dtype=None if cache == "same" else cache,
        compile=way == "compiled", exact=extra == "exact", quantize=extra if extra.startswith("int") else None,
    )  # fmt: skip
    if model == "bundled":
        return Engine.from_pretrained(model, config, replace(draft, draft_model=draft.draft_model and model))
    shape = tiny_config() if model == "tiny" else tiny_config(vocab_size=256, dim=64, head_dim=64, ffn_dim=128)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    small = tiny_model(replace(shape, n_layers=1), seed=1, dtype=kind) if draft.draft_model else None
    return Engine(tiny_model(shape, dtype=kind), None, config, draft, small)


def digest(of: Any) -> str:
    """The sha256 of a tensor's bytes, or of the JSON of anything else."""
    return hashlib.sha256(of.numpy() if isinstance(of, torch.Tensor) else json.dumps(of).encode()).hexdigest()


def measure(cell: str) -> dict[str, Any]:
    """What a cell does on this machine, by name."""
    found: dict[str, Any] = {}
    with as_on_cuda() if " captured " in cell else contextlib.nullcontext() as cuda, engine_of(cell) as engine:
        text = engine.tokenizer.encode(TEXT) * 30 if engine.tokenizer else random_ids(330) * 2
        prompts = [text[:300], text[7:8], text[40:120], text[3:603]]  # ragged, one that repeats itself
        for call, params in CALLS.items():
            given = [SamplingParams(max_tokens=12 + i, seed=i, ignore_eos=True, **one) for i, one in enumerate(params)]
            events = list(engine.stream(prompts, given))
            rows = sorted((event.completion for event in events if event.completion), key=lambda row: row.index)
            found |= {f"{call} tokens {row.index}": row.tokens for row in rows}
            for what in ("rounds", "drafted", "accepted"):
                found[f"{call} {what}"] = [getattr(row.stats, what) for row in rows]
            found[f"{call} events"] = digest([[e.index, e.tokens, e.sources, e.drafted, e.refused] for e in events])
            found[f"{call} totals"] = [engine.stats.rounds, engine.stats.prefill_tokens, engine.stats.kv_bytes]
            found[f"{call} recompiles"] = engine.stats.recompiles
        found["logits"] = [digest(engine.logits(prompts[2][:12])), digest(engine.logits(prompts[3][:520], last=3))]
        return found | {"captures": len(cuda.captures) if cuda else 0} | inside(engine)


def differences(cell: str, expected: dict[str, Any], got: dict[str, Any], same_mark: bool) -> tuple[str, list[str]]:
    """By what a cell is compared, and a line for each value that is not the expected one."""
    by = "bits" if same_mark else "tokens" if " fp32 " in cell and " compiled " not in cell else "counts"
    names = [n for n in {**expected, **got} if by == "bits" or n.endswith(COUNTS) or (by == "tokens" and n != "logits")]
    pairs = [(name, expected.get(name), got.get(name)) for name in names]
    return by, [f"{cell}: {name}: expected {a}, got {b}" for name, a, b in pairs if a != b]


def child(*arguments: str, **variables: str) -> Any:
    command, env = [sys.executable, __file__, *arguments], {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=CHECKOUT, env=os.environ | variables | env, stdout=subprocess.PIPE, text=True)


def measure_set(kind: str, only: str) -> None:
    """Print the mark of this machine, then each cell of a set and what it does, or its error."""
    print(mark(), flush=True)
    for cell in (one for one in CELLS[kind] if only in one):
        try:
            print(json.dumps([cell, measure(cell)]), flush=True)
        except Exception as error:  # others are still of use
            print(json.dumps([cell, {"error": f"{type(error).__name__}: {error}"}]), flush=True)


def run(only: str, write: bool) -> int:
    """Measure the cells of all sets; freeze them, or print what differs and by what each was compared."""
    found, said, lines = dict[str, Any](), dict[str, list[str]](), list[str]()
    for kind in CELLS:
        here = kind == "plain" or torch.cpu._is_avx2_supported()  # if not, the best set that is here runs
        with child(f"--set={kind}", f"--only={only}", GPT_FAST_SD_CPU=kind * here) as process:
            found[kind] = {"mark": process.stdout.readline().strip(), **dict(map(json.loads, process.stdout))}
    if write and '"error"' not in (text := json.dumps(found, indent=0)):
        FROZEN.write_text(re.sub(r"\[[^]]*\]", lambda row: re.sub(r"\s", "", row[0]), text) + "\n")
    frozen = json.loads(FROZEN.read_text())
    for kind, cells in CELLS.items():
        old, new = frozen[kind], found[kind]
        print(f"{kind} was frozen on {old['mark']}; this is {new['mark']}")
        for cell in (one for one in cells if only in one):
            by, differing = differences(cell, old.get(cell, {}), new.get(cell, {}), old["mark"] == new["mark"])
            lines += [f"{kind} {line}" for line in differing]
            said.setdefault(by, []).append(f"{kind} {cell}")
    for by, cells in said.items():
        print(f"{len(cells)} cells were compared by {by}" + f": {'; '.join(cells)}" * (by != "bits"))
    print(*lines, f"{len(lines)} differences", sep="\n")
    return int(bool(lines) or not said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for flag in ("--write", "--check"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--only", "--set"):
        parser.add_argument(flag, default="")
    asked = parser.parse_args()
    if not asked.set and (asked.write + asked.check != 1 or (asked.write and asked.only)):
        parser.error("give --check, or --write, which freezes all cells")
    sys.exit(measure_set(asked.set, asked.only) if asked.set else run(asked.only, asked.write))  # --set: a child
