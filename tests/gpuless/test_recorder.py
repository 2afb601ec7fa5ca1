"""A recording replays what a CUDA graph would and shows what it would get wrong; waiting for the device is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpuless.fakecuda import fake_cuda_tensors, needs_fake_cuda
from tests.gpuless.recorder import HostRead, Recording, capture, waits


class Counter:
    """A cache, a position and a scale: what the steps below read and write."""

    def __init__(self, position: int = 0) -> None:
        self.cache = torch.arange(32.0).view(2, 16) / 7  # [B, S]
        self.position = torch.full((2,), position)  # [B]
        self.scale = torch.linspace(0.5, 1.5, 16)

    def good(self) -> Tensor:
        """Reads by position, writes in place, moves on."""
        column = self.position[:, None]
        mixed = (self.cache.gather(1, column) * self.scale[self.position][:, None]).softmax(0)
        self.cache.scatter_(1, column, mixed)
        self.cache[:, -1:] += mixed
        self.position += 1
        return (self.cache.view(-1)[:5].sum() + mixed).squeeze(1)

    def baked(self, position: int) -> Tensor:
        """The position is a number of the host's."""
        self.cache[:, position] += 1
        self.position += 1
        return self.cache[:, position] * 2

    def rebound(self) -> Tensor:
        """The position is another tensor after each step."""
        self.position = self.position + 1
        return self.cache.gather(1, self.position[:, None])

    def state(self) -> list[Tensor]:
        return [self.cache.clone(), self.position.clone()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("inference", [False, True])
def test_replays_at_other_positions_give_what_eager_steps_give(inference: bool) -> None:
    eager, replayed = Counter(), Counter()
    with torch.inference_mode(inference):
        with Recording() as recorded:
            out = replayed.good()
        for _ in range(6):
            expected = eager.good()
            recorded.replay()
            assert torch.equal(out, expected)
            assert equal(replayed.state(), eager.state())
        replayed.position.fill_(11)
        eager.position.fill_(11)
        recorded.replay()
        assert torch.equal(out, eager.good())


@pytest.mark.parametrize("steps", [lambda one, i: one.baked(i), lambda one, i: one.rebound()])
def test_a_position_baked_in_and_a_buffer_replaced_show_in_a_replay(steps: Callable[[Counter, int], Tensor]) -> None:
    eager, replayed = Counter(), Counter()
    step = capture(lambda: steps(replayed, 0))
    assert torch.equal(step(), steps(eager, 0))
    assert not torch.equal(step(), steps(eager, 1))


HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda x: int(x.max()), "if": lambda x: 1 if x.sum() > 3 else 0, "slice": lambda x: x[: x[0]],
    "nonzero": lambda x: x.nonzero(), "boolean index": lambda x: x[x > 1],
    "boolean assignment": lambda x: x.__setitem__(x > 1, x[:1]), "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x), "equal": lambda x: torch.equal(x, x + 1),
    "tolist": lambda x: x.tolist(),
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("read", HOST_READS)
def test_a_recording_refuses_to_read_on_the_host(read: str, inference: bool) -> None:
    x = torch.arange(4)
    with torch.inference_mode(inference), pytest.raises(HostRead), Recording():
        HOST_READS[read](x * 2)
    assert x.tolist() == [0, 1, 2, 3]


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "cpu": lambda x: x.cpu(),
    "made on the host": lambda x: x + torch.tensor([1, 2, 3, 4], device="cuda"),
    "list on the host": lambda x: torch.isin(x, torch.tensor([7, 9], device="cuda")),
    "index on the host": lambda x: x[torch.tensor([0, 1])],
    "copied to the host": lambda x: torch.empty(4, dtype=torch.int64).copy_(x),
}
FINE: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: torch.where(x > 1, 2.0, x.float()).softmax(0), "index": lambda x: x[x],
    "assignment": lambda x: x.__setitem__(x, x + 1), "filled": lambda x: x.__setitem__(slice(0, 2), 7),
    "made on the device": lambda x: x + torch.arange(4, device=x.device),
    "repeated": lambda x: x.repeat_interleave(3),
}  # fmt: skip


@needs_fake_cuda
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*HOST_READS, *MIXED, *FINE])
def test_waiting_for_the_device_is_seen_and_nothing_else(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), fake_cuda_tensors():
        x = torch.zeros(4, dtype=torch.int64, device="cuda")
        seen = waits(lambda: (HOST_READS | MIXED | FINE)[name](x))
    assert seen == [] if name in FINE else seen
