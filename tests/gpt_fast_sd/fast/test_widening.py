"""The assembler that widens entries of a byte, executed one instruction at a time on every byte."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.ops import planes
from gpt_fast_sd.fast.triton import common as triton_common

pytest.importorskip("triton")


def execute(ptx: str, *operands: Tensor) -> list[Tensor]:
    """What the instructions leave in the outputs, two or four: registers of 32 bits, as int64, many at a time."""
    n_out = len(set(re.findall(r" (\$\d), ", ptx))) - len(set(re.findall(r", (\$\d)", ptx)))
    registers = {f"${n_out + i}": operand for i, operand in enumerate(operands)}

    def value(name: str) -> Tensor:
        return torch.tensor(int(name, 0)) if name[0].isdigit() else registers[name]

    operand = r"(?:, ([^,;]+))?"
    for opcode, into, *names in re.findall(rf"^\s*([a-z]\S+) (\S+), ([^,;]+){operand * 3};", ptx, re.M):
        if opcode == ".reg":
            continue
        registers[into] = OPCODES[opcode](*(value(name) for name in names if name)) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(n_out)]


def permute(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    """Four bytes of eight, chosen by the selector's hexadecimal digits."""
    both, out = low | (high << 32), torch.tensor(0)
    for i in range(4):
        out = out | (((both >> (8 * ((int(selector) >> (4 * i)) & 7))) & 0xFF) << (8 * i))
    return out


def halves(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A register as two numbers, the lower first: fp64 [..., 2]."""
    return torch.stack([x, x >> 16], -1).bitwise_and(0xFFFF).to(torch.uint16).view(dtype).double()


def rounded(pair: Tensor, dtype: torch.dtype) -> Tensor:
    """A register of two numbers, each rounded once."""
    low, high = pair.to(dtype).view(torch.uint16).long().unbind(-1)
    return low | (high << 16)


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z of both halves, subnormal numbers included."""
    a, b, c = (halves(register, torch.bfloat16) for register in (x, y, z))
    return rounded(a * b + c, torch.bfloat16)


def combined(x: Tensor, y: Tensor, z: Tensor, table: Tensor) -> Tensor:
    """Each bit is that of the table which the bits of x, y and z number, x's the highest."""
    bits = [register[..., None] >> torch.arange(32) & 1 for register in (x, y, z)]
    return ((int(table) >> (bits[0] * 4 + bits[1] * 2 + bits[2]) & 1) << torch.arange(32)).sum(-1)


OPCODES: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: x, "and.b32": lambda x, y: x & y, "xor.b32": lambda x, y: x ^ y, "prmt.b32": permute,
    "or.b32": lambda x, y: x | y, "add.u32": lambda x, y: x + y, "sub.u32": lambda x, y: x - y,
    "fma.rn.bf16x2": fused, "lop3.b32": combined,
    "shl.b32": lambda x, n: (x << n) & 0xFFFFFFFF, "shr.b32": lambda x, n: x >> n,
    "sub.f16x2": lambda x, y: rounded(halves(x, torch.float16) - halves(y, torch.float16), torch.float16),
}  # fmt: skip


def packed(places: Tensor) -> Tensor:
    """Four bytes of each row in a register: [n, 4] -> [n]."""
    return places.to(torch.uint8).contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF


@pytest.mark.parametrize(("name", "dtype"), [("INT8_TO_BF16", torch.bfloat16), ("INT8_TO_FP16", torch.float16)])
def test_every_byte_becomes_the_same_value_in_its_own_place(name: str, dtype: torch.dtype) -> None:
    places = torch.stack([torch.arange(256).roll(17 * i) for i in range(4)], -1).to(torch.uint8)  # [256, 4]
    out = [halves(register, dtype) for register in execute(getattr(triton_common, name).value, packed(places))]
    assert torch.cat(out, -1).equal(places.view(torch.int8).double())


@pytest.mark.parametrize("both", [True, False])
def test_every_pair_of_bytes_of_two_planes_becomes_the_numbers_that_lie_in_them(both: bool) -> None:
    up = torch.stack([torch.arange(65536).roll(257 * i) % 256 for i in range(4)], -1)  # [65536, 4]
    low = (
        torch.stack([torch.arange(65536).roll(257 * i) // 256 for i in range(4)], -1) if both else torch.zeros_like(up)
    )
    given = [packed(up), packed(low)] if both else [packed(up)]
    ptx = triton_common.PLANES_TO_BF16 if both else triton_common.UPPER_TO_BF16
    out = torch.cat([halves(register, torch.bfloat16) for register in execute(ptx.value, *given)], -1)  # [65536, 8]
    numbers = [(up % 16) * 16 + low % 16 - 128, up // 16 * 16 + low // 16 - 128]
    assert out.equal(torch.cat(numbers, -1).double())


def test_every_weight_in_planes_becomes_its_number_over_the_scale_of_its_row_in_its_own_place() -> None:
    u, n, k = torch.arange(2**16) >> 8 & 127, torch.arange(2**16) & 15, torch.arange(2**16) >> 4 & 15
    # no number is rounded down to less than nothing, below 14 binades few are left, and zero is written in one way
    there_is = torch.where(k == 15, (u == 0) & (n == 8), (u * 16 + n >= 8) & ((k == 0) | (u * 16 + n < 136)))
    both = torch.stack([there_is.nonzero()[:, 0].roll(997 * i) for i in range(4)], -1)  # [N, 4]
    upper, lower = (both >> 8).to(torch.uint8), both.to(torch.uint8)
    read, exact = (
        torch.cat([halves(register, torch.bfloat16) for register in execute(ptx.value, *map(packed, given))], -1)
        for ptx, given in ((triton_common.E4M3_TO_BF16, [upper]), (triton_common.WEIGHTS_TO_BF16, [upper, lower]))
    )
    is_number = upper & 127 != 127  # which none in planes is
    assert read[is_number].equal(upper.view(torch.float8_e4m3fn).double()[is_number])
    held = planes.split(torch.zeros(len(both), 4).bfloat16())
    held = held._replace(upper=upper, lower=lower, scale=torch.ones(len(both)))
    assert exact.equal(planes.join(held).double()) and len(both) > 2**12


def test_every_byte_becomes_128_and_each_of_its_nibbles_in_its_own_place() -> None:
    places = torch.stack([torch.arange(256).roll(17 * i) for i in range(4)], -1)
    out = execute(triton_common.NIBBLES_TO_BF16.value, packed(places))
    low, high = (torch.cat([halves(register, torch.bfloat16) for register in pair], -1) for pair in (out[:2], out[2:]))
    assert low.equal(128.0 + places.double() % 16) and high.equal(128.0 + (places // 16).double())
