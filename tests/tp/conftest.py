"""One process that acts as one of several ranks."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt_fast_sd.tp import Parallel, start


@pytest.fixture
def as_one_of(request: pytest.FixtureRequest) -> Iterator[Parallel]:
    """Rank 1 of as many as the test asks for, else of two, all of them one model's."""
    dist.init_process_group("fake", rank=1, world_size=getattr(request, "param", 2), store=FakeStore())
    yield start(device="cpu")
    dist.destroy_process_group()
