"""Names to torchao configurations: one call, `quantize_(model, config)`, once the weights are in place."""

from __future__ import annotations

from torch import Tensor, nn

from .packing import PackedLinear


def quantize(model: nn.Module, name: str) -> None:
    """Quantize the linear layers of every block in place; the output head and the embedding keep their dtype.

    "int8": weight-only, one scale per output channel (torchao Int8WeightOnlyConfig). ValueError for a model that is
    quantized already: its weights are changed in place, so two engines cannot share it at different precisions.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if any(type(p.data) is not Tensor for p in model.parameters()):
        raise ValueError(f"quantize {name!r} needs plain weights, and this model is quantized already: load it again")
    if any(isinstance(m, PackedLinear) for m in model.modules()):
        raise ValueError(f"quantize {name!r} needs plain weights, and an engine has packed this model's: load it again")
    configs = {"int8": Int8WeightOnlyConfig}
    quantize_(
        model, configs[name](), filter_fn=lambda m, where: isinstance(m, nn.Linear) and where.startswith("layers.")
    )
