"""Each of our operators meets torch.library's requirements: schema, fake, and use inside a compiled graph.

Shapes: B = 2 rows, T = 3 tokens in this call, S = 320 entries, N = 4 query heads, K = 2 kv heads, H = 64 head dim.
"""

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast import cpu, ops
from gpt_fast_sd.fast.ops import decode
from gpt_fast_sd.fast.ops.int4_tiles import tiled
from gpt_fast_sd.fast.ops.layer import flat
from gpt_fast_sd.fast.ops.planes import split
from gpt_fast_sd.model import FORMATS, as_planes
from tests.gpt_fast_sd.fast.dense import quantized
from tests.gpt_fast_sd.fast.references import layer_of  # and with it what operators run on a CPU

B, T, S, N, K, H = 2, 3, 320, 4, 2, 64
ROOT = Path(__file__).resolve().parents[3]

for package in (ops, cpu):  # not of triton/, whose bodies need Triton
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def queries(n_tokens: int = T) -> Tensor:
    """bf16 [B, N, T, H], a transposed view as the model gives it."""
    return torch.randn(B, n_tokens, N, H).bfloat16().transpose(1, 2)


def layer(form: str = "bf16", tail: int = 0) -> tuple[Any, ...]:
    """A layer as operators take it."""
    k, v = (torch.randn(B, K, S, H).bfloat16() for _ in range(2))
    if form == "bf16":
        return flat(layer_of(k, v))
    (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
    if form == "int8":
        return flat(layer_of(k, v, k_scale, v_scale))
    (k, k_low), (v, v_low) = as_planes(k), as_planes(v)
    return flat(layer_of(k, v, k_scale, v_scale, k_low, v_low, tail))


def places(n_tokens: int = T) -> Tensor:
    """Where the queries stand, int64 [B, T]; the second row idles past all keys in view."""
    return torch.tensor([[100], [S]]) + torch.arange(n_tokens)


def dense(n_tokens: int = T, *form: Any) -> tuple[Any, ...]:
    """What every operator of dense attention is given."""
    return queries(n_tokens), *layer(*form), places(n_tokens), 256


def listed(*form: Any) -> tuple[Any, ...]:
    """What the CPU's operator is given to attend to listed entries."""
    return queries(), *layer(*form), places(), kv_indices(), 0


def kv_indices() -> Tensor:
    """Whole pages of 16, and an empty one: int64 [B, K, 48]."""
    pages = torch.tensor([[[0, 3, -1], [2, 1, 4]], [[5, 0, 1], [1, -1, -1]]])  # [B, K, 3]
    listed = pages[..., None] * 16 + torch.arange(16)
    return torch.where(pages[..., None] >= 0, listed, -1).flatten(-2)


def window_start() -> Tensor:
    return torch.tensor([96, 96])


def bounds() -> Tensor:
    """Of pages of 16: bf16 [B, K, S // 16, 2H]"""
    return torch.randn(B, K, S // 16, 2 * H).bfloat16()


def tiles() -> tuple[Tensor, Tensor]:
    """An int4 weight [64, 128]."""
    return tiled(torch.randint(16, (64, 128)).byte()), torch.randn(1, 64, 2).bfloat16()


# of an operator, and of what else it is tried with
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "cpu_attention": lambda: (*dense()[:-1], None, 256),
    "cpu_attention int8": lambda: (*dense(T, "int8")[:-1], None, 256),
    "cpu_attention planes": lambda: (*dense(T, "planes", 64)[:-1], None, 256),
    "cpu_attention listed": lambda: listed(),
    "cpu_attention listed int8": lambda: listed("int8"),
    "cpu_attention listed planes": lambda: listed("planes", 64),
    "cpu_attention_with_mass": lambda: dense(),
    "cpu_attention_with_mass int8": lambda: dense(T, "int8"),
    "cpu_attention_with_mass planes": lambda: dense(T, "planes", 64),
    "cpu_linear": lambda: (queries(), kernels.pack(torch.randn(96, H).bfloat16()), torch.randn(96).bfloat16()),
    "cpu_distributions": lambda: (
        torch.randn(B, 50), torch.tensor([0.0, 0.8]), torch.tensor([50, 5]), torch.ones(B, dtype=torch.float64),
        torch.full((B,), -1.0, dtype=torch.float64),
    ),
    "cpu_draw": lambda: (torch.rand(B, 50).softmax(-1), torch.rand(B)),
    "cpu_uniform": lambda: (torch.randint(99, (B,)), torch.randint(99, (B, 3)), 1),
    "int8_linear": lambda: (queries(), *kernels.quantize_rows(torch.randn(96, H)), torch.randn(96).bfloat16()),
    "int4_tiles_linear": lambda: (torch.randn(5, 128).bfloat16(), *tiles(), torch.ones(64, 128).bfloat16()),
    "int4_untile": lambda: tiles(),
    "float8_rows": lambda: (torch.randn(5, 96).bfloat16(),),
    "planes_linear": lambda: (queries(), *split(torch.randn(96, H).bfloat16()), torch.randn(96).bfloat16()),
    "decode_attention": lambda: (*dense(), 256),
    "decode_attention one": lambda: (*dense(1), 256),
    "decode_attention_with_mass": lambda: (*dense(), 256, 64),
    "sparse_attention": lambda: (queries(), *layer(), kv_indices(), window_start(), 16, places(), 256, 16),
    "prefill_attention": lambda: dense(),
    "prefill_attention one": lambda: dense(1),
    "prefill_attention_with_lse": lambda: dense(),
    "key_mass": lambda: (queries(), *layer(), torch.zeros(B, N, T), places(), 256, 64),
    "top_pages": lambda: (torch.randn(B, K, 20), torch.tensor([[20], [3]]), 5),
    "guided_select": lambda: (
        torch.rand(2, B, K, 20), kv_indices().repeat(2, 1, 1, 1), torch.tensor([True, False]), torch.tensor([6, 6]), 16,
    ),
    "page_bounds": lambda: (*layer(), bounds(), torch.tensor([4, 19]), 3, 16),
    "quest_pages": lambda: (queries(), bounds(), torch.tensor([6, 2]), 3),
    "likeliest": lambda: (-torch.rand(B, 50), torch.tensor([5, 50]), torch.tensor([0.9, 0.5], dtype=torch.float64)),
}  # fmt: skip


def skip_without_kernels(name: str) -> None:
    if name.startswith("cpu_") and not kernels.cpu_attention_fits(H, torch.bfloat16, FORMATS["bf16"]):
        pytest.skip("this CPU has no bf16 dot products, or there is no compiler")


def test_every_operator_has_a_case() -> None:
    operators = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "gpt_fast_sd::" in name}
    assert operators == {name.partition(" ")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_what_it_says(name: str) -> None:
    skip_without_kernels(name)
    args = CASES[name]()
    torch.library.opcheck(getattr(torch.ops.gpt_fast_sd, name.partition(" ")[0]).default, args)


OPS_OF_KEYS = ["decode_attention", "decode_attention_with_mass", "prefill_attention", "prefill_attention_with_lse",
               "cpu_attention_with_mass"]  # fmt: skip


@pytest.mark.parametrize(("name", "at"), [*((name, 7) for name in OPS_OF_KEYS), ("key_mass", 8), ("cpu_attention", 8)])
def test_a_compiled_step_calls_them_with_any_number_of_keys_in_view(name: str, at: int) -> None:
    """at: where it stands among the arguments."""
    skip_without_kernels(name)
    function, graphs = getattr(torch.ops.gpt_fast_sd, name).default, []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def step(n_splits_carrier: Tensor, *arguments: Any) -> Any:
        return function(*arguments[:at], n_splits_carrier.shape[0] * 32, *arguments[at + 1 :])

    arguments = CASES[name]()
    for n in (6, 5, 7):
        n_splits_carrier = torch.empty(n, 0)
        torch._dynamo.mark_dynamic(n_splits_carrier, 0, min=2, max=8)
        expected = function(*arguments[:at], n * 32, *arguments[at + 1 :])
        torch.testing.assert_close(step(n_splits_carrier, *arguments), expected, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize(("capacity", "n_pairs", "split"), [
    (1, 8, 256), (4096, 128, 256), (8192, 128, 512), (8193, 128, 1024), (131072, 128, 2048), (57345, 128, 2048),
    (32768, 8, 512), (32768, 1, 512), (8192, 8, 256), (65536, 8, 1024), (131072, 8, 2048), (131072, 1, 2048),
    (32768, 24, 2048), (32768, 20, 2048), (32768, 12, 1024),
])  # fmt: skip
def test_splits_are_sixteen_to_a_cache_or_more_for_few_rows_but_neither_short_nor_long(
    capacity: int, n_pairs: int, split: int
) -> None:
    assert decode.split_for(capacity, n_pairs) == split


def test_an_eager_engine_needs_no_triton_and_starts_neither_dynamo_nor_dtensor() -> None:
    """The last two and what they import take longer to load than all else that an engine needs."""
    code = """if True:
        import sys
        sys.modules["triton"] = None  # importing it fails
        import torch
        from gpt_fast_sd import DraftConfig, SamplingParams
        from tests.helpers import tiny_engine
        engine = tiny_engine(DraftConfig(policy="quest", budget=64, gamma=2))
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.8))[0].tokens) == 4
        print(*sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
    """
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == ""
