"""The assembler that widens entries of a byte, executed one instruction at a time on every byte."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_fast_sd.fast.triton import common as triton_common

pytest.importorskip("triton")


def execute(ptx: str, *operands: Tensor) -> list[Tensor]:
    """What the instructions leave in the outputs $0, $1: registers of 32 bits, as int64, many at a time."""
    registers = {f"${2 + i}": operand for i, operand in enumerate(operands)}

    def value(name: str) -> Tensor:
        return torch.tensor(int(name, 16)) if name.startswith("0x") else registers[name]

    for opcode, into, *names in re.findall(r"^\s*([a-z]\S+) (\S+), ([^,;]+)(?:, ([^,;]+))?(?:, ([^,;]+))?;", ptx, re.M):
        if opcode == ".reg":
            continue
        registers[into] = OPCODES[opcode](*(value(name) for name in names if name))
    return [registers["$0"], registers["$1"]]


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


OPCODES: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: x, "and.b32": lambda x, y: x & y, "xor.b32": lambda x, y: x ^ y, "prmt.b32": permute,
    "fma.rn.bf16x2": fused,
    "sub.f16x2": lambda x, y: rounded(halves(x, torch.float16) - halves(y, torch.float16), torch.float16),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [("INT8_TO_BF16", torch.bfloat16), ("INT8_TO_FP16", torch.float16)])
def test_every_byte_becomes_the_same_value_in_its_own_place(name: str, dtype: torch.dtype) -> None:
    places = torch.stack([torch.arange(256).roll(17 * i) for i in range(4)], -1).to(torch.uint8)  # [256, 4]
    packed = places.contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF
    out = [halves(register, dtype) for register in execute(getattr(triton_common, name).value, packed)]
    assert torch.cat(out, -1).equal(places.view(torch.int8).double())
