"""The dense attention operators: their references against fp64, and torch's requirements on an operator.

Shapes: B batch, T tokens in this call, S keys in view, N query heads, K kv heads, G = N // K, H head dim.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd.fast.ops import decode
from gpt_fast_sd.fast.ops.layer import flat
from gpt_fast_sd.model import CacheLayer
from tests.gpt_fast_sd.fast.dense import Case

SPLIT = 64
ROOT = Path(__file__).resolve().parents[3]


def calls(case: Case) -> dict[str, tuple[Any, ...]]:
    """The arguments of every operator."""
    lse = case.lse()
    attended = case.q, case.layer(), case.pos, case.n_keys
    return {
        "decode_attention": (*attended, SPLIT),
        "decode_attention_with_mass": (*attended, SPLIT, 16),
        "prefill_attention": attended,
        "prefill_attention_with_lse": attended,
        "key_mass": (case.q, case.layer(), lse, case.pos, case.n_keys, 1),
    }


def flattened(q: torch.Tensor, layer: CacheLayer, *others: Any) -> tuple[Any, ...]:
    """As the operator itself takes them."""
    return q, *flat(layer), *others


@pytest.mark.parametrize("op", calls(Case([3])))
def test_a_compiled_step_calls_them_with_any_number_of_keys_in_view(op: str) -> None:
    function = getattr(torch.ops.gpt_fast_sd, op).default
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def step(n_splits_carrier: torch.Tensor, *arguments: Any) -> Any:
        at = 7 if op == "key_mass" else 6  # n_keys
        return function(*arguments[:at], n_splits_carrier.shape[0] * 32, *arguments[at + 1 :])

    case = Case([40, 150], n_tokens=3)
    for n in (6, 5, 7):
        n_splits_carrier = torch.empty(n, 0)
        torch._dynamo.mark_dynamic(n_splits_carrier, 0, min=2, max=8)
        got = step(n_splits_carrier, *flattened(*calls(case)[op]))
        case.n_keys = n * 32
        expected = function(*flattened(*calls(case)[op]))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize(("capacity", "split"), [(1, 256), (4096, 256), (8192, 512), (8193, 1024), (131072, 2048)])
def test_splits_are_sixteen_to_a_cache_but_neither_short_nor_long(capacity: int, split: int) -> None:
    assert decode.split_for(capacity) == split


def test_an_eager_engine_needs_no_triton_and_starts_neither_dynamo_nor_dtensor() -> None:
    """The last two and what they import take longer to load than all else that an engine needs."""
    code = """if True:
        import sys
        sys.modules["triton"] = None  # importing it fails
        import torch
        from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
        from tests.helpers import tiny_model
        config = EngineConfig(batch_size=1, max_seq_len=300, device="cpu", compile=False)
        engine = Engine(tiny_model(), None, config, DraftConfig(policy="quest", budget=64, gamma=2))
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.8))[0].tokens) == 4
        print(*sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
    """
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == ""
