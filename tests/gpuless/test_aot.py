"""The rig sees what a kernel needs: spills, tensor cores, asynchronous copies, shared memory, and each launch."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tests.gpuless.aot import SHARED_LIMIT, Compiled, assert_lean  # noqa: E402  they import triton
from tests.gpuless.driver import stand_in  # noqa: E402

CAPS = (80, 90)


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


def compile_product(cap: int, m: int, n: int, num_warps: int, num_stages: int = 3) -> Compiled:
    with FakeTensorMode(), stand_in(cap) as launches:
        x, y = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, 1024), (1024, n)))
        how = {"M": m, "N": n, "K": 64, "num_warps": num_warps, "num_stages": num_stages}
        accumulate.warmup(x, y, torch.empty(m, n, device="cuda"), 1024, grid=(1,), **how)
    return launches[0].compiled


@pytest.mark.parametrize("cap", CAPS)
def test_a_product_uses_tensor_cores_and_overlaps_its_copies(cap: int) -> None:
    compiled = compile_product(cap, 64, 64, num_warps=4)
    assert_lean(compiled, cap)
    assert compiled.hgmma > 0 if cap == 90 else compiled.hmma > 0
    assert compiled.ldgsts > 0
    assert compiled.shared >= 2 * 2 * 64 * 64 * 2  # two stages at least of x and y in bf16
    assert f".target sm_{cap}" in compiled.ptx


def test_a_kernel_that_spills_or_needs_too_much_shared_memory_is_not_lean() -> None:
    compiled = compile_product(90, 256, 256, num_warps=4, num_stages=1)  # 512 sums a thread, which has 255 registers
    assert compiled.stack > 0 and compiled.spills > 0
    with pytest.raises(AssertionError, match="stack"):
        assert_lean(compiled, 90)
    compiled = compile_product(80, 128, 128, num_warps=8, num_stages=8)
    assert compiled.shared > SHARED_LIMIT[80] and compiled.stack == 0
    with pytest.raises(AssertionError, match="shared"):
        assert_lean(compiled, 80)


@triton.jit
def scale(p_x, p_out, factor, n, BLOCK: tl.constexpr):
    """out [n] = x [n] * factor"""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.load(p_x + o, mask=o < n) * factor, mask=o < n)


def scaled(x: Tensor, factor: float, block: int) -> Tensor:
    out = torch.empty_like(x)
    scale[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, factor, x.numel(), BLOCK=block, num_warps=2)
    return out


def test_calls_on_a_stand_in_driver_compile_for_its_target_and_launch_nothing() -> None:
    before = triton.runtime.driver._active
    for cap in CAPS:
        with FakeTensorMode(), stand_in(cap) as launches:
            x = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
            assert scaled(scaled(x, 2.0, 256), 3.0, 512).shape == x.shape
        assert [(launch.name, launch.grid) for launch in launches] == [("scale", (4,)), ("scale", (2,))]
        assert [launch.kwargs["factor"] for launch in launches] == [2.0, 3.0]
        assert launches[0].kwargs["BLOCK"] == 256 and launches[0].kwargs["num_warps"] == 2
        for launch in launches:
            assert f".target sm_{cap}" in launch.compiled.ptx
            assert_lean(launch.compiled, cap)
    with pytest.raises(ZeroDivisionError), stand_in(90):
        raise ZeroDivisionError
    assert triton.runtime.driver._active is before
