"""Interpreted kernels: triton reads TRITON_INTERPRET when it is imported, so these tests have a process of their own.

`python -m pytest` comes here by way of tests/gpt_fast_sd/fast/test_interpreted.py; by hand:
`TRITON_INTERPRET=1 python -m pytest tests/gpt_fast_sd/fast/interpreted`.
"""

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.gpuless.interpreter  # noqa: F401  before any kernel: it makes bf16 right
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def nothing_is_right_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces are full of NaN, or of a number that no result is, before a kernel writes them."""
    empty = torch.empty

    def full(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = empty(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min // 3)

    monkeypatch.setattr(torch, "empty", full)
