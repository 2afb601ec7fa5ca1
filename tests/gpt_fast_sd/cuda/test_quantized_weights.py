"""What Inductor makes of steps with quantized weights on CUDA: a product for each, no copy of a weight."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpt_fast_sd import DraftConfig, EngineConfig
from gpt_fast_sd.fast.linear_planes import lay_in_planes
from gpt_fast_sd.fast.ops.int4_tiles import BYTES, GROUP, TILE, Int4Tiles
from gpt_fast_sd.fast.ops.planes import Planes
from gpt_fast_sd.loading.fit import copies
from gpt_fast_sd.loading.system import System
from gpt_fast_sd.model import ModelConfig
from gpt_fast_sd.quantization import table
from gpt_fast_sd.quantization.quantize import draft_copy, quantize
from gpt_fast_sd.quantization.table import precision_of, require_precision, require_sizes
from gpt_fast_sd.steps import varying
from gpt_fast_sd.tp import local_config
from tests.gpt_fast_sd.cuda.rig import CUDA, LAYERS, fake_rig
from tests.gpt_fast_sd.cuda.test_codegen import HEAD, LAYER, step_of
from tests.gpt_fast_sd.test_quantized_weights import linears_of
from tests.gpuless.fakecuda import Generated, cuda_code, fake_cuda_tensors, needs_cuda_code
from tests.helpers import few

pytestmark = needs_cuda_code


@contextlib.contextmanager
def gpu(capability: tuple[int, int] = (9, 0), cuda: str = "13.0") -> Iterator[None]:
    """A GPU of this compute capability, and a torch built for this CUDA, to whoever asks."""
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(table, "_refusal", lambda device: None),
    ):
        yield


@contextlib.contextmanager
def quantizing() -> Iterator[None]:
    """A GPU on which int4 is chosen without a look at values, which fake tensors have none of."""

    def unseen(weight: Tensor) -> Int4Tiles:
        tiles, groups = len(weight) // TILE, weight.shape[1] // GROUP
        return Int4Tiles(weight.new_empty(tiles, groups, BYTES).byte(), weight.new_empty(groups, len(weight), 2))

    with gpu(), mock.patch.object(table, "by_hqq", unseen):
        yield


# what multiplies in the layers and in the head of a copy; launches of a layer, and of its head, beside those of bf16
DRAFTS = {
    "int8": (Counter(int8_linear=4 * LAYERS + 1), 0, 0),
    "int4": (Counter(int4_tiles_linear=4 * LAYERS, int8_linear=1), 0, 0),
    "float8": (Counter({"_scaled_mm": 4 * LAYERS + 1}), 4, 1),  # each row's largest number is found first
    "planes": (Counter({"_scaled_mm": 4 * LAYERS + 1}), 4, 1),
}


def assert_few_launches(step: Generated, launches: int, products: dict[str, int], weights: nn.Module) -> None:
    """One graph, fit to be captured, multiplies so, copies no weight and takes no one-row kernel of a library."""
    assert step.launches <= launches, step
    found = Counter(name for name in step.others + step.products + step.ours if "attention" not in name)
    assert found == products and "int8pack" not in step.code
    shapes = {(str(m.out_features), str(m.in_features)) for m in linears_of(weights)}
    assert not (shapes | {shape[::-1] for shape in shapes}) & {*step.allocated}
    assert step.graphs == 1 and step.no_cudagraph is None


def split(weight: Tensor) -> Planes:
    """Planes of a weight without values."""
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    return Planes(upper, lower, weight.new_empty(len(weight)).float(), weight.new_empty(0).long(), weight[:0])


@pytest.mark.parametrize("name", few(DRAFTS, ["planes"]))
def test_a_copy_drafts_with_few_launches_and_no_buffer_of_a_weights_size(name: str) -> None:
    products, more, at_head = DRAFTS[name]
    with fake_cuda_tensors(), torch.inference_mode():
        rig = fake_rig(dim=1024)
        target, before = rig.model, dict(rig.model.named_parameters(remove_duplicate=False))
        with quantizing(), mock.patch("gpt_fast_sd.fast.linear_planes.split", split):
            if name == "planes":
                for linear in linears_of(target):
                    lay_in_planes(linear, linear.weight)
                before = dict(target.named_parameters(remove_duplicate=False))
            rig.model = draft_copy(target, name)
        assert all(p is before[name] for name, p in target.named_parameters(remove_duplicate=False))
        head = name if name in ("float8", "planes") else "int8"
        assert [precision_of(m) for m in linears_of(rig.model)] == [name] * 4 * LAYERS + [head]
        assert rig.model.embedding is target.embedding and rig.model.norm is target.norm
        step, args = step_of("draft streaming", rig)
        assert_few_launches(cuda_code(step, *args), LAYERS * (LAYER + more) + HEAD + at_head, products, rig.model)


@pytest.mark.parametrize("name", few([name for name in DRAFTS if name != "planes"], ["int4"]))
def test_a_target_verifies_with_few_launches_and_no_one_row_kernel_of_a_library(name: str) -> None:
    products, more, _ = DRAFTS[name]
    in_layers = {product: 4 * LAYERS for product in products if name != "int4" or "int4" in product}
    with fake_cuda_tensors(), torch.inference_mode():
        rig = fake_rig(dim=1024)
        with quantizing():
            quantize(rig.model, name)
        assert [precision_of(m) for m in linears_of(rig.model)] == [name] * 4 * LAYERS + [None]
        step, args = step_of("verify", rig)
        varying(*args[1:3])  # of two to 17 tokens
        verified = cuda_code(step, *args)
        assert_few_launches(verified, LAYERS * (LAYER + more) + HEAD, {**in_layers, "mm": 1}, rig.model.layers)


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "cuda", "said"),
    [
        ("int4", torch.float16, (9, 0), "13.0", "'int4' of a draft needs bf16 weights, and the model's are float16"),
        ("float8", torch.float16, (9, 0), "13.0", "needs bf16 weights, and the model's are float16"),
        ("float8", torch.bfloat16, (8, 0), "13.0", r"needs compute capability 8\.9 or more .*, and this GPU has 8\.0"),
        ("float8", torch.bfloat16, (9, 0), "12.9", r"may crash in CUDA 12\.9's cuBLAS: use a torch built for another"),
    ],
)
def test_what_a_gpu_does_not_draft_with_is_refused_in_a_sentence(
    name: str, dtype: torch.dtype, capability: tuple[int, int], cuda: str, said: str
) -> None:
    with gpu():
        require_precision("float8", CUDA, torch.bfloat16, of_draft=True)
    with gpu(capability, cuda), pytest.raises(ValueError, match=said) as caught:
        require_precision(name, CUDA, dtype, of_draft=True)
    assert "\n" not in str(caught.value)


def test_a_gpu_whose_library_has_no_product_of_float8_rows_is_refused_at_the_door() -> None:
    """RTX 50's by some wheels of torch: its first draft would have failed, after minutes of loading."""
    refusing = mock.patch.object(torch, "_scaled_mm", side_effect=RuntimeError("Rowwise scaling is not supported\nat"))
    asked = table._refusal.__wrapped__
    with fake_cuda_tensors(), mock.patch.object(torch.cuda, "synchronize"):
        assert asked(CUDA) is None  # its arguments are as torch wants them
    said = r"needs products of float8 rows, .* \(.*Rowwise scaling is not supported.*\)$"
    with gpu((12, 0)), mock.patch.object(torch.cuda, "synchronize"), refusing, pytest.raises(ValueError, match=said):
        table._refusal = lambda device: asked(torch.device("cpu"))  # type: ignore[assignment]  # gpu() puts it back
        require_precision("float8", CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "batch", "expected"),
    [((9, 0), 4, ["int4", "float8"]), ((9, 0), 5, ["float8"]), ((8, 0), 1, ["int4", "int8"])],
)
def test_auto_tries_what_an_h200_found_faster(capability: tuple[int, int], batch: int, expected: list[str]) -> None:
    config, draft = EngineConfig(batch_size=batch, max_seq_len=300), DraftConfig()
    with gpu(capability):
        found = copies(System(config=config, draft=draft, model=LLAMA_8B, dtype=torch.bfloat16, device=CUDA))
    assert found == expected


LLAMA_8B = ModelConfig(
    vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=14_336, max_seq_len=8192
)


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "said"),
    [
        ("int4", {"dim": 576}, 1, "needs inputs that 128 divides and outputs that 64 divides, and wqkv has 576 and"),
        ("int4", {"ffn_dim": 14_400}, 1, "needs inputs that 128 divides and outputs that 64 divides, and w_out has"),
        ("int4", {}, 32, "outputs that 64 divides, and w_out has 448 and 4,096 on each of 32 processes"),
        ("float8", {"ffn_dim": 14_344}, 1, "needs inputs that 16 divides and outputs that 16 divides, and w_out has"),
        ("float8", {"n_heads": 33, "n_kv_heads": 1, "head_dim": 40}, 1, "and wqkv has 4,096 and 1,400$"),
        # models that were given tokens of their own have such vocabularies
        ("float8", {"vocab_size": 128_258}, 1, "outputs that 16 divides, and the output head has 4,096 and 128,258$"),
    ],
)
def test_sizes_a_precision_does_not_take_are_refused(name: str, changes: dict[str, int], ranks: int, said: str) -> None:
    require_sizes(name, CUDA, LLAMA_8B, 1)
    require_sizes("int8", CUDA, local_config(LLAMA_8B, ranks), ranks)
    shape, of_copy = local_config(replace(LLAMA_8B, **changes), ranks), "vocab_size" in changes
    if of_copy:
        require_sizes(name, CUDA, shape, 1)  # a target's head keeps its dtype
        require_sizes("int4", CUDA, shape, 1, of_draft=True)  # and the head of that copy is int8
    with pytest.raises(ValueError, match=said) as caught:
        require_sizes(name, CUDA, shape, ranks, of_draft=of_copy)
    assert "\n" not in str(caught.value)
