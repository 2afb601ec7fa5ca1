"""How many kernels an operator launches is what `launches` says: counted on a driver that launches nothing.

Shapes: B = 2 rows, T tokens in this call, S = 8192 entries, N = 32 query heads, K = 8 kv heads, H = 128 head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt_fast_sd.fast import launches
from gpt_fast_sd.fast.triton import decode, int8, prefill, select, sparse

pytest.importorskip("triton")

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.driver import stand_in

G, H, BF16, FP32 = 4, 128, torch.bfloat16, torch.float32
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


def counted(call: Callable[[Callable[..., Tensor]], Any]) -> int:
    """Kernels that call launches, Triton's and torch's; it is given a maker of tensors (*shape, dtype)."""

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    with stand_in(90) as triton_launches, FakeTensorMode(), Kernels() as torch_kernels:
        call(new)
    return len(triton_launches) + len(torch_kernels.names)


def attended(new: Callable[..., Tensor], n_tokens: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """q, layer, pos, n_keys"""
    q = new(2, n_tokens, 8 * G, H, dtype=dtype).transpose(1, 2)
    layer = layer_of(*(new(2, 8, 8192, H, dtype=dtype) for _ in range(2)))
    return q, layer, new(2, n_tokens), 4096


def held_in_int8(new: Callable[..., Tensor], n_tokens: int) -> tuple[Any, ...]:
    """The same over int8."""
    q, _, pos, n_keys = attended(new, n_tokens)
    k, v = (new(2, 8, 8192, H, dtype=torch.int8) for _ in range(2))
    return q, layer_of(k, v, *(new(2, 8, 8192, dtype=torch.float16) for _ in range(2))), pos, n_keys


def held_in_planes(new: Callable[..., Tensor], n_tokens: int) -> tuple[Any, ...]:
    """The same in planes, as a draft reads them."""
    q, layer, pos, n_keys = held_in_int8(new, n_tokens)
    k, v, *low = (new(2, 8, 8192, H // 2, dtype=torch.uint8) for _ in range(4))
    return q, layer_of(k, v, layer.k_scale, layer.v_scale, *low, tail=64), pos, n_keys


def test_attention_of_a_step_is_split_and_merged_and_mass_is_one_kernel_more() -> None:
    assert counted(lambda new: decode.attend(*attended(new, 5), 512, arch=90)) == launches("decode_attention") == 2
    with_mass = counted(lambda new: decode.attend_with_mass(*attended(new, 5), 512, 16, arch=90))
    assert with_mass == launches("decode_attention_with_mass") == 3


@pytest.mark.parametrize(("n_tokens", "n", "with_lse"), [(65, 1, 1), (64, 2, 3)])
def test_attention_of_a_chunk_is_one_kernel_unless_it_is_short(n_tokens: int, n: int, with_lse: int) -> None:
    rows = {"n_rows": G * n_tokens}
    assert counted(lambda new: prefill.attend(*attended(new, n_tokens), arch=90)) == n
    assert counted(lambda new: prefill.attend_with_lse(*attended(new, n_tokens), arch=90)) == with_lse
    assert launches("prefill_attention", **rows) == n and launches("prefill_attention_with_lse", **rows) == with_lse


@pytest.mark.parametrize(("page", "dtype", "n"), [(16, BF16, 1), (128, BF16, 1), (32, FP32, 1), (64, FP32, 2)])
def test_mass_of_a_chunk_is_one_kernel_unless_pages_are_longer_than_a_block(
    page: int, dtype: torch.dtype, n: int
) -> None:
    def call(new: Callable[..., Tensor]) -> None:
        q, layer, pos, n_keys = attended(new, 70, dtype)
        prefill.key_mass(q, layer, new(*q.shape[:3], dtype=FP32), pos, n_keys, page, arch=90)

    assert counted(call) == launches("key_mass", page=page, itemsize=dtype.itemsize) == n


@pytest.mark.parametrize("held", [held_in_int8, held_in_planes])
def test_an_int8_cache_takes_no_kernel_more(held: Callable[..., tuple[Any, ...]]) -> None:
    def call(new: Callable[..., Tensor]) -> None:
        decode.attend_with_mass(*held(new, 5), 512, 16, arch=90)
        q, layer, pos, n_keys = held(new, 70)
        prefill.attend_with_lse(q, layer, pos, n_keys, arch=90)
        prefill.key_mass(q, layer, new(*q.shape[:3], dtype=FP32), pos, n_keys, 128, arch=90)
        q, layer, pos, n_keys = held(new, 1)
        sparse.attend(q, layer, new(2, 8, 144), new(2), 48, pos, n_keys, 16, arch=90)

    expected = (
        launches("decode_attention_with_mass") + launches("prefill_attention_with_lse", n_rows=70 * G)
        + launches("key_mass", page=128, itemsize=1) + launches("sparse_attention", n_entries=192)
    )  # fmt: skip
    assert counted(call) == expected == 3 + 1 + 1 + 1


@pytest.mark.parametrize(("listed", "n"), [(144, 1), (160, 2), (1024, 2), (4096, 2)])
def test_a_sparse_step_is_merged_unless_one_program_reads_all_its_entries(listed: int, n: int) -> None:
    def call(new: Callable[..., Tensor]) -> None:
        q, layer, pos, n_keys = attended(new, 1)
        sparse.attend(q, layer, new(2, 8, listed), new(2), 48, pos, n_keys, 16, arch=90)

    assert counted(call) == launches("sparse_attention", n_entries=listed + 48) == n


def test_selection_is_one_kernel_and_that_of_quest_three() -> None:
    calls: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
        "top_pages": lambda new: select.top_pages(new(2, 8, 500, dtype=FP32), new(2, 1), 24),
        "guided_select": lambda new: select.guided_select(
            new(32, 2, 8, 500, dtype=FP32), new(32, 2, 8, 384), new(2, dtype=torch.bool), new(2), 16
        ),
        "page_bounds": lambda new: select.page_bounds(
            attended(new, 1)[1], new(2, 8, 512, 2 * H, dtype=BF16), new(2), 2, 16
        ),
        "quest_pages": lambda new: select.quest_pages(
            attended(new, 1)[0], new(2, 8, 512, 2 * H, dtype=BF16), new(2), 24
        ),
    }
    assert {op: counted(call) for op, call in calls.items()} == {op: launches(op) for op in calls}
    assert launches("quest_pages") == 3


def test_a_product_with_int8_weights_is_one_kernel() -> None:
    def call(new: Callable[..., Tensor]) -> None:
        x, weight = new(64, 4096, dtype=BF16), new(4096, 4096, dtype=torch.int8)
        int8.linear(x, weight, new(4096, dtype=FP32), new(4096, dtype=BF16), arch=90)

    assert counted(call) == launches("int8_linear") == 1


def test_an_unknown_operator_has_no_number() -> None:
    with pytest.raises(ValueError, match="no operator 'softmax'"):
        launches("softmax")
