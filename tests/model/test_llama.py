"""What the model computes in one way where it runs eagerly, and in another where a CPU's compiler reads it."""

from __future__ import annotations

import pytest
import torch

from gpt_fast_sd.fast.cpu.generated import GeneratedFeedForward, prepare_for_inductor
from gpt_fast_sd.model import FeedForward
from tests.helpers import tiny_config


@pytest.mark.parametrize("n_rows", [1, 8])
def test_what_inductor_reads_of_a_layer_is_the_layer(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of words, which a compiler reads as vectors, are the elements side by side, gate first."""
    config, x = tiny_config(), torch.randn(n_rows, 1, tiny_config().dim).bfloat16()
    plain, layer = (FeedForward(config).to(torch.bfloat16).requires_grad_(False) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    prepare_for_inductor(layer)
    assert type(layer) is GeneratedFeedForward and layer(x).equal(plain(x))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x), rtol=2**-6, atol=1e-3)


def test_compiled_bf16_training_gives_every_weight_a_gradient() -> None:
    layer = FeedForward(tiny_config()).to(torch.bfloat16)
    step = torch.compile(lambda x: layer(x).float().square().sum(), backend="aot_eager", fullgraph=True)
    step(torch.randn(2, 3, tiny_config().dim).to(torch.bfloat16)).backward()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
