"""Generated CUDA code is read right: copies, and what keeps a step out of a CUDA graph."""

import pytest
import torch
from torch import Tensor

from tests.gpuless.fakecuda import Generated, cuda_code, fake_cuda_tensors, needs_cuda_code

pytestmark = needs_cuda_code


def write(cache: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    """cache [B, S], x [B], pos [B]: in place."""
    cache[torch.arange(x.shape[0], device=x.device), pos] = x * 2
    return cache.sum(-1)


def generated(step: object) -> Generated:
    with fake_cuda_tensors(), torch.inference_mode():
        cache, x = torch.zeros(4, 1000, device="cuda"), torch.zeros(4, device="cuda")
        return cuda_code(step, cache, x, torch.zeros(4, dtype=torch.int64, device="cuda"))  # type: ignore[arg-type]


def test_a_step_that_writes_in_place_copies_nothing_and_may_be_captured() -> None:
    step, copying = generated(write), generated(lambda cache, x, pos: write(cache.clone(), x, pos))
    assert step.graphs == 1 and step.no_cudagraph is None
    assert len(step.kernels) == step.launches == 2
    assert len(step.mutated) == 1 and not copying.mutated  # the cache, which is an argument here
    assert ("4", "1000") not in step.allocated and ("4", "1000") in copying.allocated


def test_a_value_read_on_the_host_and_a_break_of_the_graph_are_seen() -> None:
    assert "_local_scalar_dense" in str(generated(lambda cache, x, pos: cache + pos.max().item()).no_cudagraph)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        generated(lambda cache, x, pos: cache if pos.sum() > 0 else x)
