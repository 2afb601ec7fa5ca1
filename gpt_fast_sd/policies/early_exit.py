"""Early exit: the target's first layers draft, with its own norm and head (after LayerSkip, arXiv 2404.16710).

Shapes: B slots, S cache capacity, L layers, K kv heads.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gpt_fast_sd.model import ModelConfig, Transformer
from gpt_fast_sd.tp import Group

from ..quantization.quantize import drafter
from ..state import BatchState
from ..steps import Runner
from .config import DraftConfig
from .costs import ModelSteps
from .model_draft import build_view
from .self_draft import SelfDraft


def exit_after(n: int | None, n_layers: int) -> int:
    """Layers before an exit after n of them (None: half of them); ValueError if that is all of them."""
    n = n or max(1, n_layers // 2)
    if n >= n_layers:
        raise ValueError(f"exit_layers must be below the model's {n_layers} layers for an early exit, got {n}")
    return n


def first_layers(target: Runner, n: int | None) -> Runner:
    """The target's first n layers (None: half of them) over their part of its cache; ValueError if that is all."""
    n = exit_after(n, target.model.config.n_layers)
    return replace(target, model=target.model.first_layers(n), cache=target.cache.first_layers(n))


class EarlyExitDraft(SelfDraft):
    """A self-draft that exits after n layers: it reads and writes only these layers of the target's cache."""

    about = "the first `--exit-layers` layers of the target"
    reads = "their part of its cache, as `--view` says"
    flags = ("view", "budget", "exit_layers", "quantize", "kv_bits")

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> EarlyExitDraft:
        """Build a draft from the target's first layers, through a view of their part of its cache."""
        runner = drafter(first_layers(target, config.exit_layers), config.quantize, on_planes=config.needs_planes)
        (name,) = cls.views(config)
        return cls(runner, build_view(config, name, runner), config.policy)

    @classmethod
    def views(cls, config: DraftConfig) -> tuple[str, ...]:
        """The view named by the configuration's `view`."""
        return (config.view or "streaming",)

    @classmethod
    def model_steps(
        cls, config: DraftConfig, target: ModelConfig, draft_model: ModelConfig | None, gamma: int
    ) -> list[ModelSteps]:
        """One step of the first layers per token."""
        exits = replace(target, n_layers=exit_after(config.exit_layers, target.n_layers))
        return [ModelSteps(exits, gamma, cls.views(config)[0])]

    def device_after_verify(self, state: BatchState, mass: Tensor | None) -> None:
        """Let the view select by the verification's mass in these layers: mass fp32 [L, B, K, S // page]."""
        super().device_after_verify(state, None if mass is None else mass[: self.runner.shape[0]])
