"""What Inductor makes of a draft step with float8 weights: a reduction and a product for each, no copy of a weight."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from gpt_fast_sd.compiling import span
from gpt_fast_sd.policies.base import draft_step
from gpt_fast_sd.precisions import require_precision
from gpt_fast_sd.quantize import draft_copy, drafter
from gpt_fast_sd.runner import Runner
from tests.gpt_fast_sd.cuda.rig import CAPACITY, LAYERS, fake_rig
from tests.gpt_fast_sd.cuda.test_codegen import HEAD, LAYER
from tests.gpuless.fakecuda import cuda_code, fake_cuda_tensors, needs_cuda_code

pytestmark = needs_cuda_code
CUDA = torch.device("cuda")


@contextlib.contextmanager
def gpu(capability: tuple[int, int] = (9, 0), cuda: str = "13.0") -> Iterator[None]:
    """A GPU of this compute capability, and a torch built for this CUDA, to whoever asks."""
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.version, "cuda", cuda),
    ):
        yield


def test_a_float8_copy_drafts_with_two_launches_a_linear_and_no_buffer_of_a_weights_size() -> None:
    with fake_cuda_tensors(), torch.inference_mode():
        rig = fake_rig()
        before = dict(rig.model.named_parameters(remove_duplicate=False))
        with gpu():
            copy = draft_copy(rig.model, "float8")
        assert all(p is before[name] for name, p in rig.model.named_parameters(remove_duplicate=False))
        linears = [m for m in copy.modules() if isinstance(m, nn.Linear)]
        assert len(linears) == 4 * LAYERS + 1 and {type(m.weight.data).__name__ for m in linears} == {"Float8Tensor"}
        assert copy.embedding is rig.model.embedding and copy.norm is rig.model.norm
        tokens = rig.tokens(1)
        view = rig.view("streaming").kv()
        step = cuda_code(draft_step, copy, tokens, tokens.clone(), rig.cache.layers, span(rig.cache, CAPACITY), *view)
        weights = {tuple(str(size) for size in m.weight.shape) for m in linears}
    assert step.launches <= LAYERS * (LAYER + 4) + HEAD + 1, step
    assert Counter(step.others + step.products) == {"_scaled_mm": 4 * LAYERS + 1} and "int8pack" not in step.code
    assert not weights & {*step.allocated, *(sizes[::-1] for sizes in step.allocated)}
    assert step.graphs == 1 and step.no_cudagraph is None


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


def test_sizes_that_float8_does_not_take_are_refused() -> None:
    with fake_cuda_tensors(), gpu():
        rig = fake_rig()
        odd = nn.Linear(512, 1000, bias=False, device=CUDA, dtype=torch.bfloat16)
        rig.model.output = odd  # type: ignore[assignment]
        runner = Runner(rig.model, rig.cache, compiled=False)
        with pytest.raises(ValueError, match=r"needs sizes that 16 divides, and a weight has \[1000, 512\]"):
            drafter(runner, "float8")
