"""Triton's interpreter, right for bf16: imported, it holds for every kernel of this process.

Triton 3.6 and 3.7 keep a bf16 block as its raw bits (numpy has no such type) and compute on them as integers, without
a word. Here arithmetic goes through fp32 and is rounded to the nearest even once, which is what a GPU does.
A reduction or scan of a bf16 block would still be wrong and is refused: write `.to(tl.float32)` before it.

The language is patched once and stays so. Triton does it at every launch and at every call of a jitted function inside
a kernel, for which it looks at each name of its modules: about a third of what a profile of these tests showed.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

Array = NDArray[Any]


def is_bf16(*handles: TensorHandle) -> bool:
    return any(handle.dtype.scalar == tl.bfloat16 for handle in handles)


def widened(handle: TensorHandle) -> Array:
    """The values of a block: bf16 bits become fp32, all else stays."""
    if not is_bf16(handle):
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Array) -> TensorHandle:
    """A bf16 block of these values, each rounded to the nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)


class RightForBf16(InterpreterBuilder):
    """InterpreterBuilder with each operation that would compute on the bits of a bf16 block replaced."""

    def get_bf16(self, value: float) -> TensorHandle:
        return rounded(np.array([value], dtype=np.float32))

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if is_bf16(src):
            return self.cast_impl(TensorHandle(widened(src), tl.float32), dst_type)
        if dst_type.scalar == tl.bfloat16:
            return rounded(src.data)
        if dst_type.scalar == tl.float32 and src.dtype.scalar == tl.float32:
            return TensorHandle(src.data, tl.float32)
        return super().cast_impl(src, dst_type)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
        if not is_bf16(lhs, rhs):
            return super().binary_op(lhs, rhs, op)
        out = op(widened(lhs), widened(rhs))
        return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else rounded(out)

    def ternary_op(
        self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Callable[..., Array]
    ) -> TensorHandle:
        if op is np.where or not is_bf16(lhs, rhs, other):  # choosing moves bits, it does not compute
            return super().ternary_op(lhs, rhs, other, op)
        return rounded(op(widened(lhs), widened(rhs), widened(other)))

    def unary_op(self, arg: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
        return rounded(op(widened(arg))) if is_bf16(arg) else super().unary_op(arg, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not is_bf16(x, y, z):
            return super().create_fma(x, y, z)
        exact = widened(x).astype(np.float64) * widened(y) + widened(z)  # fp64 holds the product of two bf16 exactly
        return rounded(exact.astype(np.float32))

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
        if not is_bf16(a, b):
            return super().create_dot(a, b, d, *precision)
        return TensorHandle(np.matmul(widened(a), widened(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


def refuse_bf16(self: ReduceScanOpInterface, input: Any) -> None:
    check_tensor(self, input)
    if any(arg.dtype.scalar == tl.bfloat16 for arg in input):
        raise NotImplementedError("the interpreter reduces and scans bf16 as integers: widen the block to fp32 first")


check_tensor = ReduceScanOpInterface.check_tensor
if check_tensor is not refuse_bf16:
    ReduceScanOpInterface.check_tensor = refuse_bf16
    interpreter.interpreter_builder.__class__ = RightForBf16
    sees_all = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(sees_all)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # with nothing to restore
