"""Which weights of few bits run where: a table whose entries say what makes them and what they need.

A precision without an entry for a kind of device is refused there by a sentence, and so is whatever an entry asks for
that a machine or a model lacks. Targets and copies that draft follow the same table; what differs is the output head: a
target's keeps its dtype, a copy's is quantized, too, to the entry's `head`.

Shapes: O x I a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gpt_fast_sd.model import ModelConfig
from gpt_fast_sd.tp import in_short

from ..fast import BLOCK, ROWS_AT_ONCE, dequantize_blocks, unpack
from ..fast.cpu.packing import PackedLinear
from ..fast.linear_float8 import Float8Linear, product
from ..fast.linear_int4 import Int4Linear, Int4TilesLinear, int4_from
from ..fast.linear_int8 import Int8Linear
from ..fast.linear_planes import PlanesLinear, UpperLinear, upper_of
from ..fast.ops.int4_tiles import BYTES, GROUP, TILE, Int4Tiles, tiled
from ..fast.ops.int8 import FLOAT8

FLOAT8_CAPABILITY = 8, 9  # the least that multiplies float8


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Weights of one precision on one kind of device.

    of: makes a linear layer with such weights; the bias is shared, the given layer not changed, and one that has such
    weights is returned. per_weight, per_row: bytes of a weight, and further ones of each output. head: the precision of
    a copy's output head. widened: bytes of a weight in the copy that a product of many rows makes, or on a CPU any
    product of weights that are not packed. beside: fp32 numbers that are kept beside each of the rows that are
    quantized at a time. evens: whether an output can be scaled afterwards, see `equalize_keys`. inputs, outputs: what
    must divide them. capability: the least compute capability.
    only_bf16: whether weights of other dtypes are refused. cublas: whether CUDA 12.9 is refused and a product tried.
    shares: whether it is a part of a target's own weights, which are laid out for it: only per_row is then added.
    """

    of: Callable[[nn.Linear], nn.Linear]
    per_weight: float = 1.0
    per_row: int = 4
    head: str = "int8"
    widened: int = 0
    beside: int = 4
    evens: bool = True
    inputs: int = 1
    outputs: int = 1
    capability: tuple[int, int] | None = None
    only_bf16: bool = False
    cublas: bool = False
    shares: bool = False

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a weight [rows, columns] as it is kept."""
        return int(rows * (columns * self.per_weight + self.per_row))


def int8_of(linear: nn.Linear) -> nn.Linear:
    """A Linear with int8 weights and a scale for each output, the bias shared; itself where it has them."""
    if precision_of(linear) == "int8":
        return linear
    return Int8Linear(plain_weight(linear, "int8"), linear.bias)


def float8_of(linear: nn.Linear) -> nn.Linear:
    """A Linear with float8 weights (e4m3), a scale for each output and one for each row that comes, the bias shared.

    Itself where it has them.
    """
    if isinstance(linear, Float8Linear):
        return linear
    return Float8Linear(plain_weight(linear, "float8"), linear.bias)


def int4_in_blocks(linear: nn.Linear) -> nn.Linear:
    """A Linear with int4 weights in blocks of 32 inputs, the bias shared; itself where it has them."""
    if isinstance(linear, Int4Linear):
        return linear
    weight = plain_weight(linear, "int4")
    return Int4Linear(int4_from(weight, linear.weight), linear.bias, weight.dtype)


def int4_in_tiles(linear: nn.Linear) -> nn.Linear:
    """A Linear with int4 weights that torchao has chosen, the bias shared; itself where it has them."""
    if precision_of(linear) == "int4":
        return linear
    return Int4TilesLinear(plain_weight(linear, "int4"), linear.bias, by_hqq)


def by_hqq(weight: Tensor) -> Int4Tiles:
    """Numbers, scales and zeros of a bf16 weight [O, I] by half-quadratic quantization, as torchao does it.

    Some rows at a time, as what it takes besides is large. https://mobiusml.github.io/hqq_blog
    """
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq as choose

    n_out, n_groups = len(weight), weight.shape[1] // GROUP
    numbers = weight.new_empty(n_out // TILE, n_groups, BYTES, dtype=torch.uint8)
    scale_and_zero = weight.new_empty(n_groups, n_out, 2, dtype=torch.bfloat16)
    for begin in range(0, n_out, ROWS_AT_ONCE):
        rows = weight[begin : begin + ROWS_AT_ONCE]
        some, *both, _ = choose(
            rows, nbits=4, group_size=GROUP, compute_dtype=torch.bfloat16, device=rows.device, raw_output=False
        )
        numbers[begin // TILE : begin // TILE + len(rows) // TILE] = tiled(some.to(torch.uint8).view_as(rows))
        for i, each in enumerate(both):
            scale_and_zero[:, begin : begin + len(rows), i] = each.view(len(rows), n_groups).t()
    return Int4Tiles(numbers, scale_and_zero)


def upper_on_cuda(linear: nn.Linear) -> nn.Linear:
    """See upper_of: by products of float8 rows where `float8` runs."""
    return upper_of(linear, multiplies_float8=multiplies_float8(linear.weight.device))


# beside: of the numbers that are split at a time, which are fewer than those rows
PLANES = Precision(of=upper_of, head="planes", widened=2, only_bf16=True, shares=True)
TABLE: Mapping[str, Mapping[str, Precision]] = {  # name -> kind of device
    "int8": {"cpu": Precision(of=int8_of), "cuda": Precision(of=int8_of, widened=2)},
    "int4": {
        "cpu": Precision(of=int4_in_blocks, per_weight=0.5 + 4 / BLOCK, inputs=BLOCK, widened=11),
        "cuda": Precision(
            of=int4_in_tiles, per_weight=0.5 + 4 / GROUP, per_row=0, beside=10, evens=False, inputs=GROUP, outputs=TILE,
            widened=2, only_bf16=True,
        ),
    },
    "float8": {
        "cuda": Precision(
            of=float8_of, head="float8", inputs=16, outputs=16, capability=FLOAT8_CAPABILITY, only_bf16=True,
            cublas=True,
        ),
    },
    "planes": {"cpu": PLANES, "cuda": replace(PLANES, of=upper_on_cuda)},  # of drafts alone
}  # fmt: skip


def precision(name: str, device: torch.device, *, of_draft: bool = False) -> Precision:
    """The entry for a device; ValueError where there is none."""
    found = TABLE[name].get(device.type)
    if found is None:
        kinds = " or ".join(repr(kind) for kind in TABLE[name])
        others = [repr(other) for other, runs in TABLE.items() if device.type in runs and other != "planes"]
        advice = f": use {' or '.join(others)}" if others else ""
        raise ValueError(f"{_said(name, of_draft)} runs on device {kinds}, and the model is on {device.type!r}{advice}")
    return found


def require_precision(name: str | None, device: torch.device, dtype: torch.dtype, *, of_draft: bool = False) -> None:
    """ValueError where a device does not run weights of this precision, made from weights of this dtype."""
    if name is None:
        return
    said, found = _said(name, of_draft), precision(name, device, of_draft=of_draft)
    if found.capability is not None:
        capability = torch.cuda.get_device_capability(device)
        if capability < found.capability:
            has, least = (".".join(map(str, c)) for c in (capability, found.capability))
            raise ValueError(
                f"{said} needs compute capability {least} or more (L40S, H100, or later), and this GPU has {has}"
            )
    if found.cublas and str(torch.version.cuda).startswith("12.9"):  # https://github.com/pytorch/ao/issues/4582
        raise ValueError(f"{said} may crash in CUDA 12.9's cuBLAS: use a torch built for another CUDA")
    if found.only_bf16 and dtype != torch.bfloat16:
        given = str(dtype).removeprefix("torch.")
        raise ValueError(f"{said} needs bf16 weights, and the model's are {given}: use dtype 'bf16'")
    if found.cublas and (why := _refusal(device)):
        raise ValueError(f"{said} needs products of float8 rows, which this GPU's library refuses ({why})")


def multiplies_float8(device: torch.device) -> bool:
    """Whether a device runs products of float8 rows."""
    try:
        require_precision("float8", device, torch.bfloat16)
    except ValueError:
        return False
    return True


@functools.cache
def _refusal(device: torch.device) -> str | None:
    """Why torch refuses products of float8 rows on a GPU, found by one; None if it does not: on sm_120 some wheels do.

    https://github.com/pytorch/pytorch/issues/192707
    """
    try:
        one = torch.ones(16, 16, device=device)
        product(one.to(FLOAT8), one.to(FLOAT8), one[0, 0]).cpu()  # waits: what fails on a device says so late
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # no answer, and not to be kept as one
        raise
    except (RuntimeError, ValueError) as error:
        return in_short(error)
    return None


def require_sizes(
    name: str | None, device: torch.device, shape: ModelConfig, ranks: int, *, of_draft: bool = False
) -> None:
    """ValueError where weights of these sizes are not quantized so, those of a copy's output head included.

    shape: of one of so many ranks, see local_config.
    """
    if name is None:
        return
    said, entry = _said(name, of_draft), precision(name, device)
    split = f" on each of {ranks} processes" if ranks > 1 else ""
    sizes = {place: (entry, *size) for place, size in matrices_of(shape, ranks).items()}
    if of_draft:
        sizes["the output head"] = precision(entry.head, device), -(-shape.vocab_size // ranks), shape.dim
    for place, (found, rows, columns) in sizes.items():
        if columns % found.inputs or rows % found.outputs:
            need = f"inputs that {found.inputs} divides"
            need = need if found.outputs == 1 else f"{need} and outputs that {found.outputs} divides"
            raise ValueError(f"{said} needs {need}, and {place} has {columns:,} and {rows:,}{split}")


def require_copy(name: str, target: str | None) -> None:
    """ValueError where no copy with weights of this precision is made of a target with weights of another one."""
    if target not in (None, name):
        or_so = "" if name == "planes" else "or of that precision, "
        raise ValueError(f"{_said(name, True)} needs a target with plain weights, {or_so}and this one's are {target}")


def matrices_of(shape: ModelConfig, ranks: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of a layer, all of which are quantized.

    shape: of one of so many ranks, see local_config.
    """
    heads, kv_heads = shape.n_heads * shape.head_dim, 2 * shape.n_kv_heads * shape.head_dim
    ffn = shape.ffn_dim // ranks
    return {
        "wqkv": (heads + kv_heads, shape.dim),
        "wo": (shape.dim, heads),
        "w_in": (2 * ffn, shape.dim),
        "w_out": (shape.dim, ffn),
    }


def precision_of(linear: nn.Linear) -> str | None:
    """The name of the precision of its weight, or of a kind of tensor that is none of ours; None: not quantized."""
    int4 = Int4Linear, Int4TilesLinear
    for name, kind in (("float8", Float8Linear), ("int8", Int8Linear), ("int4", int4), ("planes", UpperLinear)):
        if isinstance(linear, kind):
            return name
    held = type(linear.weight.data)
    return held.__name__ if held.__module__.startswith("torchao.") else None


def by_output(linear: nn.Linear) -> tuple[Tensor, Tensor] | None:
    """A weight as numbers [O, I], and what each output's are multiplied with, [O, 1]; None where it is not kept so.

    Of a plain weight both are the weight itself.
    """
    name, weight = precision_of(linear), linear.weight.data
    if isinstance(linear, Int8Linear):
        return (weight, linear.scale.data[:, None]) if type(linear) in (Int8Linear, Float8Linear) else None
    if type(linear) is Int4Linear:
        alone = linear.held._replace(power=torch.ones_like(linear.scale))
        return dequantize_blocks(alone, torch.float32), linear.scale.data[:, None]
    return None if name or isinstance(linear, PackedLinear | PlanesLinear) else (weight, weight)


def plain_weight(linear: nn.Linear, name: str) -> Tensor:
    """The weight [O, I] from which another precision is made; ValueError for one that is quantized already."""
    if isinstance(linear, PackedLinear):
        return unpack(linear.weight.detach())
    if isinstance(linear, PlanesLinear):
        return linear.joined()
    if precision_of(linear):
        raise ValueError(f"quantize {name!r} needs a model with plain weights, and this one's are quantized already")
    return linear.weight.detach()


def bytes_held(module: nn.Module) -> int:
    """Bytes of all parameters as they are kept, those that modules share once."""
    inner = (tensor for p in module.parameters() for tensor in _plain_parts(p.data))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in inner}.values())


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    if not type(tensor).__module__.startswith("torchao."):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from _plain_parts(getattr(tensor, name))


def _said(name: str, of_draft: bool) -> str:
    return f"quantize {name!r}{' of a draft' if of_draft else ''}"
