"""The rig sees registers that are spilled and shared memory that is too much; tests of kernels see all else."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tests.gpuless.aot import SHARED_LIMIT, Compiled, assert_lean  # noqa: E402  they import triton
from tests.gpuless.driver import stand_in  # noqa: E402


@triton.jit
def accumulate(p_x, p_y, p_out, n_k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [M, N] = x [M, n_k] @ y [n_k, N], K columns at a time."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_sum = tl.zeros((M, N), tl.float32)
    for i in range(0, n_k, K):
        b_x = tl.load(p_x + o_m[:, None] * n_k + i + o_k)  # [M, K]
        b_y = tl.load(p_y + (i + o_k[:, None]) * N + o_n)  # [K, N]
        b_sum = tl.dot(b_x, b_y, b_sum)
    tl.store(p_out + o_m[:, None] * N + o_n, b_sum)


def compile_product(cap: int, m: int, n: int, num_warps: int, num_stages: int) -> Compiled:
    with FakeTensorMode(), stand_in(cap) as launches:
        x, y = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, 1024), (1024, n)))
        how = {"M": m, "N": n, "K": 64, "num_warps": num_warps, "num_stages": num_stages}
        accumulate.warmup(x, y, torch.empty(m, n, device="cuda"), 1024, grid=(1,), **how)
    return launches[0].compiled


def test_a_kernel_that_spills_or_needs_too_much_shared_memory_is_not_lean() -> None:
    compiled = compile_product(90, 256, 256, num_warps=4, num_stages=1)  # 512 sums a thread, which has 255 registers
    assert compiled.stack > 0 and compiled.spills > 0
    with pytest.raises(AssertionError, match="stack"):
        assert_lean(compiled, 90)
    compiled = compile_product(80, 128, 128, num_warps=8, num_stages=8)
    assert compiled.shared > SHARED_LIMIT[80] and compiled.stack == 0
    with pytest.raises(AssertionError, match="shared"):
        assert_lean(compiled, 80)


def test_the_driver_that_was_there_is_back_where_what_it_stood_in_for_fails() -> None:
    before = triton.runtime.driver._active
    with pytest.raises(ZeroDivisionError), stand_in(90):
        raise ZeroDivisionError
    assert triton.runtime.driver._active is before
