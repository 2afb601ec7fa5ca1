"""Products of few rows on a CPU: weights held once, packed for linear_avx512.cpp and linear.cpp, as an operator.

A library packs the weights again in every call, or reads them with a horizontal sum per row; packed once, a product
reads each weight from memory a single time, and a row's last bits depend neither on other rows nor on threads.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheFormat

from ..ops.int4 import BLOCK, Int4
from . import attention_cpp as attention
from . import round as rounds
from . import sampling as sampling
from .build import builds, constant_where_traced, is_built, library
from .instruction_sets import widens

SOURCE, ANY = (Path(__file__).with_name(name) for name in ("linear_avx512.cpp", "linear.cpp"))
LAYERS = Path(__file__).with_name("layers.cpp")  # see layers.py
BF16, INT8, INT4 = torch.bfloat16, torch.int8, torch.uint8  # of what is packed; a byte holds two of int4
LANES, LINE = 32, 64  # outputs of a block, and bytes of inputs: a packed weight is whole blocks
IN_PLANES = 2  # of simd.hpp

_library = torch.library.Library("gpt_fast_sd", "FRAGMENT")
_library.define(
    "cpu_linear(Tensor x, Tensor packed, Tensor? bias, Tensor? scale=None, Tensor? blocks=None, bool by_sums=False,"
    " bool gated=False) -> Tensor"
)


def cpu_kernels(
    head_dim: int, dtype: torch.dtype, vocab_size: int = 0, form: CacheFormat | None = None
) -> tuple[tuple[Path, int], ...]:
    """The sources that `begin_building` builds for a model in this dtype, each with its head dim.

    form: of its cache, if that holds another dtype.
    """
    attends = not head_dim % attention.PAGE and head_dim <= attention.MOST_DIMS and dtype in attention.DTYPES
    own = [(attention.source_for(head_dim, dtype, form), head_dim)] if attends else []
    drawn = [(sampling.SOURCE, 0)] if vocab_size >= sampling.LEAST_VOCABULARY else []
    multiplies = [(one, 0) for one in dict.fromkeys((source(), source(whole=True), LAYERS))] if dtype == BF16 else []
    return (*own, *multiplies, (rounds.SOURCE, 0), *drawn)


@constant_where_traced
def kernels_are_built(head_dim: int, dtype: torch.dtype, vocab_size: int = 0, form: CacheFormat | None = None) -> bool:
    """Whether nothing of a model's kernels has to be built: eager code may use them, and needs no compiler."""
    return all(is_built(*one) for one in cpu_kernels(head_dim, dtype, vocab_size, form))


def cpu_sources(head_dim: int) -> tuple[tuple[Path, int], ...]:
    """All sources that any CPU may need for a head dim, each with that if it has one."""
    attends = [(attention.SOURCE, head_dim)] if head_dim in attention.HEAD_DIMS else []
    return (
        *attends,
        (attention.ANY, head_dim),
        (SOURCE, 0),
        (ANY, 0),
        (LAYERS, 0),
        (rounds.SOURCE, 0),
        (sampling.SOURCE, 0),
    )


def source(*, whole: bool = False) -> Path:
    """The kernel for this machine; whole: for products of whole numbers."""
    return ANY if not builds(SOURCE) or (widens() and not whole) else SOURCE


def packing_builds(*, at_once: bool = False) -> bool:
    """Whether the kernel can be built here; at_once: whether it is built already."""
    return all((is_built if at_once else builds)(source(whole=whole)) for whole in (False, True))


def packable(weight: Tensor) -> bool:
    """Whether the kernel serves a weight [O, I] of this dtype, device and shape, and can be built here.

    int4: [O, I / 2].
    """
    if weight.dtype not in (BF16, INT8, INT4) or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    row = BLOCK // 2 if weight.dtype == INT4 else LINE // weight.itemsize
    return not weight.shape[0] % LANES and not weight.shape[1] % row and packing_builds()


def packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, blocks: Tensor | None = None,
    by_sums: bool = False, gated: bool = False,
) -> Tensor:  # fmt: skip
    """x W' + bias: bf16 x [..., I], packed [O, I], bias [O] -> bf16 [..., O]; TypeError for other dtypes.

    With a scale, fp32 [O], packed is int8, and the result is that of `int8_linear`, bit for bit. With blocks, too, the
    three are an Int4, packed, and the result is that of the packed bf16 weight that they stand for, bit for bit; by
    sums, and packed so, it is that of `int4_by_sums`. Of planes, see pack_planes, packed is the upper one and blocks
    the lower one, or None for what a draft reads: the result is that of the packed bf16 weight, bit for bit.
    Gated, outputs are gates and ups in turns: silu(gate) * up, [..., O / 2], of fp32 values before they are rounded.
    """
    out: Tensor = torch.ops.gpt_fast_sd.cpu_linear(x, packed, bias, scale, blocks, by_sums, gated)
    return out


def packed_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows of a packed weight by their numbers: packed [O, I], int64 rows [...] -> [..., I]"""
    inside = rows % LANES
    blocks = packed.view(len(packed) // LANES, -1, 2, 16, 16, 4 // packed.itemsize)
    found: Tensor = blocks[rows // LANES, :, inside // 16, :, inside % 16]  # bf16: [..., I / 32, 16, 2]
    return found.flatten(-3)


def pack(weight: Tensor, keep: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """[O, I] -> the same shape, as [O / 32, n, 2, 16, 16, 4 bytes]: 32 outputs x 64 bytes of inputs, 4 at a time.

    keep: makes the only copy, as HugePageArena.keep does.
    """
    words = weight.contiguous().view(torch.int32).view(len(weight) // LANES, 2, 16, -1, 16)
    return keep(words.permute(0, 3, 1, 4, 2)).contiguous().view(weight.dtype).view(weight.shape)


def pack_planes(upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """Pack both planes [O, I] in the same shapes: [O / 32, I / 32, 2, 8, 16, 4], two words of `pack`'s bf16 in each.

    Of the upper plane the first word's two bytes lie above those of the second, of the lower one below.
    """
    both = (plane.view(len(plane) // LANES, 2, 16, -1, 8, 2, 2) for plane in (upper, lower))  # ..., words, inputs
    ordered = [plane.permute(0, 3, 1, 4, 2, 6, 5) for plane in both]
    packed = ordered[0].flip(-1).reshape(upper.shape), ordered[1].reshape(lower.shape)
    return packed[0].contiguous(), packed[1].contiguous()


def unpack_planes(upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_planes`."""
    both = [plane.view(len(plane) // LANES, -1, 2, 8, 16, 2, 2) for plane in (upper, lower)]
    ordered = (plane.permute(0, 2, 4, 1, 3, 6, 5) for plane in (both[0].flip(-1), both[1]))
    first, second = (plane.reshape(upper.shape) for plane in ordered)
    return first, second


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    words = packed.view(torch.int32).view(len(packed) // LANES, -1, 2, 16, 16)
    return words.permute(0, 2, 4, 1, 3).contiguous().view(packed.dtype).view(packed.shape)


def pack_int4(held: Int4, by_sums: bool = False) -> Int4:
    """Pack in the same shapes; numbers as [O / 32, n, 2, 4, 32, 4 of 4 bits]: an input's of four outputs in 16 bits.

    n blocks of inputs, each of two times 16 outputs. Blocks as [O / 32, n, 2, 2, 16]: scales, then minima. by_sums:
    numbers as [O / 16, n, 4, 16, 4 bytes], an output in every lane, and blocks as [O / 16, n, 2, 16].
    """
    if by_sums:
        lanes = held.numbers.view(torch.int32).view(len(held.numbers) // 16, 16, -1, 4).permute(0, 2, 3, 1)
        numbers = lanes.contiguous().view(torch.uint8).view(held.numbers.shape)
        blocks = held.blocks.view(len(held.blocks) // 16, 16, -1, 2).permute(0, 2, 3, 1)
    else:
        pairs = held.numbers.view(len(held.numbers) // LANES, 2, 4, 4, -1, BLOCK // 2)  # [O / 32, 2, 4, 4, n, 16]
        whole = torch.cat([pairs & 15, pairs >> 4], -1).permute(0, 4, 1, 2, 5, 3)  # [O / 32, n, 2, 4, 32, 4]
        numbers = (whole[..., ::2] | whole[..., 1::2] << 4).reshape(held.numbers.shape)
        blocks = held.blocks.view(len(held.blocks) // LANES, 2, 16, -1, 2).permute(0, 3, 1, 4, 2)
    return Int4(numbers, blocks.reshape(held.blocks.shape), held.power)


def unpack_int4(packed: Int4, by_sums: bool = False) -> Int4:
    """The inverse of `pack_int4`."""
    if by_sums:
        lanes = packed.numbers.view(torch.int32).view(len(packed.numbers) // 16, -1, 4, 16).permute(0, 3, 1, 2)
        numbers = lanes.contiguous().view(torch.uint8).view(packed.numbers.shape)
        blocks = packed.blocks.view(len(packed.blocks) // 16, -1, 2, 16).permute(0, 3, 1, 2)
    else:
        pairs = packed.numbers.view(len(packed.numbers) // LANES, -1, 2, 4, BLOCK, 2)
        whole = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).permute(0, 2, 3, 5, 1, 4)
        numbers = (whole[..., : BLOCK // 2] | whole[..., BLOCK // 2 :] << 4).reshape(packed.numbers.shape)
        blocks = packed.blocks.view(len(packed.blocks) // LANES, -1, 2, 2, 16).permute(0, 2, 4, 1, 3)
    return Int4(numbers, blocks.reshape(packed.blocks.shape), packed.power)


def sizes_of(
    packed: Tensor, bias: Tensor | None, scale: Tensor | None, blocks: Tensor | None, by_sums: bool
) -> tuple[int, int]:
    """Outputs and inputs of a packed weight, see packed_linear; TypeError or ValueError for what no kernel takes."""
    planes = in_planes(packed, blocks)
    kind = BF16 if scale is None else INT4 if planes or blocks is not None else INT8
    if packed.dtype is not kind or not packed.is_contiguous():
        raise TypeError(f"packed weights are contiguous {kind}, got {packed.dtype}")
    if scale is not None and (scale.dtype is not torch.float32 or scale.shape != packed.shape[:1]):
        raise TypeError(f"packed weights have an fp32 scale for each output, got {scale.dtype} {tuple(scale.shape)}")
    n_out, n_in = packed.shape
    if bias is not None and (bias.dtype is not BF16 or bias.shape != (n_out,)):
        raise TypeError(f"packed weights have a bf16 bias for each output, got {bias.dtype} {tuple(bias.shape)}")
    if planes:
        whole = blocks is None or (blocks.shape == packed.shape and blocks.is_contiguous())
        if scale is None or not whole or n_in % LANES:
            raise TypeError(f"planes have one shape, a scale and multiples of {LANES}, got {tuple(packed.shape)}")
    elif blocks is not None:
        n_in *= 2
        if blocks.dtype is not torch.float16 or blocks.shape != (n_out, n_in // BLOCK, 2) or not blocks.is_contiguous():
            raise TypeError(f"packed int4 weights have fp16 blocks, got {blocks.dtype} {tuple(blocks.shape)}")
        if by_sums and n_in % 64:
            raise ValueError(f"int4 products by sums need inputs that 64 divides, got {n_in}")
    return n_out, n_in


def in_planes(packed: Tensor, blocks: Tensor | None) -> bool:
    """Whether a packed weight, with blocks as packed_linear takes them, is the upper plane of a bf16 one."""
    return packed.dtype is INT4 and (blocks is None or blocks.dtype is INT4)


@functools.cache
def kernel_for(whole: bool) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The kernel in C++; whole: for products of whole numbers."""
    kernel = library(source(whole=whole))().linear
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes, kernel.restype = [pointer] * 6 + [size] * 4 + [ctypes.c_int] * 3, None
    return kernel


@torch.library.impl(_library, "cpu_linear", "CPU")
def product(
    x: Tensor, packed: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, blocks: Tensor | None = None,
    by_sums: bool = False, gated: bool = False,
) -> Tensor:  # fmt: skip
    """The operator's own code, see packed_linear."""
    # in a step with a single row, this Python code takes longer than the product of a small weight
    if x.dtype is not BF16:
        raise TypeError(f"packed weights multiply bf16, got {x.dtype}")
    n_out, n_in = sizes_of(packed, bias, scale, blocks, by_sums)
    if x.shape[-1] != n_in:
        raise ValueError(f"packed weights of {n_in} inputs need rows of {n_in} numbers, got {tuple(x.shape)}")
    rows, apart = x, n_in  # [M, I], from one row to the next
    if not x.is_contiguous():
        rows = x.reshape(-1, n_in)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        apart = rows.stride(0)
    out = torch.empty((*x.shape[:-1], n_out // 2 if gated else n_out), dtype=BF16)
    kernel_for(packed.dtype is INT8 or by_sums)(
        rows.data_ptr(), packed.data_ptr(), None if blocks is None else blocks.data_ptr(),
        None if scale is None else scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        rows.numel() // n_in, n_in, n_out, apart, gated, IN_PLANES if in_planes(packed, blocks) else by_sums,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


@torch.library.register_fake("gpt_fast_sd::cpu_linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor, packed: Tensor, bias: Tensor | None, scale: Tensor | None = None, blocks: Tensor | None = None,
    by_sums: bool = False, gated: bool = False,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:-1], packed.shape[0] // (1 + gated))
