# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Shared by the Triton kernels: which GPU they are built for, how strides are passed, limits of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from gpt_fast_sd.model import CacheLayer

LOG2_E = 1.4426950408889634
# FORMAT, how the cache holds an entry: in the dtype of the queries; in int8, with a scale for each; in int8 that lies
# in two planes of nibbles, with scales. Of odd ones there are scales.
SAME, INT8, PLANES = 0, 1, 3
FORMATS = {"int8": INT8, "planes": PLANES}

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no assembler


def _assembler(begin: str, part: str, *places: tuple[str, ...]) -> tl.constexpr:
    """A block of PTX: a beginning, then `part` for each tuple, whose texts stand there for {0}, {1} and so on."""
    return tl.constexpr("{" + begin + "".join(part.format(*texts) for texts in places) + "}")


# Four entries of a byte, in one register -> four numbers of 16 bits in two, exactly. Triton's own conversion takes an
# I2F per entry on sm_80, 16 per clock and SM: more clocks per block than its bytes take.
#
# Behind 0x43 a byte is a bf16 in which the sign of the int8 is the last bit of the exponent. Without that bit it is 128
# and the other seven; with no other it is 128, or 256 if negative: the int8 is their difference. It is a fused product
# since sm_80 has no difference of bf16.
INT8_TO_BF16 = _assembler(
    """
    .reg .b32 pair, rest, sign, minus;
    mov.b32 minus, 0xbf80bf80;
""",
    """    prmt.b32 pair, $2, 0x43, {0};
    and.b32 rest, pair, 0xff7fff7f;
    and.b32 sign, pair, 0xff80ff80;
    fma.rn.bf16x2 {1}, sign, minus, rest;
""",
    ("0x4140", "$0"),
    ("0x4342", "$1"),
)
# Behind 0x64 a byte x + 128 is the fp16 of 1024 + x + 128.
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 raised, pair, base;
    mov.b32 base, 0x64806480;
    xor.b32 raised, $2, 0x80808080;
    prmt.b32 pair, raised, 0x64, 0x4140;
    sub.f16x2 $0, pair, base;
    prmt.b32 pair, raised, 0x64, 0x4342;
    sub.f16x2 $1, pair, base;
}""")
# The upper plane of weights (see ops/planes.py): four e4m3, whose seven bits under four zeros are a bf16 that is
# 2 ** 120 too small, subnormal numbers included.
E4M3_TO_BF16 = _assembler(
    """
    .reg .b32 pair, sign, raise, minus;
    mov.b32 raise, 0x7b807b80;
    mov.b32 minus, 0x80008000;
""",
    """    prmt.b32 pair, $2, 0x0, {0};
    and.b32 sign, pair, minus;
    shr.b32 pair, pair, 4;
    and.b32 pair, pair, 0x07f007f0;
    or.b32 pair, pair, sign;
    fma.rn.bf16x2 {1}, pair, raise, minus;
""",
    ("0x1404", "$0"),
    ("0x3424", "$1"),
)
# Both planes: of 15 << 7, the base that leaves zero where k is 15, a bf16 is 2 ** 105 too small. No half of the sums
# borrows from the other.
WEIGHTS_TO_BF16 = _assembler(
    """
    .reg .b32 pair, sign, low, below, raise, minus;
    mov.b32 raise, 0x74007400;
    mov.b32 minus, 0x80008000;
""",
    """    prmt.b32 pair, $2, 0x0, {0};
    and.b32 sign, pair, minus;
    shr.b32 pair, pair, 4;
    and.b32 pair, pair, 0x07f007f0;
    prmt.b32 low, $3, 0x0, {1};
    shl.b32 below, low, 3;
    and.b32 low, low, 0x000f000f;
    or.b32 pair, pair, low;
    and.b32 below, below, 0x07800780;
    add.u32 pair, pair, 0x07780778;
    sub.u32 pair, pair, below;
    or.b32 pair, pair, sign;
    fma.rn.bf16x2 {2}, pair, raise, minus;
""",
    ("0x1404", "0x4140", "$0"),
    ("0x3424", "0x4342", "$1"),
)
# Four bytes of the upper plane and four of the lower, a nibble of the first half of a head (the low one) and one of the
# second in each -> two registers of either half. The bytes that are joined have signs that are 0 where a number is
# negative, else as those of an int8: INT8_TO_BF16 with that bit turned.
PLANES_TO_BF16 = _assembler(
    """
    .reg .b32 first, second, moved, pair, rest, sign, minus, high, lower, inverse;
    mov.b32 minus, 0xbf80bf80;
    mov.b32 high, 0xf0f0f0f0;
    mov.b32 lower, 0xff80ff80;
    mov.b32 inverse, 0x00800080;
    shl.b32 moved, $4, 4;
    lop3.b32 first, moved, $5, high, 0xe4;
    shr.b32 moved, $5, 4;
    lop3.b32 second, $4, moved, high, 0xe4;
""",
    """    prmt.b32 pair, {0}, 0x43, {1};
    and.b32 rest, pair, 0xff7fff7f;
    lop3.b32 sign, pair, lower, inverse, 0x6a;
    fma.rn.bf16x2 {2}, sign, minus, rest;
""",
    ("first", "0x4140", "$0"),
    ("first", "0x4342", "$1"),
    ("second", "0x4140", "$2"),
    ("second", "0x4342", "$3"),
)
# Four bytes of the upper plane alone, as if the nibbles of the lower one were 0: 2 * nibble above the 128 of a bf16 of
# 256 is 256 + 16 * nibble, of which 384 are too many.
UPPER_TO_BF16 = _assembler(
    """
    .reg .b32 pair, moved, nibbles, base, one, less;
    mov.b32 nibbles, 0x00780078;
    mov.b32 base, 0x43804380;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc3c0c3c0;
""",
    """    prmt.b32 pair, $4, 0x0, {0};
    shl.b32 moved, pair, 3;
    lop3.b32 moved, moved, nibbles, base, 0xea;
    fma.rn.bf16x2 {1}, moved, one, less;
    shr.b32 moved, pair, 1;
    lop3.b32 moved, moved, nibbles, base, 0xea;
    fma.rn.bf16x2 {2}, moved, one, less;
""",
    ("0x4140", "$0", "$2"),
    ("0x4342", "$1", "$3"),
)
# Four bytes of two nibbles -> two registers of the lower and two of the upper ones: behind 0x43 one is the bf16 of 128
# and itself.
NIBBLES_TO_BF16 = _assembler(
    """
    .reg .b32 low, high;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
""",
    """    prmt.b32 {2}, {0}, 0x43, {1};
""",
    ("low", "0x4140", "$0"),
    ("low", "0x4342", "$1"),
    ("high", "0x4140", "$2"),
    ("high", "0x4342", "$3"),
)
RAISED = tl.constexpr(136.0)  # what of such numbers stands for a group's zero: 128 and 8
MISSING = tl.constexpr(7.5)  # the mean of what is not read of a number where the lower plane is not


def architecture() -> int | str:
    """The compute capability that kernels are built for, 90 for Hopper; a text if it is not an NVIDIA GPU."""
    arch: int | str = triton.runtime.driver.active.get_current_target().arch
    return arch


def family(arch: int | str) -> int:
    """Whose row of the tables applies: 90 if a thread block may use 227 KiB of shared memory, else 80.

    ValueError if no row applies: a capability below 8.0, and GPUs of other makers ("gfx942").
    """
    if not isinstance(arch, int) or arch < 80:
        raise ValueError(f"the kernels are for NVIDIA GPUs of compute capability 8.0 and later, not for {arch!r}")
    return 90 if arch in (90, 100, 103) else 80


def format_of(q: Tensor, layer: CacheLayer) -> int:
    """FORMAT of a layer's entries, whose buffers are as the kernels read them."""
    form, head_dim = layer.format, q.shape[3]
    assert q.stride(3) == 1 and (form.scaled or form.dtype == q.dtype)
    for (shape, dtype), *both in zip(form.parts(head_dim), layer.buffers[::2], layer.buffers[1::2], strict=True):
        for x, numbers in zip(both, (layer.k, layer.v), strict=True):
            assert x.dtype == dtype and x.shape == (*layer.k.shape[:3], *shape)
            if shape:
                assert x.stride() == numbers.stride() and x.stride()[2:] == (*shape, 1)
            else:
                assert strides(x, 2) == strides(layer.k_scale, 2) and x.stride(2) == 1
    return FORMATS[form.name] if form.scaled else SAME


def block_of(head_dim: int, form: int) -> int:
    """Dims that a program reads together: a whole head, of planes half of one."""
    block: int = max(16, triton.next_power_of_2(head_dim // 2 if form == PLANES else head_dim))
    return block


def entry_size(q: Tensor, k: Tensor) -> int:
    """Bytes of a number of the cache, which tables of tiles go by; those of the queries where no tensor core serves."""
    return q.element_size() if q.dtype == torch.float32 else k.element_size()


def strides(x: Tensor | None, n: int) -> list[int]:
    """Strides of the first n dims; 0 where a dim has one entry, whose stride is arbitrary and would build a kernel."""
    if x is None:
        return [0] * n
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:n], x.stride(), strict=False)]


@triton.jit
def row_limits(p_pos, o_t, m_r, n_keys, stride_t):
    """The last key that each row reads, -1 if it reads none."""
    b_pos = tl.load(p_pos + o_t.to(tl.int64) * stride_t, mask=m_r, other=-1)
    return tl.where(b_pos < n_keys, b_pos, -1).to(tl.int32)


@triton.jit
def first_seen(limit, WINDOW: tl.constexpr):
    """The first key that rows which see up to `limit` see of a window."""
    return tl.maximum(limit - (WINDOW - 1), 0)


@triton.jit
def widen(b_x, dtype: tl.constexpr, ROWS: tl.constexpr = 0):
    """Entries of the cache in the dtype of the queries, which holds them exactly. ROWS: of the product's tile."""
    # As impure the assembler stays where entries arrive, before they are laid out for products. Else keys are read from
    # shared memory by twos and values one by one: 913 instead of 673 instructions per block of 64 keys. Where products
    # of 64 rows and more go to tensor memory (sm_100 to sm_110) Triton builds no loop with an impure part, which it
    # cannot predicate, and a pure one is as short.
    PURE: tl.constexpr = ROWS >= 64 and cuda_capability_geq(10) and not cuda_capability_geq(12)
    if b_x.dtype == tl.int8 and dtype == tl.bfloat16 and not INTERPRETED:
        b_wide = tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [b_x], tl.bfloat16, PURE, 4)
    elif b_x.dtype == tl.int8 and dtype == tl.float16 and not INTERPRETED:
        b_wide = tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [b_x], tl.float16, PURE, 4)
    else:
        b_wide = b_x.to(dtype)
    return b_wide


@triton.jit
def widen_upper(b_up, ROWS: tl.constexpr):
    """Weights in the upper plane over their row's scale, in bf16, exactly. ROWS: see widen."""
    PURE: tl.constexpr = ROWS >= 64 and cuda_capability_geq(10) and not cuda_capability_geq(12)
    if INTERPRETED:
        b_bits = b_up.to(tl.uint32)
        b_wide = ((b_bits & 0x80) << 24 | (b_bits & 0x7F) << 20).to(tl.float32, bitcast=True) * (2.0**120)
        b_wide = b_wide.to(tl.bfloat16)
    else:
        b_wide = tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [b_up], tl.bfloat16, PURE, 4)
    return b_wide


@triton.jit
def join_weights(b_up, b_low, ROWS: tl.constexpr):
    """Weights in two planes over their row's scale, in bf16, exactly. ROWS: see widen."""
    PURE: tl.constexpr = ROWS >= 64 and cuda_capability_geq(10) and not cuda_capability_geq(12)
    if INTERPRETED:
        b_bits, b_low = b_up.to(tl.uint32), b_low.to(tl.uint32)
        b_wide = ((b_bits & 0x7F) << 4) + (b_low & 15) + 0x778 - ((b_low >> 4) << 7)
        b_wide = ((b_bits & 0x80) << 24 | b_wide << 16).to(tl.float32, bitcast=True) * (2.0**105)
        b_wide = b_wide.to(tl.bfloat16)
    else:
        b_wide = tl.inline_asm_elementwise(WEIGHTS_TO_BF16, "=r,=r,r,r", [b_up, b_low], tl.bfloat16, PURE, 4)
    return b_wide


@triton.jit
def raised_nibbles(b_x, ROWS: tl.constexpr):
    """128 and the lower nibble of each byte, and 128 and the upper one, in bf16. ROWS: see widen."""
    PURE: tl.constexpr = ROWS >= 64 and cuda_capability_geq(10) and not cuda_capability_geq(12)
    if INTERPRETED:
        b_low = ((b_x & 15).to(tl.float32) + 128).to(tl.bfloat16)
        b_high = ((b_x >> 4).to(tl.float32) + 128).to(tl.bfloat16)
    else:
        b_low, b_high = tl.inline_asm_elementwise(
            NIBBLES_TO_BF16, "=r,=r,=r,=r,r", [b_x], (tl.bfloat16, tl.bfloat16), PURE, 4
        )
    return b_low, b_high


@triton.jit
def load_planes(p_up, p_low, m_load, m_whole, dtype: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr = 0):
    """The first and the second half of heads out of the planes that hold them, in the dtype of the queries, exactly.

    With a TAIL the lower plane is read of entries m_whole alone; others are MISSING too small in the mean.
    """
    # impure where widen is
    PURE: tl.constexpr = ROWS >= 64 and cuda_capability_geq(10) and not cuda_capability_geq(12)
    b_up = tl.load(p_up, mask=m_load, other=0)
    if TAIL:
        m_load = m_load & m_whole[:, None]
    b_low = tl.load(p_low, mask=m_load, other=0)
    if dtype == tl.bfloat16 and not INTERPRETED:
        b_first, b_second = tl.inline_asm_elementwise(
            PLANES_TO_BF16, "=r,=r,=r,=r,r,r", [b_up, b_low], (tl.bfloat16, tl.bfloat16), PURE, 4
        )
    else:
        b_1 = (((b_up << 4) | (b_low & 0x0F)) ^ 0x80).to(tl.int8, bitcast=True)
        b_2 = (((b_up & 0xF0) | (b_low >> 4)) ^ 0x80).to(tl.int8, bitcast=True)
        b_first, b_second = widen(b_1, dtype, ROWS), widen(b_2, dtype, ROWS)
    return b_first, b_second


@triton.jit
def load_upper(p_up, m_load, dtype: tl.constexpr, ROWS: tl.constexpr = 0):
    """Both halves of heads out of the upper plane alone, in the dtype of the queries: MISSING too small in the mean."""
    PURE: tl.constexpr = ROWS >= 64 and cuda_capability_geq(10) and not cuda_capability_geq(12)
    b_up = tl.load(p_up, mask=m_load, other=0)
    if dtype == tl.bfloat16 and not INTERPRETED:
        b_first, b_second = tl.inline_asm_elementwise(
            UPPER_TO_BF16, "=r,=r,=r,=r,r", [b_up], (tl.bfloat16, tl.bfloat16), PURE, 4
        )
    else:
        b_first = widen(((b_up << 4) ^ 0x80).to(tl.int8, bitcast=True), dtype, ROWS)
        b_second = widen(((b_up & 0xF0) ^ 0x80).to(tl.int8, bitcast=True), dtype, ROWS)
    return b_first, b_second


@triton.jit
def load_scales(p_scale, m_entry):
    """What an integer of each entry stands for, fp32."""
    return tl.load(p_scale, mask=m_entry, other=0.0).to(tl.float32)  # what is not read may be a NaN
