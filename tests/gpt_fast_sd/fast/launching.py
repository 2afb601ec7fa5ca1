"""What calls of Triton launchers would build and launch on a GPU that is not there, over fake tensors.

Shapes: B batch, T tokens in this call, S cache capacity, G query heads per kv head, H head dim; 8 kv heads everywhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt_fast_sd.fast.ops.int4_tiles import parts_of
from gpt_fast_sd.fast.triton import decode, int4, int8, prefill, select, sparse
from gpt_fast_sd.model import CacheLayer
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32, INT8, PLANES
from tests.gpt_fast_sd.fast.references import layer_of
from tests.gpuless.driver import Launch, stand_in

FEW, MANY = ("decode", "mass"), ("prefill", "lse", "key_mass")  # operators for few query rows, and for many
OTHERS = [89, 100, 120]  # devices that a family of tables serves besides the one it is named after


def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def launched(cap: int | str, call: Callable[[], Any]) -> list[Launch]:
    """The kernels that call builds and would launch on a device with sm_<cap>."""
    with stand_in(cap) as launches, FakeTensorMode():  # type: ignore[arg-type]  # of other makers they are not built
        call()
    return launches


def layer(
    n_rows: int, head_dim: int, dtype: torch.dtype, held: torch.dtype | None = None, tail: int = 0, window: int = 0
) -> CacheLayer:
    """One of 8192 entries, in this dtype or held in bytes or planes."""
    width, numbers = (head_dim // 2, 4) if held is PLANES else (head_dim, 2)
    k, v, *low = (new(n_rows, 8, 8192, width, dtype=held or dtype) for _ in range(numbers))
    scales = [new(n_rows, 8, 8192, dtype=FP16) for _ in range(2)] if held in (INT8, PLANES) else []
    return layer_of(k, v, *scales, *low, tail=tail, window=window)


def attend(
    op: str, cap: int | str = 90, *, n_batch: int = 2, n_tokens: int = 1, group: int = 4, head_dim: int = 128,
    dtype: torch.dtype = BF16, held: torch.dtype | None = None, tail: int = 0, window: int = 0, n_keys: int = 4096,
    page: int | None = None, n_listed: int = 448, width: int = 74, list_dtype: torch.dtype = torch.int64,
) -> None:  # fmt: skip
    """Call the launcher of an operator; of key_mass a page is one key, elsewhere 16, if nothing else is said."""
    q, pos = new(n_batch, n_tokens, 8 * group, head_dim, dtype=dtype).transpose(1, 2), new(n_batch, n_tokens)
    given = q, layer(n_batch, head_dim, dtype, held, tail, window), pos, n_keys
    if op == "decode":
        decode.attend(*given, 512, arch=cap)
    elif op == "mass":
        decode.attend_with_mass(*given, 512, page or 16, arch=cap)
    elif op == "prefill":
        prefill.attend(*given, arch=cap)
    elif op == "lse":
        prefill.attend_with_lse(*given, arch=cap)
    elif op == "key_mass":
        prefill.key_mass(*given[:2], new(*q.shape[:3], dtype=FP32), *given[2:], page or 1, arch=cap)
    else:
        kv_indices = new(n_batch, 8, n_listed, dtype=list_dtype)
        sparse.attend(*given[:2], kv_indices, new(n_batch), width, *given[2:], page or 16, arch=cap)


def attended(op: str, cap: int | str = 90, **shape: Any) -> list[Launch]:
    """The kernels that one call of the launcher of an operator builds and would launch."""
    return launched(cap, lambda: attend(op, cap, **shape))


def bound(
    n_batch: int = 4, head_dim: int = 128, dtype: torch.dtype = BF16, *, held: torch.dtype | None = None,
    page: int = 16, n_pages: int = 2,
) -> None:  # fmt: skip
    """Call the launcher of page_bounds."""
    bounds = new(n_batch, 8, 8192 // page, 2 * head_dim, dtype=dtype)
    select.page_bounds(layer(n_batch, head_dim, dtype, held), bounds, new(n_batch), n_pages, page)


def product(
    cap: int, n_rows: int, n_in: int = 4096, n_out: int = 4096, dtype: torch.dtype = BF16, biased: bool = False,
    n_planes: int = 0,
) -> Launch:  # fmt: skip
    """The kernel that one call of the launcher builds and would launch; n_planes: 2, or 1 for a draft, of bf16."""

    def call() -> None:
        x, scale = new(n_rows, n_in, dtype=dtype), new(n_out, dtype=FP32)
        weight, *lower = (new(n_out, n_in, dtype=torch.uint8 if n_planes else INT8) for _ in range(max(1, n_planes)))
        int8.linear(x, weight, scale, new(n_out, dtype=dtype) if biased else None, *lower, arch=cap)

    (launch,) = launched(cap, call)
    return launch


def int4_product(cap: int, n_rows: int, n_in: int = 4096, n_out: int = 4096) -> Launch:
    """The same of int4 weights in tiles."""

    def call() -> None:
        held = new(n_out // 64, n_in // 128, 4096, dtype=torch.uint8), new(n_in // 128, n_out, 2, dtype=BF16)
        int4.linear(new(n_rows, n_in, dtype=BF16), *held, new(64, 128, dtype=BF16), parts_of(n_out, n_in), arch=cap)

    (launch,) = launched(cap, call)
    return launch
