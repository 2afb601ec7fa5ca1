"""The assembler that widens int8 entries to bf16, executed one instruction at a time on every byte."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

triton_common = importlib.import_module("gpt_fast_sd.kernels.triton_common")  # what is tested lies behind the door


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


def halves(x: Tensor) -> list[Tensor]:
    """A register as two bf16, the lower first."""
    return [(x >> shift & 0xFFFF).to(torch.uint16).view(torch.bfloat16).double() for shift in (0, 16)]


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z of both halves, rounded once."""
    low, high = (
        (a * b + c).to(torch.bfloat16).view(torch.uint16).long()
        for a, b, c in zip(halves(x), halves(y), halves(z), strict=True)
    )
    return low | (high << 16)


OPCODES = {"mov.b32": lambda x: x, "and.b32": lambda x, y: x & y, "prmt.b32": permute, "fma.rn.bf16x2": fused}


def test_every_byte_becomes_the_bf16_of_the_same_value_in_its_own_place() -> None:
    places = torch.stack([torch.arange(256).roll(17 * i) for i in range(4)], -1).to(torch.uint8)  # [256, 4]
    packed = places.contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF
    out = [half for register in execute(triton_common.TO_BF16.value, packed) for half in halves(register)]
    assert torch.stack(out, -1).equal(places.view(torch.int8).double())
