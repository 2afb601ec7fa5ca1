"""What the model computes in one way where it runs eagerly, and in another where a CPU's compiler reads it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpt_fast_sd.model import FeedForward, llama
from tests.helpers import tiny_config


@pytest.mark.parametrize("n_rows", [1, 8])
def test_gates_of_a_compiled_step_are_those_of_its_pairs(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of words, which a compiler reads as vectors, are the elements side by side, gate first."""
    pairs = (torch.randn(n_rows, 3, 192) * 8).bfloat16()
    pairs[0, 0, :4] = torch.tensor([0.0, -0.0, -100.0, 3.0])
    gate, up = pairs[..., 0::2].float(), pairs[..., 1::2].float()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        assert llama.gated(pairs).equal((F.silu(gate) * up).bfloat16())
    # a tensor's halves cannot be read so where it holds whole words
    torch.testing.assert_close(llama.gated(pairs.float()), F.silu(gate) * up)


def test_compiled_bf16_training_gives_every_weight_a_gradient() -> None:
    layer = FeedForward(tiny_config()).to(torch.bfloat16)
    step = torch.compile(lambda x: layer(x).float().square().sum(), backend="aot_eager", fullgraph=True)
    step(torch.randn(2, 3, tiny_config().dim).to(torch.bfloat16)).backward()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
