"""How many kernels an operator launches is what `launches` says: counted on a driver that launches nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_fast_sd.fast import launches
from gpt_fast_sd.fast.triton import int8, select
from tests.gpt_fast_sd.fast.dense import BF16, FP32, INT8, PLANES
from tests.gpt_fast_sd.fast.launching import attend, bound, new
from tests.gpuless.driver import stand_in

G, H = 4, 128
NO_KERNEL = {"device", "empty", "empty_strided"}  # neither views nor kernels


class Kernels(TorchDispatchMode):
    """Names of torch's operations that are kernels of their own on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL and not func.is_view:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Kernels that a call launches, Triton's and torch's."""
    with stand_in(90) as triton_launches, FakeTensorMode(), Kernels() as torch_kernels:
        call(*args, **kwargs)
    return len(triton_launches) + len(torch_kernels.names)


CACHES = {"bf16": {}, "int8": {"held": INT8}, "planes": {"held": PLANES, "tail": 64}}  # the last as a draft reads it
LONG, SHORT = {"n_rows": 65 * G}, {"n_rows": 64 * G}


@pytest.mark.parametrize(
    ("op", "how", "named", "sizes", "n"),
    [
        # attention of a step is split and merged, and mass is one kernel more
        ("decode", {"n_tokens": 5}, "decode_attention", {}, 2),
        ("mass", {"n_tokens": 5}, "decode_attention_with_mass", {}, 3),
        # attention of a chunk is one kernel unless it is short
        *((op, {"n_tokens": 65}, name, LONG, 1) for op, name in (("prefill", "prefill_attention"),
                                                                 ("lse", "prefill_attention_with_lse"))),
        ("prefill", {"n_tokens": 64}, "prefill_attention", SHORT, 2),
        ("lse", {"n_tokens": 64}, "prefill_attention_with_lse", SHORT, 3),
        # mass of a chunk is one kernel unless pages are longer than a block
        *(("key_mass", {"n_tokens": 70, "page": page, "dtype": dtype}, "key_mass",
           {"page": page, "itemsize": dtype.itemsize}, n)
          for page, dtype, n in ((16, BF16, 1), (128, BF16, 1), (32, FP32, 1), (64, FP32, 2))),
        # a sparse step is merged unless one program reads all its entries
        *(("sparse", {"n_listed": listed, "width": 48}, "sparse_attention", {"n_entries": listed + 48}, n)
          for listed, n in ((144, 1), (160, 2), (1024, 2), (4096, 2))),
        # an int8 cache takes no kernel more
        *((op, how | CACHES[form], name, sizes, n) for form in ("int8", "planes") for op, how, name, sizes, n in (
            ("mass", {"n_tokens": 5}, "decode_attention_with_mass", {}, 3),
            ("lse", {"n_tokens": 70}, "prefill_attention_with_lse", {"n_rows": 70 * G}, 1),
            ("key_mass", {"n_tokens": 70, "page": 128}, "key_mass", {"page": 128, "itemsize": 1}, 1),
            ("sparse", {"n_listed": 144, "width": 48}, "sparse_attention", {"n_entries": 192}, 1))),
    ],
)  # fmt: skip
def test_attention_takes_as_many_kernels_as_is_said(
    op: str, how: dict[str, Any], named: str, sizes: dict[str, int], n: int
) -> None:
    assert counted(attend, op, **how) == launches(named, **sizes) == n


def test_selection_is_one_kernel_and_that_of_quest_three_and_a_product_with_int8_weights_one() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "top_pages": lambda: select.top_pages(new(2, 8, 500, dtype=FP32), new(2, 1), 24),
        "guided_select": lambda: select.guided_select(
            new(32, 2, 8, 500, dtype=FP32), new(32, 2, 8, 384), new(2, dtype=torch.bool), new(2), 16
        ),
        "page_bounds": partial(bound, 2),
        "quest_pages": lambda: select.quest_pages(
            new(2, 1, 8 * G, H, dtype=BF16).transpose(1, 2), new(2, 8, 512, 2 * H, dtype=BF16), new(2), 24
        ),
        "int8_linear": lambda: int8.linear(
            new(64, 4096, dtype=BF16),
            new(4096, 4096, dtype=INT8),
            new(4096, dtype=FP32),
            new(4096, dtype=BF16),
            arch=90,
        ),
    }
    assert {op: counted(call) for op, call in calls.items()} == {op: launches(op) for op in calls}
    assert launches("quest_pages") == 3 and launches("int8_linear") == 1


def test_an_unknown_operator_has_no_number() -> None:
    with pytest.raises(ValueError, match="no operator 'softmax'"):
        launches("softmax")
